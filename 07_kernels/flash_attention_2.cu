// flash_attention_2.cu: the forward pass of flash_attention_1.cu with its two loops exchanged. Playbook:
// "Flash Attention 1-3"; Dao, "FlashAttention-2", 2023, Algorithm 1.
//
// In the first version a block holds a tile of keys and loops over queries: O is normalised and stored after
// each tile of keys, and loaded again for the next. Here a block holds tiles of queries and loops over keys:
//
//     queries  keys ->            m' = max(m, S)          l = e^(m - m') l + sum(e^(S - m'))
//     Q        K V   ■ . . .      O  = e^(m - m') O + e^(S - m') V
//     Q        K V   ■ ■ . .
//     Q        K V   ■ ■ ■ .      and once, at the end:   O = O / l       lse = m + log(l)
//     Q        K V   ■ ■ ■ ■
//
//     for each pair of tiles       first version              second
//     words between L2 and block   32 (3 d + 2): Q, O, O      32 d: K and V, for two tiles of queries
//     special functions, by each   4: exp, exp, 1 / x, log    1: exp
//     of the 8 lanes of a row
//     FLOPs on O                   3 x 32 d                   32 d
//
// O, m and l stay in registers; each lane sums its own part of l, and lanes combine them once, at the end.
// Warps split a block's queries and share its K and V. Tiles of queries are independent: b a s / 64 blocks
// in place of b a, which leave most of a GPU idle (the model does not see that: it spreads any work evenly).
// Blocks with the most keys start first. Keys that a mask hides from all of a block's queries are not read,
// wherever they lie (flash_mask.h).
//
// Proof: O and lse within 4 times the error of the same steps in f32 on the CPU, each against f64, on odd
// lengths, with and without a mask, for shared K/V heads and for scores of large magnitude; the same under
// masks by position and document (attention_masks.h).
// Run: build/07_kernels/flash_attention_2           (--gpu a100, --head-size 64, --size 4096, --verbose)
// Last line: PASS flash_attention_2: 0.33 of the first version's traffic to L2 …
#include "flash_tiles.h"

enum { TILES = 2, BLOCK = TILES * THREADS, QUERIES = TILES * TILE };

// A row's maximum so far, and this lane's part of its sum.
struct RunningRow {
    float most, sum;
};

// p: scores (in), and their exponentials (out). Returns the weight of the sums so far in the new ones.
template <class Shape>
__device__ static inline float update_row(float (&p)[EACH], RunningRow *row) {
    float most = row->most;
#pragma unroll
    for (int j = 0; j < EACH; j++) most = fmaxf(most, p[j]);
    most = row_max(most);
    const float shift = shift_of<Shape>(most), keep = expf(row->most - shift);
#pragma unroll
    for (int j = 0; j < EACH; j++) p[j] = expf(p[j] - shift);
    row->sum = fmaf(row->sum, keep, p[0]);
#pragma unroll
    for (int j = 1; j < EACH; j++) row->sum += p[j];
    row->most = most;
    return keep;
}

// Block (tiles of queries, head, sample). Each pair of warps has a tile of queries, with o, p and a part of
// tile_p of its own; K and V serve them all.
template <int D, class Shape>
__global__ void __launch_bounds__(BLOCK)
    attention(float *o, float *lse, const float *q, const float *k, const float *v, Shape shape) {
    DYNAMIC_SHARED(float, tile_q);
    float *tile_k = tile_q + TILES * TILE * PITCH<D>, *tile_v = tile_k + TILE * PITCH<D>;
    const int own = threadIdx.x / THREADS;
    float *tile_p = tile_v + TILE * PITCH<D> + own * TILE * SCORE_PITCH;
    const int64_t head = blockIdx.y, sample = blockIdx.z, end = shape.s, keys = keys_of(shape);
    const int64_t stride = shape.a * D, key_stride = shape.kv * D;
    const int64_t key_head = sample * keys * key_stride + head / (shape.a / shape.kv) * D;
    const int64_t first_query = (int64_t)(gridDim.x - 1 - blockIdx.x) * QUERIES;
    const int64_t query0 = first_query + own * TILE, last_key = end_of_keys<QUERIES>(shape, first_query);
    q += sample * end * stride + head * D, o += sample * end * stride + head * D;
    lse += (sample * shape.a + head) * end;
    RunningRow row[EACH];
    float sum[EACH][D / SIDE] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++) row[i] = {-INFINITY, 0};
    for (int i = 0; i < TILES; i++)
        load_rows<D, BLOCK>(tile_q + i * TILE * PITCH<D>, q, first_query + i * TILE, end, stride);
    for (int64_t key0 = first_keys<QUERIES, TILE>(shape, sample, first_query); key0 < last_key;
         key0 = next_keys<QUERIES, TILE>(shape, sample, first_query, key0)) {
        load_rows<D, BLOCK>(tile_k, k + key_head, key0, keys, key_stride);
        load_rows<D, BLOCK>(tile_v, v + key_head, key0, keys, key_stride);
        __syncthreads();  // the tiles are complete
        if (tile_state<TILE, TILE>(shape, sample, query0, key0) != TILE_EMPTY) {
            float p[EACH][EACH];
            scores_of<D>(p, tile_q + own * TILE * PITCH<D>, tile_k, shape, sample, query0, key0);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const float keep = update_row<Shape>(p[i], &row[i]);
#pragma unroll
                for (int c = 0; c < D / SIDE; c++) sum[i][c] *= keep;
            }
            store_scores(tile_p, p);
            __syncwarp();  // a row's eight lanes are of one warp
            scores_by_rows<D>(sum, tile_p, tile_v);
        }
        __syncthreads();  // all threads have read the tiles
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int64_t at = query0 + thread_y() + i * SIDE;
        const float total = row_sum(row[i].sum), inverse = inverse_of<Shape>(total);
        if (at >= end) continue;
#pragma unroll
        for (int c = 0; c < D / SIDE; c++) o[at * stride + thread_x() + c * SIDE] = sum[i][c] * inverse;
        if (thread_x() == 0) lse[at] = row[i].most + logf(total);
    }
}

// ---- host code ----

template <int D, class Shape>
static void launch_on(cudaStream_t stream, float *o, float *lse, const float *q, const float *k,
                      const float *v, const Shape &shape) {
    if (shape.s == 0) return;
    const auto kernel = attention<D, Shape>;
    const size_t bytes = (size_t)tile_bytes(D, TILES + 2, TILES);
    allow_shared(kernel, bytes);
    const dim3 grid((unsigned)((shape.s + QUERIES - 1) / QUERIES), (unsigned)shape.a, (unsigned)shape.b);
    LAUNCH(kernel, grid, BLOCK, bytes, stream, o, lse, q, k, v, shape);
}

#ifndef NO_MAIN
#include "attention_masks.h"

template <int D>
static void launch(int, float *o, float *lse, float *, const float *q, const float *k, const float *v,
                   const Heads &shape) {
    launch_on<D>(0, o, lse, q, k, v, shape);
}

// s a multiple of 64. mask: by tokens, where it is given.
static Work formula(const Heads &shape, double d, const AttentionMask *mask = NULL) {
    const double heads = (double)(shape.b * shape.a), first = heads * (double)shape.s / TILE;
    const double blocks = (double)shape.s / QUERIES;
    const double squares = mask           ? (double)(shape.a * mask->tiles)
                           : shape.causal ? heads * blocks * (blocks + 1) / 2
                                          : heads * blocks * blocks;
    const double pairs = pairs_of(shape, mask), key_tiles = TILES * squares;
    Work w = {};
    add_products(&w, pairs, d);
    add_tiles(&w, first + 2 * key_tiles, d);
    w.store_requests = first * (d + 8);
    w.store_sectors = first * (4 * d + 8);
    w.memory_sectors = (words_of_forward(shape, d) + heads * (double)shape.s) / 8;
    w.shared_passes += pairs * 32;
    // maximum, difference, of each row, sum; of o. At the end: sum, logarithm, o
    w.flops += pairs * (1792 + 1024 + 256 + 1280 + 32 * d) + first * (3 * 256 + 32 + 32 * d);
    w.flop_instructions += pairs * (56 + 32 + 8 + 32 + d) + first * (24 + 8 + d);
    w.special_instructions = pairs * (32 + 8) + first * 16;
    w.barriers = 2 * key_tiles;
    return w;
}

template <int D>
static void row(const char *name, const Heads &at_size) {
    Heads small = at_size;
    small.b = 1, small.s = 128, small.a = 1, small.kv = 1;
    const Heads most = ON_GPU ? at_size : small;
    const int64_t queries = most.b * most.s * most.a * D, keys = most.b * most.s * most.kv * D;
    float *numbers = kernels_numbers(queries, 1, 4);
    Array<float> q(numbers, queries), k(numbers, keys), v(numbers, keys), o(queries), lse(queries / D);
    free(numbers);
    auto run = [&](const Heads &shape) { launch<D>(0, o.at, lse.at, NULL, q.at, k.at, v.at, shape); };
    const Proof proof = prove_forward(D, at_size.causal, true, launch<D>, 0);
    const KernelVersion version = {name, BLOCK, D == 64 ? 128 : 168, tile_bytes(D, TILES + 2, TILES)};
    show_version(version, proof, small, at_size, run, [](const Heads &shape) { return formula(shape, D); });
}

template <int D>
static void show(const KernelsOptions *options, const Heads &shape) {
    flash_tables(options, shape, D, 1,
                 [](const Heads &shape) { row<D>(shape.causal ? "flash 2, causal" : "flash 2", shape); });
    show_masked_forward(
        shape, D, QUERIES, D == 64 ? 128 : 168, [](auto... arguments) { launch_on<D>(0, arguments...); },
        [](const Heads &shape, const AttentionMask &mask) { return formula(shape, D, &mask); });
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int head;
    const Heads shape =
        flash_options(argc, argv,
                      "FlashAttention-2, forward: queries outside, keys inside, normalised once.\n"
                      "  flash_attention_2 --head-size 64",
                      TILES * TILE, &options, &head);
    const double d = head, s = (double)shape.s, scores = (double)shape.a * s * s;
    if (head == 128) show<128>(&options, shape);
    else show<64>(&options, shape);
    const Work works[] = {work_of_flash_1(shape, d), formula(shape, d)};
    say("%-8s  %9s  %12s  %16s  %19s  %9s", "", "L2 moves", "memory moves", "special / score",
        "other FLOPs / score", "blocks");
    for (int i = 0; i < 2; i++)
        say("flash %d   %9s  %12s  %16.2f  %19.2f  %9lld", i + 1,
            bytes_text(32 * (works[i].load_sectors + works[i].store_sectors)),
            bytes_text(32 * works[i].memory_sectors), 32 * works[i].special_instructions / scores,
            works[i].flops / scores - 4 * d, (long long)(shape.a * (i ? shape.s / (TILES * TILE) : 1)));
    const double traffic[] = {works[0].load_sectors + works[0].store_sectors,
                              works[1].load_sectors + works[1].store_sectors};
    return report_verdict("%.2f of the first version's traffic to L2 and %.2f of its special functions",
                          traffic[1] / traffic[0],
                          works[1].special_instructions / works[0].special_instructions);
}
#endif
