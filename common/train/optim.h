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
    Tensor m, v, master;  // (own_count) in the recipe's dtypes; master only where it has masters; m, v only
                          // for AdamW
} UnitState;

typedef struct Optimizer {
    OptimizerKind kind;
    double beta1, beta2, eps, weight_decay;
    int64_t step;  // steps taken
    UnitState *unit;
    int units;
} Optimizer;

// No state is allocated yet: it appears with the first step, as the playbook's memory profile shows.
Optimizer optimizer_new(const Config *config, const Params *params);
void optimizer_free(Optimizer *optimizer);
// Allocates the state now (m = v = 0, master = the weights): the first step does it;
// resuming does it earlier.
void optimizer_allocate(Optimizer *optimizer, const Params *params);
// One step: the weights that this rank owns move by their total gradient times grad_scale, at rate lr.
// Decay applies where the table says so. optimizer_begin once, and then each unit, so that what a unit's
// new weights are needed for can begin while the others step. Weights that follow each other are stepped in
// one operation where they decay alike; no bit depends on it.
void optimizer_begin(Optimizer *optimizer, const Params *params);
void optimizer_step_unit(Optimizer *optimizer, Params *params, int unit, double lr, double grad_scale);
// All units.
void optimizer_step(Optimizer *optimizer, Params *params, double lr, double grad_scale);

// What of a parameter's state a checkpoint has: m, v or the master, in the unit's flat tensor. {0}: the
// weight itself.
typedef struct StateTensor {
    StateKind kind;
    Tensor flat;
} StateTensor;
DType optimizer_saved_dtype(const Params *params, StateTensor state);
// Between this rank's own part and ranges of the whole, in the dtype above: what is its to write, as
// param_write_part, and all of it from a file, as param_read_part.
void optimizer_write(const Params *params, const Param *param, StateTensor state, ParamRange write,
                     void *context);
void optimizer_read(const Params *params, const Param *param, StateTensor state, ParamRange read,
                    void *context);

// Linear warm-up to config->lr over config->warmup steps, then a cosine from it to its tenth at the last
// step. step counts from 0. SGD keeps config->lr.
double learning_rate(const Config *config, int64_t step);
// Factor that brings a gradient of this norm down to `clip`: min(1, clip / norm); 1 if clip is 0.
double clip_scale(double norm, double clip);

#ifdef __cplusplus
}
#endif
#endif
