// gemm_cublaslt.cu: the matrix multiply of gemm.h by cuBLASLt.
//
// cuBLASLt has many kernels for one multiply and chooses among them by a heuristic, which takes longer
// than small multiplies do. So its choice is kept for each kind of multiply: sizes, layout, dtypes, and
// how the pointers are aligned, since a view may begin at any element. Choices follow from these alone,
// and so do the bits.
#include <cublasLt.h>
#include <string.h>

#include "gemm.h"
#include "gpu.h"

constexpr size_t WORKSPACE_BYTES = 32 << 20;  // what NVIDIA advises for Hopper
constexpr size_t PLANS = 4096;                // kept; a model has some dozens

#define BLAS_CHECK(call)                                                                            \
    do {                                                                                            \
        cublasStatus_t status_ = (call);                                                            \
        CHECK(status_ == CUBLAS_STATUS_SUCCESS, "cuBLASLt refused %s (%s:%d): %s", #call, __FILE__, \
              __LINE__, cublasLtGetStatusString(status_));                                          \
    } while (0)

// What a plan depends on. Filled from zeros, so that two can be compared byte by byte.
struct Kind {
    DType dtype, c_dtype;
    int transpose_first, transpose_second, add;
    int alignment_first, alignment_second, alignment_c;
    int64_t m, n, k, first_ld, second_ld, c_ld, batch, first_step, second_step, c_step;
};

struct Plan {
    Kind kind;
    bool used;
    cublasLtMatmulDesc_t multiply;
    cublasLtMatrixLayout_t first, second, c;
    cublasLtMatmulAlgo_t algorithm;
};

static struct {
    cublasLtHandle_t handle;
    void *workspace;
    Plan *plans;
    size_t count;
} state;

static cudaDataType_t type_of(DType dtype) {
    switch (dtype) {
        case F64:
            return CUDA_R_64F;
        case F32:
            return CUDA_R_32F;
        case BF16:
            return CUDA_R_16BF;
        case F16:
            return CUDA_R_16F;
        default:
            fatal("matrix multiplies are of f64, f32, bf16 and f16, not of %s", dtype_name(dtype));
    }
}

// Pedantic f32: no TF32, and no emulation by 16-bit products either, whatever the environment says.
static cublasComputeType_t compute_of(DType dtype) {
    if (dtype == F64) return CUBLAS_COMPUTE_64F;
    return dtype == F32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F;
}

// Bytes, up to the 16 of the widest loads, that this address and each later matrix of the batch are a
// multiple of. No more is told, so that the choice, and with it the bits, do not hang on where in its
// storage a well aligned view lies.
static int alignment_of(const void *address, int64_t step, int64_t batch, DType dtype) {
    uintptr_t bits = (uintptr_t)address | 16;
    if (batch > 1) bits |= (uintptr_t)step * dtype_size(dtype);
    return (int)(bits & -bits);
}

static Kind kind_of(const Gemm *g, const ColumnMajorGemm *by) {
    Kind kind;
    memset(&kind, 0, sizeof kind);
    kind.dtype = g->dtype, kind.c_dtype = g->c_dtype;
    kind.transpose_first = by->transpose_first, kind.transpose_second = by->transpose_second;
    kind.add = g->beta != 0;
    kind.m = by->m, kind.n = by->n, kind.k = by->k;
    kind.first_ld = by->first_ld, kind.second_ld = by->second_ld, kind.c_ld = g->c_columns;
    kind.batch = g->batch;
    kind.first_step = by->first_step, kind.second_step = by->second_step, kind.c_step = g->c_step;
    kind.alignment_first = alignment_of(by->first, by->first_step, g->batch, g->dtype);
    kind.alignment_second = alignment_of(by->second, by->second_step, g->batch, g->dtype);
    kind.alignment_c = alignment_of(g->c, g->c_step, g->batch, g->c_dtype);
    return kind;
}

static void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
                uint32_t value) {
    BLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
}

static cublasLtMatrixLayout_t layout(DType dtype, int64_t rows, int64_t columns, int64_t ld, int64_t batch,
                                     int64_t step) {
    cublasLtMatrixLayout_t made;
    int32_t matrices = (int32_t)batch;
    BLAS_CHECK(cublasLtMatrixLayoutCreate(&made, type_of(dtype), (uint64_t)rows, (uint64_t)columns, ld));
    BLAS_CHECK(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &matrices,
                                                sizeof matrices));
    BLAS_CHECK(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step,
                                                sizeof step));
    return made;
}

static void make_plan(Plan *plan, const Kind *kind, const Gemm *g, const ColumnMajorGemm *by) {
    plan->kind = *kind;
    plan->used = true;
    const cublasOperation_t first = by->transpose_first ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = by->transpose_second ? CUBLAS_OP_T : CUBLAS_OP_N;
    BLAS_CHECK(cublasLtMatmulDescCreate(&plan->multiply, compute_of(g->dtype),
                                        type_of(g->dtype == F64 ? F64 : F32)));
    BLAS_CHECK(
        cublasLtMatmulDescSetAttribute(plan->multiply, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    BLAS_CHECK(cublasLtMatmulDescSetAttribute(plan->multiply, CUBLASLT_MATMUL_DESC_TRANSB, &second,
                                              sizeof second));
    plan->first =
        layout(g->dtype, by->first_rows, by->first_columns, by->first_ld, g->batch, by->first_step);
    plan->second =
        layout(g->dtype, by->second_rows, by->second_columns, by->second_ld, g->batch, by->second_step);
    plan->c = layout(g->c_dtype, by->m, by->n, g->c_columns, g->batch, g->c_step);

    cublasLtMatmulPreference_t preference;
    uint64_t workspace = WORKSPACE_BYTES;
    BLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    BLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                    &workspace, sizeof workspace));
    // Parts of a sum over k may be added up in f32 alone: in c's dtype each would be rounded.
    set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)kind->alignment_first);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)kind->alignment_second);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)kind->alignment_c);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)kind->alignment_c);
    cublasLtMatmulHeuristicResult_t best;
    int found = 0;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(state.handle, plan->multiply, plan->first, plan->second, plan->c,
                                       plan->c, preference, 1, &best, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    CHECK(status == CUBLAS_STATUS_SUCCESS && found == 1 && best.state == CUBLAS_STATUS_SUCCESS,
          "cuBLASLt has no kernel for a (%lld, %lld) by (%lld, %lld) multiply of %s: %s", (long long)g->m,
          (long long)g->k, (long long)g->k, (long long)g->n, dtype_name(g->dtype),
          cublasLtGetStatusString(status == CUBLAS_STATUS_SUCCESS ? CUBLAS_STATUS_NOT_SUPPORTED : status));
    plan->algorithm = best.algo;
}

static void forget_plans() {
    for (size_t i = 0; i < PLANS; i++)
        if (state.plans[i].used) {
            cublasLtMatmulDescDestroy(state.plans[i].multiply);
            cublasLtMatrixLayoutDestroy(state.plans[i].first);
            cublasLtMatrixLayoutDestroy(state.plans[i].second);
            cublasLtMatrixLayoutDestroy(state.plans[i].c);
            state.plans[i].used = false;
        }
    state.count = 0;
}

// The plan of this kind, made if there is none: a hash table, in which the next free place takes a
// second comer.
static const Plan *plan_of(const Gemm *g, const ColumnMajorGemm *by) {
    const Kind kind = kind_of(g, by);
    uint64_t hash = 0xcbf29ce484222325;
    for (size_t i = 0; i < sizeof kind; i++)
        hash = (hash ^ reinterpret_cast<const uint8_t *>(&kind)[i]) * 0x100000001b3;
    if (state.count == PLANS / 2) forget_plans();
    size_t at = hash % PLANS;
    while (state.plans[at].used && memcmp(&state.plans[at].kind, &kind, sizeof kind) != 0)
        at = (at + 1) % PLANS;
    if (!state.plans[at].used) {
        make_plan(&state.plans[at], &kind, g, by);
        state.count++;
    }
    return &state.plans[at];
}

static void start() {
    device_stream();  // the GPU first
    BLAS_CHECK(cublasLtCreate(&state.handle));
    cudaError_t status = cudaMalloc(&state.workspace, WORKSPACE_BYTES);
    CHECK(status == cudaSuccess,
          "out of device memory: %s of workspace for cuBLASLt do not fit; held now: %s",
          bytes_text((double)WORKSPACE_BYTES), memory_text());
    state.plans = static_cast<Plan *>(host_alloc(PLANS * sizeof *state.plans));
    memset(static_cast<void *>(state.plans), 0, PLANS * sizeof *state.plans);
}

void gemm(const Gemm *g) {
    if (!state.handle) start();
    const ColumnMajorGemm by = column_major(g);
    const Plan *plan = plan_of(g, &by);
    const float alpha = (float)g->alpha, beta = (float)g->beta;
    const bool is_f64 = g->dtype == F64;
    BLAS_CHECK(cublasLtMatmul(
        state.handle, plan->multiply, is_f64 ? (const void *)&g->alpha : &alpha, by.first, plan->first,
        by.second, plan->second, is_f64 ? (const void *)&g->beta : &beta, g->c, plan->c, g->c, plan->c,
        &plan->algorithm, state.workspace, WORKSPACE_BYTES, static_cast<cudaStream_t>(device_stream())));
}
