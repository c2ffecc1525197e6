// What CUDA on the CPU provides to kernels, each feature against its definition: launches, shared memory,
// barriers, warps and atomics. Types and the runtime API are in test_cuda_on_cpu_api.cc; what it finds is in
// test_cuda_on_cpu_finds.cc, what it counts in test_cuda_on_cpu_counts.cc.
#include "on_device.h"

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

// As the guide defines it: segments of `width` lanes; beyond the segment's ends a lane keeps its own value,
// except with ANY, which wraps around, and XOR, which may read from earlier segments.
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

// Lanes with different masks wait at different shuffles at the same time; the last warp has 5 lanes.
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
    // the maximum of doubles, which kernels must build because hardware lacks it
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

// A reduction in one launch: the block that increments the counter last adds the others' results.
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
    };
    return cmocka_run_group_tests_name("cuda_on_cpu", tests, NULL, NULL);
}
