// test_attention.c: causal grouped-query attention against a plain reference in f64, in all four dtypes, at
// sizes that are and are not multiples of its blocks; and its backward against finite differences.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "arrays.h"
#include "tensor/ops.h"

static int64_t q_at(AttentionShape at, int64_t sample, int64_t row, int64_t head) {
    return ((sample * at.s + row) * at.heads + head) * at.head_size;
}
// of the key head that query head `head` reads
static int64_t k_at(AttentionShape at, int64_t sample, int64_t row, int64_t head) {
    return ((sample * at.s + row) * at.kv_heads + head / (at.heads / at.kv_heads)) * at.head_size;
}

static double dot(const double *a, const double *b, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

static void reference_attention(double *o, double *probs, const double *q, const double *k, const double *v,
                                AttentionShape at) {
    for (int64_t unit = 0; unit < at.b * at.heads; unit++)
        for (int64_t i = 0; i < at.s; i++) {
            int64_t sample = unit / at.heads, head = unit % at.heads;
            double *p = probs + (unit * at.s + i) * at.s, max = -INFINITY, sum = 0;
            for (int64_t j = 0; j <= i; j++) {
                p[j] = dot(q + q_at(at, sample, i, head), k + k_at(at, sample, j, head), at.head_size) /
                       sqrt((double)at.head_size);
                max = fmax(max, p[j]);
            }
            for (int64_t j = 0; j <= i; j++) sum += p[j] = exp(p[j] - max);
            for (int64_t j = 0; j <= i; j++) {
                p[j] /= sum;
                for (int64_t x = 0; x < at.head_size; x++)
                    o[q_at(at, sample, i, head) + x] += p[j] * v[k_at(at, sample, j, head) + x];
            }
        }
}

// From the Jacobian of softmax, pair by pair: dp_j / dscore_m = p_j ((j == m) - p_m).
static void reference_attention_backward(double *dq, double *dk, double *dv, const double *d_o,
                                         const double *q, const double *k, const double *v,
                                         const double *probs, AttentionShape at) {
    for (int64_t unit = 0; unit < at.b * at.heads; unit++)
        for (int64_t i = 0; i < at.s; i++) {
            int64_t sample = unit / at.heads, head = unit % at.heads, qi = q_at(at, sample, i, head);
            const double *p = probs + (unit * at.s + i) * at.s;
            double *dp = zeros(i + 1);
            for (int64_t j = 0; j <= i; j++)
                dp[j] = dot(d_o + qi, v + k_at(at, sample, j, head), at.head_size);
            for (int64_t m = 0; m <= i; m++) {
                double dscore = 0;
                for (int64_t j = 0; j <= i; j++) dscore += dp[j] * p[j] * ((j == m) - p[m]);
                int64_t km = k_at(at, sample, m, head);
                for (int64_t x = 0; x < at.head_size; x++) {
                    dv[km + x] += p[m] * d_o[qi + x];
                    dq[qi + x] += dscore * k[km + x] / sqrt((double)at.head_size);
                    dk[km + x] += dscore * q[qi + x] / sqrt((double)at.head_size);
                }
            }
            free(dp);
        }
}

// probs above the diagonal are not part of the contract.
static void clear_above_diagonal(Array *probs) {
    int64_t s = tensor_columns(probs->t);
    for (int64_t i = 0; i < probs->count; i++)
        if (i % s > i / s % s) probs->x[i] = 0;
}

static const AttentionShape attention_shapes[] = {{1, 1, 1, 1, 1},   {3, 7, 2, 2, 3},   {2, 31, 6, 1, 5},
                                                  {2, 33, 6, 2, 17}, {1, 65, 6, 3, 8},  {1, 17, 6, 6, 31},
                                                  {1, 257, 3, 1, 3}, {1, 271, 2, 2, 64}};
enum { ATTENTION_SHAPES = sizeof attention_shapes / sizeof *attention_shapes };

static void attention_matches_reference(void **state) {
    (void)state;
    for (int size = 0; size < ATTENTION_SHAPES; size++)
        for (int type = 0; type < 4; type++) {
            DType dtype = all_dtypes[type];
            AttentionShape at = attention_shapes[size];
            int64_t n = at.b * at.s, a = at.heads * at.head_size, kv = at.kv_heads * at.head_size;
            Array q = random_array(dtype, n, a, 1), k = random_array(dtype, n, kv, 2);
            Array v = random_array(dtype, n, kv, 3), d_o = random_array(dtype, n, a, 4);
            Array o = poisoned(dtype, n, a), probs = poisoned(dtype, at.b * at.heads * at.s, at.s);
            Array again = poisoned(dtype, at.b * at.heads * at.s, at.s);
            double *want_o = zeros(o.count), *want_probs = zeros(probs.count);
            reference_attention(want_o, want_probs, q.x, k.x, v.x, at);
            op_attention_forward(o.t, probs.t, q.t, k.t, v.t, at);
            array_read(&o);
            array_read(&probs);
            clear_above_diagonal(&probs);
            // A score has d rounding errors, and e^score the same relative error.
            double roundings = 8 * ((double)at.head_size + 2) + (double)at.s;
            // 16-bit probs and dscores may be rounded once more, as operands of a multiply.
            double operand = rounding(dtype) > rounding(F32) ? rounding(dtype) / rounding(F32) : 0;
            assert_close("attention_forward's probs", &probs, want_probs, roundings);
            assert_close("attention_forward's o", &o, want_o, roundings + operand);
            op_attention_probs(again.t, q.t, k.t, at);
            array_read(&again);
            clear_above_diagonal(&again);
            assert_exact("attention_probs", &again, probs.x);

            double *want[] = {zeros(q.count), zeros(k.count), zeros(v.count)};
            reference_attention_backward(want[0], want[1], want[2], d_o.x, q.x, k.x, v.x, probs.x, at);
            Array dq = poisoned(dtype, n, a), dk = poisoned(dtype, n, kv), dv = poisoned(dtype, n, kv);
            op_attention_backward(dq.t, dk.t, dv.t, d_o.t, q.t, k.t, v.t, probs.t, at);
            op_attention_backward(q.t, k.t, v.t, d_o.t, q.t, k.t, v.t, probs.t, at);  // over its inputs
            Array *const got[] = {&dq, &dk, &dv}, *const over[] = {&q, &k, &v};
            static const char *const names[] = {"attention_backward's dq", "attention_backward's dk",
                                                "attention_backward's dv"};
            for (int i = 0; i < 3; i++) {
                array_read(got[i]);
                array_read(over[i]);
                if (at.s > 1 || i == 2)  // a single token has only the gradient of v
                    assert_close(names[i], got[i], want[i],
                                 4 * ((double)(at.s + at.head_size) + 2) + operand);
                assert_exact("attention_backward in place", over[i], got[i]->x);
                free(want[i]);
            }
            free(want_o), free(want_probs);
            FREE(&q, &k, &v, &d_o, &o, &probs, &again, &dq, &dk, &dv);
        }
}

typedef struct AttentionCase {
    AttentionShape at;
    Array o, probs, q, k, v, d_o;
} AttentionCase;

static double attention_loss(void *context) {
    AttentionCase *it = context;
    op_attention_forward(it->o.t, it->probs.t, it->q.t, it->k.t, it->v.t, it->at);
    return weighted(it->o.t, &it->d_o);
}

static void attention_backward_matches_finite_differences(void **state) {
    (void)state;
    for (int64_t kv = 1; kv <= 6; kv++) {
        if (6 % kv) continue;
        AttentionShape at = {2, 5, 6, kv, 3};
        AttentionCase it = {at,
                            poisoned(F64, 10, 18),
                            poisoned(F64, 60, 5),
                            random_array(F64, 10, 18, 1),
                            random_array(F64, 10, 3 * kv, 2),
                            random_array(F64, 10, 3 * kv, 3),
                            random_array(F64, 10, 18, 4)};
        Array dq = poisoned(F64, 10, 18), dk = poisoned(F64, 10, 3 * kv), dv = poisoned(F64, 10, 3 * kv);
        attention_loss(&it);
        op_attention_backward(dq.t, dk.t, dv.t, it.d_o.t, it.q.t, it.k.t, it.v.t, it.probs.t, at);
        array_read(&dq);
        array_read(&dk);
        array_read(&dv);
        assert_gradient("attention's dq", &it.q, dq.x, attention_loss, &it);
        assert_gradient("attention's dk", &it.k, dk.x, attention_loss, &it);
        assert_gradient("attention's dv", &it.v, dv.x, attention_loss, &it);
        FREE(&it.o, &it.probs, &it.q, &it.k, &it.v, &it.d_o, &dq, &dk, &dv);
    }
}

static void attention_survives_huge_scores(void **state) {
    (void)state;
    // Scores of 1e4 and more: one key gets all the weight, and nothing overflows.
    for (int type = 0; type < 4; type++) {
        DType dtype = all_dtypes[type];
        AttentionShape at = {1, 37, 1, 1, 4};
        Array q = random_array(dtype, 37, 4, 1), k = random_array(dtype, 37, 4, 2),
              v = random_array(dtype, 37, 4, 3);
        Array o = poisoned(dtype, 37, 4), probs = poisoned(dtype, 37, 37);
        op_scale(q.t, 128);
        op_scale(k.t, 128);
        op_attention_forward(o.t, probs.t, q.t, k.t, v.t, at);
        array_read(&probs);
        clear_above_diagonal(&probs);
        for (int64_t i = 0; i < 37; i++) {
            double sum = 0;
            for (int64_t j = 0; j < 37; j++) sum += probs.x[i * 37 + j];
            if (!(fabs(sum - 1) <= 37 * rounding(dtype)))
                fail_msg("row %lld of probs sums to %g", (long long)i, sum);
        }
        FREE(&q, &k, &v, &o, &probs);
    }
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_matches_reference),
        cmocka_unit_test(attention_backward_matches_finite_differences),
        cmocka_unit_test(attention_survives_huge_scores),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
