// bench_tp.c: tensor and sequence parallelism with 2 ranks of one thread compared with SGEMM on the same two
// cores. `make bench` runs it; yardstick.h explains the measurement.
#include "03_tensor_parallel/tensor_parallel.h"
#include "yardstick.h"

enum { LAYOUTS = 2 };

int main(int argc, char **argv) {
    base_start(argc, argv);
    comm_start(argc, argv, 2);
    Mesh mesh = mesh_new((MeshShape){.tp = comm_ranks()});
    static const char *const name[LAYOUTS] = {"tensor-parallel", "sequence-parallel"};
    Trainer *trainer[LAYOUTS];
    for (int i = 0; i < LAYOUTS; i++) {
        Config c = config_default(BENCH_MODEL "micro-batch=4 grad-acc=2");
        c.tp = mesh.tp.size;
        config_set(&c, "zero", 0);
        config_set(&c, "sp", i == 1);
        trainer[i] = trainer_new(&c, mesh, tensor_layouts);
    }
    double share[LAYOUTS][MOST_PAIRS];
    Missing missing[LAYOUTS];
    const int rounds = shares_of_sgemm(share, missing, trainer, LAYOUTS, mesh.world);
    for (int i = 0; i < LAYOUTS; i++)
        bench_line(name[i], mesh.tp.size, share[i], rounds, &missing[i], "of-sgemm", 0.78);
    return comm_finish(0);
}
