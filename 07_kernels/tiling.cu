// tiling.cu: the threads of a block share what they read from memory. Playbook: "Tiling".
//
// C = A B, with a thread for each element of C. Without tiles each thread loads a row of A and a column of B
// by itself. With tiles a block of T x T threads loads a T x T piece of A and one of B into shared memory,
// one element of each per thread, and uses each element T times:
//
//          k tile                 sum += A[row][i] B[i][column]
//     A  [■ ■ ■]     B  [■ . .]       i inside the tile: from shared memory
//                       [■ . .]       from tile to tile: one load of A and one of B in place of T of each
//                       [■ . .]
//
// For a warp and T steps of the sum:     load requests     sectors            shared passes
//     no tiles                           2 T               T (1 + 4)          0
//     tiles                              2                 2 x 4              2 stores + 2 T loads
//
// so requests fall by a factor of T, and sectors from 160 to 8 at T = 32; then shared memory sets the time.
//
// Shared memory has 32 banks of 4 bytes, and lanes that need different words of one bank take turns: each
// turn is a pass. Here all lanes read one word of A, and 32 neighbours of B: one pass each. But in C = A B',
// with B stored (n, k) as weights are, lanes read a column of the tile, 32 words of one bank:
//
//     tile[32][32]        bank of [column][i] is i               32 passes
//     padded [32][33]     (column + i) mod 32                     1, for 128 bytes more
//     swizzled            [column][i ^ column], bank i ^ column   1, and no more bytes
//
// Proof: within 4 times the error of the library's f32 product, each against f64, at sizes that fill no
// tile; counts equal the formulas.
// Run: build/07_kernels/tiling           (--gpu a100, --size 4096, --verbose)
// Last line: PASS tiling: tiles of 32 take 0.50 of the time of none …
#include "launch.h"

// How B and its tile are stored.
enum Layout { ROWS, COLUMNS, PADDED, SWIZZLED };

__global__ void __launch_bounds__(1024) matmul(float *c, const float *a, const float *b, int64_t n) {
    int64_t row = (int64_t)blockIdx.y * 32 + threadIdx.y, column = (int64_t)blockIdx.x * 32 + threadIdx.x;
    if (row >= n || column >= n) return;
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum = fmaf(a[row * n + i], b[i * n + column], sum);
    c[row * n + column] = sum;
}

// Element (row, column) of an n x n matrix; beyond its edges zero, which adds nothing.
__device__ static inline float element(const float *x, int64_t row, int64_t column, int64_t n) {
    return row < n && column < n ? x[row * n + column] : 0;
}

template <int T, Layout LAYOUT>
__global__ void __launch_bounds__(T *T) matmul_tiled(float *c, const float *a, const float *b, int64_t n) {
    __shared__ float tile_a[T][T];
    __shared__ float tile_b[T][T + (LAYOUT == PADDED)];
    const int y = threadIdx.y, x = threadIdx.x;
    const int64_t row = (int64_t)blockIdx.y * T + y, column = (int64_t)blockIdx.x * T + x;
    float sum = 0;
    for (int64_t k = 0; k < n; k += T) {
        // lanes differ in x: both loads are coalesced
        tile_a[y][x] = element(a, row, k + x, n);
        if (LAYOUT == ROWS) tile_b[y][x] = element(b, k + y, column, n);
        else tile_b[y][LAYOUT == SWIZZLED ? x ^ y : x] = element(b, (int64_t)blockIdx.x * T + y, k + x, n);
        __syncthreads();  // the tiles are complete
        for (int i = 0; i < T; i++) {
            float right = LAYOUT == ROWS       ? tile_b[i][x]
                          : LAYOUT == SWIZZLED ? tile_b[x][i ^ x]
                                               : tile_b[x][i];
            sum = fmaf(tile_a[y][i], right, sum);
        }
        __syncthreads();  // all threads have read them
    }
    if (row < n && column < n) c[row * n + column] = sum;
}

// ---- host code ----

enum { NONE, TILE_16, TILE_32, TRANSPOSED, PAD, SWIZZLE, VERSIONS };
static const int tile_of[VERSIONS] = {32, 16, 32, 32, 32, 32};
static const KernelVersion versions[VERSIONS] = {
    {"no tiles", 1024, 32, 0},        {"tiles of 16", 256, 32, 2 * 16 * 16 * 4},
    {"tiles of 32", 1024, 32, 8192},  {"A B', in one bank", 1024, 32, 8192},
    {"A B', padded", 1024, 32, 8320}, {"A B', swizzled", 1024, 64, 8192},
};

static void launch(int version, float *c, const float *a, const float *b, int64_t n) {
    if (n == 0) return;
    const unsigned tile = (unsigned)tile_of[version], tiles = (unsigned)((n + tile - 1) / tile);
    const dim3 grid(tiles, tiles), block(tile, tile);
    if (version == NONE) LAUNCH(matmul, grid, block, 0, 0, c, a, b, n);
    if (version == TILE_16) LAUNCH((matmul_tiled<16, ROWS>), grid, block, 0, 0, c, a, b, n);
    if (version == TILE_32) LAUNCH((matmul_tiled<32, ROWS>), grid, block, 0, 0, c, a, b, n);
    if (version == TRANSPOSED) LAUNCH((matmul_tiled<32, COLUMNS>), grid, block, 0, 0, c, a, b, n);
    if (version == PAD) LAUNCH((matmul_tiled<32, PADDED>), grid, block, 0, 0, c, a, b, n);
    if (version == SWIZZLE) LAUNCH((matmul_tiled<32, SWIZZLED>), grid, block, 0, 0, c, a, b, n);
}

// n a multiple of 32.
static Work formula(int version, double n) {
    const double T = tile_of[version], warps = n * n / 32, tiles = n / T;
    Work w = {};
    w.load_requests = warps * (version == NONE ? 2 * n : 2 * tiles);
    w.load_sectors = warps * (version == NONE ? 5 * n : 2 * 4 * tiles);
    w.store_requests = warps;
    w.store_sectors = 4 * warps;
    w.memory_sectors = 3 * n * n / 8;
    w.flops = 2 * n * n * n;
    w.flop_instructions = warps * n;
    if (version == NONE) return w;
    w.shared_passes = warps * tiles * (2 + 2 * T);
    w.shared_conflicts = version == TRANSPOSED ? warps * tiles * 31 * T : 0;
    w.barriers = 2 * tiles * tiles * tiles;
    return w;
}

static bool is_transposed(int version) { return version >= TRANSPOSED; }

static Proof check(int version) {
    Proof proof;
    for (int64_t size : {0, 1, 47, 64})
        prove_matmul(
            &proof, size, is_transposed(version),
            [&](float *c, const float *a, const float *b, int64_t n) { launch(version, c, a, b, n); });
    return proof;
}

static void row(int version, int64_t n) {
    const int64_t small = 64, most = ON_GPU ? n : small;
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
        {"size", OPTION_INT, &n, "4096", 32, 32768, "", "rows and columns of the table's matrices", false},
        KERNELS_OPTIONS(options),
    };
    options_parse(
        argc, argv,
        "Tiling: a matrix multiply whose blocks share what they load, and banks of shared memory.\n"
        "  tiling --gpu a100",
        table, sizeof table / sizeof *table);
    n -= n % 32;
    char *size = format_text("C = A B of %lld x %lld matrices", (long long)n, (long long)n);
    const double square = (double)n * (double)n;
    kernels_begin(&options, size, kernels_limit(&options, 12 * square, 2 * square * (double)n, 0));
    for (int v = 0; v < VERSIONS; v++) row(v, n);
    free(size);
    const Work none = formula(NONE, (double)n), tiled = formula(TILE_32, (double)n);
    report_equal("load requests, none / tiles of 32", 32, none.load_requests / tiled.load_requests, "");
    report_equal("sectors of a warp in 32 steps, none", 160,
                 none.load_sectors / (square / 32) / ((double)n / 32), "");
    report_equal("sectors of a warp in 32 steps, tiles", 8,
                 tiled.load_sectors / (square / 32) / ((double)n / 32), "");
    const double ratio = kernels_seconds(TILE_32) / kernels_seconds(NONE);
    say("tiles of 32 take %.0f%% less modelled time than none; the playbook has measured 43%%",
        100 * (1 - ratio));
    return report_verdict("tiles of 32 take %.2f of the time of none, and %.0f times fewer requests", ratio,
                          none.load_requests / tiled.load_requests);
}
