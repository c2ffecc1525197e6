// cublaslt_on_cpu.cc: cuBLASLt for CUDA on the CPU, where a CBLAS multiplies. It is at least as strict as
// cuBLASLt on a Hopper; the status names the rule that was broken:
//
//   - the sizes of the two operands and of the result match, and so do their types
//   - the algorithm is one that the heuristic returned for exactly this multiply, and all addresses are
//     aligned as it was told then
//   - with 8-bit operands, at most one is e5m2; A is transposed and B is not ("TN"); sums are f32; the result
//     is f32 or has 16 bits; all sizes are multiples of 16, and addresses multiples of 16 bytes
//   - their scales are single numbers in device memory, and nothing else has a scale
//   - matrices are entirely in device memory; D is the same as C, or does not overlap it
//   - the workspace is in device memory too, as large as the heuristic said: long sums are added up in parts
//
// Products of 8-bit numbers are exact; everything except f64 is summed in f32, whether FAST_ACCUM is set or
// not. Each multiply has three algorithms, which compute the same. On the clock of the device's events the
// second is the fastest, and the third the slowest.
#include "cublaslt_on_cpu.h"

#include <cblas.h>
#include <limits.h>

#include "cuda_on_cpu/cuda_on_cpu_inside.h"
#include "cuda_on_cpu/cuda_on_cpu_streams.h"
#include "hash.h"
#include "tensor/tensor.h"

enum { A, B, C, D, MATRICES, NUMBER, WORKSPACE, OPERANDS = 2, ALGORITHMS = 3 };
enum { SHORT = 64 };  // sums over at least so many of k are added up in parts, in a workspace

int64_t cublaslt_on_cpu_used[ALGORITHMS];
uint32_t cublaslt_on_cpu_needs, cublaslt_on_cpu_allowed;
static const double seconds_of[ALGORITHMS] = {2000, 1000, 3000};

struct cublasLtMatmulDescOpaque_t {
    cublasComputeType_t compute;
    cudaDataType_t scale_type;
    int32_t transpose[OPERANDS];
    const void *scale[OPERANDS];
    int8_t fast;
};
struct cublasLtMatrixLayoutOpaque_t {
    cudaDataType_t type;
    int64_t rows, columns, ld;
    int32_t batch;
    int64_t step;
};
struct cublasLtMatmulPreferenceOpaque_t {
    uint64_t workspace;
    uint32_t schemes, alignment[MATRICES];
};

static const char *refused_for;

static cublasStatus_t refuse(cublasStatus_t status, const char *rule) {
    refused_for = rule;
    return status;
}
#define NEED(status, condition, rule) \
    if (!(condition)) return refuse(CUBLAS_STATUS_##status, rule)

size_t cublasLtGetVersion(void) { return 130000; }

const char *cublasLtGetStatusString(cublasStatus_t status) {
    static char text[256];
    if (status == CUBLAS_STATUS_SUCCESS) return "CUBLAS_STATUS_SUCCESS";
    snprintf(text, sizeof text, "%s: %s",
             status == CUBLAS_STATUS_INVALID_VALUE ? "CUBLAS_STATUS_INVALID_VALUE"
                                                   : "CUBLAS_STATUS_NOT_SUPPORTED",
             refused_for ? refused_for : "no reason");
    return text;
}

// ---- descriptors ----

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    static char context;
    *handle = reinterpret_cast<cublasLtHandle_t>(&context);
    return CUBLAS_STATUS_SUCCESS;
}

template <class T>
static cublasStatus_t made(T **to, const T &as) {
    *to = static_cast<T *>(host_alloc(sizeof **to));
    **to = as;
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t set(void *to, size_t size, const void *value, size_t bytes) {
    NEED(INVALID_VALUE, bytes == size, "the attribute has another size");
    memcpy(to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t destroy(void *of) {
    free(of);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *to, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    return made(to, cublasLtMatmulDescOpaque_t{compute, scale, {}, {}, 0});
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t of, cublasLtMatmulDescAttributes_t name,
                                              const void *value, size_t bytes) {
    switch (name) {
        case CUBLASLT_MATMUL_DESC_TRANSA:
        case CUBLASLT_MATMUL_DESC_TRANSB:
            return set(&of->transpose[name == CUBLASLT_MATMUL_DESC_TRANSB], sizeof(int32_t), value, bytes);
        case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
        case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
            return set(&of->scale[name == CUBLASLT_MATMUL_DESC_B_SCALE_POINTER], sizeof(void *), value,
                       bytes);
        case CUBLASLT_MATMUL_DESC_FAST_ACCUM:
            return set(&of->fast, sizeof of->fast, value, bytes);
    }
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "no such attribute of a multiply");
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t of) { return destroy(of); }

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *to, cudaDataType_t type, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
    NEED(INVALID_VALUE, rows > 0 && columns > 0 && ld >= (int64_t)rows, "columns of a matrix overlap");
    return made(to, cublasLtMatrixLayoutOpaque_t{type, (int64_t)rows, (int64_t)columns, ld, 1, 0});
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t of,
                                                cublasLtMatrixLayoutAttribute_t name, const void *value,
                                                size_t bytes) {
    if (name == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) return set(&of->batch, sizeof of->batch, value, bytes);
    return set(&of->step, sizeof of->step, value, bytes);
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t of) { return destroy(of); }

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *to) {
    return made(to, cublasLtMatmulPreferenceOpaque_t{0, ~0u, {256, 256, 256, 256}});
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t of,
                                                    cublasLtMatmulPreferenceAttributes_t name,
                                                    const void *value, size_t bytes) {
    if (name == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
        return set(&of->workspace, sizeof of->workspace, value, bytes);
    if (name == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)
        return set(&of->schemes, sizeof of->schemes, value, bytes);
    return set(&of->alignment[name - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], sizeof(uint32_t), value,
               bytes);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t of) { return destroy(of); }

// ---- rules ----

static bool is_8_bits(cudaDataType_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
static DType dtype_of(cudaDataType_t type) {
    switch (type) {
        case CUDA_R_64F:
            return F64;
        case CUDA_R_16BF:
            return BF16;
        case CUDA_R_16F:
            return F16;
        case CUDA_R_8F_E4M3:
            return E4M3;
        case CUDA_R_8F_E5M2:
            return E5M2;
        default:
            return F32;
    }
}
// bytes of one element
static size_t bytes_of(cudaDataType_t type) { return dtype_size(dtype_of(type)); }

static cublasStatus_t need_8_bits(const cublasLtMatmulDescOpaque_t &x,
                                  const cublasLtMatrixLayout_t (&m)[MATRICES]) {
    NEED(NOT_SUPPORTED,
         is_8_bits(m[B]->type) && (m[A]->type == CUDA_R_8F_E4M3 || m[B]->type == CUDA_R_8F_E4M3),
         "one operand of FP8 is e4m3, and the other e4m3 or e5m2");
    NEED(NOT_SUPPORTED, x.transpose[A] == CUBLAS_OP_T && x.transpose[B] == CUBLAS_OP_N,
         "FP8 wants the layout TN: A transposed and B not");
    NEED(NOT_SUPPORTED, x.compute == CUBLAS_COMPUTE_32F && x.scale_type == CUDA_R_32F,
         "FP8 is summed and scaled in f32");
    NEED(NOT_SUPPORTED, !is_8_bits(m[D]->type) && m[D]->type != CUDA_R_64F,
         "FP8 gives f32, bf16 or f16 here");
    NEED(NOT_SUPPORTED, m[A]->rows % 16 == 0 && m[A]->columns % 16 == 0 && m[B]->columns % 16 == 0,
         "FP8 wants sizes that are multiples of 16");
    for (int i = 0; i < MATRICES; i++)
        NEED(NOT_SUPPORTED, m[i]->ld * (int64_t)bytes_of(m[i]->type) % 16 == 0,
             "FP8 wants columns that begin at multiples of 16 bytes");
    for (int i = 0; i < OPERANDS; i++)
        NEED(INVALID_VALUE, !x.scale[i] || memory_is_device(x.scale[i]), "a scale is not in device memory");
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t need(const cublasLtMatmulDescOpaque_t &x,
                           const cublasLtMatrixLayout_t (&m)[MATRICES]) {
    const int64_t inner_a = x.transpose[A] ? m[A]->rows : m[A]->columns;
    const int64_t inner_b = x.transpose[B] ? m[B]->columns : m[B]->rows;
    const int64_t rows = x.transpose[A] ? m[A]->columns : m[A]->rows;
    const int64_t columns = x.transpose[B] ? m[B]->rows : m[B]->columns;
    NEED(INVALID_VALUE, inner_a == inner_b && m[D]->rows == rows && m[D]->columns == columns,
         "sizes do not fit each other");
    NEED(INVALID_VALUE, inner_a <= INT_MAX && rows <= INT_MAX && columns <= INT_MAX,
         "sizes are beyond the int of a CBLAS");
    for (int i = 0; i < MATRICES; i++)
        NEED(INVALID_VALUE, m[i]->batch == m[D]->batch && m[i]->step >= 0, "batches do not fit each other");
    NEED(INVALID_VALUE, m[C]->type == m[D]->type, "C and D have different types");
    if (is_8_bits(m[A]->type) || is_8_bits(m[B]->type)) return need_8_bits(x, m);
    NEED(NOT_SUPPORTED, m[A]->type == m[B]->type, "operands have different types");
    NEED(NOT_SUPPORTED, !x.scale[A] && !x.scale[B] && !x.fast, "only FP8 has scales and FAST_ACCUM");
    const bool is_f64 = m[A]->type == CUDA_R_64F;
    NEED(NOT_SUPPORTED, is_f64 == (x.compute == CUBLAS_COMPUTE_64F_PEDANTIC),
         "f64 is summed in f64, and only f64");
    NEED(NOT_SUPPORTED, x.scale_type == (is_f64 ? CUDA_R_64F : CUDA_R_32F), "scales have another type");
    NEED(NOT_SUPPORTED, m[D]->type == m[A]->type || (!is_f64 && m[D]->type == CUDA_R_32F),
         "the result has neither the operands' type nor f32");
    return CUBLAS_STATUS_SUCCESS;
}

// ---- algorithms: what they were chosen for ----

static uint64_t fingerprint(const cublasLtMatmulDescOpaque_t &x,
                            const cublasLtMatrixLayout_t (&m)[MATRICES]) {
    uint64_t hash = HASH_SEED;
    const auto mix = [&](int64_t value) { hash = (hash ^ (uint64_t)value) * HASH_PRIME; };
    mix(x.compute), mix(x.scale_type), mix(x.fast);
    for (int i = 0; i < OPERANDS; i++) mix(x.transpose[i]), mix(x.scale[i] != NULL);
    for (int i = 0; i < MATRICES; i++)
        mix(m[i]->type), mix(m[i]->rows), mix(m[i]->columns), mix(m[i]->ld), mix(m[i]->batch),
            mix(m[i]->step);
    return hash;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t x,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t *results, int *returned) {
    const cublasLtMatrixLayout_t m[MATRICES] = {a, b, c, d};
    *returned = 0;
    const cublasStatus_t status = need(*x, m);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    NEED(INVALID_VALUE, requested >= 1, "no algorithm is asked for");
    for (int i = 0; i < MATRICES && is_8_bits(m[A]->type); i++)
        NEED(NOT_SUPPORTED, preference->alignment[i] >= 16, "FP8 wants addresses of 16 bytes");
    NEED(NOT_SUPPORTED,
         !cublaslt_on_cpu_needs || bytes_of(m[D]->type) != 2 || preference->schemes & cublaslt_on_cpu_needs,
         "no kernel adds up parts in these ways alone");
    cublaslt_on_cpu_allowed = preference->schemes;
    const int64_t k = x->transpose[A] ? m[A]->rows : m[A]->columns;
    const uint64_t parts = k < SHORT ? 0 : (uint64_t)(m[D]->rows * m[D]->columns * m[D]->batch) * 4;
    *returned = requested < ALGORITHMS ? requested : ALGORITHMS;
    for (int number = 0; number < *returned; number++) {
        results[number] = cublasLtMatmulHeuristicResult_t();
        uint64_t *data = results[number].algo.data;
        for (int i = 0; i < MATRICES; i++) data[i] = preference->alignment[i];
        data[MATRICES] = fingerprint(*x, m);
        data[NUMBER] = (uint64_t)number;
        results[number].workspaceSize = data[WORKSPACE] = parts < preference->workspace ? parts : 0;
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t x, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                       cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algo,
                                       cublasLtMatmulHeuristicResult_t *result) {
    const cublasLtMatrixLayout_t m[MATRICES] = {a, b, c, d};
    NEED(INVALID_VALUE, algo->data[MATRICES] == fingerprint(*x, m) && algo->data[NUMBER] < ALGORITHMS,
         "the algorithm was chosen for another multiply");
    result->workspaceSize = algo->data[WORKSPACE];
    result->state = CUBLAS_STATUS_SUCCESS;
    return CUBLAS_STATUS_SUCCESS;
}

// ---- the multiply ----

// The matrices of a batch with everything between them, in f64 or f32 on the host.
struct Span {
    DType dtype, wide;
    void *device, *host;
    int64_t count;
};

static int64_t span_of(const cublasLtMatrixLayout_t m) {
    return (m->batch - 1) * m->step + (m->columns - 1) * m->ld + m->rows;
}

static Span read_span(const void *device, const cublasLtMatrixLayout_t m) {
    Span span = {dtype_of(m->type), F32, const_cast<void *>(device), NULL, span_of(m)};
    if (span.dtype == F64) span.wide = F64;
    void *stored = host_alloc((size_t)span.count * dtype_size(span.dtype));
    CHECK(cudaMemcpy(stored, device, (size_t)span.count * dtype_size(span.dtype), cudaMemcpyDeviceToHost) ==
              cudaSuccess,
          "cuBLASLt on the CPU: an operand cannot be read");
    span.host = host_alloc((size_t)span.count * dtype_size(span.wide));
    dtype_convert(span.host, span.wide, stored, span.dtype, span.count);
    free(stored);
    return span;
}

static void write_span(const Span *span) {
    const size_t bytes = (size_t)span->count * dtype_size(span->dtype);
    void *stored = host_alloc(bytes);
    dtype_convert(stored, span->dtype, span->host, span->wide, span->count);
    CHECK(cudaMemcpy(span->device, stored, bytes, cudaMemcpyHostToDevice) == cudaSuccess,
          "cuBLASLt on the CPU: the result cannot be written");
    free(stored);
}

static float scale_of(const void *device) {
    float scale = 1;
    if (device) cudaMemcpy(&scale, device, sizeof scale, cudaMemcpyDeviceToHost);
    return scale;
}

static void multiply(const cublasLtMatmulDescOpaque_t &x, const cublasLtMatrixLayout_t (&m)[MATRICES],
                     const Span &a, const Span &b, const Span &d, double alpha, double beta) {
    const CBLAS_TRANSPOSE first = x.transpose[A] ? CblasTrans : CblasNoTrans;
    const CBLAS_TRANSPOSE second = x.transpose[B] ? CblasTrans : CblasNoTrans;
    const int rows = (int)m[D]->rows, columns = (int)m[D]->columns;
    const int inner = (int)(x.transpose[A] ? m[A]->rows : m[A]->columns);
    const int ld_a = (int)m[A]->ld, ld_b = (int)m[B]->ld, ld_d = (int)m[D]->ld;
    const float scale = scale_of(x.scale[A]) * scale_of(x.scale[B]);
    for (int64_t i = 0; i < m[D]->batch; i++) {
        const int64_t at_a = i * m[A]->step, at_b = i * m[B]->step, at_d = i * m[D]->step;
        if (a.wide == F64)
            cblas_dgemm(CblasColMajor, first, second, rows, columns, inner, alpha,
                        static_cast<double *>(a.host) + at_a, ld_a, static_cast<double *>(b.host) + at_b,
                        ld_b, beta, static_cast<double *>(d.host) + at_d, ld_d);
        else
            cblas_sgemm(CblasColMajor, first, second, rows, columns, inner, (float)alpha * scale,
                        static_cast<float *>(a.host) + at_a, ld_a, static_cast<float *>(b.host) + at_b,
                        ld_b, (float)beta, static_cast<float *>(d.host) + at_d, ld_d);
    }
}

static double number_at(const void *host, bool wide) {
    return wide ? *static_cast<const double *>(host) : *static_cast<const float *>(host);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t x, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
    const cublasLtMatrixLayout_t m[MATRICES] = {a_layout, b_layout, c_layout, d_layout};
    const void *const at[MATRICES] = {a, b, c, d};
    const cublasStatus_t status = need(*x, m);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    NEED(INVALID_VALUE, algo && algo->data[MATRICES] == fingerprint(*x, m),
         "the algorithm was chosen for another multiply");
    for (int i = 0; i < MATRICES; i++)
        NEED(NOT_SUPPORTED, (uintptr_t)at[i] % algo->data[i] == 0,
             "an address is less aligned than the heuristic was told");
    const size_t bytes = (size_t)span_of(m[D]) * dtype_size(dtype_of(m[D]->type));
    NEED(INVALID_VALUE,
         c == d || static_cast<const char *>(c) + bytes <= d || static_cast<char *>(d) + bytes <= c,
         "D overlaps C");
    NEED(INVALID_VALUE, workspace_bytes == 0 || memory_is_device(workspace),
         "the workspace is not in device memory");
    NEED(INVALID_VALUE, workspace_bytes >= algo->data[WORKSPACE], "the workspace is too small");
    cublaslt_on_cpu_used[algo->data[NUMBER]]++;
    // Its descriptions and the two numbers on the host are read in the call.
    const bool wide = dtype_of(a_layout->type) == F64;
    const double alpha_is = number_at(alpha, wide), beta_is = number_at(beta, wide);
    const double seconds = seconds_of[algo->data[NUMBER]];
    in_stream(stream, [x = *x, a, b, c, d, a_is = *a_layout, b_is = *b_layout, c_is = *c_layout,
                       d_is = *d_layout, alpha_is, beta_is, seconds]() mutable {
        const cublasLtMatrixLayout_t m[MATRICES] = {&a_is, &b_is, &c_is, &d_is};
        cuda_pass(seconds);
        Span left = read_span(a, m[A]), right = read_span(b, m[B]), result = read_span(c, m[C]);
        result.device = d;
        multiply(x, m, left, right, result, alpha_is, beta_is);
        write_span(&result);
        free(left.host), free(right.host), free(result.host);
    });
    return CUBLAS_STATUS_SUCCESS;
}
