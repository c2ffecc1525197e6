// bench.c: the figures of merit on this machine, each beside its target. `make bench` runs it.
//
// A share compares with the same library's own SGEMM (2048 x 2048, f32, same kernel and threads), timed
// right before and right after each step, since the speed of a shared machine drifts: the median over such
// pairs is printed. One line per figure: bench <name> <value> <unit> target <value> ok|short
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "00_single_gpu/formulas.h"
#include "median.h"

static void line(const char *name, double value, const char *unit, double target, bool ok) {
    say("bench %s %.4g %s target %.4g %s\n", name, value, unit, target, ok ? "ok" : "short");
}

static Config shape(const char *text) {
    char *all = format_text("%s dtype=f32 warmup=1 steps=1000", text);
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

// Counted FLOPs of a training step over its time, as a share of SGEMM's rate around it.
static void share_of_sgemm(const char *name, const char *text, int pairs, double target) {
    Config c = shape(text);
    Sgemm g = {.a = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(SGEMM_SIZE, SGEMM_SIZE))};
    g.b = tensor_like(MEMORY_ACTIVATION, g.a);
    g.c = tensor_like(MEMORY_ACTIVATION, g.a);
    op_fill(g.a, 0.5);
    op_fill(g.b, 0.25);
    Trainer *t = trainer_new(&c, mesh_single(), NULL);
    train_step(t, NULL);  // the first step also allocates
    sgemm_rate(&g);
    double shares[MOST_PAIRS], tokens[MOST_PAIRS], rates[MOST_PAIRS];
    for (int i = 0; i < pairs; i++) {
        double before = sgemm_rate(&g);
        clock_reset();
        double start = wall_seconds();
        train_step(t, NULL);
        double seconds = wall_seconds() - start, flops = clock_total().flops;
        rates[i] = (before + sgemm_rate(&g)) / 2;
        shares[i] = flops / seconds / rates[i];
        tokens[i] = (double)(c.micro_batch * c.seq) / seconds;
    }
    double share = median(shares, pairs);
    line(name, share, "of-sgemm", target, share >= target);
    say("  %s: %.0f tokens/s, SGEMM %.0f GFLOP/s, shares from %.3f to %.3f in %d pairs\n", text,
        median(tokens, pairs), 1e-9 * median(rates, pairs), shares[0], shares[pairs - 1], pairs);
    const OpCount *ops;
    int count = clock_operations(&ops);
    for (int i = 0; i < count; i++)
        if (ops[i].wall_seconds > 0.01 * clock_total().wall_seconds)
            say("    %-26s %5.1f%%  %6.0f GFLOP/s  %6.1f GB/s\n", ops[i].name,
                100 * ops[i].wall_seconds / clock_total().wall_seconds,
                1e-9 * ops[i].flops / ops[i].wall_seconds, 1e-9 * ops[i].bytes / ops[i].wall_seconds);
    trainer_free(t);
    tensor_free(&g.a);
    tensor_free(&g.b);
    tensor_free(&g.c);
}

typedef struct Cost {
    double seconds;  // median step
    double flops;    // of the formula
    int64_t kept, formula;
} Cost;

static Cost cost_of(const Config *c) {
    Trainer *t = trainer_new(c, mesh_single(), NULL);
    train_step(t, NULL);
    double seconds[9];
    for (int i = 0; i < 9; i++) {
        double start = wall_seconds();
        train_step(t, NULL);
        seconds[i] = wall_seconds() - start;
    }
    Cost cost = {median(seconds, 9), config_step_flops(c, c->micro_batch), t->kept_bytes,
                 kept_activation_bytes(c)};
    trainer_free(t);
    return cost;
}

// What doubling s, b, L and h does: time beside the formula's FLOPs, kept bytes beside the formula's bytes.
static void growth(void) {
    Config base = shape("layers=3 hidden=256 heads=4 kv-heads=4 ffn=704 vocab=256 seq=128 micro-batch=8");
    Config doubled[4] = {base, base, base, base};
    doubled[0].seq *= 2;
    doubled[1].micro_batch *= 2;
    doubled[2].layers *= 2;
    doubled[3].hidden *= 2, doubled[3].ffn *= 2, doubled[3].heads *= 2, doubled[3].kv_heads *= 2;
    const char *const names[] = {"s", "b", "L", "h"};
    Cost one = cost_of(&base);
    for (int i = 0; i < 4; i++) {
        Cost two = cost_of(&doubled[i]);
        char name[32];
        snprintf(name, sizeof name, "double-%s-time", names[i]);
        double time = two.seconds / one.seconds, flops = two.flops / one.flops;
        line(name, time, "x", flops, fabs(time / flops - 1) < 0.25);
        snprintf(name, sizeof name, "double-%s-kept-bytes", names[i]);
        line(name, (double)two.kept / (double)one.kept, "x", (double)two.formula / (double)one.formula,
             two.kept == two.formula && one.kept == one.formula);
    }
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
    line("resident-over-account", resident / account, "x", 1, resident / account < 1.1);
    say("  account %s, resident memory grew by %s\n", bytes_text(account), bytes_text(resident));
    trainer_free(t);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    say("%s\n", base_blas_name());
    memory_is_the_account();  // first: later cases would have raised the process's peak already
    share_of_sgemm("train-L6-h384",
                   "layers=6 hidden=384 heads=6 kv-heads=6 ffn=1024 vocab=256 seq=256 micro-batch=8", 15,
                   0.82);
    share_of_sgemm("train-L12-h768",
                   "layers=12 hidden=768 heads=12 kv-heads=12 ffn=2048 vocab=32000 seq=256 micro-batch=4",
                   7, 0.88);
    growth();
    return 0;
}
