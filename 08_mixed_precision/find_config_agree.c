// find_config_agree.c: layouts as find_config prices them, compared with dry runs of the same layouts on
// all their ranks. Playbook: "Finding the Best Training Configuration".
//
// The dry run has a process for each rank, and clock times that travel with the messages; the search has one
// process that stands for all. States and kept activations of the fullest rank must be equal to the byte,
// its peak within 0.5%, the step within 1%. The closed forms, which choose what is clocked, are no more than
// 6% too long, as the search assumes (of ZB-H1 it assumes 12%, which it can be on more ranks than these), and
// not much too short; their peak is within 2%.
// Recomputation's share of the time is about its share of FLOPs. This file has no main: find_config.c shows
// it.
#include <math.h>
#include <stdlib.h>

#include "find_config.h"
#include "five_d.h"
#include "report/report.h"

enum { RANKS = 8, EXPERTS = 8 };

typedef struct Row {
    int dp, cp, tp, pp, zero, schedule, chunks, recompute;
    int64_t micro_batch, micro_batches;
    int ep;  // 0: no experts
} Row;
static const Row rows[] = {
    {8, 1, 1, 1, 0, ONE_F_ONE_B, 1, 0, 1, 2, 0},
    {8, 1, 1, 1, 1, ONE_F_ONE_B, 1, 0, 1, 2, 0},
    {8, 1, 1, 1, 2, ONE_F_ONE_B, 1, 0, 1, 3, 0},
    {8, 1, 1, 1, 3, ONE_F_ONE_B, 1, 0, 1, 2, 0},
    {8, 1, 1, 1, 3, ONE_F_ONE_B, 1, 2, 2, 5, 0},
    {4, 1, 2, 1, 0, ONE_F_ONE_B, 1, 0, 1, 4, 0},
    {4, 1, 2, 1, 1, ONE_F_ONE_B, 1, 2, 2, 4, 0},
    {2, 1, 4, 1, 1, ONE_F_ONE_B, 1, 0, 2, 4, 0},
    {2, 1, 4, 1, 3, ONE_F_ONE_B, 1, 0, 2, 4, 0},
    {1, 1, 8, 1, 0, ONE_F_ONE_B, 1, 0, 4, 6, 0},
    {1, 1, 8, 1, 0, ONE_F_ONE_B, 1, 1, 4, 6, 0},
    {4, 2, 1, 1, 1, ONE_F_ONE_B, 1, 0, 1, 4, 0},
    {2, 2, 2, 1, 1, ONE_F_ONE_B, 1, 0, 1, 4, 0},
    {2, 2, 2, 1, 3, ONE_F_ONE_B, 1, 2, 1, 4, 0},
    {1, 1, 1, 8, 0, ONE_F_ONE_B, 1, 0, 1, 16, 0},
    {1, 1, 1, 8, 0, AFAB, 1, 0, 1, 16, 0},
    {2, 1, 1, 4, 1, ONE_F_ONE_B, 1, 0, 1, 16, 0},
    {2, 1, 2, 2, 1, ONE_F_ONE_B, 1, 0, 2, 8, 0},
    {1, 1, 4, 2, 0, ONE_F_ONE_B, 1, 0, 1, 8, 0},
    {1, 1, 2, 4, 0, INTERLEAVED, 2, 0, 1, 8, 0},
    {1, 2, 2, 2, 1, ONE_F_ONE_B, 1, 0, 1, 8, 0},
    {2, 1, 1, 4, 2, ZB_H1, 1, 0, 1, 8, 0},
    {1, 1, 2, 4, 0, INTERLEAVED, 4, 2, 1, 8, 0},
    // experts over dp, dp x tp, within tp, dp x cp x tp, and behind a pipeline, spread and not
    {8, 1, 1, 1, 1, ONE_F_ONE_B, 1, 0, 1, 2, 8},
    {4, 1, 2, 1, 1, ONE_F_ONE_B, 1, 0, 1, 3, 8},
    {2, 1, 4, 1, 3, ONE_F_ONE_B, 1, 0, 1, 2, 4},
    {2, 2, 2, 1, 2, ONE_F_ONE_B, 1, 2, 1, 2, 4},
    {2, 1, 2, 2, 1, ONE_F_ONE_B, 1, 0, 1, 8, 4},
    {2, 1, 1, 4, 1, ONE_F_ONE_B, 1, 0, 1, 8, 1},
    // behind a pipeline: reductions of each micro-batch, on ports that tp, cp and experts use as well;
    // gathers of a whole stage; recomputed activations that wait for W
    {2, 2, 1, 2, 2, ONE_F_ONE_B, 1, 0, 1, 4, 0},
    {1, 2, 1, 4, 2, INTERLEAVED, 2, 0, 1, 12, 0},
    {2, 1, 1, 4, 1, ZB_H1, 1, 0, 1, 4, 0},
    {1, 2, 1, 4, 1, ZB_H1, 1, 0, 2, 4, 0},
    {2, 1, 2, 2, 2, ZB_H1, 1, 2, 2, 4, 0},
    {1, 2, 1, 4, 3, ZB_H1, 1, 0, 1, 8, 0},
    {2, 1, 1, 4, 3, ZB_H1, 1, 0, 1, 24, 0},
    {4, 1, 1, 2, 3, AFAB, 1, 0, 1, 6, 0},
    {1, 2, 1, 4, 0, INTERLEAVED, 2, 2, 1, 4, 0},
    {1, 1, 4, 2, 0, ONE_F_ONE_B, 1, 0, 1, 6, 2},
    {1, 2, 2, 2, 2, INTERLEAVED, 2, 2, 1, 6, 1},
    {2, 1, 1, 4, 2, ONE_F_ONE_B, 1, 2, 1, 8, 2},
    {4, 1, 1, 2, 3, INTERLEAVED, 2, 0, 1, 2, 1},
    // a step ends with a buffer for the gradients of experts that ranks of tp have copies of
    {4, 1, 2, 1, 1, ONE_F_ONE_B, 1, 0, 1, 3, 1},
    {2, 2, 2, 1, 2, ONE_F_ONE_B, 1, 2, 1, 2, 1},
    {4, 1, 2, 1, 0, ONE_F_ONE_B, 1, 2, 1, 3, 1},
    {4, 1, 2, 1, 3, ONE_F_ONE_B, 1, 2, 1, 3, 1},
    {1, 2, 2, 2, 1, AFAB, 1, 0, 1, 32, 1},
    {1, 2, 1, 4, 2, INTERLEAVED, 2, 2, 2, 28, 1},
    // sums of a stage that are first whole when a row of micro-batches has passed all chunks
    {2, 1, 2, 2, 3, INTERLEAVED, 2, 0, 1, 32, 0},
    {2, 1, 2, 2, 3, INTERLEAVED, 4, 0, 1, 2, 0},
};
enum { ROWS = sizeof rows / sizeof *rows };
// A wide head's gradients are still in flight when backward has passed several blocks, and its logits make
// the last stage the fullest.
static const Row wide_head[] = {{8, 1, 1, 1, 0, ONE_F_ONE_B, 1, 0, 1, 1, 0},
                                {1, 1, 2, 4, 0, ONE_F_ONE_B, 1, 2, 1, 12, 0}};
enum { WIDE = sizeof wide_head / sizeof *wide_head, WIDE_VOCAB = 262144 };
// Each of many layers exposes its own all-to-alls, while it still hides more of the head's gradients.
static const Row many_layers[] = {{8, 1, 1, 1, 0, ONE_F_ONE_B, 1, 0, 1, 2, 4},
                                  {8, 1, 1, 1, 0, ONE_F_ONE_B, 1, 0, 1, 2, 8}};
enum { MANY = sizeof many_layers / sizeof *many_layers };

// 16 layers of Llama 3 8B, but for `shape`.
static Config config_of(const Row *r, const char *shape) {
    char *text = format_text("layers=16 seq=4096 dtype=bf16 optimizer=adamw %s", shape);
    Goal goal = {.model = config_of_model("llama-3-8b", text)};
    free(text);
    Found f = {.tp = r->tp,
               .cp = r->cp,
               .pp = r->pp,
               .dp = r->dp,
               .ep = r->ep ? r->ep : 1,
               .zero = r->zero,
               .schedule = r->schedule,
               .chunks = r->chunks,
               .recompute = r->recompute,
               .sp = r->tp > 1,
               .micro_batch = r->micro_batch,
               .micro_batches = r->micro_batches};
    goal.model.experts = r->ep ? EXPERTS : 0;
    return found_config(&goal, &f);
}

// What the rank that holds most has held.
static LoneMemory fullest_of(const Memory *memory, double kept, Group world) {
    const int64_t *peak = memory->peak;
    double most = comm_max((double)memory->peak_total, world);
    bool full = (double)memory->peak_total == most;
    double own = world.rank == world.size - (int)comm_max(full ? world.size - world.rank : 0, world);
    return (LoneMemory){.weights = comm_sum(own * (double)peak[MEMORY_PARAMETER], world),
                        .gradients = comm_sum(own * (double)peak[MEMORY_GRADIENT], world),
                        .optimizer = comm_sum(own * (double)peak[MEMORY_OPTIMIZER], world),
                        .kept = comm_sum(own * kept, world),
                        .peak = most};
}

// A layout as the search prices it: by closed forms, and clocked.
typedef struct Priced {
    double closed_step, closed_peak, step;
    LoneMemory memory;
} Priced;

static void beside(const Row *r, Priced priced, const StepCost *run, LoneMemory held) {
    LoneMemory memory = priced.memory;
    double closed_step = priced.closed_step / run->step_seconds - 1,
           closed_peak = priced.closed_peak / held.peak - 1;
    double step = priced.step / run->step_seconds - 1, peak = memory.peak / held.peak - 1,
           kept = memory.kept - held.kept;
    double states = memory.weights - held.weights + memory.gradients - held.gradients + memory.optimizer -
                    held.optimizer;
    say("  %3d %3d %3d %3d %2d %4d %4ld %4ld %9.2f ms %+6.1f%% %+6.1f%% %+7.2f%% %+8.2f%% %+7.0f B %+7.0f B",
        r->dp, r->cp, r->tp, r->pp, r->ep, r->zero, r->micro_batch, r->micro_batches,
        1e3 * run->step_seconds, 100 * closed_step, 100 * closed_peak, 100 * step, 100 * peak, kept, states);
    report_that(closed_step <= 0.06 && closed_step >= -0.3 && fabs(closed_peak) <= 0.02,
                "closed forms: step %+.1f%%, peak %+.1f%% off the dry run", 100 * closed_step,
                100 * closed_peak);
    report_that(
        fabs(step) <= 0.01 && fabs(peak) <= 0.005 && kept == 0 && states == 0,
        "dp %d, cp %d, tp %d, pp %d, zero %d: step %+.2f%%, peak %+.2f%%, kept %+.0f B, states %+.0f B off "
        "its dry run",
        r->dp, r->cp, r->tp, r->pp, r->zero, 100 * step, 100 * peak, kept, states);
}

// Full recomputation's share of the time, beside its share of FLOPs: collectives and the loss take time
// without FLOPs, and a step recomputes a fifth or a quarter.
static void beside_flops(const Config *c, const LoneParts *parts, double computed) {
    int64_t sequences = c->micro_batch * c->grad_acc * c->dp;
    double again = recompute_extra_flops(c, sequences), all = config_step_flops(c, sequences) + again;
    double share = lone_recomputes(c, parts) / computed;
    report_that(fabs(share - again / all) < 0.05,
                "recomputation takes %.1f%% of the time and %.1f%% of FLOPs", 100 * share,
                100 * again / all);
}

static Priced priced(const Config *c) {
    comm_stand_for_all(true);
    LoneParts parts = lone_parts(c);
    Priced p = {.closed_step = lone_time(c, &parts).step, .closed_peak = lone_memory(c, &parts).peak};
    LoneTime time = lone_step(c, &parts, lone_no_limits, &p.memory);
    p.step = time.step;
    // A stage that has little but a wide head recomputes less than the others.
    if (c->recompute == RECOMPUTE_FULL && c->vocab < WIDE_VOCAB && !c->experts)
        beside_flops(c, &parts, time.computed);
    comm_stand_for_all(false);
    return p;
}

static void compare(const Row *r, const char *shape) {
    Config c = config_of(r, shape);
    Priced search = comm_rank() == 0 ? priced(&c) : (Priced){0};
    Mesh mesh = mesh_new(layout_shape(&c));
    StepCost run = program_cost(&c, mesh, five_d_layouts());
    LoneMemory held = fullest_of(&run.memory, (double)run.counted.kept_bytes, mesh.world);
    if (comm_rank() == 0) beside(r, search, &run, held);
}

void agree(void) {
    CHECK(comm_ranks() == RANKS, "--agree runs on %d ranks, and there are %d: leave mpirun to it", RANKS,
          comm_ranks());
    device_dry_run(true);
    say("\n%d layouts beside their dry runs on %d ranks, 16 layers of Llama 3 8B:\n", ROWS, RANKS);
    say("  %56s %15s", "closed forms:", "clocked:");
    say("  %3s %3s %3s %3s %2s %4s %4s %4s %12s %7s %7s %8s %9s %9s %9s", "dp", "cp", "tp", "pp", "ep",
        "zero", "mbs", "m", "dry run", "step", "peak", "step", "peak", "kept", "states");
    for (int i = 0; i < ROWS; i++) compare(&rows[i], "vocab=32000");
    if (comm_rank() == 0) say("  the same with a vocabulary of 262,144 and h = 2048:\n");
    for (int i = 0; i < WIDE; i++)
        compare(&wide_head[i], "vocab=262144 hidden=2048 heads=16 kv-heads=16 ffn=8192");
    if (comm_rank() == 0) say("  the same with 48 layers of small experts, h = 1536:\n");
    for (int i = 0; i < MANY; i++)
        compare(&many_layers[i], "layers=48 seq=2048 vocab=32000 hidden=1536 heads=8 kv-heads=8 "
                                 "head-size=64 top-k=1 expert-ffn=1024");
}
