// bench_pp.c: a pipeline of 2 ranks of one thread compared with SGEMM on the same two cores: 1F1B as a
// share of that, and of what its bubble leaves of it, m / (m + p - 1); ZB-H1 and ZB-H2 relative to 1F1B in
// the same round. `make bench` runs it; yardstick.h explains the measurement.
#include "05_pipeline_parallel/pipeline.h"
#include "yardstick.h"

enum { SCHEDULES = 3 };

int main(int argc, char **argv) {
    static const ScheduleKind kind[SCHEDULES] = {ONE_F_ONE_B, ZB_H1, ZB_H2};
    static const char *const name[SCHEDULES] = {"1f1b", "zb-h1", "zb-h2"};
    base_start(argc, argv);
    comm_start(argc, argv, 2);
    Mesh mesh = mesh_new((MeshShape){.pp = comm_ranks()});
    Config c = config_default(BENCH_MODEL "micro-batch=1 grad-acc=8");
    c.pp = mesh.pp.size;
    config_set(&c, "zero", 0);
    config_set(&c, "context", CONTEXT_METHODS);
    Trainer *trainer[SCHEDULES];
    for (int i = 0; i < SCHEDULES; i++) {
        config_set(&c, "schedule", kind[i]);
        trainer[i] = trainer_new(&c, mesh, pipeline_layouts);
    }
    double share[SCHEDULES][MOST_PAIRS], against[SCHEDULES][MOST_PAIRS];
    Missing missing[SCHEDULES];
    const int rounds = shares_of_sgemm(share, missing, trainer, SCHEDULES, mesh.world);
    for (int i = 1; i < SCHEDULES; i++)
        for (int round = 0; round < rounds; round++) against[i][round] = share[i][round] / share[0][round];
    double leaves = (double)c.grad_acc / (double)(c.grad_acc + mesh.pp.size - 1);
    bench_line(name[0], mesh.pp.size, share[0], rounds, &missing[0], "of-sgemm", 0.78 * leaves);
    say("  its bubble leaves %.4g: %.4g of that", leaves, median(share[0], rounds) / leaves);
    for (int i = 1; i < SCHEDULES; i++)
        bench_line(name[i], mesh.pp.size, against[i], rounds, NULL, "of-1f1b", 1);
    return comm_finish(0);
}
