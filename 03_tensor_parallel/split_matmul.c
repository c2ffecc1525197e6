// split_matmul.c: a matrix multiply sharded over ranks, by columns or by rows. Playbook: "Tensor
// Parallelism"; on 2 ranks this is its small example, on N ranks X is (2, 2 N) and W (2 N, N).
//
// Changes from 00_single_gpu: rank i has only a part of W, and Y = X W is assembled from all ranks' parts.
//
//     by columns   X [W_1 W_2 …]             = [X W_1, X W_2, …]      every rank needs all of X
//     by rows      [X_1 X_2 …] [W_1; W_2; …] = X_1 W_1 + X_2 W_2 + …  every rank needs its columns of X
//
//                  X to ranks   Y from them   dW_i           dX from dY
//     by columns   broadcast    all-gather    X^T dY_i       all-reduce of dY_i W_i^T, a part of the sum
//       sent       (N - 1) X    (N - 1) Y     -              2 (N - 1) X
//     by rows      scatter      all-reduce    X_i^T dY       gather of dY W_i^T, columns of dX
//       sent       (N - 1)/N X  2 (N - 1) Y   -              (N - 1)/N X
//
// With one multiply by columns and the next by rows, nothing is sent in between: rank i already has the
// columns that it multiplies next, and an activation function works element by element. In the other order
// the function needs the sum first. (The model stores weights as (out, in): columns of W are rows there.)
// Bytes sent, by all ranks: as above, where X and Y stand for their bytes. Memory per rank: W / N.
// Run: build/03_tensor_parallel/split_matmul              (--ranks 3 …)
// Last line: PASS split_matmul: sharding by columns and by rows gives the single-device product …
#include "01_data_parallel/data_parallel.h"

#ifndef NO_MAIN

// Small matrices of integers, at the end of this file. Each function returns a new one.
static Tensor matrix(int64_t rows, int64_t columns);
static Tensor series(int64_t rows, int64_t columns, double first, double down, double right);
static Tensor times(Tensor a, bool transpose_a, Tensor b, bool transpose_b);
static Tensor rows_of(Tensor t, int i, int n), columns_of(Tensor t, int i, int n);  // part i of n
static Tensor columns_in_order(Tensor t, int n);  // (n, rows, columns / n): all parts, as gathered
static Tensor copy_of(Tensor t);

// The bytes that this rank sends in an all-reduce of `count` numbers.
static double all_reduce_bytes(int64_t count, Group g) {
    Price price = {.kinds = 0};
    price_all_reduce(&price, 1, count, F64, g);
    return price.sent[0].bytes;
}

// ---- one matrix multiply ----

typedef struct Whole {  // what one device has
    Tensor X, W, Y, dY, dX, dW;
} Whole;

static Whole on_one_device(int n) {
    Whole one = {.X = series(2, 2 * n, 0, 2 * n, 1),
                 .W = series(2 * n, n, 10, 1, 2 * n),
                 .dY = series(2, n, 1, n, 1)};
    one.Y = times(one.X, false, one.W, false);
    one.dX = times(one.dY, false, one.W, true);
    one.dW = times(one.X, true, one.dY, false);
    return one;
}

static void by_columns(const Whole *one, Group g) {
    int n = g.size, i = g.rank;
    Tensor X = i == 0 ? copy_of(one->X) : series(2, 2 * n, 0, 0, 0), W = columns_of(one->W, i, n);
    Example e = example_begin("broadcast", "by columns, forward: all need X", X, g);
    comm_wait(comm_broadcast(X, 0, g));
    example_end(&e, tensor_share(X), copy_of(one->X), i == 0 ? (double)((n - 1) * tensor_bytes(X)) : 0,
                NULL);

    Tensor Y = times(X, false, W, false), all = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(n, 2, 1));
    e = example_begin("all_gather", "by columns, forward: Y_i = X W_i are columns of Y", Y, g);
    comm_wait(comm_all_gather(all, Y, NULL, g));
    example_end(&e, all, columns_in_order(one->Y, n), (double)((n - 1) * tensor_bytes(Y)),
                "74 258 98 346 | 74 258 98 346");

    Tensor dY = columns_of(one->dY, i, n), dW = times(X, true, dY, false), dX = times(dY, false, W, true);
    e = example_begin("all_reduce", "by columns, backward: dX is a sum, as every rank has read X", dX, g);
    comm_wait(comm_all_reduce(dX, REDUCE_SUM, g));
    example_end(&e, dX, copy_of(one->dX), all_reduce_bytes(tensor_count(dX), g), NULL);
    e = example_begin(NULL, "by columns, backward: dW_i = X^T dY_i; nothing is sent", dY, g);
    example_end(&e, dW, columns_of(one->dW, i, n), 0, NULL);
    tensor_free(&X);
    tensor_free(&W);
    tensor_free(&Y);
    tensor_free(&dY);
}

static void by_rows(const Whole *one, Group g) {
    int n = g.size, i = g.rank;
    Tensor parts = i == 0 ? columns_in_order(one->X, n) : (Tensor){0}, X = matrix(2, 2),
           W = rows_of(one->W, i, n);
    Example e = example_begin("scatter", "by rows, forward: each needs its columns of X", parts, g);
    comm_wait(comm_scatter(X, parts, NULL, 0, g));
    example_end(&e, tensor_share(X), columns_of(one->X, i, n),
                i == 0 ? (double)((n - 1) * tensor_bytes(X)) : 0, "0 1 4 5 | 2 3 6 7");
    tensor_free(&parts);

    Tensor Y = times(X, false, W, false), dX = times(one->dY, false, W, true), all = {0}, expected = {0};
    e = example_begin("all_reduce", "by rows, forward: Y is the sum of X_i W_i", Y, g);
    comm_wait(comm_all_reduce(Y, REDUCE_SUM, g));
    example_end(&e, Y, copy_of(one->Y), all_reduce_bytes(2 * n, g), "74 98 258 346 | 74 98 258 346");

    if (i == 0) {
        all = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(n, 2, 2));
        expected = columns_in_order(one->dX, n);
    }
    e = example_begin(
        "gather", "by rows, backward: dX_i = dY W_i^T are columns of dX, and go where X came from", dX, g);
    comm_wait(comm_gather(all, dX, NULL, 0, g));
    example_end(&e, all, expected, i == 0 ? 0 : (double)tensor_bytes(dX), NULL);
    e = example_begin(NULL, "by rows, backward: dW_i = X_i^T dY; nothing is sent", one->dY, g);
    example_end(&e, times(X, true, one->dY, false), rows_of(one->dW, i, n), 0, NULL);
    tensor_free(&X);
    tensor_free(&W);
    tensor_free(&dX);
}

// ---- two of them, and an activation function in between: Z = max(0, X A - 90) B ----

static const double threshold = 90;
// New: max(0, y - threshold). Backward turns dh into dy: dh where y > threshold, else 0. Defined below.
static Tensor activation(Tensor y);
static void activation_backward(Tensor dh, Tensor y);

typedef struct TwoLayers {
    Tensor X, A, B, Y, H, Z, dZ, dX;
} TwoLayers;

static TwoLayers two_on_one_device(const Whole *one, int n) {
    TwoLayers two = {.X = one->X, .A = one->W, .Y = one->Y, .dZ = one->dY, .B = series(n, n, 1, n, 1)};
    two.H = activation(two.Y);
    two.Z = times(two.H, false, two.B, false);
    Tensor dY = times(two.dZ, false, two.B, true);
    activation_backward(dY, two.Y);
    two.dX = times(dY, false, two.A, true);
    tensor_free(&dY);
    return two;
}

static void columns_then_rows(const TwoLayers *two, Group g) {
    int n = g.size, i = g.rank;
    Tensor A = columns_of(two->A, i, n), B = rows_of(two->B, i, n);
    Tensor Y = times(two->X, false, A, false), H = activation(Y), Z = times(H, false, B, false);
    Example e = example_begin("all_reduce", "columns, then rows, forward: one sum at the end", Z, g);
    comm_wait(comm_all_reduce(Z, REDUCE_SUM, g));
    double forward = (double)comm_total().calls;
    example_end(&e, Z, copy_of(two->Z), all_reduce_bytes(2 * n, g), NULL);

    Tensor dY = times(two->dZ, false, B, true);
    activation_backward(dY, Y);
    Tensor dX = times(dY, false, A, true);
    e = example_begin("all_reduce", "columns, then rows, backward: one sum at the end", dX, g);
    comm_wait(comm_all_reduce(dX, REDUCE_SUM, g));
    double backward = (double)comm_total().calls;
    example_end(&e, dX, copy_of(two->dX), all_reduce_bytes(2 * 2 * n, g), NULL);
    report_equal("collectives, forward and backward", n > 1 ? 2 : 0, forward + backward, "");
    Tensor *const all[] = {&A, &B, &Y, &H, &dY};
    for (size_t j = 0; j < sizeof all / sizeof *all; j++) tensor_free(all[j]);
}

static void rows_then_columns(const TwoLayers *two, Group g) {
    int n = g.size, i = g.rank;
    Tensor X = columns_of(two->X, i, n), A = rows_of(two->A, i, n), B = columns_of(two->B, i, n);
    Tensor Y = times(X, false, A, false), all = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(n, 2, 1));
    Example e = example_begin("all_reduce", "rows, then columns, forward: a sum in between", Y, g);
    comm_wait(comm_all_reduce(Y, REDUCE_SUM, g));
    double calls = (double)comm_total().calls;
    example_end(&e, tensor_share(Y), copy_of(two->Y), all_reduce_bytes(2 * n, g), NULL);
    Tensor H = activation(Y), Z = times(H, false, B, false);
    e = example_begin("all_gather", "and columns of Z at the end", Z, g);
    comm_wait(comm_all_gather(all, Z, NULL, g));
    calls += (double)comm_total().calls;
    example_end(&e, all, columns_in_order(two->Z, n), (double)((n - 1) * tensor_bytes(Z)), NULL);
    report_equal("collectives, forward alone", n > 1 ? 2 : 0, calls, "");
    Tensor *const mine[] = {&X, &A, &B, &Y, &H, &Z};
    for (size_t j = 0; j < sizeof mine / sizeof *mine; j++) tensor_free(mine[j]);
}

// ---- small matrices of integers, so that every sum is exact ----

static Tensor matrix(int64_t rows, int64_t columns) {
    return tensor_new(MEMORY_ACTIVATION, F64, SHAPE(rows, columns));
}

// first at the top left, `down` more in each row and `right` more in each column
static Tensor series(int64_t rows, int64_t columns, double first, double down, double right) {
    Tensor t = matrix(rows, columns);
    double x[rows * columns];
    for (int64_t i = 0; i < rows * columns; i++)
        x[i] = first + down * (double)(i / columns) + right * (double)(i % columns);
    tensor_from_doubles(t, x);
    return t;
}

static Tensor times(Tensor a, bool transpose_a, Tensor b, bool transpose_b) {
    Tensor c = matrix(a.shape[transpose_a], b.shape[!transpose_b]);
    op_matmul(c, a, b, transpose_a, transpose_b, 0);
    return c;
}

// Copies, with the parts one after another in the order of collectives.
static Tensor rows_of(Tensor t, int i, int n) {
    Tensor part = matrix(t.shape[0] / n, t.shape[1]);
    op_copy(part, tensor_rows_of(t, i * part.shape[0], part.shape[0]));
    return part;
}
static Tensor columns_in_order(Tensor t, int n) {
    int64_t rows = t.shape[0], columns = t.shape[1], each = columns / n;
    double x[rows * columns], parts[rows * columns];
    tensor_to_doubles(x, t);
    for (int64_t i = 0; i < rows * columns; i++) {
        int64_t row = i / columns, column = i % columns;
        parts[column / each * rows * each + row * each + column % each] = x[i];
    }
    Tensor all = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(n, rows, each));
    tensor_from_doubles(all, parts);
    return all;
}
static Tensor columns_of(Tensor t, int i, int n) {
    Tensor all = columns_in_order(t, n), part = matrix(t.shape[0], t.shape[1] / n);
    op_copy(part, tensor_view(all, i * tensor_count(part), SHAPE(part.shape[0], part.shape[1])));
    tensor_free(&all);
    return part;
}

static Tensor copy_of(Tensor t) {
    Tensor copy = tensor_like(MEMORY_ACTIVATION, t);
    op_copy(copy, t);
    return copy;
}

static void print(const char *name, Tensor t) {
    double x[tensor_count(t)];
    tensor_to_doubles(x, t);
    for (int64_t i = 0; i < t.shape[0]; i++) {
        char line[1024];
        int used = snprintf(line, sizeof line, "  %-6s", i == 0 ? name : "");
        for (int64_t j = 0; j < t.shape[1] && used < 1000; j++)
            used += snprintf(line + used, sizeof line - (size_t)used, " %5g", x[i * t.shape[1] + j]);
        say("%s\n", line);
    }
}

static Tensor activation(Tensor y) {
    double x[tensor_count(y)];
    tensor_to_doubles(x, y);
    for (int64_t i = 0; i < tensor_count(y); i++) x[i] = x[i] > threshold ? x[i] - threshold : 0;
    Tensor h = tensor_like(MEMORY_ACTIVATION, y);
    tensor_from_doubles(h, x);
    return h;
}

static void activation_backward(Tensor dh, Tensor y) {
    double x[tensor_count(y)], dx[tensor_count(y)];
    tensor_to_doubles(x, y);
    tensor_to_doubles(dx, dh);
    for (int64_t i = 0; i < tensor_count(y); i++) dx[i] = x[i] > threshold ? dx[i] : 0;
    tensor_from_doubles(dh, dx);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    Config config =
        config_parse(argc, argv, "A matrix multiply sharded over ranks, by columns and by rows.",
                     CONFIG_REPORT | CONFIG_CLUSTER | CONFIG_TRACE | CONFIG_RANKS, NULL, NULL, 0);
    comm_start(argc, argv, 2);
    MeshShape shape = {.tp = comm_ranks()};
    Mesh mesh = mesh_new(shape);
    report_json(config.json);
    timeline_start(&config, mesh.world);
    mesh_print(&mesh, shape);
    Group g = mesh.tp;
    Whole one = on_one_device(g.size);
    TwoLayers two = two_on_one_device(&one, g.size);
    say("\non one device: Y = X W, and the dY that backward starts from\n");
    if (g.size <= 4) print("X", one.X), print("W", one.W), print("Y", one.Y), print("dY", one.dY);
    by_columns(&one, g);
    by_rows(&one, g);
    say("\non one device: Z = max(0, X A - %g) B, and dZ = dY\n", threshold);
    if (g.size <= 4) print("A", two.A), print("B", two.B), print("Z", two.Z);
    columns_then_rows(&two, g);
    rows_then_columns(&two, g);
    Tensor *const all[] = {&one.X,  &one.W, &one.Y, &one.dY, &one.dX,
                           &one.dW, &two.B, &two.H, &two.Z,  &two.dX};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(all[i]);
    timeline_finish(&config, mesh.world);
    report_split(mesh.world.size, NULL);
    return comm_finish(report_verdict("sharding by columns and by rows gives the single-device product"));
}
#endif
