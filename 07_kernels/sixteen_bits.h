// sixteen_bits.h: what programs whose numbers are __nv_bfloat16 or __half write alike for both, and for f32
// where they have that, too.
#ifndef SIXTEEN_BITS_H
#define SIXTEEN_BITS_H

#include "cuda/gpu_numbers.h"
#include "launch.h"

__device__ static inline void narrow(float *to, float x) { *to = x; }
__device__ static inline void narrow(__nv_bfloat16 *to, float x) { *to = __float2bfloat16_rn(x); }
__device__ static inline void narrow(__half *to, float x) { *to = __float2half_rn(x); }
// Two neighbours, of which the first has an even place.
__device__ static inline void narrow(float *to, float x, float y) {
    *reinterpret_cast<float2 *>(to) = make_float2(x, y);
}
__device__ static inline void narrow(__nv_bfloat16 *to, float x, float y) {
    *reinterpret_cast<__nv_bfloat162 *>(to) = __floats2bfloat162_rn(x, y);
}
__device__ static inline void narrow(__half *to, float x, float y) {
    *reinterpret_cast<__half2 *>(to) = __floats2half2_rn(x, y);
}

// x += from[0], y += from[1], as far as these exist: `count` numbers are left. pairs: both exist or none,
// at an even place, and are loaded at once.
template <class T>
__device__ static inline void add_neighbours(float &x, float &y, const T *from, bool pairs, int count) {
    using Sixteen = std::conditional_t<std::is_same<T, __half>::value, __half2, __nv_bfloat162>;
    using Pair = std::conditional_t<sizeof(T) == sizeof(float), float2, Sixteen>;
    if (pairs && count > 0) {
        const Pair before = *reinterpret_cast<const Pair *>(from);
        x += static_cast<float>(before.x), y += static_cast<float>(before.y);
    }
    if (!pairs && count > 0) x += static_cast<float>(from[0]);
    if (!pairs && count > 1) y += static_cast<float>(from[1]);
}
// to[0] = x, to[1] = y, rounded, under the same conditions.
template <class T>
__device__ static inline void put_neighbours(T *to, float x, float y, bool pairs, int count) {
    if (pairs && count > 0) narrow(to, x, y);
    if (!pairs && count > 0) narrow(to, x);
    if (!pairs && count > 1) narrow(to + 1, y);
}

// x rounded to T, as a store and a load would.
template <class T>
__host__ __device__ static inline float stored(float x) {
    return static_cast<float>(static_cast<T>(x));
}

// ---- packs: numbers that a thread moves at once, and has in f32 ----

// Eight numbers of 16 bits are 16 bytes, the most that one load takes: a warp's load is 16 sectors. f32 is
// loaded one by one, 4 sectors a warp, and so are rows of 16 bits that do not all begin at a multiple of 16
// bytes.
template <class T>
constexpr int PACK = sizeof(T) == 2 ? 8 : 1;

// Whether rows of h numbers in these arrays, each of T or NULL, are whole packs.
template <class T, class... Arrays>
static inline bool in_packs(int64_t h, const Arrays *...arrays) {
    return ((h * (int64_t)sizeof(T)) | ... | (int64_t)(intptr_t)arrays) % 16 == 0;
}

template <int N, class T>
__device__ static inline void load_pack(float (&x)[N], const T *from) {
    if constexpr (N == 1) {
        x[0] = static_cast<float>(*from);
    } else {
        const uint4 pack = *reinterpret_cast<const uint4 *>(from);
        const T *numbers = reinterpret_cast<const T *>(&pack);
#pragma unroll
        for (int j = 0; j < N; j++) x[j] = static_cast<float>(numbers[j]);
    }
}

template <int N, class T>
__device__ static inline void store_pack(T *to, const float (&x)[N]) {
    if constexpr (N == 1) {
        narrow(to, x[0]);
    } else {
        uint4 pack;
#pragma unroll
        for (int j = 0; j < N; j += 2) narrow(reinterpret_cast<T *>(&pack) + j, x[j], x[j + 1]);
        *reinterpret_cast<uint4 *>(to) = pack;
    }
}

// The same of an array that ends after `left` numbers, beyond which are zeros.
template <int N, class T>
__device__ static inline void load_pack(float (&x)[N], const T *from, int64_t left) {
    if constexpr (N > 1) {
        if (left < N) {
#pragma unroll
            for (int j = 0; j < N; j++) x[j] = j < left ? static_cast<float>(from[j]) : 0;
            return;
        }
    }
    load_pack(x, from);
}
template <int N, class T>
__device__ static inline void store_pack(T *to, const float (&x)[N], int64_t left) {
    if constexpr (N > 1) {
        if (left < N) {
#pragma unroll
            for (int j = 0; j < N; j++)
                if (j < left) narrow(to + j, x[j]);
            return;
        }
    }
    store_pack(to, x);
}

// ---- host code ----

// What the CPU computes in f32, rounded to T; in f64 it computes the reference.
template <class T>
static float made(float x) {
    return stored<T>(x);
}
template <class T>
static double made(double x) {
    return x;
}

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
