// fused_norm.cu: the residual addition and RMSNorm as one kernel, both ways. Playbook: "Fused Kernels".
//
//     forward      x' = x + r                      the stream of residuals, which goes on
//                  y  = x' rstd w                  rstd = 1 / sqrt(mean(x'^2) + eps), one a row, is kept
//     backward     g  = dy w,  u = x' rstd
//                  dx = dx' + rstd (g - u mean(u g))
//                  dw = the sum over rows of dy u
//
// Each computes little for what it moves. In words for each element of n rows of h:
//
//                  separate                                 fused
//     forward      x, r -> x'     x' -> y            5      x, r -> x', y           4
//     backward     dy, x' -> d    dx', d -> dx       6      dx', dy, x' -> dx       4
//
// and beside them h words of w, n of rstd; backward h for each of its B blocks, which each add up dw over
// rows of their own, and which a second kernel reads: 2 B h + h. A block has a row at a time: between its
// sum over the row and what is made of it the row stays in shared memory, where each thread has its own
// words, and is not read twice. The order of every sum is fixed: two runs agree in every bit.
//
// Proof: within 4 times the error of the same steps in f32 on the CPU, each against f64, on odd and prime
// widths, with elements of large magnitude; the bytes are those of the formulas and not one more.
// Run: build/07_kernels/fused_norm           (--gpu a100, --width 4096, --verbose)
// Last line: PASS fused_norm: fused, forward takes 0.80 of the time, and backward 0.67 …
#include "launch.h"

enum { BLOCK = 256, WARPS = BLOCK / 32 };
constexpr int64_t MOST_BLOCKS = 264;  // two for each multiprocessor of an H100
constexpr float EPSILON = 1e-5f;

__global__ void __launch_bounds__(BLOCK) add(float *y, const float *a, const float *b, int64_t n) {
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) y[i] = a[i] + b[i];
}

// Block (row). x (=) x + r where there is an r to add.
template <bool FUSED>
__global__ void __launch_bounds__(BLOCK) norm(float *y, float *rstd, float *x_new, const float *x,
                                              const float *r, const float *w, int h, float inverse_h,
                                              float epsilon) {
    DYNAMIC_SHARED(float, row);
    __shared__ float sums[WARPS];
    const int64_t first = (int64_t)blockIdx.x * h;
    float sum = 0;
    for (int i = threadIdx.x; i < h; i += BLOCK) {
        float v = x[first + i];
        if (FUSED) x_new[first + i] = v = v + r[first + i];
        row[i] = v;
        sum = fmaf(v, v, sum);
    }
    const float scale = rsqrtf(fmaf(over_block<added, WARPS>(sum, 0, sums), inverse_h, epsilon));
    for (int i = threadIdx.x; i < h; i += BLOCK) y[first + i] = row[i] * scale * w[i];
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
}

// Block b has rows b, b + blocks, ...; dw_parts (blocks, h) (=) its part of dw.
template <bool FUSED>
__global__ void __launch_bounds__(BLOCK)
    norm_backward(float *dx, float *dw_parts, const float *dy, const float *x, const float *rstd,
                  const float *w, const float *dx_new, int64_t rows, int h, float inverse_h) {
    DYNAMIC_SHARED(float, g);
    __shared__ float sums[WARPS];
    float *u = g + h, *dw = u + h;
    for (int i = threadIdx.x; i < h; i += BLOCK) dw[i] = 0;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const float scale = rstd[row];
        float sum = 0;
        for (int i = threadIdx.x; i < h; i += BLOCK) {
            const float d = dy[row * h + i], unit = x[row * h + i] * scale, scaled = d * w[i];
            g[i] = scaled, u[i] = unit;
            dw[i] = fmaf(d, unit, dw[i]);
            sum = fmaf(unit, scaled, sum);
        }
        const float mean = over_block<added, WARPS>(sum, 0, sums) * inverse_h;
        for (int i = threadIdx.x; i < h; i += BLOCK) {
            const float d = fmaf(-u[i], mean, g[i]);
            dx[row * h + i] = FUSED ? fmaf(scale, d, dx_new[row * h + i]) : scale * d;
        }
        __syncthreads();  // everybody has read the sums
    }
    for (int i = threadIdx.x; i < h; i += BLOCK) dw_parts[(int64_t)blockIdx.x * h + i] = dw[i];
}

// dw (=) the sum of its parts, in order: a thread for each column.
__global__ void __launch_bounds__(BLOCK) add_parts(float *dw, const float *parts, int blocks, int h) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i >= h) return;
    float sum = 0;
    for (int b = 0; b < blocks; b++) sum += parts[(int64_t)b * h + i];
    dw[i] = sum;
}

// ---- host code ----

#ifndef NO_MAIN

enum { FORWARD, FORWARD_FUSED, BACKWARD, BACKWARD_FUSED, VERSIONS };

// x, r, y, x_new, dy, dx_new, dx, between (n, h); w, dw (h); rstd (n); parts (MOST_BLOCKS, h)
struct Norm {
    const float *x, *r, *w, *dy, *dx_new;
    float *x_new, *y, *rstd, *dx, *dw, *between, *parts;
};

static unsigned blocks_of(int64_t rows) { return (unsigned)(rows < MOST_BLOCKS ? rows : MOST_BLOCKS); }

static void launch(int version, const Norm &t, int64_t n, int h) {
    if (n == 0) return;
    const unsigned elements = (unsigned)((n * h + BLOCK - 1) / BLOCK), rows = (unsigned)n;
    const unsigned blocks = blocks_of(n), columns = (unsigned)((h + BLOCK - 1) / BLOCK);
    const size_t row_bytes = (size_t)h * 4, rows_bytes = 3 * row_bytes;
    const float inverse = 1.f / (float)h;
    for (auto kernel : {norm_backward<false>, norm_backward<true>})
        CUDA_CHECK(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)rows_bytes));
    if (version == FORWARD) {
        LAUNCH(add, elements, BLOCK, 0, 0, t.x_new, t.x, t.r, n * h);
        LAUNCH(norm<false>, rows, BLOCK, row_bytes, 0, t.y, t.rstd, NULL, t.x_new, NULL, t.w, h, inverse,
               EPSILON);
    }
    if (version == FORWARD_FUSED)
        LAUNCH(norm<true>, rows, BLOCK, row_bytes, 0, t.y, t.rstd, t.x_new, t.x, t.r, t.w, h, inverse,
               EPSILON);
    if (version == BACKWARD) {
        LAUNCH(norm_backward<false>, blocks, BLOCK, rows_bytes, 0, t.between, t.parts, t.dy, t.x_new,
               t.rstd, t.w, NULL, n, h, inverse);
        LAUNCH(add, elements, BLOCK, 0, 0, t.dx, t.dx_new, t.between, n * h);
    }
    if (version == BACKWARD_FUSED)
        LAUNCH(norm_backward<true>, blocks, BLOCK, rows_bytes, 0, t.dx, t.parts, t.dy, t.x_new, t.rstd, t.w,
               t.dx_new, n, h, inverse);
    if (version >= BACKWARD) LAUNCH(add_parts, columns, BLOCK, 0, 0, t.dw, t.parts, (int)blocks, h);
}

// Vectors of n h words that a version reads, w not among them, and writes.
static const struct { double in, out; } vectors[VERSIONS] = {{3, 2}, {2, 2}, {4, 2}, {3, 1}};

// n a multiple of 8, h of 256: a warp's words are 4 sectors.
static Work formula(int version, double n, double h) {
    const bool backward = version >= BACKWARD;
    const double in = vectors[version].in, out = vectors[version].out;
    const double warps = n * h / 32, parts = blocks_of((int64_t)n) * h;
    Work w = {};
    w.load_requests = warps * (in + 1) + (backward ? n * WARPS + parts / 32 : 0);  // and w
    w.load_sectors = 4 * warps * (in + 1) + (backward ? n * WARPS + parts / 8 : 0);
    w.store_requests = warps * out + (backward ? (parts + h) / 32 : n);
    w.store_sectors = 4 * warps * out + (backward ? (parts + h) / 8 : n);
    w.memory_sectors = (n * h * (in + out) + h + n + (backward ? 2 * parts + h : 0)) / 8;
    // the sum of a row: each warp leaves one word, and reads all
    const double sums = n * (WARPS + WARPS * WARPS);
    w.shared_passes = sums + (backward ? 6 * warps + 2 * parts / 32 : 2 * warps);
    w.barriers = n * (backward ? 2 : 1);
    // forward: the addition, the square, two multiplications
    w.flops =
        (backward ? 10 : 5) * n * h + n * BLOCK * (5 + WARPS + (backward ? 1 : 2)) + (backward ? parts : 0);
    w.flop_instructions = warps * (version == BACKWARD ? 7
                                   : backward          ? 6
                                                       : 4) +
                          n * WARPS * (5 + WARPS + 1) + (backward ? parts / 32 : 0);
    w.special_instructions = backward ? 0 : 2 * n * WARPS;  // a division and a root
    return w;
}

template <class T>
struct NormOnCpu {
    std::vector<T> x, y, dx, dw;

    NormOnCpu(const Norm &t, int64_t n, int h)
        : x((size_t)(n * h)), y((size_t)(n * h)), dx((size_t)(n * h)), dw((size_t)h) {
        for (int64_t row = 0; row < n; row++) {
            const size_t first = (size_t)(row * h);
            T sum = 0, mean = 0;
            for (size_t i = first; i < first + (size_t)h; i++)
                x[i] = (T)t.x[i] + (T)t.r[i], sum += x[i] * x[i];
            const T scale = 1 / std::sqrt(sum / h + (T)EPSILON);
            for (size_t i = first; i < first + (size_t)h; i++) {
                y[i] = x[i] * scale * t.w[i - first];
                mean += x[i] * scale * t.dy[i] * t.w[i - first] / h;
                dw[i - first] += t.dy[i] * x[i] * scale;
            }
            for (size_t i = first; i < first + (size_t)h; i++)
                dx[i] = t.dx_new[i] + scale * (t.dy[i] * t.w[i - first] - x[i] * scale * mean);
        }
    }
};

struct Numbers {
    float *x, *r, *w, *dy, *dx_new;

    Numbers(int64_t n, int h, double scale)
        : x(kernels_numbers(n * h, scale, 1)),
          r(kernels_numbers(n * h, scale, 2)),
          w(kernels_numbers(h, 1, 3)),
          dy(kernels_numbers(n * h, 1, 4)),
          dx_new(kernels_numbers(n * h, 1, 5)) {}
    ~Numbers() { free(x), free(r), free(w), free(dy), free(dx_new); }
};

// What the versions need on the device.
struct Arrays {
    Array<float> x, r, w, dy, dx_new, x_new, y, rstd, dx, dw, between, parts;

    Arrays(const Numbers &m, int64_t n, int h)
        : x(m.x, n * h),
          r(m.r, n * h),
          w(m.w, h),
          dy(m.dy, n * h),
          dx_new(m.dx_new, n * h),
          x_new(n * h),
          y(n * h),
          rstd(n),
          dx(n * h),
          dw(h),
          between(n * h),
          parts(MOST_BLOCKS * h) {}
    Norm at() const {
        return {x.at, r.at,    w.at,  dy.at, dx_new.at,  x_new.at,
                y.at, rstd.at, dx.at, dw.at, between.at, parts.at};
    }
};

static Proof check(int version) {
    Proof proof;
    const struct {
        int64_t n;
        int h;
        double scale;
    } cases[] = {{0, 7, 1}, {1, 37, 1}, {3, 521, 1e4}, {300, 5, 1}};
    for (auto &c : cases) {
        const Numbers numbers(c.n, c.h, c.scale);
        const Arrays arrays(numbers, c.n, c.h);
        const Norm on_host = {numbers.x, numbers.r, numbers.w, numbers.dy, numbers.dx_new, NULL,
                              NULL,      NULL,      NULL,      NULL,       NULL,           NULL};
        const NormOnCpu<float> cpu(on_host, c.n, c.h);
        const NormOnCpu<double> right(on_host, c.n, c.h);
        launch(version % 2, arrays.at(), c.n, c.h);
        launch(version, arrays.at(), c.n, c.h);
        if (c.n == 0) continue;
        if (version < BACKWARD) {
            proof.hold(arrays.x_new.host(), cpu.x, right.x);
            proof.hold(arrays.y.host(), cpu.y, right.y);
            continue;
        }
        const std::vector<float> once = arrays.dw.host();
        proof.hold(once, cpu.dw, right.dw);
        proof.hold(arrays.dx.host(), cpu.dx, right.dx);
        launch(version, arrays.at(), c.n, c.h);
        report_that(arrays.dw.host() == once, "two runs with %lld rows differ", (long long)c.n);
    }
    return proof;
}

static void row(int version, const char *name, int registers, int64_t n, int h) {
    const int64_t small_rows = ON_GPU ? n : 16;
    const int small_h = ON_GPU ? h : 512;
    const Numbers numbers(small_rows, small_h, 1);
    const Arrays arrays(numbers, small_rows, small_h);
    launch(version % 2, arrays.at(), small_rows, small_h);  // backward reads what forward has made
    const KernelVersion v = {name, BLOCK, registers,
                             (version >= BACKWARD ? 12 : 4) * (int64_t)h + 4 * WARPS};
    const struct Size {
        int64_t rows;
        int h;
    } small = {small_rows, small_h}, size = {n, h};
    show_version(
        v, check(version), small, size, [&](Size at) { launch(version, arrays.at(), at.rows, at.h); },
        [&](Size at) { return formula(version, (double)at.rows, at.h); });
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int64_t n, h;
    Option table[] = {
        {"rows", OPTION_INT, &n, "8192", 8, 1e6, "", "rows of the table's matrices: tokens", false},
        {"width", OPTION_INT, &h, "4096", 256, 8192, "", "elements of a row", false},
        KERNELS_OPTIONS(options),
    };
    options_parse(argc, argv,
                  "A residual addition and RMSNorm, both ways, as kernels of their own and as one.\n"
                  "  fused_norm --gpu a100 --width 8192",
                  table, sizeof table / sizeof *table);
    n -= n % 8, h -= h % BLOCK;
    for (int way = FORWARD; way < VERSIONS; way += 2) {
        char *size = format_text("%s of x + r and RMSNorm, %lld rows of %lld",
                                 way == FORWARD ? "forward" : "backward", (long long)n, (long long)h);
        kernels_begin(&options, size, kernels_limit(&options, 16.0 * (double)n * (double)h, 0, 0));
        row(way, "two kernels", way == FORWARD ? 32 : 40, n, (int)h);
        row(way + 1, "fused", way == FORWARD ? 32 : 40, n, (int)h);
        free(size);
    }
    return report_verdict("fused, forward takes %.2f of the time, and backward %.2f",
                          kernels_seconds(FORWARD_FUSED) / kernels_seconds(FORWARD),
                          kernels_seconds(BACKWARD_FUSED) / kernels_seconds(BACKWARD));
}
#endif
