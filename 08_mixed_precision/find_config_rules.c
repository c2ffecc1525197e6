// find_config_rules.c: the playbook's rules for choosing a layout, tested against the search. Playbook:
// "Finding the Best Training Configuration", steps 1 to 3.
//
// A rule is about families of layouts: "only ZeRO-3", "TP=8 with PP". For each of its examples the search
// goes through all layouts, and through those of the family alone; whether the rule holds is decided by the
// times of the fastest ones, and by which layouts fit:
//
//     step 1    which families fit an instance of the model, and when each of them is the fastest
//     step 2    how a batch is made: with more dp, or with more micro-batches
//     step 3    what the fastest layouts have in common
//
// Bytes sent: none, these are dry runs. This file has no main: find_config.c shows it.
#include <math.h>
#include <stdlib.h>

#include "find_config.h"
#include "report/report.h"

// ---- families ----

static bool data_alone(const Found *f) { return f->tp * f->cp * f->pp == 1; }
static bool zero3_alone(const Found *f) { return data_alone(f) && f->zero == 3; }
static bool one_technique(const Found *f) { return zero3_alone(f) || f->dp * f->cp * f->pp == 1; }
static bool tp8_pp(const Found *f) { return f->tp == 8 && f->pp > 1 && f->cp == 1; }
static bool tp8_zero3(const Found *f) { return f->tp == 8 && f->pp * f->cp == 1 && f->zero == 3; }
// As in the playbook's runs: no zero bubble, and gradients of a step's micro-batches reduced together even
// with ZeRO-2, which costs what ZeRO-1 costs here.
static bool no_zero_bubble(const Found *f) { return f->schedule != ZB_H1; }
static bool tp8_zero2_pp(const Found *f) {
    return tp8_pp(f) && no_zero_bubble(f) && (f->zero == 1 || f->zero == 2);
}
static bool beyond_node(const Found *f) { return f->tp > 8; }
static bool without_cp(const Found *f) { return f->cp == 1; }
static bool without_ep(const Found *f) { return f->ep == 1; }
static bool small_whole(const Found *f) {
    return zero3_alone(f) && f->recompute == RECOMPUTE_NONE && f->micro_batch == 1;
}
static bool small_again(const Found *f) {
    return zero3_alone(f) && f->recompute == RECOMPUTE_FULL && f->micro_batch == 1;
}
static bool pairs(const Found *f) { return data_alone(f) && f->micro_batch == 2; }

// ---- examples ----

static const char LLAMA_8B[] = "llama-3-8b", LLAMA_70B[] = "llama-3-70b", MIXTRAL_8X7B[] = "mixtral-8x7b";

enum { K = 1 << 10, M = 1 << 20 };  // tokens

static Goal goal_of(const char *model, int gpus, int64_t tokens, int64_t seq) {
    const Machine *machine = machine_find("dgx-h100");
    Goal goal = {.model = config_of_model(model, "dtype=bf16 optimizer=adamw"),
                 .gpus = gpus,
                 .sequences = tokens / seq};
    goal.model.seq = seq;
    goal.model.machine = machine->name;
    goal.memory = 0.95 * machine->memory_bytes;
    return goal;
}

// Prints the fastest of a family (NULL: of all layouts); its step is infinite where none fits.
static Found fastest(Goal goal, const char *name, bool (*family)(const Found *)) {
    goal.family = family;
    Search s = search(&goal, 1);
    Found f = {.time = {.step = INFINITY}};
    if (s.count > 0) f = s.best[0];
    free(s.best);
    if (s.count == 0) {
        say("    %-26s does not fit", name);
        return f;
    }
    say("    %-26s %8.3f s  %7s  dp %d tp %d%s pp %d cp %d ep %d zero %d, %ld x %ld%s", name, f.time.step,
        bytes_text(f.memory.peak), f.dp, f.tp, f.sp ? "s" : "", f.pp, f.cp, f.ep, f.zero, f.micro_batch,
        f.micro_batches, f.recompute == RECOMPUTE_FULL ? ", recomputes" : "");
    report_number(name, "step", f.time.step, "s");
    return f;
}

static void rule(bool holds, const char *what) {
    say("  %s %s", holds ? "holds:" : "FAILS:", what);
    report_that(holds, "the search does not obey: %s", what);
}

// ---- step 1: fitting a training step in memory ----

static void one_instance(void) {
    say("\n  8B, 8 GPUs, 1M tokens of 4096");
    Goal g = goal_of(LLAMA_8B, 8, M, 4 * K);
    Found all = fastest(g, "all layouts", NULL), one = fastest(g, "tp or ZeRO-3 alone", one_technique);
    rule(one.time.step < 1.05 * all.time.step, "below 10B parameters one technique is enough (within 5%)");
    Found whole = fastest(g, "ZeRO-3, mbs 1", small_whole), again = fastest(g, "recomputes", small_again);
    rule(again.memory.peak < whole.memory.peak && again.time.step > whole.time.step,
         "few GPUs: full recomputation trades time for memory ...");
    Goal large = goal_of(LLAMA_8B, 8, 8 * M, 4 * K);
    Found more = fastest(large, "8 times the batch", small_whole);
    rule(more.memory.peak == whole.memory.peak,
         "... and accumulation makes a batch larger in the same memory");
}

static void many_gpus(void) {
    say("\n  70B, 64 GPUs, 1M tokens of 2048");
    Goal g = goal_of(LLAMA_70B, 64, M, 2 * K);
    Found all = fastest(g, "all layouts", NULL), pure = fastest(g, "ZeRO-3 alone", zero3_alone);
    Found tp_pp = fastest(g, "tp 8 with pp", tp8_pp), tp_zero = fastest(g, "tp 8 with ZeRO-3", tp8_zero3);
    rule(!isinf(fmax(pure.time.step, fmax(tp_pp.time.step, tp_zero.time.step))),
         "10B to 100B: tp 8 with pp, tp 8 with ZeRO-3, and ZeRO-3 alone all fit");
    double loses = pure.time.step / all.time.step;
    say("\n  70B, 512 GPUs, 1M tokens of 2048");
    g = goal_of(LLAMA_70B, 512, M, 2 * K);
    all = fastest(g, "all layouts", NULL), pure = fastest(g, "ZeRO-3 alone", zero3_alone);
    rule(loses < 1.05 && pure.time.step > 1.1 * all.time.step && all.tp * all.pp > 1,
         "at 512 GPUs ZeRO-3 alone loses to dp with tp or pp (10%), at 64 it did not");
    say("\n  70B, 1024 GPUs, 1M tokens of 1024");
    g = goal_of(LLAMA_70B, 1024, M, K);
    fastest(g, "all layouts", NULL), pure = fastest(g, "ZeRO-3 alone", zero3_alone);
    all = fastest(g, "without zero bubble", no_zero_bubble);
    Found all_three = fastest(g, "tp 8, ZeRO-1 or -2, and pp", tp8_zero2_pp);
    rule(
        all_three.time.step < 1.1 * all.time.step && pure.time.step > 1.3 * all_three.time.step,
        "at 1024 GPUs tp 8 with ZeRO-1 or -2 and pp is a sound choice (within 10% of the best without zero "
        "bubble)");
}

static void special_models(void) {
    say("\n  8B, 64 GPUs, 4M tokens of 65536");
    Goal g = goal_of(LLAMA_8B, 64, 4 * M, 64 * K);
    Found all = fastest(g, "all layouts", NULL), none = fastest(g, "without cp", without_cp);
    rule(all.cp > 1 && all.time.step < 0.9 * none.time.step, "very long sequences want cp ...");
    Found longer = fastest(goal_of(LLAMA_8B, 64, 4 * M, 128 * K), "twice as long", NULL);
    rule(longer.cp > machine_find("dgx-h100")->gpus_per_node, "... across nodes");
    say("\n  Mixtral 8x7B, 64 GPUs, 4M tokens of 4096");
    g = goal_of(MIXTRAL_8X7B, 64, 4 * M, 4 * K);
    all = fastest(g, "all layouts", NULL), none = fastest(g, "without ep", without_ep);
    rule(all.ep > 1 && all.time.step < 0.9 * none.time.step, "experts want ep");
}

// ---- step 2: the target batch ----

static void batch(void) {
    say("\n  8B, 4M tokens of 4096: 1024 sequences");
    Found few = fastest(goal_of(LLAMA_8B, 128, 4 * M, 4 * K), "128 GPUs, dp alone, mbs 2", pairs);
    Found many = fastest(goal_of(LLAMA_8B, 512, 4 * M, 4 * K), "512 GPUs, dp alone, mbs 2", pairs);
    say("    1024 = %ld x %d x %ld = %ld x %d x %ld", few.micro_batch, few.dp, few.micro_batches,
        many.micro_batch, many.dp, many.micro_batches);
    rule(few.micro_batches == 4 && many.micro_batches == 1, "a batch is made of dp, or of micro-batches");
    say("\n  70B, 512 GPUs");
    Found small = fastest(goal_of(LLAMA_70B, 512, M / 2, 4 * K), "0.5M tokens", NULL);
    Found large = fastest(goal_of(LLAMA_70B, 512, 4 * M, 4 * K), "4M tokens", NULL);
    rule(small.dp < large.dp && small.dp * small.cp <= 128,
         "a smaller batch has less dp, in favour of other dimensions");
}

// ---- step 3: throughput ----

static void throughput(void) {
    say("\n  80B (64 key/value heads), 64 GPUs, 1M tokens of 4096");
    Goal g = goal_of(LLAMA_70B, 64, M, 4 * K);
    g.model.kv_heads = g.model.heads, g.model.vocab = 131072;
    Found inside = fastest(g, "tp 8 with pp", tp8_pp), beyond = fastest(g, "tp 16 and more", beyond_node);
    rule(beyond.time.step > 1.2 * inside.time.step, "tp up to the size of a node, and no further");
    say("\n  8B, 4M tokens of 4096");
    Found dp64 = fastest(goal_of(LLAMA_8B, 64, 4 * M, 4 * K), "64 GPUs, ZeRO-3 alone", zero3_alone);
    Found dp256 = fastest(goal_of(LLAMA_8B, 256, 4 * M, 4 * K), "256 GPUs, ZeRO-3 alone", zero3_alone);
    rule(dp64.time.step > 0.9 * 4 * dp256.time.step,
         "more dp with ZeRO-3 at the same batch (four times the GPUs: at least 3.6 times as fast)");
    say("\n  8B, 1M tokens of 2048");
    Found few = fastest(goal_of(LLAMA_8B, 64, M, 2 * K), "64 GPUs", NULL);
    Found many = fastest(goal_of(LLAMA_8B, 512, M, 2 * K), "512 GPUs", NULL);
    rule(few.pp == 1 && few.dp == 64 && many.pp > 1,
         "where dp's communication is the limit, pp takes over");
    Found one = fastest(goal_of(LLAMA_8B, 64, M, 2 * K), "64 GPUs, ZeRO-3, mbs 1", small_whole);
    rule(few.micro_batch > 1 && one.time.step > few.time.step,
         "the best micro-batch is to be searched for");
}

void rules(void) {
    device_dry_run(true);
    comm_stand_for_all(true);
    say("\nThe playbook's rules, asked of the search: the fastest layout that fits 76 GB of an H100, of "
        "all and of families\n(this book's own steps, +- %.0f%%; mbs x micro-batches last)\n\nStep 1: "
        "fitting a step in memory",
        100 * FITTED_MEDIAN);
    one_instance();
    many_gpus();
    special_models();
    say("\nStep 2: the target batch");
    batch();
    say("\nStep 3: throughput");
    throughput();
}
