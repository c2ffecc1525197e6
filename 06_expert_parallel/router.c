// router.c: which experts a token takes, and with what weights: the router's multiply, forward and backward,
// and what load_balance.c adds. Playbook: "Expert parallelism".
//
//     logits = Wrouter x  (n, e);   chosen, weights = route(logits, bias)  (n, k)
//
// The bias enters the choice only, not the weights.
// Bytes sent: none. This file has no main: moe.c calls it.
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
    router_replay(moe, micro, layer, kept, bias);
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
