// sockets.c: the empty sockets: what one device does where a technique may plug in.
//
// Bytes sent: none. This file has no main: transformer.c calls these.
#include <string.h>

#include "grad_accumulation.h"

static int64_t all_tokens(void *context, int64_t s) {
    (void)context;
    return s;
}
static int64_t in_order(void *context, int64_t s, int64_t i) {
    (void)context, (void)s;
    return i;
}

static void no_unit_change(void *context, Model *model, int unit, Pass pass) {
    (void)context, (void)model, (void)unit, (void)pass;
}
static void nothing_after_the_step(void *context, Model *model, int unit) {
    (void)context, (void)model, (void)unit;
}
static void weights_are_whole(void *context, Model *model) { (void)context, (void)model; }

static void gradients_exist(void *context, Model *model, int unit) {
    (void)context, (void)model, (void)unit;
}
static void add_to_accumulators(void *context, Model *model, int unit, bool last) {
    (void)context, (void)last;
    params_accumulate(&model->params, unit);
}
static void no_sum_over_ranks(void *context, Model *model, bool last) {
    (void)context, (void)model, (void)last;
}
static void nothing_to_finish(void *context, Model *model) { (void)context, (void)model; }

static int64_t all_rows(void *context, const MicroBatch *micro) {
    (void)context;
    return micro->b * micro->s;
}

static Tensor identity(void *context, const MicroBatch *micro, Tensor x) {
    (void)context, (void)micro;
    return tensor_share(x);
}

static Tensor lookup(void *context, const MicroBatch *micro, Tensor weight) {
    (void)context;
    int64_t n = tensor_count(micro->tokens);
    Tensor x = tensor_new(MEMORY_ACTIVATION, weight.dtype, SHAPE(n, tensor_columns(weight)));
    op_embedding_forward(x, micro->tokens, weight);
    return x;
}
static void lookup_backward(void *context, const MicroBatch *micro, Tensor dweight, Tensor dx) {
    (void)context;
    op_embedding_backward(dweight, dx, micro->tokens);
}
static void loss(void *context, const MicroBatch *micro, Tensor *lse, Tensor logits) {
    (void)context;
    DType statistics = dtype_full(logits.dtype);
    Tensor losses = tensor_new(MEMORY_ACTIVATION, statistics, SHAPE(tensor_rows(logits)));
    *lse = tensor_like(MEMORY_ACTIVATION, losses);
    op_cross_entropy_forward(losses, *lse, logits, micro->targets);
    op_add_sum(micro->loss, losses, micro->loss_scale);
    tensor_free(&losses);
}
static void loss_backward(void *context, const MicroBatch *micro, Tensor dlogits, Tensor logits,
                          Tensor lse) {
    (void)context;
    op_cross_entropy_backward(dlogits, logits, lse, micro->targets, micro->grad_scale);
}

static Tensor new_probs(Tensor q, AttentionShape shape) {
    return tensor_new(MEMORY_ACTIVATION, q.dtype, SHAPE(shape.b, shape.heads, shape.s, shape.s));
}
static void attention_forward(void *context, const MicroBatch *micro, Tensor o, AttentionKept *kept,
                              Tensor q, Tensor k, Tensor v, AttentionShape shape) {
    (void)context, (void)micro;
    kept->probs = new_probs(q, shape);
    op_attention_forward(o, kept->probs, q, k, v, shape);
}
static void attention_backward(void *context, const MicroBatch *micro, Tensor dq, Tensor dk, Tensor dv,
                               Tensor d_o, AttentionKept *kept, Tensor q, Tensor k, Tensor v, Tensor o,
                               AttentionShape shape) {
    (void)context, (void)micro, (void)o;
    op_attention_backward(dq, dk, dv, d_o, q, k, v, kept->probs, shape);
}
static void attention_drop(void *context, AttentionKept *kept) {
    (void)context;
    tensor_free(&kept->probs);
}
static void attention_again(void *context, const MicroBatch *micro, AttentionKept *kept, Tensor q, Tensor k,
                            Tensor v, AttentionShape shape) {
    (void)context, (void)micro, (void)v;
    kept->probs = new_probs(q, shape);
    op_attention_probs(kept->probs, q, k, shape);
}

static void linear_forward(void *context, Model *m, int count, Param *const *weight, const Tensor *y,
                           Tensor x, void **kept) {
    (void)context, (void)kept;
    Tensor w[count];
    for (int i = 0; i < count; i++) w[i] = param_value(&m->params, weight[i]);
    op_matmuls(y, &x, 1, w, count, false, true, 0);
}
static void linear_backward_input(void *context, Model *m, int count, Param *const *weight, Tensor dx,
                                  const Tensor *dy, void **kept) {
    (void)context, (void)kept;
    Tensor w[count];
    for (int i = 0; i < count; i++) w[i] = param_value(&m->params, weight[i]);
    op_matmul_sum(dx, dy, w, count, false, false, 0);
}
static void linear_backward_weight(void *context, Model *m, int count, Param *const *weight,
                                   const Tensor *dy, Tensor x, void **kept) {
    (void)context, (void)kept;
    if (count < 1) return;
    Tensor grad[count];
    for (int i = 0; i < count; i++) grad[i] = param_grad_begin(&m->params, weight[i]);
    op_matmuls(grad, dy, count, &x, 1, true, false, 1);
    for (int i = 0; i < count; i++) param_grad_end(&m->params, weight[i], grad[i]);
}

static void nothing_kept(void *context, void **kept) { (void)context, (void)kept; }

// ---- SwiGLU: y = Wdown act,  act = silu(gate) * up,  gate = Wgate x,  up = Wup x ----

static Tensor enter(Model *m, const MicroBatch *micro, Tensor x) {
    return m->sockets.region.enter(m->sockets.region.context, micro, x);
}

static Tensor mlp_forward(void *context, Model *m, MicroBatch *micro, int layer, Tensor x) {
    (void)context;
    const BlockParams *w = &m->block[layer];
    MlpKept *kept = &micro->block[layer]->mlp;
    const Sockets *sockets = &m->sockets;
    Tensor inside = enter(m, micro, x);
    int64_t n = tensor_rows(inside);
    kept->gate = tensor_new(MEMORY_ACTIVATION, x.dtype, SHAPE(n, w->gate->shape[0]));
    kept->up = tensor_like(MEMORY_ACTIVATION, kept->gate);
    kept->act = tensor_like(MEMORY_ACTIVATION, kept->gate);
    Tensor partial = tensor_new(MEMORY_ACTIVATION, x.dtype, SHAPE(n, w->down->shape[0]));
    sockets->linear.forward(sockets->linear.context, m, 2, (Param *[]){w->gate, w->up},
                            (Tensor[]){kept->gate, kept->up}, inside, &kept->linear[0]);
    op_swiglu_forward(kept->act, kept->gate, kept->up);
    sockets->linear.forward(sockets->linear.context, m, 1, &w->down, &partial, kept->act, &kept->linear[1]);
    Tensor y = sockets->region.leave(sockets->region.context, micro, partial);
    tensor_free(&partial);
    tensor_free(&inside);
    return y;
}

static Tensor mlp_backward_input(void *context, Model *m, MicroBatch *micro, int layer, Tensor dy) {
    (void)context;
    const BlockParams *w = &m->block[layer];
    MlpKept *kept = &micro->block[layer]->mlp;
    const Sockets *sockets = &m->sockets;
    kept->dy = sockets->region.leave_backward(sockets->region.context, micro, dy);
    Tensor dact = tensor_like(MEMORY_ACTIVATION, kept->act);
    sockets->linear.backward_input(sockets->linear.context, m, 1, &w->down, dact, &kept->dy,
                                   &kept->linear[1]);
    op_swiglu_backward(kept->gate, kept->up, dact, kept->gate, kept->up);
    kept->dgate = kept->gate;  // the gradients have overwritten the values
    kept->dup = kept->up;
    kept->gate = kept->up = (Tensor){0};
    tensor_free(&dact);
    Tensor dinside =
        tensor_new(MEMORY_ACTIVATION, dy.dtype, SHAPE(tensor_rows(kept->dy), w->gate->shape[1]));
    sockets->linear.backward_input(sockets->linear.context, m, 2, (Param *[]){w->gate, w->up}, dinside,
                                   (Tensor[]){kept->dgate, kept->dup}, &kept->linear[0]);
    Tensor dx = sockets->region.enter_backward(sockets->region.context, micro, dinside);
    tensor_free(&dinside);
    return dx;
}

static void mlp_backward_weight(void *context, Model *m, MicroBatch *micro, int layer, Tensor x) {
    (void)context;
    const BlockParams *w = &m->block[layer];
    MlpKept *kept = &micro->block[layer]->mlp;
    const Sockets *sockets = &m->sockets;
    Tensor inside = enter(m, micro, x);
    sockets->linear.backward_weight(sockets->linear.context, m, 1, &w->down, &kept->dy, kept->act,
                                    &kept->linear[1]);
    sockets->linear.backward_weight(sockets->linear.context, m, 2, (Param *[]){w->gate, w->up},
                                    (Tensor[]){kept->dgate, kept->dup}, inside, &kept->linear[0]);
    tensor_free(&inside);
}

static void mlp_drop(void *context, MlpKept *kept) {
    (void)context;
    Tensor *const all[] = {&kept->gate, &kept->up, &kept->act, &kept->dgate, &kept->dup, &kept->dy};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(all[i]);
}

static void keep_everything(void *context, Model *model, MicroBatch *micro, int layer) {
    (void)context, (void)model, (void)micro, (void)layer;
}

static double evaluate(void *context, Model *model, MicroBatch *micro) {
    (void)context;
    model_forward(model, micro);
    return loss_value(micro->loss);
}

static bool accept_all(void *context, Model *model, double grad_norm) {
    (void)context, (void)model, (void)grad_norm;
    return true;
}

// ---- all of them ----

Sockets sockets_single_device(void) {
    return (Sockets){
        .tokens = {NULL, all_tokens, in_order},
        .parameters = {NULL, no_unit_change, no_unit_change, nothing_after_the_step, weights_are_whole},
        .gradients = {NULL, gradients_exist, add_to_accumulators, no_sum_over_ranks, nothing_to_finish},
        .region = {NULL, all_rows, identity, identity, identity, identity},
        .vocabulary = {NULL, lookup, lookup_backward, identity, identity, loss, loss_backward},
        .attention = {NULL, attention_forward, attention_backward, attention_drop, attention_again},
        .mlp = {NULL, mlp_forward, mlp_backward_input, mlp_backward_weight, mlp_drop},
        .linear = {NULL, linear_forward, linear_backward_input, linear_backward_weight, nothing_kept},
        .activations = {NULL, keep_everything, keep_everything},
        .schedule = {NULL, micro_batches_in_turn, evaluate},
        .step = {NULL, accept_all},
    };
}

static const struct {
    const char *name;
    size_t offset, size;
} places[SOCKETS] = {
#define PLACE(socket) \
    { #socket, offsetof(Sockets, socket), sizeof((Sockets *)0)->socket }
    PLACE(tokens),      PLACE(parameters), PLACE(gradients), PLACE(region),
    PLACE(vocabulary),  PLACE(attention),  PLACE(mlp),       PLACE(linear),
    PLACE(activations), PLACE(schedule),   PLACE(step),
#undef PLACE
};

const char *socket_name(Socket socket) { return places[socket].name; }

// A socket is its context, and then functions.
unsigned sockets_incomplete(const Sockets *sockets) {
    static void (*const none)(void);
    unsigned incomplete = 0;
    for (int i = 0; i < SOCKETS; i++)
        for (size_t at = sizeof(void *); at < places[i].size; at += sizeof none)
            if (!memcmp((const char *)sockets + places[i].offset + at, &none, sizeof none))
                incomplete |= 1u << i;
    return incomplete;
}

unsigned sockets_difference(const Sockets *a, const Sockets *b) {
    unsigned difference = 0;
    for (int i = 0; i < SOCKETS; i++)
        if (memcmp((const char *)a + places[i].offset, (const char *)b + places[i].offset, places[i].size))
            difference |= 1u << i;
    return difference;
}
