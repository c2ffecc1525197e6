// recipe_state.c: what the optimizer keeps in 8 and 16 bits. Playbook: "FP8 pretraining"; Peng et al. 2023
// (FP8-LM).
//
//     8 bits     codes, and a scale for each 128 elements: m in e4m3; v, a mean of squares, whose range of
//                exponents is twice as wide, in e5m2 or in 16 bits
//     float16    the elements divided by a power of two, one for each rank's part of a weight, so that v is
//                not below float16's smallest number
//     bfloat16   as they are
//
// The optimizer reads them, computes its step in f32, and stores them again. Scales belong to a rank's own
// part: another layout rounds differently, but no worse. Moments that are read in f32 and stored again get
// the same codes and scales: the largest code times a scale, rounded, gives that scale again, whichever of
// f32's 2^23 fractions the amax had (tests/unit/test_codes.c). So checkpoints store moments in f32, any
// layout can continue from them, and the layout that wrote them does so bit for bit. This file has no main:
// fp8.c runs it.
#include <math.h>
#include <stdlib.h>

#include "mixed_precision.h"

enum { TOGETHER = 128 };
static const int KINDS = STATE_VALUE;  // the weight itself is stored as it is
static const Tile tile = {1, TOGETHER};

struct Fp8State {
    Rounding rounding;
    const Param *first;  // of the table
    Tensor *scale;       // (parameters, KINDS) of 8-bit state; {0}: none
    double *divisor;     // (parameters, KINDS) of 16-bit state
    int count;
};

static bool is_8_bits(Tensor t) { return t.dtype == E4M3 || t.dtype == E5M2; }
// Whether its elements are divided, if only by 1: time on the model clock must not depend on the data.
static bool is_divided(Tensor stored, StatePart part) {
    return stored.dtype == F16 && (int)part.kind < KINDS;
}
static Tensor in_a_row(Tensor t) { return tensor_view(t, 0, SHAPE(1, tensor_count(t))); }

static void load(void *context, Tensor wide, Tensor stored, StatePart part) {
    const Fp8State *s = context;
    int64_t at = (part.param - s->first) * KINDS + part.kind;
    if (is_8_bits(stored)) {
        op_decode(in_a_row(wide), in_a_row(stored), s->scale[at], tile);
        return;
    }
    op_copy(wide, stored);
    if (is_divided(stored, part)) op_scale(wide, s->divisor[at]);
}

// The power of two that brings the largest element above 2^14, and to at most 2^15, also after rounding:
// float16 ends at 2^16.
static double divisor_of(Tensor wide) {
    double most;
    int power;
    Tensor amax = tensor_new(MEMORY_OPTIMIZER, F32, SHAPE(1, 1));
    op_fill(amax, 0);
    op_tile_amax(amax, in_a_row(wide), false, (Tile){0, 0});
    tensor_to_doubles(&most, amax);
    tensor_free(&amax);
    if (frexp(most, &power) == 0.5) power--;
    return most > 0 && isfinite(most) ? ldexp(1, power - 15) : 1;
}

static void store(void *context, Tensor stored, Tensor wide, StatePart part) {
    Fp8State *s = context;
    int64_t at = (part.param - s->first) * KINDS + part.kind;
    if (is_8_bits(stored)) {
        op_fill(s->scale[at], 0);
        op_tile_amax(s->scale[at], in_a_row(wide), false, tile);
        op_tile_scale(s->scale[at], s->scale[at], stored.dtype, SCALE_REAL);
        op_encode(in_a_row(stored), in_a_row(wide), s->scale[at], false, tile);
        return;
    }
    if (is_divided(stored, part)) {
        s->divisor[at] = divisor_of(wide);
        op_scale(wide, 1 / s->divisor[at]);
    }
    op_copy(stored, wide);
}

Fp8State *fp8_state_plug(Model *m) {
    Params *p = &m->params;
    const DType dtype[] = {
        [STATE_M] = p->recipe.moment, [STATE_V] = p->recipe.second, [STATE_MASTER] = F32};
    Fp8State *s = host_alloc(sizeof *s);
    *s = (Fp8State){.rounding = {s, true, load, store}, .first = p->param, .count = p->count};
    s->scale = calloc((size_t)(p->count * KINDS), sizeof *s->scale);
    s->divisor = host_alloc((size_t)(p->count * KINDS) * sizeof *s->divisor);
    CHECK(s->scale, "out of host memory for the scales of moments");
    for (int i = 0; i < p->count * KINDS; i++) {
        Tensor own = param_own_value(p, &p->param[i / KINDS], NULL);
        s->divisor[i] = 1;
        if (!tensor_exists(own) || (dtype[i % KINDS] != E4M3 && dtype[i % KINDS] != E5M2)) continue;
        s->scale[i] = tensor_new(MEMORY_PARAMETER, F32, SHAPE(1, tiles_of(tensor_count(own), TOGETHER)));
        op_fill(s->scale[i], 1);
    }
    p->recipe.rounding = &s->rounding;
    return s;
}

void fp8_state_unplug(Model *m, Fp8State *s) {
    m->params.recipe.rounding = NULL;
    for (int i = 0; i < s->count * KINDS; i++) tensor_free(&s->scale[i]);
    free(s->scale);
    free(s->divisor);
    free(s);
}

double fp8_state_bytes(const Fp8State *s) {
    double bytes = 0;
    for (int i = 0; i < s->count * KINDS; i++)
        if (tensor_exists(s->scale[i])) bytes += (double)tensor_bytes(s->scale[i]);
    return bytes;
}
