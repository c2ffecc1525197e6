// fused_cross_entropy.cu: the loss of a large vocabulary from one pass over the logits, and its gradient in
// their place. Playbook: "Fused Kernels"; the running sum is Milakov and Gimelshein's, "Online normalizer
// calculation for softmax", 2018, and FlashAttention's.
//
//     loss = lse - x[target]        lse = m + log(sum(e^(x - m))), m = max(x), of a row of v logits
//     dx   = scale (e^(x - lse) - [target])
//
// A row of 131072 logits has 512 kB, more than a block can keep. A softmax that stores its result reads it
// for the maximum, for the sum, and for the result. The fused forward keeps a maximum and a sum so far, and
// rescales the sum when the maximum grows, for four logits at a time:
//
//     m' = max(m, x0 ... x3)        sum = sum e^(m - m') + e^(x0 - m') + ... + e^(x3 - m')
//
//     words for each logit           loads   stores      kept          beside them, for each row
//     log-probabilities stored       3 + 1   1 + 1       3, x, log p, dx
//     fused                          1 + 1   0 + 1       1, x          loss, lse, target
//
// The gradient replaces the logits, of which there is no copy: at 8192 tokens they alone are 4.29 GB. The
// model grants the stored version that a row stays in L2 from its first read to its third.
//
// Proof: loss and gradient within 4 times the error of the same steps in f32 on the CPU, each against f64,
// on odd and prime vocabularies, with logits of large magnitude and of -inf; twice the same bits.
// Run: build/07_kernels/fused_cross_entropy           (--gpu a100, --vocabulary 32768, --verbose)
// Last line: PASS fused_cross_entropy: fused, it takes 0.75 of the time, and a third of the memory …
#include "launch.h"

enum { BLOCK = 256, WARPS = BLOCK / 32, EACH = 4 };

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

// Block (row). Rows without a target, -1, have neither loss nor gradient.
__global__ void __launch_bounds__(BLOCK)
    cross_entropy(float *loss, float *lse, const float *logits, const int *targets, int64_t v) {
    __shared__ float2 warps[WARPS];
    const float *row = logits + blockIdx.x * v;
    Running all = {-INFINITY, 0};
    for (int64_t i = threadIdx.x; i < v; i += EACH * BLOCK) {
        float x[EACH], most = all.most;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            x[j] = i + j * BLOCK < v ? row[i + j * BLOCK] : -INFINITY;
            most = fmaxf(most, x[j]);
        }
        const float base = base_of(most);
        all.sum = fmaf(all.sum, expf(all.most - base), expf(x[0] - base));
#pragma unroll
        for (int j = 1; j < EACH; j++) all.sum += expf(x[j] - base);
        all.most = most;
    }
    for (int lanes = 16; lanes > 0; lanes /= 2)
        all = join(all, {__shfl_xor_sync(~0u, all.most, lanes), __shfl_xor_sync(~0u, all.sum, lanes)});
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = make_float2(all.most, all.sum);
    __syncthreads();  // every warp has left what it knows
    if (threadIdx.x > 0) return;
    all = {-INFINITY, 0};
    for (int i = 0; i < WARPS; i++) all = join(all, {warps[i].x, warps[i].y});
    const float sum = all.most + logf(all.sum);
    lse[blockIdx.x] = sum;
    const int target = targets[blockIdx.x];
    loss[blockIdx.x] = target < 0 ? 0 : sum - row[target];
}

// Block (row). logits (=) their gradient.
__global__ void __launch_bounds__(BLOCK)
    cross_entropy_backward(float *logits, const float *lse, const int *targets, int64_t v, float scale) {
    const int64_t first = blockIdx.x * v, target = targets[blockIdx.x];
    const float sum = lse[blockIdx.x], factor = target < 0 ? 0 : scale;
    for (int64_t i = threadIdx.x; i < v; i += BLOCK)
        logits[first + i] = factor * (expf(logits[first + i] - sum) - (float)(i == target));
}

// ---- host code ----

#ifndef NO_MAIN

enum { STORED, FUSED, VERSIONS };
static const KernelVersion versions[VERSIONS] = {{"stored", BLOCK, 31, 8 * WARPS},
                                                 {"fused", BLOCK, 32, 8 * WARPS}};

// logits, log_p, grad (n, v), of which the fused version has the first alone; targets, loss, lse (n)
struct Rows {
    float *logits, *log_p, *grad, *loss, *lse;
    const int *targets;
};

static void launch(int version, const Rows &t, int64_t n, int64_t v) {
    const unsigned rows = (unsigned)n;
    const float scale = 1 / (float)n;  // of a mean
    if (n == 0) return;
    if (version == FUSED) {
        LAUNCH(cross_entropy, rows, BLOCK, 0, 0, t.loss, t.lse, t.logits, t.targets, v);
        LAUNCH(cross_entropy_backward, rows, BLOCK, 0, 0, t.logits, t.lse, t.targets, v, scale);
        return;
    }
    LAUNCH(log_softmax, rows, BLOCK, 0, 0, t.log_p, t.loss, t.logits, t.targets, v);
    LAUNCH(log_softmax_backward, rows, BLOCK, 0, 0, t.grad, t.log_p, t.targets, v, scale);
}

// n a multiple of 8, v of 1024: a warp's words are 4 sectors.
static Work formula(int version, double n, double v) {
    const double warps = n * v / 32, loads = version == FUSED ? 2 : 4, stores = version == FUSED ? 1 : 2;
    const double scalars =
        version == FUSED ? 16 : 8;  // of a row, backward: each warp loads target, and lse
    Work w = {};
    w.load_requests = loads * warps + n * (2 + scalars);
    w.load_sectors = 4 * loads * warps + n * (2 + scalars);
    w.store_requests = stores * warps + n * (version == FUSED ? 2 : 1);
    w.store_sectors = 4 * stores * warps + n * (version == FUSED ? 2 : 1);
    w.memory_sectors = n * (version == FUSED ? 3 * v + 5 : 4 * v + 3) / 8;
    w.barriers = n * (version == FUSED ? 1 : 2);
    if (version == STORED) {
        w.shared_passes = 2 * n * (WARPS + WARPS * WARPS);
        w.flops = n * (4 * v + BLOCK * (2 * (5 + WARPS) + 1) + 1) + 2 * n * v;
        w.flop_instructions = 4 * warps + n * (WARPS * (2 * (5 + WARPS) + 1) + 1) + 2 * warps;
        w.special_instructions = 2 * warps + n * WARPS;
        return w;
    }
    // a join: a maximum, two differences, a product and a fused one, two exponentials
    w.shared_passes = n * (WARPS + 2 * WARPS);
    w.flops = n * (14 * v / EACH + 6 * (5 * BLOCK + WARPS) + 2) + 3 * n * v;
    w.flop_instructions = 13 * warps / EACH + n * (5 * (5 * WARPS + WARPS) + 2) + 3 * warps;
    w.special_instructions = (EACH + 1) * warps / EACH + n * (2 * (5 * WARPS + WARPS) + 1) + warps;
    return w;
}

template <class T>
struct LossOnCpu {
    std::vector<T> loss, grad;

    LossOnCpu(const float *logits, const int *targets, int64_t n, int64_t v)
        : loss((size_t)n), grad((size_t)(n * v)) {
        for (int64_t row = 0; row < n; row++) {
            const float *x = logits + row * v;
            T most = -INFINITY, sum = 0;
            for (int64_t i = 0; i < v; i++) most = x[i] > most ? (T)x[i] : most;
            for (int64_t i = 0; i < v; i++) sum += std::exp(x[i] - most);
            const T lse = most + std::log(sum);
            loss[(size_t)row] = lse - x[targets[row]];
            for (int64_t i = 0; i < v; i++)
                grad[(size_t)(row * v + i)] = (std::exp(x[i] - lse) - (T)(i == targets[row])) / (T)n;
        }
    }
};

static std::vector<int> targets_of(int64_t n, int64_t v) {
    std::vector<int> targets((size_t)n);
    for (int64_t i = 0; i < n; i++) targets[(size_t)i] = (int)((i * 7 + v - 1) % v);
    return targets;
}

static Proof check(int version) {
    Proof proof;
    const struct {
        int64_t n, v;
        double scale;
    } cases[] = {{0, 5, 1}, {1, 1, 1}, {3, 37, 100}, {2, 5003, 1}};
    for (auto &c : cases) {
        float *x = kernels_numbers(c.n * c.v, c.scale, 1);
        const std::vector<int> targets = targets_of(c.n, c.v);
        for (int64_t i = 0; i < c.n * c.v; i += 11)  // masked: for some threads all that they have
            if (c.v > 1 && i % c.v != targets[(size_t)(i / c.v)]) x[i] = -INFINITY;
        const LossOnCpu<float> cpu(x, targets.data(), c.n, c.v);
        const LossOnCpu<double> right(x, targets.data(), c.n, c.v);
        Array<float> log_p(c.n * c.v), grad(c.n * c.v), loss(c.n), lse(c.n);
        Array<int> d_targets(targets.data(), c.n);
        std::vector<float> once;
        for (int turn = 0; turn < 2; turn++) {
            Array<float> logits(x, c.n * c.v);
            launch(version, {logits.at, log_p.at, grad.at, loss.at, lse.at, d_targets.at}, c.n, c.v);
            const std::vector<float> made = version == FUSED ? logits.host() : grad.host();
            if (turn) report_that(made == once, "two runs with %lld logits differ", (long long)c.v);
            once = made;
        }
        proof.hold(loss.host(), cpu.loss, right.loss);
        proof.hold(once, cpu.grad, right.grad);
        free(x);
    }
    return proof;
}

static void row(int version, int64_t n, int64_t v) {
    const int64_t small_n = ON_GPU ? n : 8, small_v = ON_GPU ? v : 2048;
    float *numbers = kernels_numbers(small_n * small_v, 1, 2);
    const std::vector<int> targets = targets_of(small_n, small_v);
    Array<float> logits(numbers, small_n * small_v), loss(small_n), lse(small_n);
    Array<float> log_p(version == STORED ? small_n * small_v : 0), grad(log_p.count);
    Array<int> d_targets(targets.data(), small_n);
    free(numbers);
    const Rows rows = {logits.at, log_p.at, grad.at, loss.at, lse.at, d_targets.at};
    const struct Size { int64_t n, v; } small = {small_n, small_v}, size = {n, v};
    show_version(
        versions[version], check(version), small, size, [&](Size at) { launch(version, rows, at.n, at.v); },
        [&](Size at) { return formula(version, (double)at.n, (double)at.v); });
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
    n -= n % 8, v -= v % (EACH * BLOCK);
    const double logits = (double)n * (double)v;
    char *size =
        format_text("loss and gradient of %lld tokens, vocabulary of %lld", (long long)n, (long long)v);
    kernels_begin(&options, size, kernels_limit(&options, 4 * 3 * logits, 0, 0));
    for (int version = 0; version < VERSIONS; version++) row(version, n, v);
    free(size);
    say("kept: stored %s, fused %s", bytes_text(4 * 3 * logits), bytes_text(4 * logits));
    return report_verdict("fused, it takes %.2f of the time, and a third of the memory",
                          kernels_seconds(FUSED) / kernels_seconds(STORED));
}
#endif
