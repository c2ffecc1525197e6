// transformer.c: the model on a single device, and the sockets where every later chapter plugs in.
// Playbook: "First Steps: Training on one GPU"; Llama: Touvron et al. 2023.
//
//   x ─ norm1 ─[enter]─ Wq Wk Wv ─ rope ─[attention]─ Wo ─[leave]─(+x)─ x2
//   x2 ─ norm2 ─[enter]─[mlp: Wdown (silu(Wgate) * Wup)]─[leave]─(+x2)─ y        a block; [..] are sockets
//
// Backward is cut in two, so that a pipeline can move the second half: B (…_backward_input) carries the
// gradient to the block's input; W (…_backward_weight) fills the gradients of the matrices. What B leaves
// to W stays in BlockKept. Norm weights are so small that B fills theirs on the way.
//
// Kept for backward per block: elements  n (4 h + 2 a d + 2 kv d + 3 f + a s)  and 2 n statistics (rstd).
// Bytes sent: none. This file has no main: train.c runs it.
#include <math.h>
#include <stdlib.h>

#include "playbook.h"

// ---- small helpers ----

static Tensor activation(DType dtype, int64_t rows, int64_t columns) {
    return tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(rows, columns));
}

// Hands a tensor over to its next owner.
static Tensor take(Tensor *t) {
    Tensor taken = *t;
    *t = (Tensor){0};
    return taken;
}

// Statistics of a row keep full precision.
static DType statistics_dtype(DType dtype) { return dtype == F64 ? F64 : F32; }

static AttentionShape attention_shape(const BlockParams *w, const Model *m, const MicroBatch *micro) {
    int64_t d = config_head_size(&m->config);
    return (AttentionShape){micro->b, micro->s, w->q->shape[0] / d, w->k->shape[0] / d, d};
}

static void acquire(Model *m, int unit, Pass pass) {
    m->sockets.parameters.acquire(m->sockets.parameters.context, m, unit, pass);
}
static void release(Model *m, int unit, Pass pass) {
    m->sockets.parameters.release(m->sockets.parameters.context, m, unit, pass);
}
static void begin_gradients(Model *m, int unit, MicroBatch *micro) {
    m->sockets.gradients.begin(m->sockets.gradients.context, m, unit, micro);
}
static Tensor enter(Model *m, Tensor x) { return m->sockets.region.enter(m->sockets.region.context, x); }
static Tensor leave(Model *m, Tensor partial) {
    Tensor y = m->sockets.region.leave(m->sockets.region.context, partial);
    tensor_free(&partial);
    return y;
}
static Tensor enter_backward(Model *m, Tensor dinside) {
    Tensor dx = m->sockets.region.enter_backward(m->sockets.region.context, dinside);
    tensor_free(&dinside);
    return dx;
}
static Tensor leave_backward(Model *m, Tensor dy) {
    return m->sockets.region.leave_backward(m->sockets.region.context, dy);
}

// *y[i] = x W_i^T, new (n, out_i)
static void linears_forward(Model *m, int count, Param *const *weight, Tensor *const *y, Tensor x) {
    Tensor made[count];
    for (int i = 0; i < count; i++) {
        made[i] = activation(x.dtype, tensor_rows(x), weight[i]->shape[0]);
        *y[i] = made[i];
    }
    m->sockets.linear.forward(m->sockets.linear.context, m, count, weight, made, x);
}
static Tensor linear_forward(Model *m, Param *weight, Tensor x) {
    Tensor y;
    linears_forward(m, 1, &weight, (Tensor *[]){&y}, x);
    return y;
}
// dx = sum over i of dy[i] W_i
static void linears_backward_input(Model *m, int count, Param *const *weight, Tensor dx, const Tensor *dy) {
    m->sockets.linear.backward_input(m->sockets.linear.context, m, count, weight, dx, dy);
}
// dW_i += dy[i]^T x
static void linears_backward_weight(Model *m, int count, Param *const *weight, const Tensor *dy, Tensor x) {
    m->sockets.linear.backward_weight(m->sockets.linear.context, m, count, weight, dy, x);
}

static Tensor norm_forward(Model *m, Param *weight, Tensor x, Tensor *rstd) {
    Tensor y = tensor_like(MEMORY_ACTIVATION, x);
    *rstd = tensor_new(MEMORY_ACTIVATION, statistics_dtype(x.dtype), SHAPE(tensor_rows(x)));
    op_rmsnorm_forward(y, *rstd, x, param_value(&m->params, weight), m->config.norm_eps);
    return y;
}
// y = x + norm's branch:  dx = dy + norm'(dbranch), written over dbranch
static Tensor norm_backward(Model *m, Param *weight, Tensor dy, Tensor dbranch, Tensor x, Tensor rstd) {
    op_rmsnorm_backward(dbranch, param_grad(&m->params, weight), dy, dbranch, x,
                        param_value(&m->params, weight), rstd);
    return dbranch;
}

// ---- a block, forward: fills kept from kept->x and returns the block's output ----

Tensor block_compute(Model *m, MicroBatch *micro, int layer) {
    const BlockParams *w = &m->block[layer];
    BlockKept *kept = &micro->block[layer];
    Sockets *on = &m->sockets;

    kept->norm1 = norm_forward(m, w->norm1, kept->x, &kept->rstd1);
    Tensor inside = enter(m, kept->norm1);
    linears_forward(m, 3, (Param *[]){w->q, w->k, w->v}, (Tensor *[]){&kept->q, &kept->k, &kept->v}, inside);
    tensor_free(&inside);
    op_rope(kept->q, micro->positions, config_head_size(&m->config), m->config.rope_theta, +1);
    op_rope(kept->k, micro->positions, config_head_size(&m->config), m->config.rope_theta, +1);
    kept->o = tensor_like(MEMORY_ACTIVATION, kept->q);
    on->attention.forward(on->attention.context, kept->o, &kept->attention, kept->q, kept->k, kept->v,
                          attention_shape(w, m, micro));
    kept->x2 = leave(m, linear_forward(m, w->o, kept->o));
    op_add(kept->x2, kept->x2, kept->x);

    kept->norm2 = norm_forward(m, w->norm2, kept->x2, &kept->rstd2);
    inside = enter(m, kept->norm2);
    Tensor y = leave(m, on->mlp.forward(on->mlp.context, m, layer, &kept->mlp, inside));
    tensor_free(&inside);
    op_add(y, y, kept->x2);
    return y;
}

void block_forward(Model *m, MicroBatch *micro, int layer) {
    int unit = m->first_block_unit + layer;
    micro->block[layer].x = take(&micro->x);
    acquire(m, unit, FORWARD);
    micro->x = block_compute(m, micro, layer);
    release(m, unit, FORWARD);
    m->sockets.activations.after_forward(m->sockets.activations.context, m, micro, layer);
}

// ---- a block, backward ----

void block_backward_input(Model *m, MicroBatch *micro, int layer) {
    const BlockParams *w = &m->block[layer];
    BlockKept *kept = &micro->block[layer];
    Sockets *on = &m->sockets;
    int unit = m->first_block_unit + layer;
    acquire(m, unit, BACKWARD);
    begin_gradients(m, unit, micro);
    on->activations.before_backward(on->activations.context, m, micro, layer);

    // y = x2 + mlp(norm2(x2))
    Tensor dy = take(&micro->dx);
    kept->dy = leave_backward(m, dy);
    Tensor dnorm2 =
        enter_backward(m, on->mlp.backward_input(on->mlp.context, m, layer, &kept->mlp, kept->dy));
    Tensor dx2 = norm_backward(m, w->norm2, dy, dnorm2, kept->x2, kept->rstd2);
    tensor_free(&dy);
    tensor_free(&kept->x2);
    tensor_free(&kept->rstd2);

    // x2 = x + Wo attention(rope(Wq norm1(x)), rope(Wk …), Wv …)
    kept->dx2 = leave_backward(m, dx2);
    Tensor d_o = tensor_like(MEMORY_ACTIVATION, kept->o);
    linears_backward_input(m, 1, &w->o, d_o, &kept->dx2);
    kept->dq = tensor_like(MEMORY_ACTIVATION, kept->q);
    kept->dk = tensor_like(MEMORY_ACTIVATION, kept->k);
    kept->dv = tensor_like(MEMORY_ACTIVATION, kept->v);
    on->attention.backward(on->attention.context, kept->dq, kept->dk, kept->dv, d_o, &kept->attention,
                           kept->q, kept->k, kept->v, kept->o, attention_shape(w, m, micro));
    on->attention.drop(on->attention.context, &kept->attention);
    tensor_free(&d_o);
    tensor_free(&kept->q);
    tensor_free(&kept->k);
    tensor_free(&kept->v);
    op_rope(kept->dq, micro->positions, config_head_size(&m->config), m->config.rope_theta, -1);
    op_rope(kept->dk, micro->positions, config_head_size(&m->config), m->config.rope_theta, -1);
    Tensor dinside = activation(kept->dq.dtype, tensor_rows(kept->dq), w->q->shape[1]);
    linears_backward_input(m, 3, (Param *[]){w->q, w->k, w->v}, dinside,
                           (Tensor[]){kept->dq, kept->dk, kept->dv});
    micro->dx = norm_backward(m, w->norm1, dx2, enter_backward(m, dinside), kept->x, kept->rstd1);
    tensor_free(&dx2);
    tensor_free(&kept->x);
    tensor_free(&kept->rstd1);
    release(m, unit, BACKWARD);
}

void block_backward_weight(Model *m, MicroBatch *micro, int layer) {
    const BlockParams *w = &m->block[layer];
    BlockKept *kept = &micro->block[layer];
    Sockets *on = &m->sockets;

    Tensor inside = enter(m, kept->norm2);
    on->mlp.backward_weight(on->mlp.context, m, layer, &kept->mlp, kept->dy, inside);
    tensor_free(&inside);
    inside = enter(m, kept->norm1);
    linears_backward_weight(m, 1, &w->o, &kept->dx2, kept->o);
    linears_backward_weight(m, 3, (Param *[]){w->q, w->k, w->v}, (Tensor[]){kept->dq, kept->dk, kept->dv},
                            inside);
    tensor_free(&inside);
    block_drop(m, kept, false);
    on->gradients.ready(on->gradients.context, m, m->first_block_unit + layer, micro);
}

void block_drop(Model *m, BlockKept *kept, bool keep_input) {
    Tensor *const all[] = {&kept->rstd1, &kept->norm1, &kept->q,     &kept->k,     &kept->v,
                           &kept->o,     &kept->x2,    &kept->rstd2, &kept->norm2, &kept->dy,
                           &kept->dx2,   &kept->dq,    &kept->dk,    &kept->dv};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(all[i]);
    m->sockets.attention.drop(m->sockets.attention.context, &kept->attention);
    m->sockets.mlp.drop(m->sockets.mlp.context, &kept->mlp);
    if (!keep_input) tensor_free(&kept->x);
}

// ---- the ends: embedding and head ----

void embedding_forward(Model *m, MicroBatch *micro) {
    acquire(m, m->embedding_unit, FORWARD);
    micro->x = m->sockets.vocabulary.lookup(m->sockets.vocabulary.context, micro->tokens,
                                            param_value(&m->params, m->embedding));
    release(m, m->embedding_unit, FORWARD);
}

void embedding_backward(Model *m, MicroBatch *micro) {
    begin_gradients(m, m->embedding_unit, micro);
    m->sockets.vocabulary.lookup_backward(m->sockets.vocabulary.context,
                                          param_grad(&m->params, m->embedding), micro->dx, micro->tokens);
    tensor_free(&micro->dx);
    m->sockets.gradients.ready(m->sockets.gradients.context, m, m->embedding_unit, micro);
}

// The head multiplies with the embedding's weight when they are tied, and so needs that unit too.
static void acquire_head(Model *m, Pass pass) {
    acquire(m, m->head_unit, pass);
    if (m->config.tied) acquire(m, m->embedding_unit, pass);
}
static void release_head(Model *m, Pass pass) {
    if (m->config.tied) release(m, m->embedding_unit, pass);
    release(m, m->head_unit, pass);
}

void head_forward(Model *m, MicroBatch *micro) {
    HeadKept *kept = &micro->head;
    kept->x = take(&micro->x);
    acquire_head(m, FORWARD);
    kept->norm = norm_forward(m, m->norm, kept->x, &kept->rstd);
    Tensor inside = m->sockets.vocabulary.enter(m->sockets.vocabulary.context, kept->norm);
    kept->logits = linear_forward(m, m->head, inside);
    tensor_free(&inside);
    release_head(m, FORWARD);
    double sum = m->sockets.vocabulary.loss(m->sockets.vocabulary.context, &kept->lse, kept->logits,
                                            micro->targets);
    // A sum over tokens times 1 / (labels of the whole global batch): micro-batches simply add up.
    micro->loss = sum * micro->loss_scale;
}

void head_backward_input(Model *m, MicroBatch *micro) {
    HeadKept *kept = &micro->head;
    acquire_head(m, BACKWARD);
    begin_gradients(m, m->head_unit, micro);
    if (m->config.tied) begin_gradients(m, m->embedding_unit, micro);
    m->sockets.vocabulary.loss_backward(m->sockets.vocabulary.context, kept->logits, kept->logits,
                                        kept->lse, micro->targets, micro->loss_scale);
    Tensor dinside = activation(kept->norm.dtype, tensor_rows(kept->logits), m->head->shape[1]);
    linears_backward_input(m, 1, &m->head, dinside, &kept->logits);
    Tensor dnorm = m->sockets.vocabulary.enter_backward(m->sockets.vocabulary.context, dinside);
    tensor_free(&dinside);
    micro->dx = norm_backward(m, m->norm, (Tensor){0}, dnorm, kept->x, kept->rstd);
    release_head(m, BACKWARD);
    tensor_free(&kept->x);
    tensor_free(&kept->rstd);
    tensor_free(&kept->lse);
}

void head_backward_weight(Model *m, MicroBatch *micro) {
    HeadKept *kept = &micro->head;
    Tensor inside = m->sockets.vocabulary.enter(m->sockets.vocabulary.context, kept->norm);
    linears_backward_weight(m, 1, &m->head, &kept->logits, inside);
    tensor_free(&inside);
    tensor_free(&kept->logits);
    tensor_free(&kept->norm);
    m->sockets.gradients.ready(m->sockets.gradients.context, m, m->head_unit, micro);
}

// ---- the whole model on one device ----

void model_forward(Model *m, MicroBatch *micro) {
    embedding_forward(m, micro);
    for (int layer = 0; layer < m->layers; layer++) block_forward(m, micro, layer);
    head_forward(m, micro);
}

void model_backward(Model *m, MicroBatch *micro) {
    head_backward_input(m, micro);
    head_backward_weight(m, micro);
    for (int layer = (int)m->layers - 1; layer >= 0; layer--) {
        block_backward_input(m, micro, layer);
        block_backward_weight(m, micro, layer);
    }
    embedding_backward(m, micro);
}
