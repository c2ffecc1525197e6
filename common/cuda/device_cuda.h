// device_cuda.h: what the files of the CUDA back end share (device_cuda.cu, ops_cuda*.cu, gemm_*, comm_nccl*)
// in addition to device.h. Both C and C++ include it, and it needs no CUDA header.
#ifndef DEVICE_CUDA_H
#define DEVICE_CUDA_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// The compute stream, a cudaStream_t: all kernels, copies, allocations and frees of this rank run on it, in
// the order of the calls. So memory may be freed while a kernel that uses it is still queued; other streams
// need events.
void *device_stream(void);

// Waits until the compute stream has finished everything queued on it, and is fatal if anything went wrong
// there. It polls the stream, so that it can end even if the stream never does: after each look it calls
// the function set by device_on_wait (NULL: none), which may call fatal. NCCL's errors and timeouts surface
// there.
void device_wait(void);
void device_on_wait(void (*look)(void));

// Uninitialised scratch for one kernel_* call, aligned to 256 bytes. It grows to the largest size ever asked
// for, and the next call, which the stream runs after this one, reuses it. Not counted in the account.
void *device_scratch(size_t bytes);

// ---- what kernels write for the host ----

// A wrong index in device memory. The kernel that finds it reports the first one and continues without it;
// the host's next wait is then fatal with `sentence`, a format of (long long index, int value, long long
// bound).
typedef struct IndexFault {
    int taken;
    int value;
    int64_t index, bound;
    const char *sentence;  // in host memory
} IndexFault;

typedef struct Mailbox {
    double sum;  // from kernel_sum and kernel_sum_squares
    unsigned long long rounded, underflows;  // of kernel_underflows, since the start
    IndexFault fault;
} Mailbox;

// In device memory.
Mailbox *device_mailbox(void);
// Waits, and returns a copy of it.
Mailbox device_read_mailbox(void);
// A kernel that may report a fault was launched: the next wait must look for one.
void device_expect_fault(void);

#ifdef __cplusplus
}
#endif
#endif
