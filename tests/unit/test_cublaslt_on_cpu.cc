// What cuBLASLt on the CPU refuses: gemm_cublaslt.cu must not pass its tests with errors that cuBLASLt would
// refuse. Each case is an 8-bit multiply that is right except for one thing. TAP.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <initializer_list>

#include "tests/emulation/cublaslt_on_cpu.h"
// needs those above, and extern "C"
extern "C" {
#include <cmocka.h>
}

enum { M = 16, N = 32, K = 48, ROOM = 4096 };

// Everything that a multiply depends on: a (M, K) of ones, b (N, K) of twos, both with K contiguous.
struct Problem {
    cudaDataType_t a = CUDA_R_8F_E4M3, b = CUDA_R_8F_E5M2, c = CUDA_R_32F;
    cublasOperation_t transpose_a = CUBLAS_OP_T, transpose_b = CUBLAS_OP_N;
    cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
    int64_t m = M, n = N, k = K;
    uint32_t told = 16;    // of all addresses
    int a_shift = 0;       // bytes
    int d_shift = 0;       // from C
    uint64_t room = ROOM;  // of the workspace, in bytes
    bool host_scale = false, no_workspace = false, changed = false;
};

static char *device;  // a, b, c, a workspace, two scales, and another result, ROOM bytes apart
static char *part(int i) { return device + i * ROOM; }
static const float scale_a = 0.5f, scale_b = 3;

#define OK(call) assert_int_equal(call, CUBLAS_STATUS_SUCCESS)

// The outcome, as text.
static const char *outcome(const Problem &p) {
    const bool t_a = p.transpose_a == CUBLAS_OP_T, t_b = p.transpose_b == CUBLAS_OP_T;
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t x;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulPreference_t preference;
    const void *scales[] = {p.host_scale ? (const void *)&scale_a : part(4), part(5)};
    OK(cublasLtCreate(&handle));
    OK(cublasLtMatmulDescCreate(&x, p.compute, CUDA_R_32F));
    OK(cublasLtMatmulDescSetAttribute(x, CUBLASLT_MATMUL_DESC_TRANSA, &p.transpose_a, 4));
    OK(cublasLtMatmulDescSetAttribute(x, CUBLASLT_MATMUL_DESC_TRANSB, &p.transpose_b, 4));
    OK(cublasLtMatmulDescSetAttribute(x, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scales[0], sizeof(void *)));
    OK(cublasLtMatmulDescSetAttribute(x, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &scales[1], sizeof(void *)));
    OK(cublasLtMatrixLayoutCreate(&a, p.a, (uint64_t)(t_a ? p.k : p.m), (uint64_t)(t_a ? p.m : p.k),
                                  t_a ? p.k : p.m));
    OK(cublasLtMatrixLayoutCreate(&b, p.b, (uint64_t)(t_b ? p.n : p.k), (uint64_t)(t_b ? p.k : p.n),
                                  t_b ? p.n : p.k));
    OK(cublasLtMatrixLayoutCreate(&c, p.c, (uint64_t)p.m, (uint64_t)p.n, p.m));
    OK(cublasLtMatmulPreferenceCreate(&preference));
    const uint64_t most = ROOM;
    OK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most,
                                            sizeof most));
    for (int i = 0; i < 4; i++)
        OK(cublasLtMatmulPreferenceSetAttribute(
            preference,
            (cublasLtMatmulPreferenceAttributes_t)(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES + i), &p.told,
            sizeof p.told));
    cublasLtMatmulHeuristicResult_t found[4];
    int count;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, x, a, b, c, c, preference, 4, found, &count);
    if (status == CUBLAS_STATUS_SUCCESS) assert_int_equal(count, 3);
    const int8_t fast = 1;
    if (p.changed) OK(cublasLtMatmulDescSetAttribute(x, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, 1));
    const float alpha = 1, beta = 0;
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmul(handle, x, &alpha, part(0) + p.a_shift, a, part(1), b, &beta, part(2), c,
                                part(2) + p.d_shift, c, &found[2].algo, p.no_workspace ? NULL : part(3),
                                p.room, 0);
    OK(cublasLtMatmulDescDestroy(x));
    OK(cublasLtMatrixLayoutDestroy(a));
    OK(cublasLtMatrixLayoutDestroy(b));
    OK(cublasLtMatrixLayoutDestroy(c));
    OK(cublasLtMatmulPreferenceDestroy(preference));
    return cublasLtGetStatusString(status);
}

static void refused(const char *words, const Problem &p) {
    const char *said = outcome(p);
    if (!strstr(said, words)) fail_msg("\"%s\" has no words \"%s\"", said, words);
}

static void a_right_one_is_multiplied(void **state) {
    (void)state;
    for (int d_shift : {0, 4 * ROOM}) {
        Problem p;
        p.d_shift = d_shift;
        assert_string_equal(outcome(p), "CUBLAS_STATUS_SUCCESS");
        float c[M * N];
        assert_int_equal(cudaMemcpy(c, part(2) + d_shift, sizeof c, cudaMemcpyDeviceToHost), cudaSuccess);
        for (float x : c) assert_true(x == 2 * K * scale_a * scale_b);
    }
}

static void wrong_ones_are_refused(void **state) {
    (void)state;
    Problem p;
    p.transpose_a = CUBLAS_OP_N, refused("TN", p);
    p = {}, p.transpose_b = CUBLAS_OP_T, refused("TN", p);
    p = {}, p.a = CUDA_R_8F_E5M2, refused("one operand of FP8 is e4m3", p);
    p = {}, p.b = CUDA_R_16BF, refused("one operand of FP8 is e4m3", p);
    p = {}, p.c = CUDA_R_64F, refused("f32, bf16 or f16", p);
    p = {}, p.compute = CUBLAS_COMPUTE_32F_PEDANTIC, refused("summed and scaled in f32", p);
    p = {}, p.m = 24, refused("multiples of 16", p);
    p = {}, p.n = 8, refused("multiples of 16", p);
    p = {}, p.k = 40, refused("multiples of 16", p);
    p = {}, p.told = 8, refused("addresses of 16 bytes", p);
    p = {}, p.a_shift = 8, refused("less aligned than the heuristic was told", p);
    p = {}, p.d_shift = 16, refused("D overlaps C", p);
    p = {}, p.host_scale = true, refused("a scale is not in device memory", p);
    p = {}, p.no_workspace = true, refused("workspace is not in device memory", p);
    p = {}, p.k = 64, p.room = M * N * 4 - 1, refused("workspace is too small", p);
    p = {}, p.changed = true, refused("chosen for another multiply", p);
    p = {}, p.a = p.b = CUDA_R_32F, refused("only FP8 has scales", p);
}

static int make_operands(void **state) {
    (void)state;
    if (cudaMalloc(&device, 7 * ROOM) != cudaSuccess) return -1;
    cudaMemset(device, 0, 7 * ROOM);
    cudaMemset(part(0), 0x38, ROOM);  // 1 in e4m3
    cudaMemset(part(1), 0x40, ROOM);  // 2 in e5m2
    cudaMemcpy(part(4), &scale_a, sizeof scale_a, cudaMemcpyHostToDevice);
    cudaMemcpy(part(5), &scale_b, sizeof scale_b, cudaMemcpyHostToDevice);
    return 0;
}

int main(int argc, char **argv) {
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_right_one_is_multiplied),
        cmocka_unit_test(wrong_ones_are_refused),
    };
    return cmocka_run_group_tests_name("cublaslt_on_cpu", tests, make_operands, NULL);
}
