// device.h: one device and its memory, as a back end gives it: device_cpu.c or device_cuda.cu. Chapters use
// tensors (tensor.h).
#ifndef DEVICE_H
#define DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Which device this rank works on: ranks 0 to ranks_here - 1 of one machine take its devices in turn. It is
// only remembered: the device starts when it is first used, so a dry run needs none. Without this call:
// rank 0 of 1.
void backend_start(int local_rank, int ranks_here);
// What computes, for the header of a program: "OpenBLAS 0.3.21 SkylakeX, 2 threads",
// "NVIDIA H200 (sm_90), CUDA 13.0". Starts the device.
const char *backend_text(void);
// Returns when the device has done all that it was given.
void backend_wait(void);
// How often the host has waited for the device since the start.
int64_t backend_waits(void);
// Uninitialised bytes, aligned to 64; NULL when there is no more.
void *backend_alloc(size_t bytes);
void backend_free(void *memory);
// Bytes that this device has for this rank beside those that it holds, as far as it can be known.
int64_t backend_room(int64_t held);
// How many ranks share its memory, each of which may ask for as much as this one.
int backend_sharers(void);
// Does not wait for the device, unless megabytes have gone up that it has not come to yet; the host may
// write to `from` at once.
void backend_from_host(void *to, const void *from, size_t bytes);
void backend_to_host(void *to, const void *from, size_t bytes);
// Of device_reads: for who reads by another way than tensor_to_host.
void device_note_read(void);
// Whether the host itself, and so MPI, can read and write device memory.
bool backend_is_host(void);
// Host memory that is quickly copied to and from the device; NULL when there is no more. Freeing NULL is
// allowed.
void *backend_alloc_pinned(size_t bytes);
void backend_free_pinned(void *memory);

#ifdef __cplusplus
}
#endif
#endif
