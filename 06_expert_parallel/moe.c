// moe.c: a mixture of experts on one device. Playbook: "Expert parallelism"; Shazeer et al. 2017, Mixtral
// (Jiang et al. 2024), DeepSeek-V3 (2024).
//
// Changes from 00_single_gpu: in place of one MLP a block has e of them, the experts, and a router, which
// sends each token to k of them:
//
//     y = sum over the k chosen of weight_j expert_j(x)  (+ shared(x)),     weight = route(Wrouter x)
//
// Each pair of a token and one of its experts is a row. Rows are sorted by expert (token_rows.c), so each
// expert does one matrix multiply over all its rows, however many there are. There is no padding, and no
// token is dropped unless --capacity asks for it. Ties go to the expert with the lower number, also when
// recomputation routes again.
//
// Parameters of a block: e h + 3 h f (e + shared) in place of 3 h f, of which a token uses the router's e h
// and 3 h f (k + shared).
// Kept for backward: n (e + k) numbers of routing, 2 n k indices and n k (2 h + 3 f) elements.
// Bytes sent: none.
// Run: build/06_expert_parallel/moe     (--experts 8 --top-k 2, --moe deepseek --shared-experts 1 …)
// Last line: PASS moe: tokens grouped by expert reproduce the step of one token at a time …
#include <math.h>
#include <stdlib.h>

#include "expert_parallel.h"

// ---- all tokens and all experts are here ----

static Tensor gather(void *context, MoeKept *kept, Tensor x) {
    (void)context;
    kept->m = kept->pairs.real;
    kept->count = kept->own;
    return pairs_gather(&kept->pairs, x);
}
static Tensor combine(void *context, MoeKept *kept, Tensor made) {
    (void)context;
    kept->out = tensor_share(made);
    return pairs_combine(&kept->pairs, kept->out, kept->weights);
}
static Tensor combine_backward(void *context, MoeKept *kept, Tensor dy, Tensor dweights) {
    (void)context;
    return pairs_combine_backward(&kept->pairs, dy, dweights, kept->out, kept->weights);
}
static Tensor gather_backward(void *context, MoeKept *kept, Tensor drows) {
    (void)context;
    return pairs_gather_backward(&kept->pairs, drows);
}
static void nothing_counted(void *context, MoeKept *kept, Tensor own, Tensor more) {
    (void)context, (void)kept, (void)own, (void)more;
}
static void nothing_exchanged(void *context, MoeKept *kept) { (void)context, (void)kept; }
static void nothing_meanwhile(void *context, Moment moment) { (void)context, (void)moment; }
void moe_at(const Moe *moe, Moment moment) { moe->at(moe->at_context, moment); }

static Tensor no_bias(void *context, int layer) {
    (void)context, (void)layer;
    return (Tensor){0};
}
static void no_balance(void *context, const MicroBatch *micro, int layer, MoeKept *kept) {
    (void)context, (void)micro, (void)layer, (void)kept;
}

// ---- the experts: their rows are consecutive in (m, columns) ----

// The rows of one expert, and its weights: gate and up, or down. One call of the linear socket.
typedef struct Run {
    Param *weight[2];
    int64_t expert, first, rows;  // of (m, columns)
    void **linear;
} Run;

// Moves on, from {.expert = -1} at first, to the next expert that has rows; false: there is none.
static bool next_run(const Moe *moe, int layer, const MoeKept *kept, bool down, Run *run) {
    const BlockParams *w = &moe->model->block[layer];
    run->first += run->rows;
    run->expert++;
    while (run->expert < moe->here && kept->count[run->expert] == 0) run->expert++;
    if (run->expert == moe->here) return false;
    int64_t at = moe->first + run->expert;
    run->rows = kept->count[run->expert];
    run->weight[0] = down ? w->expert_down + at : w->expert_gate + at;
    run->weight[1] = w->expert_up + at;
    run->linear = &kept->linear[2 * run->expert + down];
    return true;
}

static Tensor run_of(Tensor t, const Run *run) { return tensor_rows_of(t, run->first, run->rows); }

// New: the experts' outputs for their rows (m, h).
static Tensor experts_forward(const Moe *moe, int layer, MoeKept *kept) {
    Model *m = moe->model;
    const Sockets *sockets = &m->sockets;
    int64_t f = config_expert_width(&m->config);
    kept->gate = tensor_new(MEMORY_ACTIVATION, kept->rows.dtype, SHAPE(kept->m, f));
    kept->up = tensor_like(MEMORY_ACTIVATION, kept->gate);
    kept->act = tensor_like(MEMORY_ACTIVATION, kept->gate);
    Tensor out = tensor_like(MEMORY_ACTIVATION, kept->rows);
    moe_at(moe, BEGINS);
    for (Run in = {.expert = -1}; next_run(moe, layer, kept, false, &in);)
        sockets->linear.forward(sockets->linear.context, m, 2, in.weight,
                                (Tensor[]){run_of(kept->gate, &in), run_of(kept->up, &in)},
                                run_of(kept->rows, &in), in.linear);
    moe_at(moe, AMID);
    op_swiglu_forward(kept->act, kept->gate, kept->up);
    for (Run down = {.expert = -1}; next_run(moe, layer, kept, true, &down);)
        sockets->linear.forward(sockets->linear.context, m, 1, down.weight, (Tensor[]){run_of(out, &down)},
                                run_of(kept->act, &down), down.linear);
    moe_at(moe, ENDS);
    return out;
}

// New: the gradient of their rows, from kept->dout; dgate and dup take the memory of gate and up.
static Tensor experts_backward_input(const Moe *moe, int layer, MoeKept *kept) {
    Model *m = moe->model;
    const Sockets *sockets = &m->sockets;
    Tensor dact = tensor_like(MEMORY_ACTIVATION, kept->act),
           drows = tensor_like(MEMORY_ACTIVATION, kept->rows);
    moe_at(moe, BEGINS);
    for (Run down = {.expert = -1}; next_run(moe, layer, kept, true, &down);)
        sockets->linear.backward_input(sockets->linear.context, m, 1, down.weight, run_of(dact, &down),
                                       (Tensor[]){run_of(kept->dout, &down)}, down.linear);
    moe_at(moe, AMID);
    op_swiglu_backward(kept->gate, kept->up, dact, kept->gate, kept->up);
    tensor_free(&dact);
    kept->dgate = kept->gate, kept->dup = kept->up;
    kept->gate = kept->up = (Tensor){0};
    for (Run in = {.expert = -1}; next_run(moe, layer, kept, false, &in);)
        sockets->linear.backward_input(sockets->linear.context, m, 2, in.weight, run_of(drows, &in),
                                       (Tensor[]){run_of(kept->dgate, &in), run_of(kept->dup, &in)},
                                       in.linear);
    moe_at(moe, ENDS);
    return drows;
}

// An expert without a row has the gradient 0 that it began with.
static void experts_backward_weight(const Moe *moe, int layer, const MoeKept *kept) {
    Model *m = moe->model;
    const Sockets *sockets = &m->sockets;
    for (Run down = {.expert = -1}; next_run(moe, layer, kept, true, &down);)
        sockets->linear.backward_weight(sockets->linear.context, m, 1, down.weight,
                                        (Tensor[]){run_of(kept->dout, &down)}, run_of(kept->act, &down),
                                        down.linear);
    for (Run in = {.expert = -1}; next_run(moe, layer, kept, false, &in);)
        sockets->linear.backward_weight(sockets->linear.context, m, 2, in.weight,
                                        (Tensor[]){run_of(kept->dgate, &in), run_of(kept->dup, &in)},
                                        run_of(kept->rows, &in), in.linear);
}

// ---- the technique: the mlp socket ----

static int unit_of(const Model *m, int layer) { return m->first_expert_unit + layer; }

static MoeKept *kept_new(Moe *moe, MicroBatch *micro, int layer) {
    MoeKept *kept = calloc(1, sizeof *kept);
    CHECK(kept, "out of host memory for a block's experts");
    kept->linear = calloc((size_t)moe->here * 2, sizeof *kept->linear);
    CHECK(kept->linear, "out of host memory for a block's experts");
    kept->training = micro->index >= 0;
    kept->s = micro->s;
    micro->block[layer]->mlp.more = kept;
    return kept;
}

// Counts what is kept for each row that has arrived, and for each row whose weighted sum is computed here.
static void hold(Moe *moe, MoeKept *kept) {
    if (!kept->training) return;
    const Config *c = &moe->model->config;
    int64_t h = c->hidden, each = (int64_t)dtype_size(c->dtype);
    kept->held = kept->m * (h + 3 * config_expert_width(c)) * each + tensor_rows(kept->out) * h * each;
    kept->held += kept->held_by_dispatch;
    moe->held += kept->held;
    if (moe->held > moe->most_held) moe->most_held = moe->held;
}

static Tensor forward(void *context, Model *m, MicroBatch *micro, int layer, Tensor x) {
    Moe *moe = context;
    const Sockets *sockets = &m->sockets;
    MoeKept *kept = kept_new(moe, micro, layer);
    moe_at(moe, ENDS);  // what led here: attention
    router_forward(moe, micro, layer, kept, x);
    moe_order(moe, kept);
    kept->rows = moe->dispatch.to_experts(moe->dispatch.context, kept, x);
    tensor_free(&kept->pairs.tokens);
    sockets->parameters.acquire(sockets->parameters.context, m, unit_of(m, layer), FORWARD);
    Tensor made = experts_forward(moe, layer, kept);
    sockets->parameters.release(sockets->parameters.context, m, unit_of(m, layer), FORWARD);
    Tensor y = moe->dispatch.combine(moe->dispatch.context, kept, made);
    tensor_free(&made);
    hold(moe, kept);
    if (!m->config.shared_experts) return y;
    Tensor shared = moe->dense.mlp.forward(moe->dense.mlp.context, m, micro, layer, x);
    op_add(y, y, shared);
    tensor_free(&shared);
    return y;
}

static Tensor backward_input(void *context, Model *m, MicroBatch *micro, int layer, Tensor dy) {
    Moe *moe = context;
    const Sockets *sockets = &m->sockets;
    MoeKept *kept = micro->block[layer]->mlp.more;
    Tensor dweights = tensor_like(MEMORY_ACTIVATION, kept->weights);
    moe_at(moe, ENDS);  // what led here: the blocks behind
    kept->dout = moe->dispatch.combine_backward(moe->dispatch.context, kept, dy, dweights);
    tensor_free(&kept->out);
    sockets->parameters.acquire(sockets->parameters.context, m, unit_of(m, layer), BACKWARD);
    Tensor drows = experts_backward_input(moe, layer, kept);
    sockets->parameters.release(sockets->parameters.context, m, unit_of(m, layer), BACKWARD);
    Tensor dx = moe->dispatch.to_experts_backward(moe->dispatch.context, kept, drows);
    tensor_free(&drows);
    router_backward(moe, micro, layer, kept, dx, dweights);
    tensor_free(&dweights);
    if (!m->config.shared_experts) return dx;
    Tensor shared = moe->dense.mlp.backward_input(moe->dense.mlp.context, m, micro, layer, dy);
    op_add(dx, dx, shared);
    tensor_free(&shared);
    return dx;
}

static void backward_weight(void *context, Model *m, MicroBatch *micro, int layer, Tensor x) {
    Moe *moe = context;
    const Sockets *sockets = &m->sockets;
    const MoeKept *kept = micro->block[layer]->mlp.more;
    int unit = unit_of(m, layer);
    router_gradient(moe, layer, kept, x);
    if (m->config.shared_experts)
        moe->dense.mlp.backward_weight(moe->dense.mlp.context, m, micro, layer, x);
    sockets->gradients.begin(sockets->gradients.context, m, unit);
    experts_backward_weight(moe, layer, kept);
    model_gradient_ready(m, unit);
}

static void drop(void *context, MlpKept *mlp) {
    Moe *moe = context;
    MoeKept *kept = mlp->more;
    moe->dense.mlp.drop(moe->dense.mlp.context, mlp);
    if (!kept) return;
    mlp->more = NULL;
    const Sockets *sockets = &moe->model->sockets;
    for (int64_t i = 0; i < 2 * moe->here; i++)
        sockets->linear.drop(sockets->linear.context, &kept->linear[i]);
    moe->held -= kept->held;
    moe->dispatch.drop(moe->dispatch.context, kept);
    pair_rows_free(&kept->pairs);
    Tensor *const all[] = {&kept->logits, &kept->weights, &kept->chosen,  &kept->rows,
                           &kept->gate,   &kept->up,      &kept->act,     &kept->out,
                           &kept->dgate,  &kept->dup,     &kept->dlogits, &kept->dout};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(all[i]);
    free(kept->own);
    free(kept->linear);
    free(kept);
}

static void *plug(Model *model) {
    Moe *moe = host_alloc(sizeof *moe);
    *moe = (Moe){.model = model,
                 .dense = model->sockets,
                 .rule = moe_rule(&model->config),
                 .capacity = config_number(&model->config, "capacity"),
                 .here = model->config.experts,
                 .dispatch = {.count = nothing_counted,
                              .to_experts = gather,
                              .combine = combine,
                              .combine_backward = combine_backward,
                              .to_experts_backward = gather_backward,
                              .drop = nothing_exchanged},
                 .balance = {NULL, no_bias, no_balance},
                 .at = nothing_meanwhile};
    model->sockets.mlp.context = moe;
    model->sockets.mlp.forward = forward;
    model->sockets.mlp.backward_input = backward_input;
    model->sockets.mlp.backward_weight = backward_weight;
    model->sockets.mlp.drop = drop;
    return moe;
}

static void unplug(Model *model, void *context) {
    (void)model;
    Moe *moe = context;
    free(moe->ledger.number);
    free(moe);
}

// ---- the record ----

static bool enabled(const Config *c) { return c->experts > 0; }

static void check(const Config *c) {
    CHECK(!c->save || (c->moe == MOE_MIXTRAL && c->shared_experts == 0),
          "--save writes folders as Mixtral's, which have no place for --moe deepseek or --shared-experts");
    CHECK(c->tp == 1 || config_number(c, "sp") != 0,
          "--tp %ld with --experts: experts are not sharded over tp, and ranks that have the same tokens "
          "would route them twice; add --sp, with which each has its own",
          c->tp);
    const char *split = c->cp > 1 ? "cp" : "tp";
    CHECK(config_number(c, "capacity") == 0 || (c->cp == 1 && c->tp == 1),
          "--capacity is room for rows of a whole sequence, which --%s %ld%s splits: --capacity 0 would fit, "
          "or --%s 1",
          split, c->cp > 1 ? c->cp : c->tp, c->cp > 1 ? "" : " --sp", split);
    CHECK(c->micro_batch * (c->seq / c->cp) % c->tp == 0,
          "--tp %ld with --experts: --micro-batch %ld x --seq %ld%s must be a multiple of it, so that all "
          "ranks route as many tokens",
          c->tp, c->micro_batch, c->seq, c->cp > 1 ? " / --cp" : "");
}

static void keep(PriceKept *rows, int *count, const char *what, double bytes, const Model *m) {
    CHECK(*count < MOST_KEPT, "more than %d tensors of a block are priced", MOST_KEPT);
    bool dropped = m->config.recompute == RECOMPUTE_FULL;
    rows[(*count)++] = (PriceKept){what, dropped ? 0 : bytes, EVERY_RANK, RECOMPUTE_FULL};
}

// moe is first in the list and priced last: recomputation and sharded tokens have been priced already.
static void price(Price *p, const Model *m, const void *context) {
    const Moe *moe = context;
    const Config *c = &m->config;
    MicroBatch one = {.b = c->micro_batch, .s = model_tokens(m) / c->micro_batch};
    double n = (double)m->sockets.region.rows(m->sockets.region.context, &one);
    double each = (double)dtype_size(c->dtype), wide = c->dtype == F64 ? 8 : 4;
    double k = (double)c->top_k, h = (double)c->hidden, f = (double)config_expert_width(c);
    bool all = moe->here == c->experts && moe->capacity == 0;
    keep(p->block, &p->block_rows, "router logits, weights", wide * n * ((double)c->experts + k), m);
    keep(p->block, &p->block_rows, "chosen, place", 2 * 4 * n * k, m);
    // If other ranks' tokens arrive, or some are dropped, the number that came, of all blocks.
    const char *what = "rows, gate, up, act, out of experts";
    if (all) keep(p->block, &p->block_rows, what, each * n * k * (2 * h + 3 * f), m);
    else keep(p->end, &p->end_rows, what, (double)moe->most_held, m);
    p->peak_counted = true;
    p->peak_by_data |= !all;  // expert_tables.c has it from the ledger
    // A dry run knows which units are in memory together.
    if (p->gradients >= 0) p->more[MEMORY_GRADIENT] += NAN;
    if (p->values >= 0) p->more[MEMORY_PARAMETER] += NAN;
}

static const Option capacity = {"capacity",
                                OPTION_REAL,
                                NULL,
                                "0",
                                0,
                                1e6,
                                "",
                                "capacity factor: the most rows that an expert takes of a sequence, as a "
                                "multiple of the mean; the rest skip it; 0: no limit",
                                false};

const Technique moe = {.name = "moe",
                       .option = &capacity,
                       .options = 1,
                       .asked = "--experts 8",
                       .brings = CONFIG_EXPERTS,
                       .enabled = enabled,
                       .check = check,
                       .plug = plug,
                       .unplug = unplug,
                       .price = price};

#ifndef NO_MAIN
static const Technique *const techniques[] = {&moe, &recompute, NULL};
static const Technique *const plainly[] = {&token_by_token, &recompute, NULL};

int main(int argc, char **argv) {
    const Program program = {
        .purpose =
            "A mixture of experts: each token takes some of them, and each expert multiplies all its "
            "tokens at once.",
        .claim = "tokens grouped by expert reproduce the step of one token at a time",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=40 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 experts=8 top-k=2",
        .experts = true,
        .natural = 1,
        .techniques = techniques,
        .baseline = plainly};
    return program_main(argc, argv, &program);
}
#endif
