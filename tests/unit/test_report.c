// The judge itself: a comparison must be able to fail in each way in which a run can be wrong.
#include "records.h"

// The comparison fails in every class, and the verdict with it.
static void assert_refused(Pair *pair, const char *what) {
    for (int proof = PROOF_EXACT; proof <= PROOF_ROUNDED; proof++) {
        bool holds = compare(pair, (ProofClass)proof, 1e-3);
        if (holds) fail_msg("class %d accepts %s:\n%s", proof, what, printed);
        assert_printed("FAIL");
        assert_verdict(STATUS_FAIL, "FAIL test_report: ");
    }
}

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
                   "FAIL test_report: parameters of variant, tensor.3: 1 element differs from plain");
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

// Within the bound, but all in one direction, so not noise.
static void a_small_wrong_factor_within_the_bound_fails_by_its_scale(void **context) {
    Pair *pair = *context;
    for (int64_t i = 0; i < sizes[8]; i++) pair->run.grad[8][i] *= 1.03;
    assert_false(compare(pair, PROOF_ROUNDED, 0.04));
    assert_printed("1.0300000000  FAIL  tensor.8");
    assert_verdict(STATUS_FAIL, "off from plain by 3.00e-02 in scale (bound 2.00e-02), scale 1.03");
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

// An expert without tokens has no gradient: the error is measured against the largest gradient instead.
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

// All labels may be ignored: then there is nothing to compare, which proves nothing.
static void a_record_that_is_zero_as_a_whole_never_passes(void **context) {
    Pair *pair = *context;
    for (int t = 0; t < TENSORS; t++)
        for (int64_t i = 0; i < sizes[t]; i++) pair->run.grad[t][i] = pair->baseline.grad[t][i] = 0;
    assert_refused(pair, "gradients that are all zero");
    assert_false(compare(pair, PROOF_EXACT, 0));
    assert_verdict(STATUS_FAIL, "gradients of variant: those of plain are all zero, so nothing was compared");
    // A single tensor may be zero: an expert without tokens.
    pair->run.grad[3][5] = pair->baseline.grad[3][5] = 2;
    assert_true(compare(pair, PROOF_EXACT, 0));
    assert_verdict(STATUS_PASS, "PASS");
    pair->run.grad[0][0] = 1e-300;
    assert_false(compare(pair, PROOF_EXACT, 0));
    assert_verdict(STATUS_FAIL, "tensor.0");
}

static void a_bound_that_lets_a_factor_of_two_pass_proves_nothing(void **context) {
    Pair *pair = *context;
    // The same bits are a proof whatever the bound.
    assert_true(compare(pair, PROOF_ROUNDED, 0.7));
    assert_null(strstr(printed, "too coarse"));
    assert_verdict(STATUS_PASS, "PASS");
    pair->run.grad[1][0] *= 1 + 1e-3;
    assert_true(compare(pair, PROOF_ROUNDED, 0.5));
    assert_true(compare(pair, PROOF_ROUNDED, 0.7));
    assert_null(strstr(printed, "too coarse"));  // once is enough
    assert_verdict(STATUS_UNPROVEN,
                   "UNPROVEN test_report: this dtype is too coarse for this size: its own error makes a "
                   "bound of 5.00e-01");
    // Gradients are those of step 1, before the optimizer.
    assert_true(report_compare(&pair->run, &pair->baseline, PROOF_ROUNDED, (Bound){0.04, 0.9, NULL, 0}));
    assert_verdict(STATUS_UNPROVEN,
                   "UNPROVEN test_report: at this --lr rounding errors grow from step to step, to a bound of "
                   "9.00e-01, which lets a factor of two pass; a smaller --lr or fewer steps (--steps) can "
                   "be judged");
    assert_true(compare(pair, PROOF_ROUNDED, 0.49));
    assert_verdict(STATUS_PASS, "PASS");
    // Then later steps may differ by any factor, as rounding has grown to the size of the figures …
    pair->run.loss[1] *= 3;
    pair->run.param[1][3] += 100;
    assert_true(report_compare(&pair->run, &pair->baseline, PROOF_ROUNDED, (Bound){0.04, 0.9, "--shown", 0}));
    assert_verdict(STATUS_UNPROVEN, "a smaller --lr or fewer steps (--shown) can be judged");
    // … but what is wrong in step 1 stays wrong, and so does NaN.
    pair->run.loss[0] *= 1.03;
    assert_false(report_compare(&pair->run, &pair->baseline, PROOF_ROUNDED, (Bound){0.04, 0.9, NULL, 0}));
    assert_verdict(STATUS_FAIL, "FAIL test_report: losses of variant: off from plain by 3.00e-02 in scale "
                                "(bound 2.00e-02), scale 1.03");
    pair->run.loss[0] /= 1.03;
    pair->run.grad_norm[0] *= 2;
    assert_false(report_compare(&pair->run, &pair->baseline, PROOF_ROUNDED, (Bound){0.04, 0.9, NULL, 0}));
    assert_verdict(STATUS_FAIL, "FAIL test_report: gradient norms of variant: off from plain by 1.00e+00 "
                                "relative (bound 4.00e-02), scale 2: the gradients are right");
    pair->run.grad_norm[0] /= 2;
    pair->run.loss[1] = NAN;
    assert_false(compare(pair, PROOF_ROUNDED, 0.5));
    assert_verdict(STATUS_FAIL, "FAIL");
    const double bounds[] = {NAN, INFINITY};
    for (int i = 0; i < 2; i++) {
        assert_false(compare(pair, PROOF_ROUNDED, bounds[i]));
        assert_verdict(STATUS_FAIL, "lets everything pass");
    }
}

// A token that one device sends to another expert, as its own scores say, is counted if that was a near tie.
static void experts_taken_alike_must_have_been_near_ties(void **context) {
    Pair *pair = *context;
    pair->baseline.routing = (Routing){.choices = 40, .ties = 3, .apart = 0.01};
    assert_true(compare(pair, PROOF_ROUNDED, 0.02));
    assert_verdict(STATUS_PASS, "(rounded, 0.0e+00 of 2.0e-02; 3 of 40 choices of experts were near ties");
    const double apart[] = {0.021, INFINITY, NAN};
    for (int i = 0; i < 3; i++) {
        pair->baseline.routing.apart = apart[i];
        assert_false(compare(pair, PROOF_ROUNDED, 0.02));
        assert_verdict(STATUS_FAIL, "FAIL test_report: experts of variant: scores are off from plain by ");
    }
    // What rounding has made of the baseline's own logits is a second bound, unless a factor of two passes.
    Bound wider = {0.02, 0.02, NULL, 0.04}, narrow = {0.02, 0.02, NULL, 0.025};
    Bound coarse = {0.02, 0.02, NULL, 0.7};
    pair->baseline.routing.apart = 0.03;
    assert_true(report_compare(&pair->run, &pair->baseline, PROOF_ROUNDED, wider));
    assert_false(report_compare(&pair->run, &pair->baseline, PROOF_ROUNDED, narrow));
    assert_verdict(STATUS_FAIL, "off from plain by 3.00e-02 relative (bound 2.50e-02)");
    pair->baseline.routing.apart = 0.9;
    assert_true(report_compare(&pair->run, &pair->baseline, PROOF_ROUNDED, coarse));
    assert_verdict(STATUS_UNPROVEN, "rounding errors grow from step to step, to a bound of 7.00e-01");
    coarse.logits = INFINITY;
    assert_false(report_compare(&pair->run, &pair->baseline, PROOF_ROUNDED, coarse));
    assert_verdict(STATUS_FAIL, "off from plain by 9.00e-01 relative (bound 2.00e-02)");
    pair->baseline.routing = (Routing){.choices = 40};
    assert_true(compare(pair, PROOF_ROUNDED, 0.02));
    assert_verdict(STATUS_PASS, "(rounded, 0.0e+00 of 2.0e-02)");
}

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
        RUNS(experts_taken_alike_must_have_been_near_ties),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
