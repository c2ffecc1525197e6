// zero2.c: each rank keeps the gradients of its own part alone, too. Playbook: "ZeRO-2: Adding Gradient
// Partitioning".
//
// Against zero1.c: a unit's whole gradient exists from the moment that backward begins to fill it until its
// reduce-scatter has ended; then only the sum of the own part is kept:
//
//     unit        head   block 1    block 0    embedding      one micro-batch's backward
//     whole       [=========]
//                        [====================]
//                                   [=====================]   at most two: one is filled, one travels
//     own part    +=     +=         +=         +=             sums over ranks, then over micro-batches
//
// So each micro-batch is reduced by itself, and its sum added once. (A part that holds earlier sums and is
// reduced again would count them n times.) 16-bit gradients become f32 before they are summed.
//
// Bytes sent per rank: (n - 1) / n (m g P + e P) for m micro-batches.
// Memory per rank: e P, g P / n and two units, k P / n.
// Run: build/02_zero/zero2           (--ranks 3, --tied, --dtype bf16, --optimizer adamw, --grad-acc 4 …)
// Last line: PASS zero2: gradients are cut over the ranks, and no bit changes …
#include <stdlib.h>

#include "playbook.h"

// ---- the technique: gradients; weights as in zero1 ----

static void begin(void *context, Model *model, int unit, MicroBatch *micro) {
    (void)context, (void)micro;
    Unit *u = &model->params.unit[unit];
    if (!tensor_exists(u->grads))
        unit_new_grads(&model->params, u);  // a tied embedding's exists since the head
}

// The whole gradient, handed over, in the dtype of sums.
static Tensor take_gradient(Params *params, Unit *unit) {
    Tensor whole = unit->grads;
    if (params->dtype == params->total_dtype) {
        unit->grads = (Tensor){0};
        return whole;
    }
    whole = tensor_new(MEMORY_GRADIENT, params->total_dtype, SHAPE(unit->count));
    op_copy(whole, unit->grads);
    unit_free_grads(unit);
    return whole;
}

// At most one is on its way: it has had the backward of the unit after it to travel.
static void end_reduction(Model *model, Zero *zero) {
    if (zero->travelling < 0) return;
    Unit *u = &model->params.unit[zero->travelling];
    comm_wait(zero->reductions[zero->travelling]);
    zero->reductions[zero->travelling] = NULL;
    op_accumulate(u->own_grads, tensor_view(zero->gradient, u->own_first, SHAPE(u->own_count)));
    tensor_free(&zero->gradient);
    zero->travelling = -1;
}

static void reduce_scatter(void *context, Model *model, int unit, MicroBatch *micro) {
    (void)micro;
    Zero *zero = context;
    Unit *u = &model->params.unit[unit];
    end_reduction(model, zero);
    zero->gradient = take_gradient(&model->params, u);
    zero->travelling = unit;
    int64_t *counts = unit_part_counts(u, model->mesh.dp.size);
    Tensor own = tensor_view(zero->gradient, u->own_first, SHAPE(u->own_count));
    zero->reductions[unit] = comm_reduce_scatter(own, zero->gradient, counts, REDUCE_SUM, model->mesh.dp);
    free(counts);
}

// Before the step all sums must stand. After other micro-batches the last one travels on, behind the next
// forward.
static void finish(void *context, Model *model, MicroBatch *micro) {
    if (micro->last) end_reduction(model, context);
}

void zero2_plug(Model *model, Zero *zero) {
    zero1_plug(model, zero);
    model->sockets.gradients.begin = begin;
    model->sockets.gradients.ready = reduce_scatter;
    model->sockets.gradients.finish = finish;
}

#ifndef NO_MAIN

static void check(Config *config) { zero_check(config, 2); }

static void accumulate(Mesh mesh, const Config *config);

static const LayoutProgram program = {
    .purpose = "ZeRO-2: optimizer state and gradients are cut over the ranks of data parallelism.",
    .claim = "gradients are cut over the ranks, and no bit changes",
    .defaults =
        "layers=3 hidden=48 heads=6 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=1 steps=3 "
        "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 zero=2",
    .natural = 4,
    .check = check,
    .plug = zero_layout_plug,
    .unplug = zero_layout_unplug,
    .counts = zero_counts,
    .twin = &zero_twin_of_2_and_3,
    .more = accumulate,
};

// Several micro-batches, which ZeRO-2 reduces one by one, and AdamW, whose state is cut.
static void accumulate(Mesh mesh, const Config *config) {
    Config c = *config;
    c.grad_acc = config->grad_acc + 1;
    c.optimizer = OPTIMIZER_ADAMW, c.lr = 1e-3, c.save = NULL;
    say("\nWith %ld micro-batches and AdamW:\n", c.grad_acc);
    layout_prove(&c, mesh, &program, false);
}

int main(int argc, char **argv) { return layout_program(argc, argv, &program); }
#endif
