// fused_adamw.cu: the optimizer's step in one pass over flat ranges, 16-bit weights included. Playbook:
// "Fused Kernels", and the memory of "Mixed Precision Training".
//
//     g = scale dw                          the gradient, in bf16; scale clips it to a norm
//     m = beta1 m + (1 - beta1) g           both moments and the master weight w in f32
//     v = beta2 v + (1 - beta2) g^2
//     w = keep w - rate m / (sqrt(v) widen + eps)
//     weight = bf16(w)                      what the next step computes with
//
// keep = 1 - lr decay, rate = lr / (1 - beta1^t) and widen = 1 / sqrt(1 - beta2^t) depend on the step t
// alone. scale is read from device memory, where the norm was reduced: the host need not wait for it.
//
// Bytes read + written for a weight:
//
//                  separate                             fused
//     g            2 + 4                                2
//     m            8 + 4    m and g are read            4 + 4
//     v            8 + 4    v and g                     4 + 4
//     w            12 + 4   w, m and v                  4 + 4
//     weight       4 + 2                                    2
//                  52                                   28
//
// A range may be updated whole or in shards that begin anywhere, with the same bits: an element's result
// does not depend on its neighbours, or on the thread that computes it.
//
// Proof: w, m and v after three steps within 4 times the error of the same steps in f32 on the CPU, each
// against f64; weights have the bits of bf16(w), and shards those of the whole; counts equal the formulas.
// Run: build/07_kernels/fused_adamw           (--gpu a100, --verbose)
// Last line: PASS fused_adamw: fused, a step takes 0.54 of the modelled time …
#include "cuda/gpu_numbers.h"
#include "launch.h"

enum { BLOCK = 256 };

// What all elements share in one step.
struct Step {
    float beta1, beta2, fresh1, fresh2, rate, widen, eps, keep;
};

__device__ static inline float first_moment(float m, float g, const Step &c) {
    return fmaf(c.beta1, m, c.fresh1 * g);
}
__device__ static inline float second_moment(float v, float g, const Step &c) {
    return fmaf(c.beta2, v, c.fresh2 * (g * g));
}
__device__ static inline float weight_after(float w, float m, float v, const Step &c) {
    return fmaf(c.keep, w, -(c.rate * m / fmaf(sqrtf(v), c.widen, c.eps)));
}

// ---- a kernel for each line ----

__global__ void __launch_bounds__(BLOCK)
    clip(float *g, const __nv_bfloat16 *dw, const float *scale, int64_t n) {
    if (element() < n) g[element()] = *scale * __bfloat162float(dw[element()]);
}
__global__ void __launch_bounds__(BLOCK) step_m(float *m, const float *g, Step c, int64_t n) {
    if (element() < n) m[element()] = first_moment(m[element()], g[element()], c);
}
__global__ void __launch_bounds__(BLOCK) step_v(float *v, const float *g, Step c, int64_t n) {
    if (element() < n) v[element()] = second_moment(v[element()], g[element()], c);
}
__global__ void __launch_bounds__(BLOCK)
    step_w(float *w, const float *m, const float *v, Step c, int64_t n) {
    if (element() < n) w[element()] = weight_after(w[element()], m[element()], v[element()], c);
}
__global__ void __launch_bounds__(BLOCK) narrow(__nv_bfloat16 *weight, const float *w, int64_t n) {
    if (element() < n) weight[element()] = __float2bfloat16_rn(w[element()]);
}

// ---- one ----

// Of 16-bit weights, or f32 ones, of which w is the only copy; gradients may be of another type.
template <class T, class G>
__global__ void __launch_bounds__(BLOCK)
    adamw(T *weight, float *w, float *m, float *v, const G *dw, const float *scale, Step c, int64_t n) {
    const int64_t i = element();
    if (i >= n) return;
    const float g = *scale * static_cast<float>(dw[i]);
    const float m_new = first_moment(m[i], g, c), v_new = second_moment(v[i], g, c);
    const float w_new = weight_after(w[i], m_new, v_new, c);
    m[i] = m_new, v[i] = v_new, w[i] = w_new;
    if (sizeof(T) == 2) weight[i] = static_cast<T>(w_new);
}

// ---- host code ----

#ifndef NO_MAIN

// t counts from 1.
static Step step_of(int t) {
    const double b1 = 0.9, b2 = 0.95, lr = 1e-3, decay = 0.1;
    return {(float)b1,
            (float)b2,
            (float)(1 - b1),
            (float)(1 - b2),
            (float)(lr / (1 - pow(b1, t))),
            (float)(1 / sqrt(1 - pow(b2, t))),
            1e-8f,
            (float)(1 - lr * decay)};
}

enum { SEPARATE, FUSED, VERSIONS };
static const KernelVersion versions[VERSIONS] = {{"five kernels", BLOCK, 18, 0}, {"fused", BLOCK, 24, 0}};

// All (n); g lies between the separate kernels.
struct State {
    __nv_bfloat16 *weight;
    float *w, *m, *v, *g;
    const __nv_bfloat16 *dw;
    const float *scale;  // one word

    State from(int64_t first) const {
        return {weight + first, w + first, m + first, v + first, g + first, dw + first, scale};
    }
};

static void launch(int version, const State &s, const Step &step, int64_t n) {
    const unsigned blocks = (unsigned)((n + BLOCK - 1) / BLOCK);
    if (n == 0) return;
    if (version == FUSED) {
        LAUNCH((adamw<__nv_bfloat16, __nv_bfloat16>), blocks, BLOCK, 0, 0, s.weight, s.w, s.m, s.v, s.dw,
               s.scale, step, n);
        return;
    }
    LAUNCH(clip, blocks, BLOCK, 0, 0, s.g, s.dw, s.scale, n);
    LAUNCH(step_m, blocks, BLOCK, 0, 0, s.m, s.g, step, n);
    LAUNCH(step_v, blocks, BLOCK, 0, 0, s.v, s.g, step, n);
    LAUNCH(step_w, blocks, BLOCK, 0, 0, s.w, s.m, s.v, step, n);
    LAUNCH(narrow, blocks, BLOCK, 0, 0, s.weight, s.w, n);
}

// n a multiple of 32: a warp's f32 words are 4 sectors, its bf16 words are 2; scale is 1.
static Work formula(int version, double n) {
    const double warps = n / 32;
    Work w = {};
    w.load_requests = warps * (version == FUSED ? 5 : 10);
    w.load_sectors = warps * (version == FUSED ? 2 + 1 + 3 * 4 : 2 + 1 + 8 * 4);
    w.store_requests = warps * (version == FUSED ? 4 : 5);
    w.store_sectors = warps * (version == FUSED ? 3 * 4 + 2 : 4 * 4 + 2);
    w.memory_sectors = warps * (version == FUSED ? 28 : 52) + 1;  // and scale
    w.flops = 13 * n;                                             // 1 + 3 + 4 + 5
    w.flop_instructions = 9 * warps;
    w.special_instructions = 2 * warps;  // a root and a division
    return w;
}

// ---- proof ----

template <class T>
struct StepsOnCpu {
    std::vector<T> w, m, v;

    StepsOnCpu(const std::vector<float> &w0, const std::vector<float> &dw, float scale, int steps)
        : w(w0.begin(), w0.end()), m(w0.size()), v(w0.size()) {
        for (int t = 1; t <= steps; t++) {
            const Step c = step_of(t);
            for (size_t i = 0; i < w.size(); i++) {
                const T g = (T)scale * dw[i];
                m[i] = c.beta1 * m[i] + c.fresh1 * g;
                v[i] = c.beta2 * v[i] + c.fresh2 * g * g;
                w[i] = c.keep * w[i] - c.rate * m[i] / (std::sqrt(v[i]) * c.widen + c.eps);
            }
        }
    }
};

// What the versions need on the device, m = v = 0.
struct Arrays {
    static constexpr float SCALE = 0.37f;
    std::vector<float> w0, dw_wide;
    Array<__nv_bfloat16> weight, dw;
    Array<float> w, m, v, g, scale;

    explicit Arrays(int64_t n)
        : w0(numbers(n, 1)),
          dw_wide(numbers(n, 2)),
          weight(n),
          dw(n),
          w(w0.data(), n),
          m(n),
          v(n),
          g(n),
          scale(1) {
        const float factor = SCALE;
        std::vector<__nv_bfloat16> narrow((size_t)n);
        for (size_t i = 0; i < narrow.size(); i++) {
            narrow[i] = __float2bfloat16_rn(dw_wide[i]);
            dw_wide[i] = __bfloat162float(narrow[i]);
        }
        if (n) CUDA_CHECK(cudaMemcpy(dw.at, narrow.data(), (size_t)n * 2, cudaMemcpyHostToDevice));
        CUDA_CHECK(cudaMemcpy(scale.at, &factor, sizeof factor, cudaMemcpyHostToDevice));
        CUDA_CHECK(cudaMemset(m.at, 0, (size_t)n * 4));
        CUDA_CHECK(cudaMemset(v.at, 0, (size_t)n * 4));
    }
    static std::vector<float> numbers(int64_t n, int stream) {
        float *x = kernels_numbers(n, 1, stream);
        std::vector<float> all(x, x + n);
        free(x);
        return all;
    }
    State at() const { return {weight.at, w.at, m.at, v.at, g.at, dw.at, scale.at}; }
};

static bool same_bits(const std::vector<__nv_bfloat16> &weight, const std::vector<float> &w) {
    for (size_t i = 0; i < w.size(); i++)
        if (__bfloat16_as_ushort(weight[i]) != __bfloat16_as_ushort(__float2bfloat16_rn(w[i])))
            return false;
    return true;
}

// Three steps of n elements, and of the same in shards.
static Proof check(int version) {
    Proof proof;
    for (int64_t n : {0, 1, 1031}) {
        const int steps = 3;
        const Arrays whole(n), shards(n);
        for (int t = 1; t <= steps; t++) {
            launch(version, whole.at(), step_of(t), n);
            const int64_t border = n / 3;
            launch(version, shards.at().from(border), step_of(t), n - border);
            launch(version, shards.at(), step_of(t), border);
        }
        const StepsOnCpu<float> cpu(whole.w0, whole.dw_wide, Arrays::SCALE, steps);
        const StepsOnCpu<double> right(whole.w0, whole.dw_wide, Arrays::SCALE, steps);
        const std::vector<float> w = whole.w.host();
        proof.hold(w, cpu.w, right.w);
        proof.hold(whole.m.host(), cpu.m, right.m);
        proof.hold(whole.v.host(), cpu.v, right.v);
        report_that(same_bits(whole.weight.host(), w), "%s: a weight is not its master in bf16",
                    versions[version].name);
        report_that(shards.w.host() == w, "%s: shards differ from the whole", versions[version].name);
    }
    return proof;
}

static void row(int version, int64_t n) {
    const int64_t small = ON_GPU ? n : 4096;
    const Arrays arrays(small);
    const Step step = step_of(1);
    show_version(
        versions[version], check(version), small, n,
        [&](int64_t at) { launch(version, arrays.at(), step, at); },
        [&](int64_t at) { return formula(version, (double)at); });
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int64_t n;
    Option table[] = {
        {"size", OPTION_INT, &n, "67108864", 32, 1e9, "", "weights of the table's range", false},
        KERNELS_OPTIONS(options),
    };
    options_parse(argc, argv,
                  "A step of AdamW as five kernels, and as one.\n"
                  "  fused_adamw --gpu a100",
                  table, sizeof table / sizeof *table);
    n -= n % 32;
    char *size = format_text("a step of AdamW, %lld weights in bf16 with masters", (long long)n);
    kernels_begin(&options, size, kernels_limit(&options, 28.0 * (double)n, 0, 0));
    for (int v = 0; v < VERSIONS; v++) row(v, n);
    free(size);
    return report_verdict("fused, a step takes %.2f of the modelled time",
                          kernels_seconds(FUSED) / kernels_seconds(SEPARATE));
}
#endif
