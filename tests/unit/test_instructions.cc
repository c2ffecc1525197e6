// mma, ldmatrix, cp.async and ex2 on the CPU. The first two are compared with the figures of the PTX ISA,
// "Matrix Fragments for mma.m16n8k16 with floating point type" and "ldmatrix": which lane has which
// element.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include "cuda/instructions.h"
// needs those above, and to be told that it is C
extern "C" {
#include <cmocka.h>
}
#include "found.h"

// ---- the figures ----

// Lanes of A's pairs of neighbours in a row. A lane has four pairs: those of the upper and the lower half,
// in columns 0 to 7; then those in columns 8 to 15.
static const int lane_a[16][8] = {
    {0, 1, 2, 3, 0, 1, 2, 3},         {4, 5, 6, 7, 4, 5, 6, 7},         {8, 9, 10, 11, 8, 9, 10, 11},
    {12, 13, 14, 15, 12, 13, 14, 15}, {16, 17, 18, 19, 16, 17, 18, 19}, {20, 21, 22, 23, 20, 21, 22, 23},
    {24, 25, 26, 27, 24, 25, 26, 27}, {28, 29, 30, 31, 28, 29, 30, 31}, {0, 1, 2, 3, 0, 1, 2, 3},
    {4, 5, 6, 7, 4, 5, 6, 7},         {8, 9, 10, 11, 8, 9, 10, 11},     {12, 13, 14, 15, 12, 13, 14, 15},
    {16, 17, 18, 19, 16, 17, 18, 19}, {20, 21, 22, 23, 20, 21, 22, 23}, {24, 25, 26, 27, 24, 25, 26, 27},
    {28, 29, 30, 31, 28, 29, 30, 31}};
static const int pair_a[2][2] = {{0, 2}, {1, 3}};  // by half of the rows, half of the columns

// Lanes of B's elements. A lane has four: two rows of the upper half, and two of the lower.
static const int lane_b[16][8] = {
    {0, 4, 8, 12, 16, 20, 24, 28},  {0, 4, 8, 12, 16, 20, 24, 28},  {1, 5, 9, 13, 17, 21, 25, 29},
    {1, 5, 9, 13, 17, 21, 25, 29},  {2, 6, 10, 14, 18, 22, 26, 30}, {2, 6, 10, 14, 18, 22, 26, 30},
    {3, 7, 11, 15, 19, 23, 27, 31}, {3, 7, 11, 15, 19, 23, 27, 31}, {0, 4, 8, 12, 16, 20, 24, 28},
    {0, 4, 8, 12, 16, 20, 24, 28},  {1, 5, 9, 13, 17, 21, 25, 29},  {1, 5, 9, 13, 17, 21, 25, 29},
    {2, 6, 10, 14, 18, 22, 26, 30}, {2, 6, 10, 14, 18, 22, 26, 30}, {3, 7, 11, 15, 19, 23, 27, 31},
    {3, 7, 11, 15, 19, 23, 27, 31}};
static const int element_b[16] = {0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3};

// Lanes of D's pairs. A lane has two, one in each half of the rows.
static const int lane_d[16][4] = {{0, 1, 2, 3},     {4, 5, 6, 7},     {8, 9, 10, 11},   {12, 13, 14, 15},
                                  {16, 17, 18, 19}, {20, 21, 22, 23}, {24, 25, 26, 27}, {28, 29, 30, 31},
                                  {0, 1, 2, 3},     {4, 5, 6, 7},     {8, 9, 10, 11},   {12, 13, 14, 15},
                                  {16, 17, 18, 19}, {20, 21, 22, 23}, {24, 25, 26, 27}, {28, 29, 30, 31}};

// Lanes of the pairs of an 8 x 8 matrix that ldmatrix loads.
static const int lane_rows[8][4] = {{0, 1, 2, 3},     {4, 5, 6, 7},     {8, 9, 10, 11},   {12, 13, 14, 15},
                                    {16, 17, 18, 19}, {20, 21, 22, 23}, {24, 25, 26, 27}, {28, 29, 30, 31}};

// ---- mma ----

template <class T>
__global__ void multiply(float *d, const uint32_t *a, const uint32_t *b) {
    const int lane = (int)threadIdx.x;
    uint32_t mine_a[4], mine_b[2];
    float mine[4];
    for (int i = 0; i < 4; i++) mine_a[i] = a[lane * 4 + i], mine[i] = d[lane * 4 + i];
    for (int i = 0; i < 2; i++) mine_b[i] = b[lane * 2 + i];
    mma_m16n8k16<T>(mine, mine_a, mine_b);
    for (int i = 0; i < 4; i++) d[lane * 4 + i] = mine[i];
}

template <class T>
static T *on_device(const T *host, size_t count) {
    T *memory;
    CUDA_CHECK(cudaMalloc(&memory, count * sizeof(T)));
    CUDA_CHECK(cudaMemcpy(memory, host, count * sizeof(T), cudaMemcpyHostToDevice));
    return memory;
}

// No two rows and no two columns alike.
static int left(int row, int k) { return (row * 7 + k * k * 3) % 13 - 6; }
static int right(int k, int column) { return (k * 5 + column * column * 3) % 11 - 5; }
static int before(int row, int column) { return row * 100 + column; }

template <class T>
static void fragments(uint16_t (*code)(float)) {
    uint32_t a[32][4] = {}, b[32][2] = {};
    float d[32][4];
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            a[lane_a[row][k / 2]][pair_a[row / 8][k / 8]] |= (uint32_t)code((float)left(row, k))
                                                             << k % 2 * 16;
    for (int k = 0; k < 16; k++)
        for (int column = 0; column < 8; column++)
            b[lane_b[k][column]][element_b[k] / 2] |= (uint32_t)code((float)right(k, column))
                                                      << element_b[k] % 2 * 16;
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 8; column++)
            d[lane_d[row][column / 2]][row / 8 * 2 + column % 2] = (float)before(row, column);
    float *on_gpu = on_device(&d[0][0], 128);
    cuda_count_begin();
    LAUNCH(multiply<T>, 1, 32, 0, 0, on_gpu, on_device(&a[0][0], 128), on_device(&b[0][0], 64));
    const CudaCounts counts = cuda_count_end();
    CUDA_CHECK(cudaMemcpy(d, on_gpu, sizeof d, cudaMemcpyDeviceToHost));
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 8; column++) {
            int sum = before(row, column);
            for (int k = 0; k < 16; k++) sum += left(row, k) * right(k, column);
            assert_int_equal((int)d[lane_d[row][column / 2]][row / 8 * 2 + column % 2], sum);
        }
    assert_int_equal(counts.tensor_flops, 2 * 16 * 8 * 16);
    assert_int_equal(counts.flops, 0);
}

static void fragments_of_mma_are_those_of_the_figures(void **state) {
    (void)state;
    fragments<__nv_bfloat16>(bf16_from_f32);
    fragments<__half>(f16_from_f32);
}

// ---- ldmatrix ----

// Rows are `pitch` bytes apart; number i of row r is 8 r + i.
template <bool TRANSPOSED>
__global__ void load_rows(uint32_t *to, int pitch) {
    DYNAMIC_SHARED(uint16_t, rows);
    const int lane = (int)threadIdx.x;
    uint16_t *row = rows + lane * pitch / 2;
    for (int i = 0; i < 8; i++) row[i] = (uint16_t)(8 * lane + i);
    __syncthreads();
    uint32_t mine[4];
    if (TRANSPOSED) ldmatrix_x4_trans(mine, row);
    else ldmatrix_x4(mine, row);
    for (int m = 0; m < 4; m++) to[lane * 4 + m] = mine[m];
}

template <bool TRANSPOSED>
static CudaCounts loaded(uint32_t (&host)[32][4], int pitch) {
    uint32_t *to = on_device(&host[0][0], 128);
    cuda_count_begin();
    LAUNCH(load_rows<TRANSPOSED>, 1, 32, (size_t)(32 * pitch), 0, to, pitch);
    CUDA_CHECK(cudaMemcpy(host, to, sizeof host, cudaMemcpyDeviceToHost));
    return cuda_count_end();
}

static void ldmatrix_deals_out_rows_or_columns(void **state) {
    (void)state;
    uint32_t straight[32][4] = {}, turned[32][4] = {};
    loaded<false>(straight, 16);
    loaded<true>(turned, 16);
    for (int m = 0; m < 4; m++)
        for (int row = 0; row < 8; row++)
            for (int column = 0; column < 8; column++) {
                const int number = m * 64 + row * 8 + column;
                assert_int_equal(straight[lane_rows[row][column / 2]][m] >> column % 2 * 16 & 0xffff,
                                 number);
                assert_int_equal(turned[lane_rows[column][row / 2]][m] >> row % 2 * 16 & 0xffff, number);
            }
}

// Besides the stores, of 2 bytes each: the rows of a matrix are 128 bytes, which take one pass if they are in
// different banks.
static void ldmatrix_has_the_conflicts_of_its_rows(void **state) {
    (void)state;
    const struct { int pitch, turns; } cases[] = {{16, 1}, {32, 2}, {64, 4}, {128, 8}, {80, 1}, {144, 1}};
    for (auto &c : cases) {
        uint32_t host[32][4] = {};
        const CudaCounts counts = loaded<false>(host, c.pitch);
        int64_t stores = 0;  // of 32 lanes, whose rows lie in as many banks
        for (int i = 0; i < 8; i++) {
            int words[32] = {}, most = 0;
            for (int lane = 0; lane < 32; lane++) words[(lane * c.pitch + 2 * i) / 4 % 32]++;
            for (int bank = 0; bank < 32; bank++) most = words[bank] > most ? words[bank] : most;
            stores += most - 1;
        }
        assert_int_equal(counts.shared_passes, 8 + 4);
        assert_int_equal(counts.shared_conflicts - stores, 4 * (c.turns - 1));
    }
}

// ---- copies in flight ----

enum Forgotten { NOTHING, COMMIT, WAIT, BARRIER, LAST_WAIT, ALIGNMENT };

// Two groups of 32 words each; the second is waited for later. y: the first, then the second.
template <Forgotten FORGOTTEN>
__global__ void copy_groups(float *y, const float *x) {
    __shared__ float tile[128];
    const int t = (int)threadIdx.x, other = (t + 8) % 32;
    if (t < 8) cp_async(tile + 4 * t + (FORGOTTEN == ALIGNMENT), x + 4 * t, true);
    if (FORGOTTEN != COMMIT) cp_async_commit();
    if (t < 8) cp_async(tile + 32 + 4 * t, x + 32 + 4 * t, true);
    if (FORGOTTEN != COMMIT) cp_async_commit();
    cp_async_wait<FORGOTTEN == WAIT ? 2 : 1>();
    if (FORGOTTEN != BARRIER) __syncthreads();
    y[t] = tile[other];
    if (FORGOTTEN == LAST_WAIT) return;
    cp_async_wait<0>();
    __syncthreads();
    y[32 + t] = tile[32 + other];
}

template <Forgotten FORGOTTEN>
static void copies() {
    float *x = floats(64), *y = floats(64), host[64];
    for (int i = 0; i < 64; i++) host[i] = (float)i;
    CUDA_CHECK(cudaMemcpy(x, host, sizeof host, cudaMemcpyHostToDevice));
    LAUNCH(copy_groups<FORGOTTEN>, 1, 32, 0, 0, y, x);
    CUDA_CHECK(cudaMemcpy(host, y, sizeof host, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 64; i++)
        if (host[i] != (float)((i + 8) % 32 + i / 32 * 32)) abort();
}

// A stage is refilled while it is read; what does not exist is zero, and its address is not checked.
template <bool READ>
__global__ void copy_nothing(float *y) {
    __shared__ float tile[128];
    const int t = (int)threadIdx.x;
    tile[4 * t] = 1;
    __syncthreads();
    if (READ) y[t] = tile[(4 * t + 4) % 128];
    cp_async(tile + 4 * t, NULL, false);
    cp_async_commit();
    cp_async_wait<0>();
    y[t] = tile[4 * t];
}

__global__ void copy_to_global(float *y, const float *x) { cp_async(y, x, true); }

static void copies_in_flight(void **state) {
    (void)state;
    SOUND(copies<NOTHING>());
    FOUND(copies<COMMIT>(), "reads byte 28 of tile, to which thread 1 copies by cp.async (tests/unit/",
          "), and which it has not committed to a group");
    FOUND(copies<WAIT>(), "reads byte 28 of tile, to which thread 1 copies by cp.async (",
          "), in a group that it has not waited for");
    FOUND(copies<BARRIER>(), "reads byte 32 of tile, which no thread of this block has written yet");
    FOUND(copies<LAST_WAIT>(), "leaves the kernel with this cp.async in flight: a wait is missing");
    FOUND(copies<ALIGNMENT>(), "writes 16 bytes at byte 4 of tile, an address that is no multiple of 16");
    SOUND(float *y = floats(32); LAUNCH(copy_nothing<false>, 1, 32, 0, 0, y));
    FOUND(LAUNCH(copy_nothing<true>, 1, 32, 0, 0, floats(32)), "of tile, which thread ", "__syncwarp()");
    FOUND(LAUNCH(copy_to_global, 1, 1, 0, 0, floats(4), floats(4)), "cp.async writes to 0x",
          ", which is not shared memory of this block");
}

// ---- 2^x ----

__global__ void powers(float *y, const float *x, int count) {
    for (int i = (int)threadIdx.x; i < count; i += (int)blockDim.x) y[i] = power_of_2(x[i]);
}

static void powers_of_2_are_as_far_off_as_they_may(void **state) {
    (void)state;
    constexpr int COUNT = 4096, EXACT = 5;
    static float x[COUNT] = {0, -INFINITY, INFINITY, -126.5f, -1e30f}, y[COUNT];
    static const float exact[EXACT] = {1, 0, INFINITY, 0, 0};
    float *device;
    double most = 0, least = 0;
    for (int i = EXACT; i < COUNT; i++) x[i] = -126 + 252 * (float)i / COUNT;
    x[COUNT - 1] = NAN;
    assert_int_equal(cudaMalloc(&device, 2 * sizeof x), cudaSuccess);
    cudaMemcpy(device, x, sizeof x, cudaMemcpyHostToDevice);
    LAUNCH(powers, 1, 32, 0, 0, device + COUNT, device, COUNT);
    cudaMemcpy(y, device + COUNT, sizeof y, cudaMemcpyDeviceToHost);
    cudaFree(device);
    for (int i = 0; i < EXACT; i++) assert_true(y[i] == exact[i]);
    assert_true(isnan(y[COUNT - 1]));
    for (int i = EXACT; i + 1 < COUNT; i++) {
        const double off = y[i] / exp2((double)x[i]) - 1;
        most = off > most ? off : most, least = off < least ? off : least;
    }
    assert_true(most <= 0x1p-22 && least >= -0x1p-22);
    // or proofs would rely on a better one than a GPU's
    assert_true(most >= 0x1p-23 && least <= -0x1p-23);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cuda_on_cpu_order(0);  // the sentences name threads
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fragments_of_mma_are_those_of_the_figures),
        cmocka_unit_test(ldmatrix_deals_out_rows_or_columns),
        cmocka_unit_test(ldmatrix_has_the_conflicts_of_its_rows),
        cmocka_unit_test(copies_in_flight),
        cmocka_unit_test(powers_of_2_are_as_far_off_as_they_may),
    };
    return cmocka_run_group_tests_name("instructions", tests, NULL, NULL);
}
