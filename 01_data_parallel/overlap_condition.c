// overlap_condition.c: from how many tokens on communication hides behind compute. Playbook: appendix A3,
// "Data Parallelism Communication Analysis".
//
// A gradient of g bytes takes g 2 (N - 1) / N / peak_bw to reduce, and its parameter costs 4 FLOPs per token
// in backward:
//
//     t_comm / t_compute  =  g / (2 tokens)  (N - 1) / N  peak_flops / peak_bw  <=  1
//
// (The playbook's last line keeps a num_params that cancels, and has g = 1.) Here g = 4: 16-bit gradients
// are summed in f32. The formula leaves out latency, attention (below 1% of backward with such short
// sequences) and memory traffic, which lengthens backward: on the model clock fewer tokens are enough.
//
// The table also has what dry runs find: the fewest tokens with which one more layer exposes no
// communication. The search and the table's rows also serve ZeRO-3 (zero3_overlap.c), asynchronous tensor
// parallelism and ring attention (context_clock.c). This file has no main: ddp_bucketed prints the table.
#include <math.h>

#include "data_parallel.h"

// ---- a search, and a row of a table ----

int64_t fewest_that_hide(int64_t most, bool (*hides)(void *context, int64_t count), void *context) {
    int64_t exposed = 0, hidden = most;
    while (hidden - exposed > 1) {
        int64_t middle = (exposed + hidden) / 2;
        if (hides(context, middle)) hidden = middle;
        else exposed = middle;
    }
    return hidden;
}

void hides_from_title(void) {
    say("  %-30s %10s %22s %12s\n", "", "formula", "clock, memory is free", "model clock");
}

void hides_from_row(const HidesFrom *row) {
    const Machine *machine = clock_machine();
    Machine free_memory = *machine;  // what a formula assumes
    free_memory.memory_bytes_per_second = INFINITY;
    clock_set_machine(&free_memory);
    double ideal = row->by_clock(row->context);
    clock_set_machine(machine);
    double real = row->by_clock(row->context);
    say("  %-30s %10.0f %22.0f %12.0f\n", row->where, row->formula, ideal, real);
    report_number(row->where, "tokens to hide, formula", row->formula, "");
    report_number(row->where, "tokens to hide, model clock", real, "");
    report_that(fabs(ideal - row->formula) <= row->tolerance,
                "%s: hides from %.0f tokens on, where the formula says %.0f%s", row->where, ideal,
                row->formula,
                ideal < row->most ? ""
                                  : ": no number that was tried is enough. Is anything in flight during "
                                    "compute?");
    report_that(
        real <= ideal,
        "%s: hides from %.0f tokens on, and from %.0f where memory traffic costs nothing, though it "
        "makes compute longer",
        row->where, real, ideal);
}

// ---- buckets of gradients ----

enum { SEQUENCE = 64 };
static const Technique *const techniques[] = {&ddp_bucketed, NULL};

static double tokens_by_formula(const Machine *machine, int n, double bandwidth) {
    return 4 / 2.0 * (n - 1) / n * machine_peak_flops(machine, BF16) / bandwidth;
}

Config llama_8b_layers(int64_t layers, int64_t sequences, int64_t seq) {
    Config c = config_of_model("llama-3-8b", "vocab=256 dtype=bf16");
    c.layers = layers, c.micro_batch = sequences, c.seq = seq;
    return c;
}

double llama_8b_layer_elements(void) {
    const Config one = llama_8b_layers(1, 1, SEQUENCE), two = llama_8b_layers(2, 1, SEQUENCE);
    return (double)(config_parameters(&two) - config_parameters(&one));
}

typedef struct Search {
    Mesh mesh;
    int64_t most;  // sequences that are tried
} Search;

// Whether no further layer delays the step: its all-reduce ends no later than its backward.
static bool hides(void *context, int64_t sequences) {
    const Search *s = context;
    Config two = llama_8b_layers(2, sequences, SEQUENCE), three = llama_8b_layers(3, sequences, SEQUENCE);
    double before = program_cost(&two, s->mesh, techniques).comm.exposed_seconds;
    return program_cost(&three, s->mesh, techniques).comm.exposed_seconds - before <= 1e-9;
}

static double tokens_by_clock(void *context) {
    const Search *s = context;
    return SEQUENCE * (double)fewest_that_hide(s->most, hides, context);
}

void ddp_overlap_condition(Mesh mesh, const Config *config) {
    int n = mesh.dp.size;
    if (n == 1) return;
    const Machine *machine = clock_machine(), reached = clock_reached();
    device_dry_run(true);
    clock_push("overlap condition");
    say("\nTokens per rank from which all-reduces of Llama 3 8B's layers hide behind backward, %d ranks:\n",
        n);
    hides_from_title();
    for (int apart = 0; apart < 2; apart++) {
        double bandwidth = apart ? reached.network_bytes_per_second : reached.node_bytes_per_second;
        double formula = tokens_by_formula(&reached, n, bandwidth);
        // What latency adds to the all-reduce of one layer's gradients, as a fraction of its transfer time.
        double latency = n * (apart ? machine->network_latency : machine->node_latency) * bandwidth /
                         (4 * llama_8b_layer_elements());
        Search search = {mesh, 64 + (int64_t)(2 * (1 + latency) * formula / SEQUENCE)};
        clock_set_nodes(apart ? 1 : n);
        hides_from_row(&(HidesFrom){apart ? "one GPU per node, network" : "all in one node, NVLink",
                                    formula, (0.01 + latency) * formula + SEQUENCE,
                                    SEQUENCE * (double)search.most, tokens_by_clock, &search});
    }
    clock_set_nodes((int)config->gpus_per_node);
    clock_pop();
    device_dry_run(false);
}
