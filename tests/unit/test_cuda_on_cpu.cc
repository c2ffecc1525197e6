// What CUDA on the CPU gives to kernels, each facility against its definition; what it finds is in
// test_cuda_on_cpu_finds.cc, what it counts in test_cuda_on_cpu_counts.cc.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <algorithm>
#include <vector>

#include "cuda/gpu.h"
// needs those above, and to be told that it is C
extern "C" {
#include <cmocka.h>
}

// Device memory with the content of a vector, and back.
template <class T>
static T *to_device(const std::vector<T> &host) {
    T *memory;
    CUDA_CHECK(cudaMalloc(&memory, host.size() * sizeof(T)));
    CUDA_CHECK(cudaMemcpy(memory, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return memory;
}

template <class T>
static std::vector<T> to_host(T *memory, size_t count) {
    std::vector<T> host(count);
    CUDA_CHECK(cudaMemcpy(host.data(), memory, count * sizeof(T), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaFree(memory));
    return host;
}

template <class T>
static T *fresh(size_t count) {
    T *memory;
    CUDA_CHECK(cudaMalloc(&memory, count * sizeof(T)));
    return memory;
}

// ---- launches ----

struct Seen {
    uint3 thread, block, block_dim, grid_dim;
};

__global__ void tell_place(Seen *seen) {
    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    seen[block * blockDim.x * blockDim.y * blockDim.z + thread] = {threadIdx, blockIdx, blockDim, gridDim};
}

static void grids_and_blocks_of_three_dimensions(void **state) {
    (void)state;
    static const dim3 shapes[][2] = {{1, 1},
                                     {7, 1},
                                     {dim3(2, 3), 33},
                                     {1, dim3(5, 7)},
                                     {1, dim3(3, 5, 7)},
                                     {dim3(2, 3, 5), dim3(4, 3, 2)},
                                     {2, 1024},
                                     {1, dim3(2, 2, 64)}};
    for (auto &shape : shapes) {
        dim3 g = shape[0], b = shape[1];
        size_t threads = b.x * b.y * b.z, count = threads * g.x * g.y * g.z;
        Seen *memory = fresh<Seen>(count);
        LAUNCH(tell_place, g, b, 0, 0, memory);
        std::vector<Seen> seen = to_host(memory, count);
        for (size_t i = 0; i < count; i++) {
            size_t thread = i % threads, block = i / threads;
            assert_int_equal(seen[i].thread.x, thread % b.x);
            assert_int_equal(seen[i].thread.y, thread / b.x % b.y);
            assert_int_equal(seen[i].thread.z, thread / b.x / b.y);
            assert_int_equal(seen[i].block.x, block % g.x);
            assert_int_equal(seen[i].block.y, block / g.x % g.y);
            assert_int_equal(seen[i].block.z, block / g.x / g.y);
            assert_int_equal(seen[i].block_dim.y, b.y);
            assert_int_equal(seen[i].grid_dim.z, g.z);
        }
    }
}

struct Sizes {
    int64_t n[9];  // more than 16 bytes
};

template <class T>
__global__ void take_arguments(T *out, int64_t big, double real, Sizes sizes, const T *none) {
    out[0] = (T)(big + real + sizes.n[8]);
    out[1] = none == nullptr;
}

static void arguments_convert_as_in_a_call(void **state) {
    (void)state;
    float *out = fresh<float>(2);
    Sizes sizes = {{0, 0, 0, 0, 0, 0, 0, 0, 30}};
    LAUNCH(take_arguments<float>, 1, 1, 0, 0, out, 5, 0.5f, sizes, nullptr);
    std::vector<float> host = to_host(out, 2);
    assert_float_equal(host[0], 35.5, 0);
    assert_float_equal(host[1], 1, 0);
}

// ---- shared memory and barriers ----

// Each thread takes the place of its mirror image, twice, in arrays of one to three dimensions.
template <class T, int N>
__global__ void mirror(T *y, const T *x) {
    __shared__ T line[N * N];
    __shared__ T tile[N][N + 1];
    __shared__ T cube[2][N][N];
    int i = threadIdx.y, j = threadIdx.x;
    line[i * N + j] = x[i * N + j];
    __syncthreads();
    tile[i][j] = line[(N - 1 - i) * N + j];
    cube[1][i][j] = line[i * N + N - 1 - j];
    __syncthreads();
    y[i * N + j] = tile[i][N - 1 - j];
    y[N * N + i * N + j] = cube[1][N - 1 - i][j];
}

template <class T, int N>
static void check_mirror() {
    std::vector<T> x(N * N);
    for (int i = 0; i < N * N; i++) x[i] = (T)(i % 100);
    T *in = to_device(x), *out = fresh<T>(2 * N * N);
    LAUNCH((mirror<T, N>), 1, dim3(N, N), 0, 0, out, in);
    std::vector<T> y = to_host(out, 2 * N * N);
    for (int i = 0; i < N * N; i++) {
        assert_true(y[i] == x[N * N - 1 - i]);
        assert_true(y[N * N + i] == x[N * N - 1 - i]);
    }
    CUDA_CHECK(cudaFree(in));
}

static void shared_arrays_of_template_kernels(void **state) {
    (void)state;
    check_mirror<float, 1>();
    check_mirror<float, 7>();
    check_mirror<double, 7>();
    check_mirror<float, 32>();
    check_mirror<__nv_bfloat16, 31>();
    check_mirror<uint8_t, 13>();
}

template <class T>
__global__ void reverse_in_dynamic(T *y, const T *x) {
    DYNAMIC_SHARED(T, buffer);
    buffer[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    y[blockIdx.x * blockDim.x + threadIdx.x] = buffer[blockDim.x - 1 - threadIdx.x];
}

template <class T>
static void check_dynamic(unsigned blocks, unsigned threads) {
    std::vector<T> x(blocks * threads);
    for (size_t i = 0; i < x.size(); i++) x[i] = (T)(float)(i % 61);
    T *in = to_device(x), *out = fresh<T>(x.size());
    LAUNCH(reverse_in_dynamic<T>, blocks, threads, threads * sizeof(T), 0, out, in);
    std::vector<T> y = to_host(out, x.size());
    for (size_t i = 0; i < x.size(); i++)
        assert_true((float)y[i] == (float)x[i / threads * threads + threads - 1 - i % threads]);
    CUDA_CHECK(cudaFree(in));
}

static void dynamic_shared_memory_serves_every_type(void **state) {
    (void)state;
    check_dynamic<float>(3, 100);
    check_dynamic<double>(2, 1024);
    check_dynamic<__nv_bfloat16>(5, 33);
    check_dynamic<__nv_fp8_e4m3>(1, 7);
}

__global__ void vote_in_block(int *counts) {
    int mine = threadIdx.x % 3 == 0, all = 1;
    int count = __syncthreads_count(mine), any = __syncthreads_or(threadIdx.x == 40),
        none = __syncthreads_or(0);
    int every = __syncthreads_and(all), not_every = __syncthreads_and(threadIdx.x != 40);
    counts[threadIdx.x] = count * 10000 + any * 1000 + none * 100 + every * 10 + not_every;
}

static void barriers_count_predicates(void **state) {
    (void)state;
    int *memory = fresh<int>(100);
    LAUNCH(vote_in_block, 1, 100, 0, 0, memory);
    for (int value : to_host(memory, 100)) assert_int_equal(value, 34 * 10000 + 1000 + 10);
}

// Prefix sum by doubling: every barrier matters, and so does every thread's own turn.
__global__ void prefix_sum(int *y) {
    __shared__ int sum[2][1024];
    int from = 0;
    sum[0][threadIdx.x] = (int)threadIdx.x + 1;
    for (unsigned step = 1; step < blockDim.x; step *= 2) {
        __syncthreads();
        int left = threadIdx.x >= step ? sum[from][threadIdx.x - step] : 0;
        sum[1 - from][threadIdx.x] = sum[from][threadIdx.x] + left;
        from = 1 - from;
    }
    y[threadIdx.x] = sum[from][threadIdx.x];
}

static void barriers_hold_in_every_order(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < 5; seed++)
        for (int n : {1, 31, 64, 333, 1024}) {
            cuda_on_cpu_order(seed);
            int *memory = fresh<int>(n);
            LAUNCH(prefix_sum, 1, n, 0, 0, memory);
            std::vector<int> y = to_host(memory, n);
            for (int i = 0; i < n; i++) assert_int_equal(y[i], (i + 1) * (i + 2) / 2);
        }
    cuda_on_cpu_order(0);
}

__global__ void who_comes(int *turn, int *order) {
    order[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(turn, 1);
}

// The turns of 3 blocks of 70 threads, in the order that a seed gives.
static std::vector<int> turns_of(uint64_t seed) {
    cuda_on_cpu_order(seed);
    int *turn = to_device(std::vector<int>{0}), *order = fresh<int>(210);
    LAUNCH(who_comes, 3, 70, 0, 0, turn, order);
    cuda_on_cpu_order(0);
    CUDA_CHECK(cudaFree(turn));
    return to_host(order, 210);
}

static void a_seed_gives_its_order_of_blocks_and_threads(void **state) {
    (void)state;
    std::vector<int> natural = turns_of(0), other = turns_of(1);
    for (int i = 0; i < 210; i++) assert_int_equal(natural[i], i);
    assert_true(other != natural);
    assert_true(other == turns_of(1));
    assert_true(other != turns_of(2));
    std::sort(other.begin(), other.end());
    assert_true(other == natural);  // each thread once
}

// ---- warps ----

enum Shuffle { ANY, UP, DOWN, XOR };

template <class T>
__global__ void shuffle(T *y, Shuffle kind, int argument, int width) {
    T mine = (T)(float)(threadIdx.x + 1), got = mine;
    if (kind == ANY) got = __shfl_sync(0xffffffff, mine, argument, width);
    if (kind == UP) got = __shfl_up_sync(0xffffffff, mine, argument, width);
    if (kind == DOWN) got = __shfl_down_sync(0xffffffff, mine, argument, width);
    if (kind == XOR) got = __shfl_xor_sync(0xffffffff, mine, argument, width);
    y[threadIdx.x] = got;
}

// The guide's words: segments of `width` lanes; past the segment's ends a lane keeps its own value, but for
// ANY, which goes around, and XOR, which may look into earlier segments.
static int lane_that_gives(Shuffle kind, int lane, int argument, int width) {
    int begin = lane / width * width, end = begin + width;
    if (kind == ANY) return begin + (argument % width + width) % width;
    int from = kind == UP ? lane - argument : kind == DOWN ? lane + argument : lane ^ argument;
    if (from >= end || (kind == UP && from < begin)) return lane;
    return from;
}

template <class T>
static void check_shuffles() {
    for (Shuffle kind : {ANY, UP, DOWN, XOR})
        for (int width = 1; width <= 32; width *= 2)
            for (int argument : {0, 1, 2, 3, 7, 16, 31}) {
                T *memory = fresh<T>(64);
                LAUNCH(shuffle<T>, 1, 64, 0, 0, memory, kind, argument, width);
                std::vector<T> y = to_host(memory, 64);
                for (int i = 0; i < 64; i++) {
                    int from = i / 32 * 32 + lane_that_gives(kind, i % 32, argument, width);
                    if ((float)y[i] != (float)(from + 1))
                        fail_msg("shuffle %d by %d in %d: thread %d got %g, not that of thread %d", kind,
                                 argument, width, i, (double)(float)y[i], from);
                }
            }
}

static void shuffles_of_every_kind_width_and_type(void **state) {
    (void)state;
    check_shuffles<int>();
    check_shuffles<unsigned>();
    check_shuffles<long long>();
    check_shuffles<int64_t>();
    check_shuffles<float>();
    check_shuffles<double>();
    check_shuffles<__half>();
    check_shuffles<__nv_bfloat16>();
}

// Lanes of different masks stand at different shuffles at one time; the last warp has 5 lanes.
__global__ void votes(unsigned *y) {
    int lane = threadIdx.x % 32;
    unsigned all = __ballot_sync(0xffffffff, lane % 3 == 0);
    unsigned part = 0;
    if (lane % 2 == 0) part = __ballot_sync(0x55555555, lane < 3) | __shfl_sync(0x55555555, lane, 4) << 8;
    else part = __ballot_sync(0xaaaaaaaa, lane >= 3) << 16;
    y[threadIdx.x * 4] = all;
    y[threadIdx.x * 4 + 1] = part;
    y[threadIdx.x * 4 + 2] =
        (unsigned)__any_sync(0xffffffff, lane == 4) | __all_sync(0xffffffff, lane < 32) << 1 |
        __any_sync(0xffffffff, lane == 32) << 2 | __all_sync(0xffffffff, lane != 4) << 3;
    y[threadIdx.x * 4 + 3] = __activemask();
}

static void votes_of_whole_and_parted_warps(void **state) {
    (void)state;
    unsigned *memory = fresh<unsigned>(37 * 4);
    LAUNCH(votes, 1, 37, 0, 0, memory);
    std::vector<unsigned> y = to_host(memory, 37 * 4);
    for (unsigned i = 0; i < 37; i++) {
        unsigned exist = i < 32 ? 0xffffffff : 0x1f;
        assert_int_equal(y[i * 4], 0x49249249 & exist);
        assert_int_equal(y[i * 4 + 1], i % 2 == 0 ? 5 | 4 << 8 : (0xaaaaaaa8 & exist) << 16);
        assert_int_equal(y[i * 4 + 2], 3);
        assert_true((y[i * 4 + 3] & ~exist) == 0 && y[i * 4 + 3] >> i % 32 & 1);
    }
}

// ---- atomics ----

template <class T>
__global__ void add_all(T *sum, T *old) {
    old[threadIdx.x] = atomicAdd(sum, (T)(threadIdx.x + 1));
}

template <class T>
static void check_add() {
    T *sum = to_device(std::vector<T>{5}), *old = fresh<T>(100);
    LAUNCH(add_all<T>, 1, 100, 0, 0, sum, old);
    assert_true(to_host(sum, 1)[0] == 5 + 5050);
    std::vector<T> before = to_host(old, 100);
    for (int i = 0; i < 100; i++) assert_true(before[i] == (T)(5 + i * (i + 1) / 2));
}

__global__ void all_atomics(int *i, unsigned *u, unsigned long long *l, double *maximum) {
    __shared__ int shared;
    int t = (int)threadIdx.x;
    if (t == 0) shared = 0;
    __syncthreads();
    atomicAdd(&shared, t);
    atomicMax(&i[0], t), atomicMin(&i[1], -t), atomicSub(&i[2], 1), atomicExch(&i[3], 7);
    atomicOr(&u[0], 1u << t % 32), atomicAnd(&u[1], ~(1u << t % 32)), atomicXor(&u[2], 1u << t % 7);
    atomicInc(&u[3], 9), atomicMax(&l[0], (unsigned long long)t << 40);
    // the maximum of doubles, as kernels build what the hardware lacks
    unsigned long long *bits = reinterpret_cast<unsigned long long *>(maximum),
                       seen = atomicCAS(bits, 0, 0);
    while (__longlong_as_double((long long)seen) < t * 0.5) {
        unsigned long long found = atomicCAS(bits, seen, (unsigned long long)__double_as_longlong(t * 0.5));
        if (found == seen) break;
        seen = found;
    }
    __syncthreads();
    if (t == 0) i[4] = shared;
}

static void atomics_of_every_kind(void **state) {
    (void)state;
    check_add<int>();
    check_add<unsigned>();
    check_add<unsigned long long>();
    check_add<float>();
    check_add<double>();
    int *i = to_device(std::vector<int>(5, 0));
    unsigned *u = to_device(std::vector<unsigned>{0, 0xffffffff, 0, 0});
    unsigned long long *l = to_device(std::vector<unsigned long long>{0});
    double *maximum = to_device(std::vector<double>{0});
    LAUNCH(all_atomics, 1, 100, 0, 0, i, u, l, maximum);
    assert_true(to_host(i, 5) == (std::vector<int>{99, -99, -100, 7, 4950}));
    assert_true(to_host(u, 4) == (std::vector<unsigned>{0xffffffff, 0, 0x03, 0}));
    assert_true(to_host(l, 1)[0] == 99ull << 40);
    assert_true(to_host(maximum, 1)[0] == 49.5);
}

// A reduction in one launch: the block that is last to raise the counter adds what the others left.
__global__ void sum_of_blocks(float *out, float *parts, unsigned *counter, const float *x) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = x[blockIdx.x];
        __threadfence();
        last = atomicAdd(counter, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float sum = 0;
        for (unsigned b = 0; b < gridDim.x; b++) sum += parts[b];
        *out = sum;
    }
}

static void the_last_block_may_read_what_fences_told(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < 4; seed++) {
        cuda_on_cpu_order(seed);
        float *x = to_device(std::vector<float>{1, 2, 3, 4, 5, 6, 7}), *parts = fresh<float>(7),
              *out = fresh<float>(1);
        unsigned *counter = to_device(std::vector<unsigned>{0});
        LAUNCH(sum_of_blocks, 7, 32, 0, 0, out, parts, counter, x);
        assert_float_equal(to_host(out, 1)[0], 28, 0);
        for (void *memory : {(void *)x, (void *)parts, (void *)counter}) CUDA_CHECK(cudaFree(memory));
    }
    cuda_on_cpu_order(0);
}

// ---- types ----

// Sizes and alignments are part of what kernels rely on when they cast pointers.
static_assert(sizeof(float2) == 8 && alignof(float2) == 8, "");
static_assert(sizeof(float3) == 12 && alignof(float3) == 4, "");
static_assert(sizeof(float4) == 16 && alignof(float4) == 16, "");
static_assert(sizeof(double2) == 16 && alignof(double2) == 16, "");
static_assert(sizeof(uint4) == 16 && alignof(uint4) == 16, "");
static_assert(sizeof(uchar4) == 4 && alignof(uchar4) == 4, "");
static_assert(sizeof(__nv_bfloat162) == 4 && alignof(__nv_bfloat162) == 4, "");
static_assert(sizeof(__half2) == 4 && alignof(__half2) == 4, "");
static_assert(sizeof(__nv_fp8_e4m3) == 1, "");

__global__ void vectors(float4 *f, uint4 *raw, __nv_bfloat162 *pairs, float2 *sums) {
    float4 v = f[threadIdx.x];
    f[threadIdx.x] = make_float4(v.w, v.z, v.y, v.x);
    // eight numbers of 16 bits in one access
    uint4 bits = raw[threadIdx.x];
    const __nv_bfloat16 *eight = reinterpret_cast<const __nv_bfloat16 *>(&bits);
    float sum = 0;
    for (int i = 0; i < 8; i++) sum += __bfloat162float(eight[i]);
    float2 pair = __bfloat1622float2(pairs[threadIdx.x]);
    pairs[threadIdx.x] = __floats2bfloat162_rn(pair.y, pair.x);
    sums[threadIdx.x] = make_float2(sum, pair.x + pair.y);
}

static void vector_types(void **state) {
    (void)state;
    float4 *f = to_device(std::vector<float4>{make_float4(1, 2, 3, 4), make_float4(5, 6, 7, 8)});
    std::vector<__nv_bfloat16> numbers;
    for (int i = 0; i < 16; i++) numbers.push_back(__float2bfloat16((float)i));
    __nv_bfloat16 *raw = to_device(numbers), *pairs = to_device(numbers);
    float2 *sums = fresh<float2>(2);
    LAUNCH(vectors, 1, 2, 0, 0, f, reinterpret_cast<uint4 *>(raw),
           reinterpret_cast<__nv_bfloat162 *>(pairs), sums);
    std::vector<float4> turned = to_host(f, 2);
    std::vector<float2> added = to_host(sums, 2);
    std::vector<__nv_bfloat16> swapped = to_host(pairs, 4);
    for (int t = 0; t < 2; t++) {
        assert_true(turned[t].x == 4 + 4 * t && turned[t].w == 1 + 4 * t);
        assert_float_equal(added[t].x, t == 0 ? 28 : 92, 0);
        assert_float_equal(added[t].y, 1 + 4 * t, 0);
        assert_true((float)swapped[2 * t] == 2 * t + 1 && (float)swapped[2 * t + 1] == 2 * t);
    }
    CUDA_CHECK(cudaFree(raw));
}

// test_dtype proves the project's conversions; these are the same.
static void narrow_formats_are_those_of_the_project(void **state) {
    (void)state;
    for (unsigned code = 0; code < 65536; code++) {
        assert_int_equal(__float_as_uint(__ushort_as_bfloat16((uint16_t)code)),
                         __float_as_uint(f32_from_bf16((uint16_t)code)));
        assert_int_equal(__float_as_uint(__ushort_as_half((uint16_t)code)),
                         __float_as_uint(f32_from_f16((uint16_t)code)));
        float x = __uint_as_float(code << 16 | 0x4321);
        assert_int_equal(__bfloat16_as_ushort(__float2bfloat16(x)), bf16_from_f32(x));
        assert_int_equal(__half_as_ushort(__float2half(x)), f16_from_f32(x));
        assert_int_equal(__nv_fp8_e4m3(x).__x, e4m3_from_f32(x));
        assert_int_equal(__nv_fp8_e5m2(x).__x, e5m2_from_f32(x));
        assert_int_equal(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3), e4m3_from_f32(x));
    }
    for (unsigned code = 0; code < 256; code++) {
        __nv_fp8_e4m3 a;
        __nv_fp8_e5m2 b;
        a.__x = b.__x = (uint8_t)code;
        assert_int_equal(__float_as_uint((float)a), __float_as_uint(f32_from_e4m3((uint8_t)code)));
        assert_int_equal(__float_as_uint((float)b), __float_as_uint(f32_from_e5m2((uint8_t)code)));
    }
}

static void doubles_are_rounded_once(void **state) {
    (void)state;
    // a little above the middle of two codes: by way of a nearest f32 it would become the middle, and then
    // even
    double up = 1 + 0x1p-8 + 0x1p-40, down = 1 + 3 * 0x1p-8 - 0x1p-40;
    assert_float_equal((float)__double2bfloat16(up), 1 + 0x1p-7, 0);
    assert_float_equal((float)__double2bfloat16(down), 1 + 0x1p-7, 0);
    assert_float_equal((float)__double2bfloat16(-up), -1 - 0x1p-7, 0);
    assert_float_equal((float)__double2half(1 + 0x1p-11 + 0x1p-40), 1 + 0x1p-10, 0);
    assert_float_equal((float)__nv_fp8_e4m3(1 + 0x1p-4 + 0x1p-40), 1 + 0x1p-3, 0);
    assert_true(isinf((float)__double2half(1e300)) && isnan((float)__double2half(NAN)));
    assert_float_equal((float)__double2bfloat16(0x1p-140), 0, 0);
}

static void functions_of_bits_and_numbers(void **state) {
    (void)state;
    assert_int_equal(__popc(0xf0f0f0f0u), 16);
    assert_int_equal(__clz(1), 31);
    assert_int_equal(__clz(0), 32);
    assert_int_equal(__ffs(0x10), 5);
    assert_int_equal(__ffs(0), 0);
    assert_int_equal(__clzll(1), 63);
    assert_int_equal(__umulhi(0x80000000u, 6), 3);
    assert_float_equal(rsqrtf(4), 0.5, 0);
    assert_float_equal(rsqrt(16.0), 0.25, 0);
    assert_float_equal(__expf(0), 1, 0);
    assert_float_equal(__fdividef(1, 4), 0.25, 0);
    assert_float_equal(__saturatef(NAN), 0, 0);
    assert_float_equal(max(1.5f, NAN), 1.5, 0);  // as fmaxf: a NaN loses
    assert_int_equal(min(-1, 2), -1);
    assert_true(max(1ll << 40, 2ll) == 1ll << 40);
    float s, c;
    sincosf(0, &s, &c);
    assert_true(s == 0 && c == 1);
    assert_int_equal(__float_as_uint(__int_as_float(0x7f800000)), 0x7f800000);
}

__constant__ float table[4];
__global__ void read_constants(float *y) {
    static const int digits[] = {3, 1, 4, 1, 5};
    y[threadIdx.x] = table[threadIdx.x] + digits[threadIdx.x];
}

static void constants_can_be_read(void **state) {
    (void)state;
    static const float values[] = {10, 20, 30, 40};
    CUDA_CHECK(cudaMemcpyToSymbol(table, values, sizeof values));
    float *memory = fresh<float>(4);
    LAUNCH(read_constants, 1, 4, 0, 0, memory);
    assert_true(to_host(memory, 4) == (std::vector<float>{13, 21, 34, 41}));
}

// ---- the runtime API ----

static void memory_is_poisoned_and_aligned(void **state) {
    (void)state;
    for (size_t bytes : {1, 4, 1000, 70000}) {
        uint8_t *memory = fresh<uint8_t>(bytes);
        assert_int_equal((uintptr_t)memory % 256, 0);
        for (uint8_t byte : to_host(memory, bytes)) assert_int_equal(byte, 0xff);
    }
    float *number = fresh<float>(1);
    assert_true(isnan(to_host(number, 1)[0]));
    void *nothing = &number;
    CUDA_CHECK(cudaMalloc(&nothing, 0));
    assert_null(nothing);
    CUDA_CHECK(cudaFree(NULL));
}

static void copies_and_fills(void **state) {
    (void)state;
    std::vector<int> x = {1, 2, 3, 4, 5, 6};
    int *a = to_device(x), *b = fresh<int>(6);
    CUDA_CHECK(cudaMemcpyAsync(b, a, 24, cudaMemcpyDeviceToDevice, 0));
    CUDA_CHECK(cudaMemsetAsync(b + 1, 0, 8, 0));
    CUDA_CHECK(cudaMemcpy(b + 5, a, 4, cudaMemcpyDefault));
    assert_true(to_host(b, 6) == (std::vector<int>{1, 0, 0, 4, 5, 1}));
    int *pinned;
    CUDA_CHECK(cudaMallocHost(&pinned, 16));
    // rows of 2 of a matrix with 3 columns
    CUDA_CHECK(cudaMemcpy2DAsync(pinned, 8, a + 1, 12, 8, 2, cudaMemcpyDeviceToHost));
    assert_true(pinned[0] == 2 && pinned[1] == 3 && pinned[2] == 5 && pinned[3] == 6);
    CUDA_CHECK(cudaFreeHost(pinned));
    CUDA_CHECK(cudaFreeAsync(a, 0));
}

static void out_of_memory_is_an_error_that_can_be_asked(void **state) {
    (void)state;
    size_t available, total, less;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    void *memory;
    assert_int_equal(cudaMalloc(&memory, total + 1), cudaErrorMemoryAllocation);
    assert_null(memory);
    assert_int_equal(cudaPeekAtLastError(), cudaErrorMemoryAllocation);
    assert_int_equal(cudaGetLastError(), cudaErrorMemoryAllocation);
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    assert_string_equal(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
    CUDA_CHECK(cudaMalloc(&memory, 1 << 20));
    CUDA_CHECK(cudaMemGetInfo(&less, &total));
    assert_int_equal(less, available - (1 << 20));
    CUDA_CHECK(cudaFree(memory));
}

static void streams_and_events(void **state) {
    (void)state;
    cudaStream_t stream;
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreateWithFlags(&end, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventRecord(begin, stream));
    int *memory = fresh<int>(64);
    LAUNCH(prefix_sum, 1, 64, 0, stream, memory);
    CUDA_CHECK(cudaEventRecord(end, stream));
    CUDA_CHECK(cudaStreamWaitEvent(stream, end));
    assert_int_equal(cudaEventQuery(end), cudaSuccess);
    CUDA_CHECK(cudaEventSynchronize(end));
    float milliseconds = -1;
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    assert_true(milliseconds >= 0);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    CUDA_CHECK(cudaStreamDestroy(stream));
    assert_int_equal(to_host(memory, 64)[63], 64 * 65 / 2);
}

static void one_device_with_properties(void **state) {
    (void)state;
    int count, version, device, threads;
    CUDA_CHECK(cudaGetDeviceCount(&count));
    assert_int_equal(count, 1);
    assert_int_equal(cudaSetDevice(1), cudaErrorInvalidDevice);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidDevice);
    CUDA_CHECK(cudaSetDevice(0));
    CUDA_CHECK(cudaGetDevice(&device));
    assert_int_equal(device, 0);
    cudaDeviceProp p;
    CUDA_CHECK(cudaGetDeviceProperties(&p, 0));
    assert_string_equal(p.name, "CUDA on the CPU");
    assert_true(p.warpSize == 32 && p.multiProcessorCount > 0 && p.totalGlobalMem > 0);
    CUDA_CHECK(cudaDeviceGetAttribute(&threads, cudaDevAttrMaxThreadsPerBlock, 0));
    assert_int_equal(threads, p.maxThreadsPerBlock);
    CUDA_CHECK(cudaDriverGetVersion(&version));
    assert_true(version >= 12000);
    CUDA_CHECK(cudaDeviceSynchronize());
    cudaMemPool_t pool;
    uint64_t threshold = UINT64_MAX, back = 0;
    CUDA_CHECK(cudaDeviceGetDefaultMemPool(&pool, 0));
    CUDA_CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
    CUDA_CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &back));
    assert_true(back == threshold);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(grids_and_blocks_of_three_dimensions),
        cmocka_unit_test(arguments_convert_as_in_a_call),
        cmocka_unit_test(shared_arrays_of_template_kernels),
        cmocka_unit_test(dynamic_shared_memory_serves_every_type),
        cmocka_unit_test(barriers_count_predicates),
        cmocka_unit_test(barriers_hold_in_every_order),
        cmocka_unit_test(a_seed_gives_its_order_of_blocks_and_threads),
        cmocka_unit_test(shuffles_of_every_kind_width_and_type),
        cmocka_unit_test(votes_of_whole_and_parted_warps),
        cmocka_unit_test(atomics_of_every_kind),
        cmocka_unit_test(the_last_block_may_read_what_fences_told),
        cmocka_unit_test(vector_types),
        cmocka_unit_test(narrow_formats_are_those_of_the_project),
        cmocka_unit_test(doubles_are_rounded_once),
        cmocka_unit_test(functions_of_bits_and_numbers),
        cmocka_unit_test(constants_can_be_read),
        cmocka_unit_test(memory_is_poisoned_and_aligned),
        cmocka_unit_test(copies_and_fills),
        cmocka_unit_test(out_of_memory_is_an_error_that_can_be_asked),
        cmocka_unit_test(streams_and_events),
        cmocka_unit_test(one_device_with_properties),
    };
    return cmocka_run_group_tests_name("cuda_on_cpu", tests, NULL, NULL);
}
