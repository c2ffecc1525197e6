// expert_layouts.c: the techniques of earlier chapters that go with experts, in plug order. Playbook: "5D
// parallelism in a nutshell".
//
// Experts change the inside of a block, and which ranks hold copies of which weights. Techniques that shard
// layers, samples and tokens work unchanged, but for three things:
//
//     --tp          only with --sp: each rank of tp routes the rows that it has between regions
//     --ep          takes its ranks within dp x cp x tp, neighbours first: it may exceed dp
//     --zero        shards each expert over the ranks that hold copies of it, all else over dp x cp
//
// A run without --pp has no pipeline, and --zero 3 gathers a unit for each of its uses; with --pp it
// gathers once a step. This file has no main.
#include "expert_parallel.h"

// ---- with --pp, and without ----

static bool has_stages(const Config *c) { return c->pp > 1; }
static bool gathers_per_use(const Config *c) { return c->pp == 1 && zero_on(c, 3); }
static bool gathers_per_step(const Config *c) { return c->pp > 1 && zero_on(c, 3); }

static void stages_check(const Config *c) { pipeline.check(c); }
static void *stages_plug(Model *m) { return pipeline.plug(m); }
static void stages_unplug(Model *m, void *context) { pipeline.unplug(m, context); }
static void stages_price(Price *p, const Model *m, const void *context) { pipeline.price(p, m, context); }

static const Technique stages = {.name = "pipeline",
                                 .option = pipeline_options,
                                 .options = PIPELINE_OPTIONS,
                                 .axes = 1u << AXIS_PP,
                                 .enabled = has_stages,
                                 .check = stages_check,
                                 .shard = pipeline_shard,
                                 .plug = stages_plug,
                                 .unplug = stages_unplug,
                                 .price = stages_price};

static void zero3_shard(Model *m) { zero3.shard(m); }
static void *zero3_plug(Model *m) { return zero3.plug(m); }
static void zero3_price(Price *p, const Model *m, const void *context) { zero3.price(p, m, context); }

static const Technique zero3_per_use = {.name = "zero3",
                                        .axes = 1u << AXIS_DP,
                                        .enabled = gathers_per_use,
                                        .shard = zero3_shard,
                                        .plug = zero3_plug,
                                        .unplug = zero_unplug,
                                        .price = zero3_price};

static void *per_step_plug(Model *m) { return zero3_per_step.plug(m); }
static void per_step_price(Price *p, const Model *m, const void *context) {
    zero3_per_step.price(p, m, context);
}

static const Technique zero3_of_stages = {.name = "zero3_per_step",
                                          .axes = 1u << AXIS_DP,
                                          .enabled = gathers_per_step,
                                          .shard = zero3_shard,
                                          .plug = per_step_plug,
                                          .unplug = zero_unplug,
                                          .price = per_step_price};

// ---- the lists ----

#define ALL_BUT_THE_LAST(dispatch)                                                                  \
    &moe, &ddp_no_sync, &zero1, &zero2, &zero3_per_use, &zero3_of_stages, &sequence_parallel,       \
        &vocab_parallel, &dispatch, &ring_attention, &zigzag_ring_attention, &all_gather_attention, \
        &ulysses, &stages
const Technique *const expert_layouts[] = {ALL_BUT_THE_LAST(expert_parallel), &recompute, NULL};
const Technique *const overlapped_layouts[] = {ALL_BUT_THE_LAST(expert_parallel), &overlapped_experts,
                                               &recompute, NULL};
const Technique *const node_limited_layouts[] = {ALL_BUT_THE_LAST(node_limited_routing), &recompute, NULL};
const Technique *const node_limited_overlapped[] = {ALL_BUT_THE_LAST(node_limited_routing),
                                                    &overlapped_experts, &recompute, NULL};
const Technique *const expert_baseline[] = {&moe, &recompute, NULL};
const Option expert_layout_options[EXPERT_LAYOUT_OPTIONS] = {
    {"zero", OPTION_CHOICE, NULL, "0", 0, 0, "0|1|2|3",
     "sharded over dp: 1 optimizer state, 2 and gradients, 3 and weights", false},
    {"proof-only", OPTION_FLAG, NULL, NULL, 0, 0, "", "leave out the tables after the proof", false},
};
