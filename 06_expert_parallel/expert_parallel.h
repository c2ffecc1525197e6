// expert_parallel.h: chapter 06 as signatures. This rank has n tokens of a micro-batch, each of which takes
// k of e experts; "rows" are pairs of a token and an expert: n k that this rank's tokens make, and m that
// its experts compute. (Elsewhere e is the bytes of an element; in this chapter that is B.)
#ifndef EXPERT_PARALLEL_H
#define EXPERT_PARALLEL_H

#include "05_pipeline_parallel/pipeline.h"

// ======================================================================================================
// moe.c: a mixture of experts in the mlp socket
// ======================================================================================================

// On with --experts. First in a list of techniques: the others need not know what it keeps.
extern const Technique moe;

// The n k pairs of a token and a number (its expert, or its node) as rows: sorted by number, and within a
// number by token. Pairs for which an expert has no room have the number after the last one: they come after
// all others, and are not computed.
typedef struct PairRows {
    Tensor tokens, place;  // (n k) i32: of each row, freed after its last use; (n, k) i32: of each pair
    int64_t real;          // rows that are computed, once the host has read the counts
} PairRows;

// What one block keeps of a micro-batch for backward, in MlpKept.more; MlpKept's own tensors belong to the
// shared experts.
typedef struct MoeKept {
    Tensor logits, weights;  // (n, e), (n, k) f32, or f64 beside f64
    Tensor chosen;           // (n, k) i32
    PairRows pairs;          // of this rank's tokens and their experts
    Tensor rows;             // (m, h) what the experts here have read, in the order of experts
    Tensor gate, up, act;    // (m, f)
    Tensor out;              // (real, h) what experts have made of the rows that are summed here
    // What B leaves to W.
    Tensor dlogits, dgate, dup, dout;  // (n, e), (m, f) twice, (m, h)
    int64_t *own;                      // (e, and more) rows of this rank's tokens, by expert; what the
                                       // dispatch has read with them
    int64_t *count;                    // (experts here) rows of each
    int64_t m, s;                      // s: tokens of a sequence
    int64_t held, held_by_dispatch;    // bytes of it that the data decides; those of `exchange` among them
    Routing routed;                    // choices, ties, apart: of its tokens
    bool training;
    void **linear;   // (experts here, 2) the linear socket's own
    void *exchange;  // the dispatch's own
} MoeKept;

typedef struct Moe Moe;

// How tokens get to the experts that compute them, and how weighted outputs get back; one device has all
// tokens and experts. Backward takes the same two ways in reverse order. The caller owns the tensors that
// are returned.
typedef struct Dispatch {
    void *context;
    // Sets `more` (more_counts) from own (e), the rows of this rank's tokens by expert, all still on the
    // device: the host, which must know them all, then reads them at once.
    int64_t more_counts;
    void (*count)(void *context, MoeKept *kept, Tensor own, Tensor more);
    // x (n, h) -> (m, h) in the order of the experts here; sets kept->count and kept->m.
    Tensor (*to_experts)(void *context, MoeKept *kept, Tensor x);
    // What they have made, (m, h) -> y (n, h)
    Tensor (*combine)(void *context, MoeKept *kept, Tensor made);
    // dy (n, h) -> (m, h), and dweights (n, k)
    Tensor (*combine_backward)(void *context, MoeKept *kept, Tensor dy, Tensor dweights);
    // (m, h) -> dx (n, h)
    Tensor (*to_experts_backward)(void *context, MoeKept *kept, Tensor drows);
    void (*drop)(void *context, MoeKept *kept);
} Dispatch;

// What keeps the experts evenly busy: nothing, unless load_balance.c sets this.
typedef struct Balance {
    void *context;
    Tensor (*bias)(void *context, int layer);  // (e), for the choice alone; or {0}
    // In B, once for each micro-batch: may add to kept->dlogits.
    void (*backward)(void *context, const MicroBatch *micro, int layer, MoeKept *kept);
} Balance;

// Every count of rows that training has read, in order; written only if `keeps` is set. A dry run, which
// routes nothing, takes its counts from the ledger of a real run if it is given one, and otherwise routes
// evenly.
typedef struct Ledger {
    int64_t *number, count, next;
    bool keeps, replay;
} Ledger;

// Where a block's pass is; overlapped_experts.c is told.
typedef enum Moment {
    WAITS_TO_SEND,  // for counts, or for rows from its own node: these arrive soon, and it sends again
    WAITS,          // for rows from other nodes, or rows to compute with
    BEGINS,
    AMID,
    ENDS  // of a stretch of compute
} Moment;
static inline bool moment_computes(Moment m) { return m == BEGINS || m == AMID || m == ENDS; }

struct Moe {
    Model *model;
    Sockets dense;  // as they were: the MLP of the shared experts
    RouteRule rule;
    double capacity;      // of --capacity; 0: no token is dropped
    int64_t first, here;  // experts of this rank
    Dispatch dispatch;
    Balance balance;
    Ledger ledger;
    void (*at)(void *context, Moment moment);  // another micro-batch may compute, or send
    void *at_context;
    int64_t held, most_held;  // MoeKept.held of all blocks that are kept now, and at most, in training
};

void moe_at(const Moe *moe, Moment moment);

// router.c. Sets logits, weights and chosen; dx += dlogits Wrouter, with dlogits kept for W; and the
// router's gradient += dlogits^T x.
RouteRule moe_rule(const Config *config);
void router_forward(const Moe *moe, const MicroBatch *micro, int layer, MoeKept *kept, Tensor x);
void router_backward(const Moe *moe, const MicroBatch *micro, int layer, MoeKept *kept, Tensor dx,
                     Tensor dweights);
void router_gradient(const Moe *moe, int layer, const MoeKept *kept, Tensor x);

// ---- router_replay.c: a run that takes another run's experts ----

// In a recorded step: keeps the logits, or replaces kept's choice by that of the run that is followed. bias:
// of the choice, or {0}.
void router_replay(const Moe *moe, const MicroBatch *micro, int layer, MoeKept *kept, Tensor bias);
// In a step that is recorded: the index in Routing.logits at which each of this rank's n tokens has its
// logits; in any other step NULL. The caller frees it.
int64_t *routing_places(const Model *model, const MicroBatch *micro, int layer, int64_t n);
// Makes a token take the experts that it took in the followed run, `taken` (k): sets its own logits (e) of
// all others to -infinity. there: the followed run's logits; mine: what its own logits would choose. Counts
// the choice in *routed and, if mine differ, a tie, with the distance of the two runs' logits over size:
// the root mean square, over tokens, of the norm of their logits.
void routing_follow(Routing *routed, double *own, const float *there, int64_t e, const int32_t *mine,
                    const int32_t *taken, int64_t k, double size);
// Keeps the logits of n tokens, `own` (n, e), and measures how far they are from those of the run beside
// which this one is, where either is wanted.
void routing_keep(Routing *routing, const int64_t *place, const double *own, int64_t n, int64_t e);
// In B, so that recomputation counts once.
void routing_count(const Model *model, const Routing *routed);

// ---- token_rows.c: pairs of tokens and experts, and their rows ----

// The pairs of chosen (n, k), whose numbers are 0 … numbers - 1, or `numbers` for none. counts
// (numbers + 1) is set on the device: the rows of each number, and of none.
PairRows pair_rows_new(Tensor counts, Tensor chosen);
void pair_rows_free(PairRows *pairs);
// The host waits for the device, and reads counts into count. In a dry run they come from the ledger; false
// if it has none, and count is not set.
bool moe_read_counts(Moe *moe, bool training, int64_t *count, Tensor counts);
// Then a dry run spreads `rows` evenly.
void even_counts(int64_t *count, int64_t numbers, int64_t rows);
int64_t sum_of_counts(const int64_t *count, int64_t numbers);
// kept->own and kept->pairs from kept->chosen.
void moe_order(Moe *moe, MoeKept *kept);
// New: (real, h), the rows of x (n, h); and its gradient from theirs.
Tensor pairs_gather(const PairRows *pairs, Tensor x);
Tensor pairs_gather_backward(const PairRows *pairs, Tensor drows);
// New: y (n, h), the sum of the weighted rows z (real, h); and dz (real, h), with dweights (n, k) set.
Tensor pairs_combine(const PairRows *pairs, Tensor z, Tensor weights);
Tensor pairs_combine_backward(const PairRows *pairs, Tensor dy, Tensor dweights, Tensor z, Tensor weights);

// ======================================================================================================
// expert_parallel.c: experts over ranks
// ======================================================================================================

// Each rank of mesh.ep holds its part of the experts, and receives the tokens of all ranks for them. Listed
// after moe, and after what shards all weights (ZeRO): a rank's experts are sharded first.
extern const Technique expert_parallel;

typedef struct ExpertParallel {
    Moe *moe;
    Group ep;
    double rows_sent;    // in training, by the routing tables: to other ranks' experts, forward
    double rows_served;  // and for other ranks, forward
    double passes;       // forwards of a block in training
    double *to;          // (ep) rows of this rank's tokens by the rank that they went to, in training
} ExpertParallel;

// How many rows go to which expert, on which rank.
typedef struct RowExchange {
    const int64_t *sent;  // (e) of this rank's tokens
    int64_t *received;    // (ep, e / ep) from each rank, for each expert here
} RowExchange;

// Dispatch.count: ranks tell each other how many rows they will send. theirs (e): from each rank, for each
// expert here.
void expert_counts(void *context, MoeKept *kept, Tensor own, Tensor theirs);
// Sets kept->exchange, count and m when the host has read them.
void expert_exchange(ExpertParallel *x, MoeKept *kept);
// Dispatch: new, the rows that arrive, sorted by this rank's experts, in exchange for its own rows (sorted
// by all experts); combine: the way back. wait: whether the pass then computes or sends again.
Tensor dispatch_rows(const ExpertParallel *x, const RowExchange *exchange, Tensor own);
Tensor combine_rows(const ExpertParallel *x, const RowExchange *exchange, Tensor made, Moment wait);
// Adds what a step exchanges: counts within x->ep, and rows within `exchanges`.
void expert_price(Price *price, const Model *m, const ExpertParallel *x, Group exchanges);

// What the programs of this chapter list (expert_layouts.c): moe, data parallelism, ZeRO's stages, sequence
// and vocabulary parallelism, expert_parallel, the four methods of context parallelism, with --pp the
// pipeline, recomputation. A longer list puts moe first and expert_parallel behind tensor parallelism.
Techniques expert_layouts(void);
Techniques overlapped_layouts(void);  // and overlapped_experts
// The same with node_limited_routing in place of expert_parallel.
Techniques node_limited_layouts(void), node_limited_overlapped(void);
// And what one device has, with which they are compared.
extern const Technique *const expert_baseline[];
extern const Option proof_only_option;  // of each of them, beside zero_option

// expert_tables.c: who computed whose rows; all tokens to the first experts; peaks of activations by the
// rows that have come; a block of Mixtral 8x7B, dry, on the model clock.
void expert_tables(Mesh mesh, const Config *config);
// One such step of equal routers, in f64, compared with one device's.
void experts_all_alike(Mesh mesh, const Config *config, Techniques techniques);

// ======================================================================================================
// node_limited_routing.c: each token to few nodes, and to each of them once
// ======================================================================================================

// In place of expert_parallel; the nodes are those of --gpus-per-node.
extern const Technique node_limited_routing;

typedef struct NodeLimited {
    ExpertParallel *plain;  // over all of ep: counts of rows, and what it would send
    ExpertParallel inside;  // over the ranks of this node
    Group across;           // the ranks of this rank's place in all nodes
    Dispatch dispatch;      // of plain
    // In training, by the routing tables, forward: tokens to and from other nodes, and rows to and from
    // other ranks of this node.
    double tokens_sent, tokens_served, rows_sent, rows_served;
} NodeLimited;

// The most nodes, of so many, to which a token goes.
int64_t node_limit(const Config *config, int64_t nodes);

// node_tables.c: bytes across nodes and inside, beside plain dispatch; all tokens to one node.
void node_tables(Mesh mesh, const Config *config);

// ======================================================================================================
// overlapped_experts.c: two micro-batches in flight
// ======================================================================================================

// Listed after the pipeline, whose DualPipe pairs then overlap; without one, micro-batches overlap two by
// two.
extern const Technique overlapped_experts;

// Compares two micro-batches in flight with one after the other: no bit may differ. Tied weights are not
// compared.
void experts_two_in_flight(Mesh mesh, const Config *config, Techniques in_flight, Techniques in_turn);

// overlap_tables.c: how much of the all-to-alls it hides, at DeepSeek-V3's shape.
void overlap_tables(Mesh mesh, const Config *config);

// ======================================================================================================
// load_balance.c: auxiliary loss, z-loss, and a bias in the choice
// ======================================================================================================

extern const Technique load_balance;  // after moe, whose Balance it fills

// ======================================================================================================
// token_by_token.c: the same without sorting or grouping rows, one token at a time: the baseline of moe.c
// ======================================================================================================

extern const Technique token_by_token;

#endif
