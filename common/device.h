// device.h: the memory of one device, as a back end gives it. device_cpu.c here; chapters
// use tensors (tensor.h).
#ifndef DEVICE_H
#define DEVICE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Uninitialised bytes, aligned to 64; NULL when there is no more.
void *backend_alloc(size_t bytes);
void backend_free(void *memory);
// Bytes that this device can give in all, as far as it can be known; asked once, before the first allocation.
int64_t backend_capacity(void);
void backend_from_host(void *to, const void *from, size_t bytes);
void backend_to_host(void *to, const void *from, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
