// test_comm_requests.c [--ranks N] [PATTERN]: many requests at once, of several groups and on one tensor,
// with notices and without, the seconds that they take, and which ranks are in which group. TAP, on all
// ranks at once; comm.t runs it with 1 to 8.
#include "comm/transport.h"
#include "comm_values.h"

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

// Member i of the turned group is rank n - 1 - i; of the halves, ranks of one parity, the last first.
static void groups_keep_their_own_order(void) {
    int turned[n], half[n], count = 0;
    for (int i = 0; i < n; i++) turned[i] = n - 1 - i;
    for (int r = n - 1; r >= 0; r--)
        if (r % 2 == me % 2) half[count++] = r;
    Group groups[] = {comm_group("turned", LINE_WORLD, turned, n),
                      comm_group("half", LINE_WORLD, half, count),
                      comm_group("turned again", LINE_WORLD, turned, n)};
    for (int g = 0; g < 3; g++) {
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
    SAME(mesh.ep.member[0], mesh.dp.member[0]);
    mesh = mesh_new((MeshShape){.dp = 4, .pp = 1, .cp = 2, .tp = 1, .ep = 2});
    SAME(mesh.cp.member[1], me - me % 2 + 1);
    SAME(mesh.ep.member[0], me - me % 2);  // ep is the faster digit of dp x cp
    SAME(mesh.ep.rank, me % 2);
    SAME(mesh.expert_dp.member[1], me % 2 + 2);
}

// Member 0 comes late, and the others wait for it.
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

// A call of each kind that moves bytes, all in flight at once. Returns all that has come here, which is
// `values` numbers.
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
    // With checks one to each other member, or for each transfer.
    SAME(sent[true], (CALLS - 1) * (n - 1) + (n > 1 ? 2 : 0));
    SAME(sent[false], 0);
    if (memcmp(got[true], got[false], sizeof **got * (size_t)values))
        note("calls without checks give other values");
    // A sum on the host is what its notices carry, and a barrier is nothing but notices.
    comm_set_check(false);
    sent[false] = control_sent();
    SAME(comm_sum(me, world), n * (n - 1) / 2);
    comm_wait(comm_barrier(world));
    SAME(control_sent() - sent[false], 2 * (n - 1));
    // The model clock of a dry run is exact in any case.
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

static const RankTest tests[] = {
    TEST(requests_of_several_groups_stand_open_at_once),
    TEST(groups_keep_their_own_order),
    TEST(requests_on_one_tensor_run_in_order),
    TEST(a_tensor_freed_early_stays_until_the_wait),
    TEST(groups_of_one_take_the_same_road),
    TEST(the_grid_is_numbered_with_tp_fastest),
    TEST(waiting_counts_as_communication),
    TEST(calls_without_checks_send_no_notices),
};

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *pattern = ranks_start(argc, argv, 4);
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
