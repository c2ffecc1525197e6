// collectives.c: what ranks send each other. Playbook: "A0: Parallel Programming Crash Course".
//
// Changes from 00_single_gpu: N programs run, ranks 0 … N - 1, which share nothing but what they send. Each
// example makes a call and shows what every rank holds before and after it. Bytes that all ranks together
// send in it (K: bytes of the whole tensor, k: of the root's part):
//
//     broadcast        one to all               (N - 1) K       reduce        the sum to one    N K - k
//     scatter          a part to each           K - k           gather        all parts to one  K - k
//     reduce-scatter   a part of sums to each   (N - 1) K       all-gather    all parts to each (N - 1) K
//     all-to-all       part i to rank i         (N - 1) K       all-reduce    the sum to each   2 (N - 1) K
//
// (A reduce as done here: every rank sums one piece and sends it to the root. NCCL's chain sends (N - 1) K.)
// Memory per rank: the tensors shown. On 3 ranks the playbook's examples must give the playbook's numbers.
//
// Last, from the playbook's "Pipeline Parallelism", bus bandwidth on 1 to 64 nodes: the bytes that each rank
// sends, over the time. An all-gather or a reduce-scatter goes round a ring once, in time t on m nodes; an
// all-reduce goes round twice and sends twice as much. So all three have the same bus bandwidth:
//
//     (N - 1) / N K / t,   t = (N - m) node latency + (m - 1) network latency + (N - 1) / N K / B
//     B = NVLink; on several nodes at most all network ports of one
// Run: build/01_data_parallel/collectives                 (--ranks 5, --sleep 0.1 …)
// Last line: PASS collectives: every rank holds what each call promises …
#include <math.h>
#include <string.h>
#include <time.h>

#include "data_parallel.h"

#ifndef NO_MAIN

// first, first + step, first + 2 step …
static Tensor series(int64_t count, double first, double step) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(count));
    double x[count + 1];
    for (int64_t i = 0; i < count; i++) x[i] = first + step * (double)i;
    tensor_from_doubles(t, x);
    return t;
}

// For each of n ranks i, counts[i] elements (counts NULL: `each`) with the value first + step i.
static Tensor parts(int n, const int64_t *counts, int64_t each, double first, double step) {
    int64_t total = 0;
    for (int i = 0; i < n; i++) total += counts ? counts[i] : each;
    Tensor t = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(total));
    double x[total + 1], *to = x;
    for (int i = 0; i < n; i++)
        for (int64_t j = 0; j < (counts ? counts[i] : each); j++) *to++ = first + step * i;
    tensor_from_doubles(t, x);
    return t;
}

// ---- the calls ----

enum { ELEMENTS = 5, F32_BYTES = 4 };  // of the playbook's tensors

static void broadcast(Group w) {
    Tensor t = w.rank == 0 ? series(ELEMENTS, 1, 1) : series(ELEMENTS, 0, 0);
    Example e = example_begin("broadcast", "broadcast: what rank 0 holds goes to all", t, w);
    comm_wait(comm_broadcast(t, 0, w));
    example_end(&e, t, series(ELEMENTS, 1, 1), w.rank == 0 ? (w.size - 1) * ELEMENTS * F32_BYTES : 0,
                "1 2 3 4 5 | 1 2 3 4 5 | 1 2 3 4 5");
}

// Each rank sums one piece of ceil(5 / n) elements (comm.h).
static double piece(Group w) {
    int64_t longest_piece = (ELEMENTS + w.size - 1) / w.size, rest = ELEMENTS - w.rank * longest_piece;
    return (double)F32_BYTES * (double)(rest < 0 ? 0 : rest < longest_piece ? rest : longest_piece);
}

static void reduce(Group w, double step, const char *printed) {
    int n = w.size, r = w.rank;
    Tensor t = series(ELEMENTS, r + 1, step * (r + 1));
    Example e =
        example_begin("reduce", "reduce: rank 0 gets the sum, the others keep what they have", t, w);
    comm_wait(comm_reduce(t, REDUCE_SUM, 0, w));
    double sum = n * (n + 1) / 2.0, mine = r == 0 ? sum : r + 1;
    example_end(&e, t, series(ELEMENTS, mine, step * mine), ELEMENTS * F32_BYTES - (r == 0 ? piece(w) : 0),
                printed);
}

static void all_reduce(Group w, ReduceOp op, const char *printed) {
    int n = w.size;
    Tensor t = series(ELEMENTS, w.rank + 1, 0);
    Example e = example_begin(
        "all_reduce", op == REDUCE_SUM ? "all_reduce: all get the sum" : "all_reduce: all get the maximum",
        t, w);
    comm_wait(comm_all_reduce(t, op, w));
    example_end(&e, t, series(ELEMENTS, op == REDUCE_SUM ? n * (n + 1) / 2.0 : n, 0),
                ELEMENTS * F32_BYTES - piece(w) + (n - 1) * piece(w), printed);
}

static void gather(Group w) {
    Tensor t = series(ELEMENTS, w.rank + 1, 0), all = {0}, expected = {0};
    if (w.rank == 0) all = series(w.size * ELEMENTS, 0, 0), expected = parts(w.size, NULL, ELEMENTS, 1, 1);
    Example e = example_begin("gather", "gather: rank 0 gets what each holds, in the order of ranks", t, w);
    comm_wait(comm_gather(all, t, NULL, 0, w));
    tensor_free(&t);
    example_end(&e, all, expected, w.rank == 0 ? 0 : ELEMENTS * F32_BYTES,
                "1 1 1 1 1 2 2 2 2 2 3 3 3 3 3 | |");
}

static void all_gather(Group w) {
    Tensor t = series(ELEMENTS, w.rank + 1, 0), all = series(w.size * ELEMENTS, 0, 0);
    Example e = example_begin("all_gather", "all_gather: all get what each holds", t, w);
    comm_wait(comm_all_gather(all, t, NULL, w));
    tensor_free(&t);
    example_end(
        &e, all, parts(w.size, NULL, ELEMENTS, 1, 1), (w.size - 1) * ELEMENTS * F32_BYTES,
        "1 1 1 1 1 2 2 2 2 2 3 3 3 3 3 | 1 1 1 1 1 2 2 2 2 2 3 3 3 3 3 | 1 1 1 1 1 2 2 2 2 2 3 3 3 3 3");
}

static void scatter(Group w) {
    Tensor t = series(ELEMENTS, 0, 0), all = {0};
    if (w.rank == 0) all = parts(w.size, NULL, ELEMENTS, 1, 1);
    Example e = example_begin("scatter", "scatter: part i of what rank 0 holds goes to rank i", all, w);
    comm_wait(comm_scatter(t, all, NULL, 0, w));
    tensor_free(&all);
    example_end(&e, t, series(ELEMENTS, w.rank + 1, 0),
                w.rank == 0 ? (w.size - 1) * ELEMENTS * F32_BYTES : 0, "1 1 1 1 1 | 2 2 2 2 2 | 3 3 3 3 3");
}

// Rank r's part j is (r + 1, 2 (r + 1)) to the power of j + 1.
static void reduce_scatter(Group w) {
    int n = w.size, power = w.rank + 1;
    double x[2 * n], sum[2] = {0};
    for (int i = 0; i < 2 * n; i++) x[i] = pow((w.rank + 1) * (i % 2 + 1), i / 2 + 1);
    for (int r = 0; r < n; r++)
        for (int i = 0; i < 2; i++) sum[i] += pow((r + 1) * (i + 1), power);
    Tensor in = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(n, 2)),
           out = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(2));
    Tensor expected = tensor_like(MEMORY_ACTIVATION, out);
    tensor_from_doubles(in, x);
    tensor_from_doubles(expected, sum);
    Example e =
        example_begin("reduce_scatter", "reduce_scatter: rank i gets the sum of all parts i", in, w);
    comm_wait(comm_reduce_scatter(out, in, NULL, REDUCE_SUM, w));
    tensor_free(&in);
    example_end(&e, out, expected, (n - 1) * 2 * sizeof(double), "6 12 | 14 56 | 36 288");
}

static void all_to_all(Group w) {
    Tensor in = series(w.size, 10 * w.rank, 1), out = series(w.size, 0, 0);
    Example e =
        example_begin("all_to_all", "all_to_all: part i goes to rank i, the transpose of the table", in, w);
    comm_wait(comm_all_to_all(out, NULL, in, NULL, w));
    tensor_free(&in);
    example_end(&e, out, series(w.size, w.rank, 10), (w.size - 1) * F32_BYTES, NULL);
}

// As with tokens sent to experts, every pair of ranks has its own count, which may be 0.
static int64_t elements_between(int from, int to) { return (2 * from + to + 1) % 3; }

static void all_to_all_v(Group w) {
    int64_t give[w.size], take[w.size], sent = 0;
    for (int i = 0; i < w.size; i++) {
        give[i] = elements_between(w.rank, i);
        take[i] = elements_between(i, w.rank);
        sent += i == w.rank ? 0 : give[i];
    }
    Tensor in = parts(w.size, give, 0, 10 * w.rank, 1), out = parts(w.size, take, 0, 0, 0);
    Example e = example_begin("all_to_all",
                              "all_to_all with unequal parts: 10 r + i goes from rank r to rank i", in, w);
    comm_wait(comm_all_to_all(out, take, in, give, w));
    tensor_free(&in);
    example_end(&e, out, parts(w.size, take, 0, w.rank, 10), (double)sent * F32_BYTES, NULL);
}

// The playbook's sum without a collective: "the first node sends its number to a neighbour which adds its
// number to the received number before forwarding it". The total stays on the last rank; the playbook's takes
// one more hop, to the first.
static void sum_along(Tensor t, Group w) {
    if (w.rank > 0) {
        Tensor received = tensor_like(MEMORY_ACTIVATION, t);
        comm_wait(comm_receive(received, w.rank - 1, w));
        op_accumulate(t, received);
        tensor_free(&received);
    }
    if (w.rank < w.size - 1) comm_wait(comm_send(t, w.rank + 1, w));
}

static void send_and_receive(Group w) {
    Tensor t = series(1, w.rank + 1, 0);
    Example e = example_begin("transfers",
                              "send, receive: each adds what the rank before sends, and sends it on", t, w);
    int64_t before = memory_account().now_total;
    sum_along(t, w);
    int64_t after = memory_account().now_total;
    report_that(after == before, "sum_along leaves %lld B of device memory behind",
                (long long)(after - before));
    example_end(&e, t, series(1, (w.rank + 1) * (w.rank + 2) / 2, 0), w.rank < w.size - 1 ? F32_BYTES : 0,
                NULL);
}

// A send may not end before its receive begins, so if every rank sent first, none would reach its receive.
// Therefore send and receive start together.
static void shift(Group w) {
    int next = (w.rank + 1) % w.size, previous = (w.rank + w.size - 1) % w.size;
    Tensor t = series(3, 10 * w.rank, 1), received = series(3, 0, 0);
    Example e = example_begin("transfers", "send_receive: a shift by one in a ring", t, w);
    comm_wait(comm_send_receive(t, next, received, previous, w));
    tensor_free(&t);
    example_end(&e, received, series(3, 10 * previous, 1), w.size > 1 ? 3 * F32_BYTES : 0, NULL);
}

// With two ranks, next and previous are the same rank: its first send matches the first receive.
static void batch(Group w) {
    int next = (w.rank + 1) % w.size, previous = (w.rank + w.size - 1) % w.size;
    Tensor t = series(1, w.rank, 0), both = series(2, 0, 0),
           expected = series(2, previous, next - previous);
    Transfer transfers[] = {{.send = true, .peer = next, .t = t},
                            {.send = false, .peer = previous, .t = tensor_view(both, 0, SHAPE(1))},
                            {.send = true, .peer = previous, .t = t},
                            {.send = false, .peer = next, .t = tensor_view(both, 1, SHAPE(1))}};
    Example e = example_begin("transfers", "transfers: a batch of four, what both neighbours hold", t, w);
    comm_wait(comm_transfers(transfers, 4, w));
    tensor_free(&t);
    example_end(&e, both, expected, w.size > 1 ? 2 * F32_BYTES : 0, NULL);
}

// Rank r sleeps r times `seconds`. No rank may leave the barrier before the last has entered it.
static void barrier(Group w, double seconds) {
    say("\nbarrier: rank r sleeps r x %g s, then waits for all\n", seconds);
    comm_wait(comm_barrier(w));
    double time[] = {wall_seconds(), 0, 0}, all_times[w.size][3], nap = seconds * w.rank;
    struct timespec rest = {(time_t)nap, (long)(1e9 * (nap - floor(nap)))};
    while (nanosleep(&rest, &rest)) continue;
    clock_reset();
    time[1] = wall_seconds();
    comm_wait(comm_barrier(w));
    time[2] = wall_seconds();
    double sent = comm_sum((double)comm_count("barrier").bytes, w);
    Tensor mine = tensor_new(MEMORY_COMMUNICATION, F64, SHAPE(3));
    Tensor all = tensor_new(MEMORY_COMMUNICATION, F64, SHAPE(w.size, 3));
    tensor_from_doubles(mine, time);
    comm_wait(comm_all_gather(all, mine, NULL, w));
    tensor_to_doubles(all_times[0], all);
    tensor_free(&mine);
    tensor_free(&all);
    double early = 0;
    for (int r = 0; r < w.size; r++) {
        double *t = all_times[r];
        say("  rank %d slept %.4f s, and left the barrier %.4f s after it had begun to sleep\n", r,
            t[1] - t[0], t[2] - t[0]);
        // Only ranks on one host are compared: hosts have no common clock.
        if (!strcmp(comm_host(w.member[r]), comm_host(w.member[w.rank]))) early += !(time[2] >= t[1]);
    }
    early = comm_sum(early, w);
    report_equal("bytes of barrier, all ranks", 0, sent, "B");
    report_that(early == 0, "barrier: in %g cases a rank left before another had entered", early);
}

// ---- bus bandwidth, as nccl-tests defines it ----

// Bytes a second that each of n ranks sends while `call` moves a tensor of so many bytes round a ring.
static double bus_bandwidth(const char *call, double bytes, int n, int per_node) {
    double rounds = strcmp(call, "all_reduce") ? 1 : 2, sent = rounds * (n - 1) / n * bytes;
    return sent / clock_collective_seconds(call, bytes, n, (n + per_node - 1) / per_node, per_node);
}

static void bus_bandwidths(int per_node) {
    static const double sizes[] = {1e6, 25e6, 1e9};  // 25 MB: the default bucket of DDP
    static const char *const calls[] = {"all_reduce", "all_gather", "reduce_scatter"};
    Machine m = clock_reached();
    say("\nBus bandwidth of all-reduce, all-gather and reduce-scatter by the size of the tensor, in GB/s,\n"
        "on the model clock of %s, nodes of %d GPU%s:",
        m.name, per_node, plural(per_node));
    say("  nodes   GPUs %10s %10s %10s", bytes_text(sizes[0]), bytes_text(sizes[1]), bytes_text(sizes[2]));
    for (int nodes = per_node > 1 ? 1 : 2; nodes <= 64; nodes *= 2) {
        int n = nodes * per_node;
        double round = (n - nodes) * m.node_latency + (nodes - 1) * m.network_latency, row[3];
        double ports = per_node * m.network_bytes_per_second, link = m.node_bytes_per_second;
        if (nodes > 1) link = fmin(link, ports);
        for (int i = 0; i < 3; i++) {
            double formula = 1 / (1 / link + n * round / (n - 1) / sizes[i]);
            for (int call = 0; call < 3; call++) {
                row[i] = bus_bandwidth(calls[call], sizes[i], n, per_node);
                report_that(fabs(row[i] - formula) <= 1e-9 * formula,
                            "%s of %g bytes on %d nodes: %.12g bytes/s by the clock, %.12g by the formula",
                            calls[call], sizes[i], nodes, row[i], formula);
            }
        }
        say("  %5d %6d %10.1f %10.1f %10.1f", nodes, n, 1e-9 * row[0], 1e-9 * row[1], 1e-9 * row[2]);
    }
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    double seconds;
    Option own[] = {{"sleep", OPTION_REAL, &seconds, "1", 0, 3600, "s",
                     "before the barrier rank r sleeps r times this long", false}};
    Config config =
        config_parse(argc, argv, "Collective and point-to-point communication, call by call.",
                     CONFIG_REPORT | CONFIG_CLUSTER | CONFIG_TRACE | CONFIG_RANKS, NULL, own, 1);
    comm_start(argc, argv, 3);
    MeshShape shape = {.dp = comm_ranks()};
    Mesh mesh = mesh_new(shape);
    Group world = mesh.world;
    report_json(config.json);
    timeline_start(&config, world);
    mesh_print(&mesh, shape);
    broadcast(world);
    reduce(world, 0, "6 6 6 6 6 | 2 2 2 2 2 | 3 3 3 3 3");
    reduce(world, 1, "6 12 18 24 30 | 2 4 6 8 10 | 3 6 9 12 15");
    all_reduce(world, REDUCE_SUM, "6 6 6 6 6 | 6 6 6 6 6 | 6 6 6 6 6");
    all_reduce(world, REDUCE_MAX, NULL);
    gather(world);
    all_gather(world);
    scatter(world);
    reduce_scatter(world);
    all_to_all(world);
    all_to_all_v(world);
    send_and_receive(world);
    shift(world);
    batch(world);
    barrier(world, seconds);
    bus_bandwidths(config.gpus_per_node ? (int)config.gpus_per_node : clock_machine()->gpus_per_node);
    int64_t left = memory_account().now[MEMORY_ACTIVATION];
    report_that(left == 0, "the calls leave %lld B of device memory behind, expected 0", (long long)left);
    timeline_finish(&config, world);
    report_split(world.size, NULL);
    return comm_finish(report_verdict("every rank holds what each call promises"));
}
#endif
