// context_parallel.c: what the four ways of context parallelism share. Playbook: "Context Parallelism".
//
// Changes from 00_single_gpu: each of N ranks has its own s / N tokens of every sequence, from the embedding
// to the loss. Linears, norms, the MLP and the loss process tokens one by one and need nothing else;
// positions and labels are taken along with the tokens (labels are already shifted). Only attention must see
// other ranks' tokens, all keys up to a query's own:
//
//                  layout of tokens       sent in attention                          keys and values held
//     ring         contiguous             K/V hop to the next rank, N - 1 times      2 chunks and its own
//     zigzag       zig-zag                the same                                   the same
//     all-gather   zig-zag                all K/V at once                            all N chunks
//     ulysses      contiguous             Q, K, V from tokens to heads, o back       all, 1 / N of heads
//
// All four call flash attention's operation, for one chunk of keys after another (Ulysses: once, for all
// keys), so no scores are stored.
// Weights are the same on all ranks of cp and dp, and gradients are summed over both: a rank's loss is a sum
// over its own labels, divided by the number of labels on all ranks.
//
// Kept per rank: what 00_single_gpu keeps, for the rank's tokens only and with lse in place of probs.
// Bytes sent: in each method's file. This file has no main.
#include "context_parallel.h"

#include <stdlib.h>

// ---- options, and which method is on ----

const char *const context_method_name[CONTEXT_METHODS] = {"ring", "zigzag", "all-gather", "ulysses"};

const Option context_options[CONTEXT_OPTIONS] = {
    {"context", OPTION_CHOICE, NULL, "ring", 0, 0, "ring|zigzag|all-gather|ulysses",
     "how the ranks of --cp exchange keys and values", false},
    {"layout", OPTION_CHOICE, NULL, "natural", 0, 0, "natural|contiguous|zigzag|striped",
     "which rank has which tokens of a sequence; natural: the usual layout of --context", false},
    DOCUMENT_OPTION};

bool context_on(const Config *config, ContextMethod method) {
    return config_number(config, "context") == method;
}

const SequenceLayout *context_layout(const Config *config) {
    const SequenceLayout *const layouts[] = {NULL, &sequence_contiguous, &sequence_zigzag,
                                             &sequence_striped};
    const SequenceLayout *chosen = layouts[(int)config_number(config, "layout")];
    bool balanced = context_on(config, CONTEXT_ZIGZAG) || context_on(config, CONTEXT_ALL_GATHER);
    return chosen ? chosen : balanced ? &sequence_zigzag : &sequence_contiguous;
}

static bool has_tokens(const Config *c, int64_t cp) { return cp <= c->seq; }

void context_check(const Config *c) {
    CHECK(!context_on(c, CONTEXT_ZIGZAG) || context_layout(c) == &sequence_zigzag,
          "--context zigzag always uses --layout zigzag: leave out --layout, or run ring_attention, which "
          "takes any");
    CHECK(c->seq >= c->cp, "--cp %ld is more ranks than --seq %ld has tokens: --cp %s would fit", c->cp,
          c->seq, config_degrees(c, c->seq, c->dp * c->cp, has_tokens));
}

void context_only(const Config *c, ContextMethod method) {
    CHECK(context_on(c, method),
          "%s shows --context %s alone: leave out --context, or run ring_attention, which takes them all",
          base_program(), context_method_name[method]);
}

// ---- the tokens socket ----

static void know_tokens(ContextParallel *c, int64_t s) {
    if (c->s == s) return;
    free(c->token);
    c->s = s;
    c->own = c->layout->count(s, c->cp.size, c->cp.rank);
    c->token = host_alloc((size_t)c->own * sizeof *c->token);
    c->layout->tokens(s, c->cp.size, c->cp.rank, c->token);
    for (int64_t i = 0; i < c->own; i++)
        CHECK(c->token[i] > (i ? c->token[i - 1] : -1) && c->token[i] < s,
              "layout %s: the %lld tokens of a rank are not in ascending order: number %lld is token %d of "
              "%lld",
              c->layout->name, (long long)c->own, (long long)i, (int)c->token[i], (long long)s);
}
static int64_t count(void *context, int64_t s) {
    const ContextParallel *c = context;
    return c->layout->count(s, c->cp.size, c->cp.rank);
}
static int64_t position(void *context, int64_t s, int64_t i) {
    ContextParallel *c = context;
    know_tokens(c, s);
    return c->token[i];
}

int64_t context_rows(const ContextParallel *c, int64_t b, int rank) {
    return b * c->layout->count(c->s, c->cp.size, rank);
}

// ---- masks ----

static AttentionPositions tokens_of(const ContextParallel *c, const MicroBatch *micro, int rank) {
    int64_t own = c->layout->count(c->s, c->cp.size, rank), n = micro->b * own;
    int32_t *position = host_alloc((size_t)(2 * n) * sizeof *position), *document = position + n;
    for (int64_t i = 0; i < micro->b && own > 0; i++)
        c->layout->tokens(c->s, c->cp.size, rank, position + i * own);
    if (micro->documents)
        sequence_take(c->layout, c->cp.size, rank, micro->b, c->s, document, micro->documents);
    AttentionPositions tokens =
        attention_positions_new(micro->b, own, position, micro->documents ? document : NULL);
    free(position);
    return tokens;
}

void context_masks(ContextParallel *c, const MicroBatch *micro) {
    if (!mask_key_changes(&c->key, micro, c->s)) return;
    for (int i = 0; i < c->cp.size; i++) attention_positions_free(&c->tokens[i]);
    for (int i = 0; i < c->cp.size; i++) c->tokens[i] = tokens_of(c, micro, i);
    for (int i = 0; i < c->cp.size; i++) c->mask[i] = attention_mask(&c->tokens[c->cp.rank], &c->tokens[i]);
}

// ---- plug and price ----

// Forward once more, for what it keeps; its o is not needed.
static void again(void *context, const MicroBatch *micro, AttentionKept *kept, Tensor q, Tensor k, Tensor v,
                  AttentionShape shape) {
    const ContextParallel *c = context;
    Tensor o = tensor_like(MEMORY_ACTIVATION, q);
    c->forward(context, micro, o, kept, q, k, v, shape);
    tensor_free(&o);
}

ContextParallel *context_plug(Model *m, AttentionForward *forward) {
    ContextParallel *c = host_alloc(sizeof *c);
    int n = m->mesh.cp.size;
    *c = (ContextParallel){.cp = m->mesh.cp,
                           .forward = forward,
                           .layout = context_layout(&m->config),
                           .tokens = calloc((size_t)n, sizeof *c->tokens),
                           .mask = calloc((size_t)n, sizeof *c->mask)};
    CHECK(c->tokens && c->mask, "out of host memory for the masks of --cp %d ranks", n);
    know_tokens(c, m->config.seq);
    m->sockets.tokens.context = m->sockets.attention.context = c;
    m->sockets.tokens.count = count;
    m->sockets.tokens.position = position;
    m->sockets.attention.forward = forward;
    m->sockets.attention.drop = flash_drop;
    m->sockets.attention.again = again;
    return c;
}

void context_unplug(Model *model, void *context) {
    (void)model;
    ContextParallel *c = context;
    for (int i = 0; i < c->cp.size; i++) attention_positions_free(&c->tokens[i]);
    free(c->tokens);
    free(c->mask);
    free(c->token);
    free(c->key.documents);
    free(c);
}

int64_t context_key_columns(const Model *m) {
    for (int64_t layer = 0; layer < m->config.layers; layer++)
        if (m->block[layer].k->here) return m->block[layer].k->shape[0];
    return 0;
}

void context_price_kept(Price *price, const Model *m, const ContextParallel *c) {
    double all = (double)(m->config.micro_batch * c->s), own = (double)(m->config.micro_batch * c->own);
    flash_price_again(price, &m->config);
    flash_price_kept(price, all, (double)m->config.heads, (DType)m->config.dtype);
    for (Split split = EVERY_RANK; split <= BY_TENSOR; split++) price_scale_kept(price, split, own, all);
    price->peak_counted = true;
}

void context_price_positions(Price *price, const Model *m, const ContextParallel *c) {
    for (int i = 0; i < c->cp.size; i++)
        flash_price_positions(price, m->config.micro_batch, c->layout->count(c->s, c->cp.size, i));
}
