// sequence_parallel.c: norms and residuals cut over ranks, too. Playbook: "Sequence Parallelism".
//
// Against tensor_parallel.c: between regions each of n ranks holds the rows of its own tokens, an n-th of the b s rows of
// (b s, h), and embeds, normalizes and adds those alone (Korthikanti et al. 2022):
//
//     x ─ norm1 ─[g]─ Wq Wk Wv ─ rope ─ attention ─ Wo ─[g*]─(+x)─ x2       and the same around the MLP
//     rows / n  rows     heads / n             partial   rows / n
//
//                 forward           backward
//     g           all-gather        reduce-scatter
//     g*          reduce-scatter    all-gather        the two halves of an all-reduce, and its bytes
//
// What is kept for backward are the norms' rows before g: W gathers them once more, an all-gather for each region that
// the playbook's count leaves out (Megatron-LM does the same, and hides it behind dX). A rank's gradients of the norms,
// and of embedding and output layer where those are whole, come from its own rows: sums over tp at the step's end.
//
// Bytes sent per rank, block and micro-batch: 8 (n - 1) / n K for K = b s h e, as in tensor_parallel.c, and 2 (n - 1) / n K
// for W. Memory per rank: kept by a block: b s / n (e (4 h + 2 a d + 2 kv d + 3 f + a s) + 2 statistics): all of it / n.
// Run: build/03_tensor_parallel/sequence_parallel         (--ranks 3 --heads 6, --tp 2 --zero 2, --dtype f32, --dry-run …)
// Last line: PASS sequence_parallel: rows are cut between regions, and the step stays that of one device …
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
    comm_now(comm_all_gather(all, rows, counts, t->tp));
    return all;
}

static Tensor reduce_scatter(void *context, Tensor partial) {
    TensorParallel *t = context;
    int64_t h = tensor_columns(partial), first, counts[t->tp.size];
    sequence_counts(t->tokens, h, t->tp.size, counts);
    Tensor rows = tensor_new(MEMORY_ACTIVATION, partial.dtype,
                             SHAPE(sequence_rows(t->tokens, t->tp.rank, t->tp.size, &first), h));
    comm_now(comm_reduce_scatter(rows, partial, counts, REDUCE_SUM, t->tp));
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
        .counts = layout_counts};
    return layout_program(argc, argv, &program);
}
#endif
