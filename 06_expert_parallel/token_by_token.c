// token_by_token.c: a mixture of experts without sorting or grouping rows: the baseline of moe.c.
// Playbook: "Expert parallelism".
//
// Tokens go through their experts one at a time, each as a matrix of one row; the host chooses the experts
// and their weights, in f64, spelled out step by step. Nothing here is fast, and nothing is shared with
// moe.c or with the operations that it calls.
//
// Bytes sent: none. This file has no main: moe.c runs it.
#include <math.h>
#include <stdlib.h>

#include "expert_parallel.h"

typedef struct Plain {
    Tensor gate, up, act, out;  // (n k, …) in order of tokens, and of each its experts, best first
    Tensor dgate, dup, dout;
    Tensor dlogits;   // (n, e)
    double *logit;    // (n, e)
    double *weight;   // (n, k)
    int32_t *chosen;  // (n, k)
    bool *dropped;    // (n, k) the expert has no room: the pair makes nothing
    Routing routed;
} Plain;

// ---- who is chosen ----

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

// The sum of the two best scores of a group, found by trying all pairs.
static double worth(const double *score, int64_t count) {
    double best = count == 1 ? score[0] : -INFINITY;
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < i; j++) best = fmax(best, score[i] + score[j]);
    return best;
}

// How many of `count` values rank before value i: larger ones, and equal ones with a lower index.
static int64_t rank_of(const double *value, int64_t count, int64_t i) {
    int64_t rank = 0;
    for (int64_t j = 0; j < count; j++) rank += value[j] > value[i] || (value[j] == value[i] && j < i);
    return rank;
}

// What a chosen expert's weight is in proportion to. Relative to the best logit: e^710 is infinite.
static double score_of(const Config *c, double logit, double best) {
    return c->moe == MOE_DEEPSEEK ? sigmoid(logit) : exp(logit - best);
}

static void choose(const Config *c, int32_t *chosen, double *weight, const double *logit) {
    int64_t e = c->experts, groups = c->expert_groups, each = e / groups;
    double value[e], group[groups], sum = 0;
    for (int64_t i = 0; i < e; i++) value[i] = c->moe == MOE_DEEPSEEK ? sigmoid(logit[i]) : logit[i];
    for (int64_t g = 0; g < groups; g++) group[g] = worth(value + g * each, each);
    double open[e];
    for (int64_t i = 0; i < e; i++)
        open[i] = rank_of(group, groups, i / each) < c->groups_kept ? value[i] : -INFINITY;
    for (int64_t i = 0; i < e; i++) {
        int64_t rank = rank_of(open, e, i);
        if (rank < c->top_k) chosen[rank] = (int32_t)i;
    }
    for (int64_t j = 0; j < c->top_k; j++) {
        weight[j] = score_of(c, logit[chosen[j]], logit[chosen[0]]);
        sum += weight[j];
    }
    for (int64_t j = 0; j < c->top_k; j++) weight[j] = weight[j] / sum * c->routed_scale;
}

// d(weights)/d(logits), pair by pair:  w_i = scale s_i / S;  dw_i / ds_j = scale (i = j) / S - w_i / S
static void choose_backward(const Config *c, double *dlogit, const double *dweight, const int32_t *chosen,
                            const double *weight, const double *logit) {
    double sum = 0, best = logit[chosen[0]];
    for (int64_t j = 0; j < c->top_k; j++) sum += score_of(c, logit[chosen[j]], best);
    for (int64_t i = 0; i < c->experts; i++) dlogit[i] = 0;
    for (int64_t j = 0; j < c->top_k; j++) {
        double s = score_of(c, logit[chosen[j]], best), ds = 0;
        for (int64_t i = 0; i < c->top_k; i++)
            ds += dweight[i] * ((i == j ? c->routed_scale : 0) - weight[i]) / sum;
        dlogit[chosen[j]] = ds * (c->moe == MOE_DEEPSEEK ? s * (1 - s) : s);
    }
}

// ---- one token and one of its experts at a time ----

static Tensor row(Tensor t, int64_t i) { return tensor_rows_of(t, i, 1); }

static Tensor weight_of(const Model *m, Param *first, int32_t expert) {
    return param_value(&m->params, first + expert);
}
static Tensor gradient_of(const Model *m, Param *first, int32_t expert) {
    return param_grad(&m->params, first + expert);
}

// y += factor x
static void add_scaled(Tensor y, Tensor x, double factor) {
    Tensor part = tensor_like(MEMORY_ACTIVATION, x);
    op_copy(part, x);
    op_scale(part, factor);
    op_accumulate(y, part);
    tensor_free(&part);
}

static double dot(Tensor a, Tensor b) {
    int64_t count = tensor_count(a);
    double *x = host_alloc(2 * count * sizeof *x), *y = x + count, sum = 0;
    tensor_to_doubles(x, a);
    tensor_to_doubles(y, b);
    for (int64_t i = 0; i < count; i++) sum += x[i] * y[i];
    free(x);
    return sum;
}

// Keeps the logits, and takes the experts that the run takes which this one follows.
static void choose_as_there(const Model *m, const MicroBatch *micro, int layer, Plain *p, int64_t n) {
    const Config *c = &m->config;
    int64_t e = c->experts, k = c->top_k, *place = routing_places(m, micro, layer, n);
    Routing *r = place ? m->routing : NULL;
    const float *followed = r ? r->followed : NULL;
    if (r) routing_keep(r, place, p->logit, n, e);
    double size = difference_norm(p->logit, n * e) / sqrt((double)n);
    for (int64_t i = 0; i < n && followed; i++) {
        double there[e], left[e], weight[k];
        int32_t taken[k];
        for (int64_t j = 0; j < e; j++) there[j] = followed[place[i] + j], left[j] = p->logit[i * e + j];
        choose(c, taken, weight, there);
        routing_follow(&p->routed, left, followed + place[i], e, p->chosen + i * k, taken, k, size);
        choose(c, p->chosen + i * k, p->weight + i * k, left);
    }
    free(place);
}

static void choose_all(const Model *m, const MicroBatch *micro, int layer, Plain *p, Tensor x) {
    const Config *c = &m->config;
    int64_t n = tensor_rows(x), e = c->experts, k = c->top_k;
    Tensor logits = tensor_new(MEMORY_ACTIVATION, x.dtype, SHAPE(n, e));
    op_matmul(logits, x, param_value(&m->params, m->block[layer].router), false, true, 0);
    p->logit = host_alloc(n * e * sizeof *p->logit);
    p->weight = host_alloc(n * k * sizeof *p->weight);
    p->chosen = host_alloc(n * k * sizeof *p->chosen);
    tensor_to_doubles(p->logit, logits);
    for (int64_t i = 0; i < n; i++) choose(c, p->chosen + i * k, p->weight + i * k, p->logit + i * e);
    if (device_is_dry_run())
        for (int64_t i = 0; i < n * k; i++) p->chosen[i] = (int32_t)(i % e);  // evenly
    choose_as_there(m, micro, layer, p, n);
    tensor_free(&logits);
}

// Of each sequence an expert takes its first pairs, as many as --capacity times their mean, rounded up.
static void drop_some(const Config *c, Plain *p, int64_t n, int64_t s) {
    double mean = (double)(s * c->top_k) / (double)c->experts, capacity = config_number(c, "capacity");
    p->dropped = calloc((size_t)(n * c->top_k), sizeof *p->dropped);
    CHECK(p->dropped, "out of host memory for a block's experts");
    for (int64_t i = 0; i < n * c->top_k && capacity > 0; i++) {
        double taken = 0;
        for (int64_t j = i / (s * c->top_k) * s * c->top_k; j < i; j++)
            taken += p->chosen[j] == p->chosen[i] && !p->dropped[j];
        p->dropped[i] = taken >= capacity * mean * (1 - 1e-12);  // 3.0000000000000004 rows are 3
    }
}

static Tensor forward(void *context, Model *m, MicroBatch *micro, int layer, Tensor x) {
    const Sockets *dense = context;
    const BlockParams *w = &m->block[layer];
    int64_t n = tensor_rows(x), k = m->config.top_k, f = config_expert_width(&m->config);
    Plain *p = calloc(1, sizeof *p);
    CHECK(p, "out of host memory for a block's experts");
    micro->block[layer]->mlp.more = p;
    choose_all(m, micro, layer, p, x);
    drop_some(&m->config, p, n, micro->s);
    p->gate = tensor_new(MEMORY_ACTIVATION, x.dtype, SHAPE(n * k, f));
    p->up = tensor_like(MEMORY_ACTIVATION, p->gate);
    p->act = tensor_like(MEMORY_ACTIVATION, p->gate);
    p->out = tensor_new(MEMORY_ACTIVATION, x.dtype, SHAPE(n * k, tensor_columns(x)));
    Tensor y = tensor_like(MEMORY_ACTIVATION, x);
    op_fill(y, 0);
    for (int64_t i = 0; i < n * k; i++) {
        if (p->dropped[i]) continue;
        int32_t expert = p->chosen[i];
        op_matmul(row(p->gate, i), row(x, i / k), weight_of(m, w->expert_gate, expert), false, true, 0);
        op_matmul(row(p->up, i), row(x, i / k), weight_of(m, w->expert_up, expert), false, true, 0);
        op_swiglu_forward(row(p->act, i), row(p->gate, i), row(p->up, i));
        op_matmul(row(p->out, i), row(p->act, i), weight_of(m, w->expert_down, expert), false, true, 0);
        add_scaled(row(y, i / k), row(p->out, i), p->weight[i]);
    }
    if (!m->config.shared_experts) return y;
    Tensor shared = dense->mlp.forward(dense->mlp.context, m, micro, layer, x);
    op_add(y, y, shared);
    tensor_free(&shared);
    return y;
}

static Tensor backward_input(void *context, Model *m, MicroBatch *micro, int layer, Tensor dy) {
    const Sockets *dense = context;
    const BlockParams *w = &m->block[layer];
    const Config *c = &m->config;
    Plain *p = micro->block[layer]->mlp.more;
    int64_t n = tensor_rows(dy), k = c->top_k, e = c->experts;
    routing_count(m, &p->routed);
    p->dgate = tensor_like(MEMORY_ACTIVATION, p->gate);
    p->dup = tensor_like(MEMORY_ACTIVATION, p->gate);
    p->dout = tensor_like(MEMORY_ACTIVATION, p->out);
    p->dlogits = tensor_new(MEMORY_ACTIVATION, dy.dtype, SHAPE(n, e));
    Tensor dx = tensor_like(MEMORY_ACTIVATION, dy), dact = tensor_like(MEMORY_ACTIVATION, row(p->act, 0));
    double *dweight = host_alloc(n * k * sizeof *dweight), *dlogit = host_alloc(n * e * sizeof *dlogit);
    op_fill(dx, 0);
    op_fill(p->dout, 0);
    for (int64_t i = 0; i < n * k; i++) {
        dweight[i] = 0;
        if (p->dropped[i]) continue;
        int32_t expert = p->chosen[i];
        dweight[i] = dot(row(dy, i / k), row(p->out, i));
        add_scaled(row(p->dout, i), row(dy, i / k), p->weight[i]);
        op_matmul(dact, row(p->dout, i), weight_of(m, w->expert_down, expert), false, false, 0);
        op_swiglu_backward(row(p->dgate, i), row(p->dup, i), dact, row(p->gate, i), row(p->up, i));
        op_matmul(row(dx, i / k), row(p->dgate, i), weight_of(m, w->expert_gate, expert), false, false, 1);
        op_matmul(row(dx, i / k), row(p->dup, i), weight_of(m, w->expert_up, expert), false, false, 1);
    }
    for (int64_t i = 0; i < n; i++)
        choose_backward(c, dlogit + i * e, dweight + i * k, p->chosen + i * k, p->weight + i * k,
                        p->logit + i * e);
    tensor_from_doubles(p->dlogits, dlogit);
    op_matmul(dx, p->dlogits, param_value(&m->params, w->router), false, false, 1);
    tensor_free(&dact);
    free(dweight);
    free(dlogit);
    if (!c->shared_experts) return dx;
    Tensor shared = dense->mlp.backward_input(dense->mlp.context, m, micro, layer, dy);
    op_add(dx, dx, shared);
    tensor_free(&shared);
    return dx;
}

static void backward_weight(void *context, Model *m, MicroBatch *micro, int layer, Tensor x) {
    const Sockets *dense = context;
    const BlockParams *w = &m->block[layer];
    const Plain *p = micro->block[layer]->mlp.more;
    int64_t n = tensor_rows(x), k = m->config.top_k;
    int unit = m->first_expert_unit + layer;
    op_matmul(param_grad(&m->params, w->router), p->dlogits, x, true, false, 1);
    if (m->config.shared_experts) dense->mlp.backward_weight(dense->mlp.context, m, micro, layer, x);
    m->sockets.gradients.begin(m->sockets.gradients.context, m, unit);
    for (int64_t i = 0; i < n * k; i++) {
        if (p->dropped[i]) continue;
        int32_t expert = p->chosen[i];
        op_matmul(gradient_of(m, w->expert_down, expert), row(p->dout, i), row(p->act, i), true, false, 1);
        op_matmul(gradient_of(m, w->expert_gate, expert), row(p->dgate, i), row(x, i / k), true, false, 1);
        op_matmul(gradient_of(m, w->expert_up, expert), row(p->dup, i), row(x, i / k), true, false, 1);
    }
    model_gradient_ready(m, unit);
}

static void drop(void *context, MlpKept *mlp) {
    const Sockets *dense = context;
    Plain *p = mlp->more;
    dense->mlp.drop(dense->mlp.context, mlp);
    if (!p) return;
    mlp->more = NULL;
    Tensor *const all[] = {&p->gate, &p->up, &p->act, &p->out, &p->dgate, &p->dup, &p->dout, &p->dlogits};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(all[i]);
    free(p->logit);
    free(p->weight);
    free(p->chosen);
    free(p->dropped);
    free(p);
}

static void *plug(Model *model) {
    Sockets *dense = host_alloc(sizeof *dense);
    *dense = model->sockets;
    model->sockets.mlp.context = dense;
    model->sockets.mlp.forward = forward;
    model->sockets.mlp.backward_input = backward_input;
    model->sockets.mlp.backward_weight = backward_weight;
    model->sockets.mlp.drop = drop;
    return dense;
}

static void unplug(Model *model, void *context) {
    (void)model;
    free(context);
}

static bool enabled(const Config *c) { return c->experts > 0; }

const Technique token_by_token = {
    .name = "token_by_token", .brings = CONFIG_EXPERTS, .enabled = enabled, .plug = plug, .unplug = unplug};
