// expert_parallel.h: chapter 06 as signatures. n tokens of a micro-batch on this rank, of which each takes
// k of e experts; "rows" are these n k pairs of a token and an expert; m of them meet the experts that are
// here.
#ifndef EXPERT_PARALLEL_H
#define EXPERT_PARALLEL_H

#include "05_pipeline_parallel/pipeline.h"

// ======================================================================================================
// moe.c: a mixture of experts in the mlp socket
// ======================================================================================================

// On with --experts. First in a list of techniques: what it keeps, the others need not know.
extern const Technique moe;

// What one block keeps of a micro-batch for backward, in MlpKept.more; MlpKept's own tensors are those of
// the shared experts.
typedef struct MoeKept {
    Tensor logits, weights;  // (n, e), (n, k) f32, or f64 beside f64
    Tensor chosen, place;    // (n, k) i32: experts, and where the rows stand in the order of experts
    Tensor rows;             // (m, h) what the experts here have read, in the order of experts
    Tensor gate, up, act;    // (m, f)
    Tensor out;              // (n k, h) what this rank's tokens have got from their experts
    // What B leaves to W.
    Tensor dlogits, dgate, dup, dout;  // (n, e), (m, f) twice, (m, h)
    int64_t *own;                      // (e) rows of this rank's tokens, by expert
    int64_t *count;                    // (experts here) rows of each
    int64_t m;
    bool training;
    void **linear;   // (experts here, 2) the linear socket's own
    void *exchange;  // the dispatch's own
} MoeKept;

// How rows come to the experts that compute them, and back; one device has all of them. Forward and
// backward take the same two ways, in the other order.
typedef struct Dispatch {
    void *context;
    // From kept->own, which is counts (e) i32 on the host: sets kept->count and kept->m.
    void (*count)(void *context, MoeKept *kept, Tensor counts);
    // x (n k, h) of this rank's tokens, in the order of all experts -> (m, h), a tensor of the caller's own
    Tensor (*to_experts)(void *context, const MoeKept *kept, Tensor x);
    // x (m, h) -> (n k, h)
    Tensor (*from_experts)(void *context, const MoeKept *kept, Tensor x);
    void (*drop)(void *context, MoeKept *kept);
} Dispatch;

// What keeps the experts evenly busy: nothing, unless load_balance.c fills this.
typedef struct Balance {
    void *context;
    Tensor (*bias)(void *context, int layer);  // (e), for the choice alone; or {0}
    // In B, once for each micro-batch: may add to kept->dlogits.
    void (*backward)(void *context, const MicroBatch *micro, int layer, MoeKept *kept);
} Balance;

typedef struct Moe {
    Model *model;
    Sockets dense;  // as they were: the MLP of the shared experts
    RouteRule rule;
    int64_t first, here;  // experts of this rank
    Dispatch dispatch;
    Balance balance;
    int64_t held, most_held;  // rows of all blocks that are kept now, and were at most, in training
} Moe;

// router.c. Sets logits, weights and chosen; dx += dlogits Wrouter, dlogits being left to W; and the
// router's gradient += dlogits^T x.
RouteRule moe_rule(const Config *config);
void router_forward(const Moe *moe, int layer, MoeKept *kept, Tensor x);
void router_backward(const Moe *moe, const MicroBatch *micro, int layer, MoeKept *kept, Tensor dx,
                     Tensor dweights);
void router_gradient(const Moe *moe, int layer, const MoeKept *kept, Tensor x);

// moe.c
// Rows of each expert on the host, from (experts) of them on the device; a dry run, which routes nothing,
// deals `rows` of them evenly.
void moe_read_counts(int64_t *count, Tensor counts, int64_t rows);

// ======================================================================================================
// expert_parallel.c: experts over ranks
// ======================================================================================================

// Each rank of mesh.ep holds its part of the experts, and the tokens of all of them come there. After moe,
// and after what deals out weights (ZeRO): a rank's experts come first.
extern const Technique expert_parallel;

// What the programs of this chapter list (expert_layouts.c): moe, data parallelism, ZeRO's stages, sequence
// and vocabulary parallelism, expert_parallel, the four methods of context parallelism, with --pp the
// pipeline, recomputation. A longer list puts moe first and expert_parallel behind tensor parallelism.
extern const Technique *const expert_layouts[];
// And what one device has, with which they are compared.
extern const Technique *const expert_baseline[];
extern const Option expert_layout_options[];  // --zero, and --proof-only
enum { EXPERT_LAYOUT_OPTIONS = 2 };

typedef struct ExpertParallel {
    Moe *moe;
    Group ep;
    double rows_sent;    // in training, by the routing tables: to other ranks' experts, forward
    double rows_served;  // and for other ranks, forward
    double passes;       // forwards of a block in training
    double *to;          // (ep) rows of this rank's tokens by the rank that they went to, in training
} ExpertParallel;

// expert_tables.c: who computed whose rows; all tokens to the first experts; a block of Mixtral 8x7B, dry,
// on the model clock.
void expert_tables(Mesh mesh, const Config *config);

// ======================================================================================================
// load_balance.c: auxiliary loss, z-loss, and a bias in the choice
// ======================================================================================================

extern const Technique load_balance;  // after moe, whose Balance it fills

// ======================================================================================================
// token_by_token.c: the same without rows, groups or order, one token after the other; what moe.c is held
// against
// ======================================================================================================

extern const Technique token_by_token;

#endif
