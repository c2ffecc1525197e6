// yardstick.h: what the benchmarks of several ranks share: a training step beside SGEMM on the same cores.
//
// The yardstick: SGEMM, 2048 x 2048 in f32, on all ranks at once, right before and right after each round,
// since the speed of a shared machine drifts; the one after a round is that before the next. In a round
// each layout makes a step, there and back, so that all of them saw the same machine; the median over the
// rounds is printed (figures.h). What a step that is short of its target misses is that of rank 0; what
// lies between its operations is waiting for other ranks, messages and the host.
#ifndef YARDSTICK_H
#define YARDSTICK_H

#include "00_single_gpu/training.h"
#include "figures.h"

// The model of all of them, in steps of 8 sequences; micro-batches of 1,024 tokens a rank, a pipeline's of
// 256.
#define BENCH_MODEL \
    "layers=6 hidden=384 heads=6 kv-heads=6 ffn=1024 vocab=256 seq=256 dtype=f32 warmup=1 steps=1000 "

// Products of all ranks together in a yardstick of few ranks: one for each of 2 would be over in a fifth of
// a step's time, and any hiccup of the machine a tenth of it.
enum { SGEMM_SIZE = 2048, PRODUCTS = 4 };

static const double LAYOUT_SECONDS = 5;  // of each layout's rounds, beyond the LEAST_PAIRS

typedef struct Yardstick {
    Tensor product, a, b;
    Group world;
} Yardstick;

// FLOP/s of all ranks together.
static inline double sgemm_rate(const Yardstick *y) {
    const double size = SGEMM_SIZE;
    const int products = y->world.size < PRODUCTS ? PRODUCTS / y->world.size : 1;
    comm_wait(comm_barrier(y->world));
    double start = wall_seconds();
    for (int i = 0; i < products; i++) op_matmul(y->product, y->a, y->b, false, false, 0);
    return comm_sum(2 * products * size * size * size / (wall_seconds() - start), y->world);
}

static inline Yardstick yardstick_new(Group world) {
    Yardstick y = {.a = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(SGEMM_SIZE, SGEMM_SIZE)), .world = world};
    y.b = tensor_like(MEMORY_ACTIVATION, y.a);
    y.product = tensor_like(MEMORY_ACTIVATION, y.a);
    op_fill(y.a, 0.5);
    op_fill(y.b, 0.25);
    sgemm_rate(&y);  // the first product also allocates
    return y;
}
static inline void yardstick_free(Yardstick *y) {
    tensor_free(&y->a);
    tensor_free(&y->b);
    tensor_free(&y->product);
}

// FLOP/s of a step of all ranks together, by formula; `rate` is SGEMM's.
static inline double step_rate(const Yardstick *y, Trainer *t, Missing *missing, double rate) {
    const Config *c = &t->config;
    comm_wait(comm_barrier(y->world));
    clock_reset();
    double start = wall_seconds();
    train_step(t, NULL);
    double mine = wall_seconds() - start;
    missing_add(missing, mine, rate / y->world.size);
    return config_step_flops(c, c->micro_batch * c->grad_acc * t->model->mesh.dp.size) /
           comm_max(mine, y->world);
}

// Shares of trainers that take turns. Returns how many rounds there were, and ends the trainers.
static inline int shares_of_sgemm(double share[][MOST_PAIRS], Missing *missing, Trainer **trainer,
                                  int layouts, Group world) {
    Yardstick y = yardstick_new(world);
    for (int i = 0; i < layouts; i++) {
        missing[i] = (Missing){.operations = 0};
        train_step(trainer[i], NULL);  // the first step also allocates
    }
    int rounds = 0;
    double before = sgemm_rate(&y), start = wall_seconds();
    for (bool more = true; more; rounds++) {
        for (int turn = 0; turn < layouts; turn++) {
            int i = rounds % 2 ? layouts - 1 - turn : turn;
            share[i][rounds] = step_rate(&y, trainer[i], &missing[i], before);
        }
        const double after = sgemm_rate(&y), passed = wall_seconds() - start;
        more = false;
        for (int i = 0; i < layouts; i++) {
            share[i][rounds] /= (before + after) / 2;
            more |= !measured(share[i], rounds + 1, passed, layouts * LAYOUT_SECONDS);
        }
        more = comm_max(more, world) > 0;  // all leave in one round
        before = after;
    }
    for (int i = 0; i < layouts; i++) trainer_free(trainer[i]);
    yardstick_free(&y);
    return rounds;
}

// missing may be NULL.
static inline void bench_line(const char *what, int ranks, double *values, int rounds,
                              const Missing *missing, const char *unit, double target) {
    char *name = format_text("%s-L6-h384-%d-ranks", what, ranks);
    figure(name, values, rounds, unit, target);
    free(name);
    if (missing && median(values, rounds) < target) missing_say(missing);
}

#endif
