// ddp_no_sync.c: accumulation without wasted all-reduces. Playbook: "Third optimization: Interplay with gradient
// accumulation".
//
// Against ddp_bucketed.c: only the last micro-batch of a step sends. The others leave their gradients on their rank, and
// the one sum over ranks at the end takes them all:  sum over micro-batches, then over ranks  =  over both.
// What switches sending on is known before forward, not only in backward: micro->last.
//
// Bytes sent per rank and step: 2 (n - 1) / n K, whatever grad_acc is. Memory per rank: as on one device.
// Run: build/01_data_parallel/ddp_no_sync              (--grad-acc 4, --ranks 3, --tied, --dtype f32, --dry-run …)
// Last line: PASS ddp_no_sync: ranks together make the step of one device …
#include <stdlib.h>

#include "playbook.h"

// ---- the technique ----

static void ready(void *context, Model *model, int unit, MicroBatch *micro) {
    if (micro->last) ddp_bucketed_ready(context, model, unit, micro);
    else params_accumulate(&model->params, unit);
}

static void finish(void *context, Model *model, MicroBatch *micro) {
    if (micro->last) ddp_bucketed_finish(context, model, micro);
}

void ddp_no_sync_plug(Model *model, Ddp *ddp) {
    ddp_bucketed_plug(model, ddp);
    model->sockets.gradients.ready = ready;
    model->sockets.gradients.finish = finish;
}

#ifndef NO_MAIN

// ---- the three optimizations, one beside the other ----

// One dry step of Llama 3 8B with two micro-batches on the ranks at hand, on the model clock: it must fall from row to row.
static void compare_variants(Mesh mesh, const Config *config) {
    (void)config;
    static const struct {
        const char *name;
        void (*plug)(Model *model, Ddp *ddp);
    } variants[] = {{"naive", ddp_naive_plug},
                    {"overlap", ddp_overlap_plug},
                    {"bucketed", ddp_bucketed_plug},
                    {"no_sync", ddp_no_sync_plug}};
    if (mesh.dp.size == 1) return;
    Config c = config_default(
        "layers=32 hidden=4096 heads=32 kv-heads=8 ffn=14336 vocab=128256 seq=4096 "
        "dtype=bf16 micro-batch=1 grad-acc=2 steps=2");
    device_dry_run(true);
    char *title = format_text("Llama 3 8B, %d ranks, 2 micro-batches of 4,096 tokens", mesh.dp.size);
    say("\n%s, on the model clock:\n", title);
    timeline_title(title);
    free(title);
    say("  %-10s %12s %14s %12s %12s\n", "", "step, ms", "exposed, ms", "all-reduces", "bytes sent");
    double before = 0;
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        clock_push(variants[i].name);
        DdpCost cost = ddp_cost(&c, mesh, variants[i].plug, 25000000);
        clock_pop();
        timeline_keep(variants[i].name);
        say("  %-10s %12.3f %14.3f %12lld %12s\n", variants[i].name, 1e3 * cost.step_seconds,
            1e3 * cost.exposed_seconds, (long long)cost.all_reduces, bytes_text((double)cost.bytes));
        report_number(variants[i].name, "seconds per step", cost.step_seconds, "s");
        report_number(variants[i].name, "exposed seconds", cost.exposed_seconds, "s");
        report_that(i == 0 || cost.step_seconds < before, "%s is not faster than the row before it",
                    variants[i].name);
        before = cost.step_seconds;
    }
    device_dry_run(false);
}

static int64_t once(const Config *config) {
    (void)config;
    return 1;
}

static int64_t one_per_bucket(const Model *model, const Ddp *ddp) {
    int first_unit[model->params.units];
    return ddp_bucket_starts(&model->params, ddp->bucket_bytes, first_unit);
}

int main(int argc, char **argv) {
    const DdpProgram program = {
        .purpose = "Data parallelism: accumulation sends after the last micro-batch alone.",
        .claim = "ranks together make the step of one device",
        .plug = ddp_no_sync_plug,
        .syncs = once,
        .all_reduces = one_per_bucket,
        .more = compare_variants};
    return ddp_prove(argc, argv, &program);
}
#endif
