// comm_nccl.h: what the files of the data plane over NCCL share: comm_nccl.cu (streams, groups, the life of
// an operation) and comm_nccl_calls.cu (what each call of comm.h asks of NCCL).
#ifndef COMM_NCCL_H
#define COMM_NCCL_H

#include "cuda/device_cuda.h"
#include "cuda/gpu.h"
#include "transport.h"

#ifdef __CUDACC__
#include <nccl.h>
#else
#include "tests/emulation/nccl_on_cpu.h"
#endif

typedef struct Communicator {
    ncclComm_t nccl;
    bool *met;  // by member: a transfer has connected this rank with it
    struct Communicator *next;
} Communicator;

// An operation on the device. It has begun when `mark` has happened.
typedef struct Flight {
    cudaEvent_t mark, end;
    double began;      // wall clock, when the host saw it begin; 0: not yet
    bool over, ended;  // over on the device; ended by transport_end
    struct Flight *next;
} Flight;

struct Operation {
    Collective call;
    Communicator *comm;  // NULL in a group of one
    int64_t step, sent;
    bool over, flown;  // all of it has been issued to the device; its end has been marked as well
    Flight *flight;
    bool direct;            // each member reduces its piece itself (comm_nccl_calls.cu)
    int64_t chunk, chunks;  // elements of a chunk; chunks of the longest piece
    int64_t row;            // elements from one member's copy to the next
    // making a group
    bool is_group;
    int color, as;
};

#define NCCL_CALL(call) check_nccl(call, #call)
void check_nccl(ncclResult_t result, const char *call);

// ---- comm_nccl.cu ----

cudaStream_t stream_of(const Operation *o);
// Put around calls of NCCL that may wait for other ranks: one that takes twice --timeout ends this rank.
void call_begin(void);
void call_end(void);
// Device memory of the operation's line; it grows to the largest size ever requested.
char *scratch(const Operation *o, size_t bytes);

// ---- comm_nccl_calls.cu ----

// Sets up what an operation needs before its first step.
void prepare_call(Operation *o);
// Issues the operation's next step to NCCL; sets o->over with the last one.
void next_of_call(Operation *o);

#endif
