// test_flash.c: attention over a part of the keys against a plain reference in f64 that stores every score:
// keys in any order, cut into any chunks that come in any order, under any mask of positions and documents.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "arrays.h"
#include "report/clock.h"
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

static Tokens tokens_new(int64_t b, int64_t s) {
    size_t bytes = (size_t)(b * s + 1) * sizeof(int32_t);
    return (Tokens){b, s, host_alloc(bytes), host_alloc(bytes)};
}
static void tokens_free(Tokens *t) { free(t->position), free(t->document); }

static bool sees(const Tokens *q, int64_t i, const Tokens *k, int64_t j) {
    return k->position[j] <= q->position[i] && k->document[j] == q->document[i];
}

// Values, and beside them what the absolute values of all terms sum to: the scale of a sum's rounding.
typedef struct Sum {
    double *x, *size;
    int64_t count;
} Sum;
static Sum sum_new(int64_t count) { return (Sum){zeros(count), zeros(count), count}; }
static void sum_free(Sum *s) { free(s->x), free(s->size); }
static void sum_add(Sum *s, int64_t at, double value, double size) {
    s->x[at] += value;
    s->size[at] += size;
}

typedef struct Reference {
    Sum o, lse, dq, dk, dv;
} Reference;
static void reference_free(Reference *r) {
    sum_free(&r->o), sum_free(&r->lse), sum_free(&r->dq), sum_free(&r->dk), sum_free(&r->dv);
}

static void reference_row(Reference *r, const double *q, const double *k, const double *v, const double *d_o,
                          const Tokens *tq, const Tokens *tk, Shape at, int64_t sample, int64_t i,
                          int64_t head) {
    const int64_t d = at.d, row = sample * at.s_q + i, q_at = (row * at.heads + head) * d;
    const double scale = 1 / sqrt((double)d);
    double *p = zeros(at.s_k), *dp = zeros(at.s_k), max = -INFINITY, sum = 0, dot = 0, dot_size = 0;
#define EACH_KEY(j) \
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

static Reference reference_new(const double *q, const double *k, const double *v, const double *d_o,
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

// L2 of the error; infinities must agree, NaN loses.
static double error_of(const double *got, const Sum *want) {
    double squares = 0;
    for (int64_t i = 0; i < want->count; i++) {
        double e = got[i] - want->x[i];
        if (!(isinf(want->x[i]) && got[i] == want->x[i])) squares += e * e;
    }
    return sqrt(squares);
}
static double size_of(const Sum *s) {
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
static void shuffle(int64_t *order, int64_t count, uint64_t key) {
    for (int64_t i = 0; i < count; i++) order[i] = i;
    for (int64_t i = count - 1; i > 0; i--) {
        int64_t j = (int64_t)(rng_bits(key, RNG_TEST, (uint64_t)i) % (uint64_t)(i + 1)), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
}

// Tokens at positions from `first` on, in any order, another in each sample; documents of `length`, 0: one.
static Tokens shuffled_tokens(int64_t b, int64_t s, int32_t first, int32_t length, uint64_t key) {
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

static Tokens tokens_in_order(int64_t b, int64_t s) {
    Tokens t = tokens_new(b, s);
    for (int64_t i = 0; i < b * s; i++) t.position[i] = (int32_t)(i % s), t.document[i] = 0;
    return t;
}

static Case case_new(Shape at, DType dtype, Tokens tq, Tokens tk, uint64_t key) {
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
static void case_free(Case *c) {
    FREE(&c->q, &c->k, &c->v, &c->d_o);
    tokens_free(&c->tq);
    tokens_free(&c->tk);
}
static Reference case_reference(const Case *c) {
    return reference_new(c->q.x, c->k.x, c->v.x, c->d_o.x, &c->tq, &c->tk, c->at);
}
static AttentionHeads heads_of(Shape at) { return (AttentionHeads){at.heads, at.kv_heads, at.d}; }

// Keys [first, first + s_k) of each sample, as a rank would store them.
typedef struct Chunk {
    int64_t first, s;
    AttentionPositions positions;
    AttentionMask mask;
    Array k, v, dk, dv;
} Chunk;

static void chunk_rows(double *chunk, double *all, const Chunk *c, Shape at, bool back) {
    const int64_t row = at.kv_heads * at.d;
    for (int64_t sample = 0; sample < at.b; sample++) {
        double *one = chunk + sample * c->s * row, *other = all + (sample * at.s_k + c->first) * row;
        memcpy(back ? other : one, back ? one : other, (size_t)(c->s * row) * sizeof *all);
    }
}

static Chunk *chunk_new(const Case *c, const AttentionPositions *queries, int64_t first, int64_t end) {
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
static void chunk_free(Chunk *it) {
    attention_positions_free(&it->positions);
    FREE(&it->k, &it->v, &it->dk, &it->dv);
    free(it);
}

// What the operations make of a case: o in storage, the rest accumulators; dk and dv in the order of tk.
typedef struct Result {
    AttentionPositions *queries;  // where the masks find it
    Chunk *chunk[MOST_CHUNKS];
    int chunks;
    Array running, o, lse, dots, dq;
    double *dk, *dv;
} Result;

// Keys in `chunks` pieces whose borders and order the key draws.
static Result result_new(const Case *c, int chunks, uint64_t key) {
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
        border[i] = border[i - 1] + (i == chunks ? left
                                     : most      ? 1 + (int64_t)(rng_bits(key, RNG_TEST, (uint64_t)i) %
                                                            (uint64_t)most)
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

static void result_forward(Result *r, const Case *c) {
    for (int i = 0; i < r->chunks; i++)
        op_attention_chunk_forward(r->running.t, r->lse.t, c->q.t, r->chunk[i]->k.t, r->chunk[i]->v.t,
                                   &r->chunk[i]->mask, heads_of(c->at));
    op_copy(r->o.t, r->running.t);
    array_read(&r->running);
    array_read(&r->lse);
    array_read(&r->o);
}

static void result_backward(Result *r, const Case *c) {
    op_attention_chunk_dots(r->dots.t, r->o.t, c->d_o.t, heads_of(c->at));
    for (int i = 0; i < r->chunks; i++) {
        Chunk *it = r->chunk[i];
        op_attention_chunk_backward(r->dq.t, it->dk.t, it->dv.t, c->d_o.t, c->q.t, it->k.t, it->v.t, r->lse.t,
                                    r->dots.t, &it->mask, heads_of(c->at));
        array_read(&it->dk);
        array_read(&it->dv);
        chunk_rows(it->dk.x, r->dk, it, c->at, true);
        chunk_rows(it->dv.x, r->dv, it, c->at, true);
    }
    array_read(&r->dq);
}

static Result result_of(const Case *c, int chunks, uint64_t key) {
    Result r = result_new(c, chunks, key);
    result_forward(&r, c);
    result_backward(&r, c);
    return r;
}

static void result_free(Result *r) {
    for (int i = 0; i < r->chunks; i++) chunk_free(r->chunk[i]);
    attention_positions_free(r->queries);
    free(r->queries);
    FREE(&r->running, &r->o, &r->lse, &r->dots, &r->dq);
    free(r->dk), free(r->dv);
}

static void assert_error(const char *what, const Case *c, const double *got, const Sum *want, double bound) {
    double error = error_of(got, want);
    if (!(error <= bound))
        fail_msg("%s %s, b %lld, s %lld x %lld, heads %lld / %lld of %lld: error %.3g in L2, bound %.3g",
                 what, dtype_name(c->dtype), (long long)c->at.b, (long long)c->at.s_q, (long long)c->at.s_k,
                 (long long)c->at.heads, (long long)c->at.kv_heads, (long long)c->at.d, error, bound);
}

static void assert_result(const Case *c, const Result *r, const Reference *want, double relative) {
    const struct {
        const char *name;
        const double *got;
        const Sum *want;
    } all[] = {{"o", r->o.x, &want->o},    {"lse", r->lse.x, &want->lse}, {"dq", r->dq.x, &want->dq},
               {"dk", r->dk, &want->dk}, {"dv", r->dv, &want->dv}};
    for (int i = 0; i < 5; i++)
        assert_error(all[i].name, c, all[i].got, all[i].want, relative * size_of(all[i].want));
}

// ---- proofs ----

static const int64_t lengths[] = {1, 2, 31, 64, 97, 129}, head_sizes[] = {2, 6, 16, 64, 80};
enum { LENGTHS = 6, HEAD_SIZES = 5 };

// Sizes number i of all pairs of lengths; heads and head sizes take turns.
static Shape shape_of(int i) {
    static const int64_t kv_heads[] = {6, 3, 2, 1};
    return (Shape){1 + i % 2, lengths[i / LENGTHS], lengths[i % LENGTHS],
                   6, kv_heads[i % 4], head_sizes[i % HEAD_SIZES]};
}

static void chunks_in_any_order_make_the_whole(void **state) {
    (void)state;
    for (int i = 0; i < LENGTHS * LENGTHS; i++) {
        Shape at = shape_of(i);
        uint64_t key = 1000 * (uint64_t)i;
        // Some queries come before all keys; and every third case has documents.
        int32_t document = i % 3 ? 0 : 17;
        Case c = case_new(at, F64, shuffled_tokens(at.b, at.s_q, 0, document, key),
                          shuffled_tokens(at.b, at.s_k, i % 4, document, key + 7), key);
        Reference want = case_reference(&c);
        Result r = result_of(&c, 1 + i % MOST_CHUNKS, key);
        assert_result(&c, &r, &want, 1e-12);
        result_free(&r);
        reference_free(&want);
        case_free(&c);
    }
}

// L2 of the error of o in storage, with the keys in so many chunks.
static double merged_error(const Case *c, const Reference *want, int chunks) {
    Result r = result_new(c, chunks, 5);
    result_forward(&r, c);
    double error = error_of(r.o.x, &want->o);
    result_free(&r);
    return error;
}

// Every query sees all keys. One rounding to 16 bits, whatever the number of chunks: were o rounded at each merge,
// 8 equal chunks would make 1.8 times the error of one.
static void merging_16_bits_does_not_add_errors(void **state) {
    (void)state;
    Shape at = {1, 129, 129, 2, 1, 16};
    for (int type = 2; type < 4; type++) {
        Case c = case_new(at, all_dtypes[type], tokens_in_order(1, 129), tokens_in_order(1, 129), 3);
        memset(c.tk.position, 0, 129 * sizeof *c.tk.position);
        Reference want = case_reference(&c);
        double one = merged_error(&c, &want, 1);
        for (int chunks = 2; chunks <= MOST_CHUNKS; chunks++) {
            double error = merged_error(&c, &want, chunks);
            if (!(error <= 1.1 * one))
                fail_msg("%s: %d chunks make an error of %.3g, one makes %.3g", dtype_name(c.dtype), chunks, error,
                         one);
        }
        reference_free(&want);
        case_free(&c);
    }
}

static void as_exact_as_stored_scores(void **state) {
    (void)state;
    for (int i = 0; i < LENGTHS; i++)
        for (int type = 1; type < 4; type++) {
            Shape at = shape_of(LENGTHS * i + i);
            at.d = head_sizes[(i + type) % HEAD_SIZES];
            const int64_t n = at.b * at.s_q, h = at.heads * at.d, kv = at.kv_heads * at.d;
            const DType dtype = all_dtypes[type];
            Case c = case_new(at, dtype, tokens_in_order(at.b, at.s_q), tokens_in_order(at.b, at.s_k), 50);
            Reference want = case_reference(&c);
            Array o = poisoned(dtype, n, h), probs = poisoned(dtype, at.b * at.heads * at.s_q, at.s_q);
            Array dq = poisoned(dtype, n, h), dk = poisoned(dtype, n, kv), dv = poisoned(dtype, n, kv);
            AttentionShape stored = {at.b, at.s_q, at.heads, at.kv_heads, at.d};
            op_attention_forward(o.t, probs.t, c.q.t, c.k.t, c.v.t, stored);
            op_attention_backward(dq.t, dk.t, dv.t, c.d_o.t, c.q.t, c.k.t, c.v.t, probs.t, stored);
            Result r = result_of(&c, 3, (uint64_t)(60 + i));
            const double *const got[] = {r.o.x, r.dq.x, r.dk, r.dv};
            const Sum *const wanted[] = {&want.o, &want.dq, &want.dk, &want.dv};
            Array *const stored_ones[] = {&o, &dq, &dk, &dv};
            static const char *const names[] = {"o", "dq", "dk", "dv"};
            for (int j = 0; j < 4; j++) {
                array_read(stored_ones[j]);
                // Where stored scores make no error, as of a single token, rounding may still make one.
                double least = rounding(full(dtype)) * size_of(wanted[j]);
                assert_error(names[j], &c, got[j], wanted[j],
                             4 * (error_of(stored_ones[j]->x, wanted[j]) + least));
            }
            result_free(&r);
            FREE(&o, &probs, &dq, &dk, &dv);
            reference_free(&want);
            case_free(&c);
        }
}

static void assert_all(const char *what, const double *x, int64_t count, double value) {
    for (int64_t i = 0; i < count; i++)
        if (!(x[i] == value)) fail_msg("%s: element %lld is %g, not %g", what, (long long)i, x[i], value);
}

// Two chunks: the first is hidden from all queries, and the second from the first query of each sample.
static void rows_without_keys_stay_empty(void **state) {
    (void)state;
    for (int type = 0; type < 4; type++) {
        Shape at = {2, 70, 100, 2, 1, 6};
        Tokens tq = tokens_in_order(2, 70), tk = tokens_in_order(2, 100);
        for (int64_t i = 0; i < 200; i++) tk.position[i] = i % 100 < 50 ? 1000 : (int32_t)(i % 100 - 49);
        Case c = case_new(at, all_dtypes[type], tq, tk, 11);
        Result r = result_new(&c, 1, 1);
        Chunk *hidden = chunk_new(&c, r.queries, 0, 50), *seen = chunk_new(&c, r.queries, 50, 100);
        chunk_free(r.chunk[0]);
        r.chunk[0] = hidden;
        result_forward(&r, &c);
        assert_all("o of empty rows", r.running.x, r.running.count, 0);
        assert_all("lse of empty rows", r.lse.x, r.lse.count, -INFINITY);
        r.chunk[r.chunks++] = seen;
        result_forward(&r, &c);
        result_backward(&r, &c);
        Reference want = case_reference(&c);
        double bound = 32 * (rounding(full(c.dtype)) + rounding(F64));
        assert_error("lse", &c, r.lse.x, &want.lse, bound * size_of(&want.lse));
        assert_error("o", &c, r.running.x, &want.o, bound * size_of(&want.o));
        assert_error("dk", &c, r.dk, &want.dk, (bound + rounding(c.dtype)) * size_of(&want.dk));
        for (int64_t sample = 0; sample < 2; sample++)
            assert_all("dq of an empty row", r.dq.x + sample * 70 * 12, 12, 0);
        result_free(&r);
        reference_free(&want);
        case_free(&c);
    }
}

// Log-sum-exps of chunks that are 1e4 apart, whichever comes first: one takes all, and nothing overflows.
static void chunks_far_apart_do_not_overflow(void **state) {
    (void)state;
    for (int type = 0; type < 4; type++)
        for (int last = 0; last < 2; last++) {
            Shape at = {1, 40, 80, 1, 1, 4};
            Tokens tq = tokens_in_order(1, 40), tk = tokens_in_order(1, 80);
            for (int64_t i = 0; i < 80; i++) tk.position[i] = 0;
            Case c = case_new(at, all_dtypes[type], tq, tk, 21);
            for (int64_t i = 0; i < 160; i++) c.q.x[i] = 100;
            for (int64_t i = 0; i < 320; i++) c.k.x[i] = i / 160 == last ? 50 : -50;
            array_write(&c.q);
            array_write(&c.k);
            Result r = result_new(&c, 1, 1);
            chunk_free(r.chunk[0]);
            r.chunk[0] = chunk_new(&c, r.queries, 0, 40);
            r.chunk[r.chunks++] = chunk_new(&c, r.queries, 40, 80);
            result_forward(&r, &c);
            result_backward(&r, &c);
            Reference want = case_reference(&c);
            double bound = 64 * (rounding(full(c.dtype)) + rounding(F64));
            // In f32 a log-sum-exp of 1e4 is known to 5e-4: so much may exponentials that use it err.
            double of_lse = 1e4 * rounding(full(c.dtype));
            assert_error("lse", &c, r.lse.x, &want.lse, bound * size_of(&want.lse));
            assert_error("o", &c, r.running.x, &want.o, (bound + of_lse) * size_of(&want.o));
            assert_error("dv", &c, r.dv, &want.dv, (bound + 2 * of_lse) * size_of(&want.dv));
            result_free(&r);
            reference_free(&want);
            case_free(&c);
        }
}

// A score of -infinity that is seen: it weighs nothing, alone or beside others.
static void scores_of_minus_infinity_weigh_nothing(void **state) {
    (void)state;
    for (int type = 0; type < 4; type++) {
        Shape at = {1, 3, 3, 1, 1, 2};
        Case c = case_new(at, all_dtypes[type], tokens_in_order(1, 3), tokens_in_order(1, 3), 31);
        for (int64_t i = 0; i < 6; i++) c.q.x[i] = 1;
        c.k.x[0] = c.k.x[1] = -INFINITY;
        array_write(&c.q);
        array_write(&c.k);
        Result r = result_new(&c, 1, 1);
        result_forward(&r, &c);
        assert_all("o of a row of -infinity", r.running.x, 2, 0);
        assert_all("lse of a row of -infinity", r.lse.x, 1, -INFINITY);
        assert_all("o beside -infinity", r.o.x + 2, 1, c.v.x[2]);
        if (!isfinite(r.o.x[4]) || !isfinite(r.lse.x[2])) fail_msg("-infinity spreads");
        result_free(&r);
        case_free(&c);
    }
}

// The mask's counts against each pair asked for, and what it calls empty or full against its pairs.
static void masks_count_what_is_seen(void **state) {
    (void)state;
    for (int i = 0; i < LENGTHS * LENGTHS; i++) {
        int64_t b = 1 + i % 2, s_q = lengths[i / LENGTHS] * 2, s_k = lengths[i % LENGTHS] * 2;
        int32_t document = i % 4 == 0 ? 70 : i % 4 == 1 ? 13 : 0;
        Tokens tq = i % 3 ? tokens_in_order(b, s_q) : shuffled_tokens(b, s_q, 0, document, 1);
        Tokens tk = i % 3 == 1 ? tokens_in_order(b, s_k) : shuffled_tokens(b, s_k, i % 5, document, 2);
        AttentionPositions q = attention_positions_new(b, s_q, tq.position, tq.document);
        AttentionPositions k = attention_positions_new(b, s_k, tk.position, tk.document);
        AttentionMask mask = attention_mask(&q, &k);
        double pairs = 0, entries = 0;
        int64_t computed = 0, whole = 0;
        for (int64_t tile = 0; tile < b * q.tiles * k.tiles; tile++) {
            int64_t sample = tile / (q.tiles * k.tiles), left = tile % (q.tiles * k.tiles) / k.tiles * ATTENTION_TILE;
            int64_t top = tile % k.tiles * ATTENTION_TILE, seen = 0, asked = 0;
            for (int64_t x = left; x < s_q && x < left + ATTENTION_TILE; x++)
                for (int64_t y = top; y < s_k && y < top + ATTENTION_TILE; y++, asked++)
                    seen += sees(&tq, sample * s_q + x, &tk, sample * s_k + y);
            TileState state_now = attention_tile(q.bound[sample * q.tiles + left / ATTENTION_TILE],
                                                 k.bound[sample * k.tiles + top / ATTENTION_TILE]);
            if (state_now == TILE_EMPTY && seen) fail_msg("an empty tile of %lld pairs", (long long)seen);
            if ((state_now == TILE_FULL) != (seen == asked))
                fail_msg("%lld of %lld pairs are seen in a tile of state %d", (long long)seen,
                         (long long)asked, (int)state_now);
            pairs += (double)seen;
            if (state_now != TILE_EMPTY) computed++, entries += (double)asked;
            whole += state_now == TILE_FULL;
        }
        assert_true(mask.pairs == pairs);
        assert_true(mask.entries == entries);
        assert_int_equal(mask.tiles, computed);
        assert_int_equal(mask.full, whole);
        attention_positions_free(&q);
        attention_positions_free(&k);
        tokens_free(&tq);
        tokens_free(&tk);
    }
}

// A causal sequence: tiles right of the diagonal are empty, those left of it full, as a formula says.
static void causal_tiles_are_half_of_all(void **state) {
    (void)state;
    for (int64_t tiles = 1; tiles < 6; tiles++)
        for (int64_t s = (tiles - 1) * ATTENTION_TILE + 1; s <= tiles * ATTENTION_TILE; s += 21) {
            AttentionPositions p = attention_positions_whole(2, s);
            AttentionMask mask = attention_mask(&p, &p);
            assert_true(mask.pairs == (double)(s * (s + 1)));
            assert_int_equal(mask.tiles, tiles * (tiles + 1));
            // A last tile of a single token is full, too.
            assert_int_equal(mask.full, tiles * (tiles - 1) + 2 * (s % ATTENTION_TILE == 1));
            attention_positions_free(&p);
        }
}

// NaN in keys and values that no query of a tile sees, in queries that see no key, and in their outputs.
static void hidden_tiles_are_never_read(void **state) {
    (void)state;
    for (int type = 0; type < 4; type++) {
        const int64_t t = ATTENTION_TILE;
        Shape at = {1, 2 * t, 4 * t, 2, 1, 6};
        Tokens tq = tokens_in_order(1, 2 * t), tk = tokens_in_order(1, 4 * t);
        // Of the second tile of queries all are before every key, and two tiles of keys are after all queries
        // or of another document.
        for (int64_t i = t; i < 2 * t; i++) tq.position[i] = -1;
        for (int64_t i = t; i < 2 * t; i++) tk.position[i] += 1000;
        for (int64_t i = 2 * t; i < 4 * t; i++)
            tk.position[i] = (int32_t)(i % t), tk.document[i] = i < 3 * t;
        Case c = case_new(at, all_dtypes[type], tq, tk, 41);
        for (int64_t i = t * 6; i < 3 * t * 6; i++) c.k.x[i] = c.v.x[i] = NAN;
        for (int64_t i = t * 12; i < 2 * t * 12; i++) c.q.x[i] = c.d_o.x[i] = NAN;
        array_write(&c.q), array_write(&c.k), array_write(&c.v), array_write(&c.d_o);
        Result r = result_of(&c, 1, 1);
        for (int64_t i = 0; i < t * 12; i++)
            if (isnan(r.o.x[i]) || isnan(r.dq.x[i])) fail_msg("a hidden key was read");
        for (int64_t i = 0; i < 4 * t * 6; i++)
            if (isnan(r.dk[i]) || isnan(r.dv[i])) fail_msg("a query that sees nothing was read");
        assert_all("o of a hidden tile", r.o.x + t * 12, t * 12, 0);
        result_free(&r);
        case_free(&c);
    }
}

static void same_bits_every_time(void **state) {
    (void)state;
    for (int type = 0; type < 4; type++) {
        Shape at = {2, 97, 129, 6, 2, 16};
        Case c = case_new(at, all_dtypes[type], shuffled_tokens(2, 97, 0, 0, 1),
                          shuffled_tokens(2, 129, 0, 0, 2), 51);
        Result a = result_of(&c, 3, 1), b = result_of(&c, 3, 1);
        assert_exact("running o again", &b.running, a.running.x);
        assert_exact("lse again", &b.lse, a.lse.x);
        assert_exact("dq again", &b.dq, a.dq.x);
        for (int64_t i = 0; i < at.b * at.s_k * at.kv_heads * at.d; i++)
            if (!(a.dk[i] == b.dk[i] && a.dv[i] == b.dv[i])) fail_msg("dk or dv has other bits");
        result_free(&a);
        result_free(&b);
        case_free(&c);
    }
}

static void gradients_are_added(void **state) {
    (void)state;
    Shape at = {1, 66, 66, 2, 1, 4};
    Case c = case_new(at, F64, tokens_in_order(1, 66), tokens_in_order(1, 66), 61);
    Reference want = case_reference(&c);
    Result r = result_of(&c, 2, 1);
    result_backward(&r, &c);  // once more into the same accumulators
    Sum *const sums[] = {&want.dq, &want.dk, &want.dv};
    const double *const got[] = {r.dq.x, r.dk, r.dv};
    for (int i = 0; i < 3; i++) {
        for (int64_t j = 0; j < sums[i]->count; j++) sums[i]->x[j] *= 2;
        assert_error("twice the gradient", &c, got[i], sums[i], 1e-12 * size_of(sums[i]));
    }
    result_free(&r);
    reference_free(&want);
    case_free(&c);
}

typedef struct LossCase {
    Case *c;
    Result r;
} LossCase;

static double flash_loss(void *context) {
    LossCase *it = context;
    op_fill(it->r.running.t, 0);
    op_fill(it->r.lse.t, -INFINITY);
    result_forward(&it->r, it->c);
    double loss = 0;
    for (int64_t i = 0; i < it->r.o.count; i++) loss += it->r.o.x[i] * it->c->d_o.x[i];
    return loss;
}

static void backward_matches_finite_differences(void **state) {
    (void)state;
    Shape at = {1, 5, 7, 2, 1, 3};
    Case c = case_new(at, F64, shuffled_tokens(1, 5, 2, 0, 1), shuffled_tokens(1, 7, 0, 0, 2), 71);
    LossCase it = {&c, result_of(&c, 2, 1)};
    assert_gradient("dq", &c.q, it.r.dq.x, flash_loss, &it);
    for (int i = 0; i < 2; i++) {
        assert_gradient("dk", &it.r.chunk[i]->k, it.r.chunk[i]->dk.x, flash_loss, &it);
        assert_gradient("dv", &it.r.chunk[i]->v, it.r.chunk[i]->dv.x, flash_loss, &it);
    }
    result_free(&it.r);
    case_free(&c);
}

static void assert_flops(const char *name, double flops) {
    const OpCount *counts;
    int n = clock_operations(&counts);
    for (int i = 0; i < n; i++)
        if (!strcmp(counts[i].name, name)) {
            if (counts[i].flops != flops) fail_msg("%s: %g FLOPs, not %g", name, counts[i].flops, flops);
            return;
        }
    fail_msg("%s was not counted", name);
}

// FLOPs are those of the pairs that the mask leaves, whatever the tiles, and however many the chunks.
static void flops_are_those_of_visible_pairs(void **state) {
    (void)state;
    Shape at = {2, 97, 97, 6, 2, 4};
    Case c = case_new(at, F32, tokens_in_order(2, 97), tokens_in_order(2, 97), 81);
    clock_reset();
    Result r = result_of(&c, 4, 1);
    double pairs = 2 * 6 * 97 * 98 / 2.0;
    assert_flops("attention_chunk_forward", 4 * 4 * pairs);
    assert_flops("attention_chunk_backward", 10 * 4 * pairs);
    result_free(&r);
    case_free(&c);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_in_any_order_make_the_whole),
        cmocka_unit_test(merging_16_bits_does_not_add_errors),
        cmocka_unit_test(as_exact_as_stored_scores),
        cmocka_unit_test(rows_without_keys_stay_empty),
        cmocka_unit_test(chunks_far_apart_do_not_overflow),
        cmocka_unit_test(scores_of_minus_infinity_weigh_nothing),
        cmocka_unit_test(masks_count_what_is_seen),
        cmocka_unit_test(causal_tiles_are_half_of_all),
        cmocka_unit_test(hidden_tiles_are_never_read),
        cmocka_unit_test(same_bits_every_time),
        cmocka_unit_test(gradients_are_added),
        cmocka_unit_test(backward_matches_finite_differences),
        cmocka_unit_test(flops_are_those_of_visible_pairs),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
