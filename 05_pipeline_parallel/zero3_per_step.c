// zero3_per_step.c: ZeRO-3 under a pipeline: weights are gathered once per step. Playbook: "5D parallelism in
// a nutshell", where ZeRO-3 with a pipeline should keep weights over the micro-batches of a step.
//
// Changes from zero3.c: in a step a rank's layers are used by m micro-batches. A gather for every pass would
// send a stage's weights 2 m times, and m is large to keep the bubble small. So a stage's weights are
// gathered before its first F and stay until its last W; its gradients are accumulated whole, and reduced
// once, after the W that makes them final:
//
//     compute    F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 W0 … B6 W3 W4 W5 W6
//     network    all-gather of the units, in order …         rs rs rs    rs: reduce-scatter, unit by unit
//
// Between steps a rank holds what it holds with zero3.c. Sums run over micro-batches and then over ranks, as
// with ZeRO-1.
//
// Bytes sent per rank and step, whatever m is: (N - 1) / N (g Psi + e Psi), where Psi is the number of
// parameters in its stages, with e bytes per weight, g per gradient and k of optimizer state; with zero3.c
// about m (N - 1) / N (g Psi + 2 e Psi).
// Memory per rank: e Psi / N + e Psi, g Psi / N + g Psi (and a unit of 16-bit gradients), k Psi / N. ZeRO-1
// has e Psi, g Psi and k Psi / N: within a step this is (e + g) Psi / N more, and between steps only an N-th
// of its weights and gradients. This file has no main: the chapter's programs list it, with --zero 3.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "pipeline.h"

static void shard(Model *m) { zero_shard(m, SHARD_VALUES); }

// ---- weights ----

static void start_gather(Model *m, Zero *zero, int unit) {
    Unit *u = &m->params.unit[unit];
    if (u->count == 0) return;  // another stage's
    u->values = tensor_new(MEMORY_PARAMETER, m->params.recipe.weight, SHAPE(u->count));
    int64_t *counts = zero_part_counts(u);
    zero->gathering[unit] =
        comm_all_gather_coded(u->values, u->own_values, counts, m->params.recipe.send_weights, u->replicas);
    free(counts);
}

// A step's first use of any weight starts all gathers: each is in flight while the units before it compute.
static void acquire(void *context, Model *m, int unit, Pass pass) {
    (void)pass;
    Zero *zero = context;
    if (!tensor_exists(m->params.unit[unit].values))
        for (int i = 0; i < m->params.units; i++) start_gather(m, zero, i);
    zero_wait(&zero->gathering[unit]);
}

static void stays(void *context, Model *m, int unit, Pass pass) {
    (void)context, (void)m, (void)unit, (void)pass;
}

// ---- gradients ----

// 16-bit gradients exist for one micro-batch at a time, and their sum for all.
static void add_up(Model *m, int unit) {
    Unit *u = &m->params.unit[unit];
    if (!recipe_has_accumulators(m->params.recipe)) return;
    if (!tensor_exists(u->accumulated)) {
        u->accumulated = tensor_new(MEMORY_GRADIENT, m->params.recipe.sum, SHAPE(u->count));
        op_fill(u->accumulated, 0);
    }
    unit_widen_grads(&m->params, u, u->accumulated, 1);
    unit_free_grads(u);
}

// At most one reduction is in flight: it has had the time of the next unit's W to finish.
static void end_reduction(Model *m, Zero *zero) {
    if (zero->reducing < 0) return;
    Unit *u = &m->params.unit[zero->reducing];
    zero_wait(&zero->reduction[zero->reducing]);
    op_copy(u->own_grads, tensor_view(unit_total_grad(u), u->own_first, SHAPE(u->own_count)));
    tensor_free(&u->accumulated);
    tensor_free(&u->grads);
    zero->reducing = -1;
}

static void ready(void *context, Model *m, int unit, bool last) {
    Zero *zero = context;
    Unit *u = &m->params.unit[unit];
    add_up(m, unit);
    if (!last) return;
    end_reduction(m, zero);
    zero->reducing = unit;
    Tensor whole = unit_total_grad(u), own = tensor_view(whole, u->own_first, SHAPE(u->own_count));
    int64_t *counts = zero_part_counts(u);
    zero->reduction[unit] = comm_reduce_scatter(own, whole, counts, REDUCE_SUM, u->replicas);
    free(counts);
}

// The optimizer updates only parts: whole weights are past their last W, and would soon be out of date.
static void finish(void *context, Model *m) {
    end_reduction(m, context);
    m->sockets.parameters.complete(m->sockets.parameters.context, m);  // zero3.c's: frees all
}

static void *plug(Model *m) {
    // Its other sockets stay: a gradient is made where there is none, what was gathered is freed at the end.
    Zero *zero = zero3.plug(m);
    m->sockets.parameters.acquire = acquire;
    m->sockets.parameters.release = stays;
    m->sockets.gradients.ready = ready;
    m->sockets.gradients.finish = finish;
    return zero;
}

// ---- the price: which gradients of several stages are whole at once follows from the rank's list ----

typedef struct AtWork {
    const Model *m;
    const Pipeline *p;
    bool *whole, *summed;  // (units) what begin and add_up have made; two halves of one allocation
    int64_t *left;         // (units) how often it will still be ready
    int *parts;            // (m) of the embedding's gradient, still to come
    int reducing;
    double now, most;  // bytes
} AtWork;

static double bytes_of(const AtWork *w, int unit, DType dtype) {
    return (double)w->m->params.unit[unit].count * (double)dtype_size(dtype);
}

static void grow(AtWork *w, bool *made, double bytes) {
    if (*made) return;
    *made = true;
    w->now += bytes;
    w->most = fmax(w->most, w->now);
}

static void begins(AtWork *w, int unit) {
    grow(w, &w->whole[unit], bytes_of(w, unit, w->m->params.recipe.gradient));
}

static void is_ready(AtWork *w, int unit) {
    Recipe r = w->m->params.recipe;
    if (recipe_has_accumulators(r)) {
        grow(w, &w->summed[unit], bytes_of(w, unit, r.sum));
        w->whole[unit] = false;
        w->now -= bytes_of(w, unit, r.gradient);
    }
    if (--w->left[unit] > 0) return;
    if (w->reducing >= 0) w->now -= bytes_of(w, w->reducing, r.sum);
    w->reducing = unit;
}

// W of a chunk, in the order of transformer.c. If tied, the embedding begins with the head.
static void backward_weight(AtWork *w, StagePass pass) {
    const Model *m = w->m;
    const Chunk *chunk = &w->p->chunk[pass.stage];
    bool tied = chunk->head && m->config.tied;
    if (chunk->head) begins(w, m->head_unit);
    if (tied) begins(w, m->embedding_unit);
    if (chunk->head) is_ready(w, m->head_unit);
    if (tied && --w->parts[pass.micro_batch] == 0) is_ready(w, m->embedding_unit);
    for (int layer = chunk->end_layer - 1; layer >= chunk->first_layer; layer--) {
        begins(w, m->first_block_unit + layer);
        is_ready(w, m->first_block_unit + layer);
    }
    if (chunk->embedding) begins(w, m->embedding_unit);
    if (chunk->embedding && --w->parts[pass.micro_batch] == 0) is_ready(w, m->embedding_unit);
}

static double gradients_at_work(const Model *m) {
    const Pipeline *p = m->sockets.schedule.context;
    const Schedule *s = &p->schedule;
    int rank = m->mesh.pp.rank, units = m->params.units;
    AtWork w = {.m = m, .p = p, .reducing = -1};
    w.left = host_alloc((size_t)units * sizeof *w.left);
    memcpy(w.left, p->finals, (size_t)units * sizeof *w.left);
    w.whole = calloc(2 * (size_t)units, sizeof *w.whole);
    w.parts = host_alloc((size_t)s->micro_batches * sizeof *w.parts);
    CHECK(w.whole, "out of host memory for %d units", units);
    w.summed = w.whole + units;
    for (int i = 0; i < s->micro_batches; i++) w.parts[i] = pipeline_embedding_parts(p, m, i);
    for (int unit = 0; unit < units; unit++)
        if (p->idle[unit]) begins(&w, unit), is_ready(&w, unit);
    for (int i = 0; i < s->list[rank].count; i++)
        for (int j = 0; j < s->list[rank].action[i].passes; j++) {
            StagePass pass = s->list[rank].action[i].pass[j];
            if (pass.kind == PASS_W || pass.kind == PASS_BW) backward_weight(&w, pass);
        }
    free(w.left);
    free(w.whole);
    free(w.parts);
    return w.most;
}

// ---- the record ----

static void price(Price *price, const Model *m, const void *context) {
    (void)context;
    double own = 0, whole = 0;
    for (int i = 0; i < m->params.units; i++) {
        const Unit *u = &m->params.unit[i];
        if (u->count == 0) continue;
        own += (double)u->own_count;
        whole += (double)u->count;
        price_all_gather_coded(price, 1, u->own_count, m->params.recipe.weight,
                               m->params.recipe.send_weights, u->replicas);
        price_reduce_scatter(price, 1, u->count, u->own_count, m->params.recipe.sum, u->replicas);
    }
    price->values = price->gradients = price->states = own;
    price->more[MEMORY_PARAMETER] += (double)dtype_size(m->params.recipe.weight) * whole;
    price->more[MEMORY_GRADIENT] += gradients_at_work(m);
}

static bool enabled(const Config *config) { return zero_on(config, 3); }

const Technique zero3_per_step = {.name = "zero3_per_step",
                                  .axes = 1u << AXIS_DP,
                                  .enabled = enabled,
                                  .shard = shard,
                                  .plug = plug,
                                  .unplug = zero_unplug,
                                  .price = price};

// ---- the same inside a node, replicas across (hybrid_zero.c) ----

// A stage's gradients go across nodes once per step, each after its reduction inside the node.
static void *hybrid_plug(Model *m) { return hybrid_zero_plug(m, &zero3_per_step); }

const Technique hybrid_zero_per_step = {.name = "hybrid_zero_per_step",
                                        .option = &hybrid_zero_option,
                                        .options = 1,
                                        .asked = "--zero hybrid",
                                        .axes = 1u << AXIS_DP,
                                        .enabled = hybrid_zero_enabled,
                                        .check = hybrid_zero_check,
                                        .shard = hybrid_zero_shard,
                                        .plug = hybrid_plug,
                                        .unplug = hybrid_zero_unplug,
                                        .price = hybrid_zero_price};
