// fused_swiglu.cu: the activation of the feed-forward part as one kernel, both ways. Playbook: "Fused
// Kernels".
//
//     forward      y = silu(g) u                        silu(g) = g s,  s = 1 / (1 + e^-g)
//     backward     dg = dy u s (1 + g (1 - s))
//                  du = dy silu(g)
//
// With a kernel for each operation, as a framework's autograd has them, the words moved for each element:
//
//                  separate                                        fused
//     forward      g -> a = silu(g)       2                        g, u -> y             3
//                  a, u -> y              3
//     backward     dy, u -> da            3                        dy, g, u -> dg, du    5
//                  dy, a -> du            3
//                  da, g -> dg            3
//     kept         g, u, a                3                        g, u                  2
//
// so 5 fall to 3, and 9 to 5. What is not kept is computed again: an exponential and a division, which an
// elementwise kernel has time for while it waits for memory.
//
// Proof: y, dg and du within 4 times the error of the same steps in f32 on the CPU, each against f64, with
// gates at which e^g or e^-g overflows; counts are those of the formulas.
// Run: build/07_kernels/fused_swiglu           (--gpu a100, --verbose)
// Last line: PASS fused_swiglu: fused, forward takes 0.60 of the time, and backward 0.56 …
#include "launch.h"

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

__global__ void __launch_bounds__(BLOCK) swiglu(float *y, const float *g, const float *u, int64_t n) {
    if (element() >= n) return;
    const float gate = g[element()];
    y[element()] = gate * sigmoid(gate) * u[element()];
}

__global__ void __launch_bounds__(BLOCK)
    swiglu_backward(float *dg, float *du, const float *dy, const float *g, const float *u, int64_t n) {
    if (element() >= n) return;
    const float gate = g[element()], d = dy[element()], s = sigmoid(gate);
    dg[element()] = d * u[element()] * slope(gate, s);
    du[element()] = d * (gate * s);
}

// ---- host code ----

#ifndef NO_MAIN

enum { FORWARD, FORWARD_FUSED, BACKWARD, BACKWARD_FUSED, VERSIONS };
static const KernelVersion versions[VERSIONS] = {
    {"two kernels", BLOCK, 16, 0},
    {"fused", BLOCK, 16, 0},
    {"three kernels", BLOCK, 18, 0},
    {"fused", BLOCK, 18, 0},
};

// All (n). a and da lie between the separate kernels.
struct Swiglu {
    const float *g, *u, *dy;
    float *y, *dg, *du, *a, *da;
};

static void launch(int version, const Swiglu &t, int64_t n) {
    const unsigned blocks = (unsigned)((n + BLOCK - 1) / BLOCK);
    if (n == 0) return;
    if (version == FORWARD) {
        LAUNCH(silu, blocks, BLOCK, 0, 0, t.a, t.g, n);
        LAUNCH(times, blocks, BLOCK, 0, 0, t.y, t.a, t.u, n);
    }
    if (version == FORWARD_FUSED) LAUNCH(swiglu, blocks, BLOCK, 0, 0, t.y, t.g, t.u, n);
    if (version == BACKWARD) {
        LAUNCH(times, blocks, BLOCK, 0, 0, t.da, t.dy, t.u, n);
        LAUNCH(times, blocks, BLOCK, 0, 0, t.du, t.dy, t.a, n);
        LAUNCH(silu_backward, blocks, BLOCK, 0, 0, t.dg, t.da, t.g, n);
    }
    if (version == BACKWARD_FUSED)
        LAUNCH(swiglu_backward, blocks, BLOCK, 0, 0, t.dg, t.du, t.dy, t.g, t.u, n);
}

// Of each element: words read and written; operations, and the instructions of a warp for them.
static const struct {
    double in, out, flops, instructions;
} costs[VERSIONS] = {{3, 2, 3, 3}, {2, 1, 3, 3}, {6, 3, 8, 7}, {3, 2, 9, 8}};

// n a multiple of 32: a warp's words are 4 sectors.
static Work formula(int version, double n) {
    const auto &cost = costs[version];
    const double warps = n / 32;
    Work w = {};
    w.load_requests = warps * cost.in, w.load_sectors = 4 * w.load_requests;
    w.store_requests = warps * cost.out, w.store_sectors = 4 * w.store_requests;
    w.memory_sectors = w.load_sectors + w.store_sectors;  // each once a launch
    w.flops = n * cost.flops, w.flop_instructions = warps * cost.instructions;
    w.special_instructions = 2 * warps;  // an exponential and a division
    return w;
}

struct Numbers {
    float *g, *u, *dy;

    explicit Numbers(int64_t n)
        : g(kernels_numbers(n, 3, 1)), u(kernels_numbers(n, 1, 2)), dy(kernels_numbers(n, 1, 3)) {
        const float hard[] = {0.f, -1e30f, -104.f, -88.f, 1e-30f, 100.f};
        for (int i = 0; n > 6 && i < 6; i++) g[i] = hard[i];
    }
    ~Numbers() { free(g), free(u), free(dy); }
};

template <class T>
struct SwigluOnCpu {
    std::vector<T> y, dg, du;

    SwigluOnCpu(const Numbers &x, int64_t n) : y((size_t)n), dg((size_t)n), du((size_t)n) {
        for (size_t i = 0; i < (size_t)n; i++) {
            const T g = x.g[i], u = x.u[i], dy = x.dy[i], s = 1 / (1 + std::exp(-g));
            y[i] = g * s * u;
            dg[i] = dy * u * s * (1 + g * (1 - s));
            du[i] = dy * g * s;
        }
    }
};

// What the versions need on the device.
struct Arrays {
    Array<float> g, u, dy, y, dg, du, a, da;

    Arrays(const Numbers &x, int64_t n)
        : g(x.g, n), u(x.u, n), dy(x.dy, n), y(n), dg(n), du(n), a(n), da(n) {}
    Swiglu at() const { return {g.at, u.at, dy.at, y.at, dg.at, du.at, a.at, da.at}; }
};

static Proof check(int version) {
    Proof proof;
    for (int64_t n : {0, 1, 1031}) {
        const Numbers numbers(n);
        const Arrays arrays(numbers, n);
        const SwigluOnCpu<float> cpu(numbers, n);
        const SwigluOnCpu<double> right(numbers, n);
        if (version == BACKWARD) launch(FORWARD, arrays.at(), n);  // a is kept
        launch(version, arrays.at(), n);
        if (version < BACKWARD) {
            proof.hold(arrays.y.host(), cpu.y, right.y);
            continue;
        }
        proof.hold(arrays.dg.host(), cpu.dg, right.dg);
        proof.hold(arrays.du.host(), cpu.du, right.du);
    }
    return proof;
}

static void row(int version, int64_t n) {
    const int64_t small = ON_GPU ? n : 4096;
    const Numbers numbers(small);
    const Arrays arrays(numbers, small);
    launch(FORWARD, arrays.at(), small);  // a is kept
    show_version(
        versions[version], check(version), small, n, [&](int64_t at) { launch(version, arrays.at(), at); },
        [&](int64_t at) { return formula(version, (double)at); });
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
                  "The activation SwiGLU, both ways, as kernels of their own and as one.\n"
                  "  fused_swiglu --gpu a100",
                  table, sizeof table / sizeof *table);
    n -= n % 32;
    for (int way = FORWARD; way < VERSIONS; way += 2) {
        char *size = format_text("%s of silu(g) u, %lld elements", way == FORWARD ? "forward" : "backward",
                                 (long long)n);
        const double words = way == FORWARD ? 3 : 5;
        kernels_begin(&options, size, kernels_limit(&options, 4 * words * (double)n, 0, 0));
        row(way, n);
        row(way + 1, n);
        free(size);
    }
    return report_verdict("fused, forward takes %.2f of the time, and backward %.2f",
                          kernels_seconds(FORWARD_FUSED) / kernels_seconds(FORWARD),
                          kernels_seconds(BACKWARD_FUSED) / kernels_seconds(BACKWARD));
}
#endif
