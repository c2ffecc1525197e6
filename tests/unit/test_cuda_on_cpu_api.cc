// What CUDA on the CPU provides to kernels and to the host: types and functions, and the runtime API.
#include "on_device.h"
// behind it
#include "07_kernels/launch.h"
#include "fatal.h"

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
    // eight 16-bit numbers in one access
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

// These must equal the project's conversions, which test_dtype proves.
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
    // a little above the midpoint of two codes: rounded to f32 first, it would become the midpoint, and
    // then go to even
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
    assert_float_equal(max(1.5f, NAN), 1.5, 0);  // like fmaxf, ignores NaN
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
    CUDA_CHECK(cudaStreamSynchronize(0));
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
    assert_int_equal(cudaGetLastError(), cudaErrorMemoryAllocation);
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    assert_string_equal(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
    CUDA_CHECK(cudaMalloc(&memory, 1 << 20));
    CUDA_CHECK(cudaMemGetInfo(&less, &total));
    assert_int_equal(less, available - (1 << 20));
    CUDA_CHECK(cudaFree(memory));
}

__global__ void count_up(int *y) { y[threadIdx.x] = (int)threadIdx.x; }

static void streams_and_events(void **state) {
    (void)state;
    cudaStream_t stream;
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreateWithFlags(&end, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventRecord(begin, stream));
    int *memory = fresh<int>(64);
    LAUNCH(count_up, 1, 64, 0, stream, memory);
    CUDA_CHECK(cudaEventRecord(end, stream));
    CUDA_CHECK(cudaStreamWaitEvent(stream, end));
    CUDA_CHECK(cudaEventSynchronize(end));
    assert_int_equal(cudaEventQuery(end), cudaSuccess);
    float milliseconds = -1;
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    assert_true(milliseconds >= 0);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    CUDA_CHECK(cudaStreamDestroy(stream));
    assert_int_equal(to_host(memory, 64)[63], 63);
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

__global__ void nothing() {}

static void allocate(void *) {
    float *memory;
    CUDA_CHECK(cudaMalloc(&memory, sizeof *memory));
}
static void ask_for_devices(void *) {
    int count;
    CUDA_CHECK(cudaGetDeviceCount(&count));
}
static void launch(void *) { LAUNCH(nothing, 1, 1, 0, 0); }

static void a_fork_loses_the_device(void **state) {
    (void)state;
    CUDA_CHECK(cudaFree(fresh<float>(1)));  // now this process has used CUDA
    expect_fatal(ask_for_devices, NULL, "initialization error");
    expect_fatal(allocate, NULL, "initialization error");
    expect_fatal(launch, NULL, "the kernel nothing could not start");
}

// As on an L4, which runs the code for an A100 and has 99 KiB for a block.
extern size_t cuda_on_cpu_shared_most;
static void ask_an_l4(void *) {
    cuda_on_cpu_shared_most = 99 << 10;
    allow_shared(nothing, 99 << 10);
    allow_shared(nothing, 144 << 10);
}

static void chapter_07_says_what_a_block_lacks(void **state) {
    (void)state;
    expect_fatal(ask_an_l4, NULL, "a block needs 147 kB of shared memory, which this GPU does not give it");
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
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
        cmocka_unit_test(chapter_07_says_what_a_block_lacks),
        cmocka_unit_test(a_fork_loses_the_device),
    };
    return cmocka_run_group_tests_name("cuda_on_cpu_api", tests, NULL, NULL);
}
