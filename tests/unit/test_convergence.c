// test_convergence.c [--ranks N] [PATTERN]: what fp8 --long tells, of a tiny model and few steps: each
// recipe's losses are those of runs of its own, from random weights and from the trained ones of bf16,
// compared with the mean of bf16's two runs. TAP.
#include <cjson/cJSON.h>
#include <math.h>
#include <unistd.h>

#include "08_mixed_precision/mixed_precision.h"
#include "ranks.h"

enum { SEEDS = 2, HELD_OUT = 8, NEXT_SAMPLES = 100 };

static Config tiny(void) {
    return config_default(
        "layers=1 hidden=32 heads=2 kv-heads=2 ffn=32 vocab=256 seq=8 micro-batch=2 "
        "dtype=bf16 optimizer=adamw lr=0.01 warmup=0 steps=3");
}

// Copies all weights into a new array, or, if there is one, from it.
static double *weights(const Trainer *t, double *from) {
    const Params *p = &t->model->params;
    double *copy = from ? from : host_alloc((size_t)params_elements(p) * sizeof *copy), *at = copy;
    for (int i = 0; i < p->count; at += p->param[i++].count)
        if (from) tensor_from_doubles(param_value(p, &p->param[i]), at);
        else tensor_to_doubles(at, param_value(p, &p->param[i]));
    return copy;
}

// The logarithm of the held-out loss of one run. start: NULL, or what it begins with; end: NULL, or where its
// weights go, for the caller to free.
static double log_loss(int recipe, int64_t seed, double *start, double **end) {
    Config c = tiny();
    c.seed = seed;
    fp8_set(&c, recipe);
    Trainer *t = trainer_new(&c, mesh_single(), fp8_one_device);
    if (start) weights(t, start);
    for (int64_t step = 0; step < c.steps; step++) train_step(t, NULL);
    if (end) *end = weights(t, NULL);
    const double loss = log(held_out_loss(t, HELD_OUT));
    trainer_free(t);
    return loss;
}

// fp8_convergence's figures, as rank 0 writes them for --json. Ranks share the seeds, and each goes on from
// the weights that it has trained.
static cJSON *told(void) {
    static char text[1 << 16], file[] = "/tmp/test_convergence_XXXXXX";
    if (me == 0) close(mkstemp(file));
    report_json(file);
    const Config c = tiny();
    fp8_convergence(world, &c, HELD_OUT, SEEDS);
    report_verdict("told");
    FILE *in = me == 0 ? fopen(file, "r") : NULL;
    if (!in) return NULL;
    text[fread(text, 1, sizeof text - 1, in)] = 0;
    fclose(in);
    unlink(file);
    return cJSON_Parse(text);
}

static double figure(const cJSON *table, const char *name) {
    const cJSON *value = cJSON_GetObjectItem(cJSON_GetObjectItem(table, name), "value");
    return value ? value->valuedouble : NAN;
}

static void check_table(const cJSON *table, double *start[SEEDS], bool late) {
    const int64_t first = 1 + (late ? NEXT_SAMPLES : 0);
    double bf16[SEEDS];
    for (int i = 0; i < SEEDS; i++)
        bf16[i] = log_loss(NO_FP8, first + i, late ? start[i] : NULL, late ? NULL : &start[i]);
    // bf16's two runs are as far from their mean; the weights of one of them have been moved
    const double base = figure(table, "bf16");
    if (!(fabs(base + figure(table, "bf16, moved")) < 1e-12 && fabs(base) > 1e-7))
        note("bf16 is %g off the mean of its two runs, and %g", base, figure(table, "bf16, moved"));
    for (int recipe = 1; recipe <= fp8_recipe_count; recipe++) {
        double off = base;
        for (int i = 0; i < SEEDS; i++)
            off += (log_loss(recipe, first + i, late ? start[i] : NULL, NULL) - bf16[i]) / SEEDS;
        const char *name = fp8_recipes[recipe - 1].name;
        const double said = figure(table, name);
        if (!(fabs(said - off) < 1e-9)) note("%s is told to be %.9g off, and is %.9g", name, said, off);
    }
}

static void each_recipe_is_told_by_its_own_runs(void) {
    static const char *const titles[] = {"3 steps from random weights, of bf16's",
                                         "3 steps from trained weights, of bf16's"};
    cJSON *json = told();
    if (me) return;
    double *start[SEEDS];
    for (int late = 0; late < 2; late++)
        check_table(cJSON_GetObjectItem(cJSON_GetObjectItem(json, "numbers"), titles[late]), start, late);
    for (int i = 0; i < SEEDS; i++) free(start[i]);
    cJSON_Delete(json);
}

static const RankTest tests[] = {TEST(each_recipe_is_told_by_its_own_runs)};

int main(int argc, char **argv) {
    const char *pattern = ranks_start(argc, argv, 2);
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
