// cost_memory.c: an estimate of the bytes that programs other than this book's hold on their fullest rank.
// Playbook: "Memory usage in Transformers"; Korthikanti et al. 2022.
//
// States follow ZeRO's formulas; activations are what linears, norms and attention need in backward, for as
// many micro-batches as 1F1B has in flight on the first stage. Where a source does not give its settings,
// the estimate rules out those that do not fit. This book's own bytes come from its records (cost_lone.c).
// This file has no main.
#include <math.h>

#include "cost_block.h"

double cost_memory(const CostModel *m, const CostLayout *l, const CostHabits *habits) {
    double layers = ceil(m->layers / l->pp), dense = m->experts > 0 ? m->dense_layers / m->layers : 1;
    double experts = m->experts > 0 ? layers * (1 - dense) * cost_expert_weights(m, l) : 0;
    double block = dense * cost_block_weights(m, l, true) +
                   (dense < 1 ? (1 - dense) * cost_block_weights(m, l, false) : 0);
    double plain = layers * block - experts + m->vocab * m->hidden / l->tp * (l->pp > 1 ? 1 : 2);
    double shards = l->dp * l->cp, expert_shards = fmax(1, shards * l->tp / (l->ep * l->etp));
    double whole = 2 * (l->zero < 3) + habits->gradient_bytes * (l->zero < 2);
    double shared = 12 + 2 * (l->zero >= 3) + habits->gradient_bytes * (l->zero >= 2);
    if (l->zero == 0) whole += 12, shared = 0;
    double states = whole * (plain + experts) + shared * (plain / shards + experts / expert_shards);
    // Rows without dropout's masks, stored scores with them: 2 + 1 + 2 bytes. p micro-batches are in
    // flight, and interleaving adds a share.
    double n = (double)l->micro_batch * m->seq / l->cp, h = m->hidden, t = l->tp;
    double f = m->experts > 0 ? m->top_k * m->expert_ffn + m->shared * m->expert_ffn : m->ffn;
    double q = m->heads * m->head_size, kv = m->kv_heads * m->head_size;
    double rows = 2 * n * h * (4 + (m->experts > 0 ? 2 * m->top_k : 0)) / (l->sp ? t : 1);
    double inner = 2 * n * (2 * q + 2 * kv + m->matrices * f) / t;
    double scores = habits->flash ? 0 : 5 * n * m->seq * m->heads / t;
    double kept = rows + inner + (l->recompute == RECOMPUTE_SELECTIVE ? 0 : scores), inputs = 2 * n * h;
    if (l->sp) inputs /= t;
    double in_flight =
        l->pp > 1 ? l->pp * (1 + (l->chunks > 1 ? (l->pp - 1.0) / (l->pp * l->chunks) : 0)) : 1;
    in_flight = fmin(in_flight, (double)l->micro_batches);
    double blocks = l->recompute == RECOMPUTE_FULL ? layers * in_flight * inputs + kept
                                                   : layers * in_flight * kept * (l->again > 0 ? 0.5 : 1);
    double logits = 6 * n * m->vocab / t;
    return states + blocks + (l->pp > 1 ? 0 : logits);
}
