// test_moe.c: a model whose blocks have experts: its gradients against finite differences, a delayed W,
// recomputation that routes again, the sockets that experts' products go through, what is counted in training
// alone, the gradients of the balancing losses, and how the biases of load balance move.
#include <math.h>
#include <omp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "06_expert_parallel/expert_parallel.h"
#include "fatal.h"
#include "tensor/device.h"
#include "tensor/rng.h"

static const char *const kinds[] = {
    "experts=5 top-k=2",
    "experts=5 top-k=1 tied=1",
    ("experts=6 top-k=2 moe=deepseek expert-groups=3 groups-kept=2 shared-experts=2 expert-ffn=7 "
     "routed-scale=2.5"),
};
enum { KINDS = 3, MICRO_BATCHES = 2 };

typedef struct Case {
    Config config;
    Model *model;
    void *plug;
    int32_t *tokens;
} Case;

// Weights large enough that a small step does not change the choice of experts.
static Case case_new(const char *kind, const Technique *technique, Recompute again) {
    char *words = format_text(
        "layers=2 hidden=12 heads=2 kv-heads=1 ffn=10 vocab=19 seq=7 micro-batch=2 dtype=f64 %s", kind);
    Case c = {.config = config_default(words)};
    free(words);
    c.config.recompute = again;
    c.model = model_new(&c.config, mesh_single());
    model_allocate(c.model);
    for (int i = 0; i < c.model->params.count; i++)
        if (c.model->params.param[i].dims == 2)
            op_scale(param_value(&c.model->params, &c.model->params.param[i]), 20);
    c.plug = technique->plug(c.model);
    if (again != RECOMPUTE_NONE) recompute.plug(c.model);
    int64_t n = c.config.micro_batch * c.config.seq * MICRO_BATCHES;
    c.tokens = host_alloc(n * sizeof *c.tokens);
    for (int64_t i = 0; i < n; i++)
        c.tokens[i] = (int32_t)(rng_bits(3, RNG_TEST, (uint64_t)i) % (uint64_t)c.config.vocab);
    return c;
}

static void case_free(Case *c, const Technique *technique) {
    // Nobody replays these counts, and a long training must not collect them.
    if (technique == &moe) assert_int_equal(((Moe *)c->plug)->ledger.count, 0);
    technique->unplug(c->model, c->plug);
    model_free(c->model);
    free(c->tokens);
    assert_int_equal(memory_account().now_total, 0);
}

static MicroBatch micro_batch(const Case *c, int64_t index) {
    const int32_t *tokens = c->tokens + index * c->config.micro_batch * c->config.seq;
    return micro_batch_new(c->model, index, c->config.micro_batch, tokens, tokens, 0.05);
}

static double loss_of(const Case *c) {
    MicroBatch micro = micro_batch(c, 0);
    model_forward(c->model, &micro);
    double loss = loss_value(micro.loss);
    micro_batch_free(c->model, &micro);
    return loss;
}

// All gradients, one after another, with micro-batches in turn, or with all Bs before all Ws.
static double *gradients(const Case *c, bool late, int64_t *count) {
    Model *m = c->model;
    MicroBatch micro[MICRO_BATCHES];
    params_zero_grads(&m->params);
    model_begin_step(m, MICRO_BATCHES);
    for (int i = 0; i < MICRO_BATCHES; i++) {
        micro[i] = micro_batch(c, i);
        model_forward(m, &micro[i]);
        if (late) chunk_backward_input(m, &micro[i], chunk_whole(m));
        else model_backward(m, &micro[i]);
    }
    for (int i = 0; i < MICRO_BATCHES; i++) {
        if (late) chunk_backward_weight(m, &micro[i], chunk_whole(m));
        micro_batch_free(m, &micro[i]);
    }
    for (int unit = 0; unit < m->params.units; unit++) assert_int_equal(m->ready_left[unit], 0);
    *count = params_elements(&m->params);
    double *grad = host_alloc((size_t)*count * sizeof *grad);
    tensor_to_doubles(grad, params_total_grad(&m->params));
    return grad;
}

// ---- finite differences ----

static double slope(const Case *c, Tensor weight, int64_t i) {
    const double step = 1e-5;
    int64_t count = tensor_count(weight);
    double *host = host_alloc((size_t)count * sizeof *host), side[2];
    tensor_to_doubles(host, weight);
    double at = host[i];
    for (int s = 0; s < 2; s++) {
        host[i] = s ? at + step : at - step;
        tensor_from_doubles(weight, host);
        side[s] = loss_of(c);
    }
    host[i] = at;
    tensor_from_doubles(weight, host);
    free(host);
    return (side[1] - side[0]) / (2 * step);
}

// Every seventh element of every weight; with emulated kernels, every seventieth.
static void check_gradients(const char *kind) {
    Case c = case_new(kind, &moe, RECOMPUTE_NONE);
    Params *p = &c.model->params;
    const int64_t apart = strstr(backend_text(), "on the CPU") ? 70 : 7;
    MicroBatch micro = micro_batch(&c, 0);
    model_begin_step(c.model, 1);
    model_forward(c.model, &micro);
    model_backward(c.model, &micro);
    micro_batch_free(c.model, &micro);
    for (int i = 0; i < p->count; i++) {
        const Param *param = &p->param[i];
        double *grad = host_alloc((size_t)param->count * sizeof *grad), error = 0, norm = 0;
        tensor_to_doubles(grad, param_total_grad(p, param));
        for (int64_t j = 0; j < param->count; j += apart) {
            double want = slope(&c, param_value(p, param), j);
            error += (grad[j] - want) * (grad[j] - want);
            norm += want * want;
        }
        // An expert without tokens has none; nor has a router that chooses a single expert.
        if (!(sqrt(error) <= 1e-7 * sqrt(norm) + 1e-10))
            fail_msg("%s, %s: off by %.3g of %.3g", kind, param->name, sqrt(error), sqrt(norm));
        free(grad);
    }
    case_free(&c, &moe);
}

static void gradients_match_finite_differences(void **state) {
    (void)state;
    for (int i = 0; i < KINDS; i++) check_gradients(kinds[i]);
}

// ---- the same gradients in other ways ----

static double distance(const double *x, const double *y, int64_t count) {
    double error = 0, norm = 0;
    for (int64_t i = 0; i < count; i++) {
        error += (x[i] - y[i]) * (x[i] - y[i]);
        norm += y[i] * y[i];
    }
    return sqrt(error / norm);
}

static void grouped_is_as_token_by_token(void **state) {
    (void)state;
    for (int i = 0; i < KINDS; i++) {
        int64_t count;
        Case grouped = case_new(kinds[i], &moe, RECOMPUTE_NONE);
        double *x = gradients(&grouped, false, &count);
        case_free(&grouped, &moe);
        Case plain = case_new(kinds[i], &token_by_token, RECOMPUTE_NONE);
        double *y = gradients(&plain, false, &count);
        case_free(&plain, &token_by_token);
        if (!(distance(x, y, count) <= 1e-13)) fail_msg("%s: %.3g", kinds[i], distance(x, y, count));
        free(x);
        free(y);
    }
}

// Logits whose exponential is no number, as a router has that a high learning rate has spoilt.
static void logits_beyond_the_exponential(void **state) {
    (void)state;
    const Technique *const both[] = {&moe, &token_by_token};
    double *grad[2];
    int64_t count;
    for (int i = 0; i < 2; i++) {
        Case c = case_new(kinds[0], both[i], RECOMPUTE_NONE);
        for (int64_t layer = 0; layer < c.config.layers; layer++)
            op_scale(param_value(&c.model->params, c.model->block[layer].router), 1000);
        grad[i] = gradients(&c, false, &count);
        case_free(&c, both[i]);
    }
    if (!(distance(grad[0], grad[1], count) <= 1e-10))
        fail_msg("off by %.3g", distance(grad[0], grad[1], count));
    free(grad[0]);
    free(grad[1]);
}

static void weight_gradients_may_come_late(void **state) {
    (void)state;
    for (int i = 0; i < KINDS; i++) {
        int64_t count;
        Case c = case_new(kinds[i], &moe, RECOMPUTE_NONE);
        double *in_turn = gradients(&c, false, &count), *late = gradients(&c, true, &count);
        assert_memory_equal(late, in_turn, (size_t)count * sizeof *late);
        free(in_turn);
        free(late);
        case_free(&c, &moe);
    }
}

static void recomputation_routes_alike(void **state) {
    (void)state;
    for (int i = 0; i < KINDS; i++) {
        int64_t count;
        Case c = case_new(kinds[i], &moe, RECOMPUTE_NONE);
        double before = clock_total().flops;
        double *once = gradients(&c, false, &count);
        double plain = clock_total().flops - before;
        case_free(&c, &moe);
        Case again = case_new(kinds[i], &moe, RECOMPUTE_FULL);
        before = clock_total().flops;
        double *twice = gradients(&again, false, &count);
        double more = clock_total().flops - before - plain,
               right = recompute_extra_flops(&again.config, again.config.micro_batch * MICRO_BATCHES);
        if (more != right) fail_msg("%s: recomputes %g FLOPs, by its formula %g", kinds[i], more, right);
        case_free(&again, &moe);
        assert_memory_equal(once, twice, (size_t)count * sizeof *once);
        free(once);
        free(twice);
    }
}

// ---- the sockets of experts: FP8 uses the linear socket, and overlapped_experts.c the moments ----

typedef struct Watch {
    Sockets before;
    int lost, moments;
    char moment[32];
} Watch;

// Forward leaves its weight in the slot, where backward must find it.
static void watched_forward(void *context, Model *m, int count, Param *const *weight, const Tensor *y,
                            Tensor x, void **kept) {
    const Sockets *before = &((Watch *)context)->before;
    before->linear.forward(before->linear.context, m, count, weight, y, x, kept);
    *kept = weight[0];
}
static void watched_backward_input(void *context, Model *m, int count, Param *const *weight, Tensor dx,
                                   const Tensor *dy, void **kept) {
    Watch *w = context;
    w->lost += *kept != weight[0];
    w->before.linear.backward_input(w->before.linear.context, m, count, weight, dx, dy, kept);
}
static void watched_backward_weight(void *context, Model *m, int count, Param *const *weight,
                                    const Tensor *dy, Tensor x, void **kept) {
    Watch *w = context;
    w->lost += *kept != weight[0];
    w->before.linear.backward_weight(w->before.linear.context, m, count, weight, dy, x, kept);
}
static void note(void *context, Moment moment) {
    Watch *w = context;
    static const char letter[] = {
        [WAITS_TO_SEND] = 'S', [WAITS] = 'W', [BEGINS] = 'B', [AMID] = 'A', [ENDS] = 'E'};
    assert_true(w->moments + 1 < (int)sizeof w->moment);
    w->moment[w->moments++] = letter[moment];
}

static void experts_go_through_sockets(void **state) {
    (void)state;
    for (int i = 0; i < KINDS; i++) {
        Case c = case_new(kinds[i], &moe, RECOMPUTE_NONE);
        Watch watch = {.before = c.model->sockets};
        c.model->sockets.linear.context = &watch;
        c.model->sockets.linear.forward = watched_forward;
        c.model->sockets.linear.backward_input = watched_backward_input;
        c.model->sockets.linear.backward_weight = watched_backward_weight;
        ((Moe *)c.plug)->at = note;
        ((Moe *)c.plug)->at_context = &watch;
        model_begin_step(c.model, 1);
        MicroBatch micro = micro_batch(&c, 0);
        model_forward(c.model, &micro);
        model_backward(c.model, &micro);
        c.model->sockets = watch.before;
        micro_batch_free(c.model, &micro);
        if (watch.lost)
            fail_msg(
                "%d linears of backward do not find in their slot what the linear socket's forward has "
                "left there: does forward call the socket, with each expert's own slot?",
                watch.lost);
        // Of two layers, forward and back.
        if (strcmp(watch.moment, "EBAEEBAEEBAEEBAE") != 0)
            fail_msg(
                "forward and backward tell moments %s, where EBAE of each is due (BEGINS, AMID, ENDS): "
                "another micro-batch could not go on meanwhile",
                watch.moment);
        case_free(&c, &moe);
    }
}

// The price divides the rows of the tables by the passes of training, of which an evaluation must not be one.
// Each pass waits for counts once, and another micro-batch may run then.
static void an_evaluation_waits_for_counts_and_enters_no_table(void **state) {
    (void)state;
    Case c = case_new(kinds[0], &moe, RECOMPUTE_NONE);
    ExpertParallel *x = expert_parallel.plug(c.model);
    Watch watch = {.before = c.model->sockets};
    x->moe->at = note;
    x->moe->at_context = &watch;
    x->moe->ledger.keeps = true;
    MicroBatch micro =
        micro_batch_new(c.model, -1, c.config.micro_batch, c.tokens, c.tokens, 0.05);  // -1: not training
    model_forward(c.model, &micro);
    micro_batch_free(c.model, &micro);
    if (x->passes + x->to[0] + x->rows_sent + x->rows_served > 0)
        fail_msg("an evaluation has added %g passes to the table of training, with %g rows", x->passes,
                 x->to[0]);
    if (x->moe->ledger.count)
        fail_msg("an evaluation has added %lld counts to the ledger of training: kept->training says no",
                 (long long)x->moe->ledger.count);
    assert_string_equal(watch.moment, "ESWBAEWESWBAEW");  // of two layers
    expert_parallel.unplug(c.model, x);
    case_free(&c, &moe);
}

// ---- no gradient stays in 16 bits ----

static void sum_all_but_experts(void *context, Model *m, int unit, bool last) {
    (void)context, (void)last;
    if (unit < m->first_expert_unit) params_accumulate(&m->params, unit);
}

static void backward(void *technique) {
    int64_t count;
    Case c = case_new("experts=5 top-k=2 dtype=bf16", technique, RECOMPUTE_NONE);
    c.model->sockets.gradients.ready = sum_all_but_experts;
    free(gradients(&c, false, &count));
}

static void experts_add_to_the_wider_sums(void **state) {
    (void)state;
    expect_fatal(backward, &moe, "the gradient of experts 1 stays in bf16");
    expect_fatal(backward, &token_by_token, "the gradient of experts 1 stays in bf16");
}

// ---- counts ----

static void parameters_are_counted(void **state) {
    (void)state;
    for (int i = 0; i < KINDS; i++) {
        Case c = case_new(kinds[i], &moe, RECOMPUTE_NONE);
        assert_int_equal(params_elements(&c.model->params), config_parameters(&c.config));
        int64_t unused =
            (c.config.experts - c.config.top_k) * 3 * c.config.hidden * config_expert_width(&c.config);
        assert_int_equal(config_active_parameters(&c.config),
                         config_parameters(&c.config) - c.config.layers * unused);
        case_free(&c, &moe);
    }
}

// ---- load balance ----

// Each layer's biases move by the rate, however far an expert is from the mean, and not at all if it is at
// the mean: 3.5 tokens in the first layer, and 1 in the second, which a sum of sixths would miss. The second
// step's gradients overflow: float16 would skip it, but its tokens have been routed.
static void biases_move_by_the_rate_towards_the_mean(void **state) {
    (void)state;
    enum { LAYERS = 2, EXPERTS = 6 };
    static int64_t taken[LAYERS][EXPERTS] = {{3, 1, 5, 6, 2, 4}, {0, 0, 0, 1, 4, 1}};
    static const double want[LAYERS][EXPERTS] = {{0.5, 0.5, -0.5, -0.5, 0.5, -0.5},
                                                 {0.5, 0.5, 0.5, 0, -0.5, 0}};
    Config config = config_default("layers=2 hidden=8 heads=2 kv-heads=1 ffn=8 seq=4 experts=6 top-k=2");
    config_set(&config, "balance-bias", 0.5);
    Trainer *t = trainer_new(&config, mesh_single(), (const Technique *[]){&moe, &load_balance, NULL});
    Model *m = t->model;
    Balance balance = ((Moe *)m->sockets.mlp.context)->balance;
    for (int step = 1; step <= 2; step++) {
        for (int layer = 0; layer < LAYERS; layer++)
            balance.backward(balance.context, NULL, layer, &(MoeKept){.own = taken[layer]});
        assert_true(m->sockets.step.accept(m->sockets.step.context, m, step == 1 ? 1 : INFINITY));
        for (int layer = 0; layer < LAYERS; layer++) {
            double bias[EXPERTS];
            tensor_to_doubles(bias, balance.bias(balance.context, layer));
            for (int i = 0; i < EXPERTS; i++)
                if (bias[i] != step * want[layer][i])
                    fail_msg(
                        "step %d of rate 0.5: expert %d of layer %d got %ld tokens, where the mean is %g, "
                        "and its bias is %g, not %g",
                        step, i, layer, (long)taken[layer][i], layer ? 1 : 3.5, bias[i],
                        step * want[layer][i]);
        }
    }
    trainer_free(t);
}

// With equal logits each score is 1 / e, and the gradients have a closed form: for expert i, of which a
// sequence of s tokens takes f_i times the mean, A (f_i - 1) / (e s) and Z 2 log(e) / (e s), over the number
// of sequences in the global batch, times the scale of the loss.
static void balance_is_a_mean_over_the_sequences_of_the_batch(void **state) {
    (void)state;
    enum { B = 2, S = 4, E = 6, K = 2, GRAD_ACC = 3 };
    Config config = config_default(
        "layers=1 hidden=8 heads=2 kv-heads=1 ffn=8 seq=4 micro-batch=2 grad-acc=3 experts=6 "
        "top-k=2 dtype=f64");
    config_set(&config, "aux-loss", 0.3);
    config_set(&config, "z-loss", 0.7);
    Trainer *t = trainer_new(&config, mesh_single(), (const Technique *[]){&moe, &load_balance, NULL});
    Balance balance = ((Moe *)t->model->sockets.mlp.context)->balance;
    t->model->grad_scale = 8;
    int32_t chosen[B * S * K] = {0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 4, 5, 2, 4, 0, 2};
    double dlogits[B * S * E], taken[B][E] = {{0}};
    int64_t own[E] = {0};
    for (int i = 0; i < B * S * K; i++) taken[i / (S * K)][chosen[i]]++, own[chosen[i]]++;
    MoeKept kept = {.logits = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(B * S, E)),
                    .dlogits = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(B * S, E)),
                    .chosen = tensor_new(MEMORY_ACTIVATION, I32, SHAPE(B * S, K)),
                    .own = own};
    op_fill(kept.logits, 1.5);
    op_fill(kept.dlogits, 0);
    tensor_from_host(kept.chosen, chosen);
    balance.backward(balance.context, &(MicroBatch){.s = S}, 0, &kept);
    tensor_to_doubles(dlogits, kept.dlogits);
    for (int i = 0; i < B * S * E; i++) {
        double f = taken[i / (S * E)][i % E] * E / (K * S), lse = 1.5 + log(E);
        double want = 8.0 / (B * GRAD_ACC) * (0.3 * (f - 1) + 0.7 * 2 * lse) / (E * S);
        if (!(fabs(dlogits[i] - want) <= 1e-14))
            fail_msg("token %d, expert %d: the balancing losses' gradient is %.15g, expected %.15g", i / E,
                     i % E, dlogits[i], want);
    }
    Tensor *const all[] = {&kept.logits, &kept.dlogits, &kept.chosen};
    for (int i = 0; i < 3; i++) tensor_free(all[i]);
    trainer_free(t);
}

// The balancing losses' gradient reaches what led to the router, too: differences see their sum with the
// cross-entropy.
static double loss_with_balance(const Case *c) {
    MicroBatch micro = micro_batch(c, 0);
    model_forward(c->model, &micro);
    double loss = loss_value(micro.loss);
    const Moe *routed = c->plug;
    for (int64_t layer = 0; layer < c->config.layers; layer++) {
        const MoeKept *kept = micro.block[layer]->mlp.more;
        Tensor losses = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(tensor_rows(kept->logits))),
               unused = tensor_like(MEMORY_ACTIVATION, kept->logits);
        op_fill(unused, 0);
        op_route_balance(losses, unused, kept->logits, kept->chosen, micro.s, (BalanceRule){3, 0.7, 1},
                         routed->rule);
        loss += op_sum(losses) / (double)(c->config.micro_batch * c->config.grad_acc);
        tensor_free(&losses);
        tensor_free(&unused);
    }
    micro_batch_free(c->model, &micro);
    return loss;
}

static void the_balancing_losses_reach_what_led_to_the_router(void **state) {
    (void)state;
    Case c = case_new(kinds[0], &moe, RECOMPUTE_NONE);
    config_set(&c.model->config, "aux-loss", 3);
    config_set(&c.model->config, "z-loss", 0.7);
    void *balance = load_balance.plug(c.model);
    Params *p = &c.model->params;
    MicroBatch micro = micro_batch(&c, 0);
    model_begin_step(c.model, 1);
    model_forward(c.model, &micro);
    model_backward(c.model, &micro);
    micro_batch_free(c.model, &micro);
    const Param *embedding = &p->param[0];
    double *grad = host_alloc((size_t)embedding->count * sizeof *grad), error = 0, norm = 0;
    tensor_to_doubles(grad, param_total_grad(p, embedding));
    Tensor weight = param_value(p, embedding);
    double *host = host_alloc((size_t)embedding->count * sizeof *host);
    tensor_to_doubles(host, weight);
    for (int64_t j = 0; j < embedding->count; j += 7) {
        double at = host[j], side[2];
        for (int s = 0; s < 2; s++) {
            host[j] = s ? at + 1e-5 : at - 1e-5;
            tensor_from_doubles(weight, host);
            side[s] = loss_with_balance(&c);
        }
        host[j] = at;
        tensor_from_doubles(weight, host);
        double want = (side[1] - side[0]) / 2e-5;
        error += (grad[j] - want) * (grad[j] - want), norm += want * want;
    }
    if (!(sqrt(error) <= 1e-7 * sqrt(norm)))
        fail_msg("%s: off by %.3g of %.3g", embedding->name, sqrt(error), sqrt(norm));
    free(grad);
    free(host);
    load_balance.unplug(c.model, balance);
    case_free(&c, &moe);
}

// Beside bf16 a router's logits are f32: in 16 bits, experts would tie that do not.
static void logits_are_not_rounded_to_16_bits(void **state) {
    (void)state;
    Case c = case_new("experts=5 top-k=2 dtype=bf16", &moe, RECOMPUTE_NONE);
    MicroBatch micro = micro_batch(&c, 0);
    model_forward(c.model, &micro);
    Tensor logits = ((MoeKept *)micro.block[0]->mlp.more)->logits,
           narrow = tensor_new(MEMORY_ACTIVATION, BF16, SHAPE(14, 5)),
           rounded = tensor_like(MEMORY_ACTIVATION, logits);
    op_copy(narrow, logits);
    op_copy(rounded, narrow);
    double exact[14 * 5], coarse[14 * 5];
    tensor_to_doubles(exact, logits);
    tensor_to_doubles(coarse, rounded);
    int finer = 0;
    for (int i = 0; i < 14 * 5; i++) finer += exact[i] != coarse[i];
    if (finer < 35) fail_msg("%d of 70 logits have more bits than bf16", finer);
    tensor_free(&narrow);
    tensor_free(&rounded);
    micro_batch_free(c.model, &micro);
    case_free(&c, &moe);
}

// A layer's router takes that layer's biases, and a layer's biases move by what that layer's experts got.
static void each_layer_has_biases_of_its_own(void **state) {
    (void)state;
    Case c = case_new(kinds[0], &moe, RECOMPUTE_NONE);
    config_set(&c.model->config, "balance-bias", 1000);
    void *plug = load_balance.plug(c.model);
    Model *m = c.model;
    const int64_t e = c.config.experts, k = c.config.top_k;
    double bias[2][5];
    for (int step = 0; step < 3; step++) {  // the last: an evaluation
        MicroBatch micro =
            micro_batch_new(m, step == 2 ? -1 : 0, c.config.micro_batch, c.tokens, c.tokens, 0.05);
        int64_t own[2][5];
        model_begin_step(m, 1);
        model_forward(m, &micro);
        for (int layer = 0; layer < 2; layer++) {
            const MoeKept *kept = micro.block[layer]->mlp.more;
            for (int64_t i = 0; i < e; i++) own[layer][i] = kept->own[i];
            double logits[14 * 5];
            int32_t chosen[14 * 2];
            tensor_to_doubles(logits, kept->logits);
            tensor_to_host(chosen, kept->chosen);
            for (int64_t t = 0; t < 14 && step >= 1; t++)
                for (int64_t i = 0; i < e; i++) {
                    int32_t last = chosen[t * k + k - 1];
                    bool took = i == chosen[t * k] || i == last;
                    if (!took &&
                        logits[t * e + i] + bias[layer][i] > logits[t * e + last] + bias[layer][last])
                        fail_msg(
                            "layer %d: token %d takes expert %d and not %d, which the layer's bias prefers",
                            layer, (int)t, (int)last, (int)i);
                }
        }
        if (step == 0) model_backward(m, &micro);
        micro_batch_free(m, &micro);
        if (step == 0) m->sockets.step.accept(m->sockets.step.context, m, 1);
        for (int layer = 0; layer < 2 && step == 0; layer++) {
            Moe *routed = c.plug;
            tensor_to_doubles(bias[layer], routed->balance.bias(routed->balance.context, layer));
            double mean = (double)(c.config.micro_batch * c.config.seq * k) / (double)e;
            for (int64_t i = 0; i < e; i++) {
                double got = (double)own[layer][i], want = 1000 * ((got < mean) - (got > mean));
                if (bias[layer][i] != want)
                    fail_msg("layer %d, expert %d: %g tokens of %g, bias %g, not %g", layer, (int)i, got,
                             mean, bias[layer][i], want);
            }
        }
    }
    load_balance.unplug(m, plug);
    case_free(&c, &moe);
}

static void check_balance(const void *config) { load_balance.check(config); }

// A layout of several techniques may ask for it on ranks that share a sequence.
static void balance_refuses_parts_of_sequences(void **state) {
    (void)state;
    Config c = config_default("experts=4 top-k=2");
    config_set(&c, "balance-bias", 0);
    config_set(&c, "capacity", 0);
    config_set(&c, "z-loss", 0);
    assert_null(refusal(check_balance, &c));
    c.cp = 2;
    const char *why = refusal(check_balance, &c);
    assert_true(why && strstr(why, "--cp 2 splits sequences"));
    c.cp = 1, c.tp = 2;
    why = refusal(check_balance, &c);
    assert_true(why && strstr(why, "--tp 2 with --sp splits sequences"));
}

// ---- the experts of another run ----

static void a_choice_that_differs_is_measured(void **state) {
    (void)state;
    const float there[] = {1, 2, 4, 3};
    const int32_t taken[] = {2, 3}, same[] = {3, 2}, other[] = {3, 1};
    Routing routed = {0};
    double own[] = {1, 2, 3, 4};
    routing_follow(&routed, own, there, 4, same, taken, 2, 2);  // the same experts in another order
    assert_true(routed.choices == 1 && routed.ties == 0 && routed.apart == 0);
    assert_true(own[0] == -INFINITY && own[1] == -INFINITY && own[2] == 3 && own[3] == 4);
    double off[] = {1, 5, 4, 6};  // by 3 twice
    routing_follow(&routed, off, there, 4, other, taken, 2, 2);
    assert_true(routed.choices == 2 && routed.ties == 1 && fabs(routed.apart - sqrt(18) / 2) < 1e-15);
    double less[] = {1, 3, 4, 3};
    routing_follow(&routed, less, there, 4, other, taken, 2, 2);
    assert_true(routed.ties == 2 && fabs(routed.apart - sqrt(18) / 2) < 1e-15);  // the largest
    Routing sum = {0};
    Model m = {.routing = &sum};
    routing_count(&m, &routed);
    routing_count(&m, &(Routing){.choices = 1, .ties = 1, .apart = 0.5});
    assert_true(sum.choices == 4 && sum.ties == 3 && sum.apart == routed.apart);
    double none[] = {NAN, 2, 4, 3};
    routing_follow(&routed, none, there, 4, other, taken, 2, 2);
    assert_true(isnan(routed.apart));
    routing_count(&m, &routed);
    assert_true(isnan(sum.apart));
}

// What is kept is also measured against the run beside: the largest distance of a token over a token's size.
static void logits_are_measured_beside_those_of_another_run(void **state) {
    (void)state;
    float logits[8] = {0};
    const float beside[] = {9, 9, 3, 4, 9, 9, 0, 5};
    const int64_t place[] = {6, 2};
    const double own[] = {3, 5, 3, 5};
    Routing r = {.logits = logits, .beside = beside};
    routing_keep(&r, place, own, 2, 2);
    assert_true(logits[6] == 3 && logits[7] == 5 && logits[2] == 3 && logits[3] == 5 && logits[0] == 0);
    assert_true(fabs(r.off - 3 / sqrt(34)) < 1e-15);
}

// A block's tokens take the followed run's experts, and the distance of their logits is relative to a
// token's.
static void the_followed_run_decides(void **state) {
    (void)state;
    const Technique *const both[] = {&moe, &token_by_token};
    for (int i = 0; i < 2; i++) {
        Case c = case_new("layers=1 experts=5 top-k=2", both[i], RECOMPUTE_NONE);
        enum { N = 14, E = 5 };
        float first[N * E], moved[N * E];
        double norm = 0;
        Routing keeps = {.logits = first}, follows = {.followed = moved};
        c.model->routing = &keeps;
        loss_of(&c);
        for (int j = 0; j < N * E; j++) moved[j] = first[j], norm += (double)first[j] * first[j];
        int worst = 0;
        for (int j = 1; j < E; j++) worst = first[j] < first[worst] ? j : worst;
        moved[worst] += 100;  // the first token takes it
        c.model->routing = &follows;
        MicroBatch micro = micro_batch(&c, 0);
        model_begin_step(c.model, 1);
        model_forward(c.model, &micro);
        model_backward(c.model, &micro);
        micro_batch_free(c.model, &micro);
        const double want = 100 / sqrt(norm / N);
        if (follows.ties != 1 || !(fabs(follows.apart - want) < 1e-5 * want))
            fail_msg("%s: %d ties, %g apart, and not %g", both[i]->name, (int)follows.ties, follows.apart,
                     want);
        c.model->routing = NULL;
        case_free(&c, both[i]);
    }
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    omp_set_num_threads(1);  // the children of expect_fatal do not inherit a team of threads
    const struct CMUnitTest tests[] = {
        // first: the processes that it forks must not have used a GPU
        cmocka_unit_test(experts_add_to_the_wider_sums),
        cmocka_unit_test(gradients_match_finite_differences),
        cmocka_unit_test(grouped_is_as_token_by_token),
        cmocka_unit_test(logits_beyond_the_exponential),
        cmocka_unit_test(weight_gradients_may_come_late),
        cmocka_unit_test(recomputation_routes_alike),
        cmocka_unit_test(experts_go_through_sockets),
        cmocka_unit_test(an_evaluation_waits_for_counts_and_enters_no_table),
        cmocka_unit_test(parameters_are_counted),
        cmocka_unit_test(balance_is_a_mean_over_the_sequences_of_the_batch),
        cmocka_unit_test(the_balancing_losses_reach_what_led_to_the_router),
        cmocka_unit_test(logits_are_not_rounded_to_16_bits),
        cmocka_unit_test(each_layer_has_biases_of_its_own),
        cmocka_unit_test(balance_refuses_parts_of_sequences),
        cmocka_unit_test(a_choice_that_differs_is_measured),
        cmocka_unit_test(logits_are_measured_beside_those_of_another_run),
        cmocka_unit_test(the_followed_run_decides),
        cmocka_unit_test(biases_move_by_the_rate_towards_the_mean),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
