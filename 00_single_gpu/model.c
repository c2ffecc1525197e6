// model.c: what transformer.c runs on: the parameter table, the empty sockets, micro-batches.
//
// The table is the one place that knows a weight: its Hugging Face name, its shape (out, in), how tensor
// parallelism would cut it, whether it decays, how it is born. Units, which parameter collectives move at
// once: the embedding, each block, the head.
//
//   parameters  (2 v h, or v h if tied) + L (2 h^2 + 2 h kv d + 3 h f + 2 h) + h
//
// Bytes sent: none. This file has no main: train.c runs it.
#include <math.h>
#include <stdlib.h>

#include "playbook.h"

// ---- empty sockets ----

static void no_unit_change(void *context, Model *model, int unit, Pass pass) {
    (void)context, (void)model, (void)unit, (void)pass;
}

static void nothing_after_the_step(void *context, Model *model, int unit) {
    (void)context, (void)model, (void)unit;
}

static void weights_are_whole(void *context, Model *model) { (void)context, (void)model; }

static void gradients_exist(void *context, Model *model, int unit, MicroBatch *micro) {
    (void)context, (void)model, (void)unit, (void)micro;
}

static void add_to_accumulators(void *context, Model *model, int unit, MicroBatch *micro) {
    (void)context, (void)micro;
    params_accumulate(&model->params, unit);
}

static void nothing_to_finish(void *context, Model *model, MicroBatch *micro) {
    (void)context, (void)model, (void)micro;
}

static Tensor identity(void *context, Tensor x) {
    (void)context;
    return tensor_share(x);
}

static Tensor lookup(void *context, Tensor tokens, Tensor weight) {
    (void)context;
    Tensor x =
        tensor_new(MEMORY_ACTIVATION, weight.dtype, SHAPE(tensor_count(tokens), tensor_columns(weight)));
    op_embedding_forward(x, tokens, weight);
    return x;
}
static void lookup_backward(void *context, Tensor dweight, Tensor dx, Tensor tokens) {
    (void)context;
    op_embedding_backward(dweight, dx, tokens);
}
static double loss(void *context, Tensor *lse, Tensor logits, Tensor targets) {
    (void)context;
    DType statistics = logits.dtype == F64 ? F64 : F32;  // of a row: full precision
    Tensor losses = tensor_new(MEMORY_ACTIVATION, statistics, SHAPE(tensor_rows(logits)));
    *lse = tensor_like(MEMORY_ACTIVATION, losses);
    op_cross_entropy_forward(losses, *lse, logits, targets);
    double sum = op_sum(losses);
    tensor_free(&losses);
    return sum;
}
static void loss_backward(void *context, Tensor dlogits, Tensor logits, Tensor lse, Tensor targets,
                          double scale) {
    (void)context;
    op_cross_entropy_backward(dlogits, logits, lse, targets, scale);
}

static Tensor new_probs(Tensor q, AttentionShape shape) {
    return tensor_new(MEMORY_ACTIVATION, q.dtype, SHAPE(shape.b, shape.heads, shape.s, shape.s));
}
static void attention_forward(void *context, Tensor o, AttentionKept *kept, Tensor q, Tensor k, Tensor v,
                              AttentionShape shape) {
    (void)context;
    kept->probs = new_probs(q, shape);
    op_attention_forward(o, kept->probs, q, k, v, shape);
}
static void attention_backward(void *context, Tensor dq, Tensor dk, Tensor dv, Tensor d_o,
                               AttentionKept *kept, Tensor q, Tensor k, Tensor v, Tensor o,
                               AttentionShape shape) {
    (void)context, (void)o;
    op_attention_backward(dq, dk, dv, d_o, q, k, v, kept->probs, shape);
}
static void attention_drop(void *context, AttentionKept *kept) {
    (void)context;
    tensor_free(&kept->probs);
}
static void attention_again(void *context, AttentionKept *kept, Tensor q, Tensor k, Tensor v,
                            AttentionShape shape) {
    (void)context, (void)v;
    kept->probs = new_probs(q, shape);
    op_attention_probs(kept->probs, q, k, shape);
}

static void linear_forward(void *context, Model *m, int count, Param *const *weight, const Tensor *y,
                           Tensor x) {
    (void)context;
    for (int i = 0; i < count; i++) op_matmul(y[i], x, param_value(&m->params, weight[i]), false, true, 0);
}
static void linear_backward_input(void *context, Model *m, int count, Param *const *weight, Tensor dx,
                                  const Tensor *dy) {
    (void)context;
    for (int i = 0; i < count; i++)
        op_matmul(dx, dy[i], param_value(&m->params, weight[i]), false, false, i > 0);
}
static void linear_backward_weight(void *context, Model *m, int count, Param *const *weight,
                                   const Tensor *dy, Tensor x) {
    (void)context;
    for (int i = 0; i < count; i++)
        op_matmul(param_grad(&m->params, weight[i]), dy[i], x, true, false, 1);
}

// SwiGLU: y = Wdown act,  act = silu(gate) * up,  gate = Wgate x,  up = Wup x
static Tensor mlp_forward(void *context, Model *m, int layer, MlpKept *kept, Tensor x) {
    (void)context;
    const BlockParams *w = &m->block[layer];
    int64_t n = tensor_rows(x);
    kept->gate = tensor_new(MEMORY_ACTIVATION, x.dtype, SHAPE(n, w->gate->shape[0]));
    kept->up = tensor_like(MEMORY_ACTIVATION, kept->gate);
    kept->act = tensor_like(MEMORY_ACTIVATION, kept->gate);
    Tensor y = tensor_new(MEMORY_ACTIVATION, x.dtype, SHAPE(n, w->down->shape[0]));
    m->sockets.linear.forward(m->sockets.linear.context, m, 2, (Param *[]){w->gate, w->up},
                              (Tensor[]){kept->gate, kept->up}, x);
    op_swiglu_forward(kept->act, kept->gate, kept->up);
    m->sockets.linear.forward(m->sockets.linear.context, m, 1, &w->down, &y, kept->act);
    return y;
}
static Tensor mlp_backward_input(void *context, Model *m, int layer, MlpKept *kept, Tensor dy) {
    (void)context;
    const BlockParams *w = &m->block[layer];
    Tensor dact = tensor_like(MEMORY_ACTIVATION, kept->act);
    m->sockets.linear.backward_input(m->sockets.linear.context, m, 1, &w->down, dact, &dy);
    op_swiglu_backward(kept->gate, kept->up, dact, kept->gate, kept->up);
    kept->dgate = kept->gate;  // the gradients stand where the values stood
    kept->dup = kept->up;
    kept->gate = kept->up = (Tensor){0};
    tensor_free(&dact);
    Tensor dx = tensor_new(MEMORY_ACTIVATION, dy.dtype, SHAPE(tensor_rows(dy), w->gate->shape[1]));
    m->sockets.linear.backward_input(m->sockets.linear.context, m, 2, (Param *[]){w->gate, w->up}, dx,
                                     (Tensor[]){kept->dgate, kept->dup});
    return dx;
}
static void mlp_backward_weight(void *context, Model *m, int layer, MlpKept *kept, Tensor dy, Tensor x) {
    (void)context;
    const BlockParams *w = &m->block[layer];
    m->sockets.linear.backward_weight(m->sockets.linear.context, m, 1, &w->down, &dy, kept->act);
    m->sockets.linear.backward_weight(m->sockets.linear.context, m, 2, (Param *[]){w->gate, w->up},
                                      (Tensor[]){kept->dgate, kept->dup}, x);
}
static void mlp_drop(void *context, MlpKept *kept) {
    (void)context;
    Tensor *const all[] = {&kept->gate, &kept->up, &kept->act, &kept->dgate, &kept->dup};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(all[i]);
}

static void keep_everything(void *context, Model *model, MicroBatch *micro, int layer) {
    (void)context, (void)model, (void)micro, (void)layer;
}

Sockets sockets_single_device(void) {
    return (Sockets){
        .parameters = {NULL, no_unit_change, no_unit_change, nothing_after_the_step, weights_are_whole},
        .gradients = {NULL, gradients_exist, add_to_accumulators, nothing_to_finish},
        .region = {NULL, identity, identity, identity, identity},
        .vocabulary = {NULL, lookup, lookup_backward, identity, identity, loss, loss_backward},
        .attention = {NULL, attention_forward, attention_backward, attention_drop, attention_again},
        .mlp = {NULL, mlp_forward, mlp_backward_input, mlp_backward_weight, mlp_drop},
        .linear = {NULL, linear_forward, linear_backward_input, linear_backward_weight},
        .activations = {NULL, keep_everything, keep_everything},
    };
}

// ---- the parameter table ----

enum { PARAMS_PER_BLOCK = 9 };

// Adds one weight. What every rank of tp stores whole has, under sequence parallelism, seen this rank's tokens
// alone: its gradient is then a part.
static void add(Params *p, const Config *c, ParamSpec spec, Group copies) {
    Param *param = params_add(p, &spec, copies);
    if (param->cut == CUT_NONE) param->partial = c->sp;
}

static void add_block(Params *p, const Config *c, Group kv_copies, int64_t layer) {
    int64_t h = c->hidden, f = c->ffn, heads = c->kv_heads, kv = heads * config_head_size(c);
    // The two matrices that write to the residual stream start smaller, as 2 L of them add up there.
    double std = 0.02, residual_std = 0.02 / sqrt(2.0 * (double)c->layers);
    ParamSpec spec[PARAMS_PER_BLOCK] = {
        {"input_layernorm", h, 0, CUT_NONE, 0, false, 0},
        {"self_attn.q_proj", h, h, CUT_ROWS, 0, true, std},
        {"self_attn.k_proj", kv, h, CUT_HEADS, heads, true, std},
        {"self_attn.v_proj", kv, h, CUT_HEADS, heads, true, std},
        {"self_attn.o_proj", h, h, CUT_COLUMNS, 0, true, residual_std},
        {"post_attention_layernorm", h, 0, CUT_NONE, 0, false, 0},
        {"mlp.gate_proj", f, h, CUT_ROWS, 0, true, std},
        {"mlp.up_proj", f, h, CUT_ROWS, 0, true, std},
        {"mlp.down_proj", h, f, CUT_COLUMNS, 0, true, residual_std},
    };
    char name[80];
    snprintf(name, sizeof name, "block %d", (int)layer);
    params_add_unit(p, name);
    for (int i = 0; i < PARAMS_PER_BLOCK; i++) {
        snprintf(name, sizeof name, "model.layers.%d.%s.weight", (int)layer, spec[i].name);
        spec[i].name = name;
        add(p, c, spec[i], kv_copies);
    }
}

// The ranks of tp that share a key/value head with this one, where there are fewer heads than ranks.
static Group kv_copies(const Config *c, Group tp) {
    int copies = tp.size > c->kv_heads && tp.size % c->kv_heads == 0 ? tp.size / (int)c->kv_heads : 1;
    if (copies == 1) return (Group){.size = 1, .name = "one"};
    return comm_group("kv copies", tp.line, tp.member + tp.rank / copies * copies, copies);
}

Model *model_new(const Config *config, Mesh mesh) {
    Model *m = host_alloc(sizeof *m);
    *m = (Model){
        .config = *config, .mesh = mesh, .layers = config->layers, .sockets = sockets_single_device()};
    Params *p = &m->params;
    int64_t h = config->hidden, v = config->vocab;
    Cut vocabulary = config->vocab_parallel ? CUT_VOCABULARY : CUT_NONE;

    params_begin(p, &mesh, (Sharding)config->zero);
    Group copies = kv_copies(config, mesh.tp);
    params_add_unit(p, "embedding");
    add(p, config, (ParamSpec){"model.embed_tokens.weight", v, h, vocabulary, 0, true, 0.02}, copies);
    for (int64_t layer = 0; layer < config->layers; layer++) add_block(p, config, copies, layer);
    params_add_unit(p, "head");
    add(p, config, (ParamSpec){"model.norm.weight", h, 0, CUT_NONE, 0, false, 0}, copies);
    if (!config->tied)
        add(p, config, (ParamSpec){"lm_head.weight", v, h, vocabulary, 0, true, 0.02}, copies);

    m->embedding_unit = 0;
    m->first_block_unit = 1;
    m->head_unit = p->units - 1;
    m->embedding = &p->param[0];
    m->block = host_alloc(config->layers * sizeof *m->block);
    for (int64_t layer = 0; layer < config->layers; layer++) {
        Param *first = &p->param[p->unit[m->first_block_unit + layer].first_param];
        m->block[layer] = (BlockParams){first,     first + 1, first + 2, first + 3, first + 4,
                                        first + 5, first + 6, first + 7, first + 8};
    }
    m->norm = &p->param[p->unit[m->head_unit].first_param];
    m->head = config->tied ? m->embedding : m->norm + 1;
    params_allocate(p, config->dtype, (uint64_t)config->seed);
    return m;
}

void model_free(Model *m) {
    params_free(&m->params);
    free(m->block);
    free(m);
}

// ---- micro-batches ----

static Tensor integers(int64_t count, const int32_t *host) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, I32, SHAPE(count));
    tensor_from_host(t, host);
    return t;
}

MicroBatch micro_batch_new(const Model *m, int64_t index, int64_t b, const int32_t *tokens,
                           const int32_t *targets, double loss_scale) {
    int64_t s = m->config.seq, n = b * s;
    MicroBatch micro = {.index = index, .b = b, .s = s, .loss_scale = loss_scale};
    int32_t *positions = host_alloc(n * sizeof *positions);
    for (int64_t i = 0; i < n; i++) positions[i] = (int32_t)(i % s);
    micro.tokens = integers(n, tokens);
    micro.targets = integers(n, targets);
    micro.positions = integers(n, positions);
    free(positions);
    micro.block = calloc(m->layers, sizeof *micro.block);
    CHECK(micro.block, "out of host memory for a micro-batch");
    return micro;
}

void micro_batch_free(Model *m, MicroBatch *micro) {
    Tensor *const all[] = {&micro->tokens,      &micro->targets, &micro->positions, &micro->x,
                           &micro->dx,          &micro->head.x,  &micro->head.rstd, &micro->head.norm,
                           &micro->head.logits, &micro->head.lse};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(all[i]);
    for (int64_t layer = 0; layer < m->layers; layer++) block_drop(m, &micro->block[layer], false);
    free(micro->block);
    *micro = (MicroBatch){0};
}

// The first tensor, in the order of forward, that holds a NaN or an infinity: "weight model.norm.weight",
// "block 2 gate", or "none". Static buffer.
static const char *first_bad_tensor(const Model *m, const MicroBatch *micro) {
    static char text[100];
    for (int i = 0; i < m->params.count; i++) {
        const Param *param = &m->params.param[i];
        // Weights that this rank has only a part of are looked at as far as it has them.
        bool whole = tensor_exists(m->params.unit[param->unit].values);
        Tensor weight = whole ? param_value(&m->params, param) : param_own_value(&m->params, param, NULL);
        if (!tensor_exists(weight) || isfinite(op_sum_squares(weight))) continue;
        snprintf(text, sizeof text, "weight %s", param->name);
        return text;
    }
    for (int layer = 0; layer < m->layers; layer++) {
        const BlockKept *k = &micro->block[layer];
        const struct {
            const char *name;
            Tensor tensor;
        } kept[] = {{"x", k->x},           {"norm1", k->norm1}, {"q", k->q},        {"k", k->k},
                    {"v", k->v},           {"o", k->o},         {"x2", k->x2},      {"norm2", k->norm2},
                    {"gate", k->mlp.gate}, {"up", k->mlp.up},   {"act", k->mlp.act}};
        for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
            if (tensor_exists(kept[i].tensor) && !isfinite(op_sum_squares(kept[i].tensor))) {
                snprintf(text, sizeof text, "block %d %s", layer, kept[i].name);
                return text;
            }
    }
    if (tensor_exists(micro->head.x) && !isfinite(op_sum_squares(micro->head.x))) return "head x";
    return tensor_exists(micro->head.logits) && !isfinite(op_sum_squares(micro->head.logits))
               ? "head logits"
               : "none";
}

void micro_batch_check_loss(const Model *m, const MicroBatch *micro) {
    CHECK(isfinite(micro->loss), "the loss of micro-batch %lld is %g; the first bad tensor is: %s",
          (long long)micro->index, micro->loss, first_bad_tensor(m, micro));
}
