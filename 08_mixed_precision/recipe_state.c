// recipe_state.c: what the optimizer keeps in 8 and 16 bits. Playbook: "FP8 pretraining"; Peng et al. 2023
// (FP8-LM).
//
//     8 bits     codes, and a scale for each 128 elements: m in e4m3; v, a mean of squares, whose range of
//                exponents is twice as wide, in e5m2 or in 16 bits
//     float16    the elements divided by a scale, a power of two, one for each rank's part of a weight, so
//                that v is not below float16's smallest number
//     bfloat16   as they are
//
// The optimizer reads them, computes its step in f32, and stores them again. Scales belong to a rank's own
// part: another layout rounds differently, but no worse. Moments that are read in f32 and stored again get
// the same codes and scales: the largest code times a scale, rounded, gives that scale again, whichever of
// f32's 2^23 fractions the amax had (tests/unit/test_codes.c). So checkpoints store moments in f32, any
// layout can continue from them, and the layout that wrote them does so bit for bit. This file has no main:
// fp8.c runs it.
#include <stdlib.h>

#include "mixed_precision.h"

enum { TOGETHER = 128 };
static const int KINDS = STATE_VALUE + 1;

struct Fp8State {
    Rounding rounding;
    const Param *first;  // of the table
    Tensor *scale;       // (parameters, KINDS) of 8-bit and float16 state; {0}: none
    int count;
};

static Tile tile_of(DType dtype) { return (Tile){1, dtype == F16 ? 0 : TOGETHER}; }
static Tensor in_a_row(Tensor t) { return tensor_view(t, 0, SHAPE(1, tensor_count(t))); }

static Tensor scale_of(const Fp8State *s, StatePart part) {
    return s->scale[(part.param - s->first) * KINDS + part.kind];
}

static void load(void *context, Tensor wide, Tensor stored, StatePart part) {
    Tensor scale = scale_of(context, part);
    if (tensor_exists(scale)) op_decode(in_a_row(wide), in_a_row(stored), scale, tile_of(stored.dtype));
    else op_copy(wide, stored);
}

static void store(void *context, Tensor stored, Tensor wide, StatePart part) {
    Tensor scale = scale_of(context, part);
    if (!tensor_exists(scale)) {
        op_copy(stored, wide);
        return;
    }
    const Tile tile = tile_of(stored.dtype);
    op_fill(scale, 0);
    op_tile_amax(scale, in_a_row(wide), false, tile);
    op_tile_scale(scale, scale, stored.dtype, stored.dtype == F16 ? SCALE_POWER_OF_TWO : SCALE_REAL);
    op_encode(in_a_row(stored), in_a_row(wide), scale, false, tile);
}

Fp8State *fp8_state_plug(Model *m) {
    Params *p = &m->params;
    const DType dtype[] = {[STATE_M] = p->recipe.moment,
                           [STATE_V] = p->recipe.second,
                           [STATE_MASTER] = p->recipe.master,
                           [STATE_VALUE] = p->recipe.weight};
    Fp8State *s = host_alloc(sizeof *s);
    *s = (Fp8State){.rounding = {s, true, load, store}, .first = p->param, .count = p->count};
    s->scale = calloc((size_t)(p->count * KINDS), sizeof *s->scale);
    CHECK(s->scale, "out of host memory for the scales of moments");
    for (int i = 0; i < p->count * KINDS; i++) {
        Tensor own = param_own_value(p, &p->param[i / KINDS], NULL);
        const DType stored = dtype[i % KINDS];
        if (!tensor_exists(own) || (stored != E4M3 && stored != E5M2 && stored != F16)) continue;
        const int64_t scales = tiles_of(tensor_count(own), tile_of(stored).columns);
        s->scale[i] = tensor_new(MEMORY_PARAMETER, F32, SHAPE(1, scales));
        op_fill(s->scale[i], 1);
    }
    p->recipe.rounding = &s->rounding;
    return s;
}

void fp8_state_unplug(Model *m, Fp8State *s) {
    m->params.recipe.rounding = NULL;
    for (int i = 0; i < s->count * KINDS; i++) tensor_free(&s->scale[i]);
    free(s->scale);
    free(s);
}

double fp8_state_bytes(const Fp8State *s) {
    double bytes = 0;
    for (int i = 0; i < s->count * KINDS; i++)
        if (tensor_exists(s->scale[i])) bytes += (double)tensor_bytes(s->scale[i]);
    return bytes;
}
