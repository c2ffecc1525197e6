// gemm_on_cpu.cc: the matrix multiply of gemm.h where CUDA runs on the CPU: a CBLAS in place of
// cuBLASLt, asked for the same product by columns. Device memory is touched by copies alone, which see
// accesses beyond an allocation.
#include <cblas.h>
#include <limits.h>
#include <stdlib.h>

#include "cuda/gemm.h"
#include "cuda/gpu.h"

// The matrices of a batch with all that lies between them, in f64 or f32 on the host.
struct Span {
    DType dtype, wide;
    void *device, *host;
    int64_t count;
};

static Span read_span(DType dtype, const void *device, int64_t rows, int64_t columns, int64_t ld,
                      int64_t batch, int64_t step) {
    Span span = {dtype, dtype == F64 ? F64 : F32, const_cast<void *>(device), NULL, 0};
    span.count = (batch - 1) * step + (rows - 1) * ld + columns;
    CHECK(ld >= columns && step >= 0, "gemm: rows of %lld elements lie %lld apart", (long long)columns,
          (long long)ld);
    void *stored = host_alloc((size_t)span.count * dtype_size(dtype));
    CUDA_CHECK(cudaMemcpy(stored, device, (size_t)span.count * dtype_size(dtype), cudaMemcpyDeviceToHost));
    span.host = host_alloc((size_t)span.count * dtype_size(span.wide));
    dtype_convert(span.host, span.wide, stored, dtype, span.count);
    free(stored);
    return span;
}

static void write_span(const Span *span) {
    void *stored = host_alloc((size_t)span->count * dtype_size(span->dtype));
    dtype_convert(stored, span->dtype, span->host, span->wide, span->count);
    CUDA_CHECK(cudaMemcpy(span->device, stored, (size_t)span->count * dtype_size(span->dtype),
                          cudaMemcpyHostToDevice));
    free(stored);
}

void gemm(const Gemm *g) {
    const ColumnMajorGemm by = column_major(g);
    CHECK(by.m <= INT_MAX && by.n <= INT_MAX && by.k <= INT_MAX, "gemm: sizes beyond the int of a CBLAS");
    Span a = read_span(g->dtype, by.first, by.first_columns, by.first_rows, by.first_ld, g->batch,
                       by.first_step);
    Span b = read_span(g->dtype, by.second, by.second_columns, by.second_rows, by.second_ld, g->batch,
                       by.second_step);
    Span c = read_span(g->c_dtype, g->c, by.n, by.m, g->c_columns, g->batch, g->c_step);
    const CBLAS_TRANSPOSE first = by.transpose_first ? CblasTrans : CblasNoTrans;
    const CBLAS_TRANSPOSE second = by.transpose_second ? CblasTrans : CblasNoTrans;
    const int m = (int)by.m, n = (int)by.n, k = (int)by.k;
    for (int64_t i = 0; i < g->batch; i++) {
        const int64_t at_a = i * by.first_step, at_b = i * by.second_step, at_c = i * g->c_step;
        if (a.wide == F64)
            cblas_dgemm(CblasColMajor, first, second, m, n, k, g->alpha,
                        static_cast<double *>(a.host) + at_a, (int)by.first_ld,
                        static_cast<double *>(b.host) + at_b, (int)by.second_ld, g->beta,
                        static_cast<double *>(c.host) + at_c, (int)g->c_columns);
        else
            cblas_sgemm(CblasColMajor, first, second, m, n, k, (float)g->alpha,
                        static_cast<float *>(a.host) + at_a, (int)by.first_ld,
                        static_cast<float *>(b.host) + at_b, (int)by.second_ld, (float)g->beta,
                        static_cast<float *>(c.host) + at_c, (int)g->c_columns);
    }
    write_span(&c);
    free(a.host), free(b.host), free(c.host);
}
