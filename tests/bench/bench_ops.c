// bench_ops.c: the bandwidth of each memory-bound operation, as a share of that of a copy measured along
// with it; and the multiplies of a training step in FLOP/s. `make gpu-check` runs it, on any back end.
//
// Tensors of --megabytes are several times larger than a GPU's last-level cache. An operation runs REPEATS
// times between two waits, in ROUNDS rounds; each round also times the copy; the median share is printed.
// Bytes are those that ops.h counts: each argument once.
//     bench <name> <share> of-copy target 0.8 ok|short
#include <stdlib.h>
#include <string.h>

#include "figures.h"
#include "tensor/clock.h"
#include "tensor/device.h"
#include "tensor/ops.h"
#include "tensor/rng.h"

enum { REPEATS = 10, ROUNDS = 5, WIDTH = 4096, VOCAB = 32000 };

typedef struct Tensors {
    DType dtype;
    int64_t n;                            // rows
    Tensor x, y, z, dx;                   // (n, WIDTH)
    Tensor weight, dweight, rstd;         // (WIDTH), (WIDTH), (n)
    Tensor tokens, positions, table;      // (n), (n), (VOCAB, WIDTH)
    Tensor logits, targets, losses, lse;  // (n WIDTH / VOCAB, VOCAB) and its rows
    Tensor sum, master, m, v;             // (n, WIDTH) in f32
    Tensor one;
} Tensors;

static Tensor random_tensor(DType dtype, int64_t rows, int64_t columns, uint64_t key) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(rows, columns));
    int64_t count = rows * columns;
    double *x = host_alloc((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++) x[i] = rng_uniform(key, RNG_TEST, (uint64_t)i) - 0.5;
    tensor_from_doubles(t, x);
    free(x);
    return t;
}

static Tensor whole_numbers(int64_t n, int64_t limit) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, I32, SHAPE(n));
    int32_t *x = host_alloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = (int32_t)(rng_bits(7, RNG_TEST, (uint64_t)i) % (uint64_t)limit);
    tensor_from_host(t, x);
    free(x);
    return t;
}

static Tensor filled(DType dtype, int64_t rows, int64_t columns, double value) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(rows, columns));
    op_fill(t, value);
    return t;
}

static Tensors tensors_new(DType dtype, double megabytes) {
    Tensors t = {.dtype = dtype, .n = (int64_t)(megabytes * 1e6) / WIDTH / (int64_t)dtype_size(dtype)};
    int64_t rows = t.n * WIDTH / VOCAB;
    t.x = random_tensor(dtype, t.n, WIDTH, 1);
    t.z = random_tensor(dtype, t.n, WIDTH, 2);
    t.y = filled(dtype, t.n, WIDTH, 0);
    t.dx = filled(dtype, t.n, WIDTH, 0);
    t.weight = filled(dtype, 1, WIDTH, 1);
    t.dweight = filled(dtype, 1, WIDTH, 0);
    t.rstd = filled(F32, t.n, 1, 1);
    t.tokens = whole_numbers(t.n, VOCAB);
    t.positions = whole_numbers(t.n, 8192);
    t.table = filled(dtype, VOCAB, WIDTH, 0.5);
    t.logits = random_tensor(dtype, rows, VOCAB, 3);
    t.targets = whole_numbers(rows, VOCAB);
    t.losses = filled(F32, rows, 1, 0);
    t.lse = filled(F32, rows, 1, 10);
    t.sum = filled(F32, t.n, WIDTH, 0);
    t.master = filled(F32, t.n, WIDTH, 0.5);
    t.m = filled(F32, t.n, WIDTH, 0);
    t.v = filled(F32, t.n, WIDTH, 0);
    t.one = filled(F32, 1, 1, 1);
    return t;
}

// A number that comes back to the host: everything before it is done.
static void wait_for(const Tensors *t) { op_sum(t->one); }

// ---- the operations ----

static const AdamW hyper = {1e-3, 0.9, 0.95, 1e-8, 0.1, 1, 1};

static void copy(Tensors *t) { op_copy(t->y, t->x); }
static void fill(Tensors *t) { op_fill(t->y, 1); }
static void add(Tensors *t) { op_add(t->y, t->x, t->z); }
static void accumulate(Tensors *t) { op_accumulate(t->sum, t->x); }
static void scale(Tensors *t) { op_scale(t->y, 0.999); }
static void sum(Tensors *t) { op_sum(t->x); }
static void sum_squares(Tensors *t) { op_sum_squares(t->x); }
static void embedding_forward(Tensors *t) { op_embedding_forward(t->y, t->tokens, t->table); }
static void embedding_backward(Tensors *t) { op_embedding_backward(t->table, t->x, t->tokens); }
static void rmsnorm_forward(Tensors *t) { op_rmsnorm_forward(t->y, t->rstd, t->x, t->weight, 1e-5); }
static void rmsnorm_backward(Tensors *t) {
    op_rmsnorm_backward(t->dx, t->dweight, t->y, t->z, t->x, t->weight, t->rstd);
}
static void rope(Tensors *t) { op_rope(t->y, t->positions, 128, (Rope){.theta = 5e5}, 1); }
static void swiglu_forward(Tensors *t) { op_swiglu_forward(t->y, t->x, t->z); }
static void swiglu_backward(Tensors *t) { op_swiglu_backward(t->dx, t->y, t->z, t->x, t->x); }
static void cross_entropy_forward(Tensors *t) {
    op_cross_entropy_forward(t->losses, t->lse, t->logits, t->targets);
}
static void cross_entropy_backward(Tensors *t) {
    op_cross_entropy_backward(t->logits, t->logits, t->lse, t->targets, 1e-3);
}
static void adamw(Tensors *t) { op_adamw(t->y, t->master, t->m, t->v, t->sum, hyper); }
static void sgd(Tensors *t) { op_sgd(t->y, t->master, t->sum, 1e-3, 1); }

static const struct {
    const char *name;
    void (*run)(Tensors *);
} operations[] = {
#define OPERATION(name) \
    { #name, name }
    OPERATION(fill),
    OPERATION(add),
    OPERATION(accumulate),
    OPERATION(scale),
    OPERATION(sum),
    OPERATION(sum_squares),
    OPERATION(embedding_forward),
    OPERATION(embedding_backward),
    OPERATION(rmsnorm_forward),
    OPERATION(rmsnorm_backward),
    OPERATION(rope),
    OPERATION(swiglu_forward),
    OPERATION(swiglu_backward),
    OPERATION(cross_entropy_forward),
    OPERATION(cross_entropy_backward),
    OPERATION(adamw),
    OPERATION(sgd),
};
enum { OPERATIONS = sizeof operations / sizeof *operations };

// ---- timing ----

// Bytes per second.
static double bandwidth(void (*run)(Tensors *), Tensors *t) {
    wait_for(t);
    double bytes = clock_total().bytes, start = wall_seconds();
    for (int i = 0; i < REPEATS; i++) run(t);
    bytes = clock_total().bytes - bytes;
    wait_for(t);
    return bytes / (wall_seconds() - start);
}

static void bench_memory(Tensors *t, const char *only) {
    for (int i = 0; i < OPERATIONS; i++) {
        if (only && !strstr(operations[i].name, only)) continue;
        double shares[ROUNDS], rates[ROUNDS];
        operations[i].run(t);  // the first call may allocate
        for (int round = 0; round < ROUNDS; round++) {
            double yardstick = bandwidth(copy, t);
            rates[round] = bandwidth(operations[i].run, t);
            shares[round] = rates[round] / yardstick;
        }
        double share = median(shares, ROUNDS);
        say("bench %s-%s %.3f of-copy target 0.8 %s   (%.0f GB/s)\n", operations[i].name,
            dtype_name(t->dtype), share, share >= 0.8 ? "ok" : "short", 1e-9 * median(rates, ROUNDS));
    }
}

// The multiply of a linear's forward and the two of its backward: x (n, k), weight (m, k).
static void bench_matmul(DType dtype, int64_t n, int64_t m, int64_t k) {
    Tensor x = random_tensor(dtype, n, k, 1), weight = random_tensor(dtype, m, k, 2);
    Tensor y = random_tensor(dtype, n, m, 3), one = filled(F32, 1, 1, 1);
    const char *const names[] = {"y=xW'", "dx=dyW", "dW=dy'x"};
    for (int way = 0; way < 3; way++) {
        double rates[ROUNDS];
        for (int round = -1; round < ROUNDS; round++) {  // round -1 is the warm-up
            op_sum(one);
            double start = wall_seconds();
            for (int i = 0; i < REPEATS; i++) {
                if (way == 0) op_matmul(y, x, weight, false, true, 0);
                if (way == 1) op_matmul(x, y, weight, false, false, 0);
                if (way == 2) op_matmul(weight, y, x, true, false, 0);
            }
            op_sum(one);
            if (round >= 0)
                rates[round] = 2.0 * (double)n * (double)m * (double)k * REPEATS / (wall_seconds() - start);
        }
        say("bench matmul-%s-%s-%lldx%lldx%lld %.4g TFLOP/s\n", names[way], dtype_name(dtype), (long long)n,
            (long long)m, (long long)k, 1e-12 * median(rates, ROUNDS));
    }
    tensor_free(&x);
    tensor_free(&weight);
    tensor_free(&y);
    tensor_free(&one);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    double megabytes;
    const char *only = NULL;
    int64_t rows;
    Option options[] = {
        {"megabytes", OPTION_REAL, &megabytes, "256", 1, 65536, "MB", "size of each tensor", false},
        {"rows", OPTION_INT, &rows, "16384", 1, 1e6, "tokens", "of the matrix multiplies", false},
        {"only", OPTION_TEXT, &only, NULL, 0, 0, "NAME", "the operations that have this in their name",
         false},
    };
    options_parse(argc, argv, "Bandwidth of each operation, beside that of a copy.", options,
                  sizeof options / sizeof *options);
    say("%s, tensors of %s\n", backend_text(), bytes_text(1e6 * megabytes));
    const DType dtypes[] = {BF16, F32};
    for (int i = 0; i < 2; i++) {
        Tensors t = tensors_new(dtypes[i], megabytes);
        double rates[ROUNDS];
        copy(&t);
        for (int round = 0; round < ROUNDS; round++) rates[round] = bandwidth(copy, &t);
        say("bench copy-%s %.4g GB/s\n", dtype_name(dtypes[i]), 1e-9 * median(rates, ROUNDS));
        bench_memory(&t, only);
        if (!only) bench_matmul(dtypes[i], rows, 8192, 2048);
    }
    return 0;
}
