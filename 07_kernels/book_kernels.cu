// book_kernels.cu: this chapter's kernels as the table that --kernels book puts in front of the back end
// (tensor/kernel_table.h), so that any program of the book trains on them, forward and backward.
//
//     operation                      kernel of                        where it serves
//     matmul                         coarsening: 8 x 8 or 4 x 4       f32
//                                    tensor_cores: a ring of stages   bf16, f16; into the same
//     rmsnorm, forward, backward     fused_norm                       f32, bf16, f16; a row three times in
//                                                                     shared memory
//     swiglu, forward, backward      fused_swiglu                     f32, bf16, f16
//     cross_entropy, both            fused_cross_entropy              f32, bf16, f16
//     attention_chunk, both          those of book_attention.cu
//     adamw                          fused_adamw                      f32; bf16, f16 with a master
//
// The kernels are those of the programs: each file is included here without its main, in its own namespace.
// This file adds what an operation needs beyond them: transposed operands, and gradients that accumulate.
// Scratch memory is the back end's, and everything runs on its stream.
#include "book_kernels.h"

#include <math.h>

#include "cuda/instructions.h"
#include "sixteen_bits.h"

#define NO_MAIN
namespace coarsening {
#include "coarsening.cu"
}
namespace tensor_cores {
#include "tensor_cores.cu"
}
namespace fused_adamw {
#include "fused_adamw.cu"
}
namespace fused_norm {
#include "fused_norm.cu"
}
namespace fused_swiglu {
#include "fused_swiglu.cu"
}
namespace fused_cross_entropy {
#include "fused_cross_entropy.cu"
}

// ---- matmul ----

template <int SIZE, bool TRANSPOSED_A, bool TRANSPOSED_B>
static void multiply(float *c, const float *a, const float *b, int64_t m, int64_t n, int64_t k, bool add) {
    constexpr int64_t TILE_SIDE = coarsening::SIDE * SIZE;
    const dim3 grid((unsigned)ceil_div(n, TILE_SIDE), (unsigned)ceil_div(m, TILE_SIDE));
    const auto kernel = add ? coarsening::matmul<SIZE, SIZE, TRANSPOSED_A, TRANSPOSED_B, true>
                            : coarsening::matmul<SIZE, SIZE, TRANSPOSED_A, TRANSPOSED_B>;
    LAUNCH(kernel, grid, coarsening::THREADS, 0, stream(), c, a, b, m, n, k);
}

// y (columns, rows) = the transpose of x; block (32, 8): a tile of 32 x 32.
__global__ void __launch_bounds__(256) transpose(uint16_t *y, const uint16_t *x, int rows, int columns) {
    __shared__ uint16_t tile[32][34];  // rows of 17 words: those of a column lie in different banks
    const int row0 = (int)blockIdx.y * 32, column0 = (int)blockIdx.x * 32, lane = (int)threadIdx.x;
    for (int i = (int)threadIdx.y; i < 32; i += 8)
        if (row0 + i < rows && column0 + lane < columns)
            tile[i][lane] = x[(row0 + i) * columns + column0 + lane];
    __syncthreads();  // the tile is complete
    for (int i = (int)threadIdx.y; i < 32; i += 8)
        if (column0 + i < columns && row0 + lane < rows)
            y[(column0 + i) * rows + row0 + lane] = tile[lane][i];
}

// The operand as (rows, columns): x itself or, if x is stored transposed, its transpose in `room`.
template <class T>
static const T *untransposed(T *room, const T *x, bool transposed, int64_t rows, int64_t columns) {
    if (!transposed || !rows || !columns) return x;
    const dim3 grid((unsigned)ceil_div(rows, 32), (unsigned)ceil_div(columns, 32)), block(32, 8);
    LAUNCH(transpose, grid, block, 0, stream(), reinterpret_cast<uint16_t *>(room),
           reinterpret_cast<const uint16_t *>(x), (int)columns, (int)rows);
    return room;
}

// On tensor cores.
template <class T>
static bool multiply_16(T *c, const T *a, const T *b, int64_t m, int64_t n, int64_t k, bool transpose_a,
                        bool transpose_b, bool add) {
    if (m * n > INT32_MAX || m * k > INT32_MAX || k * n > INT32_MAX) return false;
    // of what is transposed: each from a multiple of 16 bytes on
    const int64_t of_a = transpose_a ? ceil_div(m * k, 8) * 8 : 0;
    const int64_t of_b = transpose_b ? ceil_div(k * n, 8) * 8 : 0;
    T *room = static_cast<T *>(device_scratch((size_t)(of_a + of_b) * sizeof *room));
    const auto run = add ? tensor_cores::launch_on<T, tensor_cores::STAGES, true, true>
                         : tensor_cores::launch_on<T, tensor_cores::STAGES, true, false>;
    run(stream(), c, untransposed(room, a, transpose_a, m, k),
        untransposed(room + of_a, b, transpose_b, k, n), {(int)m, (int)n, (int)k});
    return true;
}

static bool matmul(DType dtype, DType c_dtype, void *c, const void *a, const void *b, int64_t m, int64_t n,
                   int64_t k, bool transpose_a, bool transpose_b, double beta) {
    constexpr int64_t MOST = 65535 * 32;  // rows or columns: a grid has at most 65535 blocks along y
    if (m == 0 || n == 0 || c_dtype != dtype || m > MOST || n > MOST || k > MOST) return false;
    if (dtype == BF16)
        return multiply_16((__nv_bfloat16 *)c, (const __nv_bfloat16 *)a, (const __nv_bfloat16 *)b, m, n, k,
                           transpose_a, transpose_b, beta != 0);
    if (dtype == F16)
        return multiply_16((__half *)c, (const __half *)a, (const __half *)b, m, n, k, transpose_a,
                           transpose_b, beta != 0);
    if (dtype != F32) return false;
    // by size, A transposed, B transposed
    static void (*const run[2][2][2])(float *, const float *, const float *, int64_t, int64_t, int64_t,
                                      bool) = {{{multiply<4, false, false>, multiply<4, false, true>},
                                                {multiply<4, true, false>, multiply<4, true, true>}},
                                               {{multiply<8, false, false>, multiply<8, false, true>},
                                                {multiply<8, true, false>, multiply<8, true, true>}}};
    const bool large = m >= 128 && n >= 128;
    run[large][transpose_a][transpose_b]((float *)c, (const float *)a, (const float *)b, m, n, k, beta != 0);
    return true;
}

// Calls run with a value of the type that dtype names; f64 has none here.
template <class Run>
static bool in_type(DType dtype, Run run) {
    if (dtype == F32) run(float());
    if (dtype == BF16) run(__nv_bfloat16());
    if (dtype == F16) run(__half());
    return dtype != F64;
}

// ---- RMSNorm ----

// Whether a block may have the shared memory that backward needs for a row and for its sums.
static bool fits(int64_t h) {
    return may_share((int64_t)(fused_norm::backward_bytes(h) + sizeof(float) * fused_norm::WARPS));
}

static bool rmsnorm_forward(DType dtype, void *y, void *rstd, const void *x, const void *weight, int64_t n,
                            int64_t h, double eps) {
    if (n == 0 || !fits(h)) return false;
    return in_type(dtype, [&](auto zero) {
        typedef decltype(zero) T;
        fused_norm::Norm<T> t = {};
        t.y = (T *)y, t.rstd = (float *)rstd, t.x = (const T *)x, t.w = (const T *)weight;
        fused_norm::launch_forward(stream(), t, n, (int)h, (float)eps);
    });
}

static bool rmsnorm_backward(DType dtype, void *dx, DType dweight_dtype, void *dweight,
                             const void *dresidual, const void *dy, const void *x, const void *weight,
                             const void *rstd, int64_t n, int64_t h) {
    if (n == 0 || !fits(h)) return false;
    return in_type(dtype, [&](auto zero) {
        typedef decltype(zero) T;
        const int64_t parts = fused_norm::blocks_of(n) * h;
        fused_norm::Norm<T> t = {};
        t.parts = static_cast<float *>(device_scratch((size_t)(parts + h) * 4)), t.dw = t.parts + parts;
        t.dx = (T *)dx, t.dx_new = (const T *)dresidual, t.dy = (const T *)dy;
        t.x = (const T *)x, t.w = (const T *)weight, t.rstd = (float *)rstd;
        fused_norm::launch_backward(stream(), t, n, (int)h);
        kernel_accumulate(dweight_dtype, dweight, F32, t.dw, h);
    });
}

// ---- SwiGLU ----

static bool swiglu_forward(DType dtype, void *act, const void *gate, const void *up, int64_t count) {
    return count > 0 && in_type(dtype, [&](auto zero) {
        typedef decltype(zero) T;
        fused_swiglu::launch_forward(stream(), (T *)act, (const T *)gate, (const T *)up, count);
    });
}

static bool swiglu_backward(DType dtype, void *dgate, void *dup, const void *dact, const void *gate,
                            const void *up, int64_t count) {
    return count > 0 && in_type(dtype, [&](auto zero) {
        typedef decltype(zero) T;
        fused_swiglu::launch_backward(stream(), (T *)dgate, (T *)dup, (const T *)dact, (const T *)gate,
                                      (const T *)up, count);
    });
}

// ---- cross-entropy ----

// The first target that is neither in the vocabulary nor "none": the host ends the run at its next wait, as
// with the back end's own kernel.
__global__ void check_targets(IndexFault *fault, const int32_t *targets, int64_t n, int64_t v,
                              const char *sentence) {
    const int64_t i = element();
    if (i >= n) return;
    const int32_t target = targets[i];
    if ((target >= 0 && target < v) || target == IGNORED_LABEL) return;
    if (atomicCAS(&fault->taken, 0, 1) != 0) return;
    fault->value = target, fault->index = i, fault->bound = v, fault->sentence = sentence;
}

static bool cross_entropy_forward(DType dtype, void *losses, void *lse, const void *logits,
                                  const int32_t *targets, int64_t n, int64_t v) {
    if (n > 0 && dtype != F64) {
        LAUNCH(
            check_targets, (unsigned)ceil_div(n, 256), 256, 0, stream(), &device_mailbox()->fault, targets,
            n, v,
            "cross_entropy_forward: number %lld of the tokens is %d, which a vocabulary of %lld has not");
        device_expect_fault();
    }
    return n > 0 && in_type(dtype, [&](auto zero) {
        typedef decltype(zero) T;
        fused_cross_entropy::launch_forward(stream(), (float *)losses, (float *)lse, (const T *)logits,
                                            targets, n, v);
    });
}

// If the library counts what f16 loses (kernel_underflows), so does the book.
static bool cross_entropy_backward(DType dtype, void *dlogits, const void *logits, const void *lse,
                                   const int32_t *targets, double scale, int64_t n, int64_t v) {
    if (n > 0 && dlogits != logits && dtype != F64)
        kernel_copy(dtype, dlogits, dtype, logits, n * v);  // the kernel works in place
    return n > 0 && in_type(dtype, [&](auto zero) {
        Mailbox *mailbox = device_mailbox();
        fused_cross_entropy::launch_backward(stream(), (decltype(zero) *)dlogits, (const float *)lse,
                                             targets, n, v, (float)scale,
                                             {&mailbox->rounded, &mailbox->underflows});
    });
}

// ---- AdamW ----

// The factor of the gradient goes to device memory, where a run that clips on a GPU would have it.
template <class T, class G>
static bool step(T *value, float *master, float *m, float *v, const G *grad, const AdamW &h,
                 int64_t count) {
    if ((sizeof(T) == 2) != (master != NULL)) return false;
    float *scale = static_cast<float *>(device_scratch(sizeof *scale));
    const fused_adamw::Step c = {(float)h.beta1,
                                 (float)h.beta2,
                                 (float)(1 - h.beta1),
                                 (float)(1 - h.beta2),
                                 (float)(h.lr / (1 - pow(h.beta1, (double)h.step))),
                                 (float)(1 / sqrt(1 - pow(h.beta2, (double)h.step))),
                                 (float)h.eps,
                                 (float)(1 - h.lr * h.weight_decay)};
    kernel_fill(F32, scale, h.grad_scale, 1);
    LAUNCH((fused_adamw::adamw<T, G>), (unsigned)ceil_div(count, fused_adamw::BLOCK), fused_adamw::BLOCK, 0,
           stream(), value, master ? master : reinterpret_cast<float *>(value), m, v, grad, scale, c,
           count);
    return true;
}

template <class T>
static bool step_of(DType dtype, DType grad_dtype, void *value, void *master, void *m, void *v,
                    const void *grad, const AdamW &hyper, int64_t count) {
    T *to = (T *)value;
    float *w = (float *)master, *m1 = (float *)m, *m2 = (float *)v;
    if (grad_dtype == F32) return step(to, w, m1, m2, (const float *)grad, hyper, count);
    return grad_dtype == dtype && step(to, w, m1, m2, (const T *)grad, hyper, count);
}

static bool adamw(DType dtype, void *value, void *master, void *m, void *v, DType grad_dtype,
                  const void *grad, AdamW hyper, int64_t count) {
    if (dtype == F64 || count == 0) return false;
    auto run = dtype == F32 ? step_of<float> : dtype == BF16 ? step_of<__nv_bfloat16> : step_of<__half>;
    return run(dtype, grad_dtype, value, master, m, v, grad, hyper, count);
}

// ---- the table ----

const KernelTable *kernel_table_linked(void) {
    static const KernelTable table = {matmul,
                                      rmsnorm_forward,
                                      rmsnorm_backward,
                                      swiglu_forward,
                                      swiglu_backward,
                                      cross_entropy_forward,
                                      cross_entropy_backward,
                                      attention_chunk_forward,
                                      attention_chunk_backward,
                                      adamw};
    return &table;
}
