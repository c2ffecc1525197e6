// doorbell.h: a rank that waits sleeps until another rank of its machine rings its doorbell.
//
// A rank that polls, yielding in between, takes time in which the rank that it waits for could compute:
// with more ranks than cores, up to a third of all. So each rank has a doorbell in the memory that the
// ranks of a machine share. A rank that has written something that another may wait for (a notice, a
// segment, a slot's return) rings the other's; a rank that waits yields a few times, then sleeps on its own:
//
//     rank 0 waits                          rank 1
//       count = doorbell_count()
//       looks: nothing has come               sends a notice
//       doorbell_wait(count)                  doorbell_ring(0)       rank 0 looks again
//
// A ring between the count and the sleep is not lost: doorbell_wait then returns at once. In any case it
// returns after a millisecond, since nobody rings for a death, a signal or MPI's own messages.
#ifndef DOORBELL_H
#define DOORBELL_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct Doorbell {
    _Alignas(64) _Atomic uint32_t rung;  // how often
    _Atomic uint32_t asleep;             // whether its rank sleeps, or is about to
} Doorbell;

// of[r] is the doorbell of rank r, and `mine` is this rank; borrowed. Without doorbells (NULL) ringing does
// nothing, and a rank that waits only yields.
void doorbells_use(Doorbell *const *of, int mine);
// Call it after writing what the rank may be waiting for.
void doorbell_ring(int rank);
// How often this rank's doorbell has been rung.
uint32_t doorbell_count(void);
// Sleeps until it has been rung more often than `count` times, for a millisecond at most.
void doorbell_wait(uint32_t count);

#endif
