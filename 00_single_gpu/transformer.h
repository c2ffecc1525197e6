// transformer.h: the model and its sockets, on one page.
//
// Letters: b micro-batch, s sequence, n = b s tokens, h hidden, a heads, d head size, kv key/value heads,
// f feed-forward, v vocabulary, L layers. A gradient is "d" and the name. Shapes are what this rank stores.
#ifndef TRANSFORMER_H
#define TRANSFORMER_H

#include "comm/mesh.h"
#include "tensor/ops.h"
#include "train/config.h"
#include "train/params.h"

// ---- the weights ----

// What a weight is in the model: techniques shard by it.
// clang-format off
typedef enum Role {
    ROLE_EMBEDDING,                              // (v, h)
    ROLE_NORM1, ROLE_Q, ROLE_K, ROLE_V, ROLE_O,  // (h); (a d, h), (kv d, h) twice, (h, a d)
    ROLE_NORM2, ROLE_GATE, ROLE_UP, ROLE_DOWN,   // (h); (f, h) twice, (h, f)
    ROLE_NORM, ROLE_HEAD,                        // (h); (v, h), absent where the embedding is tied to it
    ROLE_ROUTER,                                 // (e, h) where a block has experts, and of each of them
    ROLE_EXPERT_GATE, ROLE_EXPERT_UP, ROLE_EXPERT_DOWN,  // (f, h) twice, (h, f)
    ROLES                                                // a chapter's own roles begin here
} Role;
// clang-format on

// Where a block's weights stand in the table. With experts, gate, up and down are those that all tokens
// pass, NULL if there are none.
typedef struct BlockParams {
    Param *norm1, *q, *k, *v, *o, *norm2, *gate, *up, *down;
    Param *router;                                 // NULL without experts
    Param *expert_gate, *expert_up, *expert_down;  // (e) each
} BlockParams;

// ---- what forward keeps for backward ----

typedef struct AttentionKept {
    Tensor probs;  // (b, a, s, s), by the single-device attention
    void *more;    // a plug's own
} AttentionKept;

// What the feed-forward part keeps; dgate, dup and dy are what B leaves to W.
typedef struct MlpKept {
    Tensor gate, up, act;  // (n, f)
    Tensor dgate, dup;     // (n, f)
    Tensor dy;             // (n, h) inside the region
    void *linear[2];       // the linear socket's own: of gate and up, and of down
    void *more;            // a plug's own
} MlpKept;

// All that one block keeps for one micro-batch.
typedef struct BlockKept {
    Tensor x;             // (n, h) input of the block
    Tensor rstd1, norm1;  // (n), (n, h) output of the attention norm
    Tensor q, k, v;       // (n, a d), (n, kv d), (n, kv d), q and k after RoPE
    AttentionKept attention;
    Tensor o;             // (n, a d) output of attention, before its projection
    Tensor x2;            // (n, h) x + attention
    Tensor rstd2, norm2;  // (n), (n, h) output of the MLP norm
    MlpKept mlp;
    void *linear[2];         // the linear socket's own: of q, k and v, and of o
    Tensor dx2, dq, dk, dv;  // what B leaves to W: gradients at the outputs of the linears …
    Tensor dnorm1, dnorm2;   // … and (h) of the norms' weights
} BlockKept;

typedef struct HeadKept {
    Tensor x, rstd, norm;  // (n, h), (n), (n, h)
    Tensor logits, lse;    // (n, v), (n)
    void *linear;
    Tensor dnorm;  // (h)
    // B turns logits into dlogits in place and leaves them to W
} HeadKept;

// One micro-batch in flight: its inputs, what flows between stages, what each block keeps. Several may be
// in flight at once.
typedef struct MicroBatch {
    int64_t index;  // which one of the step, from 0; -1: no training
    int64_t b, s;
    Tensor tokens, targets, positions;  // (n) i32
    int32_t *documents;  // (b, all tokens of a sequence) host, from 0; NULL: each sequence is one
    double loss_scale;   // of the loss: 1 / valid labels of the whole global batch
    double grad_scale;   // of its gradient: the same, times Model.grad_scale
    Tensor x;            // (n, h) flows forward: output of the last unit that ran
    Tensor dx;           // (n, h) flows backward: gradient at that unit's input
    BlockKept *block;    // (L)
    HeadKept head;
    Tensor loss;          // (1) f64: what this micro-batch adds to the mean loss of the global batch
    int embedding_parts;  // of W to the embedding's gradient, still to come: tied, 2 on one device
} MicroBatch;

// One step's samples of this rank.
typedef struct StepInput {
    int64_t micro_batches, b;
    const int32_t *tokens, *targets;  // (micro_batches b, s) host, whole sequences
    const double *loss_scale;         // (micro_batches)
    Tensor loss;                      // (1) f64 on the device: += the losses of this rank's micro-batches
    int64_t *kept_bytes;  // raised to the activations held when a forward has ended; may be NULL
} StepInput;

// ---- the sockets: where a parallelism plugs in ----

// Empty ones hold the single-device behaviour; a technique's plug fills some and leaves the rest. B adds to
// no gradient: what it finds of them it leaves to W, so that only W meets the gradients socket, and Bs and
// Ws of several micro-batches may follow each other in any legal order.
typedef struct Model Model;
typedef enum Pass { FORWARD, BACKWARD } Pass;

typedef struct Sockets {
    // Which tokens of each sequence this rank has: how many, and the position of the i-th.
    struct {
        void *context;
        int64_t (*count)(void *context, int64_t s);
        int64_t (*position)(void *context, int64_t s, int64_t i);
    } tokens;
    // Before a unit's weights are used in a pass, and after their last use in it (B is the backward pass: W
    // uses no weights); when the optimizer has stepped this rank's part of a unit, first unit first; and
    // before anything but a pass reads weights, which may be in flight from other ranks, and after an
    // evaluation.
    struct {
        void *context;
        void (*acquire)(void *context, Model *model, int unit, Pass pass);
        void (*release)(void *context, Model *model, int unit, Pass pass);
        void (*stepped)(void *context, Model *model, int unit);
        void (*complete)(void *context, Model *model);
    } parameters;
    // begin: W is about to add to the unit's gradient; called twice where weights are tied, as the embedding
    // has two Ws then. ready: the unit's gradient is final for this micro-batch. On one device it adds
    // 16-bit gradients to their f32 sums: a plug that fills `ready` calls params_accumulate itself, or takes
    // the gradient over. micro_batch_ready: those of all units are final. `last`: of the step's last
    // micro-batch. finish: on return all reductions have finished.
    struct {
        void *context;
        void (*begin)(void *context, Model *model, int unit);
        void (*ready)(void *context, Model *model, int unit, bool last);
        void (*micro_batch_ready)(void *context, Model *model, bool last);
        void (*finish)(void *context, Model *model);
    } gradients;
    // Into and out of the part of a block that tensor parallelism shards. Returns a tensor of the caller's
    // own. rows: of x outside of it.
    struct {
        void *context;
        int64_t (*rows)(void *context, const MicroBatch *micro);
        Tensor (*enter)(void *context, const MicroBatch *micro, Tensor x);  // f: identity;  g: all-gather
        // f*: all-reduce; g*: reduce-scatter
        Tensor (*leave)(void *context, const MicroBatch *micro, Tensor partial);
        // f: all-reduce; g: reduce-scatter
        Tensor (*enter_backward)(void *context, const MicroBatch *micro, Tensor dx);
        // f*: identity; g*: all-gather
        Tensor (*leave_backward)(void *context, const MicroBatch *micro, Tensor dy);
    } region;
    // Embedding and loss. A rank may hold some rows of x alone (sequence parallelism), some columns of the
    // logits alone (vocabulary parallelism), or both; tokens and targets are those of the whole
    // micro-batch.
    struct {
        void *context;
        Tensor (*lookup)(void *context, const MicroBatch *micro, Tensor weight);  // x, new
        // dweight +=
        void (*lookup_backward)(void *context, const MicroBatch *micro, Tensor dweight, Tensor dx);
        // Into and out of the output layer, as region's.
        Tensor (*enter)(void *context, const MicroBatch *micro, Tensor x);
        Tensor (*enter_backward)(void *context, const MicroBatch *micro, Tensor dx);
        // micro->loss += loss_scale times the sum of the losses of all tokens of the micro-batch; *lse is
        // new, what loss_backward needs of it.
        void (*loss)(void *context, const MicroBatch *micro, Tensor *lse, Tensor logits);
        // dlogits = micro->grad_scale d(sum)/dlogits; may alias logits
        void (*loss_backward)(void *context, const MicroBatch *micro, Tensor dlogits, Tensor logits,
                              Tensor lse);
    } vocabulary;
    // q, k, v to o. `again` makes again what recomputation dropped from kept.
    struct {
        void *context;
        void (*forward)(void *context, const MicroBatch *micro, Tensor o, AttentionKept *kept, Tensor q,
                        Tensor k, Tensor v, AttentionShape shape);
        void (*backward)(void *context, const MicroBatch *micro, Tensor dq, Tensor dk, Tensor dv,
                         Tensor d_o, AttentionKept *kept, Tensor q, Tensor k, Tensor v, Tensor o,
                         AttentionShape shape);
        void (*drop)(void *context, AttentionKept *kept);
        void (*again)(void *context, const MicroBatch *micro, AttentionKept *kept, Tensor q, Tensor k,
                      Tensor v, AttentionShape shape);
    } attention;
    // The feed-forward part of a block, region included: x (n, h) is the output of its norm. Forward
    // returns y (n, h), new, and backward_input dx.
    struct {
        void *context;
        Tensor (*forward)(void *context, Model *model, MicroBatch *micro, int layer, Tensor x);
        Tensor (*backward_input)(void *context, Model *model, MicroBatch *micro, int layer, Tensor dy);
        void (*backward_weight)(void *context, Model *model, MicroBatch *micro, int layer, Tensor x);
        void (*drop)(void *context, MlpKept *kept);
    } mlp;
    // Every matrix multiply with a weight (out, in); `count` of them that read one input go together. *kept
    // is the plug's own, from forward to drop.
    struct {
        void *context;
        // y[i] = x W_i^T;  dx = sum over i of dy[i] W_i;  dW_i += dy[i]^T x
        void (*forward)(void *context, Model *model, int count, Param *const *weight, const Tensor *y,
                        Tensor x, void **kept);
        void (*backward_input)(void *context, Model *model, int count, Param *const *weight, Tensor dx,
                               const Tensor *dy, void **kept);
        void (*backward_weight)(void *context, Model *model, int count, Param *const *weight,
                                const Tensor *dy, Tensor x, void **kept);
        void (*drop)(void *context, void **kept);
    } linear;
    // After a block's forward, and before its backward.
    struct {
        void *context;
        void (*after_forward)(void *context, Model *model, MicroBatch *micro, int layer);
        void (*before_backward)(void *context, Model *model, MicroBatch *micro, int layer);
    } activations;
    // Who runs a step's micro-batches, and who evaluates; the caller has zeroed the gradients, and ends
    // them. The host does not wait for the device in run, but for a mixture's counts of rows: nobody reads
    // a loss before the step's end.
    struct {
        void *context;
        void (*run)(void *context, Model *model, const StepInput *input);
        double (*evaluate)(void *context, Model *model, MicroBatch *micro);
    } schedule;
    // Whether the optimizer may step on gradients of this norm, the same on every rank. It may change
    // Model.grad_scale for the steps to come, and is then the one that knows what an infinite norm means.
    struct {
        void *context;
        bool (*accept)(void *context, Model *model, double grad_norm);
    } step;
} Sockets;

// clang-format off
typedef enum Socket {  // those above, in order
    SOCKET_TOKENS, SOCKET_PARAMETERS, SOCKET_GRADIENTS, SOCKET_REGION, SOCKET_VOCABULARY, SOCKET_ATTENTION,
    SOCKET_MLP, SOCKET_LINEAR, SOCKET_ACTIVATIONS, SOCKET_SCHEDULE, SOCKET_STEP, SOCKETS
} Socket;
// clang-format on
const char *socket_name(Socket socket);
// The sockets that are filled differently, as bits: 1 << socket.
unsigned sockets_difference(const Sockets *a, const Sockets *b);
Sockets sockets_single_device(void);

// ---- the model ----

struct Model {
    Config config;
    Mesh mesh;
    Params params;
    Param *embedding, *norm, *head;                   // head is embedding when tied
    BlockParams *block;                               // (L), stored here or not
    int embedding_unit, first_block_unit, head_unit;  // units of the table; blocks follow one another …
    int first_expert_unit;  // … and behind the head, the experts of each block; 0 without experts
    Sockets sockets;
    int64_t *ready_left;  // (units) how often in this step its gradient will still become final
    double grad_scale;    // 1; a factor on gradients from the loss to the optimizer, which divides by it.
                          // Losses and norms do not have it.
};

// What the model's weights are, each stored whole on every rank: techniques change params.recipe and shard
// it, then model_allocate.
Model *model_new(const Config *config, Mesh mesh);
void model_allocate(Model *model);
void model_free(Model *model);

// Tokens of a micro-batch that this rank has.
int64_t model_tokens(const Model *model);
// The token that ends a document (--documents); -1: a sequence is one document, whatever it holds.
int64_t config_document_end(const Config *config);
// A micro-batch of b samples; targets[i] may be IGNORED_LABEL.
// tokens, targets (b s) host. The caller ends it with micro_batch_free.
MicroBatch micro_batch_new(const Model *model, int64_t index, int64_t b, const int32_t *tokens,
                           const int32_t *targets, double loss_scale);
void micro_batch_free(Model *model, MicroBatch *micro);
// A loss of 0: (1) f64 on the device, where it stays until the host needs it.
Tensor loss_new(void);
double loss_value(Tensor loss);  // waits for the device
// The first tensor, in the order of forward, that holds a NaN or an infinity: "weight model.norm.weight",
// "block 2 gate"; NULL: none on this rank. Static buffer.
const char *micro_batch_first_bad(const Model *model, const MicroBatch *micro);

// ---- stages ----

// A range of units: blocks first_layer … end_layer - 1, with the embedding before and the head after them.
typedef struct Chunk {
    int first_layer, end_layer;
    bool embedding, head;
} Chunk;
Chunk chunk_whole(const Model *model);  // what one device runs

// Forward leaves its output in micro->x, backward the gradient at its input in micro->dx. backward_input is
// B, backward_weight is W; W may come any time after B of the same micro-batch and chunk.
void chunk_forward(Model *model, MicroBatch *micro, Chunk chunk);
void chunk_backward_input(Model *model, MicroBatch *micro, Chunk chunk);
void chunk_backward_weight(Model *model, MicroBatch *micro, Chunk chunk);
// B and W of each unit, one after the other: less is held in between.
void chunk_backward(Model *model, MicroBatch *micro, Chunk chunk);
// What is to be called when W has added to all gradients of a unit: tells the gradients socket, and is fatal
// where that leaves a 16-bit gradient of this micro-batch in place of adding it to the sums.
void model_gradient_ready(Model *model, int unit);
// Before a step: every unit's gradient will be final so many times; then the last one is known.
void model_begin_step(Model *model, int64_t micro_batches);

// The whole model on one device.
void model_forward(Model *model, MicroBatch *micro);
void model_backward(Model *model, MicroBatch *micro);

// What recomputation needs. block_compute fills micro->block[layer] again from its x and returns the
// block's output (the caller's to free); block_drop frees what a block keeps, all but x if keep_input.
Tensor block_compute(Model *model, MicroBatch *micro, int layer);
void block_drop(Model *model, BlockKept *kept, bool keep_input);

#endif
