// async_tensor_parallel.c: rows travel while others are multiplied. Playbook: "Tensor Parallelism in a Transformer Block"
// ("block matrix multiplication coupled with async communication"); async TP of PyTorch, Domino.
//
// Against sequence_parallel.c: g and g* are n - 1 messages each, one to every other rank. Rows that enter are multiplied
// as they come, a rank's own first; rows that leave go as soon as they are made, its own last, and each rank adds up the
// n parts of its rows. Rank 0 of 4, the pieces named after the ranks whose rows they are:
//
//     x W, x enters     compute  0 3 2 1        x W, the product leaves    compute  1 2 3 0 +
//                       network  3 2 1                                     network    1 2 3
//
// The linear knows by its storage an input that is still coming, and by the weight's cut an output that leaves. (A ring
// would pass pieces on from neighbour to neighbour, as many bytes, but each message would wait for the one before.)
// Parts are added in rank order, in f32 if they are 16-bit, as a reduce-scatter does: the bits are those of
// sequence_parallel.c wherever the BLAS gives a row the same bits in a product of few rows as in one of many.
//
// Bytes sent per rank, block and micro-batch: 10 (n - 1) / n K, as there. Memory per rank: as there, and K while the parts
// of K = b s h e come in. What it gains, it gains on the model clock and on a GPU: on a CPU nothing travels while the rank
// multiplies, and small products are slower than large ones.
// Run: build/03_tensor_parallel/async_tensor_parallel     (--ranks 3 --heads 6, --model llama-3-8b --dry-run --timeline …)
// Last line: PASS async_tensor_parallel: rows travel behind the products of others, and the step stays that of one device …
#include <stdlib.h>

#include "playbook.h"

static int64_t own_rows(const AsyncTensorParallel *a) {
    int64_t first;
    return sequence_rows(a->tokens, a->tp.rank, a->tp.size, &first);
}

// Borrowed, of a tensor with the rows of all ranks.
static Tensor rows_of(const AsyncTensorParallel *a, Tensor all, int rank) {
    int64_t first, rows = sequence_rows(a->tokens, rank, a->tp.size, &first);
    return tensor_rows_of(all, first, rows);
}

static bool is(Tensor t, Tensor known) { return tensor_exists(known) && t.storage == known.storage; }

// ---- in, g and the backward of g*: an all-gather whose result is used before it is there ----

static Tensor gather(void *context, Tensor own) {
    AsyncTensorParallel *a = context;
    int n = a->tp.size, me = a->tp.rank;
    CHECK(!tensor_exists(a->coming), "rows come into a region, and those before were never multiplied");
    a->coming = tensor_new(MEMORY_ACTIVATION, own.dtype, SHAPE(a->tokens, tensor_columns(own)));
    op_copy(rows_of(a, a->coming, me), own);
    for (int step = 1; step < n; step++) {
        int to = (me + step) % n, from = (me - step + n) % n;
        a->in[step] = comm_send_receive(own, to, rows_of(a, a->coming, from), from, a->tp);
    }
    return tensor_share(a->coming);
}

// The rank whose rows come in this step, when they are there.
static int await(const AsyncTensorParallel *a, int step) {
    if (step > 0) comm_wait(a->in[step]);
    return (a->tp.rank - step + a->tp.size) % a->tp.size;
}

static void all_came(AsyncTensorParallel *a) { tensor_free(&a->coming); }

// ---- out, g* and the backward of g: a reduce-scatter that begins before its input is complete ----

static void begin_leaving(AsyncTensorParallel *a, Tensor partial) {
    CHECK(!tensor_exists(a->leaving), "rows leave a region, and those before were never awaited");
    a->leaving = tensor_share(partial);
    a->parts = tensor_new(MEMORY_COMMUNICATION, partial.dtype,
                          SHAPE(a->tp.size, own_rows(a), tensor_columns(partial)));
}

// Where rank `from` has its part of this rank's rows.
static Tensor part_from(const AsyncTensorParallel *a, int from) {
    return tensor_rows_of(a->parts, from * own_rows(a), own_rows(a));
}

// The rank whose rows are made in this step, 1 … n, and where to.
static int next_to_leave(const AsyncTensorParallel *a, int step, Tensor *place) {
    int to = (a->tp.rank + step) % a->tp.size;
    *place = to == a->tp.rank ? part_from(a, to) : rows_of(a, a->leaving, to);
    return to;
}

// They are made.
static void leave(AsyncTensorParallel *a, int step) {
    int n = a->tp.size, to = (a->tp.rank + step) % n, from = (a->tp.rank - step + n) % n;
    if (step < n)
        a->out[step] = comm_send_receive(rows_of(a, a->leaving, to), to, part_from(a, from), from, a->tp);
}

static Tensor scatter(void *context, Tensor partial) {
    AsyncTensorParallel *a = context;
    // What no linear has made goes the plain way: a lookup's rows.
    if (!is(partial, a->leaving)) return a->before.region.leave(a->before.region.context, partial);
    for (int step = 1; step < a->tp.size; step++) comm_wait(a->out[step]);
    Tensor own = tensor_new(MEMORY_ACTIVATION, partial.dtype, SHAPE(own_rows(a), tensor_columns(partial)));
    op_sum_parts(own, a->parts, a->tp.size);
    tensor_free(&a->parts);
    tensor_free(&a->leaving);
    return own;
}

// ---- linears: piece by piece where something comes or leaves, each piece as the plug before multiplies ----

// y[i] = x W_i^T:  x comes in to weights that are cut by rows; of those cut by columns y leaves
static void forward(void *context, Model *m, int count, Param *const *weight, const Tensor *y, Tensor x) {
    AsyncTensorParallel *a = context;
    const Sockets *plain = &a->before;
    Tensor piece[count];
    if (is(x, a->coming)) {
        for (int step = 0; step < a->tp.size; step++) {
            int of = await(a, step);
            for (int i = 0; i < count; i++) piece[i] = rows_of(a, y[i], of);
            plain->linear.forward(plain->linear.context, m, count, weight, piece, rows_of(a, x, of));
        }
        all_came(a);
    } else if (weight[0]->cut == CUT_COLUMNS) {
        begin_leaving(a, y[0]);
        for (int step = 1; step <= a->tp.size; step++) {
            int to = next_to_leave(a, step, piece);
            plain->linear.forward(plain->linear.context, m, count, weight, piece, rows_of(a, x, to));
            leave(a, step);
        }
    } else {
        plain->linear.forward(plain->linear.context, m, count, weight, y, x);
    }
}

// dx = sum over i of dy[i] W_i:  the other way round, dy comes in to weights that are cut by columns, and else dx leaves
static void backward_input(void *context, Model *m, int count, Param *const *weight, Tensor dx,
                           const Tensor *dy) {
    AsyncTensorParallel *a = context;
    const Sockets *plain = &a->before;
    Tensor piece[count], place;
    if (is(dy[0], a->coming)) {
        for (int step = 0; step < a->tp.size; step++) {
            int of = await(a, step);
            piece[0] = rows_of(a, dy[0], of);
            plain->linear.backward_input(plain->linear.context, m, count, weight, rows_of(a, dx, of),
                                         piece);
        }
        all_came(a);
    } else if (weight[0]->cut != CUT_COLUMNS && weight[0]->cut != CUT_NONE) {
        begin_leaving(a, dx);
        for (int step = 1; step <= a->tp.size; step++) {
            int to = next_to_leave(a, step, &place);
            for (int i = 0; i < count; i++) piece[i] = rows_of(a, dy[i], to);
            plain->linear.backward_input(plain->linear.context, m, count, weight, place, piece);
            leave(a, step);
        }
    } else {
        plain->linear.backward_input(plain->linear.context, m, count, weight, dx, dy);
    }
}

// dW_i += dy[i]^T x is a sum over all rows: cut in pieces, a 16-bit gradient would be rounded n times. So it waits for the
// rows of x, which come while the gradient of Wdown or Wo, which needs none of them, is computed.
static void backward_weight(void *context, Model *m, int count, Param *const *weight, const Tensor *dy,
                            Tensor x) {
    AsyncTensorParallel *a = context;
    if (is(x, a->coming)) {
        for (int step = 1; step < a->tp.size; step++) await(a, step);
        all_came(a);
    }
    a->before.linear.backward_weight(a->before.linear.context, m, count, weight, dy, x);
}

void async_tensor_parallel_plug(Model *model, AsyncTensorParallel *a) {
    Sockets *on = &model->sockets;
    int n = model->mesh.tp.size;
    *a = (AsyncTensorParallel){
        .tp = model->mesh.tp, .tokens = model->config.micro_batch * model->config.seq, .before = *on};
    a->in = host_alloc(2 * n * sizeof *a->in);
    a->out = a->in + n;
    on->region.context = on->linear.context = a;
    on->region.enter = on->region.leave_backward = gather;
    on->region.leave = on->region.enter_backward = scatter;
    on->linear.forward = forward;
    on->linear.backward_input = backward_input;
    on->linear.backward_weight = backward_weight;
}

#ifndef NO_MAIN

int main(int argc, char **argv) {
    const LayoutProgram program = {
        .purpose =
            "Asynchronous tensor parallelism: rows travel while the matrix multiply works on others.",
        .claim = "rows travel behind the products of others, and the step stays that of one device",
        .defaults =
            "layers=3 hidden=48 heads=8 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 tp=0 sp=1",
        .natural = 4,
        .plug = layout_plug_async,
        .unplug = layout_unplug,
        .counts = layout_counts};
    return layout_program(argc, argv, &program);
}
#endif
