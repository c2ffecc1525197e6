// harness.h: what every training program shares: flags, ranks, the proof against one device, the counts
// against their closed forms, and training for real. It names no technique.
#ifndef HARNESS_H
#define HARNESS_H

#include "report/timeline.h"
#include "training.h"

// The preceding technique in the playbook, shown in the column to the left of this program's.
typedef struct Before {
    const char *name;       // NULL: there is none
    Techniques techniques;  // NULL: this program's own, with another value of a setting
    const char *setting;
    double value;
} Before;

typedef struct Program {
    const char *purpose, *claim;  // for --help, and for the verdict
    const char *defaults;         // as config_parse takes them
    int natural;                  // ranks by default
    MeshAxis axis;                // over whose ranks the claim splits something; 0: over all
    // For the run on one device with which all is compared; NULL: the techniques that any one device has.
    Techniques baseline;
    Techniques techniques;  // in plug order (five_d_layouts.c lists all in it); ends with NULL
    const Option *option;   // options that choose among them, without targets
    int options;
    // Other techniques on the same ranks that must give this program's bits. May be NULL.
    const char *twin;
    Techniques twin_techniques;
    Before before;
    void (*leave_out)(Config *config);  // takes from it the flags that only this program's has; may be NULL
    const char *(*shown)(const Config *config);  // the title of its own column; NULL: the program's name
    // Whether sums run as on one device, so that no bit may differ; NULL: they do not.
    bool (*exact)(const Config *config);
    const Technique *subject;   // which a proof needs on: flags may turn it off; NULL: any will do
    bool trains;                // always trains for real, and proves nothing: train.c, the baseline itself
    bool experts;               // needs a model with experts, and takes no dense one
    void (*plan)(Mesh mesh, const Config *config);  // shows something before training; may be NULL
    void (*more)(Mesh mesh, const Config *config);  // shows something after the proof; may be NULL
    const Option *more_option;                      // options that only `more` reads, without targets
    int more_options;
} Program;

int program_main(int argc, char **argv, const Program *program);  // a whole main; the exit status

// ---- its parts, for programs that show more than one layout ----
// Such a main calls, in this order: base_start, config_parse (CONFIG_REPORT among its groups), comm_start,
// layout_check, mesh_new(layout_shape(&config)), report_json(config.json), what it shows, report_split,
// report_verdict and comm_finish.

// Fatal, naming the flags, if this layout is impossible: by the sizes, the degrees on so many ranks, or the
// checks of the techniques that are on. Sets a degree that was left open.
void layout_check(Config *config, int ranks, Techniques techniques);
MeshShape layout_shape(const Config *config);

// The same run on one device, with the micro-batches of all ranks of mesh.dp; it saves nothing.
Config program_on_one_device(const Config *config, Mesh mesh);
// Trains with these techniques (NULL: one device), from --resume's checkpoint if any; with `check`,
// compares what it counted with the price.
Record program_record(const Config *config, Mesh mesh, Techniques techniques, bool masked, bool check,
                      const char *title);
// Compares such a run with one device, and with other techniques on the same ranks (may be NULL), which
// must give the same bits.
void program_prove(const Config *config, Mesh mesh, Techniques techniques, const char *twin,
                   Techniques twin_techniques, bool exact, bool masked);
// What a run counted in so many steps, to be compared with the trainer's price.
typedef struct Counted {
    double steps;
    CommCount sent[MOST_CALLS];
    int kinds;
    Memory memory;
    int64_t kept_bytes;
    bool peak_by_data;  // as in Price
} Counted;
void counted_add(Counted *counted);  // adds what comm counted since the last clock_reset
void program_check_counts(const Trainer *trainer, const Counted *counted);
// flops: of a step, counted on this rank. Collective.
void program_check_flops(const Trainer *trainer, const Price *price, double flops);

// One dry step after the first, on the model clock. device_dry_run must be on.
typedef struct StepCost {
    double step_seconds;
    CommCount comm, all_reduce;  // all kinds of calls, and all-reduces
    Counted counted;             // in this one step
    Memory memory;
} StepCost;
StepCost program_cost(const Config *config, Mesh mesh, Techniques techniques);

// The lesson and the proof of a program: its table, its losses, and the line that says what was compared.
void program_show(const Config *config, Mesh mesh, const Program *program);
// Only the table, from dry runs. device_dry_run must be on.
StepCost program_show_dry(const Config *config, Mesh mesh, const Program *program);

// What one more block adds to a micro-batch, counted in a dry run. device_dry_run must be on.
typedef struct Sent {
    double calls, bytes;  // calls of this rank; bytes of all ranks together
} Sent;
typedef struct Sends {
    Sent all_reduce, all_gather, reduce_scatter;
} Sends;
typedef struct BlockCost {
    Sends pass[2];  // indexed by Pass
    double kept;    // bytes of activations that this rank keeps for backward
} BlockCost;
BlockCost program_block_cost(const Config *config, Mesh mesh, Techniques techniques);

// ---- lesson.c: one step of rank 0: on one device, of the technique before, of this one, by the formulas
typedef struct Column {
    const char *title;
    double weights, gradients, optimizer, kept;  // bytes; NaN where there is no figure
    struct {
        const char *call;
        double calls, bytes;
    } sent[MOST_CALLS];
    int kinds;
    double seconds, exposed;  // on the model clock; NaN where there is no figure
} Column;
bool counted_in_steps(
    const char *call);  // whether steps make such calls; some only serve to inspect or save weights
Column column_of_cost(const char *title, const StepCost *cost);
Column column_of_run(const char *title, const Counted *counted,
                     const StepCost *cost);  // times come from cost
Column column_of_price(const char *title, const Trainer *trainer, const Price *price);
void lesson_print(const Config *config, const Column *column, int columns);
void lesson_print_losses(const Record *run, const Record *one_device);

// ---- sample.c: the text that a run writes at its end ----
// --sample tokens that continue the first held-out ones, written by rank 0 with the weights of all ranks.
// Collective. baseline: as in Program.
void sample_show(Trainer *trainer, Techniques baseline);
// Draws text[prompt] … text[total - 1] (host), each given a window of the text before it, with random
// numbers from config.seed.
void sample_continue(Model *model, int32_t *text, int64_t prompt, int64_t total, double temperature);
// The start of the window of up to s tokens from which this token of a text is drawn: 0 at first; when the
// window is full, it moves half a window on.
int64_t sample_window(int64_t token, int64_t s);
// The token drawn from softmax(logits / temperature) by a uniform number in [0, 1); temperature 0 takes the
// largest logit.
int32_t sample_draw(const double *logits, int64_t vocab, double temperature, double uniform);

// ---- real_training.c: training for real ----
// baseline: as in Program.
int train_for_real(const Config *config, Mesh mesh, Techniques techniques, Techniques baseline);

#endif
