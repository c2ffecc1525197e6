// model.c: the parameter table that transformer.c runs on.
//
// The table is the only place that describes a weight: its Hugging Face name, its shape (out, in), its role
// in the model, whether it decays, how it is initialized. Every rank lists all weights; techniques then say
// what stays on a rank. A unit is what one all-gather of weights moves: the embedding, each block, and the
// head.
//
//   parameters  (2 v h, or v h if tied) + L (2 h a d + 2 h kv d + 3 h f + 2 h) + h
//
// The experts of a block are a unit of their own, after the head: the ranks that hold copies of them may
// differ from those that hold copies of the rest of the block.
//
// Bytes sent: none. This file has no main: train.c runs it.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "transformer.h"

// ---- the parameter table ----

static const double std = 0.02;
// The matrices that write to the residual stream start smaller, since 2 L of them add up there.
static double residual_std(const Config *c) { return std / sqrt(2.0 * (double)c->layers); }

static Param *add_to_layer(Params *p, int64_t layer, ParamSpec spec) {
    char name[80];
    snprintf(name, sizeof name, "model.layers.%d.%.40s.weight", (int)layer, spec.name);
    spec.name = name;
    return params_add(p, &spec);
}

// With experts: the router, and as the MLP only the shared expert that all tokens pass through.
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
        add_to_layer(p, layer, (ParamSpec){"block_sparse_moe.gate", ROLE_ROUTER, c->experts, h, true, std})
            ->apart = true;
}

// First the gates of all experts, then their ups and downs: on a rank that holds some of the experts, the
// matrices of each kind are adjacent.
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

// Finds the weights of a block by their roles, wherever they are in the table.
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
            *place[param->role] = param;  // descending j: of experts, the first one remains
        }
}

// Sets the ranks that hold copies of the same experts (replicas) and those over which one replica's experts
// are spread. No weight of an expert is copied across the ranks of tp.
static void begin_experts(Params *p, const Mesh *mesh) {
    if (mesh->ep.size == 1) return;
    p->replicas = mesh->expert_dp;
    p->spread = mesh->ep_pp;
    p->within = mesh_single().tp;
}

Model *model_new(const Config *config, Mesh mesh) {
    Model *m = host_alloc(sizeof *m);
    *m = (Model){.config = *config, .mesh = mesh, .sockets = sockets_single_device(), .grad_scale = 1};
    Params *p = &m->params;
    int64_t h = config->hidden, v = config->vocab;
    params_begin(p, &mesh);
    p->recipe = recipe_standard(config->dtype);
    params_add_unit(p, "embedding");
    params_add(p, &(ParamSpec){"model.embed_tokens.weight", ROLE_EMBEDDING, v, h, true, std});
    for (int64_t layer = 0; layer < config->layers; layer++) add_block(p, config, layer);
    params_add_unit(p, "head");
    params_add(p, &(ParamSpec){"model.norm.weight", ROLE_NORM, h, 0, false, 0});
    if (!config->tied) params_add(p, &(ParamSpec){"lm_head.weight", ROLE_HEAD, v, h, true, std});
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
    for (int i = 0; i < p->units; i++) m->ready_left[i] = 0;  // as between steps
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
