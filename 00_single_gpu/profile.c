// profile.c: where a step's time and memory go.
// Playbook: "Profiling the memory usage", "A1: Distributed Training Profiling".
//
// Nothing changes from train.c: this watches a few of its steps. Every operation is timed on the wall clock
// and on the model clock (clock.h); every allocation and release is recorded with its kind and its place in
// the sequence.
//
//     bytes |     step 1             step 2
//           |       /\                 /\          activations rise with forward and fall with backward
//           |      /  \      _________/  \____     optimizer state appears at the end of step 1, and stays
//           | ____/    \____|
//           |_________________________________     parameters and gradients: flat buffers from the start
//
//     peak of step 1 = P + G + max(A, O)          of every later step = P + G + O + A
//
// So a run can pass its first step and run out of memory in the second. (In the playbook's figure gradients
// grow during backward, where PyTorch allocates them.) Bytes sent: none. Memory: as in train.c.
// Run: build/00_single_gpu/profile          (--recompute full; --model llama-3-8b --dtype bf16 --dry-run)
// Last line: PASS profile: optimizer state appears at the end of step 1 and adds … to every later peak
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formulas.h"
#include "harness.h"
#include "report/memory_picture.h"

#ifndef NO_MAIN
// ---- what is watched ----

// Runs the steps under both clocks and the memory listener; returns the wall seconds of each.
static double *watch_steps(Trainer *trainer, MemoryHistory *history) {
    int64_t steps = trainer->config.steps;
    double *seconds = host_alloc(sizeof *seconds * (size_t)steps);
    clock_reset();
    timeline_start(&trainer->config, comm_world());
    for (int64_t step = 0; step < steps; step++) {
        memory_history_step(history);
        double start = wall_seconds();
        train_step(trainer, NULL);
        seconds[step] = wall_seconds() - start;
        progress_on_terminal(step + 1, steps, "steps watched");
    }
    memory_history_step(history);
    return seconds;
}

// ---- time ----

static int by_wall(const void *a, const void *b) {
    double x = ((const OpCount *)a)->wall_seconds, y = ((const OpCount *)b)->wall_seconds;
    return (x < y) - (x > y);
}
static int by_model(const void *a, const void *b) {
    double x = ((const OpCount *)a)->model_seconds, y = ((const OpCount *)b)->model_seconds;
    return (x < y) - (x > y);
}

// One row: calls, wall time and rates (blank where nothing was computed), model clock.
static void print_row(const OpCount *op, const OpCount *total, double steps) {
    char wall[80] = "";
    if (!device_is_dry_run()) {
        report_number("wall clock", op->name, op->wall_seconds, "s");
        snprintf(wall, sizeof wall, "%10.3f %5.1f%% %9.1f %8.1f", 1e3 * op->wall_seconds / steps,
                 100 * op->wall_seconds / total->wall_seconds, 1e-9 * op->flops / op->wall_seconds,
                 1e-9 * op->bytes / op->wall_seconds);
    }
    say("  %-22s %7.4g  %s %9.4g  %10.4g %5.1f%%", op->name, (double)op->calls / steps, wall,
        1e-9 * op->flops / steps, 1e3 * op->model_seconds / steps,
        100 * op->model_seconds / total->model_seconds);
    report_number("calls", op->name, (double)op->calls, "");
    report_number("model clock", op->name, op->model_seconds, "s");
    report_number("FLOPs", op->name, op->flops, "FLOP");
    report_number("bytes read and written", op->name, op->bytes, "B");
}

// The ten costliest operations, and the phases of a step.
static void print_operations(const Machine *machine, double steps) {
    enum { SHOWN = 10 };
    const OpCount *operations, *marks;
    int count = clock_operations(&operations), mark_count = clock_marks(&marks);
    bool dry = device_is_dry_run();
    OpCount total = clock_total();
    OpCount *sorted = host_alloc(sizeof *sorted * (size_t)count);
    memcpy(sorted, operations, sizeof *sorted * (size_t)count);
    qsort(sorted, (size_t)count, sizeof *sorted, dry ? by_model : by_wall);
    say("\n%44s%*smodel clock: %s", dry ? "" : "wall clock", dry ? 5 : 41, "", machine->device);
    say("  %-22s %7s  %s %9s  %10s  share", "per step", "calls",
        dry ? "" : "        ms  share   GFLOP/s     GB/s", "GFLOP", "ms");
    for (int i = 0; i < count && i < SHOWN; i++) print_row(&sorted[i], &total, steps);
    char *all = format_text("all %d operations", count);
    total.name = all;
    print_row(&total, &total, steps);
    say("\n");
    for (int i = 0; i < mark_count; i++) print_row(&marks[i], &marks[0], steps);
    free(all);
    free(sorted);
}

// The first step is slower: it touches its memory for the first time.
static void print_steps(const double *seconds, int64_t steps) {
    if (device_is_dry_run()) return;
    double later = 0;
    for (int64_t step = 1; step < steps; step++) later += seconds[step] / (double)(steps - 1);
    if (steps > 1)
        say("\n  these rows average all steps: step 1 took %.1f ms, the later ones %.1f ms on average",
            1e3 * seconds[0], 1e3 * later);
    report_series("wall seconds of each step", seconds, steps);
}

// ---- the proof ----

// Peak of all kinds but communication, which on one device is a loss or two on its way to the host.
static int64_t peak_of_step(const MemoryHistory *history, int64_t step) {
    int64_t peak = 0;
    for (int64_t i = history->first[step]; i <= history->first[step + 1]; i++) {
        int64_t bytes = history->moment[i].total - history->moment[i].now[MEMORY_COMMUNICATION];
        if (bytes > peak) peak = bytes;
    }
    return peak;
}

// Bytes: optimizer state at a step's end, the peak of activations, and the peak of all kinds together.
typedef struct StepMemory {
    double optimizer, activations, all;
} StepMemory;

static StepMemory step_memory(const Config *config, int64_t step) {
    MemoryPlan plan = {.model = *config, .f32_gradients = true, .tp = 1, .dp = 1};
    MemoryNeed need = memory_states(&plan, (double)config_parameters(config));
    double states = need.parameters + need.gradients + need.accumulators;
    double activations = (double)peak_activation_bytes(config, config->dtype);
    // Step 1 allocates the optimizer state after backward has freed every activation.
    double late = step ? need.optimizer + activations : fmax(need.optimizer, activations);
    return (StepMemory){need.optimizer, activations, states + late};
}

static void check_step(const Config *config, const MemoryHistory *history, int64_t step) {
    const StepMemory predicted = step_memory(config, step);
    const struct {
        const char *what;
        double predicted;
        int64_t measured;
    } row[] = {
        {"optimizer at its end", predicted.optimizer,
         history->moment[history->first[step + 1]].now[MEMORY_OPTIMIZER]},
        {"peak of activations", predicted.activations,
         memory_history_peak(history, step, MEMORY_ACTIVATION)},
        {"peak of all", predicted.all, peak_of_step(history, step)},
    };
    for (int i = 0; i < 3; i++) {
        char *what = format_text("step %lld: %s", (long long)step + 1, row[i].what);
        if (step < 2) report_equal(what, row[i].predicted, (double)row[i].measured, "B");
        else
            report_that((double)row[i].measured == row[i].predicted,
                        "%s is %lld B, not the %.15g B of step 2", what, (long long)row[i].measured,
                        row[i].predicted);
        free(what);
    }
}

// Each matrix product of forward has two in backward, for the gradients of its two factors; recomputation
// adds its own.
static void check_flops(const Config *config) {
    double again =
        recompute_extra_flops(config, config->micro_batch * config->grad_acc) * (double)config->steps;
    report_equal("FLOPs of backward", 2 * clock_mark("step/forward").flops + again,
                 clock_mark("step/backward").flops, "FLOP");
}

static void check_memory(const Config *config, const MemoryHistory *history, int64_t kept_bytes) {
    MemoryPlan plan = {.model = *config, .f32_gradients = true, .tp = 1, .dp = 1};
    MemoryNeed need = memory_states(&plan, (double)config_parameters(config));
    const Moment *start = &history->moment[history->first[0]];
    report_equal("parameters", need.parameters, (double)start->now[MEMORY_PARAMETER], "B");
    report_equal("gradients", need.gradients + need.accumulators, (double)start->now[MEMORY_GRADIENT], "B");
    report_equal("activations kept by forward", (double)kept_activation_bytes(config), (double)kept_bytes,
                 "B");

    // No optimizer state until the first optimizer step, when backward has freed every activation.
    int64_t i = 0;
    while (i < history->count - 1 && history->moment[i].now[MEMORY_OPTIMIZER] == 0) i++;
    report_that(i > history->first[0] && i <= history->first[1],
                "optimizer state does not appear in step 1");
    report_equal("activations at that moment", 0, (double)history->moment[i].now[MEMORY_ACTIVATION], "B");
    for (int64_t step = 0; step < history->steps; step++) check_step(config, history, step);
}

// ---- the program ----

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *svg = NULL;
    bool dry_run = false;
    Option own[] = {{"svg", OPTION_OUTPUT, &svg, NULL, 0, 0, "FILE", "picture of memory over time", false},
                    {"dry-run", OPTION_FLAG, &dry_run, NULL, 0, 0, "",
                     "count and clock, but compute nothing: any size", false}};
    Config config = config_parse(
        argc, argv, "Where the time and the memory of a training step go.",
        CONFIG_MODEL | CONFIG_BATCH | CONFIG_RECOMPUTE | CONFIG_REPORT | CONFIG_CLOCK | CONFIG_TRACE,
        "steps=4", own, 2);
    CHECK(config.steps >= 2,
          "--steps 1 has no later step, whose peak the optimizer state would add to: --steps 2 would fit");
    // Unless named, the files go beside the program.
    char *beside[] = {format_text("%s.svg", argv[0]), format_text("%s.trace.json", argv[0])};
    if (!svg) svg = beside[0];
    if (!config.trace) config.trace = beside[1];
    report_json(config.json);
    const Machine *machine = machine_find(config.machine);
    device_dry_run(dry_run);
    config_print(&config);

    MemoryHistory history;
    memory_history_start(&history, config.steps);
    Trainer *trainer = trainer_new(&config, mesh_single(), NULL);
    double *seconds = watch_steps(trainer, &history);
    print_operations(machine, (double)config.steps);
    print_steps(seconds, config.steps);
    say("\nmemory over time: p parameters, g gradients, O optimizer, a activations");
    memory_history_print(&history);
    say("\nby formula and by count");
    check_flops(&config);
    check_memory(&config, &history, trainer->kept_bytes);

    char *title =
        format_text("Device memory of model %s in %s, micro-batches of %lld x %lld tokens%s", config.model,
                    dtype_name((DType)config.dtype), (long long)config.micro_batch, (long long)config.seq,
                    config.recompute == RECOMPUTE_NONE ? "" : ", recomputing");
    memory_history_svg(&history, svg, title, machine);
    timeline_finish(&config, comm_world());
    say("wrote %s, and %s for https://ui.perfetto.dev", svg, config.trace);
    double optimizer = (double)memory_account().now[MEMORY_OPTIMIZER];
    trainer_free(trainer);
    memory_history_free(&history);
    free(seconds);
    free(title);
    for (int i = 0; i < 2; i++) free(beside[i]);
    return report_verdict("optimizer state appears at the end of step 1 and adds %s to every later peak",
                          bytes_text(optimizer));
}
#endif
