// params_whole.c: from the parts of a weight that each rank stores to the whole weight, and back.
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "params.h"

// Of the parameter's stored elements from … from + count - 1, with the host copy `held`: calls `act` for
// each run that is contiguous in the whole as well. Padding is skipped.
static void each_run(const Param *param, int64_t from, int64_t count, char *held, size_t size,
                     ParamRange act, void *context) {
    for (int64_t i = from, end = from + count; i < end;) {
        ParamRun run = param_run(param, i, end);
        for (bool more = run.whole >= 0; more && i + run.count < end;) {  // where whole rows are stored
            ParamRun next = param_run(param, i + run.count, end);
            more = next.whole == run.whole + run.count;
            if (more) run.count += next.count;
        }
        if (run.whole >= 0) act(context, run.whole, run.count, held + (size_t)(i - from) * size);
        i += run.count;
    }
}

void param_read_part(const Param *param, Tensor part, int64_t from, ParamRange read, void *context) {
    if (!tensor_exists(part)) return;
    char *host = host_alloc(tensor_bytes(part));
    memset(host, 0, tensor_bytes(part));  // padding
    each_run(param, from, tensor_count(part), host, dtype_size(part.dtype), read, context);
    tensor_from_host(part, host);
    free(host);
}

static void write_part(const Param *param, Tensor part, int64_t from, ParamRange write, void *context) {
    char *host = host_alloc(tensor_bytes(part));
    tensor_to_host(host, part);
    each_run(param, from, tensor_count(part), host, dtype_size(part.dtype), write, context);
    free(host);
}

// The rank that counts an element in the gradients' norm writes it; if every replica does, the first.
void param_write_part(const Params *params, const Param *param, Tensor part, int64_t from, ParamRange write,
                      void *context) {
    const Unit *unit = &params->unit[param->unit];
    int64_t first, count;
    bool one_of_many = param->copies.rank > 0 || (!params->counted && unit->replicas.rank > 0);
    if (!tensor_exists(part) || one_of_many) return;
    if (!param_overlap(param, unit->counted_first, unit->counted_count, &first, &count)) return;
    first -= param->offset;
    write_part(param, tensor_view(part, first - from, SHAPE(count)), first, write, context);
}

// ---- a whole weight in host memory ----

typedef struct Whole {
    char *bytes;
    size_t size;  // of an element
} Whole;

static void to_whole(void *context, int64_t first, int64_t count, void *bytes) {
    const Whole *w = context;
    memcpy(w->bytes + (size_t)first * w->size, bytes, (size_t)count * w->size);
}

static void from_whole(void *context, int64_t first, int64_t count, void *bytes) {
    const Whole *w = context;
    memcpy(bytes, w->bytes + (size_t)first * w->size, (size_t)count * w->size);
}

// Bytes that a member lacks are zero, so summing the words as integers merges the bytes of all.
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

// held is the range of the unit from `first` on; parts: other replicas have the rest of the unit.
static void gather(const Params *params, const Param *param, Tensor held, int64_t first, bool parts,
                   void *whole) {
    size_t size = dtype_size(held.dtype);
    size_t bytes = (size_t)(param->full[0] * param->full[1]) * size;
    int64_t words = (int64_t)(bytes + 3) / 4;
    Group spread = params->unit[param->unit].spread;
    bool everywhere = param->here && !param->sharded && param->copies.size == spread.size;
    char *merged = host_alloc(words * 4);
    memset(merged, 0, words * 4);
    int64_t from;
    Tensor mine = param_part(param, held, first, &from);
    // Of copies, the first one's elements count.
    if (tensor_exists(mine) && (everywhere || param->copies.rank == 0))
        write_part(param, mine, from, to_whole, &(Whole){merged, size});
    if (parts) merge(merged, words, params->unit[param->unit].replicas);
    if (!everywhere) merge(merged, words, spread);
    memcpy(whole, merged, bytes);
    free(merged);
}

void param_gather(const Params *params, const Param *param, ParamTensor which, void *whole) {
    const Unit *unit = &params->unit[param->unit];
    bool grad = which == PARAM_GRAD;
    // If weights exist whole on every replica, each uses its own.
    bool parts = params->sharding >= (grad ? SHARD_STATE : SHARD_VALUES);
    if (!grad && !parts) gather(params, param, unit->values, 0, false, whole);
    else gather(params, param, grad ? unit->own_grads : unit->own_values, unit->own_first, parts, whole);
}

void param_read_value(const Params *params, const Param *param, ParamRange read, void *context) {
    const Unit *unit = &params->unit[param->unit];
    bool own = params->sharding == SHARD_VALUES;
    int64_t from;
    Tensor part = own ? param_own_value(params, param, &from) : param_part(param, unit->values, 0, &from);
    param_read_part(param, part, from, read, context);
}

void param_set_value(const Params *params, const Param *param, const void *whole) {
    Whole from = {(char *)whole, dtype_size(params->recipe.weight)};
    param_read_value(params, param, from_whole, &from);
}
