// zero.c: what the three stages of ZeRO share: how requests end, and their prices. Playbook: "ZeRO";
// Rajbhandari et al. 2020.
//
// Psi parameters on N ranks, m micro-batches; e bytes per weight, g per gradient, k of optimizer state:
//
//             weights    gradients  optimizer  sent by all ranks in a step
//     DDP     e Psi      g Psi      k Psi      2 (N - 1) g Psi                  all-reduce
//     ZeRO-1  e Psi      g Psi      k Psi / N  (N - 1) (g Psi + e Psi)          reduce-scatter, all-gather
//     ZeRO-2  e Psi      g Psi / N  k Psi / N  (N - 1) (m g Psi + e Psi)
//     ZeRO-3  e Psi / N  g Psi / N  k Psi / N  (N - 1) m (g Psi + 2 e Psi - …)  all-gather twice
//
// Each rank sends, in elements with one micro-batch, about 2 Psi, 2 Psi, 2 Psi, 3 Psi. (With 16-bit weights
// g is 4, as sums are f32; DDP and ZeRO-1 also hold 16-bit gradients.) One or two units in use come on top:
// their whole gradients (ZeRO-2 and -3) and weights (ZeRO-3). Parts need not be equal: zero_part says which
// elements a rank has, if any.
//
// Proof: no bit differs from DDP on the same ranks with the same order of sums (zero_twins.c). This file
// has no main.
#include "zero.h"

#include <math.h>
#include <stdlib.h>

const Option zero_option = {
    "zero",    OPTION_CHOICE,
    NULL,      "0",
    0,         0,
    "0|1|2|3", "sharded over data-parallel ranks: 1 optimizer state, 2 also gradients, 3 also weights",
    false};

bool zero_on(const Config *c, int stage) {
    return !config_has(c, "zero") || config_number(c, "zero") == stage;
}

void zero_wait(Request **request) {
    if (*request) comm_wait(*request);
    *request = NULL;
}

// The caller restores the sockets and frees the model's other tensors.
void zero_unplug(Model *model, void *context) {
    Zero *zero = context;
    for (int i = 0; i < model->params.units; i++) {
        zero_wait(&zero->reduction[i]);
        zero_wait(&zero->gathering[i]);
        if (model->params.sharding >= SHARD_GRADS) tensor_free(&model->params.unit[i].grads);
        if (model->params.sharding == SHARD_VALUES) tensor_free(&model->params.unit[i].values);
    }
    tensor_free(&zero->gradient);
    free(zero->reduction);
    free(zero);
}

// ---- prices ----

// The most bytes of whole gradients that ZeRO-2 and -3 hold besides the rank's own part. While backward
// fills a unit's gradient, that of the unit before it is being reduced (before the first unit of a
// micro-batch comes the last one of the previous micro-batch). A 16-bit gradient exists in both precisions
// while it is converted. With tied weights the embedding's exists from the head on.
static double gradients_at_work(const Model *m) {
    const Params *p = &m->params;
    double e = (double)dtype_size(p->recipe.gradient), g = (double)dtype_size(p->recipe.sum), most = 0;
    for (int i = 0; i < p->units; i++) {
        int before = i + 1 < p->units ? i + 1 : m->config.grad_acc > 1 ? 0 : -1;
        double own = (double)p->unit[i].count, behind = before >= 0 ? (double)p->unit[before].count : 0;
        double waiting = m->config.tied && i != m->embedding_unit ? e * (double)m->embedding->count : 0;
        double filling = e * own + g * behind, converting = e == g ? 0 : (e + g) * own;
        double here = waiting + (filling > converting ? filling : converting);
        if (here > most) most = here;
    }
    return most;
}

// The most bytes of weights that ZeRO-3 has gathered at once: a unit, and with prefetch the one after it.
// With tied weights the embedding comes with the head.
static double weights_at_work(const Model *m, bool prefetch) {
    const Params *p = &m->params;
    double e = (double)dtype_size(p->recipe.weight), most = 0;
    for (int i = 0; i < p->units; i++) {
        bool next = prefetch && i + 1 < p->units, head = i + next == m->head_unit;
        double here = (double)p->unit[i].count + (next ? (double)p->unit[i + 1].count : 0);
        if (m->config.tied && head) here += (double)m->embedding->count;
        if (e * here > most) most = e * here;
    }
    return most;
}

// How often ZeRO-3 gathers a unit's weights in a step: each unit in forward, blocks again in backward. The
// head is used last in forward and first in backward, so once is enough. The embedding's backward reads no
// weights; with tied weights, it is gathered once more for the head.
static double gathers_of(const Model *m, int unit) {
    bool end = unit == m->embedding_unit || unit == m->head_unit;
    return (double)m->config.grad_acc * (end ? 1 + (m->config.tied && unit == m->embedding_unit) : 2);
}

void zero_price(Price *price, const Model *m, const Zero *zero, int stage) {
    const Params *p = &m->params;
    double micros = (double)m->config.grad_acc, own = 0;
    for (int i = 0; i < p->units; i++) {
        const Unit *u = &p->unit[i];
        if (u->count == 0) continue;  // another stage's
        own += (double)u->own_count;
        double times = price->finals ? (double)price->finals[i] : micros;
        price_reduce_scatter(price, stage == 1 ? 1 : times, u->count, u->own_count, p->recipe.sum,
                             u->replicas);
        price_all_gather_coded(price, stage == 3 ? gathers_of(m, i) : 1, u->own_count, p->recipe.weight,
                               stage == 3 ? p->recipe.send_weights : NULL, u->replicas);
    }
    price->states = own;
    if (stage >= 2) price->gradients = own;
    // A pipeline's schedule decides which units follow one another: only a dry run knows.
    if (stage >= 2) price->more[MEMORY_GRADIENT] += price->finals ? NAN : gradients_at_work(m);
    if (stage == 3) price->values = own;
    if (stage == 3) price->more[MEMORY_PARAMETER] += weights_at_work(m, zero->prefetch);
}
