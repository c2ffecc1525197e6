// schedules.h: what both tests of schedules share: an independent check of whether a schedule runs, and how
// long it takes.
#ifndef SCHEDULES_H
#define SCHEDULES_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "05_pipeline_parallel/schedule.h"

// cmocka.h needs these before it
// clang-format off
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
// clang-format on

static const Durations papers = {10, 12, 8, 30, 0};

// ---- an independent check: lists played round by round ----

typedef struct Opinion {
    const Schedule *s;
    double *end;  // (3, stages, micro-batches) of F, B, W; NAN: not yet
} Opinion;

static double *end_of(Opinion *o, int kind, int stage, int i) {
    return &o->end[(i * o->s->stages + stage) * 3 + kind];
}

// When the input of a pass is available; NAN: not yet; INFINITY: never, as it is not a pass of this rank.
static double input_time(Opinion *o, int rank, StagePass p, Durations d) {
    const Schedule *s = o->s;
    if (p.stage < 0 || p.stage >= s->stages || p.micro_batch < 0 || p.micro_batch >= s->micro_batches)
        return INFINITY;
    if (p.direction != s->direction[p.micro_batch]) return INFINITY;
    const int *place = s->place + p.direction * s->stages;
    if (place[p.stage] != rank) return INFINITY;
    if (p.kind == PASS_F && p.stage == 0) return 0;
    if (p.kind == PASS_F)
        return *end_of(o, 0, p.stage - 1, p.micro_batch) + (place[p.stage - 1] != rank ? d.hop : 0);
    if (p.kind == PASS_W) return *end_of(o, 1, p.stage, p.micro_batch);
    double own = *end_of(o, 0, p.stage, p.micro_batch);
    if (p.stage == s->stages - 1) return own;
    double there = *end_of(o, 1, p.stage + 1, p.micro_batch) + (place[p.stage + 1] != rank ? d.hop : 0);
    return isnan(own) || isnan(there) ? NAN : fmax(own, there);
}

// Records the end of a pass; false: it had already ended.
static bool note_end(Opinion *o, StagePass p, double end) {
    bool first = true;
    for (int kind = 0; kind < 3; kind++) {
        bool does = kind == 0   ? p.kind == PASS_F
                    : kind == 1 ? p.kind == PASS_B || p.kind == PASS_BW
                                : p.kind == PASS_W || p.kind == PASS_BW;
        if (!does) continue;
        first = first && isnan(*end_of(o, kind, p.stage, p.micro_batch));
        *end_of(o, kind, p.stage, p.micro_batch) = end;
    }
    return first;
}

// The makespan; NAN if the schedule is not valid.
static double play(const Schedule *s, Durations d) {
    int slots = 3 * s->stages * s->micro_batches, at[RANKS_MOST] = {0};
    Opinion o = {s, malloc(sizeof(double) * (size_t)slots)};
    double now[RANKS_MOST] = {0}, makespan = 0, share = (double)s->ranks / s->stages;
    for (int i = 0; i < slots; i++) o.end[i] = NAN;
    bool sound = true, moved = true;
    while (moved && sound) {
        moved = false;
        for (int r = 0; r < s->ranks && sound; r++) {
            if (at[r] == s->list[r].count) continue;
            Action a = s->list[r].action[at[r]];
            double begin = now[r], length = a.passes == 2 ? d.pair : 0;
            for (int i = 0; i < a.passes; i++) {
                double there = input_time(&o, r, a.pass[i], d);
                begin = isnan(begin) || isnan(there) ? NAN : fmax(begin, there);
                if (isinf(there)) sound = false;
            }
            if (a.passes == 2 && (a.pass[0].kind != PASS_F || a.pass[1].kind != PASS_BW)) sound = false;
            if (isnan(begin) || !sound) continue;
            if (a.passes == 1) length = (const double[]){d.F, d.B, d.W, d.B + d.W}[a.pass[0].kind];
            now[r] = begin + length * share;
            for (int i = 0; i < a.passes; i++) sound = note_end(&o, a.pass[i], now[r]) && sound;
            at[r]++;
            moved = true;
        }
    }
    for (int r = 0; r < s->ranks; r++) sound = sound && at[r] == s->list[r].count;
    for (int i = 0; i < slots; i++) sound = sound && !isnan(o.end[i]);
    for (int r = 0; r < s->ranks; r++) makespan = fmax(makespan, now[r]);
    free(o.end);
    return sound ? makespan : NAN;
}

static char *text_of(const Schedule *s, size_t *size) {
    char *text;
    FILE *out = open_memstream(&text, size);
    schedule_write(s, out);
    fclose(out);
    return text;
}

static Schedule make(ScheduleKind kind, int p, int m) {
    ScheduleWish wish = {p, m, 2, 0, false, 0, papers};
    return schedule_make(kind, &wish);
}

#endif
