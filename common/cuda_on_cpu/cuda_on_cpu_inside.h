// cuda_on_cpu_inside.h: what the parts of the emulator tell each other.
//
//   cuda_on_cpu.cc         threads as fibers, barriers, warps, launches
//   cuda_on_cpu_memory.cc  allocations, shared memory, and the check of every access
//   cuda_on_cpu_tensor.cc  mma and ldmatrix
//   cuda_on_cpu_wgmma.cc   wgmma
//   cuda_on_cpu_report.cc  the sentence that tells what went wrong
//   cuda_on_cpu_counts.cc  sectors, bank conflicts, divergent branches
//   cuda_on_cpu_tape.cc    the steps of each warp of one block, for a timeline
//   cuda_on_cpu_units.cc   what the machine code of a basic block computes
//   cuda_on_cpu_api.cc     the runtime API
#ifndef CUDA_ON_CPU_INSIDE_H
#define CUDA_ON_CPU_INSIDE_H

#include <stdlib.h>

#include "cuda_on_cpu.h"
// the C library's here, unwatched
#undef memcpy
#undef memset

// A growing array for what runs while a kernel does. Not std::vector, nor anything else that has external
// linkage and that a .cu file could use too: of two copies of a template the linker keeps one, and it may
// be the copy that reports its accesses.
namespace {
template <class T>
struct List {
    T *items;
    size_t count, room;
    void add(const T &item) {
        if (count == room) {
            room = room ? 2 * room : 64;
            items = static_cast<T *>(realloc(static_cast<void *>(items), room * sizeof(T)));
            CHECK(items, "out of host memory for CUDA on the CPU");
        }
        items[count++] = item;
    }
};
}  // namespace

enum { LANES = 32, MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / LANES };

// ---- threads (cuda_on_cpu.cc) ----
enum ThreadState { READY, AT_BARRIER, AT_WARP_OP, AT_MBARRIER, LEFT };

struct Thread {
    void *context;  // where it goes on
    uint3 index;
    uint16_t number, warp, lane;  // number: x first, then y, then z; it says warp and lane
    ThreadState state;
    const char *file;  // where it waits
    int line;
};

// What the lanes of a warp wait for, and how far __syncwarp orders them.
struct Warp {
    uint32_t waiting;  // lanes that stand at a shuffle, a vote or __syncwarp
    uint32_t mask[LANES];
    uint64_t value[LANES], result[LANES];
    int16_t argument[LANES], width[LANES];
    uint8_t op[LANES];
    // Lane l has passed known[l][l] of its __syncwarp, and what lane k did before its known[l][k]-th comes
    // before what l does now. Valid in the interval `time`: a block's barrier orders all.
    uint32_t time;
    uint16_t known[LANES][LANES];
};

// What touches memory beside threads: the tensor cores for a warp (wgmma), and copies (TMA) to an mbarrier.
// They stand where notes on memory name a warp, each with one lane.
enum { TENSOR_CORES = MAX_WARPS, COPIES = 2 * MAX_WARPS, MOST_MBARRIERS = 128 };
struct Agent {
    int warp;
    uint16_t stamp;
};

// What runs now. Time counts intervals: it moves on at each block's start and at each of its barriers.
struct Now {
    const CudaLaunch *launch;  // NULL: host code runs
    Thread *thread;
    uint32_t time, launch_start, block_start;
    int threads;  // of a block
    bool counting, recording;  // recording: counting, too, but of accesses and basic blocks
    const Agent *agent;  // for which the thread touches memory; NULL: for itself
};
extern Now now;
extern Thread threads[MAX_THREADS];
extern Warp warps[MAX_WARPS];

// The number of __syncwarp calls that the thread passed in this interval, and of its arrivals at mbarriers.
static inline uint16_t passed(const Thread *t) {
    const Warp *w = &warps[t->warp];
    return w->time == now.time ? w->known[t->lane][t->lane] : 0;
}

// Whether all that the lanes did before their (stamp + 1)-th __syncwarp comes before what the current
// thread, of the same warp, does now.
static inline bool comes_before(uint32_t lanes, uint16_t stamp) {
    const Thread *me = now.thread;
    const Warp *w = &warps[me->warp];
    lanes &= ~(1u << me->lane);
    if (lanes && w->time != now.time) return false;
    for (; lanes; lanes &= lanes - 1)
        if (w->known[me->lane][__builtin_ctz(lanes)] <= stamp) return false;
    return true;
}

// ---- order between warps (cuda_on_cpu_clocks.inc, cuda_on_cpu_mbarrier.inc) ----
// Lanes of the warp know what any of them knows of other warps.
void clocks_join(const Warp *warp, uint32_t lanes);
// The lanes of the warp know what its tensor cores have read before `stamp`.
void clocks_know_tensor_cores(const Warp *warp, uint16_t stamp);
// These lanes stand at one operation of the warp: what each has waited for at mbarriers is behind all.
void mbarriers_meet(int warp, uint32_t lanes);
// A copy that somebody waits for arrives; false: there is none.
bool copy_arrives(void);
// Ends the program: what the thread, which waits at an mbarrier for ever, waits for.
void explain_mbarrier(Thread *thread) NO_RETURN;
void wait_at_mbarrier(const char *file, int line);
void wake(Thread *thread);

// Ends the program with the sentence; for threads.
void fail(const char *sentence) NO_RETURN;

// Ends the program unless a GPU could start it (cuda_on_cpu_api.cc).
void check_launch(const CudaLaunch *launch);
// The same, of a kernel that has touched so many bytes of static shared arrays: it has them beside the
// dynamic one.
void check_static_shared(const CudaLaunch *launch, size_t bytes);

// ---- fragments (cuda_on_cpu_tensor.cc): all lanes of the warp have come ----
void exchange_rows(Warp *warp, bool transposed);
void multiply_fragments(Warp *warp);
// The values of all codes of a format, by the function that widens one.
const float *values_of(float (*widen)(uint16_t));

// ---- wgmma (cuda_on_cpu_wgmma.cc) ----
void wgmma_meet(Warp *warp, int op);
// The current thread has left the kernel; last: so have all others of the block.
void wgmma_leave(bool last);
// Products that are not waited for, of the block; and whether one reads these bytes of shared memory: then
// it ends the program.
extern int wgmma_in_flight;
void wgmma_need_unread(uintptr_t address, size_t size, const void *site);

// ---- what is said (cuda_on_cpu_report.cc) ----
// Ends the program: "kernel k, block b, thread t, <line of the site>: <what the thread did>". The site is a
// return address in the kernel, or NULL. Host code has no more to tell than its line.
void broken(const void *site, const char *format, ...) PRINTF_LIKE(2, 3) NO_RETURN;
// "thread (3, 1, 0)", as short as the block allows. Rotates over static buffers.
const char *thread_text(const Thread *thread);
// "common/cuda/ops_cuda.cu:120" of a return address; static buffers.
const char *line_text(const void *site);
// Sites fit 32 bits as distances from where the program was loaded.
extern uintptr_t load_base;
static inline uint32_t site_number(const void *site) {
    return (uint32_t)(reinterpret_cast<uintptr_t>(site) - load_base);
}
static inline const void *site_address(uint32_t number) {
    return reinterpret_cast<const void *>(load_base + number);
}

// One symbol of the program: calls visit for each. Fatal without a symbol table.
void each_symbol(void (*visit)(void *context, const char *name, int type, uintptr_t value, size_t size),
                 void *context);

// ---- memory (cuda_on_cpu_memory.cc) ----
enum AccessKind { LOAD, STORE, ATOMIC };
// One access of the current thread, as if an instruction of its kernel had made it.
void memory_access(AccessKind kind, const void *address, size_t size, const void *site);
// Ends the program unless the address, of which `what` tells, is in the block's shared memory.
void memory_need_shared(const char *what, const void *address, const void *site);
// The tensor cores read shared memory for the current thread.
void memory_async_load(const void *address, size_t size, const void *site);
// The same address as shared memory's instructions have it, in 18 bits; and back. bit 18: it is static.
uint32_t memory_shared_number(const void *address, const void *site);
char *memory_shared_at(uint32_t number);
// The current thread has left the kernel; last: so have all others of the block.
void memory_leave(bool last);
void memory_start_block(const CudaLaunch *launch);
// The stacks of the threads, whose accesses nobody watches.
void memory_set_stacks(void *stacks, size_t bytes);
void *memory_allocate(size_t bytes);
// False when it is not the start of a live allocation.
bool memory_release(void *memory);
size_t memory_in_use(void);
// With ULTRASCALE_GUARD=1 (guard.h) device memory is closed to the host but between these two, which nest.
void memory_open(void);
void memory_close(void);
// Whether any byte of it is the device's; and, if so, whether all lies in one live allocation (else
// broken).
bool memory_is_device(const void *address);
void memory_check_host(const char *call, const void *address, size_t bytes, const void *site);

// ---- the clock of events (cuda_on_cpu_api.cc) ----
// Work that a device would be so long at, for who stands in for a library.
void cuda_pass(double seconds);

// ---- counts (cuda_on_cpu_counts.cc) ----
enum Space { GLOBAL, SHARED };
void count_access(Space space, AccessKind kind, uintptr_t address, size_t size, uint32_t site);
void count_barrier(void);
void count_tensor(int64_t flops, int bits);
// A copy by TMA: rows of a box, of so many bytes from `address` on; one request, and passes of shared
// memory.
void count_copy(const uintptr_t *rows, const size_t *bytes, int count);
void count_passes(int64_t passes);
void count_block_end(void);
void count_launch_end(void);

// ---- steps of warps, of which lane 0 tells (cuda_on_cpu_tape.cc); nothing unless `recording` ----
void tape_block(uint32_t site);
void tape_access(Space space, size_t size);
// flops: of 16 bits, or as many as take the same time.
void tape_product(int warp, int flops, int64_t passes, int line);
void tape_commit(int warp);
void tape_finish(int warp, uint32_t pending);
// The phase of the block's barriers: mbarriers and named ones, or BLOCK_BARRIER for __syncthreads.
enum { BLOCK_BARRIER = MOST_MBARRIERS };
void tape_arrive(int64_t barrier, uint32_t phase);
void tape_await(int64_t barrier, uint32_t phase);
void tape_copy(int64_t barrier, uint32_t phase, size_t bytes);

// ---- units (cuda_on_cpu_units.cc) ----
// What one lane computes in a basic block.
struct BlockWork {
    int flops, special, flop_instructions, special_instructions;
};
// site: the return address of the block's call of __sanitizer_cov_trace_pc, as site_number tells it.
const BlockWork &block_work(uint32_t site);

#endif
