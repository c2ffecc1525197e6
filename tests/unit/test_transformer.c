// test_transformer.c: the model's gradients against finite differences, its sockets, and B and W separately.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "03_tensor_parallel/tensor_parallel.h"
#include "tensor/device.h"
#include "tensor/rng.h"

static const char *const SMALL =
    "layers=2 hidden=24 heads=6 kv-heads=2 ffn=20 vocab=29 seq=7 micro-batch=3 dtype=f64";

static Config small_config(bool tied) {
    Config c = config_default(SMALL);
    c.tied = tied;
    return c;
}

// Weights far from the usual small start: every term of every gradient matters.
static Model *rough_model(const Config *c) {
    Model *m = model_new(c, mesh_single());
    model_allocate(m);
    for (int i = 0; i < m->params.count; i++) {
        Param *p = &m->params.param[i];
        double *host = host_alloc(p->count * sizeof *host);
        for (int64_t j = 0; j < p->count; j++)
            host[j] = (p->dims == 1 ? 1 : 0) + 0.3 * rng_normal(7, rng_stream(p->name), j);
        tensor_from_doubles(param_value(&m->params, p), host);
        free(host);
    }
    return m;
}

static MicroBatch some_batch(const Model *m, int64_t index) {
    const Config *c = &m->config;
    int64_t n = c->micro_batch * c->seq;
    int32_t *tokens = host_alloc(n * sizeof *tokens), *targets = host_alloc(n * sizeof *targets);
    for (int64_t i = 0; i < n; i++) {
        tokens[i] = (int32_t)(rng_bits(3, RNG_TEST, 1000 * index + i) % (uint64_t)c->vocab);
        targets[i] = (int32_t)(rng_bits(4, RNG_TEST, 1000 * index + i) % (uint64_t)c->vocab);
        if (i % 5 == 2) targets[i] = IGNORED_LABEL;
    }
    MicroBatch micro = micro_batch_new(m, index, c->micro_batch, tokens, targets,
                                       mean_loss_scale((double)count_labels(targets, n)));
    free(tokens);
    free(targets);
    return micro;
}

// A document includes the token that ends it, and each sample begins with its document 0.
static void a_document_includes_the_token_that_ends_it(void **state) {
    (void)state;
    Config c = config_default("layers=1 hidden=8 heads=2 kv-heads=2 ffn=8 vocab=9 seq=5");
    config_set(&c, "documents", 7);
    Model *m = model_new(&c, mesh_single());
    model_allocate(m);
    const int32_t tokens[] = {1, 7, 2, 7, 7, 7, 3, 4, 7, 5}, want[] = {0, 0, 1, 1, 2, 0, 1, 1, 1, 2};
    MicroBatch micro = micro_batch_new(m, 0, 2, tokens, tokens, 1);
    assert_memory_equal(micro.documents, want, sizeof want);
    micro_batch_free(m, &micro);
    model_free(m);
}

// What a loss that is no number is blamed on: weights first, then what each block keeps, then the head.
static void the_first_bad_tensor_is_named(void **state) {
    (void)state;
    Config c = config_default("layers=2 hidden=8 heads=2 kv-heads=2 ffn=8 vocab=9 seq=5 dtype=f64");
    Model *m = model_new(&c, mesh_single());
    model_allocate(m);
    MicroBatch micro = some_batch(m, 0);
    assert_null(micro_batch_first_bad(m, &micro));  // no block has run
    model_forward(m, &micro);
    assert_null(micro_batch_first_bad(m, &micro));
    struct {
        const char *name;
        Tensor tensor;
    } bad[] = {
        {"head logits", micro.head.logits},
        {"head x", micro.head.x},
        {"block 1 up", micro.block[1]->mlp.up},
        {"block 1 gate", micro.block[1]->mlp.gate},
        {"block 1 norm2", micro.block[1]->norm2},
        {"block 1 x2", micro.block[1]->x2},
        {"block 1 v", micro.block[1]->v},
        {"block 0 k", micro.block[0]->k},
        {"block 0 q", micro.block[0]->q},
        {"block 0 norm1", micro.block[0]->norm1},
        {"weight lm_head.weight", param_value(&m->params, params_find(&m->params, "lm_head.weight"))}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (!tensor_exists(bad[i].tensor)) continue;
        op_fill(tensor_view(bad[i].tensor, 0, SHAPE(1)), NAN);
        const char *said = micro_batch_first_bad(m, &micro);
        if (!said || strcmp(said, bad[i].name)) fail_msg("%s is bad, and %s is named", bad[i].name, said);
    }
    micro_batch_free(m, &micro);
    model_free(m);
}

static double loss_of(Model *m) {
    MicroBatch micro = some_batch(m, 0);
    model_forward(m, &micro);
    double loss = loss_value(micro.loss);
    micro_batch_free(m, &micro);
    return loss;
}

static double *gradient_of(const Model *m, const Param *p) {
    double *host = host_alloc(p->count * sizeof *host);
    tensor_to_doubles(host, param_grad(&m->params, p));
    return host;
}

// Along a random direction u of one tensor: <dW, u> = (L(W + e u) - L(W - e u)) / 2e. Fourth order (five
// points), so that the difference quotient is good to about 1e-11 and the bound can be tight.
static void check_direction(Model *m, Param *p) {
    double *weights = host_alloc(p->count * sizeof *weights), *moved = host_alloc(p->count * sizeof *moved);
    double *grad = gradient_of(m, p), expected = 0, norm = 0;
    tensor_to_doubles(weights, param_value(&m->params, p));
    double e = 2e-3 / sqrt((double)p->count), loss[5];
    for (int k = -2; k <= 2; k++) {
        for (int64_t j = 0; j < p->count; j++) moved[j] = weights[j] + k * e * rng_normal(11, RNG_TEST, j);
        tensor_from_doubles(param_value(&m->params, p), moved);
        loss[k + 2] = loss_of(m);
    }
    tensor_from_doubles(param_value(&m->params, p), weights);
    for (int64_t j = 0; j < p->count; j++) {
        expected += grad[j] * rng_normal(11, RNG_TEST, j);
        norm += grad[j] * grad[j];
    }
    double measured = (loss[0] - 8 * loss[1] + 8 * loss[3] - loss[4]) / (12 * e);
    if (!(fabs(measured - expected) <= 1e-7 * sqrt(norm)))
        fail_msg("%s: along a direction the loss changes by %.12g, the gradient says %.12g (norm %.3g)",
                 p->name, measured, expected, sqrt(norm));
    if (!(sqrt(norm) > 1e-6)) fail_msg("%s has no gradient to speak of: %g", p->name, sqrt(norm));
    free(weights);
    free(moved);
    free(grad);
}

static Tensor halved(void *context, const MicroBatch *micro, Tensor x) {
    (void)context, (void)micro;
    Tensor half = tensor_like(MEMORY_ACTIVATION, x);
    op_copy(half, x);
    op_scale(half, 0.5);
    return half;
}

// Regions that halve what enters and what leaves: a gradient that bypasses one is wrong.
static void check_all_gradients(bool tied, bool regions) {
    Config c = small_config(tied);
    Model *m = rough_model(&c);
    if (regions) m->sockets.region.enter = m->sockets.region.enter_backward = halved;
    if (regions) m->sockets.region.leave = m->sockets.region.leave_backward = halved;
    MicroBatch micro = some_batch(m, 0);
    model_forward(m, &micro);
    model_backward(m, &micro);
    micro_batch_free(m, &micro);
    for (int i = 0; i < m->params.count; i++) check_direction(m, &m->params.param[i]);
    model_free(m);
}

static void gradients_match_finite_differences(void **state) {
    (void)state;
    check_all_gradients(false, false);
}

static void gradients_match_finite_differences_tied(void **state) {
    (void)state;
    check_all_gradients(true, false);
}

static void gradients_match_finite_differences_of_regions(void **state) {
    (void)state;
    check_all_gradients(false, true);
}

static void backward_frees_what_forward_kept(void **state) {
    (void)state;
    Config c = small_config(false);
    Model *m = rough_model(&c);
    int64_t before = memory_account().now[MEMORY_ACTIVATION];
    MicroBatch micro = some_batch(m, 0);
    int64_t inputs = memory_account().now[MEMORY_ACTIVATION];
    model_forward(m, &micro);
    assert_true(memory_account().now[MEMORY_ACTIVATION] > inputs);
    model_backward(m, &micro);
    assert_int_equal(memory_account().now[MEMORY_ACTIVATION], inputs);
    micro_batch_free(m, &micro);
    assert_int_equal(memory_account().now[MEMORY_ACTIVATION], before);
    model_free(m);
    assert_int_equal(memory_account().now_total, 0);
}

// Between B and W, which may be far apart.
static void input_gradients_free_what_weights_do_not_need(void **state) {
    (void)state;
    Config c = small_config(false);
    Model *m = rough_model(&c);
    MicroBatch micro = some_batch(m, 0);
    model_begin_step(m, 1);
    model_forward(m, &micro);
    const Chunk whole = {0, (int)c.layers, true, true};
    chunk_backward_input(m, &micro, whole);
    for (int64_t i = 0; i < c.layers; i++) {
        const BlockKept *kept = micro.block[i];
        const Tensor done[] = {kept->x, kept->rstd1, kept->q,     kept->k,
                               kept->v, kept->x2,    kept->rstd2, kept->attention.probs};
        static const char *const name[] = {"x", "rstd1", "q", "k", "v", "x2", "rstd2", "probs"};
        for (size_t j = 0; j < sizeof done / sizeof *done; j++)
            if (tensor_exists(done[j]))
                fail_msg("%s of block %d is kept, and W needs none", name[j], (int)i);
    }
    chunk_backward_weight(m, &micro, whole);
    micro_batch_free(m, &micro);
    model_free(m);
}

// The batch is uploaded, forward and backward are queued on the device, and the only number that comes back
// is the loss. (The host never waits for a CPU; the CUDA kernels on the emulator count.)
static void a_micro_batch_waits_for_its_loss_alone(void **state) {
    (void)state;
    Config c = small_config(false);
    Model *m = rough_model(&c);
    loss_of(m);  // the device's start-up is not part of a step's cost
    int64_t before = backend_waits();
    MicroBatch micro = some_batch(m, 0);
    model_forward(m, &micro);
    model_backward(m, &micro);
    assert_int_equal(backend_waits(), before);
    assert_true(isfinite(loss_value(micro.loss)));
    assert_true(backend_waits() - before <= 1);
    micro_batch_free(m, &micro);
    model_free(m);
}

// Two micro-batches in flight, and every W as late as possible: the same bits as one after the other.
static void weight_gradients_may_come_late(void **state) {
    (void)state;
    Config c = small_config(true);
    Model *plain = rough_model(&c), *late = rough_model(&c);
    for (int i = 0; i < 2; i++) {
        MicroBatch micro = some_batch(plain, i);
        model_forward(plain, &micro);
        model_backward(plain, &micro);
        micro_batch_free(plain, &micro);
    }
    // Every unit is a stage of its own. A micro-batch adds to the embedding's gradient from the head's W on.
    const Chunk stage[] = {
        {0, 0, true, false}, {0, 1, false, false}, {1, 2, false, false}, {2, 2, false, true}};
    MicroBatch both[2] = {some_batch(late, 0), some_batch(late, 1)};
    model_begin_step(late, 2);
    model_forward(late, &both[0]);
    model_forward(late, &both[1]);
    for (int i = 1; i >= 0; i--)
        for (int s = 3; s >= 0; s--) chunk_backward_input(late, &both[i], stage[s]);
    static const int order[] = {3, 1, 2, 0};
    for (int i = 0; i < 2; i++) {
        for (int s = 0; s < 4; s++) chunk_backward_weight(late, &both[i], stage[order[s]]);
        micro_batch_free(late, &both[i]);
    }
    for (int i = 0; i < plain->params.count; i++) {
        const Param *p = &plain->params.param[i];
        double *a = gradient_of(plain, p), *b = gradient_of(late, &late->params.param[i]);
        if (memcmp(a, b, p->count * sizeof *a)) fail_msg("%s: a late W changes bits", p->name);
        free(a);
        free(b);
    }
    model_free(plain);
    model_free(late);
}

static double *logits_of(Model *m, MicroBatch *micro) {
    int64_t n = micro->b * micro->s, v = m->config.vocab;
    model_forward(m, micro);
    double *logits = host_alloc(n * v * sizeof *logits);
    tensor_to_doubles(logits, micro->head.logits);
    return logits;
}

static void later_tokens_do_not_change_earlier_logits(void **state) {
    (void)state;
    Config c = small_config(false);
    c.micro_batch = 1;
    Model *m = rough_model(&c);
    int32_t tokens[7] = {1, 2, 3, 4, 5, 6, 7}, targets[7] = {0};
    MicroBatch first = micro_batch_new(m, 0, 1, tokens, targets, 1);
    double *a = logits_of(m, &first);
    tokens[4] = 20;
    MicroBatch second = micro_batch_new(m, 0, 1, tokens, targets, 1);
    double *b = logits_of(m, &second);
    for (int64_t i = 0; i < 4 * c.vocab; i++)
        if (a[i] != b[i])
            fail_msg("logit %d of token %d sees the future", (int)(i % c.vocab), (int)(i / c.vocab));
    double change = 0;
    for (int64_t i = 4 * c.vocab; i < 7 * c.vocab; i++) change = fmax(change, fabs(a[i] - b[i]));
    assert_true(change > 1e-3);
    free(a);
    free(b);
    micro_batch_free(m, &first);
    micro_batch_free(m, &second);
    model_free(m);
}

static void positions_count_within_each_sample(void **state) {
    (void)state;
    Config c = small_config(false);
    Model *m = model_new(&c, mesh_single());
    MicroBatch micro = some_batch(m, 0);
    int32_t positions[21];
    tensor_to_host(positions, micro.positions);
    for (int i = 0; i < 21; i++) assert_int_equal(positions[i], i % 7);
    micro_batch_free(m, &micro);
    model_free(m);
}

// RoPE: only distances matter. If all positions are shifted by the same amount, the logits are the same; if
// they are stretched, they differ.
static void only_position_differences_matter(void **state) {
    (void)state;
    Config c = small_config(false);
    Model *m = rough_model(&c);
    int64_t n = c.micro_batch * c.seq;
    double *logits[3];
    for (int variant = 0; variant < 3; variant++) {
        MicroBatch micro = some_batch(m, 0);
        int32_t positions[64];
        for (int64_t i = 0; i < n; i++)
            positions[i] = (int32_t)(variant == 1   ? i % c.seq + 100
                                     : variant == 2 ? 2 * (i % c.seq)
                                                    : i % c.seq);
        tensor_from_host(micro.positions, positions);
        logits[variant] = logits_of(m, &micro);
        micro_batch_free(m, &micro);
    }
    double moved = difference("", logits[1], logits[0], n * c.vocab).relative;
    double stretched = difference("", logits[2], logits[0], n * c.vocab).relative;
    if (!(moved < 1e-12)) fail_msg("positions moved by 100 change the logits by %g", moved);
    if (!(stretched > 1e-3))
        fail_msg("positions do not matter: stretched, they change the logits by %g", stretched);
    for (int i = 0; i < 3; i++) free(logits[i]);
    model_free(m);
}

// A sample's logits do not depend on the other samples of its micro-batch, or on its place there.
static void samples_of_a_batch_are_independent(void **state) {
    (void)state;
    Config c = small_config(false);
    Model *m = rough_model(&c);
    int32_t tokens[21], targets[21] = {0};
    for (int i = 0; i < 21; i++) tokens[i] = (i * 7) % 29;
    MicroBatch all = micro_batch_new(m, 0, 3, tokens, targets, 1);
    double *together = logits_of(m, &all);
    MicroBatch last = micro_batch_new(m, 0, 1, tokens + 14, targets, 1);
    double *alone = logits_of(m, &last);
    double off = difference("", alone, together + 14 * c.vocab, 7 * c.vocab).relative;
    if (!(off < 1e-12)) fail_msg("the third sample alone gives other logits: %g", off);
    free(together);
    free(alone);
    micro_batch_free(m, &all);
    micro_batch_free(m, &last);
    model_free(m);
}

// Every shard of every weight is initialized to its slice of the whole.
static void shards_are_slices_of_the_whole(void **state) {
    (void)state;
    Config c = small_config(false);
    c.vocab = 30;
    Model *whole = model_new(&c, mesh_single());
    model_allocate(whole);
    for (int rank = 0; rank < 2; rank++) {
        Mesh mesh = mesh_single();
        mesh.tp = mesh.tp_pp = (Group){.size = 2, .rank = rank};
        Model *part = model_new(&c, mesh);
        tensor_parallel.shard(part);
        vocab_parallel.shard(part);
        model_allocate(part);
        for (int i = 0; i < whole->params.count; i++) {
            const Param *p = &part->params.param[i], *w = &whole->params.param[i];
            double *a = host_alloc(p->count * sizeof *a), *b = host_alloc(w->count * sizeof *b);
            tensor_to_doubles(a, param_value(&part->params, p));
            tensor_to_doubles(b, param_value(&whole->params, w));
            assert_true(p->dims == 1 ? p->count == w->count : 2 * p->count == w->count);
            for (int64_t r = 0; r < p->shape[0]; r++)
                for (int64_t k = 0; k < p->shape[1]; k++)
                    if (a[r * p->shape[1] + k] != b[(p->first[0] + r) * w->full[1] + p->first[1] + k])
                        fail_msg("%s of rank %d differs at (%d, %d)", p->name, rank, (int)r, (int)k);
            free(a);
            free(b);
        }
        model_free(part);
    }
    model_free(whole);
}

// ---- sockets ----

typedef struct Calls {
    int acquired, released, begun[8], ready[8], most_held, order[8], readies, last;
} Calls;

static void count_acquire(void *context, Model *m, int unit, Pass pass) {
    (void)m, (void)unit, (void)pass;
    Calls *calls = context;
    calls->acquired++;
    if (calls->acquired - calls->released > calls->most_held)
        calls->most_held = calls->acquired - calls->released;
}
static void count_release(void *context, Model *m, int unit, Pass pass) {
    (void)m, (void)unit, (void)pass;
    ((Calls *)context)->released++;
}
static void count_begin(void *context, Model *m, int unit) {
    (void)m;
    ((Calls *)context)->begun[unit]++;
}
static void count_ready(void *context, Model *m, int unit, bool last) {
    (void)m;
    Calls *calls = context;
    calls->last += last;
    calls->ready[unit]++;
    calls->order[calls->readies++] = unit;
}

static void sockets_are_called_once_per_unit(void **state) {
    (void)state;
    for (int tied = 0; tied < 2; tied++) {
        Config c = small_config(tied);
        Model *m = rough_model(&c);
        Calls calls = {0};
        m->sockets.parameters.context = m->sockets.gradients.context = &calls;
        m->sockets.parameters.acquire = count_acquire;
        m->sockets.parameters.release = count_release;
        m->sockets.gradients.begin = count_begin;
        m->sockets.gradients.ready = count_ready;
        MicroBatch micro = some_batch(m, 0);
        model_begin_step(m, 1);
        model_forward(m, &micro);
        model_backward(m, &micro);
        micro_batch_free(m, &micro);
        // Forward needs L + 2 units; backward the head and the blocks: tokens have no gradient, so the
        // embedding's weight is not read. Tied, the head reads the embedding's weight as well, in both
        // passes.
        assert_int_equal(calls.acquired, 4 + 3 + 2 * tied);
        assert_int_equal(calls.released, calls.acquired);
        assert_int_equal(calls.most_held, 1 + tied);
        const int from_last_to_first[] = {3, 2, 1, 0};
        assert_memory_equal(calls.order, from_last_to_first, sizeof from_last_to_first);
        for (int unit = 0; unit < 4; unit++) {
            assert_int_equal(calls.ready[unit], 1);
            assert_int_equal(calls.begun[unit],
                             1 + (tied && unit == 0));  // tied, both ends add to the embedding's
        }
        assert_int_equal(calls.last, 4);
        model_free(m);
    }
}

static void parameter_count_is_the_formula(void **state) {
    (void)state;
    for (int tied = 0; tied < 2; tied++) {
        Config c = small_config(tied);
        Model *m = model_new(&c, mesh_single());
        assert_int_equal(params_elements(&m->params), config_parameters(&c));
        model_free(m);
    }
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_match_finite_differences),
        cmocka_unit_test(gradients_match_finite_differences_tied),
        cmocka_unit_test(gradients_match_finite_differences_of_regions),
        cmocka_unit_test(backward_frees_what_forward_kept),
        cmocka_unit_test(input_gradients_free_what_weights_do_not_need),
        cmocka_unit_test(a_micro_batch_waits_for_its_loss_alone),
        cmocka_unit_test(weight_gradients_may_come_late),
        cmocka_unit_test(later_tokens_do_not_change_earlier_logits),
        cmocka_unit_test(positions_count_within_each_sample),
        cmocka_unit_test(a_document_includes_the_token_that_ends_it),
        cmocka_unit_test(the_first_bad_tensor_is_named),
        cmocka_unit_test(only_position_differences_matter),
        cmocka_unit_test(samples_of_a_batch_are_independent),
        cmocka_unit_test(shards_are_slices_of_the_whole),
        cmocka_unit_test(sockets_are_called_once_per_unit),
        cmocka_unit_test(parameter_count_is_the_formula),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
