// flash_attention_2_backward.cu: the gradients of attention with many blocks per head, and sums in a fixed
// order. Playbook: "Flash Attention 1-3"; Dao, "FlashAttention-2", 2023, Algorithm 2.
//
// The first version gives all tiles of a head to one block, since dQ is a sum over keys while dK and dV are
// sums over queries. Here each block has two tiles of keys and loops over the queries, so dQ is a sum over
// blocks. The paper adds with atomics, in any order; here blocks take turns at each tile of dQ, and add to
// it in a fixed order, the last keys first:
//
//                   queries ->               time ->
//     block 2  K V  . . . . ■ ■ ■ ■     block 2  4 5 6 7           the tile of dQ that it adds to
//     block 1  K V  . . ■ ■ ■ ■ ■ ■     block 1  2 3 4 5 6 7       to each after block 2 has
//     block 0  K V  ■ ■ ■ ■ ■ ■ ■ ■     block 0  0 1 2 3 4 5 6 7   to each after block 1 has
//
// With a causal mask no block waits: it begins at the diagonal, and is done with a tile by the time the next
// block reaches it. Without a mask each block is one tile behind the one before it.
//
// A block draws a ticket when it starts, which determines its keys, and waits only for lower tickets, whose
// blocks are already running. Under a mask by position and document, the block before it is the nearest with
// later keys that sees the tile of queries (turn_before, flash_mask.h).
//
//     for each pair of tiles       first version                second
//     words between L2 and block   160 d: Q, dO, O, dQ, dQ      64 d: the same but O, for two tiles of keys
//     rowsum(dO O)                 64 d FLOPs                   once for each row, by a kernel of its own
//     scale                        of S and dS                  of S; of dQ and dK where they are stored
//
// The exponentials and the five products are unchanged. Extra memory: delta, a word for each row and head; a
// turn for each tile of queries and head; a ticket counter for each K/V head.
//
// Proof: dQ, dK, dV within 4 times the error of the same steps in f32 on the CPU, each against f64, on odd
// lengths, with and without a mask, for shared K/V heads and for scores of large magnitude; the same bits
// when blocks run in another order; all of this also under masks by position and document.
// Run: build/07_kernels/flash_attention_2_backward           (--gpu a100, --head-size 64, --verbose)
// Last line: PASS flash_attention_2_backward: 0.41 of the first version's traffic to L2 …
#include "flash_tiles.h"

enum { TILES = 2, BLOCK = TILES * THREADS, KEYS = TILES * TILE };

// Block (tile of queries, head, sample), eight lanes a row: delta (b, a, s) = rowsum(dO O).
template <int D>
__global__ void __launch_bounds__(TILE *SIDE)
    row_products(float *delta, const float *o, const float *grad_o, Heads shape) {
    const int64_t row = blockIdx.x * TILE + threadIdx.x / SIDE;
    const int64_t from = ((blockIdx.z * shape.s + row) * shape.a + blockIdx.y) * D;
    float sum = 0;
    for (int column = thread_x() * 4; column < D && row < shape.s; column += SIDE * 4) {
        const float4 x = *reinterpret_cast<const float4 *>(o + from + column);
        const float4 y = *reinterpret_cast<const float4 *>(grad_o + from + column);
        sum = fmaf(x.x, y.x, sum), sum = fmaf(x.y, y.y, sum);
        sum = fmaf(x.z, y.z, sum), sum = fmaf(x.w, y.w, sum);
    }
    sum = row_sum(sum);
    if (row < shape.s && thread_x() == 0) delta[(blockIdx.z * shape.a + blockIdx.y) * shape.s + row] = sum;
}

// p: scores (in), P (out); ds: dP (in), dS without its scale (out). lse, delta: of one head.
template <class Shape>
__device__ static inline void to_gradients(float (&p)[EACH][EACH], float (&ds)[EACH][EACH],
                                           const float *lse, const float *delta, int64_t row0,
                                           int64_t end) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int64_t row = row0 + thread_y() + i * SIDE;
        const float sum = row < end ? log_sum_of<Shape>(lse[row]) : INFINITY;  // no weight beyond the end
        const float dot = row < end ? delta[row] : 0;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            p[i][j] = expf(p[i][j] - sum);
            ds[i][j] = p[i][j] * (ds[i][j] - dot);
        }
    }
}

// dq (= by the first block, += by others) scale dS K over this many tiles of keys, by all threads of the
// block: each pair of warps has half of the columns.
template <int D>
__device__ static inline void add_dq(float *dq, const float *tile_ds, const float *tile_k, int tiles,
                                     float scale, bool first, int64_t row0, int64_t end, int64_t stride) {
    constexpr int C = D / TILES / SIDE;
    const int part = threadIdx.x / THREADS * (D / TILES);
    float sum[EACH][C] = {};
#pragma unroll 1
    for (int t = 0; t < tiles; t++)
        scores_by_rows<D>(sum, tile_ds + t * TILE * SCORE_PITCH, tile_k + t * TILE * PITCH<D> + part);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int64_t row = row0 + thread_y() + i * SIDE;
        if (row >= end) continue;
#pragma unroll
        for (int c = 0; c < C; c++) {
            float *out = &dq[row * stride + part + thread_x() + c * SIDE];
            *out = fmaf(scale, sum[i][c], first ? 0 : *out);
        }
    }
}

// Block (tiles of keys, K/V head, sample); a ticket says which tiles of keys. Each pair of warps has a tile
// of keys with its dK and dV; Q and dO serve both.
template <int D, class Shape>
__global__ void __launch_bounds__(BLOCK, 1)
    attention_backward(Gradients grad, Operands in, const float *delta, Order order, Shape shape) {
    DYNAMIC_SHARED(float, tiles_k);
    float *tiles_v = tiles_k + TILES * TILE * PITCH<D>, *tile_q = tiles_v + TILES * TILE * PITCH<D>;
    float *tile_do = tile_q + TILE * PITCH<D>, *tiles_ds = tile_do + TILE * PITCH<D>;
    const int own = threadIdx.x / THREADS;
    float *tile_ds = tiles_ds + own * TILE * SCORE_PITCH, *tile_p = tile_ds + TILES * TILE * SCORE_PITCH;
    const float *tile_k = tiles_k + own * TILE * PITCH<D>, *tile_v = tiles_v + own * TILE * PITCH<D>;
    __shared__ unsigned ticket;
    if (threadIdx.x == 0) ticket = atomicAdd(&order.tickets[blockIdx.z * shape.kv + blockIdx.y], 1u);
    __syncthreads();
    const unsigned block = gridDim.x - 1 - ticket;  // the last keys first
    const int64_t end = shape.s, keys = keys_of(shape), group = shape.a / shape.kv, sample = blockIdx.z;
    const int64_t stride = shape.a * D, key_stride = shape.kv * D;
    const int64_t key_head = sample * keys * key_stride + blockIdx.y * D;
    const int64_t first_key = (int64_t)block * KEYS, key0 = first_key + own * TILE;
    for (int t = 0; t < TILES; t++) {
        load_rows<D, BLOCK>(tiles_k + t * TILE * PITCH<D>, in.k + key_head, first_key + t * TILE, keys,
                            key_stride);
        load_rows<D, BLOCK>(tiles_v + t * TILE * PITCH<D>, in.v + key_head, first_key + t * TILE, keys,
                            key_stride);
    }
    float dk[EACH][D / SIDE] = {}, dv[EACH][D / SIDE] = {};
    for (int64_t head = blockIdx.y * group; head < (blockIdx.y + 1) * group; head++) {
        const int64_t base = sample * end * stride + head * D, row = (sample * shape.a + head) * end;
        unsigned *turns = order.turns + (sample * shape.a + head) * ((end + TILE - 1) / TILE);
        for (int64_t query0 = first_queries<TILE, KEYS>(shape, sample, first_key); query0 < end;
             query0 = next_queries<TILE, KEYS>(shape, sample, query0, first_key)) {
            const bool seen = tile_state<TILE, TILE>(shape, sample, query0, key0) != TILE_EMPTY;
            load_rows<D, BLOCK>(tile_q, in.q + base, query0, end, stride);
            load_rows<D, BLOCK>(tile_do, in.grad_o + base, query0, end, stride);
            __syncthreads();  // the tiles are complete
            if (seen) {
                float p[EACH][EACH], ds[EACH][EACH] = {};
                scores_of<D>(p, tile_q, tile_k, shape, sample, query0, key0);
                rows_by_rows<D>(ds, tile_do, tile_v);
                to_gradients<Shape>(p, ds, in.lse + row, delta + row, query0, end);
                store_scores(tile_p, p);
                store_scores(tile_ds, ds);
            }
            __syncthreads();  // the columns of P and dS are complete
            if (seen) {
                scores_by_rows<D, true>(dv, tile_p, tile_do);
                scores_by_rows<D, true>(dk, tile_ds, tile_q);
            }
            const unsigned before = turn_before<TILE, KEYS>(shape, sample, query0, block, gridDim.x);
            if (threadIdx.x == 0) wait_for_turn(&turns[query0 / TILE], before);
            __syncthreads();  // it is this block's turn
            // those of the first tile alone, where no query sees the second
            const bool both = tile_state<TILE, TILE>(shape, sample, query0, first_key + TILE) != TILE_EMPTY;
            add_dq<D>(grad.dq + base, tiles_ds, tiles_k, both ? TILES : 1, shape.scale, before == 0, query0,
                      end, stride);
            __syncthreads();  // all threads have read the tiles, and added
            if (threadIdx.x == 0) leave_turn(&turns[query0 / TILE], gridDim.x - block);
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int c = 0; c < D / SIDE; c++) dk[i][c] *= shape.scale;
    store_rows<D>(grad.dk + key_head, dk, key0, keys, key_stride);
    store_rows<D>(grad.dv + key_head, dv, key0, keys, key_stride);
}

// ---- host code ----

// The gradients from delta; counters: b (a tiles + kv) words of scratch.
template <int D, class Shape>
static void launch_on(cudaStream_t stream, const Gradients &grad, const Operands &in, const float *delta,
                      float *counters, const Shape &shape) {
    const auto kernel = attention_backward<D, Shape>;
    const int64_t tiles = (shape.s + TILE - 1) / TILE, bytes = tile_bytes(D, 2 * TILES + 2, 2 * TILES);
    unsigned *turns = reinterpret_cast<unsigned *>(counters);
    const Order order = {turns + shape.b * shape.a * tiles, turns};
    const size_t count = (size_t)(shape.b * (shape.a * tiles + shape.kv));
    CUDA_CHECK(cudaMemsetAsync(turns, 0, count * sizeof *turns, stream));
    if (Shape::EMPTY_ROWS)  // no block reaches tiles of queries that see no key
        CUDA_CHECK(cudaMemsetAsync(grad.dq, 0, (size_t)(shape.b * shape.s * shape.a * D) * 4, stream));
    allow_shared(kernel, bytes);
    const dim3 grid((unsigned)((keys_of(shape) + KEYS - 1) / KEYS), (unsigned)shape.kv, (unsigned)shape.b);
    LAUNCH(kernel, grid, BLOCK, (size_t)bytes, stream, grad, in, delta, order, shape);
}

#ifndef NO_MAIN
#include "attention_masks.h"

// room: backward_room(shape) words.
template <int D, class Shape>
static void launch(const Gradients &grad, const Operands &in, float *room, const Shape &shape) {
    if (shape.s == 0) return;
    const dim3 grid((unsigned)((shape.s + TILE - 1) / TILE), (unsigned)shape.a, (unsigned)shape.b);
    LAUNCH(row_products<D>, grid, TILE * SIDE, 0, 0, room, in.o, in.grad_o, (const Heads &)shape);
    launch_on<D>(0, grad, in, room, room + shape.b * shape.a * shape.s, shape);
}

// s a multiple of 64. mask: by tokens, where it is given.
static Work formula(const Heads &shape, double d, const AttentionMask *mask) {
    const double s = (double)shape.s, heads = (double)(shape.b * shape.a), scores = TILE * TILE;
    const double key_heads = (double)(shape.b * shape.kv), blocks = s / KEYS, tiles = s / TILE;
    // tiles of queries that pass the blocks of a head's keys; and those that pass the first of them
    const double steps = TILES * (mask           ? (double)(shape.a * mask->tiles)
                                  : shape.causal ? heads * blocks * (blocks + 1) / 2
                                                 : heads * blocks * blocks);
    const double pairs = pairs_of(shape, mask);
    const double first = heads * tiles, key_tiles = key_heads * tiles, all_blocks = key_heads * blocks;
    const double again = shape.causal ? s - KEYS : blocks > 1 ? s : 0;  // rows of dq that are loaded again
    Work w = {};
    add_tiles(&w, 2 * steps + 2 * key_tiles, d);
    // lse and delta; dq; dO and O of the row products
    w.load_requests += pairs * 16 + (steps - first) * d + first * d / 2;
    w.load_sectors += pairs * 16 + (steps - first) * 4 * d + first * 8 * d;
    // dq; turns, asked and passed on; dk and dv; tickets; delta
    w.store_requests = steps * (d + 2) + 2 * key_tiles * d + all_blocks + first * 8;
    w.store_sectors = steps * (4 * d + 2) + 8 * key_tiles * d + all_blocks + first * 8;
    // q, dO, dq, k, v, dk, dv and, before, dO and O; lse, delta twice; the counters
    w.memory_sectors = (5 * heads + 4 * key_heads) * s * d / 8 + heads * (3 * s + again * d) / 8 +
                       ceil((first + key_heads) / 8);
    // S and dP; P and dS stored; dV and dK; dQ, half of the columns at a time; the ticket
    w.shared_passes +=
        pairs * (2 * 16 * d + 2 * 32 + 2 * (256 + 8 * d) + 512 + 8 * d) + all_blocks * (1 + BLOCK / 32);
    // five products; scale, exponent, dP - delta, p; dq; dk; row products
    w.flops = pairs * (5 * 2 * scores * d + 4 * scores) + steps * 64 * d + key_tiles * 32 * d +
              first * (64 * d + 768);
    w.flop_instructions =
        pairs * (5 * scores * d + 4 * scores) / 32 + steps * d + key_tiles * d + first * (d + 24);
    w.special_instructions = pairs * scores / 32;
    w.barriers = 4 * steps + all_blocks;
    return w;
}

template <int D>
static void row(const char *name, const Heads &at_size) {
    const int64_t bytes = tile_bytes(D, 2 * TILES + 2, 2 * TILES);
    const KernelVersion version = {name, BLOCK, D == 64 ? 202 : 254, bytes};
    backward_version(version, at_size, D, KEYS, launch<D, Heads>,
                     [](const Heads &shape, double d) { return formula(shape, d, NULL); });
}

template <int D>
static void show(const KernelsOptions *options, const Heads &shape) {
    flash_tables(options, shape, D, 2,
                 [](const Heads &shape) { row<D>(shape.causal ? "flash 2, causal" : "flash 2", shape); });
    show_masked_backward(
        shape, D, KEYS, D == 64 ? 210 : 255, launch<D, TokenHeads>,
        [](const Heads &shape, const AttentionMask &mask) { return formula(shape, D, &mask); });
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int head;
    const Heads shape = flash_options(argc, argv,
                                      "FlashAttention-2, backward: many blocks a head, sums in order.\n"
                                      "  flash_attention_2_backward --head-size 64",
                                      KEYS, &options, &head);
    const double d = head, s = (double)shape.s, scores = (double)shape.a * s * s;
    if (head == 128) show<128>(&options, shape);
    else show<64>(&options, shape);
    const Work works[] = {work_of_flash_1_backward(shape, d), formula(shape, d, NULL)};
    say("%-8s  %9s  %12s  %11s  %19s  %9s", "", "L2 moves", "memory moves", "exp / score",
        "other FLOPs / score", "blocks");
    for (int i = 0; i < 2; i++)
        say("flash %d   %9s  %12s  %11.2f  %19.2f  %9lld", i + 1,
            bytes_text(32 * (works[i].load_sectors + works[i].store_sectors)),
            bytes_text(32 * works[i].memory_sectors), 32 * works[i].special_instructions / scores,
            works[i].flops / scores - 10 * d, (long long)(shape.kv * (i ? shape.s / KEYS : 1)));
    const double traffic[] = {works[0].load_sectors + works[0].store_sectors,
                              works[1].load_sectors + works[1].store_sectors};
    const double other[] = {works[0].flops / scores - 10 * d, works[1].flops / scores - 10 * d};
    return report_verdict("%.2f of the first version's traffic to L2 and %.2f of its other FLOPs",
                          traffic[1] / traffic[0], other[1] / other[0]);
}
#endif
