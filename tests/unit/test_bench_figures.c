// How many pairs a row of make bench takes: this depends on the clock and on the spread, and on nothing else.
#include "tests/bench/figures.h"

// cmocka.h needs these before it
// clang-format off
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
// clang-format on

static void the_median_is_the_middle_or_the_mean_of_both(void **context) {
    (void)context;
    double odd[] = {3, 1, 2}, even[] = {4, 1, 3, 2};
    assert_true(median(odd, 3) == 2);
    assert_true(median(even, 4) == 2.5);
    assert_true(odd[0] == 1 && odd[2] == 3);  // sorted, for the quartiles of the line
}

// Ratios with a normal distribution and a standard deviation of 3 %, from its quantiles: the quartiles are
// 1.349 standard deviations apart, and the median's standard error is 1.253 of them over the root of the
// count.
static void the_error_of_a_median_is_that_of_normal_values(void **context) {
    (void)context;
    enum { COUNT = 41 };
    double values[COUNT];
    for (int i = 0; i < COUNT; i++) {
        double target = (i + 0.5) / COUNT, low = -9, high = 9;
        for (int halving = 0; halving < 60; halving++) {
            double middle = (low + high) / 2;
            if (0.5 * erfc(-middle / sqrt(2)) < target) low = middle;
            else high = middle;
        }
        values[i * 29 % COUNT] = 5 * (1 + 0.03 * low);  // unsorted
    }
    double before[COUNT];
    memcpy(before, values, sizeof before);
    assert_true(fabs(median_error(values, COUNT) / (1.96 * 1.253 * 0.03 / sqrt(COUNT)) - 1) < 0.05);
    assert_memory_equal(values, before, sizeof before);  // their order is that of the rounds
    for (int i = 0; i < COUNT; i++) values[i] = -values[i];
    assert_true(median_error(values, COUNT) > 0);
}

static void a_row_ends_when_its_median_is_known_or_its_seconds_have_passed(void **context) {
    (void)context;
    double narrow[MOST_PAIRS], wide[MOST_PAIRS];
    for (int i = 0; i < MOST_PAIRS; i++) narrow[i] = 1 + 0.001 * (i % 5), wide[i] = 1 + 0.1 * (i % 5);
    for (int pairs = 0; pairs < FEWEST_PAIRS; pairs++) assert_false(measured(narrow, pairs, 100, 1));
    assert_true(measured(wide, FEWEST_PAIRS, 1, 1));
    for (int pairs = 0; pairs < LEAST_PAIRS; pairs++) assert_false(measured(narrow, pairs, 0.9, 1));
    assert_true(measured(narrow, LEAST_PAIRS, 0, 1));
    assert_false(measured(wide, LEAST_PAIRS, 0.9, 1));
    assert_true(measured(wide, LEAST_PAIRS, 1, 1));
    assert_false(measured(wide, MOST_PAIRS - 1, 0, 1));
    assert_true(measured(wide, MOST_PAIRS, 0, 1));
}

// The same ratios doubled or halved: a rule that depended on a target would behave differently.
static void the_rule_does_not_know_how_large_a_ratio_is(void **context) {
    (void)context;
    const double spread[] = {0.99, 1.002, 1.013, 0.997, 1.02, 0.98, 1.001, 1.004, 0.996};
    for (int pairs = LEAST_PAIRS; pairs <= 9; pairs++)
        for (double scale = 1.0 / 64; scale <= 64; scale *= 2) {
            double ratios[9];
            for (int i = 0; i < 9; i++) ratios[i] = scale * spread[i];
            assert_true(measured(ratios, pairs, 0, 1) == measured(spread, pairs, 0, 1));
        }
    assert_false(measured(spread, LEAST_PAIRS, 0, 1));
    assert_true(measured(spread, 9, 0, 1));
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_median_is_the_middle_or_the_mean_of_both),
        cmocka_unit_test(the_error_of_a_median_is_that_of_normal_values),
        cmocka_unit_test(a_row_ends_when_its_median_is_known_or_its_seconds_have_passed),
        cmocka_unit_test(the_rule_does_not_know_how_large_a_ratio_is),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
