// divergence.cu: lanes of a warp that take different branches wait for one another. Playbook: "Minimizing
// Control Divergence".
//
// A warp issues one instruction at a time for all of its 32 lanes. Where lanes disagree at a branch, the
// warp takes both sides, one after the other, each with the lanes that chose it active:
//
//     if (i % 2) y = p(A x)      lanes . X . X . X …      p takes K instructions of the warp here,
//     else       y = p(B x)      lanes X . X . X . …      and K more here
//
// Three ways to compute p(z), a polynomial of degree K, of z = A x for odd elements and z = B x for even:
//
//     branch by lane       2 K instructions, in each of which half of the lanes are active
//     branch by warp       a warp takes elements of one kind: K, but loads and stores are 8 sectors, not 4
//     factored out         only z depends on the lane, and choosing it needs no branch: K, and 4 sectors
//
// nvcc does the last by itself where both sides of a branch end in the same code; in the first two,
// end_of_side prevents it.
//
// The other example is a loop of 8 to 256 iterations, depending on the element: a warp runs until its last
// lane is done. If elements are distributed so that the lanes of a warp need equally many iterations, a warp
// takes 132 on average instead of 256, but its loads take 32 sectors.
//
// Proof: within 4 times the error of the same steps in f32 on the CPU, against f64; counts equal the
// formulas.
// Run: build/07_kernels/divergence           (--gpu a100, --verbose)
// Last line: PASS divergence: a branch by lane costs 2.00 times the instructions of one by warp …
#include "cuda/instructions.h"
#include "launch.h"

enum { BLOCK = 256, DEGREE = 256, TURNS = 8 };
#define A 0.75f
#define B -0.5f

// ---- p, and the three ways to it ----

__host__ __device__ static inline float p(float z) {
    float sum = 0.5f;
    for (int k = 0; k < DEGREE; k++) sum = fmaf(sum, z, 0.25f);
    return sum;
}

__global__ void __launch_bounds__(BLOCK) branch_by_lane(float *y, const float *x, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float z = x[i];
    if (i % 2) z = p(A * z), end_of_side<1>();
    else z = p(B * z), end_of_side<2>();
    y[i] = z;
}

// Threads of the first half of the grid take the even elements, threads of the second half the odd ones.
__global__ void __launch_bounds__(BLOCK) branch_by_warp(float *y, const float *x, int64_t n) {
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, half = (int64_t)gridDim.x * blockDim.x / 2;
    int64_t i = t < half ? 2 * t : 2 * (t - half) + 1;
    if (i >= n) return;
    float z = x[i];
    if (i % 2) z = p(A * z), end_of_side<1>();
    else z = p(B * z), end_of_side<2>();
    y[i] = z;
}

__global__ void __launch_bounds__(BLOCK) factored_out(float *y, const float *x, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float factor = fmaf((float)(i % 2), A - B, B);
    y[i] = p(factor * x[i]);
}

// ---- loops ----

__host__ __device__ static inline int turns_of(int64_t i) { return TURNS * (int)(i % 32 + 1); }

__host__ __device__ static inline float repeat(float x, int turns) {
    float sum = 0.5f;
    for (int k = 0; k < turns; k++) sum = fmaf(sum, x, 0.25f);
    return sum;
}

__global__ void __launch_bounds__(BLOCK) turns_by_lane(float *y, const float *x, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = repeat(x[i], turns_of(i));
}

// Of each 1024 elements, lane l of warp w takes element 32 l + w: lanes have the same i % 32.
__global__ void __launch_bounds__(1024) turns_by_warp(float *y, const float *x, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * 1024 + threadIdx.x % 32 * 32 + threadIdx.x / 32;
    if (i < n) y[i] = repeat(x[i], turns_of(i));
}

// ---- host code ----

enum { BY_LANE, BY_WARP, FACTORED, LOOP_BY_LANE, LOOP_BY_WARP, VERSIONS };
static const KernelVersion versions[VERSIONS] = {
    {"branch by lane", BLOCK, 9, 0}, {"branch by warp", BLOCK, 12, 0}, {"factored out", BLOCK, 11, 0},
    {"turns by lane", BLOCK, 12, 0}, {"turns by warp", 1024, 12, 0},
};

static void launch(int version, float *y, const float *x, int64_t n) {
    if (n == 0) return;
    unsigned blocks = (unsigned)((n + BLOCK - 1) / BLOCK), even = blocks + blocks % 2;
    if (version == BY_LANE) LAUNCH(branch_by_lane, blocks, BLOCK, 0, 0, y, x, n);
    if (version == BY_WARP) LAUNCH(branch_by_warp, even, BLOCK, 0, 0, y, x, n);
    if (version == FACTORED) LAUNCH(factored_out, blocks, BLOCK, 0, 0, y, x, n);
    if (version == LOOP_BY_LANE) LAUNCH(turns_by_lane, blocks, BLOCK, 0, 0, y, x, n);
    if (version == LOOP_BY_WARP) LAUNCH(turns_by_warp, (unsigned)((n + 1023) / 1024), 1024, 0, 0, y, x, n);
}

// n a multiple of 1024.
static Work formula(int version, double n) {
    static const double sectors[] = {4, 8, 4, 4, 32};
    static const double instructions[] = {2 * (DEGREE + 1), DEGREE + 1, DEGREE + 2, 32 * TURNS,
                                          16.5 * TURNS};
    static const double flops[] = {2 * DEGREE + 1, 2 * DEGREE + 1, 2 * DEGREE + 3, 33 * TURNS, 33 * TURNS};
    Work w = {};
    w.load_requests = w.store_requests = n / 32;
    w.load_sectors = w.store_sectors = n / 32 * sectors[version];
    w.memory_sectors = n / 4;
    w.flop_instructions = n / 32 * instructions[version];
    w.flops = n * flops[version];
    return w;
}

static float on_cpu(int version, float x, int64_t i) {
    if (version >= LOOP_BY_LANE) return repeat(x, turns_of(i));
    return p((i % 2 ? A : B) * x);
}

static double exactly(int version, double x, int64_t i) {
    double sum = 0.5, z = version >= LOOP_BY_LANE ? x : (i % 2 ? A : B) * x;
    int turns = version >= LOOP_BY_LANE ? turns_of(i) : DEGREE;
    for (int k = 0; k < turns; k++) sum = sum * z + 0.25;
    return sum;
}

static Proof check(int version) {
    Proof proof;
    for (int64_t n : {0, 1, 1031}) {
        float *x = kernels_numbers(n, 0.25, 1);
        Array<float> d_x(x, n), d_y(n);
        launch(version, d_y.at, d_x.at, n);
        std::vector<float> cpu((size_t)n);
        std::vector<double> right((size_t)n);
        for (int64_t i = 0; i < n; i++) {
            cpu[(size_t)i] = on_cpu(version, x[i], i);
            right[(size_t)i] = exactly(version, x[i], i);
        }
        free(x);
        proof.hold(d_y.host(), cpu, right);
    }
    return proof;
}

static void row(int version, int64_t n) {
    const int64_t small = 2048, most = ON_GPU ? n : small;
    float *numbers = kernels_numbers(most, 0.25, 2);
    Array<float> x(numbers, most), y(most);
    free(numbers);
    show_version(
        versions[version], check(version), small, n,
        [&](int64_t size) { launch(version, y.at, x.at, size); },
        [&](int64_t size) { return formula(version, (double)size); });
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int64_t n;
    Option table[] = {
        {"size", OPTION_INT, &n, "67108864", 1024, 1e9, "", "elements of the table's vectors", false},
        KERNELS_OPTIONS(options),
    };
    options_parse(argc, argv,
                  "Divergence: branches and loops in which the lanes of a warp disagree, or do not.\n"
                  "  divergence --gpu a100",
                  table, sizeof table / sizeof *table);
    n -= n % 1024;
    const double elements = (double)n;
    char *size = format_text("p(A x) or p(B x), degree %d, of %lld elements", (int)DEGREE, (long long)n);
    kernels_begin(&options, size, kernels_limit(&options, 8 * elements, (2 * DEGREE + 1) * elements, 0));
    for (int v = BY_LANE; v <= FACTORED; v++) row(v, n);
    free(size);
    size = format_text("\n%d to %d turns, of %lld elements", (int)TURNS, 32 * TURNS, (long long)n);
    kernels_begin(&options, size, kernels_limit(&options, 8 * elements, 33 * TURNS * elements, 0));
    for (int v = LOOP_BY_LANE; v <= LOOP_BY_WARP; v++) row(v, n);
    free(size);
    Work lane = formula(BY_LANE, elements), warp = formula(BY_WARP, elements);
    return report_verdict("a branch by lane costs %.2f times the instructions of one by warp",
                          lane.flop_instructions / warp.flop_instructions);
}
