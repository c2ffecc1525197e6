// params.c: the parameter table and its flat storage.
#include "params.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ops.h"
#include "rng.h"

void params_add_unit(Params *params, const char *name) {
    params->unit = realloc(params->unit, (params->units + 1) * sizeof *params->unit);
    CHECK(params->unit, "out of host memory for the parameter table");
    Unit *unit = &params->unit[params->units++];
    *unit = (Unit){.first_param = params->count};
    snprintf(unit->name, sizeof unit->name, "%s", name);
}

void params_add(Params *params, const char *name, int64_t full0, int64_t full1, Cut cut, Group tp,
                bool decays, double init_std) {
    params->param = realloc(params->param, (params->count + 1) * sizeof *params->param);
    CHECK(params->param, "out of host memory for the parameter table");
    Unit *unit = &params->unit[params->units - 1];
    Param *param = &params->param[params->count++];
    *param = (Param){.unit = params->units - 1,
                     .dims = full1 ? 2 : 1,
                     .full = {full0, full1 ? full1 : 1},
                     .cut = cut,
                     .decays = decays,
                     .init_std = init_std,
                     .offset = unit->count};
    snprintf(param->name, sizeof param->name, "%s", name);
    memcpy(param->shape, param->full, sizeof param->shape);
    if (cut != CUT_NONE) {
        int dim = cut == CUT_ROWS ? 0 : 1;
        CHECK(param->full[dim] % tp.size == 0,
              "%s: dimension %d (%lld) is not divisible by the %d ranks of tp", name, dim,
              (long long)param->full[dim], tp.size);
        param->shape[dim] = param->full[dim] / tp.size;
        param->first[dim] = param->shape[dim] * tp.rank;
    }
    param->count = param->shape[0] * param->shape[1];
    unit->params++;
    unit->count += param->count;
}

// Each element's number depends on its place in the whole weight, not on who stores it.
static void draw(Tensor value, const Param *param, uint64_t seed) {
    if (device_is_dry_run()) return;
    double *host = host_alloc(param->count * sizeof *host);
    uint64_t stream = rng_stream(param->name);
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < param->shape[0]; row++)
        for (int64_t column = 0; column < param->shape[1]; column++) {
            int64_t global = (param->first[0] + row) * param->full[1] + param->first[1] + column;
            double *element = &host[row * param->shape[1] + column];
            *element = param->init_std > 0 ? param->init_std * rng_normal(seed, stream, global) : 1;
        }
    tensor_from_doubles(value, host);
    free(host);
}

void params_allocate(Params *params, DType dtype, uint64_t seed, bool f32_accumulation) {
    params->dtype = dtype;
    int64_t all = params_elements(params), first = 0;
    params->values = tensor_new(MEMORY_PARAMETER, dtype, SHAPE(all));
    params->grads = tensor_new(MEMORY_GRADIENT, dtype, SHAPE(all));
    if (f32_accumulation) params->accumulated = tensor_new(MEMORY_GRADIENT, F32, SHAPE(all));
    for (int i = 0; i < params->units; i++) {
        Unit *unit = &params->unit[i];
        unit->first = first;
        unit->values = tensor_view(params->values, first, SHAPE(unit->count));
        unit->grads = tensor_view(params->grads, first, SHAPE(unit->count));
        if (f32_accumulation)
            unit->accumulated = tensor_view(params->accumulated, first, SHAPE(unit->count));
        first += unit->count;
    }
    params_zero_grads(params);
    for (int i = 0; i < params->count; i++)
        draw(param_value(params, &params->param[i]), &params->param[i], seed);
}

void params_free(Params *params) {
    tensor_free(&params->values);
    tensor_free(&params->grads);
    tensor_free(&params->accumulated);
    free(params->param);
    free(params->unit);
    *params = (Params){0};
}

Param *params_find(const Params *params, const char *name) {
    for (int i = 0; i < params->count; i++)
        if (!strcmp(params->param[i].name, name)) return &params->param[i];
    return NULL;
}

static Tensor view_of(Tensor flat, const Param *param) {
    return tensor_view(flat, param->offset, param->dims, param->shape);
}

Tensor param_value(const Params *params, const Param *param) {
    return view_of(params->unit[param->unit].values, param);
}

Tensor param_grad(const Params *params, const Param *param) {
    return view_of(params->unit[param->unit].grads, param);
}

Tensor unit_total_grad(const Unit *unit) {
    return tensor_exists(unit->accumulated) ? unit->accumulated : unit->grads;
}

Tensor param_total_grad(const Params *params, const Param *param) {
    return view_of(unit_total_grad(&params->unit[param->unit]), param);
}

Tensor params_total_grad(const Params *params) {
    return tensor_exists(params->accumulated) ? params->accumulated : params->grads;
}

int64_t params_elements(const Params *params) {
    int64_t count = 0;
    for (int i = 0; i < params->units; i++) count += params->unit[i].count;
    return count;
}

void params_zero_grads(Params *params) {
    for (int i = 0; i < params->units; i++) {
        op_fill(params->unit[i].grads, 0);
        if (tensor_exists(params->unit[i].accumulated)) op_fill(params->unit[i].accumulated, 0);
    }
}

void params_accumulate(Params *params, int unit) {
    Unit *u = &params->unit[unit];
    if (!tensor_exists(u->accumulated)) return;
    op_accumulate(u->accumulated, u->grads);
    op_fill(u->grads, 0);
}

double params_grad_norm(const Params *params) {
    double squares = 0;
    for (int i = 0; i < params->units; i++) squares += op_sum_squares(unit_total_grad(&params->unit[i]));
    return sqrt(squares);
}

const Param *params_first_bad_grad(const Params *params) {
    // Backward runs from the last weight to the first, and so does what broke in it.
    for (int i = params->count - 1; i >= 0; i--) {
        const Param *param = &params->param[i];
        if (!isfinite(op_sum_squares(param_total_grad(params, param)))) return param;
    }
    return NULL;
}
