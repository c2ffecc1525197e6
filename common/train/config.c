// config.c: the options that programs share, and the presets of --model.
// Every option has its default until it is typed: a preset is a text of defaults, written as they would be
// typed, and so are a program's own defaults. The later of these wins: the default model, the program's
// defaults, the preset that --model names, the command line. The order on the command line does not matter.
#include "config.h"

#include <stdlib.h>
#include <string.h>

#include "tensor/clock.h"
#include "tensor/device.h"

typedef struct Preset {
    const char *name, *shape;
    double rope_theta, norm_eps;
} Preset;

// Shapes as in each model's published config.json; seq is the context of its pre-training.
static const Preset presets[] = {
    {"default", "layers=4 hidden=128 heads=4 kv-heads=2 ffn=352 vocab=256 seq=128 tied=0", 1e4, 1e-5},
    // The playbook's widget has one whose shape no text gives: this is 8B at a sixteenth of its width.
    {"llama-3-tiny", "layers=4 hidden=256 heads=8 kv-heads=2 ffn=896 vocab=128256 seq=512 tied=0", 5e5,
     1e-5},
    {"smollm-135m", "layers=30 hidden=576 heads=9 kv-heads=3 ffn=1536 vocab=49152 seq=2048 tied=1", 1e4,
     1e-5},
    {"smollm-360m", "layers=32 hidden=960 heads=15 kv-heads=5 ffn=2560 vocab=49152 seq=2048 tied=1", 1e4,
     1e-5},
    {"tinyllama-1.1b", "layers=22 hidden=2048 heads=32 kv-heads=4 ffn=5632 vocab=32000 seq=2048 tied=0",
     1e4, 1e-5},
    {"llama-3.2-1b", "layers=16 hidden=2048 heads=32 kv-heads=8 ffn=8192 vocab=128256 seq=8192 tied=1", 5e5,
     1e-5},
    {"llama-2-7b", "layers=32 hidden=4096 heads=32 kv-heads=32 ffn=11008 vocab=32000 seq=4096 tied=0", 1e4,
     1e-5},
    {"llama-3-8b", "layers=32 hidden=4096 heads=32 kv-heads=8 ffn=14336 vocab=128256 seq=8192 tied=0", 5e5,
     1e-5},
    {"llama-3-70b", "layers=80 hidden=8192 heads=64 kv-heads=8 ffn=28672 vocab=128256 seq=8192 tied=0", 5e5,
     1e-5},
    {"llama-3-405b", "layers=126 hidden=16384 heads=128 kv-heads=8 ffn=53248 vocab=128256 seq=8192 tied=0",
     5e5, 1e-5},
    {"mixtral-8x7b",
     "layers=32 hidden=4096 heads=32 kv-heads=8 ffn=14336 vocab=32000 seq=32768 tied=0 experts=8 top-k=2",
     1e6, 1e-5},
    // The 58 of its 61 blocks that have experts, which have the published sizes; attention is this book's.
    {"deepseek-v3",
     "layers=58 hidden=7168 heads=128 kv-heads=8 head-size=128 ffn=18432 vocab=129280 seq=4096 tied=0 "
     "experts=256 top-k=8 expert-ffn=2048 shared-experts=1 moe=deepseek expert-groups=8 groups-kept=4 "
     "routed-scale=2.5",
     1e4, 1e-6},
    // Vocabulary padded as Megatron does. In this book's block, with a gate and without biases, these sizes
    // make 233 B parameters; `memory` counts GPT's own block, and 175 B.
    {"gpt-3-175b", "layers=96 hidden=12288 heads=96 kv-heads=96 ffn=49152 vocab=51200 seq=2048 tied=1", 1e4,
     1e-5},
};
enum { PRESETS = sizeof presets / sizeof *presets, MAX_OPTIONS = 112 };

static const char *preset_names(void) {
    static char names[256];
    if (!*names)
        for (int i = 0, length = 0; i < PRESETS; i++)
            length += snprintf(names + length, sizeof names - (size_t)length, "%s%s", i ? ", " : "",
                               presets[i].name);
    return names;
}

static const Preset *preset_find(const char *name) {
    for (int i = 0; i < PRESETS; i++)
        if (strcmp(presets[i].name, name) == 0) return &presets[i];
    fatal("--model %s is not known; there are %s", name, preset_names());
}

// The preset that a program's defaults start from, which they may name first, "model=llama-3-8b seq=4096",
// and the rest of them.
static const Preset *preset_of_program(const char **defaults) {
    char name[32] = "";
    int length = 0;
    if (!*defaults || sscanf(*defaults, "model=%31s %n", name, &length) != 1) return &presets[0];
    *defaults += length;
    return preset_find(name);
}

// ---- the table ----

typedef struct Shared {
    unsigned group;
    Option option;
} Shared;

#define INT(name, field, standard, low, high, unit, help) \
    { name, OPTION_INT, &c->field, standard, low, high, unit, help, false }
#define REAL(name, field, standard, low, high, help) \
    { name, OPTION_REAL, &c->field, standard, low, high, "", help, false }
#define TEXT(name, field, standard, holder, help) \
    { name, OPTION_TEXT, &c->field, standard, 0, 0, holder, help, false }
#define OUTPUT(name, field, help) \
    { name, OPTION_OUTPUT, &c->field, NULL, 0, 0, "FILE", help, false }
#define CHOICE(name, field, standard, words, help) \
    { name, OPTION_CHOICE, &c->field, standard, 0, 0, words, help, false }
#define FLAG(name, field, help) \
    { name, OPTION_FLAG, &c->field, NULL, 0, 0, "", help, false }

#define HEADING(text) \
    { text, OPTION_HEADING, NULL, NULL, 0, 0, "", "", false }

// Every option that programs share, pointing into c. The shape's standards come from a preset.
static int shared_options(Shared *table, Config *c) {
    static char model_help[400];
    snprintf(model_help, sizeof model_help, "a published shape, which other flags override: %s",
             preset_names());
    // Only checked here: comm_start reads them from the command line itself.
    static int64_t ranks;
    static double timeout;
    static bool trust_calls;
    const Shared all[] = {
        {CONFIG_MODEL, HEADING("the model")},
        {CONFIG_MODEL, TEXT("model", model, NULL, "NAME", model_help)},
        {CONFIG_MODEL, INT("layers", layers, NULL, 1, LAYERS_MOST, "", "transformer blocks, L")},
        {CONFIG_MODEL, INT("hidden", hidden, NULL, 1, HIDDEN_MOST, "", "width of the model, h")},
        {CONFIG_MODEL, INT("heads", heads, NULL, 1, HEADS_MOST, "",
                           "query heads, a; must divide --hidden unless --head-size is given")},
        {CONFIG_MODEL,
         INT("kv-heads", kv_heads, NULL, 1, HEADS_MOST, "", "key and value heads; must divide --heads")},
        {CONFIG_MODEL, INT("head-size", head_size, "0", 0, HEAD_SIZE_MOST, "",
                           "width of a head, d; 0: --hidden / --heads")},
        {CONFIG_MODEL, INT("ffn", ffn, NULL, 1, FFN_MOST, "", "width of the feed-forward part, f")},
        {CONFIG_MODEL, INT("vocab", vocab, NULL, 1, VOCAB_MOST, "tokens", "vocabulary, v; 256 for bytes")},
        {CONFIG_MODEL, INT("seq", seq, NULL, 1, SEQ_MOST, "tokens", "length of a sequence, s")},
        {CONFIG_MODEL, FLAG("tied", tied, "the output layer uses the embedding's weight")},
        {CONFIG_EXPERTS,
         INT("experts", experts, "0", 0, EXPERTS_MOST, "", "experts in each block; 0: a dense MLP")},
        {CONFIG_EXPERTS, INT("top-k", top_k, "2", 1, TOP_K_MOST, "", "experts per token")},
        {CONFIG_EXPERTS,
         INT("expert-ffn", expert_ffn, "0", 0, FFN_MOST, "", "width of an expert; 0: as --ffn")},
        {CONFIG_EXPERTS, INT("shared-experts", shared_experts, "0", 0, 64, "",
                             "experts that process every token, beside its chosen ones")},
        {CONFIG_EXPERTS,
         CHOICE("moe", moe, "mixtral", "mixtral|deepseek",
                "router: softmax over the chosen logits, or sigmoid scores with groups of experts")},
        {CONFIG_EXPERTS, INT("expert-groups", expert_groups, "1", 1, 64, "",
                             "groups of experts with --moe deepseek; must divide --experts")},
        {CONFIG_EXPERTS, INT("groups-kept", groups_kept, "1", 1, 64, "",
                             "groups from which a token may choose its experts")},
        {CONFIG_EXPERTS, REAL("routed-scale", routed_scale, "1", 1e-6, 1e6,
                              "factor on the weights of the chosen experts, with --moe deepseek")},
        {CONFIG_MODEL, CHOICE("dtype", dtype, "f32", "f64|f32|bf16|f16", "weights and activations")},
        {CONFIG_BATCH | CONFIG_RECOMPUTE, HEADING("a step")},
        {CONFIG_BATCH,
         INT("micro-batch", micro_batch, "8", 1, 1e6, "sequences", "size of a micro-batch, b")},
        {CONFIG_BATCH, INT("grad-acc", grad_acc, "1", 1, 1e6, "", "micro-batches per step")},
        {CONFIG_BATCH, INT("steps", steps, "300", 1, 1e12, "", "optimizer steps")},
        {CONFIG_BATCH, INT("seed", seed, "1", 0, 1e15, "", "seed of weights, samples and masks")},
        {CONFIG_BATCH,
         TEXT("data", data, NULL, "FILE",
              "a text file, or a token file in llm.c's format; default: $ULTRASCALE_DATA, or this "
              "book's sources")},
        {CONFIG_RECOMPUTE,
         CHOICE("recompute", recompute, "none", "none|selective|full", "what backward recomputes")},
        {CONFIG_OPTIMIZER, HEADING("the optimizer")},
        {CONFIG_OPTIMIZER,
         CHOICE("optimizer", optimizer, "adamw", "adamw|sgd", "how the weights are updated")},
        {CONFIG_OPTIMIZER, REAL("lr", lr, "3e-3", 0, 1e3, "peak learning rate")},
        {CONFIG_OPTIMIZER,
         REAL("weight-decay", weight_decay, "0.1", 0, 1e3, "weight decay, on matrices only, not on norms")},
        {CONFIG_OPTIMIZER,
         REAL("clip", clip, "1", 0, 1e9, "clip the gradient to this norm; 0: no clipping")},
        {CONFIG_OPTIMIZER,
         INT("warmup", warmup, "20", 0, 1e12, "steps", "steps until the peak learning rate")},
        {CONFIG_RANKS | CONFIG_DP | CONFIG_PP | CONFIG_CP | CONFIG_TP | CONFIG_EP, HEADING("the ranks")},
        {CONFIG_RANKS,
         {"ranks", OPTION_INT, &ranks, "0", 0, 4096, "",
          "number of processes; 0: as many as show the technique best", false}},
        {CONFIG_DP,
         INT("dp", dp, "0", 0, 4096, "ranks", "data parallelism; 0: all ranks that the other axes leave")},
        {CONFIG_PP, INT("pp", pp, "1", 0, 4096, "ranks",
                        "pipeline parallelism; 0: all ranks that the other axes leave")},
        {CONFIG_CP,
         INT("cp", cp, "1", 0, 4096, "ranks",
             "context parallelism, which shards sequences; 0: all ranks that the other axes leave")},
        {CONFIG_TP, INT("tp", tp, "1", 0, 4096, "ranks",
                        "tensor parallelism, which shards layers; 0: all ranks that the other axes leave")},
        {CONFIG_EP, INT("ep", ep, "1", 1, 4096, "ranks", "expert parallelism, which shards the experts")},
        {CONFIG_RANKS,
         {"timeout", OPTION_REAL, &timeout, "300", 0.001, 1e9, "",
          "seconds after which a wait counts as a deadlock", false}},
        {CONFIG_RANKS,
         {"trust-calls", OPTION_FLAG, &trust_calls, NULL, 0, 0, "",
          "do not check that ranks make matching calls (common/README.md)", false}},
        {CONFIG_CLOCK | CONFIG_CLUSTER | CONFIG_TIMELINE, HEADING("the model clock")},
        {CONFIG_CLOCK | CONFIG_CLUSTER,
         TEXT("machine", machine, "dgx-h100", machine_names(), "machine that the model clock simulates")},
        {CONFIG_CLUSTER, INT("gpus-per-node", gpus_per_node, "0", 0, 1e6, "",
                             "GPUs per node on the model clock; 0: as --machine has")},
        {CONFIG_CLUSTER,
         REAL("compute-efficiency", compute_efficiency, "1", 0.001, 1,
              "fraction of the machine's peak rates that operations reach on the model clock")},
        {CONFIG_CLUSTER, REAL("network-efficiency", network_efficiency, "1", 0.001, 1,
                              "fraction of the links' bandwidth that messages reach on the model clock")},
        {CONFIG_TIMELINE,
         FLAG("timeline", timeline,
              "show compute and communication of one step on the model clock (of the last but "
              "one, if there are 3 or more)")},
        {CONFIG_TIMELINE, OUTPUT("timeline-svg", timeline_svg, "the same as an SVG picture")},
        {CONFIG_TRACE, OUTPUT("trace", trace, "write a trace for ui.perfetto.dev")},
        {CONFIG_FILES, HEADING("checkpoints")},
        {CONFIG_FILES, TEXT("init", init, NULL, "DIR", "start from the weights of this checkpoint")},
        {CONFIG_FILES, TEXT("save", save, NULL, "DIR", "write checkpoints here")},
        {CONFIG_FILES, INT("save-every", save_every, "0", 0, 1e12, "steps",
                           "steps between checkpoints; 0: only the last")},
        {CONFIG_FILES, TEXT("resume", resume, NULL, "DIR", "continue the run of this checkpoint")},
        {CONFIG_REPORT | CONFIG_CHECK, HEADING("the report")},
        {CONFIG_REPORT, OUTPUT("json", json, "write every figure at full precision")},
        {CONFIG_CHECK, FLAG("no-check", no_check, "train without the comparison with the baseline")},
        {CONFIG_CHECK,
         FLAG("verbose", verbose, "show every count and comparison, and the run with ignored labels")},
    };
    _Static_assert(F64 == 0 && F32 == 1 && BF16 == 2 && F16 == 3, "--dtype lists the dtypes in order");
    _Static_assert(OPTIMIZER_ADAMW == 0 && OPTIMIZER_SGD == 1, "--optimizer lists the kinds in order");
    _Static_assert(sizeof all / sizeof *all <= MAX_OPTIONS, "the table fits");
    memcpy(table, all, sizeof all);
    return sizeof all / sizeof *all;
}

// Takes "layers=2 dtype=f64" as standard values. Splits the words and points into them.
static void change_standards(Shared *table, int count, Option *own, int own_count, char *words) {
    for (char *word = strtok(words, " "); word; word = strtok(NULL, " ")) {
        char *value = strchr(word, '=');
        CHECK(value, "defaults: %s has no value", word);
        *value++ = '\0';
        Option *option = NULL;
        for (int i = 0; i < count && !option; i++)
            if (!strcmp(table[i].option.name, word)) option = &table[i].option;
        for (int i = 0; i < own_count && !option; i++)
            if (!strcmp(own[i].name, word)) option = &own[i];
        CHECK(option, "defaults: there is no --%s", word);
        // The value of a text must outlive this call; these words do not.
        CHECK(option->type != OPTION_TEXT, "defaults: --%s is a text", word);
        option->standard = value;
    }
}

// Where the parser puts the value of an option that becomes a setting.
typedef union Value {
    int64_t integer;
    double real;
    const char *text;
    int choice;
    bool flag;
} Value;

static void add_setting(Config *c, const Option *option, const Value *value) {
    config_set(c, option->name,
               option->type == OPTION_INT      ? (double)value->integer
               : option->type == OPTION_REAL   ? value->real
               : option->type == OPTION_CHOICE ? value->choice
               : option->type == OPTION_FLAG   ? value->flag
                                               : 0);
    Setting *setting = &c->setting[c->settings - 1];
    setting->given = option->given;
    if (option->type == OPTION_TEXT || option->type == OPTION_OUTPUT) setting->text = value->text;
}

// A program's flags: its own, under a heading unless they bring one, then the shared ones of its groups.
static int flags_of_program(Option *table, const Option *own, int own_count, const Shared *shared,
                            int shared_count, unsigned groups) {
    int count = 0;
    if (own_count > 0 && own[0].type != OPTION_HEADING) table[count++] = (Option)HEADING("this program");
    for (int i = 0; i < own_count; i++) table[count++] = own[i];
    for (int i = 0; i < shared_count; i++)
        if (shared[i].group & groups) {
            CHECK(count < MAX_OPTIONS, "option table: more than %d options", MAX_OPTIONS);
            table[count++] = shared[i].option;
        }
    return count;
}

// What matters besides the values: which flags were typed. Fatal where they have no effect.
static void note_typed(Config *c, const Option *table, int count) {
    const char *shape = "model layers hidden heads kv-heads head-size ffn vocab tied experts";
    const char *of_experts = "top-k expert-ffn shared-experts moe expert-groups groups-kept routed-scale";
    c->seq_given = option_given(table, count, "seq");
    c->shape_given = option_given(table, count, shape) || option_given(table, count, of_experts);
    if (!c->experts && !c->init && !c->resume) options_need(table, count, of_experts, "--experts");
    if (c->optimizer == OPTIMIZER_SGD)
        options_need(table, count, "weight-decay warmup", "--optimizer adamw");
}

Config config_parse(int argc, char **argv, const char *purpose, unsigned groups, const char *defaults,
                    Option *own, int own_count) {
    Config c = {.model = presets[0].name, .beta1 = 0.9, .beta2 = 0.95, .adam_eps = 1e-8};
    Shared shared[MAX_OPTIONS];
    int shared_count = shared_options(shared, &c);

    const char *model = groups & CONFIG_MODEL ? option_typed(argc, argv, "--model") : NULL;
    if (model && !*model) model = NULL;  // which the parser refuses
    const Preset *standard = preset_of_program(&defaults), *preset = model ? preset_find(model) : standard;
    Option owned[MAX_OPTIONS];
    Value value[MAX_OPTIONS] = {{0}};
    CHECK(own_count < MAX_OPTIONS, "option table: more than %d options", MAX_OPTIONS);
    for (int i = 0; i < own_count; i++) {
        owned[i] = own[i];
        if (!own[i].target) owned[i].target = &value[i];
    }
    char *layer[] = {format_text("%s", standard->shape), format_text("%s", defaults ? defaults : ""),
                     format_text("%s", model ? preset->shape : "")};
    for (int i = 0; i < 3; i++) change_standards(shared, shared_count, owned, own_count, layer[i]);

    // First every field gets its default, even those without a flag here; then come the program's flags.
    Option table[MAX_OPTIONS];
    for (int i = 0; i < shared_count; i++) table[i] = shared[i].option;
    char *no_flags[] = {(char *)base_program(), NULL};
    options_parse(1, no_flags, purpose, table, shared_count);
    int count = flags_of_program(table, owned, own_count, shared, shared_count, groups);
    options_parse(argc, argv, purpose, table, count);
    bool takes_ranks = (groups & CONFIG_RANKS) || !(groups & CONFIG_REPORT);  // or is no program of its own
    CHECK(takes_ranks || base_launched() == 1,
          "this program is for one device: start one of it, and not %d", base_launched());
    for (int i = 0; i < own_count; i++) {
        if (own[i].type == OPTION_HEADING) continue;
        own[i].given = option_given(table, count, own[i].name);
        if (!own[i].target) add_setting(&c, &own[i], &value[i]);
    }
    note_typed(&c, table, count);
    for (int i = 0; i < 3; i++) free(layer[i]);
    c.model = preset->name;
    c.rope = (Rope){.theta = preset->rope_theta};
    c.norm_eps = preset->norm_eps;
    config_check(&c);
    CHECK(!c.experts || (groups & CONFIG_EXPERTS) || !(groups & CONFIG_MODEL),
          "--model %s has experts, and this program has only dense layers: take a program of "
          "06_expert_parallel",
          c.model);
    if (groups & (CONFIG_CLOCK | CONFIG_CLUSTER)) clock_set_machine(machine_find(c.machine));
    if (groups & CONFIG_CLUSTER)
        clock_set_cluster((int)c.gpus_per_node, c.compute_efficiency, c.network_efficiency);
    return c;
}

Config config_default(const char *defaults) {
    char *no_flags[] = {(char *)base_program(), NULL};
    return config_parse(1, no_flags, "", 0, defaults, NULL, 0);
}

Config config_of_model(const char *model, const char *defaults) {
    char *text = format_text("model=%s %s", model, defaults);
    Config c = config_default(text);
    free(text);
    return c;
}

// ---- settings ----

static const Setting *find_setting(const Config *c, const char *name) {
    for (int i = 0; i < c->settings; i++)
        if (!strcmp(c->setting[i].name, name)) return &c->setting[i];
    return NULL;
}

bool config_has(const Config *c, const char *name) { return find_setting(c, name) != NULL; }

bool config_given(const Config *c, const char *name) {
    const Setting *setting = find_setting(c, name);
    return setting && setting->given;
}

double config_number(const Config *c, const char *name) {
    const Setting *setting = find_setting(c, name);
    return setting ? setting->number : 0;
}

const char *config_text(const Config *c, const char *name) {
    const Setting *setting = find_setting(c, name);
    return setting ? setting->text : NULL;
}

static Setting *setting_of(Config *c, const char *name) {
    Setting *setting = (Setting *)find_setting(c, name);
    if (!setting) {
        CHECK(c->settings < MAX_SETTINGS, "--%s: more than %d options of techniques", name, MAX_SETTINGS);
        setting = &c->setting[c->settings++];
        *setting = (Setting){.name = name};
    }
    return setting;
}

void config_set(Config *c, const char *name, double number) { setting_of(c, name)->number = number; }

void config_set_text(Config *c, const char *name, const char *text) { setting_of(c, name)->text = text; }

// ---- printing ----

void config_print(const Config *c) {
    int64_t parameters = config_parameters(c), active = config_active_parameters(c);
    bool billions = parameters >= 1000000000;
    double unit = billions ? 1e9 : 1e6;
    char width[32] = "";
    if (c->head_size) snprintf(width, sizeof width, " d=%ld", c->head_size);
    say("L=%ld h=%ld a=%ld kv=%ld%s f=%ld v=%ld s=%ld %s, %s, b=%ld x %ld, %.2f %c parameters\n", c->layers,
        c->hidden, c->heads, c->kv_heads, width, c->ffn, c->vocab, c->seq, c->tied ? "tied" : "untied",
        dtype_name((DType)c->dtype), c->micro_batch, c->grad_acc, (double)parameters / unit,
        billions ? 'B' : 'M');
    if (c->experts)
        say("%ld experts of f=%ld, top %ld, %ld shared, routed as in %s; a token passes %.2f %c parameters",
            c->experts, config_expert_width(c), c->top_k, c->shared_experts,
            c->moe == MOE_MIXTRAL ? "Mixtral" : "DeepSeek-V3 (attention is Llama's)", (double)active / unit,
            billions ? 'B' : 'M');
    if (!device_is_dry_run()) say("%s", backend_text());
}
