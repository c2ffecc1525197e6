// expert_layouts.c: the techniques of earlier chapters that combine with experts, in plug order. Playbook:
// "5D parallelism in a nutshell".
//
// Experts change the inside of a block, and which ranks hold copies of which weights. Techniques that shard
// layers, samples and tokens work unchanged, with three exceptions:
//
//     --tp          only with --sp: each rank of tp routes the rows that it holds between regions
//     --ep          takes its ranks from dp x cp x tp, neighbours first: it may exceed dp
//     --zero        shards each expert over the ranks that hold copies of it, all else over dp x cp
//
// --zero 3 gathers a unit for each use or, with --pp, once a step. This file has no main.
#include "expert_parallel.h"

// ---- with --pp, and without ----

static bool has_stages(const Config *c) { return c->pp > 1; }
static bool gathers_per_use(const Config *c) { return c->pp == 1 && zero3.enabled(c); }
static bool gathers_per_step(const Config *c) { return c->pp > 1 && zero3.enabled(c); }

// Copies of records, on under these conditions.
static Technique stages, zero3_per_use, zero3_of_stages;

static Techniques with_copies(Techniques list) {
    stages = technique_when(pipeline, has_stages);
    zero3_per_use = technique_when(zero3, gathers_per_use);
    zero3_of_stages = technique_when(zero3_per_step, gathers_per_step);
    return list;
}

// ---- the lists ----

#define ALL_BUT_THE_LAST(dispatch)                                                                  \
    &moe, &ddp_no_sync, &zero1, &zero2, &zero3_per_use, &zero3_of_stages, &sequence_parallel,       \
        &vocab_parallel, &dispatch, &ring_attention, &zigzag_ring_attention, &all_gather_attention, \
        &ulysses, &stages
static const Technique *const plain[] = {ALL_BUT_THE_LAST(expert_parallel), &recompute, NULL};
static const Technique *const plain_overlapped[] = {ALL_BUT_THE_LAST(expert_parallel), &overlapped_experts,
                                                    &recompute, NULL};
static const Technique *const by_nodes[] = {ALL_BUT_THE_LAST(node_limited_routing), &recompute, NULL};
static const Technique *const by_nodes_overlapped[] = {ALL_BUT_THE_LAST(node_limited_routing),
                                                       &overlapped_experts, &recompute, NULL};

Techniques expert_layouts(void) { return with_copies(plain); }
Techniques overlapped_layouts(void) { return with_copies(plain_overlapped); }
Techniques node_limited_layouts(void) { return with_copies(by_nodes); }
Techniques node_limited_overlapped(void) { return with_copies(by_nodes_overlapped); }
const Technique *const expert_baseline[] = {&moe, &recompute, NULL};

const Option proof_only_option = {
    "proof-only", OPTION_FLAG, NULL, NULL, 0, 0, "", "leave out the tables after the proof", false};
