// config.h: what a run is: the model's shape, the batch, the optimizer; the options that all programs
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
// How a mixture of experts routes: softmax over the logits of the chosen; sigmoid scores, normalised.
typedef enum MoeKind { MOE_MIXTRAL, MOE_DEEPSEEK } MoeKind;

// The value of an option that belongs to a technique, which alone knows what it means.
typedef struct Setting {
    const char *name;  // of the option: "bucket-mb"
    double number;     // of INT, REAL, CHOICE (the index) and FLAG (0 or 1)
    const char *text;  // of TEXT
    bool given;        // it was typed
} Setting;
enum { MAX_SETTINGS = 64 };

typedef struct Config {
    // model (the playbook's letters: L h a f v s)
    const char *model;
    int64_t layers, hidden, heads, kv_heads, ffn, vocab, seq;
    // In place of the MLP: experts, of which each token takes top_k, and shared ones, which all take; 0
    // experts: the MLP. An expert is as wide as expert_ffn, or 0: as ffn.
    int64_t experts, top_k, expert_ffn, shared_experts;
    int moe;  // MoeKind
    int64_t expert_groups,
        groups_kept;      // MOE_DEEPSEEK: of so many groups a token's experts are in the best
    double routed_scale;  // MOE_DEEPSEEK: multiplies the weights of the chosen
    bool tied;
    // Flags that were typed: of the shape, which a checkpoint has and must not contradict, and --seq.
    bool shape_given, seq_given;
    int64_t head_size;  // d, where it is not h / a; else 0
    Rope rope;
    double norm_eps;
    int dtype;  // DType of parameters and activations
    // batch: micro_batch sequences at once, grad_acc times per step (b)
    int64_t micro_batch, grad_acc, steps;
    // optimizer
    int optimizer;  // OptimizerKind
    double lr, weight_decay, beta1, beta2, adam_eps, clip;
    int64_t warmup;
    int recompute;  // Recompute
    int64_t seed;
    const char *data, *init, *save, *resume;
    int64_t save_every;
    // reports
    bool no_check, verbose;
    const char *json, *trace, *machine, *timeline_svg;
    bool timeline;
    // degrees of the mesh; dp or tp 0: all ranks that the others leave
    int64_t dp, pp, cp, tp, ep;
    // what the techniques of a program have options for, by name
    Setting setting[MAX_SETTINGS];
    int settings;
    // many ranks; comm_start reads ranks, timeout and trust_calls from the command line itself
    int64_t ranks, gpus_per_node;  // 0: what is natural
    double timeout, compute_efficiency, network_efficiency;
    bool trust_calls;
} Config;

// Groups of shared options that a program has.
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
    CONFIG_TIMELINE = 256,  // --timeline --timeline-svg, for who calls timeline_start
    CONFIG_DP = 512,        // --dp, and so on: the axes of the mesh that its techniques serve
    CONFIG_PP = 1024,
    CONFIG_CP = 2048,
    CONFIG_TP = 4096,
    CONFIG_EP = 8192,
    CONFIG_EXPERTS = 16384,  // --experts --top-k --expert-ffn --shared-experts --moe and DeepSeek-V3's
    CONFIG_CLOCK = 32768,    // --machine
    CONFIG_CLUSTER = 65536,  // --machine --gpus-per-node and the efficiencies
    CONFIG_TRACE = 131072,   // --trace
};

// Parses the command line: the shared options of `groups`, and the program's own. Applies --model
// first, then what was typed, then checks that the sizes fit together (naming the flags), and sets the
// model clock to --machine. `defaults` changes standard values for this program, as "layers=2 steps=4
// dtype=f64", or is NULL. An own option without a target becomes a setting, whose standard value `defaults`
// may change as well.
Config config_parse(int argc, char **argv, const char *purpose, unsigned groups, const char *defaults,
                    Option *own, int own_count);
// The default model and batch, with the same `defaults` text: what tests use.
Config config_default(const char *defaults);
// The same with the shape of a preset of --model, which `defaults` may change: config_of_model("llama-3-8b",
// "layers=2 dtype=bf16").
Config config_of_model(const char *model, const char *defaults);
// A setting's value; 0 or NULL where this program has no such option.
bool config_has(const Config *config, const char *name);
bool config_given(const Config *config, const char *name);  // it was typed
double config_number(const Config *config, const char *name);
const char *config_text(const Config *config, const char *name);
void config_set(Config *config, const char *name, double number);
void config_set_text(Config *config, const char *name, const char *text);  // borrowed

// Fatal, naming the flags, when the sizes do not fit together.
void config_check(const Config *config);
// The same of the mesh's degrees on so many ranks, saying what would fit; sets dp or tp where it was left
// to it.
void config_check_degrees(Config *config, int ranks);
// One header line: "L=4 h=128 a=4 kv=2 f=352 v=256 s=128 untied, f32, b=8 x 1, 0.80 M parameters"
void config_print(const Config *config);

static inline int64_t config_head_size(const Config *c) {
    return c->head_size ? c->head_size : c->hidden / c->heads;
}
// Width of an expert, and of the MLP that all tokens pass: f, or all shared experts side by side.
static inline int64_t config_expert_width(const Config *c) {
    return c->expert_ffn ? c->expert_ffn : c->ffn;
}
static inline int64_t config_dense_width(const Config *c) {
    return c->experts ? c->shared_experts * config_expert_width(c) : c->ffn;
}
// Parameters of the model: 2 v h (v h if tied) + L (2 h a d + 2 h kv d + 3 h f + 2 h) + h; with e experts,
// e h + 3 h (e + shared) f for each block in place of 3 h f.
int64_t config_parameters(const Config *config);
// Those that a token passes: top_k of the experts.
int64_t config_active_parameters(const Config *config);
// FLOPs of one step's forward and backward over so many sequences of seq tokens, as the ops count them
// without recomputation: six per parameter of a matrix multiply and token, and causal attention.
double config_step_flops(const Config *config, int64_t sequences);

#ifdef __cplusplus
}
#endif
#endif
