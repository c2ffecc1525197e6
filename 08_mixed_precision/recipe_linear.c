// recipe_linear.c: a linear in 8-bit codes: what is cast, with which scale, and when. Playbook: "FP8
// pretraining"; Micikevicius et al. 2022, DeepSeek-V3 2024.
//
//     y  = x W^T     codes of x (n, in)    and W (out, in)       Hopper's tensor cores take both operands
//     dx = dy W      codes of dy (n, out)  and W^T (in, out)     with the inner dimension contiguous,
//     dW = dy^T x    codes of dy^T (out, n) and x^T (in, n)      hence two casts of everything
//
// Three ways to a scale:
//
//     of each tile     from the tile's own amax; tiles of x and dy lie along the inner dimension
//     current          of the whole tensor: the largest amax of all ranks that have a part of it (tp, cp),
//                      kept for the cast of its transpose
//     delayed          of the whole tensor: the largest amax of the last steps, on any rank. One message a
//                      step, and a cast need not wait for its own amax (Transformer Engine records that in
//                      the same read; note_amax here reads the tensor again)
//
// The history of a delayed scale has one amax per step, the largest of its micro-batches. It is recorded in
// W (dW's multiply), which runs once for each micro-batch: forward also runs for recomputation and held-out
// losses. Weights are cast once per optimizer step; with ZeRO-3, which frees them, at each use. The linears
// of blocks and experts are in 8 bits; embedding, router, norms, attention and head are not.
//
// This file has no main: fp8.c runs it.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "mixed_precision.h"

typedef enum Operand { OPERAND_X, OPERAND_W, OPERAND_DY, OPERANDS } Operand;

// A weight's casts, valid from its first use after an optimizer step to the next step (with ZeRO-3 for one
// use). Their memory is kept from step to step, also for an expert that no token takes: what a rank holds
// does not depend on the data.
typedef struct Cast {
    Codes plain, turned;
    bool valid, in_step;  // in_step: and not for held-out losses, between steps
} Cast;

struct Fp8Linear {
    const Fp8Recipe *recipe;
    Sockets before;
    Tile tile;         // of x and dy; 0: the whole tensor
    Cast *cast;        // (parameters)
    bool keeps_casts;  // ZeRO-3 frees weights after use, and so their casts
    int64_t casts;     // of weights so far
    // Delayed scaling, a slot for each parameter's x, then for each one's W, then for each one's dy:
    Tensor amax;      // (slots) f32: of this step so far, of this rank
    Tensor scale;     // (slots) f32: of this step
    double *history;  // (history, parameters, OPERANDS) newest first: Params.kept
    int slots;
};

bool fp8_is_cast(const Param *p) {
    return (p->role >= ROLE_Q && p->role <= ROLE_O) || (p->role >= ROLE_GATE && p->role <= ROLE_DOWN) ||
           (p->role >= ROLE_EXPERT_GATE && p->role <= ROLE_EXPERT_DOWN);
}

static bool is_delayed(const Fp8Linear *f) { return f->recipe->history > 0; }
static DType codes_of(const Fp8Linear *f, Operand operand) {
    return operand == OPERAND_DY ? f->recipe->backward : f->recipe->forward;
}
static int slot_of(const Model *m, const Param *p, Operand operand) {
    return (int)operand * m->params.count + (int)(p - m->params.param);
}
// The place in a step of the history, as checkpoints have it: a parameter's operands side by side.
static int noted_at(const Fp8Linear *f, int slot) {
    const int each = f->slots / OPERANDS;
    return slot % each * OPERANDS + slot / each;
}

// ---- scales ----

// Casts of weights stay for the step; all others are freed after their multiply.
static MemoryKind kind_of(const Fp8Linear *f, Operand operand) {
    return operand == OPERAND_W && f->keeps_casts ? MEMORY_PARAMETER : MEMORY_ACTIVATION;
}

// amax of a tensor of which ranks have parts: columns over tp, if they are sharded (dy has W's outputs, x its
// inputs), rows over cp.
static void largest_of_ranks(const Model *m, const Param *p, Tensor amax, Operand operand) {
    bool outputs = p->shape[0] < p->full[0], inputs = p->shape[1] < p->full[1];
    bool columns = (outputs && operand != OPERAND_X) || (inputs && operand != OPERAND_DY);
    if (columns) comm_wait(comm_all_reduce(amax, REDUCE_MAX, m->mesh.tp));
    if (m->mesh.cp.size > 1 && operand != OPERAND_W)
        comm_wait(comm_all_reduce(amax, REDUCE_MAX, m->mesh.cp));
}

static Tile tile_of(const Fp8Linear *f, Operand operand) {
    if (operand == OPERAND_W && f->recipe->square) return (Tile){f->tile.columns, f->tile.columns};
    return f->tile;
}

// New: a place for the codes of (rows, columns) with their scales, or with those of `same`, if there are any.
static Codes codes_new(const Fp8Linear *f, Operand operand, int64_t rows, int64_t columns, Tensor same) {
    Codes c = {.tile = tile_of(f, operand)};
    int64_t down = tiles_of(rows, c.tile.rows), across = tiles_of(columns, c.tile.columns);
    c.scale = tensor_exists(same) ? tensor_share(same)
                                  : tensor_new(kind_of(f, operand), F32, SHAPE(down, across));
    c.codes = tensor_new(kind_of(f, operand), codes_of(f, operand), SHAPE(rows, columns));
    return c;
}

// The scales of x, or of its transpose, by the recipe.
static void set_scale(Fp8Linear *f, const Model *m, const Param *p, Operand operand, const Codes *c,
                      Tensor x, bool turned) {
    if (is_delayed(f)) {
        op_copy(c->scale, tensor_view(f->scale, slot_of(m, p, operand), SHAPE(1, 1)));
        return;
    }
    op_fill(c->scale, 0);
    op_tile_amax(c->scale, x, turned, c->tile);
    if (!f->tile.columns) largest_of_ranks(m, p, c->scale, operand);
    op_tile_scale(c->scale, c->scale, codes_of(f, operand), f->recipe->rule);
}

// Current scales on which ranks have agreed: they also serve W, which casts the transposes of the same x and
// dy. Without other ranks each cast finds its own.
typedef struct Agreed {
    Tensor x, dy[3];  // of at most three weights at once
} Agreed;

static Agreed *agreed_of(const Fp8Linear *f, const Model *m, void **kept) {
    if (is_delayed(f) || f->tile.columns || m->mesh.tp.size * m->mesh.cp.size == 1) return NULL;
    if (!*kept) *kept = calloc(1, sizeof(Agreed));
    CHECK(*kept, "out of host memory for the scales of a linear");
    return *kept;
}

static void drop(void *context, void **kept) {
    (void)context;
    Agreed *agreed = *kept;
    if (!agreed) return;
    tensor_free(&agreed->x);
    for (int i = 0; i < 3; i++) tensor_free(&agreed->dy[i]);
    free(agreed);
    *kept = NULL;
}

// agreed: NULL, or where the scale is kept, if one has been found.
static Codes new_codes(Fp8Linear *f, const Model *m, const Param *p, Operand operand, Tensor x, bool turned,
                       Tensor *agreed) {
    int64_t rows = tensor_rows(x), columns = tensor_columns(x);
    bool known = agreed && tensor_exists(*agreed);
    Codes c = codes_new(f, operand, turned ? columns : rows, turned ? rows : columns,
                        known ? *agreed : (Tensor){0});
    if (!known) set_scale(f, m, p, operand, &c, x, turned);
    if (agreed && !known) *agreed = tensor_share(c.scale);
    op_encode(c.codes, x, c.scale, turned, c.tile);
    return c;
}

static void free_codes(Codes *c) {
    tensor_free(&c->codes);
    tensor_free(&c->scale);
}

// Records this step's amax, for the scales of the steps to come.
static void note_amax(Fp8Linear *f, const Model *m, const Param *p, Operand operand, Tensor x) {
    if (is_delayed(f))
        op_tile_amax(tensor_view(f->amax, slot_of(m, p, operand), SHAPE(1, 1)), x, false, (Tile){0, 0});
}

// ---- weights: cast once for each step, with ZeRO-3 at each use ----

// One scale of a whole tensor also serves its transpose.
static void cast_new(const Fp8Linear *f, const Param *p, Cast *cast) {
    cast->plain = codes_new(f, OPERAND_W, p->shape[0], p->shape[1], (Tensor){0});
    cast->turned = codes_new(f, OPERAND_W, p->shape[1], p->shape[0],
                             f->tile.columns ? (Tensor){0} : cast->plain.scale);
}

static void free_cast(Cast *cast) {
    free_codes(&cast->plain);
    free_codes(&cast->turned);
    cast->valid = false;
}

// A step casts again what held-out losses have cast before it, so that all steps send the same.
static Cast *cast_of(Fp8Linear *f, Model *m, const Param *p) {
    Cast *cast = &f->cast[p - m->params.param];
    bool in_step = m->ready_left[p->unit] > 0;
    if (cast->valid && (cast->in_step || !in_step)) return cast;
    Tensor w = param_value(&m->params, p);
    if (!f->keeps_casts) cast_new(f, p, cast);
    set_scale(f, m, p, OPERAND_W, &cast->plain, w, false);
    if (f->tile.columns) set_scale(f, m, p, OPERAND_W, &cast->turned, w, true);
    op_encode(cast->plain.codes, w, cast->plain.scale, false, cast->plain.tile);
    op_encode(cast->turned.codes, w, cast->turned.scale, true, cast->turned.tile);
    note_amax(f, m, p, OPERAND_W, w);
    cast->valid = true;
    cast->in_step = in_step;
    f->casts++;
    return cast;
}

static void after_use(Fp8Linear *f, Cast *cast) {
    if (!f->keeps_casts) free_cast(cast);
}

// ---- the linear socket ----

// On a GPU, forward may keep sums that need no promotion in the tensor cores, as Transformer Engine does;
// sums of gradients are promoted to f32.
static CodesSum sum_of_forward(const Fp8Linear *f) {
    CodesSum sum = f->recipe->sum;
    if (!sum.promote) sum.promote = SUMMED_FAST;
    return sum;
}

static void forward(void *context, Model *m, int count, Param *const *weight, const Tensor *y, Tensor x,
                    void **kept) {
    Fp8Linear *f = context;
    if (!fp8_is_cast(weight[0])) {
        f->before.linear.forward(f->before.linear.context, m, count, weight, y, x, kept);
        return;
    }
    Agreed *agreed = agreed_of(f, m, kept);
    Codes input = new_codes(f, m, weight[0], OPERAND_X, x, false, agreed ? &agreed->x : NULL);
    for (int i = 0; i < count; i++) {
        Cast *cast = cast_of(f, m, weight[i]);
        op_matmul_codes(y[i], input, cast->plain, sum_of_forward(f), 0);
        after_use(f, cast);
    }
    free_codes(&input);
}

static void backward_input(void *context, Model *m, int count, Param *const *weight, Tensor dx,
                           const Tensor *dy, void **kept) {
    Fp8Linear *f = context;
    if (!fp8_is_cast(weight[0])) {
        f->before.linear.backward_input(f->before.linear.context, m, count, weight, dx, dy, kept);
        return;
    }
    Agreed *agreed = agreed_of(f, m, kept);
    for (int i = 0; i < count; i++) {
        Tensor *place = agreed ? &agreed->dy[i] : NULL;
        Codes gradient = new_codes(f, m, weight[i], OPERAND_DY, dy[i], false, place);
        Cast *cast = cast_of(f, m, weight[i]);
        op_matmul_codes(dx, gradient, cast->turned, f->recipe->sum, i > 0);
        after_use(f, cast);
        free_codes(&gradient);
    }
}

static void backward_weight(void *context, Model *m, int count, Param *const *weight, const Tensor *dy,
                            Tensor x, void **kept) {
    Fp8Linear *f = context;
    if (!fp8_is_cast(weight[0])) {
        f->before.linear.backward_weight(f->before.linear.context, m, count, weight, dy, x, kept);
        return;
    }
    Agreed *agreed = agreed_of(f, m, kept);
    Codes input = new_codes(f, m, weight[0], OPERAND_X, x, true, agreed ? &agreed->x : NULL);
    note_amax(f, m, weight[0], OPERAND_X, x);
    for (int i = 0; i < count; i++) {
        Tensor *place = agreed ? &agreed->dy[i] : NULL;
        Codes gradient = new_codes(f, m, weight[i], OPERAND_DY, dy[i], true, place);
        note_amax(f, m, weight[i], OPERAND_DY, dy[i]);
        Tensor grad = param_grad_begin(&m->params, weight[i]);
        op_matmul_codes(grad, gradient, input, f->recipe->sum, 1);
        param_grad_end(&m->params, weight[i], grad);
        free_codes(&gradient);
    }
    free_codes(&input);
}

// ---- between steps ----

// Scales of the next step, from the largest amax of the history; 1 as long as there is none.
static void set_scales(Fp8Linear *f) {
    double *scale = host_alloc((size_t)f->slots * sizeof *scale);
    for (int slot = 0; slot < f->slots; slot++) {
        double most = 0;
        for (int i = 0; i < f->recipe->history; i++)
            most = fmax(most, f->history[i * f->slots + noted_at(f, slot)]);
        scale[slot] = most;
    }
    tensor_from_doubles(f->scale, scale);
    free(scale);
    const int each = f->slots / OPERANDS;
    for (int operand = 0; operand < OPERANDS; operand++) {
        Tensor all = tensor_view(f->scale, operand * each, SHAPE(1, each));
        op_tile_scale(all, all, codes_of(f, (Operand)operand), f->recipe->rule);
    }
}

// The step's largest amax of all ranks goes into the history, over tensors' parts, replicas and stages
// alike. One that is not finite would determine the scale of many steps, and an expert that no token takes
// has none: then the last one is repeated, so that its scale stays (as Transformer Engine's does).
static void end_history_step(Fp8Linear *f, const Model *m) {
    double *newest = host_alloc((size_t)f->slots * sizeof *newest);
    comm_wait(comm_all_reduce(f->amax, REDUCE_MAX, m->mesh.world));
    tensor_to_doubles(newest, f->amax);
    memmove(f->history + f->slots, f->history,
            (size_t)(f->slots * (f->recipe->history - 1)) * sizeof *f->history);
    for (int slot = 0; slot < f->slots; slot++)
        if (newest[slot] > 0 && isfinite(newest[slot])) f->history[noted_at(f, slot)] = newest[slot];
    free(newest);
    op_fill(f->amax, 0);
    set_scales(f);
}

static bool accept(void *context, Model *m, double grad_norm) {
    Fp8Linear *f = context;
    if (is_delayed(f)) end_history_step(f, m);
    for (int i = 0; i < m->params.count; i++) f->cast[i].valid = false;
    return f->before.step.accept(f->before.step.context, m, grad_norm);
}

void fp8_linear_resumed(Fp8Linear *f) {
    if (is_delayed(f)) set_scales(f);
}

Fp8Linear *fp8_linear_plug(Model *m, const Fp8Recipe *recipe, int64_t tile) {
    Fp8Linear *f = host_alloc(sizeof *f);
    *f = (Fp8Linear){.recipe = recipe,
                     .before = m->sockets,
                     .tile = {recipe->tile ? 1 : 0, recipe->tile ? tile : 0},
                     .cast = calloc((size_t)m->params.count, sizeof *f->cast),
                     .keeps_casts = m->params.sharding < SHARD_VALUES,
                     .slots = m->params.count * OPERANDS};
    CHECK(f->cast, "out of host memory for the casts of weights");
    if (is_delayed(f)) {
        m->params.kept_count = recipe->history * f->slots;
        m->params.kept = f->history = calloc((size_t)m->params.kept_count, sizeof *f->history);
        CHECK(f->history, "out of host memory for the histories of an amax");
        f->amax = tensor_new(MEMORY_PARAMETER, F32, SHAPE(f->slots));
        f->scale = tensor_new(MEMORY_PARAMETER, F32, SHAPE(f->slots));
        op_fill(f->amax, 0);
        op_fill(f->scale, 1);
    }
    for (int i = 0; i < m->params.count && f->keeps_casts; i++) {
        const Param *p = &m->params.param[i];
        if (p->here && fp8_is_cast(p)) cast_new(f, p, &f->cast[i]);
    }
    m->sockets.linear.context = m->sockets.step.context = f;
    m->sockets.linear.forward = forward;
    m->sockets.linear.backward_input = backward_input;
    m->sockets.linear.backward_weight = backward_weight;
    m->sockets.linear.drop = drop;
    m->sockets.step.accept = accept;
    return f;
}

void fp8_linear_unplug(Model *m, Fp8Linear *f) {
    for (int i = 0; i < m->params.count; i++) free_cast(&f->cast[i]);
    tensor_free(&f->amax);
    tensor_free(&f->scale);
    m->params.kept_count = 0;
    free(f->history);
    free(f->cast);
    free(f);
}

// Bytes of what fp8_linear_plug and the casts of weights hold on this rank.
double fp8_linear_bytes(const Model *m, const Fp8Linear *f) {
    double bytes = is_delayed(f) ? 2 * 4.0 * f->slots : 0;
    Tile tile = tile_of(f, OPERAND_W);
    for (int i = 0; i < m->params.count && f->keeps_casts; i++) {
        const Param *p = &m->params.param[i];
        if (!p->here || !fp8_is_cast(p)) continue;
        double plain = (double)(tiles_of(p->shape[0], tile.rows) * tiles_of(p->shape[1], tile.columns));
        double turned = (double)(tiles_of(p->shape[1], tile.rows) * tiles_of(p->shape[0], tile.columns));
        bytes += 2.0 * (double)p->count + 4 * (tile.columns ? plain + turned : plain);
    }
    return bytes;
}

// Messages that the scales take in a step.
void fp8_linear_price(Price *price, const Model *m, const Fp8Linear *f) {
    price->more[MEMORY_PARAMETER] += fp8_linear_bytes(m, f);
    if (is_delayed(f)) price_all_reduce(price, 1, f->slots, F32, m->mesh.world);
    if (is_delayed(f) || f->tile.columns) return;
    // Of a block: of q k v, o, gate and up, down; over tp only of columns that are sharded.
    enum { INPUTS = 4, INPUTS_SHARDED = 2, WEIGHTS = 7, GRADIENTS_SHARDED = 5 };
    double here = 0, kept = m->config.recompute == RECOMPUTE_FULL ? 0 : 4 * INPUTS,
           backwards = price->backwards * (double)m->config.layers;
    for (int64_t i = 0; i < m->config.layers; i++) here += m->block[i].q->here;
    double forwards = price->forwards * (double)m->config.layers;
    double weights = f->keeps_casts ? here : forwards + backwards;
    double columns = forwards * INPUTS_SHARDED + backwards * GRADIENTS_SHARDED + weights * WEIGHTS;
    if (m->mesh.tp.size > 1) price_all_reduce(price, columns, 1, F32, m->mesh.tp);
    if (m->mesh.cp.size > 1)
        price_all_reduce(price, forwards * INPUTS + backwards * WEIGHTS, 1, F32, m->mesh.cp);
    if (m->mesh.tp.size * m->mesh.cp.size == 1) return;
    CHECK(price->block_rows < MOST_KEPT, "more than %d tensors of a block are priced", MOST_KEPT);
    price->block[price->block_rows++] = (PriceKept){"scales of x", kept, EVERY_RANK, RECOMPUTE_FULL};
}

int64_t fp8_linear_casts(const Fp8Linear *f) { return f->casts; }
