// recipe_tables.c: the strengths and limits of fp8.c's recipes, on one device. Playbook: "FP8 pretraining";
// DeepSeek-V3 2024, sections 3.3.2 and 3.5.2.
//
// Outliers: one element in 4,096 of x is up to a million times as large as the others. A scale of the whole
// tensor then pushes all others to the lower end of the codes; a tile's scale only those of its tile.
//
// Long sums: Hopper's tensor cores keep about 14 bits of a sum of 8-bit products (DeepSeek-V3), so products
// that are small beside the sum are lost, and more of them the longer the sum is. They add 32 products at a
// time to the sum: all are aligned to the largest exponent among them, and bits below its 14th are cut off,
// as are those of the result (sum_in_bits). Sums that are moved to f32 every 128 products stay short.
//
// This file has no main: fp8.c runs it.
#include <math.h>
#include <stdlib.h>

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

static Codes encoded(Tensor x, DType dtype, Tile tile, ScaleRule rule) {
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
    *bias = off / sum;
    return sqrt(error / norm);
}

// ---- outliers: rows that have one are left out, since their own error would hide all others ----

// The error of x W^T in those rows of x that have no outlier of their own.
static double error_without_outliers(Tensor got, Tensor want, Tensor x) {
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
    Codes a = encoded(x, r->forward, (Tile){r->tile ? 1 : 0, along}, r->rule);
    Codes b = encoded(w, r->forward, (Tile){r->square ? along : r->tile, along}, r->rule);
    op_matmul(want, x, w, false, true, 0);
    op_matmul_codes(got, a, b, r->sum, 0);
    double error = error_without_outliers(got, want, x);
    free_codes(&a), free_codes(&b);
    tensor_free(&x), tensor_free(&w), tensor_free(&want), tensor_free(&got);
    return error;
}

static void show_outliers(void) {
    static const double sizes[] = {0, 1e3, 1e5, 1e6};
    double error[8][4];
    say("\nx W^T of 512 products, one element of x in 4,096 this many times as large: the error of all other "
        "rows\n");
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

// The error of the sum alone, over k products of elements with mean 1 and deviation 1: the sum grows with k,
// and what is small beside it is lost.
static double sum_error(int64_t k, CodesSum sum, double *bias) {
    enum { SIDE = 24 };
    Tensor x = random_matrix(SIDE, k, 21, 1, 0), w = random_matrix(SIDE, k, 22, 1, 0);
    Tensor want = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(SIDE, SIDE)),
           got = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(SIDE, SIDE));
    Codes a = encoded(x, E4M3, (Tile){0, 0}, SCALE_REAL), b = encoded(w, E4M3, (Tile){0, 0}, SCALE_REAL);
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
    say("\nSums of products of codes: relative error, and by how much they are too small\n");
    say("  %-28s %16s %16s %16s", "", "K = 512", "4096", "16384");
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 3; j++) error[i][j] = sum_error(lengths[j], ways[i].sum, &bias[i][j]);
        say("  %-28s %9.1e %6.2f%% %8.1e %6.2f%% %8.1e %6.2f%%", ways[i].name, error[i][0],
            100 * fabs(bias[i][0]), error[i][1], 100 * fabs(bias[i][1]), error[i][2],
            100 * fabs(bias[i][2]));
        report_number("sums of 4096", ways[i].name, error[i][1], "");
        report_number("sums of 16384", ways[i].name, error[i][2], "");
    }
    for (int j = 1; j < 3; j++) {
        report_that(error[1][j] > 4 * error[2][j], "sums of 14 bits are off by %g, promoted by %g",
                    error[1][j], error[2][j]);
        report_that(error[1][j] > 1.5 * error[1][j - 1], "longer sums of 14 bits are not further off");
        report_that(error[2][j] < 2 * error[2][0],
                    "longer sums are further off although they are promoted");
        report_that(bias[1][j] < 0, "truncation does not make sums smaller");
    }
}

// ---- bytes per parameter ----

// What is allocated for a weight that is multiplied in 8 bits, by the roles of the playbook's table.
typedef struct Row {
    double master, sum, weight, gradient, m, v;
} Row;

// In a recipe with its own state, the table's weights are codes, and what the optimizer updates is separate:
// masters or, if these are bf16, the weights from which the emulation casts.
static bool steps_beside_codes(const Fp8Recipe *r) { return r && fp8_own_state(r); }

static Row row_of(const Recipe *is, const Fp8Recipe *r) {
    double stored = (double)dtype_size(is->weight), master = (double)dtype_size(is->master);
    bool masters = recipe_has_masters(*is), beside = steps_beside_codes(r);
    return (Row){.master = masters  ? master
                           : beside ? stored
                                    : 0,
                 .sum = recipe_has_accumulators(*is) ? (double)dtype_size(is->sum) : 0,
                 .weight = beside ? 1 : stored,
                 .gradient = (double)dtype_size(is->gradient),
                 .m = (double)dtype_size(is->moment),
                 .v = (double)dtype_size(is->second)};
}

// All that a step holds besides activations: each element in its roles, the bf16 copy if the table has codes
// and masters, casts and scales.
static double bytes_of(const Trainer *t, Row row, const Fp8Recipe *r) {
    Recipe is = t->model->params.recipe;
    double each = row.master + row.sum + row.weight + row.gradient + row.m + row.v;
    if (steps_beside_codes(r)) each += (recipe_has_masters(is) ? (double)dtype_size(is.weight) : 0) - 1;
    return each * (double)params_elements(&t->model->params) + (r ? fp8_extra_bytes(t) : 0);
}

static void show_row(const char *name, const Config *c, Techniques techniques, const Fp8Recipe *r,
                     double playbook) {
    Trainer *t = trainer_new(c, mesh_single(), techniques);
    memory_reset_peak();
    train_step(t, NULL);
    Memory memory = memory_account();
    Row row = row_of(&t->model->params.recipe, r);
    double total = row.master + row.sum + row.weight + row.gradient + row.m + row.v;
    say("  %-20s %8g %8g %8g %10g %6g + %g %8g %10g", name, row.master, row.sum, row.weight, row.gradient,
        row.m, row.v, total, playbook);
    bool quiet = report_quiet(true);
    char *what = format_text("%s: bytes of weights, gradients and optimizer", name);
    report_equal(what, bytes_of(t, row, r),
                 (double)(memory.peak[MEMORY_PARAMETER] + memory.peak[MEMORY_GRADIENT] +
                          memory.peak[MEMORY_OPTIMIZER]),
                 "B");
    report_quiet(quiet);
    report_that(total == playbook, "%s: %g bytes per parameter, the playbook has %g", name, total,
                playbook);
    report_number("bytes per parameter", name, total, "B");
    free(what);
    trainer_free(t);
}

static void show_bytes(const char *data) {
    static const Technique *const bf16[] = {&bf16_recipe, NULL};
    say("\nBytes per parameter of the weights that are multiplied in 8 bits\n");
    say("  %-20s %8s %8s %8s %10s %6s   %s %8s %10s", "", "master", "sums", "weights", "gradients", "m",
        "v", "here", "playbook");
    for (int narrow = 0; narrow < 2; narrow++) {
        Config c = fp8_small(data, NO_FP8, "steps=1");
        config_set(&c, "master", 0);
        config_set(&c, "sum", narrow);
        config_set(&c, "rounding", 0);
        show_row(narrow ? "bf16, sums in bf16" : "bf16", &c, bf16, NULL, narrow ? 16 : 20);
    }
    for (int i = 0; i < fp8_recipe_count; i++) {
        const Fp8Recipe *r = &fp8_recipes[i];
        if (!r->playbook) continue;
        Config c = fp8_small(data, i + 1, "steps=1");
        if (!fp8_own_state(r)) c.dtype = F32;  // Transformer Engine steps the model's own weights
        show_row(r->name, &c, fp8_one_device, r, r->playbook);
    }
    say("  (in no column: scales; a second cast of 1 byte, in te-delayed and te-current both casts; and the\n"
        "  bf16 weights from which the emulation casts in fp8-lm and deepseek)");
}

void fp8_tables(const char *data) {
    show_outliers();
    show_sums();
    show_bytes(data);
}
