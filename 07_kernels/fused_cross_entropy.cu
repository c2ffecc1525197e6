// fused_cross_entropy.cu: the loss over a large vocabulary in one pass over the logits, and its gradient,
// which overwrites them. Playbook: "Fused Kernels"; the running sum is Milakov and Gimelshein's, "Online
// normalizer calculation for softmax", 2018, and FlashAttention's.
//
//     loss = lse - x[target]        lse = m + log(sum(e^(x - m))), m = max(x), of a row of v logits
//     dx   = scale (e^(x - lse) - [target])
//
// A row of 131072 logits takes 512 kB, more than a block can keep. A softmax that stores its result reads
// the row for the maximum, for the sum, and for the result. The fused forward keeps a running maximum and
// sum, and rescales the sum when the maximum grows, for four logits at a time:
//
//     m' = max(m, x0 ... x3)        sum = sum e^(m - m') + e^(x0 - m') + ... + e^(x3 - m')
//
//     words for each logit           loads   stores      kept          beside them, for each row
//     log-probabilities stored       3 + 1   1 + 1       3, x, log p, dx
//     fused                          1 + 1   0 + 1       1, x          loss, lse, target
//
// The gradient overwrites the logits, so there is no second array: at 8192 tokens the logits alone take 4.29
// GB. The model favours the stored version: a row stays in L2 from its first read to its third.
//
// A thread takes eight 16-bit logits at once; arithmetic, loss and lse are in f32. Elements of an f16
// gradient that are rounded to zero are counted.
//
// Proof: loss and gradient within 4 times the error of the same steps in f32 on the CPU, the gradient
// rounded where the kernel's is, each against f64, on odd and prime vocabularies, with logits of large
// magnitude and of -inf, and with a row that has no target, but a NaN; twice the same bits.
// Run: build/07_kernels/fused_cross_entropy           (--gpu a100, --vocabulary 32768, --verbose)
// Last line: PASS fused_cross_entropy: fused, it takes 0.75 of the modelled time, and a third of …
#include "sixteen_bits.h"

enum { BLOCK = 256, WARPS = BLOCK / 32 };
// Logits that a thread takes between two rescalings: a pack, or four that lie BLOCK apart.
template <int N>
constexpr int EACH = N == 1 ? 4 : N;

// ---- log-probabilities stored ----

// Block (row).
__global__ void __launch_bounds__(BLOCK)
    log_softmax(float *log_p, float *loss, const float *logits, const int *targets, int64_t v) {
    __shared__ float maxima[WARPS];
    __shared__ float sums[WARPS];
    const float *x = logits + blockIdx.x * v;
    float most = -INFINITY, total = 0;
    for (int64_t i = threadIdx.x; i < v; i += BLOCK) most = fmaxf(most, x[i]);
    most = over_block<larger, WARPS>(most, -INFINITY, maxima);
    for (int64_t i = threadIdx.x; i < v; i += BLOCK) total += expf(x[i] - most);
    const float lse = most + logf(over_block<added, WARPS>(total, 0, sums));
    for (int64_t i = threadIdx.x; i < v; i += BLOCK) log_p[blockIdx.x * v + i] = x[i] - lse;
    if (threadIdx.x == 0) loss[blockIdx.x] = lse - x[targets[blockIdx.x]];
}

__global__ void __launch_bounds__(BLOCK)
    log_softmax_backward(float *grad, const float *log_p, const int *targets, int64_t v, float scale) {
    const int64_t first = blockIdx.x * v, target = targets[blockIdx.x];
    for (int64_t i = threadIdx.x; i < v; i += BLOCK)
        grad[first + i] = scale * (expf(log_p[first + i]) - (float)(i == target));
}

// ---- fused ----

// A maximum, and the sum of exponentials below it.
struct Running {
    float most, sum;
};

// What exponents are taken from: where all so far was -inf, e^(-inf - 0) is 0 and not NaN.
__device__ static inline float base_of(float most) { return most == -INFINITY ? 0 : most; }

__device__ static inline Running join(Running a, Running b) {
    const float most = fmaxf(a.most, b.most), base = base_of(most);
    return {most, fmaf(a.sum, expf(a.most - base), b.sum * expf(b.most - base))};
}

// Block (row). Rows without a target, -1, have neither loss nor gradient, whatever their logits are; a target
// beyond the logits, which would be an access outside the row, counts as none.
template <class T, int N>
__global__ void __launch_bounds__(BLOCK)
    cross_entropy(float *loss, float *lse, const T *logits, const int *targets, int64_t v) {
    __shared__ float2 warps[WARPS];
    const T *row = logits + blockIdx.x * v;
    Running all = {-INFINITY, 0};
    for (int64_t i = threadIdx.x * N; i < v; i += EACH<N> * BLOCK) {
        float x[EACH<N>], most = all.most;
        if constexpr (N > 1) load_pack(x, row + i);
#pragma unroll
        for (int j = 0; j < EACH<N>; j++) {
            if (N == 1) x[j] = i + j * BLOCK < v ? static_cast<float>(row[i + j * BLOCK]) : -INFINITY;
            most = fmaxf(most, x[j]);
        }
        const float base = base_of(most);
        all.sum = fmaf(all.sum, expf(all.most - base), expf(x[0] - base));
#pragma unroll
        for (int j = 1; j < EACH<N>; j++) all.sum += expf(x[j] - base);
        all.most = most;
    }
    for (int lanes = 16; lanes > 0; lanes /= 2)
        all = join(all, {__shfl_xor_sync(~0u, all.most, lanes), __shfl_xor_sync(~0u, all.sum, lanes)});
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = make_float2(all.most, all.sum);
    __syncthreads();  // every warp has stored its result
    if (threadIdx.x > 0) return;
    all = {-INFINITY, 0};
    for (int i = 0; i < WARPS; i++) all = join(all, {warps[i].x, warps[i].y});
    const float sum = all.most + logf(all.sum);
    lse[blockIdx.x] = sum;
    const int target = targets[blockIdx.x];
    loss[blockIdx.x] = target < 0 || target >= v ? 0 : sum - static_cast<float>(row[target]);
}

// *total (+=) x of all threads of a warp.
__device__ static inline void add_to(unsigned long long *total, unsigned x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    if (threadIdx.x % 32 == 0) atomicAdd(total, (unsigned long long)x);
}

// What a run in f16 may ask for: how many elements were not zero before rounding, and how many of these were
// zero after it.
struct Underflows {
    unsigned long long *rounded, *lost;
};

// Block (row). logits (=) their gradient.
template <class T, int N>
__global__ void __launch_bounds__(BLOCK)
    cross_entropy_backward(T *logits, const float *lse, const int *targets, int64_t v, float scale,
                           Underflows underflows) {
    constexpr bool COUNTS = std::is_same<T, __half>::value;
    const int64_t first = blockIdx.x * v, target = targets[blockIdx.x];
    const bool has_target = target >= 0 && target < v;
    const float sum = lse[blockIdx.x];
    unsigned rounded = 0, lost = 0;
    float x[N];
    for (int64_t i = threadIdx.x * N; i < v; i += BLOCK * N) {
        load_pack(x, logits + first + i);
#pragma unroll
        for (int j = 0; j < N; j++) {
            x[j] = has_target ? scale * (expf(x[j] - sum) - (float)(i + j == target)) : 0;
            if (COUNTS && x[j] != 0) rounded++, lost += stored<T>(x[j]) == 0;
        }
        store_pack(logits + first + i, x);
    }
    if (COUNTS && underflows.lost) add_to(underflows.rounded, rounded), add_to(underflows.lost, lost);
}

// ---- host code ----

template <class T>
static void launch_forward(cudaStream_t stream, float *loss, float *lse, const T *logits,
                           const int *targets, int64_t n, int64_t v) {
    auto kernel = in_packs<T>(v, logits) ? cross_entropy<T, PACK<T>> : cross_entropy<T, 1>;
    LAUNCH(kernel, (unsigned)n, BLOCK, 0, stream, loss, lse, logits, targets, v);
}
template <class T>
static void launch_backward(cudaStream_t stream, T *logits, const float *lse, const int *targets, int64_t n,
                            int64_t v, float scale, Underflows underflows) {
    auto kernel =
        in_packs<T>(v, logits) ? cross_entropy_backward<T, PACK<T>> : cross_entropy_backward<T, 1>;
    LAUNCH(kernel, (unsigned)n, BLOCK, 0, stream, logits, lse, targets, v, scale, underflows);
}

#ifndef NO_MAIN

enum Version { STORED, FUSED, VERSIONS };

// logits, log_p, grad (n, v), of which the fused version has the first alone; targets, loss, lse (n)
template <class T>
struct Rows {
    T *logits;
    float *log_p, *grad, *loss, *lse;
    const int *targets;
    Underflows underflows;
};

template <class T>
static void launch(Version version, const Rows<T> &t, int64_t n, int64_t v) {
    const float scale = 1 / (float)n;  // of a mean
    if (n == 0) return;
    if (version == FUSED) {
        launch_forward(0, t.loss, t.lse, t.logits, t.targets, n, v);
        launch_backward(0, t.logits, t.lse, t.targets, n, v, scale, t.underflows);
    } else if constexpr (sizeof(T) == 4) {
        const unsigned rows = (unsigned)n;
        LAUNCH(log_softmax, rows, BLOCK, 0, 0, t.log_p, t.loss, t.logits, t.targets, v);
        LAUNCH(log_softmax_backward, rows, BLOCK, 0, 0, t.grad, t.log_p, t.targets, v, scale);
    }
}

// n a multiple of 8, v of 1024: a warp's load is 4 sectors, or 16 of eight logits of 2 bytes to a lane.
template <class T>
static Work formula(Version version, double n, double v) {
    const double loads = version == FUSED ? 2 : 4, stores = version == FUSED ? 1 : 2;
    const double warps = n * v / 32, requests = warps / PACK<T>, sectors = n * v * sizeof(T) / 32;
    const double scalars =
        version == FUSED ? 16 : 8;  // of a row, backward: each warp loads target, and lse
    Work w = {};
    w.load_requests = loads * requests + n * (2 + scalars);
    w.load_sectors = loads * sectors + n * (2 + scalars);
    w.store_requests = stores * requests + n * (version == FUSED ? 2 : 1);
    w.store_sectors = stores * sectors + n * (version == FUSED ? 2 : 1);
    w.memory_sectors = n * (version == FUSED ? 3 * v * sizeof(T) + 5 * 4 : 4 * (4 * v + 3)) / 32;
    w.barriers = n * (version == FUSED ? 1 : 2);
    if (version == STORED) {
        w.shared_passes = 2 * n * (WARPS + WARPS * WARPS);
        w.flops = n * (4 * v + BLOCK * (2 * (5 + WARPS) + 1) + 1) + 2 * n * v;
        w.flop_instructions = 4 * warps + n * (WARPS * (2 * (5 + WARPS) + 1) + 1) + 2 * warps;
        w.special_instructions = 2 * warps + n * WARPS;
        return w;
    }
    // a join: a maximum, two differences, a product and a fused one, two exponentials; `each` logits: as
    // many maxima, a difference more, a fused product, and a sum less
    const double each = EACH<PACK<T>>;
    w.shared_passes = n * (WARPS + 2 * WARPS);
    w.flops = n * ((3 * each + 2) * v / each + 6 * (5 * BLOCK + WARPS) + 2) + 3 * n * v;
    w.flop_instructions = (3 * each + 1) * warps / each + n * (5 * (5 * WARPS + WARPS) + 2) + 3 * warps;
    w.special_instructions = (each + 1) * warps / each + n * (2 * (5 * WARPS + WARPS) + 1) + warps;
    return w;
}

// ---- proof ----

// In C, of logits that are T in memory.
template <class C, class T>
struct LossOnCpu {
    std::vector<C> loss, lse, grad;
    double rounded = 0, lost = 0;  // of grad: not zero before it is rounded, and zero behind

    LossOnCpu(const float *logits, const int *targets, int64_t n, int64_t v)
        : loss((size_t)n), lse((size_t)n), grad((size_t)(n * v)) {
        for (int64_t row = 0; row < n; row++) {
            const float *x = logits + row * v;
            C most = -INFINITY, sum = 0;
            for (int64_t i = 0; i < v; i++) most = x[i] > most ? (C)x[i] : most;
            for (int64_t i = 0; i < v; i++) sum += std::exp(x[i] - most);
            const bool has_target = targets[row] >= 0;
            const C log_sum = lse[(size_t)row] = most + std::log(sum);
            loss[(size_t)row] = has_target ? log_sum - x[targets[row]] : 0;
            for (int64_t i = 0; i < v; i++) {
                const C p = std::exp(x[i] - log_sum);
                const C d = has_target ? (p - (C)(i == targets[row])) / (C)n : 0;
                grad[(size_t)(row * v + i)] = made<T>(d);
                rounded += d != 0, lost += d != 0 && stored<T>((float)d) == 0;
            }
        }
    }
};

static std::vector<int> targets_of(int64_t n, int64_t v) {
    std::vector<int> targets((size_t)n);
    for (int64_t i = 0; i < n; i++) targets[(size_t)i] = (int)((i * 7 + v - 1) % v);
    return targets;
}

template <class T>
static Proof check(Version version) {
    Proof proof, sums;
    Proof *of_loss = sizeof(T) == 4 ? &proof : &sums;  // which is f32 in any case
    const struct {
        int64_t n, v;
        double scale;
    } cases[] = {{0, 5, 1}, {1, 1, 1}, {3, 37, 100}, {2, 5003, 1}, {3, 4104, 10}};
    for (auto &c : cases) {
        if (c.v % 8 == 0 && PACK<T> == 1) continue;  // packs, of which a block has more than threads
        Numbers<T> x(c.n * c.v, 1, c.scale);
        std::vector<int> targets = targets_of(c.n, c.v);
        if (version == FUSED && c.n == 3) targets[1] = -1;
        for (int64_t i = 0; i < c.n * c.v; i += 11)  // masked: for some threads all that they have
            if (c.v > 1 && i % c.v != targets[(size_t)(i / c.v)]) x.set((size_t)i, -INFINITY);
        if (version == FUSED && c.n == 3) x.set((size_t)c.v, NAN);  // in the row without a target
        const LossOnCpu<float, T> cpu(x.exact.data(), targets.data(), c.n, c.v);
        const LossOnCpu<double, T> right(x.exact.data(), targets.data(), c.n, c.v);
        const unsigned long long none[2] = {};
        Array<float> log_p(c.n * c.v), grad(c.n * c.v), loss(c.n), lse(c.n);
        Array<int> d_targets(targets.data(), c.n);
        Array<unsigned long long> counts(none, 2);
        std::vector<float> once;
        for (int turn = 0; turn < 2; turn++) {
            Array<T> logits(x.narrow.data(), c.n * c.v);
            launch<T>(version, {logits.at, log_p.at, grad.at, loss.at, lse.at, d_targets.at,
                                {counts.at, turn ? counts.at + 1 : NULL}},
                      c.n, c.v);
            const std::vector<float> now = version == FUSED ? in_f32(logits) : grad.host();
            if (turn) report_that(now == once, "two runs with %lld logits differ", (long long)c.v);
            once = now;
        }
        const double rounded = (double)counts.host()[0], lost = (double)counts.host()[1];
        if (std::is_same<T, __half>::value)  // a few may lie so near to a bound that an exponential decides
            report_that(fabs(rounded - cpu.rounded) <= 0.01 * cpu.rounded &&
                            fabs(lost - cpu.lost) <= 0.01 * cpu.lost,
                        "f16 made %.0f gradients of %.0f zero, and not %.0f of %.0f", lost, rounded,
                        cpu.lost, cpu.rounded);
        of_loss->hold(loss.host(), cpu.loss, right.loss);
        proof.hold(once, cpu.grad, right.grad);
    }
    report_that(sums.error <= sums.bound, "losses are off by %.1e, where %.1e is allowed", sums.error,
                sums.bound);
    return proof;
}

template <class T>
static void row(Version version, const char *name, int registers, int64_t n, int64_t v) {
    const int64_t small_n = ON_GPU ? n : 8, small_v = ON_GPU ? v : 2048;
    const Numbers<T> numbers(small_n * small_v, 2);
    const std::vector<int> targets = targets_of(small_n, small_v);
    Array<T> logits(numbers.narrow.data(), small_n * small_v);
    Array<float> loss(small_n), lse(small_n);
    Array<float> log_p(version == STORED ? small_n * small_v : 0), grad(log_p.count);
    Array<int> d_targets(targets.data(), small_n);
    const Rows<T> rows = {logits.at, log_p.at, grad.at, loss.at, lse.at, d_targets.at, {}};
    const struct Size { int64_t n, v; } small = {small_n, small_v}, size = {n, v};
    show_version(
        KernelVersion{name, BLOCK, registers, 8 * WARPS}, check<T>(version), small, size,
        [&](Size at) { launch(version, rows, at.n, at.v); },
        [&](Size at) { return formula<T>(version, (double)at.n, (double)at.v); });
}

// Of numbers of so many bits.
static void begin(const KernelsOptions *options, int bits, int64_t n, int64_t v) {
    char *size = format_text("loss and gradient of %lld tokens, vocabulary of %lld%s", (long long)n,
                             (long long)v, bits == 16 ? ", 16 bits" : "");
    kernels_begin(options, size, kernels_limit(options, bits / 8.0 * 3 * (double)n * (double)v, 0, 0));
    free(size);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int64_t n, v;
    Option table[] = {
        {"rows", OPTION_INT, &n, "8192", 8, 1e6, "", "rows of the table's logits: tokens", false},
        {"vocabulary", OPTION_INT, &v, "131072", 1024, 1e6, "", "logits of a row", false},
        KERNELS_OPTIONS(options),
    };
    options_parse(argc, argv,
                  "Cross-entropy: one pass over the logits, and the gradient in their place.\n"
                  "  fused_cross_entropy --vocabulary 32768",
                  table, sizeof table / sizeof *table);
    n -= n % 8, v -= v % 1024;
    const double logits = (double)n * (double)v;
    begin(&options, 32, n, v);
    row<float>(STORED, "stored", 31, n, v);
    row<float>(FUSED, "fused", 32, n, v);
    say("kept: stored %s, fused %s", bytes_text(4 * 3 * logits), bytes_text(4 * logits));
    begin(&options, 16, n, v);
    row<__nv_bfloat16>(FUSED, "fused, bf16", 32, n, v);
    row<__half>(FUSED, "fused, fp16", 32, n, v);
    return report_verdict("fused, it takes %.2f of the modelled time, and a third of the memory",
                          kernels_seconds(FUSED) / kernels_seconds(STORED));
}
#endif
