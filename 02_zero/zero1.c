// zero1.c: the optimizer state is sharded: each rank keeps only its own part. Playbook: "ZeRO-1:
// Partitioning Optimizer States"; Rajbhandari et al. 2020.
//
// Changes from ddp_no_sync.c: the all-reduce is split into a reduce-scatter and an all-gather, unit by unit
// instead of bucket by bucket. The optimizer step now runs between the two, and weights are gathered instead
// of gradients:
//
//     backward    reduce-scatter    member i gets the sum of part i of each unit's gradient, in place
//     step        AdamW             on that part only: its moments, its master weights
//     forward     all-gather        the updated parts of all, in place, each unit's before it is used
//
// The all-gather may run (--gather) after the step; during the step, each unit's while later units are
// stepped; or also during the next forward, which waits for a unit only when it needs it.
//
// Psi parameters, N ranks; e bytes per weight, g per gradient, k of optimizer state. Bytes sent per rank:
// (N - 1) / N (g Psi + e Psi). Memory per rank: e Psi, g Psi, k Psi / N.
// Run: build/02_zero/zero1           (--ranks 3, --tied, --dtype bf16, --optimizer sgd, --grad-acc 4 …)
// Last line: PASS zero1: optimizer state is sharded over the ranks, and no bit changes …
#include <stdlib.h>

#include "zero.h"

// ---- the technique: whose elements ----

// The flat elements of a unit are split into N contiguous parts of ceil(count / N); the last parts have
// fewer or none. There is no padding, which would have to be kept out of norms and checkpoints.
int64_t zero_part(int64_t count, int rank, int size, int64_t *first) {
    int64_t each = (count + size - 1) / size;
    *first = rank * each < count ? rank * each : count;
    return count - *first < each ? count - *first : each;
}

int64_t *zero_part_counts(const Unit *unit) {
    int64_t *counts = host_alloc(unit->replicas.size * sizeof *counts), first;
    for (int i = 0; i < unit->replicas.size; i++)
        counts[i] = zero_part(unit->count, i, unit->replicas.size, &first);
    return counts;
}

// A rank steps only its own part of each unit, for which it alone has the moments and master weights, and
// counts only that part in the gradient norm.
void zero_shard(Model *model, Sharding stage) {
    Params *p = &model->params;
    p->sharding = stage;
    p->sharded = p->counted = true;
    for (int i = 0; i < p->units; i++) {
        Unit *u = &p->unit[i];
        u->own_count = zero_part(u->count, u->replicas.rank, u->replicas.size, &u->own_first);
        u->counted_first = u->own_first;
        u->counted_count = u->own_count;
    }
}

static void shard(Model *model) { zero_shard(model, SHARD_STATE); }

// ---- the technique: gradients ----

static void reduce_scatter(void *context, Model *model, int unit, bool last) {
    Zero *zero = context;
    Unit *u = &model->params.unit[unit];
    params_accumulate(&model->params, unit);
    if (!last) return;  // one sum over ranks for all micro-batches together, as in ddp_no_sync
    int64_t *counts = zero_part_counts(u);
    // Only this rank's own part becomes a sum over ranks; the rest of its gradient is not used again.
    zero->reduction[unit] =
        comm_reduce_scatter(u->own_grads, unit_total_grad(u), counts, REDUCE_SUM, u->replicas);
    free(counts);
}

static void wait_for_gradients(void *context, Model *model) {
    Zero *zero = context;
    for (int unit = model->params.units - 1; unit >= 0; unit--) zero_wait(&zero->reduction[unit]);
}

// ---- the technique: weights, gathered once the optimizer has stepped each rank's part ----

static void start_gather(Model *model, Zero *zero, int unit) {
    Unit *u = &model->params.unit[unit];
    if (u->count == 0) return;  // another stage's
    int64_t *counts = zero_part_counts(u);
    zero->gathering[unit] = comm_all_gather(u->values, u->own_values, counts, u->replicas);
    free(counts);
}

static void start_all_gathers(Model *model, Zero *zero) {
    for (int unit = 0; unit < model->params.units; unit++) start_gather(model, zero, unit);
}

static void complete(void *context, Model *model) {
    Zero *zero = context;
    for (int unit = 0; unit < model->params.units; unit++) zero_wait(&zero->gathering[unit]);
}

static void stepped(void *context, Model *model, int unit) {
    Zero *zero = context;
    bool last = unit + 1 == model->params.units;
    if (zero->gather != GATHER_AFTER_STEP) start_gather(model, zero, unit);
    else if (last) start_all_gathers(model, zero);
    if (last && zero->gather != GATHER_BEHIND_FORWARD) complete(zero, model);
}

// The next forward waits here before it first uses the unit's weights.
static void acquire(void *context, Model *model, int unit, Pass pass) {
    (void)model, (void)pass;
    Zero *zero = context;
    zero_wait(&zero->gathering[unit]);
}

Zero *zero1_plug(Model *model) {
    size_t units = (size_t)model->params.units;
    Zero *zero = host_alloc(sizeof *zero);
    *zero = (Zero){.gather = (ZeroGather)config_number(&model->config, "gather"),
                   .reduction = calloc(2 * units, sizeof(Request *)),
                   .reducing = -1};
    CHECK(zero->reduction, "out of host memory for ZeRO's requests");
    zero->gathering = zero->reduction + units;
    model->sockets.gradients.context = model->sockets.parameters.context = zero;
    model->sockets.gradients.ready = reduce_scatter;
    model->sockets.gradients.finish = wait_for_gradients;
    model->sockets.parameters.acquire = acquire;
    model->sockets.parameters.stepped = stepped;
    model->sockets.parameters.complete = complete;
    return zero;
}

static void *plug(Model *model) { return zero1_plug(model); }
static bool enabled(const Config *config) { return zero_on(config, 1); }
static void price(Price *price, const Model *model, const void *zero) { zero_price(price, model, zero, 1); }

static const Option gather_option = {
    "gather",
    OPTION_CHOICE,
    NULL,
    "forward",
    0,
    0,
    "forward|step|after-step",
    "when updated weights are gathered: during the next forward, in the step, or after it",
    false};

const Technique zero1 = {.name = "zero1",
                         .option = &gather_option,
                         .options = 1,
                         .asked = "--zero 1",
                         .axes = 1u << AXIS_DP,
                         .enabled = enabled,
                         .shard = shard,
                         .plug = plug,
                         .unplug = zero_unplug,
                         .price = price};

#ifndef NO_MAIN

// ---- when the updated weights are gathered ----

static const Technique *const techniques[] = {&zero1, &recompute, NULL};

// All three ways make the same steps, and each is faster than the one before.
static void compare_gathers(Mesh mesh, const Config *config) {
    static const ZeroVariant ways[] = {{"after step", &zero1, "gather", GATHER_AFTER_STEP},
                                       {"in step", &zero1, "gather", GATHER_BEHIND_STEP},
                                       {"in forward", &zero1, "gather", GATHER_BEHIND_FORWARD}};
    enum { WAYS = sizeof ways / sizeof *ways };
    Record record[WAYS];
    Config same = *config;
    say("\nUpdated weights, gathered after the step, in it, or in the next forward: no bit may change\n");
    bool quiet = report_quiet(!config->verbose);
    for (int i = 0; i < WAYS; i++) {
        config_set(&same, "gather", ways[i].value);
        record[i] = program_record(&same, mesh, techniques, false, true, ways[i].name);
        if (i > 0) report_compare(&record[i], &record[0], PROOF_EXACT, bound_of(0));
    }
    report_quiet(quiet);
    for (int i = 0; i < WAYS; i++) record_free(&record[i]);
    if (mesh.dp.size == 1) return;
    StepCost cost[WAYS];
    zero_compare(mesh, ways, WAYS, cost);
    for (int i = 1; i < WAYS; i++)
        report_that(
            cost[i].step_seconds < (1 - 1e-9) * cost[i - 1].step_seconds,
            "weights gathered %s make a step of %.6f ms, which must be less than with weights gathered "
            "%s, %.6f ms",
            ways[i].name, 1e3 * cost[i].step_seconds, ways[i - 1].name, 1e3 * cost[i - 1].step_seconds);
}

int main(int argc, char **argv) {
    const Program program = {
        .purpose = "ZeRO-1: optimizer state is sharded over the ranks of data parallelism.",
        .claim = "optimizer state is sharded over the ranks, and no bit changes",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=adamw lr=0.001 clip=0.5",
        .natural = 4,
        .before = {"ddp_no_sync", zero_twin_of_1, NULL, 0},
        .techniques = techniques,
        .twin = "ddp_no_sync, norm in parts",
        .twin_techniques = zero_twin_of_1,
        .more = compare_gathers};
    return program_main(argc, argv, &program);
}
#endif
