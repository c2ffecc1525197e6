// bench_cp.c: context parallelism, the zig-zag ring, with 2 ranks of one thread compared with SGEMM on the
// same two cores. `make bench` runs it; yardstick.h explains the measurement.
//
// A rank has half of each of 8 sequences: 1,024 tokens per micro-batch, as in the other benchmarks.
#include "04_context_parallel/context_parallel.h"
#include "yardstick.h"

int main(int argc, char **argv) {
    base_start(argc, argv);
    comm_start(argc, argv, 2);
    Mesh mesh = mesh_new((MeshShape){.cp = comm_ranks()});
    Config c = config_default(BENCH_MODEL "micro-batch=8");
    c.cp = mesh.cp.size;
    config_set(&c, "zero", 0);
    config_set(&c, "context", CONTEXT_ZIGZAG);
    Trainer *trainer = trainer_new(&c, mesh, context_layouts);
    double share[1][MOST_PAIRS];
    Missing missing;
    const int rounds = shares_of_sgemm(share, &missing, &trainer, 1, mesh.world);
    bench_line("zigzag-ring", mesh.cp.size, share[0], rounds, &missing, "of-sgemm", 0.78);
    return comm_finish(0);
}
