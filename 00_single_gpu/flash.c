// flash.c: attention without stored scores. Playbook: "Flash Attention 1-3"; Dao et al. 2022, Dao 2023.
//
// Against 00_single_gpu/transformer.c: scores are computed tile by tile and merged at once into o and the
// log-sum-exp of each row; backward computes them again. All tokens are one chunk of keys here; context
// parallelism (chapter 04) sends the same operation one chunk after another.
//
//     forward    o, lse = merge over tiles of softmax(q k^T / sqrt(d)) v        4 d FLOPs for each pair
//     backward   probs = exp(q k^T / sqrt(d) - lse);  dots = sum(o d_o)         10 d, stored scores: 8 d
//                dscores = probs (d_o v^T - dots)
//
// Kept per block: lse, n a numbers in f32, in place of probs, n a s in storage. In 16-bit storage o, dq, dk
// and dv gather in f32 besides, while they are computed.
// Bytes sent: none.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "training.h"

// What the plug holds between calls: the mask of the last micro-batch's shape, which all layers share.
typedef struct Flash {
    AttentionPositions positions;
    AttentionMask mask;
} Flash;

static DType wide(DType dtype) { return dtype == F64 ? F64 : F32; }

static const AttentionMask *mask_for(Flash *flash, AttentionShape shape) {
    if (flash->positions.b != shape.b || flash->positions.s != shape.s) {
        attention_positions_free(&flash->positions);
        flash->positions = attention_positions_whole(shape.b, shape.s);
        flash->mask = attention_mask(&flash->positions, &flash->positions);
    }
    return &flash->mask;
}

static AttentionHeads heads_of(AttentionShape s) {
    return (AttentionHeads){s.heads, s.kv_heads, s.head_size};
}

// A sum in f32: the tensor itself, or what will be rounded into it once.
static Tensor accumulator(Tensor t) {
    Tensor sum = t.dtype == wide(t.dtype) ? tensor_share(t)
                                          : tensor_new(MEMORY_ACTIVATION, wide(t.dtype), t.dims, t.shape);
    op_fill(sum, 0);
    return sum;
}
static void round_into(Tensor t, Tensor *sum) {
    if (t.dtype != sum->dtype) op_copy(t, *sum);
    tensor_free(sum);
}

// What a block keeps, besides o.
static Tensor *kept_lse(AttentionKept *kept) { return kept->more; }

static void flash_forward(void *context, const MicroBatch *micro, Tensor o, AttentionKept *kept, Tensor q,
                          Tensor k, Tensor v, AttentionShape shape) {
    (void)micro;
    const AttentionMask *mask = mask_for(context, shape);
    Tensor sum = accumulator(o), *lse = kept->more = host_alloc(sizeof *lse);
    *lse = tensor_new(MEMORY_ACTIVATION, wide(q.dtype), SHAPE(shape.b * shape.s, shape.heads));
    op_fill(*lse, -INFINITY);
    op_attention_chunk_forward(sum, *lse, q, k, v, mask, heads_of(shape));
    round_into(o, &sum);
}

static void flash_backward(void *context, const MicroBatch *micro, Tensor dq, Tensor dk, Tensor dv,
                           Tensor d_o, AttentionKept *kept, Tensor q, Tensor k, Tensor v, Tensor o,
                           AttentionShape shape) {
    (void)micro;
    const AttentionMask *mask = mask_for(context, shape);
    Tensor lse = *kept_lse(kept), dots = tensor_like(MEMORY_ACTIVATION, lse);
    Tensor sum_dq = accumulator(dq), sum_dk = accumulator(dk), sum_dv = accumulator(dv);
    op_attention_chunk_dots(dots, o, d_o, heads_of(shape));
    op_attention_chunk_backward(sum_dq, sum_dk, sum_dv, d_o, q, k, v, lse, dots, mask, heads_of(shape));
    round_into(dq, &sum_dq);
    round_into(dk, &sum_dk);
    round_into(dv, &sum_dv);
    tensor_free(&dots);
}

static void flash_drop(void *context, AttentionKept *kept) {
    (void)context;
    if (!kept->more) return;
    tensor_free(kept_lse(kept));
    free(kept->more);
    kept->more = NULL;
}

// Selective recomputation drops what grows with s^2; here that was never kept, and lse comes with o alone.
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
    free(flash);
}

static void price(Price *price, const Model *m, const void *context) {
    (void)context;
    const Config *c = &m->config;
    double lse = (double)(c->micro_batch * c->seq * c->heads) * (double)dtype_size(wide((DType)c->dtype));
    for (int i = 0; i < price->block_rows; i++)
        if (!strcmp(price->block[i].what, "probs") && price->block[i].bytes > 0)
            price->block[i].bytes = lse;
}

static bool on(const Config *config) { return config_number(config, "attention") == 1; }

static const Option attention_option = {
    "attention",
    OPTION_CHOICE,
    NULL,
    "stored",
    0,
    0,
    "stored|flash",
    "whether the scores of all pairs are stored, or computed again tile by tile",
    false};

const Technique flash_attention = {.name = "flash_attention",
                                   .option = &attention_option,
                                   .options = 1,
                                   .on = on,
                                   .plug = plug,
                                   .unplug = unplug,
                                   .price = price};
