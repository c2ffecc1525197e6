// ops.c: the front of every operation. It checks shapes and dtypes, counts FLOPs and bytes on both clocks, and hands over
// to the back end that is linked in. In a dry run it stops there: counted, clocked, not computed.
#include "ops.h"

#include "clock.h"
#include "kernels.h"

// ---- checks ----

static bool is_floating(DType dtype) {
    return dtype == F64 || dtype == F32 || dtype == BF16 || dtype == F16;
}

// Statistics, losses and optimizer state beside storage of this dtype.
static DType wide(DType dtype) { return dtype == F64 ? F64 : F32; }

static void floating(const char *op, const char *name, Tensor t) {
    CHECK(tensor_exists(t) && is_floating(t.dtype),
          "%s: %s is %s; f64, f32, bf16 and f16 are computed with", op, name, tensor_text(t));
}

// t has this dtype and is seen as (rows, columns).
static void expect(const char *op, const char *name, Tensor t, DType dtype, int64_t rows, int64_t columns) {
    CHECK(tensor_exists(t) && t.dtype == dtype && tensor_rows(t) == rows && tensor_columns(t) == columns,
          "%s: %s is %s where (%lld, %lld) %s fits the others", op, name, tensor_text(t), (long long)rows,
          (long long)columns, dtype_name(dtype));
}

// t has this dtype and as many elements, in any shape.
static void expect_count(const char *op, const char *name, Tensor t, DType dtype, int64_t count) {
    CHECK(tensor_exists(t) && t.dtype == dtype && tensor_count(t) == count,
          "%s: %s is %s where %lld elements of %s fit the others", op, name, tensor_text(t),
          (long long)count, dtype_name(dtype));
}

// ---- counting ----

// Begins an operation on these tensors, each read or written once. False in a dry run: nothing is to be computed.
static bool begin(const char *name, DType dtype, double flops, const Tensor *tensors, int count) {
    double bytes = 0;
    for (int i = 0; i < count; i++)
        if (tensor_exists(tensors[i])) bytes += (double)tensor_bytes(tensors[i]);
    clock_begin(name, dtype, flops, bytes);
    return !device_is_dry_run();
}
#define BEGIN(name, dtype, flops, ...)                 \
    begin(name, dtype, flops, (Tensor[]){__VA_ARGS__}, \
          (int)(sizeof((Tensor[]){__VA_ARGS__}) / sizeof(Tensor)))

static void *at(Tensor t) { return tensor_address(t); }

// ---- elementwise ----

void op_fill(Tensor y, double value) {
    floating("fill", "y", y);
    if (BEGIN("fill", y.dtype, 0, y)) kernel_fill(y.dtype, at(y), value, tensor_count(y));
    clock_end();
}

void op_copy(Tensor y, Tensor x) {
    CHECK(tensor_count(y) == tensor_count(x), "copy: from %s to %s", tensor_text(x), tensor_text(y));
    if (BEGIN("copy", y.dtype, 0, y, x)) kernel_copy(y.dtype, at(y), x.dtype, at(x), tensor_count(y));
    clock_end();
}

void op_add(Tensor y, Tensor a, Tensor b) {
    floating("add", "y", y);
    expect_count("add", "a", a, y.dtype, tensor_count(y));
    expect_count("add", "b", b, y.dtype, tensor_count(y));
    if (BEGIN("add", y.dtype, 0, y, a, b)) kernel_add(y.dtype, at(y), at(a), at(b), tensor_count(y));
    clock_end();
}

void op_accumulate(Tensor y, Tensor x) {
    floating("accumulate", "y", y);
    floating("accumulate", "x", x);
    expect_count("accumulate", "x", x, x.dtype, tensor_count(y));
    // y is read and written.
    if (BEGIN("accumulate", y.dtype, 0, y, y, x))
        kernel_accumulate(y.dtype, at(y), x.dtype, at(x), tensor_count(y));
    clock_end();
}

void op_scale(Tensor y, double factor) {
    floating("scale", "y", y);
    if (BEGIN("scale", y.dtype, 0, y, y)) kernel_scale(y.dtype, at(y), factor, tensor_count(y));
    clock_end();
}

// ---- reductions to the host ----

double op_sum(Tensor x) {
    floating("sum", "x", x);
    double sum = 0;
    if (BEGIN("sum", x.dtype, 0, x)) sum = kernel_sum(x.dtype, at(x), tensor_count(x));
    clock_end();
    return sum;
}

double op_sum_squares(Tensor x) {
    floating("sum_squares", "x", x);
    double sum = 0;
    if (BEGIN("sum_squares", x.dtype, 0, x)) sum = kernel_sum_squares(x.dtype, at(x), tensor_count(x));
    clock_end();
    return sum;
}

// ---- matrix multiply ----

void op_matmul(Tensor c, Tensor a, Tensor b, bool transpose_a, bool transpose_b, double beta) {
    floating("matmul", "c", c);
    CHECK(beta == 0 || beta == 1, "matmul: beta is %g; it is 0 or 1", beta);
    int64_t m = tensor_rows(c), n = tensor_columns(c), k = transpose_a ? tensor_rows(a) : tensor_columns(a);
    expect("matmul", "a", a, c.dtype, transpose_a ? k : m, transpose_a ? m : k);
    expect("matmul", "b", b, c.dtype, transpose_b ? n : k, transpose_b ? k : n);
    if (BEGIN("matmul", c.dtype, 2.0 * (double)m * (double)n * (double)k, c, a, b, beta ? c : (Tensor){0}))
        kernel_matmul(c.dtype, at(c), at(a), at(b), m, n, k, transpose_a, transpose_b, beta);
    clock_end();
}

// ---- embedding ----

void op_embedding_forward(Tensor y, Tensor tokens, Tensor weight) {
    floating("embedding_forward", "weight", weight);
    int64_t n = tensor_count(tokens), v = tensor_rows(weight), h = tensor_columns(weight);
    expect_count("embedding_forward", "tokens", tokens, I32, n);
    expect("embedding_forward", "y", y, weight.dtype, n, h);
    // Of the weight, the rows of the tokens are read: as many bytes as are written.
    if (BEGIN("embedding_forward", y.dtype, 0, y, tokens, y))
        kernel_embedding_forward(y.dtype, at(y), at(tokens), at(weight), n, v, h);
    clock_end();
}

void op_embedding_backward(Tensor dweight, Tensor dy, Tensor tokens) {
    floating("embedding_backward", "dweight", dweight);
    int64_t n = tensor_count(tokens), v = tensor_rows(dweight), h = tensor_columns(dweight);
    expect_count("embedding_backward", "tokens", tokens, I32, n);
    expect("embedding_backward", "dy", dy, dweight.dtype, n, h);
    if (BEGIN("embedding_backward", dy.dtype, 0, dy, dy, dy, tokens))
        kernel_embedding_backward(dy.dtype, at(dweight), at(dy), at(tokens), n, v, h);
    clock_end();
}

// ---- RMSNorm ----

void op_rmsnorm_forward(Tensor y, Tensor rstd, Tensor x, Tensor weight, double eps) {
    floating("rmsnorm_forward", "x", x);
    int64_t n = tensor_rows(x), h = tensor_columns(x);
    expect("rmsnorm_forward", "y", y, x.dtype, n, h);
    expect_count("rmsnorm_forward", "weight", weight, x.dtype, h);
    expect_count("rmsnorm_forward", "rstd", rstd, wide(x.dtype), n);
    if (BEGIN("rmsnorm_forward", x.dtype, 0, y, rstd, x, weight))
        kernel_rmsnorm_forward(x.dtype, at(y), at(rstd), at(x), at(weight), n, h, eps);
    clock_end();
}

void op_rmsnorm_backward(Tensor dx, Tensor dweight, Tensor dresidual, Tensor dy, Tensor x, Tensor weight,
                         Tensor rstd) {
    floating("rmsnorm_backward", "x", x);
    int64_t n = tensor_rows(x), h = tensor_columns(x);
    expect("rmsnorm_backward", "dx", dx, x.dtype, n, h);
    expect("rmsnorm_backward", "dy", dy, x.dtype, n, h);
    if (tensor_exists(dresidual)) expect("rmsnorm_backward", "dresidual", dresidual, x.dtype, n, h);
    expect_count("rmsnorm_backward", "weight", weight, x.dtype, h);
    expect_count("rmsnorm_backward", "dweight", dweight, x.dtype, h);
    expect_count("rmsnorm_backward", "rstd", rstd, wide(x.dtype), n);
    if (BEGIN("rmsnorm_backward", x.dtype, 0, dx, dweight, dweight, dresidual, dy, x, weight, rstd))
        kernel_rmsnorm_backward(x.dtype, at(dx), at(dweight), at(dresidual), at(dy), at(x), at(weight),
                                at(rstd), n, h);
    clock_end();
}

// ---- RoPE ----

void op_rope(Tensor x, Tensor positions, int64_t head_size, double theta, int direction) {
    floating("rope", "x", x);
    int64_t n = tensor_rows(x);
    CHECK(head_size > 0 && head_size % 2 == 0 && tensor_columns(x) % head_size == 0,
          "rope: x is %s, and its rows are no heads of the even size %lld", tensor_text(x),
          (long long)head_size);
    CHECK(direction == 1 || direction == -1, "rope: direction %d is neither 1 nor -1", direction);
    expect_count("rope", "positions", positions, I32, n);
    if (BEGIN("rope", x.dtype, 0, x, x, positions))
        kernel_rope(x.dtype, at(x), at(positions), n, tensor_columns(x) / head_size, head_size, theta,
                    direction);
    clock_end();
}

// ---- attention ----

// FLOPs of `products` dot products of size d for each pair of a query and a key that the causal mask leaves.
static double pair_flops(int products, AttentionShape shape) {
    double pairs = (double)shape.s * ((double)shape.s + 1) / 2;
    return 2.0 * products * (double)shape.head_size * (double)shape.heads * (double)shape.b * pairs;
}

static void expect_heads(const char *op, const char *name, Tensor t, DType dtype, AttentionShape shape,
                         int64_t heads) {
    expect(op, name, t, dtype, shape.b * shape.s, heads * shape.head_size);
}

static void check_attention(const char *op, Tensor q, Tensor k, Tensor probs, AttentionShape shape) {
    floating(op, "q", q);
    CHECK(shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0,
          "%s: %lld query heads are not divisible by %lld key/value heads", op, (long long)shape.heads,
          (long long)shape.kv_heads);
    expect_heads(op, "q", q, q.dtype, shape, shape.heads);
    expect_heads(op, "k", k, q.dtype, shape, shape.kv_heads);
    expect(op, "probs", probs, q.dtype, shape.b * shape.heads * shape.s, shape.s);
}

void op_attention_forward(Tensor o, Tensor probs, Tensor q, Tensor k, Tensor v, AttentionShape shape) {
    check_attention("attention_forward", q, k, probs, shape);
    expect_heads("attention_forward", "v", v, q.dtype, shape, shape.kv_heads);
    expect_heads("attention_forward", "o", o, q.dtype, shape, shape.heads);
    if (BEGIN("attention_forward", q.dtype, pair_flops(2, shape), o, probs, q, k, v))
        kernel_attention_forward(q.dtype, at(o), at(probs), at(q), at(k), at(v), shape);
    clock_end();
}

void op_attention_probs(Tensor probs, Tensor q, Tensor k, AttentionShape shape) {
    check_attention("attention_probs", q, k, probs, shape);
    if (BEGIN("attention_probs", q.dtype, pair_flops(1, shape), probs, q, k))
        kernel_attention_probs(q.dtype, at(probs), at(q), at(k), shape);
    clock_end();
}

void op_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor d_o, Tensor q, Tensor k, Tensor v,
                           Tensor probs, AttentionShape shape) {
    const char *op = "attention_backward";
    check_attention(op, q, k, probs, shape);
    expect_heads(op, "v", v, q.dtype, shape, shape.kv_heads);
    expect_heads(op, "d_o", d_o, q.dtype, shape, shape.heads);
    expect_heads(op, "dq", dq, q.dtype, shape, shape.heads);
    expect_heads(op, "dk", dk, q.dtype, shape, shape.kv_heads);
    expect_heads(op, "dv", dv, q.dtype, shape, shape.kv_heads);
    if (BEGIN("attention_backward", q.dtype, pair_flops(4, shape), dq, dk, dv, d_o, q, k, v, probs))
        kernel_attention_backward(q.dtype, at(dq), at(dk), at(dv), at(d_o), at(q), at(k), at(v), at(probs),
                                  shape);
    clock_end();
}

// ---- SwiGLU ----

void op_swiglu_forward(Tensor act, Tensor gate, Tensor up) {
    floating("swiglu_forward", "act", act);
    expect("swiglu_forward", "gate", gate, act.dtype, tensor_rows(act), tensor_columns(act));
    expect("swiglu_forward", "up", up, act.dtype, tensor_rows(act), tensor_columns(act));
    if (BEGIN("swiglu_forward", act.dtype, 0, act, gate, up))
        kernel_swiglu_forward(act.dtype, at(act), at(gate), at(up), tensor_count(act));
    clock_end();
}

void op_swiglu_backward(Tensor dgate, Tensor dup, Tensor dact, Tensor gate, Tensor up) {
    floating("swiglu_backward", "dact", dact);
    const Tensor others[] = {dgate, dup, gate, up};
    static const char *const names[] = {"dgate", "dup", "gate", "up"};
    for (int i = 0; i < 4; i++)
        expect("swiglu_backward", names[i], others[i], dact.dtype, tensor_rows(dact), tensor_columns(dact));
    if (BEGIN("swiglu_backward", dact.dtype, 0, dgate, dup, dact, gate, up))
        kernel_swiglu_backward(dact.dtype, at(dgate), at(dup), at(dact), at(gate), at(up),
                               tensor_count(dact));
    clock_end();
}

// ---- softmax cross-entropy ----

static void check_cross_entropy(const char *op, Tensor logits, Tensor lse, Tensor targets) {
    floating(op, "logits", logits);
    expect_count(op, "targets", targets, I32, tensor_rows(logits));
    expect_count(op, "lse", lse, wide(logits.dtype), tensor_rows(logits));
}

void op_cross_entropy_forward(Tensor losses, Tensor lse, Tensor logits, Tensor targets) {
    check_cross_entropy("cross_entropy_forward", logits, lse, targets);
    int64_t n = tensor_rows(logits), v = tensor_columns(logits);
    expect_count("cross_entropy_forward", "losses", losses, lse.dtype, n);
    if (BEGIN("cross_entropy_forward", logits.dtype, 0, losses, lse, logits, targets))
        kernel_cross_entropy_forward(logits.dtype, at(losses), at(lse), at(logits), at(targets), n, v);
    clock_end();
}

void op_cross_entropy_backward(Tensor dlogits, Tensor logits, Tensor lse, Tensor targets, double scale) {
    check_cross_entropy("cross_entropy_backward", logits, lse, targets);
    int64_t n = tensor_rows(logits), v = tensor_columns(logits);
    expect("cross_entropy_backward", "dlogits", dlogits, logits.dtype, n, v);
    if (BEGIN("cross_entropy_backward", logits.dtype, 0, dlogits, logits, lse, targets))
        kernel_cross_entropy_backward(logits.dtype, at(dlogits), at(logits), at(lse), at(targets), scale, n,
                                      v);
    clock_end();
}

// ---- optimizers ----

static void check_optimizer(const char *op, Tensor value, Tensor master, Tensor grad) {
    floating(op, "value", value);
    floating(op, "grad", grad);
    expect_count(op, "grad", grad, grad.dtype, tensor_count(value));
    if (tensor_exists(master)) expect_count(op, "master", master, wide(value.dtype), tensor_count(value));
}

void op_adamw(Tensor value, Tensor master, Tensor m, Tensor v, Tensor grad, AdamW hyper) {
    check_optimizer("adamw", value, master, grad);
    CHECK(hyper.step >= 1, "adamw: steps count from 1, and this is %lld", (long long)hyper.step);
    expect_count("adamw", "m", m, wide(value.dtype), tensor_count(value));
    expect_count("adamw", "v", v, wide(value.dtype), tensor_count(value));
    // State is read and written; with a master, the value is only written.
    Tensor state = tensor_exists(master) ? master : value;
    if (BEGIN("adamw", value.dtype, 0, value, state, master, m, m, v, v, grad))
        kernel_adamw(value.dtype, at(value), at(master), at(m), at(v), grad.dtype, at(grad), hyper,
                     tensor_count(value));
    clock_end();
}

void op_sgd(Tensor value, Tensor master, Tensor grad, double lr, double grad_scale) {
    check_optimizer("sgd", value, master, grad);
    Tensor state = tensor_exists(master) ? master : value;
    if (BEGIN("sgd", value.dtype, 0, value, state, master, grad))
        kernel_sgd(value.dtype, at(value), at(master), grad.dtype, at(grad), lr, grad_scale,
                   tensor_count(value));
    clock_end();
}
