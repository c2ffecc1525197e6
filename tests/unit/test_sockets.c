// test_sockets.c: what a plug may rely on: which micro-batch a call is for, when the feed-forward part is
// called, which contribution to a gradient is the last, and that a linear gets back what it keeps; and what
// it must do: sum 16-bit gradients.
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "00_single_gpu/training.h"
#include "fatal.h"

enum { LAYERS = 2, MICROS = 3, STEPS = 2 };

static Config small_config(const char *more) {
    char *text = format_text(
        "layers=2 hidden=24 heads=6 kv-heads=2 ffn=20 vocab=256 seq=5 micro-batch=1 grad-acc=3 steps=2 "
        "dtype=f32 %s",
        more);
    Config c = config_default(text);
    free(text);
    return c;
}

// In a dry run, since only calls are checked.
static void train_with(const Config *c, const Technique *plug) {
    device_dry_run(true);
    Trainer *t = trainer_new(c, mesh_single(), (const Technique *[]){&recompute, plug, NULL});
    for (int step = 0; step < STEPS; step++) train_step(t, NULL);
    trainer_free(t);
    device_dry_run(false);
}

// ---- the micro-batch, and the feed-forward part ----

// Calls of a step, by micro-batch; index -1 would be none of it.
static struct {
    Sockets before;
    int enters[MICROS], leaves[MICROS], attentions[MICROS], mlps[MICROS], lookups[MICROS], losses[MICROS];
    bool in_mlp;
} seen;

static void count(int *calls, const MicroBatch *micro) {
    assert_true(micro->index >= 0 && micro->index < MICROS);
    calls[micro->index]++;
}

static Tensor enter(void *context, const MicroBatch *micro, Tensor x) {
    (void)context;
    assert_false(seen.in_mlp);
    count(seen.enters, micro);
    return tensor_share(x);
}
static Tensor leave(void *context, const MicroBatch *micro, Tensor partial) {
    (void)context;
    assert_false(seen.in_mlp);
    count(seen.leaves, micro);
    return tensor_share(partial);
}

static void attend(void *context, const MicroBatch *micro, Tensor o, AttentionKept *kept, Tensor q,
                   Tensor k, Tensor v, AttentionShape shape) {
    count(seen.attentions, micro);
    seen.before.attention.forward(context, micro, o, kept, q, k, v, shape);
}

static Tensor lookup(void *context, const MicroBatch *micro, Tensor weight) {
    count(seen.lookups, micro);
    return seen.before.vocabulary.lookup(context, micro, weight);
}
static void loss(void *context, const MicroBatch *micro, Tensor *lse, Tensor logits) {
    count(seen.losses, micro);
    seen.before.vocabulary.loss(context, micro, lse, logits);
}

// A feed-forward part that sends each token elsewhere enters no region: it gets only this rank's rows.
static Tensor mlp_forward(void *context, Model *m, MicroBatch *micro, int layer, Tensor x) {
    (void)context, (void)layer;
    count(seen.mlps, micro);
    seen.in_mlp = true;
    assert_int_equal(tensor_rows(x), m->sockets.region.rows(m->sockets.region.context, micro));
    Tensor y = tensor_like(MEMORY_ACTIVATION, x);
    op_copy(y, x);
    seen.in_mlp = false;
    return y;
}
static Tensor mlp_backward_input(void *context, Model *m, MicroBatch *micro, int layer, Tensor dy) {
    (void)context, (void)m, (void)layer;
    assert_true(micro->index >= 0 && micro->index < MICROS);
    Tensor dx = tensor_like(MEMORY_ACTIVATION, dy);
    op_copy(dx, dy);
    return dx;
}
static void mlp_backward_weight(void *context, Model *m, MicroBatch *micro, int layer, Tensor x) {
    (void)context, (void)m, (void)layer, (void)x;
    assert_true(micro->index >= 0 && micro->index < MICROS);
}

static void *plug_counters(Model *m) {
    Sockets *sockets = &m->sockets;
    seen.before = *sockets;
    sockets->region.enter = enter;
    sockets->region.leave = leave;
    sockets->attention.forward = attend;
    sockets->vocabulary.lookup = lookup;
    sockets->vocabulary.loss = loss;
    sockets->mlp.forward = mlp_forward;
    sockets->mlp.backward_input = mlp_backward_input;
    sockets->mlp.backward_weight = mlp_backward_weight;
    return NULL;
}
static const Technique counters = {.name = "counters", .plug = plug_counters};

static void calls_name_their_micro_batch(void **state) {
    (void)state;
    Config c = small_config("");
    memset(&seen, 0, sizeof seen);
    train_with(&c, &counters);
    for (int i = 0; i < MICROS; i++) {
        assert_int_equal(seen.enters[i], STEPS * 2 * LAYERS);  // forward, and W; of attention alone
        assert_int_equal(seen.leaves[i], STEPS * LAYERS);
        assert_int_equal(seen.attentions[i], STEPS * LAYERS);
        assert_int_equal(seen.mlps[i], STEPS * LAYERS);
        assert_int_equal(seen.lookups[i], STEPS);
        assert_int_equal(seen.losses[i], STEPS);
    }
}

// ---- gradients: the last contribution of a step ----

enum { UNITS = LAYERS + 2 };
static struct { int ready[UNITS], last[UNITS], micro_batches, finished; } gradients;

static void ready(void *context, Model *m, int unit, bool last) {
    (void)context, (void)m;
    gradients.ready[unit]++;
    gradients.last[unit] += last;
    if (last != (gradients.ready[unit] % MICROS == 0))
        fail_msg("`ready` is called with `last` %s after micro-batch %d of %d", last ? "true" : "false",
                 (gradients.ready[unit] - 1) % MICROS + 1, MICROS);
}
static void micro_batch_ready(void *context, Model *m, bool last) {
    (void)context;
    gradients.micro_batches++;
    if (last != (gradients.micro_batches % MICROS == 0))
        fail_msg("micro_batch_ready is called with `last` %s after micro-batch %d of %d",
                 last ? "true" : "false", (gradients.micro_batches - 1) % MICROS + 1, MICROS);
    for (int unit = 0; unit < m->params.units; unit++)
        assert_int_equal(gradients.ready[unit], gradients.micro_batches);
}
static void finish(void *context, Model *m) {
    (void)context, (void)m;
    gradients.finished++;
    if (gradients.micro_batches != MICROS * gradients.finished)
        fail_msg("micro_batch_ready is called %d times in %d steps of %d micro-batches",
                 gradients.micro_batches, gradients.finished, MICROS);
}
static void *plug_gradients(Model *m) {
    m->sockets.gradients.ready = ready;
    m->sockets.gradients.micro_batch_ready = micro_batch_ready;
    m->sockets.gradients.finish = finish;
    return NULL;
}
static const Technique gradient_log = {.name = "gradient log", .plug = plug_gradients};

static void gradients_are_told_of_the_last_contribution(void **state) {
    (void)state;
    for (int tied = 0; tied < 2; tied++) {
        Config c = small_config("");
        c.tied = tied;
        memset(&gradients, 0, sizeof gradients);
        train_with(&c, &gradient_log);
        for (int unit = 0; unit < UNITS; unit++) {
            assert_int_equal(gradients.ready[unit], STEPS * MICROS);
            assert_int_equal(gradients.last[unit], STEPS);
        }
        assert_int_equal(gradients.finished, STEPS);
    }
}

// ---- gradients: none stays in 16 bits ----

static void sum_the_last_alone(void *context, Model *m, int unit, bool last) {
    (void)context;
    if (last) params_accumulate(&m->params, unit);
}
static void *plug_forgetful(Model *m) {
    m->sockets.gradients.ready = sum_the_last_alone;
    return NULL;
}
static const Technique forgetful = {.name = "forgetful", .plug = plug_forgetful};

static void train_forgetfully(void *config) { train_with(config, &forgetful); }

// A gradient left there would be added to the next micro-batch's in 16 bits, a rounding that no comparison
// of 16-bit runs could distinguish from others.
static void every_micro_batch_adds_to_the_wider_sums(void **state) {
    (void)state;
    Config c = small_config("");
    train_forgetfully(&c);
    c.dtype = BF16;
    expect_fatal(train_forgetfully, &c, "the gradient of head stays in bf16");
    c.grad_acc = 1;
    train_forgetfully(&c);
}

// ---- linears: what they keep ----

typedef struct Kept {
    int64_t rows;  // of the input
    const Param *weight;
    int inputs, weights;  // B and W in which it was used
} Kept;
static struct {
    Sockets before;
    int made, dropped, served;
} linears;

static void linear_forward(void *context, Model *m, int n, Param *const *weight, const Tensor *y, Tensor x,
                           void **kept) {
    assert_null(*kept);
    Kept *k = *kept = host_alloc(sizeof *k);
    *k = (Kept){.rows = tensor_rows(x), .weight = weight[0]};
    linears.made++;
    linears.before.linear.forward(context, m, n, weight, y, x, NULL);
}
static void linear_backward_input(void *context, Model *m, int n, Param *const *weight, Tensor dx,
                                  const Tensor *dy, void **kept) {
    Kept *k = *kept;
    assert_non_null(k);
    assert_true(k->weight == weight[0] && k->rows == tensor_rows(dy[0]) && ++k->inputs == 1);
    linears.before.linear.backward_input(context, m, n, weight, dx, dy, NULL);
}
static void linear_backward_weight(void *context, Model *m, int n, Param *const *weight, const Tensor *dy,
                                   Tensor x, void **kept) {
    Kept *k = *kept;
    assert_non_null(k);
    assert_true(k->weight == weight[0] && k->rows == tensor_rows(x) && ++k->weights == 1);
    linears.before.linear.backward_weight(context, m, n, weight, dy, x, NULL);
}
static void linear_drop(void *context, void **kept) {
    (void)context;
    Kept *k = *kept;
    if (!k) return;
    linears.dropped++;
    linears.served += k->inputs && k->weights;
    free(k);
    *kept = NULL;
}
static void *plug_linears(Model *m) {
    linears.before = m->sockets;
    m->sockets.linear.forward = linear_forward;
    m->sockets.linear.backward_input = linear_backward_input;
    m->sockets.linear.backward_weight = linear_backward_weight;
    m->sockets.linear.drop = linear_drop;
    return NULL;
}
static const Technique linear_log = {.name = "linear log", .plug = plug_linears};

// q, k, v together; o; gate and up; down; in each block, and the head. Full recomputation drops a block's
// and makes them again; B and W then get the second ones.
static void what_a_linear_keeps_comes_back_to_it(void **state) {
    (void)state;
    for (Recompute again = RECOMPUTE_NONE; again <= RECOMPUTE_FULL; again++) {
        Config c = small_config("");
        c.recompute = again;
        memset(&linears, 0, sizeof linears);
        train_with(&c, &linear_log);
        int blocks = STEPS * MICROS * 4 * LAYERS, heads = STEPS * MICROS;
        assert_int_equal(linears.made, (again == RECOMPUTE_FULL ? 2 : 1) * blocks + heads);
        assert_int_equal(linears.dropped, linears.made);
        assert_int_equal(linears.served, blocks + heads);
    }
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_name_their_micro_batch),
        cmocka_unit_test(gradients_are_told_of_the_last_contribution),
        cmocka_unit_test(every_micro_batch_adds_to_the_wider_sums),
        cmocka_unit_test(what_a_linear_keeps_comes_back_to_it),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
