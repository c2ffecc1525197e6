// mailbox.c: rows of numbered slots, with one writer and one reader each.
#include "mailbox.h"

#include <sched.h>
#include <stdlib.h>

#include "doorbell.h"

typedef struct Late {  // a notice that found no free slot
    struct Late *next;
    Notice notice;
} Late;

typedef struct Way {  // between this rank and another
    Mailbox *to, *from;
    uint64_t sent, taken, received;  // taken: as this rank last read it
    Late *first, *last;
} Way;

static Way *way;  // by rank
static int ranks, reached, late;

void mailboxes_use(int count) {
    free(way);
    way = calloc((size_t)count + 1, sizeof *way);
    CHECK(way, "out of host memory for %d ranks", count);
    ranks = count;
    reached = 0;
}

void mailbox_join(int rank, Mailbox *to, Mailbox *from) {
    way[rank] = (Way){.to = to, .from = from};
    reached++;
}

bool mailboxes_reach_all(void) { return reached > 0 && reached == ranks - 1; }

static bool put(Way *w, const Notice *notice, int rank) {
    if (w->sent - w->taken == MAILBOX_SLOTS)
        w->taken = atomic_load_explicit(&w->to->taken, memory_order_acquire);
    if (w->sent - w->taken == MAILBOX_SLOTS) return false;
    int slot = (int)(w->sent % MAILBOX_SLOTS);
    w->to->slot[slot].notice = *notice;
    atomic_store_explicit(&w->to->slot[slot].number, ++w->sent, memory_order_release);
    doorbell_ring(rank);
    return true;
}

static void put_late(void) {
    for (int r = 0; r < ranks && late; r++)
        for (Late *l; (l = way[r].first) && put(&way[r], &l->notice, r); late--) {
            way[r].first = l->next;
            free(l);
        }
}

bool mailbox_send(const Notice *notice, int rank) {
    if (rank >= ranks || !way[rank].to) return false;
    Way *w = &way[rank];
    if (!w->first && put(w, notice, rank)) return true;
    Late *l = host_alloc(sizeof *l);
    *l = (Late){.notice = *notice};
    if (w->first) w->last->next = l;
    else w->first = l;
    w->last = l;
    late++;
    return true;
}

bool mailbox_receive(Notice *notice, int *rank) {
    if (late) put_late();
    for (int r = 0; r < ranks; r++) {
        Way *w = &way[r];
        int slot = (int)(w->received % MAILBOX_SLOTS);
        if (!w->from ||
            atomic_load_explicit(&w->from->slot[slot].number, memory_order_acquire) != w->received + 1)
            continue;
        *notice = w->from->slot[slot].notice;
        *rank = r;
        atomic_store_explicit(&w->from->taken, ++w->received, memory_order_release);
        if (w->received % (MAILBOX_SLOTS / 2) == 0) doorbell_ring(r);  // it may wait for a slot
        return true;
    }
    return false;
}

void mailboxes_flush(void) {
    for (put_late(); late; put_late()) sched_yield();
}
