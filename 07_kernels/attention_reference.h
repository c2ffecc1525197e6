// attention_reference.h: attention on the CPU, what holds the kernels of FlashAttention against it, and the
// tables of their programs.
#ifndef ATTENTION_REFERENCE_H
#define ATTENTION_REFERENCE_H

#include <algorithm>

#include "flash_tiles.h"

// The order in which the emulator runs blocks and threads from now on; 0: the natural order.
static inline void emulator_order(uint64_t seed) {
#ifdef __CUDACC__
    (void)seed;
#else
    cuda_on_cpu_order(seed);
#endif
}

// ---- attention in f64, or in f32 for the error that its roundings make ----

template <class T>
struct Attention {
    std::vector<T> o, lse, dq, dk, dv;
};

// x in the type that a kernel has it in, where that is narrower.
template <class Stored, class T>
T rounded(T x) {
    return std::is_same<Stored, T>::value ? x : static_cast<T>(static_cast<Stored>(static_cast<float>(x)));
}

// The keys that a query sees, in their order; by the mask, or if there is none by the shape.
static inline std::vector<int64_t> keys_seen(const Heads &n, const AttentionMask *mask, int64_t sample,
                                             int64_t query) {
    std::vector<int64_t> seen;
    const int64_t count = mask ? mask->keys->s : n.causal ? query + 1 : n.s;
    for (int64_t j = 0; j < count; j++)
        if (!mask ||
            (mask->keys->document[sample * count + j] == mask->queries->document[sample * n.s + query] &&
             mask->keys->position[sample * count + j] <= mask->queries->position[sample * n.s + query]))
            seen.push_back(j);
    return seen;
}

// Each query by itself: all its scores, their softmax, and with dO the gradients, from lse. Stored: the
// type of what is made, and of the operands of products. Scores are summed in the kernels' order: in f32
// they have the same bits, and so fit this lse as well. Without a key o is 0, and lse -inf.
//   P = softmax(S), S = scale Q K', O = P V:   dV = P' dO   dS = P (dO V' - rowsum(dO O))   dQ = scale dS K
template <class T, class Stored = T>
UNWATCHED Attention<T> attention_on_cpu(const Heads &n, int d, const float *q, const float *k,
                                        const float *v, const float *grad_o,
                                        const AttentionMask *mask = NULL) {
    const int64_t key_count = mask ? mask->keys->s : n.s, step = n.kv * d;
    const size_t queries = (size_t)(n.b * n.s * n.a * d), keys = (size_t)(n.b * key_count * step);
    Attention<T> out = {std::vector<T>(queries), std::vector<T>((size_t)(n.b * n.a * n.s)),
                        std::vector<T>(queries), std::vector<T>(keys), std::vector<T>(keys)};
    std::vector<T> scores((size_t)key_count);
    T *p = scores.data();
    for (int64_t row = 0; row < n.b * n.s * n.a; row++) {
        const int64_t h = row % n.a, query = row / n.a % n.s, sample = row / n.a / n.s;
        const std::vector<int64_t> seen = keys_seen(n, mask, sample, query);
        const int64_t key_head = sample * key_count * step + h / (n.a / n.kv) * d;
        const float *q_row = q + row * d, *grad_row = grad_o ? grad_o + row * d : NULL;
        T *o = out.o.data() + row * d, *dq = out.dq.data() + row * d;
        T most = -INFINITY, sum = 0, delta = 0;
        for (int64_t j : seen) {
            T dot = 0;
            for (int c = 0; c < d; c++)
                dot = __builtin_fma((T)q_row[c], (T)k[key_head + j * step + c], dot);
            p[j] = dot * (T)n.scale;
            most = p[j] > most ? p[j] : most;
        }
        for (int64_t j : seen) sum += std::exp(p[j] - most);
        const T lse = out.lse[(size_t)((sample * n.a + h) * n.s + query)] = most + std::log(sum);
        for (int64_t j : seen) {
            const T weight = rounded<Stored>(std::exp(p[j] - most) / sum);
            for (int c = 0; c < d; c++) o[c] += weight * (T)v[key_head + j * step + c];
        }
        for (int c = 0; c < d; c++) o[c] = rounded<Stored>(o[c]);
        for (int c = 0; grad_o && c < d; c++) delta += (T)grad_row[c] * o[c];
        for (int64_t j : grad_o ? seen : std::vector<int64_t>()) {
            const int64_t key = key_head + j * step;
            T dp = 0;
            for (int c = 0; c < d; c++) dp += (T)grad_row[c] * (T)v[key + c];
            const T p_exact = std::exp(p[j] - lse), weight = rounded<Stored>(p_exact);
            const T ds = rounded<Stored>(p_exact * (dp - delta) * (T)n.scale);
            T *dk = out.dk.data() + key, *dv = out.dv.data() + key;
            for (int c = 0; c < d; c++) {
                dv[c] += weight * (T)grad_row[c];
                dq[c] += ds * (T)k[key + c];
                dk[c] += ds * (T)q_row[c];
            }
        }
    }
    for (std::vector<T> *gradient : {&out.dq, &out.dk, &out.dv})
        for (T &x : *gradient) x = rounded<Stored>(x);
    return out;
}

// Makes the second half of an array NaN.
template <class T>
void spoil(const Array<T> &x) {
    const std::vector<T> none((size_t)(x.count - x.count / 2), static_cast<T>(NAN));
    CUDA_CHECK(
        cudaMemcpy(x.at + x.count / 2, none.data(), none.size() * sizeof(T), cudaMemcpyHostToDevice));
}

// Forward by launch(version, o, lse, scores, q, k, v, shape), in T, over lengths that fill no tile and, the
// `longest`, no block. If there is an lse, it is checked separately, as it is f32 for every T. A sample's
// numbers must reach no other sample, not even NaN, which a weight of 0 would not stop.
template <class T = float, class Launch>
Proof prove_forward(int d, bool causal, bool has_lse, Launch launch, int version,
                    int64_t longest = sizeof(T) == 2 ? 131 : 67) {
    Proof proof, logs;
    const struct {
        int64_t b, s, a, kv;
        double scale;
    } cases[] = {
        {1, 0, 1, 1, 1}, {2, 1, 2, 1, 1}, {2, 3, 2, 1, 1}, {1, 37, 4, 2, 30}, {1, longest, 3, 3, 1}};
    for (auto &n : cases) {
        const Heads shape = {n.b, n.s, n.a, n.kv, 1 / sqrtf((float)d), causal};
        const int64_t queries = n.b * n.s * n.a * d, keys = n.b * n.s * n.kv * d, rows = n.b * n.a * n.s;
        const Numbers<T> q(queries, 1, n.scale), k(keys, 2), v(keys, 3);
        Array<T> d_q(q.narrow.data(), queries), d_k(k.narrow.data(), keys), d_v(v.narrow.data(), keys);
        Array<T> o(queries);
        Array<float> lse(rows), scores(rows * n.s);
        launch(version, o.at, lse.at, scores.at, d_q.at, d_k.at, d_v.at, shape);
        const float *in[] = {q.exact.data(), k.exact.data(), v.exact.data()};
        const auto cpu = attention_on_cpu<float, T>(shape, d, in[0], in[1], in[2], NULL);
        const auto right = attention_on_cpu<double>(shape, d, in[0], in[1], in[2], NULL);
        const std::vector<float> once = in_f32(o);
        proof.hold(once, cpu.o, right.o);
        if (has_lse) logs.hold(lse.host(), cpu.lse, right.lse);
        launch(version, o.at, lse.at, scores.at, d_q.at, d_k.at, d_v.at, shape);
        report_that(in_f32(o) == once, "two runs with %lld tokens differ", (long long)n.s);
        if (n.b == 1) continue;
        for (const Array<T> *x : {&d_q, &d_k, &d_v}) spoil(*x);
        launch(version, o.at, lse.at, scores.at, d_q.at, d_k.at, d_v.at, shape);
        const std::vector<float> beside = in_f32(o);
        report_that(std::equal(once.begin(), once.begin() + queries / 2, beside.begin()),
                    "NaN in the second sample reaches the first");
    }
    report_that(logs.error <= logs.bound, "lse is off by %.1e, where %.1e is allowed", logs.error,
                logs.bound);
    return proof;
}

// Backward by launch(gradients, operands, room, shape), in T, of o and lse that are the CPU's, over lengths
// that fill no tile; twice, the second time in another order of blocks and threads where the emulator runs
// them.
template <class T = float, class Launch>
Proof prove_backward(int d, bool causal, Launch launch) {
    Proof proof;
    const struct {
        int64_t b, s, a, kv;
        double scale;
    } cases[] = {{1, 0, 1, 1, 1}, {2, 1, 2, 1, 1}, {2, 33, 4, 2, 30}, {1, 131, 1, 1, 1}};
    for (auto &n : cases) {
        const Heads shape = {n.b, n.s, n.a, n.kv, 1 / sqrtf((float)d), causal};
        const int64_t queries = n.b * n.s * n.a * d, keys = n.b * n.s * n.kv * d, rows = n.b * n.a * n.s;
        const Numbers<T> q(queries, 1, n.scale), k(keys, 2), v(keys, 3), grad_o(queries, 5);
        const float *x[] = {q.exact.data(), k.exact.data(), v.exact.data(), grad_o.exact.data()};
        const auto cpu = attention_on_cpu<float, T>(shape, d, x[0], x[1], x[2], x[3]);
        const auto right = attention_on_cpu<double>(shape, d, x[0], x[1], x[2], x[3]);
        const std::vector<T> narrow_o(cpu.o.begin(), cpu.o.end());
        Array<T> d_q(q.narrow.data(), queries), d_k(k.narrow.data(), keys), d_v(v.narrow.data(), keys);
        Array<T> d_do(grad_o.narrow.data(), queries), o(narrow_o.data(), queries);
        Array<float> lse(cpu.lse.data(), rows), room(backward_room(shape, d));
        Array<T> dq(queries), dk(keys), dv(keys);
        const GradientsIn<T> grad = {dq.at, dk.at, dv.at};
        const OperandsIn<T> in = {d_q.at, d_k.at, d_v.at, o.at, lse.at, d_do.at};
        launch(grad, in, room.at, shape);
        const std::vector<float> once[] = {in_f32(dq), in_f32(dk), in_f32(dv)};
        proof.hold(once[2], cpu.dv, right.dv);
        if (n.s > 1) {  // one key has all the weight, whatever its score
            proof.hold(once[0], cpu.dq, right.dq);
            proof.hold(once[1], cpu.dk, right.dk);
        }
        emulator_order(7);
        launch(grad, in, room.at, shape);
        emulator_order(0);
        report_that(in_f32(dq) == once[0] && in_f32(dk) == once[1] && in_f32(dv) == once[2],
                    "two runs with %lld tokens differ", (long long)n.s);
        if (n.b == 1) continue;
        for (const Array<T> *y : {&d_q, &d_k, &d_v, &o, &d_do}) spoil(*y);
        launch(grad, in, room.at, shape);
        const std::vector<float> beside[] = {in_f32(dq), in_f32(dk), in_f32(dv)};
        for (int i = 0; i < 3; i++)
            report_that(std::equal(once[i].begin(), once[i].begin() + (ptrdiff_t)once[i].size() / 2,
                                   beside[i].begin()),
                        "NaN in the second sample reaches gradients of the first");
    }
    return proof;
}

// ---- the tables ----

// A version of backward, counted with three times `multiple` tokens: of the blocks that add to a tile of dq,
// one is the first, one the last, and one neither.
template <class T = float, class Launch>
void backward_version(const KernelVersion &version, const Heads &at_size, int d, int64_t multiple,
                      Launch launch, Work (*formula)(const Heads &, double)) {
    Heads small = at_size;
    small.b = 1, small.s = 3 * multiple, small.a = 2, small.kv = 1;
    const Heads most = ON_GPU ? at_size : small;
    const int64_t queries = most.b * most.s * most.a * d, keys = most.b * most.s * most.kv * d;
    const Numbers<T> numbers(queries, 4);
    const T *x = numbers.narrow.data();
    Array<T> q(x, queries), k(x, keys), v(x, keys), o(x, queries), grad_o(x, queries);
    Array<float> lse(numbers.exact.data(), most.b * most.a * most.s), room(backward_room(most, d));
    Array<T> dq(queries), dk(keys), dv(keys);
    const GradientsIn<T> grad = {dq.at, dk.at, dv.at};
    const OperandsIn<T> in = {q.at, k.at, v.at, o.at, lse.at, grad_o.at};
    show_version(
        version, prove_backward<T>(d, at_size.causal, launch), small, at_size,
        [&](const Heads &shape) { launch(grad, in, room.at, shape); },
        [&](const Heads &shape) { return formula(shape, d); });
}

// The shape that the tables show, of d elements a head; tokens a multiple of `multiple`, and not 0 of them.
// svg: of a program that draws its timeline.
static inline Heads flash_options(int argc, char **argv, const char *purpose, int64_t multiple,
                                  KernelsOptions *options, int *d, const char **svg = NULL) {
    int64_t n;
    int wide;
    Option table[] = {
        {"size", OPTION_INT, &n, "4096", fmax(64, (double)multiple), 32768, "",
         "tokens of the table's sequence", false},
        {"head-size", OPTION_CHOICE, &wide, "128", 0, 0, "64|128", "elements of a head", false},
        KERNELS_OPTIONS(*options),
        {"timeline-svg", OPTION_OUTPUT, svg, NULL, 0, 0, "FILE", "the timelines as a picture", false},
    };
    options_parse(argc, argv, purpose, table, sizeof table / sizeof *table - !svg);
    *d = wide ? 128 : 64;
    return {1, n - n % multiple, 32, 8, 1 / sqrtf((float)*d), 0};
}

// A table without a mask and one with it, whose rows are rows(shape). passes: 1 of forward; 2 of backward,
// which moves and computes at least twice as much. bits: of the numbers; 16 and 8 on tensor cores.
template <class Rows>
void flash_tables(const KernelsOptions *options, Heads shape, int d, int passes, Rows rows, int bits = 32) {
    for (int causal = 0; causal < 2; causal++) {
        shape.causal = causal;
        const double s = (double)shape.s, pairs = s * (causal ? (s + 1) / 2 : s);
        char *size = format_text(
            "%s%s of %lld tokens, %d heads of %d, %d of K/V", passes == 2 ? "backward of " : "",
            causal ? "causal attention" : "attention", (long long)shape.s, (int)shape.a, d, (int)shape.kv);
        const double bytes = passes * bits / 8 * words_of_forward(shape, d);
        const double flops = passes * 4 * pairs * d * (double)shape.a;
        kernels_begin(
            options, size,
            kernels_limit(options, bytes, bits == 32 ? flops : 0, bits == 32 ? 0 : flops * bits / 16));
        rows(shape);
        free(size);
    }
}

// The same of a program that has 16 bits alone: a row for each of the two types.
static inline void flash_tables_16(const KernelsOptions *options, const Heads &shape, int d, int passes,
                                   void (*bf16)(const char *name, const Heads &at_size),
                                   void (*fp16)(const char *name, const Heads &at_size)) {
    flash_tables(
        options, shape, d, passes,
        [&](const Heads &at_size) {
            bf16(at_size.causal ? "bf16, causal" : "bf16", at_size);
            fp16(at_size.causal ? "fp16, causal" : "fp16", at_size);
        },
        16);
}

// The last lines of attention in 16 bits: what it moves and computes for a score, and the table's first row
// beside the least that f32 takes. work: without a mask.
static inline int tensor_verdict(const KernelsOptions *options, const Heads &shape, int d, int passes,
                                 const Work &work) {
    const double scores = (double)shape.a * (double)shape.s * (double)shape.s;
    say("L2 moves %s; %.2f special functions and %.2f FLOPs besides the products for each score",
        bytes_text(32 * (work.load_sectors + work.store_sectors)), 32 * work.special_instructions / scores,
        work.flops / scores);
    const double f32 =
        kernels_limit(options, 4 * passes * words_of_forward(shape, d), 4 * passes * scores * d, 0);
    say("in f32, without tensor cores, the model's limit is %.4g ms", f32 * 1e3);
    return report_verdict("bf16 takes %.2f of the least that f32 without tensor cores can",
                          kernels_seconds(0) / f32);
}

#endif
