// comm_mpi_sums.c: sums and maxima of what ranks have sent, in host memory.
#include <string.h>

#include "comm_mpi.h"

#if defined __AVX512F__ && !defined __clang__
#pragma GCC target "prefer-vector-width=512"  // where GCC would use half of it
#endif

enum { BLOCK = 2048 };  // elements added at once, within the first-level cache

static void add_f32(float *sum, const float *x, int64_t count, ReduceOp op) {
    if (op == REDUCE_SUM)
        for (int64_t i = 0; i < count; i++) sum[i] += x[i];
    else  // the comparison is false if x is NaN or less; a NaN in sum stays
        for (int64_t i = 0; i < count; i++) sum[i] = sum[i] >= x[i] || sum[i] != sum[i] ? sum[i] : x[i];
}

static void add_f64(double *sum, const double *x, int64_t count, ReduceOp op) {
    if (op == REDUCE_SUM)
        for (int64_t i = 0; i < count; i++) sum[i] += x[i];
    else
        for (int64_t i = 0; i < count; i++) sum[i] = sum[i] >= x[i] || sum[i] != sum[i] ? sum[i] : x[i];
}

static void add_i32(uint32_t *sum, const uint32_t *x, int64_t count, ReduceOp op) {
    if (op == REDUCE_SUM)
        for (int64_t i = 0; i < count; i++) sum[i] += x[i];
    else
        for (int64_t i = 0; i < count; i++) sum[i] = (int32_t)sum[i] > (int32_t)x[i] ? sum[i] : x[i];
}

// out = the sum of n sources, in order. out may be one of them.
static void reduce_block(void *out, const char *const *source, int n, int64_t count, DType dtype,
                         ReduceOp op) {
    union {
        double f64[BLOCK];
        float f32[BLOCK];
        uint32_t i32[BLOCK];
    } sum;
    float wide[BLOCK];
    size_t size = dtype_size(dtype);
    bool narrow = size < 4;
    if (narrow) dtype_convert(sum.f32, F32, source[0], dtype, count);
    else memcpy(&sum, source[0], size * (size_t)count);
    for (int i = 1; i < n; i++) {
        if (narrow) dtype_convert(wide, F32, source[i], dtype, count);
        const void *x = narrow ? (const void *)wide : source[i];
        if (dtype == F64) add_f64(sum.f64, x, count, op);
        else if (dtype == I32) add_i32(sum.i32, x, count, op);
        else add_f32(sum.f32, x, count, op);
    }
    if (narrow) dtype_convert(out, dtype, sum.f32, F32, count);
    else memcpy(out, &sum, size * (size_t)count);
}

void reduce_bytes(char *out, const char **source, int n, int64_t bytes, DType dtype, ReduceOp op) {
    int64_t size = (int64_t)dtype_size(dtype), step = BLOCK * size;
    for (int64_t first = 0; first < bytes; first += step) {
        int64_t length = bytes - first < step ? bytes - first : step;
        reduce_block(out + first, source, n, length / size, dtype, op);
        for (int i = 0; i < n; i++) source[i] += length;
    }
}
