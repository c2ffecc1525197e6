// bench_5d.c: several axes at once, one thread per rank, as a share of the cores' SGEMM rate: with 8 ranks
// dp 4 x tp 2, dp 2 x pp 2 x tp 2 and dp 2 x pp 2 x cp 2; with --ranks 4, dp 2 x tp 2. `make bench` runs it;
// yardstick.h explains the measurement.
#include "08_mixed_precision/five_d.h"
#include "yardstick.h"

typedef struct Layout {
    const char *name;
    int64_t dp, pp, cp, tp, micro_batch, grad_acc;
    double target;
} Layout;

enum { MOST_LAYOUTS = 3 };

// The layouts for the number of ranks.
static int layouts_here(const Layout *here[MOST_LAYOUTS]) {
    static const Layout all[] = {
        {"dp2-tp2", 2, 1, 1, 2, 4, 1, 0.70},
        {"dp4-tp2", 4, 1, 1, 2, 2, 1, 0.70},
        {"dp2-pp2-tp2", 2, 2, 1, 2, 1, 4, 0.60},
        {"dp2-pp2-cp2", 2, 2, 2, 1, 1, 4, 0.58},
    };
    int count = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].dp * all[i].pp * all[i].cp * all[i].tp == comm_ranks()) here[count++] = &all[i];
    CHECK(count, "there is no layout of %d ranks here; --ranks 4 or 8 would fit", comm_ranks());
    return count;
}

static Trainer *trainer_of(const Layout *layout) {
    Config c = config_default(BENCH_MODEL);
    c.dp = layout->dp, c.pp = layout->pp, c.cp = layout->cp, c.tp = layout->tp;
    c.micro_batch = layout->micro_batch, c.grad_acc = layout->grad_acc;
    config_set(&c, "bucket-mb", 4);
    config_set(&c, "zero", 0);
    config_set(&c, "documents", -1);
    config_set(&c, "schedule", ONE_F_ONE_B);
    config_set(&c, "context", CONTEXT_ZIGZAG);
    layout_check(&c, comm_ranks(), five_d_layouts());
    return trainer_new(&c, mesh_new(layout_shape(&c)), five_d_layouts());
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    comm_start(argc, argv, 8);
    const Layout *layout[MOST_LAYOUTS];
    int layouts = layouts_here(layout);
    Trainer *trainer[MOST_LAYOUTS];
    for (int i = 0; i < layouts; i++) trainer[i] = trainer_of(layout[i]);
    double share[MOST_LAYOUTS][MOST_PAIRS];
    Missing missing[MOST_LAYOUTS];
    const int rounds = shares_of_sgemm(share, missing, trainer, layouts, comm_world());
    for (int i = 0; i < layouts; i++)
        bench_line(layout[i]->name, comm_ranks(), share[i], rounds, &missing[i], "of-sgemm",
                   layout[i]->target);
    return comm_finish(0);
}
