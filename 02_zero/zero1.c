// zero1.c: each rank keeps the optimizer state of its own part alone. Playbook: "ZeRO-1: Partitioning
// Optimizer States".
//
// Against ddp_bucketed.c: an all-reduce is a reduce-scatter and an all-gather; between the two there is now
// the step, and what is gathered are weights:
//
//     backward    reduce-scatter    to member i the sum of part i of each unit's gradient, in place
//     step        AdamW             of that part alone: its moments, its master weights
//     forward     all-gather        the stepped parts of all, in place, each unit's before it is used
//
// Three ways to bring the weights back: after the step; in the step, behind that of the units that follow;
// and from there on in the next forward, which waits for a unit when it comes to it.
//
// Bytes sent per rank: (n - 1) / n (g P + e P).
// Memory per rank: e P, g P, k P / n (zero.c has the letters and the table).
// Run: build/02_zero/zero1           (--ranks 3, --tied, --dtype bf16, --optimizer adamw, --grad-acc 4 …)
// Last line: PASS zero1: optimizer state is cut over the ranks, and no bit changes …
#include <stdlib.h>

#include "playbook.h"

// ---- the technique: gradients ----

static void reduce_scatter(void *context, Model *model, int unit, MicroBatch *micro) {
    Zero *zero = context;
    Unit *u = &model->params.unit[unit];
    params_accumulate(&model->params, unit);
    if (!micro->last) return;  // the sum over ranks takes all micro-batches at once, as in ddp_no_sync
    int64_t *counts = unit_part_counts(u, model->mesh.dp.size);
    // The sum stands in this rank's own part; the rest of the unit's gradient is this rank's alone, and of
    // no use.
    zero->reductions[unit] =
        comm_reduce_scatter(u->own_grads, unit_total_grad(u), counts, REDUCE_SUM, model->mesh.dp);
    free(counts);
}

static void wait_for(Request **request) {
    if (*request) comm_wait(*request);
    *request = NULL;
}

static void wait_for_gradients(void *context, Model *model, MicroBatch *micro) {
    (void)micro;
    Zero *zero = context;
    for (int unit = model->params.units - 1; unit >= 0; unit--) wait_for(&zero->reductions[unit]);
}

// ---- the technique: weights ----

static void start_gather(Model *model, Zero *zero, int unit) {
    Unit *u = &model->params.unit[unit];
    int64_t *counts = unit_part_counts(u, model->mesh.dp.size);
    zero->gathers[unit] = comm_all_gather(u->values, u->own_values, counts, model->mesh.dp);
    free(counts);
}

static void settle(void *context, Model *model) {
    Zero *zero = context;
    for (int unit = 0; unit < model->params.units; unit++) wait_for(&zero->gathers[unit]);
}

static void stepped(void *context, Model *model, int unit) {
    Zero *zero = context;
    if (zero->gather != GATHER_AFTER_STEP) start_gather(model, zero, unit);
    if (zero->gather == GATHER_BEHIND_FORWARD || unit + 1 < model->params.units) return;
    for (int i = 0; i <= unit && zero->gather == GATHER_AFTER_STEP; i++) start_gather(model, zero, i);
    settle(zero, model);
}

// Who reads the unit's weights first in the next forward waits for them.
static void acquire(void *context, Model *model, int unit, Pass pass) {
    (void)model, (void)pass;
    Zero *zero = context;
    wait_for(&zero->gathers[unit]);
}

void zero1_plug(Model *model, Zero *zero) {
    zero->reductions = calloc((size_t)model->params.units, sizeof *zero->reductions);
    zero->gathers = calloc((size_t)model->params.units, sizeof *zero->gathers);
    CHECK(zero->reductions && zero->gathers, "out of host memory for ZeRO's requests");
    zero->travelling = -1;
    model->sockets.gradients.context = zero;
    model->sockets.gradients.ready = reduce_scatter;
    model->sockets.gradients.finish = wait_for_gradients;
    model->sockets.parameters.context = zero;
    model->sockets.parameters.acquire = acquire;
    model->sockets.parameters.stepped = stepped;
    model->sockets.parameters.settle = settle;
}

#ifndef NO_MAIN

// ---- three ways to bring the weights back ----

static void *after_step(Trainer *t) {
    return zero_layout_plug_with(t, (Zero){.gather = GATHER_AFTER_STEP});
}
static void *behind_step(Trainer *t) {
    return zero_layout_plug_with(t, (Zero){.gather = GATHER_BEHIND_STEP});
}
static void *behind_forward(Trainer *t) {
    return zero_layout_plug_with(t, (Zero){.gather = GATHER_BEHIND_FORWARD});
}

static void check(Config *config) { zero_check(config, 1); }

// They make the same steps, and each is faster than the one before.
static void compare_gathers(Mesh mesh, const Config *config) {
    const ZeroVariant ways[] = {{"after step", 1, after_step, zero_layout_unplug},
                                {"in step", 1, behind_step, zero_layout_unplug},
                                {"in forward", 1, behind_forward, zero_layout_unplug}};
    enum { WAYS = sizeof ways / sizeof *ways };
    Record record[WAYS];
    Config same = *config;
    same.optimizer = OPTIMIZER_ADAMW, same.lr = 1e-3, same.save = NULL;
    say("\nThree ways to bring the weights back, with AdamW, whose state is cut:\n");
    for (int i = 0; i < WAYS; i++) {
        const LayoutProgram way = {.plug = ways[i].plug, .unplug = ways[i].unplug, .counts = zero_counts};
        record[i] = layout_record(&same, mesh, &way, false, ways[i].name);
        if (i > 0) report_compare(&record[i], &record[0], PROOF_EXACT, 0);
    }
    for (int i = 0; i < WAYS; i++) record_free(&record[i]);
    if (mesh.dp.size == 1) return;
    StepCost cost[WAYS];
    zero_compare(mesh, ways, WAYS, cost);
    for (int i = 1; i < WAYS; i++)
        report_that(cost[i].step_seconds < cost[i - 1].step_seconds,
                    "weights that come back %s make no shorter step than %s", ways[i].name,
                    ways[i - 1].name);
}

int main(int argc, char **argv) {
    const LayoutProgram program = {
        .purpose = "ZeRO-1: optimizer state is cut over the ranks of data parallelism.",
        .claim = "optimizer state is cut over the ranks, and no bit changes",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 zero=1",
        .natural = 4,
        .check = check,
        .plug = zero_layout_plug,
        .unplug = zero_layout_unplug,
        .counts = zero_counts,
        .twin = &zero_twin_of_1,
        .more = compare_gathers};
    return layout_program(argc, argv, &program);
}
#endif
