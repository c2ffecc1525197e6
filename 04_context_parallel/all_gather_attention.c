// all_gather_attention.c: one all-gather of all keys and values before attention. Playbook: "Zig-Zag Ring
// Attention", the first of its two ways, not overlapped; Llama 3 (Grattafiori et al. 2024, section 3.3.2).
//
// Changes from ring_attention.c: before attention one all-gather brings every rank all keys and values. There
// are no hops to wait for, any mask can be computed at once, and with grouped-query heads K/V are few bytes
// compared with what attention computes. The price is memory: all N chunks instead of two.
//
//     forward     all-gather K, V (e);  o = attention of own queries over all keys
//     backward    all-gather K, V (e);  dQ;  dK, dV of all tokens, partial (f32);  reduce-scatter these
//
// dK and dV are partial: each rank has what its own queries contribute to all keys. The layout is zig-zag.
//
// Bytes sent per rank, layer and micro-batch, C = b s / N x 2 kv d elements of e bytes: forward (N - 1) C e,
// backward (N - 1) C (e + 4) (f64: e + 8), as with the ring, but in 2 and 4 calls that nothing hides.
// Memory per rank: N chunks of K/V, where a ring holds 2 besides its own; in backward also N of dK/dV in f32.
// Run: build/04_context_parallel/all_gather_attention   (--ranks 8 --memory-svg FILE, --tp 2 …)
// Last line: PASS all_gather_attention: ranks that gather all keys reproduce the single-device step …
#include <stdlib.h>

#include "context_parallel.h"

// ---- the technique ----

// Elements of each rank's part, as collectives take them. The caller frees them.
static int64_t *part_counts(const ContextParallel *c, int64_t b, int64_t columns) {
    int64_t *counts = host_alloc((size_t)c->cp.size * sizeof *counts);
    for (int i = 0; i < c->cp.size; i++) counts[i] = context_rows(c, b, i) * columns;
    return counts;
}

// All ranks' keys and values, one rank's after the other's: (b s, kv d) new.
static void gather(const ContextParallel *c, int64_t b, Tensor *all_k, Tensor *all_v, Tensor k, Tensor v) {
    int64_t columns = tensor_columns(k), *counts = part_counts(c, b, columns);
    *all_k = tensor_new(MEMORY_COMMUNICATION, k.dtype, SHAPE(b * c->s, columns));
    *all_v = tensor_like(MEMORY_COMMUNICATION, *all_k);
    Request *both[] = {comm_all_gather(*all_k, k, counts, c->cp),
                       comm_all_gather(*all_v, v, counts, c->cp)};
    comm_wait_all(both, 2);
    free(counts);
}

// q, o (b own, a d) and k, v (b own, kv d) of this rank's tokens; o =. Keeps lse (b own, a).
static void gather_forward(void *context, const MicroBatch *micro, Tensor o, AttentionKept *kept, Tensor q,
                           Tensor k, Tensor v, AttentionShape shape) {
    ContextParallel *c = context;
    context_masks(c, micro);
    Tensor sum = flash_sum(o), lse = flash_new_lse(kept, q.dtype, tensor_rows(q), shape.heads), all_k,
           all_v;
    gather(c, micro->b, &all_k, &all_v, k, v);
    int64_t first = 0;
    for (int i = 0; i < c->cp.size; i++) {
        int64_t rows = context_rows(c, micro->b, i);
        if (c->mask[i].pairs > 0)
            op_attention_chunk_forward(sum, lse, q, tensor_rows_of(all_k, first, rows),
                                       tensor_rows_of(all_v, first, rows), &c->mask[i], flash_heads(shape));
        first += rows;
    }
    tensor_free(&all_k);
    tensor_free(&all_v);
    flash_round(o, &sum);
}

// dk becomes the sum over ranks of what each has found for this rank's tokens, rounded once. Frees
// `partial`.
static void scatter(const ContextParallel *c, int64_t b, Tensor dk, Tensor *partial) {
    int64_t *counts = part_counts(c, b, tensor_columns(dk));
    Tensor own = partial->dtype == dk.dtype
                     ? tensor_share(dk)
                     : tensor_new(MEMORY_ACTIVATION, partial->dtype, dk.dims, dk.shape);
    comm_wait(comm_reduce_scatter(own, *partial, counts, REDUCE_SUM, c->cp));
    tensor_free(partial);
    flash_round(dk, &own);
    free(counts);
}

// dq, dk, dv =, with the shapes of q, k, v.
//   forward: o, lse = merge over chunks of softmax(q k^T / sqrt(d)) v
static void gather_backward(void *context, const MicroBatch *micro, Tensor dq, Tensor dk, Tensor dv,
                            Tensor d_o, AttentionKept *kept, Tensor q, Tensor k, Tensor v, Tensor o,
                            AttentionShape shape) {
    ContextParallel *c = context;
    context_masks(c, micro);
    AttentionHeads heads = flash_heads(shape);
    Tensor lse = flash_lse(kept), dots = tensor_like(MEMORY_ACTIVATION, lse), sum_dq = flash_sum(dq);
    op_attention_chunk_dots(dots, o, d_o, heads);
    Tensor all_k, all_v;
    gather(c, micro->b, &all_k, &all_v, k, v);
    Tensor all_dk = tensor_new(MEMORY_COMMUNICATION, sum_dq.dtype, all_k.dims, all_k.shape),
           all_dv = tensor_like(MEMORY_COMMUNICATION, all_dk);
    op_fill(all_dk, 0);
    op_fill(all_dv, 0);
    int64_t first = 0;
    for (int i = 0; i < c->cp.size; i++) {
        int64_t rows = context_rows(c, micro->b, i);
        if (c->mask[i].pairs > 0)
            op_attention_chunk_backward(sum_dq, tensor_rows_of(all_dk, first, rows),
                                        tensor_rows_of(all_dv, first, rows), d_o, q,
                                        tensor_rows_of(all_k, first, rows),
                                        tensor_rows_of(all_v, first, rows), lse, dots, &c->mask[i], heads);
        first += rows;
    }
    tensor_free(&all_k);
    tensor_free(&all_v);
    scatter(c, micro->b, dk, &all_dk);
    scatter(c, micro->b, dv, &all_dv);
    flash_round(dq, &sum_dq);
    tensor_free(&dots);
}

static void *plug(Model *model) {
    ContextParallel *c = context_plug(model, gather_forward);
    model->sockets.attention.backward = gather_backward;
    return c;
}

// ---- the record ----

static void price(Price *price, const Model *m, const void *context) {
    const ContextParallel *c = context;
    const Config *config = &m->config;
    int64_t columns = context_key_columns(m), own = config->micro_batch * c->own * columns;
    double backwards = price->backwards * (double)config->layers,
           forwards = price->attentions * (double)config->layers;
    price_all_gather(price, 2 * (forwards + backwards), own, (DType)config->dtype, c->cp);
    price_reduce_scatter(price, 2 * backwards, config->micro_batch * c->s * columns, own,
                         dtype_full((DType)config->dtype), c->cp);
    context_price_kept(price, m, c);
    context_price_positions(price, m, c);
}

static bool enabled(const Config *config) { return context_on(config, CONTEXT_ALL_GATHER); }

const Technique all_gather_attention = {.name = "all_gather_attention",
                                        .option = context_options,
                                        .options = CONTEXT_OPTIONS,
                                        .asked = "--cp",
                                        .axes = 1u << AXIS_CP,
                                        .enabled = enabled,
                                        .check = context_check,
                                        .plug = plug,
                                        .unplug = context_unplug,
                                        .price = price};

#ifndef NO_MAIN
static ContextCost formula(const ContextSizes *z) {
    double chunk = z->tokens * 2 * z->kv * z->size, others = z->ranks - 1;
    return (ContextCost){.bytes = {others * chunk * z->e, others * chunk * (z->e + z->sum)},
                         .held = {z->ranks * chunk * z->e, z->ranks * chunk * (z->e + z->sum)}};
}

static void plan(Mesh mesh, const Config *config) {
    (void)mesh;
    context_only(config, CONTEXT_ALL_GATHER);
}

static void more(Mesh mesh, const Config *config) {
    context_check_cost(mesh, CONTEXT_ALL_GATHER, formula);
    context_memory(mesh, config);
}

static const Option pictures[] = {
    {"memory-svg", OPTION_OUTPUT, NULL, NULL, 0, 0, "FILE",
     "count the peak memory of all methods as sequences grow, and draw it", false},
};

int main(int argc, char **argv) {
    const Program program = {
        .purpose = "All-gather attention: every rank has all keys and values while it computes.",
        .claim = "ranks that gather all keys reproduce the single-device step",
        .defaults = CONTEXT_MODEL "heads=6 seq=61 context=all-gather",
        .natural = 4,
        .axis = AXIS_CP,
        .before = {"ring_attention", NULL, "context", CONTEXT_RING},
        .techniques = context_layouts,
        .option = &zero_option,
        .options = 1,
        .plan = plan,
        .more = more,
        .more_option = pictures,
        .more_options = 1};
    return program_main(argc, argv, &program);
}
#endif
