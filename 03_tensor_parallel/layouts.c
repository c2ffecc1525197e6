// layouts.c: what the flags of a layout plug, and what each layout must send and store. Playbook: "Tensor
// Parallelism", "Sequence Parallelism", "5D parallelism in a nutshell".
//
// The programs of this chapter differ in their standard flags and in what else they show; all take --dp
// --tp --sp --vocab-parallel --zero in any combination, a socket each, plugged in this order. n tokens and
// K = n h e bytes of a micro-batch, m of them, L blocks, G bytes of gradients on a rank; bytes are those of
// all ranks:
//
//   plug                socket      in a step                              calls        bytes of each
//   ddp_no_sync         gradients   all-reduce of G in buckets             buckets      2 (dp - 1) tp G
//   zero1, …            parameters  reduce-scatter of G, all-gather        zero_sends   (dp - 1) tp
//   tensor_parallel     region      all-reduce of K                        4 L m        2 (tp - 1) dp K
//   sequence_parallel   region      all-gather, reduce-scatter of K        6 and 4 L m  (tp - 1) dp K
//                       vocabulary  all-reduce of the loss                 m            2 (tp - 1) dp 8
//   vocab_parallel      vocabulary  all-reduce of K, maxima, two sums      2, 1, 1 m    2 (tp - 1) dp each
//     with --sp                     all-gather, reduce-scatter for K       3 and 2 m    (tp - 1) dp K
//   async_tensor_…      region      messages in place of these             x (tp - 1)   the same
//   both of region      gradients   all-reduce of all that is partial, P   1 a group    2 (copies - 1) P
//
// and 2 L m all-reduces more (or of both halves) with --recompute full, which runs forward again. A step
// also sums labels and loss over dp, and the norm over what cuts it. This file has no main.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "playbook.h"

// ---- the plugs ----

enum { BUCKET_BYTES = 100000 };

typedef struct Layout {
    Zero zero;  // ddp_no_sync where it is 0
    TensorParallel tp;
    VocabParallel vocab;
    AsyncTensorParallel async;  // of a program that wants it
} Layout;

void *layout_plug(Trainer *t) {
    const Config *c = &t->config;
    Layout *layout = host_alloc(sizeof *layout);
    *layout = (Layout){.zero.ddp.bucket_bytes = BUCKET_BYTES};
    zero_plug(t->model, &layout->zero);
    if (c->sp) sequence_parallel_plug(t->model, &layout->tp);
    else tensor_parallel_plug(t->model, &layout->tp);
    if (c->vocab_parallel) vocab_parallel_plug(t->model, &layout->vocab);
    return layout;
}

void *layout_plug_async(Trainer *t) {
    Layout *layout = layout_plug(t);
    async_tensor_parallel_plug(t->model, &layout->async);
    return layout;
}

void layout_unplug(Trainer *t, void *plugs) {
    Layout *layout = plugs;
    zero_unplug(t->model, &layout->zero);
    free(layout->async.in);
    free(layout);
}

// ---- what a step sends ----

// Calls in a group of n ranks, of which there are `groups`, on a tensor of so many bytes.
static void add_all_reduces(Sends *s, double calls, double bytes, int n, double groups) {
    s->all_reduce.calls += calls;
    s->all_reduce.bytes += calls * groups * 2 * (n - 1) * bytes;
}
static void add_halves(Sent *sent, double calls, double bytes, int n, double groups) {
    sent->calls += calls;
    sent->bytes += calls * groups * (n - 1) * bytes;
}

// All-gathers and reduce-scatters of K; `async` ones are as many messages as there are other ranks, and as
// many bytes.
static void add_gathers(Sends *s, double calls, double bytes, const Model *m, bool async) {
    int tp = m->mesh.tp.size;
    add_halves(async ? &s->transfers : &s->all_gather, calls, bytes, tp, m->mesh.dp.size);
    if (async) s->transfers.calls += calls * (tp - 2);
}
static void add_scatters(Sends *s, double calls, double bytes, const Model *m, bool async) {
    if (async) add_gathers(s, calls, bytes, m, async);
    else add_halves(&s->reduce_scatter, calls, bytes, m->mesh.tp.size, m->mesh.dp.size);
}

static void region_sends(Sends *s, const Model *m, bool async) {
    const Config *c = &m->config;
    double K = (double)(c->micro_batch * c->seq * c->hidden) * (double)dtype_size((DType)c->dtype);
    double regions = 2.0 * (double)(c->layers * c->grad_acc), again = c->recompute == RECOMPUTE_FULL;
    int tp = m->mesh.tp.size, dp = m->mesh.dp.size;
    if (!c->sp) {
        add_all_reduces(s, regions * (2 + again), K, tp, dp);
    } else {
        add_gathers(s, regions * (3 + again), K, m, async);
        add_scatters(s, regions * (2 + again), K, m, async);
        if (!c->vocab_parallel) add_all_reduces(s, (double)c->grad_acc, sizeof(double), tp, dp);
    }
}

static void vocabulary_sends(Sends *s, const Model *m, bool async) {
    const Config *c = &m->config;
    if (!c->vocab_parallel) return;
    double micro = (double)c->grad_acc, n = (double)(c->micro_batch * c->seq);
    double K = n * (double)c->hidden * (double)dtype_size((DType)c->dtype);
    double row = n * (c->dtype == F64 ? sizeof(double) : sizeof(float));
    int tp = m->mesh.tp.size, dp = m->mesh.dp.size;
    if (!c->sp) {
        add_all_reduces(s, 2 * micro, K, tp, dp);
    } else {
        add_scatters(s, micro, K, m, false);
        add_gathers(s, micro, K, m, false);
        add_gathers(s, 2 * micro, K, m, async);
        add_scatters(s, micro, K, m, async);
    }
    add_all_reduces(s, micro, row, tp, dp);
    add_all_reduces(s, micro, 2 * row, tp, dp);
}

// Under sequence parallelism the norms, and embedding and output layer where they are whole; K/V heads that
// are copies.
static void partial_sends(Sends *s, const Model *m) {
    const Config *c = &m->config;
    double h = (double)c->hidden, L = (double)c->layers, e = (double)dtype_size(m->params.total_dtype);
    int tp = m->mesh.tp.size, dp = m->mesh.dp.size;
    double whole = (2 * L + 1) * h + (c->vocab_parallel ? 0 : (c->tied ? 1 : 2) * h * (double)c->vocab);
    double replicas = c->zero ? 1 : dp;  // ZeRO's ranks of dp have a part of the gradients each
    if (c->sp && tp > 1) add_all_reduces(s, 1, e * whole, tp, replicas);
    int copies = tp / (int)c->kv_heads;
    if (copies > 1)
        add_all_reduces(s, 1, e * L * 2 * (double)config_head_size(c) * h, copies,
                        replicas * (double)c->kv_heads);
}

// Over dp: gradients, and with ZeRO weights; labels and loss. And the squares of the gradients' norm over
// what cuts them.
static void data_sends(Sends *s, const Model *m, const Layout *layout) {
    const Params *p = &m->params;
    int tp = m->mesh.tp.size, dp = m->mesh.dp.size;
    if (m->config.zero == 0) {
        int first_unit[p->units];
        s->all_reduce.calls += ddp_bucket_starts(p, layout->zero.ddp.bucket_bytes, first_unit);
        s->all_reduce.bytes += 2.0 * (dp - 1) * tp * (double)tensor_bytes(params_total_grad(p));
    } else {
        ZeroSends zero = zero_sends(m);
        s->reduce_scatter.calls += zero.reductions;
        s->reduce_scatter.bytes += (dp - 1) * tp * zero.reduced * (double)dtype_size(p->total_dtype);
        s->all_gather.calls += zero.gathers;
        s->all_gather.bytes += (dp - 1) * tp * zero.gathered * (double)dtype_size(p->dtype);
        if (dp > 1) add_all_reduces(s, 1, sizeof(double), dp, tp);
    }
    add_all_reduces(s, 2, sizeof(double), dp, tp);
    if (tp > 1) add_all_reduces(s, 1, sizeof(double), tp, dp);
}

static void check_sent(const char *call, const char *title, Sent predicted, double steps, Group world) {
    CommCount sent = comm_count(call);
    double bytes = comm_sum((double)sent.bytes, world);
    if (predicted.calls == 0 && sent.calls == 0) return;
    char *calls = format_text("%ss", title), *of = format_text("bytes of %ss, all ranks", title);
    report_equal(calls, steps * predicted.calls, (double)sent.calls, "");
    report_equal(of, steps * predicted.bytes, bytes, "B");
    free(calls);
    free(of);
}

// ---- what is stored ----

static void check_memory(const Trainer *t, const Record *record) {
    const Config *c = &t->config;
    Group world = t->model->mesh.world;
    MemoryPlan plan = {.model = *c,
                       .whole_vocabulary = !c->vocab_parallel,
                       .f32_gradients = true,
                       .zero = c->zero,
                       .tp = c->tp,
                       .dp = c->dp,
                       .sp = c->sp};
    MemoryNeed need = memory_need(&plan);
    double ranks = world.size;
    bool narrow = dtype_size((DType)c->dtype) < 4;
    // Where ZeRO cuts gradients, what stays are their sums, f32 beside 16-bit weights.
    double gradients = c->zero >= 2 && narrow ? need.accumulators : need.gradients + need.accumulators;
    double sgd = narrow ? need.optimizer / 3 : 0;  // of master weights and two moments the first
    Memory now = memory_account();
    // Rows and parts may be unequal, their sums are not: so the ranks' total, and the peak of a rank where
    // they are equal.
    report_equal("weights, all ranks", ranks * need.parameters,
                 comm_sum((double)now.now[MEMORY_PARAMETER], world), "B");
    report_equal("gradients, all ranks", ranks * gradients,
                 comm_sum((double)now.now[MEMORY_GRADIENT], world), "B");
    report_equal("optimizer, all ranks", ranks * (c->optimizer == OPTIMIZER_SGD ? sgd : need.optimizer),
                 comm_sum((double)now.now[MEMORY_OPTIMIZER], world), "B");
    report_equal("activations kept, all ranks", round(ranks * (need.blocks + need.ends)),
                 comm_sum((double)record->kept_bytes, world), "B");
    if (c->micro_batch * c->seq % c->tp == 0 || !c->sp)
        report_equal("activations at their peak", memory_peak_activations(&plan),
                     (double)record->memory.peak[MEMORY_ACTIVATION], "B");
}

// ---- copies ----

// Elements of this rank's part of a weight whose bits differ from those of the first copy.
static bool differs(const Params *params, const Param *param) {
    Tensor mine = param_own_value(params, param, NULL);
    if (!tensor_exists(mine)) return false;
    Tensor first = tensor_like(MEMORY_COMMUNICATION, mine);
    op_copy(first, mine);
    comm_wait(comm_broadcast(first, 0, param->copies));
    char *a = host_alloc((size_t)tensor_bytes(mine)), *b = host_alloc((size_t)tensor_bytes(mine));
    tensor_to_host(a, mine);
    tensor_to_host(b, first);
    bool differ = memcmp(a, b, (size_t)tensor_bytes(mine)) != 0;
    free(a);
    free(b);
    tensor_free(&first);
    return differ;
}

// Weights that several ranks of tp hold have the same bits on each of them after training.
static void check_copies(const Model *m) {
    double copied = 0, off = 0;
    for (int i = 0; i < m->params.count; i++) {
        const Param *param = &m->params.param[i];
        if (param->copies.size == 1) continue;
        bool differ = differs(&m->params, param);
        copied++;
        off += differ;
        report_that(!differ, "%s: the copy of rank %d has other bits than that of rank %d", param->name,
                    param->copies.member[param->copies.rank], param->copies.member[0]);
    }
    if (copied > 0)
        report_equal("weights equal in all copies", copied * m->mesh.world.size,
                     comm_sum(copied - off, m->mesh.world), "");
}

void layout_counts(const Trainer *t, const Record *record, void *plugs) {
    const Model *m = t->model;
    double steps = (double)record->steps;
    const Layout *layout = plugs;
    bool async = layout->async.in != NULL;
    Sends sends = {0};
    region_sends(&sends, m, async);
    vocabulary_sends(&sends, m, async);
    partial_sends(&sends, m);
    data_sends(&sends, m, layout);
    check_sent("all_reduce", "all-reduce", sends.all_reduce, steps, m->mesh.world);
    check_sent("all_gather", "all-gather", sends.all_gather, steps, m->mesh.world);
    check_sent("reduce_scatter", "reduce-scatter", sends.reduce_scatter, steps, m->mesh.world);
    check_sent("transfers", "message", sends.transfers, steps, m->mesh.world);
    check_memory(t, record);
    check_copies(m);
}

// ---- one block of it ----

static Sent sent_since_reset(const char *call) {
    CommCount count = comm_count(call);
    return (Sent){(double)count.calls, (double)count.bytes};
}

static Sends sends_since_reset(void) {
    return (Sends){sent_since_reset("all_reduce"), sent_since_reset("all_gather"),
                   sent_since_reset("reduce_scatter"), sent_since_reset("transfers")};
}

// Of one micro-batch through the whole model, on this rank alone. It is not the last, so that no gradient
// travels.
static BlockCost micro_batch_cost(const Config *config, Mesh mesh) {
    BlockCost cost;
    Trainer *t = trainer_new(config, mesh);
    void *plugs = layout_plug(t);
    Batch batch = batch_new(t, 0);
    int64_t before = memory_account().now[MEMORY_ACTIVATION];
    MicroBatch micro = micro_batch_new(t->model, 0, config->micro_batch, batch.tokens, batch.targets, 1);
    clock_reset();
    model_forward(t->model, &micro);
    cost.pass[FORWARD] = sends_since_reset();
    cost.kept = (double)(memory_account().now[MEMORY_ACTIVATION] - before);
    clock_reset();
    model_backward(t->model, &micro);
    cost.pass[BACKWARD] = sends_since_reset();
    micro_batch_free(t->model, &micro);
    batch_free(&batch);
    layout_unplug(t, plugs);
    trainer_free(t);
    return cost;
}

static Sent difference_of(Sent more, Sent less, Group world) {
    return (Sent){more.calls - less.calls, comm_sum(more.bytes - less.bytes, world)};
}

BlockCost layout_block_cost(const Config *config, Mesh mesh) {
    Config c = *config;
    c.layers = 1;
    BlockCost one = micro_batch_cost(&c, mesh);
    c.layers = 2;
    BlockCost cost = micro_batch_cost(&c, mesh);
    for (int pass = FORWARD; pass <= BACKWARD; pass++) {
        Sends *two = &cost.pass[pass], *less = &one.pass[pass];
        two->all_reduce = difference_of(two->all_reduce, less->all_reduce, mesh.world);
        two->all_gather = difference_of(two->all_gather, less->all_gather, mesh.world);
        two->reduce_scatter = difference_of(two->reduce_scatter, less->reduce_scatter, mesh.world);
        two->transfers = difference_of(two->transfers, less->transfers, mesh.world);
    }
    cost.kept -= one.kept;
    return cost;
}
