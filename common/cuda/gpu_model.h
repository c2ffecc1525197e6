// gpu_model.h: how long a named GPU would take for work that was counted: a roofline model with a roof for
// each part of the GPU that the work occupies; and the number of warps that fit on it (occupancy).
//
// Most of the model's assumptions favour the GPU: the work is spread evenly over all multiprocessors; each
// part runs at its peak, and all parts run concurrently, so the time is that of the busiest; latency is
// hidden. Address arithmetic, control flow and launches are not counted. Device memory moves each distinct
// sector of a launch once, as if L2 held all of them. An expf, logf, root or division is one instruction of
// the special function unit: the multiply-adds around it (two to six in f32) are not counted. Three
// assumptions are against the GPU: no load hits L1, so every sector that a warp asks for comes from L2; the
// clock of an H100 is the one at which its tensor cores reach their peak; and logf, which nvcc makes of
// multiply-adds alone, counts as special. So a time from here is "modelled": an estimate, not a bound.
#ifndef GPU_MODEL_H
#define GPU_MODEL_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Gpu {
    const char *name;    // "h100"
    const char *device;  // "NVIDIA H100 SXM5 80 GB"
    int multiprocessors;
    double clock;                           // Hz, under load
    double memory_bytes, l2_bytes;          // a second
    double shared_bytes;                    // a clock and multiprocessor, as all below
    double flop_lanes, special_lanes;       // f32 instructions of one lane
    double tensor_flops;                    // bf16 and f16, dense; 8-bit numbers: twice as many
    int warps, blocks, registers;           // that a multiprocessor holds; registers of 4 bytes
    int shared_capacity, shared_per_block;  // bytes
    const char *source;
} Gpu;

const Gpu *gpu_find(const char *name);  // fatal, listing the known names, if it is unknown

// ---- occupancy, by the rules of the CUDA occupancy calculator (compute capability 8.0 and 9.0) ----

typedef struct Occupancy {
    int blocks, warps;       // of a multiprocessor
    double share;            // warps as a share of those that it can hold
    const char *limited_by;  // "warps", "blocks", "registers" or "shared memory"
} Occupancy;
// registers per thread, shared_bytes per block. 0 blocks if not even one fits.
Occupancy gpu_occupancy(const Gpu *gpu, int threads, int registers, int64_t shared_bytes);

// ---- work and time ----

// What one or several launches ask of a GPU, as the emulator counts it (struct CudaCounts in cuda_on_cpu.h,
// and mma instructions) or as a formula predicts it.
typedef struct Work {
    double load_requests, load_sectors;    // of warps to global memory
    double store_requests, store_sectors;  // including atomics
    double memory_sectors;                 // distinct ones of each launch, loaded and stored
    double shared_passes, shared_conflicts;
    double flops, flop_instructions;      // counted per lane; per warp
    double special_instructions;          // counted per warp
    double tensor_flops, tensor_8_flops;  // on 16-bit numbers; on 8-bit ones
    double barriers;
    double lane_steps, warp_steps;  // basic blocks, counted per lane and per warp; they take no time
} Work;

typedef enum Part { PART_MEMORY, PART_L2, PART_SHARED, PART_FLOPS, PART_SPECIAL, PART_TENSOR, PARTS } Part;
const char *part_name(Part part);  // "memory", "L2", "shared", "FMA", "special", "tensor"

typedef struct GpuTime {
    double part[PARTS];  // seconds that each part is busy
    double seconds;      // of the busiest
    Part busiest;
} GpuTime;
GpuTime gpu_time(const Gpu *gpu, const Work *work);

#ifdef __cplusplus
}
#endif
#endif
