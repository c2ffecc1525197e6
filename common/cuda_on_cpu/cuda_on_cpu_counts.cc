// cuda_on_cpu_counts.cc: what a launch would ask of a GPU's memory, counted from what its threads did. See
// struct CudaCounts in cuda_on_cpu.h for what is counted, and how it differs from hardware.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cuda_on_cpu_inside.h"

// An access, or a step from one basic block to the next (a branch: address is where it went).
struct Event {
    uint32_t site;
    uint8_t space, kind, lane, size;
    uintptr_t address;
};
enum { BRANCH = 2 };  // a third space

static List<Event> events[MAX_THREADS];  // since the block's last barrier, by thread
static uint32_t last_block[MAX_THREADS];
static CudaCounts counts;
static std::unordered_set<uintptr_t> loaded, stored;  // sectors of this launch
static List<uintptr_t> copied;                         // those that TMA loaded

void cuda_count_begin(void) {
    cudaDeviceSynchronize();
    counts = CudaCounts();
    now.counting = true;
}

CudaCounts cuda_count_end(void) {
    cudaDeviceSynchronize();
    now.counting = false;
    return counts;
}

int64_t cuda_count_end_atomics(void) { return cuda_count_end().atomics; }
void cuda_count_end_global(int64_t *requests, int64_t *sectors) {
    const CudaCounts c = cuda_count_end();
    *requests = c.global_loads + c.global_stores;
    *sectors = c.global_load_sectors + c.global_store_sectors;
}

void count_tensor(int64_t flops, int bits) {
    (bits == 8 ? counts.tensor_8_flops : counts.tensor_flops) += flops;
}

void count_access(Space space, AccessKind kind, uintptr_t address, size_t size, uint32_t site) {
    if (now.recording) return tape_access(space, size);
    events[now.thread->number].add(
        {site, (uint8_t)space, (uint8_t)kind, (uint8_t)now.thread->lane, (uint8_t)size, address});
    if (kind == ATOMIC) counts.atomics++;
}

void count_passes(int64_t passes) {
    counts.shared_accesses++;
    counts.shared_passes += passes;
}

void count_copy(const uintptr_t *rows, const size_t *bytes, int count) {
    counts.global_loads++;
    for (int i = 0; i < count; i++) {
        counts.global_load_bytes += (int64_t)bytes[i];
        for (uintptr_t s = rows[i] / 32; bytes[i] && s <= (rows[i] + bytes[i] - 1) / 32; s++) {
            counts.global_load_sectors++;
            copied.add(s);
        }
    }
    count_passes(count);
}

static void step(const Thread *t, uint32_t to) {
    uint32_t *from = &last_block[t->number];
    if (*from) events[t->number].add({*from, BRANCH, 0, (uint8_t)t->lane, 0, to});
    *from = to;
}

// g++ -fsanitize-coverage=trace-pc calls this at the start of each basic block.
extern "C" void __sanitizer_cov_trace_pc(void) {
    if (__builtin_expect(!now.counting || !now.launch, 1)) return;
    const uint32_t site = site_number(__builtin_return_address(0));
    if (now.recording) tape_block(site);
    else step(now.thread, site);
}

// ---- one instruction of a warp: events [first, end), of different lanes ----

static void count_global(const Event *first, const Event *end) {
    uintptr_t sectors[LANES], *last = sectors;
    int64_t bytes = 0;
    for (const Event *e = first; e < end; e++) {
        const uintptr_t sector = e->address / 32;  // an aligned access is in one, often its neighbour's
        if (last == sectors || last[-1] != sector) *last++ = sector;
        bytes += e->size;
    }
    std::sort(sectors, last);
    last = std::unique(sectors, last);
    bool load = first->kind == LOAD;
    (load ? loaded : stored).insert(sectors, last);
    (load ? counts.global_loads : counts.global_stores)++;
    (load ? counts.global_load_bytes : counts.global_store_bytes) += bytes;
    (load ? counts.global_load_sectors : counts.global_store_sectors) += last - sectors;
}

// Passes that 32 banks of 4 bytes need for lanes that access 128 bytes: the most words needed from one bank.
static int64_t passes(const Event *first, const Event *end) {
    enum { BANKS = 32, WORDS = 32 };
    uintptr_t words[BANKS][WORDS];
    uint8_t count[BANKS] = {};
    uint8_t most = 0;
    for (const Event *e = first; e < end; e++)
        for (uintptr_t w = e->address / 4; w <= (e->address + e->size - 1) / 4; w++) {
            uintptr_t *bank = words[w % BANKS], *last = bank + count[w % BANKS];
            if (std::find(bank, last, w) != last) continue;
            *last = w;
            most = std::max(most, ++count[w % BANKS]);
        }
    return most;
}

static void count_shared(const Event *first, const Event *end) {
    counts.shared_accesses++;
    // 128 bytes at a time: with 8 bytes a lane those of 16 lanes, with 16 bytes those of 8.
    int lanes = std::min(128 / std::max<int>(first->size, 4), (int)LANES);
    while (first < end) {
        const Event *part = first;
        while (first < end && first->lane / lanes == part->lane / lanes) first++;
        counts.shared_passes++;
        counts.shared_conflicts += passes(part, first) - 1;
    }
}

// Lanes that execute a basic block together, and where they go from there.
static void count_step(const Event *first, const Event *end) {
    const BlockWork &work = block_work(first->site);
    int64_t lanes = end - first;
    counts.warp_steps++;
    counts.lane_steps += lanes;
    counts.flops += lanes * work.flops;
    counts.special += lanes * work.special;
    counts.flop_instructions += work.flop_instructions;
    counts.special_instructions += work.special_instructions;
    for (const Event *e = first; e < end; e++)
        if (e->address != first->address) {
            counts.divergent_branches++;
            return;
        }
}

// What a warp's lanes do at one site.
struct Site {
    uint64_t name;
    std::vector<uint32_t> groups;  // the k-th: of the events that are the instruction's k-th execution
    size_t turn;                   // how often this lane was here
    int lane;
    Site *next;  // where the lane went from here last time, and usually goes
};

static void count_instruction(const Event *first, const Event *end) {
    if (first->space == GLOBAL) count_global(first, end);
    else if (first->space == SHARED) count_shared(first, end);
    else count_step(first, end);
}

// How many events, from the first on, are the same in all lanes.
static size_t in_step(int begin, int end) {
    const List<Event> &one = events[begin];
    size_t alike = one.count;
    for (int i = begin + 1; i < end; i++) {
        const List<Event> &other = events[i];
        size_t n = 0;
        for (alike = std::min(alike, other.count); n < alike; n++) {
            const Event &a = one.items[n], &b = other.items[n];
            if (a.site != b.site || a.space != b.space || a.kind != b.kind) break;
        }
        alike = n;
    }
    return alike;
}

// Events of different lanes are one instruction if these lanes are at the same site for the same number of
// times. Usually all lanes take the same path, and their n-th events match. After they diverge, a warp has
// up to a million events: these are put into buckets by the number of their group, and not sorted.
static void count_warp(int begin, int end) {
    const size_t alike = in_step(begin, end);
    for (size_t n = 0; n < alike; n++) {
        Event lanes[LANES];
        for (int i = begin; i < end; i++) lanes[i - begin] = events[i].items[n];
        count_instruction(lanes, lanes + (end - begin));
    }
    std::unordered_map<uint64_t, Site> sites;
    std::vector<size_t> at;  // of each group: how many events, where the next one goes, their end
    static List<uint32_t> group_of;  // of each event; this and the next keep their memory from warp to warp
    static std::vector<Event> together;
    Site none = {}, *before = &none;
    group_of.count = 0;
    for (int i = begin; i < end; i++)
        for (size_t n = alike; n < events[i].count; n++) {
            const Event &e = events[i].items[n];
            const uint64_t name = (uint64_t)e.site << 8 | e.space << 4 | e.kind;
            if (!before->next || before->next->name != name) before->next = &sites[name];
            Site &site = *before->next;
            before = &site;
            site.name = name;
            if (site.lane != e.lane) site.turn = 0;
            site.lane = e.lane;
            if (site.turn == site.groups.size()) {
                site.groups.push_back((uint32_t)at.size());
                at.push_back(0);
            }
            group_of.add(site.groups[site.turn++]);
            at[group_of.items[group_of.count - 1]]++;
        }
    size_t total = 0;
    for (size_t &first : at) total += std::exchange(first, total);
    together.resize(total);
    const uint32_t *group = group_of.items;
    for (int i = begin; i < end; i++) {
        for (size_t n = alike; n < events[i].count; n++) together[at[*group++]++] = events[i].items[n];
        events[i].count = 0;
    }
    const Event *first = together.data();
    for (const size_t last : at) {
        count_instruction(first, together.data() + last);
        first = together.data() + last;
    }
}

static void count_warps(void) {
    for (int begin = 0; begin < now.threads; begin += LANES)
        count_warp(begin, std::min(begin + LANES, now.threads));
}

void count_barrier(void) {
    counts.barriers++;
    count_warps();
}

void count_block_end(void) {
    for (int i = 0; i < now.threads; i++) step(&threads[i], 0);  // its last block leaves the kernel
    count_warps();
    counts.threads += now.threads;
    counts.warps += (now.threads + LANES - 1) / LANES;
}

void count_launch_end(void) {
    loaded.insert(copied.items, copied.items + copied.count);
    copied.count = 0;
    counts.distinct_load_sectors += (int64_t)loaded.size();
    counts.distinct_store_sectors += (int64_t)stored.size();
    loaded.clear();
    stored.clear();
}
