// test_experts.c: the operations of a mixture of experts against plain loops, and their gradients against
// finite differences.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "arrays.h"
#include "fatal.h"
#include "tensor/ops.h"

static const RouteRule softmax = {false, 1, 1, 1}, sigmoids = {true, 1, 1, 2.5};

typedef struct Case {
    int64_t n, e, k;
    RouteRule rule;
    bool bias;
} Case;
static const Case cases[] = {
    {1, 1, 1, {false, 1, 1, 1}, false},   {37, 8, 2, {false, 1, 1, 1}, false},
    {300, 5, 5, {false, 1, 1, 1}, false}, {64, 16, 1, {true, 1, 1, 1}, false},
    {64, 16, 3, {true, 1, 1, 2.5}, true}, {129, 32, 6, {true, 8, 3, 2.5}, true},
    {50, 12, 2, {true, 12, 2, 1}, false}, {50, 64, 4, {true, 64, 5, 1}, true},
    {60, 16, 4, {false, 1, 1, 1}, true},
};
enum { CASES = sizeof cases / sizeof *cases };

// ---- the choice of experts: by counting how many rank before, which needs no maximum and no search ----

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static int64_t before(const double *value, int64_t count, int64_t i) {
    int64_t number = 0;
    for (int64_t j = 0; j < count; j++) number += value[j] > value[i] || (value[j] == value[i] && j < i);
    return number;
}

static void expected_row(const Case *c, int32_t *chosen, double *weights, const double *logits,
                         const double *bias) {
    int64_t each = c->e / c->rule.groups;
    double value[64], group[64], open[64], sum = 0;
    for (int64_t i = 0; i < c->e; i++)
        value[i] = (c->rule.by_sigmoid ? sigmoid(logits[i]) : logits[i]) + (bias ? bias[i] : 0);
    for (int64_t g = 0; g < c->rule.groups; g++) {
        group[g] = 0;
        for (int64_t i = 0; i < each; i++)
            if (before(value + g * each, each, i) < 2) group[g] += value[g * each + i];
    }
    for (int64_t i = 0; i < c->e; i++)
        open[i] = before(group, c->rule.groups, i / each) < c->rule.kept ? value[i] : -INFINITY;
    for (int64_t i = 0; i < c->e; i++)
        if (before(open, c->e, i) < c->k) chosen[before(open, c->e, i)] = (int32_t)i;
    for (int64_t j = 0; j < c->k; j++) {
        weights[j] = c->rule.by_sigmoid ? sigmoid(logits[chosen[j]]) : exp(logits[chosen[j]]);
        sum += weights[j];
    }
    for (int64_t j = 0; j < c->k; j++) weights[j] *= c->rule.scale / sum;
}

static void check_route(const Case *c, DType type, bool ties) {
    Array logits = random_array(type, c->n, c->e, 1), bias = random_array(type, 1, c->e, 2);
    for (int64_t i = 0; i < logits.count && ties; i++) logits.x[i] = floor(logits.x[i]);  // few values
    array_write(&logits);
    Array chosen = array_new(I32, c->n, c->k, -1), weights = poisoned(type, c->n, c->k);
    op_route_forward(chosen.t, weights.t, logits.t, c->bias ? bias.t : (Tensor){0}, c->rule);
    array_read(&chosen);
    array_read(&weights);
    double *want = zeros(c->n * c->k), *want_chosen = zeros(c->n * c->k);
    for (int64_t i = 0; i < c->n; i++) {
        int32_t row[64];
        expected_row(c, row, want + i * c->k, logits.x + i * c->e, c->bias ? bias.x : NULL);
        for (int64_t j = 0; j < c->k; j++) want_chosen[i * c->k + j] = row[j];
    }
    assert_exact("chosen", &chosen, want_chosen);
    assert_close("weights", &weights, want, 16 + (double)c->k);
    free(want);
    free(want_chosen);
    FREE(&logits, &bias, &chosen, &weights);
}

static void the_best_experts_are_chosen_and_of_equal_ones_the_first(void **state) {
    (void)state;
    for (int i = 0; i < CASES; i++)
        for (int ties = 0; ties < 2; ties++) {
            check_route(&cases[i], F64, ties);
            if (!ties || !cases[i].bias) check_route(&cases[i], F32, ties);
        }
}

static void a_token_of_nan_has_experts_all_the_same(void **state) {
    (void)state;
    Array logits = array_new(F32, 2, 6, NAN), chosen = array_new(I32, 2, 3, -1),
          weights = poisoned(F32, 2, 3);
    for (int groups = 1; groups <= 3; groups += 2) {
        op_route_forward(chosen.t, weights.t, logits.t, (Tensor){0}, (RouteRule){true, groups, groups, 1});
        array_read(&chosen);
        array_read(&weights);
        for (int i = 0; i < 6; i++) {
            assert_int_equal((int)chosen.x[i], i % 3);
            assert_true(isnan(weights.x[i]));
        }
    }
    FREE(&logits, &chosen, &weights);
}

static void sigmoids_far_from_zero_stay_numbers(void **state) {
    (void)state;
    Array logits = array_new(F32, 1, 4, -200), chosen = array_new(I32, 1, 2, -1),
          weights = poisoned(F32, 1, 2);
    logits.x[2] = 300, logits.x[3] = 90;
    array_write(&logits);
    op_route_forward(chosen.t, weights.t, logits.t, (Tensor){0}, sigmoids);
    array_read(&chosen);
    array_read(&weights);
    assert_int_equal((int)chosen.x[0], 2);
    assert_int_equal((int)chosen.x[1], 3);
    assert_true(weights.x[0] == 1.25 && weights.x[1] == 1.25);
    FREE(&logits, &chosen, &weights);
}

// A bias may put an expert first whose logit is so far below another's that exp() of the distance overflows.
static void softmax_of_a_biased_choice_stays_numbers(void **state) {
    (void)state;
    const double logit[] = {-1, 200, 0}, add[] = {300, 0, -100};
    Array logits = array_new(F32, 1, 3, 0), bias = array_new(F32, 1, 3, 0), chosen = array_new(I32, 1, 2, -1),
          weights = poisoned(F32, 1, 2);
    for (int i = 0; i < 3; i++) logits.x[i] = logit[i], bias.x[i] = add[i];
    array_write(&logits);
    array_write(&bias);
    op_route_forward(chosen.t, weights.t, logits.t, bias.t, softmax);
    array_read(&chosen);
    array_read(&weights);
    assert_int_equal((int)chosen.x[0], 0);
    assert_int_equal((int)chosen.x[1], 1);
    assert_true(weights.x[0] == 0 && weights.x[1] == 1);
    FREE(&logits, &bias, &chosen, &weights);
}

// If all sigmoids of a token have become 0, so have its weights: no NaN.
static void sigmoids_that_have_become_zero_stay_numbers(void **state) {
    (void)state;
    Array logits = array_new(F32, 1, 4, -200), chosen = array_new(I32, 1, 2, -1),
          weights = poisoned(F32, 1, 2);
    op_route_forward(chosen.t, weights.t, logits.t, (Tensor){0}, sigmoids);
    array_read(&weights);
    assert_true(weights.x[0] == 0 && weights.x[1] == 0);
    FREE(&logits, &chosen, &weights);
}

// Biases may make all values of a group negative: the second best of {-1, -5} is -5 and not 0.
static void groups_of_negative_values_are_compared(void **state) {
    (void)state;
    const double add[] = {-1, -5, -2, -2};
    Array logits = array_new(F32, 1, 4, 0), bias = array_new(F32, 1, 4, 0),
          chosen = array_new(I32, 1, 2, -1), weights = poisoned(F32, 1, 2);
    for (int i = 0; i < 4; i++) bias.x[i] = add[i];
    array_write(&bias);
    op_route_forward(chosen.t, weights.t, logits.t, bias.t, (RouteRule){true, 2, 1, 1});
    array_read(&chosen);
    assert_int_equal((int)chosen.x[0], 2);
    assert_int_equal((int)chosen.x[1], 3);
    FREE(&logits, &bias, &chosen, &weights);
}

// The balancing losses' softmax subtracts the best logit, wherever it is.
static void balance_of_logits_beyond_the_exponential(void **state) {
    (void)state;
    Array logits = array_new(F32, 1, 3, 0), chosen = array_new(I32, 1, 1, 1), losses = poisoned(F32, 1, 1),
          dlogits = array_new(F32, 1, 3, 0);
    logits.x[1] = 200;
    array_write(&logits);
    op_route_balance(losses.t, dlogits.t, logits.t, chosen.t, 1, (BalanceRule){0.5, 0.25, 1}, softmax);
    array_read(&losses);
    array_read(&dlogits);
    assert_true(losses.x[0] == 0.5 * 3 + 0.25 * 200 * 200);
    assert_true(dlogits.x[0] == 0 && dlogits.x[1] == 2 * 0.25 * 200 && dlogits.x[2] == 0);
    FREE(&logits, &chosen, &losses, &dlogits);
}

// Nor is the balancing loss NaN, or its gradient, if all sigmoids of a token have become 0.
static void balance_of_sigmoids_that_have_become_zero(void **state) {
    (void)state;
    Array logits = array_new(F32, 1, 4, -200), chosen = array_new(I32, 1, 2, 1),
          losses = poisoned(F32, 1, 1), dlogits = array_new(F32, 1, 4, 0);
    op_route_balance(losses.t, dlogits.t, logits.t, chosen.t, 1, (BalanceRule){0.5, 0, 1}, sigmoids);
    array_read(&losses);
    array_read(&dlogits);
    assert_true(losses.x[0] == 0);
    for (int i = 0; i < 4; i++) assert_true(dlogits.x[i] == 0);
    FREE(&logits, &chosen, &losses, &dlogits);
}

// ---- the weights' gradient ----

typedef struct Routed {
    Array *logits, *dweights, *bias;
    Tensor chosen, weights;
    RouteRule rule;
} Routed;

static double weights_loss(void *context) {
    Routed *r = context;
    op_route_forward(r->chosen, r->weights, r->logits->t, r->bias ? r->bias->t : (Tensor){0}, r->rule);
    return weighted(r->weights, r->dweights);
}

static void the_weights_gradient_is_that_of_differences(void **state) {
    (void)state;
    for (int i = 1; i < CASES; i++) {
        const Case *c = &cases[i];
        if (c->k == 1) continue;  // its weight is a constant
        int64_t n = c->n < 20 ? c->n : 20;
        Array logits = random_array(F64, n, c->e, 3), dweights = random_array(F64, n, c->k, 4);
        Array bias = random_array(F64, 1, c->e, 2), dlogits = poisoned(F64, n, c->e);
        Array chosen = array_new(I32, n, c->k, -1), weights = poisoned(F64, n, c->k);
        Routed r = {&logits, &dweights, c->bias ? &bias : NULL, chosen.t, weights.t, c->rule};
        weights_loss(&r);
        op_route_backward(dlogits.t, dweights.t, weights.t, chosen.t, logits.t, c->rule);
        array_read(&dlogits);
        assert_gradient("route_backward", &logits, dlogits.x, weights_loss, &r);
        FREE(&logits, &dweights, &bias, &dlogits, &chosen, &weights);
    }
}

// A single choice has no weight to learn: its gradient is 0, not that of a softmax over all experts.
static void a_single_expert_has_no_gradient_of_its_weight(void **state) {
    (void)state;
    const RouteRule rules[] = {softmax, sigmoids};
    for (int i = 0; i < 2; i++) {
        Array logits = random_array(F64, 9, 4, 5), dweights = random_array(F64, 9, 1, 6);
        Array chosen = array_new(I32, 9, 1, -1), weights = poisoned(F64, 9, 1),
              dlogits = poisoned(F64, 9, 4);
        op_route_forward(chosen.t, weights.t, logits.t, (Tensor){0}, rules[i]);
        op_route_backward(dlogits.t, dweights.t, weights.t, chosen.t, logits.t, rules[i]);
        array_read(&dlogits);
        for (int64_t j = 0; j < dlogits.count; j++) assert_true(fabs(dlogits.x[j]) < 1e-15);
        FREE(&logits, &dweights, &chosen, &weights, &dlogits);
    }
}

// ---- balance ----

typedef struct Balanced {
    Array *logits;
    Tensor losses, dlogits, chosen;
    int64_t s;
    BalanceRule balance;
    RouteRule rule;
} Balanced;

// The tokens' choice of experts does not change.
static double balance_loss(void *context) {
    Balanced *b = context;
    op_route_balance(b->losses, b->dlogits, b->logits->t, b->chosen, b->s, b->balance, b->rule);
    return op_sum(b->losses);
}

// For all sequences, spelled out.
static double expected_balance(const Array *logits, const Array *chosen, const Balanced *b, int64_t e,
                               int64_t k) {
    double loss = 0;
    int64_t s = b->s;
    for (int64_t first = 0; first < logits->count / e; first += s)
        for (int64_t i = 0; i < e; i++) {
            double f = 0, mean = 0, z = 0;
            for (int64_t t = first; t < first + s; t++) {
                double sum = 0, exponentials = 0;
                for (int64_t j = 0; j < e; j++) {
                    double logit = logits->x[t * e + j];
                    sum += b->rule.by_sigmoid ? sigmoid(logit) : exp(logit);
                    exponentials += exp(logit);
                }
                double logit = logits->x[t * e + i];
                mean += (b->rule.by_sigmoid ? sigmoid(logit) : exp(logit)) / sum / (double)s;
                z += log(exponentials) * log(exponentials) / (double)s;
                for (int64_t j = 0; j < k; j++) f += chosen->x[t * k + j] == (double)i;
            }
            loss += b->balance.auxiliary * (double)e * f / (double)(k * s) * mean +
                    b->balance.z * z / (double)e;
        }
    return loss;
}

static void balance_is_asked_of_each_sequence(void **state) {
    (void)state;
    const struct {
        int64_t b, s, e, k;
        BalanceRule balance;
        RouteRule rule;
    } of[] = {{3, 7, 5, 2, {0.1, 0, 1}, {false, 1, 1, 1}},
              {2, 9, 8, 3, {0.1, 0.03, 1}, {false, 1, 1, 1}},
              {4, 1, 3, 1, {0, 0.5, 1}, {false, 1, 1, 1}},
              {3, 6, 8, 2, {0.2, 0, 1}, {true, 2, 1, 2.5}}};
    for (int i = 0; i < 4; i++) {
        int64_t n = of[i].b * of[i].s, e = of[i].e, k = of[i].k;
        Array logits = random_array(F64, n, e, 3), losses = poisoned(F64, 1, n),
              dlogits = array_new(F64, n, e, 0);
        Array twice = array_new(F64, n, e, 0.5), chosen = array_new(I32, n, k, -1),
              weights = poisoned(F64, n, k);
        op_route_forward(chosen.t, weights.t, logits.t, (Tensor){0}, of[i].rule);
        array_read(&chosen);
        Balanced b = {&logits, losses.t, dlogits.t, chosen.t, of[i].s, of[i].balance, of[i].rule};
        double loss = balance_loss(&b), want = expected_balance(&logits, &chosen, &b, e, k);
        if (!(fabs(loss - want) <= 1e-14 * want)) fail_msg("loss %.17g, expected %.17g", loss, want);
        array_read(&dlogits);
        Array scratch = array_new(F64, n, e, 0);
        b.dlogits = scratch.t;
        assert_gradient("route_balance", &logits, dlogits.x, balance_loss, &b);
        b.dlogits = twice.t, b.balance.scale = 2;  // added to what is there, and scaled
        balance_loss(&b);
        array_read(&twice);
        for (int64_t j = 0; j < n * e; j++) assert_true(fabs(twice.x[j] - 0.5 - 2 * dlogits.x[j]) < 1e-15);
        FREE(&logits, &losses, &dlogits, &twice, &chosen, &weights, &scratch);
    }
}

// ---- rows sorted by expert ----

// Choices: all tokens to the last expert; experts without a token; any.
static Array choices(int64_t n, int64_t k, int64_t e, int kind) {
    Array chosen = random_tokens(n * k, kind == 1 && e > 2 ? e / 2 : e, 7);
    for (int64_t i = 0; i < n * k && kind == 0; i++) chosen.x[i] = (double)(e - 1);
    array_write(&chosen);
    chosen.t = tensor_view(chosen.t, 0, SHAPE(n, k));
    return chosen;
}

static void rows_stand_in_the_order_of_experts_and_of_tokens(void **state) {
    (void)state;
    const int64_t sizes[][3] = {{1, 1, 1}, {31, 2, 8}, {600, 3, 5}, {4, 1, 64}};
    for (int size = 0; size < 4; size++)
        for (int kind = 0; kind < 3; kind++) {
            int64_t n = sizes[size][0], k = sizes[size][1], e = sizes[size][2], row = 0;
            Array chosen = choices(n, k, e, kind), tokens = array_new(I32, n * k, 1, -1);
            Array place = array_new(I32, n, k, -1), counts = array_new(I32, e, 1, -1);
            op_route_order(tokens.t, place.t, counts.t, chosen.t);
            array_read(&tokens);
            array_read(&place);
            array_read(&counts);
            for (int64_t expert = 0; expert < e; expert++) {
                int64_t first = row;
                for (int64_t i = 0; i < n * k; i++) {
                    if ((int64_t)chosen.x[i] != expert) continue;
                    assert_int_equal((int64_t)place.x[i], row);
                    assert_int_equal((int64_t)tokens.x[row++], i / k);
                }
                assert_int_equal((int64_t)counts.x[expert], row - first);
            }
            assert_int_equal(row, n * k);
            free(chosen.x);
            tensor_free(&chosen.t);
            FREE(&tokens, &place, &counts);
        }
}

// A pair is kept if fewer than `room` earlier pairs of its sequence have its expert.
static void an_expert_takes_the_first_of_each_sequence(void **state) {
    (void)state;
    const int64_t sizes[][4] = {{1, 1, 1, 1}, {30, 10, 2, 8}, {600, 200, 3, 5}, {4, 2, 1, 64}};
    for (int size = 0; size < 4; size++)
        for (int64_t room = 1; room < 40; room += 13) {
            int64_t n = sizes[size][0], s = sizes[size][1], k = sizes[size][2], e = sizes[size][3];
            Array chosen = choices(n, k, e, 1), left = array_new(I32, n, k, -1);
            op_route_capacity(left.t, chosen.t, s, e, room);
            array_read(&left);
            for (int64_t i = 0; i < n * k; i++) {
                int64_t before = 0;
                for (int64_t j = i / (s * k) * s * k; j < i; j++) before += chosen.x[j] == chosen.x[i];
                assert_int_equal((int64_t)left.x[i], before < room ? (int64_t)chosen.x[i] : e);
            }
            free(chosen.x);
            tensor_free(&chosen.t);
            FREE(&left);
        }
}

// Each node of a token's experts occurs once, and `count` fills the rest; an expert of another node is not
// one of this node's.
static void a_token_goes_to_each_node_once(void **state) {
    (void)state;
    const int64_t n = 50, k = 4, each = 3, count = 4;
    Array chosen = choices(n, k, each * count, 1), nodes = array_new(I32, n, k, -1),
          within = array_new(I32, n, k, -1), row = array_new(I32, 1, k, -1),
          second = array_new(I32, 1, 1, 1);
    op_route_nodes(nodes.t, chosen.t, each, count);
    op_route_within(within.t, chosen.t, 2 * each, each);
    op_gather_rows(row.t, chosen.t, second.t);
    array_read(&nodes);
    array_read(&within);
    array_read(&row);
    for (int64_t i = 0; i < n; i++) {
        int64_t told[5] = {0}, has[5] = {0}, last = 0;
        for (int64_t j = i * k; j < (i + 1) * k; j++) {
            int64_t node = (int64_t)chosen.x[j] / each, expert = (int64_t)chosen.x[j] - 2 * each;
            has[node] = 1;
            told[(int64_t)nodes.x[j]]++;
            assert_true(last <= (int64_t)nodes.x[j] / count);  // none but `count` behind the first of them
            last = (int64_t)nodes.x[j] / count;
            assert_int_equal((int64_t)within.x[j], node == 2 ? expert : each);
        }
        for (int64_t node = 0; node < count; node++) assert_int_equal(told[node], has[node]);
    }
    for (int64_t j = 0; j < k; j++) assert_int_equal((int64_t)row.x[j], (int64_t)chosen.x[k + j]);
    free(chosen.x);
    tensor_free(&chosen.t);
    FREE(&nodes, &within, &row, &second);
}

// ---- to the experts and back ----

// The first `real` of n k pairs have a row, and the others count as zeros.
static void check_rows(DType dtype, int64_t n, int64_t k, int64_t e, int64_t h, int64_t real) {
    Array chosen = choices(n, k, e, 2), tokens = array_new(I32, n * k, 1, -1);
    Array place = array_new(I32, n, k, -1), counts = array_new(I32, e, 1, -1);
    Array x = random_array(dtype, n, h, 1), z = random_array(dtype, real, h, 2),
          dy = random_array(dtype, n, h, 3);
    Array weights = random_array(full(dtype), n, k, 4), rows = poisoned(dtype, n * k, h);
    Array y = poisoned(dtype, n, h), sum = poisoned(dtype, n, h), dz = poisoned(dtype, real, h);
    Array dweights = poisoned(full(dtype), n, k);
    op_route_order(tokens.t, place.t, counts.t, chosen.t);
    op_gather_rows(rows.t, x.t, tokens.t);
    op_combine_forward(y.t, z.t, place.t, weights.t);
    op_combine_forward(sum.t, z.t, place.t, (Tensor){0});
    op_combine_backward(dz.t, dweights.t, dy.t, z.t, place.t, weights.t);
    Array *const read[] = {&place, &rows, &y, &sum, &dz, &dweights};
    for (int i = 0; i < 6; i++) array_read(read[i]);
    double *want_rows = zeros(n * k * h), *want_y = zeros(n * h), *want_sum = zeros(n * h);
    double *want_dz = zeros(real * h), *want_dweights = zeros(n * k);
    for (int64_t i = 0; i < n * k; i++)
        for (int64_t c = 0; c < h; c++) {
            int64_t at = (int64_t)place.x[i] * h + c, token = i / k * h + c;
            want_rows[at] = x.x[token];
            if (place.x[i] >= real) continue;
            want_y[token] += weights.x[i] * z.x[at];
            want_sum[token] += z.x[at];
            want_dz[at] = weights.x[i] * dy.x[token];
            want_dweights[i] += dy.x[token] * z.x[at];
        }
    assert_exact("gather_rows", &rows, want_rows);
    assert_close("combine_forward", &y, want_y, 2 * (double)k);
    assert_close("combine_forward without weights", &sum, want_sum, (double)k);
    assert_close("combine_backward's dz", &dz, want_dz, 1);
    assert_close("combine_backward's dweights", &dweights, want_dweights, 2 * (double)h);
    double *wanted[] = {want_rows, want_y, want_sum, want_dz, want_dweights};
    for (int i = 0; i < 5; i++) free(wanted[i]);
    free(chosen.x);
    tensor_free(&chosen.t);
    FREE(&tokens, &place, &counts, &x, &z, &dy, &weights, &rows, &y, &sum, &dz, &dweights);
}

static void rows_go_to_experts_and_come_back(void **state) {
    (void)state;
    for (int type = 0; type < 4; type++) {
        check_rows(all_dtypes[type], 1, 1, 1, 1, 1);
        check_rows(all_dtypes[type], 37, 2, 8, 33, 50);
        check_rows(all_dtypes[type], 200, 3, 5, 70, 600);
    }
}

// ---- what is refused ----

static Tensor tensor(DType dtype, int64_t rows, int64_t columns) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(rows, columns));
    if (dtype != I32) op_fill(t, 0);
    return t;
}

static void too_many_experts(void) {
    op_route_forward(tensor(I32, 3, 5), tensor(F32, 3, 5), tensor(F32, 3, 4), (Tensor){0}, softmax);
}
static void narrow_logits(void) {
    op_route_forward(tensor(I32, 3, 2), tensor(BF16, 3, 2), tensor(BF16, 3, 4), (Tensor){0}, softmax);
}
static void groups_that_do_not_divide(void) {
    op_route_forward(tensor(I32, 3, 2), tensor(F32, 3, 2), tensor(F32, 3, 4), (Tensor){0},
                     (RouteRule){true, 3, 2, 1});
}
static void no_such_expert(void) {
    Array chosen = array_new(I32, 3, 2, 1), tokens = array_new(I32, 6, 1, 0),
          place = array_new(I32, 3, 2, 0), counts = array_new(I32, 4, 1, 0);
    chosen.x[5] = 4;
    array_write(&chosen);
    op_route_order(tokens.t, place.t, counts.t, chosen.t);
}
static void too_many_nodes(void) {
    Array chosen = array_new(I32, 1, 3, 0);
    int32_t numbers[] = {0, 2, 5};
    tensor_from_host(chosen.t, numbers);
    op_route_nodes(tensor(I32, 1, 2), chosen.t, 2, 3);
}
static void no_such_row(void) {
    Array place = array_new(I32, 3, 2, 1);
    place.x[4] = -1;
    array_write(&place);
    op_combine_forward(tensor(F32, 3, 7), tensor(F32, 6, 7), place.t, (Tensor){0});
}

static void more_rows_than_32_bits_count(void) {
    const int64_t n = 1 << 29, k = 4;
    device_dry_run(true);  // which has room for them
    op_route_order(tensor(I32, 1, n * k), tensor(I32, n, k), tensor(I32, 1, 4), tensor(I32, n, k));
}

static void more_experts_than_kept_groups_have(void) {
    op_route_forward(tensor(I32, 3, 3), tensor(F32, 3, 3), tensor(F32, 3, 4), (Tensor){0},
                     (RouteRule){true, 2, 1, 1});
}
static void more_groups_than_bits(void) {
    op_route_forward(tensor(I32, 3, 2), tensor(F32, 3, 2), tensor(F32, 3, 128), (Tensor){0},
                     (RouteRule){true, 128, 2, 1});
}
static void no_scale(void) {
    op_route_forward(tensor(I32, 3, 2), tensor(F32, 3, 2), tensor(F32, 3, 4), (Tensor){0},
                     (RouteRule){true, 1, 1, 0});
}
static void no_whole_sequences(void) {
    op_route_capacity(tensor(I32, 3, 2), array_new(I32, 3, 2, 1).t, 2, 4, 1);
}
static void z_of_sigmoids(void) {
    op_route_balance(tensor(F32, 1, 4), tensor(F32, 4, 4), tensor(F32, 4, 4), array_new(I32, 4, 2, 1).t, 2,
                     (BalanceRule){0, 1, 1}, sigmoids);
}
static void more_rows_than_pairs(void) {
    op_combine_forward(tensor(F32, 3, 7), tensor(F32, 7, 7), array_new(I32, 3, 2, 1).t, (Tensor){0});
}
static void no_such_row_backward(void) {
    Array place = array_new(I32, 3, 2, 1);
    place.x[4] = 6;
    array_write(&place);
    op_combine_backward(tensor(F32, 6, 7), tensor(F32, 3, 2), tensor(F32, 3, 7), tensor(F32, 6, 7), place.t,
                        tensor(F32, 3, 2));
}

static Tensor one_choice_of_9(void) {
    Array chosen = array_new(I32, 4, 1, 1);
    chosen.x[3] = 9;
    array_write(&chosen);
    return chosen.t;
}
static void no_such_expert_backward(void) {
    op_route_backward(tensor(F32, 4, 9), tensor(F32, 4, 1), tensor(F32, 4, 1), one_choice_of_9(),
                      tensor(F32, 4, 9), softmax);
}
static void no_such_expert_of_a_capacity(void) {
    op_route_capacity(tensor(I32, 4, 1), one_choice_of_9(), 2, 9, 1);
}
static void no_such_expert_of_a_node(void) { op_route_nodes(tensor(I32, 4, 1), one_choice_of_9(), 3, 3); }
static void no_such_expert_of_balance(void) {
    op_route_balance(tensor(F32, 1, 4), tensor(F32, 4, 9), tensor(F32, 4, 9), one_choice_of_9(), 2,
                     (BalanceRule){1, 0, 1}, softmax);
}
static void narrow_logits_backward(void) {
    op_route_backward(tensor(BF16, 3, 4), tensor(BF16, 3, 2), tensor(BF16, 3, 2), tensor(I32, 3, 2),
                      tensor(BF16, 3, 4), softmax);
}
static void narrow_logits_of_balance(void) {
    op_route_balance(tensor(BF16, 1, 3), tensor(BF16, 3, 4), tensor(BF16, 3, 4), tensor(I32, 3, 2), 3,
                     (BalanceRule){1, 0, 1}, softmax);
}
static void no_room(void) { op_route_capacity(tensor(I32, 4, 1), array_new(I32, 4, 1, 1).t, 2, 4, 0); }
static void experts_below_zero(void) {
    op_route_within(tensor(I32, 4, 1), array_new(I32, 4, 1, 1).t, -1, 2);
}

static void call_and_wait(void *call) {
    call_function(call);
    tensor_to_host(&(float){0}, tensor(F32, 1, 1));  // what a GPU has found is reported by the next wait
}

// `wrong`, in a process of its own, ends with this sentence.
static void assert_refused(void (*wrong)(void), const char *sentence) {
    expect_fatal(call_and_wait, &(Call){wrong}, sentence);
}

static void wrong_choices_are_refused(void **state) {
    (void)state;
    assert_refused(too_many_experts, "route_forward: 5 of 4 experts");
    assert_refused(narrow_logits, "route_forward: logits is (3, 4) bf16; routing is in f32 or f64");
    assert_refused(groups_that_do_not_divide, "in 2 of 3 groups of equal size");
    assert_refused(no_such_expert, "route_order: number 5 of the choices is 4, not in [0, 4)");
    assert_refused(more_rows_than_32_bits_count,
                   "route_order: 536870912 tokens of 4 experts each are more than 2^31 - 1 rows");
    assert_refused(too_many_nodes, "route_nodes: token 0 goes to 3 nodes, and 2 would fit");
    assert_refused(more_experts_than_kept_groups_have, "route_forward: 3 of 4 experts, in 1 of 2 groups");
    assert_refused(more_groups_than_bits, "in 2 of 128 groups of equal size, at most 64");
    assert_refused(no_such_expert_backward, "route_backward: number 3 of the choices is 9, not in [0, 9)");
    assert_refused(no_such_expert_of_a_capacity,
                   "route_capacity: number 3 of the choices is 9, not in [0, 9)");
    assert_refused(no_such_expert_of_a_node, "route_nodes: number 3 of the choices is 9, not in [0, 9)");
    assert_refused(no_such_expert_of_balance, "route_balance: number 3 of the choices is 9, not in [0, 9)");
    assert_refused(narrow_logits_backward,
                   "route_backward: logits is (3, 4) bf16; routing is in f32 or f64");
    assert_refused(narrow_logits_of_balance,
                   "route_balance: logits is (3, 4) bf16; routing is in f32 or f64");
    assert_refused(no_room, "route_capacity: 4 experts have room for 0 pairs");
    assert_refused(experts_below_zero, "route_within: 2 experts from number -1 on");
    assert_refused(no_scale, "route_forward: the weights' scale is 0");
    assert_refused(no_whole_sequences, "route_capacity: 3 tokens are no sequences of 2");
    assert_refused(z_of_sigmoids, "route_balance: the z-loss is of a softmax; with sigmoids z is 0");
    assert_refused(more_rows_than_pairs, "combine_forward: z has 7 rows, and place 3 x 2 numbers");
    assert_refused(no_such_row_backward, "combine_backward: number 4 of the choices is 6, not in [0, 6)");
    assert_refused(no_such_row, "combine_forward: number 4 of the choices is -1, not in [0, 6)");
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            wrong_choices_are_refused),  // first: the processes that it forks must not have used a GPU
        cmocka_unit_test(the_best_experts_are_chosen_and_of_equal_ones_the_first),
        cmocka_unit_test(a_token_of_nan_has_experts_all_the_same),
        cmocka_unit_test(sigmoids_far_from_zero_stay_numbers),
        cmocka_unit_test(softmax_of_a_biased_choice_stays_numbers),
        cmocka_unit_test(the_weights_gradient_is_that_of_differences),
        cmocka_unit_test(a_single_expert_has_no_gradient_of_its_weight),
        cmocka_unit_test(balance_is_asked_of_each_sequence),
        cmocka_unit_test(sigmoids_that_have_become_zero_stay_numbers),
        cmocka_unit_test(groups_of_negative_values_are_compared),
        cmocka_unit_test(balance_of_logits_beyond_the_exponential),
        cmocka_unit_test(balance_of_sigmoids_that_have_become_zero),
        cmocka_unit_test(rows_stand_in_the_order_of_experts_and_of_tokens),
        cmocka_unit_test(an_expert_takes_the_first_of_each_sequence),
        cmocka_unit_test(a_token_goes_to_each_node_once),
        cmocka_unit_test(rows_go_to_experts_and_come_back),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
