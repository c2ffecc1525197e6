// ring_attention.c: keys and values hop from rank to rank. Playbook: "Discovering Ring Attention"; Liu,
// Zaharia, Abbeel 2023.
//
// Changes from 00_single_gpu/flash.c: a rank has the queries, keys and values of its own tokens. In hop h
// rank r computes with the keys and values of rank r - h, meanwhile passes them on to rank r + 1, and merges
// the result into o by log-sum-exp. After N hops each query has seen all keys, and no rank has held them all:
//
//     forward     hop 0      hop 1      hop 2      hop 3        (whose K/V; N = 4)
//       rank 0    0          3          2          1            compute, and in flight: the next hop's K/V
//       rank 1    1          0          3          2
//     backward    K/V hop again; dK/dV of rank j start on rank j + 1 in hop 1 and add up on the way in f32:
//       rank 0    dkv 0      dkv 3 ->   dkv 2 ->   dkv 1 ->     the last hop ends on rank j, which adds its
//       rank 1    dkv 1      dkv 0 ->   dkv 3 ->   dkv 2 ->     own share, of hop 0
//
// With contiguous tokens and a causal mask, rank 0 computes in hop 0 only, rank N - 1 in every hop.
// Bytes sent per rank, layer and micro-batch, C = b s / N x 2 kv d elements of e bytes in a chunk: forward
// (N - 1) C e, backward (N - 1) C (e + 4) (f64: e + 8), in N - 1 and 2 (N - 1) calls, to one neighbour.
// Memory per rank: two chunks of K/V besides its own; in backward also three of dK/dV in f32. (From 4 ranks
// on; fewer hold less, as a chunk is not sent on in the last hop.)
// Run: build/04_context_parallel/ring_attention     (--ranks 8, --layout striped, --tp 2 --sp …)
// Last line: PASS ring_attention: ranks that shard every sequence reproduce the single-device step …
#include <math.h>
#include <stdlib.h>

#include "context_parallel.h"
#include "tensor/rng.h"

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

// Sends `now` to the next rank and receives `next`, a new chunk of `rows` rows, from the one before.
static Request *hop(KeysValues *next, KeysValues now, int64_t rows, Group cp) {
    int after = (cp.rank + 1) % cp.size, before = (cp.rank + cp.size - 1) % cp.size;
    *next = chunk_new(MEMORY_COMMUNICATION, now.k.dtype, rows, now.k);
    const Transfer transfers[] = {
        {true, after, now.k}, {true, after, now.v}, {false, before, next->k}, {false, before, next->v}};
    return comm_transfers(transfers, 4, cp);
}

// q, o (b own, a d) and k, v (b own, kv d) of this rank's tokens; o =. Keeps lse (b own, a). A chunk alone
// gives o', normalized over its own keys, and lse' = log of the sum of their e^score. It is merged into o,
// lse:
//     new = log(e^lse + e^lse')      o = e^(lse - new) o + e^(lse' - new) o'      lse = new
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

// dK/dV in flight: those that this rank has just added to, on their way to the next rank, and those that the
// rank before sends.
typedef struct Returning {
    KeysValues sent, coming;
    Request *request;
} Returning;

// Waits for the gradients that the rank before has sent, and adds them to sums.
static void add_returned(KeysValues sums, Returning *returning) {
    comm_wait(returning->request);
    op_accumulate(sums.k, returning->coming.k);
    op_accumulate(sums.v, returning->coming.v);
    chunk_free(&returning->coming);
    chunk_free(&returning->sent);
    *returning = (Returning){0};
}

// dq, dk, dv =, with the shapes of q, k, v.
//   forward: o, lse = merge over hops of softmax(q k^T / sqrt(d)) v
static void ring_backward(void *context, const MicroBatch *micro, Tensor dq, Tensor dk, Tensor dv,
                          Tensor d_o, AttentionKept *kept, Tensor q, Tensor k, Tensor v, Tensor o,
                          AttentionShape shape) {
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

void *ring_plug(Model *model) {
    ContextParallel *c = context_plug(model, ring_forward);
    model->sockets.attention.backward = ring_backward;
    return c;
}

// ---- the record ----

void ring_price(Price *price, const Model *m, const void *context) {
    const ContextParallel *c = context;
    Group cp = c->cp;
    const Config *config = &m->config;
    double backwards = price->backwards * (double)config->layers,
           forwards = price->attentions * (double)config->layers;
    double e = (double)dtype_size((DType)config->dtype),
           sum = (double)dtype_size(dtype_full(config->dtype));
    double column = (double)(2 * context_key_columns(m)) * (double)config->micro_batch;  // K/V of a token
    // K/V: all chunks except the next rank's, which ends here. dK/dV: all except this rank's own.
    double keys = (double)(c->s - c->layout->count(c->s, cp.size, (cp.rank + 1) % cp.size)) * column;
    double gradients = (double)(c->s - c->own) * column;
    price_sent(price, "transfers", (forwards + 2 * backwards) * (cp.size - 1),
               (forwards + backwards) * keys * e + backwards * gradients * sum, cp);
    context_price_kept(price, m, c);
    context_price_positions(price, m, c);
}

static bool enabled(const Config *config) { return context_on(config, CONTEXT_RING); }

const Technique ring_attention = {.name = "ring_attention",
                                  .option = context_options,
                                  .options = CONTEXT_OPTIONS,
                                  .asked = "--cp",
                                  .axes = 1u << AXIS_CP,
                                  .enabled = enabled,
                                  .check = context_check,
                                  .plug = ring_plug,
                                  .unplug = context_unplug,
                                  .price = ring_price};

ContextCost ring_formula(const ContextSizes *z) {
    double chunk = z->tokens * 2 * z->kv * z->size, hops = z->ranks - 1;
    // Besides its own: K/V of this hop and of the next; dK/dV of this hop, those being sent, those to come.
    double ahead = hops > 1 ? 2 : hops, ahead_last = hops > 2 ? 2 : hops > 0 ? 1 : 0;
    double returning = hops > 1 ? 3 : 2 * hops;
    return (ContextCost){.bytes = {hops * chunk * z->e, hops * chunk * (z->e + z->sum)},
                         .held = {ahead * chunk * z->e, (ahead_last * z->e + returning * z->sum) * chunk}};
}

#ifndef NO_MAIN

// Random values, exact in bf16, and the same for a token whichever rank has it. (n, columns)
static Tensor random_rows(const Model *m, const MicroBatch *micro, int which, int64_t columns) {
    const Sockets *sockets = &m->sockets;
    double *values = host_alloc((size_t)(micro->s * columns) * sizeof *values);
    for (int64_t i = 0; i < micro->s * columns; i++) {
        int64_t token = sockets->tokens.position(sockets->tokens.context, m->config.seq, i / columns);
        double x = rng_normal(7, (uint64_t)which, (uint64_t)(token * columns + i % columns));
        values[i] = f32_from_bf16(bf16_from_f32((float)x));
    }
    Tensor t = tensor_new(MEMORY_ACTIVATION, (DType)m->config.dtype, SHAPE(micro->s, columns));
    tensor_from_doubles(t, values);
    free(values);
    return t;
}

// The output of attention alone for this rank's tokens: (own, a d), which the caller frees.
static double *output_of(Mesh mesh, const Config *config, DType dtype, int64_t *count) {
    Config c = *config;
    c.dtype = dtype;
    c.layers = c.micro_batch = 1;
    Trainer *t = trainer_new(&c, mesh, (const Technique *[]){&ring_attention, NULL});
    const Sockets *sockets = &t->model->sockets;
    Batch batch = batch_new(t, 0);
    MicroBatch micro = micro_batch_new(t->model, 0, 1, batch.tokens, batch.targets, 1);
    AttentionShape shape = {1, micro.s, c.heads, c.kv_heads, config_head_size(&c)};
    Tensor q = random_rows(t->model, &micro, 0, c.heads * shape.head_size),
           k = random_rows(t->model, &micro, 1, c.kv_heads * shape.head_size),
           v = random_rows(t->model, &micro, 2, c.kv_heads * shape.head_size),
           o = tensor_like(MEMORY_ACTIVATION, q);
    AttentionKept kept = {{0}, NULL};
    sockets->attention.forward(sockets->attention.context, &micro, o, &kept, q, k, v, shape);
    *count = tensor_count(o);
    double *values = host_alloc((size_t)*count * sizeof *values);
    tensor_to_doubles(values, o);
    sockets->attention.drop(sockets->attention.context, &kept);
    Tensor *const all[] = {&q, &k, &v, &o};
    for (int i = 0; i < 4; i++) tensor_free(all[i]);
    micro_batch_free(t->model, &micro);
    batch_free(&batch);
    trainer_free(t);
    return values;
}

static double squared_error(const double *x, const double *exact, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += (x[i] - exact[i]) * (x[i] - exact[i]);
    return sum;
}

// Chunks merge in f32, so an output is rounded once, however many ranks there are: compares the error against
// f64 of each rank's tokens with that of the same tokens on one device.
static void error_of_16_bits(const Config *config) {
    Mesh ring = mesh_new((MeshShape){.cp = comm_ranks()});
    Config c = *config;
    c.dp = c.tp = 1;
    config_set(&c, "context", CONTEXT_RING);
    config_set(&c, "layout", 1);
    config_set(&c, "documents", -1);
    Config alone = c;
    alone.cp = 1;
    int64_t all, own, first = 0;
    double *exact = output_of(mesh_single(), &alone, F64, &all);
    double *one = output_of(mesh_single(), &alone, BF16, &all), *many = output_of(ring, &c, BF16, &own);
    for (int i = 0; i < ring.cp.rank; i++)
        first += sequence_contiguous.count(c.seq, ring.cp.size, i) * c.heads * config_head_size(&c);
    double error = squared_error(many, exact + first, own),
           alone_error = squared_error(one + first, exact + first, own);
    // Both are 0 if a rank has only the first token, which sees one key.
    double growth = error == alone_error ? 1 : sqrt(error / alone_error);
    growth = comm_max(growth, ring.cp);
    say("\nattention in bf16 against f64: on %d rank%s its error is %.2f times that of one, expected 1.5 "
        "or less",
        ring.cp.size, plural(ring.cp.size), growth);
    report_number("bf16", "error of cp over that of cp 1", growth, "");
    // Sums of chunks are f32, so it is 1; if they were bf16, it would grow with the number of chunks.
    report_that(growth <= 1.5,
                "attention in bf16 against f64: on %d ranks its error is %.2f times that of one, expected "
                "1.5 or less: are chunks merged in bf16?",
                ring.cp.size, growth);
    free(exact);
    free(one);
    free(many);
}

// With this many tokens computing takes longer than a hop, and as all ranks are equally busy, none waits. If
// links reach a smaller share of their peak than compute does, it takes as many times more tokens.
static void hops_hide(const Config *config) {
    Mesh ring = mesh_new((MeshShape){.cp = comm_ranks()});
    double slower = config->compute_efficiency / config->network_efficiency;
    int64_t tokens = 16384 * (slower > 1 ? (int64_t)ceil(slower) : 1);
    Config c = context_llama(CONTEXT_ZIGZAG, 1, tokens * ring.cp.size, ring.cp.size);
    clock_set_nodes(ring.cp.size);  // all in one node
    ContextCost cost = context_attention_cost(ring, &c);
    clock_set_nodes((int)config->gpus_per_node);
    double exposed = comm_max(cost.exposed[FORWARD], ring.world);
    say("\nforward of a zig-zag ring, %ld tokens on each rank: it takes %.3f ms, and waits %.3f ms for "
        "hops, expected 0",
        tokens, 1e3 * comm_max(cost.seconds[FORWARD], ring.world), 1e3 * exposed);
    report_that(
        exposed < 1e-9,
        "the forward of a zig-zag ring with %ld tokens on each rank waits %.3f ms for hops, expected "
        "0: is a hop in flight while its rank computes with the chunk before?",
        tokens, 1e3 * exposed);
}

static void more(Mesh mesh, const Config *config) {
    context_check_cost(mesh, CONTEXT_RING, ring_formula);
    hops_hide(config);
    error_of_16_bits(config);
}

// --context may choose another method.
static const char *shown(const Config *config) {
    return context_on(config, CONTEXT_RING) ? base_program()
                                            : context_method_name[(int)config_number(config, "context")];
}

int main(int argc, char **argv) {
    const Program program = {
        .purpose = "Ring attention: keys and values hop from rank to rank, and no rank ever has them all.",
        .claim = "ranks that shard every sequence reproduce the single-device step",
        .defaults = CONTEXT_MODEL "heads=6 seq=61 context=ring",
        .natural = 4,
        .axis = AXIS_CP,
        .techniques = context_layouts,
        .option = &zero_option,
        .options = 1,
        .shown = shown,
        .more = more};
    return program_main(argc, argv, &program);
}
#endif
