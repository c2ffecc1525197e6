// bench.c: the figures of merit of one device, each beside its target. `make bench` runs it.
//
// A share is relative to OpenBLAS's SGEMM (sgemm.h; same kernel and threads), timed right before and right
// after each step, since the speed of a shared machine drifts. All other comparisons take turns, step by
// step: with PyTorch's steps, with steps in bf16, with steps of doubled size. figures.h has the format of a
// line, and says how many pairs a row takes.
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "00_single_gpu/formulas.h"
#include "figures.h"
#include "sgemm.h"
#include "tensor/device.h"

static Config shape(const char *text) {
    char *all = format_text("dtype=f32 warmup=1 steps=1000 %s", text);
    Config c = config_default(all);
    free(all);
    return c;
}

enum { PRODUCTS = 3 };  // of SGEMM before and after a step

static double step_seconds(Trainer *t) {
    double start = wall_seconds();
    train_step(t, NULL);
    return wall_seconds() - start;
}

// ---- PyTorch, in a process of its own ----

// bench_torch_cpu.py: makes a step for each line that it reads, and answers with its tokens/s.
typedef struct Torch {
    int ask;
    FILE *answer;
    char line[128];
    pid_t process;
} Torch;

static const char *torch_answer(Torch *torch) {
    CHECK(fgets(torch->line, sizeof torch->line, torch->answer), "PyTorch has ended before its answer");
    torch->line[strcspn(torch->line, "\n")] = '\0';
    return torch->line;
}

static Torch torch_new(const char *script, const char *text) {
    int ends[2];
    char threads[16];
    snprintf(threads, sizeof threads, "%d", omp_get_max_threads());
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "no socket for PyTorch");
    Torch torch = {.ask = ends[0], .answer = fdopen(ends[0], "r"), .process = fork()};
    CHECK(torch.process >= 0 && torch.answer, "no process for PyTorch");
    if (torch.process == 0) {
        dup2(ends[1], STDIN_FILENO), dup2(ends[1], STDOUT_FILENO);
        unsetenv("OPENBLAS_CORETYPE");  // ours
        execlp("python3", "python3", script, text, threads, NULL);
        _exit(STATUS_USAGE);
    }
    close(ends[1]);
    return torch;
}

// Waiting threads spin for some 15 ms before they sleep, ours as well as PyTorch's: after this pause the
// next one to take its turn finds the cores idle.
static void settle(void) { usleep(30000); }

static double torch_tokens_per_second(Torch *torch) {
    settle();
    CHECK(send(torch->ask, "\n", 1, MSG_NOSIGNAL) == 1, "PyTorch has ended");
    double tokens = atof(torch_answer(torch));
    settle();
    return tokens;
}

static void torch_free(Torch *torch) {
    fclose(torch->answer);  // also the end of its input
    waitpid(torch->process, NULL, 0);
}

// ---- rows ----

// Counted FLOPs of a training step over its time, as a share of SGEMM's rate before and after it; with
// `script`, also its tokens/s relative to PyTorch's.
static void training(const char *size, const char *text, double seconds, double target, const char *script,
                     double torch_target) {
    Config c = shape(text);
    Torch torch = {.ask = -1};
    if (script) torch = torch_new(script, text);  // starts up in the meantime
    Sgemm g = sgemm_new();
    Trainer *t = trainer_new(&c, mesh_single(), NULL);
    warm_up(t);
    char about[128] = "";
    if (script) snprintf(about, sizeof about, "%s", torch_answer(&torch));
    double shares[MOST_PAIRS], tokens[MOST_PAIRS], rates[MOST_PAIRS];
    double ratios[MOST_PAIRS], torch_tokens[MOST_PAIRS];
    Missing missing = {.operations = 0};
    int pairs = 0;
    const double start = wall_seconds();
    for (bool more = true; more; pairs++) {
        const bool torch_first = pairs % 2 == 0;
        if (script && torch_first) torch_tokens[pairs] = torch_tokens_per_second(&torch);
        const double before = sgemm_rate(&g, PRODUCTS);
        clock_reset();
        const double took = step_seconds(t), flops = clock_total().flops;
        missing_add(&missing, took, before);
        rates[pairs] = (before + sgemm_rate(&g, PRODUCTS)) / 2;
        shares[pairs] = flops / took / rates[pairs];
        tokens[pairs] = (double)(c.micro_batch * c.seq) / took;
        if (script && !torch_first) torch_tokens[pairs] = torch_tokens_per_second(&torch);
        if (script) ratios[pairs] = tokens[pairs] / torch_tokens[pairs];
        const double passed = wall_seconds() - start;
        more = !measured(shares, pairs + 1, passed, seconds) ||
               (script && !measured(ratios, pairs + 1, passed, seconds));
    }
    char *name = format_text("train-%s", size), *beside = format_text("torch-%s", size);
    figure(name, shares, pairs, "of-sgemm", target);
    say("  %s: %.0f tokens/s, SGEMM %.0f GFLOP/s", text, median(tokens, pairs),
        1e-9 * median(rates, pairs));
    bool is_short = median(shares, pairs) < target;
    if (script) {
        figure(beside, ratios, pairs, "x-torch", torch_target);
        say("  %s: %.0f tokens/s", about, median(torch_tokens, pairs));
        is_short |= median(ratios, pairs) < torch_target;
        torch_free(&torch);
    }
    if (is_short) missing_say(&missing);
    free(name), free(beside);
    trainer_free(t);
    sgemm_free(&g);
}

// What multiplies bf16, and how fast compared with f32, at the size of a feed-forward layer's product.
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
    const char *own = strstr(backend_text(), "bf16 by ");
    say("  multiplies bf16 %s: %.0f GFLOP/s, f32 %.0f GFLOP/s",
        own ? own + strlen("bf16 ") : "as f32, this processor having no faster way", rates[1], rates[0]);
}

// tokens/s in bf16 over those in f32, measured in turns. What is missing is the time of operations beyond
// 1 / target of their time in f32.
static void bf16_beside_f32(const char *name, const char *text, double limit, double target) {
    char *bf16_text = format_text("%s dtype=bf16", text);
    Config f32 = shape(text), bf16 = shape(bf16_text);
    free(bf16_text);
    Trainer *wide = trainer_new(&f32, mesh_single(), NULL),
            *narrow = trainer_new(&bf16, mesh_single(), NULL);
    double ratios[MOST_PAIRS], tokens[MOST_PAIRS];
    Missing missing = {.operations = 0};
    warm_up(wide), warm_up(narrow);
    int pairs = 0;
    const double start = wall_seconds();
    for (; !measured(ratios, pairs, wall_seconds() - start, limit); pairs++) {
        double seconds[2];
        for (int turn = 0; turn < 2; turn++) {
            const bool in_bf16 = turn != pairs % 2;
            clock_reset();
            seconds[in_bf16] = step_seconds(in_bf16 ? narrow : wide);
            if (in_bf16) missing_add(&missing, seconds[1], INFINITY);
            else missing_add_weighted(&missing, seconds[0], INFINITY, -1 / target);
        }
        ratios[pairs] = seconds[0] / seconds[1];
        tokens[pairs] = (double)(f32.micro_batch * f32.seq) / seconds[1];
    }
    figure(name, ratios, pairs, "of-f32", target);
    say("  %s: %.0f tokens/s in bf16", text, median(tokens, pairs));
    multiply_rates(&f32);
    if (median(ratios, pairs) < target) missing_say(&missing);
    trainer_free(wide);
    trainer_free(narrow);
}

// Steps of one shape and steps of the same shape doubled: the ratio of times against that of the formula's
// FLOPs, and of kept bytes against the formula's bytes.
static void doubling(const char *size, const Config *base, const Config *doubled) {
    static const double LIMIT = 2;  // seconds
    Trainer *one = trainer_new(base, mesh_single(), NULL), *two = trainer_new(doubled, mesh_single(), NULL);
    warm_up(one), warm_up(two);
    double ratios[MOST_PAIRS], after = step_seconds(one);
    int pairs = 0;
    const double start = wall_seconds();
    for (; !measured(ratios, pairs, wall_seconds() - start, LIMIT); pairs++) {
        const double before = after, twice = step_seconds(two);
        after = step_seconds(one);
        ratios[pairs] = 2 * twice / (before + after);
    }
    char name[32];
    double flops =
        config_step_flops(doubled, doubled->micro_batch) / config_step_flops(base, base->micro_batch);
    snprintf(name, sizeof name, "double-%s-time", size);
    figure_line(name, ratios, pairs, "x", flops, fabs(median(ratios, pairs) / flops - 1) < 0.25);
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

// op_matmul compared with SGEMM.
static void multiply(void) {
    Sgemm g = sgemm_new();
    double ratios[MOST_PAIRS];
    int pairs = 0;
    const double start = wall_seconds();
    for (bool more = true; more; pairs++) {
        double seconds = -wall_seconds();
        for (int i = 0; i < PRODUCTS; i++) op_matmul(g.c, g.a, g.b, false, false, 0);
        seconds += wall_seconds();
        ratios[pairs] = PRODUCTS * SGEMM_FLOPS / seconds / sgemm_rate(&g, PRODUCTS);
        more = !measured(ratios, pairs + 1, wall_seconds() - start, 3);
    }
    figure("matmul-2048", ratios, pairs, "of-sgemm", 1);
    sgemm_free(&g);
}

// The account compared with what the kernel says the process really holds.
static void memory_is_the_account(const char *text) {
    Config c = shape(text);
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

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *script = NULL;
    Option options[] = {
        {"torch", OPTION_TEXT, &script, NULL, 0, 0, "FILE", "bench_torch_cpu.py: PyTorch beside training",
         false},
    };
    options_parse(argc, argv, "One device's figures of merit, each beside its target.", options,
                  sizeof options / sizeof *options);
    static const char *const l6 =
        "layers=6 hidden=384 heads=6 kv-heads=6 ffn=1024 vocab=256 seq=256 micro-batch=8";
    static const char *const l12 =
        "layers=12 hidden=768 heads=12 kv-heads=12 ffn=2048 vocab=32000 seq=256 micro-batch=4";
    say("%s", backend_text());
    memory_is_the_account(l6);  // first: later cases would have raised the process's peak already
    multiply();
    training("L6-h384", l6, 12, 0.86, script, 1.4);
    training("L12-h768", l12, 30, 0.9, script, 1.3);
    bf16_beside_f32("train-bf16-L6-h384", l6, 6, 1.4);
    growth();
    return 0;
}
