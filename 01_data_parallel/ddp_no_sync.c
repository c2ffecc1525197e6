// ddp_no_sync.c: accumulation without wasted all-reduces. Playbook: "Third optimization: Interplay with
// gradient accumulation".
//
// Changes from ddp_bucketed.c: only the last micro-batch of a step sends. The others only add up their
// gradients locally, and the sum over ranks at the end includes them all: summing over micro-batches and
// then over ranks gives the sum over both. Which micro-batch is the last is known before its backward
// (model_begin_step).
//
// Bytes sent per rank and step: 2 (N - 1) / N K, whatever grad_acc is. Memory per rank: as on one device.
// Run: build/01_data_parallel/ddp_no_sync  (--grad-acc 4, --ranks 3, --tied, --dtype f32, --dry-run …)
// Last line: PASS ddp_no_sync: the ranks reproduce the single-device step …
#include <stdlib.h>

#include "ddp_bucketed.h"

// ---- the technique ----

static void ready(void *context, Model *model, int unit, bool last) {
    if (last) ddp_bucketed_ready(context, model, unit, last);
    else params_accumulate(&model->params, unit);
}

static void *plug(Model *model) {
    void *buckets = ddp_bucketed_plug(model);
    model->sockets.gradients.ready = ready;
    return buckets;
}

static void price(Price *price, const Model *model, const void *context) {
    (void)context;
    ddp_bucketed_price(price, model, 1);
}

// In programs that offer ZeRO's stages, this is stage 0.
static bool enabled(const Config *config) { return config_number(config, "zero") == 0; }

const Technique ddp_no_sync = {.name = "ddp_no_sync",
                               .option = &ddp_bucket_option,
                               .options = 1,
                               .asked = "--zero 0",
                               .axes = 1u << AXIS_DP,
                               .enabled = enabled,
                               .plug = plug,
                               .unplug = ddp_bucketed_unplug,
                               .price = price};

#ifndef NO_MAIN

// ---- the three optimizations compared ----

// One dry step of Llama 3 8B with two micro-batches on this run's ranks, on the model clock. Each row must
// take less time than the one before, or as much with fewer all-reduces: buckets save no time where the
// latency of single messages is hidden behind backward.
static void compare_variants(Mesh mesh, const Config *config) {
    (void)config;
    static const struct {
        const char *name;
        const Technique *technique;
    } variants[] = {{"naive", &ddp_naive},
                    {"overlap", &ddp_overlap},
                    {"bucketed", &ddp_bucketed},
                    {"no_sync", &ddp_no_sync}};
    if (mesh.dp.size == 1) return;
    Config c = config_of_model("llama-3-8b", "seq=4096 dtype=bf16 micro-batch=1 grad-acc=2 steps=2");
    device_dry_run(true);
    char *title = format_text("Llama 3 8B, %d ranks, 2 micro-batches of 4,096 tokens", mesh.dp.size);
    say("\n%s, on the model clock:\n", title);
    timeline_title(title);
    free(title);
    say("  %-10s %12s %14s %12s %12s\n", "", "step, ms", "exposed, ms", "all-reduces", "bytes sent");
    double before = 0, messages = 0;
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        clock_push(variants[i].name);
        StepCost cost = program_cost(&c, mesh, (const Technique *[]){variants[i].technique, NULL});
        CommCount reductions = cost.all_reduce;
        clock_pop();
        timeline_keep(variants[i].name);
        say("  %-10s %12.3f %14.3f %12lld %12s\n", variants[i].name, 1e3 * cost.step_seconds,
            1e3 * reductions.exposed_seconds, (long long)reductions.calls,
            bytes_text((double)reductions.bytes));
        report_number(variants[i].name, "seconds per step", cost.step_seconds, "s");
        report_number(variants[i].name, "exposed seconds", reductions.exposed_seconds, "s");
        double of_before = before > 0 ? cost.step_seconds / before : 0;
        report_that(of_before < 1 - 1e-9 || (of_before < 1 + 1e-9 && (double)reductions.calls < messages),
                    "%s takes %.6f of the time of the row before it, with %lld all-reduces after %.0f: "
                    "expected less time, or as much with fewer of them",
                    variants[i].name, of_before, (long long)reductions.calls, messages);
        before = cost.step_seconds;
        messages = (double)reductions.calls;
    }
    device_dry_run(false);
}

int main(int argc, char **argv) {
    const Program program = {
        .purpose =
            "Data parallelism: with accumulation, gradients are sent only after the last micro-batch.",
        .claim = "the ranks reproduce the single-device step",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 bucket-mb=0.1",
        .natural = 4,
        .before = {"ddp_bucketed", (const Technique *[]){&ddp_bucketed, &recompute, NULL}, NULL, 0},
        .techniques = (const Technique *[]){&ddp_no_sync, &recompute, NULL},
        .more = compare_variants};
    return program_main(argc, argv, &program);
}
#endif
