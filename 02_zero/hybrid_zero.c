// hybrid_zero.c: ZeRO-3 inside a node, replicas across nodes (FSDP's hybrid sharding, MiCS). Playbook:
// "ZeRO-3: Adding Parameter Partitioning"; Zhang et al. 2022, "MiCS".
//
// Changes from zero3.c: the model is sharded over K neighbouring ranks (--shard-ranks) instead of all N,
// and each of the N / K groups holds a replica. Weights are gathered and gradients reduced over the fast
// links of a node. As in MiCS, only one all-reduce per step and shard crosses nodes, among the ranks that
// hold it (FSDP makes one per micro-batch, unless it is told to wait for the last):
//
//                        node 0              node 1
//     shards of a unit   [0] [1] [2] [3]     [0] [1] [2] [3]
//     every pass         <- all-gather ->    <- all-gather ->       and reduce-scatter, inside
//     once a step         0 <----------------> 0                    all-reduce across, of shard 0,
//                             1 <----------------> 1   …            of shard 1, …
// The all-reduce starts once the unit's last reduce-scatter has ended, on a communication stream of its
// own, so that the gathers of the next units need not wait for it: a rank has one port inside its node and
// one across.
// Bytes sent per rank and step with m micro-batches (letters as in zero3.c): inside,
// m (K - 1) / K (g Psi + 2 e Psi - e (E + H)), as each micro-batch is reduced; across,
// 2 (N / K - 1) / (N / K) g Psi / K. zero3.c sends m (N - 1) / N (…), of which 1 / K goes across: its ring
// leaves a node from one of K ranks. Memory per rank: as zero3.c on K ranks.
// Run: build/02_zero/hybrid_zero     (--ranks 8 --shard-ranks 4, --grad-acc 2, --tied, --dtype bf16 …)
// Last line: PASS hybrid_zero: each node shards a replica, and the ranks reproduce the single-device step …
#include <math.h>
#include <stdlib.h>

#include "zero.h"

typedef struct Hybrid {
    const Technique *stage3;  // the ZeRO-3 that runs inside
    Zero *zero;               // its context
    Sockets inside;           // the sockets as it filled them
    Group across;             // the ranks that hold the same part
    Request **sharing;        // (units) the all-reduce across, started and not yet waited for; else NULL
    bool *last;               // (units) the step's last gradient is being reduced inside
} Hybrid;

// ---- the technique: who shards a replica, and who holds the same shard ----

static int shard_ranks(const Config *c) {
    int chosen = (int)config_number(c, "shard-ranks");
    return chosen ? chosen : (int)(c->dp * c->cp);
}

// Inside: neighbours in the group, hence in one node; across: every k-th rank, this one among them.
Group hybrid_zero_group(Group replicas, int k, bool inside) {
    return inside ? mesh_inside(replicas, k, "dp inside", LINE_DP)
                  : mesh_across(replicas, k, "dp across", LINE_DP_ACROSS);
}

// All replicas have the same elements, so only the first one's are counted in the gradient norm.
void hybrid_zero_shard(Model *m) {
    Params *p = &m->params;
    Group all = m->mesh.dp_cp;
    if (all.size == 1) {
        zero_shard(m, SHARD_VALUES);
        return;
    }
    int k = shard_ranks(&m->config);
    Group inside = hybrid_zero_group(all, k, true);
    for (int i = 0; i < p->units; i++) p->unit[i].replicas = inside;
    zero_shard(m, SHARD_VALUES);
    for (int i = 0; i < p->units && all.rank >= k; i++) p->unit[i].counted_count = 0;
}

// ---- gradients: inside as ZeRO-3 does, then across ----

static void begin(void *context, Model *m, int unit) {
    const Hybrid *h = context;
    h->inside.gradients.begin(h->zero, m, unit);
}

// Starts the all-reduce across of a unit whose reduction inside has just ended, while other units compute.
static void share(Hybrid *h, Model *m, int unit) {
    if (unit < 0 || !h->last[unit]) return;
    h->last[unit] = false;
    h->sharing[unit] = comm_all_reduce(m->params.unit[unit].own_grads, REDUCE_SUM, h->across);
}

// ZeRO-3's `ready` ends the reduction of the unit before, and then zero->reducing has changed; or it leaves
// it in flight (zero3_per_step.c, if this gradient is not final).
static void ready(void *context, Model *m, int unit, bool last) {
    Hybrid *h = context;
    int before = h->zero->reducing;
    h->inside.gradients.ready(h->zero, m, unit, last);
    h->last[unit] = last;
    if (before != h->zero->reducing) share(h, m, before);
}

// All reductions must finish before the optimizer step.
static void finish(void *context, Model *m) {
    Hybrid *h = context;
    int before = h->zero->reducing;
    h->inside.gradients.finish(h->zero, m);
    share(h, m, before);
    for (int unit = m->params.units - 1; unit >= 0; unit--) zero_wait(&h->sharing[unit]);
}

// ---- the technique as a record: plug, unplug, price ----

void *hybrid_zero_plug(Model *m, const Technique *inside) {
    size_t units = (size_t)m->params.units;
    Hybrid *h = host_alloc(sizeof *h);
    *h = (Hybrid){.stage3 = inside, .zero = inside->plug(m), .across = {.size = 1, .name = "one"}};
    if (m->mesh.dp_cp.size > 1)
        h->across = hybrid_zero_group(m->mesh.dp_cp, shard_ranks(&m->config), false);
    h->inside = m->sockets;
    h->sharing = calloc(units, sizeof(Request *));
    h->last = calloc(units, sizeof *h->last);
    CHECK(h->sharing && h->last, "out of host memory for the requests of %zu units", units);
    m->sockets.gradients.context = h;
    m->sockets.gradients.begin = begin;
    m->sockets.gradients.ready = ready;
    m->sockets.gradients.finish = finish;
    return h;
}

void hybrid_zero_unplug(Model *m, void *context) {
    Hybrid *h = context;
    for (int i = 0; i < m->params.units; i++) zero_wait(&h->sharing[i]);
    h->stage3->unplug(m, h->zero);
    free(h->sharing);
    free(h->last);
    free(h);
}

void hybrid_zero_price(Price *price, const Model *m, const void *context) {
    const Hybrid *h = context;
    h->stage3->price(price, m, h->zero);
    for (int i = 0; i < m->params.units; i++)
        if (m->params.unit[i].count > 0)  // else another stage's
            price_all_reduce(price, 1, m->params.unit[i].own_count, m->params.recipe.sum, h->across);
}

static void *plug(Model *m) { return hybrid_zero_plug(m, &zero3); }

bool hybrid_zero_enabled(const Config *c) { return zero_on(c, 4); }

void hybrid_zero_check(const Config *c) {
    int64_t replicas = c->dp * c->cp, k = shard_ranks(c);
    CHECK(replicas % k == 0,
          "--shard-ranks %ld does not divide the %ld rank%s of --dp x --cp: --shard-ranks %s would fit", k,
          replicas, plural(replicas), config_degrees(c, replicas, replicas, NULL));
    CHECK(c->ep == 1,
          "--zero hybrid with --ep %ld: the ranks that hold copies of an expert are not those that hold "
          "copies of the rest of its block; --ep 1 or --zero 3 would fit",
          c->ep);
}

const Option hybrid_zero_option = {
    "shard-ranks",
    OPTION_INT,
    NULL,
    "0",
    0,
    1 << 20,
    "ranks",
    "neighbouring ranks of --dp x --cp, such as one node's, that shard a replica; 0: all, as --zero 3",
    false};

const Technique hybrid_zero = {.name = "hybrid_zero",
                               .option = &hybrid_zero_option,
                               .options = 1,
                               .asked = "--zero hybrid",
                               .axes = 1u << AXIS_DP,
                               .enabled = hybrid_zero_enabled,
                               .check = hybrid_zero_check,
                               .shard = hybrid_zero_shard,
                               .plug = plug,
                               .unplug = hybrid_zero_unplug,
                               .price = hybrid_zero_price};

#ifndef NO_MAIN

// ---- bytes inside and across nodes, and what they cost ----

typedef struct NodeBytes {
    double inside, across;  // bytes that a rank sends in a step, the mean of the ranks of a node
} NodeBytes;

// A ring passes through all ranks of a node before it goes on to the next: of K ranks one sends across. A
// ring of the hybrid's has K ranks in one node, or one in each.
static NodeBytes in_rings(double sent, double k) { return (NodeBytes){sent * (k - 1) / k, sent / k}; }

static NodeBytes formula(const Config *c, double n, double k, bool hybrid) {
    double all = (double)config_parameters(c),
           ends = 2.0 * (double)(c->vocab * c->hidden) + (double)c->hidden;
    double elements = (double)c->grad_acc * (4 * all + 2 * (2 * all - ends)), shards = hybrid ? k : n;
    double sent = (shards - 1) / shards * elements;
    if (hybrid) return (NodeBytes){sent, 2 * (n / k - 1) / (n / k) * 4 * all / k};
    return in_rings(sent, k);
}

static void across_nodes(Mesh mesh, const Config *config) {
    static const Technique *const ways[][2] = {{&zero3, NULL}, {&hybrid_zero, NULL}};
    static const char *const name[] = {"ZeRO-3 over all", "ZeRO-3 inside"};
    int n = mesh.dp.size, k = shard_ranks(config);
    if (n == k || k == 1 || mesh.world.size != n) return;
    Config c = config_of_model("llama-3-8b", "seq=4096 dtype=bf16 micro-batch=1 grad-acc=4");
    config_set(&c, "shard-ranks", k);
    c.dp = n;
    StepCost cost[2];
    device_dry_run(true);
    clock_set_nodes(k);
    say("\nLlama 3 8B, %d ranks in nodes of %d, 4 x 4,096 tokens on each, on the model clock of %s:", n, k,
        config->machine);
    say("  %-16s %10s %12s %14s %14s %14s %14s", "", "step, ms", "exposed, ms", "weights, peak",
        "optimizer", "sent inside", "sent across");
    for (int i = 0; i < 2; i++) {
        clock_push(name[i]);
        cost[i] = program_cost(&c, mesh, ways[i]);
        clock_pop();
        double all = (double)cost[i].comm.bytes, across = (double)cost[i].comm.across;
        NodeBytes sent = i == 1 ? (NodeBytes){all - across, across} : in_rings(all, k),
                  says = formula(&c, n, k, i == 1);
        say("  %-16s %10.2f %12.2f %14s %14s %14s %14s", name[i], 1e3 * cost[i].step_seconds,
            1e3 * cost[i].comm.exposed_seconds, bytes_text((double)cost[i].memory.peak[MEMORY_PARAMETER]),
            bytes_text((double)cost[i].memory.peak[MEMORY_OPTIMIZER]), bytes_text(sent.inside),
            bytes_text(sent.across));
        say("  %-16s %68s %14s", "  by the formulas", bytes_text(says.inside), bytes_text(says.across));
        // Uneven parts, and the few scalars that a step sums, make a difference below one millionth.
        report_that(
            fabs(sent.inside / says.inside - 1) < 1e-6 && fabs(sent.across / says.across - 1) < 1e-6,
            "%s sends %g B inside and %g B across nodes, and its formulas say %g and %g", name[i],
            sent.inside, sent.across, says.inside, says.across);
        report_number(name[i], "bytes sent across nodes", sent.across, "B");
        report_number(name[i], "seconds per step", cost[i].step_seconds, "s");
    }
    // With slow compute all communication is hidden, and only the wait for the slowest rank is exposed.
    report_that(
        cost[1].comm.exposed_seconds < cost[0].comm.exposed_seconds || config->compute_efficiency < 1,
        "sharding inside nodes exposes %g s, and over all ranks %g s", cost[1].comm.exposed_seconds,
        cost[0].comm.exposed_seconds);
    clock_set_nodes((int)config->gpus_per_node);
    device_dry_run(false);
}

static const Technique *const techniques[] = {&hybrid_zero, &recompute, NULL};

int main(int argc, char **argv) {
    const Program program = {
        .purpose = "Hybrid sharding: ZeRO-3 among the ranks of a node, and replicas across nodes.",
        .claim = "each node shards a replica, and the ranks reproduce the single-device step",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 shard-ranks=4",
        .natural = 8,
        .before = {"zero3", (const Technique *[]){&zero3, &recompute, NULL}, NULL, 0},
        .techniques = techniques,
        .more = across_nodes};
    return program_main(argc, argv, &program);
}
#endif
