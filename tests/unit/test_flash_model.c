// test_flash_model.c: the model with flash attention in its socket, and with stored scores.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "00_single_gpu/flash.h"
#include "00_single_gpu/training.h"
#include "tensor/rng.h"

static const char *const SMALL =
    "layers=2 hidden=24 heads=6 kv-heads=2 ffn=20 vocab=29 seq=71 micro-batch=3 dtype=f64";

typedef struct Run {
    double loss, *grad;  // all gradients, one after another
    int64_t count, kept;
} Run;

static Run run_model(const char *dtype, bool flash, Recompute again) {
    char *words = format_text("%s dtype=%s", SMALL, dtype);
    Config c = config_default(words);
    c.recompute = again;
    Model *m = model_new(&c, mesh_single());
    model_allocate(m);
    void *plug = flash ? flash_attention.plug(m) : NULL;
    if (again != RECOMPUTE_NONE) recompute.plug(m);
    model_begin_step(m, 1);
    int64_t n = c.micro_batch * c.seq;
    int32_t *tokens = host_alloc(n * sizeof *tokens);
    for (int64_t i = 0; i < n; i++) tokens[i] = (int32_t)(rng_bits(3, RNG_TEST, i) % (uint64_t)c.vocab);
    MicroBatch micro = micro_batch_new(m, 0, c.micro_batch, tokens, tokens, mean_loss_scale((double)n));
    model_forward(m, &micro);
    Run run = {.loss = loss_value(micro.loss), .kept = memory_account().now[MEMORY_ACTIVATION]};
    model_backward(m, &micro);
    micro_batch_free(m, &micro);
    for (int i = 0; i < m->params.count; i++) run.count += m->params.param[i].count;
    run.grad = host_alloc(run.count * sizeof *run.grad);
    for (int64_t i = 0, at = 0; i < m->params.count; at += m->params.param[i++].count)
        tensor_to_doubles(run.grad + at, param_total_grad(&m->params, &m->params.param[i]));
    if (flash) flash_attention.unplug(m, plug);
    model_free(m);
    int64_t left = memory_account().now_total;
    if (left) fail_msg("%lld bytes are left when the model is freed", (long long)left);
    free(tokens);
    free(words);
    return run;
}

static double distance(const Run *a, const Run *b) {
    double error = 0, norm = 0;
    for (int64_t i = 0; i < b->count; i++) {
        error += (a->grad[i] - b->grad[i]) * (a->grad[i] - b->grad[i]);
        norm += b->grad[i] * b->grad[i];
    }
    return sqrt(error / norm);
}

static void same_gradients_as_stored_scores(void **state) {
    (void)state;
    Run exact = run_model("f64", false, RECOMPUTE_NONE);
    static const char *const dtypes[] = {"f64", "f32", "bf16"};
    for (int i = 0; i < 3; i++) {
        Run stored = run_model(dtypes[i], false, RECOMPUTE_NONE),
            flash = run_model(dtypes[i], true, RECOMPUTE_NONE);
        double bound = i ? 2 * distance(&stored, &exact) : 1e-12;
        if (!(distance(&flash, &exact) <= bound))
            fail_msg("%s: gradients are %.3g away, bound %.3g", dtypes[i], distance(&flash, &exact), bound);
        if (!i) assert_true(fabs(flash.loss - exact.loss) <= 1e-12 * exact.loss);
        free(stored.grad);
        free(flash.grad);
    }
    free(exact.grad);
}

static void recomputation_gives_the_same_bits(void **state) {
    (void)state;
    Run none = run_model("f64", true, RECOMPUTE_NONE);
    for (int i = 0; i < 2; i++) {
        Run again = run_model("f64", true, i ? RECOMPUTE_FULL : RECOMPUTE_SELECTIVE);
        assert_memory_equal(again.grad, none.grad, none.count * sizeof *none.grad);
        free(again.grad);
    }
    free(none.grad);
}

// For each block, lse of 8 n a bytes in place of probs of 8 n a s; and once positions, documents and tiles.
static void keeps_lse_instead_of_probs(void **state) {
    (void)state;
    Run stored = run_model("f64", false, RECOMPUTE_NONE), flash = run_model("f64", true, RECOMPUTE_NONE);
    int64_t n = 3 * 71, layers = 2, heads = 6, tiles = 3 * 2;
    assert_int_equal(stored.kept - flash.kept,
                     layers * 8 * n * heads * (71 - 1) - 2 * 4 * n - 4 * 4 * tiles);
    free(stored.grad);
    free(flash.grad);
}

// Context parallelism prices the positions of each of its ranks, and there may be more ranks than rows.
static void positions_of_any_number_of_ranks(void **state) {
    (void)state;
    Price price = {.blocks = 0};
    for (int rank = 0; rank < 3 * MOST_KEPT; rank++) flash_price_positions(&price, 2, 71);
    double each = 2 * (2 * 4 * 71 + 4 * 4 * 2);  // positions, documents and tiles of 2 sequences
    assert_true(price_rows(price.end, price.end_rows, "positions") == 3 * MOST_KEPT * each);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_gradients_as_stored_scores),
        cmocka_unit_test(recomputation_gives_the_same_bits),
        cmocka_unit_test(keeps_lse_instead_of_probs),
        cmocka_unit_test(positions_of_any_number_of_ranks),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
