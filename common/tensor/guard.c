// guard.c: the closed range of addresses, its blocks, and the sentence about an access to it.
#include "guard.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct Guard guard;

// Addresses, not memory: pages that are never written to cost nothing.
static const size_t ARENA_BYTES = (size_t)64 << 30;
static const size_t HUGE_PAGE = 2 << 20;
static const size_t STEP = 4 << 20;  // by which the used part grows

typedef struct Block {
    size_t first, bytes;  // offset in the arena; bytes are rounded up
    const char *holds;
} Block;

static struct {
    char *base;
    size_t bytes;
    size_t used;   // open and close mean [base, base + used); a whole number of STEPs
    Block *block;  // in the order of their addresses
    int blocks, room;
    struct sigaction before;
} arena;

static void protect(size_t first, size_t bytes, bool closed) {
    if (bytes && mprotect(arena.base + first, bytes, closed ? PROT_NONE : PROT_READ | PROT_WRITE))
        fatal("guarded memory cannot be %s", closed ? "closed" : "opened");
}

void guard_protect(bool closed) { protect(0, arena.used, closed); }

// ---- blocks ----

void *guard_alloc(size_t bytes) {
    size_t rounded = bytes ? (bytes + 63) / 64 * 64 : 64, first = 0;
    if (rounded < bytes || rounded > ARENA_BYTES) return NULL;
    int at = 0;  // the first gap that is wide enough
    while (at < arena.blocks && arena.block[at].first - first < rounded) {
        first = arena.block[at].first + arena.block[at].bytes;
        at++;
    }
    if (ARENA_BYTES - first < rounded) return NULL;
    if (arena.blocks == arena.room) {
        arena.room = 2 * arena.room + 64;
        arena.block = realloc(arena.block, sizeof *arena.block * (size_t)arena.room);
        CHECK(arena.block, "out of host memory for guarded blocks");
    }
    memmove(&arena.block[at + 1], &arena.block[at], sizeof *arena.block * (size_t)(arena.blocks - at));
    arena.block[at] = (Block){.first = first, .bytes = rounded};
    arena.blocks++;
    if (first + rounded > arena.used) {
        size_t used = (first + rounded + STEP - 1) / STEP * STEP;
        if (guard.opened) protect(arena.used, used - arena.used, false);
        arena.used = used;
    }
    device_open();
    memset(arena.base + first, 0xff, rounded);  // NaN in every floating dtype, -1 in i32
    device_close();
    return arena.base + first;
}

// The block that holds this address, or -1.
static int find(const void *address) {
    size_t offset = (size_t)((const char *)address - arena.base);
    for (int i = 0; i < arena.blocks; i++)
        if (offset - arena.block[i].first < arena.block[i].bytes) return i;
    return -1;
}

void guard_free(void *memory) {
    if (!memory) return;
    int at = find(memory);
    CHECK(at >= 0 && arena.base + arena.block[at].first == memory, "freed device memory is freed again");
    arena.blocks--;
    memmove(&arena.block[at], &arena.block[at + 1], sizeof *arena.block * (size_t)(arena.blocks - at));
}

void guard_name(const void *memory, const char *holds) {
    int at = find(memory);
    if (at >= 0) arena.block[at].holds = holds;
}

// ---- the sentence ----

// The part of a path that begins with a folder of this book: "common/tensor/ops.c:42". A chapter's files
// lie directly in its folder.
static const char *path_in_book(const char *path) {
    const char *folder = strstr(path, "/common/"), *name = strrchr(path, '/');
    if (!folder) folder = strstr(path, "/tests/");
    if (folder) return folder + 1;
    while (name && name > path && name[-1] != '/') name--;
    return name ? name : path;
}

// Where in the sources an address of this program is: "ddp_sync (01_data_parallel/ddp.c:42)"; the name
// alone in a build without -g. Of inlined calls and of the callers, the innermost outside common/ is
// meant, if there is one: dtype_convert reads what it was given. On watched memory the core may be at fault
// as well. Static text.
static const char *source_line(void *const *address, int count) {
    static char text[1536];
    char command[1024], function[256], place[1024];
    int used = snprintf(command, sizeof command, "addr2line -fie /proc/%d/exe", (int)getpid());
    Dl_info here, there;
    dladdr(&guard, &here);
    bool moved = ((const ElfW(Ehdr) *)here.dli_fbase)->e_type == ET_DYN;
    for (int i = 0; i < count && used < (int)sizeof command - 64; i++)
        if (dladdr(address[i], &there) && there.dli_fbase == here.dli_fbase)
            used += snprintf(command + used, sizeof command - (size_t)used, " %#zx",
                             (size_t)address[i] - (moved ? (size_t)here.dli_fbase : 0));
    snprintf(command + used, sizeof command - (size_t)used, " 2>/dev/null");
    FILE *lines = popen(command, "r");
    if (!lines) return "an unknown place";
    bool found = false;
    while (!found && fgets(function, sizeof function, lines) && fgets(place, sizeof place, lines)) {
        char *line = strrchr(place, ':'), *more = line ? strchr(line, ' ') : NULL;  // " (discriminator 3)"
        function[strcspn(function, "\n")] = place[strcspn(place, "\n")] = '\0';
        if (more) *more = '\0';
        const char *name = path_in_book(place);
        bool known = !strchr(place, '?');
        found = known && (!guard.on || strncmp(name, "common/", 7) != 0);
        if (found || !*text) snprintf(text, sizeof text, known ? "%s (%s)" : "%s", function, name);
    }
    while (fgets(place, sizeof place, lines)) continue;
    pclose(lines);
    return *text ? text : "an unknown place";
}

// The signal comes from the access itself, not at some random point, so this handler may call any function:
// no library is in the middle of anything. (A library keeps none of its own memory in this range.)
static void on_fault(int number, siginfo_t *info, void *context) {
    (void)context;
    size_t offset = (size_t)((const char *)info->si_addr - arena.base);
    sigaction(number, &arena.before, NULL);
    if (info->si_code <= 0) raise(number);  // sent by kill(): returning would repeat nothing
    if (info->si_code <= 0 || offset >= arena.bytes)
        return;  // another fault happens again, as it would have
    void *address[24];
    int count = backtrace(address, 24), at = find(info->si_addr);
    // The access is two frames further out, behind the handler and the kernel. What a call returns to is
    // behind the call.
    for (int i = 3; i < count; i++) address[i] = (char *)address[i] - 1;
    const char *where = source_line(address + 2, count - 2);
    if (!guard.on) fatal("host code in %s touched device memory: only kernels and copies may", where);
    const char *holds = at < 0 ? "freed" : arena.block[at].holds;
    fatal(
        "host code in %s touched device memory (%s): only operations and comm may; tensor_to_host reads it",
        where, holds ? holds : "of no tensor");
}

// ---- start ----

bool guard_asked(void) {
    const char *wanted = getenv("ULTRASCALE_GUARD");
    return wanted && *wanted && strcmp(wanted, "0") != 0;
}

void guard_watch(void *base, size_t bytes) {
    arena.base = base;
    arena.bytes = bytes;
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, &arena.before);
    void *address[1];
    backtrace(address, 1);  // loads now what it needs
}

bool guard_wanted(void) {
    static bool asked;
    if (asked) return guard.on;
    asked = true;
    if (!guard_asked()) return false;
    char *base =
        mmap(NULL, ARENA_BYTES + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(base != MAP_FAILED, "ULTRASCALE_GUARD: there are no %s of addresses for guarded memory",
          bytes_text((double)ARENA_BYTES));
    // In huge pages, where there are some: each operation changes an entry for each page twice.
    base += -(uintptr_t)base % HUGE_PAGE;
    madvise(base, ARENA_BYTES, MADV_HUGEPAGE);
    guard_watch(base, ARENA_BYTES);
    return guard.on = true;
}
