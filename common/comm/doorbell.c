// doorbell.c: doorbells are futexes (man 2 futex), which processes can share on Linux.
#include "doorbell.h"

#include <linux/futex.h>
#include <sched.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static Doorbell *const *doorbell;  // by rank
static int me;

void doorbells_use(Doorbell *const *of, int mine) {
    doorbell = of;
    me = mine;
}

// Either the sleeper sees the ring, or the ringer sees that someone sleeps: each writes its own word before
// it reads the other's, and all four accesses are in one order (memory_order_seq_cst).
// Only the first of several ringers wakes it; if that one is interrupted before it does, the sleep ends after
// its millisecond.
void doorbell_ring(int rank) {
    if (!doorbell) return;
    Doorbell *its = doorbell[rank];
    atomic_fetch_add(&its->rung, 1);
    if (atomic_load(&its->asleep) && atomic_exchange(&its->asleep, 0))
        syscall(SYS_futex, &its->rung, FUTEX_WAKE, 1, NULL, NULL, 0);
}

uint32_t doorbell_count(void) { return doorbell ? atomic_load(&doorbell[me]->rung) : 0; }

void doorbell_wait(uint32_t count) {
    static const struct timespec MILLISECOND = {0, 1000000};
    if (!doorbell) {
        sched_yield();
        return;
    }
    Doorbell *mine = doorbell[me];
    atomic_store(&mine->asleep, 1);
    syscall(SYS_futex, &mine->rung, FUTEX_WAIT, count, &MILLISECOND, NULL, 0);
    atomic_store(&mine->asleep, 0);
}
