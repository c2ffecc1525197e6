// pipeline_layouts.c: what can be combined with a pipeline: techniques of earlier chapters, in plug order.
// Playbook: "5D parallelism in a nutshell".
//
// A pipeline splits the model by layers and the batch in time; all other techniques split what is inside a
// layer, or the samples, and are not affected. Two differ from their own chapters:
//
//     --zero 3      a stage's weights are gathered once a step, not for each pass (zero3_per_step.c)
//     --zero-r      with full recomputation a block keeps only its input, the same on all ranks of tp: now
//                   each keeps its part. A pipeline holds inputs of many micro-batches, so there is much to
//                   save: all but n h / tp of each, for an all-gather before its B.
//
// ZeRO-R's one tensor for all checkpoints has room for only one micro-batch, and its constant buffer works
// only with plain data parallelism: neither is offered here. This file has no main.
#include <stdlib.h>
#include <string.h>

#include "pipeline.h"

// ---- ZeRO-R's partitioned checkpoints ----

static bool zero_r_on(const Config *c) { return config_number(c, "zero-r") != 0; }

static void zero_r_check(const Config *c) {
    CHECK(c->recompute == RECOMPUTE_FULL,
          "--zero-r shards the inputs of blocks that full recomputation keeps: add --recompute full");
    CHECK(!config_number(c, "sp"),
          "--zero-r: with --sp each rank of --tp keeps its own rows already: leave out one of the two");
}

// In place of recompute.c's, which keeps the whole input.
static void *zero_r_plug_parts(Model *m) {
    ZeroR *z = host_alloc(sizeof *z);
    *z = (ZeroR){.tp = m->mesh.tp};
    zero_r_plug(m, z);
    return z;
}

static void zero_r_unplug_parts(Model *m, void *context) {
    zero_r_unplug(m, context);
    free(context);
}

static void zero_r_price(Price *price, const Model *m, const void *context) {
    const ZeroR *z = context;
    const Pipeline *p = m->sockets.schedule.context;  // NULL: train_5d without stages
    int64_t first, own = zero_part(model_tokens(m) * m->config.hidden, z->tp.rank, z->tp.size, &first);
    for (int64_t layer = 0; layer < m->config.layers; layer++) {
        int unit = m->first_block_unit + (int)layer;
        double passes = p ? (double)(p->finals[unit] - p->idle[unit]) : (double)m->config.grad_acc;
        price_all_gather(price, passes, own, m->params.recipe.weight, z->tp);
    }
    // For the tokens of all ranks of cp: the price of context parallelism scales it to this rank's own.
    double share = (double)(m->config.micro_batch * m->config.seq) / (double)model_tokens(m);
    for (int i = 0; i < price->block_rows; i++)
        if (!strcmp(price->block[i].what, "x"))
            price->block[i].bytes = share * (double)own * (double)dtype_size(m->params.recipe.weight);
}

static const Option zero_r_option = {
    "zero-r", OPTION_FLAG,
    NULL,     NULL,
    0,        0,
    "",       "with --recompute full: --tp shards the inputs of blocks, which are all that is kept",
    false};

const Technique zero_r_in_pipeline = {.name = "zero_r",
                                      .option = &zero_r_option,
                                      .options = 1,
                                      .asked = "--tp",
                                      .axes = 1u << AXIS_TP,
                                      .wraps = 1u << SOCKET_ACTIVATIONS,
                                      .enabled = zero_r_on,
                                      .check = zero_r_check,
                                      .plug = zero_r_plug_parts,
                                      .unplug = zero_r_unplug_parts,
                                      .price = zero_r_price};

const Technique *const pipeline_layouts[] = {&ddp_no_sync,
                                             &zero1,
                                             &zero2,
                                             &zero3_per_step,
                                             &tensor_parallel,
                                             &sequence_parallel,
                                             &vocab_parallel,
                                             &async_tensor_parallel,
                                             &ring_attention,
                                             &zigzag_ring_attention,
                                             &all_gather_attention,
                                             &ulysses,
                                             &pipeline,
                                             &recompute,
                                             &zero_r_in_pipeline,
                                             NULL};
