// The last line of a failure: a figure that is off by a whole factor gets the size that may explain it, and
// one that is off otherwise gets nothing.
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "report/diagnosis.h"
#include "report/report.h"

// cmocka.h needs these before it
// clang-format off
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
// clang-format on

static int four_ranks_of_dp_and_three_micro_batches(void **context) {
    (void)context;
    diagnosis_forget();
    diagnosis_ranks("dp", 4);
    diagnosis_ranks("tp", 1);
    diagnosis_micro_batches(3);
    return 0;
}

// "" demands that nothing is printed.
static void assert_says(const char *text, const char *words, double figure) {
    bool says = *words ? strstr(text, words) != NULL : !*text;
    if (!says) fail_msg("of %g it is said \"%s\", and not \"%s\"", figure, text, words);
}

static void a_gradient_that_is_off_by_a_factor_is_told_which(void **context) {
    (void)context;
    static const struct {
        double scale, relative;
        const char *words;
    } cases[] = {
        {0.25, 0.75, "usually averaged twice over the 4 ranks of dp"},
        {0.2502, 0.7501, "usually averaged twice over the 4 ranks of dp"},  // in bf16
        {4, 3, "usually summed twice over the 4 ranks of dp"},
        {1.0 / 3, 2.0 / 3, "usually scaled twice by 1 / the 3 micro-batches"},
        {3, 2, "usually summed, and not averaged, over the 3 micro-batches"},
        {2, 1, "usually added twice"},
        {-1, 2, "usually a sign"},
        {0, 1, "usually never written"},
        {0.25, 0.9, "usually only one rank's share: the sum over the 4 ranks of dp"},
        {0.25, 0.7, "is missing or incomplete, or some of the 3 micro-batches are left out"},
        {1.1, 0.1, ""},
        {0.9, 0.5, ""},
        {NAN, NAN, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_says(diagnose_gradient(cases[i].scale, cases[i].relative), cases[i].words, cases[i].scale);
}

static void sizes_that_are_equal_are_both_named(void **context) {
    (void)context;
    diagnosis_micro_batches(4);
    const char *text = diagnose_gradient(0.25, 0.75);
    assert_says(text, "usually averaged twice over the 4 ranks of dp, or scaled twice by 1 / the 4", 0.25);
}

static void a_factor_of_two_on_two_ranks_may_also_be_an_addition_too_many(void **context) {
    (void)context;
    diagnosis_forget();
    diagnosis_ranks("dp", 2);
    assert_says(diagnose_gradient(2, 1), "summed twice over the 2 ranks of dp", 2);
    assert_says(diagnose_gradient(2, 1), ", or added twice", 2);
    assert_says(diagnose_gradient(-1, 2), "usually a sign", -1);
}

static void a_loss_that_is_off_by_log_n_is_told_of_its_softmax(void **context) {
    (void)context;
    const double loss = 5.5;
    assert_says(diagnose_loss(loss + log(4), loss), "usually gathered logits", log(4));
    assert_says(diagnose_loss(loss - log(4), loss), "only one part of the vocabulary", -log(4));
    assert_says(diagnose_loss(loss / 4, loss), "averaged twice over the 4 ranks of dp", loss / 4);
    assert_says(diagnose_loss(3 * loss, loss), "not averaged, over the 3 micro-batches", 3 * loss);
    assert_says(diagnose_loss(-loss, loss), "usually a sign", -loss);
    assert_says(diagnose_loss(loss + 0.01, loss), "", loss + 0.01);
    assert_says(diagnose_loss(NAN, loss), "", NAN);
}

static void a_count_that_is_off_by_a_factor_is_told_which(void **context) {
    (void)context;
    static const struct {
        double count, expected;
        const char *unit, *words;
    } cases[] = {
        {400, 100, "B", "usually whole tensors instead of shards over the 4 ranks of dp"},
        {25, 100, "B", "usually sharded once more over the 4 ranks of dp"},
        {400, 300, "B", "usually a rank's own part is sent, too, on the 4 ranks of dp"},
        {4, 3, "", ""},
        {300, 400, "B", "usually one part too few"},
        {30, 10, "", "usually once for each of the 3 micro-batches, where once was due"},
        {10, 30, "", "usually once for all of the 3 micro-batches"},
        {200, 100, "", "usually done twice"},
        {200, 100, "B", "or in a dtype of twice the width"},
        {50, 100, "B", "usually in a dtype of half the width"},
        {7, 0, "", "usually a call that this technique replaces"},
        {7, 0, "chunks", ""},
        {0, 7, "", "usually a call that is never made"},
        {101, 100, "B", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_says(diagnose_count(cases[i].count, cases[i].expected, cases[i].unit), cases[i].words,
                    cases[i].count);
}

// ---- the last line of a program ----

static char printed[1 << 14];

static const char *last_line(int status) {
    fflush(stdout);
    int terminal = dup(STDOUT_FILENO);
    FILE *file = tmpfile();
    dup2(fileno(file), STDOUT_FILENO);
    int got = report_verdict("all is well");
    fflush(stdout);
    ssize_t size = pread(STDOUT_FILENO, printed, sizeof printed - 1, 0);
    printed[size > 0 ? size : 0] = 0;
    dup2(terminal, STDOUT_FILENO);
    close(terminal);
    fclose(file);
    assert_int_equal(got, status);
    return printed;
}

enum { TENSORS = 2, COUNT = 50, STEPS = 3 };

static Record run_new(const char *title, double factor) {
    Param param[TENSORS];
    Params params = {.count = TENSORS, .param = param};
    for (int t = 0; t < TENSORS; t++) {
        param[t] = (Param){.count = COUNT, .full = {COUNT, 1}};
        snprintf(param[t].name, sizeof param[t].name, "tensor.%d", t);
    }
    Record record = record_new(title, STEPS, &params);
    for (int t = 0; t < TENSORS; t++) {
        record.grad[t] = host_alloc(COUNT * sizeof(double));
        record.param[t] = host_alloc(COUNT * sizeof(double));
        for (int i = 0; i < COUNT; i++) {
            record.grad[t][i] = factor * sin(i + 10 * t + 1);
            record.param[t][i] = cos(i + t) + 1e-3 * factor;
        }
    }
    // The first loss does not depend on the gradients; everything after it does.
    for (int s = 0; s < STEPS; s++)
        record.loss[s] = 5.5 - 0.1 * s * factor, record.grad_norm[s] = factor * (1 + 0.1 * s);
    return record;
}

static void gradients_are_blamed_before_the_losses_that_they_spoil(void **context) {
    (void)context;
    Record run = run_new("4 ranks", 0.25), baseline = run_new("one device", 1);
    report_quiet(true);
    report_compare(&run, &baseline, PROOF_REASSOCIATED, bound_of(1e-10));
    report_quiet(false);
    const char *line = last_line(STATUS_FAIL);
    assert_says(line, "FAIL test_diagnosis: gradients of 4 ranks, tensor.", 0.25);
    assert_says(line, "scale 0.25; 2 of 2 fail, all by this factor: usually averaged twice over", 0.25);
    run.loss[0] += log(4);
    report_compare(&run, &baseline, PROOF_REASSOCIATED, bound_of(1e-10));
    assert_says(last_line(STATUS_FAIL), "FAIL test_diagnosis: losses of 4 ranks", log(4));
    assert_says(printed, "usually gathered logits", log(4));
    record_free(&run);
    record_free(&baseline);
}

// Another order of sums changes the last bits of every gradient, and none by a factor.
static void last_bits_are_no_factor(void **context) {
    (void)context;
    Record run = run_new("4 ranks", 1), baseline = run_new("one device", 1);
    for (int t = 0; t < TENSORS; t++) run.grad[t][3] *= 1 + 1e-15, run.grad[t][4] *= 1 - 1e-15;
    report_compare(&run, &baseline, PROOF_EXACT, bound_of(0));
    assert_says(last_line(STATUS_FAIL), "scale 1); 2 of 2 fail", 1);
    assert_null(strstr(printed, "by this factor"));
    record_free(&run);
    record_free(&baseline);
}

static void parameters_alone_blame_the_optimizer(void **context) {
    (void)context;
    Record run = run_new("4 ranks", 1), baseline = run_new("one device", 1);
    run.param[1][3] *= 1.5;
    report_compare(&run, &baseline, PROOF_EXACT, bound_of(0));
    assert_says(last_line(STATUS_FAIL), "gradients are right: usually the optimizer's step", 1.5);
    assert_says(printed, "tensor.1: 1 element differs from one device in all", 1.5);
    record_free(&run);
    record_free(&baseline);
}

static void a_norm_that_the_first_step_has_right_blames_the_steps(void **context) {
    (void)context;
    Record run = run_new("4 ranks", 1), baseline = run_new("one device", 1);
    run.grad_norm[2] *= 1 + 1e-9;
    report_compare(&run, &baseline, PROOF_REASSOCIATED, bound_of(1e-10));
    assert_says(last_line(STATUS_FAIL), "the first step's norm is right: usually the optimizer's step", 1);
    for (int s = 0; s < STEPS; s++) run.grad_norm[s] *= 2;
    report_compare(&run, &baseline, PROOF_REASSOCIATED, bound_of(1e-10));
    assert_says(last_line(STATUS_FAIL), "are right: usually a norm that counts a shard twice", 2);
    record_free(&run);
    record_free(&baseline);
}

static void quiet_shows_what_fails_and_counts_what_holds(void **context) {
    (void)context;
    bool before = report_quiet(true);
    assert_false(before);
    report_equal("calls", 5, 5, "");
    assert_true(report_holds());
    assert_string_equal(report_evidence(), "1 of 1 counts as predicted");
    report_equal("all_reduce: calls", 1, 3, "");
    assert_false(report_holds());
    assert_true(report_quiet(false));
    assert_says(last_line(STATUS_FAIL), "once for each of the 3 micro-batches, where once was due", 3);
}

#define FOUR(test) cmocka_unit_test_setup(test, four_ranks_of_dp_and_three_micro_batches)

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        FOUR(a_gradient_that_is_off_by_a_factor_is_told_which),
        FOUR(sizes_that_are_equal_are_both_named),
        FOUR(a_factor_of_two_on_two_ranks_may_also_be_an_addition_too_many),
        FOUR(a_loss_that_is_off_by_log_n_is_told_of_its_softmax),
        FOUR(a_count_that_is_off_by_a_factor_is_told_which),
        FOUR(last_bits_are_no_factor),
        FOUR(gradients_are_blamed_before_the_losses_that_they_spoil),
        FOUR(parameters_alone_blame_the_optimizer),
        FOUR(a_norm_that_the_first_step_has_right_blames_the_steps),
        FOUR(quiet_shows_what_fails_and_counts_what_holds),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
