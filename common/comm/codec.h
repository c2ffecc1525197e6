// codec.h: fewer bits in flight: what is sent in place of a tensor's elements, and the way there and back.
//
// Who gathers weights or activations hands the recipe's codec over (recipe.h) and knows no more of it; a
// precision recipe brings the codec. Each member's part of an all-gather is coded by itself, as one to
// CODEC_TENSORS tensors, say codes of 8 bits and the scales of their blocks:
//
//     in ─[encode]─ codes, scales ──all-gather──> of all members ─[decode]─ out
//
// The member's own part is decoded, too: all members have the same bits afterwards.
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
    // How many elements of this tensor stand for `count` of a part, more than 0.
    int64_t (*count)(const void *context, int tensor, int64_t count);
    // A part of no elements comes with tensors of none. encode is called on every member of the group, so
    // that it may send something itself: the largest element, where all share a scale.
    void (*encode)(void *context, const Tensor *coded, Tensor part, Group group);
    void (*decode)(void *context, Tensor part, const Tensor *coded);
} Codec;

// comm_all_gather, coded: encodes at the start, and decodes in comm_wait. Without a codec (NULL) it is
// comm_all_gather. `out` belongs to the request, `in` does not, and must not be a part of `out`. Sends
// (n - 1) times what stands for `in`, in as many all-gathers as the codec has tensors.
Request *comm_all_gather_coded(Tensor out, Tensor in, const int64_t *counts, const Codec *codec,
                               Group group);

#ifdef __cplusplus
}
#endif
#endif
