// comm.h: collective and point-to-point communication between ranks, on device tensors.
//
// One front (comm.c, comm_requests.c, comm_ports.c, comm_agreement.c) checks that all members of a group
// call the same thing, counts the bytes, moves the model clock, and drives the transport that is linked in
// (transport.h: comm_mpi.c, or comm_nccl.cu between GPUs). Names and meanings are those of MPI and NCCL.
// Every call here starts at once and returns a request; comm_wait ends it. Until then its tensors belong to
// the request: whoever reads an output or writes an input is fatal (tensor/in_flight.h).
// comm_wait(comm_all_reduce(…)) is both in one. Between GPUs comm_wait makes the device wait, not the host:
// what is computed after it comes after the bytes, which move by themselves. Between hosts they move while
// a rank waits, at the end of each operation, and between the tiles of a long one.
//
// A group has a line (mesh.h). Requests of one line run one after another in the order in which they were
// started, as on a communication stream of a GPU: ranks that share two groups of a line use them in the
// same order. Requests of different lines do not wait for each other. Yet what two ranks share, both start
// in the same order, whatever the lines: kernels of two NCCL communicators can wait for each other
// otherwise. A batch of transfers starts all of its transfers at once. Other orders are found on every
// transport, with one sentence that names both calls.
//
// Sums run in rank order, member 0 first, whatever the algorithm or the timing: f64 in f64, i32 in i32,
// all other dtypes in f32, rounded once at the end. So every member gets the same bits, every time, and
// reduce-scatter the very bits of all-reduce. A maximum in which one member is NaN is NaN. With NCCL all
// of this holds but for sums of f32 and f64, which run in an order of its own: every member still gets
// the same bits, but not always those of MPI, of another number of members, or of reduce-scatter. So a
// proof of zero bits asks comm_sums_in_rank_order first.
//
// On the model clock (clock.h) a call starts when the last member is ready, and takes what
// clock_collective_seconds says; comm_wait makes the compute stream wait for its end. A member is ready
// when its compute stream has come to the call, the request before it on its line has ended, and its ports
// are free. A rank has one port to the other GPUs of its node and one to other nodes; a collective uses
// those that lead to other members, a batch of transfers those through which it sends. Messages on one port
// run one after another in the order in which the rank started them, and those on different ports side by
// side. The port is kept from the moment at which this rank could begin, for as long as the call takes:
// when the others come late, the call starts late, but no later call of this rank is moved by that, since
// it must not depend on what other lines do in the meantime. So the clock is exact within a line, and the
// same on every run; where members come at different times, two lines may overlap on one port.
//
// A dead rank, a mismatched call or a wait beyond --timeout ends all ranks with one sentence.
#ifndef COMM_H
#define COMM_H

#include "mesh.h"
#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- start and end ----

// After base_start and the parsing of options, so that wrong use is told once. Under mpirun or srun:
// joins the others. Else starts this program again under mpirun with `natural` ranks, or as many as
// "--ranks N" in argv says, oversubscribed and as root if need be; one rank alone needs no mpirun. Reads
// "--timeout SECONDS" and "--trust-calls", too. Chooses the GPU of this rank, by its number among those of
// its machine. Checks that all ranks run the same binary with the same arguments. On return, say() speaks
// on rank 0 alone, and fatal() ends all ranks with one sentence.
void comm_start(int argc, char **argv, int natural);
// Last call of main: waits for all ranks and returns the worst of their exit statuses, the same on each. A
// program that leaves main or calls exit() without it has called it with its status.
int comm_finish(int status);
int comm_ranks(void);  // 1 without comm_start
int comm_rank(void);
const char *comm_host(int rank);
// What carries the bytes, if a header should say so: "NCCL 2.28.9"; else "".
const char *comm_carrier(void);
// Whether sums of f32 and f64 are those of the promise above to the bit.
bool comm_sums_in_rank_order(void);
// How long a wait may last before it is taken for a deadlock (--timeout); default 300 s. Returns
// what it was.
double comm_set_timeout(double seconds);
// Whether calls are compared before they start; on by default (--trust-calls: off), roots, dtypes,
// operations and sizes in groups of up to 64. Off, a call sends its data and nothing else, and starts at
// once: members that call different things, or in another order, get wrong numbers or wait until --timeout,
// and on the model clock a call starts when this rank is ready. Barriers, sums on the host and dry runs are
// as ever. Set it alike on all ranks, between the same two calls. Returns what it was.
bool comm_set_check(bool on);
// From now on this rank stands for all: the others of any group are taken to call the same at the same
// moment of the model clock, and to have the same numbers. Only in a dry run; groups need not
// have been made, and those that are made are rank 0's, so that one process clocks a rank of any cluster.
// What differs between ranks (stages of a pipeline, who has more tokens) it cannot see.
void comm_stand_for_all(bool on);
// A group of these world ranks, in this order. All ranks must make their groups in the same sequence: the
// n-th call of each rank makes the n-th group (of which there may be several that share no rank). Nobody
// waits here, but with NCCL, where all ranks make the group's communicator together. A rank that is not a
// member gets rank -1. Groups live until comm_finish.
Group comm_group(const char *name, Line line, const int *members, int size);
// All ranks, in order; one before comm_start.
Group comm_world(void);

// ---- requests ----

typedef struct Request Request;
// Ends the request. The request is gone afterwards; a request that is never waited for is fatal at
// comm_finish.
void comm_wait(Request *request);
// Those that are not NULL, in order; sets them NULL.
void comm_wait_all(Request **requests, int count);

typedef enum ReduceOp { REDUCE_SUM, REDUCE_MAX } ReduceOp;

// n = members, K = bytes of the tensor named, k = K / n or this member's own part of it where parts are
// unequal. "Sends" is what a call sends from this rank; each part counts as sent to the member it is meant
// for, also where NCCL passes it on from rank to rank. An all-reduce and a reduce split their tensor in
// pieces of ceil(count / n) elements, the last ones shorter; k is this member's piece, of which the others
// give it their copies.

// In place. To each its piece, and the sum of this one: K - k + (n - 1) k; in equal pieces 2 (n - 1) / n K.
Request *comm_all_reduce(Tensor t, ReduceOp op, Group group);
// The result stands at root; all others keep what they gave. Sends K - k, and k if not root.
Request *comm_reduce(Tensor t, ReduceOp op, int root, Group group);
// Part i of `in`, the sum over members, goes to member i. Parts are counts[i] elements long in order;
// counts NULL: equal parts. out may be this member's own part of `in`. Sends K(in) - k.
Request *comm_reduce_scatter(Tensor out, Tensor in, const int64_t *counts, ReduceOp op, Group group);
// Member i's `in` becomes part i of `out`. `in` may be this member's own part of `out`. Sends (n - 1)
// K(in).
Request *comm_all_gather(Tensor out, Tensor in, const int64_t *counts, Group group);
// The whole tensor, `out` of a gather and `in` of a scatter, is read at root alone; elsewhere it may be
// {0}. A gather sends K(in), from root 0; a scatter sends from root K(in) - k, else 0.
Request *comm_gather(Tensor out, Tensor in, const int64_t *counts, int root, Group group);
Request *comm_scatter(Tensor out, Tensor in, const int64_t *counts, int root, Group group);
// Sends from root (n - 1) K, else 0.
Request *comm_broadcast(Tensor t, int root, Group group);
// Part i of `in` (in_counts[i] elements) goes to member i; part i of `out` (out_counts[i]) comes from
// member i. NULL counts: equal parts. `in` and `out` must not overlap. Sends K(in) - k.
Request *comm_all_to_all(Tensor out, const int64_t *out_counts, Tensor in, const int64_t *in_counts,
                         Group group);
// Sends nothing but the notices that every call begins with, which are not counted.
Request *comm_barrier(Group group);

// Point to point: peers are ranks of the group. As in NCCL, a send ends only when the receive has begun,
// so calls that depend on each other go into one batch, which runs all of them at once. Between two
// ranks, the i-th send of one meets the i-th receive of the other, in whatever batches they stand. To
// oneself: only within one batch. Bytes: all that is sent to others. With NCCL two ranks connect before
// their first transfer in a group: a batch then begins when each of its peers that are new has come to a
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
// counted and clocked as an all-reduce of one f64, and computed in a dry run, too. comm_max is NaN if one
// value is.
double comm_sum(double value, Group group);
double comm_max(double value, Group group);
// In place: each of these becomes its sum; one all-reduce of `count` f64.
void comm_sum_all(double *values, int count, Group group);

// ---- counts ----

// What this rank has sent since the last clock_reset, by kind of call: "all_reduce" "reduce"
// "reduce_scatter" "all_gather" "gather" "scatter" "broadcast" "all_to_all" "barrier" "transfers". Calls
// and bytes count when a call starts, seconds when it is waited for. In a group of one nobody is called.
typedef struct CommCount {
    const char *name;
    int64_t calls;
    int64_t bytes;           // sent by this rank
    int64_t across;          // of these to ranks of other nodes (clock_node)
    double wall_seconds;     // inside start and wait; of the total also what moves while ranks compute
    double model_seconds;    // on the communication stream
    double exposed_seconds;  // model clock: the compute stream waited for it
} CommCount;
CommCount comm_total(void);
int comm_counts(const CommCount **counts);  // all kinds, called or not
CommCount comm_count(const char *name);  // of one kind; zeros if there was none

#ifdef __cplusplus
}
#endif
#endif
