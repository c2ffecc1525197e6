// bench_comm.c: all-reduce, reduce-scatter and all-gather over shared memory, beside MPI's own calls and
// memcpy of the same run. `make bench` runs it with 2, 4 and 8 ranks.
//
// Bandwidths as nccl-tests defines them: algorithm = K / time; bus = algorithm x 2 (n - 1) / n for an
// all-reduce, x (n - 1) / n for the others, K the whole tensor: what a link carries, whatever n. A time is
// that of the slowest rank, and the least of many rounds in which ours, MPI's and memcpy take turns: what a
// call costs when nobody else takes the core.
#include <math.h>
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "comm/mesh.h"

typedef enum Kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, KINDS } Kind;
static const char *const names[KINDS] = {"all-reduce", "reduce-scatter", "all-gather"};

enum { LEAST_ROUNDS = 20, MOST_ROUNDS = 200 };

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
    void (*const runs[])(Case *) = {ours, theirs, copy};
    double best[3];
    int repeats = bytes < 1 << 16 ? 20 : bytes < 1 << 20 ? 5 : 1;
    for (int i = 0; i < 3; i++) best[i] = seconds_of(runs[i], &c, 2);
    double start = wall_seconds(), stop = 0;
    for (int round = 0; round < LEAST_ROUNDS || (round < MOST_ROUNDS && stop < 0.6); round++) {
        for (int i = 0; i < 3; i++) best[i] = fmin(best[i], seconds_of(runs[i], &c, repeats));
        double passed = wall_seconds() - start;
        MPI_Allreduce(&passed, &stop, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);  // all leave in one round
    }
    double times = best[1] / best[0], algorithm = (double)(4 * count) / best[0];
    bool judged = bytes >= 1 << 16;
    say("bench %s-%d-ranks-%lldkB %.3g x-mpi target %g %s", names[kind], n, (long long)(bytes >> 10), times,
        judged ? 1.0 : 0.0, !judged || times >= 1 ? "ok" : "short");
    say("  %10.1f us, MPI %10.1f us, memcpy %9.1f us; algorithm %6.2f GB/s, bus %6.2f GB/s", 1e6 * best[0],
        1e6 * best[1], 1e6 * best[2], 1e-9 * algorithm,
        1e-9 * algorithm * (kind == ALL_REDUCE ? 2 : 1) * (n - 1) / n);
    tensor_free(&c.whole);
    tensor_free(&c.part);
    free(c.whole_host);
    free(c.part_host);
    free(c.copy);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    comm_start(argc, argv, 2);
    MeshShape shape = {.dp = comm_ranks()};
    Mesh mesh = mesh_new(shape);
    for (int kind = 0; kind < KINDS; kind++)
        for (int64_t bytes = 1 << 10; bytes <= 64 << 20; bytes *= 4) bench((Kind)kind, bytes, mesh.world);
    return comm_finish(0);
}
