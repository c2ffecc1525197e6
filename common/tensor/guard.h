// guard.h: guarded device memory: only operations and communication touch it, also where a host could.
//
// On a GPU, host code that follows a device pointer dies. On the CPU it would work, and nobody would see
// the mistake. With ULTRASCALE_GUARD=1 in the environment all device memory of the CPU back end lies in
// one range of addresses, which is closed but between device_open and device_close: around an operation
// (clock.c), around the moving of bytes (comm.c), around copies from and to the host (tensor.c). Any
// other access ends all ranks, with one sentence that names the source line and what the memory holds.
// What is allocated is filled with NaN.
#ifndef GUARD_H
#define GUARD_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Private to the core. `opened` counts openings that are not yet closed, also while the guard is off: it
// goes on with the first allocation, which may come between the two.
extern struct Guard {
    bool on;
    int opened;
} guard;

// ---- for the core ----
void guard_protect(bool closed);
static inline void device_open(void) {
    if (!guard.opened++ && guard.on) guard_protect(false);
}
static inline void device_close(void) {
    if (!--guard.opened && guard.on) guard_protect(true);
}
// What the memory at this address holds: a text that lives as long as the program.
void guard_name(const void *memory, const char *holds);

// ---- for device_cpu.c ----
// Whether the guard is on; the first call asks guard_asked, and starts it.
bool guard_wanted(void);
void *guard_alloc(size_t bytes);  // aligned to 64; NULL when the range is full
void guard_free(void *memory);

// ---- for cuda_on_cpu_memory.cc, whose device memory opens for kernels and copies alone ----
bool guard_asked(void);  // whether ULTRASCALE_GUARD asks for it
// From now on who touches these addresses while they are closed is told so.
void guard_watch(void *base, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
