// ddp_naive.c: data parallelism: gradients are summed after backward. Playbook: "Data Parallelism".
//
// Changes from 00_single_gpu: each of N ranks holds the whole model and takes 1/N of the batch. After
// backward the gradients are summed over the ranks, so that all take the same step. (With gradient
// accumulation: after each micro-batch.)
//
//     compute  F F F F B B B B . . . . step          gbs = mbs x grad_acc x dp
//     network  . . . . . . . . AR AR AR             compute waits meanwhile: "a BIG NO"
//
// The mean is taken before backward: each rank divides its loss by the number of labels on all ranks
// (train_step), so gradients are only summed here, not divided by N.
//
// Bytes sent per rank: 2 (N - 1) / N K for gradients of K bytes, for each of the grad_acc micro-batches.
// Memory per rank: as on one device.
// Run: build/01_data_parallel/ddp_naive  (--ranks 3, --tied, --dtype f32, --dry-run --model llama-3-8b …)
// Last line: PASS ddp_naive: the ranks reproduce the single-device step …
#include "data_parallel.h"

// ---- the technique ----

static void all_reduce_after_backward(void *context, Model *model, bool last) {
    (void)context;
    Params *p = &model->params;
    for (int i = p->count - 1; i >= 0; i--) {
        const Param *param = &p->param[i];
        if (param->here)
            comm_wait(
                comm_all_reduce(param_total_grad(p, param), REDUCE_SUM, p->unit[param->unit].replicas));
    }
    // Every rank now holds these sums, and the next all-reduce would count them N times. Scaled by 1 / N,
    // they count once.
    for (int i = 0; i < p->units && !last; i++)
        op_scale(unit_total_grad(&p->unit[i]), 1.0 / p->unit[i].replicas.size);
}

static void *plug(Model *model) {
    model->sockets.gradients.micro_batch_ready = all_reduce_after_backward;
    return NULL;
}

static void price(Price *price, const Model *model, const void *context) {
    (void)context;
    const Params *p = &model->params;
    for (int i = 0; i < p->count; i++)
        if (p->param[i].here)
            price_all_reduce(price, (double)model->config.grad_acc, p->param[i].count, p->recipe.sum,
                             p->unit[p->param[i].unit].replicas);
}

const Technique ddp_naive = {.name = "ddp_naive", .axes = 1u << AXIS_DP, .plug = plug, .price = price};

#ifndef NO_MAIN
int main(int argc, char **argv) {
    const Program program = {
        .purpose = "Data parallelism: gradients are summed over the ranks after backward.",
        .claim = "the ranks reproduce the single-device step",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5",
        .natural = 4,
        .techniques = (const Technique *[]){&ddp_naive, &recompute, NULL}};
    return program_main(argc, argv, &program);
}
#endif
