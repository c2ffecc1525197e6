// cost_lone.c: the cost of a micro-batch on one rank of a cluster of any size, counted in a dry run of one
// block in which this process stands for all ranks. Playbook: "Finding the Best Training Configuration".
//
// All ranks of dp, cp and tp do the same. So one of them, whose collectives are clocked as if the others
// arrived at the same moment (comm_stand_for_all), shows the step of all, and no formula is written twice.
// All blocks are alike as well: one is counted, and the cost of a layout follows by arithmetic
// (cost_lone_step.c).
//
// Bytes sent: none. This file has no main: find_config.c uses it.
#include "cost_lone.h"

#include <math.h>

#include "02_zero/zero.h"
#include "five_d.h"

// ---- parts ----

enum { EMBEDDING, BLOCK, HEAD, MICRO_BATCHES = 2 };

static void note_bytes(LoneParts *parts, const Trainer *t) {
    const Model *m = t->model;
    Price price = trainer_price(t);
    parts->expert_rows = price_rows(price.end, price.end_rows, "rows, gate, up, act, out of experts");
    parts->block = price_rows(price.block, price.block_rows, NULL) + parts->expert_rows;
    parts->tokens = price_rows(price.end, price.end_rows, "tokens, targets, positions");
    parts->always = price_rows(price.end, price.end_rows, "positions");
    parts->head =
        price_rows(price.end, price.end_rows, NULL) - parts->tokens - parts->always - parts->expert_rows;
    parts->message = price_rows(price.end, price.end_rows, "x");
    const int units[] = {m->embedding_unit, m->first_block_unit, m->head_unit};
    for (int i = 0; i < 3; i++) parts->count[i] = (double)m->params.unit[units[i]].count;
    if (m->config.experts) parts->experts = (double)m->params.unit[m->first_expert_unit].count;
}

// The most activations since the last call.
static void note_peak(double *most, int64_t before) {
    *most = fmax(*most, (double)(memory_account().peak[MEMORY_ACTIVATION] - before));
    memory_reset_peak();
}

// Runs one micro-batch through an embedding, a block and a head, and records the seconds and the peak of
// each. Gradients are sent only in the last micro-batch of a step.
static void note_passes(LoneParts *parts, const Trainer *t) {
    static const Chunk chunk[] = {{0, 0, true, false}, {0, 1, false, false}, {1, 1, false, true}};
    Model *m = t->model;
    const Config *c = &t->config;
    int64_t held = memory_account().now[MEMORY_ACTIVATION];
    memory_reset_peak();
    MicroBatch micro = micro_batch_new(m, 0, c->micro_batch, NULL, NULL, 1);
    for (int i = 0; i < 3; i++) {
        double before = clock_model_now();
        double waited = comm_total().exposed_seconds;
        chunk_forward(m, &micro, chunk[i]);
        parts->forward[i] = clock_model_now() - before;
        note_peak(&parts->most[i], held);
        if (i == BLOCK) parts->waits += comm_total().exposed_seconds - waited;
    }
    for (int i = 2; i >= 0; i--) {
        double before = clock_model_now(), waited = comm_total().exposed_seconds;
        int64_t bytes = memory_account().now[MEMORY_ACTIVATION];
        chunk_backward_input(m, &micro, chunk[i]);
        parts->input[i] = clock_model_now() - before;
        if (i == BLOCK) parts->waiting = (double)(memory_account().now[MEMORY_ACTIVATION] - bytes);
        chunk_backward_weight(m, &micro, chunk[i]);
        parts->backward[i] = clock_model_now() - before;
        note_peak(&parts->most[i], held);
        if (i == BLOCK) parts->waits += comm_total().exposed_seconds - waited;
    }
    micro_batch_free(m, &micro);
    m->sockets.gradients.micro_batch_ready(m->sockets.gradients.context, m, false);
}

LoneParts lone_parts(const Config *config) {
    Config c = *config;
    int64_t rows = c.cp * c.tp;
    c.layers = 1, c.grad_acc = MICRO_BATCHES, c.pp = 1;
    c.dp = c.ep > rows ? c.ep / rows : 1;  // as few as the experts take
    config_set(&c, "zero", 0);
    Mesh mesh = mesh_standing_for_all(layout_shape(&c), 0);
    Trainer *t = trainer_new(&c, mesh, five_d_layouts());
    LoneParts parts = {.tokens = 0};
    model_begin_step(t->model, 1000);
    note_passes(&parts, t);
    note_bytes(&parts, t);  // last: only a run knows how many rows arrive at the experts here
    trainer_free(t);
    mesh_end(&mesh);
    return parts;
}

// ---- what a rank has ----

// Layers of the rank that has the most.
static double layers_of(const Config *c, double chunks) {
    return fmin(ceil((double)c->layers / ((double)c->pp * chunks)) * chunks, (double)c->layers);
}

static double chunks_of(const Config *c) {
    return c->pp > 1 && config_number(c, "schedule") == INTERLEAVED ? config_number(c, "chunks") : 1;
}

// The backward time of a block that drops activations minus that of one that keeps them all.
double lone_recomputes(const Config *config, const LoneParts *parts) {
    if (config->recompute == RECOMPUTE_NONE) return 0;
    Config keeps = *config;
    keeps.recompute = RECOMPUTE_NONE;
    double again = parts->backward[BLOCK] - lone_parts(&keeps).backward[BLOCK];
    return (double)config->grad_acc * layers_of(config, chunks_of(config)) * again;
}

// ---- memory ----

// Experts are spread over ep neighbours within dp x cp x tp, each of which has its own rows.
Replicas lone_replicas(const Config *c, bool experts) {
    int all = (int)(c->dp * c->cp), tp = (int)c->tp, ep = (int)c->ep;
    return experts && ep > 1 ? (Replicas){all * tp / ep, ep} : (Replicas){all, tp};
}

// Elements of a unit whose shard is the largest one.
static double shard_of(double elements, int ranks) {
    int64_t first;
    return (double)zero_part((int64_t)elements, 0, ranks, &first);
}

// Micro-batches of a stage that a rank holds at once.
static HeldFormula held_of(const Config *c, int rank) {
    if (c->pp == 1) return (HeldFormula){1, 1};
    ScheduleWish wish = {
        .ranks = (int)c->pp, .micro_batches = (int)c->grad_acc, .chunks = (int)chunks_of(c)};
    HeldFormula held = schedule_rank_held_formula((ScheduleKind)config_number(c, "schedule"), &wish, rank);
    return isnan(held.to_w) ? (HeldFormula){(double)c->pp, (double)c->pp} : held;
}

double lone_beyond(const LoneParts *p, bool last) {
    double kept = p->tokens + p->always + p->block, block = p->most[BLOCK] - kept;
    // Backward has freed the head when it comes to a block.
    return fmax(last ? fmax(p->most[HEAD] - kept, block) - p->head : block, 0);
}

// With ZeRO-2, bytes of the whole gradients in use: one in bf16 while the f32 sum of the unit before it is
// reduced, or in both while it is converted. A block's is there in bf16 while its experts' are made.
static double gradients_at_work(const LoneParts *p, double ends) {
    double block = p->count[BLOCK], experts = p->experts, largest = fmax(ends, block);
    double routed = experts > 0 ? 2 * block + fmax(6 * experts, 2 * experts + 4 * largest) : 0;
    return fmax(6 * largest, routed);
}

LoneMemory lone_stage_memory(const Config *c, const LoneParts *p, bool first, bool last) {
    double layers = layers_of(c, chunks_of(c));
    int zero = (int)config_number(c, "zero"), shards = lone_replicas(c, false).ranks;
    // Tied, the last stage has a copy of the embedding.
    const double units[] = {first || (last && c->tied) ? 1 : 0, layers, last ? 1 : 0};
    double block = p->count[BLOCK] + p->experts;
    double whole = layers * p->experts, largest = block, own = 0;
    if (p->experts > 0) own = layers * shard_of(p->experts, lone_replicas(c, true).ranks);
    for (int i = 0; i < 3; i++) {
        whole += units[i] * p->count[i];
        own += units[i] * shard_of(p->count[i], shards);
        if (units[i] > 0) largest = fmax(largest, p->count[i]);
    }
    // bf16 weights and gradients, f32 sums, masters and moments; ZeRO-2 and -3 hold a unit whole at work,
    // a pipeline's ZeRO-3 the whole stage.
    bool staged = c->pp > 1;
    double at_work = fmin(largest + block, whole),
           ends = fmax(units[EMBEDDING] * p->count[EMBEDDING], units[HEAD] * p->count[HEAD]);
    double waits = c->tied && first && last ? 2 * p->count[EMBEDDING] : 0;  // for the lookup's part
    // A block whose W waits keeps other bytes, and the head the gradients of its logits. In B, one
    // micro-batch more comes to wait, block by block. Interleaved, B follows the head's F at once.
    HeldFormula held = held_of(c, first ? 0 : (int)c->pp - 1);
    double waiting = held.to_w - held.to_b, heads = !last ? 0 : chunks_of(c) > 1 ? 1 : held.to_w;
    bool w_waits = staged && config_number(c, "schedule") == ZB_H1;
    double in_b = w_waits ? (layers - 1) * p->waiting : 0;
    LoneMemory m = {.weights = 2 * (zero < 3 ? whole : own + (staged ? whole : at_work)),
                    .gradients = zero < 2
                                     ? 6 * whole
                                     : 4 * own + (staged && zero == 3 ? 4 * whole + 2 * largest
                                                                      : gradients_at_work(p, ends) + waits),
                    .optimizer = 12 * (zero ? own : whole),
                    .kept = held.to_w * (layers * p->block + p->tokens) + waiting * layers * p->waiting +
                            heads * p->head + p->always};
    m.peak = m.weights + m.gradients + m.optimizer + m.kept + in_b + lone_beyond(p, last) +
             (staged ? 2 * p->message : 0);
    return m;
}

LoneMemory lone_memory(const Config *c, const LoneParts *p) {
    LoneMemory first = lone_stage_memory(c, p, true, c->pp == 1);
    LoneMemory last = c->pp > 1 ? lone_stage_memory(c, p, false, true) : first;
    return last.peak > first.peak ? last : first;
}
