// both_backends.h: for tests of every kernel of the CUDA back end against the same kernel of the CPU back
// end, computed in f64: in all dtypes, at sizes around those of warps, packs, blocks and shared memory, at
// addresses that are aligned to packs and that are not. Outputs lie between red zones that must not change.
// On the CPU the threads run in several orders, on which the bits must not depend.
//
// Here, the names of the CUDA back end's kernels have the prefix "cuda_".
#ifndef BOTH_BACKENDS_H
#define BOTH_BACKENDS_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "dtypes.h"
#include "tensor/device.h"
#include "tensor/kernels.h"
// need those above, and extern "C"
extern "C" {
#include <cmocka.h>

#include "tensor/rng.h"
}

extern "C" {
#define CUDA(name) extern decltype(name) cuda_##name;
CUDA(backend_alloc)
CUDA(backend_free)
CUDA(backend_from_host)
CUDA(backend_to_host)
CUDA(backend_waits)
CUDA(kernel_fill)
CUDA(kernel_copy)
CUDA(kernel_add)
CUDA(kernel_accumulate)
CUDA(kernel_scale)
CUDA(kernel_sum)
CUDA(kernel_sum_squares)
CUDA(kernel_add_sum)
CUDA(kernel_squares_of_ranges)
CUDA(kernel_matmul)
CUDA(kernel_embedding_forward)
CUDA(kernel_embedding_backward)
CUDA(kernel_rmsnorm_forward)
CUDA(kernel_rmsnorm_backward)
CUDA(kernel_rope)
CUDA(kernel_attention_forward)
CUDA(kernel_attention_probs)
CUDA(kernel_attention_backward)
CUDA(kernel_attention_chunk_forward)
CUDA(kernel_attention_chunk_dots)
CUDA(kernel_attention_chunk_backward)
CUDA(kernel_swiglu_forward)
CUDA(kernel_swiglu_backward)
CUDA(kernel_cross_entropy_forward)
CUDA(kernel_cross_entropy_backward)
CUDA(kernel_route_forward)
CUDA(kernel_route_backward)
CUDA(kernel_route_balance)
CUDA(kernel_route_capacity)
CUDA(kernel_route_order)
CUDA(kernel_route_nodes)
CUDA(kernel_route_within)
CUDA(kernel_combine_forward)
CUDA(kernel_combine_backward)
CUDA(kernel_adamw)
CUDA(kernel_sgd)
CUDA(kernel_round_stochastic)
CUDA(kernel_tile_amax)
CUDA(kernel_tile_scale)
CUDA(kernel_encode)
CUDA(kernel_decode)
CUDA(kernel_matmul_codes)
}

// Part of CUDA on the CPU; a GPU has nothing like it.
void cuda_on_cpu_order(uint64_t seed) __attribute__((weak));
void cuda_count_begin(void) __attribute__((weak));
int64_t cuda_count_end_atomics(void) __attribute__((weak));
void cuda_count_end_global(int64_t *requests, int64_t *sectors) __attribute__((weak));

// ---- arrays on both sides ----

typedef std::vector<double> Doubles;

static inline bool is_narrow(DType dtype) { return dtype == BF16 || dtype == F16; }

static inline Doubles rounded(DType dtype, const Doubles &x) {
    std::vector<unsigned char> stored(x.size() * dtype_size(dtype) + 1);
    Doubles back(x.size());
    dtype_convert(stored.data(), dtype, x.data(), F64, (int64_t)x.size());
    dtype_convert(back.data(), F64, stored.data(), dtype, (int64_t)x.size());
    return back;
}

static inline Doubles random_numbers(DType dtype, int64_t count, uint64_t key) {
    Doubles x((size_t)count);
    for (int64_t i = 0; i < count; i++) x[(size_t)i] = rng_normal(key, RNG_TEST, (uint64_t)i);
    return rounded(dtype, x);
}

static inline Doubles whole_numbers(int64_t count, int64_t limit, uint64_t key) {
    Doubles x((size_t)count);
    for (int64_t i = 0; i < count; i++)
        x[(size_t)i] = (double)(rng_bits(key, RNG_TEST, (uint64_t)i) % (uint64_t)limit);
    return x;
}

// An array in device memory, `shift` elements after an address that is aligned to packs, with red zones on
// both sides.
struct Device {
    enum { ZONE = 64, RED = 0xa5 };
    DType dtype;
    int64_t count, bytes;
    char *memory;
    void *at;

    Device(DType dtype, const Doubles &x, int shift = 0) : dtype(dtype), count((int64_t)x.size()) {
        int64_t size = (int64_t)dtype_size(dtype), before = ZONE + shift * size;
        bytes = before + count * size + ZONE;
        memory = static_cast<char *>(cuda_backend_alloc((size_t)bytes));
        at = memory + before;
        std::vector<unsigned char> host((size_t)bytes, RED);
        dtype_convert(&host[(size_t)before], dtype, x.data(), F64, count);
        cuda_backend_from_host(memory, host.data(), (size_t)bytes);
    }
    // poisoned
    Device(DType dtype, int64_t count, int shift = 0) : Device(dtype, Doubles((size_t)count, NAN), shift) {}
    Device(const Device &) = delete;
    ~Device() { cuda_backend_free(memory); }

    std::vector<unsigned char> stored(const char *what) const {
        std::vector<unsigned char> host((size_t)bytes);
        cuda_backend_to_host(host.data(), memory, (size_t)bytes);
        int64_t first = static_cast<char *>(at) - memory, end = first + count * (int64_t)dtype_size(dtype);
        for (int64_t i = 0; i < bytes; i++)
            if ((i < first || i >= end) && host[(size_t)i] != RED)
                fail_msg("%s: byte %lld %s the %lld %s was written", what,
                         (long long)(i < first ? first - i : i - end), i < first ? "before" : "behind",
                         (long long)count, dtype_name(dtype));
        return std::vector<unsigned char>(host.begin() + first, host.begin() + end);
    }
    Doubles read(const char *what) const {
        Doubles x((size_t)count);
        dtype_convert(x.data(), F64, stored(what).data(), dtype, count);
        return x;
    }
    int32_t *indices() const { return static_cast<int32_t *>(at); }
};

static inline Doubles numbers(const std::vector<int32_t> &x) { return Doubles(x.begin(), x.end()); }
static inline std::vector<int32_t> indices(const Doubles &x) {
    return std::vector<int32_t>(x.begin(), x.end());
}

// ---- how close ----

// The result is rounded once to its dtype, after `roundings` arithmetic steps. Both the largest error,
// relative to the largest value, and the error of the whole, in L2, must be within that. NaN and infinity
// must be where they are expected.
static inline void assert_close(const char *what, const Device &got, const Doubles &want,
                                double roundings) {
    const Doubles x = got.read(what);
    const double bound = rounding(got.dtype) + roundings * (rounding(full(got.dtype)) + rounding(F64));
    const double tiny = got.dtype == F16 ? 0x1p-25 : 0;
    double largest = 0, error = 0, norm = 0, error_norm = 0;
    size_t worst = 0;
    for (size_t i = 0; i < x.size(); i++) {
        if (isnan(want[i]) && isnan(x[i])) continue;
        if (isinf(want[i]) && x[i] == want[i]) continue;
        double e = fabs(x[i] - want[i]);
        if (!(e <= error)) error = e, worst = i;
        largest = std::max(largest, fabs(want[i]));
        norm += want[i] * want[i];
        error_norm += e * e;
    }
    if (!(error <= bound * largest + tiny) ||
        !(sqrt(error_norm) <= bound * sqrt(norm) + tiny * sqrt((double)x.size())))
        fail_msg("%s: element %zu of %zu %s is %.9g, expected %.9g; error %.3g in L2, bound %.3g", what,
                 worst, x.size(), dtype_name(got.dtype), x[worst], want[worst], sqrt(error_norm / norm),
                 bound);
}

static inline void assert_same(const char *what, const Device &got, const Doubles &want) {
    const Doubles x = got.read(what);
    for (size_t i = 0; i < x.size(); i++)
        if (!(x[i] == want[i] || (isnan(x[i]) && isnan(want[i]))))
            fail_msg("%s: element %zu of %zu %s is %.17g, expected %.17g", what, i, x.size(),
                     dtype_name(got.dtype), x[i], want[i]);
}

// Runs f(shift) for addresses that are aligned to packs and that are not, and with several orders of
// threads. f returns bytes, which must be the same in all runs. `multiplies`: on a GPU only aligned
// addresses, since cuBLASLt has other kernels for the rest.
template <class F>
static inline void in_every_way(const char *what, F f, bool multiplies = false) {
    std::vector<unsigned char> first;
    static const char *const ways[] = {"", "from an odd address", "in another order of threads"};
    for (int way = 0; way < 3; way++) {
        if (cuda_on_cpu_order) cuda_on_cpu_order(way == 2 ? 1234567 : 0);
        std::vector<unsigned char> bytes = f(way == 1);
        if (way == 0) first = bytes;
        else if (bytes != first && !(multiplies && way == 1 && !cuda_on_cpu_order))
            fail_msg("%s: other bits %s", what, ways[way]);
    }
    if (cuda_on_cpu_order) cuda_on_cpu_order(0);
}

static inline void add_bytes(std::vector<unsigned char> *all, const char *what, const Device &of) {
    std::vector<unsigned char> more = of.stored(what);
    all->insert(all->end(), more.begin(), more.end());
}

#endif
