// cost.c: one step of training from the parts of its blocks: the pipeline, what is hidden behind what, and
// the optimizer. Playbook: "Finding the Best Training Configuration", appendix A3.
//
//     step  =  m t  +  (p - 1) / v  t'  +  exposed  +  optimizer     t: slowest stage, t': mean of all
//
// t is a micro-batch's forward and backward, including exposed communication. Gradients are reduced during
// the last micro-batch's backward, and ZeRO-3's weights are gathered while the block before computes:
//
//     exposed  =  max(communication - computing beside it, (1 - hidden) communication)
//
// This file has no main: find_config.c uses it.
#include <math.h>

#include "cost_block.h"

// ---- what a model has ----

// Of all blocks, with so many of their experts; the router is of all experts.
static double weights(const CostModel *m, double experts) {
    const CostLayout one = {.tp = 1, .ep = 1, .etp = 1};
    double block = cost_block_weights(m, &one, false), dense = m->dense_layers;
    if (experts < m->experts) block -= cost_expert_weights(m, &one) * (1 - experts / m->experts);
    double plain = dense > 0 ? cost_block_weights(m, &one, true) : 0;
    return (m->layers - dense) * block + dense * plain;
}

double cost_parameters(const CostModel *m) {
    return weights(m, m->experts) + (m->tied ? 1 : 2) * m->vocab * m->hidden + m->hidden;
}

double cost_active_parameters(const CostModel *m) {
    return weights(m, fmin(m->experts, m->top_k)) + m->vocab * m->hidden;
}

double cost_token_flops(const CostModel *m, bool causal) {
    double width = m->head_size + (m->kv_rank > 0 ? m->rope_size / 2 : 0);
    return 6 * cost_active_parameters(m) + 12 * m->layers * m->heads * width * m->seq / (causal ? 2 : 1);
}

// ---- a stage ----

typedef struct Stage {
    Parts parts;                  // of one micro-batch, both passes
    double forward;               // computed forward
    double weights, expert_part;  // stored, and of these in experts
} Stage;

static Parts sum_of(const Passes *p) {
    Parts sum = p->forward;
    parts_add(&sum, &p->backward, 1);
    return sum;
}

static void add_passes(Stage *s, const Passes *passes, double times) {
    Parts both = sum_of(passes);
    parts_add(&s->parts, &both, times);
    s->forward += times * parts_computed(&passes->forward);
}

static void add_again(const Pricing *p, Stage *s, const Passes *block, double layers) {
    const CostLayout *l = p->layout;
    Parts once = block->forward, more = {0};
    if (l->recompute == RECOMPUTE_FULL) more = once;
    if (l->recompute == RECOMPUTE_SELECTIVE && !p->habits->flash)
        more.attention = once.attention, more.memory = once.memory / 2;
    if (l->again > 0) {
        more.multiply = l->again * once.multiply;
        more.memory = once.memory;
        more.ep = l->again > 0.75 ? once.ep : 0;
    }
    if (l->sp) more.tp *= 3.0 / 4;  // backward reads nothing behind the block's last reduce-scatter
    parts_add(&s->parts, &more, layers);
}

static Stage stage_of(const Pricing *p, double layers, bool embedding, bool head) {
    const CostModel *m = p->model;
    Stage s = {.weights = 0};
    double dense = m->experts > 0 ? m->dense_layers / m->layers * layers : layers;
    for (int plain = 0; plain < 2; plain++) {
        double count = plain ? dense : layers - dense;
        if (!(count > 0)) continue;
        Passes block = cost_block(p, plain);
        add_passes(&s, &block, count);
        add_again(p, &s, &block, count);
        s.weights += count * cost_block_weights(m, p->layout, plain);
        if (!plain) s.expert_part += count * cost_expert_weights(m, p->layout);
    }
    if (embedding) {
        Passes passes = cost_embedding(p);
        add_passes(&s, &passes, 1);
    }
    if (head) {
        Passes passes = cost_head(p);
        add_passes(&s, &passes, 1);
    }
    s.weights += ((embedding && !(m->tied && head)) + head) * m->vocab * m->hidden / p->layout->tp;
    return s;
}

// ---- what is exposed ----

// The exposed part of a communication, given the compute beside it.
static double left_of(double communication, double beside, double hidden) {
    return fmax(communication - beside, (1 - hidden) * communication);
}

// In a micro-batch, the experts' communication is exposed unless a program overlaps two micro-batches; keys
// and values are sent while attention computes.
static Parts exposed_of(const Pricing *p, const Stage *s, double hidden) {
    Parts e = s->parts;
    e.tp *= p->habits->hides_tp ? 1 - hidden : 1;
    e.ep *= p->habits->hides_ep ? 1 - hidden : 1;
    e.cp = left_of(e.cp, e.attention, hidden);
    return e;
}

// A collective over the ranks of data parallelism on a rank's part of a stage, `e` bytes an element: the
// weights that all of these ranks share, and those of experts, which fewer ranks share.
static double over_replicas(const Pricing *p, const char *name, double e, const Stage *s) {
    const CostLayout *l = p->layout;
    int ranks = l->dp * l->cp, holders = ranks * l->tp / (l->ep * l->etp);
    return cost_collective(p, name, e * (s->weights - s->expert_part), ranks, l->tp) +
           cost_collective(p, name, e * s->expert_part, holders, l->ep * l->etp);
}

// Gradients are reduced during the last backward, weights gathered during the first forward. ZeRO-3 does
// both in each micro-batch, and gathers again for backward, unless a pipeline keeps the gathered weights.
static double data_parallel_exposed(const Pricing *p, const Stage *s, double hidden) {
    const CostLayout *l = p->layout;
    double g = p->habits->gradient_bytes, forward = s->forward, all = parts_computed(&s->parts);
    double weights = over_replicas(p, "all_gather", l->gather_fp8 ? 1 : 2, s);
    double gradients = over_replicas(p, "reduce_scatter", g, s), times = 1;
    if (l->zero == 0) weights = gradients;  // an all-reduce
    if (l->zero >= 3 && l->pp == 1) {
        times = (double)l->micro_batches;
        gradients += weights;
    }
    if (!p->habits->hides_dp) return times * (weights + gradients);
    if (l->zero == 0) return left_of(weights + gradients, all - forward, hidden);
    return times * (left_of(weights, forward, hidden) + left_of(gradients, all - forward, hidden));
}

// A message between stages, with the rows that a rank has; two for each micro-batch and chunk.
static double messages_exposed(const Pricing *p, double hidden) {
    const CostLayout *l = p->layout;
    if (l->pp == 1) return 0;
    double bytes = 2.0 * (double)l->micro_batch * p->model->seq / l->cp * p->model->hidden / l->tp;
    bool inside = l->tp * l->cp * l->dp * l->pp <= p->per_node;
    double link = inside ? p->table->machine.node_bytes_per_second : p->network;
    double hop = bytes / link + p->table->machine.network_latency;
    double all = 2 * l->chunks * (double)l->micro_batches * hop;
    return all * (p->habits->hides_pp ? 1 - hidden : 1) + 2 * (l->pp - 1) * hop;
}

// ---- the step ----

static double optimizer_seconds(const Pricing *p, const Stage *s) {
    const CostLayout *l = p->layout;
    double plain = s->weights - s->expert_part, shards = l->zero > 0 ? l->dp * l->cp : 1;
    double expert_shards = l->zero > 0 ? fmax(1, shards * l->tp / (l->ep * l->etp)) : 1;
    // AdamW reads and writes master, m and v, reads the gradient and writes the weight; the norm reads it
    // before, and its sum was set to zero.
    double bytes = (30 + 4) * (plain / shards + s->expert_part / expert_shards) + 4 * s->weights;
    return bytes / p->table->machine.memory_bytes_per_second;
}

CostTime cost_time(const CostModel *model, const CostLayout *layout, const Cluster *cluster,
                   const CostTable *table, const CostHabits *habits, double hidden) {
    const CostLayout *l = layout;
    Pricing p = {model,
                 layout,
                 table,
                 habits,
                 cluster->per_node,
                 cluster->network > 0 ? cluster->network : table->machine.network_bytes_per_second};
    double m = (double)l->micro_batches, pp = l->pp, chunks = l->chunks;
    double slots = ceil(model->layers / (pp * chunks)) * chunks, slack = slots * pp - model->layers;
    double ends = pp > 1 ? fmin(slots, ceil(slack / 2)) : 0;
    Stage inner = stage_of(&p, pp > 1 ? slots : model->layers, pp == 1, pp == 1), slow = inner;
    Stage last = pp > 1 ? stage_of(&p, slots - ends, false, true) : inner;
    Parts e = exposed_of(&p, &inner, hidden), e_last = exposed_of(&p, &last, hidden);
    double t = parts_computed(&e) + e.tp + e.cp + e.ep;
    double t_last = parts_computed(&e_last) + e_last.tp + e_last.cp + e_last.ep;
    double mean = pp > 1 ? (t * (model->layers / slots) + (t_last - t * (slots - ends) / slots)) / pp : t;
    if (t_last > t) t = t_last, slow = last, e = e_last;
    CostTime time = {.multiply = m * e.multiply,
                     .attention = m * e.attention,
                     .memory = m * e.memory,
                     .bubble = habits->bubble * (pp - 1) / chunks * mean,
                     .tp = m * e.tp,
                     .cp = m * e.cp,
                     .ep = m * e.ep,
                     .dp = data_parallel_exposed(&p, &slow, hidden),
                     .pp = messages_exposed(&p, hidden),
                     .optimizer = optimizer_seconds(&p, &slow)};
    time.step = time.multiply + time.attention + time.memory + time.bubble + time.tp + time.cp + time.ep +
                time.dp + time.pp + time.optimizer;
    return time;
}
