// flash_codes_reference.h: what holds attention on codes against the CPU: the codes bit for bit, and each
// row of attention with the error that rounding to e4m3 explains.
#ifndef FLASH_CODES_REFERENCE_H
#define FLASH_CODES_REFERENCE_H

#include "attention_tiles.h"
#include "flash_codes.h"

// What the codes stand for. Each scale is its tile's largest number by that of e4m3, and each code the
// number divided by it, rounded to nearest: the same bits.
template <int D>
static std::vector<float> decoded(const Coded<D> &x, const std::vector<float> &from, int64_t b, int64_t s) {
    const std::vector<Code> codes = x.codes.host();
    const std::vector<float> scales = x.scales.host();
    const int64_t heads = x.heads, tiles = tiles_of_rows(s), stride = heads * D;
    std::vector<float> wide(from.size());
    int64_t wrong = 0;
    for (int64_t unit = 0; unit < b * heads * tiles; unit++) {
        const int64_t tile = unit % tiles, head = unit / tiles % heads, sample = unit / tiles / heads;
        const int64_t first = (sample * s + tile * ROWS) * stride + head * D;
        const int64_t rows = std::min((int64_t)ROWS, s - tile * ROWS);
        float most = LEAST;
        for (int64_t i = 0; i < rows * D; i++)
            most = fmaxf(most, fabsf(from[(size_t)(first + i / D * stride + i % D)]));
        wrong += scales[(size_t)unit] != most / LARGEST;
        for (int64_t i = 0; i < rows * D; i++) {
            const size_t at = (size_t)(first + i / D * stride + i % D);
            const int64_t row = i / D, line = sample * lines_of_rows<D>(s) + tile * D + row % D;
            const Code code = codes[(size_t)((line * heads + head) * TILE_ROW + row / D * D + i % D)];
            wide[at] = static_cast<float>(code) * scales[(size_t)unit];
            wrong += static_cast<float>(code) != static_cast<float>(Code(from[at] * (LARGEST / most)));
        }
    }
    report_that(wrong == 0, "%lld codes or scales are not those of e4m3", (long long)wrong);
    return wide;
}

// The error of one query of one head, and of its log-sum-exp, and what they may be. Without a key there is
// none.
struct RowError {
    double error, bound, size, log_error, log_bound;
};
template <int D>
RowError row_error(const Heads &n, const AttentionMask *mask, int64_t row, const float *o, float lse,
                   const float *q, const float *k, const float *v) {
    const int64_t h = row % n.a, query = row / n.a % n.s, sample = row / n.a / n.s, step = n.kv * D;
    const int64_t key_count = mask ? mask->keys->s : n.s;
    const float *key_head = k + sample * key_count * step + h / (n.a / n.kv) * D;
    const std::vector<int64_t> seen = keys_seen(n, mask, sample, query);
    std::vector<double> p, off;
    double most = -INFINITY, sum = 0, most_off = 0;
    for (int64_t j : seen) {
        double dot = 0, size = 0;
        for (int c = 0; c < D; c++) {
            const double x = (double)q[row * D + c] * key_head[j * step + c];
            dot += x, size += fabs(x);
        }
        p.push_back(dot * n.scale), off.push_back(ldexp(size * n.scale, -11));
        most = fmax(most, p.back()), most_off = fmax(most_off, off.back());
    }
    for (double &x : p) sum += x = exp(x - most);
    const double steps = ceil((double)(mask ? key_count : (int64_t)seen.size()) / KEYS) * KEYS / DEPTH;
    const double e = ldexp(1, -4), cut = ldexp(steps, -13) + ldexp(1, -9);
    RowError r = {0, 0, 0, fabs(lse - most - log(sum)), most_off + 1e-5};
    if (seen.empty()) r.log_error = lse == -INFINITY ? 0 : INFINITY;
    for (int c = 0; c < D; c++) {
        double right = 0, variance = 0;
        for (size_t i = 0; i < seen.size(); i++) {
            const double x = p[i] / sum * v[key_head - k + seen[i] * step + c];
            right += x, variance += x * x * (e * e / 3 + off[i] * off[i]);
        }
        r.error += (o[row * D + c] - right) * (o[row * D + c] - right);
        r.bound += 4 * (variance + right * right * cut * cut), r.size += right * right;
    }
    return r;
}

// The same, with numbers from place `from` on that are too small for a scale of their own.
template <class T>
Numbers<T> vanishing(Numbers<T> x, int64_t from) {
    for (size_t i = (size_t)from; i < x.narrow.size(); i++) x.set(i, ldexpf(x.exact[i], -126));
    return x;
}

// Operands of attention, and what a kernel makes of them. Tokens from `last` on vanish.
template <class T, int D, class Shape>
struct CodesCase {
    Shape n;
    int64_t rows, keys;  // of all heads, by D
    Numbers<T> q, k, v;
    Array<T> d_q, d_k, d_v, o;
    Array<float> lse;
    Operands8<D> coded;

    CodesCase(const Shape &n, double scale, int64_t last = INT32_MAX)
        : n(n),
          rows(n.b * n.s * n.a),
          keys(n.b * keys_of(n) * n.kv),
          q(vanishing(Numbers<T>(rows * D, 1, scale), last * n.a * D)),
          k(vanishing(Numbers<T>(keys * D, 2), last * n.kv * D)),
          v(vanishing(Numbers<T>(keys * D, 3), last * n.kv * D)),
          d_q(q.narrow.data(), rows * D),
          d_k(k.narrow.data(), keys * D),
          d_v(v.narrow.data(), keys * D),
          o(rows * D),
          lse(rows),
          coded(n) {}
    template <class Attend>
    std::vector<float> attended(Attend attend) const {
        encode_all(coded, d_q.at, d_k.at, d_v.at, n);
        attend(o.at, lse.at, coded, n);
        return in_f32(o);
    }
    // Each row within its bound; the error of all, which is relative to the size of o.
    void hold(Proof *proof, const std::vector<float> &once, const AttentionMask *mask) const {
        const std::vector<float> logs = lse.host(), x[] = {decoded(coded.q, q.exact, n.b, n.s),
                                                           decoded(coded.k, k.exact, n.b, keys_of(n)),
                                                           decoded(coded.v, v.exact, n.b, keys_of(n))};
        double error = 0, bound = 0, size = 0;
        int64_t wrong = 0;
        for (int64_t row = 0; row < rows; row++) {
            const int64_t at = (row / n.a / n.s * n.a + row % n.a) * n.s + row / n.a % n.s;
            const RowError r = row_error<D>(n, mask, row, once.data(), logs[(size_t)at], x[0].data(),
                                            x[1].data(), x[2].data());
            wrong += !(r.error <= r.bound && r.log_error <= r.log_bound);
            error += r.error, bound += r.bound, size += r.size;
        }
        report_that(wrong == 0, "%lld of %lld rows are off by more than e4m3 explains", (long long)wrong,
                    (long long)rows);
        if (rows) proof->closer(sqrt(error / size), sqrt(bound / size));
    }
};

template <class T, int D, class Attend>
Proof prove_codes(bool causal, Attend attend) {
    Proof proof;
    const struct {
        int64_t b, s, a, kv;
        double scale;
        int64_t last;
    } cases[] = {{1, 0, 1, 1, 1, 0},
                 {2, 1, 2, 1, 1, 2},
                 {1, 37, 4, 2, 30, 37},
                 {1, 2 * KEYS + 7, 3, 3, 1, 2 * KEYS + 7},
                 {1, 2 * KEYS + 7, 1, 1, 1, KEYS}};
    for (auto &n : cases) {
        const CodesCase<T, D, Heads> it({n.b, n.s, n.a, n.kv, 1 / sqrtf((float)D), causal}, n.scale,
                                        n.last);
        const std::vector<float> once = it.attended(attend);
        it.hold(&proof, once, NULL);
        report_that(it.attended(attend) == once, "two runs with %lld tokens differ", (long long)n.s);
        if (n.b == 1) continue;
        for (const Array<T> *y : {&it.d_q, &it.d_k, &it.d_v}) spoil(*y);
        const std::vector<float> beside = it.attended(attend);
        report_that(std::equal(once.begin(), once.begin() + it.rows * D / 2, beside.begin()),
                    "NaN in the second sample reaches the first");
    }
    return proof;
}

// The same with masks by tokens; the second time in another order of blocks and threads where the emulator
// runs them.
template <class T, int D, class Attend>
Proof prove_masked_codes(Attend attend) {
    Proof proof;
    for (int m = 0; m < MASKS; m++) {
        const MaskedCase masked(side_of(m, false, KEYS), side_of(m, true, KEYS));
        const CodesCase<T, D, TokenHeads> it(masked.shape(2, 1, D), 4);
        const std::vector<float> once = it.attended(attend);
        it.hold(&proof, once, &masked.mask);
        emulator_order(7);
        report_that(it.attended(attend) == once, "mask %d: two runs differ", m);
        emulator_order(0);
    }
    return proof;
}

#endif
