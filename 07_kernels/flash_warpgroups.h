// flash_warpgroups.h: what the files of FlashAttention-3 share: the roles of a block's warpgroups, the ring
// of tiles between them, and softmax in the registers of wgmma's sums (cuda/instructions_hopper.h).
#ifndef FLASH_WARPGROUPS_H
#define FLASH_WARPGROUPS_H

#include "flash_hopper.h"

enum { GROUPS = 2, BLOCK = (GROUPS + 1) * WARPGROUP };         // the last one produces
enum { ROWS = 128, STAGES = 4 };                               // of a copy; of the ring
enum { QUERIES = ROWS, OWN = QUERIES / GROUPS, KEYS = ROWS };  // of a block, a warpgroup; of a tile

// What the roles of a block share.
struct Shared {
    char *q, *ring;
    Mbarrier *full, *empty, *turn;
};

// The tiles of keys that a block of queries sees.
__device__ static inline Walk keys_seen(const Heads &shape, int, int query0) {
    return {0, (int)end_of_keys<QUERIES>(shape, query0)};
}
__device__ static inline void step(Walk *w, const Heads &, int, int) { w->at += KEYS; }
__device__ static inline void step(TokenWalk *w, const TokenHeads &shape, int sample, int query0) {
    find_tile<KEYS>(w, (int)shape.keys.s,
                    [&](int key0) { return tile_state<QUERIES, KEYS>(shape, sample, query0, key0); });
}
__device__ static inline TokenWalk keys_seen(const TokenHeads &shape, int sample, int query0) {
    TokenWalk w = {0, 0, 0, 0, false};
    step(&w, shape, sample, query0);
    return w;
}

// ---- the producer ----

// Rows of one sample and head, in this many lines of a tile; those after the last are zeros, whatever the
// next sample has.
template <int BOXES, int LINES = ROWS>
__device__ static inline void copy_tile(char *tile, const TensorMap *map, int sample, int row, int column,
                                        Mbarrier *full) {
    mbarrier_arrive_expect(full, BOXES * LINES * TILE_ROW);
    for (int i = 0; i < BOXES; i++) tma_load(tile + i * BOX, map, sample, row, column + i * COLUMNS, full);
}

// One head's K and V in turn, for these queries, by a warp.
template <int BOXES, int LINES = ROWS, class Shape>
__device__ static inline void produce(const Shared &m, const TensorMap *k, const TensorMap *v,
                                      const Shape &shape, int sample, int query0, int column) {
    auto w = keys_seen(shape, sample, query0);
    for (int t = 0; more(w); step(&w, shape, sample, query0))
        for (const int end = t + 2; t < end; t++) {
            if (own_lane() != 0) continue;
            mbarrier_wait(&m.empty[t % STAGES], 1 - t / STAGES % 2);
            copy_tile<BOXES, LINES>(m.ring + t % STAGES * BOXES * LINES * TILE_ROW, t % 2 ? v : k, sample,
                                    w.at / KEYS * LINES, column, &m.full[t % STAGES]);
        }
}

// ---- the ring, and turns ----

// Tile t of the ring: 2 i are the keys and 2 i + 1 the values of step i.
__device__ static inline void await(const Shared &m, int t) {
    mbarrier_wait(&m.full[t % STAGES], t / STAGES % 2);
}
__device__ static inline void release(const Shared &m, int t) {
    if (own_lane() == 0) mbarrier_arrive(&m.empty[t % STAGES]);
}

// Turn i of a warpgroup; the first warpgroup's comes after the other's turn i - 1.
__device__ static inline void take_turn(const Shared &m, int i) {
    mbarrier_wait(&m.turn[own_group()], own_group() == 0 ? 1 - i % 2 : i % 2);
}
__device__ static inline void pass_turn(const Shared &m) {
    if (own_lane() == 0) mbarrier_arrive(&m.turn[1 - own_group()]);
}

// ---- softmax, in registers ----

// Of a lane's two rows: the maximum so far, as an exponent of 2; this lane's part of the sum; and keep, the
// factor that rescales earlier sums. c = scale log2(e): e^(scale S) = 2^(c S).
struct Softmax {
    float c, most[2], sum[2], keep[2];
    int query0, sample;  // of the warp
};

// What a query does not see is -inf.
__device__ static inline void mask(float (&s)[KEYS / 2], const Heads &shape, int, int query0, int key0) {
    const int first = key0 + own_lane() % 4 * 2, last = (int)shape.s - 1;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int query = query0 + half * 8 + own_lane() / 4;
        const int keys = (shape.causal ? min(query, last) : last) - first;  // beyond this lane's first
#pragma unroll
        for (int j = 0; j < KEYS / 4; j++)
            if (j / 2 * 8 + j % 2 > keys) s[j / 2 * 4 + 2 * half + j % 2] = -INFINITY;
    }
}

__device__ static inline void mask(float (&s)[KEYS / 2], const TokenHeads &shape, int sample, int query0,
                                   int key0) {
    const int query = query0 + own_lane() / 4, first = key0 + own_lane() % 4 * 2;
    const Token rows[2] = {query_at(shape, sample, query), query_at(shape, sample, query + 8)};
#pragma unroll
    for (int j = 0; j < KEYS / 4; j++) {
        const Token key = key_at(shape, sample, first + j / 2 * 8 + j % 2);
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (!sees(shape, rows[half], key)) s[j / 2 * 4 + 2 * half + j % 2] = -INFINITY;
    }
}

// s: scores (in), their exponentials (out), of which a row's largest so far is 2^TOP.
template <int TOP = 0, class Shape, class Tiles>
__device__ static inline void soften(float (&s)[KEYS / 2], Softmax *x, const Shape &shape, const Tiles &w) {
    if (needs_mask(shape, w, x->query0, w.at, KEYS)) mask(s, shape, x->sample, x->query0, w.at);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = -INFINITY;
#pragma unroll
        for (int j = 2 * half; j < KEYS / 2; j += 4) most = fmaxf(most, fmaxf(s[j], s[j + 1]));
        most = quad_max(most);
        most = fmaxf(x->most[half], TOP ? fmaf(most, x->c, -TOP) : most * x->c);
        const float shift = shift_of<Shape>(most), keep = power_of_2(x->most[half] - shift);
        x->most[half] = most, x->sum[half] *= keep, x->keep[half] = keep;
#pragma unroll
        for (int j = 2 * half; j < KEYS / 2; j += 4)
#pragma unroll
            for (int e = j; e < j + 2; e++) x->sum[half] += s[e] = power_of_2(fmaf(s[e], x->c, -shift));
    }
}

template <int D>
__device__ static inline void rescale(float (&sum)[D / 2], const Softmax &x) {
#pragma unroll
    for (int i = 0; i < D / 2; i++) sum[i] *= x.keep[i / 2 % 2];
}

// The warp's rows of o, whose sums are multiples of `unit`, and lse (=): o goes through the tile that held
// Q, so that whole chunks are stored.
template <class Shape, int D, class T>
__device__ static inline void finish(T *o, float *lse, char *tile, const float (&sum)[D / 2],
                                     const Softmax &x, float unit, int end, int64_t stride) {
    const int query0 = x.query0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int own = half * 8 + own_lane() / 4;
        const float total = quad_sum(x.sum[half]);
        const float inverse = Shape::EMPTY_ROWS && total == 0 ? 0 : unit / total;
        if (own_lane() % 4 == 0 && query0 + own < end)
            lse[query0 + own] = fmaf(x.most[half], 0.69314718f, logf(total));  // ln 2
#pragma unroll
        for (int i = half; i < D / 4; i += 2)
            *pair_of_rows(tile, i) = packed<T>(sum[2 * i] * inverse, sum[2 * i + 1] * inverse);
    }
    store_chunks<D>(o + query0 * stride, tile, end - query0, stride);
}

#endif
