// params.c: the parameter table, its flat storage, and the way from what each rank stores to whole weights.
#include "params.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "tensor/ops.h"
#include "tensor/rng.h"

// ---- building ----

void params_begin(Params *params, const Mesh *mesh, Sharding sharding) {
    *params = (Params){.sharding = sharding, .world = mesh->world, .dp = mesh->dp, .tp = mesh->tp};
}

void params_add_unit(Params *params, const char *name) {
    params->unit = realloc(params->unit, (params->units + 1) * sizeof *params->unit);
    CHECK(params->unit, "out of host memory for the parameter table");
    Unit *unit = &params->unit[params->units++];
    *unit = (Unit){.first_param = params->count};
    snprintf(unit->name, sizeof unit->name, "%s", name);
}

// What this rank of tp stores of the weight.
static void cut(Param *param, int64_t heads, Group tp, Group copies) {
    const Group alone = {.size = 1, .name = "one"};
    param->copies = param->cut == CUT_NONE ? tp : alone;
    if (param->cut == CUT_NONE) return;
    int dim = param->cut == CUT_COLUMNS ? 1 : 0;
    int64_t all = param->full[dim], parts = tp.size, mine = tp.rank;
    if (param->cut == CUT_VOCABULARY) {
        param->shape[0] = (all + parts - 1) / parts;
        param->first[0] = param->shape[0] * mine;
        return;
    }
    if (param->cut == CUT_HEADS && heads < parts) {
        CHECK(parts % heads == 0, "%s: its %lld heads do not divide the %d ranks of tp", param->name,
              (long long)heads, tp.size);
        mine /= parts / heads;
        parts = heads;
        param->copies = copies;
        param->partial = true;  // each copy serves other query heads
    }
    CHECK((param->cut == CUT_HEADS ? heads : all) % parts == 0,
          "%s: dimension %d (%lld) is not divisible by the %d ranks of tp", param->name, dim,
          (long long)all, tp.size);
    param->shape[dim] = all / parts;
    param->first[dim] = param->shape[dim] * mine;
}

Param *params_add(Params *params, const ParamSpec *spec, Group copies) {
    params->param = realloc(params->param, (params->count + 1) * sizeof *params->param);
    CHECK(params->param, "out of host memory for the parameter table");
    Unit *unit = &params->unit[params->units - 1];
    Param *param = &params->param[params->count++];
    int64_t columns = spec->in ? spec->in : 1;
    *param = (Param){.unit = params->units - 1,
                     .dims = spec->in ? 2 : 1,
                     .full = {spec->out, columns},
                     .shape = {spec->out, columns},
                     .cut = spec->cut,
                     .decays = spec->decays,
                     .init_std = spec->init_std,
                     .offset = unit->count};
    snprintf(param->name, sizeof param->name, "%s", spec->name);
    cut(param, spec->heads, params->tp, copies);
    param->count = param->shape[0] * param->shape[1];
    unit->params++;
    unit->count += param->count;
    return param;
}

// ---- where elements stand ----

void unit_part(const Unit *unit, int rank, int n, int64_t *first, int64_t *count) {
    int64_t each = (unit->count + n - 1) / n;
    *first = rank * each < unit->count ? rank * each : unit->count;
    *count = unit->count - *first < each ? unit->count - *first : each;
}

int64_t *unit_part_counts(const Unit *unit, int n) {
    int64_t *counts = host_alloc(n * sizeof *counts), first;
    for (int i = 0; i < n; i++) unit_part(unit, i, n, &first, &counts[i]);
    return counts;
}

bool param_overlap(const Param *param, int64_t first, int64_t count, int64_t *from, int64_t *shared) {
    int64_t param_end = param->offset + param->count, end = first + count;
    *from = param->offset > first ? param->offset : first;
    *shared = (param_end < end ? param_end : end) - *from;
    return *shared > 0;
}

// A run of elements of a parameter that lie side by side both in what this rank stores and in the whole.
typedef struct Run {
    int64_t stored, whole, count;  // first element within either; whole is -1 in padding
} Run;

// The run that begins with stored element i and ends before `end`.
static Run run_at(const Param *param, int64_t i, int64_t end) {
    int64_t row = i / param->shape[1], column = i % param->shape[1], global = param->first[0] + row;
    int64_t count = param->shape[1] - column;
    return (Run){.stored = i,
                 .whole = global < param->full[0] ? global * param->full[1] + param->first[1] + column : -1,
                 .count = count < end - i ? count : end - i};
}

// Elements from … from + count - 1 of the parameter, as stored. Each one's number depends on its place in the
// whole weight, not on who stores it.
static void draw_piece(Tensor values, const Param *param, int64_t from, int64_t count, uint64_t seed) {
    double *host = host_alloc(count * sizeof *host);
    uint64_t stream = rng_stream(param->name);
    int64_t columns = param->shape[1], rows = (from + count + columns - 1) / columns;
#pragma omp parallel for schedule(static)
    for (int64_t row = from / columns; row < rows; row++) {
        int64_t begin = row * columns < from ? from : row * columns;
        Run run = run_at(param, begin, from + count);
        for (int64_t j = 0; j < run.count; j++)
            host[begin - from + j] = run.whole < 0 ? 0
                                     : param->init_std > 0
                                         ? param->init_std * rng_normal(seed, stream, run.whole + j)
                                         : 1;
    }
    tensor_from_doubles(values, host);
    free(host);
}

// In pieces, so that the host holds little beside the device.
static void draw(Tensor values, const Param *param, int64_t from, int64_t count, uint64_t seed) {
    enum { PIECE = 1 << 22 };
    if (device_is_dry_run()) return;
    for (int64_t done = 0; done < count; done += PIECE) {
        int64_t piece = count - done < PIECE ? count - done : PIECE;
        draw_piece(tensor_view(values, done, SHAPE(piece)), param, from + done, piece, seed);
    }
}

// ---- storage ----

static Tensor part_of(Tensor flat, int64_t first, int64_t count) {
    return tensor_exists(flat) ? tensor_view(flat, first, SHAPE(count)) : (Tensor){0};
}

static void allocate_units(Params *params) {
    int64_t all = params_elements(params), own = 0, first = 0, own_first = 0;
    Sharding sharding = params->sharding;
    for (int i = 0; i < params->units; i++) {
        Unit *unit = &params->unit[i];
        bool shared = sharding != SHARD_NOTHING;
        unit_part(unit, shared ? params->dp.rank : 0, shared ? params->dp.size : 1, &unit->own_first,
                  &unit->own_count);
        own += unit->own_count;
    }
    if (sharding < SHARD_VALUES) params->values = tensor_new(MEMORY_PARAMETER, params->dtype, SHAPE(all));
    else params->own_values = tensor_new(MEMORY_PARAMETER, params->dtype, SHAPE(own));
    if (sharding < SHARD_GRADS) {
        params->grads = tensor_new(MEMORY_GRADIENT, params->dtype, SHAPE(all));
        if (params->total_dtype != params->dtype)
            params->accumulated = tensor_new(MEMORY_GRADIENT, params->total_dtype, SHAPE(all));
    } else {
        params->own_grads = tensor_new(MEMORY_GRADIENT, params->total_dtype, SHAPE(own));
    }
    for (int i = 0; i < params->units; i++) {
        Unit *unit = &params->unit[i];
        unit->first = first;
        unit->values = part_of(params->values, first, unit->count);
        unit->grads = part_of(params->grads, first, unit->count);
        unit->accumulated = part_of(params->accumulated, first, unit->count);
        unit->own_values = sharding < SHARD_VALUES
                               ? part_of(unit->values, unit->own_first, unit->own_count)
                               : part_of(params->own_values, own_first, unit->own_count);
        unit->own_grads = sharding < SHARD_GRADS
                              ? part_of(unit_total_grad(unit), unit->own_first, unit->own_count)
                              : part_of(params->own_grads, own_first, unit->own_count);
        first += unit->count;
        own_first += unit->own_count;
    }
}

void params_allocate(Params *params, DType dtype, uint64_t seed) {
    params->dtype = dtype;
    // 16-bit gradients lose small addends: micro-batches, and ranks, are summed in f32.
    params->total_dtype = dtype_size(dtype) < 4 ? F32 : dtype;
    allocate_units(params);
    params_zero_grads(params);
    for (int i = 0; i < params->count; i++) {
        const Param *param = &params->param[i];
        int64_t from = 0, count = param->count;
        Tensor values = params->sharding < SHARD_VALUES
                            ? part_of(params->unit[param->unit].values, param->offset, param->count)
                            : param_own_value(params, param, &from);
        if (params->sharding == SHARD_VALUES) count = tensor_exists(values) ? tensor_count(values) : 0;
        draw(values, param, from, count, seed);
    }
}

void unit_new_grads(const Params *params, Unit *unit) {
    unit->grads = tensor_new(MEMORY_GRADIENT, params->dtype, SHAPE(unit->count));
    op_fill(unit->grads, 0);
}

void unit_free_grads(Unit *unit) { tensor_free(&unit->grads); }

void params_free(Params *params) {
    tensor_free(&params->values);
    tensor_free(&params->grads);
    tensor_free(&params->accumulated);
    tensor_free(&params->own_values);
    tensor_free(&params->own_grads);
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

// The elements of the unit-flat range [first, first + count(part)) that the parameter has.
static Tensor own_part(const Param *param, Tensor part, int64_t first, int64_t *within) {
    int64_t from, count;
    if (!param_overlap(param, first, tensor_count(part), &from, &count)) return (Tensor){0};
    if (within) *within = from - param->offset;
    return tensor_view(part, from - first, SHAPE(count));
}

Tensor param_own_value(const Params *params, const Param *param, int64_t *from) {
    const Unit *unit = &params->unit[param->unit];
    return own_part(param, unit->own_values, unit->own_first, from);
}

Tensor param_own_grad(const Params *params, const Param *param, int64_t *from) {
    const Unit *unit = &params->unit[param->unit];
    return own_part(param, unit->own_grads, unit->own_first, from);
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
    op_accumulate(u->accumulated, u->grads);
    op_fill(u->grads, 0);
}

// ---- the norm ----

// Stored elements that the model has: padding comes after them.
static int64_t count_without_padding(const Param *param) {
    int64_t rows = param->full[0] - param->first[0];
    if (rows > param->shape[0]) rows = param->shape[0];
    return rows > 0 ? rows * param->shape[1] : 0;
}

// Sum of squares over the parts that member `rank` of dp owns, or would own. What tp stores several times
// counts for the first copy, and padding not at all.
static double squares_of_part(const Params *params, int rank) {
    double squares = 0;
    for (int i = 0; i < params->count; i++) {
        const Param *param = &params->param[i];
        const Unit *unit = &params->unit[param->unit];
        int64_t first, count, from, shared;
        unit_part(unit, rank, params->dp.size, &first, &count);
        if (param->copies.rank > 0 || !param_overlap(param, first, count, &from, &shared)) continue;
        int64_t padding = param->offset + count_without_padding(param);
        if (from >= padding) continue;
        if (shared > padding - from) shared = padding - from;
        squares += op_sum_squares(tensor_view(unit->own_grads, from - unit->own_first, SHAPE(shared)));
    }
    return squares;
}

static double sum_over(Group group, double value) {
    return group.size > 1 ? comm_sum(value, group) : value;
}

double params_grad_norm(const Params *params) {
    double squares = 0;
    if (params->sharding != SHARD_NOTHING)
        squares = sum_over(params->dp, squares_of_part(params, params->dp.rank));
    else
        for (int rank = 0; rank < params->dp.size; rank++) squares += squares_of_part(params, rank);
    return sqrt(sum_over(params->tp, squares));
}

const Param *params_first_bad_grad(const Params *params) {
    // Backward runs from the last weight to the first, and so does what broke in it.
    int bad = params->count - 1;
    for (; bad >= 0; bad--) {
        Tensor grad = param_own_grad(params, &params->param[bad], NULL);
        if (tensor_exists(grad) && !isfinite(op_sum_squares(grad))) break;
    }
    if (params->sharding != SHARD_NOTHING && params->dp.size > 1) bad = (int)comm_max(bad, params->dp);
    if (params->tp.size > 1) bad = (int)comm_max(bad, params->tp);
    return bad >= 0 ? &params->param[bad] : NULL;
}

// ---- the whole weight ----

// Copies the parameter's elements that `held` has, which is the range of its unit from `first` on, between a
// whole weight and held's host copy.
static void copy_runs(const Param *param, int64_t first, int64_t held_count, char *held, char *whole,
                      size_t size, bool to_whole) {
    int64_t from, count;
    if (!param_overlap(param, first, held_count, &from, &count)) return;
    int64_t begin = from - param->offset, end = begin + count;
    for (int64_t i = begin; i < end;) {
        Run run = run_at(param, i, end);
        char *here = held + (size_t)(i - begin) * size, *there = whole + (size_t)run.whole * size;
        if (run.whole >= 0 && to_whole) memcpy(there, here, (size_t)run.count * size);
        if (run.whole >= 0 && !to_whole) memcpy(here, there, (size_t)run.count * size);
        if (run.whole < 0 && !to_whole) memset(here, 0, (size_t)run.count * size);
        i += run.count;
    }
}

// What one member has not, its bytes are zero; so sums of words, read as integers, put the bytes together.
static void merge(void *bytes, int64_t words, Group group) {
    if (group.size == 1) return;
    Memory before = memory_account();
    Tensor t = tensor_new(MEMORY_COMMUNICATION, I32, SHAPE(words));
    tensor_from_host(t, bytes);
    comm_wait(comm_reduce(t, REDUCE_SUM, 0, group));
    comm_wait(comm_broadcast(t, 0, group));
    tensor_to_host(bytes, t);
    tensor_free(&t);
    memory_restore_peak(&before);
}

static Tensor stored_part(const Param *param, Tensor held, int64_t first) {
    int64_t from, count;
    return param_overlap(param, first, tensor_count(held), &from, &count)
               ? tensor_view(held, from - first, SHAPE(count))
               : (Tensor){0};
}

static void gather(const Params *params, const Param *param, Tensor held, int64_t first, bool sharded,
                   void *whole) {
    size_t size = dtype_size(held.dtype);
    size_t bytes = (size_t)(param->full[0] * param->full[1]) * size;
    int64_t words = (int64_t)(bytes + 3) / 4;
    char *merged = host_alloc(words * 4);
    memset(merged, 0, words * 4);
    Tensor mine = stored_part(param, held, first);
    // Of copies, the first one's elements count; a weight that tp does not cut is complete without tp.
    if (tensor_exists(mine) && (param->cut == CUT_NONE || param->copies.rank == 0)) {
        char *host = host_alloc(tensor_bytes(mine));
        tensor_to_host(host, mine);
        copy_runs(param, first, tensor_count(held), host, merged, size, true);
        free(host);
    }
    if (sharded) merge(merged, words, params->dp);
    if (param->cut != CUT_NONE) merge(merged, words, params->tp);
    memcpy(whole, merged, bytes);
    free(merged);
}

void param_gather(const Params *params, const Param *param, ParamTensor which, void *whole) {
    const Unit *unit = &params->unit[param->unit];
    bool grad = which == PARAM_GRAD;
    // Where weights exist whole on every rank of dp, each looks at its own copy.
    bool sharded = params->sharding >= (grad ? SHARD_STATE : SHARD_VALUES);
    if (!grad && !sharded) gather(params, param, unit->values, 0, false, whole);
    else gather(params, param, grad ? unit->own_grads : unit->own_values, unit->own_first, sharded, whole);
}

void param_gather_flat(const Params *params, const Param *param, Tensor flat, bool own, void *whole) {
    const Unit *unit = &params->unit[param->unit];
    gather(params, param, flat, own ? unit->own_first : 0, own && params->sharding != SHARD_NOTHING, whole);
}

void param_scatter_flat(const Params *params, const Param *param, Tensor flat, bool own,
                        const void *whole) {
    int64_t first = own ? params->unit[param->unit].own_first : 0;
    Tensor mine = stored_part(param, flat, first);
    if (!tensor_exists(mine)) return;
    char *host = host_alloc(tensor_bytes(mine));
    copy_runs(param, first, tensor_count(flat), host, (char *)whole, dtype_size(flat.dtype), false);
    tensor_from_host(mine, host);
    free(host);
}

void param_set_value(const Params *params, const Param *param, const void *whole) {
    const Unit *unit = &params->unit[param->unit];
    bool own = params->sharding == SHARD_VALUES;
    param_scatter_flat(params, param, own ? unit->own_values : unit->values, own, whole);
}
