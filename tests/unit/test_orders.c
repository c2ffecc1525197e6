// test_orders.c [--ranks N] [PATTERN]: every plug under random legal orders of F, B and W, with several
// micro-batches in flight, against one device that runs them in turn. TAP.
//
//     F(m, c) after F(m, c - 1)     B(m, c) after F(m, last) and B(m, c + 1)     W(m, c) after B(m, c)
//
// The model is split into one to three chunks, all of them on every rank; the order is drawn from a seed,
// the same on all ranks, and run through the schedule socket as a pipeline would. orders.t starts it.
#include "03_tensor_parallel/tensor_parallel.h"
#include "ranks.h"
#include "tensor/rng.h"

// ---- orders ----

enum { MICROS = 3, MOST_CHUNKS = 3, LAYERS = 3, ORDERS = 4 };
#ifdef __SANITIZE_ADDRESS__
enum { FIRST_ORDER = 3 };  // orders are twenty times slower: only the last, with W as late as possible
#else
enum { FIRST_ORDER = 0 };
#endif
typedef enum Action { F, B, W, ACTIONS } Action;

typedef struct Order {
    uint64_t seed;
    int chunks;
    bool late;  // W as late as possible, after all Fs and Bs
    uint64_t drawn;
    Chunk chunk[MOST_CHUNKS];
    bool done[MICROS][MOST_CHUNKS][ACTIONS];
} Order;

static int draw(Order *o, int below) {
    return (int)(rng_bits(o->seed, RNG_TEST, o->drawn++) % (uint64_t)below);
}

// Any split is allowed: a chunk may be only the embedding or the head, or nothing.
static void draw_chunks(Order *o) {
    int cut[MOST_CHUNKS - 1] = {draw(o, LAYERS + 1), draw(o, LAYERS + 1)};
    if (o->chunks == 3 && cut[1] < cut[0]) {
        int lower = cut[1];
        cut[1] = cut[0], cut[0] = lower;
    }
    for (int c = 0; c < o->chunks; c++)
        o->chunk[c] =
            (Chunk){c ? cut[c - 1] : 0, c + 1 < o->chunks ? cut[c] : LAYERS, c == 0, c + 1 == o->chunks};
}

static bool all_done(const Order *o, Action action) {
    for (int i = 0; i < MICROS * o->chunks; i++)
        if (!o->done[i / o->chunks][i % o->chunks][action]) return false;
    return true;
}

static bool legal(const Order *o, int m, int c, Action action) {
    const bool(*done)[ACTIONS] = o->done[m];
    if (done[c][action]) return false;
    switch (action) {
        case F:
            return c == 0 || done[c - 1][F];
        case B:
            return done[o->chunks - 1][F] && (c + 1 == o->chunks || done[c + 1][B]);
        default:
            return done[c][B] && (!o->late || (all_done(o, F) && all_done(o, B)));
    }
}

// One of the legal actions, with equal probability. False if none is left.
static bool draw_action(Order *o, int *m, int *c, Action *action) {
    int choices[MICROS * MOST_CHUNKS * ACTIONS], count = 0;
    for (int i = 0; i < MICROS * o->chunks * ACTIONS; i++)
        if (legal(o, i / ACTIONS / o->chunks, i / ACTIONS % o->chunks, (Action)(i % ACTIONS)))
            choices[count++] = i;
    if (!count) return false;
    int i = choices[draw(o, count)];
    *m = i / ACTIONS / o->chunks, *c = i / ACTIONS % o->chunks, *action = (Action)(i % ACTIONS);
    o->done[*m][*c][*action] = true;
    return true;
}

static bool has_all_w(const Order *o, int m) {
    for (int c = 0; c < o->chunks; c++)
        if (!o->done[m][c][W]) return false;
    return true;
}

// ---- the schedule ----

static void run_order(void *context, Model *model, const StepInput *input) {
    Order *o = context;
    MicroBatch micro[MICROS];
    int m, c, ended = 0;
    Action action;
    CHECK(input->micro_batches == MICROS, "%lld micro-batches", (long long)input->micro_batches);
    memset(o->done, 0, sizeof o->done);
    draw_chunks(o);
    model_begin_step(model, MICROS);
    for (m = 0; m < MICROS; m++) micro[m] = micro_batch_of(model, input, m, input->loss_scale[m]);
    while (draw_action(o, &m, &c, &action)) {
        if (action == F) chunk_forward(model, &micro[m], o->chunk[c]);
        if (action == B) chunk_backward_input(model, &micro[m], o->chunk[c]);
        if (action != W) continue;
        chunk_backward_weight(model, &micro[m], o->chunk[c]);
        if (!has_all_w(o, m)) continue;
        op_accumulate(input->loss, micro[m].loss);
        model->sockets.gradients.micro_batch_ready(model->sockets.gradients.context, model,
                                                   ++ended == MICROS);
        micro_batch_free(model, &micro[m]);
    }
    SAME(ended, MICROS);
}

static Order order;

static void *plug_order(Model *model) {
    model->sockets.schedule.context = &order;
    model->sockets.schedule.run = run_order;
    return &order;
}
static const Technique random_order = {.name = "random order", .plug = plug_order};

// zero_r's checkpoints are no record of a list yet.
static void *plug_parts(Model *model, bool contiguous) {
    ZeroR *z = host_alloc(sizeof *z);
    *z = (ZeroR){.tp = model->mesh.tp, .contiguous = contiguous};
    zero_r_plug(model, z);
    return z;
}
static void *plug_checkpoints(Model *model) { return plug_parts(model, false); }
static void *plug_contiguous(Model *model) { return plug_parts(model, true); }
static void unplug_checkpoints(Model *model, void *context) {
    zero_r_unplug(model, context);
    free(context);
}
static const Technique checkpoints = {
    .name = "checkpoints in parts", .plug = plug_checkpoints, .unplug = unplug_checkpoints};
static const Technique contiguous = {
    .name = "checkpoints in one tensor", .plug = plug_contiguous, .unplug = unplug_checkpoints};

// ---- runs ----

typedef struct Case {
    const char *name;
    const Technique *list[8];
    bool tp, sp, no_prefetch;  // over all ranks: tp, else dp
    double bucket_mb;
} Case;

// Fewer than ranks if there are more than three ranks, so that some store copies.
static Config config_of(const Case *one, const char *more) {
    char *text = format_text(
        "layers=3 hidden=24 heads=12 kv-heads=%d ffn=36 vocab=257 seq=5 micro-batch=1 grad-acc=3 steps=2 "
        "optimizer=sgd lr=0.3 clip=0.5 %s",
        n % 3 ? 2 : 3, more);
    Config c = config_default(text);
    free(text);
    c.dp = one->tp ? 1 : n;
    c.tp = one->tp ? n : 1;
    config_set(&c, "sp", one->sp);
    config_set(&c, "async-tp", 1);
    config_set(&c, "vocab-parallel", 1);  // if the list has it
    config_set(&c, "no-prefetch", one->no_prefetch);
    config_set(&c, "bucket-mb", one->bucket_mb);
    return c;
}

static Record run(const Config *c, Mesh mesh, const Technique *const *list) {
    Trainer *t = trainer_new(c, mesh, list);
    Record record = train_record(t, "run");
    trainer_free(t);
    return record;
}

// Losses, raw gradients of the first step and last parameters.
static void expect_same(const char *what, const Record *x, const Record *y, double bound) {
    double worst = 0;
    const char *where = "";
    for (int i = 0; i < 1 + 2 * x->tensors; i++) {
        int t = (i - 1) / 2;
        const double *a = i == 0 ? x->loss : i % 2 ? x->grad[t] : x->param[t];
        const double *b = i == 0 ? y->loss : i % 2 ? y->grad[t] : y->param[t];
        double relative = difference("", a, b, i == 0 ? x->steps : x->count[t]).relative;
        if (!(relative <= worst)) worst = relative, where = i == 0 ? "losses" : x->name[t];
    }
    if (!(worst <= bound)) note("%s: %s differ by %.2e, and %.0e is allowed", what, where, worst, bound);
}

// One device's results, the same for all techniques: each is trained once.
static const Record *one_device(const Config *whole) {
    static struct {
        Config config;
        Record record;
    } kept[16];
    static int count;
    for (int i = 0; i < count; i++) {
        const Config *c = &kept[i].config;
        if (c->grad_acc == whole->grad_acc && c->dtype == whole->dtype && c->tied == whole->tied &&
            c->recompute == whole->recompute)
            return &kept[i].record;
    }
    CHECK(count < (int)(sizeof kept / sizeof *kept), "more than %d runs on one device", count);
    kept[count].config = *whole;
    kept[count].record = run(whole, mesh_single(), NULL);
    return &kept[count++].record;
}

static void try_case(const Case *one, const char *more, bool tied, Recompute kind, uint64_t orders,
                     double bound) {
    Mesh mesh = mesh_new((MeshShape){.dp = one->tp ? 1 : n, .tp = one->tp ? n : 1});
    Config c = config_of(one, more), whole;
    c.tied = tied;
    c.recompute = kind;
    whole = c;
    whole.grad_acc *= c.dp;
    whole.dp = whole.tp = 1;
    const Record *baseline = one_device(&whole);
    const Technique *list[10];
    int count = 0;
    for (; one->list[count]; count++) list[count] = one->list[count];
    list[count++] = &random_order;
    list[count] = NULL;
    for (uint64_t seed = ORDERS - orders; seed < ORDERS; seed++) {
        // The last has all chunks, and W as late as possible.
        order = (Order){
            .seed = seed,
            .chunks = MOST_CHUNKS - (int)(ORDERS - 1 - seed) % MOST_CHUNKS,
            .late = seed == ORDERS - 1,
        };
        Record record = run(&c, mesh, list);
        char *what = format_text("%s, %s%s, recompute %d, %d chunks, seed %d", one->name, more,
                                 tied ? ", tied" : "", kind, order.chunks, (int)seed);
        expect_same(what, &record, baseline, bound);
        free(what);
        record_free(&record);
    }
}

// In a step that is not recorded the host waits for the device once, for the loss and the norm.
static void count_reads(const Case *one) {
    Mesh mesh = mesh_new((MeshShape){.dp = one->tp ? 1 : n, .tp = one->tp ? n : 1});
    Config c = config_of(one, "dtype=f32");
    Trainer *t = trainer_new(&c, mesh, one->list);
    for (int step = 0; step < 2; step++) {
        int64_t before = device_reads();
        train_step(t, NULL);
        SAME(device_reads() - before, 1);
    }
    trainer_free(t);
}

static void try_cases(const Case *one, int count) {
    for (; count > 0; count--, one++) {
        try_case(one, "dtype=f64", false, RECOMPUTE_NONE, ORDERS - FIRST_ORDER, 1e-10);
        try_case(one, "dtype=f64", true, RECOMPUTE_SELECTIVE, ORDERS - FIRST_ORDER, 1e-10);
        try_case(one, "dtype=f64", true, RECOMPUTE_FULL, ORDERS - FIRST_ORDER, 1e-10);
        count_reads(one);
        // 16 bits round at every sum; a wrong factor gives a larger error.
        try_case(one, "dtype=bf16", true, RECOMPUTE_NONE, FIRST_ORDER ? 1 : 2, 0.1);
    }
}

#define TRY(cases) try_cases(cases, sizeof cases / sizeof *(cases))

static void data_parallelism_in_any_order(void) {
    static const Case cases[] = {
        {"ddp_naive", {&ddp_naive, &recompute}, false, false, false, 1},
        {"ddp_overlap", {&ddp_overlap, &recompute}, false, false, false, 1},
        {"ddp_bucketed, a bucket for each unit", {&ddp_bucketed, &recompute}, false, false, false, 1e-6},
        {"ddp_bucketed, some units together", {&ddp_bucketed, &recompute}, false, false, false, 0.1},
        {"ddp_bucketed, one bucket", {&ddp_bucketed, &recompute}, false, false, false, 25},
        {"ddp_no_sync", {&ddp_no_sync, &recompute}, false, false, false, 0.1},
    };
    TRY(cases);
}

static void zero_in_any_order(void) {
    static const Case cases[] = {
        {"zero1", {&zero1, &recompute}, false, false, false, 1},
        {"zero2", {&zero2, &recompute}, false, false, false, 1},
        {"zero3", {&zero3, &recompute}, false, false, false, 1},
        {"zero3, no prefetch", {&zero3, &recompute}, false, false, true, 1},
    };
    TRY(cases);
}

static void tensor_parallelism_in_any_order(void) {
    static const Case cases[] = {
        {"tensor_parallel", {&tensor_parallel, &recompute}, true, false, false, 1},
        {"tensor and vocab_parallel",
         {&tensor_parallel, &vocab_parallel, &recompute},
         true,
         false,
         false,
         1},
        {"sequence_parallel", {&sequence_parallel, &recompute}, true, true, false, 1},
        {"sequence and vocab_parallel",
         {&sequence_parallel, &vocab_parallel, &recompute},
         true,
         true,
         false,
         1},
        {"async_tensor_parallel",
         {&sequence_parallel, &async_tensor_parallel, &recompute},
         true,
         true,
         false,
         1},
        {"async and vocab_parallel",
         {&sequence_parallel, &vocab_parallel, &async_tensor_parallel, &recompute},
         true,
         true,
         false,
         1},
    };
    TRY(cases);
}

static void checkpoints_in_parts_in_any_order(void) {
    static const Case cases[] = {
        {"checkpoints in parts", {&tensor_parallel, &checkpoints}, true, false, false, 1},
        {"checkpoints in one tensor", {&tensor_parallel, &contiguous}, true, false, false, 1},
    };
    TRY(cases);
}

static const RankTest tests[] = {
    TEST(data_parallelism_in_any_order),
    TEST(zero_in_any_order),
    TEST(tensor_parallelism_in_any_order),
    TEST(checkpoints_in_parts_in_any_order),
};

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *pattern = ranks_start(argc, argv, 4);
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
