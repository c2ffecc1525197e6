// comm_mpi.c: the data plane over Open MPI. Real messages between real processes: MPI_Isend and MPI_Irecv
// across machines, shared memory of MPI (MPI_Win_allocate_shared) within one; no call in here can block.
//
// A collective is a set of flows, each a sequence of segments to or from one peer. The algorithms are
// direct: every member exchanges with every other, which sends the fewest bytes possible and lets one rank
// determine the order of a sum.
//
//     all_reduce of t, n = 3, on member 1             flows of member 1
//       1. piece i of t goes to member i                sends     pieces 0, 2 to members 0, 2
//                                                       receives  piece 1 from members 0, 2
//       2. member 1 adds the three pieces 1,
//          member 0's first, into its t
//       3. and sends the sum to all                     sends     piece 1 to members 0, 2
//                                                       receives  pieces 0, 2 from members 0, 2
// If t fits in one segment, two members need one exchange instead of two: each sends the other all of t,
// and both add, member 0's copy first. The bytes and the bits are the same. (With a larger t both would
// read and write all of it, and the cache would hold less.)
// reduce_scatter is steps 1 and 2, all_gather is step 3, reduce has step 3 to the root only; the others
// have no step 2. A segment is added as soon as all its copies have come, and is sent back while the next
// ones arrive: what is yet to be added stays in the cache, and takes WINDOW segments per member, however
// large the tensor.
#include "comm_mpi.h"

#include <stdlib.h>
#include <string.h>

#include "tensor/device.h"

static struct {
    int rank;
    int64_t segment;                                                 // bytes
    int64_t (*given)[COMM_LINES][TAGS], (*taken)[COMM_LINES][TAGS];  // segments so far, by rank
    struct {
        char *memory;
        size_t bytes;
    } staging[COMM_LINES];
} state;

static void free_staging(Line line) {
    if (!state.staging[line].memory) return;
    if (backend_is_host())
        device_free(MEMORY_COMMUNICATION, state.staging[line].memory, state.staging[line].bytes);
    else free(state.staging[line].memory);
    state.staging[line].memory = NULL;
}

char *staging(Line line, size_t bytes) {
    if (bytes > state.staging[line].bytes || (!state.staging[line].memory && bytes)) {
        free_staging(line);
        state.staging[line].memory =
            backend_is_host() ? device_alloc(MEMORY_COMMUNICATION, bytes) : host_alloc(bytes);
        state.staging[line].bytes = bytes;
    }
    return state.staging[line].memory;
}

// ---- start and end ----

void transport_start(Place place, void (*look)(void)) {
    (void)look;
    state.rank = place.rank;
    share_memory(place);
    state.segment = segment_size();
    state.given = calloc((size_t)place.ranks, sizeof *state.given);
    state.taken = calloc((size_t)place.ranks, sizeof *state.taken);
    CHECK(state.given && state.taken, "out of host memory for %d ranks", place.ranks);
}

const char *comm_carrier(void) { return backend_is_host() ? "" : "MPI through host memory"; }

bool comm_sums_in_rank_order(void) { return true; }

bool transport_launches(void) { return false; }

// Only where all members share memory: what is put there is seen only by a member that looks. A message
// that arrives early might be too long for the receive that it matches.
bool transport_runs_early(const Collective *c) {
    for (int i = 0; i < c->group.size; i++)
        if (i != c->group.rank && !shares_with(c->group.member[i])) return false;
    return backend_is_host();
}

Operation *transport_group(Group group, int color, int as) {
    return (void)group, (void)color, (void)as, NULL;
}

double transport_poll(void) { return 0; }

void transport_abort(void) {}

void transport_finish(void) {
    unshare_memory();
    free(state.given);
    free(state.taken);
    for (int line = 0; line < COMM_LINES; line++) free_staging((Line)line);
    stage_finish();
}

// ---- flows ----

static int64_t segment_bytes(int64_t bytes, int64_t segment) {
    int64_t rest = bytes - segment * state.segment;
    return rest < state.segment ? rest : state.segment;
}

Flow *flow_add(Operation *o, bool send, int member, int tag, void *base, int64_t bytes) {
    Flow *flow = &o->flow[o->flows++];
    int peer = o->call.group.member[member];
    *flow = (Flow){.send = send,
                   .peer = peer,
                   .tag = tag,
                   .line = o->call.group.line,
                   .base = base,
                   .bytes = bytes,
                   .segments = segments_of(bytes)};
    if (shares_with(peer)) {
        int64_t *ever = send ? &state.given[peer][flow->line][tag] : &state.taken[peer][flow->line][tag];
        flow->channel =
            send ? channel(state.rank, peer, flow->line, tag) : channel(peer, state.rank, flow->line, tag);
        flow->count = *ever;
        *ever += flow->segments;
    } else {
        o->messages++;
    }
    return flow;
}

static char *flow_slot(const Flow *flow, int64_t segment) {
    int writer = flow->send ? state.rank : flow->peer, reader = flow->send ? flow->peer : state.rank;
    return flow->cast ? slot(writer, TO_ALL, flow->line, segment)
                      : slot(writer, reader, flow->line, flow->count + segment);
}

// Where a segment of a held flow is read.
static const char *flow_held(const Flow *flow, int64_t segment) {
    return flow->channel ? flow_slot(flow, segment) : flow->base + segment % WINDOW * state.segment;
}

static bool flow_may_post(const Flow *flow) {
    return flow->posted < flow->segments && (!flow->limit || flow->posted < *flow->limit + flow->slack) &&
           (!flow->after || flow->after->posted == flow->after->segments);
}

static bool in_ring(const Operation *o, const Flow *flow) {
    return flow->held || (flow->send && o->result_ring && flow->base == o->result);
}

static void post_message(Operation *o, Flow *flow) {
    int64_t segment = flow->posted++, number = segment % WINDOW,
            bytes = segment_bytes(flow->bytes, segment);
    char *address = flow->base + (in_ring(o, flow) ? number : segment) * state.segment;
    MPI_Request *request = &o->request[(flow - o->flow) * WINDOW + number];
    int tag = (int)flow->line * TAGS + flow->tag;
    if (flow->send) {
        MPI_Isend(address, (int)bytes, MPI_BYTE, flow->peer, tag, MPI_COMM_WORLD, request);
        o->sent += bytes;
    } else {
        MPI_Irecv(address, (int)bytes, MPI_BYTE, flow->peer, tag, MPI_COMM_WORLD, request);
    }
}

// Does all that has become possible in shared memory; true if there was something.
static bool push_shared_send(Operation *o, Flow *flow) {
    int64_t posted = flow->posted,
            taken = atomic_load_explicit(&flow->channel->taken, memory_order_acquire) - flow->count;
    int64_t done = taken < flow->segments ? taken < 0 ? 0 : taken : flow->segments;
    bool moved = done > flow->done, full = false;
    flow->done = done;
    // Slots are counted along the channel: the segment WINDOW before must have been taken.
    while (flow_may_post(flow) && flow->posted - taken < WINDOW) {
        int64_t segment = flow->posted, bytes = segment_bytes(flow->bytes, segment);
        if (!flow->cast || segment >= o->cast) {
            for (int i = 0; flow->cast && i < o->flows; i++)  // the slowest reader holds the slot
                full |= o->flow[i].cast && o->flow[i].send && o->flow[i].channel &&
                        segment - o->flow[i].done >= WINDOW;
            if (full) break;
            memcpy(flow_slot(flow, segment),
                   flow->base + (in_ring(o, flow) ? segment % WINDOW : segment) * state.segment,
                   (size_t)bytes);
            if (flow->cast && o->keep)
                copy_part(o->keep + segment * state.segment, flow->base + segment * state.segment, bytes);
            if (flow->cast) o->cast = segment + 1;
        }
        flow->posted++;
        o->sent += bytes;
        atomic_store_explicit(&flow->channel->given, flow->count + flow->posted, memory_order_release);
    }
    if (flow->posted > posted) doorbell_ring(flow->peer);
    return moved || flow->posted > posted;
}

// Frees the slots of this many segments. The sender waits for that only if it has no free slot left or, for
// segments that go to all, until all have been taken; otherwise its doorbell need not be rung. If it fills
// its last slot just now, it may sleep without being rung, for a millisecond at most (doorbell.h).
static void give_back(const Flow *flow, int64_t segments) {
    int64_t taken = flow->count + segments;
    atomic_store_explicit(&flow->channel->taken, taken, memory_order_release);
    int64_t given = atomic_load_explicit(&flow->channel->given, memory_order_relaxed);
    if (flow->cast || given - taken >= WINDOW - 1) doorbell_ring(flow->peer);
}

static bool push_shared_receive(const Operation *o, Flow *flow) {
    if (o->call.agreed && !*o->call.agreed) return false;
    int64_t given = atomic_load_explicit(&flow->channel->given, memory_order_acquire) - flow->count;
    bool moved = false;
    while (flow_may_post(flow) && flow->posted < given) {
        int64_t segment = flow->posted++;
        flow->done++;
        moved = true;
        if (flow->held) continue;  // reduce_next frees it
        memcpy(flow->base + segment * state.segment, flow_slot(flow, segment),
               (size_t)segment_bytes(flow->bytes, segment));
        give_back(flow, flow->done);
    }
    return moved;
}

// Segments whose bytes the sender may overwrite: in shared memory, those already copied into a slot.
static int64_t flow_left(const Flow *flow) { return flow->channel ? flow->posted : flow->done; }

// Whether an operation need not wait for this flow any more. Slots are counted along their channel, so
// those that are yet to be read do not disturb a later operation; but slots of segments that go to all are
// not.
static bool flow_over(const Flow *flow) {
    return (flow->send && !flow->cast ? flow_left(flow) : flow->done) == flow->segments;
}

// Adds the next segment of my piece, if all its copies have come and the result has room.
static bool reduce_next(Operation *o) {
    int64_t segment = o->reduced;
    if (segment == o->segments) return false;
    int n = o->call.group.size;
    for (int i = 0; i < n; i++)
        if (o->taken[i] && o->taken[i]->done <= segment) return false;
    if (o->result_ring && segment - o->given_back->done >= WINDOW) return false;
    if (o->leaves && flow_left(o->leaves) <= segment) return false;
    const char *source[n];
    for (int i = 0; i < n; i++)  // member 0 first: the order of every sum
        source[i] = o->taken[i] ? flow_held(o->taken[i], segment) : o->own + segment * state.segment;
    reduce_bytes(o->result + (o->result_ring ? segment % WINDOW : segment) * state.segment, source, n,
                 segment_bytes(o->piece_bytes, segment), o->call.dtype, o->call.op);
    o->reduced++;
    for (int i = 0; i < n; i++)
        if (o->taken[i] && o->taken[i]->channel) give_back(o->taken[i], o->reduced);
    return true;
}

static bool push_messages(Operation *o) {
    for (int i = 0; i < o->flows; i++)
        while (!o->flow[i].channel && flow_may_post(&o->flow[i]) &&
               o->flow[i].posted - o->flow[i].done < WINDOW)
            post_message(o, &o->flow[i]);
    int count = 0;
    MPI_Testsome(o->flows * WINDOW, o->request, &count, o->indices, MPI_STATUSES_IGNORE);
    for (int i = 0; i < count; i++) {  // count is MPI_UNDEFINED, which is negative, if nothing is in flight
        Flow *flow = &o->flow[o->indices[i] / WINDOW];
        flow->landed[o->indices[i] % WINDOW] = true;
        while (flow->done < flow->posted && flow->landed[flow->done % WINDOW])
            flow->landed[flow->done++ % WINDOW] = false;
    }
    return count > 0;
}

bool transport_test(Operation *o) {
    for (bool moved = true; moved;) {
        moved = false;
        for (int i = 0; i < o->flows; i++)
            if (o->flow[i].channel)
                moved |= o->flow[i].send ? push_shared_send(o, &o->flow[i])
                                         : push_shared_receive(o, &o->flow[i]);
        if (o->messages) moved |= push_messages(o);
        // What has been reduced is sent before the next is reduced.
        if (o->reduces) moved |= reduce_next(o);
    }
    for (int i = 0; i < o->flows; i++)
        if (!flow_over(&o->flow[i])) return false;
    if (o->reduces && o->reduced < o->segments) return false;
    if (o->stage) stage_end(o->stage);
    o->stage = NULL;
    return true;
}

void *transport_mark(void) { return NULL; }

Operation *transport_run(const Collective *collective) {
    // One block, so small with few members that the heap has it at hand.
    size_t n = (size_t)collective->group.size,
           most = collective->kind == TRANSFERS ? (size_t)collective->transfer_count : 4 * (n - 1);
    Operation *o = host_alloc(sizeof *o + sizeof *o->flow * most + sizeof *o->taken * n);
    *o = (Operation){.call = *collective, .flow = (Flow *)(o + 1)};
    o->taken = memset(o->flow + most, 0, sizeof *o->taken * n);
    o->stage = stage_begin(&o->call);
    start_call(o);
    if (!o->messages) return o;
    o->request = host_alloc(sizeof *o->request * (size_t)o->flows * WINDOW);
    o->indices = host_alloc(sizeof *o->indices * (size_t)o->flows * WINDOW);
    for (int i = 0; i < o->flows * WINDOW; i++) o->request[i] = MPI_REQUEST_NULL;
    return o;
}

int64_t transport_bytes(const Operation *o) { return o->sent; }

void transport_end(Operation *o) {
    free(o->request);
    free(o->indices);
    free(o);
}
