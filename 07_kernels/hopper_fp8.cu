// hopper_fp8.cu: a multiply of 8-bit codes, C = A B^T, with block scales as in DeepSeek-V3's training, with
// the instructions of an H100. Playbook: "FP8 pretraining"; DeepSeek-V3 2024, sections 3.3.1 and 3.3.2.
//
// Changes from hopper.cu: wgmma takes 32 of k at once, at twice the FLOPs a clock. It reads 8-bit operands
// only with k along rows, so B is (n, k); a step is 128 of k, a row of a tile. The tensor cores keep about 14
// bits of a sum of 8-bit products, and lose what is small beside the sum:
//
//     limited     a sum over all of k in the tensor cores
//     promoted    a sum over 128 of k, then added to sums in registers, in f32
//     blocks      the same, times a scale of A's (1, 128) and one of B's (128, 128): x W^T, dy W
//     rows        the same, both scales of (1, 128): dy^T x
//
// A thread of a consumer has 64 sums and 64 partial sums; with twice the columns they would not fit into 255
// registers. So a block has 128 x 128 of C. For a step, TMA writes 256 rows of 128 bytes, and each of the 4
// wgmma of each of 2 warpgroups reads 2 kB of A and 4 kB of B: 640 passes of shared memory beside 2^22
// FLOPs, which take an H100 512 clocks. While one warpgroup promotes, the other's products are in flight.
//
// Scales of A are loaded by the lanes that have the rows, before the wait for the tiles. B has one scale per
// block or, in `rows`, one per column: a thread loads one, and all read them from shared memory. A row's
// scales for successive steps are neighbours: a load fetches a sector of eight and uses one.
//
// All blocks load 2 / 128 n^3 bytes of codes: L2 sets the model's time, as in hopper.cu. Where k ends, TMA
// fills the rest of a tile with zeros.
//
// Proof: C within 4 times the error of the back end's sums of as many bits (tensor/ops.h), each against f64
// with the same codes and scales, at odd and even n, and where k ends within a tile; also when it is added
// to an existing C; the same bits twice; counts equal the formulas.
// Run: build/07_kernels/hopper_fp8           (--size 8192, --verbose)
// Last line: PASS hopper_fp8: with block scales it takes 1.1 of the modelled time of limited sums …
#include "cuda/instructions_hopper.h"
#include "sixteen_bits.h"

typedef __nv_fp8_e4m3 Code;
enum { M = 128, N = 128, K = 128, GROUP_ROWS = 64, WARPGROUP = 128 };  // of a piece of C, a step; a group
enum { CONSUMERS = 2, STAGES = 4, A_BYTES = M * K, STAGE_BYTES = (M + N) * K };

enum Version { LIMITED, PROMOTED, BLOCKS, ROWS, VERSIONS };

// C (m, n), of which `row_pieces` pieces lie below each other; A (m, k), B (n, k); add: C +=; pairs: C is
// stored by two numbers. Scales of A (m, steps) and of B (n / 128, steps) or (n, steps); in LIMITED and
// PROMOTED, one number each.
struct Problem {
    int m, n, steps, row_pieces, pieces;
    bool add, pairs;
    const float *scale_a, *scale_b;
};

// ---- memory to shared ----

__device__ static inline void produce(char *stages, Mbarrier *full, Mbarrier *empty, const TensorMap *a,
                                      const TensorMap *b, const Problem &p) {
    int stage = 0;
    uint32_t turn = 0;
    for (int piece = (int)blockIdx.x; piece < p.pieces; piece += (int)gridDim.x)
        for (int step = 0; step < p.steps; step++) {
            mbarrier_wait(&empty[stage], 1 - turn);
            mbarrier_arrive_expect(&full[stage], STAGE_BYTES);
            char *at = stages + stage * STAGE_BYTES;
            tma_load(at, a, piece % p.row_pieces * M, step * K, &full[stage]);
            tma_load(at + A_BYTES, b, piece / p.row_pieces * N, step * K, &full[stage]);
            if (++stage == STAGES) stage = 0, turn = 1 - turn;
        }
}

// ---- shared to sums ----

// sum (+)= the warpgroup's rows of A times B^T, of a step.
__device__ static inline void multiply_step(float (&sum)[N / 2], const char *stage, int group, bool add) {
    const char *a = stage + group * GROUP_ROWS * TILE_ROW, *b = stage + A_BYTES;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K / 32; k++)
        wgmma<Code, K_MAJOR, K_MAJOR>(sum, wgmma_operand(a + k * 32, 0), wgmma_operand(b + k * 32, 0),
                                      add || k > 0);
    wgmma_commit();
    wgmma_wait<0>(sum);
}

// Where this thread's sums are in C: rows `row` and row + 8, columns column + 8 j, + 1; and what B's scales
// of the piece begin with.
struct Place {
    int row, column, column0;
};

__device__ static inline Place place_of(const Problem &p, int piece, int group) {
    const int thread = (int)threadIdx.x % WARPGROUP, lane = thread % 32;
    const int column0 = piece / p.row_pieces * N;
    return {piece % p.row_pieces * M + group * GROUP_ROWS + thread / 32 * 16 + lane / 4,
            column0 + lane % 4 * 2, column0};
}

// The scales of this thread's two rows; a row beyond the last gets the last one's.
template <Version VERSION>
__device__ static inline float2 row_scales(const Problem &p, const Place &at, int step) {
    if (VERSION == PROMOTED) return make_float2(1, 1);
    const float x = p.scale_a[(int64_t)min(at.row, p.m - 1) * p.steps + step];
    const float y = p.scale_a[(int64_t)min(at.row + 8, p.m - 1) * p.steps + step];
    if (VERSION == ROWS) return make_float2(x, y);
    const float of_b = p.scale_b[(int64_t)(at.column0 / N) * p.steps + step];
    return make_float2(x * of_b, y * of_b);
}

// sum += partial, scaled; by_column: of each of the piece's columns, in shared memory.
template <Version VERSION>
__device__ static inline void promote(float (&sum)[N / 2], const float (&partial)[N / 2], float2 by_row,
                                      const float *by_column) {
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        float2 scale = make_float2(1, 1);
        if (VERSION == ROWS) scale = *reinterpret_cast<const float2 *>(by_column + j * 8 + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float row = i < 2 ? by_row.x : by_row.y, column = i % 2 ? scale.y : scale.x;
            if (VERSION == PROMOTED) sum[4 * j + i] += partial[4 * j + i];
            if (VERSION == BLOCKS) sum[4 * j + i] = fmaf(partial[4 * j + i], row, sum[4 * j + i]);
            if (VERSION == ROWS) sum[4 * j + i] = fmaf(partial[4 * j + i] * column, row, sum[4 * j + i]);
        }
    }
}

// ---- sums to memory ----

// C (=) sum or, with p.add, (+=): then all of C is loaded before any is stored, since a load behind a store
// would wait for it.
template <class T>
__device__ static inline void store(T *c, float (&sum)[N / 2], const Problem &p, const Place &at) {
    const auto each = [&](auto act) {
#pragma unroll
        for (int i = 0; i < N / 2; i += 2) {
            const int row = at.row + i / 2 % 2 * 8, column = at.column + i / 4 * 8;
            act(sum[i], sum[i + 1], c + (int64_t)row * p.n + column, row < p.m ? p.n - column : 0);
        }
    };
    if (p.add)
        each([&](float &x, float &y, T *of_c, int count) { add_neighbours(x, y, of_c, p.pairs, count); });
    each([&](float x, float y, T *of_c, int count) { put_neighbours(of_c, x, y, p.pairs, count); });
}

// ---- consumers ----

// scales_of_b: of the columns of a piece, for this step and, while others still read, the next.
template <Version VERSION, class T>
__device__ static inline void consume(T *c, const char *stages, Mbarrier *full, Mbarrier *empty,
                                      float (*scales_of_b)[N], const Problem &p, int group) {
    const int thread = (int)threadIdx.x % WARPGROUP;
    int stage = 0, next = 0;
    uint32_t turn = 0;
    for (int piece = (int)blockIdx.x; piece < p.pieces; piece += (int)gridDim.x) {
        const Place at = place_of(p, piece, group);
        float sum[N / 2] = {};
        for (int step = 0; step < p.steps; step++) {
            float2 by_row = {};
            float *by_column = scales_of_b[next];
            if (VERSION != LIMITED) by_row = row_scales<VERSION>(p, at, step);
            if (VERSION == ROWS) {
                const int column = min(at.column0 + thread, p.n - 1);
                by_column[thread] = p.scale_b[(int64_t)column * p.steps + step];
                named_barrier(1 + group, WARPGROUP);  // and all have read those of the step before
                next = 1 - next;
            }
            float partial[N / 2];
            const char *tiles = stages + stage * STAGE_BYTES;
            mbarrier_wait(&full[stage], turn);
            if (VERSION == LIMITED) multiply_step(sum, tiles, group, step > 0);
            else multiply_step(partial, tiles, group, false);
            if (thread % 32 == 0) mbarrier_arrive(&empty[stage]);
            if (VERSION != LIMITED) promote<VERSION>(sum, partial, by_row, by_column);
            if (++stage == STAGES) stage = 0, turn = 1 - turn;
        }
        if (VERSION <= PROMOTED) {
            const float scale = *p.scale_a * *p.scale_b;
#pragma unroll
            for (int i = 0; i < N / 2; i++) sum[i] *= scale;
        }
        store(c, sum, p, at);
    }
}

// The first warpgroup produces. Of 168 registers a thread it keeps 24, and the others have 240 each.
template <Version VERSION, class T>
__global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    matmul(T *c, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, Problem p) {
    DYNAMIC_SHARED(char, memory);
    __shared__ Mbarrier full[STAGES];
    __shared__ Mbarrier empty[STAGES];
    __shared__ float scales_of_b[CONSUMERS][2][N];
    char *stages = first_tile(memory);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], CONSUMERS * WARPGROUP / 32);  // a lane of each warp that reads
        }
        fence_proxy_async();
    }
    __syncthreads();
    const int group = (int)threadIdx.x / WARPGROUP - 1;
    if (group < 0) {
        registers_give<24>();
        if (threadIdx.x == 0) produce(stages, full, empty, &a, &b, p);
    } else {
        registers_take<240>();
        consume<VERSION>(c, stages, full, empty, scales_of_b[group], p, group);
    }
}

// ---- host code ----

enum { THREADS = (CONSUMERS + 1) * WARPGROUP, SHARED_BYTES = STAGES * STAGE_BYTES + TILE_ALIGNMENT };

struct Operands {
    const uint8_t *a, *b;
    const float *scale_a, *scale_b;
    bool add;
};

// k a multiple of 16, as TMA needs it; a, b begin at multiples of 16 bytes.
template <Version VERSION, class T>
static void launch_on(cudaStream_t stream, T *c, const Operands &in, int64_t m, int64_t n, int64_t k) {
    const int row_pieces = (int)((m + M - 1) / M), pieces = row_pieces * (int)((n + N - 1) / N);
    const int most = multiprocessors();
    const bool pairs = n % 2 == 0 && (uintptr_t)c % (2 * sizeof(T)) == 0;
    const Problem p = {(int)m,     (int)n,    (int)((k + K - 1) / K), row_pieces, pieces, in.add, pairs,
                       in.scale_a, in.scale_b};
    const TensorMap a = tensor_map(in.a, m, k, k, M), b = tensor_map(in.b, n, k, k, N);
    void (*kernel)(T *, TensorMap, TensorMap, Problem) = matmul<VERSION, T>;
    allow_shared(kernel, SHARED_BYTES);
    LAUNCH(kernel, pieces < most ? pieces : most, (int)THREADS, (size_t)SHARED_BYTES, stream, c, a, b, p);
}

#ifndef NO_MAIN

static const KernelVersion versions[VERSIONS] = {
    {"limited", THREADS, 168, SHARED_BYTES},
    {"promoted", THREADS, 168, SHARED_BYTES},
    {"block scales", THREADS, 168, SHARED_BYTES},
    {"scales of rows", THREADS, 168, SHARED_BYTES},
};

struct Size {
    int64_t m, n, k;
};

template <class T>
static void launch(int version, T *c, const Operands &in, const Size &size) {
    void (*const run[VERSIONS])(cudaStream_t, T *, const Operands &, int64_t, int64_t, int64_t) = {
        launch_on<LIMITED, T>, launch_on<PROMOTED, T>, launch_on<BLOCKS, T>, launch_on<ROWS, T>};
    run[version](0, c, in, size.m, size.n, size.k);
}

// m, n multiples of 128, k of 1024: 8 rows of scales begin in 8 sectors. most: the GPU's multiprocessors.
static Work formula(int version, const Size &size, int most) {
    const double m = (double)size.m, n = (double)size.n, k = (double)size.k, steps = k / K;
    const double pieces = m / M * n / N, all = pieces * steps, warps = CONSUMERS * WARPGROUP / 32;
    const double sums = M * N / 32;  // instructions for one operation on each
    Work w = {};
    w.load_requests = all * 2, w.load_sectors = all * STAGE_BYTES / 32;
    w.memory_sectors = (m * k + n * k + 2 * m * n) / 32;
    w.shared_passes = all * (M + N + CONSUMERS * K / 32 * (GROUP_ROWS + N) / 4);
    w.store_requests = pieces * sums / 2, w.store_sectors = 8 * w.store_requests;
    w.tensor_8_flops = 2 * m * n * k;
    w.barriers = fmin(pieces, most);
    if (version <= PROMOTED) {  // two numbers; once a product of both with all sums
        w.load_requests += pieces * warps * 2, w.load_sectors += pieces * warps * 2;
        w.memory_sectors += 2;
        w.flop_instructions = pieces * (sums + warps) + (version == PROMOTED ? all * sums : 0);
        w.flops = 32 * w.flop_instructions;
    } else {
        const double of_b = version == ROWS ? 32 : 1;  // sectors of B's scales
        w.load_requests += all * warps * 3, w.load_sectors += all * warps * (2 * 8 + of_b);
        w.memory_sectors += (m + (version == ROWS ? n : n / N)) * steps / 8;
        w.flop_instructions = all * (version == ROWS ? 2 * sums : sums + 2 * warps);
        w.flops = 32 * (w.flop_instructions + all * sums);  // fused: two each
        if (version == ROWS) w.shared_passes += all * warps * (1 + N / 4);
    }
    return w;
}

// ---- proof ----

// Codes of numbers around 1, whose sums grow, and a scale for each of their tiles, with so few bits that
// products of scale and code are exact in f32.
struct Coded {
    std::vector<uint8_t> codes;
    std::vector<float> scale, exact;
    Tile tile;

    Coded(int64_t rows, int64_t k, Tile tile, int stream)
        : codes((size_t)(rows * k)), exact((size_t)(rows * k)), tile(tile) {
        const int64_t across = tiles_of(k, tile.columns);
        float *x = kernels_numbers(rows * k, 1, stream);
        for (size_t i = 0; i < codes.size(); i++) codes[i] = e4m3_from_f32(1 + x[i]);
        for (int64_t i = 0; i < tiles_of(rows, tile.rows) * across; i++)
            scale.push_back((float)(8 + (i * 5 + stream) % 7) / 16);
        for (int64_t i = 0; i < rows * k; i++) {
            const int64_t row = tile.rows ? i / k / tile.rows : 0;
            const int64_t column = tile.columns ? i % k / tile.columns : 0;
            exact[(size_t)i] = f32_from_e4m3(codes[(size_t)i]) * scale[(size_t)(row * across + column)];
        }
        free(x);
    }
};

static Tile tile_of_a(int version) { return version <= PROMOTED ? Tile{0, 0} : Tile{1, K}; }
static Tile tile_of_b(int version) { return version == BLOCKS ? Tile{N, K} : tile_of_a(version); }

// By the library of this build, in sums of 14 bits.
static std::vector<float> library(int version, const Coded &a, const Coded &b, const Size &s) {
    std::vector<float> made((size_t)(s.m * s.n));
    const KernelsCodes left = {a.codes.data(), a.scale.data(), a.tile};
    const KernelsCodes right = {b.codes.data(), b.scale.data(), b.tile};
    const CodesSum sum = {14, version == LIMITED ? 0 : K};
    kernels_matmul_codes(made.data(), &left, &right, sum, s.m, s.n, s.k);
    return made;
}

// *longest: the error at the first size, whose sums are the longest.
static Proof check(int version, double *longest) {
    Proof proof;
    for (const Size &s : {Size{37, 132, 1024}, Size{260, 131, 272}, Size{1, 1, 16}}) {
        const Coded a(s.m, s.k, tile_of_a(version), 1), b(s.n, s.k, tile_of_b(version), 2);
        const Array<uint8_t> d_a(a.codes.data(), s.m * s.k), d_b(b.codes.data(), s.n * s.k);
        const Array<float> scale_a(a.scale.data(), (int64_t)a.scale.size()),
            scale_b(b.scale.data(), (int64_t)b.scale.size());
        std::vector<float> columns((size_t)(s.k * s.n));
        const std::vector<float> cpu = library(version, a, b, s);
        for (int64_t i = 0; i < s.n * s.k; i++)
            columns[(size_t)(i % s.k * s.n + i / s.k)] = b.exact[(size_t)i];
        std::vector<double> right((size_t)(s.m * s.n));
        kernels_matmul_f64(right.data(), a.exact.data(), columns.data(), s.m, s.n, s.k);
        Array<float> c(s.m * s.n);
        Operands in = {d_a.at, d_b.at, scale_a.at, scale_b.at, false};
        launch(version, c.at, in, s);
        const std::vector<float> made = c.host();
        proof.hold(made, cpu, right);
        if (s.k == 1024) *longest = kernels_error(made.data(), right.data(), s.m * s.n);
        in.add = true;
        launch(version, c.at, in, s);  // the same bits, to which the first are equal
        std::vector<float> doubled;
        for (float x : made) doubled.push_back(2 * x);
        if (c.host() != doubled) proof.error = NAN;
    }
    return proof;
}

static void row(int version, int64_t n, double *longest) {
    const Size small = {2 * M, N, 8 * K}, size = {n, n, n}, most = ON_GPU ? size : small;
    const Coded a(most.m, most.k, tile_of_a(version), 3), b(most.n, most.k, tile_of_b(version), 4);
    const Array<uint8_t> d_a(a.codes.data(), most.m * most.k), d_b(b.codes.data(), most.n * most.k);
    const Array<float> scale_a(a.scale.data(), (int64_t)a.scale.size()),
        scale_b(b.scale.data(), (int64_t)b.scale.size());
    const Array<__nv_bfloat16> c(most.m * most.n);
    const Operands in = {d_a.at, d_b.at, scale_a.at, scale_b.at, false};
    show_version(
        versions[version], check(version, longest), small, size,
        [&](const Size &s) { launch(version, c.at, in, s); },
        [&](const Size &s) {
            const bool here =
                s.m == small.m && s.n == small.n && s.k == small.k;  // where the emulator counts
            return formula(version, s, here ? multiprocessors() : kernels_gpu()->multiprocessors);
        });
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int64_t n;
    Option table[] = {
        {"size", OPTION_INT, &n, "4096", 8 * K, 32768, "", "rows and columns of the table's matrices",
         false},
        KERNELS_OPTIONS(options),
    };
    options_parse(argc, argv,
                  "A multiply of 8-bit codes by TMA and wgmma, whose sums are promoted and scaled.\n"
                  "  hopper_fp8 --size 8192",
                  table, sizeof table / sizeof *table);
    need_hopper(&options, "hopper_fp8");
    n -= n % (8 * K);
    char *size = format_text("C = A B^T of %lld x %lld matrices, e4m3", (long long)n, (long long)n);
    const double square = (double)n * (double)n;
    const double limit = kernels_limit(&options, 4 * square, 0, square * (double)n);  // half of 2 n^3
    double error[VERSIONS];
    kernels_begin(&options, size, limit);
    for (int v = LIMITED; v < VERSIONS; v++) row(v, n, &error[v]);
    free(size);
    report_that(error[LIMITED] > 2 * error[PROMOTED],
                "sums that stay in the tensor cores are off by %.1e, expected more than twice those that "
                "are promoted, %.1e",
                error[LIMITED], error[PROMOTED]);
    return report_verdict(
        "with block scales it takes %.1f of the modelled time of limited sums, whose error over "
        "1024 products is %.1f times as large",
        kernels_seconds(BLOCKS) / kernels_seconds(LIMITED), error[LIMITED] / error[BLOCKS]);
}
#endif
