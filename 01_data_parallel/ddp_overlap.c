// ddp_overlap.c: gradients travel while backward goes on. Playbook: "First optimization: Overlap gradient
// synchronization with backward pass".
//
// Against ddp_naive.c: the all-reduce of a gradient starts as soon as its unit's gradient is final, and is waited for
// only before the step. These gradients are final, and travel while earlier layers run backward.
//
//     compute  F F F F B B B B . step
//     network  . . . . . AR AR AR             what is left at the end is exposed
//
// Bytes sent per rank: as ddp_naive. Memory per rank: as on one device.
// Run: build/01_data_parallel/ddp_overlap              (--ranks 3, --tied, --dtype f32, --dry-run --model llama-3-8b …)
// Last line: PASS ddp_overlap: ranks together make the step of one device …
#include <stdlib.h>

#include "playbook.h"

// ---- the technique ----

static void start_all_reduces(void *context, Model *model, int unit, MicroBatch *micro) {
    (void)micro;
    Ddp *ddp = context;
    params_accumulate(&model->params, unit);
    const Unit *u = &model->params.unit[unit];
    for (int i = u->first_param + u->params - 1; i >= u->first_param; i--)
        ddp->pending[ddp->count++] = comm_all_reduce(
            param_total_grad(&model->params, &model->params.param[i]), REDUCE_SUM, model->mesh.dp);
}

static void wait_for_all(void *context, Model *model, MicroBatch *micro) {
    Ddp *ddp = context;
    for (int i = 0; i < ddp->count; i++) comm_wait(ddp->pending[i]);
    ddp->count = 0;
    if (!micro->last) op_scale(params_total_grad(&model->params), 1.0 / model->mesh.dp.size);
}

void ddp_overlap_plug(Model *model, Ddp *ddp) {
    ddp->pending = host_alloc(model->params.count * sizeof *ddp->pending);
    ddp->count = 0;
    model->sockets.gradients.context = ddp;
    model->sockets.gradients.ready = start_all_reduces;
    model->sockets.gradients.finish = wait_for_all;
}

#ifndef NO_MAIN
static int64_t each_micro_batch(const Config *config) { return config->grad_acc; }

static int64_t one_per_parameter(const Model *model, const Ddp *ddp) {
    (void)ddp;
    return model->params.count;
}

int main(int argc, char **argv) {
    const DdpProgram program = {.purpose = "Data parallelism: gradients travel while backward goes on.",
                                .claim = "ranks together make the step of one device",
                                .plug = ddp_overlap_plug,
                                .syncs = each_micro_batch,
                                .all_reduces = one_per_parameter};
    return ddp_prove(argc, argv, &program);
}
#endif
