// optim.c: AdamW and SGD over the flat tensors of the parameter table, the learning rate's course, and
// clipping.
#include "optim.h"

#include <math.h>
#include <stdlib.h>

#include "tensor/ops.h"

Optimizer optimizer_new(const Config *config, const Params *params) {
    Optimizer optimizer = {.kind = config->optimizer,
                           .beta1 = config->beta1,
                           .beta2 = config->beta2,
                           .eps = config->adam_eps,
                           .weight_decay = config->weight_decay,
                           .units = params->units};
    optimizer.unit = host_alloc(params->units * sizeof *optimizer.unit);
    for (int i = 0; i < params->units; i++) optimizer.unit[i] = (UnitState){0};
    return optimizer;
}

void optimizer_free(Optimizer *optimizer) {
    for (int i = 0; i < optimizer->units; i++) {
        tensor_free(&optimizer->unit[i].m);
        tensor_free(&optimizer->unit[i].v);
        tensor_free(&optimizer->unit[i].master);
    }
    free(optimizer->unit);
    *optimizer = (Optimizer){0};
}

static bool allocated(const Optimizer *optimizer) {
    return optimizer->units > 0 &&
           (tensor_exists(optimizer->unit[0].m) || tensor_exists(optimizer->unit[0].master));
}

void optimizer_allocate(Optimizer *optimizer, const Params *params) {
    if (allocated(optimizer)) return;
    Recipe r = params->recipe;
    for (int i = 0; i < optimizer->units; i++) {
        UnitState *unit = &optimizer->unit[i];
        int64_t count = params->unit[i].own_count;
        if (optimizer->kind == OPTIMIZER_ADAMW) {
            unit->m = tensor_new(MEMORY_OPTIMIZER, r.moment, SHAPE(count));
            unit->v = tensor_new(MEMORY_OPTIMIZER, r.moment, SHAPE(count));
            op_fill(unit->m, 0);
            op_fill(unit->v, 0);
        }
        if (recipe_has_masters(r)) {
            unit->master = tensor_new(MEMORY_OPTIMIZER, r.master, SHAPE(count));
            op_copy(unit->master, params->unit[i].own_values);
        }
    }
}

// The part [first, first + count) of a flat tensor; "no tensor" stays none.
static Tensor part(Tensor flat, int64_t first, int64_t count) {
    return tensor_exists(flat) ? tensor_view(flat, first, SHAPE(count)) : flat;
}

// Steps what this rank owns of one parameter.
static void step_param(Optimizer *optimizer, const Params *params, const Param *param, double lr,
                       double grad_scale) {
    const Unit *unit = &params->unit[param->unit];
    const UnitState *state = &optimizer->unit[param->unit];
    int64_t from, count;
    if (!param_overlap(param, unit->own_first, unit->own_count, &from, &count)) return;
    from -= unit->own_first;
    Tensor value = part(unit->own_values, from, count);
    Tensor grad = part(unit->own_grads, from, count);
    Tensor master = part(state->master, from, count);
    if (optimizer->kind == OPTIMIZER_SGD) {
        op_sgd(value, master, grad, lr, grad_scale);
        return;
    }
    AdamW hyper = {.lr = lr,
                   .beta1 = optimizer->beta1,
                   .beta2 = optimizer->beta2,
                   .eps = optimizer->eps,
                   .weight_decay = param->decays ? optimizer->weight_decay : 0,
                   .grad_scale = grad_scale,
                   .step = optimizer->step};
    op_adamw(value, master, part(state->m, from, count), part(state->v, from, count), grad, hyper);
}

void optimizer_begin(Optimizer *optimizer, const Params *params) {
    optimizer_allocate(optimizer, params);
    optimizer->step++;
}

void optimizer_step_unit(Optimizer *optimizer, Params *params, int unit, double lr, double grad_scale) {
    const Unit *u = &params->unit[unit];
    for (int i = u->first_param; i < u->first_param + u->params; i++)
        step_param(optimizer, params, &params->param[i], lr, grad_scale);
}

void optimizer_step(Optimizer *optimizer, Params *params, double lr, double grad_scale) {
    optimizer_begin(optimizer, params);
    for (int unit = 0; unit < params->units; unit++)
        optimizer_step_unit(optimizer, params, unit, lr, grad_scale);
}

double learning_rate(const Config *config, int64_t step) {
    if (config->optimizer == OPTIMIZER_SGD) return config->lr;
    if (step < config->warmup) return config->lr * (double)(step + 1) / (double)config->warmup;
    double span = (double)(config->steps - config->warmup);
    double done = span > 0 ? ((double)(step - config->warmup) + 1) / span : 0;
    if (done > 1) done = 1;
    return config->lr * (0.1 + 0.9 * 0.5 * (1 + cos(acos(-1.0) * done)));
}

double clip_scale(double norm, double clip) { return clip > 0 && norm > clip ? clip / norm : 1; }
