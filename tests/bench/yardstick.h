// yardstick.h: what the benchmarks of several ranks share: a training step compared with SGEMM on the same
// cores.
//
// The yardstick: SGEMM (sgemm.h) on all ranks at once, right before and right after each round, since the
// speed of a shared machine drifts; the one after a round is also the one before the next. In a round each
// layout makes a step, in order and then in reverse order, so that all of them see the same machine; the
// median over the rounds is printed (figures.h). For a step below its target, the missing time is rank 0's;
// time between its operations is spent on waiting for other ranks, messages and the host.
#ifndef YARDSTICK_H
#define YARDSTICK_H

#include "figures.h"
#include "sgemm.h"

// The model of all of them, in steps of 8 sequences; micro-batches of 1,024 tokens a rank, in a pipeline 256.
#define BENCH_MODEL \
    "layers=6 hidden=384 heads=6 kv-heads=6 ffn=1024 vocab=256 seq=256 dtype=f32 warmup=1 steps=1000 "

// Products of all ranks together in a yardstick of few ranks: one for each of 2 ranks would take a fifth of a
// step's time, and any hiccup of the machine would be a tenth of that.
enum { PRODUCTS = 4 };

static const double LAYOUT_SECONDS = 4;  // for each layout's rounds, beyond FEWEST_PAIRS

// FLOP/s of all ranks together.
static inline double sgemm_rate_of_all(const Sgemm *g, Group world) {
    comm_wait(comm_barrier(world));
    return comm_sum(sgemm_rate(g, world.size < PRODUCTS ? PRODUCTS / world.size : 1), world);
}

// FLOP/s of a step of all ranks together, by formula; `rate` is SGEMM's.
static inline double step_rate(Group world, Trainer *t, Missing *missing, double rate) {
    const Config *c = &t->config;
    comm_wait(comm_barrier(world));
    clock_reset();
    double start = wall_seconds();
    train_step(t, NULL);
    double mine = wall_seconds() - start;
    missing_add(missing, mine, rate / world.size);
    return config_step_flops(c, c->micro_batch * c->grad_acc * t->model->mesh.dp.size) /
           comm_max(mine, world);
}

// The shares of trainers that take turns. Returns the number of rounds, and frees the trainers.
static inline int shares_of_sgemm(double share[][MOST_PAIRS], Missing *missing, Trainer **trainer,
                                  int layouts, Group world) {
    Sgemm sgemm = sgemm_new();
    for (int i = 0; i < layouts; i++) {
        missing[i] = (Missing){.operations = 0};
        warm_up(trainer[i]);
    }
    int rounds = 0;
    double before = sgemm_rate_of_all(&sgemm, world), start = wall_seconds();
    for (bool more = true; more; rounds++) {
        for (int turn = 0; turn < layouts; turn++) {
            int i = rounds % 2 ? layouts - 1 - turn : turn;
            share[i][rounds] = step_rate(world, trainer[i], &missing[i], before);
        }
        const double after = sgemm_rate_of_all(&sgemm, world), passed = wall_seconds() - start;
        more = false;
        for (int i = 0; i < layouts; i++) {
            share[i][rounds] /= (before + after) / 2;
            more |= !measured(share[i], rounds + 1, passed, layouts * LAYOUT_SECONDS);
        }
        more = comm_max(more, world) > 0;  // all ranks stop in the same round
        before = after;
    }
    for (int i = 0; i < layouts; i++) trainer_free(trainer[i]);
    sgemm_free(&sgemm);
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
