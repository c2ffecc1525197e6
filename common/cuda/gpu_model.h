// gpu_model.h: how long a named GPU would take for work that was counted: a roofline with a roof for each
// part of the GPU that the work occupies, and the warps that fit on it.
//
// The model's assumptions, most of them in favour of the GPU: the work is spread evenly over all
// multiprocessors; each part runs at its peak, and all of them beside each other, so that the time is that
// of the busiest; nothing waits for an answer. Not counted are address arithmetic and control flow, and
// launches. Device memory moves each distinct sector of a launch once, as if L2 held all of them. Two are
// against it: no load hits L1, every sector that a warp asks for comes from L2; and the clock of an H100 is
// that of its tensor cores' peak. So a time from here is "modelled", an estimate and not a bound.
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
    double tensor_flops;                    // bf16 and f16, dense; twice as many of 8 bits
    int warps, blocks, registers;           // that a multiprocessor holds; registers of 4 bytes
    int shared_capacity, shared_per_block;  // bytes
    const char *source;
} Gpu;

const Gpu *gpu_find(const char *name);  // fatal with the list of names when unknown

// ---- occupancy, by the rules of the CUDA occupancy calculator (compute capability 8.0 and 9.0) ----

typedef struct Occupancy {
    int blocks, warps;       // of a multiprocessor
    double share;            // of the warps that it can hold
    const char *limited_by;  // "warps", "blocks", "registers" or "shared memory"
} Occupancy;
// registers of a thread, shared_bytes of a block. A block that does not fit at all leaves 0 blocks.
Occupancy gpu_occupancy(const Gpu *gpu, int threads, int registers, int64_t shared_bytes);

// ---- work and time ----

// What one or several launches ask of a GPU, as the emulator counts it (struct CudaCounts in cuda_on_cpu.h,
// and mma instructions) or as a formula predicts it.
typedef struct Work {
    double load_requests, load_sectors;    // of warps to global memory
    double store_requests, store_sectors;  // atomics, too
    double memory_sectors;                 // distinct ones of each launch, loaded and stored
    double shared_passes, shared_conflicts;
    double flops, flop_instructions;      // of lanes; of warps
    double special_instructions;          // of warps
    double tensor_flops, tensor_8_flops;  // of numbers of 16 bits; of 8
    double barriers;
    double lane_steps, warp_steps;  // lanes in basic blocks of warps, and these blocks; they take no time
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
