// comm_values.h: for tests of communication: each rank knows the numbers of every other one, so it can
// compute what a call must return. Include it in place of ranks.h.
#ifndef COMM_VALUES_H
#define COMM_VALUES_H

#include <math.h>
#include <unistd.h>

#include "ranks.h"
#include "tensor/clock.h"

// ---- numbers ----

static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

// What rank r holds at element i: signs and sizes mixed, so that the order of a sum shows.
static inline double value(DType dtype, int r, int64_t i) {
    uint64_t bits = mix(mix((uint64_t)r * 1000003 + 17) + (uint64_t)i * 7919);
    double x = (double)(bits >> 11) * 0x1p-52 - 1;  // -1 … 1
    return dtype == I32 ? floor(1e6 * x) : x * (double)(1 << bits % 7);
}

// count elements of rank r, from its element `first` on, in the dtype's bytes. The caller frees them.
static inline void *values(DType dtype, int r, int64_t first, int64_t count) {
    double *wide = host_alloc(8 * (size_t)count);
    for (int64_t i = 0; i < count; i++) wide[i] = value(dtype, r, first + i);
    void *bytes = host_alloc(dtype_size(dtype) * (size_t)count);
    dtype_convert(bytes, dtype, wide, F64, count);
    free(wide);
    return bytes;
}

static inline Tensor tensor_of(DType dtype, int r, int64_t count) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(count));
    void *host = values(dtype, r, 0, count);
    tensor_from_host(t, host);
    free(host);
    return t;
}

static inline Tensor empty(DType dtype, int64_t count) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(count));
    void *host = host_alloc((size_t)tensor_bytes(t));
    memset(host, 0x5a, (size_t)tensor_bytes(t));
    tensor_from_host(t, host);
    free(host);
    return t;
}

// The sum or maximum over all members, in order, in the dtype that comm.h states.
static inline void *reduced(DType dtype, ReduceOp op, Group group, int64_t first, int64_t count) {
    double *sum = host_alloc(8 * (size_t)count), *wide = host_alloc(8 * (size_t)count);
    void *result = host_alloc(dtype_size(dtype) * (size_t)count);
    for (int m = 0; m < group.size; m++) {
        void *x = values(dtype, group.member[m], first, count);
        dtype_convert(wide, F64, x, dtype, count);
        free(x);
        for (int64_t i = 0; i < count; i++) {
            if (m == 0) sum[i] = wide[i];
            else if (op == REDUCE_MAX) sum[i] = wide[i] > sum[i] ? wide[i] : sum[i];
            else if (dtype == F64 || dtype == I32) sum[i] += wide[i];
            else sum[i] = (float)sum[i] + (float)wide[i];
        }
    }
    dtype_convert(result, dtype, sum, F64, count);
    free(sum);
    free(wide);
    return result;
}

static inline void expect_bytes(const char *what, Tensor t, int64_t first, const void *expected,
                                int64_t count) {
    size_t size = dtype_size(t.dtype);
    char *got = host_alloc((size_t)tensor_bytes(t));
    tensor_to_host(got, t);
    if (memcmp(got + (size_t)first * size, expected, size * (size_t)count)) {
        int64_t i = 0;
        while (!memcmp(got + (size_t)(first + i) * size, (const char *)expected + (size_t)i * size, size))
            i++;
        double a, b;
        dtype_convert(&a, F64, got + (size_t)(first + i) * size, t.dtype, 1);
        dtype_convert(&b, F64, (const char *)expected + (size_t)i * size, t.dtype, 1);
        note("%s of %s: element %lld is %.17g, expected %.17g", what, tensor_text(t),
             (long long)(first + i), a, b);
    }
    free(got);
}

// As expect_bytes, for a sum in any order: within (n - 1) roundings of everything that was added.
static inline void expect_sum_of_any_order(const char *what, Tensor t, int64_t at, Group group,
                                           int64_t first, const void *expected, int64_t count) {
    double *got = host_alloc(8 * (size_t)tensor_count(t)), *sum = host_alloc(8 * (size_t)count);
    double *x = host_alloc(8 * (size_t)count), *added = calloc((size_t)count + 1, 8);
    for (int m = 0; m < group.size; m++) {
        void *stored = values(t.dtype, group.member[m], first, count);
        dtype_convert(x, F64, stored, t.dtype, count);
        free(stored);
        for (int64_t i = 0; i < count; i++) added[i] += fabs(x[i]);
    }
    tensor_to_doubles(got, t);
    dtype_convert(sum, F64, expected, t.dtype, count);
    double unit = t.dtype == F64 ? 0x1p-53 : 0x1p-24;
    int wrong = 0;
    for (int64_t i = 0; i < count; i++)
        if (!(fabs(got[at + i] - sum[i]) <= 2 * (group.size - 1) * unit * added[i]) && wrong++ == 0)
            note("%s of %s: element %lld is %.17g, expected about %.17g", what, tensor_text(t),
                 (long long)(at + i), got[at + i], sum[i]);
    free(got);
    free(sum);
    free(x);
    free(added);
}

// Elements [at, at + count) must be the sum, or maximum, of the members' elements from `first` on.
static inline void expect_reduction(const char *what, Tensor t, int64_t at, ReduceOp op, Group group,
                                    int64_t first, int64_t count) {
    void *expected = reduced(t.dtype, op, group, first, count);
    if (op == REDUCE_SUM && !comm_sums_in_rank_order() && (t.dtype == F64 || t.dtype == F32))
        expect_sum_of_any_order(what, t, at, group, first, expected, count);
    else expect_bytes(what, t, at, expected, count);
    free(expected);
}

static inline void expect_reduced(const char *what, Tensor t, ReduceOp op, Group group, int64_t first) {
    expect_reduction(what, t, 0, op, group, first, tensor_count(t));
}

// Every rank must have the same bits.
static inline void expect_alike(const char *what, Tensor t) {
    unsigned char *bytes = host_alloc((size_t)tensor_bytes(t));
    tensor_to_host(bytes, t);
    uint32_t hash = 1;
    for (int64_t i = 0; i < tensor_bytes(t); i++) hash = hash * 16777619 ^ bytes[i];
    free(bytes);
    double greatest = comm_max(hash, world), least = -comm_max(-(double)hash, world);
    if (greatest != least) note("%s of %s differs between ranks", what, tensor_text(t));
}

static inline void expect_values(const char *what, Tensor t, int64_t at, int r, int64_t first,
                                 int64_t count) {
    void *expected = values(t.dtype, r, first, count);
    expect_bytes(what, t, at, expected, count);
    free(expected);
}

static inline void nap(int seed) {
    uint64_t bits = mix((uint64_t)seed * 977 + (uint64_t)me);
    if (bits % 3) usleep((useconds_t)(bits % 1500));
}

// Uneven parts, some empty: 0, k, 2 k … in a rotated order.
static inline int64_t uneven(int part, int64_t k) { return part % 3 == 1 ? 0 : k * ((part * 2 + 1) % 5); }

static inline int64_t parts(int64_t *counts, int64_t k) {
    int64_t total = 0;
    for (int i = 0; i < n; i++) total += counts[i] = uneven(i, k);
    return total;
}

static inline int64_t offset_of(const int64_t *counts, int part) {
    int64_t offset = 0;
    for (int i = 0; i < part; i++) offset += counts[i];
    return offset;
}

static inline MeshShape a_grid(void) {
    return n == 8       ? (MeshShape){.dp = 2, .pp = 2, .tp = 2}
           : n % 2 == 0 ? (MeshShape){.dp = n / 2, .tp = 2}
                        : (MeshShape){.dp = n};
}

#endif
