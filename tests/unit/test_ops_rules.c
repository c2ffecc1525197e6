// test_ops_rules.c: what holds for all operations alike: the same bits again and on any number of threads,
// counts equal to the formulas at any size, NaN that shows, empty tensors, and one clear sentence for wrong
// arguments.
#include <omp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "arrays.h"
#include "tensor/clock.h"
#include "tensor/device.h"
#include "tensor/ops.h"

// ---- bits ----

typedef struct Output {
    const char *name;
    uint8_t *bytes;
    size_t size;
} Output;

typedef struct Outputs {
    Output of[48];
    int count;
} Outputs;

static void keep_bytes(Outputs *outputs, const char *name, const void *bytes, size_t size) {
    Output *output = &outputs->of[outputs->count++];
    *output = (Output){name, host_alloc(size), size};
    memcpy(output->bytes, bytes, size);
}

static void keep(Outputs *outputs, const char *name, Tensor t) {
    size_t size = (size_t)tensor_bytes(t);
    void *bytes = host_alloc(size);
    tensor_to_host(bytes, t);
    keep_bytes(outputs, name, bytes, size);
    free(bytes);
}

static void assert_same_bits(Outputs *got, Outputs *want, const char *when) {
    for (int i = 0; i < got->count; i++) {
        Output *a = &got->of[i], *b = &want->of[i];
        for (size_t j = 0; j < a->size; j++)
            if (a->bytes[j] != b->bytes[j])
                fail_msg("%s: byte %zu of %zu is %02x %s, and was %02x", a->name, j, a->size, a->bytes[j],
                         when, b->bytes[j]);
        free(a->bytes);
    }
    got->count = 0;
}

static void run_row_operations(DType type, Outputs *outputs) {
    const int64_t n = 263, h = 306, v = 31;
    Array x = random_array(type, n, h, 1), dy = random_array(type, n, h, 2);
    Array weight = random_array(type, 1, h, 3), dweight = random_array(type, 1, h, 4);
    Array y = poisoned(type, n, h), rstd = poisoned(full(type), 1, n);
    Array tokens = random_tokens(n, v, 5), table = random_array(type, v, h, 6);
    Array logits = random_array(type, n, v, 7);
    Array losses = poisoned(full(type), 1, n), lse = poisoned(full(type), 1, n);
    double sums[2] = {op_sum(x.t), op_sum_squares(x.t)};
    keep_bytes(outputs, "sums", sums, sizeof sums);
    op_rmsnorm_forward(y.t, rstd.t, x.t, weight.t, 1e-5);
    keep(outputs, "rmsnorm_forward", y.t);
    op_rmsnorm_backward(y.t, dweight.t, (Tensor){0}, dy.t, x.t, weight.t, rstd.t);
    keep(outputs, "rmsnorm_backward's dx", y.t);
    keep(outputs, "rmsnorm_backward's dweight", dweight.t);
    op_embedding_forward(y.t, tokens.t, table.t);
    keep(outputs, "embedding_forward", y.t);
    op_embedding_backward(table.t, dy.t, tokens.t);
    keep(outputs, "embedding_backward", table.t);
    op_cross_entropy_forward(losses.t, lse.t, logits.t, tokens.t);
    keep(outputs, "cross_entropy_forward's losses", losses.t);
    keep(outputs, "cross_entropy_forward's lse", lse.t);
    op_cross_entropy_backward(logits.t, logits.t, lse.t, tokens.t, 0.01);
    keep(outputs, "cross_entropy_backward", logits.t);
    op_rope(y.t, tokens.t, 34, (Rope){.theta = 1e4}, 1);
    keep(outputs, "rope", y.t);
    FREE(&x, &dy, &weight, &dweight, &y, &rstd, &tokens, &table, &logits, &losses, &lse);
}

static void run_part_operations(DType type, Outputs *outputs) {
    const int64_t n = 263, h = 306, v = 61, columns = 37;
    const VocabularyPart part = {v, 30, 31};
    Array tokens = random_tokens(n, v, 1), table = random_array(type, columns, h, 2),
          y = poisoned(type, n, h);
    Array logits = random_array(type, n, columns, 3), dy = random_array(type, n, h, 4);
    Array maxima = poisoned(full(type), 1, n), sums = poisoned(full(type), 2, n);
    Array losses = poisoned(full(type), 1, n), lse = poisoned(full(type), 1, n), sum = poisoned(type, 1, h);
    op_embedding_part_forward(y.t, tokens.t, table.t, part);
    keep(outputs, "embedding_part_forward", y.t);
    op_embedding_part_backward(table.t, dy.t, tokens.t, part);
    keep(outputs, "embedding_part_backward", table.t);
    op_cross_entropy_part_maxima(maxima.t, logits.t, part);
    op_cross_entropy_part_sums(sums.t, logits.t, maxima.t, tokens.t, part);
    keep(outputs, "cross_entropy_part_maxima", maxima.t);
    keep(outputs, "cross_entropy_part_sums", sums.t);
    op_cross_entropy_part_losses(losses.t, lse.t, maxima.t, sums.t, tokens.t);
    keep(outputs, "cross_entropy_part_losses", losses.t);
    op_cross_entropy_part_backward(logits.t, logits.t, lse.t, tokens.t, 0.01, part);
    keep(outputs, "cross_entropy_part_backward", logits.t);
    op_sum_parts(sum.t, y.t, n);
    keep(outputs, "sum_parts", sum.t);
    FREE(&tokens, &table, &y, &logits, &dy, &maxima, &sums, &losses, &lse, &sum);
}

static void run_expert_operations(DType type, Outputs *outputs) {
    const int64_t n = 263, e = 12, k = 3, h = 97;
    const RouteRule rule = {true, 4, 2, 2};
    Array logits = random_array(full(type), n, e, 1), weights = poisoned(full(type), n, k);
    Array dlogits = poisoned(full(type), n, e);
    Array chosen = array_new(I32, n, k, -1), place = array_new(I32, n, k, -1),
          tokens = array_new(I32, n * k, 1, -1);
    Array counts = array_new(I32, e, 1, -1), x = random_array(type, n, h, 2),
          rows = poisoned(type, n * k, h);
    Array y = poisoned(type, n, h), dweights = poisoned(full(type), n, k), drows = poisoned(type, n * k, h);
    op_route_forward(chosen.t, weights.t, logits.t, (Tensor){0}, rule);
    op_route_order(tokens.t, place.t, counts.t, chosen.t);
    op_gather_rows(rows.t, x.t, tokens.t);
    op_combine_forward(y.t, rows.t, place.t, weights.t);
    op_combine_backward(drows.t, dweights.t, y.t, rows.t, place.t, weights.t);
    op_route_backward(dlogits.t, dweights.t, weights.t, chosen.t, logits.t, rule);
    keep(outputs, "route_order's tokens", tokens.t);
    keep(outputs, "combine_forward", y.t);
    keep(outputs, "combine_backward's dz", drows.t);
    keep(outputs, "route_backward", dlogits.t);
    FREE(&logits, &dlogits, &weights, &chosen, &place, &tokens, &counts, &x, &rows, &y, &dweights, &drows);
}

static void run_elementwise_operations(DType type, Outputs *outputs) {
    const int64_t n = 263, f = 97;
    Array gate = random_array(type, n, f, 8), up = random_array(type, n, f, 9), act = poisoned(type, n, f);
    Array m = array_new(full(type), n, f, 0), v = array_new(full(type), n, f, 0);
    AdamW hyper = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .grad_scale = 1, .step = 1};
    op_swiglu_forward(act.t, gate.t, up.t);
    keep(outputs, "swiglu_forward", act.t);
    op_swiglu_backward(gate.t, up.t, act.t, gate.t, up.t);
    keep(outputs, "swiglu_backward's dgate", gate.t);
    keep(outputs, "swiglu_backward's dup", up.t);
    op_add(act.t, act.t, gate.t);
    op_accumulate(act.t, up.t);
    op_scale(act.t, 0.7);
    keep(outputs, "add, accumulate, scale", act.t);
    op_adamw(act.t, (Tensor){0}, m.t, v.t, gate.t, hyper);
    op_sgd(act.t, (Tensor){0}, up.t, 0.1, 1);
    keep(outputs, "adamw, sgd", act.t);
    op_copy(m.t, act.t);
    op_fill(act.t, 3);
    keep(outputs, "copy", m.t);
    keep(outputs, "fill", act.t);
    FREE(&gate, &up, &act, &m, &v);
}

static void run_attention(DType type, Outputs *outputs) {
    const AttentionShape at = {3, 67, 6, 2, 10};
    const int64_t n = at.b * at.s, a = at.heads * at.head_size, kv = at.kv_heads * at.head_size;
    Array q = random_array(type, n, a, 10), k = random_array(type, n, kv, 11),
          v = random_array(type, n, kv, 12);
    Array o = poisoned(type, n, a), probs = poisoned(type, at.b * at.heads * at.s, at.s);
    op_attention_forward(o.t, probs.t, q.t, k.t, v.t, at);
    keep(outputs, "attention_forward", o.t);
    op_attention_backward(q.t, k.t, v.t, o.t, q.t, k.t, v.t, probs.t, at);
    keep(outputs, "attention_backward's dq", q.t);
    keep(outputs, "attention_backward's dk", k.t);
    keep(outputs, "attention_backward's dv", v.t);
    FREE(&q, &k, &v, &o, &probs);
}

static void run_matmuls(DType type, Outputs *outputs) {
    Array a = random_array(type, 131, 521, 1), b = random_array(type, 131, 257, 2),
          c = random_array(type, 521, 257, 3);
    op_matmul(c.t, a.t, b.t, true, false, 1);
    keep(outputs, "matmul", c.t);
    FREE(&a, &b, &c);
}

// A GPU computes without threads of the host.
static bool on_threads(void) { return strstr(backend_text(), "thread") != NULL; }

static void the_same_call_gives_the_same_bits(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++)
        for (int threads = 1; threads <= (on_threads() ? 4 : 1); threads++) {
            Outputs first = {.count = 0}, again = {.count = 0};
            omp_set_num_threads(threads);
            for (int twice = 0; twice < 2; twice++) {
                Outputs *outputs = twice ? &again : &first;
                run_row_operations(all_dtypes[i], outputs);
                run_part_operations(all_dtypes[i], outputs);
                run_elementwise_operations(all_dtypes[i], outputs);
                run_expert_operations(all_dtypes[i], outputs);
                run_attention(all_dtypes[i], outputs);
                run_matmuls(all_dtypes[i], outputs);
            }
            assert_same_bits(&again, &first, "the second time");
            for (int j = 0; j < first.count; j++) free(first.of[j].bytes);
        }
}

// All but the matrix multiply, whose slices follow the threads.
static void bits_do_not_depend_on_the_number_of_threads(void **state) {
    (void)state;
    if (!on_threads()) return;
    for (int i = 0; i < 4; i++) {
        Outputs alone = {.count = 0}, together = {.count = 0};
        for (int threads = 1; threads <= 7; threads += threads < 3 ? 1 : 4) {
            Outputs *outputs = threads == 1 ? &alone : &together;
            omp_set_num_threads(threads);
            run_row_operations(all_dtypes[i], outputs);
            run_part_operations(all_dtypes[i], outputs);
            run_elementwise_operations(all_dtypes[i], outputs);
            run_expert_operations(all_dtypes[i], outputs);
            run_attention(all_dtypes[i], outputs);
            char when[32];
            snprintf(when, sizeof when, "on %d threads", threads);
            if (threads > 1) assert_same_bits(&together, &alone, when);
        }
        for (int j = 0; j < alone.count; j++) free(alone.of[j].bytes);
    }
}

// Long enough that threads meet, and every token many times: what two threads add to one row at a time is
// lost, or added in another order.
static void threads_do_not_race_for_a_row(void **state) {
    (void)state;
    if (!on_threads()) return;
    const int64_t n = 8192, h = 128, v = 5;
    Array dy = random_array(F32, n, h, 1), tokens = random_tokens(n, v, 2),
          dweight = array_new(F32, v, h, 0);
    Outputs alone = {.count = 0}, together = {.count = 0};
    omp_set_num_threads(1);
    op_embedding_backward(dweight.t, dy.t, tokens.t);
    keep(&alone, "embedding_backward", dweight.t);
    omp_set_num_threads(4);
    for (int again = 0; again < 10; again++) {
        op_fill(dweight.t, 0);
        op_embedding_backward(dweight.t, dy.t, tokens.t);
        keep(&together, "embedding_backward", dweight.t);
        assert_same_bits(&together, &alone, "on 4 threads");
    }
    free(alone.of[0].bytes);
    FREE(&dy, &tokens, &dweight);
}

// ---- counts ----

// The one operation since the last reset.
static void assert_count(const char *name, double flops, double bytes) {
    const OpCount *list;
    int count = clock_operations(&list);
    if (count != 1 || strcmp(list[0].name, name) || list[0].calls != 1)
        fail_msg("%d operations, the first %s; expected %s alone", count, count ? list[0].name : "none",
                 name);
    if (list[0].flops != flops || list[0].bytes != bytes)
        fail_msg("%s counts %.17g FLOPs and %.17g bytes, expected %.17g and %.17g", name, list[0].flops,
                 list[0].bytes, flops, bytes);
    clock_reset();
}

static Tensor new_tensor(DType dtype, int64_t rows, int64_t columns) {
    return tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(rows, columns));
}

// 4 experts, of which each token takes 2.
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

// Every operation once on tensors of these sizes in `type`; whether they compute is the caller's affair.
static void count_all(DType type, int64_t n, int64_t h, int64_t f, int64_t v, AttentionShape at) {
    const double e = (double)dtype_size(type), w = (double)dtype_size(full(type)),
                 nh = (double)n * (double)h;
    const double nf = (double)n * (double)f, nv = (double)n * (double)v;
    Tensor x = new_tensor(type, n, h), y = new_tensor(type, n, h), z = new_tensor(type, n, h);
    Tensor gate = new_tensor(type, n, f), up = new_tensor(type, n, f), act = new_tensor(type, n, f);
    Tensor weight = new_tensor(type, 1, h), dweight = new_tensor(type, 1, h),
           matrix = new_tensor(type, f, h);
    Tensor row = new_tensor(full(type), n, 1), row2 = new_tensor(full(type), n, 1),
           table = new_tensor(type, v, h);
    Tensor wide = new_tensor(full(type), n, h), m = new_tensor(full(type), n, h),
           s = new_tensor(full(type), n, h);
    Tensor tokens = new_tensor(I32, n, 1), logits = new_tensor(type, n, v);
    clock_reset();
    op_fill(tokens, 0);
    assert_count("fill", 0, 4 * (double)n);
    Tensor all[] = {x, y, z, gate, up, act, weight, dweight, matrix, row, row2, table, wide, m, s, logits};
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

    double hf = (double)h * (double)f;
    op_matmul(gate, x, matrix, false, true, 0);
    assert_count("matmul", 2 * nh * (double)f, (nf + nh + hf) * e);
    op_matmul(matrix, gate, x, true, false, 1);
    assert_count("matmul", 2 * nh * (double)f, (2 * hf + nf + nh) * e);

    op_embedding_forward(y, tokens, table);
    assert_count("embedding_forward", 0, 2 * nh * e + 4 * (double)n);
    op_embedding_backward(table, y, tokens);
    assert_count("embedding_backward", 0, 3 * nh * e + 4 * (double)n);
    op_rmsnorm_forward(y, row, x, weight, 1e-5);
    assert_count("rmsnorm_forward", 0, (2 * nh + (double)h) * e + (double)n * w);
    op_rmsnorm_backward(y, dweight, (Tensor){0}, z, x, weight, row);
    assert_count("rmsnorm_backward", 0, (3 * nh + 3 * (double)h) * e + (double)n * w);
    op_rmsnorm_backward(y, dweight, y, z, x, weight, row);
    assert_count("rmsnorm_backward", 0, (4 * nh + 3 * (double)h) * e + (double)n * w);
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
    op_embedding_part_backward(table, y, tokens, part);
    assert_count("embedding_part_backward", 0, 3 * share * e + 4 * (double)n);
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
    for (int i = 0; i < 4; i++) count_all(all_dtypes[i], 7, 6, 11, 13, (AttentionShape){2, 5, 6, 3, 4});
}

// Sizes whose products pass 2^31, and some 2^63: of no tensor stands more behind than its shape.
static void counts_go_beyond_32_bits(void **state) {
    (void)state;
    device_dry_run(true);
    int64_t k = 1024;
    count_all(BF16, 4096 * k, 16 * k, 52 * k, 128 * k, (AttentionShape){4, 1024 * k, 128, 8, 128});
    count_all(F32, 65536 * k, 8 * k, 29 * k, 32 * k, (AttentionShape){1, 65536, 32, 8, 128});
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

// ---- NaN, infinity, nothing ----

static void nan_comes_through(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++)
        for (int64_t at = 0; at < 67; at += 33) {  // in vector code, and in what is left over
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

// Runs `wrong` in a process of its own, and holds how it ends against what it must say.
static void assert_refused(void (*wrong)(void), const char *sentence) {
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        wrong();
        tensor_to_host(&(float){0},
                       new_tensor(F32, 1, 1));  // what only a GPU has seen comes out when one waits
        _exit(0);
    }
    close(ends[1]);
    char said[1024];
    size_t length = 0;
    for (ssize_t got; (got = read(ends[0], said + length, sizeof said - 1 - length)) > 0;)
        length += (size_t)got;
    said[length] = 0;
    close(ends[0]);
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != STATUS_USAGE || !strstr(said, sentence))
        fail_msg("expected status %d and \"%s\"; got status %d and \"%s\"", STATUS_USAGE, sentence,
                 WEXITSTATUS(status), said);
}

static void inner_dimensions_differ(void) {
    op_matmul(new_tensor(F32, 3, 4), new_tensor(F32, 3, 5), new_tensor(F32, 6, 4), false, false, 0);
}
static void beta_is_a_half(void) {
    op_matmul(new_tensor(F32, 3, 4), new_tensor(F32, 3, 5), new_tensor(F32, 5, 4), false, false, 0.5);
}
static void dtypes_differ(void) {
    op_add(new_tensor(F32, 3, 4), new_tensor(F32, 3, 4), new_tensor(BF16, 3, 4));
}
static void dtype_is_no_number(void) { op_scale(new_tensor(E4M3, 3, 4), 2); }
static void no_tensor(void) { op_add(new_tensor(F32, 3, 4), (Tensor){0}, new_tensor(F32, 3, 4)); }
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
static Tensor with_token(double token) { return array_new(I32, 3, 1, token).t; }
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

static void wrong_arguments_are_named(void **state) {
    (void)state;
    assert_refused(inner_dimensions_differ, "matmul: b is (6, 4) f32 where (5, 4) f32 fits the others");
    assert_refused(beta_is_a_half, "matmul: beta is 0.5; it is 0 or 1");
    assert_refused(dtypes_differ, "add: b is (3, 4) bf16 where 12 elements of f32 fit the others");
    assert_refused(dtype_is_no_number,
                   "scale: y is (3, 4) e4m3; operations compute with f64, f32, bf16 and f16");
    assert_refused(no_tensor, "add: a is no tensor where 12 elements of f32 fit the others");
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
    assert_refused(position_is_negative, "rope: number 0 of the positions is -1");
}

static int start_again(void **state) {
    (void)state;
    omp_set_num_threads(2);
    clock_reset();
    return 0;
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        // first: what it forks off must not have started a GPU
        cmocka_unit_test_setup(wrong_arguments_are_named, start_again),
        cmocka_unit_test_setup(the_same_call_gives_the_same_bits, start_again),
        cmocka_unit_test_setup(bits_do_not_depend_on_the_number_of_threads, start_again),
        cmocka_unit_test_setup(threads_do_not_race_for_a_row, start_again),
        cmocka_unit_test_setup(counts_match_the_formulas, start_again),
        cmocka_unit_test_setup(counts_go_beyond_32_bits, start_again),
        cmocka_unit_test_setup(a_dry_run_sums_to_zero, start_again),
        cmocka_unit_test_setup(nan_comes_through, start_again),
        cmocka_unit_test_setup(attention_passes_nan_on, start_again),
        cmocka_unit_test_setup(empty_tensors_are_fine, start_again),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
