// instructions.h: instructions of the tensor cores and asynchronous copies that CUDA C++ does not offer as
// such: PTX under nvcc (compute capability 8.0 and later), and under g++ the same, written from the tables of
// the PTX ISA (cuda_on_cpu_tensor.cc, cuda_on_cpu_async.inc). What 9.0 adds is in instructions_hopper.h.
//
// Matrices are split into fragments: each lane of a warp has a few elements. A register has two 16-bit
// numbers, the left one in its lower half. In m16n8k16, lane l has
//
//     a[0]  row l / 4        columns 2 (l % 4), + 1        A (16, 16)
//     a[1]  row l / 4 + 8    columns 2 (l % 4), + 1
//     a[2]  row l / 4        columns 2 (l % 4) + 8, + 9
//     a[3]  row l / 4 + 8    columns 2 (l % 4) + 8, + 9
//     b[0]  rows 2 (l % 4), + 1        column l / 4        B (16, 8)
//     b[1]  rows 2 (l % 4) + 8, + 9    column l / 4
//     d[0], d[1]  row l / 4        columns 2 (l % 4), + 1  D (16, 8), f32
//     d[2], d[3]  row l / 4 + 8    columns 2 (l % 4), + 1
//
// All lanes of the warp must call mma and ldmatrix together.
//
// power_of_2 is 2^x in one instruction of the special function unit. exp2f takes four: for x below -126 it
// halves x and squares the result, where power_of_2 is 0. power_of_2 is off by at most 2 units in the last
// place (exp2f's bound, CUDA Programming Guide), 2^-22 of the result; 2^0 is 1, and 2^-inf is 0 (PTX ISA,
// ex2). That is enough for attention in 16 bits: before P = 2^x, x <= 0, is multiplied, it is rounded, with
// a relative error of up to 2^-8 (bf16) or 2^-11 (f16). A row's sum, in f32, contains a 1, to which
// anything below 2^-126 adds nothing; and lse, the logarithm of that sum plus the maximum, is off by at
// most 2^-22. The emulator's power_of_2 is as far off, in either direction, so proofs that pass there allow
// for this error.
#ifndef INSTRUCTIONS_H
#define INSTRUCTIONS_H

#include <stdint.h>

#include <type_traits>

#include "cuda/gpu_numbers.h"

#ifdef __CUDACC__

// d += A B, with A and B of T: __nv_bfloat16 or __half. 4096 FLOPs.
template <class T>
__device__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

#define MMA(T, type)                                                                                       \
    template <>                                                                                            \
    __device__ __forceinline__ void mma_m16n8k16<T>(float(&d)[4], const uint32_t(&a)[4],                   \
                                                    const uint32_t(&b)[2]) {                               \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                \
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                  \
    }
MMA(__nv_bfloat16, "bf16")
MMA(__half, "f16")
#undef MMA

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

// Loads four 8 x 8 matrices of 16-bit numbers from shared memory: lanes 8 m to 8 m + 7 each point to one
// row of matrix m, 16 bytes aligned to 16, and to[m] becomes the lane's elements of it: row l / 4, columns
// 2 (l % 4) and + 1. Matrices 0 to 3 at rows 0, 8, 0, 8 and columns 0, 0, 8, 8 make an A.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&to)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same with the matrices transposed: rows 2 (l % 4) and + 1, column l / 4 of what is stored. This makes
// the fragments of a B that is stored by rows.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&to)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Starts to copy 16 bytes from device to shared memory, both aligned to 16, bypassing the registers; if the
// source does not exist, it is not read, and zeros are written. The copy is in flight until the thread has
// committed it to a group and waited for that; other threads may read it after a further barrier.
__device__ __forceinline__ void cp_async(void *shared, const void *global, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(exists ? 16 : 0)
                 : "memory");
}
// The copies that the thread has started since its last commit become a group, which may be empty.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all of the thread's groups except the PENDING most recent ones.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// *address += x, atomically, and no old value comes back (red). Whether ptxas makes that of an atomicAdd
// whose result nobody reads depends on the kernel.
__device__ __forceinline__ void add_without_reading(float *address, float x) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(x) : "memory");
}

// No instruction: a comment in the PTX, which keeps nvcc from merging the two sides of a branch.
template <int SIDE>
__device__ __forceinline__ void end_of_side() {
    asm volatile("// side %0" ::"n"(SIDE));
}

#else

void cuda_mma(float *d, const uint32_t *a, const uint32_t *b, float (*widen)(uint16_t), const char *file,
              int line);
void cuda_ldmatrix(uint32_t *to, const void *row, bool transposed, const char *file, int line);
void cuda_cp_async(void *to, const void *from, bool exists);
void cuda_cp_async_commit(void);
void cuda_cp_async_wait(uint32_t pending);
extern "C" float cuda_power_of_2(float x);

template <class T>
__forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                  CUDA_HERE) {
    cuda_mma(d, a, b, std::is_same<T, __half>::value ? f32_from_f16 : f32_from_bf16, file, line);
}
static __forceinline__ float power_of_2(float x) { return cuda_power_of_2(x); }
static __forceinline__ void ldmatrix_x4(uint32_t (&to)[4], const void *row, CUDA_HERE) {
    cuda_ldmatrix(to, row, false, file, line);
}
static __forceinline__ void ldmatrix_x4_trans(uint32_t (&to)[4], const void *row, CUDA_HERE) {
    cuda_ldmatrix(to, row, true, file, line);
}
static __forceinline__ void cp_async(void *shared, const void *global, bool exists) {
    cuda_cp_async(shared, global, exists);
}
static __forceinline__ void cp_async_commit() { cuda_cp_async_commit(); }
template <int PENDING>
__forceinline__ void cp_async_wait() {
    cuda_cp_async_wait(PENDING);
}
static __forceinline__ void add_without_reading(float *address, float x) { atomicAdd(address, x); }

template <int SIDE>
static __forceinline__ void end_of_side() {}

#endif
#endif
