// flash_codes_reference.h: what holds attention on codes against the CPU: the codes bit for bit, and each
// row of attention with the error that rounding to e4m3 explains.
#ifndef FLASH_CODES_REFERENCE_H
#define FLASH_CODES_REFERENCE_H

#include "attention_reference.h"
#include "flash_codes.h"

// What the codes stand for. Each scale is its tile's largest number by that of e4m3, and each code the
// number divided by it, rounded to nearest: the same bits.
template <int D>
static std::vector<float> decoded(const Coded<D> &x, const std::vector<float> &from, const Heads &n) {
    const std::vector<Code> codes = x.codes.host();
    const std::vector<float> scales = x.scales.host();
    const int64_t heads = x.heads, tiles = tiles_of_rows(n.s), stride = heads * D;
    std::vector<float> wide(from.size());
    int64_t wrong = 0;
    for (int64_t unit = 0; unit < n.b * heads * tiles; unit++) {
        const int64_t tile = unit % tiles, head = unit / tiles % heads, sample = unit / tiles / heads;
        const int64_t first = (sample * n.s + tile * ROWS) * stride + head * D;
        const int64_t rows = std::min((int64_t)ROWS, n.s - tile * ROWS);
        float most = 0;
        for (int64_t i = 0; i < rows * D; i++)
            most = fmaxf(most, fabsf(from[(size_t)(first + i / D * stride + i % D)]));
        wrong += scales[(size_t)unit] != most / LARGEST;
        for (int64_t i = 0; i < rows * D; i++) {
            const size_t at = (size_t)(first + i / D * stride + i % D);
            const int64_t row = i / D, line = sample * lines_of_rows<D>(n.s) + tile * D + row % D;
            const Code code = codes[(size_t)((line * heads + head) * TILE_ROW + row / D * D + i % D)];
            wide[at] = static_cast<float>(code) * scales[(size_t)unit];
            wrong += static_cast<float>(code) != static_cast<float>(Code(from[at] * (LARGEST / most)));
        }
    }
    report_that(wrong == 0, "%lld codes or scales are not those of e4m3", (long long)wrong);
    return wide;
}

// The error of one query of one head, and of its log-sum-exp, and what they may be.
struct RowError {
    double error, bound, size, log_error, log_bound;
};
template <int D>
RowError row_error(const Heads &n, int64_t row, const float *o, float lse, const float *q, const float *k,
                   const float *v) {
    const int64_t h = row % n.a, query = row / n.a % n.s, sample = row / n.a / n.s, step = n.kv * D;
    const int64_t key_head = sample * n.s * step + h / (n.a / n.kv) * D, end = n.causal ? query + 1 : n.s;
    std::vector<double> p((size_t)end), off((size_t)end);
    double most = -INFINITY, sum = 0, most_off = 0;
    for (int64_t j = 0; j < end; j++) {
        double dot = 0, size = 0;
        for (int c = 0; c < D; c++) {
            const double x = (double)q[row * D + c] * k[key_head + j * step + c];
            dot += x, size += fabs(x);
        }
        p[(size_t)j] = dot * n.scale, off[(size_t)j] = ldexp(size * n.scale, -11);
        most = fmax(most, p[(size_t)j]), most_off = fmax(most_off, off[(size_t)j]);
    }
    for (double &x : p) sum += x = exp(x - most);
    const double e = ldexp(1, -4), cut = ldexp(ceil((double)end / KEYS) * KEYS / DEPTH, -13) + ldexp(1, -9);
    RowError r = {0, 0, 0, fabs(lse - most - log(sum)), most_off + 1e-5};
    for (int c = 0; c < D; c++) {
        double right = 0, variance = 0;
        for (int64_t j = 0; j < end; j++) {
            const double x = p[(size_t)j] / sum * v[key_head + j * step + c];
            right += x, variance += x * x * (e * e / 3 + off[(size_t)j] * off[(size_t)j]);
        }
        r.error += (o[row * D + c] - right) * (o[row * D + c] - right);
        r.bound += 4 * (variance + right * right * cut * cut), r.size += right * right;
    }
    return r;
}

// Each row within its bound; the error of all, which is relative to the size of o.
template <class T, int D, class Attend>
Proof prove_codes(bool causal, Attend attend) {
    Proof proof;
    const struct {
        int64_t b, s, a, kv;
        double scale;
    } cases[] = {{1, 0, 1, 1, 1}, {2, 1, 2, 1, 1}, {1, 37, 4, 2, 30}, {1, 2 * KEYS + 7, 3, 3, 1}};
    for (auto &n : cases) {
        const Heads shape = {n.b, n.s, n.a, n.kv, 1 / sqrtf((float)D), causal};
        const int64_t rows = n.b * n.s * n.a, keys = n.b * n.s * n.kv * D;
        const Given<T> q(rows * D, n.scale, 1), k(keys, 1, 2), v(keys, 1, 3);
        Array<T> d_q(q.narrow.data(), rows * D), d_k(k.narrow.data(), keys), d_v(v.narrow.data(), keys);
        Array<T> o(rows * D);
        Array<float> lse(rows);
        const Operands8<D> coded(shape);
        encode_all(coded, d_q.at, d_k.at, d_v.at, shape);
        attend(o.at, lse.at, coded, shape);
        const std::vector<float> once = made(o), logs = lse.host();
        const std::vector<float> x[] = {decoded(coded.q, q.exact, shape), decoded(coded.k, k.exact, shape),
                                        decoded(coded.v, v.exact, shape)};
        double error = 0, bound = 0, size = 0;
        int64_t wrong = 0;
        for (int64_t row = 0; row < rows; row++) {
            const int64_t at = (row / n.a / n.s * n.a + row % n.a) * n.s + row / n.a % n.s;
            const RowError r = row_error<D>(shape, row, once.data(), logs[(size_t)at], x[0].data(),
                                            x[1].data(), x[2].data());
            wrong += !(r.error <= r.bound && r.log_error <= r.log_bound);
            error += r.error, bound += r.bound, size += r.size;
        }
        report_that(wrong == 0, "%lld of %lld rows are off by more than e4m3 explains", (long long)wrong,
                    (long long)rows);
        if (rows) proof.closer(sqrt(error / size), sqrt(bound / size));
        attend(o.at, lse.at, coded, shape);
        report_that(made(o) == once, "two runs with %lld tokens differ", (long long)n.s);
        if (n.b == 1) continue;
        for (const Array<T> *y : {&d_q, &d_k, &d_v}) spoil(*y);
        encode_all(coded, d_q.at, d_k.at, d_v.at, shape);
        attend(o.at, lse.at, coded, shape);
        const std::vector<float> beside = made(o);
        report_that(std::equal(once.begin(), once.begin() + rows * D / 2, beside.begin()),
                    "NaN in the second sample reaches the first");
    }
    return proof;
}

#endif
