// formulas.c: what training needs in memory, and what recomputation saves, before anything is built.
// Playbook: "Memory usage in Transformers", "Activation recomputation", "ZeRO"; Korthikanti et al. 2022.
//
//   states       per parameter: e bytes of weight, e of gradient (and 4 more in f32 if e is 2), k of
//                optimizer state (AdamW: 8, or 12 with master weights). Over dp, ZeRO-1 shards the
//                optimizer state, ZeRO-2 also the gradients, ZeRO-3 also the parameters.
//   activations  the sum over a table of what a block keeps for backward, with n = b s tokens:
//                GPT, bf16  s b h (34 + 5 a s / h)
//                ours       n e (4 h + 2 a d + 2 kv d + 3 f + a s) + 2 n statistics
//
// Bytes sent: none. Sizes are doubles, exact for whole bytes up to 9 PB. This file has no main: memory.c
// prints them and compares them with the playbook's figures and with what a real step allocates.
#include "formulas.h"

#include <math.h>
#include <string.h>

// ---- states: parameters, gradients, optimizer ----

// Not counted here are the units in use: their whole gradients with ZeRO-2 and -3, and their whole weights
// with ZeRO-3 (see 02_zero/zero.c).
MemoryNeed memory_states(const MemoryPlan *plan, double parameters) {
    double e = (double)dtype_size(plan->model.dtype), own = parameters / (double)plan->dp;
    bool narrow = e < 4;
    // m and v in f32 (f64 beside f64), and f32 master weights beside 16-bit ones
    double k = plan->optimizer_bytes > 0 ? plan->optimizer_bytes : narrow ? 12 : 2 * e;
    return (MemoryNeed){
        .parameters = e * (plan->zero >= 3 ? own : parameters),
        .gradients = e * (plan->zero >= 2 ? own : parameters),
        .accumulators = narrow && plan->f32_gradients ? 4 * (plan->zero >= 2 ? own : parameters) : 0,
        .optimizer = k * (plan->zero >= 1 ? own : parameters),
    };
}

double memory_states_bytes(const MemoryNeed *need) {
    return need->parameters + need->gradients + need->accumulators + need->optimizer;
}

// Total width of the keys that the tp ranks hold; with fewer K/V heads than ranks, copies count.
static double kv_width(const MemoryPlan *plan) {
    const Config *c = &plan->model;
    return (double)(c->kv_heads > plan->tp ? c->kv_heads : plan->tp) * (double)config_head_size(c);
}

static double q_width(const MemoryPlan *plan) {
    return (double)plan->model.heads * (double)config_head_size(&plan->model);
}

// Tensor parallelism shards the matrices and the biases along the sharded dimension; norms, the other
// biases and experts stay whole. On one rank with f = 4 h and kv d = h, GPT has h v + L (12 h^2 + 13 h) + 2
// h (no position embeddings, as in the playbook); for ours see model.c.
double memory_rank_parameters(const MemoryPlan *plan) {
    const Config *c = &plan->model;
    double h = (double)c->hidden, f = (double)config_dense_width(c), L = (double)c->layers;
    double kv = kv_width(plan), routed = (double)c->experts * (h + 3 * h * (double)config_expert_width(c));
    double tp = (double)plan->tp, rows = (double)c->vocab / (plan->whole_vocabulary ? 1 : tp);
    double vocabulary = (c->tied ? 1 : 2) * h * ceil(rows);
    double attention = 2 * h * q_width(plan) + 2 * h * kv;
    double sharded = attention + (plan->gpt ? 2 * h * f + q_width(plan) + 2 * kv + f : 3 * h * f);
    double whole = plan->gpt ? 6 * h : 2 * h + routed;
    return vocabulary + L * sharded / tp + L * whole + (plan->gpt ? 2 : 1) * h;
}

// ---- activations: what forward keeps for backward ----

enum { NEVER = RECOMPUTE_FULL + 1 };

typedef struct Sizes {  // bytes unless noted
    double n, x, q, kv, ffn, pairs, statistic;
} Sizes;

static Sizes sizes_of(const MemoryPlan *plan) {
    const Config *c = &plan->model;
    double e = (double)dtype_size(c->dtype), n = (double)c->micro_batch * (double)c->seq;
    return (Sizes){.n = n,  // tokens
                   .x = e * n * (double)c->hidden,
                   .q = e * n * q_width(plan),
                   .kv = e * n * kv_width(plan),
                   .ffn = e * n * (double)config_dense_width(c),
                   .pairs = n * (double)c->seq * (double)c->heads,  // elements
                   .statistic = n * (e > 4 ? 8 : 4)};
}

// The tensors of one block, in the order in which forward makes them.
int memory_block_rows(PriceKept kept[MOST_KEPT], const MemoryPlan *plan) {
    const Sizes z = sizes_of(plan);
    double e = (double)dtype_size(plan->model.dtype), mask = z.x / e;  // dropout masks: one byte each
    const PriceKept gpt[] = {
        // in units of s b h: attention 11 + 5 a s / h, MLP 19, norms 4
        {"input of norm 1", z.x, BY_SEQUENCE, NEVER},
        {"norm 1, input of QKV", z.x, BY_SEQUENCE, RECOMPUTE_FULL},
        {"Q", z.q, BY_TENSOR, RECOMPUTE_FULL},
        {"K, V", 2 * z.kv, BY_TENSOR, RECOMPUTE_FULL},
        {"softmax", e * z.pairs, BY_TENSOR, RECOMPUTE_SELECTIVE},
        {"softmax dropout mask", z.pairs, BY_TENSOR, RECOMPUTE_SELECTIVE},
        {"softmax dropout", e * z.pairs, BY_TENSOR, RECOMPUTE_SELECTIVE},
        {"attention output", z.q, BY_TENSOR, RECOMPUTE_FULL},
        {"dropout mask", mask, BY_SEQUENCE, RECOMPUTE_FULL},
        {"input of norm 2", z.x, BY_SEQUENCE, RECOMPUTE_FULL},
        {"norm 2, input of MLP", z.x, BY_SEQUENCE, RECOMPUTE_FULL},
        {"input of GELU", z.ffn, BY_TENSOR, RECOMPUTE_FULL},
        {"output of GELU", z.ffn, BY_TENSOR, RECOMPUTE_FULL},
        {"dropout mask", mask, BY_SEQUENCE, RECOMPUTE_FULL},
    };
    const PriceKept ours[] = {
        // the names of BlockKept
        {"x", z.x, BY_SEQUENCE, NEVER},
        {"rstd1", z.statistic, BY_SEQUENCE, RECOMPUTE_FULL},
        {"norm1", z.x, BY_SEQUENCE, RECOMPUTE_FULL},
        {"q", z.q, BY_TENSOR, RECOMPUTE_FULL},
        {"k, v", 2 * z.kv, BY_TENSOR, RECOMPUTE_FULL},
        {"probs", e * z.pairs, BY_TENSOR, RECOMPUTE_SELECTIVE},
        {"o", z.q, BY_TENSOR, RECOMPUTE_FULL},
        {"x2", z.x, BY_SEQUENCE, RECOMPUTE_FULL},
        {"rstd2", z.statistic, BY_SEQUENCE, RECOMPUTE_FULL},
        {"norm2", z.x, BY_SEQUENCE, RECOMPUTE_FULL},
        {"gate, up", 2 * z.ffn, BY_TENSOR, RECOMPUTE_FULL},
        {"act", z.ffn, BY_TENSOR, RECOMPUTE_FULL},
    };
    memcpy(kept, plan->gpt ? gpt : ours, plan->gpt ? sizeof gpt : sizeof ours);
    return plan->gpt ? sizeof gpt / sizeof *gpt : sizeof ours / sizeof *ours;
}

// Outside the blocks: inputs and head. Recomputation leaves both alone.
int memory_end_rows(PriceKept kept[MOST_KEPT], const MemoryPlan *plan) {
    const Sizes z = sizes_of(plan);
    double e = (double)dtype_size(plan->model.dtype), v = (double)plan->model.vocab, t = (double)plan->tp;
    double logits = z.n * (plan->whole_vocabulary ? v : ceil(v / t) * t);
    const PriceKept gpt[] = {
        // Korthikanti et al., section 4.3
        {"embedding dropout mask", z.x / e, BY_SEQUENCE, NEVER},
        {"input of the last norm", z.x, BY_SEQUENCE, NEVER},
        {"input of the head", z.x, BY_SEQUENCE, NEVER},
        {"logits in f32", 4 * logits, BY_TENSOR, NEVER},
    };
    const PriceKept ours[] = {
        // the names of MicroBatch and HeadKept; inputs count as activations, as in the memory account
        {"tokens, targets, positions", 3 * 4 * z.n, EVERY_RANK, NEVER},
        {"x", z.x, BY_SEQUENCE, NEVER},
        {"rstd", z.statistic, BY_SEQUENCE, NEVER},
        {"norm", z.x, BY_SEQUENCE, NEVER},
        {"logits", e * logits, plan->whole_vocabulary ? BY_SEQUENCE : BY_TENSOR, NEVER},
        {"lse", z.statistic, plan->whole_vocabulary ? BY_SEQUENCE : EVERY_RANK, NEVER},
    };
    memcpy(kept, plan->gpt ? gpt : ours, plan->gpt ? sizeof gpt : sizeof ours);
    return plan->gpt ? sizeof gpt / sizeof *gpt : sizeof ours / sizeof *ours;
}

// Bytes of this tensor that one rank keeps.
static double kept_here(const PriceKept *kept, const MemoryPlan *plan) {
    if (plan->model.recompute >= kept->dropped_from) return 0;
    bool sharded = kept->split == BY_TENSOR || (kept->split == BY_SEQUENCE && plan->sp);
    return sharded ? kept->bytes / (double)plan->tp : kept->bytes;
}

double memory_block_activations(const MemoryPlan *plan) {
    PriceKept kept[MOST_KEPT];
    double bytes = 0;
    for (int i = memory_block_rows(kept, plan) - 1; i >= 0; i--) bytes += kept_here(&kept[i], plan);
    return bytes;
}

static double ends_activations(const MemoryPlan *plan) {
    PriceKept kept[MOST_KEPT];
    double bytes = 0;
    for (int i = memory_end_rows(kept, plan) - 1; i >= 0; i--) bytes += kept_here(&kept[i], plan);
    return bytes;
}

void memory_print_block(const MemoryPlan *plan) {
    PriceKept kept[MOST_KEPT];
    int count = memory_block_rows(kept, plan);
    say("\n  one block keeps %s on each rank:", bytes_text(memory_block_activations(plan)));
    for (int i = 0; i < count; i++)
        say("  %-22s %11s", kept[i].what, bytes_text(kept_here(&kept[i], plan)));
}

MemoryNeed memory_need(const MemoryPlan *plan) {
    MemoryNeed need = memory_states(plan, memory_rank_parameters(plan));
    need.blocks = (double)plan->model.layers * memory_block_activations(plan);
    need.ends = ends_activations(plan);
    return need;
}

int64_t kept_activation_bytes(const Config *config) {
    MemoryNeed need = memory_need(&(MemoryPlan){.model = *config, .tp = 1, .dp = 1});
    return (int64_t)(need.blocks + need.ends);
}

// The peak is the larger of two moments of backward. Let x, ffn, q, kv, R be the bytes of (n, h), (n, f),
// (n, a d), (n, kv d) and n statistics. At the head: all that is kept, and dnorm, x bytes, or before it the
// losses, R bytes (more than x only for h = 1 in 16 bits). At the last block: what the other blocks keep,
// all of this block, since what recomputation dropped has been computed again, and the largest set of
// temporaries:
//
//     before Wdown       dy, dact                   x + ffn
//     after Wgate, Wup   dy, dx                     2 x
//     in attention       dy, dx2, d_o, dq, dk, dv   x + 2 q + 2 kv - R    (x2 and rstd2 are gone)
//
// From norm2's backward on, and also at the head, w more bytes hold the gradient of the norm's weight,
// which B computes for W. It is as wide as gradients of weights, and no narrower than activations.
int64_t peak_activation_bytes(const Config *config, DType gradient) {
    const MemoryPlan plan = {.model = *config, .tp = 1, .dp = 1};
    MemoryPlan complete = plan;
    complete.model.recompute = RECOMPUTE_NONE;
    const Sizes z = sizes_of(&plan);
    double w = (double)dtype_size(dtype_wider(config->dtype, gradient)) * (double)config->hidden;
    double inputs = 3 * 4 * z.n;
    double L = (double)config->layers, block = memory_block_activations(&plan);
    double head = L * block + ends_activations(&plan) + fmax(z.x + w, z.statistic);
    double attention = z.x + 2 * z.q + 2 * z.kv - z.statistic + w;
    double flowing = fmax(z.x + z.ffn, fmax(2 * z.x + w, attention));
    return (int64_t)fmax(head, inputs + (L - 1) * block + memory_block_activations(&complete) + flowing);
}

// ---- recomputation on GPT-3 175B ----

Config gpt3_175b(void) {
    return (Config){.model = "gpt-3-175b",
                    .layers = 96,
                    .hidden = 12288,
                    .heads = 96,
                    .kv_heads = 96,
                    .ffn = 4 * 12288,
                    .vocab = 51200,
                    .seq = 2048,
                    .tied = true,
                    .dtype = BF16,
                    .micro_batch = 1};
}

// FLOPs per layer and sample as the paper counts them, ignoring the causal mask: forward takes 24 s h^2 for
// the matrices and 4 s^2 h for attention's core; forward and backward take three times that. With 6 s h v
// for the head,
//   model = 72 L s h^2 (1 + s / 6h + v / 12hL).
// The paper's "hardware" FLOPs for selective recomputation have s / 3h in place of s / 6h: 12 s^2 h more
// per layer, as if backward were repeated as well. Its text says forward only, 4 s^2 h, a third of that,
// and so does its author in https://github.com/NVIDIA/Megatron-LM/issues/523.
RecomputeCost recompute_cost(const Config *gpt) {
    double s = (double)gpt->seq, h = (double)gpt->hidden, L = (double)gpt->layers, v = (double)gpt->vocab;
    MemoryPlan plan = {.model = *gpt, .gpt = true, .tp = 1, .dp = 1};
    plan.model.recompute = RECOMPUTE_NONE;
    double none = memory_block_activations(&plan);
    plan.model.recompute = RECOMPUTE_SELECTIVE;
    double model = 72 * L * s * h * h * (1 + s / (6 * h) + v / (12 * h * L));
    return (RecomputeCost){
        .selective_memory = 1 - memory_block_activations(&plan) / none,
        .selective_flops_published = L * 12 * s * s * h / model,
        .selective_flops = L * 4 * s * s * h / model,
        .full_flops = L * (24 * s * h * h + 4 * s * s * h) / model,
    };
}
