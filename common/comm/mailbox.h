// mailbox.h: notices between the ranks of one machine, through the memory that they share.
//
// By MPI a notice takes as long as the sum of a small tensor. So from each rank to each other of its
// machine there is a mailbox, a row of slots. The writer fills the next slot, and then numbers it. The
// reader looks for the number that is next, copies the notice, and counts it as taken: the slot is free.
//
//     rank 0 sends its 18th               slots, of 16       rank 1 has taken 16
//       notice -> slot 1, number 18        17 [18] 3 4 …       finds 17 in slot 0, then 18 in slot 1
//
// A notice that finds no slot waits in the writer's memory until the writer comes here again.
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

// So many ranks, and no mailbox yet; 0: none any more.
void mailboxes_use(int ranks);
// From this rank to that one, and back. All zero at the start; the caller's.
void mailbox_join(int rank, Mailbox *to, Mailbox *from);
// Whether mailboxes lead to all others.
bool mailboxes_reach_all(void);
// Does not wait. False if no mailbox leads there.
bool mailbox_send(const Notice *notice, int rank);
// True if a notice has come; those of one rank in the order in which it sent them.
bool mailbox_receive(Notice *notice, int *rank);
// Waits until all that this rank has sent stands in a slot.
void mailboxes_flush(void);

#endif
