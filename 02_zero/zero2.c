// zero2.c: gradients are also sharded: each rank keeps only its own part. Playbook: "ZeRO-2: Adding
// Gradient Partitioning".
//
// Changes from zero1.c: a unit's whole gradient exists only from the start of its backward until its
// reduce-scatter has ended; then only the sum of the rank's own part is kept:
//
//     unit        head   block 1    block 0    embedding      one micro-batch's backward
//     whole       [=========]
//                        [====================]
//                                   [=====================]   at most two: one fills, one is reduced
//     own part    +=     +=         +=         +=             sums over ranks, then over micro-batches
//
// So each micro-batch is reduced by itself, and its sum is added once. (Reducing a buffer that still holds
// earlier micro-batches would count those again.) 16-bit gradients are widened to f32 before they are summed.
//
// Bytes sent per rank: (N - 1) / N (m g Psi + e Psi) for m micro-batches.
// Memory per rank: e Psi, g Psi / N and two units, k Psi / N.
// Run: build/02_zero/zero2           (--ranks 3, --tied, --dtype bf16, --optimizer sgd, --grad-acc 4 …)
// Last line: PASS zero2: gradients are sharded over the ranks, and no bit changes …
#include <stdlib.h>

#include "zero.h"

static void shard(Model *model) { zero_shard(model, SHARD_GRADS); }

// ---- the technique: gradients; weights as in zero1 ----

static void begin(void *context, Model *model, int unit) {
    (void)context;
    Unit *u = &model->params.unit[unit];
    if (!tensor_exists(u->grads))
        unit_new_grads(&model->params, u);  // a tied embedding's may exist already, made for the head
}

// Takes the whole gradient from the unit, in the dtype of sums.
static Tensor take_gradient(Params *params, Unit *unit) {
    Tensor whole = unit->grads;
    if (!recipe_has_accumulators(params->recipe)) {
        unit->grads = (Tensor){0};
        return whole;
    }
    whole = tensor_new(MEMORY_GRADIENT, params->recipe.sum, SHAPE(unit->count));
    unit_widen_grads(params, unit, whole, 0);
    unit_free_grads(unit);
    return whole;
}

// At most one reduction is in flight: the next unit's backward hides it, and waits for it at its end.
static void end_reduction(Model *model, Zero *zero) {
    if (zero->reducing < 0) return;
    Unit *u = &model->params.unit[zero->reducing];
    zero_wait(&zero->reduction[zero->reducing]);
    op_accumulate(u->own_grads, tensor_view(zero->gradient, u->own_first, SHAPE(u->own_count)));
    tensor_free(&zero->gradient);
    zero->reducing = -1;
}

static void reduce_scatter(void *context, Model *model, int unit, bool last) {
    (void)last;
    Zero *zero = context;
    Unit *u = &model->params.unit[unit];
    end_reduction(model, zero);
    zero->gradient = take_gradient(&model->params, u);
    zero->reducing = unit;
    int64_t *counts = zero_part_counts(u);
    Tensor own = tensor_view(zero->gradient, u->own_first, SHAPE(u->own_count));
    zero->reduction[unit] = comm_reduce_scatter(own, zero->gradient, counts, REDUCE_SUM, u->replicas);
    free(counts);
}

// All reductions must finish before the optimizer step. Between micro-batches the last one stays in flight
// during the next forward.
static void finish(void *context, Model *model) { end_reduction(model, context); }

Zero *zero2_plug(Model *model) {
    Zero *zero = zero1_plug(model);
    model->sockets.gradients.begin = begin;
    model->sockets.gradients.ready = reduce_scatter;
    model->sockets.gradients.finish = finish;
    return zero;
}

static void *plug(Model *model) { return zero2_plug(model); }
static bool enabled(const Config *config) { return zero_on(config, 2); }
static void price(Price *price, const Model *model, const void *zero) { zero_price(price, model, zero, 2); }

const Technique zero2 = {.name = "zero2",
                         .axes = 1u << AXIS_DP,
                         .enabled = enabled,
                         .shard = shard,
                         .plug = plug,
                         .unplug = zero_unplug,
                         .price = price};

#ifndef NO_MAIN

static const Technique *const techniques[] = {&zero2, &recompute, NULL};

// Proves several micro-batches, which ZeRO-2 reduces one by one, with SGD, whose step shows the scale of a
// gradient; AdamW's hides it.
static void accumulate(Mesh mesh, const Config *config) {
    Config c = *config;
    c.grad_acc = config->grad_acc + 1;
    c.optimizer = OPTIMIZER_SGD, c.lr = 0.1;
    say("\nWith %ld micro-batches and SGD:\n", c.grad_acc);
    program_prove(&c, mesh, techniques, "DDP in the same order of sums", zero_twin_of_2_and_3, false,
                  false);
}

int main(int argc, char **argv) {
    const Program program = {
        .purpose = "ZeRO-2: optimizer state and gradients are sharded over the ranks of data parallelism.",
        .claim = "gradients are sharded over the ranks, and no bit changes",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=1 steps=3 "
            "dtype=f64 optimizer=adamw lr=0.001 clip=0.5",
        .natural = 4,
        .before = {"zero1", (const Technique *[]){&zero1, &recompute, NULL}, NULL, 0},
        .techniques = techniques,
        .twin = "DDP in the same order of sums",
        .twin_techniques = zero_twin_of_2_and_3,
        .more = accumulate};
    return program_main(argc, argv, &program);
}
#endif
