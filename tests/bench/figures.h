// figures.h: what the benchmarks share: how many pairs of measurements a row takes, their median and
// spread, the line that a figure is printed on, and where a step loses time against its yardstick.
//     bench <name> <median> <unit> target <value> ok|short   quartiles <low> <high>
#ifndef FIGURES_H
#define FIGURES_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "00_single_gpu/training.h"
#include "base.h"
#include "comm/comm.h"
#include "tensor/clock.h"

static inline int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
// Leaves the values sorted.
static inline double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, by_value);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

static inline void figure_line(const char *name, double *values, int count, const char *unit, double target,
                               bool ok) {
    double value = median(values, count);
    say("bench %s %.4g %s target %.4g %s   quartiles %.4g %.4g", name, value, unit, target,
        ok ? "ok" : "short", values[count / 4], values[count - 1 - count / 4]);
}
// For shares and ratios: more is better.
static inline void figure(const char *name, double *values, int count, const char *unit, double target) {
    figure_line(name, values, count, unit, target, median(values, count) >= target);
}

// The first step allocates. So does the second: memory that the first freed now holds the optimizer's state.
static inline void warm_up(Trainer *t) {
    for (int i = 0; i < 2; i++) train_step(t, NULL);
}

// ---- how many pairs a row takes ----
//
// A row ends as soon as it has LEAST_PAIRS and its median is known to 1 %, or its seconds have passed and it
// has FEWEST_PAIRS: a faster machine measures more pairs in the same time. The rule depends on the spread
// and on the clock, not on the target, and so favors neither verdict.
enum { FEWEST_PAIRS = 3, LEAST_PAIRS = 5, MOST_PAIRS = 64 };

// Half the width of the 95 % confidence interval of the median, as a share of it: 1.96 standard errors, each
// 1.25 standard deviations over the root of the count; the quartiles are 1.35 standard deviations apart. The
// values keep their order.
static inline double median_error(const double *values, int count) {
    double sorted[MOST_PAIRS];
    memcpy(sorted, values, (size_t)count * sizeof *sorted);
    const double middle = median(sorted, count);
    const double between_quartiles = sorted[count - 1 - count / 4] - sorted[count / 4];
    return 1.96 * 1.253 / 1.349 * between_quartiles / sqrt(count) / fabs(middle);
}

// Whether these ratios are enough, `passed` seconds after the first measurement began.
static inline bool measured(const double *ratios, int pairs, double passed, double seconds) {
    if (pairs < FEWEST_PAIRS) return false;
    if (pairs == MOST_PAIRS || passed >= seconds) return true;
    return pairs >= LEAST_PAIRS && median_error(ratios, pairs) <= 0.01;
}

// ---- what is missing: a step's seconds beyond those of its FLOPs at the yardstick's rate, by operation ----

enum { MOST_OPERATIONS = 64 };

typedef struct Missing {
    const char *name[MOST_OPERATIONS];
    double seconds[MOST_OPERATIONS];  // over all steps
    int operations;
    double step, between;  // whole steps, and their parts within neither an operation nor comm
    double communication;  // waiting for others, copies, and sums
} Missing;

// Adds the operations of one step of this rank, from clock_reset to now, each minus the time of its FLOPs at
// `rate`, in FLOP/s of this rank; times a weight, which is negative if this step is another one's yardstick.
static inline void missing_add_weighted(Missing *missing, double step_seconds, double rate, double weight) {
    const OpCount *operation;
    int count = clock_operations(&operation);
    double communication = comm_total().wall_seconds;
    missing->communication += weight * communication;
    missing->between += weight * (step_seconds - communication);
    for (int i = 0; i < count; i++) {
        int at = 0;
        while (at < missing->operations && strcmp(missing->name[at], operation[i].name)) at++;
        if (at == MOST_OPERATIONS) continue;
        if (at == missing->operations) missing->name[missing->operations++] = operation[i].name;
        missing->seconds[at] += weight * (operation[i].wall_seconds - operation[i].flops / rate);
        missing->between -= weight * operation[i].wall_seconds;
    }
}

static inline void missing_add(Missing *missing, double step_seconds, double rate) {
    missing->step += step_seconds;
    missing_add_weighted(missing, step_seconds, rate, 1);
}

// The largest parts, as shares of the step.
static inline void missing_say(const Missing *missing) {
    char text[256] = "";
    int used = 0;
    double least = 0.005 * missing->step;
    for (int i = 0; i < missing->operations && used < 200; i++)
        if (missing->seconds[i] > least)
            used += snprintf(text + used, sizeof text - used, " %s %.3f,", missing->name[i],
                             missing->seconds[i] / missing->step);
    if (missing->communication > least)
        used += snprintf(text + used, sizeof text - used, " communication %.3f,",
                         missing->communication / missing->step);
    say("  missing, as shares of the step:%s between operations %.3f", text,
        missing->between / missing->step);
}

#endif
