// book_kernels.h: what the files of the table share (book_kernels.cu).
#ifndef BOOK_KERNELS_H
#define BOOK_KERNELS_H

#include "cuda/device_cuda.h"
#include "cuda/gpu.h"
#include "tensor/kernel_table.h"

static inline cudaStream_t stream() { return static_cast<cudaStream_t>(device_stream()); }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether a block of this GPU may have so many bytes of shared memory.
static inline bool may_share(int64_t bytes) {
    int device, most;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return bytes <= most;
}

// Rows of the table that have a file of their own (book_attention.cu).
bool attention_chunk_forward(DType dtype, void *o, void *lse, const void *q, const void *k, const void *v,
                             AttentionChunk at);
bool attention_chunk_backward(DType dtype, void *dq, void *dk, void *dv, const void *d_o, const void *q,
                              const void *k, const void *v, const void *lse, const void *dots,
                              AttentionChunk at);

#endif
