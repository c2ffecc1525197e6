// bench_5d.c: three axes at once, 8 ranks of one thread, as a share of what the cores multiply:
// dp 2 x pp 2 x tp 2 and dp 2 x pp 2 x cp 2. `make bench` runs it; yardstick.h has the measure.
#include "08_mixed_precision/five_d.h"
#include "yardstick.h"

enum { LAYOUTS = 2 };

int main(int argc, char **argv) {
    static const char *const name[LAYOUTS] = {"dp2-pp2-tp2", "dp2-pp2-cp2"};
    static const double target[LAYOUTS] = {0.60, 0.58};
    base_start(argc, argv);
    comm_start(argc, argv, 8);
    Config c = config_default(BENCH_MODEL "micro-batch=1 grad-acc=4");
    c.dp = c.pp = 2;
    config_set(&c, "bucket-mb", 4);
    config_set(&c, "zero", 0);
    config_set(&c, "documents", -1);
    config_set(&c, "schedule", ONE_F_ONE_B);
    config_set(&c, "context", CONTEXT_ZIGZAG);
    Trainer *trainer[LAYOUTS];
    for (int i = 0; i < LAYOUTS; i++) {
        c.tp = i ? 1 : 2, c.cp = i ? 2 : 1;
        layout_check(&c, comm_ranks(), five_d_layouts());
        trainer[i] = trainer_new(&c, mesh_new(layout_shape(&c)), five_d_layouts());
    }
    double share[LAYOUTS][ROUNDS];
    Missing missing[LAYOUTS];
    shares_of_sgemm(share, missing, trainer, LAYOUTS, comm_world());
    for (int i = 0; i < LAYOUTS; i++)
        bench_line(name[i], comm_ranks(), share[i], &missing[i], "of-sgemm", target[i]);
    return comm_finish(0);
}
