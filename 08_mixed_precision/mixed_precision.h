// mixed_precision.h: chapter 08 as signatures: recipes that say in which format each role of a number is.
#ifndef MIXED_PRECISION_H
#define MIXED_PRECISION_H

#include "02_zero/zero.h"

// bf16.c: --master, --sum and --rounding; of no effect but with --dtype bf16.
extern const Technique bf16_recipe;

// fp16.c: --master, --sum and --loss-scale; of no effect but with --dtype f16. It fills the step socket:
// gradients that overflow anywhere are stepped nowhere.
extern const Technique fp16_recipe;

typedef struct LossScaler {
    Sockets before;
    double kept[2];    // Params.kept: the scale, and sound steps since it changed
    int64_t interval;  // of sound steps, after which it doubles; 0: it never changes
    int64_t skipped;   // steps of this process
} LossScaler;

// ---- recipe_runs.c: runs on one device, for the tables of this chapter ----

typedef struct Run {
    double *loss;  // (steps)
    double last;   // mean of the last tenth of the steps
    int64_t steps;
    int64_t elements, gains, moved;  // of all weights; of the norms; those of them that are not 1 any more
} Run;
// Trains on one device. The caller ends it with run_free.
Run run_of(const Config *config, Techniques techniques);
void run_free(Run *run);
// Relative error in L2 of the first step's gradient against f64; *zero (may be NULL): the share of its
// elements that are 0 and are not in f64.
double gradient_error(const Config *config, Techniques techniques, double *zero);

#endif
