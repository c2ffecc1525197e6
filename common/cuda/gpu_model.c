// gpu_model.c: see gpu_model.h.
#include "gpu_model.h"

#include <string.h>

// L2: 5120 bytes a clock on an A100 (the architecture's whitepaper); no figure is published for an H100, and
// the same is assumed. Clocks are those at which the published peaks of the tensor cores hold.
static const Gpu gpus[] = {
    {"a100", "NVIDIA A100 SXM4 80 GB", 108, 1.41e9, 2.039e12, 5120 * 1.41e9, 128, 64, 16, 2048, 64, 32,
     65536, 164 << 10, 163 << 10, "NVIDIA A100 Tensor Core GPU Architecture, 2020"},
    {"h100", "NVIDIA H100 SXM5 80 GB", 132, 1.83e9, 3.35e12, 5120 * 1.83e9, 128, 128, 16, 4096, 64, 32,
     65536, 228 << 10, 227 << 10, "NVIDIA H100 Tensor Core GPU Architecture, 2022"},
};
enum { GPUS = sizeof gpus / sizeof *gpus };

const Gpu *gpu_find(const char *name) {
    for (int i = 0; i < GPUS; i++)
        if (strcmp(gpus[i].name, name) == 0) return &gpus[i];
    fatal("--gpu %s is no GPU that this book knows: a100|h100", name);
}

// ---- occupancy ----

enum {
    WARP = 32,
    REGISTERS_AT_ONCE = 256,  // a warp gets a multiple of this
    WARPS_AT_ONCE = 4,        // one warp per scheduler, each of which has its own registers
    SHARED_AT_ONCE = 128,
    SHARED_RESERVED = 1024,  // per block, for the system
    MOST_REGISTERS = 255
};

static int64_t up_to(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

Occupancy gpu_occupancy(const Gpu *gpu, int threads, int registers, int64_t shared_bytes) {
    int warps = (threads + WARP - 1) / WARP;
    if (warps == 0 || warps > 1024 / WARP || registers > MOST_REGISTERS ||
        shared_bytes > gpu->shared_per_block)
        return (Occupancy){0, 0, 0, "a block that does not fit"};
    int64_t of_warp = up_to((int64_t)(registers ? registers : 1) * WARP, REGISTERS_AT_ONCE);
    int64_t by_registers = gpu->registers / of_warp / WARPS_AT_ONCE * WARPS_AT_ONCE / warps;
    int64_t by_shared = gpu->shared_capacity / (up_to(shared_bytes, SHARED_AT_ONCE) + SHARED_RESERVED);
    const struct {
        int64_t blocks;
        const char *what;
    } limits[] = {{gpu->warps / warps, "warps"},
                  {gpu->blocks, "blocks"},
                  {by_registers, "registers"},
                  {by_shared, "shared memory"}};
    int least = 0;
    for (int i = 1; i < 4; i++)
        if (limits[i].blocks < limits[least].blocks) least = i;
    int blocks = (int)limits[least].blocks;
    return (Occupancy){blocks, blocks * warps, (double)(blocks * warps) / gpu->warps, limits[least].what};
}

// ---- time ----

const char *part_name(Part part) {
    static const char *const names[] = {"memory", "L2", "shared", "FMA", "special", "tensor"};
    return names[part];
}

GpuTime gpu_time(const Gpu *gpu, const Work *work) {
    const double sector = 32, pass = 128;  // bytes
    double clocks = gpu->multiprocessors * gpu->clock;
    GpuTime time = {.busiest = PART_MEMORY};
    time.part[PART_MEMORY] = work->memory_sectors * sector / gpu->memory_bytes;
    time.part[PART_L2] = (work->load_sectors + work->store_sectors) * sector / gpu->l2_bytes;
    time.part[PART_SHARED] =
        (work->shared_passes + work->shared_conflicts) * pass / (gpu->shared_bytes * clocks);
    time.part[PART_FLOPS] = work->flop_instructions * WARP / (gpu->flop_lanes * clocks);
    time.part[PART_SPECIAL] = work->special_instructions * WARP / (gpu->special_lanes * clocks);
    time.part[PART_TENSOR] = (work->tensor_flops + work->tensor_8_flops / 2) / (gpu->tensor_flops * clocks);
    for (int p = 1; p < PARTS; p++)
        if (time.part[p] > time.part[time.busiest]) time.busiest = (Part)p;
    time.seconds = time.part[time.busiest];
    return time;
}
