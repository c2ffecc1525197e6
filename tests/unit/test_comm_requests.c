// test_comm_requests.c [--ranks N] [PATTERN]: many requests at once, in several groups and on one tensor,
// with and without notices, how long they take, what they wait for, and which ranks are in which group.
// TAP, on all ranks at once; comm.t runs it with 1 to 8.
#include <mpi.h>
#include <sched.h>

#include "comm/comm_inside.h"
#include "comm/doorbell.h"
#include "comm_values.h"
#include "tensor/guard.h"
#include "tensor/ops.h"

static void requests_of_several_groups_stand_open_at_once(void) {
    Mesh mesh = mesh_new(a_grid());
    Group groups[] = {mesh.world, mesh.dp, mesh.tp, mesh.pp, mesh.cp};
    enum { GROUPS = 5, EACH = 3 };
    for (int turn = 0; turn < 4; turn++) {
        Tensor t[GROUPS * EACH];
        Request *request[GROUPS * EACH];
        for (int i = 0; i < GROUPS * EACH; i++) {
            t[i] = tensor_of(F32, me, 1000 + 7001 * (i % 4));
            nap(100 * turn + i);
            request[i] = comm_all_reduce(t[i], REDUCE_SUM, groups[i % GROUPS]);
        }
        for (int i = GROUPS * EACH - 1; i >= 0; i--) {  // the last first
            comm_wait(request[i]);
            nap(100 * turn + 50 + i);
        }
        for (int i = 0; i < GROUPS * EACH; i++) {
            expect_reduced("sum over an axis", t[i], REDUCE_SUM, groups[i % GROUPS], 0);
            tensor_free(&t[i]);
        }
    }
}

// Member i of the reversed group is rank n - 1 - i; each half has the ranks of one parity, the last one
// first.
static void groups_keep_their_own_order(void) {
    int turned[n], half[n], count = 0;
    for (int i = 0; i < n; i++) turned[i] = n - 1 - i;
    for (int r = n - 1; r >= 0; r--)
        if (r % 2 == me % 2) half[count++] = r;
    device_dry_run(true);
    comm_group("of a dry run", LINE_DP, turned, n);  // it has no communicator that a later group could share
    device_dry_run(false);
    Group groups[] = {comm_group("turned", LINE_WORLD, turned, n),
                      comm_group("half", LINE_WORLD, half, count),
                      comm_group("turned again", LINE_WORLD, turned, n),
                      comm_group("after a dry run", LINE_DP, turned, n)};
    for (int g = 0; g < 4; g++) {
        Group group = groups[g];
        Tensor in = tensor_of(F32, me, 1009), out = empty(F32, 1009 * group.size),
               t = tensor_of(BF16, me, 1009);
        comm_wait(comm_all_gather(out, in, NULL, group));
        for (int i = 0; i < group.size; i++)
            expect_values("part of a member", out, 1009 * i, group.member[i], 0, 1009);
        comm_wait(comm_reduce(t, REDUCE_SUM, group.size - 1, group));
        if (group.rank == group.size - 1) expect_reduced("sum at the last member", t, REDUCE_SUM, group, 0);
        int next = (group.rank + 1) % group.size, last = (group.rank + group.size - 1) % group.size;
        Tensor from_last = empty(F32, 1009);
        comm_wait(comm_send_receive(in, next, from_last, last, group));
        expect_values("from the member before", from_last, 0, group.member[last], 0, 1009);
        Tensor *tensors[] = {&in, &out, &t, &from_last};
        for (int i = 0; i < 4; i++) tensor_free(tensors[i]);
    }
}

static void requests_on_one_tensor_run_in_order(void) {
    int64_t count = 30011;
    Tensor t = tensor_of(F32, me, count), parts_of_t = empty(F32, count * n);
    Request *sum = comm_all_reduce(t, REDUCE_SUM, world);
    Request *gather = comm_all_gather(parts_of_t, t, NULL, world);  // of the sums
    nap(1);
    comm_wait(gather);
    comm_wait(sum);
    for (int i = 0; i < n; i++)
        expect_reduction("gathered sums", parts_of_t, count * i, REDUCE_SUM, world, 0, count);
    tensor_free(&t);
    tensor_free(&parts_of_t);
}

static void a_tensor_freed_early_stays_until_the_wait(void) {
    enum { COUNT = 50021, OTHERS = 8 };
    static double fill[COUNT], got[COUNT];
    Tensor t = tensor_of(F32, me, COUNT), other[OTHERS];
    if (me == n - 1) usleep(30000);  // the others' data cannot leave before
    Request *request = comm_all_reduce(t, REDUCE_SUM, world);
    tensor_free(&t);
    // One of these takes its place, if it is free.
    for (int i = 0; i < COUNT; i++) fill[i] = 7;
    for (int j = 0; j < OTHERS; j++) {
        other[j] = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(COUNT));
        tensor_from_doubles(other[j], fill);
    }
    comm_wait(request);
    for (int j = 0; j < OTHERS; j++) {
        tensor_to_doubles(got, other[j]);
        int i = 0;
        while (i < COUNT && got[i] == 7) i++;
        if (i < COUNT) note("a new tensor's element %d became %g", i, got[i]);
        tensor_free(&other[j]);
    }
}

static void groups_of_one_take_the_same_road(void) {
    Mesh single = mesh_single();
    Tensor t = tensor_of(BF16, 3, 1009), out = empty(BF16, 1009);
    int64_t counts[1] = {1009};
    clock_reset();
    comm_wait(comm_all_reduce(t, REDUCE_SUM, single.dp));
    comm_wait(comm_reduce(t, REDUCE_MAX, 0, single.dp));
    comm_wait(comm_broadcast(t, 0, single.tp));
    comm_wait(comm_barrier(single.pp));
    expect_values("left alone", t, 0, 3, 0, 1009);
    Request *(*const copies[])(Tensor, Tensor, const int64_t *, int, Group) = {comm_gather, comm_scatter};
    for (int i = 0; i < 2; i++) {
        Tensor copy = empty(BF16, 1009);
        comm_wait(copies[i](copy, t, counts, 0, single.dp));
        expect_values("copied", copy, 0, 3, 0, 1009);
        tensor_free(&copy);
    }
    comm_wait(comm_reduce_scatter(out, t, counts, REDUCE_SUM, single.dp));
    expect_values("reduce-scatter", out, 0, 3, 0, 1009);
    comm_wait(comm_all_to_all(out, NULL, t, counts, single.ep));
    comm_wait(comm_all_gather(out, t, NULL, single.cp));
    expect_values("all-gather", out, 0, 3, 0, 1009);
    SAME(comm_total().calls, 0);
    SAME(comm_total().bytes, 0);
    SAME(comm_total().model_seconds, 0);
    tensor_free(&t);
    tensor_free(&out);
}

static void the_grid_is_numbered_with_tp_fastest(void) {
    if (n != 8) return;
    MeshShape shape = {.dp = 2, .pp = 2, .cp = 1, .tp = 2, .ep = 2};
    Mesh mesh = mesh_new(shape);
    SAME(mesh.tp.member[0], me - me % 2);
    SAME(mesh.tp.rank, me % 2);
    SAME(mesh.dp.member[0], me / 4 * 4 + me % 2);
    SAME(mesh.dp.member[1], me / 4 * 4 + me % 2 + 2);
    SAME(mesh.dp.rank, me / 2 % 2);
    SAME(mesh.pp.member[1], me % 4 + 4);
    SAME(mesh.pp.rank, me / 4);
    SAME(mesh.cp.size, 1);
    SAME(mesh.ep.member[0], mesh.tp.member[0]);
    mesh = mesh_new((MeshShape){.dp = 4, .pp = 1, .cp = 2, .tp = 1, .ep = 2});
    SAME(mesh.cp.member[1], me - me % 2 + 1);
    SAME(mesh.ep.member[0], me - me % 2);  // ep is the faster digit of dp x cp x tp
    SAME(mesh.ep.rank, me % 2);
    SAME(mesh.expert_dp.member[1], me % 2 + 2);
}

// Member 0 is late, and the others wait for it.
static void waiting_counts_as_communication(void) {
    Tensor t = tensor_of(F32, me, 1009);
    comm_wait(comm_barrier(world));
    clock_reset();
    if (me == 0) usleep(60000);
    double start = wall_seconds();
    comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    double passed = wall_seconds() - start, counted = comm_total().wall_seconds;
    if (counted > passed || (passed > 0.02 && counted < passed / 2))
        note("a call took %g s, and %g s of communication are counted", passed, counted);
    tensor_free(&t);
}

// ---- with and without notices ----

// One call of each kind that moves bytes, all in flight at once. Returns everything that has arrived here,
// which is `values` numbers.
enum { PART = 1009, CALLS = 10 };
static double *one_of_each(int64_t values) {
    int left = (me + n - 1) % n, right = (me + 1) % n, last = n - 1;
    Tensor whole[6], part[4], in = tensor_of(F32, me, PART * n), none = {0};
    for (int i = 0; i < 6; i++) whole[i] = tensor_of(i == 1 ? BF16 : F32, i + me, PART * n);
    for (int i = 0; i < 4; i++) part[i] = tensor_of(F32, i + me, PART);
    nap(me);
    Request *requests[CALLS] = {
        comm_all_reduce(whole[0], REDUCE_SUM, world),
        comm_all_reduce(whole[1], REDUCE_SUM, world),
        comm_reduce(whole[2], REDUCE_SUM, last, world),
        comm_all_gather(whole[3], part[0], NULL, world),
        comm_gather(me == last ? whole[4] : none, part[0], NULL, last, world),
        comm_all_to_all(whole[5], NULL, in, NULL, world),
        comm_reduce_scatter(part[1], in, NULL, REDUCE_SUM, world),
        comm_scatter(part[2], me == 0 ? in : none, NULL, 0, world),
        comm_send_receive(part[0], right, part[3], left, world),
        comm_broadcast(part[0], 0, world),
    };
    comm_wait_all(requests, CALLS);
    double *got = host_alloc(sizeof *got * (size_t)values), *at = got;
    for (int i = 0; i < 6; at += PART * n, i++) tensor_to_doubles(at, whole[i]);
    for (int i = 0; i < 4; at += PART, i++) tensor_to_doubles(at, part[i]);
    for (int i = 0; i < 6; i++) tensor_free(&whole[i]);
    for (int i = 0; i < 4; i++) tensor_free(&part[i]);
    tensor_free(&in);
    return got;
}

static void calls_without_checks_send_no_notices(void) {
    int64_t values = (6 * n + 4) * PART, sent[2];
    double *got[2];
    bool before = comm_set_check(true);
    for (int checked = 0; checked < 2; checked++) {
        comm_set_check(checked);
        sent[checked] = control_sent();
        got[checked] = one_of_each(values);
        sent[checked] = control_sent() - sent[checked];
    }
    // With checks, one to each other member, or one for each transfer.
    SAME(sent[true], (CALLS - 1) * (n - 1) + (n > 1 ? 2 : 0));
    SAME(sent[false], 0);
    if (memcmp(got[true], got[false], sizeof **got * (size_t)values))
        note("calls without checks give other values");
    // A sum on the host is carried by its notices, and a barrier consists only of notices.
    comm_set_check(false);
    sent[false] = control_sent();
    SAME(comm_sum(me, world), n * (n - 1) / 2);
    comm_wait(comm_barrier(world));
    SAME(control_sent() - sent[false], 2 * (n - 1));
    // A dry run's model clock is exact in any case.
    device_dry_run(true);
    Tensor t = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(PART));
    sent[false] = control_sent();
    comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    SAME(control_sent() - sent[false], n - 1);
    tensor_free(&t);
    device_dry_run(false);
    comm_set_check(before);
    for (int i = 0; i < 2; i++) free(got[i]);
}

// ---- what a call waits for ----

// The messages that the core sends, and how often it polls for some.
static int sends, asks;
int MPI_Isend(const void *from, int count, MPI_Datatype type, int rank, int tag, MPI_Comm all,
              MPI_Request *request) {
    sends++;
    return PMPI_Isend(from, count, type, rank, tag, all, request);
}
int MPI_Test(MPI_Request *request, int *come, MPI_Status *status) {
    asks++;
    return PMPI_Test(request, come, status);
}

// Whether all ranks are on one machine, with their tensors in its memory.
static bool shares_memory(void) { return n > 1 && !*comm_carrier(); }

// One rank tells another, bypassing comm, that it has reached some point.
static void tell(int rank) { MPI_Send(NULL, 0, MPI_BYTE, rank, 0, MPI_COMM_WORLD); }
static void hear(int rank) { MPI_Recv(NULL, 0, MPI_BYTE, rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE); }

static void one_machine_needs_no_messages(void) {
    Tensor t = tensor_of(F32, me, 1009);
    sends = asks = 0;
    for (int i = 0; i < 20; i++) {
        comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
        comm_wait(comm_barrier(world));
        comm_sum(me, world);
    }
    if (shares_memory() && (sends || asks))
        note("notices and bytes took %d messages, and %d looks for more", sends, asks);
    tensor_free(&t);
}

// A rank that waits sleeps, for a millisecond at most, so a missing ring would only make it slow. Therefore
// rings are counted, perhaps without those of a last barrier: one for a notice, for a segment, and for a
// slot that is returned to a rank that has no other.
static void what_has_come_rings(void) {
    enum { TIMES = 64 };
    Tensor t = tensor_of(F32, me, 1000);
    uint32_t heard = doorbell_count();
    doorbell_ring(me);
    const bool rings = n > 1 && !strstr(comm_carrier(), "NCCL");
    if (rings && doorbell_count() == heard) note("a rank has not heard its own doorbell");
    doorbell_wait(heard);  // returns, although no one rings any more
    heard = doorbell_count();
    for (int i = 0; i < TIMES; i++) comm_wait(comm_barrier(world));
    int rung = (int)(doorbell_count() - heard), least = (TIMES - 1) * (n - 1);
    if (rings && rung < least) note("%d barriers have rung %d times, and not %d", TIMES, rung, least);
    heard = doorbell_count();
    if (rings) MPI_Barrier(MPI_COMM_WORLD);
    int64_t notices = control_sent();
    for (int i = 0; i < TIMES && me < 2 && n > 1; i++)
        comm_wait(me ? comm_receive(t, 0, world) : comm_send(t, 1, world));
    least = (me ? TIMES : 0) + (int)(control_sent() - notices);  // segments, and notices if there are any
    comm_wait(comm_barrier(world));
    rung = (int)(doorbell_count() - heard);
    if (rings && me < 2 && rung < least) note("%d transfers have rung %d times", TIMES, rung);
    tensor_free(&t);
    if (!rings) return;
    t = tensor_of(F32, me, 1 << 20);  // more than all slots hold
    const bool before = comm_set_check(false);
    heard = doorbell_count();
    Request *sent = me == 0 ? comm_send(t, 1, world) : NULL;
    MPI_Barrier(MPI_COMM_WORLD);  // the slots are full
    if (me == 1) comm_wait(comm_receive(t, 0, world));
    comm_wait_all(&sent, 1);
    if (me == 0 && doorbell_count() == heard) note("slots come back without a ring");
    MPI_Barrier(MPI_COMM_WORLD);  // before others ring for what comes next
    comm_set_check(before);
    tensor_free(&t);
}

// A table to which each rank adds a row: a rank sends its own row to each other, and no more.
static void values_of_all_are_sent_once(void) {
    enum { VALUES = 10 };
    double mine[VALUES], *all = host_alloc(sizeof *all * (size_t)n * VALUES);
    for (int i = 0; i < VALUES; i++) mine[i] = value(F64, me, i);
    int64_t sent = control_sent();
    comm_values_of_all(mine, VALUES, all, world);
    SAME(control_sent() - sent, (n - 1) * ((VALUES + NOTICE_VALUES - 1) / NOTICE_VALUES));
    for (int r = 0; r < n; r++)
        for (int i = 0; i < VALUES; i++) SAME(all[r * VALUES + i], value(F64, r, i));
    free(all);
}

// More requests at once than there is room for notices: 16 can be in flight from one rank to another.
static void many_notices_come_in_order(void) {
    enum { VALUES = 300, TRANSFERS_EACH_WAY = 40 };
    double sums[VALUES];
    for (int i = 0; i < VALUES; i++) sums[i] = value(F64, me, i);
    comm_sum_all(sums, VALUES, world);
    for (int i = 0; i < VALUES; i++) {
        double sum = 0;
        for (int r = 0; r < n; r++) sum += value(F64, r, i);
        SAME(sums[i], sum);
    }
    Transfer transfers[2 * TRANSFERS_EACH_WAY];
    int left = (me + n - 1) % n, right = (me + 1) % n;
    for (int i = 0; i < TRANSFERS_EACH_WAY; i++) {
        transfers[2 * i] = (Transfer){.send = true, .peer = right, .t = tensor_of(F32, me, i + 1)};
        transfers[2 * i + 1] = (Transfer){.send = false, .peer = left, .t = empty(F32, i + 1)};
    }
    comm_wait(comm_transfers(transfers, 2 * TRANSFERS_EACH_WAY, world));
    for (int i = 0; i < TRANSFERS_EACH_WAY; i++) {
        expect_values("one of many", transfers[2 * i + 1].t, 0, left, 0, i + 1);
        for (int j = 0; j < 2; j++) tensor_free(&transfers[2 * i + j].t);
    }
}

// A small sum over two ranks is one exchange: rank 0 provides everything that rank 1 needs when it starts,
// and does nothing more before rank 1 has finished.
static void one_exchange_adds_what_two_ranks_have(void) {
    int two[2] = {0, 1};
    if (!shares_memory()) return;
    Group pair = comm_group("pair", LINE_TP, two, 2);
    const bool before = comm_set_check(true);
    for (int checked = 0; checked < 2 && me < 2; checked++) {
        comm_set_check(checked);
        Tensor t = tensor_of(F32, me, 1024);
        if (me == 1) hear(0);
        Request *sum = comm_all_reduce(t, REDUCE_SUM, pair);
        if (me == 0) tell(1);
        int ended = 0;
        for (double until = wall_seconds() + 5; me == 0 && !ended && wall_seconds() < until; sched_yield())
            MPI_Iprobe(1, 0, MPI_COMM_WORLD, &ended, MPI_STATUS_IGNORE);
        if (me == 0 && !ended) note("rank 1 waits for more than what was given at the start");
        comm_wait(sum);
        if (me == 1) tell(0);
        else hear(1);
        expect_reduced("sum of two", t, REDUCE_SUM, pair, 0);
        tensor_free(&t);
    }
    comm_set_check(before);
}

// Rank 2 has reached rank 0's second call, and rank 1 has not yet reached its first: over NCCL, rank 0 would
// launch the second, and its host might wait there for ranks that wait for the first.
static void a_device_is_given_collectives_as_they_were_started(void) {
    if (n < 3) return;
    Group first = comm_group("first", LINE_TP, (int[]){0, 1}, 2),
          second = comm_group("second", LINE_DP, (int[]){0, 2}, 2);
    const bool before = comm_set_check(true);
    Tensor t[2] = {tensor_of(F32, me, 1009), tensor_of(F32, me, 1009)};
    Request *request[2] = {NULL};
    if (me == 1) hear(0);
    if (me < 2) request[0] = comm_all_reduce(t[0], REDUCE_SUM, first);
    if (me == 0 || me == 2) request[1] = comm_all_reduce(t[1], REDUCE_SUM, second);
    if (me == 0) {
        while (!request[1]->agreed || !(request[1]->launched || transport_launches())) lines_push();
        SAME(request[1]->launched, !transport_launches());
        tell(1);
    }
    comm_wait_all(request, 2);
    if (me < 2) expect_reduced("the first sum", t[0], REDUCE_SUM, first, 0);
    if (me == 0 || me == 2) expect_reduced("the second sum", t[1], REDUCE_SUM, second, 0);
    for (int i = 0; i < 2; i++) tensor_free(&t[i]);
    comm_set_check(before);
}

// The last rank arrives when the others have seen each other's notices and bytes. None of them is in a
// state in which a wrong call of the last one would leave it.
static void nothing_is_used_before_all_agree(void) {
    if (!shares_memory() || n < 3) return;
    int others[n];
    for (int i = 0; i < n; i++) others[i] = i;
    Group early = comm_group("early", LINE_TP, others, n - 1);
    const bool before = comm_set_check(true), last = me == n - 1;
    Tensor in = tensor_of(F32, me, 1), out = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(n));
    tensor_from_doubles(out, (double[8]){0});
    for (int r = 0; r < n - 1 && last; r++) hear(r);
    Request *gather = comm_all_gather(out, in, NULL, world);
    if (!last) {
        comm_wait(comm_barrier(early));
        op_sum(in);  // pushes at its end
        device_open();
        for (int r = 0; r < n - 1; r++)
            if (r != me && ((const float *)tensor_address(out))[r] != 0)
                note("what rank %d gave is used before rank %d has agreed", r, n - 1);
        device_close();
        tell(n - 1);
    }
    comm_wait(gather);
    for (int r = 0; r < n; r++) expect_values("gathered", out, r, r, 0, 1);
    comm_set_check(before);
    tensor_free(&in);
    tensor_free(&out);
}

// Member 0 has started both before any other arrives, and what is meant for all is stored once for all.
static void what_is_for_all_stays_until_all_have_it(void) {
    if (!shares_memory()) return;
    const bool before = comm_set_check(false);
    Tensor t[2] = {tensor_of(F32, me, 1009), tensor_of(F32, me + n, 1009)};
    Request *request[2] = {NULL};
    if (me) MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < 2; i++) request[i] = comm_broadcast(t[i], 0, world);
    if (!me) MPI_Barrier(MPI_COMM_WORLD);
    comm_wait_all(request, 2);
    for (int i = 0; i < 2; i++) {
        expect_values("broadcast", t[i], 0, i * n, 0, 1009);
        tensor_free(&t[i]);
    }
    comm_set_check(before);
}

// Every rank computes, without calling comm, until all have received everything in flight: several times
// what fits into the slots of shared memory, or a window of messages, so that every rank takes part several
// times. If nothing arrives for 20 s, it has stalled.
static void what_is_in_flight_arrives_while_ranks_compute(void) {
    enum { COUNT = 1 << 19, REQUESTS = 2 };
    if (!shares_memory()) return;
    int left = (me + n - 1) % n, right = (me + 1) % n, over = 0;
    Tensor sum = tensor_of(F32, me, COUNT), out = tensor_of(F32, me, COUNT), in = empty(F32, COUNT);
    Tensor other = empty(F32, 1009);
    uint32_t *expected[REQUESTS] = {reduced(F32, REDUCE_SUM, world, 0, COUNT), values(F32, left, 0, COUNT)};
    Request *request[REQUESTS] = {comm_all_reduce(sum, REDUCE_SUM, world),
                                  comm_send_receive(out, right, in, left, world)};
    const uint32_t *got[REQUESTS] = {tensor_address(sum), tensor_address(in)};
    int64_t came[REQUESTS] = {0}, before = 0;  // the first ones of the elements
    MPI_Request all = MPI_REQUEST_NULL;
    MPI_Barrier(MPI_COMM_WORLD);
    clock_reset();
    const double began = wall_seconds();
    for (double until = wall_seconds() + 20; !over && wall_seconds() < until; sched_yield()) {
        op_fill(other, 1);
        device_open();
        for (int i = 0; i < REQUESTS; i++)
            while (came[i] < COUNT && got[i][came[i]] == expected[i][came[i]]) came[i]++;
        device_close();
        if (came[0] + came[1] > before) until = wall_seconds() + 20;
        before = came[0] + came[1];
        if (before < REQUESTS * COUNT) continue;
        if (all == MPI_REQUEST_NULL) MPI_Ibarrier(MPI_COMM_WORLD, &all);
        MPI_Test(&all, &over, MPI_STATUS_IGNORE);
    }
    const double passed = wall_seconds() - began, moving = comm_total().wall_seconds;
    if (moving <= 0 || moving + clock_total().wall_seconds > passed)
        note("in %g s, %g s of messages and %g s of operations are counted", passed, moving,
             clock_total().wall_seconds);
    if (before < REQUESTS * COUNT)
        note("of %d elements %lld were added and %lld sent while the ranks computed", COUNT,
             (long long)came[0], (long long)came[1]);
    comm_wait_all(request, REQUESTS);
    if (!over && all == MPI_REQUEST_NULL) MPI_Ibarrier(MPI_COMM_WORLD, &all);
    MPI_Wait(&all, MPI_STATUS_IGNORE);
    expect_reduced("sum", sum, REDUCE_SUM, world, 0);
    expect_values("from the left", in, 0, left, 0, COUNT);
    Tensor *tensors[] = {&sum, &out, &in, &other};
    for (int i = 0; i < 4; i++) tensor_free(tensors[i]);
    for (int i = 0; i < REQUESTS; i++) free(expected[i]);
}

static const RankTest tests[] = {
    TEST(requests_of_several_groups_stand_open_at_once),
    TEST(groups_keep_their_own_order),
    TEST(requests_on_one_tensor_run_in_order),
    TEST(a_tensor_freed_early_stays_until_the_wait),
    TEST(groups_of_one_take_the_same_road),
    TEST(the_grid_is_numbered_with_tp_fastest),
    TEST(waiting_counts_as_communication),
    TEST(calls_without_checks_send_no_notices),
    TEST(one_machine_needs_no_messages),
    TEST(what_has_come_rings),
    TEST(values_of_all_are_sent_once),
    TEST(many_notices_come_in_order),
    TEST(one_exchange_adds_what_two_ranks_have),
    TEST(a_device_is_given_collectives_as_they_were_started),
    TEST(nothing_is_used_before_all_agree),
    TEST(what_is_for_all_stays_until_all_have_it),
    TEST(what_is_in_flight_arrives_while_ranks_compute),
};

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *pattern = ranks_start(argc, argv, 4);
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
