// guard.h: guarded device memory: only operations and communication may touch it, even where the host could.
//
// On a GPU, host code that follows a device pointer crashes. On the CPU it would work, and nobody would
// notice the mistake. With ULTRASCALE_GUARD=1 in the environment all device memory of the CPU back end lies
// in one range of addresses, which is inaccessible except between device_open and device_close: around an
// operation (clock.c), around the moving of bytes (comm_agreement.c), and around copies from and to the host
// (tensor.c). Any other access ends all ranks, with one sentence that names the source line and what the
// memory holds. New memory is filled with NaN.
#ifndef GUARD_H
#define GUARD_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Private to the core. `opened` counts calls of device_open without a device_close so far. It counts even
// while the guard is off: the first allocation turns the guard on, and may come between the two calls.
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
// Notes what the memory at this address holds, for the sentence. `holds` must live as long as the program.
void guard_name(const void *memory, const char *holds);

// ---- for device_cpu.c ----
// Whether the guard is on; the first call turns it on if guard_asked says so.
bool guard_wanted(void);
void *guard_alloc(size_t bytes);  // aligned to 64; NULL if the range is full
void guard_free(void *memory);

// ---- for cuda_on_cpu_memory.cc, whose device memory opens only for kernels and copies ----
bool guard_asked(void);  // whether ULTRASCALE_GUARD asks for it
// From now on an access to these addresses while they are closed is fatal, with the guard's sentence.
void guard_watch(void *base, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
