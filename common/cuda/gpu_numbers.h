// gpu_numbers.h: numbers of 16 and 8 bits on a GPU. Not in gpu.h: nvcc takes longer to read these headers
// than to compile most kernels that do without them.
#ifndef GPU_NUMBERS_H
#define GPU_NUMBERS_H

#include "cuda/gpu.h"  // which has them already where g++ reads it

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

#endif
