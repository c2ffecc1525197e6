// optim.c: AdamW and SGD over the flat tensors of the parameter table, the learning rate's schedule, and
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
            unit->v = tensor_new(MEMORY_OPTIMIZER, r.second, SHAPE(count));
            op_fill(unit->m, 0);
            op_fill(unit->v, 0);
        }
        if (recipe_has_masters(r)) {
            unit->master = tensor_new(MEMORY_OPTIMIZER, r.master, SHAPE(count));
            op_copy(unit->master, params->unit[i].own_values);
        }
    }
}

static double decay_of(const Optimizer *optimizer, const Param *param) {
    return optimizer->kind == OPTIMIZER_ADAMW && param->decays ? optimizer->weight_decay : 0;
}

// This rank's own part of one parameter, which an optimizer steps.
typedef struct Part {
    Tensor value, master, m, v, grad;  // master, m, v {0} where there is none
} Part;

static void step_part(const Optimizer *optimizer, Part p, const Param *param, double lr,
                      double grad_scale) {
    if (optimizer->kind == OPTIMIZER_SGD) {
        op_sgd(p.value, p.master, p.grad, lr, grad_scale);
        return;
    }
    AdamW hyper = {.lr = lr,
                   .beta1 = optimizer->beta1,
                   .beta2 = optimizer->beta2,
                   .eps = optimizer->eps,
                   .weight_decay = decay_of(optimizer, param),
                   .grad_scale = grad_scale,
                   .step = optimizer->step};
    op_adamw(p.value, p.master, p.m, p.v, p.grad, hyper);
}

static Tensor widened(const Recipe *r, Tensor stored, StatePart at) {
    if (!tensor_exists(stored)) return stored;
    Tensor wide = tensor_new(MEMORY_OPTIMIZER, dtype_full(r->weight), SHAPE(tensor_count(stored)));
    if (r->rounding) r->rounding->load(r->rounding->context, wide, stored, at);
    else op_copy(wide, stored);
    return wide;
}

// Ends `wide`.
static void narrowed(const Recipe *r, Tensor stored, Tensor wide, StatePart at) {
    if (!tensor_exists(stored)) return;
    if (r->rounding) r->rounding->store(r->rounding->context, stored, wide, at);
    else op_copy(stored, wide);
    tensor_free(&wide);
}

// The same step for state that is stored in fewer bits than it is computed in. A fused kernel would keep
// the wide values in registers, so the memory peaks are restored.
static void step_narrow(const Optimizer *optimizer, const Recipe *r, Part p, const Param *param,
                        int64_t first, double lr, double grad_scale) {
    Memory before = memory_account();
    StatePart at = {.param = param, .first = first, .step = optimizer->step, .seed = r->seed};
    StatePart m = at, v = at, weight = at;
    m.kind = STATE_M, v.kind = STATE_V;
    weight.kind = tensor_exists(p.master) ? STATE_MASTER : STATE_VALUE;
    Tensor stored = tensor_exists(p.master) ? p.master : p.value;
    Part wide = {.value = widened(r, stored, weight), .grad = p.grad};
    wide.m = widened(r, p.m, m), wide.v = widened(r, p.v, v);
    step_part(optimizer, wide, param, lr, grad_scale);
    narrowed(r, p.m, wide.m, m);
    narrowed(r, p.v, wide.v, v);
    narrowed(r, stored, wide.value, weight);
    if (tensor_exists(p.master)) {  // the weight is what its master is stored as
        Tensor master = widened(r, p.master, weight);
        op_copy(p.value, master);
        tensor_free(&master);
    }
    memory_restore_peak(&before);
}

// Whether state is stored in fewer bits than it is computed in.
static bool is_narrow(const Recipe *r) {
    DType full = dtype_full(r->weight);
    return r->rounding || (recipe_has_masters(*r) && r->master != full) || r->moment != full ||
           r->second != full;
}

// Steps what this rank owns of one parameter, or of several that are joined.
static void step_param(Optimizer *optimizer, const Params *params, const Param *param, double lr,
                       double grad_scale) {
    const Unit *unit = &params->unit[param->unit];
    const UnitState *state = &optimizer->unit[param->unit];
    const Recipe *r = &params->recipe;
    int64_t from, count;
    if (!param_overlap(param, unit->own_first, unit->own_count, &from, &count)) return;
    int64_t at = from - unit->own_first;
    Part p = {.value = tensor_part(unit->own_values, at, count),
              .master = tensor_part(state->master, at, count),
              .m = tensor_part(state->m, at, count),
              .v = tensor_part(state->v, at, count),
              .grad = tensor_part(unit->own_grads, at, count)};
    if (is_narrow(r)) step_narrow(optimizer, r, p, param, from - param->offset, lr, grad_scale);
    else step_part(optimizer, p, param, lr, grad_scale);
}

void optimizer_begin(Optimizer *optimizer, const Params *params) {
    optimizer_allocate(optimizer, params);
    optimizer->step++;
}

// Consecutive weights with the same decay are stepped in one pass, as if they were one weight. Narrow state
// is not: each weight's state has its own scales, and needs a wide copy for the step.
void optimizer_step_unit(Optimizer *optimizer, Params *params, int unit, double lr, double grad_scale) {
    const Param *param = params->param + params->unit[unit].first_param;
    const Param *end = param + params->unit[unit].params, *next;
    for (; param < end; param = next) {
        Param joined = *param;
        for (next = param + 1; next < end && !is_narrow(&params->recipe) &&
                               decay_of(optimizer, next) == decay_of(optimizer, param);
             next++)
            joined.count += next->count;
        step_param(optimizer, params, next > param + 1 ? &joined : param, lr, grad_scale);
    }
}

// ---- for checkpoints ----

static bool is_scaled(const Params *params) {
    return params->recipe.rounding && params->recipe.rounding->scaled;
}

DType optimizer_saved_dtype(const Params *params, StateTensor state) {
    if (!tensor_exists(state.flat)) return params->recipe.weight;
    return is_scaled(params) ? F32 : state.flat.dtype;
}

void optimizer_write(const Params *params, const Param *param, StateTensor state, ParamRange write,
                     void *context) {
    int64_t from;
    Tensor part = param_own_part(params, param, state.flat, &from);
    if (!tensor_exists(part)) return;
    Memory before = memory_account();
    StatePart at = {.param = param, .kind = state.kind};
    Tensor wide = is_scaled(params) ? widened(&params->recipe, part, at) : tensor_share(part);
    param_write_part(params, param, wide, from, write, context);
    tensor_free(&wide);
    memory_restore_peak(&before);
}

void optimizer_read(const Params *params, const Param *param, StateTensor state, ParamRange read,
                    void *context) {
    int64_t from;
    Tensor part = param_own_part(params, param, state.flat, &from);
    if (!tensor_exists(part)) return;
    if (!is_scaled(params)) {
        param_read_part(param, part, from, read, context);
        return;
    }
    Memory before = memory_account();
    Tensor wide =
        tensor_new(MEMORY_OPTIMIZER, optimizer_saved_dtype(params, state), SHAPE(tensor_count(part)));
    param_read_part(param, wide, from, read, context);
    narrowed(&params->recipe, part, wide, (StatePart){.param = param, .kind = state.kind});
    memory_restore_peak(&before);
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
