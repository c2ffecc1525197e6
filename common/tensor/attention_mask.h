// attention_mask.h: who may see whom in attention, where tokens are stored in any order and on any rank.
//
// A token has a position in its sequence and belongs to a document. A query sees the keys of its own
// document at its own position and before it. What of a mask is empty, and what is full, is known tile by
// tile from the least and the greatest position and document of either side, so that memory stays linear in
// the sequence:
//
//     keys ->
//     o / . .      a square of the picture is ATTENTION_TILE queries by as many keys
//     o o / .      o full:    computed without a mask
//     o o o /      / partial: computed, and masked entry by entry
//     o o o o      . empty:   never read
//
// Positions and documents are known on the host as well: a dry run counts, and has no device to ask.
#ifndef ATTENTION_MASK_H
#define ATTENTION_MASK_H

#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { ATTENTION_TILE = 64 };

// The least and the greatest of up to ATTENTION_TILE tokens.
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

// position, document (b, s) host, copied; documents count from 0, NULL: all belong to one.
// attention_positions_free ends it.
AttentionPositions attention_positions_new(int64_t b, int64_t s, const int32_t *position,
                                           const int32_t *document);
// Tokens 0 to s - 1 of each sample, one document: all of a sequence on one device.
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

// What a kernel without tables of positions can compute: every query sees every key, or token i of the keys
// is that of the queries and sees those up to itself.
typedef enum MaskShape { MASK_ANY, MASK_FULL, MASK_CAUSAL } MaskShape;

// Queries against one chunk of keys, and the work that this is. Counts are those of one head, all samples
// together. Borrows both sides, which must outlive it; make it once and use it in every layer.
typedef struct AttentionMask {
    const AttentionPositions *queries, *keys;
    double pairs;    // of a query and a key that it sees: the score entries that count
    double entries;  // score entries in the tiles that are computed: pairs, and what the mask throws away
    int64_t tiles;   // computed
    int64_t full;    // of which need no mask
    MaskShape shape;
} AttentionMask;

// Exact, in any order of tokens: O(b s log s), and the tiles.
AttentionMask attention_mask(const AttentionPositions *queries, const AttentionPositions *keys);

#ifdef __cplusplus
}
#endif
#endif
