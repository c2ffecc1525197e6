// What CUDA on the CPU finds among the threads of a block: errors with shared memory, barriers, shuffles and
// votes. As in test_cuda_on_cpu_finds.cc.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#include <utility>

#include "cuda/gpu.h"
// needs those above, and to be told that it is C
extern "C" {
#include <cmocka.h>
}
#include "found.h"

// ---- shared memory ----

template <int N>
__global__ void static_array(float *y, int index, int column) {
    __shared__ float before[N];
    __shared__ float tile[N][N];
    __shared__ float after[N];
    before[0] = after[0] = 1;
    float *flat = &tile[0][0];  // hides the bound from the compiler
    if (column < 0) flat[index] = 1;
    else tile[index][column] = 1;
    y[0] = before[0] + after[0];
}
enum { FLAT_LINE = __LINE__ - 4, TILE_LINE = FLAT_LINE + 1 };

__global__ void dynamic_array(float *y, int index) {
    DYNAMIC_SHARED(float, array);
    array[index] = 1;
    y[0] = array[index];
}

static void shared_accesses_out_of_bounds(void **state) {
    (void)state;
    SOUND(LAUNCH(static_array<8>, 1, 1, 0, 0, floats(1), 63, -1));
    SOUND(LAUNCH(static_array<8>, 1, 1, 0, 0, floats(1), 7, 7));
    FOUND(LAUNCH(static_array<8>, 1, 1, 0, 0, floats(1), 64, -1),
          "kernel static_array<8>, block 0, thread 0, ", AT(FLAT_LINE),
          "writes 4 bytes at byte 256 of 256 bytes of tile");
    FOUND(LAUNCH(static_array<8>, 1, 1, 0, 0, floats(1), -1, -1), "writes 4 bytes");
    FOUND(LAUNCH(static_array<8>, 1, 1, 0, 0, floats(1), 8, 0), AT(TILE_LINE),
          "index 8 is out of bounds of 'float [8][8]'");
    FOUND(LAUNCH(static_array<8>, 1, 1, 0, 0, floats(1), 0, 8), "index 8 is out of bounds of 'float [8]'");
    SOUND(LAUNCH(dynamic_array, 1, 1, 40, 0, floats(1), 9));
    FOUND(LAUNCH(dynamic_array, 1, 1, 40, 0, floats(1), 10),
          "writes 4 bytes at byte 40 of 40 bytes of dynamic shared memory");
    FOUND(LAUNCH(dynamic_array, 1, 1, 40, 0, floats(1), -1),
          "4 before the start of 40 bytes of dynamic shared memory");
    FOUND(LAUNCH(dynamic_array, 1, 1, 0, 0, floats(1), 0), "at byte 0 of 0 bytes of dynamic shared memory");
    // the previous, larger launch has left nothing
    FOUND(LAUNCH(dynamic_array, 1, 1, 80, 0, floats(1), 10);
          LAUNCH(dynamic_array, 1, 1, 40, 0, floats(1), 10), "at byte 40 of 40 bytes");
}

template <int CASE>
__global__ void unwritten(float *y) {
    __shared__ float array[64];
    DYNAMIC_SHARED(float, more);
    if (CASE == 0 || threadIdx.x < 32) array[threadIdx.x] = 1;
    if (CASE == 2 && blockIdx.x == 0) more[threadIdx.x] = 1;
    __syncthreads();
    y[blockIdx.x * 64 + threadIdx.x] = CASE == 2 ? more[threadIdx.x] : array[63 - threadIdx.x];
}

__global__ void count_from_anything(float *y) {
    __shared__ unsigned counter;
    y[threadIdx.x] = (float)atomicAdd(&counter, 1u);
}

static void reads_of_shared_memory_that_nobody_wrote(void **state) {
    (void)state;
    SOUND(LAUNCH(unwritten<0>, 2, 64, 256, 0, floats(128)));
    FOUND(LAUNCH(unwritten<1>, 2, 64, 256, 0, floats(128)), "block 0, thread 0, ",
          "reads byte 252 of array, which no thread of this block has written yet");
    FOUND(LAUNCH(count_from_anything, 1, 64, 0, 0, floats(64)),
          "atomically changes byte 0 of counter, which no thread of this block has written yet");
    // the previous block wrote it
    FOUND(LAUNCH(unwritten<2>, 2, 64, 256, 0, floats(128)), "block 1, thread ",
          " of dynamic shared memory, which no thread of this block has written");
}

// Thread t writes word t and reads a neighbour's, with one or another kind of order between.
enum Between { NOTHING, BLOCK, WARP, SHUFFLE, HALF_WARP };
template <int BETWEEN>
__global__ void neighbours(float *y, int distance) {
    __shared__ float word[64];
    unsigned t = threadIdx.x;
    word[t] = 0;
    __syncthreads();
    word[t] = 1;
    if (BETWEEN == BLOCK) __syncthreads();
    if (BETWEEN == WARP) __syncwarp();
    if (BETWEEN == SHUFFLE || BETWEEN == HALF_WARP) y[t] = __shfl_xor_sync(0xffffffff, 1.f, 1);
    if (BETWEEN == HALF_WARP) __syncwarp(t % 32 < 16 ? 0xffff : 0xffff0000);
    y[t] = word[t ^ distance];
}

static void races_on_shared_memory(void **state) {
    (void)state;
    FOUND(LAUNCH(neighbours<NOTHING>, 1, 64, 0, 0, floats(64), 1), "kernel neighbours<0>, block 0, thread ",
          " of word, which thread ", " (tests/unit/test_cuda_on_cpu_blocks.cc:", "no __syncwarp() between");
    FOUND(LAUNCH(neighbours<NOTHING>, 1, 64, 0, 0, floats(64), 32), "of word, which thread ",
          "no __syncthreads() between");
    SOUND(LAUNCH(neighbours<NOTHING>, 1, 64, 0, 0, floats(64), 0));
    SOUND(LAUNCH(neighbours<BLOCK>, 1, 64, 0, 0, floats(64), 1));
    SOUND(LAUNCH(neighbours<BLOCK>, 1, 64, 0, 0, floats(64), 32));
    // __syncwarp orders the lanes of a warp, not two warps
    SOUND(LAUNCH(neighbours<WARP>, 1, 64, 0, 0, floats(64), 1));
    FOUND(LAUNCH(neighbours<WARP>, 1, 64, 0, 0, floats(64), 32), "no __syncthreads() between");
    // shuffles order nothing
    FOUND(LAUNCH(neighbours<SHUFFLE>, 1, 64, 0, 0, floats(64), 1), "no __syncwarp() between");
    // and a __syncwarp of some lanes orders only these, even if all have written
    SOUND(LAUNCH(neighbours<HALF_WARP>, 1, 64, 0, 0, floats(64), 8));
    FOUND(LAUNCH(neighbours<HALF_WARP>, 1, 64, 0, 0, floats(64), 16), "no __syncwarp() between");
}

// Reads before a write, with and without a barrier between.
template <int CASE>
__global__ void readers_then_writer(float *y) {
    __shared__ float word;
    __shared__ int count;
    unsigned t = threadIdx.x;
    if (t == 0) word = 1, count = 0;
    __syncthreads();
    y[t] = word;  // all threads read
    if (CASE == 1) __syncthreads();
    if (CASE == 2 || CASE == 3) __syncwarp();
    if (CASE < 3 && t == 0) word = 2;
    if (CASE == 4) atomicAdd(&count, 1);
    if (CASE == 5) {
        atomicAdd(&count, 1);
        __syncthreads();
        y[t] = count;
    }
    if (CASE == 6) {
        atomicAdd(&count, 1);
        y[t] = count;
    }
    if (CASE == 7) {
        if (t == 1) count = 5;
        atomicAdd(&count, 1);
    }
}

static void readers_and_a_writer(void **state) {
    (void)state;
    FOUND(LAUNCH(readers_then_writer<0>, 1, 64, 0, 0, floats(64)), "writes byte 0 of word, which ",
          " read (");
    SOUND(LAUNCH(readers_then_writer<1>, 1, 64, 0, 0, floats(64)));
    SOUND(LAUNCH(readers_then_writer<2>, 1, 32, 0, 0, floats(64)));  // one warp
    FOUND(LAUNCH(readers_then_writer<2>, 1, 64, 0, 0, floats(64)), "writes byte 0 of word, which ",
          " read (");
    // in the natural order thread 0 writes first; in another one it is last
    FOUND(cuda_on_cpu_order(3); LAUNCH(readers_then_writer<0>, 1, 32, 0, 0, floats(64)), "of word, which ");
    SOUND(LAUNCH(readers_then_writer<3>, 1, 64, 0, 0, floats(64)));
}

static void atomics_race_with_plain_accesses_alone(void **state) {
    (void)state;
    SOUND(LAUNCH(readers_then_writer<4>, 1, 64, 0, 0, floats(64)));
    SOUND(LAUNCH(readers_then_writer<5>, 1, 64, 0, 0, floats(64)));
    FOUND(LAUNCH(readers_then_writer<6>, 1, 64, 0, 0, floats(64)), "of count, which thread ");
    FOUND(LAUNCH(readers_then_writer<7>, 1, 64, 0, 0, floats(64)), " of count, which thread ");
}

__global__ void waits_for_its_turn(unsigned *turn, unsigned step) {
    while (atomicAdd(turn, 0u) != blockIdx.x) {
    }
    atomicAdd(turn, step);
}

static void run_in_turn(unsigned step) {
    unsigned *turn = reinterpret_cast<unsigned *>(floats(1));
    CUDA_CHECK(cudaMemset(turn, 0, sizeof *turn));
    LAUNCH(waits_for_its_turn, 3, 1, 0, 0, turn, step);
}

static void a_turn_that_never_comes(void **state) {
    (void)state;
    SOUND(run_in_turn(1));
    FOUND(run_in_turn(2), "kernel waits_for_its_turn, block 1, thread 0, ",
          "waits for a word that stays 2: what should change it comes later, or never");
}

// Order is transitive: lane 0 before lane 1, and lane 1 before lane 2, means lane 0 before lane 2.
template <int CASE>
__global__ void chain(float *y) {
    __shared__ float word;
    unsigned t = threadIdx.x;
    if (t == 0) word = 1;
    if (t < 2) __syncwarp(3);
    if (CASE == 0 && (t == 1 || t == 2)) __syncwarp(6);
    if (t == 2) y[0] = word;
}

static void order_is_passed_on(void **state) {
    (void)state;
    SOUND(LAUNCH(chain<0>, 1, 32, 0, 0, floats(1)));
    FOUND(LAUNCH(chain<1>, 1, 32, 0, 0, floats(1)), "thread 2, ",
          "reads byte 0 of word, which thread 0 wrote (");
}

// A missing barrier must be found in any order of the threads.
template <int FORGOTTEN>
__global__ void reduce(float *y) {
    __shared__ float part[64];
    unsigned t = threadIdx.x;
    part[t] = 0;
    __syncthreads();
    part[t] = (float)t;
    for (unsigned half = 32; half > 0; half /= 2) {
        if (half != FORGOTTEN) __syncthreads();
        if (t < half) part[t] += part[t + half];
    }
    if (t == 0) y[0] = part[0];
}

static void a_missing_barrier_in_every_order(void **state) {
    (void)state;
    static uint64_t seed;
    for (seed = 0; seed < 8; seed++) {
        SOUND(cuda_on_cpu_order(seed); LAUNCH(reduce<0>, 1, 64, 0, 0, floats(1)));
        FOUND(cuda_on_cpu_order(seed); LAUNCH(reduce<32>, 1, 64, 0, 0, floats(1)),
                                       " of part, which thread ", "no __syncthreads() between");
        FOUND(cuda_on_cpu_order(seed); LAUNCH(reduce<4>, 1, 64, 0, 0, floats(1)), " of part, which thread ",
                                       "no __syncwarp() between");
    }
}

// ---- barriers, shuffles and votes that some threads do not reach ----

template <int CASE>
__global__ void unequal(float *y, unsigned n) {
    unsigned t = threadIdx.x, lane = t % 32;
    if (CASE == 0) {
        if (t >= n) return;
        __syncthreads();
    }
    if (CASE == 1) {
        if (t < n) __syncthreads();
        else __syncthreads();
    }
    if (CASE == 2 && t < n) y[t] = __shfl_down_sync(0xffffffff, y[t], 1);
    if (CASE == 3) {
        if (t < n) y[t] = (float)__any_sync(0xffffffff, 1);
        __syncthreads();
    }
    if (CASE == 4) {
        if (lane < 16) y[t] = (float)__any_sync(0xffffffff, 1);
        else y[t] = (float)__any_sync(0xffff0000 | n, 1);
    }
    if (CASE == 5) y[t] = __shfl_sync(0x0000ffff, y[t], 0);
    if (CASE == 6 && lane < 16) y[t] = __shfl_sync(0x0000ffff, y[t], (int)n);
    if (CASE == 7) y[t] = __shfl_down_sync(0xffffffff, y[t], n);
    if (CASE == 8)
        for (unsigned i = 0; i < (t < n ? 2 : 1); i++) __syncthreads();
}

static void unequal_arrival(void **state) {
    (void)state;
    SOUND(LAUNCH(unequal<0>, 1, 64, 0, 0, floats(64), 64));
    FOUND(LAUNCH(unequal<0>, 1, 64, 0, 0, floats(64), 40), "kernel unequal<0>, block 0, thread 0: ",
          "waits at __syncthreads() (tests/unit/test_cuda_on_cpu_blocks.cc:",
          "with 40 of the block's 64 threads; thread 40 has left the kernel");
    SOUND(LAUNCH(unequal<1>, 1, 64, 0, 0, floats(64), 64));
    FOUND(LAUNCH(unequal<1>, 1, 64, 0, 0, floats(64), 40), "thread 40", "stands at __syncthreads() of ",
          "while thread 0 stands at that of ");
    SOUND(LAUNCH(unequal<2>, 1, 64, 0, 0, floats(64), 32));
    FOUND(LAUNCH(unequal<2>, 1, 64, 0, 0, floats(64), 40), "thread 32: waits at __shfl_down_sync (",
          "for thread 40, which has left the kernel");
    SOUND(LAUNCH(unequal<3>, 1, 64, 0, 0, floats(64), 32));
    FOUND(LAUNCH(unequal<3>, 1, 64, 0, 0, floats(64), 40), "thread 32: waits at __any_sync (",
          "for thread 40, which stands at __syncthreads() (");
    FOUND(LAUNCH(unequal<4>, 1, 32, 0, 0, floats(64), 1),
          "thread 0: waits at __any_sync with the mask 0xffffffff (",
          "for thread 16, which stands at __any_sync with the mask 0xffff0001 (");
    FOUND(LAUNCH(unequal<5>, 1, 32, 0, 0, floats(64), 0), "thread 16: calls __shfl_sync (",
          "with the mask 0x0000ffff, which lacks its own lane 16");
    SOUND(LAUNCH(unequal<6>, 1, 32, 0, 0, floats(64), 15));
    FOUND(LAUNCH(unequal<6>, 1, 32, 0, 0, floats(64), 16),
          "gives thread 0 the value of lane 16, which does not take part");
    // a last warp of 8 lanes: a shuffle may not read from lanes that do not exist
    SOUND(LAUNCH(unequal<7>, 1, 64, 0, 0, floats(64), 8));
    FOUND(LAUNCH(unequal<7>, 1, 40, 0, 0, floats(64), 8),
          "gives thread 32 the value of lane 8, which does not take part");
    SOUND(LAUNCH(unequal<8>, 1, 64, 0, 0, floats(64), 64));
    FOUND(LAUNCH(unequal<8>, 1, 64, 0, 0, floats(64), 63),
          "with 63 of the block's 64 threads; thread 63 has left");
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cuda_on_cpu_order(0);  // the messages name threads, and another order would report others first
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shared_accesses_out_of_bounds),
        cmocka_unit_test(reads_of_shared_memory_that_nobody_wrote),
        cmocka_unit_test(races_on_shared_memory),
        cmocka_unit_test(readers_and_a_writer),
        cmocka_unit_test(atomics_race_with_plain_accesses_alone),
        cmocka_unit_test(a_turn_that_never_comes),
        cmocka_unit_test(order_is_passed_on),
        cmocka_unit_test(a_missing_barrier_in_every_order),
        cmocka_unit_test(unequal_arrival),
    };
    return cmocka_run_group_tests_name("cuda_on_cpu_blocks", tests, NULL, NULL);
}
