// fused_elementwise.cu: one kernel in place of five, and no intermediate result in memory. Playbook: "Fused
// Kernels", and the ELU of "How to improve performance with Kernels ?".
//
//     ELU(x) = x where x >= 0, and alpha (e^x - 1) where x < 0
//
// In a framework each operation is a kernel that reads its operands from memory and writes its result there.
// For n elements of 4 bytes (a condition takes one byte):
//
//     e = exp(x)             4 n read    4 n written
//     e = e - 1              4           4
//     e = alpha e            4           4
//     c = x < 0              4           1
//     y = c ? e : x          9           4
//                           25          17           42 n bytes in all
//     fused                  4           4            8 n, whatever is computed in between
//
// Elementwise operations compute little for the bytes they move, so time is proportional to bytes: 8 / 42.
//
// Proof: within 4 times the error of the same f32 steps on the CPU, against f64, with zero, infinities and
// large magnitudes among the elements; counts equal the formulas.
// Run: build/07_kernels/fused_elementwise           (--gpu a100, --verbose)
// Last line: PASS fused_elementwise: fused, it takes 0.19 of the modelled time …
#include "launch.h"

enum { BLOCK = 256 };
#define ALPHA 1.25f

// ---- five kernels ----

__global__ void __launch_bounds__(BLOCK) exponential(float *y, const float *x, int64_t n) {
    if (element() < n) y[element()] = expf(x[element()]);
}
__global__ void __launch_bounds__(BLOCK) minus_one(float *y, const float *x, int64_t n) {
    if (element() < n) y[element()] = x[element()] - 1;
}
__global__ void __launch_bounds__(BLOCK) times(float *y, const float *x, float factor, int64_t n) {
    if (element() < n) y[element()] = factor * x[element()];
}
__global__ void __launch_bounds__(BLOCK) is_negative(uint8_t *c, const float *x, int64_t n) {
    if (element() < n) c[element()] = x[element()] < 0;
}
// Both operands are read, whichever is selected.
__global__ void __launch_bounds__(BLOCK)
    choose(float *y, const uint8_t *c, const float *a, const float *b, int64_t n) {
    if (element() >= n) return;
    const float first = a[element()], second = b[element()];
    y[element()] = c[element()] ? first : second;
}

// ---- one ----

__global__ void __launch_bounds__(BLOCK) elu(float *y, const float *x, int64_t n) {
    if (element() >= n) return;
    const float v = x[element()], e = ALPHA * (expf(v) - 1);
    y[element()] = v < 0 ? e : v;
}

// ---- host code ----

enum { SEPARATE, FUSED, VERSIONS };
static const KernelVersion versions[VERSIONS] = {{"five kernels", BLOCK, 14, 0}, {"fused", BLOCK, 11, 0}};

// e (n) and c (n) hold the intermediate results of the five.
static void launch(int version, float *y, float *e, uint8_t *c, const float *x, int64_t n) {
    if (n == 0) return;
    const unsigned blocks = (unsigned)((n + BLOCK - 1) / BLOCK);
    if (version == FUSED) {
        LAUNCH(elu, blocks, BLOCK, 0, 0, y, x, n);
        return;
    }
    LAUNCH(exponential, blocks, BLOCK, 0, 0, e, x, n);
    LAUNCH(minus_one, blocks, BLOCK, 0, 0, e, e, n);
    LAUNCH(times, blocks, BLOCK, 0, 0, e, e, ALPHA, n);
    LAUNCH(is_negative, blocks, BLOCK, 0, 0, c, x, n);
    LAUNCH(choose, blocks, BLOCK, 0, 0, y, c, e, x, n);
}

// n a multiple of 32: a warp's words are 4 sectors, its bytes are 1.
static Work formula(int version, double n) {
    const double warps = n / 32;
    Work w = {};
    w.load_requests = warps * (version == FUSED ? 1 : 7);
    w.load_sectors = warps * (version == FUSED ? 4 : 25);
    w.store_requests = warps * (version == FUSED ? 1 : 5);
    w.store_sectors = warps * (version == FUSED ? 4 : 17);
    w.memory_sectors = w.load_sectors + w.store_sectors;  // each once a launch
    w.flops = 2 * n;
    w.flop_instructions = 2 * warps;
    w.special_instructions = warps;
    return w;
}

static Proof check(int version) {
    Proof proof;
    for (int64_t n : {0, 1, 1031}) {
        float *x = kernels_numbers(n, 3, 1);
        const float hard[] = {0.f, -INFINITY, -1e30f, 1e30f, -1e-3f, -88.f};
        for (int i = 0; n > 6 && i < 6; i++) x[i] = hard[i];
        Array<float> d_x(x, n), d_e(n), d_y(n);
        Array<uint8_t> d_c(n);
        launch(version, d_y.at, d_e.at, d_c.at, d_x.at, n);
        std::vector<float> y = d_y.host(), cpu((size_t)n);
        std::vector<double> right((size_t)n);
        for (int64_t i = 0; i < n; i++) {
            cpu[(size_t)i] = x[i] < 0 ? ALPHA * (expf(x[i]) - 1) : x[i];
            right[(size_t)i] = x[i] < 0 ? (double)ALPHA * expm1(x[i]) : x[i];
            if (x[i] == 1e30f) {  // exact, and too large for a norm: compared here
                if (y[(size_t)i] != x[i]) proof = {1, 0};
                y[(size_t)i] = cpu[(size_t)i] = 0, right[(size_t)i] = 0;
            }
        }
        free(x);
        proof.hold(y, cpu, right);
    }
    return proof;
}

static void row(int version, int64_t n) {
    const int64_t small = 4096, most = ON_GPU ? n : small;
    float *numbers = kernels_numbers(most, 3, 2);
    for (int64_t i = 0; i < most; i++) numbers[i] = -fabsf(numbers[i]);  // each lane has an exponential
    Array<float> x(numbers, most), e(most), y(most);
    Array<uint8_t> c(most);
    free(numbers);
    show_version(
        versions[version], check(version), small, n,
        [&](int64_t size) { launch(version, y.at, e.at, c.at, x.at, size); },
        [&](int64_t size) { return formula(version, (double)size); });
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int64_t n;
    Option table[] = {
        {"size", OPTION_INT, &n, "67108864", 32, 1e9, "", "elements of the table's vectors", false},
        KERNELS_OPTIONS(options),
    };
    options_parse(argc, argv,
                  "ELU as five elementwise kernels, and as one.\n"
                  "  fused_elementwise --gpu a100",
                  table, sizeof table / sizeof *table);
    n -= n % 32;
    char *size = format_text("y = ELU(x) of %lld elements", (long long)n);
    kernels_begin(&options, size, kernels_limit(&options, 8.0 * (double)n, 0, 0));
    for (int v = 0; v < VERSIONS; v++) row(v, n);
    free(size);
    const double per_element = 32 / (double)n;
    report_equal("bytes an element, five kernels", 42,
                 formula(SEPARATE, (double)n).memory_sectors * per_element, "");
    report_equal("bytes an element, fused", 8, formula(FUSED, (double)n).memory_sectors * per_element, "");
    return report_verdict("fused, it takes %.2f of the modelled time",
                          kernels_seconds(FUSED) / kernels_seconds(SEPARATE));
}
