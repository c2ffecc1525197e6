// zero3.c: weights are also sharded: each rank keeps only its own part (FSDP). Playbook: "ZeRO-3: Adding
// Parameter Partitioning".
//
// Changes from zero2.c: nothing is gathered after the step. A unit's weights are gathered before their use
// and freed after it, in forward and again in backward, while those of the next unit are already in flight
// (prefetch):
//
//     compute       E   B0  B1  H    |  H    B1      B0          E, H: embedding and head
//     network    E  B0  B1  H        |  B1   rsH B0  rsB1  rsB0 rsE      rs: reduce-scatter, as in zero2
//
// Each unit is gathered twice, except the head: forward ends and backward begins with it, so it is kept. The
// embedding's backward reads no weights, so it is gathered once as well: 2 U - 2 gathers for U = L + 2 units.
// (The playbook's 2 L - 1: blocks alone, the last kept.) Tied, the head needs the embedding again: 2 U - 1.
//
// Letters as in zero1.c, and E and H for the parameters of embedding and head. Bytes sent per rank and
// micro-batch: (N - 1) / N (g Psi + 2 e Psi - e (E + H)), with tied weights - e H.
// Memory per rank: e Psi / N and two units, g Psi / N and two units, k Psi / N.
// Run: build/02_zero/zero3           (--ranks 3, --tied, --dtype bf16, --recompute full, --grad-acc 4 …)
// Last line: PASS zero3: weights are sharded over the ranks, and no bit changes …
#include <math.h>
#include <stdlib.h>

#include "00_single_gpu/formulas.h"
#include "report/bars_picture.h"
#include "zero.h"

static void shard(Model *model) { zero_shard(model, SHARD_VALUES); }

// ---- the technique: weights; gradients as in zero2 ----

static void start_gather(Model *model, Zero *zero, int unit) {
    Unit *u = &model->params.unit[unit];
    if (tensor_exists(u->values) || u->count == 0) return;  // here, in flight, or another stage's
    u->values = tensor_new(MEMORY_PARAMETER, model->params.recipe.weight, SHAPE(u->count));
    int64_t *counts = zero_part_counts(u);
    zero->gathering[unit] = comm_all_gather_coded(u->values, u->own_values, counts,
                                                  model->params.recipe.send_weights, u->replicas);
    free(counts);
}

// A block's experts are a unit of their own, after the head in the table, but used inside the block.
static bool is_experts(const Model *model, int unit) { return unit > model->head_unit; }

// Starts gathering what the pass will use after this unit.
static void prefetch(Model *model, Zero *zero, int unit, Pass pass) {
    bool block = unit >= model->first_block_unit && unit < model->head_unit;
    if (is_experts(model, unit)) return;  // their block has already prefetched what follows
    if (block && model->first_expert_unit)
        start_gather(model, zero, model->first_expert_unit + unit - model->first_block_unit);
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
    if (!is_experts(model, unit)) zero->backward = pass == BACKWARD;
    start_gather(model, zero, unit);
    if (zero->prefetch) prefetch(model, zero, unit, pass);
    zero_wait(&zero->gathering[unit]);
}

static void release(void *context, Model *model, int unit, Pass pass) {
    Zero *zero = context;
    bool of_head = zero->at_head;  // the head itself, or the embedding that it is tied to
    if (unit == model->head_unit) zero->at_head = false;
    if (pass == FORWARD && of_head) return;
    // Recomputation runs forward within the block's backward, which uses them next.
    if (pass == FORWARD && is_experts(model, unit) && zero->backward) return;
    tensor_free(&model->params.unit[unit].values);
}

// Forward keeps the head's weights for backward, and after an evaluation no backward runs.
static void free_gathered(void *context, Model *model) {
    Zero *zero = context;
    for (int i = 0; i < model->params.units; i++) {
        zero_wait(&zero->gathering[i]);
        tensor_free(&model->params.unit[i].values);
    }
}

static void nothing_to_gather(void *context, Model *model, int unit) {
    (void)context, (void)model, (void)unit;
}

static void *plug(Model *model) {
    Zero *zero = zero2_plug(model);
    zero->prefetch = !config_number(&model->config, "no-prefetch");
    model->sockets.parameters.acquire = acquire;
    model->sockets.parameters.release = release;
    model->sockets.parameters.complete = free_gathered;
    model->sockets.parameters.stepped = nothing_to_gather;  // the next pass gathers
    return zero;
}

static bool enabled(const Config *config) { return zero_on(config, 3); }
static void price(Price *price, const Model *model, const void *zero) { zero_price(price, model, zero, 3); }

static const Option prefetch_option = {"no-prefetch",
                                       OPTION_FLAG,
                                       NULL,
                                       NULL,
                                       0,
                                       0,
                                       "",
                                       "gather a unit's weights only when they are used, without prefetch",
                                       false};

const Technique zero3 = {.name = "zero3",
                         .option = &prefetch_option,
                         .options = 1,
                         .asked = "--zero 3",
                         .axes = 1u << AXIS_DP,
                         .enabled = enabled,
                         .shard = shard,
                         .plug = plug,
                         .unplug = zero_unplug,
                         .price = price};

#ifndef NO_MAIN

// ---- all stages compared ----

typedef struct Stage {
    ZeroVariant variant;
    int zero;
    const char *memory, *sent;  // as the playbook writes them; NULL: not in that table
} Stage;

static const Stage stages[] = {
    {{"DDP, naive", &ddp_naive, NULL, 0}, 0, NULL, NULL},
    {{"DDP, bucketed", &ddp_bucketed, NULL, 0}, 0, "2 Psi + 6 Psi + 12 Psi", "2 Psi"},
    {{"ZeRO-1, after step", &zero1, "gather", GATHER_AFTER_STEP}, 1, NULL, NULL},
    {{"ZeRO-1, in step", &zero1, "gather", GATHER_BEHIND_STEP}, 1, NULL, NULL},
    {{"ZeRO-1", &zero1, NULL, 0}, 1, "2 Psi + 6 Psi + 12 Psi / N", "2 Psi"},
    {{"ZeRO-2", &zero2, NULL, 0}, 2, "2 Psi + (6 + 12) Psi / N", "2 Psi"},
    {{"ZeRO-3, no prefetch", &zero3, "no-prefetch", 1}, 3, NULL, NULL},
    {{"ZeRO-3", &zero3, NULL, 0}, 3, "(2 + 6 + 12) Psi / N", "3 Psi"},
};
enum { STAGES = sizeof stages / sizeof *stages };

// The playbook's formulas beside what a rank holds at its peak and sends in a step. In addition to the
// formula it holds the whole units in use; with ZeRO-2 and -3 it holds 2 Psi / N less, because 16-bit
// gradients exist only for units in use, not for the rank's own part.
static void print_states(Mesh mesh, const Config *c, const StepCost *cost) {
    double n = mesh.dp.size, all = (double)config_parameters(c),
           ends = 2.0 * (double)(c->vocab * c->hidden) + (double)c->hidden;
    say("\nWhat rank 0 holds at its peak, and sends; Psi = %.2f B parameters, N = %.0f ranks:\n",
        1e-9 * all, n);
    say("  %-13s %-26s %8s %8s %9s %9s  %5s %8s %8s\n", "", "the playbook, bytes", "formula", "weights",
        "gradients", "optimizer", "sends", "formula", "sent");
    for (int i = 0; i < STAGES; i++) {
        int stage = stages[i].zero;
        if (!stages[i].memory) continue;
        MemoryPlan plan = {.model = *c, .f32_gradients = true, .zero = stage, .tp = 1, .dp = mesh.dp.size};
        MemoryNeed need = memory_states(&plan, all);
        const int64_t *held = cost[i].memory.peak;
        // Gradients are sent in f32, twice in an all-reduce; weights in bf16, with ZeRO-3 twice, but
        // embedding and head once.
        double elements = stage == 0 ? 8 * all : stage < 3 ? (4 + 2) * all : (4 + 2 + 2) * all - 2 * ends;
        double sends = elements * (n - 1) / n;
        say("  %-13s %-26s %8s %8s %9s %9s  %5s %8s %8s\n", stages[i].variant.name, stages[i].memory,
            bytes_text(memory_states_bytes(&need)), bytes_text((double)held[MEMORY_PARAMETER]),
            bytes_text((double)held[MEMORY_GRADIENT]), bytes_text((double)held[MEMORY_OPTIMIZER]),
            stages[i].sent, bytes_text(sends), bytes_text((double)cost[i].comm.bytes));
        // Uneven parts, and the few scalars that a step sums, make a difference below one millionth.
        report_that(fabs((double)held[MEMORY_OPTIMIZER] / need.optimizer - 1) < 1e-6 &&
                        fabs((double)cost[i].comm.bytes / sends - 1) < 1e-6,
                    "%s of Llama 3 8B: %.0f B of optimizer state, by the formula %.0f; %.0f B sent, by "
                    "the formula %.0f",
                    stages[i].variant.name, (double)held[MEMORY_OPTIMIZER], need.optimizer,
                    (double)cost[i].comm.bytes, sends);
    }
}

// The same as a bar chart.
static void draw_states(Mesh mesh, const Config *c, const StepCost *cost, const char *file) {
    Bar bar[STAGES];
    int bars = 0;
    for (int i = 0; i < STAGES; i++) {
        if (!stages[i].memory) continue;
        const int64_t *held = cost[i].memory.peak;
        bar[bars++] = (Bar){stages[i].variant.name,
                            stages[i].memory,
                            {(double)held[MEMORY_PARAMETER], (double)held[MEMORY_GRADIENT],
                             (double)held[MEMORY_OPTIMIZER]}};
    }
    char *title = format_text(
        "Llama 3 8B in bf16 with AdamW on %d ranks: what rank 0 holds at its peak, activations left aside",
        mesh.dp.size);
    if (base_rank() == 0) bars_svg("--svg", file, title, bar, bars, machine_find(c->machine));
    free(title);
}

// ---- further runs ----

static const Technique *const techniques[] = {&zero3, &recompute, NULL};

// Proves several micro-batches, with each unit gathered only when it is used, and with SGD, whose step
// shows the scale of a gradient; AdamW's hides it.
static void accumulate(Mesh mesh, const Config *config) {
    Config c = *config;
    c.grad_acc = config->grad_acc + 1;
    c.optimizer = OPTIMIZER_SGD, c.lr = 0.1;
    config_set(&c, "no-prefetch", 1);
    say("\nWith %ld micro-batches, SGD and no prefetch:", c.grad_acc);
    program_prove(&c, mesh, techniques, "DDP in the same order of sums", zero_twin_of_2_and_3, false,
                  false);
}

static void check_picture(Mesh mesh, const Config *config) {
    CHECK(mesh.dp.size > 1 || !config_text(config, "svg"),
          "--svg shows what the ranks of --dp hold, and there is one: --ranks 2 would fit");
}

static void show(Mesh mesh, const Config *config) {
    accumulate(mesh, config);
    if (mesh.dp.size == 1) return;
    ZeroVariant variants[STAGES];
    StepCost cost[STAGES];
    for (int i = 0; i < STAGES; i++) variants[i] = stages[i].variant;
    Config shape = zero_compare(mesh, variants, STAGES, cost);
    const StepCost *naive = &cost[0], *alone = &cost[STAGES - 2], *best = &cost[STAGES - 1];
    report_that(best->step_seconds < alone->step_seconds,
                "a step takes %.3f ms with prefetch, expected less than without, %.3f",
                1e3 * best->step_seconds, 1e3 * alone->step_seconds);
    report_that(best->comm.exposed_seconds < naive->comm.exposed_seconds,
                "ZeRO-3 waits %.3f ms, expected less than naive DDP, %.3f",
                1e3 * best->comm.exposed_seconds, 1e3 * naive->comm.exposed_seconds);
    bool one_node = zero_on_standard_machine(config) && mesh.dp.size <= 8;
    report_that(!one_node || best->comm.exposed_seconds < 0.1 * best->comm.model_seconds,
                "ZeRO-3 exposes %.2f of its communication, expected less than 0.1",
                best->comm.exposed_seconds / best->comm.model_seconds);
    print_states(mesh, &shape, cost);
    if (config_text(config, "svg")) draw_states(mesh, config, cost, config_text(config, "svg"));
    zero3_overlap(mesh, config);
}

static const Option picture_option = {
    "svg", OPTION_OUTPUT, NULL, NULL, 0, 0, "FILE", "what each stage holds, as a picture", false};

int main(int argc, char **argv) {
    const Program program = {
        .purpose =
            "ZeRO-3: optimizer state, gradients and weights are sharded over the ranks of data "
            "parallelism.",
        .claim = "weights are sharded over the ranks, and no bit changes",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=1 steps=3 "
            "dtype=f64 optimizer=adamw lr=0.001 clip=0.5",
        .natural = 4,
        .before = {"zero2", (const Technique *[]){&zero2, &recompute, NULL}, NULL, 0},
        .techniques = techniques,
        .twin = "DDP in the same order of sums",
        .twin_techniques = zero_twin_of_2_and_3,
        .plan = check_picture,
        .more = show,
        .more_option = &picture_option,
        .more_options = 1};
    return program_main(argc, argv, &program);
}
#endif
