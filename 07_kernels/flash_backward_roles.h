// flash_backward_roles.h: of a block of flash_attention_3_backward.cu, what its roles share, and the roles
// that wait for others: the producer, and the keeper of the turns in which blocks add to dQ.
#ifndef FLASH_BACKWARD_ROLES_H
#define FLASH_BACKWARD_ROLES_H

#include "flash_hopper.h"

enum { GROUPS = 2, OWN = 64, KEYS = GROUPS * OWN, BLOCK = (GROUPS + 1) * WARPGROUP };
enum { NUMBERS = 8192, TILE_BYTES = 2 * NUMBERS, STAGE = 2 * TILE_BYTES + 1024, STAGES = 2 };  // of Q, dO

template <int D>
constexpr int QUERIES = NUMBERS / D;
template <int D>
constexpr int QUERY_BOX = QUERIES<D> *TILE_ROW;

// What one copy or another takes; rows: lse and delta.
struct Maps {
    TensorMap q, k, v, grad_o, rows;
};

// Whether a block adds to a tile of dQ before all others, or behind them.
struct Adder {
    bool first, last;
};

// What the roles of a block share. heads: that share its keys; tiles: of queries, of a head.
struct Shared {
    char *k, *v, *stages, *ds;
    Mbarrier *full, *empty, *come, *added;
    Adder *adder;
    int block, sample, heads, tiles;
};

// ---- steps: the tiles of queries that see a block's keys ----

template <int D>
__device__ static inline Walk queries_seen(const Shared &m, const Heads &shape) {
    return {(int)first_queries<QUERIES<D>, KEYS>(shape, m.sample, m.block * KEYS), (int)shape.s};
}
template <int D>
__device__ static inline void step(Walk *w, const Shared &, const Heads &) {
    w->at += QUERIES<D>;
}
template <int D>
__device__ static inline void step(TokenWalk *w, const Shared &m, const TokenHeads &shape) {
    find_tile<QUERIES<D>>(w, (int)shape.s, [&](int query0) {
        return tile_state<QUERIES<D>, KEYS>(shape, m.sample, query0, m.block * KEYS);
    });
}
template <int D>
__device__ static inline TokenWalk queries_seen(const Shared &m, const TokenHeads &shape) {
    TokenWalk w = {0, 0, 0, 0, false};
    step<D>(&w, m, shape);
    return w;
}

// Of all heads that share the keys, one head after another.
template <class Tiles>
struct Steps {
    int head, last_head;
    Tiles tiles;
};
template <class Tiles>
__device__ static inline bool more(const Steps<Tiles> &w) {
    return w.head < w.last_head;
}
template <int D, class Shape>
__device__ static inline auto steps_of(const Shared &m, const Shape &shape) {
    const auto tiles = queries_seen<D>(m, shape);
    const int head = (int)blockIdx.y * m.heads;
    return Steps<decltype(queries_seen<D>(m, shape))>{head, more(tiles) ? head + m.heads : head, tiles};
}
template <int D, class Tiles, class Shape>
__device__ static inline void step(Steps<Tiles> *w, const Shared &m, const Shape &shape) {
    step<D>(&w->tiles, m, shape);
    if (!more(w->tiles)) w->tiles = queries_seen<D>(m, shape), w->head++;
}

// The place of a tile among those of all heads and samples.
template <int D, class Tiles>
__device__ static inline int64_t number(const Shared &m, const Steps<Tiles> &w) {
    return (int64_t)(m.sample * (int)gridDim.y * m.heads + w.head) * m.tiles + w.tiles.at / QUERIES<D>;
}

// ---- the producer, a warp of which one lane copies ----

template <int D>
__device__ static inline void copy_keys(const Shared &m, const Maps &maps, int column, Mbarrier *full) {
    const int row = m.block * KEYS;
    mbarrier_arrive_expect(full, 2 * D / COLUMNS * BOX);
    for (int c = 0; c < D / COLUMNS; c++) {
        tma_load(m.k + c * BOX, &maps.k, m.sample, row, column + c * COLUMNS, full);
        tma_load(m.v + c * BOX, &maps.v, m.sample, row, column + c * COLUMNS, full);
    }
}

// Rows after the sample's last query are zeros, whatever the next sample has, and have no weight.
template <int D, class Shape>
__device__ static inline void produce(const Shared &m, const Maps &maps, const Shape &shape) {
    constexpr int LINES = QUERIES<D> * 8 / TILE_ROW;  // of lse and delta, as rows of a box
    auto w = steps_of<D>(m, shape);
    for (int i = 0; more(w); i++, step<D>(&w, m, shape)) {
        if (own_lane() != 0) continue;
        char *stage = m.stages + i % STAGES * STAGE;
        Mbarrier *full = &m.full[i % STAGES];
        const int row = w.tiles.at, column = w.head * D;
        mbarrier_wait(&m.empty[i % STAGES], 1 - i / STAGES % 2);
        mbarrier_arrive_expect(full, 2 * TILE_BYTES + LINES * TILE_ROW);
        for (int c = 0; c < D / COLUMNS; c++) {
            tma_load(stage + c * QUERY_BOX<D>, &maps.q, m.sample, row, column + c * COLUMNS, full);
            tma_load(stage + TILE_BYTES + c * QUERY_BOX<D>, &maps.grad_o, m.sample, row,
                     column + c * COLUMNS, full);
        }
        tma_load(stage + 2 * TILE_BYTES, &maps.rows, (int)number<D>(m, w) * LINES, 0, full);
    }
}

// ---- the turn keeper ----

// By order, all blocks up to the first add to a tile; by tokens those that its queries see, of which the
// turn keeper tells the consumers.
template <int D>
__device__ static inline Adder adder_of(const Shared &m, const Heads &shape, int query0) {
    return {turn_before<QUERIES<D>, KEYS>(shape, m.sample, query0, (unsigned)m.block, gridDim.x) == 0,
            m.block == 0};
}
template <int D>
__device__ static inline Adder adder_of(const Shared &m, const TokenHeads &, int) {
    return *m.adder;
}

// The turn that a block waits for (turn_before), and whether it is the last.
struct Turn {
    unsigned before;
    bool last;
};
template <int D>
__device__ static inline Turn turn_of(const Shared &m, const Heads &shape, int query0) {
    return {turn_before<QUERIES<D>, KEYS>(shape, m.sample, query0, (unsigned)m.block, gridDim.x),
            m.block == 0};
}
template <int D>
__device__ static inline Turn turn_of(const Shared &m, const TokenHeads &shape, int query0) {
    Turn turn = {0, true};
    for (int block0 = 0; block0 < (int)gridDim.x && !turn.before; block0 += 32) {
        const TileState own =
            tile_state<QUERIES<D>, KEYS>(shape, m.sample, query0, (block0 + own_lane()) * KEYS);
        const unsigned seen = __ballot_sync(~0u, own != TILE_EMPTY);
        const unsigned behind = __ballot_sync(~0u, own != TILE_EMPTY && block0 + own_lane() > m.block);
        if (seen && block0 + __ffs((int)seen) - 1 < m.block) turn.last = false;
        if (behind) turn.before = gridDim.x - (unsigned)(block0 + __ffs((int)behind) - 1);
    }
    return turn;
}

// A warp, of which one lane waits. A turn is left with a number that grows with each block.
template <int D, class Shape>
__device__ static inline void keep_turns(const Shared &m, unsigned *turns, const Shape &shape) {
    auto w = steps_of<D>(m, shape);
    for (int i = 0; more(w); i++, step<D>(&w, m, shape)) {
        const Turn own = turn_of<D>(m, shape, w.tiles.at);
        if (own_lane() != 0) continue;
        unsigned *turn = &turns[number<D>(m, w)];
        wait_for_turn(turn, own.before);
        if (Shape::EMPTY_ROWS) *m.adder = {own.before == 0, own.last};
        mbarrier_arrive(m.come);
        mbarrier_wait(m.added, i % 2);
        leave_turn(turn, gridDim.x - (unsigned)m.block);
    }
}

#endif
