// zero_twins.c: the twins with which the three stages of ZeRO are compared, DDP on the same ranks with the
// same order of sums.
//
// Bytes sent: as in DDP. This file has no main.
#include <stdlib.h>

#include "zero.h"

// ---- the twins: DDP in the same order of sums ----

// Shards nothing, but counts the norm part by part, as ZeRO does.
static void count_in_parts(Model *model) {
    zero_shard(model, SHARD_NOTHING);
    model->params.sharded = false;
    for (int i = 0; i < model->params.units; i++) model->params.unit[i].own_first = 0;
}

static const Technique norm_in_parts = {.name = "norm in parts", .shard = count_in_parts};

// Sums the gradients of each micro-batch over ranks, and these sums over micro-batches. context: the sum of
// each unit, {0} until its first micro-batch.
static void sum_over_ranks(void *context, Model *model, int unit, bool last) {
    Tensor *total = (Tensor *)context + unit;
    Unit *u = &model->params.unit[unit];
    Tensor sum = tensor_new(MEMORY_COMMUNICATION, model->params.recipe.sum, SHAPE(u->count));
    unit_widen_grads(&model->params, u, sum, 0);
    op_fill(u->grads, 0);
    u->waits = false;  // summed here
    comm_wait(comm_all_reduce(sum, REDUCE_SUM, u->replicas));
    if (!tensor_exists(*total)) {
        *total = tensor_like(MEMORY_COMMUNICATION, sum);
        op_fill(*total, 0);
    }
    op_accumulate(*total, sum);
    tensor_free(&sum);
    if (!last) return;
    op_copy(unit_total_grad(u), *total);
    tensor_free(total);
}

static void *plug_ranks_first(Model *model) {
    Tensor *total = calloc((size_t)model->params.units, sizeof *total);
    CHECK(total, "out of host memory for a twin");
    model->sockets.gradients.context = total;
    model->sockets.gradients.ready = sum_over_ranks;
    return total;
}

static void unplug_ranks_first(Model *model, void *context) {
    (void)model;
    free(context);
}

static const Technique ranks_first = {
    .name = "ranks first", .axes = 1u << AXIS_DP, .plug = plug_ranks_first, .unplug = unplug_ranks_first};

const Technique *const zero_twin_of_1[] = {&norm_in_parts, &ddp_no_sync, &recompute, NULL};
const Technique *const zero_twin_of_2_and_3[] = {&norm_in_parts, &ranks_first, &recompute, NULL};
