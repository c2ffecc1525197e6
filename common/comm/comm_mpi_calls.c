// comm_mpi_calls.c: the flows of which each call consists.
#include "comm_mpi.h"

// Bytes of the piece that member i sums up; in a small all-reduce of two members, the whole tensor.
static int64_t piece_bytes(const Operation *o, int i) {
    const Collective *c = &o->call;
    return o->whole ? c->in_bytes : part_bytes(c, c->in_counts, i);
}

static char *piece_at(const Operation *o, const char *whole, int i) {
    return part_at(&o->call, whole, o->call.in_counts, o->whole ? 0 : i);
}

// Steps 1 and 2: all members' copies of my piece come to me and are added into `result`. Returns in
// `given`, by member, the flows that send my copies.
static void start_reduction(Operation *o, const char *in, char *result, bool result_ring, Flow **given) {
    const Collective *c = &o->call;
    int n = c->group.size, me = c->group.rank;
    o->own = piece_at(o, in, me);
    if (n == 1) {
        copy_part(result, o->own, piece_bytes(o, me));
        return;
    }
    o->reduces = true;
    o->piece_bytes = piece_bytes(o, me);
    o->segments = segments_of(o->piece_bytes);
    int64_t slots = o->segments < WINDOW ? o->segments : WINDOW;
    int messages = result_ring;
    for (int i = 0; i < n; i++) messages += i != me && !shares_with(c->group.member[i]);
    char *ring = staging(c->group.line, (size_t)(slots * segment_size() * messages));
    o->result = result_ring ? ring : result;
    o->result_ring = result_ring;
    if (result_ring) ring += slots * segment_size();
    for (int i = 0; i < n; i++) {
        if (i == me) continue;
        given[i] = flow_add(o, true, i, TAG_DATA, piece_at(o, in, i), piece_bytes(o, i));
        o->taken[i] = flow_add(o, false, i, TAG_DATA, ring, o->piece_bytes);
        o->taken[i]->held = true;
        o->taken[i]->limit = &o->reduced;
        o->taken[i]->slack = WINDOW;
        if (!o->taken[i]->channel) ring += slots * segment_size();
    }
}

static void start_all_reduce(Operation *o) {
    const Collective *c = &o->call;
    int n = c->group.size, me = c->group.rank;
    char *t = c->out;
    Flow *given[n];
    o->whole = n == 2 && c->in_bytes <= segment_size();
    start_reduction(o, t, piece_at(o, t, me), false, given);
    if (o->whole) o->leaves = given[1 - me];
    for (int i = 0; i < n && !o->whole; i++) {
        if (i == me) continue;
        Flow *back = flow_add(o, true, i, TAG_RESULT, o->result, o->piece_bytes);
        back->cast = true;
        back->limit = &o->reduced;
        // The sum comes back to where my copy was; that must have been sent.
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
    start_reduction(o, t, piece_at(o, t, me), me != root, given);
    if (me != root) {
        Flow *back = flow_add(o, true, root, TAG_RESULT, o->result, o->piece_bytes);
        back->cast = true;  // to one reader, but not through the slots of what is sent to it
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

static void start_all_to_all(Operation *o) {
    const Collective *c = &o->call;
    const int64_t *give = c->in_counts, *take = c->out_counts;
    int n = c->group.size, me = c->group.rank;
    copy_part(part_at(c, c->out, take, me), part_at(c, c->in, give, me), part_bytes(c, give, me));
    // Each begins with its right neighbour, so that not all send to member 0 first.
    for (int step = 1; step < n; step++) {
        int to = (me + step) % n, from = (me - step + n) % n;
        flow_add(o, true, to, TAG_DATA, part_at(c, c->in, give, to), part_bytes(c, give, to));
        flow_add(o, false, from, TAG_DATA, part_at(c, c->out, take, from), part_bytes(c, take, from));
    }
}

static void start_all_gather(Operation *o) {
    const Collective *c = &o->call;
    int n = c->group.size, me = c->group.rank;
    char *mine = part_at(c, c->out, c->out_counts, me);
    for (int step = 1; step < n; step++) {
        int to = (me + step) % n, from = (me - step + n) % n;
        Flow *give = flow_add(o, true, to, TAG_DATA, (char *)c->in, c->in_bytes);
        Flow *take = flow_add(o, false, from, TAG_DATA, part_at(c, c->out, c->out_counts, from),
                              part_bytes(c, c->out_counts, from));
        give->cast = take->cast = true;
        if (give->channel) o->keep = mine;
    }
    if (!o->keep) copy_part(mine, c->in, c->in_bytes);
}

// Between the root and all others: part i of `all` at the root, `mine` at member i.
static void start_rooted(Operation *o, bool to_root, char *mine, char *all) {
    const Collective *c = &o->call;
    const int64_t *counts = to_root ? c->out_counts : c->in_counts;
    int me = c->group.rank;
    if (me != c->root) {
        flow_add(o, to_root, c->root, TAG_DATA, mine, part_bytes(c, counts, me));
        return;
    }
    for (int i = 0; i < c->group.size; i++) {
        char *part = part_at(c, all, counts, i);
        if (i != me) flow_add(o, !to_root, i, TAG_DATA, part, part_bytes(c, counts, i));
        else copy_part(to_root ? part : mine, to_root ? mine : part, part_bytes(c, counts, i));
    }
}

static void start_broadcast(Operation *o) {
    const Collective *c = &o->call;
    int64_t bytes = c->in_bytes;
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

void start_call(Operation *o) {
    const Collective *c = &o->call;
    switch (c->kind) {
        case ALL_REDUCE:
            start_all_reduce(o);
            break;
        case REDUCE:
            start_reduce(o);
            break;
        case REDUCE_SCATTER: {
            Flow *given[c->group.size];
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
            start_all_to_all(o);
            break;
        case TRANSFERS:
            start_transfers(o);
            break;
        case BARRIER:
        case COLLECTIVE_KINDS:
            break;
    }
}
