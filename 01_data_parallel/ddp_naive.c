// ddp_naive.c: data parallelism, gradients summed after backward. Playbook: "Data Parallelism".
//
// Against 00_single_gpu: each of n ranks holds the whole model and takes 1/n of the batch. After backward the
// gradients are summed over the ranks, so that all take the same step. (With accumulation: after each micro-batch.)
//
//     compute  F F F F B B B B . . . . step          gbs = mbs x grad_acc x dp
//     network  . . . . . . . . AR AR AR             nothing is computed meanwhile: "a BIG NO"
//
// Bytes sent per rank: 2 (n - 1) / n K for gradients of K bytes, for each of the grad_acc micro-batches. Memory per rank: as on one device.
// Run: build/01_data_parallel/ddp_naive                (--ranks 3, --tied, --dtype f32, --dry-run --model llama-3-8b …)
// Last line: PASS ddp_naive: ranks together make the step of one device …
#include "playbook.h"

// ---- the technique ----

static void all_reduce_after_backward(void *context, Model *model, MicroBatch *micro) {
    (void)context;
    for (int i = model->params.count - 1; i >= 0; i--)
        comm_wait(comm_all_reduce(param_total_grad(&model->params, &model->params.param[i]), REDUCE_SUM,
                                 model->mesh.dp));
    // These sums are on every rank now: with an n-th of them each, the next sum over ranks counts them once.
    if (!micro->last) op_scale(params_total_grad(&model->params), 1.0 / model->mesh.dp.size);
}

void ddp_naive_plug(Model *model, Ddp *ddp) {
    model->sockets.gradients.context = ddp;
    model->sockets.gradients.finish = all_reduce_after_backward;
}

#ifndef NO_MAIN
static int64_t each_micro_batch(const Config *config) { return config->grad_acc; }

static int64_t one_per_parameter(const Model *model, const Ddp *ddp) {
    (void)ddp;
    return model->params.count;
}

int main(int argc, char **argv) {
    const DdpProgram program = {
        .purpose = "Data parallelism: gradients are summed over the ranks after backward.",
        .claim = "ranks together make the step of one device",
        .plug = ddp_naive_plug,
        .syncs = each_micro_batch,
        .all_reduces = one_per_parameter};
    return ddp_prove(argc, argv, &program);
}
#endif
