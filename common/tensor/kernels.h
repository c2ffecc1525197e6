// kernels.h: what a back end implements. Before it calls a kernel, ops.c has checked and counted every
// argument, and there is memory behind each (no dry run); a kernel only computes.
//
// Pointers are device addresses of contiguous row-major arrays; sizes are in elements; `dtype` is that of
// every floating-point array of the call whose pointer has no dtype of its own before it. Shapes, aliasing,
// "=" and "+=" are as ops.h says for the operation of the same name. A kernel may return before the device
// has finished, except one that returns a number.
#ifndef TENSOR_KERNELS_H
#define TENSOR_KERNELS_H

#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

void kernel_fill(DType dtype, void *y, double value, int64_t count);
void kernel_copy(DType y_dtype, void *y, DType x_dtype, const void *x, int64_t count);
void kernel_add(DType dtype, void *y, const void *a, const void *b, int64_t count);
void kernel_accumulate(DType y_dtype, void *y, DType x_dtype, const void *x, int64_t count);
void kernel_scale(DType dtype, void *y, double factor, int64_t count);

double kernel_sum(DType dtype, const void *x, int64_t count);
double kernel_sum_squares(DType dtype, const void *x, int64_t count);
void kernel_add_sum(DType dtype, double *y, const void *x, int64_t count, double factor);
// y (n), ranges (n) in host memory
void kernel_squares_of_ranges(DType dtype, double *y, const void *x, const FlatRange *ranges, int64_t n);

// c (m, n) in dtype, or in f32 beside a 16-bit dtype; a is stored as (m, k) or as its transpose (k, m), b
// as (k, n) or (n, k)
void kernel_matmul(DType dtype, DType c_dtype, void *c, const void *a, const void *b, int64_t m, int64_t n,
                   int64_t k, bool transpose_a, bool transpose_b, double beta);

typedef struct KernelProduct {
    void *c;
    const void *a, *b;
    int64_t m, n, k;
} KernelProduct;
// The sum of products that have the same c, m and n.
void kernel_matmul_sum(DType dtype, DType c_dtype, int count, const KernelProduct *products,
                       bool transpose_a, bool transpose_b, double beta);
// Several products with the same k that share a, or share b.
void kernel_matmuls(DType dtype, DType c_dtype, int count, const KernelProduct *products, bool transpose_a,
                    bool transpose_b, double beta);

// y, dy (n, h), tokens (n), weight, dweight (v, h). Here and below, the gradient of a weight may be f32
// beside a 16-bit dtype.
void kernel_embedding_forward(DType dtype, void *y, const int32_t *tokens, const void *weight, int64_t n,
                              int64_t v, int64_t h);
void kernel_embedding_backward(DType dtype, DType dweight_dtype, void *dweight, const void *dy,
                               const int32_t *tokens, int64_t n, int64_t v, int64_t h);

// x, y, dx, dy, dresidual (n, h), weight, dweight (h), rstd (n) f32 or f64; dresidual may be NULL
void kernel_rmsnorm_forward(DType dtype, void *y, void *rstd, const void *x, const void *weight, int64_t n,
                            int64_t h, double eps);
void kernel_rmsnorm_backward(DType dtype, void *dx, DType dweight_dtype, void *dweight,
                             const void *dresidual, const void *dy, const void *x, const void *weight,
                             const void *rstd, int64_t n, int64_t h);

// x (n, heads * head_size), positions (n)
void kernel_rope(DType dtype, void *x, const int32_t *positions, int64_t n, int64_t heads,
                 int64_t head_size, Rope rope, int direction);

void kernel_attention_forward(DType dtype, void *o, void *probs, const void *q, const void *k,
                              const void *v, AttentionShape shape);
void kernel_attention_probs(DType dtype, void *probs, const void *q, const void *k, AttentionShape shape);
void kernel_attention_backward(DType dtype, void *dq, void *dk, void *dv, const void *d_o, const void *q,
                               const void *k, const void *v, const void *probs, AttentionShape shape);

// The arguments of op_attention_chunk_*: sizes, and the tokens of either side. positions, documents (b, s)
// and bounds (b, tiles) are as in AttentionPositions, all in device memory.
typedef struct ChunkTokens {
    int64_t s, tiles;
    const int32_t *positions, *documents;
    const TileBounds *bounds;
} ChunkTokens;
typedef struct AttentionChunk {
    int64_t b, heads, kv_heads, head_size;
    ChunkTokens queries, keys;
    MaskShape shape;
} AttentionChunk;
// o, lse, dots, dq, dk, dv are f32, or f64 if dtype is f64; `dtype` is that of the others. o_dtype, of the
// o that the dots are computed from, is either of the two.
void kernel_attention_chunk_forward(DType dtype, void *o, void *lse, const void *q, const void *k,
                                    const void *v, AttentionChunk chunk);
// n: rows
void kernel_attention_chunk_dots(DType dtype, void *dots, DType o_dtype, const void *o, const void *d_o,
                                 int64_t n, AttentionHeads heads);
void kernel_attention_chunk_backward(DType dtype, void *dq, void *dk, void *dv, const void *d_o,
                                     const void *q, const void *k, const void *v, const void *lse,
                                     const void *dots, AttentionChunk chunk);

void kernel_swiglu_forward(DType dtype, void *act, const void *gate, const void *up, int64_t count);
void kernel_swiglu_backward(DType dtype, void *dgate, void *dup, const void *dact, const void *gate,
                            const void *up, int64_t count);

// logits, dlogits (n, v), targets (n), losses, lse (n) f32 or f64
void kernel_cross_entropy_forward(DType dtype, void *losses, void *lse, const void *logits,
                                  const int32_t *targets, int64_t n, int64_t v);
double kernel_underflows(double *all);  // as op_underflows
void kernel_cross_entropy_backward(DType dtype, void *dlogits, const void *logits, const void *lse,
                                   const int32_t *targets, double scale, int64_t n, int64_t v);

// A part of the vocabulary: weight, dweight (rows, h), logits, dlogits (n, columns) as stored, padding
// included; maxima, losses, lse (n) and sums (2, n) f32 or f64
void kernel_embedding_part_forward(DType dtype, void *y, const int32_t *tokens, const void *weight,
                                   int64_t n, int64_t h, VocabularyPart part);
void kernel_embedding_part_backward(DType dtype, DType dweight_dtype, void *dweight, const void *dy,
                                    const int32_t *tokens, int64_t n, int64_t rows, int64_t h,
                                    VocabularyPart part);
void kernel_cross_entropy_part_maxima(DType dtype, void *maxima, const void *logits, int64_t n,
                                      int64_t columns, VocabularyPart part);
void kernel_cross_entropy_part_sums(DType dtype, void *sums, const void *logits, const void *maxima,
                                    const int32_t *targets, int64_t n, int64_t columns,
                                    VocabularyPart part);
// dtype: of all four floating-point arrays, F32 or F64
void kernel_cross_entropy_part_losses(DType dtype, void *losses, void *lse, const void *maxima,
                                      const void *sums, const int32_t *targets, int64_t n);
void kernel_cross_entropy_part_backward(DType dtype, void *dlogits, const void *logits, const void *lse,
                                        const int32_t *targets, double scale, int64_t n, int64_t columns,
                                        VocabularyPart part);

// y (count), x (parts, count)
void kernel_sum_parts(DType dtype, void *y, const void *x, int64_t parts, int64_t count);

// parts (parts, n, w), whole (n, groups w); copies = parts / groups
void kernel_split_columns(DType dtype, void *parts, const void *whole, int64_t groups, int64_t copies,
                          int64_t n, int64_t w);
void kernel_join_columns(DType dtype, void *whole, const void *parts, int64_t groups, int64_t copies,
                         int64_t n, int64_t w);

// chosen, place (n, k), weights, dweights (n, k), logits, dlogits (n, e), bias (e) or NULL; dtype F32 or
// F64
void kernel_route_forward(DType dtype, int32_t *chosen, void *weights, const void *logits, const void *bias,
                          int64_t n, int64_t e, int64_t k, RouteRule rule);
void kernel_route_backward(DType dtype, void *dlogits, const void *dweights, const void *weights,
                           const int32_t *chosen, const void *logits, int64_t n, int64_t e, int64_t k,
                           RouteRule rule);
// losses (n)
void kernel_route_balance(DType dtype, void *losses, void *dlogits, const void *logits,
                          const int32_t *chosen, int64_t n, int64_t s, int64_t e, int64_t k,
                          BalanceRule balance, RouteRule rule);
// left, chosen (n, k)
void kernel_route_capacity(int32_t *left, const int32_t *chosen, int64_t n, int64_t s, int64_t e, int64_t k,
                           int64_t room);
// tokens (n k), counts (e)
void kernel_route_order(int32_t *tokens, int32_t *place, int32_t *counts, const int32_t *chosen, int64_t n,
                        int64_t k, int64_t e);
// nodes (n, most), chosen (n, k); left, chosen (pairs)
void kernel_route_nodes(int32_t *nodes, const int32_t *chosen, int64_t n, int64_t k, int64_t each,
                        int64_t count, int64_t most);
void kernel_route_within(int32_t *left, const int32_t *chosen, int64_t pairs, int64_t first, int64_t count);
// y, dy (n, h), z, dz (rows, h), rows <= n k; weights f32 or f64, or NULL
void kernel_combine_forward(DType dtype, void *y, const void *z, const int32_t *place, const void *weights,
                            int64_t n, int64_t k, int64_t rows, int64_t h);
void kernel_combine_backward(DType dtype, void *dz, void *dweights, const void *dy, const void *z,
                             const int32_t *place, const void *weights, int64_t n, int64_t k, int64_t rows,
                             int64_t h);

// y (count) bf16 codes, x f32
void kernel_round_stochastic(uint16_t *y, const float *x, RandomPlace place, int64_t count);
// x (rows, columns); amax, scale of the tiles of x or, if `transpose`, of (columns, rows)
void kernel_tile_amax(DType dtype, float *amax, const void *x, int64_t rows, int64_t columns,
                      bool transpose, Tile tile);
void kernel_tile_scale(float *scale, const float *amax, DType codes, ScaleRule rule, int64_t count);
void kernel_encode(DType codes_dtype, void *codes, DType dtype, const void *x, const float *scale,
                   int64_t rows, int64_t columns, bool transpose, Tile tile);
// y, codes (rows, columns)
void kernel_decode(DType dtype, void *y, DType codes_dtype, const void *codes, const float *scale,
                   int64_t rows, int64_t columns, Tile tile);
// c (m, n), codes (m, k) and (n, k). `segment`: the most products in a partial sum; `fast`: promote was
// SUMMED_FAST
typedef struct KernelCodes {
    DType dtype;
    const uint8_t *codes;
    const float *scale;
    int64_t rows, tile_columns;  // of a tile, never 0
} KernelCodes;
void kernel_matmul_codes(DType dtype, void *c, KernelCodes a, KernelCodes b, int64_t m, int64_t n,
                         int64_t k, int64_t segment, int bits, bool fast, double beta);

// master may be NULL; master, m and v are f32 or f64
void kernel_adamw(DType dtype, void *value, void *master, void *m, void *v, DType grad_dtype,
                  const void *grad, AdamW hyper, int64_t count);
void kernel_sgd(DType dtype, void *value, void *master, DType grad_dtype, const void *grad, double lr,
                double grad_scale, int64_t count);

#ifdef __cplusplus
}
#endif
#endif
