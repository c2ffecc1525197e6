// device_cpu.c: the CPU as a device. Its memory is the host's, but the rules are those of a GPU: only
// operations touch it.
#include <stdlib.h>
#include <string.h>

#include "device.h"

void *backend_alloc(size_t bytes) {
    // aligned_alloc wants a multiple of the alignment.
    size_t rounded = (bytes + 63) / 64 * 64;
    return rounded < bytes ? NULL : aligned_alloc(64, rounded ? rounded : 64);
}

void backend_free(void *memory) { free(memory); }

void backend_from_host(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }

void backend_to_host(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
