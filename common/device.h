// device.h: the memory of one device, as a back end gives it. device_cpu.c here; chapters use tensors
// (tensor.h).
#ifndef DEVICE_H
#define DEVICE_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Uninitialised bytes, aligned to 64; NULL when there is no more.
void *backend_alloc(size_t bytes);
void backend_free(void *memory);
void backend_from_host(void *to, const void *from, size_t bytes);
void backend_to_host(void *to, const void *from, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
