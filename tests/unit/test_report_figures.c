// What the report prints and writes: differences, bounds, counts, the verdict and JSON.
#include <cjson/cJSON.h>
#include <malloc.h>

#include "fatal.h"
#include "records.h"

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
    assert_true(isinf(difference("against zero", y, zero, 3).scale));
    assert_true(difference("both zero", zero, zero, 3).relative == 0);
    assert_true(isnan(difference("nan", (double[]){1, NAN, 2}, y, 3).maximum));
}

static void the_bound_is_four_times_the_error_of_the_dtype(void **context) {
    Pair *pair = *context;
    Bound bound = report_bound(&pair->baseline, NULL, 0);
    assert_true(bound.gradients == 1e-10 && bound.others == 1e-10);
    // The error of gradients; then that of parameters, which is no excuse for gradients.
    for (int64_t i = 0; i < sizes[1]; i++) pair->baseline.grad[1][i] *= 1.001;
    const double usual[] = {0, 5e-4, 2e-3}, others[] = {4e-3, 4e-3, 8e-3};  // measured: luck in the third
    for (int i = 0; i < 3; i++) {
        bound = report_bound(&pair->baseline, &pair->run, usual[i]);
        ASSERT_NEAR(bound.gradients, 4e-3, 1e-9);
        ASSERT_NEAR(bound.others, others[i], 1e-9);
    }
    for (int64_t i = 0; i < sizes[0]; i++) pair->baseline.param[0][i] *= 1.01;
    bound = report_bound(&pair->baseline, &pair->run, 0);
    ASSERT_NEAR(bound.gradients, 4e-3, 1e-9);
    ASSERT_NEAR(bound.others, 4e-2, 1e-9);
    pair->baseline.grad[1][7] = NAN;
    bound = report_bound(&pair->baseline, &pair->run, 0);
    assert_true(isnan(bound.gradients) && isnan(bound.others));
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
        assert_verdict(STATUS_FAIL, "FAIL test_report_figures: parameters: predicted ");
    }
    capture();
    bool nan = report_equal("parameters", NAN, NAN, "B");
    release();
    assert_false(nan);
    assert_verdict(STATUS_FAIL, "FAIL");
}

// Formulas divide: their last digits are rounding errors, not bytes.
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
    assert_verdict(STATUS_FAIL, "FAIL test_report_figures: 1 is not above 2\n");
    assert_null(strstr(printed, "another"));
    capture();
    report_that(true, "not seen");
    report_equal("bytes", 2, 2, "B");
    release();
    assert_null(strstr(printed, "not seen"));
    assert_verdict(STATUS_PASS, "PASS test_report_figures: all is well (1 of 1 counts as predicted)\n");
    assert_verdict(STATUS_PASS, "(nothing was checked)\n");
}

// ---- JSON ----

static char json_file[] = "/tmp/report-XXXXXX";

static cJSON *read_json(void) {
    FILE *in = fopen(json_file, "r");
    assert_non_null(in);
    static char text[1 << 18];
    text[fread(text, 1, sizeof text - 1, in)] = 0;
    fclose(in);
    cJSON *json = cJSON_Parse(text);
    if (!json) fail_msg("no JSON: %.300s", text);
    return json;
}

static cJSON *written(int expected_status) {
    capture();
    int status = report_verdict("done");
    release();
    assert_int_equal(status, expected_status);
    return read_json();
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
    report_that(true, "the loss of t\xe9xt falls");  // a path in Latin-1
    release();
    report_number("memory", "parameters", odd, "B");
    report_number("memory", "parameters", nextafter(odd, 1), "B");  // the last word counts
    report_series("loss", series, 4);
    report_series("not finite", (double[]){NAN, INFINITY, -INFINITY}, 3);
    cJSON *json = written(STATUS_PASS);
    for (int i = 0; i < 4; i++)
        ASSERT_NEAR(cJSON_GetArrayItem(at(json, "series/loss"), i)->valuedouble, series[i], 0);
    for (int i = 0; i < 3; i++)
        assert_true(cJSON_IsNull(cJSON_GetArrayItem(at(json, "series/not finite"), i)));
    ASSERT_NEAR(at(json, "numbers/memory/parameters/value")->valuedouble, nextafter(odd, 1), 0);
    assert_string_equal(at(json, "numbers/memory/parameters/unit")->valuestring, "B");
    assert_string_equal(at(json, "verdict/arguments/0")->valuestring, *base_arguments());
    ASSERT_NEAR(at(json, "counts/0/predicted")->valuedouble, 9007199254740991.0, 0);
    ASSERT_NEAR(at(json, "counts/0/measured")->valuedouble, 9007199254740991.0, 0);
    assert_true(cJSON_IsTrue(at(json, "counts/0/equal")));
    assert_string_equal(at(json, "conditions/0/otherwise")->valuestring, "the loss of t?xt falls");
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
    assert_string_equal(at(json, "verdict/program")->valuestring, "test_report_figures");
    cJSON_Delete(json);
    remove(json_file);
}

static void a_failed_run_says_so_in_the_json(void **context) {
    Pair *pair = *context;
    pair->run.grad[2][0] = nextafter(pair->run.grad[2][0], 1e9);
    strcpy(json_file, "/tmp/report-XXXXXX");
    close(mkstemp(json_file));
    report_json(json_file);
    compare(pair, PROOF_EXACT, 0);
    capture();
    report_equal("bytes", 1, 2, "B");
    release();
    cJSON *json = written(STATUS_FAIL);
    assert_string_equal(at(json, "verdict/status")->valuestring, "FAIL");
    assert_string_equal(at(json, "verdict/class")->valuestring, "not exact; 0 of 1 counts as predicted");
    assert_true(cJSON_IsFalse(at(json, "counts/0/equal")));
    cJSON_Delete(json);
    remove(json_file);
}

// A rank that breaks says so, and the others, rank 0 among them, end without a word: it writes the file.
static void break_on_a_rank(void *rank) {
    base_set_rank(*(int *)rank, 2, NULL);
    report_json(json_file);
    report_number("memory", "parameters", 12, "B");
    fatal("the loss is nan");
}

static void a_run_that_breaks_says_why_in_the_json(void **context) {
    (void)context;
    for (int rank = 0; rank < 2; rank++) {
        strcpy(json_file, "/tmp/report-XXXXXX");
        close(mkstemp(json_file));
        expect_fatal(break_on_a_rank, &rank, "the loss is nan");
        cJSON *json = read_json();
        assert_string_equal(at(json, "verdict/status")->valuestring, "ENDED");
        char *sentence = format_text("test_report_figures: rank %d: the loss is nan", rank);
        assert_string_equal(at(json, "verdict/text")->valuestring, sentence);
        ASSERT_NEAR(at(json, "numbers/memory/parameters/value")->valuedouble, 12, 0);
        free(sentence);
        cJSON_Delete(json);
        remove(json_file);
    }
}

// A run that proves thousands of layouts makes 100 checks for each.
static void without_a_file_no_row_is_kept(void **context) {
    Pair *pair = *context;
    size_t held = 0;
    bool quiet = report_quiet(true);
    for (int i = 0; i < 200; i++) {
        if (i == 100) held = mallinfo2().uordblks;
        char *name = format_text("figure %3d", i);
        compare(pair, PROOF_EXACT, 0);
        report_equal(name, 1, 1, "B");
        report_that(true, "%s", name);
        report_number("memory", name, 1, "B");
        report_series(name, (double[]){1, 2}, 2);
        free(name);
    }
    assert_int_equal(mallinfo2().uordblks, held);
    report_quiet(quiet);
}

static void report_nowhere(void *unused) {
    (void)unused;
    report_json("/nowhere/report.json");
}

static void a_json_path_that_cannot_be_written_is_fatal_at_once(void **context) {
    (void)context;
    expect_fatal(report_nowhere, NULL, "/nowhere/report.json cannot be written");
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_difference_has_exact_figures),
        RUNS(the_bound_is_four_times_the_error_of_the_dtype),
        cmocka_unit_test(a_count_that_is_off_by_one_byte_fails),
        cmocka_unit_test(a_count_that_is_off_by_rounding_is_equal),
        cmocka_unit_test(the_verdict_names_the_first_failure_and_then_starts_anew),
        RUNS(the_json_holds_every_figure_at_full_precision),
        RUNS(a_failed_run_says_so_in_the_json),
        RUNS(without_a_file_no_row_is_kept),
        cmocka_unit_test(a_run_that_breaks_says_why_in_the_json),
        cmocka_unit_test(a_json_path_that_cannot_be_written_is_fatal_at_once),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
