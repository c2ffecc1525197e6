// flash_attention_2_tensor_backward.cu: the gradients of FlashAttention-2 on tensor cores, in bf16 and fp16
// with f32 sums. Playbook: "Flash Attention 1-3"; Dao, "FlashAttention-2", 2023, Algorithm 2.
//
// Changes from flash_attention_2_backward.cu: tickets, turns and the order of sums stay; the five products
// use mma. A block of 8 warps has 128 keys, 16 a warp, and takes 64 queries at a time. Scores are computed
// with keys as rows: the fragments of S' and dP' are then left operands of the sums over queries:
//
//     S'  = K Q'     P'  = 2^(c S' - log2e lse)      dV += P' dO      P', dS' in 16 bits, from registers
//     dP' = V dO'    dS' = P' (dP' - delta)          dK += dS' Q
//                                                    dQ += dS K       by way of shared memory
//
// Only dQ is a sum over keys, and therefore over warps: they store dS' in shared memory, ldmatrix loads it
// transposed, and each warp computes 32 queries and a quarter of the columns of the product.
//
//     tile of queries    t                                       t + 1
//     copies             Q, dO of t + 1 in flight                Q, dO of t + 2 …
//     warps              S', dP', dV, dK | dS there, its turn | dQ | S', dP', …       |: a barrier
//
// With TokenHeads (flash_mask.h) a block skips tiles of queries that see none of its keys. Its turn is the
// number of blocks of later keys that those queries see, so it never waits for one that skips them.
//
// dQ is summed in f32, in memory, one block after another; a last kernel scales it and rounds it to 16 bits.
// Extra memory: that sum, 4 d bytes for a row and head; delta, turns and tickets as before.
//
// A warp and 64 queries, with heads of 128, take 320 clocks of mma on an H100 and 820 shared passes: each
// of 8 warps reads all of Q and dO, once as rows and once transposed, for 16 keys of its own.
//
// Proof: dQ, dK, dV within 4 times the error of the same steps with P, dS and results in 16 bits on the CPU,
// each against f64, on odd lengths, with and without a mask, for shared K/V heads and large scores; the same
// bits when blocks run in another order. With TokenHeads: packed documents, zig-zag chunks, any order.
// Run: build/07_kernels/flash_attention_2_tensor_backward           (--gpu a100, --head-size 64, --verbose)
// Last line: PASS flash_attention_2_tensor_backward: bf16 takes 0.20 of the least that f32 without …
#include "flash_fragments.h"

enum { WARPS = 8, BLOCK = 32 * WARPS, QUERIES = 64, OWN = 16, KEYS = WARPS * OWN };
enum { FRAGMENTS = QUERIES / 8, HALF = FRAGMENTS / 2 };  // of a warp's rows of S'
enum { ROWS = 2, QUARTERS = 4 };                         // of dQ: fragments of a warp, its share of columns

// Block (rows, head, sample), eight lanes a row: delta (b, a, s) = rowsum(dO O).
template <class T, int D>
__global__ void __launch_bounds__(TILE *SIDE)
    row_products(float *delta, const T *o, const T *grad_o, Heads shape) {
    const int64_t row = blockIdx.x * TILE + threadIdx.x / SIDE;
    const int64_t from = ((blockIdx.z * shape.s + row) * shape.a + blockIdx.y) * D;
    const float sum = row_product<T, D>(o + from, grad_o + from, row < shape.s);
    if (row < shape.s && thread_x() == 0) delta[(blockIdx.z * shape.a + blockIdx.y) * shape.s + row] = sum;
}

// to (=) scale from, two numbers a thread.
template <class T>
__global__ void __launch_bounds__(BLOCK) narrow(T *to, const float *from, float scale, int64_t pairs) {
    if (element() >= pairs) return;
    const float2 x = reinterpret_cast<const float2 *>(from)[element()];
    reinterpret_cast<uint32_t *>(to)[element()] = packed<T>(x.x * scale, x.y * scale);
}

// sum (=) the warp's 16 rows of `left` by 8 N rows of a tile of queries, transposed.
template <int D, int N, class T>
__device__ static inline void keys_by_queries(float (&sum)[N][4], const T *left, const T *tile) {
#pragma unroll
    for (int j = 0; j < N; j++) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0;
#pragma unroll 2  // addresses for all steps would take registers that the sums need
    for (int k = 0; k < D; k += 16) {
        uint32_t a[4], b[4];
        load_left<D>(a, left, 0, k);
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            load_right_transposed<D>(b, tile, j * 8, k);
            multiply_pair<T>(sum[j], sum[j + 1], a, b);
        }
    }
}

// sum += p times the tile of queries.
template <int D, class T>
__device__ static inline void keys_by_columns(float (&sum)[D / 8][4], const uint32_t (&p)[QUERIES / 16][4],
                                              const T *tile) {
#pragma unroll
    for (int k = 0; k < QUERIES; k += 16)
#pragma unroll
        for (int c = 0; c < D / 8; c += 2) {
            uint32_t b[4];
            load_right<D>(b, tile, k, c * 8);
            multiply_pair<T>(sum[c], sum[c + 1], p[k / 16], b);
        }
}

// Keys of a block, from `from` up to `to`, multiples of 16, for which warps have computed dS.
struct KeyRange {
    int from, to;
};

// The tiles of queries that see a block's keys, and which of the keys they see: by order, ...
template <class Shape>
struct QueriesSeen {
    const Heads &shape;
    int first_key;
    unsigned block;

    __device__ QueriesSeen(const Heads &shape, void *, unsigned block)
        : shape(shape), first_key((int)block * KEYS), block(block) {}
    __device__ int first() const { return shape.causal ? first_key / QUERIES : 0; }
    __device__ int after(int tile) const { return tile + 1; }
    __device__ bool any(int tile) const {  // by this warp
        return !shape.causal || first_key + own_warp() * OWN < (tile + 1) * QUERIES;
    }
    __device__ KeyRange keys(int tile) const {
        return {0, shape.causal ? min(KEYS, (tile + 1) * QUERIES - first_key) : KEYS};
    }
    // Blocks that add to the tile's dQ before this one: those of later keys.
    __device__ unsigned before(int tile) const {
        return (shape.causal ? (unsigned)(tile * QUERIES / KEYS) : gridDim.x - 1) - block;
    }
    // Scores of half a tile, from fragment `half` on, that are not seen are -inf.
    __device__ void mask(float (&s)[HALF][4], int tile, int half) const {
        const int own = own_lane() % 4 * 2, key = first_key + own_warp() * OWN + own_lane() / 4;
        const int query0 = tile * QUERIES + half * 8, end = (int)shape.s;
        // of this lane's queries, the first that sees each of its two keys
        const int none = 2 * QUERIES, seen = shape.causal ? key - query0 - own : 0;
        const int from[2] = {key < end ? seen : none, key + 8 < end ? seen + 8 * shape.causal : none};
#pragma unroll
        for (int j = 0; j < HALF; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (j * 8 + e % 2 < from[e / 2]) s[j][e] = -INFINITY;
    }
};

// ... or by tokens. The plan has `before` as well, above the states.
template <>
struct QueriesSeen<TokenHeads> {
    TokenPlan<false> plan;
    int first_key;

    __device__ QueriesSeen(const TokenHeads &shape, void *room, unsigned block)
        : plan(shape, room, (int)block * KEYS), first_key((int)block * KEYS) {
        for (int tile = (int)threadIdx.x; tile < plan.count(); tile += BLOCK) {
            unsigned before = 0;
            for (int later = first_key + KEYS; later < shape.keys.s; later += KEYS)
                before += tile_state<QUERIES, KEYS>(shape, blockIdx.z, tile * QUERIES, later) != TILE_EMPTY;
            plan.tiles[tile] |= before << 4;
        }
        __syncthreads();  // the plan is complete
    }
    __device__ int first() const { return plan.next(0); }
    __device__ int after(int tile) const { return plan.next(tile + 1); }
    __device__ TileState state(int tile) const { return plan.state(tile, own_warp() * OWN / OWN_HALF); }
    __device__ bool any(int tile) const { return state(tile) != TILE_EMPTY; }
    __device__ KeyRange keys(int tile) const {
        const int exist = ((int)plan.shape.keys.s - first_key + OWN - 1) / OWN * OWN;
        return {plan.state(tile, 0) == TILE_EMPTY ? (int)OWN_HALF : 0,
                min(plan.state(tile, 1) == TILE_EMPTY ? (int)OWN_HALF : (int)KEYS, exist)};
    }
    __device__ unsigned before(int tile) const { return plan.tiles[tile] >> 4; }
    __device__ void mask(float (&s)[HALF][4], int tile, int half) const {
        if (state(tile) == TILE_PARTIAL) plan.mask(s, own_warp() * OWN, tile * QUERIES + half * 8);
    }
};

// Half of a tile of queries: s: scores (in), P' (out); ds: dP' (in), dS' without its scale (out), beginning
// with fragment `half`. rows: of each query log2e lse and, QUERIES words behind it, delta. c: scale log2e.
__device__ static inline void to_gradients(float (&s)[HALF][4], float (&ds)[FRAGMENTS][4], int half,
                                           const float *rows, float c) {
    const int own = own_lane() % 4 * 2;
#pragma unroll
    for (int j = 0; j < HALF; j++) {
        const float2 sum = *reinterpret_cast<const float2 *>(rows + j * 8 + own);
        const float2 delta = *reinterpret_cast<const float2 *>(rows + QUERIES + j * 8 + own);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float p = s[j][e] = power_of_2(fmaf(s[j][e], c, -(e % 2 ? sum.y : sum.x)));
            ds[half + j][e] = p * (ds[half + j][e] - (e % 2 ? delta.y : delta.x));
        }
    }
}

// dq (= by the first block, += by others) dS K over these keys: a warp has 32 of the queries, and a quarter
// of the columns.
template <int D, class T>
__device__ static inline void add_dq(float *dq, const T *tile_ds, const T *tile_k, KeyRange keys,
                                     bool first, int query0, int end, int64_t stride) {
    constexpr int C = D / QUARTERS;
    const int part = own_warp() % QUARTERS * C, row0 = own_warp() / QUARTERS * ROWS * 16;
    float sum[ROWS][C / 8][4] = {};
#pragma unroll 1
    for (int k = keys.from; k < keys.to; k += 16) {
        uint32_t a[ROWS][4], b[4];
#pragma unroll
        for (int i = 0; i < ROWS; i++) load_left_transposed<QUERIES>(a[i], tile_ds, row0 + i * 16, k);
#pragma unroll
        for (int c = 0; c < C / 8; c += 2) {
            load_right<D>(b, tile_k, k, part + c * 8);
#pragma unroll
            for (int i = 0; i < ROWS; i++) multiply_pair<T>(sum[i][c], sum[i][c + 1], a[i], b);
        }
    }
    // What others have added is loaded before anything is stored: all of it is in flight at once.
    float2 *out[ROWS * 2], before[ROWS * 2][C / 8];
#pragma unroll
    for (int i = 0; i < ROWS * 2; i++) {
        const int row = query0 + row0 + i * 8 + own_lane() / 4;
        out[i] = reinterpret_cast<float2 *>(dq + row * stride + part + own_lane() % 4 * 2);
        if (row >= end) out[i] = NULL;
#pragma unroll
        for (int c = 0; c < C / 8; c++) before[i][c] = first || !out[i] ? make_float2(0, 0) : out[i][c * 4];
    }
#pragma unroll
    for (int i = 0; i < ROWS * 2; i++)
#pragma unroll
        for (int c = 0; c < C / 8; c++) {
            const float *x = &sum[i / 2][c][i % 2 * 2];
            if (out[i]) out[i][c * 4] = make_float2(before[i][c].x + x[0], before[i][c].y + x[1]);
        }
}

// Begins to copy a tile of queries and their dO, and loads the words of their rows.
template <class Shape, int D, class T>
__device__ static inline void copy_queries(T *tile, float *rows, const T *q, const T *grad_o,
                                           const float *lse, const float *delta, int query0, int end,
                                           int64_t stride) {
    copy_rows<QUERIES, D, BLOCK>(tile, q, query0, end, stride);
    copy_rows<QUERIES, D, BLOCK>(tile + QUERIES * D, grad_o, query0, end, stride);
    cp_async_commit();
    const int row = query0 + (int)threadIdx.x % QUERIES;
    if (threadIdx.x < QUERIES)  // no weight beyond the end
        rows[threadIdx.x] = row < end ? log_sum_of<Shape>(lse[row]) * LOG2E : INFINITY;
    else if (threadIdx.x < 2 * QUERIES) rows[threadIdx.x] = row < end ? delta[row] : 0;
}

// Block (keys, K/V head, sample); a ticket says which keys. dq: f32, without its scale.
template <class T, int D, class Shape>
__global__ void __launch_bounds__(BLOCK, 1)
    attention_backward(float *dq, GradientsIn<T> grad, OperandsIn<T> in, const float *delta, Order order,
                       Shape shape) {
    DYNAMIC_SHARED(T, tile_k);
    T *tile_v = tile_k + KEYS * D, *tiles = tile_v + KEYS * D, *tile_ds = tiles + 4 * QUERIES * D;
    __shared__ float rows[2][2 * QUERIES];
    __shared__ unsigned ticket;
    if (threadIdx.x == 0) ticket = atomicAdd(&order.tickets[blockIdx.z * shape.kv + blockIdx.y], 1u);
    __syncthreads();
    const unsigned block = gridDim.x - 1 - ticket;  // the last keys first
    const int end = (int)shape.s, key_end = (int)keys_of(shape);
    const int query_tiles = (end + QUERIES - 1) / QUERIES;
    const int first_key = (int)block * KEYS, own = own_warp() * OWN;
    const int64_t first = blockIdx.z * shape.s, stride = shape.a * D, key_stride = shape.kv * D;
    const int64_t key_head = blockIdx.z * keys_of(shape) * key_stride + blockIdx.y * D;
    // tiles of queries that see these keys, of all heads that share them, one head after another
    const QueriesSeen<Shape> seen(shape, tile_ds + KEYS * QUERIES, block);
    const int group = (int)(shape.a / shape.kv), first_tile = seen.first();
    const auto copy = [&](int stage, int64_t head, int tile) {
        const int64_t base = first * stride + head * D, row = (blockIdx.z * shape.a + head) * shape.s;
        copy_queries<Shape, D>(tiles + stage * 2 * QUERIES * D, rows[stage], in.q + base, in.grad_o + base,
                               in.lse + row, delta + row, tile * QUERIES, end, stride);
    };
    copy_rows<KEYS, D, BLOCK>(tile_k, in.k + key_head, first_key, key_end, key_stride);
    copy_rows<KEYS, D, BLOCK>(tile_v, in.v + key_head, first_key, key_end, key_stride);
    copy(0, blockIdx.y * group, first_tile);
    cp_async_wait<0>();
    __syncthreads();  // the tiles are there
    float dk[D / 8][4] = {}, dv[D / 8][4] = {};
    int head = (int)blockIdx.y * group, tile = first_tile, stage = 0;
    const int last_head = first_tile < query_tiles ? head + group : head;  // by tokens, there may be none
    for (; head < last_head; stage ^= 1) {
        const T *tile_q = tiles + stage * 2 * QUERIES * D, *tile_do = tile_q + QUERIES * D;
        const int after = seen.after(tile), next = after < query_tiles ? after : first_tile;
        const int next_head = next == first_tile ? head + 1 : head;
        if (next_head < last_head) copy(stage ^ 1, next_head, next);
        if (seen.any(tile)) {  // if not, no query of the tile sees these keys
            float ds[FRAGMENTS][4];
            uint32_t p[QUERIES / 16][4];
            keys_by_queries<D>(ds, tile_v + own * D, tile_do);
#pragma unroll
            for (int half = 0; half < FRAGMENTS; half += HALF) {  // all of S' does not fit into registers
                float s[HALF][4];
                keys_by_queries<D>(s, tile_k + own * D, tile_q + half * 8 * D);
                seen.mask(s, tile, half);
                to_gradients(s, ds, half, rows[stage] + half * 8, shape.scale * LOG2E);
#pragma unroll
                for (int j = 0; j < HALF; j += 2) to_left<T>(p[(half + j) / 2], s[j], s[j + 1]);
            }
            keys_by_columns<D>(dv, p, tile_do);
#pragma unroll
            for (int j = 0; j < FRAGMENTS; j += 2) to_left<T>(p[j / 2], ds[j], ds[j + 1]);
            put_rows<QUERIES>(tile_ds + own * QUERIES, ds, 1, 1);
            keys_by_columns<D>(dk, p, tile_q);
        }
        const unsigned before = seen.before(tile);
        unsigned *turn = order.turns + (blockIdx.z * shape.a + head) * query_tiles + tile;
        if (threadIdx.x == 0) wait_for_turn(turn, before);
        __syncthreads();  // dS is complete, and it is this block's turn
        add_dq<D>(dq + first * stride + (int64_t)head * D, tile_ds, tile_k, seen.keys(tile), before == 0,
                  tile * QUERIES, end, stride);
        cp_async_wait<0>();
        __syncthreads();  // all threads have added, and read the tiles; the next ones are there
        if (threadIdx.x == 0) pass_on(turn);
        head = next_head, tile = next;
    }
    put_rows<D>(tile_k + own * D, dk, shape.scale, shape.scale);
    put_rows<D>(tile_v + own * D, dv, 1, 1);
    __syncwarp();
    store_tile<OWN, D>(grad.dk + key_head, tile_k + own * D, first_key + own, key_end, key_stride);
    store_tile<OWN, D>(grad.dv + key_head, tile_v + own * D, first_key + own, key_end, key_stride);
}

// ---- host code ----

constexpr int64_t shared_bytes(int d) {
    return 2 * (int64_t)(2 * KEYS * d + 4 * QUERIES * d + KEYS * QUERIES);
}

// The gradients from delta; room: b a s d words for the sum of dQ, and b (a tiles + kv) counters.
template <class T, int D, class Shape>
static void launch_on(cudaStream_t stream, const GradientsIn<T> &grad, const OperandsIn<T> &in,
                      const float *delta, float *room, const Shape &shape) {
    const int64_t count = shape.b * shape.s * shape.a * D, keys = keys_of(shape);
    const int64_t tiles = (shape.s + QUERIES - 1) / QUERIES;
    const int64_t bytes = shared_bytes(D) + plan_bytes(shape, tiles);
    const auto kernel = attention_backward<T, D, Shape>;
    unsigned *turns = reinterpret_cast<unsigned *>(room + count);
    const Order order = {turns + shape.b * shape.a * tiles, turns};
    const size_t counters = (size_t)(shape.b * (shape.a * tiles + shape.kv));
    CUDA_CHECK(cudaMemsetAsync(turns, 0, counters * sizeof *turns, stream));
    if (Shape::EMPTY_ROWS)  // no block reaches queries that see no key
        CUDA_CHECK(cudaMemsetAsync(room, 0, (size_t)count * sizeof *room, stream));
    allow_shared(kernel, bytes);
    const dim3 grid((unsigned)((keys + KEYS - 1) / KEYS), (unsigned)shape.kv, (unsigned)shape.b);
    LAUNCH(kernel, grid, BLOCK, (size_t)bytes, stream, room, grad, in, delta, order, shape);
    LAUNCH((narrow<T>), (unsigned)((count / 2 + BLOCK - 1) / BLOCK), BLOCK, 0, stream, grad.dq, room,
           shape.scale, count / 2);
}

#ifndef NO_MAIN
#include "attention_masks.h"
#include "flash_work.h"

// room: backward_room(shape, D) words.
template <class T, int D, class Shape>
static void launch(const GradientsIn<T> &grad, const OperandsIn<T> &in, float *room, const Shape &shape) {
    if (shape.s == 0) return;
    float *delta = room + shape.b * shape.a * shape.s * (D + 2);
    const dim3 grid((unsigned)((shape.s + TILE - 1) / TILE), (unsigned)shape.a, (unsigned)shape.b);
    LAUNCH((row_products<T, D>), grid, TILE * SIDE, 0, 0, delta, in.o, in.grad_o, shape);
    launch_on<T, D>(0, grad, in, delta, room, shape);
}

template <class T, int D>
static void row(const char *name, const Heads &at_size) {
    if (at_size.causal) {
        masks_hold(name, prove_masked_backward<T>(D, KEYS, launch<T, D, TokenHeads>));
        products_of_tiles<T>(name, D, 5, [](T *x, T *dx, float *lse, float *room, const TokenHeads &shape) {
            const int64_t count = shape.s * D;
            launch<T, D>({dx, dx + count, dx + 2 * count}, {x, x, x, x, lse, x}, room, shape);
        });
    }
    const KernelVersion version = {name, BLOCK, D == 64 ? 237 : 255, shared_bytes(D)};
    backward_version<T>(version, at_size, D, KEYS, launch<T, D, Heads>, work_of_tensor_backward);
}

template <int D>
static void show(const KernelsOptions *options, const Heads &shape) {
    flash_tables_16(options, shape, D, 2, row<__nv_bfloat16, D>, row<__half, D>);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int head;
    const Heads shape = flash_options(argc, argv,
                                      "FlashAttention-2 on tensor cores, backward, in 16 bits.\n"
                                      "  flash_attention_2_tensor_backward --head-size 64",
                                      KEYS, &options, &head);
    if (head == 128) show<128>(&options, shape);
    else show<64>(&options, shape);
    return tensor_verdict(&options, shape, head, 2, work_of_tensor_backward(shape, head));
}
#endif
