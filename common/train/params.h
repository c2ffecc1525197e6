// params.h: the parameter table. Every fact about a weight (name, shape, who stores it, whether it decays,
// how it is initialized) is stored here once; optimizer, checkpoint and chapters read it and never test an
// index.
//
// The table is global: every rank lists every weight of the model, whether it stores it (`here`) or not. A
// unit is what one parameter collective moves: the embedding, each block, the head. A unit's weights are
// stored one after another in one flat tensor, its gradients in another of the same layout.
//
// Two kinds of sharding combine. A rank may store only some rows or columns of a weight, or none of it:
// tensor parallelism, pipeline stages (Param.here, shape, first). And the flat elements of a unit, as this
// rank has them, may be sharded over the ranks that train replicas of the unit on other samples: ZeRO
// (Unit.own_first, own_count, and what Params.sharding leaves on a rank). The table only carries out what
// the techniques decide: between params_add and params_allocate they call the functions under "sharding".
#ifndef PARAMS_H
#define PARAMS_H

#include "comm/mesh.h"
#include "recipe.h"
#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

// Of what a rank keeps only its own part: with ZeRO stage 1 the optimizer's state, with stage 2 the
// gradients as well, with stage 3 the weights as well.
typedef enum Sharding { SHARD_NOTHING, SHARD_STATE, SHARD_GRADS, SHARD_VALUES } Sharding;

typedef struct ParamSpec {
    const char *name;  // Hugging Face's: "model.layers.0.self_attn.q_proj.weight"
    int role;          // what it is in the model (transformer.h); techniques shard by it
    int64_t out, in;   // shape of the whole weight; in = 0: a vector
    bool decays;       // weight decay applies (matrices: yes; norms: no)
    double init_std;   // initialized normal with this standard deviation; 0: to ones (norms)
} ParamSpec;

struct Param {
    char name[80];
    int role;
    int unit;          // index into units
    bool here;         // this rank stores it, or some of it
    int dims;          // 1 or 2
    int64_t full[2];   // shape of the whole weight
    int64_t shape[2];  // shape of what this rank stores (with ZeRO it owns only a part of that)
    int64_t first[2];  // where the stored part begins in the whole; rows from full[0] on are padding
    bool sharded;      // no rank of the spread stores all of it
    Group copies;      // the ranks of the spread that store the same elements, this one included
    Group parts;       // those of them whose gradients are partial and must be summed; else this one alone
    bool decays;
    double init_std;
    bool apart;             // its gradient has its own row in the proof's table (routers)
    int64_t offset, count;  // its elements within the unit's flat tensors; count is 0 if it is not here
};

typedef struct Unit {
    char name[32];  // "embedding" "block 3" "head"
    int first_param, params;
    int64_t first, count;  // its elements within the model's flat tensors; count is 0 if it is not here
    Group replicas;        // ranks that train this unit on other samples; its gradients are summed
    Group spread;          // ranks that together store it once
    // Flat, (count); {0} while this rank stores only its own part.
    Tensor values, grads;  // grads in the recipe's gradient dtype
    Tensor accumulated;    // sums over micro-batches; {0} if grads itself accumulates
    bool waits;            // grads has yet to be added to these sums, by params_accumulate
    // This rank's own part: elements own_first … own_first + own_count - 1; all of them without ZeRO.
    int64_t own_first, own_count;
    Tensor own_values;  // (own_count) weights that the optimizer steps: a view of values, or all there is
    Tensor own_grads;   // (own_count) their total gradient: a view of the above, or all there is
    int64_t counted_first, counted_count;  // the elements that this rank adds to the gradients' norm
    // Only these `holders` ranks of `stages` store the unit; holders 0: all ranks do.
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
    // What a recipe remembers from step to step (a loss scale, the history of an amax), the same on every
    // rank; saved in checkpoints. Owned by the technique.
    double *kept;
    int kept_count;
    Sharding sharding;
    bool sharded;  // a technique has set own_first and own_count of each unit
    bool counted;  // a technique has set counted_first and counted_count
    Group world;
    // Spread and replicas of the units that are added next: experts may have others than the rest. The
    // spread are the ranks that together store one replica of the model, as shards or copies.
    Group spread;
    Group within;  // those of the spread that all store a weight until a technique shards it
    Group replicas;
    Group joined[JOINED_MOST];  // groups of copies across stages
    int joined_count;
    // (count) f32, a scale for each weight, if gradients of a micro-batch are stored as 8-bit codes.
    Tensor grad_scale;
    // All units one after another, so that consecutive units are one contiguous range. {0} if only the own
    // parts are stored …
    Tensor values, grads, accumulated;
    // … which are then in these, one after another. {0} if they are views of the above.
    Tensor own_values, own_grads;
} Params;

// ---- building: units in order, each followed by its weights ----
void params_begin(Params *params, const Mesh *mesh);
void params_add_unit(Params *params, const char *name);
// Adds a weight to the last unit, for now stored whole by the ranks of `within`. The pointer is valid until
// the next call.
Param *params_add(Params *params, const ParamSpec *spec);

// ---- sharding: before params_allocate ----
// This rank stores `count` rows (dim 0: outputs) or columns (dim 1: inputs) of the weight from `first` on,
// and no other rank of the spread stores these. Rows beyond the whole are padding and always zero.
void param_shard(Param *param, int dim, int64_t first, int64_t count);
// Says which ranks of the spread store the same elements as this one. partial: each of them saw other
// tokens or serves other heads, so that the gradient is the sum of theirs.
void param_set_copies(Param *param, Group copies, bool partial);
// Of the ranks of `stages` only these store the unit, given as ranks of that group in ascending order: one,
// or several that hold copies and have partial gradients. params_allocate joins such copies across stages,
// together with those within each stage, into one group.
void unit_set_holders(Params *params, int unit, Group stages, const int *holder, int holders);
// Sets each weight's place in its unit, and each unit's count, from the calls so far, for a technique that
// reads them before params_allocate.
void params_measure(Params *params);

// Allocates what this rank stores and draws the weights, keyed by (seed, name, global element index);
// gradients start at zero. With SHARD_GRADS whole gradients exist only after unit_new_grads, with
// SHARD_VALUES whole weights only once they are gathered. The caller ends it with params_free.
void params_allocate(Params *params, Recipe recipe, uint64_t seed);
void params_free(Params *params);

// ---- reading ----
Param *params_find(const Params *params, const char *name);  // NULL if there is none
// Borrowed views in the parameter's stored shape; the unit's tensor must exist whole. Fatal if not here.
Tensor param_value(const Params *params, const Param *param);
Tensor param_grad(const Params *params, const Param *param);
// Backward adds to a weight's gradient between these two calls: param_grad_begin returns the view above or,
// if gradients are 8-bit codes, a decoded copy in the dtype of weights; param_grad_end encodes such a copy
// with a new scale, and frees it.
Tensor param_grad_begin(const Params *params, const Param *param);
void param_grad_end(const Params *params, const Param *param, Tensor grad);
// to (count) = beta to + the unit's grads, decoded and in to's dtype; beta is 0 or 1.
void unit_widen_grads(const Params *params, const Unit *unit, Tensor to, double beta);
// Borrowed: the gradient summed over the micro-batches so far: accumulated if it exists, else grads.
Tensor unit_total_grad(const Unit *unit);
Tensor param_total_grad(const Params *params, const Param *param);  // of one parameter
Tensor params_total_grad(const Params *params);                     // of all units, flat

// With SHARD_GRADS: allocates a whole gradient of zeros, which unit_free_grads frees.
void unit_new_grads(const Params *params, Unit *unit);
void unit_free_grads(Unit *unit);

// The intersection of a range of the unit, [first, first + count), with a parameter, as a range of the
// unit: `*shared` elements from `*from` on. False if it is empty.
bool param_overlap(const Param *param, int64_t first, int64_t count, int64_t *from, int64_t *shared);
// Borrowed: the elements of a parameter within a flat tensor `held`, which has the unit's elements from
// `first` on; {0} if there are none. *from (may be NULL) is set to the first of them, counted within the
// parameter.
Tensor param_part(const Param *param, Tensor held, int64_t first, int64_t *from);
// The same for flat tensors that have one element for each of the unit's own part: any tensor (optimizer
// state), the weights, and the gradients.
Tensor param_own_part(const Params *params, const Param *param, Tensor flat, int64_t *from);
Tensor param_own_value(const Params *params, const Param *param, int64_t *from);
Tensor param_own_grad(const Params *params, const Param *param, int64_t *from);

int64_t params_elements(const Params *params);  // that this rank stores, not counting what ZeRO shards
// Sets every gradient to zero, before the first micro-batch of a step.
void params_zero_grads(Params *params);
// After a unit's micro-batch: accumulated += grads, grads = 0. Without accumulators it does nothing.
void params_accumulate(Params *params, int unit);

// ---- over ranks: params_norm.c ----
// Call it after a step's gradients have been summed over replicas: sums partial gradients over the ranks
// that hold copies of the weight, in one all-reduce for each group of these. Collective over the groups.
// Without copies it does nothing.
void params_sum_copies(Params *params);
// The elements of that all-reduce, if this weight is the first of its group in the table, else -1.
int64_t params_partial_elements(const Params *params, int param);
// L2 norm over all gradients, each element of the model counted once; NaN if any is. Squares are summed
// weight by weight in the order of the table, so that no bit depends on where whole weights are stored;
// collective over params_norm_group. This is the one time in a step that the host waits for the device. If
// `number` (1), f64, exists, its value is read along with the squares, and *value set to it; else pass {0}
// and NULL.
double params_grad_norm(const Params *params, Tensor number, double *value);
// The ranks over which the norm's sums are exchanged, one f64 per weight; a group of one if every rank has
// every gradient.
Group params_norm_group(const Params *params);
// To explain a norm that is not finite: the tensor in which backward, which runs from the last weight to
// the first, met it first (NULL if none), the same on all ranks. Collective over params_norm_group.
const Param *params_first_bad_grad(const Params *params);

// ---- the whole weight, whoever stores it: params_whole.c ----

// Which tensor: the weights, or the total gradient.
typedef enum ParamTensor { PARAM_VALUE, PARAM_GRAD } ParamTensor;
// Sets whole (full[0] full[1]), in the tensor's dtype, in host memory of every rank, from this rank's own
// elements and, for those that it lacks, from the ranks of `replicas` and `spread` that have them.
// Collective over these; moves bits, never adds. Counted as a reduce and a broadcast, which training does
// not use; memory peaks are not affected.
void param_gather(const Params *params, const Param *param, ParamTensor which, void *whole);
// Copies what this rank stores of the weight from whole. Not collective.
void param_set_value(const Params *params, const Param *param, const void *whole);

// Called for elements first … first + count - 1 of a whole weight, to read them into `bytes` or to write
// them from there: ranges of a file, so that no rank needs more memory than for what it stores.
typedef void (*ParamRange)(void *context, int64_t first, int64_t count, void *bytes);
// Reads all that this rank stores of a weight.
void param_read_value(const Params *params, const Param *param, ParamRange read, void *context);
// Reads `part`, the elements from `from` on of what this rank stores (param_own_part); {0}: nothing.
void param_read_part(const Param *param, Tensor part, int64_t from, ParamRange read, void *context);
// Writes this rank's share of a weight, from its own part `part`: over all ranks, each element is written
// once.
void param_write_part(const Params *params, const Param *param, Tensor part, int64_t from, ParamRange write,
                      void *context);

// A run of elements of a parameter that are contiguous both in what this rank stores and in the whole.
typedef struct ParamRun {
    int64_t stored, whole, count;  // first element within each, and how many; whole is -1 in padding
} ParamRun;
// The run that begins with stored element i and ends before `end`.
ParamRun param_run(const Param *param, int64_t i, int64_t end);

#ifdef __cplusplus
}
#endif
#endif
