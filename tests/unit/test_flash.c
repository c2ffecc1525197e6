// test_flash.c: attention over a part of the keys against a plain reference: in any chunks and order, with
// any mask of positions and documents, in all dtypes.
#include <omp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "chunks.h"
#include "tensor/clock.h"
#include "tensor/device.h"
#include "tensor/kernel_table.h"

// ---- proofs ----

static const int64_t lengths[] = {1, 2, 31, 64, 97, 129}, head_sizes[] = {2, 6, 16, 64, 80};
enum { LENGTHS = 6, HEAD_SIZES = 5 };

// Sizes number i of all pairs of lengths; heads and head sizes take turns.
static Shape shape_of(int i) {
    static const int64_t kv_heads[] = {6, 3, 2, 1};
    return (Shape){1 + i % 2, lengths[i / LENGTHS], lengths[i % LENGTHS],
                   6,         kv_heads[i % 4],      head_sizes[i % HEAD_SIZES]};
}

// Emulated kernels are slow: they run some of the sizes, including each head size and each number of K/V
// heads.
static bool emulated(void) { return strstr(backend_text(), "on the CPU") != NULL; }

static void chunks_in_any_order_make_the_whole(void **state) {
    (void)state;
    for (int i = 0; i < LENGTHS * LENGTHS; i++) {
        if (emulated() && i % 7 % 6) continue;  // equal lengths, and more queries than keys
        Shape at = shape_of(i);
        uint64_t key = 1000 * (uint64_t)i;
        // Some queries are before all keys; and every third case has documents.
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

// The L2 error of o in storage, with the keys in so many chunks.
static double merged_error(const Case *c, const Reference *want, int chunks) {
    Result r = result_new(c, chunks, 5);
    result_forward(&r, c);
    double error = error_of(r.o.x, &want->o);
    result_free(&r);
    return error;
}

// Every query sees all keys. There is one rounding to 16 bits, for any number of chunks: if o were rounded
// at each merge, 8 equal chunks would have 1.8 times the error of one.
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
                fail_msg("%s: %d chunks make an error of %.3g, one makes %.3g", dtype_name(c.dtype), chunks,
                         error, one);
        }
        reference_free(&want);
        case_free(&c);
    }
}

static void as_exact_as_stored_scores(void **state) {
    (void)state;
    for (int i = 0; i < LENGTHS; i++)
        for (int type = 1; type < 4; type++) {
            if (emulated() && i % 3 + 1 != type) continue;
            Shape at = shape_of(LENGTHS * i + i);
            at.d = head_sizes[(i + type) % HEAD_SIZES];
            if (emulated() && i == LENGTHS - 1) at.b = 1;
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
                // If stored scores give no error, as for a single token, rounding may still give one.
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

// Log-sum-exps of chunks that differ by 1e4, in either order: one chunk gets all the weight, and nothing
// overflows.
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
            // In f32 a log-sum-exp of 1e4 is accurate to 5e-4, and so are exponentials that use it.
            double of_lse = 1e4 * rounding(full(c.dtype));
            assert_error("lse", &c, r.lse.x, &want.lse, bound * size_of(&want.lse));
            assert_error("o", &c, r.running.x, &want.o, (bound + of_lse) * size_of(&want.o));
            assert_error("dv", &c, r.dv, &want.dv, (bound + 2 * of_lse) * size_of(&want.dv));
            result_free(&r);
            reference_free(&want);
            case_free(&c);
        }
}

// A visible score of -infinity: it has no weight, alone or among others.
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

// NaN in keys and values that no query of a tile sees, in queries that see no key, and in their outputs.
static void hidden_tiles_are_never_read(void **state) {
    (void)state;
    for (int type = 0; type < 4; type++) {
        const int64_t t = ATTENTION_TILE;
        Shape at = {1, 2 * t, 4 * t, 2, 1, 6};
        Tokens tq = tokens_in_order(1, 2 * t), tk = tokens_in_order(1, 4 * t);
        // All queries of the second tile are before every key, and two tiles of keys are after all queries,
        // or in another document.
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

// A GPU does not use host threads to compute.
static bool on_threads(void) { return strstr(backend_text(), "thread") != NULL; }

static void same_bits_on_any_number_of_threads(void **state) {
    (void)state;
    for (int type = emulated() ? 2 : 0; type < (emulated() ? 3 : 4); type++) {
        Shape at = {2, 97, 129, 6, 2, 16};
        if (emulated()) at.b = 1, at.s_q = 33, at.s_k = 65;
        Case c = case_new(at, all_dtypes[type], shuffled_tokens(at.b, at.s_q, 0, 0, 1),
                          shuffled_tokens(at.b, at.s_k, 0, 0, 2), 51);
        omp_set_num_threads(1);
        Result a = result_of(&c, 3, 1);
        for (int threads = 1; threads <= (on_threads() ? 4 : 1); threads++) {
            omp_set_num_threads(threads);
            Result b = result_of(&c, 3, 1);
            assert_exact("running o again", &b.running, a.running.x);
            assert_exact("lse again", &b.lse, a.lse.x);
            assert_exact("dq again", &b.dq, a.dq.x);
            for (int64_t i = 0; i < at.b * at.s_k * at.kv_heads * at.d; i++)
                if (!(a.dk[i] == b.dk[i] && a.dv[i] == b.dv[i])) fail_msg("dk or dv has other bits");
            result_free(&b);
        }
        result_free(&a);
        case_free(&c);
    }
}

// A NaN in a key reaches every query that sees it, and no other.
static void nan_is_passed_on(void **state) {
    (void)state;
    for (int type = 0; type < 4; type++) {
        Shape at = {1, 4, 4, 1, 1, 2};
        Case c = case_new(at, all_dtypes[type], tokens_in_order(1, 4), tokens_in_order(1, 4), 91);
        c.k.x[2 * 2] = NAN;
        array_write(&c.k);
        Result r = result_new(&c, 1, 1);
        result_forward(&r, &c);
        for (int64_t i = 0; i < 4; i++) assert_true(isnan(r.lse.x[i]) == (i >= 2));
        for (int64_t i = 4; i < 8; i++) assert_true(isnan(r.o.x[i]));
        result_free(&r);
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

// FLOPs are those of the visible pairs, for any tiles and any number of chunks.
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
        cmocka_unit_test(hidden_tiles_are_never_read),
        cmocka_unit_test(same_bits_on_any_number_of_threads),
        cmocka_unit_test(nan_is_passed_on),
        cmocka_unit_test(gradients_are_added),
        cmocka_unit_test(backward_matches_finite_differences),
        cmocka_unit_test(flops_are_those_of_visible_pairs),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    if (argc > 2) ops_use_kernels(kernel_table_linked());  // tests/programs/book_kernels.t
    return cmocka_run_group_tests(tests, NULL, NULL);
}
