// TMA, mbarrier and wgmma on the CPU, compared with the figures of the PTX ISA, "Swizzling Modes" and
// "Register Fragments for wgmma.mma_async.m64nNk16": where a tile has an element, and which lane has it.
// And the messages about errors in a ring of tiles.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include "cuda/instructions_hopper.h"
// needs those above, and to be told that it is C
extern "C" {
#include <cmocka.h>
}
#include "found.h"

template <class T>
static T *on_device(const T *host, size_t count) {
    T *memory;
    CUDA_CHECK(cudaMalloc(&memory, count * sizeof(T)));
    CUDA_CHECK(cudaMemcpy(memory, host, count * sizeof(T), cudaMemcpyHostToDevice));
    return memory;
}

// ---- TMA ----

// The chunk of 16 bytes in each place of 8 rows.
static const int swizzle[8][8] = {
    {0, 1, 2, 3, 4, 5, 6, 7}, {1, 0, 3, 2, 5, 4, 7, 6}, {2, 3, 0, 1, 6, 7, 4, 5}, {3, 2, 1, 0, 7, 6, 5, 4},
    {4, 5, 6, 7, 0, 1, 2, 3}, {5, 4, 7, 6, 1, 0, 3, 2}, {6, 7, 4, 5, 2, 3, 0, 1}, {7, 6, 5, 4, 3, 2, 1, 0}};

// The box at (row, column), of a sample or of the only one, as it is in shared memory.
__global__ void copy_box(uint16_t *y, const __grid_constant__ TensorMap map, int sample, int row,
                         int column) {
    __shared__ __align__(TILE_ALIGNMENT) uint16_t tile[16 * 64];
    __shared__ Mbarrier full;
    const int t = (int)threadIdx.x;
    if (t == 0) {
        mbarrier_init(&full, 1);
        fence_proxy_async();
    }
    __syncthreads();
    if (t == 0) {
        mbarrier_arrive_expect(&full, sizeof tile);
        if (sample == NO_SAMPLE) tma_load(tile, &map, row, column, &full);
        else tma_load(tile, &map, sample, row, column, &full);
    }
    mbarrier_wait(&full, 0);
    for (int i = t; i < 16 * 64; i += 32) y[i] = tile[i];
}

static void a_box_is_swizzled_and_zero_outside(void **state) {
    (void)state;
    enum { ROWS = 21, COLUMNS = 75, PITCH = 80, SAMPLES = 3 };
    static uint16_t x[ROWS][PITCH], y[16][64];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < PITCH; c++) x[r][c] = (uint16_t)(r * PITCH + c + 1);
    const uint16_t *on_gpu = on_device(&x[0][0], ROWS * PITCH);
    uint16_t *made = on_device(&y[0][0], 16 * 64);
    const struct {
        int sample, row, column, sectors;
    } cases[] = {{NO_SAMPLE, 0, 0, 64},   {NO_SAMPLE, 5, 8, 80}, {NO_SAMPLE, 10, 32, 33},
                 {NO_SAMPLE, -3, -5, 52}, {1, 0, 0, 28},         {2, -3, 0, 28},
                 {SAMPLES, 0, 0, 0},      {-1, 0, 0, 0}};
    for (auto &c : cases) {
        const bool one = c.sample == NO_SAMPLE;
        const int rows = one ? ROWS : ROWS / SAMPLES, first = one ? 0 : c.sample * rows;
        cuda_count_begin();
        LAUNCH(copy_box, 1, 32, 0, 0, made,
               tensor_map(reinterpret_cast<const __half *>(on_gpu), rows, COLUMNS, PITCH, 16,
                          one ? 0 : SAMPLES),
               c.sample, c.row, c.column);
        const CudaCounts counts = cuda_count_end();
        CUDA_CHECK(cudaMemcpy(y, made, sizeof y, cudaMemcpyDeviceToHost));
        for (int r = 0; r < 16; r++)
            for (int i = 0; i < 64; i++) {
                const int row = c.row + r, column = c.column + swizzle[r % 8][i / 8] * 8 + i % 8;
                const bool exists = row >= 0 && row < rows && column >= 0 && column < COLUMNS &&
                                    (one || (c.sample >= 0 && c.sample < SAMPLES));
                assert_int_equal(y[r][i], exists ? x[first + row][column] : 0);
            }
        assert_int_equal(counts.global_loads, 1);
        assert_int_equal(counts.global_load_sectors, c.sectors);
        assert_int_equal(counts.shared_passes, 16 + 16 * 64 / 32);
    }
}

// ---- wgmma ----

// Lanes of D's pairs, of a warp's 16 rows and each 8 columns. A lane has two, one in each half of the rows.
static const int lane_d[16][4] = {{0, 1, 2, 3},     {4, 5, 6, 7},     {8, 9, 10, 11},   {12, 13, 14, 15},
                                  {16, 17, 18, 19}, {20, 21, 22, 23}, {24, 25, 26, 27}, {28, 29, 30, 31},
                                  {0, 1, 2, 3},     {4, 5, 6, 7},     {8, 9, 10, 11},   {12, 13, 14, 15},
                                  {16, 17, 18, 19}, {20, 21, 22, 23}, {24, 25, 26, 27}, {28, 29, 30, 31}};

// No two rows and no two columns alike.
static int left(int row, int k) { return (row * 7 + k * k * 3) % 13 - 6; }
static int right(int k, int column) { return (k * 5 + column * column * 3) % 11 - 5; }

// d of a lane: A (64, K) B (K, N), one product after another; K: 64, or 128 of 8 bits.
template <class T, int N, Major A, Major B, bool REGISTERS>
__global__ void multiply_tiles(float *y, const __grid_constant__ TensorMap a,
                               const __grid_constant__ TensorMap b) {
    __shared__ __align__(TILE_ALIGNMENT) char left[64 * TILE_ROW];
    __shared__ __align__(TILE_ALIGNMENT) char right[N * TILE_ROW];
    __shared__ Mbarrier full;
    const int t = (int)threadIdx.x, lane = t % 32;
    if (t == 0) {
        mbarrier_init(&full, 1);
        fence_proxy_async();
    }
    __syncthreads();
    if (t == 0) {
        mbarrier_arrive_expect(&full, sizeof left + sizeof right);
        tma_load(left, &a, 0, 0, &full);
        for (int i = 0; i < N / 64; i++)
            tma_load(right + i * 64 * TILE_ROW, &b, B == K_MAJOR ? i * 64 : 0, B == K_MAJOR ? 0 : i * 64,
                     &full);
    }
    mbarrier_wait(&full, 0);
    float d[N / 2];
    uint32_t of_a[4][4];
    for (int i = 0; i < N / 2; i++) d[i] = 1000;
    for (int k = 0; k < 4 && REGISTERS; k++)
        for (int i = 0; i < 4; i++) {
            const int row = t / 32 * 16 + lane / 4 + i % 2 * 8, chunk = 2 * k + i / 2;
            of_a[k][i] = *reinterpret_cast<uint32_t *>(left + row * TILE_ROW + (chunk ^ row % 8) * 16 +
                                                       lane % 4 * 4);
        }
    wgmma_fence();
    for (int k = 0; k < 4; k++) {
        const uint64_t b16 = wgmma_operand(right + k * (B == K_MAJOR ? 32 : 16 * TILE_ROW), 64 * TILE_ROW);
        if (REGISTERS) wgmma<T, B>(d, of_a[k], b16, true);
        else wgmma<T, A, B>(d, wgmma_operand(left + k * (A == K_MAJOR ? 32 : 16 * TILE_ROW), 0), b16, true);
    }
    wgmma_commit();
    y[t] = d[0];  // too early
    wgmma_wait<0>(d);
    for (int i = 0; i < N / 2; i++) y[128 + t * (N / 2) + i] = d[i];
}

template <class T, int N, Major A, Major B, bool REGISTERS = false>
static void products() {
    enum { K = TILE_ROW / sizeof(T) };
    static T a[64][K], b[N][K];
    static float d[N / 2 + 1][128];
    for (int row = 0; row < 64; row++)
        for (int k = 0; k < K; k++) (A == K_MAJOR ? a[row][k] : a[k][row]) = T((float)left(row, k));
    T *flat = &b[0][0];
    for (int column = 0; column < N; column++)
        for (int k = 0; k < K; k++)
            flat[B == K_MAJOR ? column * K + k : k * N + column] = T((float)right(k, column));
    float *y = floats(128 + 128 * (N / 2));
    const T *on_gpu_a = on_device(&a[0][0], 64 * K), *on_gpu_b = on_device(flat, N * K);
    cuda_count_begin();
    LAUNCH((multiply_tiles<T, N, A, B, REGISTERS>), 1, 128, 0, 0, y, tensor_map(on_gpu_a, 64, K, K, 64),
           tensor_map(on_gpu_b, B == K_MAJOR ? N : 64, B == K_MAJOR ? K : N, B == K_MAJOR ? K : N, 64));
    const CudaCounts counts = cuda_count_end();
    CUDA_CHECK(cudaMemcpy(d, y, sizeof d, cudaMemcpyDeviceToHost));
    for (int t = 0; t < 128; t++) assert_true(isnan(d[0][t]));
    for (int row = 0; row < 64; row++)
        for (int column = 0; column < N; column++) {
            int sum = 1000;
            for (int k = 0; k < K; k++) sum += left(row, k) * right(k, column);
            const int t = row / 16 * 32 + lane_d[row % 16][column % 8 / 2];
            const int i = column / 8 * 4 + row % 16 / 8 * 2 + column % 2;
            assert_int_equal((int)(&d[1][0])[t * (N / 2) + i], sum);
        }
    assert_int_equal(counts.tensor_flops, sizeof(T) == 2 ? 2 * 64 * K * N : 0);
    assert_int_equal(counts.tensor_8_flops, sizeof(T) == 1 ? 2 * 64 * K * N : 0);
    // Rows that TMA writes; for each product A's 2 kB, and B's once for the four warps. A lane's registers
    // of A take as many passes.
    assert_int_equal(counts.shared_passes, 64 + N + 4 * (16 + N / 4));
    assert_int_equal(counts.shared_conflicts, 0);
}

static void products_of_a_warpgroup(void **state) {
    (void)state;
    products<__nv_bfloat16, 64, K_MAJOR, K_MAJOR>();
    products<__half, 128, K_MAJOR, MN_MAJOR>();
    products<__nv_bfloat16, 256, MN_MAJOR, MN_MAJOR>();
    products<__half, 64, MN_MAJOR, K_MAJOR>();
    products<__nv_bfloat16, 128, K_MAJOR, MN_MAJOR, true>();
    products<__nv_fp8_e4m3, 64, K_MAJOR, K_MAJOR>();
    products<__nv_fp8_e4m3, 128, K_MAJOR, K_MAJOR, true>();
}

// As make_gmma_desc has them (CUTLASS, cute/atom/mma_traits_sm90_gmma.hpp): for tiles of 64 columns of B from
// k = 16 on, 8192 bytes apart; the same, 16384 bytes apart; 8-bit rows of 128 bytes from byte 96 on, where
// it has a 1 in bits 16 to 29, which are not used; and an address beyond 2^18.
static void descriptors_are_those_of_cute(void **state) {
    (void)state;
    assert_true(wgmma_descriptor(16384 + 16 * TILE_ROW, 8192) == 0x4000004002000480);
    assert_true(wgmma_descriptor(16 * TILE_ROW, 16384) == 0x4000004004000080);
    assert_true(wgmma_descriptor(8192 + 96, 16) == 0x4000004000010206);
    assert_true(wgmma_descriptor((1 << 18) + 1024, 0) == 0x4000004000000040);
}

// 1000 + 448 * 448 is 12606.5 * 16, and below 2^18: 14 bits of it end with 16, and each product that is
// smaller is lost, even if two of them are together larger.
static void sums_of_8_bits_are_cut_off(void **state) {
    (void)state;
    typedef __nv_fp8_e4m3 T;
    enum { K = 128, N = 64 };
    static T a[64][K], b[N][K];
    static float d[N / 2 + 1][128];
    for (int i = 0; i < 64; i++) {
        a[i][0] = b[i][0] = T(448.f);
        a[i][32] = a[i][33] = T(1.f), b[i][32] = b[i][33] = T((float)(i % 33 - 16));  // of the second wgmma
    }
    float *y = floats(128 + 128 * (N / 2));
    LAUNCH((multiply_tiles<T, N, K_MAJOR, K_MAJOR, false>), 1, 128, 0, 0, y,
           tensor_map(on_device(&a[0][0], 64 * K), 64, K, K, 64),
           tensor_map(on_device(&b[0][0], N * K), N, K, K, 64));
    CUDA_CHECK(cudaMemcpy(d, y, sizeof d, cudaMemcpyDeviceToHost));
    for (int column = 0; column < N; column++) {  // of row 0
        const int twice = column % 33 - 16, added = twice == -16 || twice == 16 ? 2 * twice : 0;
        assert_int_equal((int)(&d[1][0])[column % 8 / 2 * (N / 2) + column / 8 * 4 + column % 2],
                         201696 + added);
    }
}

// ---- a ring of tiles, and possible errors in it ----

enum Fault {
    NONE,
    PHASE_OF_FULL,
    PHASE_OF_EMPTY,
    FEW_BYTES,
    MANY_BYTES,
    NO_BYTES,
    NO_FENCE,
    NO_SYNC,
    NO_EMPTY,
    NO_WGMMA_FENCE,
    NO_COMMIT,
    NO_WAIT,
    EARLY_RELEASE,
    LATE_GROUP,
    FLAT_OPERAND,
    OTHER_OPERAND,
    OTHER_ROW,
    PAST_THE_ROW,
    TILES_APART,
    PLAIN_STORE,
    PLAIN_LOAD,
    FENCED_LOAD,
    TWO_ARRIVALS,
    TOUCHED,
    UNALIGNED,
    OTHER_MAP
};

enum { DEEP = 2, STEPS = 5, TILE = 64 * TILE_ROW };

// Four warps multiply what a fifth has copied; y: A's tile times B's, STEPS times.
template <Fault FAULT>
__global__ void ring(float *y, const __grid_constant__ TensorMap map) {
    DYNAMIC_SHARED(char, memory);
    __shared__ Mbarrier full[DEEP];
    __shared__ Mbarrier empty[DEEP];
    char *tiles = first_tile(memory) + (FAULT == UNALIGNED) * 128;
    const int t = (int)threadIdx.x;
    if (t == 0) {
        for (int s = 0; s < DEEP; s++) mbarrier_init(&full[s], 1), mbarrier_init(&empty[s], 4);
        if (FAULT != NO_FENCE) fence_proxy_async();
    }
    if (FAULT != NO_SYNC) __syncthreads();
    if (t / 32 == 4) {
        for (int step = 0; step < STEPS && t % 32 == 0; step++) {
            const int s = step % DEEP;
            if (FAULT != NO_EMPTY)
                mbarrier_wait(&empty[s], (uint32_t)(step / DEEP + (FAULT != PHASE_OF_EMPTY)) & 1);
            if (FAULT == NO_BYTES) mbarrier_arrive(&full[s]);
            else
                mbarrier_arrive_expect(&full[s],
                                       2 * TILE + (FAULT == MANY_BYTES) * 16 - (FAULT == FEW_BYTES) * 16);
            if (FAULT == OTHER_MAP) tma_load(tiles + s * 2 * TILE, &map, 0, 0, 0, &full[s]);
            tma_load(tiles + s * 2 * TILE, &map, 0, 0, &full[s]);
            tma_load(tiles + s * 2 * TILE + TILE, &map, 64, 0, &full[s]);
        }
        return;
    }
    float d[32] = {};
    for (int step = 0; step < STEPS; step++) {
        const int s = step % DEEP;
        char *stage = tiles + s * 2 * TILE;
        mbarrier_wait(&full[s], (uint32_t)(step / DEEP + (FAULT == PHASE_OF_FULL)) & 1);
        if (FAULT == PLAIN_STORE) {
            reinterpret_cast<uint32_t *>(stage)[t] = 0;
            named_barrier(1, 128);
        }
        if ((FAULT == PLAIN_LOAD || FAULT == FENCED_LOAD) && t % 32 == 0)
            d[0] += *reinterpret_cast<float *>(stage) * 0;
        if (FAULT == FENCED_LOAD) fence_proxy_async();
        if (FAULT != NO_WGMMA_FENCE) wgmma_fence();
        for (int k = 0; k < 4; k++) {
            uint64_t a = wgmma_operand(stage + 32 * k, 0);
            if (FAULT == FLAT_OPERAND) a &= ~(3ull << 62);
            if (FAULT == OTHER_ROW) a = wgmma_operand(stage + 4 * TILE_ROW + 32 * k, 0);
            if (FAULT == PAST_THE_ROW) a = wgmma_operand(stage + 32 * k + 16, 0);
            if (FAULT == OTHER_OPERAND && t / 32 == 2) a = wgmma_operand(stage, 0);
            wgmma<__half, K_MAJOR, K_MAJOR>(d, a, wgmma_operand(stage + TILE + 32 * k, 0), true);
            float wide[64];
            if (FAULT == TILES_APART)
                wgmma<__half, K_MAJOR, MN_MAJOR>(wide, a, wgmma_operand(stage, TILE / 2 + 512), false);
        }
        if (FAULT != NO_COMMIT) wgmma_commit();
        if (FAULT == TOUCHED) d[5] = 1;
        if (FAULT == EARLY_RELEASE && t % 32 == 0) mbarrier_arrive(&empty[s]);
        if (FAULT == LATE_GROUP) wgmma_wait<1>();
        else if (FAULT != NO_WAIT) wgmma_wait<0>();
        if (FAULT != EARLY_RELEASE && t % 32 == 0) mbarrier_arrive(&empty[s]);
        if (FAULT == TWO_ARRIVALS && t == 0) mbarrier_arrive(&empty[s]);
    }
    for (int i = 0; i < 32; i++) y[t * 32 + i] = d[i];
}

template <Fault FAULT>
static void turn() {
    static uint16_t x[128][64];
    for (int i = 0; i < 128 * 64; i++) x[i / 64][i % 64] = f16_from_f32((float)(i % 3));
    float *y = floats(128 * 32), d[32];
    LAUNCH(ring<FAULT>, 1, 160, (size_t)DEEP * 2 * TILE + TILE_ALIGNMENT, 0, y,
           tensor_map(reinterpret_cast<const __half *>(on_device(&x[0][0], 128 * 64)), 128, 64, 64, 64));
    CUDA_CHECK(cudaMemcpy(d, y, sizeof d, cudaMemcpyDeviceToHost));
    float sum = 0;  // of row 0 and column 0, which begin at elements 0 and 64 * 64
    for (int k = 0; k < 64; k++) sum += (float)(k % 3 * ((64 * 64 + k) % 3) * STEPS);
    if (d[0] != sum) abort();
}

static void a_ring_of_tiles(void **state) {
    (void)state;
    SOUND(turn<NONE>());
    SOUND(cuda_on_cpu_order(7); turn<NONE>());
    FOUND(turn<PHASE_OF_FULL>(),
          "reads byte 1008 of dynamic shared memory, which no thread of this block has written");
    FOUND(turn<PHASE_OF_EMPTY>(), "waits for ever at full[0] (",
          "): phase 0, of parity 0, lacks 1 of 1 arrivals and 0", "; and thread 128 at empty[0] (",
          "): phase 0, of parity 0, lacks 4 of 4 arrivals");
    FOUND(turn<FEW_BYTES>(), "waits for ever at full[0] (",
          "): 16 bytes more have come than it was told to expect");
    FOUND(turn<MANY_BYTES>(), "waits for ever at full[0] (", "lacks 0 of 1 arrivals and 16 bytes");
    FOUND(turn<NO_BYTES>(), "byte 1008 of dynamic shared memory, to which TMA copies (",
          "full[0] has not been waited");
    FOUND(turn<NO_FENCE>(),
          "copies to full[0], which thread 0 has initialised with no fence_proxy_async()");
    FOUND(turn<NO_SYNC>(), "full[0], which thread 0 has initialised with no __syncthreads() between");
    FOUND(turn<NO_EMPTY>(), "arrives at full[0] (", "), whose phase has its 1 arrivals already");
    FOUND(turn<NO_WGMMA_FENCE>(), "begins a group of wgmma with no wgmma_fence() before it");
    FOUND(turn<NO_COMMIT>(), "waits with this wgmma in no group: wgmma_commit() is missing");
    FOUND(turn<NO_WAIT>(), "writes to a tile that a wgmma of warp 0 (");
    FOUND(turn<EARLY_RELEASE>(), "which the tensor cores for warp 0 read (",
          "with no __syncthreads() or mbarrier");
    FOUND(turn<LATE_GROUP>(), "writes to a tile that a wgmma of warp 0 (");
    FOUND(turn<FLAT_OPERAND>(), "has wgmma read an operand of swizzle mode 0");
    FOUND(turn<OTHER_OPERAND>(), "calls wgmma with other operands than the warps beside it (");
    FOUND(turn<OTHER_ROW>(), "read an operand that begins 512 bytes behind a multiple of 1024; 96 are the");
    FOUND(turn<PAST_THE_ROW>(), "read an operand that begins 112 bytes behind a multiple of 1024; 96 are");
    FOUND(turn<TILES_APART>(), "read an operand whose tiles are 4608 bytes apart, which is no multiple of");
    FOUND(turn<PLAIN_STORE>(), "which thread 0 has written (", "with no fence_proxy_async() behind it");
    FOUND(turn<PLAIN_LOAD>(), "has TMA write byte 1008 of dynamic shared memory, which thread ",
          " has read (", ") with no fence_proxy_async() behind it");
    SOUND(turn<FENCED_LOAD>());
    FOUND(turn<TWO_ARRIVALS>(), "which the tensor cores for warp 3 read (");
    FOUND(turn<TOUCHED>(), "changes the registers of D before it has waited for this wgmma");
    FOUND(turn<OTHER_MAP>(), "copies of a sample by a map without samples");
    FOUND(turn<UNALIGNED>(), "copies a swizzled tile to 0x", "which is no multiple of 1024");
}

// ---- phases ----

// The second warp ends three phases that the first waits for; ASKS: it begins the next one when the first
// tells it to, by lane 0, which is ordered after the other lanes or is not.
enum Asking { NOT_AT_ALL, BY_LANE_0, BY_SHUFFLE, WITHOUT_THE_OTHERS };
template <Asking ASKS>
__global__ void phases_ahead() {
    __shared__ Mbarrier ended;
    __shared__ Mbarrier looked;
    if (threadIdx.x == 0) mbarrier_init(&ended, 1), mbarrier_init(&looked, 1);
    __syncthreads();
    for (uint32_t phase = 0; phase < 3; phase++) {
        if (threadIdx.x < 32) {
            mbarrier_wait(&ended, phase & 1);
            if (ASKS == BY_LANE_0) __syncwarp();
            if (ASKS == BY_SHUFFLE) __any_sync(~0u, true);
            if (threadIdx.x == 0) mbarrier_arrive(&looked);
        } else if (threadIdx.x == 32) {
            if (ASKS != NOT_AT_ALL) mbarrier_wait(&looked, 1 - (phase & 1));
            mbarrier_arrive(&ended);
        }
    }
}

static void a_phase_is_seen_before_the_next_ends(void **state) {
    (void)state;
    SOUND(LAUNCH(phases_ahead<BY_LANE_0>, 2, 64, 0, 0));
    SOUND(LAUNCH(phases_ahead<BY_SHUFFLE>, 2, 64, 0, 0));
    SOUND(cuda_on_cpu_order(7); LAUNCH(phases_ahead<BY_LANE_0>, 2, 64, 0, 0));
    FOUND(LAUNCH(phases_ahead<NOT_AT_ALL>, 1, 64, 0, 0), "thread 0", "waits at ended (",
          ") for the parity 0, and nothing keeps phase 1 from ending before it looks: it would wait for "
          "phase 2");
    FOUND(LAUNCH(phases_ahead<WITHOUT_THE_OTHERS>, 1, 64, 0, 0), "thread 1", "waits at ended (",
          ") for the parity 0, and nothing keeps phase 1 from ending");
}

// ---- registers ----

// Three warpgroups have 168 registers a thread at launch. The first has GIVEN, the others TAKEN.
template <int GIVEN, int TAKEN, int LATE>
__global__ void move_registers() {
    const int warp = (int)threadIdx.x / 32;
    if (warp == LATE) return;
    if (warp < 4) registers_give<GIVEN>();
    else registers_take<TAKEN>();
}

static void registers_are_those_of_the_block(void **state) {
    (void)state;
    enum { NOBODY = -1 };
    SOUND(LAUNCH((move_registers<24, 240, NOBODY>), 2, 384, 0, 0));
    SOUND(LAUNCH((move_registers<40, 232, NOBODY>), 1, 384, 0, 0));
    FOUND(LAUNCH((move_registers<40, 240, NOBODY>), 1, 384, 0, 0), "thread 128",
          "waits for ever in registers_take (tests/unit/test_instructions_hopper.cc:",
          "): the block's warps want 2080 registers a lane, and have 2016");
    FOUND(LAUNCH((move_registers<24, 240, 2>), 1, 384, 0, 0), "thread 64",
          "leaves the kernel with 168 registers, and warp 0 of its warpgroup with 24");
    FOUND(LAUNCH((move_registers<176, 176, NOBODY>), 1, 384, 0, 0),
          "gives back registers so that it has 176 (", "), and has 168");
    FOUND(LAUNCH((move_registers<24, 160, NOBODY>), 1, 384, 0, 0), "takes registers so that it has 160 (",
          "), and has 168");
    FOUND(LAUNCH((move_registers<20, 240, NOBODY>), 1, 384, 0, 0), "asks for 20 registers (");
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cuda_on_cpu_order(0);  // the sentences name threads
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_box_is_swizzled_and_zero_outside),
        cmocka_unit_test(products_of_a_warpgroup),
        cmocka_unit_test(descriptors_are_those_of_cute),
        cmocka_unit_test(sums_of_8_bits_are_cut_off),
        cmocka_unit_test(a_ring_of_tiles),
        cmocka_unit_test(a_phase_is_seen_before_the_next_ends),
        cmocka_unit_test(registers_are_those_of_the_block),
    };
    return cmocka_run_group_tests_name("instructions_hopper", tests, NULL, NULL);
}
