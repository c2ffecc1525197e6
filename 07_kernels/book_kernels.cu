// book_kernels.cu: this chapter's kernels as the table that --kernels book puts in front of the back end
// (tensor/kernel_table.h), so that any program of the book trains on them, forward and backward.
//
//     operation                      kernel of                        where it serves
//     matmul                         coarsening: 8 x 8 or 4 x 4       f32
//     rmsnorm, forward, backward     fused_norm                       f32, rows of up to 16384
//     swiglu, forward, backward      fused_swiglu                     f32
//     cross_entropy, both            fused_cross_entropy              f32
//     attention_chunk, forward       flash_attention_2                f32, heads of 64 or 128, all keys or
//     and backward                   flash_attention_2_backward       those up to the query
//
// and, without being asked for, as the CUDA back end's own: hopper_fp8 multiplies 8-bit codes with block
// scales on an H100.
//
// The kernels are those of the programs: each file stands here without its main, in a namespace of its own.
// What this file adds is what an operation asks beyond them: chunks of keys that are merged, gradients that
// add to what is there, and the order (b, s, a) of what belongs to rows, which the programs have as
// (b, a, s). Scratch is the back end's, and all runs on its stream.
#include <math.h>

#include "cuda/device_cuda.h"
#include "cuda/instructions_hopper.h"
#include "flash_tiles.h"
#include "sixteen_bits.h"
#include "tensor/kernel_table.h"

#define NO_MAIN
namespace coarsening {
#include "coarsening.cu"
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
namespace hopper_fp8 {
#include "hopper_fp8.cu"
}
namespace forward {
#include "flash_attention_2.cu"
}
namespace backward {
#include "flash_attention_2_backward.cu"
}

static cudaStream_t stream() { return static_cast<cudaStream_t>(device_stream()); }
static int64_t divided_up(int64_t x, int64_t by) { return (x + by - 1) / by; }

// ---- matmul ----

template <int SIZE, bool TRANSPOSED_A, bool TRANSPOSED_B>
static void multiply(float *c, const float *a, const float *b, int64_t m, int64_t n, int64_t k) {
    constexpr int64_t TILE_SIDE = coarsening::SIDE * SIZE;
    const dim3 grid((unsigned)divided_up(n, TILE_SIDE), (unsigned)divided_up(m, TILE_SIDE));
    LAUNCH((coarsening::matmul<SIZE, SIZE, TRANSPOSED_A, TRANSPOSED_B>), grid, coarsening::THREADS, 0,
           stream(), c, a, b, m, n, k);
}

static bool matmul(DType dtype, void *c, const void *a, const void *b, int64_t m, int64_t n, int64_t k,
                   bool transpose_a, bool transpose_b, double beta) {
    if (dtype != F32 || m == 0 || n == 0) return false;
    // by size, A transposed, B transposed
    static void (*const run[2][2][2])(float *, const float *, const float *, int64_t, int64_t, int64_t) = {
        {{multiply<4, false, false>, multiply<4, false, true>},
         {multiply<4, true, false>, multiply<4, true, true>}},
        {{multiply<8, false, false>, multiply<8, false, true>},
         {multiply<8, true, false>, multiply<8, true, true>}}};
    const bool large = m >= 128 && n >= 128;
    float *product = (float *)c;
    if (beta != 0) product = static_cast<float *>(device_scratch((size_t)(m * n) * sizeof *product));
    run[large][transpose_a][transpose_b](product, (const float *)a, (const float *)b, m, n, k);
    if (beta != 0) kernel_accumulate(F32, c, F32, product, m * n);
    return true;
}

// ---- RMSNorm ----

constexpr int64_t MOST_WIDTH = 16384;  // three rows in shared memory

static bool rmsnorm_forward(DType dtype, void *y, void *rstd, const void *x, const void *weight, int64_t n,
                            int64_t h, double eps) {
    if (dtype != F32 || n == 0 || h > MOST_WIDTH) return false;
    CUDA_CHECK(cudaFuncSetAttribute(fused_norm::norm<false>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)(4 * MOST_WIDTH)));
    LAUNCH(fused_norm::norm<false>, (unsigned)n, fused_norm::BLOCK, (size_t)h * 4, stream(), (float *)y,
           (float *)rstd, NULL, (const float *)x, NULL, (const float *)weight, (int)h, 1 / (float)h,
           (float)eps);
    return true;
}

static bool rmsnorm_backward(DType dtype, void *dx, void *dweight, const void *dresidual, const void *dy,
                             const void *x, const void *weight, const void *rstd, int64_t n, int64_t h) {
    if (dtype != F32 || n == 0 || h > MOST_WIDTH) return false;
    const int64_t blocks = n < fused_norm::MOST_BLOCKS ? n : fused_norm::MOST_BLOCKS;
    float *parts = static_cast<float *>(device_scratch((size_t)((blocks + 1) * h) * 4));
    float *dw = parts + blocks * h;
    auto kernel = dresidual ? fused_norm::norm_backward<true> : fused_norm::norm_backward<false>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)(3 * 4 * MOST_WIDTH)));
    LAUNCH(kernel, (unsigned)blocks, fused_norm::BLOCK, (size_t)(3 * h) * 4, stream(), (float *)dx, parts,
           (const float *)dy, (const float *)x, (const float *)rstd, (const float *)weight,
           (const float *)dresidual, n, (int)h, 1 / (float)h);
    LAUNCH(fused_norm::add_parts, (unsigned)divided_up(h, fused_norm::BLOCK), fused_norm::BLOCK, 0,
           stream(), dw, parts, (int)blocks, (int)h);
    kernel_accumulate(F32, dweight, F32, dw, h);
    return true;
}

// ---- SwiGLU ----

static bool swiglu_forward(DType dtype, void *act, const void *gate, const void *up, int64_t count) {
    if (dtype != F32 || count == 0) return false;
    LAUNCH(fused_swiglu::swiglu, (unsigned)divided_up(count, fused_swiglu::BLOCK), fused_swiglu::BLOCK, 0,
           stream(), (float *)act, (const float *)gate, (const float *)up, count);
    return true;
}

// An element is read whole before its gradients are written, which may be where gate and up are.
static bool swiglu_backward(DType dtype, void *dgate, void *dup, const void *dact, const void *gate,
                            const void *up, int64_t count) {
    if (dtype != F32 || count == 0) return false;
    LAUNCH(fused_swiglu::swiglu_backward, (unsigned)divided_up(count, fused_swiglu::BLOCK),
           fused_swiglu::BLOCK, 0, stream(), (float *)dgate, (float *)dup, (const float *)dact,
           (const float *)gate, (const float *)up, count);
    return true;
}

// ---- cross-entropy ----

static bool cross_entropy_forward(DType dtype, void *losses, void *lse, const void *logits,
                                  const int32_t *targets, int64_t n, int64_t v) {
    if (dtype != F32 || n == 0) return false;
    LAUNCH(fused_cross_entropy::cross_entropy, (unsigned)n, fused_cross_entropy::BLOCK, 0, stream(),
           (float *)losses, (float *)lse, (const float *)logits, targets, v);
    return true;
}

static bool cross_entropy_backward(DType dtype, void *dlogits, const void *logits, const void *lse,
                                   const int32_t *targets, double scale, int64_t n, int64_t v) {
    if (dtype != F32 || n == 0) return false;
    if (dlogits != logits) kernel_copy(F32, dlogits, F32, logits, n * v);  // the kernel works in place
    LAUNCH(fused_cross_entropy::cross_entropy_backward, (unsigned)n, fused_cross_entropy::BLOCK, 0,
           stream(), (float *)dlogits, (const float *)lse, targets, v, (float)scale);
    return true;
}

// ---- attention ----

// Whether the kernels serve this chunk, and as what.
static bool heads_of(Heads *heads, DType dtype, const AttentionChunk &at) {
    *heads = {
        at.b, at.queries.s, at.heads, at.kv_heads, 1 / sqrtf((float)at.head_size), at.shape == MASK_CAUSAL};
    return dtype == F32 && at.shape != MASK_ANY && (at.head_size == 64 || at.head_size == 128) &&
           at.b > 0 && at.queries.s > 0 && at.b <= 65535 && at.heads <= 65535;
}

// Block (row: sample, token, head), a thread for each element: o and lse of the keys before take in
// what this chunk has given. Softmax over both is a mean, weighted by the sums of exponentials.
__global__ void merge_rows(float *o, float *lse, const float *more, const float *more_lse, Heads n) {
    const int64_t row = blockIdx.x, head = row % n.a, token = row / n.a % n.s, sample = row / n.a / n.s;
    const int64_t at = row * blockDim.x + threadIdx.x;
    const float before = lse[row], added = more_lse[(sample * n.a + head) * n.s + token];
    const float top = fmaxf(before, added), keep = expf(before - top), gain = expf(added - top);
    o[at] = (keep * o[at] + gain * more[at]) / (keep + gain);
    __syncthreads();  // everybody has read lse
    if (threadIdx.x == 0) lse[row] = top + logf(keep + gain);
}

// out (b, a, s) = in (b, s, a)
__global__ void by_heads(float *out, const float *in, Heads n) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n.b * n.s * n.a) return;
    const int64_t head = i % n.a, token = i / n.a % n.s, sample = i / n.a / n.s;
    out[(sample * n.a + head) * n.s + token] = in[i];
}

template <int D>
static void flash_forward(float *o, float *lse, const float *q, const float *k, const float *v,
                          const Heads &n) {
    const int64_t rows = n.b * n.s * n.a;
    float *more = static_cast<float *>(device_scratch((size_t)(rows * (D + 1)) * 4));
    float *more_lse = more + rows * D;
    forward::launch_on<D>(stream(), more, more_lse, q, k, v, n);
    LAUNCH(merge_rows, (unsigned)rows, D, 0, stream(), o, lse, more, more_lse, n);
}

static bool attention_chunk_forward(DType dtype, void *o, void *lse, const void *q, const void *k,
                                    const void *v, AttentionChunk at) {
    Heads heads;
    if (!heads_of(&heads, dtype, at)) return false;
    auto run = at.head_size == 64 ? flash_forward<64> : flash_forward<128>;
    run((float *)o, (float *)lse, (const float *)q, (const float *)k, (const float *)v, heads);
    return true;
}

template <int D>
static void flash_backward(const Gradients &to, const Operands &in, const float *dots, const Heads &n) {
    const int64_t rows = n.b * n.s * n.a, queries = rows * D, keys = n.b * n.s * n.kv * D;
    float *dq = static_cast<float *>(device_scratch((size_t)(queries + 2 * keys + 4 * rows) * 4));
    float *dk = dq + queries, *dv = dk + keys, *lse = dv + keys, *delta = lse + rows;
    const unsigned blocks = (unsigned)divided_up(rows, 256);
    Operands own = in;
    own.lse = lse;
    LAUNCH(by_heads, blocks, 256, 0, stream(), lse, in.lse, n);
    LAUNCH(by_heads, blocks, 256, 0, stream(), delta, dots, n);
    backward::launch_on<D>(stream(), {dq, dk, dv}, own, delta, delta + rows, n);
    kernel_accumulate(F32, to.dq, F32, dq, queries);
    kernel_accumulate(F32, to.dk, F32, dk, keys);
    kernel_accumulate(F32, to.dv, F32, dv, keys);
}

static bool attention_chunk_backward(DType dtype, void *dq, void *dk, void *dv, const void *d_o,
                                     const void *q, const void *k, const void *v, const void *lse,
                                     const void *dots, AttentionChunk at) {
    Heads heads;
    if (!heads_of(&heads, dtype, at)) return false;
    const Gradients to = {(float *)dq, (float *)dk, (float *)dv};
    const Operands in = {(const float *)q,   (const float *)k,  (const float *)v, NULL,
                         (const float *)lse, (const float *)d_o};
    (at.head_size == 64 ? flash_backward<64> : flash_backward<128>)(to, in, (const float *)dots, heads);
    return true;
}

// ---- 8-bit codes with block scales ----

// Whether this GPU runs code for sm_90a, and this build has some: what other GPUs have traps.
__global__ void find_hopper(int *found) {
#if defined __CUDACC__ && !defined __CUDA_ARCH_FEAT_SM90_ALL
    *found = 0;
#else
    *found = 1;
#endif
}

static bool has_hopper() {
    static int has = -1;
    if (has >= 0) return has;
    int *found = static_cast<int *>(device_scratch(sizeof *found));
    LAUNCH(find_hopper, 1, 1, 0, stream(), found);
    CUDA_CHECK(cudaMemcpyAsync(&has, found, sizeof has, cudaMemcpyDeviceToHost, stream()));
    CUDA_CHECK(cudaStreamSynchronize(stream()));
    return has;
}

template <hopper_fp8::Version VERSION>
static void multiply_codes(DType dtype, void *c, const hopper_fp8::Operands &in, int64_t m, int64_t n,
                           int64_t k) {
    if (dtype == F32) hopper_fp8::launch_on<VERSION>(stream(), static_cast<float *>(c), in, m, n, k);
    else hopper_fp8::launch_on<VERSION>(stream(), static_cast<__nv_bfloat16 *>(c), in, m, n, k);
}

bool matmul_codes_linked(DType dtype, void *c, KernelCodes a, KernelCodes b, int64_t m, int64_t n,
                         int64_t k, int64_t segment, int bits, double beta) {
    constexpr int64_t TILE = hopper_fp8::K, MOST = INT32_MAX - TILE;
    const bool tiles = a.rows == 1 && (b.rows == 1 || b.rows == TILE) && a.tile_columns == TILE &&
                       b.tile_columns == TILE && segment == TILE && !bits;
    if (!tiles || a.dtype != E4M3 || b.dtype != E4M3 || (dtype != F32 && dtype != BF16) || k == 0 ||
        k % 16 || ((uintptr_t)a.codes | (uintptr_t)b.codes) % 16 || m > MOST || n > MOST || k > MOST ||
        !has_hopper())
        return false;
    const hopper_fp8::Operands in = {a.codes, b.codes, a.scale, b.scale, beta != 0};
    if (b.rows == 1) multiply_codes<hopper_fp8::ROWS>(dtype, c, in, m, n, k);
    else multiply_codes<hopper_fp8::BLOCKS>(dtype, c, in, m, n, k);
    return true;
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
                                      attention_chunk_backward};
    return &table;
}
