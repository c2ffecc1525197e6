// bench_zero.c: ZeRO's three stages beside ddp_bucketed, all with 2 ranks of one thread: ZeRO-1 and -2
// relative to DDP in the same round, ZeRO-3 as a share of what the two cores multiply. `make bench` runs
// it; yardstick.h has the measure.
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
    double share[STAGES][ROUNDS], against_ddp[STAGES][ROUNDS];
    shares_of_sgemm(share, trainer, STAGES, mesh.world);
    for (int stage = 1; stage < STAGES; stage++)
        for (int i = 0; i < ROUNDS; i++) against_ddp[stage][i] = share[stage][i] / share[0][i];
    say("  ddp_bucketed: %.4g of SGEMM", median(share[0], ROUNDS));
    bench_line("zero1", mesh.dp.size, median(against_ddp[1], ROUNDS), "of-ddp", 0.97);
    bench_line("zero2", mesh.dp.size, median(against_ddp[2], ROUNDS), "of-ddp", 0.97);
    bench_line("zero3", mesh.dp.size, median(share[3], ROUNDS), "of-sgemm", 0.68);
    return comm_finish(0);
}
