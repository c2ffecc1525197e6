// schedule_table.c: the table of all schedules, each compared with closed formulas. Playbook: "Pipeline
// Parallelism" to "Zero Bubble and DualPipe".
//
// A formula is for any p, m, v, F, B and W: the playbook's or a paper's; where theirs holds only for equal
// times, or is off by a few passes (DualPipe), it is this book's own. It holds under conditions, which are
// written beside it, and is NAN if they are not met. The clock uses no formula; where there is one, both must
// agree to the last digit.
#include <math.h>
#include <stdlib.h>

#include "report/report.h"
#include "schedule.h"

// ---- the formulas ----

double schedule_bubble_formula(ScheduleKind kind, const ScheduleWish *wish) {
    double p = wish->ranks, F = wish->durations.F, B = wish->durations.B, W = wish->durations.W;
    double pair = wish->durations.pair, all = F + B + W;
    int m = wish->micro_batches, group = wish->group ? wish->group : wish->ranks;
    bool like = W <= F && F <= B && 2 * B <= 3 * F && B <= 2 * W;  // times that differ by no more than this
    bool folded = kind == DUALPIPE_V;
    double turns = (folded ? p : p / 2) - 1;  // of DualPipe's half of a pipeline
    if (wish->durations.hop > 0) return NAN;
    switch (kind) {
        case AFAB:
            return (p - 1) * all;
        case ONE_F_ONE_B:
            return (p - 1) * (wish->split ? F + B : all);
        case INTERLEAVED:  // fewer than p leave a rank's next stage waiting for the first of them
            if (m < p) return (p - m) * all + (m - 1) * all / wish->chunks;
            return m % group == 0 ? (p - 1) * all / wish->chunks : NAN;
        case ZB_H1:
            return m >= p ? (p - 1) * fmax(F + fmax(0, B - W), B) : NAN;
        case ZB_H2:
            return m >= 2 * p - 1 ? (p - 1) * fmax(F, fmax(F + B - 2 * W, B - F)) : NAN;
        case ZB_V:
            return m >= 2 * p - 1 && like ? (p - 1) * B / 2 : NAN;
        case ZB_AUTO:
            break;
        case DUALPIPE:
        case DUALPIPE_V:
            if (m < 2 * p || (m % 2 && !folded) || F < W || B < F || pair != all) return NAN;
            return fmax(turns * (pair + F - 2 * W), turns * (pair + B - 2 * W) - F) / (folded ? 2 : 1);
    }
    return NAN;
}

double schedule_period_formula(ScheduleKind kind, const ScheduleWish *wish) {
    double p = wish->ranks, F = wish->durations.F, B = wish->durations.B, W = wish->durations.W;
    double step = schedule_bubble_formula(kind, wish);
    if (isnan(step)) return NAN;
    if (kind == ZB_H1) return (p - 1) * fmax(F + B - W, B);
    if (kind == ZB_H2) return (p - 1) * fmax(fmax(F + B - 2 * W, B - F), 0);
    return kind == ZB_V ? (p - 1) * (B - W) : step;
}

double schedule_least_bubble(const ScheduleWish *wish) {
    Durations d = wish->durations;
    double p = wish->ranks, limit = wish->limit ? wish->limit : p;
    double first = (p - 1) * (d.F + d.B + 2 * d.hop) - (fmin(limit, wish->micro_batches) - 1) * d.F;
    return fmax((p - 1) * (d.F + d.hop), first);
}

// W is never far behind its B.
static HeldFormula as_b(double held) { return (HeldFormula){held, held}; }

HeldFormula schedule_rank_held_formula(ScheduleKind kind, const ScheduleWish *wish, int rank) {
    double p = wish->ranks, m = wish->micro_batches, v = wish->chunks, r = rank;
    double group = wish->group ? wish->group : p;
    HeldFormula none = {NAN, NAN};
    switch (kind) {
        case AFAB:
            return as_b(m);
        case ONE_F_ONE_B:
            return as_b(fmin(p - r, m));
        case INTERLEAVED: {
            double ahead = 2 * (p - 1 - r) + (v - 1) * group;
            return fmod(m, group) == 0 ? as_b(fmin(m, (ahead + 1) / v)) : none;
        }
        case ZB_H1:
            return (HeldFormula){fmin(p - r, m), fmin(p, m)};
        case ZB_H2:
            return (HeldFormula){fmin(2 * (p - r) - 1, m), fmin(2 * p - 1, m)};
        case ZB_V:
            return as_b(fmin(m, fmin(p, (m + 1 + r) / 2)));
        case ZB_AUTO:
            break;
        case DUALPIPE: {
            double k = fmin(r, p - 1 - r), near = r < p / 2 ? ceil(m / 2) : floor(m / 2);
            return as_b(fmin(m, fmin(p + 1, near + 1 + k)));
        }
        case DUALPIPE_V:
            return as_b(fmin(m, fmin(p + 0.5, (m + 1 + r) / 2)));
    }
    return none;
}

// Each micro-batch goes there and back between stages on different ranks; a V turns on one rank.
int schedule_messages_formula(ScheduleKind kind, const ScheduleWish *wish) {
    int p = wish->ranks, hops = p - 1;
    if (kind == INTERLEAVED && p > 1) hops = p * wish->chunks - 1;
    if (kind == ZB_V || kind == DUALPIPE_V) hops = 2 * (p - 1);
    return 2 * wish->micro_batches * hops;
}

// Pairs F+BW of a rank at distance k from the nearer end, in a pipeline of 2 x half ranks with n
// micro-batches each way: two in each turn of the steady state, one in each turn after it (dualpipe.c).
static double pairs_formula(ScheduleKind kind, const ScheduleWish *wish, int rank) {
    bool folded = kind == DUALPIPE_V;
    if (kind != DUALPIPE && !folded) return 0;
    int half = folded ? wish->ranks : wish->ranks / 2, n = wish->micro_batches / (folded ? 1 : 2);
    int k = rank < half ? rank : wish->ranks - 1 - rank;
    if (n < 2 * half || (!folded && wish->micro_batches % 2)) return NAN;
    return 2 * (n - 2 * half + k + 1) - (k == half - 1) + half - k - 1;
}

static int pairs_of(const Schedule *s, int rank) {
    int pairs = 0;
    for (int i = 0; i < s->list[rank].count; i++) pairs += s->list[rank].action[i].passes == 2;
    return pairs;
}

static int pairs_on_ranks(const Schedule *s) {
    int pairs = 0;
    for (int rank = 0; rank < s->ranks; rank++) pairs += pairs_of(s, rank);
    return pairs;
}

// ---- the table ----

static const double ROUNDING = 1e-12;  // of a step's time, summed in another order; whole numbers have none

// Agrees with its formula, or has none.
static bool agrees(const char *what, const Schedule *s, double formula, double clock, double rounding) {
    return report_that(isnan(formula) || fabs(formula - clock) <= rounding,
                       "%s of %s, p = %d, m = %d: %.15g, by its formula %.15g", what, s->name, s->ranks,
                       s->micro_batches, clock, formula);
}

static void table_row(ScheduleKind kind, const ScheduleWish *wish) {
    if (schedule_refusal(kind, wish)) return;
    Schedule s = schedule_make(kind, wish);
    if (wish->group) snprintf(s.name, sizeof s.name, "breadth_first_%d", wish->chunks);
    ScheduleTimes t = schedule_times(&s, wish->durations);
    RankCosts most = schedule_most(&s);
    ScheduleFault fault;
    double bubble = schedule_bubble_formula(kind, wish), period_bubble;
    schedule_period(&s, wish->durations, &period_bubble);
    double rounding = ROUNDING * t.makespan;
    bool exact = agrees("bubble", &s, bubble, t.bubble, rounding) &&
                 agrees("period", &s, schedule_period_formula(kind, wish), period_bubble, rounding);
    int messages = 0;
    for (int r = 0; r < s.ranks; r++) {
        HeldFormula held = schedule_rank_held_formula(kind, wish, r);
        RankCosts costs = schedule_costs(&s, r);
        exact = agrees("held to B", &s, held.to_b, costs.held_to_b, 0) &&
                agrees("held to W", &s, held.to_w, costs.held_to_w, 0) &&
                agrees("pairs F+BW", &s, pairs_formula(kind, wish, r), pairs_of(&s, r), 0) && exact;
        messages += costs.activations + costs.gradients;
    }
    exact = agrees("messages", &s, schedule_messages_formula(kind, wish), messages, 0) && exact;
    bool order = schedule_message_order(&s, QUEUE_PAIR_AND_KIND, &fault);
    report_that(order, "%s, p = %d, m = %d: %s", s.name, s.ranks, s.micro_batches, fault.sentence);
    bool one_queue = schedule_message_order(&s, QUEUE_PAIR, &fault);
    char verdict[16] = "";
    if (!isnan(bubble)) snprintf(verdict, sizeof verdict, exact ? "exact" : "FAIL");
    if (kind == ZB_AUTO) {
        double least = schedule_least_bubble(wish);
        report_that(t.bubble >= least - rounding,
                    "bubble of %s, p = %d, m = %d: %.15g, where none is below %.15g", s.name, s.ranks,
                    s.micro_batches, t.bubble, least);
        snprintf(verdict, sizeof verdict, ">= %.4g", least);
    }
    say("%-18s %8.5g %6.1f%% %8.5g  %-7s %9.5g %9.5g %7.4g %8d  %s", s.name, t.bubble,
        100 * t.bubble / (t.makespan - t.bubble), period_bubble, verdict, most.held_to_b, most.held_to_w,
        most.weights, most.activations + most.gradients, one_queue ? "any" : "by kind");
    char *group = format_text("p=%d m=%d %s", s.ranks, s.micro_batches, s.name);
    report_number(group, "bubble", t.bubble, "");
    report_number(group, "period_bubble", period_bubble, "");
    report_number(group, "held_to_b", most.held_to_b, "micro-batches");
    report_number(group, "held_to_w", most.held_to_w, "micro-batches");
    report_number(group, "weights", most.weights, "p-ths of the model");
    report_number(group, "messages", most.activations + most.gradients, "");
    free(group);
    schedule_times_free(&t, &s);
    schedule_free(&s);
}

static void table_of(int p, int m, Durations d) {
    ScheduleWish wish = {.ranks = p, .micro_batches = m, .chunks = 2, .durations = d};
    say("\np = %d rank%s, m = %d micro-batch%s: work %g\n"
        "%-18s %8s %7s %8s  %-7s %9s %9s %7s %8s  %s",
        p, plural(p), m, m == 1 ? "" : "es", m * (d.F + d.B + d.W), "", "bubble", "", "period", "formula",
        "held to B", "held to W", "weights", "messages", "queues");
    for (int kind = 0; kind < SCHEDULE_KINDS; kind++) {
        table_row((ScheduleKind)kind, &wish);
        if (kind != ONE_F_ONE_B) continue;
        wish.split = true;
        table_row(ONE_F_ONE_B, &wish);
        wish.split = false;
    }
    wish.limit = 2 * p - 1;
    table_row(ZB_AUTO, &wish);
    wish.chunks = 4, wish.group = m;
    table_row(INTERLEAVED, &wish);
}

// The playbook's plot of p = 8.
static void table_of_chunks(Durations d) {
    const int p = 8;
    say("\nInterleaved on %d ranks, the bubble as a share of the work. By formula (p - 1) / (v m), but "
        "with m < p\n"
        "(p - m) / m + (m - 1) / (v m); m = 1 is the naive pipeline, whatever v:\n"
        "    m  %8s %8s %8s %8s",
        p, "v = 1", "v = 2", "v = 4", "v = 8");
    for (int m = 1; m <= 32; m *= 2) {
        double share[4];
        for (int i = 0; i < 4; i++) {
            ScheduleWish wish = {.ranks = p, .micro_batches = m, .chunks = 1 << i, .durations = d};
            Schedule s = schedule_make(INTERLEAVED, &wish);
            ScheduleTimes t = schedule_times(&s, d);
            agrees("bubble", &s, schedule_bubble_formula(INTERLEAVED, &wish), t.bubble,
                   ROUNDING * t.makespan);
            share[i] = 100 * t.bubble / (t.makespan - t.bubble);
            schedule_times_free(&t, &s);
            schedule_free(&s);
        }
        say("  %3d  %7.1f%% %7.1f%% %7.1f%% %7.1f%%", m, share[0], share[1], share[2], share[3]);
    }
}

// ---- what the papers' durations give ----

// F = 10, B = 12, W = 8.
static const struct {
    ScheduleKind kind;
    bool split;
    double bubble[2], period[2];  // of p = 4, m = 8, and of p = 8, m = 16
} exact[] = {
    {AFAB, false, {90, 210}, {90, 210}},       {ONE_F_ONE_B, false, {90, 210}, {90, 210}},
    {ONE_F_ONE_B, true, {66, 154}, {66, 154}}, {INTERLEAVED, false, {45, 105}, {45, 105}},
    {ZB_H1, false, {42, 98}, {42, 98}},        {ZB_H2, false, {30, 70}, {18, 42}},
    {ZB_V, false, {18, 42}, {12, 28}},         {DUALPIPE, false, {24, 72}, {24, 72}},
    {DUALPIPE_V, false, {36, 86}, {36, 86}},
};

static void prove_exact(void) {
    say("\nF = 10, B = 12, W = 8, F+BW = 30, no hop: bubble of a step, and of a period");
    for (int size = 0; size < 2; size++)
        for (size_t i = 0; i < sizeof exact / sizeof *exact; i++) {
            ScheduleWish wish = {4 << size, 8 << size, 2, 0, exact[i].split, 0, {10, 12, 8, 30, 0}};
            Schedule s = schedule_make(exact[i].kind, &wish);
            ScheduleTimes t = schedule_times(&s, wish.durations);
            double period_bubble;
            schedule_period(&s, wish.durations, &period_bubble);
            char *what = format_text("%s, p=%d m=%d", s.name, s.ranks, s.micro_batches);
            report_equal(what, exact[i].bubble[size], t.bubble, "");
            if (exact[i].period[size] != exact[i].bubble[size])
                report_equal("  as a period", exact[i].period[size], period_bubble, "");
            free(what);
            schedule_times_free(&t, &s);
            schedule_free(&s);
        }
}

// ---- how far from the best ----

static void search_row(ScheduleKind kind, int p, int m, Durations d) {
    ScheduleWish wish = {.ranks = p, .micro_batches = m, .chunks = 2, .durations = d};
    if (schedule_refusal(kind, &wish)) return;
    Schedule s = schedule_make(kind, &wish);
    // A pair that overlaps its passes takes less time than any order of them.
    bool overlaps = d.pair < d.F + d.B + d.W && pairs_on_ranks(&s) > 0;
    if (schedule_can_search(&s, d) && !overlaps) {
        ScheduleTimes t = schedule_times(&s, d);
        double best = schedule_best_makespan(&s, d), work = t.makespan - t.bubble;
        double rounding = ROUNDING * t.makespan;
        say("%-14s %d %2d %9.5g %9.5g %10.5g  %s", s.name, p, m, schedule_most(&s).held_to_w, t.bubble,
            best - work, fabs(best - t.makespan) <= rounding ? "the best" : "");
        report_that(best <= t.makespan + rounding, "%s, p = %d, m = %d: %g is better than the best, %g",
                    s.name, p, m, t.makespan, best);
        schedule_times_free(&t, &s);
    }
    schedule_free(&s);
}

int schedule_table(Durations d) {
    say("F %g, B %g, W %g, F+BW %g, hop %g. Bubble: of a step; period: of a step if the next may begin "
        "without a\n"
        "barrier. Held: most micro-batches of 1/p of the model on any rank, from F to B, and from F to W. "
        "Messages:\n"
        "most that a rank sends. Queues: by kind, if gradients may overtake activations.",
        d.F, d.B, d.W, d.pair, d.hop);
    for (int p = 4; p <= 8; p *= 2)
        for (int m = p; m <= 4 * p; m *= 2) table_of(p, m, d);
    table_of_chunks(d);
    prove_exact();
    say("\nThe best that F, B and W reach in any order (BW taken apart), at the same places and memory:\n"
        "%-14s %s %2s %9s %9s %10s",
        "", "p", "m", "held to W", "bubble", "best");
    for (int kind = 0; kind < SCHEDULE_KINDS; kind++)
        for (int p = 2; p <= 3; p++)
            for (int m = 1; m <= 3; m++) search_row((ScheduleKind)kind, p, m, d);
    return report_verdict("every schedule is sound, and costs what its formula says");
}
