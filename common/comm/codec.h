// codec.h: fewer bits in flight: what is sent in place of a tensor's elements, and how it is coded and
// decoded.
//
// Code that gathers weights or activations passes on the recipe's codec (recipe.h) and knows nothing else
// about it; a precision recipe provides the codec. Each member's part of an all-gather is coded separately,
// as one to CODEC_TENSORS tensors, for example 8-bit codes and the scales of their blocks:
//
//     in ─[encode]─ codes, scales ──all-gather──> of all members ─[decode]─ out
//
// A member decodes its own part too, so that all members have the same bits afterwards.
#ifndef CODEC_H
#define CODEC_H

#include "comm.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CODEC_TENSORS = 2 };

typedef struct Codec {
    const char *name;  // "e4m3, a scale for each 128"
    void *context;
    int tensors;
    DType dtype[CODEC_TENSORS];
    // How many elements of this tensor encode a part of `count` elements, count > 0.
    int64_t (*count)(const void *context, int tensor, int64_t count);
    // encode sets coded (tensors) from part, decode sets part from coded. If the part is empty, so are the
    // coded tensors. encode is called on every member of the group, even for an empty part, so it may
    // communicate: for the largest element, where all members share a scale.
    void (*encode)(void *context, const Tensor *coded, Tensor part, Group group);
    void (*decode)(void *context, Tensor part, const Tensor *coded);
} Codec;

// comm_all_gather, coded: encodes when it is called and decodes in comm_wait. Without a codec (NULL) it is
// comm_all_gather. `out` belongs to the request until then; `in` is free at once, and must not be a part of
// `out`. Sends (n - 1) times the bytes that encode `in`, in as many all-gathers as the codec has tensors.
Request *comm_all_gather_coded(Tensor out, Tensor in, const int64_t *counts, const Codec *codec,
                               Group group);

#ifdef __cplusplus
}
#endif
#endif
