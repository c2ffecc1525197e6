// params.h: the parameter table. Every fact about a weight (name, shape, how it is cut, whether it decays,
// how it is born) stands here once; optimizer, checkpoint and chapters read it and test no index.
//
// A unit is what one parameter collective moves: the embedding, each block, the head. A unit's weights lie
// one after another in one flat tensor, its gradients in another of the same layout.
#ifndef PARAMS_H
#define PARAMS_H

#include "mesh.h"
#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

// How tensor parallelism cuts a weight (out, in): not at all, by rows (column-parallel in Megatron's words,
// which write the transpose), or by columns (row-parallel).
typedef enum Cut { CUT_NONE, CUT_ROWS, CUT_COLUMNS } Cut;

typedef struct Param {
    char name[80];     // Hugging Face's: "model.layers.0.self_attn.q_proj.weight"
    int unit;          // index into units
    int dims;          // 1 or 2
    int64_t full[2];   // shape of the whole weight
    int64_t shape[2];  // what this rank stores
    int64_t first[2];  // where the stored part begins in the whole
    Cut cut;
    bool decays;            // weight decay applies (matrices: yes; norms: no)
    double init_std;        // normal with this deviation; 0: ones (norms)
    int64_t offset, count;  // elements within the unit's flat tensors
} Param;

typedef struct Unit {
    char name[32];  // "embedding" "block 3" "head"
    int first_param, params;
    int64_t first, count;  // elements within the whole model's flat tensors
    Tensor values, grads;  // flat views of those, (count); grads in the values' dtype
    Tensor accumulated;    // (count) f32: gradients summed over micro-batches; {0} where grads itself
                           // accumulates
} Unit;

typedef struct Params {
    Param *param;
    int count;
    Unit *unit;
    int units;
    DType dtype;
    // Where all units stand one after another: consecutive units are one contiguous range.
    Tensor values, grads, accumulated;
} Params;

// Building: units in order, each followed by its weights. full1 = 0 makes a vector. tp
// is the group that cuts.
void params_add_unit(Params *params, const char *name);
void params_add(Params *params, const char *name, int64_t full0, int64_t full1, Cut cut, Group tp,
                bool decays, double init_std);
// Allocates the flat tensors of every unit and draws the weights, keyed by (seed, name, global element
// index); grads start at zero. f32_accumulation adds the f32 accumulators.
void params_allocate(Params *params, DType dtype, uint64_t seed, bool f32_accumulation);
void params_free(Params *params);

Param *params_find(const Params *params, const char *name);  // NULL if there is none
// Borrowed views in the parameter's own shape.
Tensor param_value(const Params *params, const Param *param);
Tensor param_grad(const Params *params, const Param *param);
// The unit's gradient summed over micro-batches so far: accumulated where it exists, else grads.
Tensor unit_total_grad(const Unit *unit);
Tensor param_total_grad(const Params *params, const Param *param);  // of one parameter
Tensor params_total_grad(const Params *params);                     // of all units, flat

int64_t params_elements(const Params *params);  // all that this rank stores
// Before the first micro-batch of a step: every gradient is zero.
void params_zero_grads(Params *params);
// After a unit's micro-batch: accumulated += grads, grads = 0. Nothing to do without accumulators.
void params_accumulate(Params *params, int unit);
// L2 norm over all gradients, each counted once; and, for a NaN, the first tensor that
// holds one (NULL if none).
double params_grad_norm(const Params *params);
const Param *params_first_bad_grad(const Params *params);

#ifdef __cplusplus
}
#endif
#endif
