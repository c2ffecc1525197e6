// gpu.h: what every .cu file includes, and the main place that depends on the compiler. nvcc builds for a
// GPU; g++ builds the same sources against cuda_on_cpu.h, which runs each kernel on the CPU and checks every
// access that it makes.
//
// Kernels are plain CUDA except for three macros, the first two because g++ knows neither <<< >>> nor arrays
// of shared memory without a size:
//
//     LAUNCH((softmax<float, 256>), rows, 256, bytes, stream, y, x, columns);
//     DYNAMIC_SHARED(float, row);     // in a kernel: float *row, the `bytes` of the launch, aligned to 16
//     CUDA_CHECK(cudaMalloc(&p, n));  // ends the program with one sentence unless the call succeeded
//
// A kernel template is named with all its arguments, in parentheses if they contain a comma.
#ifndef GPU_H
#define GPU_H

#include "base.h"

#ifdef __CUDACC__

#include <cuda_runtime.h>

// The check detects a launch that could not start. An error inside a kernel is returned by a later call,
// which may be the next launch.
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                         \
    do {                                                                                               \
        kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__);                                    \
        cudaError_t status_ = cudaGetLastError();                                                      \
        CHECK(status_ == cudaSuccess,                                                                  \
              "the kernel %s could not start, or one before it failed (%s:%d): %s; compute-sanitizer " \
              "in front of the command names a kernel that failed",                                    \
              #kernel, __FILE__, __LINE__, cudaGetErrorString(status_));                               \
    } while (0)

// All kernels of a file share one array under one name, so its type cannot differ between them: it is bytes.
#define DYNAMIC_SHARED(type, name)                               \
    extern __shared__ __align__(16) unsigned char cuda_shared[]; \
    type *name = reinterpret_cast<type *>(cuda_shared)

// Marks a host function that computes for long on memory of its own: the emulator need not watch it.
#define UNWATCHED

#else

#include "cuda_on_cpu/cuda_on_cpu.h"

#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    cuda_launch(kernel, #kernel, __FILE__, __LINE__, grid, block, shared_bytes, stream)(__VA_ARGS__)

#define DYNAMIC_SHARED(type, name) type *name = static_cast<type *>(cuda_dynamic_shared())

#define UNWATCHED __attribute__((no_sanitize_thread))

#endif

#define CUDA_CHECK(call)                                                                        \
    do {                                                                                        \
        cudaError_t status_ = (call);                                                           \
        CHECK(status_ == cudaSuccess, "CUDA refused %s (%s:%d): %s", #call, __FILE__, __LINE__, \
              cudaGetErrorString(status_));                                                     \
    } while (0)

#endif
