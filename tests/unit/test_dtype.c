// Every code of every narrow format, and every boundary between two codes, against a reference built from the
// formats' definitions (fields and powers of two), without bit tricks.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include "tensor/tensor.h"
// needs those above
#include <cmocka.h>

typedef struct Format {
    const char *name;
    DType dtype;
    int bits, exponent_bits, mantissa_bits, bias;
    bool infinity;   // the highest exponent holds infinity and NaN; otherwise only its last code is NaN
    bool saturates;  // narrowing ends at the largest number
    double largest, smallest_normal, smallest;  // as the standards print them
} Format;

static const Format formats[] = {
    {"bf16", BF16, 16, 8, 7, 127, true, false, 0x1.fep127, 0x1p-126, 0x1p-133},
    {"f16", F16, 16, 5, 10, 15, true, false, 65504, 0x1p-14, 0x1p-24},
    {"e4m3", E4M3, 8, 4, 3, 7, false, true, 448, 0x1p-6, 0x1p-9},
    {"e5m2", E5M2, 8, 5, 2, 15, true, true, 57344, 0x1p-14, 0x1p-16},
};
enum { FORMATS = sizeof formats / sizeof *formats };

static uint32_t narrow(const Format *f, float x) {
    switch (f->dtype) {
        case BF16:
            return bf16_from_f32(x);
        case F16:
            return f16_from_f32(x);
        case E4M3:
            return e4m3_from_f32(x);
        default:
            return e5m2_from_f32(x);
    }
}

static float widen(const Format *f, uint32_t code) {
    switch (f->dtype) {
        case BF16:
            return f32_from_bf16((uint16_t)code);
        case F16:
            return f32_from_f16((uint16_t)code);
        case E4M3:
            return f32_from_e4m3((uint8_t)code);
        default:
            return f32_from_e5m2((uint8_t)code);
    }
}

static uint32_t sign_bit(const Format *f) { return 1u << (f->bits - 1); }

// What a code means, from its fields.
static double meaning(const Format *f, uint32_t code) {
    int mantissa = (int)(code & ((1u << f->mantissa_bits) - 1));
    int exponent = (int)(code >> f->mantissa_bits & ((1u << f->exponent_bits) - 1));
    double sign = code & sign_bit(f) ? -1 : 1;
    bool top = exponent == (1 << f->exponent_bits) - 1;
    if (top && f->infinity) return mantissa ? NAN : sign * INFINITY;
    if (top && mantissa == (1 << f->mantissa_bits) - 1) return NAN;
    if (exponent == 0) return sign * ldexp(mantissa, 1 - f->bias - f->mantissa_bits);
    return sign * ldexp((1 << f->mantissa_bits) + mantissa, exponent - f->bias - f->mantissa_bits);
}

// Codes 0 … largest_code are the finite numbers of one sign, in order.
static uint32_t largest_code(const Format *f) {
    uint32_t code = 0;
    while (isfinite(meaning(f, code + 1))) code++;
    return code;
}

static uint32_t f32_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float f32_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static bool is_quiet_nan(float x) { return isnan(x) && (f32_bits(x) & 0x00400000); }

static void expect_code(const Format *f, float x, uint32_t expected) {
    uint32_t code = narrow(f, x);
    if (code != expected)
        fail_msg("%s of %a: code 0x%x (%a) instead of 0x%x (%a)", f->name, x, code, meaning(f, code),
                 expected, meaning(f, expected));
}

// Both signs at once: every rule is symmetric.
static void expect_codes(const Format *f, float x, uint32_t expected) {
    expect_code(f, x, expected);
    expect_code(f, -x, expected | sign_bit(f));
}

static void sizes_and_names(void **state) {
    (void)state;
    static const struct {
        const char *name;
        size_t size;
    } expected[DTYPES] = {{"f64", 8},  {"f32", 4},  {"bf16", 2}, {"f16", 2},
                          {"e4m3", 1}, {"e5m2", 1}, {"i32", 4}};
    for (int i = 0; i < DTYPES; i++) {
        assert_string_equal(dtype_name((DType)i), expected[i].name);
        assert_int_equal(dtype_size((DType)i), expected[i].size);
    }
}

static void every_code_means_what_its_fields_say(void **state) {
    (void)state;
    for (const Format *f = formats; f < formats + FORMATS; f++)
        for (uint32_t code = 0; code < 1u << f->bits; code++) {
            double expected = meaning(f, code);
            float x = widen(f, code);
            bool same =
                isnan(expected) ? is_quiet_nan(x) : x == expected && !signbit(x) == !(code & sign_bit(f));
            if (!same)
                fail_msg("%s 0x%x is %a (0x%08x) instead of %a", f->name, code, x, f32_bits(x), expected);
        }
}

static void the_ends_are_those_of_the_standards(void **state) {
    (void)state;
    for (const Format *f = formats; f < formats + FORMATS; f++) {
        uint32_t largest = largest_code(f);
        assert_true(widen(f, largest) == f->largest);
        assert_true(widen(f, 1u << f->mantissa_bits) == f->smallest_normal);
        assert_true(widen(f, 1) == f->smallest);
        assert_true(widen(f, (1u << f->mantissa_bits) - 1) < f->smallest_normal);
    }
    assert_int_equal(largest_code(&formats[0]), 0x7f7f);
    assert_int_equal(largest_code(&formats[1]), 0x7bff);
    assert_int_equal(largest_code(&formats[2]), 0x7e);
    assert_int_equal(largest_code(&formats[3]), 0x7b);
}

static void every_code_survives_the_round_trip(void **state) {
    (void)state;
    for (const Format *f = formats; f < formats + FORMATS; f++)
        for (uint32_t code = 0; code < 1u << f->bits; code++) {
            double x = meaning(f, code);
            if (isnan(x)) continue;
            if (isinf(x) && f->saturates) expect_code(f, (float)x, largest_code(f) | (code & sign_bit(f)));
            else expect_code(f, (float)x, code);
        }
}

static void every_border_between_codes_rounds_to_nearest_even(void **state) {
    (void)state;
    for (const Format *f = formats; f < formats + FORMATS; f++) {
        uint32_t largest = largest_code(f);
        for (uint32_t code = 0; code < largest; code++) {
            double low = meaning(f, code), high = meaning(f, code + 1);
            float middle = (float)((low + high) / 2);
            assert_true(middle == (low + high) / 2);  // exact in f32
            expect_codes(f, middle, code + (code & 1));
            expect_codes(f, nextafterf(middle, -INFINITY), code);
            expect_codes(f, nextafterf(middle, INFINITY), code + 1);
            expect_codes(f, nextafterf((float)low, INFINITY), code);
            expect_codes(f, nextafterf((float)high, -INFINITY), code + 1);
        }
    }
}

static void overflow_saturates_or_becomes_infinity(void **state) {
    (void)state;
    for (const Format *f = formats; f < formats + FORMATS; f++) {
        uint32_t largest = largest_code(f), beyond = f->saturates ? largest : largest + 1;
        // The next number, if the format continued, and the boundary halfway to it.
        double step = meaning(f, largest) - meaning(f, largest - 1);
        float border = (float)(f->largest + step / 2);
        assert_true(border == f->largest + step / 2);
        expect_codes(f, nextafterf((float)f->largest, INFINITY), largest);
        expect_codes(f, nextafterf(border, 0), largest);
        // The last code of a format with infinity is odd: the tie goes up.
        expect_codes(f, border, beyond);
        expect_codes(f, nextafterf(border, INFINITY), beyond);
        expect_codes(f, 0x1.fffffep127f, beyond);
        expect_codes(f, INFINITY, beyond);
    }
}

static void powers_of_two_saturate_far_beyond_the_largest(void **state) {
    (void)state;
    for (const Format *f = formats; f < formats + FORMATS; f++)
        for (int e = -149; e <= 127; e++)
            for (int third = 0; third < 2; third++) {
                float x = ldexpf(third ? 1.5f : 1, e);
                if (e == -149 && third) continue;  // not an f32 number
                float y = widen(f, narrow(f, x));
                double expected = x > f->largest ? (f->saturates ? f->largest : INFINITY)
                                  : x >= f->smallest_normal
                                      ? x
                                      : nearbyint(x / f->smallest) * f->smallest;  // ties to even as well
                if (y != expected) fail_msg("%s of %a: %a instead of %a", f->name, x, y, expected);
            }
}

static void nan_stays_a_quiet_nan_of_its_sign(void **state) {
    (void)state;
    // A payload in each bit, and in all: a NaN that is rounded like a number would become infinity or zero.
    for (const Format *f = formats; f < formats + FORMATS; f++)
        for (int bit = 0; bit <= 23; bit++)
            for (uint32_t sign = 0; sign < 2; sign++) {
                uint32_t payload = bit < 23 ? 1u << bit : 0x7fffff;
                uint32_t bits = sign << 31 | 0x7f800000 | payload, code = narrow(f, f32_of(bits));
                if (!isnan(meaning(f, code)) || !(code & sign_bit(f)) != !sign)
                    fail_msg("%s of NaN 0x%08x is 0x%x", f->name, bits, code);
                if (f->infinity && !(code >> (f->mantissa_bits - 1) & 1))
                    fail_msg("%s of NaN 0x%08x is 0x%x, which signals", f->name, bits, code);
            }
}

static void zeros_keep_their_sign_and_small_numbers_go_to_zero(void **state) {
    (void)state;
    for (const Format *f = formats; f < formats + FORMATS; f++) {
        expect_codes(f, 0, 0);
        float half = (float)(f->smallest / 2);
        expect_codes(f, half, 0);
        expect_codes(f, nextafterf(half, 1), 1);
        expect_codes(f, 0x1p-149f, 0);
        assert_true(signbit(widen(f, sign_bit(f))));
    }
}

// A sample of all f32 numbers, spread evenly over the codes: 2^32 / STRIDE of them.
enum { STRIDE = 251 };

#ifdef __FLT16_MANT_DIG__
#define LEFT_OUT ""
static void f16_agrees_with_the_compiler(void **state) {
    (void)state;
    for (uint64_t bits = 0; bits < 1ull << 32; bits += STRIDE) {
        float x = f32_of((uint32_t)bits);
        if (isnan(x)) continue;
        _Float16 half = (_Float16)x;
        uint16_t code;
        memcpy(&code, &half, sizeof code);
        expect_code(&formats[1], x, code);
    }
    for (uint32_t i = 0; i < 1u << 16; i++) {
        uint16_t code = (uint16_t)i;
        _Float16 half;
        memcpy(&half, &code, sizeof half);
        float expected = (float)half, x = f32_from_f16(code);
        if (!isnan(expected) && f32_bits(x) != f32_bits(expected))
            fail_msg("f16 0x%x is %a instead of %a", i, x, expected);
    }
}
#else
#define LEFT_OUT " # SKIP this compiler has no _Float16 for this processor"
static void f16_agrees_with_the_compiler(void **state) { (void)state; }
#endif

// Rounds |x| to the format's grid with the processor's own rint, in f64.
static double rounded(const Format *f, double x) {
    if (isnan(x) || x == 0) return x;
    double magnitude = fabs(x);
    int exponent = isinf(x) ? 127 : ilogb(x);
    if (exponent < 1 - f->bias) exponent = 1 - f->bias;
    double step = ldexp(1, exponent - f->mantissa_bits);
    double y = isinf(x) ? magnitude : nearbyint(magnitude / step) * step;
    if (y > f->largest) y = f->saturates ? f->largest : INFINITY;
    return copysign(y, x);
}

static void all_over_f32_the_result_is_that_of_rint(void **state) {
    (void)state;
    for (const Format *f = formats; f < formats + FORMATS; f++)
        for (uint64_t bits = 0; bits < 1ull << 32; bits += 8 * STRIDE) {
            float x = f32_of((uint32_t)bits), y = widen(f, narrow(f, x));
            double expected = rounded(f, x);
            if (isnan(expected) ? !isnan(y) : y != expected || !signbit(y) != !signbit(expected))
                fail_msg("%s of %a (0x%08x): %a instead of %a", f->name, x, (uint32_t)bits, y, expected);
        }
}

// ---- dtype_convert ----

static void loops_agree_with_single_values(void **state) {
    (void)state;
    enum { MOST = 1100, GUARD = 16 };
    static float x[MOST], wide[MOST + GUARD];
    static uint8_t codes[2 * MOST + GUARD];
    // Every exponent and both signs occur; 40503 is odd, thus all top halves differ.
    for (uint32_t i = 0; i < MOST; i++) x[i] = f32_of(i * 40503u << 16 | i * 2654435761u >> 16);
    static const int64_t counts[] = {0, 1, 3, 7, 16, 31, 33, 64, 127, 511, 512, 513, 1031, MOST};
    for (const Format *f = formats; f < formats + FORMATS; f++)
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            int64_t n = counts[c];
            size_t size = dtype_size(f->dtype);
            memset(codes, 0xa5, sizeof codes);
            memset(wide, 0x5a, sizeof wide);
            dtype_convert(codes, f->dtype, x, F32, n);
            dtype_convert(wide, F32, codes, f->dtype, n);
            for (int64_t i = 0; i < n; i++) {
                uint16_t code = size == 1 ? codes[i] : 0;
                if (size == 2) memcpy(&code, codes + 2 * i, 2);
                if (code != narrow(f, x[i]) || f32_bits(wide[i]) != f32_bits(widen(f, code)))
                    fail_msg("%s, %lld values, number %lld: %a became 0x%x, and that %a", f->name,
                             (long long)n, (long long)i, x[i], code, wide[i]);
            }
            for (size_t i = 0; i < GUARD; i++) {
                assert_int_equal(codes[(size_t)n * size + i], 0xa5);
                assert_int_equal(((uint8_t *)(wide + n))[i], 0x5a);
            }
        }
}

// One value from a dtype to another by the shortest path that the contract names.
static double by_hand(double x, DType dtype) {
    for (const Format *f = formats; f < formats + FORMATS; f++)
        if (f->dtype == dtype) return widen(f, narrow(f, (float)x));
    if (dtype == F32) return (float)x;
    if (dtype == I32) return isnan(x) ? 0 : nearbyint(fmin(fmax(x, INT32_MIN), INT32_MAX));
    return x;
}

static void every_pair_of_dtypes_converts(void **state) {
    (void)state;
    enum { N = 1300 };  // more than two pieces of the pairs that need two hops
    static double x[N], back[N];
    static uint64_t from[N], to[N];
    for (int i = 0; i < N; i++) {
        double special[] = {0,     -0.0,   1,      -2.5, INFINITY, -INFINITY, NAN,
                            1e300, -1e300, 1e-300, 3e9,  -3e9,     65520,     449};
        int specials = sizeof special / sizeof *special;
        x[i] = i < specials ? special[i] : sin(i) * ldexp(1, i % 80 - 40);
    }
    for (int a = 0; a < DTYPES; a++)
        for (int b = 0; b < DTYPES; b++) {
            dtype_convert(from, (DType)a, x, F64, N);
            dtype_convert(to, (DType)b, from, (DType)a, N);
            dtype_convert(back, F64, to, (DType)b, N);
            for (int i = 0; i < N; i++) {
                double expected = by_hand(by_hand(x[i], (DType)a), (DType)b);
                bool same = isnan(expected) ? isnan(back[i]) : back[i] == expected;
                if (!same)
                    fail_msg("%a to %s to %s: %a instead of %a", x[i], dtype_name((DType)a),
                             dtype_name((DType)b), back[i], expected);
            }
        }
}

static void f64_goes_to_narrow_types_through_f32(void **state) {
    (void)state;
    // Just above the boundary of two codes, by less than f32 resolves: in f32 it is on the boundary, and
    // the tie goes to even. That is the price of a single path for all, and the contract says so.
    for (const Format *f = formats; f < formats + FORMATS; f++) {
        uint32_t even = (1u << f->mantissa_bits) * 4;
        double border = (meaning(f, even) + meaning(f, even + 1)) / 2;
        double x[3] = {border * (1 + 0x1p-40), border * (1 + 0x1p-20), border};
        uint8_t codes[6];
        dtype_convert(codes, f->dtype, x, F64, 3);
        for (int i = 0; i < 3; i++) {
            uint16_t code = codes[i];
            if (f->bits == 16) memcpy(&code, codes + 2 * i, 2);
            assert_int_equal(code, even + (i == 1));
        }
    }
}

static void integers_pass_exactly_and_saturate(void **state) {
    (void)state;
    int32_t whole[] = {0, 1, -1, 128255, INT32_MAX, INT32_MIN, 16777217}, back[7];
    double x[7];
    dtype_convert(x, F64, whole, I32, 7);
    dtype_convert(back, I32, x, F64, 7);
    assert_memory_equal(whole, back, sizeof whole);
    double odd[] = {2.5, 3.5, -0.5, 1e10, -1e10, NAN};
    int32_t expected[] = {2, 4, 0, INT32_MAX, INT32_MIN, 0};
    dtype_convert(back, I32, odd, F64, 6);
    assert_memory_equal(expected, back, sizeof expected);
}

// Of x in e5m2 times y in e4m3, in 14 bits.
static double sum_of(double sum, const double *x, const double *y, int count) {
    CodeProduct products[8];
    for (int i = 0; i < count; i++) products[i] = code_product(x[i], E5M2, y[i], E4M3);
    return sum_in_bits(sum, products, count, 14);
}

// 201696 is below 2^18, so 14 bits of it end with 16. Each number is cut by itself before their sum is.
static void sums_in_bits_lose_what_is_small_beside_the_largest(void **state) {
    (void)state;
    const double small[] = {15, 15, -15, 31.5, -16, 0x1p-20}, large[] = {-0x1p20},
                 endless[] = {INFINITY, 1};
    const double ones[] = {1, 1, 1, 1, 1, 1};
    assert_true(sum_of(16383, ones, ones, 1) == 16384);  // which is 2^14
    assert_true(sum_of(-16385, ones, ones, 0) == -16384);
    assert_true(sum_of(16383, ones, ones, 2) == 16384);
    assert_true(sum_of(201696, small, ones, 2) == 201696);
    assert_true(sum_of(201696, small, ones, 6) == 201696 + 16 - 16);
    assert_true(sum_of(-201696, small, ones, 6) == -201696 + 16 - 16);
    assert_true(sum_of(127.5, large, ones, 1) == -0x1p20);
    assert_true(sum_of(128.5, large, ones, 1) == 128 - 0x1p20);
    assert_true(sum_of(0, small, ones, 5) == 30.5);
    assert_true(sum_of(0, small, ones, 0) == 0);
    assert_true(sum_of(1, endless, ones, 2) == INFINITY);
    assert_true(isnan(sum_of(-INFINITY, endless, ones, 2)));
}

// 1.5 x 1.5 has the exponent 0, though it is above 2, so 2^-13 is kept beside it. A subnormal number has the
// exponent of the smallest normal one, -6 in e4m3 and -14 in e5m2: beside 2^-9 in e4m3 only what is in bits
// from 2^-19 on is kept. And a product that is 0 has no exponent.
static void products_have_the_exponents_of_their_factors(void **state) {
    (void)state;
    const double above_2[2][3] = {{1.5, -1.5, 0x1p-7}, {1.5, 1.5, 0x1p-6}};
    const double e4m3[2][4] = {{1, -1, 0x1p-13, 0x1p-14}, {0x1p-9, 0x1p-9, 0x1p-6, 0x1p-6}};
    const double e5m2[2][3] = {{0x1p-16, -0x1p-16, 0x1p-14}, {1, 1, 0x1p-6}};
    const double zero[2][2] = {{0, 0x1p-14}, {448, 0x1p-6}};
    assert_true(sum_of(0, above_2[0], above_2[1], 3) == 0x1p-13);
    assert_true(sum_of(0, e4m3[0], e4m3[1], 4) == 0x1p-19);
    assert_true(sum_of(0, e5m2[0], e5m2[1], 3) == 0x1p-20);
    assert_true(sum_of(0, zero[0], zero[1], 2) == 0x1p-20);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_and_names),
        cmocka_unit_test(every_code_means_what_its_fields_say),
        cmocka_unit_test(the_ends_are_those_of_the_standards),
        cmocka_unit_test(every_code_survives_the_round_trip),
        cmocka_unit_test(every_border_between_codes_rounds_to_nearest_even),
        cmocka_unit_test(overflow_saturates_or_becomes_infinity),
        cmocka_unit_test(powers_of_two_saturate_far_beyond_the_largest),
        cmocka_unit_test(nan_stays_a_quiet_nan_of_its_sign),
        cmocka_unit_test(zeros_keep_their_sign_and_small_numbers_go_to_zero),
        {.name = "f16_agrees_with_the_compiler" LEFT_OUT, .test_func = f16_agrees_with_the_compiler},
        cmocka_unit_test(all_over_f32_the_result_is_that_of_rint),
        cmocka_unit_test(loops_agree_with_single_values),
        cmocka_unit_test(every_pair_of_dtypes_converts),
        cmocka_unit_test(f64_goes_to_narrow_types_through_f32),
        cmocka_unit_test(integers_pass_exactly_and_saturate),
        cmocka_unit_test(sums_in_bits_lose_what_is_small_beside_the_largest),
        cmocka_unit_test(products_have_the_exponents_of_their_factors),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("dtype", tests, NULL, NULL);
}
