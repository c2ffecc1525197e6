// params.h: the parameter table. Every fact about a weight (name, shape, how it is cut, whether it decays,
// how it is born) stands here once; optimizer, checkpoint and chapters read it and test no index.
//
// A unit is what one parameter collective moves: the embedding, each block, the head. A unit's weights lie
// one after another in one flat tensor, its gradients in another of the same layout.
//
// Two cuts meet. Across, tensor parallelism: a rank stores some rows or columns of a weight (shape and first
// of the Param). Along, ZeRO: the flat elements of a unit, as this rank has them, are dealt to the ranks of
// dp, one contiguous part each, and a rank steps its own part alone (own_first and own_count of the Unit).
#ifndef PARAMS_H
#define PARAMS_H

#include "comm/mesh.h"
#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

// How tensor parallelism cuts a weight (out, in).
typedef enum Cut {
    CUT_NONE,        // every rank of tp stores all of it
    CUT_ROWS,        // by outputs (column-parallel in Megatron's words, which write the transpose)
    CUT_COLUMNS,     // by inputs (row-parallel)
    CUT_HEADS,       // by outputs, between heads; ranks beyond the heads store copies of them
    CUT_VOCABULARY,  // by outputs; a number that tp does not divide is padded with rows of zeros
} Cut;

// What ZeRO's stages leave on a rank of dp: stage 1 its part of the optimizer's state, stage 2 also of the
// gradients, stage 3 also of the weights.
typedef enum Sharding { SHARD_NOTHING, SHARD_STATE, SHARD_GRADS, SHARD_VALUES } Sharding;

typedef struct ParamSpec {
    const char *name;  // Hugging Face's: "model.layers.0.self_attn.q_proj.weight"
    int64_t out, in;   // shape of the whole weight; in = 0: a vector
    Cut cut;
    int64_t heads;    // CUT_HEADS: rows fall into so many heads
    bool decays;      // weight decay applies (matrices: yes; norms: no)
    double init_std;  // normal with this deviation; 0: ones (norms)
} ParamSpec;

typedef struct Param {
    char name[80];
    int unit;          // index into units
    int dims;          // 1 or 2
    int64_t full[2];   // shape of the whole weight
    int64_t shape[2];  // what this rank stores (of which it owns a part where ZeRO deals it out)
    int64_t first[2];  // where the stored part begins in the whole; rows from full[0] on are padding
    Cut cut;
    Group copies;  // ranks of tp that store these same elements, this one among them; often it alone
    bool partial;  // each copy's gradient is a part: the gradient is their sum
    bool decays;
    double init_std;
    int64_t offset, count;  // elements within the unit's flat tensors
} Param;

typedef struct Unit {
    char name[32];  // "embedding" "block 3" "head"
    int first_param, params;
    int64_t first, count;  // elements within the whole model's flat tensors
    // Flat, (count); {0} while this rank stores its own part alone.
    Tensor values, grads;  // grads in the values' dtype
    Tensor accumulated;    // f32: gradients summed over micro-batches; {0} where grads itself accumulates
    // This rank's own part: elements own_first … own_first + own_count - 1, all of them without ZeRO.
    int64_t own_first, own_count;
    Tensor own_values;  // (own_count) the weights that the optimizer steps; a view of values, or all there is
    Tensor own_grads;   // (own_count) their total gradient; a view of the above, or all there is
} Unit;

typedef struct Params {
    Param *param;
    int count;
    Unit *unit;
    int units;
    DType dtype, total_dtype;  // of weights; of gradients summed over micro-batches (f32 for 16-bit weights)
    Sharding sharding;
    Group world, dp, tp;  // all that hold the model; those that share the units' parts; those that cut across
    // Where all units stand one after another, consecutive units being one contiguous range. {0} where a
    // unit's own part is all that is stored …
    Tensor values, grads, accumulated;
    // … and then those, one after another. {0} where they are views of the above.
    Tensor own_values, own_grads;
} Params;

// Building: groups, then units in order, each followed by its weights. `copies` is the group of tp that
// shares a head where heads are fewer than ranks.
void params_begin(Params *params, const Mesh *mesh, Sharding sharding);
void params_add_unit(Params *params, const char *name);
Param *params_add(Params *params, const ParamSpec *spec, Group copies);  // valid until the next one
// Allocates what this rank stores and draws the weights, keyed by (seed, name, global element index); grads
// start at zero. 16-bit weights get f32 accumulators. With SHARD_GRADS no whole gradient exists until
// unit_new_grads, with SHARD_VALUES no whole weights until somebody gathers them.
void params_allocate(Params *params, DType dtype, uint64_t seed);
void params_free(Params *params);

Param *params_find(const Params *params, const char *name);  // NULL if there is none
// Borrowed views in the parameter's own shape, of tensors that exist whole.
Tensor param_value(const Params *params, const Param *param);
Tensor param_grad(const Params *params, const Param *param);
// The unit's gradient summed over micro-batches so far: accumulated where it exists, else grads.
Tensor unit_total_grad(const Unit *unit);
Tensor param_total_grad(const Params *params, const Param *param);  // of one parameter
Tensor params_total_grad(const Params *params);                     // of all units, flat

// Elements [*first, *first + *count) of a unit are the part of member `rank` of dp; ceil(count / n) each, the
// last ones fewer, so that there is no padding.
void unit_part(const Unit *unit, int rank, int n, int64_t *first, int64_t *count);
// The number of elements of each part, for collectives. The caller frees them.
int64_t *unit_part_counts(const Unit *unit, int n);
// SHARD_GRADS: a whole gradient of zeros for one micro-batch's backward, until unit_free_grads.
void unit_new_grads(const Params *params, Unit *unit);
void unit_free_grads(Unit *unit);

// The elements that a range of the unit, [first, first + count), shares with a parameter, as a range of the
// unit. False if there are none.
bool param_overlap(const Param *param, int64_t first, int64_t count, int64_t *from, int64_t *shared);
// Of this rank's own parts: {0} if it owns nothing of the parameter. *from (may be NULL) is the first element
// within the parameter.
Tensor param_own_value(const Params *params, const Param *param, int64_t *from);
Tensor param_own_grad(const Params *params, const Param *param, int64_t *from);

int64_t params_elements(const Params *params);  // in all units, as tp cuts them
// Before the first micro-batch of a step: every gradient is zero.
void params_zero_grads(Params *params);
// After a unit's micro-batch: accumulated += grads, grads = 0. Nothing to do without accumulators.
void params_accumulate(Params *params, int unit);
// L2 norm over all gradients, each element of the model counted once; collective over dp and tp where they
// cut. Sums run part by part in the order of dp's ranks, on one rank or on many, so that ZeRO and DDP have
// the same bits. And, for a NaN, the first tensor that holds one (NULL if none), the same on all ranks.
double params_grad_norm(const Params *params);
const Param *params_first_bad_grad(const Params *params);

// ---- the whole weight, whoever stores it ----

// What to look at: the weights, or the total gradient.
typedef enum ParamTensor { PARAM_VALUE, PARAM_GRAD } ParamTensor;
// whole (full[0] full[1]) of the tensor's dtype, on the host of every rank: this rank's own elements, and
// those that it lacks from the ranks of dp and tp that have them. Collective over these; moves bits, never
// sums. Counted as a reduce and a broadcast, which training does not use; memory peaks stay as they were.
void param_gather(const Params *params, const Param *param, ParamTensor which, void *whole);
// The same of any flat tensor that has one element for each of the unit's own part (optimizer state) or, with
// own = false, for each that this rank stores.
void param_gather_flat(const Params *params, const Param *param, Tensor flat, bool own, void *whole);
// The other way: this rank's elements of `whole` into the flat tensor. Not collective.
void param_scatter_flat(const Params *params, const Param *param, Tensor flat, bool own, const void *whole);
// Weights from whole to where this rank stores them.
void param_set_value(const Params *params, const Param *param, const void *whole);

#ifdef __cplusplus
}
#endif
#endif
