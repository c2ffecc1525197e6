// gemm.h: the one matrix multiply behind ops_cuda*.cu: gemm_cublaslt.cu on a GPU, gemm_on_cpu.cc where
// there is none.
#ifndef GEMM_H
#define GEMM_H

#include "device_cuda.h"
#include "tensor/tensor.h"

// c (m, n) = alpha a b + beta c, for each of `batch` triples; row-major. a is (m, k), or (k, m) in
// memory if transpose_a; b (k, n) or (n, k). All sizes are at least 1. The matrices are parts of larger
// arrays: `..._columns` elements lie from one row to the next, and `..._step` elements from one matrix
// of the batch to the next.
//
// a and b have one dtype, in which their products are exact: f64, which is summed in f64, or f32, bf16,
// f16, summed in f32 (never TF32). c has that dtype, or f32 where it is a 16-bit one; it is rounded
// once.
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

// BLAS libraries count by columns: they see a row-major matrix as its transpose. So they are asked for
// c^T = b^T a^T, in which b comes first and nothing else changes: what is stored as rows of b they take
// as columns of b^T, transposed exactly where b was.
typedef struct ColumnMajorGemm {
    int64_t m, n, k;  // of the product as the library sees it
    bool transpose_first, transpose_second;
    const void *first, *second;
    int64_t first_rows, first_columns, second_rows, second_columns;  // as stored, by columns
    int64_t first_ld, second_ld, first_step, second_step;
} ColumnMajorGemm;

static inline ColumnMajorGemm column_major(const Gemm *g) {
    ColumnMajorGemm by_columns = {};
    by_columns.m = g->n, by_columns.n = g->m, by_columns.k = g->k;
    by_columns.transpose_first = g->transpose_b, by_columns.transpose_second = g->transpose_a;
    by_columns.first = g->b, by_columns.second = g->a;
    by_columns.first_rows = g->transpose_b ? g->k : g->n,
    by_columns.first_columns = g->transpose_b ? g->n : g->k;
    by_columns.second_rows = g->transpose_a ? g->m : g->k,
    by_columns.second_columns = g->transpose_a ? g->k : g->m;
    by_columns.first_ld = g->b_columns, by_columns.second_ld = g->a_columns;
    by_columns.first_step = g->b_step, by_columns.second_step = g->a_step;
    return by_columns;
}

#endif
