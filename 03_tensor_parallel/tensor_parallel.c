// tensor_parallel.c: each block's matrices cut over ranks. Playbook: "Tensor Parallelism in a Transformer Block".
//
// Against 00_single_gpu: each of n ranks stores and computes an n-th of a block, its heads and its part of the
// feed-forward width, on the same tokens; Wq Wk Wv Wgate Wup by columns, Wo Wdown by rows (split_matmul.c):
//
//     x ─ norm1 ─[f]─ Wq Wk Wv ─ rope ─ attention ─ Wo ─[f*]─(+x)─ x2       and the same around the MLP
//
//                 forward           backward
//     f           identity          all-reduce      every rank's columns read what enters: gradients add up
//     f*          all-reduce        identity        what leaves is a sum; the residual is added after it, once
//
// Ranks beyond the key/value heads store copies of them. Each copy serves other query heads, so its gradient is a part;
// their sum, at the end of the step, keeps the copies equal. (Shoeybi et al. 2019, Megatron-LM.)
//
// Bytes sent per rank, block and micro-batch: 4 all-reduces of K = b s h e: 8 (n - 1) / n K; copies once a step.
// Memory per rank: matrices / n; kept by a block: b s e (4 h + (2 a d + 2 kv d + 3 f + a s) / n) and 2 b s statistics.
// Run: build/03_tensor_parallel/tensor_parallel           (--ranks 4 --tp 4, --tp 2 --zero 1, --dtype f32, --dry-run …)
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
    comm_now(comm_all_reduce(partial, REDUCE_SUM, t->tp));
    return tensor_share(partial);
}

// ---- gradients that are parts ----

// All ranges of this rank's own gradients that are partial over this very group of copies, one after another: into
// the buffer, or back. Returns their number of elements; without a buffer that alone.
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
    comm_now(comm_all_reduce(buffer, REDUCE_SUM, copies));
    move_partial(params, copies, buffer, true);
    tensor_free(&buffer);
}

// Whether this weight is the first of the table that is partial over its group of copies.
static bool opens_group(const Params *params, int param) {
    const Param *first = params->param;
    while (!first->partial || first->copies.handle != params->param[param].copies.handle) first++;
    return first == &params->param[param];
}

void partial_gradients_sum(Params *params) {
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
    if (micro->last) partial_gradients_sum(&model->params);
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
        .counts = layout_counts};
    return layout_program(argc, argv, &program);
}
#endif
