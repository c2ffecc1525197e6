// device.h: one device and its memory, as a back end provides it: device_cpu.c or device_cuda.cu. Chapters
// use tensors (tensor.h) instead.
#ifndef DEVICE_H
#define DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Chooses the device of this rank: ranks 0 to ranks_here - 1 of one machine take its devices in turn. The
// choice is only remembered; the device starts when it is first used, so a dry run needs none. Without this
// call: rank 0 of 1.
void backend_start(int local_rank, int ranks_here);
// What computes, for the header of a program: "OpenBLAS 0.3.21 SkylakeX, 2 threads",
// "NVIDIA H200 (sm_90), CUDA 13.0". Starts the device.
const char *backend_text(void);
// Returns when the device has finished everything that was issued to it.
void backend_wait(void);
// How often the host has waited for the device since the start.
int64_t backend_waits(void);
// Uninitialized bytes, aligned to 64; NULL if there is not enough memory.
void *backend_alloc(size_t bytes);
void backend_free(void *memory);
// Bytes that this rank, which holds `held`, can still allocate on the device, as far as that can be known.
int64_t backend_room(int64_t held);
// How many ranks share the device's memory; each may need as much as this one.
int backend_sharers(void);
// Copies to the device. `from` may be overwritten as soon as this returns. Does not wait for the device
// unless megabytes of earlier copies are still pending.
void backend_from_host(void *to, const void *from, size_t bytes);
// Copies to the host, after waiting for the device.
void backend_to_host(void *to, const void *from, size_t bytes);
// Counts one more of device_reads (tensor.h), for a read other than by tensor_to_host.
void device_note_read(void);
// Whether the host, and so MPI, can read and write device memory directly.
bool backend_is_host(void);
// Host memory that is fast to copy to and from the device (page-locked on a GPU); NULL if there is not
// enough. Freeing NULL is allowed.
void *backend_alloc_pinned(size_t bytes);
void backend_free_pinned(void *memory);

#ifdef __cplusplus
}
#endif
#endif
