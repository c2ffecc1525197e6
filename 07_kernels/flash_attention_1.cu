// flash_attention_1.cu: attention that never stores a score. Playbook: "Flash Attention 1-3"; Dao et al.,
// "FlashAttention", 2022, Algorithm 1, forward. The backward pass: flash_attention_1_backward.cu.
//
//     O = softmax(scale Q K') V           scores stored: S = Q K', written; P = softmax(S), read and
//                                         written; P V, read: 4 s^2 words of memory a head
//
// Here a block holds a tile of K and V, and loops over the tiles of queries. For each row of O it keeps the
// normalised row so far and the logarithm of the sum of exponentials (lse) over the keys seen. The paper
// keeps the maximum m and the sum l, two words a row; lse in their place is FlashAttention-2's.
//
//     m = max(S)   l = sum(e^(S - m))                     of this tile's keys
//     M = max(m, lse)   L = e^(m - M) l + e^(lse - M)     over all so far
//     O = e^(lse - M) / L O + e^(m - M) / L e^(S - m) V   lse = M + log L
//
//                    queries ->  T tiles of 32, and as many of keys: with a causal mask only the pairs
//     keys     K V   ■ ■ ■ ■     from the diagonal on, T (T + 1) / 2, else T^2. In words, for a head:
//       |      K V   . ■ ■ ■         K and V    2 x 32 d       once for each tile of keys
//       v      K V   . . ■ ■         Q          32 d           for each pair
//              K V   . . . ■         O, lse     32 d + 32      for each pair, out and, after the first, in
//
// Under a mask by position and document, the pairs are those in which some query sees some key, wherever
// they lie (flash_mask.h).
//
// Tiles cost L2 about 3 s^2 d / 32 words a head in either case. This kernel stores s d + s words, the other
// s d + s^2; none of its arrays is quadratic in s.
//
// Proof: O and lse within 4 times the error of the same steps in f32 on the CPU, each against f64, on odd
// lengths, with and without a mask, for shared K/V heads and for scores of large magnitude; the same under
// masks by position and document (attention_masks.h).
// Run: build/07_kernels/flash_attention_1           (--gpu a100, --head-size 64, --size 4096, --verbose)
// Last line: PASS flash_attention_1: it stores 32.7 times less …
#include "attention_masks.h"

// ---- FlashAttention ----

// The weights of the row so far and of this tile's part in the new row: o = keep o + gain (e^(S - m) V). p:
// scores (in), and their exponentials (out).
struct RowUpdate {
    float keep, gain, lse;
};
template <class Shape>
__device__ static inline RowUpdate update_row(float (&p)[EACH], float lse) {
    float most = -INFINITY, sum = 0;
#pragma unroll
    for (int j = 0; j < EACH; j++) most = fmaxf(most, p[j]);
    most = shift_of<Shape>(row_max(most));
#pragma unroll
    for (int j = 0; j < EACH; j++) sum += p[j] = expf(p[j] - most);
    sum = row_sum(sum);
    const float top = fmaxf(most, lse), keep = expf(lse - top), gain = expf(most - top);
    const float total = fmaf(gain, sum, keep), inverse = inverse_of<Shape>(total);
    return {keep * inverse, gain * inverse, top + logf(total)};
}

// Sets the rows of queries that see no tile of keys, which the loop over keys does not reach.
template <int D, class Shape>
__device__ static inline void store_empty_rows(float *o, float *lse, const Shape &shape, int64_t sample,
                                               int64_t stride) {
    const float none[EACH][D / SIDE] = {};
    for (int64_t query0 = 0; query0 < shape.s; query0 += TILE) {
        if (first_keys<TILE, TILE>(shape, sample, query0) < keys_of(shape)) continue;
        store_rows<D>(o, none, query0, shape.s, stride);
        if (threadIdx.x < TILE && query0 + threadIdx.x < shape.s) lse[query0 + threadIdx.x] = -INFINITY;
    }
}

// Block (head, sample).
template <int D, class Shape>
__global__ void __launch_bounds__(THREADS)
    attention(float *o, float *lse, const float *q, const float *k, const float *v, Shape shape) {
    DYNAMIC_SHARED(float, tile_q);
    float *tile_k = tile_q + TILE * PITCH<D>, *tile_v = tile_k + TILE * PITCH<D>;
    float *tile_p = tile_v + TILE * PITCH<D>;
    const int64_t head = blockIdx.x, sample = blockIdx.y, end = shape.s, keys = keys_of(shape);
    const int64_t stride = shape.a * D, key_stride = shape.kv * D;
    const int64_t key_head = sample * keys * key_stride + head / (shape.a / shape.kv) * D;
    q += sample * end * stride + head * D, o += sample * end * stride + head * D;
    k += key_head, v += key_head;
    lse += (sample * shape.a + head) * end;
    if (Shape::EMPTY_ROWS) store_empty_rows<D>(o, lse, shape, sample, stride);
    for (int64_t key0 = 0; key0 < keys; key0 += TILE) {
        if (Shape::EMPTY_ROWS && first_queries<TILE, TILE>(shape, sample, key0) >= end) continue;
        load_rows<D>(tile_k, k, key0, keys, key_stride);
        load_rows<D>(tile_v, v, key0, keys, key_stride);
        for (int64_t query0 = first_queries<TILE, TILE>(shape, sample, key0); query0 < end;
             query0 = next_queries<TILE, TILE>(shape, sample, query0, key0)) {
            const int64_t row0 = query0 + thread_y();
            const bool first = first_keys<TILE, TILE>(shape, sample, query0) == key0;
            RowUpdate row[EACH];
            load_rows<D>(tile_q, q, query0, end, stride);
#pragma unroll
            for (int i = 0; i < EACH; i++)
                row[i].lse = !first && row0 + i * SIDE < end ? lse[row0 + i * SIDE] : -INFINITY;
            __syncthreads();  // the tiles are complete
            float p[EACH][EACH], sum[EACH][D / SIDE] = {};
            scores_of<D>(p, tile_q, tile_k, shape, sample, query0, key0);
#pragma unroll
            for (int i = 0; i < EACH; i++) row[i] = update_row<Shape>(p[i], row[i].lse);
            store_scores(tile_p, p);
            __syncwarp();  // a row's eight lanes are of one warp
            scores_by_rows<D>(sum, tile_p, tile_v);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int64_t at = row0 + i * SIDE;
                if (at >= end) continue;
#pragma unroll
                for (int c = 0; c < D / SIDE; c++) {
                    float *out = &o[at * stride + thread_x() + c * SIDE];
                    *out = fmaf(row[i].keep, first ? 0 : *out, row[i].gain * sum[i][c]);
                }
                if (thread_x() == 0) lse[at] = row[i].lse;
            }
            __syncthreads();  // all threads have read the tiles
        }
    }
}

// ---- scores stored: three kernels ----

// Block (tile of keys, tile of queries, sample and head): scores (b, a, s, s), masked.
template <int D>
__global__ void __launch_bounds__(THREADS)
    store_all_scores(float *scores, const float *q, const float *k, Heads shape) {
    DYNAMIC_SHARED(float, tile_q);
    float *tile_k = tile_q + TILE * PITCH<D>;
    const int64_t key0 = blockIdx.x * TILE, query0 = blockIdx.y * TILE, head = blockIdx.z % shape.a;
    const int64_t sample = blockIdx.z / shape.a, first = sample * shape.s;
    const int64_t stride = shape.a * D, key_stride = shape.kv * D;
    const int64_t key_head = first * key_stride + head / (shape.a / shape.kv) * D;
    load_rows<D>(tile_q, q + first * stride + head * D, query0, shape.s, stride);
    load_rows<D>(tile_k, k + key_head, key0, shape.s, key_stride);
    __syncthreads();
    float s[EACH][EACH];
    scores_of<D>(s, tile_q, tile_k, shape, sample, query0, key0);
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int64_t row = query0 + thread_y() + i * SIDE, column = key0 + thread_x() + j * SIDE;
            if (row < shape.s && column < shape.s)
                scores[(blockIdx.z * shape.s + row) * shape.s + column] = s[i][j];
        }
}

// A warp for each row: softmax (=) in place. Between reading and writing, the row is in shared memory, where
// each lane has its own words. The row's size limits the warps that fit, which the table does not show: 13
// on a multiprocessor of an H100 at 4096 tokens, and one at 32768.
__global__ void __launch_bounds__(32) softmax(float *scores, int64_t s) {
    DYNAMIC_SHARED(float, row);
    scores += blockIdx.x * s;
    float most = -INFINITY, sum = 0;
    for (int64_t i = threadIdx.x; i < s; i += 32) most = fmaxf(most, row[i] = scores[i]);
    for (int lanes = 16; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    for (int64_t i = threadIdx.x; i < s; i += 32) sum += row[i] = expf(row[i] - most);
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    const float inverse = 1 / sum;
    for (int64_t i = threadIdx.x; i < s; i += 32) scores[i] = row[i] * inverse;
}

// Block (tile of queries, sample and head): o (=) P V.
template <int D>
__global__ void __launch_bounds__(THREADS)
    weigh_values(float *o, const float *scores, const float *v, Heads shape) {
    DYNAMIC_SHARED(float, tile_v);
    float *tile_p = tile_v + TILE * PITCH<D>;
    const int64_t query0 = blockIdx.x * TILE, head = blockIdx.y % shape.a, end = shape.s;
    const int64_t first = blockIdx.y / shape.a * end, stride = shape.a * D, key_stride = shape.kv * D;
    v += first * key_stride + head / (shape.a / shape.kv) * D;
    o += first * stride + head * D;
    scores += blockIdx.y * end * end;
    float sum[EACH][D / SIDE] = {};
    for (int64_t key0 = 0; key0 < end; key0 += TILE) {
        load_rows<D>(tile_v, v, key0, end, key_stride);
        for (int i = threadIdx.x; i < TILE * TILE; i += THREADS) {
            const int64_t row = query0 + i / TILE, column = key0 + i % TILE;
            tile_p[i / TILE * SCORE_PITCH + i % TILE] =
                row < end && column < end ? scores[row * end + column] : 0;
        }
        __syncthreads();
        scores_by_rows<D>(sum, tile_p, tile_v);
        __syncthreads();
    }
    store_rows<D>(o, sum, query0, end, stride);
}

// ---- host code ----

enum { STORED, FLASH, VERSIONS };

template <int D, class Shape>
static void launch_flash(float *o, float *lse, const float *q, const float *k, const float *v,
                         const Shape &shape) {
    const auto kernel = attention<D, Shape>;
    const size_t bytes = (size_t)tile_bytes(D, 3, 1);
    allow_shared(kernel, bytes);
    const dim3 grid((unsigned)shape.a, (unsigned)shape.b);
    LAUNCH(kernel, grid, THREADS, bytes, 0, o, lse, q, k, v, shape);
}

template <int D>
static void launch(int version, float *o, float *lse, float *scores, const float *q, const float *k,
                   const float *v, const Heads &shape) {
    if (shape.s == 0) return;
    const unsigned tiles = (unsigned)((shape.s + TILE - 1) / TILE), heads = (unsigned)(shape.b * shape.a);
    if (version == FLASH) return launch_flash<D>(o, lse, q, k, v, shape);
    const dim3 squares(tiles, tiles, heads), rows(tiles, heads);
    const size_t row_bytes = (size_t)shape.s * 4;
    allow_shared(softmax, row_bytes);
    LAUNCH(store_all_scores<D>, squares, THREADS, (size_t)tile_bytes(D, 2, 0), 0, scores, q, k, shape);
    LAUNCH(softmax, (unsigned)(shape.b * shape.a * shape.s), 32, row_bytes, 0, scores, shape.s);
    LAUNCH(weigh_values<D>, rows, THREADS, (size_t)tile_bytes(D, 1, 1), 0, o, scores, v, shape);
}

// s a multiple of 32.
static Work formula(int version, const Heads &shape, double d) {
    if (version == FLASH) return work_of_flash_1(shape, d);
    const double s = (double)shape.s, heads = (double)(shape.b * shape.a), tiles = s / TILE;
    const double pairs = heads * tiles * tiles, squares = heads * s * s;
    Work w = {};
    add_products(&w, pairs, d);
    add_tiles(&w, 3 * pairs, d);
    w.load_requests += 2 * squares / 32;
    w.load_sectors += 2 * squares / 8;
    w.store_requests = 2 * squares / 32 + heads * s * d / 32;
    w.store_sectors = 2 * squares / 8 + heads * s * d / 8;
    w.memory_sectors = words_of_forward(shape, d) / 8 + 4 * squares / 8;
    // a row in shared memory is written twice and read twice, and once more as a tile
    w.shared_passes += 5 * squares / 32;
    w.flops += 4 * squares + heads * s * 32 * 10;
    w.flop_instructions += 4 * squares / 32 + heads * s * 10;
    w.special_instructions = squares / 32 + heads * s;
    w.barriers = pairs + 2 * pairs;
    return w;
}

// Registers of a thread: of the kernel that needs the most.
template <int D>
static KernelVersion describe(int version, const char *name) {
    if (version == FLASH) return {name, THREADS, D == 64 ? 96 : 128, tile_bytes(D, 3, 1)};
    return {name, THREADS, D == 64 ? 117 : 149, tile_bytes(D, 2, 0)};
}

template <int D>
static void row(int version, const char *name, const Heads &at_size) {
    Heads small = at_size;
    small.b = 1, small.s = 64, small.a = 2, small.kv = 1;
    const Heads most = ON_GPU ? at_size : small;
    const int64_t queries = most.b * most.s * most.a * D, keys = most.b * most.s * most.kv * D;
    const int64_t rows = most.b * most.a * most.s;
    float *numbers = kernels_numbers(queries, 1, 4);
    Array<float> q(numbers, queries), k(numbers, keys), v(numbers, keys), o(queries), lse(rows);
    Array<float> scores(version == STORED ? rows * most.s : 0);
    free(numbers);
    auto run = [&](const Heads &shape) {
        launch<D>(version, o.at, lse.at, scores.at, q.at, k.at, v.at, shape);
    };
    const Proof proof = prove_forward(D, at_size.causal, version == FLASH, launch<D>, version);
    show_version(describe<D>(version, name), proof, small, at_size, run,
                 [&](const Heads &shape) { return formula(version, shape, D); });
}

template <int D>
static void show(const KernelsOptions *options, const Heads &shape) {
    flash_tables(options, shape, D, 1, [](const Heads &shape) {
        row<D>(STORED, "scores stored", shape);
        row<D>(FLASH, shape.causal ? "flash, causal" : "flash", shape);
    });
    show_masked_forward(
        shape, D, ATTENTION_TILE, D == 64 ? 128 : 168, launch_flash<D, TokenHeads>,
        [](const Heads &shape, const AttentionMask &mask) { return work_of_flash_1(shape, D, &mask); });
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int head;
    const Heads shape = flash_options(
        argc, argv,
        "FlashAttention, forward: tiles and a running softmax, beside scores that are stored.\n"
        "  flash_attention_1 --head-size 64",
        TILE, &options, &head);
    const double d = head, s = (double)shape.s;
    if (head == 128) show<128>(&options, shape);
    else show<64>(&options, shape);
    say("%-14s  %9s  %12s  %16s  %19s", "", "stores", "memory moves", "special / score",
        "other FLOPs / score");
    for (int version : {STORED, FLASH}) {
        const Work w = formula(version, shape, d);
        const double scores = (double)shape.a * s * s, words = s * d + (version == STORED ? s * s : s);
        say("%-14s  %9s  %12s  %16.2f  %19.2f", version == STORED ? "scores stored" : "flash",
            bytes_text(4 * (double)shape.a * words), bytes_text(32 * w.memory_sectors),
            32 * w.special_instructions / scores, w.flops / scores - 4 * d);
    }
    return report_verdict("it stores %.1f times less, and takes %.2f of the modelled time",
                          (s + d) / (d + 1), kernels_seconds(FLASH) / kernels_seconds(STORED));
}
