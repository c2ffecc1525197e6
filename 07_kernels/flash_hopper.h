// flash_hopper.h: what files of FlashAttention by TMA and wgmma share: tiles of 128 rows of 16-bit numbers,
// as TMA leaves them and wgmma reads them. Where a row has more than 64 numbers, boxes of 64 columns lie
// behind one another. A warp has 16 of a tile's rows.
#ifndef FLASH_HOPPER_H
#define FLASH_HOPPER_H

#include "cuda/instructions_hopper.h"
#include "flash_fragments.h"

enum { WARPGROUP = 128, COLUMNS = 64, BOX = 128 * TILE_ROW };  // columns and bytes of a box

__device__ static inline int own_group() { return (int)threadIdx.x / WARPGROUP; }

// Where a tile has a chunk of row `own` of the warp's 16.
__device__ static inline char *chunk_of(char *tile, int own, int chunk) {
    return tile + chunk / 8 * BOX + (own_warp() * 16 + own) * TILE_ROW + (chunk % 8 ^ own % 8) * 16;
}

// Where this lane's i-th pair of numbers belongs there, of 2 i and 2 i + 1 in its registers.
__device__ static inline uint32_t *pair_of_rows(char *tile, int i) {
    return reinterpret_cast<uint32_t *>(chunk_of(tile, i % 2 * 8 + own_lane() / 4, i / 2)) + own_lane() % 4;
}

// ---- the tiles that a block takes ----

// Tiles of so many tokens, from `at` on, in their order: each role of a block walks the same. What it does
// with them counts steps, not places. By order, all of them to the end ...
struct Walk {
    int at, end;
};
__device__ static inline bool more(const Walk &w) { return w.at < w.end; }
__device__ static inline bool needs_mask(const Heads &shape, const Walk &, int query0, int key0, int keys) {
    return !sees(shape, query0, key0 + keys - 1);
}

// ... and by tokens, those that are not empty. A warp looks at 32 of them at a time, each lane at one:
// `next` is the first of those that it will look at, seen and full are bits of those that it has.
struct TokenWalk {
    int at, next;  // at: -1 behind the last
    unsigned seen, full;
    bool partial;  // the tile at `at`
};
__device__ static inline bool more(const TokenWalk &w) { return w.at >= 0; }
__device__ static inline bool needs_mask(const TokenHeads &, const TokenWalk &w, int, int, int) {
    return w.partial;
}

// The next tile of STEP of `end` tokens, of which state(first token) tells. By a whole warp.
template <int STEP, class State>
__device__ static inline void find_tile(TokenWalk *w, int end, State state) {
    for (; !w->seen && w->next < end; w->next += 32 * STEP) {
        const TileState own = state(w->next + own_lane() * STEP);
        // Not own != TILE_EMPTY: at that ptxas of CUDA 12.3 to 12.6 crashes.
        w->full = __ballot_sync(~0u, own == TILE_FULL);
        w->seen = w->full | __ballot_sync(~0u, own == TILE_PARTIAL);
    }
    const int place = __ffs((int)w->seen) - 1;
    w->at = w->seen ? w->next + (place - 32) * STEP : -1;
    w->partial = !(w->full >> (place & 31) & 1);
    w->seen &= w->seen - 1;
}

// ---- rows that leave ----

// The warp's rows of `out` (=) those of a tile of T, the first `rows` of them, by chunks.
template <int D, class T>
__device__ static inline void store_chunks(T *out, char *tile, int rows, int64_t stride) {
    __syncwarp();
#pragma unroll
    for (int at = own_lane(); at < 16 * D / CHUNK; at += 32) {
        const int own = at / (D / CHUNK), chunk = at % (D / CHUNK);
        if (own < rows)
            *reinterpret_cast<uint4 *>(out + own * stride + chunk * CHUNK) =
                *reinterpret_cast<const uint4 *>(chunk_of(tile, own, chunk));
    }
}

// The warp's rows of `out` (=) sum, the first `rows` of them, by way of the tile.
template <int D, class T>
__device__ static inline void store_by_tile(T *out, char *tile, const float (&sum)[D / 2], int rows,
                                            int64_t stride) {
#pragma unroll
    for (int i = 0; i < D / 4; i++) *pair_of_rows(tile, i) = packed<T>(sum[2 * i], sum[2 * i + 1]);
    store_chunks<D>(out, tile, rows, stride);
}

#endif
