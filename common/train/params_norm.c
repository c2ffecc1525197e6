// params_norm.c: communication on gradients before the optimizer step: sums over copies of a weight, and the
// norm.
#include <math.h>
#include <stdlib.h>

#include "comm/comm.h"
#include "params.h"
#include "tensor/ops.h"

// ---- gradients that are parts ----

static bool is_partial(const Param *param) { return param->here && param->parts.size > 1; }

// Copies all of this rank's own gradients that are partial over this group, one after another, into the
// buffer or back. Returns their number of elements; without a buffer it only counts.
static int64_t move_partial(const Params *params, Group parts, Tensor buffer, bool back) {
    int64_t count = 0;
    for (int i = 0; i < params->count; i++) {
        const Param *param = &params->param[i];
        if (!is_partial(param) || param->parts.handle != parts.handle) continue;
        Tensor grad = param_own_grad(params, param, NULL);
        if (!tensor_exists(grad)) continue;
        int64_t elements = tensor_count(grad);
        if (tensor_exists(buffer)) {
            Tensor place = tensor_view(buffer, count, SHAPE(elements));
            op_copy(back ? grad : place, back ? place : grad);
        }
        count += elements;
    }
    return count;
}

int64_t params_partial_elements(const Params *params, int param) {
    const Param *p = &params->param[param], *first = params->param;
    if (!is_partial(p)) return -1;
    while (!is_partial(first) || first->parts.handle != p->parts.handle) first++;
    return first == p ? move_partial(params, p->parts, (Tensor){0}, false) : -1;
}

// One message for all of them: there are many small ones.
void params_sum_copies(Params *params) {
    for (int i = 0; i < params->count; i++) {
        int64_t elements = params_partial_elements(params, i);
        if (elements < 0) continue;
        Group parts = params->param[i].parts;
        Tensor buffer = tensor_new(MEMORY_COMMUNICATION, params->recipe.sum, SHAPE(elements));
        move_partial(params, parts, buffer, false);
        comm_wait(comm_all_reduce(buffer, REDUCE_SUM, parts));
        move_partial(params, parts, buffer, true);
        tensor_free(&buffer);
    }
}

// ---- the norm ----

// Stored elements that the model has: padding comes after them.
static int64_t count_without_padding(const Param *param) {
    int64_t rows = param->full[0] - param->first[0];
    if (rows > param->shape[0]) rows = param->shape[0];
    return rows > 0 ? rows * param->shape[1] : 0;
}

// The elements of a parameter that this rank counts, as a range of the flat gradient `all`. Only the first
// of several copies counts, and padding never.
static FlatRange counted_range(const Params *params, const Param *param, Tensor all) {
    const Unit *unit = &params->unit[param->unit];
    const FlatRange nothing = {0};
    int64_t from, shared, padding = param->offset + count_without_padding(param);
    if (!param->here || param->copies.rank > 0) return nothing;
    if (!param_overlap(param, unit->counted_first, unit->counted_count, &from, &shared)) return nothing;
    if (shared > padding - from) shared = padding - from;
    if (shared <= 0) return nothing;
    return (FlatRange){unit->own_grads.offset - all.offset + from - unit->own_first, shared};
}

double params_grad_norm(const Params *params, Tensor number, double *value) {
    Group group = params_norm_group(params);
    Tensor all = params->sharding < SHARD_GRADS ? params_total_grad(params) : params->own_grads;
    int count = params->count;
    double *host = host_alloc((count + 1) * sizeof *host), total = 0;
    FlatRange *ranges = host_alloc(count * sizeof *ranges);
    for (int i = 0; i < count; i++) ranges[i] = counted_range(params, &params->param[i], all);
    Memory before = memory_account();
    Tensor read = tensor_new(MEMORY_COMMUNICATION, F64, SHAPE(tensor_exists(number) ? count + 1 : count));
    Tensor squares = tensor_view(read, 0, SHAPE(count));
    op_squares_of_ranges(squares, all, ranges);
    if (group.size > 1) comm_wait(comm_all_reduce(squares, REDUCE_SUM, group));
    if (tensor_exists(number)) op_copy(tensor_view(read, count, SHAPE(1)), number);
    tensor_to_doubles(host, read);  // the one time that the host waits
    tensor_free(&read);
    memory_restore_peak(&before);
    for (int i = 0; i < count; i++) total += host[i];
    if (value) *value = host[count];
    free(ranges);
    free(host);
    return sqrt(total);
}

const Param *params_first_bad_grad(const Params *params) {
    // Backward runs from the last weight to the first, and so does what broke in it.
    int bad = params->count - 1;
    for (; bad >= 0; bad--) {
        Tensor grad = param_own_grad(params, &params->param[bad], NULL);
        if (tensor_exists(grad) && !isfinite(op_sum_squares(grad))) break;
    }
    Group group = params_norm_group(params);
    if (group.size > 1) bad = (int)comm_max(bad, group);
    return bad >= 0 ? &params->param[bad] : NULL;
}
