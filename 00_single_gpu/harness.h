// harness.h: what every training program shares: flags, ranks, the proof against one device, the counts
// against their closed forms, and training for real. It knows no technique by name.
#ifndef HARNESS_H
#define HARNESS_H

#include "report/timeline.h"
#include "training.h"

// The technique before this one in the playbook: its column stands beside this one's.
typedef struct Before {
    const char *name;       // NULL: there is none
    Techniques techniques;  // NULL: this program's own, with another value of a setting
    const char *setting;
    double value;
} Before;

typedef struct Program {
    const char *purpose, *claim;  // of --help, and of the verdict
    const char *defaults;         // as config_parse takes them
    int natural;                  // ranks, if nobody says how many
    // Of the run on one device that all is held against; NULL: those that one device may have without them.
    Techniques baseline;
    Techniques techniques;  // in plug order; ends with NULL. Its last one is what the program is about.
    const Option *option;   // that choose among them, without targets
    int options;
    // Other techniques on the same ranks, whose bits this program's must have. May be NULL.
    const char *twin;
    Techniques twin_techniques;
    Before before;
    bool (*exact)(
        const Config *config);  // whether sums run as on one device: no bit may differ; NULL: they do not
    bool trains;                // always for real, and never the proof: train.c, the baseline itself
    bool experts;               // it shows what it does with experts, and takes no dense model
    void (*plan)(Mesh mesh, const Config *config);  // what it shows before it trains; may be NULL
    void (*more)(Mesh mesh, const Config *config);  // what else the program shows; may be NULL
    const Option *more_option;                      // that it alone reads, without targets
    int more_options;
} Program;

int program_main(int argc, char **argv, const Program *program);  // a whole main; the exit status

// ---- its parts, for programs that show more than one layout ----

// Fatal, naming the flags, where this layout cannot be: the sizes, the degrees on so many ranks, and what
// each technique that is on demands. Sets a degree that was left to it.
void layout_check(Config *config, int ranks, Techniques techniques);
MeshShape layout_shape(const Config *config);

// Trains with these techniques (NULL: one device), from --resume's checkpoint if any; if `check`, what it
// has counted is held against the price.
Record program_record(const Config *config, Mesh mesh, Techniques techniques, bool masked, bool check,
                      const char *title);
// That run against one device, and against other techniques on the same ranks (may be NULL), whose bits it
// must have.
void program_prove(const Config *config, Mesh mesh, Techniques techniques, const char *twin,
                   Techniques twin_techniques, bool exact, bool masked);
// What a run has counted in so many steps, which is held against the trainer's price.
typedef struct Counted {
    double steps;
    CommCount sent[MOST_CALLS];
    int kinds;
    Memory memory;
    int64_t kept_bytes;
    bool peak_by_data;  // as in Price
} Counted;
void counted_add(Counted *counted);  // what comm has counted since the last clock_reset
void program_check_counts(const Trainer *trainer, const Counted *counted);

// One dry step after the first, on the model clock. device_dry_run must be on.
typedef struct StepCost {
    double step_seconds, flops;
    CommCount comm, all_reduce;  // of all kinds, and of this one
    Counted counted;             // in this one step
    Memory memory;
} StepCost;
StepCost program_cost(const Config *config, Mesh mesh, Techniques techniques);

// The lesson and the proof of a program: its table, its losses, and the line that says what was compared.
void program_show(const Config *config, Mesh mesh, const Program *program);
// The table alone, of dry runs. device_dry_run must be on.
StepCost program_show_dry(const Config *config, Mesh mesh, const Program *program);

// What one more block adds to a micro-batch, counted in a dry run. device_dry_run must be on.
typedef struct Sent {
    double calls, bytes;  // of this rank; of all ranks together
} Sent;
typedef struct Sends {
    Sent all_reduce, all_gather, reduce_scatter, transfers;
} Sends;
typedef struct BlockCost {
    Sends pass[2];  // by Pass
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
    const char *call);  // whether steps make such calls, and not only who looks at weights
Column column_of_cost(const char *title, const StepCost *cost);
Column column_of_run(const char *title, const Counted *counted,
                     const StepCost *cost);  // times are the cost's
Column column_of_price(const char *title, const Trainer *trainer, const Price *price);
void lesson_print(const Config *config, const Column *column, int columns);
void lesson_print_losses(const Record *run, const Record *one_device);

// ---- sample.c: the text that a run writes in the end ----
// --sample tokens after the first held-out ones; all ranks bring their weights to the first. baseline: as
// in Program.
void sample_show(Trainer *trainer, Techniques baseline);
// Draws text[prompt] … text[total - 1] (host), each after a window of the text before it, by random numbers
// of config.seed.
void sample_continue(Model *model, int32_t *text, int64_t prompt, int64_t total, double temperature);
// Where the window of up to s tokens begins from which this token of a text is drawn: at 0, and half a
// window further each time that it is full.
int64_t sample_window(int64_t token, int64_t s);
// The token that a uniform number in [0, 1) draws from softmax(logits / temperature); 0 takes the largest.
int32_t sample_draw(const double *logits, int64_t vocab, double temperature, double uniform);

// ---- real_training.c: training for real ----
// baseline: as in Program.
int train_for_real(const Config *config, Mesh mesh, Techniques techniques, Techniques baseline);

#endif
