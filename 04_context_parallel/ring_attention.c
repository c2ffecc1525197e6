// ring_attention.c: keys and values hop from rank to rank. Playbook: "Discovering Ring Attention"; Liu, Zaharia,
// Abbeel 2023.
//
// Against 00_single_gpu/flash.c: a rank has the queries, keys and values of its own tokens. In hop h it computes
// with the keys and values of rank r - h, which it passes on to rank r + 1 at the same time, and merges the
// result into o by log-sum-exp. After N hops each query has seen all keys; nobody ever held them all:
//
//     forward     hop 0      hop 1      hop 2      hop 3        (whose K/V; N = 4)
//       rank 0    0          3          2          1            compute, and in flight: the next hop's K/V
//       rank 1    1          0          3          2
//     backward    K/V hop again; dK/dV of rank j begin on rank j + 1 in hop 1, and gather on their way, in f32:
//       rank 0    dkv 0      dkv 3 ->   dkv 2 ->   dkv 1 ->     the last hop brings home what the others found;
//       rank 1    dkv 1      dkv 0 ->   dkv 3 ->   dkv 2 ->     one's own share, hop 0, has stayed there
//
// Contiguous tokens and a causal mask: rank 0 computes in hop 0 alone, rank N - 1 in each
// (zigzag_ring_attention.c balances that).
//
// Bytes sent per rank, layer and micro-batch, C = b s / N x 2 kv d elements in a chunk: forward (N - 1) C e,
// backward (N - 1) C (e + 4) (f64: e + 8), in N - 1 and 2 (N - 1) messages to one neighbour.
// Memory per rank: two chunks of K/V besides its own; in backward two of dK/dV, too.
// Run: build/04_context_parallel/ring_attention     (--ranks 8, --layout striped, --tp 2 --sp, --documents 10 …)
// Last line: PASS ring_attention: ranks that share every sequence make the step of one device …
#include "context_parallel.h"

// ---- the technique ----

// Keys and values of a rank's tokens, or their gradients.
typedef struct KeysValues {
    Tensor k, v;
} KeysValues;

static KeysValues chunk_new(MemoryKind kind, DType dtype, int64_t rows, Tensor like) {
    Tensor k = tensor_new(kind, dtype, SHAPE(rows, tensor_columns(like)));
    return (KeysValues){k, tensor_like(kind, k)};
}
static void chunk_free(KeysValues *chunk) {
    tensor_free(&chunk->k);
    tensor_free(&chunk->v);
}

// Sends `now` to the next rank and receives `next`, new with `rows`, from the one before.
static Request *hop(KeysValues *next, KeysValues now, int64_t rows, Group cp) {
    int after = (cp.rank + 1) % cp.size, before = (cp.rank + cp.size - 1) % cp.size;
    *next = chunk_new(MEMORY_COMMUNICATION, now.k.dtype, rows, now.k);
    const Transfer transfers[] = {
        {true, after, now.k}, {true, after, now.v}, {false, before, next->k}, {false, before, next->v}};
    return comm_transfers(transfers, 4, cp);
}

static void ring_forward(void *context, const MicroBatch *micro, Tensor o, AttentionKept *kept, Tensor q,
                         Tensor k, Tensor v, AttentionShape shape) {
    ContextParallel *c = context;
    Group cp = c->cp;
    context_masks(c, micro);
    Tensor sum = flash_sum(o), lse = flash_new_lse(kept, q.dtype, tensor_rows(q), shape.heads);
    KeysValues now = {tensor_share(k), tensor_share(v)};
    for (int h = 0; h < cp.size; h++) {
        const AttentionMask *mask = &c->mask[hop_owner(cp.size, cp.rank, h)];
        KeysValues next = {{0}, {0}};
        Request *coming = NULL;
        if (h + 1 < cp.size)
            coming = hop(&next, now, context_rows(c, micro->b, hop_owner(cp.size, cp.rank, h + 1)), cp);
        if (mask->pairs > 0)
            op_attention_chunk_forward(sum, lse, q, now.k, now.v, mask, flash_heads(shape));
        if (coming) comm_wait(coming);
        chunk_free(&now);
        now = next;
    }
    flash_round(o, &sum);
}

// dK/dV that gather on their way: those that this rank has added to last, and those of the rank before, which come.
typedef struct Returning {
    KeysValues sent, coming;
    Request *request;
} Returning;

// The gradients of the rank before have come: += into `sums`.
static void add_returned(KeysValues sums, Returning *returning) {
    comm_wait(returning->request);
    op_accumulate(sums.k, returning->coming.k);
    op_accumulate(sums.v, returning->coming.v);
    chunk_free(&returning->coming);
    chunk_free(&returning->sent);
    *returning = (Returning){0};
}

//   forward: o, lse = merge over hops of softmax(q k^T / sqrt(d)) v
static void ring_backward(void *context, const MicroBatch *micro, Tensor dq, Tensor dk, Tensor dv, Tensor d_o,
                          AttentionKept *kept, Tensor q, Tensor k, Tensor v, Tensor o, AttentionShape shape) {
    ContextParallel *c = context;
    Group cp = c->cp;
    context_masks(c, micro);
    AttentionHeads heads = flash_heads(shape);
    Tensor lse = flash_lse(kept), dots = tensor_like(MEMORY_ACTIVATION, lse), sum_dq = flash_sum(dq);
    op_attention_chunk_dots(dots, o, d_o, heads);
    KeysValues home = {flash_sum(dk), flash_sum(dv)}, now = {tensor_share(k), tensor_share(v)};
    Returning returning = {{{0}, {0}}, {{0}, {0}}, NULL};
    for (int h = 0; h < cp.size; h++) {
        int owner = hop_owner(cp.size, cp.rank, h), next_owner = hop_owner(cp.size, cp.rank, h + 1);
        KeysValues next = {{0}, {0}}, sums = home;
        Request *coming = NULL;
        if (h + 1 < cp.size) coming = hop(&next, now, context_rows(c, micro->b, next_owner), cp);
        if (h > 0) {
            sums = chunk_new(MEMORY_COMMUNICATION, home.k.dtype, tensor_rows(now.k), home.k);
            op_fill(sums.k, 0);
            op_fill(sums.v, 0);
        }
        if (c->mask[owner].pairs > 0)
            op_attention_chunk_backward(sum_dq, sums.k, sums.v, d_o, q, now.k, now.v, lse, dots,
                                        &c->mask[owner], heads);
        if (returning.request) add_returned(sums, &returning);
        if (h > 0) {
            returning.sent = sums;
            returning.request = hop(&returning.coming, sums, context_rows(c, micro->b, next_owner), cp);
        }
        if (coming) comm_wait(coming);
        chunk_free(&now);
        now = next;
    }
    if (returning.request) add_returned(home, &returning);
    flash_round(dq, &sum_dq);
    flash_round(dk, &home.k);
    flash_round(dv, &home.v);
    tensor_free(&dots);
}

static void ring_again(void *context, const MicroBatch *micro, AttentionKept *kept, Tensor q, Tensor k,
                       Tensor v, AttentionShape shape) {
    context_again(ring_forward, context, micro, kept, q, k, v, shape);
}

void *ring_plug(Model *model) {
    ContextParallel *c = context_plug(model);
    model->sockets.attention.forward = ring_forward;
    model->sockets.attention.backward = ring_backward;
    model->sockets.attention.again = ring_again;
    return c;
}

// ---- the record ----

void ring_price(Price *price, const Model *m, const void *context) {
    const ContextParallel *c = context;
    Group cp = c->cp;
    const Config *config = &m->config;
    double backwards = price->backwards * (double)config->layers,
           forwards = price->attentions * (double)config->layers;
    double e = (double)dtype_size((DType)config->dtype), sum = (double)dtype_size(flash_sum_dtype(config->dtype));
    double column = (double)(2 * context_key_columns(m)) * (double)config->micro_batch;  // K/V of a token
    // K/V: all chunks but the one that ends here, the next rank's. dK/dV: all but one's own.
    double keys = (double)(c->s - c->layout->count(c->s, cp.size, (cp.rank + 1) % cp.size)) * column;
    double gradients = (double)(c->s - c->own) * column;
    price_sent(price, "transfers", (forwards + 2 * backwards) * (cp.size - 1),
               (forwards + backwards) * keys * e + backwards * gradients * sum);
    context_price_kept(price, m, c);
}

static bool on(const Config *config) { return context_on(config, CONTEXT_RING); }

const Technique ring_attention = {.name = "ring_attention",
                                  .option = context_options,
                                  .options = CONTEXT_OPTIONS,
                                  .axes = 1u << AXIS_CP,
                                  .on = on,
                                  .check = context_check,
                                  .plug = ring_plug,
                                  .unplug = context_unplug,
                                  .price = ring_price};

#ifndef NO_MAIN

int main(int argc, char **argv) {
    const Program program = {
        .purpose = "Ring attention: keys and values hop from rank to rank, and no rank ever has them all.",
        .claim = "ranks that share every sequence make the step of one device",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=88 seq=61 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 cp=0 bucket-mb=0.1 context=ring",
        .natural = 4,
        .techniques = context_layouts,
        .option = context_layout_options,
        .options = CONTEXT_LAYOUT_OPTIONS};
    return program_main(argc, argv, &program);
}
#endif
