// The judge itself: each check must be able to fail, for each way in which a run can be wrong.
#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
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

static void capture(void) {
    fflush(stdout);
    terminal = dup(STDOUT_FILENO);
    FILE *file = tmpfile();
    assert_non_null(file);
    dup2(fileno(file), STDOUT_FILENO);
    fclose(file);
}

static void release(void) {
    fflush(stdout);
    ssize_t size = pread(STDOUT_FILENO, printed, sizeof printed - 1, 0);
    printed[size > 0 ? size : 0] = 0;
    dup2(terminal, STDOUT_FILENO);
    close(terminal);
}

static void assert_printed(const char *text) {
    if (!strstr(printed, text)) fail_msg("\"%s\" is not in what was printed:\n%s", text, printed);
}

static void assert_verdict(int status, const char *last_line) {
    capture();
    int got = report_verdict("all is %s", "well");
    release();
    assert_printed(last_line);
    if (got != status) fail_msg("exit status %d, expected %d", got, status);
}

// ---- runs ----

enum { TENSORS = 12, STEPS = 4 };
static const int64_t sizes[TENSORS] = {7, 300, 1, 64, 65, 7, 33, 128, 2, 5, 31, 256};

static double value_at(int tensor, int64_t i) { return sin(1.7 * (double)(i + 1) + tensor) * (1 + tensor); }

// A run with made-up values, all tensors distinct.
static Record run_new(const char *title) {
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

static int two_equal_runs(void **context) {
    Pair *pair = host_alloc(sizeof *pair);
    *pair = (Pair){run_new("variant"), run_new("plain")};
    *context = pair;
    return 0;
}

static int free_runs(void **context) {
    Pair *pair = *context;
    record_free(&pair->run);
    record_free(&pair->baseline);
    free(pair);
    return 0;
}

static bool compare(Pair *pair, ProofClass proof, double bound) {
    capture();
    bool holds = report_compare(&pair->run, &pair->baseline, proof, bound);
    release();
    return holds;
}

// The comparison fails in every class, and the verdict with it.
static void assert_refused(Pair *pair, const char *what) {
    for (int proof = PROOF_EXACT; proof <= PROOF_ROUNDED; proof++) {
        bool holds = compare(pair, (ProofClass)proof, 1e-3);
        if (holds) fail_msg("class %d accepts %s:\n%s", proof, what, printed);
        assert_printed("FAIL");
        assert_verdict(STATUS_FAIL, "FAIL test_report: ");
    }
}

// ---- comparison ----

static void equal_runs_pass_and_the_verdict_says_how(void **context) {
    assert_true(compare(*context, PROOF_EXACT, 0));
    assert_verdict(STATUS_PASS, "PASS test_report: all is well (exact, 0 bits differ)\n");
    assert_true(compare(*context, PROOF_REASSOCIATED, 1e-10));
    assert_verdict(STATUS_PASS, "PASS test_report: all is well (reassociated, 0.0e+00 of 1.0e-10)\n");
    assert_true(compare(*context, PROOF_ROUNDED, 1e-2));
    assert_verdict(STATUS_PASS, "PASS test_report: all is well (rounded, 0.0e+00 of 1.0e-02)\n");
}

static void one_unit_in_the_last_place_is_not_exact(void **context) {
    Pair *pair = *context;
    pair->run.param[3][17] = nextafter(pair->run.param[3][17], 1e9);
    assert_false(compare(pair, PROOF_EXACT, 0));
    assert_printed("tensor.3");
    assert_verdict(STATUS_FAIL,
                   "FAIL test_report: parameters of variant, tensor.3: 1 elements differ from plain");
    assert_true(compare(pair, PROOF_REASSOCIATED, 1e-10));
    assert_verdict(STATUS_PASS, "PASS");
}

static void negative_zero_is_not_exactly_zero(void **context) {
    Pair *pair = *context;
    pair->run.grad[0][0] = -0.0;
    pair->baseline.grad[0][0] = 0.0;
    assert_false(compare(pair, PROOF_EXACT, 0));
    assert_verdict(STATUS_FAIL, "FAIL");
}

// Eleven tensors of twelve are perfect: a mean, or one norm over all of them, would hide the smallest.
static void a_factor_of_two_in_one_tensor_fails(void **context) {
    Pair *pair = *context;
    pair->run.grad[2][0] *= 2;
    assert_false(compare(pair, PROOF_ROUNDED, 0.2));
    assert_printed("2.0000000000  FAIL  tensor.2");
    assert_verdict(STATUS_FAIL,
                   "FAIL test_report: gradients of variant, tensor.2: off from plain by 1.00e+00");
}

static void gradients_that_are_apart_have_a_row_besides(void **context) {
    Pair *pair = *context;
    for (int i = 4; i < 8; i++) pair->run.apart[i] = pair->baseline.apart[i] = true;
    pair->run.grad[5][1] *= 1 + 1e-12;
    pair->run.grad[9][0] *= 1 + 1e-11;
    assert_true(compare(pair, PROOF_REASSOCIATED, 1e-10));
    const char *all = strstr(printed, "12 gradients"), *apart = strstr(printed, "4 router gradients");
    assert_true(all && apart && strstr(all, "tensor.9") < apart && strstr(apart, "tensor.5"));
}

static void the_row_names_the_worst_tensor(void **context) {
    Pair *pair = *context;
    pair->run.grad[4][0] *= 1.5;
    pair->run.grad[7][0] = 1e3;
    pair->run.grad[9][0] *= 1.001;
    assert_false(compare(pair, PROOF_REASSOCIATED, 1e-10));
    assert_printed("tensor.7");
    assert_null(strstr(printed, "tensor.4"));
    assert_null(strstr(printed, "tensor.9"));
    assert_verdict(STATUS_FAIL, "tensor.7");
}

static void a_wrong_sign_fails(void **context) {
    Pair *pair = *context;
    for (int64_t i = 0; i < sizes[6]; i++) pair->run.grad[6][i] *= -1;
    assert_false(compare(pair, PROOF_ROUNDED, 0.4));
    assert_printed("-1.0000000000  FAIL  tensor.6");
    assert_verdict(STATUS_FAIL, "scale -1");
}

// Within the bound, but all in one direction: not noise.
static void a_small_wrong_factor_within_the_bound_fails_by_its_scale(void **context) {
    Pair *pair = *context;
    for (int64_t i = 0; i < sizes[8]; i++) pair->run.grad[8][i] *= 1.03;
    assert_false(compare(pair, PROOF_ROUNDED, 0.04));
    assert_printed("1.0300000000  FAIL  tensor.8");
    assert_verdict(STATUS_FAIL, "scale 1.03");
    assert_true(compare(pair, PROOF_ROUNDED, 0.07));
    assert_verdict(STATUS_PASS, "PASS");
}

static void noise_of_that_size_without_direction_passes(void **context) {
    Pair *pair = *context;
    for (int64_t i = 0; i < sizes[1]; i++) pair->run.grad[1][i] *= 1 + 0.03 * (i % 2 ? 1 : -1);
    assert_true(compare(pair, PROOF_ROUNDED, 0.04));
    assert_verdict(STATUS_PASS, "PASS");
}

static void a_nan_never_passes(void **context) {
    Pair *pair = *context;
    double *places[] = {&pair->run.loss[STEPS - 1],   &pair->run.grad_norm[0], &pair->run.grad[5][3],
                        &pair->run.param[11][255],    &pair->baseline.loss[0], &pair->baseline.grad[0][0],
                        &pair->baseline.param[1][299]};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        double before = *places[i];
        *places[i] = NAN;
        assert_refused(pair, "a NaN");
        *places[i] = before;
    }
    pair->run.grad[5][3] = pair->baseline.grad[5][3] = NAN;
    assert_refused(pair, "the same NaN on both sides");
}

static void an_infinity_never_passes_a_bound(void **context) {
    Pair *pair = *context;
    pair->run.param[1][0] = INFINITY;
    assert_refused(pair, "an infinity");
}

static void a_wrong_loss_or_gradient_norm_fails(void **context) {
    Pair *pair = *context;
    pair->run.loss[2] *= 1.01;
    assert_refused(pair, "another loss");
    pair->run.loss[2] = pair->baseline.loss[2];
    pair->run.grad_norm[3] *= 1.01;
    assert_refused(pair, "another gradient norm");
}

static void swapped_tensors_fail(void **context) {
    Pair *pair = *context;
    double *grad = pair->run.grad[0];  // tensors 0 and 5 have the same shape
    pair->run.grad[0] = pair->run.grad[5];
    pair->run.grad[5] = grad;
    assert_refused(pair, "two swapped tensors");
}

static void tensors_are_matched_by_name(void **context) {
    Pair *pair = *context;
    Record *run = &pair->run;  // the same tensors in another order are the same run
    char *name = run->name[0];
    double *grad = run->grad[0], *param = run->param[0];
    int64_t count = run->count[0];
    run->name[0] = run->name[1], run->grad[0] = run->grad[1], run->param[0] = run->param[1];
    run->count[0] = run->count[1];
    run->name[1] = name, run->grad[1] = grad, run->param[1] = param, run->count[1] = count;
    assert_true(compare(pair, PROOF_EXACT, 0));
    assert_verdict(STATUS_PASS, "PASS");
}

static void a_missing_tensor_fails_on_either_side(void **context) {
    Pair *pair = *context;
    pair->run.tensors--;
    assert_refused(pair, "a missing tensor");
    assert_printed("tensor.11 is missing");
    pair->run.tensors++;
    pair->baseline.tensors--;
    assert_refused(pair, "a tensor too many");
    pair->baseline.tensors++;
}

static void a_tensor_of_another_size_or_never_recorded_fails(void **context) {
    Pair *pair = *context;
    pair->run.count[1]--;
    assert_refused(pair, "a shorter tensor");
    pair->run.count[1]++;
    double *grad = pair->run.grad[4];
    pair->run.grad[4] = NULL;
    assert_refused(pair, "a gradient that was never recorded");
    pair->run.grad[4] = grad;
    pair->run.steps--;
    assert_refused(pair, "a run with fewer steps");
    pair->run.steps++;
}

// An expert without a token has no gradient: the error is measured against the largest gradient instead.
static void a_zero_baseline_is_compared_and_not_skipped(void **context) {
    Pair *pair = *context;
    for (int64_t i = 0; i < sizes[3]; i++) pair->run.grad[3][i] = pair->baseline.grad[3][i] = 0;
    assert_true(compare(pair, PROOF_EXACT, 0));
    assert_true(compare(pair, PROOF_REASSOCIATED, 1e-10));
    for (int64_t i = 0; i < sizes[3]; i++) pair->run.grad[3][i] = 1e-16;
    assert_true(compare(pair, PROOF_REASSOCIATED, 1e-10));
    assert_verdict(STATUS_PASS, "PASS");
    for (int64_t i = 0; i < sizes[3]; i++) pair->run.grad[3][i] = 1e-3;
    assert_refused(pair, "a gradient where there is none");
    assert_printed("tensor.3");
}

// Labels may all be ignored: then there is nothing to compare, and that proves nothing.
static void a_record_that_is_zero_as_a_whole_never_passes(void **context) {
    Pair *pair = *context;
    for (int t = 0; t < TENSORS; t++)
        for (int64_t i = 0; i < sizes[t]; i++) pair->run.grad[t][i] = pair->baseline.grad[t][i] = 0;
    assert_refused(pair, "gradients that are all zero");
    assert_false(compare(pair, PROOF_EXACT, 0));
    assert_verdict(STATUS_FAIL, "gradients of variant: all of plain's are zero, so nothing was compared");
    // One tensor alone may be: an expert without tokens.
    pair->run.grad[3][5] = pair->baseline.grad[3][5] = 2;
    assert_true(compare(pair, PROOF_EXACT, 0));
    assert_verdict(STATUS_PASS, "PASS");
    pair->run.grad[0][0] = 1e-300;
    assert_false(compare(pair, PROOF_EXACT, 0));
    assert_verdict(STATUS_FAIL, "tensor.0");
}

static void a_bound_that_lets_a_factor_of_two_pass_proves_nothing(void **context) {
    Pair *pair = *context;
    assert_true(compare(pair, PROOF_ROUNDED, 0.5));
    assert_true(compare(pair, PROOF_ROUNDED, 0.7));
    assert_null(strstr(printed, "too coarse"));  // once is enough
    assert_verdict(STATUS_UNPROVEN,
                   "UNPROVEN test_report: this dtype is too coarse for this size: its own error makes a "
                   "bound of 5.00e-01");
    assert_true(compare(pair, PROOF_ROUNDED, 0.49));
    assert_verdict(STATUS_PASS, "PASS");
    // What is wrong stays wrong.
    pair->run.loss[1] *= 3;
    assert_false(compare(pair, PROOF_ROUNDED, 0.5));
    assert_verdict(STATUS_FAIL, "FAIL test_report: losses of variant");
    pair->run.loss[1] = NAN;
    assert_false(compare(pair, PROOF_ROUNDED, 0.5));
    assert_verdict(STATUS_FAIL, "FAIL");
    const double bounds[] = {NAN, INFINITY};
    for (int i = 0; i < 2; i++) {
        assert_false(compare(pair, PROOF_ROUNDED, bounds[i]));
        assert_verdict(STATUS_FAIL, "lets everything pass");
    }
}

// ---- figures ----

static void a_difference_has_exact_figures(void **context) {
    (void)context;
    const double y[] = {3, -4, 0}, x[] = {3, -4, 0.5}, twice[] = {6, -8, 0}, zero[] = {0, 0, 0};
    Difference d = difference("x", x, y, 3);
    ASSERT_NEAR(d.relative, 0.1, 1e-15);
    ASSERT_NEAR(d.maximum, 0.5, 0);
    ASSERT_NEAR(d.scale, 1, 0);
    d = difference("twice", twice, y, 3);
    ASSERT_NEAR(d.relative, 1, 0);
    ASSERT_NEAR(d.maximum, 4, 0);
    ASSERT_NEAR(d.scale, 2, 0);
    d = difference("zero", zero, y, 3);
    ASSERT_NEAR(d.scale, 0, 0);
    ASSERT_NEAR(d.relative, 1, 0);
    d = difference("equal", y, y, 3);
    assert_true(d.relative == 0 && d.maximum == 0 && d.scale == 1);
    assert_true(isinf(difference("against zero", y, zero, 3).relative));
    assert_true(difference("both zero", zero, zero, 3).relative == 0);
    assert_true(isnan(difference("nan", (double[]){1, NAN, 2}, y, 3).maximum));
}

static void the_bound_is_four_times_the_error_of_the_dtype(void **context) {
    Pair *pair = *context;
    ASSERT_NEAR(report_bound(&pair->baseline, NULL), 1e-10, 0);
    for (int64_t i = 0; i < sizes[1]; i++) pair->baseline.grad[1][i] *= 1.001;
    ASSERT_NEAR(report_bound(&pair->baseline, &pair->run), 4e-3, 1e-9);
    pair->baseline.grad[1][7] = NAN;
    assert_true(isnan(report_bound(&pair->baseline, &pair->run)));
}

static void a_count_that_is_off_by_one_byte_fails(void **context) {
    (void)context;
    const double counts[] = {0, 4096, 1099511627776.0, 9007199254740991.0};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        capture();
        bool equal = report_equal("parameters", counts[i], counts[i], "B");
        bool more = report_equal("parameters", counts[i], counts[i] + 1, "B");
        release();
        assert_true(equal);
        if (more) fail_msg("%.17g passes as %.17g", counts[i] + 1, counts[i]);
        assert_verdict(STATUS_FAIL, "FAIL test_report: parameters: predicted ");
    }
    capture();
    bool nan = report_equal("parameters", NAN, NAN, "B");
    release();
    assert_false(nan);
    assert_verdict(STATUS_FAIL, "FAIL");
}

// Formulas divide: their last digits are rounding, and no bytes.
static void a_count_that_is_off_by_rounding_is_equal(void **context) {
    (void)context;
    const struct {
        double predicted, measured;
        bool equal;
    } cases[] = {
        {1037216.0 + 2.3e-10, 1037216, true},
        {3 * (1.0 / 3 + 1e-17), 1, true},
        {4e18 + 1024, 4e18, true},
        {1e13 + 0.25, 1e13, false},
        {1e15, 1e15 + 1, false},
        {4e18, 4.00001e18, false},
        {0.5, 0.50001, false},
        {1.0 / 3, 0.1 + 0.7 / 3, true},
        {1e-3, 0, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        capture();
        bool equal = report_equal("bytes", cases[i].predicted, cases[i].measured, "B");
        release();
        if (equal != cases[i].equal) fail_msg("case %zu is %s", i, equal ? "equal" : "different");
        assert_verdict(equal ? STATUS_PASS : STATUS_FAIL, equal ? "PASS" : "FAIL");
    }
}

static void the_verdict_names_the_first_failure_and_then_starts_anew(void **context) {
    (void)context;
    capture();
    bool first = report_that(1 > 2, "1 is not above %d", 2);
    report_that(false, "another reason");
    report_equal("bytes", 1, 1, "B");
    release();
    assert_false(first);
    assert_verdict(STATUS_FAIL, "FAIL test_report: 1 is not above 2\n");
    assert_null(strstr(printed, "another"));
    capture();
    report_that(true, "not seen");
    report_equal("bytes", 2, 2, "B");
    release();
    assert_null(strstr(printed, "not seen"));
    assert_verdict(STATUS_PASS, "PASS test_report: all is well (1 of 1 counts as predicted)\n");
    assert_verdict(STATUS_PASS, "(nothing was checked)\n");
}

// ---- JSON ----

static char json_file[] = "/tmp/report-XXXXXX";

static cJSON *written(int expected_status) {
    capture();
    int status = report_verdict("done");
    release();
    assert_int_equal(status, expected_status);
    FILE *in = fopen(json_file, "r");
    assert_non_null(in);
    static char text[1 << 18];
    text[fread(text, 1, sizeof text - 1, in)] = 0;
    fclose(in);
    cJSON *json = cJSON_Parse(text);
    if (!json) fail_msg("no JSON: %.300s", text);
    return json;
}

// "comparisons/0/gradients": keys and places from the root.
static const cJSON *at(const cJSON *json, const char *path) {
    char *copy = format_text("%s", path), *rest = copy;
    for (char *key; json && (key = strsep(&rest, "/"));)
        json = cJSON_IsArray(json) ? cJSON_GetArrayItem(json, atoi(key))
                                   : cJSON_GetObjectItemCaseSensitive(json, key);
    free(copy);
    if (!json) fail_msg("%s is not in the JSON", path);
    return json;
}

static void the_json_holds_every_figure_at_full_precision(void **context) {
    Pair *pair = *context;
    const double odd = 0.1 + 0.2, series[] = {odd, nextafter(1, 2), 1.0 / 3, 5e-324};
    pair->run.grad[2][0] = nextafter(pair->run.grad[2][0], 1e9);
    close(mkstemp(json_file));
    report_json(json_file);
    compare(pair, PROOF_REASSOCIATED, 1e-10);
    capture();
    report_equal("gradient bytes", 9007199254740991.0, 9007199254740991.0, "B");
    report_that(true, "the loss falls");
    release();
    report_number("memory", "parameters", odd, "B");
    report_number("memory", "parameters", nextafter(odd, 1), "B");  // the last word counts
    report_series("loss", series, 4);
    report_series("odd", (double[]){NAN, INFINITY}, 2);
    report_text("model", "tiny \"llama\"");
    cJSON *json = written(STATUS_PASS);
    for (int i = 0; i < 4; i++)
        ASSERT_NEAR(cJSON_GetArrayItem(at(json, "series/loss"), i)->valuedouble, series[i], 0);
    assert_string_equal(at(json, "series/odd/0")->valuestring, "NaN");
    assert_string_equal(at(json, "series/odd/1")->valuestring, "Infinity");
    ASSERT_NEAR(at(json, "numbers/memory/parameters/value")->valuedouble, nextafter(odd, 1), 0);
    assert_string_equal(at(json, "numbers/memory/parameters/unit")->valuestring, "B");
    assert_string_equal(at(json, "texts/model")->valuestring, "tiny \"llama\"");
    ASSERT_NEAR(at(json, "counts/0/predicted")->valuedouble, 9007199254740991.0, 0);
    ASSERT_NEAR(at(json, "counts/0/measured")->valuedouble, 9007199254740991.0, 0);
    assert_true(cJSON_IsTrue(at(json, "counts/0/equal")));
    assert_string_equal(at(json, "conditions/0/otherwise")->valuestring, "the loss falls");
    assert_string_equal(at(json, "comparisons/0/class")->valuestring, "reassociated");
    assert_int_equal(cJSON_GetArraySize(at(json, "comparisons/0/gradients")), TENSORS);
    Difference d = difference("", pair->run.grad[2], pair->baseline.grad[2], 1);
    // the parameter's name has a dot, not a slash
    ASSERT_NEAR(at(json, "comparisons/0/gradients/tensor.2/relative")->valuedouble, d.relative, 0);
    ASSERT_NEAR(at(json, "comparisons/0/gradients/tensor.2/scale")->valuedouble, d.scale, 0);
    ASSERT_NEAR(at(json, "comparisons/0/parameters/tensor.7/maximum")->valuedouble, 0, 0);
    assert_true(d.relative > 0);
    assert_string_equal(at(json, "verdict/status")->valuestring, "PASS");
    char *evidence = format_text("reassociated, %.1e of 1.0e-10; 1 of 1 counts as predicted", d.relative);
    assert_string_equal(at(json, "verdict/class")->valuestring, evidence);
    free(evidence);
    assert_string_equal(at(json, "verdict/program")->valuestring, "test_report");
    cJSON_Delete(json);
    remove(json_file);
}

static void a_failed_run_says_so_in_the_json(void **context) {
    (void)context;
    strcpy(json_file, "/tmp/report-XXXXXX");
    close(mkstemp(json_file));
    report_json(json_file);
    capture();
    report_equal("bytes", 1, 2, "B");
    release();
    cJSON *json = written(STATUS_FAIL);
    assert_string_equal(at(json, "verdict/status")->valuestring, "FAIL");
    assert_true(cJSON_IsFalse(at(json, "counts/0/equal")));
    cJSON_Delete(json);
    remove(json_file);
}

static void a_json_path_that_cannot_be_written_is_fatal_at_once(void **context) {
    (void)context;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        fclose(stderr);
        report_json("/nowhere/report.json");
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), STATUS_USAGE);
}

#define RUNS(test) cmocka_unit_test_setup_teardown(test, two_equal_runs, free_runs)

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        RUNS(equal_runs_pass_and_the_verdict_says_how),
        RUNS(one_unit_in_the_last_place_is_not_exact),
        RUNS(negative_zero_is_not_exactly_zero),
        RUNS(a_factor_of_two_in_one_tensor_fails),
        RUNS(gradients_that_are_apart_have_a_row_besides),
        RUNS(the_row_names_the_worst_tensor),
        RUNS(a_wrong_sign_fails),
        RUNS(a_small_wrong_factor_within_the_bound_fails_by_its_scale),
        RUNS(noise_of_that_size_without_direction_passes),
        RUNS(a_nan_never_passes),
        RUNS(an_infinity_never_passes_a_bound),
        RUNS(a_wrong_loss_or_gradient_norm_fails),
        RUNS(swapped_tensors_fail),
        RUNS(tensors_are_matched_by_name),
        RUNS(a_missing_tensor_fails_on_either_side),
        RUNS(a_tensor_of_another_size_or_never_recorded_fails),
        RUNS(a_zero_baseline_is_compared_and_not_skipped),
        RUNS(a_record_that_is_zero_as_a_whole_never_passes),
        RUNS(a_bound_that_lets_a_factor_of_two_pass_proves_nothing),
        cmocka_unit_test(a_difference_has_exact_figures),
        RUNS(the_bound_is_four_times_the_error_of_the_dtype),
        cmocka_unit_test(a_count_that_is_off_by_one_byte_fails),
        cmocka_unit_test(a_count_that_is_off_by_rounding_is_equal),
        cmocka_unit_test(the_verdict_names_the_first_failure_and_then_starts_anew),
        RUNS(the_json_holds_every_figure_at_full_precision),
        cmocka_unit_test(a_failed_run_says_so_in_the_json),
        cmocka_unit_test(a_json_path_that_cannot_be_written_is_fatal_at_once),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
