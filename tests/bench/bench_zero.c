// bench_zero.c: ZeRO's three stages beside ddp_bucketed, all with 2 ranks of one thread. `make bench` runs
// it.
//
// Shape and yardstick of bench_ddp.c: SGEMM, 2048 x 2048 in f32, on both ranks at once, right before and
// right after each step. The four take turns, so that each pair of a stage with DDP saw the same machine;
// medians are printed: of ZeRO-1 and -2 relative to DDP, of ZeRO-3 as a share of the yardstick.
//     bench <name> <value> <unit> target <value> ok|short
#include <stdlib.h>

#include "02_zero/zero.h"

enum { SIZE = 2048, ROUNDS = 15, STAGES = 4 };

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, by_value);
    return values[count / 2];
}

// FLOP/s of all ranks together.
static double sgemm_rate(Tensor c, Tensor a, Tensor b, Group group) {
    comm_wait(comm_barrier(group));
    double start = wall_seconds();
    op_matmul(c, a, b, false, false, 0);
    return comm_sum(2.0 * SIZE * SIZE * SIZE / (wall_seconds() - start), group);
}

static void print(const char *what, int ranks, double value, const char *unit, double target) {
    say("bench %s-L6-h384-%d-ranks %.4g %s target %.4g %s", what, ranks, value, unit, target,
        value >= target ? "ok" : "short");
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    comm_start(argc, argv, 2);
    Mesh mesh = mesh_new((MeshShape){.dp = comm_ranks()});
    Config c = config_default(
        "layers=6 hidden=384 heads=6 kv-heads=6 ffn=1024 vocab=256 seq=256 micro-batch=4 "
        "dtype=f32 warmup=1 steps=1000");
    Tensor a = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(SIZE, SIZE)), b = tensor_like(MEMORY_ACTIVATION, a);
    Tensor product = tensor_like(MEMORY_ACTIVATION, a);
    op_fill(a, 0.5);
    op_fill(b, 0.25);
    Trainer *t[STAGES];
    const Technique *const stages[STAGES] = {&ddp_bucketed, &zero1, &zero2, &zero3};
    config_set(&c, "bucket-mb", 4);
    for (int stage = 0; stage < STAGES; stage++) {
        t[stage] = trainer_new(&c, mesh, (const Technique *[]){stages[stage], NULL});
        for (int i = 0; i < 2; i++) train_step(t[stage], NULL);  // the first step also allocates
    }
    double share[STAGES][ROUNDS], against_ddp[STAGES][ROUNDS];
    double flops = config_step_flops(&c, c.micro_batch * mesh.dp.size);
    sgemm_rate(product, a, b, mesh.world);
    for (int i = 0; i < ROUNDS; i++)
        for (int turn = 0; turn < STAGES; turn++) {
            int stage = i % 2 ? STAGES - 1 - turn : turn;  // there and back
            double before = sgemm_rate(product, a, b, mesh.world);
            comm_wait(comm_barrier(mesh.world));
            double start = wall_seconds();
            train_step(t[stage], NULL);
            double seconds = comm_max(wall_seconds() - start, mesh.world);
            share[stage][i] = flops / seconds / ((before + sgemm_rate(product, a, b, mesh.world)) / 2);
        }
    for (int stage = 1; stage < STAGES; stage++)
        for (int i = 0; i < ROUNDS; i++) against_ddp[stage][i] = share[stage][i] / share[0][i];
    say("  ddp_bucketed: %.4g of SGEMM", median(share[0], ROUNDS));
    print("zero1", mesh.dp.size, median(against_ddp[1], ROUNDS), "of-ddp", 0.97);
    print("zero2", mesh.dp.size, median(against_ddp[2], ROUNDS), "of-ddp", 0.97);
    print("zero3", mesh.dp.size, median(share[3], ROUNDS), "of-sgemm", 0.68);
    for (int stage = 0; stage < STAGES; stage++) trainer_free(t[stage]);
    tensor_free(&a);
    tensor_free(&b);
    tensor_free(&product);
    return comm_finish(0);
}
