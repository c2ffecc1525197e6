// flash_tiles.h: what the files of FlashAttention share: tiles of rows in shared memory, their products,
// and what that work is.
//
// A block of 64 threads works on tiles of 32 queries and 32 keys. Thread (y, x) of 8 x 8 has rows y + 8 i
// and columns x + 8 j of every product, so that a warp has four rows of eight lanes, which shuffles join.
// Rows in shared memory are padded: by 4 words, so that eight of them lie in different banks and packs of
// four words stay aligned; by 8 words in the tile of scores, where a warp stores four rows of eight.
#ifndef FLASH_TILES_H
#define FLASH_TILES_H

#include "flash_mask.h"

constexpr float LOG2E = 1.44269504f;  // scores are scaled by it, so that e^x is 2^x

enum { TILE = 32, THREADS = 64, SIDE = 8, EACH = TILE / SIDE, SCORE_PITCH = TILE + 8 };

// Of backward; gradients have the shapes of what they are of.
template <class T>
struct OperandsIn {
    const T *q, *k, *v, *o;
    const float *lse;
    const T *grad_o;
};
template <class T>
struct GradientsIn {
    T *dq, *dk, *dv;
};
typedef OperandsIn<float> Operands;
typedef GradientsIn<float> Gradients;
// Words of scratch that suffice for every version of backward: in 16 bits dq is summed in f32, in tiles of
// up to 128 rows.
static inline int64_t backward_room(const Heads &n, int d) {
    return n.b * n.a * ((n.s + 127) / 128 * 128) * (d + 3);
}

template <int D>
constexpr int PITCH = D + 4;
// Bytes of shared memory for some tiles of rows, and of scores.
constexpr int64_t tile_bytes(int d, int rows, int scores) {
    return 4 * (int64_t)TILE * (rows * (d + 4) + scores * SCORE_PITCH);
}

__device__ static inline int thread_y() { return threadIdx.x % THREADS / SIDE; }
__device__ static inline int thread_x() { return threadIdx.x % SIDE; }

// ---- tiles ----

// tile (=) rows first ... of one head, by T threads; rows are `stride` words apart, and those from `end` on
// are zero.
template <int D, int T = THREADS>
__device__ static inline void load_rows(float *tile, const float *head, int64_t first, int64_t end,
                                        int64_t stride) {
    constexpr int PACKS = D / 4;
#pragma unroll 4
    for (int i = threadIdx.x; i < TILE * PACKS; i += T) {
        const int row = i / PACKS, column = i % PACKS * 4;
        float4 pack = make_float4(0, 0, 0, 0);
        if (first + row < end)
            pack = *reinterpret_cast<const float4 *>(head + (first + row) * stride + column);
        *reinterpret_cast<float4 *>(tile + row * PITCH<D> + column) = pack;
    }
}

// Rows row0 ... of one head (=) what the threads have summed; none from `end` on.
template <int D>
__device__ static inline void store_rows(float *head, const float (&sum)[EACH][D / SIDE], int64_t row0,
                                         int64_t end, int64_t stride) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int64_t row = row0 + thread_y() + i * SIDE;
        if (row >= end) continue;
#pragma unroll
        for (int c = 0; c < D / SIDE; c++) head[row * stride + thread_x() + c * SIDE] = sum[i][c];
    }
}

// sum += left right': (32, D) by (32, D)', scores from queries and keys.
template <int D>
__device__ static inline void rows_by_rows(float (&sum)[EACH][EACH], const float *left,
                                           const float *right) {
    left += thread_y() * PITCH<D>;
    right += thread_x() * PITCH<D>;
#pragma unroll 4
    for (int k = 0; k < D; k++) {
        float x[EACH], y[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] = left[i * SIDE * PITCH<D> + k];
#pragma unroll
        for (int j = 0; j < EACH; j++) y[j] = right[j * SIDE * PITCH<D> + k];
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int j = 0; j < EACH; j++) sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
    }
}

// sum += scores rows, or scores' rows: (32, 32) by the 8 C columns of the tile from `rows` on.
template <int D, bool TRANSPOSED = false, int C>
__device__ static inline void scores_by_rows(float (&sum)[EACH][C], const float *scores,
                                             const float *rows) {
#pragma unroll 2
    for (int k = 0; k < TILE; k++) {
        float x[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int own = thread_y() + i * SIDE;
            x[i] = scores[TRANSPOSED ? k * SCORE_PITCH + own : own * SCORE_PITCH + k];
        }
#pragma unroll
        for (int c = 0; c < C; c++) {
            const float y = rows[k * PITCH<D> + thread_x() + c * SIDE];
#pragma unroll
            for (int i = 0; i < EACH; i++) sum[i][c] = fmaf(x[i], y, sum[i][c]);
        }
    }
}

// Scores (=) of a tile; what a query does not see is -inf.
template <int D, class Shape>
__device__ static inline void scores_of(float (&s)[EACH][EACH], const float *tile_q, const float *tile_k,
                                        const Shape &shape, int64_t sample, int64_t query0, int64_t key0) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) s[i][j] = 0;
    rows_by_rows<D>(s, tile_q, tile_k);
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) s[i][j] *= shape.scale;
    if (tile_state<TILE, TILE>(shape, sample, query0, key0) == TILE_FULL) return;
    decltype(query_at(shape, sample, query0)) query[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) query[i] = query_at(shape, sample, query0 + thread_y() + i * SIDE);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const auto key = key_at(shape, sample, key0 + thread_x() + j * SIDE);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (!sees(shape, query[i], key)) s[i][j] = -INFINITY;
    }
}

__device__ static inline void store_scores(float *tile, const float (&p)[EACH][EACH]) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++)
            tile[(thread_y() + i * SIDE) * SCORE_PITCH + thread_x() + j * SIDE] = p[i][j];
}

// Over the eight lanes that share a row.
__device__ static inline float row_max(float x) {
    for (int lanes = SIDE / 2; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}
__device__ static inline float row_sum(float x) {
    for (int lanes = SIDE / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

// ---- turns, in which blocks add to the same sums ----

// Zero before the launch.
struct Order {
    unsigned *tickets;  // (b, kv) handed out
    unsigned *turns;    // (b, a, tiles of queries): how many blocks have added
};

// By one thread, between barriers of its block: what earlier blocks have written can be read after wait, and
// what this one has written is visible to the next after pass_on. In PTX's memory model a fence after a
// relaxed atomic that reads is an acquire pattern, and one before an atomic that writes a release pattern;
// the block's barriers extend them to all its threads. A volatile load without a fence would order nothing.
// The block before this one leaves `mine`, and no other changes it: a larger turn would be somebody else's.
__device__ static inline void wait_for_turn(unsigned *turn, unsigned mine) {
    while (atomicAdd(turn, 0u) != mine) {
    }
    __threadfence();
}
__device__ static inline void pass_on(unsigned *turn) {
    __threadfence();
    atomicAdd(turn, 1u);
}
// The same; what the turn is now.
__device__ static inline void leave_turn(unsigned *turn, unsigned now) {
    __threadfence();
    atomicExch(turn, now);
}

// ---- what the work of tiles is ----

// Tiles of rows go from memory to shared memory in packs of four words.
static inline void add_tiles(Work *w, double tiles, double d) {
    w->load_requests += tiles * d / 4;
    w->load_sectors += tiles * d * 4;
    w->shared_passes += tiles * d;
}

// What forward does for each pair of tiles: two products of 32 x 32 x d.
static inline void add_products(Work *w, double pairs, double d) {
    w->flops += pairs * (2 * 2 * TILE * TILE * d + TILE * TILE);  // and the scale
    w->flop_instructions += pairs * (2 * TILE * TILE * d + TILE * TILE) / 32;
    w->shared_passes += pairs * (16 * d + 8 * d + 256);
}

// Words of q, o, k and v.
static inline double words_of_forward(const Heads &shape, double d) {
    return 2 * (double)(shape.b * shape.s) * d * (double)(shape.a + shape.kv);
}
// Pairs of a tile of queries and one of keys: with a causal mask those on and below the diagonal; by
// tokens, where such a mask is given, those of its tiles, each 2 x 2 pairs.
static inline double pairs_of(const Heads &shape, const AttentionMask *mask = NULL) {
    constexpr double SPLIT = ATTENTION_TILE / TILE;
    if (mask) return (double)(shape.a * mask->tiles) * SPLIT * SPLIT;
    const double tiles = (double)shape.s / TILE;
    return (double)(shape.b * shape.a) * (shape.causal ? tiles * (tiles + 1) / 2 : tiles * tiles);
}

// flash_attention_1.cu; s a multiple of 32.
static inline Work work_of_flash_1(const Heads &shape, double d, const AttentionMask *mask = NULL) {
    const double s = (double)shape.s, heads = (double)(shape.b * shape.a), pairs = pairs_of(shape, mask);
    const double again = shape.causal || shape.s == TILE ? s - TILE : s;  // rows of o that are loaded again
    const double first = heads * s / TILE;
    Work w = {};
    add_products(&w, pairs, d);
    add_tiles(&w, pairs + 2 * first, d);
    w.load_requests += (pairs - first) * (d + 8);
    w.load_sectors += (pairs - first) * (4 * d + 8);
    w.store_requests = pairs * (d + 8);
    w.store_sectors = pairs * (4 * d + 8);
    w.memory_sectors = (words_of_forward(shape, d) + heads * (s + again * (d + 1))) / 8;
    w.shared_passes += pairs * 32;
    // maximum, difference and sum of scores; of each row; of o
    w.flops += pairs * (1792 + 1024 + 1792 + 256 * 8 + 96 * d);
    w.flop_instructions += pairs * (56 + 32 + 56 + 56 + 2 * d);
    w.special_instructions = pairs * (32 + 8 * 4);
    w.barriers = 2 * pairs;
    return w;
}

// flash_attention_1_backward.cu; s a multiple of 32.
static inline Work work_of_flash_1_backward(const Heads &shape, double d,
                                            const AttentionMask *mask = NULL) {
    const double s = (double)shape.s, heads = (double)(shape.b * shape.a), tiles = s / TILE;
    const double key_heads = (double)(shape.b * shape.kv), scores = TILE * TILE;
    const double pairs = pairs_of(shape, mask);
    const double first = heads * tiles, key_tiles = key_heads * tiles;
    const double again = shape.causal ? s - TILE : tiles > 1 ? s : 0;  // rows of dq that are loaded again
    Work w = {};
    add_tiles(&w, 2 * pairs + 2 * key_tiles, d);
    w.load_requests += pairs * (d / 4 + 8) + (pairs - first) * d;
    w.load_sectors += pairs * (4 * d + 8) + (pairs - first) * 4 * d;
    w.store_requests = (pairs + 2 * key_tiles) * d;
    w.store_sectors = 4 * w.store_requests;
    // q, o, dO, dq of the query heads, and k, v, dk, dv
    w.memory_sectors = (4 * heads + 4 * key_heads) * s * d / 8 + heads * (s + again * d) / 8;
    // S and dP; P and dS stored; dO of the row products; dV and dK; dQ, 64 columns at a time
    w.shared_passes += pairs * (2 * 16 * d + 2 * 32 + d + 2 * (256 + 8 * d) + 256 * d / 64 + 8 * d);
    // five products; scale, exponent, dP - delta, p, scale; row products; dq
    w.flops = pairs * (5 * 2 * scores * d + 5 * scores + 64 * d + 3 * 256 + 32 * d);
    w.flop_instructions = pairs * (5 * scores * d / 32 + 5 * scores / 32 + d + 24 + d);
    w.special_instructions = pairs * scores / 32;
    w.barriers = 3 * pairs;
    return w;
}

#endif
