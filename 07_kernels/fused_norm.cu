// fused_norm.cu: the residual addition and RMSNorm as one kernel, forward and backward. Playbook: "Fused
// Kernels".
//
//     forward      x' = x + r                      the stream of residuals, which goes on
//                  y  = x' rstd w                  rstd = 1 / sqrt(mean(x'^2) + eps), one a row, is kept
//     backward     g  = dy w,  u = x' rstd
//                  dx = dx' + rstd (g - u mean(u g))
//                  dw = the sum over rows of dy u
//
// Both compute little for what they move. In words for each element of n rows of h:
//
//                  separate                                 fused
//     forward      x, r -> x'     x' -> y            5      x, r -> x', y           4
//     backward     dy, x' -> d    dx', d -> dx       6      dx', dy, x' -> dx       4
//
// and besides these h words of w and n of rstd. In backward each of B blocks sums dw over its own rows and
// writes h words, which a second kernel reads: 2 B h + h more. A block takes one row at a time, and keeps it
// in shared memory between the sum over it and its second use, so it is not read twice; each thread has its
// own words there. The order of every sum is fixed: two runs agree in every bit.
//
// In 16 bits a word is 2 bytes, except for rstd and the partial sums of dw, and a thread loads eight at
// once. All arithmetic is in f32. x' is rounded before its norm is taken: backward has only the rounded x'.
//
// Proof: within 4 times the error of the same steps in f32 on the CPU, rounded where the kernel's are, each
// against f64, on odd and prime widths, with elements of large magnitude; rstd and dw have the error of f32;
// the bytes equal the formulas exactly.
// Run: build/07_kernels/fused_norm           (--gpu a100, --width 4096, --verbose)
// Last line: PASS fused_norm: fused, forward takes 0.80 of the modelled time, and backward 0.67 …
#include "sixteen_bits.h"

enum { BLOCK = 256, WARPS = BLOCK / 32 };
constexpr int64_t MOST_BLOCKS = 264;  // two for each multiprocessor of an H100
constexpr float EPSILON = 1e-5f;

__global__ void __launch_bounds__(BLOCK) add(float *y, const float *a, const float *b, int64_t n) {
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) y[i] = a[i] + b[i];
}

// Block (row). A thread has every BLOCK-th pack of N. x (=) x + r where there is an r to add.
template <class T, int N, bool FUSED>
__global__ void __launch_bounds__(BLOCK) norm(T *y, float *rstd, T *x_new, const T *x, const T *r,
                                              const T *w, int h, float inverse_h, float epsilon) {
    DYNAMIC_SHARED(T, row);
    __shared__ float sums[WARPS];
    const int64_t first = (int64_t)blockIdx.x * h;
    float sum = 0, v[N], other[N];
    for (int i = threadIdx.x * N; i < h; i += BLOCK * N) {
        load_pack(v, x + first + i);
        if (FUSED) {
            load_pack(other, r + first + i);
#pragma unroll
            for (int j = 0; j < N; j++) v[j] = stored<T>(v[j] + other[j]);
            store_pack(x_new + first + i, v);
        }
        store_pack(row + i, v);
#pragma unroll
        for (int j = 0; j < N; j++) sum = fmaf(v[j], v[j], sum);
    }
    const float scale = rsqrtf(fmaf(over_block<added, WARPS>(sum, 0, sums), inverse_h, epsilon));
    for (int i = threadIdx.x * N; i < h; i += BLOCK * N) {
        load_pack(v, row + i);
        load_pack(other, w + i);
#pragma unroll
        for (int j = 0; j < N; j++) v[j] = v[j] * scale * other[j];
        store_pack(y + first + i, v);
    }
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
}

// Block b has rows b, b + blocks, ...; dw_parts (blocks, h) (=) its part of dw. In shared memory and in the
// parts words are in the order (N, packs), so that those of neighbouring threads are neighbours. With packs,
// registers are limited so that four blocks fit on a multiprocessor: all run at once even on an A100, some of
// whose 108 get three. 0: nvcc may choose.
template <class T, int N, bool FUSED>
__global__ void __launch_bounds__(BLOCK, N == 1 ? 0 : 4)
    norm_backward(T *dx, float *dw_parts, const T *dy, const T *x, const float *rstd, const T *w,
                  const T *dx_new, int64_t rows, int h, float inverse_h) {
    DYNAMIC_SHARED(float, g);
    __shared__ float sums[WARPS];
    constexpr int AHEAD = N == 1 ? 8 : 1;
    float *u = g + h, *dw = u + h, d[N], unit[N], scaled[N], next[AHEAD][N];
    const int packs = h / N;
    for (int i = threadIdx.x; i < packs; i += BLOCK)
#pragma unroll
        for (int j = 0; j < N; j++) dw[j * packs + i] = 0;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const float scale = rstd[row];
        float sum = 0;
        for (int i = threadIdx.x; i < packs; i += BLOCK) {
            load_pack(d, dy + row * h + i * N), load_pack(unit, x + row * h + i * N);
            load_pack(scaled, w + i * N);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const int word = j * packs + i;
                unit[j] *= scale, scaled[j] *= d[j];
                g[word] = scaled[j], u[word] = unit[j];
                dw[word] = fmaf(d[j], unit[j], dw[word]);
                sum = fmaf(unit[j], scaled[j], sum);
            }
        }
        const float mean = over_block<added, WARPS>(sum, 0, sums) * inverse_h;
        // dx may be dx_new, so no load can move ahead of a store to dx: AHEAD loads are issued first
        for (int first = threadIdx.x; first < packs; first += AHEAD * BLOCK) {
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                if (FUSED && first + k * BLOCK < packs)
                    load_pack(next[k], dx_new + row * h + (first + k * BLOCK) * N);
#pragma unroll
            for (int k = 0, i = first; k < AHEAD && i < packs; k++, i += BLOCK) {
#pragma unroll
                for (int j = 0; j < N; j++) {
                    d[j] = fmaf(-u[j * packs + i], mean, g[j * packs + i]);
                    d[j] = FUSED ? fmaf(scale, d[j], next[k][j]) : scale * d[j];
                }
                store_pack(dx + row * h + i * N, d);
            }
        }
        __syncthreads();  // all threads have read the sums
    }
    for (int i = threadIdx.x; i < packs; i += BLOCK)
#pragma unroll
        for (int j = 0; j < N; j++) dw_parts[(int64_t)blockIdx.x * h + j * packs + i] = dw[j * packs + i];
}

// dw (=) the sum of its parts, in order: a thread for each column.
template <int N>
__global__ void __launch_bounds__(BLOCK) add_parts(float *dw, const float *parts, int blocks, int h) {
    const int i = blockIdx.x * BLOCK + threadIdx.x, packs = h / N;
    if (i >= h) return;
    float sum = 0;
    for (int b = 0; b < blocks; b++) sum += parts[(int64_t)b * h + i];
    dw[N == 1 ? i : i % packs * N + i / packs] = sum;
}

// ---- host code ----

static unsigned blocks_of(int64_t rows) { return (unsigned)(rows < MOST_BLOCKS ? rows : MOST_BLOCKS); }
// Of shared memory, for a row of words of so many bytes; backward has three in f32.
static size_t forward_bytes(int64_t h, size_t word) { return (size_t)h * word; }
static size_t backward_bytes(int64_t h) { return (size_t)(3 * h) * 4; }

// x, r, y, x_new, dy, dx_new, dx (n, h); w, dw (h); rstd (n); parts (blocks_of(n), h). Forward without r,
// and backward without dx_new, are RMSNorm alone.
template <class T>
struct Norm {
    const T *x, *r, *w, *dy, *dx_new;
    T *x_new, *y, *dx;
    float *rstd, *dw, *parts;
};

template <class T, int N, bool FUSED>
static void forward_on(cudaStream_t stream, const Norm<T> &t, int64_t n, int h, float epsilon) {
    const size_t bytes = forward_bytes(h, sizeof(T));
    allow_shared(norm<T, N, FUSED>, bytes);
    LAUNCH((norm<T, N, FUSED>), (unsigned)n, BLOCK, bytes, stream, t.y, t.rstd, t.x_new, t.x, t.r, t.w, h,
           1 / (float)h, epsilon);
}
template <class T>
static void launch_forward(cudaStream_t stream, const Norm<T> &t, int64_t n, int h, float epsilon) {
    const bool packs = in_packs<T>(h, t.x, t.r, t.w, t.x_new, t.y);
    auto run = packs ? forward_on<T, PACK<T>, false> : forward_on<T, 1, false>;
    if (t.r) run = packs ? forward_on<T, PACK<T>, true> : forward_on<T, 1, true>;
    run(stream, t, n, h, epsilon);
}

template <class T, int N, bool FUSED>
static void backward_on(cudaStream_t stream, const Norm<T> &t, int64_t n, int h) {
    const unsigned blocks = blocks_of(n), columns = (unsigned)((h + BLOCK - 1) / BLOCK);
    const size_t bytes = backward_bytes(h);
    allow_shared(norm_backward<T, N, FUSED>, bytes);
    LAUNCH((norm_backward<T, N, FUSED>), blocks, BLOCK, bytes, stream, t.dx, t.parts, t.dy, t.x, t.rstd,
           t.w, t.dx_new, n, h, 1 / (float)h);
    LAUNCH(add_parts<N>, columns, BLOCK, 0, stream, t.dw, t.parts, (int)blocks, h);
}
template <class T>
static void launch_backward(cudaStream_t stream, const Norm<T> &t, int64_t n, int h) {
    const bool packs = in_packs<T>(h, t.x, t.w, t.dy, t.dx_new, t.dx);
    auto run = packs ? backward_on<T, PACK<T>, false> : backward_on<T, 1, false>;
    if (t.dx_new) run = packs ? backward_on<T, PACK<T>, true> : backward_on<T, 1, true>;
    run(stream, t, n, h);
}

#ifndef NO_MAIN

enum Version { FORWARD, FORWARD_FUSED, BACKWARD, BACKWARD_FUSED, VERSIONS };

// A kernel for each step; shown only in f32. between (n, h): the intermediate result of backward.
static void launch_separate(Version version, const Norm<float> &t, float *between, int64_t n, int h) {
    const unsigned elements = (unsigned)((n * h + BLOCK - 1) / BLOCK);
    Norm<float> alone = t;
    alone.x = t.x_new, alone.r = alone.dx_new = NULL;
    if (version == FORWARD) {
        LAUNCH(add, elements, BLOCK, 0, 0, t.x_new, t.x, t.r, n * h);
        launch_forward(0, alone, n, h, EPSILON);
    }
    if (version == BACKWARD) {
        alone.dx = between;
        launch_backward(0, alone, n, h);
        LAUNCH(add, elements, BLOCK, 0, 0, t.dx, t.dx_new, between, n * h);
    }
}

template <class T>
static void launch(Version version, Norm<T> t, T *between, int64_t n, int h) {
    if (n == 0) return;
    if constexpr (sizeof(T) == 4) launch_separate(version, t, between, n, h);
    if (version == FORWARD_FUSED) launch_forward(0, t, n, h, EPSILON);
    t.x = t.x_new;
    if (version == BACKWARD_FUSED) launch_backward(0, t, n, h);
}

// Of a version: vectors of n h words that it reads, w not among them, and writes; instructions for each word.
static const struct { double in, out, each; } does[VERSIONS] = {{3, 2, 4}, {2, 2, 4}, {4, 2, 7}, {3, 1, 6}};

// n a multiple of 8, h of 256: a warp's load is 4 sectors, or 16 of eight numbers of 2 bytes to a lane.
template <class T>
static Work formula(Version version, double n, double h) {
    const bool backward = version >= BACKWARD;
    const double in = does[version].in, out = does[version].out;
    const double warps = n * h / 32, parts = blocks_of((int64_t)n) * h;
    const double requests = warps / PACK<T>, sectors = n * h * sizeof(T) / 32;
    Work w = {};
    w.load_requests = requests * (in + 1) + (backward ? n * WARPS + parts / 32 : 0);  // and w
    w.load_sectors = sectors * (in + 1) + (backward ? n * WARPS + parts / 8 : 0);
    w.store_requests = requests * out + (backward ? (parts + h) / 32 : n);
    // of dw a warp writes every eighth word where packs have eight
    w.store_sectors = sectors * out + (backward ? parts / 8 + h * PACK<T> / 8 : n);
    w.memory_sectors =
        (sizeof(T) * (n * h * (in + out) + h) + 4 * (n + (backward ? 2 * parts + h : 0))) / 32;
    // the sum of a row: each warp leaves one word, and reads all
    const double sums = n * (WARPS + WARPS * WARPS);
    w.shared_passes = sums + (backward ? 6 * warps + 2 * parts / 32 : n * h * sizeof(T) / 64);
    w.barriers = n * (backward ? 2 : 1);
    // forward: the addition, the square, two multiplications
    w.flops =
        (backward ? 10 : 5) * n * h + n * BLOCK * (5 + WARPS + (backward ? 1 : 2)) + (backward ? parts : 0);
    w.flop_instructions =
        warps * does[version].each + n * WARPS * (5 + WARPS + 1) + (backward ? parts / 32 : 0);
    w.special_instructions = backward ? 0 : 2 * n * WARPS;  // a division and a root
    return w;
}

// ---- proof ----

template <class T>
struct Operands {
    Numbers<T> x, r, w, dy, dx_new;

    Operands(int64_t n, int h, double scale)
        : x(n * h, 1, scale), r(n * h, 2, scale), w(h, 3), dy(n * h, 4), dx_new(n * h, 5) {}
};

// In C, of numbers that are T in memory.
template <class C, class T>
struct NormOnCpu {
    std::vector<C> x, rstd, y, dx, dw;

    NormOnCpu(const Operands<T> &t, int64_t n, int h)
        : x((size_t)(n * h)), rstd((size_t)n), y((size_t)(n * h)), dx((size_t)(n * h)), dw((size_t)h) {
        const float *r = t.r.exact.data(), *w = t.w.exact.data(), *dy = t.dy.exact.data();
        for (int64_t row = 0; row < n; row++) {
            const size_t first = (size_t)(row * h);
            C sum = 0, mean = 0;
            for (size_t i = first; i < first + (size_t)h; i++) {
                x[i] = (C)t.x.exact[i] + (C)r[i];
                if (sizeof(T) == 2) x[i] = (C)stored<T>((float)x[i]);
                sum += x[i] * x[i];
            }
            const C scale = rstd[(size_t)row] = 1 / std::sqrt(sum / h + (C)EPSILON);
            for (size_t i = first; i < first + (size_t)h; i++) {
                y[i] = made<T>(x[i] * scale * w[i - first]);
                mean += x[i] * scale * dy[i] * w[i - first] / h;
                dw[i - first] += dy[i] * x[i] * scale;
            }
            for (size_t i = first; i < first + (size_t)h; i++)
                dx[i] = made<T>(t.dx_new.exact[i] + scale * (dy[i] * w[i - first] - x[i] * scale * mean));
        }
    }
};

// What the versions need on the device.
template <class T>
struct Arrays {
    Array<T> x, r, w, dy, dx_new, x_new, y, dx, between;
    Array<float> rstd, dw, parts;

    Arrays(const Operands<T> &m, int64_t n, int h)
        : x(m.x.narrow.data(), n * h),
          r(m.r.narrow.data(), n * h),
          w(m.w.narrow.data(), h),
          dy(m.dy.narrow.data(), n * h),
          dx_new(m.dx_new.narrow.data(), n * h),
          x_new(n * h),
          y(n * h),
          dx(n * h),
          between(n * h),
          rstd(n),
          dw(h),
          parts(MOST_BLOCKS * h) {}
    void run(Version version, int64_t n, int h) const {
        launch<T>(version,
                  {x.at, r.at, w.at, dy.at, dx_new.at, x_new.at, y.at, dx.at, rstd.at, dw.at, parts.at},
                  between.at, n, h);
    }
};

template <class T>
static Proof check(Version version) {
    Proof proof, sums;
    Proof *of_dw = sizeof(T) == 4 ? &proof : &sums;  // which is f32 in any case
    const struct {
        int64_t n;
        int h;
        double scale;
    } cases[] = {{0, 7, 1}, {1, 37, 1}, {3, 521, 1e4}, {300, 5, 1}, {2, 2104, 1}};
    for (auto &c : cases) {
        if (c.h % 8 == 0 && PACK<T> == 1) continue;  // rows in packs, and more than a block has threads
        const Operands<T> operands(c.n, c.h, c.scale);
        const Arrays<T> arrays(operands, c.n, c.h);
        const NormOnCpu<float, T> cpu(operands, c.n, c.h);
        const NormOnCpu<double, T> right(operands, c.n, c.h);
        arrays.run((Version)(version % 2), c.n, c.h);
        arrays.run(version, c.n, c.h);
        if (c.n == 0) continue;
        if (version < BACKWARD) {
            const double off = kernels_error(arrays.rstd.host().data(), right.rstd.data(), c.n);
            report_that(off <= 4e-7, "rstd is off by %.1e, where f32 is allowed 4e-7", off);
            proof.hold(in_f32(arrays.x_new), cpu.x, right.x);
            proof.hold(in_f32(arrays.y), cpu.y, right.y);
            continue;
        }
        const std::vector<float> once = arrays.dw.host();
        of_dw->hold(once, cpu.dw, right.dw);
        proof.hold(in_f32(arrays.dx), cpu.dx, right.dx);
        arrays.run(version, c.n, c.h);
        report_that(arrays.dw.host() == once, "two runs with %lld rows differ", (long long)c.n);
    }
    report_that(sums.error <= sums.bound, "dw is off by %.1e, where %.1e is allowed", sums.error,
                sums.bound);
    return proof;
}

template <class T>
static void row(Version version, const char *name, int registers, int64_t n, int h) {
    const int64_t small_rows = ON_GPU ? n : 16;
    const int small_h = ON_GPU ? h : 512;
    const Operands<T> operands(small_rows, small_h, 1);
    const Arrays<T> arrays(operands, small_rows, small_h);
    arrays.run((Version)(version % 2), small_rows, small_h);  // backward reads what forward has made
    const size_t bytes = version >= BACKWARD ? backward_bytes(h) : forward_bytes(h, sizeof(T));
    const KernelVersion v = {name, BLOCK, registers, (int64_t)bytes + 4 * WARPS};
    const struct Size {
        int64_t rows;
        int h;
    } small = {small_rows, small_h}, size = {n, h};
    show_version(
        v, check<T>(version), small, size, [&](Size at) { arrays.run(version, at.rows, at.h); },
        [&](Size at) { return formula<T>(version, (double)at.rows, at.h); });
}

// Of numbers of so many bits.
static void begin(const KernelsOptions *options, Version way, int bits, int64_t n, int64_t h) {
    char *size =
        format_text("%s of x + r and RMSNorm, %lld rows of %lld%s", way == FORWARD ? "forward" : "backward",
                    (long long)n, (long long)h, bits == 16 ? ", 16 bits" : "");
    kernels_begin(options, size, kernels_limit(options, bits / 2.0 * (double)n * (double)h, 0, 0));
    free(size);
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
                  "A residual addition and RMSNorm, forward and backward, as separate kernels and fused.\n"
                  "  fused_norm --gpu a100 --width 8192",
                  table, sizeof table / sizeof *table);
    n -= n % 8, h -= h % BLOCK;
    for (Version way : {FORWARD, BACKWARD}) {
        begin(&options, way, 32, n, h);
        row<float>(way, "two kernels", way == FORWARD ? 32 : 40, n, (int)h);
        row<float>((Version)(way + 1), "fused", way == FORWARD ? 32 : 48, n, (int)h);
    }
    for (Version fused : {FORWARD_FUSED, BACKWARD_FUSED}) {
        begin(&options, (Version)(fused - 1), 16, n, h);
        row<__nv_bfloat16>(fused, "fused, bf16", fused == FORWARD_FUSED ? 46 : 64, n, (int)h);
        row<__half>(fused, "fused, fp16", fused == FORWARD_FUSED ? 46 : 64, n, (int)h);
    }
    return report_verdict("fused, forward takes %.2f of the modelled time, and backward %.2f",
                          kernels_seconds(FORWARD_FUSED) / kernels_seconds(FORWARD),
                          kernels_seconds(BACKWARD_FUSED) / kernels_seconds(BACKWARD));
}
#endif
