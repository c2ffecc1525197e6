// instructions_hopper.h: what compute capability 9.0 adds to instructions.h: copies of whole tiles (TMA),
// barriers that count arrivals and bytes (mbarrier), and products of a warpgroup (wgmma). PTX under nvcc, for
// sm_90a only (code for other GPUs traps); under g++ the same, written from the PTX ISA
// (cuda_on_cpu_mbarrier.inc, cuda_on_cpu_wgmma.cc), which reports what a kernel misses: a fence, a commit, a
// wait, or bytes that arrive and were not expected.
//
// A tile is rows of 128 bytes. TMA swizzles it on its way into shared memory, and wgmma undoes that:
//
//     address of 16 bytes    bits 4 to 6 ^= bits 7 to 9        chunk c of row r is at c ^ (r mod 8)
//
// so that chunk c of 8 rows, or the 8 chunks of a row, lie in different banks. Tiles begin at multiples of
// 1024 bytes.
//
// wgmma multiplies A (64, K) by B (K, N) for the four warps of a warpgroup; the first warp's number is a
// multiple of 4. K numbers are 32 bytes: 16 of 16 bits, or 32 of e4m3. Warp w has rows 16 w to 16 w + 15 of
// D; of these, lane l has, for each 8 columns j,
//
//     d[4 j], d[4 j + 1]        row l / 4        columns 8 j + 2 (l % 4), + 1
//     d[4 j + 2], d[4 j + 3]    row l / 4 + 8    the same
//
// If A comes from registers, the lane has the a[0] to a[3] of mma_m16n8k16 (instructions.h); in e4m3, with
// four numbers to a register, the first in its lowest byte, it has
//
//     a[0], a[2]    row l / 4        columns 4 (l % 4) to + 3, and 16 further
//     a[1], a[3]    row l / 4 + 8    the same
//
// With 16-bit numbers, a lane's elements of D are those it needs of A in the next product; in e4m3 they are
// not.
#ifndef INSTRUCTIONS_HOPPER_H
#define INSTRUCTIONS_HOPPER_H

#include "cuda/instructions.h"

enum { TILE_ROW = 128, TILE_ALIGNMENT = 1024 };  // bytes

// In shared memory; only mbarrier_* may access it.
typedef uint64_t Mbarrier;

// How an operand of wgmma is laid out in its tile. K_MAJOR: each row of A or column of B is a row of the
// tile, with 128 bytes along k. MN_MAJOR: each k is a row of the tile, with 64 rows of A or columns of B; a
// wider operand takes several tiles. 8-bit numbers must be K_MAJOR.
enum Major { K_MAJOR, MN_MAJOR };
#define NEED_MAJORS(T, A, B) \
    static_assert(sizeof(T) == 2 || (A == K_MAJOR && B == K_MAJOR), "8-bit operands have rows along k")

// The descriptor by which wgmma finds an operand that begins at the shared address `start`, in a tile with
// the 128-byte swizzle. MN_MAJOR: tiles of 64 columns are `next` bytes apart; K_MAJOR: `next` has no meaning.
// Within a tile, the next product's part begins 32 bytes further on (K_MAJOR), or 16 rows further on
// (MN_MAJOR). Its bits, in units of 16 bytes: from 0 on the address, from 16 on `next`, from 32 on the
// distance of 8 rows from the next 8; from 62 on the swizzle, 1 for 128 bytes.
__host__ __device__ constexpr uint64_t wgmma_descriptor(uint32_t start, uint32_t next) {
    return (uint64_t)(start >> 4 & 0x3fff) | (uint64_t)(next >> 4 & 0x3fff) << 16 |
           (uint64_t)(TILE_ALIGNMENT >> 4) << 32 | 1ull << 62;
}

// Where tiles can begin in dynamic shared memory: up to TILE_ALIGNMENT - 16 bytes at its start are skipped.
__device__ static inline char *first_tile(char *memory) {
    return memory + (-(uintptr_t)memory & (TILE_ALIGNMENT - 1));
}

#ifdef __CUDACC__

#include <cudaTypedefs.h>

typedef CUtensorMap TensorMap;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER_ASM(...) asm volatile(__VA_ARGS__)
#else
#define HOPPER_ASM(...) __trap()
#endif

// ---- mbarrier ----

// A phase ends when `arrivals` threads have arrived and all bytes that it expects have come; then the next
// begins. One thread calls this, then fence_proxy_async; the others may use it after a __syncthreads.
__device__ __forceinline__ void mbarrier_init(Mbarrier *b, uint32_t arrivals) {
    HOPPER_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals)
               : "memory");
}

// What this thread did before is visible to threads that have waited for the phase.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier *b) {
    HOPPER_ASM("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

// Arrives, and makes the phase wait for so many bytes of copies, below 2^20. The phase could end without
// bytes that it does not yet expect.
__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier *b, uint32_t bytes) {
    HOPPER_ASM(
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
        "r"(bytes)
        : "memory");
}

// Waits until the phase of this parity has ended: phases alternate between 0 and 1, starting with 0. Before
// the first one has ended, the phase of parity 1 counts as ended. The next phase must not end before this
// returns, or it waits for the one after that.
__device__ __forceinline__ void mbarrier_wait(Mbarrier *b, uint32_t parity) {
    for (uint32_t done = 0; !done;)
        HOPPER_ASM(
            "{\n.reg .pred done;\n"
            "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%1], %2;\n"
            "selp.u32 %0, 1, 0, done;\n}"
            : "=r"(done)
            : "r"(shared_address(b)), "r"(parity)
            : "memory");
}

// Orders this thread's writes to shared memory, by plain stores or mbarrier_init, before what TMA and wgmma
// do there after the next barrier; and what it has read there, by plain loads, before TMA writes there.
__device__ __forceinline__ void fence_proxy_async() {
    HOPPER_ASM("fence.proxy.async.shared::cta;" ::: "memory");
}

// A __syncthreads of only `threads` threads of the block, in whole warps; id: 1 to 15.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    HOPPER_ASM("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- TMA ----

// Starts to copy the map's box whose first element is (row, column); outside the matrix the box is filled
// with zeros. One thread calls this; all bytes of the box count at the mbarrier as they arrive.
__device__ __forceinline__ void tma_load(void *tile, const TensorMap *map, int row, int column,
                                         Mbarrier *b) {
    HOPPER_ASM(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(tile)),
        "l"(map), "r"(column), "r"(row), "r"(shared_address(b))
        : "memory");
}
// The same for one sample of a map with several. Rows beyond the sample are zeros, not the next sample's.
__device__ __forceinline__ void tma_load(void *tile, const TensorMap *map, int sample, int row, int column,
                                         Mbarrier *b) {
    HOPPER_ASM(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(tile)),
        "l"(map), "r"(column), "r"(row), "r"(sample), "r"(shared_address(b))
        : "memory");
}

// ---- registers ----

// A warpgroup gives up registers, or takes those that others gave up; each of its threads then has
// REGISTERS, a multiple of 8 from 24 to 256. A warpgroup that takes more than others give up waits for
// ever. All are the block's own, as many as its threads had at launch, which __launch_bounds__ must fix.
template <int REGISTERS>
__device__ __forceinline__ void registers_give() {
    HOPPER_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void registers_take() {
    HOPPER_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- wgmma ----

// Must come before the first wgmma of a group: orders the threads' accesses to the registers of D and A.
__device__ __forceinline__ void wgmma_fence() { HOPPER_ASM("wgmma.fence.sync.aligned;" ::: "memory"); }
// The products that the warp has started since its last commit become a group.
__device__ __forceinline__ void wgmma_commit() {
    HOPPER_ASM("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits for all of the warp's groups except the PENDING most recent ones. Until then nothing may touch D, the
// registers of A, or the tiles.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    HOPPER_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The same; it also keeps the compiler, which sees that d is a result of wgmma but not when it is there, from
// reading d any sooner.
template <int PENDING, int COUNT>
__device__ __forceinline__ void wgmma_wait(float (&d)[COUNT]) {
    wgmma_wait<PENDING>();
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// The descriptor of an operand that begins at `at`.
__device__ __forceinline__ uint64_t wgmma_operand(const void *at, uint32_t next) {
    return wgmma_descriptor(shared_address(at), next);
}

// d = A B, or d += A B if `add`. A and B are of T (__nv_bfloat16, __half, __nv_fp8_e4m3), both in shared
// memory, or A in registers. N: 64, 128 or 256. 2048 N FLOPs; with 8-bit numbers twice as many.
template <class T, int N, Major A, Major B>
struct Wgmma;

#define NUMBERS_10(tens)                                                                                 \
    "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens "6, %" #tens \
    "7, %" #tens "8, %" #tens "9, "
#define NUMBERS_30 NUMBERS_10() NUMBERS_10(1) NUMBERS_10(2)
#define NUMBERS_32 NUMBERS_30 "%30, %31"
#define NUMBERS_60 NUMBERS_30 NUMBERS_10(3) NUMBERS_10(4) NUMBERS_10(5)
#define NUMBERS_64 NUMBERS_60 "%60, %61, %62, %63"
#define NUMBERS_120 \
    NUMBERS_60 NUMBERS_10(6) NUMBERS_10(7) NUMBERS_10(8) NUMBERS_10(9) NUMBERS_10(10) NUMBERS_10(11)
#define NUMBERS_128 NUMBERS_120 "%120, %121, %122, %123, %124, %125, %126, %127"

#define SUMS_4(i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define SUMS_32    SUMS_16(0), SUMS_16(16)
#define SUMS_64    SUMS_32, SUMS_16(32), SUMS_16(48)
#define SUMS_128   SUMS_64, SUMS_16(64), SUMS_16(80), SUMS_16(96), SUMS_16(112)

// From A0 on: the numbers of the operands that follow the sums; MAJORS, MAJOR_B: which of them are majors.
#define WGMMA_OF(T, type, K, N, COUNT, A0, A1, A2, A3, A4, A5, A6, MAJORS, MAJOR_B)                       \
    template <Major A, Major B>                                                                           \
    struct Wgmma<T, N, A, B> {                                                                            \
        static __device__ __forceinline__ void shared(float (&d)[COUNT], uint64_t a, uint64_t b,          \
                                                      bool add) {                                         \
            HOPPER_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A2                                           \
                       ", 0;\n"                                                                           \
                       "wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." type "." type                \
                       " {" NUMBERS_##COUNT "}, %" #A0 ", %" #A1 ", p, 1, 1" MAJORS ";\n}"                \
                       : SUMS_##COUNT                                                                     \
                       : "l"(a), "l"(b), "r"((int)add), "n"((int)A), "n"((int)B));                        \
        }                                                                                                 \
        static __device__ __forceinline__ void registers(float (&d)[COUNT], const uint32_t (&a)[4],       \
                                                         uint64_t b, bool add) {                          \
            static_assert(A == K_MAJOR, "registers have one order");                                      \
            HOPPER_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A5                                           \
                       ", 0;\n"                                                                           \
                       "wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." type "." type                \
                       " {" NUMBERS_##COUNT "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #A4          \
                                            ", p, 1, 1" MAJOR_B ";\n}"                                    \
                       : SUMS_##COUNT                                                                     \
                       : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"((int)B)); \
        }                                                                                                 \
    };
#define WGMMA(T, type, N, COUNT, A0, A1, A2, A3, A4, A5, A6) \
    WGMMA_OF(T, type, 16, N, COUNT, A0, A1, A2, A3, A4, A5, A6, ", %" #A3 ", %" #A4, ", %" #A6)
#define WGMMA_8(T, type, N, COUNT, A0, A1, A2, A3, A4, A5, A6) \
    WGMMA_OF(T, type, 32, N, COUNT, A0, A1, A2, A3, A4, A5, A6, "", "")
WGMMA(__nv_bfloat16, "bf16", 64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA(__half, "f16", 64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA(__nv_bfloat16, "bf16", 128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA(__half, "f16", 128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA(__nv_bfloat16, "bf16", 256, 128, 128, 129, 130, 131, 132, 133, 134)
WGMMA(__half, "f16", 256, 128, 128, 129, 130, 131, 132, 133, 134)
WGMMA_8(__nv_fp8_e4m3, "e4m3", 64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA_8(__nv_fp8_e4m3, "e4m3", 128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA_8(__nv_fp8_e4m3, "e4m3", 256, 128, 128, 129, 130, 131, 132, 133, 134)
#undef WGMMA
#undef WGMMA_8
#undef WGMMA_OF

template <class T, Major A, Major B, int COUNT>
__device__ __forceinline__ void wgmma(float (&d)[COUNT], uint64_t a, uint64_t b, bool add) {
    NEED_MAJORS(T, A, B);
    Wgmma<T, 2 * COUNT, A, B>::shared(d, a, b, add);
}
template <class T, Major B, int COUNT>
__device__ __forceinline__ void wgmma(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, bool add) {
    NEED_MAJORS(T, K_MAJOR, B);
    Wgmma<T, 2 * COUNT, K_MAJOR, B>::registers(d, a, b, add);
}

#else

// A matrix in device memory, and the box that one copy takes of it.
struct TensorMap {
    const char *matrix;
    int64_t rows, row_bytes, pitch;  // row_bytes in a row; rows are `pitch` bytes apart
    int box_rows, element;           // bytes of an element
    int samples;                     // consecutive matrices; 0: one, with two dimensions
};

void cuda_mbarrier_init(Mbarrier *b, uint32_t arrivals, const char *file, int line);
void cuda_mbarrier_arrive(Mbarrier *b, uint32_t bytes, const char *file, int line);
void cuda_mbarrier_wait(Mbarrier *b, uint32_t parity, const char *file, int line);
void cuda_named_barrier(int id, int threads, const char *file, int line);
void cuda_fence_proxy_async(void);
enum { NO_SAMPLE = INT32_MIN };  // for a map of two dimensions
void cuda_tma_load(void *tile, const TensorMap *map, int sample, int row, int column, Mbarrier *b,
                   const char *file, int line);

// What a warp multiplies; a: NULL where A comes from shared memory.
struct CudaWgmma {
    float *d;
    const uint32_t *a;
    uint64_t operand_a, operand_b;
    int n;
    Major major_a, major_b;
    bool add;
    float (*widen)(uint16_t);
    int bytes;  // bytes of a number
    const void *site;
};
uint64_t cuda_wgmma_operand(const void *at, uint32_t next);
void cuda_wgmma(CudaWgmma *product, const char *file, int line);
void cuda_wgmma_fence(const char *file, int line);
void cuda_wgmma_commit(const char *file, int line);
void cuda_wgmma_wait(uint32_t pending, const char *file, int line);
void cuda_registers(int count, bool take, const char *file, int line);

static __forceinline__ void mbarrier_init(Mbarrier *b, uint32_t arrivals, CUDA_HERE) {
    cuda_mbarrier_init(b, arrivals, file, line);
}
static __forceinline__ void mbarrier_arrive(Mbarrier *b, CUDA_HERE) {
    cuda_mbarrier_arrive(b, 0, file, line);
}
static __forceinline__ void mbarrier_arrive_expect(Mbarrier *b, uint32_t bytes, CUDA_HERE) {
    cuda_mbarrier_arrive(b, bytes, file, line);
}
static __forceinline__ void mbarrier_wait(Mbarrier *b, uint32_t parity, CUDA_HERE) {
    cuda_mbarrier_wait(b, parity, file, line);
}
static __forceinline__ void fence_proxy_async() { cuda_fence_proxy_async(); }
static __forceinline__ void named_barrier(int id, int threads, CUDA_HERE) {
    cuda_named_barrier(id, threads, file, line);
}
static __forceinline__ void tma_load(void *tile, const TensorMap *map, int row, int column, Mbarrier *b,
                                     CUDA_HERE) {
    cuda_tma_load(tile, map, NO_SAMPLE, row, column, b, file, line);
}
static __forceinline__ void tma_load(void *tile, const TensorMap *map, int sample, int row, int column,
                                     Mbarrier *b, CUDA_HERE) {
    cuda_tma_load(tile, map, sample, row, column, b, file, line);
}
template <int REGISTERS>
__forceinline__ void registers_give(CUDA_HERE) {
    cuda_registers(REGISTERS, false, file, line);
}
template <int REGISTERS>
__forceinline__ void registers_take(CUDA_HERE) {
    cuda_registers(REGISTERS, true, file, line);
}

static __forceinline__ void wgmma_fence(CUDA_HERE) { cuda_wgmma_fence(file, line); }
static __forceinline__ void wgmma_commit(CUDA_HERE) { cuda_wgmma_commit(file, line); }
template <int PENDING>
__forceinline__ void wgmma_wait(CUDA_HERE) {
    cuda_wgmma_wait(PENDING, file, line);
}
template <int PENDING, int COUNT>
__forceinline__ void wgmma_wait(float (&)[COUNT], CUDA_HERE) {
    cuda_wgmma_wait(PENDING, file, line);
}
static __forceinline__ uint64_t wgmma_operand(const void *at, uint32_t next) {
    return cuda_wgmma_operand(at, next);
}
float cuda_widen_e4m3(uint16_t code);
template <class T>
__forceinline__ float (*cuda_widening())(uint16_t) {
    return sizeof(T) == 1 ? cuda_widen_e4m3 : std::is_same<T, __half>::value ? f32_from_f16 : f32_from_bf16;
}
template <class T, Major A, Major B, int COUNT>
__forceinline__ void wgmma(float (&d)[COUNT], uint64_t a, uint64_t b, bool add, CUDA_HERE) {
    NEED_MAJORS(T, A, B);
    CudaWgmma product = {d, NULL, a, b, 2 * COUNT, A, B, add, cuda_widening<T>(), sizeof(T), NULL};
    cuda_wgmma(&product, file, line);
}
template <class T, Major B, int COUNT>
__forceinline__ void wgmma(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, bool add, CUDA_HERE) {
    NEED_MAJORS(T, K_MAJOR, B);
    CudaWgmma product = {d, a, 0, b, 2 * COUNT, K_MAJOR, B, add, cuda_widening<T>(), sizeof(T), NULL};
    cuda_wgmma(&product, file, line);
}

#endif

// ---- host code ----

#ifdef __CUDACC__
// A function of the driver, which the runtime's library does not export. It is looked up only once, as every
// launch makes maps.
static inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
    static void *encode = NULL;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSuccess;
#if CUDART_VERSION >= 12050
    if (!encode)
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                                    cudaEnableDefault, &found));
#else  // removed in CUDA 13.0
    if (!encode)
        CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault, &found));
#endif
    CHECK(encode && found == cudaDriverEntryPointSuccess,
          "this driver knows no tensor maps: it is older than CUDA 12");
    return (PFN_cuTensorMapEncodeTiled_v12000)encode;
}
#endif

// A map of a matrix of T, rows by columns, whose rows are `pitch` elements apart, for boxes of box_rows
// rows and as many columns as 128 bytes hold. A kernel takes it as a `const __grid_constant__ TensorMap`: a
// parameter that no thread copies, so TMA can take its address. `samples` is the number of such matrices,
// one after another.
template <class T>
TensorMap tensor_map(const T *matrix, int64_t rows, int64_t columns, int64_t pitch, int box_rows,
                     int64_t samples = 0) {
    const int64_t bytes = pitch * (int64_t)sizeof(T);
    CHECK((uintptr_t)matrix % 16 == 0 && bytes % 16 == 0,
          "a tensor map needs rows that begin at multiples of 16 bytes; these are %lld bytes apart",
          (long long)bytes);
    CHECK(
        rows > 0 && columns > 0 && columns <= pitch && rows <= INT32_MAX && columns <= INT32_MAX,
        "a tensor map of %lld x %lld elements, %lld apart: there is at least one, and rows do not overlap",
        (long long)rows, (long long)columns, (long long)pitch);
    CHECK(box_rows > 0 && box_rows <= 256, "a box of a tensor map has 1 to 256 rows, not %d", box_rows);
    CHECK(samples >= 0 && samples <= INT32_MAX, "a tensor map of %lld samples: there is at least one",
          (long long)samples);
#ifdef __CUDACC__
    static_assert(sizeof(T) <= 2, "tiles are of 16 or 8 bits");
    const CUtensorMapDataType type = std::is_same<T, __half>::value ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                     : sizeof(T) == 1               ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                                                    : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const cuuint64_t sizes[] = {(cuuint64_t)columns, (cuuint64_t)rows, (cuuint64_t)samples};
    const cuuint64_t strides[] = {(cuuint64_t)bytes, (cuuint64_t)(rows * bytes)};
    const cuuint32_t box[] = {TILE_ROW / sizeof(T), (cuuint32_t)box_rows, 1}, steps[] = {1, 1, 1};
    TensorMap map;
    const CUresult result =
        tensor_map_encoder()(&map, type, samples ? 3 : 2, const_cast<T *>(matrix), sizes, strides, box,
                             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refused a matrix of %lld x %lld: error %d",
          (long long)rows, (long long)columns, (int)result);
    return map;
#else
    return TensorMap{reinterpret_cast<const char *>(matrix),
                     rows,
                     columns * (int64_t)sizeof(T),
                     bytes,
                     box_rows,
                     (int)sizeof(T),
                     (int)samples};
#endif
}

#endif
