// bench_ddp.c: data parallelism with 2 ranks of one thread beside what the same two cores multiply. `make
// bench` runs it.
//
// The yardstick: SGEMM, 2048 x 2048 in f32, on both ranks at once, right before and right after each step.
// The median over such pairs is printed.  bench <name> <value> <unit> target <value> ok|short
#include <stdlib.h>

#include "01_data_parallel/data_parallel.h"

enum { SIZE = 2048, PAIRS = 15 };

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// FLOP/s of all ranks together.
static double sgemm_rate(Tensor c, Tensor a, Tensor b, Group group) {
    comm_wait(comm_barrier(group));
    double start = wall_seconds();
    op_matmul(c, a, b, false, false, 0);
    return comm_sum(2.0 * SIZE * SIZE * SIZE / (wall_seconds() - start), group);
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
    config_set(&c, "bucket-mb", 4);
    Trainer *t = trainer_new(&c, mesh, (const Technique *[]){&ddp_bucketed, NULL});
    train_step(t, NULL);  // the first step also allocates
    sgemm_rate(product, a, b, mesh.world);
    double shares[PAIRS], flops = config_step_flops(&c, c.micro_batch * mesh.dp.size);
    for (int i = 0; i < PAIRS; i++) {
        double before = sgemm_rate(product, a, b, mesh.world);
        comm_wait(comm_barrier(mesh.world));
        double start = wall_seconds();
        train_step(t, NULL);
        double seconds = comm_max(wall_seconds() - start, mesh.world);
        shares[i] = flops / seconds / ((before + sgemm_rate(product, a, b, mesh.world)) / 2);
    }
    qsort(shares, PAIRS, sizeof *shares, by_value);
    double share = shares[PAIRS / 2], target = 0.76;
    say("bench ddp-bucketed-L6-h384-%d-ranks %.4g of-sgemm target %.4g %s", mesh.dp.size, share, target,
        share >= target ? "ok" : "short");
    trainer_free(t);
    tensor_free(&a);
    tensor_free(&b);
    tensor_free(&product);
    return comm_finish(0);
}
