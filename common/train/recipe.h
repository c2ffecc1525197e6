// recipe.h: which dtype each role of a number has: weights, gradients, their sums, master weights, moments.
// One record decides it, so that nobody asks how many bytes a type has to know whether there are masters;
// and what is sent in fewer bits than it is stored in.
#ifndef RECIPE_H
#define RECIPE_H

#include "comm/codec.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Param Param;

// What of a weight the optimizer steps: elements first … of what this rank stores of it, at this step.
typedef enum StateKind { STATE_M, STATE_V, STATE_MASTER, STATE_VALUE } StateKind;
typedef struct StatePart {
    const Param *param;
    StateKind kind;
    int64_t first, step;
    uint64_t seed;  // the recipe's
} StatePart;

// How the optimizer reads and writes what a recipe stores otherwise than rounded to nearest: by random
// rounding, or as codes with a scale. The optimizer computes with `wide`, f32 or f64.
typedef struct Rounding {
    void *context;
    // m, v and masters are codes, with scales of a rank's own part: checkpoints have what load makes of
    // them, in f32. What load has made, store keeps to the bit, so that a resumed run goes on with it.
    bool scaled;
    void (*load)(void *context, Tensor wide, Tensor stored, StatePart part);
    void (*store)(void *context, Tensor stored, Tensor wide, StatePart part);
} Rounding;

typedef struct Recipe {
    DType weight;    // what forward and backward multiply with; activations have it, too
    DType gradient;  // as backward writes it: of one micro-batch, or if it is `sum`, of all so far
    DType sum;       // of gradients over micro-batches and ranks; other than `gradient`: accumulators exist
    DType master;    // what the optimizer steps; other than `weight`: master weights exist
    DType moment;    // AdamW's m
    DType second;    // and v
    const Rounding *rounding;  // NULL: what the optimizer stores is rounded to nearest
    uint64_t seed;             // of random rounding
    // Of what is gathered for use and freed after it; NULL: it is sent as it is.
    const Codec *send_weights;  // of a unit whose ranks store parts of it (ZeRO-3)
    const Codec *send_rows;     // activations that enter a region of tensor parallelism
    const Codec *send_drows;    // their gradients, which enter it from the other side
} Recipe;

// The standard recipe of a dtype (Micikevicius et al. 2018 for 16 bits): f64 and f32 have it in every role;
// bf16 and f16 sum gradients in f32, step f32 master weights and keep f32 moments.
Recipe recipe_standard(DType dtype);
static inline bool recipe_has_accumulators(Recipe r) { return r.sum != r.gradient; }
static inline bool recipe_has_masters(Recipe r) { return r.master != r.weight; }

#ifdef __cplusplus
}
#endif
#endif
