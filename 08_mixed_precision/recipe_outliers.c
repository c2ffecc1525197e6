// recipe_outliers.c: training with an outlier in the activations. Playbook: "FP8 pretraining"; Fishman et
// al. 2024, "Scaling FP8 training to trillion-token LLMs"; Dettmers et al. 2022.
//
// Large models develop outliers: a few channels of the linears' inputs are so large that a scale of the
// whole tensor leaves nothing for the others, and training in FP8 diverges, with SwiGLU after 200 billion
// tokens. A small model develops none. So one is planted, in a way that changes nothing else:
//
//     W (norm(x) * gain)      element j of the gain times 2^k, column j of W divided by 2^k
//
// is the same function for each k, and in bf16 gives the same bits. Neither is trained: AdamW's update would
// be much larger than the column itself.
//
// This file has no main: fp8.c runs it.
#include <math.h>
#include <stdlib.h>

#include "files.h"
#include "mixed_precision.h"
#include "tensor/rng.h"

enum { CHANNEL = 5, STEPS = 240, CORPUS = 200000, SYMBOLS = 64 };

static bool is_gain(const Param *p) { return p->role == ROLE_NORM1 || p->role == ROLE_NORM2; }
static bool reads_norm(const Param *p) {
    return p->role == ROLE_Q || p->role == ROLE_K || p->role == ROLE_V || p->role == ROLE_GATE ||
           p->role == ROLE_UP;
}

// Of a gain the element, of a matrix the column.
static void scale_channel(const Param *p, Tensor t, double factor) {
    int64_t count = tensor_count(t), apart = is_gain(p) ? count : p->shape[1];
    double *x = host_alloc((size_t)count * sizeof *x);
    tensor_to_doubles(x, t);
    for (int64_t i = CHANNEL; i < count; i += apart) x[i] *= factor;
    tensor_from_doubles(t, x);
    free(x);
}

// The optimizer does not see the channel.
static bool accept(void *context, Model *m, double grad_norm) {
    const Sockets *before = context;
    for (int i = 0; i < m->params.count; i++) {
        const Param *p = &m->params.param[i];
        if (is_gain(p) || reads_norm(p)) scale_channel(p, param_total_grad(&m->params, p), 0);
    }
    return before->step.accept(before->step.context, m, grad_norm);
}

static void *plug(Model *m) {
    Sockets *before = host_alloc(sizeof *before);
    *before = m->sockets;
    double factor = ldexp(1, (int)config_number(&m->config, "outlier"));
    for (int i = 0; i < m->params.count; i++) {
        const Param *p = &m->params.param[i];
        if (is_gain(p)) scale_channel(p, param_value(&m->params, p), factor);
        if (reads_norm(p)) scale_channel(p, param_value(&m->params, p), 1 / factor);
    }
    m->sockets.step.context = before;
    m->sockets.step.accept = accept;
    return before;
}

static void unplug(Model *m, void *context) {
    (void)m;
    free(context);
}

static const Technique planted = {
    .name = "planted outlier", .wraps = 1u << SOCKET_STEP, .plug = plug, .unplug = unplug};

// What an outlier costs depends on the text, so these runs have their own, in which two of three symbols
// follow from those before them. On two other texts that were tried, the outlier also cost scales of a
// tensor more than scales of a tile (0.2 % to 0.1 % on noise, 1.3 % to 0.7 % on the other), but less of the
// loss. Returns its path in memory, for the caller to free.
static char *plant_corpus(void) {
    char *text = host_alloc(CORPUS);
    uint64_t symbol = 0, before = 0;
    for (int i = 0; i < CORPUS; i++) {
        uint64_t drawn = rng_bits(1, RNG_TEST, (uint64_t)i), next = (5 * symbol + before % 4) % SYMBOLS;
        before = symbol;
        symbol = drawn % 3 ? next : (drawn >> 32) % SYMBOLS;
        text[i] = (char)(' ' + symbol);
    }
    char *path = input_in_memory(text, CORPUS);
    free(text);
    return path;
}

// As wide as four tiles.
static double last_loss(const char *corpus, int recipe, int power) {
    Config c = fp8_small(corpus, recipe, "lr=0.003 hidden=64 ffn=96 clip=0");
    c.steps = STEPS;
    config_set(&c, "outlier", power);
    return run_of(&c, (const Technique *[]){&fp8_recipe, &planted, NULL}).last;
}

void fp8_outliers(Group ranks) {
    static const int shown[] = {NO_FP8, TE_DELAYED, TE_CURRENT, DEEPSEEK, MXFP8};
    enum { SHOWN = sizeof shown / sizeof *shown };
    double last[2 * SHOWN] = {0};  // without and with; the ranks share the runs
    char *corpus = plant_corpus();
    for (int i = ranks.rank; i < 2 * SHOWN; i += ranks.size)
        last[i] = last_loss(corpus, shown[i / 2], i % 2 ? 20 : 0);
    free(corpus);
    comm_sum_all(last, 2 * SHOWN, ranks);
    say("\n%d steps with one channel of each block norm's output multiplied by 1 or 2^20, its weights "
        "divided by it:\n",
        STEPS);
    say("  %-12s %12s %12s", "last losses", "1", "2^20");
    double costs[2] = {0, 0};  // of scales of a tensor, and of a tile: the mean of two recipes each
    for (int i = 0; i < SHOWN; i++) {
        const Fp8Recipe *r = shown[i] ? &fp8_recipes[shown[i] - 1] : NULL;
        const char *name = r ? r->name : "bf16";
        double without = last[2 * i], with = last[2 * i + 1], off = with / without - 1;
        say("  %-12s %12.4f %12.4f %+9.2f%%", name, without, with, 100 * off);
        report_number("an outlier of 2^20", name, off, "");
        if (r) costs[r->tile > 0] += off / 2;
        else report_that(off == 0, "%s: an outlier changes its loss by %g", name, off);
    }
    // Runs that differ in rounding end a percent or two apart.
    report_that(costs[0] > 0.02 && costs[0] > 1.25 * costs[1],
                "an outlier costs scales of a tensor %g of the loss, and scales of a tile %g", costs[0],
                costs[1]);
}
