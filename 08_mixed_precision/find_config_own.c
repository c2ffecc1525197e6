// find_config_own.c: a published run as the search would price it. Playbook: "Benchmarking thousands of
// configurations".
//
// cost.c models the program that made a run: what it overlaps, how it computes attention. The search prices
// one program, this book's, on the model clock (cost_lone_step.c). Both have the same rates, but only the
// errors of this step say how far the search's figures are from what other programs reach.
//
// A feed-forward part of two matrices becomes one of three with as many weights. This file has no main:
// find_config.c shows it.
#include <math.h>

#include "05_pipeline_parallel/pipeline.h"
#include "find_config.h"

// Whether a Config can say it: neither 8 bits, nor a part of a block recomputed, nor experts that are split,
// nor what only DeepSeek's models have, nor stages without a layer.
static bool can_be_own(const Published *r) {
    const CostModel *m = &r->model;
    const CostLayout *l = &r->layout;
    bool plain = !l->fp8 && !(l->again > 0),
         whole = l->etp == 1 && !(m->experts > 0 && m->dense_layers > 0);
    bool heads = !(m->kv_rank > 0) && fmod(m->kv_heads, l->tp) == 0 && fmod(m->heads, l->tp) == 0;
    bool stages = l->pp <= RANKS_MOST && l->pp * l->chunks <= m->layers && l->pp * l->chunks <= STAGES_MOST;
    return plain && whole && heads && stages && l->micro_batches <= MICRO_BATCHES_MOST;
}

static Goal goal_of(const Published *r) {
    const CostModel *m = &r->model;
    int64_t tp = r->layout.tp;
    Goal goal = {.model = config_of_model("llama-3-8b", "dtype=bf16 optimizer=adamw")};
    Config *c = &goal.model;
    c->layers = (int64_t)m->layers, c->hidden = (int64_t)m->hidden, c->vocab = (int64_t)m->vocab;
    c->heads = (int64_t)m->heads, c->kv_heads = (int64_t)m->kv_heads, c->seq = (int64_t)m->seq;
    c->head_size = (int64_t)m->head_size;
    c->ffn = (int64_t)round(m->ffn * m->matrices / (3.0 * (double)tp)) * tp;
    c->experts = (int64_t)m->experts, c->top_k = (int64_t)m->top_k;
    c->shared_experts = (int64_t)m->shared, c->expert_ffn = (int64_t)m->expert_ffn;
    return goal;
}

double run_own_step(const Published *r, const Factors *factors) {
    const CostLayout *l = &r->layout;
    if (!can_be_own(r)) return NAN;
    CostTable table = cost_table(&r->machine, factors, r->power);
    if (r->cluster.network > 0)
        table.machine.network_bytes_per_second = r->cluster.network * factors->value[FACTOR_LINKS];
    cost_table_clock(&table);
    clock_set_nodes(r->cluster.per_node);
    Goal goal = goal_of(r);
    // Behind a pipeline others reduce ZeRO-2's gradients once a step, as this book does with ZeRO-1.
    int zero = l->pp > 1 && l->zero == 2 ? 1 : l->zero;
    Found f = {.tp = l->tp,
               .cp = l->cp,
               .pp = l->pp,
               .dp = l->dp,
               .ep = l->ep,
               .zero = l->dp * l->cp > 1 ? zero : 0,
               .schedule = l->pp > 1 && l->chunks > 1 ? INTERLEAVED : ONE_F_ONE_B,
               .chunks = l->chunks,
               .recompute = (int)l->recompute,
               .sp = l->sp || (r->model.experts > 0 && l->tp > 1),
               .micro_batch = l->micro_batch,
               .micro_batches = l->micro_batches};
    Config c = found_config(&goal, &f);
    config_set(&c, "attention", r->habits.flash);
    LoneParts parts = lone_parts(&c);
    LoneMemory memory;
    return lone_step(&c, &parts, lone_no_limits, &memory).step;
}
