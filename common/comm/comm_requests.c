// comm_requests.c: the calls of comm.h: what each requires of its arguments, and the counts.
#include <stdlib.h>
#include <string.h>

#include "comm_inside.h"
#include "hash.h"
#include "tensor/clock.h"
#include "tensor/device.h"
#include "tensor/in_flight.h"

// ---- counts ----

static CommCount counts_of_kinds[COLLECTIVE_KINDS];
static double pushed_seconds;

// The counts start anew with the clock's.
static void follow_clock(void) {
    static int64_t resets = -1;
    if (resets == clock_resets()) return;
    for (int i = 0; i < COLLECTIVE_KINDS; i++) counts_of_kinds[i] = (CommCount){.name = kind_names[i]};
    pushed_seconds = 0;
    resets = clock_resets();
}

static CommCount *count_of(CollectiveKind kind) {
    follow_clock();
    return &counts_of_kinds[kind];
}

void count_push(double seconds) {
    follow_clock();
    pushed_seconds += seconds;
    clock_exclude(seconds);
}

CommCount comm_total(void) {
    follow_clock();
    CommCount total = {.name = "total", .wall_seconds = pushed_seconds};
    for (int i = 0; i < COLLECTIVE_KINDS; i++) {
        total.calls += counts_of_kinds[i].calls;
        total.bytes += counts_of_kinds[i].bytes;
        total.across += counts_of_kinds[i].across;
        total.wall_seconds += counts_of_kinds[i].wall_seconds;
        total.model_seconds += counts_of_kinds[i].model_seconds;
        total.exposed_seconds += counts_of_kinds[i].exposed_seconds;
    }
    return total;
}

int comm_counts(const CommCount **counts) {
    follow_clock();
    *counts = counts_of_kinds;
    return COLLECTIVE_KINDS;
}

CommCount comm_count(const char *name) {
    const CommCount *counts;
    int count = comm_counts(&counts);
    for (int i = 0; i < count; i++)
        if (!strcmp(counts[i].name, name)) return counts[i];
    return (CommCount){.name = name};
}

// ---- ends ----

void request_release(Request *r) {
    if (r->operation) transport_end(r->operation);  // before its tensors are freed
    if (r->live_before) r->live_before->live_after = r->live_after;
    else comm.live = r->live_after;
    if (r->live_after) r->live_after->live_before = r->live_before;
    if (comm.line[r->call.group.line].last == r) comm.line[r->call.group.line].last = NULL;
    in_flight_end(r);
    tensor_free(&r->out);
    tensor_free(&r->in);
    for (int i = 0; i < r->call.transfer_count; i++) tensor_free(&r->transfers[i].t);
    free(r->transfers);
    free(r->open);
    free(r->values);
    free(r);
}

static void end(Request *r) {
    CommCount *count = count_of(r->call.kind);
    count->wall_seconds += r->blocked;
    count->exposed_seconds += clock_model_wait(r->end);
    count->model_seconds += r->seconds;
    Line line = r->call.group.line;
    clock_communication(kind_names[r->call.kind], (int)line, line_name(line), r->began, r->waited,
                        r->start, r->end, (double)r->bytes);
    request_release(r);
}

// Looks only at addresses: what has been waited for is freed.
static bool is_in_flight(const Request *r) {
    const Request *live = comm.live;
    while (live && live != r) live = live->live_after;
    return live != NULL;
}

void comm_wait(Request *r) {
    CHECK(is_in_flight(r), "comm_wait: this is no request in flight: it is NULL, or was waited for before");
    void (*then)(void *) = r->then;
    void *context = r->then_context;
    request_await(r);
    end(r);
    if (then) then(context);
}

void comm_wait_all(Request **requests, int count) {
    for (int i = 0; i < count; i++) {
        if (requests[i]) comm_wait(requests[i]);
        requests[i] = NULL;
    }
}

// ---- starting a call ----

// Counts of parts, `each` of every part if counts is NULL. The request has room for two such rows.
static const int64_t *copy_counts(Request *r, const int64_t *counts, int n, int64_t each) {
    int64_t *copy = r->room;
    r->room += n;
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

// One block: the request, and behind it what is kept for each notice.
static Request *request_of(CollectiveKind kind, Group group, int root, DType dtype, int notices) {
    CHECK(!comm.finished, "%s after comm_finish", name_of(kind));
    CHECK(group.size >= 1 && group.rank >= 0 && group.rank < group.size,
          "%s: rank %d is not a member of group %s", name_of(kind), comm.rank,
          group.name ? group.name : "?");
    CHECK(group.size == 1 || group.member, "%s: group %s of %d was not made by comm_group", name_of(kind),
          group.name ? group.name : "?", group.size);
    CHECK(root >= 0 && root < group.size, "%s: there is no root %d in group %s of %d", name_of(kind), root,
          group.name ? group.name : "?", group.size);
    size_t each = 3 * sizeof(int64_t) + sizeof(int) + sizeof(bool);
    Request *r = host_alloc(sizeof *r + (size_t)notices * each);
    *r = (Request){.call = {.kind = kind, .root = root, .dtype = dtype, .group = group},
                   .index = comm.calls + 1};
    r->before = memset(r + 1, 0, (size_t)notices * each);
    r->room = r->before + notices;
    r->got = (int *)(r->room + 2 * notices);
    r->met = (bool *)(r->got + notices);
    return r;
}

Request *request_new(CollectiveKind kind, Group group, int root, DType dtype) {
    return request_of(kind, group, root, dtype, group.size);
}

// "all_reduce, call 12 in group dp"
static const char *request_text(const void *request) {
    static char text[160];
    const Request *r = request;
    snprintf(text, sizeof text, "%s, call %lld in group %s", kind_names[r->call.kind], (long long)r->index,
             r->call.group.name ? r->call.group.name : "of one");
    return text;
}

// A request that was started earlier on the same line is done with the tensor when this one begins.
void request_claim(Request *r, Tensor t, bool writes) {
    in_flight_check(kind_names[r->call.kind], t, writes, r->call.group.line);
    in_flight_begin(t, writes, r->call.group.line, r, request_text);
}

// If both are the same tensor, in place: `out` is read, and written if `writes`.
static void hold(Request *r, Tensor out, Tensor in, bool writes) {
    r->out = tensor_share(out);
    r->in = tensor_share(in);
    const int64_t ins = tensor_exists(in) ? tensor_count(in) : 0,
                  outs = tensor_exists(out) ? tensor_count(out) : 0,
                  size = (int64_t)dtype_size(r->call.dtype);
    const bool in_place = in.storage == out.storage && in.offset == out.offset && ins == outs;
    if (tensor_exists(in) && !(in_place && writes)) request_claim(r, in, false);
    if (tensor_exists(out) && writes) request_claim(r, out, true);
    r->call.out = tensor_exists(out) ? tensor_address(out) : NULL;
    r->call.in = tensor_exists(in) ? tensor_address(in) : NULL;
    r->call.out_bytes = writes ? size * outs : 0;
    r->call.in_bytes = size * ins;
}

static void must_exist(const Request *r, Tensor t, const char *name) {
    CHECK(tensor_exists(t), "%s: %s is no tensor", kind_names[r->call.kind], name);
}

// A rank that stands for all is not timed: reading the wall clock would be a twentieth of its run.
static double call_wall(void) { return comm.for_all ? 0 : wall_seconds(); }

static Request *start(Request *r) {
    Collective *c = &r->call;
    r->began = call_wall();
    if (!device_is_dry_run() && !r->host && c->kind != BARRIER) c->mark = transport_mark();
    request_take_ports(r);
    CommCount *count = count_of(c->kind);
    count->calls += c->group.size > 1;
    count->bytes += r->bytes;
    count->across += r->across;
    comm.calls++;
    line_append(r);
    count->wall_seconds += call_wall() - r->began;
    return r;
}

// The pieces of an all-reduce and a reduce: ceil(total / n) elements each, the last ones shorter.
static const int64_t *copy_pieces(Request *r, int64_t total, int n) {
    const int64_t piece = (total + n - 1) / n;
    int64_t counts[n];
    for (int i = 0; i < n; i++) {
        int64_t rest = total - i * piece;
        counts[i] = rest < 0 ? 0 : rest < piece ? rest : piece;
    }
    return copy_counts(r, counts, n, piece);
}

static Request *start_reduction(CollectiveKind kind, Tensor t, ReduceOp op, int root, Group group) {
    Request *r = request_new(kind, group, root, t.dtype);
    must_exist(r, t, "t");
    r->call.op = op;
    r->total = tensor_count(t);
    r->call.in_counts = copy_pieces(r, r->total, group.size);
    hold(r, t, t, kind == ALL_REDUCE || group.rank == root);
    return start(r);
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
    must_exist(r, part, part_name);
    for (int i = 0; i < c->group.size; i++)
        CHECK(counts[i] >= 0, "%s: part %d has %lld elements", name, i, (long long)counts[i]);
    CHECK(!tensor_exists(whole) || tensor_count(whole) == r->total,
          "%s: %s has %lld elements, and its %d parts have %lld", name, whole_name,
          (long long)tensor_count(whole), c->group.size, (long long)r->total);
    CHECK(tensor_count(part) == counts[c->group.rank], "%s: %s has %lld elements, and part %d has %lld",
          name, part_name, (long long)tensor_count(part), c->group.rank, (long long)counts[c->group.rank]);
    CHECK(!tensor_exists(whole) || whole.dtype == part.dtype, "%s: in and out are %s and %s", name,
          dtype_name(whole.dtype), dtype_name(part.dtype));
    CHECK(part.offset == whole.offset + sum_of(counts, c->group.rank) || !tensor_overlaps(whole, part),
          "%s: %s lies in %s, and not where part %d does", name, part_name, whole_name, c->group.rank);
}

// A call between a whole tensor and one part of it on each member. If it has a root, the whole is used only
// there, and set to {0} elsewhere. (Pointers: a Tensor is long, and these calls are short.)
static Request *start_parts(CollectiveKind kind, Tensor *out, Tensor *in, const int64_t *counts, ReduceOp op,
                            int root, Group group) {
    const bool gathers = kind == ALL_GATHER || kind == GATHER, rooted = kind == GATHER || kind == SCATTER;
    const int n = group.size;
    Tensor *whole = gathers ? out : in, *part = gathers ? in : out;
    if (rooted && group.rank != root) *whole = (Tensor){0};
    Request *r = request_new(kind, group, root, part->dtype);
    const int64_t *parts = copy_counts(r, counts, n, tensor_count(*part));
    *(gathers ? &r->call.out_counts : &r->call.in_counts) = parts;
    r->call.op = op;
    r->parts = counts ? hash_bytes(HASH_SEED, counts, sizeof *counts * (size_t)n) : 0;
    r->total = sum_of(parts, n);
    if (!rooted) must_exist(r, *whole, gathers ? "out" : "in");
    CHECK(!rooted || group.rank != root || tensor_exists(*whole), "%s: the root has no tensor to %s",
          kind_names[kind], gathers ? "gather in" : "scatter");
    check_parts(r, parts, *whole, *part, gathers ? "out" : "in", gathers ? "in" : "out");
    hold(r, *out, *in, true);
    return start(r);
}

Request *comm_reduce_scatter(Tensor out, Tensor in, const int64_t *counts, ReduceOp op, Group group) {
    return start_parts(REDUCE_SCATTER, &out, &in, counts, op, 0, group);
}

Request *comm_all_gather(Tensor out, Tensor in, const int64_t *counts, Group group) {
    return start_parts(ALL_GATHER, &out, &in, counts, REDUCE_SUM, 0, group);
}

Request *comm_gather(Tensor out, Tensor in, const int64_t *counts, int root, Group group) {
    return start_parts(GATHER, &out, &in, counts, REDUCE_SUM, root, group);
}

Request *comm_scatter(Tensor out, Tensor in, const int64_t *counts, int root, Group group) {
    return start_parts(SCATTER, &out, &in, counts, REDUCE_SUM, root, group);
}

Request *comm_broadcast(Tensor t, int root, Group group) {
    Request *r = request_new(BROADCAST, group, root, t.dtype);
    must_exist(r, t, "t");
    r->total = tensor_count(t);
    r->call.in_counts = copy_counts(r, NULL, 1, r->total);
    hold(r, t, t, group.rank != root);
    return start(r);
}

Request *comm_all_to_all(Tensor out, const int64_t *out_counts, Tensor in, const int64_t *in_counts,
                         Group group) {
    Request *r = request_new(ALL_TO_ALL, group, 0, in.dtype);
    int n = group.size, me = group.rank;
    must_exist(r, in, "in");
    must_exist(r, out, "out");
    CHECK(in_counts || tensor_count(in) % n == 0,
          "all_to_all: in has %lld elements, which %d parts do not divide", (long long)tensor_count(in), n);
    CHECK(out_counts || tensor_count(out) % n == 0,
          "all_to_all: out has %lld elements, which %d parts do not divide", (long long)tensor_count(out),
          n);
    const int64_t *give = r->call.in_counts = copy_counts(r, in_counts, n, tensor_count(in) / n);
    const int64_t *take = r->call.out_counts = copy_counts(r, out_counts, n, tensor_count(out) / n);
    for (int i = 0; i < n; i++)
        CHECK(give[i] >= 0 && take[i] >= 0,
              "all_to_all: part %d has %lld elements to give and %lld to take", i, (long long)give[i],
              (long long)take[i]);
    r->total = sum_of(give, n);
    CHECK(r->total == tensor_count(in), "all_to_all: in has %lld elements, and its %d parts have %lld",
          (long long)tensor_count(in), n, (long long)r->total);
    CHECK(sum_of(take, n) == tensor_count(out),
          "all_to_all: out has %lld elements, and its %d parts have %lld", (long long)tensor_count(out), n,
          (long long)sum_of(take, n));
    CHECK(give[me] == take[me], "all_to_all: member %d gives itself %lld elements and takes %lld", me,
          (long long)give[me], (long long)take[me]);
    CHECK(in.dtype == out.dtype, "all_to_all: in and out are %s and %s", dtype_name(in.dtype),
          dtype_name(out.dtype));
    CHECK(!tensor_overlaps(out, in), "all_to_all: in and out overlap");
    hold(r, out, in, true);
    return start(r);
}

Request *comm_barrier(Group group) { return start(request_new(BARRIER, group, 0, F32)); }

Request *comm_transfers(const Transfer *transfers, int count, Group group) {
    Request *r = request_of(TRANSFERS, group, 0, F32, count);
    r->transfers = host_alloc(sizeof *r->transfers * (size_t)count);
    r->call.transfers = r->transfers;
    r->call.open = r->open = calloc((size_t)count + 1, sizeof *r->open);
    CHECK(r->open, "out of host memory for transfers");
    r->call.transfer_count = count;
    int own_sends = 0, own_receives = 0;
    for (int i = 0; i < count; i++) {
        const Transfer *t = &transfers[i];
        CHECK(t->peer >= 0 && t->peer < group.size, "transfers: there is no peer %d in group %s of %d",
              t->peer, group.name ? group.name : "?", group.size);
        CHECK(tensor_exists(t->t), "transfers: number %d of the batch has no tensor", i);
        for (int j = 0; j < i; j++)
            CHECK((t->send && transfers[j].send) || !tensor_overlaps(t->t, transfers[j].t),
                  "transfers: %d and %d of the batch overlap, and one of them receives", j, i);
        r->transfers[i] = (Transfer){.send = t->send, .peer = t->peer, .t = tensor_share(t->t)};
        request_claim(r, t->t, !t->send);
        if (t->peer == group.rank && t->send) own_sends++;
        if (t->peer != group.rank || t->send) continue;
        // The i-th receive from myself meets the i-th send to myself.
        int met = own_receives++;
        for (int j = 0; j < count && met >= 0; j++)
            if (transfers[j].send && transfers[j].peer == group.rank && met-- == 0)
                CHECK(tensor_bytes(transfers[j].t) == tensor_bytes(t->t) &&
                          transfers[j].t.dtype == t->t.dtype,
                      "transfers: rank %d sends itself %s and receives %s", comm.rank,
                      tensor_text(transfers[j].t), tensor_text(t->t));
    }
    CHECK(own_sends == own_receives,
          "transfers: rank %d sends itself %d tensors and receives %d in one batch", comm.rank, own_sends,
          own_receives);
    return start(r);
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

// Each member's values, on all: value i of member r is values[r count + i] of the request, which the caller
// ends. They are sent in the notices.
static Request *exchange_on_host(CollectiveKind kind, const double *values, int count, ReduceOp op,
                                 Group group) {
    int n = group.size, me = group.rank;
    CHECK(count >= 1, "%s of %d values on the host; it is of at least 1",
          kind == ALL_GATHER ? "a gather" : "a sum", count);
    Request *r = request_new(kind, group, 0, F64);
    r->values = host_alloc(sizeof *r->values * (size_t)n * (size_t)count);
    r->value_count = count;
    for (int i = 0; i < n; i++)
        if (i == me || comm.for_all)
            memcpy(r->values + i * count, values, sizeof *values * (size_t)count);
    r->host = true;
    r->call.op = op;
    r->total = kind == ALL_GATHER ? (int64_t)n * count : count;
    if (kind == ALL_GATHER) r->call.out_counts = copy_counts(r, NULL, n, count);
    else r->call.in_counts = copy_pieces(r, count, n);
    start(r);
    request_await(r);
    return r;
}

static void reduce_on_host(double *values, int count, ReduceOp op, Group group) {
    Request *r = exchange_on_host(ALL_REDUCE, values, count, op, group);
    for (int v = 0; v < count; v++) values[v] = r->values[v];
    for (int i = 1; i < group.size; i++)
        for (int v = 0; v < count; v++) {
            double x = r->values[i * count + v];
            if (op == REDUCE_SUM) values[v] += x;
            else if (!(values[v] >= x) && values[v] == values[v]) values[v] = x;
        }
    end(r);
}

void comm_values_of_all(const double *mine, int count, double *all, Group group) {
    Request *r = exchange_on_host(ALL_GATHER, mine, count, REDUCE_SUM, group);
    memcpy(all, r->values, sizeof *all * (size_t)group.size * (size_t)count);
    end(r);
}

double comm_sum(double value, Group group) { return reduce_on_host(&value, 1, REDUCE_SUM, group), value; }
double comm_max(double value, Group group) { return reduce_on_host(&value, 1, REDUCE_MAX, group), value; }
void comm_sum_all(double *values, int count, Group group) {
    reduce_on_host(values, count, REDUCE_SUM, group);
}

// An f64 holds 53 bits, so the 64 are compared in halves: all are equal if greatest and least are.
bool comm_same(uint64_t value, Group group) {
    double high = (double)(value >> 32), low = (double)(uint32_t)value;
    double most[] = {high, low, -high, -low};
    reduce_on_host(most, 4, REDUCE_MAX, group);
    return most[0] == -most[2] && most[1] == -most[3];
}
