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

// Where one of the tensors that forward keeps is whole: on every rank; until sequence parallelism gives
// each rank its rows; until tensor parallelism gives each rank its heads and columns.
typedef enum Split { EVERY_RANK, BY_SEQUENCE, BY_TENSOR } Split;

// Bytes that forward keeps of one tensor until backward, on this rank.
typedef struct PriceKept {
    const char *what;  // by the names of BlockKept, HeadKept and MicroBatch
    double bytes;
    Split split;
    int dropped_from;  // the mildest recomputation that drops it
} PriceKept;

enum { MOST_KEPT = 24, MOST_CALLS = 16 };

// Begins with what one device does. Each technique's price() changes its part of it, from the last plugged
// to the first: how often a socket is called is known before the technique that fills it prices the calls.
typedef struct Price {
    // Calls of the region socket in a step, each on (n, h); of these leaves and leaves_backward, a
    // lookup's.
    double enters, leaves, enters_backward, leaves_backward, lookups;
    bool messages;                      // calls beside a multiply go as a message to each other rank
    double losses;                      // that are a sum over rows of this rank alone
    double lookup_micros, head_micros;  // micro-batches that are looked up here, and that end here
    double forwards;        // of every block in a step: 1 for each micro-batch, and recomputation's
    double attentions;      // of these, and of attention alone
    double backwards;       // of every block in a step
    const int64_t *finals;  // (units) how often a step makes a gradient final; NULL: every micro-batch
    double again;           // FLOPs of a step on one device that are computed a second time
    bool peak_counted;      // the peak of activations has no closed form: a dry run counts it
    bool peak_by_data;      // nor does a dry run know it: the data decides (how many rows experts get)
    // Calls and bytes sent in a step by this rank, by kind (comm.h's names).
    struct {
        const char *call;
        double calls, bytes;
    } sent[MOST_CALLS];
    int kinds;
    // Elements of weights by role, of all blocks that this rank has.
    double elements[ROLES];
    // Those of them that stay here, by what is stored of them; and bytes that come beside them for a while.
    double values, gradients, states;  // elements; negative: all
    double values_at_work, gradients_at_work;
    double blocks;  // whose activations this rank keeps at once
    PriceKept block[MOST_KEPT], end[MOST_KEPT];
    int block_rows, end_rows;
} Price;

// ---- a technique is one record, a layout is a list of records in plug order ----

typedef struct Technique {
    const char *name;
    const Option *option;  // of its own, without targets: they become settings of the Config
    int options;
    const char *asked;  // what turns it on, for who has typed an option of it: "--pp 2"; NULL: it is on
    unsigned axes;      // of the mesh that it serves, 1 << AXIS_…
    unsigned brings;    // groups of shared options, CONFIG_…, that programs with it have
    unsigned wraps;  // sockets, 1 << SOCKET_…, in which it takes the place of an earlier plug, and calls it
    // Each may be NULL.
    bool (*enabled)(const Config *config);  // whether these flags ask for it; NULL: it is always on
    void (*check)(const Config *config);    // fatal, naming the flags, when it cannot be
    void (*recipe)(Recipe *recipe, const Config *config);  // changes dtypes of roles, and codecs
    void (*shard)(Model *model);                           // what of a weight stays on this rank
    void *(*plug)(Model *model);                           // fills sockets; returns what unplug frees
    void (*resumed)(Model *model, void *context);          // a checkpoint has filled Params.kept
    void (*unplug)(Model *model, void *context);
    void (*price)(Price *price, const Model *model, const void *context);
} Technique;

// The same record, on where `enabled` says so.
static inline Technique technique_when(Technique technique, bool (*enabled)(const Config *config)) {
    technique.enabled = enabled;
    return technique;
}

enum { MOST_TECHNIQUES = 16 };
// A list ends with NULL.
typedef const Technique *const *Techniques;

// ---- training ----

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
    const Technique *technique[MOST_TECHNIQUES];  // those that are on, in plug order
    void *context[MOST_TECHNIQUES];
    int techniques;
    bool masked;  // ignore the labels of each sample's prompt: unequal label counts
    Batch ahead;  // of the step to come, if it is already read; labels_ahead: in all ranks'
    double labels_ahead;
    double loss, grad_norm, lr;  // of the last step
    int64_t kept_bytes;          // activations held when a micro-batch's forward had ended, peak
    double underflows, rounded;  // op_underflows at the start, negative
} Trainer;

// Those of the list that are on; returns how many. What decides how tokens attend may be off, as context
// parallelism is with --cp 1; flash attention then heeds --documents and --attention in its place.
int techniques_on(const Config *config, Techniques list, const Technique *on[MOST_TECHNIQUES]);
bool technique_has_option(const Technique *technique, const char *name);
// NULL: those of one device, recomputation alone. Shards and plugs those that are on.
Trainer *trainer_new(const Config *config, Mesh mesh, Techniques techniques);
void trainer_free(Trainer *trainer);
// What the technique's plug has returned; NULL if it is not on.
void *trainer_context(const Trainer *trainer, const Technique *technique);
// Before the first trainer of a run with --resume, whose model's shape config already has
// (checkpoint_config): whether its checkpoint can go on with these flags on so many ranks of dp, by
// checkpoint_check_run.
void resume_check(const Config *config, int dp);
// Begins with the checkpoint that config.resume is, whatever layout wrote it, or with config.init's weights,
// if any: of that very folder (checkpoint_newest), since a run may save newer ones in it.
void trainer_load(Trainer *trainer);
// After a step: writes a checkpoint if --save and --save-every want one of it. Collective.
void trainer_save(Trainer *trainer);
// grad_acc micro-batches forward and backward, then clipping and the optimizer. `record` (may be NULL)
// takes the raw gradients of the run's first step. Fatal, naming step and tensor, when a loss or gradient
// is not finite.
void train_step(Trainer *trainer, Record *record);
// Mean loss over the first `samples` held-out samples, split over the ranks of dp; the same on every rank.
double held_out_loss(Trainer *trainer, int64_t samples);
// Runs config.steps steps (fewer after a resumption) and records them; --save saves. The caller ends it
// with record_free.
Record train_record(Trainer *trainer, const char *title);
// How close to `baseline` a run with reordered sums must come: 1e-10 in f64, else measured
// against a run in f64.
double train_bound(const Config *config, bool masked, const Record *baseline);
// The same of a baseline with these techniques; NULL: those of one device.
double train_bound_with(const Config *config, Techniques techniques, bool masked, const Record *baseline);

Batch batch_new(const Trainer *trainer, int64_t first_sample);
void batch_free(Batch *batch);

// ---- pricing ----

// The sum over the trainer's techniques, and what a step itself sends: labels, loss and norm.
Price trainer_price(const Trainer *trainer);
// Bytes of these kinds that a priced rank holds between steps, and of activations that it keeps for
// backward.
double price_states(const Price *price, const Model *model, MemoryKind kind);
double price_kept(const Price *price);
double price_rows(const PriceKept *rows, int count, const char *what);  // of that name; NULL: of all
// For price(): so many calls in a step, each on a tensor of `elements` (a gather's and a scatter's whole
// one, of which `own` are this rank's), by what comm.h says that this rank sends.
void price_all_reduce(Price *price, double calls, int64_t elements, DType dtype, Group group);
void price_all_gather(Price *price, double calls, int64_t own, DType dtype, Group group);
// codec: of comm_all_gather_coded, or NULL.
void price_all_gather_coded(Price *price, double calls, int64_t own, DType dtype, const Codec *codec,
                            Group group);
void price_reduce_scatter(Price *price, double calls, int64_t elements, int64_t own, DType dtype,
                          Group group);
// any other
void price_sent(Price *price, const char *call, double calls, double bytes, Group group);
// What is left on this rank of all that is split so: numerator of denominator equal parts.
void price_scale_kept(Price *price, Split split, double numerator, double denominator);

// ---- underflow.c: gradients that f16 rounds to zero, as long as nobody scales the loss ----
void underflow_warn(const Config *config);  // at the start: says so
void underflow_begin(Trainer *trainer);
void underflow_tell(
    const Trainer *trainer);  // at the end, collective: their share, as a figure and in the verdict

// ---- recompute.c, flash.c: what a run on one device may have; kernel_choice.c: what any program may ----
extern const Technique recompute, flash_attention, kernel_choice;
// Whether it has flags that say how tokens attend.
bool technique_attends(const Technique *technique);
// FLOPs that a step over `sequences` samples computes a second time, by config->recompute.
double recompute_extra_flops(const Config *config, int64_t sequences);

#endif
