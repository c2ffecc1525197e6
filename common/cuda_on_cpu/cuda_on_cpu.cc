// cuda_on_cpu.cc: the threads of a block as fibers. A thread runs until it waits, at a barrier or for lanes
// of its warp; then the next ready one continues. Nothing runs concurrently, so results are deterministic;
// what would depend on timing on a GPU is found by the rules of cuda_on_cpu_memory.cc.
//
// Fibers are created once and serve all blocks of all launches. On one core of a Xeon (Sapphire Rapids) a
// thread costs 20 ns to run, 35 ns at each barrier and 50 ns at each shuffle; a memory access costs 10 ns.
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <boost/context/detail/fcontext.hpp>
#include <numeric>

#include "cuda_on_cpu_inside.h"
#include "cuda_on_cpu_streams.h"

using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

// What kernels read as threadIdx, blockIdx, blockDim and gridDim.
extern "C" {
uint3 cuda_thread_index, cuda_block_index, cuda_block_dim, cuda_grid_dim;
}

Now now;
Thread threads[MAX_THREADS];
Warp warps[MAX_WARPS];

// ---- switching ----

static Thread host;         // the caller of cuda_run
static char failure[2048];  // what a thread has found

// Ready threads, in a ring. A warp whose lanes have met goes first: its stacks are in the cache.
static uint16_t ring[2 * MAX_THREADS];
static unsigned ring_head, ring_tail;  // only ever incremented; tail - head threads are ready
enum { RING = 2 * MAX_THREADS };

static void ready_last(Thread *t) {
    t->state = READY;
    ring[ring_tail++ % RING] = t->number;
}

static void ready_first(Thread *t) {
    t->state = READY;
    ring[--ring_head % RING] = t->number;
}

// Switches to another thread; returns when this one is switched to again.
static void switch_to(Thread *next) {
    Thread *me = now.thread;
    now.thread = next;
    cuda_thread_index = next->index;
    transfer_t from = jump_fcontext(next->context, me);
    static_cast<Thread *>(from.data)->context = from.fctx;
}

static void explain_deadlock(void) NO_RETURN;

static int left;  // threads of this block that have ended

// Copies are as slow as possible: none arrives before all threads wait.
static void run_next(void) {
    while (ring_head == ring_tail && left < now.threads && copy_arrives()) {}
    if (ring_head != ring_tail) switch_to(&threads[ring[ring_head++ % RING]]);
    else if (left == now.threads) switch_to(&host);
    else explain_deadlock();
}

void wake(Thread *t) { ready_last(t); }

void wait_at_mbarrier(const char *file, int line) {
    now.thread->state = AT_MBARRIER;
    now.thread->file = file, now.thread->line = line;
    run_next();
}

static void fiber(transfer_t from) {
    static_cast<Thread *>(from.data)->context = from.fctx;
    for (;;) {
        now.launch->run(now.launch);
        now.thread->state = LEFT;
        left++;
        wgmma_leave(left == now.threads);
        memory_leave(left == now.threads);
        run_next();
    }
}

// ---- stacks: the local memory of the threads, each above a guard page ----

enum { STACK = 64 << 10, GUARD = 4096 };

static char *stacks;
static struct sigaction fault_before;

// A fault anywhere else happens again, without this handler.
static void on_fault(int number, siginfo_t *info, void *) {
    size_t offset = (size_t)(static_cast<char *>(info->si_addr) - stacks);
    if (!now.launch || offset >= (size_t)MAX_THREADS * STACK) {
        sigaction(number, &fault_before, NULL);
        if (info->si_code <= 0) raise(number);  // sent by kill(): it would not happen again by itself
        return;
    }
    broken(NULL, "needs more than %d kB of local memory, which is all that a thread has on the CPU",
           (STACK - GUARD) >> 10);
}

// The handler needs its own stack: on the one that has overflowed it would fault again.
static void watch_stacks(void) {
    static char other_stack[128 << 10];
    stack_t other = {other_stack, 0, sizeof other_stack};
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaltstack(&other, NULL);
    sigaction(SIGSEGV, &action, &fault_before);
}

static void make_fibers(void) {
    size_t bytes = (size_t)MAX_THREADS * STACK;
    stacks = static_cast<char *>(
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    CHECK(stacks != MAP_FAILED, "out of host memory for the stacks of %d threads", (int)MAX_THREADS);
    memory_set_stacks(stacks, bytes);
    watch_stacks();
    for (int i = 0; i < MAX_THREADS; i++) {
        char *low = stacks + (size_t)i * STACK;
        mprotect(low, GUARD, PROT_NONE);
        // Each begins on different cache lines: at equal offsets, all would share a few sets of the cache.
        size_t shift = (size_t)i % 37 * 192;
        threads[i].context = make_fcontext(low + STACK - shift, STACK - GUARD - shift, fiber);
    }
}

// ---- order: natural, or drawn from a seed ----

static uint64_t order_seed;
static bool order_is_set;

void cuda_on_cpu_order(uint64_t seed) {
    if (streams_defer()) cudaDeviceSynchronize();  // what was launched before keeps its order
    order_seed = seed;
    order_is_set = true;
}

template <class T>
static void shuffle(T *x, size_t count, uint64_t *state) {
    for (size_t i = count; i > 1; i--) std::swap(x[i - 1], x[draw(state) % i]);
}

static uint16_t turns[MAX_THREADS];  // the order of this block's threads

// Lanes of a warp stay together, as they do on a GPU.
static void order_threads(uint64_t *state) {
    int warps = (now.threads + LANES - 1) / LANES, count = 0;
    uint16_t warp_turns[MAX_WARPS], lane_turns[LANES];
    for (int w = 0; w < warps; w++) warp_turns[w] = (uint16_t)w;
    for (int l = 0; l < LANES; l++) lane_turns[l] = (uint16_t)l;
    if (order_seed) shuffle(warp_turns, (size_t)warps, state);
    for (int w = 0; w < warps; w++) {
        if (order_seed) shuffle(lane_turns, LANES, state);
        for (int l = 0; l < LANES; l++) {
            int number = warp_turns[w] * LANES + lane_turns[l];
            if (number < now.threads) turns[count++] = (uint16_t)number;
        }
    }
}

// ---- barriers of the block ----

static int arrived, votes, votes_before;

static int barrier(int predicate, const char *file, int line) {
    static const Thread *first;
    Thread *me = now.thread;
    me->file = file, me->line = line;
    if (arrived == 0) first = me, votes = 0;
    else if (line != first->line || (file != first->file && strcmp(file, first->file) != 0))
        broken(NULL, "stands at __syncthreads() of %s:%d while %s stands at that of %s:%d", file, line,
               thread_text(first), first->file, first->line);
    votes += predicate != 0;
    tape_arrive(BLOCK_BARRIER, now.time - now.block_start);
    tape_await(BLOCK_BARRIER, now.time - now.block_start);
    if (++arrived < now.threads) {
        me->state = AT_BARRIER;
        run_next();
        return votes_before;
    }
    arrived = 0;
    votes_before = votes;
    now.time++;
    if (now.counting) count_barrier();
    for (int i = 0; i < now.threads; i++)
        if (&threads[turns[i]] != me) ready_last(&threads[turns[i]]);
    return votes_before;
}

void __syncthreads(const char *file, int line) { barrier(0, file, line); }
int __syncthreads_or(int predicate, const char *file, int line) {
    return barrier(predicate, file, line) > 0;
}
int __syncthreads_count(int predicate, const char *file, int line) {
    return barrier(predicate, file, line);
}
int __syncthreads_and(int predicate, const char *file, int line) {
    return barrier(predicate, file, line) == now.threads;
}

// ---- warps ----

static Thread *lane_of(int warp, int lane) { return &threads[warp * LANES + lane]; }

// Lanes of a block's last warp that do not exist count as having arrived.
static uint32_t lanes_of_warp(int warp) {
    int count = now.threads - warp * LANES;
    return count >= LANES ? 0xffffffff : (1u << count) - 1;
}

static const char *op_name(int op) {
    static const char *const names[] = {
        "__syncwarp",    "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync",
        "__ballot_sync", "__any_sync",  "__all_sync",     "ldmatrix",         "mma",
        "wgmma",         "wgmma_fence", "wgmma_commit",   "wgmma_wait",       "registers_give or _take"};
    return names[op];
}

unsigned __activemask(void) {
    unsigned mask = 0;
    int warp = now.thread->warp;
    for (uint32_t rest = lanes_of_warp(warp); rest; rest &= rest - 1)
        if (lane_of(warp, __builtin_ctz(rest))->state != LEFT) mask |= rest & -rest;
    return mask;
}

static bool stand_together(int warp, int a, int b) {
    const Warp *w = &warps[warp];
    return w->op[a] == w->op[b] && w->mask[a] == w->mask[b] && w->width[a] == w->width[b] &&
           lane_of(warp, a)->line == lane_of(warp, b)->line;
}

static bool all_have_come(int warp, int lane, uint32_t mask) {
    if ((warps[warp].waiting & mask) != mask) return false;
    for (uint32_t rest = mask; rest; rest &= rest - 1)
        if (!stand_together(warp, lane, __builtin_ctz(rest))) return false;
    return true;
}

// The lane whose value `lane` gets, as the programming guide defines it: if that is beyond its segment, a
// lane gets its own value.
static int source_lane(int op, int lane, int argument, int width) {
    int begin = lane & ~(width - 1), end = begin + width, from = lane;
    if (op == WARP_SHFL) return begin + (argument & (width - 1));
    if (op == WARP_UP) from -= argument;
    if (op == WARP_DOWN) from += argument;
    // xor may reach an earlier segment, never a later one.
    if (op == WARP_XOR) return (lane ^ argument) < end ? lane ^ argument : lane;
    return from >= begin && from < end ? from : lane;
}

// The order that __syncwarp makes: each lane is now after what any of them did, or was after.
static void order_lanes(Warp *w, uint32_t mask) {
    if (w->time != now.time) {
        memset(w->known, 0, sizeof w->known);
        w->time = now.time;
    }
    uint16_t joined[LANES] = {0};
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        int l = __builtin_ctz(rest);
        w->known[l][l]++;
        for (int k = 0; k < LANES; k++)
            if (joined[k] < w->known[l][k]) joined[k] = w->known[l][k];
    }
    for (uint32_t rest = mask; rest; rest &= rest - 1)
        memcpy(w->known[__builtin_ctz(rest)], joined, sizeof joined);
    clocks_join(w, mask);
}

// All lanes of the mask have arrived, and `lane` is one of them: computes what each gets.
static void meet(int warp, int lane, uint32_t mask) {
    Warp *w = &warps[warp];
    int op = w->op[lane], width = w->width[lane];
    mbarriers_meet(warp, mask);
    if (op == WARP_SYNC) return order_lanes(w, mask);
    if (op == WARP_LDMATRIX) return exchange_rows(w, w->argument[lane] != 0);
    if (op == WARP_MMA) return multiply_fragments(w);
    if (op >= WARP_WGMMA) return wgmma_meet(w, op);
    if (op >= WARP_BALLOT) {
        uint32_t ballot = 0;
        for (uint32_t rest = mask; rest; rest &= rest - 1)
            if (w->value[__builtin_ctz(rest)]) ballot |= rest & -rest;
        uint64_t result = op == WARP_BALLOT ? ballot : op == WARP_ANY ? ballot != 0 : ballot == mask;
        for (uint32_t rest = mask; rest; rest &= rest - 1) w->result[__builtin_ctz(rest)] = result;
        return;
    }
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        int to = __builtin_ctz(rest), from = source_lane(op, to, w->argument[to], width);
        if (!(mask >> from & 1)) {
            const Thread *t = lane_of(warp, to);
            broken(NULL, "%s of %s:%d gives %s the value of lane %d, which does not take part", op_name(op),
                   t->file, t->line, thread_text(t), from);
        }
        w->result[to] = w->value[from];
    }
}

uint64_t cuda_warp_op(CudaWarpOp op, unsigned mask, uint64_t value, int argument, int width,
                      const char *file, int line) {
    Thread *me = now.thread;
    int lane = me->lane, warp = me->warp;
    Warp *w = &warps[warp];
    me->file = file, me->line = line;
    if (!(mask >> lane & 1))
        broken(NULL, "calls %s (%s:%d) with the mask 0x%08x, which lacks its own lane %d", op_name(op),
               file, line, mask, lane);
    if (width < 1 || width > LANES || (width & (width - 1)))
        broken(NULL, "calls %s (%s:%d) with the width %d, which is no power of two up to 32", op_name(op),
               file, line, width);
    w->op[lane] = op, w->mask[lane] = mask, w->value[lane] = value, w->width[lane] = (int16_t)width;
    // All distances beyond a segment are equivalent.
    w->argument[lane] = (int16_t)(op == WARP_SHFL              ? argument & (LANES - 1)
                                  : (unsigned)argument > LANES ? LANES
                                                               : argument);
    w->waiting |= 1u << lane;
    mask &= lanes_of_warp(warp);
    if (!all_have_come(warp, lane, mask)) {
        me->state = AT_WARP_OP;
        run_next();
        return w->result[lane];
    }
    meet(warp, lane, mask);
    w->waiting &= ~mask;
    for (uint32_t rest = mask & ~(1u << lane); rest;) {
        int last = 31 - __builtin_clz(rest);  // the first to be put at the front of the ring
        rest &= ~(1u << last);
        ready_first(lane_of(warp, last));
    }
    return w->result[lane];
}

void __syncwarp(unsigned mask, const char *file, int line) {
    cuda_warp_op(WARP_SYNC, mask, 0, 0, LANES, file, line);
}

// ---- launches ----

static void run_block(const CudaLaunch *launch, uint64_t *state) {
    now.block_start = ++now.time;
    left = arrived = 0;
    for (int w = 0; w * LANES < now.threads; w++) warps[w].waiting = 0;
    memory_start_block(launch);
    order_threads(state);
    for (int i = 0; i < now.threads; i++) ready_last(&threads[turns[i]]);
    now.launch = launch;
    run_next();
    now.launch = NULL;
    if (*failure) fatal("%s", failure);
    if (now.counting) count_block_end();
}

static void run_kernel(const CudaLaunch *launch);

void cuda_run(const CudaLaunch *launch) {
    static pthread_t owner;
    if (!threads[0].context) {
        owner = pthread_self();
        make_fibers();
        if (!order_is_set && getenv("CUDA_ON_CPU_SEED"))
            cuda_on_cpu_order(strtoull(getenv("CUDA_ON_CPU_SEED"), NULL, 0));
    }
    // Shared memory is thread-local, so only one OS thread can use it.
    CHECK(pthread_equal(owner, pthread_self()),
          "the kernel %s is launched (%s:%d) by another OS thread than the first; CUDA on the CPU has one",
          launch->name, launch->file, launch->line);
    check_launch(launch);
    if (!streams_defer()) return run_kernel(launch);
    // A launch copies the arguments; this alignment is enough for all of them.
    enum : size_t { ALIGNED = 128 };
    void *copy = aligned_alloc(ALIGNED, (launch->size + ALIGNED - 1) / ALIGNED * ALIGNED);
    CHECK(copy, "out of host memory for the arguments of %s", launch->name);
    memcpy(copy, static_cast<const void *>(launch), launch->size);
    stream_add(launch->stream, [copy] {
        run_kernel(static_cast<const CudaLaunch *>(copy));
        return free(copy), true;
    });
}

static void run_kernel(const CudaLaunch *launch) {
    CHECK(now.time < 0xf0000000, "CUDA on the CPU has run as many blocks and barriers as one process can");
    const dim3 &g = launch->grid, &b = launch->block;
    now.threads = (int)(b.x * b.y * b.z);
    for (int i = 0; i < now.threads; i++) {
        unsigned n = (unsigned)i;
        threads[i].index = uint3{n % b.x, n / b.x % b.y, n / b.x / b.y};
        threads[i].number = (uint16_t)n, threads[i].warp = (uint16_t)(n / LANES);
        threads[i].lane = (uint16_t)(n % LANES);
    }
    cuda_block_dim = uint3{b.x, b.y, b.z};
    cuda_grid_dim = uint3{g.x, g.y, g.z};
    now.thread = &host;
    now.launch_start = now.time + 1;
    uint64_t blocks = now.recording ? 1 : (uint64_t)g.x * g.y * g.z, state = order_seed;
    // A step coprime to the number of blocks visits each of them once.
    uint64_t first = order_seed ? draw(&state) % blocks : 0, step = order_seed ? draw(&state) % blocks : 1;
    while (std::gcd(step, blocks) != 1) step++;
    memory_open();
    for (uint64_t i = 0; i < blocks; i++) {
        uint64_t n = (uint64_t)((first + (unsigned __int128)step * i) % blocks);
        cuda_block_index = uint3{(unsigned)(n % g.x), (unsigned)(n / g.x % g.y), (unsigned)(n / g.x / g.y)};
        run_block(launch, &state);
    }
    if (now.counting) count_launch_end();
    memory_close();
}

// ---- ends ----

// What a thread has found is reported by the host, which has a large stack.
void fail(const char *sentence) {
    snprintf(failure, sizeof failure, "%s", sentence);
    switch_to(&host);
    abort();  // this thread is never resumed
}

// No thread can continue: names one that waits, and one that it waits for.
static void explain_deadlock(void) {
    for (int i = 0; i < now.threads; i++) {
        Thread *t = &threads[i];
        if (t->state != AT_WARP_OP) continue;
        now.thread = t;
        const Warp *w = &warps[t->warp];
        const char *op = op_name(w->op[t->lane]);
        for (uint32_t rest = w->mask[t->lane] & lanes_of_warp(t->warp); rest; rest &= rest - 1) {
            const Thread *other = lane_of(t->warp, __builtin_ctz(rest));
            if (other->state == LEFT)
                broken(NULL, "waits at %s (%s:%d) for %s, which has left the kernel", op, t->file, t->line,
                       thread_text(other));
            if (other->state == AT_MBARRIER) explain_mbarrier(&threads[other->number]);
            if (other->state == AT_BARRIER)
                broken(NULL, "waits at %s (%s:%d) for %s, which stands at __syncthreads() (%s:%d)", op,
                       t->file, t->line, thread_text(other), other->file, other->line);
            if (!stand_together(t->warp, t->lane, other->lane))
                broken(NULL,
                       "waits at %s with the mask 0x%08x (%s:%d) for %s, which stands at %s with the mask "
                       "0x%08x (%s:%d)",
                       op, w->mask[t->lane], t->file, t->line, thread_text(other),
                       op_name(w->op[other->lane]), w->mask[other->lane], other->file, other->line);
        }
    }
    for (int i = 0; i < now.threads; i++)
        if (threads[i].state == AT_MBARRIER) explain_mbarrier(&threads[i]);
    Thread *waits = NULL;
    const Thread *gone = NULL;
    for (int i = now.threads; i-- > 0;) {
        if (threads[i].state == AT_BARRIER) waits = &threads[i];
        if (threads[i].state == LEFT) gone = &threads[i];
    }
    now.thread = waits;
    broken(NULL,
           "waits at __syncthreads() (%s:%d) with %d of the block's %d threads; %s has left the kernel",
           waits->file, waits->line, arrived, now.threads, thread_text(gone));
}
