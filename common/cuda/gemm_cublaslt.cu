// gemm_cublaslt.cu: the matrix multiplies of gemm.h by cuBLASLt.
//
// cuBLASLt has many kernels for one multiply and chooses among them by a heuristic, which takes longer than
// small multiplies do. So its choice is cached for each kind of multiply: sizes, layout, dtypes, and the
// alignment of the pointers, since a view may begin at any element. The choice depends only on these, and
// so do the bits of the result. With ULTRASCALE_GEMM=timed (README.md) they do not: when a kind is first
// multiplied, the heuristic's first few choices are timed, and the fastest is kept; with several ranks, for a
// later run (gemm_choices.h).
//
// BLAS libraries are column-major: they see a row-major matrix as its transpose. So they are asked for
// c^T = b^T a^T, in which b comes first and nothing else changes: the rows of b as stored are the columns of
// b^T, and an operand is transposed if and only if it was before.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gemm.h"
#include "gemm_choices.h"
#include "gpu.h"
#include "hash.h"
#include "tensor/device.h"
#ifdef __CUDACC__
#include <cublasLt.h>
#else
#include "tests/emulation/cublaslt_on_cpu.h"
#endif

constexpr size_t MOST_WORKSPACE_BYTES = 32 << 20;  // as NVIDIA recommends for Hopper
constexpr size_t PLANS = 4096;                // kept; a model has some dozens
constexpr int TIMED = 8;                      // algorithms, where they are timed

#define BLAS_CHECK(call)                                                                            \
    do {                                                                                            \
        cublasStatus_t status_ = (call);                                                            \
        CHECK(status_ == CUBLAS_STATUS_SUCCESS, "cuBLASLt refused %s (%s:%d): %s", #call, __FILE__, \
              __LINE__, cublasLtGetStatusString(status_));                                          \
    } while (0)

// What a plan depends on: the product as the library sees it. Zeroed first, padding included, so that two of
// them can be compared byte by byte.
struct Kind {
    DType first_dtype, second_dtype, c_dtype;
    int transpose_first, transpose_second, add, fast;
    int alignment_first, alignment_second, alignment_c;
    int64_t m, n, k, first_ld, second_ld, c_ld, batch, first_step, second_step, c_step;
};
static_assert(sizeof(Kind) == KIND_BYTES && sizeof(cublasLtMatmulAlgo_t) == ALGORITHM_BYTES,
              "files of choices have another layout");

// … and what it does not depend on.
struct Addresses {
    const void *first, *second;
    void *c;
    const float *first_scale, *second_scale;  // of 8-bit codes
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
    void *workspace;  // as large as any kernel so far has asked for
    size_t workspace_bytes;
    Plan *plans;
    size_t count;
    bool timed, written;  // written: the fastest is for a later run, and this one multiplies by the first
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
        case E4M3:
            return CUDA_R_8F_E4M3;
        case E5M2:
            return CUDA_R_8F_E5M2;
        default:
            fatal("matrix multiplies are of numbers, not of %s", dtype_name(dtype));
    }
}

// Pedantic: no TF32 and no emulation by narrower products, whatever the environment says.
static cublasComputeType_t compute_of(DType dtype) {
    if (dtype == F64) return CUBLAS_COMPUTE_64F_PEDANTIC;
    return dtype == F32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F;
}

// The alignment in bytes, at most the 16 of the widest loads, of this address and of each later matrix of the
// batch. The library is told no more, so that its choice, and with it the bits, do not depend on where in its
// storage a well-aligned view lies.
static int alignment_of(const void *address, int64_t step, int64_t batch, DType dtype) {
    uintptr_t bits = (uintptr_t)address | 16;
    if (batch > 1) bits |= (uintptr_t)step * dtype_size(dtype);
    return (int)(bits & -bits);
}

static Kind kind_of(const Gemm *g) {
    Kind kind;
    memset(&kind, 0, sizeof kind);
    kind.first_dtype = kind.second_dtype = g->dtype, kind.c_dtype = g->c_dtype;
    kind.transpose_first = g->transpose_b, kind.transpose_second = g->transpose_a;
    kind.add = g->beta != 0;
    kind.m = g->n, kind.n = g->m, kind.k = g->k;
    kind.first_ld = g->b_columns, kind.second_ld = g->a_columns, kind.c_ld = g->c_columns;
    kind.batch = g->batch;
    kind.first_step = g->b_step, kind.second_step = g->a_step, kind.c_step = g->c_step;
    kind.alignment_first = alignment_of(g->b, g->b_step, g->batch, g->dtype);
    kind.alignment_second = alignment_of(g->a, g->a_step, g->batch, g->dtype);
    kind.alignment_c = alignment_of(g->c, g->c_step, g->batch, g->c_dtype);
    return kind;
}

// "TN": k is contiguous in b, so the library sees b's rows as columns, and transposes.
static Kind kind_of(const CodesGemm *g) {
    Kind kind;
    memset(&kind, 0, sizeof kind);
    kind.first_dtype = g->b_dtype, kind.second_dtype = g->a_dtype, kind.c_dtype = g->c_dtype;
    kind.transpose_first = true;
    kind.add = g->beta != 0, kind.fast = g->fast;
    kind.m = g->n, kind.n = g->m, kind.k = g->k;
    kind.first_ld = kind.second_ld = g->k, kind.c_ld = g->n;
    kind.batch = 1;
    kind.alignment_first = kind.alignment_second = kind.alignment_c = 16;
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

template <class T>
static void set(const Plan *plan, cublasLtMatmulDescAttributes_t attribute, T value) {
    BLAS_CHECK(cublasLtMatmulDescSetAttribute(plan->multiply, attribute, &value, sizeof value));
}

// The library reads the numbers when the GPU multiplies.
static void set_scales(const Plan *plan, const Addresses &at) {
    set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, (const void *)at.first_scale);
    set(plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, (const void *)at.second_scale);
}

// Not with cudaMalloc, which may wait for running kernels: NCCL's kernels wait for other ranks, and those may
// wait for this host.
static void need_workspace(size_t bytes) {
    if (bytes <= state.workspace_bytes) return;
    backend_free(state.workspace);
    state.workspace = backend_alloc(bytes);
    state.workspace_bytes = bytes;
    CHECK(state.workspace, "out of device memory: %s of workspace for cuBLASLt do not fit; held now: %s",
          bytes_text((double)bytes), memory_text());
}

// ---- one algorithm of several ----

// alpha a b + beta c into d, which has the layout of c.
static cublasStatus_t multiply_by(const Plan *plan, const cublasLtMatmulAlgo_t *algorithm,
                                  const Addresses &at, double alpha, double beta, void *d) {
    const float narrow_alpha = (float)alpha, narrow_beta = (float)beta;
    const bool is_f64 = plan->kind.first_dtype == F64;
    return cublasLtMatmul(state.handle, plan->multiply, is_f64 ? (const void *)&alpha : &narrow_alpha,
                          at.first, plan->first, at.second, plan->second,
                          is_f64 ? (const void *)&beta : &narrow_beta, at.c, plan->c, d, plan->c, algorithm,
                          state.workspace, state.workspace_bytes,
                          static_cast<cudaStream_t>(device_stream()));
}

// Whether algorithms are timed, and where choices are kept, as ULTRASCALE_GEMM says. Of several ranks each
// would choose for itself, so results that two ranks must both compute would differ in bits, and diverge.
static void choose_way() {
    const char *wanted = getenv("ULTRASCALE_GEMM");
    if (!wanted || !strcmp(wanted, "first")) return;
    const bool read = !strncmp(wanted, "read:", 5) && wanted[5];
    state.written = !strncmp(wanted, "timed:", 6) && wanted[6];
    state.timed = state.written || !strcmp(wanted, "timed");
    CHECK(state.timed || read,
          "ULTRASCALE_GEMM is %s; it is first (the heuristic's), timed, timed:FILE or read:FILE", wanted);
    CHECK(
        state.written || read || base_launched() == 1,
        "ULTRASCALE_GEMM=timed is for one rank: of several each would choose kernels for itself, and what "
        "they compute alike would differ in bits; with timed:FILE they only time, and with read:FILE later "
        "runs choose alike");
    if (!read && !state.written) return;
    cudaDeviceProp gpu;
    int device;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&gpu, device));
    char *machine = format_text("cuBLASLt %zu, %s", cublasLtGetVersion(), gpu.name);
    if (read) choices_read(wanted + 5, machine);
    else choices_write(wanted + 6, machine);
    free(machine);
}

// The algorithm of an earlier run, if it has timed this kind.
static bool find_choice(const Plan *plan, cublasLtMatmulHeuristicResult_t *result) {
    const void *kept = choices_find(&plan->kind);
    if (!kept) return false;
    memcpy(&result->algo, kept, sizeof result->algo);
    const cublasLtMatmulAlgo_t algorithm = result->algo;
    const cublasStatus_t status = cublasLtMatmulAlgoCheck(
        state.handle, plan->multiply, plan->first, plan->second, plan->c, plan->c, &algorithm, result);
    CHECK(status == CUBLAS_STATUS_SUCCESS,
          "cuBLASLt refuses an algorithm of ULTRASCALE_GEMM=%s (%s): make the files again, with timed:",
          getenv("ULTRASCALE_GEMM"), cublasLtGetStatusString(status));
    return true;
}

// Milliseconds that this algorithm takes in its second run.
static float time_of(const Plan *plan, const cublasLtMatmulAlgo_t *algorithm, const Addresses &at, void *d,
                     const cudaEvent_t (&event)[2]) {
    float milliseconds;
    cudaStream_t stream = static_cast<cudaStream_t>(device_stream());
    if (multiply_by(plan, algorithm, at, 1, plan->kind.add, d) != CUBLAS_STATUS_SUCCESS) return INFINITY;
    CUDA_CHECK(cudaEventRecord(event[0], stream));
    BLAS_CHECK(multiply_by(plan, algorithm, at, 1, plan->kind.add, d));
    CUDA_CHECK(cudaEventRecord(event[1], stream));
    device_wait();
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, event[0], event[1]));
    return milliseconds;
}

// The results go to separate memory, since c may be added to only once. If there is none left, the first
// algorithm is kept.
static int fastest(const Plan *plan, const cublasLtMatmulHeuristicResult_t *found, int count,
                   const Addresses &at) {
    const Kind &kind = plan->kind;
    const int64_t elements = (kind.batch - 1) * kind.c_step + (kind.n - 1) * kind.c_ld + kind.m;
    void *d = count > 1 ? backend_alloc((size_t)elements * dtype_size(kind.c_dtype)) : NULL;
    if (!d) return 0;
    cudaEvent_t event[2];
    for (cudaEvent_t &e : event) CUDA_CHECK(cudaEventCreate(&e));
    int best = 0;
    float least = INFINITY;
    for (int i = 0; i < count; i++) {
        if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
        const float took = time_of(plan, &found[i].algo, at, d, event);
        if (took < least) best = i, least = took;
    }
    for (cudaEvent_t e : event) CUDA_CHECK(cudaEventDestroy(e));
    backend_free(d);
    return best;
}

// The heuristic's choices among kernels that use these schemes to add up partial sums over k, and their
// number.
static cublasStatus_t choose(const Plan *plan, cublasLtReductionScheme_t schemes,
                             cublasLtMatmulHeuristicResult_t (&found)[TIMED], int *count) {
    const Kind &kind = plan->kind;
    cublasLtMatmulPreference_t preference;
    uint64_t workspace = MOST_WORKSPACE_BYTES;
    BLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    BLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                    &workspace, sizeof workspace));
    set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)kind.alignment_first);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)kind.alignment_second);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)kind.alignment_c);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)kind.alignment_c);
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(state.handle, plan->multiply, plan->first, plan->second, plan->c,
                                       plan->c, preference, state.timed ? TIMED : 1, found, count);
    cublasLtMatmulPreferenceDestroy(preference);
    if (*count > 0 && (status != CUBLAS_STATUS_SUCCESS || found[0].state != CUBLAS_STATUS_SUCCESS))
        *count = 0;
    return status;
}

// Partial sums over k should be added up in f32: in c's dtype each of them would be rounded. If the library
// has no such kernel, any is better than none, and training continues. Said once in a run.
static void say_parts_are_rounded(const Kind &kind) {
    static bool said = false;
    if (!said)
        say("cuBLASLt has no kernel that sums (%lld, %lld) by (%lld, %lld) of %s in f32 alone, and maybe "
            "others: parts of the sums are rounded to %s",
            (long long)kind.n, (long long)kind.k, (long long)kind.k, (long long)kind.m,
            dtype_name(kind.second_dtype), dtype_name(kind.c_dtype));
    said = true;
}

static void make_plan(Plan *plan, const Kind &kind, const Addresses &at) {
    plan->kind = kind;
    plan->used = true;
    BLAS_CHECK(cublasLtMatmulDescCreate(&plan->multiply, compute_of(kind.first_dtype),
                                        type_of(dtype_full(kind.first_dtype))));
    set(plan, CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)(kind.transpose_first ? CUBLAS_OP_T : CUBLAS_OP_N));
    set(plan, CUBLASLT_MATMUL_DESC_TRANSB, (int32_t)(kind.transpose_second ? CUBLAS_OP_T : CUBLAS_OP_N));
    if (at.first_scale) {
        set(plan, CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)kind.fast);
        set_scales(plan, at);
    }
    plan->first =
        kind.transpose_first
            ? layout(kind.first_dtype, kind.k, kind.m, kind.first_ld, kind.batch, kind.first_step)
            : layout(kind.first_dtype, kind.m, kind.k, kind.first_ld, kind.batch, kind.first_step);
    plan->second =
        kind.transpose_second
            ? layout(kind.second_dtype, kind.n, kind.k, kind.second_ld, kind.batch, kind.second_step)
            : layout(kind.second_dtype, kind.k, kind.n, kind.second_ld, kind.batch, kind.second_step);
    plan->c = layout(kind.c_dtype, kind.m, kind.n, kind.c_ld, kind.batch, kind.c_step);

    cublasLtMatmulHeuristicResult_t found[TIMED];
    int count = 0;
    cublasStatus_t status = choose(plan, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, found, &count);
    if (count == 0) {
        status = choose(plan, CUBLASLT_REDUCTION_SCHEME_MASK, found, &count);
        if (count > 0) say_parts_are_rounded(kind);
    }
    CHECK(count > 0, "cuBLASLt has no kernel for a (%lld, %lld) by (%lld, %lld) multiply of %s: %s",
          (long long)kind.n, (long long)kind.k, (long long)kind.k, (long long)kind.m,
          dtype_name(kind.second_dtype),
          cublasLtGetStatusString(status == CUBLAS_STATUS_SUCCESS ? CUBLAS_STATUS_NOT_SUPPORTED : status));
    if (find_choice(plan, &found[0])) count = 1;
    for (int i = 0; i < count; i++) need_workspace(found[i].workspaceSize);
    const int best = fastest(plan, found, count, at);
    if (state.written) choices_add(&kind, &found[best].algo);
    plan->algorithm = found[state.written ? 0 : best].algo;
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

// The plan for this kind, made if there is none yet, in a hash table with linear probing.
static const Plan *plan_of(const Kind &kind, const Addresses &at) {
    if (state.count == PLANS / 2) forget_plans();
    size_t place = hash_bytes(HASH_SEED, &kind, sizeof kind) % PLANS;
    while (state.plans[place].used && memcmp(&state.plans[place].kind, &kind, sizeof kind) != 0)
        place = (place + 1) % PLANS;
    if (!state.plans[place].used) {
        make_plan(&state.plans[place], kind, at);
        state.count++;
    }
    return &state.plans[place];
}

static void start() {
    device_stream();  // the GPU first
    choose_way();
    BLAS_CHECK(cublasLtCreate(&state.handle));
    state.plans = static_cast<Plan *>(host_alloc(PLANS * sizeof *state.plans));
    memset(static_cast<void *>(state.plans), 0, PLANS * sizeof *state.plans);
}

static void multiply(const Kind &kind, const Addresses &at, double alpha, double beta) {
    if (!state.handle) start();
    const Plan *plan = plan_of(kind, at);
    if (at.first_scale) set_scales(plan, at);
    BLAS_CHECK(multiply_by(plan, &plan->algorithm, at, alpha, beta, at.c));
}

void gemm(const Gemm *g) { multiply(kind_of(g), {g->b, g->a, g->c, NULL, NULL}, g->alpha, g->beta); }

// ---- 8-bit codes ----

// Tensor cores for 8 bits: compute capability 8.9 (Ada), 9.0 (Hopper) and later.
static bool has_8_bit_tensor_cores() {
    static int capability = 0;
    if (!capability) {
        int device, major, minor;
        device_stream();  // the GPU first
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
        CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
        capability = 10 * major + minor;
    }
    return capability >= 89;
}

const char *gemm_codes_lacks(const CodesGemm *g) {
    const auto whole = [](int64_t size) { return size > 0 && size % 16 == 0; };
    if (!has_8_bit_tensor_cores()) return "this GPU has no tensor cores for 8 bits";
    if (g->a_dtype == E5M2 && g->b_dtype == E5M2) return "cuBLASLt multiplies no e5m2 by e5m2";
    if (!whole(g->m) || !whole(g->n) || !whole(g->k))
        return "cuBLASLt wants sizes that are multiples of 16";
    if (((uintptr_t)g->a | (uintptr_t)g->b | (uintptr_t)g->c) % 16)
        return "cuBLASLt wants matrices that begin at multiples of 16 bytes";
    return NULL;
}

void gemm_codes(const CodesGemm *g) {
    multiply(kind_of(g), {g->b, g->a, g->c, g->scale_b, g->scale_a}, 1, g->beta);
}
