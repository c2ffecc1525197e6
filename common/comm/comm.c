// comm.c: the front of communication: requests, their order, agreement, clocks, counts and timeouts.
//
// The requests of a rank form a line, as kernels do on one CUDA stream. Each goes through three states:
//
//     notice   The members tell each other what they call and when, on the model clock, they can begin:
//                  ready = max(compute stream at the call, end of this rank's previous request)
//              A request gives its notices when those of the one before it have all come, so `ready` is exact.
//              When all have come: start = the latest ready, end = start + what the machine needs.
//     data     The transport moves the bytes, one request after another.
//     done     comm_wait may return; it makes the compute stream wait for `end`.
//
// A rank blocked in the notices of one request has sent none of the next. So whatever a peer has sent and
// this rank has not asked for is what the peer is blocked in. Two ranks each blocked in something that the
// other has not come to will wait for ever, and that is how mismatched calls, other orders and sends that
// face each other are found, at once. Only longer circles are left to the timeout.
//
// Nothing runs in the background: every call into comm pushes all requests on.
#include "comm.h"

#include <errno.h>
#include <math.h>
#include <omp.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "report/clock.h"
#include "tensor/device.h"
#include "tensor/guard.h"
#include "transport.h"

// Kinds of notices that are no collectives: a rank's last one, the question what a rank waits for, and the making of
// a group.
enum { FINISHED = COLLECTIVE_KINDS, WHERE, GROUP };

static const char *const kind_names[COLLECTIVE_KINDS] = {
    "all_reduce", "reduce",    "reduce_scatter", "all_gather", "gather",
    "scatter",    "broadcast", "all_to_all",     "barrier",    "transfers"};

struct Request {
    Request *next;                      // the one started after this
    Request *live_before, *live_after;  // all that are not yet waited for
    Collective call;
    Tensor out, in;  // shares of the caller's: freed early, they stay until the request ends
    Transfer *transfers;
    int64_t *open;   // transfers whose other end has come
    bool *met;       // notices that have come, by member or by transfer
    int missing;     // those that have not
    double *values;  // sums on the host, the making of a group: everyone's
    bool host, given, settled, done;
    int64_t index, total;                // n-th call of this rank; elements
    uint64_t parts;                      // hash of unequal counts
    double called, ready, end, seconds;  // model clock; seconds: what the machine needs
    double began, waited, blocked;  // wall clock: the call, the end of its wait, and the length of that
    int64_t bytes;                  // that this rank sends
    Group made;                     // what a GROUP is about
    Operation *operation;
};

typedef struct Inbox {  // what one rank has sent and this one has not asked for: notices of one call
    Notice *notice;
    int count, room;
} Inbox;

typedef struct Identity {
    uint64_t binary, arguments;
    int32_t pid;
    char host[64];
} Identity;

static const Control *control = &control_mpi;  // or control_tcp

static struct {
    bool started, alone;   // alone: no transport, as before comm_start
    atomic_bool finished;  // read by whoever sees a death
    int rank, ranks;
    double timeout;
    bool check, check_given;
    Identity *identity;  // of each rank
    Group *group;        // all that were made, by handle - 1
    int groups;
    Inbox *inbox;  // of each rank
    bool *ended;
    int *ended_status;
    // the line
    Request *last, *noticing, *moving, *live;
    int64_t calls;
    double stream_end;  // model clock: end of the last settled request
    bool waiting;
    bool pushing;  // push is under way
    bool claimed;  // this rank says why all end
    bool told;     // this one has said where it waits, since another gave up
    // counts
    CommCount count[COLLECTIVE_KINDS];
    int64_t resets;
} state = {.alone = true, .ranks = 1, .timeout = 300, .check = true};

bool comm_sums_in_rank_order(void) { return transport_sums_in_rank_order(); }
const char *comm_carrier(void) { return transport_text(); }
int comm_ranks(void) { return state.ranks; }
int comm_rank(void) { return state.rank; }
const char *comm_host(int rank) { return state.identity ? state.identity[rank].host : "this machine"; }
void comm_set_timeout(double seconds) { state.timeout = seconds; }

void comm_set_check(bool on) {
    state.check = on;
    state.check_given = true;
}

// ---- hashes ----

static const uint64_t HASH_SEED = 0xcbf29ce484222325;

static uint64_t hash(uint64_t h, const void *data, size_t bytes) {  // FNV-1a, eight bytes at a time
    const unsigned char *from = data;
    for (; bytes >= 8; bytes -= 8, from += 8) {
        uint64_t word;
        memcpy(&word, from, 8);
        h = (h ^ word) * 0x100000001b3;
        h ^= h >> 29;
    }
    while (bytes--) h = (h ^ *from++) * 0x100000001b3;
    return h;
}

static uint64_t hash_of_binary(void) {
    uint64_t h = HASH_SEED;
    FILE *file = fopen("/proc/self/exe", "rb");
    CHECK(file, "/proc/self/exe cannot be read: %s", strerror(errno));
    static char buffer[1 << 16];
    for (size_t got; (got = fread(buffer, 1, sizeof buffer, file)) > 0;) h = hash(h, buffer, got);
    fclose(file);
    return h;
}

// ---- groups ----

static void prepare_group(Group group);

Group comm_group(const char *name, const int *members, int size) {
    Group group = {.size = size, .rank = -1, .handle = ++state.groups};
    int *copy = host_alloc(sizeof *copy * (size_t)size);
    CHECK(size >= 1, "group %s: a group has at least one member", name);
    for (int i = 0; i < size; i++) {
        CHECK(members[i] >= 0 && members[i] < state.ranks, "group %s: there is no rank %d among %d", name,
              members[i], state.ranks);
        for (int j = 0; j < i; j++)
            CHECK(members[j] != members[i], "group %s: rank %d is in it twice", name, members[i]);
        copy[i] = members[i];
        if (members[i] == state.rank) group.rank = i;
    }
    group.member = copy;
    group.name = format_text("%s", name);
    state.group = realloc(state.group, sizeof group * (size_t)state.groups);
    CHECK(state.group, "out of host memory for groups");
    state.group[state.groups - 1] = group;
    if (transport_prepares_groups() && !state.alone && !device_is_dry_run()) prepare_group(group);
    return group;
}

Group comm_world(void) {
    static int *everyone;
    if (!everyone) {
        everyone = host_alloc(sizeof *everyone * (size_t)state.ranks);
        for (int i = 0; i < state.ranks; i++) everyone[i] = i;
    }
    return (Group){.size = state.ranks, .rank = state.rank, .name = "world", .member = everyone};
}

static int world_rank(Group group, int member) { return group.member ? group.member[member] : state.rank; }

// Smallest number of members that a node has, on the modelled machine: the narrowest place.
static int members_per_node(Group group) {
    int least = group.size;
    for (int i = 0; i < group.size; i++) {
        int node = clock_node(world_rank(group, i)), here = 0;
        for (int j = 0; j < group.size; j++) here += clock_node(world_rank(group, j)) == node;
        if (here < least) least = here;
    }
    return least;
}

// ---- sentences ----

// "all_reduce(1024 f32)". Rotates over 4 static buffers.
static const char *call_text(const Notice *n) {
    static char texts[4][128];
    static int turn;
    char *text = texts[turn++ % 4];
    size_t size = sizeof *texts;
    const char *type = n->dtype >= 0 && n->dtype < DTYPES ? dtype_name((DType)n->dtype) : "?";
    const char *max = n->op == REDUCE_MAX ? " max" : "", *host = n->host ? " on the host" : "";
    long long count = n->count, expected = n->expected;
    switch (n->kind) {
        case FINISHED:
            snprintf(text, size, "comm_finish, or left the program,");
            break;
        case BARRIER:
            snprintf(text, size, "barrier()");
            break;
        case GROUP:
            snprintf(text, size, "comm_group, for its group %lld,", count);
            break;
        case TRANSFERS:
            snprintf(text, size, "%s(%lld %s %s rank %d)", n->send ? "send" : "receive", count, type,
                     n->send ? "to" : "from", n->peer);
            break;
        case ALL_TO_ALL:
            if (count == expected) snprintf(text, size, "all_to_all(%lld %s each way)", count, type);
            else
                snprintf(text, size, "all_to_all(%lld %s to rank %d, %lld from it)", count, type, n->peer,
                         expected);
            break;
        case REDUCE:
        case GATHER:
        case SCATTER:
        case BROADCAST:
            snprintf(text, size, "%s(%lld %s%s %s rank %d)", kind_names[n->kind], count, type, max,
                     n->kind == REDUCE || n->kind == GATHER ? "to" : "from", n->root);
            break;
        default:
            snprintf(text, size, "%s(%lld %s%s%s)", kind_names[n->kind], count, type, max, host);
    }
    return text;
}

static const char *group_text(const Notice *n) {
    return n->kind != FINISHED && n->group >= 1 && n->group <= state.groups ? state.group[n->group - 1].name
                                                                            : "world";
}

// The notice of this request that member i gets; for transfers: that the peer of transfer i gets.
static Notice notice_for(const Request *r, int i) {
    const Collective *c = &r->call;
    Notice n = {.kind = c->kind,
                .group = c->group.handle,
                .op = c->op,
                .root = world_rank(c->group, c->root),
                .dtype = c->dtype,
                .host = r->host,
                .sequence = (int32_t)r->index,
                .parts = r->parts,
                .count = r->total,
                .ready = r->ready,
                .value = r->values ? r->values[c->group.rank] : 0};
    if (c->group.member) n.members = hash(HASH_SEED, c->group.member, sizeof(int) * (size_t)c->group.size);
    if (c->kind == TRANSFERS) {
        const Transfer *t = &r->transfers[i];
        n.send = t->send;
        n.peer = world_rank(c->group, t->peer);
        n.dtype = t->t.dtype;
        n.count = tensor_count(t->t);
        for (int j = i + 1; j < c->transfer_count; j++) n.left += r->transfers[j].peer == t->peer;
    } else if (c->kind == ALL_TO_ALL) {
        n.peer = world_rank(c->group, i);
        n.count = c->in_counts[i];
        n.expected = c->out_counts[i];
    }
    return n;
}

// "rank 2 called all_gather(…) where rank 0 called all_reduce(…), in group dp": the lower rank is the
// measure.
static void mismatch(int mine_rank, const Notice *mine, int their_rank, const Notice *theirs,
                     const char *why) NO_RETURN;
static void mismatch(int mine_rank, const Notice *mine, int their_rank, const Notice *theirs,
                     const char *why) {
    if (mine_rank > their_rank) {
        const Notice *notice = mine;
        mine = theirs, theirs = notice;
        int rank = mine_rank;
        mine_rank = their_rank, their_rank = rank;
    }
    if (mine->group != theirs->group && mine->kind != FINISHED && theirs->kind != FINISHED)
        fatal("rank %d called %s in group %s where rank %d called %s in group %s%s", their_rank,
              call_text(theirs), group_text(theirs), mine_rank, call_text(mine), group_text(mine), why);
    fatal("rank %d called %s where rank %d called %s, in group %s%s", their_rank, call_text(theirs),
          mine_rank, call_text(mine), group_text(mine->kind == FINISHED ? theirs : mine), why);
}

// ---- a dead rank ----

// A process that its launcher has reaped is gone; of other machines the launcher knows. -1: none.
static int find_dead(void) {
    for (int r = 0; state.identity && r < state.ranks; r++)
        if (r != state.rank && !state.ended[r] &&
            (control->gone(r) || (!strcmp(state.identity[r].host, state.identity[state.rank].host) &&
                                  kill(state.identity[r].pid, 0) < 0 && errno == ESRCH)))
            return r;
    return -1;
}

static const char DIED[] = " has died; all ranks end\n";

// Ends this rank, as all others; the first to come here says why, if it knows: "rank 2" and what became of it. Only
// calls that are allowed in a signal handler.
static void end_with(int dead, const char *what) {
    if (control->claim() && dead >= 0) {
        char digits[16], *digit = digits + sizeof digits;
        for (int r = dead; r || digit == digits + sizeof digits; r /= 10) *--digit = (char)('0' + r % 10);
        const char *name = base_program(),
                   *texts[] = {name, ": rank ", digit, what};
        size_t lengths[] = {strlen(name), 7, (size_t)(digits + sizeof digits - digit), strlen(what)};
        char line[256];
        size_t length = 0;
        for (int i = 0; i < 4; i++)
            for (size_t j = 0; j < lengths[i] && length < sizeof line; j++) line[length++] = texts[i][j];
        if (write(STDERR_FILENO, line, length) < 0) _exit(STATUS_USAGE);
    }
    _exit(STATUS_USAGE);
}

// mpirun ends the other ranks with SIGTERM when one dies; with --quiet, and it is quiet so that a verdict
// of FAIL is no disaster, nobody else would say why. From elsewhere the signal is meant for this rank.
static void on_terminate(int signal, siginfo_t *info, void *unused) {
    (void)signal, (void)unused;
    bool meant = info->si_code == SI_USER && info->si_pid != getppid();
    end_with(meant ? state.rank : find_dead(), meant ? " was ended by SIGTERM; all ranks end\n" : DIED);
}

// The control plane has seen a process end. Before its last notice nobody leaves but by dying.
static void on_death(int rank) {
    if (!state.finished) end_with(rank, DIED);
}

static bool claim(void) {
    if (!state.claimed) state.claimed = control->claim();
    return state.claimed;
}

static void end_all(const char *sentence, int status) {
    if (!*sentence) {  // nobody reads any more; seen by a thread that is not MPI's
        control->claim();
        _exit(status);
    }
    state.finished = true;  // leaving is no comm_finish
    // Where all fail alike the lowest speaks, which is rank 0 as a rule.
    usleep((useconds_t)(state.rank ? 60000 + 40000 * (state.rank < 8 ? state.rank : 8) : 0));
    int dead = find_dead();  // then whatever else was found has come of that
    if (claim()) {
        if (dead >= 0) fprintf(stderr, "%s: rank %d has died; all ranks end\n", base_program(), dead);
        else fputs(sentence, stderr);
        fflush(NULL);
        usleep(20000);  // mpirun passes the sentence on before it hears of the end
    } else {
        usleep(3000000);  // another has spoken, and ends this one
    }
    transport_abort();
    control->abort(status);
    _exit(status);
}

// ---- notices ----

static void push(void);

static int notices_of(const Request *r) {
    return r->call.kind == TRANSFERS ? r->call.transfer_count : r->call.group.size;
}

static bool notice_is_own(const Request *r, int i) {
    return (r->call.kind == TRANSFERS ? r->transfers[i].peer : i) == r->call.group.rank;
}

static int notice_rank(const Request *r, int i) {
    return world_rank(r->call.group, r->call.kind == TRANSFERS ? r->transfers[i].peer : i);
}

// What this rank waits for, after "rank 1: ".
static void describe_wait(char *text, size_t size) {
    const Request *r = state.noticing ? state.noticing : state.moving;
    if (!r || !state.waiting) {
        snprintf(text, size, "waits for nobody, after %lld calls", (long long)state.calls);
        return;
    }
    const Collective *c = &r->call;
    int first = 0;
    while (!r->settled && first < notices_of(r) - 1 && r->met[first]) first++;
    Notice mine = notice_for(r, first);
    int used = snprintf(text, size, "waits in %s, its call %lld, in group %s", call_text(&mine),
                        (long long)r->index, c->group.name ? c->group.name : "of one");
    if (r->settled) {
        snprintf(text + used, size - (size_t)used, ", for data");
        return;
    }
    const char *before = ", for rank ";
    int named = -1;
    for (int i = 0; i < notices_of(r); i++) {
        int rank = notice_rank(r, i);
        if (r->met[i] || rank == named || used > (int)size - 32) continue;
        used += snprintf(text + used, size - (size_t)used, "%s%d", before, rank);
        before = ", ";
        named = rank;
    }
}

static void say_where(void) {
    char text[512];
    describe_wait(text, sizeof text);
    fprintf(stderr, "%s: rank %d: %s\n", base_program(), state.rank, text);
    state.told = true;
}

static void take_notices(void) {
    Notice notice;
    int from;
    while (!state.alone && control->receive(&notice, &from)) {
        if (notice.kind == FINISHED) {
            state.ended[from] = true;
            state.ended_status[from] = notice.count;
        } else if (notice.kind == WHERE) {
            if (!state.told && !state.claimed) say_where();
        } else {
            Inbox *inbox = &state.inbox[from];
            if (inbox->count == inbox->room) {
                inbox->room = 2 * inbox->room + 4;
                inbox->notice = realloc(inbox->notice, sizeof notice * (size_t)inbox->room);
                CHECK(inbox->notice, "out of host memory for notices");
            }
            inbox->notice[inbox->count++] = notice;
        }
    }
}

static void inbox_remove(Inbox *inbox, int i) {
    inbox->count--;
    memmove(&inbox->notice[i], &inbox->notice[i + 1], sizeof *inbox->notice * (size_t)(inbox->count - i));
}

static void give_notices(Request *r) {
    // A rank can begin when its compute stream has come to the call, and its communication stream is free.
    r->ready = r->called > state.stream_end ? r->called : state.stream_end;
    r->end = r->ready;  // grows to the latest
    for (int i = 0; i < notices_of(r); i++) {
        if (r->met[i] || (r->met[i] = notice_is_own(r, i))) continue;
        Notice notice = notice_for(r, i);
        control->send(&notice, notice_rank(r, i));
        r->missing++;
    }
    r->given = true;
}

static void compare(const Request *r, int i, const Notice *theirs) {
    Notice mine = notice_for(r, i);
    int rank = notice_rank(r, i);
    if (theirs->kind != mine.kind || theirs->group != mine.group || theirs->host != mine.host)
        mismatch(state.rank, &mine, rank, theirs, "");
    if (theirs->members != mine.members) mismatch(state.rank, &mine, rank, theirs, " of other members");
    if (!state.check || (!state.check_given && r->call.group.size > 64)) return;
    bool crossed = mine.kind == ALL_TO_ALL || mine.kind == TRANSFERS;
    bool same =
        theirs->dtype == mine.dtype && theirs->op == mine.op && (crossed || theirs->root == mine.root);
    if (mine.kind == ALL_TO_ALL)
        same = same && theirs->count == mine.expected && theirs->expected == mine.count;
    else same = same && theirs->count == mine.count;
    if (!same) mismatch(state.rank, &mine, rank, theirs, "");
    if (theirs->parts != mine.parts) mismatch(state.rank, &mine, rank, theirs, ", cut in other parts");
}

static void meet(Request *r, int i, int inbox_index) {
    Inbox *inbox = &state.inbox[notice_rank(r, i)];
    Notice notice = inbox->notice[inbox_index];
    compare(r, i, &notice);
    inbox_remove(inbox, inbox_index);
    if (notice.ready > r->end) r->end = notice.ready;
    if (r->values) r->values[i] = notice.value;
    r->met[i] = true;
    if (r->open) r->open[i] = INT64_MAX;
    r->missing--;
}

// The other end of transfer i among what its peer has sent, or -1.
static int find_transfer(const Request *r, int i) {
    const Inbox *inbox = &state.inbox[notice_rank(r, i)];
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
        const Inbox *inbox = &state.inbox[rank];
        int j = r->call.kind == TRANSFERS ? find_transfer(r, i) : 0;
        if (j >= 0 && inbox->count > 0) meet(r, i, j);
        else if (state.ended[rank]) {
            Notice mine = notice_for(r, i), theirs = {.kind = FINISHED};
            mismatch(state.rank, &mine, rank, &theirs, "");
        }
    }
    // All that a peer's call has for me is here, nothing of it is for this request, and this one lacks the
    // peer: both are blocked for ever. (Transfers earlier in the list may have been served by the same
    // call; so this comes after.)
    for (int i = 0; i < notices_of(r); i++) {
        const Inbox *inbox = r->met[i] ? NULL : &state.inbox[notice_rank(r, i)];
        if (!inbox || inbox->count == 0 || inbox->notice[inbox->count - 1].left > 0) continue;
        Notice mine = notice_for(r, i);
        mismatch(state.rank, &mine, notice_rank(r, i), &inbox->notice[0], "");
    }
}

// ---- the line ----

static bool is_group(const Request *r) { return (int)r->call.kind == GROUP; }

static Operation *make_group(const Request *r);

static void move(Request *r) {
    if (device_is_dry_run() || r->host || r->call.kind == BARRIER) {
        r->done = r->settled;
        return;
    }
    if (!r->operation) r->operation = is_group(r) ? make_group(r) : transport_run(&r->call);
    if (!r->operation) r->done = true;  // a group that needs nothing
    if (r->done || !transport_test(r->operation) || !r->settled) return;
    CHECK(is_group(r) || transport_bytes(r->operation) == r->bytes,
          "%s sent %lld bytes, and its formula says %lld", kind_names[r->call.kind],
          (long long)transport_bytes(r->operation), (long long)r->bytes);
    r->done = true;
}

// A batch of transfers need not wait for its last notice: what it has with one peer may be what this peer waits for
// before it comes to the rest.
static bool may_move(const Request *r) { return r->settled || (r->call.kind == TRANSFERS && r->given); }

// Everything on as far as it goes without waiting.
static void push(void) {
    state.pushing = true;
    device_open();
    take_notices();
    for (Request *r; (r = state.noticing); state.noticing = r->next) {
        if (!r->given) give_notices(r);
        if (r->missing) meet_notices(r);
        if (r->missing) break;
        r->settled = true;
        r->end += r->seconds;
        if (!is_group(r)) state.stream_end = r->end;
    }
    for (Request *r; (r = state.moving) && may_move(r); state.moving = r->next) {
        move(r);
        if (!r->done) break;
    }
    device_close();
    state.pushing = false;
}

static void deadlock(double seconds) NO_RETURN;
static void deadlock(double seconds) {
    char text[512];
    describe_wait(text, sizeof text);
    // The first to give up asks the others where they are. They say so, once each; then all end.
    for (int r = 0; r < state.ranks && claim(); r++)
        if (r != state.rank && !state.ended[r]) control->send(&(Notice){.kind = WHERE}, r);
    for (double until = wall_seconds() + 0.3; wall_seconds() < until;) take_notices(), sched_yield();
    fatal("%s, for %.3g s (--timeout)", text, seconds);
}

// Ends all if a rank or what moves the bytes has failed.
static void look_after_all(void) {
    int dead = state.alone ? -1 : find_dead();
    CHECK(dead < 0, "rank %d has died; all ranks end", dead);
    double seconds = transport_poll();
    CHECK(seconds < state.timeout,
          "the device has been at one collective for %.3g s (--timeout): another rank's "
          "does not come to it",
          seconds);
}

// One turn of a loop that waits since `began`.
static void wait_turn(double began, int64_t turn) {
    push();
    if (turn % 64) return;
    double seconds = wall_seconds() - began;
    // A short wait is a few cache lines long; who waits longer lets others run. (With more ranks than cores
    // MPI yields at every turn.)
    if (seconds > 1e-3) sched_yield();
    if (turn % 4096) return;
    if (seconds > state.timeout) deadlock(seconds);
    look_after_all();
}

// While the host waits for the device, which may itself wait for another rank's.
static void look_from_device(void) {
    static int64_t turn;
    if (state.alone || ++turn % 64) return;
    if (!state.pushing && !state.finished) push();
    if (turn % 4096 == 0) look_after_all();
}

static CommCount *count_of(CollectiveKind kind) {
    if (state.resets != clock_resets()) {
        memset(state.count, 0, sizeof state.count);
        state.resets = clock_resets();
    }
    for (int i = 0; i < COLLECTIVE_KINDS; i++) state.count[i].name = kind_names[i];
    return &state.count[kind];
}

CommCount comm_total(void) {
    count_of(ALL_REDUCE);
    CommCount total = {.name = "total"};
    for (int i = 0; i < COLLECTIVE_KINDS; i++) {
        total.calls += state.count[i].calls;
        total.bytes += state.count[i].bytes;
        total.wall_seconds += state.count[i].wall_seconds;
        total.model_seconds += state.count[i].model_seconds;
        total.exposed_seconds += state.count[i].exposed_seconds;
    }
    return total;
}

int comm_counts(const CommCount **counts) {
    count_of(ALL_REDUCE);
    *counts = state.count;
    return COLLECTIVE_KINDS;
}

CommCount comm_count(const char *name) {
    const CommCount *counts;
    int count = comm_counts(&counts);
    for (int i = 0; i < count; i++)
        if (!strcmp(counts[i].name, name)) return counts[i];
    return (CommCount){.name = name};
}

static void wait_until_done(Request *r) {
    double began = wall_seconds();
    state.waiting = true;
    device_open();  // once, not at each of many thousand turns
    push();
    for (int64_t turn = 1; !r->done; turn++) wait_turn(began, turn);
    device_close();
    state.waiting = false;
    r->waited = wall_seconds();
    r->blocked = r->waited - began;
}

static void release(Request *r) {
    if (r->operation) transport_end(r->operation);  // before its tensors go
    if (r->live_before) r->live_before->live_after = r->live_after;
    else state.live = r->live_after;
    if (r->live_after) r->live_after->live_before = r->live_before;
    if (state.last == r) state.last = NULL;
    tensor_free(&r->out);
    tensor_free(&r->in);
    for (int i = 0; i < r->call.transfer_count; i++) tensor_free(&r->transfers[i].t);
    free(r->transfers);
    free(r->open);
    free((void *)r->call.in_counts);
    free((void *)r->call.out_counts);
    free(r->met);
    free(r->values);
    free(r);
}

static void end(Request *r) {
    CommCount *count = count_of(r->call.kind);
    count->wall_seconds += r->blocked;
    count->exposed_seconds += clock_model_wait(r->end);
    count->model_seconds += r->seconds;
    clock_communication(kind_names[r->call.kind], r->began, r->waited, r->end - r->seconds, r->end,
                        (double)r->bytes);
    release(r);
}

void comm_wait(Request *r) {
    wait_until_done(r);
    end(r);
}

// ---- starting a call ----

static int64_t *copy_counts(const int64_t *counts, int n, int64_t each) {
    int64_t *copy = host_alloc(sizeof *copy * (size_t)n);
    for (int i = 0; i < n; i++) copy[i] = counts ? counts[i] : each;
    return copy;
}

static int64_t sum_of(const int64_t *counts, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++) sum += counts[i];
    return sum;
}

static const char *name_of(CollectiveKind kind) {
    return kind < COLLECTIVE_KINDS ? kind_names[kind] : "comm_group";
}

static Request *request_new(CollectiveKind kind, Group group, int root, DType dtype) {
    CHECK(!state.finished, "%s after comm_finish", name_of(kind));
    CHECK(group.size >= 1 && group.rank >= 0 && group.rank < group.size,
          "%s: rank %d is not a member of group %s", name_of(kind), state.rank,
          group.name ? group.name : "?");
    CHECK(group.size == 1 || group.member, "%s: group %s of %d was not made by comm_group", name_of(kind),
          group.name ? group.name : "?", group.size);
    CHECK(root >= 0 && root < group.size, "%s: there is no root %d in group %s of %d", name_of(kind), root,
          group.name ? group.name : "?", group.size);
    Request *r = host_alloc(sizeof *r);
    *r = (Request){.call = {.kind = kind, .root = root, .dtype = dtype, .group = group}};
    return r;
}

static void hold(Request *r, Tensor out, Tensor in) {
    r->out = tensor_share(out);
    r->in = tensor_share(in);
    r->call.out = tensor_exists(out) ? tensor_address(out) : NULL;
    r->call.in = tensor_exists(in) ? tensor_address(in) : NULL;
}

static void put_in_line(Request *r) {
    r->index = state.calls;
    r->met = calloc((size_t)notices_of(r) + 1, sizeof *r->met);
    CHECK(r->met, "out of host memory for a request");
    r->live_after = state.live;
    if (state.live) state.live->live_before = r;
    state.live = r;
    if (state.last) state.last->next = r;
    state.last = r;
    if (!state.noticing) state.noticing = r;
    if (!state.moving) state.moving = r;
    push();
}

// bytes: that this rank sends. model_bytes: K of clock_collective_seconds.
static Request *start(Request *r, int64_t bytes, double model_bytes) {
    Collective *c = &r->call;
    double began = wall_seconds();
    r->began = began;
    r->bytes = bytes;
    if (!device_is_dry_run() && !r->host && c->kind != BARRIER) c->mark = transport_mark();
    if (c->kind != TRANSFERS && c->kind != ALL_TO_ALL)
        r->seconds = clock_collective_seconds(kind_names[c->kind], model_bytes, c->group.size,
                                              members_per_node(c->group));
    r->called = clock_model_now();
    CommCount *count = count_of(c->kind);
    count->calls++;
    count->bytes += bytes;
    state.calls++;
    put_in_line(r);
    count->wall_seconds += wall_seconds() - began;
    return r;
}

static double bytes_of(const Request *r) { return (double)r->total * (double)dtype_size(r->call.dtype); }

static Request *start_reduction(CollectiveKind kind, Tensor t, ReduceOp op, int root, Group group) {
    Request *r = request_new(kind, group, root, t.dtype);
    int n = group.size, me = group.rank;
    r->call.op = op;
    r->total = tensor_count(t);
    int64_t piece = (r->total + n - 1) / n, *counts = copy_counts(NULL, n, piece);
    for (int i = 0; i < n; i++) {
        int64_t rest = r->total - i * piece;
        counts[i] = rest < 0 ? 0 : rest < piece ? rest : piece;
    }
    r->call.in_counts = counts;
    hold(r, t, t);
    int64_t back = kind == ALL_REDUCE ? n - 1 : me != root;
    return start(r, (r->total - counts[me] + back * counts[me]) * (int64_t)dtype_size(t.dtype),
                 bytes_of(r));
}

Request *comm_all_reduce(Tensor t, ReduceOp op, Group group) {
    return start_reduction(ALL_REDUCE, t, op, 0, group);
}

Request *comm_reduce(Tensor t, ReduceOp op, int root, Group group) {
    return start_reduction(REDUCE, t, op, root, group);
}

static void check_parts(const Request *r, const int64_t *counts, Tensor whole, Tensor part,
                        const char *whole_name, const char *part_name) {
    const Collective *c = &r->call;
    const char *name = kind_names[c->kind];
    for (int i = 0; i < c->group.size; i++)
        CHECK(counts[i] >= 0, "%s: part %d has %lld elements", name, i, (long long)counts[i]);
    CHECK(!tensor_exists(whole) || tensor_count(whole) == r->total,
          "%s: %s has %lld elements, and its parts have %lld", name, whole_name,
          (long long)tensor_count(whole), (long long)r->total);
    CHECK(tensor_count(part) == counts[c->group.rank], "%s: %s has %lld elements, and part %d has %lld",
          name, part_name, (long long)tensor_count(part), c->group.rank, (long long)counts[c->group.rank]);
    CHECK(!tensor_exists(whole) || whole.dtype == part.dtype, "%s: in and out are %s and %s", name,
          dtype_name(whole.dtype), dtype_name(part.dtype));
}

static uint64_t hash_parts(const int64_t *counts, int n) {
    return counts ? hash(HASH_SEED, counts, sizeof *counts * (size_t)n) : 0;
}

Request *comm_reduce_scatter(Tensor out, Tensor in, const int64_t *counts, ReduceOp op, Group group) {
    Request *r = request_new(REDUCE_SCATTER, group, 0, in.dtype);
    int n = group.size;
    r->call.op = op;
    r->call.in_counts = copy_counts(counts, n, tensor_count(out));
    r->parts = hash_parts(counts, n);
    r->total = sum_of(r->call.in_counts, n);
    check_parts(r, r->call.in_counts, in, out, "in", "out");
    hold(r, out, in);
    return start(r, (r->total - tensor_count(out)) * (int64_t)dtype_size(in.dtype), bytes_of(r));
}

Request *comm_all_gather(Tensor out, Tensor in, const int64_t *counts, Group group) {
    Request *r = request_new(ALL_GATHER, group, 0, in.dtype);
    int n = group.size;
    r->call.out_counts = copy_counts(counts, n, tensor_count(in));
    r->parts = hash_parts(counts, n);
    r->total = sum_of(r->call.out_counts, n);
    check_parts(r, r->call.out_counts, out, in, "out", "in");
    hold(r, out, in);
    return start(r, (n - 1) * tensor_bytes(in), bytes_of(r));
}

Request *comm_gather(Tensor out, Tensor in, const int64_t *counts, int root, Group group) {
    Request *r = request_new(GATHER, group, root, in.dtype);
    r->call.out_counts = copy_counts(counts, group.size, tensor_count(in));
    r->parts = hash_parts(counts, group.size);
    r->total = sum_of(r->call.out_counts, group.size);
    CHECK(group.rank != root || tensor_exists(out), "gather: the root has no tensor to gather in");
    check_parts(r, r->call.out_counts, group.rank == root ? out : (Tensor){0}, in, "out", "in");
    hold(r, group.rank == root ? out : (Tensor){0}, in);
    return start(r, group.rank == root ? 0 : tensor_bytes(in), bytes_of(r));
}

Request *comm_scatter(Tensor out, Tensor in, const int64_t *counts, int root, Group group) {
    Request *r = request_new(SCATTER, group, root, out.dtype);
    r->call.in_counts = copy_counts(counts, group.size, tensor_count(out));
    r->parts = hash_parts(counts, group.size);
    r->total = sum_of(r->call.in_counts, group.size);
    CHECK(group.rank != root || tensor_exists(in), "scatter: the root has no tensor to scatter");
    check_parts(r, r->call.in_counts, group.rank == root ? in : (Tensor){0}, out, "in", "out");
    hold(r, out, group.rank == root ? in : (Tensor){0});
    return start(r, group.rank == root ? tensor_bytes(in) - tensor_bytes(out) : 0, bytes_of(r));
}

Request *comm_broadcast(Tensor t, int root, Group group) {
    Request *r = request_new(BROADCAST, group, root, t.dtype);
    r->total = tensor_count(t);
    r->call.in_counts = copy_counts(NULL, 1, r->total);
    hold(r, t, t);
    return start(r, group.rank == root ? (group.size - 1) * tensor_bytes(t) : 0, bytes_of(r));
}

// Adds bytes to or from a member to the traffic of the link that leads there.
static void add_traffic(const Request *r, Traffic *traffic, int member, double sent, double received) {
    Group group = r->call.group;
    if (member == group.rank) return;
    Traffic *link =
        &traffic[clock_node(world_rank(group, member)) != clock_node(world_rank(group, group.rank))];
    link->peers++;
    link->sent += sent;
    link->received += received;
}

Request *comm_all_to_all(Tensor out, const int64_t *out_counts, Tensor in, const int64_t *in_counts,
                         Group group) {
    Request *r = request_new(ALL_TO_ALL, group, 0, in.dtype);
    int n = group.size, me = group.rank;
    CHECK(in_counts || tensor_count(in) % n == 0,
          "all_to_all: in has %lld elements, which %d parts do not divide", (long long)tensor_count(in), n);
    CHECK(out_counts || tensor_count(out) % n == 0,
          "all_to_all: out has %lld elements, which %d parts do not divide", (long long)tensor_count(out),
          n);
    const int64_t *give = r->call.in_counts = copy_counts(in_counts, n, tensor_count(in) / n);
    const int64_t *take = r->call.out_counts = copy_counts(out_counts, n, tensor_count(out) / n);
    for (int i = 0; i < n; i++)
        CHECK(give[i] >= 0 && take[i] >= 0,
              "all_to_all: part %d has %lld elements to give and %lld to take", i, (long long)give[i],
              (long long)take[i]);
    r->total = sum_of(give, n);
    CHECK(r->total == tensor_count(in), "all_to_all: in has %lld elements, and its parts have %lld",
          (long long)tensor_count(in), (long long)r->total);
    CHECK(sum_of(take, n) == tensor_count(out),
          "all_to_all: out has %lld elements, and its parts have %lld", (long long)tensor_count(out),
          (long long)sum_of(take, n));
    CHECK(give[me] == take[me], "all_to_all: member %d gives itself %lld elements and takes %lld", me,
          (long long)give[me], (long long)take[me]);
    CHECK(in.dtype == out.dtype, "all_to_all: in and out are %s and %s", dtype_name(in.dtype),
          dtype_name(out.dtype));
    hold(r, out, in);
    double size = (double)dtype_size(in.dtype);
    Traffic traffic[2] = {0};
    for (int i = 0; i < n; i++) add_traffic(r, traffic, i, size * (double)give[i], size * (double)take[i]);
    r->seconds = clock_all_to_all_seconds(traffic[0], traffic[1]);
    return start(r, (r->total - give[me]) * (int64_t)size, 0);
}

Request *comm_barrier(Group group) { return start(request_new(BARRIER, group, 0, F32), 0, 0); }

Request *comm_transfers(const Transfer *transfers, int count, Group group) {
    Request *r = request_new(TRANSFERS, group, 0, F32);
    r->transfers = host_alloc(sizeof *r->transfers * (size_t)count);
    r->call.transfers = r->transfers;
    r->call.open = r->open = calloc((size_t)count + 1, sizeof *r->open);
    CHECK(r->open, "out of host memory for transfers");
    r->call.transfer_count = count;
    Traffic traffic[2] = {0};
    int64_t bytes = 0;
    int own_sends = 0, own_receives = 0;
    for (int i = 0; i < count; i++) {
        const Transfer *t = &transfers[i];
        CHECK(t->peer >= 0 && t->peer < group.size, "transfers: there is no peer %d in group %s of %d",
              t->peer, group.name ? group.name : "?", group.size);
        r->transfers[i] = (Transfer){.send = t->send, .peer = t->peer, .t = tensor_share(t->t)};
        double size = (double)tensor_bytes(t->t);
        add_traffic(r, traffic, t->peer, t->send ? size : 0, t->send ? 0 : size);
        if (t->peer != group.rank && t->send) bytes += tensor_bytes(t->t);
        if (t->peer == group.rank && t->send) own_sends++;
        if (t->peer != group.rank || t->send) continue;
        // The own_receives-th receive from myself meets that send to myself.
        int met = own_receives++;
        for (int j = 0; j < count && met >= 0; j++)
            if (transfers[j].send && transfers[j].peer == group.rank && met-- == 0)
                CHECK(tensor_bytes(transfers[j].t) == tensor_bytes(t->t) &&
                          transfers[j].t.dtype == t->t.dtype,
                      "transfers: rank %d sends itself %s and receives %s", state.rank,
                      tensor_text(transfers[j].t), tensor_text(t->t));
    }
    CHECK(own_sends == own_receives,
          "transfers: rank %d sends itself %d tensors and receives %d in one batch", state.rank, own_sends,
          own_receives);
    r->seconds = clock_transfers_seconds(traffic[0], traffic[1]);
    return start(r, bytes, 0);
}

Request *comm_send(Tensor t, int to, Group group) {
    return comm_transfers(&(Transfer){.send = true, .peer = to, .t = t}, 1, group);
}

Request *comm_receive(Tensor t, int from, Group group) {
    return comm_transfers(&(Transfer){.send = false, .peer = from, .t = t}, 1, group);
}

Request *comm_send_receive(Tensor send, int to, Tensor receive, int from, Group group) {
    Transfer both[] = {{.send = true, .peer = to, .t = send}, {.send = false, .peer = from, .t = receive}};
    return comm_transfers(both, 2, group);
}

// The values ride on the notices.
static double host_reduction(double value, ReduceOp op, Group group) {
    int n = group.size;
    Request *r = request_new(ALL_REDUCE, group, 0, F64);
    double *values = host_alloc(sizeof *values * (size_t)n);
    values[group.rank] = value;
    r->values = values;
    r->host = true;
    r->call.op = op;
    r->total = 1;
    // As the all-reduce of a tensor with one element, which is the piece of member 0.
    start(r, 8 * (group.rank == 0 ? n - 1 : 1) * (n > 1), 8);
    wait_until_done(r);
    double result = values[0];
    for (int i = 1; i < n; i++)
        if (op == REDUCE_SUM) result += values[i];
        else if (!(result >= values[i]) && result == result) result = values[i];
    end(r);
    return result;
}

// ---- groups that the data plane prepares ----

// All ranks meet, and tell what they have: a group that needs nothing (this rank is no member, or the
// only one), a new one, or one with the members of an older one, by its handle.
enum { NOTHING = -2, NEW = -1 };

static bool same_members(Group a, Group b) {
    return a.size == b.size && !memcmp(a.member, b.member, sizeof *a.member * (size_t)a.size);
}

static void prepare_group(Group group) {
    Request *r = request_new((CollectiveKind)GROUP, comm_world(), 0, F32);
    int as = group.rank < 0 || group.size == 1 ? NOTHING : NEW;
    if (as == NEW && same_members(group, comm_world())) as = 0;
    for (int h = 1; h < group.handle && as == NEW; h++)
        if (same_members(group, state.group[h - 1])) as = h;
    r->values = host_alloc(sizeof *r->values * (size_t)state.ranks);
    r->values[state.rank] = as;
    r->made = group;
    r->total = group.handle;
    put_in_line(r);
    wait_until_done(r);
    release(r);
}

static Operation *make_group(const Request *r) {
    int as = NOTHING, mine = (int)r->values[state.rank];
    for (int i = 0; i < state.ranks; i++) {
        int theirs = (int)r->values[i];
        if (as == NOTHING) as = theirs;
        else if (theirs != NOTHING && theirs != as) as = NEW;
    }
    if (as == NOTHING) return NULL;
    int color = r->made.member[0];
    for (int i = 1; i < r->made.size; i++)
        if (r->made.member[i] < color) color = r->made.member[i];
    Group group = r->made;
    if (mine == NOTHING) group.rank = -1;
    return transport_group(group, color, as);
}

double comm_sum(double value, Group group) { return host_reduction(value, REDUCE_SUM, group); }
double comm_max(double value, Group group) { return host_reduction(value, REDUCE_MAX, group); }

// ---- start and end ----

// What stands behind --name in argv; NULL without it.
static const char *argument(int argc, char **argv, const char *name) {
    size_t length = strlen(name);
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], name, length) && argv[i][length] == '=') return argv[i] + length + 1;
        if (!strcmp(argv[i], name)) return i + 1 < argc ? argv[i + 1] : "";
    }
    return NULL;
}

// Options that are not numbers are options_parse's to refuse.
static double number(int argc, char **argv, const char *name, double standard) {
    const char *text = argument(argc, argv, name);
    if (!text) return standard;
    char *end;
    double value = strtod(text, &end);
    CHECK(*text && !*end && value >= 0, "%s %s is not a number of at least 0", name, text);
    return value;
}

// One thread per core and rank, as far as they go, unless the user has said otherwise.
static void share_cores(int ranks_here) {
    if (getenv("OMP_NUM_THREADS")) return;
    int threads = (int)sysconf(_SC_NPROCESSORS_ONLN) / ranks_here, bound = omp_get_num_procs();
    if (threads > bound) threads = bound;
    omp_set_num_threads(threads > 1 ? threads : 1);
}

// Who else there is: all must run the same. Returns where this rank stands among them.
static Place check_identities(int argc, char **argv) {
    Identity mine = {.binary = hash_of_binary(), .arguments = HASH_SEED, .pid = (int32_t)getpid()};
    for (int i = 1; i < argc; i++) mine.arguments = hash(mine.arguments, argv[i], strlen(argv[i]) + 1);
    gethostname(mine.host, sizeof mine.host - 1);
    Identity *all = host_alloc(sizeof mine * (size_t)state.ranks);
    control->share(&mine, all, sizeof mine);
    state.identity = all;
    int here = 0, local = 0;
    for (int r = 0; r < state.ranks; r++) {
        const Identity *other = &state.identity[r], *first = &state.identity[0];
        if (r == state.rank) local = here;
        here += !strcmp(other->host, mine.host);
        CHECK(other->binary == first->binary,
              "rank %d on %s runs another build of this program than rank 0 on %s", r, other->host,
              first->host);
        CHECK(other->arguments == first->arguments, "rank %d was started with other arguments than rank 0",
              r);
    }
    share_cores(here);
    return (Place){state.rank, state.ranks, local, here, here == state.ranks};
}

static void finish_at_exit(int status, void *unused) {
    (void)unused;
    if (state.finished || state.alone) return;
    int worst = comm_finish(status);
    if (worst == status) return;
    fflush(NULL);
    _exit(worst);
}

static void choose_control(const char *rendezvous) {
    if (rendezvous) {
        CHECK(*rendezvous, "--rendezvous needs a value");
        CHECK(!transport_needs_mpi(),
              "--rendezvous is for COMM=nccl: this program's data goes over MPI, and "
              "mpirun or srun starts it");
        control = &control_tcp;
    }
    CHECK(rendezvous || transport_needs_mpi() || control->launched() || !getenv("RANK") ||
              !getenv("WORLD_SIZE"),
          "RANK and WORLD_SIZE are set: --rendezvous FILE lets these ranks find each other, and without "
          "the two mpirun starts them");
}

void comm_start(int argc, char **argv, int natural) {
    CHECK(!state.started, "comm_start was called twice");
    double wanted = number(argc, argv, "--ranks", 0);
    CHECK(wanted == floor(wanted) && wanted <= 4096, "--ranks %g is not a whole number up to 4096", wanted);
    state.timeout = number(argc, argv, "--timeout", state.timeout);
    choose_control(argument(argc, argv, "--rendezvous"));
    int ranks = wanted > 0 ? (int)wanted : natural;
    state.started = true;
    state.alone = !control->launched() && ranks == 1;
    if (state.alone) return;
    if (!control->launched()) {
        char threads[16];
        int share = (int)sysconf(_SC_NPROCESSORS_ONLN) / ranks;
        snprintf(threads, sizeof threads, "%d", share > 1 ? share : 1);
        setenv("OMP_NUM_THREADS", threads, 0);
        fatal("%d ranks need %s: %s; --ranks 1 runs without it", ranks, control->launcher,
              control->launch(argc, argv, ranks));
    }
    Joining how = {argument(argc, argv, "--rendezvous"), state.timeout, on_death};
    control->start(&how, &state.rank, &state.ranks);
    base_set_rank(state.rank, state.ranks, end_all);
    CHECK(wanted == 0 || (int)wanted == state.ranks,
          "--ranks %d, but %s has started %d: leave --ranks out, or start as many", (int)wanted,
          control->launcher, state.ranks);
    state.inbox = calloc((size_t)state.ranks, sizeof *state.inbox);
    state.ended = calloc((size_t)state.ranks, sizeof *state.ended);
    state.ended_status = calloc((size_t)state.ranks, sizeof *state.ended_status);
    CHECK(state.inbox && state.ended && state.ended_status, "out of host memory for %d ranks", state.ranks);
    Place place = check_identities(argc, argv);
    backend_start(place.local_rank, place.ranks_here);
    transport_start(control, place, look_from_device);
    struct sigaction terminate = {.sa_sigaction = on_terminate, .sa_flags = SA_SIGINFO};
    sigaction(SIGTERM, &terminate, NULL);
    on_exit(finish_at_exit, NULL);
}

int comm_finish(int status) {
    if (state.finished) return status;
    if (state.live) {
        const Request *r = state.live;
        while (r->live_after) r = r->live_after;
        Notice mine = notice_for(r, 0);
        fatal("comm_finish: nobody waited for %s in group %s, call %lld of rank %d", call_text(&mine),
              r->call.group.name ? r->call.group.name : "of one", (long long)r->index, state.rank);
    }
    state.finished = true;
    if (!state.started || state.alone) return status;
    fflush(NULL);
    Notice mine = {.kind = FINISHED, .count = status};
    for (int r = 0; r < state.ranks; r++)
        if (r != state.rank) control->send(&mine, r);
    state.ended[state.rank] = true;
    state.ended_status[state.rank] = status;
    double began = wall_seconds();
    int worst = 0;
    for (int r = 0, turn = 1; r < state.ranks; r += state.ended[r]) {
        int dead = ++turn % 4096 == 0 ? find_dead() : -1;
        take_notices();  // what a process sent before it ended has come now
        if (state.inbox[r].count) mismatch(state.rank, &mine, r, &state.inbox[r].notice[0], "");
        if (turn % 64 == 0) sched_yield();
        CHECK(dead < 0 || state.ended[dead], "rank %d has died; all ranks end", dead);
        CHECK(wall_seconds() - began < state.timeout,
              "comm_finish: rank %d has not come in %.3g s (--timeout)", r, state.timeout);
        if (state.ended[r] && state.ended_status[r] > worst) worst = state.ended_status[r];
    }
    // From here on nobody is missed. mpirun may end the others when the first leaves with a status that is
    // not 0.
    signal(SIGTERM, SIG_IGN);
    transport_finish();
    control->finish();
    return worst;
}
