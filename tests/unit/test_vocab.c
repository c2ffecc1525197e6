// test_vocab.c: the operations on a part of the vocabulary. Several parts in one process, with a stand-in
// for the all-reduces between them, must give the results of the operations on the whole vocabulary.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "arrays.h"
#include "tensor/ops.h"

enum { MOST_PARTS = 5 };

// Part i of the vocabulary as params.h shards it: ceil(v / parts) rows each, the last ones padded.
static VocabularyPart part_of(int64_t v, int parts, int i, int64_t *stored) {
    *stored = (v + parts - 1) / parts;
    int64_t first = *stored * i < v ? *stored * i : v;
    return (VocabularyPart){v, first, v - first < *stored ? v - first : *stored};
}

// The part's rows of a table (v, h), then padding of `filler`.
static Array rows_of_part(const Array *table, VocabularyPart part, int64_t stored, double filler) {
    int64_t h = tensor_columns(table->t);
    Array rows = array_new(table->t.dtype, stored, h, filler);
    memcpy(rows.x, table->x + part.first * h, (size_t)(part.count * h) * sizeof(double));
    array_write(&rows);
    return rows;
}

// The same for the columns of logits (n, v).
static Array columns_of_part(const Array *logits, VocabularyPart part, int64_t stored, double filler) {
    int64_t n = tensor_rows(logits->t), v = tensor_columns(logits->t);
    Array columns = array_new(logits->t.dtype, n, stored, filler);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < part.count; j++)
            columns.x[i * stored + j] = logits->x[i * v + part.first + j];
    array_write(&columns);
    return columns;
}

// ---- embedding ----

static void check_embedding(DType dtype, DType to, int64_t n, int64_t v, int64_t h, int parts) {
    Array tokens = random_tokens(n, v, 1), table = random_array(dtype, v, h, 2);
    Array dy = random_array(dtype, n, h, 3), dtable = random_array(to, v, h, 4);
    Array whole = poisoned(dtype, n, h), dwhole = array_new(to, v, h, 0);
    memcpy(dwhole.x, dtable.x, (size_t)(v * h) * sizeof(double));
    array_write(&dwhole);
    op_embedding_forward(whole.t, tokens.t, table.t);
    op_embedding_backward(dwhole.t, dy.t, tokens.t);
    array_read(&whole);
    array_read(&dwhole);
    double *sum = zeros(n * h);
    for (int i = 0; i < parts; i++) {
        int64_t stored;
        VocabularyPart part = part_of(v, parts, i, &stored);
        Array weight = rows_of_part(&table, part, stored, NAN), y = poisoned(dtype, n, h);
        Array dweight = rows_of_part(&dtable, part, stored, 3);
        op_embedding_part_forward(y.t, tokens.t, weight.t, part);
        op_embedding_part_backward(dweight.t, dy.t, tokens.t, part);
        array_read(&y);
        array_read(&dweight);
        for (int64_t j = 0; j < n * h; j++) {
            int64_t token = (int64_t)tokens.x[j / h];
            bool own = token >= part.first && token < part.first + part.count;
            if (!own && !(y.x[j] == 0)) fail_msg("part %d has a row of another's token %d", i, (int)token);
            sum[j] += y.x[j];
        }
        // Each row's terms are in the order of the whole: the bits are the same.
        for (int64_t j = 0; j < stored * h; j++) {
            double want = j < part.count * h ? dwhole.x[part.first * h + j] : 3;
            if (!(dweight.x[j] == want))
                fail_msg("%s: dweight of part %d of %d is %.17g, expected %.17g", dtype_name(dtype), i,
                         parts, dweight.x[j], want);
        }
        FREE(&weight, &y, &dweight);
    }
    assert_exact("the parts' rows together", &whole, sum);
    free(sum);
    FREE(&tokens, &table, &dy, &dtable, &whole, &dwhole);
}

static void embedding_parts_make_the_whole(void **state) {
    (void)state;
    const int64_t sizes[][3] = {{1, 1, 1}, {3, 17, 31}, {31, 3, 5}, {67, 256, 17}};
    for (int size = 0; size < 4; size++)
        for (int type = 0; type < GRADIENT_DTYPES; type++)
            for (int parts = 1; parts <= MOST_PARTS; parts++)
                check_embedding(gradient_dtypes[type][0], gradient_dtypes[type][1], sizes[size][0],
                                sizes[size][1], sizes[size][2], parts);
}

// ---- the loss ----

typedef struct LossResult {
    Array losses, lse, dlogits;
} LossResult;

static void free_result(LossResult *r) { FREE(&r->losses, &r->lse, &r->dlogits); }

static LossResult whole_loss(const Array *logits, const Array *targets, double scale) {
    DType dtype = logits->t.dtype;
    int64_t n = tensor_rows(logits->t), v = tensor_columns(logits->t);
    LossResult r = {poisoned(full(dtype), 1, n), poisoned(full(dtype), 1, n), poisoned(dtype, n, v)};
    op_cross_entropy_forward(r.losses.t, r.lse.t, logits->t, targets->t);
    op_cross_entropy_backward(r.dlogits.t, logits->t, r.lse.t, targets->t, scale);
    array_read(&r.losses);
    array_read(&r.lse);
    array_read(&r.dlogits);
    return r;
}

// What an all-reduce of these tensors, one from each part, would leave in each of them.
static void all_reduce(Array *of, int parts, bool maximum) {
    for (int64_t j = 0; j < of[0].count; j++) {
        double result = of[0].x[j];
        for (int i = 1; i < parts; i++) {
            double x = of[i].x[j];
            if (!maximum) result += x;
            else if (!(result >= x) && result == result) result = x;
        }
        for (int i = 0; i < parts; i++) of[i].x[j] = result;
    }
    for (int i = 0; i < parts; i++) array_write(&of[i]);
}

// The same from parts; what is stored beyond a part is `filler`, and its gradient must be 0.
static LossResult loss_of_parts(const Array *logits, const Array *targets, double scale, int parts,
                                double filler) {
    DType dtype = logits->t.dtype;
    int64_t n = tensor_rows(logits->t), v = tensor_columns(logits->t), stored;
    LossResult r = {poisoned(full(dtype), 1, n), poisoned(full(dtype), 1, n), poisoned(dtype, n, v)};
    Array own[MOST_PARTS], maxima[MOST_PARTS], sums[MOST_PARTS];
    for (int i = 0; i < parts; i++) {
        VocabularyPart part = part_of(v, parts, i, &stored);
        own[i] = columns_of_part(logits, part, stored, filler);
        maxima[i] = poisoned(full(dtype), 1, n);
        op_cross_entropy_part_maxima(maxima[i].t, own[i].t, part);
        array_read(&maxima[i]);
    }
    all_reduce(maxima, parts, true);
    for (int i = 0; i < parts; i++) {
        sums[i] = poisoned(full(dtype), 2, n);
        op_cross_entropy_part_sums(sums[i].t, own[i].t, maxima[i].t, targets->t,
                                   part_of(v, parts, i, &stored));
        array_read(&sums[i]);
    }
    all_reduce(sums, parts, false);
    op_cross_entropy_part_losses(r.losses.t, r.lse.t, maxima[0].t, sums[0].t, targets->t);
    array_read(&r.losses);
    array_read(&r.lse);
    for (int i = 0; i < parts; i++) {
        VocabularyPart part = part_of(v, parts, i, &stored);
        op_cross_entropy_part_backward(own[i].t, own[i].t, r.lse.t, targets->t, scale, part);
        array_read(&own[i]);
        for (int64_t j = 0; j < n * stored; j++) {
            int64_t row = j / stored, column = j % stored;
            if (column < part.count) r.dlogits.x[row * v + part.first + column] = own[i].x[j];
            else if (!(own[i].x[j] == 0)) fail_msg("padding has the gradient %g", own[i].x[j]);
        }
        FREE(&own[i], &maxima[i], &sums[i]);
    }
    return r;
}

static void assert_near(const char *what, int parts, const Array *got, const Array *want, double bound) {
    for (int64_t i = 0; i < want->count; i++)
        if (!(fabs(got->x[i] - want->x[i]) <= bound * fmax(1, fabs(want->x[i]))))
            fail_msg("%s of %d parts, %s: element %lld is %.17g, and %.17g from the whole", what, parts,
                     tensor_text(want->t), (long long)i, got->x[i], want->x[i]);
}

// f64: 1e-12. Otherwise sums of v terms in other orders, and a result that is rounded to the dtype.
static void assert_same_loss(const Array *logits, const Array *targets, int parts, double filler) {
    DType dtype = logits->t.dtype;
    const double scale = 1.0 / 41;
    double v = (double)tensor_columns(logits->t), bound = dtype == F64 ? 1e-12 : (v + 8) * rounding(F32);
    LossResult whole = whole_loss(logits, targets, scale);
    LossResult got = loss_of_parts(logits, targets, scale, parts, filler);
    assert_near("lse", parts, &got.lse, &whole.lse, bound);
    // A loss is a difference, and has the error of lse; so has the exponent of a gradient.
    double largest = 1;
    for (int64_t i = 0; i < whole.lse.count; i++) largest = fmax(largest, fabs(whole.lse.x[i]));
    assert_near("losses", parts, &got.losses, &whole.losses, bound * largest);
    assert_near("dlogits", parts, &got.dlogits, &whole.dlogits,
                scale * (bound * largest + rounding(dtype)));
    free_result(&whole);
    free_result(&got);
}

static void loss_parts_make_the_whole(void **state) {
    (void)state;
    const int64_t sizes[][2] = {{1, 1}, {3, 17}, {31, 3}, {17, 257}, {67, 32}};
    for (int size = 0; size < 5; size++)
        for (int type = 0; type < 4; type++)
            for (int parts = 1; parts <= MOST_PARTS; parts++) {
                int64_t n = sizes[size][0], v = sizes[size][1];
                Array logits = random_array(all_dtypes[type], n, v, 1), targets = random_tokens(n, v, 2);
                for (int64_t i = 2; i < n; i += 3) targets.x[i] = IGNORED_LABEL;
                array_write(&targets);
                assert_same_loss(&logits, &targets, parts, NAN);
                assert_same_loss(&logits, &targets, parts, 1e4);
                FREE(&logits, &targets);
            }
}

// Rows whose maximum is in each part in turn, far above everything else; a row far below zero; a row of both.
static void huge_logits_do_not_overflow(void **state) {
    (void)state;
    const int64_t v = 29, n = v + 2;
    for (int type = 0; type < 4; type++)
        for (int parts = 1; parts <= MOST_PARTS; parts++) {
            Array logits = random_array(all_dtypes[type], n, v, 1), targets = random_tokens(n, v, 2);
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = 0; j < v; j++) {
                    double *x = &logits.x[i * v + j];
                    if (i < v) *x += i == j ? 1e4 : 0;
                    else if (i == v) *x -= 1e4;
                    else *x = j % 2 ? 1e4 : -1e4;
                }
            array_write(&logits);
            assert_same_loss(&logits, &targets, parts, 3e4);
            FREE(&logits, &targets);
        }
}

static void targets_may_stand_in_any_one_part(void **state) {
    (void)state;
    const int64_t n = 23, v = 13;
    for (int parts = 1; parts <= MOST_PARTS; parts++)
        for (int i = 0; i < parts; i++) {
            int64_t stored;
            VocabularyPart part = part_of(v, parts, i, &stored);
            Array logits = random_array(F64, n, v, 1), targets = array_new(I32, n, 1, IGNORED_LABEL);
            for (int64_t row = 0; row < n && part.count; row++)
                targets.x[row] = (double)(part.first + row % part.count);
            array_write(&targets);
            assert_same_loss(&logits, &targets, parts, NAN);
            FREE(&logits, &targets);
        }
}

static void all_labels_may_be_ignored(void **state) {
    (void)state;
    Array logits = random_array(F64, 5, 7, 1), targets = array_new(I32, 5, 1, IGNORED_LABEL);
    LossResult r = loss_of_parts(&logits, &targets, 1, 3, NAN);
    for (int64_t i = 0; i < 5; i++) assert_true(r.losses.x[i] == 0 && isfinite(r.lse.x[i]));
    for (int64_t i = 0; i < 35; i++) assert_true(r.dlogits.x[i] == 0);
    free_result(&r);
    FREE(&logits, &targets);
}

// A NaN in one part's logits shows in every part's results; and so does an infinity.
static void nan_comes_through(void **state) {
    (void)state;
    const int64_t v = 67;
    const double bad[] = {NAN, INFINITY};
    for (int type = 0; type < 4; type++)
        for (int64_t at = 0; at < 2 * v; at += 11) {
            Array logits = random_array(all_dtypes[type], 1, v, 1), targets = array_new(I32, 1, 1, 3);
            logits.x[at % v] = bad[at / v];
            array_write(&logits);
            LossResult r = loss_of_parts(&logits, &targets, 1, 4, 0);
            assert_true(isnan(r.losses.x[0]));
            for (int64_t j = 0; j < v; j++) assert_true(isnan(r.dlogits.x[j]));
            free_result(&r);
            FREE(&logits, &targets);
        }
}

// ---- sums of what ranks have sent ----

static void sum_parts_matches_reference(void **state) {
    (void)state;
    const int64_t counts[] = {1, 3, 31, 257};
    for (int size = 0; size < 4; size++)
        for (int type = 0; type < 4; type++)
            for (int parts = 1; parts <= 8; parts++) {
                DType dtype = all_dtypes[type];
                int64_t count = counts[size];
                Array x = random_array(dtype, parts, count, 1), y = poisoned(dtype, 1, count);
                double *want = zeros(count);
                for (int64_t j = 0; j < count; j++) {
                    double f64 = x.x[j];
                    float f32 = (float)x.x[j];
                    for (int i = 1; i < parts; i++) {
                        f64 += x.x[i * count + j];
                        f32 += (float)x.x[i * count + j];
                    }
                    want[j] = dtype == F64 ? f64 : f32;
                }
                op_sum_parts(y.t, x.t, parts);
                array_read(&y);
                // In order and rounded once, so to the bit.
                Array rounded = array_new(dtype, 1, count, 0);
                memcpy(rounded.x, want, (size_t)count * sizeof *want);
                array_write(&rounded);
                assert_exact("sum_parts", &y, rounded.x);
                free(want);
                FREE(&x, &y, &rounded);
            }
}

// ---- columns split over ranks, and back ----

// Of (n, groups w), part i has the columns of group i / copies; the inverse adds up the copies, rounded once.
static void columns_split(DType dtype, int64_t n, int64_t groups, int64_t copies, int64_t w) {
    int64_t parts = groups * copies, count = parts * n * w;
    Array whole = random_array(dtype, n, groups * w, 1), split = poisoned(dtype, parts * n, w);
    op_split_columns(tensor_view(split.t, 0, SHAPE(parts, n, w)), whole.t);
    array_read(&split);
    double *want = zeros(count);
    for (int64_t i = 0; i < count; i++)
        want[i] = whole.x[(i / w % n * groups + i / w / n / copies) * w + i % w];
    assert_exact("split_columns", &split, want);

    Array back = random_array(dtype, parts * n, w, 2), joined = poisoned(dtype, n, groups * w);
    op_join_columns(joined.t, tensor_view(back.t, 0, SHAPE(parts, n, w)));
    array_read(&joined);
    Array rounded = array_new(dtype, n, groups * w, 0);
    for (int64_t row = 0; row < n; row++)
        for (int64_t column = 0; column < groups * w; column++) {
            const double *part = back.x + (column / w * copies * n + row) * w + column % w;
            double f64 = part[0];
            float f32 = (float)part[0];
            for (int64_t copy = 1; copy < copies; copy++)
                f64 += part[copy * n * w], f32 += (float)part[copy * n * w];
            rounded.x[row * groups * w + column] = dtype == F64 ? f64 : f32;
        }
    array_write(&rounded);
    assert_exact("join_columns", &joined, rounded.x);
    free(want);
    FREE(&whole, &split, &back, &joined, &rounded);
}

static void columns_go_to_parts_and_back(void **state) {
    (void)state;
    for (int type = 0; type < 4; type++)
        for (int64_t groups = 1; groups <= 3; groups++)
            for (int64_t copies = 1; copies <= 3; copies++) {
                columns_split(all_dtypes[type], 1, groups, copies, 1);
                columns_split(all_dtypes[type], 37, groups, copies, 5);
            }
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(embedding_parts_make_the_whole),
        cmocka_unit_test(loss_parts_make_the_whole),
        cmocka_unit_test(huge_logits_do_not_overflow),
        cmocka_unit_test(targets_may_stand_in_any_one_part),
        cmocka_unit_test(all_labels_may_be_ignored),
        cmocka_unit_test(nan_comes_through),
        cmocka_unit_test(sum_parts_matches_reference),
        cmocka_unit_test(columns_go_to_parts_and_back),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
