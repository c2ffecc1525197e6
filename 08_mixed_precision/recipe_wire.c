// recipe_wire.c: 8 bits in flight. Playbook: "FP8 pretraining".
//
// Weights that ZeRO-3 gathers and rows that sequence parallelism gathers are sent as a code for each element
// and an f32 scale for each 128: 1.03 bytes in place of 2. The gathered copies are used once and freed; the
// weights that the optimizer updates are not rounded. This file has no main: fp8.c runs it.
#include "mixed_precision.h"

enum { TOGETHER = 128 };
static const Tile tile = {1, TOGETHER};

static int64_t count(const void *context, int tensor, int64_t elements) {
    (void)context;
    return tensor == 0 ? elements : tiles_of(elements, TOGETHER);
}

static void encode(void *context, const Tensor *coded, Tensor part, Group group) {
    (void)context, (void)group;
    int64_t elements = tensor_count(part);
    if (elements == 0) return;
    Tensor scale = tensor_view(coded[1], 0, SHAPE(1, tensor_count(coded[1])));
    Tensor flat = tensor_view(part, 0, SHAPE(1, elements));
    op_fill(scale, 0);
    op_tile_amax(scale, flat, false, tile);
    op_tile_scale(scale, scale, coded[0].dtype, SCALE_REAL);
    op_encode(tensor_view(coded[0], 0, SHAPE(1, elements)), flat, scale, false, tile);
}

static void decode(void *context, Tensor part, const Tensor *coded) {
    (void)context;
    int64_t elements = tensor_count(part);
    op_decode(tensor_view(part, 0, SHAPE(1, elements)), tensor_view(coded[0], 0, SHAPE(1, elements)),
              tensor_view(coded[1], 0, SHAPE(1, tensor_count(coded[1]))), tile);
}

const Codec fp8_codec = {"e4m3, a scale for each 128", NULL, 2, {E4M3, F32}, count, encode, decode};
const Codec fp8_gradient_codec = {
    "e5m2, a scale for each 128", NULL, 2, {E5M2, F32}, count, encode, decode};
