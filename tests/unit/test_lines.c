// test_lines.c [--ranks N] [PATTERN]: communication lines: requests on different lines do not wait for each
// other, on the wire or on the model clock, and two ranks start what they share in the same order. TAP.
// lines.t runs it with several ranks, and its scenarios of wrong use.
#include <math.h>
#include <unistd.h>

#include "ranks.h"
#include "tensor/clock.h"
#include "tensor/ops.h"

// ---- groups of these tests ----

static Group all_on(Line line) {
    int members[n];
    for (int i = 0; i < n; i++) members[i] = i;
    return comm_group(line_name(line), line, members, n);
}

// Two ranks; for others a group of one.
static Group pair_on(Line line, int a, int b) {
    int members[2] = {a < b ? a : b, a < b ? b : a};
    return comm_group(line_name(line), line, members, 2);
}

static Tensor filled(int64_t count, double value) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(count));
    op_fill(t, value);
    return t;
}

static void expect_all(const char *what, Tensor t, double value) {
    float *got = host_alloc((size_t)tensor_bytes(t));
    tensor_to_host(got, t);
    for (int64_t i = 0; i < tensor_count(t); i++)
        if (got[i] != (float)value) {
            note("%s: element %lld is %g, expected %g", what, (long long)i, got[i], value);
            break;
        }
    free(got);
}

// ---- on the wire ----

// Rank 0 waits from the start for what rank 1 sends at the end, and the messages between need rank 0: they
// go from 0 to 2, from 2 to 3, from 3 to 1.
static void a_request_waits_for_its_own_line_alone(void) {
    if (n < 4) return;
    Group back = pair_on(LINE_PP_BACKWARD, 0, 1), first = pair_on(LINE_TP, 0, 2),
          second = pair_on(LINE_CP, 2, 3), third = pair_on(LINE_DP, 1, 3);
    Tensor late = filled(1000, 0), t = filled(70001, 1);
    Request *early = me == 0 ? comm_receive(late, 1, back) : NULL;
    if (me == 0 || me == 2) comm_wait(comm_all_reduce(t, REDUCE_SUM, first));
    if (me == 2 || me == 3) comm_wait(comm_all_reduce(t, REDUCE_SUM, second));
    if (me == 3 || me == 1) comm_wait(comm_all_reduce(t, REDUCE_SUM, third));
    if (me == 1) {
        op_fill(late, 7);
        comm_wait(comm_send(late, 0, back));
    }
    comm_wait_all(&early, 1);
    if (me == 0) expect_all("what rank 1 sent last", late, 7);
    if (me == 1) expect_all("the sum that came to it", t, 4);
    tensor_free(&late);
    tensor_free(&t);
}

// A request on every line at once, each with many segments; then again, waited for in another order.
static void all_lines_move_at_once(void) {
    Group group[COMM_LINES];
    Tensor t[COMM_LINES], in[COMM_LINES];
    Request *request[2 * COMM_LINES];
    const int64_t count = 150001;
    for (int line = 0; line < COMM_LINES; line++) group[line] = all_on((Line)line);
    for (int turn = 0; turn < 3; turn++) {
        for (int line = 0; line < COMM_LINES; line++) {
            t[line] = filled(count, me + line);
            in[line] = filled(count, -1);
            request[line] = comm_all_reduce(t[line], REDUCE_SUM, group[line]);
        }
        for (int line = 0; line < COMM_LINES; line++)
            request[COMM_LINES + line] =
                comm_send_receive(t[line], (me + 1) % n, in[line], (me + n - 1) % n, group[line]);
        for (int i = 0; i < 2 * COMM_LINES; i++) {
            int which = (i * 5 + turn) % (2 * COMM_LINES);
            comm_wait(request[which]);
        }
        for (int line = 0; line < COMM_LINES; line++) {
            double sum = n * (n - 1) / 2 + n * line;
            expect_all("the sum of a line", t[line], sum);
            expect_all("the neighbour's", in[line], sum);
            tensor_free(&t[line]);
            tensor_free(&in[line]);
        }
    }
}

// Forward and backward messages between neighbours in a pipeline, each pair in its own order: the order of
// a stage and the one before it need not match that of the stage and the one after it.
static void neighbours_of_a_pipeline_agree_pair_by_pair(void) {
    if (n < 3) return;
    Group forward = all_on(LINE_PP_FORWARD), backward = all_on(LINE_PP_BACKWARD);
    Tensor activation = filled(5000, me), gradient = filled(5000, 100 + me);
    Tensor from_left = filled(5000, -1), from_right = filled(5000, -1);
    Request *request[4] = {NULL};
    // Even ranks start with their right neighbour, odd ones with their left.
    for (int turn = 0; turn < 2; turn++) {
        bool right = turn == me % 2;
        if (right && me + 1 < n) {
            request[0] = comm_send(activation, me + 1, forward);
            request[1] = comm_receive(from_right, me + 1, backward);
        }
        if (!right && me > 0) {
            request[2] = comm_receive(from_left, me - 1, forward);
            request[3] = comm_send(gradient, me - 1, backward);
        }
    }
    comm_wait_all(request, 4);
    for (int i = 0; i < 4; i++) SAME(request[i] != NULL, 0);
    if (me > 0) expect_all("the activation from the left", from_left, me - 1);
    if (me + 1 < n) expect_all("the gradient from the right", from_right, 100 + me + 1);
    Tensor *all[] = {&activation, &gradient, &from_left, &from_right};
    for (int i = 0; i < 4; i++) tensor_free(all[i]);
}

// A batch starts everything in it at once: the other rank may have its calls separately, in any order.
static void a_batch_fits_any_order_of_its_parts(void) {
    if (n < 2 || me > 1) return;
    Group other = world;
    Tensor a = filled(3000, me), b = filled(3000, 10 + me), c = filled(3000, -1), d = filled(3000, -1);
    int peer = 1 - me;
    for (int turn = 0; turn < 2; turn++) {
        if (me == turn) {
            Transfer batch[] = {{true, peer, a}, {true, peer, b}, {false, peer, c}, {false, peer, d}};
            comm_wait(comm_transfers(batch, 4, other));
        } else {
            comm_wait(comm_receive(c, peer, other));
            comm_wait(comm_send(a, peer, other));
            Transfer rest[] = {{false, peer, d}, {true, peer, b}};
            comm_wait(comm_transfers(rest, 2, other));
        }
        expect_all("the first", c, peer);
        expect_all("the second", d, 10 + peer);
    }
    Tensor *all[] = {&a, &b, &c, &d};
    for (int i = 0; i < 4; i++) tensor_free(all[i]);
}

// Ranks 0 and 1 share two calls, and learn at different times that rank 2 has reached the first: still,
// they launch them in the order in which they were started.
static void launches_keep_the_order_of_the_starts(void) {
    if (n < 3) return;
    Group three = all_on(LINE_TP), two = pair_on(LINE_DP, 0, 1);
    Tensor a = filled(5000, 1), b = filled(5000, 1);
    Request *request[2] = {NULL};
    if (me == 0) usleep(50000);
    if (me >= 2) usleep(150000);
    request[0] = comm_all_reduce(a, REDUCE_SUM, three);
    if (me < 2) request[1] = comm_all_reduce(b, REDUCE_SUM, two);
    if (me == 1) usleep(300000);
    comm_wait_all(request, 2);
    expect_all("the sum of all", a, n);
    expect_all("the sum of two", b, me < 2 ? 2 : 1);
    tensor_free(&a);
    tensor_free(&b);
}

static void many_values_are_added_in_one_call(void) {
    for (int count = 1; count < 40; count += 7) {
        double values[40];
        for (int i = 0; i < count; i++) values[i] = (me + 1) * pow(10, i % 13) / 3;
        clock_reset();
        comm_sum_all(values, count, world);
        for (int i = 0; i < count; i++) {
            double sum = 0;
            for (int r = 0; r < n; r++) sum += (r + 1) * pow(10, i % 13) / 3;
            SAME(values[i], sum);
        }
        int64_t piece = (count + n - 1) / n, k = count - piece * me;
        k = k < 0 ? 0 : k < piece ? k : piece;
        CommCount counted = comm_count("all_reduce");
        SAME(counted.calls, n > 1);
        SAME(counted.bytes, 8 * (count - k + (n - 1) * k));
    }
}

// ---- on the model clock ----

static void compute(double seconds) {
    clock_begin("work", BF16, seconds * 989e12, 0);
    clock_end();
}

static double all_reduce_seconds(int members, int per_node) {
    return clock_collective_seconds("all_reduce", 4e6, members, members / per_node, per_node);
}

// Starts an all-reduce of 1,000,000 f32; the caller waits for it and frees the tensor.
static Request *start_sum(Tensor *t, Group group) {
    *t = filled(1000000, 1);
    return comm_all_reduce(*t, REDUCE_SUM, group);
}

static void expect_near(const char *what, double got, double expected) {
    if (!(fabs(got - expected) <= 1e-12)) note("%s: %.17g s, expected %.17g", what, got, expected);
}

static void two_lines_take_turns_on_one_port(void) {
    Group first = all_on(LINE_DP), second = all_on(LINE_TP);
    clock_set_cluster(n, 1, 1);
    Tensor t[2];
    for (int reversed = 0; reversed < 2; reversed++) {
        comm_wait(comm_barrier(world));
        double cost = all_reduce_seconds(n, n);
        Request *request[2] = {NULL};
        for (int i = 0; i < 2; i++) t[i] = filled(1000000, 1);
        double start = clock_model_now();
        for (int i = 0; i < 2; i++) request[i] = comm_all_reduce(t[i], REDUCE_SUM, i ? second : first);
        comm_wait(request[reversed]);
        expect_near("the request waited for first", clock_model_now() - start, cost * (1 + reversed));
        comm_wait(request[!reversed]);
        expect_near("both, one after the other", clock_model_now() - start, 2 * cost);
        for (int i = 0; i < 2; i++) tensor_free(&t[i]);
    }
}

// Two ranks a node: 0 and 1, 2 and 3. Traffic to the other node does not slow down traffic within a node.
static void different_ports_run_side_by_side(void) {
    if (n != 4) return;
    Mesh mesh = mesh_new((MeshShape){.dp = 2, .tp = 2});
    clock_set_cluster(2, 1, 1);
    comm_wait(comm_barrier(world));
    Tensor near, far;
    near = filled(1000000, 1), far = filled(1000000, 1);
    double start = clock_model_now(), inside = all_reduce_seconds(2, 2), across = all_reduce_seconds(2, 1);
    Request *slow = comm_all_reduce(far, REDUCE_SUM, mesh.dp);
    comm_wait(comm_all_reduce(near, REDUCE_SUM, mesh.tp));
    expect_near("in the node", clock_model_now() - start, inside);
    comm_wait(slow);
    expect_near("across", clock_model_now() - start, across);
    if (!(across > inside)) note("the network is not slower than NVLink");
    tensor_free(&near);
    tensor_free(&far);
    clock_set_cluster(0, 1, 1);
}

// A receive that was started early leaves the port to others until its sender is ready.
static void a_receive_keeps_no_port(void) {
    if (n < 4) return;
    Group back = pair_on(LINE_PP_BACKWARD, 0, 1), sum = pair_on(LINE_TP, 0, 2);
    comm_wait(comm_barrier(world));
    double start = clock_model_now();
    Tensor late = filled(1000, 0), t = {0};
    start = clock_model_now();
    Request *early = me == 0 ? comm_receive(late, 1, back) : NULL;
    if (me == 0 || me == 2) {
        Request *request = start_sum(&t, sum);
        double called = clock_model_now();
        comm_wait(request);
        expect_near("the sum", clock_model_now() - called, all_reduce_seconds(2, 2));
    }
    if (me == 1) {
        compute(1);
        comm_wait(comm_send(late, 0, back));
    }
    comm_wait_all(&early, 1);
    if (me == 0 && !(clock_model_now() > start + 1)) note("the message came before it was sent");
    tensor_free(&late);
    tensor_free(&t);
}

// One process acts as ranks 0 and 2 in turn: each has a clock, lines and ports of its own.
static void acting_as_another_rank(void) {
    if (me > 0) return;
    device_dry_run(true);
    comm_stand_for_all(true);
    const MeshShape shape = {.pp = 2, .dp = 2};
    Mesh first = mesh_standing_for_all(shape, 0), last = mesh_standing_for_all(shape, 2);
    if (first.pp.rank != 0 || last.pp.rank != 1 || last.dp.member[last.dp.rank] != 2)
        note("ranks 0 and 2 are %d and %d of pp", first.pp.rank, last.pp.rank);
    StandIn home = comm_act_as((StandIn){.rank = 0, .now = 1});
    double takes = all_reduce_seconds(2, clock_node(2) == clock_node(3) ? 2 : 1);
    Tensor t = filled(1000000, 1);
    Request *request = comm_all_reduce(t, REDUCE_SUM, first.dp);  // its line and port are busy
    compute(1);
    double here = clock_model_now();
    StandIn zero = comm_act_as((StandIn){.rank = 2, .now = 1});
    expect_near("the clock of rank 2", clock_model_now(), 1);
    comm_wait(comm_all_reduce(t, REDUCE_SUM, last.dp));
    expect_near("what rank 2 waits", clock_model_now() - 1, takes);
    StandIn two = comm_act_as(zero);
    expect_near("the clock of rank 0", clock_model_now(), here);
    comm_wait(request);
    comm_act_as(two);
    expect_near("the clock of rank 2 again", clock_model_now() - 1, takes);
    comm_act_as(home);
    tensor_free(&t);
    mesh_end(&first), mesh_end(&last);
    comm_stand_for_all(false);
    device_dry_run(false);
}

// Rank 0's port is busy with what it shares with 1; so 2 gets what it shares with 0 later.
static void who_waits_for_a_port_keeps_the_others_waiting(void) {
    if (n < 3) return;
    Group first = pair_on(LINE_DP, 0, 1), second = pair_on(LINE_TP, 0, 2);
    Tensor a = filled(1000000, 1), b = filled(1000000, 1);
    clock_set_cluster(n, 1, 1);
    comm_wait(comm_barrier(world));
    double start = clock_model_now(), cost = all_reduce_seconds(2, 2);
    Request *request[2] = {NULL};
    if (me < 2) request[0] = comm_all_reduce(a, REDUCE_SUM, first);
    if (me % 2 == 0 && me < 3) request[1] = comm_all_reduce(b, REDUCE_SUM, second);
    comm_wait_all(&request[1], 1);
    if (me == 2) expect_near("the end that rank 2 sees", clock_model_now() - start, 2 * cost);
    comm_wait_all(request, 2);
    if (me == 1) expect_near("the end that rank 1 sees", clock_model_now() - start, cost);
    tensor_free(&a);
    tensor_free(&b);
}

// Rank 1 is late for what it shares with 0; on the same line, 0 gets to rank 2 only after that.
static void a_line_goes_on_when_its_last_request_has_ended(void) {
    if (n < 3) return;
    Group first = pair_on(LINE_TP, 0, 1), second = pair_on(LINE_TP, 0, 2);
    Tensor a = filled(1000000, 1), b = filled(1000000, 1);
    clock_set_cluster(n, 1, 1);
    comm_wait(comm_barrier(world));
    double start = clock_model_now(), cost = all_reduce_seconds(2, 2);
    if (me == 1) compute(1e-3);
    Request *request[2] = {NULL};
    if (me < 2) request[0] = comm_all_reduce(a, REDUCE_SUM, first);
    if (me % 2 == 0 && me < 3) request[1] = comm_all_reduce(b, REDUCE_SUM, second);
    comm_wait_all(request, 2);
    if (me == 1) expect_near("the late one's end", clock_model_now() - start, 1e-3 + cost);
    if (me == 0 || me == 2) expect_near("the end behind it", clock_model_now() - start, 1e-3 + 2 * cost);
    tensor_free(&a);
    tensor_free(&b);
}

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

static void nap(int seed) {
    uint64_t bits = mix((uint64_t)seed * 977 + (uint64_t)me);
    if (bits % 3) usleep((useconds_t)(bits % 1500));
}

// Requests of several lines in flight, with work between them; the ranks' clocks run apart.
static double a_run(int seed) {
    Group group[COMM_LINES];
    for (int line = 0; line < COMM_LINES; line++) group[line] = all_on((Line)line);
    comm_wait(comm_barrier(world));
    double start = clock_model_now();
    for (int step = 0; step < 4; step++) {
        Tensor t[COMM_LINES], in[COMM_LINES];
        Request *request[COMM_LINES];
        for (int line = 0; line < COMM_LINES; line++) {
            t[line] = filled(1000 * (line + 1), 1);
            in[line] = filled(1000 * (line + 1), 0);
            compute(1e-6 * (double)(mix((uint64_t)(me * 31 + step * 7 + line)) % 30));
            nap(seed + step * 10 + line);
            request[line] = line % 3 == 2 ? comm_send_receive(t[line], (me + 1) % n, in[line],
                                                              (me + n - 1) % n, group[line])
                                          : comm_all_reduce(t[line], REDUCE_SUM, group[line]);
            if (line == 3) comm_wait_all(request, 2);
        }
        for (int i = 0; i < COMM_LINES; i++) {
            int which = (i * 5 + 1) % COMM_LINES;
            nap(seed + step * 10 + i + 500);
            comm_wait_all(&request[which], 1);
        }
        for (int line = 0; line < COMM_LINES; line++) tensor_free(&t[line]), tensor_free(&in[line]);
    }
    return clock_model_now() - start;
}

static void the_clock_of_all_lines_knows_no_load(void) {
    double first = 0;
    for (int turn = 0; turn < 4; turn++) {
        // From whole seconds, so that not even rounding differs.
        clock_model_wait(ceil(comm_max(clock_model_now(), world)) + 1);
        double seconds = a_run(turn * 1000);
        if (turn == 0) first = seconds;
        if (!(fabs(seconds - first) < 1e-12))
            note("run %d took %.17g, the first %.17g", turn, seconds, first);
    }
    if (!(first > 0)) note("no time passed");
}

// ---- scenarios of wrong use, for lines.t ----

static void scenario(const char *name) {
#define IS(text) (!strcmp(name, text))
    Group red = all_on(LINE_TP), blue = all_on(LINE_DP);
    Tensor a = filled(1024, 1), b = filled(2048, 1);
    if (IS("crossed")) {  // MPI would get through
        Request *request[2];
        for (int i = 0; i < 2; i++)
            request[i] = (i == 0) == (me != 2) ? comm_all_reduce(a, REDUCE_SUM, red)
                                               : comm_all_reduce(b, REDUCE_SUM, blue);
        comm_wait_all(request, 2);
    }
    if (IS("crossed-late")) {  // the same, but no rank is blocked when it is detected
        Request *first = me ? comm_all_reduce(b, REDUCE_SUM, blue) : comm_all_reduce(a, REDUCE_SUM, red);
        usleep(300000);
        Request *second = me ? comm_all_reduce(a, REDUCE_SUM, red) : comm_all_reduce(b, REDUCE_SUM, blue);
        comm_wait(second);
        comm_wait(first);
    }
    if (IS("crossed-behind-trusted")) {  // calls that were trusted do not hide errors after them
        comm_set_check(false);
        comm_wait(comm_all_reduce(a, REDUCE_SUM, red));
        comm_wait(comm_all_reduce(b, REDUCE_SUM, blue));
        comm_set_check(true);
    }
    if (IS("crossed-waits") || IS("crossed-behind-trusted")) {
        comm_wait(me % 2 ? comm_all_reduce(a, REDUCE_SUM, red) : comm_all_reduce(b, REDUCE_SUM, blue));
        comm_wait(me % 2 ? comm_all_reduce(b, REDUCE_SUM, blue) : comm_all_reduce(a, REDUCE_SUM, red));
    }
    if (IS("crossed-receives") && me < 2) {
        comm_wait(comm_receive(me ? b : a, 1 - me, me ? red : blue));
        comm_wait(comm_send(me ? a : b, 1 - me, me ? blue : red));
    }
    if (IS("crossed-transfers") && me < 2) {  // of a pipeline that should have received before it sent
        Request *sent = me ? comm_send(b, 0, blue) : comm_send(a, 1, red);
        Request *got = me ? comm_receive(a, 0, red) : comm_receive(b, 1, blue);
        comm_wait(got);
        comm_wait(sent);
    }
    if (IS("crossed-host")) {
        if (me == 1) comm_sum(1, red);
        Request *request = comm_all_reduce(b, REDUCE_SUM, blue);
        if (me != 1) comm_sum(1, red);
        comm_wait(request);
    }
    if (IS("written-while-read")) {
        Request *request = comm_all_gather(filled(1024 * n, 0), a, NULL, blue);
        op_add(a, a, a);
        comm_wait(request);
    }
    if (IS("read-while-written")) {
        Request *request = comm_all_reduce(b, REDUCE_SUM, blue);
        op_copy(a, tensor_view(b, 1000, SHAPE(1024)));
        comm_wait(request);
    }
    if (IS("host-reads")) {
        double values[2048];
        Request *request = comm_all_reduce(b, REDUCE_SUM, blue);
        tensor_to_doubles(values, b);
        comm_wait(request);
    }
    if (IS("host-writes")) {
        float values[1024] = {0};
        Request *request = comm_send_receive(a, (me + 1) % n, filled(1024, 0), (me + n - 1) % n, blue);
        tensor_from_host(a, values);
        comm_wait(request);
    }
    if (IS("two-lines")) {
        Request *request = comm_all_reduce(a, REDUCE_SUM, blue);
        comm_wait(comm_broadcast(a, 0, red));
        comm_wait(request);
    }
    if (IS("root-writes")) {  // a rank that is not the root keeps its tensor
        Request *request = comm_reduce(a, REDUCE_SUM, 1, blue);
        if (me != 1) op_copy(tensor_view(b, 0, SHAPE(1024)), a);
        if (me == 1) op_scale(a, 2);
        comm_wait(request);
    }
    tensor_free(&a);
    tensor_free(&b);
    comm_wait(comm_barrier(world));
}

// ---- calls that do not collide ----

static void other_ranges_and_shared_reads_are_free(void) {
    Group blue = all_on(LINE_DP), red = all_on(LINE_TP);
    Tensor flat = filled(3000, 1), out = filled(1000 * n, 0), other = filled(1000 * n, 0);
    Tensor first = tensor_view(flat, 0, SHAPE(1000)), second = tensor_view(flat, 1000, SHAPE(1000));
    Request *sum = comm_all_reduce(first, REDUCE_SUM, blue);
    op_scale(second, 3);                                         // another bucket of the gradient
    Request *gather = comm_all_gather(out, second, NULL, blue);  // reads it
    Request *again = comm_all_gather(other, second, NULL, red);  // so may another line
    op_copy(tensor_view(flat, 2000, SHAPE(1000)), second);       // and an operation
    comm_wait(sum);
    op_scale(first, 2);  // finished: it may be changed again
    comm_wait(gather);
    comm_wait(again);
    op_scale(second, 2);
    expect_all("the sum", first, 2 * n);
    expect_all("the second bucket", second, 6);
    expect_all("the third", tensor_view(flat, 2000, SHAPE(1000)), 3);
    expect_all("what was gathered", out, 3);
    expect_all("what was gathered again", other, 3);
    tensor_free(&flat);
    tensor_free(&out);
    tensor_free(&other);
}

static const RankTest tests[] = {
    TEST(a_request_waits_for_its_own_line_alone),
    TEST(all_lines_move_at_once),
    TEST(neighbours_of_a_pipeline_agree_pair_by_pair),
    TEST(a_batch_fits_any_order_of_its_parts),
    TEST(launches_keep_the_order_of_the_starts),
    TEST(many_values_are_added_in_one_call),
    TEST(two_lines_take_turns_on_one_port),
    TEST(different_ports_run_side_by_side),
    TEST(a_receive_keeps_no_port),
    TEST(acting_as_another_rank),
    TEST(who_waits_for_a_port_keeps_the_others_waiting),
    TEST(a_line_goes_on_when_its_last_request_has_ended),
    TEST(the_clock_of_all_lines_knows_no_load),
    TEST(other_ranges_and_shared_reads_are_free),
};

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *wrong = NULL;
    for (int i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], "--scenario")) wrong = argv[i + 1];
    const char *pattern = ranks_start(argc, argv, 4);
    if (wrong) {
        scenario(wrong);
        return comm_finish(0);
    }
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
