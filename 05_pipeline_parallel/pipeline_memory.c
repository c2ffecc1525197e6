// pipeline_memory.c: the bytes of activations that a schedule holds at once, as a closed form. Playbook:
// "Pipeline Parallelism".
//
// Changes from 00_single_gpu: instead of one micro-batch's activations, those of all that the schedule has in
// flight on this rank wait for their backward. From F to its B a stage of l layers keeps l blocks (and the
// last stage the head); from B to W it keeps what W multiplies, which is less. Besides, a micro-batch keeps
// its tokens, and a message its (n, h). So
//
//     held  =  a l block  +  c l left  +  tokens  +  messages        a: passes from F to B,  c: from B to W
//
// at the end of the F at which this is largest. On rank r of p, a is at most, in micro-batches of a p-th of
// the model (schedule_rank_held_formula has all of them, and any m): AFAB m; 1F1B min(p - r, m); ZB-H1 the
// same, and a + c is p; ZB-H2 2 (p - r) - 1, and a + c 2 p - 1; ZB-V p; DualPipe p + 1. As a, c and the
// messages change from F to F, this file follows the rank's list: exact to the byte, for any schedule.
//
// Bytes sent: none. This file has no main: pipeline_program.c checks it against the account of memory.
#include <math.h>
#include <stdlib.h>

#include "pipeline.h"

// ---- what one pass keeps ----

// Bytes, as this rank stores them.
typedef struct Sizes {
    double block, head;            // from F to B: of a layer, and of the head
    double left_block, left_head;  // from B to W
    double tokens;                 // of a micro-batch
    double message;                // (n, h)
    double positions;              // for attention's masks, from the first block's forward on
} Sizes;

// What W multiplies, inside the region: outputs of norms, attention and SwiGLU, and gradients at the outputs
// of the linears. And what it adds: the gradients of two norms.
static double left_of_block(const Model *m, double rows) {
    double n = (double)model_tokens(m), h = (double)m->config.hidden,
           e = (double)dtype_size((DType)m->config.dtype);
    for (int64_t layer = 0; layer < m->config.layers; layer++) {
        const BlockParams *w = &m->block[layer];
        if (!w->q->here) continue;
        double q = (double)w->q->shape[0], kv = (double)w->k->shape[0];
        double f = m->config.experts ? 0 : (double)w->gate->shape[0];  // experts: those of a run (moe.c)
        return e * (2 * rows * h + n * (2 * q + 2 * kv + 3 * f) + 2 * n * h + 2 * h);
    }
    return 0;
}

static Sizes sizes_of(const Trainer *t) {
    const Model *m = t->model;
    Price price = trainer_price(t);
    const PriceKept *end = price.end;
    MicroBatch one = {.b = m->config.micro_batch, .s = model_tokens(m) / m->config.micro_batch};
    double rows = (double)m->sockets.region.rows(m->sockets.region.context, &one);
    double e = (double)dtype_size((DType)m->config.dtype), h = (double)m->config.hidden;
    int ends = price.end_rows;
    Sizes z = {.block = price_rows(price.block, price.block_rows, NULL),
               .tokens = price_rows(end, ends, "tokens, targets, positions"),
               .positions = price_rows(end, ends, "positions"),
               .message = e * rows * h,
               .left_block = left_of_block(m, rows),
               .left_head = price_rows(end, ends, "norm") + price_rows(end, ends, "logits") + e * h};
    z.head = price_rows(end, ends, NULL) - z.tokens - z.positions;
    return z;
}

// ---- a rank's list ----

typedef struct Walk {
    const Pipeline *p;
    Sizes size;
    int rank, next;  // next: in the messages; all of this rank's before it are in flight
    int *ws_left;    // (m) of a micro-batch that has begun; 0: none
    bool sent[2];    // a message's tensor stays until the next one of its kind is sent
    bool positions;  // are here
    double now, most;
} Walk;

static void begin(Walk *w, int micro_batch) {
    const Schedule *s = &w->p->schedule;
    if (w->ws_left[micro_batch]) return;
    const int *place = s->place + s->direction[micro_batch] * s->stages;
    for (int stage = 0; stage < s->stages; stage++) w->ws_left[micro_batch] += place[stage] == w->rank;
    w->now += w->size.tokens;
}

static void receive(Walk *w, double end) {
    int until = pipeline_messages_by(w->p, w->next, w->rank, end);
    for (; w->next < until; w->next++) {
        const Message *message = &w->p->message[w->next];
        if (message->to != w->rank) continue;
        begin(w, message->pass.micro_batch);
        w->now += w->size.message;
    }
}

// The pass's output is already part of `now`: it replaces the message before it.
static void send(Walk *w, StagePass pass) {
    if (schedule_sends_to(&w->p->schedule, pass) == NO_RANK) return;
    bool *before = &w->sent[pass.kind == PASS_F];
    if (*before) w->now -= w->size.message;
    *before = true;
    w->next++;
}

static void run_pass(Walk *w, StagePass pass) {
    const Chunk *chunk = &w->p->chunk[pass.stage];
    double layers = chunk->end_layer - chunk->first_layer, message = w->size.message;
    double held = layers * w->size.block + chunk->head * w->size.head;
    // The embedding's W needs the gradient at its output.
    double left =
        layers * w->size.left_block + chunk->head * w->size.left_head + chunk->embedding * message;
    begin(w, pass.micro_batch);
    if (pass.kind == PASS_F) {
        if (layers > 0 && !w->positions) w->positions = true, w->now += w->size.positions;
        w->now += held + (!chunk->head - !chunk->embedding) * message;  // the input is kept: it is x
        w->most = fmax(w->most, w->now);
    }
    if (pass.kind == PASS_B || pass.kind == PASS_BW)
        w->now += left - held + (!chunk->embedding - !chunk->head) * message;
    if (pass.kind != PASS_W) send(w, pass);
    if (pass.kind != PASS_W && pass.kind != PASS_BW) return;
    w->now -= left;
    if (--w->ws_left[pass.micro_batch] == 0) w->now -= w->size.tokens;
}

// The most bytes of activations at the end of an F, on this rank, as a closed form.
static double held_bytes(const Trainer *t) {
    const Pipeline *p = trainer_context(t, &pipeline);
    const Schedule *s = &p->schedule;
    Walk w = {.p = p, .size = sizes_of(t), .rank = t->model->mesh.pp.rank};
    w.ws_left = calloc((size_t)s->micro_batches, sizeof *w.ws_left);
    CHECK(w.ws_left, "out of host memory for %d micro-batches", s->micro_batches);
    for (int i = 0; i < s->list[w.rank].count; i++) {
        const Action *action = &s->list[w.rank].action[i];
        receive(&w, p->times.end[w.rank][i]);
        for (int j = 0; j < action->passes; j++) run_pass(&w, action->pass[j]);
    }
    free(w.ws_left);
    return w.most;
}

// ---- compared with the account of memory ----

// What a rank holds by the papers, if the schedule is one of theirs.
static HeldFormula formula_of(const Config *c, int rank) {
    ScheduleWish wish = pipeline_wish(c);
    if (config_text(c, "load")) return (HeldFormula){NAN, NAN};
    return schedule_rank_held_formula((ScheduleKind)config_number(c, "schedule"), &wish, rank);
}

// Runs a step of this very layout: on every rank of pp the bytes that its stages hold at once.
void pipeline_check_held_bytes(Mesh mesh, const Config *config) {
    Trainer *t = trainer_new(config, mesh, pipeline_layouts);
    train_step(t, NULL);
    const Pipeline *p = trainer_context(t, &pipeline);
    double predicted = held_bytes(t), measured = (double)t->kept_bytes;
    report_that(fabs(predicted - measured) <= 0.5,
                "rank %d of pp holds %.0f B of activations, by its formula %.0f", mesh.pp.rank, measured,
                predicted);
    say("\nThe most activations held at once: micro-batches from F to B, and from F to W, and bytes:");
    for (int rank = 0; rank < mesh.pp.size; rank++) {
        RankCosts costs = schedule_costs(&p->schedule, rank);
        HeldFormula held = formula_of(config, rank);
        bool here = rank == mesh.pp.rank,
             same = fabs(held.to_b - costs.held_to_b) < 1e-9 && fabs(held.to_w - costs.held_to_w) < 1e-9;
        report_that(same || isnan(held.to_b), "rank %d of pp holds %g and %g, by the formula %g and %g",
                    rank, costs.held_to_b, costs.held_to_w, held.to_b, held.to_w);
        char *what = format_text("rank %d of pp: %.4g, %.4g", rank, costs.held_to_b, costs.held_to_w);
        report_equal(what, comm_sum(here ? predicted : 0, mesh.world),
                     comm_sum(here ? measured : 0, mesh.world), "B");
        free(what);
    }
    trainer_free(t);
}
