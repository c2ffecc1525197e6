// test_convergence.c: what fp8 --long tells, of a tiny model and few steps: each recipe's losses are those of
// runs of its own, from random weights and from the trained ones of bf16, compared with the mean of bf16's
// two runs. TAP.
#include <cjson/cJSON.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "08_mixed_precision/mixed_precision.h"

enum { SEEDS = 2, HELD_OUT = 8, NEXT_SAMPLES = 100 };

static Config tiny(void) {
    return config_default("layers=1 hidden=32 heads=2 kv-heads=2 ffn=32 vocab=256 seq=8 micro-batch=2 "
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

// fp8_convergence's figures, as --json has them.
static cJSON *told(void) {
    char file[] = "/tmp/test_convergence_XXXXXX";
    assert_int_equal(close(mkstemp(file)), 0);
    report_json(file);
    const Config c = tiny();
    fp8_convergence(mesh_single().world, &c, HELD_OUT, SEEDS);
    report_verdict("told");
    static char text[1 << 16];
    FILE *in = fopen(file, "r");
    assert_non_null(in);
    text[fread(text, 1, sizeof text - 1, in)] = 0;
    fclose(in);
    unlink(file);
    cJSON *json = cJSON_Parse(text);
    assert_non_null(json);
    return json;
}

static double figure(const cJSON *table, const char *name) {
    const cJSON *number = cJSON_GetObjectItem(table, name);
    if (!number) fail_msg("%s has no row", name);
    return cJSON_GetObjectItem(number, "value")->valuedouble;
}

static void each_recipe_is_told_by_its_own_runs(void **state) {
    (void)state;
    static const char *const titles[] = {"3 steps from random weights, of bf16's",
                                         "3 steps from trained weights, of bf16's"};
    cJSON *json = told();
    double *start[SEEDS];
    for (int late = 0; late < 2; late++) {
        const cJSON *table = cJSON_GetObjectItem(cJSON_GetObjectItem(json, "numbers"), titles[late]);
        if (!table) fail_msg("there is no table \"%s\"", titles[late]);
        double bf16[SEEDS];
        for (int i = 0; i < SEEDS; i++) {
            const int64_t seed = i + 1 + (late ? NEXT_SAMPLES : 0);
            bf16[i] = log_loss(NO_FP8, seed, late ? start[i] : NULL, late ? NULL : &start[i]);
        }
        // bf16's two runs are as far from their mean; the weights of one of them have been moved
        const double base = figure(table, "bf16");
        assert_true(fabs(base + figure(table, "bf16, moved")) < 1e-12 && fabs(base) > 1e-7);
        for (int recipe = 1; recipe <= fp8_recipe_count; recipe++) {
            double off = base;
            for (int i = 0; i < SEEDS; i++) {
                const int64_t seed = i + 1 + (late ? NEXT_SAMPLES : 0);
                off += (log_loss(recipe, seed, late ? start[i] : NULL, NULL) - bf16[i]) / SEEDS;
            }
            const char *name = fp8_recipes[recipe - 1].name;
            const double said = figure(table, name);
            if (!(fabs(said - off) < 1e-9))
                fail_msg("%s: %s is told to be %.9g off, and is %.9g", titles[late], name, said, off);
        }
    }
    for (int i = 0; i < SEEDS; i++) free(start[i]);
    cJSON_Delete(json);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_recipe_is_told_by_its_own_runs)};
    return cmocka_run_group_tests_name("convergence", tests, NULL, NULL);
}
