// recipe_tables.c: what the recipes of fp8.c are good for, on one device. Playbook: "FP8 pretraining";
// DeepSeek-V3 2024, sections 3.3.1 and 3.3.2.
//
// Outliers: one element in 4,096 of x is some hundred times the others. A scale of the whole tensor then
// pushes all others towards the lower end of the codes; one of a tile, those of its tile alone.
//
// Long sums: Hopper's tensor core adds products of 8 bits with about 14 bits of the sum (DeepSeek-V3), so
// that what is small beside the sum is lost, and more of it the longer the sum is. Here: after every 32
// products the sum is cut off to 14 bits, which is a model of it. Sums that go to f32 every 128 do not
// grow so long.
//
// This file has no main: fp8.c runs it.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "files.h"
#include "mixed_precision.h"
#include "tensor/rng.h"

static Tensor random_matrix(int64_t rows, int64_t columns, uint64_t key, double shift, double outlier) {
    int64_t count = rows * columns;
    double *x = host_alloc((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++) {
        x[i] = shift + rng_normal(key, RNG_TEST, (uint64_t)i);
        if (outlier > 0 && rng_bits(key + 1, RNG_TEST, (uint64_t)i) % 4096 == 0) x[i] *= outlier;
    }
    Tensor t = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(rows, columns));
    tensor_from_doubles(t, x);
    free(x);
    return t;
}

static Codes codes_of(Tensor x, DType dtype, Tile tile, ScaleRule rule) {
    int64_t rows = tensor_rows(x), columns = tensor_columns(x);
    Codes c = {.tile = tile};
    c.scale = tensor_new(MEMORY_ACTIVATION, F32,
                         SHAPE(tiles_of(rows, tile.rows), tiles_of(columns, tile.columns)));
    c.codes = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(rows, columns));
    op_fill(c.scale, 0);
    op_tile_amax(c.scale, x, false, tile);
    op_tile_scale(c.scale, c.scale, dtype, rule);
    op_encode(c.codes, x, c.scale, false, tile);
    return c;
}

static void free_codes(Codes *c) {
    tensor_free(&c->codes);
    tensor_free(&c->scale);
}

// Relative, in L2; *bias: of the mean.
static double relative_error(Tensor got, Tensor want, double *bias) {
    int64_t count = tensor_count(want);
    double *x = host_alloc((size_t)count * sizeof *x), *y = host_alloc((size_t)count * sizeof *y);
    double error = 0, norm = 0, off = 0, sum = 0;
    tensor_to_doubles(x, got);
    tensor_to_doubles(y, want);
    for (int64_t i = 0; i < count; i++) {
        error += (x[i] - y[i]) * (x[i] - y[i]);
        norm += y[i] * y[i];
        off += x[i] - y[i];
        sum += fabs(y[i]);
    }
    free(x);
    free(y);
    if (bias) *bias = off / sum;
    return sqrt(error / norm);
}

// ---- outliers: of the product without the outliers' own rows nothing else would be seen ----

// The error of x W^T in those rows of x that have no outlier: what a scale does to the innocent.
static double innocent_error(Tensor got, Tensor want, Tensor x) {
    int64_t rows = tensor_rows(x), columns = tensor_columns(x), out = tensor_columns(want);
    double *v = host_alloc((size_t)(rows * columns) * sizeof *v), error = 0, norm = 0;
    double *a = host_alloc((size_t)(rows * out) * sizeof *a),
           *b = host_alloc((size_t)(rows * out) * sizeof *b);
    tensor_to_doubles(v, x);
    tensor_to_doubles(a, got);
    tensor_to_doubles(b, want);
    for (int64_t i = 0; i < rows; i++) {
        double most = 0;
        for (int64_t j = 0; j < columns; j++) most = fmax(most, fabs(v[i * columns + j]));
        for (int64_t j = 0; j < out && most < 10; j++) {
            error += (a[i * out + j] - b[i * out + j]) * (a[i * out + j] - b[i * out + j]);
            norm += b[i * out + j] * b[i * out + j];
        }
    }
    free(v);
    free(a);
    free(b);
    return sqrt(error / norm);
}

static double outlier_error(const Fp8Recipe *r, double outlier) {
    enum { ROWS = 64, IN = 512, OUT = 128 };
    Tensor x = random_matrix(ROWS, IN, 11, 0, outlier), w = random_matrix(OUT, IN, 12, 0, 0);
    Tensor want = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(ROWS, OUT)),
           got = tensor_like(MEMORY_ACTIVATION, want);
    int64_t along = !r->tile ? 0 : r->rule == SCALE_POWER_OF_TWO ? 32 : 128;
    Codes a = codes_of(x, r->forward, (Tile){r->tile ? 1 : 0, along}, r->rule);
    Codes b = codes_of(w, r->forward, (Tile){r->square ? along : r->tile, along}, r->rule);
    op_matmul(want, x, w, false, true, 0);
    op_matmul_codes(got, a, b, r->sum, 0);
    double error = innocent_error(got, want, x);
    free_codes(&a), free_codes(&b);
    tensor_free(&x), tensor_free(&w), tensor_free(&want), tensor_free(&got);
    return error;
}

static void show_outliers(void) {
    static const double sizes[] = {0, 1e3, 1e5, 1e6};
    double error[8][4];
    say("\nx W^T of 512 products, one element of x in 4,096 so many times as large; error of the rows "
        "without\n");
    say("  %-12s %10s %10s %10s %10s", "", "none", "1e3", "1e5", "1e6");
    for (int i = 0; i < fp8_recipe_count; i++) {
        for (int j = 0; j < 4; j++) error[i][j] = outlier_error(&fp8_recipes[i], sizes[j]);
        say("  %-12s %10.4f %10.4f %10.4f %10.4f", fp8_recipes[i].name, error[i][0], error[i][1],
            error[i][2], error[i][3]);
        report_number("outliers of 1e5", fp8_recipes[i].name, error[i][2], "");
        bool tamed = error[i][3] < 1.05 * error[i][0];
        report_that(tamed == fp8_recipes[i].tile,
                    "%s: outliers change the error of other rows from %g to %g", fp8_recipes[i].name,
                    error[i][0], error[i][3]);
    }
}

// ---- long sums ----

// Of a product with k terms of one sign, as gradients of weights are: the error of its sum alone.
static double sum_error(int64_t k, CodesSum sum, double *bias) {
    enum { SIDE = 24 };
    Tensor x = random_matrix(SIDE, k, 21, 1, 0), w = random_matrix(SIDE, k, 22, 1, 0);
    Tensor want = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(SIDE, SIDE)),
           got = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(SIDE, SIDE));
    Codes a = codes_of(x, E4M3, (Tile){0, 0}, SCALE_REAL), b = codes_of(w, E4M3, (Tile){0, 0}, SCALE_REAL);
    op_matmul_codes(want, a, b, (CodesSum){0, 0}, 0);
    op_matmul_codes(got, a, b, sum, 0);
    double error = relative_error(got, want, bias);
    free_codes(&a), free_codes(&b);
    tensor_free(&x), tensor_free(&w), tensor_free(&want), tensor_free(&got);
    return error;
}

static void show_sums(void) {
    static const struct {
        const char *name;
        CodesSum sum;
    } ways[] = {{"f32", {0, 0}}, {"14 bits", {14, 0}}, {"14 bits, to f32 every 128", {14, 128}}};
    static const int64_t lengths[] = {512, 4096, 16384};
    double error[3][3], bias[3][3];
    say("\nSums of products of codes, and how much too small they are\n");
    say("  %-28s %16s %16s %16s", "", "K = 512", "4096", "16384");
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 3; j++) error[i][j] = sum_error(lengths[j], ways[i].sum, &bias[i][j]);
        say("  %-28s %9.1e %6.2f%% %8.1e %6.2f%% %8.1e %6.2f%%", ways[i].name, error[i][0],
            -100 * bias[i][0], error[i][1], -100 * bias[i][1], error[i][2], -100 * bias[i][2]);
        report_number("sums of 4096", ways[i].name, error[i][1], "");
        report_number("sums of 16384", ways[i].name, error[i][2], "");
    }
    for (int j = 1; j < 3; j++) {
        report_that(error[1][j] > 4 * error[2][j], "sums of 14 bits are off by %g, promoted by %g",
                    error[1][j], error[2][j]);
        report_that(error[1][j] > 1.5 * error[1][j - 1], "longer sums of 14 bits are not further off");
        report_that(error[2][j] < 2 * error[2][0],
                    "longer sums are further off although they are promoted");
        report_that(bias[1][j] < 0, "what is cut off does not make sums smaller");
    }
}

// ---- training ----

static const Technique *const one_device[] = {&fp8_recipe, &recompute, NULL};

// recipe 0: none, plain bf16
static Config small(int recipe, const char *more) {
    char *text = format_text(
        "layers=1 hidden=32 heads=4 kv-heads=4 ffn=96 seq=32 micro-batch=8 dtype=bf16 optimizer=adamw "
        "warmup=0 "
        "clip=1 weight-decay=0 %s",
        more);
    Config c = config_default(text);
    free(text);
    config_set(&c, "fp8", recipe);
    config_set(&c, "fp8-tile", 0);
    config_set(&c, "fp8-wire", 0);
    return c;
}

// Weights are cast once in each step of the optimizer, whatever runs forward again.
static void show_casts(void) {
    Config c = small(1, "grad-acc=3 steps=2");
    c.recompute = RECOMPUTE_FULL;
    Trainer *t = trainer_new(&c, mesh_single(), one_device);
    int64_t weights = 0;
    for (int i = 0; i < t->model->params.count; i++) weights += fp8_is_cast(&t->model->params.param[i]);
    train_step(t, NULL);
    train_step(t, NULL);
    say("\n2 steps of 3 micro-batches, each forward twice:");
    report_equal("casts of weights", 2 * (double)weights,
                 (double)fp8_linear_casts(trainer_context(t, &fp8_recipe)), "");
    trainer_free(t);
}

// How far each recipe comes beside bf16.
static void show_losses(void) {
    double bf16 = 0;
    say("\n160 steps of a small model, --lr 0.003 that falls to its tenth:\n");
    say("  %-12s %12s %12s", "", "last losses", "of bf16's");
    for (int i = 0; i <= fp8_recipe_count; i++) {
        Config c = small(i, "steps=160 lr=0.003");
        const char *name = i ? fp8_recipes[i - 1].name : "bf16";
        Run run = run_of(&c, one_device);
        if (i == 0) bf16 = run.last;
        say("  %-12s %12.4f %+11.2f%%", name, run.last, 100 * (run.last / bf16 - 1));
        report_number("last losses", name, run.last, "nats");
        report_that(fabs(run.last / bf16 - 1) < 0.01, "%s: its loss is not within 1%% of bf16's", name);
        run_free(&run);
    }
}

void fp8_tables(Mesh mesh, const Config *config) {
    (void)mesh, (void)config;
    show_outliers();
    show_sums();
    show_casts();
    show_losses();
}
