// pipeline_program.c: what the programs of this chapter share: the proof, and what their schedule costs on
// the model clock. Playbook: "Pipeline Parallelism".
//
// Each schedule's program trains with it on p ranks, and on one device with the same micro-batches: class
// exact, no bit may differ, unless two copies of a weight add up or ranks share a sum. Then it counts: the
// micro-batches that a rank holds at once, against the schedule's; and the step on the model clock, against
// the schedule's own clock with the durations of this stage's passes. This file has no main.
#include <math.h>
#include <stdlib.h>

#include "pipeline.h"

// ---- what it costs ----

// Llama 3 8B's layers, one a stage of `stages`, and no vocabulary to speak of: equal stages.
static Config layers_of_8b(const Config *config, int stages, int micro_batches) {
    Config c = config_default(
        "hidden=4096 heads=32 kv-heads=8 ffn=14336 vocab=256 seq=4096 micro-batch=1 dtype=bf16");
    c.layers = stages;
    c.grad_acc = micro_batches;
    c.pp = config->pp;
    config_set(&c, "zero", 0);
    config_set(&c, "schedule", config_number(config, "schedule"));
    config_set(&c, "chunks", config_number(config, "chunks"));
    return c;
}

static double seconds_since(double *from) {
    double now = clock_model_now(), seconds = now - *from;
    *from = now;
    return seconds;
}

// F, B and W of one stage of a middle layer, and of a message to its neighbour, by the clock.
static Durations durations_of(const Trainer *t, int stages) {
    Model *m = t->model;
    const Pipeline *p = trainer_context(t, &pipeline);
    Chunk chunk = p->chunk[0];
    for (int i = 0; i < stages; i++)
        if (p->schedule.place[i] == m->mesh.pp.rank) chunk = p->chunk[i];
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

// One step's passes, dry, on the model clock: of all ranks the longest.
static double makespan_of(Trainer *t) {
    const Config *c = &t->config;
    const Sockets *on = &t->model->sockets;
    Batch batch = batch_new(t, 0);
    double *scale = host_alloc(c->grad_acc * sizeof *scale);
    for (int64_t i = 0; i < c->grad_acc; i++) scale[i] = 1;
    StepInput input = {c->grad_acc, c->micro_batch, batch.tokens, batch.targets, scale, NULL};
    comm_max(0, t->model->mesh.world);  // they start together
    double start = clock_model_now();
    on->schedule.run(on->schedule.context, t->model, &input);
    double seconds = comm_max(clock_model_now() - start, t->model->mesh.world);
    on->gradients.finish(on->gradients.context, t->model);
    free(scale);
    batch_free(&batch);
    return seconds;
}

// What a rank holds at once, in stages' micro-batches.
static void check_held(const Trainer *t) {
    const Pipeline *p = trainer_context(t, &pipeline);
    const Schedule *s = &p->schedule;
    Group pp = t->model->mesh.pp;
    RankCosts costs = schedule_costs(s, pp.rank);
    double expected = costs.held_to_b * s->stages / s->ranks;
    double off = comm_sum(fabs(expected - p->most_held) > 1e-9, t->model->mesh.world);
    report_that(off == 0,
                "%g ranks hold another number of micro-batches between F and B than the schedule says",
                off);
    report_equal("most micro-batches held at once", comm_max(expected, pp), comm_max(p->most_held, pp), "");
}

static void pipeline_costs(Mesh mesh, const Config *config) {
    int p = mesh.pp.size;
    if (p == 1 || mesh.world.size != p) return;
    device_dry_run(true);
    Schedule s = pipeline_schedule(config);
    Config c = layers_of_8b(config, s.stages, s.micro_batches);
    schedule_free(&s);
    clock_push("schedule");
    Trainer *t = trainer_new(&c, mesh, pipeline_layouts);
    Durations d = durations_of(t, (int)c.layers);
    const Pipeline *pipe = trainer_context(t, &pipeline);
    double measured = makespan_of(t), stages = (double)pipe->schedule.stages / p;
    // The schedule's durations are those of a p-th of the model.
    Durations of_rank = {d.F * stages, d.B * stages, d.W * stages, d.pair * stages, d.hop};
    ScheduleTimes times = schedule_times(&pipe->schedule, of_rank);
    double ideal = (double)c.grad_acc * (of_rank.F + of_rank.B + of_rank.W);
    say("\n%s on %d ranks, %ld micro-batches of 4,096 tokens, a layer of Llama 3 8B a stage, on the model "
        "clock of %s:\n",
        pipe->schedule.name, p, c.grad_acc, config->machine);
    say("  F %.3f ms, B %.3f ms, W %.3f ms a stage, a message %.3f ms\n", 1e3 * d.F, 1e3 * d.B, 1e3 * d.W,
        1e3 * d.hop);
    say("  %-28s %10.3f ms\n", "without a bubble", 1e3 * ideal);
    say("  %-28s %10.3f ms, bubble %5.1f%%\n", "by the schedule's own clock", 1e3 * times.makespan,
        100 * (times.makespan / ideal - 1));
    say("  %-28s %10.3f ms, bubble %5.1f%%\n", "run", 1e3 * measured, 100 * (measured / ideal - 1));
    report_number("schedule", "makespan, run", measured, "s");
    report_number("schedule", "makespan, by its own clock", times.makespan, "s");
    // An overlapped pair sends what its F has made before its BW is done, which the schedule's clock does
    // not know.
    ScheduleKind kind = (ScheduleKind)config_number(config, "schedule");
    bool pairs = kind == DUALPIPE || kind == DUALPIPE_V;
    report_that(measured < 1.05 * times.makespan && (pairs || measured > 0.95 * times.makespan),
                "the run takes %.3f ms, and its schedule says %.3f ms", 1e3 * measured,
                1e3 * times.makespan);
    check_held(t);
    schedule_times_free(&times, &pipe->schedule);
    trainer_free(t);
    clock_pop();
    device_dry_run(false);
}

// ---- the main of a schedule's program ----

// Sums run as on one device, unless two copies of a weight add up, or ranks share a sum.
static bool exact(const Config *c) {
    ScheduleKind kind = (ScheduleKind)config_number(c, "schedule");
    bool copies = c->tied || kind == DUALPIPE || kind == DUALPIPE_V;
    return c->dp == 1 && c->tp == 1 && !(copies && c->pp > 1);
}

int pipeline_program(int argc, char **argv, const char *purpose, const char *schedule) {
    char *defaults = format_text(
        "layers=9 hidden=24 heads=6 kv-heads=2 ffn=40 seq=15 micro-batch=1 grad-acc=8 steps=3 "
        "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 pp=0 schedule=%s",
        schedule);
    char *claim = format_text("stages on several ranks make the step of one device, by %s", schedule);
    const Program program = {.purpose = purpose,
                             .claim = claim,
                             .defaults = defaults,
                             .natural = 4,
                             .techniques = pipeline_layouts,
                             .option = tensor_layout_options,
                             .options = TENSOR_LAYOUT_OPTIONS,
                             .exact = exact,
                             .more = pipeline_costs};
    int status = program_main(argc, argv, &program);
    free(defaults);
    free(claim);
    return status;
}
