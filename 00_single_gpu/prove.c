// prove.c: what programs on many ranks share: a run on all ranks, held to the run on one device.
// Playbook: every chapter's "is it still the same training?"
//
// A program says how its ranks share the work (LayoutProgram: the plugs that fill the sockets); this file parses the
// flags, starts the ranks, trains with the plugs on all of them and without on one device (each rank on its own, with
// the whole batch), and compares losses, raw gradients and parameters. Twice: every token a label, and with ignored
// labels, where ranks have unequal counts. Sums run in another order than on one device: class reassociated. A program
// may name a twin, the same ranks by another road, whose very bits must come out: class exact.
//
// --save writes checkpoints of the first run, --resume begins every run with one; a checkpoint knows no layout, so that
// any program may go on with any other's (and `train` with it on one device). --dry-run counts and clocks one step, and
// computes none. This file has no main.
#include <stdlib.h>
#include <string.h>

#include "playbook.h"

// The same run as one device makes it.
static Config on_one_device(const Config *config, Mesh mesh) {
    Config whole = *config;
    whole.grad_acc *= mesh.dp.size;
    whole.dp = whole.tp = 1;
    whole.sp = whole.vocab_parallel = false;
    whole.zero = 0;
    whole.save = NULL;
    return whole;
}

Record layout_record(const Config *config, Mesh mesh, const LayoutProgram *program, bool masked,
                     const char *title) {
    Trainer *t = trainer_new(config, mesh);
    t->masked = masked;
    if (config->resume) trainer_resume(t);
    void *plugs = program ? program->plug(t) : NULL;
    Record record = train_record(t, title);
    if (program) {
        if (program->counts) program->counts(t, &record, plugs);
        program->unplug(t, plugs);
    }
    trainer_free(t);
    return record;
}

void layout_prove(const Config *config, Mesh mesh, const LayoutProgram *program, bool masked) {
    say("\n%s\n", masked ? "With ignored labels, so that ranks have unequal counts of them:"
                         : "Every token is a label:");
    Config own = *config;
    if (masked) own.save = NULL;
    char *title = format_text("%d ranks", mesh.world.size);
    Record record = layout_record(&own, mesh, program, masked, title);
    free(title);
    if (!config->no_check) {
        Config whole = on_one_device(config, mesh);
        Record baseline = layout_record(&whole, mesh_single(), NULL, masked, "one device");
        double bound = train_bound(&whole, masked, &baseline);
        if (program->twin) {
            Config same = *config;
            same.save = NULL;
            if (program->twin->check) program->twin->check(&same);
            Record twin = layout_record(&same, mesh, program->twin, masked, program->twin->claim);
            // A twin sums over ranks by other calls; NCCL promises them no common order (comm.h).
            bool exact = comm_sums_in_rank_order();
            report_compare(&record, &twin, exact ? PROOF_EXACT : PROOF_REASSOCIATED, exact ? 0 : bound);
            record_free(&twin);
        }
        report_compare(&record, &baseline, PROOF_REASSOCIATED, bound);
        record_free(&baseline);
    }
    record_free(&record);
}

StepCost layout_cost(const Config *config, Mesh mesh, const LayoutProgram *program) {
    Config among = *config;
    among.steps = 3;  // the step that counts is one among others: it also begins what the next one needs
    Trainer *t = trainer_new(&among, mesh);
    void *plugs = program->plug(t);
    train_step(t, NULL);  // the first step also allocates
    clock_reset();
    memory_reset_peak();
    double start = clock_model_now();
    train_step(t, NULL);
    StepCost cost = {.step_seconds = clock_model_now() - start,
                     .flops = clock_total().flops,
                     .comm = comm_total(),
                     .memory = memory_account()};
    program->unplug(t, plugs);
    trainer_free(t);
    return cost;
}

static void print_cost(const Config *config, const StepCost *cost) {
    say("a step takes %.3f ms on %s; communication takes %.3f ms of it, and %.3f ms are exposed; rank 0 "
        "sends %s\n",
        1e3 * cost->step_seconds, config->machine, 1e3 * cost->comm.model_seconds,
        1e3 * cost->comm.exposed_seconds, bytes_text((double)cost->comm.bytes));
    say("memory of rank 0 at its peak: %s\n", bytes_text((double)cost->memory.peak_total));
    report_number("dry run", "step, model clock", cost->step_seconds, "s");
    report_number("dry run", "exposed communication, model clock", cost->comm.exposed_seconds, "s");
    report_number("dry run", "bytes sent by rank 0", (double)cost->comm.bytes, "B");
    report_number("dry run", "peak memory of rank 0", (double)cost->memory.peak_total, "B");
}

int layout_program(int argc, char **argv, const LayoutProgram *program) {
    base_start(argc, argv);
    bool dry_run;
    Option own[] = {
        {"dry-run", OPTION_FLAG, &dry_run, NULL, 0, 0, "",
         "count and clock every operation and message, compute none: any size on any machine", false},
    };
    Config config =
        config_parse(argc, argv, program->purpose,
                     CONFIG_MODEL | CONFIG_BATCH | CONFIG_OPTIMIZER | CONFIG_RECOMPUTE | CONFIG_FILES |
                         CONFIG_REPORT | CONFIG_CHECK | CONFIG_RANKS | CONFIG_TIMELINE | CONFIG_LAYOUT,
                     program->defaults, own, sizeof own / sizeof *own);
    CHECK(!(config.resume && config.shape_given),
          "--resume takes the model's shape from the folder's config.json: leave out --model, --layers, "
          "--hidden, --heads, --kv-heads, --ffn, --vocab and --tied");
    CHECK(!config.init, "--init is train's; here --resume goes on with a checkpoint");
    CHECK(!(dry_run && (config.save || config.resume)), "--dry-run computes no weights to save or resume");
    comm_start(argc, argv, program->natural);
    if (config.save) checkpoint_check_place(config.save);
    // One checkpoint, also when --save writes newer ones beside it.
    char *from = config.resume ? checkpoint_newest(config.resume) : NULL;
    if (from) checkpoint_config(from, &config);
    config.resume = from;
    config_check(&config);
    config_check_layout(&config, comm_ranks());
    if (program->check) program->check(&config);
    if (config.resume) resume_check(&config, (int)config.dp);
    MeshShape shape = {.dp = (int)config.dp, .pp = 1, .cp = 1, .tp = (int)config.tp, .ep = 1};
    Mesh mesh = mesh_new(shape);
    report_json(config.json);
    timeline_start(&config, mesh.world);
    mesh_print(&mesh, shape);
    config_print(&config);
    if (dry_run) {
        device_dry_run(true);
        StepCost cost = layout_cost(&config, mesh, program);
        print_cost(&config, &cost);
    } else {
        layout_prove(&config, mesh, program, false);
        layout_prove(&config, mesh, program, true);
        config.save = config.resume = NULL;  // what else there is to show begins anew
        if (program->more) program->more(mesh, &config);
    }
    free(from);
    timeline_finish(&config, mesh.world);
    return comm_finish(report_verdict("%s", dry_run           ? "one step counted and clocked"
                                            : config.no_check ? "counts are as the formulas say"
                                                              : program->claim));
}
