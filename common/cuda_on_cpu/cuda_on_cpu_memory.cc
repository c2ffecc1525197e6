// cuda_on_cpu_memory.cc: device memory, shared memory, and the checks before each load and store.
//
// Every array is a region. Each word of a region, of 16 bytes down to 1, as the smallest access to it
// needs, has two notes: which thread wrote it last, and which read it last, in which interval of time. An
// access in the same interval as another thread's note is a race, if one of the two writes and no
// __syncwarp lies between (the rule of FastTrack, Flanagan and Freund 2009, with the intervals between
// CUDA's barriers as clocks). One thing is missed: if lanes read a word after different numbers of partial
// __syncwarp calls, only the smallest number is kept, and a race with one of these lanes may go unnoticed.
#include <cxxabi.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda_on_cpu_inside.h"
#include "tensor/guard.h"

// ---- regions ----

struct Note {
    uint32_t time;  // 0: no access yet
    uint32_t site, lanes;
    uint16_t stamp;  // __syncwarp calls that the lanes had passed
    uint8_t warp, flags;
};
// IN_FLIGHT: by cp.async or TMA. CROWD: with MANY_WARPS, `lanes` is the first of a list (clocks.inc).
enum { BY_ATOMIC = 1, MANY_WARPS = 2, OTHER_BLOCK = 4, IN_FLIGHT = 8, CROWD = 16 };

struct Word {
    Note write, read;
};

struct Region {
    uintptr_t start;
    size_t size;
    Word *words;     // NULL before the first access
    uint32_t block;  // shared memory: the block_start for which it was filled with 0xff
    uint8_t grain;   // a word is 1 << grain bytes
    bool live, shared;
    const char *name;
};

enum { COARSEST = 4, POISON = 0xff };

static size_t words_bytes(const Region *r) { return ((r->size >> r->grain) + 2) * sizeof(Word); }

static Word *new_words(const Region *r) {
    // Pages without notes cost nothing.
    void *words = mmap(NULL, words_bytes(r), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(words != MAP_FAILED, "out of host memory for the notes on %zu bytes of device memory", r->size);
    return static_cast<Word *>(words);
}

static void drop_words(Region *r) {
    if (r->words) munmap(r->words, words_bytes(r));
    r->words = NULL;
}

// After an access smaller than a word, or across two: makes words smaller, each with the notes of the old
// one.
static void refine(Region *r, uint8_t grain) {
    Region finer = *r;
    finer.grain = grain;
    if (r->words) {
        finer.words = new_words(&finer);
        size_t count = (r->size >> r->grain) + 1;
        int parts = 1 << (r->grain - grain);
        for (size_t i = 0; i < count; i++)
            if (r->words[i].write.time || r->words[i].read.time)
                for (int p = 0; p < parts; p++)
                    if (i * parts + p <= finer.size >> grain) finer.words[i * parts + p] = r->words[i];
        drop_words(r);
    }
    *r = finer;
}

// ---- device memory ---- Addresses come from one large reserved range, in units. Allocations lie between
// red zones, and addresses are not reused before the range is used up, so that late accesses are found.
// Under the guard, chunks of the range are opened and closed; one without live allocations stays closed, or
// the cost of each operation would grow with all allocations ever made.
enum : size_t { UNIT = 64 << 10, RED_ZONE = 256, ALIGNMENT = 256 };
enum : size_t { CHUNK = 2 << 20 };

static uintptr_t arena;
static size_t arena_size, next_unit, in_use;
static bool guarded;
static int opened;
static size_t used_chunks;      // from the start of the arena, those ever allocated
static uint32_t *live_in;       // for each chunk, the allocations in it
static Region **unit_region;    // of each unit; freed ones stay until another takes the unit

static void *reserve(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static void make_arena(void) {
    void *range = NULL;
    for (arena_size = (size_t)256 << 30; !range && arena_size >= (size_t)1 << 30; arena_size /= 2)
        if ((range = reserve(arena_size))) break;
    CHECK(range, "cannot reserve addresses for the memory of CUDA on the CPU");
    arena = (uintptr_t)range;
    unit_region = static_cast<Region **>(reserve(arena_size / UNIT * sizeof(Region *)));
    live_in = static_cast<uint32_t *>(reserve(arena_size / CHUNK * sizeof *live_in));
    CHECK(unit_region && live_in, "out of host memory");
    guarded = guard_asked();
    if (!guarded) return;
    CHECK(mprotect(range, arena_size, PROT_NONE) == 0, "guarded memory cannot be closed");
    guard_watch(range, arena_size);
}

static void protect(size_t first, size_t chunks, int access) {
    CHECK(mprotect(reinterpret_cast<void *>(arena + first * CHUNK), chunks * CHUNK, access) == 0,
          "guarded memory cannot be opened or closed");
}

static void protect_all(int access) {
    for (size_t c = 0; c < used_chunks; c++) {
        size_t first = c;
        while (c < used_chunks && live_in[c]) c++;
        if (c > first) protect(first, c - first, access);
    }
}

void memory_open(void) {
    if (!opened++ && guarded) protect_all(PROT_READ | PROT_WRITE);
}

void memory_close(void) {
    if (!--opened && guarded) protect_all(PROT_NONE);
}

// Counts an allocation in its chunks, or uncounts it.
static void count_live(const Region *r, int more) {
    size_t first = (r->start - RED_ZONE - arena) / CHUNK, last = (r->start + r->size - arena) / CHUNK;
    for (size_t c = first; c <= last; c++) {
        live_in[c] += (uint32_t)more;
        if (guarded && more < 0 && !live_in[c]) protect(c, 1, PROT_NONE);
        if (guarded && more > 0 && opened) protect(c, 1, PROT_READ | PROT_WRITE);
    }
    if (used_chunks <= last) used_chunks = last + 1;
}

size_t memory_capacity(void) {
    const char *text = getenv("CUDA_ON_CPU_MEMORY");  // bytes, for testing how little memory is told
    return text ? strtoull(text, NULL, 10)
                : (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
}

void *memory_allocate(size_t bytes) {
    if (!arena) make_arena();
    const size_t most = memory_capacity();
    if (bytes > most || in_use + bytes > most || bytes > arena_size / 2) return NULL;
    size_t units = (bytes + 2 * RED_ZONE + UNIT - 1) / UNIT, all = arena_size / UNIT, found = 0;
    // Starts where the last one ended, and goes round once.
    for (size_t looked = 0; found < units; looked++) {
        if (looked > 2 * all) return NULL;
        if (next_unit + (units - found) > all) next_unit = 0, found = 0;
        const Region *r = unit_region[next_unit++];
        found = r && r->live ? 0 : found + 1;
    }
    Region *r = new Region();
    uintptr_t begin = arena + (next_unit - units) * UNIT;
    r->start = (begin + RED_ZONE + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    r->size = bytes;
    r->grain = COARSEST;
    r->live = true;
    r->name = "device memory";
    for (size_t u = next_unit - units; u < next_unit; u++) unit_region[u] = r;
    in_use += bytes;
    void *memory = reinterpret_cast<void *>(r->start);
    count_live(r, 1);
    memory_open();
    memset(memory, POISON, bytes);
    memory_close();
    return memory;
}

bool memory_is_device(const void *address) { return (uintptr_t)address - arena < arena_size && arena; }

static Region *region_at(uintptr_t address) { return unit_region[(address - arena) / UNIT]; }

bool memory_release(void *memory) {
    if (!memory_is_device(memory)) return false;
    Region *r = region_at((uintptr_t)memory);
    if (!r || !r->live || r->start != (uintptr_t)memory) return false;
    r->live = false;
    in_use -= r->size;
    drop_words(r);
    count_live(r, -1);
    // The pages go back to the system; host code that reads through a stale pointer finds zeros.
    uintptr_t from = r->start / 4096 * 4096, to = (r->start + r->size + 4095) / 4096 * 4096;
    madvise(reinterpret_cast<void *>(from), to - from, MADV_DONTNEED);
    return true;
}

size_t memory_in_use(void) { return in_use; }

// ---- shared memory ----
// Static arrays are the program's thread-local variables; the symbol table says where each is.
static uintptr_t shared_start;  // of the static ones
static size_t shared_size;
static size_t shared_touched;  // bytes of those that this block has accessed
static List<Region> shared_regions;  // by address
static Region **shared_table;        // for each 8 bytes: different arrays do not share any
static Region dynamic_shared = {0, 0, NULL, 0, COARSEST, true, true, "dynamic shared memory"};
static const size_t DYNAMIC_MOST = 256 << 10, DYNAMIC_RED_ZONE = 4096;

static int find_segment(struct dl_phdr_info *info, size_t, void *) {
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_TLS) {
            shared_start = (uintptr_t)info->dlpi_tls_data;
            shared_size = info->dlpi_phdr[i].p_memsz;
        }
    return 1;  // stop: only the program itself
}

static void add_shared(void *, const char *name, int type, uintptr_t value, size_t size) {
    if (type != STT_TLS || size == 0) return;
    int status;
    char *whole = abi::__cxa_demangle(name, NULL, NULL, &status);
    // "tile" of "softmax<float, 256>(float*, int)::tile"
    const char *text = whole ? whole : name;
    if (strncmp(text, "guard variable for ", 19) != 0)
        for (const char *c = text; (c = strstr(c, "::")); c += 2) text = c + 2;
    shared_regions.add({shared_start + value, size, NULL, 0, COARSEST, true, true, text});
}

// g++ adds guard variables for the initialization of arrays of classes, though there is nothing to
// initialize.
static Region guards = {0, 0, NULL, 0, COARSEST, true, true, "guards"};
static bool is_guard(const Region &r) { return strncmp(r.name, "guard variable for ", 19) == 0; }
static bool is_red_zone(const Region &r) { return strncmp(r.name, "cuda_red_zone_", 14) == 0; }

static void fill_table(const Region &r, Region *with) {
    for (size_t at = (r.start - shared_start) / 8; at <= (r.start + r.size - 1 - shared_start) / 8; at++)
        shared_table[at] = with;
}

static int by_address(const void *a, const void *b) {
    uintptr_t x = static_cast<const Region *>(a)->start, y = static_cast<const Region *>(b)->start;
    return (x > y) - (x < y);
}

static void clocks_start_block(void);

static void find_shared(void) {
    dl_iterate_phdr(find_segment, NULL);
    each_symbol(add_shared, NULL);
    qsort(shared_regions.items, shared_regions.count, sizeof(Region), by_address);
    shared_table = static_cast<Region **>(calloc(shared_size / 8 + 1, sizeof(Region *)));
    CHECK(shared_table, "out of host memory");
    const Region *before = NULL;
    for (size_t i = 0; i < shared_regions.count; i++) {
        Region &r = shared_regions.items[i];
        if (is_guard(r)) {
            *reinterpret_cast<char *>(r.start) = 1;  // already initialized
            fill_table(r, &guards);
            continue;
        }
        if (!is_red_zone(r)) {
            CHECK(!before || is_red_zone(*before),
                  "no red zone lies between the shared arrays %s and %s, declared in one statement: write "
                  "a __shared__ "
                  "statement for each",
                  before->name, r.name);
            fill_table(r, &r);
        }
        before = &r;
    }
    void *range = reserve(DYNAMIC_MOST + 2 * DYNAMIC_RED_ZONE);
    CHECK(range, "out of host memory");
    // aligned to 16 and no more, as after the static arrays on a GPU
    dynamic_shared.start = (uintptr_t)range + DYNAMIC_RED_ZONE + 16;
}

void memory_start_block(const CudaLaunch *launch) {
    if (!dynamic_shared.start) find_shared();
    clocks_start_block();
    shared_touched = 0;
    if (dynamic_shared.size != launch->shared_bytes) {
        drop_words(&dynamic_shared);
        dynamic_shared.size = launch->shared_bytes;
        dynamic_shared.grain = COARSEST;
    }
}

void *cuda_dynamic_shared(void) { return reinterpret_cast<void *>(dynamic_shared.start); }

// ---- races ----

#include "cuda_on_cpu_clocks.inc"
#include "cuda_on_cpu_races.inc"

// ---- the check of one access ----

static uintptr_t stacks;
static size_t stacks_size;

void memory_set_stacks(void *memory, size_t bytes) {
    stacks = (uintptr_t)memory;
    stacks_size = bytes;
}

static void outside(AccessKind kind, uintptr_t address, size_t size, const Region *r,
                    const void *site) NO_RETURN;
static void outside(AccessKind kind, uintptr_t address, size_t size, const Region *r, const void *site) {
    const char *verb = verb_of(kind);
    if (!r)
        broken(site, "%s %zu bytes at %p, which is not memory of the device", verb, size,
               reinterpret_cast<void *>(address));
    const char *late = r->live ? "" : ", and that after its release";
    if (address < r->start)
        broken(site, "%s %zu bytes, %zu before the start of %zu bytes of %s%s", verb, size,
               (size_t)(r->start - address), r->size, r->name, late);
    if (address + size > r->start + r->size)
        broken(site, "%s %zu bytes at byte %zu of %zu bytes of %s%s", verb, size,
               (size_t)(address - r->start), r->size, r->name, late);
    broken(site, "%s %zu bytes at byte %zu of %zu bytes of %s after its release", verb, size,
           (size_t)(address - r->start), r->size, r->name);
}

// The nearest static shared array, only for the message.
static const Region *nearest_shared(uintptr_t address) {
    const Region *best = NULL;
    for (size_t i = 0; i < shared_regions.count; i++) {
        const Region &r = shared_regions.items[i];
        if (!is_red_zone(r) && !is_guard(r) && (!best || r.start <= address)) best = &r;
    }
    return best;
}

// Kernel arguments and constants may be read.
static bool is_constant(uintptr_t address, size_t size);

static void check_rest(AccessKind kind, uintptr_t address, size_t size, const void *site) {
    if (address + size > (uintptr_t)now.launch && address < (uintptr_t)now.launch + now.launch->size)
        return;
    if (is_constant(address, size) && kind == LOAD) return;
    outside(kind, address, size, NULL, site);
}

static void check_host(AccessKind kind, uintptr_t address, size_t size, const void *site) {
    if (memory_is_device(reinterpret_cast<void *>(address)))
        broken(site, "host code %s %zu bytes of device memory", verb_of(kind), size);
}

static inline __attribute__((always_inline)) void check(AccessKind kind, uintptr_t address, size_t size,
                                                        const void *site) {
    if (address - stacks < stacks_size) return;
    if (__builtin_expect(!now.launch, 0)) return check_host(kind, address, size, site);
    Region *r;
    if (address - arena < arena_size) {
        r = region_at(address);
        if (!r || !r->live) outside(kind, address, size, r, site);
    } else if (address - shared_start < shared_size) {
        r = shared_table[(address - shared_start) / 8];
        if (r == &guards) return;
        if (!r) outside(kind, address, size, nearest_shared(address), site);
    } else if (address - (dynamic_shared.start - DYNAMIC_RED_ZONE) < DYNAMIC_MOST + 2 * DYNAMIC_RED_ZONE) {
        r = &dynamic_shared;
    } else {
        return check_rest(kind, address, size, site);
    }
    if (__builtin_expect(address < r->start || address + size > r->start + r->size, 0))
        outside(kind, address, size, r, site);
    if (__builtin_expect(address & (size - 1), 0))
        broken(site, "%s %zu bytes at byte %zu of %s, an address that is no multiple of %zu", verb_of(kind),
               size, (size_t)(address - r->start), r->name, size);
    if (now.counting) count_access(r->shared ? SHARED : GLOBAL, kind, address, size, site_number(site));
    if (r->shared && r->block != now.block_start) {
        memset(reinterpret_cast<void *>(r->start), POISON, r->size);
        r->block = now.block_start;
        if (r != &dynamic_shared) check_static_shared(now.launch, shared_touched += r->size);
    }
    if (__builtin_expect(wgmma_in_flight && kind != LOAD && r->shared, 0))
        wgmma_need_unread(address, size, site);
    size_t offset = address - r->start;
    if (__builtin_expect(((offset | size) & (((size_t)1 << r->grain) - 1)) != 0, 0))
        refine(r, (uint8_t)__builtin_ctzl(offset | size));
    if (__builtin_expect(!r->words, 0)) r->words = new_words(r);
    for (size_t w = offset >> r->grain; w < (offset + size) >> r->grain; w++)
        check_word(r, &r->words[w], kind, site);
}

// In aligned pieces, for any address.
static void check_range(AccessKind kind, uintptr_t address, size_t size, const void *site) {
    if (!now.launch) return check_host(kind, address, size, site);
    while (size) {
        size_t piece = address % 4 == 0 && size >= 4 ? 4 : 1;
        check(kind, address, piece, site);
        address += piece, size -= piece;
    }
}

// ---- constants: sections of the program that kernels may read ----

extern "C" char __start_cuda_constant[] __attribute__((weak)), __stop_cuda_constant[] __attribute__((weak));

struct Range {
    uintptr_t start, end;
};
static List<Range> read_only;

static int find_read_only(struct dl_phdr_info *info, size_t, void *) {
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        if ((p->p_type == PT_LOAD && !(p->p_flags & PF_W)) || p->p_type == PT_GNU_RELRO)
            read_only.add({info->dlpi_addr + p->p_vaddr, info->dlpi_addr + p->p_vaddr + p->p_memsz});
    }
    return 1;
}

static bool is_constant(uintptr_t address, size_t size) {
    if (read_only.count == 0) {
        dl_iterate_phdr(find_read_only, NULL);
        read_only.add({(uintptr_t)__start_cuda_constant, (uintptr_t)__stop_cuda_constant});
    }
    for (size_t i = 0; i < read_only.count; i++)
        if (address >= read_only.items[i].start && address + size <= read_only.items[i].end) return true;
    return false;
}

// ---- for the runtime API ----

void memory_check_host(const char *call, const void *address, size_t bytes, const void *site) {
    if (bytes == 0) return;
    const Region *r = region_at((uintptr_t)address);
    CHECK(r && r->live, "%s (%s): %p lies in no live allocation", call, line_text(site), address);
    uintptr_t first = (uintptr_t)address;
    CHECK(first >= r->start && first + bytes <= r->start + r->size && first + bytes >= first,
          "%s (%s): %zu bytes from byte %ld of an allocation of %zu bytes", call, line_text(site), bytes,
          (long)(first - r->start), r->size);
}

// No other thread runs while one asks for a word again and again, so if the word is not yet what it waits
// for, it waits forever.
static void check_wait(const void *address, size_t bytes, const void *site) {
    enum { FOREVER = 1 << 20 };
    static struct {
        const void *address;
        const Thread *thread;
        uint32_t block;
        uint64_t value;
        int times;
    } last;
    uint64_t value = 0;
    memcpy(&value, address, bytes);
    if (address != last.address || now.thread != last.thread || now.block_start != last.block ||
        value != last.value)
        last = {address, now.thread, now.block_start, value, 0};
    if (++last.times == FOREVER)
        broken(site, "waits for a word that stays %llu: what should change it comes later, or never",
               (unsigned long long)value);
}

void cuda_atomic(const void *address, size_t bytes) {
    check(ATOMIC, (uintptr_t)address, bytes, __builtin_return_address(0));
    check_wait(address, bytes, __builtin_return_address(0));
    if (memory_is_device(address)) ask_and_tell((uintptr_t)address);
}

float cuda_sum(float x, float y) { return x + y; }
double cuda_sum(double x, double y) { return x + y; }

void *cuda_memcpy(void *to, const void *from, size_t bytes) {
    check_range(LOAD, (uintptr_t)from, bytes, __builtin_return_address(0));
    check_range(STORE, (uintptr_t)to, bytes, __builtin_return_address(0));
    return memcpy(to, from, bytes);
}

void *cuda_memset(void *to, int value, size_t bytes) {
    check_range(STORE, (uintptr_t)to, bytes, __builtin_return_address(0));
    return memset(to, value, bytes);
}

// ---- copies in flight, and the functions that the compiler calls ----

#include "cuda_on_cpu_async.inc"
#include "cuda_on_cpu_mbarrier.inc"
#include "cuda_on_cpu_hooks.inc"
