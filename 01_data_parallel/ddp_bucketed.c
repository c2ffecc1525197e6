// ddp_bucketed.c: many small gradients in few large messages. Playbook: "Second optimization: Bucketing gradients".
//
// Against ddp_overlap.c: a message costs latency whatever its size, so units wait for each other until bucket_bytes are
// full, and go as one. Units stand one after another in the flat gradient (params.h), so a bucket is a range of it and
// nothing is copied.
//
//     units    head  block 3  block 2  block 1  block 0  embedding       in the order of backward
//     buckets  [------------] [---------------] [----------------]
//
// After every micro-batch the sums so far are made equal on all ranks, as PyTorch's DDP does outside of no_sync; what
// the next one adds must not count them n times, so each rank keeps its n-th part of them.
//
// Bytes sent per rank: 2 (n - 1) / n K for each of the grad_acc micro-batches. Memory per rank: as on one device.
// Run: build/01_data_parallel/ddp_bucketed             (--bucket-mb 25, --ranks 3, --tied, --dtype f32, --dry-run …)
// Last line: PASS ddp_bucketed: ranks together make the step of one device …
#include "playbook.h"

// ---- the technique ----

int ddp_bucket_starts(const Params *params, int64_t bucket_bytes, int *first_unit) {
    int buckets = 0;
    int64_t bytes = 0;
    for (int unit = params->units - 1; unit >= 0; unit--) {
        bytes += tensor_bytes(unit_total_grad(&params->unit[unit]));
        if (bytes < bucket_bytes && unit > 0) continue;
        first_unit[buckets++] = unit;
        bytes = 0;
    }
    return buckets;
}

// Gradients of units first … end - 1: a range of the model's flat gradient.
static Tensor range_of(const Params *params, int first, int end) {
    const Unit *last = &params->unit[end - 1];
    int64_t from = params->unit[first].first;
    return tensor_view(params_total_grad(params), from, SHAPE(last->first + last->count - from));
}

void ddp_bucketed_ready(void *context, Model *model, int unit, MicroBatch *micro) {
    (void)micro;
    Ddp *ddp = context;
    params_accumulate(&model->params, unit);
    Tensor bucket = range_of(&model->params, unit, ddp->next_unit);
    if (tensor_bytes(bucket) < ddp->bucket_bytes && unit > 0) return;
    ddp->pending[ddp->count++] = comm_all_reduce(bucket, REDUCE_SUM, model->mesh.dp);
    ddp->next_unit = unit;
}

void ddp_bucketed_finish(void *context, Model *model, MicroBatch *micro) {
    Ddp *ddp = context;
    for (int i = 0; i < ddp->count; i++) comm_wait(ddp->pending[i]);
    ddp->count = 0;
    ddp->next_unit = model->params.units;
    if (!micro->last) op_scale(params_total_grad(&model->params), 1.0 / model->mesh.dp.size);
}

void ddp_bucketed_plug(Model *model, Ddp *ddp) {
    ddp->pending = host_alloc(model->params.units * sizeof *ddp->pending);
    ddp->count = 0;
    ddp->next_unit = model->params.units;
    model->sockets.gradients.context = ddp;
    model->sockets.gradients.ready = ddp_bucketed_ready;
    model->sockets.gradients.finish = ddp_bucketed_finish;
}

#ifndef NO_MAIN
static int64_t each_micro_batch(const Config *config) { return config->grad_acc; }

static int64_t one_per_bucket(const Model *model, const Ddp *ddp) {
    int first_unit[model->params.units];
    return ddp_bucket_starts(&model->params, ddp->bucket_bytes, first_unit);
}

int main(int argc, char **argv) {
    const DdpProgram program = {
        .purpose = "Data parallelism: gradients go in buckets while backward goes on.",
        .claim = "ranks together make the step of one device",
        .plug = ddp_bucketed_plug,
        .syncs = each_micro_batch,
        .all_reduces = one_per_bucket};
    return ddp_prove(argc, argv, &program);
}
#endif
