// bench_ddp.c: data parallelism with 4 ranks of one thread, or with --ranks 8, compared with SGEMM on the
// same cores. `make bench` runs both; bench_zero.c has the row of 2 ranks, and yardstick.h explains the
// measurement.
#include "01_data_parallel/data_parallel.h"
#include "yardstick.h"

int main(int argc, char **argv) {
    base_start(argc, argv);
    comm_start(argc, argv, 4);
    Mesh mesh = mesh_new((MeshShape){.dp = comm_ranks()});
    Config c = config_default(BENCH_MODEL);
    c.micro_batch = 8 / mesh.dp.size;
    config_set(&c, "bucket-mb", 4);
    Trainer *trainer = trainer_new(&c, mesh, (const Technique *[]){&ddp_bucketed, NULL});
    double share[1][MOST_PAIRS];
    Missing missing;
    const int rounds = shares_of_sgemm(share, &missing, &trainer, 1, mesh.world);
    bench_line("ddp-bucketed", mesh.dp.size, share[0], rounds, &missing, "of-sgemm", 0.70);
    return comm_finish(0);
}
