// ops_cpu.c: the operations on a CPU: readable C over a CBLAS and OpenMP.
// f32 and f64 are computed directly, by code that ops_cpu_rows.inc and ops_cpu_blas.inc contain once for
// both. 16-bit storage is widened to f32, computed as f32, and every stored result is rounded once: block
// by block (ops_cpu_narrow.inc) or, where that would not pay, as whole tensors in scratch.
// Three rules make it reproducible: no atomics; no sum whose order depends on the number of threads; and
// the BLAS is called single-threaded inside a parallel region, on slices that depend only on the shapes and
// the number of threads. (Inside a parallel region the OpenMP build of OpenBLAS stays on the calling
// thread. Its own two-threaded SGEMM is 10 to 40 % slower on a model's matrices.)
#include <cblas.h>
#include <limits.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "device.h"
#include "in_flight.h"
#include "kernels.h"
#include "rng.h"

#if defined __AVX512F__ && !defined __clang__
#pragma GCC target "prefer-vector-width=512"  // where GCC would take half of it
#endif

enum {
    LANES = 16,        // partial sums side by side
    SUM_CHUNK = 4096,  // elements whose sum is one term of a tensor's sum
    NORM_ROWS = 32,    // rows whose sum is one term of a norm's dweight
    QUERY_ROWS = 32,   // attention's blocks
    KEY_COLUMNS = 256,
    MATMUL_DEPTH = 512,      // terms of a sum over rows that a matrix multiply takes at once
    STREAM_BYTES = 1 << 20,  // more zeros than this go past the caches
    FETCH_BYTES = 2048,      // between what a pass over long arrays reads and what it asks for
    SLICE_UNIT = 16,         // slices begin at multiples of this: a cache line of f32, and the BLAS's tile
    SCRATCH_SLOTS = 10,
    MAX_POSITIONS = 1 << 20,  // of RoPE's table
};

// ---- dealing work to threads ----

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// The part-th of `parts` slices of [0, size).
static void slice_of(int64_t size, int part, int parts, int64_t *first, int64_t *end) {
    int64_t units = (size + SLICE_UNIT - 1) / SLICE_UNIT;
    *first = units * part / parts * SLICE_UNIT;
    *end = units * (part + 1) / parts * SLICE_UNIT;
    if (*first > size) *first = size;
    if (*end > size) *end = size;
}

static void my_slice(int64_t size, int64_t *first, int64_t *end) {
    slice_of(size, omp_get_thread_num(), omp_get_num_threads(), first, end);
}

// When `parts` threads share an (m, n) matrix, each taking a rectangle, into how many parts its rows are
// divided; its columns are divided into `parts` / that. A thread packs its rows of one operand and its
// columns of the other for itself, so the sum of both should be small.
static int parts_of_rows(int64_t m, int64_t n, int parts) {
    int best = 1;
    for (int rows = 2; rows <= parts; rows++)
        if (parts % rows == 0 && m / rows + n / (parts / rows) < m / best + n / (parts / best)) best = rows;
    return best;
}

// The part-th of `parts` such rectangles.
static void rectangle_of(int64_t m, int64_t n, int part, int parts, int64_t *row, int64_t *row_end,
                         int64_t *column, int64_t *column_end) {
    const int down = parts_of_rows(m, n, parts);
    slice_of(m, part % down, down, row, row_end);
    slice_of(n, part / down, parts / down, column, column_end);
}

// Called between the tiles of a long operation, to advance what is in flight there as well. MPI requires
// the first thread, even in a nested parallel region.
static inline void push_between_tiles(void) {
    if (in_flight_count && omp_get_ancestor_thread_num(1) <= 0) in_flight_push();
}

// Zeros into rows that lie `stride` bytes apart. Many of them go past the caches: a store that does not
// first reads its line, and costs twice the memory traffic.
static void zero_rows(void *to, int64_t rows, size_t row_bytes, size_t stride) {
    for (int64_t row = 0; row < rows; row++) {
        char *at = (char *)to + row * stride, *end = at + row_bytes;
#ifdef __SSE2__
        if (rows * row_bytes > STREAM_BYTES) {
            size_t head = -(uintptr_t)at % sizeof(__m128i);
            for (; head && at < end; head--) *at++ = 0;
            for (; end - at >= (ptrdiff_t)sizeof(__m128i); at += sizeof(__m128i))
                _mm_stream_si128((__m128i *)at, _mm_setzero_si128());
        }
#endif
        memset(at, 0, (size_t)(end - at));
    }
#ifdef __SSE2__
    _mm_sfence();
#endif
}

// ---- scratch: grown when needed, kept for the next call, and no part of the account ----

static struct {
    void *memory;
    size_t bytes;
} slots[SCRATCH_SLOTS];
static int slots_used;

// Every kernel that uses scratch first calls this, which frees that of the previous kernel.
static void scratch_begin(void) { slots_used = 0; }

static void *scratch(size_t bytes) {
    CHECK(slots_used < SCRATCH_SLOTS, "a kernel takes more than %d pieces of scratch", SCRATCH_SLOTS);
    int i = slots_used++;
    if (slots[i].bytes < bytes) {
        free(slots[i].memory);
        size_t rounded = (bytes + 63) / 64 * 64;
        slots[i].memory = aligned_alloc(64, rounded);
        CHECK(slots[i].memory, "out of memory for %s of scratch", bytes_text((double)bytes));
        slots[i].bytes = rounded;
    }
    return slots[i].memory;
}

// ---- one arithmetic for several storage types ----

static void convert(DType to_dtype, void *to, DType from_dtype, const void *from, int64_t count) {
    const size_t to_size = dtype_size(to_dtype), from_size = dtype_size(from_dtype);
#pragma omp parallel
    {
        int64_t first, end;
        my_slice(count, &first, &end);
        dtype_convert((char *)to + first * to_size, to_dtype, (const char *)from + first * from_size,
                      from_dtype, end - first);
    }
}

// An input of dtype `storage` to read as dtype `wide`: itself where they agree, else a copy.
static void *widen_to(DType wide, DType storage, const void *x, int64_t count) {
    if (storage == wide) return (void *)x;
    void *copy = scratch((size_t)count * dtype_size(wide));
    convert(wide, copy, storage, x, count);
    return copy;
}

static void *widen(DType storage, const void *x, int64_t count) {
    return widen_to(dtype_full(storage), storage, x, count);
}

// Where to compute an output: in its own memory, or in scratch that narrow() then rounds into it.
static void *wide_output(DType storage, void *y, int64_t count) {
    return storage == dtype_full(storage) ? y : scratch((size_t)count * sizeof(float));
}

static void narrow(DType storage, void *y, const void *wide, int64_t count) {
    if (y != wide) convert(storage, y, dtype_full(storage), wide, count);
}

// ---- exponentials ----

// a b + c, rounded once where that is one instruction. GCC keeps to two of them in C11.
static inline float multiply_add(float a, float b, float c) {
#ifdef FP_FAST_FMAF
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// e^x in f32 for x <= 0 (softmax and sigmoid need no others; right up to 88), to about one unit in the last
// place: x = n ln 2 + r, e^x = 2^n e^r, and for |r| <= ln(2) / 2 a polynomial does (coefficients: Moshier,
// Cephes, expf). Below -87 it gives zero: subnormals would slow down every product that they enter. NaN
// stays NaN. There is no branch, nor a `?` that a compiler could turn into one, so that the loops around it
// become vector code.
static inline float exp_f32(float x) {
    const float to_integer = 0x1.8p23f;  // a sum with this has its integer part in the low bits
    float shifted = multiply_add(x, 1.44269504088896341f, to_integer);
    float n = shifted - to_integer;
    // ln 2 in two parts: n times the first is exact
    float r = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, x));
    float p = 1.9875691500e-4f;
    p = multiply_add(p, r, 1.3981999507e-3f);
    p = multiply_add(p, r, 8.3334519073e-3f);
    p = multiply_add(p, r, 4.1665795894e-2f);
    p = multiply_add(p, r, 1.6666665459e-1f);
    p = multiply_add(p, r, 5.0000001201e-1f);
    p = multiply_add(p, r * r, r) + 1;
    uint32_t bits, keep = -(uint32_t) !(x < -87);
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;  // 2^n from its exponent bits
    float power, result;
    memcpy(&power, &bits, sizeof power);
    result = p * power;
    memcpy(&bits, &result, sizeof bits);
    bits &= keep;
    memcpy(&result, &bits, sizeof result);
    return result;
}

// ---- AVX-512, where the processor has it ----

#if defined __AVX512F__ && defined __AVX512BW__ && defined __AVX512VL__
#define TILES 1
#include "ops_cpu_tiles.inc"
#else
#define TILES 0
typedef enum Bf16Way { WIDENED, BY_PAIRS, BY_AMX } Bf16Way;
static Bf16Way way_of(DType dtype) {
    const char *wanted = dtype == BF16 ? getenv("ULTRASCALE_BF16") : NULL;
    CHECK(!wanted || !*wanted || !strcmp(wanted, "f32"),
          "ULTRASCALE_BF16 is %s, which needs AVX-512; f32 would fit", wanted);
    return WIDENED;
}
#endif

// ---- the same code for f32 and f64 ----

#define REAL    float
#define IN_REGISTERS TILES  // 16 x 16 are transposed there
#define F(name) name##_f32
#define EXP     exp_f32
#define LOG     logf
#define SQRT    sqrtf
#define FABS    fabsf
#define GEMM    cblas_sgemm
#include "ops_cpu_rows.inc"
#include "ops_cpu_blas.inc"  // after the rows
#include "ops_cpu_chunk.inc"
#include "ops_cpu_experts.inc"
#include "ops_cpu_codes.inc"
#undef REAL
#undef IN_REGISTERS
#undef F
#undef EXP
#undef LOG
#undef SQRT
#undef FABS
#undef GEMM

#ifdef __clang__
#pragma clang diagnostic ignored "-Wpass-failed"  // exp of f64 is no vector code
#endif
#define REAL    double
#define IN_REGISTERS 0
#define F(name) name##_f64
#define EXP     exp
#define LOG     log
#define SQRT    sqrt
#define FABS    fabs
#define GEMM    cblas_dgemm
#include "ops_cpu_rows.inc"
#include "ops_cpu_blas.inc"  // after the rows
#include "ops_cpu_chunk.inc"
#include "ops_cpu_experts.inc"
#include "ops_cpu_codes.inc"

#define CALL(dtype, name, ...) ((dtype) == F64 ? name##_f64(__VA_ARGS__) : name##_f32(__VA_ARGS__))

#include "ops_cpu_narrow.inc"

// ---- elementwise ----

void kernel_fill(DType dtype, void *y, double value, int64_t count) {
    const size_t size = dtype_size(dtype);
    uint8_t code[sizeof(double)];
    dtype_convert(code, dtype, &value, F64, 1);
    bool zeros = true;
    for (size_t i = 0; i < size; i++) zeros = zeros && !code[i];
#pragma omp parallel
    {
        int64_t first, end;
        my_slice(count, &first, &end);
        char *at = (char *)y + first * size;
        const size_t bytes = (size_t)(end - first) * size;
        if (zeros) zero_rows(at, 1, bytes, 0);
        else if (bytes) {
            memcpy(at, code, size);
            for (size_t done = size; done < bytes; done *= 2)
                memcpy(at + done, at, done < bytes - done ? done : bytes - done);
        }
    }
}

void kernel_copy(DType y_dtype, void *y, DType x_dtype, const void *x, int64_t count) {
    convert(y_dtype, y, x_dtype, x, count);
}

void kernel_add(DType dtype, void *y, const void *a, const void *b, int64_t count) {
    if (is_narrow(dtype)) add_narrow(dtype, y, a, b, count);
    else CALL(dtype, add, y, a, b, count);
}

void kernel_accumulate(DType y_dtype, void *y, DType x_dtype, const void *x, int64_t count) {
    const DType wide = y_dtype == F64 || x_dtype == F64 ? F64 : F32;
    if (wide == F32 && (is_narrow(y_dtype) || is_narrow(x_dtype))) {
        accumulate_narrow(y_dtype, y, x_dtype, x, count);
        return;
    }
    scratch_begin();
    void *sum = widen_to(wide, y_dtype, y, count);
    CALL(wide, add, sum, sum, widen_to(wide, x_dtype, x, count), count);
    if (sum != y) convert(y_dtype, y, wide, sum, count);
}

void kernel_scale(DType dtype, void *y, double factor, int64_t count) {
    if (is_narrow(dtype)) scale_narrow(dtype, y, factor, count);
    else CALL(dtype, scale, y, factor, count);
}

// ---- reductions ----

#include "ops_cpu_sums.inc"

// Tokens index memory, so a wrong one must not get further than here.
static void check_tokens(const char *op, const int32_t *tokens, int64_t n, int64_t v, bool may_ignore) {
    for (int64_t i = 0; i < n; i++)
        CHECK((tokens[i] >= 0 && tokens[i] < v) || (may_ignore && tokens[i] == IGNORED_LABEL),
              "%s: number %lld of the tokens is %d, which a vocabulary of %lld has not", op, (long long)i,
              (int)tokens[i], (long long)v);
}

// ---- RMSNorm ----

void kernel_rmsnorm_forward(DType dtype, void *y, void *rstd, const void *x, const void *weight, int64_t n,
                            int64_t h, double eps) {
    scratch_begin();
    if (is_narrow(dtype)) rmsnorm_forward_narrow(dtype, y, rstd, x, weight, n, h, eps);
    else CALL(dtype, rmsnorm_forward, y, rstd, x, weight, n, h, eps);
}

void kernel_rmsnorm_backward(DType dtype, void *dx, DType dweight_dtype, void *dweight,
                             const void *dresidual, const void *dy, const void *x, const void *weight,
                             const void *rstd, int64_t n, int64_t h) {
    scratch_begin();
    if (is_narrow(dtype)) {
        rmsnorm_backward_narrow(dtype, dx, dweight_dtype, dweight, dresidual, dy, x, weight, rstd, n, h);
        return;
    }
    void *partials = scratch((size_t)((n + NORM_ROWS - 1) / NORM_ROWS * h) * dtype_size(dtype));
    CALL(dtype, rmsnorm_backward, dx, dweight, dresidual, dy, x, weight, rstd, partials, n, h);
}

// ---- RoPE ----

void kernel_rope(DType dtype, void *x, const int32_t *positions, int64_t n, int64_t heads,
                 int64_t head_size, Rope rope, int direction) {
    int32_t last = 0;
    for (int64_t i = 0; i < n; i++) {
        CHECK(positions[i] >= 0 && positions[i] < MAX_POSITIONS,
              "rope: number %lld of the positions is %d, not in [0, %d)", (long long)i, (int)positions[i],
              (int)MAX_POSITIONS);
        if (positions[i] > last) last = positions[i];
    }
    scratch_begin();
    if (dtype == F64) {
        rope_f64(x, positions, rotation_table_f64(last + 1, head_size, rope), n, heads, head_size,
                 direction);
        return;
    }
    const float *turn = rotation_table_f32(last + 1, head_size, rope);
    if (is_narrow(dtype)) rope_narrow(dtype, x, positions, turn, n, heads, head_size, direction);
    else rope_f32(x, positions, turn, n, heads, head_size, direction);
}

// ---- attention ----

void kernel_attention_forward(DType dtype, void *o, void *probs, const void *q, const void *k,
                              const void *v, AttentionShape shape) {
    scratch_begin();
    if (is_narrow(dtype)) {
        attention_forward_narrow(dtype, o, probs, q, k, v, shape);
        return;
    }
    const size_t room = (size_t)(shape.s * shape.head_size) * dtype_size(dtype);
    CALL(dtype, attention_forward, o, probs, q, k, v, scratch((size_t)omp_get_max_threads() * room), shape);
}

void kernel_attention_probs(DType dtype, void *probs, const void *q, const void *k, AttentionShape shape) {
    kernel_attention_forward(dtype, NULL, probs, q, k, NULL, shape);
}

void kernel_attention_backward(DType dtype, void *dq, void *dk, void *dv, const void *d_o, const void *q,
                               const void *k, const void *v, const void *probs, AttentionShape shape) {
    scratch_begin();
    if (is_narrow(dtype)) {
        attention_backward_narrow(dtype, dq, dk, dv, d_o, q, k, v, probs, shape);
        return;
    }
    const size_t room = (size_t)(shape.s * (QUERY_ROWS + 3 * shape.head_size)) * dtype_size(dtype);
    CALL(dtype, attention_backward, dq, dk, dv, d_o, q, k, v, probs,
         scratch((size_t)omp_get_max_threads() * room), shape);
}

// ---- SwiGLU ----

void kernel_swiglu_forward(DType dtype, void *act, const void *gate, const void *up, int64_t count) {
    if (is_narrow(dtype)) swiglu_forward_narrow(dtype, act, gate, up, count);
    else CALL(dtype, swiglu_forward, act, gate, up, count);
}

void kernel_swiglu_backward(DType dtype, void *dgate, void *dup, const void *dact, const void *gate,
                            const void *up, int64_t count) {
    if (is_narrow(dtype)) swiglu_backward_narrow(dtype, dgate, dup, dact, gate, up, count);
    else CALL(dtype, swiglu_backward, dgate, dup, dact, gate, up, count);
}

// ---- optimizers ----

void kernel_adamw(DType dtype, void *value, void *master, void *m, void *v, DType grad_dtype,
                  const void *grad, AdamW hyper, int64_t count) {
    if (is_narrow(dtype)) {
        adamw_narrow(dtype, value, master, m, v, grad_dtype, grad, hyper, count);
        return;
    }
    scratch_begin();
    void *stepped = master ? master : value;
    CALL(dtype, adamw, stepped, m, v, widen_to(dtype, grad_dtype, grad, count), hyper, count);
    narrow(dtype, value, stepped, count);
}

void kernel_sgd(DType dtype, void *value, void *master, DType grad_dtype, const void *grad, double lr,
                double grad_scale, int64_t count) {
    if (is_narrow(dtype)) {
        sgd_narrow(dtype, value, master, grad_dtype, grad, lr, grad_scale, count);
        return;
    }
    scratch_begin();
    void *stepped = master ? master : value;
    CALL(dtype, sgd, stepped, widen_to(dtype, grad_dtype, grad, count), lr, grad_scale, count);
    narrow(dtype, value, stepped, count);
}

#include "ops_cpu_matmul_kernels.inc"
#include "ops_cpu_chunk_kernels.inc"
#include "ops_cpu_vocabulary_kernels.inc"
#include "ops_cpu_parts_kernels.inc"
#include "ops_cpu_experts_kernels.inc"
#include "ops_cpu_codes_kernels.inc"
