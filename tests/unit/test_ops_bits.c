// test_ops_bits.c: every operation gives the same bits when repeated and, except for the matrix multiply,
// on any number of threads.
#include <omp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "arrays.h"
#include "tensor/device.h"
#include "tensor/ops.h"

// ---- bits ----

typedef struct Output {
    const char *name;
    uint8_t *bytes;
    size_t size;
} Output;

typedef struct Outputs {
    Output of[80];
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
        bool same = memcmp(a->bytes, b->bytes, a->size) == 0;
        for (size_t j = 0; !same && j < a->size; j++)
            if (a->bytes[j] != b->bytes[j])
                fail_msg("%s: byte %zu of %zu is %02x %s, and was %02x", a->name, j, a->size, a->bytes[j],
                         when, b->bytes[j]);
        free(a->bytes);
    }
    got->count = 0;
}

// `to`: the dtype of weights' gradients.
static void run_row_operations(DType type, DType to, Outputs *outputs) {
    const int64_t n = 263, h = 306, v = 31;
    Array x = random_array(type, n, h, 1), dy = random_array(type, n, h, 2);
    Array weight = random_array(type, 1, h, 3), dweight = random_array(to, 1, h, 4);
    Array y = poisoned(type, n, h), rstd = poisoned(full(type), 1, n);
    Array tokens = random_tokens(n, v, 5), table = random_array(type, v, h, 6);
    Array dtable = random_array(to, v, h, 6), logits = random_array(type, n, v, 7);
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
    op_embedding_backward(dtable.t, dy.t, tokens.t);
    keep(outputs, "embedding_backward", dtable.t);
    op_cross_entropy_forward(losses.t, lse.t, logits.t, tokens.t);
    keep(outputs, "cross_entropy_forward's losses", losses.t);
    keep(outputs, "cross_entropy_forward's lse", lse.t);
    op_cross_entropy_backward(logits.t, logits.t, lse.t, tokens.t, 0.01);
    keep(outputs, "cross_entropy_backward", logits.t);
    op_rope(y.t, tokens.t, 34, (Rope){.theta = 1e4}, 1);
    keep(outputs, "rope", y.t);
    FREE(&x, &dy, &weight, &dweight, &y, &rstd, &tokens, &table, &dtable, &logits, &losses, &lse);
}

static void run_part_operations(DType type, DType to, Outputs *outputs) {
    const int64_t n = 263, h = 306, v = 61, columns = 37;
    const VocabularyPart part = {v, 30, 31};
    Array tokens = random_tokens(n, v, 1), table = random_array(type, columns, h, 2),
          dtable = random_array(to, columns, h, 2), y = poisoned(type, n, h);
    Array logits = random_array(type, n, columns, 3), dy = random_array(type, n, h, 4);
    Array maxima = poisoned(full(type), 1, n), sums = poisoned(full(type), 2, n);
    Array losses = poisoned(full(type), 1, n), lse = poisoned(full(type), 1, n), sum = poisoned(type, 1, h);
    op_embedding_part_forward(y.t, tokens.t, table.t, part);
    keep(outputs, "embedding_part_forward", y.t);
    op_embedding_part_backward(dtable.t, dy.t, tokens.t, part);
    keep(outputs, "embedding_part_backward", dtable.t);
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
    FREE(&tokens, &table, &dtable, &y, &logits, &dy, &maxima, &sums, &losses, &lse, &sum);
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

// For a matrix and its transpose: one tile for everything, tiles of rows, and square ones.
static void run_codes(DType type, Outputs *outputs) {
    const Tile tiles[] = {{0, 0}, {1, 16}, {16, 16}};
    const int64_t n = 131, h = 77;
    Array x = random_array(type, n, h, 1);
    for (int how = 0; how < 6; how++) {
        const bool turned = how & 1;
        const Tile tile = tiles[how / 2];
        const int64_t rows = turned ? h : n, columns = turned ? n : h;
        Array scale = array_new(F32, tiles_of(rows, tile.rows), tiles_of(columns, tile.columns), 0);
        Array codes = poisoned(E4M3, rows, columns), back = poisoned(type, rows, columns);
        op_tile_amax(scale.t, x.t, turned, tile);
        op_tile_scale(scale.t, scale.t, E4M3, SCALE_REAL);
        op_encode(codes.t, x.t, scale.t, turned, tile);
        op_decode(back.t, codes.t, scale.t, tile);
        keep(outputs, "tile_scale", scale.t);
        keep(outputs, "encode", codes.t);
        keep(outputs, "decode", back.t);
        FREE(&scale, &codes, &back);
    }
    FREE(&x);
}

static void run_matmuls(DType type, DType to, Outputs *outputs) {
    Array a = random_array(type, 131, 521, 1), b = random_array(type, 131, 257, 2),
          c = random_array(to, 521, 257, 3);
    op_matmul(c.t, a.t, b.t, true, false, 1);
    keep(outputs, "matmul", c.t);
    Tensor as[] = {a.t, a.t}, bs[] = {b.t, b.t};
    op_matmul_sum(c.t, as, bs, 2, true, false, 0);
    keep(outputs, "matmul_sum", c.t);
    FREE(&a, &b, &c);
}

// A GPU does not use host threads to compute.
static bool on_threads(void) { return strstr(backend_text(), "thread") != NULL; }

// All except the matrix multiply.
static void run_operations(DType type, DType to, Outputs *outputs) {
    run_row_operations(type, to, outputs);
    run_part_operations(type, to, outputs);
    if (to != type) return;
    run_elementwise_operations(type, outputs);
    run_expert_operations(type, outputs);
    run_attention(type, outputs);
    run_codes(type, outputs);
}

// Under sanitizers the next test covers everything that operations other than the matrix multiply access.
#ifdef __SANITIZE_ADDRESS__
enum { SANITIZED = true };
#else
enum { SANITIZED = false };
#endif

static void the_same_call_gives_the_same_bits(void **state) {
    (void)state;
    for (int i = 0; i < GRADIENT_DTYPES; i++)
        for (int threads = 1; threads <= (on_threads() ? 4 : 1); threads++) {
            Outputs first = {.count = 0}, again = {.count = 0};
            const DType type = gradient_dtypes[i][0], to = gradient_dtypes[i][1];
            omp_set_num_threads(threads);
            for (int twice = 0; twice < 2; twice++) {
                Outputs *outputs = twice ? &again : &first;
                if (!SANITIZED || threads == 4) run_operations(type, to, outputs);
                run_matmuls(type, to, outputs);
            }
            assert_same_bits(&again, &first, "the second time");
            for (int j = 0; j < first.count; j++) free(first.of[j].bytes);
        }
}

// The matrix multiply's slices depend on the number of threads.
static void bits_do_not_depend_on_the_number_of_threads(void **state) {
    (void)state;
    if (!on_threads()) return;
    for (int i = 0; i < GRADIENT_DTYPES; i++) {
        Outputs alone = {.count = 0}, together = {.count = 0};
        for (int threads = 1; threads <= 7; threads += threads < 3 ? 1 : 4) {
            Outputs *outputs = threads == 1 ? &alone : &together;
            omp_set_num_threads(threads);
            run_operations(gradient_dtypes[i][0], gradient_dtypes[i][1], outputs);
            char when[32];
            snprintf(when, sizeof when, "on %d threads", threads);
            if (threads > 1) assert_same_bits(&together, &alone, when);
        }
        for (int j = 0; j < alone.count; j++) free(alone.of[j].bytes);
    }
}

// Long enough for threads to collide, with every token many times: if two threads added to a row at the
// same time, additions would be lost, or made in another order.
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

// What carries out of a NaN's bits as it is rounded is lost. 1 + 2^-8 lies between two numbers of bf16, and
// is rounded to the even one.
static void a_nan_does_not_round_its_neighbour(void **state) {
    (void)state;
    enum { COUNT = 35 };
    uint32_t x[COUNT];
    uint16_t y[COUNT];
    for (int i = 0; i < COUNT; i++) x[i] = i % 2 ? 0x3f808000 : 0xffffffff;
    Tensor wide = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(COUNT));
    Tensor sum = tensor_new(MEMORY_ACTIVATION, BF16, SHAPE(COUNT));
    tensor_from_host(wide, x);
    op_fill(sum, 0);
    op_accumulate(sum, wide);
    tensor_to_host(y, sum);
    for (int i = 0; i < COUNT; i++)
        if (i % 2 ? y[i] != 0x3f80 : (y[i] & 0x7fff) <= 0x7f80) fail_msg("element %d is %04x", i, y[i]);
    tensor_free(&wide);
    tensor_free(&sum);
}

static int two_threads(void **state) {
    (void)state;
    omp_set_num_threads(2);
    return 0;
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(the_same_call_gives_the_same_bits, two_threads),
        cmocka_unit_test_setup(bits_do_not_depend_on_the_number_of_threads, two_threads),
        cmocka_unit_test_setup(threads_do_not_race_for_a_row, two_threads),
        cmocka_unit_test(a_nan_does_not_round_its_neighbour),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
