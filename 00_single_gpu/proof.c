// proof.c: a run with its techniques, the same on one device, and what is compared.
//
// Trains with the techniques on all ranks, and without them on one device (rank 0 alone, with the whole
// batch, for all ranks), and compares losses, raw gradients and parameters: once with every token a label,
// and once with ignored labels, so that ranks have unequal label counts. Sums run in another order than on
// one device, so the class is reassociated. A program may name a twin, other techniques on the same ranks
// that must give the same bits: class exact. What ranks sent and stored is compared with the sum of the
// techniques' prices, and the peak of activations with a dry run.
//
// This file has no main: harness.c calls it.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

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

// What was sent by one kind of call, beside what was predicted of this rank.
static void report_sent(const CommCount *measured, double calls, double bytes, Group world) {
    if (comm_max(calls + (double)measured->calls, world) == 0) return;
    double predicted = comm_sum(bytes, world), sent = comm_sum((double)measured->bytes, world);
    char *name = format_text("%s: calls of rank 0", measured->name);
    char *of_all = format_text("%s: bytes, all ranks", measured->name);
    report_equal(name, calls, (double)measured->calls, "");
    report_equal(of_all, predicted, sent, "B");
    free(name);
    free(of_all);
}

static void check_sent(const Trainer *t, const Price *price, const Counted *counted) {
    Group world = t->model->mesh.world;
    for (int i = 0; i < counted->kinds; i++) {
        const CommCount *measured = &counted->sent[i];
        if (!counted_in_steps(measured->name)) continue;
        double calls = 0, bytes = 0;
        for (int j = 0; j < price->kinds; j++)
            if (!strcmp(price->sent[j].call, measured->name))
                calls = counted->steps * price->sent[j].calls,
                bytes = counted->steps * price->sent[j].bytes;
        report_sent(measured, calls, bytes, world);
    }
}

// A recorded run also inspects whole weights, which takes other kinds of calls (counted_in_steps). A step
// makes none of these, and no price has any.
static void check_nothing_else_sent(const Counted *counted, Group world) {
    for (int i = 0; i < counted->kinds; i++)
        if (!counted_in_steps(counted->sent[i].name)) report_sent(&counted->sent[i], 0, 0, world);
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
        if (comm_sum(isnan(row[i].predicted), m->mesh.world) == 0)  // a dry run checks the others
            report_equal(row[i].what, comm_sum(row[i].predicted, m->mesh.world),
                         comm_sum(row[i].measured, m->mesh.world), "B");
}

// Whether the bits of this rank's part of a weight differ from the first copy's.
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

// After training, copies of a weight have the same bits on all ranks that hold one.
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

// What ranks split by samples, sequence or layers adds up to one device's FLOPs, and nothing is computed
// twice but what recomputation says. Tensor parallelism may pad and repeat, and expert parallelism sends rows
// to where the data says: of these nothing is asked. With documents, or where the data decides how many rows
// experts drop, the formula is an upper bound.
void program_check_flops(const Trainer *t, const Price *price, double flops) {
    const Config *c = &t->config;
    const Mesh *mesh = &t->model->mesh;
    if (mesh->tp.size > 1 || mesh->ep.size > 1) return;
    double one = config_step_flops(c, c->micro_batch * c->grad_acc) + price->again;
    double predicted = mesh->dp.size * one, counted = comm_sum(flops, mesh->world);
    if (config_document_end(c) < 0 && !price->peak_by_data)
        report_equal("FLOPs per step", predicted, counted, "FLOP");
    else
        report_that(counted <= predicted,
                    "the step takes more FLOPs, %.0f, than one of whole sequences with every row, %.0f",
                    counted, predicted);
}

// A step whose gradients overflow is skipped (fp16.c). The f64 run that sets the bound skips none, and at
// the limit of the format the sums of several ranks may overflow where one device's do not.
static void check_no_step_was_skipped(const Record *record, const Config *config) {
    for (int64_t i = 0; i < record->steps && !device_is_dry_run(); i++)
        CHECK(isfinite(record->grad_norm[i]),
              "with the loss scaled, the gradients of step %lld, which a proof compares, overflow %s: a "
              "smaller --scale would fit, or --dtype bf16",
              (long long)i + 1, dtype_name((DType)config->dtype));
}

// Trains and counts; *formula (may be NULL) is set to the price of rank 0.
static Record record_counted(const Config *config, Mesh mesh, Techniques techniques, bool masked,
                             bool check, const char *title, Counted *counted, Column *formula) {
    Trainer *t = trainer_new(config, mesh, techniques);
    t->masked = masked;
    trainer_load(t);
    Record record = train_record(t, title);
    check_no_step_was_skipped(&record, config);
    *counted =
        (Counted){.steps = (double)record.steps, .memory = record.memory, .kept_bytes = record.kept_bytes};
    counted_add(counted);
    Price price = trainer_price(t);
    if (check) {
        program_check_counts(t, counted);
        program_check_flops(t, &price, record.flops / (double)record.steps);
        underflow_tell(t);
    }
    counted->peak_by_data = price.peak_by_data;
    if (formula) *formula = column_of_price("formula", t, &price);
    trainer_free(t);
    return record;
}

Record program_record(const Config *config, Mesh mesh, Techniques techniques, bool masked, bool check,
                      const char *title) {
    Counted counted;
    bool quiet = report_quiet(!config->verbose);
    Record record = record_counted(config, mesh, techniques, masked, check, title, &counted, NULL);
    report_quiet(quiet);
    return record;
}

// *formula (may be NULL) is set to the price of rank 0, and then the counts are compared with it.
static StepCost cost_counted(const Config *config, Mesh mesh, Techniques techniques, Column *formula) {
    Config among = *config;
    among.steps = 3;  // the step that counts is the middle one: it also reads ahead for the next
    among.save = NULL;
    Trainer *t = trainer_new(&among, mesh, techniques);
    train_step(t, NULL);  // the first step also allocates
    clock_reset();
    memory_reset_peak();
    double start = clock_model_now();
    int64_t held = memory_account().now_total;
    train_step(t, NULL);
    StepCost cost = {.step_seconds = clock_model_now() - start,
                     .comm = comm_total(),
                     .all_reduce = comm_count("all_reduce"),
                     .counted = {.steps = 1, .kept_bytes = t->kept_bytes},
                     .memory = memory_account()};
    counted_add(&cost.counted);
    cost.counted.memory = cost.memory;
    Price price = trainer_price(t);
    // Only in a dry run: else the transport's own buffers grow with the largest message, which may depend
    // on the data.
    double kept = device_is_dry_run() ? comm_sum((double)(cost.memory.now_total - held), mesh.world) : 0;
    report_that(kept == 0, "a step ends with %.0f B more of device memory than it has begun with", kept);
    check_nothing_else_sent(&cost.counted, mesh.world);
    if (formula) {
        bool quiet = report_quiet(!config->verbose);
        *formula = column_of_price("formula", t, &price);
        check_sent(t, &price, &cost.counted);
        check_memory(t, &price, &cost.counted);
        report_quiet(quiet);
    }
    trainer_free(t);
    return cost;
}

StepCost program_cost(const Config *config, Mesh mesh, Techniques techniques) {
    return cost_counted(config, mesh, techniques, NULL);
}

// ---- the proof ----

Config program_on_one_device(const Config *config, Mesh mesh) {
    Config whole = *config;
    whole.grad_acc *= mesh.dp.size;
    whole.dp = whole.pp = whole.cp = whole.tp = whole.ep = 1;
    whole.save = NULL;
    return whole;
}

static StepCost dry_cost(const Config *config, Mesh mesh, Techniques techniques) {
    bool dry = device_is_dry_run();
    device_dry_run(true);
    clock_push("dry run");
    StepCost cost = program_cost(config, mesh, techniques);
    clock_pop();
    device_dry_run(dry);
    return cost;
}

// A dry run predicts the peaks, since it allocates and frees in the same order; except activations where
// their size depends on the data.
static void check_peak(Mesh mesh, const StepCost *cost, const Record *record, bool by_data) {
    static const MemoryKind kinds[] = {MEMORY_PARAMETER, MEMORY_GRADIENT, MEMORY_ACTIVATION};
    static const char *const names[] = {"weights", "gradients", "activations"};
    for (int i = 0; i < (by_data ? 2 : 3); i++) {
        char *what = format_text("peak of %s, all ranks", names[i]);
        report_equal(what, comm_sum((double)cost->memory.peak[kinds[i]], mesh.world),
                     comm_sum((double)record->memory.peak[kinds[i]], mesh.world), "B");
        free(what);
    }
}

// The columns to the left of this program's own: one device, and the preceding technique.
static int columns_before(Column *column, const Config *config, Mesh mesh, const Program *program) {
    Config whole = program_on_one_device(config, mesh), other = *config;
    // For a program of one device the baseline is the same device, only slower: a dry run, whose model may
    // be large, leaves out its column.
    int columns = 0;
    StepCost cost;
    if (program->natural > 1 || !device_is_dry_run()) {
        cost = dry_cost(&whole, mesh_single(), program->baseline);
        column[columns++] = column_of_cost("one device", &cost);
    }
    const Before *before = &program->before;
    if (!before->name) return columns;
    if (before->setting) config_set(&other, before->setting, before->value);
    if (program->leave_out) program->leave_out(&other);
    cost = dry_cost(&other, mesh, before->techniques ? before->techniques : program->techniques);
    column[columns++] = column_of_cost(before->name, &cost);
    return columns;
}

static const char *own_title(const Config *config, const Program *program) {
    return program->shown ? program->shown(config) : base_program();
}

// Runs to compare with are under a mark of their own: --timeline shows the last step that is under none.

// The same layout with other techniques, which must give the same bits.
static void compare_twin(const Config *config, Mesh mesh, const char *twin, Techniques techniques,
                         bool masked, const Record *record, Bound bound) {
    Config same = *config;
    same.save = NULL;
    clock_push(twin);
    Record other = program_record(&same, mesh, techniques, masked, false, twin);
    clock_pop();
    // A twin sums over ranks with other calls, and NCCL does not promise the same order for them (comm.h).
    bool same_order = comm_sums_in_rank_order();
    report_compare(record, &other, same_order ? PROOF_EXACT : train_proof(config), bound);
    record_free(&other);
}

// The run on one device, and how close to it this layout must come. Rank 0 runs it for all, since repeating
// it on every rank would only compete for the cores.
static Record one_device(const Config *whole, Mesh mesh, Techniques alone, bool masked, Bound *bound) {
    Record record = {0};
    *bound = bound_of(0);
    comm_one_works(true);
    if (mesh.world.rank == 0) {
        clock_push("one device");
        record = program_record(whole, mesh_single(), alone, masked, false, "one device");
        *bound = train_bound_with(whole, alone, masked, &record);
        clock_pop();
    }
    comm_one_works(false);
    bound->gradients = comm_sum(bound->gradients, mesh.world);
    bound->others = comm_sum(bound->others, mesh.world);
    record_share(&record, 0, mesh.world);
    return record;
}

// `program` (may be NULL) gives the lesson's columns; without it, only the proof is shown.
static void prove(const Config *config, Mesh mesh, Techniques techniques, Techniques alone,
                  const char *twin, Techniques twin_techniques, bool exact, bool masked,
                  const Program *program) {
    if (config->verbose)
        say("\n%s\n", masked ? "With ignored labels, so that ranks have unequal counts of them:"
                             : "Every token is a label:");
    bool quiet = report_quiet(!config->verbose);
    Config own = *config;
    if (masked) own.save = NULL;
    char *title = format_text("%d rank%s%s", mesh.world.size, plural(mesh.world.size),
                              masked ? " with ignored labels" : "");
    Column column[4], formula;
    Counted counted;
    Record record = record_counted(&own, mesh, techniques, masked, true, title, &counted, &formula);
    free(title);
    StepCost cost = {0};
    if (!masked) {
        cost = dry_cost(config, mesh, techniques);
        check_peak(mesh, &cost, &record, counted.peak_by_data);
    }
    Config whole = program_on_one_device(config, mesh);
    whole.follows = &record;
    Bound bound;
    Record baseline = one_device(&whole, mesh, alone, masked, &bound);
    if (program) {
        int columns = columns_before(column, config, mesh, program);
        column[columns++] = column_of_run(own_title(config, program), &counted, &cost);
        column[columns++] = formula;
        lesson_print(config, column, columns);
        lesson_print_losses(&record, &baseline);
    }
    if (twin) compare_twin(config, mesh, twin, twin_techniques, masked, &record, bound);
    report_compare(&record, &baseline, exact ? PROOF_EXACT : train_proof(config), bound);
    record_free(&baseline);
    record_free(&record);
    report_quiet(quiet);
}

void program_prove(const Config *config, Mesh mesh, Techniques techniques, const char *twin,
                   Techniques twin_techniques, bool exact, bool masked) {
    prove(config, mesh, techniques, NULL, twin, twin_techniques, exact, masked, NULL);
    if (!config->verbose && report_holds())
        say("  %s%s%s, and every count as predicted",
            exact ? "the single-device step, bit for bit" : "the single-device step",
            twin ? ", the same bits as " : "", twin ? twin : "");
}

StepCost program_show_dry(const Config *config, Mesh mesh, const Program *program) {
    Column column[4], formula;
    int columns = columns_before(column, config, mesh, program);
    StepCost cost = cost_counted(config, mesh, program->techniques, &formula);
    column[columns++] = column_of_cost(own_title(config, program), &cost);
    column[columns++] = formula;
    lesson_print(config, column, columns);
    return cost;
}

void program_show(const Config *config, Mesh mesh, const Program *program) {
    for (int masked = 0; masked < 2; masked++)
        prove(config, mesh, program->techniques, program->baseline, program->twin,
              program->twin_techniques, program->exact && program->exact(config), masked,
              masked ? NULL : program);
    const char *twin = program->twin && comm_sums_in_rank_order() ? program->twin : NULL;
    if (report_holds())
        say("\nProof against one device%s%s, also with ignored labels:\n  %s%s",
            twin ? ", bit for bit against " : "", twin ? twin : "", report_evidence(),
            config->verbose ? "" : " (rows: --verbose)");
}
