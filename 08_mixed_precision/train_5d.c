// train_5d.c: everything at once: data, pipeline, context, tensor and expert parallelism, ZeRO,
// recomputation. Playbook: "5D parallelism in a nutshell".
//
// Changes from 00_single_gpu: only what earlier chapters have shown. A layout is a list of the chapters'
// records (five_d_layouts.c); this file has no technique and sends nothing. What each flag shards (x):
//
//                          batch     sequence    layers    width     experts
//     --dp --zero 0…3        x                                              weights, gradients, state too
//     --cp --context                    x
//     --pp --schedule                               x
//     --tp --sp                      (x)                      x
//     --ep                                                               x
//
// It first prints a plan from a dry run: which rank has what, what each rank holds and sends in a step, and
// how long that takes on the model clock. Then follow the proof against one device, --shown steps of real
// text beside one device's, and one more step, whose counts must equal the plan's, rank by rank.
//
// Bytes sent, memory per rank: the sums of the records' closed forms.
// Run: build/08_mixed_precision/train_5d    (--no-check trains for real: held-out loss, sample …)
// Last line: PASS train_5d: all techniques together reproduce the single-device step …
#include <stdlib.h>

#include "five_d.h"

#ifndef NO_MAIN

static RankPlan *planned;

static void plan(Mesh mesh, const Config *config) {
    planned = five_d_plan(mesh, config, true);
    say("\nThe plan: what each rank has (E embedding, H head), holds at its peak, and sends in a step");
    five_d_plan_print(planned, mesh, config);
}

// ---- real text ----

enum { SHOWN = 5 };

// Trains --shown steps on these ranks and on one device, and prints some losses of both.
static void show_steps(Mesh mesh, const Config *config) {
    Config c = *config;
    c.steps = (int64_t)config_number(config, "shown");
    if (c.steps == 0) return;
    // A step whose gradients overflow is skipped, and could not be compared: the scale begins low, and stays.
    if (!config_given(&c, "scale")) config_set(&c, "scale", 1024);
    config_set(&c, "scale-interval", (double)c.steps + 1);
    Config whole = program_on_one_device(&c, mesh);
    Record run = program_record(&c, mesh, five_d_layouts(), false, true, "all ranks");
    whole.follows = &run;
    comm_one_works(true);
    if (mesh.world.rank == 0) {
        Record one = program_record(&whole, mesh_single(), five_d_one_device(), false, false, "one device");
        say("\n%ld step%s of %s        %d rank%-5s one device", c.steps, plural(c.steps),
            c.data ? c.data : "this book", mesh.world.size, plural(mesh.world.size));
        int64_t shown = c.steps < SHOWN ? c.steps : SHOWN;
        for (int64_t i = 0; i < shown; i++) {
            int64_t step = shown == 1 ? 0 : i * (c.steps - 1) / (shown - 1);
            say("  loss of step %-5lld %20.12f %14.12f", (long long)step + 1, run.loss[step],
                one.loss[step]);
        }
        bool quiet = report_quiet(true);
        Bound bound = train_bound_with(&whole, five_d_one_device(), false, &one);
        bound.steps = "--shown";
        report_compare(&run, &one, train_proof(&c), bound);
        report_quiet(quiet);
        record_free(&one);
    }
    comm_one_works(false);
    record_free(&run);
}

// ---- predicted beside measured ----

static void more(Mesh mesh, const Config *config) {
    show_steps(mesh, config);
    double start = wall_seconds();
    RankPlan *run = five_d_plan(mesh, config, false);
    double seconds = wall_seconds() - start;
    bool quiet = report_quiet(!config->verbose);
    five_d_plan_compare(planned, run, mesh, config);
    report_quiet(quiet);
    bool as_planned = report_holds() && !config->experts;  // experts: what is held depends on the data
    say("\nAn executed step (two steps and their set-up took %.2f s here)%s", seconds,
        as_planned ? ": each rank holds and sends what the plan says" : "");
    if (!as_planned || config->verbose) five_d_plan_print(run, mesh, config);
    free(run);
}

static const Option shown_option = {
    "shown", OPTION_INT, NULL,    "200",
    0,       1e6,        "steps", "steps on real text, shown beside those of one device; 0: none",
    false};

int main(int argc, char **argv) {
    const Program program = {
        .purpose = "5D parallelism: every technique of this book at once, on dense models and on experts.",
        .claim = "all techniques together reproduce the single-device step",
        .defaults =
            "layers=4 hidden=32 heads=4 kv-heads=2 ffn=64 seq=32 micro-batch=1 grad-acc=4 steps=3 "
            "dtype=f64 optimizer=adamw lr=0.001 clip=0.5 bucket-mb=0.1 dp=0 pp=2 tp=2 zero=1",
        .natural = 8,
        .baseline = five_d_one_device(),
        .techniques = five_d_layouts(),
        .option = five_d_options,
        .options = FIVE_D_OPTIONS,
        .plan = plan,
        .more = more,
        .more_option = &shown_option,
        .more_options = 1};
    int status = program_main(argc, argv, &program);
    free(planned);
    return status;
}
#endif
