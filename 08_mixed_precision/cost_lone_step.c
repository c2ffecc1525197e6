// cost_lone_step.c: a step of a layout from its parts: by closed forms, a microsecond each, for a search
// over all layouts; and clocked, for those that remain. Playbook: "Finding the Best Training Configuration",
// appendix A3.
//
//     closed form   m t  +  (p - 1) t'  +  2 (m - 1) h (p - 1) / p  +  2 (p - 1) h      1F1B
//                   t of the slowest stage, t' of the mean one, h a message's hop; interleaved: a v-th of
//                   the bubble, (p - 1) t'; ZB-H1: W fills a part of it
//                 + gradients and weights of data parallelism, less what is computed beside them
//                 + optimizer
//     clocked       one stage: a dry step of few layers and micro-batches, continued along both, in which a
//                   step is a straight line; several: cost_lone_pipeline.c
//
// This file has no main: find_config.c uses it.
#include <math.h>
#include <stdlib.h>

#include "cost_lone.h"
#include "five_d.h"

// ---- stages ----

typedef struct Stages {
    int count, layers;       // layers: of rank 0
    double all, slowest;     // seconds of all stages, and of the slowest rank's, both passes
    double forward, weight;  // of all: F, and W
    double hop;
} Stages;

static double hop_seconds(const Config *c, const LoneParts *p) {
    int stride = (int)(c->tp * c->cp * c->dp);
    bool inside = clock_node(0) == clock_node(stride);
    Traffic traffic = {1, p->message, p->message}, none = {0, 0, 0};
    return inside ? clock_transfers_seconds(traffic, none) : clock_transfers_seconds(none, traffic);
}

static Stages stages_of(const Config *c, const LoneParts *p) {
    int chunks = lone_chunks(c);
    Stages s = {.count = (int)c->pp * chunks, .hop = hop_seconds(c, p)};
    double rank[RANKS_MOST] = {0};
    for (int i = 0; i < s.count; i++) {
        int layers = (int)(c->layers / s.count + (i < c->layers % s.count));
        const int units[] = {i == 0, layers, i == s.count - 1};
        for (int unit = 0; unit < 3; unit++) {
            rank[i % c->pp] += units[unit] * (p->forward[unit] + p->backward[unit]);
            s.forward += units[unit] * p->forward[unit];
            s.weight += units[unit] * (p->backward[unit] - p->input[unit]);
        }
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
    double p = (double)c->pp, m = (double)c->grad_acc;
    if (c->pp == 1) return m * s->slowest;
    int chunks = s->count / (int)c->pp;
    double bubble = (p - 1) / p * s->all / chunks, wait = 2 * s->hop * (p - 1) / p;
    if (config_number(c, "schedule") == ZB_H1) {  // W fills what it can, and the time that messages take
        bubble -= (p - 1) / p * fmin(2 * s->weight, s->forward + s->weight);
        wait = 0;
    }
    if (chunks == 1) return m * s->slowest + (m - 1) * wait + bubble + 2 * (p - 1) * s->hop;
    return m * s->slowest + bubble + 2 * (p * chunks - 1) * s->hop;
}

static double over_replicas(Replicas r, const char *name, double bytes) {
    int node = clock_gpus_per_node();
    if (r.ranks == 1 || !(bytes > 0)) return 0;
    int here = r.stride >= node ? 1 : node / r.stride;
    if (here > r.ranks) here = r.ranks;
    return clock_collective_seconds(name, bytes, r.ranks, (r.ranks + here - 1) / here, here);
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

// Ports of a rank that a group of so many ranks, so far apart, uses: 1 to its node, 2 to other nodes.
static unsigned ports_of(int64_t ranks, int64_t stride) {
    if (ranks < 2) return 0;
    return (clock_node(0) == clock_node((int)stride) ? 1 : 0) |
           (clock_node(0) != clock_node((int)(stride * (ranks - 1))) ? 2 : 0);
}

// Reductions and gathers are hidden until a block's first own collective on the same port, which waits for
// them. Which part of a block's pass comes before it, about:
static double beside_reductions(const Config *c, bool backward) {
    unsigned ports = ports_of(c->dp * c->cp, c->tp);
    double part = 1;
    if (ports & ports_of(c->tp, 1)) part = config_number(c, "sp") ? 0 : 0.4;
    if (ports & ports_of(c->cp, c->tp)) part = fmin(part, backward ? 0.5 : 0.1);
    if (ports & ports_of(c->ep, 1)) part = fmin(part, backward ? 0 : 0.4);
    return part;
}

// The delay of a stage's last message beyond the end of its compute: each block's gradients are reduced as
// soon as they are final, and whatever needs the same port then waits, both the message and the collectives
// with which the next block's backward begins. (Not with ZB-H1: a B's message leaves before its W.)
static double reducing_at_end(const Config *c, const LoneParts *p, int layers) {
    if (config_number(c, "schedule") == ZB_H1 || config_number(c, "zero") == 2) return 0;
    unsigned ports = ports_of(c->dp * c->cp, c->tp);
    bool shared = ports & ports_of(2, c->tp * c->cp * c->dp);
    Exchange block = exchange_of(c, p->count[BLOCK], p->experts);
    double seconds = block.sums + (config_number(c, "zero") == 0 ? block.weights : 0);
    double waits = fmax(seconds - beside_reductions(c, true) * p->backward[BLOCK], 0);
    return (layers - 1) * waits + (shared ? seconds : 0);
}

// What the blocks do not hide. ZeRO-3 gathers a unit while the one before computes, and reduces it while the
// one after computes, in each micro-batch, and ZeRO-2 reduces in each; else that happens once a step.
static double exposed_of(const Config *c, const LoneParts *p, const Stages *s) {
    int zero = (int)config_number(c, "zero");
    bool whole = c->pp == 1;
    double ends = p->count[EMBEDDING] + (whole ? p->count[HEAD] : 0), L = s->layers,
           m = (double)c->grad_acc;
    double forward = beside_reductions(c, false) * p->forward[BLOCK],
           backward = beside_reductions(c, true) * p->backward[BLOCK];
    Exchange block = exchange_of(c, p->count[BLOCK], p->experts), end = exchange_of(c, ends, 0);
    if (zero == 3 && whole)
        return m *
               (L * (fmax(block.weights - forward, 0) + fmax(block.weights + block.sums - backward, 0)) +
                end.weights + 0.5 * end.sums);
    double sums = L * block.sums + end.sums, weights = L * block.weights + end.weights;
    if (zero == 0) return fmax(sums + weights - L * backward, block.sums + block.weights);
    double times = zero == 2 ? m : 1;
    return times * fmax(sums - L * backward, 0) + block.sums + fmax(weights - L * forward, end.weights / 2);
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
    Mesh mesh = mesh_standing_for_all(layout_shape(&c), 0);
    StepCost cost = program_cost(&c, mesh, five_d_layouts());
    mesh_end(&mesh);
    return cost;
}

double lone_continued(const double at[2][2], double x, double y) {
    double dx = at[1][0] - at[0][0], dy = at[0][1] - at[0][0];
    double both = at[1][1] - at[1][0] - at[0][1] + at[0][0];
    return at[0][0] + x * dx + y * dy + x * y * both;
}

typedef struct Corners {
    double at[2][2];  // of layers, of micro-batches
    int64_t layers, micro_batches;
} Corners;

static double continued(const Corners *k, double layers, double micro_batches) {
    return lone_continued(k->at, layers - (double)k->layers, micro_batches - (double)k->micro_batches);
}

// One stage. Few layers are counted as they are. A step is a straight line in its layers once the head's
// gradients have been reduced by the end of backward; as long as one more layer hides more of them, more
// layers are counted. With tp, cp or experts each layer exposes some as well: so the line is also compared
// with a step of twice as many layers.
static double one_stage(const Config *c, int64_t layers) {
    Corners step = {.layers = layers, .micro_batches = c->grad_acc > 3 ? 2 : c->grad_acc};
    double exposed[2] = {0};
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            StepCost cost = dry_step(c, step.layers + i, step.micro_batches + j, c->tied);
            step.at[i][j] = cost.step_seconds;
            exposed[i] += cost.comm.exposed_seconds;
        }
    int64_t more = 2 * layers < c->layers ? 2 * layers : c->layers;
    bool straight = exposed[1] >= (1 - 1e-6) * exposed[0];
    if (layers < c->layers && straight && more > layers + 1) {
        double there = dry_step(c, more, step.micro_batches, c->tied).step_seconds;
        double line = continued(&step, (double)more, (double)step.micro_batches);
        straight = fabs(line - there) <= 1e-3 * there;
    }
    if (layers < c->layers && !straight) return one_stage(c, more);
    return continued(&step, (double)c->layers, (double)c->grad_acc);
}

// A peak is no straight line in layers: the more there are, the later may be the moment that is fullest. But
// a rank holds no more of further micro-batches.
static LoneMemory one_stage_memory(const Config *c) {
    StepCost cost = dry_step(c, c->layers, c->grad_acc > 2 ? 2 : c->grad_acc, c->tied);
    const int64_t *peak = cost.memory.peak;
    return (LoneMemory){(double)peak[MEMORY_PARAMETER], (double)peak[MEMORY_GRADIENT],
                        (double)peak[MEMORY_OPTIMIZER], (double)cost.counted.kept_bytes,
                        (double)cost.memory.peak_total};
}

LoneTime lone_step(const Config *c, const LoneParts *p, LoneLimits most, LoneMemory *memory) {
    LoneTime time = lone_time(c, p);
    if (c->pp == 1) {
        time.step = one_stage(c, c->layers > 6 ? 5 : c->layers);
        *memory = one_stage_memory(c);
        time.exposed_dp = fmax(time.step - time.computed - time.optimizer, 0);
        return time;
    }
    // All wait for a rank with the most blocks, or for the last one, if its head takes even longer. (With
    // ZeRO-2 a rank takes less than that: it reduces the gradients that the parts add to sums.)
    double blocks = lone_layers(c, 0) * (p->forward[BLOCK] + p->backward[BLOCK]);
    LoneStep step = lone_pipeline(c, p->message, config_number(c, "zero") == 2 ? 0 : blocks, most);
    *memory = step.memory;
    // AFAB holds more of each further micro-batch, but with few of them another moment may be the fullest.
    if (config_number(c, "schedule") == AFAB && c->grad_acc > 2 * c->pp)
        memory->peak = fmax(memory->peak, lone_memory(c, p).peak);
    time.step = step.seconds;
    time.bubble = fmin(step.walked - time.computed, time.bubble);  // the rest is exposed communication
    time.exposed_dp = fmax(step.seconds - time.computed - time.bubble - time.optimizer, 0);
    return time;
}
