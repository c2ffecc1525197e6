// vocab_parallel.c: the embedding and the output layer cut over the vocabulary. Playbook: "Sequence Parallelism", its
// table of the embedding layer ("Row Linear sharded on vocab").
//
// Against 00_single_gpu: each of t ranks stores ceil(v / t) rows of both tables, the last ones padded with zeros. A lookup
// is a row-parallel linear: rows of other ranks' tokens are zero, and the sum, by f* or g*, is x. The output layer is
// column-parallel: f or g, then each rank has its own columns of the logits, (n, v / t), and they stay where they are:
//
//     m = max over ranks of max_j z_j        Z = sum over ranks of sum_j exp(z_j - m)        lse = m + log Z
//     loss = lse - (sum over ranks of z_target on its owner, else 0)      dz_j = softmax_j - [j = target], own columns
//
// The maximum must be of all ranks before anyone's exponentials are taken; padded columns are in no maximum, no sum and
// no gradient. (Shoeybi et al. 2019; Megatron-LM, vocab_parallel_cross_entropy.)
//
// Bytes sent per rank and micro-batch, for n = b s, K = n h e, w bytes of a statistic: 2 (t - 1) / t (2 K + 3 n w), with
// sequence parallelism (t - 1) / t (5 K + 6 n w): W gathers once more. To gather the logits: (t - 1) / t n v e.
// Memory per rank: tables, their gradients and states / t, logits n v / t.
// Run: build/03_tensor_parallel/vocab_parallel     (--ranks 3 --heads 6 --kv-heads 3 --vocab 256, --sp, --tied, --dry-run …)
// Last line: PASS vocab_parallel: the loss needs no rank to see all logits …
#include "playbook.h"

// ---- the embedding ----

Tensor vocab_parallel_rows(const VocabParallel *vocab, Tensor tokens, Tensor weight) {
    Tensor rows =
        tensor_new(MEMORY_ACTIVATION, weight.dtype, SHAPE(tensor_count(tokens), tensor_columns(weight)));
    op_embedding_part_forward(rows, tokens, weight, vocab->part);
    return rows;
}

static Tensor lookup(void *context, Tensor tokens, Tensor weight) {
    const VocabParallel *vocab = context;
    Tensor partial = vocab_parallel_rows(vocab, tokens, weight);
    Tensor x = vocab->before.region.leave(vocab->before.region.context, partial);
    tensor_free(&partial);
    return x;
}

//   forward: x = sum over ranks of rows,  rows = weight[token] on its owner
static void lookup_backward(void *context, Tensor dweight, Tensor dx, Tensor tokens) {
    const VocabParallel *vocab = context;
    Tensor drows = vocab->before.region.leave_backward(vocab->before.region.context, dx);
    op_embedding_part_backward(dweight, drows, tokens, vocab->part);
    tensor_free(&drows);
}

// ---- the output layer: entered as a block is, by whatever is plugged there by now ----

static Tensor enter(void *context, Tensor x) {
    const Sockets *on = ((const VocabParallel *)context)->on;
    return on->region.enter(on->region.context, x);
}
static Tensor enter_backward(void *context, Tensor dx) {
    const Sockets *on = ((const VocabParallel *)context)->on;
    return on->region.enter_backward(on->region.context, dx);
}

// ---- the loss: three numbers for each token travel, and no logits ----

static double loss(void *context, Tensor *lse, Tensor logits, Tensor targets) {
    const VocabParallel *vocab = context;
    int64_t n = tensor_rows(logits);
    DType statistics = logits.dtype == F64 ? F64 : F32;
    Tensor maxima = tensor_new(MEMORY_COMMUNICATION, statistics, SHAPE(n));
    op_cross_entropy_part_maxima(maxima, logits, vocab->part);
    comm_now(comm_all_reduce(maxima, REDUCE_MAX, vocab->tp));

    // Sums of exponentials and logits of targets are sums over ranks both: one message.
    Tensor sums = tensor_new(MEMORY_COMMUNICATION, statistics, SHAPE(2, n));
    op_cross_entropy_part_sums(sums, logits, maxima, targets, vocab->part);
    comm_now(comm_all_reduce(sums, REDUCE_SUM, vocab->tp));

    Tensor losses = tensor_new(MEMORY_ACTIVATION, statistics, SHAPE(n));
    *lse = tensor_like(MEMORY_ACTIVATION, losses);
    op_cross_entropy_part_losses(losses, *lse, maxima, sums, targets);
    double sum = op_sum(losses);  // of all tokens, and the same bits on every rank
    tensor_free(&maxima);
    tensor_free(&sums);
    tensor_free(&losses);
    return sum;
}

static void loss_backward(void *context, Tensor dlogits, Tensor logits, Tensor lse, Tensor targets,
                          double scale) {
    const VocabParallel *vocab = context;
    op_cross_entropy_part_backward(dlogits, logits, lse, targets, scale, vocab->part);
}

// The table says which rows are this rank's; the last ranks' may lie wholly in the padding.
static VocabularyPart part_of(const Param *table) {
    int64_t v = table->full[0], first = table->first[0] < v ? table->first[0] : v;
    return (VocabularyPart){v, first, v - first < table->shape[0] ? v - first : table->shape[0]};
}

void vocab_parallel_plug(Model *model, VocabParallel *vocab) {
    *vocab = (VocabParallel){.tp = model->mesh.tp,
                             .part = part_of(model->embedding),
                             .before = model->sockets,
                             .on = &model->sockets};
    model->sockets.vocabulary.context = vocab;
    model->sockets.vocabulary.lookup = lookup;
    model->sockets.vocabulary.lookup_backward = lookup_backward;
    model->sockets.vocabulary.enter = enter;
    model->sockets.vocabulary.enter_backward = enter_backward;
    model->sockets.vocabulary.loss = loss;
    model->sockets.vocabulary.loss_backward = loss_backward;
}

#ifndef NO_MAIN
int main(int argc, char **argv) {
    const LayoutProgram program = {
        .purpose = "Vocabulary parallelism: embedding, output layer and loss are cut over the vocabulary.",
        .claim = "the loss needs no rank to see all logits",
        .defaults =
            "layers=2 hidden=48 heads=8 kv-heads=2 ffn=88 vocab=257 seq=31 micro-batch=2 grad-acc=2 "
            "steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 tp=0 vocab-parallel=1",
        .natural = 4,
        .plug = layout_plug,
        .unplug = layout_unplug,
        .counts = layout_counts};
    return layout_program(argc, argv, &program);
}
#endif
