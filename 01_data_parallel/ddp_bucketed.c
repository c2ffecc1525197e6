// ddp_bucketed.c: many small gradients in few large messages. Playbook: "Second optimization: Bucketing
// gradients".
//
// Changes from ddp_overlap.c: every message costs latency, whatever its size, so consecutive units fill a
// bucket of --bucket-mb, which is sent as one message; a unit is never split, so a bucket may be larger.
// Units are contiguous in the flat gradient (params.h), so a bucket is a range of it and nothing is copied.
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

// A bucket is full for the k-th time when each of its units has been ready k times. A pipeline may compute
// the micro-batches' weight gradients in any order: still, each is summed over the ranks exactly once.
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
    *b = (Buckets){.first_unit = calloc(5 * (size_t)units, sizeof(int)),
                   .request = calloc((size_t)units, sizeof(Request *))};
    CHECK(b->first_unit && b->request, "out of host memory for buckets");
    b->end_unit = b->first_unit + units;
    b->of_unit = b->first_unit + 2 * units;
    b->ready = b->first_unit + 3 * units;
    b->sent = b->first_unit + 4 * units;
    b->count = bucket_starts(p, bucket_bytes_of(&model->config), b->first_unit);
    for (int i = 0; i < b->count; i++) {
        b->end_unit[i] = i ? b->first_unit[i - 1] : units;
        for (int unit = b->first_unit[i]; unit < b->end_unit[i]; unit++) b->of_unit[unit] = i;
    }
    int left = b->count ? b->first_unit[b->count - 1] : units;
    while (left > 0 && p->unit[left - 1].count == 0) left--;  // another stage's
    CHECK(left == 0, "no bucket has the gradient of %s", p->unit[left - 1].name);
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
    say("\nBuckets of gradients: %d, full at %s. Without its last unit, the fullest would have %s.", buckets,
        bytes_text((double)full), bytes_text((double)most_before));
    if (buckets > 1) say("All but the last have %s or more.", bytes_text((double)least));
    trainer_free(t);
}

static void more(Mesh mesh, const Config *config) {
    buckets_are_full(mesh, config);
    ddp_overlap_condition(mesh, config);
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
        .more = more};
    return program_main(argc, argv, &program);
}
#endif
