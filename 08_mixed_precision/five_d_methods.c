// five_d_methods.c: what each method shards, and its price. Playbook: "5D parallelism in a nutshell", its
// table of ZeRO-3 beside pipeline parallelism, and its overview of all methods.
//
// One model, 8 sequences in a step, 8 ranks, one method at a time, and three of them together. Every figure
// is counted by the chapters' records in a dry step; none is typed in here. A share of 1/8 means that the
// method shards this kind of memory over 8 ranks; 1 means that every rank has all of it.
//
//     ZeRO-3      a rank stores a part of every layer    sends weights, each time a pass uses them
//     pipeline    a rank stores some layers whole        sends activations, once a micro-batch
//
// Data parallelism leaves a rank fewer micro-batches, but not smaller ones: its activations stay at 1.
//
// Run: build/08_mixed_precision/five_d_methods   (--lengths: from 1k to 128k tokens; --svg FILE: a picture)
// Last line: PASS five_d_methods: each method shards what its chapter says …
#include <stdlib.h>
#include <string.h>

#include "five_d_picture.h"

#ifndef NO_MAIN

enum { RANKS = 8, KINDS = PICTURE_KINDS };
static const char *const kind_name[KINDS] = {"weights", "gradients", "optimizer", "activations"};
static const MemoryKind kinds[KINDS] = {MEMORY_PARAMETER, MEMORY_GRADIENT, MEMORY_OPTIMIZER,
                                        MEMORY_ACTIVATION};

typedef enum Share { ALL, PART } Share;  // all on every rank, or a shard

typedef struct Method {
    const char *name;
    int dp, pp, cp, tp, ep, zero;  // ep 0: a dense model
    bool sp;
    Share has[KINDS];  // how much a rank has, as the chapters say it, of each of `kinds`
} Method;

static const Method methods[] = {
    {"DP", 8, 1, 1, 1, 0, 0, false, {ALL, ALL, ALL, ALL}},
    {"ZeRO-1", 8, 1, 1, 1, 0, 1, false, {ALL, ALL, PART, ALL}},
    {"ZeRO-2", 8, 1, 1, 1, 0, 2, false, {ALL, PART, PART, ALL}},
    {"ZeRO-3", 8, 1, 1, 1, 0, 3, false, {PART, PART, PART, ALL}},
    {"TP, SP", 1, 1, 1, 8, 0, 0, true, {PART, PART, PART, PART}},
    {"CP", 1, 1, 8, 1, 0, 0, false, {ALL, ALL, ALL, PART}},
    {"PP", 1, 8, 1, 1, 0, 0, false, {PART, PART, PART, ALL}},
    {"DP 2 PP 2 TP 2, ZeRO-1", 2, 2, 1, 2, 0, 1, true, {PART, PART, PART, PART}},
};
enum { METHODS = sizeof methods / sizeof *methods };

// Llama 3 8B, 8 sequences in a step, one in a micro-batch. tiles: attention works tile by tile, as flash
// attention does; else it stores the scores (with context parallelism it never does).
static Config model_of(const Method *method, int64_t seq, int recompute, bool tiles) {
    Config c = config_of_model("llama-3-8b", "dtype=bf16 micro-batch=1 steps=3");
    c.seq = seq;
    c.recompute = recompute;
    c.dp = method->dp, c.pp = method->pp, c.cp = method->cp, c.tp = method->tp,
    c.ep = method->ep ? method->ep : 1;
    if (method->ep) c.experts = 8, c.top_k = 2;
    c.grad_acc = RANKS / c.dp;
    config_set(&c, "zero", method->zero);
    config_set(&c, "sp", method->sp);
    config_set(&c, "vocab-parallel", method->tp > 1);
    config_set(&c, "context", CONTEXT_ZIGZAG);
    config_set(&c, "schedule", ONE_F_ONE_B);
    config_set(&c, "documents", -1);
    config_set(&c, "attention", tiles);
    return c;
}

// Of the rank that holds most; `own` (may be NULL) is set to this rank's cost.
static Need need_of(const Config *c, StepCost *own) {
    bool alone = c->dp * c->pp * c->cp * c->tp == 1;
    Mesh mesh = alone ? mesh_single() : mesh_new(layout_shape(c));
    StepCost cost = program_cost(c, mesh, alone ? five_d_one_device() : five_d_layouts());
    if (own) *own = cost;
    Need need, most;
    for (int i = 0; i < KINDS; i++) need.bytes[i] = (double)cost.memory.peak[kinds[i]];
    double largest = comm_max(need_sum(&need), comm_world());
    for (int i = 0; i < KINDS; i++)
        most.bytes[i] = comm_max(need_sum(&need) == largest ? need.bytes[i] : 0, comm_world());
    return most;
}

// ---- what a rank holds and sends ----

static const char *share_text(double share) {
    static char texts[KINDS][16];
    static int turn;
    char *text = texts[turn++ % KINDS];
    if (share > 0.95) snprintf(text, sizeof *texts, "%.2g", share);
    else snprintf(text, sizeof *texts, "1/%.1f", 1 / share);
    return text;
}

static double sent(const StepCost *cost, const char *call) {
    for (int i = 0; i < cost->counted.kinds; i++)
        if (!strcmp(cost->counted.sent[i].name, call)) return (double)cost->counted.sent[i].bytes;
    return 0;
}

static void print_sent(const Method *method, const StepCost *cost, const Need *need, const Need *one) {
    static const char *const calls[] = {"all_reduce", "reduce_scatter", "all_gather", "transfers"};
    char line[256];
    int used = snprintf(line, sizeof line, "  %-24s", method->name);
    for (int i = 0; i < KINDS; i++)
        used += snprintf(line + used, sizeof line - (size_t)used, "%7s",
                         share_text(need->bytes[i] / one->bytes[i]));
    for (int i = 0; i < 4; i++) {
        double bytes = sent(cost, calls[i]) + (i == 3 ? sent(cost, "all_to_all") : 0);
        used +=
            snprintf(line + used, sizeof line - (size_t)used, "%9s", bytes > 1e6 ? bytes_text(bytes) : "-");
    }
    say("%s %9.0f %8.0f", line, 1e3 * cost->step_seconds, 1e3 * cost->comm.exposed_seconds);
}

// A shard is less than half of the whole: besides it there are units in use, or a stage has the head.
static void check_shares(const Method *method, const Need *need, const Need *one) {
    for (int i = 0; i < KINDS; i++) {
        double share = need->bytes[i] / one->bytes[i];
        bool part = method->has[i] == PART;
        report_that(part ? share < 0.5 : share > 0.7,
                    "%s: a rank has %.2f of the %s, where it should have %s", method->name, share,
                    kind_name[i], part ? "part" : "all");
    }
}

enum { SEQ = 4096 };

static void print_method(const Method *method, const Need *one, Need *own) {
    StepCost cost;
    Config c = model_of(method, SEQ, RECOMPUTE_NONE, true);
    *own = need_of(&c, &cost);
    print_sent(method, &cost, own, one ? one : own);
    if (one) check_shares(method, own, one);
    report_number(method->name, "bytes sent by rank 0", (double)cost.comm.bytes, "B");
    report_number(method->name, "step, model clock", cost.step_seconds, "s");
    report_number(method->name, "held at the peak", need_sum(own), "B");
}

static void print_methods(const Config *config) {
    static const Method alone = {"one device", 1, 1, 1, 1, 0, 0, false, {ALL}};
    static const Method experts[] = {
        {"8 experts, one device", 1, 1, 1, 1, 1, 0, false, {ALL}},
        {"8 experts, DP", 8, 1, 1, 1, 1, 0, false, {ALL, ALL, ALL, ALL}},
        {"8 experts, DP and EP 8", 8, 1, 1, 1, 8, 0, false, {PART, PART, PART, ALL}}};
    Need one, need;
    say("\nLlama 3 8B in bf16, 8 sequences of %d tokens, 8 ranks of %s: shares of what one\ndevice holds, "
        "bytes that rank 0 sends in a step, and milliseconds on the model clock",
        SEQ, config->machine);
    say("  %-24s%7s%7s%7s%7s%9s%9s%9s%9s %9s %8s", "", "wts", "grads", "opt", "acts", "all-red", "red-sc",
        "all-gath", "p2p, a2a", "step", "exposed");
    print_method(&alone, NULL, &one);
    for (int i = 0; i < METHODS; i++) print_method(&methods[i], &one, &need);
    for (int i = 0; i < 3; i++) print_method(&experts[i], i ? &one : NULL, i ? &need : &one);
}

// ---- ZeRO-3 beside a pipeline ----

enum { ZERO3 = 3, PIPELINE = 6 };

// Exposed time as a share of the step, on the rank where it is least: stages without the head also wait for
// the one that has it. `messages` is set to the time of messages over a rank's compute, where that is
// largest.
static double exposed_share(int method, int64_t seq, int64_t micro_batches, double *messages) {
    Config c = model_of(&methods[method], seq, RECOMPUTE_NONE, true);
    c.grad_acc = micro_batches;
    StepCost cost = program_cost(&c, mesh_new(layout_shape(&c)), five_d_layouts());
    double computes = cost.step_seconds - cost.comm.exposed_seconds;
    *messages = comm_max(cost.comm.model_seconds / computes, comm_world());
    return -comm_max(-cost.comm.exposed_seconds / cost.step_seconds, comm_world());
}

// The number of layers of which the rank stores anything (returned), and the share of these that it stores.
static double stored_layers(int method, double *part) {
    Config c = model_of(&methods[method], 4096, RECOMPUTE_NONE, true);
    Trainer *t = trainer_new(&c, mesh_new(layout_shape(&c)), five_d_layouts());
    const Model *m = t->model;
    double layers = 0, elements = 0, all = 0;
    for (int64_t layer = 0; layer < c.layers; layer++) {
        const Unit *u = &m->params.unit[m->first_block_unit + (int)layer];
        layers += u->own_count > 0;
        elements += (double)u->own_count;
        all += (double)u->count;
    }
    *part = elements / all;
    trainer_free(t);
    return layers;
}

// What must hold on any network. ZeRO-3 sends as much for a long micro-batch as for a short one. A pipeline
// of p stages with m micro-batches waits p - 1 times for a stage's F and BW, which take T, and for its
// messages, which take x T each; a rank in the middle sends and receives four per micro-batch. With p
// micro-batches in flight, each then waits for 2 (p - 1) / p messages, and the exposed share of the step is
//
//     (2 x m (p - 1) / p + (p - 1) (1 + 2 x)) / (the same + m):    falls with m
//
// to less than a half from m = 8 to m = 64 if 4 x, `messages`, is no more than a half.
static void check_comparison(double tokens[2][2], double micros[2][2], double messages) {
    double part = messages <= 0.5 ? 0.5 : 1;
    report_that(tokens[0][1] < tokens[0][0],
                "exposed: of ZeRO-3 %.2f with long micro-batches, expected less than with short ones, %.2f",
                tokens[0][1], tokens[0][0]);
    report_that(micros[1][1] < part * micros[1][0],
                "exposed: of a pipeline %.2f with many micro-batches, expected less than %.1f of few's, %.2f",
                micros[1][1], part, micros[1][0]);
    if (messages > 0.5)
        say("  (A stage's messages take %.2g times as long as what it computes. More micro-batches hide\n"
            "  the bubble, not these: the share is held to fall, but not to a half.)",
            messages);
}

static void print_comparison(void) {
    static const int column[] = {ZERO3, PIPELINE};
    double layers[2], part[2], tokens[2][2], micros[2][2], messages;
    StepCost cost[2];
    for (int i = 0; i < 2; i++) {
        layers[i] = stored_layers(column[i], &part[i]);
        Config c = model_of(&methods[column[i]], 4096, RECOMPUTE_NONE, true);
        need_of(&c, &cost[i]);
        for (int j = 0; j < 2; j++) {
            tokens[i][j] = exposed_share(column[i], 1024 << 3 * j, methods[column[i]].pp, &messages);
            micros[i][j] =
                exposed_share(column[i], 4096, methods[column[i]].pp * (j ? 8 : 1), &messages);
        }
    }
    say("\n  %-48s %20s %20s", "", "ZeRO-3", "pipeline");
    say("  %-48s %9s of %2.0f layers %9s of %2.0f layers", "a rank stores", share_text(part[0]), layers[0],
        share_text(part[1]), layers[1]);
    say("  %-48s %20s %20s", "weights and gradients sent in a step",
        bytes_text(sent(&cost[0], "all_gather") + sent(&cost[0], "reduce_scatter")),
        bytes_text(sent(&cost[1], "all_gather") + sent(&cost[1], "reduce_scatter")));
    say("  %-48s %20s %20s", "activations and their gradients sent",
        bytes_text(sent(&cost[0], "transfers")), bytes_text(sent(&cost[1], "transfers")));
    say("  %-48s %9.0f%% -> %4.0f%% %10.0f%% -> %4.0f%%", "exposed, micro-batches of 1k -> 8k tokens",
        100 * tokens[0][0], 100 * tokens[0][1], 100 * tokens[1][0], 100 * tokens[1][1]);
    say("  %-48s %9.0f%% -> %4.0f%% %10.0f%% -> %4.0f%%", "exposed, 8 times as many micro-batches",
        100 * micros[0][0], 100 * micros[0][1], 100 * micros[1][0], 100 * micros[1][1]);
    report_that(
        layers[0] == 32 && layers[1] == 4 && part[0] < 0.13 && part[1] == 1,
        "a rank of ZeRO-3 stores %g of %g layers, expected an eighth of 32; of a pipeline %g of %g, "
        "expected all of 4",
        part[0], layers[0], part[1], layers[1]);
    check_comparison(tokens, micros, messages);
}

// ---- memory, from 1k to 128k tokens ----

static const char *const recompute_name[PICTURE_LEVELS] = {"none", "selective", "full"};

static void print_memory(const Config *config, const char *svg) {
    Need(*need)[PICTURE_LENGTHS][PICTURE_LEVELS] = host_alloc(METHODS * sizeof *need);
    const char *name[METHODS];
    double room = machine_find(config->machine)->memory_bytes;
    for (int i = 0; i < METHODS; i++) name[i] = methods[i].name;
    say("\nThe most that a rank holds at its peak, by recomputation; * what a device of %s has room for",
        bytes_text(room));
    char line[256];
    int used = snprintf(line, sizeof line, "  %-24s%-10s", "", "");
    for (int length = 0; length < PICTURE_LENGTHS; length++)
        used += snprintf(line + used, sizeof line - (size_t)used, "%7dk ", 1 << length);
    say("%s", line);
    for (int i = 0; i < METHODS; i++)
        for (int level = 0; level < PICTURE_LEVELS; level++) {
            used = snprintf(line, sizeof line, "  %-24s%-10s", level ? "" : name[i], recompute_name[level]);
            for (int length = 0; length < PICTURE_LENGTHS; length++) {
                Config c = model_of(&methods[i], 1024 << length, level, level > 0);
                if (c.pp == 1 && c.grad_acc > 2) c.grad_acc = 2;  // a third finds what the second found
                need[i][length][level] = need_of(&c, NULL);
                double sum = need_sum(&need[i][length][level]);
                used += snprintf(line + used, sizeof line - (size_t)used, "%8s%s", bytes_text(sum),
                                 sum <= room ? "*" : " ");
            }
            say("%s", line);
        }
    if (svg && base_rank() == 0)
        five_d_picture("--svg", svg, name, need, METHODS, machine_find(config->machine));
    for (int i = 0; i < METHODS; i++)
        for (int length = 0; length < PICTURE_LENGTHS; length++)
            report_that(need_sum(&need[i][length][2]) <= need_sum(&need[i][length][0]),
                        "%s: full recomputation of %dk tokens holds more than none", name[i], 1 << length);
    free(need);
}

int main(int argc, char **argv) {
    const char *svg = NULL;
    bool lengths;
    Option options[] = {
        {"lengths", OPTION_FLAG, &lengths, NULL, 0, 0, "",
         "also show the memory of each method from 1k to 128k tokens", false},
        {"svg", OPTION_OUTPUT, &svg, NULL, 0, 0, "FILE", "memory of each method, as a picture", false}};
    base_start(argc, argv);
    Config c = config_parse(argc, argv, "What each method of parallelism shards, and its price.",
                            CONFIG_RANKS | CONFIG_CLUSTER | CONFIG_REPORT, NULL, options, 2);
    comm_start(argc, argv, RANKS);
    CHECK(comm_ranks() == RANKS, "each method takes all of %d ranks: --ranks %d would fit", RANKS, RANKS);
    report_json(c.json);
    device_dry_run(true);
    print_methods(&c);
    print_comparison();
    if (lengths || svg) print_memory(&c, svg);
    return comm_finish(report_verdict("each method shards what its chapter says"));
}
#endif
