// in_flight.h: what requests in flight read and write, so that nobody collides with it.
//
// Between its start and comm_wait a request owns its tensors: what it reads may be read by others but not
// written, and what it writes may not be touched. An operation, a copy from or to the host or another
// request that does so would see half of the bytes, on some runs and some machines; here it is fatal on
// all, also in a dry run, and the sentence names both. Elements count, not tensors: one bucket of a flat
// gradient may be in flight while the next is filled.
#ifndef IN_FLIGHT_H
#define IN_FLIGHT_H

#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

// Notes that `request` reads t, or writes it. Requests of one line run one after another. `text` says which
// request it is: "all_reduce, call 12 in group dp".
void in_flight_begin(Tensor t, bool writes, int line, const void *request,
                     const char *(*text)(const void *));
// All that this request has noted is over.
void in_flight_end(const void *request);

extern int in_flight_count;  // of notes; mostly none
void in_flight_look(const char *who, Tensor t, bool writes, int line);
enum { NO_LINE = -1 };
// Fatal if `who`, "op_add", reads or writes t, and a request of another line that is in flight forbids it.
static inline void in_flight_check(const char *who, Tensor t, bool writes, int line) {
    if (in_flight_count) in_flight_look(who, t, writes, line);
}

// Moves what is in flight as far as it goes without waiting; comm sets it. Nothing runs in the background:
// if there are notes, each operation ends with this (clock.c), and a CPU calls it between the tiles of a
// long one, so that ranks which compute keep nobody waiting. For the first thread alone.
extern void (*in_flight_push)(void);

#ifdef __cplusplus
}
#endif
#endif
