// flash.c: attention without stored scores. Playbook: "Flash Attention 1-3"; Dao et al. 2022, Dao 2023.
//
// Changes from 00_single_gpu/transformer.c: scores are computed tile by tile and merged at once into o and
// the log-sum-exp of each row; backward recomputes them. Here all tokens form one chunk of keys; context
// parallelism (chapter 04) calls the same operation for one chunk after another.
//
//     forward    o, lse = merge over tiles of softmax(q k^T / sqrt(d)) v        4 d FLOPs per pair
//     backward   probs = exp(q k^T / sqrt(d) - lse);  dots = sum(o d_o)         10 d; stored scores: 8 d
//                dscores = probs (d_o v^T - dots)
//
// Kept per block: lse, n a elements in f32, in place of probs, n a s in the storage dtype. In 16-bit
// storage o, dq, dk and dv also have f32 sums while they are computed. Selective recomputation has no
// scores to drop: it drops lse and repeats forward. With --documents TOKEN a token attends only to its own
// document.
// Bytes sent: none. This file has no main: build/00_single_gpu/train --attention flash.
#include "flash.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- what chapter 04 uses as well ----

AttentionHeads flash_heads(AttentionShape s) { return (AttentionHeads){s.heads, s.kv_heads, s.head_size}; }

Tensor flash_sum(Tensor t) {
    DType dtype = dtype_full(t.dtype);
    Tensor sum = t.dtype == dtype ? tensor_share(t) : tensor_new(MEMORY_ACTIVATION, dtype, t.dims, t.shape);
    op_fill(sum, 0);
    return sum;
}

void flash_round(Tensor t, Tensor *sum) {
    if (t.dtype != sum->dtype) op_copy(t, *sum);
    tensor_free(sum);
}

Tensor flash_new_lse(AttentionKept *kept, DType storage, int64_t rows, int64_t heads) {
    Tensor *lse = kept->more = host_alloc(sizeof *lse);
    *lse = tensor_new(MEMORY_ACTIVATION, dtype_full(storage), SHAPE(rows, heads));
    op_fill(*lse, -INFINITY);
    return *lse;
}

Tensor flash_lse(const AttentionKept *kept) { return *(const Tensor *)kept->more; }

void flash_drop(void *context, AttentionKept *kept) {
    (void)context;
    if (!kept->more) return;
    tensor_free(kept->more);
    free(kept->more);
    kept->more = NULL;
}

bool mask_key_changes(MaskKey *key, const MicroBatch *micro, int64_t s) {
    size_t bytes = micro->documents ? (size_t)(micro->b * s) * sizeof *key->documents : 0;
    bool same = key->b == micro->b && key->s == s && !key->documents == !micro->documents;
    if (same && (!bytes || !memcmp(key->documents, micro->documents, bytes))) return false;
    free(key->documents);
    *key = (MaskKey){micro->b, s, bytes ? host_alloc(bytes) : NULL};
    if (bytes) memcpy(key->documents, micro->documents, bytes);
    return true;
}

// ---- the technique ----

// Kept between calls: the mask of the last micro-batch, which all layers share.
typedef struct Flash {
    MaskKey key;
    AttentionPositions positions;
    AttentionMask mask;
} Flash;

static const AttentionMask *mask_for(Flash *flash, const MicroBatch *micro, int64_t s) {
    if (!mask_key_changes(&flash->key, micro, s)) return &flash->mask;
    attention_positions_free(&flash->positions);
    flash->positions = attention_positions_new(micro->b, s, NULL, micro->documents);
    flash->mask = attention_mask(&flash->positions, &flash->positions);
    return &flash->mask;
}

static void flash_forward(void *context, const MicroBatch *micro, Tensor o, AttentionKept *kept, Tensor q,
                          Tensor k, Tensor v, AttentionShape shape) {
    const AttentionMask *mask = mask_for(context, micro, shape.s);
    Tensor sum = flash_sum(o), lse = flash_new_lse(kept, q.dtype, shape.b * shape.s, shape.heads);
    op_attention_chunk_forward(sum, lse, q, k, v, mask, flash_heads(shape));
    flash_round(o, &sum);
}

static void flash_backward(void *context, const MicroBatch *micro, Tensor dq, Tensor dk, Tensor dv,
                           Tensor d_o, AttentionKept *kept, Tensor q, Tensor k, Tensor v, Tensor o,
                           AttentionShape shape) {
    const AttentionMask *mask = mask_for(context, micro, shape.s);
    AttentionHeads heads = flash_heads(shape);
    Tensor lse = flash_lse(kept), dots = tensor_like(MEMORY_ACTIVATION, lse);
    Tensor sum_dq = flash_sum(dq), sum_dk = flash_sum(dk), sum_dv = flash_sum(dv);
    op_attention_chunk_dots(dots, o, d_o, heads);
    op_attention_chunk_backward(sum_dq, sum_dk, sum_dv, d_o, q, k, v, lse, dots, mask, heads);
    flash_round(dq, &sum_dq);
    flash_round(dk, &sum_dk);
    flash_round(dv, &sum_dv);
    tensor_free(&dots);
}

static void flash_again(void *context, const MicroBatch *micro, AttentionKept *kept, Tensor q, Tensor k,
                        Tensor v, AttentionShape shape) {
    Tensor o = tensor_like(MEMORY_ACTIVATION, q);
    flash_forward(context, micro, o, kept, q, k, v, shape);
    tensor_free(&o);
}

static void *plug(Model *model) {
    Flash *flash = host_alloc(sizeof *flash);
    *flash = (Flash){0};
    model->sockets.attention.context = flash;
    model->sockets.attention.forward = flash_forward;
    model->sockets.attention.backward = flash_backward;
    model->sockets.attention.drop = flash_drop;
    model->sockets.attention.again = flash_again;
    return flash;
}

static void unplug(Model *model, void *context) {
    (void)model;
    Flash *flash = context;
    attention_positions_free(&flash->positions);
    free(flash->key.documents);
    free(flash);
}

// ---- the record ----

void flash_price_kept(Price *price, double tokens, double heads, DType storage) {
    for (int i = 0; i < price->block_rows; i++)
        if (!strcmp(price->block[i].what, "probs") && price->block[i].bytes > 0)
            price->block[i].bytes = tokens * heads * (double)dtype_size(dtype_full(storage));
}

void flash_price_positions(Price *price, int64_t b, int64_t tokens) {
    double tiles = (double)((tokens + ATTENTION_TILE - 1) / ATTENTION_TILE);
    double bytes = (double)b * (2.0 * sizeof(int32_t) * (double)tokens + sizeof(TileBounds) * tiles);
    int row = 0;
    while (row < price->end_rows && strcmp(price->end[row].what, "positions")) row++;
    CHECK(row < MOST_KEPT, "more than %d tensors outside blocks are priced", MOST_KEPT);
    if (row == price->end_rows)
        price->end[price->end_rows++] = (PriceKept){"positions", 0, EVERY_RANK, RECOMPUTE_FULL + 1};
    price->end[row].bytes += bytes;
}

void flash_price_again(Price *price, const Config *c) {
    double s = (double)c->seq, pairs = s * (s + 1) / 2, samples = (double)(c->micro_batch * c->grad_acc);
    // Products of 2 d FLOPs per pair that stored scores do not need: q k^T again in backward; with selective
    // recomputation also probs v, since all of forward is repeated.
    double products = c->recompute == RECOMPUTE_SELECTIVE ? 2 : 1;
    price->again +=
        products * 2 * (double)(c->heads * config_head_size(c)) * pairs * samples * (double)c->layers;
}

static void price(Price *price, const Model *m, const void *context) {
    (void)context;
    const Config *c = &m->config;
    flash_price_again(price, c);
    price->peak_counted = true;
    flash_price_kept(price, (double)model_tokens(m), (double)c->heads, (DType)c->dtype);
    flash_price_positions(price, c->micro_batch, c->seq);
}

bool technique_attends(const Technique *technique) {
    return technique_has_option(technique, "attention") || technique_has_option(technique, "documents");
}

static bool enabled(const Config *config) {
    return config_number(config, "attention") == 1 || config_document_end(config) >= 0;
}

static const Option options[] = {
    {"attention", OPTION_CHOICE, NULL, "stored", 0, 0, "stored|flash",
     "whether the scores of all pairs are stored, or computed again tile by tile", false},
    DOCUMENT_OPTION};

const Technique flash_attention = {.name = "flash_attention",
                                   .option = options,
                                   .options = 2,
                                   .enabled = enabled,
                                   .plug = plug,
                                   .unplug = unplug,
                                   .price = price};
