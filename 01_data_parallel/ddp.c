// ddp.c: what the four data-parallel programs share: the proof, and a step's cost on the model clock.
// Playbook: "Data Parallelism".
//
// Each program trains on all ranks, each rank a part of the batch, and on one device with the whole batch (rank by rank,
// each on its own), and compares losses, raw gradients and parameters: sums in another order, so class reassociated.
// Twice: every token a label, and with ignored labels, where ranks have unequal counts.
//
// Counted against the closed form: all-reduces, and bytes: the n ranks together send 2 (n - 1) K for each all-reduce of K
// bytes, whether n divides them or not. This file has no main.
#include <stdlib.h>

#include "playbook.h"

static Record train_on(const Config *config, Mesh mesh, const DdpProgram *program, Ddp *ddp, bool masked,
                       const char *title) {
    Trainer *t = trainer_new(config, mesh);
    t->masked = masked;
    if (program) program->plug(t->model, ddp);
    Record record = train_record(t, title);
    if (program) {
        // Beside the gradients, each step sums two numbers over the ranks: its labels and its loss.
        double n = mesh.dp.size, steps = (double)config->steps, syncs = (double)program->syncs(config);
        double gradients = (double)tensor_bytes(params_total_grad(&t->model->params));
        CommCount sent = comm_count("all_reduce");
        report_equal("all-reduces", steps * (syncs * (double)program->all_reduces(t->model, ddp) + 2),
                     (double)sent.calls, "");
        report_equal("bytes sent by all ranks",
                     steps * 2 * (n - 1) * (syncs * gradients + 2 * sizeof(double)),
                     comm_sum((double)sent.bytes, mesh.dp), "B");
        free(ddp->pending);
        ddp->pending = NULL;
    }
    trainer_free(t);
    return record;
}

static void prove(const Config *config, Mesh mesh, const DdpProgram *program, Ddp *ddp, bool masked) {
    say("\n%s\n", masked ? "With ignored labels, so that ranks have unequal counts of them:"
                         : "Every token is a label:");
    char *title = format_text("%d ranks", mesh.dp.size);
    Record record = train_on(config, mesh, program, ddp, masked, title);
    free(title);
    if (config->no_check) {
        record_free(&record);
        return;
    }
    Config whole = *config;
    whole.grad_acc *= mesh.dp.size;
    Record baseline = train_on(&whole, mesh_single(), NULL, NULL, masked, "one device");
    double bound = train_bound(&whole, masked, &baseline);
    report_compare(&record, &baseline, PROOF_REASSOCIATED, bound);
    record_free(&baseline);
    record_free(&record);
}

DdpCost ddp_cost(const Config *config, Mesh mesh, void (*plug)(Model *model, Ddp *ddp),
                 int64_t bucket_bytes) {
    Config among = *config;
    among.steps = 3;  // the step that counts is one among others: it also begins what the next one needs
    Trainer *t = trainer_new(&among, mesh);
    Ddp ddp = {.bucket_bytes = bucket_bytes};
    plug(t->model, &ddp);
    train_step(t, NULL);  // the first step also allocates
    clock_reset();
    double start = clock_model_now();
    train_step(t, NULL);
    CommCount sent = comm_count("all_reduce");
    DdpCost cost = {.step_seconds = clock_model_now() - start,
                    .exposed_seconds = sent.exposed_seconds,
                    .all_reduces = sent.calls,
                    .bytes = sent.bytes};
    free(ddp.pending);
    trainer_free(t);
    return cost;
}

int ddp_prove(int argc, char **argv, const DdpProgram *program) {
    base_start(argc, argv);
    double bucket_mb;
    bool dry_run;
    Option own[] = {
        {"bucket-mb", OPTION_REAL, &bucket_mb, "0.1", 1e-6, 1e6, "MB",
         "gradients sent at once; the field's default is 25", false},
        {"dry-run", OPTION_FLAG, &dry_run, NULL, 0, 0, "",
         "count and clock every operation and message, compute none: any size on any machine", false},
    };
    Config config = config_parse(
        argc, argv, program->purpose,
        CONFIG_MODEL | CONFIG_BATCH | CONFIG_OPTIMIZER | CONFIG_REPORT | CONFIG_CHECK | CONFIG_RANKS |
            CONFIG_TIMELINE,
        "layers=3 hidden=48 heads=6 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=2 steps=3 "
        "dtype=f64 optimizer=sgd lr=0.1 clip=0.5",
        own, sizeof own / sizeof *own);
    comm_start(argc, argv, 4);
    MeshShape shape = {.dp = comm_ranks()};
    Mesh mesh = mesh_new(shape);
    report_json(config.json);
    timeline_start(&config, mesh.world);
    mesh_print(&mesh, shape);
    config_print(&config);
    Ddp ddp = {.bucket_bytes = (int64_t)(1e6 * bucket_mb)};
    if (dry_run) {
        device_dry_run(true);
        DdpCost cost = ddp_cost(&config, mesh, program->plug, ddp.bucket_bytes);
        say("a step takes %.3f ms on %s, of which %.3f ms wait for gradients; %lld all-reduces, %s sent by "
            "rank 0\n",
            1e3 * cost.step_seconds, config.machine, 1e3 * cost.exposed_seconds,
            (long long)cost.all_reduces, bytes_text((double)cost.bytes));
    } else {
        prove(&config, mesh, program, &ddp, false);
        prove(&config, mesh, program, &ddp, true);
        if (program->more) program->more(mesh, &config);
    }
    timeline_finish(&config, mesh.world);
    return comm_finish(report_verdict("%s", dry_run || config.no_check
                                                ? "all-reduces and bytes are as the formulas say"
                                                : program->claim));
}
