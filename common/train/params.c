// params.c: the parameter table and its flat storage.
#include "params.h"

#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "tensor/ops.h"
#include "tensor/rng.h"

// ---- building ----

static const Group alone = {.size = 1, .name = "one"};

Recipe recipe_standard(DType dtype) {
    // 16-bit sums lose small terms, and 16-bit weights lose small steps.
    DType wide = dtype_size(dtype) < 4 ? F32 : dtype;
    return (Recipe){.weight = dtype,
                    .gradient = dtype,
                    .sum = wide,
                    .master = wide,
                    .moment = wide,
                    .second = wide};
}

void params_begin(Params *params, const Mesh *mesh) {
    *params = (Params){.world = mesh->world, .within = mesh->tp, .spread = mesh->tp_pp};
    // Until a technique says otherwise every rank of dp x cp trains a replica of the model.
    params->replicas = mesh->dp_cp;
}

void params_add_unit(Params *params, const char *name) {
    params->unit = realloc(params->unit, (params->units + 1) * sizeof *params->unit);
    CHECK(params->unit, "out of host memory for the parameter table");
    Unit *unit = &params->unit[params->units++];
    *unit = (Unit){.first_param = params->count, .replicas = params->replicas, .spread = params->spread};
    snprintf(unit->name, sizeof unit->name, "%s", name);
}

Param *params_add(Params *params, const ParamSpec *spec) {
    params->param = realloc(params->param, (params->count + 1) * sizeof *params->param);
    CHECK(params->param, "out of host memory for the parameter table");
    Param *param = &params->param[params->count++];
    int64_t columns = spec->in ? spec->in : 1;
    *param = (Param){.role = spec->role,
                     .unit = params->units - 1,
                     .here = true,
                     .dims = spec->in ? 2 : 1,
                     .full = {spec->out, columns},
                     .shape = {spec->out, columns},
                     .copies = params->within,
                     .parts = alone,
                     .decays = spec->decays,
                     .init_std = spec->init_std};
    snprintf(param->name, sizeof param->name, "%s", spec->name);
    params->unit[param->unit].params++;
    return param;
}

// ---- sharding ----

void param_shard(Param *param, int dim, int64_t first, int64_t count) {
    param->sharded = true;
    param_set_copies(param, alone, false);
    if (!param->here) return;
    CHECK(dim >= 0 && dim < param->dims && first >= 0 && count >= 0,
          "%s, of %d dimensions, cannot be sharded along dimension %d to %lld from %lld on", param->name,
          param->dims, dim, (long long)count, (long long)first);
    param->shape[dim] = count;
    param->first[dim] = first;
}

void param_set_copies(Param *param, Group copies, bool partial) {
    param->copies = copies;
    param->parts = partial ? copies : alone;
}

void unit_set_holders(Params *params, int unit, Group stages, const int *holder, int holders) {
    Unit *u = &params->unit[unit];
    bool here = false;
    u->stages = stages;
    u->holders = holders;
    u->holder = host_alloc(holders * sizeof *u->holder);
    for (int i = 0; i < holders; i++) {
        u->holder[i] = holder[i];
        here = here || holder[i] == stages.rank;
    }
    for (int i = u->first_param; i < u->first_param + u->params && !here; i++) {
        params->param[i].here = false;
        params->param[i].shape[0] = 0;
    }
}

// Sets members to the ranks at the places of this group in the stage of each holder; the ranks of one stage
// are `apart` from those of the next.
static int on_holders(const Unit *u, Group group, int *members) {
    int apart = u->stages.member[1] - u->stages.member[0], count = 0;
    for (int i = 0; i < u->holders; i++)
        for (int j = 0; j < group.size; j++) {
            int here = group.member ? group.member[j] : u->stages.member[u->stages.rank];
            members[count++] = here + (u->holder[i] - u->stages.rank) * apart;
        }
    return count;
}

// One group for all weights with the same members: all ranks make them in the order of the table.
static Group joined_group(Params *params, const Unit *u, Group group) {
    int members[u->holders * group.size], count = on_holders(u, group, members);
    for (int i = 0; i < params->joined_count; i++)
        if (params->joined[i].size == count && !memcmp(params->joined[i].member, members, sizeof members))
            return params->joined[i];
    CHECK(params->joined_count < JOINED_MOST, "more than %d groups of copies across stages", JOINED_MOST);
    return params->joined[params->joined_count++] = comm_group("copies", LINE_DP, members, count);
}

static void join_holders(Params *params) {
    for (int i = 0; i < params->count; i++) {
        Param *param = &params->param[i];
        const Unit *u = &params->unit[param->unit];
        if (u->holders <= 1) continue;
        param->parts = joined_group(params, u, param->parts);
        param->copies = joined_group(params, u, param->copies);
    }
}

// ---- where elements are ----

bool param_overlap(const Param *param, int64_t first, int64_t count, int64_t *from, int64_t *shared) {
    int64_t param_end = param->offset + param->count, end = first + count;
    *from = param->offset > first ? param->offset : first;
    *shared = (param_end < end ? param_end : end) - *from;
    return *shared > 0;
}

ParamRun param_run(const Param *param, int64_t i, int64_t end) {
    int64_t row = i / param->shape[1], column = i % param->shape[1], global = param->first[0] + row;
    int64_t count = param->shape[1] - column;
    return (ParamRun){
        .stored = i,
        .whole = global < param->full[0] ? global * param->full[1] + param->first[1] + column : -1,
        .count = count < end - i ? count : end - i};
}

// A proof creates the same model several times, whole or in shards, and half of its start-up would be
// drawing weights. So the numbers drawn for a weight are remembered, element by element; 0: not drawn yet.
// Large models, which are made once, are not remembered.
typedef struct Drawn {
    uint64_t seed, stream;
    int64_t count;
    double *normal;
} Drawn;

enum { DRAWN_MOST = 1 << 20 };  // numbers that are remembered in all

static double *drawn_before(uint64_t seed, uint64_t stream, int64_t count) {
    static Drawn *drawn;
    static int weights;
    static int64_t all;
    for (int i = 0; i < weights; i++)
        if (drawn[i].seed == seed && drawn[i].stream == stream && drawn[i].count == count)
            return drawn[i].normal;
    if (count > DRAWN_MOST - all) return NULL;
    all += count;
    drawn = realloc(drawn, (size_t)(weights + 1) * sizeof *drawn);
    double *normal = calloc((size_t)count, sizeof *normal);
    CHECK(drawn && normal, "out of host memory for the weights");
    drawn[weights++] = (Drawn){seed, stream, count, normal};
    return normal;
}

static double normal_at(double *drawn, uint64_t seed, uint64_t stream, int64_t i) {
    if (!drawn) return rng_normal(seed, stream, i);
    if (drawn[i] == 0) drawn[i] = rng_normal(seed, stream, i);
    return drawn[i];
}

// Elements from … from + count - 1 of the parameter, as stored. Each one's number depends on its place in
// the whole weight, not on who stores it.
static void draw_piece(Tensor values, const Param *param, int64_t from, int64_t count, uint64_t seed) {
    double *host = host_alloc(count * sizeof *host);
    uint64_t stream = rng_stream(param->name);
    int64_t columns = param->shape[1], rows = (from + count + columns - 1) / columns;
    double *drawn =
        param->init_std > 0 ? drawn_before(seed, stream, param->full[0] * param->full[1]) : NULL;
#pragma omp parallel for schedule(static)
    for (int64_t row = from / columns; row < rows; row++) {
        int64_t begin = row * columns < from ? from : row * columns;
        ParamRun run = param_run(param, begin, from + count);
        for (int64_t j = 0; j < run.count; j++)
            host[begin - from + j] = run.whole < 0 ? 0
                                     : param->init_std > 0
                                         ? param->init_std * normal_at(drawn, seed, stream, run.whole + j)
                                         : 1;
    }
    tensor_from_doubles(values, host);
    free(host);
}

// In pieces, so that little host memory is needed.
static void draw(Tensor values, const Param *param, int64_t from, int64_t count, uint64_t seed) {
    enum { PIECE = 1 << 22 };
    if (device_is_dry_run()) return;
    for (int64_t done = 0; done < count; done += PIECE) {
        int64_t piece = count - done < PIECE ? count - done : PIECE;
        draw_piece(tensor_view(values, done, SHAPE(piece)), param, from + done, piece, seed);
    }
}

// ---- storage ----

static bool is_coded(DType dtype) { return dtype == E4M3 || dtype == E5M2; }

void params_measure(Params *params) {
    int64_t first = 0;
    for (int i = 0; i < params->units; i++) {
        Unit *unit = &params->unit[i];
        unit->count = 0;
        for (int j = unit->first_param; j < unit->first_param + unit->params; j++) {
            Param *param = &params->param[j];
            param->offset = unit->count;
            param->count = param->shape[0] * param->shape[1];
            unit->count += param->count;
        }
        unit->first = first;
        first += unit->count;
    }
}

Group params_norm_group(const Params *params) {
    if (params->counted) return params->world;
    for (int i = 0; i < params->units; i++)
        if (params->unit[i].replicas.size != params->world.size) return params->world;
    return alone;
}

// Without ZeRO a rank owns all that it stores. The norm counts it on the first replica only or, if all
// ranks have every gradient and need no message, on each.
static void own_all(Params *params) {
    bool on_each = params_norm_group(params).size == 1;
    for (int i = 0; i < params->units; i++) {
        Unit *unit = &params->unit[i];
        if (!params->sharded) unit->own_count = unit->count;
        if (!params->counted && (on_each || unit->replicas.rank == 0)) unit->counted_count = unit->count;
    }
}

static void allocate_units(Params *params) {
    int64_t all = params_elements(params), own = 0, own_first = 0;
    Sharding sharding = params->sharding;
    Recipe r = params->recipe;
    if (is_coded(r.gradient)) {
        CHECK(recipe_has_accumulators(r), "gradients in %s need a wider sum", dtype_name(r.gradient));
        params->grad_scale = tensor_new(MEMORY_PARAMETER, F32, SHAPE(params->count));
        op_fill(params->grad_scale, 1);
    }
    for (int i = 0; i < params->units; i++) own += params->unit[i].own_count;
    if (sharding < SHARD_VALUES) params->values = tensor_new(MEMORY_PARAMETER, r.weight, SHAPE(all));
    else params->own_values = tensor_new(MEMORY_PARAMETER, r.weight, SHAPE(own));
    if (sharding < SHARD_GRADS) {
        params->grads = tensor_new(MEMORY_GRADIENT, r.gradient, SHAPE(all));
        if (recipe_has_accumulators(r))
            params->accumulated = tensor_new(MEMORY_GRADIENT, r.sum, SHAPE(all));
    } else {
        params->own_grads = tensor_new(MEMORY_GRADIENT, r.sum, SHAPE(own));
    }
    for (int i = 0; i < params->units; i++) {
        Unit *unit = &params->unit[i];
        unit->values = tensor_part(params->values, unit->first, unit->count);
        unit->grads = tensor_part(params->grads, unit->first, unit->count);
        unit->accumulated = tensor_part(params->accumulated, unit->first, unit->count);
        unit->own_values = sharding < SHARD_VALUES
                               ? tensor_part(unit->values, unit->own_first, unit->own_count)
                               : tensor_part(params->own_values, own_first, unit->own_count);
        unit->own_grads = sharding < SHARD_GRADS
                              ? tensor_part(unit_total_grad(unit), unit->own_first, unit->own_count)
                              : tensor_part(params->own_grads, own_first, unit->own_count);
        own_first += unit->own_count;
    }
}

void params_allocate(Params *params, Recipe recipe, uint64_t seed) {
    params->recipe = recipe;
    join_holders(params);
    params_measure(params);
    own_all(params);
    allocate_units(params);
    params_zero_grads(params);
    for (int i = 0; i < params->count; i++) {
        const Param *param = &params->param[i];
        int64_t from = 0;
        Tensor values = params->sharding < SHARD_VALUES
                            ? tensor_part(params->unit[param->unit].values, param->offset, param->count)
                            : param_own_value(params, param, &from);
        if (tensor_exists(values)) draw(values, param, from, tensor_count(values), seed);
    }
}

void unit_new_grads(const Params *params, Unit *unit) {
    unit->grads = tensor_new(MEMORY_GRADIENT, params->recipe.gradient, SHAPE(unit->count));
    op_fill(unit->grads, 0);
}

void unit_free_grads(Unit *unit) { tensor_free(&unit->grads); }

void params_free(Params *params) {
    tensor_free(&params->values);
    tensor_free(&params->grads);
    tensor_free(&params->accumulated);
    tensor_free(&params->own_values);
    tensor_free(&params->own_grads);
    tensor_free(&params->grad_scale);
    for (int i = 0; i < params->units; i++) free(params->unit[i].holder);
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
    CHECK(param->here, "%s is not stored on this rank", param->name);
    return tensor_view(flat, param->offset, param->dims, param->shape);
}

Tensor param_value(const Params *params, const Param *param) {
    return view_of(params->unit[param->unit].values, param);
}

Tensor param_grad(const Params *params, const Param *param) {
    return view_of(params->unit[param->unit].grads, param);
}

// ---- gradients as 8-bit codes: a scale for each weight's ----

static const Tile whole_tensor = {0, 0};

static Tensor in_a_row(Tensor t) { return tensor_view(t, 0, SHAPE(1, tensor_count(t))); }
static Tensor scale_of(const Params *params, const Param *param) {
    return tensor_view(params->grad_scale, param - params->param, SHAPE(1, 1));
}

Tensor param_grad_begin(const Params *params, const Param *param) {
    Tensor stored = param_grad(params, param);
    if (!is_coded(stored.dtype)) return stored;
    Tensor wide = tensor_new(MEMORY_ACTIVATION, params->recipe.weight, param->dims, param->shape);
    if (param->count) op_decode(in_a_row(wide), in_a_row(stored), scale_of(params, param), whole_tensor);
    return wide;
}

void param_grad_end(const Params *params, const Param *param, Tensor grad) {
    Tensor stored = param_grad(params, param);
    if (!is_coded(stored.dtype)) return;
    if (param->count) {
        Tensor scale = scale_of(params, param);
        op_fill(scale, 0);
        op_tile_amax(scale, in_a_row(grad), false, whole_tensor);
        op_tile_scale(scale, scale, stored.dtype, SCALE_REAL);
        op_encode(in_a_row(stored), in_a_row(grad), scale, false, whole_tensor);
    }
    tensor_free(&grad);
}

void unit_widen_grads(const Params *params, const Unit *unit, Tensor to, double beta) {
    if (!is_coded(unit->grads.dtype)) {
        if (beta == 1) op_accumulate(to, unit->grads);
        else op_copy(to, unit->grads);
        return;
    }
    for (int i = unit->first_param; i < unit->first_param + unit->params; i++) {
        const Param *param = &params->param[i];
        if (!param->here || !param->count) continue;
        Tensor part = tensor_view(to, param->offset, SHAPE(1, param->count));
        Tensor wide = beta == 1 ? tensor_like(MEMORY_ACTIVATION, part) : part;
        op_decode(wide, in_a_row(param_grad(params, param)), scale_of(params, param), whole_tensor);
        if (beta != 1) continue;
        op_accumulate(part, wide);
        tensor_free(&wide);
    }
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

Tensor param_part(const Param *param, Tensor held, int64_t first, int64_t *from) {
    int64_t begin, count;
    if (!param_overlap(param, first, tensor_count(held), &begin, &count)) return (Tensor){0};
    if (from) *from = begin - param->offset;
    return tensor_view(held, begin - first, SHAPE(count));
}

Tensor param_own_part(const Params *params, const Param *param, Tensor flat, int64_t *from) {
    return param_part(param, flat, params->unit[param->unit].own_first, from);
}

Tensor param_own_value(const Params *params, const Param *param, int64_t *from) {
    return param_own_part(params, param, params->unit[param->unit].own_values, from);
}

Tensor param_own_grad(const Params *params, const Param *param, int64_t *from) {
    return param_own_part(params, param, params->unit[param->unit].own_grads, from);
}

void params_zero_grads(Params *params) {
    for (int i = 0; i < params->units; i++) {
        const Unit *unit = &params->unit[i];
        if (params->sharding >= SHARD_GRADS) op_fill(unit->own_grads, 0);
        if (tensor_exists(unit->grads)) op_fill(unit->grads, 0);
        if (tensor_exists(unit->accumulated)) op_fill(unit->accumulated, 0);
    }
}

void params_accumulate(Params *params, int unit) {
    Unit *u = &params->unit[unit];
    if (!tensor_exists(u->accumulated)) return;
    unit_widen_grads(params, u, u->accumulated, 1);
    op_fill(u->grads, 0);
    u->waits = false;
}
