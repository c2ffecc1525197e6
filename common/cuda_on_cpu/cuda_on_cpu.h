// cuda_on_cpu.h: the part of CUDA that the .cu files use, for a machine without a GPU. g++ compiles the
// same kernels against it, and cuda_on_cpu.cc runs them: the threads of a block are fibers of one OS
// thread, blocks run one after another, and every load and store of a kernel is checked before it happens.
//
// These end the program, with one sentence that names the kernel, the block, the thread and the source line:
//   - an access outside every array: in global memory (beyond an allocation, after it was freed, host memory)
//     or in shared memory, static or dynamic; one that is not aligned to its size; an index beyond a declared
//     bound
//   - a race: two threads access a word, one of them writes, and nothing orders the two. __syncthreads()
//     orders the threads of a block, __syncwarp(mask) the lanes of a warp that are in the mask; shuffles and
//     votes order nothing, as the CUDA programming guide says. The same holds for global words within a
//     launch, and two blocks may share a word that one of them writes only by atomics (or after a
//     __threadfence and an atomic, as when the last block of a reduction learns that the others are done)
//   - a read of shared memory that no thread of the block has written
//   - threads that do not all reach the same barrier, shuffle or vote; one that has left the kernel counts as
//     missing, even where a GPU would let the others continue
//   - more than 60 kB of local memory per thread
//   - a thread that waits in a loop, by atomics, for a word that no block before it has left so
//   - an access to the target of a cp.async or TMA copy before the thread has waited for it; a kernel that
//     ends before one of its copies has arrived
//   - an mbarrier whose phase can never end; a wgmma without its fence, commit or wait, or whose tiles are
//     written while it reads them (mbarriers order threads as __syncthreads does)
//   - a warpgroup that takes more registers than others of its block give up
//   - a launch that a GPU would refuse, for its sizes or its shared memory, static and dynamic together
//   - host code of a .cu file that dereferences device memory, or copies beyond an allocation
//   - any CUDA call in the child of a process that has used CUDA
// Memory is filled with 0xff bytes (NaN in every floating-point format) before its first use.
//
// All calls finish before they return, unless CUDA_ON_CPU_STREAMS is a seed: then work waits in the queues of
// its streams, and runs in one of the orders that a GPU could choose (cuda_on_cpu_streams.cc).
//
// Not supported: several devices, work that runs beside other work, the order of printf,
// __device__ variables, textures, cooperative groups, PTX other than that of cuda/instructions*.h. Values are
// those of the CPU's libm, which may differ from a GPU's in the last bit.
//
// How accesses are seen: g++ -fsanitize=thread calls __tsan_read4(address) and similar functions before each
// load and store; cuda_on_cpu_memory.cc defines them in place of that sanitizer's library. A .cu file is
// compiled with CUDA_ON_CPU_FLAGS of cuda.mk; nothing is linked with -fsanitize.
#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H

#include <math.h>
#include <string.h>

#include <cmath>
#include <tuple>

#include "tensor/tensor.h"

// ---- qualifiers ----
#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __constant__ __attribute__((section("cuda_constant")))

// Shared arrays become thread-local variables of the only OS thread: they have a segment of their own in the
// program, and their sizes in its symbol table. Red zones separate them; declare one array per __shared__.
#define __shared__                                                                          \
    static thread_local                                                                     \
        __attribute__((used, aligned(16))) char CUDA_JOIN(cuda_red_zone_, __COUNTER__)[64]; \
    static thread_local
#define CUDA_JOIN(a, b)  CUDA_JOIN_(a, b)
#define CUDA_JOIN_(a, b) a##b

// ---- vector types ----

// Copied in one access of their full width, as on a GPU: through a volatile pointer, or g++ would split it.
typedef uint16_t cuda_word2 __attribute__((may_alias));
typedef uint32_t cuda_word4 __attribute__((may_alias));
typedef uint64_t cuda_word8 __attribute__((may_alias));
typedef uint32_t cuda_word16 __attribute__((vector_size(16), may_alias));

#define CUDA_WIDE_COPY(name, bytes)                                   \
    name(const name &o) {                                             \
        *reinterpret_cast<cuda_word##bytes *>(this) =                 \
            *reinterpret_cast<const volatile cuda_word##bytes *>(&o); \
    }                                                                 \
    name &operator=(const name &o) {                                  \
        *reinterpret_cast<volatile cuda_word##bytes *>(this) =        \
            *reinterpret_cast<const volatile cuda_word##bytes *>(&o); \
        return *this;                                                 \
    }

#define CUDA_VECTOR2(T, name, bytes)   \
    struct alignas(bytes) name {       \
        T x, y;                        \
        name() = default;              \
        name(T x, T y) : x(x), y(y) {} \
        CUDA_WIDE_COPY(name, bytes)    \
    };                                 \
    static inline name make_##name(T x, T y) { return name(x, y); }

#define CUDA_VECTOR3(T, name) \
    struct name {             \
        T x, y, z;            \
    };                        \
    static inline name make_##name(T x, T y, T z) { return name{x, y, z}; }

#define CUDA_VECTOR4(T, name, bytes)                         \
    struct alignas(bytes) name {                             \
        T x, y, z, w;                                        \
        name() = default;                                    \
        name(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {} \
        CUDA_WIDE_COPY(name, bytes)                          \
    };                                                       \
    static inline name make_##name(T x, T y, T z, T w) { return name(x, y, z, w); }

CUDA_VECTOR2(signed char, char2, 2)
CUDA_VECTOR4(signed char, char4, 4)
CUDA_VECTOR2(unsigned char, uchar2, 2)
CUDA_VECTOR4(unsigned char, uchar4, 4)
CUDA_VECTOR2(short, short2, 4)
CUDA_VECTOR4(short, short4, 8)
CUDA_VECTOR2(unsigned short, ushort2, 4)
CUDA_VECTOR4(unsigned short, ushort4, 8)
CUDA_VECTOR2(int, int2, 8)
CUDA_VECTOR3(int, int3)
CUDA_VECTOR4(int, int4, 16)
CUDA_VECTOR2(unsigned, uint2, 8)
CUDA_VECTOR3(unsigned, uint3)
CUDA_VECTOR4(unsigned, uint4, 16)
CUDA_VECTOR2(long long, longlong2, 16)
CUDA_VECTOR2(unsigned long long, ulonglong2, 16)
CUDA_VECTOR2(float, float2, 8)
CUDA_VECTOR3(float, float3)
CUDA_VECTOR4(float, float4, 16)
CUDA_VECTOR2(double, double2, 16)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

// Constant while a thread runs, so g++ may keep them in registers and reports no access to them; to the
// scheduler the same symbols are variables. Not dim3: g++ would treat a type with a constructor as variable.
extern const uint3 threadIdx asm("cuda_thread_index");
extern const uint3 blockIdx asm("cuda_block_index");
extern const uint3 blockDim asm("cuda_block_dim");
extern const uint3 gridDim asm("cuda_grid_dim");
constexpr int warpSize = 32;

// ---- the runtime API, as far as it is used ----
enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInitializationError = 3,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInsufficientDriver = 35,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorUnsupportedPtxVersion = 222,
    cudaErrorNotReady = 600,
};
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError(void);

enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4,
};
typedef struct CudaStream *cudaStream_t;
typedef struct CudaEvent *cudaEvent_t;
typedef struct CudaPool *cudaMemPool_t;

struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor;
    int maxThreadsDim[3], maxGridSize[3];
    int regsPerBlock, pciBusID, pciDeviceID, pciDomainID;
    int l2CacheSize, memoryBusWidth, ECCEnabled, integrated, asyncEngineCount, concurrentKernels;
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
};
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
    cudaDevAttrMemoryPoolsSupported = 115,
};
enum cudaMemPoolAttr {
    cudaMemPoolReuseFollowEventDependencies = 1,
    cudaMemPoolReuseAllowOpportunistic = 2,
    cudaMemPoolReuseAllowInternalDependencies = 3,
    cudaMemPoolAttrReleaseThreshold = 4,
    cudaMemPoolAttrReservedMemCurrent = 5,
    cudaMemPoolAttrReservedMemHigh = 6,
    cudaMemPoolAttrUsedMemCurrent = 7,
    cudaMemPoolAttrUsedMemHigh = 8,
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaMemGetInfo(size_t *available, size_t *total);

cudaError_t cuda_malloc(void **memory, size_t bytes);
template <class T>
cudaError_t cudaMalloc(T **memory, size_t bytes) {
    return cuda_malloc(reinterpret_cast<void **>(memory), bytes);
}
cudaError_t cuda_malloc_async(void **memory, size_t bytes, cudaStream_t stream);
template <class T>
cudaError_t cudaMallocAsync(T **memory, size_t bytes, cudaStream_t stream) {
    return cuda_malloc_async(reinterpret_cast<void **>(memory), bytes, stream);
}
cudaError_t cudaFree(void *memory);
cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream);
// Pinned host memory: here, kernels may not access it.
cudaError_t cuda_malloc_host(void **memory, size_t bytes);
template <class T>
cudaError_t cudaMallocHost(T **memory, size_t bytes, unsigned = 0) {
    return cuda_malloc_host(reinterpret_cast<void **>(memory), bytes);
}
cudaError_t cudaFreeHost(void *memory);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void *to, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream = nullptr);
template <class T>
cudaError_t cudaMemcpyToSymbol(T &symbol, const void *from, size_t bytes, size_t offset = 0) {
    cudaDeviceSynchronize();
    memcpy(reinterpret_cast<char *>(&symbol) + offset, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device);
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void *value);
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void *value);
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes);

cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
// Wall time of the CPU, which says nothing about a GPU's.
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to);

cudaError_t cuda_allow_shared(const void *kernel, size_t bytes);
template <class... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    return cuda_allow_shared(reinterpret_cast<const void *>(kernel), (size_t)value);
}
template <class... P>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void (*)(P...), int threads,
                                                          size_t) {
    *blocks = threads > 0 && threads <= 1024 ? 2048 / threads : 0;
    return *blocks ? cudaSuccess : cudaErrorInvalidValue;
}

// ---- launches ----
// What a launch needs. `run` calls the kernel once, as the scheduler's current thread.
struct CudaLaunch {
    const void *kernel;
    const char *name, *file;
    int line;
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
    void (*run)(const CudaLaunch *);
    size_t size;  // of the whole object, with the arguments, which kernels read
};
void cuda_run(const CudaLaunch *launch);

template <class... P>
struct CudaKernel : CudaLaunch {
    std::tuple<P...> arguments;
    void operator()(P... values) {
        arguments = std::tuple<P...>(values...);
        cuda_run(this);
    }
    static void call(const CudaLaunch *launch) {
        std::apply(reinterpret_cast<void (*)(P...)>(const_cast<void *>(launch->kernel)),
                   static_cast<const CudaKernel *>(launch)->arguments);
    }
};

template <class... P>
CudaKernel<P...> cuda_launch(void (*kernel)(P...), const char *name, const char *file, int line, dim3 grid,
                             dim3 block, size_t shared_bytes, cudaStream_t stream) {
    return {{reinterpret_cast<const void *>(kernel), name, file, line, grid, block, shared_bytes, stream,
             CudaKernel<P...>::call, sizeof(CudaKernel<P...>)},
            {}};
}

// Runs blocks, warps and the lanes of each warp in another order, drawn from the seed; 0 is the natural
// order. The environment's CUDA_ON_CPU_SEED sets it from outside.
void cuda_on_cpu_order(uint64_t seed);
// From now on work waits in the queues of its streams, and runs in orders drawn from the seed that streams,
// events and waits of the host allow; 0: it is done in the call. The environment's CUDA_ON_CPU_STREAMS sets
// it from outside.
void cuda_on_cpu_streams(uint64_t seed);
// How many waits for the device, so far, are in calls of the host, or may be on a GPU: cuda...Synchronize,
// cudaMemcpy, copies to host memory that is not pinned, and what allocates or frees outside a stream. (A
// query does not wait.)
extern "C" int64_t cuda_on_cpu_waits(void);

// ---- counting ----

// Between begin and end every launch is counted. Lanes are taken to act together if they execute the same
// instruction the same number of times: a lane's k-th access at a place in the code, since the block's last
// barrier, goes with its neighbours' k-th there. On a GPU that is so unless lanes that took different paths
// in earlier iterations of a loop have diverged. What the compiler keeps in registers is not an access, as
// on a GPU.
struct CudaCounts {
    int64_t threads, warps;
    // Global memory: accesses of a warp (requests, on a GPU), the bytes that its lanes ask for, and the
    // 32-byte sectors that serve each access. Sectors are counted before any cache: one that is already in
    // L1 or L2 is counted again. Atomics count as stores.
    int64_t global_loads, global_load_bytes, global_load_sectors;
    int64_t global_stores, global_store_bytes, global_store_sectors;
    // The same sectors, each counted once per launch: what memory must move if a cache holds everything.
    int64_t distinct_load_sectors, distinct_store_sectors;
    // Shared memory: accesses of a warp, the passes (wavefronts) that they need for the width of their data
    // alone, and the further passes due to conflicts in the 32 banks of 4 bytes: lanes that access
    // different words of a bank take turns, lanes that access the same word do not. Accesses of 8 and 16
    // bytes take one pass for each half or quarter warp. A copy by TMA is one global load, and has a pass
    // for every 128 bytes; wgmma has one for every 128 bytes of its operands, and the four warps share
    // those of B.
    int64_t shared_accesses, shared_passes, shared_conflicts;
    // A branch is divergent if the lanes of a warp that leave a basic block together do not all enter the
    // same next one. g++ decides what is a branch: short ones become selects, as with nvcc.
    int64_t divergent_branches;
    // Basic blocks that warps have executed, and the lanes that were active in them: at most 32 each.
    int64_t warp_steps, lane_steps;
    // Floating-point arithmetic, from the machine code of each basic block: additions, multiplications,
    // minima and maxima are one operation, a fused multiply-add is two; divisions, roots, exponentials and
    // logarithms are special; what an atomic adds is left out. Counted per lane; then per warp, as
    // instructions issued for any number of active lanes.
    int64_t flops, special;
    int64_t flop_instructions, special_instructions;
    int64_t tensor_flops, tensor_8_flops;  // of tensor cores (mma, wgmma): on 16-bit numbers; on 8-bit ones
    int64_t barriers;      // __syncthreads, per block
    int64_t atomics;       // per lane, global and shared
};
void cuda_count_begin(void);
CudaCounts cuda_count_end(void);
// Some of them, for tests that cannot use CudaCounts: atomics; global memory's requests and sectors, loads
// and stores together.
int64_t cuda_count_end_atomics(void);
void cuda_count_end_global(int64_t *requests, int64_t *sectors);

// ---- inside kernels: barriers, warps, atomics ----
#define CUDA_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

void *cuda_dynamic_shared(void);
void __syncthreads(CUDA_HERE);
int __syncthreads_or(int predicate, CUDA_HERE);
int __syncthreads_and(int predicate, CUDA_HERE);
int __syncthreads_count(int predicate, CUDA_HERE);
void __syncwarp(unsigned mask = 0xffffffff, CUDA_HERE);
void __threadfence(void);
void __threadfence_block(void);
void __threadfence_system(void);
// The lanes of the warp that have not left the kernel.
unsigned __activemask(void);

enum CudaWarpOp { WARP_SYNC, WARP_SHFL, WARP_UP, WARP_DOWN, WARP_XOR, WARP_BALLOT, WARP_ANY, WARP_ALL,
                  WARP_LDMATRIX, WARP_MMA,
                  WARP_WGMMA, WARP_WGMMA_FENCE, WARP_WGMMA_COMMIT, WARP_WGMMA_WAIT, WARP_REGISTERS };
uint64_t cuda_warp_op(CudaWarpOp op, unsigned mask, uint64_t value, int argument, int width,
                      const char *file, int line);

template <class T>
__forceinline__ T cuda_shuffle(CudaWarpOp op, unsigned mask, T value, int argument, int width,
                               const char *file, int line) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof value);
    bits = cuda_warp_op(op, mask, bits, argument, width, file, line);
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
template <class T>
__forceinline__ T __shfl_sync(unsigned mask, T value, int lane, int width = 32, CUDA_HERE) {
    return cuda_shuffle(WARP_SHFL, mask, value, lane, width, file, line);
}
template <class T>
__forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_HERE) {
    return cuda_shuffle(WARP_UP, mask, value, (int)delta, width, file, line);
}
template <class T>
__forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_HERE) {
    return cuda_shuffle(WARP_DOWN, mask, value, (int)delta, width, file, line);
}
template <class T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, CUDA_HERE) {
    return cuda_shuffle(WARP_XOR, mask, value, lanes, width, file, line);
}
static __forceinline__ unsigned __ballot_sync(unsigned mask, int predicate, CUDA_HERE) {
    return (unsigned)cuda_warp_op(WARP_BALLOT, mask, predicate != 0, 0, 32, file, line);
}
static __forceinline__ int __any_sync(unsigned mask, int predicate, CUDA_HERE) {
    return (int)cuda_warp_op(WARP_ANY, mask, predicate != 0, 0, 32, file, line);
}
static __forceinline__ int __all_sync(unsigned mask, int predicate, CUDA_HERE) {
    return (int)cuda_warp_op(WARP_ALL, mask, predicate != 0, 0, 32, file, line);
}

// Atomics are checked like other accesses, but do not race with each other.
void cuda_atomic(const void *address, size_t bytes);
#define CUDA_ATOMIC(name, T, next)                       \
    static __forceinline__ T name(T *address, T value) { \
        cuda_atomic(address, sizeof *address);           \
        return cuda_exchange(address, [=](T old) {       \
            (void)old;                                   \
            return (T)(next);                            \
        });                                              \
    }
template <class T, class Next>
__attribute__((no_sanitize_thread, noinline)) T cuda_exchange(T *address, Next next) {
    T old = *address;
    *address = next(old);
    return old;
}
#define CUDA_ATOMICS_OF_INTEGERS(T)                                                          \
    CUDA_ATOMIC(atomicAdd, T, old + value)                                                   \
    CUDA_ATOMIC(atomicMax, T, old > value ? old : value)                                     \
    CUDA_ATOMIC(atomicMin, T, old < value ? old : value)                                     \
    CUDA_ATOMIC(atomicAnd, T, old &value)                                                    \
    CUDA_ATOMIC(atomicOr, T, old | value)                                                    \
    CUDA_ATOMIC(atomicXor, T, old ^ value)                                                   \
    CUDA_ATOMIC(atomicExch, T, value)                                                        \
    static __forceinline__ T atomicCAS(T *address, T expected, T value) {                    \
        cuda_atomic(address, sizeof *address);                                               \
        return cuda_exchange(address, [=](T old) { return old == expected ? value : old; }); \
    }
CUDA_ATOMICS_OF_INTEGERS(int)
CUDA_ATOMICS_OF_INTEGERS(unsigned)
CUDA_ATOMICS_OF_INTEGERS(unsigned long long)
CUDA_ATOMIC(atomicSub, int, old - value)
CUDA_ATOMIC(atomicSub, unsigned, old - value)
CUDA_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
// On a GPU, memory adds, not a multiprocessor: in a function of the emulator, it is no work of the kernel.
float cuda_sum(float x, float y);
double cuda_sum(double x, double y);
CUDA_ATOMIC(atomicAdd, float, cuda_sum(old, value))
CUDA_ATOMIC(atomicAdd, double, cuda_sum(old, value))
CUDA_ATOMIC(atomicExch, float, value)

// For memcpy g++ may move bytes without reporting it; these two check first.
void *cuda_memcpy(void *to, const void *from, size_t bytes);
void *cuda_memset(void *to, int value, size_t bytes);
#define memcpy(to, from, bytes)  cuda_memcpy(to, from, bytes)
#define memset(to, value, bytes) cuda_memset(to, value, bytes)

template <class T>
__forceinline__ T __ldg(const T *p) {
    return *p;
}
template <class T>
__forceinline__ T __ldcg(const T *p) {
    return *p;
}
template <class T>
__forceinline__ T __ldcs(const T *p) {
    return *p;
}
template <class T>
__forceinline__ T __ldca(const T *p) {
    return *p;
}
template <class T>
__forceinline__ void __stcg(T *p, T value) {
    *p = value;
}
template <class T>
__forceinline__ void __stcs(T *p, T value) {
    *p = value;
}
template <class T>
__forceinline__ void __stwt(T *p, T value) {
    *p = value;
}

#include "cuda_on_cpu_numbers.h"

#endif
