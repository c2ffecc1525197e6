// cuda_on_cpu_inside.h: the interfaces between the parts of the emulator.
//
//   cuda_on_cpu.cc         threads as fibers, barriers, warps, launches
//   cuda_on_cpu_memory.cc  allocations, shared memory, and the check of every access
//   cuda_on_cpu_tensor.cc  mma and ldmatrix
//   cuda_on_cpu_wgmma.cc   wgmma
//   cuda_on_cpu_report.cc  the sentence that says what went wrong
//   cuda_on_cpu_counts.cc  sectors, bank conflicts, divergent branches
//   cuda_on_cpu_tape.cc    the steps of each warp of one block, for a timeline
//   cuda_on_cpu_units.cc   what the machine code of a basic block computes
//   cuda_on_cpu_api.cc     the runtime API
//   cuda_on_cpu_streams.cc its streams and events
#ifndef CUDA_ON_CPU_INSIDE_H
#define CUDA_ON_CPU_INSIDE_H

#include <stdlib.h>

#include "cuda_on_cpu.h"
// the C library's here, not the checked ones
#undef memcpy
#undef memset

// A growing array for code that runs during a kernel. Not std::vector, or anything else with external linkage
// that a .cu file could also use: the linker keeps only one copy of a template, and it may be the one that
// reports its accesses.
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

// The next number of a sequence (splitmix64).
static inline uint64_t draw(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

enum { LANES = 32, MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / LANES };

// ---- threads (cuda_on_cpu.cc) ----
enum ThreadState { READY, AT_BARRIER, AT_WARP_OP, AT_MBARRIER, LEFT };

struct Thread {
    void *context;  // where it continues
    uint3 index;
    uint16_t number, warp, lane;  // number: x fastest, then y, then z; it determines warp and lane
    ThreadState state;
    const char *file;  // where it waits
    int line;
};

// What the lanes of a warp wait for, and how far __syncwarp has ordered them.
struct Warp {
    uint32_t waiting;  // lanes that wait at a shuffle, a vote or __syncwarp
    uint32_t mask[LANES];
    uint64_t value[LANES], result[LANES];
    int16_t argument[LANES], width[LANES];
    uint8_t op[LANES];
    // Lane l has passed known[l][l] calls of __syncwarp, and what lane k did before its known[l][k]-th call
    // comes before what l does now. Valid in the interval `time`: a barrier of the block orders everything.
    uint32_t time;
    uint16_t known[LANES][LANES];
};

// What accesses memory besides threads: the tensor cores for a warp (wgmma), and copies (TMA) that arrive
// at an mbarrier. In notes on memory each of them takes the place of a warp, with a single lane.
enum { TENSOR_CORES = MAX_WARPS, COPIES = 2 * MAX_WARPS, MOST_MBARRIERS = 128 };
struct Agent {
    int warp;
    uint16_t stamp;
};

// What runs now. Time counts intervals: a new one begins at each block's start and at each of its barriers.
struct Now {
    const CudaLaunch *launch;  // NULL: host code runs
    Thread *thread;
    uint32_t time, launch_start, block_start;
    int threads;  // of a block
    bool counting, recording;  // recording: counting, but accesses and basic blocks go to the tape
    const Agent *agent;  // for which the thread accesses memory; NULL: for itself
};
extern Now now;
extern Thread threads[MAX_THREADS];
extern Warp warps[MAX_WARPS];

// The number of __syncwarp calls and arrivals at mbarriers of the thread in this interval.
static inline uint16_t passed(const Thread *t) {
    const Warp *w = &warps[t->warp];
    return w->time == now.time ? w->known[t->lane][t->lane] : 0;
}

// Whether everything that the lanes did before their (stamp + 1)-th __syncwarp comes before what the current
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
// From now on each of these lanes is ordered after what any of them is ordered after in other warps.
void clocks_join(const Warp *warp, uint32_t lanes);
// From now on the lanes of the warp are ordered after what its tensor cores read before `stamp`.
void clocks_know_tensor_cores(const Warp *warp, uint16_t stamp);
// These lanes meet at an operation of the warp: what each has waited for at mbarriers is over for all.
void mbarriers_meet(int warp, uint32_t lanes);
// Lets a copy arrive that some thread waits for; false: there is none.
bool copy_arrives(void);
// Ends the program, saying what the thread, which waits at an mbarrier for ever, waits for.
void explain_mbarrier(Thread *thread) NO_RETURN;
void wait_at_mbarrier(const char *file, int line);
void wake(Thread *thread);

// Ends the program with the sentence; for threads.
void fail(const char *sentence) NO_RETURN;

// Ends the program unless a GPU could start it (cuda_on_cpu_api.cc).
void check_launch(const CudaLaunch *launch);
// The same for a kernel that has accessed so many bytes of static shared arrays: they add to the dynamic one.
void check_static_shared(const CudaLaunch *launch, size_t bytes);

// ---- fragments (cuda_on_cpu_tensor.cc): once all lanes of the warp have arrived ----
void exchange_rows(Warp *warp, bool transposed);
void multiply_fragments(Warp *warp);
// The values of all codes of a format, from the function that widens one.
const float *values_of(float (*widen)(uint16_t));

// ---- wgmma (cuda_on_cpu_wgmma.cc) ----
void wgmma_meet(Warp *warp, int op);
// The current thread has left the kernel; last: and so have all others of the block.
void wgmma_leave(bool last);
// The block's products that have not been waited for. And a check that ends the program if one of them reads
// these bytes of shared memory.
extern int wgmma_in_flight;
void wgmma_need_unread(uintptr_t address, size_t size, const void *site);

// ---- messages (cuda_on_cpu_report.cc) ----
// Ends the program: "kernel k, block b, thread t, <line of the site>: <what the thread did>". The site is a
// return address in the kernel, or NULL. For host code only the line is named.
void broken(const void *site, const char *format, ...) PRINTF_LIKE(2, 3) NO_RETURN;
// "thread (3, 1, 0)", as short as the block allows. Rotates over static buffers.
const char *thread_text(const Thread *thread);
// "common/cuda/ops_cuda.cu:120" of a return address; static buffers.
const char *line_text(const void *site);
// Sites fit into 32 bits as offsets from where the program was loaded.
extern uintptr_t load_base;
static inline uint32_t site_number(const void *site) {
    return (uint32_t)(reinterpret_cast<uintptr_t>(site) - load_base);
}
static inline const void *site_address(uint32_t number) {
    return reinterpret_cast<const void *>(load_base + number);
}

// Calls visit for each symbol of the program. Fatal without a symbol table.
void each_symbol(void (*visit)(void *context, const char *name, int type, uintptr_t value, size_t size),
                 void *context);

// ---- memory (cuda_on_cpu_memory.cc) ----
enum AccessKind { LOAD, STORE, ATOMIC };
// An access of the current thread, as if an instruction of its kernel had made it.
void memory_access(AccessKind kind, const void *address, size_t size, const void *site);
// Ends the program unless the address, described by `what`, is in the block's shared memory.
void memory_need_shared(const char *what, const void *address, const void *site);
// The tensor cores read shared memory for the current thread.
void memory_async_load(const void *address, size_t size, const void *site);
// The address as instructions for shared memory encode it, in 18 bits; and back. Bit 18: it is static.
uint32_t memory_shared_number(const void *address, const void *site);
char *memory_shared_at(uint32_t number);
// The current thread has left the kernel; last: and so have all others of the block.
void memory_leave(bool last);
void memory_start_block(const CudaLaunch *launch);
// The stacks of the threads: accesses to them are not checked.
void memory_set_stacks(void *stacks, size_t bytes);
size_t memory_capacity(void);
void *memory_allocate(size_t bytes);
// False if it is not the start of a live allocation.
bool memory_release(void *memory);
size_t memory_in_use(void);
// With ULTRASCALE_GUARD=1 (guard.h) device memory is closed to the host except between these two, which nest.
void memory_open(void);
void memory_close(void);
// Whether the address is in device memory. And a check that the bytes are in one live allocation, fatal if
// not.
bool memory_is_device(const void *address);
void memory_check_host(const char *call, const void *address, size_t bytes, const void *site);

// ---- the runtime API (cuda_on_cpu_api.cc) ----
// Returns the error, and keeps it for cudaGetLastError.
cudaError_t cuda_told(cudaError_t error);
// The host makes a call that waits for the device, or that may do so on a GPU (cuda_on_cpu_waits).
void cuda_count_wait(void);
// In the child of a process that has used CUDA before it forked.
bool cuda_is_lost(void);

// ---- the clock of events (cuda_on_cpu_streams.cc) ----
// Lets the time of so much work on a device pass; for emulations of libraries.
void cuda_pass(double seconds);

// ---- counts (cuda_on_cpu_counts.cc) ----
enum Space { GLOBAL, SHARED };
void count_access(Space space, AccessKind kind, uintptr_t address, size_t size, uint32_t site);
void count_barrier(void);
void count_tensor(int64_t flops, int bits);
// A copy by TMA: rows of a box, each with an address and bytes; one request, and passes of shared memory.
void count_copy(const uintptr_t *rows, const size_t *bytes, int count);
void count_passes(int64_t passes);
void count_block_end(void);
void count_launch_end(void);

// ---- steps of warps, as lane 0 executes them (cuda_on_cpu_tape.cc); nothing unless `recording` ----
void tape_block(uint32_t site);
void tape_access(Space space, size_t size);
// flops: on 16-bit numbers, or as many of these as take the same time.
void tape_product(int warp, int flops, int64_t passes, int line);
void tape_commit(int warp);
void tape_finish(int warp, uint32_t pending);
// The phase of a barrier of the block: an mbarrier, a named one, or BLOCK_BARRIER for __syncthreads.
enum { BLOCK_BARRIER = MOST_MBARRIERS };
void tape_arrive(int64_t barrier, uint32_t phase);
void tape_await(int64_t barrier, uint32_t phase);
void tape_copy(int64_t barrier, uint32_t phase, size_t bytes);

// ---- units (cuda_on_cpu_units.cc) ----
// What one lane computes in a basic block.
struct BlockWork {
    int flops, special, flop_instructions, special_instructions;
};
// site: the return address of the block's call of __sanitizer_cov_trace_pc, by its site_number.
const BlockWork &block_work(uint32_t site);

#endif
