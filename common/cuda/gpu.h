// gpu.h: what every .cu file includes, and the main place that asks which compiler reads it. nvcc builds
// for a GPU; g++ builds the same sources against cuda_on_cpu.h, which runs each kernel on the CPU and
// watches every access that it makes.
//
// Kernels are plain CUDA but for three words, because g++ knows neither <<< >>> nor an array of shared
// memory without a size:
//
//     LAUNCH((softmax<float, 256>), rows, 256, bytes, stream, y, x, columns);
//     DYNAMIC_SHARED(float, row);     // in a kernel: float *row, the `bytes` of the launch, aligned to 16
//     CUDA_CHECK(cudaMalloc(&p, n));  // ends the program with one sentence unless the call succeeded
//
// A template is named with all its arguments, and in parentheses where it has a comma.
#ifndef GPU_H
#define GPU_H

#include "base.h"

#ifdef __CUDACC__

#include <cuda_runtime.h>

// The check sees a launch that could not start; what goes wrong inside a kernel comes out of a later call.
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                        \
    do {                                                                                              \
        kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__);                                   \
        cudaError_t status_ = cudaGetLastError();                                                     \
        CHECK(status_ == cudaSuccess, "the kernel %s could not start (%s:%d): %s", #kernel, __FILE__, \
              __LINE__, cudaGetErrorString(status_));                                                 \
    } while (0)

// One array under one name for all kernels of a file: its type cannot change with them, so it is bytes.
#define DYNAMIC_SHARED(type, name)                               \
    extern __shared__ __align__(16) unsigned char cuda_shared[]; \
    type *name = reinterpret_cast<type *>(cuda_shared)

// Before a function of the host that computes long, on its own memory: the emulator need not watch it.
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
