// zero3.c: each rank keeps the weights of its own part alone, too (FSDP). Playbook: "ZeRO-3: Adding
// Parameter Partitioning".
//
// Against zero2.c: nothing is gathered after the step. A unit's weights are gathered before its use and
// freed after it, in forward and again in backward; those of the unit after it travel meanwhile (prefetch):
//
//     compute       E   B0  B1  H    |  H    B1      B0          E, H: embedding and head
//     network    E  B0  B1  H        |  B1   rsH B0  rsB1  rsB0 rsE      rs: reduce-scatter, as in zero2
//
// Each unit twice, and the last once (the playbook's 2 L - 1): forward ends and backward begins with the
// head, so it stays. Nor does the embedding's backward read weights: 2 U - 2 gathers for U = L + 2 units.
// Tied, the head uses the embedding again: 2 U - 1.
//
// Bytes sent per rank and micro-batch: (n - 1) / n (g P + 2 e P - e (E + H)).
// Memory per rank: e P / n and two units, g P / n and two units, k P / n.
// Run: build/02_zero/zero3           (--ranks 3, --tied, --dtype bf16, --recompute full, --grad-acc 4 …)
// Last line: PASS zero3: weights are cut over the ranks, and no bit changes …
#include <math.h>
#include <stdlib.h>

#include "playbook.h"

// ---- the technique: weights; gradients as in zero2 ----

static void start_gather(Model *model, Zero *zero, int unit) {
    Unit *u = &model->params.unit[unit];
    if (tensor_exists(u->values)) return;  // it is here, or on its way
    u->values = tensor_new(MEMORY_PARAMETER, model->params.dtype, SHAPE(u->count));
    int64_t *counts = unit_part_counts(u, model->mesh.dp.size);
    zero->gathers[unit] = comm_all_gather(u->values, u->own_values, counts, model->mesh.dp);
    free(counts);
}

static void wait_for(Request **request) {
    if (*request) comm_wait(*request);
    *request = NULL;
}

// What the pass will use after this unit.
static void prefetch(Model *model, Zero *zero, int unit, Pass pass) {
    // Before the first block comes the embedding, whose backward reads no weights.
    if (pass == BACKWARD && unit > model->first_block_unit) start_gather(model, zero, unit - 1);
    if (pass == BACKWARD || zero->at_head) return;
    start_gather(model, zero, unit + 1);
    if (unit + 1 == model->head_unit && model->config.tied)
        start_gather(model, zero, model->embedding_unit);
}

static void acquire(void *context, Model *model, int unit, Pass pass) {
    Zero *zero = context;
    if (unit == model->head_unit) zero->at_head = true;
    start_gather(model, zero, unit);
    if (!zero->no_prefetch) prefetch(model, zero, unit, pass);
    wait_for(&zero->gathers[unit]);
}

static void release(void *context, Model *model, int unit, Pass pass) {
    Zero *zero = context;
    bool of_head = zero->at_head;  // the head itself, or the embedding that it is tied to
    if (unit == model->head_unit) zero->at_head = false;
    if (pass == FORWARD && of_head) return;
    tensor_free(&model->params.unit[unit].values);
}

void zero3_plug(Model *model, Zero *zero) {
    zero2_plug(model, zero);
    model->sockets.parameters.acquire = acquire;
    model->sockets.parameters.release = release;
    model->sockets.parameters.stepped = sockets_single_device().parameters.stepped;  // nobody awaits them
}

#ifndef NO_MAIN

// ---- all stages, one beside the other ----

static void *ddp_naive(Trainer *t) {
    Zero *zero = host_alloc(sizeof *zero);
    *zero = (Zero){0};
    ddp_naive_plug(t->model, &zero->ddp);
    return zero;
}
static void *after_step(Trainer *t) {
    return zero_layout_plug_with(t, (Zero){.gather = GATHER_AFTER_STEP});
}
static void *behind_step(Trainer *t) {
    return zero_layout_plug_with(t, (Zero){.gather = GATHER_BEHIND_STEP});
}
static void *no_prefetch(Trainer *t) { return zero_layout_plug_with(t, (Zero){.no_prefetch = true}); }

typedef struct Stage {
    ZeroVariant variant;
    const char *memory, *sent;  // as the playbook writes them; NULL: no row of that table
} Stage;

static const Stage stages[] = {
    {{"DDP, naive", 0, ddp_naive, zero_layout_unplug}, NULL, NULL},
    {{"DDP, bucketed", 0, zero_layout_plug, zero_layout_unplug}, "2 P + 6 P + 12 P", "2 P"},
    {{"ZeRO-1, after step", 1, after_step, zero_layout_unplug}, NULL, NULL},
    {{"ZeRO-1, in step", 1, behind_step, zero_layout_unplug}, NULL, NULL},
    {{"ZeRO-1", 1, zero_layout_plug, zero_layout_unplug}, "2 P + 6 P + 12 P / n", "2 P"},
    {{"ZeRO-2", 2, zero_layout_plug, zero_layout_unplug}, "2 P + (6 P + 12 P) / n", "2 P"},
    {{"ZeRO-3, no prefetch", 3, no_prefetch, zero_layout_unplug}, NULL, NULL},
    {{"ZeRO-3", 3, zero_layout_plug, zero_layout_unplug}, "(2 P + 6 P + 12 P) / n", "3 P"},
};
enum { STAGES = sizeof stages / sizeof *stages };

// The playbook's formulas beside what a rank holds at its peak and sends in a step. Held beyond the formula
// are the units at work; ZeRO-2 and -3 do without 16-bit gradients of their own part (2 P / n), as these
// exist at work alone.
static void print_states(Mesh mesh, const Config *c, const StepCost *cost) {
    double n = mesh.dp.size, all = (double)config_parameters(c),
           ends = 2.0 * (double)(c->vocab * c->hidden);
    say("\nWhat rank 0 holds at its peak, and sends; P = %.2f B parameters, n = %.0f ranks:\n", 1e-9 * all,
        n);
    say("  %-14s %-23s %8s %9s %9s %9s   %5s %9s %9s\n", "", "the playbook, bytes", "formula", "weights",
        "gradients", "optimizer", "sends", "formula", "sent");
    for (int i = 0; i < STAGES; i++) {
        int stage = stages[i].variant.stage;
        if (!stages[i].memory) continue;
        MemoryPlan plan = {.model = *c, .f32_gradients = true, .zero = stage, .tp = 1, .dp = mesh.dp.size};
        MemoryNeed need = memory_states(&plan, all);
        const int64_t *held = cost[i].memory.peak;
        // Gradients travel in f32, twice in an all-reduce; weights in bf16, with ZeRO-3 twice, but the ends
        // once.
        double elements = stage == 0 ? 8 * all : stage < 3 ? (4 + 2) * all : (4 + 2 + 2) * all - 2 * ends;
        double sends = elements * (n - 1) / n;
        say("  %-14s %-23s %8s %9s %9s %9s   %5s %9s %9s\n", stages[i].variant.name, stages[i].memory,
            bytes_text(memory_states_bytes(&need)), bytes_text((double)held[MEMORY_PARAMETER]),
            bytes_text((double)held[MEMORY_GRADIENT]), bytes_text((double)held[MEMORY_OPTIMIZER]),
            stages[i].sent, bytes_text(sends), bytes_text((double)cost[i].comm.bytes));
        // Parts that n does not divide, and the few numbers that a step sums, are below a millionth.
        report_that(fabs((double)held[MEMORY_OPTIMIZER] / need.optimizer - 1) < 1e-6 &&
                        fabs((double)cost[i].comm.bytes / sends - 1) < 1e-6,
                    "%s of Llama 3 8B holds or sends something else than its formulas say",
                    stages[i].variant.name);
    }
}

// ---- what else a run may be ----

// Several micro-batches, AdamW, whose state is cut, and each unit gathered only when it is used.
static void accumulate(Mesh mesh, const Config *config) {
    const LayoutProgram program = {.plug = no_prefetch,
                                   .unplug = zero_layout_unplug,
                                   .counts = zero_counts,
                                   .twin = &zero_twin_of_2_and_3};
    Config c = *config;
    c.grad_acc = config->grad_acc + 1;
    c.optimizer = OPTIMIZER_ADAMW, c.lr = 1e-3, c.save = NULL;
    say("\nWith %ld micro-batches, AdamW and no prefetch:", c.grad_acc);
    layout_prove(&c, mesh, &program, false);
}

// Held-out losses between steps, for which nobody runs backward, change nothing: with them and without, the
// last loss is the same.
static void held_out_between_steps(Mesh mesh, const Config *config) {
    enum { STEPS = 2, SAMPLES = 2 };
    double last[2];
    say("\nForward alone, between steps:");
    for (int between = 0; between < 2; between++) {
        Trainer *t = trainer_new(config, mesh);
        void *zero = zero_layout_plug(t);
        for (int step = 0; step < STEPS; step++) {
            double loss = between ? held_out_loss(t, SAMPLES) : 0;
            if (between) say("  held-out loss after %d steps: %.6f", step, loss);
            train_step(t, NULL);
        }
        last[between] = held_out_loss(t, SAMPLES);
        zero_layout_unplug(t, zero);
        trainer_free(t);
    }
    report_equal("held-out loss after 2 steps", last[0], last[1], "");
}

static void show(Mesh mesh, const Config *config) {
    accumulate(mesh, config);
    held_out_between_steps(mesh, config);
    if (mesh.dp.size == 1) return;
    ZeroVariant variants[STAGES];
    StepCost cost[STAGES];
    for (int i = 0; i < STAGES; i++) variants[i] = stages[i].variant;
    Config shape = zero_compare(mesh, variants, STAGES, cost);
    const StepCost *naive = &cost[0], *alone = &cost[STAGES - 2], *best = &cost[STAGES - 1];
    report_that(best->step_seconds < alone->step_seconds, "prefetch makes the step no shorter");
    report_that(best->comm.exposed_seconds < naive->comm.exposed_seconds,
                "ZeRO-3 waits longer than naive DDP");
    bool one_node = zero_on_standard_machine(config) && mesh.dp.size <= 8;
    report_that(!one_node || best->comm.exposed_seconds < 0.1 * best->comm.model_seconds,
                "ZeRO-3 exposes more than a tenth of its communication");
    print_states(mesh, &shape, cost);
    zero3_overlap(mesh, config);
}

static void check(Config *config) { zero_check(config, 3); }

static const LayoutProgram program = {
    .purpose = "ZeRO-3: optimizer state, gradients and weights are cut over the ranks of data parallelism.",
    .claim = "weights are cut over the ranks, and no bit changes",
    .defaults =
        "layers=3 hidden=48 heads=6 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=1 steps=3 "
        "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 zero=3",
    .natural = 4,
    .check = check,
    .plug = zero_layout_plug,
    .unplug = zero_layout_unplug,
    .counts = zero_counts,
    .twin = &zero_twin_of_2_and_3,
    .more = show,
};

int main(int argc, char **argv) { return layout_program(argc, argv, &program); }
#endif
