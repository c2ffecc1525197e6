// tensor_parallel.c: each block's matrices cut over ranks. Playbook: "Tensor Parallelism in a Transformer
// Block"; Shoeybi et al. 2019 (Megatron-LM).
//
// Against 00_single_gpu: each of n ranks stores and computes an n-th of a block, its heads and its part of
// the feed-forward width, on the same tokens. Wq Wk Wv Wgate Wup by columns, Wo Wdown by rows
// (split_matmul.c):
//
//     x ─ norm1 ─[f]─ Wq Wk Wv ─ rope ─ attention ─ Wo ─[f*]─(+x)─ x2       and the same around the MLP
//
//              forward       backward
//     f        identity      all-reduce    every rank reads what enters, so gradients at it add up
//     f*       all-reduce    identity      what leaves is a sum; the residual is added after it, once
//
// Ranks beyond the key/value heads store copies of them. Each copy serves other query heads, so its
// gradient is a part: the sum of the parts, at the end of the step, keeps the copies equal.
//
// Bytes sent per rank, block and micro-batch: 4 all-reduces of K = b s h e, 8 (n - 1) / n K. Memory per
// rank: matrices / n; kept by a block: b s (e (4 h + (2 a d + 2 kv d + 3 f + a s) / n) + 2 statistics).
// Run: build/03_tensor_parallel/tensor_parallel (--ranks 8 --gpus-per-node 4, --tp 2 --zero 1, --dry-run …)
// Last line: PASS tensor_parallel: ranks that share every matrix make the step of one device …
#include <stdlib.h>

#include "playbook.h"

// ---- the technique: f and f* ----

static Tensor identity(void *context, Tensor x) {
    (void)context;
    return tensor_share(x);
}

static Tensor all_reduce(void *context, Tensor partial) {
    TensorParallel *t = context;
    comm_wait(comm_all_reduce(partial, REDUCE_SUM, t->tp));
    return tensor_share(partial);
}

// ---- gradients that are parts ----

// All ranges of this rank's own gradients that are partial over this very group of copies, one after
// another: into the buffer, or back. Returns their number of elements; without a buffer that alone.
static int64_t move_partial(const Params *params, Group copies, Tensor buffer, bool back) {
    int64_t count = 0;
    for (int i = 0; i < params->count; i++) {
        const Param *param = &params->param[i];
        if (!param->partial || param->copies.handle != copies.handle) continue;
        Tensor grad = param_own_grad(params, param, NULL);
        if (!tensor_exists(grad)) continue;
        int64_t elements = tensor_count(grad);
        if (tensor_exists(buffer)) {
            Tensor place = tensor_view(buffer, count, SHAPE(elements));
            op_copy(back ? grad : place, back ? place : grad);
        }
        count += elements;
    }
    return count;
}

// One message for all of them: there are many small ones.
static void sum_over_copies(Params *params, Group copies) {
    int64_t elements = move_partial(params, copies, (Tensor){0}, false);
    Tensor buffer = tensor_new(MEMORY_COMMUNICATION, params->total_dtype, SHAPE(elements));
    move_partial(params, copies, buffer, false);
    comm_wait(comm_all_reduce(buffer, REDUCE_SUM, copies));
    move_partial(params, copies, buffer, true);
    tensor_free(&buffer);
}

// Whether this weight is the first of the table that is partial over its group of copies.
static bool opens_group(const Params *params, int param) {
    const Param *first = params->param;
    while (!first->partial || first->copies.handle != params->param[param].copies.handle) first++;
    return first == &params->param[param];
}

static void sum_partial_gradients(Params *params) {
    for (int i = 0; i < params->count; i++)
        if (params->param[i].partial && params->param[i].copies.size > 1 && opens_group(params, i))
            sum_over_copies(params, params->param[i].copies);
}

// ---- the sockets ----

static void begin(void *context, Model *model, int unit, MicroBatch *micro) {
    TensorParallel *t = context;
    t->before.gradients.begin(t->before.gradients.context, model, unit, micro);
}

static void ready(void *context, Model *model, int unit, MicroBatch *micro) {
    TensorParallel *t = context;
    t->before.gradients.ready(t->before.gradients.context, model, unit, micro);
}

// The step's total over dp first: what ZeRO then leaves on this rank are the same elements on all of tp.
static void finish(void *context, Model *model, MicroBatch *micro) {
    TensorParallel *t = context;
    t->before.gradients.finish(t->before.gradients.context, model, micro);
    if (micro->last) sum_partial_gradients(&model->params);
}

void partial_gradients_plug(Model *model, TensorParallel *t) {
    t->before = model->sockets;
    model->sockets.gradients.context = t;
    model->sockets.gradients.begin = begin;
    model->sockets.gradients.ready = ready;
    model->sockets.gradients.finish = finish;
}

void tensor_parallel_plug(Model *model, TensorParallel *t) {
    t->tp = model->mesh.tp;
    partial_gradients_plug(model, t);
    model->sockets.region.context = t;
    model->sockets.region.enter = identity;
    model->sockets.region.leave = all_reduce;
    model->sockets.region.enter_backward = all_reduce;
    model->sockets.region.leave_backward = identity;
}

#ifndef NO_MAIN

// ---- what it costs ----

static void count_a_block(Mesh mesh, const Config *config) {
    Config c = *config;
    c.recompute = RECOMPUTE_NONE;
    c.sp = false;
    c.zero = 0;
    say("\nOne block and micro-batch, tp %d:\n", mesh.tp.size);
    BlockCost block = layout_block_cost(&c, mesh);
    double K = (double)(c.micro_batch * c.seq * c.hidden) * (double)dtype_size((DType)c.dtype);
    for (int pass = FORWARD; pass <= BACKWARD; pass++) {
        Sends sends = block.pass[pass];
        report_equal(pass == FORWARD ? "all-reduces, forward" : "all-reduces, backward", 2,
                     sends.all_reduce.calls, "");
        report_equal("bytes of them, all ranks", 2 * 2 * (mesh.tp.size - 1) * mesh.dp.size * K,
                     sends.all_reduce.bytes, "B");
        report_that(sends.all_gather.calls + sends.reduce_scatter.calls == 0,
                    "tensor parallelism gathers or scatters");
    }
}

static void *region_plug(Trainer *t) {
    TensorParallel *tp = host_alloc(sizeof *tp);
    tensor_parallel_plug(t->model, tp);
    return tp;
}
static void region_unplug(Trainer *t, void *tp) {
    (void)t;
    free(tp);
}

// Two blocks of Llama 3 8B: what they cost in proportion is what all 32 do. On ranks / tp groups at once,
// which have batches of their own, and nothing travels but what tensor parallelism sends.
enum { TOKENS = 4096 };
static StepCost cost_of_8b(Mesh mesh, int tp) {
    const LayoutProgram region = {.plug = region_plug, .unplug = region_unplug};
    Config c = config_default(
        "layers=2 hidden=4096 heads=32 kv-heads=8 ffn=14336 vocab=1024 seq=4096 micro-batch=1 grad-acc=1 "
        "dtype=bf16");
    c.tp = tp;
    Mesh m = mesh_new((MeshShape){.dp = mesh.world.size / tp, .tp = tp});
    m.dp = mesh_single().dp;
    clock_push("across nodes");
    StepCost cost = layout_cost(&c, m, &region);
    clock_pop();
    return cost;
}

// Tokens per second and GPU, as tp takes more of the ranks and, in the end, leaves the node. (With few
// ranks, nodes are made so small that it does.)
static void across_nodes(Mesh mesh, const Config *config) {
    int ranks = mesh.world.size, node = machine_find(config->machine)->gpus_per_node;
    if (node > ranks / 2) node = ranks > 1 ? ranks / 2 : 1;
    if (config->gpus_per_node) node = (int)config->gpus_per_node;
    clock_set_cluster(node, config->compute_efficiency, config->network_efficiency);
    say("\nTwo blocks of Llama 3 8B, 4,096 tokens, %d GPU%s per node, on the model clock:\n", node,
        node > 1 ? "s" : "");
    say("  %-6s %12s %16s %10s %14s %12s\n", "tp", "step, ms", "tokens/s a GPU", "of tp 1", "to last row",
        "exposed, ms");
    double alone = 0, before = 0, most_within = 0, leaving = 0;
    for (int tp = 1, last = 1; tp <= ranks; tp++) {
        if (ranks % tp || 32 % tp) continue;
        StepCost cost = cost_of_8b(mesh, tp);
        double rate = TOKENS / cost.step_seconds / tp, fall = tp > 1 ? 1 - rate / before : 0;
        bool leaves = tp > node && last <= node;
        if (tp == 1) alone = rate;
        if (leaves) leaving = fall;
        if (tp <= node && fall > most_within) most_within = fall;
        say("  %-6d %12.3f %16.0f %9.1f%% %13.1f%% %12.3f%s\n", tp, 1e3 * cost.step_seconds, rate,
            100 * rate / alone, 0 - 100 * fall, 1e3 * cost.comm.exposed_seconds,
            leaves ? "   beyond the node" : "");
        char *name = format_text("tp %d, tokens per second and GPU", tp);
        report_number("across nodes", name, rate, "tokens/s");
        free(name);
        before = rate, last = tp;
    }
    // Of a machine whose links are slow within the node, too, every row falls by nearly half.
    if (leaving > 0 && config->network_efficiency == 1)
        report_that(leaving > most_within,
                    "throughput falls by %.3f within a node, and by %.3f where it ends", most_within,
                    leaving);
    clock_set_cluster((int)config->gpus_per_node, config->compute_efficiency, config->network_efficiency);
}

static void more(Mesh mesh, const Config *config) {
    device_dry_run(true);
    count_a_block(mesh, config);
    across_nodes(mesh, config);
    device_dry_run(false);
}

int main(int argc, char **argv) {
    const LayoutProgram program = {
        .purpose = "Tensor parallelism: every block's matrices are cut over ranks.",
        .claim = "ranks that share every matrix make the step of one device",
        .defaults =
            "layers=3 hidden=48 heads=8 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 tp=0",
        .natural = 4,
        .plug = layout_plug,
        .unplug = layout_unplug,
        .counts = layout_counts,
        .more = more};
    return layout_program(argc, argv, &program);
}
#endif
