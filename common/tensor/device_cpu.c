// device_cpu.c: the CPU as a device. Its memory is the host's, but the rules are those of a GPU: only
// operations touch it.
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base.h"
#include "device.h"
#include "guard.h"

void backend_start(int local_rank, int ranks_here) {
    (void)local_rank;
    (void)ranks_here;
}

void backend_wait(void) {}

int64_t backend_waits(void) { return 0; }

// Asks for pages of 2 MB where the heap has grown. With pages of 4 kB, a pass over more than the caches
// hold needs another page's address every 64 cache lines, and under a hypervisor each costs several reads
// of memory: together a tenth of a matrix multiply's time.
static void use_huge_pages(char *memory) {
    enum { PAGE = 4096 };
    static char *asked;  // for what lies before this
    char *end = sbrk(0), *from = asked ? asked : memory + (-(uintptr_t)memory & (PAGE - 1));
    if (end > from) (void)madvise(from, (size_t)(end - from), MADV_HUGEPAGE);  // may be refused
    asked = end;
}

// Before the memory lies the address of its block. (aligned_alloc cuts blocks to size, but looks for one with
// room to align in: a block that it has cut is too small for its own size, and freed memory lay idle.)
enum { ALIGN = 64 };

void *backend_alloc(size_t bytes) {
    if (guard_wanted()) return guard_alloc(bytes);
    char *block = bytes > SIZE_MAX - ALIGN ? NULL : malloc(bytes + ALIGN);
    if (!block) return NULL;
    char *memory = block + ALIGN - (uintptr_t)block % ALIGN;
    ((void **)memory)[-1] = block;
    use_huge_pages(memory);
    return memory;
}

void backend_free(void *memory) {
    if (guard.on) guard_free(memory);
    else if (memory) free(((void **)memory)[-1]);
}

bool backend_is_host(void) { return true; }

void *backend_alloc_pinned(size_t bytes) { return malloc(bytes ? bytes : 1); }

void backend_free_pinned(void *memory) { free(memory); }

void backend_from_host(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }

void backend_to_host(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }

// Linux promises more memory than it has, and silently kills a process that uses it. So the ranks of this
// machine share what is left now, less what they have allocated but not yet written to. Of that this rank
// knows only its own, and assumes the others' to be the same.
int64_t backend_room(int64_t held) {
    double room = host_memory_left() / host_sharers() - fmax(0, (double)held - host_memory_written());
    return room < 0x1p62 ? (int64_t)room : INT64_MAX;
}

int backend_sharers(void) { return host_sharers(); }
