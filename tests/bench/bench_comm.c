// bench_comm.c: an all-reduce over shared memory compared with MPI's own call in the same run, 4 kB to 64 MB.
// `make bench` runs it with 2 ranks. With --sweep (`make bench-collectives`: 2, 4 and 8 ranks) all-reduce,
// reduce-scatter and all-gather from 1 kB on.
//
// Ours, MPI's and memcpy take turns, in order and then in reverse order; the median of the ratios over the
// rounds is printed (figures.h). A time is that of the slowest rank. The target of 1 applies to an
// all-reduce from 4 kB on and to the others from 64 kB on. Smaller ones pay for the check that ranks agree:
// so below 64 kB a fourth turn is ours without it (--trust-calls), for which the target of 1 applies at
// every size.
//
// Bandwidths are those of nccl-tests: algorithm = K / time; bus = algorithm x 2 (n - 1) / n for an
// all-reduce, x (n - 1) / n for the others, where K is the whole tensor: what a link carries, for any n.
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "comm/mesh.h"
#include "figures.h"

typedef enum Kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, KINDS } Kind;
static const char *const names[KINDS] = {"all-reduce", "reduce-scatter", "all-gather"};

static const int64_t judged_from[KINDS] = {4 << 10, 64 << 10, 64 << 10};

enum { LEAST_ROUNDS = 9, MOST_ROUNDS = 200 };

typedef struct Case {
    Kind kind;
    Tensor whole, part;
    float *whole_host, *part_host, *copy;  // for MPI and memcpy
    int64_t part_count;
    Group world;
} Case;

static void ours(Case *c) {
    switch (c->kind) {
        case ALL_REDUCE:
            comm_wait(comm_all_reduce(c->whole, REDUCE_SUM, c->world));
            break;
        case REDUCE_SCATTER:
            comm_wait(comm_reduce_scatter(c->part, c->whole, NULL, REDUCE_SUM, c->world));
            break;
        default:
            comm_wait(comm_all_gather(c->whole, c->part, NULL, c->world));
    }
}

static void trusting(Case *c) {
    const bool before = comm_set_check(false);
    ours(c);
    comm_set_check(before);
}

static void theirs(Case *c) {
    int part = (int)c->part_count, n = c->world.size;
    switch (c->kind) {
        case ALL_REDUCE:
            MPI_Allreduce(MPI_IN_PLACE, c->whole_host, part * n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            break;
        case REDUCE_SCATTER:
            MPI_Reduce_scatter_block(c->whole_host, c->part_host, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            break;
        default:
            MPI_Allgather(c->part_host, part, MPI_FLOAT, c->whole_host, part, MPI_FLOAT, MPI_COMM_WORLD);
    }
}

static void copy(Case *c) {
    memcpy(c->copy, c->whole_host, sizeof(float) * (size_t)(c->part_count * c->world.size));
    __asm__ volatile("" : : "r"(c->copy) : "memory");
}

static double seconds_of(void (*run)(Case *), Case *c, int repeats) {
    MPI_Barrier(MPI_COMM_WORLD);
    double start = wall_seconds();
    for (int i = 0; i < repeats; i++) run(c);
    double mine = (wall_seconds() - start) / repeats, slowest;
    MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return slowest;
}

static void bench(Kind kind, int64_t bytes, Group world) {
    int n = world.size;
    Case c = {.kind = kind, .part_count = bytes / 4 / n, .world = world};
    int64_t count = c.part_count * n;
    c.whole = tensor_new(MEMORY_GRADIENT, F32, SHAPE(count));
    c.part = tensor_new(MEMORY_GRADIENT, F32, SHAPE(c.part_count));
    c.whole_host = calloc((size_t)count, sizeof(float));
    c.part_host = calloc((size_t)c.part_count, sizeof(float));
    c.copy = calloc((size_t)count, sizeof(float));
    tensor_from_host(c.whole, c.whole_host);
    tensor_from_host(c.part, c.part_host);
    void (*const runs[])(Case *) = {ours, theirs, copy, trusting};
    double times[MOST_ROUNDS], trusted[MOST_ROUNDS], seconds[4][MOST_ROUNDS];
    const int ways = bytes < 64 << 10 ? 4 : 3;
    int repeats = bytes < 1 << 16 ? 20 : bytes < 1 << 20 ? 5 : 1, rounds = 0;
    for (int i = 0; i < ways; i++) seconds_of(runs[i], &c, 2);
    double start = wall_seconds(), stop = 0;
    for (; rounds < LEAST_ROUNDS || (rounds < MOST_ROUNDS && stop < 0.6); rounds++) {
        for (int turn = 0; turn < ways; turn++) {
            int i = rounds % 2 ? ways - 1 - turn : turn;
            seconds[i][rounds] = seconds_of(runs[i], &c, repeats);
        }
        times[rounds] = seconds[1][rounds] / seconds[0][rounds];
        if (ways == 4) trusted[rounds] = seconds[1][rounds] / seconds[3][rounds];
        double passed = wall_seconds() - start;
        MPI_Allreduce(&passed, &stop, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);  // all stop in one round
    }
    char *name = format_text("%s-%d-ranks-%lldkB", names[kind], n, (long long)(bytes >> 10));
    figure(name, times, rounds, "x-mpi", bytes >= judged_from[kind] ? 1 : 0);
    double took[3];
    for (int i = 0; i < 3; i++) took[i] = median(seconds[i], rounds);
    double algorithm = (double)(4 * count) / took[0];
    say("  %10.1f us, MPI %10.1f us, memcpy %9.1f us; algorithm %6.2f GB/s, bus %6.2f GB/s", 1e6 * took[0],
        1e6 * took[1], 1e6 * took[2], 1e-9 * algorithm,
        1e-9 * algorithm * (kind == ALL_REDUCE ? 2 : 1) * (n - 1) / n);
    if (ways == 4) {
        char *trusting_name = format_text("%s-trust-calls", name);
        figure(trusting_name, trusted, rounds, "x-mpi", 1);
        free(trusting_name);
        say("  %10.1f us", 1e6 * median(seconds[3], rounds));
    }
    free(name);
    tensor_free(&c.whole);
    tensor_free(&c.part);
    free(c.whole_host);
    free(c.part_host);
    free(c.copy);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    int64_t ranks;
    bool sweep;
    Option options[] = {
        {"ranks", OPTION_INT, &ranks, "2", 2, 64, "", "how many", false},
        {"sweep", OPTION_FLAG, &sweep, NULL, 0, 0, "",
         "all-reduce, reduce-scatter and all-gather, from 1 kB", false},
    };
    options_parse(argc, argv, "Collectives beside MPI's own.", options, sizeof options / sizeof *options);
    comm_start(argc, argv, (int)ranks);
    Mesh mesh = mesh_new((MeshShape){.dp = comm_ranks()});
    for (int kind = 0; kind < (sweep ? KINDS : 1); kind++)
        for (int64_t bytes = sweep ? 1 << 10 : 4 << 10; bytes <= 64 << 20; bytes *= 4)
            bench((Kind)kind, bytes, mesh.world);
    return comm_finish(0);
}
