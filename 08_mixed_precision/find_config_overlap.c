// find_config_overlap.c: from what size on compute hides communication, by formula and by the clock.
// Playbook: appendix A3, "Math for Compute/Communication Overlap".
//
// With blocks of 16 h^2 weights, n tokens per rank and e bytes per element, communication is hidden if it
// takes no longer than what is computed beside it:
//
//     DP       2 e 16 h^2 (N - 1) / N / bw  <=  4 n 16 h^2 / flops     n >= e / 2 (N - 1) / N flops / bw
//     ZeRO-3     e 16 h^2 (N - 1) / N / bw  <=  2 n 16 h^2 / flops     n >= e / 2 (N - 1) / N flops / bw
//     TP       e n h (t - 1) / t / bw       <=  2 n h^2 / t / flops    h >= e / 2 (t - 1) flops / bw
//     PP       e n h / bw                   <=  32 n h^2 l / flops     l >= e / (32 h) flops / bw
//
// Gradients are reduced in f32 (e = 4), everything else is sent in bf16 (e = 2). The formulas count only
// matrices; the clock adds attention and latency. Bytes sent: none, these are dry runs. This file has no
// main: find_config.c shows it.
#include <math.h>
#include <stdlib.h>

#include "find_config.h"
#include "report/report.h"

enum { HIDDEN = 4096, BLOCKS = 8 };

// One of N ranks that share all weights, with this many tokens per micro-batch.
static Config config_of(int N, int zero, int64_t tokens) {
    Goal goal = {.model = config_default("layers=8 hidden=4096 heads=32 kv-heads=32 ffn=16384 vocab=4096 "
                                         "seq=1024 dtype=bf16 optimizer=adamw")};
    goal.model.seq = tokens;
    Found f = {.tp = 1,
               .cp = 1,
               .pp = 1,
               .dp = N,
               .ep = 1,
               .zero = zero,
               .schedule = ONE_F_ONE_B,
               .chunks = 1,
               .micro_batch = 1,
               .micro_batches = 1};
    return found_config(&goal, &f);
}

// Bytes/s of a ring of N: over all ports of a node together, or over one GPU's port to the others in it.
static double bandwidth(int N) {
    const Machine *m = clock_machine();
    return N <= m->gpus_per_node
               ? m->node_bytes_per_second
               : fmin(m->node_bytes_per_second, m->gpus_per_node * m->network_bytes_per_second);
}

static double flops(void) { return clock_machine()->flops[BF16]; }

// Communication of a block over what is computed beside it, by the clock.
static double ratio(int N, int zero, int64_t tokens) {
    Config c = config_of(N, zero, tokens);
    LoneParts parts = lone_parts(&c);
    int here = N < clock_machine()->gpus_per_node ? N : clock_machine()->gpus_per_node, nodes = N / here;
    double weights = parts.count[BLOCK];
    if (zero == 3)
        return clock_collective_seconds("all_gather", 2 * weights, N, nodes, here) / parts.forward[BLOCK];
    return clock_collective_seconds("all_reduce", 4 * weights, N, nodes, here) / parts.backward[BLOCK];
}

// The fewest tokens, in steps of 64, with which it hides.
static int64_t clock_border(int N, int zero) {
    int64_t low = 1, high = 1024;  // in 64 tokens
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (ratio(N, zero, 64 * middle) > 1) low = middle;
        else high = middle;
    }
    return 64 * high;
}

// Share of a dry step that data parallelism adds to it.
static double exposed(int N, int zero, int64_t tokens) {
    Config c = config_of(N, zero, tokens);
    LoneParts parts = lone_parts(&c);
    LoneMemory memory;
    LoneTime time = lone_step(&c, &parts, lone_no_limits, &memory);
    return time.exposed_dp / time.step;
}

static void data_row(const char *what, int N, int zero) {
    double e = zero == 3 ? 2 : 4, formula = e / 2 * (N - 1) / N * flops() / bandwidth(N);
    int64_t border = clock_border(N, zero);
    double below = exposed(N, zero, border / 2), above = exposed(N, zero, 2 * border);
    say("  %-28s %-8s %8.0f %8lld %13.1f%% %8.1f%%", what, "tokens", formula, (long long)border,
        100 * below, 100 * above);
    report_number(what, "formula", formula, "tokens");
    report_number(what, "clock", (double)border, "tokens");
    report_that(formula < 2 * (double)border && (double)border < 2 * formula,
                "%s hides from %.0f tokens on by A3, and from %lld by the clock", what, formula,
                (long long)border);
    report_that(below > 3 * above, "%s exposes %.3f of a step below its border, and %.3f above", what,
                below, above);
}

// A product with a (h, h / t) weight beside the all-gather of its rows.
static double linear_ratio(int t, double n, double h) {
    double product = 2 * n * h * h / t;
    double gather = clock_collective_seconds("all_gather", 2 * n * h, t, 1, t);
    return gather / (product / flops() / clock_efficiency(WORK_MATMUL, product));
}

static void tensor_row(int t) {
    double formula = (t - 1) * flops() / bandwidth(t), low = 64, high = 1 << 20;
    while (high - low > 64) {
        double middle = (low + high) / 2;
        if (linear_ratio(t, HIDDEN, middle) > 1) low = middle;
        else high = middle;
    }
    char *what = format_text("TP %d, a column linear", t);
    say("  %-28s %-8s %8.0f %8.0f", what, "h", formula, high);
    report_that(formula < 2 * high && high < 2 * formula,
                "%s hides from h = %.0f on by A3, and from %.0f by "
                "the clock",
                what, formula, high);
    free(what);
}

static void stage_row(void) {
    double network = clock_machine()->network_bytes_per_second;
    double formula = 2 / (32.0 * HIDDEN) * flops() / network;
    Config c = config_of(1, 0, HIDDEN);
    LoneParts parts = lone_parts(&c);
    Traffic none = {0, 0, 0}, message = {1, parts.message, parts.message};
    double layers = clock_transfers_seconds(none, message) / parts.forward[BLOCK];
    say("  %-28s %-8s %8.2f %8.2f", "PP, a message across nodes", "layers", formula, layers);
    report_that(formula < 2 * layers && layers < 2 * formula,
                "a message hides behind %.2f layers by A3, and %.2f by the clock", formula, layers);
}

void overlap(void) {
    device_dry_run(true);
    comm_stand_for_all(true);
    say("\nFrom where on communication hides (A3): blocks of 16 h^2 weights, h = %d, FLOP/s and bytes/s "
        "as they are\nreached; the last columns: exposed, of a dry step of %d blocks with half and twice "
        "the clock's tokens\n\n  %-28s %-8s %8s %8s %14s %9s",
        HIDDEN, BLOCKS, "", "hides from", "A3", "clock", "half", "twice");
    data_row("DP 8, gradients in f32", 8, 0);
    data_row("DP 64", 64, 0);
    data_row("ZeRO-3 over 8, gathers", 8, 3);
    data_row("ZeRO-3 over 64", 64, 3);
    tensor_row(8);
    stage_row();
}
