// transport.h: what carries communication, in two planes. Before the data plane uses what other members send,
// comm_requests.c has checked every argument, and comm_agreement.c has agreed with them, or trusts them.
//
// The control plane (control.c, over Open MPI) joins the ranks, passes their notices, and ends them all
// together. The data plane moves the bytes of tensors. It is chosen when a program is linked: comm_mpi.c,
// or comm_nccl.cu between GPUs; it also defines comm_carrier and comm_sums_in_rank_order (comm.h).
//
// Nothing here waits, except where the comment says so and where NCCL connects ranks (comm_nccl.cu):
// transport_test advances an operation and says whether it is done. So only the front decides how long to
// wait, and what to say when that was too long.
#ifndef TRANSPORT_H
#define TRANSPORT_H

#include "comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum CollectiveKind {
    ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, GATHER, SCATTER, BROADCAST, ALL_TO_ALL,
    BARRIER, TRANSFERS,
    COLLECTIVE_KINDS
} CollectiveKind;

// ---- the control plane ----

enum { NOTICE_VALUES = 4 };

// A small message of fixed size by which ranks agree; comm_agreement.c compares it and clocks with it.
typedef struct Notice {
    int32_t kind;         // CollectiveKind, or what comm_inside.h adds to them
    int32_t group, line;  // Group.handle, and its line
    int32_t op, root, dtype, host;
    int32_t send, peer;   // transfers: the direction, and to or from which rank
    int32_t left;         // how many more notices of this call to the same receiver follow: transfers, values
    int32_t width;        // as how many of the calls that sender and receiver share this one counts
    int64_t before;       // how many of those the sender has started earlier
    uint64_t members, parts;   // hashes of the group's members and of unequal counts
    int64_t count, expected;   // elements; all-to-all: that the sender sends, and expects, of the receiver
    double ready;         // model time at which this rank can begin
    int32_t values;       // of sums on the host
    double value[NOTICE_VALUES];
} Notice;

// Whether mpirun or srun started this process as one of several.
bool control_launched(void);
// Starts this program again as `ranks` ranks under mpirun. Returns only if that was impossible, with a
// sentence that says why.
const char *control_launch(int argc, char **argv, int ranks);
// Whether there are more ranks than cores here, so that one that waits should let others run.
bool control_crowded(void);
// Joins the other ranks. From here until control_met a rank waits for the others no longer than `timeout`
// seconds plus the time that a start takes.
void control_start(int *rank, int *ranks, double timeout);
void control_met(void);
// Fatal if the memory that the `ranks` ranks of this machine share has no room for `bytes` more.
void control_check_shared(double bytes, int ranks);
// Gathers `bytes` bytes of each rank into all[rank], on every rank. Only for the start: it waits.
void control_share(const void *mine, void *all, size_t bytes);
// Does not wait: the notice is copied.
void control_send(const Notice *notice, int rank);
// How many notices this rank has sent.
int64_t control_sent(void);
// True if a notice has come. From each rank they come in the order in which it sent them.
bool control_receive(Notice *notice, int *rank);
// True for the first rank that asks, on each machine: it may explain to the user why all must end. Safe in
// a signal handler.
bool control_claim(void);
// Put around calls of MPI and NCCL that wait for other ranks: inside them nobody checks for dead ranks or
// counts the seconds. If one takes longer than `seconds`, this rank ends with the sentence. Returns the
// watch that it replaces, to be passed to control_watch_end, which resumes it.
typedef struct Watch {
    unsigned seconds;
    const char *sentence;  // borrowed
} Watch;
Watch control_watch(double seconds, const char *sentence);
void control_watch_end(Watch before);
// Ends every rank now with this exit status. Does not return.
void control_abort(int status);
// Call it before transport_finish and control_finish, so that these wait no longer than control_start did.
void control_part(double timeout);
// The last call: afterwards no rank waits for another.
void control_finish(void);

// ---- the data plane ----

// One call, ready to run. Addresses are device memory; parts are stored one after another, and counts are
// in elements per member.
typedef struct Collective {
    CollectiveKind kind;
    ReduceOp op;
    int root;
    DType dtype;
    Group group;
    void *out;
    const void *in;
    int64_t out_bytes, in_bytes;  // that it writes and reads there; 0: nothing on this rank
    const int64_t *out_counts, *in_counts;  // as in comm.h; of all-reduce and reduce, their pieces
    const Transfer *transfers;
    const int64_t *open;  // per transfer: 0 until its other end has come, then more than any count
    int transfer_count;
    const bool *agreed;   // for a call that runs early (transport_runs_early), else NULL
    void *mark;           // from transport_mark
} Collective;

// Part i of a tensor that has so many elements in each part: its bytes, and its place.
static inline int64_t part_bytes(const Collective *c, const int64_t *counts, int i) {
    return counts[i] * (int64_t)dtype_size(c->dtype);
}
static inline char *part_at(const Collective *c, const void *whole, const int64_t *counts, int i) {
    char *at = (char *)whole;
    for (int j = 0; j < i; j++) at += part_bytes(c, counts, j);
    return at;
}

// Where this rank is among all and on its machine.
typedef struct Place {
    int rank, ranks;
    int local_rank, ranks_here;  // among the ranks of this machine
    bool one_machine;            // all ranks are on it
    uint64_t machine;            // the same number on all ranks of a machine, and on no others
} Place;

// Call it after control_start; waits for the others. While the host waits for the device, `look` is called
// repeatedly.
void transport_start(Place place, void (*look)(void));
// transport_finish ends the transport on all ranks, before control_finish. transport_abort ends it on one
// rank at once, whatever the others do.
void transport_finish(void);
void transport_abort(void);

typedef struct Operation Operation;

// Whether operations are launched on a device, where they may wait for each other, and where the host may
// wait for launches of other ranks. comm_agreement.c then launches them in the order in which they were
// started, and comm.c prepares each group.
bool transport_launches(void);
// Only then: prepares a group. All ranks of the world call it at the same time, even those that are not
// members (rank -1); when the operation ends, the group can move data. color: the same on all members of a
// group and on no others; as: the handle of an older group with the same members, or -1.
Operation *transport_group(Group group, int color, int as);

// Whether this call, which is not a batch of transfers, may run before the other members have agreed to it:
// it then sends this rank's data, but uses nothing of theirs until *agreed.
bool transport_runs_early(const Collective *collective);

// Marks what has been issued to the device so far: an operation with this mark reads and writes its tensors
// only after that. Each call has a mark of its own, which transport_run releases.
void *transport_mark(void);
// Starts the operation. At most one per line runs at a time; those of different lines run concurrently.
Operation *transport_run(const Collective *collective);
// Advances the operation; true if the host has nothing left to do. The device may still be moving bytes.
bool transport_test(Operation *operation);
// Bytes that this rank sends to others in this operation; valid once transport_test has returned true.
int64_t transport_bytes(const Operation *operation);
// What is issued to the device from now on runs after the operation. Frees it.
void transport_end(Operation *operation);
// For calls of the transport's own that wait for other ranks: what comm_set_timeout has set (comm.c).
double comm_timeout(void);
// Fatal if what moves the bytes has failed. Returns for how many seconds the device has been working on the
// oldest operation that has not ended; 0 if there is none.
double transport_poll(void);

#ifdef __cplusplus
}
#endif
#endif
