// checkpoint_config.c: config.json, with which Hugging Face folders say what model the weights make.
//
// Llama's implementation grew many options. Each key that would change the arithmetic, and that
// transformer.c does not have, is refused here by its name; a key that only describes is passed over.
#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"

enum { CONFIG_MAX = 1000000 };  // bytes

// ---- reading ----

typedef struct ConfigFile {
    char *path;
    cJSON *json;
} ConfigFile;

static ConfigFile config_open(const char *dir) {
    ConfigFile config = {.path = format_text("%s/config.json", dir)};
    FILE *file = fopen(config.path, "rb");
    CHECK(file, "%s", file_fault("open", config.path));
    char *text = host_alloc(CONFIG_MAX + 1);
    size_t size = fread(text, 1, CONFIG_MAX, file);
    CHECK(!ferror(file), "%s", file_fault("read", config.path));
    CHECK(size < CONFIG_MAX, "%s is too long for a config.json", config.path);
    fclose(file);
    text[size] = '\0';
    config.json = cJSON_ParseWithLengthOpts(text, size + 1, NULL, true);
    free(text);
    CHECK(cJSON_IsObject(config.json), "%s is no JSON object", config.path);
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

// A size: a whole number from 1. `standard` 0: the key must be there.
static int64_t read_size(const ConfigFile *config, const char *key, int64_t standard) {
    const cJSON *item = find(config->json, key);
    if (!item && standard) return standard;
    CHECK(item, "%s does not say \"%s\"", config->path, key);
    double x = cJSON_IsNumber(item) ? item->valuedouble : 0;
    CHECK(x >= 1 && x <= INT32_MAX && x == floor(x), "%s: \"%s\" is no whole number from 1 to %d",
          config->path, key, INT32_MAX);
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

// The key must have this value; absent, it has it where it is the default.
static void need_text(const ConfigFile *config, const cJSON *item, const char *key, const char *value,
                      bool is_default) {
    if (!item && is_default) return;
    CHECK(item, "%s does not say \"%s\"", config->path, key);
    CHECK(cJSON_IsString(item) && !strcmp(item->valuestring, value),
          "%s: \"%s\" is %s; this program trains \"%s\"", config->path, key, cJSON_PrintUnformatted(item),
          value);
}

// What must be absent, null, false or zero.
static void refuse(const ConfigFile *config, const char *key, const char *what) {
    const cJSON *item = find(config->json, key);
    bool off = !item || cJSON_IsFalse(item) || (cJSON_IsNumber(item) && item->valuedouble == 0);
    CHECK(off, "%s: \"%s\" is %s; this program has no %s", config->path, key, cJSON_PrintUnformatted(item),
          what);
}

// transformers 4 has rope_theta at the top and stretches RoPE by rope_scaling; 5 has both in
// rope_parameters.
static double read_rope_theta(const ConfigFile *config) {
    static const char *const nested[] = {"rope_scaling", "rope_parameters"};
    double theta = read_positive(config, config->json, "rope_theta", 10000);
    for (size_t i = 0; i < sizeof nested / sizeof *nested; i++) {
        const cJSON *rope = find(config->json, nested[i]);
        if (!rope) continue;
        const cJSON *type = find(rope, "rope_type") ? find(rope, "rope_type") : find(rope, "type");
        CHECK(cJSON_IsObject(rope) &&
                  (!type || (cJSON_IsString(type) && !strcmp(type->valuestring, "default"))),
              "%s: \"%s\" is %s; this program has RoPE without scaling alone", config->path, nested[i],
              cJSON_PrintUnformatted(rope));
        CHECK(read_positive(config, rope, "partial_rotary_factor", 1) == 1,
              "%s: \"partial_rotary_factor\" is not 1; this program turns whole heads", config->path);
        theta = read_positive(config, rope, "rope_theta", theta);
    }
    return theta;
}

void checkpoint_config(const char *dir, Config *result) {
    ConfigFile file = config_open(dir);
    need_text(&file, find(file.json, "model_type"), "model_type", "llama", false);
    const cJSON *architectures = find(file.json, "architectures");
    if (architectures)
        need_text(&file, cJSON_GetArrayItem(architectures, 0), "architectures", "LlamaForCausalLM", false);
    need_text(&file, find(file.json, "hidden_act"), "hidden_act", "silu", true);
    refuse(&file, "attention_bias", "biases");
    refuse(&file, "mlp_bias", "biases");
    refuse(&file, "attention_dropout", "dropout");
    refuse(&file, "quantization_config", "quantized weights");

    Config c = *result;
    c.layers = read_size(&file, "num_hidden_layers", 0);
    c.hidden = read_size(&file, "hidden_size", 0);
    c.heads = read_size(&file, "num_attention_heads", 0);
    c.kv_heads = read_size(&file, "num_key_value_heads", c.heads);
    c.ffn = read_size(&file, "intermediate_size", 0);
    c.vocab = read_size(&file, "vocab_size", 0);
    c.tied = read_flag(&file, "tie_word_embeddings");
    c.norm_eps = read_positive(&file, file.json, "rms_norm_eps", 1e-6);
    c.rope_theta = read_rope_theta(&file);

    CHECK(c.hidden % c.heads == 0,
          "%s: \"hidden_size\" %lld is not divisible by \"num_attention_heads\" %lld", file.path,
          (long long)c.hidden, (long long)c.heads);
    CHECK(c.heads % c.kv_heads == 0,
          "%s: \"num_attention_heads\" %lld is not divisible by \"num_key_value_heads\" %lld", file.path,
          (long long)c.heads, (long long)c.kv_heads);
    int64_t head_size = c.hidden / c.heads;
    CHECK(head_size % 2 == 0, "%s: a head of %lld is odd, and RoPE turns pairs", file.path,
          (long long)head_size);
    CHECK(read_size(&file, "head_dim", head_size) == head_size,
          "%s: \"head_dim\" is not \"hidden_size\" / \"num_attention_heads\" = %lld", file.path,
          (long long)head_size);
    config_close(&file);
    *result = c;
}

// ---- writing ----

// The fewest digits that read back as the same double. The caller frees it.
static char *number_text(double x) {
    for (int digits = 6;; digits++) {
        char *text = format_text("%.*g", digits, x);
        if (digits >= 17 || strtod(text, NULL) == x) return text;
        free(text);
    }
}

// torch_dtype, rope_theta: the names that transformers 4 knows; 5 reads them too.
const char *checkpoint_write_config(const char *dir, const Config *c, DType dtype) {
    static const char *const torch_names[] = {
        [F64] = "float64", [F32] = "float32", [BF16] = "bfloat16", [F16] = "float16"};
    char *path = format_text("%s/config.json", dir), *eps = number_text(c->norm_eps),
         *theta = number_text(c->rope_theta);
    FILE *file = fopen(path, "w");
    const char *wrong = file ? NULL : file_fault("create", path);
    if (file) {
        fprintf(file,
                "{\n  \"architectures\": [\"LlamaForCausalLM\"],\n  \"model_type\": \"llama\",\n"
                "  \"hidden_size\": %lld,\n  \"intermediate_size\": %lld,\n  \"num_hidden_layers\": %lld,\n"
                "  \"num_attention_heads\": %lld,\n  \"num_key_value_heads\": %lld,\n"
                "  \"vocab_size\": %lld,\n  \"max_position_embeddings\": %lld,\n",
                (long long)c->hidden, (long long)c->ffn, (long long)c->layers, (long long)c->heads,
                (long long)c->kv_heads, (long long)c->vocab, (long long)c->seq);
        fprintf(file,
                "  \"rms_norm_eps\": %s,\n  \"rope_theta\": %s,\n  \"rope_scaling\": null,\n"
                "  \"tie_word_embeddings\": %s,\n  \"torch_dtype\": \"%s\",\n  \"hidden_act\": \"silu\",\n"
                "  \"attention_bias\": false,\n  \"mlp_bias\": false,\n"
                "  \"bos_token_id\": null,\n  \"eos_token_id\": null\n}\n",
                eps, theta, c->tied ? "true" : "false", torch_names[dtype]);
        wrong = file_close_flushed(file, path);
    }
    free(path);
    free(eps);
    free(theta);
    return wrong;
}
