// recipe_convergence.c: the loss after 500 steps of the default model with each recipe of fp8.c, compared
// with bf16, and how much of the difference is chance. Playbook: "FP8 pretraining".
//
// Two runs that differ only slightly do not end at the same loss: from random weights they part within 200
// steps, and stay apart. So each seed trains
//
//     bf16           the reference
//     bf16, moved    again, each weight times 1 + a random number of up to 1/16, as far as rounding to e4m3
//                    moves it: the same data, and no reason but chance to end elsewhere
//     each recipe    from the weights, and with the samples, of bf16
//
// twice: from random weights, and from those of bf16 after 500 steps, to which even the moved run returns.
// The table of log losses has a row for each run and a column for each seed. What is left after the effects
// of row and column are removed is chance: its deviation gives each row's standard error. Recipes are
// compared with the mean of the first two rows.
//
// Seeds are split over the ranks, each of which trains on one device. This file has no main: fp8.c runs it.
#include <math.h>
#include <stdlib.h>

#include "mixed_precision.h"
#include "tensor/rng.h"

enum { SEEDS = 4, BASE = 2, ROWS = BASE + MXFP8 };
enum { NEXT_SAMPLES = 100 };  // of a seed that continues: seed + this
static const double within = 0.01, moved_by = 1.0 / 16;

// ---- weights: copied, and moved ----

static int64_t elements_of(const Params *p) {
    int64_t elements = 0;
    for (int i = 0; i < p->count; i++) elements += p->param[i].count;
    return elements;
}

static double *new_copy(const Params *p) {
    double *copy = host_alloc((size_t)elements_of(p) * sizeof *copy), *to = copy;
    for (int i = 0; i < p->count; to += p->param[i++].count)
        tensor_to_doubles(to, param_own_value(p, &p->param[i], NULL));
    return copy;
}

static void put_back(const Params *p, const double *from) {
    for (int i = 0; i < p->count; from += p->param[i++].count)
        tensor_from_doubles(param_own_value(p, &p->param[i], NULL), from);
}

// Matrices alone: a norm's gain is not cast.
static void move(const Params *p, double *x) {
    for (int i = 0; i < p->count; x += p->param[i++].count)
        for (int64_t j = 0; j < p->param[i].count && p->param[i].dims > 1; j++)
            x[j] *= 1 + moved_by * (2 * rng_uniform((uint64_t)i, RNG_TEST, (uint64_t)j) - 1);
}

// ---- runs ----

static const char *name_of(int row) {
    return row == 0 ? "bf16" : row == 1 ? "bf16, moved" : fp8_recipes[row - BASE].name;
}

// What all runs are of.
typedef struct Task {
    Config model;
    int64_t held_out;  // samples
    int seeds;
    Group ranks;
} Task;

// The held-out loss after all steps. start: weights to begin with; NULL: random ones. *end (may be NULL): the
// final weights, for the caller to free.
static double trained(const Task *task, int row, int64_t seed, const double *start, double **end) {
    Config c = task->model;
    c.seed = seed;
    fp8_set(&c, row < BASE ? NO_FP8 : row - BASE + 1);
    Trainer *t = trainer_new(&c, mesh_single(), fp8_one_device);
    const Params *p = &t->model->params;
    if (start) put_back(p, start);
    if (row == 1) {
        double *weights = new_copy(p);
        move(p, weights);
        put_back(p, weights);
        free(weights);
    }
    for (int64_t step = 0; step < c.steps; step++) train_step(t, NULL);
    if (end) *end = new_copy(p);
    double loss = held_out_loss(t, task->held_out);
    trainer_free(t);
    return loss;
}

// ---- what is chance ----

double fp8_chance(const double *x, int rows, int columns) {
    double all = 0, squares = 0;
    for (int i = 0; i < rows * columns; i++) all += x[i] / (rows * columns);
    for (int r = 0; r < rows; r++)
        for (int s = 0; s < columns; s++) {
            double row = 0, column = 0;
            for (int i = 0; i < columns; i++) row += x[r * columns + i] / columns;
            for (int i = 0; i < rows; i++) column += x[i * columns + s] / rows;
            squares += pow(x[r * columns + s] - row - column + all, 2);
        }
    return sqrt(squares / ((rows - 1) * (columns - 1)));
}

// Three standard errors, as chance is known from few runs and five recipes are judged at once: with two, one
// table in nine would refuse a recipe that is as good as bf16, if there are two seeds.
bool fp8_is_off(double off, double error) { return !(fabs(off) < within + 3 * error); }

// The table of one phase, and whether it agrees with the literature: stable recipes within 1% of bf16.
static double judge(const double *loss, int64_t steps, int seeds, const char *from) {
    double x[ROWS * SEEDS], base = 0;
    for (int i = 0; i < ROWS * seeds; i++) x[i] = log(loss[i]);
    for (int i = 0; i < BASE * seeds; i++) base += x[i] / (BASE * seeds);
    double chance = fp8_chance(x, ROWS, seeds), error = chance * sqrt((1 + 1.0 / BASE) / seeds);
    say("\n%lld steps of the default model from %s, mean of %d seeds:\n", (long long)steps, from, seeds);
    say("  %-12s %14s %10s", "", "held-out loss", "of bf16's");
    char *title = format_text("%lld steps from %s, of bf16's", (long long)steps, from);
    for (int row = 0; row < ROWS; row++) {
        double off = -base, mean = 0;
        for (int i = 0; i < seeds; i++) {
            off += x[row * seeds + i] / seeds;
            mean += loss[row * seeds + i] / seeds;
        }
        say("  %-12s %14.4f %+9.2f%%%s", name_of(row), mean, 100 * off,
            row < BASE || fp8_recipes[row - BASE].trains ? "" : "  (not judged)");
        report_number(title, name_of(row), off, "");
        if (row < BASE || !fp8_recipes[row - BASE].trains) continue;
        report_that(!fp8_is_off(off, error),
                    "%s from %s: %+.2f%% off bf16, allowed 1%% and three standard errors of %.2f%%",
                    name_of(row), from, 100 * off, 100 * error);
    }
    say("  chance       %24.2f%%  of a run; of a recipe's mean beside bf16's: %.2f%%", 100 * chance,
        100 * error);
    free(title);
    return error;
}

// Ranks synchronize after each row, so none waits longer than one run takes.
static void run_phase(double *loss, const Task *task, double **start, double **end, int phase) {
    const int seeds = task->seeds;
    Group ranks = task->ranks;
    for (int row = 0; row < ROWS; row++) {
        for (int i = 0; i < seeds; i++) {
            loss[row * seeds + i] = 0;
            if (i % ranks.size == ranks.rank)
                loss[row * seeds + i] = trained(task, row, i + 1 + (start ? NEXT_SAMPLES : 0),
                                                start ? start[i] : NULL, row == 0 && end ? &end[i] : NULL);
        }
        comm_sum_all(loss + (ptrdiff_t)row * seeds, seeds, ranks);
        progress(phase * ROWS + row + 1, 2 * ROWS, name_of(row));
    }
}

void fp8_convergence(Group ranks, const Config *model, int64_t held_out, int seeds) {
    const Task task = {*model, held_out, seeds, ranks};
    double early[ROWS * SEEDS], late[ROWS * SEEDS], *trained_weights[SEEDS] = {NULL};
    run_phase(early, &task, NULL, trained_weights, 0);
    run_phase(late, &task, trained_weights, NULL, 1);
    judge(early, model->steps, seeds, "random weights");
    double error = judge(late, model->steps, seeds, "trained weights");
    report_that(error < within / 4, "chance leaves the second table's means %.2f%%, too much to tell 1%%",
                100 * error);
    for (int i = 0; i < seeds; i++) free(trained_weights[i]);
}
