// bf16_products.h: bf16 products by a dedicated instruction, against f64, element by element. Define before
// including it: WAY, the value of ULTRASCALE_BF16; SAYS, what a program's header then says; and
// execute_instruction(), which runs the instruction once and may raise SIGILL.
#include <omp.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "arrays.h"
#include "fatal.h"
#include "tensor/ops.h"

enum { AROUND = 40 };  // NaN on each side of an operand: shows if anything there is read and used

// ---- does it execute? ----

#ifdef __AVX512F__
static sigjmp_buf before;

static void illegal(int signal) {
    (void)signal;
    siglongjmp(before, 1);
}

static bool has_instruction(void) {
    struct sigaction action = {.sa_handler = illegal}, usual;
    sigaction(SIGILL, &action, &usual);
    volatile bool executed = false;
    if (!sigsetjmp(before, 1)) {
        execute_instruction();
        executed = true;
    }
    sigaction(SIGILL, &usual, NULL);
    return executed;
}
#else
static bool has_instruction(void) { return false; }
#endif

// ---- operands ----

typedef struct Operand {
    Tensor all, t;  // t is a view of all, at no multiple of 64 bytes
    double *x;
    int64_t count;
} Operand;

static Operand operand(int64_t rows, int64_t columns, uint64_t key) {
    Operand o = {.count = rows * columns};
    o.x = zeros(o.count);
    o.all = tensor_new(MEMORY_ACTIVATION, BF16, SHAPE(o.count + 2 * AROUND));
    op_fill(o.all, NAN);
    o.t = tensor_view(o.all, AROUND + 1, SHAPE(rows, columns));
    for (int64_t i = 0; i < o.count; i++) o.x[i] = rng_normal(key, RNG_TEST, (uint64_t)i);
    tensor_from_doubles(o.t, o.x);
    tensor_to_doubles(o.x, o.t);
    return o;
}

static void operand_free(Operand *o) {
    tensor_free(&o->all);
    free(o->x);
}

static double element(const Operand *o, bool transpose, int64_t i, int64_t j) {
    return o->x[transpose ? j * o->t.shape[1] + i : i * o->t.shape[1] + j];
}

// ---- products ----

typedef struct Sizes {
    int64_t m, n, k;
} Sizes;

static void check_product(Sizes s, bool transpose_a, bool transpose_b, bool add) {
    Operand a = operand(transpose_a ? s.k : s.m, transpose_a ? s.m : s.k, 1);
    Operand b = operand(transpose_b ? s.n : s.k, transpose_b ? s.k : s.n, 2);
    Operand c = operand(s.m, s.n, 3);
    if (!add) op_fill(c.t, NAN);
    double *got = zeros(s.m * s.n), *around = zeros(s.m * s.n + 2 * AROUND);
    op_matmul(c.t, a.t, b.t, transpose_a, transpose_b, add);
    tensor_to_doubles(got, c.t);
    for (int64_t i = 0; i < s.m; i++)
        for (int64_t j = 0; j < s.n; j++) {
            double sum = add ? c.x[i * s.n + j] : 0, magnitude = fabs(sum);
            for (int64_t l = 0; l < s.k; l++) {
                double product = element(&a, transpose_a, i, l) * element(&b, transpose_b, l, j);
                sum += product;
                magnitude += fabs(product);
            }
            // Each addition rounds to f32, the result to bf16.
            double bound = (double)(s.k + 2) * 0x1p-24 * magnitude;
            bound += 0x1p-8 * (fabs(sum) + bound);
            double error = fabs(got[i * s.n + j] - sum);
            if (!(error <= bound))
                fail_msg("(%lld, %lld, %lld)%s%s%s: c[%lld][%lld] is %.9g, expected %.9g to %.2g",
                         (long long)s.m, (long long)s.n, (long long)s.k, transpose_a ? " a^T" : "",
                         transpose_b ? " b^T" : "", add ? " added" : "", (long long)i, (long long)j,
                         got[i * s.n + j], sum, bound);
        }
    tensor_to_doubles(around, c.all);
    for (int64_t i = 0; i < s.m * s.n + 2 * AROUND; i++)
        assert_true(isnan(around[i]) == (i < AROUND + 1 || i > AROUND + s.m * s.n));
    free(got), free(around);
    operand_free(&a), operand_free(&b), operand_free(&c);
}

static void products_match_f64_element_by_element(void **state) {
    (void)state;
    // Odd and even k, around a tile of 14 x 32, and beyond the 768 terms that are packed at once.
    const Sizes sizes[] = {{1, 1, 1}, {3, 2, 0}, {14, 32, 2}, {15, 33, 31}, {29, 65, 34}, {3, 70, 1541}};
    for (int i = 0; i < 6; i++)
        for (int how = 0; how < 8; how++) check_product(sizes[i], how & 1, how & 2, how & 4);
}

// In the memory where operands are packed.
static void leave_nan(int64_t m, int64_t n, int64_t k) {
    Operand a = operand(m, k, 1), b = operand(n, k, 2), c = operand(m, n, 3);
    op_fill(a.t, NAN);
    op_fill(b.t, NAN);
    op_matmul(c.t, a.t, b.t, false, true, 0);
    operand_free(&a), operand_free(&b), operand_free(&c);
}

// A row of NaN in a, and a column of infinities in b, affect what they should and nothing else: an odd last
// term is paired with zero on both sides, and not with the next row.
static void nan_and_infinity_stay_in_their_rows(void **state) {
    (void)state;
    const int64_t m = 17, n = 37, k = 33, row = 5, column = 35;
    for (int how = 0; how < 4; how++) {
        const bool transpose_a = how & 1, transpose_b = how & 2;
        Operand a = operand(transpose_a ? k : m, transpose_a ? m : k, 1);
        Operand b = operand(transpose_b ? n : k, transpose_b ? k : n, 2), c = operand(m, n, 3);
        for (int64_t l = 0; l < k; l++) {
            a.x[transpose_a ? l * m + row : row * k + l] = NAN;
            b.x[transpose_b ? column * k + l : l * n + column] = INFINITY;
        }
        tensor_from_doubles(a.t, a.x);
        tensor_from_doubles(b.t, b.x);
        leave_nan(m, n, 2 * k);
        op_matmul(c.t, a.t, b.t, transpose_a, transpose_b, 0);
        tensor_to_doubles(c.x, c.t);
        for (int64_t i = 0; i < m * n; i++) {
            const bool finite = i / n != row && i % n != column;
            if (isfinite(c.x[i]) != finite || (i / n == row && !isnan(c.x[i])))
                fail_msg("%s%s: c[%lld][%lld] is %g", transpose_a ? "a^T " : "", transpose_b ? "b^T" : "",
                         (long long)(i / n), (long long)(i % n), c.x[i]);
        }
        operand_free(&a), operand_free(&b), operand_free(&c);
    }
}

// The same terms in the same order, wherever an element is and whichever thread computes it.
static void bits_depend_on_k_alone(void **state) {
    (void)state;
    const int64_t m = 31, n = 97, k = 801;
    Operand a = operand(m, k, 1), b = operand(n, k, 2), c = operand(m, n, 3), one = operand(1, n, 4);
    for (int threads = 1; threads <= 5; threads += 2) {
        double *before = zeros(m * n);
        memcpy(before, c.x, (size_t)(m * n) * sizeof *before);
        omp_set_num_threads(threads);
        op_matmul(c.t, a.t, b.t, false, true, 0);
        tensor_to_doubles(c.x, c.t);
        assert_true(threads == 1 || !memcmp(before, c.x, (size_t)(m * n) * sizeof *before));
        free(before);
    }
    Tensor last = tensor_view(a.t, (m - 1) * k, SHAPE(1, k));
    op_matmul(one.t, last, b.t, false, true, 0);
    tensor_to_doubles(one.x, one.t);
    assert_true(!memcmp(one.x, c.x + (m - 1) * n, (size_t)n * sizeof *one.x));
    operand_free(&a), operand_free(&b), operand_free(&c), operand_free(&one);
}

// ---- which way ----

// 2^-130, which is subnormal, times 2^10: the instruction treats it as zero, and f32 does not.
static double subnormal_product(void) {
    Operand a = operand(1, 1, 1), b = operand(1, 1, 2), c = operand(1, 1, 3);
    op_fill(a.t, 0x1p-130);
    op_fill(b.t, 0x1p10);
    op_matmul(c.t, a.t, b.t, false, false, 0);
    tensor_to_doubles(c.x, c.t);
    double product = c.x[0];
    operand_free(&a), operand_free(&b), operand_free(&c);
    return product;
}

static void multiply_as(void *way) {
    setenv("ULTRASCALE_BF16", way, 1);
    const bool own = strcmp(way, "f32");
    CHECK(own == (strstr(backend_text(), SAYS) != NULL),
          "%s is chosen, and the backend says %s", (char *)way, backend_text());
    CHECK(subnormal_product() == (own ? 0 : 0x1p-120), "%s is chosen, and 2^-130 2^10 = %g", (char *)way,
          subnormal_product());
}

// Each in a process of its own, since a process chooses once. First, while there are no threads yet.
static void what_is_chosen_multiplies_and_is_said(void **state) {
    (void)state;
    const char *const ways[] = {"f32", WAY};
    for (int i = 0; i < 2; i++) {
        Ended ended = run_apart(multiply_as, ways[i]);
        if (ended.status) fail_msg("status %x: %s", (unsigned)ended.status, ended.said);
    }
    expect_fatal(multiply_as, "bf16",
                 "ULTRASCALE_BF16 is bf16; it is amx (tdpbf16ps), pairs (vdpbf16ps) or f32 (widened)");
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    if (!has_instruction()) {
        printf("1..0 # SKIP no " SAYS " on this processor\n");
        return 0;
    }
    omp_set_num_threads(1);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_chosen_multiplies_and_is_said),
        cmocka_unit_test(products_match_f64_element_by_element),
        cmocka_unit_test(nan_and_infinity_stay_in_their_rows),
        cmocka_unit_test(bits_depend_on_k_alone),
    };
    setenv("ULTRASCALE_BF16", WAY, 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
