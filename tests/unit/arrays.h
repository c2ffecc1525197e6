// arrays.h: for tests of operations: tensors with their contents in f64, and how close an operation must
// come to a reference. Include it after cmocka.h.
#ifndef ARRAYS_H
#define ARRAYS_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dtypes.h"
#include "tensor/device.h"
#include "tensor/rng.h"
#include "tensor/tensor.h"

// Emulated kernels and sanitizers are ten times slower.
static inline bool is_slow(void) {
#ifdef __SANITIZE_ADDRESS__
    return true;
#else
    return strstr(backend_text(), "on the CPU") != NULL;
#endif
}

typedef struct Array {
    Tensor t;
    double *x;  // what t holds, after rounding to its dtype
    int64_t count;
} Array;

static inline void array_read(Array *a) { tensor_to_doubles(a->x, a->t); }

static inline void array_write(Array *a) {
    tensor_from_doubles(a->t, a->x);
    array_read(a);
}

static inline Tensor new_tensor(DType dtype, int64_t rows, int64_t columns) {
    return tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(rows, columns));
}

static inline Array array_new(DType dtype, int64_t rows, int64_t columns, double value) {
    Array a = {.t = new_tensor(dtype, rows, columns), .count = rows * columns};
    a.x = host_alloc((size_t)a.count * sizeof *a.x + 1);
    for (int64_t i = 0; i < a.count; i++) a.x[i] = value;
    array_write(&a);
    return a;
}

// What an operation that sets its output must overwrite.
static inline Array poisoned(DType dtype, int64_t rows, int64_t columns) {
    return array_new(dtype, rows, columns, NAN);
}

// Numbers with mean 0 and variance 1, different for every key: sums of two uniform numbers, the halves of a
// counter mixed as in SplitMix64. Normal ones (rng_normal) would take longer than the operation under test.
static inline Array random_array(DType dtype, int64_t rows, int64_t columns, uint64_t key) {
    Array a = array_new(dtype, rows, columns, 0);
    for (int64_t i = 0; i < a.count; i++) {
        uint64_t bits = (uint64_t)i * 0x9e3779b97f4a7c15 + key * 0xd1b54a32d192ed03;
        bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
        bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
        bits ^= bits >> 31;
        a.x[i] = sqrt(6) * 0x1p-32 * ((double)(bits >> 32) + (double)(uint32_t)bits - 0xffffffff);
    }
    array_write(&a);
    return a;
}

// Whole numbers in [0, limit), or as drawn from it: tokens, targets, positions.
static inline Array random_tokens(int64_t n, int64_t limit, uint64_t key) {
    Array a = array_new(I32, n, 1, 0);
    for (int64_t i = 0; i < n; i++)
        a.x[i] = (double)(rng_bits(key, RNG_TEST, (uint64_t)i) % (uint64_t)limit);
    array_write(&a);
    return a;
}

static inline void array_free(Array *a) {
    tensor_free(&a->t);
    free(a->x);
}

static inline void free_arrays(Array *const *arrays, int count) {
    for (int i = 0; i < count; i++) array_free(arrays[i]);
}
#define FREE(...) \
    free_arrays((Array *[]){__VA_ARGS__}, (int)(sizeof((Array *[]){__VA_ARGS__}) / sizeof(Array *)))

// ---- how close ----

// The result is rounded once to its dtype, after `roundings` arithmetic steps, each of which may add a
// rounding error; the reference in f64 has as many. Both the largest error, relative to the largest value,
// and the error of the whole, in L2, must be within that. NaN never is.
static inline void assert_close(const char *what, const Array *got, const double *want, double roundings) {
    DType dtype = got->t.dtype;
    double bound = rounding(dtype) + roundings * (rounding(full(dtype)) + rounding(F64));
    double tiny = dtype == F16 ? 0x1p-25 : 0;  // the absolute error of rounding to a subnormal
    double largest = 0, error = 0, norm = 0, error_norm = 0;
    int64_t worst = 0;
    for (int64_t i = 0; i < got->count; i++) {
        double e = fabs(got->x[i] - want[i]);
        if (!(e <= error)) error = e, worst = i;
        largest = fmax(largest, fabs(want[i]));
        norm += want[i] * want[i];
        error_norm += e * e;
    }
    if (!(error <= bound * largest + tiny) ||
        !(sqrt(error_norm) <= bound * sqrt(norm) + tiny * sqrt((double)got->count)))
        fail_msg("%s %s: element %lld is %.9g, expected %.9g; error %.3g in L2, bound %.3g", what,
                 tensor_text(got->t), (long long)worst, got->x[worst], want[worst], sqrt(error_norm / norm),
                 bound);
}

static inline void assert_exact(const char *what, const Array *got, const double *want) {
    for (int64_t i = 0; i < got->count; i++)
        if (!(got->x[i] == want[i]))
            fail_msg("%s %s: element %lld is %.17g, expected %.17g", what, tensor_text(got->t),
                     (long long)i, got->x[i], want[i]);
}

static inline double *zeros(int64_t count) {
    double *x = host_alloc((size_t)count * sizeof *x + 1);
    memset(x, 0, (size_t)count * sizeof *x);
    return x;
}

// d loss / d x by central differences, for a loss that reads x->t, compared with the backward's dx.
typedef double (*Loss)(void *context);
static inline void assert_gradient(const char *what, Array *x, const double *dx, Loss loss, void *context) {
    const double step = 1e-5;
    double error = 0, norm = 0;
    for (int64_t i = 0; i < x->count; i++) {
        double at = x->x[i], side[2];
        for (int s = 0; s < 2; s++) {
            x->x[i] = s ? at + step : at - step;
            tensor_from_doubles(x->t, x->x);
            side[s] = loss(context);
        }
        x->x[i] = at;
        double slope = (side[1] - side[0]) / (2 * step);
        error += (dx[i] - slope) * (dx[i] - slope);
        norm += slope * slope;
    }
    tensor_from_doubles(x->t, x->x);
    // Rounding of the loss, 1e-16 / step, and the third derivative, step^2 / 6, both stay below 1e-9.
    if (!(sqrt(error) <= 1e-8 * sqrt(norm)) || !(norm > 0))
        fail_msg("%s: the gradient differs from finite differences by %.3g of its norm %.3g", what,
                 sqrt(error / norm), sqrt(norm));
}

// The sum of y's elements, each times its own random number: a loss whose dy has mixed signs and sizes.
static inline double weighted(Tensor y, const Array *dy) {
    Array read = {.t = y, .x = zeros(dy->count), .count = dy->count};
    array_read(&read);
    double sum = 0;
    for (int64_t i = 0; i < dy->count; i++) sum += read.x[i] * dy->x[i];
    free(read.x);
    return sum;
}

#endif
