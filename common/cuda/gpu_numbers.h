// gpu_numbers.h: 16-bit and 8-bit numbers on a GPU. Not part of gpu.h, because nvcc takes longer to read
// these headers than to compile most kernels that do not need them.
#ifndef GPU_NUMBERS_H
#define GPU_NUMBERS_H

#include "cuda/gpu.h"  // includes them itself under g++

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

#endif
