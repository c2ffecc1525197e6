// comm.h: collective and point-to-point communication between ranks, on device tensors.
// One front (comm.c, comm_requests.c, comm_ports.c, comm_agreement.c) checks that all members of a group
// make the same call, counts the bytes, advances the model clock, and drives the transport that is linked
// in (transport.h: comm_mpi.c, or comm_nccl.cu between GPUs). Names and meanings are those of MPI and NCCL.
// Every call returns at once with a request, and comm_wait ends it. Until then its tensors belong to the
// request: to read an output or write an input is fatal (tensor/in_flight.h). comm_wait(comm_all_reduce(…))
// is the blocking form. Between GPUs comm_wait makes the device wait, not the host: what is computed after
// it comes after the communication, which proceeds by itself. Between hosts the bytes move while a rank
// waits, at the end of each operation, and between the tiles of a long one.
// A group has a line (mesh.h). The requests of one line run one after another in the order in which they
// were started, as on one communication stream of a GPU; so ranks that share two groups of a line use them
// in the same order. Requests of different lines do not wait for each other. Even so, two ranks must start
// the calls that they share in the same order, whatever their lines: otherwise kernels of two NCCL
// communicators could wait for each other. A batch of transfers starts all of its transfers at once. A
// different order is detected on every transport, with one sentence that names both calls.
// Sums are taken in rank order, member 0 first, whatever the algorithm or the timing: f64 in f64, i32 in
// i32, all other dtypes in f32, rounded once at the end. So every member gets the same bits, every time,
// and reduce-scatter gives the same bits as all-reduce. A maximum is NaN if any member's value is. With
// NCCL all of this holds except for sums of f32 and f64, which NCCL takes in an order of its own: every
// member still gets the same bits, but not always those of MPI, of a different number of members, or of
// reduce-scatter. So a proof that demands zero differing bits asks comm_sums_in_rank_order first.
// On the model clock (clock.h) a call starts when the last member is ready, and takes
// clock_collective_seconds; comm_wait makes the compute stream wait for its end. A member is ready when its
// compute stream has reached the call, the previous request on its line has ended, and its ports are free.
// A rank has one port to the other GPUs of its node and one to other nodes; a collective uses those that
// lead to other members, a batch of transfers those through which it sends. Messages on one port run one
// after another in the order in which the rank started them, those on different ports concurrently. A port
// is taken from the moment at which this rank could begin, for the duration of the call. If other members
// come late, the call starts late, but this rank's later calls are not moved: they must not depend on what
// other lines do in the meantime. So the clock is exact within a line, and the same on every run; if
// members come at different times, two lines may overlap on one port.
//
// A wrong argument, a mismatched call, a dead rank or a wait beyond --timeout ends all ranks with one
// sentence.
#ifndef COMM_H
#define COMM_H

#include "mesh.h"
#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- start and end ----

// Call it after base_start and options_parse, so that wrong usage is reported once. Under mpirun or srun it
// joins the other ranks. Otherwise it starts this program again under mpirun, with as many ranks as
// "--ranks N" in argv says, else `natural`, oversubscribed and as root if need be; a single rank needs no
// mpirun. Also reads "--timeout SECONDS" and "--trust-calls". Chooses the GPU of this rank, by its number
// among the ranks of its machine. Checks that all ranks run the same binary with the same arguments. On
// return, say() prints on rank 0 only, and fatal() ends all ranks with one sentence.
void comm_start(int argc, char **argv, int natural);
// Last call of main: waits for all ranks and returns the largest of their exit statuses, the same on each.
// A program that returns from main or calls exit() without it behaves as if it had called it with that
// status, except over NCCL: the CUDA runtime may end before that, so there the call must be made.
int comm_finish(int status);
int comm_ranks(void);  // 1 without comm_start
int comm_rank(void);
const char *comm_host(int rank);
// What carries the bytes, for a program's header: "NCCL 2.28.9"; "" where there is nothing to say.
const char *comm_carrier(void);
// Whether sums of f32 and f64, too, are taken in rank order as described above.
bool comm_sums_in_rank_order(void);
// Seconds after which a wait is taken for a deadlock (--timeout); 300 by default. Returns the old value.
double comm_set_timeout(double seconds);
// Collective: called before and after a part that one rank alone executes. The others wait in the second
// call, without a timeout; meanwhile that rank may use all memory that its machine has left.
void comm_one_works(bool begins);
// Whether calls are compared before they start: kind, group, order, root, dtype, operation and sizes. On by
// default, off with --trust-calls. With the check off, a call sends its data and nothing else, and starts
// at once: members that make different calls, or in another order, get wrong numbers or wait until
// --timeout, and on the model clock a call starts when this rank is ready. Barriers, sums on the host and
// dry runs are not affected. All ranks must set it alike, between the same two calls. Returns the old
// value.
bool comm_set_check(bool on);
// From now on this rank represents all: the other members of any group are assumed to make the same calls
// at the same model time, with the same numbers. Only in a dry run. Groups need not have been made with
// comm_group; in those that are, this process is rank 0 or, after comm_act_as, the rank named there. So one
// process clocks a rank of a cluster of any size. It cannot see uneven tokens or other differences between
// ranks.
void comm_stand_for_all(bool on);
// A rank as which it acts, and what each rank has of its own: the model clock, the ends of its lines, and
// until when its ports are busy.
typedef struct StandIn {
    int rank;
    double now, line_end[COMM_LINES], port_free[2];
} StandIn;
// With comm_stand_for_all: from now on this process acts as next.rank, from that rank's state. Returns the
// rank as which it acted until now, and its state, to be passed in when it acts as that again. So one
// process clocks in turn ranks that differ, as the stages of a pipeline do. When a message between two of
// them arrives is for the caller to decide.
StandIn comm_act_as(StandIn next);
// A group of these world ranks, in this order; `members` is copied. All ranks must make their groups in the
// same sequence: the n-th call on each rank makes the n-th group. Ranks may name different members in the
// n-th call, which then makes several groups that share no rank. No rank waits here, except with NCCL,
// where all ranks create the communicators together. A rank that is not a member gets rank -1. Groups live
// until comm_finish.
Group comm_group(const char *name, Line line, const int *members, int size);
// All ranks, in order; before comm_start, this rank alone.
Group comm_world(void);

// ---- requests ----

typedef struct Request Request;
// Waits until the request is done, and frees it. Each is waited for once: NULL is fatal, and so is a request
// that nobody waited for, in comm_finish.
void comm_wait(Request *request);
// Waits for those that are not NULL, in order, and sets them to NULL.
void comm_wait_all(Request **requests, int count);

typedef enum ReduceOp { REDUCE_SUM, REDUCE_MAX } ReduceOp;

// n = members, K = bytes of the tensor named, k = K / n, or this member's own part of K where parts are
// unequal. "Sends" is what this rank sends in a call; each part counts as sent to the member that it is
// meant for, even where NCCL passes it from rank to rank. All-reduce and reduce split their tensor into
// pieces of ceil(count / n) elements, the last ones shorter; k is the piece that this member sums up, for
// which the others send it their copies. `counts` (n) is read before the call returns.

// In place. Sends K - k (to each member its piece) and (n - 1) k (the sum of its own piece to all): 2 (n -
// 1) / n K if pieces are equal.
Request *comm_all_reduce(Tensor t, ReduceOp op, Group group);
// The result is left at root; t does not change on the others. Sends K - k, and k more if not root.
Request *comm_reduce(Tensor t, ReduceOp op, int root, Group group);
// Member i gets part i of the sum of all `in`. Parts follow each other, with counts[i] elements each;
// counts NULL: equal parts. `out` may be this member's own part of `in`. Sends K(in) - k.
Request *comm_reduce_scatter(Tensor out, Tensor in, const int64_t *counts, ReduceOp op, Group group);
// Member i's `in` becomes part i of `out`. `in` may be this member's own part of `out`. Sends (n - 1)
// K(in).
Request *comm_all_gather(Tensor out, Tensor in, const int64_t *counts, Group group);
// The whole tensor, `out` of a gather and `in` of a scatter, is used only at root; elsewhere it may be {0}.
// In a gather the root sends 0 and the others K(in); in a scatter the root sends K(in) - k and the others
// 0.
Request *comm_gather(Tensor out, Tensor in, const int64_t *counts, int root, Group group);
Request *comm_scatter(Tensor out, Tensor in, const int64_t *counts, int root, Group group);
// The root sends (n - 1) K, the others 0.
Request *comm_broadcast(Tensor t, int root, Group group);
// Part i of `in` (in_counts[i] elements) goes to member i; part i of `out` (out_counts[i]) comes from
// member i. NULL counts: equal parts. `in` and `out` must not overlap. Sends K(in) - k.
Request *comm_all_to_all(Tensor out, const int64_t *out_counts, Tensor in, const int64_t *in_counts,
                         Group group);
// Sends only the notices with which every call begins, and they are not counted.
Request *comm_barrier(Group group);

// Point to point: peers are ranks of the group. As in NCCL, a send ends only after the receive has begun,
// so calls that depend on each other go into one batch, which runs all of them at once. Between two ranks,
// the i-th send of one is received by the i-th receive of the other, whatever batches they are in. A rank
// sends to itself only within one batch. Bytes: everything sent to others. With NCCL two ranks connect
// before their first transfer in a group: a batch then begins once each peer that is new has reached a
// batch with this rank.
typedef struct Transfer {
    bool send;  // else receive
    int peer;
    Tensor t;
} Transfer;
Request *comm_transfers(const Transfer *transfers, int count, Group group);
Request *comm_send(Tensor t, int to, Group group);
Request *comm_receive(Tensor t, int from, Group group);
Request *comm_send_receive(Tensor send, int to, Tensor receive, int from, Group group);

// Sums that programs need on the host (token counts, norms, verdicts): blocking, in rank order, in f64;
// counted and clocked as an all-reduce of one f64, and computed even in a dry run. comm_max is NaN if any
// value is.
double comm_sum(double value, Group group);
double comm_max(double value, Group group);
// In place: each value becomes its sum over the group; one all-reduce of `count` f64.
void comm_sum_all(double *values, int count, Group group);
// all (n, count) = each member's `count` values, by rank; one all-gather of n count f64.
// Each sends its own alone: of a table to which each adds a row, comm_sum_all would send n times as many.
void comm_values_of_all(const double *mine, int count, double *all, Group group);
// Whether all members have called it with the same value; all get the same answer.
bool comm_same(uint64_t value, Group group);
// Whether all members find the same files under these names. If all see one and the same file under each, as
// on one machine or on a disk that hosts share, none is read; else each member reads its own whole.
bool comm_same_files(char *const *paths, int count, Group group);

// ---- counts ----

// What this rank has sent since the last clock_reset, by kind of call: "all_reduce" "reduce"
// "reduce_scatter" "all_gather" "gather" "scatter" "broadcast" "all_to_all" "barrier" "transfers". Calls
// and bytes are counted when a call starts, seconds when it is waited for. Calls in a group of one are not
// counted.
typedef struct CommCount {
    const char *name;
    int64_t calls;
    int64_t bytes;           // sent by this rank
    int64_t across;          // of these, to ranks of other nodes (clock_node)
    double wall_seconds;     // in the call and its wait; in the total also for bytes moved during compute
    double model_seconds;    // on the communication stream
    double exposed_seconds;  // model clock: how long the compute stream waited for it
} CommCount;
CommCount comm_total(void);
int comm_counts(const CommCount **counts);  // all kinds, called or not; returns how many. Borrowed
CommCount comm_count(const char *name);  // of one kind; zeros if there was none

#ifdef __cplusplus
}
#endif
#endif
