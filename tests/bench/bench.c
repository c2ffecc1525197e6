// bench.c: the figures of merit of one device, each beside its target. `make bench` runs it.
//
// A share compares with OpenBLAS's SGEMM (2048 x 2048, f32, same kernel and threads), timed right before
// and right after each step, since the speed of a shared machine drifts; what doubling a size does is
// measured on steps that take turns. figures.h has the form of a line.
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "00_single_gpu/formulas.h"
#include "figures.h"
#include "tensor/device.h"

static Config shape(const char *text) {
    char *all = format_text("dtype=f32 warmup=1 steps=1000 %s", text);
    Config c = config_default(all);
    free(all);
    return c;
}

typedef struct Sgemm {
    Tensor a, b, c;
} Sgemm;

enum { SGEMM_SIZE = 2048, MOST_PAIRS = 64 };

static double sgemm_rate(const Sgemm *g) {
    double start = wall_seconds();
    op_matmul(g->c, g->a, g->b, false, false, 0);
    return 2.0 * SGEMM_SIZE * SGEMM_SIZE * SGEMM_SIZE / (wall_seconds() - start);
}

static Sgemm sgemm_new(void) {
    Sgemm g = {.a = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(SGEMM_SIZE, SGEMM_SIZE))};
    g.b = tensor_like(MEMORY_ACTIVATION, g.a);
    g.c = tensor_like(MEMORY_ACTIVATION, g.a);
    op_fill(g.a, 0.5);
    op_fill(g.b, 0.25);
    return g;
}
static void sgemm_free(Sgemm *g) {
    tensor_free(&g->a);
    tensor_free(&g->b);
    tensor_free(&g->c);
}

// Counted FLOPs of a training step over its time, as a share of SGEMM's rate around it.
static void share_of_sgemm(const char *name, const char *text, int pairs, double target) {
    Config c = shape(text);
    Sgemm g = sgemm_new();
    Trainer *t = trainer_new(&c, mesh_single(), NULL);
    train_step(t, NULL);  // the first step also allocates
    sgemm_rate(&g);
    double shares[MOST_PAIRS], tokens[MOST_PAIRS], rates[MOST_PAIRS], after = sgemm_rate(&g);
    Missing missing = {.operations = 0};
    for (int i = 0; i < pairs; i++) {
        const double before = after;
        clock_reset();
        double start = wall_seconds();
        train_step(t, NULL);
        double seconds = wall_seconds() - start, flops = clock_total().flops;
        missing_add(&missing, seconds, before);
        after = sgemm_rate(&g);
        rates[i] = (before + after) / 2;
        shares[i] = flops / seconds / rates[i];
        tokens[i] = (double)(c.micro_batch * c.seq) / seconds;
    }
    figure(name, shares, pairs, "of-sgemm", target);
    say("  %s: %.0f tokens/s, SGEMM %.0f GFLOP/s", text, median(tokens, pairs),
        1e-9 * median(rates, pairs));
    if (median(shares, pairs) < target) missing_say(&missing);
    trainer_free(t);
    sgemm_free(&g);
}

static double step_seconds(Trainer *t) {
    double start = wall_seconds();
    train_step(t, NULL);
    return wall_seconds() - start;
}

// What multiplies bf16, and how fast beside f32, at the size of a feed-forward layer's product.
static void multiply_rates(const Config *c) {
    enum { TIMES = 9 };
    const int64_t m = c->micro_batch * c->seq, n = c->ffn, k = c->hidden;
    double rates[2];
    for (int i = 0; i < 2; i++) {
        const DType dtype = i ? BF16 : F32;
        Tensor a = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(m, k)),
               b = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(n, k)),
               y = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(m, n));
        op_fill(a, 0.5);
        op_fill(b, 0.25);
        op_matmul(y, a, b, false, true, 0);
        double measured[TIMES];
        for (int j = 0; j < TIMES; j++) {
            double start = wall_seconds();
            op_matmul(y, a, b, false, true, 0);
            measured[j] = 2e-9 * (double)m * (double)n * (double)k / (wall_seconds() - start);
        }
        rates[i] = median(measured, TIMES);
        tensor_free(&a), tensor_free(&b), tensor_free(&y);
    }
    const bool own = strstr(backend_text(), "vdpbf16ps");
    say("  multiplies bf16 %s: %.0f GFLOP/s, f32 %.0f GFLOP/s",
        own ? "by vdpbf16ps" : "as f32, this processor having no faster way", rates[1], rates[0]);
}

// tokens/s in bf16 over those in f32, in turns. What is missing is what operations take beyond
// 1 / target of their time in f32.
static void bf16_beside_f32(const char *name, const char *text, int pairs, double target) {
    char *bf16_text = format_text("%s dtype=bf16", text);
    Config f32 = shape(text), bf16 = shape(bf16_text);
    free(bf16_text);
    Trainer *wide = trainer_new(&f32, mesh_single(), NULL),
            *narrow = trainer_new(&bf16, mesh_single(), NULL);
    double ratios[MOST_PAIRS], tokens[MOST_PAIRS];
    Missing missing = {.operations = 0};
    train_step(wide, NULL), train_step(narrow, NULL);
    for (int i = 0; i < pairs; i++) {
        double seconds[2];
        for (int step = 0; step < 2; step++) {
            clock_reset();
            seconds[step] = step_seconds(step ? narrow : wide);
            if (step) missing_add(&missing, seconds[1], INFINITY);
            else missing_add_weighted(&missing, seconds[0], INFINITY, -1 / target);
        }
        ratios[i] = seconds[0] / seconds[1];
        tokens[i] = (double)(f32.micro_batch * f32.seq) / seconds[1];
    }
    figure(name, ratios, pairs, "of-f32", target);
    say("  %s: %.0f tokens/s in bf16", text, median(tokens, pairs));
    multiply_rates(&f32);
    if (median(ratios, pairs) < target) missing_say(&missing);
    trainer_free(wide);
    trainer_free(narrow);
}

// Steps of one shape beside steps of the same, doubled: time beside the formula's FLOPs, kept bytes beside
// the formula's bytes.
static void doubling(const char *size, const Config *base, const Config *doubled) {
    enum { PAIRS = 9 };
    Trainer *one = trainer_new(base, mesh_single(), NULL), *two = trainer_new(doubled, mesh_single(), NULL);
    step_seconds(one), step_seconds(two);
    double ratio[PAIRS], after = step_seconds(one);
    for (int i = 0; i < PAIRS; i++) {
        const double before = after, twice = step_seconds(two);
        after = step_seconds(one);
        ratio[i] = 2 * twice / (before + after);
    }
    char name[32];
    double flops =
        config_step_flops(doubled, doubled->micro_batch) / config_step_flops(base, base->micro_batch);
    snprintf(name, sizeof name, "double-%s-time", size);
    figure_line(name, ratio, PAIRS, "x", flops, fabs(median(ratio, PAIRS) / flops - 1) < 0.25);
    int64_t kept = kept_activation_bytes(base), kept_twice = kept_activation_bytes(doubled);
    double bytes = (double)two->kept_bytes / (double)one->kept_bytes;
    snprintf(name, sizeof name, "double-%s-kept-bytes", size);
    figure_line(name, &bytes, 1, "x", (double)kept_twice / (double)kept,
                one->kept_bytes == kept && two->kept_bytes == kept_twice);
    trainer_free(one);
    trainer_free(two);
}

static void growth(void) {
    Config base = shape("layers=3 hidden=256 heads=4 kv-heads=4 ffn=704 vocab=256 seq=128 micro-batch=8");
    Config doubled[4] = {base, base, base, base};
    doubled[0].seq *= 2;
    doubled[1].micro_batch *= 2;
    doubled[2].layers *= 2;
    doubled[3].hidden *= 2, doubled[3].ffn *= 2, doubled[3].heads *= 2, doubled[3].kv_heads *= 2;
    const char *const names[] = {"s", "b", "L", "h"};
    for (int i = 0; i < 4; i++) doubling(names[i], &base, &doubled[i]);
}

// The account beside what the kernel says that the process really holds.
static void memory_is_the_account(void) {
    Config c = shape("layers=6 hidden=384 heads=6 kv-heads=6 ffn=1024 vocab=256 seq=256 micro-batch=8");
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    Trainer *t = trainer_new(&c, mesh_single(), NULL);
    memory_reset_peak();
    train_step(t, NULL);
    train_step(t, NULL);
    getrusage(RUSAGE_SELF, &after);
    double account = (double)memory_account().peak_total;
    double resident = 1024.0 * (double)(after.ru_maxrss - before.ru_maxrss);
    double ratio = resident / account;
    figure_line("resident-over-account", &ratio, 1, "x", 1, ratio < 1.1);
    say("  account %s, resident memory grew by %s\n", bytes_text(account), bytes_text(resident));
    trainer_free(t);
}

// What bench_torch_cpu.py asks for: a step of a shape for each line that comes in, and its tokens/s by the
// clock of this process; at the end what is missing.
static void tokens_per_second(char *text) {
    for (char *comma = text; (comma = strchr(comma, ',')); comma++) *comma = ' ';
    Config c = shape(text);
    c.kv_heads = c.heads;
    Sgemm g = sgemm_new();
    Trainer *t = trainer_new(&c, mesh_single(), NULL);
    Missing missing = {.operations = 0};
    train_step(t, NULL);  // the first step also allocates
    sgemm_rate(&g);
    say("ready");
    for (int letter; (letter = getchar()) != EOF;) {
        if (letter != '\n') continue;
        double rate = sgemm_rate(&g);
        clock_reset();
        double seconds = step_seconds(t);
        missing_add(&missing, seconds, rate);
        say("%.6g tokens/s", (double)(c.micro_batch * c.seq) / seconds);
    }
    missing_say(&missing);
    trainer_free(t);
    sgemm_free(&g);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    char *only = NULL;
    Option options[] = {
        {"tokens-per-second", OPTION_TEXT, &only, NULL, 0, 0, "SHAPE",
         "nothing but that of a shape, as layers=6,hidden=384,…: a step for each line of input", false},
    };
    options_parse(argc, argv, "One device's figures of merit, each beside its target.", options,
                  sizeof options / sizeof *options);
    if (only) {
        tokens_per_second(only);
        return 0;
    }
    say("%s", backend_text());
    memory_is_the_account();  // first: later cases would have raised the process's peak already
    share_of_sgemm("train-L6-h384",
                   "layers=6 hidden=384 heads=6 kv-heads=6 ffn=1024 vocab=256 seq=256 micro-batch=8", 15,
                   0.86);
    share_of_sgemm("train-L12-h768",
                   "layers=12 hidden=768 heads=12 kv-heads=12 ffn=2048 vocab=32000 seq=256 micro-batch=4",
                   7, 0.9);
    bf16_beside_f32("train-bf16-L6-h384",
                    "layers=6 hidden=384 heads=6 kv-heads=6 ffn=1024 vocab=256 seq=256 micro-batch=8", 9,
                    1.4);
    growth();
    return 0;
}
