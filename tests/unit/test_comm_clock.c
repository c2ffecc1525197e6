// test_comm_clock.c [--ranks N] [PATTERN]: the counts of calls, and their time on the model clock. TAP, on
// all ranks at once; comm.t runs it with 1 to 8. --scenario clock makes one run, and prints how long it
// took.
#include "comm_values.h"

// ---- counts ----

static CommCount count_of(const char *name) {
    const CommCount *counts;
    int kinds = comm_counts(&counts);
    for (int i = 0; i < kinds; i++)
        if (!strcmp(counts[i].name, name)) return counts[i];
    note("nothing counts %s", name);
    return (CommCount){0};
}

// Calls and bytes of one kind since the last clock_reset; a single rank makes no calls.
static void expect_count(const char *name, int64_t calls, int64_t bytes) {
    CommCount count = count_of(name);
    if (n == 1) calls = 0;
    if (count.calls != calls || count.bytes != bytes)
        note("%s: %lld calls and %lld bytes, expected %lld and %lld", name, (long long)count.calls,
             (long long)count.bytes, (long long)calls, (long long)bytes);
}

static void bytes_are_those_of_the_formulas(void) {
    const int64_t count = 1009 * 3;
    int64_t piece = (count + n - 1) / n, k = count - piece * me;
    k = 4 * (k < 0 ? 0 : k < piece ? k : piece);
    int64_t counts[n], total = parts(counts, 1009), K = 4 * count;
    int root = n - 1;
    clock_reset();
    Tensor t = tensor_of(F32, me, count), whole = tensor_of(F32, me, total),
           part = tensor_of(F32, me, counts[me]);
    comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    expect_count("all_reduce", 1, K - k + (n - 1) * k);
    comm_wait(comm_reduce(t, REDUCE_SUM, root, world));
    expect_count("reduce", 1, K - k + (me == root ? 0 : k));
    comm_wait(comm_reduce_scatter(part, whole, counts, REDUCE_SUM, world));
    expect_count("reduce_scatter", 1, 4 * (total - counts[me]));
    comm_wait(comm_all_gather(whole, part, counts, world));
    expect_count("all_gather", 1, 4 * (n - 1) * counts[me]);
    comm_wait(comm_gather(whole, part, counts, root, world));
    expect_count("gather", 1, me == root ? 0 : 4 * counts[me]);
    comm_wait(comm_scatter(part, whole, counts, root, world));
    expect_count("scatter", 1, me == root ? 4 * (total - counts[me]) : 0);
    comm_wait(comm_broadcast(t, root, world));
    expect_count("broadcast", 1, me == root ? (n - 1) * K : 0);
    Tensor all = tensor_of(F32, me, 50 * n), all_out = empty(F32, 50 * n);
    comm_wait(comm_all_to_all(all_out, NULL, all, NULL, world));
    expect_count("all_to_all", 1, 4 * 50 * (n - 1));
    comm_wait(comm_barrier(world));
    expect_count("barrier", 1, 0);
    comm_wait(comm_send_receive(all, (me + 1) % n, all_out, (me + n - 1) % n, world));
    expect_count("transfers", 1, n > 1 ? 4 * 50 * n : 0);
    comm_sum(1, world);
    expect_count("all_reduce", 2, K - k + (n - 1) * k + (n == 1 ? 0 : me == 0 ? 8 * (n - 1) : 8));
    SAME(comm_total().calls, n > 1 ? 11 : 0);
    // In total an all-reduce sends 2 (n - 1) K: the sum of its formula over ranks.
    clock_reset();
    SAME(comm_total().calls, 0);
    comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    double sent = (double)count_of("all_reduce").bytes;
    SAME(comm_sum(sent, world), 2.0 * (n - 1) * (double)K);
    Tensor *tensors[] = {&t, &whole, &part, &all, &all_out};
    for (int i = 0; i < 5; i++) tensor_free(tensors[i]);
}

// What a call has sent to ranks of other nodes since the last clock_reset.
static int64_t expect_across(const char *name, Group group, int per_node, int64_t bytes) {
    int64_t across = count_of(name).across;
    if (across != bytes)
        note("%s in group %s, nodes of %d: %lld bytes to other nodes, expected %lld", name, group.name,
             per_node, (long long)across, (long long)bytes);
    return bytes;
}

// far: members in other nodes; far_parts: elements of their parts.
static void expect_all_across(Group group, int per_node) {
    enum { COUNT = 1009 * 3 + 1, OWN = 7 };
    const int size = group.size, mine = group.rank, root = size - 1;
    int64_t counts[size], far = 0, far_parts = 0, far_pieces = 0, far_gifts = 0, all = 0;
    int64_t gives[size], takes[size], piece = (COUNT + size - 1) / size, pieces[size];
    const int64_t total = parts(counts, 1009);
    bool apart[size];  // from me
    for (int i = 0; i < size; i++) {
        int64_t rest = COUNT - piece * i;
        pieces[i] = rest < 0 ? 0 : rest < piece ? rest : piece;
        gives[i] = OWN + 10 * mine + i, takes[i] = OWN + 10 * i + mine;
        apart[i] = group.member[i] / per_node != me / per_node;
        far += apart[i];
        far_parts += apart[i] ? counts[i] : 0;
        far_pieces += apart[i] ? pieces[i] : 0;
        far_gifts += apart[i] ? gives[i] : 0;
    }
    Tensor t = tensor_of(F32, me, COUNT), whole = tensor_of(F32, me, total),
           part = tensor_of(F32, me, counts[mine]), in = tensor_of(F32, me, offset_of(gives, size)),
           out = empty(F32, offset_of(takes, size)), sent = tensor_of(F32, me, OWN + mine),
           come = empty(F32, OWN + (mine + size - 1) % size);
    clock_reset();
    comm_wait(comm_all_reduce(t, REDUCE_SUM, group));
    all += expect_across("all_reduce", group, per_node, 4 * (far_pieces + far * pieces[mine]));
    comm_wait(comm_reduce(t, REDUCE_SUM, root, group));
    all += expect_across("reduce", group, per_node, 4 * (far_pieces + apart[root] * pieces[mine]));
    comm_wait(comm_reduce_scatter(part, whole, counts, REDUCE_SUM, group));
    all += expect_across("reduce_scatter", group, per_node, 4 * far_parts);
    comm_wait(comm_all_gather(whole, part, counts, group));
    all += expect_across("all_gather", group, per_node, 4 * far * counts[mine]);
    comm_wait(comm_gather(whole, part, counts, root, group));
    all += expect_across("gather", group, per_node, 4 * apart[root] * counts[mine]);
    comm_wait(comm_scatter(part, whole, counts, root, group));
    all += expect_across("scatter", group, per_node, mine == root ? 4 * far_parts : 0);
    comm_wait(comm_broadcast(t, root, group));
    all += expect_across("broadcast", group, per_node, mine == root ? 4 * far * COUNT : 0);
    comm_wait(comm_all_to_all(out, takes, in, gives, group));
    all += expect_across("all_to_all", group, per_node, 4 * far_gifts);
    comm_wait(comm_barrier(group));
    all += expect_across("barrier", group, per_node, 0);
    int next = (mine + 1) % size, last = (mine + size - 1) % size;
    comm_wait(comm_send_receive(sent, next, come, last, group));
    all += expect_across("transfers", group, per_node, 4 * apart[next] * (OWN + mine));
    SAME(comm_total().across, all);
    // The one number is member 0's piece: each gives it its own, and gets the sum.
    clock_reset();
    comm_sum(1, group);
    expect_across("all_reduce", group, per_node, 8 * (mine == 0 ? far : apart[0]));
    Tensor *tensors[] = {&t, &whole, &part, &in, &out, &sent, &come};
    for (int i = 0; i < 7; i++) tensor_free(tensors[i]);
}

static void bytes_across_go_to_other_nodes(void) {
    int turned[n];
    for (int i = 0; i < n; i++) turned[i] = n - 1 - i;
    Group groups[] = {world, comm_group("turned", LINE_WORLD, turned, n)};
    for (int per_node = 1; per_node <= 4; per_node++) {
        clock_set_cluster(per_node, 1, 1);
        for (int i = 0; i < 2; i++) expect_all_across(groups[i], per_node);
    }
    clock_set_cluster(0, 1, 1);
    comm_wait(comm_barrier(world));
}

// ---- the model clock ----

// An operation of this many seconds on the compute stream of an H100.
static void compute(double seconds) {
    clock_begin("work", BF16, seconds * 989e12, 0);
    clock_end();
}

static void collectives_start_when_the_last_is_ready(void) {
    for (int turn = 0; turn < 3; turn++) {
        nap(turn);
        comm_wait(comm_barrier(world));  // sets all clocks to the same time
        double zero = comm_max(clock_model_now(), world);
        zero = clock_model_now();
        SAME(zero, comm_max(zero, world));
        zero = clock_model_now();
        Tensor t = tensor_of(F32, me, 1 << 18);
        compute(1e-3 * (me + 1));
        double last = comm_rank() == n - 1 ? clock_model_now() : 0,
               cost = clock_collective_seconds("all_reduce", 4 << 18, n, n < 8 ? 1 : n / 8, n < 8 ? n : 8);
        double mine = clock_model_now();
        clock_reset();
        Request *request = comm_all_reduce(t, REDUCE_SUM, world);
        nap(turn + 5);
        compute(0.5e-3);
        double before = clock_model_now();
        comm_wait(request);
        double end = clock_model_now();
        // The last rank's compute stream reached its call at `last`.
        last = comm_max(last, world);
        double expected = last + cost > before ? last + cost : before;
        SAME(end, expected);
        CommCount count = count_of("all_reduce");
        double exposed = expected > before ? expected - before : 0;
        if (!(fabs(count.exposed_seconds - (clock_model_now() - end) - exposed) < 1e-12))
            note("%.17g s are exposed, expected %.17g", count.exposed_seconds, exposed);
        if (mine > before) note("the clock ran back");
        tensor_free(&t);
    }
}

static void requests_queue_on_the_communication_stream(void) {
    comm_wait(comm_barrier(world));
    double zero = clock_model_now(), cost = clock_collective_seconds("all_reduce", 4000, n, 1, n);
    Tensor t[4];
    Request *request[4];
    for (int i = 0; i < 4; i++)
        request[i] = comm_all_reduce(t[i] = tensor_of(F32, me, 1000), REDUCE_SUM, world);
    double end = zero;
    for (int i = 0; i < 4; i++) {
        comm_wait(request[i]);
        end += cost;
        SAME(clock_model_now(), end);
        tensor_free(&t[i]);
    }
}

// A run that uses everything, with sleeps by `seed`: returns its model time.
static double a_run(int seed) {
    Mesh mesh = mesh_new(a_grid());
    comm_wait(comm_barrier(world));
    double zero = clock_model_now();
    Tensor big = tensor_of(F32, me, 100003), small = tensor_of(BF16, me, 1009), in = empty(BF16, 1009);
    Tensor other = tensor_of(BF16, me, 1009);
    for (int step = 0; step < 5; step++) {
        compute(1e-6 * (double)(mix((uint64_t)(me * 31 + step)) % 100));
        nap(seed + step);
        Request *a = comm_all_reduce(big, REDUCE_SUM, mesh.dp);
        compute(1e-6 * (double)(mix((uint64_t)(me * 57 + step)) % 50));
        nap(seed + step + 30);
        Request *b = comm_send_receive(small, (mesh.dp.rank + 1) % mesh.dp.size, in,
                                       (mesh.dp.rank + mesh.dp.size - 1) % mesh.dp.size, mesh.dp);
        Request *c = comm_broadcast(other, 0, mesh.tp);
        comm_wait(c);
        comm_wait(a);
        nap(seed + step + 60);
        comm_wait(b);
        comm_sum(1, world);
    }
    tensor_free(&big);
    tensor_free(&small);
    tensor_free(&other);
    tensor_free(&in);
    return clock_model_now() - zero;
}

static void the_model_clock_knows_no_load(void) {
    double wall[4], first = 0;
    for (int turn = 0; turn < 4; turn++) {
        // From the same starting time, so that not even rounding differs.
        clock_model_wait(turn + 1 > clock_model_now() ? turn + 1 : clock_model_now());
        wall[turn] = a_run(turn * 1000);
        if (turn == 0) first = wall[0];
        if (!(fabs(wall[turn] - first) < 1e-12))
            note("run %d took %.17g, the first %.17g", turn, wall[turn], first);
    }
    if (!(first > 0)) note("no time passed");
}

static void expect_near(const char *what, double got, double expected) {
    if (!(fabs(got - expected) <= 1e-14 * expected))
        note("%s: %.17g s, expected %.17g", what, got, expected);
}

// The same, of a difference of two times, which is rounded.
static void expect_within(const char *what, double got, double expected) {
    if (!(fabs(got - expected) <= 1e-9 * expected))
        note("%s: %.17g s, expected %.17g", what, got, expected);
}

static void costs_follow_their_formulas(void) {
    const double K = 1e9, near = 3.4e-6, far = 9.6e-6;
    expect_near("all-reduce in a node", clock_collective_seconds("all_reduce", K, 8, 1, 8),
                14 * near + 2 * 7 * K / 8 / 450e9);
    expect_near("reduce-scatter in a node", clock_collective_seconds("reduce_scatter", K, 8, 1, 8),
                7 * near + 7 * K / 8 / 450e9);
    // Two nodes of 8 have 8 ports each: 400 GB/s are less than NVLink's 450.
    expect_near("all-gather across nodes", clock_collective_seconds("all_gather", K, 16, 2, 8),
                14 * near + far + 15 * K / 16 / 400e9);
    // One member a node: one port.
    expect_near("all-reduce, one member a node", clock_collective_seconds("all_reduce", K, 4, 4, 1),
                6 * far + 2 * 3 * K / 4 / 50e9);
    expect_near("broadcast", clock_collective_seconds("broadcast", K, 8, 1, 8), 7 * near + K / 450e9);
    expect_near("barrier", clock_collective_seconds("barrier", 0, 8, 1, 8), 14 * near);
    // In an all-to-all each GPU's own port carries what leaves the node.
    expect_near("all-to-all across nodes", clock_collective_seconds("all_to_all", K, 16, 2, 8),
                7 * near + 8 * far + 8 * K / 16 / 50e9);
    expect_near("all-to-all in a node", clock_collective_seconds("all_to_all", K, 8, 1, 8),
                7 * near + 7 * K / 8 / 450e9);
    expect_near("transfers in a node", clock_transfers_seconds((Traffic){2, K, 2 * K}, (Traffic){0}),
                near + 2 * K / 450e9);
    expect_near("transfers across", clock_transfers_seconds((Traffic){1, K, 0}, (Traffic){1, 0, K}),
                far + K / 50e9);
    SAME(clock_collective_seconds("all_reduce", K, 1, 1, 1), 0);
    clock_set_machine(machine_find("dgx-a100"));
    expect_near("A100", clock_collective_seconds("all_gather", K, 16, 2, 8),
                14 * near + far + 15 * K / 16 / 200e9);
    clock_set_cluster(4, 0.5, 0.8);
    expect_near("at 80 %", clock_collective_seconds("reduce", K, 4, 1, 4), 3 * near + K / 240e9);
    SAME(clock_node(7), 1);
    double now = clock_model_now();
    clock_begin("work", BF16, 312e12, 0);
    clock_end();
    expect_near("compute at 50 %", clock_model_now() - now, 2 + 0 * now);
    clock_set_machine(machine_find("dgx-h100"));
    clock_set_cluster(0, 1, 1);
    comm_wait(comm_barrier(world));
}

// Seconds that a call of the world takes.
static double seconds_of(Request *request) {
    double called = clock_model_now();
    comm_wait(request);
    return clock_model_now() - called;
}

// All ranks but the last are on one node: two nodes, whatever the number of ranks, and one member on the one
// with the fewest. A root counts the members beside it.
static void nodes_may_be_uneven(void) {
    if (n < 3) return;
    const double near = 3.4e-6, far = 9.6e-6, K = 4.0 * n * 1000, round = (n - 2) * near + far;
    Tensor all = tensor_of(F32, me, n * 1000), mine = tensor_of(F32, me, 1000);
    clock_set_nodes(n - 1);
    comm_wait(comm_barrier(world));
    expect_within("all-reduce", seconds_of(comm_all_reduce(all, REDUCE_SUM, world)),
                  2 * round + 2 * (n - 1) * (K / n / 50e9));
    expect_within("all-gather", seconds_of(comm_all_gather(all, mine, NULL, world)),
                  round + (n - 1) * (K / n / 50e9));
    expect_within("gather in the larger node", seconds_of(comm_gather(all, mine, NULL, 0, world)),
                  round + fmax((n - 2) * K / n / 450e9, K / n / 50e9));
    expect_within("scatter from the smaller node", seconds_of(comm_scatter(mine, all, NULL, n - 1, world)),
                  (n - 1) * far + (n - 1) * K / n / 50e9);
    clock_set_nodes(0);
    comm_wait(comm_barrier(world));
    tensor_free(&all);
    tensor_free(&mine);
}

// To the last bit: else a call that follows a step may seem to begin before the step ended.
static void a_trace_says_when_a_call_began(void) {
    comm_wait(comm_barrier(world));  // sets all clocks to the same time
    clock_trace_start();
    for (int i = 1; i <= 100; i++) {
        compute(1e-6 / i);
        double now = clock_model_now();
        comm_sum(1, world);
        const Event *event;
        int64_t last = clock_events(&event) - 1;
        SAME(event[last].model, now);
    }
}

static const RankTest tests[] = {
    TEST(bytes_are_those_of_the_formulas),
    TEST(bytes_across_go_to_other_nodes),
    TEST(collectives_start_when_the_last_is_ready),
    TEST(requests_queue_on_the_communication_stream),
    TEST(the_model_clock_knows_no_load),
    TEST(costs_follow_their_formulas),
    TEST(nodes_may_be_uneven),
    TEST(a_trace_says_when_a_call_began),
};

int main(int argc, char **argv) {
    base_start(argc, argv);
    bool one_run = false;
    for (int i = 1; i < argc; i++) one_run |= !strcmp(argv[i], "--scenario");
    const char *pattern = ranks_start(argc, argv, 4);
    if (!one_run) return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
    double seconds = a_run(1);
    say("model clock %.17g s, %lld bytes", comm_max(seconds, world), (long long)comm_total().bytes);
    return comm_finish(0);
}
