// pipeline_program.c: what the programs of this chapter share: the proof, and what their schedule costs on
// the model clock. Playbook: "Pipeline Parallelism".
//
// Each schedule's program trains with it on p ranks, and on one device with the same micro-batches: class
// exact, no bit may differ, unless two copies of a weight are summed or ranks share a sum. Then it compares
// the micro-batches that a rank holds at once with the schedule's, and the time of the step on the model
// clock with pipeline_clock.c, given the durations of a stage's passes. This file has no main.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "pipeline.h"

// ---- what it costs ----

// Llama 3 8B's layers, one for each of `stages` stages, and a tiny vocabulary, so that stages are equal.
static Config layers_of_8b(const Config *config, int stages, int micro_batches) {
    Config c = config_of_model("llama-3-8b", "vocab=256 seq=4096 micro-batch=1 dtype=bf16");
    c.layers = stages;
    c.grad_acc = micro_batches;
    c.pp = config->pp;
    c.recompute = config->recompute;
    c.verbose = config->verbose;
    config_set(&c, "zero", 0);
    config_set(&c, "context", CONTEXT_METHODS);
    config_set(&c, "schedule", config_number(config, "schedule"));
    config_set(&c, "chunks", config_number(config, "chunks"));
    config_set_text(&c, "load", config_text(config, "load"));
    return c;
}

static double seconds_since(double *from) {
    double now = clock_model_now(), seconds = now - *from;
    *from = now;
    return seconds;
}

// By the model clock: F, B and W of a stage in the middle, and a message to a neighbour in the node.
static Durations durations_of(const Trainer *t) {
    Model *m = t->model;
    const Pipeline *p = trainer_context(t, &pipeline);
    Chunk chunk = p->chunk[0];
    for (int i = 0; i < p->schedule.stages; i++)
        if (schedule_has_stage(&p->schedule, m->mesh.pp.rank, i)) chunk = p->chunk[i];
    chunk.embedding = chunk.head = false;
    Batch batch = batch_new(t, 0);
    MicroBatch micro = micro_batch_new(m, 0, 1, batch.tokens, batch.targets, 1);
    micro.x = tensor_new(MEMORY_ACTIVATION, BF16, SHAPE(m->config.seq, m->config.hidden));
    double bytes = (double)tensor_bytes(micro.x), from = clock_model_now();
    model_begin_step(m, 2);
    chunk_forward(m, &micro, chunk);
    Durations d = {.F = seconds_since(&from)};
    tensor_free(&micro.x);
    micro.dx = tensor_new(MEMORY_ACTIVATION, BF16, SHAPE(m->config.seq, m->config.hidden));
    chunk_backward_input(m, &micro, chunk);
    d.B = seconds_since(&from);
    chunk_backward_weight(m, &micro, chunk);
    d.W = seconds_since(&from);
    d.pair = d.F + d.B + d.W;
    d.hop = clock_transfers_seconds((Traffic){1, bytes, 0}, (Traffic){0});
    micro_batch_free(m, &micro);
    batch_free(&batch);
    return d;
}

// One step's passes in a dry run on the model clock: the time of the slowest rank. All ranks compute as many
// FLOPs as one device: W computes nothing that B has computed, even where B recomputes activations.
static double makespan_of(Trainer *t) {
    const Config *c = &t->config;
    const Sockets *sockets = &t->model->sockets;
    Batch batch = batch_new(t, 0);
    double *scale = host_alloc(c->grad_acc * sizeof *scale);
    for (int64_t i = 0; i < c->grad_acc; i++) scale[i] = 1;
    StepInput input = {c->grad_acc, c->micro_batch, batch.tokens, batch.targets, scale, loss_new(), NULL};
    comm_max(0, t->model->mesh.world);  // they start together
    double start = clock_model_now(), flops = clock_total().flops;
    sockets->schedule.run(sockets->schedule.context, t->model, &input);
    double end = clock_model_now();
    flops = comm_sum(clock_total().flops - flops, t->model->mesh.world);
    bool quiet = report_quiet(!c->verbose);
    report_equal("FLOPs of a step, all ranks",
                 config_step_flops(c, c->grad_acc) + recompute_extra_flops(c, c->grad_acc), flops, "FLOP");
    report_quiet(quiet);
    double seconds = comm_max(end - start, t->model->mesh.world);
    sockets->gradients.finish(sockets->gradients.context, t->model);
    free(scale);
    tensor_free(&input.loss);
    batch_free(&batch);
    return seconds;
}

// How many passes, each of one stage and one micro-batch, a rank holds at once.
static void check_held(const Trainer *t) {
    const Pipeline *p = trainer_context(t, &pipeline);
    const Schedule *s = &p->schedule;
    Group pp = t->model->mesh.pp;
    RankCosts costs = schedule_costs(s, pp.rank);
    double expected = costs.held_to_b * s->stages / s->ranks;
    report_that(fabs(expected - p->most_held) <= 1e-9,
                "rank %d of pp holds %d passes between F and B, by its schedule %g", pp.rank, p->most_held,
                expected);
    report_equal("most passes held between F and B", comm_max(expected, pp), comm_max(p->most_held, pp),
                 "");
}

// The makespan by the schedule's own clock, whose durations are for a p-th of the model; d is for a stage.
static double clocked(const Schedule *s, Durations d) {
    double stages = (double)s->stages / s->ranks;
    Durations of_rank = {d.F * stages, d.B * stages, d.W * stages, d.pair * stages, d.hop};
    ScheduleTimes times = schedule_times(s, of_rank);
    double makespan = times.makespan;
    schedule_times_free(&times, s);
    return makespan;
}

static void say_makespan(const char *how, double makespan, double ideal) {
    say("  %-28s %10.3f ms, bubble %5.1f%%\n", how, 1e3 * makespan, 100 * (makespan / ideal - 1));
}

static void pipeline_costs(Mesh mesh, const Config *config) {
    int p = mesh.pp.size;
    if (p == 1 || mesh.world.size != p) return;
    device_dry_run(true);
    Schedule s = pipeline_schedule(config);
    Config c = layers_of_8b(config, s.stages, s.micro_batches);
    clock_push("schedule");
    Trainer *t = trainer_new(&c, mesh, pipeline_layouts);
    Durations d = durations_of(t);
    double stages = (double)s.stages / p, ideal = (double)c.grad_acc * stages * (d.F + d.B + d.W);
    double run = makespan_of(t), own = clocked(&s, d), bytes = 2.0 * (double)(c.seq * c.hidden);
    double in_line = pipeline_makespan(trainer_context(t, &pipeline), d, bytes);
    say("\n%s on %d rank%s, %ld micro-batch%s of 4,096 tokens, a layer of Llama 3 8B a stage, on the model "
        "clock of %s:\n",
        s.name, p, plural(p), c.grad_acc, c.grad_acc == 1 ? "" : "es", config->machine);
    say("  F %.3f ms, B %.3f ms, W %.3f ms a stage, a message %.3f ms\n", 1e3 * d.F, 1e3 * d.B, 1e3 * d.W,
        1e3 * d.hop);
    say("  %-28s %10.3f ms\n", "without a bubble", 1e3 * ideal);
    say_makespan("by the schedule's own clock", own, ideal);
    say_makespan("with messages that wait", in_line, ideal);
    say_makespan("run", run, ideal);
    report_number("schedule", "makespan, run", run, "s");
    report_number("schedule", "makespan, by its own clock", own, "s");
    // That clock takes every stage as a middle one: it models neither the two ends of the model nor sums of
    // gradients, including those of copies that no micro-batch passes.
    int used = 0;  // directions that micro-batches take, as bits
    for (int i = 0; i < s.micro_batches; i++) used |= 1 << s.direction[i];
    double slack = used != (1 << s.directions) - 1 ? 0.1 : 0.02;
    report_that(run >= (1 - 1e-9) * in_line && run < (1 + slack) * in_line,
                "the run takes %.3f ms, where its passes and messages take %.3f ms and all passes compute "
                "%.3f ms",
                1e3 * run, 1e3 * in_line, 1e3 * ideal);
    check_held(t);
    trainer_free(t);
    schedule_free(&s);
    clock_pop();
    device_dry_run(false);
}

// ---- the main of a schedule's program ----

// Whether every stage takes micro-batches in order: then losses and gradients add up as on one device.
static bool in_order(const Schedule *s) {
    bool ordered = true;
    int *weight = host_alloc(2 * (size_t)s->stages * sizeof *weight), *loss = weight + s->stages;
    for (int i = 0; i < 2 * s->stages; i++) weight[i] = -1;
    for (int rank = 0; rank < s->ranks; rank++)
        for (int i = 0; i < s->list[rank].count; i++)
            for (int j = 0; j < s->list[rank].action[i].passes; j++) {
                StagePass pass = s->list[rank].action[i].pass[j];
                if (pass.kind == PASS_B) continue;
                int *last = &(pass.kind == PASS_F ? loss : weight)[pass.stage];
                bool counts = pass.kind != PASS_F || pass.stage == s->stages - 1;
                ordered = ordered && (!counts || pass.micro_batch > *last);
                *last = pass.micro_batch;
            }
    free(weight);
    return ordered;
}

// Sums have the order of one device, unless two copies of a weight are summed, or ranks share a sum, or the
// schedule takes micro-batches out of order. If tied, one weight has the sums of two stages. ZeRO-2 sums each
// micro-batch by itself, then adds that to the earlier ones: in the embedding, contributions to a token's row
// are added in another order.
static bool exact(const Config *c) {
    Schedule s = pipeline_schedule(c);
    bool same = s.directions == 1 && !(c->tied && s.stages > 1) && in_order(&s);
    schedule_free(&s);
    bool by_itself = config_number(c, "zero") == 2 && c->grad_acc > 1;
    bool in_context = config_number(c, "context") != CONTEXT_METHODS;
    return same && !by_itself && !in_context && c->dp == 1 && c->tp == 1 && c->cp == 1;
}

// The preceding schedule is in no file, and has one stage per rank: --stage-layers is not for it if this one
// has more.
static void leave_out(Config *c) {
    const char *layers = config_text(c, "stage-layers");
    int64_t stages = 1;
    for (const char *at = layers; at && *at; at++) stages += *at == ',';
    if (stages != c->pp) config_set_text(c, "stage-layers", NULL);
    config_set_text(c, "load", NULL);
}

// Any of these programs runs any schedule: --schedule or --load says which.
static const char *shown(const Config *config) {
    static char name[sizeof((Schedule *)NULL)->name];
    Schedule s = pipeline_schedule(config);
    snprintf(name, sizeof name, "%s", s.name);
    schedule_free(&s);
    return name;
}

static void more(Mesh mesh, const Config *config) {
    pipeline_check_held_bytes(mesh, config);
    pipeline_costs(mesh, config);
    pipeline_across_nodes(mesh, config);
}

int pipeline_program(int argc, char **argv, const char *purpose, const char *schedule) {
    char *defaults = format_text(
        "layers=9 hidden=24 heads=6 kv-heads=2 ffn=40 seq=15 micro-batch=2 grad-acc=8 steps=3 "
        "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 pp=0 schedule=%s",
        schedule);
    bool is_1f1b = !strcmp(schedule, "one_f_one_b");
    Before before_it = {is_1f1b ? "afab" : "one_f_one_b", NULL, "schedule", is_1f1b ? AFAB : ONE_F_ONE_B};
    if (!strcmp(schedule, "afab")) before_it.name = NULL;
    const Option options[] = {
        zero_option,
        // In place of chapter 04's: without --context there is no context parallelism.
        {"context", OPTION_CHOICE, NULL, "none", 0, 0, "ring|zigzag|all-gather|ulysses|none",
         "how ranks of --cp bring keys and values together", false},
    };
    const Program program = {.purpose = purpose,
                             .claim = "stages on several ranks reproduce the single-device step",
                             .defaults = defaults,
                             .natural = 4,
                             .axis = AXIS_PP,
                             .techniques = pipeline_layouts,
                             .option = options,
                             .options = sizeof options / sizeof *options,
                             .before = before_it,
                             .leave_out = leave_out,
                             .shown = shown,
                             .exact = exact,
                             .more = more};
    int status = program_main(argc, argv, &program);
    free(defaults);
    return status;
}
