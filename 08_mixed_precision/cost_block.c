// cost_block.c: the operations of one block and of both ends, each by its FLOPs and bytes, and the
// collectives around them. Playbook: "Tensor Parallelism", "Sequence Parallelism", "Expert Parallelism".
//
// For n tokens on this rank, r = n / tp of them between regions with sequence parallelism, e bytes an
// element:
//
//     forward    norm (r h)  g  QKV (n, q + 2 kv)  rope  attention  O  g*  add  norm  g  MLP  g*  add
//     backward   each multiply twice; attention 2 to 2.5 times
//     tp         g and g*: n h e each, all-gather and reduce-scatter (an all-reduce: both at once)
//     cp         the keys and values of all others
//     ep         r k h e twice a pass, to the ranks of the experts and back
//
// Bytes sent: as above. This file has no main: cost.c sums them over a step.
#include "cost_block.h"

#include <math.h>
#include <string.h>

enum { ELEMENT = 2 };  // bytes

double parts_computed(const Parts *p) { return p->multiply + p->attention + p->memory; }

void parts_add(Parts *sum, const Parts *p, double times) {
    sum->multiply += times * p->multiply;
    sum->attention += times * p->attention;
    sum->memory += times * p->memory;
    sum->tp += times * p->tp;
    sum->cp += times * p->cp;
    sum->ep += times * p->ep;
}

// ---- rates ----

static double memory_seconds(const Pricing *p, double bytes) {
    const CostTable *t = p->table;
    return bytes / t->machine.memory_bytes_per_second / cost_reached(t, WORK_MEMORY, bytes);
}

// The roofline of one multiply (m, k) (k, n).
static double multiply_seconds(const Pricing *p, double m, double k, double n, bool narrow) {
    const CostTable *t = p->table;
    double flops = 2 * m * k * n, bytes = ELEMENT * (m * k + k * n + m * n);
    double peak = t->machine.flops[narrow && p->layout->fp8 ? E4M3 : BF16];
    return fmax(flops / peak / cost_reached(t, WORK_MATMUL, flops), memory_seconds(p, bytes));
}

// Forward, and both of backward: the gradient of the input (m, n) (n, k), and of the weight (k, m) (m, n).
static void multiply(const Pricing *p, Passes *sum, double m, double k, double n, bool narrow) {
    double one = multiply_seconds(p, m, k, n, narrow);
    sum->forward.multiply += one;
    sum->backward.multiply += 2 * one;
    if (!narrow || !p->layout->fp8) return;
    // Operands are cast to 8 bits, each once in a pass; weights that are gathered in 8 bits need no cast.
    double cast = p->habits->cast_bytes, weights = p->layout->gather_fp8 ? 0 : k * n;
    sum->forward.memory += memory_seconds(p, cast * (m * k + weights));
    sum->backward.memory += memory_seconds(p, cast * m * n + 2 * (m * k + weights));
}

static void move(const Pricing *p, Passes *sum, double forward, double backward) {
    sum->forward.memory += memory_seconds(p, forward);
    sum->backward.memory += memory_seconds(p, backward);
}

double cost_collective(const Pricing *p, const char *name, double bytes, int n, int stride) {
    if (n <= 1 || bytes <= 0) return 0;
    const Machine *m = &p->table->machine;
    int per_node = stride >= p->per_node ? 1 : p->per_node / stride;
    if (per_node > n) per_node = n;
    int nodes = (n + per_node - 1) / per_node;
    double node = m->node_bytes_per_second, network = p->network;
    double reached = cost_reached(p->table, WORK_COLLECTIVE, bytes);
    if (!strcmp(name, "all_to_all")) {
        double inside = nodes > 1 ? per_node - 1 : n - 1, across = n - 1 - inside;
        return inside * m->node_latency + across * m->network_latency +
               fmax(bytes / n * inside / node, bytes / n * across / network) / reached;
    }
    double ports = p->habits->one_ring ? 1 : per_node;
    double link = nodes > 1 ? fmin(node, network * ports) : node;
    double round = (n - nodes) * m->node_latency + (nodes - 1) * m->network_latency;
    double once = round + (n - 1) * (bytes / n / link / reached);
    return !strcmp(name, "all_reduce") ? 2 * once : once;
}

// ---- a block ----

typedef struct Sizes {
    double n, r, h, q, kv, pairs;
} Sizes;

static Sizes sizes_of(const Pricing *p) {
    const CostModel *m = p->model;
    const CostLayout *l = p->layout;
    double n = (double)l->micro_batch * m->seq / l->cp, s = m->seq;
    return (Sizes){.n = n,
                   .r = l->sp ? n / l->tp : n,
                   .h = m->hidden,
                   .q = m->heads * m->head_size / l->tp,
                   .kv = fmax(m->kv_heads / l->tp, 1) * m->head_size,
                   // (query, key), of a balanced part of the sequence
                   .pairs = (double)l->micro_batch * s * (p->habits->flash ? (s + 1) / 2 : s) / l->cp};
}

// Stored scores go through memory: written, masked and scaled, softmax read and written, dropout read and
// written, read again, and about twice that in backward.
static void attention(const Pricing *p, Passes *sum, const Sizes *z) {
    const CostModel *m = p->model;
    const CostTable *t = p->table;
    double heads = m->heads / p->layout->tp, width = m->head_size;
    double flops = 4 * width * heads * z->pairs;
    if (m->kv_rank > 0) flops *= 1 + m->rope_size / (2 * width);  // scores of d + rope, values of d
    double reached = cost_reached(t, WORK_ATTENTION, flops);
    double seconds = flops / t->machine.flops[BF16] / reached * p->habits->attention_slow;
    sum->forward.attention += seconds;
    sum->backward.attention += p->habits->attention_again * seconds;
    double scores = p->habits->flash ? 0 : ELEMENT * heads * z->pairs;
    double around = ELEMENT * z->n * (2 * z->q + 2 * z->kv);
    move(p, sum, 6 * scores + around, 8 * scores + 2 * around);
    // Each rank's keys and values go to all others; their gradients come back.
    double keys = 2 * ELEMENT * z->n * z->kv * p->layout->cp;
    double ring = cost_collective(p, "all_gather", keys, p->layout->cp, p->layout->tp);
    sum->forward.cp += ring;
    sum->backward.cp += 2 * ring;
}

// The linears around attention; latent attention passes narrow ones on the way to q, k and v.
static void projections(const Pricing *p, Passes *sum, const Sizes *z) {
    const CostModel *m = p->model;
    if (m->kv_rank > 0) {
        double heads = m->heads / p->layout->tp;
        multiply(p, sum, z->r, z->h, m->q_rank + m->kv_rank + m->rope_size, true);
        multiply(p, sum, z->n, m->q_rank, heads * (m->head_size + m->rope_size), true);
        multiply(p, sum, z->n, m->kv_rank, 2 * heads * m->head_size, true);
        move(p, sum, 4 * ELEMENT * z->n * z->q, 6 * ELEMENT * z->n * z->q);
    } else {
        multiply(p, sum, z->n, z->h, z->q, true);
        multiply(p, sum, z->n, z->h, z->kv, true);
        multiply(p, sum, z->n, z->h, z->kv, true);
    }
    multiply(p, sum, z->n, z->q, z->h, true);
    move(p, sum, 2 * ELEMENT * z->n * (z->q + z->kv), 2 * ELEMENT * z->n * (z->q + z->kv));  // rope
}

static void mlp(const Pricing *p, Passes *sum, double rows, double h, double f) {
    for (int i = 0; i < p->model->matrices - 1; i++) multiply(p, sum, rows, h, f, true);
    multiply(p, sum, rows, f, h, true);
    double gate = p->model->matrices - 1;
    move(p, sum, ELEMENT * rows * f * (gate + 1), ELEMENT * rows * f * (2 * gate + 1));
}

// A token crosses to each node once, and is copied to its experts there: of k experts on N nodes it goes to
// N (1 - (1 - 1 / N)^k) nodes.
static double copies_sent(const Pricing *p, double k) {
    const CostLayout *l = p->layout;
    int stride = l->etp > 1 ? l->tp : 1;
    double nodes = ceil((double)l->ep * stride / p->per_node);
    return nodes > 1 ? nodes * (1 - pow(1 - 1 / nodes, k)) : k;
}

// Each token's row goes to k experts, whose ranks are neighbours within tp if experts are not sharded, and
// tp ranks apart if they are.
static void experts(const Pricing *p, Passes *sum, const Sizes *z) {
    const CostModel *m = p->model;
    const CostLayout *l = p->layout;
    double sent = z->n / l->tp * m->top_k, rows = sent * l->etp;
    double here = m->experts / l->ep;
    multiply(p, sum, z->n / l->tp, z->h, m->experts, false);
    Passes one = {.forward = {.multiply = 0}};
    mlp(p, &one, rows / here, z->h, m->expert_ffn / l->etp);
    parts_add(&sum->forward, &one.forward, here);
    parts_add(&sum->backward, &one.backward, here);
    // Rows are sorted by expert and brought back, each read and written.
    move(p, sum, 4 * ELEMENT * rows * z->h, 4 * ELEMENT * rows * z->h);
    double bytes = ELEMENT * z->n / l->tp * copies_sent(p, m->top_k) * z->h;
    double exchange = 2 * cost_collective(p, "all_to_all", bytes, l->ep, l->etp > 1 ? l->tp : 1);
    sum->forward.ep += exchange, sum->backward.ep += exchange;
    double within = 2 * cost_collective(p, "all_gather", ELEMENT * rows * z->h, l->etp, 1);
    sum->forward.tp += within, sum->backward.tp += within;
    if (m->shared > 0) mlp(p, sum, z->n, z->h, m->shared * m->expert_ffn / l->tp);
}

// Rows that are cast before they are gathered are sent as 8 bits.
static double gathered(const CostLayout *l) { return l->gather_fp8 ? 0.5 : 1; }

Passes cost_block(const Pricing *p, bool dense) {
    const CostModel *m = p->model;
    const CostLayout *l = p->layout;
    Sizes z = sizes_of(p);
    Passes sum = {.forward = {.multiply = 0}};
    double row = ELEMENT * z.r * z.h;
    move(p, &sum, 2 * 2 * row + 2 * 3 * row, 2 * 4 * row);  // norms, and the residual's additions
    projections(p, &sum, &z);
    attention(p, &sum, &z);
    bool routed = m->experts > 0 && !dense;
    if (routed) experts(p, &sum, &z);
    else mlp(p, &sum, z.n, z.h, m->ffn / l->tp);
    // Into and out of each region: an all-gather and a reduce-scatter, or an all-reduce where they leave.
    double region = cost_collective(p, l->sp ? "all_gather" : "all_reduce", ELEMENT * z.n * z.h, l->tp, 1);
    double regions = routed && m->shared == 0 ? 1 : 2, halves = l->sp ? 1 + gathered(l) : 1;
    sum.forward.tp += regions * halves * region;
    // W needs the rows again; a block that is recomputed has just gathered them.
    bool regathers = l->sp && l->recompute != RECOMPUTE_FULL;
    sum.backward.tp += regions * (halves + regathers * gathered(l)) * region;
    // W adds to the gradients of a micro-batch, and these to their sums.
    sum.backward.memory += memory_seconds(p, 8 * cost_block_weights(m, l, dense));
    return sum;
}

double cost_expert_weights(const CostModel *m, const CostLayout *l) {
    return m->matrices * m->hidden * m->expert_ffn / l->etp * m->experts / l->ep;
}

double cost_block_weights(const CostModel *m, const CostLayout *l, bool dense) {
    double h = m->hidden, q = m->heads * m->head_size, kv = m->kv_heads * m->head_size, tp = l->tp;
    double latent = m->q_rank * (h + m->heads * (m->head_size + m->rope_size) / tp) +
                    (m->kv_rank + m->rope_size) * h + 2 * m->kv_rank * q / tp + q * h / tp;
    double attention = m->kv_rank > 0 ? latent : (2 * h * q + 2 * h * fmax(kv, tp * m->head_size)) / tp;
    if (!(m->experts > 0) || dense) return attention + m->matrices * h * m->ffn / tp + 2 * h;
    return attention + 2 * h + m->experts * h + m->matrices * h * m->shared * m->expert_ffn / tp +
           cost_expert_weights(m, l);
}

// ---- the ends ----

Passes cost_embedding(const Pricing *p) {
    Sizes z = sizes_of(p);
    Passes sum = {.forward = {.multiply = 0}};
    double rows = ELEMENT * z.n * z.h;
    move(p, &sum, 2 * rows, 3 * rows);
    double leave = cost_collective(p, "all_reduce", rows, p->layout->tp, 1);
    sum.forward.tp += leave * (p->layout->sp ? 0.5 : 1);
    return sum;
}

Passes cost_head(const Pricing *p) {
    Sizes z = sizes_of(p);
    Passes sum = {.forward = {.multiply = 0}};
    double v = p->model->vocab / p->layout->tp, row = ELEMENT * z.r * z.h;
    multiply(p, &sum, z.n, z.h, v, false);
    move(p, &sum, ELEMENT * z.n * v + 2 * row, 2 * ELEMENT * z.n * v + 4 * row);
    double region = cost_collective(p, "all_gather", ELEMENT * z.n * z.h, p->layout->tp, 1);
    sum.forward.tp += p->layout->sp ? region : 0;
    sum.backward.tp += p->layout->sp ? region : 2 * region;
    sum.backward.memory += memory_seconds(p, 8 * p->model->hidden * v);
    return sum;
}
