// cost_lone_step.c: a step of a layout from its parts: by closed forms, a microsecond each, for a search
// over all layouts; and clocked, for those that remain. Playbook: "Finding the Best Training Configuration",
// appendix A3.
//
//     closed form   (m - 1) (t + 2 h (p - 1) / p)  +  sum of all stages t_i  +  2 (p - 1) h     1F1B
//                   t of the slowest stage, h a message's hop; interleaved: a v-th of the bubble; ZB-H1 is
//                   priced as 1F1B, for the clock to tell them apart
//                 + gradients and weights of data parallelism, less what is computed beside them
//                 + optimizer
//     clocked       one stage: a dry step of few layers and micro-batches, continued along both, in which a
//                   step is a straight line; several: the schedule's walk with each stage's times, and
//                   behind it what such a dry step of a stage adds to its micro-batch
//
// This file has no main: find_config.c uses it.
#include <math.h>
#include <stdlib.h>

#include "05_pipeline_parallel/pipeline.h"
#include "cost_lone.h"
#include "five_d.h"

enum { EMBEDDING, BLOCK, HEAD };
enum { COUNTED_LAYERS = 256 };  // of a stage, at least; more are not counted one by one
#define BEFORE_ALL_REDUCE 0.4   // of a block is computed before the first all-reduce of a pass, about

// ---- stages ----

typedef struct Stages {
    int count;
    double forward[STAGES_MOST], backward[STAGES_MOST];
    double all, slowest;  // of a rank's stages, both passes
    double hop;
    int layers;  // of rank 0
} Stages;

static double hop_seconds(const Config *c, const LoneParts *p) {
    int stride = (int)(c->tp * c->cp * c->dp);
    bool inside = clock_node(0) == clock_node(stride);
    Traffic traffic = {1, p->message, p->message}, none = {0, 0, 0};
    return inside ? clock_transfers_seconds(traffic, none) : clock_transfers_seconds(none, traffic);
}

static Stages stages_of(const Config *c, const LoneParts *p) {
    int chunks = config_number(c, "schedule") == INTERLEAVED ? (int)config_number(c, "chunks") : 1;
    Stages s = {.count = (int)c->pp * chunks, .hop = hop_seconds(c, p)};
    double rank[RANKS_MOST] = {0};
    for (int i = 0; i < s.count; i++) {
        int layers = (int)(c->layers / s.count + (i < c->layers % s.count));
        bool first = i == 0, last = i == s.count - 1;
        s.forward[i] = layers * p->forward[BLOCK] + first * p->forward[EMBEDDING] + last * p->forward[HEAD];
        s.backward[i] =
            layers * p->backward[BLOCK] + first * p->backward[EMBEDDING] + last * p->backward[HEAD];
        rank[i % c->pp] += s.forward[i] + s.backward[i];
        if (i % c->pp == 0) s.layers += layers;
    }
    for (int i = 0; i < c->pp; i++) {
        s.all += rank[i];
        s.slowest = fmax(s.slowest, rank[i]);
    }
    return s;
}

// ---- closed forms ----

static double pipelined(const Config *c, const Stages *s) {
    double p = (double)c->pp, m = (double)c->grad_acc, mean = s->all / p;
    if (c->pp == 1) return m * s->slowest;
    int chunks = s->count / (int)c->pp;
    double wait = 2 * s->hop * (p - 1) / p;
    if (chunks == 1) return (m - 1) * (s->slowest + wait) + s->all + 2 * (p - 1) * s->hop;
    return m * s->slowest + (p - 1) * mean / chunks + 2 * (p * chunks - 1) * s->hop;
}

static double over_replicas(Replicas r, const char *name, double bytes) {
    int node = clock_machine()->gpus_per_node;
    if (r.ranks == 1 || !(bytes > 0)) return 0;
    int here = r.stride >= node ? 1 : node / r.stride;
    return clock_collective_seconds(name, bytes, r.ranks, here < r.ranks ? here : r.ranks);
}

// Seconds of a unit's gradients and of its weights between the ranks that share them.
typedef struct Exchange {
    double sums, weights;
} Exchange;

static Exchange exchange_of(const Config *c, double elements, double experts) {
    double weight = config_number(c, "zero") == 0 ? 4 : 2;  // an all-reduce gathers sums
    Replicas all = lone_replicas(c, false), few = lone_replicas(c, true);
    return (Exchange){over_replicas(all, "reduce_scatter", 4 * elements) +
                          over_replicas(few, "reduce_scatter", 4 * experts),
                      over_replicas(all, "all_gather", weight * elements) +
                          over_replicas(few, "all_gather", weight * experts)};
}

// Whether the ranks of data parallelism have neighbours in the node, and so use the same port as tp.
static bool replicas_near(const Config *c) {
    return c->dp * c->cp > 1 && clock_node(0) == clock_node((int)c->tp);
}

// The delay of a stage's last message beyond the end of its compute: each block's gradients are reduced as
// soon as they are final, and whatever needs the same port then waits, both the message and the collectives
// with which the next block's backward begins.
static double reducing_at_end(const Config *c, const LoneParts *p, int layers) {
    int stride = (int)(c->tp * c->cp * c->dp);
    if (c->dp * c->cp == 1) return 0;
    bool near = replicas_near(c), far = clock_node(0) != clock_node(stride - 1);
    bool hop_near = clock_node(0) == clock_node(stride), shared = hop_near ? near : far;
    Exchange block = exchange_of(c, p->count[BLOCK], p->experts);
    double seconds = block.sums + (config_number(c, "zero") == 0 ? block.weights : 0);
    if (config_number(c, "sp") && near) return (layers - 1 + shared) * seconds;
    return shared ? seconds + (layers - 1) * fmax(seconds - p->backward[BLOCK], 0) : 0;
}

// What the blocks do not hide. ZeRO-3 gathers a unit while the one before computes, and reduces it while the
// one after computes, in each micro-batch; the other stages do so once a step. If tp uses the same port,
// they are hidden only until a block's first collective, which then waits.
static double exposed_of(const Config *c, const LoneParts *p, const Stages *s) {
    int zero = (int)config_number(c, "zero");
    bool whole = c->pp == 1;
    double ends = p->count[EMBEDDING] + (whole ? p->count[HEAD] : 0), L = s->layers,
           m = (double)c->grad_acc;
    double beside = c->tp == 1 || !replicas_near(c) ? 1 : config_number(c, "sp") ? 0 : BEFORE_ALL_REDUCE;
    double forward = beside * p->forward[BLOCK], backward = beside * p->backward[BLOCK];
    Exchange block = exchange_of(c, p->count[BLOCK], p->experts), end = exchange_of(c, ends, 0);
    if (zero == 3 && whole)
        return m *
               (L * (fmax(block.weights - forward, 0) + fmax(block.weights + block.sums - backward, 0)) +
                end.weights + 0.5 * end.sums);
    forward *= L, backward *= L;
    double sums = L * block.sums + end.sums, weights = L * block.weights + end.weights;
    if (zero == 0) return fmax(sums + weights - backward, block.sums + block.weights);
    double times = zero == 2 && whole ? m : 1;
    return times * fmax(sums - backward, block.sums) + fmax(weights - forward, end.weights / 2);
}

LoneTime lone_time(const Config *c, const LoneParts *p) {
    Stages s = stages_of(c, p);
    double m = (double)c->grad_acc, makespan = pipelined(c, &s);
    if (s.count > 1) makespan += (s.count - 1) * reducing_at_end(c, p, (int)(c->layers / s.count));
    double weights = s.layers * p->count[BLOCK] + p->count[EMBEDDING] + (c->pp == 1 ? p->count[HEAD] : 0);
    bool zero = config_number(c, "zero") > 0;
    double shards = zero ? lone_replicas(c, false).ranks : 1, few = zero ? lone_replicas(c, true).ranks : 1;
    double experts = s.layers * p->experts, own = weights / shards + experts / few;
    double rate = clock_machine()->memory_bytes_per_second;
    LoneTime time = {.computed = m * s.slowest,
                     .bubble = makespan - m * s.slowest,
                     .exposed_tp_cp = m * s.layers * p->waits,
                     .exposed_dp = exposed_of(c, p, &s),
                     .optimizer = ((30 + 4) * own + 4 * (weights + experts)) / rate};
    time.step = makespan + time.exposed_dp + time.optimizer;
    return time;
}

// ---- clocked ----

// A dry step of so many layers and micro-batches, of one stage.
static StepCost dry_step(const Config *config, int64_t layers, int64_t micro_batches, bool tied) {
    Config c = *config;
    c.layers = layers, c.grad_acc = micro_batches, c.pp = 1, c.tied = tied;
    Mesh mesh = mesh_standing_for_all(layout_shape(&c));
    StepCost cost = program_cost(&c, mesh, five_d_layouts());
    mesh_end(&mesh);
    return cost;
}

// The corners of a 2 x 2 grid, from which everything else is extrapolated linearly in both directions.
typedef struct Corners {
    double at[2][2];  // of layers, of micro-batches
    int64_t layers, micro_batches;
} Corners;

static double continued(const Corners *k, double layers, double micro_batches) {
    double x = layers - (double)k->layers, y = micro_batches - (double)k->micro_batches;
    double dx = k->at[1][0] - k->at[0][0], dy = k->at[0][1] - k->at[0][0];
    double both = k->at[1][1] - k->at[1][0] - k->at[0][1] + k->at[0][0];
    return k->at[0][0] + x * dx + y * dy + x * y * both;
}

// One stage. Few layers are counted as they are. A step is a straight line in its layers once the head's
// gradients have been reduced by the end of backward; as long as one more layer hides more of them, more
// layers are counted.
static double one_stage(const Config *c, int64_t layers, LoneMemory *memory) {
    Corners step = {.layers = layers, .micro_batches = c->grad_acc > 3 ? 2 : c->grad_acc};
    Corners peak = step, weights = step, gradients = step, optimizer = step, kept = step;
    double exposed[2] = {0};
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            StepCost cost = dry_step(c, step.layers + i, step.micro_batches + j, c->tied);
            step.at[i][j] = cost.step_seconds;
            exposed[i] += cost.comm.exposed_seconds;
            peak.at[i][j] = (double)cost.memory.peak_total;
            weights.at[i][j] = (double)cost.memory.peak[MEMORY_PARAMETER];
            gradients.at[i][j] = (double)cost.memory.peak[MEMORY_GRADIENT];
            optimizer.at[i][j] = (double)cost.memory.peak[MEMORY_OPTIMIZER];
            kept.at[i][j] = (double)cost.counted.kept_bytes;
        }
    if (layers < c->layers && exposed[1] < (1 - 1e-6) * exposed[0])
        return one_stage(c, 2 * layers < c->layers ? 2 * layers : c->layers, memory);
    double L = (double)c->layers, m = (double)c->grad_acc;
    *memory = (LoneMemory){continued(&weights, L, m), continued(&gradients, L, m),
                           continued(&optimizer, L, m), continued(&kept, L, m), continued(&peak, L, m)};
    return continued(&step, L, m);
}

// A rank's clock on the walk, and until when the port to the next stage is busy.
typedef struct WalkRank {
    double now, port;
} WalkRank;

typedef struct Walk {
    const Config *config;
    const LoneParts *parts;
    const Stages *stages;
    const Schedule *schedule;
    double *arrives;  // of each slot: when its output is at the rank that needs it
    bool gathers;     // each pass begins with a collective on the messages' port
} Walk;

static double pass_seconds(const Walk *w, StagePass pass) {
    double apart = w->parts->input[BLOCK] / w->parts->backward[BLOCK];
    if (pass.kind == PASS_F) return w->stages->forward[pass.stage];
    double part = pass.kind == PASS_B ? apart : pass.kind == PASS_W ? 1 - apart : 1;
    return part * w->stages->backward[pass.stage];
}

// Its output is sent when it ends, or when the port is free.
static void send_from(const Walk *w, WalkRank *rank, StagePass pass) {
    const Schedule *s = w->schedule;
    if (schedule_sends_to(s, pass) == NO_RANK) return;
    bool last = pass.kind == PASS_BW && pass.micro_batch == s->micro_batches - 1;
    int layers = (int)(w->config->layers / w->stages->count);
    double free_at = rank->now + (last ? reducing_at_end(w->config, w->parts, layers) : 0);
    rank->port = fmax(rank->port, free_at) + w->stages->hop;
    w->arrives[schedule_slot(s, pass)] = rank->port;
}

// The walk through a schedule: each pass takes the time of its stage, and messages and a region's
// collectives wait for each other if they use the same port.
static double walked(const Config *c, const LoneParts *p, const Stages *stages) {
    Schedule schedule = pipeline_schedule(c);
    Walk w = {c,
              p,
              stages,
              &schedule,
              host_alloc(schedule_slots(&schedule) * sizeof(double)),
              config_number(c, "sp") && clock_node(0) == clock_node((int)(c->tp * c->cp * c->dp))};
    WalkRank ranks[RANKS_MOST] = {{0, 0}};
    double last = 0;
    ScheduleWalk walk = schedule_walk(&schedule);
    while (schedule_walk_next(&walk)) {
        const Action *action = &schedule.list[walk.rank].action[walk.position];
        WalkRank *rank = &ranks[walk.rank];
        for (int i = 0; i < action->passes; i++) {
            StagePass pass = action->pass[i], needed;
            if (schedule_receives_from(&schedule, pass) != NO_RANK &&
                schedule_needs(&schedule, pass, &needed))
                rank->now = fmax(rank->now, w.arrives[schedule_slot(&schedule, needed)]);
            if (w.gathers && pass.kind != PASS_W) rank->now = fmax(rank->now, rank->port);
            rank->now += pass_seconds(&w, pass);
            send_from(&w, rank, pass);
        }
        last = fmax(last, rank->now);
    }
    schedule_walk_end(&walk);
    schedule_free(&schedule);
    free(w.arrives);
    return last;
}

// What a rank of a pipeline holds by the records' closed forms.
static LoneMemory rank_memory(const Config *c, const LoneParts *p, int rank) {
    Mesh mesh = mesh_standing_for_all(layout_shape(c));
    mesh.pp.rank = rank;
    Trainer *t = trainer_new(c, mesh, five_d_layouts());
    const Pipeline *pipe = trainer_context(t, &pipeline);
    Price price = trainer_price(t);
    LoneMemory held = {.weights = price_states(&price, t->model, MEMORY_PARAMETER),
                       .gradients = price_states(&price, t->model, MEMORY_GRADIENT),
                       .optimizer = price_states(&price, t->model, MEMORY_OPTIMIZER),
                       .kept = pipeline_held_bytes(t)};
    double layers = 0;
    for (int stage = 0; stage < pipe->schedule.stages; stage++)
        if (schedule_has_stage(&pipe->schedule, rank, stage))
            layers += pipe->chunk[stage].end_layer - pipe->chunk[stage].first_layer;
    held.kept += schedule_costs(&pipe->schedule, rank).held_to_b * layers * p->expert_rows;
    trainer_free(t);
    mesh_end(&mesh);
    return held;
}

// Each of these is a straight line, too, in the layers of a stage: of all stages so many are counted, or two
// of each.
static LoneMemory staged_memory(const Config *c, const LoneParts *p, const Stages *s, int rank) {
    // Tied, it would join the group of both copies of the embedding, in which only rank 0 is real.
    if (c->tied && rank > 0) return lone_stage_memory(c, p, false, true);
    int64_t counted = COUNTED_LAYERS / s->count > 2 ? COUNTED_LAYERS / s->count : 2;
    int64_t beyond = c->layers / s->count - counted;
    if (beyond < 0) beyond = 0;
    Config few = *c;
    few.layers -= beyond * s->count;
    LoneMemory held = rank_memory(&few, p, rank);
    if (beyond > 0) {
        few.layers += s->count;
        LoneMemory next = rank_memory(&few, p, rank);
        held.weights += (double)beyond * (next.weights - held.weights);
        held.gradients += (double)beyond * (next.gradients - held.gradients);
        held.optimizer += (double)beyond * (next.optimizer - held.optimizer);
        held.kept += (double)beyond * (next.kept - held.kept);
    }
    // With ZeRO-2, or with experts, only a run shows what is in use at once: then the closed form's bytes.
    bool last = rank == c->pp - 1;
    LoneMemory closed = lone_stage_memory(c, p, !last, last);
    if (isnan(held.gradients)) held.gradients = closed.gradients;
    if (isnan(held.weights)) held.weights = closed.weights;
    held.peak = held.weights + held.gradients + held.optimizer + held.kept + lone_beyond(p, last);
    return held;
}

// The first stage keeps the most micro-batches, the last one the logits.
static LoneMemory fullest_memory(const Config *c, const LoneParts *p, const Stages *s) {
    LoneMemory first = staged_memory(c, p, s, 0), last = staged_memory(c, p, s, (int)c->pp - 1);
    return last.peak > first.peak ? last : first;
}

// Seconds of a stage's dry step of one micro-batch. Beyond the layers that are counted it is a straight line,
// as in one_stage.
static double stage_step(const Config *c, int64_t layers) {
    for (int64_t counted = COUNTED_LAYERS;; counted *= 2) {
        if (layers <= counted) return dry_step(c, layers, 1, true).step_seconds;
        StepCost cost = dry_step(c, counted, 1, true), more = dry_step(c, counted + 1, 1, true);
        if (more.comm.exposed_seconds >= (1 - 1e-6) * cost.comm.exposed_seconds)
            return cost.step_seconds + (double)(layers - counted) * (more.step_seconds - cost.step_seconds);
    }
}

// What a stage's step has besides its micro-batch: data parallelism and the optimizer. A tied model with the
// same layers has the same number of weights: one table of the vocabulary, not two.
static double behind_micro_batch(const Config *c, const LoneParts *p, int64_t layers) {
    double computed = 0;
    for (int i = 0; i < 3; i++)
        computed += (i == BLOCK ? (double)layers : 1) * (p->forward[i] + p->backward[i]);
    return fmax(stage_step(c, layers) - computed, 0);
}

LoneTime lone_step(const Config *c, const LoneParts *p, LoneMemory *memory) {
    Stages s = stages_of(c, p);
    LoneTime time = lone_time(c, p);
    if (c->pp == 1) {
        time.step = one_stage(c, c->layers > 6 ? 5 : c->layers, memory);
        time.exposed_dp = fmax(time.step - time.computed - time.optimizer, 0);
        return time;
    }
    double makespan = walked(c, p, &s), behind = behind_micro_batch(c, p, s.layers);
    *memory = fullest_memory(c, p, &s);
    time.bubble = makespan - time.computed;
    time.exposed_dp = fmax(behind - time.optimizer, 0);
    time.step = makespan + behind;
    return time;
}
