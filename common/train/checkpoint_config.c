// checkpoint_config.c: config.json, which says in a Hugging Face folder to what model the weights belong.
// Llama's implementation has many options. Each key that would change the arithmetic in a way that
// transformer.c does not support is refused by name; a key that is only descriptive is ignored. So is
// pad_token_id, whose row of the embedding transformers does not train: data without padding has no use for
// one. Mixtral's is Llama's with experts.
#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint_inside.h"
#include "files.h"

enum { CONFIG_MAX = 1000000 };  // bytes

// ---- reading ----

typedef struct ConfigFile {
    char *path;
    cJSON *json;
} ConfigFile;

// A key that occurs twice might be read one way here and another way elsewhere.
static void check_keys(const ConfigFile *config, const cJSON *object) {
    int count = cJSON_GetArraySize(object), keys = 0;
    char **key = host_alloc(count * sizeof *key);
    for (const cJSON *item = object->child; item; item = item->next) {
        if (item->string) key[keys++] = item->string;
        if (item->child) check_keys(config, item);
    }
    const char *twice = name_twice(key, keys);
    CHECK(!twice, "%s: \"%s\" stands there twice", config->path, printable(twice));
    free(key);
}

static ConfigFile config_open(const char *dir) {
    ConfigFile config = {.path = format_text("%s/config.json", dir)};
    char *text;
    size_t size;
    const char *wrong = input_text(config.path, CONFIG_MAX, &text, &size);
    CHECK(!wrong, "%s", wrong);
    config.json = cJSON_ParseWithLengthOpts(text, size + 1, NULL, true);
    free(text);
    CHECK(cJSON_IsObject(config.json), "%s is no JSON object", config.path);
    check_keys(&config, config.json);
    return config;
}

static void config_close(ConfigFile *config) {
    cJSON_Delete(config->json);
    free(config->path);
}

// NULL where the key is absent or null: both mean the default.
static const cJSON *find(const cJSON *object, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsNull(item) ? NULL : item;
}

// A size: a whole number from 1 to `most`. `standard` 0: the key must be there.
static int64_t read_size(const ConfigFile *config, const char *key, int64_t most, int64_t standard) {
    const cJSON *item = find(config->json, key);
    if (!item && standard) return standard;
    CHECK(item, "%s does not say \"%s\"", config->path, key);
    double x = cJSON_IsNumber(item) ? item->valuedouble : 0;
    CHECK(x >= 1 && x <= (double)most && x == floor(x), "%s: \"%s\" is no whole number from 1 to %lld",
          config->path, key, (long long)most);
    return (int64_t)x;
}

static double read_positive(const ConfigFile *config, const cJSON *object, const char *key,
                            double standard) {
    const cJSON *item = find(object, key);
    if (!item) return standard;
    double x = cJSON_IsNumber(item) ? item->valuedouble : 0;
    CHECK(x > 0 && isfinite(x), "%s: \"%s\" is no positive number", config->path, key);
    return x;
}

static bool read_flag(const ConfigFile *config, const char *key) {
    const cJSON *item = find(config->json, key);
    CHECK(!item || cJSON_IsBool(item), "%s: \"%s\" is neither true nor false", config->path, key);
    return cJSON_IsTrue(item);
}

static bool is_text(const cJSON *item, const char *text) {
    return cJSON_IsString(item) && !strcmp(item->valuestring, text);
}

// The key must have this value; it may be absent if the value is the default.
static void need_text(const ConfigFile *config, const cJSON *item, const char *key, const char *value,
                      bool is_default) {
    if (!item && is_default) return;
    CHECK(item, "%s does not say \"%s\"", config->path, key);
    CHECK(is_text(item, value), "%s: \"%s\" is %s; this program trains \"%s\"", config->path, key,
          cJSON_PrintUnformatted(item), value);
}

// What must be absent, null, false or zero.
static void refuse(const ConfigFile *config, const char *key, const char *what) {
    const cJSON *item = find(config->json, key);
    bool off = !item || cJSON_IsFalse(item) || (cJSON_IsNumber(item) && item->valuedouble == 0);
    CHECK(off, "%s: \"%s\" is %s; this program has no %s", config->path, key, cJSON_PrintUnformatted(item),
          what);
}

static double need_positive(const ConfigFile *config, const cJSON *object, const char *key) {
    CHECK(find(object, key), "%s: a RoPE of type \"llama3\" does not say \"%s\"", config->path, key);
    return read_positive(config, object, key, 0);
}

static void read_llama3(const ConfigFile *config, const cJSON *json, Rope *rope) {
    rope->factor = need_positive(config, json, "factor");
    rope->low = need_positive(config, json, "low_freq_factor");
    rope->high = need_positive(config, json, "high_freq_factor");
    rope->original = need_positive(config, json, "original_max_position_embeddings");
    CHECK(rope->original == floor(rope->original) && rope->original <= INT32_MAX,
          "%s: \"original_max_position_embeddings\" is no whole number from 1 to %d", config->path,
          INT32_MAX);
    // transformers 4 takes RoPE's own, and 5 the one beside it
    double beside = read_positive(config, config->json, "original_max_position_embeddings", rope->original);
    CHECK(beside == rope->original,
          "%s: \"original_max_position_embeddings\" is %g, and %g among the settings of RoPE", config->path,
          beside, rope->original);
    CHECK(rope->low < rope->high, "%s: \"low_freq_factor\" %g is not below \"high_freq_factor\" %g",
          config->path, rope->low, rope->high);
}

// transformers 4 has rope_theta at the top and stretches RoPE by rope_scaling; 5 has both in
// rope_parameters.
static Rope read_rope(const ConfigFile *config, double standard) {
    static const char *const nested[] = {"rope_scaling", "rope_parameters"};
    Rope result = {.theta = read_positive(config, config->json, "rope_theta", standard)};
    CHECK(!find(config->json, nested[0]) || !find(config->json, nested[1]),
          "%s has both \"%s\" and \"%s\": leave in it the one that counts", config->path, nested[0],
          nested[1]);
    CHECK(read_positive(config, config->json, "partial_rotary_factor", 1) == 1,
          "%s: \"partial_rotary_factor\" is not 1; this program turns whole heads", config->path);
    for (size_t i = 0; i < sizeof nested / sizeof *nested; i++) {
        const cJSON *rope = find(config->json, nested[i]);
        if (!rope) continue;
        const cJSON *older = find(rope, "type"), *newer = find(rope, "rope_type");
        CHECK(!older || !newer || cJSON_Compare(older, newer, true),
              "%s: \"%s\" has a \"type\" and another \"rope_type\": leave in it the one that counts",
              config->path, nested[i]);
        const cJSON *type = newer ? newer : older;
        const char *name = !type ? "default" : cJSON_IsString(type) ? type->valuestring : "";
        bool stretched = !strcmp(name, "llama3");
        CHECK(cJSON_IsObject(rope) && (stretched || !strcmp(name, "default")),
              "%s: \"%s\" is %s; this program has RoPE of the types \"default\" and \"llama3\"",
              config->path, nested[i], cJSON_PrintUnformatted(rope));
        CHECK(read_positive(config, rope, "partial_rotary_factor", 1) == 1,
              "%s: \"partial_rotary_factor\" is not 1; this program turns whole heads", config->path);
        result.theta = read_positive(config, rope, "rope_theta", result.theta);
        if (stretched) read_llama3(config, rope, &result);
    }
    return result;
}

// What the folder that was read last contains beyond what a Config holds.
static struct {
    cJSON *config;
    char *generation;  // generation_config.json; NULL: there is none
} kept;

static void keep(const char *dir, const ConfigFile *file) {
    cJSON_Delete(kept.config);
    free(kept.generation);
    kept.config = cJSON_Duplicate(file->json, true);
    char *path = format_text("%s/generation_config.json", dir);
    size_t size;
    if (input_text(path, CONFIG_MAX, &kept.generation, &size)) kept.generation = NULL;
    free(path);
}

// A block's experts, which have the whole feed-forward part; their defaults are those of transformers.
static void read_experts(const ConfigFile *file, Config *c) {
    refuse(file, "sliding_window", "sliding windows");
    refuse(file, "router_jitter_noise", "noise in routing");
    refuse(file, "output_router_logits", "loss of the router in a folder");
    c->experts = read_size(file, "num_local_experts", EXPERTS_MOST, 8);
    c->top_k = read_size(file, "num_experts_per_tok", TOP_K_MOST, 2);
    c->expert_ffn = c->shared_experts = 0;
    c->moe = MOE_MIXTRAL;
    c->expert_groups = c->groups_kept = 1;
    c->routed_scale = 1;
    CHECK(c->top_k <= c->experts,
          "%s: \"num_experts_per_tok\" %lld is more than \"num_local_experts\" %lld", file->path,
          (long long)c->top_k, (long long)c->experts);
}

void checkpoint_config(const char *dir, Config *result) {
    ConfigFile file = config_open(dir);
    const cJSON *type = find(file.json, "model_type");
    bool mixtral = is_text(type, "mixtral");
    CHECK(type, "%s does not say \"model_type\"", file.path);
    CHECK(mixtral || is_text(type, "llama"),
          "%s: \"model_type\" is %s; this program trains \"llama\" and \"mixtral\"", file.path,
          cJSON_PrintUnformatted(type));
    const cJSON *architectures = find(file.json, "architectures");
    if (architectures)
        need_text(&file, architectures->child ? architectures->child : architectures,
                  "architectures", mixtral ? "MixtralForCausalLM" : "LlamaForCausalLM", false);
    const cJSON *act = find(file.json, "hidden_act");
    if (!is_text(act, "swish"))  // another name of it
        need_text(&file, act, "hidden_act", "silu", true);
    refuse(&file, "attention_bias", "biases");
    refuse(&file, "mlp_bias", "biases");
    refuse(&file, "attention_dropout", "dropout");
    refuse(&file, "quantization_config", "quantized weights");
    refuse(&file, "per_layer_config", "layers of different kinds");
    refuse(&file, "transformers_weights", "weights but " MODEL_FILE);
    // Not by find: transformers takes null for false.
    const cJSON *causal = cJSON_GetObjectItemCaseSensitive(file.json, "is_causal");
    CHECK(!causal || cJSON_IsTrue(causal),
          "%s: \"is_causal\" is not true; this program's attention is causal", file.path);

    Config c = *result;
    c.layers = read_size(&file, "num_hidden_layers", LAYERS_MOST, 0);
    c.hidden = read_size(&file, "hidden_size", HIDDEN_MOST, 0);
    c.heads = read_size(&file, "num_attention_heads", HEADS_MOST, 0);
    bool null = cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(file.json, "num_key_value_heads"));
    c.kv_heads = read_size(&file, "num_key_value_heads", HEADS_MOST, mixtral && !null ? 8 : c.heads);
    c.ffn = read_size(&file, "intermediate_size", FFN_MOST, 0);
    c.vocab = read_size(&file, "vocab_size", VOCAB_MOST, 0);
    c.tied = read_flag(&file, "tie_word_embeddings");
    c.norm_eps = read_positive(&file, file.json, "rms_norm_eps", mixtral ? 1e-5 : 1e-6);
    c.rope = read_rope(&file, mixtral ? 1e6 : 1e4);
    c.experts = 0;
    if (mixtral) read_experts(&file, &c);

    CHECK(c.hidden % c.heads == 0 || find(file.json, "head_dim"),
          "%s: \"hidden_size\" %lld is not divisible by \"num_attention_heads\" %lld", file.path,
          (long long)c.hidden, (long long)c.heads);
    CHECK(c.heads % c.kv_heads == 0,
          "%s: \"num_attention_heads\" %lld is not divisible by \"num_key_value_heads\" %lld", file.path,
          (long long)c.heads, (long long)c.kv_heads);
    c.head_size = read_size(&file, "head_dim", HEAD_SIZE_MOST, c.hidden / c.heads);
    CHECK(c.head_size % 2 == 0, "%s: a head of %lld is odd, and RoPE turns pairs", file.path,
          (long long)c.head_size);
    if (c.head_size * c.heads == c.hidden) c.head_size = 0;
    keep(dir, &file);
    config_close(&file);
    *result = c;
}

// ---- writing ----

char *number_text(double x) {
    for (int digits = 6;; digits++) {
        char *text = format_text("%.*g", digits, x);
        if (digits >= 17 || strtod(text, NULL) == x) return text;
        free(text);
    }
}

static void put(cJSON *object, const char *key, cJSON *value) {
    if (cJSON_GetObjectItemCaseSensitive(object, key))
        cJSON_ReplaceItemInObjectCaseSensitive(object, key, value);
    else cJSON_AddItemToObject(object, key, value);
}

static void put_count(cJSON *object, const char *key, int64_t count) {
    put(object, key, cJSON_CreateNumber((double)count));
}

// With a point or an exponent, so that Python reads a float: transformers refuses integers for some keys.
static void put_real(cJSON *object, const char *key, double x) {
    char *digits = number_text(x), *text = format_text("%s%s", digits, strpbrk(digits, ".e") ? "" : ".0");
    put(object, key, cJSON_CreateRaw(text));
    free(digits);
    free(text);
}

// Both releases of transformers read this form.
static void put_rope(cJSON *object, Rope rope) {
    bool stretched = rope.factor != 0 && rope.factor != 1;
    cJSON *scaling = stretched ? cJSON_CreateObject() : cJSON_CreateNull();
    put_real(object, "rope_theta", rope.theta);
    if (stretched) {
        put(scaling, "rope_type", cJSON_CreateString("llama3"));
        put_real(scaling, "factor", rope.factor);
        put_real(scaling, "low_freq_factor", rope.low);
        put_real(scaling, "high_freq_factor", rope.high);
        put_count(scaling, "original_max_position_embeddings", (int64_t)rope.original);
    }
    put(object, "rope_scaling", scaling);
}

// Sets the key only if it is not there yet.
static void put_default(cJSON *object, const char *key, cJSON *value) {
    if (cJSON_GetObjectItemCaseSensitive(object, key)) cJSON_Delete(value);
    else cJSON_AddItemToObject(object, key, value);
}

// One line for each key, as transformers writes them. The caller frees it.
static char *lines_of(const cJSON *object) {
    char *text = NULL;
    size_t length;
    FILE *out = open_memstream(&text, &length);
    CHECK(out, "out of host memory for a config.json");
    for (const cJSON *item = object->child; item; item = item->next) {
        cJSON *key = cJSON_CreateString(item->string);
        char *name = cJSON_PrintUnformatted(key), *value = cJSON_PrintUnformatted(item);
        fprintf(out, "%s\n  %s: %s", item == object->child ? "{" : ",", name, value);
        cJSON_free(name);
        cJSON_free(value);
        cJSON_Delete(key);
    }
    fputs("\n}\n", out);
    CHECK(fclose(out) == 0, "out of host memory for a config.json");
    return text;
}

static const char *write_text(const char *dir, const char *name, const char *text) {
    char *path = format_text("%s/%s", dir, name);
    FILE *file = fopen(path, "w");
    const char *wrong = file ? NULL : file_fault("create", path);
    if (file) {
        fputs(text, file);
        wrong = file_close_flushed(file, path);
    }
    free(path);
    return wrong;
}

// torch_dtype, rope_theta: the names that transformers 4 knows; 5 reads them too.
const char *checkpoint_write_config(const char *dir, const Config *c, DType dtype) {
    static const char *const torch_names[] = {
        [F64] = "float64", [F32] = "float32", [BF16] = "bfloat16", [F16] = "float16"};
    cJSON *json = kept.config ? cJSON_Duplicate(kept.config, true) : cJSON_CreateObject();
    const cJSON *longest = cJSON_GetObjectItemCaseSensitive(json, "max_position_embeddings");
    bool longer = cJSON_IsNumber(longest) && longest->valuedouble > (double)c->seq &&
                  longest->valuedouble <= INT32_MAX;
    int64_t positions = longer ? (int64_t)longest->valuedouble : c->seq;
    const char *architecture = c->experts ? "MixtralForCausalLM" : "LlamaForCausalLM";
    put_default(json, "architectures", cJSON_CreateStringArray(&architecture, 1));
    put_default(json, "model_type", cJSON_CreateString(c->experts ? "mixtral" : "llama"));
    put_count(json, "hidden_size", c->hidden);
    put_count(json, "intermediate_size", c->experts ? config_expert_width(c) : c->ffn);
    if (c->experts) {
        put_count(json, "num_local_experts", c->experts);
        put_count(json, "num_experts_per_tok", c->top_k);
        put(json, "sliding_window", cJSON_CreateNull());
        put(json, "output_router_logits", cJSON_CreateFalse());
        put_real(json, "router_jitter_noise", 0);
    }
    put_count(json, "num_hidden_layers", c->layers);
    put_count(json, "num_attention_heads", c->heads);
    put_count(json, "num_key_value_heads", c->kv_heads);
    put_count(json, "head_dim", config_head_size(c));
    put_count(json, "vocab_size", c->vocab);
    put_count(json, "max_position_embeddings", positions);
    put_real(json, "rms_norm_eps", c->norm_eps);
    put_rope(json, c->rope);
    put(json, "tie_word_embeddings", cJSON_CreateBool(c->tied));
    put(json, "torch_dtype", cJSON_CreateString(torch_names[dtype]));
    put(json, "hidden_act", cJSON_CreateString("silu"));
    if (!c->experts) {
        put_default(json, "attention_bias", cJSON_CreateFalse());
        put_default(json, "mlp_bias", cJSON_CreateFalse());
    }
    put_default(json, "bos_token_id", cJSON_CreateNull());
    put_default(json, "eos_token_id", cJSON_CreateNull());
    // Other names of what was just set, which would contradict it.
    static const char *const others[] = {"dtype", "rope_parameters"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        cJSON_DeleteItemFromObjectCaseSensitive(json, others[i]);
    char *text = lines_of(json);
    const char *wrong = write_text(dir, "config.json", text);
    if (!wrong && kept.generation) wrong = write_text(dir, "generation_config.json", kept.generation);
    free(text);
    cJSON_Delete(json);
    return wrong;
}
