// bench_fp8.c: what emulating 8-bit multiplies costs on a CPU: a training step with each recipe in turn,
// its time relative to steps in f32 of the same model right before and right after it. `make bench` runs
// it.
//
// Less is better. On top of f32's work a CPU encodes and decodes each operand twice, and computes a scale for
// each tile.
#include "08_mixed_precision/mixed_precision.h"
#include "figures.h"

enum { RECIPES = MXFP8 - TE_DELAYED + 1 };

static const double LIMIT = 10;  // seconds

static double step_seconds(Trainer *t) {
    double start = wall_seconds();
    train_step(t, NULL);
    return wall_seconds() - start;
}

static Trainer *trainer_of(const char *dtype, int recipe) {
    char *text = format_text(
        "layers=2 hidden=384 heads=6 kv-heads=6 ffn=1024 vocab=256 seq=256 micro-batch=4 warmup=1 "
        "steps=1000 dtype=%s",
        dtype);
    Config c = config_default(text);
    free(text);
    config_set(&c, "fp8", recipe);
    config_set(&c, "fp8-tile", 0);
    config_set(&c, "fp8-wire", 0);
    return trainer_new(&c, mesh_single(), fp8_one_device);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    Trainer *f32 = trainer_of("f32", NO_FP8), *fp8[RECIPES];
    warm_up(f32);
    for (int i = 0; i < RECIPES; i++) {
        fp8[i] = trainer_of("bf16", TE_DELAYED + i);
        warm_up(fp8[i]);
    }
    double times[RECIPES][MOST_PAIRS], before = step_seconds(f32);
    int rounds = 0;
    const double start = wall_seconds();
    for (bool more = true; more; rounds++) {
        for (int turn = 0; turn < RECIPES; turn++) {
            const int i = rounds % 2 ? RECIPES - 1 - turn : turn;
            const double narrow = step_seconds(fp8[i]), after = step_seconds(f32);
            times[i][rounds] = 2 * narrow / (before + after);
            before = after;
        }
        more = false;
        for (int i = 0; i < RECIPES; i++)
            more |= !measured(times[i], rounds + 1, wall_seconds() - start, LIMIT);
    }
    for (int i = 0; i < RECIPES; i++) {
        char *name = format_text("fp8-%s", fp8_recipes[TE_DELAYED + i - 1].name);
        figure_line(name, times[i], rounds, "x f32's time", 3, median(times[i], rounds) <= 3);
        free(name);
        trainer_free(fp8[i]);
    }
    trainer_free(f32);
    return 0;
}
