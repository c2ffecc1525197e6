// mixed_precision.h: chapter 08 as signatures: recipes that say in which format each role of a number is.
#ifndef MIXED_PRECISION_H
#define MIXED_PRECISION_H

#include "02_zero/zero.h"

// bf16.c: --master, --sum, --gradient and --rounding; of no effect but with --dtype bf16.
extern const Technique bf16_recipe;

// fp16.c: --master, --sum, --moments and --loss-scale; of no effect but with --dtype f16. It fills the step
// socket: gradients that overflow anywhere are stepped nowhere.
extern const Technique fp16_recipe;

typedef struct LossScaler {
    Sockets before;
    double kept[2];    // Params.kept: the scale, and sound steps since it changed
    int64_t interval;  // of sound steps, after which it doubles; 0: it never changes
    int64_t skipped;   // steps of this process
} LossScaler;

// ---- FP8: fp8.c has the table of recipes ----

typedef struct Fp8Linear Fp8Linear;
typedef struct Fp8Recipe {
    const char *name;
    DType forward, backward;  // codes of x and W, and of dy
    bool tile;    // scales of --fp8-tile elements along the inner dimension; else of the whole tensor
    bool square;  // and of W: of as many rows, too
    ScaleRule rule;
    int history;  // steps, of delayed scaling; 0: current
    CodesSum sum;
    // What the optimizer stores; all F64: as the standard recipe of the run's dtype (fp8_own_state)
    DType master, add, moment, second;
    DType gradient;   // of one micro-batch, as it is stored
    double playbook;  // bytes per parameter in the playbook's table; 0: no row
    bool trains;      // to within 1.5% of bf16's loss on the small model; else it ends above all that do
} Fp8Recipe;

// Of --fp8, by number; fp8_recipes has no entry for NO_FP8, and begins with TE_DELAYED.
enum { NO_FP8, TE_DELAYED, TE_CURRENT, FP8_LM, DEEPSEEK, NANOTRON, MXFP8 };
extern const Fp8Recipe fp8_recipes[];
extern const int fp8_recipe_count;
bool fp8_own_state(const Fp8Recipe *recipe);  // whether it says what the optimizer stores

extern const Technique fp8_recipe;  // --fp8, --fp8-tile, --fp8-wire
// Of a trainer with a recipe: its linear; bytes of casts and scales, on this rank.
Fp8Linear *fp8_linear_of(const Trainer *trainer);
double fp8_extra_bytes(const Trainer *trainer);

// recipe_linear.c: the linear and step sockets
Fp8Linear *fp8_linear_plug(Model *model, const Fp8Recipe *recipe, int64_t tile);
void fp8_linear_resumed(Fp8Linear *linear);
void fp8_linear_unplug(Model *model, Fp8Linear *linear);
void fp8_linear_price(Price *price, const Model *model, const Fp8Linear *linear);
double fp8_linear_bytes(const Model *model, const Fp8Linear *linear);  // of casts and scales, on this rank
int64_t fp8_linear_casts(const Fp8Linear *linear);                     // of weights so far
bool fp8_is_cast(const Param *param);  // whether a weight is multiplied in 8 bits

// recipe_state.c: what the optimizer keeps in 8 and 16 bits
typedef struct Fp8State Fp8State;
Fp8State *fp8_state_plug(Model *model);
void fp8_state_unplug(Model *model, Fp8State *state);
double fp8_state_bytes(const Fp8State *state);  // of scales, on this rank

// recipe_wire.c: 8 bits in flight
extern const Codec fp8_codec, fp8_gradient_codec;  // e4m3 and e5m2, a scale for each 128

// recipe_tables.c: outliers, long sums, bytes per parameter
void fp8_tables(const char *data);  // small_text
// recipe_training.c: losses, casts, 8 bits in flight, learning rates
void fp8_training(Mesh mesh, const Config *config);
extern const Technique *const fp8_one_device[];
// A small model in bf16, whose tiles have 16 elements; recipe: NO_FP8 …; data and more: as in small_model.
Config fp8_small(const char *data, int recipe, const char *more);
void fp8_set(Config *config, int recipe);  // --fp8, with its standard tiles, sent in 16 bits
// recipe_outliers.c: training with an outlier in the activations
void fp8_outliers(Group ranks);
// recipe_convergence.c: --long: the model's steps from random and from trained weights, of 2 to 4 seeds, and
// then the loss of so many held-out samples
void fp8_convergence(Group ranks, const Config *model, int64_t held_out, int seeds);
// Deviation of x (rows, columns) from sums of a row's and a column's value, with (rows - 1) (columns - 1)
// degrees of freedom.
double fp8_chance(const double *x, int rows, int columns);
// Whether a recipe whose mean is off by this share, known with this standard error, is more than 1% off.
bool fp8_is_off(double off, double error);

// ---- recipe_runs.c: runs on one device, for the tables of this chapter ----

// data: small_text; more: flags as config_default takes them, the last one counts
Config small_model(const char *data, const char *more);
// --data, unless it has tokens beyond the 256 of these models: then NULL, the default text.
const char *small_text(const Config *config);

typedef struct Run {
    double last;           // mean loss of the last tenth of the steps
    int64_t gains, moved;  // elements of all norms' gains, and those of them that are not 1 any more
} Run;
// Trains on one device.
Run run_of(const Config *config, Techniques techniques);
// Relative error in L2 of the first step's gradient against f64; *zero (may be NULL): the share of its
// elements that are 0 and are not in f64.
double gradient_error(const Config *config, Techniques techniques, double *zero);

#endif
