// recipe_runs.c: runs on one device, for the tables and pictures of this chapter: what loss training
// reaches, which weights move, how far a gradient is off.
//
// Playbook: "Mixed Precision Training". This file has no main: bf16.c, fp16.c and fp8.c call it.
#include <math.h>
#include <stdlib.h>

#include "mixed_precision.h"

Config small_model(const char *data, const char *more) {
    char *text = format_text(
        "layers=1 hidden=32 heads=4 kv-heads=2 ffn=80 seq=32 micro-batch=8 optimizer=adamw warmup=0 clip=1 "
        "weight-decay=0 %s",
        more);
    Config c = config_default(text);
    free(text);
    c.data = data;
    return c;
}

const char *small_text(const Config *config) { return config->vocab == 256 ? config->data : NULL; }

Run run_of(const Config *config, Techniques techniques) {
    Trainer *t = trainer_new(config, mesh_single(), techniques);
    Run run = {.last = 0};
    int64_t last = (config->steps + 9) / 10;
    for (int64_t step = 0; step < config->steps; step++) {
        train_step(t, NULL);
        if (step >= config->steps - last) run.last += t->loss / (double)last;
    }
    const Params *p = &t->model->params;
    for (int i = 0; i < p->count; i++) {
        const Param *param = &p->param[i];
        if (param->dims > 1) continue;
        double *gain = host_alloc((size_t)param->count * sizeof *gain);
        tensor_to_doubles(gain, param_own_value(p, param, NULL));
        for (int64_t j = 0; j < param->count; j++) run.gains++, run.moved += gain[j] != 1;
        free(gain);
    }
    trainer_free(t);
    return run;
}

// ---- gradients ----

static Record first_gradient(const Config *config, Techniques techniques) {
    Config c = *config;
    c.steps = 1;
    Trainer *t = trainer_new(&c, mesh_single(), techniques);
    Record record = train_record(t, "gradient");
    trainer_free(t);
    return record;
}

double gradient_error(const Config *config, Techniques techniques, double *zero) {
    Config exact = *config;
    exact.dtype = F64;
    Record got = first_gradient(config, techniques), want = first_gradient(&exact, techniques);
    double error = 0, norm = 0, zeros = 0, all = 0;
    for (int i = 0; i < got.tensors; i++)
        for (int64_t j = 0; j < got.count[i]; j++) {
            double x = got.grad[i][j], y = want.grad[i][j];
            error += (x - y) * (x - y);
            norm += y * y;
            all += y != 0;
            zeros += y != 0 && x == 0;
        }
    if (zero) *zero = zeros / all;
    record_free(&got);
    record_free(&want);
    return sqrt(error / norm);
}
