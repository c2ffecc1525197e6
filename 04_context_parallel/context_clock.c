// context_clock.c: the four methods on the model clock. Playbook: "Zig-Zag Ring Attention", its two ways to
// overlap.
//
// Attention alone of one layer of Llama 3 8B, forward and backward, on the ranks at hand:
//
//     plain ring   hop h lasts as long as its slowest rank: m^2 / 2 score entries, then N - 1 times m^2
//     zig-zag      m^2 / 2 in each of N hops: 2 - 1/N times faster
//     hides when   2 m kv d e / B + latency  <=  2 m^2 a d / F    m tokens per rank, B bytes/s, F FLOP/s
//                  without latency, from m = kv e F / (a B) on
//
// and whole steps of the model, with ZeRO-3 over dp x cp and full recomputation. This file has no main:
// zigzag_ring_attention.c shows it.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "context_parallel.h"

enum { SEQUENCE = 131072 };

Config context_llama(ContextMethod method, int64_t layers, int64_t seq, int cp) {
    Config c = config_of_model("llama-3-8b", "micro-batch=1 dtype=bf16");
    c.layers = layers;
    c.seq = seq;
    c.cp = cp;
    config_set(&c, "context", method);
    config_set(&c, "zero", 0);
    return c;
}

// ---- attention alone ----

// Runs the attention socket on tensors of this rank's shapes, in a dry run.
static void run_attention(const Model *m, MicroBatch *micro, ContextCost *cost) {
    const Sockets *sockets = &m->sockets;
    int64_t d = config_head_size(&m->config), n = micro->b * micro->s;
    AttentionShape shape = {micro->b, micro->s, m->config.heads, m->config.kv_heads, d};
    Tensor q = tensor_new(MEMORY_ACTIVATION, BF16, SHAPE(n, shape.heads * d)),
           k = tensor_new(MEMORY_ACTIVATION, BF16, SHAPE(n, shape.kv_heads * d)),
           v = tensor_like(MEMORY_ACTIVATION, k), o = tensor_like(MEMORY_ACTIVATION, q);
    Tensor d_o = tensor_like(MEMORY_ACTIVATION, q), dq = tensor_like(MEMORY_ACTIVATION, q),
           dk = tensor_like(MEMORY_ACTIVATION, k), dv = tensor_like(MEMORY_ACTIVATION, k);
    AttentionKept kept = {{0}, NULL};
    for (Pass pass = FORWARD; pass <= BACKWARD; pass++) {
        comm_wait(comm_barrier(m->mesh.world));  // all begin at once
        clock_reset();
        memory_reset_peak();
        int64_t before = memory_account().now[MEMORY_COMMUNICATION];  // the transport's own
        double start = clock_model_now();
        if (pass == FORWARD)
            sockets->attention.forward(sockets->attention.context, micro, o, &kept, q, k, v, shape);
        else
            sockets->attention.backward(sockets->attention.context, micro, dq, dk, dv, d_o, &kept, q, k, v,
                                        o, shape);
        cost->seconds[pass] = clock_model_now() - start;
        cost->exposed[pass] = comm_total().exposed_seconds;
        cost->bytes[pass] = (double)comm_total().bytes;
        cost->held[pass] = (double)(memory_account().peak[MEMORY_COMMUNICATION] - before);
        OpCount forward = clock_operation("attention_chunk_forward");
        cost->computing +=
            forward.model_seconds + clock_operation("attention_chunk_backward").model_seconds;
        if (pass == FORWARD) cost->entries = forward.flops / (4.0 * (double)(d * shape.heads));
    }
    sockets->attention.drop(sockets->attention.context, &kept);
    Tensor *const all[] = {&q, &k, &v, &o, &d_o, &dq, &dk, &dv};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(all[i]);
}

ContextCost context_attention_cost(Mesh mesh, const Config *config) {
    ContextCost cost = {.entries = 0};
    bool was_dry = device_is_dry_run();
    device_dry_run(true);
    Config c = *config;
    c.layers = 1;
    c.vocab = 256;
    Trainer *t = trainer_new(&c, mesh, context_layouts);
    Batch batch = batch_new(t, 0);
    MicroBatch micro = micro_batch_new(t->model, 0, c.micro_batch, batch.tokens, batch.targets, 1);
    run_attention(t->model, &micro, &cost);
    micro_batch_free(t->model, &micro);
    batch_free(&batch);
    trainer_free(t);
    device_dry_run(was_dry);
    return cost;
}

void context_check_cost(Mesh mesh, ContextMethod method, ContextFormula *formula) {
    static const char *const passes[] = {"forward", "backward"};
    Mesh ring = mesh_new((MeshShape){.cp = mesh.world.size});
    int cp = ring.cp.size;
    Config c = context_llama(method, 1, 1024 * cp, cp);
    ContextSizes sizes = {cp, 1024, 32, 8, cp > 8 ? cp : 8, 128, 2, 4};
    ContextCost predicted = formula(&sizes), measured = context_attention_cost(ring, &c);
    say("\nAttention of one layer of Llama 3 8B, 1,024 tokens on each of %d rank%s, by the formulas of the "
        "file:\n",
        cp, plural(cp));
    for (Pass pass = FORWARD; pass <= BACKWARD; pass++) {
        char *sent = format_text("sent by a rank, %s", passes[pass]);
        char *held = format_text("peak of buffers, %s", passes[pass]);
        report_equal(sent, predicted.bytes[pass], measured.bytes[pass], "B");
        report_equal(held, predicted.held[pass], measured.held[pass], "B");
        free(sent);
        free(held);
    }
}

static double least_of(double value, Group group) { return -comm_max(-value, group); }

// Both passes, on the rank that ends last.
static double both(const ContextCost *cost, Mesh mesh) {
    return comm_max(cost->seconds[FORWARD] + cost->seconds[BACKWARD], mesh.world);
}

// ---- from how many tokens on the ring hides its hops ----

enum { MOST_TOKENS = 1 << 18 };  // beyond these, dry runs take minutes: a row has only the formula

typedef struct Search {
    Mesh mesh;
    int64_t most;  // times 16 tokens, that are tried
} Search;

// Whether a zig-zag ring's forward exposes nothing.
static bool hides(void *context, int64_t count) {
    const Search *s = context;
    int cp = s->mesh.cp.size;
    Config c = context_llama(CONTEXT_ZIGZAG, 1, count * 16 * cp, cp);
    return comm_max(context_attention_cost(s->mesh, &c).exposed[FORWARD], s->mesh.world) < 1e-9;
}

static double tokens_by_clock(void *context) {
    const Search *s = context;
    return 16.0 * (double)fewest_that_hide(s->most, hides, context);
}

// The m of  2 m^2 a d / F = 2 m kv d e / B + latency
static double tokens_by_formula(const Machine *machine, double bandwidth, double latency) {
    const double a = 32, kv = 8, d = 128, e = 2, F = machine_peak_flops(machine, BF16);
    double line = kv * e * F / (a * bandwidth);
    return line / 2 + sqrt(line * line / 4 + latency * F / (2 * a * d));
}

static void where_the_ring_hides(Mesh mesh) {
    const Machine reached = clock_reached();
    say("\nTokens per rank from which the forward of a zig-zag ring hides its hops, %d ranks:\n",
        mesh.cp.size);
    hides_from_title();
    for (int apart = 0; apart < 2; apart++) {
        double formula =
            apart ? tokens_by_formula(&reached, reached.network_bytes_per_second, reached.network_latency)
                  : tokens_by_formula(&reached, reached.node_bytes_per_second, reached.node_latency);
        const char *where = apart ? "one GPU per node" : "all in one node";
        if (formula > MOST_TOKENS) {
            say("  %-30s %10.0f %22s %12s", where, formula, "not run", "not run");
            continue;
        }
        Search search = {mesh, 16 + (int64_t)(2 * formula / 16)};
        clock_set_nodes(apart ? 1 : mesh.cp.size);
        hides_from_row(&(HidesFrom){where, formula, 16 + 0.01 * formula, 16.0 * (double)search.most,
                                    tokens_by_clock, &search});
    }
}

// ---- the four methods side by side ----

// slow: the links reach less than the machine's peak, and hops may take longer than the compute beside them.
static void attention_row(Mesh mesh, ContextMethod method, double *ring, bool slow) {
    Config c = context_llama(method, 1, SEQUENCE, mesh.cp.size);
    ContextCost cost = context_attention_cost(mesh, &c);
    double seconds = both(&cost, mesh), most = comm_max(cost.computing, mesh.world),
           least = least_of(cost.computing, mesh.world);
    double exposed = comm_max(cost.exposed[FORWARD] + cost.exposed[BACKWARD], mesh.world);
    double held = comm_max(cost.held[FORWARD], mesh.world),
           back = comm_max(cost.held[BACKWARD], mesh.world);
    if (method == CONTEXT_RING) *ring = seconds;
    char held_text[32];
    snprintf(held_text, sizeof held_text, "%s", bytes_text(held));
    say("  %-12s %10.3f %8.2fx %10.3f %10.3f %12.3f %12s %12s\n", context_method_name[method],
        1e3 * seconds, *ring / seconds, 1e3 * most, 1e3 * least, 1e3 * exposed, held_text,
        bytes_text(back));
    report_number(context_method_name[method], "attention of a layer, model clock", seconds, "s");
    if (method == CONTEXT_ZIGZAG && mesh.cp.size >= 4) {
        // What the ring's slowest rank computes, over zig-zag's; where hops are hidden, most of it is gained.
        double limit = 2 - 1.0 / mesh.cp.size;
        report_that(slow || *ring / seconds >= 1.6,
                    "zig-zag is %.3f times as fast as the ring, expected 1.6 or more", *ring / seconds);
        report_that(*ring / seconds <= limit + 0.01,
                    "zig-zag is %.3f times as fast as the ring, expected 2 - 1/N = %.3f or less",
                    *ring / seconds, limit);
    }
    if (method == CONTEXT_ZIGZAG)
        report_that(most <= 1.001 * least,
                    "zig-zag: the busiest rank computes %.6f s, expected as long as the idlest, %.6f s",
                    most, least);
}

// Ulysses needs a cp that divides the 32 heads: then cp divides the 8 key/value heads, or they divide cp.
bool context_fits(int cp, ContextMethod method) { return method != CONTEXT_ULYSSES || 32 % cp == 0; }

static void compare_attention(Mesh mesh, bool slow) {
    say("  %-12s %10s %9s %10s %10s %12s %12s %12s\n", "", "ms", "vs ring", "busiest", "idlest", "exposed",
        "buffers, fwd", "buffers, bwd");
    double ring = 0;
    for (ContextMethod method = 0; method < CONTEXT_METHODS; method++)
        if (context_fits(mesh.cp.size, method)) attention_row(mesh, method, &ring, slow);
}

// ---- whole steps ----

static StepCost step_of_layers(Mesh mesh, ContextMethod method, int64_t layers, int64_t seq,
                               Techniques techniques) {
    Config c = context_llama(method, layers, seq, mesh.cp.size);
    c.dp = mesh.dp.size;
    c.recompute = RECOMPUTE_FULL;
    config_set(&c, "zero", 3);
    return program_cost(&c, mesh, techniques);
}

// Extrapolated to 32 layers: t(32) = t(4) + 14 (t(4) - t(2)). (The second layer adds more than the third, as
// the weights of two layers are gathered at once.)
StepCost context_step(Mesh mesh, ContextMethod method, int64_t seq, Techniques techniques) {
    StepCost two = step_of_layers(mesh, method, 2, seq, techniques),
             four = step_of_layers(mesh, method, 4, seq, techniques);
    four.step_seconds += 14 * (four.step_seconds - two.step_seconds);
    four.comm.exposed_seconds += 14 * (four.comm.exposed_seconds - two.comm.exposed_seconds);
    four.memory.peak[MEMORY_ACTIVATION] +=
        14 * (four.memory.peak[MEMORY_ACTIVATION] - two.memory.peak[MEMORY_ACTIVATION]);
    four.memory.peak_total += 14 * (four.memory.peak_total - two.memory.peak_total);
    return four;
}

static void step_row(Mesh mesh, const char *name, ContextMethod method, double *ring, bool within) {
    clock_push(name);
    StepCost cost = context_step(mesh, method, SEQUENCE, context_layouts);
    clock_pop();
    // The picture has a row for each method: its step of four layers, across nodes.
    if (mesh.cp.size > 1 && clock_node(mesh.cp.size - 1) > 0) timeline_keep(name);
    double seconds = comm_max(cost.step_seconds, mesh.world);
    double most = comm_max((double)cost.memory.peak_total, mesh.world);
    if (!*ring) *ring = seconds;
    char activations[32];
    snprintf(activations, sizeof activations, "%s",
             bytes_text(comm_max((double)cost.memory.peak[MEMORY_ACTIVATION], mesh.world)));
    say("  %-16s %10.3f %8.2fx %12.3f %14s %14s\n", name, seconds, mesh.dp.size * *ring / seconds,
        comm_max(cost.comm.exposed_seconds, mesh.world), activations, bytes_text(most));
    report_number(name, "step of Llama 3 8B, model clock", seconds, "s");
    report_number(name, "peak memory of a rank", most, "B");
    if (mesh.world.size == 8)  // the chapter's table, of GPUs with 80 GB
        report_that((most <= 80e9) == within, "%s: %s are %s 80 GB", name, bytes_text(most),
                    within ? "more than" : "not more than");
}

static void compare_steps(Mesh mesh) {
    int n = mesh.cp.size;
    say("  %-16s %10s %9s %12s %14s %14s\n", "", "step, s", "vs ring", "exposed, s", "activations",
        "memory");
    char *title = format_text("Four layers of Llama 3 8B, s = 131,072, cp %d, one GPU per node: rank 0", n);
    timeline_title(title);
    free(title);
    double ring = 0;
    for (ContextMethod method = 0; method < CONTEXT_METHODS; method++)
        if (context_fits(mesh.cp.size, method))
            step_row(mesh, context_method_name[method], method, &ring, true);
    Mesh apart = mesh_new((MeshShape){.dp = mesh.world.size});
    step_row(apart, "cp 1", CONTEXT_RING, &ring, false);
    say("  (cp 1: %d sequences at once, one on each rank; \"vs ring\" compares tokens/s)\n", n);
}

void context_compare(Mesh mesh, const Config *config) {
    Mesh ring = mesh_new((MeshShape){.cp = mesh.world.size});
    device_dry_run(true);
    for (int apart = 0; apart < 2 && ring.cp.size > 1; apart++) {
        clock_set_nodes(apart ? 1 : ring.cp.size);
        say("\nAttention of one layer of Llama 3 8B, s = 131,072, cp %d, %s, forward and backward:\n",
            ring.cp.size, apart ? "one GPU per node" : "all in one node");
        compare_attention(ring, config->network_efficiency < 1);
        say("\nA step of Llama 3 8B, one such sequence, ZeRO-3 over dp x cp, full recomputation:\n");
        compare_steps(ring);
    }
    if (ring.cp.size > 1) where_the_ring_hides(ring);
    clock_set_nodes((int)config->gpus_per_node);
    device_dry_run(false);
}
