// recipe.h: which dtype each role of a number has: weights, gradients, their sums, master weights, moments.
// The record also says what is sent in fewer bits than it is stored in. It alone decides, so that no code
// has to infer from the size of a type whether there are master weights.
#ifndef RECIPE_H
#define RECIPE_H

#include "comm/codec.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Param Param;

// Which part of which state is loaded or stored: elements of `param` from `first` on, counted within what
// this rank stores of it, at this step.
typedef enum StateKind { STATE_M, STATE_V, STATE_MASTER, STATE_VALUE } StateKind;
typedef struct StatePart {
    const Param *param;
    StateKind kind;
    int64_t first, step;
    uint64_t seed;  // the recipe's
} StatePart;

// How the optimizer reads and writes state that a recipe does not just round to nearest: with random
// rounding, or as codes with a scale. The optimizer computes with `wide`, f32 or f64.
typedef struct Rounding {
    void *context;
    // m, v and masters are codes whose scales belong to a rank's own part. Checkpoints contain what load
    // returns for them, in f32. Storing what load returned changes no bit, so that a resumed run continues
    // exactly.
    bool scaled;
    void (*load)(void *context, Tensor wide, Tensor stored, StatePart part);
    void (*store)(void *context, Tensor stored, Tensor wide, StatePart part);
} Rounding;

typedef struct Recipe {
    DType weight;    // what forward and backward multiply with; also of activations
    DType gradient;  // as backward writes it: of one micro-batch or, if equal to `sum`, of all so far
    DType sum;       // of gradients over micro-batches and ranks; if not `gradient`, accumulators exist
    DType master;    // what the optimizer steps; if not `weight`, master weights exist
    DType moment;    // AdamW's m
    DType second;    // AdamW's v
    const Rounding *rounding;  // NULL: what the optimizer stores is rounded to nearest
    uint64_t seed;             // of random rounding
    // Codecs for what is gathered, used and freed; NULL: sent as it is.
    const Codec *send_weights;  // weights of a unit whose ranks store parts of it (ZeRO-3)
    const Codec *send_rows;     // activations that enter a region of tensor parallelism
    const Codec *send_drows;    // gradients that enter such a region in backward
} Recipe;

// The standard recipe of a dtype (Micikevicius et al. 2018 for 16 bits): f64 and f32 are used in every
// role; bf16 and f16 sum gradients in f32, step f32 master weights and keep f32 moments.
Recipe recipe_standard(DType dtype);
static inline bool recipe_has_accumulators(Recipe r) { return r.sum != r.gradient; }
static inline bool recipe_has_masters(Recipe r) { return r.master != r.weight; }

#ifdef __cplusplus
}
#endif
#endif
