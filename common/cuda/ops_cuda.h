// ops_cuda.h: what the kernels of ops_cuda*.cu have in common: types, loads of 16 bytes, sums over a
// block, launches.
//
// A memory-bound kernel is fast if each thread moves 16 bytes at a time and enough of these loads are in
// flight. So a thread works on a pack: N consecutive elements, which take 16 bytes in the array of the
// narrowest type. If a view begins at an odd element, or a row has an odd length, it takes the elements one
// by one.
//
// Three rules keep results reproducible, as on the CPU: atomics only on integers; no sum whose order
// depends on the GPU; and no sum whose order depends on where an array begins: a thread sums the same
// elements whether it loads them in packs or one by one.
#ifndef OPS_CUDA_H
#define OPS_CUDA_H

#include <algorithm>
#include <climits>
#include <type_traits>

#include "device_cuda.h"
#include "gpu_numbers.h"
#include "tensor/device.h"
#include "tensor/kernels.h"

constexpr int64_t WARP = 32;
constexpr int64_t PACK_BYTES = 16;
// Threads per block; small arrays take fewer.
constexpr int64_t MOST_THREADS = 256;
// Blocks of an elementwise kernel, whose threads loop as often as necessary.
constexpr int64_t MOST_BLOCKS = 1 << 14;
// Bytes that a thread loads before it computes with the first of them: with fewer in flight, the latency of
// memory would not be hidden.
constexpr int BYTES_AHEAD = 64;
// Shared memory of a block in which rows may be held: it gets 48 KiB without asking, and sums take the rest.
constexpr int64_t SHARED_BYTES = 47 * 1024;

static inline cudaStream_t stream() { return static_cast<cudaStream_t>(device_stream()); }

__host__ __device__ static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
__host__ __device__ static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Threads per block for `items` pieces of work: whole warps, as over_block needs them.
static inline unsigned threads_for(int64_t items) {
    return (unsigned)(least(ceil_div(items > 0 ? items : 1, WARP) * WARP, MOST_THREADS));
}

// Blocks of so many threads that loop over `items`.
static inline unsigned blocks_of(int64_t items, int64_t threads = MOST_THREADS) {
    return (unsigned)least(ceil_div(items, threads), MOST_BLOCKS);
}

// One block for each of `rows`.
static inline unsigned blocks_for(const char *op, int64_t rows) {
    CHECK(rows <= INT_MAX, "%s: %lld rows are more than the %d blocks of a launch", op, (long long)rows,
          INT_MAX);
    return (unsigned)rows;
}

// ---- storage and arithmetic ----

// f64 is computed in f64, everything else in f32.
template <class T>
struct ArithmeticOf {
    typedef float Type;
};
template <>
struct ArithmeticOf<double> {
    typedef double Type;
};
template <class T>
using Arithmetic = typename ArithmeticOf<T>::Type;

__device__ inline double wide(double x) { return x; }
__device__ inline float wide(float x) { return x; }
__device__ inline float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float wide(__half x) { return __half2float(x); }
__device__ inline float wide(__nv_fp8_e4m3 x) { return (float)x; }
__device__ inline float wide(__nv_fp8_e5m2 x) { return (float)x; }

// Rounds to nearest, ties to even; f64 is rounded to 16 bits by way of f32.
template <class T>
__device__ inline T narrow(float x) {
    return T(x);
}
template <class T>
__device__ inline T narrow(double x) {
    return T(static_cast<float>(x));
}
template <>
__device__ inline double narrow<double>(double x) {
    return x;
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half narrow<__half>(float x) {
    return __float2half_rn(x);
}
// If results are rounded to a 16-bit type T, these are the GPU's own approximations in a fraction of the
// instructions, off by 2 units in the last place (__expf: and by 1.2 |x| more). Without them 16-bit rows
// would be bound by the exponentials instead of memory.
template <class T>
__device__ inline Arithmetic<T> exp_for(Arithmetic<T> x) {
    if constexpr (sizeof(T) == 2) return __expf(x);
    else return exp(x);
}
template <class T>
__device__ inline Arithmetic<T> quotient_for(Arithmetic<T> x, Arithmetic<T> y) {
    if constexpr (sizeof(T) == 2) return __fdividef(x, y);
    else return x / y;
}

// Calls f with an argument of the type that dtype stores; only its type matters.
template <class F>
static inline void by_dtype(DType dtype, F f) {
    switch (dtype) {
        case F64:
            return f(double());
        case F32:
            return f(float());
        case BF16:
            return f(__nv_bfloat16());
        case F16:
            return f(__half());
        default:
            fatal("kernels compute with f64, f32, bf16 and f16, not with %s", dtype_name(dtype));
    }
}

// ---- packs ----

template <class T, int N>
struct alignas(N == 1 ? alignof(T) : PACK_BYTES) Pack {
    T x[N];
};

// As many elements as fill 16 bytes in the narrowest of these types.
template <class... T>
constexpr int pack_of = (int)PACK_BYTES / (int)std::min({sizeof(T)...});

template <int N, class T>
__device__ inline Pack<T, N> load(const T *from) {
    Pack<T, N> pack;
    if constexpr (N == 1) {
        pack.x[0] = *from;
    } else {
        static_assert(sizeof pack % PACK_BYTES == 0, "a pack is whole accesses of 16 bytes");
#pragma unroll
        for (size_t i = 0; i < sizeof pack / sizeof(uint4); i++)
            reinterpret_cast<uint4 *>(&pack)[i] = reinterpret_cast<const uint4 *>(from)[i];
    }
    return pack;
}

template <int N, class T>
__device__ inline void store(T *to, const Pack<T, N> &pack) {
    if constexpr (N == 1) {
        *to = pack.x[0];
    } else {
#pragma unroll
        for (size_t i = 0; i < sizeof pack / sizeof(uint4); i++)
            reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(&pack)[i];
    }
}

__host__ __device__ static inline bool is_aligned(const void *address) {
    return (uintptr_t)address % PACK_BYTES == 0;
}
// Whether all of these arrays can be read and written in packs; NULL can.
template <class... T>
static inline bool all_aligned(T... arrays) {
    return (is_aligned(arrays) && ...);
}
// … and whether each row of `columns` elements can.
template <class T>
static inline bool rows_aligned(const T *first, int64_t columns) {
    return is_aligned(first) && columns * (int64_t)sizeof(T) % PACK_BYTES == 0;
}

// ---- elementwise ----

// A Body has In<N>, read<N>(first), which loads elements [first, first + N) of its inputs, and
// write<N>(first, in), which computes and stores.

template <int N, int AHEAD, class Body>
__global__ void each_element(Body body, int64_t count, bool packs) {
    const int64_t me = (int64_t)blockIdx.x * blockDim.x + threadIdx.x,
                  all = (int64_t)gridDim.x * blockDim.x;
    const int64_t whole = packs ? count / N : 0;
    for (int64_t i = me; i < whole; i += AHEAD * all) {
        typename Body::template In<N> in[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (i + k * all < whole) in[k] = body.template read<N>((i + k * all) * N);
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (i + k * all < whole) body.template write<N>((i + k * all) * N, in[k]);
    }
    for (int64_t i = whole * N + me; i < count; i += all)
        body.template write<1>(i, body.template read<1>(i));
}

// packs: whether the arrays can be processed N elements at a time.
template <int N, class Body>
static inline void for_each(int64_t count, bool packs, Body body) {
    constexpr int AHEAD = std::max(1, BYTES_AHEAD / (int)sizeof(typename Body::template In<N>));
    if (count == 0) return;
    int64_t items = packs ? ceil_div(count, N * AHEAD) + count % N : count;
    unsigned threads = threads_for(items);
    LAUNCH((each_element<N, AHEAD, Body>), blocks_of(items, threads), threads, 0, stream(), body, count,
           packs);
}

// ---- rows: a block reads a row of `count` elements, pack by pack ----

// Pack `i` of the row; past the row's end, `beyond`.
template <int N, class T>
__device__ inline Pack<T, N> load_of_row(const T *row, int64_t i, int64_t count, bool packs, T beyond) {
    if (packs && (i + 1) * N <= count) return load<N>(row + i * N);
    Pack<T, N> pack;
#pragma unroll
    for (int j = 0; j < N; j++) pack.x[j] = i * N + j < count ? row[i * N + j] : beyond;
    return pack;
}

template <int N, class T>
__device__ inline void store_of_row(T *row, int64_t i, int64_t count, bool packs, const Pack<T, N> &pack) {
    if (packs && (i + 1) * N <= count) return store<N>(row + i * N, pack);
#pragma unroll
    for (int j = 0; j < N; j++)
        if (i * N + j < count) row[i * N + j] = pack.x[j];
}

// The packs that a thread loads before it works on the first, and the threads for a row of `count` elements.
template <int N, class T>
constexpr int packs_ahead = std::max(1, BYTES_AHEAD / (int)sizeof(Pack<T, N>));
template <class T, int N = pack_of<T>>
static inline unsigned threads_for_row(int64_t count) {
    return threads_for(ceil_div(count, N * packs_ahead<N, T>));
}

// Calls f(i, pack) for each pack of the row that is this thread's, in order.
template <int N, class T, class F>
__device__ inline void each_pack(const T *row, int64_t count, bool packs, T beyond, F f) {
    constexpr int AHEAD = packs_ahead<N, T>;
    const int64_t whole = packs ? count / N : 0, step = blockDim.x;
    int64_t i = threadIdx.x;
    for (; i + (AHEAD - 1) * step < whole; i += AHEAD * step) {
        Pack<T, N> ahead[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) ahead[k] = load<N>(row + (i + k * step) * N);
#pragma unroll
        for (int k = 0; k < AHEAD; k++) f(i + k * step, ahead[k]);
    }
    for (; i * N < count; i += step) f(i, load_of_row<N>(row, i, count, packs, beyond));
}

// A row that the block reads twice. Its first `room` packs are kept in shared memory, each for the thread
// that loaded it, so no barrier is needed; the others are loaded again.
template <int N, class T>
struct HeldRow {
    const T *row;
    int64_t count;
    bool packs;
    T beyond;
    Pack<T, N> *held;
    int64_t room;

    __device__ void keep(int64_t i, const Pack<T, N> &pack) const {
        if (i < room) store<N>(held[i].x, pack);
    }
    __device__ Pack<T, N> first(int64_t i) const {
        Pack<T, N> pack = load_of_row<N>(row, i, count, packs, beyond);
        keep(i, pack);
        return pack;
    }
    __device__ Pack<T, N> again(int64_t i) const {
        return i < room ? load<N>(held[i].x) : load_of_row<N>(row, i, count, packs, beyond);
    }
};

// ---- over a block ----

struct Add {
    template <class A>
    __device__ A operator()(A a, A b) const {
        return a + b;
    }
};

template <class A>
__device__ inline A from_lane(A x, int lanes) {
    return __shfl_xor_sync(0xffffffff, x, lanes);
}

// Combines the values of all threads of the block pairwise, into a sum, for example. Every thread gets the
// same bits; the order, and so the bits, depends only on the number of threads. The first argument of
// `join` is the value of the lower threads.
template <class A, class Join>
__device__ inline A over_block(A x, Join join) {
    __shared__ A of_warp[WARP];
#pragma unroll
    for (int lanes = 1; lanes < WARP; lanes *= 2) {
        const A other = from_lane(x, lanes);
        x = threadIdx.x & lanes ? join(other, x) : join(x, other);
    }
    const unsigned warps = blockDim.x / WARP;
    if (warps == 1) return x;
    __syncthreads();  // the last call's values have all been read
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = x;
    __syncthreads();
    x = of_warp[0];
    for (unsigned i = 1; i < warps; i++) x = join(x, of_warp[i]);
    return x;
}

// Counts of what a thread has rounded to f16: numbers that were not zero, and those of them that became zero.
struct Underflows {
    unsigned all = 0, lost = 0;

    template <class T>
    __device__ T narrow(Arithmetic<T> x) {
        const T y = ::narrow<T>(x);
        if (std::is_same<T, __half>::value && x != 0) all++, lost += wide(y) == 0;
        return y;
    }
    // To be called by all threads of the block.
    template <class T>
    __device__ void tell(Mailbox *mailbox) const {
        if (!std::is_same<T, __half>::value) return;
        const unsigned block_all = over_block(all, Add()), block_lost = over_block(lost, Add());
        if (threadIdx.x > 0) return;
        atomicAdd(&mailbox->rounded, (unsigned long long)block_all);
        if (block_lost) atomicAdd(&mailbox->underflows, (unsigned long long)block_lost);
    }
};

// The maximum of some numbers, and the sum of their e^(x - max): what a softmax needs of a row, in one pass.
template <class T>
struct Exponentials {
    typedef Arithmetic<T> A;
    A max, sum;

    __device__ static Exponentials none() { return {-INFINITY, 0}; }
    // What to subtract instead of the maximum: if everything so far was -infinity, that would give NaN.
    __device__ static A shift(A max) { return max == -INFINITY ? 0 : max; }

    template <int N>
    __device__ void add(const A (&x)[N]) {
        A larger = max;
        for (int j = 0; j < N; j++)
            larger = larger < x[j] ? x[j] : larger;  // skips NaN; the sum does not
        const A by = shift(larger);
        if (max < larger) sum *= exp_for<T>(max - by);
        max = larger;
        for (int j = 0; j < N; j++) sum += exp_for<T>(x[j] - by);
    }
};

struct JoinExponentials {
    template <class T>
    __device__ Exponentials<T> operator()(Exponentials<T> a, Exponentials<T> b) const {
        const Arithmetic<T> max = a.max < b.max ? b.max : a.max, by = Exponentials<T>::shift(max);
        return {max, a.sum * exp_for<T>(a.max - by) + b.sum * exp_for<T>(b.max - by)};
    }
};

template <class T>
__device__ inline Exponentials<T> from_lane(Exponentials<T> x, int lanes) {
    return {from_lane(x.max, lanes), from_lane(x.sum, lanes)};
}

// ---- indices in device memory: a kernel that reads a wrong one must not use it ----

struct IndexCheck {
    IndexFault *fault;
    int64_t bound;
    const char *sentence;

    __device__ bool holds(int value) const { return value >= 0 && value < bound; }
    // Element `index` of the array is out of range: reports it to the host if it is the first.
    __device__ void tell(int value, int64_t index) const {
        if (atomicCAS(&fault->taken, 0, 1) != 0) return;
        fault->value = value;
        fault->index = index;
        fault->bound = bound;
        fault->sentence = sentence;
    }
};

// For a launch: an index outside [0, bound) is fatal with `sentence` (device_cuda.h: IndexFault).
static inline IndexCheck check_index(int64_t bound, const char *sentence) {
    device_expect_fault();
    return {&device_mailbox()->fault, bound, sentence};
}

#endif
