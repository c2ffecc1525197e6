// zero3_per_step.c: ZeRO-3 under a pipeline: weights are gathered once a step. Playbook: "5D parallelism
// in a nutshell", where ZeRO-3 with a pipeline should keep weights over the micro-batches of a step.
//
// Against zero3.c: a rank's layers are used m times in a step, once for each micro-batch. Gathered anew for
// each pass, a stage would send its weights 2 m times, and m is large, to hide the bubble. So a stage's
// weights are gathered before its first F and stay until its last W; its gradients add up whole, and are
// reduced once, behind the W after which they are final:
//
//     compute    F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 W0 … B6 W3 W4 W5 W6
//     network    all-gather of the units, in order …         rs rs rs    rs: reduce-scatter, unit by unit
//
// Between steps a rank holds what it holds with zero3.c. Sums run over micro-batches and then over ranks,
// as with ZeRO-1.
//
// Bytes sent per rank and step, whatever m is: (N - 1) / N (g Psi + e Psi), where Psi are the parameters of
// its stages; zero3.c: m times (N - 1) / N (g Psi + 2 e Psi - …).
// Memory per rank: e Psi / N + e Psi, g Psi / N + g Psi (and a unit of 16-bit gradients), k Psi / N: in a
// step what ZeRO-1 holds, and between steps an N-th of it. This file has no main: the chapter's programs
// list it, with --zero 3.
#include <math.h>
#include <stdlib.h>

#include "pipeline.h"

static void shard(Model *m) { zero_shard(m, SHARD_VALUES); }

// ---- weights ----

static void start_gather(Model *m, Zero *zero, int unit) {
    Unit *u = &m->params.unit[unit];
    if (u->count == 0) return;  // another stage's
    u->values = tensor_new(MEMORY_PARAMETER, m->params.recipe.weight, SHAPE(u->count));
    int64_t *counts = zero_part_counts(u);
    zero->gathering[unit] = comm_all_gather(u->values, u->own_values, counts, u->replicas);
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

static void nothing_to_gather(void *context, Model *m, int unit) { (void)context, (void)m, (void)unit; }

static void free_gathered(void *context, Model *m) {
    Zero *zero = context;
    for (int i = 0; i < m->params.units; i++) {
        zero_wait(&zero->gathering[i]);
        tensor_free(&m->params.unit[i].values);
    }
}

// ---- gradients ----

static void begin(void *context, Model *m, int unit) {
    (void)context;
    Unit *u = &m->params.unit[unit];
    if (!tensor_exists(u->grads)) unit_new_grads(&m->params, u);
}

// 16-bit gradients exist for one micro-batch, and their sum for all.
static void add_up(Model *m, int unit) {
    Unit *u = &m->params.unit[unit];
    if (!recipe_has_accumulators(m->params.recipe)) return;
    if (!tensor_exists(u->accumulated)) {
        u->accumulated = tensor_new(MEMORY_GRADIENT, m->params.recipe.sum, SHAPE(u->count));
        op_fill(u->accumulated, 0);
    }
    op_accumulate(u->accumulated, u->grads);
    unit_free_grads(u);
}

// At most one is in flight: it has had the W of the next unit to finish.
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

// The optimizer steps parts: whole weights have had their last W, and would soon be the old ones.
static void finish(void *context, Model *m) {
    end_reduction(m, context);
    free_gathered(context, m);
}

static void *plug(Model *m) {
    Zero *zero = zero2_plug(m);
    m->sockets.parameters.acquire = acquire;
    m->sockets.parameters.release = stays;
    m->sockets.parameters.stepped = nothing_to_gather;
    m->sockets.parameters.complete = free_gathered;
    m->sockets.gradients.begin = begin;
    m->sockets.gradients.ready = ready;
    m->sockets.gradients.finish = finish;
    return zero;
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
        price_all_gather(price, 1, u->own_count, m->params.recipe.weight, u->replicas);
        price_reduce_scatter(price, 1, u->count, u->own_count, m->params.recipe.sum, u->replicas);
    }
    price->values = price->gradients = price->states = own;
    price->values_at_work = (double)dtype_size(m->params.recipe.weight) * whole;
    // Which units of several stages have begun, and are not yet reduced, a dry run knows.
    price->gradients_at_work = NAN;
}

static bool on(const Config *config) { return zero_on(config, 3); }

const Technique zero3_per_step = {.name = "zero3_per_step",
                                  .axes = 1u << AXIS_DP,
                                  .on = on,
                                  .shard = shard,
                                  .plug = plug,
                                  .unplug = zero_unplug,
                                  .price = price};
