// coalescing.cu: lanes of a warp that read neighbouring words are served together. Playbook: "Memory
// Coalescing".
//
// A warp is 32 threads, its lanes, that execute the same instruction together. Memory moves sectors of 32
// bytes, eight words of f32. A warp's load is one request, which moves every sector that its lanes touch,
// however few of its bytes they use:
//
//     strided      lane l reads word l s       32 sectors for 32 words: 1024 bytes moved, 128 used
//     coalesced    lane l reads word l          4 sectors: all that is moved is used
//     vectorised   lane l reads words 4 l …    16 sectors for 128 words, in one request in place of four
//
// The playbook's matrix multiply, C = A B, has a thread for each C[x][y]; each step of its loop loads
// A[x][i] and B[i][y]:
//
//     by x    lanes differ in x: A's column is strided, all read one word of B:     32 + 1 sectors a step
//     by y    lanes differ in y: all read one word of A, B's row is coalesced:       1 + 4
//
// Requests: a copy of n words takes n / 32 loads and as many stores; a product of n x n matrices takes
// n^3 / 32 steps of a warp, with 2 loads each.
//
// Proof: copies are exact; products are within 4 times the error of the library's f32 product, each against
// f64, at sizes that fill no block; counts equal the formulas.
// Run: build/07_kernels/coalescing           (--gpu a100, --size 4096, --verbose)
// Last line: PASS coalescing: by y takes 0.15 of the modelled time of by x …
#include "launch.h"

enum { BLOCK = 256, STRIDE = 8, SIDE = 32 };  // SIDE x SIDE threads make a block of a product

// ---- copies: y[i] = x[…] ----

__global__ void __launch_bounds__(BLOCK) copy_strided(float *y, const float *x, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i * STRIDE];
}

__global__ void __launch_bounds__(BLOCK) copy_coalesced(float *y, const float *x, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
}

// n is a multiple of 4.
__global__ void __launch_bounds__(BLOCK) copy_vectorised(float *y, const float *x, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n / 4) reinterpret_cast<float4 *>(y)[i] = reinterpret_cast<const float4 *>(x)[i];
}

// ---- C (n, n) = A B ----

// The playbook's matmul_naive: threadIdx.x, in which the lanes of a warp differ, is the row.
__global__ void __launch_bounds__(SIDE *SIDE)
    matmul_by_x(float *c, const float *a, const float *b, int64_t n) {
    int64_t x = (int64_t)blockIdx.x * SIDE + threadIdx.x, y = (int64_t)blockIdx.y * SIDE + threadIdx.y;
    if (x >= n || y >= n) return;
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum = fmaf(a[x * n + i], b[i * n + y], sum);
    c[x * n + y] = sum;
}

// The same with one difference: the block has one dimension, and neighbouring threads are neighbours in y.
__global__ void __launch_bounds__(SIDE *SIDE)
    matmul_by_y(float *c, const float *a, const float *b, int64_t n) {
    int64_t x = (int64_t)blockIdx.x * SIDE + threadIdx.x / SIDE;
    int64_t y = (int64_t)blockIdx.y * SIDE + threadIdx.x % SIDE;
    if (x >= n || y >= n) return;
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum = fmaf(a[x * n + i], b[i * n + y], sum);
    c[x * n + y] = sum;
}

// ---- host code ----

enum { STRIDED, COALESCED, VECTORISED, BY_X, BY_Y, VERSIONS };
static const KernelVersion versions[VERSIONS] = {
    {"copy, strided", BLOCK, 10, 0},    {"copy, coalesced", BLOCK, 8, 0},
    {"copy, vectorised", BLOCK, 14, 0}, {"matmul by x", SIDE *SIDE, 32, 0},
    {"matmul by y", SIDE *SIDE, 32, 0},
};

static unsigned blocks_of(int64_t n, int64_t of_block) { return (unsigned)((n + of_block - 1) / of_block); }

static void launch(int version, float *y, const float *a, const float *b, int64_t n) {
    if (n == 0) return;
    dim3 tiles(blocks_of(n, SIDE), blocks_of(n, SIDE));
    if (version == STRIDED) LAUNCH(copy_strided, blocks_of(n, BLOCK), BLOCK, 0, 0, y, a, n);
    if (version == COALESCED) LAUNCH(copy_coalesced, blocks_of(n, BLOCK), BLOCK, 0, 0, y, a, n);
    if (version == VECTORISED) LAUNCH(copy_vectorised, blocks_of(n / 4, BLOCK), BLOCK, 0, 0, y, a, n);
    if (version == BY_X) LAUNCH(matmul_by_x, tiles, dim3(SIDE, SIDE), 0, 0, y, a, b, n);
    if (version == BY_Y) LAUNCH(matmul_by_y, tiles, SIDE * SIDE, 0, 0, y, a, b, n);
}

// n words copied, or n x n matrices; a multiple of 128.
static Work formula(int version, double n) {
    Work w = {};
    if (version <= VECTORISED) {
        static const double load_sectors[] = {32, 4, 16};
        w.load_requests = w.store_requests = n / (version == VECTORISED ? 128 : 32);
        w.load_sectors = w.load_requests * load_sectors[version];
        w.store_sectors = n / 8;
        w.memory_sectors = version == STRIDED ? n + n / 8 : n / 4;
        return w;
    }
    double steps = n * n * n / 32;
    w.load_requests = 2 * steps;
    w.load_sectors = steps * (version == BY_X ? 32 + 1 : 1 + 4);
    w.store_requests = n * n / 32;
    w.store_sectors = w.store_requests * (version == BY_X ? 32 : 4);
    w.memory_sectors = 3 * n * n / 8;
    w.flops = 2 * n * n * n;
    w.flop_instructions = steps;
    return w;
}

// For copies, the words that differ; for products, the error.
static void check_copy(Proof *proof, int version, int64_t n) {
    float *x = kernels_numbers(n * STRIDE, 1e30, 1);
    Array<float> d_x(x, n * STRIDE), d_y(n);
    launch(version, d_y.at, d_x.at, NULL, n);
    std::vector<float> y = d_y.host();
    double wrong = 0;
    for (int64_t i = 0; i < n; i++) wrong += !(y[(size_t)i] == x[version == STRIDED ? i * STRIDE : i]);
    free(x);
    if (wrong > 0) *proof = {wrong, 0};
}

static Proof check(int version) {
    Proof proof;
    if (version <= VECTORISED)
        for (int64_t n : {0, version == VECTORISED ? 4 : 1, 52, 68}) check_copy(&proof, version, n);
    else
        for (int64_t size : {0, 1, 53, 69})
            prove_matmul(&proof, size, false, [&](float *c, const float *a, const float *b, int64_t n) {
                launch(version, c, a, b, n);
            });
    return proof;
}

static void row(int version, int64_t n, int64_t small) {
    const int64_t most = ON_GPU ? n : small, count = version <= VECTORISED ? most * STRIDE : most * most;
    float *numbers = kernels_numbers(count, 1, 5);
    Array<float> a(numbers, count), b(numbers, count), y(count);
    free(numbers);
    show_version(
        versions[version], check(version), small, n,
        [&](int64_t size) { launch(version, y.at, a.at, b.at, size); },
        [&](int64_t size) { return formula(version, (double)size); });
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int64_t words, n;
    Option table[] = {
        {"words", OPTION_INT, &words, "67108864", 128, 1e9, "", "words that the table's copies copy",
         false},
        {"size", OPTION_INT, &n, "4096", 128, 32768, "", "rows and columns of the table's matrices", false},
        KERNELS_OPTIONS(options),
    };
    options_parse(
        argc, argv,
        "Coalescing: copies and matrix multiplies whose lanes read neighbouring words, or do not.\n"
        "  coalescing --gpu a100",
        table, sizeof table / sizeof *table);
    words -= words % 128, n -= n % 128;
    char *size = format_text("copies of %lld words", (long long)words);
    kernels_begin(&options, size, kernels_limit(&options, 8.0 * (double)words, 0, 0));
    for (int v = STRIDED; v <= VECTORISED; v++) row(v, words, 4096);
    free(size);
    size = format_text("\nC = A B of %lld x %lld matrices", (long long)n, (long long)n);
    double square = (double)n * (double)n;
    kernels_begin(&options, size, kernels_limit(&options, 12 * square, 2 * square * (double)n, 0));
    for (int v = BY_X; v <= BY_Y; v++) row(v, n, 64);
    free(size);
    double ratio = kernels_seconds(BY_Y) / kernels_seconds(BY_X);
    say("by y takes %.2f of the modelled time of by x; the playbook has measured about 0.1", ratio);
    return report_verdict("by y takes %.2f of the modelled time of by x, sectors a step are 33 and 5",
                          ratio);
}
