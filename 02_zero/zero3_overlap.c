// zero3_overlap.c: at how many tokens, and up to how many ranks, ZeRO-3 hides its communication. Playbook:
// appendix A3, "ZeRO-3 (FSDP) Communication Analysis"; "as a rule of thumb DP shouldn't exceed 512".
//
// A block of P weights of e bytes is in flight for e P (N - 1) / N / peak_bw, and its forward takes 2 P
// tokens / peak_flops. In backward its gradient of g bytes per weight is in flight as well, and backward
// takes 4 FLOPs per weight and token. So all of it is hidden if
//
//     forward     tokens >= (e / 2) (N - 1) / N  peak_flops / peak_bw        (the playbook has e = 1)
//     backward    tokens >= ((e + g) / 4) (N - 1) / N  peak_flops / peak_bw
//
// The formulas leave out latency, attention (below 1% of compute at the 64 tokens used below) and memory
// traffic. They give no limit on the number of ranks, as (N - 1) / N goes to 1: the limit comes from the
// latency of the N - 1 steps of a ring.
//
// Both are measured on the model clock with this run's ranks. For more ranks, the clock's charge for a call
// is used as a formula of n, which is checked against the clock at this run's n. This file has no main:
// zero3 prints the results.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "zero.h"

// ---- at how many tokens ----

static double tokens_by_formula(const Machine *machine, int n, double bandwidth, Pass pass) {
    double e = 2, g = 4;
    return (pass == FORWARD ? e / 2 : (e + g) / 4) * (n - 1) / n * machine_peak_flops(machine, BF16) /
           bandwidth;
}

typedef struct PassCost {
    double compute[2], exposed[2];  // seconds on the model clock, by Pass
    double converting, adding;      // part of backward: gradients to f32, and into the sums of the own part
} PassCost;

static PassCost micro_batch_cost(const Config *c, Mesh mesh) {
    Trainer *t = trainer_new(c, mesh, (const Technique *[]){&zero3, NULL});
    const Sockets *sockets = &t->model->sockets;
    Batch batch = batch_new(t, 0);
    model_begin_step(t->model, 1);
    MicroBatch micro = micro_batch_new(t->model, 0, batch.samples, batch.tokens, batch.targets, 1);
    clock_reset();
    model_forward(t->model, &micro);
    double forward = clock_total().model_seconds, exposed = comm_total().exposed_seconds;
    model_backward(t->model, &micro);
    sockets->gradients.finish(sockets->gradients.context, t->model);
    PassCost cost = {{forward, clock_total().model_seconds - forward},
                     {exposed, comm_total().exposed_seconds - exposed},
                     clock_operation("copy").model_seconds,
                     clock_operation("accumulate").model_seconds};
    micro_batch_free(t->model, &micro);
    batch_free(&batch);
    trainer_free(t);
    return cost;
}

// The cost of one more layer.
static PassCost layer_cost(Mesh mesh, int64_t sequences, int64_t seq) {
    Config two = llama_8b_layers(2, sequences, seq), three = llama_8b_layers(3, sequences, seq);
    PassCost a = micro_batch_cost(&two, mesh), b = micro_batch_cost(&three, mesh);
    for (Pass pass = FORWARD; pass <= BACKWARD; pass++)
        b.compute[pass] -= a.compute[pass], b.exposed[pass] -= a.exposed[pass];
    b.converting -= a.converting, b.adding -= a.adding;
    return b;
}

// Whether a block's communication among n ranks hides behind its compute in this pass. `block`: its cost on
// one rank. Communication costs what the model clock charges for a call, a formula of n.
static bool hides(const PassCost *block, Pass pass, int n, int per_node) {
    const int nodes = (n + per_node - 1) / per_node, here = n % per_node ? n % per_node : per_node;
    double elements = llama_8b_layer_elements();
    double weights = clock_collective_seconds("all_gather", 2 * elements, n, nodes, here);
    double gradients = clock_collective_seconds("reduce_scatter", 4 * elements, n, nodes, here);
    if (pass == FORWARD) return weights <= block->compute[FORWARD];
    // Of n ranks, each adds only 1/n of the elements. The reduce-scatter must end before this adding and
    // before the next gradient is converted.
    double seconds = block->compute[BACKWARD] - block->adding * (n - 1) / n;
    return weights + gradients <= seconds && gradients <= seconds - block->converting - block->adding / n;
}

typedef struct Search {
    Mesh mesh;
    Pass pass;
    int per_node;
    int64_t most;  // sequences of 64 that are tried
} Search;

static bool hides_by_charges(void *context, int64_t sequences) {
    const Search *s = context;
    PassCost block = layer_cost(mesh_single(), sequences, 64);
    return hides(&block, s->pass, s->mesh.dp.size, s->per_node);
}

// Fewest tokens per rank at which further layers delay nothing on the model clock: found with the charges,
// and confirmed by runs on the actual ranks.
static double tokens_by_clock(void *context) {
    const Search *s = context;
    int64_t hidden = fewest_that_hide(s->most, hides_by_charges, context), exposed = hidden - 1;
    double enough = layer_cost(s->mesh, hidden, 64).exposed[s->pass],
           fewer = exposed ? layer_cost(s->mesh, exposed, 64).exposed[s->pass]
                           : 1;  // there is no smaller count
    report_that(enough < 1e-9,
                "by its charges a layer hides behind %lld sequences of 64, and the run exposes %g s of it",
                (long long)hidden, enough);
    report_that(
        fewer > 1e-9,
        "by its charges a layer does not hide behind %lld sequences of 64, and the run exposes %g s",
        (long long)exposed, fewer);
    return 64.0 * (double)hidden;
}

static void overlap_condition(Mesh mesh, const Config *config) {
    int n = mesh.dp.size;
    const Machine *machine = clock_machine(), reached = clock_reached();
    say("\nTokens per rank from which the weights and gradients of Llama 3 8B's layers hide, %d ranks:\n",
        n);
    hides_from_title();
    for (int i = 0; i < 4; i++) {
        Pass pass = i % 2 ? BACKWARD : FORWARD;
        double bandwidth = i < 2 ? reached.node_bytes_per_second : reached.network_bytes_per_second;
        double alpha = i < 2 ? machine->node_latency : machine->network_latency;
        double formula = tokens_by_formula(&reached, n, bandwidth, pass);
        // Each call also has a latency, which the formula leaves out.
        double calls = pass == FORWARD ? 1 : 2, bytes = (pass == FORWARD ? 2 : 6) * llama_8b_layer_elements();
        double latency = calls * n * alpha * bandwidth / bytes;
        Search search = {mesh, pass, i < 2 ? n : 1, 64 + (int64_t)(2 * (1 + latency) * formula / 64)};
        char *where = format_text("%s, %s", pass == FORWARD ? "forward" : "backward",
                                  i < 2 ? "all in one node" : "one GPU per node");
        clock_set_nodes(search.per_node);
        hides_from_row(&(HidesFrom){where, formula, (0.01 + latency) * formula + 64,
                                    64.0 * (double)search.most, tokens_by_clock, &search});
        free(where);
    }
    clock_set_nodes((int)config->gpus_per_node);
}

// ---- up to how many ranks ----

static bool hides_both_ways(const PassCost *block, int n, int per_node) {
    return hides(block, FORWARD, n, per_node) && hides(block, BACKWARD, n, per_node);
}

static void largest_degree(Mesh mesh, const Config *config) {
    const Machine *machine = machine_find(config->machine);
    int per_node = config->gpus_per_node ? (int)config->gpus_per_node : machine->gpus_per_node;
    int degree[3], i = 0;
    for (int64_t sequences = 1; sequences <= 4; sequences *= 2) {
        PassCost block = layer_cost(mesh_single(), sequences, 4096),
                 here = layer_cost(mesh, sequences, 4096);
        int most = 0;
        while (most < 1 << 16 && hides_both_ways(&block, most + per_node, per_node)) most += per_node;
        double waits = here.exposed[FORWARD] + here.exposed[BACKWARD];
        // Ranks whose part is one element smaller wait for the others' last element.
        bool hidden = waits < 1e-6 * here.compute[BACKWARD],
             by_formula = hides_both_ways(&block, mesh.dp.size, per_node);
        degree[i++] = most;
        report_that(hidden == by_formula,
                    "%lld tokens on each of %d ranks: by the formula a layer %s, and the run waits %g s",
                    (long long)sequences * 4096, mesh.dp.size, by_formula ? "hides" : "does not hide",
                    waits);
        report_that(!zero_on_standard_machine(config) || sequences != 2 || (most > 256 && most < 1024),
                    "at 8,192 tokens a rank the limit is %d ranks, and not about 512", most);
        char *name = format_text("largest DP that hides, %lld tokens a rank", (long long)sequences * 4096);
        report_number("ZeRO-3", name, most, "");
        free(name);
    }
    say("\nLlama 3 8B: ZeRO-3's communication is hidden up to DP = %d, %d, %d with 4096, 8192, "
        "16384 tokens",
        degree[0], degree[1], degree[2]);
}

void zero3_overlap(Mesh mesh, const Config *config) {
    bool was_dry = device_is_dry_run();
    device_dry_run(true);
    clock_push("overlap");
    if (config->verbose) overlap_condition(mesh, config);
    largest_degree(mesh, config);
    clock_pop();
    device_dry_run(was_dry);
}
