// flash_attention_3_backward.cu: the gradients of FlashAttention-3, in bf16 and fp16 with f32 sums, by TMA
// and wgmma (H100). Playbook: "Flash Attention 1-3"; Shah et al., "FlashAttention-3", 2024, appendix B.1.
//
// Changes from flash_attention_2_tensor_backward.cu: the same five products, tickets, turns and order of
// sums. A block has 128 keys, and each of two consumer warpgroups 64 of them; it takes 64 queries at a time,
// or 128 where heads are of 64. Scores are computed with keys as rows:
//
//     S'  = K Q'     P'  = 2^(c S' - log2e lse)      dV += P' dO      P', dS' in 16 bits, from registers
//     dP' = V dO'    dS' = P' (dP' - delta)          dK += dS' Q
//                                                    dQ  = dS K       by way of shared memory
//
// wgmma reads Q, dO and K as rows or as columns, and dS', whose rows are keys, transposed. dQ is a sum over
// all keys; each warpgroup computes half of it: 64 of the columns, or 64 of the queries. The roles:
//
//     producer       wait empty[t];  copy Q, dO, lse, delta of the next tile to stage t, bytes at full[t]
//     consumers      wait full[t];  S', dP';  P' while dP' is in flight;  dS', stored |  dV, dK, dQ;
//                    arrive at empty[t];  wait come;  add dQ;  arrive at added
//     turn keeper    wait for this block's turn;  arrive at come;  wait added;  fence, pass the turn on
//
// |: a barrier of the consumers, the only one in a step, since dS has two buffers. No consumer fences or
// waits for a turn itself. dQ is summed in f32 in memory, in the order of fragments, so a warp adds 128
// bytes at a time: the first block stores, others add without reading (red), and the last rounds to 16 bits,
// for which the second version has a separate kernel. So L2 moves two thirds of the bytes.
//
// A step, 2^13 numbers of Q, takes 2560 clocks of an H100's tensor cores and 2692 of its shared memory, 2824
// with heads of 64, of which 256 or 512 are for lse and delta. With mma it takes 6532. Only a GPU can show
// what overlaps. Extra memory: the sums, 4 d bytes for a row and head; lse and delta; turns and tickets.
//
// With TokenHeads (flash_mask.h), a block skips tiles of queries that see none of its keys: the turn keeper
// looks up which block comes before this one, and tells the consumers whether they are first or last.
//
// Proof: as for the second version; flash_work.h has the formulas of both.
// Run: build/07_kernels/flash_attention_3_backward           (--head-size 64, --size 8192, --verbose)
// Last line: PASS flash_attention_3_backward: wgmma takes 0.41 of the modelled time of mma, and 0.68 of …
#include "flash_backward_roles.h"

// Block (rows, head, sample), eight lanes a row: by tiles of queries, log2e lse of their rows and, behind
// these, delta = rowsum(dO O). A row behind the last query has no weight.
template <class T, int D, class Shape>
__global__ void __launch_bounds__(TILE *SIDE) prepare_rows(float *rows, OperandsIn<T> in, Shape shape) {
    const int64_t row = blockIdx.x * TILE + threadIdx.x / SIDE, head = blockIdx.z * shape.a + blockIdx.y;
    const int64_t from = ((blockIdx.z * shape.s + row) * shape.a + blockIdx.y) * D;
    const bool exists = row < shape.s;
    const float delta = row_product<T, D>(in.o + from, in.grad_o + from, exists);
    float *to = rows + (head * gridDim.x * TILE + row) * 2 - row % QUERIES<D>;
    if (thread_x() != 0) return;
    to[0] = exists ? log_sum_of<Shape>(in.lse[head * shape.s + row]) * LOG2E : INFINITY;
    to[QUERIES<D>] = delta;
}

// ---- products: groups of wgmma, in flight ----

// s (=) the warpgroup's rows of K or V by a tile of Q or dO.
template <class T, int D>
__device__ static inline void issue_scores(float (&s)[QUERIES<D> / 2], const char *keys, const char *tile) {
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < D / 16; x++)
        wgmma<T, K_MAJOR, K_MAJOR>(s, wgmma_operand(keys + x / 4 * BOX + x % 4 * 32, 0),
                                   wgmma_operand(tile + x / 4 * QUERY_BOX<D> + x % 4 * 32, 0), x > 0);
    wgmma_commit();
}

// sum += p times a tile of Q or dO.
template <class T, int D>
__device__ static inline void issue_columns(float (&sum)[D / 2], const uint32_t (&p)[QUERIES<D> / 16][4],
                                            const char *tile) {
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < QUERIES<D> / 16; x++)
        wgmma<T, MN_MAJOR>(sum, p[x], wgmma_operand(tile + x * 16 * TILE_ROW, QUERY_BOX<D>), true);
    wgmma_commit();
}

// share (=) 64 queries of dS by 64 columns of K, of all keys.
template <class T>
__device__ static inline void issue_dq(float (&share)[32], const char *ds, const char *k) {
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < KEYS / 16; x++)
        wgmma<T, MN_MAJOR, MN_MAJOR>(share, wgmma_operand(ds + x * 16 * TILE_ROW, 0),
                                     wgmma_operand(k + x * 16 * TILE_ROW, 0), x > 0);
    wgmma_commit();
}

// ---- between the products, in registers ----

// This lane's pair of every eight, the j-th, of what TMA has copied for rows, and swizzled.
__device__ static inline float2 pair_of(const char *rows, int j) {
    return *reinterpret_cast<const float2 *>(rows + (own_lane() % 4 * 8 ^ j * 32 ^ j / 4 % 8 * 16));
}

// What a query does not see is -inf, of a warp's 16 keys from key0 on.
template <int D>
__device__ static inline void mask(float (&s)[QUERIES<D> / 2], const Heads &shape, int, int query0,
                                   int key0) {
    const int key = key0 + own_lane() / 4, end = (int)shape.s, none = 2 * KEYS;
    // of this lane's queries, the first that sees each of its two keys
    const int seen = shape.causal ? key - query0 - own_lane() % 4 * 2 : 0;
    const int from[2] = {key < end ? seen : none, key + 8 < end ? seen + 8 * shape.causal : none};
#pragma unroll
    for (int i = 0; i < QUERIES<D> / 2; i++)
        if (i / 4 * 8 + i % 2 < from[i / 2 % 2]) s[i] = -INFINITY;
}
template <int D>
__device__ static inline void mask(float (&s)[QUERIES<D> / 2], const TokenHeads &shape, int sample,
                                   int query0, int key0) {
    const int key = key0 + own_lane() / 4, first = query0 + own_lane() % 4 * 2;
    const Token keys[2] = {key_at(shape, sample, key), key_at(shape, sample, key + 8)};
#pragma unroll
    for (int j = 0; j < QUERIES<D> / 4; j++) {
        const Token query = query_at(shape, sample, first + j / 2 * 8 + j % 2);
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (!sees(shape, query, keys[half])) s[j / 2 * 4 + 2 * half + j % 2] = -INFINITY;
    }
}

// s: scores (in), P' (out); what a query does not see has no weight.
template <int D>
__device__ static inline void to_weights(float (&s)[QUERIES<D> / 2], const char *rows, float scale) {
    const float c = scale * LOG2E;
#pragma unroll
    for (int j = 0; j < QUERIES<D> / 8; j++) {
        const float2 sum = pair_of(rows, j);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i++) s[i] = power_of_2(fmaf(s[i], c, -(i % 2 ? sum.y : sum.x)));
    }
}

// A lane's part of the scores is also its part of left operands: p (=) P', ds (=) dS' without its scale.
template <class T, int D>
__device__ static inline void to_gradients(uint32_t (&p)[QUERIES<D> / 16][4],
                                           uint32_t (&ds)[QUERIES<D> / 16][4],
                                           const float (&s)[QUERIES<D> / 2],
                                           const float (&dp)[QUERIES<D> / 2], const char *rows) {
#pragma unroll
    for (int j = 0; j < QUERIES<D> / 8; j++) {
        const float2 delta = pair_of(rows, QUERIES<D> / 8 + j);
#pragma unroll
        for (int i = 2 * j; i < 2 * j + 2; i++) {
            const float x = s[2 * i] * (dp[2 * i] - delta.x), y = s[2 * i + 1] * (dp[2 * i + 1] - delta.y);
            p[i / 4][i % 4] = packed<T>(s[2 * i], s[2 * i + 1]), ds[i / 4][i % 4] = packed<T>(x, y);
        }
    }
}

// ---- dQ, in memory ----

// The block's share of a tile of dQ: sums (=), if it adds first, or (+=), in the order of fragments.
__device__ static inline void add_dq(float *sums, const float (&share)[32], bool first) {
    if (first)
#pragma unroll
        for (int i = 0; i < 32; i++) sums[i * 32] = share[i];
    else
#pragma unroll
        for (int i = 0; i < 32; i++) add_without_reading(&sums[i * 32], share[i]);
}

// The last one to add: rows of dq (=) scale times all. query0: of the warp.
template <class T>
__device__ static inline void finish_dq(T *dq, const float *sums, float (&share)[32], bool first,
                                        const Heads &shape, int query0, int64_t stride) {
#pragma unroll
    for (int i = 0; i < 32; i++) share[i] = (share[i] + (first ? 0 : sums[i * 32])) * shape.scale;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int query = query0 + i % 2 * 8 + own_lane() / 4;
        if (query < shape.s)
            *reinterpret_cast<uint32_t *>(dq + query * stride + i / 2 * 8 + own_lane() % 4 * 2) =
                packed<T>(share[2 * i], share[2 * i + 1]);
    }
}

// ---- the consumers ----

// Adds up dk and dv. dq: of the sample; sums: of all tiles.
template <class T, int D, class Shape>
__device__ static inline void consume(float (&dk)[D / 2], float (&dv)[D / 2], const Shared &m, T *dq,
                                      float *sums, const Shape &shape) {
    // wgmma's descriptors are in uniform registers: the compiler must see the same value in all lanes.
    const int group = __shfl_sync(~0u, own_group(), 0), own = group * OWN * TILE_ROW;
    const int part = group % (QUERIES<D> / 64);  // of the queries; where there is one, of the columns of K
    const int key0 = m.block * KEYS + own_warp() * 16;
    auto w = steps_of<D>(m, shape);
    for (int i = 0; more(w); i++, step<D>(&w, m, shape)) {
        float s[QUERIES<D> / 2], dp[QUERIES<D> / 2], share[32];
        uint32_t p[QUERIES<D> / 16][4], ds[QUERIES<D> / 16][4];
        const char *tile_q = m.stages + i % STAGES * STAGE, *tile_do = tile_q + TILE_BYTES;
        const char *rows = tile_do + TILE_BYTES;
        char *tile_ds = m.ds + i % 2 * (QUERIES<D> / 64) * BOX;
        mbarrier_wait(&m.full[i % STAGES], i / STAGES % 2);
        issue_scores<T, D>(s, m.k + own, tile_q);
        issue_scores<T, D>(dp, m.v + own, tile_do);
        wgmma_wait<1>(s);
        if (needs_mask(shape, w.tiles, w.tiles.at, key0, 16)) mask<D>(s, shape, m.sample, w.tiles.at, key0);
        to_weights<D>(s, rows, shape.scale);
        // This phase has ended long ago. The wait is here for its loop: without it ptxas moves the next wait
        // ahead of all exponentials, with it ahead of half of them. (With TokenHeads it would spill a
        // register.)
        if (!Shape::EMPTY_ROWS) mbarrier_wait(&m.full[i % STAGES], i / STAGES % 2);
        wgmma_wait<0>(dp);
        to_gradients<T, D>(p, ds, s, dp, rows);
#pragma unroll
        for (int x = 0; x < QUERIES<D> / 4; x++) *pair_of_rows(tile_ds, x) = ds[x / 4][x % 4];
        fence_proxy_async();
        issue_columns<T, D>(dv, p, tile_do);
        issue_columns<T, D>(dk, ds, tile_q);
        named_barrier(1, GROUPS * WARPGROUP);  // dS is complete, and the one before it has been read
        issue_dq<T>(share, tile_ds + part * BOX, m.k + (group - part) * BOX);
        wgmma_wait<1>();  // dV and dK have read the stage
        if (own_lane() == 0) mbarrier_arrive(&m.empty[i % STAGES]);
        wgmma_wait<0>(share);
        mbarrier_wait(m.come, i % 2);
        const Adder adder = adder_of<D>(m, shape, w.tiles.at);
        const int query0 = w.tiles.at + part * 64 + own_warp() % 4 * 16;
        float *own_sums = sums + number<D>(m, w) * NUMBERS + own_warp() * 32 * 32 + own_lane();
        if (!adder.last) add_dq(own_sums, share, adder.first);
        else
            finish_dq(dq + w.head * D + (group - part) * COLUMNS, own_sums, share, adder.first, shape,
                      query0, shape.a * D);
        __syncwarp();
        if (own_lane() == 0) mbarrier_arrive(m.added);
    }
    wgmma_wait<0>(dk);
    wgmma_wait<0>(dv);
}

// Block (keys, K/V head, sample); a ticket says which keys. Of the 168 registers of a thread, a producer
// keeps 40, and a consumer has 232.
template <class T, int D, class Shape>
__global__ void __launch_bounds__(BLOCK, 1)
    attention_backward(GradientsIn<T> grad, float *sums, Order order, const __grid_constant__ Maps maps,
                       Shape shape) {
    DYNAMIC_SHARED(char, memory);
    __shared__ Mbarrier keys;
    __shared__ Mbarrier full[STAGES];
    __shared__ Mbarrier empty[STAGES];
    __shared__ Mbarrier come;
    __shared__ Mbarrier added;
    __shared__ Adder adder;
    __shared__ int ticket;
    if (threadIdx.x == 0) {
        mbarrier_init(&keys, 1), mbarrier_init(&come, 1), mbarrier_init(&added, GROUPS * 4);
        for (int t = 0; t < STAGES; t++) mbarrier_init(&full[t], 1), mbarrier_init(&empty[t], GROUPS * 4);
        fence_proxy_async();
        ticket = (int)atomicAdd(&order.tickets[blockIdx.z * shape.kv + blockIdx.y], 1u);
    }
    __syncthreads();
    const int block = (int)gridDim.x - 1 - ticket, end = (int)keys_of(shape);  // the last keys first
    const int group = (int)(shape.a / shape.kv), sample = (int)blockIdx.z;
    char *k = first_tile(memory), *v = k + D / COLUMNS * BOX, *stages = v + D / COLUMNS * BOX;
    const Shared m = {k,
                      v,
                      stages,
                      stages + STAGES * STAGE,
                      full,
                      empty,
                      &come,
                      &added,
                      &adder,
                      block,
                      sample,
                      group,
                      ((int)shape.s + QUERIES<D> - 1) / QUERIES<D>};
    if (own_group() == GROUPS) {
        registers_give<40>();
        if (threadIdx.x == GROUPS * WARPGROUP) copy_keys<D>(m, maps, (int)blockIdx.y * D, &keys);
        if (own_warp() == GROUPS * 4) produce<D>(m, maps, shape);
        else if (own_warp() == GROUPS * 4 + 1) keep_turns<D>(m, order.turns, shape);
    } else {
        registers_take<232>();
        const int64_t stride = shape.kv * D, key0 = block * KEYS + own_warp() * 16;
        const int64_t rows = ((int64_t)sample * end + key0) * stride + blockIdx.y * D;
        float dk[D / 2] = {}, dv[D / 2] = {};
        mbarrier_wait(&keys, 0);
        consume<T, D>(dk, dv, m, grad.dq + sample * shape.s * shape.a * D, sums, shape);
        named_barrier(1, GROUPS * WARPGROUP);  // nobody needs the keys any more
#pragma unroll
        for (int i = 0; i < D / 2; i++) dk[i] *= shape.scale;
        store_by_tile<D>(grad.dk + rows, k, dk, end - (int)key0, stride);
        store_by_tile<D>(grad.dv + rows, v, dv, end - (int)key0, stride);
    }
}

// ---- host code ----

constexpr int64_t shared_bytes(int d) {  // K and V, the stages, dS twice
    return 2 * KEYS * (2 * (int64_t)d + 2 * NUMBERS / d) + STAGES * STAGE + TILE_ALIGNMENT;
}

#ifndef NO_MAIN
#include "attention_tiles.h"
#include "flash_work.h"

// room: backward_room(shape, D) words.
template <class T, int D, class Shape>
static void launch(const GradientsIn<T> &grad, const OperandsIn<T> &in, float *room, const Shape &shape) {
    if (shape.s == 0) return;
    const auto kernel = attention_backward<T, D, Shape>;
    const int64_t heads = shape.b * shape.a, stride = shape.a * D;
    const int64_t tiles = (shape.s + QUERIES<D> - 1) / QUERIES<D>;
    const int64_t keys = keys_of(shape), key_stride = shape.kv * D;
    const int lines = QUERIES<D> * 8 / TILE_ROW, bytes = (int)shared_bytes(D);
    float *rows = room + heads * tiles * NUMBERS;
    unsigned *turns = reinterpret_cast<unsigned *>(rows + heads * tiles * QUERIES<D> * 2);
    const Order order = {turns + heads * tiles, turns};
    const Maps maps = {
        tensor_map(in.q, shape.s, stride, stride, QUERIES<D>, shape.b),
        tensor_map(in.k, keys, key_stride, key_stride, KEYS, shape.b),
        tensor_map(in.v, keys, key_stride, key_stride, KEYS, shape.b),
        tensor_map(in.grad_o, shape.s, stride, stride, QUERIES<D>, shape.b),
        tensor_map(reinterpret_cast<const T *>(rows), heads * tiles * lines, COLUMNS, COLUMNS, lines)};
    const dim3 each_row((unsigned)(tiles * QUERIES<D> / TILE), (unsigned)shape.a, (unsigned)shape.b);
    const dim3 grid((unsigned)((keys + KEYS - 1) / KEYS), (unsigned)shape.kv, (unsigned)shape.b);
    CUDA_CHECK(cudaMemsetAsync(turns, 0, (size_t)(heads * tiles + shape.b * shape.kv) * sizeof *turns, 0));
    if (Shape::EMPTY_ROWS)  // no block adds to queries that see no key
        CUDA_CHECK(cudaMemsetAsync(grad.dq, 0, (size_t)(shape.b * shape.s * stride) * sizeof(T), 0));
    LAUNCH((prepare_rows<T, D, Shape>), each_row, TILE * SIDE, 0, 0, rows, in, shape);
    allow_shared(kernel, bytes);
    LAUNCH(kernel, grid, BLOCK, (size_t)bytes, 0, grad, room, order, maps, shape);
}

// With masks by tokens.
template <class T, int D>
static void prove_masks() {
    const int64_t most = 4 * KEYS * 2 * D;  // numbers of what these two take
    const Numbers<T> x(most, 4);
    Array<T> numbers(x.narrow.data(), most), dq(most), dk(most / 2), dv(most / 2);
    Array<float> lse(x.exact.data(), most / D), room(backward_room({1, 4 * KEYS, 2, 1, 1, 0}, D));
    const auto run = [&](const auto &shape) {
        const T *in = numbers.at;
        launch<T, D>({dq.at, dk.at, dv.at}, {in, in, in, in, lse.at, in}, room.at, shape);
        std::vector<float> all = in_f32(dq);
        all.resize((size_t)(shape.s * shape.a * D));
        for (const auto &gradient : {in_f32(dk), in_f32(dv)})
            all.insert(all.end(), gradient.begin(), gradient.begin() + shape.s * D);
        return all;
    };
    prove_full_tiles("backward", KEYS, D, run);
    masks_hold("backward", prove_masked_backward<T>(D, KEYS, launch<T, D, TokenHeads>));
}

template <class T, int D>
static void row(const char *name, const Heads &at_size) {
    const KernelVersion version = {name, BLOCK, 168, shared_bytes(D)};
    backward_version<T>(version, at_size, D, KEYS, launch<T, D, Heads>, work_of_hopper_backward);
}

template <int D>
static void show(const KernelsOptions *options, const Heads &shape) {
    flash_tables_16(options, shape, D, 2, row<__nv_bfloat16, D>, row<__half, D>);
    prove_masks<__nv_bfloat16, D>();
    prove_masks<__half, D>();
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int head;
    const Heads shape = flash_options(argc, argv,
                                      "FlashAttention-3 by TMA and wgmma, backward, in 16 bits.\n"
                                      "  flash_attention_3_backward --head-size 64",
                                      KEYS, &options, &head);
    need_hopper(&options, "flash_attention_3_backward");
    if (head == 128) show<128>(&options, shape);
    else show<64>(&options, shape);
    return hopper_backward_verdict(shape, head);
}
#endif
