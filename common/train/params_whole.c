// params_whole.c: the way from what each rank stores of a weight to the whole weight, and back.
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "params.h"

// Copies the parameter's elements that `held` has, which is the range of its unit from `first` on, between
// a whole weight and held's host copy.
static void copy_runs(const Param *param, int64_t first, int64_t held_count, char *held, char *whole,
                      size_t size, bool to_whole) {
    int64_t from, count;
    if (!param_overlap(param, first, held_count, &from, &count)) return;
    int64_t begin = from - param->offset, end = begin + count;
    for (int64_t i = begin; i < end;) {
        ParamRun run = param_run(param, i, end);
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

// held is the range of the unit from `first` on; parts: other replicas have the rest of it.
static void gather(const Params *params, const Param *param, Tensor held, int64_t first, bool parts,
                   void *whole) {
    size_t size = dtype_size(held.dtype);
    size_t bytes = (size_t)(param->full[0] * param->full[1]) * size;
    int64_t words = (int64_t)(bytes + 3) / 4;
    Group spread = params->unit[param->unit].spread;
    bool everywhere = param->here && !param->sharded && param->copies.size == spread.size;
    char *merged = host_alloc(words * 4);
    memset(merged, 0, words * 4);
    Tensor mine = stored_part(param, held, first);
    // Of copies, the first one's elements count.
    if (tensor_exists(mine) && (everywhere || param->copies.rank == 0)) {
        char *host = host_alloc(tensor_bytes(mine));
        tensor_to_host(host, mine);
        copy_runs(param, first, tensor_count(held), host, merged, size, true);
        free(host);
    }
    if (parts) merge(merged, words, params->unit[param->unit].replicas);
    if (!everywhere) merge(merged, words, spread);
    memcpy(whole, merged, bytes);
    free(merged);
}

void param_gather(const Params *params, const Param *param, ParamTensor which, void *whole) {
    const Unit *unit = &params->unit[param->unit];
    bool grad = which == PARAM_GRAD;
    // Where weights exist whole on every replica, each looks at its own.
    bool parts = params->sharding >= (grad ? SHARD_STATE : SHARD_VALUES);
    if (!grad && !parts) gather(params, param, unit->values, 0, false, whole);
    else gather(params, param, grad ? unit->own_grads : unit->own_values, unit->own_first, parts, whole);
}

void param_gather_own(const Params *params, const Param *param, Tensor flat, void *whole) {
    const Unit *unit = &params->unit[param->unit];
    gather(params, param, flat, unit->own_first, params->sharding != SHARD_NOTHING, whole);
}

static void scatter(const Param *param, Tensor held, int64_t first, const void *whole) {
    Tensor mine = stored_part(param, held, first);
    if (!tensor_exists(mine)) return;
    char *host = host_alloc(tensor_bytes(mine));
    copy_runs(param, first, tensor_count(held), host, (char *)whole, dtype_size(held.dtype), false);
    tensor_from_host(mine, host);
    free(host);
}

void param_scatter_own(const Params *params, const Param *param, Tensor flat, const void *whole) {
    scatter(param, flat, params->unit[param->unit].own_first, whole);
}

void param_set_value(const Params *params, const Param *param, const void *whole) {
    const Unit *unit = &params->unit[param->unit];
    if (params->sharding == SHARD_VALUES) scatter(param, unit->own_values, unit->own_first, whole);
    else scatter(param, unit->values, 0, whole);
}
