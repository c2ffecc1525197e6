// bench_pp.c: a pipeline of 2 ranks of one thread beside what the same two cores multiply: 1F1B, and zero
// bubble beside it. `make bench` runs it. Model, batch of a step and yardstick are bench_ddp.c's; the batch
// is in 8 micro-batches.
//
// The yardstick: SGEMM, 2048 x 2048 in f32, on both ranks at once, right before and right after each step.
// Schedules take turns, so that each pair of them saw the same machine; medians are printed: of 1F1B as a
// share of the yardstick, and of what its bubble leaves of that, m / (m + p - 1); of ZB-H1 and ZB-H2
// relative to 1F1B.         bench <name> <value> <unit> target <value> ok|short
#include <stdlib.h>

#include "05_pipeline_parallel/pipeline.h"

enum { SIZE = 2048, ROUNDS = 15, SCHEDULES = 3 };

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

int main(int argc, char **argv) {
    static const ScheduleKind kind[SCHEDULES] = {ONE_F_ONE_B, ZB_H1, ZB_H2};
    static const char *const name[SCHEDULES] = {"1f1b", "zb-h1", "zb-h2"};
    base_start(argc, argv);
    comm_start(argc, argv, 2);
    Mesh mesh = mesh_new((MeshShape){.pp = comm_ranks()});
    Tensor a = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(SIZE, SIZE)), b = tensor_like(MEMORY_ACTIVATION, a);
    Tensor product = tensor_like(MEMORY_ACTIVATION, a);
    op_fill(a, 0.5);
    op_fill(b, 0.25);
    Config c = config_default(
        "layers=6 hidden=384 heads=6 kv-heads=6 ffn=1024 vocab=256 seq=256 micro-batch=1 grad-acc=8 "
        "dtype=f32 warmup=1 steps=1000");
    c.pp = mesh.pp.size;
    config_set(&c, "zero", 0);
    config_set(&c, "context", CONTEXT_METHODS);
    Trainer *trainer[SCHEDULES];
    for (int i = 0; i < SCHEDULES; i++) {
        config_set(&c, "schedule", kind[i]);
        trainer[i] = trainer_new(&c, mesh, pipeline_layouts);
        train_step(trainer[i], NULL);  // the first step also allocates
    }
    sgemm_rate(product, a, b, mesh.world);
    double share[SCHEDULES][ROUNDS], against[SCHEDULES][ROUNDS];
    double flops = config_step_flops(&c, c.micro_batch * c.grad_acc);
    for (int round = 0; round < ROUNDS; round++)
        for (int turn = 0; turn < SCHEDULES; turn++) {
            int i = round % 2 ? SCHEDULES - 1 - turn : turn;  // there and back
            double before = sgemm_rate(product, a, b, mesh.world);
            comm_wait(comm_barrier(mesh.world));
            double start = wall_seconds();
            train_step(trainer[i], NULL);
            double seconds = comm_max(wall_seconds() - start, mesh.world);
            share[i][round] = flops / seconds / ((before + sgemm_rate(product, a, b, mesh.world)) / 2);
        }
    for (int i = 1; i < SCHEDULES; i++)
        for (int round = 0; round < ROUNDS; round++) against[i][round] = share[i][round] / share[0][round];
    double leaves = (double)c.grad_acc / (double)(c.grad_acc + mesh.pp.size - 1);
    double value = median(share[0], ROUNDS), target = 0.78 * leaves;
    say("bench %s-L6-h384-%d-ranks %.4g of-sgemm target %.4g %s", name[0], mesh.pp.size, value, target,
        value >= target ? "ok" : "short");
    say("  its bubble leaves %.4g: %.4g of that", leaves, value / leaves);
    for (int i = 1; i < SCHEDULES; i++) {
        double times = median(against[i], ROUNDS);
        say("bench %s-L6-h384-%d-ranks %.4g of-1f1b target 1 %s", name[i], mesh.pp.size, times,
            times > 1 ? "ok" : "short");
    }
    for (int i = 0; i < SCHEDULES; i++) trainer_free(trainer[i]);
    tensor_free(&a);
    tensor_free(&b);
    tensor_free(&product);
    return comm_finish(0);
}
