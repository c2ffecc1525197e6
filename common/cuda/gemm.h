// gemm.h: the matrix multiplies behind ops_cuda*.cu, by cuBLASLt (gemm_cublaslt.cu).
#ifndef GEMM_H
#define GEMM_H

#include "device_cuda.h"
#include "tensor/tensor.h"

// c (m, n) = alpha a b + beta c, for each of `batch` triples; row-major. a is (m, k), or (k, m) in memory if
// transpose_a; b (k, n) or (n, k). All sizes are at least 1. The matrices may be parts of larger arrays:
// consecutive rows are `..._columns` elements apart, and consecutive matrices of the batch `..._step`.
//
// a and b have the same dtype: f64, with sums in f64, or f32, bf16 or f16, with sums in f32 (never TF32). c
// has that dtype, or may be f32 if that is a 16-bit one; it is rounded once.
typedef struct Gemm {
    DType dtype, c_dtype;
    int64_t m, n, k;
    bool transpose_a, transpose_b;
    const void *a, *b;
    void *c;
    int64_t a_columns, b_columns, c_columns;
    int64_t batch, a_step, b_step, c_step;
    double alpha, beta;
} Gemm;

// On the compute stream.
void gemm(const Gemm *g);

// c (m, n) = scale_a scale_b a b^T + beta c of 8-bit codes a (m, k) and b (n, k): tensor cores of Ada and
// Hopper take both operands with k contiguous, so callers that need another product cast a transposed copy.
// Each matrix has one scale, in device memory. Sums are f32; with `fast`, the tensor cores may accumulate
// over all of k themselves, in fewer bits.
typedef struct CodesGemm {
    DType a_dtype, b_dtype, c_dtype;  // e4m3 and e5m2, not both e5m2; f32, bf16 or f16
    int64_t m, n, k;
    const uint8_t *a, *b;
    void *c;
    const float *scale_a, *scale_b;
    bool fast;
    double beta;
} CodesGemm;

// NULL, or why cuBLASLt cannot multiply these, as part of a sentence.
const char *gemm_codes_lacks(const CodesGemm *g);
// On the compute stream; gemm_codes_lacks must be NULL.
void gemm_codes(const CodesGemm *g);

#endif
