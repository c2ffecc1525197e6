// params.h: the parameter table. Every fact about a weight (name, shape, who stores it, whether it decays,
// how it starts) stands here once; optimizer, checkpoint and chapters read it and test no index.
//
// The table is global: every rank lists every weight of the model, stored `here` or not. A unit is what
// one parameter collective moves: the embedding, each block, the head. A unit's weights lie one after
// another in one flat tensor, its gradients in another of the same layout.
//
// Two kinds of shards meet. A rank may store some rows or columns of a weight, or none of it: tensor
// parallelism, pipeline stages (Param.here, shape, first). And the flat elements of a unit, as this rank
// has them, may be sharded over the ranks that train copies of the unit on other samples: ZeRO
// (Unit.own_first, own_count, and what Params.sharding leaves on a rank). The table only carries out what
// the techniques say: between params_add and params_allocate they call the functions under "sharding".
#ifndef PARAMS_H
#define PARAMS_H

#include "comm/mesh.h"
#include "recipe.h"
#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

// What ZeRO's stages leave on a rank: stage 1 its part of the optimizer's state, stage 2 also of the
// gradients, stage 3 also of the weights.
typedef enum Sharding { SHARD_NOTHING, SHARD_STATE, SHARD_GRADS, SHARD_VALUES } Sharding;

typedef struct ParamSpec {
    const char *name;  // Hugging Face's: "model.layers.0.self_attn.q_proj.weight"
    int role;          // what it is in the model (transformer.h), by which techniques shard it
    int64_t out, in;   // shape of the whole weight; in = 0: a vector
    bool decays;       // weight decay applies (matrices: yes; norms: no)
    double init_std;   // normal with this deviation; 0: ones (norms)
} ParamSpec;

struct Param {
    char name[80];
    int role;
    int unit;          // index into units
    bool here;         // this rank stores it, or some of it
    int dims;          // 1 or 2
    int64_t full[2];   // shape of the whole weight
    int64_t shape[2];  // what this rank stores (of which it owns a part where ZeRO deals it out)
    int64_t first[2];  // where the stored part begins in the whole; rows from full[0] on are padding
    bool sharded;      // no rank of the spread stores all of it
    Group copies;      // ranks of the spread that store these same elements, this one among them
    Group parts;       // those of them whose gradients are parts that add up; this one where all are whole
    bool decays;
    double init_std;
    bool apart;             // its gradient has a row of its own in the proof's table (routers)
    int64_t offset, count;  // elements within the unit's flat tensors; count is 0 where it is not here
};

typedef struct Unit {
    char name[32];  // "embedding" "block 3" "head"
    int first_param, params;
    int64_t first, count;  // elements within the whole model's flat tensors; 0 of a unit that is not here
    Group replicas;        // ranks that train this unit on other samples: its gradients add up over them
    Group spread;          // ranks that together store it once
    // Flat, (count); {0} while this rank stores its own part alone.
    Tensor values, grads;  // grads in the recipe's gradient dtype
    Tensor accumulated;    // sums over micro-batches; {0} where grads itself accumulates
    bool waits;            // what is in grads is to be added to these sums, by params_accumulate
    // This rank's own part: elements own_first … own_first + own_count - 1, all of them unless ZeRO deals.
    int64_t own_first, own_count;
    Tensor own_values;  // (own_count) the weights that the optimizer steps: a view of values, or all
    Tensor own_grads;   // (own_count) their total gradient: a view of the above, or all
    int64_t counted_first, counted_count;  // what this rank adds to the gradients' norm
    // Of the ranks of `stages` only these store the unit; 0: all ranks do.
    Group stages;
    int *holder, holders;
} Unit;

enum { JOINED_MOST = 16 };

typedef struct Params {
    Param *param;
    int count;
    Unit *unit;
    int units;
    Recipe recipe;
    // What a recipe knows from step to step (a loss scale, the history of an amax), the same on every
    // rank: checkpoints have it. The technique's own.
    double *kept;
    int kept_count;
    Sharding sharding;
    bool sharded;  // a technique has set own_first and own_count of each unit
    bool counted;  // and counted_first and counted_count
    Group world;
    // Ranks that together store one replica of the model, other elements or copies: of the units that are
    // added from here on, as experts may lie on other ranks than the rest.
    Group spread;
    Group within;               // those of the spread that all store a weight until a technique shards it
    Group replicas;             // of the units that are added from here on
    Group joined[JOINED_MOST];  // of copies across stages
    int joined_count;
    // Where gradients of a micro-batch are stored as 8-bit codes: (count) f32, a scale for each weight's.
    Tensor grad_scale;
    // Where all units stand one after another, consecutive units being one contiguous range. {0} where a
    // unit's own part is all that is stored …
    Tensor values, grads, accumulated;
    // … and then those, one after another. {0} where they are views of the above.
    Tensor own_values, own_grads;
} Params;

// ---- building: units in order, each followed by its weights ----
void params_begin(Params *params, const Mesh *mesh);
void params_add_unit(Params *params, const char *name);
// Stored whole by every rank of the spread. Valid until the next one.
Param *params_add(Params *params, const ParamSpec *spec);

// ---- sharding: before params_allocate ----
// This rank stores `count` rows (dim 0: outputs) or columns (dim 1: inputs) of the weight from `first` on,
// and no other rank of the spread stores these; rows beyond the whole are padding, zero for ever.
void param_shard(Param *param, int dim, int64_t first, int64_t count);
// Which ranks of the spread store the same elements as this one. partial: each has seen other tokens, or
// serves other heads, so that the gradient is the sum of theirs.
void param_set_copies(Param *param, Group copies, bool partial);
// Of the ranks of `stages` only these, by their rank in it and ascending, store the unit: one, or several
// that hold copies, whose gradients are parts. Copies across stages of what each of them has copies of
// within its stage are made by params_allocate.
void unit_set_holders(Params *params, int unit, Group stages, const int *holder, int holders);
// Sets each weight's place in its unit and each unit's count from what was said so far: before a technique
// reads them.
void params_measure(Params *params);

// Allocates what this rank stores and draws the weights, keyed by (seed, name, global element index);
// gradients start at zero. With SHARD_GRADS no whole gradient exists until unit_new_grads, with
// SHARD_VALUES no whole weights until somebody gathers them.
void params_allocate(Params *params, Recipe recipe, uint64_t seed);
void params_free(Params *params);

// ---- reading ----
Param *params_find(const Params *params, const char *name);  // NULL if there is none
// Borrowed views in the parameter's own shape, of tensors that exist whole.
Tensor param_value(const Params *params, const Param *param);
Tensor param_grad(const Params *params, const Param *param);
// What a micro-batch adds to the gradient of a weight, it adds between these two: to the view above, or,
// where that has 8-bit codes, to a copy in the dtype of weights, which is stored with a new scale.
Tensor param_grad_begin(const Params *params, const Param *param);
void param_grad_end(const Params *params, const Param *param, Tensor grad);
// to (count) = beta to + the unit's gradient of one micro-batch, in to's dtype; beta is 0 or 1.
void unit_widen_grads(const Params *params, const Unit *unit, Tensor to, double beta);
// The unit's gradient summed over micro-batches so far: accumulated where it exists, else grads.
Tensor unit_total_grad(const Unit *unit);
Tensor param_total_grad(const Params *params, const Param *param);  // of one parameter
Tensor params_total_grad(const Params *params);                     // of all units, flat

// SHARD_GRADS: a whole gradient of zeros, until unit_free_grads.
void unit_new_grads(const Params *params, Unit *unit);
void unit_free_grads(Unit *unit);

// The elements that a range of the unit, [first, first + count), shares with a parameter, as a range of
// the unit. False if there are none.
bool param_overlap(const Param *param, int64_t first, int64_t count, int64_t *from, int64_t *shared);
// What a flat tensor, which has the unit's elements from `first` on, has of a parameter; {0}: nothing.
// *from (may be NULL) is the first such element within the parameter.
Tensor param_part(const Param *param, Tensor held, int64_t first, int64_t *from);
// The same of flat tensors that have one element for each of the unit's own part: any (optimizer state),
// the weights and the gradients.
Tensor param_own_part(const Params *params, const Param *param, Tensor flat, int64_t *from);
Tensor param_own_value(const Params *params, const Param *param, int64_t *from);
Tensor param_own_grad(const Params *params, const Param *param, int64_t *from);

int64_t params_elements(const Params *params);  // that this rank stores, before ZeRO deals them
// Before the first micro-batch of a step: every gradient is zero.
void params_zero_grads(Params *params);
// After a unit's micro-batch: accumulated += grads, grads = 0. Nothing to do without accumulators.
void params_accumulate(Params *params, int unit);

// ---- over ranks: params_norm.c ----
// After a step's gradients are summed over replicas: partial gradients are summed over the ranks that hold
// copies of the weight, one message for each group of them. Collective over these. Nothing to do without
// copies.
void params_sum_copies(Params *params);
// Elements of the message that begins with this weight: 0 or more where it is the first of its group, else
// -1.
int64_t params_partial_elements(const Params *params, int param);
// L2 norm over all gradients, each element of the model counted once, NaN if one is. Squares add up weight
// by weight in the order of the table, so that where whole weights lie does not change a bit; collective
// over params_norm_group. The host waits for the device this once, and reads *value = number (1), f64, with
// it; {0} and NULL: the norm alone.
double params_grad_norm(const Params *params, Tensor number, double *value);
// The ranks that the norm's sums are exchanged over: one alone where every rank has every gradient. A
// message is as many f64 as there are weights.
Group params_norm_group(const Params *params);
// For a NaN: the first tensor that holds one (NULL if none), the same on all ranks.
const Param *params_first_bad_grad(const Params *params);

// ---- the whole weight, whoever stores it: params_whole.c ----

// What to look at: the weights, or the total gradient.
typedef enum ParamTensor { PARAM_VALUE, PARAM_GRAD } ParamTensor;
// whole (full[0] full[1]) of the tensor's dtype, on the host of every rank: this rank's own elements, and
// those that it lacks from the replicas and the spread that have them. Collective over these; moves bits,
// never sums. Counted as a reduce and a broadcast, which training does not use; memory peaks stay as they
// were.
void param_gather(const Params *params, const Param *param, ParamTensor which, void *whole);
// Weights from whole to where this rank stores them. Not collective.
void param_set_value(const Params *params, const Param *param, const void *whole);

// Elements first … first + count - 1 of a whole weight are put into `bytes`, or taken from there: a file's
// ranges, so that no rank holds more of a weight than it stores.
typedef void (*ParamRange)(void *context, int64_t first, int64_t count, void *bytes);
// Reads what this rank stores of a weight.
void param_read_value(const Params *params, const Param *param, ParamRange read, void *context);
// Reads `part`, elements `from` on of what this rank stores (param_own_part); nothing of {0}.
void param_read_part(const Param *param, Tensor part, int64_t from, ParamRange read, void *context);
// Writes of this rank's own part of a weight what is its to write: over all ranks, each element once.
void param_write_part(const Params *params, const Param *param, Tensor part, int64_t from, ParamRange write,
                      void *context);

// A run of elements of a parameter that lie side by side both in what this rank stores and in the whole.
typedef struct ParamRun {
    int64_t stored, whole, count;  // first element within either; whole is -1 in padding
} ParamRun;
// The run that begins with stored element i and ends before `end`.
ParamRun param_run(const Param *param, int64_t i, int64_t end);

#ifdef __cplusplus
}
#endif
#endif
