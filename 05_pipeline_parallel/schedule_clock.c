// schedule_clock.c: how long a schedule takes, whatever F, B, W and a hop take. Playbook: "Pipeline
// Parallelism".
//
// An action begins when its rank is free and its inputs are there, and its outputs leave when it ends:
//
//     begin = max(end of the rank's last action, end of each input's pass [+ hop from another rank])
//
// Times are kept in units of 1 / stages: the F of a stage, p / stages of F, is then p F units, and sums of
// whole numbers are exact.
//
// The bubble of a step is its makespan less m (F + B + W), the work of every rank. But a rank that ends early
// may also begin the next step early. Let a[i][j] be the time at which rank i ends a step if rank j begins at
// 0 and the other ranks delay nobody. If ranks end a step at times x, they end the next at x'[i] = max over j
// of (a[i][j] + x[j]): a matrix product with max for sum and + for product. In the long run a step takes the
// largest mean of a circuit i -> j -> … -> i in a, which is found on the diagonals of the powers of a.
#include <math.h>
#include <stdlib.h>

#include "schedule.h"

// In units of 1 / stages.
static double length_of(const Schedule *s, const Action *action, Durations d) {
    if (action->passes == 2) return s->ranks * d.pair;
    switch (action->pass[0].kind) {
        case PASS_F:
            return s->ranks * d.F;
        case PASS_B:
            return s->ranks * d.B;
        case PASS_W:
            return s->ranks * d.W;
        case PASS_BW:
            break;
    }
    return s->ranks * (d.B + d.W);
}

// When the inputs of an action are on its rank.
static double inputs_there(const Schedule *s, const Action *action, const double *ended, double hop,
                           double begin) {
    for (int i = 0; i < action->passes; i++) {
        StagePass pass = action->pass[i], needed;
        if (!schedule_needs(s, pass, &needed)) continue;
        double there = ended[schedule_slot(s, needed)];
        if (schedule_receives_from(s, pass) != NO_RANK) there += s->stages * hop;
        begin = fmax(begin, there);
    }
    return begin;
}

// Runs a step. Rank r is free at now[r], which is updated; times: NULL, or where each action's are noted.
static void run(const Schedule *s, Durations d, double *now, ScheduleTimes *times) {
    double *ended = host_alloc(schedule_slots(s) * sizeof *ended);
    ScheduleWalk walk = schedule_walk(s);
    while (schedule_walk_next(&walk)) {
        const Action *action = &s->list[walk.rank].action[walk.position];
        double begin = inputs_there(s, action, ended, d.hop, now[walk.rank]),
               end = begin + length_of(s, action, d);
        for (int i = 0; i < action->passes; i++) ended[schedule_slot(s, action->pass[i])] = end;
        now[walk.rank] = end;
        if (!times) continue;
        times->begin[walk.rank][walk.position] = begin / s->stages;
        times->end[walk.rank][walk.position] = end / s->stages;
        times->idle[walk.rank] -= end - begin;
    }
    schedule_walk_end(&walk);
    free(ended);
}

static double maximum(const double *x, int n) {
    double most = -INFINITY;
    for (int i = 0; i < n; i++) most = fmax(most, x[i]);
    return most;
}

static double work_of(const Schedule *s, Durations d) {  // in units of 1 / stages
    return s->stages * s->micro_batches * (d.F + d.B + d.W);
}

double schedule_period(const Schedule *s, Durations d, double *bubble) {
    int p = s->ranks;
    double a[RANKS_MOST][RANKS_MOST], power[RANKS_MOST][RANKS_MOST], next[RANKS_MOST], period = -INFINITY;
    for (int j = 0; j < p; j++) {
        double now[RANKS_MOST];
        for (int i = 0; i < p; i++) now[i] = i == j ? 0 : -INFINITY;
        run(s, d, now, NULL);
        for (int i = 0; i < p; i++) a[i][j] = power[i][j] = now[i];
    }
    for (int steps = 1; steps <= p; steps++) {  // power is a to the power of steps
        for (int i = 0; i < p; i++) period = fmax(period, power[i][i] / steps);
        for (int j = 0; j < p; j++) {
            for (int i = 0; i < p; i++) {
                next[i] = -INFINITY;
                for (int k = 0; k < p; k++) next[i] = fmax(next[i], a[i][k] + power[k][j]);
            }
            for (int i = 0; i < p; i++) power[i][j] = next[i];
        }
    }
    if (bubble) *bubble = (period - work_of(s, d)) / s->stages;
    return period / s->stages;
}

ScheduleTimes schedule_times(const Schedule *s, Durations d) {
    ScheduleTimes times = {0};
    double now[RANKS_MOST] = {0};
    for (int r = 0; r < s->ranks; r++) {
        times.begin[r] = host_alloc(sizeof(double) * (size_t)s->list[r].count);
        times.end[r] = host_alloc(sizeof(double) * (size_t)s->list[r].count);
    }
    run(s, d, now, &times);
    double makespan = maximum(now, s->ranks);
    for (int r = 0; r < s->ranks; r++) times.idle[r] = (makespan + times.idle[r]) / s->stages;
    times.makespan = makespan / s->stages;
    times.bubble = (makespan - work_of(s, d)) / s->stages;
    return times;
}

void schedule_times_free(ScheduleTimes *times, const Schedule *s) {
    for (int r = 0; r < s->ranks; r++) {
        free(times->begin[r]);
        free(times->end[r]);
    }
    *times = (ScheduleTimes){0};
}
