// comm_agreement.c: how ranks agree on what they call, in what order, and when it runs on the model clock.
//
// The requests of a line run one after another, as kernels do on one CUDA stream; lines do not wait for
// each other. Each request goes through three states:
//
//     notice   The members tell each other what they call and when, on the model clock, they can begin:
//                  ready = max(compute stream and port at the call, end of the line's previous request)
//              A request sends its notices only when all those of the one before have come, so `ready` is
//              exact. When all have come: start = the latest ready, end = start + the model's duration.
//     data     The transport moves the bytes, one request of a line after another. If it can, it sends this
//              rank's bytes along with the notices; but it uses no others' before all notices have come.
//     done     comm_wait may return; it makes the compute stream wait for `end`.
// Within a line. A rank that waits for the notices of one request has sent none of the next. So if a peer
// has sent a notice on this line that this rank has not asked for, that is the call in which the peer is
// blocked. Two ranks, each blocked in a call that the other has not reached, would wait for ever; that is
// how mismatched calls, different orders and sends that face each other are found, at once.
// Across lines. NCCL's kernels of two communicators may wait for each other if two ranks launch them in
// different orders. So two ranks start the calls that they share in one order, whatever the lines. Each
// rank numbers the calls that it shares with a peer, from 0 in the order in which it starts them, and its
// notice says which numbers the call has: [before, before + width), where the width of a batch is the
// number of its transfers with this peer, since they all start at once. Two ranks have started all shared
// calls in one order if and only if the two ranges of each call overlap. (Suppose that one rank starts x
// before y and the other y before x, and that y's ranges overlap. Then on the first rank x ends before y
// begins, which is before y ends on the other rank, which is before x begins there: x's ranges do not
// overlap.)
// The host may wait inside a launch of NCCL, too, until other ranks come to theirs: when a first call
// connects the members. A rank that waits there launches nothing else, so an order within pairs is not
// enough: with calls a of ranks 0 and 1, b of 1 and 2, c of 2 and 0, started as a, b, c by all, rank 0 may
// launch c, rank 2 b and rank 1 a. So a rank launches nothing before a collective that it started earlier.
// (Transfers started earlier may be overtaken: receives are often posted long before their senders come.)
// Only start orders that form a cycle themselves, over three ranks, are left to the timeout. Nothing runs
// in the background: every call into comm advances all lines, and while requests are in flight so does the
// end of every operation and, on a CPU, of each tile of a long one (tensor/in_flight.h). No bit and no
// model time depends on it.
// On a GPU, too, a collective is launched only when all notices have come, although NCCL would wait on the
// device. So its kernel waits only for ranks that have reached the call and will launch it, whatever their
// hosts do meanwhile. (A batch of transfers is one kernel, launched when its first other end has come, since
// a peer may need its part before it can reach the rest: that kernel may wait for ranks that have not come.)
// Launched earlier, a collective's might wait for a rank that calls something else, or that waits
// for a later call of this one; and a host that calls the driver in that state may not return: the first
// launch of a kernel loads it, an allocation grows the pool, NCCL sets up a communicator, and each of these
// may wait for the device. Such a host compares no notices and sees no timeout; and the first steps, which
// do all of that, are also those in which ranks are found to differ.
// Trusted calls (comm_set_check) send no notices and wait for none: only data is sent, and it is matched
// with what the other sends on the same line, in order, as with MPI or NCCL. Only a dead rank and the
// timeout can still end a wait (look_after_all). `ready` is that of this rank alone.
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "doorbell.h"
#include "comm_inside.h"
#include "hash.h"
#include "tensor/clock.h"
#include "tensor/device.h"
#include "tensor/guard.h"

// ---- notices ----

Notice notice_of(const Request *r, int i) {
    const Collective *c = &r->call;
    Notice n = {.kind = c->kind,
                .group = c->group.handle,
                .line = line_of(r),
                .op = c->op,
                .root = world_rank(c->group, c->root),
                .dtype = c->dtype,
                .host = r->host,
                .parts = r->parts,
                .before = r->before ? r->before[i] : 0,
                .width = 1,
                .count = r->total,
                .ready = r->ready};
    if (c->group.member)
        n.members = hash_bytes(HASH_SEED, c->group.member, sizeof(int) * (size_t)c->group.size);
    if (c->kind == TRANSFERS) {
        const Transfer *t = &r->transfers[i];
        n.send = t->send;
        n.peer = world_rank(c->group, t->peer);
        n.dtype = t->t.dtype;
        n.count = tensor_count(t->t);
        n.width = 0;
        for (int j = 0; j < c->transfer_count; j++) {
            n.width += r->transfers[j].peer == t->peer;
            n.left += j > i && r->transfers[j].peer == t->peer;
        }
    } else if (c->kind == ALL_TO_ALL) {
        n.peer = world_rank(c->group, i);
        n.count = c->in_counts[i];
        n.expected = c->out_counts[i];
    }
    return n;
}

// ---- the order of what two ranks share ----

// The first started of this rank's requests that wait for a notice of `rank`; *item: which notice that is.
static const Request *oldest_unmet(int rank, int *item) {
    const Request *oldest = NULL;
    for (const Request *r = comm.live; r; r = r->live_after)
        for (int i = 0; i < notices_of(r) && !r->agreed; i++)
            if (!r->met[i] && notice_rank(r, i) == rank) {
                oldest = r;
                *item = i;
                break;
            }
    return oldest;
}

#define ONE_ORDER ": two ranks must start the calls that they share in the same order, whatever the groups"

// Ends all: this rank started some call with `rank` before the call of this notice, and that rank after it.
// `answer` is this rank's request of the notice's call, or NULL if it has not reached it.
static void crossed(int rank, const Notice *theirs, const Request *answer) NO_RETURN;
static void crossed(int rank, const Notice *theirs, const Request *answer) {
    int item = 0;
    const Request *r = oldest_unmet(rank, &item);
    // The call that was first here may have met its notice already.
    CHECK(
        r && r != answer,
        "rank %d called %s in group %s before another call that it shares with rank %d, which did so after "
        "it" ONE_ORDER,
        rank, notice_text(theirs), notice_group(theirs), comm.rank);
    Notice mine = notice_of(r, item);
    notice_mismatch(comm.rank, &mine, rank, theirs, ONE_ORDER);
}

// Checks a notice that `rank` has sent on a line on which this rank waits for none of it: all calls that
// this rank has started with it must be among those that `rank` has started, up to and including this one.
static void check_unasked(int rank, Line line) {
    const Peer *peer = &comm.peer[rank];
    const Inbox *inbox = &peer->inbox[line];
    if (!inbox->count || peer->unmet[line]) return;
    const Notice *first = &inbox->notice[0];
    if (peer->launched >= first->before + first->width) crossed(rank, first, NULL);
}

// Numbers the calls that this request shares with other ranks.
static void number_calls(Request *r) {
    for (int i = 0; i < notices_of(r); i++)
        if (!notice_is_own(r, i)) r->before[i] = comm.peer[notice_rank(r, i)].launched;
    for (int i = 0; i < notices_of(r); i++) {
        const int rank = notice_rank(r, i);
        if (notice_is_own(r, i)) continue;
        comm.peer[rank].launched++;
        comm.peer[rank].unmet[line_of(r)]++;
    }
    for (int i = 0; i < notices_of(r); i++)
        for (int line = 0; line < COMM_LINES && !notice_is_own(r, i); line++)
            check_unasked(notice_rank(r, i), (Line)line);
}

// ---- sending and taking notices ----

static void say_where(void) {
    char text[512];
    describe_wait(text, sizeof text);
    fprintf(stderr, "%s: rank %d: %s\n", base_program(), comm.rank, text);
    comm.told = true;
}

static void inbox_add(Inbox *inbox, const Notice *notice) {
    if (inbox->count == inbox->room) {
        inbox->room = 2 * inbox->room + 4;
        inbox->notice = realloc(inbox->notice, sizeof *notice * (size_t)inbox->room);
        CHECK(inbox->notice, "out of host memory for notices");
    }
    inbox->notice[inbox->count++] = *notice;
}

static void inbox_remove(Inbox *inbox, int i) {
    inbox->count--;
    memmove(&inbox->notice[i], &inbox->notice[i + 1], sizeof *inbox->notice * (size_t)(inbox->count - i));
}

void notices_take(void) {
    Notice notice;
    int from;
    while (!comm.alone && control_receive(&notice, &from)) {
        if (notice.kind == FINISHED) {
            comm.peer[from].ended = true;
            comm.peer[from].ended_status = (int)notice.count;
        } else if (notice.kind == WHERE) {
            if (!comm.told && !comm.claimed) say_where();
        } else {
            inbox_add(&comm.peer[from].inbox[notice.line], &notice);
            check_unasked(from, (Line)notice.line);
        }
    }
}

static void give_notices(Request *r) {
    double line_end = comm.line[line_of(r)].end;
    r->ready = r->called > line_end ? r->called : line_end;
    r->end = r->ready;  // becomes the latest of all
    const double *mine = r->values ? r->values + r->call.group.rank * r->value_count : NULL;
    for (int i = 0; i < notices_of(r); i++) {
        if (r->trusted && r->open) r->open[i] = INT64_MAX;
        if (r->met[i] || (r->met[i] = r->trusted || notice_is_own(r, i))) continue;
        Notice notice = notice_of(r, i);
        r->missing++;
        // Values of a sum on the host are split over as many notices as they need.
        for (int first = 0; first == 0 || first < r->value_count; first += NOTICE_VALUES) {
            int rest = r->value_count - first;
            notice.values = rest < NOTICE_VALUES ? rest : NOTICE_VALUES;
            if (mine) memcpy(notice.value, mine + first, sizeof *mine * (size_t)notice.values);
            if (mine) notice.left = rest - notice.values;
            control_send(&notice, notice_rank(r, i));
        }
    }
    r->given = true;
}

static void compare(const Request *r, int i, const Notice *theirs) {
    Notice mine = notice_of(r, i);
    int rank = notice_rank(r, i);
    if (theirs->kind != mine.kind || theirs->group != mine.group || theirs->host != mine.host)
        notice_mismatch(comm.rank, &mine, rank, theirs, "");
    if (theirs->members != mine.members)
        notice_mismatch(comm.rank, &mine, rank, theirs, " of other members");
    if (mine.before >= theirs->before + theirs->width) crossed(rank, theirs, r);
    bool mirrored = mine.kind == ALL_TO_ALL || mine.kind == TRANSFERS;
    bool same =
        theirs->dtype == mine.dtype && theirs->op == mine.op && (mirrored || theirs->root == mine.root);
    if (mine.kind == ALL_TO_ALL)
        same = same && theirs->count == mine.expected && theirs->expected == mine.count;
    else same = same && theirs->count == mine.count;
    if (!same) notice_mismatch(comm.rank, &mine, rank, theirs, "");
    if (theirs->parts != mine.parts)
        notice_mismatch(comm.rank, &mine, rank, theirs, ", split in other parts");
}

// Takes this notice, the one for i or a part of it, out of the inbox.
static void meet(Request *r, int i, int inbox_index) {
    Peer *peer = &comm.peer[notice_rank(r, i)];
    Inbox *inbox = &peer->inbox[line_of(r)];
    Notice notice = inbox->notice[inbox_index];
    compare(r, i, &notice);
    inbox_remove(inbox, inbox_index);
    if (notice.ready > r->end) r->end = notice.ready;
    if (r->values) {
        memcpy(r->values + i * r->value_count + r->got[i], notice.value,
               sizeof *r->values * (size_t)notice.values);
        r->got[i] += notice.values;
        if (r->got[i] < r->value_count) return;
    }
    r->met[i] = true;
    if (r->open) r->open[i] = INT64_MAX;
    r->missing--;
    peer->unmet[line_of(r)]--;
    check_unasked(notice_rank(r, i), line_of(r));
}

// Index of the other end of transfer i among the notices of its peer, or -1.
static int find_transfer(const Request *r, int i) {
    const Inbox *inbox = &comm.peer[notice_rank(r, i)].inbox[line_of(r)];
    for (int j = 0; j < inbox->count; j++) {
        const Notice *n = &inbox->notice[j];
        if (n->kind == TRANSFERS && n->group == r->call.group.handle && n->send != r->transfers[i].send)
            return j;
    }
    return -1;
}

static void meet_notices(Request *r) {
    for (int i = 0; i < notices_of(r); i++) {
        if (r->met[i]) continue;
        int rank = notice_rank(r, i);
        const Inbox *inbox = &comm.peer[rank].inbox[line_of(r)];
        for (int j = 0; !r->met[i] && j >= 0 && inbox->count > 0;) {
            j = r->call.kind == TRANSFERS ? find_transfer(r, i) : 0;
            if (j >= 0) meet(r, i, j);
        }
        if (!r->met[i] && comm.peer[rank].ended) {
            Notice mine = notice_of(r, i), theirs = {.kind = FINISHED};
            notice_mismatch(comm.rank, &mine, rank, &theirs, "");
        }
    }
    // If all notices of a peer's call for this rank have come, none of them belongs to this request, and
    // this request lacks the peer's notice, then both are blocked for ever. (Transfers earlier in the list
    // may take notices of the same call, so this check comes after them.)
    for (int i = 0; i < notices_of(r); i++) {
        const Inbox *inbox = r->met[i] ? NULL : &comm.peer[notice_rank(r, i)].inbox[line_of(r)];
        if (!inbox || inbox->count == 0 || inbox->notice[inbox->count - 1].left > 0) continue;
        Notice mine = notice_of(r, i);
        notice_mismatch(comm.rank, &mine, notice_rank(r, i), &inbox->notice[0], "");
    }
}

// ---- the lines ----

static bool is_group(const Request *r) { return (int)r->call.kind == GROUP; }

static void move(Request *r) {
    if (r->launched && !r->operation) {
        r->done = r->agreed;
        return;
    }
    if (!r->operation) r->operation = is_group(r) ? group_operation(r) : transport_run(&r->call);
    r->launched = !r->operation || transport_test(r->operation);
    if (!r->operation) r->done = true;  // a group that needs nothing
    if (r->done || !r->launched || !r->agreed) return;
    CHECK(is_group(r) || transport_bytes(r->operation) == r->bytes,
          "%s sent %lld bytes, and its formula says %lld", kind_names[r->call.kind],
          (long long)transport_bytes(r->operation), (long long)r->bytes);
    r->done = true;
}

static bool share_a_peer(const Request *a, const Request *b) {
    for (int i = 0; i < notices_of(a); i++)
        for (int j = 0; j < notices_of(b) && !notice_is_own(a, i); j++)
            if (notice_rank(a, i) == notice_rank(b, j)) return true;
    return false;
}

// Whether another request must be launched before this one: ranks launch their collectives, and all that
// they share with one peer, in the order in which they started them.
static bool must_follow(const Request *r) {
    if (!transport_launches()) return false;
    for (const Request *other = r->live_after; other; other = other->live_after)  // started before r
        if (!other->launched && line_of(other) != line_of(r) &&
            (other->call.kind != TRANSFERS || share_a_peer(r, other)))
            return true;
    return false;
}

// A batch of transfers does not wait for its last notice: one peer may need its transfer before it can
// reach the rest. A call that runs early sends its bytes along with its notices.
static bool may_move(const Request *r) {
    bool early = r->given && (r->call.kind == TRANSFERS || r->call.agreed);
    return (r->agreed || early) && (r->operation || !must_follow(r));
}

static void push_line(Line line) {
    for (Request *r; (r = comm.line[line].noticing); comm.line[line].noticing = r->next) {
        if (!r->given) give_notices(r);
        if (r->missing) meet_notices(r);
        if (r->missing) break;
        r->agreed = true;
        r->start = r->end;
        r->end += r->seconds;
        if (!is_group(r)) comm.line[line].end = r->end;
    }
    for (Request *r; (r = comm.line[line].moving) && may_move(r); comm.line[line].moving = r->next) {
        move(r);
        if (!r->done) break;
    }
}

void lines_push(void) {
    comm.pushing = true;
    device_open();
    notices_take();
    for (int line = 0; line < COMM_LINES; line++) push_line((Line)line);
    device_close();
    comm.pushing = false;
}

void line_append(Request *r) {
    r->launched = device_is_dry_run() || r->host || r->call.kind == BARRIER;
    r->trusted = !comm.check && !r->launched && !is_group(r);
    if (!r->launched && !r->trusted && !is_group(r) && r->call.kind != TRANSFERS &&
        transport_runs_early(&r->call))
        r->call.agreed = &r->agreed;
    r->live_after = comm.live;
    if (comm.live) comm.live->live_before = r;
    comm.live = r;
    Line line = line_of(r);
    if (comm.line[line].last) comm.line[line].last->next = r;
    comm.line[line].last = r;
    if (!comm.line[line].noticing) comm.line[line].noticing = r;
    if (!comm.line[line].moving) comm.line[line].moving = r;
    if (!r->trusted) number_calls(r);
    lines_push();
}

// ---- waiting ----

static void deadlock(double seconds) NO_RETURN;
static void deadlock(double seconds) {
    char text[512];
    describe_wait(text, sizeof text);
    // The first to give up asks the others what they wait for. Each says so once; then all end.
    for (int r = 0; r < comm.ranks && claim_last_word(); r++)
        if (r != comm.rank && !comm.peer[r].ended) control_send(&(Notice){.kind = WHERE}, r);
    for (double until = wall_seconds() + 0.3; wall_seconds() < until;) notices_take(), sched_yield();
    fatal("%s, for %.3g s (--timeout)", text, seconds);
}

// A turn of a waiting loop takes a microsecond or, if many processes share a core, many milliseconds. So
// checks that cost system calls are scheduled by the clock, not by the number of turns.
bool look_is_due(double now) {
    static const double EVERY = 0.02;  // seconds
    static double next;
    bool due = now >= next;
    if (due) next = now + EVERY;
    return due;
}

void look_after_all(void) {
    int dead = comm.alone ? -1 : find_dead();
    CHECK(dead < 0, "rank %d has died; all ranks end", dead);
    double seconds = transport_poll();
    CHECK(seconds < comm.timeout,
          "the device has been at one collective for %.3g s (--timeout): another rank's "
          "does not come to it",
          seconds);
}

// With more ranks than cores, a rank yields so many times before it sleeps: waking it takes 30 to 60 us, and
// what it waits for has often come by then. More yields would take time from ranks that compute (doorbell.h).
enum { YIELDS = 8 };

Wait wait_begin(void) {
    double now = wall_seconds();
    return (Wait){.began = now, .looked = now};
}

// A short wait takes a few cache misses, and polling is too long only with more ranks than cores. Polling
// also leaves the doorbell in the cache of the rank that rings it.
void wait_turn(Wait *wait) {
    wait->turn++;
    wait->may_sleep = control_crowded() ? wait->turn > YIELDS : wait->turn % 64 == 0;
    wait->rung = wait->may_sleep ? doorbell_count() : 0;
}

bool wait_pause(Wait *wait) {
    const bool crowded = control_crowded();
    if (!wait->may_sleep) {
        if (crowded) sched_yield();
        return false;
    }
    double now = wall_seconds();
    if (crowded || now - wait->began > 1e-3) doorbell_wait(wait->rung);
    wait->waited += now - wait->looked < 1 ? now - wait->looked : 1;
    wait->looked = now;
    return look_is_due(now);
}

void request_await(Request *r) {
    if (comm.for_all && r->done) return;
    Wait wait = wait_begin();
    comm.waiting = r;
    device_open();  // once, not in each of many thousand turns
    lines_push();
    while (!r->done) {
        wait_turn(&wait);
        lines_push();
        if (r->done || !wait_pause(&wait)) continue;
        if (wait.waited > comm.timeout) deadlock(wait.waited);
        look_after_all();
    }
    device_close();
    comm.waiting = NULL;
    r->waited = wall_seconds();
    r->blocked = r->waited - wait.began;
}
