// ddp_bucketed.c: many small gradients in few large messages. Playbook: "Second optimization: Bucketing
// gradients".
//
// Changes from ddp_overlap.c: every message costs latency, whatever its size, so consecutive units fill a
// bucket of --bucket-mb, which is sent as one message. Units are contiguous in the flat gradient
// (params.h), so a bucket is a range of it and nothing is copied.
//
//     units    head  block 3  block 2  block 1  block 0  embedding       in the order of backward
//     buckets  [------------] [---------------] [----------------]
//
// Buckets are reduced after every micro-batch, as in PyTorch's DDP without no_sync. The next micro-batch
// adds to sums over all ranks, which its all-reduce would count N times, so they are first scaled by 1 / N.
//
// Bytes sent per rank: 2 (N - 1) / N K for each of the grad_acc micro-batches. Memory per rank: as on one
// device.
// Run: build/01_data_parallel/ddp_bucketed  (--bucket-mb 25, --ranks 3, --tied, --dtype f32, --dry-run …)
// Last line: PASS ddp_bucketed: the ranks reproduce the single-device step …
#include "ddp_bucketed.h"

#include <math.h>
#include <stdlib.h>

// ---- the technique ----

// Splits the units, from the model's last to its first, into buckets of consecutive units with the same
// group of replicas; a bucket ends when it has bucket_bytes of gradients, and a unit is never split.
// Returns their number; first_unit[i] is the first unit of bucket i.
static int bucket_starts(const Params *params, int64_t bucket_bytes, int *first_unit) {
    int buckets = 0;
    int64_t bytes = 0;
    for (int unit = params->units - 1; unit >= 0; unit--) {
        const Unit *u = &params->unit[unit];
        bytes += tensor_bytes(unit_total_grad(u));
        bool same = unit > 0 && u->replicas.handle == params->unit[unit - 1].replicas.handle;
        if (bytes < bucket_bytes && same) continue;
        if (bytes > 0) first_unit[buckets++] = unit;
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

// A bucket is full for the k-th time when each of its units has been ready k times. So whatever the order
// of the micro-batches' Ws, everything added by then is summed exactly once.
static bool is_full(const Buckets *b, const Model *model, int bucket) {
    for (int unit = b->first_unit[bucket]; unit < b->end_unit[bucket]; unit++)
        if (model->params.unit[unit].count > 0 && b->ready[unit] <= b->sent[bucket]) return false;
    return true;
}

void ddp_bucketed_ready(void *context, Model *model, int unit, bool last) {
    (void)last;
    Buckets *b = context;
    int bucket = b->of_unit[unit];
    params_accumulate(&model->params, unit);
    b->ready[unit]++;
    if (!is_full(b, model, bucket)) return;
    b->sent[bucket]++;
    b->request[bucket] =
        comm_all_reduce(range_of(&model->params, b->first_unit[bucket], b->end_unit[bucket]), REDUCE_SUM,
                        model->params.unit[unit].replicas);
}

// The next micro-batch adds to sums that every rank holds; scaled by 1 / N, they are counted only once.
static void before_more(void *context, Model *model, int unit) {
    Buckets *b = context;
    int bucket = b->of_unit[unit];
    if (!b->request[bucket]) return;
    comm_wait(b->request[bucket]);
    b->request[bucket] = NULL;
    op_scale(range_of(&model->params, b->first_unit[bucket], b->end_unit[bucket]),
             1.0 / model->params.unit[unit].replicas.size);
}

static void wait_for_all(void *context, Model *model) {
    Buckets *b = context;
    comm_wait_all(b->request, b->count);
    for (int i = 0; i < b->count; i++) b->sent[i] = 0;
    for (int unit = 0; unit < model->params.units; unit++) b->ready[unit] = 0;
}

// --bucket-mb; 25 MB where there is no such flag (PyTorch's buckets have 25 MiB, the first one 1 MiB).
static int64_t bucket_bytes_of(const Config *config) {
    double megabytes = config_number(config, "bucket-mb");
    return (int64_t)(1e6 * (megabytes > 0 ? megabytes : 25));
}

void *ddp_bucketed_plug(Model *model) {
    const Params *p = &model->params;
    int units = p->units;
    Buckets *b = host_alloc(sizeof *b);
    *b = (Buckets){.first_unit = host_alloc(5 * units * sizeof(int)),
                   .request = calloc((size_t)units, sizeof(Request *))};
    CHECK(b->request, "out of host memory for requests");
    b->end_unit = b->first_unit + units;
    b->of_unit = b->first_unit + 2 * units;
    b->ready = b->first_unit + 3 * units;
    b->sent = b->first_unit + 4 * units;
    b->count = bucket_starts(p, bucket_bytes_of(&model->config), b->first_unit);
    for (int i = 0; i < b->count; i++) {
        b->end_unit[i] = i ? b->first_unit[i - 1] : units;
        for (int unit = b->first_unit[i]; unit < b->end_unit[i]; unit++) b->of_unit[unit] = i;
    }
    wait_for_all(b, model);  // starts with nothing ready
    model->sockets.gradients.context = b;
    model->sockets.gradients.begin = before_more;
    model->sockets.gradients.ready = ddp_bucketed_ready;
    model->sockets.gradients.finish = wait_for_all;
    return b;
}

void ddp_bucketed_unplug(Model *model, void *context) {
    (void)model;
    Buckets *b = context;
    free(b->request);
    free(b->first_unit);
    free(b);
}

void ddp_bucketed_price(Price *price, const Model *model, double times) {
    const Params *p = &model->params;
    int first_unit[p->units], buckets = bucket_starts(p, bucket_bytes_of(&model->config), first_unit);
    for (int i = 0; i < buckets; i++) {
        int end = i ? first_unit[i - 1] : p->units;
        price_all_reduce(price, times, tensor_count(range_of(p, first_unit[i], end)), p->recipe.sum,
                         p->unit[first_unit[i]].replicas);
    }
}

static void price(Price *price, const Model *model, const void *context) {
    (void)context;
    ddp_bucketed_price(price, model, (double)model->config.grad_acc);
}

const Option ddp_bucket_option = {
    "bucket-mb", OPTION_REAL, NULL, "25", 1e-6, 1e6, "MB", "size of a bucket of gradients", false};

const Technique ddp_bucketed = {.name = "ddp_bucketed",
                                .option = &ddp_bucket_option,
                                .options = 1,
                                .axes = 1u << AXIS_DP,
                                .plug = ddp_bucketed_plug,
                                .unplug = ddp_bucketed_unplug,
                                .price = price};

#ifndef NO_MAIN
static const Technique *const techniques[] = {&ddp_bucketed, &recompute, NULL};

// ---- how full buckets are ----

// Six units that no bucket is full of: two in the middle have other replicas than the rest, and so has the
// last one, which stores nothing. Buckets end where the replicas change, and none is empty.
static void replicas_divide_buckets(void) {
    enum { UNITS = 6, BUCKETS = 3 };
    static const int64_t count[UNITS] = {4, 0, 2, 2, 4, 0};
    static const bool other[UNITS] = {false, false, true, true, false, true};
    static const int first[BUCKETS] = {4, 2, 0};
    Unit unit[UNITS];
    for (int i = 0; i < UNITS; i++)
        unit[i] = (Unit){.count = count[i],
                         .replicas = {.size = 2 + other[i], .handle = other[i]},
                         .grads = tensor_new(MEMORY_GRADIENT, F32, SHAPE(count[i]))};
    const Params p = {.unit = unit, .units = UNITS, .recipe.sum = F32};
    int first_unit[UNITS], buckets = bucket_starts(&p, 1000, first_unit);
    report_that(buckets == BUCKETS,
                "%d buckets for units of which one stores nothing and two have other replicas, expected %d",
                buckets, BUCKETS);
    for (int i = 0; i < BUCKETS && buckets == BUCKETS; i++)
        report_that(first_unit[i] == first[i],
                    "bucket %d begins with unit %d, and with unit %d where the replicas change", i + 1,
                    first_unit[i], first[i]);
    for (int i = 0; i < UNITS; i++) tensor_free(&unit[i].grads);
}

// Checks that each bucket reaches --bucket-mb with its last unit, not before; the last one may be smaller.
static void buckets_are_full(Mesh mesh, const Config *config) {
    device_dry_run(true);
    Trainer *t = trainer_new(config, mesh, techniques);
    device_dry_run(false);
    const Params *p = &t->model->params;
    int64_t full = bucket_bytes_of(config);
    int first_unit[p->units], buckets = bucket_starts(p, full, first_unit);
    int64_t least = INT64_MAX, most_before = 0;
    for (int i = 0, end = p->units; i < buckets; end = first_unit[i++]) {
        int64_t bytes = tensor_bytes(range_of(p, first_unit[i], end)),
                before = bytes - tensor_bytes(unit_total_grad(&p->unit[first_unit[i]]));
        if (bytes < least && i + 1 < buckets) least = bytes;
        if (before > most_before) most_before = before;
        report_that(bytes >= full || i + 1 == buckets,
                    "bucket %d of %d is sent with %lld B of gradients, where %lld make it full: too early",
                    i + 1, buckets, (long long)bytes, (long long)full);
        report_that(before < full,
                    "bucket %d of %d is sent with %lld B of gradients, and had %lld one unit before, where "
                    "%lld make it full: too late",
                    i + 1, buckets, (long long)bytes, (long long)before, (long long)full);
    }
    say("\nBuckets of gradients: %d, full at %s. Before its last unit, none has more than %s.", buckets,
        bytes_text((double)full), bytes_text((double)most_before));
    if (buckets > 1) say("All but the last have %s or more.", bytes_text((double)least));
    trainer_free(t);
}

// ---- when it hides: appendix A3 of the playbook ----

// A gradient of g bytes takes g 2 (N - 1) / N / peak_bw to reduce, and its parameter costs 4 FLOPs per
// token in backward:
//
//     t_comm / t_compute  =  g / (2 tokens)  (N - 1) / N  peak_flops / peak_bw  <=  1
//
// (The playbook's last line keeps a num_params that cancels, and has g = 1.) Here g = 4: 16-bit gradients
// are summed in f32. The formula leaves out latency, attention (below 1% of backward with such short
// sequences) and memory traffic, which lengthens backward: on the model clock fewer tokens are enough.
static double tokens_by_formula(const Machine *machine, int n, double bandwidth) {
    return 4 / 2.0 * (n - 1) / n * machine_peak_flops(machine, BF16) / bandwidth;
}

// Layers of Llama 3 8B.
static Config layers_of_8b(int64_t sequences) {
    Config c = config_of_model("llama-3-8b", "layers=2 vocab=256 seq=64 dtype=bf16");
    c.micro_batch = sequences;
    return c;
}

// What latency adds to the all-reduce of one layer's gradients, as a fraction of its transfer time.
static double latency_share(int n, double latency, double bandwidth) {
    Config two = layers_of_8b(1), three = two;
    three.layers = 3;
    double bytes = 4.0 * (double)(config_parameters(&three) - config_parameters(&two));
    return n * latency * bandwidth / bytes;
}

// Seconds by which each further layer delays the step: by how much its all-reduce outlasts its backward.
static double exposed_per_layer(Mesh mesh, int64_t sequences) {
    Config c = layers_of_8b(sequences);
    double two = program_cost(&c, mesh, techniques).comm.exposed_seconds;
    c.layers = 3;
    return program_cost(&c, mesh, techniques).comm.exposed_seconds - two;
}

// Fewest tokens per rank, in sequences of 64, at which further layers delay nothing on the model clock:
// `most` sequences if none of those tried is enough.
static double tokens_by_clock(Mesh mesh, int64_t most) {
    int64_t exposed = 0, hidden = most;
    while (hidden - exposed > 1) {
        int64_t middle = (exposed + hidden) / 2;
        if (exposed_per_layer(mesh, middle) > 1e-9) exposed = middle;
        else hidden = middle;
    }
    return 64.0 * (double)hidden;
}

static void overlap_condition(Mesh mesh, const Config *config) {
    replicas_divide_buckets();
    buckets_are_full(mesh, config);
    int n = mesh.dp.size;
    if (n == 1) return;
    const Machine *machine = clock_machine(), reached = clock_reached();
    Machine free_memory = *machine;  // what the formula assumes
    free_memory.memory_bytes_per_second = INFINITY;
    device_dry_run(true);
    clock_push("overlap condition");
    say("\nTokens per rank from which all-reduces of Llama 3 8B's layers hide behind backward, %d ranks:\n",
        n);
    say("  %-30s %10s %22s %12s\n", "", "formula A3", "clock, memory is free", "model clock");
    for (int apart = 0; apart < 2; apart++) {
        double bandwidth = apart ? reached.network_bytes_per_second : reached.node_bytes_per_second;
        double formula = tokens_by_formula(&reached, n, bandwidth);
        double latency =
            latency_share(n, apart ? machine->network_latency : machine->node_latency, bandwidth);
        int64_t most = 64 + (int64_t)(2 * (1 + latency) * formula / 64);  // that are tried
        clock_set_nodes(apart ? 1 : n);
        clock_set_machine(&free_memory);
        double ideal = tokens_by_clock(mesh, most);
        clock_set_machine(machine);
        double real = tokens_by_clock(mesh, most);
        const char *where = apart ? "one GPU per node, network" : "all in one node, NVLink";
        say("  %-30s %10.0f %22.0f %12.0f\n", where, formula, ideal, real);
        report_number(where, "tokens to hide, formula", formula, "");
        report_number(where, "tokens to hide, model clock", real, "");
        report_that(fabs(ideal - formula) <= (0.01 + latency) * formula + 64,
                    "%s: all-reduces hide from %.0f tokens on, where formula A3 says %.0f%s", where, ideal,
                    formula,
                    ideal < 64.0 * (double)most
                        ? ""
                        : ": no number that was tried is enough. Does backward wait for each of them?");
        report_that(real <= ideal,
                    "%s: all-reduces hide from %.0f tokens on, and from %.0f where memory traffic costs "
                    "nothing, though it makes backward longer",
                    where, real, ideal);
    }
    clock_set_nodes((int)config->gpus_per_node);
    clock_pop();
    device_dry_run(false);
}

int main(int argc, char **argv) {
    const Program program = {
        .purpose = "Data parallelism: gradients go in buckets while backward goes on.",
        .claim = "the ranks reproduce the single-device step",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 bucket-mb=0.1",
        .natural = 4,
        .before = {"ddp_overlap", (const Technique *[]){&ddp_overlap, &recompute, NULL}, NULL, 0},
        .techniques = techniques,
        .more = overlap_condition};
    return program_main(argc, argv, &program);
}
#endif
