// async_tensor_parallel.c: some rows are in flight while others are multiplied. Playbook: "Tensor Parallelism
// in a Transformer Block" ("block matrix multiplication coupled with async communication"); PyTorch's async
// TP.
//
// Changes from sequence_parallel.c: g and g* become N - 1 messages each, one to every other rank. Rows that
// enter are multiplied as they arrive, the rank's own first; rows that leave are sent as they are computed,
// its own last, and each rank adds the N parts of its own rows. Rank 0 of 4; a piece has
// the number of the rank that owns its rows; +: the N parts are added:
//
//     x W^T, x enters   compute  0 3 2 1        x W^T, the product leaves   compute  1 2 3 0 +
//                       network  3 2 1                                      network    1 2 3
//
// (A ring would pass pieces from neighbour to neighbour: the same bytes, but each message would wait for the
// one before.) Parts are added in rank order and rounded once, as in a reduce-scatter: no bit differs from
// sequence_parallel.c if the BLAS computes a row the same way in a product of few rows and in one of many.
// Bytes sent per rank, block and micro-batch: 10 (N - 1) / N K with K = b s h e, as in sequence_parallel.c.
// Memory per rank: the same, and K for the parts. It saves time on the model clock, and is meant for GPUs:
// on a CPU the rank that multiplies moves the bytes itself, and small products are slower than large ones.
// Run: build/03_tensor_parallel/async_tensor_parallel  (--ranks 8, --vocab-parallel, --timeline, --dry-run)
// Last line: PASS async_tensor_parallel: rows are in flight during products, and the ranks reproduce …
#include <stdlib.h>

#include "tensor_parallel.h"

typedef struct Async {
    Group tp;
    Sockets before;       // those it replaced: their linear multiplies each piece
    Request **in, **out;  // (tp) by step: the requests in flight; `out` is the second half of `in`
    Tensor coming;        // (n, h) whose rows are arriving; {0}: none
    Tensor leaving;       // (n, h) partial, whose rows are being sent to their ranks; {0}: none
    Tensor parts;         // (tp, rows, h) each rank's part of this rank's rows of `leaving`
} Async;

static bool same(Tensor t, Tensor known) { return tensor_exists(known) && t.storage == known.storage; }

static int64_t own_rows(const Async *a, int64_t n) {
    int64_t first;
    return sequence_rows(n, a->tp.rank, a->tp.size, &first);
}

// Where a rank's part of this rank's rows is stored.
static Tensor part_from(const Async *a, int rank) {
    int64_t rows = a->parts.shape[1];
    return tensor_rows_of(a->parts, rank * rows, rows);
}

// The rows of a rank. This rank's own rows of `leaving` are stored beside the parts that others will send.
static Tensor rows_of(const Async *a, Tensor all, int rank) {
    if (rank == a->tp.rank && same(all, a->leaving)) return part_from(a, rank);
    int64_t first, rows = sequence_rows(tensor_rows(all), rank, a->tp.size, &first);
    return tensor_rows_of(all, first, rows);
}

// In step i a rank sends to the i-th rank after it, and receives from the i-th before it.
static int destination(const Async *a, int step) { return (a->tp.rank + step) % a->tp.size; }
static int source(const Async *a, int step) { return (a->tp.rank - step + a->tp.size) % a->tp.size; }

// ---- entering, by g and in g*'s backward: an all-gather whose result is used before it is complete ----

static Tensor gather(void *context, const MicroBatch *micro, Tensor own) {
    Async *a = context;
    CHECK(!tensor_exists(a->coming), "rows come into a region, and those before them were not multiplied");
    a->coming = tensor_new(MEMORY_ACTIVATION, own.dtype, SHAPE(micro->b * micro->s, tensor_columns(own)));
    op_copy(rows_of(a, a->coming, a->tp.rank), own);
    for (int step = 1; step < a->tp.size; step++)
        a->in[step] = comm_send_receive(own, destination(a, step), rows_of(a, a->coming, source(a, step)),
                                        source(a, step), a->tp);
    return tensor_share(a->coming);
}

static int64_t rows_outside(void *context, const MicroBatch *micro) {
    return own_rows(context, micro->b * micro->s);
}

// ---- leaving, by g* and in g's backward: a reduce-scatter that begins before its input is complete ----

static void begin_leaving(Async *a, Tensor partial) {
    CHECK(!tensor_exists(a->leaving), "rows leave a region, and nobody has waited for those before them");
    a->leaving = tensor_share(partial);
    a->parts = tensor_new(MEMORY_COMMUNICATION, partial.dtype,
                          SHAPE(a->tp.size, own_rows(a, tensor_rows(partial)), tensor_columns(partial)));
}

static Tensor scatter(void *context, const MicroBatch *micro, Tensor partial) {
    Async *a = context;
    (void)micro;
    CHECK(same(partial, a->leaving), "rows leave a region, and no linear of it has made them");
    for (int step = 1; step < a->tp.size; step++) comm_wait(a->out[step]);
    Tensor own =
        tensor_new(MEMORY_ACTIVATION, partial.dtype, SHAPE(a->parts.shape[1], tensor_columns(partial)));
    op_sum_parts(own, a->parts, a->tp.size);
    tensor_free(&a->parts);
    tensor_free(&a->leaving);
    return own;
}

// ---- linears: an entering tensor is recognized by its storage, a leaving one by its weight's shard ----

// Wo and Wdown: row-parallel in Megatron's terms, where W is (in, out).
static bool is_row_parallel(const Param *param) {
    return param->role == ROLE_O || param->role == ROLE_DOWN;
}

static void product(const Sockets *inner, Model *m, bool backward, int count, Param *const *weight,
                    Tensor x, const Tensor *y, void **kept) {
    if (backward) inner->linear.backward_input(inner->linear.context, m, count, weight, x, y, kept);
    else inner->linear.forward(inner->linear.context, m, count, weight, y, x, kept);
}

// y[i] = x W_i^T; in backward, where y and x stand for their gradients, x = sum over i of y[i] W_i. With
// weights sharded by columns x enters and dx leaves; with a weight sharded by rows y leaves and dy enters.
static void multiply(Async *a, Model *m, bool backward, int count, Param *const *weight, Tensor x,
                     const Tensor *y, void **kept) {
    bool by_rows = is_row_parallel(weight[0]), comes = same(backward ? y[0] : x, a->coming);
    bool leaves = backward ? !by_rows && weight[0]->sharded : by_rows;
    if (!comes && !leaves) {
        product(&a->before, m, backward, count, weight, x, y, kept);
        return;
    }
    if (leaves) begin_leaving(a, backward ? x : y[0]);
    for (int step = 0; step < a->tp.size; step++) {
        int owner = comes ? source(a, step) : destination(a, step + 1);  // own rows first, or own rows last
        if (comes && step > 0) comm_wait(a->in[step]);
        Tensor piece[count];
        for (int i = 0; i < count; i++) piece[i] = rows_of(a, y[i], owner);
        product(&a->before, m, backward, count, weight, rows_of(a, x, owner), piece, kept);
        if (leaves && owner != a->tp.rank)
            a->out[step + 1] =
                comm_send_receive(rows_of(a, a->leaving, owner), owner, part_from(a, source(a, step + 1)),
                                  source(a, step + 1), a->tp);
    }
    if (comes) tensor_free(&a->coming);
}

static void forward(void *context, Model *m, int count, Param *const *weight, const Tensor *y, Tensor x,
                    void **kept) {
    multiply(context, m, false, count, weight, x, y, kept);
}

static void backward_input(void *context, Model *m, int count, Param *const *weight, Tensor dx,
                           const Tensor *dy, void **kept) {
    multiply(context, m, true, count, weight, dx, dy, kept);
}

// dW_i += dy[i]^T x is a sum over all rows; piece by piece a 16-bit gradient would be rounded N times. So
// this waits for all of x. Its all-gather is in flight during the product before, dWdown's or dWo's, whose
// operands this rank has.
static void backward_weight(void *context, Model *m, int count, Param *const *weight, const Tensor *dy,
                            Tensor x, void **kept) {
    Async *a = context;
    for (int step = 1; step < a->tp.size && same(x, a->coming); step++) comm_wait(a->in[step]);
    if (same(x, a->coming)) tensor_free(&a->coming);
    a->before.linear.backward_weight(a->before.linear.context, m, count, weight, dy, x, kept);
}

static void *plug(Model *model) {
    Sockets *sockets = &model->sockets;
    int n = model->mesh.tp.size;
    Async *a = host_alloc(sizeof *a);
    *a = (Async){.tp = model->mesh.tp, .before = *sockets, .in = host_alloc(2 * n * sizeof *a->in)};
    a->out = a->in + n;
    const Recipe *recipe = &model->params.recipe;
    const Codec *codec = recipe->send_rows ? recipe->send_rows : recipe->send_drows;
    CHECK(!codec, "async_tensor_parallel sends rows as they are, and the recipe wants %s: leave it out",
          codec->name);
    if (n == 1) return a;  // nothing to send: rows enter and leave as in sequence_parallel.c
    sockets->region.context = sockets->linear.context = a;
    sockets->region.rows = rows_outside;
    sockets->region.enter = sockets->region.leave_backward = gather;
    sockets->region.leave = sockets->region.enter_backward = scatter;
    sockets->linear.forward = forward;
    sockets->linear.backward_input = backward_input;
    sockets->linear.backward_weight = backward_weight;
    return a;
}

static void unplug(Model *model, void *context) {
    (void)model;
    Async *a = context;
    free(a->in);
    free(a);
}

// ---- the record ----

static void price(Price *price, const Model *m, const void *context) {
    (void)context;
    price->messages = m->mesh.tp.size > 1 || price->messages;
}

static bool enabled(const Config *c) { return config_number(c, "async-tp") && config_number(c, "sp"); }

static const Option async_option = {
    "async-tp", OPTION_FLAG, NULL, NULL,
    0,          0,           "",   "with --sp: rows of --tp are in flight while others are multiplied",
    false};

const Technique async_tensor_parallel = {.name = "async_tensor_parallel",
                                         .option = &async_option,
                                         .options = 1,
                                         .asked = "--tp",
                                         .axes = 1u << AXIS_TP,
                                         .wraps = 1u << SOCKET_REGION | 1u << SOCKET_LINEAR,
                                         .enabled = enabled,
                                         .plug = plug,
                                         .unplug = unplug,
                                         .price = price};

#ifndef NO_MAIN
int main(int argc, char **argv) {
    const Program program = {
        .purpose =
            "Asynchronous tensor parallelism: rows are in flight while the matrix multiply works on "
            "others.",
        .claim = "rows are in flight during products, and the ranks reproduce the single-device step",
        .defaults =
            "layers=3 hidden=48 heads=8 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 tp=0 sp=1 async-tp=1 bucket-mb=0.1",
        .natural = 4,
        .axis = AXIS_TP,
        .before = {"sequence_parallel", NULL, "async-tp", 0},
        .techniques = tensor_layouts,
        .option = &zero_option,
        .options = 1,
        .more = async_overlap};
    return program_main(argc, argv, &program);
}
#endif
