// cost_lone.c: the cost of a micro-batch on one rank of a cluster of any size, counted in a dry run of one
// block in which this process stands for all ranks. Playbook: "Finding the Best Training Configuration".
//
// All ranks of dp, cp and tp do the same. So one of them, whose collectives are clocked as if the others
// arrived at the same moment (comm_stand_for_all), shows the step of all, and no formula is written twice.
// All blocks are alike as well: one is counted, and the cost of a layout follows by arithmetic
// (cost_lone_step.c).
//
// Bytes sent: none. This file has no main: find_config.c uses it.
#include "cost_lone.h"

#include "five_d.h"

// ---- parts ----

enum { MICRO_BATCHES = 2 };

static void note_bytes(LoneParts *parts, const Trainer *t) {
    const Model *m = t->model;
    Price price = trainer_price(t);
    parts->expert_rows = price_rows(price.end, price.end_rows, "rows, gate, up, act, out of experts");
    parts->block = price_rows(price.block, price.block_rows, NULL) + parts->expert_rows;
    parts->tokens = price_rows(price.end, price.end_rows, "tokens, targets, positions");
    parts->always = price_rows(price.end, price.end_rows, "positions");
    parts->head =
        price_rows(price.end, price.end_rows, NULL) - parts->tokens - parts->always - parts->expert_rows;
    parts->message = price_rows(price.end, price.end_rows, "x");
    const int units[] = {m->embedding_unit, m->first_block_unit, m->head_unit};
    for (int i = 0; i < 3; i++) parts->count[i] = (double)m->params.unit[units[i]].count;
    if (m->config.experts) parts->experts = (double)m->params.unit[m->first_expert_unit].count;
}

// The most activations since the last call.
static double peak_since(int64_t held) {
    double most = (double)(memory_account().peak[MEMORY_ACTIVATION] - held);
    memory_reset_peak();
    return most;
}

// Runs one micro-batch through an embedding, a block and a head, and records the seconds and the peak of
// each. Gradients are sent only in the last micro-batch of a step.
static void note_passes(LoneParts *parts, const Trainer *t) {
    static const Chunk chunk[] = {{0, 0, true, false}, {0, 1, false, false}, {1, 1, false, true}};
    Model *m = t->model;
    const Config *c = &t->config;
    int64_t held = memory_account().now[MEMORY_ACTIVATION];
    memory_reset_peak();
    MicroBatch micro = micro_batch_new(m, 0, c->micro_batch, NULL, NULL, 1);
    for (int i = 0; i < 3; i++) {
        double before = clock_model_now();
        double waited = comm_total().exposed_seconds;
        chunk_forward(m, &micro, chunk[i]);
        parts->forward[i] = clock_model_now() - before;
        parts->most[i].f = peak_since(held);
        if (i == BLOCK) parts->waits += comm_total().exposed_seconds - waited;
    }
    for (int i = 2; i >= 0; i--) {
        double before = clock_model_now(), waited = comm_total().exposed_seconds;
        int64_t bytes = memory_account().now[MEMORY_ACTIVATION];
        chunk_backward_input(m, &micro, chunk[i]);
        parts->input[i] = clock_model_now() - before;
        parts->most[i].b = peak_since(held);
        if (i == BLOCK) parts->waiting = (double)(memory_account().now[MEMORY_ACTIVATION] - bytes);
        chunk_backward_weight(m, &micro, chunk[i]);
        parts->backward[i] = clock_model_now() - before;
        parts->most[i].w = peak_since(held);
        if (i == BLOCK) parts->waits += comm_total().exposed_seconds - waited;
    }
    micro_batch_free(m, &micro);
    m->sockets.gradients.micro_batch_ready(m->sockets.gradients.context, m, false);
}

LoneParts lone_parts(const Config *config) {
    Config c = *config;
    int64_t rows = c.cp * c.tp;
    c.layers = 1, c.grad_acc = MICRO_BATCHES, c.pp = 1;
    c.dp = c.ep > rows ? c.ep / rows : 1;  // as few as the experts take
    config_set(&c, "zero", 0);
    Mesh mesh = mesh_standing_for_all(layout_shape(&c), 0);
    Trainer *t = trainer_new(&c, mesh, five_d_layouts());
    LoneParts parts = {.tokens = 0};
    model_begin_step(t->model, 1000);
    note_passes(&parts, t);
    note_bytes(&parts, t);  // last: only a run knows how many rows arrive at the experts here
    trainer_free(t);
    mesh_end(&mesh);
    return parts;
}

// The backward time of a block that drops activations minus that of one that keeps them all.
double lone_recomputes(const Config *config, const LoneParts *parts) {
    if (config->recompute == RECOMPUTE_NONE) return 0;
    Config keeps = *config;
    keeps.recompute = RECOMPUTE_NONE;
    double again = parts->backward[BLOCK] - lone_parts(&keeps).backward[BLOCK];
    return (double)config->grad_acc * lone_layers(config, 0) * again;
}
