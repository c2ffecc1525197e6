// micro_batch.c: a micro-batch: its tokens on the device, its loss, and the first bad tensor if the loss is
// not finite.
//
// Bytes sent: none. This file has no main: grad_accumulation.c makes one after another.
#include <math.h>
#include <stdlib.h>

#include "transformer.h"

// The part of this number, of `count` integers; host: NULL in a dry run.
static Tensor integers(int64_t count, const int32_t *host, int part) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, I32, SHAPE(count));
    tensor_from_host(t, host ? host + part * count : NULL);
    return t;
}

// Counted as communication, since it exists to be sent: to other ranks, and to the host.
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

// The document of each token in b whole sequences; a document includes the token that ends it. A dry run has
// no tokens, and so no ends.
static int32_t *documents_new(const Config *c, int64_t b, const int32_t *tokens) {
    int64_t end = config_document_end(c);
    if (end < 0) return NULL;
    int32_t *documents = host_alloc(b * c->seq * sizeof *documents);
    for (int64_t i = 0; i < b * c->seq; i++)
        documents[i] = i % c->seq == 0 ? 0 : documents[i - 1] + (tokens && tokens[i - 1] == end);
    return documents;
}

MicroBatch micro_batch_new(const Model *m, int64_t index, int64_t b, const int32_t *tokens,
                           const int32_t *targets, double loss_scale) {
    const Sockets *sockets = &m->sockets;
    int64_t whole = m->config.seq, s = sockets->tokens.count(sockets->tokens.context, whole), n = b * s;
    MicroBatch micro = {.index = index,
                        .b = b,
                        .s = s,
                        .loss_scale = loss_scale,
                        .grad_scale = loss_scale * m->grad_scale,
                        .documents = documents_new(&m->config, b, tokens),
                        .embedding_parts = m->config.tied ? 2 : 1};
    // A dry run has no memory to copy to.
    int32_t *own = device_is_dry_run() ? NULL : host_alloc(3 * n * sizeof *own);
    for (int64_t i = 0; i < s && own; i++) {
        int64_t position = sockets->tokens.position(sockets->tokens.context, whole, i);
        for (int64_t to = i, at = position; to < n; to += s, at += whole) {
            own[to] = tokens[at];
            own[n + to] = targets[at];
            own[2 * n + to] = (int32_t)position;
        }
    }
    micro.tokens = integers(n, own, 0);
    micro.targets = integers(n, own, 1);
    micro.positions = integers(n, own, 2);
    free(own);
    micro.loss = loss_new();
    micro.block = calloc(m->config.layers, sizeof *micro.block);
    CHECK(micro.block, "out of host memory for a micro-batch");
    return micro;
}

MicroBatch micro_batch_of(const Model *m, const StepInput *input, int64_t index, double loss_scale) {
    const int32_t *tokens = input->tokens, *targets = input->targets;
    if (tokens) tokens += index * input->b * m->config.seq, targets += index * input->b * m->config.seq;
    return micro_batch_new(m, index, input->b, tokens, targets, loss_scale);
}

void micro_batch_free(Model *m, MicroBatch *micro) {
    Tensor *const all[] = {&micro->tokens,      &micro->targets,  &micro->positions,    &micro->x,
                           &micro->dx,          &micro->head.x,   &micro->head.rstd,    &micro->head.norm,
                           &micro->head.logits, &micro->head.lse, &micro->head.dweight, &micro->loss};
    m->sockets.linear.drop(m->sockets.linear.context, &micro->head.linear);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(all[i]);
    for (int64_t layer = 0; layer < m->config.layers; layer++) {
        if (micro->block[layer]) block_drop(m, micro->block[layer], false);
        free(micro->block[layer]);
    }
    free(micro->block);
    free(micro->documents);
    *micro = (MicroBatch){0};
}

const char *micro_batch_first_bad(const Model *m, const MicroBatch *micro) {
    static char text[100];
    for (int i = 0; i < m->params.count; i++) {
        const Param *param = &m->params.param[i];
        if (!param->here) continue;
        // Of a weight that this rank has only a part of, that part is checked.
        bool whole = tensor_exists(m->params.unit[param->unit].values);
        Tensor weight = whole ? param_value(&m->params, param) : param_own_value(&m->params, param, NULL);
        if (!tensor_exists(weight) || isfinite(op_sum_squares(weight))) continue;
        snprintf(text, sizeof text, "weight %s", param->name);
        return text;
    }
    for (int layer = 0; layer < m->config.layers; layer++) {
        const BlockKept *k = micro->block[layer];
        if (!k) continue;
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
