// bench_tp.c: tensor and sequence parallelism with 2 ranks of one thread beside what the same two cores
// multiply. `make bench` runs it. Model, batch of a step and yardstick are bench_ddp.c's; layouts take
// turns.
//
// The yardstick: SGEMM, 2048 x 2048 in f32, on both ranks at once, right before and right after each step.
// The
// median over such pairs is printed.  bench <name> <value> <unit> target <value> ok|short
#include <stdlib.h>

#include "03_tensor_parallel/tensor_parallel.h"

enum { SIZE = 2048, PAIRS = 15, LAYOUTS = 2 };

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
    Mesh mesh = mesh_new((MeshShape){.tp = comm_ranks()});
    Tensor a = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(SIZE, SIZE)), b = tensor_like(MEMORY_ACTIVATION, a);
    Tensor product = tensor_like(MEMORY_ACTIVATION, a);
    op_fill(a, 0.5);
    op_fill(b, 0.25);
    static const char *const name[LAYOUTS] = {"tensor-parallel", "sequence-parallel"};
    Trainer *trainer[LAYOUTS];
    for (int i = 0; i < LAYOUTS; i++) {
        Config c = config_default(
            "layers=6 hidden=384 heads=6 kv-heads=6 ffn=1024 vocab=256 seq=256 micro-batch=4 grad-acc=2 "
            "dtype=f32 warmup=1 steps=1000");
        c.tp = mesh.tp.size;
        config_set(&c, "sp", i == 1);
        trainer[i] = trainer_new(&c, mesh, tensor_layouts);
        train_step(trainer[i], NULL);  // the first step also allocates
    }
    sgemm_rate(product, a, b, mesh.world);
    double shares[LAYOUTS][PAIRS], target = 0.64;
    for (int pair = 0; pair < PAIRS * LAYOUTS; pair++) {
        Trainer *t = trainer[pair % LAYOUTS];
        double before = sgemm_rate(product, a, b, mesh.world);
        comm_wait(comm_barrier(mesh.world));
        double start = wall_seconds();
        train_step(t, NULL);
        double seconds = comm_max(wall_seconds() - start, mesh.world);
        double flops = config_step_flops(&t->config, t->config.micro_batch * t->config.grad_acc);
        shares[pair % LAYOUTS][pair / LAYOUTS] =
            flops / seconds / ((before + sgemm_rate(product, a, b, mesh.world)) / 2);
    }
    for (int i = 0; i < LAYOUTS; i++) {
        qsort(shares[i], PAIRS, sizeof *shares[i], by_value);
        double share = shares[i][PAIRS / 2];
        say("bench %s-L6-h384-%d-ranks %.4g of-sgemm target %.4g %s", name[i], mesh.tp.size, share, target,
            share >= target ? "ok" : "short");
        trainer_free(trainer[i]);
    }
    tensor_free(&a);
    tensor_free(&b);
    tensor_free(&product);
    return comm_finish(0);
}
