// flash.h: what the files of FlashAttention share: a tile of rows in shared memory, the products of tiles,
// and attention on the CPU to hold the kernels against.
//
// A block of 64 threads works on tiles of 32 queries and 32 keys. Thread (y, x) of 8 x 8 has rows y + 8 i
// and columns x + 8 j of every product, so that a warp has four rows of eight lanes, which shuffles join.
// Rows in shared memory are padded: by 4 words, so that eight of them lie in different banks and packs of
// four words stay aligned; by 8 words in the tile of scores, where a warp stores four rows of eight.
#ifndef FLASH_H
#define FLASH_H

#include "launch.h"

enum { TILE = 32, THREADS = 64, SIDE = 8, EACH = TILE / SIDE, SCORE_PITCH = TILE + 8 };

// q, o (b, s, a, d); k, v (b, s, kv, d), of which query head h reads h / (a / kv); lse (b, a, s).
struct Heads {
    int64_t b, s, a, kv;
    float scale;
    int causal;
};

template <int D>
constexpr int PITCH = D + 4;
// Bytes of shared memory for some tiles of rows, and of scores.
constexpr int64_t tile_bytes(int d, int rows, int scores) {
    return 4 * (int64_t)TILE * (rows * (d + 4) + scores * SCORE_PITCH);
}

__device__ static inline int thread_y() { return threadIdx.x % THREADS / SIDE; }
__device__ static inline int thread_x() { return threadIdx.x % SIDE; }

__device__ static inline bool sees(const Heads &shape, int64_t query, int64_t key) {
    return key < shape.s && (!shape.causal || key <= query);
}
// Whether each query of a tile sees each key of another: nothing to mask.
__device__ static inline bool sees_all(const Heads &shape, int64_t query0, int64_t key0) {
    return sees(shape, query0, key0 + TILE - 1);
}

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
template <int D>
__device__ static inline void scores_of(float (&s)[EACH][EACH], const float *tile_q, const float *tile_k,
                                        const Heads &shape, int64_t query0, int64_t key0) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) s[i][j] = 0;
    rows_by_rows<D>(s, tile_q, tile_k);
    const bool all = sees_all(shape, query0, key0);
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            s[i][j] *= shape.scale;
            if (!all && !sees(shape, query0 + thread_y() + i * SIDE, key0 + thread_x() + j * SIDE))
                s[i][j] = -INFINITY;
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
// Pairs of a tile of queries and one of keys: with a mask those on and below the diagonal.
static inline double pairs_of(const Heads &shape) {
    const double tiles = (double)shape.s / TILE;
    return (double)(shape.b * shape.a) * (shape.causal ? tiles * (tiles + 1) / 2 : tiles * tiles);
}

// flash_attention_1.cu; s a multiple of 32.
static inline Work work_of_flash_1(const Heads &shape, double d) {
    const double s = (double)shape.s, heads = (double)(shape.b * shape.a), pairs = pairs_of(shape);
    const double again = shape.causal || shape.s == TILE ? s - TILE : s;  // rows of o that come back
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

// ---- attention on the CPU, in f64, or in f32 for the error that its roundings make ----

template <class T>
struct Attention {
    std::vector<T> o, lse, dq, dk, dv;
};

// Each query by itself: all its scores, their softmax, and with dO the gradients, from lse.
// Scores are summed in the kernels' order: in f32 they have the same bits, and so fit this lse as well.
//   P = softmax(S), S = scale Q K', O = P V:   dV = P' dO   dS = P (dO V' - rowsum(dO O))   dQ = scale dS K
template <class T>
Attention<T> attention_on_cpu(const Heads &n, int d, const float *q, const float *k, const float *v,
                              const float *grad_o) {
    const size_t queries = (size_t)(n.b * n.s * n.a * d), keys = (size_t)(n.b * n.s * n.kv * d);
    Attention<T> out = {std::vector<T>(queries), std::vector<T>((size_t)(n.b * n.a * n.s)),
                        std::vector<T>(queries), std::vector<T>(keys), std::vector<T>(keys)};
    std::vector<T> p((size_t)n.s);
    for (int64_t row = 0; row < n.b * n.s * n.a; row++) {
        const int64_t h = row % n.a, query = row / n.a % n.s, sample = row / n.a / n.s;
        const int64_t end = n.causal ? query + 1 : n.s;
        auto key_at = [&](int64_t key) { return ((sample * n.s + key) * n.kv + h / (n.a / n.kv)) * d; };
        T most = -INFINITY, sum = 0, delta = 0;
        for (int64_t j = 0; j < end; j++) {
            T dot = 0;
            for (int c = 0; c < d; c++) dot = std::fma((T)q[row * d + c], (T)k[key_at(j) + c], dot);
            p[(size_t)j] = dot * (T)n.scale;
            most = p[(size_t)j] > most ? p[(size_t)j] : most;
        }
        for (int64_t j = 0; j < end; j++) sum += std::exp(p[(size_t)j] - most);
        const T lse = out.lse[(size_t)((sample * n.a + h) * n.s + query)] = most + std::log(sum);
        for (int64_t j = 0; j < end; j++)
            for (int c = 0; c < d; c++)
                out.o[(size_t)(row * d + c)] += std::exp(p[(size_t)j] - most) / sum * (T)v[key_at(j) + c];
        for (int c = 0; grad_o && c < d; c++)
            delta += (T)grad_o[row * d + c] * out.o[(size_t)(row * d + c)];
        for (int64_t j = 0; grad_o && j < end; j++) {
            T dp = 0;
            for (int c = 0; c < d; c++) dp += (T)grad_o[row * d + c] * (T)v[key_at(j) + c];
            const T weight = std::exp(p[(size_t)j] - lse), ds = weight * (dp - delta) * (T)n.scale;
            for (int c = 0; c < d; c++) {
                out.dv[(size_t)(key_at(j) + c)] += weight * (T)grad_o[row * d + c];
                out.dq[(size_t)(row * d + c)] += ds * (T)k[key_at(j) + c];
                out.dk[(size_t)(key_at(j) + c)] += ds * (T)q[row * d + c];
            }
        }
    }
    return out;
}

// Forward by launch(version, o, lse, scores, q, k, v, shape), over lengths that fill no tile; lse too,
// where there is one.
template <class Launch>
Proof prove_forward(int d, bool causal, bool has_lse, Launch launch, int version) {
    Proof proof;
    const struct {
        int64_t b, s, a, kv;
        double scale;
    } cases[] = {{1, 0, 1, 1, 1}, {2, 1, 2, 1, 1}, {1, 37, 4, 2, 30}, {1, 67, 3, 3, 1}};
    for (auto &n : cases) {
        const Heads shape = {n.b, n.s, n.a, n.kv, 1 / sqrtf((float)d), causal};
        const int64_t queries = n.b * n.s * n.a * d, keys = n.b * n.s * n.kv * d, rows = n.b * n.a * n.s;
        float *q = kernels_numbers(queries, n.scale, 1), *k = kernels_numbers(keys, 1, 2);
        float *v = kernels_numbers(keys, 1, 3);
        Array<float> d_q(q, queries), d_k(k, keys), d_v(v, keys), o(queries), lse(rows), scores(rows * n.s);
        launch(version, o.at, lse.at, scores.at, d_q.at, d_k.at, d_v.at, shape);
        const Attention<float> cpu = attention_on_cpu<float>(shape, d, q, k, v, NULL);
        const Attention<double> right = attention_on_cpu<double>(shape, d, q, k, v, NULL);
        const std::vector<float> once = o.host();
        proof.hold(once, cpu.o, right.o);
        if (has_lse) proof.hold(lse.host(), cpu.lse, right.lse);
        launch(version, o.at, lse.at, scores.at, d_q.at, d_k.at, d_v.at, shape);
        report_that(o.host() == once, "two runs with %lld tokens differ", (long long)n.s);
        free(q);
        free(k);
        free(v);
    }
    return proof;
}

// ---- the tables ----

// The shape that the tables show, of d elements a head; tokens a multiple of `multiple`.
static inline Heads flash_options(int argc, char **argv, const char *purpose, int64_t multiple,
                                  KernelsOptions *options, int *d) {
    int64_t n;
    int wide;
    Option table[] = {
        {"size", OPTION_INT, &n, "4096", 64, 32768, "", "tokens of the table's sequence", false},
        {"head-size", OPTION_CHOICE, &wide, "128", 0, 0, "64|128", "elements of a head", false},
        KERNELS_OPTIONS(*options),
    };
    options_parse(argc, argv, purpose, table, sizeof table / sizeof *table);
    *d = wide ? 128 : 64;
    return {1, n - n % multiple, 32, 8, 1 / sqrtf((float)*d), 0};
}

// A table without a mask and one with it, whose rows are rows(shape). passes: 1 of forward; 2 of backward,
// which moves and computes at least twice as much.
template <class Rows>
void flash_tables(const KernelsOptions *options, Heads shape, int d, int passes, Rows rows) {
    for (int causal = 0; causal < 2; causal++) {
        shape.causal = causal;
        const double s = (double)shape.s, pairs = s * (causal ? (s + 1) / 2 : s);
        char *size = format_text(
            "%s%s of %lld tokens, %d heads of %d, %d of K/V", passes == 2 ? "backward of " : "",
            causal ? "causal attention" : "attention", (long long)shape.s, (int)shape.a, d, (int)shape.kv);
        kernels_begin(options, size,
                      kernels_limit(options, passes * 4 * words_of_forward(shape, d),
                                    passes * 4 * pairs * d * (double)shape.a, 0));
        rows(shape);
        free(size);
    }
}

#endif
