// comm_mpi.c: the data plane over Open MPI. Real messages between real processes: MPI_Isend and MPI_Irecv
// across machines, memory that MPI shares (MPI_Win_allocate_shared) within one; nothing in here can hang.
//
// A collective is a set of flows, each a run of segments to or from one peer. The algorithms are direct:
// everyone talks with everyone, which sends the least that is possible and keeps the order of a sum in one
// hand.
//
//     all_reduce of t, n = 3, on member 1             flows of member 1
//       1. piece i of t goes to member i                gives   pieces 0, 2 to members 0, 2
//                                                       takes   piece 1 of members 0, 2
//       2. member 1 adds the three pieces 1,
//          0 first, into its t
//       3. and gives the sum to all                     returns piece 1 to members 0, 2
//                                                       fetches pieces 0, 2 from members 0, 2
//
// reduce_scatter is steps 1 and 2, all_gather is step 3, reduce has step 3 with the root alone; the rest
// have no step 2. A segment is added as soon as all its copies are there, and travels back while the next
// ones come in: what waits to be added stays in the cache, and takes WINDOW segments per member, however
// large the tensor.
#include "comm_mpi.h"

#include <mpi.h>
#include <stdlib.h>
#include <string.h>

#include "comm_staged.h"
#include "tensor/device.h"

static struct {
    int rank;
    int64_t segment;                                                 // bytes
    int64_t (*given)[COMM_LINES][TAGS], (*taken)[COMM_LINES][TAGS];  // segments ever, to and from each rank
    struct {
        char *memory;
        size_t bytes;
    } staging[COMM_LINES];
} state;

// ---- device memory, as the CPU has it, or comm_staged.c's copies: MPI reads and writes it directly ----

static void copy_part(void *to, const void *from, int64_t bytes) {
    if (bytes > 0 && to != from) memmove(to, from, (size_t)bytes);
}

static void free_staging(Line line) {
    if (!state.staging[line].memory) return;
    if (backend_is_host())
        device_free(MEMORY_COMMUNICATION, state.staging[line].memory, state.staging[line].bytes);
    else free(state.staging[line].memory);
    state.staging[line].memory = NULL;
}

// One buffer serves all operations of a line, since one runs at a time; it grows to what the largest needs.
static char *staging(Line line, size_t bytes) {
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
    share_memory(place.rank, place.ranks);
    state.segment = segment_size();
    state.given = calloc((size_t)place.ranks, sizeof *state.given);
    state.taken = calloc((size_t)place.ranks, sizeof *state.taken);
    CHECK(state.given && state.taken, "out of host memory for %d ranks", place.ranks);
}

const char *transport_text(void) { return backend_is_host() ? "" : "MPI through host memory"; }

bool transport_sums_in_rank_order(void) { return true; }

bool transport_prepares_groups(void) { return false; }

bool transport_launches(void) { return false; }

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

// Segments of a flow are posted in order, at most WINDOW at once, and below *limit + slack: the count of
// what must have happened before.
typedef struct Flow {
    bool send;
    bool held;      // received segments are used where they are, and given back by whoever uses them
    bool cast;      // the same bytes go to all: in shared memory, once
    int peer, tag;  // world rank
    Line line;
    char *base;  // held: room for WINDOW segments, if they come as messages
    int64_t bytes, segments;
    int64_t posted, done;
    const int64_t *limit;  // NULL: none
    int64_t slack;
    const struct Flow *after;  // a flow on the same way: segments there are told apart by their order alone
    bool landed[WINDOW];       // messages that have come before one that was posted earlier
    Channel *channel;          // in shared memory, else NULL
    int64_t count;             // given and taken when the flow began
} Flow;

struct Operation {
    Collective call;
    Stage *stage;  // the call is on copies in host memory; NULL: it is not, or they have been copied back
    Flow *flow;
    int flows, messages;   // messages: flows that are not in shared memory
    MPI_Request *request;  // (flows, WINDOW)
    int *indices;
    int64_t sent;
    int64_t cast;  // segments for all that stand in shared memory
    char *keep;    // where they are to stand for me, too: copied while they are in the cache
    // the reduction of my piece, if there is one
    bool reduces;
    char *result;  // where the sums go: the piece itself, or a ring
    bool result_ring;
    const char *own;         // my own copy of the piece
    Flow **taken;            // by member; NULL for me
    const Flow *given_back;  // a result in the ring is free again when this flow has sent it
    int64_t piece_bytes, segments, reduced;
};

static int64_t segments_of(int64_t bytes) { return (bytes + state.segment - 1) / state.segment; }

static int64_t segment_bytes(int64_t bytes, int64_t segment) {
    int64_t rest = bytes - segment * state.segment;
    return rest < state.segment ? rest : state.segment;
}

static Flow *flow_add(Operation *o, bool send, int member, int tag, void *base, int64_t bytes) {
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

// Where segment of a held flow is to be read.
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

// All that has become possible in shared memory; true if something was.
static bool push_shared_send(Operation *o, Flow *flow) {
    int64_t taken = atomic_load_explicit(&flow->channel->taken, memory_order_acquire) - flow->count;
    int64_t done = taken < flow->segments ? taken < 0 ? 0 : taken : flow->segments;
    bool moved = done > flow->done;
    flow->done = done;
    // Slots are counted along the channel: what stood WINDOW before must be taken.
    while (flow_may_post(flow) && flow->posted - taken < WINDOW) {
        int64_t segment = flow->posted, bytes = segment_bytes(flow->bytes, segment);
        if (!flow->cast || segment >= o->cast) {
            for (int i = 0; flow->cast && i < o->flows; i++)  // the slowest reader holds the slot
                if (o->flow[i].cast && o->flow[i].send && o->flow[i].channel &&
                    segment - o->flow[i].done >= WINDOW)
                    return moved;
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
        moved = true;
    }
    return moved;
}

static bool push_shared_receive(Flow *flow) {
    int64_t given = atomic_load_explicit(&flow->channel->given, memory_order_acquire) - flow->count;
    bool moved = false;
    while (flow_may_post(flow) && flow->posted < given) {
        int64_t segment = flow->posted++;
        flow->done++;
        moved = true;
        if (flow->held) continue;  // reduce_next gives it back
        memcpy(flow->base + segment * state.segment, flow_slot(flow, segment),
               (size_t)segment_bytes(flow->bytes, segment));
        atomic_store_explicit(&flow->channel->taken, flow->count + flow->done, memory_order_release);
    }
    return moved;
}

// Adds the next segment of my piece, if all its copies are there and the result has room.
static bool reduce_next(Operation *o) {
    int64_t segment = o->reduced;
    if (segment == o->segments) return false;
    int n = o->call.group.size;
    for (int i = 0; i < n; i++)
        if (o->taken[i] && o->taken[i]->done <= segment) return false;
    if (o->result_ring && segment - o->given_back->done >= WINDOW) return false;
    const char *source[n];
    for (int i = 0; i < n; i++)  // member 0 first: the order of every sum
        source[i] = o->taken[i] ? flow_held(o->taken[i], segment) : o->own + segment * state.segment;
    reduce_bytes(o->result + (o->result_ring ? segment % WINDOW : segment) * state.segment, source, n,
                 segment_bytes(o->piece_bytes, segment), o->call.dtype, o->call.op);
    o->reduced++;
    for (int i = 0; i < n; i++)
        if (o->taken[i] && o->taken[i]->channel)
            atomic_store_explicit(&o->taken[i]->channel->taken, o->taken[i]->count + o->reduced,
                                  memory_order_release);
    return true;
}

static bool push_messages(Operation *o) {
    for (int i = 0; i < o->flows; i++)
        while (!o->flow[i].channel && flow_may_post(&o->flow[i]) &&
               o->flow[i].posted - o->flow[i].done < WINDOW)
            post_message(o, &o->flow[i]);
    int count = 0;
    MPI_Testsome(o->flows * WINDOW, o->request, &count, o->indices, MPI_STATUSES_IGNORE);
    for (int i = 0; i < count; i++) {  // MPI_UNDEFINED, when nothing is under way, is negative
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
                moved |=
                    o->flow[i].send ? push_shared_send(o, &o->flow[i]) : push_shared_receive(&o->flow[i]);
        if (o->messages) moved |= push_messages(o);
        // What was reduced goes out before the next is.
        if (o->reduces) moved |= reduce_next(o);
    }
    for (int i = 0; i < o->flows; i++)
        if (o->flow[i].done < o->flow[i].segments) return false;
    if (o->reduces && o->reduced < o->segments) return false;
    if (o->stage) stage_end(o->stage);
    o->stage = NULL;
    return true;
}

// ---- collectives ----

// Bytes of part i, and where it begins.
static int64_t part_bytes(const Collective *c, const int64_t *counts, int i) {
    return counts[i] * (int64_t)dtype_size(c->dtype);
}

static int64_t part_offset(const Collective *c, const int64_t *counts, int i) {
    int64_t offset = 0;
    for (int j = 0; j < i; j++) offset += part_bytes(c, counts, j);
    return offset;
}

// Steps 1 and 2: everyone's copies of my piece come to me and are added into `result`. Returns by member
// the flows that give away my copies.
static void start_reduction(Operation *o, const char *in, char *result, bool result_ring, Flow **given) {
    const Collective *c = &o->call;
    int n = c->group.size, me = c->group.rank;
    o->own = in + part_offset(c, c->in_counts, me);
    if (n == 1) {
        copy_part(result, o->own, part_bytes(c, c->in_counts, me));
        return;
    }
    o->reduces = true;
    o->piece_bytes = part_bytes(c, c->in_counts, me);
    o->segments = segments_of(o->piece_bytes);
    int64_t slots = o->segments < WINDOW ? o->segments : WINDOW;
    int messages = result_ring;
    for (int i = 0; i < n; i++) messages += i != me && !shares_with(c->group.member[i]);
    char *ring = staging(c->group.line, (size_t)(slots * state.segment * messages));
    o->result = result_ring ? ring : result;
    o->result_ring = result_ring;
    if (result_ring) ring += slots * state.segment;
    for (int i = 0; i < n; i++) {
        if (i == me) continue;
        given[i] = flow_add(o, true, i, TAG_DATA, (char *)in + part_offset(c, c->in_counts, i),
                            part_bytes(c, c->in_counts, i));
        o->taken[i] = flow_add(o, false, i, TAG_DATA, ring, o->piece_bytes);
        o->taken[i]->held = true;
        o->taken[i]->limit = &o->reduced;
        o->taken[i]->slack = WINDOW;
        if (!o->taken[i]->channel) ring += slots * state.segment;
    }
}

static void start_all_reduce(Operation *o) {
    const Collective *c = &o->call;
    int n = c->group.size, me = c->group.rank;
    char *t = c->out;
    Flow *given[n];
    start_reduction(o, t, t + part_offset(c, c->in_counts, me), false, given);
    for (int i = 0; i < n; i++) {
        if (i == me) continue;
        Flow *back = flow_add(o, true, i, TAG_RESULT, o->result, o->piece_bytes);
        back->cast = true;
        back->limit = &o->reduced;
        // The sum comes back to where my copy stood; that one must have left.
        Flow *sum = flow_add(o, false, i, TAG_RESULT, given[i]->base, given[i]->bytes);
        sum->cast = true;
        sum->limit = &given[i]->done;
    }
}

static void start_reduce(Operation *o) {
    const Collective *c = &o->call;
    int n = c->group.size, me = c->group.rank, root = c->root;
    char *t = c->out;
    Flow *given[n];
    start_reduction(o, t, t + part_offset(c, c->in_counts, me), me != root, given);
    if (me != root) {
        Flow *back = flow_add(o, true, root, TAG_RESULT, o->result, o->piece_bytes);
        back->cast = true;  // to one reader, but not in the slots of what is given to it
        back->limit = &o->reduced;
        o->given_back = back;
    }
    for (int i = 0; i < n && me == root; i++) {
        if (i == me) continue;
        Flow *sum = flow_add(o, false, i, TAG_RESULT, given[i]->base, given[i]->bytes);
        sum->cast = true;
        sum->limit = &given[i]->done;
    }
}

// Parts of `in` to members, parts of `out` from them; NULL counts: nothing that way. My own part is copied.
static void start_exchange(Operation *o, const char *in, const int64_t *in_counts, char *out,
                           const int64_t *out_counts) {
    const Collective *c = &o->call;
    int n = c->group.size, me = c->group.rank;
    if (in_counts && out_counts)
        copy_part(out + part_offset(c, out_counts, me), in + part_offset(c, in_counts, me),
                  part_bytes(c, in_counts, me));
    // Everyone begins with its right neighbour, so that not all talk to member 0 first.
    for (int step = 1; step < n; step++) {
        int to = (me + step) % n, from = (me - step + n) % n;
        if (in_counts)
            flow_add(o, true, to, TAG_DATA, (char *)in + part_offset(c, in_counts, to),
                     part_bytes(c, in_counts, to));
        if (out_counts)
            flow_add(o, false, from, TAG_DATA, out + part_offset(c, out_counts, from),
                     part_bytes(c, out_counts, from));
    }
}

static void start_all_gather(Operation *o) {
    const Collective *c = &o->call;
    int n = c->group.size, me = c->group.rank;
    int64_t bytes = part_bytes(c, c->out_counts, me);
    char *out = c->out;
    for (int step = 1; step < n; step++) {
        int to = (me + step) % n, from = (me - step + n) % n;
        Flow *give = flow_add(o, true, to, TAG_DATA, (char *)c->in, bytes);
        Flow *take = flow_add(o, false, from, TAG_DATA, out + part_offset(c, c->out_counts, from),
                              part_bytes(c, c->out_counts, from));
        give->cast = take->cast = true;
        if (give->channel) o->keep = out + part_offset(c, c->out_counts, me);
    }
    if (!o->keep) copy_part(out + part_offset(c, c->out_counts, me), c->in, bytes);
}

// Between the root and everyone else: `mine` stands at a member, part i of `all` at the root.
static void start_rooted(Operation *o, bool to_root, char *mine, char *all) {
    const Collective *c = &o->call;
    const int64_t *counts = to_root ? c->out_counts : c->in_counts;
    int me = c->group.rank;
    if (me != c->root) {
        flow_add(o, to_root, c->root, TAG_DATA, mine, part_bytes(c, counts, me));
        return;
    }
    for (int i = 0; i < c->group.size; i++) {
        char *part = all + part_offset(c, counts, i);
        if (i != me) flow_add(o, !to_root, i, TAG_DATA, part, part_bytes(c, counts, i));
        else copy_part(to_root ? part : mine, to_root ? mine : part, part_bytes(c, counts, i));
    }
}

static void start_broadcast(Operation *o) {
    const Collective *c = &o->call;
    int64_t bytes = part_bytes(c, c->in_counts, 0);
    if (c->group.rank != c->root) flow_add(o, false, c->root, TAG_DATA, c->out, bytes)->cast = true;
    for (int i = 0; i < c->group.size && c->group.rank == c->root; i++)
        if (i != c->root) flow_add(o, true, i, TAG_DATA, c->out, bytes)->cast = true;
}

static void start_transfers(Operation *o) {
    const Collective *c = &o->call;
    const Transfer *t = c->transfers;
    for (int i = 0, own = 0; i < c->transfer_count; i++) {
        if (t[i].peer == c->group.rank) {
            if (t[i].send) continue;
            while (t[own].peer != c->group.rank || !t[own].send) own++;  // the next send to myself
            copy_part(tensor_address(t[i].t), tensor_address(t[own++].t), tensor_bytes(t[i].t));
            continue;
        }
        Flow *flow =
            flow_add(o, t[i].send, t[i].peer, TAG_DATA, tensor_address(t[i].t), tensor_bytes(t[i].t));
        flow->limit = &c->open[i];
        for (Flow *before = o->flow; before < flow; before++)
            if (before->peer == flow->peer && before->send == flow->send) flow->after = before;
    }
}

void *transport_mark(void) { return NULL; }

Operation *transport_run(const Collective *collective) {
    Operation *o = host_alloc(sizeof *o);
    *o = (Operation){.call = *collective};
    o->stage = stage_begin(&o->call);
    const Collective *c = &o->call;
    int n = c->group.size, most = c->kind == TRANSFERS ? c->transfer_count : 4 * n;
    o->flow = host_alloc(sizeof *o->flow * (size_t)most);
    o->taken = calloc((size_t)n, sizeof *o->taken);
    CHECK(o->taken, "out of host memory for a collective");
    switch (c->kind) {
        case ALL_REDUCE:
            start_all_reduce(o);
            break;
        case REDUCE:
            start_reduce(o);
            break;
        case REDUCE_SCATTER: {
            Flow *given[n];
            start_reduction(o, c->in, c->out, false, given);
            break;
        }
        case ALL_GATHER:
            start_all_gather(o);
            break;
        case GATHER:
            start_rooted(o, true, (char *)c->in, c->out);
            break;
        case SCATTER:
            start_rooted(o, false, c->out, (char *)c->in);
            break;
        case BROADCAST:
            start_broadcast(o);
            break;
        case ALL_TO_ALL:
            start_exchange(o, c->in, c->in_counts, c->out, c->out_counts);
            break;
        case TRANSFERS:
            start_transfers(o);
            break;
        case BARRIER:
        case COLLECTIVE_KINDS:
            break;
    }
    o->request = host_alloc(sizeof *o->request * (size_t)o->flows * WINDOW);
    o->indices = host_alloc(sizeof *o->indices * (size_t)o->flows * WINDOW);
    for (int i = 0; i < o->flows * WINDOW; i++) o->request[i] = MPI_REQUEST_NULL;
    return o;
}

int64_t transport_bytes(const Operation *o) { return o->sent; }

void transport_end(Operation *o) {
    free(o->flow);
    free(o->request);
    free(o->indices);
    free(o->taken);
    free(o);
}
