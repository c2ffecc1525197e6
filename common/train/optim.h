// optim.h: AdamW and SGD over the flat tensors of the parameter table.
#ifndef OPTIM_H
#define OPTIM_H

#include "config.h"
#include "params.h"

#ifdef __cplusplus
extern "C" {
#endif

// State of the part of a unit that this rank owns.
typedef struct UnitState {
    Tensor m, v, master;  // (own_count) in the recipe's dtypes; master only if the recipe has masters; m, v
                          // only for AdamW
} UnitState;

typedef struct Optimizer {
    OptimizerKind kind;
    double beta1, beta2, eps, weight_decay;
    int64_t step;  // steps taken
    UnitState *unit;
    int units;
} Optimizer;

// Allocates no state yet: that is done by the first step, as the playbook's memory profile shows.
Optimizer optimizer_new(const Config *config, const Params *params);
void optimizer_free(Optimizer *optimizer);
// Allocates the state (m = v = 0, master = the weights). The first step calls it, unless resuming has.
void optimizer_allocate(Optimizer *optimizer, const Params *params);
// One step: the weights that this rank owns are updated by their total gradient times grad_scale, at rate
// lr; decay applies where the table says so. Call optimizer_begin once, and then optimizer_step_unit for
// each unit; a unit's new weights can then be used while other units are stepped. Consecutive weights with
// the same decay are stepped in one operation, which does not change a bit.
void optimizer_begin(Optimizer *optimizer, const Params *params);
void optimizer_step_unit(Optimizer *optimizer, Params *params, int unit, double lr, double grad_scale);

// What a checkpoint stores of a parameter: m, v or the master, as the flat tensor of the unit's own part.
// If flat is {0}, the weight itself.
typedef struct StateTensor {
    StateKind kind;
    Tensor flat;
} StateTensor;
DType optimizer_saved_dtype(const Params *params, StateTensor state);
// Move state between this rank's own part and ranges of the whole tensor, in the dtype above. Writing
// passes on only what this rank is to write, as param_write_part does; reading reads the rank's whole part,
// as param_read_part does.
void optimizer_write(const Params *params, const Param *param, StateTensor state, ParamRange write,
                     void *context);
void optimizer_read(const Params *params, const Param *param, StateTensor state, ParamRange read,
                    void *context);

// Linear warm-up to config->lr over config->warmup steps, then a cosine down to a tenth of it at the last
// step. step counts from 0. With SGD the rate stays config->lr.
double learning_rate(const Config *config, int64_t step);
// The factor that reduces a gradient of this norm to `clip`: min(1, clip / norm); 1 if clip is 0.
double clip_scale(double norm, double clip);

#ifdef __cplusplus
}
#endif
#endif
