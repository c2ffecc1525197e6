// kernels.c: see kernels.h.
#include "kernels.h"

#include <math.h>
#include <stdlib.h>

#include "tensor/device.h"
#include "tensor/rng.h"

// ---- the table ----

enum { MOST_VERSIONS = 16 };
static struct {
    const Gpu *gpu;
    bool verbose;
    double limit, seconds[MOST_VERSIONS];
    int versions;
} table;

static const Gpu *chosen(const KernelsOptions *options) {
    static const char *const names[] = {"a100", "h100"};  // in the order of KERNELS_OPTIONS
    return gpu_find(names[options->gpu]);
}

double kernels_limit(const KernelsOptions *options, double bytes, double flops, double tensor_flops) {
    Work least = {
        .memory_sectors = bytes / 32, .flop_instructions = flops / 2 / 32, .tensor_flops = tensor_flops};
    return gpu_time(chosen(options), &least).seconds;
}

void kernels_begin(const KernelsOptions *options, const char *size, double limit) {
    table.gpu = chosen(options);
    table.verbose = options->verbose;
    table.limit = limit;
    if (!table.versions) report_json(options->json);
    say("%s", size);
    say("modelled on an %s; the model's limit is %.4g ms", table.gpu->device, limit * 1e3);
    say("%-20s %10s  %-8s %6s %8s %8s %9s %6s %6s  %s", "", "time", "busiest", "of the", "sectors",
        "traffic", "bank", "lanes", "warps", "worst");
    say("%-20s %10s  %-8s %6s %8s %8s %9s %6s %6s  %s", "", "ms", "part", "limit", "/request", "to L2",
        "conflicts", "active", "fit", "error");
}

const Gpu *kernels_gpu(void) { return table.gpu; }
double kernels_seconds(int version) { return table.seconds[version]; }

// --verbose shows each count that is not 0, beside its formula at the small size and at the table's.
static void hold(const char *version, const char *what, double counted, double predicted, double at_size) {
    char *text = format_text("%s: %s", version, what);
    if (table.verbose && (counted != 0 || predicted != 0))
        say("    %-16s %18.15g %18.15g %18.15g", what, counted, predicted, at_size);
    bool before = report_quiet(true);
    report_equal(text, predicted, counted, "");
    report_quiet(before);
    free(text);
}

#define HOLD(what, count) hold(name, what, counted->count, predicted->count, at_size->count)
static void hold_all(const char *name, const Work *counted, const Work *predicted, const Work *at_size) {
    if (table.verbose) say("    %-16s %18s %18s %18s", "", "small: counted", "by formula", "at full size");
    HOLD("load requests", load_requests);
    HOLD("load sectors", load_sectors);
    HOLD("store requests", store_requests);
    HOLD("store sectors", store_sectors);
    HOLD("memory sectors", memory_sectors);
    HOLD("shared passes", shared_passes);
    HOLD("bank conflicts", shared_conflicts);
    HOLD("FLOPs", flops);
    HOLD("FP instructions", flop_instructions);
    HOLD("special instr.", special_instructions);
    HOLD("tensor FLOPs", tensor_flops);
    HOLD("8-bit FLOPs", tensor_8_flops);
    HOLD("barriers", barriers);
}

// "    memory 0.2404, L2 0.08593, FMA 0.004341 ms; 64 of 64 warps fit, limited by warps"
static void show_parts(const GpuTime *time, const Occupancy *fits) {
    char text[200];
    int used = 0;
    for (int p = 0; p < PARTS; p++)
        if (time->part[p] > 0)
            used += snprintf(text + used, sizeof text - (size_t)used, "%s%s %.4g", used ? ", " : "",
                             part_name((Part)p), time->part[p] * 1e3);
    say("    %s ms; %d of %d warps fit, limited by %s", text, fits->warps, table.gpu->warps,
        fits->limited_by);
}

// "97%", or "-" of nothing. Rotates over two static buffers.
static const char *share_text(double part, double whole) {
    static char texts[2][16];
    static int turn;
    char *text = texts[turn++ % 2];
    if (whole > 0) snprintf(text, sizeof texts[0], "%.0f%%", 100 * part / whole);
    else snprintf(text, sizeof texts[0], "-");
    return text;
}

static void write_row(const KernelVersion *v, const GpuTime *time, const Work *work, double error) {
    report_number(v->name, "modelled", time->seconds, "s");
    for (int p = 0; p < PARTS; p++) report_number(v->name, part_name((Part)p), time->part[p], "s");
    report_number(v->name, "load_requests", work->load_requests, "");
    report_number(v->name, "load_sectors", work->load_sectors, "");
    report_number(v->name, "registers", v->registers, "");
    report_number(v->name, "error", error, "");
}

void kernels_version(const KernelVersion *v, const Work *counted, const Work *predicted,
                     const Work *at_size, double seconds, double error, double bound) {
    GpuTime time = gpu_time(table.gpu, at_size);
    Occupancy fits = gpu_occupancy(table.gpu, v->threads, v->registers, v->shared_bytes);
    CHECK(table.versions < MOST_VERSIONS, "a table has at most %d versions", (int)MOST_VERSIONS);
    table.seconds[table.versions++] = time.seconds;
    // of passes without conflicts; of the lanes that a warp has
    const char *conflicts = share_text(at_size->shared_conflicts, at_size->shared_passes);
    const char *lanes =
        share_text(counted ? counted->lane_steps : 0, counted ? 32 * counted->warp_steps : 0);
    say("%-20s %10.4g  %-8s %5.1f%% %8.3g %8s %9s %6s %5.0f%%  %.1e", v->name, time.seconds * 1e3,
        part_name(time.busiest), 100 * table.limit / time.seconds,
        at_size->load_sectors / fmax(at_size->load_requests, 1),
        bytes_text(32 * (at_size->load_sectors + at_size->store_sectors)), conflicts, lanes,
        100 * fits.share, error);
    if (seconds > 0) say("%-20s %10.4g  measured", "", seconds * 1e3);
    if (table.verbose) show_parts(&time, &fits);
    if (counted) hold_all(v->name, counted, predicted, at_size);
    write_row(v, &time, at_size, error);
    report_that(fits.blocks > 0, "%s: its block does not fit on a multiprocessor", v->name);
    report_that(error <= bound, "%s is off by %.1e, where %.1e is allowed", v->name, error, bound);
}

// ---- data and references ----

float *kernels_numbers(int64_t count, double scale, int stream) {
    float *x = (float *)host_alloc((size_t)(count + 1) * sizeof *x);
    const int64_t drawn = count < KERNELS_DRAWN ? count : KERNELS_DRAWN;
    for (int64_t i = 0; i < drawn; i++)
        x[i] = (float)(scale * rng_normal(42 + (uint64_t)stream, RNG_TEST, (uint64_t)i));
    for (int64_t i = drawn; i < count; i++) x[i] = x[i - drawn];
    return x;
}

double kernels_error(const float *made, const double *right, int64_t count) {
    double *x = (double *)host_alloc((size_t)(count + 1) * sizeof *x);
    for (int64_t i = 0; i < count; i++) x[i] = made[i];
    Difference d = difference("", x, right, count);
    double zero = difference_norm(right, count);
    free(x);
    return zero == 0 ? d.maximum : d.relative;
}

void kernels_matmul_f64(double *c, const float *a, const float *b, int64_t m, int64_t n, int64_t k) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0;
            for (int64_t x = 0; x < k; x++) sum += (double)a[i * k + x] * b[x * n + j];
            c[i * n + j] = sum;
        }
}

// In the dtype; `host` has f32.
static Tensor matrix(DType dtype, const float *host, int64_t rows, int64_t columns) {
    Tensor x = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(rows, columns));
    void *narrow = host_alloc((size_t)(rows * columns + 1) * sizeof *host);
    dtype_convert(narrow, dtype, host, F32, rows * columns);
    tensor_from_host(x, narrow);
    free(narrow);
    return x;
}

void kernels_matmul_library(DType dtype, float *c, const float *a, const float *b, int64_t m, int64_t n,
                            int64_t k) {
    Tensor A = matrix(dtype, a, m, k), B = matrix(dtype, b, k, n);
    Tensor C = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(m, n));
    void *narrow = host_alloc((size_t)(m * n + 1) * sizeof *c);
    op_matmul(C, A, B, false, false, 0);
    tensor_to_host(narrow, C);
    dtype_convert(c, F32, narrow, dtype, m * n);
    free(narrow);
    tensor_free(&A);
    tensor_free(&B);
    tensor_free(&C);
}

static Codes codes_of(const KernelsCodes *x, int64_t rows, int64_t k) {
    Codes made = {.tile = x->tile};
    made.codes = tensor_new(MEMORY_ACTIVATION, E4M3, SHAPE(rows, k));
    made.scale = tensor_new(MEMORY_ACTIVATION, F32,
                            SHAPE(tiles_of(rows, x->tile.rows), tiles_of(k, x->tile.columns)));
    tensor_from_host(made.codes, x->codes);
    tensor_from_host(made.scale, x->scale);
    return made;
}

void kernels_matmul_codes(float *c, const KernelsCodes *a, const KernelsCodes *b, CodesSum sum, int64_t m,
                          int64_t n, int64_t k) {
    Codes left = codes_of(a, m, k), right = codes_of(b, n, k);
    Tensor made = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(m, n));
    op_matmul_codes(made, left, right, sum, 0);
    tensor_to_host(c, made);
    tensor_free(&made);
    tensor_free(&left.codes), tensor_free(&left.scale);
    tensor_free(&right.codes), tensor_free(&right.scale);
}

double kernels_matmul_seconds(DType dtype, int64_t n) {
    enum { WARM_UP = 3, TIMES = 20 };
    float *numbers = kernels_numbers(n * n, 1, 3);
    Tensor A = matrix(dtype, numbers, n, n), B = matrix(dtype, numbers, n, n);
    Tensor C = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(n, n));
    double start = 0;
    for (int i = 0; i < WARM_UP + TIMES; i++) {
        if (i == WARM_UP) backend_wait(), start = wall_seconds();
        op_matmul(C, A, B, false, false, 0);
    }
    backend_wait();
    const double seconds = (wall_seconds() - start) / TIMES;
    free(numbers);
    tensor_free(&A);
    tensor_free(&B);
    tensor_free(&C);
    return seconds;
}
