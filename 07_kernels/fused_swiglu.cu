// fused_swiglu.cu: the MLP's activation as one kernel, forward and backward. Playbook: "Fused Kernels".
//
//     forward      y = silu(g) u                        silu(g) = g s,  s = 1 / (1 + e^-g)
//     backward     dg = dy u s (1 + g (1 - s))
//                  du = dy silu(g)
//
// With one kernel per operation, as in a framework's autograd, the words moved for each element:
//
//                  separate                                        fused
//     forward      g -> a = silu(g)       2                        g, u -> y             3
//                  a, u -> y              3
//     backward     dy, u -> da            3                        dy, g, u -> dg, du    5
//                  dy, a -> du            3
//                  da, g -> dg            3
//     kept         g, u, a                3                        g, u                  2
//
// so 5 fall to 3, and 9 to 5. What is not kept is recomputed: an exponential and a division, for which an
// elementwise kernel has time while it waits for memory. In 16 bits a word is 2 bytes, a thread moves eight
// at once, and arithmetic is in f32.
//
// Proof: y, dg and du within 4 times the error of the same steps in f32 on the CPU, rounded where the
// kernel's are, each against f64, with gates at which e^g or e^-g overflows; a part that begins anywhere has
// the bits of the whole; counts equal the formulas.
// Run: build/07_kernels/fused_swiglu           (--gpu a100, --verbose)
// Last line: PASS fused_swiglu: fused, forward takes 0.60 of the modelled time, and backward 0.56 …
#include "sixteen_bits.h"

enum { BLOCK = 256 };

// e^-g is infinite below about -88, and s then 0, as it should be.
__device__ static inline float sigmoid(float g) { return 1 / (1 + expf(-g)); }
// d silu(g) / dg
__device__ static inline float slope(float g, float s) { return s * fmaf(g, 1 - s, 1.f); }

// ---- a kernel for each operation ----

__global__ void __launch_bounds__(BLOCK) silu(float *a, const float *g, int64_t n) {
    if (element() < n) a[element()] = g[element()] * sigmoid(g[element()]);
}
__global__ void __launch_bounds__(BLOCK) times(float *y, const float *a, const float *b, int64_t n) {
    if (element() < n) y[element()] = a[element()] * b[element()];
}
__global__ void __launch_bounds__(BLOCK)
    silu_backward(float *dg, const float *da, const float *g, int64_t n) {
    if (element() >= n) return;
    const float gate = g[element()];
    dg[element()] = da[element()] * slope(gate, sigmoid(gate));
}

// ---- one each way ----

// A thread has N elements, or what is left of n.
template <class T, int N>
__global__ void __launch_bounds__(BLOCK) swiglu(T *y, const T *g, const T *u, int64_t n) {
    const int64_t first = element() * N;
    float gate[N], up[N];
    if (first >= n) return;
    load_pack(gate, g + first, n - first), load_pack(up, u + first, n - first);
#pragma unroll
    for (int j = 0; j < N; j++) up[j] = gate[j] * sigmoid(gate[j]) * up[j];
    store_pack(y + first, up, n - first);
}

// dg may be g, and du may be u.
template <class T, int N>
__global__ void __launch_bounds__(BLOCK)
    swiglu_backward(T *dg, T *du, const T *dy, const T *g, const T *u, int64_t n) {
    const int64_t first = element() * N;
    float gate[N], d[N], up[N];
    if (first >= n) return;
    load_pack(gate, g + first, n - first), load_pack(d, dy + first, n - first);
    load_pack(up, u + first, n - first);
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float s = sigmoid(gate[j]);
        up[j] = d[j] * up[j] * slope(gate[j], s);
        d[j] = d[j] * (gate[j] * s);
    }
    store_pack(dg + first, up, n - first), store_pack(du + first, d, n - first);
}

// ---- host code ----

// Packs where all arrays begin at multiples of 16 bytes.
template <class T>
static void launch_forward(cudaStream_t stream, T *y, const T *g, const T *u, int64_t n) {
    const bool packs = in_packs<T>(0, y, g, u);
    auto kernel = packs ? swiglu<T, PACK<T>> : swiglu<T, 1>;
    const int64_t each = BLOCK * (packs ? PACK<T> : 1);
    LAUNCH(kernel, (unsigned)((n + each - 1) / each), BLOCK, 0, stream, y, g, u, n);
}
template <class T>
static void launch_backward(cudaStream_t stream, T *dg, T *du, const T *dy, const T *g, const T *u,
                            int64_t n) {
    const bool packs = in_packs<T>(0, dg, du, dy, g, u);
    auto kernel = packs ? swiglu_backward<T, PACK<T>> : swiglu_backward<T, 1>;
    const int64_t each = BLOCK * (packs ? PACK<T> : 1);
    LAUNCH(kernel, (unsigned)((n + each - 1) / each), BLOCK, 0, stream, dg, du, dy, g, u, n);
}

#ifndef NO_MAIN

enum Version { FORWARD, FORWARD_FUSED, BACKWARD, BACKWARD_FUSED, VERSIONS };

// All (n). a and da lie between the separate kernels, which are shown in f32 alone.
template <class T>
struct Swiglu {
    const T *g, *u, *dy;
    T *y, *dg, *du, *a, *da;

    Swiglu from(int64_t i) const { return {g + i, u + i, dy + i, y + i, dg + i, du + i, a + i, da + i}; }
};

static void launch_separate(Version version, const Swiglu<float> &t, int64_t n) {
    const unsigned blocks = (unsigned)((n + BLOCK - 1) / BLOCK);
    if (version == FORWARD) {
        LAUNCH(silu, blocks, BLOCK, 0, 0, t.a, t.g, n);
        LAUNCH(times, blocks, BLOCK, 0, 0, t.y, t.a, t.u, n);
    }
    if (version == BACKWARD) {
        LAUNCH(times, blocks, BLOCK, 0, 0, t.da, t.dy, t.u, n);
        LAUNCH(times, blocks, BLOCK, 0, 0, t.du, t.dy, t.a, n);
        LAUNCH(silu_backward, blocks, BLOCK, 0, 0, t.dg, t.da, t.g, n);
    }
}

template <class T>
static void launch(Version version, const Swiglu<T> &t, int64_t n) {
    if (n == 0) return;
    if (version == FORWARD_FUSED) launch_forward(0, t.y, t.g, t.u, n);
    if (version == BACKWARD_FUSED) launch_backward(0, t.dg, t.du, t.dy, t.g, t.u, n);
    if constexpr (sizeof(T) == 4) launch_separate(version, t, n);
}

// Of each element: words read and written; operations, and the instructions of a warp for them.
static const struct {
    double in, out, flops, instructions;
} costs[VERSIONS] = {{3, 2, 3, 3}, {2, 1, 3, 3}, {6, 3, 8, 7}, {3, 2, 9, 8}};

// n a multiple of 256: a warp's load is 4 sectors, or 16 of eight numbers of 2 bytes to a lane.
template <class T>
static Work formula(Version version, double n) {
    const auto &cost = costs[version];
    const double warps = n / 32, requests = warps / PACK<T>, sectors = n * sizeof(T) / 32;
    Work w = {};
    w.load_requests = requests * cost.in, w.load_sectors = sectors * cost.in;
    w.store_requests = requests * cost.out, w.store_sectors = sectors * cost.out;
    w.memory_sectors = w.load_sectors + w.store_sectors;  // each once a launch
    w.flops = n * cost.flops, w.flop_instructions = warps * cost.instructions;
    w.special_instructions = 2 * warps;  // an exponential and a division
    return w;
}

// ---- proof ----

template <class T>
struct Operands {
    Numbers<T> g, u, dy;

    explicit Operands(int64_t n) : g(n, 1, 3), u(n, 2), dy(n, 3) {
        const float low = std::is_same<T, __half>::value ? -65504.f : -1e30f;
        const float hard[] = {0.f, low, -104.f, -88.f, 1e-30f, 100.f};
        for (size_t i = 0; n > 6 && i < 6; i++) g.set(i, hard[i]);
    }
};

// In C, of numbers that are T in memory.
template <class C, class T>
struct SwigluOnCpu {
    std::vector<C> y, dg, du;

    SwigluOnCpu(const Operands<T> &x, int64_t n) : y((size_t)n), dg((size_t)n), du((size_t)n) {
        for (size_t i = 0; i < (size_t)n; i++) {
            const C g = x.g.exact[i], u = x.u.exact[i], dy = x.dy.exact[i], s = 1 / (1 + std::exp(-g));
            y[i] = made<T>(g * s * u);
            dg[i] = made<T>(dy * u * s * (1 + g * (1 - s)));
            du[i] = made<T>(dy * g * s);
        }
    }
};

// What the versions need on the device.
template <class T>
struct Arrays {
    Array<T> g, u, dy, y, dg, du, a, da;

    Arrays(const Operands<T> &x, int64_t n)
        : g(x.g.narrow.data(), n),
          u(x.u.narrow.data(), n),
          dy(x.dy.narrow.data(), n),
          y(n),
          dg(n),
          du(n),
          a(n),
          da(n) {}
    Swiglu<T> at() const { return {g.at, u.at, dy.at, y.at, dg.at, du.at, a.at, da.at}; }
    // What a version has made.
    std::vector<float> first(Version version) const { return in_f32(version < BACKWARD ? y : dg); }
    std::vector<float> second() const { return in_f32(du); }
};

template <class T>
static Proof check(Version version) {
    Proof proof;
    for (int64_t n : {0, 1, 1031}) {
        const Operands<T> operands(n);
        const Arrays<T> arrays(operands, n);
        const SwigluOnCpu<float, T> cpu(operands, n);
        const SwigluOnCpu<double, T> right(operands, n);
        if (version == BACKWARD) launch(FORWARD, arrays.at(), n);  // a is kept
        launch(version, arrays.at(), n);
        const std::vector<float> once = arrays.first(version);
        if (version < BACKWARD) {
            proof.hold(once, cpu.y, right.y);
        } else {
            proof.hold(once, cpu.dg, right.dg);
            proof.hold(arrays.second(), cpu.du, right.du);
        }
        if (n < 2) continue;
        launch(version, arrays.at().from(1), n - 1);
        report_that(arrays.first(version) == once, "a part that begins at 1 differs from the whole");
    }
    return proof;
}

template <class T>
static void row(Version version, const char *name, int registers, int64_t n) {
    const int64_t small = ON_GPU ? n : 4096;
    const Operands<T> operands(small);
    const Arrays<T> arrays(operands, small);
    launch(FORWARD, arrays.at(), small);  // a is kept
    show_version(
        KernelVersion{name, BLOCK, registers, 0}, check<T>(version), small, n,
        [&](int64_t at) { launch(version, arrays.at(), at); },
        [&](int64_t at) { return formula<T>(version, (double)at); });
}

// Of numbers of so many bits.
static void begin(const KernelsOptions *options, Version way, int bits, int64_t n) {
    char *size = format_text("%s of silu(g) u, %lld elements%s", way == FORWARD ? "forward" : "backward",
                             (long long)n, bits == 16 ? ", 16 bits" : "");
    const double words = way == FORWARD ? 3 : 5;
    kernels_begin(options, size, kernels_limit(options, bits / 8.0 * words * (double)n, 0, 0));
    free(size);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int64_t n;
    Option table[] = {
        {"size", OPTION_INT, &n, "67108864", 256, 1e9, "", "elements of the table's vectors", false},
        KERNELS_OPTIONS(options),
    };
    options_parse(argc, argv,
                  "The activation SwiGLU, forward and backward, as separate kernels and fused.\n"
                  "  fused_swiglu --gpu a100",
                  table, sizeof table / sizeof *table);
    n -= n % 256;
    for (Version way : {FORWARD, BACKWARD}) {
        begin(&options, way, 32, n);
        row<float>(way, way == FORWARD ? "two kernels" : "three kernels", way == FORWARD ? 16 : 18, n);
        row<float>((Version)(way + 1), "fused", way == FORWARD ? 18 : 20, n);
    }
    for (Version fused : {FORWARD_FUSED, BACKWARD_FUSED}) {
        begin(&options, (Version)(fused - 1), 16, n);
        row<__nv_bfloat16>(fused, "fused, bf16", fused == FORWARD_FUSED ? 31 : 40, n);
        row<__half>(fused, "fused, fp16", fused == FORWARD_FUSED ? 31 : 40, n);
    }
    return report_verdict("fused, forward takes %.2f of the modelled time, and backward %.2f",
                          kernels_seconds(FORWARD_FUSED) / kernels_seconds(FORWARD),
                          kernels_seconds(BACKWARD_FUSED) / kernels_seconds(BACKWARD));
}
#endif
