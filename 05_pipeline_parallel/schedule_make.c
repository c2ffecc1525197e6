// schedule_make.c: makes all schedules by their names, each verified before it is returned. Playbook:
// "Pipeline Parallelism". This file has no main.
#include "schedule.h"

const char *schedule_refusal(ScheduleKind kind, const ScheduleWish *wish) {
    if (kind == DUALPIPE && wish->ranks % 2)
        return "dualpipe needs an even number of ranks, as each has a mirror: --stages 2, 4, … "
               "(dualpipe_v takes any)";
    if (kind == INTERLEAVED && wish->group && wish->group < wish->ranks)
        return "--group must be at least --stages: with a shorter group, rank 0 would wait in every turn for "
               "the group's first micro-batch to return from the last rank";
    if (kind == INTERLEAVED && wish->ranks * wish->chunks > STAGES_MOST)
        return "--stages times --chunks is more stages than can be planned: at most 512";
    return NULL;
}

static Schedule generate(ScheduleKind kind, const ScheduleWish *wish) {
    int p = wish->ranks, m = wish->micro_batches;
    switch (kind) {
        case AFAB:
            return schedule_afab(p, m);
        case ONE_F_ONE_B:
            return schedule_one_f_one_b(p, m, wish->split);
        case INTERLEAVED:
            return schedule_interleaved(p, m, wish->chunks, wish->group ? wish->group : p);
        case ZB_H1:
            return schedule_zero_bubble(p, m, 1);
        case ZB_H2:
            return schedule_zero_bubble(p, m, 2);
        case ZB_V:
            return schedule_zero_bubble_v(p, m);
        case ZB_AUTO:
            return schedule_zero_bubble_auto(p, m, wish->durations, wish->limit ? wish->limit : p);
        case DUALPIPE:
            return schedule_dualpipe(p, m);
        case DUALPIPE_V:
            break;
    }
    return schedule_dualpipe_v(p, m);
}

Schedule schedule_make(ScheduleKind kind, const ScheduleWish *wish) {
    const char *refusal = schedule_refusal(kind, wish);
    CHECK(!refusal, "%s", refusal);
    Schedule s = generate(kind, wish);
    ScheduleFault fault;
    CHECK(schedule_verify(&s, &fault), "%s, p = %d, m = %d, %d stages: %s", s.name, s.ranks, s.micro_batches,
          s.stages, fault.sentence);
    return s;
}
