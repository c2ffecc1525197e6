// in_flight.h: which memory the requests in flight read and write, so that collisions with it are found.
//
// From its start until comm_wait a request owns its tensors: what it reads must not be written by others,
// and what it writes must be neither read nor written. An operation, a copy from or to the host or another
// request that breaks this would see half of the bytes, on some runs and some machines; here it is fatal on
// all, even in a dry run, and the sentence names both. The check is by elements, not by tensors: one bucket
// of a flat gradient may be in flight while the next is filled.
#ifndef IN_FLIGHT_H
#define IN_FLIGHT_H

#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

// Notes that `request` reads t, or writes it. Requests of one line run one after another, and so never
// collide. `text` describes the request in messages: "all_reduce, call 12 in group dp".
void in_flight_begin(Tensor t, bool writes, int line, const void *request,
                     const char *(*text)(const void *));
// Removes all notes of this request.
void in_flight_end(const void *request);

extern int in_flight_count;  // number of notes; usually 0
void in_flight_look(const char *who, Tensor t, bool writes, int line);
enum { NO_LINE = -1 };
// Called before `who` ("op_add") reads or writes t: fatal if a request in flight on another line forbids
// it. An operation passes NO_LINE.
static inline void in_flight_check(const char *who, Tensor t, bool writes, int line) {
    if (in_flight_count) in_flight_look(who, t, writes, line);
}

// Advances all requests in flight as far as possible without waiting; set by comm. Nothing runs in the
// background: while there are notes, clock.c calls this at the end of each operation, and a CPU calls it
// between the tiles of a long one (a multiply that is one call of a BLAS has none), so that a rank that
// computes does not hold up the others. Only the first thread may call it.
extern void (*in_flight_push)(void);

#ifdef __cplusplus
}
#endif
#endif
