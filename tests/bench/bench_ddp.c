// bench_ddp.c: data parallelism with 2 ranks of one thread beside what the same two cores multiply; with
// --ranks 4 and 8, that many share them. `make bench` runs it; yardstick.h has the measure.
#include "01_data_parallel/data_parallel.h"
#include "yardstick.h"

int main(int argc, char **argv) {
    base_start(argc, argv);
    comm_start(argc, argv, 2);
    Mesh mesh = mesh_new((MeshShape){.dp = comm_ranks()});
    Config c = config_default(BENCH_MODEL);
    c.micro_batch = 8 / mesh.dp.size;
    config_set(&c, "bucket-mb", 4);
    Trainer *trainer = trainer_new(&c, mesh, (const Technique *[]){&ddp_bucketed, NULL});
    double share[1][ROUNDS];
    Missing missing;
    shares_of_sgemm(share, &missing, &trainer, 1, mesh.world);
    bench_line("ddp-bucketed", mesh.dp.size, share[0], &missing, "of-sgemm", mesh.dp.size > 2 ? 0.7 : 0.82);
    return comm_finish(0);
}
