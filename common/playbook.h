// playbook.h: the contract page. Under one banner per chapter file, the few functions that the file offers
// to others, with shapes. Reading this header is reading the playbook as signatures.
//
// Letters: b micro-batch, s sequence, n = b s tokens, h hidden, a heads, d head size, kv key/value heads,
// f feed-forward, v vocabulary, L layers. A gradient is "d" and the name. Shapes are what this rank stores.
#ifndef PLAYBOOK_H
#define PLAYBOOK_H

#include "base.h"
#include "train/checkpoint.h"
#include "report/clock.h"
#include "comm/comm.h"
#include "train/config.h"
#include "train/data.h"
#include "comm/mesh.h"
#include "tensor/ops.h"
#include "train/optim.h"
#include "train/params.h"
#include "report/report.h"
#include "tensor/rng.h"
#include "tensor/tensor.h"
#include "report/timeline.h"

// ==========================================================================================================
// 00_single_gpu/transformer.c, model.c: the model and its sockets
// ==========================================================================================================

typedef struct Model Model;

// What attention keeps for its backward. The default keeps probs.
typedef struct AttentionKept {
    Tensor probs;  // (b, a, s, s)
    void *more;    // a plug's own
} AttentionKept;

// What the feed-forward part keeps; dgate and dup are what B leaves to W.
typedef struct MlpKept {
    Tensor gate, up, act;  // (n, f)
    Tensor dgate, dup;     // (n, f)
    void *more;
} MlpKept;

// All that one block keeps for backward, for one micro-batch. Owned by the micro-batch.
typedef struct BlockKept {
    Tensor x;             // (n, h) input of the block
    Tensor rstd1, norm1;  // (n), (n, h) output of the attention norm
    Tensor q, k, v;       // (n, a d), (n, kv d), (n, kv d), q and k after RoPE
    AttentionKept attention;
    Tensor o;             // (n, a d) output of attention, before its projection
    Tensor x2;            // (n, h) x + attention
    Tensor rstd2, norm2;  // (n), (n, h) output of the MLP norm
    MlpKept mlp;
    Tensor dy, dx2, dq, dk, dv;  // what B leaves to W: gradients at the outputs of the linears
} BlockKept;

typedef struct HeadKept {
    Tensor x, rstd, norm;  // (n, h), (n), (n, h)
    Tensor logits, lse;    // (n, v), (n)
    // B turns logits into dlogits in place and leaves them to W
} HeadKept;

// One micro-batch on its way: its inputs, what flows between stages, what each block keeps. Several may be
// in flight.
typedef struct MicroBatch {
    int64_t index;  // which one of the step, from 0
    bool last;      // no other of this step comes after it
    int64_t b, s;
    Tensor tokens, targets, positions;  // (n) i32
    double loss_scale;                  // 1 / valid labels of the whole global batch
    Tensor x;                           // (n, h) flows forward: output of the last unit that ran
    Tensor dx;                          // (n, h) flows backward: gradient at that unit's input
    BlockKept *block;                   // one for each block of this stage
    HeadKept head;
    double loss;  // this micro-batch's share of the mean loss of the global batch
} MicroBatch;

// The sockets. B adds to the gradients of norms and W to those of matrices, so a unit's gradients must
// exist from its B on; W may call region.enter once more, for what B did not keep. Empty ones hold the
// single-device behaviour; a chapter's plug overwrites one and leaves the rest.
typedef enum Pass { FORWARD, BACKWARD } Pass;

typedef struct Sockets {
    // parameters: before a unit's weights are used in a pass, and after their last use in it; when the
    // optimizer has stepped this rank's part of the unit, first unit first; and before somebody else than a
    // pass reads weights, which may have come from other ranks only in part
    struct {
        void *context;
        void (*acquire)(void *context, Model *model, int unit, Pass pass);
        void (*release)(void *context, Model *model, int unit, Pass pass);
        void (*stepped)(void *context, Model *model, int unit);
        void (*settle)(void *context, Model *model);
    } parameters;
    // gradients: backward is about to add to the unit's gradient (again, maybe); the unit's gradient of this
    // micro-batch is final; and this micro-batch's backward has ended
    struct {
        void *context;
        void (*begin)(void *context, Model *model, int unit, MicroBatch *micro);
        void (*ready)(void *context, Model *model, int unit, MicroBatch *micro);
        void (*finish)(void *context, Model *model, MicroBatch *micro);
    } gradients;
    // region: into and out of the part of a block that tensor parallelism shards. Returns a tensor of the
    // caller's own.
    struct {
        void *context;
        Tensor (*enter)(void *context, Tensor x);            // f: identity;            g: all-gather
        Tensor (*leave)(void *context, Tensor partial);      // f*: all-reduce;         g*: reduce-scatter
        Tensor (*enter_backward)(void *context, Tensor dx);  // f: all-reduce;          g: reduce-scatter
        Tensor (*leave_backward)(void *context, Tensor dy);  // f*: identity;           g*: all-gather
    } region;
    // embedding and loss. A rank may hold some rows of x alone (sequence parallelism), some columns of the
    // logits alone (vocabulary parallelism), or both; tokens and targets are those of the whole micro-batch.
    struct {
        void *context;
        Tensor (*lookup)(void *context, Tensor tokens, Tensor weight);  // x, new
        void (*lookup_backward)(void *context, Tensor dweight, Tensor dx, Tensor tokens);  // dweight +=
        // into and out of the output layer, as region's; a tensor of the caller's own
        Tensor (*enter)(void *context, Tensor x);
        Tensor (*enter_backward)(void *context, Tensor dx);
        // The sum of the losses of all tokens of the micro-batch; *lse is new, what loss_backward needs of it.
        double (*loss)(void *context, Tensor *lse, Tensor logits, Tensor targets);
        // dlogits = scale d(sum)/dlogits; may alias logits
        void (*loss_backward)(void *context, Tensor dlogits, Tensor logits, Tensor lse, Tensor targets,
                              double scale);
    } vocabulary;
    // attention: q, k, v to o. `again` makes again what recomputation dropped from kept.
    struct {
        void *context;
        void (*forward)(void *context, Tensor o, AttentionKept *kept, Tensor q, Tensor k, Tensor v,
                        AttentionShape shape);
        void (*backward)(void *context, Tensor dq, Tensor dk, Tensor dv, Tensor d_o, AttentionKept *kept,
                         Tensor q, Tensor k, Tensor v, Tensor o, AttentionShape shape);
        void (*drop)(void *context, AttentionKept *kept);
        void (*again)(void *context, AttentionKept *kept, Tensor q, Tensor k, Tensor v,
                      AttentionShape shape);
    } attention;
    // mlp: the feed-forward part of a block; x (n, h) is the output of its norm, already inside the region
    struct {
        void *context;
        Tensor (*forward)(void *context, Model *model, int layer, MlpKept *kept, Tensor x);  // (n, h), new
        Tensor (*backward_input)(void *context, Model *model, int layer, MlpKept *kept,
                                 Tensor dy);  // dx (n, h), new
        void (*backward_weight)(void *context, Model *model, int layer, MlpKept *kept, Tensor dy, Tensor x);
        void (*drop)(void *context, MlpKept *kept);
    } mlp;
    // linear: every matrix multiply with a weight (out, in); `count` of them that read one input go together
    struct {
        void *context;
        void (*forward)(void *context, Model *model, int count, Param *const *weight, const Tensor *y,
                        Tensor x);  // y[i] = x W_i^T
        void (*backward_input)(void *context, Model *model, int count, Param *const *weight, Tensor dx,
                               const Tensor *dy);  // dx = sum over i of dy[i] W_i
        void (*backward_weight)(void *context, Model *model, int count, Param *const *weight,
                                const Tensor *dy, Tensor x);  // dW_i += dy[i]^T x
    } linear;
    // activations: after a block's forward, and before its backward
    struct {
        void *context;
        void (*after_forward)(void *context, Model *model, MicroBatch *micro, int layer);
        void (*before_backward)(void *context, Model *model, MicroBatch *micro, int layer);
    } activations;
} Sockets;

// Where a block's weights stand in the table.
typedef struct BlockParams {
    Param *norm1, *q, *k, *v, *o, *norm2, *gate, *up, *down;
} BlockParams;

struct Model {
    Config config;
    Mesh mesh;
    Params params;
    int64_t layers;                                   // blocks of this stage
    Param *embedding, *norm, *head;                   // head is embedding when tied
    BlockParams *block;                               // (layers)
    int embedding_unit, first_block_unit, head_unit;  // units of the table; blocks follow one another
    Sockets sockets;
};

Model *model_new(const Config *config, Mesh mesh);
void model_free(Model *model);
Sockets sockets_single_device(void);

// A micro-batch of b samples; targets[i] may be IGNORED_LABEL.
// tokens, targets (b s) host. The caller ends it with micro_batch_free.
MicroBatch micro_batch_new(const Model *model, int64_t index, int64_t b, const int32_t *tokens,
                           const int32_t *targets, double loss_scale);
void micro_batch_free(Model *model, MicroBatch *micro);
// Fatal when the micro-batch's loss is NaN or infinite, naming the first tensor that is.
void micro_batch_check_loss(const Model *model, const MicroBatch *micro);

// Stage functions, in the order of one pass. Forward leaves its output in micro->x, backward the gradient
// at its input in micro->dx. backward_input is B, backward_weight is W; W may come any time after B of the
// same micro-batch.
void embedding_forward(Model *model, MicroBatch *micro);         // x = embedding[tokens]
void block_forward(Model *model, MicroBatch *micro, int layer);  // keeps micro->block[layer]
void head_forward(Model *model, MicroBatch *micro);              // norm, logits, loss
void head_backward_input(Model *model, MicroBatch *micro);
void head_backward_weight(Model *model, MicroBatch *micro);
void block_backward_input(Model *model, MicroBatch *micro, int layer);
void block_backward_weight(Model *model, MicroBatch *micro, int layer);
void embedding_backward(Model *model, MicroBatch *micro);  // W only: tokens have no gradient

// What recomputation needs. block_compute fills micro->block[layer] again from its x and returns the
// block's output (the caller's to free); block_drop frees what a block keeps, all but x if keep_input.
Tensor block_compute(Model *model, MicroBatch *micro, int layer);
void block_drop(Model *model, BlockKept *kept, bool keep_input);

// All of them in order, on one device.
void model_forward(Model *model, MicroBatch *micro);
void model_backward(Model *model, MicroBatch *micro);

// ==========================================================================================================
// 00_single_gpu/train.c: one training step, and whole runs as the baseline of every other chapter
// ==========================================================================================================

// One step's samples of this rank on the host: micro_batch x grad_acc of them from global index `first` on.
typedef struct Batch {
    int64_t first, samples, count;  // count = samples * s
    int32_t *tokens, *targets;      // (samples, s)
} Batch;

typedef struct Trainer {
    Config config;
    Data data;
    Model *model;
    Optimizer optimizer;
    Progress progress;
    bool masked;                 // ignore the labels of each sample's prompt: unequal label counts
    Batch ahead;                 // of the step to come, if it is already read; labels_ahead: in all ranks'
    double labels_ahead;
    double loss, grad_norm, lr;  // of the last step
    int64_t kept_bytes;          // activations held when a micro-batch's forward had ended, peak
} Trainer;

Trainer *trainer_new(const Config *config, Mesh mesh);
void trainer_free(Trainer *trainer);
// Before the first trainer of a run with --resume, whose model's shape config already has (checkpoint_config):
// whether its checkpoint can go on with these flags on so many ranks of dp, by checkpoint_check_run.
void resume_check(const Config *config, int dp);
// Goes on from the newest checkpoint in config.resume, whatever layout wrote it. Plugs come afterwards.
void trainer_resume(Trainer *trainer);
// After a step: writes a checkpoint if --save and --save-every want one of it. Collective.
void trainer_save(Trainer *trainer);
// grad_acc micro-batches forward and backward, then clipping and the optimizer. `record` (may be NULL)
// takes the raw gradients of the run's first step. Fatal, naming step and tensor, when a loss or gradient
// is not finite.
void train_step(Trainer *trainer, Record *record);
// Mean loss over the first `samples` held-out samples.
double held_out_loss(Trainer *trainer, int64_t samples);
// Runs config.steps steps (fewer after a resumption) and records them; --save saves. The caller ends it with record_free.
Record train_record(Trainer *trainer, const char *title);
// How close to `baseline` a run with reordered sums must come: 1e-10 in f64, else measured
// against a run in f64.
double train_bound(const Config *config, bool masked, const Record *baseline);
// FLOP/s of op_matmul on size x size matrices, best of five: the yardstick for this machine.
double matmul_rate(DType dtype, int64_t size);

Batch batch_new(const Trainer *trainer, int64_t first_sample);
void batch_free(Batch *batch);

// ==========================================================================================================
// 00_single_gpu/prove.c: programs on many ranks, held to one device
// ==========================================================================================================

// How the ranks of a program share the work.
typedef struct LayoutProgram {
    const char *purpose, *claim;  // of --help, and of the verdict; a twin's claim is its title
    const char *defaults;         // as config_parse takes them
    int natural;                  // ranks, if nobody says how many
    // What this program demands of its flags, fatal; of a twin, also what it changes in them. May be NULL.
    void (*check)(Config *config);
    // Fills sockets of trainer->model, by trainer->config; returns what unplug frees after the run.
    void *(*plug)(Trainer *trainer);
    void (*unplug)(Trainer *trainer, void *plugs);
    // Holds what the run counted (comm_count, record->memory) against closed formulas; may be NULL.
    void (*counts)(const Trainer *trainer, const Record *record, void *plugs);
    const struct LayoutProgram *twin;  // must give the same bits on the same ranks; may be NULL
    void (*more)(Mesh mesh, const Config *config);  // what else the program shows; may be NULL
} LayoutProgram;

int layout_program(int argc, char **argv, const LayoutProgram *program);  // a whole main; the exit status
// Its parts. Trains with the program's plugs (NULL: none, one device), from --resume's checkpoint if any.
Record layout_record(const Config *config, Mesh mesh, const LayoutProgram *program, bool masked,
                     const char *title);
// That run against its twin and against one device.
void layout_prove(const Config *config, Mesh mesh, const LayoutProgram *program, bool masked);
// One dry step after the first, on the model clock. device_dry_run must be on.
typedef struct StepCost {
    double step_seconds, flops;
    CommCount comm;  // of all kinds
    Memory memory;
} StepCost;
StepCost layout_cost(const Config *config, Mesh mesh, const LayoutProgram *program);

// ==========================================================================================================
// 00_single_gpu/grad_accumulation.c: gradient accumulation
// ==========================================================================================================

// How many targets are labels, that is not ignored.
int64_t count_labels(const int32_t *targets, int64_t count);
// What makes a sum of token losses a mean: 1 / labels; 0 if there are none.
double mean_loss_scale(double labels);
// Zeroes the gradients, then runs the batch in grad_acc micro-batches of equal size whose gradients
// add up. Returns the sum of the micro-batches' losses; loss_scale[i] multiplies the summed token
// losses of micro-batch i. *kept_bytes (may be NULL) is raised to the activation bytes held between
// forward and backward.
double accumulate_gradients(Model *model, const Batch *batch, int64_t grad_acc, const double *loss_scale,
                            int64_t *kept_bytes);

// ==========================================================================================================
// 00_single_gpu/recompute.c: activation recomputation
// ==========================================================================================================

// Plugs the activations socket: RECOMPUTE_SELECTIVE drops attention's probabilities,
// RECOMPUTE_FULL all but x.
void recompute_plug(Model *model, Recompute recompute);
// FLOPs that a step over `sequences` samples computes a second time, by config->recompute.
double recompute_extra_flops(const Config *config, int64_t sequences);

// ==========================================================================================================
// 00_single_gpu/formulas.c: memory before it is allocated, and what recomputation saves and costs
// ==========================================================================================================

// How a model is trained, as the playbook's memory widget asks.
typedef struct MemoryPlan {
    Config model;        // shape, dtype, micro_batch, recompute
    bool gpt;            // the playbook's block (GPT: LayerNorm, biases, dropout, GELU); else this book's
    bool f32_gradients;  // 16-bit gradients are summed over micro-batches in f32
    double optimizer_bytes;  // k, bytes of optimizer for each parameter; 0: AdamW's for the dtype
    int64_t zero, tp, dp;    // stage 0 to 3, degrees
    bool sp;                 // sequence parallelism beside tp
    bool whole_vocabulary;   // tp leaves embedding and output layer whole on every rank; else it cuts them
} MemoryPlan;

typedef struct MemoryNeed {  // bytes on one rank
    double parameters, gradients, accumulators, optimizer;
    double blocks, ends;  // activations held when forward has ended: blocks; inputs and head
} MemoryNeed;

MemoryNeed memory_need(const MemoryPlan *plan);
// The states of so many parameters, by ZeRO's formulas, and the sum of the states in a need.
MemoryNeed memory_states(const MemoryPlan *plan, double parameters);
double memory_states_bytes(const MemoryNeed *need);
// Parameters that a rank of plan->tp computes with.
double memory_rank_parameters(const MemoryPlan *plan);
// Bytes that one block keeps for backward on one rank, for one micro-batch.
double memory_block_activations(const MemoryPlan *plan);
void memory_print_block(const MemoryPlan *plan);  // the same, tensor by tensor

// The most bytes of activations that a rank ever holds: of this book's block, with plan->tp and plan->sp.
double memory_peak_activations(const MemoryPlan *plan);

// This book's model on one device, to the byte: the activations that one micro-batch holds between forward
// and backward, and the most that it ever holds.
int64_t kept_activation_bytes(const Config *config);
int64_t peak_activation_bytes(const Config *config);

// L=96 h=12288 a=96 s=2048 v=51200, one sequence in bf16: for the formulas alone, with .gpt = true.
Config gpt3_175b(void);
// Recomputation of GPT's block, as shares of what training without it takes.
typedef struct RecomputeCost {
    double selective_memory;           // share of the blocks' activation bytes that selective saves
    double selective_flops;            // extra FLOPs of repeating attention's core forward
    double selective_flops_published;  // the same in Korthikanti et al. 2022, which count backward, too
    double full_flops;                 // extra FLOPs of repeating every block's forward
} RecomputeCost;
RecomputeCost recompute_cost(const Config *gpt);

// ==========================================================================================================
// 01_data_parallel/before_after.c: what all ranks hold before and after a call
// ==========================================================================================================

typedef struct Held {  // a row for each rank; values on rank 0 alone
    int ranks;
    int64_t width;   // of a row: a count, and so many elements at most
    double *values;  // (ranks, width)
} Held;

typedef struct Example {
    const char *call;  // its name in comm_count
    Group group;
    Held before;
} Example;

// `before`: what this rank holds, or {0}. Counts begin here.
Example example_begin(const char *call, const char *title, Tensor before, Group group);
// Prints what all hold before and after, compares `after` (or {0}) with `expected` and the bytes that this rank
// has sent with `bytes`, and frees both tensors. `printed`: what the playbook prints for so many ranks, or NULL.
void example_end(Example *example, Tensor after, Tensor expected, double bytes, const char *printed);

// ==========================================================================================================
// 01_data_parallel/ring_all_reduce.c: all-reduce from sends to a neighbour alone
// ==========================================================================================================

// All in place and blocking; t has the same shape on all members. Chunks are count / n elements, the first
// count % n one more. Sums are rounded to t's dtype at each addition, which run from member i + 1 round to i in
// chunk i; every member gets the same bits.
Tensor ring_chunk(Tensor t, int i, Group ring);  // chunk i modulo n, borrowed
void ring_reduce_scatter(Tensor t, Group ring);  // chunk `rank` becomes the sum; the others hold parts of theirs
void ring_all_gather(Tensor t, Group ring);      // chunk i comes from member i
void ring_all_reduce(Tensor t, Group ring);      // both

// ==========================================================================================================
// 01_data_parallel: the gradients socket, four times
// ==========================================================================================================

// Data parallelism: every rank of mesh.dp holds the model and takes its own samples; gradients are summed over dp.
// The loss is already divided by the labels of all ranks, so the sum is the gradient of the global batch.
typedef struct Ddp {
    int64_t
        bucket_bytes;   // ddp_bucketed, ddp_no_sync: gradients that are sent at once; a unit is never cut
    Request **pending;  // started and not yet waited for
    int count;
    int next_unit;  // ddp_bucketed: the units from here on are sent
} Ddp;

// Each fills model->sockets.gradients, with *ddp as its context; *ddp outlives the model's use.
void ddp_naive_plug(Model *model, Ddp *ddp);     // after the last backward, one parameter after another
void ddp_overlap_plug(Model *model, Ddp *ddp);   // each parameter as soon as its unit's gradient is final
void ddp_bucketed_plug(Model *model, Ddp *ddp);  // units together, until bucket_bytes are full
void ddp_no_sync_plug(Model *model, Ddp *ddp);   // the same, after the last micro-batch alone
// The socket's functions of ddp_bucketed, for who wraps them.
void ddp_bucketed_ready(void *context, Model *model, int unit, MicroBatch *micro);
void ddp_bucketed_finish(void *context, Model *model, MicroBatch *micro);
// Number of buckets, and for each the first of its units (from the last unit of the model to the first one).
int ddp_bucket_starts(const Params *params, int64_t bucket_bytes, int *first_unit);

// 01_data_parallel/ddp.c: the proof that the four share. Trains with the plug on all ranks and without it on one device,
// and compares. `all_reduces` says how many a step makes. Returns the exit status.
typedef struct DdpProgram {
    const char *purpose, *claim;
    void (*plug)(Model *model, Ddp *ddp);
    int64_t (*syncs)(const Config *config);  // how often a step makes the ranks' gradients equal
    int64_t (*all_reduces)(const Model *model, const Ddp *ddp);  // and with how many calls each time
    void (*more)(Mesh mesh, const Config *config);  // what else the program shows; may be NULL
} DdpProgram;
int ddp_prove(int argc, char **argv, const DdpProgram *program);
// One step of this plug, dry, on the model clock: its time and how much of it is exposed communication.
typedef struct DdpCost {
    double step_seconds, exposed_seconds;
    int64_t all_reduces, bytes;  // this rank's, of gradients
} DdpCost;
DdpCost ddp_cost(const Config *config, Mesh mesh, void (*plug)(Model *model, Ddp *ddp),
                 int64_t bucket_bytes);

// ==========================================================================================================
// 02_zero: what data parallelism stores on every rank, cut over these ranks, one kind after another
// ==========================================================================================================

// When the weights that each rank has stepped come to the others: behind the next forward, behind the step
// of the units that follow, or after the step.
typedef enum ZeroGather { GATHER_BEHIND_FORWARD, GATHER_BEHIND_STEP, GATHER_AFTER_STEP } ZeroGather;

// ZeRO over the ranks of mesh.dp. Their parts of a unit are Unit.own_first and own_count, equal or not, or
// empty.
typedef struct Zero {
    ZeroGather gather;     // zero1, zero2
    bool no_prefetch;      // zero3: a unit's weights are gathered when they are used, and not before
    Ddp ddp;               // stage 0
    Request **reductions;  // (units) of gradients, started and not yet waited for; else NULL
    Request **gathers;     // (units) of weights, likewise
    int travelling;        // zero2, zero3: the unit whose gradient is being reduced, or -1 …
    Tensor gradient;       // … and this gradient, whole
    bool at_head;          // zero3: the head is in use
} Zero;

// Each fills the sockets parameters and gradients of a model that was built with this stage as config.zero,
// by the options of *zero, which begins as {0} or {.gather = …} and outlives the model's use.
void zero1_plug(Model *model, Zero *zero);  // optimizer state is cut
void zero2_plug(Model *model, Zero *zero);  // and gradients
void zero3_plug(Model *model, Zero *zero);  // and weights
// The one that config.zero names; stage 0 stores everything: ddp_no_sync.
void zero_plug(Model *model, Zero *zero);
// Waits for what is on its way, gives back what was gathered, and empties the sockets.
void zero_unplug(Model *model, Zero *zero);

// 02_zero/zero.c: the proof that the three share, as parts of a LayoutProgram. Demands a program's own
// stage, and of the layout data parallelism alone.
void zero_check(const Config *config, int stage);
void *zero_layout_plug(Trainer *trainer);                   // zero_plug with standard options …
void *zero_layout_plug_with(Trainer *trainer, Zero options);  // … or these
void zero_layout_unplug(Trainer *trainer, void *zero);
// What stages 1 to 3 do in a step: reduce-scatters of gradients and all-gathers of weights, and the elements, whole, that
// go through them.
typedef struct ZeroSends {
    double reductions, reduced, gathers, gathered;
} ZeroSends;
ZeroSends zero_sends(const Model *model);
// Calls, bytes and memory of a run whose ranks talk for ZeRO alone, against closed formulas.
void zero_counts(const Trainer *trainer, const Record *record, void *zero);
// Nothing is cut, and sums run in the same order: over micro-batches and then ranks (zero1), or over ranks
// and then micro-batches (zero2, zero3).
extern const LayoutProgram zero_twin_of_1, zero_twin_of_2_and_3;
// Steps of Llama 3 8B, dry, on the model clock: 16,384 tokens a rank in one micro-batch, bf16, AdamW.
typedef struct ZeroVariant {
    const char *name;
    int stage;
    void *(*plug)(Trainer *trainer);
    void (*unplug)(Trainer *trainer, void *plugs);
} ZeroVariant;
// Prints and sets a row for each, and returns the shape.
Config zero_compare(Mesh mesh, const ZeroVariant *variants, int count, StepCost *cost);
// Whether the flags leave the model clock at DGX H100 and all of its peaks, for which some figures are
// demanded.
bool zero_on_standard_machine(const Config *config);
// 02_zero/zero3_overlap.c: from how many tokens on, and up to how many ranks, ZeRO-3 hides what it sends.
void zero3_overlap(Mesh mesh, const Config *config);

// ==========================================================================================================
// 02_zero/zero_r.c: what else fills memory
// ==========================================================================================================

// Ranks of tp hold the same inputs of blocks: each keeps its part of them, and all-gathers them for recomputation.
typedef struct ZeroR {
    Group tp;
    bool contiguous;  // parts stand in one tensor, allocated once, instead of one tensor for each
    int64_t part;     // elements of the largest part
    Tensor arena;     // (L part + n h) then: parts, and what flows from block to block
} ZeroR;

// Fills the activations socket, in place of recompute_plug, for one micro-batch in flight at a time. *zero_r outlives the
// model's use.
void zero_r_plug(Model *model, ZeroR *zero_r);
void zero_r_unplug(Model *model, ZeroR *zero_r);

// Gradients are summed over mesh.dp after the last micro-batch, in one buffer of so many bytes at most.
typedef struct ConstantBuffer {
    int64_t bytes;
    Tensor buffer;  // flat, in the dtype of sums
} ConstantBuffer;

void constant_buffer_plug(Model *model, ConstantBuffer *buffer);  // fills the gradients socket
void constant_buffer_unplug(Model *model, ConstantBuffer *buffer);

// ==========================================================================================================
// 03_tensor_parallel: the region socket, twice, and gradients that are parts
// ==========================================================================================================

// Every rank of mesh.tp computes its heads and its part of the feed-forward width on the same tokens; the table
// cuts the weights (params.h). Embedding and output layer stay whole on every rank unless a plug of the
// vocabulary cuts them.
typedef struct TensorParallel {
    Group tp;
    int64_t tokens;  // sequence_parallel: n = b s of a micro-batch
    Sockets before;  // as they were: what these plugs add to, they call
} TensorParallel;

// Each fills model->sockets.region, with *tp as its context, and plugs partial gradients: so after a plug of
// the gradients, and before one of the vocabulary. *tp outlives the model's use.
void tensor_parallel_plug(Model *model, TensorParallel *tp);    // f, f*: x (n, h) on every rank
void sequence_parallel_plug(Model *model, TensorParallel *tp);  // g, g*: x (rows of this rank, h)
// The rows of n that a rank has, [*first, *first + returned): contiguous runs, of which the first n % size are
// a row longer.
int64_t sequence_rows(int64_t n, int rank, int size, int64_t *first);
// The elements of each rank's rows, as collectives take them. counts (size).
void sequence_counts(int64_t n, int64_t columns, int size, int64_t *counts);
// After a step's last micro-batch, and after what gradients.finish did so far, partial gradients (params.h) are
// summed over the ranks that hold copies of the weight: a message for each group of them.
void partial_gradients_plug(Model *model, TensorParallel *tp);

// 03_tensor_parallel/layouts.c: what --dp --tp --sp --vocab-parallel --zero ask for, as parts of a LayoutProgram.
void *layout_plug(Trainer *trainer);
void *layout_plug_async(Trainer *trainer);  // the same, and async_tensor_parallel_plug
void layout_unplug(Trainer *trainer, void *plugs);
// Calls, bytes and memory against closed formulas, and copies of a weight against each other, to the bit.
void layout_counts(const Trainer *trainer, const Record *record, void *plugs);
// Messages by kind of call.
typedef struct Sent {
    double calls, bytes;  // of this rank; of all ranks together
} Sent;
typedef struct Sends {
    Sent all_reduce, all_gather, reduce_scatter, transfers;
} Sends;
// What one more block adds to a micro-batch, counted in a dry run. device_dry_run must be on.
typedef struct BlockCost {
    Sends pass[2];  // by Pass
    double kept;    // bytes of activations that this rank keeps for backward
} BlockCost;
BlockCost layout_block_cost(const Config *config, Mesh mesh);

// ==========================================================================================================
// 03_tensor_parallel/vocab_parallel.c: embedding, output layer and loss cut over the vocabulary
// ==========================================================================================================

typedef struct VocabParallel {
    Group tp;
    VocabularyPart part;  // this rank's
    Sockets before;       // as they were: what a lookup leaves by
    const Sockets *on;    // as they are: what the output layer is entered by
} VocabParallel;

// Fills model->sockets.vocabulary, with *vocab as its context: after a plug of the region, which then serves the
// vocabulary, too. *vocab outlives the model's use.
void vocab_parallel_plug(Model *model, VocabParallel *vocab);

// ==========================================================================================================
// 03_tensor_parallel/async_tensor_parallel.c: rows travel while others are multiplied
// ==========================================================================================================

typedef struct AsyncTensorParallel {
    Group tp;
    int64_t tokens;      // n = b s of a micro-batch
    Sockets before;      // as they were: each piece is multiplied by their linear
    Request **in, **out;  // (tp) of each step, those under way
    Tensor coming;       // (n, h) whose rows are on their way here; {0}: none
    Tensor leaving;      // (n, h) partial, whose rows are on their way to their ranks; {0}: none
    Tensor parts;        // (tp, rows, h) what the ranks have of this one's rows of `leaving`
} AsyncTensorParallel;

// Fills model->sockets.region and linear, after sequence_parallel_plug. Rows that enter must be multiplied by linears of
// the socket and by nothing else; what leaves was made by one, and is not touched in between.
void async_tensor_parallel_plug(Model *model, AsyncTensorParallel *async);

#endif
