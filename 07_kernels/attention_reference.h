// attention_reference.h: attention on the CPU, what holds the kernels of FlashAttention against it, and the
// tables of their programs.
#ifndef ATTENTION_REFERENCE_H
#define ATTENTION_REFERENCE_H

#include "flash_tiles.h"

// The order in which the emulator runs blocks and threads from now on; 0: the natural one.
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

// Each query by itself: all its scores, their softmax, and with dO the gradients, from lse.
// Scores are summed in the kernels' order: in f32 they have the same bits, and so fit this lse as well.
//   P = softmax(S), S = scale Q K', O = P V:   dV = P' dO   dS = P (dO V' - rowsum(dO O))   dQ = scale dS K
template <class T>
Attention<T> attention_on_cpu(const Heads &n, int d, const float *q, const float *k, const float *v,
                              const float *grad_o) {
    const size_t queries = (size_t)(n.b * n.s * n.a * d), keys = (size_t)(n.b * n.s * n.kv * d);
    Attention<T> out = {std::vector<T>(queries), std::vector<T>((size_t)(n.b * n.a * n.s)),
                        std::vector<T>(queries), std::vector<T>(keys), std::vector<T>(keys)};
    std::vector<T> scores((size_t)n.s);
    T *p = scores.data();
    for (int64_t row = 0; row < n.b * n.s * n.a; row++) {
        const int64_t h = row % n.a, query = row / n.a % n.s, sample = row / n.a / n.s;
        const int64_t end = n.causal ? query + 1 : n.s, step = n.kv * d;
        const int64_t key_head = sample * n.s * step + h / (n.a / n.kv) * d;
        const float *q_row = q + row * d, *grad_row = grad_o ? grad_o + row * d : NULL;
        T *o = out.o.data() + row * d, *dq = out.dq.data() + row * d;
        T most = -INFINITY, sum = 0, delta = 0;
        for (int64_t j = 0; j < end; j++) {
            T dot = 0;
            for (int c = 0; c < d; c++)
                dot = __builtin_fma((T)q_row[c], (T)k[key_head + j * step + c], dot);
            p[j] = dot * (T)n.scale;
            most = p[j] > most ? p[j] : most;
        }
        for (int64_t j = 0; j < end; j++) sum += std::exp(p[j] - most);
        const T lse = out.lse[(size_t)((sample * n.a + h) * n.s + query)] = most + std::log(sum);
        for (int64_t j = 0; j < end; j++) {
            const T weight = std::exp(p[j] - most) / sum;
            for (int c = 0; c < d; c++) o[c] += weight * (T)v[key_head + j * step + c];
        }
        for (int c = 0; grad_o && c < d; c++) delta += (T)grad_row[c] * o[c];
        for (int64_t j = 0; grad_o && j < end; j++) {
            const int64_t key = key_head + j * step;
            T dp = 0;
            for (int c = 0; c < d; c++) dp += (T)grad_row[c] * (T)v[key + c];
            const T weight = std::exp(p[j] - lse), ds = weight * (dp - delta) * (T)n.scale;
            T *dk = out.dk.data() + key, *dv = out.dv.data() + key;
            for (int c = 0; c < d; c++) {
                dv[c] += weight * (T)grad_row[c];
                dq[c] += ds * (T)k[key + c];
                dk[c] += ds * (T)q_row[c];
            }
        }
    }
    return out;
}

// Forward by launch(version, o, lse, scores, q, k, v, shape), over lengths that fill no tile; lse too,
// where there is one.
template <class Launch>
Proof prove_forward(int d, bool causal, bool has_lse, Launch launch, int version) {
    Proof proof;
    const struct {
        int64_t b, s, a, kv;
        double scale;
    } cases[] = {{1, 0, 1, 1, 1}, {2, 1, 2, 1, 1}, {1, 37, 4, 2, 30}, {1, 67, 3, 3, 1}};
    for (auto &n : cases) {
        const Heads shape = {n.b, n.s, n.a, n.kv, 1 / sqrtf((float)d), causal};
        const int64_t queries = n.b * n.s * n.a * d, keys = n.b * n.s * n.kv * d, rows = n.b * n.a * n.s;
        float *q = kernels_numbers(queries, n.scale, 1), *k = kernels_numbers(keys, 1, 2);
        float *v = kernels_numbers(keys, 1, 3);
        Array<float> d_q(q, queries), d_k(k, keys), d_v(v, keys), o(queries), lse(rows), scores(rows * n.s);
        launch(version, o.at, lse.at, scores.at, d_q.at, d_k.at, d_v.at, shape);
        const Attention<float> cpu = attention_on_cpu<float>(shape, d, q, k, v, NULL);
        const Attention<double> right = attention_on_cpu<double>(shape, d, q, k, v, NULL);
        const std::vector<float> once = o.host();
        proof.hold(once, cpu.o, right.o);
        if (has_lse) proof.hold(lse.host(), cpu.lse, right.lse);
        launch(version, o.at, lse.at, scores.at, d_q.at, d_k.at, d_v.at, shape);
        report_that(o.host() == once, "two runs with %lld tokens differ", (long long)n.s);
        free(q);
        free(k);
        free(v);
    }
    return proof;
}

// Backward by launch(gradients, operands, room, shape), of o and lse that are the CPU's, over lengths that
// fill no tile; twice, the second time in another order of blocks and threads where the emulator runs them.
template <class Launch>
Proof prove_backward(int d, bool causal, Launch launch) {
    Proof proof;
    const struct {
        int64_t b, s, a, kv;
        double scale;
    } cases[] = {{1, 0, 1, 1, 1}, {2, 1, 2, 1, 1}, {1, 37, 4, 2, 30}, {1, 67, 2, 2, 1}};
    for (auto &n : cases) {
        const Heads shape = {n.b, n.s, n.a, n.kv, 1 / sqrtf((float)d), causal};
        const int64_t queries = n.b * n.s * n.a * d, keys = n.b * n.s * n.kv * d, rows = n.b * n.a * n.s;
        float *q = kernels_numbers(queries, n.scale, 1), *k = kernels_numbers(keys, 1, 2);
        float *v = kernels_numbers(keys, 1, 3), *grad_o = kernels_numbers(queries, 1, 5);
        const Attention<float> cpu = attention_on_cpu<float>(shape, d, q, k, v, grad_o);
        const Attention<double> right = attention_on_cpu<double>(shape, d, q, k, v, grad_o);
        Array<float> d_q(q, queries), d_k(k, keys), d_v(v, keys), d_do(grad_o, queries);
        Array<float> o(cpu.o.data(), queries), lse(cpu.lse.data(), rows), room(backward_room(shape));
        Array<float> dq(queries), dk(keys), dv(keys);
        const Gradients grad = {dq.at, dk.at, dv.at};
        const Operands in = {d_q.at, d_k.at, d_v.at, o.at, lse.at, d_do.at};
        launch(grad, in, room.at, shape);
        const std::vector<float> once = dq.host();
        proof.hold(dv.host(), cpu.dv, right.dv);
        if (n.s > 1) {  // one key has all the weight, whatever its score
            proof.hold(once, cpu.dq, right.dq);
            proof.hold(dk.host(), cpu.dk, right.dk);
        }
        emulator_order(7);
        launch(grad, in, room.at, shape);
        emulator_order(0);
        report_that(dq.host() == once, "two runs with %lld tokens differ", (long long)n.s);
        free(q);
        free(k);
        free(v);
        free(grad_o);
    }
    return proof;
}

// ---- the tables ----

// A version of backward, counted with `multiple` tokens twice.
template <class Launch>
void backward_version(const KernelVersion &version, const Heads &at_size, int d, int64_t multiple,
                      Launch launch, Work (*formula)(const Heads &, double)) {
    Heads small = at_size;
    small.b = 1, small.s = 2 * multiple, small.a = 2, small.kv = 1;
    const Heads most = ON_GPU ? at_size : small;
    const int64_t queries = most.b * most.s * most.a * d, keys = most.b * most.s * most.kv * d;
    float *numbers = kernels_numbers(queries, 1, 4);
    Array<float> q(numbers, queries), k(numbers, keys), v(numbers, keys), o(numbers, queries);
    Array<float> grad_o(numbers, queries), lse(numbers, most.b * most.a * most.s);
    Array<float> dq(queries), dk(keys), dv(keys), room(backward_room(most));
    free(numbers);
    const Gradients grad = {dq.at, dk.at, dv.at};
    const Operands in = {q.at, k.at, v.at, o.at, lse.at, grad_o.at};
    show_version(
        version, prove_backward(d, at_size.causal, launch), small, at_size,
        [&](const Heads &shape) { launch(grad, in, room.at, shape); },
        [&](const Heads &shape) { return formula(shape, d); });
}


// The shape that the tables show, of d elements a head; tokens a multiple of `multiple`.
static inline Heads flash_options(int argc, char **argv, const char *purpose, int64_t multiple,
                                  KernelsOptions *options, int *d) {
    int64_t n;
    int wide;
    Option table[] = {
        {"size", OPTION_INT, &n, "4096", 64, 32768, "", "tokens of the table's sequence", false},
        {"head-size", OPTION_CHOICE, &wide, "128", 0, 0, "64|128", "elements of a head", false},
        KERNELS_OPTIONS(*options),
    };
    options_parse(argc, argv, purpose, table, sizeof table / sizeof *table);
    *d = wide ? 128 : 64;
    return {1, n - n % multiple, 32, 8, 1 / sqrtf((float)*d), 0};
}

// A table without a mask and one with it, whose rows are rows(shape). passes: 1 of forward; 2 of backward,
// which moves and computes at least twice as much.
template <class Rows>
void flash_tables(const KernelsOptions *options, Heads shape, int d, int passes, Rows rows) {
    for (int causal = 0; causal < 2; causal++) {
        shape.causal = causal;
        const double s = (double)shape.s, pairs = s * (causal ? (s + 1) / 2 : s);
        char *size = format_text(
            "%s%s of %lld tokens, %d heads of %d, %d of K/V", passes == 2 ? "backward of " : "",
            causal ? "causal attention" : "attention", (long long)shape.s, (int)shape.a, d, (int)shape.kv);
        kernels_begin(options, size,
                      kernels_limit(options, passes * 4 * words_of_forward(shape, d),
                                    passes * 4 * pairs * d * (double)shape.a, 0));
        rows(shape);
        free(size);
    }
}

#endif
