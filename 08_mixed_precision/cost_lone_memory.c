// cost_lone_memory.c: the bytes of a layout's fullest rank, by closed forms, for a search over all layouts.
// Playbook: "Memory usage in Transformers", "ZeRO", "Pipeline Parallelism".
//
// A stage has units of Psi weights in total, which N ranks share. Besides what ZeRO lets a rank own it has
// whole units at work, each only for a while: with ZeRO-2 and -3 the whole gradient of one unit in 16 bits
// and the sum of the one behind it, in flight; with ZeRO-3 the weights of a unit and of the next one. Not
// all of this is largest at once. So a peak is that of the fullest moment of a backward, of these:
//
//                   activations                      weights        sums        gradients
//     head B        kept + logits                    H + block      before
//     head W        likewise                         block          before      H
//     head, widened kept                             block          H           H
//     block B       kept + its own, recomputed       2 blocks       behind
//     block W       likewise                         block          behind      block
//     … widened     kept - block                     block          block       block
//     embedding     kept - blocks                    -              E           E
//
// before: the sum of the unit with which the micro-batch before ended; behind: that of the unit that comes
// first in backward. A pipeline's ZeRO-3 has whole weights and sums of a stage, but sums only from its first
// W on, when AFAB and a pipeline with few micro-batches have begun to free activations.
//
// This file has no main: find_config.c uses it.
#include <math.h>

#include "02_zero/zero.h"
#include "cost_lone.h"
#include "five_d.h"

// ---- what a rank has ----

// The first stages have one layer more where their number does not divide the layers.
double lone_layers(const Config *c, int rank) {
    int64_t stages = c->pp * lone_chunks(c), layers = 0;
    for (int64_t i = rank; i < stages; i += c->pp) layers += c->layers / stages + (i < c->layers % stages);
    return (double)layers;
}

int lone_chunks(const Config *c) {
    return c->pp > 1 && config_number(c, "schedule") == INTERLEAVED ? (int)config_number(c, "chunks") : 1;
}

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
    ScheduleWish wish = {.ranks = (int)c->pp, .micro_batches = (int)c->grad_acc, .chunks = lone_chunks(c)};
    HeldFormula held = schedule_rank_held_formula((ScheduleKind)config_number(c, "schedule"), &wish, rank);
    return isnan(held.to_w) ? (HeldFormula){(double)c->pp, (double)c->pp} : held;
}

// ---- a stage ----

typedef struct Stage {
    const LoneParts *p;
    int zero;
    bool first, last, tied;
    bool staged;   // behind a pipeline
    bool adds;     // keeps the sums of all its units over a step's micro-batches: a pipeline's ZeRO-3
    bool w_waits;  // behind its B
    double layers, chunks, ranks, micro_batches;
    int shards;
    HeldFormula held;
    double whole, own;                  // elements, and those of the largest shards
    double whole_experts, own_experts;  // of these in experts
} Stage;

static Stage stage_of(const Config *c, const LoneParts *p, bool first, bool last) {
    int rank = first ? 0 : (int)c->pp - 1;
    Stage s = {.p = p, .zero = (int)config_number(c, "zero"), .first = first, .last = last};
    s.tied = c->tied, s.staged = c->pp > 1, s.shards = lone_replicas(c, false).ranks;
    s.adds = s.staged && s.zero == 3 && c->grad_acc > 1;
    s.w_waits = s.staged && config_number(c, "schedule") == ZB_H1;
    s.layers = lone_layers(c, rank), s.chunks = lone_chunks(c);
    s.ranks = (double)c->pp, s.micro_batches = (double)c->grad_acc;
    s.held = held_of(c, rank);
    s.whole = s.whole_experts = s.layers * p->experts;
    if (p->experts > 0) s.own = s.layers * shard_of(p->experts, lone_replicas(c, true).ranks);
    s.own_experts = s.own;
    // Tied, the last stage has a copy of the embedding.
    const double units[] = {first || (last && c->tied) ? 1 : 0, s.layers, last ? 1 : 0};
    for (int i = 0; i < 3; i++) {
        s.whole += units[i] * p->count[i];
        s.own += units[i] * shard_of(p->count[i], s.shards);
    }
    return s;
}

// Bytes of activations at the end of an F, with so many micro-batches of a stage between F and W, of which
// some have had their B. A block whose W waits keeps other bytes, and the head the gradients of its logits.
// Interleaved, B follows the head's F at once.
static double kept_of(const Stage *s, double held) {
    const LoneParts *p = s->p;
    double heads = !s->last ? 0 : s->chunks > 1 ? 1 : held,
           waiting = fmin(s->held.to_w - s->held.to_b, held);
    return held * (s->layers * p->block + p->tokens) + waiting * s->layers * p->waiting + heads * p->head +
           p->always;
}

// ---- the moments of a backward ----

// Where a backward begins: bytes of activations, but for the logits of its own micro-batch, and elements of
// sums: before it, and when it has come to the last block, and to a later one.
typedef struct Begin {
    double kept, before, at_last, at_later;
} Begin;

// Bytes at a moment with so many bytes of activations and elements at work.
static double at(const Stage *s, double activations, double weights, double sums, double gradients) {
    if (s->zero == 3 && !s->staged) activations += 2 * weights;
    return activations + (s->zero >= 2 ? 4 * sums + 2 * gradients : 0);
}

// Where a unit's gradient is widened to be reduced, it is there in both precisions, and the sum behind it is
// not any more. Else it is added to a sum that is there.
static double widened(const Stage *s, double activations, double weights, double unit, double gradients) {
    return s->zero < 2 || s->adds ? 0 : at(s, activations, weights, unit, gradients);
}

static double head_moments(const Stage *s, const Begin *b) {
    const LoneParts *p = s->p;
    double H = p->count[HEAD], B = p->count[BLOCK], E = s->tied ? p->count[EMBEDDING] : 0;
    double kept = b->kept - (p->tokens + p->always + p->block);
    double most = at(s, kept + p->most[HEAD].f, H + E, b->before, 0);
    most = fmax(most, at(s, kept + p->most[HEAD].b, H + E + B, b->before, 0));
    most = fmax(most, at(s, kept + p->most[HEAD].w, B, b->before, H + E));
    most = fmax(most, widened(s, b->kept + p->message, B, H, H + E));
    return s->first ? most : fmax(most, widened(s, b->kept + p->message, B, E, E));
}

// Of the block with which backward has come to so many bytes of activations. Tied, the embedding's gradient
// exists from the head on, until its lookup has added to it. A head whose W waits keeps its logits.
static double block_moments(const Stage *s, const Begin *b, double kept, double sums) {
    const LoneParts *p = s->p;
    double B = p->count[BLOCK], X = p->experts, E = s->tied && s->first && s->last ? p->count[EMBEDDING] : 0;
    double next = fmax(B, s->last ? p->count[HEAD] : 0), after = kept - p->block + p->message;
    if (s->w_waits && s->last) kept += p->head;
    kept -= p->tokens + p->always + p->block;
    double most = at(s, kept + p->most[BLOCK].f, B + X + next, b->before, 0);
    most = fmax(most, at(s, kept + p->most[BLOCK].b, 2 * B + X, sums, E));
    most = fmax(most, at(s, kept + p->most[BLOCK].w, B, sums, B + X + E));
    if (X > 0) most = fmax(most, widened(s, kept + p->most[BLOCK].w, B, X, X + B + E));
    return fmax(most, widened(s, after, B, B, B + E));
}

static double most_of(const Stage *s, const Begin *b) {
    const LoneParts *p = s->p;
    double layers = s->layers / s->chunks, E = p->count[EMBEDDING], later = s->adds ? layers - 1 : 1;
    double left = b->kept - layers * p->block + p->message;
    double most = fmax(s->last ? head_moments(s, b) : 0, block_moments(s, b, b->kept, b->at_last));
    if (layers > 1) most = fmax(most, block_moments(s, b, b->kept - later * p->block, b->at_later));
    if (s->first) most = fmax(most, fmax(at(s, left, 0, b->at_later, E), widened(s, left, 0, E, E)));
    return most;
}

// Before a step's first W (0), and after those of the first micro-batch of so many chunks. Where there are
// no more than p micro-batches, those of a chunk are reduced before the next chunk's begin.
static Begin begin_of(const Stage *s, double chunks) {
    const LoneParts *p = s->p;
    double passes = chunks > 0 ? (chunks - 1) * s->ranks + 1 : 0;
    double held = fmin(s->held.to_w, s->micro_batches - passes / s->chunks);
    Begin b = {.kept = kept_of(s, held) - (s->last ? p->head : 0)};
    // In B, one micro-batch more comes to wait, block by block.
    if (s->w_waits) b.kept += (s->layers - 1) * p->waiting;
    double B = p->count[BLOCK], H = s->last ? p->count[HEAD] : 0, E = s->first ? p->count[EMBEDDING] : 0,
           copy = s->tied && s->last && !s->first ? p->count[EMBEDDING] : 0;  // reduced behind the head
    if (!s->adds) {
        b.before = chunks == 0 ? 0 : s->first ? E : B;
        b.at_last = copy > 0 ? copy : s->last ? H : b.before, b.at_later = B;
        return b;
    }
    H += copy;
    if (chunks == 0) {
        b.at_last = H, b.at_later = H + (s->layers / s->chunks - 1) * (B + p->experts);
    } else {
        double summed = s->micro_batches > s->ranks ? chunks / s->chunks : 1 / s->chunks;
        b.before = H + summed * s->layers * (B + p->experts) + (chunks == s->chunks) * E;
        b.at_last = b.at_later = b.before;
    }
    return b;
}

// ---- the fullest stage ----

LoneMemory lone_stage_memory(const Config *c, const LoneParts *p, bool first, bool last) {
    Stage s = stage_of(c, p, first, last);
    // bf16 weights and gradients, f32 sums, masters and moments. A pipeline's ZeRO-3 gathers the stage.
    LoneMemory m = {.weights = 2 * (s.zero < 3 ? s.whole : s.staged ? s.own + s.whole : s.own),
                    .gradients = s.zero < 2 ? 6 * s.whole : 4 * s.own,
                    .optimizer = 12 * (s.zero ? s.own : s.whole),
                    .kept = kept_of(&s, s.held.to_w)};
    // In flight: to and from the next stage; interleaved, those of other chunks as well.
    double messages = !s.staged ? 0 : s.chunks == 1 ? 2 : last ? 5 : 3, most = 0;
    for (int chunks = 0; chunks <= (c->grad_acc > 1 ? s.chunks : 0); chunks++) {
        Begin b = begin_of(&s, chunks);
        most = fmax(most, most_of(&s, &b) + messages * p->message);
    }
    // When backward has freed all, gradients of copies are summed in one buffer: of experts that ranks of tp
    // have, and of the embedding to which the last stage's head is tied.
    double experts = c->tp > 1 && c->ep == 1 ? s.zero ? s.own_experts : s.whole_experts : 0, tied = 0;
    if (s.tied && s.staged) tied = s.zero ? shard_of(p->count[EMBEDDING], s.shards) : p->count[EMBEDDING];
    most = fmax(most, 4 * fmax(experts, tied) - (s.zero == 3 && s.staged ? 2 * s.whole : 0));
    m.peak = m.weights + m.gradients + m.optimizer + most;
    return m;
}

LoneMemory lone_memory(const Config *c, const LoneParts *p) {
    LoneMemory first = lone_stage_memory(c, p, true, c->pp == 1);
    LoneMemory last = c->pp > 1 ? lone_stage_memory(c, p, false, true) : first;
    return last.peak > first.peak ? last : first;
}
