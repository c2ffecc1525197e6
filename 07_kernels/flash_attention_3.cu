// flash_attention_3.cu: FlashAttention-3, forward, in bf16 and fp16 with f32 sums, using TMA and wgmma
// (H100). Playbook: "Flash Attention 1-3"; Shah et al., "FlashAttention-3", 2024, sections 3.1 and 3.2.
//
// Changes from flash_attention_2_tensor.cu: the same bytes, products and softmax, but overlapped. A block has
// three warpgroups. The producer, one thread of a warpgroup that gives its registers to the others, requests
// tiles of 128 keys (TMA), which land in a ring of four: K, V, K, V. Two consumers of 64 queries each
// multiply with wgmma: Q, K and V come from shared memory, P from registers, where softmax left it.
//
//     producer    wait empty[t], parity 1 - turn;   expect bytes at full[t];   copy to t
//     consumer    wait full[t], parity turn;   multiply;   when that is done, arrive at empty[t]
//
// Exponentials are slow: for a tile and heads of 128, an H100's tensor cores are busy for 2048 clocks, and
// its special-function units for 1056. A warpgroup needs one after the other, so two take turns (ping-pong):
//
//     warpgroup 0    Q K1', P0 V0   softmax 1      Q K2', P1 V1   softmax 2
//     warpgroup 1    softmax 0      Q K1', P0 V0   softmax 1      Q K2', P1 V1
//
// The tensor cores nearly always have work (with heads of 128), and one's products hide the other's softmax.
// The turn, an mbarrier, is passed on once the products are issued. P0 V0 is in flight while softmax 1
// begins; then O is rescaled.
//
// wgmma reads K and V once for four warps, mma once for each: shared memory takes 0.88 of the tensor cores'
// clocks instead of 1.5 times as many. A tile on the diagonal is 128 keys wide, not 64: 1.5% more products
// with a causal mask. The table's time is that of the busiest part, with and without turns.
//
// Proof: as for flash_attention_2_tensor.cu, up to three tiles of keys, with which the ring wraps around.
// TokenHeads (flash_mask.h): empty tiles are neither copied nor multiplied, full ones look at no token.
// Run: build/07_kernels/flash_attention_3           (--head-size 64, --size 8192, --verbose)
// Last line: PASS flash_attention_3: the busiest part takes 0.66 of products and exponentials one by one …
#include "flash_warpgroups.h"

template <int D>
constexpr int BOXES = D / COLUMNS;  // of a tile

// ---- products ----

// s (=) the warpgroup's queries by tile i of the keys: a group of wgmma, in flight.
template <class T, int D>
__device__ static inline void issue_scores(float (&s)[KEYS / 2], const Shared &m, int i) {
    const char *q = m.q + own_group() * OWN * TILE_ROW;
    const char *k = m.ring + 2 * i % STAGES * BOXES<D> * BOX;
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < D / 16; x++) {
        const int at = x / 4 * BOX + x % 4 * 32;
        wgmma<T, K_MAJOR, K_MAJOR>(s, wgmma_operand(q + at, 0), wgmma_operand(k + at, 0), x > 0);
    }
    wgmma_commit();
}

// sum += p times tile i of the values: a group, in flight.
template <class T, int D>
__device__ static inline void issue_values(float (&sum)[D / 2], const uint32_t (&p)[KEYS / 16][4],
                                           const Shared &m, int i) {
    const char *v = m.ring + (2 * i + 1) % STAGES * BOXES<D> * BOX;
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < KEYS / 16; x++)
        wgmma<T, MN_MAJOR>(sum, p[x], wgmma_operand(v + x * 16 * TILE_ROW, BOX), true);
    wgmma_commit();
}

// What a lane has of the scores is what it needs of the left operand: p (=) s in 16 bits.
template <class T>
__device__ static inline void pack(uint32_t (&p)[KEYS / 16][4], const float (&s)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) p[i / 4][i % 4] = packed<T>(s[2 * i], s[2 * i + 1]);
}

// ---- the consumers ----

// Without turns: one step after another.
template <class T, int D, class Shape>
__device__ static inline void consume(float (&sum)[D / 2], Softmax *x, const Shared &m, const Shape &shape,
                                      int block_query) {
    float s[KEYS / 2];
    uint32_t p[KEYS / 16][4];
    auto w = keys_seen(shape, x->sample, block_query);
    for (int i = 0; more(w); i++, step(&w, shape, x->sample, block_query)) {
        await(m, 2 * i);
        issue_scores<T, D>(s, m, i);
        wgmma_wait<0>(s);
        release(m, 2 * i);
        soften(s, x, shape, w);
        rescale<D>(sum, *x);
        pack<T>(p, s);
        await(m, 2 * i + 1);
        issue_values<T, D>(sum, p, m, i);
        wgmma_wait<0>(sum);
        release(m, 2 * i + 1);
    }
}

// In turn i a warpgroup issues Q K' of tile i and P V of tile i - 1. It waits for the values of tile i
// before it waits for P V of tile i - 1: ptxas moves a wait for wgmma ahead of arithmetic, but not across
// the loop of an mbarrier's wait. Without that loop the exponentials would start only after P V.
template <class T, int D, class Shape>
__device__ static inline void consume_in_turns(float (&sum)[D / 2], Softmax *x, const Shared &m,
                                               const Shape &shape, int block_query) {
    float s[KEYS / 2];
    uint32_t p[KEYS / 16][4];
    auto w = keys_seen(shape, x->sample, block_query);
    if (Shape::EMPTY_ROWS && !more(w)) return;
    await(m, 0);
    take_turn(m, 0);
    issue_scores<T, D>(s, m, 0);
    pass_turn(m);
    wgmma_wait<0>(s);
    release(m, 0);
    soften(s, x, shape, w);
    pack<T>(p, s);
    await(m, 1);
    step(&w, shape, x->sample, block_query);
    int i = 1;
    for (; more(w); i++, step(&w, shape, x->sample, block_query)) {
        await(m, 2 * i);
        take_turn(m, i);
        issue_scores<T, D>(s, m, i);
        issue_values<T, D>(sum, p, m, i - 1);
        pass_turn(m);
        wgmma_wait<1>(s);
        release(m, 2 * i);
        soften(s, x, shape, w);
        await(m, 2 * i + 1);
        wgmma_wait<0>(sum);
        release(m, 2 * i - 1);
        rescale<D>(sum, *x);
        pack<T>(p, s);
    }
    take_turn(m, i);
    issue_values<T, D>(sum, p, m, i - 1);
    pass_turn(m);
    wgmma_wait<0>(sum);
}

// Block (queries, head, sample), those with the most keys first. Of the block's registers, 168 for each
// thread at its launch, a producer's thread keeps 24, and a consumer's has 240; with TokenHeads, where the
// producer looks at tokens, 40 and 232.
template <class T, int D, bool TURNS, class Shape>
__global__ void __launch_bounds__(BLOCK, 1)
    attention(T *o, float *lse, const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
              const __grid_constant__ TensorMap v, Shape shape) {
    DYNAMIC_SHARED(char, memory);
    __shared__ Mbarrier q_full;
    __shared__ Mbarrier full[STAGES];
    __shared__ Mbarrier empty[STAGES];
    __shared__ Mbarrier turn[GROUPS];
    if (threadIdx.x == 0) {
        mbarrier_init(&q_full, 1);
        for (int t = 0; t < STAGES; t++) mbarrier_init(&full[t], 1), mbarrier_init(&empty[t], GROUPS * 4);
        for (int g = 0; g < GROUPS; g++) mbarrier_init(&turn[g], 4);  // a lane of each warp
        fence_proxy_async();
    }
    __syncthreads();
    const int head = (int)blockIdx.y, sample = (int)blockIdx.z, end = (int)shape.s;
    const int first_query = (int)(gridDim.x - 1 - blockIdx.x) * QUERIES;
    char *tiles = first_tile(memory);
    const Shared m = {tiles, tiles + BOXES<D> * BOX, full, empty, turn};
    if (own_group() == GROUPS) {
        registers_give<Shape::EMPTY_ROWS ? 40 : 24>();
        if (threadIdx.x == GROUPS * WARPGROUP)
            copy_tile<BOXES<D>>(m.q, &q, sample, first_query, head * D, &q_full);
        if (own_warp() == GROUPS * 4)
            produce<BOXES<D>>(m, &k, &v, shape, sample, first_query, head / (int)(shape.a / shape.kv) * D);
    } else {
        registers_take<Shape::EMPTY_ROWS ? 232 : 240>();
        Softmax x = {
            shape.scale * LOG2E, {-INFINITY, -INFINITY}, {}, {}, first_query + own_warp() * 16, sample};
        float sum[D / 2] = {};
        mbarrier_wait(&q_full, 0);
        if (TURNS) consume_in_turns<T, D>(sum, &x, m, shape, first_query);
        else consume<T, D>(sum, &x, m, shape, first_query);
        named_barrier(1 + own_group(), WARPGROUP);  // nobody needs its queries any more
        const int64_t stride = shape.a * D;
        finish<Shape, D>(o + sample * end * stride + head * D, lse + (sample * shape.a + head) * end, m.q,
                         sum, x, 1, end, stride);
    }
}

// ---- host code ----

enum { SERIAL, PING_PONG };

constexpr int64_t shared_bytes(int d) { return (1 + STAGES) * (int64_t)d * ROWS * 2 + TILE_ALIGNMENT; }

template <class T, int D, class Shape>
static void launch_on(int version, T *o, float *lse, const T *q, const T *k, const T *v,
                      const Shape &shape) {
    if (shape.s == 0) return;
    const auto kernel = version == SERIAL ? attention<T, D, false, Shape> : attention<T, D, true, Shape>;
    const int bytes = (int)shared_bytes(D);
    const int64_t columns = shape.a * D, key_columns = shape.kv * D, keys = keys_of(shape);
    const dim3 grid((unsigned)((shape.s + QUERIES - 1) / QUERIES), (unsigned)shape.a, (unsigned)shape.b);
    allow_shared(kernel, bytes);
    LAUNCH(kernel, grid, BLOCK, (size_t)bytes, 0, o, lse,
           tensor_map(q, shape.s, columns, columns, ROWS, shape.b),
           tensor_map(k, keys, key_columns, key_columns, ROWS, shape.b),
           tensor_map(v, keys, key_columns, key_columns, ROWS, shape.b), shape);
}

template <class T, int D>
static void launch(int version, T *o, float *lse, float *, const T *q, const T *k, const T *v,
                   const Heads &shape) {
    launch_on<T, D>(version, o, lse, q, k, v, shape);
}

// s a multiple of 128; pairs: of a block and a tile of keys.
static Work work_of_pairs(int version, const Heads &shape, double d, double pairs) {
    const double heads = (double)(shape.b * shape.a), n = (double)shape.s / QUERIES, blocks = heads * n;
    const double rescaled = version == SERIAL ? pairs : pairs - blocks;  // the first one has nothing to
    const double boxes = (blocks + 2 * pairs) * d / COLUMNS, warps = QUERIES / 16;
    const double scores = 16 * KEYS / 32;  // of a lane, for a tile
    Work w = {};
    w.load_requests = boxes, w.load_sectors = boxes * BOX / 32;
    w.store_requests = blocks * warps * (d / 16 + 2), w.store_sectors = blocks * warps * (d + 2);
    w.memory_sectors = words_of_forward(shape, d) / 16 + heads * (double)shape.s / 8;
    // TMA; Q and K; V; o, which is stored in words and read in chunks
    w.shared_passes = boxes * ROWS + pairs * GROUPS * (d / 16 * (OWN + KEYS) / 4 + KEYS / 16 * d / 4) +
                      blocks * warps * d / 2;
    // maximum, scale and sum of scores; of each row. O; c; at the end: sum, lse, o
    const double all = rescaled * d / 2 + blocks * (d / 2 + 1);
    w.flops = 32 * warps * (pairs * (4 * scores + 12) + blocks * 5 + all);
    w.flop_instructions = warps * (pairs * (3 * scores + 12) + blocks * 6 + all);
    w.special_instructions = warps * (pairs * (scores + 2) + blocks * 2 * 2);
    w.tensor_flops = pairs * 4 * QUERIES * KEYS * d;
    w.barriers = blocks;
    return w;
}

static Work formula(int version, const Heads &shape, double d) {
    const double n = (double)shape.s / QUERIES, pairs = shape.causal ? (n * n + n) / 2 : n * n;
    return work_of_pairs(version, shape, d, (double)(shape.b * shape.a) * pairs);
}

#ifndef NO_MAIN
#include "attention_tiles.h"
#include "flash_timeline.h"

// With masks by tokens.
template <class T, int D>
static void prove_masks(int version, const char *name) {
    const int64_t most = 4 * QUERIES * 2 * D;  // numbers of what these two take
    const Numbers<T> x(most, 4), y(most, 6);
    Array<T> q(x.narrow.data(), most), kv(y.narrow.data(), most), o(most);
    Array<float> lse(most / D);
    const auto run = [&](const auto &shape) {
        launch_on<T, D>(version, o.at, lse.at, q.at, kv.at, kv.at, shape);
        std::vector<float> all = in_f32(o), logs = lse.host();
        all.resize((size_t)(shape.s * shape.a * D));
        all.insert(all.end(), logs.begin(), logs.begin() + shape.s * shape.a);
        return all;
    };
    prove_empty_tiles(name, KEYS, D, run, [&](const Heads &shape, double pairs) {
        return work_of_pairs(version, shape, D, pairs);
    });
    prove_full_tiles(name, KEYS, D, run);
    masks_hold(name, prove_masked_forward<T>(
                         D, KEYS, [=](auto... operands) { launch_on<T, D>(version, operands...); }));
}

template <class T, int D>
static void row(int version, const char *name, const Heads &at_size) {
    Heads small = at_size;
    small.b = 1, small.s = 2 * QUERIES, small.a = 1, small.kv = 1;
    const Heads most = ON_GPU ? at_size : small;
    const int64_t queries = most.b * most.s * most.a * D, keys = most.b * most.s * most.kv * D;
    const Numbers<T> numbers(queries, 4);
    Array<T> q(numbers.narrow.data(), queries), k(numbers.narrow.data(), keys);
    Array<T> v(numbers.narrow.data(), keys), o(queries);
    Array<float> lse(queries / D);
    show_version(
        KernelVersion{name, BLOCK, 168, shared_bytes(D)},
        prove_forward<T>(D, at_size.causal, true, launch<T, D>, version, 2 * KEYS + 7), small, at_size,
        [&](const Heads &shape) { launch<T, D>(version, o.at, lse.at, NULL, q.at, k.at, v.at, shape); },
        [&](const Heads &shape) { return formula(version, shape, D); });
}

template <int D>
static void show(const KernelsOptions *options, const Heads &shape, const char *svg) {
    flash_tables(
        options, shape, D, 1,
        [](const Heads &shape) {
            row<__nv_bfloat16, D>(SERIAL, shape.causal ? "serial, causal" : "serial", shape);
            row<__nv_bfloat16, D>(PING_PONG, shape.causal ? "ping-pong, causal" : "ping-pong", shape);
            row<__half, D>(PING_PONG, shape.causal ? "fp16, causal" : "fp16", shape);
        },
        16);
    prove_masks<__nv_bfloat16, D>(SERIAL, "serial");
    prove_masks<__nv_bfloat16, D>(PING_PONG, "ping-pong");
    flash_timelines<__nv_bfloat16, D>("serial", "ping-pong", KEYS, launch<__nv_bfloat16, D>, svg);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    const char *svg = NULL;
    int head;
    const Heads shape = flash_options(argc, argv,
                                      "FlashAttention-3 by TMA and wgmma, forward, in 16 bits.\n"
                                      "  flash_attention_3 --head-size 64",
                                      QUERIES, &options, &head, &svg);
    need_hopper(&options, "flash_attention_3");
    if (head == 128) show<128>(&options, shape, svg);
    else show<64>(&options, shape, svg);
    const Work work = formula(PING_PONG, shape, head);
    const GpuTime time = gpu_time(kernels_gpu(), &work);
    const double apart = time.part[PART_TENSOR] + time.part[PART_SPECIAL];
    say("L2 moves %s, as in flash_attention_2_tensor",
        bytes_text(32 * (work.load_sectors + work.store_sectors)));
    say("the tensor cores take %.4g ms, the exponentials %.4g ms; one after the other, %.4g ms",
        time.part[PART_TENSOR] * 1e3, time.part[PART_SPECIAL] * 1e3, apart * 1e3);
    return report_verdict("the busiest part takes %.2f of products and exponentials one by one",
                          time.seconds / apart);
}
#endif
