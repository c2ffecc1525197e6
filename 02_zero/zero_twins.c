// zero_twins.c: the twins with which the three stages of ZeRO are compared, DDP on the same ranks with the
// same order of sums; and the table of their steps on the model clock.
//
// Bytes sent: as in DDP. This file has no main.
#include <stdlib.h>
#include <string.h>

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

// ---- the model clock ----

bool zero_on_standard_machine(const Config *c) {
    return !strcmp(c->machine, "dgx-h100") && c->gpus_per_node == 0 && c->compute_efficiency == 1 &&
           c->network_efficiency == 1;
}

Config zero_compare(Mesh mesh, const ZeroVariant *variants, int count, StepCost *cost) {
    Config c = config_of_model("llama-3-8b", "seq=8192 dtype=bf16 micro-batch=2 steps=2");
    bool was_dry = device_is_dry_run();
    device_dry_run(true);
    char *title =
        format_text("Llama 3 8B, %d ranks, %ld tokens on each", mesh.dp.size, c.micro_batch * c.seq);
    say("\n%s, on the model clock:\n", title);
    timeline_title(title);
    free(title);
    say("  %-28s %10s %18s %12s %9s %14s\n", "", "step, ms", "communication, ms", "exposed, ms", "share",
        "rank 0 sends");
    for (int i = 0; i < count; i++) {
        const ZeroVariant *v = &variants[i];
        Config with = c;
        if (v->setting) config_set(&with, v->setting, v->value);
        clock_push(v->name);
        cost[i] = program_cost(&with, mesh, (const Technique *[]){v->technique, NULL});
        clock_pop();
        timeline_keep(v->name);
        const CommCount *comm = &cost[i].comm;
        say("  %-28s %10.2f %18.2f %12.2f %8.1f%% %14s\n", v->name, 1e3 * cost[i].step_seconds,
            1e3 * comm->model_seconds, 1e3 * comm->exposed_seconds,
            comm->model_seconds > 0 ? 100 * comm->exposed_seconds / comm->model_seconds : 0,
            bytes_text((double)comm->bytes));
        report_number(v->name, "seconds per step", cost[i].step_seconds, "s");
        report_number(v->name, "exposed seconds", comm->exposed_seconds, "s");
        report_number(v->name, "communication seconds", comm->model_seconds, "s");
    }
    device_dry_run(was_dry);
    return c;
}
