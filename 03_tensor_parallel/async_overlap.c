// async_overlap.c: what asynchronous tensor parallelism hides, on the model clock. Playbook: appendix A3, "TP
// Communication Analysis".
//
// A step of Llama 3 8B, four ways; and the width h from which rows that enter a region hide behind a product
// with one weight (h / n, h): (n - 1) / n of K = 2 b s h bytes arrive, and it takes 2 b s h^2 / n FLOPs:
//
//     t_comm / t_compute  =  (n - 1) / h  peak_flops / peak_bw  <=  1
//
// (A3 has 2 h for h: it counts one byte per element, and bf16 has two.) The clock needs n / (n - 1) times
// this h: n - 1 pieces are sent, each during the product before it, and during the last product nothing is
// left to send. Bytes sent: none, these are dry runs. This file has no main: async_tensor_parallel shows it.
#include <math.h>
#include <stdlib.h>

#include "tensor_parallel.h"

// ---- a step, four ways ----

static Config llama_3_8b(void) {
    return config_of_model("llama-3-8b", "seq=8192 dtype=bf16 micro-batch=1");
}

typedef struct Way {
    const char *name;
    bool data, sp, async;
} Way;
static const Way ways[] = {{"tp", false, false, false},
                           {"tp + sp", false, true, false},
                           {"async tp", false, true, true},
                           {"dp", true, false, false}};
enum { ASYNC = 2, WAYS = sizeof ways / sizeof *ways };

static Config config_of_way(const Way *way, int ranks) {
    Config c = llama_3_8b();
    c.dp = way->data ? ranks : 1;
    c.tp = way->data ? 1 : ranks;
    config_set(&c, "zero", 0);
    config_set(&c, "sp", way->sp);
    config_set(&c, "async-tp", way->async);
    config_set(&c, "vocab-parallel", !way->data);
    return c;
}

// One row of the table (32 layers), and one of the picture (2 layers: with more, messages would be too small
// to see).
static StepCost show_way(const Way *way, Mesh mesh) {
    Config c = config_of_way(way, mesh.world.size);
    Mesh own = way->data ? mesh_new((MeshShape){.dp = mesh.world.size}) : mesh;
    clock_push(way->name);
    StepCost cost = program_cost(&c, own, tensor_layouts);
    say("  %-10s %10.3f %12.3f %12.3f %10.0f %14s\n", way->name, 1e3 * cost.step_seconds,
        1e3 * cost.comm.model_seconds, 1e3 * cost.comm.exposed_seconds,
        (double)(c.dp * c.seq) / cost.step_seconds, bytes_text((double)cost.memory.peak_total));
    report_number(way->name, "seconds per step", cost.step_seconds, "s");
    report_number(way->name, "exposed seconds", cost.comm.exposed_seconds, "s");
    c.layers = 2, c.vocab = 256;
    program_cost(&c, own, tensor_layouts);
    clock_pop();
    if (!way->data) timeline_keep(way->name);
    return cost;
}

// Within a node async TP has the shortest step, and exposes at least 30 % less. Across nodes each piece uses
// the port of one GPU, where the ring of a collective uses all.
static void compare_async(const StepCost *async, const StepCost *other, const char *name, bool one_node) {
    double exposed = async->comm.exposed_seconds / other->comm.exposed_seconds,
           step = async->step_seconds / other->step_seconds;
    say("  async tp exposes %.2f of what %s does, and its step takes %.3f of the time\n", exposed, name,
        step);
    report_that(
        (exposed <= 0.7 && step < 1) || !one_node,
        "async tp exposes %.2f of what %s does, expected 0.7 or less, and its step takes %.3f of the time, "
        "expected below 1",
        exposed, name, step);
}

static void compare_ways(Mesh mesh, const Config *config) {
    int ranks = mesh.world.size;
    say("\nLlama 3 8B, %d ranks, micro-batches of 8192 tokens, vocabulary sharded, on the model clock of "
        "%s:\n",
        ranks, config->machine);
    char *title = format_text("Two layers of Llama 3 8B, %d ranks, a micro-batch of 8192 tokens", ranks);
    timeline_title(title);
    free(title);
    say("  %-10s %10s %12s %12s %10s %14s\n", "", "step, ms", "sending, ms", "exposed, ms", "tokens/s",
        "memory/rank");
    StepCost cost[WAYS];
    for (int i = 0; i < WAYS; i++) cost[i] = show_way(&ways[i], mesh);
    bool one_node =
        clock_node(ranks - 1) == 0 && config->compute_efficiency == 1 && config->network_efficiency == 1;
    for (int i = 0; i < ASYNC; i++) compare_async(&cost[ASYNC], &cost[i], ways[i].name, one_node);
}

// ---- from what width on rows hide ----

// Seconds that compute waits when rows of width h enter a region to be multiplied by one weight of h outputs,
// or leave it after one of h inputs.
static double exposed_by_product(Mesh mesh, int64_t h, bool leaves) {
    Config c = config_default("layers=1 heads=32 kv-heads=32 seq=65536 micro-batch=1 dtype=bf16");
    c.hidden = c.ffn = h;
    c.tp = mesh.tp.size;
    config_set(&c, "sp", 1);
    config_set(&c, "async-tp", 1);
    Trainer *t =
        trainer_new(&c, mesh, (const Technique *[]){&sequence_parallel, &async_tensor_parallel, NULL});
    Model *m = t->model;
    const Sockets *sockets = &m->sockets;
    MicroBatch micro = {.b = 1, .s = c.seq};
    int64_t rows = sockets->region.rows(sockets->region.context, &micro);
    Tensor outside = tensor_new(MEMORY_ACTIVATION, BF16, SHAPE(rows, h)), whole;
    Tensor part = tensor_new(MEMORY_ACTIVATION, BF16, SHAPE(c.seq, m->block[0].q->shape[0]));
    void *kept = NULL;
    clock_reset();
    if (leaves) {
        tensor_free(&outside);
        whole = tensor_new(MEMORY_ACTIVATION, BF16, SHAPE(c.seq, h));
        sockets->linear.forward(sockets->linear.context, m, 1, &m->block[0].o, &whole, part, &kept);
        outside = sockets->region.leave(sockets->region.context, &micro, whole);
    } else {
        whole = sockets->region.enter(sockets->region.context, &micro, outside);
        sockets->linear.forward(sockets->linear.context, m, 1, &m->block[0].q, &part, whole, &kept);
    }
    double exposed = comm_total().exposed_seconds;
    tensor_free(&outside), tensor_free(&whole), tensor_free(&part);
    trainer_free(t);
    return exposed;
}

static bool rows_hide(void *mesh, int64_t count) {
    return exposed_by_product(*(const Mesh *)mesh, 64 * count, false) <= 1e-9;
}

static void overlap_condition(Mesh mesh, const Config *config) {
    const Machine *machine = clock_machine(), reached = clock_reached();
    Machine free_memory = *machine;  // what the formula assumes
    free_memory.memory_bytes_per_second = INFINITY;
    clock_set_machine(&free_memory);
    int n = mesh.tp.size;
    double formula = (n - 1) * machine_peak_flops(&reached, BF16) / reached.node_bytes_per_second;
    clock_set_nodes(n);
    const int64_t most = 64 + (int64_t)(4 * formula / 64);  // in units of 64, for heads of even size
    int64_t hidden = fewest_that_hide(most, rows_hide, &mesh);
    double left = exposed_by_product(mesh, 64 * hidden, true);
    report_that(
        left <= 1e-9,
        "leaving a region exposes %g s behind products of h = %ld, behind which rows that enter hide: "
        "expected 0",
        left, 64 * hidden);
    clock_set_machine(machine);
    clock_set_nodes((int)config->gpus_per_node);
    double clock = 64.0 * (double)hidden, expected = formula * n / (n - 1);
    // Each piece has its latency beside its bytes.
    double late = machine->node_latency * reached.node_bytes_per_second * n / (2 * 65536 * expected);
    say("\nThe all-gather of rows hides behind a product with one (h, h) weight from h = %.0f on by "
        "formula A3 in bytes, from %.0f on by the clock\n",
        formula, clock);
    report_number("hidden size from which rows hide", "formula", formula, "");
    report_number("hidden size from which rows hide", "model clock", clock, "");
    report_that(fabs(clock - expected) <= (0.02 + late) * expected + 64,
                "rows that enter hide from h = %.0f on, expected %.0f%s", clock, expected,
                hidden < most ? "" : ": no size that was tried is enough");
}

void async_overlap(Mesh mesh, const Config *config) {
    Config c = llama_3_8b();
    int n = mesh.tp.size;
    if (n == 1 || n != mesh.world.size || c.heads % n || (c.kv_heads % n && n % c.kv_heads)) return;
    device_dry_run(true);
    compare_ways(mesh, config);
    clock_push("overlap condition");
    overlap_condition(mesh, config);
    clock_pop();
    device_dry_run(false);
}
