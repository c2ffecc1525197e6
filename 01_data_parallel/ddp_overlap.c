// ddp_overlap.c: gradients are in flight while backward goes on. Playbook: "First optimization: Overlap
// gradient synchronization with backward pass".
//
// Changes from ddp_naive.c: the all-reduces of a unit (embedding, block or head) start as soon as its
// gradients are final, while earlier layers run backward. (The playbook's hooks start those of each
// parameter.) The wait comes only before the optimizer step, or before the next micro-batch adds to them.
//
//     compute  F F F F B B B B . step
//     network  . . . . . AR AR AR             what is left at the end is exposed
//
// Bytes sent per rank: as in ddp_naive. Memory per rank: as on one device.
// Run: build/01_data_parallel/ddp_overlap  (--ranks 3, --tied, --dtype f32, --dry-run --model llama-3-8b …)
// Last line: PASS ddp_overlap: the ranks reproduce the single-device step …
#include <stdlib.h>

#include "data_parallel.h"

// ---- the technique ----

// context: for each weight, the request of its gradient while that is in flight, else NULL.
static void start_all_reduces(void *context, Model *model, int unit, bool last) {
    (void)last;
    Request **request = context;
    Params *p = &model->params;
    const Unit *u = &p->unit[unit];
    params_accumulate(p, unit);
    for (int i = u->first_param + u->params - 1; i >= u->first_param; i--)
        request[i] = comm_all_reduce(param_total_grad(p, &p->param[i]), REDUCE_SUM, u->replicas);
}

// Returns whether the unit's requests were in flight: all of them start together.
static bool wait_for_unit(Request **request, const Unit *u) {
    bool in_flight = request[u->first_param] != NULL;
    comm_wait_all(request + u->first_param, u->params);
    return in_flight;
}

// The next micro-batch adds to sums that every rank holds; scaled by 1 / N, they are counted only once.
static void before_more(void *context, Model *model, int unit) {
    const Unit *u = &model->params.unit[unit];
    if (wait_for_unit(context, u)) op_scale(unit_total_grad(u), 1.0 / u->replicas.size);
}

static void wait_for_all(void *context, Model *model) {
    for (int unit = model->params.units - 1; unit >= 0; unit--)
        wait_for_unit(context, &model->params.unit[unit]);
}

static void *plug(Model *model) {
    Request **request = calloc((size_t)model->params.count, sizeof *request);
    CHECK(request, "out of host memory for requests");
    model->sockets.gradients.context = request;
    model->sockets.gradients.begin = before_more;
    model->sockets.gradients.ready = start_all_reduces;
    model->sockets.gradients.finish = wait_for_all;
    return request;
}

static void unplug(Model *model, void *context) {
    (void)model;
    free(context);
}

static void price(Price *price, const Model *model, const void *context) {
    ddp_naive.price(price, model, context);
}

const Technique ddp_overlap = {
    .name = "ddp_overlap", .axes = 1u << AXIS_DP, .plug = plug, .unplug = unplug, .price = price};

#ifndef NO_MAIN
int main(int argc, char **argv) {
    const Program program = {
        .purpose = "Data parallelism: gradients are in flight while backward goes on.",
        .claim = "the ranks reproduce the single-device step",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5",
        .natural = 4,
        .before = {"ddp_naive", (const Technique *[]){&ddp_naive, &recompute, NULL}, NULL, 0},
        .techniques = (const Technique *[]){&ddp_overlap, &recompute, NULL}};
    return program_main(argc, argv, &program);
}
#endif
