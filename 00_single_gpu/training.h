// training.h: what a technique is, one training step, and whole runs: the baseline of every other chapter.
#ifndef TRAINING_H
#define TRAINING_H

#include "comm/comm.h"
#include "grad_accumulation.h"
#include "report/report.h"
#include "train/checkpoint.h"
#include "train/data.h"
#include "train/optim.h"
#include "transformer.h"

// ---- what a run costs, before it runs ----

// How a tensor that forward keeps is sharded: not at all; by rows, with sequence parallelism; by heads or
// columns, with tensor parallelism.
typedef enum Split { EVERY_RANK, BY_SEQUENCE, BY_TENSOR } Split;

// Bytes of one tensor that forward keeps until backward, on this rank.
typedef struct PriceKept {
    const char *what;  // its name in BlockKept, HeadKept or MicroBatch
    double bytes;
    Split split;
    int dropped_from;  // the least recomputation that drops it
} PriceKept;

enum { MOST_KEPT = 24, MOST_CALLS = 16 };

// Starts as the price of one device. Each technique's price() changes its part, from the last plugged to
// the first, so how often a socket is called is known before the technique that fills it prices the calls.
typedef struct Price {
    // Calls of the region socket in a step, each on (n, h); lookups: how many of the leaves, and of the
    // leaves_backward, belong to the token lookup.
    double enters, leaves, enters_backward, leaves_backward, lookups;
    bool messages;                      // region calls next to a multiply send a message to each other rank
    double losses;                      // micro-batches whose loss is a sum over this rank's rows only
    double lookup_micros, head_micros;  // micro-batches whose lookup, and whose head, run on this rank
    double forwards;        // per block in a step: 1 for each micro-batch, and those of recomputation
    double attentions;      // forwards of attention: those above, and where it alone is recomputed
    double backwards;       // per block in a step
    const int64_t *finals;  // (units) how often a gradient becomes final in a step; NULL: each micro-batch
    double again;           // FLOPs of a step on one device that are computed a second time
    bool peak_counted;      // the peak of activations has no closed form: a dry run counts it
    bool peak_by_data;      // not even a dry run knows it: the data decides (how many rows experts get)
    // Calls and bytes sent in a step by this rank, by kind (comm.h's names).
    struct {
        const char *call;
        double calls, bytes;
    } sent[MOST_CALLS];
    int kinds;
    // Elements of weights by role, over all blocks of this rank.
    double elements[ROLES];
    // How many of them this rank stores values, gradients and optimizer state of; and the bytes on top of
    // these: of units in use, and of what a technique keeps for itself. Each adds its own (+=); NaN: only a
    // dry run knows.
    double values, gradients, states;  // elements; negative: all
    double more[MEMORY_KINDS];         // of MEMORY_PARAMETER, MEMORY_GRADIENT and MEMORY_OPTIMIZER
    double blocks;  // how many blocks' activations this rank keeps at once
    PriceKept block[MOST_KEPT], end[MOST_KEPT];
    int block_rows, end_rows;
} Price;

// ---- a technique is one record, a layout is a list of records in plug order ----

// layout_check calls `check` when the degrees of the mesh are known and no model exists. All below it are
// called for each trainer: trainer_new calls `recipe` in plug order, `shard` from the last technique to the
// first, allocates the table, and calls `plug` in plug order; `price` and, in trainer_free, `unplug` are
// called from the last to the first. A proof makes several trainers in turn, some of them in a dry run, and
// the run on one device on rank 0 alone. So what a run remembers is what `plug` returns, never a static, and
// a technique communicates over groups of Model.mesh and of its units, never over comm_world().
// Of its state a checkpoint holds only Params.kept: a technique with other state that outlives a step
// refuses --save and --resume in its `check`. Its tensors are of the kinds that Price.more has: no proof
// compares the bytes of others.
typedef struct Technique {
    const char *name;
    const Option *option;  // its own, without targets: they become settings of the Config (config_number)
    int options;
    const char *asked;  // flags that turn it on ("--zero 1"), or the flag of an axis ("--pp", whose degree a
                        // message then chooses), for messages about its options; NULL: it is on
    unsigned axes;      // axes of the mesh over which it shares work, 1 << AXIS_…; 0: one device's
    unsigned brings;    // groups of shared options, CONFIG_…, that programs with it have
    unsigned wraps;     // sockets, 1 << SOCKET_…, in which it replaces an earlier plug and calls it, from
                        // the Sockets that its own plug has found
    // Each may be NULL.
    bool (*enabled)(const Config *config);  // whether these flags turn it on; NULL: it is always on
    void (*check)(const Config *config);    // fatal, naming the flags, if it is impossible with them
    void (*recipe)(Recipe *recipe, const Config *config);  // changes dtypes of roles, and codecs
    void (*shard)(Model *model);                           // sets what of each weight stays on this rank
    // Fills sockets: sets the functions that it replaces, and their `context`, and leaves the rest. Returns
    // the context of the following, which unplug frees.
    void *(*plug)(Model *model);
    void (*resumed)(Model *model, void *context);  // a checkpoint has filled Params.kept
    void (*unplug)(Model *model, void *context);
    void (*price)(Price *price, const Model *model, const void *context);
} Technique;

// The same record, with `enabled` deciding whether it is on.
static inline Technique technique_when(Technique technique, bool (*enabled)(const Config *config)) {
    technique.enabled = enabled;
    return technique;
}

enum { MOST_TECHNIQUES = 16 };
// A list ends with NULL.
typedef const Technique *const *Techniques;

// ---- training ----

// One step's samples of this rank on the host: micro_batch x grad_acc of them, from global index `first`.
typedef struct Batch {
    int64_t first, samples, count;  // count = samples * s
    int32_t *tokens, *targets;      // (samples, s), in one block; NULL in a dry run, which has no text
} Batch;

typedef struct Trainer {
    Config config;
    Data data;
    Model *model;
    Optimizer optimizer;
    Progress progress;
    const Technique *technique[MOST_TECHNIQUES];  // those that are on, in plug order
    void *context[MOST_TECHNIQUES];
    int techniques;
    bool masked;  // ignore the labels of each sample's prompt: unequal label counts
    Batch ahead;  // of the next step, if already read; labels_ahead: its labels on all ranks
    double labels_ahead;
    double loss, grad_norm, lr;  // of the last step
    int64_t kept_bytes;          // activation bytes held at the end of a micro-batch's forward, peak
    double underflows, rounded;  // op_underflows at the start
} Trainer;

// Fills `on` with those of the list that are on; returns how many. If the technique that decides how tokens
// attend is off, as context parallelism is with --cp 1, flash attention obeys --documents and --attention.
int techniques_on(const Config *config, Techniques list, const Technique *on[MOST_TECHNIQUES]);
bool technique_is_on(const Technique *technique, const Config *config);
bool technique_has_option(const Technique *technique, const char *name);
// Shards and plugs those techniques that are on. NULL: those of one device, recomputation and flash
// attention.
Trainer *trainer_new(const Config *config, Mesh mesh, Techniques techniques);
void trainer_free(Trainer *trainer);
// What the technique's plug returned; NULL if it is not on.
void *trainer_context(const Trainer *trainer, const Technique *technique);
// To be called before the first trainer of a run with --resume, when config has the model's shape
// (checkpoint_config): fatal unless the run can resume from the checkpoint with these flags on so many
// ranks of dp (checkpoint_check_run).
void resume_check(const Config *config, int dp);
// Loads the checkpoint in config.resume, whatever layout wrote it, or the weights in config.init, if given:
// from that very folder (see checkpoint_newest), since a run may save newer ones beside it.
void trainer_load(Trainer *trainer);
// After a step: writes a checkpoint if --save and --save-every ask for one at this step. Collective.
void trainer_save(Trainer *trainer);
// grad_acc micro-batches forward and backward, then clipping and the optimizer. `record` (may be NULL)
// takes the raw gradients of the run's first step. Fatal, naming step and tensor, when a loss or gradient
// is not finite.
void train_step(Trainer *trainer, Record *record);
// Mean loss over the first `samples` held-out samples, split over the ranks of dp; the same on every rank.
double held_out_loss(Trainer *trainer, int64_t samples);
// Runs the remaining steps of config.steps and records them; saves as --save says. The caller ends it with
// record_free.
Record train_record(Trainer *trainer, const char *title);
// How close to `baseline` a run with reordered sums must come, and that is config.follows: 1e-10 in f64, but
// where rounding grows from step to step; else derived from the distance between `baseline` and a run in f64.
Bound train_bound(const Config *config, bool masked, const Record *baseline);
// The same for a baseline with these techniques; NULL: those of one device.
Bound train_bound_with(const Config *config, Techniques techniques, bool masked, const Record *baseline);
// The class of a comparison within that bound: in 16 bits, sums in another order are also rounded.
ProofClass train_proof(const Config *config);

Batch batch_new(const Trainer *trainer, int64_t first_sample);
void batch_free(Batch *batch);

// ---- pricing ----

// The price of the trainer's techniques, and of what every step sends: labels, loss and norm.
Price trainer_price(const Trainer *trainer);
// Bytes of a kind that this rank holds at its peak, and of the activations that it keeps for backward.
double price_states(const Price *price, const Model *model, MemoryKind kind);
double price_kept(const Price *price);
double price_rows(const PriceKept *rows, int count, const char *what);  // of that name; NULL: of all
// For price(): adds so many calls in a step, each on a whole tensor of `elements`, of which `own` are this
// rank's; the bytes that this rank sends are as comm.h says.
void price_all_reduce(Price *price, double calls, int64_t elements, DType dtype, Group group);
void price_all_gather(Price *price, double calls, int64_t own, DType dtype, Group group);
// codec: as for comm_all_gather_coded, or NULL.
void price_all_gather_coded(Price *price, double calls, int64_t own, DType dtype, const Codec *codec,
                            Group group);
void price_reduce_scatter(Price *price, double calls, int64_t elements, int64_t own, DType dtype,
                          Group group);
// any other call
void price_sent(Price *price, const char *call, double calls, double bytes, Group group);
// Of all tensors with this split, this rank keeps only `numerator` of `denominator` equal parts.
void price_scale_kept(Price *price, Split split, double numerator, double denominator);

// ---- underflow.c: gradients that f16 rounds to zero when the loss is not scaled ----
void underflow_warn(const Config *config);  // at the start: warns of it
void underflow_begin(Trainer *trainer);
// At the end, collective: reports their share, also in the verdict.
void underflow_tell(const Trainer *trainer);

// ---- recompute.c, flash.c: techniques of a run on one device; kernel_choice.c: one for any program ----
extern const Technique recompute, flash_attention, kernel_choice;
// Whether it has the flags that say how tokens attend.
bool technique_attends(const Technique *technique);
// FLOPs that a step over `sequences` samples computes a second time, by config->recompute.
double recompute_extra_flops(const Config *config, int64_t sequences);

#endif
