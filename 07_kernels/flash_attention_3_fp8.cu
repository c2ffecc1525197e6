// flash_attention_3_fp8.cu: FlashAttention-3, forward, of 8-bit numbers (e4m3) with a scale for each tile.
// Playbook: "Flash Attention 1-3", "FP8 pretraining"; Shah et al., "FlashAttention-3", 2024, section 3.3.
//
// Changes from flash_attention_3.cu: tensor cores multiply twice as many numbers in a clock, and Q, K and V
// take half the bytes. A separate kernel first encodes them, x = scale * code, with a scale for each tile of
// 128 rows of a head. The scales of Q and K are folded into softmax's, and the scale of V into the factor by
// which O is rescaled between tiles: no extra work. Two things follow the paper (its rotation of Q and K by
// a random orthogonal matrix, against outliers, is not here):
//
//   - 8-bit operands must have k along rows. The rows of V run along the columns of O, so two warps beside
//     the producer transpose each tile in shared memory: ldmatrix gives a lane two keys of two columns,
//     twice, byte permutes turn that into four keys of each column, and a word goes to V' (transposed).
//   - A lane does not have the elements of S that it needs of P (cuda/instructions_hopper.h): it has keys
//     2 q, 2 q + 1 and those 8 further, where 4 q to 4 q + 3 are needed, with q = lane % 4. A sum over keys
//     may take any order, so V' lists keys as the lanes have them, and no lane needs another's.
//
//     producer      K0  V0           K1  V1           K2 …     a ring of four, as with 16 bits
//     transposers            V0 -> V0'        V1 -> V1'        two more tiles
//     consumers         Q K0'          Q K1', P0 V0'           in turns
//
// Heads of 64 would leave half of each line of 128 bytes empty, so two rows share a line (flash_codes.h).
// wgmma can read either half of the lines, and the scores of a tile are two products.
//
// P is 2^8 exp(S - max), so that fewer of its small numbers underflow in e4m3. Hopper keeps 14 bits of a sum
// (chapter 08), and O is one: with 4096 keys it is truncated 128 times, which costs less than P's rounding.
//
// Proof: every code and scale, bit for bit; then each row of O against f64 on the decoded numbers. P is
// rounded to nearest: off by at most e = 2^-4 of itself, e / sqrt(3) on average, independently. What tensor
// cores cut off is less: of a score below d = 2^-11 sum|q k|, and of O, for n keys, about c = 2^-13 n / 32
// of itself. So a row's error is about
//     sqrt(sum over columns of (O c)^2 + sum over keys of (P V)^2 (e^2 / 3 + d^2)), and may be twice it.
// Run: build/07_kernels/flash_attention_3_fp8           (--head-size 64, --size 8192, --verbose)
// Last line: PASS flash_attention_3_fp8: the busiest part, shared, takes 0.57 of what products take …
#include "flash_codes.h"

enum { DEPTH = 32 };                   // k of a product
enum { TRANSPOSERS = 2, VALUES = 2 };  // warps; tiles of V'
enum { TOP = 8 };                      // P's largest is 2^TOP

// ---- V transposed ----

// Of tiles of the ring, in turn. whole, used: a tile is transposed, and has been read.
struct Values {
    char *tiles;
    Mbarrier *whole, *used;
};

// Keys 16 g to 16 g + 15 of a tile, as 16 neighbours of each row of `to`. Half of the lanes store their odd
// column first, so that a warp's words are in different banks.
template <int D>
__device__ static inline void transpose_keys(char *to, const char *tile, int g) {
    const int lane = own_lane(), q = lane % 4, r = lane / 4;
#pragma unroll 1  // these warps have few registers
    for (int chunk = 0; chunk < D / 16; chunk += 2) {
        const int key = 16 * g + lane % 16, line = key % D;
        const int from = (key / D * (D / 16) + chunk + lane / 16) ^ line % 8;
        uint32_t x[4];
        ldmatrix_x4_trans(x, tile + line * TILE_ROW + from * 16);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int odd = e ^ r / 4, row = (chunk + half) * 16 + 2 * r + odd;
                *reinterpret_cast<uint32_t *>(to + row * TILE_ROW + (g ^ row % 8) * 16 + q * 4) =
                    __byte_perm(x[2 * half], x[2 * half + 1], odd ? 0x7531 : 0x6420);
            }
    }
}

template <int D, class Shape>
__device__ static inline void transpose(const Shared &m, const Values &v, int part, const Shape &shape,
                                        int sample, int query0) {
    auto w = keys_seen(shape, sample, query0);
    for (int i = 0; more(w); i++, step(&w, shape, sample, query0)) {
        await(m, 2 * i + 1);
        mbarrier_wait(&v.used[i % VALUES], 1 - i / VALUES % 2);
        for (int g = part; g < KEYS / 16; g += TRANSPOSERS)
            transpose_keys<D>(v.tiles + i % VALUES * TILE_OF_CODES<D>,
                              m.ring + (2 * i + 1) % STAGES * TILE_OF_CODES<D>, g);
        fence_proxy_async();
        __syncwarp();
        release(m, 2 * i + 1);
        if (own_lane() == 0) mbarrier_arrive(&v.whole[i % VALUES]);
    }
}

// ---- the consumers ----

// s (=) the warpgroup's queries by tile i of the keys: a group of wgmma, in flight. Where a line has two
// rows, the warpgroup's queries are one half of the lines, and the keys of either are a product.
template <int D>
__device__ static inline void issue_scores(float (&s)[KEYS / 2], const Shared &m, int i) {
    constexpr int OF_HALF = D / 2;  // of s, or, with heads of 128, all of it
    const char *q = m.q + own_group() * (D == TILE_ROW ? OWN * TILE_ROW : D);
    const char *k = m.ring + 2 * i % STAGES * TILE_OF_CODES<D>;
    wgmma_fence();
#pragma unroll
    for (int half = 0; half < TILE_ROW / D; half++)
#pragma unroll
        for (int x = 0; x < D; x += DEPTH)
            wgmma<Code, K_MAJOR, K_MAJOR>(reinterpret_cast<float(&)[OF_HALF]>(s[half * OF_HALF]),
                                          wgmma_operand(q + x, 0), wgmma_operand(k + half * D + x, 0),
                                          x > 0);
    wgmma_commit();
}

// sum += p times tile i of the values: a group, in flight.
template <int D>
__device__ static inline void issue_values(float (&sum)[D / 2], const uint32_t (&p)[KEYS / DEPTH][4],
                                           const Values &v, int i) {
    const char *tile = v.tiles + i % VALUES * TILE_OF_CODES<D>;
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < KEYS / DEPTH; x++)
        wgmma<Code, K_MAJOR>(sum, p[x], wgmma_operand(tile + x * DEPTH, 0), true);
    wgmma_commit();
}

// p (=) s as codes, with the keys of 16 in the order of V'.
__device__ static inline void pack(uint32_t (&p)[KEYS / DEPTH][4], const float (&s)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) {
        const float *x = &s[i / 2 * 8 + i % 2 * 2];  // of row l / 4, or l / 4 + 8, and 8 keys further
        p[i / 4][i % 4] = codes(x[0], x[1], x[4], x[5]);
    }
}

// Scales of this block's tiles.
struct Scales {
    const float *q, *k, *v;
};

// As consume_in_turns of flash_attention_3.cu: in turn i, the scores of tile i and P V of tile i - 1. sum:
// in units of the scale of V's last tile (return).
template <int D, class Shape>
__device__ static inline float consume(float (&sum)[D / 2], Softmax *x, const Shared &m, const Values &v,
                                       const Scales &scales, const Shape &shape, int block_query) {
    float s[KEYS / 2];
    uint32_t p[KEYS / DEPTH][4];
    const float c = x->c;
    auto w = keys_seen(shape, x->sample, block_query);
    if (Shape::EMPTY_ROWS && !more(w)) return 0;
    float unit = scales.v[w.at / KEYS];
    await(m, 0);
    take_turn(m, 0);
    issue_scores<D>(s, m, 0);
    pass_turn(m);
    wgmma_wait<0>(s);
    release(m, 0);
    x->c = c * scales.k[w.at / KEYS];
    soften<TOP>(s, x, shape, w);
    pack(p, s);
    step(&w, shape, x->sample, block_query);
    int i = 1;
    for (; more(w); i++, step(&w, shape, x->sample, block_query)) {
        await(m, 2 * i);
        mbarrier_wait(&v.whole[(i - 1) % VALUES], (i - 1) / VALUES % 2);
        take_turn(m, i);
        issue_scores<D>(s, m, i);
        issue_values<D>(sum, p, v, i - 1);
        pass_turn(m);
        wgmma_wait<1>(s);
        release(m, 2 * i);
        x->c = c * scales.k[w.at / KEYS];
        soften<TOP>(s, x, shape, w);
        const float next = scales.v[w.at / KEYS], units = unit / next;
        x->keep[0] *= units, x->keep[1] *= units, unit = next;
        wgmma_wait<0>(sum);
        if (own_lane() == 0) mbarrier_arrive(&v.used[(i - 1) % VALUES]);
        rescale<D>(sum, *x);
        pack(p, s);
    }
    mbarrier_wait(&v.whole[(i - 1) % VALUES], (i - 1) / VALUES % 2);
    take_turn(m, i);
    issue_values<D>(sum, p, v, i - 1);
    pass_turn(m);
    wgmma_wait<0>(sum);
    return unit;
}

// Tiles of codes that queries have, and the numbers of o, of 16 bits, which take two of them at the end:
// their own, or, where a line has queries of both warpgroups, others.
template <int D>
constexpr int Q_TILES = D == TILE_ROW ? 2 : 3;

// Block (queries, head, sample), those with the most keys first.
template <class T, int D, class Shape>
__global__ void __launch_bounds__(BLOCK, 1)
    attention(T *o, float *lse, const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
              const __grid_constant__ TensorMap v, Scales scales, Shape shape) {
    DYNAMIC_SHARED(char, memory);
    __shared__ Mbarrier q_full;
    __shared__ Mbarrier full[STAGES];
    __shared__ Mbarrier empty[STAGES];
    __shared__ Mbarrier turn[GROUPS];
    __shared__ Mbarrier whole[VALUES];
    __shared__ Mbarrier used[VALUES];
    if (threadIdx.x == 0) {
        mbarrier_init(&q_full, 1);
        for (int t = 0; t < STAGES; t++) mbarrier_init(&full[t], 1);
        for (int t = 0; t < STAGES; t++) mbarrier_init(&empty[t], t % 2 ? TRANSPOSERS : GROUPS * 4);
        for (int g = 0; g < GROUPS; g++) mbarrier_init(&turn[g], 4);
        for (int i = 0; i < VALUES; i++) mbarrier_init(&whole[i], TRANSPOSERS);
        for (int i = 0; i < VALUES; i++) mbarrier_init(&used[i], GROUPS * 4);
        fence_proxy_async();
    }
    __syncthreads();
    const int head = (int)blockIdx.y, sample = (int)blockIdx.z, end = (int)shape.s;
    const int key_head = head / (int)(shape.a / shape.kv), block = (int)(gridDim.x - 1 - blockIdx.x);
    const int first_query = block * QUERIES;
    char *tiles = first_tile(memory), *out = tiles + (Q_TILES<D> - 2) * TILE_OF_CODES<D>;
    const Shared m = {tiles, tiles + Q_TILES<D> * TILE_OF_CODES<D>, full, empty, turn};
    const Values values = {m.ring + STAGES * TILE_OF_CODES<D>, whole, used};
    const int of_keys = (sample * (int)shape.kv + key_head) * (int)((keys_of(shape) + KEYS - 1) / KEYS);
    if (own_group() == GROUPS) {
        registers_give<40>();
        const int part = own_warp() - GROUPS * 4 - 1;
        if (threadIdx.x == GROUPS * WARPGROUP)
            copy_tile<1, D>(m.q, &q, sample, block * D, head * TILE_ROW, &q_full);
        if (part < 0) produce<1, D>(m, &k, &v, shape, sample, first_query, key_head * TILE_ROW);
        else if (part < TRANSPOSERS) transpose<D>(m, values, part, shape, sample, first_query);
    } else {
        registers_take<232>();
        const float of_q = scales.q[(sample * shape.a + head) * gridDim.x + block];
        const Scales own = {NULL, scales.k + of_keys, scales.v + of_keys};
        Softmax x = {shape.scale * LOG2E * of_q,
                     {-INFINITY, -INFINITY},
                     {},
                     {},
                     first_query + own_warp() * 16,
                     sample};
        float sum[D / 2] = {};
        mbarrier_wait(&q_full, 0);
        const float unit = consume<D>(sum, &x, m, values, own, shape, first_query);
        named_barrier(1 + own_group(), WARPGROUP);  // nobody needs its queries any more
        const int64_t stride = shape.a * D;
        finish<Shape, D>(o + sample * end * stride + head * D, lse + (sample * shape.a + head) * end, out,
                         sum, x, unit, end, stride);
    }
}

// ---- host code ----

template <int D>
constexpr int64_t SHARED_BYTES =
    (Q_TILES<D> + STAGES + VALUES) * (int64_t)TILE_OF_CODES<D> + TILE_ALIGNMENT;

#ifndef NO_MAIN
#include "flash_codes_reference.h"

template <class T, int D, class Shape>
static void attend(T *o, float *lse, const Operands8<D> &in, const Shape &n) {
    if (n.s == 0) return;
    const auto kernel = attention<T, D, Shape>;
    const int64_t bytes = SHARED_BYTES<D>;
    const auto map = [&](const Coded<D> &x, int64_t s) {
        return tensor_map(x.codes.at, lines_of_rows<D>(s), x.heads * TILE_ROW, x.heads * TILE_ROW, D, n.b);
    };
    const dim3 grid((unsigned)tiles_of_rows(n.s), (unsigned)n.a, (unsigned)n.b);
    allow_shared(kernel, bytes);
    LAUNCH(kernel, grid, BLOCK, (size_t)bytes, 0, o, lse, map(in.q, n.s), map(in.k, keys_of(n)),
           map(in.v, keys_of(n)), Scales{in.q.scales.at, in.k.scales.at, in.v.scales.at}, n);
}

// ---- the table ----

// s a multiple of 128; pairs: of a block and a tile of keys.
static Work work_of_pairs(const Heads &shape, double d, double pairs) {
    const double heads = (double)(shape.b * shape.a), n = (double)shape.s / QUERIES, blocks = heads * n;
    const double again = pairs - blocks;
    const double tiles = blocks + 2 * pairs, warps = QUERIES / 16, scores = 16 * KEYS / 32;
    const double products = TILE_ROW / d;                // that a tile's scores are
    const double scales = warps * (blocks + 2 * pairs);  // of Q; K and V
    const double tokens = (double)(shape.b * shape.s), groups = (double)(shape.b * shape.kv);
    Work w = {};
    w.load_requests = tiles + scales, w.load_sectors = tiles * d * TILE_ROW / 32 + scales;
    w.store_requests = blocks * warps * (d / 16 + 2), w.store_sectors = blocks * warps * (d + 2);
    // codes, and o in 16 bits; lse; scales
    w.memory_sectors = tokens * d / 32 * (double)(3 * shape.a + 2 * shape.kv) +
                       tokens * (double)shape.a / 8 + ceil(blocks / 8) + 2 * ceil(groups * n / 8);
    // TMA; V transposed; Q and K; V'; o, which is stored in words and read in chunks
    w.shared_passes = tiles * d + pairs * 2 * d +
                      pairs * GROUPS * (d / DEPTH * (products * OWN + KEYS) / 4 + KEYS / DEPTH * d / 4) +
                      blocks * warps * d / 2;
    // maximum, scale and sum of scores; c; of each row. V's scale; O. c; at the end: sum, lse, o
    w.flops = 32 * warps * (pairs * (4 * scores + 14 + 1) + again * (2 + d / 2) + blocks * (5 + d / 2 + 2));
    w.flop_instructions =
        warps * (pairs * (3 * scores + 12 + 1) + again * (2 + d / 2) + blocks * (6 + d / 2 + 2));
    w.special_instructions = warps * (pairs * (scores + 2) + again + blocks * 2 * 2);
    w.tensor_8_flops = pairs * 4 * QUERIES * KEYS * d;
    w.barriers = blocks;
    return w;
}

static Work formula(const Heads &shape, double d) {
    const double n = (double)shape.s / QUERIES, pairs = shape.causal ? (n * n + n) / 2 : n * n;
    return work_of_pairs(shape, d, (double)(shape.b * shape.a) * pairs);
}

// With masks by tokens. What encodes is no part of the counts.
template <class T, int D>
static void prove_masks(const char *name) {
    const int64_t most = 4 * QUERIES * 2 * D;  // numbers of what these two take
    const Numbers<T> x(most, 4);
    Array<T> numbers(x.narrow.data(), most), o(most);
    Array<float> lse(most / D);
    const Operands8<D> coded(Heads{1, 4 * QUERIES, 2, 1, 1, 0});
    const auto run = [&](const auto &shape) {
        attend(o.at, lse.at, coded, shape);
        std::vector<float> all = in_f32(o);
        all.resize((size_t)(shape.s * shape.a * D));
        return all;
    };
    encode_all(coded, numbers.at, numbers.at, numbers.at, Heads{1, 4 * QUERIES, 2, 1, 1, 0});
    prove_empty_tiles(name, KEYS, D, run,
                      [](const Heads &shape, double pairs) { return work_of_pairs(shape, D, pairs); });
    encode_all(coded, numbers.at, numbers.at, numbers.at, Heads{1, 2 * QUERIES, 2, 1, 1, 0});
    prove_full_tiles(name, KEYS, D, run);
    masks_hold(name, prove_masked_codes<T, D>(attend<T, D, TokenHeads>));
}

// Operands of random numbers, at `small` or, on a GPU, at the size of the table.
template <int D>
struct Room {
    typedef __nv_bfloat16 T;
    Heads small, most;
    Numbers<T> numbers;
    Array<T> q, k, v;
    Operands8<D> coded;

    explicit Room(const Heads &n)
        : small{1, 2 * QUERIES, 1, 1, n.scale, n.causal},
          most(ON_GPU ? n : small),
          numbers(most.b * most.s * most.a * D, 4),
          q(numbers.narrow.data(), most.b * most.s * most.a * D),
          k(numbers.narrow.data(), most.b * most.s * most.kv * D),
          v(numbers.narrow.data(), most.b * most.s * most.kv * D),
          coded(most) {}
    void encode(const Heads &n) const { encode_all(coded, q.at, k.at, v.at, n); }
};

template <int D>
static void table_of_codes(const KernelsOptions *options, const Heads &n) {
    const Room<D> room(n);
    const double bytes = 3 * D * (double)(n.b * n.s * (n.a + 2 * n.kv));
    kernels_begin(options, "codes of Q, K and V", kernels_limit(options, bytes, 0, 0));
    show_version(
        KernelVersion{"from 16 bits", ENCODER, D == 64 ? 54 : 77, ENCODER / 8}, Proof(), room.small, n,
        [&](const Heads &size) { room.encode(size); },
        [](const Heads &size) { return formula_of_codes(size, D); });
}

template <int D>
static void row(const Heads &n) {
    typedef typename Room<D>::T T;
    const Room<D> room(n);
    Array<T> o(room.q.count);
    Array<float> lse(room.q.count / D);
    room.encode(room.most);
    show_version(
        KernelVersion{n.causal ? "ping-pong, causal" : "ping-pong", BLOCK, 168, SHARED_BYTES<D>},
        prove_codes<T, D>(n.causal, attend<T, D, Heads>), room.small, n,
        [&](const Heads &size) { attend(o.at, lse.at, room.coded, size); },
        [](const Heads &size) { return formula(size, D); });
}

template <int D>
static void show(const KernelsOptions *options, const Heads &shape) {
    table_of_codes<D>(options, shape);
    flash_tables(options, shape, D, 1, row<D>, 8);
    prove_masks<__nv_bfloat16, D>("ping-pong");
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int head;
    const Heads shape = flash_options(argc, argv,
                                      "FlashAttention-3, forward, on codes of 8 bits with a scale a tile.\n"
                                      "  flash_attention_3_fp8 --head-size 64",
                                      QUERIES, &options, &head);
    need_hopper(&options, "flash_attention_3_fp8");
    if (head == 128) show<128>(&options, shape);
    else show<64>(&options, shape);
    const Work work = formula(shape, head);
    const GpuTime time = gpu_time(kernels_gpu(), &work);
    Work wide = work;
    wide.tensor_flops = work.tensor_8_flops, wide.tensor_8_flops = 0;
    const double before = gpu_time(kernels_gpu(), &wide).part[PART_TENSOR];
    say("the tensor cores take %.4g ms, with 16 bits %.4g ms; the exponentials %.4g ms, shared memory %.4g "
        "ms",
        time.part[PART_TENSOR] * 1e3, before * 1e3, time.part[PART_SPECIAL] * 1e3,
        time.part[PART_SHARED] * 1e3);
    return report_verdict("the busiest part, %s, takes %.2f of what products take with 16 bits",
                          part_name(time.busiest), time.seconds / before);
}
#endif
