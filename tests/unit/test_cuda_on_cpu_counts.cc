// What CUDA on the CPU counts: sectors, bank conflicts and divergent branches of kernels whose counts can be
// worked out by hand.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <initializer_list>

#include "cuda/gpu.h"
#include "cuda/instructions.h"
// needs those above, and to be told that it is C
extern "C" {
#include <cmocka.h>
}

static float *zeros(size_t count) {
    float *memory;
    CUDA_CHECK(cudaMalloc(&memory, count * sizeof(float)));
    CUDA_CHECK(cudaMemset(memory, 0, count * sizeof(float)));
    return memory;
}

#define COUNTED(counts, launch) \
    cuda_count_begin();         \
    launch;                     \
    CudaCounts counts = cuda_count_end()

// ---- sectors ----

// Element i from i * stride + shift to i.
template <class T>
__global__ void copy(T *y, const T *x, int n, int stride, int shift) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) y[i] = x[i * stride + shift];
}

static void coalesced_copies_take_each_sector_once(void **state) {
    (void)state;
    float *x = zeros(4096), *y = zeros(4096);
    for (int n : {1, 8, 32, 1000, 4096}) {
        COUNTED(c, LAUNCH(copy<float>, (n + 255) / 256, 256, 0, 0, y, x, n, 1, 0));
        int warps = (n + 31) / 32;
        assert_int_equal(c.global_load_sectors, (n * 4 + 31) / 32);
        assert_int_equal(c.global_store_sectors, (n * 4 + 31) / 32);
        assert_int_equal(c.global_load_bytes, n * 4);
        assert_int_equal(c.global_store_bytes, n * 4);
        assert_int_equal(c.global_loads, warps);
        assert_int_equal(c.global_stores, warps);
        assert_int_equal(c.threads, (n + 255) / 256 * 256);
        assert_int_equal(c.warps, c.threads / 32);
        assert_int_equal(c.shared_accesses, 0);
        // a warp that is neither entirely below n nor entirely beyond it
        assert_int_equal(c.divergent_branches, n % 32 != 0);
    }
}

// Sectors that one warp's load takes.
template <class T>
static int64_t load_sectors(int stride, int shift) {
    float *x = zeros(32 * 33 * 4), *y = zeros(32 * 4);
    COUNTED(c, LAUNCH(copy<T>, 1, 32, 0, 0, (T *)y, (const T *)x, 32, stride, shift));
    assert_int_equal(c.global_loads, 1);
    assert_int_equal(c.global_load_bytes, 32 * sizeof(T));
    assert_int_equal(c.global_store_sectors, sizeof(T));
    CUDA_CHECK(cudaFree(x));
    CUDA_CHECK(cudaFree(y));
    return c.global_load_sectors;
}

static void sectors_follow_width_stride_and_alignment(void **state) {
    (void)state;
    assert_int_equal(load_sectors<float>(1, 0), 4);
    assert_int_equal(load_sectors<float>(1, 1), 5);  // begins in the middle of a sector
    assert_int_equal(load_sectors<float>(1, 8), 4);
    assert_int_equal(load_sectors<float>(2, 0), 8);
    assert_int_equal(load_sectors<float>(8, 0), 32);
    assert_int_equal(load_sectors<float>(32, 0), 32);
    assert_int_equal(load_sectors<float>(0, 5), 1);  // all lanes the same word
    assert_int_equal(load_sectors<__nv_bfloat16>(1, 0), 2);
    assert_int_equal(load_sectors<__nv_bfloat162>(1, 0), 4);
    assert_int_equal(load_sectors<uint8_t>(1, 0), 1);
    assert_int_equal(load_sectors<double>(1, 0), 8);
    assert_int_equal(load_sectors<float2>(1, 0), 8);
    assert_int_equal(load_sectors<float4>(1, 0), 16);  // one access of 16 bytes a lane
    assert_int_equal(load_sectors<uint4>(1, 0), 16);
}

__global__ void loop(float *y, const float *x, int n) {
    float sum = 0;
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) sum += x[i];
    y[threadIdx.x] = sum;
}

static void each_turn_of_a_loop_is_an_access(void **state) {
    (void)state;
    COUNTED(c, LAUNCH(loop, 1, 64, 0, 0, zeros(64), zeros(1000), 1000));
    assert_int_equal(c.global_loads, 32);
    assert_int_equal(c.global_load_sectors, 125);
    assert_int_equal(c.global_load_bytes, 4000);
    assert_int_equal(c.divergent_branches, 1);  // after 15 turns of 64, 8 lanes of one warp take one more
}

__global__ void add_atomically(float *y) { atomicAdd(&y[threadIdx.x % 2], 1.f); }

static void atomics_are_stores(void **state) {
    (void)state;
    COUNTED(c, LAUNCH(add_atomically, 1, 64, 0, 0, zeros(2)));
    assert_int_equal(c.atomics, 64);
    assert_int_equal(c.flops, 0);
    assert_int_equal(c.global_stores, 2);
    assert_int_equal(c.global_store_sectors, 2);
    assert_int_equal(c.global_loads, 0);
}

// ---- shared memory ----

template <int PAD>
__global__ void transpose(float *y, const float *x, int n) {
    __shared__ float tile[32][32 + PAD];
    int column = blockIdx.x * 32, row = blockIdx.y * 32, i = threadIdx.x;
    for (int r = threadIdx.y; r < 32; r += blockDim.y) tile[r][i] = x[(row + r) * n + column + i];
    __syncthreads();
    for (int r = threadIdx.y; r < 32; r += blockDim.y) y[(column + r) * n + row + i] = tile[i][r];
}

__global__ void transpose_without_tile(float *y, const float *x, int n) {
    int column = blockIdx.x * 32 + threadIdx.x;
    for (int r = threadIdx.y; r < 32; r += blockDim.y)
        y[column * n + blockIdx.y * 32 + r] = x[(blockIdx.y * 32 + r) * n + column];
}

static void a_transpose_and_its_padding(void **state) {
    (void)state;
    enum { N = 64, BLOCKS = N / 32 * (N / 32), ROWS = BLOCKS * 32 };  // rows of 32 numbers, each a warp's
    float *x = zeros(N * N), *y = zeros(N * N);
    COUNTED(naive, LAUNCH(transpose_without_tile, dim3(2, 2), dim3(32, 8), 0, 0, y, x, N));
    assert_int_equal(naive.global_load_sectors, N * N / 8);
    assert_int_equal(naive.global_store_sectors, N * N);
    COUNTED(tiled, LAUNCH(transpose<0>, dim3(2, 2), dim3(32, 8), 0, 0, y, x, N));
    assert_int_equal(tiled.global_load_sectors, N * N / 8);
    assert_int_equal(tiled.global_store_sectors, N * N / 8);
    assert_int_equal(tiled.shared_accesses, 2 * ROWS);
    assert_int_equal(tiled.shared_conflicts, 31 * ROWS);  // a column lies in one bank
    assert_int_equal(tiled.barriers, BLOCKS);
    COUNTED(padded, LAUNCH(transpose<1>, dim3(2, 2), dim3(32, 8), 0, 0, y, x, N));
    assert_int_equal(padded.shared_accesses, 2 * ROWS);
    assert_int_equal(padded.shared_conflicts, 0);
    assert_int_equal(padded.divergent_branches, 0);
}

// One store of a warp to shared memory, lane t to element t * stride / divisor.
template <class T>
__global__ void touch(float *y, int stride, int divisor) {
    DYNAMIC_SHARED(T, array);
    if (divisor == 1) array[threadIdx.x * stride] = T();
    else {
        array[threadIdx.x] = T();
        __syncthreads();
        T value = array[threadIdx.x * stride / divisor];
        y[threadIdx.x] = *reinterpret_cast<const uint8_t *>(&value);
    }
}

template <class T>
static int64_t conflicts(int stride, int divisor) {
    COUNTED(c, LAUNCH(touch<T>, 1, 32, 32 * 33 * sizeof(T), 0, zeros(32), stride, divisor));
    assert_int_equal(c.shared_accesses, divisor == 1 ? 1 : 2);
    return c.shared_conflicts;
}

static void bank_conflicts_follow_width_and_stride(void **state) {
    (void)state;
    assert_int_equal(conflicts<float>(1, 1), 0);
    assert_int_equal(conflicts<float>(2, 1), 1);
    assert_int_equal(conflicts<float>(3, 1), 0);
    assert_int_equal(conflicts<float>(4, 1), 3);
    assert_int_equal(conflicts<float>(32, 1), 31);
    assert_int_equal(conflicts<float>(33, 1), 0);
    assert_int_equal(conflicts<float>(1, 4), 0);          // four lanes want one word: no conflict
    assert_int_equal(conflicts<float>(1, 32), 0);         // all do
    assert_int_equal(conflicts<__nv_bfloat16>(1, 1), 0);  // two lanes in one word
    assert_int_equal(conflicts<__nv_bfloat16>(2, 1), 0);
    assert_int_equal(conflicts<__nv_bfloat16>(64 / 2, 1), 15);  // words 0, 16, 32 …: two banks
    assert_int_equal(conflicts<double>(1, 1), 0);               // by half warps
    assert_int_equal(conflicts<double>(2, 1), 2);               // each half twice
    assert_int_equal(conflicts<float4>(1, 1), 0);               // by quarters
}

// ---- branches ----

enum Branch { BY_LANE, BY_WARP, TURNS_BY_LANE, TURNS_BY_WARP, LEAVES_EARLY, ALIKE };
template <int KIND>
__global__ void branch(float *y, float *z) {
    unsigned t = threadIdx.x, lane = t % 32, warp = t / 32;
    if (KIND == BY_LANE) {
        if (lane % 2) y[t] = 1;
        else z[t] = 1;
    }
    if (KIND == BY_WARP) {
        if (warp % 2) y[t] = 1;
        else z[t] = 1;
    }
    if (KIND == TURNS_BY_LANE)
        for (unsigned i = 0; i < lane; i++) y[t] += 1;
    if (KIND == TURNS_BY_WARP)
        for (unsigned i = 0; i < warp; i++) y[t] += 1;
    if (KIND == LEAVES_EARLY) {
        if (t < 5) return;
        y[t] = 1;
    }
    if (KIND == ALIKE)
        for (int i = 0; i < 10; i++) {
            if (i % 3) y[t] += 1;
            else z[t] += 1;
        }
}

template <int KIND>
static int64_t divergences() {
    COUNTED(c, LAUNCH(branch<KIND>, 1, 128, 0, 0, zeros(128), zeros(128)));
    return c.divergent_branches;
}

static void divergent_branches(void **state) {
    (void)state;
    assert_int_equal(divergences<BY_LANE>(), 4);  // each of 4 warps
    assert_int_equal(divergences<BY_WARP>(), 0);
    // lanes leave the loop after 0, 1, … iterations; the last one leaves alone
    assert_int_equal(divergences<TURNS_BY_LANE>(), 4 * 31);
    assert_int_equal(divergences<TURNS_BY_WARP>(), 0);
    assert_int_equal(divergences<LEAVES_EARLY>(), 1);
    assert_int_equal(divergences<ALIKE>(), 0);
}

// ---- arithmetic and active lanes ----

// x 2 FLOPs, half of the lanes 1 more and the others an exponential.
__global__ void arithmetic(float *y, float a, float b) {
    float x = y[threadIdx.x];
    x = fmaf(x, a, b);
    if (threadIdx.x % 2) y[threadIdx.x] = x + a;
    else y[threadIdx.x] = expf(x);
}

__global__ void dot(float *y, const float *x, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    y[threadIdx.x] = fmaxf(sum / n, 1.f);
}

// Calls a function of this program, where the others call the C library.
__global__ void powers(float *y) { y[threadIdx.x] = power_of_2(y[threadIdx.x]); }

static void arithmetic_counts_by_lane_and_by_warp(void **state) {
    (void)state;
    COUNTED(c, LAUNCH(arithmetic, 1, 128, 0, 0, zeros(128), 2.f, 3.f));
    assert_int_equal(c.flops, 128 * 2 + 64);
    assert_int_equal(c.special, 64);
    assert_true(c.flop_instructions == 4 * 2 || c.flop_instructions == 4 * 3);  // a fused one, or two
    assert_int_equal(c.special_instructions, 4);  // a warp issues it for half of its lanes
    COUNTED(d, LAUNCH(dot, 1, 32, 0, 0, zeros(32), zeros(10), 10));
    assert_int_equal(d.flops, 32 * (2 * 10 + 1));
    assert_int_equal(d.special, 32);
    COUNTED(p, LAUNCH(powers, 1, 64, 0, 0, zeros(64)));
    assert_int_equal(p.special, 64);
    assert_int_equal(p.special_instructions, 2);
    COUNTED(none, LAUNCH(copy<float>, 1, 32, 0, 0, zeros(32), zeros(32), 32, 1, 0));
    assert_int_equal(none.flops + none.special, 0);
}

static void lanes_that_a_branch_leaves_idle(void **state) {
    (void)state;
    COUNTED(all, LAUNCH(branch<ALIKE>, 1, 128, 0, 0, zeros(128), zeros(128)));
    assert_int_equal(all.lane_steps, 32 * all.warp_steps);
    COUNTED(warps, LAUNCH(branch<BY_WARP>, 1, 128, 0, 0, zeros(128), zeros(128)));
    assert_int_equal(warps.lane_steps, 32 * warps.warp_steps);
    COUNTED(lanes, LAUNCH(branch<BY_LANE>, 1, 128, 0, 0, zeros(128), zeros(128)));
    assert_int_equal(lanes.lane_steps, warps.lane_steps);
    assert_int_equal(lanes.warp_steps, warps.warp_steps + 4);  // each warp has taken both paths
}

__global__ void each_block_the_same(float *y, const float *x) {
    y[blockIdx.x * blockDim.x + threadIdx.x] = x[threadIdx.x];
}

static void memory_moves_distinct_sectors(void **state) {
    (void)state;
    COUNTED(c, {
        LAUNCH(each_block_the_same, 4, 64, 0, 0, zeros(4 * 64), zeros(64));
        LAUNCH(each_block_the_same, 4, 64, 0, 0, zeros(4 * 64), zeros(64));
    });
    assert_int_equal(c.global_load_sectors, 2 * 4 * 8);
    assert_int_equal(c.distinct_load_sectors, 2 * 8);  // once per launch
    assert_int_equal(c.distinct_store_sectors, 2 * 4 * 8);
}

static void shared_passes_follow_the_width(void **state) {
    (void)state;
    COUNTED(words, LAUNCH(touch<float>, 1, 32, 32 * 4, 0, zeros(32), 1, 1));
    assert_int_equal(words.shared_passes, 1);
    COUNTED(packs, LAUNCH(touch<float4>, 1, 32, 32 * 16, 0, zeros(32), 1, 1));
    assert_int_equal(packs.shared_passes, 4);
    assert_int_equal(packs.shared_accesses, 1);
}

static void only_launches_between_begin_and_end_count(void **state) {
    (void)state;
    float *x = zeros(64), *y = zeros(64);
    LAUNCH(copy<float>, 1, 64, 0, 0, y, x, 64, 1, 0);
    cuda_count_begin();
    LAUNCH(copy<float>, 1, 64, 0, 0, y, x, 64, 1, 0);
    LAUNCH(copy<float>, 1, 64, 0, 0, y, x, 64, 1, 0);
    CudaCounts c = cuda_count_end();
    assert_int_equal(c.global_load_sectors, 16);
    LAUNCH(copy<float>, 1, 64, 0, 0, y, x, 64, 1, 0);
    cuda_count_begin();
    c = cuda_count_end();
    assert_int_equal(c.global_load_sectors, 0);
    assert_int_equal(c.threads, 0);
}

static void counts_do_not_depend_on_the_order(void **state) {
    (void)state;
    float *x = zeros(64 * 64), *y = zeros(64 * 64);
    for (uint64_t seed = 0; seed < 4; seed++) {
        cuda_on_cpu_order(seed);
        COUNTED(c, LAUNCH(transpose<0>, dim3(2, 2), dim3(32, 8), 0, 0, y, x, 64));
        assert_int_equal(c.global_load_sectors, 64 * 64 / 8);
        assert_int_equal(c.shared_conflicts, 31 * 128);
        assert_int_equal(c.divergent_branches, 0);
    }
    cuda_on_cpu_order(0);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(coalesced_copies_take_each_sector_once),
        cmocka_unit_test(sectors_follow_width_stride_and_alignment),
        cmocka_unit_test(each_turn_of_a_loop_is_an_access),
        cmocka_unit_test(atomics_are_stores),
        cmocka_unit_test(a_transpose_and_its_padding),
        cmocka_unit_test(bank_conflicts_follow_width_and_stride),
        cmocka_unit_test(divergent_branches),
        cmocka_unit_test(arithmetic_counts_by_lane_and_by_warp),
        cmocka_unit_test(lanes_that_a_branch_leaves_idle),
        cmocka_unit_test(memory_moves_distinct_sectors),
        cmocka_unit_test(shared_passes_follow_the_width),
        cmocka_unit_test(only_launches_between_begin_and_end_count),
        cmocka_unit_test(counts_do_not_depend_on_the_order),
    };
    return cmocka_run_group_tests_name("cuda_on_cpu_counts", tests, NULL, NULL);
}
