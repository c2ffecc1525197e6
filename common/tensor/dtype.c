// dtype.c: the number formats, and every conversion between them.
// A narrow format is a sign, an exponent with a bias and m bits of mantissa, and nothing else: one function
// rounds to all of them, and one reads them all. They differ in what happens beyond the largest number:
//
//             sign exp mantissa   bias   largest   beyond it        smallest normal, subnormal
//     bf16      1   8     7        127   3.39e38   infinity         2^-126   2^-133
//     f16       1   5    10         15     65504   infinity         2^-14    2^-24
//     e4m3      1   4     3          7       448   448 (no inf)     2^-6     2^-9
//     e5m2      1   5     2         15     57344   57344            2^-14    2^-16
//
// The codes of one sign are ordered as their values are. So rounding may carry from the mantissa into the
// exponent, or from the largest number into infinity, and the result is still the right code.
//
// The code has no branch, and no `?` that a compiler could turn into one: the loops at the end must become
// vector code, since training in bf16 converts every operand of every matrix multiply.
#include <limits.h>
#include <math.h>
#include <string.h>

#include "tensor.h"

#if defined __AVX512F__ && !defined __clang__
#pragma GCC target "prefer-vector-width=512"  // where GCC would use half of it
#endif

// Largest codes, without the sign. e4m3 uses the codes that would be infinity for numbers.
enum {
    BF16_NAN = 0x7fc0,
    F16_INFINITY = 0x7c00,
    F16_NAN = 0x7e00,
    E4M3_LARGEST = 0x7e,
    E4M3_NAN = 0x7f,
    E5M2_LARGEST = 0x7b,
    E5M2_INFINITY = 0x7c,
    E5M2_NAN = 0x7e,
};
static const uint32_t F32_INFINITY = 0x7f800000, F32_NAN = 0x7fc00000, F32_MAGNITUDE = 0x7fffffff;

size_t dtype_size(DType dtype) {
    static const size_t size[DTYPES] = {8, 4, 2, 2, 1, 1, 4};
    CHECK((unsigned)dtype < DTYPES, "dtype_size: there is no dtype number %d", (int)dtype);
    return size[dtype];
}

DType dtype_wider(DType a, DType b) { return dtype_size(b) > dtype_size(a) ? b : a; }

const char *dtype_name(DType dtype) {
    static const char *const name[DTYPES] = {"f64", "f32", "bf16", "f16", "e4m3", "e5m2", "i32"};
    CHECK((unsigned)dtype < DTYPES, "dtype_name: there is no dtype number %d", (int)dtype);
    return name[dtype];
}

DType dtype_full(DType storage) { return storage == F64 ? F64 : F32; }

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float power_of_two(int exponent) { return float_of((uint32_t)(127 + exponent) << 23); }

// c ? a : b
static inline uint32_t choose(bool c, uint32_t a, uint32_t b) {
    uint32_t all = -(uint32_t)c;
    return (a & all) | (b & ~all);
}

// ---- one value ----

// The code nearest to a positive f32, given as its bits, in a format with m mantissa bits; ties to even.
// Beyond the format's largest number the codes simply go on: the caller limits them, and handles NaN.
static inline uint32_t nearest_code(uint32_t magnitude, int m, int bias) {
    // Drop the low bits after adding just under a half, and a whole half if what stays is odd.
    int drop = 23 - m;
    uint32_t odd = magnitude >> drop & 1, half = 1u << (drop - 1);
    uint32_t normal = ((magnitude + half - 1 + odd) >> drop) - ((uint32_t)(127 - bias) << m);
    // Subnormals lie 2^(1 - bias - m) apart. So do the f32 numbers from 2^(24 - bias - m) on: the adder
    // rounds to them, nearest and ties to even, and the low bits of the sum count the steps.
    float ruler = power_of_two(24 - bias - m);
    uint32_t subnormal = bits_of(float_of(magnitude) + ruler) - bits_of(ruler);
    return choose(magnitude < (uint32_t)(128 - bias) << 23, subnormal, normal);
}

// The f32 bits of a finite code without its sign; always exact.
static inline uint32_t code_value(uint32_t code, int m, int bias) {
    uint32_t normal = (code << (23 - m)) + ((uint32_t)(127 - bias) << 23);
    uint32_t subnormal = bits_of((float)(int32_t)code * power_of_two(1 - bias - m));
    return choose(code < 1u << m, subnormal, normal);
}

// bf16 is the upper half of f32, subnormals included. A NaN must not pass through the addition: one whose
// payload lies in the lower half would become infinity.
static inline uint16_t to_bf16(float x) {
    uint32_t bits = bits_of(x), odd = bits >> 16 & 1;
    uint32_t rounded = (bits + 0x7fff + odd) >> 16;
    uint32_t quiet = (bits >> 16 & 0x8000) | BF16_NAN;
    return (uint16_t)choose((bits & F32_MAGNITUDE) > F32_INFINITY, quiet, rounded);
}

static inline float of_bf16(uint16_t code) {
    uint32_t bits = (uint32_t)code << 16;
    uint32_t quiet = choose((bits & F32_MAGNITUDE) > F32_INFINITY, 1u << 22, 0);
    return float_of(bits | quiet);
}

// The code without its sign of any f32: at most `largest`, unless it is NaN.
static inline uint32_t code_of(float x, int m, int bias, uint32_t largest, uint32_t nan) {
    uint32_t magnitude = bits_of(x) & F32_MAGNITUDE, code = nearest_code(magnitude, m, bias);
    code = choose(code < largest, code, largest);
    return choose(magnitude > F32_INFINITY, nan, code);
}

// The f32 bits of a code without its sign, of a format that has an infinity.
static inline uint32_t bits_of_code(uint32_t code, int m, int bias, uint32_t infinity) {
    uint32_t bits = choose(code < infinity, code_value(code, m, bias), F32_INFINITY);
    return choose(code > infinity, F32_NAN, bits);
}

static inline uint16_t to_f16(float x) {
    return (uint16_t)((bits_of(x) >> 16 & 0x8000) | code_of(x, 10, 15, F16_INFINITY, F16_NAN));
}
static inline float of_f16(uint16_t code) {
    return float_of((uint32_t)(code & 0x8000) << 16 | bits_of_code(code & 0x7fff, 10, 15, F16_INFINITY));
}

static inline uint8_t to_e4m3(float x) {
    return (uint8_t)((bits_of(x) >> 24 & 0x80) | code_of(x, 3, 7, E4M3_LARGEST, E4M3_NAN));
}
static inline float of_e4m3(uint8_t code) {
    uint32_t magnitude = code & 0x7f, bits = code_value(magnitude, 3, 7);
    bits = choose(magnitude == E4M3_NAN, F32_NAN, bits);
    return float_of((uint32_t)(code & 0x80) << 24 | bits);
}

static inline uint8_t to_e5m2(float x) {
    return (uint8_t)((bits_of(x) >> 24 & 0x80) | code_of(x, 2, 15, E5M2_LARGEST, E5M2_NAN));
}
static inline float of_e5m2(uint8_t code) {
    return float_of((uint32_t)(code & 0x80) << 24 | bits_of_code(code & 0x7f, 2, 15, E5M2_INFINITY));
}

static inline float f64_to_f32(double x) { return (float)x; }
static inline double f32_to_f64(float x) { return x; }
static inline double i32_to_f64(int32_t x) { return x; }

// A plain cast would be undefined outside the range, and for NaN.
static inline int32_t f64_to_i32(double x) {
    double bounded = x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : x;
    return isnan(x) ? 0 : (int32_t)nearbyint(bounded);
}

uint16_t bf16_from_f32(float x) { return to_bf16(x); }
float f32_from_bf16(uint16_t code) { return of_bf16(code); }
uint16_t f16_from_f32(float x) { return to_f16(x); }
float f32_from_f16(uint16_t code) { return of_f16(code); }
uint8_t e4m3_from_f32(float x) { return to_e4m3(x); }
float f32_from_e4m3(uint8_t code) { return of_e4m3(code); }
uint8_t e5m2_from_f32(float x) { return to_e5m2(x); }
float f32_from_e5m2(uint8_t code) { return of_e5m2(code); }

// x truncated to so many significant bits, towards zero.
static double cut_to_bits(double x, int bits) {
    int power = 0;
    const double fraction = frexp(x, &power);
    return ldexp(trunc(ldexp(fraction, bits)), power - bits);
}

// ilogb(x) of a normal number, without a call; of any other, -1023 or 1024.
static inline int exponent_field(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (int)(bits >> 52 & 0x7ff) - 1023;
}

static inline int exponent_of(double x, DType codes) {
    const int smallest = codes == E4M3 ? -6 : -14, exponent = exponent_field(x);
    return isfinite(x) && exponent > smallest ? exponent : smallest;
}

CodeProduct code_product(double x, DType of_x, double y, DType of_y) {
    return (CodeProduct){x * y, exponent_of(x, of_x) + exponent_of(y, of_y)};
}

double sum_in_bits(double sum, const CodeProduct *products, int count, int bits) {
    double all = sum;
    int largest = sum == 0 ? INT_MIN : exponent_field(sum);
    for (int i = 0; i < count; i++) {
        all += products[i].value;
        if (products[i].value != 0 && products[i].exponent > largest) largest = products[i].exponent;
    }
    if (largest == INT_MIN || !isfinite(all)) return all;
    const int last = largest + 1 - bits;  // 2^last is the last bit
    const double unit = ldexp(1, last), units = ldexp(1, -last);
    all = trunc(sum * units);
    for (int i = 0; i < count; i++) all += trunc(products[i].value * units);
    return cut_to_bits(all, bits) * unit;
}

// ---- many values ----

typedef void Loop(void *to, const void *from, int64_t count);

#define LOOP(name, To, From, one_value)                             \
    static void name(void *to, const void *from, int64_t count) {   \
        To *restrict y = to;                                        \
        const From *restrict x = from;                              \
        for (int64_t i = 0; i < count; i++) y[i] = one_value(x[i]); \
    }
LOOP(loop_f64_f32, float, double, f64_to_f32)
LOOP(loop_f64_i32, int32_t, double, f64_to_i32)
LOOP(loop_f32_f64, double, float, f32_to_f64)
LOOP(loop_i32_f64, double, int32_t, i32_to_f64)
LOOP(loop_f32_bf16, uint16_t, float, to_bf16)
LOOP(loop_bf16_f32, float, uint16_t, of_bf16)
LOOP(loop_f32_f16, uint16_t, float, to_f16)
LOOP(loop_f16_f32, float, uint16_t, of_f16)
LOOP(loop_f32_e4m3, uint8_t, float, to_e4m3)
LOOP(loop_e4m3_f32, float, uint8_t, of_e4m3)
LOOP(loop_f32_e5m2, uint8_t, float, to_e5m2)
LOOP(loop_e5m2_f32, float, uint8_t, of_e5m2)

// [from][to]; a pair without a loop of its own goes by way of f32, or of f64 where i32 is one of the two.
static Loop *const direct[DTYPES][DTYPES] = {
    [F64] = {[F32] = loop_f64_f32, [I32] = loop_f64_i32},
    [F32] = {[F64] = loop_f32_f64,
             [BF16] = loop_f32_bf16,
             [F16] = loop_f32_f16,
             [E4M3] = loop_f32_e4m3,
             [E5M2] = loop_f32_e5m2},
    [BF16] = {[F32] = loop_bf16_f32},
    [F16] = {[F32] = loop_f16_f32},
    [E4M3] = {[F32] = loop_e4m3_f32},
    [E5M2] = {[F32] = loop_e5m2_f32},
    [I32] = {[F64] = loop_i32_f64},
};

void dtype_convert(void *to, DType to_dtype, const void *from, DType from_dtype, int64_t count) {
    size_t to_size = dtype_size(to_dtype), from_size = dtype_size(from_dtype);
    if (to_dtype == from_dtype) {
        memmove(to, from, (size_t)count * to_size);
        return;
    }
    Loop *loop = direct[from_dtype][to_dtype];
    if (loop) {
        loop(to, from, count);
        return;
    }
    // Two hops over a piece that stays in the nearest cache.
    enum { PIECE = 512 };
    double piece[PIECE];
    DType by = to_dtype == I32 || from_dtype == I32 ? F64 : F32;
    for (int64_t i = 0; i < count; i += PIECE) {
        int64_t n = count - i < PIECE ? count - i : PIECE;
        dtype_convert(piece, by, (const char *)from + (size_t)i * from_size, from_dtype, n);
        dtype_convert((char *)to + (size_t)i * to_size, to_dtype, piece, by, n);
    }
}
