// ddp_bucketed.c: many small gradients in few large messages. Playbook: "Second optimization: Bucketing gradients".
//
// Against ddp_overlap.c: a message costs latency whatever its size, so units wait for each other until bucket_bytes are
// full, and go as one. Units stand one after another in the flat gradient (params.h), so a bucket is a range of it and
// nothing is copied.
//
//     units    head  block 3  block 2  block 1  block 0  embedding       in the order of backward
//     buckets  [------------] [---------------] [----------------]
//
// After every micro-batch the sums so far are made equal on all ranks, as PyTorch's DDP does outside of no_sync; what
// the next one adds must not count them n times, so each rank keeps its n-th part of them.
//
// Bytes sent per rank: 2 (n - 1) / n K for each of the grad_acc micro-batches. Memory per rank: as on one device.
// Run: build/01_data_parallel/ddp_bucketed             (--bucket-mb 25, --ranks 3, --tied, --dtype f32, --dry-run …)
// Last line: PASS ddp_bucketed: ranks together make the step of one device …
#include <math.h>

#include "playbook.h"

// ---- the technique ----

int ddp_bucket_starts(const Params *params, int64_t bucket_bytes, int *first_unit) {
    int buckets = 0;
    int64_t bytes = 0;
    for (int unit = params->units - 1; unit >= 0; unit--) {
        bytes += tensor_bytes(unit_total_grad(&params->unit[unit]));
        if (bytes < bucket_bytes && unit > 0) continue;
        first_unit[buckets++] = unit;
        bytes = 0;
    }
    return buckets;
}

// Gradients of units first … end - 1: a range of the model's flat gradient.
static Tensor range_of(const Params *params, int first, int end) {
    const Unit *last = &params->unit[end - 1];
    int64_t from = params->unit[first].first;
    return tensor_view(params_total_grad(params), from, SHAPE(last->first + last->count - from));
}

void ddp_bucketed_ready(void *context, Model *model, int unit, MicroBatch *micro) {
    (void)micro;
    Ddp *ddp = context;
    params_accumulate(&model->params, unit);
    Tensor bucket = range_of(&model->params, unit, ddp->next_unit);
    if (tensor_bytes(bucket) < ddp->bucket_bytes && unit > 0) return;
    ddp->pending[ddp->count++] = comm_all_reduce(bucket, REDUCE_SUM, model->mesh.dp);
    ddp->next_unit = unit;
}

void ddp_bucketed_finish(void *context, Model *model, MicroBatch *micro) {
    Ddp *ddp = context;
    for (int i = 0; i < ddp->count; i++) comm_wait(ddp->pending[i]);
    ddp->count = 0;
    ddp->next_unit = model->params.units;
    if (!micro->last) op_scale(params_total_grad(&model->params), 1.0 / model->mesh.dp.size);
}

void ddp_bucketed_plug(Model *model, Ddp *ddp) {
    ddp->pending = host_alloc(model->params.units * sizeof *ddp->pending);
    ddp->count = 0;
    ddp->next_unit = model->params.units;
    model->sockets.gradients.context = ddp;
    model->sockets.gradients.ready = ddp_bucketed_ready;
    model->sockets.gradients.finish = ddp_bucketed_finish;
}

#ifndef NO_MAIN

// ---- when it hides: appendix A3 of the playbook ----

// A gradient of g bytes travels in g 2 (n - 1) / n / peak_bw, and its parameter costs backward 4 FLOPs a token:
//
//     t_comm / t_compute  =  g / (2 tokens)  (n - 1) / n  peak_flops / peak_bw  <=  1
//
// (The playbook's last line keeps a num_params that cancels, and has g = 1.) Here g = 4: 16-bit gradients are
// summed in f32. The formula leaves out latency, attention (below 1% of these short sequences) and all memory
// traffic, of which backward has much: so the real clock hides from fewer tokens on.
static double tokens_by_formula(const Machine *machine, int n, double bandwidth) {
    return 4 / 2.0 * (n - 1) / n * machine_peak_flops(machine, BF16) / bandwidth;
}

// Layers of Llama 3 8B.
static Config layers_of_8b(int64_t sequences) {
    Config c =
        config_default("layers=2 hidden=4096 heads=32 kv-heads=8 ffn=14336 seq=64 dtype=bf16 grad-acc=1");
    c.micro_batch = sequences;
    return c;
}

// What latency adds to the all-reduce of one layer's gradients, as a share.
static double latency_share(int n, double latency, double bandwidth) {
    Config two = layers_of_8b(1), three = two;
    three.layers = 3;
    double bytes = 4.0 * (double)(config_parameters(&three) - config_parameters(&two));
    return n * latency * bandwidth / bytes;
}

// Seconds by which each further layer delays the step: what its all-reduce lasts longer than its backward.
static double exposed_per_layer(Mesh mesh, int64_t sequences) {
    Config c = layers_of_8b(sequences);
    double two = ddp_cost(&c, mesh, ddp_bucketed_plug, 25000000).exposed_seconds;
    c.layers = 3;
    return ddp_cost(&c, mesh, ddp_bucketed_plug, 25000000).exposed_seconds - two;
}

// Fewest tokens a rank, in sequences of 64, from which on further layers delay nothing, on the model clock.
static double tokens_by_clock(Mesh mesh) {
    int64_t exposed = 0, hidden = 4096;
    while (hidden - exposed > 1) {
        int64_t middle = (exposed + hidden) / 2;
        if (exposed_per_layer(mesh, middle) > 1e-9) exposed = middle;
        else hidden = middle;
    }
    return 64.0 * (double)hidden;
}

static void overlap_condition(Mesh mesh, const Config *config) {
    int n = mesh.dp.size;
    if (n == 1) return;
    const Machine *machine = machine_find(config->machine);
    Machine free_memory = *machine;  // what the formula thinks of
    free_memory.memory_bytes_per_second = INFINITY;
    device_dry_run(true);
    clock_push("overlap condition");
    say("\nTokens per rank from which all-reduces of Llama 3 8B's layers hide behind backward, %d ranks:\n",
        n);
    say("  %-30s %10s %22s %12s\n", "", "formula A3", "clock, memory is free", "model clock");
    for (int apart = 0; apart < 2; apart++) {
        double bandwidth = apart ? machine->network_bytes_per_second : machine->node_bytes_per_second;
        double formula = tokens_by_formula(machine, n, bandwidth);
        double latency =
            latency_share(n, apart ? machine->network_latency : machine->node_latency, bandwidth);
        clock_set_cluster(apart ? 1 : n, 1, 1);
        clock_set_machine(&free_memory);
        double ideal = tokens_by_clock(mesh);
        clock_set_machine(machine);
        double real = tokens_by_clock(mesh);
        const char *where = apart ? "one GPU per node, network" : "all in one node, NVLink";
        say("  %-30s %10.0f %22.0f %12.0f\n", where, formula, ideal, real);
        report_number(where, "tokens to hide, formula", formula, "");
        report_number(where, "tokens to hide, model clock", real, "");
        report_that(fabs(ideal - formula) <= (0.01 + latency) * formula + 64,
                    "%s: the formula hides from %.0f tokens on, the clock from %.0f", where, formula,
                    ideal);
        report_that(real <= ideal, "%s: memory traffic makes backward longer, and all-reduces hide later",
                    where);
    }
    clock_set_cluster((int)config->gpus_per_node, config->compute_efficiency, config->network_efficiency);
    clock_pop();
    device_dry_run(false);
}

static int64_t each_micro_batch(const Config *config) { return config->grad_acc; }

static int64_t one_per_bucket(const Model *model, const Ddp *ddp) {
    int first_unit[model->params.units];
    return ddp_bucket_starts(&model->params, ddp->bucket_bytes, first_unit);
}

int main(int argc, char **argv) {
    const DdpProgram program = {
        .purpose = "Data parallelism: gradients go in buckets while backward goes on.",
        .claim = "ranks together make the step of one device",
        .plug = ddp_bucketed_plug,
        .syncs = each_micro_batch,
        .all_reduces = one_per_bucket,
        .more = overlap_condition};
    return ddp_prove(argc, argv, &program);
}
#endif
