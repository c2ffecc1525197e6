// sequence_parallel.c: norms and residuals are also sharded over ranks. Playbook: "Sequence Parallelism".
//
// Changes from tensor_parallel.c: outside the regions that reach from f to f* each of N ranks has only its
// own tokens, an N-th of the b s rows of (b s, h), and embeds, normalizes and adds only those (Korthikanti
// et al. 2022). g and g* take the places of f and f*:
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
#include <stdlib.h>

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
    price->peak_counted = true;  // norms' outputs and gathered rows are held at once, even by a single rank
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
        .axis = AXIS_TP,
        .before = {"tensor_parallel", NULL, "sp", 0},
        .techniques = tensor_layouts,
        .option = &zero_option,
        .options = 1,
        .more = sequence_tables};
    return program_main(argc, argv, &program);
}
#endif
