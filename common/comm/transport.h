// transport.h: what carries communication, in two planes; comm_requests.c has checked every argument and
// comm_agreement.c has agreed with the other members, or trusts them, before the data plane uses what they
// give.
//
// The control plane (control.c, over Open MPI) joins the ranks, passes their notices, and ends them all
// together. The data plane moves the bytes of tensors. It is chosen when a program is linked: comm_mpi.c,
// or comm_nccl.cu between GPUs.
//
// Nothing here waits, but where it says so, and where NCCL connects ranks (comm_nccl.cu): transport_test
// pushes an operation on and says whether it is done. So the front alone decides how long to wait, and what
// to say when it was too long.
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

// A small message of fixed size by which ranks agree: what comm_agreement.c compares and clocks with.
typedef struct Notice {
    int32_t kind;         // CollectiveKind, or what comm_inside.h adds to them
    int32_t group, line;  // Group.handle, and its line
    int32_t op, root, dtype, host;
    int32_t send, peer;   // transfers: which way, to or from which rank
    int32_t left;         // how many more of this call's notices to you follow: transfers, values
    int32_t width;        // how many of what this rank shares with you this call is
    int64_t before;       // and how many of those it has started earlier
    uint64_t members, parts;   // hashes of the group's members and of unequal counts
    int64_t count, expected;   // elements; all-to-all: that I send you, that I expect from you
    double ready;         // model time at which this rank can begin
    int32_t values;       // of sums on the host
    double value[NOTICE_VALUES];
} Notice;

// Whether mpirun or srun started this process as one of several.
bool control_launched(void);
// Starts this program again as so many ranks under mpirun. Returns only if that was impossible, with the
// reason in a sentence.
const char *control_launch(int argc, char **argv, int ranks);
// Whether there are more ranks here than cores, so that one that waits should let others run.
bool control_crowded(void);
// Joins the other ranks; waits for them, no longer than `timeout` and what a start takes, until
// control_met.
void control_start(int *rank, int *ranks, double timeout);
void control_met(void);
// Fatal where the memory that so many ranks of this machine share does not take so many bytes more.
void control_check_shared(double bytes, int ranks);
// Bytes of each rank (all of one size) into all[rank]. Only for the start: it waits.
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
// Around calls of MPI and NCCL that wait for other ranks: in them nobody looks for dead ones, and no loop
// of ours counts the seconds. One that takes longer ends this rank with the sentence. What was watched
// before goes on at the end.
typedef struct Watch {
    unsigned seconds;
    const char *sentence;  // borrowed
} Watch;
Watch control_watch(double seconds, const char *sentence);
void control_watch_end(Watch before);
// Ends every rank now with this exit status. Does not return.
void control_abort(int status);
// Before the data plane's end and control_finish, which wait for the others: no longer than at the start.
void control_part(double timeout);
// The last call: nobody is missed afterwards.
void control_finish(void);

// ---- the data plane ----

// One call, ready to run. Addresses are device memory; parts lie one after another, counts in elements per
// member.
typedef struct Collective {
    CollectiveKind kind;
    ReduceOp op;
    int root;
    DType dtype;
    Group group;
    void *out;
    const void *in;
    const int64_t *out_counts, *in_counts;  // as comm.h has them; the pieces of an all-reduce and a reduce
    const Transfer *transfers;
    const int64_t *open;  // per transfer: 0 as long as its other end has not come, then more than any count
    int transfer_count;
    const bool *agreed;   // of a call that runs early (transport_runs_early), else NULL
    void *mark;           // of transport_mark
} Collective;

// Where this rank stands.
typedef struct Place {
    int rank, ranks;
    int local_rank, ranks_here;  // among the ranks of this machine
    bool one_machine;            // it has all of them
    uint64_t machine;            // the same number on all of its ranks, and on no others
} Place;

// After control_start; waits for the others. While the host waits for the device, `look` is called over and
// over.
void transport_start(Place place, void (*look)(void));
// What carries the bytes, for the header of a program: "NCCL 2.28.9"; "" for what needs no word.
const char *transport_text(void);
// As comm_sums_in_rank_order says.
bool transport_sums_in_rank_order(void);
// All ranks, before they go: control_finish follows. abort: one goes at once, and nobody knows what the
// others do.
void transport_finish(void);
void transport_abort(void);

typedef struct Operation Operation;

// NULL where groups need no preparation. Else all ranks of the world call this at once, those that are no
// members (rank -1), too; the operation ends when this group can move data. Color: the same on all
// members of a group and on no others; as: the handle of an older group with the same members, or -1.
Operation *transport_group(Group group, int color, int as);
bool transport_prepares_groups(void);
// Whether operations are launched on a device, where they may wait for each other, and the host for other
// ranks' launches. Then comm_agreement.c launches them in the order in which they were started.
bool transport_launches(void);

// Whether this call, which is no batch of transfers, may run before the other members have agreed to it: it
// then gives what it has, and uses nothing of theirs until *agreed.
bool transport_runs_early(const Collective *collective);

// Notes what the device has been given up to now: an operation with this mark reads and writes its
// tensors only after that. One for each call, ended by transport_run.
void *transport_mark(void);
// One of a line runs at a time, and those of other lines beside it.
Operation *transport_run(const Collective *collective);
// Whether all that this operation needs of the host is done; the device may still be moving its bytes.
bool transport_test(Operation *operation);
// Sent by this rank to others, once transport_test says true.
int64_t transport_bytes(const Operation *operation);
// What the device is given from now on comes after the operation. Ends it.
void transport_end(Operation *operation);
// Fatal if what moves the bytes has failed. For how many seconds the device has been at the oldest
// operation that it has not ended; 0 if there is none.
double transport_poll(void);

#ifdef __cplusplus
}
#endif
#endif
