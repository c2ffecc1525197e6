// expert_tables.c: what expert parallelism sends to whom, and what that costs. Playbook: "Expert
// parallelism".
//
// In a run, rows are counted from the routing tables; in a dry run, which routes nothing, every expert gets
// the same number. A router of zeros sends all tokens to the first experts: ranks that get no row still take
// part in every collective.
//
// This file has no main: expert_parallel.c runs it.
#include <stdlib.h>

#include "expert_parallel.h"

// ---- peaks, by the rows that have arrived ----

// A dry run with the counts of rows that `t` has read allocates as `t` did: its peak is the predicted one.
static void check_peak(const Trainer *t, const Config *config, Mesh mesh, Techniques techniques,
                       const Record *record) {
    bool was_dry = device_is_dry_run();
    const Moe *routed = trainer_context(t, &moe);
    device_dry_run(true);
    clock_push("peak");
    Trainer *dry = trainer_new(config, mesh, techniques);
    Moe *replayed = trainer_context(dry, &moe);
    Ledger own = replayed->ledger;
    replayed->ledger =
        (Ledger){.number = routed->ledger.number, .count = routed->ledger.count, .replay = true};
    memory_reset_peak();
    int64_t before = memory_account().now[MEMORY_ACTIVATION];
    for (int64_t step = 0; step < config->steps; step++) train_step(dry, NULL);
    double predicted = (double)(memory_account().peak[MEMORY_ACTIVATION] - before);
    report_that(replayed->ledger.next == replayed->ledger.count,
                "a dry run reads %lld of %lld counts of rows", (long long)replayed->ledger.next,
                (long long)replayed->ledger.count);
    replayed->ledger = own;
    trainer_free(dry);
    clock_pop();
    device_dry_run(was_dry);
    report_equal("peak of activations, all ranks", comm_sum(predicted, mesh.world),
                 comm_sum((double)record->memory.peak[MEMORY_ACTIVATION], mesh.world), "B");
}

// ---- who computed whose rows ----

// Prints who computed whose rows, in the group of rank 0, and how far the busiest rank is above the mean.
static void print_rows(const ExpertParallel *x) {
    int n = x->ep.size;
    double *rows = host_alloc(n * n * sizeof *rows), most = 0, all = 0;
    comm_values_of_all(x->to, n, rows, x->ep);
    for (int from = -1; from < n; from++) {  // first the heads of the columns
        char *line =
            from < 0 ? format_text("  experts of rank ") : format_text("  tokens of rank %d", from);
        for (int to = 0; to < n; to++) {
            char *more = format_text("%s %8.0f", line, from < 0 ? to : rows[from * n + to]);
            free(line);
            line = more;
        }
        say("%s", line);
        free(line);
    }
    for (int to = 0; to < n; to++) {
        double here = 0;
        for (int from = 0; from < n; from++) here += rows[from * n + to];
        most = here > most ? here : most;
        all += here;
    }
    say("  the busiest rank computes %.2f times the mean", most / (all / n));
    report_number("rows", "busiest rank of the mean", most / (all / n), "");
    free(rows);
}

// Trains config's steps, prints who computed whose rows, and checks what was sent and kept against the
// formulas. equal: routers begin with zeros, so that all tokens take the first experts.
static Record trained(const Config *config, Mesh mesh, Techniques techniques, bool equal) {
    Trainer *t = trainer_new(config, mesh, techniques);
    double *zeros = calloc((size_t)(config->experts * config->hidden), sizeof *zeros);
    CHECK(zeros, "out of host memory for a router");
    for (int64_t layer = 0; layer < config->layers && equal; layer++)
        param_set_value(&t->model->params, t->model->block[layer].router, zeros);
    free(zeros);
    Moe *routed = trainer_context(t, &moe);
    routed->ledger.keeps = mesh.world.size > 1;  // check_peak reads it
    Record record = train_record(t, mesh.world.size > 1 ? "several ranks" : "one device");
    Counted counted = {
        .steps = (double)record.steps, .memory = record.memory, .kept_bytes = record.kept_bytes};
    counted_add(&counted);
    bool quiet = report_quiet(!config->verbose);
    if (mesh.world.size > 1) program_check_counts(t, &counted);
    if (mesh.world.size > 1) check_peak(t, config, mesh, techniques, &record);
    report_quiet(quiet);
    const ExpertParallel *x = trainer_context(t, &expert_parallel);
    if (x) print_rows(x);
    trainer_free(t);
    return record;
}

void experts_all_alike(Mesh mesh, const Config *config, Techniques techniques) {
    Config c = *config;
    c.steps = 1;
    Config whole = program_on_one_device(&c, mesh);
    Record all = trained(&c, mesh, techniques, true),
           baseline = trained(&whole, mesh_single(), expert_baseline, true);
    bool quiet = report_quiet(!config->verbose);
    report_compare(&all, &baseline, PROOF_REASSOCIATED, bound_of(1e-10));
    report_quiet(quiet);
    record_free(&all);
    record_free(&baseline);
}

// ---- a block of Mixtral 8x7B, dry: equally many rows go to each expert ----

// What one more block adds to a step.
typedef struct BlockSends {
    double calls, bytes, seconds, step;
} BlockSends;

static BlockSends block_sends(Mesh mesh, Config c) {
    BlockSends model[2];
    for (int i = 0; i < 2; i++) {
        c.layers = i + 1;
        StepCost cost = program_cost(&c, mesh, expert_layouts());
        CommCount all_to_all = comm_count("all_to_all");
        model[i] = (BlockSends){(double)all_to_all.calls, (double)all_to_all.bytes,
                                all_to_all.model_seconds, cost.step_seconds};
    }
    return (BlockSends){model[1].calls - model[0].calls, model[1].bytes - model[0].bytes,
                        model[1].seconds - model[0].seconds, model[1].step - model[0].step};
}

static void mixtral_block(Mesh mesh, const Config *config) {
    int ep = mesh.ep.size;
    if (ep == 1 || 8 % ep || mesh.cp.size * mesh.tp.size > 1) return;
    Config c =
        config_of_model("mixtral-8x7b", "layers=1 seq=4096 dtype=bf16 micro-batch=1 grad-acc=1 steps=2");
    config_set(&c, "zero", 0);
    c.ep = ep;
    c.dp = mesh.dp.size;
    double away = (ep - 1.0) / ep, row = 2.0 * (double)c.hidden, rows = (double)(c.top_k * c.seq);
    double bytes = 0;  // the same by either link
    bool was_dry = device_is_dry_run();
    device_dry_run(true);
    clock_push("Mixtral 8x7B");
    say("\nA block of Mixtral 8x7B, %ld tokens a rank, ep %d, equally many rows to each expert:\n", c.seq,
        ep);
    say("  %-26s %14s %16s %12s", "", "all-to-alls", "all-to-all, ms", "block, ms");
    for (int apart = 0; apart < 2; apart++) {
        clock_set_nodes(apart ? 1 : mesh.world.size);
        BlockSends block = block_sends(mesh, c);
        const char *where = apart ? "one GPU per node, network" : "all in one node, NVLink";
        say("  %-26s %14.0f %16.3f %12.3f", where, block.calls, 1e3 * block.seconds, 1e3 * block.step);
        report_number(where, "seconds of a block's all-to-alls", block.seconds, "s");
        report_number(where, "seconds of a block", block.step, "s");
        bytes = block.bytes;
    }
    report_equal("k hidden states of a token, both ways, both passes; and counts",
                 4 * away * rows * row + 4 * away * (double)c.experts, bytes, "B");
    clock_set_nodes((int)config->gpus_per_node);
    clock_pop();
    device_dry_run(was_dry);
}

void expert_tables(Mesh mesh, const Config *config) {
    if (config_number(config, "proof-only")) return;
    Config c = *config;
    c.steps = 1;
    say("\nRows by the rank that has the token, and the rank whose experts it takes:\n");
    Record routed = trained(&c, mesh, expert_layouts(), false);
    record_free(&routed);
    mixtral_block(mesh, config);
    if (config->dtype != F64) return;
    say("\nThe same where all logits are equal, and every token takes the first %ld expert%s:\n", c.top_k,
        plural(c.top_k));
    experts_all_alike(mesh, config, expert_layouts());
}
