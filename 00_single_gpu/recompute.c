// recompute.c: activation recomputation. Playbook: "Activation recomputation"; Korthikanti et al. 2022.
//
// Changes from 00_single_gpu/transformer.c: after a block's forward, attention's probs (selective) or all but
// the block's input (full) are freed; they are recomputed before its backward. No bit of a gradient changes.
//
//                 kept per block, elements                      computed a second time per block
//     none        n (4 h + 2 a d + 2 kv d + 3 f + a s) + 2n*    nothing
//     selective   the same without n a s (attention's probs)    q k^T: 2 a d s (s + 1) / 2 FLOPs a sample
//     full        n h (the block's input)                       the whole forward
//                                                               (* rstd statistics; n = b s)
// Bytes sent: none.
// Run: build/00_single_gpu/recompute        (--model llama-3-8b --dry-run: any size, counted, not computed)
// Last line: PASS recompute: selective and full give the gradients of none …
#include <math.h>
#include <stdlib.h>

#include "formulas.h"
#include "report/timeline.h"

// ---- the technique: two functions in the activations socket ----

static void drop_probs(void *context, Model *m, MicroBatch *micro, int layer) {
    (void)context;
    m->sockets.attention.drop(m->sockets.attention.context, &micro->block[layer]->attention);
}

static void probs_again(void *context, Model *m, MicroBatch *micro, int layer) {
    (void)context;
    BlockKept *kept = micro->block[layer];
    int64_t d = config_head_size(&m->config);
    AttentionShape shape = {micro->b, micro->s, tensor_columns(kept->q) / d, tensor_columns(kept->k) / d,
                            d};
    m->sockets.attention.again(m->sockets.attention.context, micro, &kept->attention, kept->q, kept->k,
                               kept->v, shape);
}

static void drop_all_but_input(void *context, Model *m, MicroBatch *micro, int layer) {
    (void)context;
    block_drop(m, micro->block[layer], true);
}

static void forward_again(void *context, Model *m, MicroBatch *micro, int layer) {
    (void)context;
    Tensor y = block_compute(m, micro, layer);  // the next block has had its output already
    tensor_free(&y);
}

static void *plug(Model *m) {
    bool selective = m->config.recompute == RECOMPUTE_SELECTIVE;
    m->sockets.activations.after_forward = selective ? drop_probs : drop_all_but_input;
    m->sockets.activations.before_backward = selective ? probs_again : forward_again;
    return NULL;
}

static void price(Price *p, const Model *m, const void *context) {
    (void)context;
    for (int i = 0; i < p->block_rows; i++)
        if (m->config.recompute >= p->block[i].dropped_from) p->block[i].bytes = 0;
    p->attentions *= 2;
    p->again += recompute_extra_flops(&m->config, m->config.micro_batch * m->config.grad_acc);
    if (m->config.recompute != RECOMPUTE_FULL) return;
    double again = 2 * p->forwards * (double)m->config.layers;  // two regions in a block
    p->enters += again;
    p->leaves += again;
    p->forwards *= 2;
}

static bool enabled(const Config *c) { return c->recompute != RECOMPUTE_NONE; }

const Technique recompute = {.name = "recompute", .enabled = enabled, .plug = plug, .price = price};

double recompute_extra_flops(const Config *c, int64_t sequences) {
    double s = (double)c->seq, h = (double)c->hidden, f = (double)config_dense_width(c);
    double d = (double)config_head_size(c), q = (double)c->heads * d, kv = (double)c->kv_heads * d;
    // per token: the router, and the token's experts
    double routed = (double)c->experts * h + 3 * h * (double)(c->top_k * config_expert_width(c));
    double scores = 2 * q * s * (s + 1) / 2;  // q k^T of all heads, the causal half
    double linears = 2 * s * (2 * h * q + 2 * h * kv + 3 * h * f + (c->experts ? routed : 0));
    double per_block = c->recompute == RECOMPUTE_SELECTIVE ? scores
                       : c->recompute == RECOMPUTE_FULL    ? 2 * scores + linears
                                                           : 0;
    return per_block * (double)c->layers * (double)sequences;
}

// ---- the proof ----
#ifndef NO_MAIN

static const char *const names[] = {"none", "selective", "full"};

static Record run(const Config *with, Recompute kind) {
    Config config = *with;
    config.recompute = kind;
    Trainer *t = trainer_new(&config, mesh_single(), NULL);
    Record record = train_record(t, names[kind]);
    trainer_free(t);
    int64_t left = memory_account().now[MEMORY_ACTIVATION];
    report_that(left == 0, "%s: %lld B of activations are left after the run", names[kind], (long long)left);
    return record;
}

// One row of the table: kept bytes and FLOPs, each checked against its closed form, and both utilizations,
// MFU and HFU.
static void print_row(const Config *with, Recompute kind, const Record *r, const Record *none) {
    Config c = *with;
    c.recompute = kind;
    int64_t sequences = c.micro_batch * c.grad_acc;
    double steps = (double)c.steps;
    double model_flops = config_step_flops(&c, sequences), extra = recompute_extra_flops(&c, sequences);
    const Machine *machine = machine_find(c.machine);
    double peak = machine_peak_flops(machine, (DType)c.dtype), seconds = r->model_seconds / steps;
    if (kind == RECOMPUTE_NONE) say("\nOn the model clock of %s:", machine->name);
    say("%-10s kept %s (%.2f of none), %.1f%% more FLOPs; %.4f ms a step, MFU %.2f%%, HFU %.2f%%",
        names[kind], bytes_text((double)r->kept_bytes), (double)r->kept_bytes / (double)none->kept_bytes,
        100 * extra / model_flops, 1e3 * seconds, 100 * model_flops / seconds / peak,
        100 * (model_flops + extra) / seconds / peak);
    report_equal("activations kept", (double)kept_activation_bytes(&c), (double)r->kept_bytes, "B");
    report_equal("FLOPs per step", model_flops + extra, r->flops / steps, "FLOP");
    report_number(names[kind], "MFU", model_flops / seconds / peak, "");
    report_number(names[kind], "HFU", (model_flops + extra) / seconds / peak, "");
}

// The playbook's sentence about GPT-3 175B: "70% activation memory reduction at a 2.7% compute cost".
static void print_gpt3(void) {
    Config gpt3 = gpt3_175b();
    RecomputeCost cost = recompute_cost(&gpt3);
    say("\nGPT-3 175B, selective: %.1f%% less activation memory, %.2f%% more FLOPs (published: 70%%, "
        "2.7%%: the\n"
        "paper counts %.2f%%, as if backward were repeated too); full: %.1f%% more\n",
        100 * cost.selective_memory, 100 * cost.selective_flops, 100 * cost.selective_flops_published,
        100 * cost.full_flops);
    report_that(round(100 * cost.selective_memory) == 70,
                "GPT-3 175B, selective: %.1f%% less activation memory, published: 70%%",
                100 * cost.selective_memory);
    report_that(round(1000 * cost.selective_flops_published) == 27,
                "GPT-3 175B, selective: %.2f%% more FLOPs as the paper counts, published: 2.7%%",
                100 * cost.selective_flops_published);
    report_that(cost.full_flops >= 0.3 && cost.full_flops <= 0.4,
                "GPT-3 175B, full: %.1f%% more FLOPs, expected 30 to 40%%", 100 * cost.full_flops);
    report_number("GPT-3 175B", "activation memory saved by selective", cost.selective_memory, "");
    report_number("GPT-3 175B", "more FLOPs by selective", cost.selective_flops, "");
    report_number("GPT-3 175B", "more FLOPs by selective, as published", cost.selective_flops_published,
                  "");
}

// "The overall effect is thus often faster computation as well": attention that recomputes its scores tile by
// tile (flash.c) neither writes them to memory nor reads them back. The clock charges stored ones one write
// and one read of the whole square; whether to compute them again is faster depends on the GPU's FLOP/s
// beside its bytes/s of memory: 295 FLOPs for each byte on an H100, 153 on an A100. At 2,048 tokens the two
// are equal on an H100.
static double flash_time(const char *machine, int64_t s, double *flops, double *kept) {
    clock_set_machine(machine_find(machine));
    char *defaults = format_text("seq=%lld dtype=bf16 micro-batch=1 steps=1", (long long)s);
    Config c = config_of_model("llama-3-8b", defaults);
    Record stored = run(&c, RECOMPUTE_NONE);
    config_set(&c, "attention", 1);
    Record flash = run(&c, RECOMPUTE_NONE);
    *flops = flash.flops / stored.flops;
    *kept = (double)flash.kept_bytes / (double)stored.kept_bytes;
    double time = flash.model_seconds / stored.model_seconds;
    record_free(&stored);
    record_free(&flash);
    free(defaults);
    return time;
}

static void print_flash(void) {
    say("Llama 3 8B with flash attention, which recomputes scores, beside stored ones:\n"
        "       s      FLOPs       kept   time on dgx-h100   on dgx-a100");
    for (int64_t s = 2048; s <= 32768; s *= 4) {
        double flops, kept, h100 = flash_time("dgx-h100", s, &flops, &kept);
        double a100 = flash_time("dgx-a100", s, &flops, &kept);
        say("  %6lld   %+7.1f%%   %8.2f %18.3f %13.3f", (long long)s, 100 * (flops - 1), kept, h100, a100);
        report_that(flops > 1 && h100 < a100 && (s < 8192 || h100 < 1),
                    "flash attention, s = %lld: %.4f of the FLOPs, %.4f of the time on an H100 and %.4f on "
                    "an A100, expected more FLOPs, and less time on the H100",
                    (long long)s, flops, h100, a100);
    }
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    bool dry_run = false;
    Option own[] = {{"dry-run", OPTION_FLAG, &dry_run, NULL, 0, 0, "",
                     "count and clock every operation, compute none: any size on any machine", false}};
    Config config = config_parse(
        argc, argv, "Activation recomputation: what it saves, what it costs, and that it changes no bit.",
        CONFIG_MODEL | CONFIG_BATCH | CONFIG_OPTIMIZER | CONFIG_REPORT | CONFIG_CLOCK | CONFIG_TRACE |
            CONFIG_CHECK,
        "layers=3 hidden=48 heads=6 kv-heads=2 ffn=88 seq=61 micro-batch=2 grad-acc=2 steps=3", own, 1);
    report_json(config.json);
    report_quiet(!config.verbose);
    device_dry_run(dry_run);
    timeline_start(&config, comm_world());
    config_print(&config);
    Record none = run(&config, RECOMPUTE_NONE);
    print_row(&config, RECOMPUTE_NONE, &none, &none);
    for (Recompute kind = RECOMPUTE_SELECTIVE; kind <= RECOMPUTE_FULL; kind++) {
        Record record = run(&config, kind);
        print_row(&config, kind, &record, &none);
        if (!dry_run && !config.no_check) report_compare(&record, &none, PROOF_EXACT, bound_of(0));
        record_free(&record);
    }
    record_free(&none);
    print_gpt3();
    timeline_finish(&config, comm_world());
    device_dry_run(true);
    print_flash();
    return report_verdict(dry_run || config.no_check
                              ? "kept bytes and FLOPs of selective and full are as the formulas say"
                              : "selective and full give the gradients of none");
}
#endif
