// test_ops_layers.c: embedding, RMSNorm, RoPE, SwiGLU and cross-entropy against plain references in f64, in
// all four dtypes, at sizes that are no multiples of vectors; and every backward against finite
// differences. Attention is in test_attention.c.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "arrays.h"
#include "tensor/kernel_table.h"
#include "tensor/ops.h"

// ---- embedding ----

static void embedding_matches_reference(void **state) {
    (void)state;
    const int64_t sizes[][3] = {{1, 1, 1}, {3, 17, 31}, {257, 3, 17}, {31, 257, 3}, {257, 31, 257}};
    for (int size = 0; size < 5; size++)
        for (int type = 0; type < GRADIENT_DTYPES; type++) {
            const DType dtype = gradient_dtypes[type][0], to = gradient_dtypes[type][1];
            int64_t n = sizes[size][0], v = sizes[size][1], h = sizes[size][2];
            Array tokens = random_tokens(n, v, 1), weight = random_array(dtype, v, h, 2);
            Array y = poisoned(dtype, n, h), dy = random_array(dtype, n, h, 3);
            Array dweight = random_array(to, v, h, 4);
            double *want = zeros(n * h), *dwant = zeros(v * h);
            memcpy(dwant, dweight.x, (size_t)(v * h) * sizeof *dwant);
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = 0; j < h; j++) {
                    want[i * h + j] = weight.x[(int64_t)tokens.x[i] * h + j];
                    dwant[(int64_t)tokens.x[i] * h + j] += dy.x[i * h + j];
                }
            op_embedding_forward(y.t, tokens.t, weight.t);
            op_embedding_backward(dweight.t, dy.t, tokens.t);
            array_read(&y);
            array_read(&dweight);
            assert_exact("embedding_forward", &y, want);
            assert_close("embedding_backward", &dweight, dwant, (double)n + 1);
            free(want), free(dwant);
            FREE(&tokens, &weight, &y, &dy, &dweight);
        }
}

typedef struct EmbeddingCase {
    Array y, tokens, weight, dy;
} EmbeddingCase;

static double embedding_loss(void *context) {
    EmbeddingCase *it = context;
    op_embedding_forward(it->y.t, it->tokens.t, it->weight.t);
    return weighted(it->y.t, &it->dy);
}

static void embedding_backward_matches_finite_differences(void **state) {
    (void)state;
    EmbeddingCase it = {poisoned(F64, 11, 5), random_tokens(11, 7, 1), random_array(F64, 7, 5, 2),
                        random_array(F64, 11, 5, 3)};
    Array dweight = array_new(F64, 7, 5, 0);
    op_embedding_backward(dweight.t, it.dy.t, it.tokens.t);
    array_read(&dweight);
    assert_gradient("embedding's dweight", &it.weight, dweight.x, embedding_loss, &it);
    FREE(&it.y, &it.tokens, &it.weight, &it.dy, &dweight);
}

// ---- RMSNorm ----

static void reference_rmsnorm(double *y, double *rstd, const Array *x, const Array *weight, double eps) {
    int64_t n = tensor_rows(x->t), h = tensor_columns(x->t);
    for (int64_t i = 0; i < n; i++) {
        double squares = 0;
        for (int64_t j = 0; j < h; j++) squares += x->x[i * h + j] * x->x[i * h + j];
        rstd[i] = 1 / sqrt(squares / (double)h + eps);
        for (int64_t j = 0; j < h; j++) y[i * h + j] = x->x[i * h + j] * rstd[i] * weight->x[j];
    }
}

// From the Jacobian: dy_i / dx_j = weight_i (rstd (i == j) - rstd^3 x_i x_j / h)
static void reference_rmsnorm_backward(double *dx, double *dweight, const double *dy, const Array *x,
                                       const Array *weight, const double *rstd) {
    int64_t n = tensor_rows(x->t), h = tensor_columns(x->t);
    for (int64_t row = 0; row < n; row++) {
        const double *xr = x->x + row * h, *dyr = dy + row * h, r = rstd[row];
        double dot = 0;
        for (int64_t i = 0; i < h; i++) dot += dyr[i] * weight->x[i] * xr[i];
        for (int64_t j = 0; j < h; j++) {
            dweight[j] += dyr[j] * xr[j] * r;
            dx[row * h + j] += weight->x[j] * r * dyr[j] - r * r * r * xr[j] * dot / (double)h;
        }
    }
}

static void rmsnorm_matches_reference(void **state) {
    (void)state;
    const int64_t sizes[][2] = {{1, 1}, {3, 17}, {31, 3}, {257, 31}, {33, 257}};
    for (int size = 0; size < 5; size++)
        for (int type = 0; type < GRADIENT_DTYPES; type++) {
            const DType dtype = gradient_dtypes[type][0], to = gradient_dtypes[type][1];
            int64_t n = sizes[size][0], h = sizes[size][1];
            // eps as large as the mean square, so that its place matters
            const double eps = 0.75;
            Array x = random_array(dtype, n, h, 1), weight = random_array(dtype, 1, h, 2);
            Array y = poisoned(dtype, n, h), rstd = poisoned(full(dtype), 1, n);
            double *want = zeros(n * h), *want_rstd = zeros(n);
            reference_rmsnorm(want, want_rstd, &x, &weight, eps);
            op_rmsnorm_forward(y.t, rstd.t, x.t, weight.t, eps);
            array_read(&y);
            array_read(&rstd);
            assert_close("rmsnorm_forward's y", &y, want, (double)h + 6);
            assert_close("rmsnorm_forward's rstd", &rstd, want_rstd, (double)h + 4);

            // with and without a residual gradient; dx separate, over dy, over dresidual
            for (int how = 0; how < 4; how++) {
                Array dy = random_array(dtype, n, h, 3), dresidual = random_array(dtype, n, h, 4);
                Array dx = poisoned(dtype, n, h), dweight = random_array(to, 1, h, 5);
                double *want_dx = zeros(n * h), *want_dweight = zeros(h);
                memcpy(want_dweight, dweight.x, (size_t)h * sizeof *want_dweight);
                if (how) memcpy(want_dx, dresidual.x, (size_t)(n * h) * sizeof *want_dx);
                reference_rmsnorm_backward(want_dx, want_dweight, dy.x, &x, &weight, rstd.x);
                Array *out = how == 2 ? &dy : how == 3 ? &dresidual : &dx;
                op_rmsnorm_backward(out->t, dweight.t, how ? dresidual.t : (Tensor){0}, dy.t, x.t, weight.t,
                                    rstd.t);
                array_read(out);
                array_read(&dweight);
                // For h = 1 the two terms of dx are nearly equal: 1 - r^2 x^2 loses what they share.
                assert_close("rmsnorm_backward's dx", out, want_dx, 8 * ((double)h + 8));
                assert_close("rmsnorm_backward's dweight", &dweight, want_dweight, (double)n + 4);
                free(want_dx), free(want_dweight);
                FREE(&dy, &dresidual, &dx, &dweight);
            }
            free(want), free(want_rstd);
            FREE(&x, &weight, &y, &rstd);
        }
}

typedef struct NormCase {
    Array y, rstd, x, weight, dy;
} NormCase;

static double rmsnorm_loss(void *context) {
    NormCase *it = context;
    op_rmsnorm_forward(it->y.t, it->rstd.t, it->x.t, it->weight.t, 0.3);
    return weighted(it->y.t, &it->dy);
}

static void rmsnorm_backward_matches_finite_differences(void **state) {
    (void)state;
    NormCase it = {poisoned(F64, 5, 7), poisoned(F64, 1, 5), random_array(F64, 5, 7, 1),
                   random_array(F64, 1, 7, 2), random_array(F64, 5, 7, 3)};
    Array dx = poisoned(F64, 5, 7), dweight = array_new(F64, 1, 7, 0);
    rmsnorm_loss(&it);
    op_rmsnorm_backward(dx.t, dweight.t, (Tensor){0}, it.dy.t, it.x.t, it.weight.t, it.rstd.t);
    array_read(&dx);
    array_read(&dweight);
    assert_gradient("rmsnorm's dx", &it.x, dx.x, rmsnorm_loss, &it);
    assert_gradient("rmsnorm's dweight", &it.weight, dweight.x, rmsnorm_loss, &it);
    FREE(&it.y, &it.rstd, &it.x, &it.weight, &it.dy, &dx, &dweight);
}

// ---- RoPE ----

// As transformers computes it: by wavelengths.
static double stretched(Rope rope, int64_t j, int64_t d) {
    double frequency = 1 / pow(rope.theta, 2 * (double)j / (double)d),
           wavelength = 2 * acos(-1) / frequency;
    if (rope.factor == 0) return frequency;
    if (wavelength > rope.original / rope.low) return frequency / rope.factor;
    if (wavelength < rope.original / rope.high) return frequency;
    double smooth = (rope.original / wavelength - rope.low) / (rope.high - rope.low);
    return (1 - smooth) * frequency / rope.factor + smooth * frequency;
}

static void rope_matches_reference(void **state) {
    (void)state;
    const int64_t sizes[][3] = {{1, 1, 2}, {3, 5, 6}, {17, 3, 34}, {257, 2, 64}};
    for (int size = 0; size < 4; size++)
        for (int direction = -1; direction <= 1; direction += 2)
            for (int type = 0; type < 4; type++) {
                DType dtype = all_dtypes[type];
                int64_t n = sizes[size][0], heads = sizes[size][1], d = sizes[size][2];
                Array x = random_array(dtype, n, heads * d, 1),
                      positions = random_tokens(n, size / 2 ? 31 : 5003, 2);
                Rope rope = {size % 2 ? 500000 : 10000, size / 2 ? 8 : 0, 1, 4, 40};
                double *want = zeros(x.count);
                for (int64_t i = 0; i < n * heads; i++)
                    for (int64_t j = 0; j < d / 2; j++) {
                        double angle = direction * positions.x[i / heads] * stretched(rope, j, d);
                        double a = x.x[i * d + j], b = x.x[i * d + j + d / 2];
                        want[i * d + j] = a * cos(angle) - b * sin(angle);
                        want[i * d + j + d / 2] = a * sin(angle) + b * cos(angle);
                    }
                op_rope(x.t, positions.t, d, rope, direction);
                array_read(&x);
                assert_close("rope", &x, want,
                             size / 2 ? 128 : 4);  // angles of two formulas, times the position
                free(want);
                FREE(&x, &positions);
            }
}

typedef struct RopeCase {
    Array y, x, positions, dy;
} RopeCase;

static double rope_loss(void *context) {
    RopeCase *it = context;
    op_copy(it->y.t, it->x.t);
    op_rope(it->y.t, it->positions.t, 6, (Rope){.theta = 100}, +1);
    return weighted(it->y.t, &it->dy);
}

static void rope_backward_matches_finite_differences(void **state) {
    (void)state;
    RopeCase it = {poisoned(F64, 7, 18), random_array(F64, 7, 18, 1), random_tokens(7, 31, 2),
                   random_array(F64, 7, 18, 3)};
    Array dx = array_new(F64, 7, 18, 0);
    op_copy(dx.t, it.dy.t);
    op_rope(dx.t, it.positions.t, 6, (Rope){.theta = 100}, -1);
    array_read(&dx);
    assert_gradient("rope's dx", &it.x, dx.x, rope_loss, &it);
    FREE(&it.y, &it.x, &it.positions, &it.dy, &dx);
}

// ---- SwiGLU ----

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static void swiglu_matches_reference(void **state) {
    (void)state;
    const int64_t sizes[] = {1, 3, 17, 31, 257};
    for (int size = 0; size < 5; size++)
        for (int type = 0; type < 4; type++) {
            DType dtype = all_dtypes[type];
            int64_t n = sizes[size], f = 31;
            Array gate = random_array(dtype, n, f, 1), up = random_array(dtype, n, f, 2);
            Array act = poisoned(dtype, n, f), dact = random_array(dtype, n, f, 3);
            Array dgate = poisoned(dtype, n, f), dup = poisoned(dtype, n, f);
            for (int64_t i = 0; i < 7; i++)  // extremes on both sides, where e^x over- or underflows in f32
                gate.x[i] = (double[]){0, 30, -30, 88, -88, 1000, -1000}[i];
            array_write(&gate);
            double *want[] = {zeros(n * f), zeros(n * f), zeros(n * f)};
            for (int64_t i = 0; i < n * f; i++) {
                double g = gate.x[i], s = sigmoid(g);
                want[0][i] = g * s * up.x[i];
                want[1][i] = dact.x[i] * up.x[i] * (s + g * s * (1 - s));
                want[2][i] = dact.x[i] * g * s;
            }
            op_swiglu_forward(act.t, gate.t, up.t);
            op_swiglu_backward(dgate.t, dup.t, dact.t, gate.t, up.t);
            op_swiglu_backward(gate.t, up.t, dact.t, gate.t, up.t);  // over its inputs
            Array *const got[] = {&act, &dgate, &dup, &gate, &up};
            static const char *const names[] = {"swiglu_forward's act", "swiglu_backward's dgate",
                                                "swiglu_backward's dup"};
            for (int i = 0; i < 5; i++) {
                array_read(got[i]);
                if (i < 3) assert_close(names[i], got[i], want[i], 10);
                else assert_exact("swiglu_backward in place", got[i], got[i - 2]->x);
            }
            for (int i = 0; i < 3; i++) free(want[i]);
            FREE(&gate, &up, &act, &dact, &dgate, &dup);
        }
}

// The f32 exponential, tested through act = gate sigmoid(gate): relative error at every gate.
static void swiglu_is_accurate_at_every_gate(void **state) {
    (void)state;
    const int64_t n = 100003;
    Array gate = array_new(F32, 1, n, 0), one = array_new(F32, 1, n, 1), act = poisoned(F32, 1, n);
    for (int64_t i = 0; i < n; i++) gate.x[i] = -85 + 170 * (double)i / (double)n;
    array_write(&gate);
    op_swiglu_forward(act.t, gate.t, one.t);
    array_read(&act);
    for (int64_t i = 0; i < n; i++) {
        double want = gate.x[i] * sigmoid(gate.x[i]);
        // four operations, and an exponential of two roundings
        if (!(fabs(act.x[i] - want) <= 6 * rounding(F32) * fabs(want)))
            fail_msg("silu(%.9g) is %.9g, expected %.9g", gate.x[i], act.x[i], want);
    }
    FREE(&gate, &one, &act);
}

typedef struct SwigluCase {
    Array act, gate, up, dact;
} SwigluCase;

static double swiglu_loss(void *context) {
    SwigluCase *it = context;
    op_swiglu_forward(it->act.t, it->gate.t, it->up.t);
    return weighted(it->act.t, &it->dact);
}

static void swiglu_backward_matches_finite_differences(void **state) {
    (void)state;
    SwigluCase it = {poisoned(F64, 5, 7), random_array(F64, 5, 7, 1), random_array(F64, 5, 7, 2),
                     random_array(F64, 5, 7, 3)};
    Array dgate = poisoned(F64, 5, 7), dup = poisoned(F64, 5, 7);
    op_swiglu_backward(dgate.t, dup.t, it.dact.t, it.gate.t, it.up.t);
    array_read(&dgate);
    array_read(&dup);
    assert_gradient("swiglu's dgate", &it.gate, dgate.x, swiglu_loss, &it);
    assert_gradient("swiglu's dup", &it.up, dup.x, swiglu_loss, &it);
    FREE(&it.act, &it.gate, &it.up, &it.dact, &dgate, &dup);
}

// ---- cross-entropy ----

// Targets with every third ignored, but not all.
static Array random_targets(int64_t n, int64_t v, uint64_t key) {
    Array targets = random_tokens(n, v, key);
    for (int64_t i = 2; i < n; i += 3) targets.x[i] = IGNORED_LABEL;
    array_write(&targets);
    return targets;
}

static void cross_entropy_matches_reference(void **state) {
    (void)state;
    const int64_t sizes[][2] = {{1, 1}, {3, 17}, {31, 3}, {17, 257}, {257, 31}};
    for (int size = 0; size < 5; size++)
        for (int type = 0; type < 4; type++) {
            DType dtype = all_dtypes[type];
            int64_t n = sizes[size][0], v = sizes[size][1];
            const double scale = 1.0 / 41;
            Array logits = random_array(dtype, n, v, 1), targets = random_targets(n, v, 2);
            Array losses = poisoned(full(dtype), 1, n), lse = poisoned(full(dtype), 1, n);
            Array dlogits = poisoned(dtype, n, v);
            // a row of huge logits of both signs, and one of equal logits
            for (int64_t j = 0; j < v; j++) logits.x[j] = j % 2 ? 1e4 : -1e4;
            if (n > 1)
                for (int64_t j = 0; j < v; j++) logits.x[v + j] = -1e4;
            array_write(&logits);
            double *want_losses = zeros(n), *want_lse = zeros(n), *want = zeros(n * v);
            for (int64_t i = 0; i < n; i++) {
                const double *x = logits.x + i * v;
                double max = -INFINITY, sum = 0;
                for (int64_t j = 0; j < v; j++) max = fmax(max, x[j]);
                for (int64_t j = 0; j < v; j++) sum += exp(x[j] - max);
                want_lse[i] = max + log(sum);
                if (targets.x[i] == IGNORED_LABEL) continue;
                want_losses[i] = want_lse[i] - x[(int64_t)targets.x[i]];
                for (int64_t j = 0; j < v; j++)
                    want[i * v + j] = scale * (exp(x[j] - max) / sum - (j == (int64_t)targets.x[i]));
            }
            op_cross_entropy_forward(losses.t, lse.t, logits.t, targets.t);
            array_read(&losses);
            array_read(&lse);
            // The huge rows would hide the errors of the others.
            for (int part = 0; part < 2; part++) {
                int64_t first = part ? (n < 2 ? n : 2) : 0, end = part ? n : (n < 2 ? n : 2);
                Array some_losses = {losses.t, losses.x + first, end - first};
                Array some_lse = {lse.t, lse.x + first, end - first};
                assert_close("cross_entropy_forward's lse", &some_lse, want_lse + first, (double)v + 4);
                // A loss is a difference: it has the errors of lse and of the logit.
                for (int64_t i = 0; i < some_losses.count; i++) {
                    double bound =
                        ((double)v + 4) * rounding(full(dtype)) * fmax(1, fabs(want_lse[first + i]));
                    if (!(fabs(some_losses.x[i] - want_losses[first + i]) <= bound))
                        fail_msg("loss %lld of %s is %.9g, expected %.9g", (long long)(first + i),
                                 tensor_text(logits.t), some_losses.x[i], want_losses[first + i]);
                }
            }
            op_cross_entropy_backward(dlogits.t, logits.t, lse.t, targets.t, scale);
            op_cross_entropy_backward(logits.t, logits.t, lse.t, targets.t, scale);  // over its input
            array_read(&dlogits);
            array_read(&logits);
            // lse of the huge rows has a rounding error relative to 1e4, and e^(x - lse) as large a
            // relative error.
            for (int part = 0; part < 2; part++) {
                int64_t first = part ? (n < 2 ? n : 2) : 0, end = part ? n : (n < 2 ? n : 2);
                Array some = {dlogits.t, dlogits.x + first * v, (end - first) * v};
                assert_close("cross_entropy_backward", &some, want + first * v,
                             part ? (double)v + 16 : 2e4);
            }
            assert_exact("cross_entropy_backward in place", &logits, dlogits.x);
            free(want_losses), free(want_lse), free(want);
            FREE(&logits, &targets, &losses, &lse, &dlogits);
        }
}

typedef struct EntropyCase {
    Array losses, lse, logits, targets;
    double scale;
} EntropyCase;

// Each of 8 equal logits has the gradient scale / 8, and the target scale (1/8 - 1): 2^-25 rounds to zero,
// larger numbers do not. Ignored rows and padding are zero before rounding.
static void gradients_that_f16_makes_zero_are_counted(void **state) {
    (void)state;
    const VocabularyPart part = {16, 8, 5};
    for (int type = 0; type < 4; type++)
        for (int above = 0; above < 2; above++) {
            DType dtype = all_dtypes[type];
            Array logits = array_new(dtype, 3, 8, 0), lse = array_new(full(dtype), 3, 1, log(8));
            Array d = poisoned(dtype, 3, 8), targets = array_new(I32, 3, 1, 7),
                  other = array_new(I32, 3, 1, 9);
            targets.x[1] = other.x[2] = IGNORED_LABEL;
            array_write(&targets);
            array_write(&other);
            double before, all, lost = op_underflows(&before), scale = ldexp(above ? 1.01 : 0.99, -22);
            op_cross_entropy_backward(d.t, logits.t, lse.t, targets.t, scale);
            double now = op_underflows(&all), rows = dtype == F16 ? 2 : 0, none = above ? 0 : rows;
            assert_true(all - before == 8 * rows && now - lost == 7 * none);
            op_cross_entropy_part_backward(d.t, logits.t, lse.t, other.t, scale, part);
            double then = op_underflows(&before);
            assert_true(before - all == 5 * rows && then - now == 4 * none);
            FREE(&logits, &lse, &targets, &d, &other);
        }
}

static double cross_entropy_loss(void *context) {
    EntropyCase *it = context;
    op_cross_entropy_forward(it->losses.t, it->lse.t, it->logits.t, it->targets.t);
    return it->scale * op_sum(it->losses.t);
}

static void cross_entropy_backward_matches_finite_differences(void **state) {
    (void)state;
    EntropyCase it = {poisoned(F64, 1, 7), poisoned(F64, 1, 7), random_array(F64, 7, 11, 1),
                      random_targets(7, 11, 2), 1.0 / 5};
    Array dlogits = poisoned(F64, 7, 11);
    cross_entropy_loss(&it);
    op_cross_entropy_backward(dlogits.t, it.logits.t, it.lse.t, it.targets.t, it.scale);
    array_read(&dlogits);
    assert_gradient("cross-entropy's dlogits", &it.logits, dlogits.x, cross_entropy_loss, &it);
    FREE(&it.losses, &it.lse, &it.logits, &it.targets, &dlogits);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(embedding_matches_reference),
        cmocka_unit_test(embedding_backward_matches_finite_differences),
        cmocka_unit_test(rmsnorm_matches_reference),
        cmocka_unit_test(rmsnorm_backward_matches_finite_differences),
        cmocka_unit_test(rope_matches_reference),
        cmocka_unit_test(rope_backward_matches_finite_differences),
        cmocka_unit_test(swiglu_matches_reference),
        cmocka_unit_test(swiglu_is_accurate_at_every_gate),
        cmocka_unit_test(swiglu_backward_matches_finite_differences),
        cmocka_unit_test(cross_entropy_matches_reference),
        cmocka_unit_test(gradients_that_f16_makes_zero_are_counted),
        cmocka_unit_test(cross_entropy_backward_matches_finite_differences),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    if (argc > 2) ops_use_kernels(kernel_table_linked());  // tests/programs/book_kernels.t
    return cmocka_run_group_tests(tests, NULL, NULL);
}
