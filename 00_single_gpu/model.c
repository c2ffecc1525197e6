// model.c: what transformer.c runs on: the parameter table and micro-batches.
//
// The table is the one place that knows a weight: its Hugging Face name, its shape (out, in), what it is in
// the model (its role), whether it decays, how it starts. Every rank lists all of it; techniques then say
// what stays on a rank. Units, which parameter collectives move at once: the embedding, each block, the
// head.
//
//   parameters  (2 v h, or v h if tied) + L (2 h a d + 2 h kv d + 3 h f + 2 h) + h
//
// Experts of a block are a unit of their own, behind the head: other ranks may hold copies of them than of
// the rest of the block.
//
// Bytes sent: none. This file has no main: train.c runs it.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "transformer.h"

// ---- the parameter table ----

static const double std = 0.02;
// The matrices that write to the residual stream start smaller, as 2 L of them add up there.
static double residual_std(const Config *c) { return std / sqrt(2.0 * (double)c->layers); }

static void add_to_layer(Params *p, int64_t layer, ParamSpec spec) {
    char name[80];
    snprintf(name, sizeof name, "model.layers.%d.%.40s.weight", (int)layer, spec.name);
    spec.name = name;
    params_add(p, &spec);
}

// With experts: the router, and of the MLP what all tokens pass.
static void add_block(Params *p, const Config *c, int64_t layer) {
    int64_t h = c->hidden, f = config_dense_width(c), d = config_head_size(c), q = c->heads * d,
            kv = c->kv_heads * d;
    const ParamSpec always[] = {
        {"input_layernorm", ROLE_NORM1, h, 0, false, 0},
        {"self_attn.q_proj", ROLE_Q, q, h, true, std},
        {"self_attn.k_proj", ROLE_K, kv, h, true, std},
        {"self_attn.v_proj", ROLE_V, kv, h, true, std},
        {"self_attn.o_proj", ROLE_O, h, q, true, residual_std(c)},
        {"post_attention_layernorm", ROLE_NORM2, h, 0, false, 0},
    };
    const ParamSpec dense[] = {
        {"mlp.gate_proj", ROLE_GATE, f, h, true, std},
        {"mlp.up_proj", ROLE_UP, f, h, true, std},
        {"mlp.down_proj", ROLE_DOWN, h, f, true, residual_std(c)},
    };
    char name[80];
    snprintf(name, sizeof name, "block %d", (int)layer);
    params_add_unit(p, name);
    for (size_t i = 0; i < sizeof always / sizeof *always; i++) add_to_layer(p, layer, always[i]);
    for (size_t i = 0; i < sizeof dense / sizeof *dense && f > 0; i++) {
        ParamSpec spec = dense[i];
        snprintf(name, sizeof name, "mlp.shared_experts%s", spec.name + strlen("mlp"));
        if (c->experts) spec.name = name;
        add_to_layer(p, layer, spec);
    }
    if (c->experts)
        add_to_layer(p, layer, (ParamSpec){"block_sparse_moe.gate", ROLE_ROUTER, c->experts, h, true, std});
}

// First the gates of all experts, then what else they have: a rank that holds some experts has each kind of
// them side by side.
static void add_experts(Params *p, const Config *c, int64_t layer) {
    int64_t h = c->hidden, f = config_expert_width(c);
    const ParamSpec kind[] = {
        {"w1", ROLE_EXPERT_GATE, f, h, true, std},
        {"w3", ROLE_EXPERT_UP, f, h, true, std},
        {"w2", ROLE_EXPERT_DOWN, h, f, true, residual_std(c)},
    };
    char name[60];
    snprintf(name, sizeof name, "experts %d", (int)layer);
    params_add_unit(p, name);
    for (int i = 0; i < 3; i++)
        for (int64_t expert = 0; expert < c->experts; expert++) {
            ParamSpec spec = kind[i];
            snprintf(name, sizeof name, "block_sparse_moe.experts.%d.%s", (int)expert, spec.name);
            spec.name = name;
            add_to_layer(p, layer, spec);
        }
}

// By their roles, wherever they stand.
static void find_block(Model *m, int64_t layer) {
    Params *p = &m->params;
    BlockParams *b = &m->block[layer];
    Param **const place[ROLES] = {
        [ROLE_NORM1] = &b->norm1,
        [ROLE_Q] = &b->q,
        [ROLE_K] = &b->k,
        [ROLE_V] = &b->v,
        [ROLE_O] = &b->o,
        [ROLE_NORM2] = &b->norm2,
        [ROLE_GATE] = &b->gate,
        [ROLE_UP] = &b->up,
        [ROLE_DOWN] = &b->down,
        [ROLE_ROUTER] = &b->router,
        [ROLE_EXPERT_GATE] = &b->expert_gate,
        [ROLE_EXPERT_UP] = &b->expert_up,
        [ROLE_EXPERT_DOWN] = &b->expert_down,
    };
    const Unit *units[] = {&p->unit[m->first_block_unit + layer], &p->unit[m->first_expert_unit + layer]};
    *b = (BlockParams){0};
    for (int i = 0; i < (m->config.experts ? 2 : 1); i++)
        for (int j = units[i]->params - 1; j >= 0; j--) {
            Param *param = &p->param[units[i]->first_param + j];
            *place[param->role] = param;  // of experts, the first in the end
        }
}

// The ranks that hold other experts of one replica, and those that hold the same ones.
static void begin_experts(Params *p, const Mesh *mesh) {
    if (mesh->ep.size == 1) return;
    p->replicas = mesh->expert_dp;
    p->spread = mesh->ep;
}

Model *model_new(const Config *config, Mesh mesh) {
    Model *m = host_alloc(sizeof *m);
    *m = (Model){.config = *config, .mesh = mesh, .sockets = sockets_single_device(), .grad_scale = 1};
    Params *p = &m->params;
    int64_t h = config->hidden, v = config->vocab;
    params_begin(p, &mesh);
    p->recipe = recipe_standard(config->dtype);
    params_add_unit(p, "embedding");
    params_add(p, &(ParamSpec){"model.embed_tokens.weight", ROLE_EMBEDDING, v, h, true, 0.02});
    for (int64_t layer = 0; layer < config->layers; layer++) add_block(p, config, layer);
    params_add_unit(p, "head");
    params_add(p, &(ParamSpec){"model.norm.weight", ROLE_NORM, h, 0, false, 0});
    if (!config->tied) params_add(p, &(ParamSpec){"lm_head.weight", ROLE_HEAD, v, h, true, 0.02});
    m->embedding_unit = 0;
    m->first_block_unit = 1;
    m->head_unit = p->units - 1;
    m->first_expert_unit = config->experts ? p->units : 0;
    begin_experts(p, &mesh);
    for (int64_t layer = 0; layer < config->layers && config->experts; layer++)
        add_experts(p, config, layer);
    p->replicas = mesh.dp_cp;
    p->spread = mesh.tp_pp;
    params_measure(p);

    m->embedding = &p->param[0];
    m->block = host_alloc(config->layers * sizeof *m->block);
    for (int64_t layer = 0; layer < config->layers; layer++) find_block(m, layer);
    m->norm = &p->param[p->unit[m->head_unit].first_param];
    m->head = config->tied ? m->embedding : m->norm + 1;
    m->ready_left = host_alloc(p->units * sizeof *m->ready_left);
    return m;
}

void model_allocate(Model *m) {
    params_allocate(&m->params, m->params.recipe, (uint64_t)m->config.seed);
}

void model_free(Model *m) {
    params_free(&m->params);
    free(m->block);
    free(m->ready_left);
    free(m);
}

// ---- micro-batches ----

static Tensor integers(int64_t count, const int32_t *host) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, I32, SHAPE(count));
    tensor_from_host(t, host);
    return t;
}

// It is there to be sent: to other ranks, and to the host.
Tensor loss_new(void) {
    Tensor loss = tensor_new(MEMORY_COMMUNICATION, F64, SHAPE(1));
    op_fill(loss, 0);
    return loss;
}

double loss_value(Tensor loss) {
    double value;
    tensor_to_doubles(&value, loss);
    return value;
}

int64_t model_tokens(const Model *m) {
    return m->config.micro_batch * m->sockets.tokens.count(m->sockets.tokens.context, m->config.seq);
}

int64_t config_document_end(const Config *c) {
    return config_has(c, "documents") ? (int64_t)config_number(c, "documents") : -1;
}

// Documents of b whole sequences, each up to and with the token that ends it.
static int32_t *documents_new(const Config *c, int64_t b, const int32_t *tokens) {
    int64_t end = config_document_end(c);
    if (end < 0) return NULL;
    int32_t *documents = host_alloc(b * c->seq * sizeof *documents);
    for (int64_t i = 0; i < b * c->seq; i++)
        documents[i] = i % c->seq == 0 ? 0 : documents[i - 1] + (tokens[i - 1] == end);
    return documents;
}

MicroBatch micro_batch_new(const Model *m, int64_t index, int64_t b, const int32_t *tokens,
                           const int32_t *targets, double loss_scale) {
    const Sockets *on = &m->sockets;
    int64_t whole = m->config.seq, s = on->tokens.count(on->tokens.context, whole), n = b * s;
    MicroBatch micro = {.index = index,
                        .b = b,
                        .s = s,
                        .loss_scale = loss_scale,
                        .grad_scale = loss_scale * m->grad_scale,
                        .documents = documents_new(&m->config, b, tokens),
                        .embedding_parts = m->config.tied ? 2 : 1};
    int32_t *own = host_alloc(3 * n * sizeof *own), *own_targets = own + n, *positions = own + 2 * n;
    for (int64_t i = 0; i < n; i++) {
        int64_t position = on->tokens.position(on->tokens.context, whole, i % s),
                at = i / s * whole + position;
        own[i] = tokens[at];
        own_targets[i] = targets[at];
        positions[i] = (int32_t)position;
    }
    micro.tokens = integers(n, own);
    micro.targets = integers(n, own_targets);
    micro.positions = integers(n, positions);
    free(own);
    micro.loss = loss_new();
    micro.block = calloc(m->config.layers, sizeof *micro.block);
    CHECK(micro.block, "out of host memory for a micro-batch");
    return micro;
}

void micro_batch_free(Model *m, MicroBatch *micro) {
    Tensor *const all[] = {&micro->tokens,      &micro->targets,  &micro->positions,  &micro->x,
                           &micro->dx,          &micro->head.x,   &micro->head.rstd,  &micro->head.norm,
                           &micro->head.logits, &micro->head.lse, &micro->head.dnorm, &micro->loss};
    m->sockets.linear.drop(m->sockets.linear.context, &micro->head.linear);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(all[i]);
    for (int64_t layer = 0; layer < m->config.layers; layer++) block_drop(m, &micro->block[layer], false);
    free(micro->block);
    free(micro->documents);
    *micro = (MicroBatch){0};
}

const char *micro_batch_first_bad(const Model *m, const MicroBatch *micro) {
    static char text[100];
    for (int i = 0; i < m->params.count; i++) {
        const Param *param = &m->params.param[i];
        if (!param->here) continue;
        // Weights that this rank has only a part of are looked at as far as it has them.
        bool whole = tensor_exists(m->params.unit[param->unit].values);
        Tensor weight = whole ? param_value(&m->params, param) : param_own_value(&m->params, param, NULL);
        if (!tensor_exists(weight) || isfinite(op_sum_squares(weight))) continue;
        snprintf(text, sizeof text, "weight %s", param->name);
        return text;
    }
    for (int layer = 0; layer < m->config.layers; layer++) {
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
               : NULL;
}
