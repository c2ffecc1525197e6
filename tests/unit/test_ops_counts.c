// test_ops_counts.c: the FLOPs and bytes that every operation counts equal the formulas, at any size.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "arrays.h"
#include "tensor/clock.h"
#include "tensor/device.h"
#include "tensor/ops.h"

// ---- counts ----

// Only `calls` calls of one operation since the last reset.
static void assert_counts(const char *name, int64_t calls, double flops, double bytes) {
    const OpCount *list;
    int count = clock_operations(&list);
    if (count != 1 || strcmp(list[0].name, name) || list[0].calls != calls)
        fail_msg("%d operations, the first %s; expected %s alone", count, count ? list[0].name : "none",
                 name);
    if (list[0].flops != flops || list[0].bytes != bytes)
        fail_msg("%s counts %.17g FLOPs and %.17g bytes, expected %.17g and %.17g", name, list[0].flops,
                 list[0].bytes, flops, bytes);
    clock_reset();
}
static void assert_count(const char *name, double flops, double bytes) {
    assert_counts(name, 1, flops, bytes);
}

// 4 experts, 2 for each token.
static void count_experts(DType type, int64_t n, int64_t h) {
    const double e = (double)dtype_size(type), w = (double)dtype_size(full(type)), tokens = (double)n;
    const double nh = tokens * (double)h;
    const RouteRule rule = {false, 1, 1, 1};
    Tensor logits = new_tensor(full(type), n, 4), dlogits = new_tensor(full(type), n, 4);
    Tensor weights = new_tensor(full(type), n, 2), dweights = new_tensor(full(type), n, 2);
    Tensor chosen = new_tensor(I32, n, 2), place = new_tensor(I32, n, 2), index = new_tensor(I32, 2 * n, 1);
    Tensor counts = new_tensor(I32, 4, 1), x = new_tensor(type, n, h), rows = new_tensor(type, 2 * n, h),
           drows = new_tensor(type, 2 * n, h);
    Tensor losses = new_tensor(full(type), n, 1);
    Tensor all[] = {logits, dlogits, weights, dweights, chosen, place,
                    index,  counts,  x,       rows,     drows,  losses};
    op_fill(logits, 0.5), op_fill(dweights, 0.5), op_fill(x, 0.5);
    clock_reset();
    op_route_forward(chosen, weights, logits, (Tensor){0}, rule);
    assert_count("route_forward", 0, tokens * (6 * w + 8));
    op_route_order(index, place, counts, chosen);
    assert_count("route_order", 0, 4 * (6 * tokens + 4));
    op_gather_rows(rows, x, index);
    assert_count("gather_rows", 0, 4 * nh * e + 8 * tokens);
    op_combine_forward(x, rows, place, weights);
    assert_count("combine_forward", 0, 3 * nh * e + tokens * (2 * w + 8));
    op_combine_backward(drows, dweights, x, rows, place, weights);
    assert_count("combine_backward", 0, 5 * nh * e + tokens * (4 * w + 8));
    op_route_backward(dlogits, dweights, weights, chosen, logits, rule);
    assert_count("route_backward", 0, tokens * (12 * w + 8));
    op_route_balance(losses, dlogits, logits, chosen, n, (BalanceRule){0.1, 0.1, 1}, rule);
    assert_count("route_balance", 0, tokens * (13 * w + 8));
    op_route_capacity(place, chosen, 1, 4, 1);
    assert_count("route_capacity", 0, 4 * 4 * tokens);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(&all[i]);
}

// Every operation once on tensors of these sizes in `type`; whether they compute is the caller's choice.
// `to`: the dtype of weights' gradients.
static void count_all(DType type, DType to, int64_t n, int64_t h, int64_t f, int64_t v, AttentionShape at) {
    const double e = (double)dtype_size(type), w = (double)dtype_size(full(type)),
                 g = (double)dtype_size(to), nh = (double)n * (double)h;
    const double nf = (double)n * (double)f, nv = (double)n * (double)v;
    Tensor x = new_tensor(type, n, h), y = new_tensor(type, n, h), z = new_tensor(type, n, h);
    Tensor gate = new_tensor(type, n, f), up = new_tensor(type, n, f), act = new_tensor(type, n, f);
    Tensor weight = new_tensor(type, 1, h), dweight = new_tensor(to, 1, h), matrix = new_tensor(type, f, h),
           dmatrix = new_tensor(to, f, h);
    Tensor row = new_tensor(full(type), n, 1), row2 = new_tensor(full(type), n, 1),
           table = new_tensor(type, v, h), dtable = new_tensor(to, v, h);
    Tensor wide = new_tensor(full(type), n, h), m = new_tensor(full(type), n, h),
           s = new_tensor(full(type), n, h);
    Tensor tokens = new_tensor(I32, n, 1), logits = new_tensor(type, n, v);
    clock_reset();
    op_fill(tokens, 0);
    assert_count("fill", 0, 4 * (double)n);
    Tensor all[] = {x,       y,   z,    gate,  up,     act,  weight, dweight, matrix,
                    dmatrix, row, row2, table, dtable, wide, m,      s,       logits};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) op_fill(all[i], 0.5);
    clock_reset();

    op_copy(wide, x);
    assert_count("copy", 0, nh * (e + w));
    op_add(y, x, z);
    assert_count("add", 0, 3 * nh * e);
    op_accumulate(wide, x);
    assert_count("accumulate", 0, nh * (2 * w + e));
    op_scale(x, 1);
    assert_count("scale", 0, 2 * nh * e);
    op_sum(x);
    assert_count("sum", 0, nh * e);
    op_sum_squares(x);
    assert_count("sum_squares", 0, nh * e);
    Tensor squares = new_tensor(F64, 2, 1);
    op_squares_of_ranges(squares, x, (FlatRange[]){{0, 1}, {n * h / 2, n * h - n * h / 2}});
    assert_count("squares_of_ranges", 0, (1 + (double)(n * h - n * h / 2)) * e + 2 * 8);
    tensor_free(&squares);

    double hf = (double)h * (double)f;
    op_matmul(gate, x, matrix, false, true, 0);
    assert_count("matmul", 2 * nh * (double)f, (nf + nh + hf) * e);
    op_matmul(dmatrix, gate, x, true, false, 1);
    assert_count("matmul", 2 * nh * (double)f, 2 * hf * g + (nf + nh) * e);
    op_matmuls((Tensor[]){gate, up}, &x, 1, (Tensor[]){matrix, matrix}, 2, false, true, 0);
    assert_counts("matmul", 2, 4 * nh * (double)f, 2 * (nf + nh + hf) * e);
    op_matmul_sum(x, (Tensor[]){gate, up}, (Tensor[]){matrix, matrix}, 2, false, false, 0);
    assert_counts("matmul", 2, 4 * nh * (double)f,
                  (2 * (nf + nh + hf) + nh) * e);  // the second reads x, too

    op_embedding_forward(y, tokens, table);
    assert_count("embedding_forward", 0, 2 * nh * e + 4 * (double)n);
    op_embedding_backward(dtable, y, tokens);
    assert_count("embedding_backward", 0, nh * (2 * g + e) + 4 * (double)n);
    op_rmsnorm_forward(y, row, x, weight, 1e-5);
    assert_count("rmsnorm_forward", 0, (2 * nh + (double)h) * e + (double)n * w);
    op_rmsnorm_backward(y, dweight, (Tensor){0}, z, x, weight, row);
    assert_count("rmsnorm_backward", 0, (3 * nh + (double)h) * e + 2 * (double)h * g + (double)n * w);
    op_rmsnorm_backward(y, dweight, y, z, x, weight, row);
    assert_count("rmsnorm_backward", 0, (4 * nh + (double)h) * e + 2 * (double)h * g + (double)n * w);
    op_rope(x, tokens, h, (Rope){.theta = 1e4}, 1);
    assert_count("rope", 0, 2 * nh * e + 4 * (double)n);
    op_swiglu_forward(act, gate, up);
    assert_count("swiglu_forward", 0, 3 * nf * e);
    op_swiglu_backward(gate, up, act, gate, up);
    assert_count("swiglu_backward", 0, 5 * nf * e);
    op_cross_entropy_forward(row, row2, logits, tokens);
    assert_count("cross_entropy_forward", 0, nv * e + (double)n * (2 * w + 4));
    op_cross_entropy_backward(logits, logits, row2, tokens, 1);
    assert_count("cross_entropy_backward", 0, 2 * nv * e + (double)n * (w + 4));
    // A third of the vocabulary gets a third of the tokens, rounded up, and stores as much as the whole.
    const VocabularyPart part = {3 * v, v, v};
    Tensor sums = new_tensor(full(type), 2, n);
    double share = (double)((n * v + 3 * v - 1) / (3 * v)) * (double)h;
    op_fill(sums, 0.5);
    clock_reset();
    op_embedding_part_forward(y, tokens, table, part);
    assert_count("embedding_part_forward", 0, (nh + share) * e + 4 * (double)n);
    op_embedding_part_backward(dtable, y, tokens, part);
    assert_count("embedding_part_backward", 0, share * (2 * g + e) + 4 * (double)n);
    op_cross_entropy_part_maxima(row, logits, part);
    assert_count("cross_entropy_part_maxima", 0, nv * e + (double)n * w);
    op_cross_entropy_part_sums(sums, logits, row, tokens, part);
    assert_count("cross_entropy_part_sums", 0, nv * e + (double)n * (3 * w + 4));
    op_fill(row2, 0.5);
    clock_reset();
    op_cross_entropy_part_backward(logits, logits, row2, tokens, 1, part);
    assert_count("cross_entropy_part_backward", 0, 2 * nv * e + (double)n * (w + 4));
    Tensor maxima = new_tensor(full(type), n, 1);
    op_fill(maxima, 0);
    clock_reset();
    op_cross_entropy_part_losses(row, row2, maxima, sums, tokens);
    assert_count("cross_entropy_part_losses", 0, (double)n * (5 * w + 4));
    op_sum_parts(row, sums, 2);
    assert_count("sum_parts", 0, 3 * (double)n * w);
    tensor_free(&sums), tensor_free(&maxima);
    count_experts(type, n, h);
    AdamW hyper = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .grad_scale = 1, .step = 1};
    op_adamw(x, (Tensor){0}, m, s, y, hyper);
    assert_count("adamw", 0, nh * (3 * e + 4 * w));
    op_adamw(x, wide, m, s, y, hyper);
    assert_count("adamw", 0, nh * (2 * e + 6 * w));
    op_sgd(x, (Tensor){0}, y, 0.1, 1);
    assert_count("sgd", 0, nh * 3 * e);
    op_sgd(x, wide, y, 0.1, 1);
    assert_count("sgd", 0, nh * (2 * e + 2 * w));
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(&all[i]);
    tensor_free(&tokens);

    double bs = (double)at.b * (double)at.s, d = (double)at.head_size;
    double qs = bs * (double)at.heads * d, ks = bs * (double)at.kv_heads * d,
           ps = bs * (double)at.heads * (double)at.s;
    double pairs = (double)at.b * (double)at.heads * ((double)at.s * ((double)at.s + 1) / 2);
    Tensor q = new_tensor(type, at.b * at.s, at.heads * at.head_size),
           o = tensor_like(MEMORY_ACTIVATION, q);
    Tensor k = new_tensor(type, at.b * at.s, at.kv_heads * at.head_size),
           u = tensor_like(MEMORY_ACTIVATION, k);
    Tensor probs = tensor_new(MEMORY_ACTIVATION, type, SHAPE(at.b, at.heads, at.s, at.s));
    op_fill(q, 0);
    op_fill(k, 0);
    op_fill(u, 0);
    clock_reset();
    op_attention_forward(o, probs, q, k, u, at);
    assert_count("attention_forward", 4 * d * pairs, (2 * qs + 2 * ks + ps) * e);
    op_attention_probs(probs, q, k, at);
    assert_count("attention_probs", 2 * d * pairs, (qs + ks + ps) * e);
    op_attention_backward(q, k, u, o, q, k, u, probs, at);
    assert_count("attention_backward", 8 * d * pairs, (3 * qs + 4 * ks + ps) * e);
    tensor_free(&q), tensor_free(&o), tensor_free(&k), tensor_free(&u), tensor_free(&probs);
}

static void counts_match_the_formulas(void **state) {
    (void)state;
    for (int i = 0; i < GRADIENT_DTYPES; i++)
        count_all(gradient_dtypes[i][0], gradient_dtypes[i][1], 7, 6, 11, 13,
                  (AttentionShape){2, 5, 6, 3, 4});
}

// Sizes whose products exceed 2^31, and some 2^63: these tensors have a shape and no storage.
static void counts_go_beyond_32_bits(void **state) {
    (void)state;
    device_dry_run(true);
    int64_t k = 1024;
    count_all(BF16, F32, 4096 * k, 16 * k, 52 * k, 128 * k, (AttentionShape){4, 1024 * k, 128, 8, 128});
    count_all(F32, F32, 65536 * k, 8 * k, 29 * k, 32 * k, (AttentionShape){1, 65536, 32, 8, 128});
    device_dry_run(false);
}

static void a_dry_run_sums_to_zero(void **state) {
    (void)state;
    device_dry_run(true);
    Tensor x = new_tensor(F32, 3, 5);
    assert_true(op_sum(x) == 0 && op_sum_squares(x) == 0);
    tensor_free(&x);
    device_dry_run(false);
}

static int count_anew(void **state) {
    (void)state;
    clock_reset();
    return 0;
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(counts_match_the_formulas, count_anew),
        cmocka_unit_test_setup(counts_go_beyond_32_bits, count_anew),
        cmocka_unit_test_setup(a_dry_run_sums_to_zero, count_anew),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
