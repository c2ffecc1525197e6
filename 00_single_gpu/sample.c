// sample.c: the text that a run writes at its end, token by token.
//
// A new token is drawn from the logits of the last one. Of the earlier tokens attention needs only the keys
// and values, which do not change as the text grows: they are kept (the KV cache of inference), and only
// the last token runs through the model. That takes two sockets, used as in context parallelism (chapter
// 04): tokens says which tokens of the window run through the model, and attention gives them the keys of
// all:
//
//     window    t t t t t t t . . . .    forward of the prompt: queries and keys of all its tokens
//                           q            then of one token: a query, and the keys so far
//
// Positions count from the window's first token. A full window drops its older half, and the remaining
// tokens run through the model again, since their keys and values depend on the dropped ones. So a token
// runs about twice; if the window moved by one token at a time, it would run s times.
//
// Bytes sent: the weights of all ranks to rank 0, which writes the text alone. This file has no main:
// real_training.c calls it.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "flash.h"
#include "harness.h"
#include "tensor/rng.h"

// ---- the window: keys and values of its tokens in every layer ----

typedef struct Window {
    int64_t s, layer;      // tokens it has room for; the layer whose attention comes next
    int64_t known, fresh;  // tokens with cached keys and values; tokens running through the model now
    int32_t *position;     // 0 … s - 1
    Tensor keys, values;   // (L, s, kv d)
    AttentionMask mask;    // fresh queries, all keys
} Window;

static int64_t fresh_tokens(void *context, int64_t s) {
    (void)s;
    return ((const Window *)context)->fresh;
}
static int64_t fresh_position(void *context, int64_t s, int64_t i) {
    (void)s;
    return ((const Window *)context)->known + i;
}

static void attend(void *context, const MicroBatch *micro, Tensor o, AttentionKept *kept, Tensor q,
                   Tensor k, Tensor v, AttentionShape shape) {
    (void)micro;
    Window *w = context;
    int64_t first = w->layer++ * w->s, all = w->known + w->fresh;
    op_copy(tensor_rows_of(w->keys, first + w->known, w->fresh), k);
    op_copy(tensor_rows_of(w->values, first + w->known, w->fresh), v);
    Tensor sum = flash_sum(o), lse = flash_new_lse(kept, q.dtype, w->fresh, shape.heads);
    op_attention_chunk_forward(sum, lse, q, tensor_rows_of(w->keys, first, all),
                               tensor_rows_of(w->values, first, all), &w->mask, flash_heads(shape));
    flash_round(o, &sum);
}

static Window window_new(const Config *c) {
    int64_t columns = c->kv_heads * config_head_size(c);
    Window w = {.s = c->seq, .position = host_alloc(c->seq * sizeof *w.position)};
    for (int64_t i = 0; i < w.s; i++) w.position[i] = (int32_t)i;
    w.keys = tensor_new(MEMORY_ACTIVATION, (DType)c->dtype, SHAPE(c->layers * w.s, columns));
    w.values = tensor_like(MEMORY_ACTIVATION, w.keys);
    return w;
}

static void window_free(Window *w) {
    tensor_free(&w->keys);
    tensor_free(&w->values);
    free(w->position);
}

// Runs the tokens not yet known among the first `count` of `tokens` (s) through the model; logits (v) are
// those after the last one.
static void window_logits(Window *w, Model *m, const int32_t *tokens, const int32_t *no_labels,
                          int64_t count, double *logits) {
    w->layer = 0;
    w->fresh = count - w->known;
    MicroBatch micro = micro_batch_new(m, -1, 1, tokens, no_labels, 0);
    const int32_t *documents = micro.documents;
    AttentionPositions keys = attention_positions_new(1, count, w->position, documents);
    AttentionPositions queries = attention_positions_new(1, w->fresh, w->position + w->known,
                                                         documents ? documents + w->known : NULL);
    w->mask = attention_mask(&queries, &keys);
    model_forward(m, &micro);
    tensor_to_doubles(logits, tensor_rows_of(micro.head.logits, w->fresh - 1, 1));
    micro_batch_free(m, &micro);
    attention_positions_free(&queries);
    attention_positions_free(&keys);
    w->known = count;
}

// ---- the text ----

int64_t sample_window(int64_t token, int64_t s) {
    const int64_t half = (s + 1) / 2;
    return token > s ? (token - s + half - 1) / half * half : 0;
}

int32_t sample_draw(const double *logits, int64_t vocab, double temperature, double uniform) {
    int64_t best = 0;
    for (int64_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    if (temperature <= 0) return (int32_t)best;
    double sum = 0, passed = 0;
    for (int64_t i = 0; i < vocab; i++) sum += exp((logits[i] - logits[best]) / temperature);
    for (int64_t i = 0; i < vocab; i++) {
        passed += exp((logits[i] - logits[best]) / temperature);
        if (passed > uniform * sum) return (int32_t)i;
    }
    return (int32_t)best;
}

void sample_continue(Model *m, int32_t *text, int64_t prompt, int64_t total, double temperature) {
    const Config *c = &m->config;
    const Sockets own = m->sockets;
    Window w = window_new(c);
    m->sockets.tokens.context = m->sockets.attention.context = &w;
    m->sockets.tokens.count = fresh_tokens;
    m->sockets.tokens.position = fresh_position;
    m->sockets.attention.forward = attend;
    m->sockets.attention.drop = flash_drop;
    int32_t *tokens = host_alloc(2 * w.s * sizeof *tokens), *no_labels = tokens + w.s;
    double *logits = host_alloc(c->vocab * sizeof *logits);
    memset(tokens, 0, w.s * sizeof *tokens);
    for (int64_t i = 0; i < w.s; i++) no_labels[i] = IGNORED_LABEL;
    for (int64_t made = prompt, first = 0; made < total; made++) {
        // After a move positions have changed, and no cached key or value is valid.
        if (sample_window(made, w.s) != first) w.known = 0;
        first = sample_window(made, w.s);
        memcpy(tokens, text + first, (made - first) * sizeof *tokens);
        window_logits(&w, m, tokens, no_labels, made - first, logits);
        text[made] = sample_draw(logits, c->vocab, temperature,
                                 rng_uniform((uint64_t)c->seed, RNG_SAMPLE, (uint64_t)made));
    }
    m->sockets = own;
    free(tokens);
    free(logits);
    window_free(&w);
}

static void print_text(const Trainer *t, const int32_t *text, int64_t prompt, int64_t total) {
    say("\nsample (temperature %g; the prompt ends at |):\n", config_number(&t->config, "temperature"));
    char *shown = host_alloc(total * 12 + 2), *end = shown;
    for (int64_t i = 0; i < total; i++) {
        if (i == prompt) *end++ = '|';
        bool printable = text[i] == '\n' || text[i] == '\t' || (text[i] >= 32 && text[i] < 127);
        if (!t->data.text) end += sprintf(end, "%d ", text[i]);
        else *end++ = printable ? (char)text[i] : '?';
    }
    *end = 0;
    say("%s\n", shown);
    free(shown);
}

// Continues the first held-out tokens.
static void write_text(const Trainer *t, Model *model, int64_t length) {
    const Config *c = &t->config;
    int64_t prompt = c->seq / 4 > 0 ? c->seq / 4 : 1, total = prompt + length;
    int32_t *text = host_alloc(total * sizeof *text);
    data_copy(&t->data.tokens, t->data.train_count, prompt, text);
    sample_continue(model, text, prompt, total, config_number(c, "temperature"));
    print_text(t, text, prompt, total);
    free(text);
}

// ---- rank 0 writes it ----

// A model on one device, as yet without weights; NULL on all ranks but the first.
static Model *model_of_first(const Trainer *t) {
    if (t->model->mesh.world.rank > 0) return NULL;
    Model *one = model_new(&t->config, mesh_single());
    model_allocate(one);
    return one;
}

// Gives `one`, where it is, the trained weights from all ranks (collective).
static void gather_weights(Trainer *t, Model *one) {
    const Sockets *sockets = &t->model->sockets;
    sockets->parameters.complete(sockets->parameters.context, t->model);
    for (int i = 0; i < t->model->params.count; i++) {
        const Param *param = &t->model->params.param[i];
        void *whole = host_alloc(param->full[0] * param->full[1] * (int64_t)sizeof(double));
        param_gather(&t->model->params, param, PARAM_VALUE, whole);
        if (one) param_set_value(&one->params, &one->params.param[i], whole);
        free(whole);
    }
}

// A run on one device may need techniques as well: those of the baseline.
static void write_with(const Trainer *t, Model *one, Techniques baseline, int64_t length) {
    void *context[MOST_TECHNIQUES] = {NULL};
    const Technique *enabled[MOST_TECHNIQUES];
    int count = baseline ? techniques_on(&t->config, baseline, enabled) : 0;
    for (int i = 0; i < count; i++)
        if (enabled[i]->plug) context[i] = enabled[i]->plug(one);
    write_text(t, one, length);
    for (int i = count - 1; i >= 0; i--)
        if (enabled[i]->unplug) enabled[i]->unplug(one, context[i]);
}

void sample_show(Trainer *t, Techniques baseline) {
    int64_t length = (int64_t)config_number(&t->config, "sample");
    if (!length) return;
    bool alone = t->model->mesh.world.size == 1;
    comm_one_works(true);
    Model *one = alone ? t->model : model_of_first(t);
    comm_one_works(false);
    if (!alone) gather_weights(t, one);
    comm_one_works(true);
    if (alone) write_text(t, one, length);
    else if (one) write_with(t, one, baseline, length);
    if (one && !alone) model_free(one);
    comm_one_works(false);
}
