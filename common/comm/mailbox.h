// mailbox.h: notices between the ranks of one machine, through the memory that they share.
//
// Over MPI a notice takes as long as the sum of a small tensor. So each rank has a mailbox for each other
// rank of its machine, a row of slots. The writer fills the next slot, and then numbers it. The reader
// looks for the next number, copies the notice, and counts it as taken, which frees the slot.
//
//     rank 0 sends its 18th               slots, of 16       rank 1 has taken 16
//       notice -> slot 1, number 18        17 [18] 3 4 …       finds 17 in slot 0, then 18 in slot 1
//
// If no slot is free, a notice waits in the writer's memory until the writer calls one of these again.
#ifndef MAILBOX_H
#define MAILBOX_H

#include <stdatomic.h>

#include "transport.h"

enum { MAILBOX_SLOTS = 16 };

typedef struct Mailbox {
    struct {
        _Alignas(64) _Atomic uint64_t number;  // of the notice in it, from 1
        Notice notice;
    } slot[MAILBOX_SLOTS];
    _Alignas(64) _Atomic uint64_t taken;
} Mailbox;

// Prepares for this many ranks, without mailboxes so far; 0 ends it.
void mailboxes_use(int ranks);
// The mailboxes from this rank to that one, and back. Borrowed; all bytes zero at the start.
void mailbox_join(int rank, Mailbox *to, Mailbox *from);
// Whether there are mailboxes to all other ranks.
bool mailboxes_reach_all(void);
// Does not wait. False if there is no mailbox to that rank.
bool mailbox_send(const Notice *notice, int rank);
// True if a notice has come. Those of one rank come in the order in which it sent them.
bool mailbox_receive(Notice *notice, int *rank);
// Waits until every notice that this rank has sent is in a slot.
void mailboxes_flush(void);

#endif
