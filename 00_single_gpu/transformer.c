// transformer.c: the model on a single device, and the sockets where every later chapter plugs in.
// Playbook: "First Steps: Training on one GPU"; Llama: Touvron et al. 2023.
//
//   x ─ norm1 ─[enter]─ Wq Wk Wv ─ rope ─[attention]─ Wo ─[leave]─(+x)─ x2
//   x2 ─ norm2 ─[mlp: [enter]─ Wdown (silu(Wgate) * Wup) ─[leave]]─(+x2)─ y
//   A block; sockets are in brackets.
//
// Backward has two halves, so that a pipeline can delay the second: B (…_backward_input) propagates the
// gradient to the block's input; W (…_backward_weight) adds to the gradients of the weights. BlockKept
// holds what B computes for W, including the gradients of the norms' weights, which B gets as a by-product.
//
// Kept for backward per block: elements  n (4 h + 2 a d + 2 kv d + 3 f + a s)  and 2 n statistics (rstd).
// Bytes sent: none. This file has no main: train.c runs it.
#include "transformer.h"

// ---- small helpers ----

static Tensor activation(DType dtype, int64_t rows, int64_t columns) {
    return tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(rows, columns));
}

// Moves a tensor to its next owner.
static Tensor take(Tensor *t) {
    Tensor taken = *t;
    *t = (Tensor){0};
    return taken;
}

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
static Tensor enter(Model *m, const MicroBatch *micro, Tensor x) {
    return m->sockets.region.enter(m->sockets.region.context, micro, x);
}
// Frees `partial`.
static Tensor leave(Model *m, const MicroBatch *micro, Tensor partial) {
    Tensor y = m->sockets.region.leave(m->sockets.region.context, micro, partial);
    tensor_free(&partial);
    return y;
}
// Frees `dinside`.
static Tensor enter_backward(Model *m, const MicroBatch *micro, Tensor dinside) {
    Tensor dx = m->sockets.region.enter_backward(m->sockets.region.context, micro, dinside);
    tensor_free(&dinside);
    return dx;
}
static Tensor leave_backward(Model *m, const MicroBatch *micro, Tensor dy) {
    return m->sockets.region.leave_backward(m->sockets.region.context, micro, dy);
}

// *y[i] = x W_i^T, new (n, out_i)
static void linears_forward(Model *m, int count, Param *const *weight, Tensor *const *y, Tensor x,
                            void **kept) {
    Tensor made[count];
    for (int i = 0; i < count; i++) {
        made[i] = activation(x.dtype, tensor_rows(x), weight[i]->shape[0]);
        *y[i] = made[i];
    }
    m->sockets.linear.forward(m->sockets.linear.context, m, count, weight, made, x, kept);
}
static Tensor linear_forward(Model *m, Param *weight, Tensor x, void **kept) {
    Tensor y;
    linears_forward(m, 1, &weight, (Tensor *[]){&y}, x, kept);
    return y;
}
// dx = sum over i of dy[i] W_i
static void linears_backward_input(Model *m, int count, Param *const *weight, Tensor dx, const Tensor *dy,
                                   void **kept) {
    m->sockets.linear.backward_input(m->sockets.linear.context, m, count, weight, dx, dy, kept);
}
// dW_i += dy[i]^T x
static void linears_backward_weight(Model *m, int count, Param *const *weight, const Tensor *dy, Tensor x,
                                    void **kept) {
    m->sockets.linear.backward_weight(m->sockets.linear.context, m, count, weight, dy, x, kept);
}

static Tensor norm_forward(Model *m, Param *weight, Tensor x, Tensor *rstd) {
    Tensor y = tensor_like(MEMORY_ACTIVATION, x);
    *rstd = tensor_new(MEMORY_ACTIVATION, dtype_full(x.dtype), SHAPE(tensor_rows(x)));
    op_rmsnorm_forward(y, *rstd, x, param_value(&m->params, weight), m->config.norm_eps);
    return y;
}
// y = x + branch(norm(x)):  dx = dy + norm'(dnorm), written over dnorm; *dweight (h) is new, kept for W
static Tensor norm_backward(Model *m, Param *weight, Tensor dy, Tensor dnorm, Tensor x, Tensor rstd,
                            Tensor *dweight) {
    const DType dtype = dtype_wider(x.dtype, m->params.recipe.gradient);
    *dweight = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(tensor_columns(x)));
    op_fill(*dweight, 0);
    op_rmsnorm_backward(dnorm, *dweight, dy, dnorm, x, param_value(&m->params, weight), rstd);
    return dnorm;
}

// ---- W and the gradients socket ----

static void begin_gradient(Model *m, int unit) {
    m->sockets.gradients.begin(m->sockets.gradients.context, m, unit);
}
void model_gradient_ready(Model *m, int unit) {
    Unit *u = &m->params.unit[unit];
    u->waits = tensor_exists(u->accumulated);
    m->sockets.gradients.ready(m->sockets.gradients.context, m, unit, --m->ready_left[unit] == 0);
    CHECK(!u->waits || !tensor_exists(u->grads),
          "the gradient of %s stays in %s: after each micro-batch `ready` adds it to the sums "
          "(params_accumulate)",
          u->name, dtype_name(u->grads.dtype));
}
// Adds the gradient of a norm's weight, which B has already computed.
static void add_norm_gradient(Model *m, Param *weight, Tensor *dweight) {
    Tensor grad = param_grad_begin(&m->params, weight);
    op_accumulate(grad, *dweight);
    param_grad_end(&m->params, weight, grad);
    tensor_free(dweight);
}

void model_begin_step(Model *m, int64_t micro_batches) {
    for (int i = 0; i < m->params.units; i++) m->ready_left[i] = micro_batches;
}

// ---- a block, forward: fills kept from kept->x and returns the block's output ----

Tensor block_compute(Model *m, MicroBatch *micro, int layer) {
    const BlockParams *w = &m->block[layer];
    BlockKept *kept = micro->block[layer];
    Sockets *sockets = &m->sockets;

    kept->norm1 = norm_forward(m, w->norm1, kept->x, &kept->rstd1);
    Tensor inside = enter(m, micro, kept->norm1);
    linears_forward(m, 3, (Param *[]){w->q, w->k, w->v}, (Tensor *[]){&kept->q, &kept->k, &kept->v}, inside,
                    &kept->linear[0]);
    tensor_free(&inside);
    op_rope(kept->q, micro->positions, config_head_size(&m->config), m->config.rope, +1);
    op_rope(kept->k, micro->positions, config_head_size(&m->config), m->config.rope, +1);
    kept->o = tensor_like(MEMORY_ACTIVATION, kept->q);
    sockets->attention.forward(sockets->attention.context, micro, kept->o, &kept->attention, kept->q,
                               kept->k, kept->v, attention_shape(w, m, micro));
    // The residual is added after `leave`, which may have summed over ranks; so no multiply can add it.
    kept->x2 = leave(m, micro, linear_forward(m, w->o, kept->o, &kept->linear[1]));
    op_add(kept->x2, kept->x2, kept->x);

    kept->norm2 = norm_forward(m, w->norm2, kept->x2, &kept->rstd2);
    Tensor y = sockets->mlp.forward(sockets->mlp.context, m, micro, layer, kept->norm2);
    op_add(y, y, kept->x2);
    return y;
}

// Made where a block runs first: a rank of a pipeline runs a few of the model's blocks.
static BlockKept *kept_of(MicroBatch *micro, int layer) {
    BlockKept **kept = &micro->block[layer];
    if (!*kept) {
        *kept = host_alloc(sizeof **kept);
        **kept = (BlockKept){0};
    }
    return *kept;
}

static void block_forward(Model *m, MicroBatch *micro, int layer) {
    int unit = m->first_block_unit + layer;
    kept_of(micro, layer)->x = take(&micro->x);
    acquire(m, unit, FORWARD);
    micro->x = block_compute(m, micro, layer);
    release(m, unit, FORWARD);
    m->sockets.activations.after_forward(m->sockets.activations.context, m, micro, layer);
}

// ---- a block, backward ----

static void block_backward_input(Model *m, MicroBatch *micro, int layer) {
    const BlockParams *w = &m->block[layer];
    BlockKept *kept = micro->block[layer];
    Sockets *sockets = &m->sockets;
    int unit = m->first_block_unit + layer;
    acquire(m, unit, BACKWARD);
    sockets->activations.before_backward(sockets->activations.context, m, micro, layer);

    // y = x2 + mlp(norm2(x2))
    Tensor dy = take(&micro->dx);
    Tensor dnorm2 = sockets->mlp.backward_input(sockets->mlp.context, m, micro, layer, dy);
    Tensor dx2 = norm_backward(m, w->norm2, dy, dnorm2, kept->x2, kept->rstd2, &kept->dweight2);
    tensor_free(&dy);
    tensor_free(&kept->x2);
    tensor_free(&kept->rstd2);

    // x2 = x + Wo attention(rope(Wq norm1(x)), rope(Wk …), Wv …)
    kept->dx2 = leave_backward(m, micro, dx2);
    Tensor d_o = tensor_like(MEMORY_ACTIVATION, kept->o);
    linears_backward_input(m, 1, &w->o, d_o, &kept->dx2, &kept->linear[1]);
    kept->dq = tensor_like(MEMORY_ACTIVATION, kept->q);
    kept->dk = tensor_like(MEMORY_ACTIVATION, kept->k);
    kept->dv = tensor_like(MEMORY_ACTIVATION, kept->v);
    sockets->attention.backward(sockets->attention.context, micro, kept->dq, kept->dk, kept->dv, d_o,
                                &kept->attention, kept->q, kept->k, kept->v, kept->o,
                                attention_shape(w, m, micro));
    sockets->attention.drop(sockets->attention.context, &kept->attention);
    tensor_free(&d_o);
    tensor_free(&kept->q);
    tensor_free(&kept->k);
    tensor_free(&kept->v);
    op_rope(kept->dq, micro->positions, config_head_size(&m->config), m->config.rope, -1);
    op_rope(kept->dk, micro->positions, config_head_size(&m->config), m->config.rope, -1);
    Tensor dinside = activation(kept->dq.dtype, tensor_rows(kept->dq), w->q->shape[1]);
    linears_backward_input(m, 3, (Param *[]){w->q, w->k, w->v}, dinside,
                           (Tensor[]){kept->dq, kept->dk, kept->dv}, &kept->linear[0]);
    micro->dx = norm_backward(m, w->norm1, dx2, enter_backward(m, micro, dinside), kept->x, kept->rstd1,
                              &kept->dweight1);
    tensor_free(&dx2);
    tensor_free(&kept->x);
    tensor_free(&kept->rstd1);
    release(m, unit, BACKWARD);
}

static void block_backward_weight(Model *m, MicroBatch *micro, int layer) {
    const BlockParams *w = &m->block[layer];
    BlockKept *kept = micro->block[layer];
    int unit = m->first_block_unit + layer;

    begin_gradient(m, unit);
    m->sockets.mlp.backward_weight(m->sockets.mlp.context, m, micro, layer, kept->norm2);
    add_norm_gradient(m, w->norm2, &kept->dweight2);
    // Forward kept norm1, not what enter returned: with sequence parallelism W all-gathers the rows again.
    Tensor inside = enter(m, micro, kept->norm1);
    linears_backward_weight(m, 1, &w->o, &kept->dx2, kept->o, &kept->linear[1]);
    linears_backward_weight(m, 3, (Param *[]){w->q, w->k, w->v}, (Tensor[]){kept->dq, kept->dk, kept->dv},
                            inside, &kept->linear[0]);
    tensor_free(&inside);
    add_norm_gradient(m, w->norm1, &kept->dweight1);
    block_drop(m, kept, false);
    model_gradient_ready(m, unit);
}

void block_drop(Model *m, BlockKept *kept, bool keep_input) {
    Tensor *const all[] = {&kept->rstd1, &kept->norm1, &kept->q,     &kept->k,        &kept->v,
                           &kept->o,     &kept->x2,    &kept->rstd2, &kept->norm2,    &kept->dx2,
                           &kept->dq,    &kept->dk,    &kept->dv,    &kept->dweight1, &kept->dweight2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(all[i]);
    m->sockets.attention.drop(m->sockets.attention.context, &kept->attention);
    m->sockets.mlp.drop(m->sockets.mlp.context, &kept->mlp);
    for (int i = 0; i < 2; i++) {
        m->sockets.linear.drop(m->sockets.linear.context, &kept->linear[i]);
        m->sockets.linear.drop(m->sockets.linear.context, &kept->mlp.linear[i]);
    }
    if (!keep_input) tensor_free(&kept->x);
}

// ---- the ends: embedding and head ----

static void embedding_forward(Model *m, MicroBatch *micro) {
    acquire(m, m->embedding_unit, FORWARD);
    micro->x = m->sockets.vocabulary.lookup(m->sockets.vocabulary.context, micro,
                                            param_value(&m->params, m->embedding));
    release(m, m->embedding_unit, FORWARD);
}

// With tied weights, a micro-batch's embedding gradient is final once both lookup and head have added to
// it.
static void embedding_part_ready(Model *m, MicroBatch *micro) {
    if (--micro->embedding_parts == 0) model_gradient_ready(m, m->embedding_unit);
}

// Tokens have no gradient, so there is no B.
static void embedding_backward_weight(Model *m, MicroBatch *micro) {
    begin_gradient(m, m->embedding_unit);
    Tensor grad = param_grad_begin(&m->params, m->embedding);
    m->sockets.vocabulary.lookup_backward(m->sockets.vocabulary.context, micro, grad, micro->dx);
    param_grad_end(&m->params, m->embedding, grad);
    tensor_free(&micro->dx);
    embedding_part_ready(m, micro);
}

// With tied weights the head multiplies by the embedding's weight, and so needs that unit too.
static void acquire_head(Model *m, Pass pass) {
    acquire(m, m->head_unit, pass);
    if (m->config.tied) acquire(m, m->embedding_unit, pass);
}
static void release_head(Model *m, Pass pass) {
    if (m->config.tied) release(m, m->embedding_unit, pass);
    release(m, m->head_unit, pass);
}

static void head_forward(Model *m, MicroBatch *micro) {
    HeadKept *kept = &micro->head;
    kept->x = take(&micro->x);
    acquire_head(m, FORWARD);
    kept->norm = norm_forward(m, m->norm, kept->x, &kept->rstd);
    Tensor inside = m->sockets.vocabulary.enter(m->sockets.vocabulary.context, micro, kept->norm);
    kept->logits = linear_forward(m, m->head, inside, &kept->linear);
    tensor_free(&inside);
    release_head(m, FORWARD);
    // The sum over tokens, times 1 / (labels of the whole global batch): micro-batches simply add up.
    m->sockets.vocabulary.loss(m->sockets.vocabulary.context, micro, &kept->lse, kept->logits);
}

static void head_backward_input(Model *m, MicroBatch *micro) {
    HeadKept *kept = &micro->head;
    acquire_head(m, BACKWARD);
    m->sockets.vocabulary.loss_backward(m->sockets.vocabulary.context, micro, kept->logits, kept->logits,
                                        kept->lse);
    Tensor dinside = activation(kept->norm.dtype, tensor_rows(kept->logits), m->head->shape[1]);
    linears_backward_input(m, 1, &m->head, dinside, &kept->logits, &kept->linear);
    Tensor dnorm = m->sockets.vocabulary.enter_backward(m->sockets.vocabulary.context, micro, dinside);
    tensor_free(&dinside);
    micro->dx = norm_backward(m, m->norm, (Tensor){0}, dnorm, kept->x, kept->rstd, &kept->dweight);
    release_head(m, BACKWARD);
    tensor_free(&kept->x);
    tensor_free(&kept->rstd);
    tensor_free(&kept->lse);
}

static void head_backward_weight(Model *m, MicroBatch *micro) {
    HeadKept *kept = &micro->head;
    begin_gradient(m, m->head_unit);
    if (m->config.tied) begin_gradient(m, m->embedding_unit);
    Tensor inside = m->sockets.vocabulary.enter(m->sockets.vocabulary.context, micro, kept->norm);
    linears_backward_weight(m, 1, &m->head, &kept->logits, inside, &kept->linear);
    tensor_free(&inside);
    add_norm_gradient(m, m->norm, &kept->dweight);
    tensor_free(&kept->logits);
    tensor_free(&kept->norm);
    m->sockets.linear.drop(m->sockets.linear.context, &kept->linear);
    model_gradient_ready(m, m->head_unit);
    if (m->config.tied) embedding_part_ready(m, micro);
}

// ---- stages: ranges of these ----

Chunk chunk_whole(const Model *m) { return (Chunk){0, (int)m->config.layers, true, true}; }

void chunk_forward(Model *m, MicroBatch *micro, Chunk chunk) {
    if (chunk.embedding) embedding_forward(m, micro);
    for (int layer = chunk.first_layer; layer < chunk.end_layer; layer++) block_forward(m, micro, layer);
    if (chunk.head) head_forward(m, micro);
}

void chunk_backward_input(Model *m, MicroBatch *micro, Chunk chunk) {
    if (chunk.head) head_backward_input(m, micro);
    for (int layer = chunk.end_layer - 1; layer >= chunk.first_layer; layer--)
        block_backward_input(m, micro, layer);
}

void chunk_backward_weight(Model *m, MicroBatch *micro, Chunk chunk) {
    if (chunk.head) head_backward_weight(m, micro);
    for (int layer = chunk.end_layer - 1; layer >= chunk.first_layer; layer--)
        block_backward_weight(m, micro, layer);
    if (chunk.embedding) embedding_backward_weight(m, micro);
}

void chunk_backward(Model *m, MicroBatch *micro, Chunk chunk) {
    if (chunk.head) {
        head_backward_input(m, micro);
        head_backward_weight(m, micro);
    }
    for (int layer = chunk.end_layer - 1; layer >= chunk.first_layer; layer--) {
        block_backward_input(m, micro, layer);
        block_backward_weight(m, micro, layer);
    }
    if (chunk.embedding) embedding_backward_weight(m, micro);
}

// ---- the whole model on one device ----

void model_forward(Model *m, MicroBatch *micro) { chunk_forward(m, micro, chunk_whole(m)); }
void model_backward(Model *m, MicroBatch *micro) { chunk_backward(m, micro, chunk_whole(m)); }
