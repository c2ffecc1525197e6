// sequence_parallel.c: norms and residuals cut over ranks, too. Playbook: "Sequence Parallelism".
//
// Against tensor_parallel.c: between regions each of n ranks has its own tokens, an n-th of the b s rows of
// (b s, h), and embeds, normalizes and adds those alone (Korthikanti et al. 2022):
//
//     x ─ norm1 ─[g]─ Wq Wk Wv ─ rope ─ attention ─ Wo ─[g*]─(+x)─ x2       and the same around the MLP
//
//              forward           backward
//     g        all-gather        reduce-scatter
//     g*       reduce-scatter    all-gather        two halves of an all-reduce, and together its bytes
//
// What is kept for backward are rows as they were before g, so W gathers them again: an all-gather for each
// region that the playbook does not count (Megatron-LM has it, too, behind dX). Gradients of norms, and of
// an embedding and an output layer that stay whole, come from a rank's own rows: summed over tp after the
// step.
//
// Bytes sent per rank, block and micro-batch: 8 (n - 1) / n K for K = b s h e, as in tensor_parallel.c, and
// 2 (n - 1) / n K for W. Memory per rank: what a block keeps is all cut: an n-th of one device's.
// Run: build/03_tensor_parallel/sequence_parallel   (--ranks 3 --heads 6 --kv-heads 3 --ffn 39, --zero 2 …)
// Last line: PASS sequence_parallel: rows are cut between regions, and the step stays that of one device …
#include <math.h>
#include <stdlib.h>

#include "playbook.h"

// ---- the technique: g and g* ----

int64_t sequence_rows(int64_t n, int rank, int size, int64_t *first) {
    int64_t each = n / size, more = n % size;
    *first = rank * each + (rank < more ? rank : more);
    return each + (rank < more);
}

void sequence_counts(int64_t n, int64_t columns, int size, int64_t *counts) {
    int64_t first;
    for (int i = 0; i < size; i++) counts[i] = sequence_rows(n, i, size, &first) * columns;
}

static Tensor all_gather(void *context, Tensor rows) {
    TensorParallel *t = context;
    int64_t h = tensor_columns(rows), counts[t->tp.size];
    sequence_counts(t->tokens, h, t->tp.size, counts);
    Tensor all = tensor_new(MEMORY_ACTIVATION, rows.dtype, SHAPE(t->tokens, h));
    comm_wait(comm_all_gather(all, rows, counts, t->tp));
    return all;
}

static Tensor reduce_scatter(void *context, Tensor partial) {
    TensorParallel *t = context;
    int64_t h = tensor_columns(partial), first, counts[t->tp.size];
    sequence_counts(t->tokens, h, t->tp.size, counts);
    Tensor rows = tensor_new(MEMORY_ACTIVATION, partial.dtype,
                             SHAPE(sequence_rows(t->tokens, t->tp.rank, t->tp.size, &first), h));
    comm_wait(comm_reduce_scatter(rows, partial, counts, REDUCE_SUM, t->tp));
    return rows;
}

// ---- embedding and loss of this rank's rows ----

// Of the micro-batch's tokens or targets. Borrowed.
static Tensor own(const TensorParallel *t, Tensor all) {
    int64_t first, rows = sequence_rows(t->tokens, t->tp.rank, t->tp.size, &first);
    return tensor_view(all, first, SHAPE(rows));
}

static Tensor lookup(void *context, Tensor tokens, Tensor weight) {
    TensorParallel *t = context;
    return t->before.vocabulary.lookup(t->before.vocabulary.context, own(t, tokens), weight);
}

static void lookup_backward(void *context, Tensor dweight, Tensor dx, Tensor tokens) {
    TensorParallel *t = context;
    t->before.vocabulary.lookup_backward(t->before.vocabulary.context, dweight, dx, own(t, tokens));
}

static double loss(void *context, Tensor *lse, Tensor logits, Tensor targets) {
    TensorParallel *t = context;
    return comm_sum(t->before.vocabulary.loss(t->before.vocabulary.context, lse, logits, own(t, targets)),
                    t->tp);
}

static void loss_backward(void *context, Tensor dlogits, Tensor logits, Tensor lse, Tensor targets,
                          double scale) {
    TensorParallel *t = context;
    t->before.vocabulary.loss_backward(t->before.vocabulary.context, dlogits, logits, lse, own(t, targets),
                                       scale);
}

static Tensor stay(void *context, Tensor x) {
    (void)context;
    return tensor_share(x);
}

void sequence_parallel_plug(Model *model, TensorParallel *t) {
    t->tp = model->mesh.tp;
    t->tokens = model->config.micro_batch * model->config.seq;
    partial_gradients_plug(model, t);
    Sockets *on = &model->sockets;
    on->region.context = on->vocabulary.context = t;
    on->region.enter = on->region.leave_backward = all_gather;
    on->region.leave = on->region.enter_backward = reduce_scatter;
    on->vocabulary.enter = on->vocabulary.enter_backward = stay;
    on->vocabulary.lookup = lookup;
    on->vocabulary.lookup_backward = lookup_backward;
    on->vocabulary.loss = loss;
    on->vocabulary.loss_backward = loss_backward;
}

#ifndef NO_MAIN

// ---- beside tensor parallelism alone ----

static Config layout_of(const Config *config, bool sp) {
    Config c = *config;
    c.sp = sp;
    c.recompute = RECOMPUTE_NONE;
    c.zero = 0;  // its collectives are not what is compared
    return c;
}

static void compare_calls(Mesh mesh, const Config *config) {
    Config without = layout_of(config, false), with = layout_of(config, true);
    BlockCost tp = layout_block_cost(&without, mesh), sp = layout_block_cost(&with, mesh);
    say("\nOne block and micro-batch, tp %d, beside tensor parallelism without sequence parallelism:\n",
        mesh.tp.size);
    for (int pass = FORWARD; pass <= BACKWARD; pass++) {
        Sends alone = tp.pass[pass], both = sp.pass[pass];
        const char *name = pass == FORWARD ? "forward" : "backward";
        bool again = pass == BACKWARD;  // W's all-gathers
        const struct {
            const char *what;
            double predicted, measured;
            const char *unit;
        } row[] = {{"all-gathers", again ? 4 : 2, both.all_gather.calls, ""},
                   {"reduce-scatters", 2, both.reduce_scatter.calls, ""},
                   {"all-reduces", 0, both.all_reduce.calls, ""},
                   {again ? "bytes of both (x 1.5: W)" : "bytes of both",
                    alone.all_reduce.bytes * (again ? 1.5 : 1),
                    both.all_gather.bytes + both.reduce_scatter.bytes, "B"}};
        for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
            char *what = format_text("%s, %s", name, row[i].what);
            report_equal(what, row[i].predicted, row[i].measured, row[i].unit);
            free(what);
        }
    }
}

// ---- the playbook's table of shapes, read from the tensors of rank 0 ----

enum { STOPS = 8 };
static const char *const stop_name[STOPS] = {"embedding: table", "embedding: out", "SP region: norm",
                                             "enter TP: in",     "column: Wgate",  "TP region: act",
                                             "row: Wdown",       "exit TP: out"};

typedef struct Shapes {
    char stop[STOPS][48];
    int64_t largest;  // elements of the largest tensor of width h, or of a part of h, that a block keeps
    bool fit;         // all are what the playbook's table says
} Shapes;

// The call made since the last clock_reset, or nothing.
static const char *call_made(void) {
    const CommCount *counts;
    int kinds = comm_counts(&counts);
    for (int i = 0; i < kinds; i++)
        if (counts[i].calls > 0) return counts[i].name;
    return "";
}

// Notes the shape, (rows, columns), that a tensor has at a stop.
static void at(Shapes *s, int stop, Tensor t, int64_t rows, int64_t columns) {
    s->fit = s->fit && tensor_rows(t) == rows && tensor_columns(t) == columns;
    snprintf(s->stop[stop], sizeof s->stop[stop], "(%lld, %lld) %s", (long long)tensor_rows(t),
             (long long)tensor_columns(t), call_made());
    clock_reset();
}

// One block's forward, stop by stop.
static Shapes shapes_of(const Config *config, Mesh mesh) {
    Shapes s = {.fit = true};
    Trainer *t = trainer_new(config, mesh);
    void *plugs = layout_plug(t);
    Model *m = t->model;
    Sockets *on = &m->sockets;
    Batch batch = batch_new(t, 0);
    MicroBatch micro = micro_batch_new(m, 0, config->micro_batch, batch.tokens, batch.targets, 1);
    int64_t n = config->micro_batch * config->seq, h = config->hidden, f = config->ffn / config->tp, first;
    int64_t rows = config->sp ? sequence_rows(n, mesh.tp.rank, mesh.tp.size, &first) : n;

    Tensor table = param_value(&m->params, m->embedding);
    clock_reset();
    at(&s, 0, table, tensor_rows(table), h);
    embedding_forward(m, &micro);
    at(&s, 1, micro.x, rows, h);
    block_forward(m, &micro, 0);
    const BlockKept *kept = &micro.block[0];
    clock_reset();
    at(&s, 2, kept->norm2, rows, h);
    Tensor inside = on->region.enter(on->region.context, kept->norm2);
    at(&s, 3, inside, n, h);
    at(&s, 4, param_value(&m->params, m->block[0].gate), f, h);
    at(&s, 5, kept->mlp.act, n, f);
    at(&s, 6, param_value(&m->params, m->block[0].down), h, f);
    Tensor partial = tensor_new(MEMORY_ACTIVATION, inside.dtype, SHAPE(n, h));
    on->linear.forward(on->linear.context, m, 1, &m->block[0].down, &partial, kept->mlp.act);
    Tensor y = on->region.leave(on->region.context, partial);
    at(&s, 7, y, rows, h);
    const Tensor wide[] = {kept->x, kept->norm1, kept->q, kept->o, kept->x2, kept->norm2};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        if (tensor_count(wide[i]) > s.largest) s.largest = tensor_count(wide[i]);

    Tensor *const made[] = {&inside, &partial, &y};
    for (int i = 0; i < 3; i++) tensor_free(made[i]);
    micro_batch_free(m, &micro);
    batch_free(&batch);
    layout_unplug(t, plugs);
    trainer_free(t);
    return s;
}

static void print_shapes(Mesh mesh, const Config *config) {
    Config without = layout_of(config, false), with = layout_of(config, true);
    Shapes tp = shapes_of(&without, mesh), sp = shapes_of(&with, mesh);
    int64_t n = config->micro_batch * config->seq, h = config->hidden, size = mesh.tp.size, first;
    say("\nShapes on rank 0 in forward, for (b s, h) = (%lld, %lld) and f = %lld:\n", (long long)n,
        (long long)h, (long long)config->ffn);
    say("  %-24s %-26s %s\n", "", "TP only", "TP with SP");
    for (int i = 0; i < STOPS; i++) say("  %-24s %-26s %s\n", stop_name[i], tp.stop[i], sp.stop[i]);
    say("  %-24s %-26lld %lld\n", "largest kept, of width h", (long long)tp.largest, (long long)sp.largest);
    report_that(tp.fit && sp.fit, "a tensor has another shape than the playbook's table says");
    int64_t own = sequence_rows(n, mesh.tp.rank, mesh.tp.size, &first) * h, cut = n * h / size;
    report_equal("largest kept with TP only: b s h", (double)(n * h), (double)tp.largest, "");
    report_equal("largest kept with SP: b s h / tp", (double)(own > cut ? own : cut), (double)sp.largest,
                 "");
}

// ---- activations that a block keeps: Llama 3 8B's shape, 16 bits ----

static void compare_memory(Mesh mesh, const Config *config) {
    (void)config;
    int tp = mesh.tp.size;
    if (32 % tp || 14336 % tp) return;
    Config c = config_default(
        "layers=2 hidden=4096 heads=32 kv-heads=8 ffn=14336 vocab=1024 seq=2048 micro-batch=1 dtype=bf16");
    double sbh = (double)(c.micro_batch * c.seq * c.hidden),
           as_h = 5.0 * (double)(c.heads * c.seq) / (double)c.hidden;
    const struct {
        const char *name, *formula;
        int64_t tp;
        bool sp;
        double gpt;  // of the playbook's block
    } row[] = {{"one device", "34 + 5 a s / h", 1, false, 34 + as_h},
               {"TP", "10 + 24 / t + 5 a s / (h t)", tp, false, 10 + (24 + as_h) / tp},
               {"TP with SP", "34 / t + 5 a s / (h t)", tp, true, (34 + as_h) / tp}};
    double kept[3], predicted[3];
    say("\nWhat a block of Llama 3 8B keeps for backward, bf16, s = 2,048, t = %d, in s b h bytes:\n", tp);
    say("  %-12s %12s %14s   %s\n", "", "this book's", "GPT's block",
        "GPT's formula (Korthikanti et al. 2022)");
    for (int i = 0; i < 3; i++) {
        Config here = layout_of(&c, row[i].sp);
        here.tp = row[i].tp;
        MemoryPlan plan = {.model = here, .tp = here.tp, .dp = 1, .sp = here.sp};
        kept[i] = layout_block_cost(&here, i ? mesh : mesh_single()).kept;
        predicted[i] = memory_block_activations(&plan);
        plan.gpt = true;
        plan.model.kv_heads = plan.model.heads;
        plan.model.ffn = 4 * c.hidden;
        double gpt = memory_block_activations(&plan) / sbh;
        say("  %-12s %12.3f %14.3f   %s\n", row[i].name, kept[i] / sbh, gpt, row[i].formula);
        report_that(fabs(gpt / row[i].gpt - 1) < 1e-12, "GPT's block: %s is %.6f", row[i].formula,
                    row[i].gpt);
    }
    for (int i = 0; i < 3; i++) {
        char *what = format_text("this book's, %s", row[i].name);
        report_equal(what, predicted[i], kept[i], "B");
        free(what);
    }
}

static void more(Mesh mesh, const Config *config) {
    device_dry_run(true);
    compare_calls(mesh, config);
    print_shapes(mesh, config);
    compare_memory(mesh, config);
    device_dry_run(false);
}

int main(int argc, char **argv) {
    const LayoutProgram program = {
        .purpose =
            "Sequence parallelism: between the regions of tensor parallelism, each rank has its own "
            "tokens.",
        .claim = "rows are cut between regions, and the step stays that of one device",
        .defaults =
            "layers=3 hidden=48 heads=8 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 tp=0 sp=1",
        .natural = 4,
        .plug = layout_plug,
        .unplug = layout_unplug,
        .counts = layout_counts,
        .more = more};
    return layout_program(argc, argv, &program);
}
#endif
