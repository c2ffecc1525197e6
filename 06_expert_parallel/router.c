// router.c: which experts a token takes, and with what weights: the router's multiply, forward and backward,
// and what load_balance.c adds. Playbook: "Expert parallelism".
//
//     logits = Wrouter x  (n, e);   chosen, weights = route(logits, bias)  (n, k)
//
// The bias enters the choice only, not the weights. A proof's run on one device takes the experts that the
// ranks took: rounding may decide a near tie either way, and then nothing after it could be compared.
// Bytes sent: none. This file has no main: moe.c calls it.
#include <math.h>
#include <stdlib.h>

#include "expert_parallel.h"

RouteRule moe_rule(const Config *c) {
    return (RouteRule){.by_sigmoid = c->moe == MOE_DEEPSEEK,
                       .groups = c->expert_groups,
                       .kept = c->groups_kept,
                       .scale = c->routed_scale};
}

// In f32, or f64 beside f64, whatever the storage: near ties must not be decided by rounding.
static Tensor routing(DType storage, int64_t rows, int64_t columns) {
    return tensor_new(MEMORY_ACTIVATION, dtype_full(storage), SHAPE(rows, columns));
}

// x as routing computes with it.
static Tensor widened(Tensor x) {
    if (x.dtype == F64 || x.dtype == F32) return tensor_share(x);
    Tensor wide = routing(x.dtype, tensor_rows(x), tensor_columns(x));
    op_copy(wide, x);
    return wide;
}

static Tensor router_of(const Model *m, int layer) {
    return widened(param_value(&m->params, m->block[layer].router));
}

// ---- a run that takes another run's experts (report.h) ----

int64_t *routing_places(const Model *m, const MicroBatch *micro, int layer, int64_t n) {
    const Config *c = &m->config;
    if (!m->routing || micro->index < 0) return NULL;
    int64_t rows = micro->b * micro->s, first = 0, samples = c->micro_batch * c->grad_acc;
    if (n < rows) sequence_rows(rows, m->mesh.tp.rank, m->mesh.tp.size, &first);
    int32_t *position = host_alloc(rows * sizeof *position);
    int64_t *place = host_alloc(n * sizeof *place);
    tensor_to_host(position, micro->positions);
    for (int64_t i = 0; i < n; i++) {
        int64_t row = first + i, sample = micro->index * micro->b + row / micro->s;
        sample += (m->routing->step * m->mesh.dp.size + m->mesh.dp.rank) * samples;
        place[i] = ((sample * c->seq + position[row]) * c->layers + layer) * c->experts;
    }
    free(position);
    return place;
}

static bool takes(const int32_t *chosen, int64_t k, int64_t expert) {
    for (int64_t j = 0; j < k; j++)
        if (chosen[j] == expert) return true;
    return false;
}

void routing_follow(Routing *routed, double *own, const float *there, int64_t e, const int32_t *mine,
                    const int32_t *taken, int64_t k, double size) {
    bool same = true;
    double square = 0;
    for (int64_t i = 0; i < e; i++) {
        bool takes_it = takes(taken, k, i);
        same = same && takes_it == takes(mine, k, i);
        square += (own[i] - (double)there[i]) * (own[i] - (double)there[i]);
        if (!takes_it) own[i] = -INFINITY;
    }
    routed->choices++;
    if (same) return;
    routed->ties++;
    double apart = sqrt(square) / size;
    if (!(apart <= routed->apart)) routed->apart = apart;
}

void routing_count(const Model *m, const Routing *routed) {
    Routing *r = m->routing;
    if (!r) return;
    r->choices += routed->choices;
    r->ties += routed->ties;
    if (!(routed->apart <= r->apart)) r->apart = routed->apart;
}

// Chooses by the other run's logits, in f32 as there, and then among them by the run's own.
static void choose_as_there(const Moe *moe, const int64_t *place, MoeKept *kept, double *own, Tensor bias) {
    int64_t n = tensor_rows(kept->logits), e = tensor_columns(kept->logits),
            k = tensor_columns(kept->chosen);
    const float *followed = moe->model->routing->followed;
    double size = difference_norm(own, n * e) / sqrt((double)n);
    float *there = host_alloc(n * e * sizeof *there);
    int32_t *mine = host_alloc(2 * n * k * sizeof *mine), *taken = mine + n * k;
    Tensor logits = routing(F32, n, e), weights = routing(F32, n, k), narrow = bias,
           chosen = tensor_like(MEMORY_ACTIVATION, kept->chosen),
           left = tensor_like(MEMORY_ACTIVATION, kept->logits);
    if (tensor_exists(bias)) narrow = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(e)), op_copy(narrow, bias);
    for (int64_t i = 0; i < n * e; i++) there[i] = followed[place[i / e] + i % e];
    tensor_from_host(logits, there);
    op_route_forward(chosen, weights, logits, narrow, moe->rule);
    tensor_to_host(taken, chosen);
    tensor_to_host(mine, kept->chosen);
    kept->routed = (Routing){0};
    for (int64_t i = 0; i < n; i++)
        routing_follow(&kept->routed, own + i * e, there + i * e, e, mine + i * k, taken + i * k, k, size);
    tensor_from_doubles(left, own);
    op_route_forward(kept->chosen, kept->weights, left, (Tensor){0}, moe->rule);
    if (tensor_exists(bias)) tensor_free(&narrow);
    Tensor *const all[] = {&logits, &weights, &chosen, &left};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(all[i]);
    free(there);
    free(mine);
}

static void record_choices(const Moe *moe, const MicroBatch *micro, int layer, MoeKept *kept, Tensor bias) {
    const Routing *r = moe->model->routing;
    int64_t n = tensor_rows(kept->logits), e = tensor_columns(kept->logits);
    int64_t *place = routing_places(moe->model, micro, layer, n);
    if (!place || !(r->logits || r->followed)) {
        free(place);
        return;
    }
    double *own = host_alloc(n * e * sizeof *own);
    tensor_to_doubles(own, kept->logits);
    for (int64_t i = 0; i < n * e && r->logits; i++) r->logits[place[i / e] + i % e] = (float)own[i];
    if (r->followed) choose_as_there(moe, place, kept, own, bias);
    free(own);
    free(place);
}

// ---- forward and backward ----

void router_forward(const Moe *moe, const MicroBatch *micro, int layer, MoeKept *kept, Tensor x) {
    const Config *c = &moe->model->config;
    int64_t n = tensor_rows(x);
    Tensor wide = widened(x), router = router_of(moe->model, layer);
    kept->logits = routing(x.dtype, n, c->experts);
    kept->weights = routing(x.dtype, n, c->top_k);
    kept->chosen = tensor_new(MEMORY_ACTIVATION, I32, SHAPE(n, c->top_k));
    op_matmul(kept->logits, wide, router, false, true, 0);
    Tensor bias = moe->balance.bias(moe->balance.context, layer);
    op_route_forward(kept->chosen, kept->weights, kept->logits, bias, moe->rule);
    record_choices(moe, micro, layer, kept, bias);
    tensor_free(&wide);
    tensor_free(&router);
}

void router_backward(const Moe *moe, const MicroBatch *micro, int layer, MoeKept *kept, Tensor dx,
                     Tensor dweights) {
    Tensor router = router_of(moe->model, layer),
           part = routing(dx.dtype, tensor_rows(dx), tensor_columns(dx));
    kept->dlogits = tensor_like(MEMORY_ACTIVATION, kept->logits);
    routing_count(moe->model, &kept->routed);
    op_route_backward(kept->dlogits, dweights, kept->weights, kept->chosen, kept->logits, moe->rule);
    moe->balance.backward(moe->balance.context, micro, layer, kept);
    op_matmul(part, kept->dlogits, router, false, false, 0);
    op_accumulate(dx, part);
    tensor_free(&part);
    tensor_free(&router);
}

void router_gradient(const Moe *moe, int layer, const MoeKept *kept, Tensor x) {
    const Params *params = &moe->model->params;
    const Param *router = moe->model->block[layer].router;
    Tensor grad = param_grad_begin(params, router);
    Tensor wide = widened(x), part = routing(x.dtype, tensor_rows(grad), tensor_columns(grad));
    op_matmul(part, kept->dlogits, wide, true, false, 0);
    op_accumulate(grad, part);
    param_grad_end(params, router, grad);
    tensor_free(&part);
    tensor_free(&wide);
}
