// yardstick.h: what the benchmarks of several ranks share: a training step beside SGEMM on the same cores.
//
// The yardstick: SGEMM, 2048 x 2048 in f32, on all ranks at once, right before and right after each step,
// since the speed of a shared machine drifts; the one after a step is that before the next. Layouts take
// turns, so that all of them saw the same machine; the median over the rounds is printed (figures.h). What
// a step that is short of its target misses is that of rank 0; what lies between its operations is waiting
// for other ranks, messages and the host.
#ifndef YARDSTICK_H
#define YARDSTICK_H

#include "00_single_gpu/training.h"
#include "figures.h"

// The model of all of them, in steps of 8 sequences; micro-batches of 1,024 tokens a rank, a pipeline's of
// 256.
#define BENCH_MODEL \
    "layers=6 hidden=384 heads=6 kv-heads=6 ffn=1024 vocab=256 seq=256 dtype=f32 warmup=1 steps=1000 "

enum { SGEMM_SIZE = 2048, ROUNDS = 9 };

typedef struct Yardstick {
    Tensor product, a, b;
    Group world;
} Yardstick;

// FLOP/s of all ranks together.
static inline double sgemm_rate(const Yardstick *y) {
    const double size = SGEMM_SIZE;
    comm_wait(comm_barrier(y->world));
    double start = wall_seconds();
    op_matmul(y->product, y->a, y->b, false, false, 0);
    return comm_sum(2 * size * size * size / (wall_seconds() - start), y->world);
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

// FLOPs of a step of all ranks, by formula, over its time, as a share of SGEMM's rate around it: *rate is
// that before, and then that after.
static inline double share_of_sgemm(const Yardstick *y, Trainer *t, Missing *missing, double *rate) {
    const Config *c = &t->config;
    const double before = *rate;
    comm_wait(comm_barrier(y->world));
    clock_reset();
    double start = wall_seconds();
    train_step(t, NULL);
    double mine = wall_seconds() - start;
    missing_add(missing, mine, before / y->world.size);
    double seconds = comm_max(mine, y->world);
    double flops = config_step_flops(c, c->micro_batch * c->grad_acc * t->model->mesh.dp.size);
    *rate = sgemm_rate(y);
    return flops / seconds / ((before + *rate) / 2);
}

// Shares of trainers that take turns, there and back. Ends the trainers.
static inline void shares_of_sgemm(double share[][ROUNDS], Missing *missing, Trainer **trainer, int layouts,
                                   Group world) {
    Yardstick y = yardstick_new(world);
    for (int i = 0; i < layouts; i++) {
        missing[i] = (Missing){.operations = 0};
        for (int step = 0; step < 2; step++) train_step(trainer[i], NULL);  // the first step also allocates
    }
    double rate = sgemm_rate(&y);
    for (int round = 0; round < ROUNDS; round++)
        for (int turn = 0; turn < layouts; turn++) {
            int i = round % 2 ? layouts - 1 - turn : turn;
            share[i][round] = share_of_sgemm(&y, trainer[i], &missing[i], &rate);
        }
    for (int i = 0; i < layouts; i++) trainer_free(trainer[i]);
    yardstick_free(&y);
}

// missing may be NULL.
static inline void bench_line(const char *what, int ranks, double *values, const Missing *missing,
                              const char *unit, double target) {
    char *name = format_text("%s-L6-h384-%d-ranks", what, ranks);
    figure(name, values, ROUNDS, unit, target);
    free(name);
    if (missing && median(values, ROUNDS) < target) missing_say(missing);
}

#endif
