// price.c: what a run sends and stores, predicted by closed forms from its techniques.
//
// The price starts as that of one device. Then each technique changes its part, from the last plugged to
// the first, so that all callers of a socket are counted before the technique that fills it prices the
// calls: vocabulary parallelism adds calls of the region, recomputation runs forward again, and so tensor
// parallelism knows how many all-reduces a step makes.
//
// Bytes sent: none; it predicts them. This file has no main: proof.c compares it with every run.
#include <string.h>

#include "formulas.h"

// ---- what a step sends ----

void price_sent(Price *p, const char *call, double calls, double bytes, Group group) {
    if (group.size == 1) return;
    int i = 0;
    while (i < p->kinds && strcmp(p->sent[i].call, call) != 0) i++;
    CHECK(i < MOST_CALLS, "more than %d kinds of calls are priced", MOST_CALLS);
    if (i == p->kinds) p->sent[p->kinds++].call = call;
    p->sent[i].calls += calls;
    p->sent[i].bytes += bytes;
}

// The elements that this member reduces: ceil(elements / n) each, the last members fewer (comm.h).
static double piece(int64_t elements, Group group) {
    int64_t each = (elements + group.size - 1) / group.size, rest = elements - group.rank * each;
    return (double)(rest < 0 ? 0 : rest < each ? rest : each);
}

void price_all_reduce(Price *p, double calls, int64_t elements, DType dtype, Group group) {
    double own = piece(elements, group);
    price_sent(p, "all_reduce", calls,
               calls * (double)dtype_size(dtype) * ((double)elements - own + (group.size - 1) * own),
               group);
}

void price_all_gather(Price *p, double calls, int64_t own, DType dtype, Group group) {
    price_sent(p, "all_gather", calls, calls * (double)dtype_size(dtype) * (double)own * (group.size - 1),
               group);
}

void price_all_gather_coded(Price *p, double calls, int64_t own, DType dtype, const Codec *codec,
                            Group group) {
    if (!codec) price_all_gather(p, calls, own, dtype, group);
    for (int i = 0; codec && i < codec->tensors; i++) {
        int64_t coded = own > 0 ? codec->count(codec->context, i, own) : 0;
        price_all_gather(p, calls, coded, codec->dtype[i], group);
    }
}

void price_reduce_scatter(Price *p, double calls, int64_t elements, int64_t own, DType dtype, Group group) {
    price_sent(p, "reduce_scatter", calls, calls * (double)dtype_size(dtype) * (double)(elements - own),
               group);
}

// ---- what a rank stores ----

void price_scale_kept(Price *p, Split split, double numerator, double denominator) {
    for (int i = 0; i < p->block_rows; i++)
        if (p->block[i].split == split) p->block[i].bytes = p->block[i].bytes / denominator * numerator;
    for (int i = 0; i < p->end_rows; i++)
        if (p->end[i].split == split) p->end[i].bytes = p->end[i].bytes / denominator * numerator;
}

double price_rows(const PriceKept *rows, int count, const char *what) {
    double bytes = 0;
    for (int i = 0; i < count; i++)
        if (!what || !strcmp(rows[i].what, what)) bytes += rows[i].bytes;
    return bytes;
}

double price_kept(const Price *p) {
    return p->blocks * price_rows(p->block, p->block_rows, NULL) + price_rows(p->end, p->end_rows, NULL);
}

// Elements that stay here: all of the weights, unless a technique has set how many.
static double elements_here(const Price *p, double said) {
    if (said >= 0) return said;
    double all = 0;
    for (int i = 0; i < ROLES; i++) all += p->elements[i];
    return all;
}

double price_states(const Price *p, const Model *m, MemoryKind kind) {
    Recipe r = m->params.recipe;
    double weight = (double)dtype_size(r.weight), gradient = (double)dtype_size(r.gradient);
    double sum = (double)dtype_size(r.sum),
           master = recipe_has_masters(r) ? (double)dtype_size(r.master) : 0;
    double moments = m->config.optimizer == OPTIMIZER_ADAMW
                         ? (double)dtype_size(r.moment) + (double)dtype_size(r.second)
                         : 0;
    switch (kind) {
        case MEMORY_PARAMETER:
            return weight * elements_here(p, p->values) + p->more[kind];
        case MEMORY_GRADIENT:
            // Where each rank keeps only the sums of its own part, whole gradients exist only in use.
            if (p->gradients >= 0) return sum * p->gradients + p->more[kind];
            return (gradient + (recipe_has_accumulators(r) ? sum : 0)) * elements_here(p, -1) +
                   p->more[kind];
        case MEMORY_OPTIMIZER:
            return (master + moments) * elements_here(p, p->states) + p->more[kind];
        default:
            fatal("the price of a run knows no states in memory of %s", memory_kind_name(kind));
    }
}

// ---- one device, and the sum ----

static Price price_of_one_device(const Config *c) {
    double L = (double)c->layers, micros = (double)c->grad_acc, h = (double)c->hidden;
    double f = (double)config_dense_width(c), e = (double)c->experts, ef = (double)config_expert_width(c);
    double d = (double)config_head_size(c), q = (double)c->heads * d, kv = (double)c->kv_heads * d,
           v = (double)c->vocab;
    Price p = {.values = -1,
               .gradients = -1,
               .states = -1,
               .blocks = L,
               .forwards = micros,
               .attentions = micros,
               .backwards = micros,
               .losses = micros,
               .lookup_micros = micros,
               .head_micros = micros};
    // Two regions in a block; W enters both again: forward keeps what enters, not what enter returns.
    p.enters = 4 * L * micros;
    p.leaves = p.enters_backward = p.leaves_backward = 2 * L * micros;
    const double elements[ROLES] = {
        [ROLE_EMBEDDING] = v * h,
        [ROLE_NORM1] = L * h,
        [ROLE_Q] = L * q * h,
        [ROLE_K] = L * kv * h,
        [ROLE_V] = L * kv * h,
        [ROLE_O] = L * h * q,
        [ROLE_NORM2] = L * h,
        [ROLE_GATE] = L * f * h,
        [ROLE_UP] = L * f * h,
        [ROLE_DOWN] = L * h * f,
        [ROLE_NORM] = h,
        [ROLE_HEAD] = c->tied ? 0 : v * h,
        [ROLE_ROUTER] = L * e * h,
        [ROLE_EXPERT_GATE] = L * e * ef * h,
        [ROLE_EXPERT_UP] = L * e * ef * h,
        [ROLE_EXPERT_DOWN] = L * e * ef * h,
    };
    memcpy(p.elements, elements, sizeof elements);
    MemoryPlan plan = {.model = *c, .tp = 1, .dp = 1, .whole_vocabulary = true};
    p.block_rows = memory_block_rows(p.block, &plan);
    p.end_rows = memory_end_rows(p.end, &plan);
    return p;
}

Price trainer_price(const Trainer *t) {
    const Model *m = t->model;
    Price p = price_of_one_device(&t->config);
    for (int i = t->techniques - 1; i >= 0; i--)
        if (t->technique[i]->price) t->technique[i]->price(&p, m, t->context[i]);
    // Every step itself sums partial gradients over the copies of a weight, the label count and the loss,
    // and for the gradient norm one sum of squares per weight.
    for (int i = 0; i < m->params.count; i++) {
        int64_t elements = params_partial_elements(&m->params, i);
        if (elements >= 0)
            price_all_reduce(&p, 1, elements, m->params.recipe.sum, m->params.param[i].parts);
    }
    price_all_reduce(&p, 1, 1, F64, m->mesh.dp);
    price_all_reduce(&p, 1, 1, F64, m->params.replicas);
    Group norm = params_norm_group(&m->params);
    if (norm.size > 1) price_all_reduce(&p, 1, m->params.count, F64, norm);
    return p;
}
