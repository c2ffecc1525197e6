// ulysses.c: all-to-alls turn a shard of the tokens into a shard of the heads, and back. Jacobs et al. 2023
// (DeepSpeed Ulysses); not in the playbook.
//
// Changes from ring_attention.c: attention processes heads one by one. One all-to-all turns all heads of a
// rank's tokens into all tokens of a rank's heads, where attention is as on one device; another returns o:
//
//     (b, s / N, a d) --[all-to-all]--> (b, s, a d / N) -- attention -- o --[all-to-all]--> (b, s / N, a d)
//
// All ranks compute equally much in any layout of tokens: causal masks need no balancing. But N must divide
// the heads. With fewer key/value heads than ranks, several ranks get the same one, each for different query
// heads, and the parts of dK and dV are summed in f32 on the rank that has the tokens. Backward sends q, k
// and v again, which blocks keep by tokens (DeepSpeed keeps them by heads: it sends as much as in forward),
// and besides d_o one number per token and head: sum(o d_o).
// Bytes sent per rank, layer and micro-batch, (N - 1) / N times the following; n = b s / N, kv' = max(kv, N):
//     forward     n d e (2 a + 2 kv')                              e bytes an element, 4 a sum (f64: 8)
//     backward    n (d e (3 a + 4 kv') + 4 a + 2 d (4 - e) kv')    the last term only if heads have copies
// For a given n this grows with (N - 1) / N up to N = kv, and the ring's (N - 1) n 2 kv d e with N - 1;
// beyond, copies of K and V are sent as well. Messages: 4 b all-to-alls forward and 8 b backward, each waited
// for at once.
// Memory per rank: a second copy of q, k, v and o while attention computes with them; in backward of q, k, v
// and d_o, with f32 sums of dq, dk and dv.
// Run: build/04_context_parallel/ulysses     (--ranks 2, --heads 8 --kv-heads 2, --tp 2, --documents 10 …)
// Last line: PASS ulysses: ranks that split the heads reproduce the single-device step …
#include <stdlib.h>
#include <string.h>

#include "context_parallel.h"

// ---- the technique: from tokens to heads, and back ----

// Columns of x that a rank has after the all-to-all: those of its heads, or of one head that several ranks
// have.
static int64_t own_columns(const ContextParallel *c, int64_t columns, int64_t head_size) {
    int64_t heads = columns / head_size;
    return heads >= c->cp.size ? columns / c->cp.size : head_size;
}

// The elements that go to each rank, or come from it. The caller frees the result.
static int64_t *counts_of(const ContextParallel *c, int64_t columns, bool tokens_of_each) {
    int64_t *counts = host_alloc((size_t)c->cp.size * sizeof *counts);
    for (int i = 0; i < c->cp.size; i++)
        counts[i] = (tokens_of_each ? context_rows(c, 1, i) : c->own) * columns;
    return counts;
}

// x (b own, all columns of this rank's tokens) -> new (b s, w), all tokens, rank after rank. Sample by
// sample.
static Tensor to_heads(const ContextParallel *c, int64_t b, Tensor x, int64_t w) {
    int64_t *sent = counts_of(c, w, false), *received = counts_of(c, w, true);
    Tensor y = tensor_new(MEMORY_COMMUNICATION, x.dtype, SHAPE(b * c->s, w)),
           parts = tensor_new(MEMORY_COMMUNICATION, x.dtype, SHAPE(c->cp.size, c->own, w));
    for (int64_t i = 0; i < b; i++) {
        op_split_columns(parts, tensor_rows_of(x, i * c->own, c->own));
        comm_wait(comm_all_to_all(tensor_rows_of(y, i * c->s, c->s), received, parts, sent, c->cp));
    }
    tensor_free(&parts);
    free(sent);
    free(received);
    return y;
}

// The way back: y (b own, all columns) from x (b s, w), which is freed; copies of a head are summed.
static void to_tokens(const ContextParallel *c, int64_t b, Tensor y, Tensor *x) {
    int64_t w = tensor_columns(*x), *sent = counts_of(c, w, true), *received = counts_of(c, w, false);
    Tensor parts = tensor_new(MEMORY_COMMUNICATION, x->dtype, SHAPE(c->cp.size, c->own, w));
    for (int64_t i = 0; i < b; i++) {
        comm_wait(comm_all_to_all(parts, received, tensor_rows_of(*x, i * c->s, c->s), sent, c->cp));
        op_join_columns(tensor_rows_of(y, i * c->own, c->own), parts);
    }
    tensor_free(&parts);
    tensor_free(x);
    free(sent);
    free(received);
}

// The mask of all tokens against themselves, in the order in which the all-to-all delivers them.
static const AttentionMask *mask_of_all(ContextParallel *c, const MicroBatch *micro) {
    if (!mask_key_changes(&c->key, micro, c->s)) return c->mask;
    attention_positions_free(c->tokens);
    int64_t n = micro->b * c->s;
    int32_t *position = host_alloc((size_t)(2 * n) * sizeof *position), *document = position + n;
    for (int64_t sample = 0, at = 0; sample < micro->b; sample++)
        for (int i = 0; i < c->cp.size; at += context_rows(c, 1, i++)) {
            c->layout->tokens(c->s, c->cp.size, i, position + at);
            if (micro->documents)
                sequence_take(c->layout, c->cp.size, i, 1, c->s, document + at,
                              micro->documents + sample * c->s);
        }
    *c->tokens = attention_positions_new(micro->b, c->s, position, micro->documents ? document : NULL);
    *c->mask = attention_mask(c->tokens, c->tokens);
    free(position);
    return c->mask;
}

// Keys, values and queries of all tokens and this rank's heads.
typedef struct Heads {
    Tensor q, k, v;
    AttentionHeads shape;
} Heads;

static Heads heads_new(const ContextParallel *c, int64_t b, Tensor q, Tensor k, Tensor v, int64_t d) {
    int64_t w = own_columns(c, tensor_columns(q), d), kv_w = own_columns(c, tensor_columns(k), d);
    return (Heads){
        to_heads(c, b, q, w), to_heads(c, b, k, kv_w), to_heads(c, b, v, kv_w), {w / d, kv_w / d, d}};
}
static void heads_free(Heads *heads) {
    tensor_free(&heads->q);
    tensor_free(&heads->k);
    tensor_free(&heads->v);
}

// q, o (b own, a d) and k, v (b own, kv d) of this rank's tokens; o =. Keeps lse (b s, a / N), of its heads.
static void ulysses_forward(void *context, const MicroBatch *micro, Tensor o, AttentionKept *kept, Tensor q,
                            Tensor k, Tensor v, AttentionShape shape) {
    ContextParallel *c = context;
    const AttentionMask *mask = mask_of_all(c, micro);
    Heads own = heads_new(c, micro->b, q, k, v, shape.head_size);
    Tensor all = tensor_like(MEMORY_COMMUNICATION, own.q), sum = flash_sum(all),
           lse = flash_new_lse(kept, q.dtype, micro->b * c->s, own.shape.heads);
    op_attention_chunk_forward(sum, lse, own.q, own.k, own.v, mask, own.shape);
    flash_round(all, &sum);
    heads_free(&own);
    to_tokens(c, micro->b, o, &all);
}

// Returns a gradient to the ranks of its tokens: rounded first, or last if copies of a head are summed.
static void return_sum(const ContextParallel *c, int64_t b, Tensor dk, Tensor *sum, bool copies) {
    if (copies) {
        Tensor wide = dk.dtype == sum->dtype ? tensor_share(dk)
                                             : tensor_new(MEMORY_ACTIVATION, sum->dtype, dk.dims, dk.shape);
        to_tokens(c, b, wide, sum);
        flash_round(dk, &wide);
        return;
    }
    Tensor rounded = tensor_new(MEMORY_COMMUNICATION, dk.dtype, sum->dims, sum->shape);
    op_copy(rounded, *sum);
    tensor_free(sum);
    to_tokens(c, b, dk, &rounded);
}

static Tensor zeros(Tensor like) {
    Tensor t = tensor_new(MEMORY_COMMUNICATION, dtype_full(like.dtype), like.dims, like.shape);
    op_fill(t, 0);
    return t;
}

// dq, dk, dv =, with the shapes of q, k, v.
static void ulysses_backward(void *context, const MicroBatch *micro, Tensor dq, Tensor dk, Tensor dv,
                             Tensor d_o, AttentionKept *kept, Tensor q, Tensor k, Tensor v, Tensor o,
                             AttentionShape shape) {
    ContextParallel *c = context;
    const AttentionMask *mask = mask_of_all(c, micro);
    int64_t b = micro->b;
    Tensor dots = tensor_new(MEMORY_ACTIVATION, dtype_full(q.dtype), SHAPE(tensor_rows(q), shape.heads));
    op_attention_chunk_dots(dots, o, d_o, flash_heads(shape));
    Heads own = heads_new(c, b, q, k, v, shape.head_size);
    Tensor all_dots = to_heads(c, b, dots, own.shape.heads),
           all_d_o = to_heads(c, b, d_o, tensor_columns(own.q));
    Tensor sum_dq = zeros(own.q), sum_dk = zeros(own.k), sum_dv = zeros(own.v);
    op_attention_chunk_backward(sum_dq, sum_dk, sum_dv, all_d_o, own.q, own.k, own.v, flash_lse(kept),
                                all_dots, mask, own.shape);
    heads_free(&own);
    tensor_free(&all_dots);
    tensor_free(&all_d_o);
    tensor_free(&dots);
    bool copies = shape.kv_heads < c->cp.size;
    return_sum(c, b, dq, &sum_dq, false);
    return_sum(c, b, dk, &sum_dk, copies);
    return_sum(c, b, dv, &sum_dv, copies);
}

static void *plug(Model *model) {
    ContextParallel *c = context_plug(model, ulysses_forward);
    model->sockets.attention.backward = ulysses_backward;
    return c;
}

// ---- the record ----

static int64_t kv_of_rank(const Config *c) { return c->kv_heads >= c->tp ? c->kv_heads / c->tp : 1; }

static bool splits_heads(const Config *c, int64_t cp) {
    int64_t kv = kv_of_rank(c);
    return c->heads / c->tp % cp == 0 && (kv % cp == 0 || cp % kv == 0);
}

// No --context is named as what would fit: the program `ulysses` has no other.
static void check(const Config *c) {
    context_check(c);
    const char *fitting = config_degrees(c, c->seq, c->dp * c->cp, splits_heads);
    CHECK(c->heads / c->tp % c->cp == 0,
          "--context ulysses splits the heads: --cp %ld x --tp %ld must divide --heads %ld; --cp %s would "
          "fit, or ring attention, which splits none",
          c->cp, c->tp, c->heads, fitting);
    CHECK(splits_heads(c, c->cp),
          "--context ulysses: --cp %ld and the %ld key/value heads on each rank of --tp: one must divide the "
          "other; --cp %s would fit, or ring attention, which splits none",
          c->cp, kv_of_rank(c), fitting);
}

static void price(Price *price, const Model *m, const void *context) {
    const ContextParallel *c = context;
    const Config *config = &m->config;
    DType dtype = (DType)config->dtype, sum = dtype_full(dtype);
    double b = (double)config->micro_batch, d = (double)config_head_size(config),
           e = (double)dtype_size(dtype);
    int64_t head_size = config_head_size(config), columns = context_key_columns(m);
    double heads = (double)(config->heads / m->mesh.tp.size) / c->cp.size,
           kv = (double)(own_columns(c, columns, head_size) / head_size);
    bool copies = columns / head_size < c->cp.size;
    // Elements sent per column of a rank's heads: on the way to heads this rank's tokens, on the way back
    // those of the others.
    double out = b * (double)c->own * (c->cp.size - 1), back = b * (double)(c->s - c->own);
    double forwards = price->attentions * (double)config->layers,
           backwards = price->backwards * (double)config->layers;
    price_sent(price, "all_to_all", b * (4 * forwards + 8 * backwards),
               forwards * d * e * (out * (heads + 2 * kv) + back * heads) +
                   backwards * (out * (d * e * (2 * heads + 2 * kv) + heads * (double)dtype_size(sum)) +
                                back * d * (heads * e + 2 * kv * (copies ? (double)dtype_size(sum) : e))),
               c->cp);
    context_price_kept(price, m, c);
    // lse has all tokens of this rank's heads, not all heads of its tokens.
    for (int i = 0; i < price->block_rows; i++)
        if (!strcmp(price->block[i].what, "probs"))
            price->block[i].bytes *= (double)c->s / (double)(c->own * c->cp.size);
    flash_price_positions(price, config->micro_batch, c->s);
}

static bool enabled(const Config *config) { return context_on(config, CONTEXT_ULYSSES); }

const Technique ulysses = {.name = "ulysses",
                           .option = context_options,
                           .options = CONTEXT_OPTIONS,
                           .asked = "--cp",
                           .axes = 1u << AXIS_CP,
                           .enabled = enabled,
                           .check = check,
                           .plug = plug,
                           .unplug = context_unplug,
                           .price = price};

#ifndef NO_MAIN
static ContextCost formula(const ContextSizes *z) {
    double share = (z->ranks - 1) / z->ranks * z->tokens, d = z->size;
    double back = z->kv < z->ranks ? z->sum : z->e;  // of dK and dV
    double own = z->tokens * d * z->e * (2 * z->q + 2 * z->kv_here);
    double sums = z->tokens * d * z->sum * (z->q + 2 * z->kv_here), dots = z->tokens * z->q * z->sum;
    return (ContextCost){
        .bytes = {share * d * z->e * (2 * z->q + 2 * z->kv_here),
                  share *
                      (d * (z->e * (3 * z->q + 2 * z->kv_here) + back * 2 * z->kv_here) + z->q * z->sum)},
        .held = {own, own + sums + dots}};
}

static void plan(Mesh mesh, const Config *config) {
    (void)mesh;
    context_only(config, CONTEXT_ULYSSES);
}

static void more(Mesh mesh, const Config *config) {
    (void)config;
    if (context_fits(mesh.world.size, CONTEXT_ULYSSES)) context_check_cost(mesh, CONTEXT_ULYSSES, formula);
}

int main(int argc, char **argv) {
    const Program program = {
        .purpose = "Ulysses: all-to-alls turn a part of the tokens into a part of the heads, and back.",
        .claim = "ranks that split the heads reproduce the single-device step",
        .defaults = CONTEXT_MODEL "heads=8 seq=61 context=ulysses",
        .natural = 4,
        .axis = AXIS_CP,
        .before = {"all_gather_attention", NULL, "context", CONTEXT_ALL_GATHER},
        .techniques = context_layouts,
        .option = &zero_option,
        .options = 1,
        .plan = plan,
        .more = more};
    return program_main(argc, argv, &program);
}
#endif
