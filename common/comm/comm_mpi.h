// comm_mpi.h: what the files of the data plane over MPI share: comm_mpi.c (flows),
// comm_mpi_calls.c (the flows of each call), comm_mpi_shared.c (memory that the ranks of one machine share)
// and comm_mpi_sums.c.
#ifndef COMM_MPI_H
#define COMM_MPI_H

#include <mpi.h>
#include <stdatomic.h>
#include <string.h>

#include "doorbell.h"
#include "comm_staged.h"

enum { WINDOW = 4 };                  // segments of a flow in flight at once
enum { TAG_DATA, TAG_RESULT, TAGS };  // the two directions of a reduction; otherwise TAG_DATA

// ---- comm_mpi_shared.c ----

enum { CACHE_LINE = 64 };

// Counts of segments given by one rank and taken by one reader, on one line and with one tag.
typedef struct Channel {
    _Alignas(CACHE_LINE) _Atomic int64_t given;
    _Alignas(CACHE_LINE) _Atomic int64_t taken;
} Channel;

void share_memory(Place place);
void unshare_memory(void);
int64_t segment_size(void);  // bytes
bool shares_with(int rank);
Channel *channel(int from, int to, Line line, int tag);
// The slot of this segment from one rank to another; with to = TO_ALL, of a segment that all read.
enum { TO_ALL = -1 };
char *slot(int from, int to, Line line, int64_t segment);

// ---- comm_mpi.c ----

// Bytes from or to one peer, in segments. They are posted in order, at most WINDOW at once, and only up to
// *limit + slack, where *limit counts what must have happened before.
typedef struct Flow {
    bool send;
    bool held;      // received segments are used where they arrive, and given back by whoever uses them
    bool cast;      // the same bytes go to all, so shared memory holds them once
    int peer, tag;  // world rank
    Line line;
    char *base;  // if held: room for WINDOW segments that come as messages
    int64_t bytes, segments;
    int64_t posted, done;
    const int64_t *limit;  // NULL: none
    int64_t slack;
    const struct Flow *after;  // an earlier flow on the same path, where only order tells segments apart
    bool landed[WINDOW];       // messages that arrived before one that was posted earlier
    Channel *channel;          // in shared memory, else NULL
    int64_t count;             // the channel's `given` and `taken` when the flow began
} Flow;

struct Operation {
    Collective call;
    Stage *stage;  // the call works on copies in host memory; NULL: it does not, or they are copied back
    Flow *flow;
    int flows, messages;   // messages: flows that are not in shared memory
    MPI_Request *request;  // (flows, WINDOW)
    int *indices;
    int64_t sent;
    int64_t cast;  // segments for all that have been put into shared memory
    char *keep;    // where this rank's own copy of them goes, made while they are in the cache
    // the reduction of my piece, if there is one
    bool reduces;
    bool whole;          // my piece is the whole tensor, and the sum is not sent back
    const Flow *leaves;  // if whole: the flow that must have sent my copy before the sum overwrites it
    char *result;        // where the sums go: the piece itself, or a ring of segments
    bool result_ring;
    const char *own;         // my own copy of the piece
    Flow **taken;            // by member; NULL for me
    const Flow *given_back;  // a result in the ring may be overwritten when this flow has sent it
    int64_t piece_bytes, segments, reduced;
};

// A flow of this operation to or from a member.
Flow *flow_add(Operation *o, bool send, int member, int tag, void *base, int64_t bytes);
// One buffer for all operations of a line, since one runs at a time; it grows to what the largest needs.
char *staging(Line line, size_t bytes);
static inline int64_t segments_of(int64_t bytes) { return (bytes + segment_size() - 1) / segment_size(); }
// Within device memory of the CPU or within comm_staged.c's copies, which MPI reads and writes directly.
static inline void copy_part(void *to, const void *from, int64_t bytes) {
    if (bytes > 0 && to != from) memmove(to, from, (size_t)bytes);
}

// ---- comm_mpi_calls.c ----

// Adds the flows that carry out the operation's call.
void start_call(Operation *o);

// ---- comm_mpi_sums.c ----

// out = the sum, or the maximum, of n sources of `bytes` bytes each, in order. out may be one of them. The
// pointers in `source` are advanced to the ends.
void reduce_bytes(char *out, const char **source, int n, int64_t bytes, DType dtype, ReduceOp op);

#endif
