// bench_zero.c: ddp_bucketed and ZeRO's three stages with 2 ranks of one thread compared with SGEMM on the
// same two cores; ZeRO-1 and -2 also relative to ddp_bucketed in the same round. `make bench` runs it;
// yardstick.h explains the measurement.
#include "02_zero/zero.h"
#include "yardstick.h"

enum { STAGES = 4 };

int main(int argc, char **argv) {
    base_start(argc, argv);
    comm_start(argc, argv, 2);
    Mesh mesh = mesh_new((MeshShape){.dp = comm_ranks()});
    Config c = config_default(BENCH_MODEL "micro-batch=4");
    config_set(&c, "bucket-mb", 4);
    const Technique *const stages[STAGES] = {&ddp_bucketed, &zero1, &zero2, &zero3};
    Trainer *trainer[STAGES];
    for (int stage = 0; stage < STAGES; stage++)
        trainer[stage] = trainer_new(&c, mesh, (const Technique *[]){stages[stage], NULL});
    double share[STAGES][MOST_PAIRS], against_ddp[3][MOST_PAIRS];
    Missing missing[STAGES];
    const int rounds = shares_of_sgemm(share, missing, trainer, STAGES, mesh.world);
    for (int stage = 1; stage < 3; stage++)
        for (int i = 0; i < rounds; i++) against_ddp[stage][i] = share[stage][i] / share[0][i];
    bench_line("ddp-bucketed", mesh.dp.size, share[0], rounds, &missing[0], "of-sgemm", 0.82);
    for (int stage = 1; stage < 3; stage++) {
        bench_line(stages[stage]->name, mesh.dp.size, share[stage], rounds, &missing[stage], "of-sgemm",
                   0.82);
        bench_line(stages[stage]->name, mesh.dp.size, against_ddp[stage], rounds, NULL, "of-ddp", 0.97);
    }
    bench_line("zero3", mesh.dp.size, share[3], rounds, &missing[3], "of-sgemm", 0.78);
    return comm_finish(0);
}
