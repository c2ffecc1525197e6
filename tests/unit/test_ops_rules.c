// test_ops_rules.c: what holds for all operations: NaN propagates, tensors may be empty, and wrong
// arguments give one clear sentence.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "arrays.h"
#include "fatal.h"
#include "tensor/ops.h"

// ---- NaN, infinity, nothing ----

static void nan_comes_through(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++)
        for (int64_t at = 0; at < 67; at += 33) {  // in vector code, and in the remainder
            DType type = all_dtypes[i];
            Array x = random_array(type, 1, 67, 1), targets = array_new(I32, 1, 1, 3);
            Array losses = array_new(full(type), 1, 1, 0), lse = array_new(full(type), 1, 1, 0);
            Array y = array_new(type, 1, 67, 0), rstd = array_new(full(type), 1, 1, 0),
                  one = array_new(type, 1, 67, 1);
            x.x[at] = NAN;
            array_write(&x);
            assert_true(isnan(op_sum(x.t)) && isnan(op_sum_squares(x.t)));
            op_cross_entropy_forward(losses.t, lse.t, x.t, targets.t);
            array_read(&losses);
            assert_true(isnan(losses.x[0]));
            op_cross_entropy_backward(y.t, x.t, lse.t, targets.t, 1);
            array_read(&y);
            for (int64_t j = 0; j < 67; j++) assert_true(isnan(y.x[j]));
            op_rmsnorm_forward(y.t, rstd.t, x.t, one.t, 1e-5);
            array_read(&y);
            for (int64_t j = 0; j < 67; j++) assert_true(isnan(y.x[j]));
            op_swiglu_forward(y.t, x.t, one.t);
            array_read(&y);
            assert_true(isnan(y.x[at]));
            x.x[at] = INFINITY;
            array_write(&x);
            assert_true(isinf(op_sum_squares(x.t)));
            FREE(&x, &targets, &losses, &lse, &y, &rstd, &one);
        }
}

static void attention_passes_nan_on(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        AttentionShape at = {1, 41, 2, 1, 4};
        Array q = random_array(all_dtypes[i], 41, 8, 1), k = random_array(all_dtypes[i], 41, 4, 2);
        Array o = array_new(all_dtypes[i], 41, 8, 0), probs = array_new(all_dtypes[i], 82, 41, 0);
        k.x[0] = NAN;  // of the first key, which every query reads
        array_write(&k);
        op_attention_forward(o.t, probs.t, q.t, k.t, k.t, at);
        array_read(&o);
        for (int64_t j = 0; j < o.count; j++) assert_true(isnan(o.x[j]));
        FREE(&q, &k, &o, &probs);
    }
}

static void empty_tensors_are_fine(void **state) {
    (void)state;
    AttentionShape none = {0, 5, 2, 1, 4};
    for (int i = 0; i < 4; i++) {
        DType type = all_dtypes[i];
        Array x = array_new(type, 0, 6, 0), y = array_new(type, 0, 6, 0), z = array_new(type, 0, 6, 0);
        Array matrix = random_array(type, 3, 6, 1), out = array_new(type, 3, 6, 1);
        Array weight = array_new(type, 1, 6, 1), dweight = array_new(type, 1, 6, 1);
        Array rows = array_new(full(type), 0, 1, 0), more = array_new(full(type), 0, 1, 0);
        Array m = array_new(full(type), 0, 6, 0), v = array_new(full(type), 0, 6, 0),
              no = array_new(I32, 0, 1, 0);
        Array narrow = array_new(type, 0, 3, 0), q = array_new(type, 0, 8, 0), k = array_new(type, 0, 4, 0);
        Array o = array_new(type, 0, 8, 0), probs = array_new(type, 0, 5, 0);
        AdamW hyper = {.step = 1};
        op_fill(x.t, 1);
        op_copy(y.t, x.t);
        op_add(y.t, x.t, z.t);
        op_accumulate(y.t, x.t);
        op_scale(y.t, 2);
        assert_true(op_sum(x.t) == 0 && op_sum_squares(x.t) == 0);
        Array squares = array_new(F64, 1, 2, 0), none_of_them = array_new(F64, 0, 1, 0);
        op_squares_of_ranges(squares.t, x.t, (FlatRange[]){{0, 0}, {0, 0}});
        op_squares_of_ranges(none_of_them.t, x.t, NULL);
        array_read(&squares);
        assert_true(squares.x[0] == 0 && squares.x[1] == 0);
        FREE(&squares, &none_of_them);
        op_matmul(narrow.t, x.t, matrix.t, false, true, 0);
        op_matmul(out.t, narrow.t, x.t, true, false, 1);  // adds a sum over no tokens
        array_read(&out);
        for (int64_t j = 0; j < out.count; j++) assert_true(out.x[j] == 1);
        op_matmul(out.t, narrow.t, x.t, true, false, 0);
        array_read(&out);
        for (int64_t j = 0; j < out.count; j++) assert_true(out.x[j] == 0);
        op_embedding_forward(y.t, no.t, matrix.t);
        op_embedding_backward(matrix.t, y.t, no.t);
        op_rmsnorm_forward(y.t, rows.t, x.t, weight.t, 1e-5);
        op_rmsnorm_backward(y.t, dweight.t, x.t, z.t, x.t, weight.t, rows.t);
        op_rope(x.t, no.t, 6, (Rope){.theta = 1e4}, 1);
        op_attention_forward(o.t, probs.t, q.t, k.t, k.t, none);
        op_swiglu_forward(y.t, x.t, z.t);
        op_swiglu_backward(x.t, y.t, z.t, x.t, y.t);
        op_cross_entropy_forward(rows.t, more.t, x.t, no.t);
        op_cross_entropy_backward(x.t, x.t, more.t, no.t, 1);
        VocabularyPart part = {30, 12, 3}, empty = {30, 30, 0};
        Array sums = array_new(full(type), 2, 0, 0), token = array_new(I32, 1, 1, 4),
              logits = array_new(type, 1, 3, 1);
        Array maximum = array_new(full(type), 1, 1, 0), row = array_new(type, 1, 6, 1);
        op_embedding_part_forward(y.t, no.t, matrix.t, part);
        op_embedding_part_backward(matrix.t, y.t, no.t, part);
        op_cross_entropy_part_maxima(rows.t, narrow.t, part);
        op_cross_entropy_part_sums(sums.t, narrow.t, rows.t, no.t, part);
        Array lse = array_new(full(type), 0, 1, 0);
        op_cross_entropy_part_losses(more.t, lse.t, rows.t, sums.t, no.t);
        op_cross_entropy_part_backward(narrow.t, narrow.t, rows.t, no.t, 1, part);
        op_sum_parts(y.t, x.t, 3);
        op_cross_entropy_part_maxima(maximum.t, logits.t, empty);  // a part of nothing but padding
        array_read(&maximum);
        assert_true(maximum.x[0] == -INFINITY);
        op_embedding_part_forward(row.t, token.t, matrix.t, empty);
        array_read(&row);
        for (int64_t j = 0; j < row.count; j++) assert_true(row.x[j] == 0);
        FREE(&sums, &token, &logits, &maximum, &row, &lse);
        op_adamw(y.t, (Tensor){0}, m.t, v.t, x.t, hyper);
        op_sgd(y.t, (Tensor){0}, x.t, 1, 1);
        FREE(&x, &y, &z, &matrix, &out, &weight, &dweight, &rows, &more, &m, &v, &no, &narrow, &q, &k, &o,
             &probs);
    }
}

// ---- wrong arguments ----

static void call_and_wait(void *call) {
    call_function(call);
    tensor_to_host(&(float){0},
                   new_tensor(F32, 1, 1));  // what a GPU has found is reported by the next wait
}

// `wrong`, in a process of its own, ends with this sentence.
static void assert_refused(void (*wrong)(void), const char *sentence) {
    expect_fatal(call_and_wait, &(Call){wrong}, sentence);
}

static void inner_dimensions_differ(void) {
    op_matmul(new_tensor(F32, 3, 4), new_tensor(F32, 3, 5), new_tensor(F32, 6, 4), false, false, 0);
}
static void beta_is_a_half(void) {
    op_matmul(new_tensor(F32, 3, 4), new_tensor(F32, 3, 5), new_tensor(F32, 5, 4), false, false, 0.5);
}
static void products_share_nothing(void) {
    Tensor x[4];
    for (int i = 0; i < 4; i++) x[i] = new_tensor(F32, 4, 4);
    op_matmuls(x, x + 2, 2, x + 2, 2, false, false, 0);
}
static void products_write_over_what_is_read(void) {
    Tensor x[4];
    for (int i = 0; i < 4; i++) x[i] = new_tensor(F32, 4, 4);
    op_matmuls(x, x + 3, 1, (Tensor[]){x[2], x[0]}, 2, false, false, 0);
}
static void product_is_wider_than_its_operands(void) {
    op_matmul(new_tensor(F32, 3, 4), new_tensor(BF16, 3, 5), new_tensor(F32, 5, 4), false, false, 1);
}
static void product_is_narrower(void) {
    op_matmul(new_tensor(BF16, 3, 4), new_tensor(F32, 3, 5), new_tensor(F32, 5, 4), false, false, 1);
}
static void products_of_two_dtypes(void) {
    Tensor c[] = {new_tensor(F32, 3, 4), new_tensor(BF16, 3, 4)};
    op_matmuls(c, (Tensor[]){new_tensor(BF16, 3, 5)}, 1,
               (Tensor[]){new_tensor(BF16, 5, 4), new_tensor(BF16, 5, 4)}, 2, false, false, 1);
}
static void sum_of_no_products(void) {
    op_matmul_sum(new_tensor(F32, 3, 4), NULL, NULL, 0, false, false, 0);
}
static void sum_of_two_dtypes(void) {
    Tensor a[] = {new_tensor(BF16, 3, 5), new_tensor(F32, 3, 5)};
    Tensor b[] = {new_tensor(BF16, 5, 4), new_tensor(F32, 5, 4)};
    op_matmul_sum(new_tensor(F32, 3, 4), a, b, 2, false, false, 1);
}
static void sum_over_a_later_operand(void) {
    Tensor c = new_tensor(F32, 4, 4), other = new_tensor(F32, 4, 4);
    op_matmul_sum(c, (Tensor[]){other, c}, (Tensor[]){other, other}, 2, false, false, 0);
}
static void dtypes_differ(void) {
    op_add(new_tensor(F32, 3, 4), new_tensor(F32, 3, 4), new_tensor(BF16, 3, 4));
}
static void dtype_is_no_number(void) { op_scale(new_tensor(E4M3, 3, 4), 2); }
static void product_of_no_tensor(void) {
    op_matmul(new_tensor(F32, 3, 4), (Tensor){0}, new_tensor(F32, 5, 4), false, false, 0);
}
static void no_tensor(void) { op_add(new_tensor(F32, 3, 4), (Tensor){0}, new_tensor(F32, 3, 4)); }
static void reads_no_tensor(void) { tensor_to_doubles(NULL, (Tensor){0}); }
static void writes_no_tensor(void) { tensor_from_host((Tensor){0}, NULL); }
static void view_of_no_tensor(void) { tensor_view((Tensor){0}, 0, SHAPE(1)); }
static void rstd_is_narrow(void) {
    op_rmsnorm_forward(new_tensor(BF16, 3, 4), new_tensor(BF16, 3, 1), new_tensor(BF16, 3, 4),
                       new_tensor(BF16, 1, 4), 1e-5);
}
static void heads_do_not_divide(void) {
    Tensor q = new_tensor(F32, 5, 12), k = new_tensor(F32, 5, 8);
    op_attention_forward(new_tensor(F32, 5, 12), new_tensor(F32, 15, 5), q, k, k,
                         (AttentionShape){1, 5, 3, 2, 4});
}
static void head_size_is_odd(void) {
    op_rope(new_tensor(F32, 3, 10), new_tensor(I32, 3, 1), 5, (Rope){.theta = 1e4}, 1);
}
static void steps_from_zero(void) {
    Tensor t[4];
    for (int i = 0; i < 4; i++) t[i] = new_tensor(F32, 1, 4);
    op_adamw(t[0], (Tensor){0}, t[1], t[2], t[3], (AdamW){.step = 0});
}
static void output_over_input(void) {
    Tensor c = new_tensor(F32, 4, 4);
    op_matmul(c, c, new_tensor(F32, 4, 4), false, false, 0);
}
static void output_over_part_of_input(void) {
    Tensor x = new_tensor(F32, 5, 4);
    op_add(tensor_rows_of(x, 0, 4), tensor_rows_of(x, 1, 4), new_tensor(F32, 4, 4));
}
static void dk_over_q(void) {
    Tensor q = new_tensor(F32, 5, 4), k = new_tensor(F32, 5, 4), v = new_tensor(F32, 5, 4);
    op_attention_backward(new_tensor(F32, 5, 4), q, new_tensor(F32, 5, 4), new_tensor(F32, 5, 4), q, k, v,
                          new_tensor(F32, 5, 5), (AttentionShape){1, 5, 1, 1, 4});
}
static void viewed_after_free(void) {
    Tensor x = new_tensor(F32, 5, 4), row = tensor_rows_of(x, 1, 1);
    tensor_free(&x);
    op_fill(row, 1);
}
static void freed_twice(void) {
    Tensor x = new_tensor(F32, 5, 4), copy = x;
    tensor_free(&x);
    tensor_free(&copy);
}
static void shared_after_free(void) {
    Tensor x = new_tensor(BF16, 5, 4), copy = x;
    tensor_free(&x);
    for (int i = 0; i < 1000; i++) new_tensor(F32, 5, 4);
    tensor_share(copy);
}
static Tensor with_token(double token) { return array_new(I32, 3, 1, token).t; }
static void gradient_is_f64(void) {
    op_embedding_backward(new_tensor(F64, 7, 4), new_tensor(F32, 3, 4), with_token(1));
}
static void token_beyond_vocabulary(void) {
    op_embedding_forward(new_tensor(F32, 3, 4), with_token(7), new_tensor(F32, 7, 4));
}
static void token_is_ignored(void) {
    op_embedding_backward(new_tensor(F32, 7, 4), new_tensor(F32, 3, 4), with_token(IGNORED_LABEL));
}
static void target_beyond_vocabulary(void) {
    op_cross_entropy_forward(new_tensor(F32, 3, 1), new_tensor(F32, 3, 1), new_tensor(F32, 3, 7),
                             with_token(-2));
}
static void position_is_negative(void) {
    op_rope(new_tensor(F32, 3, 4), with_token(-1), 4, (Rope){.theta = 1e4}, 1);
}

static void part_beyond_vocabulary(void) {
    op_embedding_part_forward(new_tensor(F32, 3, 4), with_token(1), new_tensor(F32, 7, 4),
                              (VocabularyPart){10, 5, 6});
}
static void part_beyond_what_is_stored(void) {
    op_cross_entropy_part_maxima(new_tensor(F32, 3, 1), new_tensor(F32, 3, 7), (VocabularyPart){20, 0, 8});
}
static void sums_of_one_row(void) {
    Tensor row = new_tensor(F32, 3, 1);
    op_cross_entropy_part_sums(new_tensor(F32, 1, 3), new_tensor(F32, 3, 7), row, with_token(1),
                               (VocabularyPart){7, 0, 7});
}
static void token_of_no_part(void) {
    op_embedding_part_forward(new_tensor(F32, 3, 4), with_token(20), new_tensor(F32, 7, 4),
                              (VocabularyPart){20, 7, 7});
}
static void target_of_no_part(void) {
    op_cross_entropy_part_backward(new_tensor(F32, 3, 7), new_tensor(F32, 3, 7), new_tensor(F32, 3, 1),
                                   with_token(20), 1, (VocabularyPart){20, 7, 7});
}
static void sum_of_no_parts(void) { op_sum_parts(new_tensor(F32, 3, 4), new_tensor(F32, 3, 4), 0); }
static void sum_over_its_parts(void) {
    Tensor x = new_tensor(F32, 6, 4);
    op_sum_parts(tensor_rows_of(x, 0, 3), x, 2);
}

static void range_goes_too_far(void) {
    op_squares_of_ranges(new_tensor(F64, 2, 1), new_tensor(F32, 3, 4), (FlatRange[]){{0, 12}, {5, 8}});
}
static void sums_of_ranges_are_narrow(void) {
    op_squares_of_ranges(new_tensor(F32, 1, 1), new_tensor(F32, 3, 4), (FlatRange[]){{0, 12}});
}

static void wrong_arguments_are_named(void **state) {
    (void)state;
    assert_refused(inner_dimensions_differ, "matmul: b is (6, 4) f32 where (5, 4) f32 fits the others");
    assert_refused(beta_is_a_half, "matmul: beta is 0.5; it is 0 or 1");
    assert_refused(products_share_nothing, "matmuls: 2 a and 2 b share nothing");
    assert_refused(products_write_over_what_is_read,
                   "matmuls: c (4, 4) f32 would overwrite b (4, 4) f32, with which it shares memory");
    assert_refused(product_is_wider_than_its_operands,
                   "matmul: b is (5, 4) f32 where (5, 4) bf16 fits the others");
    assert_refused(product_is_narrower, "matmul: c is (3, 4) bf16 where (3, 4) f32 fits the others");
    assert_refused(products_of_two_dtypes,
                   "matmuls: c is (3, 4) bf16 beside (3, 4) f32; those of one call have one dtype");
    assert_refused(sum_of_no_products, "matmul_sum: c would be the sum of 0 products");
    assert_refused(sum_of_two_dtypes,
                   "matmul_sum: a is (3, 5) f32 beside (3, 5) bf16; those of one call have one dtype");
    assert_refused(sum_over_a_later_operand,
                   "matmul: c (4, 4) f32 would overwrite a (4, 4) f32, with which it shares memory");
    assert_refused(gradient_is_f64,
                   "embedding_backward: dweight is (7, 4) f64 where (7, 4) f32 fits the others");
    assert_refused(dtypes_differ, "add: b is (3, 4) bf16 where 12 elements of f32 fit the others");
    assert_refused(dtype_is_no_number,
                   "scale: y is (3, 4) e4m3; operations compute with f64, f32, bf16 and f16");
    assert_refused(product_of_no_tensor, "matmul: a is no tensor: never made, or already freed");
    assert_refused(no_tensor, "add: a is no tensor where 12 elements of f32 fit the others");
    assert_refused(reads_no_tensor, "tensor_to_host: there is no tensor to read");
    assert_refused(writes_no_tensor, "tensor_from_host: there is no tensor to write");
    assert_refused(view_of_no_tensor,
                   "a view of 1 elements from element 0 does not lie within no tensor");
    assert_refused(viewed_after_free, "a tensor of activations, (1, 4) f32, is used after tensor_free");
    assert_refused(freed_twice, "a tensor of activations, (5, 4) f32, is used after tensor_free");
    assert_refused(shared_after_free, "a tensor of activations, (5, 4) bf16, is used after tensor_free");
    assert_refused(rstd_is_narrow,
                   "rmsnorm_forward: rstd is (3, 1) bf16 where 3 elements of f32 fit the others");
    assert_refused(heads_do_not_divide, "attention_forward: 1 samples of 5 tokens, 3 query heads on 2");
    assert_refused(head_size_is_odd,
                   "rope: x is (3, 10) f32, whose rows are not made of heads of an even size");
    assert_refused(steps_from_zero, "adamw: step is 0; steps count from 1");
    assert_refused(output_over_input, "matmul: c (4, 4) f32 would overwrite a (4, 4) f32");
    assert_refused(output_over_part_of_input, "add: y (4, 4) f32 would overwrite a (4, 4) f32");
    assert_refused(dk_over_q, "attention_backward: dk (5, 4) f32 would overwrite q (5, 4) f32");
    assert_refused(token_beyond_vocabulary, "embedding_forward: number 0 of the tokens is 7");
    assert_refused(token_is_ignored, "embedding_backward: number 0 of the tokens is -1");
    assert_refused(target_beyond_vocabulary, "cross_entropy_forward: number 0 of the tokens is -2");
    assert_refused(
        part_beyond_vocabulary,
        "embedding_part_forward: of a vocabulary of 10 the part has 6 from 5 on, and 7 are stored");
    assert_refused(
        part_beyond_what_is_stored,
        "cross_entropy_part_maxima: of a vocabulary of 20 the part has 8 from 0 on, and 7 are stored");
    assert_refused(sums_of_one_row,
                   "cross_entropy_part_sums: sums is (1, 3) f32 where (2, 3) f32 fits the others");
    assert_refused(token_of_no_part, "embedding_part_forward: number 0 of the tokens is 20");
    assert_refused(target_of_no_part, "cross_entropy_part_backward: number 0 of the tokens is 20");
    assert_refused(sum_of_no_parts, "sum_parts: a sum of 0 parts");
    assert_refused(sum_over_its_parts, "sum_parts: y (3, 4) f32 would overwrite x (6, 4) f32");
    assert_refused(range_goes_too_far,
                   "squares_of_ranges: range 1, 8 elements from 5 on, is not within x (3, 4) f32");
    assert_refused(sums_of_ranges_are_narrow,
                   "squares_of_ranges: y is (1, 1) f32 where 1 elements of f64 fit the others");
    assert_refused(position_is_negative, "rope: number 0 of the positions is -1");
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        // first: the processes that it forks must not have used a GPU
        cmocka_unit_test(wrong_arguments_are_named),
        cmocka_unit_test(nan_comes_through),
        cmocka_unit_test(attention_passes_nan_on),
        cmocka_unit_test(empty_tensors_are_fine),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
