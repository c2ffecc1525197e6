// config.h: what defines a run: the model's shape, the batch, the optimizer; the options that all programs
// share, and the presets of --model.
#ifndef CONFIG_H
#define CONFIG_H

#include "base.h"
#include "tensor/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum Recompute { RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL } Recompute;
typedef enum OptimizerKind { OPTIMIZER_ADAMW, OPTIMIZER_SGD } OptimizerKind;
// How a mixture of experts routes: softmax over the logits of the chosen; normalized sigmoid scores.
typedef enum MoeKind { MOE_MIXTRAL, MOE_DEEPSEEK } MoeKind;

// The value of an option that belongs to a technique; only the technique knows what it means.
typedef struct Setting {
    const char *name;  // of the option: "bucket-mb"
    double number;     // of INT, REAL, CHOICE (the index) and FLAG (0 or 1)
    const char *text;  // of TEXT
    bool given;        // it was typed
} Setting;
enum { MAX_SETTINGS = 64 };

// Bounds of a model's sizes, typed or read from a config.json.
enum {
    LAYERS_MOST = 100000,
    HIDDEN_MOST = 1000000,
    HEADS_MOST = 100000,
    HEAD_SIZE_MOST = 100000,
    FFN_MOST = 10000000,
    VOCAB_MOST = 10000000,
    SEQ_MOST = 100000000,
    EXPERTS_MOST = 4096,
    TOP_K_MOST = 64
};

typedef struct Config {
    // model (the playbook's letters: L h a f v s)
    const char *model;
    int64_t layers, hidden, heads, kv_heads, ffn, vocab, seq;
    // In place of the MLP: `experts` experts, of which each token takes top_k, and shared_experts, which all
    // tokens take. experts = 0: a plain MLP. An expert's width is expert_ffn, or ffn if that is 0.
    int64_t experts, top_k, expert_ffn, shared_experts;
    int moe;  // MoeKind
    // MOE_DEEPSEEK: a token's experts are in the best groups_kept of expert_groups
    int64_t expert_groups, groups_kept;
    double routed_scale;  // MOE_DEEPSEEK: multiplies the weights of the chosen
    bool tied;
    // Whether a flag of the shape was typed, which must not contradict a checkpoint's; whether --seq was.
    bool shape_given, seq_given;
    int64_t head_size;  // d if it is not h / a; else 0
    Rope rope;
    double norm_eps;
    int dtype;  // DType of parameters and activations
    // batch: micro_batch (b) sequences at once, grad_acc times per step
    int64_t micro_batch, grad_acc, steps;
    // optimizer
    int optimizer;  // OptimizerKind
    double lr, weight_decay, beta1, beta2, adam_eps, clip;
    int64_t warmup;
    int recompute;  // Recompute
    int64_t seed;
    const char *data, *init, *save, *resume;
    int64_t save_every;
    const struct Record *beside;   // the run beside whose logits this one's are measured (bound.c), or NULL
    const struct Record *follows;  // the run whose choices of experts this one repeats (report.h), or NULL
    // reports
    bool no_check, verbose;
    const char *json, *trace, *machine, *timeline_svg;
    bool timeline;
    // degrees of the mesh; 0: all ranks that the others leave (of several zeros, the first of tp, cp, pp, dp)
    int64_t dp, pp, cp, tp, ep;
    // values of the techniques' options, by name
    Setting setting[MAX_SETTINGS];
    int settings;
    // the model clock's cluster
    int64_t gpus_per_node;  // 0: the machine's
    double compute_efficiency, network_efficiency;
} Config;

// Groups of shared options; a program names those that it has.
enum {
    CONFIG_MODEL =
        1,  // --model --layers --hidden --heads --kv-heads --head-size --ffn --vocab --seq --tied --dtype
    CONFIG_BATCH = 2,       // --micro-batch --grad-acc --steps --seed --data
    CONFIG_OPTIMIZER = 4,   // --optimizer --lr --weight-decay --clip --warmup
    CONFIG_RECOMPUTE = 8,   // --recompute
    CONFIG_FILES = 16,      // --init --save --save-every --resume
    CONFIG_REPORT = 32,     // --json
    CONFIG_CHECK = 64,      // --no-check --verbose
    CONFIG_RANKS = 128,     // --ranks --timeout --trust-calls
    CONFIG_TIMELINE = 256,  // --timeline --timeline-svg, for programs that call timeline_start
    CONFIG_DP = 512,        // --dp, and so on: the axes of the mesh that its techniques use
    CONFIG_PP = 1024,
    CONFIG_CP = 2048,
    CONFIG_TP = 4096,
    CONFIG_EP = 8192,
    CONFIG_EXPERTS = 16384,  // --experts --top-k --expert-ffn --shared-experts --moe and DeepSeek-V3's
    CONFIG_CLOCK = 32768,    // --machine
    CONFIG_CLUSTER = 65536,  // --machine --gpus-per-node and the efficiencies
    CONFIG_TRACE = 131072,   // --trace
};

// Parses the command line: the shared options of `groups`, and the program's own. Applies --model first,
// then what was typed, then checks that the sizes fit together (fatal, naming the flags), and sets the
// model clock to --machine. `defaults` changes default values for this program, as in "layers=2 steps=4
// dtype=f64", or is NULL. An option in `own` without a target becomes a setting, whose default `defaults`
// may change as well. Texts in the result point into argv or are static.
Config config_parse(int argc, char **argv, const char *purpose, unsigned groups, const char *defaults,
                    Option *own, int own_count);
// The default model and batch, changed by a `defaults` text as above; for tests.
Config config_default(const char *defaults);
// The same, starting from a preset of --model: config_of_model("llama-3-8b", "layers=2 dtype=bf16").
Config config_of_model(const char *model, const char *defaults);
// A setting's value; 0 or NULL if this program has no such option.
bool config_has(const Config *config, const char *name);
bool config_given(const Config *config, const char *name);  // it was typed
double config_number(const Config *config, const char *name);
const char *config_text(const Config *config, const char *name);
void config_set(Config *config, const char *name, double number);
void config_set_text(Config *config, const char *name, const char *text);  // borrowed

// Fatal, naming the flags, if the sizes do not fit together.
void config_check(const Config *config);
// The same for the degrees of the mesh on this many ranks, saying what would fit; sets a degree of 0.
void config_check_degrees(Config *config, int ranks);
// What would fit, for refusals: "1, 2, 4", the degrees up to `most` that divide so many ranks (0: any number)
// and that fit (NULL: all do). Static text.
const char *config_degrees(const Config *config, int64_t most, int64_t ranks,
                           bool (*fits)(const Config *config, int64_t degree));
// "--tp 3": the flag of a mesh's axis with the least degree above 1 that the ranks of --dp leave room for and
// the model can be sharded over; "--ranks 2 --tp 2" where they leave none; "--pp 2 --layers 2" where a model
// of one layer (or, for --cp, one token) has none; "--tp and sizes that it divides" where heads have none.
// Static text.
const char *config_more(const Config *config, const char *flag);
// One header line: "L=4 h=128 a=4 kv=2 f=352 v=256 s=128 untied, f32, b=8 x 1, 0.80 M parameters"
void config_print(const Config *config);

static inline int64_t config_head_size(const Config *c) {
    return c->head_size ? c->head_size : c->hidden / c->heads;
}
// The width of an expert, and of the MLP that all tokens take: f, or all shared experts side by side.
static inline int64_t config_expert_width(const Config *c) {
    return c->expert_ffn ? c->expert_ffn : c->ffn;
}
static inline int64_t config_dense_width(const Config *c) {
    return c->experts ? c->shared_experts * config_expert_width(c) : c->ffn;
}
// Parameters of the model: 2 v h (v h if tied) + L (2 h a d + 2 h kv d + 3 h f + 2 h) + h; with e experts,
// e h + 3 h (e + shared) f per block in place of 3 h f.
int64_t config_parameters(const Config *config);
// Parameters that one token uses: only top_k of the experts.
int64_t config_active_parameters(const Config *config);
// FLOPs of forward and backward over this many sequences of seq tokens, as the operations count them
// without recomputation: six per token and parameter of a matrix multiply, plus causal attention.
double config_step_flops(const Config *config, int64_t sequences);

#ifdef __cplusplus
}
#endif
#endif
