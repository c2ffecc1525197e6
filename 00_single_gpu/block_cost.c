// block_cost.c: what one more block adds to a micro-batch: calls and bytes sent in each pass, and what it
// keeps for backward. Playbook: "Tensor Parallelism", whose tables count a block.
//
// A dry run with two blocks minus one with a single block. This file has no main: chapter 03 calls it.
#include "harness.h"

static Sent sent_since_reset(const char *call) {
    CommCount count = comm_count(call);
    return (Sent){(double)count.calls, (double)count.bytes};
}

static Sends sends_since_reset(void) {
    return (Sends){sent_since_reset("all_reduce"), sent_since_reset("all_gather"),
                   sent_since_reset("reduce_scatter")};
}

// One micro-batch through the whole model, counted on this rank; the first of two, so that gradients wait
// for the second.
static BlockCost micro_batch_cost(const Config *config, Mesh mesh, Techniques techniques) {
    BlockCost cost;
    Trainer *t = trainer_new(config, mesh, techniques);
    Batch batch = batch_new(t, 0);
    int64_t before = memory_account().now[MEMORY_ACTIVATION];
    model_begin_step(t->model, 2);
    MicroBatch micro = micro_batch_new(t->model, 0, config->micro_batch, batch.tokens, batch.targets, 1);
    clock_reset();
    model_forward(t->model, &micro);
    cost.pass[FORWARD] = sends_since_reset();
    cost.kept = (double)(memory_account().now[MEMORY_ACTIVATION] - before);
    clock_reset();
    model_backward(t->model, &micro);
    cost.pass[BACKWARD] = sends_since_reset();
    micro_batch_free(t->model, &micro);
    batch_free(&batch);
    trainer_free(t);
    return cost;
}

static Sent difference_of(Sent more, Sent less, Group world) {
    return (Sent){more.calls - less.calls, comm_sum(more.bytes - less.bytes, world)};
}

BlockCost program_block_cost(const Config *config, Mesh mesh, Techniques techniques) {
    Config c = *config;
    c.layers = 1;
    BlockCost one = micro_batch_cost(&c, mesh, techniques);
    c.layers = 2;
    BlockCost cost = micro_batch_cost(&c, mesh, techniques);
    for (int pass = FORWARD; pass <= BACKWARD; pass++) {
        Sends *two = &cost.pass[pass], *less = &one.pass[pass];
        two->all_reduce = difference_of(two->all_reduce, less->all_reduce, mesh.world);
        two->all_gather = difference_of(two->all_gather, less->all_gather, mesh.world);
        two->reduce_scatter = difference_of(two->reduce_scatter, less->reduce_scatter, mesh.world);
    }
    cost.kept -= one.kept;
    return cost;
}
