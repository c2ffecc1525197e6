// records.h: for tests of the report: runs with made-up figures, and what the report prints for them.
#ifndef RECORDS_H
#define RECORDS_H

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "report/report.h"

// cmocka.h needs these before it
// clang-format off
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
// clang-format on

#define ASSERT_NEAR(got, expected, relative)                                                  \
    do {                                                                                      \
        double got_ = (got), expected_ = (expected), bound_ = (relative);                     \
        if (!(fabs(got_ - expected_) <= bound_ * fabs(expected_)))                            \
            fail_msg("%s is %.17g, expected %.17g within %g", #got, got_, expected_, bound_); \
    } while (0)

// ---- what the report prints, as text ----

static char printed[1 << 16];
static int terminal;

static inline void capture(void) {
    fflush(stdout);
    terminal = dup(STDOUT_FILENO);
    FILE *file = tmpfile();
    assert_non_null(file);
    dup2(fileno(file), STDOUT_FILENO);
    fclose(file);
}

static inline void release(void) {
    fflush(stdout);
    ssize_t size = pread(STDOUT_FILENO, printed, sizeof printed - 1, 0);
    printed[size > 0 ? size : 0] = 0;
    dup2(terminal, STDOUT_FILENO);
    close(terminal);
}

static inline void assert_printed(const char *text) {
    if (!strstr(printed, text)) fail_msg("\"%s\" is not in what was printed:\n%s", text, printed);
}

static inline void assert_verdict(int status, const char *last_line) {
    capture();
    int got = report_verdict("all is %s", "well");
    release();
    assert_printed(last_line);
    if (got != status) fail_msg("exit status %d, expected %d", got, status);
}

// ---- runs ----

enum { TENSORS = 12, STEPS = 4 };
static const int64_t sizes[TENSORS] = {7, 300, 1, 64, 65, 7, 33, 128, 2, 5, 31, 256};

static inline double value_at(int tensor, int64_t i) {
    return sin(1.7 * (double)(i + 1) + tensor) * (1 + tensor);
}

// A run with made-up values, all tensors distinct.
static inline Record run_new(const char *title) {
    Params params = {.count = TENSORS, .param = host_alloc(TENSORS * sizeof(Param))};
    for (int t = 0; t < TENSORS; t++) {
        params.param[t] = (Param){.count = sizes[t], .full = {sizes[t], 1}};
        snprintf(params.param[t].name, sizeof params.param[t].name, "tensor.%d", t);
    }
    Record record = record_new(title, STEPS, &params);
    free(params.param);
    for (int s = 0; s < STEPS; s++) {
        record.loss[s] = 5.5 - 0.1 * s;
        record.grad_norm[s] = 1.0 + 0.01 * s;
    }
    for (int t = 0; t < TENSORS; t++) {
        record.grad[t] = host_alloc(sizeof(double) * (size_t)sizes[t]);
        record.param[t] = host_alloc(sizeof(double) * (size_t)sizes[t]);
        for (int64_t i = 0; i < sizes[t]; i++) {
            record.grad[t][i] = value_at(t, i);
            record.param[t][i] = value_at(t + 50, i);
        }
    }
    return record;
}

typedef struct Pair {
    Record run, baseline;
} Pair;

static inline int two_equal_runs(void **context) {
    Pair *pair = host_alloc(sizeof *pair);
    *pair = (Pair){run_new("variant"), run_new("plain")};
    *context = pair;
    return 0;
}

static inline int free_runs(void **context) {
    Pair *pair = *context;
    record_free(&pair->run);
    record_free(&pair->baseline);
    free(pair);
    return 0;
}

static inline bool compare(Pair *pair, ProofClass proof, double bound) {
    capture();
    bool holds = report_compare(&pair->run, &pair->baseline, proof, bound_of(bound));
    release();
    return holds;
}

// A test of two equal runs, which it then makes different.
#define RUNS(test) cmocka_unit_test_setup_teardown(test, two_equal_runs, free_runs)

#endif
