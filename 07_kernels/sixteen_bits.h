// sixteen_bits.h: what programs whose numbers are __nv_bfloat16 or __half write alike for both.
#ifndef SIXTEEN_BITS_H
#define SIXTEEN_BITS_H

#include "launch.h"

__device__ static inline void narrow(__nv_bfloat16 *to, float x) { *to = __float2bfloat16_rn(x); }
__device__ static inline void narrow(__half *to, float x) { *to = __float2half_rn(x); }
// Two neighbours, of which the first has an even place.
__device__ static inline void narrow(__nv_bfloat16 *to, float x, float y) {
    *reinterpret_cast<__nv_bfloat162 *>(to) = __floats2bfloat162_rn(x, y);
}
__device__ static inline void narrow(__half *to, float x, float y) {
    *reinterpret_cast<__half2 *>(to) = __floats2half2_rn(x, y);
}

__host__ static inline float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__host__ static inline float wide(__half x) { return __half2float(x); }
static inline void from_float(__nv_bfloat16 *to, float x) { *to = __float2bfloat16_rn(x); }
static inline void from_float(__half *to, float x) { *to = __float2half_rn(x); }

// Numbers of T, and the same in f32.
template <class T>
struct Numbers {
    std::vector<T> narrow;
    std::vector<float> exact;

    Numbers(int64_t count, int stream) : narrow((size_t)count), exact((size_t)count) {
        float *x = kernels_numbers(count, 1, stream);
        for (size_t i = 0; i < exact.size(); i++) {
            from_float(&narrow[i], x[i]);
            exact[i] = wide(narrow[i]);
        }
        free(x);
    }
};

// A row of a table of C = A B with n rows and columns; the emulator counts at `small`.
template <class T, class Launch, class Formula>
void matmul_row(const KernelVersion &version, const Proof &proof, int64_t small, int64_t n, Launch launch,
                Formula formula) {
    const int64_t most = ON_GPU ? n : small, count = most * most;
    const Numbers<T> numbers(count, 3);
    Array<T> a(numbers.narrow.data(), count), b(numbers.narrow.data(), count), c(count);
    show_version(
        version, proof, small, n, [&](int64_t size) { launch(c.at, a.at, b.at, size); }, formula);
}

#endif
