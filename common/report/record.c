// record.c: the results of one training run, in host memory (report.h).
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "report.h"

Record record_new(const char *title, int64_t steps, const Params *params) {
    size_t n = (size_t)params->count;
    Record record = {.steps = steps, .tensors = params->count};
    snprintf(record.title, sizeof record.title, "%s", title);
    record.loss = host_alloc(sizeof(double) * (size_t)steps);
    record.grad_norm = host_alloc(sizeof(double) * (size_t)steps);
    record.name = host_alloc(sizeof(char *) * n);
    record.count = host_alloc(sizeof(int64_t) * n);
    record.apart = host_alloc(sizeof(bool) * n);
    record.grad = host_alloc(sizeof(double *) * n);
    record.param = host_alloc(sizeof(double *) * n);
    // A step that was not filled in must not pass.
    for (int64_t i = 0; i < steps; i++) record.loss[i] = record.grad_norm[i] = NAN;
    for (size_t i = 0; i < n; i++) {
        record.name[i] = format_text("%s", params->param[i].name);
        record.count[i] = params->param[i].full[0] * params->param[i].full[1];
        record.apart[i] = params->param[i].apart;
        record.grad[i] = record.param[i] = NULL;
    }
    return record;
}

// The whole parameter's values or gradient as f64. The caller frees them.
static double *whole_doubles(const Params *params, const Param *param, ParamTensor which) {
    DType dtype = which == PARAM_GRAD ? params->recipe.sum : params->recipe.weight;
    int64_t count = param->full[0] * param->full[1];
    double *doubles = host_alloc(count * sizeof *doubles);
    void *stored = host_alloc(count * dtype_size(dtype));
    param_gather(params, param, which, stored);
    dtype_convert(doubles, F64, stored, dtype, count);
    free(stored);
    return doubles;
}

void record_grads(Record *record, const Params *params, double factor) {
    for (int i = 0; i < params->count; i++) {
        free(record->grad[i]);
        record->grad[i] = whole_doubles(params, &params->param[i], PARAM_GRAD);
        for (int64_t j = 0; j < record->count[i]; j++) record->grad[i][j] *= factor;
    }
}

void record_params(Record *record, const Params *params) {
    for (int i = 0; i < params->count; i++) {
        free(record->param[i]);
        record->param[i] = whole_doubles(params, &params->param[i], PARAM_VALUE);
    }
}

Routing *record_routing_begin(Record *record, const Config *c, int64_t step, int64_t samples) {
    if (!record || !c->experts || device_is_dry_run()) return NULL;
    Routing *r = &record->routing;
    r->step = step - (c->steps - record->steps);
    r->followed = c->follows ? c->follows->routing.logits : NULL;
    r->beside = c->beside ? c->beside->routing.logits : NULL;
    r->count = record->steps * samples * c->seq * c->layers * c->experts;
    if (c->dtype != F64 && !r->logits) {  // also of a run that follows: the bound is measured beside it
        r->logits = calloc((size_t)r->count, sizeof *r->logits);
        CHECK(r->logits, "out of host memory for %lld logits of routers", (long long)r->count);
    }
    return r;
}

// Until here, of its array, a rank has written only its own tokens' part, and holds no memory for the rest.
void record_routing(Record *record, Group group) {
    enum { PIECE = 1 << 20 };
    Routing *r = &record->routing;
    if (!r->logits || group.size == 1) return;
    Tensor room = tensor_new(MEMORY_COMMUNICATION, F32, SHAPE(r->count < PIECE ? r->count : PIECE));
    for (int64_t first = 0; first < r->count; first += PIECE) {
        Tensor piece = tensor_view(room, 0, SHAPE(r->count - first < PIECE ? r->count - first : PIECE));
        tensor_from_host(piece, r->logits + first);
        comm_wait(comm_reduce(piece, REDUCE_SUM, 0, group));
        if (group.rank == 0) tensor_to_host(r->logits + first, piece);
    }
    tensor_free(&room);
    if (group.rank == 0) return;
    free(r->logits);
    r->logits = NULL;
}

void record_free(Record *record) {
    for (int i = 0; i < record->tensors; i++) {
        free(record->name[i]);
        free(record->grad[i]);
        free(record->param[i]);
    }
    free(record->loss);
    free(record->grad_norm);
    free(record->name);
    free(record->count);
    free(record->apart);
    free(record->grad);
    free(record->param);
    free(record->routing.logits);
    *record = (Record){0};
}

// ---- one rank's record for all ----

// The record is traversed three times: for its size, to pack it into bytes, and on other ranks to unpack it.
typedef struct Parcel {
    enum { MEASURE, PACK, UNPACK } step;
    char *bytes;
    size_t size;  // so far
} Parcel;

static void item(Parcel *p, void *data, size_t size) {
    if (p->step == PACK) memcpy(p->bytes + p->size, data, size);
    if (p->step == UNPACK) memcpy(data, p->bytes + p->size, size);
    p->size += size;
}

// What the record owns. An address that has just been unpacked is the other rank's.
static void *owned(Parcel *p, void *data, size_t size) {
    if (!data) return NULL;
    if (p->step == UNPACK) data = host_alloc(size);
    item(p, data, size);
    return data;
}

static void walk(Parcel *p, Record *r) {
    item(p, r, sizeof *r);
    // Only the rank that made the run needs its logits, and those that it followed.
    if (p->step == UNPACK) r->routing.logits = NULL, r->routing.followed = r->routing.beside = NULL;
    size_t n = (size_t)r->tensors, steps = (size_t)r->steps;
    r->loss = owned(p, r->loss, steps * sizeof *r->loss);
    r->grad_norm = owned(p, r->grad_norm, steps * sizeof *r->grad_norm);
    r->count = owned(p, r->count, n * sizeof *r->count);
    r->apart = owned(p, r->apart, n * sizeof *r->apart);
    r->name = owned(p, r->name, n * sizeof *r->name);
    r->grad = owned(p, r->grad, n * sizeof *r->grad);
    r->param = owned(p, r->param, n * sizeof *r->param);
    for (size_t i = 0; i < n; i++) {
        size_t length = p->step == UNPACK ? 0 : strlen(r->name[i]) + 1;
        item(p, &length, sizeof length);
        r->name[i] = owned(p, r->name[i], length);
        r->grad[i] = owned(p, r->grad[i], (size_t)r->count[i] * sizeof **r->grad);
        r->param[i] = owned(p, r->param[i], (size_t)r->count[i] * sizeof **r->param);
    }
}

void record_share(Record *record, int root, Group group) {
    bool mine = group.rank == root;
    Parcel parcel = {.step = MEASURE};
    if (group.size == 1) return;
    if (mine) walk(&parcel, record);
    int64_t words = (int64_t)comm_max(ceil((double)parcel.size / sizeof(double)), group);
    Tensor all = tensor_new(MEMORY_COMMUNICATION, F64, SHAPE(words));
    parcel = (Parcel){.step = mine ? PACK : UNPACK, .bytes = host_alloc((size_t)words * sizeof(double))};
    if (mine) walk(&parcel, record);
    if (mine) tensor_from_host(all, parcel.bytes);
    comm_wait(comm_broadcast(all, root, group));
    if (!mine) tensor_to_host(parcel.bytes, all);
    if (!mine) walk(&parcel, record);
    free(parcel.bytes);
    tensor_free(&all);
}
