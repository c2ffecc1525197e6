// coarsening.cu: a thread that computes more elements reads less for each. Playbook: "Thread Coarsening".
//
// Changes from tiling.cu, where each multiply-add needs two words from shared memory and waits for them: a
// thread computes TM x TN elements of C in registers. It loads TM words of A and TN of B for TM TN
// multiply-adds:
//
//                    B  b0 b1 b2 b3         loads for one multiply-add
//                a0     c  c  c  c          1 x 1       2
//            A   a1     c  c  c  c          4 x 1       5 / 4
//                a2     c  c  c  c          4 x 4       1 / 2
//                a3     c  c  c  c          8 x 8       1 / 4
//
// 16 x 16 threads compute a tile of C of 16 TM x 16 TN. The tile of A is stored by columns in shared memory,
// so that a thread's rows are neighbours and it reads four at once. A thread's columns of B are packs of
// four, 64 apart: if all eight were side by side, threads four apart would need the same banks.
//
// For a warp and K = 16 steps of the sum:
//     load requests    TM + TN            of 4 sectors each
//     shared passes    2 TM + TN stores (A's by columns take two each), and K (TM + TN) loads
//     multiply-adds    K TM TN
// In one clock a multiprocessor of an H100 does the multiply-adds of 4 warps and one shared pass: at 8 x 8
// both are busy. The price is registers: 8 x 8 sums and 16 operands leave room for fewer warps.
//
// Proof: within 4 times the error of the library's f32 product, each against f64, at sizes that fill no
// tile; counts equal the formulas.
// Run: build/07_kernels/coarsening           (--gpu a100, --size 4096, --verbose)
// Last line: PASS coarsening: 8 x 8 outputs a thread take 0.12 of the time of one …
#include "launch.h"

enum { SIDE = 16, THREADS = SIDE * SIDE, K = 16, PAD = 4 };  // PAD keeps packs of four aligned

template <int N>
struct alignas(N * 4) Pack {
    float x[N];
};

// One access of 16 bytes where N is 4.
__device__ static inline void load(Pack<1> *to, const float *from) { to->x[0] = *from; }
__device__ static inline void load(Pack<4> *to, const float *from) {
    const float4 v = *reinterpret_cast<const float4 *>(from);
    to->x[0] = v.x, to->x[1] = v.y, to->x[2] = v.z, to->x[3] = v.w;
}

// Where in its tile a thread's i-th row (or column) is: packs of V, each followed by those of the other
// threads.
template <int COUNT>
struct Places {
    static constexpr int V = COUNT % 4 ? 1 : 4, TILE = SIDE * COUNT;
    __device__ static int pack(int thread, int p) { return p * SIDE * V + thread * V; }
    __device__ static int place(int thread, int i) { return pack(thread, i / V) + i % V; }
};

// C (m, n) = A (m, s) B (s, n). TRANSPOSED: A is stored as (s, m), and B as (n, s). ADD: C += A B.
template <int TM, int TN, bool TRANSPOSED_A = false, bool TRANSPOSED_B = false, bool ADD = false>
__global__ void __launch_bounds__(THREADS)
    matmul(float *c, const float *a, const float *b, int64_t m, int64_t n, int64_t s) {
    typedef Places<TM> Rows;
    typedef Places<TN> Columns;
    __shared__ __align__(16) float tile_a[K][Rows::TILE + PAD];
    __shared__ __align__(16) float tile_b[K][Columns::TILE + (TRANSPOSED_B ? PAD : 0)];
    const int t = threadIdx.x, ty = t / SIDE, tx = t % SIDE;
    const int64_t row0 = (int64_t)blockIdx.y * Rows::TILE, column0 = (int64_t)blockIdx.x * Columns::TILE;
    // what is left of C, in one register each
    const int rows = (int)(m - row0), columns = (int)(n - column0);
    float sum[TM][TN] = {};
    for (int64_t k0 = 0; k0 < s; k0 += K) {
#pragma unroll
        for (int i = 0; i < TM; i++) {  // lanes run along the contiguous dimension of A as it is stored: k
            const int at = t + i * THREADS, k = TRANSPOSED_A ? at / Rows::TILE : t % K;
            const int row = TRANSPOSED_A ? at % Rows::TILE : t / K + i * (THREADS / K);
            const int64_t from = TRANSPOSED_A ? (k0 + k) * m + row0 + row : (row0 + row) * s + k0 + k;
            tile_a[k][row] = row < rows && k0 + k < s ? a[from] : 0;
        }
#pragma unroll
        for (int i = 0; i < TN; i++) {
            const int at = t + i * THREADS, k = TRANSPOSED_B ? t % K : at / Columns::TILE;
            const int column = TRANSPOSED_B ? t / K + i * (THREADS / K) : at % Columns::TILE;
            const int64_t from =
                TRANSPOSED_B ? (column0 + column) * s + k0 + k : (k0 + k) * n + column0 + column;
            tile_b[k][column] = k0 + k < s && column < columns ? b[from] : 0;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < K; k++) {
            Pack<Rows::V> left[TM / Rows::V];
            Pack<Columns::V> right[TN / Columns::V];
#pragma unroll
            for (int p = 0; p < TM / Rows::V; p++) load(&left[p], &tile_a[k][Rows::pack(ty, p)]);
#pragma unroll
            for (int p = 0; p < TN / Columns::V; p++) load(&right[p], &tile_b[k][Columns::pack(tx, p)]);
#pragma unroll
            for (int i = 0; i < TM; i++)
#pragma unroll
                for (int j = 0; j < TN; j++)
                    sum[i][j] = fmaf(left[i / Rows::V].x[i % Rows::V],
                                     right[j / Columns::V].x[j % Columns::V], sum[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < TM; i++)
#pragma unroll
        for (int j = 0; j < TN; j++) {
            const int64_t row = row0 + Rows::place(ty, i), column = column0 + Columns::place(tx, j);
            if (row < m && column < n)
                c[row * n + column] = ADD ? c[row * n + column] + sum[i][j] : sum[i][j];
        }
}

// ---- host code ----

#ifndef NO_MAIN

enum { ONE, FOUR, SIXTEEN, SIXTY_FOUR, VERSIONS };
static const struct { int tm, tn; } outputs[VERSIONS] = {{1, 1}, {4, 1}, {4, 4}, {8, 8}};
static const KernelVersion versions[VERSIONS] = {
    {"1 output a thread", THREADS, 32, K *(16 + PAD + 16) * 4},
    {"4 x 1", THREADS, 40, K *(64 + PAD + 16) * 4},
    {"4 x 4", THREADS, 80, K *(64 + PAD + 64) * 4},
    {"8 x 8", THREADS, 126, K *(128 + PAD + 128) * 4},
};

static void launch(int version, float *c, const float *a, const float *b, int64_t n) {
    if (n == 0) return;
    const int64_t rows = SIDE * outputs[version].tm, columns = SIDE * outputs[version].tn;
    const dim3 grid((unsigned)((n + columns - 1) / columns), (unsigned)((n + rows - 1) / rows));
    if (version == ONE) LAUNCH((matmul<1, 1>), grid, THREADS, 0, 0, c, a, b, n, n, n);
    if (version == FOUR) LAUNCH((matmul<4, 1>), grid, THREADS, 0, 0, c, a, b, n, n, n);
    if (version == SIXTEEN) LAUNCH((matmul<4, 4>), grid, THREADS, 0, 0, c, a, b, n, n, n);
    if (version == SIXTY_FOUR) LAUNCH((matmul<8, 8>), grid, THREADS, 0, 0, c, a, b, n, n, n);
}

// n a multiple of the tile's sides.
static Work formula(int version, double n) {
    const double tm = outputs[version].tm, tn = outputs[version].tn;
    const double blocks = n * n / (THREADS * tm * tn), pieces = blocks * n / K, warps = 8;
    Work w = {};
    w.load_requests = pieces * warps * (tm + tn);
    w.load_sectors = 4 * w.load_requests;
    w.store_requests = n * n / 32;
    // a warp stores two rows of 16 lanes: neighbours or, with packs of four, 16 bytes apart, two lanes to a
    // sector
    w.store_sectors = w.store_requests * (tn == 1 ? 4 : 16);
    w.memory_sectors = 3 * n * n / 8;
    w.shared_passes = pieces * warps * (tm + tn + K * (tm + tn));
    w.shared_conflicts = pieces * warps * tm;
    w.flops = 2 * n * n * n;
    w.flop_instructions = n * n * n / 32;
    w.barriers = 2 * pieces;
    return w;
}

static Proof check(int version) {
    Proof proof;
    for (int64_t size : {0, 1, 37, 67})
        prove_matmul(&proof, size, false, [&](float *c, const float *a, const float *b, int64_t n) {
            launch(version, c, a, b, n);
        });
    return proof;
}

static void row(int version, int64_t n) {
    const int64_t small = version == SIXTY_FOUR ? 128 : 64, most = ON_GPU ? n : small;
    float *numbers = kernels_numbers(most * most, 1, 3);
    Array<float> a(numbers, most * most), b(numbers, most * most), c(most * most);
    free(numbers);
    show_version(
        versions[version], check(version), small, n,
        [&](int64_t size) { launch(version, c.at, a.at, b.at, size); },
        [&](int64_t size) { return formula(version, (double)size); });
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int64_t n;
    Option table[] = {
        {"size", OPTION_INT, &n, "4096", 128, 32768, "", "rows and columns of the table's matrices", false},
        KERNELS_OPTIONS(options),
    };
    options_parse(argc, argv,
                  "Coarsening: a matrix multiply whose threads compute 1, 4, 16 or 64 elements each.\n"
                  "  coarsening --gpu a100",
                  table, sizeof table / sizeof *table);
    n -= n % 128;
    char *size = format_text("C = A B of %lld x %lld matrices", (long long)n, (long long)n);
    const double square = (double)n * (double)n;
    kernels_begin(&options, size, kernels_limit(&options, 12 * square, 2 * square * (double)n, 0));
    for (int v = 0; v < VERSIONS; v++) row(v, n);
    free(size);
    return report_verdict("8 x 8 outputs a thread take %.2f of the time of one",
                          kernels_seconds(SIXTY_FOUR) / kernels_seconds(ONE));
}
#endif
