// zero_stages.c: the stages of ZeRO beside DDP, for Llama 3 8B: what a step takes and hides on the model
// clock, and what a rank holds and sends. Playbook: "Memory usage revisited".
//
// Bytes sent and memory per rank: counted in dry runs, beside the playbook's formulas (zero.c has a table of
// them). This file has no main: zero3 prints the results; zero1 and zero2 have rows of their own.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "00_single_gpu/formulas.h"
#include "report/bars_picture.h"
#include "zero.h"

// ---- steps on the model clock ----

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

// ---- all stages ----

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

void zero_stages(Mesh mesh, const Config *config) {
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
}
