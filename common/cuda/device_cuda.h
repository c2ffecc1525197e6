// device_cuda.h: what the CUDA back end shares between its files (device_cuda.cu, ops_cuda*.cu, gemm_*,
// comm_nccl.c) beside device.h. C and C++ read it, and it needs no header of CUDA.
#ifndef DEVICE_CUDA_H
#define DEVICE_CUDA_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// GPUs that this process sees; at least 1, else fatal.
int device_count(void);
// The compute stream, a cudaStream_t: all kernels, copies, allocations and releases of this rank run on
// it, in the order of the calls. So memory may be given up while a kernel that uses it still waits its
// turn; other streams need events.
void *device_stream(void);

// Waits until the compute stream has done all that was asked of it, and tells what went wrong there, if
// anything. It looks at the stream again and again, so that it can end where the stream never does:
// between two looks it calls what device_on_wait has set (NULL: nothing), which may call fatal. NCCL's
// errors and timeouts come out there.
void device_wait(void);
void device_on_wait(void (*look)(void));

// Uninitialised scratch for one kernel_* call, aligned to 256; it grows to the largest that was ever
// asked for and is used again by the next call, which the stream runs after this one. No part of the
// account.
void *device_scratch(size_t bytes);

// ---- what kernels write for the host ----

// A wrong index in device memory. The kernel that meets it reports the first one, goes on without it,
// and the host's next wait is fatal with `sentence`, a format of (long long index, int value, long long
// bound).
typedef struct IndexFault {
    int taken;
    int value;
    int64_t index, bound;
    const char *sentence;  // of the host
} IndexFault;

typedef struct Mailbox {
    double sum;  // of kernel_sum and kernel_sum_squares
    unsigned long long rounded, underflows;  // of kernel_underflows, since the start
    IndexFault fault;
} Mailbox;

// In device memory.
Mailbox *device_mailbox(void);
// Waits, and copies it.
Mailbox device_read_mailbox(void);
// A kernel that may report was launched: the next wait shall look.
void device_expect_fault(void);

#ifdef __cplusplus
}
#endif
#endif
