// cuda_on_cpu_numbers.h: the last part of cuda_on_cpu.h: math functions of device code, and narrow formats.
#ifndef CUDA_ON_CPU_NUMBERS_H
#define CUDA_ON_CPU_NUMBERS_H

// ---- mathematics ----
// The fast approximations (__expf) are the exact functions here.
#define CUDA_MATH static __forceinline__
CUDA_MATH float cuda_rsqrt(float x) { return 1 / sqrtf(x); }
CUDA_MATH double cuda_rsqrt(double x) { return 1 / sqrt(x); }
CUDA_MATH float __fdividef(float x, float y) { return x / y; }
CUDA_MATH float __fdiv_rn(float x, float y) { return x / y; }
CUDA_MATH float __frcp_rn(float x) { return 1 / x; }
CUDA_MATH float __fsqrt_rn(float x) { return sqrtf(x); }
CUDA_MATH float __frsqrt_rn(float x) { return (float)(1 / sqrt((double)x)); }
CUDA_MATH float __fadd_rn(float x, float y) { return x + y; }
CUDA_MATH float __fmul_rn(float x, float y) { return x * y; }
CUDA_MATH float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
CUDA_MATH double __dadd_rn(double x, double y) { return x + y; }
CUDA_MATH double __dmul_rn(double x, double y) { return x * y; }
CUDA_MATH float __saturatef(float x) { return x >= 1 ? 1 : x > 0 ? x : 0; }  // NaN becomes 0
CUDA_MATH void cuda_sincosf(float x, float *s, float *c) { *s = sinf(x), *c = cosf(x); }
CUDA_MATH void cuda_sincos(double x, double *s, double *c) { *s = sin(x), *c = cos(x); }
// Macros, because the C library has functions with these names that do something else or round differently,
// and rsqrt only since glibc 2.42.
#define rsqrtf(x)          cuda_rsqrt((float)(x))
#define rsqrt(x)           cuda_rsqrt(x)
#define sincosf(x, s, c)   cuda_sincosf(x, s, c)
#define sincos(x, s, c)    cuda_sincos(x, s, c)
#define __sincosf(x, s, c) cuda_sincosf(x, s, c)
#define __expf(x)          expf(x)
#define __exp10f(x)        exp10f(x)
#define __logf(x)          logf(x)
#define __log2f(x)         log2f(x)
#define __log10f(x)        log10f(x)
#define __sinf(x)          sinf(x)
#define __cosf(x)          cosf(x)
#define __tanf(x)          tanf(x)
#define __powf(x, y)       powf(x, y)

#define CUDA_MIN_MAX(T)                                 \
    CUDA_MATH T min(T a, T b) { return a < b ? a : b; } \
    CUDA_MATH T max(T a, T b) { return a > b ? a : b; }
CUDA_MIN_MAX(int)
CUDA_MIN_MAX(unsigned)
CUDA_MIN_MAX(long)
CUDA_MIN_MAX(unsigned long)
CUDA_MIN_MAX(long long)
CUDA_MIN_MAX(unsigned long long)
CUDA_MATH float min(float a, float b) { return fminf(a, b); }
CUDA_MATH float max(float a, float b) { return fmaxf(a, b); }
CUDA_MATH double min(double a, double b) { return fmin(a, b); }
CUDA_MATH double max(double a, double b) { return fmax(a, b); }
CUDA_MATH double min(float a, double b) { return fmin(a, b); }
CUDA_MATH double max(float a, double b) { return fmax(a, b); }
CUDA_MATH double min(double a, float b) { return fmin(a, b); }
CUDA_MATH double max(double a, float b) { return fmax(a, b); }

CUDA_MATH int __popc(unsigned x) { return __builtin_popcount(x); }
CUDA_MATH int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
CUDA_MATH int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
CUDA_MATH int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
CUDA_MATH int __ffs(int x) { return __builtin_ffs(x); }
CUDA_MATH int __ffsll(long long x) { return __builtin_ffsll(x); }
// Byte i of the result is the byte of x (0 to 3) or y (4 to 7) that digit i of the selector names.
CUDA_MATH unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t both = (uint64_t)y << 32 | x;
    const auto byte = [&](int i) {
        return (unsigned)(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    };
    return byte(0) | byte(1) | byte(2) | byte(3);
}
CUDA_MATH unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((uint64_t)x * y >> 32); }
CUDA_MATH unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned long long)((unsigned __int128)x * y >> 64);
}

template <class To, class From>
__forceinline__ To cuda_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
CUDA_MATH int __float_as_int(float x) { return cuda_bits<int>(x); }
CUDA_MATH unsigned __float_as_uint(float x) { return cuda_bits<unsigned>(x); }
CUDA_MATH float __int_as_float(int x) { return cuda_bits<float>(x); }
CUDA_MATH float __uint_as_float(unsigned x) { return cuda_bits<float>(x); }
CUDA_MATH long long __double_as_longlong(double x) { return cuda_bits<long long>(x); }
CUDA_MATH double __longlong_as_double(long long x) { return cuda_bits<double>(x); }
CUDA_MATH int __float2int_rn(float x) { return (int)nearbyintf(x); }
CUDA_MATH float __int2float_rn(int x) { return (float)x; }
CUDA_MATH float __double2float_rn(double x) { return (float)x; }

// ---- narrow formats: the conversions of tensor.h, exact or rounded to nearest ----
// A double is first rounded to odd in f32, so that the two roundings give the same result as a single one.
static inline float cuda_round_to_odd(double x) {
    float y = (float)x;
    uint32_t bits = cuda_bits<uint32_t>(y);
    if ((double)y == x || isnan(y) || isinf(x)) return y;
    if (isinf(y)) return cuda_bits<float>(bits - 1);
    if (fabs((double)y) > fabs(x)) bits--;  // towards zero
    return cuda_bits<float>(bits | 1);
}

#define CUDA_FLOAT16(name, code_from_f32, f32_from_code)             \
    struct name {                                                    \
        uint16_t __x;                                                \
        name() = default;                                            \
        name(float x) : __x(code_from_f32(x)) {}                     \
        name(double x) : __x(code_from_f32(cuda_round_to_odd(x))) {} \
        name(int x) : __x(code_from_f32(cuda_round_to_odd(x))) {}    \
        operator float() const { return f32_from_code(__x); }        \
    };                                                               \
    CUDA_VECTOR2(name, name##2, 4)
CUDA_FLOAT16(__half, f16_from_f32, f32_from_f16)
CUDA_FLOAT16(__nv_bfloat16, bf16_from_f32, f32_from_bf16)
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat162 nv_bfloat162;
typedef __nv_bfloat16 nv_bfloat16;

CUDA_MATH __half __float2half(float x) { return __half(x); }
CUDA_MATH __half __float2half_rn(float x) { return __half(x); }
CUDA_MATH __half __double2half(double x) { return __half(x); }
CUDA_MATH float __half2float(__half x) { return x; }
CUDA_MATH unsigned short __half_as_ushort(__half x) { return x.__x; }
CUDA_MATH __half __ushort_as_half(unsigned short x) { return cuda_bits<__half>(x); }
CUDA_MATH __half2 __halves2half2(__half x, __half y) { return __half2(x, y); }
CUDA_MATH __half2 __floats2half2_rn(float x, float y) { return __half2(x, y); }
CUDA_MATH __half2 __float22half2_rn(float2 v) { return __half2(v.x, v.y); }
CUDA_MATH float2 __half22float2(__half2 v) { return float2(v.x, v.y); }
CUDA_MATH __half __low2half(__half2 v) { return v.x; }
CUDA_MATH __half __high2half(__half2 v) { return v.y; }
CUDA_MATH float __low2float(__half2 v) { return v.x; }
CUDA_MATH float __high2float(__half2 v) { return v.y; }

CUDA_MATH __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
CUDA_MATH __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
CUDA_MATH __nv_bfloat16 __double2bfloat16(double x) { return __nv_bfloat16(x); }
CUDA_MATH float __bfloat162float(__nv_bfloat16 x) { return x; }
CUDA_MATH unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.__x; }
CUDA_MATH __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return cuda_bits<__nv_bfloat16>(x); }
CUDA_MATH __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) {
    return __nv_bfloat162(x, y);
}
CUDA_MATH __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return __nv_bfloat162(x, y); }
CUDA_MATH __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __nv_bfloat162(v.x, v.y); }
CUDA_MATH float2 __bfloat1622float2(__nv_bfloat162 v) { return float2(v.x, v.y); }
CUDA_MATH __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
CUDA_MATH __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
CUDA_MATH float __low2float(__nv_bfloat162 v) { return v.x; }
CUDA_MATH float __high2float(__nv_bfloat162 v) { return v.y; }

typedef uint8_t __nv_fp8_storage_t;
typedef uint16_t __nv_fp8x2_storage_t;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
struct __nv_fp8_e4m3 {
    __nv_fp8_storage_t __x;
    __nv_fp8_e4m3() = default;
    explicit __nv_fp8_e4m3(float x) : __x(e4m3_from_f32(x)) {}
    explicit __nv_fp8_e4m3(double x) : __x(e4m3_from_f32(cuda_round_to_odd(x))) {}
    explicit operator float() const { return f32_from_e4m3(__x); }
};
struct __nv_fp8_e5m2 {
    __nv_fp8_storage_t __x;
    __nv_fp8_e5m2() = default;
    explicit __nv_fp8_e5m2(float x) : __x(e5m2_from_f32(x)) {}
    explicit __nv_fp8_e5m2(double x) : __x(e5m2_from_f32(cuda_round_to_odd(x))) {}
    explicit operator float() const { return f32_from_e5m2(__x); }
};
// Always saturates, like the project's formats.
CUDA_MATH __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t,
                                                   __nv_fp8_interpretation_t kind) {
    return kind == __NV_E4M3 ? e4m3_from_f32(x) : e5m2_from_f32(x);
}
CUDA_MATH __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t saturation,
                                                        __nv_fp8_interpretation_t kind) {
    return (__nv_fp8x2_storage_t)(__nv_cvt_float_to_fp8(v.x, saturation, kind) |
                                  __nv_cvt_float_to_fp8(v.y, saturation, kind) << 8);
}

#endif
