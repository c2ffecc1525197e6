// vocab_parallel.c: embedding, output layer and loss sharded over the vocabulary. Playbook: "Sequence
// Parallelism", its table of the embedding layer ("Row Linear sharded on vocab").
//
// Changes from 00_single_gpu: each of t ranks stores ceil(v / t) rows of both tables, the last ones padded
// with zeros. A lookup is a row-parallel linear: a token's row is zero on ranks that do not store it, and the
// sum over ranks, by f* or g*, is x. The output layer is column-parallel: its input enters by f or g, and
// each rank computes its own columns z of the logits, (n, v / t), which are never sent (Shoeybi et al. 2019):
//
//     m = max over ranks of max_j z_j      Z = sum over ranks of sum_j exp(z_j - m)      lse = m + log Z
//     loss = lse - sum over ranks of (z_target where its column is, else 0)
//     dz_j = exp(z_j - lse) - (1 if j is the target), for the rank's own columns
//
// Any m works that is the same on all ranks and keeps the exponentials in range; this file takes the maximum
// of all logits, by a first all-reduce. Padded columns enter no maximum, no sum and no gradient.
//
// Bytes sent per rank and micro-batch, with n = b s, K = n h e, e bytes per element and w per statistic:
// (t - 1) / t times: 2 K for the lookup, 2 K for the output layer (with sequence parallelism 3 K: W gathers
// its input again), 6 n w for the loss: m, Z and z_target. A gather of the logits would send n v e.
// Memory per rank: tables, their gradients and optimizer states / t; logits n v / t.
// Run: build/03_tensor_parallel/vocab_parallel      (--sp, --tied, --ranks 8, --vocab 300, --dtype bf16 …)
// Last line: PASS vocab_parallel: the loss needs no rank to see all logits …
#include <stdlib.h>
#include <string.h>

#include "tensor_parallel.h"

// ---- the embedding ----

// Each token's row of the table, zero if another rank stores it: (n, h) partial over tp.
static Tensor rows_of(const VocabParallel *vocab, Tensor tokens, Tensor weight) {
    Tensor rows =
        tensor_new(MEMORY_ACTIVATION, weight.dtype, SHAPE(tensor_count(tokens), tensor_columns(weight)));
    op_embedding_part_forward(rows, tokens, weight, vocab->part);
    return rows;
}

static Tensor lookup(void *context, const MicroBatch *micro, Tensor weight) {
    const VocabParallel *vocab = context;
    Tensor partial = rows_of(vocab, micro->tokens, weight);
    Tensor x = vocab->before.region.leave(vocab->before.region.context, micro, partial);
    tensor_free(&partial);
    return x;
}

//   forward: x = sum over ranks of rows,  rows = weight[token] on its owner
static void lookup_backward(void *context, const MicroBatch *micro, Tensor dweight, Tensor dx) {
    const VocabParallel *vocab = context;
    Tensor drows = vocab->before.region.leave_backward(vocab->before.region.context, micro, dx);
    op_embedding_part_backward(dweight, drows, micro->tokens, vocab->part);
    tensor_free(&drows);
}

// ---- the output layer: its input enters as a block's does, by the region socket as it is now ----

static Tensor enter(void *context, const MicroBatch *micro, Tensor x) {
    const Sockets *sockets = ((const VocabParallel *)context)->sockets;
    return sockets->region.enter(sockets->region.context, micro, x);
}
static Tensor enter_backward(void *context, const MicroBatch *micro, Tensor dx) {
    const Sockets *sockets = ((const VocabParallel *)context)->sockets;
    return sockets->region.enter_backward(sockets->region.context, micro, dx);
}

// ---- the loss: three numbers for each token are sent, and no logits ----

static void loss(void *context, const MicroBatch *micro, Tensor *lse, Tensor logits) {
    const VocabParallel *vocab = context;
    int64_t n = tensor_rows(logits);
    DType statistics = dtype_full(logits.dtype);
    Tensor maxima = tensor_new(MEMORY_COMMUNICATION, statistics, SHAPE(n));
    op_cross_entropy_part_maxima(maxima, logits, vocab->part);
    comm_wait(comm_all_reduce(maxima, REDUCE_MAX, vocab->tp));

    // Sums of exponentials and logits of targets are both summed over ranks: one all-reduce for the two.
    Tensor sums = tensor_new(MEMORY_COMMUNICATION, statistics, SHAPE(2, n));
    op_cross_entropy_part_sums(sums, logits, maxima, micro->targets, vocab->part);
    comm_wait(comm_all_reduce(sums, REDUCE_SUM, vocab->tp));

    Tensor losses = tensor_new(MEMORY_ACTIVATION, statistics, SHAPE(n));
    *lse = tensor_like(MEMORY_ACTIVATION, losses);
    op_cross_entropy_part_losses(losses, *lse, maxima, sums, micro->targets);
    op_add_sum(micro->loss, losses, micro->loss_scale);  // of all tokens: the same bits on every rank
    tensor_free(&maxima);
    tensor_free(&sums);
    tensor_free(&losses);
}

static void loss_backward(void *context, const MicroBatch *micro, Tensor dlogits, Tensor logits,
                          Tensor lse) {
    const VocabParallel *vocab = context;
    op_cross_entropy_part_backward(dlogits, logits, lse, micro->targets, micro->grad_scale, vocab->part);
}

// The entries of the vocabulary (of v) in rows first … first + stored - 1; on the last ranks maybe none,
// only padding.
static VocabularyPart part_of(int64_t v, int64_t stored, int64_t first) {
    if (first > v) first = v;
    return (VocabularyPart){v, first, v - first < stored ? v - first : stored};
}

static void *plug(Model *model) {
    Group tp = model->mesh.tp;
    int64_t v = model->config.vocab, rows = (v + tp.size - 1) / tp.size;
    VocabParallel *vocab = host_alloc(sizeof *vocab);
    *vocab = (VocabParallel){.tp = tp,
                             .part = part_of(v, rows, tp.rank * rows),
                             .before = model->sockets,
                             .sockets = &model->sockets};
    model->sockets.vocabulary.context = vocab;
    model->sockets.vocabulary.lookup = lookup;
    model->sockets.vocabulary.lookup_backward = lookup_backward;
    model->sockets.vocabulary.enter = enter;
    model->sockets.vocabulary.enter_backward = enter_backward;
    model->sockets.vocabulary.loss = loss;
    model->sockets.vocabulary.loss_backward = loss_backward;
    return vocab;
}

static void unplug(Model *model, void *context) {
    (void)model;
    free(context);
}

// ---- the record ----

// Rows of both tables: ceil(v / t) on each rank, the last ones padded.
static void shard(Model *m) {
    Group tp = m->mesh.tp;
    for (int i = 0; i < m->params.count && tp.size > 1; i++) {
        Param *param = &m->params.param[i];
        int64_t rows = (param->full[0] + tp.size - 1) / tp.size;
        if (param->role == ROLE_EMBEDDING || param->role == ROLE_HEAD)
            param_shard(param, 0, tp.rank * rows, rows);
    }
}

static void price(Price *price, const Model *m, const void *context) {
    (void)context;
    const Config *c = &m->config;
    Group tp = m->mesh.tp;
    int64_t n = model_tokens(m), rows = (c->vocab + tp.size - 1) / tp.size;
    double losses = price->head_micros, lookups = price->lookup_micros;
    DType statistics = dtype_full(c->dtype);
    // A lookup leaves the region; the output layer enters it, in W once more.
    price->lookups += lookups;
    price->leaves += lookups;
    price->leaves_backward += lookups;
    price->enters += 2 * losses;
    price->enters_backward += losses;
    price->losses = 0;  // the two all-reduces below include it
    price_all_reduce(price, losses, n, statistics, tp);
    price_all_reduce(price, losses, 2 * n, statistics, tp);
    price->elements[ROLE_EMBEDDING] = price->elements[ROLE_EMBEDDING] / (double)c->vocab * (double)rows;
    price->elements[ROLE_HEAD] = price->elements[ROLE_HEAD] / (double)c->vocab * (double)rows;
    for (int i = 0; i < price->end_rows; i++) {
        PriceKept *kept = &price->end[i];
        if (!strcmp(kept->what, "logits")) kept->bytes = kept->bytes / (double)c->vocab * (double)rows;
        if (!strcmp(kept->what, "logits") || !strcmp(kept->what, "lse"))
            kept->split = EVERY_RANK;  // of all rows
    }
}

static bool enabled(const Config *config) { return config_number(config, "vocab-parallel") != 0; }

static const Option vocab_option = {"vocab-parallel",
                                    OPTION_FLAG,
                                    NULL,
                                    NULL,
                                    0,
                                    0,
                                    "",
                                    "--tp also shards embedding, output layer and loss",
                                    false};

const Technique vocab_parallel = {.name = "vocab_parallel",
                                  .option = &vocab_option,
                                  .options = 1,
                                  .asked = "--tp",
                                  .axes = 1u << AXIS_TP,
                                  .wraps = 1u << SOCKET_VOCABULARY,
                                  .enabled = enabled,
                                  .shard = shard,
                                  .plug = plug,
                                  .unplug = unplug,
                                  .price = price};

#ifndef NO_MAIN

// ---- the embedding's rows of the playbook's table of shapes, read from the tensors ----

typedef struct Shapes {
    char table[32], rows[32], x[64];
} Shapes;

static Shapes shapes_of(const Config *config, Mesh mesh, bool sp) {
    Config c = *config;
    config_set(&c, "sp", sp);
    config_set(&c, "zero", 0);  // tables as a lookup finds them
    Trainer *t = trainer_new(&c, mesh, tensor_layouts);
    const Sockets *sockets = &t->model->sockets;
    Shapes s;
    int64_t n = c.micro_batch * c.seq, first;
    Tensor table = param_value(&t->model->params, t->model->embedding);
    MicroBatch micro = {
        .b = c.micro_batch, .s = c.seq, .tokens = tensor_new(MEMORY_ACTIVATION, I32, SHAPE(n))};
    op_fill(micro.tokens, 0);
    Tensor rows = rows_of(sockets->vocabulary.context, micro.tokens, table);
    clock_reset();
    Tensor x = sockets->vocabulary.lookup(sockets->vocabulary.context, &micro, table);
    const char *call = sp ? "reduce_scatter" : "all_reduce";
    int64_t own = sp ? sequence_rows(n, mesh.tp.rank, mesh.tp.size, &first) : n;
    report_that(tensor_rows(rows) == n && tensor_rows(x) == own && comm_count(call).calls == 1 &&
                    comm_total().calls == 1,
                "a lookup makes %s of %s by %lld calls", tensor_text(x), tensor_text(rows),
                (long long)comm_total().calls);
    snprintf(s.table, sizeof s.table, "%s", tensor_text(table));
    snprintf(s.rows, sizeof s.rows, "%s", tensor_text(rows));
    snprintf(s.x, sizeof s.x, "%s by %s", tensor_text(x), call);
    tensor_free(&micro.tokens), tensor_free(&rows), tensor_free(&x);
    trainer_free(t);
    return s;
}

static void embedding_shapes(Mesh mesh, const Config *config) {
    Shapes tp = shapes_of(config, mesh, false), sp = shapes_of(config, mesh, true);
    say("\nThe embedding on rank 0, v = %ld, for (b s, h) = (%ld, %ld):\n", config->vocab,
        config->micro_batch * config->seq, config->hidden);
    say("  %-22s %-28s %s\n", "", "TP only", "TP with SP");
    say("  %-22s %-28s %s\n", "table, padded", tp.table, sp.table);
    say("  %-22s %-28s %s\n", "looked up, partial", tp.rows, sp.rows);
    say("  %-22s %-28s %s\n", "x", tp.x, sp.x);
}

// ---- three numbers per token, or all logits ----

// What was sent since the last reset, checked against its closed form for all ranks.
static void show(const char *name, double predicted, Tensor logits, Group tp) {
    CommCount sent = comm_total();
    double all = comm_sum((double)sent.bytes, tp);
    say("  %-16s %12s %12.3f %18s\n", name, bytes_text((double)sent.bytes), 1e3 * sent.exposed_seconds,
        bytes_text((double)tensor_bytes(logits)));
    report_that(all == predicted, "%s: all ranks send %.0f B, and the formula says %.0f", name, all,
                predicted);
    report_number(name, "bytes of rank 0", (double)sent.bytes, "B");
    report_number(name, "exposed seconds", sent.exposed_seconds, "s");
}

// The loss of Llama 3 8B's logits on the model clock: as it is computed here, beside gathering them.
static void loss_of_llama(Mesh mesh, const Config *config) {
    const int64_t n = 8192, v = 128256;
    Group tp = mesh.tp;
    device_dry_run(true);
    int64_t columns = (v + tp.size - 1) / tp.size;
    VocabParallel vocab = {.tp = tp, .part = part_of(v, columns, columns * tp.rank)};
    Tensor logits = tensor_new(MEMORY_ACTIVATION, BF16, SHAPE(n, columns)), lse;
    MicroBatch micro = {
        .b = 1, .s = n, .targets = tensor_new(MEMORY_ACTIVATION, I32, SHAPE(n)), .loss = loss_new()};
    Tensor all = tensor_new(MEMORY_COMMUNICATION, BF16, SHAPE(tp.size, n, columns));
    say("\nThe loss of %ld tokens of Llama 3 8B, v = %ld on %d ranks, on the model clock of %s:\n", n, v,
        tp.size, config->machine);
    say("  %-16s %12s %12s %18s\n", "", "bytes sent", "exposed, ms", "logits on a rank");
    clock_reset();
    loss(&vocab, &micro, &lse, logits);
    show("maxima and sums", 2.0 * (tp.size - 1) * 3 * (double)n * sizeof(float), logits, tp);
    clock_reset();
    comm_wait(comm_all_gather(all, logits, NULL, tp));
    show("gathered logits", (tp.size - 1) * (double)tensor_bytes(all), all, tp);
    tensor_free(&logits), tensor_free(&micro.targets), tensor_free(&micro.loss), tensor_free(&lse);
    tensor_free(&all);
    device_dry_run(false);
}

static void more(Mesh mesh, const Config *config) {
    if (mesh.tp.size == 1) return;
    embedding_shapes(mesh, config);
    loss_of_llama(mesh, config);
}

int main(int argc, char **argv) {
    const Program program = {
        .purpose =
            "Vocabulary parallelism: embedding, output layer and loss are sharded over the vocabulary.",
        .claim = "the loss needs no rank to see all logits",
        .defaults =
            "layers=2 hidden=48 heads=8 kv-heads=2 ffn=88 vocab=257 seq=31 micro-batch=2 grad-acc=2 "
            "steps=3 dtype=f64 optimizer=sgd lr=0.1 clip=0.5 tp=0 vocab-parallel=1 bucket-mb=0.1",
        .natural = 4,
        .axis = AXIS_TP,
        .before = {"whole vocabulary", NULL, "vocab-parallel", 0},
        .techniques = tensor_layouts,
        .option = &zero_option,
        .options = 1,
        .more = more};
    return program_main(argc, argv, &program);
}
#endif
