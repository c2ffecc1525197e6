// transformer.h: the model and its sockets, on one page.
//
// Letters: b micro-batch, s sequence, n = b s tokens, h hidden, a heads, d head size, kv key/value heads,
// f feed-forward, v vocabulary, L layers. A gradient is "d" and the name. Shapes are what this rank stores.
//
// Backward has two halves: B computes the gradients of activations, down to a unit's input; W adds to those
// of weights, and may run later. A socket is a set of functions that the model calls at given points of a
// step; a technique's plug replaces some of them.
#ifndef TRANSFORMER_H
#define TRANSFORMER_H

#include "comm/mesh.h"
#include "tensor/ops.h"
#include "train/config.h"
#include "train/params.h"

// ---- the weights ----

// The role of a weight in the model; techniques shard by role.
// clang-format off
typedef enum Role {
    ROLE_EMBEDDING,                              // (v, h)
    ROLE_NORM1, ROLE_Q, ROLE_K, ROLE_V, ROLE_O,  // (h); (a d, h), (kv d, h) twice, (h, a d)
    ROLE_NORM2, ROLE_GATE, ROLE_UP, ROLE_DOWN,   // (h); (f, h) twice, (h, f)
    ROLE_NORM, ROLE_HEAD,                        // (h); (v, h), absent where the embedding is tied to it
    ROLE_ROUTER,                                 // (e, h) where a block has experts; for each expert:
    ROLE_EXPERT_GATE, ROLE_EXPERT_UP, ROLE_EXPERT_DOWN,  // (f, h) twice, (h, f)
    ROLES                                                // a chapter's own roles begin here
} Role;
// clang-format on

// A block's weights in the table. With experts, gate, up and down are the shared expert, which all tokens
// pass through; NULL if there is none.
typedef struct BlockParams {
    Param *norm1, *q, *k, *v, *o, *norm2, *gate, *up, *down;
    Param *router;                                 // NULL without experts
    Param *expert_gate, *expert_up, *expert_down;  // (e) each
} BlockParams;

// ---- what forward keeps for backward ----

typedef struct AttentionKept {
    Tensor probs;  // (b, a, s, s), kept by the single-device attention
    void *more;    // private to a plug
} AttentionKept;

// What the feed-forward part keeps; dgate, dup and dy are computed by B and used by W.
typedef struct MlpKept {
    Tensor gate, up, act;  // (n, f)
    Tensor dgate, dup;     // (n, f)
    Tensor dy;             // (n, h) inside the region
    void *linear[2];       // private to the linear socket: for gate and up, and for down
    void *more;            // private to a plug
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
    void *linear[2];            // private to the linear socket: for q, k and v, and for o
    Tensor dx2, dq, dk, dv;     // computed by B, used by W: gradients at the outputs of the linears …
    Tensor dweight1, dweight2;  // … and (h) of the norms' weights
} BlockKept;

typedef struct HeadKept {
    Tensor x, rstd, norm;  // (n, h), (n), (n, h)
    Tensor logits, lse;    // (n, v), (n)
    void *linear;
    Tensor dweight;  // (h) of the norm
    // B turns logits into dlogits in place; W uses them
} HeadKept;

// One micro-batch in flight: its inputs, what flows between stages, what each block keeps. Several may be
// in flight at once.
typedef struct MicroBatch {
    int64_t index;  // in the step, from 0; -1: not training
    int64_t b, s;
    Tensor tokens, targets, positions;  // (n) i32
    int32_t *documents;  // (b, whole sequence) host, each token's document from 0; NULL: a sequence is one
    double loss_scale;   // of the loss: 1 / valid labels of the whole global batch
    double grad_scale;   // of its gradient: the same, times Model.grad_scale
    Tensor x;            // (n, h) forward: output of the last unit that ran
    Tensor dx;           // (n, h) backward: gradient at that unit's input
    BlockKept **block;   // (L) made by the block's forward; NULL: it has not run on this rank
    HeadKept head;
    Tensor loss;          // (1) f64: what this micro-batch adds to the mean loss of the global batch
    int embedding_parts;  // Ws still to add to the embedding's gradient: with tied weights 2 on one device
} MicroBatch;

// One step's samples of this rank.
typedef struct StepInput {
    int64_t micro_batches, b;
    const int32_t *tokens, *targets;  // (micro_batches b, s) host, whole sequences; NULL in a dry run
    const double *loss_scale;         // (micro_batches)
    Tensor loss;                      // (1) f64 on the device: += the losses of this rank's micro-batches
    int64_t *kept_bytes;  // raised to the activation bytes held at the end of a forward; may be NULL
} StepInput;

// ---- the sockets: where a parallelism plugs in ----

// An empty socket has the single-device behaviour (sockets.c); a technique's plug fills some and leaves the
// rest. A socket's functions are passed its `context`, which may be NULL; no function is. B adds to no
// weight's gradient: it keeps what it computes for W. So only W calls the gradients socket, and the Bs and
// Ws of several micro-batches may run in any legal order.
typedef struct Model Model;
typedef enum Pass { FORWARD, BACKWARD } Pass;

typedef struct Sockets {
    // Which tokens of each sequence this rank has: how many, and the position of the i-th.
    struct {
        void *context;
        int64_t (*count)(void *context, int64_t s);
        int64_t (*position)(void *context, int64_t s, int64_t i);
    } tokens;
    // acquire: before a unit's weights are used in a pass; release: after their last use in it (BACKWARD is
    // B: W uses no weights). stepped: the optimizer has stepped this rank's part of a unit; units come in
    // order, also in a step that is skipped. What a plug changes here in weights that have masters
    // (recipe.h) is lost in the next step. complete: before anything but a pass reads weights, which may be
    // in flight from other ranks, and after an evaluation.
    struct {
        void *context;
        void (*acquire)(void *context, Model *model, int unit, Pass pass);
        void (*release)(void *context, Model *model, int unit, Pass pass);
        void (*stepped)(void *context, Model *model, int unit);
        void (*complete)(void *context, Model *model);
    } parameters;
    // begin: W is about to add to the unit's gradient; called twice for a tied embedding, which then has
    // two Ws. ready: the unit's gradient is final for this micro-batch. On one device it adds 16-bit
    // gradients to their f32 sums: a plug that fills `ready` calls params_accumulate itself, or takes over
    // the gradient. micro_batch_ready: the gradients of all units are final. `last`: this is the step's
    // last micro-batch. finish: on return all reductions have finished; what it leaves is recorded for the
    // proof, clipped and stepped.
    struct {
        void *context;
        void (*begin)(void *context, Model *model, int unit);
        void (*ready)(void *context, Model *model, int unit, bool last);
        void (*micro_batch_ready)(void *context, Model *model, bool last);
        void (*finish)(void *context, Model *model);
    } gradients;
    // On entering and leaving the part of a block that tensor parallelism shards. f and f* are the playbook's
    // operators of tensor parallelism, g and g* those of sequence parallelism. The caller owns the returned
    // tensor. rows: how many x has outside that part.
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
    // Embedding and loss. A rank may hold only some rows of x (sequence parallelism), only some columns of
    // the logits (vocabulary parallelism), or both; tokens and targets are always those of the whole
    // micro-batch.
    struct {
        void *context;
        Tensor (*lookup)(void *context, const MicroBatch *micro, Tensor weight);  // x, new
        // dweight +=
        void (*lookup_backward)(void *context, const MicroBatch *micro, Tensor dweight, Tensor dx);
        // On entering and leaving the output layer, as in region.
        Tensor (*enter)(void *context, const MicroBatch *micro, Tensor x);
        Tensor (*enter_backward)(void *context, const MicroBatch *micro, Tensor dx);
        // micro->loss += loss_scale times the sum of the losses of all tokens of the micro-batch; *lse is
        // new, for loss_backward.
        void (*loss)(void *context, const MicroBatch *micro, Tensor *lse, Tensor logits);
        // dlogits = micro->grad_scale d(sum)/dlogits; may alias logits
        void (*loss_backward)(void *context, const MicroBatch *micro, Tensor dlogits, Tensor logits,
                              Tensor lse);
    } vocabulary;
    // q, k, v to o. `again` recomputes what recomputation dropped from kept.
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
    // Every matrix multiply with a weight (out, in); `count` of them that share one input go together.
    // *kept is private to the plug, from forward to drop.
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
    // Runs a step's micro-batches; evaluates one. The caller has zeroed the gradients and finishes them.
    // The host does not wait for the device in `run`, except for the row counts of a mixture of experts:
    // no loss is read before the end of the step.
    struct {
        void *context;
        void (*run)(void *context, Model *model, const StepInput *input);
        double (*evaluate)(void *context, Model *model, MicroBatch *micro);
    } schedule;
    // Whether the optimizer may step on gradients of this norm; the same answer on every rank. It may
    // change Model.grad_scale for later steps, and a plug that does so also decides what an infinite norm
    // means. A technique with its own optimizer updates the weights here and answers false: each unit's
    // own_values, from own_grads times clip_scale(norm, config.clip) / grad_scale. The trainer then calls
    // parameters.stepped for every unit, as always. Such a technique must refuse 16-bit weights, whose
    // masters only the trainer's optimizer reaches, and is run with --optimizer sgd, which keeps no state in
    // f64 and f32.
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
// The sockets that differ between a and b, as bits: 1 << socket.
unsigned sockets_difference(const Sockets *a, const Sockets *b);
// Those of which a function is NULL.
unsigned sockets_incomplete(const Sockets *sockets);
Sockets sockets_single_device(void);

// ---- the model ----

struct Model {
    Config config;
    Mesh mesh;
    Params params;
    Param *embedding, *norm, *head;                   // head is embedding when tied
    BlockParams *block;                               // (L), whether stored here or not
    int embedding_unit, first_block_unit, head_unit;  // units of the table; blocks are consecutive …
    int first_expert_unit;  // … and so, after the head, are the experts of each block; 0 without experts
    Sockets sockets;
    int64_t *ready_left;  // (units) how many more times in this step its gradient becomes final
    struct Routing *routing;  // of a step that is recorded (report.h); NULL: of any other
    double grad_scale;    // 1; a factor on gradients from the loss to the optimizer, which divides by it.
                          // Reported losses and norms do not include it.
};

// A model whose weights are listed but not allocated, each whole on every rank: techniques change
// params.recipe and shard it, then model_allocate.
Model *model_new(const Config *config, Mesh mesh);
void model_allocate(Model *model);
void model_free(Model *model);

// How many tokens of a micro-batch this rank has.
int64_t model_tokens(const Model *model);
// The token that ends a document (--documents); -1: a sequence is one document, whatever it holds.
int64_t config_document_end(const Config *config);
// A micro-batch of b samples; targets[i] may be IGNORED_LABEL.
// tokens, targets (b s) host; a dry run reads neither, and they may be NULL. The caller ends it with
// micro_batch_free.
MicroBatch micro_batch_new(const Model *model, int64_t index, int64_t b, const int32_t *tokens,
                           const int32_t *targets, double loss_scale);
// The micro-batch with this index of a step. loss_scale: what its losses are multiplied by, the input's for
// this index; an argument, so that a loop over micro-batches shows where the mean is taken.
MicroBatch micro_batch_of(const Model *model, const StepInput *input, int64_t index, double loss_scale);
void micro_batch_free(Model *model, MicroBatch *micro);
// A loss of 0: (1) f64 on the device, where it stays until the host needs it.
Tensor loss_new(void);
double loss_value(Tensor loss);  // waits for the device
// The first tensor, in forward order, that holds a NaN or an infinity: "weight model.norm.weight",
// "block 2 gate"; NULL: none on this rank. Static buffer.
const char *micro_batch_first_bad(const Model *model, const MicroBatch *micro);

// ---- stages ----

// A range of units: blocks first_layer … end_layer - 1, with the embedding before and the head after them.
typedef struct Chunk {
    int first_layer, end_layer;
    bool embedding, head;
} Chunk;
Chunk chunk_whole(const Model *model);  // all of the model, as one device runs it

// Forward leaves its output in micro->x, backward the gradient at its input in micro->dx. backward_input is
// B, backward_weight is W; W may come any time after B of the same micro-batch and chunk.
void chunk_forward(Model *model, MicroBatch *micro, Chunk chunk);
void chunk_backward_input(Model *model, MicroBatch *micro, Chunk chunk);
void chunk_backward_weight(Model *model, MicroBatch *micro, Chunk chunk);
// B and W of each unit in turn, which holds less memory than all Bs before all Ws.
void chunk_backward(Model *model, MicroBatch *micro, Chunk chunk);
// To be called when W has added to all gradients of a unit: calls the gradients socket, and is fatal if
// that leaves this micro-batch's 16-bit gradient in place instead of adding it to the sums.
void model_gradient_ready(Model *model, int unit);
// Before a step: every unit's gradient will become final this many times, so that the last is known.
void model_begin_step(Model *model, int64_t micro_batches);

// The whole model on one device.
void model_forward(Model *model, MicroBatch *micro);
void model_backward(Model *model, MicroBatch *micro);

// For recomputation. block_compute fills micro->block[layer] again from its x and returns the block's
// output (the caller frees it); block_drop frees what a block keeps, all but x if keep_input.
Tensor block_compute(Model *model, MicroBatch *micro, int layer);
void block_drop(Model *model, BlockKept *kept, bool keep_input);

#endif
