// schedule.c: which rank does what, in which order: any pipeline's schedule as data. Playbook: "Pipeline
// Parallelism".
//
// Changes from 00_single_gpu: nothing is trained here. A step of m micro-batches over the stages of a model
// is split into passes F, B and W of one stage and one micro-batch (schedule.h), and a schedule is a list of
// them for each rank. Everything else follows from the lists: schedule_verify.c finds out whether they can
// run, and what each rank holds and sends; schedule_clock.c how long they take; schedule_picture.c draws
// them. The same lists drive the real training.
//
//     rank 0 |F0F1F2F3......D0--D1--D2--D3--|    D = BW, the whole backward
//     rank 1 |..F0F1F2F3D0--D1--D2--D3--....|    dots: the bubble
//
// The files of the schedules, in the order in which to read them: afab.c, one_f_one_b.c, interleaved.c,
// zero_bubble.c, zero_bubble_v.c, zero_bubble_auto.c, dualpipe.c, dualpipe_v.c. Each is one function that
// fills the lists, in a file that names its source.
// Run: build/05_pipeline_parallel/schedule --schedule one_f_one_b --stages 4 --micro-batches 8
//      without --schedule: the table of all of them, checked against closed formulas
// Last line: PASS schedule: every schedule is sound, and costs what its formula says …
#include "schedule.h"

#include <stdlib.h>
#include <string.h>

#include "report/report.h"

// ---- the data ----

Schedule schedule_new(const char *name, int ranks, int micro_batches, int stages, int directions) {
    CHECK(
        ranks >= 1 && ranks <= RANKS_MOST && micro_batches >= 1 && micro_batches <= MICRO_BATCHES_MOST &&
            stages >= 1 && stages <= STAGES_MOST && directions >= 1 && directions <= DIRECTIONS_MOST,
        "schedule %s: %d ranks, %d micro-batches, %d stages and %d directions, of which there are 1 to %d, "
        "%d, %d and %d",
        name, ranks, micro_batches, stages, directions, RANKS_MOST, MICRO_BATCHES_MOST, STAGES_MOST,
        DIRECTIONS_MOST);
    Schedule s = {
        .ranks = ranks, .micro_batches = micro_batches, .stages = stages, .directions = directions};
    snprintf(s.name, sizeof s.name, "%s", name);
    s.place = host_alloc(sizeof(int) * (size_t)(directions * stages));
    s.direction = host_alloc(sizeof(int) * (size_t)micro_batches);
    s.list = host_alloc(sizeof *s.list * (size_t)ranks);
    for (int k = 0; k < directions * stages; k++) s.place[k] = k % stages % ranks;
    memset(s.direction, 0, sizeof(int) * (size_t)micro_batches);
    memset(s.list, 0, sizeof *s.list * (size_t)ranks);
    return s;
}

void schedule_free(Schedule *s) {
    for (int r = 0; r < s->ranks; r++) free(s->list[r].action);
    free(s->place);
    free(s->direction);
    free(s->list);
    *s = (Schedule){0};
}

void schedule_append(Schedule *s, int rank, Action action) {
    CHECK(rank >= 0 && rank < s->ranks, "schedule %s: there is no rank %d of %d", s->name, rank, s->ranks);
    ActionList *list = &s->list[rank];
    if (list->count == list->room) {
        list->room = list->room ? 2 * list->room : 16;
        list->action = realloc(list->action, sizeof action * (size_t)list->room);
        CHECK(list->action, "out of host memory for a schedule");
    }
    list->action[list->count++] = action;
}

static bool exists(const Schedule *s, int micro_batch) {
    return micro_batch >= 0 && micro_batch < s->micro_batches;
}

void schedule_add(Schedule *s, int rank, PassKind kind, int stage, int i) {
    if (exists(s, i)) schedule_append(s, rank, (Action){1, {{kind, stage, i, s->direction[i]}}});
}

void schedule_add_pair(Schedule *s, int rank, int f_stage, int f, int b_stage, int b) {
    if (exists(s, f) && exists(s, b))
        schedule_append(
            s, rank,
            (Action){2, {{PASS_F, f_stage, f, s->direction[f]}, {PASS_BW, b_stage, b, s->direction[b]}}});
    else {
        schedule_add(s, rank, PASS_F, f_stage, f);
        schedule_add(s, rank, PASS_BW, b_stage, b);
    }
}

// ---- which pass needs which ----

int schedule_rank(const Schedule *s, StagePass pass) {
    return s->place[pass.direction * s->stages + pass.stage];
}

bool schedule_has_stage(const Schedule *s, int rank, int stage) {
    bool has = false;
    for (int d = 0; d < s->directions; d++) has = has || s->place[d * s->stages + stage] == rank;
    return has;
}

bool schedule_needs(const Schedule *s, StagePass pass, StagePass *needed) {
    *needed = pass;
    switch (pass.kind) {
        case PASS_F:
            needed->stage--;
            return pass.stage > 0;
        case PASS_B:
        case PASS_BW:
            // The last stage has the loss, and begins the backward from its own forward.
            needed->kind = pass.stage == s->stages - 1 ? PASS_F : PASS_B;
            needed->stage += needed->kind == PASS_B;
            return true;
        case PASS_W:
            needed->kind = PASS_B;
    }
    return true;
}

// The rank of a neighbouring stage, if it is a different one.
static int other_rank(const Schedule *s, StagePass pass, int stage) {
    StagePass neighbour = pass;
    neighbour.stage = stage;
    if (pass.kind == PASS_W || stage < 0 || stage == s->stages) return NO_RANK;
    return schedule_rank(s, neighbour) == schedule_rank(s, pass) ? NO_RANK : schedule_rank(s, neighbour);
}

int schedule_receives_from(const Schedule *s, StagePass pass) {
    return other_rank(s, pass, pass.kind == PASS_F ? pass.stage - 1 : pass.stage + 1);
}

int schedule_sends_to(const Schedule *s, StagePass pass) {
    return other_rank(s, pass, pass.kind == PASS_F ? pass.stage + 1 : pass.stage - 1);
}

const char *schedule_action_text(Action action) {
    static const char *const kind[] = {[PASS_F] = "F", [PASS_B] = "B", [PASS_W] = "W", [PASS_BW] = "BW"};
    static char text[4][80];
    static int turn;
    char *to = text[turn = (turn + 1) % 4];
    for (int i = 0, used = 0; i < action.passes; i++) {
        StagePass p = action.pass[i];
        used += snprintf(to + used, sizeof text[0] - (size_t)used, "%s%s%d.%d.%d", i ? "+" : "",
                         kind[p.kind], p.stage, p.micro_batch, p.direction);
    }
    return to;
}

// ---- the lists in motion ----

size_t schedule_slot(const Schedule *s, StagePass pass) {
    size_t row = pass.kind == PASS_F ? 0 : pass.kind == PASS_W ? 2 : 1;
    return (row * (size_t)s->stages + (size_t)pass.stage) * (size_t)s->micro_batches +
           (size_t)pass.micro_batch;
}

size_t schedule_slots(const Schedule *s) { return 3 * (size_t)s->stages * (size_t)s->micro_batches; }

ScheduleWalk schedule_walk(const Schedule *s) {
    ScheduleWalk walk = {.schedule = s,
                         .at = host_alloc(sizeof(int) * (size_t)s->ranks),
                         .done = host_alloc(schedule_slots(s))};
    memset(walk.at, 0, sizeof(int) * (size_t)s->ranks);
    memset(walk.done, 0, schedule_slots(s));
    return walk;
}

static bool can_run(const ScheduleWalk *walk, const Action *action) {
    StagePass needed;
    for (int i = 0; i < action->passes; i++) {
        bool needs = schedule_needs(walk->schedule, action->pass[i], &needed);
        if (needs && !walk->done[schedule_slot(walk->schedule, needed)]) return false;
    }
    return true;
}

bool schedule_walk_next(ScheduleWalk *walk) {
    const Schedule *s = walk->schedule;
    for (int tried = 0; tried < s->ranks; tried++) {
        const ActionList *list = &s->list[walk->rank];
        int position = walk->at[walk->rank];
        if (position < list->count && can_run(walk, &list->action[position])) {
            const Action *action = &list->action[position];
            for (int i = 0; i < action->passes; i++) walk->done[schedule_slot(s, action->pass[i])] = true;
            walk->position = walk->at[walk->rank]++;
            return true;
        }
        walk->rank = (walk->rank + 1) % s->ranks;
    }
    return false;
}

void schedule_walk_end(ScheduleWalk *walk) {
    free(walk->at);
    free(walk->done);
}

#ifndef NO_MAIN

// ---- the program ----

static void show_costs(const Schedule *s, const ScheduleTimes *times) {
    say("         held F to B  held F to W  weights  activations sent  gradients sent  idle");
    for (int r = 0; r < s->ranks; r++) {
        RankCosts costs = schedule_costs(s, r);
        say("rank %-3d %11.4g  %11.4g  %7.4g  %16d  %14d  %.4g", r, costs.held_to_b, costs.held_to_w,
            costs.weights, costs.activations, costs.gradients, times->idle[r]);
    }
}

static void show_queues(const Schedule *s) {
    ScheduleFault fault;
    bool pair = schedule_message_order(s, QUEUE_PAIR, &fault);
    say("with one queue for each pair of ranks: %s", pair ? "messages arrive in order" : fault.sentence);
    bool kind = schedule_message_order(s, QUEUE_PAIR_AND_KIND, &fault);
    say("with two, for activations and gradients: %s", kind ? "messages arrive in order" : fault.sentence);
    report_that(kind, "%s", fault.sentence);
}

static int show(const Schedule *s, Durations d, const char *svg) {
    ScheduleFault fault;
    if (!report_that(schedule_verify(s, &fault), "%s: %s", s->name, fault.sentence))
        return report_verdict("%s", s->name);
    ScheduleTimes times = schedule_times(s, d);
    double period_bubble, period = schedule_period(s, d, &period_bubble);
    double work = s->micro_batches * (d.F + d.B + d.W);
    char *letters = schedule_letters(s, &times, terminal_columns());
    char *title =
        format_text("%s: %d rank%s, %d micro-batch%s, %d stage%s", s->name, s->ranks, plural(s->ranks),
                    s->micro_batches, s->micro_batches == 1 ? "" : "es", s->stages, plural(s->stages));
    if (svg && base_rank() == 0) schedule_svg(s, &times, title, svg);
    say("%s; F %g, B %g, W %g, F+BW %g, hop %g", title, d.F, d.B, d.W, d.pair, d.hop);
    say("%s", letters);
    say("F2 forward of micro-batch 2 (numbered where it fits), B backward for inputs, "
        "W for weights, D both");
    say("- a pass goes on; small letters: other stages of a rank; dots: bubble");
    say("makespan %.6g = work %.6g + bubble %.6g (%.4g%% of the work)", times.makespan, work, times.bubble,
        100 * times.bubble / work);
    say("period   %.6g = work %.6g + bubble %.6g, if steps follow each other without a barrier", period,
        work, period_bubble);
    show_costs(s, &times);
    show_queues(s);
    report_number(s->name, "makespan", times.makespan, "");
    report_number(s->name, "bubble", times.bubble, "");
    report_number(s->name, "period_bubble", period_bubble, "");
    report_number(s->name, "held_to_w", schedule_most(s).held_to_w, "micro-batches");
    double bubble = times.bubble, held = schedule_most(s).held_to_w;
    int status =
        report_verdict("%s is sound: bubble of a step %.6g, of a period %.6g; %.4g micro-batch%s held",
                       s->name, bubble, period_bubble, held, held > 1 ? "es" : "");
    schedule_times_free(&times, s);
    free(letters);
    free(title);
    return status;
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    int kind = 0;
    int64_t stages, micro_batches, chunks, group, limit;
    Durations d;
    bool split, dump;
    const char *svg = NULL, *file = NULL, *json = NULL;
    Option table[] = {
        {"schedule", OPTION_CHOICE, &kind, NULL, 0, 0, SCHEDULE_NAMES,
         "the schedule to show; without it, a table of all", false},
        {"stages", OPTION_INT, &stages, "4", 1, RANKS_MOST, "ranks", "length of the pipeline, p", false},
        {"micro-batches", OPTION_INT, &micro_batches, "8", 1, 1024, "", "micro-batches per step, m", false},
        {"chunks", OPTION_INT, &chunks, "2", 1, 16, "stages", "stages per rank, v, with interleaved",
         false},
        {"group", OPTION_INT, &group, "0", 0, 1024, "micro-batches",
         "with interleaved: how many go through one chunk before the next chunk's turn; as many as "
         "--stages (or 0): depth-first; as many as --micro-batches: breadth-first",
         false},
        {"split", OPTION_FLAG, &split, NULL, 0, 0, "", "one_f_one_b with B and W in place of BW", false},
        {"memory-limit", OPTION_INT, &limit, "0", 0, 4096, "micro-batches",
         "the most that a rank of zb_auto may hold; 0: as many as --stages", false},
        {"forward", OPTION_REAL, &d.F, "10", 0, 1e9, "", "time of F on 1/p of the model", false},
        {"backward", OPTION_REAL, &d.B, "12", 0, 1e9, "", "time of B, backward for the inputs", false},
        {"weight", OPTION_REAL, &d.W, "8", 0, 1e9, "", "time of W, backward for the weights", false},
        {"pair", OPTION_REAL, &d.pair, "0", 0, 1e9, "", "time of an overlapped F+BW; 0: F + B + W", false},
        {"hop", OPTION_REAL, &d.hop, "0", 0, 1e9, "", "time of a message between ranks", false},
        {"svg", OPTION_OUTPUT, &svg, NULL, 0, 0, "FILE", "write the picture", false},
        {"dump", OPTION_FLAG, &dump, NULL, 0, 0, "", "print the schedule as text, and nothing else", false},
        {"load", OPTION_TEXT, &file, NULL, 0, 0, "FILE",
         "a schedule as --dump prints it, in place of --schedule", false},
        {"json", OPTION_OUTPUT, &json, NULL, 0, 0, "FILE", "write every figure at full precision", false},
    };
    int count = sizeof table / sizeof *table;
    options_parse(
        argc, argv,
        "Schedules of a pipeline: drawn, verified and timed.\n"
        "  schedule\n"
        "  schedule --schedule interleaved --stages 4 --micro-batches 8 --chunks 2 --svg interleaved.svg\n"
        "  schedule --schedule dualpipe --stages 4 --micro-batches 8 --dump > mine; schedule --load mine",
        table, count);
    bool chosen = option_given(table, count, "schedule");
    CHECK(!chosen || !file, "--schedule and --load are two schedules: give one of them");
    CHECK(chosen || file || (!svg && !dump), "--%s needs a schedule: --schedule or --load",
          svg ? "svg" : "dump");
    if (!chosen)
        options_need(table, count, "stages micro-batches chunks group split memory-limit", "--schedule");
    if (kind != INTERLEAVED) options_need(table, count, "chunks group", "--schedule interleaved");
    if (kind != ONE_F_ONE_B) options_need(table, count, "split", "--schedule one_f_one_b");
    if (kind != ZB_AUTO) options_need(table, count, "memory-limit", "--schedule zb_auto");
    // What a dump leaves out; zb_auto's order follows from the times.
    const char *shown =
        chosen && kind == ZB_AUTO ? "svg json" : "svg json forward backward weight pair hop";
    const char *unread = dump ? option_given(table, count, shown) : NULL;
    CHECK(!unread, "--dump prints the order of the passes, and nothing else: leave out --%s", unread);
    CHECK(d.F + d.B + d.W > 0, "--forward, --backward and --weight are all 0: one of them must take time");
    if (d.pair <= 0) d.pair = d.F + d.B + d.W;
    report_json(json);
    if (!chosen && !file) return schedule_table(d);
    ScheduleWish wish = {(int)stages, (int)micro_batches, (int)chunks, (int)group, split, (int)limit, d};
    Schedule s = file ? schedule_load(file) : schedule_make((ScheduleKind)kind, &wish);
    int status = STATUS_PASS;
    if (dump) {
        if (base_rank() == 0) schedule_write(&s, stdout);
    } else {
        status = show(&s, d, svg);
    }
    schedule_free(&s);
    return status;
}

#endif
