// harness.c: what every training program shares. Playbook: every chapter's "is it still the same training?"
//
// A program is a list of techniques and what it wants to show (Program). This file parses the flags, starts
// the ranks, trains with the techniques on all of them and without on one device (each rank on its own,
// with the whole batch), and compares losses, raw gradients and parameters. Twice: every token a label, and
// with ignored labels, where ranks have unequal counts. Sums run in another order than on one device: class
// reassociated. A program may name a twin, the same ranks by another road, whose very bits must come out:
// class exact. What ranks have sent and stored is held against the sum of the techniques' prices;
// activations at their peak against a dry run.
//
// --no-check trains for real instead (real_training.c). --save writes checkpoints of the first run, --init
// and
// --resume begin every run with one; a checkpoint knows no layout, so that any program may go on with any
// other's.
// --dry-run counts and clocks one step, and computes none. This file has no main.
#include "harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- one run, and what it counted ----

void counted_add(Counted *counted) {
    const CommCount *counts;
    counted->kinds = comm_counts(&counts);
    CHECK(counted->kinds <= MOST_CALLS, "more than %d kinds of calls are counted", MOST_CALLS);
    for (int i = 0; i < counted->kinds; i++) {
        counted->sent[i].name = counts[i].name;
        counted->sent[i].calls += counts[i].calls;
        counted->sent[i].bytes += counts[i].bytes;
    }
}

static void check_sent(const Trainer *t, const Price *price, const Counted *counted) {
    Group world = t->model->mesh.world;
    for (int i = 0; i < counted->kinds; i++) {
        const CommCount *measured = &counted->sent[i];
        // Looking at whole weights is a reduce and a broadcast, and saving them a barrier, which training
        // does not use.
        if (!strcmp(measured->name, "reduce") || !strcmp(measured->name, "broadcast") ||
            !strcmp(measured->name, "barrier"))
            continue;
        double calls = 0, bytes = 0;
        for (int j = 0; j < price->kinds; j++)
            if (!strcmp(price->sent[j].call, measured->name))
                calls = counted->steps * price->sent[j].calls,
                bytes = counted->steps * price->sent[j].bytes;
        if (comm_max(calls + (double)measured->calls, world) == 0) continue;
        double predicted = comm_sum(bytes, world), sent = comm_sum((double)measured->bytes, world);
        char *name = format_text("%s: calls of rank 0", measured->name);
        char *of_all = format_text("%s: bytes, all ranks", measured->name);
        report_equal(name, calls, (double)measured->calls, "");
        report_equal(of_all, predicted, sent, "B");
        free(name);
        free(of_all);
    }
}

static void check_memory(const Trainer *t, const Price *price, const Counted *counted) {
    const Model *m = t->model;
    const struct {
        const char *what;
        double predicted, measured;
    } row[] = {
        {"weights, all ranks", price_states(price, m, MEMORY_PARAMETER),
         (double)counted->memory.peak[MEMORY_PARAMETER]},
        {"gradients, all ranks", price_states(price, m, MEMORY_GRADIENT),
         (double)counted->memory.peak[MEMORY_GRADIENT]},
        {"optimizer, all ranks", price_states(price, m, MEMORY_OPTIMIZER),
         (double)counted->memory.peak[MEMORY_OPTIMIZER]},
        {"activations kept, all ranks", price_kept(price), (double)counted->kept_bytes},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++)
        if (comm_sum(isnan(row[i].predicted), m->mesh.world) == 0)  // a dry run holds the others
            report_equal(row[i].what, comm_sum(row[i].predicted, m->mesh.world),
                         comm_sum(row[i].measured, m->mesh.world), "B");
}

// Elements of this rank's part of a weight whose bits differ from those of the first copy.
static bool differs(const Params *params, const Param *param) {
    Tensor mine = param_own_value(params, param, NULL);
    if (!tensor_exists(mine)) return false;
    Tensor first = tensor_like(MEMORY_COMMUNICATION, mine);
    op_copy(first, mine);
    comm_wait(comm_broadcast(first, 0, param->copies));
    char *a = host_alloc((size_t)tensor_bytes(mine)), *b = host_alloc((size_t)tensor_bytes(mine));
    tensor_to_host(a, mine);
    tensor_to_host(b, first);
    bool differ = memcmp(a, b, (size_t)tensor_bytes(mine)) != 0;
    free(a);
    free(b);
    tensor_free(&first);
    return differ;
}

// Weights that several ranks hold have the same bits on each of them after training.
static void check_copies(const Model *m) {
    double copied = 0, off = 0;
    for (int i = 0; i < m->params.count; i++) {
        const Param *param = &m->params.param[i];
        if (!param->here || param->copies.size == 1) continue;
        bool differ = differs(&m->params, param);
        copied++;
        off += differ;
        report_that(!differ, "%s: the copy of rank %d has other bits than that of rank %d", param->name,
                    param->copies.member[param->copies.rank], param->copies.member[0]);
    }
    double all = comm_sum(copied, m->mesh.world);
    if (all > 0)
        report_equal("weights equal in all copies", all, comm_sum(copied - off, m->mesh.world), "");
}

void program_check_counts(const Trainer *t, const Counted *counted) {
    Price price = trainer_price(t);
    check_sent(t, &price, counted);
    check_memory(t, &price, counted);
    check_copies(t->model);
}

Record program_record(const Config *config, Mesh mesh, Techniques techniques, bool masked, bool check,
                      const char *title) {
    Trainer *t = trainer_new(config, mesh, techniques);
    t->masked = masked;
    trainer_load(t);
    Record record = train_record(t, title);
    Counted counted = {
        .steps = (double)record.steps, .memory = record.memory, .kept_bytes = record.kept_bytes};
    counted_add(&counted);
    if (check) program_check_counts(t, &counted);
    trainer_free(t);
    return record;
}

StepCost program_cost(const Config *config, Mesh mesh, Techniques techniques) {
    Config among = *config;
    among.steps = 3;  // the step that counts is one among others: it also begins what the next one needs
    among.save = NULL;
    Trainer *t = trainer_new(&among, mesh, techniques);
    train_step(t, NULL);  // the first step also allocates
    clock_reset();
    memory_reset_peak();
    double start = clock_model_now();
    train_step(t, NULL);
    StepCost cost = {.step_seconds = clock_model_now() - start,
                     .flops = clock_total().flops,
                     .comm = comm_total(),
                     .all_reduce = comm_count("all_reduce"),
                     .memory = memory_account()};
    trainer_free(t);
    return cost;
}

// ---- the proof ----

// The same run as one device makes it.
static Config on_one_device(const Config *config, Mesh mesh) {
    Config whole = *config;
    whole.grad_acc *= mesh.dp.size;
    whole.dp = whole.pp = whole.cp = whole.tp = whole.ep = 1;
    whole.save = NULL;
    return whole;
}

// What peaks depend on, a dry run knows: it allocates and frees in the same order.
// But not how many tokens the experts of a rank get: where other ranks have tokens, too, the data decides.
static void check_peak(const Config *config, Mesh mesh, Techniques techniques, const Record *record) {
    device_dry_run(true);
    clock_push("dry run");
    StepCost cost = program_cost(config, mesh, techniques);
    clock_pop();
    device_dry_run(false);
    static const MemoryKind kinds[] = {MEMORY_PARAMETER, MEMORY_GRADIENT, MEMORY_ACTIVATION};
    static const char *const names[] = {"weights", "gradients", "activations"};
    for (int i = 0; i < (mesh.ep.size > 1 ? 2 : 3); i++) {
        char *what = format_text("peak of %s, all ranks", names[i]);
        report_equal(what, comm_sum((double)cost.memory.peak[kinds[i]], mesh.world),
                     comm_sum((double)record->memory.peak[kinds[i]], mesh.world), "B");
        free(what);
    }
}

static void prove(const Config *config, Mesh mesh, Techniques techniques, Techniques alone,
                  const char *twin, Techniques twin_techniques, bool exact, bool masked) {
    say("\n%s\n", masked ? "With ignored labels, so that ranks have unequal counts of them:"
                         : "Every token is a label:");
    Config own = *config;
    if (masked) own.save = NULL;
    char *title = format_text("%d ranks", mesh.world.size);
    Record record = program_record(&own, mesh, techniques, masked, true, title);
    free(title);
    if (!masked) check_peak(config, mesh, techniques, &record);
    Config whole = on_one_device(config, mesh);
    Record baseline = program_record(&whole, mesh_single(), alone, masked, false, "one device");
    double bound = train_bound_with(&whole, alone, masked, &baseline);
    if (twin) {
        Config same = *config;
        same.save = NULL;
        Record other = program_record(&same, mesh, twin_techniques, masked, false, twin);
        // A twin sums over ranks by other calls; NCCL promises them no common order (comm.h).
        bool same_order = comm_sums_in_rank_order();
        report_compare(&record, &other, same_order ? PROOF_EXACT : PROOF_REASSOCIATED,
                       same_order ? 0 : bound);
        record_free(&other);
    }
    report_compare(&record, &baseline, exact ? PROOF_EXACT : PROOF_REASSOCIATED, exact ? 0 : bound);
    record_free(&baseline);
    record_free(&record);
}

void program_prove(const Config *config, Mesh mesh, Techniques techniques, const char *twin,
                   Techniques twin_techniques, bool exact, bool masked) {
    prove(config, mesh, techniques, NULL, twin, twin_techniques, exact, masked);
}

// ---- the program ----

static unsigned axes_of(const Program *program) {
    unsigned axes = 0;
    for (int i = 0; program->techniques[i]; i++) axes |= program->techniques[i]->axes;
    return axes;
}

// Flags that the program takes besides: its own, its techniques', and those of real training.
static int own_options(Option *own, const Program *program, bool *dry_run) {
    int count = 0;
    own[count++] = (Option){
        "dry-run", OPTION_FLAG,
        dry_run,   NULL,
        0,         0,
        "",        "count and clock every operation and message, compute none: any size on any machine",
        false};
    const Option real[] = {
        {"eval-every", OPTION_INT, NULL, "100", 0, 1e9, "steps",
         "held-out loss in between; 0: only before and after", false},
        {"sample", OPTION_INT, NULL, "240", 0, 1e6, "tokens", "length of the text written at the end",
         false},
        {"temperature", OPTION_REAL, NULL, "0.8", 0, 100, "", "of the sample; 0: the likeliest token",
         false},
    };
    for (size_t i = 0; i < sizeof real / sizeof *real; i++) own[count++] = real[i];
    for (int i = 0; i < program->options; i++) own[count++] = program->option[i];
    for (int i = 0; program->techniques[i]; i++)
        for (int j = 0; j < program->techniques[i]->options; j++) {
            const Option *option = &program->techniques[i]->option[j];
            int known = 0;
            while (known < count && strcmp(own[known].name, option->name) != 0) known++;
            if (known == count) own[count++] = *option;
        }
    return count;
}

static void check_techniques(const Config *config, const Program *program) {
    const struct {
        const char *flag;
        unsigned axis;
        int64_t degree;
    } axis[] = {{"dp", 1u << AXIS_DP, config->dp},
                {"pp", 1u << AXIS_PP, config->pp},
                {"cp", 1u << AXIS_CP, config->cp},
                {"tp", 1u << AXIS_TP, config->tp},
                {"ep", 1u << AXIS_EP, config->ep}};
    unsigned served = 0;
    for (int i = 0; program->techniques[i]; i++) {
        const Technique *technique = program->techniques[i];
        if (technique->on && !technique->on(config)) continue;
        served |= technique->axes;
        if (technique->check) technique->check(config);
    }
    CHECK(served || comm_ranks() == 1, "this program trains on one device: start one of it, and not %d",
          comm_ranks());
    for (size_t i = 0; i < sizeof axis / sizeof *axis; i++)
        CHECK(axis[i].degree == 1 || (served & axis[i].axis),
              "--%s %ld: no technique of this program shares work over it; --%s 1 would fit", axis[i].flag,
              axis[i].degree, axis[i].flag);
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

// Trains, proves or counts, as the flags ask. Returns the exit status.
static int run(Config *config, Mesh mesh, const Program *program, bool dry_run) {
    if (program->trains || (config->no_check && !dry_run))
        return train_for_real(config, mesh, program->techniques, program->baseline);
    if (dry_run) {
        StepCost cost = program_cost(config, mesh, program->techniques);
        print_cost(config, &cost);
        return report_verdict("one step counted and clocked");
    }
    for (int masked = 0; masked < 2; masked++)
        prove(config, mesh, program->techniques, program->baseline, program->twin, program->twin_techniques,
              program->exact && program->exact(config), masked);
    config->save = config->init = config->resume = NULL;  // what else there is to show begins anew
    if (program->more) program->more(mesh, config);
    return report_verdict("%s", program->claim);
}

int program_main(int argc, char **argv, const Program *program) {
    enum { MOST_OPTIONS = 32 };
    base_start(argc, argv);
    bool dry_run;
    Option own[MOST_OPTIONS];
    int options = own_options(own, program, &dry_run);
    unsigned groups =
        CONFIG_MODEL | CONFIG_BATCH | CONFIG_OPTIMIZER | CONFIG_RECOMPUTE | CONFIG_FILES | CONFIG_REPORT;
    unsigned axes = axes_of(program);
    for (int i = 0; program->techniques[i]; i++) groups |= program->techniques[i]->brings;
    if (!program->trains) groups |= CONFIG_CHECK | CONFIG_RANKS | CONFIG_TIMELINE;
    groups |= (axes & 1u << AXIS_DP ? CONFIG_DP : 0) | (axes & 1u << AXIS_PP ? CONFIG_PP : 0) |
              (axes & 1u << AXIS_CP ? CONFIG_CP : 0) | (axes & 1u << AXIS_TP ? CONFIG_TP : 0) |
              (axes & 1u << AXIS_EP ? CONFIG_EP : 0);
    Config config = config_parse(argc, argv, program->purpose, groups, program->defaults, own, options);
    CHECK(!((config.init || config.resume) && config.shape_given),
          "--init and --resume take the model's shape from the folder's config.json: leave out --model, "
          "--layers, --hidden, --heads, --kv-heads, --ffn, --vocab, --tied, --experts and --top-k");
    CHECK(!(dry_run && (config.save || config.resume || config.init)),
          "--dry-run computes no weights to save or begin with: leave out --save, --resume and --init");
    comm_start(argc, argv, program->natural);
    if (config.save) checkpoint_check_place(config.save);
    // One checkpoint, also when --save writes newer ones beside it.
    const char *folder = config.resume ? config.resume : config.init;
    char *from = folder ? checkpoint_newest(folder) : NULL;
    if (from) checkpoint_config(from, &config);
    if (config.resume) config.resume = from;
    else config.init = from;
    config_check(&config);
    config_check_degrees(&config, comm_ranks());
    check_techniques(&config, program);
    if (config.resume) resume_check(&config, (int)config.dp);
    MeshShape shape = {.dp = (int)config.dp,
                       .pp = (int)config.pp,
                       .cp = (int)config.cp,
                       .tp = (int)config.tp,
                       .ep = (int)config.ep};
    Mesh mesh = comm_ranks() > 1 || !program->trains ? mesh_new(shape) : mesh_single();
    report_json(config.json);
    if (program->trains && config.trace) clock_trace_start();
    if (!program->trains) {
        timeline_start(&config, mesh.world);
        mesh_print(&mesh, shape);
    }
    config_print(&config);
    device_dry_run(dry_run);
    int status = run(&config, mesh, program, dry_run);
    if (program->trains && config.trace) clock_trace_write(config.trace);
    if (!program->trains) timeline_finish(&config, mesh.world);
    free(from);
    return comm_finish(status);
}
