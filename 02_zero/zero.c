// zero.c: what the three stages of ZeRO share: the choice among them, and the proof. Playbook: "ZeRO";
// Rajbhandari et al. 2020.
//
// Of P parameters on n ranks, e bytes a weight, g a gradient, k of optimizer, over m micro-batches:
//
//             weights    gradients   optimizer    sent by all ranks in a step
//     DDP     e P        g P         k P          2 (n - 1) g P                  all-reduce
//     ZeRO-1  e P        g P         k P / n      (n - 1) (g P + e P)            reduce-scatter, all-gather
//     ZeRO-2  e P        g P / n     k P / n      (n - 1) (m g P + e P)
//     ZeRO-3  e P / n    g P / n     k P / n      (n - 1) m (g P + 2 e P - …)    all-gather twice
//
// In elements, with one micro-batch: 2 P, 2 P, 2 P, 3 P. (Beside 16-bit weights g is 4, as sums are f32,
// and what stays whole is held in both.) To these come the units at work, one or two at a time: whole
// gradients (ZeRO-2) and weights (ZeRO-3). Parts need not be equal: a rank's is what unit_part deals it, or
// nothing.
//
// Proof: no bit differs from DDP on the same ranks in the same order of sums. This file has no main.
#include <stdlib.h>
#include <string.h>

#include "playbook.h"

// ---- the choice ----

void zero_plug(Model *model, Zero *zero) {
    switch (model->params.sharding) {
        case SHARD_NOTHING:
            if (zero->ddp.bucket_bytes == 0) zero->ddp.bucket_bytes = 25000000;
            ddp_no_sync_plug(model, &zero->ddp);
            break;
        case SHARD_STATE:
            zero1_plug(model, zero);
            break;
        case SHARD_GRADS:
            zero2_plug(model, zero);
            break;
        case SHARD_VALUES:
            zero3_plug(model, zero);
            break;
    }
}

void zero_unplug(Model *model, Zero *zero) {
    model->sockets.parameters.settle(model->sockets.parameters.context, model);
    for (int i = 0; i < model->params.units; i++) {
        if (zero->reductions && zero->reductions[i]) comm_wait(zero->reductions[i]);
        if (model->params.sharding >= SHARD_GRADS) tensor_free(&model->params.unit[i].grads);
        if (model->params.sharding == SHARD_VALUES) tensor_free(&model->params.unit[i].values);
    }
    tensor_free(&zero->gradient);
    free(zero->reductions);
    free(zero->gathers);
    free(zero->ddp.pending);
    const Sockets empty = sockets_single_device();
    model->sockets.parameters = empty.parameters;
    model->sockets.gradients = empty.gradients;
    *zero = (Zero){0};
}

// ---- the proof: as parts of a LayoutProgram ----

void zero_check(const Config *config, int stage) {
    CHECK(config->zero == stage, "--zero %d is another program's: zero%d cuts what stage %d cuts",
          config->zero, stage, stage);
    CHECK(config->tp == 1 && !config->sp && !config->vocab_parallel,
          "--tp, --sp and --vocab-parallel are other programs': zero%d cuts over --dp alone", stage);
}

void *zero_layout_plug_with(Trainer *t, Zero options) {
    Zero *zero = host_alloc(sizeof *zero);
    *zero = options;
    zero_plug(t->model, zero);
    return zero;
}

void *zero_layout_plug(Trainer *t) { return zero_layout_plug_with(t, (Zero){0}); }

void zero_layout_unplug(Trainer *t, void *zero) {
    zero_unplug(t->model, zero);
    free(zero);
}

// ---- counts ----

// Bytes of whole gradients that ZeRO-2 and -3 hold at most, beside the rank's own part. While a unit fills
// its own, the one that backward has left before it is being reduced (the first of a further micro-batch
// comes after the last of the one before). 16-bit ones stand in both precisions while they are converted.
// Tied, the embedding's waits from the head on.
static double gradients_at_work(const Model *m) {
    const Params *p = &m->params;
    double e = (double)dtype_size(p->dtype), g = (double)dtype_size(p->total_dtype), most = 0;
    for (int i = 0; i < p->units; i++) {
        int before = i + 1 < p->units ? i + 1 : m->config.grad_acc > 1 ? 0 : -1;
        double own = (double)p->unit[i].count, behind = before >= 0 ? (double)p->unit[before].count : 0;
        double waiting = m->config.tied && i != m->embedding_unit ? e * (double)m->embedding->count : 0;
        double filling = e * own + g * behind, converting = e == g ? 0 : (e + g) * own;
        double here = waiting + (filling > converting ? filling : converting);
        if (here > most) most = here;
    }
    return most;
}

// Bytes of weights that ZeRO-3 has gathered at most: a unit, and with prefetch the one after it. Tied, the
// head has the embedding with it.
static double weights_at_work(const Model *m, bool prefetch) {
    const Params *p = &m->params;
    double e = (double)dtype_size(p->dtype), most = 0;
    for (int i = 0; i < p->units; i++) {
        bool next = prefetch && i + 1 < p->units, head = i + next == m->head_unit;
        double here = (double)p->unit[i].count + (next ? (double)p->unit[i + 1].count : 0);
        if (m->config.tied && head) here += (double)m->embedding->count;
        if (e * here > most) most = e * here;
    }
    return most;
}

static void count_memory(const Trainer *t, const Record *record, const Zero *zero) {
    const Config *c = &t->config;
    const Params *p = &t->model->params;
    MemoryPlan plan = {.model = *c, .f32_gradients = true, .zero = c->zero, .tp = 1, .dp = p->dp.size};
    // The formulas divide by n. Where parts are unequal, of n times what this rank owns.
    double own = 0;
    for (int i = 0; i < p->units; i++) own += (double)p->unit[i].own_count;
    MemoryNeed whole = memory_states(&plan, (double)params_elements(p));
    MemoryNeed cut = memory_states(&plan, own * p->dp.size);
    bool narrow = dtype_size(p->dtype) < 4;
    double weights =
        c->zero < 3 ? whole.parameters : cut.parameters + weights_at_work(t->model, !zero->no_prefetch);
    double gradients = whole.gradients + whole.accumulators;
    // What stays of cut gradients are their sums, which are f32 beside 16-bit weights.
    if (c->zero >= 2) gradients = (narrow ? cut.accumulators : cut.gradients) + gradients_at_work(t->model);
    double sgd = narrow ? 4 * own : 0;  // master weights alone
    report_equal("bytes of weights", weights, (double)record->memory.peak[MEMORY_PARAMETER], "B");
    report_equal("bytes of gradients", gradients, (double)record->memory.peak[MEMORY_GRADIENT], "B");
    report_equal("bytes of optimizer", c->optimizer == OPTIMIZER_SGD ? sgd : cut.optimizer,
                 (double)record->memory.peak[MEMORY_OPTIMIZER], "B");
}

ZeroSends zero_sends(const Model *m) {
    const Config *c = &m->config;
    const Params *p = &m->params;
    double micros = (double)c->grad_acc, units = p->units, all = (double)params_elements(p);
    double embedding = (double)p->unit[m->embedding_unit].count;
    double ends = embedding + (double)p->unit[m->head_unit].count;
    double times = c->zero == 1 ? 1 : micros;
    ZeroSends sends = {
        .reductions = times * units, .reduced = times * all, .gathers = units, .gathered = all};
    if (c->zero == 3) {
        // Forward gathers each unit, backward the blocks again. The head is used last in forward and first
        // in backward: once is enough. The embedding's backward reads no weights; tied, the head uses it
        // once more.
        sends.gathers = micros * (units + (double)m->layers + c->tied);
        sends.gathered = micros * (all + (all - ends) + (c->tied ? embedding : 0));
    }
    return sends;
}

void zero_counts(const Trainer *t, const Record *record, void *plugs) {
    const Model *m = t->model;
    const Params *p = &m->params;
    double n = p->dp.size, steps = (double)record->steps;
    ZeroSends sends = zero_sends(m);
    CommCount reduce = comm_count("reduce_scatter"), gather = comm_count("all_gather");
    CommCount numbers = comm_count("all_reduce");
    double gradients = comm_sum((double)reduce.bytes, p->dp),
           weights = comm_sum((double)gather.bytes, p->dp);
    // Labels and loss; and the gradient's norm, of which each rank has a part.
    double sums = n > 1 ? 3 : 2;
    report_equal("reduce-scatters", steps * sends.reductions, (double)reduce.calls, "");
    report_equal("all-gathers", steps * sends.gathers, (double)gather.calls, "");
    report_equal("all-reduces, of one number", steps * sums, (double)numbers.calls, "");
    report_equal("bytes of gradients sent by all",
                 steps * (n - 1) * sends.reduced * (double)dtype_size(p->total_dtype),
                 gradients, "B");
    report_equal("bytes of weights sent by all",
                 steps * (n - 1) * sends.gathered * (double)dtype_size(p->dtype),
                 weights, "B");
    report_equal("bytes of numbers sent by all", steps * sums * 2 * (n - 1) * sizeof(double),
                 comm_sum((double)numbers.bytes, p->dp), "B");
    if (n > 1)
        say("  elements sent in a step: %.2f (n - 1) P",
            (gradients / (double)dtype_size(p->total_dtype) + weights / (double)dtype_size(p->dtype)) /
                (steps * (n - 1) * (double)params_elements(p)));
    count_memory(t, record, plugs);
}

// ---- the twins: DDP in the same order of sums ----

typedef struct Twin {
    Ddp ddp;
    int units;
    Tensor *total;  // (units)
} Twin;

// Each micro-batch's gradients over ranks, and then over micro-batches.
static void ranks_first(void *context, Model *model, int unit, MicroBatch *micro) {
    Twin *twin = context;
    Unit *u = &model->params.unit[unit];
    Tensor sum = tensor_new(MEMORY_COMMUNICATION, model->params.total_dtype, SHAPE(u->count));
    op_copy(sum, u->grads);
    op_fill(u->grads, 0);
    comm_wait(comm_all_reduce(sum, REDUCE_SUM, model->mesh.dp));
    if (micro->index == 0) op_fill(twin->total[unit], 0);
    op_accumulate(twin->total[unit], sum);
    tensor_free(&sum);
    if (micro->last) op_copy(unit_total_grad(u), twin->total[unit]);
}

static Twin *twin_new(Trainer *t) {
    Twin *twin = host_alloc(sizeof *twin);
    *twin = (Twin){.ddp.bucket_bytes = 100000, .units = t->model->params.units};
    twin->total = calloc((size_t)twin->units, sizeof *twin->total);
    CHECK(twin->total, "out of host memory for a twin");
    return twin;
}

static void *plug_ddp_no_sync(Trainer *t) {
    Twin *twin = twin_new(t);
    ddp_no_sync_plug(t->model, &twin->ddp);
    return twin;
}

// With one micro-batch there is one order, and ddp_bucketed has it.
static void *plug_ranks_first(Trainer *t) {
    Twin *twin = twin_new(t);
    Params *p = &t->model->params;
    ddp_bucketed_plug(t->model, &twin->ddp);
    if (t->config.grad_acc == 1) return twin;
    for (int i = 0; i < twin->units; i++)
        twin->total[i] = tensor_new(MEMORY_GRADIENT, p->total_dtype, SHAPE(p->unit[i].count));
    const Sockets empty = sockets_single_device();
    t->model->sockets.gradients = empty.gradients;
    t->model->sockets.gradients.context = twin;
    t->model->sockets.gradients.ready = ranks_first;
    return twin;
}

static void unplug_twin(Trainer *t, void *plugs) {
    (void)t;
    Twin *twin = plugs;
    for (int i = 0; i < twin->units; i++) tensor_free(&twin->total[i]);
    free(twin->total);
    free(twin->ddp.pending);
    free(twin);
}

static void cut_nothing(Config *config) { config->zero = 0; }

const LayoutProgram zero_twin_of_1 = {
    .claim = "ddp_no_sync", .check = cut_nothing, .plug = plug_ddp_no_sync, .unplug = unplug_twin};
const LayoutProgram zero_twin_of_2_and_3 = {.claim = "DDP in the same order of sums",
                                            .check = cut_nothing,
                                            .plug = plug_ranks_first,
                                            .unplug = unplug_twin};

// ---- the model clock ----

bool zero_on_standard_machine(const Config *c) {
    return !strcmp(c->machine, "dgx-h100") && c->gpus_per_node == 0 && c->compute_efficiency == 1 &&
           c->network_efficiency == 1;
}

Config zero_compare(Mesh mesh, const ZeroVariant *variants, int count, StepCost *cost) {
    Config c = config_default(
        "layers=32 hidden=4096 heads=32 kv-heads=8 ffn=14336 vocab=128256 seq=8192 dtype=bf16 "
        "micro-batch=2 "
        "grad-acc=1 steps=2");
    bool was_dry = device_is_dry_run();
    device_dry_run(true);
    char *title =
        format_text("Llama 3 8B, %d ranks, %ld tokens on each", mesh.dp.size, c.micro_batch * c.seq);
    say("\n%s, on the model clock:\n", title);
    timeline_title(title);
    free(title);
    say("  %-28s %10s %18s %12s %9s %12s\n", "", "step, ms", "communication, ms", "exposed, ms", "of it",
        "rank 0 sends");
    for (int i = 0; i < count; i++) {
        const ZeroVariant *v = &variants[i];
        const LayoutProgram program = {.plug = v->plug, .unplug = v->unplug};
        c.zero = v->stage;
        clock_push(v->name);
        cost[i] = layout_cost(&c, mesh, &program);
        clock_pop();
        timeline_keep(v->name);
        const CommCount *comm = &cost[i].comm;
        say("  %-28s %10.2f %18.2f %12.2f %8.1f%% %12s\n", v->name, 1e3 * cost[i].step_seconds,
            1e3 * comm->model_seconds, 1e3 * comm->exposed_seconds,
            comm->model_seconds > 0 ? 100 * comm->exposed_seconds / comm->model_seconds : 0,
            bytes_text((double)comm->bytes));
        report_number(v->name, "seconds per step", cost[i].step_seconds, "s");
        report_number(v->name, "exposed seconds", comm->exposed_seconds, "s");
        report_number(v->name, "communication seconds", comm->model_seconds, "s");
    }
    device_dry_run(was_dry);
    c.zero = 0;
    return c;
}
