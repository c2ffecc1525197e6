// flash_attention_2_tensor.cu: FlashAttention-2 on tensor cores, forward, in bf16 and fp16 with f32 sums.
// Playbook: "Flash Attention 1-3"; Dao, "FlashAttention-2", 2023, Algorithm 1 and section 3.3.
//
// Changes from flash_attention_2.cu: the loops and the running softmax stay; both products use mma. A block
// of 4 warps has 128 queries, and takes 64 keys at a time. A warp has 32 of the queries, in two fragments of
// 16 rows. A lane's part of the first product's result is also its part of the second's left operand:
//
//     S = Q K'   d[0], d[1]  row l / 4       keys 8 j + 2 (l % 4), + 1      j: 8 fragments of 16 x 8
//                d[2], d[3]  row l / 4 + 8
//     O += P V   a[0], a[2]  row l / 4       d[0], d[1] of j and of j + 1, exponentials in 16 bits
//                a[1], a[3]  row l / 4 + 8   d[2], d[3] of j and of j + 1
//
// So P stays in registers: there is no tile of scores, and two shuffles combine a row's four lanes.
//
// Shared memory has one tile of K and one of V. While one is multiplied, the other is in flight:
//
//     copy      K0   V0               K1      V1               K2           each waited for, with a
//     compute        Q K0', softmax   P V0    Q K1', softmax   P V1         barrier, before its use
//
// A multiprocessor's work for one warp and 64 keys, with heads of 128, in clocks:
//
//     mma        4 x 32 x 64 x 128 FLOPs                              512 on an A100, 256 on an H100
//     shared     ldmatrix: Q 64, K 128, V 128 passes; cp.async: 64    384
//     special    for a lane, 64 exponentials, and 4 of its rows       136
//     FMA        2^(c S - c m), c = scale log2 e; rows, O             172 on an A100, 86 on an H100
//
// On an A100 the products set the time. On an H100, whose tensor cores are twice as fast, shared memory
// does: mma takes both operands from registers, and ldmatrix must fill them.
//
// Proof: O within 4 times the error of the same steps with P and O in 16 bits on the CPU, lse in f32, each
// against f64, on odd lengths, with and without a mask, for shared K/V heads and for large scores. With
// TokenHeads (flash_mask.h): packed documents, zig-zag chunks, any order; unseen tiles may be NaN.
// Run: build/07_kernels/flash_attention_2_tensor           (--gpu a100, --head-size 64, --verbose)
// Last line: PASS flash_attention_2_tensor: bf16 takes 0.09 of the least that f32 without tensor cores …
#include "flash_fragments.h"

enum { WARPS = 4, BLOCK = 32 * WARPS, KEYS = 64 };
enum { ROWS = 2, OWN = 16 * ROWS, QUERIES = WARPS * OWN };  // fragments, and queries, of a warp; of a block
enum { FRAGMENTS = KEYS / 8 };                              // of a row of scores

// A row's maximum so far, before the scale, and this lane's part of its sum.
struct RunningRow {
    float most, sum;
};

// s (=) the warp's queries by the tile of keys.
template <int D, class T>
__device__ static inline void scores_of(float (&s)[ROWS][FRAGMENTS][4], const T *tile_q, const T *tile_k) {
#pragma unroll 2  // addresses for all steps would take registers that the sums need
    for (int k = 0; k < D; k += 16) {
        uint32_t left[ROWS][4];
#pragma unroll
        for (int i = 0; i < ROWS; i++) load_left<D>(left[i], tile_q, i * 16, k);
#pragma unroll
        for (int j = 0; j < FRAGMENTS; j += 2) {
            uint32_t right[4];
            load_right_transposed<D>(right, tile_k, j * 8, k);
#pragma unroll
            for (int i = 0; i < ROWS; i++) multiply_pair<T>(s[i][j], s[i][j + 1], left[i], right);
        }
    }
}

// The tiles of keys that a block of queries sees, and which of their keys its warps see: by order, ...
template <class Shape>
struct KeysSeen {
    const Heads &shape;
    int query0, end;  // the warp's first; a key behind the block's last

    __device__ KeysSeen(const Heads &shape, void *, int first_query)
        : shape(shape), query0(first_query + own_warp() * OWN),
          end((int)end_of_keys<QUERIES>(shape, first_query)) {}
    __device__ int first() const { return 0; }
    __device__ int after(int key0) const { return key0 + KEYS; }
    __device__ bool any(int key0) const { return !shape.causal || key0 < query0 + OWN; }
    // What a query does not see is -inf.
    __device__ void mask(float (&s)[ROWS][FRAGMENTS][4], int key0) const {
        if (sees(shape, query0, key0 + KEYS - 1)) return;
        const int first = key0 + own_lane() % 4 * 2, last = (int)shape.s - 1;
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int query = query0 + i * 16 + half * 8 + own_lane() / 4;
                // beyond this lane's first
                const int keys = (shape.causal ? min(query, last) : last) - first;
#pragma unroll
                for (int j = 0; j < FRAGMENTS; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (j * 8 + e > keys) s[i][j][2 * half + e] = -INFINITY;
            }
    }
};

// ... or by tokens.
template <>
struct KeysSeen<TokenHeads> {
    TokenPlan<true> plan;
    int end;

    __device__ KeysSeen(const TokenHeads &shape, void *room, int first_query)
        : plan(shape, room, first_query), end((int)shape.keys.s) {
        __syncthreads();  // the plan is complete
    }
    __device__ int first() const { return plan.next(0) * KEYS; }
    __device__ int after(int key0) const { return plan.next(key0 / KEYS + 1) * KEYS; }
    __device__ TileState state(int key0) const {
        return plan.state(key0 / KEYS, own_warp() * OWN / OWN_HALF);
    }
    __device__ bool any(int key0) const { return state(key0) != TILE_EMPTY; }
    __device__ void mask(float (&s)[ROWS][FRAGMENTS][4], int key0) const {
        if (state(key0) == TILE_FULL) return;
#pragma unroll
        for (int i = 0; i < ROWS; i++) plan.mask(s[i], own_warp() * OWN + i * 16, key0);
    }
};

// s: scores (in), and their exponentials (out), of one of the two rows that a lane has in its fragments.
// Returns the weight of the sums so far in the new ones.
template <class Shape>
__device__ static inline float update_row(float (&s)[FRAGMENTS][4], int half, float c, RunningRow *row) {
    float most = row->most;
#pragma unroll
    for (int j = 0; j < FRAGMENTS; j++) most = fmaxf(most, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
    most = quad_max(most);
    const float zero = shift_of<Shape>(most), keep = power_of_2((row->most - zero) * c), shift = zero * c;
    row->most = most, row->sum *= keep;
#pragma unroll
    for (int j = 0; j < FRAGMENTS; j++)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; e++)
            row->sum += s[j][e] = power_of_2(fmaf(s[j][e], c, -shift));
    return keep;
}

// p (=) exponentials of the scores s, in 16 bits; the sums are rescaled to the new maximum.
template <class Shape, int D, class T>
__device__ static inline void soften(uint32_t (&p)[ROWS][KEYS / 16][4], float (&sum)[ROWS][D / 8][4],
                                     RunningRow (&row)[ROWS][2], float (&s)[ROWS][FRAGMENTS][4], float c) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float keep = update_row<Shape>(s[i], half, c, &row[i][half]);
#pragma unroll
            for (int j = 0; j < D / 8; j++) sum[i][j][2 * half] *= keep, sum[i][j][2 * half + 1] *= keep;
        }
#pragma unroll
        for (int j = 0; j < FRAGMENTS; j += 2) to_left<T>(p[i][j / 2], s[i][j], s[i][j + 1]);
    }
}

// sum += p times the tile of values.
template <int D, class T>
__device__ static inline void weigh(float (&sum)[ROWS][D / 8][4], const uint32_t (&p)[ROWS][KEYS / 16][4],
                                    const T *tile_v) {
#pragma unroll
    for (int k = 0; k < KEYS; k += 16)
#pragma unroll
        for (int c = 0; c < D / 8; c += 2) {
            uint32_t right[4];
            load_right<D>(right, tile_v, k, c * 8);
#pragma unroll
            for (int i = 0; i < ROWS; i++) multiply_pair<T>(sum[i][c], sum[i][c + 1], p[i][k / 16], right);
        }
}

// The warp's rows of o and lse (=), through its part of the tile of queries, from which it then stores whole
// chunks.
template <class Shape, int D, class T>
__device__ static inline void finish(T *o, float *lse, T *tile, const float (&sum)[ROWS][D / 8][4],
                                     const RunningRow (&row)[ROWS][2], float scale, int query0, int end,
                                     int64_t stride) {
    const int lane = own_lane();
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int query = query0 + i * 16 + half * 8 + lane / 4;
            const float total = quad_sum(row[i][half].sum);
            if (lane % 4 == 0 && query < end) lse[query] = fmaf(row[i][half].most, scale, logf(total));
            inverse[half] = inverse_of<Shape>(total);
        }
        put_rows<D>(tile + i * 16 * D, sum[i], inverse[0], inverse[1]);
    }
    __syncwarp();
    store_tile<OWN, D>(o, tile, query0, end, stride);
}

// Block (queries, head, sample), those with the most keys first.
template <class T, int D, class Shape>
__global__ void __launch_bounds__(BLOCK)
    attention(T *o, float *lse, const T *q, const T *k, const T *v, Shape shape) {
    DYNAMIC_SHARED(T, tile_q);
    T *tile_k = tile_q + QUERIES * D, *tile_v = tile_k + KEYS * D, *own_q = tile_q + own_warp() * OWN * D;
    const int64_t head = blockIdx.y, first = blockIdx.z * shape.s;
    const int64_t stride = shape.a * D, key_stride = shape.kv * D;
    const int64_t key_head = blockIdx.z * keys_of(shape) * key_stride + head / (shape.a / shape.kv) * D;
    const int first_query = (int)(gridDim.x - 1 - blockIdx.x) * QUERIES;
    const int query0 = first_query + own_warp() * OWN, end = (int)shape.s, keys = (int)keys_of(shape);
    const KeysSeen<Shape> seen(shape, tile_v + KEYS * D, first_query);
    const float c = shape.scale * LOG2E;
    q += first * stride + head * D, o += first * stride + head * D;
    k += key_head, v += key_head, lse += (blockIdx.z * shape.a + head) * end;
    RunningRow row[ROWS][2];
    float sum[ROWS][D / 8][4] = {};
#pragma unroll
    for (int i = 0; i < ROWS; i++) row[i][0] = row[i][1] = {-INFINITY, 0};
    int key0 = seen.first();
    copy_rows<QUERIES, D, BLOCK>(tile_q, q, first_query, end, stride);
    copy_rows<KEYS, D, BLOCK>(tile_k, k, key0, keys, key_stride);
    cp_async_commit();
    while (key0 < seen.end) {
        const bool any = seen.any(key0);  // if not, this warp skips the tile
        uint32_t p[ROWS][KEYS / 16][4] = {};
        cp_async_wait<0>();
        __syncthreads();  // the keys are there, and all threads have read the values before
        copy_rows<KEYS, D, BLOCK>(tile_v, v, key0, keys, key_stride);
        cp_async_commit();
        if (any) {
            float s[ROWS][FRAGMENTS][4] = {};
            scores_of<D>(s, own_q, tile_k);
            seen.mask(s, key0);
            soften<Shape, D, T>(p, sum, row, s, c);
        }
        cp_async_wait<0>();
        __syncthreads();  // the values are there, and all threads have read the keys
        key0 = seen.after(key0);
        if (key0 < seen.end) copy_rows<KEYS, D, BLOCK>(tile_k, k, key0, keys, key_stride);
        cp_async_commit();
        if (any) weigh<D>(sum, p, tile_v);
    }
    cp_async_wait<0>();
    if (Shape::EMPTY_ROWS) __syncthreads();  // a block that sees no key comes here with queries in flight
    finish<Shape, D>(o, lse, own_q, sum, row, shape.scale, query0, end, stride);
}

// ---- host code ----

constexpr int64_t shared_bytes(int d) { return 2 * (int64_t)d * (QUERIES + 2 * KEYS); }

template <class T, int D, class Shape>
static void launch_on(cudaStream_t stream, T *o, float *lse, const T *q, const T *k, const T *v,
                      const Shape &shape) {
    if (shape.s == 0) return;
    const auto kernel = attention<T, D, Shape>;
    const int64_t bytes = shared_bytes(D) + plan_bytes(shape, (keys_of(shape) + KEYS - 1) / KEYS);
    allow_shared(kernel, bytes);
    const dim3 grid((unsigned)((shape.s + QUERIES - 1) / QUERIES), (unsigned)shape.a, (unsigned)shape.b);
    LAUNCH(kernel, grid, BLOCK, (size_t)bytes, stream, o, lse, q, k, v, shape);
}

#ifndef NO_MAIN
#include "attention_masks.h"

template <class T, int D>
static void launch(int, T *o, float *lse, float *, const T *q, const T *k, const T *v, const Heads &shape) {
    launch_on<T, D>(0, o, lse, q, k, v, shape);
}

// s a multiple of 128.
static Work formula(const Heads &shape, double d) {
    const double heads = (double)(shape.b * shape.a), n = (double)shape.s / QUERIES, blocks = heads * n;
    // tiles of keys that blocks take, two for each block of queries; and those that their warps do
    const double key_tiles = heads * (shape.causal ? n * n + n : 2 * n * n);
    const double pairs = heads * (shape.causal ? 4 * n * n + 2 * n : 8 * n * n);
    const double copies = (blocks + key_tiles) * d / 2;  // 128 rows each: Q, and K with V
    const double scores = OWN * KEYS / 32;               // of a lane
    Work w = {};
    w.load_requests = copies, w.load_sectors = 16 * copies;
    w.store_requests = blocks * WARPS * (d / 8 + 2 * ROWS);
    w.store_sectors = blocks * WARPS * (16 * d / 8 + 2 * ROWS);
    w.memory_sectors = words_of_forward(shape, d) / 16 + heads * (double)shape.s / 8;
    // ldmatrix: Q and K, V; o, which is stored in words and read in chunks
    w.shared_passes = 4 * copies + pairs * 4 * d / 16 * (ROWS + KEYS / 16 + KEYS / 16) + blocks * WARPS * d;
    // maximum, scale and sum of scores; of each row; of o. c; at the end: sum, lse, o
    w.flops = pairs * 32 * (4 * scores + 2 * ROWS * 6 + d) + blocks * WARPS * 32 * (2 * ROWS * 2.5 + d + 1);
    w.flop_instructions =
        pairs * (3 * scores + 2 * ROWS * 6 + d) + blocks * WARPS * (2 * ROWS * 3 + d + 1);
    w.special_instructions = pairs * (scores + 2 * ROWS) + blocks * WARPS * 2 * ROWS * 2;
    w.tensor_flops = pairs * 4 * OWN * KEYS * d;
    w.barriers = 2 * key_tiles;
    return w;
}

template <class T, int D>
static void row(const char *name, const Heads &at_size) {
    Heads small = at_size;
    small.b = 1, small.s = 2 * QUERIES, small.a = 1, small.kv = 1;
    const Heads most = ON_GPU ? at_size : small;
    const int64_t queries = most.b * most.s * most.a * D, keys = most.b * most.s * most.kv * D;
    const Numbers<T> numbers(queries, 4);
    Array<T> q(numbers.narrow.data(), queries), k(numbers.narrow.data(), keys);
    Array<T> v(numbers.narrow.data(), keys), o(queries);
    Array<float> lse(queries / D);
    auto run = [&](const Heads &shape) { launch_on<T, D>(0, o.at, lse.at, q.at, k.at, v.at, shape); };
    const Proof proof = prove_forward<T>(D, at_size.causal, true, launch<T, D>, 0);
    if (at_size.causal) {
        masks_hold(name,
                   prove_masked_forward<T>(D, QUERIES, [](auto... in) { launch_on<T, D>(0, in...); }));
        products_of_tiles<T>(name, D, 2, [](T *x, T *o, float *lse, float *, const TokenHeads &shape) {
            launch_on<T, D>(0, o, lse, x, x, x, shape);
        });
    }
    const KernelVersion version = {name, BLOCK, D == 64 ? 207 : 255, shared_bytes(D)};
    show_version(version, proof, small, at_size, run, [](const Heads &shape) { return formula(shape, D); });
}

template <int D>
static void show(const KernelsOptions *options, const Heads &shape) {
    flash_tables_16(options, shape, D, 1, row<__nv_bfloat16, D>, row<__half, D>);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int head;
    const Heads shape = flash_options(argc, argv,
                                      "FlashAttention-2 on tensor cores, forward, in 16 bits.\n"
                                      "  flash_attention_2_tensor --head-size 64",
                                      QUERIES, &options, &head);
    if (head == 128) show<128>(&options, shape);
    else show<64>(&options, shape);
    return tensor_verdict(&options, shape, head, 1, formula(shape, head));
}
#endif
