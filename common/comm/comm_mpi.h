// comm_mpi.h: what the files of the data plane over MPI share: comm_mpi.c (flows, collectives), comm_mpi_shared.c
// (memory that the ranks of one machine share) and comm_mpi_sums.c.
#ifndef COMM_MPI_H
#define COMM_MPI_H

#include <stdatomic.h>

#include "transport.h"

enum { WINDOW = 4 };                  // segments of a flow under way at once
enum { TAG_DATA, TAG_RESULT, TAGS };  // the two ways of a reduction; else DATA

// ---- comm_mpi_sums.c ----

// out = the sum, or the maximum, of n sources of so many bytes, the first first. out may be one of them. The
// sources move to their ends.
void reduce_bytes(char *out, const char **source, int n, int64_t bytes, DType dtype, ReduceOp op);

// ---- comm_mpi_shared.c ----

enum { CACHE_LINE = 64 };

// From the area's rank to one reader, on one line, with one tag.
typedef struct Channel {
    _Alignas(CACHE_LINE) _Atomic int64_t given;
    _Alignas(CACHE_LINE) _Atomic int64_t taken;
} Channel;

void share_memory(int rank, int ranks);
void unshare_memory(void);
int64_t segment_size(void);  // bytes
bool shares_with(int rank);
Channel *channel(int from, int to, Line line, int tag);
// The slot of this segment from one rank to another; to all: of a segment that all read.
enum { TO_ALL = -1 };
char *slot(int from, int to, Line line, int64_t segment);

#endif
