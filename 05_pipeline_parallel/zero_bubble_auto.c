// zero_bubble_auto.c: a greedy scheduler for given times of F, B, W and a hop. Playbook: "Zero Bubble and
// DualPipe"; Qi, Wan, Huang, Lin 2023, section 3.
//
// Changes from zero_bubble.c, whose schedules are made for F = B = W, no hop, and two sizes of memory: here
// ranks are simulated on a clock, and one that is free chooses its next pass by the inputs that have arrived:
//
//     inputs of B and F:  the two in turn       F never above the memory limit
//     no input:           W, if one is left that ends before the next input is known to come, or soon after;
//                         otherwise the rank waits for that input
//     memory is full:     W, which makes room
//
// Several heuristics are tried, and the shortest step is kept; for p = 4, m = 7, a limit of 5 and F = B = W:
//
//     rank 0  |F0-F1-F2-F3-F4-......B0-W0-F5-B1-W1-F6-B2-W2-B3-W3-B4-W4-B5-W5-B6-W6-...
//     rank 1  |...F0-F1-F2-F3-F4-B0-W0-B1-W1-F5-B2-W2-F6-B3-W3-B4-W4-B5-W5-B6-W6-......
//     rank 2  |......F0-F1-F2-B0-F3-B1-F4-B2-W0-F5-B3-W1-F6-B4-W2-B5-W3-B6-W4-W5-W6-...
//     rank 3  |.........F0-B0-F1-B1-F2-B2-F3-B3-F4-W0-B4-F5-W1-B5-F6-B6-W2-W3-W4-W5-W6-
//
// Held: at most `limit` micro-batches from F to W. Bubble: never more than that of ZB-H1 or ZB-H2 if they
// fit, and less with memory in between (F = 10, B = 12, W = 8: 42, 34, 30 for limits of 4, 5, 6).
// Run: build/05_pipeline_parallel/zero_bubble_auto
//      build/05_pipeline_parallel/schedule --schedule zb_auto --micro-batches 7 --memory-limit 5
// Last line: PASS zero_bubble_auto: stages on several ranks reproduce the single-device step …
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "schedule.h"

// What the choices above leave open. All combinations of a few values are tried.
typedef struct Heuristics {
    double lateness;  // how long the next input may wait for a W
    bool turns;       // F and B in turn; or B whenever there is one
    bool makes_room;  // W before B if memory is full and an F could begin
    int lead;         // before its first B rank r has p - r + lead forwards at most
} Heuristics;

typedef struct Rank {
    int f, b, w;     // passes done
    bool last_is_f;  // of F and B
    double free;
    double *f_end, *b_end;  // (m) of the passes done
} Rank;

typedef struct Simulation {
    Schedule *schedule;
    Durations d;
    Heuristics heuristics;
    int p, m, limit;
    Rank rank[RANKS_MOST];
} Simulation;

// When the input of the next F (or of the next B) is there; INFINITY: not known yet, or there is none.
static double f_there(const Simulation *sim, int r) {
    const Rank *me = &sim->rank[r];
    if (me->f == sim->m) return INFINITY;
    if (r == 0) return 0;
    const Rank *before = me - 1;
    return me->f < before->f ? before->f_end[me->f] + sim->d.hop : INFINITY;
}

static double b_there(const Simulation *sim, int r) {
    const Rank *me = &sim->rank[r];
    if (me->b == me->f) return INFINITY;
    if (r == sim->p - 1) return me->f_end[me->b];
    const Rank *after = me + 1;
    return me->b < after->b ? after->b_end[me->b] + sim->d.hop : INFINITY;
}

typedef struct Choice {
    PassKind kind;
    double begin;  // INFINITY: nothing can begin yet
} Choice;

static Choice choose(const Simulation *sim, int r) {
    const Rank *me = &sim->rank[r];
    bool full = me->f - me->w == sim->limit, waits = me->w < me->b;
    if (full && waits && sim->heuristics.makes_room && f_there(sim, r) <= me->free)
        return (Choice){PASS_W, me->free};
    bool room = !full && (me->b > 0 || me->f < sim->p - r + sim->heuristics.lead);
    double f = room ? f_there(sim, r) : INFINITY, b = b_there(sim, r), next = fmin(f, b);
    bool f_first = f <= me->free && (b > me->free || (sim->heuristics.turns && !me->last_is_f));
    if (f_first) return (Choice){PASS_F, me->free};
    if (b <= me->free) return (Choice){PASS_B, me->free};
    if (waits && me->free + sim->d.W <= next + sim->heuristics.lateness) return (Choice){PASS_W, me->free};
    return (Choice){b <= f ? PASS_B : PASS_F, next};
}

static void begin_pass(Simulation *sim, int r, Choice choice) {
    Rank *me = &sim->rank[r];
    double length = choice.kind == PASS_F ? sim->d.F : choice.kind == PASS_B ? sim->d.B : sim->d.W;
    int *count = choice.kind == PASS_F ? &me->f : choice.kind == PASS_B ? &me->b : &me->w;
    me->free = choice.begin + length;
    if (choice.kind == PASS_F) me->f_end[*count] = me->free;
    if (choice.kind == PASS_B) me->b_end[*count] = me->free;
    if (choice.kind != PASS_W) me->last_is_f = choice.kind == PASS_F;
    schedule_add(sim->schedule, r, choice.kind, r, (*count)++);
}

// The earliest decision first: all that it needs to know of other ranks is then decided. What a rank may
// begin depends on its neighbours alone, so a pass changes the choices of three ranks.
static void simulate(Simulation *sim, double *ends) {
    for (int r = 0; r < sim->p; r++)
        sim->rank[r] = (Rank){.f_end = ends + 2 * r * sim->m, .b_end = ends + (2 * r + 1) * sim->m};
    Choice choice[RANKS_MOST];
    for (int r = 0; r < sim->p; r++) choice[r] = choose(sim, r);
    for (int passes = 0; passes < 3 * sim->p * sim->m; passes++) {
        int first = 0;
        for (int r = 1; r < sim->p; r++)
            if (choice[r].begin < choice[first].begin) first = r;
        CHECK(choice[first].begin < INFINITY, "zb_auto: no rank can go on");
        begin_pass(sim, first, choice[first]);
        for (int r = first > 0 ? first - 1 : 0; r <= first + 1 && r < sim->p; r++) choice[r] = choose(sim, r);
    }
}

// The better of two schedules; the other one is freed.
typedef struct Best {
    Schedule schedule;
    double makespan;
} Best;

static bool same(const Schedule *s, const Schedule *t) {
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->list[r].count; i++)  // one pass an action, of one stage
            if (memcmp(s->list[r].action[i].pass, t->list[r].action[i].pass, sizeof(StagePass)))
                return false;
    return true;
}

// Most choices lead to few schedules, and a period takes long.
static void keep_better(Best *best, Schedule s, Durations d) {
    ScheduleTimes times = schedule_times(&s, d);
    double makespan = times.makespan;
    schedule_times_free(&times, &s);
    bool better = makespan < best->makespan;
    if (makespan == best->makespan && !same(&s, &best->schedule))
        better = schedule_period(&s, d, NULL) < schedule_period(&best->schedule, d, NULL);
    Schedule worse = better ? best->schedule : s;
    if (better) *best = (Best){s, makespan};
    if (worse.list) schedule_free(&worse);
}

// ZB-H1 and ZB-H2 compete as well, if memory has room for them. Of equally short steps the one with the
// shortest period is kept. A lower bound for any order: the last rank waits for p - 1 forwards and hops; rank
// 0 waits for its first gradient until p F + (p - 1) B + 2 (p - 1) hops are over, and has no more than
// `limit` Fs to run before it:
//
//     bubble  >=  max((p - 1) (F + hop),  (p - 1) (F + B + 2 hop) - (limit - 1) F)
//
// In training every pass counts as 1 and the limit is p (pipeline_wish); `schedule` takes other times.
Schedule schedule_zero_bubble_auto(int p, int m, Durations d, int limit) {
    enum { LATENESSES = 5, LEADS = 3 };
    static const double lateness[LATENESSES] = {0, 0.25, 0.5, 0.75, 1};
    const int lead[LEADS] = {0, p / 2, p};
    Best best = {.makespan = INFINITY};
    double *ends = host_alloc(sizeof(double) * 2 * (size_t)p * (size_t)m);
    for (int i = 0; i < LATENESSES; i++)
        for (int j = 0; j < LEADS; j++)
            for (int makes_room = 1; makes_room >= 0; makes_room--)
                for (int turns = 1; turns >= 0; turns--) {
                    Heuristics heuristics = {.lateness = lateness[i] * d.W,
                                             .lead = lead[j],
                                             .makes_room = makes_room,
                                             .turns = turns};
                    Schedule s = schedule_new("zb_auto", p, m, p, 1);
                    Simulation sim = {&s, d, heuristics, p, m, limit, {{0}}};
                    simulate(&sim, ends);
                    keep_better(&best, s, d);
                }
    for (int level = 1; level <= 2; level++) {
        Schedule s = schedule_zero_bubble(p, m, level);
        if (schedule_most(&s).held_to_w <= limit) keep_better(&best, s, d);
        else schedule_free(&s);
    }
    free(ends);
    snprintf(best.schedule.name, sizeof best.schedule.name, "zb_auto_%d", limit);
    return best.schedule;
}

#ifndef NO_MAIN
#include "pipeline.h"

int main(int argc, char **argv) {
    return pipeline_program(argc, argv, "Zero bubble, scheduled by greedy choices.", "zb_auto");
}
#endif
