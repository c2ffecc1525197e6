// ops.c: the front of the operations. Each operation describes its arguments in one table: how they are
// used, and the dtype and shape that they must have. The checks and the count of bytes are derived from the
// table; then both clocks start, and the back end that is linked in computes (kernels.h). In a dry run an
// operation is counted and clocked, but not computed.
#include "ops.h"

#include <string.h>

#include "device.h"
#include "in_flight.h"
#include "kernel_table.h"
#include "clock.h"

// ---- the table of an operation's arguments ----

typedef enum Use { READ = 1, WRITTEN = 2, UPDATED = READ | WRITTEN } Use;

typedef struct Argument {
    const char *name;
    Tensor tensor;
    bool optional;     // may be no tensor
    const char *over;  // names of the arguments that it may alias exactly
    int64_t touched;   // how many rows are used; -1: all
    Use use;
    DType dtype;
    int64_t rows, columns;  // seen as (rows, columns); columns -1: `rows` elements in any shape
} Argument;

// IN(x, dtype, rows, columns) or IN(x, dtype, FLAT(count))
// clang-format off
#define IN(t, ...)                 {#t, t, false, "", -1, READ, __VA_ARGS__}
#define OUT(t, ...)                {#t, t, false, "", -1, WRITTEN, __VA_ARGS__}
#define INOUT(t, ...)              {#t, t, false, "", -1, UPDATED, __VA_ARGS__}
#define OUT_OVER(names, t, ...)    {#t, t, false, names, -1, WRITTEN, __VA_ARGS__}
#define OPTIONAL(use, t, ...)      {#t, t, true, "", -1, use, __VA_ARGS__}
#define ROWS(touched, use, t, ...) {#t, t, false, "", touched, use, __VA_ARGS__}
#define FLAT(count)                count, -1
// clang-format on

// For a tensor that may be missing: 0, so that the table reports it.
static int64_t rows_of(Tensor t) { return tensor_exists(t) ? tensor_rows(t) : 0; }
static int64_t columns_of(Tensor t) { return tensor_exists(t) ? tensor_columns(t) : 0; }
static int64_t count_of(Tensor t) { return tensor_exists(t) ? tensor_count(t) : 0; }

// The dtype of a weight's gradient for storage of this dtype: the same, or f32 beside 16 bits.
static DType gradient_of(DType dtype, Tensor gradient) {
    return tensor_exists(gradient) && gradient.dtype == dtype_full(dtype) ? gradient.dtype : dtype;
}

// ---- rules ----

static void need_floating(const char *op, const char *name, Tensor t) {
    CHECK(tensor_exists(t), "%s: %s is no tensor: never made, or already freed", op, name);
    CHECK(t.dtype == F64 || t.dtype == F32 || t.dtype == BF16 || t.dtype == F16,
          "%s: %s is %s; operations compute with f64, f32, bf16 and f16", op, name, tensor_text(t));
}

static void check_shape(const char *op, const Argument *a) {
    Tensor t = a->tensor;
    if (a->optional && !tensor_exists(t)) return;
    bool shape =
        a->columns < 0 ? count_of(t) == a->rows : rows_of(t) == a->rows && columns_of(t) == a->columns;
    if (tensor_exists(t) && t.dtype == a->dtype && shape) return;
    if (a->columns < 0)
        fatal("%s: %s is %s where %lld elements of %s fit the others", op, a->name, tensor_text(t),
              (long long)a->rows, dtype_name(a->dtype));
    fatal("%s: %s is %s where (%lld, %lld) %s fits the others", op, a->name, tensor_text(t),
          (long long)a->rows, (long long)a->columns, dtype_name(a->dtype));
}

// What is written must share no memory with another argument, unless it may alias that one exactly.
static void check_apart(const char *op, const Argument *out, const Argument *other) {
    if (out->tensor.storage != other->tensor.storage) return;
    Tensor a = out->tensor, b = other->tensor;
    if (!tensor_overlaps(a, b)) return;
    CHECK(word_among(out->over, other->name) && a.offset == b.offset && a.dtype == b.dtype,
          "%s: %s %s would overwrite %s %s, with which it shares memory", op, out->name, tensor_text(a),
          other->name, tensor_text(b));
}

static double moved_bytes(const Argument *a) {
    if (!tensor_exists(a->tensor)) return 0;
    double bytes = a->touched < 0
                       ? (double)tensor_bytes(a->tensor)
                       : (double)(a->touched * columns_of(a->tensor)) * (double)dtype_size(a->dtype);
    return a->use == UPDATED ? 2 * bytes : bytes;
}

// Starts an operation whose arithmetic is in `dtype`. False in a dry run: nothing is to be computed.
static bool begin(const char *function, DType dtype, double flops, int count, const Argument *arguments) {
    const char *op = function + strlen("op_");
    double bytes = 0;
    for (int i = 0; i < count; i++) {
        check_shape(op, &arguments[i]);
        in_flight_check(function, arguments[i].tensor, arguments[i].use & WRITTEN, NO_LINE);
        bytes += moved_bytes(&arguments[i]);
    }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < count; j++)
            if (i != j && (arguments[i].use & WRITTEN)) check_apart(op, &arguments[i], &arguments[j]);
    clock_begin(op, dtype, flops, bytes);
    return !device_is_dry_run();
}
#define BEGIN(op, dtype, flops, ...)                                                           \
    begin("op_" op, dtype, flops, (int)(sizeof((Argument[]){__VA_ARGS__}) / sizeof(Argument)), \
          (const Argument[]){__VA_ARGS__})

static void *at(Tensor t) { return tensor_address(t); }

// ---- kernels that take the place of the back end's ----

static struct {
    const KernelTable *table;
    KernelCalls calls;
} replaced;

const KernelTable *ops_use_kernels(const KernelTable *table) {
    const KernelTable *before = replaced.table;
    replaced.table = table;
    return before;
}

KernelCalls ops_kernel_calls(void) { return replaced.calls; }

static bool took(bool it) {
    replaced.calls.all++;
    replaced.calls.taken += it;
    return it;
}

// Runs the kernel of this name: the table's, if there is one and it takes the call, else the back end's.
#define RUN(name, ...)                                                                             \
    do {                                                                                           \
        const KernelTable *table = replaced.table;                                                 \
        if (!table || !table->name || !took(table->name(__VA_ARGS__))) kernel_##name(__VA_ARGS__); \
    } while (0)

// ---- elementwise ----

void op_fill(Tensor y, double value) {
    int64_t count = count_of(y);
    if (BEGIN("fill", y.dtype, 0, OUT(y, y.dtype, FLAT(count)))) kernel_fill(y.dtype, at(y), value, count);
    clock_end();
}

void op_copy(Tensor y, Tensor x) {
    int64_t count = count_of(y);
    if (BEGIN("copy", y.dtype, 0, OUT(y, y.dtype, FLAT(count)), IN(x, x.dtype, FLAT(count))))
        kernel_copy(y.dtype, at(y), x.dtype, at(x), count);
    clock_end();
}

void op_add(Tensor y, Tensor a, Tensor b) {
    need_floating("add", "y", y);
    int64_t count = count_of(y);
    if (BEGIN("add", y.dtype, 0, OUT_OVER("a b", y, y.dtype, FLAT(count)), IN(a, y.dtype, FLAT(count)),
              IN(b, y.dtype, FLAT(count))))
        kernel_add(y.dtype, at(y), at(a), at(b), count);
    clock_end();
}

void op_accumulate(Tensor y, Tensor x) {
    need_floating("accumulate", "y", y);
    need_floating("accumulate", "x", x);
    int64_t count = count_of(y);
    if (BEGIN("accumulate", y.dtype, 0, INOUT(y, y.dtype, FLAT(count)), IN(x, x.dtype, FLAT(count))))
        kernel_accumulate(y.dtype, at(y), x.dtype, at(x), count);
    clock_end();
}

void op_scale(Tensor y, double factor) {
    need_floating("scale", "y", y);
    int64_t count = count_of(y);
    if (BEGIN("scale", y.dtype, 0, INOUT(y, y.dtype, FLAT(count))))
        kernel_scale(y.dtype, at(y), factor, count);
    clock_end();
}

// ---- reductions ----

double op_sum(Tensor x) {
    need_floating("sum", "x", x);
    double sum = 0;
    if (BEGIN("sum", x.dtype, 0, IN(x, x.dtype, FLAT(count_of(x)))))
        sum = kernel_sum(x.dtype, at(x), count_of(x));
    clock_end();
    device_note_read();
    return sum;
}

double op_sum_squares(Tensor x) {
    need_floating("sum_squares", "x", x);
    double sum = 0;
    if (BEGIN("sum_squares", x.dtype, 0, IN(x, x.dtype, FLAT(count_of(x)))))
        sum = kernel_sum_squares(x.dtype, at(x), count_of(x));
    clock_end();
    device_note_read();
    return sum;
}

void op_add_sum(Tensor y, Tensor x, double factor) {
    need_floating("add_sum", "x", x);
    if (BEGIN("add_sum", x.dtype, 0, INOUT(y, F64, FLAT(1)), IN(x, x.dtype, FLAT(count_of(x)))))
        kernel_add_sum(x.dtype, at(y), at(x), count_of(x), factor);
    clock_end();
}

void op_squares_of_ranges(Tensor y, Tensor x, const FlatRange *ranges) {
    need_floating("squares_of_ranges", "x", x);
    int64_t n = count_of(y), count = count_of(x), read = 0;
    for (int64_t i = 0; i < n; i++) {
        const FlatRange r = ranges[i];
        CHECK(r.first >= 0 && r.count >= 0 && r.first <= count && r.count <= count - r.first,
              "squares_of_ranges: range %lld, %lld elements from %lld on, is not within x %s", (long long)i,
              (long long)r.count, (long long)r.first, tensor_text(x));
        read += r.count;
    }
    x = tensor_view(x, 0, SHAPE(count, 1));
    if (BEGIN("squares_of_ranges", x.dtype, 0, OUT(y, F64, FLAT(n)),
              ROWS(read, READ, x, x.dtype, count, 1)))
        kernel_squares_of_ranges(x.dtype, at(y), at(x), ranges, n);
    clock_end();
}

// ---- embedding: of the table, only the rows of the tokens move ----

void op_embedding_forward(Tensor y, Tensor tokens, Tensor weight) {
    need_floating("embedding_forward", "weight", weight);
    const DType type = weight.dtype;
    int64_t n = count_of(tokens), v = rows_of(weight), h = columns_of(weight);
    if (BEGIN("embedding_forward", type, 0, OUT(y, type, n, h), IN(tokens, I32, FLAT(n)),
              ROWS(n, READ, weight, type, v, h)))
        kernel_embedding_forward(type, at(y), at(tokens), at(weight), n, v, h);
    clock_end();
}

void op_embedding_backward(Tensor dweight, Tensor dy, Tensor tokens) {
    need_floating("embedding_backward", "dy", dy);
    const DType type = dy.dtype, to = gradient_of(type, dweight);
    int64_t n = count_of(tokens), v = rows_of(dweight), h = columns_of(dweight);
    if (BEGIN("embedding_backward", type, 0, ROWS(n, UPDATED, dweight, to, v, h), IN(dy, type, n, h),
              IN(tokens, I32, FLAT(n))))
        kernel_embedding_backward(type, to, at(dweight), at(dy), at(tokens), n, v, h);
    clock_end();
}

// ---- RMSNorm ----

void op_rmsnorm_forward(Tensor y, Tensor rstd, Tensor x, Tensor weight, double eps) {
    need_floating("rmsnorm_forward", "x", x);
    const DType type = x.dtype;
    int64_t n = rows_of(x), h = columns_of(x);
    if (BEGIN("rmsnorm_forward", type, 0, OUT(y, type, n, h), OUT(rstd, dtype_full(type), FLAT(n)),
              IN(x, type, n, h), IN(weight, type, FLAT(h))))
        RUN(rmsnorm_forward, type, at(y), at(rstd), at(x), at(weight), n, h, eps);
    clock_end();
}

void op_rmsnorm_backward(Tensor dx, Tensor dweight, Tensor dresidual, Tensor dy, Tensor x, Tensor weight,
                         Tensor rstd) {
    need_floating("rmsnorm_backward", "x", x);
    const DType type = x.dtype, to = gradient_of(type, dweight);
    int64_t n = rows_of(x), h = columns_of(x);
    if (BEGIN("rmsnorm_backward", type, 0, OUT_OVER("dresidual dy", dx, type, n, h),
              INOUT(dweight, to, FLAT(h)), OPTIONAL(READ, dresidual, type, n, h), IN(dy, type, n, h),
              IN(x, type, n, h), IN(weight, type, FLAT(h)), IN(rstd, dtype_full(type), FLAT(n))))
        RUN(rmsnorm_backward, type, at(dx), to, at(dweight), at(dresidual), at(dy), at(x), at(weight),
            at(rstd), n, h);
    clock_end();
}

// ---- RoPE ----

void op_rope(Tensor x, Tensor positions, int64_t head_size, Rope rope, int direction) {
    need_floating("rope", "x", x);
    int64_t n = rows_of(x), columns = columns_of(x);
    CHECK(head_size > 0 && head_size % 2 == 0 && columns % head_size == 0,
          "rope: x is %s, whose rows are not made of heads of an even size, here %lld", tensor_text(x),
          (long long)head_size);
    CHECK(direction == 1 || direction == -1, "rope: direction is %d; it is 1 or -1", direction);
    if (BEGIN("rope", x.dtype, 0, INOUT(x, x.dtype, n, columns), IN(positions, I32, FLAT(n))))
        kernel_rope(x.dtype, at(x), at(positions), n, columns / head_size, head_size, rope, direction);
    clock_end();
}

// ---- attention ----

static void check_heads(const char *op, AttentionShape s) {
    CHECK(s.b >= 0 && s.s >= 0 && s.head_size > 0 && s.kv_heads > 0 && s.heads % s.kv_heads == 0,
          "%s: %lld samples of %lld tokens, %lld query heads on %lld key/value heads of size %lld: the "
          "former heads must be a multiple of the latter",
          op, (long long)s.b, (long long)s.s, (long long)s.heads, (long long)s.kv_heads,
          (long long)s.head_size);
}

// FLOPs of `products` products of vectors of d for each pair of a query and a key that the mask leaves.
static double pair_flops(int products, AttentionShape s) {
    double pairs = (double)s.b * (double)s.heads * ((double)s.s * ((double)s.s + 1) / 2);
    return 2.0 * products * (double)s.head_size * pairs;
}

// dtype and shape of what belongs to queries, to keys, and to pairs
#define QUERIES type, shape.b *shape.s, shape.heads *shape.head_size
#define KEYS    type, shape.b *shape.s, shape.kv_heads *shape.head_size
#define PAIRS   type, shape.b *shape.heads *shape.s, shape.s

void op_attention_forward(Tensor o, Tensor probs, Tensor q, Tensor k, Tensor v, AttentionShape shape) {
    need_floating("attention_forward", "q", q);
    check_heads("attention_forward", shape);
    const DType type = q.dtype;
    if (BEGIN("attention_forward", type, pair_flops(2, shape), OUT(o, QUERIES), OUT(probs, PAIRS),
              IN(q, QUERIES), IN(k, KEYS), IN(v, KEYS)))
        kernel_attention_forward(type, at(o), at(probs), at(q), at(k), at(v), shape);
    clock_end();
}

void op_attention_probs(Tensor probs, Tensor q, Tensor k, AttentionShape shape) {
    need_floating("attention_probs", "q", q);
    check_heads("attention_probs", shape);
    const DType type = q.dtype;
    if (BEGIN("attention_probs", type, pair_flops(1, shape), OUT(probs, PAIRS), IN(q, QUERIES),
              IN(k, KEYS)))
        kernel_attention_probs(type, at(probs), at(q), at(k), shape);
    clock_end();
}

void op_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor d_o, Tensor q, Tensor k, Tensor v,
                           Tensor probs, AttentionShape shape) {
    need_floating("attention_backward", "q", q);
    check_heads("attention_backward", shape);
    const DType type = q.dtype;
    if (BEGIN("attention_backward", type, pair_flops(4, shape), OUT_OVER("q", dq, QUERIES),
              OUT_OVER("k", dk, KEYS), OUT_OVER("v", dv, KEYS), IN(d_o, QUERIES), IN(q, QUERIES),
              IN(k, KEYS), IN(v, KEYS), IN(probs, PAIRS)))
        kernel_attention_backward(type, at(dq), at(dk), at(dv), at(d_o), at(q), at(k), at(v), at(probs),
                                  shape);
    clock_end();
}

// ---- SwiGLU ----

void op_swiglu_forward(Tensor act, Tensor gate, Tensor up) {
    need_floating("swiglu_forward", "act", act);
    const DType type = act.dtype;
    int64_t n = rows_of(act), f = columns_of(act);
    if (BEGIN("swiglu_forward", type, 0, OUT(act, type, n, f), IN(gate, type, n, f), IN(up, type, n, f)))
        RUN(swiglu_forward, type, at(act), at(gate), at(up), n * f);
    clock_end();
}

void op_swiglu_backward(Tensor dgate, Tensor dup, Tensor dact, Tensor gate, Tensor up) {
    need_floating("swiglu_backward", "dact", dact);
    const DType type = dact.dtype;
    int64_t n = rows_of(dact), f = columns_of(dact);
    if (BEGIN("swiglu_backward", type, 0, OUT_OVER("gate", dgate, type, n, f),
              OUT_OVER("up", dup, type, n, f), IN(dact, type, n, f), IN(gate, type, n, f),
              IN(up, type, n, f)))
        RUN(swiglu_backward, type, at(dgate), at(dup), at(dact), at(gate), at(up), n * f);
    clock_end();
}

// ---- softmax cross-entropy ----

void op_cross_entropy_forward(Tensor losses, Tensor lse, Tensor logits, Tensor targets) {
    need_floating("cross_entropy_forward", "logits", logits);
    const DType type = logits.dtype;
    int64_t n = rows_of(logits), v = columns_of(logits);
    if (BEGIN("cross_entropy_forward", type, 0, OUT(losses, dtype_full(type), FLAT(n)),
              OUT(lse, dtype_full(type), FLAT(n)), IN(logits, type, n, v), IN(targets, I32, FLAT(n))))
        RUN(cross_entropy_forward, type, at(losses), at(lse), at(logits), at(targets), n, v);
    clock_end();
}

double op_underflows(double *all) {
    *all = 0;
    return device_is_dry_run() ? 0 : kernel_underflows(all);
}

void op_cross_entropy_backward(Tensor dlogits, Tensor logits, Tensor lse, Tensor targets, double scale) {
    need_floating("cross_entropy_backward", "logits", logits);
    const DType type = logits.dtype;
    int64_t n = rows_of(logits), v = columns_of(logits);
    if (BEGIN("cross_entropy_backward", type, 0, OUT_OVER("logits", dlogits, type, n, v),
              IN(logits, type, n, v), IN(lse, dtype_full(type), FLAT(n)), IN(targets, I32, FLAT(n))))
        RUN(cross_entropy_backward, type, at(dlogits), at(logits), at(lse), at(targets), scale, n, v);
    clock_end();
}

// ---- sums of parts, and columns that are split ----

void op_sum_parts(Tensor y, Tensor x, int64_t parts) {
    need_floating("sum_parts", "y", y);
    CHECK(parts >= 1, "sum_parts: a sum of %lld parts", (long long)parts);
    int64_t count = count_of(y);
    if (BEGIN("sum_parts", y.dtype, 0, OUT(y, y.dtype, FLAT(count)), IN(x, y.dtype, FLAT(parts * count))))
        kernel_sum_parts(y.dtype, at(y), at(x), parts, count);
    clock_end();
}

// Groups of columns of (n, c) = `whole` that go to the parts of (parts, n, w).
static int64_t groups_of(const char *op, Tensor parts, Tensor whole) {
    need_floating(op, "the whole", whole);
    CHECK(parts.dims == 3, "%s: the parts are %s, where (parts, rows, columns) are wanted", op,
          tensor_text(parts));
    int64_t w = parts.shape[2], groups = w > 0 && columns_of(whole) % w == 0 ? columns_of(whole) / w : 0;
    CHECK(groups > 0 && parts.shape[0] % groups == 0,
          "%s: %s holds no whole groups of columns of %s, or not each as often", op, tensor_text(parts),
          tensor_text(whole));
    return groups;
}

void op_split_columns(Tensor y, Tensor x) {
    int64_t groups = groups_of("split_columns", y, x), n = rows_of(x), w = columns_of(y);
    if (BEGIN("split_columns", x.dtype, 0, OUT(y, x.dtype, y.shape[0] * n, w),
              IN(x, x.dtype, n, groups * w)))
        kernel_split_columns(x.dtype, at(y), at(x), groups, y.shape[0] / groups, n, w);
    clock_end();
}

void op_join_columns(Tensor y, Tensor x) {
    int64_t groups = groups_of("join_columns", x, y), n = rows_of(y), w = columns_of(x);
    if (BEGIN("join_columns", y.dtype, 0, OUT(y, y.dtype, n, groups * w),
              IN(x, y.dtype, x.shape[0] * n, w)))
        kernel_join_columns(y.dtype, at(y), at(x), groups, x.shape[0] / groups, n, w);
    clock_end();
}

// ---- optimizers: with a master, the value is only written ----

void op_adamw(Tensor value, Tensor master, Tensor m, Tensor v, Tensor grad, AdamW hyper) {
    need_floating("adamw", "value", value);
    need_floating("adamw", "grad", grad);
    CHECK(hyper.step >= 1, "adamw: step is %lld; steps count from 1", (long long)hyper.step);
    const DType type = value.dtype;
    int64_t count = count_of(value);
    Argument to[] = {INOUT(value, type, FLAT(count)), OUT(value, type, FLAT(count))};
    if (BEGIN("adamw", type, 0, to[tensor_exists(master)],
              OPTIONAL(UPDATED, master, dtype_full(type), FLAT(count)),
              INOUT(m, dtype_full(type), FLAT(count)), INOUT(v, dtype_full(type), FLAT(count)),
              IN(grad, grad.dtype, FLAT(count))))
        RUN(adamw, type, at(value), at(master), at(m), at(v), grad.dtype, at(grad), hyper, count);
    clock_end();
}

void op_sgd(Tensor value, Tensor master, Tensor grad, double lr, double grad_scale) {
    need_floating("sgd", "value", value);
    need_floating("sgd", "grad", grad);
    const DType type = value.dtype;
    int64_t count = count_of(value);
    Argument to[] = {INOUT(value, type, FLAT(count)), OUT(value, type, FLAT(count))};
    if (BEGIN("sgd", type, 0, to[tensor_exists(master)],
              OPTIONAL(UPDATED, master, dtype_full(type), FLAT(count)), IN(grad, grad.dtype, FLAT(count))))
        kernel_sgd(type, at(value), at(master), grad.dtype, at(grad), lr, grad_scale, count);
    clock_end();
}

#include "ops_matmul.inc"
#include "ops_attention_chunk.inc"
#include "ops_vocabulary_part.inc"
#include "ops_experts.inc"
#include "ops_codes.inc"
