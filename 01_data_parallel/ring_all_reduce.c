// ring_all_reduce.c: all-reduce built from sends to a neighbour. Playbook: "A quick focus on Ring AllReduce".
//
// One algorithm for comm_all_reduce, which ddp_*.c call as a black box, built only from sends. N ranks form
// a ring and split a tensor of K bytes into N chunks. In each step rank r sends a chunk to rank r + 1 and
// receives one from rank r - 1:
//
//     reduce-scatter, step s = 0 … N - 2   send chunk r - 1 - s,  receive chunk r - 2 - s and add to it
//     all-gather, step s = 0 … N - 2       send chunk r - s,      receive chunk r - 1 - s    (all modulo N)
//
// So chunk i starts at rank i + 1, is complete when it reaches rank i, and goes round once more. Its sum is
// x(i+1) + x(i+2) + … + x(i): not in rank order, hence reassociated compared with comm_all_reduce.
//
// Bytes sent per rank: K - k(r), then K - k(r+1), where chunk i has k(i) bytes: 2 (N - 1) / N K on average
// for every K. Memory per rank: one more chunk. Time: 2 (N - 1) (alpha + K / (N B)) with latency alpha and
// bandwidth B per link. All to one rank and back: 2 (alpha + (N - 1) K / B): 2 steps and as many bytes
// in all, but each of them through one rank's port, one way at a time: with large K, N times as long.
// Run: build/01_data_parallel/ring_all_reduce  (--ranks 5, --elements 3, --dtype bf16, --gpus-per-node 2)
// Last line: PASS ring_all_reduce: sums go round a ring in 2 (N - 1) steps …
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data_parallel.h"
#include "tensor/rng.h"

// ---- the technique ----

// Chunk i modulo n: the first count % n chunks have one more element; with too few elements some are empty.
Tensor ring_chunk(Tensor t, int i, Group ring) {
    int64_t n = ring.size, least = tensor_count(t) / n, longer = tensor_count(t) % n;
    i = (i % ring.size + ring.size) % ring.size;
    return tensor_view(t, i * least + (i < longer ? i : longer), SHAPE(least + (i < longer)));
}

static void to_the_next(Tensor send, Tensor receive, Group ring) {
    int next = (ring.rank + 1) % ring.size, previous = (ring.rank + ring.size - 1) % ring.size;
    comm_wait(comm_send_receive(send, next, receive, previous, ring));
}

static void reduce_scatter_step(Tensor t, Tensor room, int step, Group ring) {
    int r = ring.rank;
    Tensor sum = ring_chunk(t, r - 2 - step, ring);
    Tensor received = tensor_view(room, 0, SHAPE(tensor_count(sum)));
    to_the_next(ring_chunk(t, r - 1 - step, ring), received, ring);
    op_accumulate(sum, received);
}

static void all_gather_step(Tensor t, int step, Group ring) {
    int r = ring.rank;
    to_the_next(ring_chunk(t, r - step, ring), ring_chunk(t, r - 1 - step, ring), ring);
}

// Room for the longest chunk: a received chunk must not overwrite the one to which it will be added.
static Tensor room_for_a_chunk(Tensor t, Group ring) {
    return tensor_new(MEMORY_COMMUNICATION, t.dtype, SHAPE(tensor_count(ring_chunk(t, 0, ring))));
}

void ring_reduce_scatter(Tensor t, Group ring) {
    Tensor room = room_for_a_chunk(t, ring);
    for (int step = 0; step < ring.size - 1; step++) reduce_scatter_step(t, room, step, ring);
    tensor_free(&room);
}

void ring_all_gather(Tensor t, Group ring) {
    for (int step = 0; step < ring.size - 1; step++) all_gather_step(t, step, ring);
}

void ring_all_reduce(Tensor t, Group ring) {
    ring_reduce_scatter(t, ring);
    ring_all_gather(t, ring);
}

#ifndef NO_MAIN

// The alternative to compare with: all send to rank 0, which adds, and sends the sum to all.
static void root_all_reduce(Tensor t, Group group) {
    bool root = group.rank == 0;
    int count = root ? group.size - 1 : 1;
    Transfer batch[group.size];
    memset(batch, 0, sizeof batch);
    for (int i = 0; i < count; i++)
        batch[i] = (Transfer){
            .send = !root, .peer = root ? i + 1 : 0, .t = root ? tensor_like(MEMORY_COMMUNICATION, t) : t};
    comm_wait(comm_transfers(batch, count, group));
    for (int i = 0; i < count; i++) {
        if (root) op_accumulate(t, batch[i].t);
        if (root) tensor_free(&batch[i].t);
        batch[i] = (Transfer){.send = root, .peer = batch[i].peer, .t = t};
    }
    comm_wait(comm_transfers(batch, count, group));
}

static void library_all_reduce(Tensor t, Group group) { comm_wait(comm_all_reduce(t, REDUCE_SUM, group)); }

// ---- the picture: who holds what after each step ----

enum { MOST_IN_A_PICTURE = 5, MOST_BITS = 52 };

// The ranks whose numbers are in chunk c of rank r after so many steps, as bits.
static double expected_set(int r, int c, int steps, int n) {
    int place = (r - c - 1 + n) % n;  // on the chunk's way, which begins at rank c + 1 and ends at c
    int gathers = steps - (n - 1);
    if (gathers >= 0 && (place + 1) % n <= gathers) return ldexp(1, n) - 1;
    if (place > steps) return ldexp(1, r);
    double sum = 0;
    for (int i = 0; i <= place; i++) sum += ldexp(1, (c + 1 + i) % n);
    return sum;
}

// Rank 0 gathers one element per chunk from each rank. A set is shown in the order in which it was added.
static void show_step(const char *title, Tensor t, Group ring) {
    int n = ring.size;
    Tensor all = ring.rank == 0 ? tensor_new(MEMORY_COMMUNICATION, t.dtype, SHAPE(n, n)) : (Tensor){0};
    comm_wait(comm_gather(all, t, NULL, 0, ring));
    if (ring.rank) return;
    double held[n * n];
    tensor_to_doubles(held, all);
    tensor_free(&all);
    for (int r = 0; r < n; r++) {
        char row[MOST_IN_A_PICTURE * (MOST_IN_A_PICTURE + 2)], *to = row;
        for (int c = 0; c < n; c++, to += n + 2) {
            memset(to, ' ', (size_t)n + 2);
            for (int i = 1, used = 0; i <= n; i++)
                if ((int64_t)held[r * n + c] >> (c + i) % n & 1) to[used++] = (char)('0' + (c + i) % n);
        }
        while (to[-1] == ' ') to--;
        say("  %-18s rank %d   %.*s\n", r ? "" : title, r, (int)(to - row), row);
    }
}

// Rank r adds 2^r to each of n chunks, so that a number says which ranks it sums.
static void prove_steps(Group ring) {
    int n = ring.size, wrong = 0;
    bool draw = n <= MOST_IN_A_PICTURE;
    if (n > MOST_BITS) return;
    Tensor t = tensor_new(MEMORY_GRADIENT, F64, SHAPE(n)), room = room_for_a_chunk(t, ring);
    op_fill(t, ldexp(1, ring.rank));
    if (draw)
        say("\nThe ranks whose numbers each of %d chunk%s sums, in the order of the sum:\n", n, plural(n));
    for (int steps = 0; steps <= 2 * (n - 1); steps++) {
        int gathers = steps - (n - 1);
        if (gathers > 0) all_gather_step(t, gathers - 1, ring);
        else if (steps > 0) reduce_scatter_step(t, room, steps - 1, ring);
        double held[n];
        tensor_to_doubles(held, t);
        for (int c = 0; c < n; c++) wrong += held[c] != expected_set(ring.rank, c, steps, n);
        char *title = steps == 0    ? format_text("start")
                      : gathers > 0 ? format_text("all-gather %d", gathers)
                                    : format_text("reduce-scatter %d", steps);
        if (draw) show_step(title, t, ring);
        free(title);
    }
    report_equal("chunks with another sum, all steps", 0, comm_sum(wrong, ring), "chunks");
    tensor_free(&room);
    tensor_free(&t);
}

// ---- the proof: sums and bytes ----

// A sum of n numbers x, in any order and rounded to nearest with error u, is off by at most u (n - 1) /
// (1 - u (n - 1)) of the sum of |x| (Higham 2002, section 4.2). Ring and library may differ by twice that.
static double reassociation_bound(int n, DType dtype) {
    // 16-bit types are added in f32, and then rounded.
    double u = dtype == F64 ? 0x1p-53 : 0x1p-24 + (dtype == BF16 ? 0x1p-8 : dtype == F16 ? 0x1p-11 : 0);
    u *= n - 1;
    return u < 1 ? 2 * u / (1 - u) : INFINITY;
}

// Integers whose sums stay within 256, which every dtype holds exactly; or normal random numbers.
static Tensor numbers(int64_t count, DType dtype, Group ring, bool integers) {
    int64_t most = 256 / ring.size < 14 ? 256 / ring.size : 14;
    Tensor t = tensor_new(MEMORY_GRADIENT, dtype, SHAPE(count));
    double *x = host_alloc((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++)
        x[i] = integers ? (double)((31 * i + 17 * ring.rank) % (2 * most + 1) - most)
                        : rng_normal(1, RNG_TEST, (uint64_t)(i * ring.size + ring.rank));
    tensor_from_doubles(t, x);
    free(x);
    return t;
}

static double *host_copy(Tensor t) {
    double *x = host_alloc((size_t)tensor_count(t) * sizeof *x);
    tensor_to_doubles(x, t);
    return x;
}

// The largest |a - b| on any rank, relative to `scale` unless NULL.
static double largest_error(Tensor a, Tensor b, const double *scale, Group ring) {
    double *x = host_copy(a), *y = host_copy(b), worst = 0;
    for (int64_t i = 0; i < tensor_count(a) && !isnan(worst); i++) {
        double error = fabs(x[i] - y[i]);
        if (error != 0 && scale) error /= scale[i];
        if (!(error <= worst)) worst = error;
    }
    free(x);
    free(y);
    return comm_max(worst, ring);
}

// For each element, the sum over ranks of |x|.
static double *sum_of_sizes(Tensor t, Group ring) {
    double *x = host_copy(t);
    for (int64_t i = 0; i < tensor_count(t); i++) x[i] = fabs(x[i]);
    Tensor sizes = tensor_new(MEMORY_GRADIENT, F64, SHAPE(tensor_count(t)));
    tensor_from_doubles(sizes, x);
    library_all_reduce(sizes, ring);
    tensor_to_doubles(x, sizes);
    tensor_free(&sizes);
    return x;
}

// Runs one half or the whole. This rank must send `formula` bytes, and all ranks together `total`.
static void prove_bytes(const char *what, void (*run)(Tensor t, Group ring), Tensor t, int64_t formula,
                        double total, Group ring) {
    clock_reset();
    run(t, ring);
    int64_t sent = comm_count("transfers").bytes;
    report_that(sent == formula, "%s: a rank sent %lld B, by its formula %lld", what, (long long)sent,
                (long long)formula);
    report_equal(what, total, comm_sum((double)sent, ring), "B");
}

// The ring against the library on such numbers: the largest error, relative to the sum of |x|.
static double prove_sums(int64_t count, DType dtype, Group ring, bool integers) {
    Tensor t = numbers(count, dtype, ring, integers), library = numbers(count, dtype, ring, integers);
    Tensor of_rank_0 = tensor_like(MEMORY_GRADIENT, t);
    double *scale = sum_of_sizes(t, ring), half = (ring.size - 1) * (double)tensor_bytes(t);
    int64_t reduce = tensor_bytes(t) - tensor_bytes(ring_chunk(t, ring.rank, ring));
    int64_t gather = tensor_bytes(t) - tensor_bytes(ring_chunk(t, ring.rank + 1, ring));
    int64_t least = count, most = 0;
    for (int i = 0; i < ring.size; i++) {
        int64_t chunk = tensor_count(ring_chunk(t, i, ring));
        if (chunk < least) least = chunk;
        if (chunk > most) most = chunk;
    }
    report_that(most - least <= 1, "%lld elements: chunks have %lld to %lld, and may differ by one",
                (long long)count, (long long)least, (long long)most);
    if (integers) {
        prove_bytes("reduce-scatter, (N - 1) K in all", ring_reduce_scatter, t, reduce, half, ring);
        prove_bytes("all-gather, (N - 1) K in all", ring_all_gather, t, gather, half, ring);
    } else {
        prove_bytes("both, 2 (N - 1) K in all", ring_all_reduce, t, reduce + gather, 2 * half, ring);
    }
    library_all_reduce(library, ring);
    double error = largest_error(t, library, scale, ring);
    op_copy(of_rank_0, t);
    comm_wait(comm_broadcast(of_rank_0, 0, ring));
    double unlike = largest_error(t, of_rank_0, NULL, ring);
    report_that(unlike == 0, "%lld elements: ranks hold sums that differ by %g", (long long)count, unlike);
    double bound = integers ? 0 : reassociation_bound(ring.size, dtype);
    report_that(error <= bound,
                "%lld %s: sums are off from the library's by %g of the sum of |x|, where %g is allowed",
                (long long)count, integers ? "integers" : "random numbers", error, bound);
    free(scale);
    tensor_free(&t);
    tensor_free(&library);
    tensor_free(&of_rank_0);
    return error;
}

// ---- the model clock ----

// Microseconds until the last rank is done; *adds: how long the busiest rank computes.
static double time_of(void (*all_reduce)(Tensor t, Group ring), Tensor t, Group ring, double *adds) {
    comm_wait(comm_barrier(ring));  // all model clocks now agree
    clock_reset();
    double start = clock_model_now();
    all_reduce(t, ring);
    double seconds = clock_model_now() - start;
    *adds = 1e6 * comm_max(clock_total().model_seconds, ring);
    return 1e6 * comm_max(seconds, ring);
}

static void expect_time(const char *what, double bytes, double measured, double formula) {
    report_that(fabs(measured - formula) <= 1e-9 * formula, "%s of %g bytes sends for %.12g us, not %.12g",
                what, bytes, measured, formula);
    report_number(bytes_text(bytes), what, 1e-6 * measured, "s");
}

static void prove_times(const Config *c, DType dtype, Group ring) {
    const Machine *m = machine_find(c->machine);
    double n = ring.size, node = 1e-6 * m->node_bytes_per_second * c->network_efficiency;  // bytes/us
    double network = 1e-6 * m->network_bytes_per_second * c->network_efficiency;
    // Each step of this ring waits for its slowest hop. (comm_all_reduce: each hop at its own latency, over
    // the ports of all members on a node.)
    int far = 0;  // ranks on other nodes than rank 0
    for (int r = 0; r < ring.size; r++) far += clock_node(r) != clock_node(0);
    double alpha = 1e6 * (far ? m->network_latency : m->node_latency), bandwidth = far ? network : node;
    say("\n%s, %d rank%s, %d of them on the node of rank 0: microseconds on the model clock\n", m->device,
        ring.size, plural(ring.size), ring.size - far);
    say("  %-8s %10s = %10s + %8s    %10s = %10s + %8s  %8s  %10s\n", "K", "ring", "formula", "adds",
        "via rank 0", "formula", "adds", "/ ring", "all_reduce");
    device_dry_run(true);
    for (double wanted = 4096; wanted <= 0x1p30; wanted *= 8) {
        int64_t chunk = (int64_t)ceil(wanted / n / (double)dtype_size(dtype));
        Tensor t = tensor_new(MEMORY_GRADIENT, dtype, SHAPE(chunk * ring.size));
        double bytes = (double)tensor_bytes(t), adds, root_adds, none;
        double around = time_of(ring_all_reduce, t, ring, &adds);
        double root = time_of(root_all_reduce, t, ring, &root_adds);
        double library = time_of(library_all_reduce, t, ring, &none);
        double formula = 2 * (n - 1) * (alpha + bytes / n / bandwidth);
        double busiest = fmax((n - 1 - far) * bytes / node, far * bytes / network);
        double root_formula = n > 1 ? 2 * (alpha + busiest) : 0;
        say("  %-8s %10.2f = %10.2f + %8.2f    %10.2f = %10.2f + %8.2f  %8.2f  %10.2f\n", bytes_text(bytes),
            around, formula, adds, root, root_formula, root_adds, n > 1 ? root / around : 1, library);
        expect_time("ring", bytes, around - adds, formula);
        expect_time("sum at rank 0", bytes, root - root_adds, root_formula);
        tensor_free(&t);
    }
    device_dry_run(false);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    int64_t elements;
    int dtype;
    Option own[] = {
        {"elements", OPTION_INT, &elements, "30011", 0, 1e12, "", "of the tensor that is summed", false},
        {"dtype", OPTION_CHOICE, &dtype, "f32", 0, 0, "f64|f32|bf16|f16", "of its elements", false},
    };
    Config config = config_parse(argc, argv, "All-reduce in a ring, from sends to a neighbour only.",
                                 CONFIG_REPORT | CONFIG_CLUSTER | CONFIG_TRACE | CONFIG_RANKS, NULL, own,
                                 sizeof own / sizeof *own);
    comm_start(argc, argv, 4);
    MeshShape shape = {.dp = comm_ranks()};
    Mesh mesh = mesh_new(shape);
    Group ring = mesh.world;
    report_json(config.json);
    timeline_start(&config, ring);
    mesh_print(&mesh, shape);
    prove_steps(ring);
    // No element, fewer than ranks, one for each, one more, and what was asked for.
    int64_t n = ring.size, counts[] = {0, 1, n - 1, n, n + 1, 3 * n + 2, elements};
    const char *name = dtype_name((DType)dtype), *proof = dtype <= F32 ? "reassociated" : "rounded";
    double error = 0, bound = reassociation_bound(ring.size, (DType)dtype);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        say("\n%lld element%s of %s, integers and then random numbers: bytes sent\n", (long long)counts[i],
            plural(counts[i]), name);
        prove_sums(counts[i], (DType)dtype, ring, true);
        error = fmax(error, prove_sums(counts[i], (DType)dtype, ring, false));
    }
    prove_times(&config, (DType)dtype, ring);
    timeline_finish(&config, ring);
    report_split(ring.size, NULL);
    return comm_finish(
        report_verdict("sums go round a ring in 2 (N - 1) steps: integers exact, %s %s, %.1e of %.1e", name,
                       proof, error, bound));
}
#endif
