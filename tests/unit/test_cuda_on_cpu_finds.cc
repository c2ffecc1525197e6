// What CUDA on the CPU finds: each error is planted in a kernel, and must end the program with a sentence
// that names it; a correct variant must run to its end. This file is about memory, launches and host code;
// test_cuda_on_cpu_blocks.cc is about the threads of a block. A kernel is on a single line if a test asks
// for its line.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#include <utility>

#include "cuda/instructions_hopper.h"
// needs those above, and to be told that it is C
extern "C" {
#include <cmocka.h>
}
#include "found.h"

// ---- global memory ----

template <class T>
__global__ void store(T *y, int first) {
    y[first + (int)threadIdx.x] = T();
}
template <class T>
__global__ void load(T *sink, const T *x, int first) {
    sink[0] = x[first];
}
__global__ void store_if_below(float *y, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) y[i] = 1;
}
enum { STORE_LINE = __LINE__ - 2 };

static void global_accesses_out_of_bounds(void **state) {
    (void)state;
    SOUND(LAUNCH(store_if_below, 4, 32, 0, 0, floats(100), 100));
    FOUND(LAUNCH(store_if_below, 4, 32, 0, 0, floats(100), 101),
          "kernel store_if_below, block 3, thread 4, ", AT(STORE_LINE),
          ": writes 4 bytes at byte 400 of 400 bytes of device memory");
    SOUND(LAUNCH(store<float>, 1, 32, 0, 0, floats(32), 0));
    FOUND(LAUNCH(store<float>, 1, 32, 0, 0, floats(32), -1), "kernel store<float>, block 0, thread 0, ",
          "writes 4 bytes, 4 before the start of 128 bytes of device memory");
    FOUND(LAUNCH(store<double>, dim3(1, 2), dim3(3, 2), 0, 0, (double *)floats(7), 1),
          "kernel store<double>", "block (0, 0), thread (2, 0)", "writes 8 bytes at byte 24 of 28 bytes");
    FOUND(LAUNCH(load<float>, 1, 1, 0, 0, floats(1), floats(8), 8), "reads 4 bytes at byte 32 of 32 bytes");
    FOUND(LAUNCH(load<float>, 1, 1, 0, 0, floats(1), floats(8), 1 << 30), "reads 4 bytes at");
    FOUND(
        LAUNCH(load<__nv_bfloat16>, 1, 1, 0, 0, (__nv_bfloat16 *)floats(1), (__nv_bfloat16 *)floats(8), 16),
        "reads 2 bytes at byte 32 of 32 bytes");
    FOUND(LAUNCH(load<float4>, 1, 1, 0, 0, (float4 *)floats(4), (float4 *)floats(7), 1),
          "reads 16 bytes at byte 16 of 28 bytes");
    FOUND(LAUNCH(load<float>, 1, 1, 0, 0, floats(1), NULL, 0),
          "reads 4 bytes at (nil), which is not memory of the device");
}

// Whatever code g++ generates for an access, it must be checked.
struct Odd {
    float x[3];
};
struct Large {
    float x[10];
};
struct Bits {
    unsigned low : 5, high : 20;
};
enum Form {
    VOLATILE,
    ADDED,
    STRUCT,
    LARGE_STRUCT,
    ZEROED,
    MEMBER,
    BIT_FIELD,
    COPIED,
    FILLED,
    SWAPPED,
    LOADED,
    ATOMIC
};
template <int FORM>
__global__ void access(float *y, float *x, int i) {
    if (FORM == VOLATILE) *y = *reinterpret_cast<volatile float *>(&x[i]);
    if (FORM == ADDED) x[i] += 1;
    if (FORM == STRUCT) *reinterpret_cast<Odd *>(y) = reinterpret_cast<const Odd *>(x)[i];
    if (FORM == LARGE_STRUCT) *reinterpret_cast<Large *>(y) = reinterpret_cast<const Large *>(x)[i];
    if (FORM == ZEROED) reinterpret_cast<Large *>(x)[i] = Large();
    if (FORM == MEMBER) *y = reinterpret_cast<const Large *>(x)[i].x[9];
    if (FORM == BIT_FIELD) reinterpret_cast<Bits *>(x)[i].high = 3;
    if (FORM == COPIED) memcpy(y, x + i, 20);
    if (FORM == FILLED) memset(x + i, 0, 20);
    if (FORM == SWAPPED) std::swap(*y, x[i]);
    if (FORM == LOADED) *y = __ldg(&x[i]);
    if (FORM == ATOMIC) atomicAdd(&x[i], 1.f);
}

template <int FORM>
static void check_form(const char *form, int last) {
    static int index;
    index = last;
    expect_sound(form, RUN_WHOLE(LAUNCH(access<FORM>, 1, 1, 0, 0, floats(60), floats(60), index)));
    index = last + 1;
    const char *const parts[] = {" of 240 bytes of device memory"};
    expect_found(form, RUN_WHOLE(LAUNCH(access<FORM>, 1, 1, 0, 0, floats(60), floats(60), index)), parts,
                 1);
}

static void every_form_of_access_is_seen(void **state) {
    (void)state;
    check_form<VOLATILE>("a volatile read", 59);
    check_form<ADDED>("+=", 59);
    check_form<STRUCT>("a struct of 12 bytes", 19);
    check_form<LARGE_STRUCT>("a struct of 40 bytes", 5);
    check_form<ZEROED>("a struct of zeros", 5);
    check_form<MEMBER>("a member", 5);
    check_form<BIT_FIELD>("a bit field", 59);
    check_form<COPIED>("memcpy", 55);
    check_form<FILLED>("memset", 55);
    check_form<SWAPPED>("std::swap", 59);
    check_form<LOADED>("__ldg", 59);
    check_form<ATOMIC>("an atomic", 59);
}

static void accesses_of_host_memory_from_kernels(void **state) {
    (void)state;
    static float on_host[4];
    FOUND(LAUNCH(load<float>, 1, 1, 0, 0, floats(1), on_host, 0), "reads 4 bytes at 0x",
          "not memory of the device");
    FOUND(float local = 0;
          LAUNCH(load<float>, 1, 1, 0, 0, floats(1), &local, 0), "not memory of the device");
    FOUND(float *pinned; CUDA_CHECK(cudaMallocHost(&pinned, 64));
          LAUNCH(store<float>, 1, 1, 0, 0, pinned, 0), "writes 4 bytes at 0x", "not memory of the device");
}

// Blocks that add to the same words, one after another: a thread waits for its block's turn, and passes it
// on.
enum Turns { IN_TURN, BY_MBARRIERS, NO_BARRIER_BEFORE, NO_FENCE, OTHER_TURN, NOT_AWAITED };

template <Turns HOW>
__global__ void add_in_turn(float *sums, unsigned *turn) {
    __shared__ Mbarrier come;
    __shared__ Mbarrier added;
    const bool keeps = threadIdx.x == 0;
    if (keeps) mbarrier_init(&come, 1), mbarrier_init(&added, 64);
    __syncthreads();
    if (keeps)
        while (atomicAdd(&turn[HOW == OTHER_TURN && blockIdx.x], 0u) != blockIdx.x && HOW != OTHER_TURN) {
        }
    if (keeps) mbarrier_arrive(&come);
    if (HOW != NOT_AWAITED || keeps) mbarrier_wait(&come, 0);
    sums[threadIdx.x] += 1;
    if (HOW == IN_TURN) __syncthreads();
    else if (HOW != NO_BARRIER_BEFORE) mbarrier_arrive(&added);
    if (keeps && HOW != IN_TURN && HOW != NO_BARRIER_BEFORE) mbarrier_wait(&added, 0);
    if (keeps && HOW != NO_FENCE) __threadfence();
    if (keeps) atomicAdd(turn, 1u);
}

template <Turns HOW>
static void run_in_turn(void) {
    float *sums = floats(64);
    unsigned *turn = reinterpret_cast<unsigned *>(floats(2));
    CUDA_CHECK(cudaMemset(sums, 0, 64 * sizeof *sums));
    CUDA_CHECK(cudaMemset(turn, 0, 2 * sizeof *turn));
    LAUNCH(add_in_turn<HOW>, 3, 64, 0, 0, sums, turn);
}

static void blocks_that_take_turns(void **state) {
    (void)state;
    SOUND(run_in_turn<IN_TURN>());
    SOUND(run_in_turn<BY_MBARRIERS>());
    FOUND(run_in_turn<NO_BARRIER_BEFORE>(), "which another block of this launch wrote");
    FOUND(run_in_turn<NO_FENCE>(), "which another block of this launch wrote");
    FOUND(run_in_turn<OTHER_TURN>(), "which another block of this launch wrote");
    FOUND(run_in_turn<NOT_AWAITED>(), "which another block of this launch wrote");
}

static void use_after_free(void **state) {
    (void)state;
    FOUND(float *x = floats(8); CUDA_CHECK(cudaFree(x));
          LAUNCH(load<float>, 1, 1, 0, 0, floats(1), x, 3),
          "reads 4 bytes at byte 12 of 32 bytes of device memory after its release");
    FOUND(float *x = floats(8); CUDA_CHECK(cudaFreeAsync(x, 0)); for (int i = 0; i < 100; i++) floats(8);
          LAUNCH(store<float>, 1, 1, 0, 0, x, 0), "after its release");
    FOUND(float *x = floats(8); CUDA_CHECK(cudaFree(x));
          CUDA_CHECK(cudaFree(x)),
          "cudaFree (tests/unit/test_cuda_on_cpu_finds.cc:", "is not the start of a live allocation");
    FOUND(float *x = floats(8); CUDA_CHECK(cudaFree(x + 1)), "is not the start of a live allocation");
}

static void misaligned_accesses(void **state) {
    (void)state;
    SOUND(LAUNCH(load<float4>, 1, 1, 0, 0, (float4 *)floats(4), (float4 *)floats(12), 2));
    FOUND(LAUNCH(load<float4>, 1, 1, 0, 0, (float4 *)floats(4), (float4 *)(floats(12) + 2), 1),
          "reads 16 bytes at byte 24 of device memory, an address that is no multiple of 16");
    FOUND(LAUNCH(load<float>, 1, 1, 0, 0, floats(1), (float *)((char *)floats(4) + 2), 1),
          "reads 4 bytes at byte 6 of device memory, an address that is no multiple of 4");
}

// A word of global memory between two threads of one launch.
template <int CASE>
__global__ void share_word(float *y) {
    unsigned t = threadIdx.x;
    if (CASE == 0) y[t / 2] = 1;                              // two write
    if (CASE == 1) y[t] = t + 1 < blockDim.x ? y[t + 1] : 0;  // one reads what another writes
    if (CASE == 2) {
        float right = t + 1 < blockDim.x ? y[t + 1] : 0;
        __syncthreads();
        y[t] = right;
    }
    if (CASE == 3) y[0] = blockIdx.x;  // a block of one thread
    if (CASE == 4) atomicAdd(y, 1.f);
    if (CASE == 5) y[1 + blockIdx.x] = y[0];  // all read
    if (CASE == 6) y[blockIdx.x] = y[(blockIdx.x + 1) % gridDim.x];
}

__global__ void half_words(__nv_bfloat16 *y, int lanes) { y[threadIdx.x / lanes] = __float2bfloat16(1); }

static void races_on_global_memory(void **state) {
    (void)state;
    FOUND(LAUNCH(share_word<0>, 1, 64, 0, 0, floats(64)), "kernel share_word<0>, block 0, thread 1, ",
          "writes byte 0 of device memory, which thread 0 wrote (", "with no __syncwarp() between");
    FOUND(LAUNCH(share_word<1>, 1, 64, 0, 0, floats(64)), "thread 1, ", "which thread 0 read (");
    SOUND(LAUNCH(share_word<2>, 1, 64, 0, 0, floats(64)));
    FOUND(LAUNCH(share_word<3>, 2, 1, 0, 0, floats(64)), "block 1, thread 0, ",
          "writes byte 0 of device memory, which another block of this launch wrote (");
    SOUND(float *y = floats(1); LAUNCH(share_word<3>, 1, 1, 0, 0, y); LAUNCH(share_word<3>, 1, 1, 0, 0, y));
    SOUND(LAUNCH(share_word<4>, 5, 64, 0, 0, floats(64)));
    SOUND(LAUNCH(share_word<5>, 5, 1, 0, 0, floats(64)));
    FOUND(LAUNCH(share_word<6>, 5, 1, 0, 0, floats(64)), "block 1, thread 0, ",
          "writes byte 4 of device memory, which another block of this launch read (");
    // neighbours in one word of 4 bytes, but not in one number
    SOUND(LAUNCH(half_words, 1, 64, 0, 0, (__nv_bfloat16 *)floats(64), 1));
    FOUND(LAUNCH(half_words, 1, 64, 0, 0, (__nv_bfloat16 *)floats(64), 2), "thread 1, ",
          "writes byte 0 of device memory, which thread 0 wrote (");
}

// ---- local memory ----

template <int BYTES>
__global__ void local(float *y) {
    volatile char array[BYTES];
    array[0] = 1;
    array[threadIdx.x] = 2;
    y[threadIdx.x] = array[0];
}

static void local_memory_has_an_end(void **state) {
    (void)state;
    SOUND(LAUNCH(local<32000>, 1, 32, 0, 0, floats(32)));
    FOUND(LAUNCH(local<80000>, 1, 32, 0, 0, floats(32)),
          "kernel local<80000>, block 0, thread 0: ", "needs more than 60 kB of local memory");
}

// ---- launches ----

__global__ void empty(float *) {}

static void wrong_launches(void **state) {
    (void)state;
    FOUND(LAUNCH(empty, 1, 1025, 0, 0, NULL),
          "the kernel empty could not start (tests/unit/test_cuda_on_cpu_finds.cc:",
          "a block of (1025, 1, 1) threads");
    FOUND(LAUNCH(empty, 1, dim3(1, 1, 65), 0, 0, NULL), "a block of (1, 1, 65) threads");
    FOUND(LAUNCH(empty, 1, 0, 0, 0, NULL), "a block of (0, 1, 1) threads");
    FOUND(LAUNCH(empty, 0, 32, 0, 0, NULL), "a grid of (0, 1, 1) blocks");
    FOUND(LAUNCH(empty, dim3(1, 65536), 32, 0, 0, NULL), "a grid of (1, 65536, 1) blocks");
    FOUND(LAUNCH(empty, 1, 32, 50000, 0, NULL),
          "50000 bytes of dynamic shared memory; beyond 49152 cudaFuncSetAttribute");
    SOUND(CUDA_CHECK(cudaFuncSetAttribute(empty, cudaFuncAttributeMaxDynamicSharedMemorySize, 50000));
          LAUNCH(empty, 1, 32, 50000, 0, NULL));
    FOUND(CUDA_CHECK(cudaFuncSetAttribute(empty, cudaFuncAttributeMaxDynamicSharedMemorySize, 300000)),
          "CUDA refused cudaFuncSetAttribute", "invalid argument");
}

__global__ void static_array(float *y) {
    __shared__ float x[512];
    x[threadIdx.x] = 1;
    __syncthreads();
    y[blockIdx.x * 32 + threadIdx.x] = x[31 - threadIdx.x];
}

static void static_and_dynamic_shared_memory(void **state) {
    (void)state;
    SOUND(LAUNCH(static_array, 2, 32, 47104, 0, floats(64)));
    FOUND(LAUNCH(static_array, 1, 32, 47105, 0, floats(64)), "kernel static_array, ",
          "at least 2048 bytes of static shared arrays beside 47105 of dynamic",
          "and 49152 is the most of both unless cudaFuncSetAttribute asks for the dynamic ones");
    SOUND(
        CUDA_CHECK(cudaFuncSetAttribute(static_array, cudaFuncAttributeMaxDynamicSharedMemorySize, 230400));
        LAUNCH(static_array, 1, 32, 47105, 0, floats(64)));
    FOUND(
        CUDA_CHECK(cudaFuncSetAttribute(static_array, cudaFuncAttributeMaxDynamicSharedMemorySize, 230401));
        LAUNCH(static_array, 1, 32, 47105, 0, floats(64)),
        "2048 bytes of static shared arrays beside 230401", "and 232448 is the most of both");
}

// ---- host code ----

static void host_code_and_device_memory(void **state) {
    (void)state;
    FOUND(float *x = floats(4); x[1] = 1, AT(__LINE__), "host code writes 4 bytes of device memory");
    FOUND(volatile float *x = floats(4);
          if (x[1] == 1) abort(), "host code reads 4 bytes of device memory");
    FOUND(static int host[8]; CUDA_CHECK(cudaMemcpy(host, floats(4), 20, cudaMemcpyDeviceToHost)),
                              "cudaMemcpy (tests/unit/test_cuda_on_cpu_finds.cc:",
                              "): 20 bytes from byte 0 of an allocation of 16 bytes");
    FOUND(CUDA_CHECK(cudaMemsetAsync(floats(4) + 1, 0, 16)),
          "16 bytes from byte 4 of an allocation of 16 bytes");
    FOUND(static int host[8]; CUDA_CHECK(cudaMemcpy(host, floats(4), 16, cudaMemcpyHostToDevice)),
                              "the target 0x", "is no device memory");
    FOUND(static int host[8]; CUDA_CHECK(cudaMemcpy(host, floats(4), 16, cudaMemcpyHostToHost)),
                              "the source 0x", "is device memory");
}

// The emulator handles faults in stacks; a signal that is sent is not one, and ends the program.
static void a_signal_from_outside_ends_the_program(void **state) {
    (void)state;
    char text[4096];
    for (int number : {SIGSEGV, SIGTERM}) {
        static int sent;
        sent = number;
        int status = run_child([] {
            signal(SIGSEGV, SIG_DFL);  // cmocka has a handler of its own
            LAUNCH(empty, 1, 32, 0, 0, NULL);
            kill(getpid(), sent);
        }, text, sizeof text);
        assert_int_equal(status, 128 + number);
        assert_string_equal(text, "");
    }
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cuda_on_cpu_order(0);  // the sentences name threads, and another order would meet others first
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(global_accesses_out_of_bounds),
        cmocka_unit_test(every_form_of_access_is_seen),
        cmocka_unit_test(accesses_of_host_memory_from_kernels),
        cmocka_unit_test(blocks_that_take_turns),
        cmocka_unit_test(use_after_free),
        cmocka_unit_test(misaligned_accesses),
        cmocka_unit_test(races_on_global_memory),
        cmocka_unit_test(local_memory_has_an_end),
        cmocka_unit_test(wrong_launches),
        cmocka_unit_test(static_and_dynamic_shared_memory),
        cmocka_unit_test(host_code_and_device_memory),
        cmocka_unit_test(a_signal_from_outside_ends_the_program),
    };
    return cmocka_run_group_tests_name("cuda_on_cpu_finds", tests, NULL, NULL);
}
