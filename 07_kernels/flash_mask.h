// flash_mask.h: which keys a query sees, as a type that the kernels of FlashAttention take for a parameter.
//
//     Heads        by order     every query sees every key, or the keys up to its own place: closed forms
//     TokenHeads   by tokens    keys of its own document, at its own position and before; queries and keys
//                               are different tokens, in any order and number (tensor/attention_mask.h)
//
// A kernel asks both types the same questions: first about a tile of queries and keys, then, where it must,
// about single tokens. TokenHeads has the least and greatest position and document (the bounds) of each 64
// tokens: a tile of 128 uses two such bounds, and two tiles of 32 share one:
//
//     keys ->
//     / . . .      o FULL:     no entry is masked
//     o / . .      / PARTIAL:  each entry is masked by sees(shape, query, key)
//     o o / .      . EMPTY:    first_keys, next_keys and first_queries, next_queries leave it out, so that
//     o o o /                  nothing of it is read
//
//     for (int64_t key0 = first_keys<QUERIES, KEYS>(shape, sample, query0);
//          key0 < end_of_keys<QUERIES>(shape, query0);
//          key0 = next_keys<QUERIES, KEYS>(shape, sample, query0, key0))
//
// These four are for whole warps: each lane looks at a tile, 32 of them at a time.
//
// By tokens a query may see no key at all: its row of o is 0, lse is -inf, and it has no part in gradients.
// NaN in an empty tile reaches nobody; in a partial one it does, since 0 times NaN is NaN.
#ifndef FLASH_MASK_H
#define FLASH_MASK_H

#include "launch.h"
#include "tensor/kernels.h"

// q, o (b, s, a, d); k, v (b, s, kv, d), of which query head h reads h / (a / kv); lse (b, a, s).
struct Heads {
    int64_t b, s, a, kv;
    float scale;
    int causal;
    static constexpr bool EMPTY_ROWS = false;  // whether a query may see no key
};
// The same, but for k and v (b, keys.s, kv, d). s is queries.s; causal means nothing.
struct TokenHeads : Heads {
    ChunkTokens queries, keys;
    static constexpr bool EMPTY_ROWS = true;
};

// ---- by order ----

__host__ __device__ static inline int64_t keys_of(const Heads &shape) { return shape.s; }

// What sees() needs to know about a query or a key of a sample: its place.
__device__ static inline int64_t query_at(const Heads &, int64_t, int64_t query) { return query; }
__device__ static inline int64_t key_at(const Heads &, int64_t, int64_t key) { return key; }
__device__ static inline bool sees(const Heads &shape, int64_t query, int64_t key) {
    return key < shape.s && (!shape.causal || key <= query);
}

// Of queries from query0 on, and keys from key0 on.
template <int QUERIES, int KEYS, class Int>
__device__ static inline TileState tile_state(const Heads &shape, int64_t, Int query0, Int key0) {
    if (shape.causal && key0 >= query0 + QUERIES) return TILE_EMPTY;
    return sees(shape, query0, key0 + KEYS - 1) ? TILE_FULL : TILE_PARTIAL;
}

// The tiles of keys that these queries see ...
template <int QUERIES, int KEYS>
__device__ static inline int64_t first_keys(const Heads &, int64_t, int64_t) {
    return 0;
}
template <int QUERIES, int KEYS>
__device__ static inline int64_t next_keys(const Heads &, int64_t, int64_t, int64_t key0) {
    return key0 + KEYS;
}
template <int QUERIES>
__device__ static inline int64_t end_of_keys(const Heads &shape, int64_t query0) {
    return shape.causal ? min(query0 + QUERIES, shape.s) : shape.s;
}
// ... and the tiles of queries, up to shape.s, that see these keys.
template <int QUERIES, int KEYS>
__device__ static inline int64_t first_queries(const Heads &shape, int64_t, int64_t key0) {
    return !shape.causal ? 0 : KEYS % QUERIES == 0 ? key0 : key0 / QUERIES * QUERIES;
}
template <int QUERIES, int KEYS>
__device__ static inline int64_t next_queries(const Heads &, int64_t, int64_t query0, int64_t) {
    return query0 + QUERIES;
}

// Blocks of KEYS keys each add to the same tile of queries, the last keys first. Returns the turn that
// `block` waits for (wait_for_turn, flash_tiles.h): the value that the block before it sets, blocks - its
// number; for the first block 0, the initial value.
template <int QUERIES, int KEYS>
__device__ static inline unsigned turn_before(const Heads &shape, int64_t, int64_t query0, unsigned block,
                                              unsigned blocks) {
    const unsigned last =
        shape.causal ? (unsigned)((query0 + (QUERIES > KEYS ? QUERIES - 1 : 0)) / KEYS) : blocks - 1;
    return block == last ? 0 : blocks - block - 1;
}

// ---- by tokens ----

__host__ __device__ static inline int64_t keys_of(const TokenHeads &shape) { return shape.keys.s; }

struct Token {
    int32_t position, document;
};
// Documents count from 0. A token beyond the end has a negative one, which differs between queries and keys,
// so that it sees none.
__device__ static inline Token token_at(const ChunkTokens &side, int64_t sample, int64_t i, int32_t none) {
    if (i >= side.s) return {0, none};
    return {side.positions[sample * side.s + i], side.documents[sample * side.s + i]};
}
__device__ static inline Token query_at(const TokenHeads &shape, int64_t sample, int64_t query) {
    return token_at(shape.queries, sample, query, -1);
}
__device__ static inline Token key_at(const TokenHeads &shape, int64_t sample, int64_t key) {
    return token_at(shape.keys, sample, key, -2);
}
__device__ static inline bool sees(const TokenHeads &, Token query, Token key) {
    return key.position <= query.position && key.document == query.document;
}

// In one pack: arrays in device memory are aligned.
__device__ static inline TileBounds load_bounds(const TileBounds *at) {
    const int4 x = *reinterpret_cast<const int4 *>(at);
    return {x.x, x.y, x.z, x.w};
}

// As attention_tile (tensor/attention_mask.h).
__device__ static inline TileState state_of(const TileBounds &q, const TileBounds &k) {
    if (q.last_position < k.first_position || q.last_document < k.first_document ||
        k.last_document < q.first_document)
        return TILE_EMPTY;
    const bool one_document = q.first_document == q.last_document && k.first_document == k.last_document;
    return one_document && q.first_position >= k.last_position ? TILE_FULL : TILE_PARTIAL;
}

// Tiles with rows beyond the last key are never full. For 128 tokens both tiles of 64 are tested: they may
// be far apart, as the two chunks of zig-zag are, and see nothing that lies between them.
template <int QUERIES, int KEYS, class Int>
__device__ static inline TileState tile_state(const TokenHeads &shape, int64_t sample, Int query0,
                                              Int key0) {
    static_assert(ATTENTION_TILE % QUERIES == 0 || QUERIES % ATTENTION_TILE == 0, "tiles, or parts of one");
    static_assert(ATTENTION_TILE % KEYS == 0 || KEYS % ATTENTION_TILE == 0, "tiles, or parts of one");
    const TileBounds *q = shape.queries.bounds + sample * shape.queries.tiles;
    const TileBounds *k = shape.keys.bounds + sample * shape.keys.tiles;
    bool empty = true, full = key0 + KEYS <= shape.keys.s;
#pragma unroll 1  // no registers for several bounds
    for (Int i = query0; i < query0 + QUERIES && i < shape.queries.s; i += ATTENTION_TILE)
#pragma unroll 1
        for (Int j = key0; j < key0 + KEYS && j < shape.keys.s; j += ATTENTION_TILE) {
            const TileState state = state_of(load_bounds(&q[i / ATTENTION_TILE]),
                                             load_bounds(&k[j / ATTENTION_TILE]));
            empty = empty && state == TILE_EMPTY, full = full && state == TILE_FULL;
        }
    return empty ? TILE_EMPTY : full ? TILE_FULL : TILE_PARTIAL;
}

// The first of from, from + STEP ... below `end` for which `filled` is true; if there is none, a value
// that is not below `end`.
template <int STEP, class Filled>
__device__ static inline int64_t first_filled(int64_t from, int64_t end, Filled filled) {
    const int lane = (int)(threadIdx.x % 32);
    for (; from < end; from += 32 * STEP) {
        const int64_t place = from + lane * STEP;
        const unsigned lanes = __ballot_sync(~0u, place < end && filled(place));
        if (lanes) return from + (__ffs((int)lanes) - 1) * STEP;
    }
    return from;
}

template <int QUERIES, int KEYS>
__device__ static inline int64_t keys_from(const TokenHeads &shape, int64_t sample, int64_t query0,
                                           int64_t from) {
    return first_filled<KEYS>(from, shape.keys.s, [&](int64_t key0) {
        return tile_state<QUERIES, KEYS>(shape, sample, query0, key0) != TILE_EMPTY;
    });
}
template <int QUERIES, int KEYS>
__device__ static inline int64_t first_keys(const TokenHeads &shape, int64_t sample, int64_t query0) {
    return keys_from<QUERIES, KEYS>(shape, sample, query0, 0);
}
template <int QUERIES, int KEYS>
__device__ static inline int64_t next_keys(const TokenHeads &shape, int64_t sample, int64_t query0,
                                           int64_t key0) {
    return keys_from<QUERIES, KEYS>(shape, sample, query0, key0 + KEYS);
}
template <int QUERIES>
__device__ static inline int64_t end_of_keys(const TokenHeads &shape, int64_t) {
    return shape.keys.s;
}

template <int QUERIES, int KEYS>
__device__ static inline int64_t queries_from(const TokenHeads &shape, int64_t sample, int64_t from,
                                              int64_t key0) {
    return first_filled<QUERIES>(from, shape.queries.s, [&](int64_t query0) {
        return tile_state<QUERIES, KEYS>(shape, sample, query0, key0) != TILE_EMPTY;
    });
}
template <int QUERIES, int KEYS>
__device__ static inline int64_t first_queries(const TokenHeads &shape, int64_t sample, int64_t key0) {
    return queries_from<QUERIES, KEYS>(shape, sample, 0, key0);
}
template <int QUERIES, int KEYS>
__device__ static inline int64_t next_queries(const TokenHeads &shape, int64_t sample, int64_t query0,
                                              int64_t key0) {
    return queries_from<QUERIES, KEYS>(shape, sample, query0 + QUERIES, key0);
}

// The block before it is the nearest later one that these queries see. By a whole warp.
template <int QUERIES, int KEYS>
__device__ static inline unsigned turn_before(const TokenHeads &shape, int64_t sample, int64_t query0,
                                              unsigned block, unsigned blocks) {
    const int64_t before = next_keys<QUERIES, KEYS>(shape, sample, query0, (int64_t)block * KEYS);
    return before < shape.keys.s ? blocks - (unsigned)(before / KEYS) : 0;
}

// ---- of rows ----

// What is subtracted from a row's scores: their maximum so far, or anything finite if there is none yet.
template <class Shape>
__device__ static inline float shift_of(float most) {
    return Shape::EMPTY_ROWS && most == -INFINITY ? 0 : most;
}
// 1 / the sum of a row's exponentials; a row without a key stays 0.
template <class Shape>
__device__ static inline float inverse_of(float sum) {
    return 1 / (Shape::EMPTY_ROWS && sum == 0 ? INFINITY : sum);
}
// What backward subtracts from a row's scores: lse or, if there is none, a value that gives no weight.
template <class Shape>
__device__ static inline float log_sum_of(float lse) {
    return Shape::EMPTY_ROWS && lse == -INFINITY ? INFINITY : lse;
}

#endif
