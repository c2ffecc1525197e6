// Random numbers: Philox's published test vectors, no state between calls, and the right distributions. All
// of it is deterministic: the statistical bounds (five standard errors) hold always or never.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/rng.h"
// needs those above
#include <cmocka.h>

// Rows "philox4x32 10" of tests/kat_vectors in the Random123 distribution: counter, key, answer.
static const uint32_t known[][10] = {
    {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
    {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d, 0x41c83b0e,
     0xa20bc7c6, 0x6d5451fd},
    {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb,
     0x5001e420, 0x24126ea1},
};

static uint64_t join(const uint32_t *words) { return words[0] | (uint64_t)words[1] << 32; }

static void known_answers_of_philox(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const uint32_t *row = known[i];
        uint64_t index = join(row), stream = join(row + 2), seed = join(row + 4);
        uint64_t low = join(row + 6), high = join(row + 8);
        uint64_t bits = rng_bits(seed, stream, index);
        if (bits != low) fail_msg("row %zu: %016llx", i, (unsigned long long)bits);
        double uniform = rng_uniform(seed, stream, index), normal = rng_normal(seed, stream, index);
        assert_true(uniform == ldexp((double)(low >> 11), -53));
        double radius = sqrt(-2 * log(ldexp((double)(low >> 11) + 1, -53)));
        double expected = radius * cos(2 * M_PI * ldexp((double)(high >> 11), -53));
        if (!(fabs(normal - expected) <= 1e-14)) fail_msg("row %zu: %.17g, not %.17g", i, normal, expected);
    }
}

static void streams_of_names(void **state) {
    (void)state;
    // Published FNV-1a values; their top bits happen to be set.
    assert_true(rng_stream("") == 0xcbf29ce484222325);
    assert_true(rng_stream("a") == 0xaf63dc4c8601ec8c);
    assert_true(rng_stream("foobar") == 0x85944171f73967e8);
    static const char *const part[] = {"input_layernorm",  "self_attn.q_proj", "self_attn.k_proj",
                                       "self_attn.v_proj", "self_attn.o_proj", "post_attention_layernorm",
                                       "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};
    enum { LAYERS = 126, PARTS = sizeof part / sizeof *part };
    static uint64_t stream[LAYERS * PARTS];
    int count = 0;
    for (int layer = 0; layer < LAYERS; layer++)
        for (int i = 0; i < PARTS; i++) {
            char name[80];
            snprintf(name, sizeof name, "model.layers.%d.%s.weight", layer, part[i]);
            stream[count] = rng_stream(name);
            if (stream[count] < 1ull << 63) fail_msg("%s is a small number", name);
            for (int j = 0; j < count; j++)
                if (stream[j] == stream[count]) fail_msg("%s has the stream of another tensor", name);
            count++;
        }
}

static void a_number_does_not_depend_on_what_was_asked_before(void **state) {
    (void)state;
    enum { N = 1001 };
    static double whole[N], again[N];
    for (uint64_t i = 0; i < N; i++) whole[i] = rng_normal(7, 40, i);
    for (uint64_t i = N; i-- > 0;) again[i] = rng_normal(7, 40, i);
    assert_memory_equal(whole, again, sizeof whole);
    memset(again, 0, sizeof again);
    for (uint64_t step = 0, i = 0; step < N; step++, i = (i + 331) % N) {
        again[i] = rng_normal(7, 40, i);
        rng_normal(8, 41, i);
        rng_uniform(7, 40, i + 1);
    }
    assert_memory_equal(whole, again, sizeof whole);
#pragma omp parallel for schedule(dynamic, 3)
    for (int i = 0; i < N; i++) again[i] = rng_normal(7, 40, (uint64_t)i);
    assert_memory_equal(whole, again, sizeof whole);
}

static void a_shard_is_its_slice_of_the_whole(void **state) {
    (void)state;
    // A (ROWS, COLUMNS) weight, sharded by rows or columns among 1, 2, 3, 4 and 7 ranks that draw separately.
    enum { ROWS = 29, COLUMNS = 31 };
    static double whole[ROWS][COLUMNS], joined[ROWS][COLUMNS];
    uint64_t stream = rng_stream("model.layers.0.mlp.up_proj.weight");
    for (uint64_t i = 0; i < ROWS * COLUMNS; i++)
        whole[i / COLUMNS][i % COLUMNS] = rng_normal(1234, stream, i);
    static const int ranks[] = {1, 2, 3, 4, 7};
    for (size_t r = 0; r < sizeof ranks / sizeof *ranks; r++)
        for (int by_columns = 0; by_columns < 2; by_columns++) {
            memset(joined, 0, sizeof joined);
            for (int rank = ranks[r] - 1; rank >= 0; rank--) {
                int extent = by_columns ? COLUMNS : ROWS;
                int first = extent * rank / ranks[r], last = extent * (rank + 1) / ranks[r];
                for (int i = by_columns ? 0 : first; i < (by_columns ? ROWS : last); i++)
                    for (int j = by_columns ? first : 0; j < (by_columns ? last : COLUMNS); j++)
                        joined[i][j] = rng_normal(1234, stream, (uint64_t)(i * COLUMNS + j));
            }
            assert_memory_equal(whole, joined, sizeof whole);
        }
}

// ---- distributions ----

enum { MANY = 400000 };
static double sample[MANY], other[MANY];

static void expect_near(const char *what, double value, double expected, double error) {
    if (!(fabs(value - expected) <= 5 * error))
        fail_msg("%s is %.6f instead of %.6f, %.1f standard errors off", what, value, expected,
                 fabs(value - expected) / error);
}

static double correlation(const double *x, const double *y, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * y[i];
    return sum / n;
}

static void moments_of_the_normals(void **state) {
    (void)state;
    double sum[5] = {0};
    int beyond[4] = {0};
    for (int i = 0; i < MANY; i++) {
        double x = rng_normal(1, RNG_TEST, (uint64_t)i), power = 1;
        for (int k = 1; k <= 4; k++) sum[k] += power *= x;
        for (int k = 1; k <= 3; k++) beyond[k] += x > k;
        assert_true(fabs(x) < 8.6);  // the largest that 53 bits can give
    }
    double n = MANY;
    expect_near("the mean", sum[1] / n, 0, sqrt(1 / n));
    expect_near("the variance", sum[2] / n, 1, sqrt(2 / n));
    expect_near("the third moment", sum[3] / n, 0, sqrt(15 / n));
    expect_near("the fourth moment", sum[4] / n, 3, sqrt(96 / n));
    for (int k = 1; k <= 3; k++) {
        double tail = erfc(k / sqrt(2)) / 2;
        expect_near("the upper tail", beyond[k] / n, tail, sqrt(tail * (1 - tail) / n));
    }
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void the_whole_curve_is_normal(void **state) {
    (void)state;
    for (int i = 0; i < MANY; i++) sample[i] = rng_normal(2, RNG_TEST, (uint64_t)i);
    qsort(sample, MANY, sizeof *sample, by_size);
    double distance = 0;  // Kolmogorov's: beyond 1.95 / sqrt(n) with probability 1 / 1000
    for (int i = 0; i < MANY; i++) {
        double below = erfc(-sample[i] / sqrt(2)) / 2;
        distance = fmax(distance, fmax(fabs(below - (double)i / MANY), fabs(below - (i + 1.0) / MANY)));
    }
    if (!(distance <= 1.95 / sqrt(MANY))) fail_msg("distance %.6f", distance);
}

static void neighbours_streams_and_seeds_are_independent(void **state) {
    (void)state;
    double error = 1 / sqrt(MANY);
    for (int i = 0; i < MANY; i++) sample[i] = rng_normal(3, 100, (uint64_t)i);
    expect_near("the correlation of neighbours", correlation(sample, sample + 1, MANY - 1), 0, error);
    for (int i = 0; i < MANY; i++) other[i] = rng_normal(3, 101, (uint64_t)i);
    expect_near("the correlation of two streams", correlation(sample, other, MANY), 0, error);
    for (int i = 0; i < MANY; i++) other[i] = rng_normal(4, 100, (uint64_t)i);
    expect_near("the correlation of two seeds", correlation(sample, other, MANY), 0, error);
    // A tensor of more than 2^32 elements does not start over.
    for (int i = 0; i < MANY; i++) other[i] = rng_normal(3, 100, (uint64_t)i + (1ull << 32));
    expect_near("the correlation across 2^32", correlation(sample, other, MANY), 0, error);
}

static void uniforms_fill_the_interval(void **state) {
    (void)state;
    enum { BINS = 100 };
    int count[BINS] = {0}, odd = 0;
    double sum = 0, n = MANY;
    for (int i = 0; i < MANY; i++) {
        double x = rng_uniform(5, RNG_TEST, (uint64_t)i);
        assert_true(x >= 0 && x < 1);
        sum += x;
        count[(int)(x * BINS)]++;
        odd += (uint64_t)(x * 0x1p53) & 1;  // the last of the 53 bits
    }
    expect_near("the mean", sum / n, 0.5, sqrt(1 / (12 * n)));
    expect_near("the share of odd last bits", odd / n, 0.5, 0.5 / sqrt(n));
    double chi = 0;
    for (int i = 0; i < BINS; i++) chi += (count[i] - n / BINS) * (count[i] - n / BINS) / (n / BINS);
    expect_near("chi squared", chi, BINS - 1, sqrt(2 * (BINS - 1)));
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers_of_philox),
        cmocka_unit_test(streams_of_names),
        cmocka_unit_test(a_number_does_not_depend_on_what_was_asked_before),
        cmocka_unit_test(a_shard_is_its_slice_of_the_whole),
        cmocka_unit_test(moments_of_the_normals),
        cmocka_unit_test(the_whole_curve_is_normal),
        cmocka_unit_test(neighbours_streams_and_seeds_are_independent),
        cmocka_unit_test(uniforms_fill_the_interval),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("rng", tests, NULL, NULL);
}
