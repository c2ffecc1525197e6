// on_device.h: for tests of what CUDA on the CPU provides to kernels: arrays in device memory.
#ifndef ON_DEVICE_H
#define ON_DEVICE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <algorithm>
#include <vector>

#include "cuda/gpu.h"
// needs those above, and extern "C"
extern "C" {
#include <cmocka.h>
}

// Device memory with the contents of a vector, and back.
template <class T>
static inline T *to_device(const std::vector<T> &host) {
    T *memory;
    CUDA_CHECK(cudaMalloc(&memory, host.size() * sizeof(T)));
    CUDA_CHECK(cudaMemcpy(memory, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return memory;
}

template <class T>
static inline std::vector<T> to_host(T *memory, size_t count) {
    std::vector<T> host(count);
    CUDA_CHECK(cudaMemcpy(host.data(), memory, count * sizeof(T), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaFree(memory));
    return host;
}

template <class T>
static inline T *fresh(size_t count) {
    T *memory;
    CUDA_CHECK(cudaMalloc(&memory, count * sizeof(T)));
    return memory;
}

#endif
