// book_attention.cu: the attention kernels in the table of book_kernels.cu.
//
//     operation                      kernel of                            where it serves
//     attention_chunk_forward        flash_attention_2                    f32
//                                    flash_attention_2_tensor             bf16, f16
//     attention_chunk_backward       flash_attention_2_backward           f32
//                                    flash_attention_2_tensor_backward    bf16, f16
//
// with heads of 64 or 128 whose tiles fit into this GPU's shared memory, under any mask: a mask that needs
// tables of tokens runs as TokenHeads, the others as Heads (flash_mask.h). This file adds what the
// operations need beyond the programs: chunks of keys that are merged, gradients that accumulate, and rows
// in the order (b, s, a), where the programs have (b, a, s).
#include <math.h>

#include "book_kernels.h"
#include "flash_fragments.h"

#define NO_MAIN
namespace forward {
#include "flash_attention_2.cu"
}
namespace backward {
#include "flash_attention_2_backward.cu"
}
namespace forward_16 {
#include "flash_attention_2_tensor.cu"
}
namespace backward_16 {
#include "flash_attention_2_tensor_backward.cu"
}

// The most shared memory that a block needs: its dynamic arrays, and 2 kB for the static ones. With
// TokenHeads there is a plan of tiles, which grows with the sequence.
static int64_t plan_of(const AttentionChunk &at, int64_t tokens) {
    return at.shape == MASK_ANY ? plan_bytes(TokenHeads{}, ceil_div(tokens, ATTENTION_TILE)) : 0;
}
static int64_t forward_bytes(DType dtype, const AttentionChunk &at) {
    const int d = (int)at.head_size;
    return 2048 + (dtype == F32 ? tile_bytes(d, forward::TILES + 2, forward::TILES)
                                : forward_16::shared_bytes(d) + plan_of(at, at.keys.s));
}
static int64_t backward_bytes(DType dtype, const AttentionChunk &at) {
    const int d = (int)at.head_size;
    return 2048 + (dtype == F32 ? tile_bytes(d, 2 * backward::TILES + 2, 2 * backward::TILES)
                                : backward_16::shared_bytes(d) + plan_of(at, at.queries.s));
}

// Whether the kernels serve this chunk, and as what. They load rows in packs of 16 bytes.
template <class... Arrays>
static bool heads_of(TokenHeads *shape, DType dtype, const AttentionChunk &at, int64_t bytes,
                     const Arrays *...arrays) {
    const float scale = 1 / sqrtf((float)at.head_size);
    *shape = {
        {at.b, at.queries.s, at.heads, at.kv_heads, scale, at.shape == MASK_CAUSAL}, at.queries, at.keys};
    return dtype != F64 && (at.head_size == 64 || at.head_size == 128) && at.b > 0 && at.queries.s > 0 &&
           at.keys.s > 0 && at.b <= 65535 && at.heads <= 65535 && ((uintptr_t)arrays | ...) % 16 == 0 &&
           may_share(bytes);
}

// The kernels of each type.
template <int D, class Shape>
static void forward_of(float *o, float *lse, const float *q, const float *k, const float *v,
                       const Shape &n) {
    forward::launch_on<D>(stream(), o, lse, q, k, v, n);
}
template <int D, class T, class Shape>
static void forward_of(T *o, float *lse, const T *q, const T *k, const T *v, const Shape &n) {
    forward_16::launch_on<T, D>(stream(), o, lse, q, k, v, n);
}
template <int D, class Shape>
static void backward_of(const Gradients &to, const Operands &in, const float *delta, float *room,
                        const Shape &n) {
    backward::launch_on<D>(stream(), to, in, delta, room, n);
}
template <int D, class T, class Shape>
static void backward_of(const GradientsIn<T> &to, const OperandsIn<T> &in, const float *delta, float *room,
                        const Shape &n) {
    backward_16::launch_on<T, D>(stream(), to, in, delta, room, n);
}

// Block (row: sample, token, head), a thread for each element: merges this chunk's o and lse into those of
// the keys before. Softmax over both is a mean, weighted by the sums of exponentials. A row that has seen no
// key yet keeps o = 0 and lse = -inf.
template <class T>
__global__ void merge_rows(float *o, float *lse, const T *more, const float *more_lse, Heads n) {
    const int64_t row = blockIdx.x, head = row % n.a, token = row / n.a % n.s, sample = row / n.a / n.s;
    const int64_t at = row * blockDim.x + threadIdx.x;
    const float before = lse[row], added = more_lse[(sample * n.a + head) * n.s + token];
    const float top = shift_of<TokenHeads>(fmaxf(before, added)), keep = expf(before - top);
    const float gain = expf(added - top), total = keep + gain;
    o[at] = total == 0 ? 0 : (keep * o[at] + gain * static_cast<float>(more[at])) / total;
    __syncthreads();  // all threads have read lse
    if (threadIdx.x == 0) lse[row] = top + logf(total);
}

// out (b, a, s) = in (b, s, a)
__global__ void by_heads(float *out, const float *in, Heads n) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n.b * n.s * n.a) return;
    const int64_t head = i % n.a, token = i / n.a % n.s, sample = i / n.a / n.s;
    out[(sample * n.a + head) * n.s + token] = in[i];
}

template <int D, class T, class Shape>
static void flash_forward(void *o, void *lse, const T *q, const T *k, const T *v, const Shape &n) {
    const int64_t rows = n.b * n.s * n.a;
    T *more = static_cast<T *>(device_scratch((size_t)rows * (D * sizeof(T) + 4)));
    float *more_lse = reinterpret_cast<float *>(more + rows * D);
    forward_of<D>(more, more_lse, q, k, v, n);
    LAUNCH((merge_rows<T>), (unsigned)rows, D, 0, stream(), (float *)o, (float *)lse, more, more_lse,
           (const Heads &)n);
}

template <class T, class Shape>
static void chunk_forward(void *o, void *lse, const void *q, const void *k, const void *v,
                          int64_t head_size, const Shape &n) {
    auto run = head_size == 64 ? flash_forward<64, T, Shape> : flash_forward<128, T, Shape>;
    run(o, lse, (const T *)q, (const T *)k, (const T *)v, n);
}

template <class Shape>
static void forward_in(DType dtype, void *o, void *lse, const void *q, const void *k, const void *v,
                       int64_t head_size, const Shape &n) {
    auto run = dtype == F32    ? chunk_forward<float, Shape>
               : dtype == BF16 ? chunk_forward<__nv_bfloat16, Shape>
                               : chunk_forward<__half, Shape>;
    run(o, lse, q, k, v, head_size, n);
}

bool attention_chunk_forward(DType dtype, void *o, void *lse, const void *q, const void *k, const void *v,
                             AttentionChunk at) {
    TokenHeads shape;
    if (!heads_of(&shape, dtype, at, forward_bytes(dtype, at), q, k, v)) return false;
    if (at.shape == MASK_ANY) forward_in(dtype, o, lse, q, k, v, at.head_size, shape);
    else forward_in<Heads>(dtype, o, lse, q, k, v, at.head_size, shape);
    return true;
}

// What a gradient gets in f32, from scratch.
struct ChunkGradients {
    DType dtype;
    void *dq, *dk, *dv;
};

template <int D, class T, class Shape>
static void flash_backward(const ChunkGradients &to, const OperandsIn<T> &in, const float *dots,
                           const Shape &n) {
    const int64_t rows = n.b * n.s * n.a, queries = rows * D, keys = n.b * keys_of(n) * n.kv * D;
    const int64_t room = backward_room(n, D);
    T *dq = static_cast<T *>(
        device_scratch((size_t)(queries + 2 * keys) * sizeof(T) + (size_t)(room + 2 * rows) * 4));
    T *dk = dq + queries, *dv = dk + keys;
    float *words = reinterpret_cast<float *>(dv + keys), *lse = words + room, *delta = lse + rows;
    const unsigned blocks = (unsigned)ceil_div(rows, 256);
    OperandsIn<T> own = in;
    own.lse = lse;
    LAUNCH(by_heads, blocks, 256, 0, stream(), lse, in.lse, (const Heads &)n);
    LAUNCH(by_heads, blocks, 256, 0, stream(), delta, dots, (const Heads &)n);
    backward_of<D>(GradientsIn<T>{dq, dk, dv}, own, delta, words, n);
    kernel_accumulate(F32, to.dq, to.dtype, dq, queries);
    kernel_accumulate(F32, to.dk, to.dtype, dk, keys);
    kernel_accumulate(F32, to.dv, to.dtype, dv, keys);
}

template <class T, class Shape>
static void chunk_backward(const ChunkGradients &to, const void *const in[4], const void *lse,
                           const void *dots, int64_t head_size, const Shape &n) {
    const OperandsIn<T> own = {(const T *)in[0],   (const T *)in[1], (const T *)in[2], NULL,
                               (const float *)lse, (const T *)in[3]};
    auto run = head_size == 64 ? flash_backward<64, T, Shape> : flash_backward<128, T, Shape>;
    run(to, own, (const float *)dots, n);
}

template <class Shape>
static void backward_in(DType dtype, const ChunkGradients &to, const void *const in[4], const void *lse,
                        const void *dots, int64_t head_size, const Shape &n) {
    auto run = dtype == F32    ? chunk_backward<float, Shape>
               : dtype == BF16 ? chunk_backward<__nv_bfloat16, Shape>
                               : chunk_backward<__half, Shape>;
    run(to, in, lse, dots, head_size, n);
}

bool attention_chunk_backward(DType dtype, void *dq, void *dk, void *dv, const void *d_o, const void *q,
                              const void *k, const void *v, const void *lse, const void *dots,
                              AttentionChunk at) {
    TokenHeads shape;
    if (!heads_of(&shape, dtype, at, backward_bytes(dtype, at), q, k, v, d_o)) return false;
    const void *const in[] = {q, k, v, d_o};
    const ChunkGradients to = {dtype, dq, dk, dv};
    if (at.shape == MASK_ANY) backward_in(dtype, to, in, lse, dots, at.head_size, shape);
    else backward_in<Heads>(dtype, to, in, lse, dots, at.head_size, shape);
    return true;
}
