// sequence_parallel.c: norms and residuals are also sharded over ranks. Playbook: "Sequence Parallelism".
//
// Changes from tensor_parallel.c: between regions each of N ranks has only its own tokens, an N-th of the b s
// rows of (b s, h), and embeds, normalizes and adds only those (Korthikanti et al. 2022):
//
//     x ─ norm1 ─[g]─ Wq Wk Wv ─ rope ─ attention ─ Wo ─[g*]─(+x)─ x2
//     and the same around the MLP
//
//              forward           backward
//     g        all-gather        reduce-scatter
//     g*       reduce-scatter    all-gather        the two halves of an all-reduce: the same bytes
//
// Blocks keep a rank's own rows, as they were before g. So W, the part of backward that computes the weights'
// gradients, gathers them again: an all-gather per region, which the playbook does not count (Megatron-LM has
// it too, hidden behind dX). Gradients of norms, and of an embedding and an output layer that stay whole,
// come from a rank's own rows and are summed over tp at the end of the step.
// Bytes sent per rank, block and micro-batch (K = b s h e, e bytes per element): 8 (N - 1) / N K, as in
// tensor_parallel.c, and 2 (N - 1) / N K for W. Memory per rank: an N-th of all that a block keeps on one
// device, where copies of K/V heads count (kv' in tensor_parallel.c).
// Run: build/03_tensor_parallel/sequence_parallel   (--ranks 3 --heads 6 --kv-heads 3 --ffn 39, --zero 2 …)
// Last line: PASS sequence_parallel: rows are sharded between regions, and the ranks reproduce …
#include <math.h>
#include <stdlib.h>

#include "00_single_gpu/formulas.h"
#include "tensor_parallel.h"

// ---- the technique: g and g* ----

int64_t sequence_rows(int64_t n, int rank, int size, int64_t *first) {
    int64_t each = n / size, more = n % size;
    *first = rank * each + (rank < more ? rank : more);
    return each + (rank < more);
}

// The number of elements in each rank's rows, as collectives take them. counts (size).
static void sequence_counts(int64_t n, int64_t columns, int size, int64_t *counts) {
    int64_t first;
    for (int i = 0; i < size; i++) counts[i] = sequence_rows(n, i, size, &first) * columns;
}

static int64_t tokens_of(const MicroBatch *micro) { return micro->b * micro->s; }

static int64_t own_rows(void *context, const MicroBatch *micro) {
    const TensorParallel *t = context;
    int64_t first;
    return sequence_rows(tokens_of(micro), t->tp.rank, t->tp.size, &first);
}

static Tensor all_gather(const TensorParallel *t, const MicroBatch *micro, Tensor rows,
                         const Codec *codec) {
    int64_t n = tokens_of(micro), h = tensor_columns(rows), counts[t->tp.size];
    sequence_counts(n, h, t->tp.size, counts);
    Tensor all = tensor_new(MEMORY_ACTIVATION, rows.dtype, SHAPE(n, h));
    comm_wait(comm_all_gather_coded(all, rows, counts, codec, t->tp));
    return all;
}

static Tensor enter(void *context, const MicroBatch *micro, Tensor rows) {
    const TensorParallel *t = context;
    return all_gather(t, micro, rows, t->send_rows);
}
static Tensor leave_backward(void *context, const MicroBatch *micro, Tensor drows) {
    const TensorParallel *t = context;
    return all_gather(t, micro, drows, t->send_drows);
}

static Tensor reduce_scatter(void *context, const MicroBatch *micro, Tensor partial) {
    TensorParallel *t = context;
    int64_t n = tokens_of(micro), h = tensor_columns(partial), counts[t->tp.size];
    sequence_counts(n, h, t->tp.size, counts);
    Tensor rows = tensor_new(MEMORY_ACTIVATION, partial.dtype, SHAPE(own_rows(t, micro), h));
    comm_wait(comm_reduce_scatter(rows, partial, counts, REDUCE_SUM, t->tp));
    return rows;
}

// ---- embedding and loss of this rank's rows ----

// The micro-batch restricted to this rank's rows: tokens and targets are borrowed views.
static MicroBatch own_tokens(const TensorParallel *t, const MicroBatch *micro) {
    MicroBatch own = *micro;
    int64_t first, rows = sequence_rows(tokens_of(micro), t->tp.rank, t->tp.size, &first);
    own.tokens = tensor_view(micro->tokens, first, SHAPE(rows));
    own.targets = tensor_view(micro->targets, first, SHAPE(rows));
    return own;
}

static Tensor lookup(void *context, const MicroBatch *micro, Tensor weight) {
    TensorParallel *t = context;
    MicroBatch own = own_tokens(t, micro);
    return t->before.vocabulary.lookup(t->before.vocabulary.context, &own, weight);
}

static void lookup_backward(void *context, const MicroBatch *micro, Tensor dweight, Tensor dx) {
    TensorParallel *t = context;
    MicroBatch own = own_tokens(t, micro);
    t->before.vocabulary.lookup_backward(t->before.vocabulary.context, &own, dweight, dx);
}

static void loss(void *context, const MicroBatch *micro, Tensor *lse, Tensor logits) {
    TensorParallel *t = context;
    MicroBatch own = own_tokens(t, micro);
    own.loss = loss_new();
    t->before.vocabulary.loss(t->before.vocabulary.context, &own, lse, logits);
    comm_wait(comm_all_reduce(own.loss, REDUCE_SUM, t->tp));
    op_accumulate(micro->loss, own.loss);
    tensor_free(&own.loss);
}

static void loss_backward(void *context, const MicroBatch *micro, Tensor dlogits, Tensor logits,
                          Tensor lse) {
    TensorParallel *t = context;
    MicroBatch own = own_tokens(t, micro);
    t->before.vocabulary.loss_backward(t->before.vocabulary.context, &own, dlogits, logits, lse);
}

static void *plug(Model *model) {
    TensorParallel *t = host_alloc(sizeof *t);
    *t = (TensorParallel){.tp = model->mesh.tp,
                          .before = model->sockets,
                          .send_rows = model->params.recipe.send_rows,
                          .send_drows = model->params.recipe.send_drows};
    Sockets *sockets = &model->sockets;
    sockets->region.context = sockets->vocabulary.context = t;
    sockets->region.rows = own_rows;
    sockets->region.enter = enter;
    sockets->region.leave_backward = leave_backward;
    sockets->region.leave = sockets->region.enter_backward = reduce_scatter;
    sockets->vocabulary.lookup = lookup;
    sockets->vocabulary.lookup_backward = lookup_backward;
    sockets->vocabulary.loss = loss;
    sockets->vocabulary.loss_backward = loss_backward;
    return t;
}

static void unplug(Model *model, void *context) {
    (void)model;
    free(context);
}

// ---- the record ----

// Weights that every rank of tp stores whole see only the rank's own rows: the gradients of norms, and of an
// embedding and an output layer that stay whole, are partial.
static void shard(Model *model) {
    tensor_parallel_shard(model);
    for (int i = 0; i < model->params.count; i++) {
        Param *param = &model->params.param[i];
        if (!param->sharded) param_set_copies(param, param->copies, true);
    }
}

static void price(Price *price, const Model *m, const void *context) {
    (void)context;
    Group tp = m->mesh.tp;
    DType dtype = m->params.recipe.weight;
    int64_t n = model_tokens(m), h = m->config.hidden, first;
    int64_t rows = sequence_rows(n, tp.rank, tp.size, &first);
    const Recipe *recipe = &m->params.recipe;
    double enters = price->enters, leaves = price->leaves_backward, gathers = enters + leaves,
           scatters = price->leaves + price->enters_backward;
    if (price->messages) {  // async_tensor_parallel sends the same rows as messages, except a lookup's
        double sent = (gathers - price->lookups) * (double)(rows * h * (tp.size - 1)) +
                      (scatters - price->lookups) * (double)((n - rows) * h);
        price_sent(price, "transfers", (gathers + scatters - 2 * price->lookups) * (tp.size - 1),
                   (double)dtype_size(dtype) * sent, tp);
        enters = 0, leaves = scatters = price->lookups;
    }
    price_all_gather_coded(price, enters, rows * h, dtype, recipe->send_rows, tp);
    price_all_gather_coded(price, leaves, rows * h, dtype, recipe->send_drows, tp);
    price_reduce_scatter(price, scatters, n * h, rows * h, dtype, tp);
    price_all_reduce(price, price->losses, 1, F64, tp);
    tensor_parallel_price_kept(price, m);
    price_scale_kept(price, BY_SEQUENCE, (double)rows, (double)n);
}

static bool enabled(const Config *config) { return config_number(config, "sp") != 0; }

static const Option sp_option = {
    "sp", OPTION_FLAG, NULL, NULL, 0, 0, "", "sequence parallelism: --tp also shards norms and residuals",
    false};

const Technique sequence_parallel = {.name = "sequence_parallel",
                                     .option = &sp_option,
                                     .options = 1,
                                     .asked = "--tp",
                                     .axes = 1u << AXIS_TP,
                                     .enabled = enabled,
                                     .check = tensor_parallel_check,
                                     .shard = shard,
                                     .plug = plug,
                                     .unplug = unplug,
                                     .price = price};

#ifndef NO_MAIN

// ---- beside tensor parallelism alone ----

static Config layout_of(const Config *config, bool sp) {
    Config c = *config;
    c.recompute = RECOMPUTE_NONE;
    config_set(&c, "sp", sp);
    config_set(&c, "async-tp", 0);  // its messages are not what is compared, nor
    config_set(&c, "zero", 0);      // ZeRO's collectives
    return c;
}

static void compare_calls(Mesh mesh, const Config *config) {
    Config without = layout_of(config, false), with = layout_of(config, true);
    BlockCost tp = program_block_cost(&without, mesh, tensor_layouts),
              sp = program_block_cost(&with, mesh, tensor_layouts);
    say("\nOne block and micro-batch, tp %d, beside tensor parallelism without sequence parallelism:\n",
        mesh.tp.size);
    for (int pass = FORWARD; pass <= BACKWARD; pass++) {
        Sends alone = tp.pass[pass], both = sp.pass[pass];
        const char *name = pass == FORWARD ? "forward" : "backward";
        bool again = pass == BACKWARD;  // W's all-gathers
        double calls = mesh.tp.size > 1 ? 2 : 0;
        const struct {
            const char *what;
            double predicted, measured;
            const char *unit;
        } row[] = {
            {"all-gathers", again ? 2 * calls : calls, both.all_gather.calls, ""},
            {"reduce-scatters", calls, both.reduce_scatter.calls, ""},
            {"all-reduces", 0, both.all_reduce.calls, ""},
            {again ? "bytes, W gathers too" : "bytes of both", alone.all_reduce.bytes * (again ? 1.5 : 1),
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
    int64_t largest;  // elements of the largest tensor of (part of) width h that a block keeps; f is wider
} Shapes;

// The call made since the last clock_reset, or nothing.
static const char *call_made(void) {
    const CommCount *counts;
    int kinds = comm_counts(&counts);
    for (int i = 0; i < kinds; i++)
        if (counts[i].calls > 0) return counts[i].name;
    return "";
}

// Notes the shape of a tensor at a stop, which by the playbook's table is (rows, columns).
static void at(Shapes *s, int stop, Tensor t, int64_t rows, int64_t columns) {
    report_that(tensor_rows(t) == rows && tensor_columns(t) == columns,
                "%s is (%lld, %lld), by the playbook's table (%lld, %lld)", stop_name[stop],
                (long long)tensor_rows(t), (long long)tensor_columns(t), (long long)rows,
                (long long)columns);
    snprintf(s->stop[stop], sizeof s->stop[stop], "(%lld, %lld) %s", (long long)tensor_rows(t),
             (long long)tensor_columns(t), call_made());
    clock_reset();
}

// One block's forward, stop by stop.
static Shapes shapes_of(const Config *config, Mesh mesh) {
    Shapes s = {.largest = 0};
    Trainer *t = trainer_new(config, mesh, tensor_layouts);
    Model *m = t->model;
    Sockets *sockets = &m->sockets;
    Batch batch = batch_new(t, 0);
    MicroBatch micro = micro_batch_new(m, 0, config->micro_batch, batch.tokens, batch.targets, 1);
    int64_t n = config->micro_batch * config->seq, h = config->hidden, f = config->ffn / config->tp, first;
    bool sp = config_number(config, "sp");
    int64_t rows = sp ? sequence_rows(n, mesh.tp.rank, mesh.tp.size, &first) : n;

    Tensor table = param_value(&m->params, m->embedding);
    clock_reset();
    at(&s, 0, table, tensor_rows(table), h);
    chunk_forward(m, &micro, (Chunk){0, 0, true, false});
    at(&s, 1, micro.x, rows, h);
    chunk_forward(m, &micro, (Chunk){0, 1, false, false});
    const BlockKept *kept = &micro.block[0];
    clock_reset();
    at(&s, 2, kept->norm2, rows, h);
    Tensor inside = sockets->region.enter(sockets->region.context, &micro, kept->norm2);
    at(&s, 3, inside, n, h);
    at(&s, 4, param_value(&m->params, m->block[0].gate), f, h);
    at(&s, 5, kept->mlp.act, n, f);
    at(&s, 6, param_value(&m->params, m->block[0].down), h, f);
    void *keep = NULL;
    Tensor partial = tensor_new(MEMORY_ACTIVATION, inside.dtype, SHAPE(n, h));
    sockets->linear.forward(sockets->linear.context, m, 1, &m->block[0].down, &partial, kept->mlp.act,
                            &keep);
    Tensor y = sockets->region.leave(sockets->region.context, &micro, partial);
    at(&s, 7, y, rows, h);
    const Tensor wide[] = {kept->x, kept->norm1, kept->q, kept->o, kept->x2, kept->norm2};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        if (tensor_count(wide[i]) > s.largest) s.largest = tensor_count(wide[i]);

    Tensor *const made[] = {&inside, &partial, &y};
    for (int i = 0; i < 3; i++) tensor_free(made[i]);
    micro_batch_free(m, &micro);
    batch_free(&batch);
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
    int64_t own = sequence_rows(n, mesh.tp.rank, mesh.tp.size, &first) * h;
    int64_t share = n * config->heads * config_head_size(config) / size;  // of q and o, usually h wide
    report_equal("largest kept with TP only: b s h", (double)(n * h > share ? n * h : share),
                 (double)tp.largest, "");
    report_equal("largest kept with SP: b s h / tp", (double)(own > share ? own : share),
                 (double)sp.largest, "");
}

// ---- activations that a block keeps: Llama 3 8B's shape, 16 bits ----

static void compare_memory(Mesh mesh) {
    int tp = mesh.tp.size;
    if (32 % tp || 14336 % tp) return;
    Config c = config_of_model("llama-3-8b", "layers=2 vocab=1024 seq=2048 micro-batch=1 dtype=bf16");
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
        MemoryPlan plan = {
            .model = here, .tp = here.tp, .dp = 1, .sp = row[i].sp, .whole_vocabulary = true};
        kept[i] = program_block_cost(&here, i ? mesh : mesh_single(), tensor_layouts).kept;
        predicted[i] = memory_block_activations(&plan);
        plan.gpt = true;
        plan.model.kv_heads = plan.model.heads;
        plan.model.ffn = 4 * c.hidden;
        double gpt = memory_block_activations(&plan) / sbh;
        say("  %-12s %12.3f %14.3f   %s\n", row[i].name, kept[i] / sbh, gpt, row[i].formula);
        report_that(fabs(gpt / row[i].gpt - 1) < 1e-12, "GPT's block: %s is %.6f, and here %.6f",
                    row[i].formula, row[i].gpt, gpt);
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
    compare_memory(mesh);
    device_dry_run(false);
}

int main(int argc, char **argv) {
    const Program program = {
        .purpose =
            "Sequence parallelism: between the regions of tensor parallelism, each rank has its own "
            "tokens.",
        .claim = "rows are sharded between regions, and the ranks reproduce the single-device step",
        .defaults =
            "layers=3 hidden=48 heads=8 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 tp=0 sp=1 bucket-mb=0.1",
        .natural = 4,
        .before = {"tensor_parallel", NULL, "sp", 0},
        .techniques = tensor_layouts,
        .option = &zero_option,
        .options = 1,
        .more = more};
    return program_main(argc, argv, &program);
}
#endif
