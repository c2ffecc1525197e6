// chunks.h: for tests of attention over parts of the keys: a plain reference in f64 that stores every
// score; and keys in any order, in any chunks, which are processed in any order. Include it after cmocka.h.
#ifndef CHUNKS_H
#define CHUNKS_H

#include "arrays.h"
#include "tensor/ops.h"

enum { MOST_CHUNKS = 8 };

// ---- the reference: all pairs, one after another ----

typedef struct Shape {
    int64_t b, s_q, s_k, heads, kv_heads, d;
} Shape;

typedef struct Tokens {  // (b, s)
    int64_t b, s;
    int32_t *position, *document;
} Tokens;

static inline Tokens tokens_new(int64_t b, int64_t s) {
    size_t bytes = (size_t)(b * s + 1) * sizeof(int32_t);
    return (Tokens){b, s, host_alloc(bytes), host_alloc(bytes)};
}
static inline void tokens_free(Tokens *t) { free(t->position), free(t->document); }

static inline bool sees(const Tokens *q, int64_t i, const Tokens *k, int64_t j) {
    return k->position[j] <= q->position[i] && k->document[j] == q->document[i];
}

// Values, and for each the sum of the absolute values of its terms: the scale of its rounding error.
typedef struct Sum {
    double *x, *size;
    int64_t count;
} Sum;
static inline Sum sum_new(int64_t count) { return (Sum){zeros(count), zeros(count), count}; }
static inline void sum_free(Sum *s) { free(s->x), free(s->size); }
static inline void sum_add(Sum *s, int64_t at, double value, double size) {
    s->x[at] += value;
    s->size[at] += size;
}

typedef struct Reference {
    Sum o, lse, dq, dk, dv;
} Reference;
static inline void reference_free(Reference *r) {
    sum_free(&r->o), sum_free(&r->lse), sum_free(&r->dq), sum_free(&r->dk), sum_free(&r->dv);
}

static inline void reference_row(Reference *r, const double *q, const double *k, const double *v,
                                 const double *d_o, const Tokens *tq, const Tokens *tk, Shape at,
                                 int64_t sample, int64_t i, int64_t head) {
    const int64_t d = at.d, row = sample * at.s_q + i, q_at = (row * at.heads + head) * d;
    const double scale = 1 / sqrt((double)d);
    double *p = zeros(at.s_k), *dp = zeros(at.s_k), max = -INFINITY, sum = 0, dot = 0, dot_size = 0;
#define EACH_KEY(j)                      \
    for (int64_t j = 0; j < at.s_k; j++) \
        if (sees(tq, row, tk, sample * at.s_k + j))
#define K_AT(j) (((sample * at.s_k + (j)) * at.kv_heads + head / (at.heads / at.kv_heads)) * d)
    EACH_KEY(j) {
        for (int64_t x = 0; x < d; x++) p[j] += q[q_at + x] * k[K_AT(j) + x] * scale;
        max = fmax(max, p[j]);
    }
    EACH_KEY(j) sum += p[j] = exp(p[j] - max);
    sum_add(&r->lse, row * at.heads + head, max + log(sum), fabs(max) + 1);
    EACH_KEY(j) {
        p[j] /= sum;
        for (int64_t x = 0; x < d; x++) {
            sum_add(&r->o, q_at + x, p[j] * v[K_AT(j) + x], p[j] * fabs(v[K_AT(j) + x]));
            dp[j] += d_o[q_at + x] * v[K_AT(j) + x];
        }
        dot += p[j] * dp[j];
        dot_size += p[j] * fabs(dp[j]);
    }
    EACH_KEY(j) for (int64_t x = 0; x < d; x++) {
        double ds = p[j] * (dp[j] - dot) * scale, size = p[j] * (fabs(dp[j]) + dot_size) * scale;
        sum_add(&r->dv, K_AT(j) + x, p[j] * d_o[q_at + x], p[j] * fabs(d_o[q_at + x]));
        sum_add(&r->dq, q_at + x, ds * k[K_AT(j) + x], size * fabs(k[K_AT(j) + x]));
        sum_add(&r->dk, K_AT(j) + x, ds * q[q_at + x], size * fabs(q[q_at + x]));
    }
#undef EACH_KEY
#undef K_AT
    free(p), free(dp);
}

static inline Reference reference_new(const double *q, const double *k, const double *v, const double *d_o,
                                      const Tokens *tq, const Tokens *tk, Shape at) {
    const int64_t queries = at.b * at.s_q * at.heads, keys = at.b * at.s_k * at.kv_heads;
    Reference r = {sum_new(queries * at.d), sum_new(queries), sum_new(queries * at.d), sum_new(keys * at.d),
                   sum_new(keys * at.d)};
    for (int64_t sample = 0; sample < at.b; sample++)
        for (int64_t i = 0; i < at.s_q; i++)
            for (int64_t head = 0; head < at.heads; head++)
                reference_row(&r, q, k, v, d_o, tq, tk, at, sample, i, head);
    return r;
}

// The L2 norm of the error; infinities must agree, NaN fails.
static inline double error_of(const double *got, const Sum *want) {
    double squares = 0;
    for (int64_t i = 0; i < want->count; i++) {
        double e = got[i] - want->x[i];
        if (!(isinf(want->x[i]) && got[i] == want->x[i])) squares += e * e;
    }
    return sqrt(squares);
}
static inline double size_of(const Sum *s) {
    double squares = 0;
    for (int64_t i = 0; i < s->count; i++)
        if (isfinite(s->size[i])) squares += s->size[i] * s->size[i];
    return sqrt(squares);
}

// ---- a case: tensors, and the operations under test ----

typedef struct Case {
    Shape at;
    DType dtype;
    Tokens tq, tk;
    Array q, k, v, d_o;  // keys in the order of tk
} Case;

// A permutation of 0 … count - 1.
static inline void shuffle(int64_t *order, int64_t count, uint64_t key) {
    for (int64_t i = 0; i < count; i++) order[i] = i;
    for (int64_t i = count - 1; i > 0; i--) {
        int64_t j = (int64_t)(rng_bits(key, RNG_TEST, (uint64_t)i) % (uint64_t)(i + 1)), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
}

// Tokens at positions from `first` on, in any order, different in each sample; documents of `length`; 0: one.
static inline Tokens shuffled_tokens(int64_t b, int64_t s, int32_t first, int32_t length, uint64_t key) {
    Tokens t = tokens_new(b, s);
    int64_t *order = host_alloc((size_t)s * sizeof *order);
    for (int64_t sample = 0; sample < b; sample++) {
        shuffle(order, s, key + (uint64_t)sample);
        for (int64_t i = 0; i < s; i++) {
            t.position[sample * s + i] = first + (int32_t)order[i];
            t.document[sample * s + i] = length ? t.position[sample * s + i] / length : 0;
        }
    }
    free(order);
    return t;
}

static inline Tokens tokens_in_order(int64_t b, int64_t s) {
    Tokens t = tokens_new(b, s);
    for (int64_t i = 0; i < b * s; i++) t.position[i] = (int32_t)(i % s), t.document[i] = 0;
    return t;
}

static inline Case case_new(Shape at, DType dtype, Tokens tq, Tokens tk, uint64_t key) {
    const int64_t h = at.heads * at.d, kv = at.kv_heads * at.d;
    return (Case){at,
                  dtype,
                  tq,
                  tk,
                  random_array(dtype, at.b * at.s_q, h, key + 1),
                  random_array(dtype, at.b * at.s_k, kv, key + 2),
                  random_array(dtype, at.b * at.s_k, kv, key + 3),
                  random_array(dtype, at.b * at.s_q, h, key + 4)};
}
static inline void case_free(Case *c) {
    FREE(&c->q, &c->k, &c->v, &c->d_o);
    tokens_free(&c->tq);
    tokens_free(&c->tk);
}
static inline Reference case_reference(const Case *c) {
    return reference_new(c->q.x, c->k.x, c->v.x, c->d_o.x, &c->tq, &c->tk, c->at);
}
static inline AttentionHeads heads_of(Shape at) { return (AttentionHeads){at.heads, at.kv_heads, at.d}; }

// Keys [first, first + s_k) of each sample, as a rank would store them.
typedef struct Chunk {
    int64_t first, s;
    AttentionPositions positions;
    AttentionMask mask;
    Array k, v, dk, dv;
} Chunk;

static inline void chunk_rows(double *chunk, double *all, const Chunk *c, Shape at, bool back) {
    const int64_t row = at.kv_heads * at.d;
    for (int64_t sample = 0; sample < at.b; sample++) {
        double *one = chunk + sample * c->s * row, *other = all + (sample * at.s_k + c->first) * row;
        memcpy(back ? other : one, back ? one : other, (size_t)(c->s * row) * sizeof *all);
    }
}

static inline Chunk *chunk_new(const Case *c, const AttentionPositions *queries, int64_t first,
                               int64_t end) {
    const int64_t s = end - first, kv = c->at.kv_heads * c->at.d;
    Chunk *it = host_alloc(sizeof *it);
    Tokens t = tokens_new(c->at.b, s);
    for (int64_t i = 0; i < c->at.b * s; i++) {
        t.position[i] = c->tk.position[i / s * c->at.s_k + first + i % s];
        t.document[i] = c->tk.document[i / s * c->at.s_k + first + i % s];
    }
    *it = (Chunk){.first = first, .s = s};
    it->positions = attention_positions_new(c->at.b, s, t.position, t.document);
    it->mask = attention_mask(queries, &it->positions);
    it->k = array_new(c->dtype, c->at.b * s, kv, 0);
    it->v = array_new(c->dtype, c->at.b * s, kv, 0);
    it->dk = array_new(full(c->dtype), c->at.b * s, kv, 0);
    it->dv = array_new(full(c->dtype), c->at.b * s, kv, 0);
    chunk_rows(it->k.x, c->k.x, it, c->at, false);
    chunk_rows(it->v.x, c->v.x, it, c->at, false);
    tensor_from_doubles(it->k.t, it->k.x);
    tensor_from_doubles(it->v.t, it->v.x);
    tokens_free(&t);
    return it;
}
static inline void chunk_free(Chunk *it) {
    attention_positions_free(&it->positions);
    FREE(&it->k, &it->v, &it->dk, &it->dv);
    free(it);
}

// The operations' results for a case: o in storage, the rest accumulators; dk and dv in the order of tk.
typedef struct Result {
    AttentionPositions *queries;  // where the masks refer to it
    Chunk *chunk[MOST_CHUNKS];
    int chunks;
    Array running, o, lse, dots, dq;
    double *dk, *dv;
} Result;

// Keys in `chunks` pieces whose boundaries and order are drawn from the key.
static inline Result result_new(const Case *c, int chunks, uint64_t key) {
    const Shape at = c->at;
    const DType wide = full(c->dtype);
    const int64_t n = at.b * at.s_q, h = at.heads * at.d, kv_count = at.b * at.s_k * at.kv_heads * at.d;
    Result r = {.chunks = chunks, .dk = zeros(kv_count), .dv = zeros(kv_count)};
    r.queries = host_alloc(sizeof *r.queries);
    *r.queries = attention_positions_new(at.b, at.s_q, c->tq.position, c->tq.document);
    int64_t border[MOST_CHUNKS + 1] = {0}, order[MOST_CHUNKS];
    for (int i = 1; i <= chunks; i++) {
        int64_t left = at.s_k - border[i - 1];
        int64_t most = chunks == i ? left : left - (chunks - i) < 1 ? 0 : left - (chunks - i);
        border[i] =
            border[i - 1] + (i == chunks ? left
                             : most ? 1 + (int64_t)(rng_bits(key, RNG_TEST, (uint64_t)i) % (uint64_t)most)
                                    : 0);
    }
    shuffle(order, chunks, key + 99);
    for (int i = 0; i < chunks; i++) {
        int at_chunk = (int)order[i];
        r.chunk[i] = chunk_new(c, r.queries, border[at_chunk], border[at_chunk + 1]);
    }
    r.running = array_new(wide, n, h, 0);
    r.lse = array_new(wide, n, at.heads, -INFINITY);
    r.dots = poisoned(wide, n, at.heads);
    r.dq = array_new(wide, n, h, 0);
    r.o = poisoned(c->dtype, n, h);
    return r;
}

static inline void result_forward(Result *r, const Case *c) {
    for (int i = 0; i < r->chunks; i++)
        op_attention_chunk_forward(r->running.t, r->lse.t, c->q.t, r->chunk[i]->k.t, r->chunk[i]->v.t,
                                   &r->chunk[i]->mask, heads_of(c->at));
    op_copy(r->o.t, r->running.t);
    array_read(&r->running);
    array_read(&r->lse);
    array_read(&r->o);
}

static inline void result_backward(Result *r, const Case *c) {
    op_attention_chunk_dots(r->dots.t, r->o.t, c->d_o.t, heads_of(c->at));
    for (int i = 0; i < r->chunks; i++) {
        Chunk *it = r->chunk[i];
        op_attention_chunk_backward(r->dq.t, it->dk.t, it->dv.t, c->d_o.t, c->q.t, it->k.t, it->v.t,
                                    r->lse.t, r->dots.t, &it->mask, heads_of(c->at));
        array_read(&it->dk);
        array_read(&it->dv);
        chunk_rows(it->dk.x, r->dk, it, c->at, true);
        chunk_rows(it->dv.x, r->dv, it, c->at, true);
    }
    array_read(&r->dq);
}

static inline Result result_of(const Case *c, int chunks, uint64_t key) {
    Result r = result_new(c, chunks, key);
    result_forward(&r, c);
    result_backward(&r, c);
    return r;
}

static inline void result_free(Result *r) {
    for (int i = 0; i < r->chunks; i++) chunk_free(r->chunk[i]);
    attention_positions_free(r->queries);
    free(r->queries);
    FREE(&r->running, &r->o, &r->lse, &r->dots, &r->dq);
    free(r->dk), free(r->dv);
}

static inline void assert_error(const char *what, const Case *c, const double *got, const Sum *want,
                                double bound) {
    double error = error_of(got, want);
    if (!(error <= bound))
        fail_msg("%s %s, b %lld, s %lld x %lld, heads %lld / %lld of %lld: error %.3g in L2, bound %.3g",
                 what, dtype_name(c->dtype), (long long)c->at.b, (long long)c->at.s_q, (long long)c->at.s_k,
                 (long long)c->at.heads, (long long)c->at.kv_heads, (long long)c->at.d, error, bound);
}

static inline void assert_result(const Case *c, const Result *r, const Reference *want, double relative) {
    const struct {
        const char *name;
        const double *got;
        const Sum *want;
    } all[] = {{"o", r->o.x, &want->o},
               {"lse", r->lse.x, &want->lse},
               {"dq", r->dq.x, &want->dq},
               {"dk", r->dk, &want->dk},
               {"dv", r->dv, &want->dv}};
    for (int i = 0; i < 5; i++)
        assert_error(all[i].name, c, all[i].got, all[i].want, relative * size_of(all[i].want));
}

#endif
