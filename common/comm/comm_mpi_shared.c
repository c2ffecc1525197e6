// comm_mpi_shared.c: memory that MPI shares among the ranks of one machine.
// Each rank has an area that the others of its machine can read: for each line a row of WINDOW slots for
// each of them and, in place of its own row, slots for what goes to all. A writer fills a slot and counts
// it as given; the reader uses it in place, and counts it as taken, which frees it. All counts only grow.
// An operation ends only when what it gave to all has been taken, so the next one of its line finds those
// slots free; the other slots are counted across operations, and an operation ends when its last segment is
// in one. The areas belong to the transport, as a GPU's channel buffers belong to NCCL: the account of
// device memory includes only tensors and what staging() takes.

#include <mpi.h>
#include <stdlib.h>
#include <string.h>

#include "comm_mpi.h"
#include "mailbox.h"

enum { MOST_SHARED = 36 << 20, MOST_SEGMENT = 64 << 10, LEAST_SEGMENT = 4 << 10 };

static struct {
    int ranks, here;
    int64_t segment;
    MPI_Win window;
    bool sharing;
    char **area;  // by rank, NULL on other machines; it begins with the rank's doorbell
    Doorbell **doorbell;
    int *local;   // its number among the ranks of this machine
} state;

// An area begins with its rank's doorbell, its mailboxes to the others here, and its channels.
static size_t mailboxes_end(void) { return sizeof(Doorbell) + (size_t)state.here * sizeof(Mailbox); }

static size_t channels_bytes(void) {
    return (mailboxes_end() + (size_t)(state.ranks * COMM_LINES * TAGS) * sizeof(Channel) + 4095) / 4096 *
           4096;
}

static Mailbox *mailbox(int from, int to) {
    return (Mailbox *)(state.area[from] + sizeof(Doorbell)) + state.local[to];
}

int64_t segment_size(void) { return state.segment; }

bool shares_with(int rank) { return state.sharing && state.area[rank]; }

Channel *channel(int from, int to, Line line, int tag) {
    return (Channel *)(state.area[from] + mailboxes_end()) + (to * COMM_LINES + (int)line) * TAGS + tag;
}

char *slot(int from, int to, Line line, int64_t segment) {
    int row = (int)line * state.here + state.local[to == TO_ALL ? from : to];
    return state.area[from] + channels_bytes() + (row * WINDOW + segment % WINDOW) * state.segment;
}

void share_memory(Place place) {
    const int rank = place.rank, ranks = place.ranks;
    MPI_Comm machine;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &machine);
    int here, me;
    MPI_Comm_size(machine, &here);
    MPI_Comm_rank(machine, &me);
    // Containers may have only 64 MB of shared memory; with very many ranks everything is sent as messages.
    int64_t segment = MOST_SEGMENT;
    while (segment * here * here * WINDOW * COMM_LINES > MOST_SHARED) segment /= 2;
    MPI_Allreduce(&segment, &state.segment, 1, MPI_INT64_T, MPI_MIN, MPI_COMM_WORLD);
    state.area = calloc((size_t)ranks, sizeof *state.area);
    state.local = calloc((size_t)ranks, sizeof *state.local);
    state.doorbell = calloc((size_t)ranks, sizeof *state.doorbell);
    CHECK(state.area && state.local && state.doorbell, "out of host memory for %d ranks", ranks);
    state.ranks = ranks;
    state.here = here;
    state.sharing = state.segment >= LEAST_SEGMENT && here > 1;
    if (state.segment < LEAST_SEGMENT) state.segment = MOST_SEGMENT;
    int *world = host_alloc(sizeof *world * (size_t)here);
    MPI_Allgather(&rank, 1, MPI_INT, world, 1, MPI_INT, machine);
    if (state.sharing) {
        size_t bytes = channels_bytes() + (size_t)(COMM_LINES * here * WINDOW * state.segment);
        char *mine;
        control_check_shared((double)here * (double)bytes, here);
        MPI_Barrier(machine);  // all have checked before the first takes its part
        // One cache line more: MPI aligns areas as it likes, and channels must begin on a cache line.
        MPI_Win_allocate_shared((MPI_Aint)(bytes + CACHE_LINE), 1, MPI_INFO_NULL, machine, &mine,
                                &state.window);
    }
    for (int i = 0; i < here && state.sharing; i++) {
        MPI_Aint bytes;
        int unit;
        char *area;
        MPI_Win_shared_query(state.window, i, &bytes, &unit, &area);
        state.area[world[i]] = (char *)(((uintptr_t)area + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
        state.doorbell[world[i]] = (Doorbell *)state.area[world[i]];
        state.local[world[i]] = i;
    }
    if (state.sharing) memset(state.area[rank], 0, channels_bytes());
    MPI_Barrier(machine);
    // Only if all ranks share memory: messages ring no doorbell.
    if (state.sharing && here == ranks) doorbells_use(state.doorbell, rank);
    mailboxes_use(ranks);
    for (int r = 0; r < ranks; r++)
        if (r != rank && shares_with(r)) mailbox_join(r, mailbox(rank, r), mailbox(r, rank));
    free(world);
    MPI_Comm_free(&machine);
}

void unshare_memory(void) {
    doorbells_use(NULL, 0);
    mailboxes_use(0);
    if (state.sharing) MPI_Win_free(&state.window);
    free(state.area);
    free(state.doorbell);
    free(state.local);
}
