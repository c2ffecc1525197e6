// attention_mask.h: which keys each query may see in attention, wherever and in whatever order tokens are
// stored.
//
// A token has a position in its sequence and belongs to a document. A query sees the keys of its own
// document at its own position and before it. Which tiles of the scores are empty and which are full
// follows from the least and greatest position and document on either side, so the memory is linear in the
// sequence length:
//
//     keys ->
//     / . . .      a square of the picture is ATTENTION_TILE queries by ATTENTION_TILE keys
//     o / . .      o full:    computed without a mask
//     o o / .      / partial: computed, and masked entry by entry
//     o o o /      . empty:   never read
//
// Positions and documents are kept on the host as well, for a dry run, which counts but has no device.
#ifndef ATTENTION_MASK_H
#define ATTENTION_MASK_H

#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { ATTENTION_TILE = 64 };

// The least and greatest position and document among up to ATTENTION_TILE tokens.
typedef struct TileBounds {
    int32_t first_position, last_position, first_document, last_document;
} TileBounds;

// b samples of s tokens, in the order in which they are stored.
typedef struct AttentionPositions {
    int64_t b, s, tiles;           // tiles of one sample
    int32_t *position, *document;  // (b, s) on the host
    TileBounds *bound;             // (b, tiles) on the host
    Tensor positions, documents;   // (b, s) i32 on the device
    Tensor bounds;                 // (b, tiles, 4) i32 on the device
} AttentionPositions;

// position, document: (b, s) in host memory, copied. Position NULL: 0 to s - 1 in each sample. Documents are
// numbered from 0; NULL: all tokens belong to one. The caller ends it with attention_positions_free.
AttentionPositions attention_positions_new(int64_t b, int64_t s, const int32_t *position,
                                           const int32_t *document);
// Positions 0 to s - 1 in order, in one document: a whole sequence on one device.
AttentionPositions attention_positions_whole(int64_t b, int64_t s);
void attention_positions_free(AttentionPositions *positions);

typedef enum TileState { TILE_EMPTY, TILE_PARTIAL, TILE_FULL } TileState;

static inline TileState attention_tile(TileBounds q, TileBounds k) {
    if (q.last_position < k.first_position || q.last_document < k.first_document ||
        k.last_document < q.first_document)
        return TILE_EMPTY;
    bool one_document = q.first_document == q.last_document && k.first_document == k.last_document;
    return one_document && q.first_position >= k.last_position ? TILE_FULL : TILE_PARTIAL;
}

// Masks that a kernel can apply without tables of positions. FULL: every query sees every key. CAUSAL:
// queries and keys are the same tokens in order, and each sees those up to itself. ANY: neither.
typedef enum MaskShape { MASK_ANY, MASK_FULL, MASK_CAUSAL } MaskShape;

// The queries against one chunk of keys, and how much work that is. Counts are per head, summed over the
// samples. Borrows both sides, which must outlive it; make it once and use it in every layer.
typedef struct AttentionMask {
    const AttentionPositions *queries, *keys;
    double pairs;    // of a query and a key that it sees: the score entries that count
    double entries;  // score entries in computed tiles: pairs, and those that the mask discards
    int64_t tiles;   // that are computed
    int64_t full;    // those of them that need no mask
    MaskShape shape;
} AttentionMask;

// Exact for any order of tokens. Takes time O(b s log s), and a constant for each tile.
AttentionMask attention_mask(const AttentionPositions *queries, const AttentionPositions *keys);

#ifdef __cplusplus
}
#endif
#endif
