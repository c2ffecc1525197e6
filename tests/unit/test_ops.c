// test_ops.c: elementwise operations, sums, the matrix multiply and the optimizers against plain references
// in f64, in all four dtypes, at sizes that are no multiples of vectors. The model's layers are in
// test_ops_layers.c.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "arrays.h"
#include "tensor/kernel_table.h"
#include "tensor/ops.h"

// ---- elementwise ----

static void fill_sets_every_element(void **state) {
    (void)state;
    // The last one is long enough for zeros to be written past the caches, and does not begin at a multiple
    // of 16 bytes.
    const int64_t counts[] = {0, 1, 3, 17, 31, 257, 1200001};
    for (int i = 0; i < 7; i++)
        for (int type = 0; type < 4; type++) {
            DType dtype = all_dtypes[type];
            Array y = poisoned(dtype, 1, counts[i] + 2);
            const double values[] = {0, -2.5};
            for (int v = 0; v < 2; v++) {
                op_fill(tensor_view(y.t, 1, SHAPE(counts[i])), values[v]);
                array_read(&y);
                for (int64_t j = 1; j <= counts[i]; j++)
                    if (y.x[j] != values[v])
                        fail_msg("%s: element %lld is %g, expected %g", tensor_text(y.t), (long long)j,
                                 y.x[j], values[v]);
                assert_true(isnan(y.x[0]) && isnan(y.x[counts[i] + 1]));
            }
            FREE(&y);
        }
}

static void copy_converts_between_all_dtypes(void **state) {
    (void)state;
    for (DType from = 0; from < DTYPES; from++)
        for (DType to = 0; to < DTYPES; to++) {
            Array x = random_array(from, 17, 31, 1), y = array_new(to, 17, 31, 3);
            double *want = zeros(x.count);
            op_copy(y.t, x.t);
            array_read(&y);
            Array expected = array_new(to, 17, 31, 0);
            dtype_convert(want, F64, x.x, F64, x.count);
            memcpy(expected.x, want, x.count * sizeof *want);
            array_write(&expected);
            assert_exact("copy", &y, expected.x);
            free(want);
            FREE(&x, &y, &expected);
        }
}

static void add_scale_accumulate_match_reference(void **state) {
    (void)state;
    const int64_t sizes[] = {1, 3, 17, 31, 257};
    for (int i = 0; i < 5; i++)
        for (int type = 0; type < 4; type++) {
            DType dtype = all_dtypes[type];
            int64_t n = sizes[i];
            Array a = random_array(dtype, n, 31, 1), b = random_array(dtype, n, 31, 2);
            Array y = poisoned(dtype, n, 31), wide = random_array(full(dtype), n, 31, 3);
            double *sum = zeros(y.count), *scaled = zeros(y.count), *both = zeros(y.count);
            for (int64_t j = 0; j < y.count; j++) {
                sum[j] = a.x[j] + b.x[j];
                scaled[j] = -1.75 * a.x[j];
                both[j] = wide.x[j] + b.x[j];
            }
            op_add(y.t, a.t, b.t);
            array_read(&y);
            assert_close("add", &y, sum, 1);
            op_copy(y.t, a.t);
            op_add(y.t, y.t, b.t);  // y over a
            array_read(&y);
            assert_close("add in place", &y, sum, 1);
            op_copy(y.t, b.t);
            op_add(y.t, a.t, y.t);  // y over b
            array_read(&y);
            assert_close("add in place", &y, sum, 1);
            op_copy(y.t, a.t);
            op_accumulate(y.t, b.t);
            array_read(&y);
            assert_close("accumulate", &y, sum, 1);
            op_accumulate(wide.t, b.t);  // an f32 accumulator of a narrower gradient
            array_read(&wide);
            assert_close("accumulate", &wide, both, 1);
            op_scale(a.t, -1.75);
            array_read(&a);
            assert_close("scale", &a, scaled, 1);
            free(sum), free(scaled), free(both);
            FREE(&a, &b, &y, &wide);
        }
}

static void sums_match_reference(void **state) {
    (void)state;
    const int64_t sizes[] = {0, 1, 3, 17, 31, 257, 4096, 4097, 100003};
    for (int i = 0; i < 9; i++)
        for (int type = 0; type < 4; type++) {
            DType dtype = all_dtypes[type];
            Array x = random_array(dtype, 1, sizes[i], 1);
            long double sum = 0, squares = 0, magnitude = 0;
            for (int64_t j = 0; j < x.count; j++) {
                sum += x.x[j];
                squares += (long double)x.x[j] * x.x[j];
                magnitude += fabsl(x.x[j]);
            }
            // In f64 for any storage: each of count additions rounds once.
            double bound = (double)(sizes[i] + 2) * rounding(F64);
            double got = op_sum(x.t), got_squares = op_sum_squares(x.t);
            // Added to a number on the device: the same bits, times a factor.
            double number = 3;
            Tensor y = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(1));
            tensor_from_doubles(y, &number);
            op_add_sum(y, x.t, 0.5);
            tensor_to_doubles(&number, y);
            tensor_free(&y);
            assert_true(number == 3 + 0.5 * got);
            if (!(fabs(got - (double)sum) <= bound * (double)magnitude))
                fail_msg("sum of %s is %.17g, expected %.17g", tensor_text(x.t), got, (double)sum);
            if (!(fabs(got_squares - (double)squares) <= bound * (double)squares))
                fail_msg("sum of squares of %s is %.17g, expected %.17g", tensor_text(x.t), got_squares,
                         (double)squares);
            FREE(&x);
        }
}

// Ranges that leave out elements, overlap, and are empty, shorter and longer than what is summed at once.
// The sum of the same elements has the same bits in another place and with other ranges.
static void squares_of_ranges_match_reference(void **state) {
    (void)state;
    enum { RANGES = 7 };
    const FlatRange ranges[RANGES] = {{0, 17},    {20, 0},    {19, 4096}, {4115, 1},
                                      {1, 50001}, {7, 16385}, {60000, 0}};
    for (int type = 0; type < 4; type++) {
        Array x = random_array(all_dtypes[type], 1, 60000, 1),
              copy = array_new(all_dtypes[type], 1, 60000, 0);
        Tensor y = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(RANGES));
        double got[RANGES], alone;
        op_fill(y, NAN);
        op_squares_of_ranges(y, x.t, ranges);
        tensor_to_doubles(got, y);
        for (int i = 0; i < RANGES; i++) {
            long double squares = 0;
            for (int64_t j = ranges[i].first; j < ranges[i].first + ranges[i].count; j++)
                squares += (long double)x.x[j] * x.x[j];
            double bound = (double)(ranges[i].count + 2) * rounding(F64) * (double)squares;
            if (!(fabs(got[i] - (double)squares) <= bound))
                fail_msg("squares of range %d of %s are %.17g, expected %.17g", i, tensor_text(x.t), got[i],
                         (double)squares);
            // from an odd element on
            Tensor there = tensor_view(copy.t, 3, SHAPE(ranges[i].count));
            op_copy(there, tensor_view(x.t, ranges[i].first, SHAPE(ranges[i].count)));
            op_squares_of_ranges(tensor_view(y, 0, SHAPE(1)), copy.t, &(FlatRange){3, ranges[i].count});
            tensor_to_doubles(&alone, tensor_view(y, 0, SHAPE(1)));
            assert_true(alone == got[i]);
        }
        tensor_free(&y);
        FREE(&x, &copy);
    }
}

// ---- matrix multiply ----

// want = op(a) op(b), or += if it accumulates
static void reference_matmul(double *want, const double *a, const double *b, int64_t m, int64_t n,
                             int64_t k, bool transpose_a, bool transpose_b) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t l = 0; l < k; l++)
            for (int64_t j = 0; j < n; j++)
                want[i * n + j] +=
                    a[transpose_a ? l * m + i : i * k + l] * b[transpose_b ? j * k + l : l * n + j];
}

static void matmul_matches_reference(void **state) {
    (void)state;
    // The last four are beyond the pieces in which sums are taken, beyond those in which columns are, beyond
    // the rows that are packed at once, and beyond the caches.
    const int64_t sizes[][3] = {{1, 1, 1},      {3, 17, 31},    {17, 31, 257}, {257, 3, 17},
                                {31, 257, 1},   {1, 257, 3},    {257, 1, 3},   {65, 33, 1031},
                                {3, 1201, 401}, {401, 70, 401}, {1061, 541, 2}};
    for (int size = 0; size < 11; size++)
        for (int how = 0; how < 8; how++)
            for (int type = 0; type < GRADIENT_DTYPES; type++) {
                const DType dtype = gradient_dtypes[type][0], to = gradient_dtypes[type][1];
                int64_t m = sizes[size][0], n = sizes[size][1], k = sizes[size][2];
                // For the large ones, slow builds run each dtype, and each way, but not all pairs.
                if (size >= 7 && how % 4 != type % 4 && is_slow()) continue;
                bool transpose_a = how & 1, transpose_b = how & 2, add = how & 4;
                Array a = random_array(dtype, transpose_a ? k : m, transpose_a ? m : k, 1);
                Array b = random_array(dtype, transpose_b ? n : k, transpose_b ? k : n, 2);
                Array c = add ? random_array(to, m, n, 3) : poisoned(to, m, n);
                double *want = zeros(m * n);
                if (add) memcpy(want, c.x, (size_t)(m * n) * sizeof *want);
                reference_matmul(want, a.x, b.x, m, n, k, transpose_a, transpose_b);
                op_matmul(c.t, a.t, b.t, transpose_a, transpose_b, add ? 1 : 0);
                array_read(&c);
                assert_close("matmul", &c, want, (double)k + 1);
                free(want);
                FREE(&a, &b, &c);
            }
}

// If nothing is rounded to 16 bits, the bits are exactly those of a product in f32, unless bf16 is
// multiplied in pairs or, on a GPU, by another kernel.
static void products_into_f32_are_those_of_widened_operands(void **state) {
    (void)state;
    const int64_t sizes[][3] = {{1, 1, 1}, {5, 7, 0}, {37, 65, 30}, {131, 70, 401}, {3, 17, 1031}};
    for (int size = 0; size < 5; size++)
        for (int how = 0; how < 8; how++)
            for (int type = 2; type < 4; type++) {
                const bool same =
                    strstr(backend_text(), "thread") && (type == 3 || !strstr(backend_text(), "bf16 by "));
                const int64_t m = sizes[size][0], n = sizes[size][1], k = sizes[size][2];
                const bool transpose_a = how & 1, transpose_b = how & 2, add = how & 4;
                Array a = random_array(all_dtypes[type], transpose_a ? k : m, transpose_a ? m : k, 1);
                Array b = random_array(all_dtypes[type], transpose_b ? n : k, transpose_b ? k : n, 2);
                Array wide_a = array_new(F32, tensor_rows(a.t), tensor_columns(a.t), 0);
                Array wide_b = array_new(F32, tensor_rows(b.t), tensor_columns(b.t), 0);
                Array want = add ? random_array(F32, m, n, 3) : poisoned(F32, m, n);
                Array got = add ? random_array(F32, m, n, 3) : poisoned(F32, m, n);
                op_copy(wide_a.t, a.t);
                op_copy(wide_b.t, b.t);
                op_matmul(want.t, wide_a.t, wide_b.t, transpose_a, transpose_b, add);
                op_matmul(got.t, a.t, b.t, transpose_a, transpose_b, add);
                array_read(&want), array_read(&got);
                if (same) assert_exact("matmul into f32", &got, want.x);
                else assert_close("matmul into f32", &got, want.x, 2 * (double)k + 1);
                FREE(&a, &b, &wide_a, &wide_b, &want, &got);
            }
}

// Five products are more than are computed at once; pieces end within strips, and one is empty.
static void products_that_share_an_operand_are_the_same(void **state) {
    (void)state;
    enum { MOST = 5 };
    static const struct {
        int count;
        int64_t shared, k, own[MOST];  // rows or columns of the shared operand, and of each other one
    } shapes[] = {{1, 3, 5, {7}},
                  {3, 37, 401, {17, 31, 33}},
                  {3, 64, 16, {1, 14, 95}},
                  {4, 29, 41, {32, 0, 1, 40}},
                  {5, 3, 17, {2, 3, 4, 5, 6}},
                  {2, 31, 0, {5, 6}},
                  {2, 801, 33, {703, 130}}};
    for (int shape = 0; shape < 7; shape++)
        for (int how = 0; how < 16; how++)
            for (int type = 0; type < GRADIENT_DTYPES; type++) {
                if (shape == 6 && how % 4 != type % 4) continue;
                const DType dtype = gradient_dtypes[type][0], to = gradient_dtypes[type][1];
                const bool transpose_a = how & 1, transpose_b = how & 2, add = how & 4, shares_a = how & 8;
                const int count = shapes[shape].count;
                const int64_t k = shapes[shape].k;
                Array a[MOST], b[MOST], want[MOST], got[MOST];
                Tensor as[MOST], bs[MOST], cs[MOST];
                for (int i = 0; i < count; i++) {
                    const int64_t m = shares_a ? shapes[shape].shared : shapes[shape].own[i];
                    const int64_t n = shares_a ? shapes[shape].own[i] : shapes[shape].shared;
                    const uint64_t key = (uint64_t)(10 * i);
                    a[i] = random_array(dtype, transpose_a ? k : m, transpose_a ? m : k, 1 + key);
                    b[i] = random_array(dtype, transpose_b ? n : k, transpose_b ? k : n, 2 + key);
                    want[i] = add ? random_array(to, m, n, 3 + key) : poisoned(to, m, n);
                    got[i] = add ? random_array(to, m, n, 3 + key) : poisoned(to, m, n);
                    as[i] = a[i].t, bs[i] = b[i].t, cs[i] = got[i].t;
                    op_matmul(want[i].t, as[shares_a ? 0 : i], bs[shares_a ? i : 0], transpose_a,
                              transpose_b, add);
                }
                op_matmuls(cs, as, shares_a ? 1 : count, bs, shares_a ? count : 1, transpose_a, transpose_b,
                           add);
                for (int i = 0; i < count; i++) {
                    array_read(&want[i]), array_read(&got[i]);
                    assert_exact("matmuls", &got[i], want[i].x);
                    FREE(&a[i], &b[i], &want[i], &got[i]);
                }
            }
}

// c is what products give one after the other, each added to it. On a CPU 16 bits are rounded once, as the
// sum is in f32. One product has no terms, and one has more than are packed at once.
static void a_sum_of_products_is_rounded_once(void **state) {
    (void)state;
    enum { MOST = 4 };
    static const struct {
        int count;
        int64_t m, n, k[MOST];
    } shapes[] = {{1, 3, 5, {7}},        {3, 37, 70, {801, 17, 31}}, {2, 13, 65, {0, 9}},
                  {3, 14, 3, {9, 5, 0}}, {2, 17, 31, {0, 0}},        {4, 1, 129, {1, 2, 33, 4}},
                  {2, 0, 5, {3, 4}}};
    for (int shape = 0; shape < 7; shape++)
        for (int how = 0; how < 8; how++)
            for (int type = 0; type < GRADIENT_DTYPES; type++) {
                const DType dtype = gradient_dtypes[type][0], to = gradient_dtypes[type][1];
                const DType wide = strstr(backend_text(), "thread") ? dtype_full(to) : to;
                const bool transpose_a = how & 1, transpose_b = how & 2, add = how & 4;
                const int64_t m = shapes[shape].m, n = shapes[shape].n;
                Array a[MOST], b[MOST], got = add ? random_array(to, m, n, 3) : poisoned(to, m, n);
                Array sum = array_new(wide, m, n, 0), want = array_new(to, m, n, 0);
                Tensor as[MOST], bs[MOST];
                if (add) op_copy(sum.t, got.t);
                for (int i = 0; i < shapes[shape].count; i++) {
                    const int64_t k = shapes[shape].k[i];
                    const uint64_t key = (uint64_t)(10 * i);
                    a[i] = random_array(dtype, transpose_a ? k : m, transpose_a ? m : k, 1 + key);
                    b[i] = random_array(dtype, transpose_b ? n : k, transpose_b ? k : n, 2 + key);
                    as[i] = a[i].t, bs[i] = b[i].t;
                    op_matmul(sum.t, as[i], bs[i], transpose_a, transpose_b, add || i > 0);
                }
                op_copy(want.t, sum.t);
                op_matmul_sum(got.t, as, bs, shapes[shape].count, transpose_a, transpose_b, add);
                array_read(&want), array_read(&got);
                assert_exact("matmul_sum", &got, want.x);
                for (int i = 0; i < shapes[shape].count; i++) FREE(&a[i], &b[i]);
                FREE(&got, &sum, &want);
            }
}

static void sums_of_whole_numbers_are_exact(void **state) {
    (void)state;
    // Products and sums of small integers are exact in f32: the only rounding is that for storage.
    for (int type = 0; type < 4; type++) {
        DType dtype = all_dtypes[type];
        const int64_t m = 17, n = 31, k = 257;
        Array a = array_new(dtype, m, k, 0), b = array_new(dtype, k, n, 0), c = poisoned(dtype, m, n);
        for (int64_t i = 0; i < a.count; i++) a.x[i] = (double)(rng_bits(1, RNG_TEST, (uint64_t)i) % 8);
        for (int64_t i = 0; i < b.count; i++) b.x[i] = (double)(rng_bits(2, RNG_TEST, (uint64_t)i) % 8);
        array_write(&a);
        array_write(&b);
        Array want = array_new(dtype, m, n, 0);
        reference_matmul(want.x, a.x, b.x, m, n, k, false, false);
        array_write(&want);
        op_matmul(c.t, a.t, b.t, false, false, 0);
        array_read(&c);
        assert_exact("matmul", &c, want.x);
        FREE(&a, &b, &c, &want);
    }
}

typedef struct MatmulCase {
    Array y, x, w, dy;
} MatmulCase;

static double matmul_loss(void *context) {
    MatmulCase *it = context;
    op_matmul(it->y.t, it->x.t, it->w.t, false, true, 0);
    return weighted(it->y.t, &it->dy);
}

static void matmul_backward_matches_finite_differences(void **state) {
    (void)state;
    MatmulCase it = {poisoned(F64, 7, 5), random_array(F64, 7, 3, 1), random_array(F64, 5, 3, 2),
                     random_array(F64, 7, 5, 3)};
    // y = x W^T:  dx = dy W,  dW = dy^T x
    Array dx = poisoned(F64, 7, 3), dw = poisoned(F64, 5, 3);
    op_matmul(dx.t, it.dy.t, it.w.t, false, false, 0);
    op_matmul(dw.t, it.dy.t, it.x.t, true, false, 0);
    array_read(&dx);
    array_read(&dw);
    assert_gradient("matmul's dx", &it.x, dx.x, matmul_loss, &it);
    assert_gradient("matmul's dw", &it.w, dw.x, matmul_loss, &it);
    FREE(&it.y, &it.x, &it.w, &it.dy, &dx, &dw);
}

// ---- optimizers ----

// Loshchilov, Hutter 2019, algorithm 2, with torch.optim.AdamW's order of steps.
static void reference_adamw(double *w, double *m, double *v, const double *grad, int64_t count, AdamW h) {
    for (int64_t i = 0; i < count; i++) {
        double g = grad[i] * h.grad_scale;
        w[i] -= h.lr * h.weight_decay * w[i];
        m[i] = h.beta1 * m[i] + (1 - h.beta1) * g;
        v[i] = h.beta2 * v[i] + (1 - h.beta2) * g * g;
        double corrected_m = m[i] / (1 - pow(h.beta1, (double)h.step));
        double corrected_v = v[i] / (1 - pow(h.beta2, (double)h.step));
        w[i] -= h.lr * corrected_m / (sqrt(corrected_v) + h.eps);
    }
}

// value and grad in any pair of dtypes, with a master if `master`.
static void check_adamw(DType dtype, DType grad_dtype, bool master, int64_t count) {
    // A large eps, so that its place matters; a large decay, so that its kind does.
    AdamW hyper = {
        .lr = 0.05, .beta1 = 0.9, .beta2 = 0.97, .eps = 0.3, .weight_decay = 0.7, .grad_scale = 0.6};
    Array value = random_array(dtype, 1, count, 1), w = random_array(full(dtype), 1, count, 1);
    Array m = array_new(full(dtype), 1, count, 0), v = array_new(full(dtype), 1, count, 0);
    double *want[] = {zeros(count), zeros(count), zeros(count)};
    memcpy(want[0], master ? w.x : value.x, (size_t)count * sizeof(double));
    for (hyper.step = 1; hyper.step <= 3; hyper.step++) {
        Array grad = random_array(grad_dtype, 1, count, 10 + (uint64_t)hyper.step);
        reference_adamw(want[0], want[1], want[2], grad.x, count, hyper);
        op_adamw(value.t, master ? w.t : (Tensor){0}, m.t, v.t, grad.t, hyper);
        FREE(&grad);
    }
    array_read(&value);
    array_read(&w);
    array_read(&m);
    array_read(&v);
    assert_close("adamw's m", &m, want[1], 3 * 4);
    assert_close("adamw's v", &v, want[2], 3 * 5);
    if (master) {
        assert_close("adamw's master", &w, want[0], 3 * 12);
        dtype_convert(want[1], F64, w.x, F64, count);
        Array rounded = array_new(dtype, 1, count, 0);
        memcpy(rounded.x, w.x, (size_t)count * sizeof(double));
        array_write(&rounded);
        assert_exact("adamw's value", &value, rounded.x);
        FREE(&rounded);
    } else {
        // stored after each of three steps
        double steps = 3 * (12 + rounding(dtype) / rounding(full(dtype)));
        assert_close("adamw's value", &value, want[0], steps);
    }
    for (int i = 0; i < 3; i++) free(want[i]);
    FREE(&value, &w, &m, &v);
}

static void adamw_matches_reference(void **state) {
    (void)state;
    const int64_t sizes[] = {1, 3, 17, 31, 257, 4099};
    for (int i = 0; i < 6; i++)
        for (int type = 0; type < 4; type++) {
            DType dtype = all_dtypes[type];
            check_adamw(dtype, dtype, false, sizes[i]);
            check_adamw(dtype, dtype, true, sizes[i]);
            check_adamw(dtype, full(dtype), true, sizes[i]);
            check_adamw(dtype, BF16, true, sizes[i]);
        }
}

static void sgd_matches_reference(void **state) {
    (void)state;
    const int64_t sizes[] = {1, 3, 17, 31, 257};
    for (int i = 0; i < 5; i++)
        for (int master = 0; master < 2; master++)
            for (int type = 0; type < 4; type++) {
                DType dtype = all_dtypes[type];
                int64_t count = sizes[i];
                Array value = random_array(dtype, 1, count, 1), w = random_array(full(dtype), 1, count, 1);
                Array grad = random_array(dtype, 1, count, 2);
                double *want = zeros(count);
                for (int64_t j = 0; j < count; j++)
                    want[j] = (master ? w.x[j] : value.x[j]) - 0.3 * 0.7 * grad.x[j];
                op_sgd(value.t, master ? w.t : (Tensor){0}, grad.t, 0.3, 0.7);
                array_read(&value);
                array_read(&w);
                assert_close("sgd's value", &value, want, 4);
                if (master) assert_close("sgd's master", &w, want, 4);
                free(want);
                FREE(&value, &w, &grad);
            }
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fill_sets_every_element),
        cmocka_unit_test(copy_converts_between_all_dtypes),
        cmocka_unit_test(add_scale_accumulate_match_reference),
        cmocka_unit_test(sums_match_reference),
        cmocka_unit_test(squares_of_ranges_match_reference),
        cmocka_unit_test(matmul_matches_reference),
        cmocka_unit_test(products_that_share_an_operand_are_the_same),
        cmocka_unit_test(products_into_f32_are_those_of_widened_operands),
        cmocka_unit_test(a_sum_of_products_is_rounded_once),
        cmocka_unit_test(sums_of_whole_numbers_are_exact),
        cmocka_unit_test(matmul_backward_matches_finite_differences),
        cmocka_unit_test(adamw_matches_reference),
        cmocka_unit_test(sgd_matches_reference),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 2) ops_use_kernels(kernel_table_linked());  // tests/programs/book_kernels.t
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
