// memory.c: the playbook's memory widget in the terminal, from formulas.c.
// Playbook: "High level overview" (the widget), "Memory usage in Transformers", "ZeRO".
//
// Nothing changes from train.c: this predicts its memory, and --measure compares the prediction with a real
// step, to the byte. Every run checks the formulas against published figures; --claims shows them.
//
//     bytes on one rank = parameters + gradients + optimizer + L x (kept by a block) + (inputs and head)
//
// Bytes sent: none. Memory per rank: what it prints, sharded by --tp, --sp, --dp and --zero.
// Run: build/00_single_gpu/memory --model llama-3-8b --dtype bf16 --tp 8 --sp --dp 8 --zero 1
//      build/00_single_gpu/memory --measure --recompute selective     (--dry-run: any size, on any machine)
// Last line: PASS memory: 32 published figures reproduced; with --measure: … the predicted bytes exactly
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "formulas.h"
#include "harness.h"

#ifndef NO_MAIN
// ---- the playbook's figures ----

// A published figure is rounded or truncated after its last digit, or a range: "6.66", "30-40".
static bool agrees(const char *published, double value) {
    char *end;
    double low = strtod(published, &end), high = low;
    if (*end == '-') {
        high = strtod(end + 1, NULL);
    } else {
        const char *point = strchr(published, '.');
        double digit = pow(10, point ? -(double)strlen(point + 1) : 0);
        low -= digit / 2;
        high += digit;
    }
    return value >= low * (1 - 1e-12) && value <= high;
}

typedef struct Claims {
    bool print;
    int count;
} Claims;

// format and the rest describe the claim, as in printf.
static void claim(Claims *claims, int number, const char *published, double value, const char *unit,
                  const char *format, ...) PRINTF_LIKE(6, 7);
static void claim(Claims *claims, int number, const char *published, double value, const char *unit,
                  const char *format, ...) {
    char what[80], name[88];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    claims->count++;
    if (claims->print) say("  %2d  %-64s %8s %10.5g %s", number, what, published, value, unit);
    snprintf(name, sizeof name, "%d: %s", number, what);
    report_number("claims", name, value, unit);
    report_that(agrees(published, value), "claim %d, %s: published %s, here %.5g %s", number, what,
                published, value, unit);
}

static void claim_parameters(Claims *claims) {
    MemoryPlan gpt = {.model = gpt3_175b(), .gpt = true, .tp = 1, .dp = 1}, more = gpt;
    double h = (double)gpt.model.hidden;
    claim(claims, 2, "175", memory_rank_parameters(&gpt) / 1e9, "B",
          "parameters of GPT-3 175B: h v + L (12 h^2 + 13 h) + 2 h");
    more.model.layers++;
    claim(claims, 2, "12.00", (memory_rank_parameters(&more) - memory_rank_parameters(&gpt)) / (h * h),
          "h^2", "parameters of a block without GLU at h_ff = 4 h");
    more.gpt = gpt.gpt = false;
    claim(claims, 2, "16.00", (memory_rank_parameters(&more) - memory_rank_parameters(&gpt)) / (h * h),
          "h^2", "parameters of a block with GLU at h_ff = 4 h");
}

static void claim_states(Claims *claims) {
    static const struct {
        double billions;
        const char *bytes_16, *bytes_20;  // GB at so many bytes a parameter
    } size[] = {{1, "16", "20"}, {7, "112", "140"}, {70, "1120", "1400"}, {405, "6480", "8100"}};
    static const struct {
        const char *name;
        DType dtype;
        bool f32_gradients;
    } how[] = {{"f32", F32, false}, {"bf16", BF16, false}, {"bf16 and f32 gradients", BF16, true}};
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 3; j++) {
            MemoryPlan plan = {
                .model.dtype = how[j].dtype, .f32_gradients = how[j].f32_gradients, .tp = 1, .dp = 1};
            MemoryNeed need = memory_states(&plan, size[i].billions * 1e9);
            claim(claims, 4, how[j].f32_gradients ? size[i].bytes_20 : size[i].bytes_16,
                  memory_states_bytes(&need) / 1e9, "GB", "states of %gB parameters in %s",
                  size[i].billions, how[j].name);
        }
}

static void claim_activations(Claims *claims) {
    MemoryPlan plan = {.model = gpt3_175b(), .gpt = true, .tp = 1, .dp = 1};
    double sbh = (double)(plan.model.seq * plan.model.micro_batch * plan.model.hidden);
    static const struct {
        const char *what, *published;  // GPT-3 has 5 a s / h = 80
        int64_t tp;
        bool sp;
        Recompute recompute;
    } row[] = {{"34 + 5 a s / h", "114.00", 1, false, RECOMPUTE_NONE},
               {"TP 8: 10 + 24 / t + 5 a s / (h t)", "23.00", 8, false, RECOMPUTE_NONE},
               {"TP 8, SP: 34 / t + 5 a s / (h t)", "14.25", 8, true, RECOMPUTE_NONE},
               {"TP 8, selective: 10 + 24 / t", "13.00", 8, false, RECOMPUTE_SELECTIVE},
               {"TP 8, SP, selective: 34 / t", "4.25", 8, true, RECOMPUTE_SELECTIVE},
               {"full: 2", "2.00", 1, false, RECOMPUTE_FULL}};
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        plan.tp = row[i].tp;
        plan.sp = row[i].sp;
        plan.model.recompute = row[i].recompute;
        claim(claims, 5, row[i].published, memory_block_activations(&plan) / sbh, "s b h B",
              "activations of a GPT-3 block, %s", row[i].what);
    }
    RecomputeCost cost = recompute_cost(&plan.model);
    claim(claims, 6, "70", 100 * cost.selective_memory, "%", "GPT-3, selective: less activation memory");
    claim(claims, 6, "2.7", 100 * cost.selective_flops_published, "%",
          "GPT-3, selective: more compute, as published");
    if (claims->print)
        say("        which counts attention's core as repeated forward and backward, 12 b s^2 h a layer; "
            "its\n"
            "        forward alone, 4 b s^2 h, is %.1f%%, as an author says: "
            "github.com/NVIDIA/Megatron-LM/issues/523",
            100 * cost.selective_flops);
    claim(claims, 6, "30-40", 100 * cost.full_flops, "%", "GPT-3, full: more compute");
}

static void claim_zero(Claims *claims) {
    static const char *const on_64[] = {"120", "31.4", "16.6", "1.9"};
    for (int zero = 0; zero <= 3; zero++) {
        MemoryPlan plan = {.model.dtype = BF16, .zero = zero, .tp = 1, .dp = 64};
        MemoryNeed need = memory_states(&plan, 7.5e9);
        claim(claims, 14, on_64[zero], memory_states_bytes(&need) / 1e9, "GB",
              "states of 7.5B parameters on 64 ranks, k = 12, ZeRO-%d", zero);
    }
    // Of a lecture, which counts 12 bytes per parameter in all: with 2 of weights and 2 of gradients, k is 8.
    static const char *const on_8[] = {"6.66", "16", "24.62", "53.33"};
    for (int zero = 0; zero <= 3; zero++) {
        MemoryPlan plan = {.model.dtype = BF16, .zero = zero, .optimizer_bytes = 8, .tp = 1, .dp = 8};
        MemoryNeed need = memory_states(&plan, 1);
        claim(claims, 16, on_8[zero], 80 / memory_states_bytes(&need), "B",
              "parameters that fit 8 x 80 GB, k = 8, ZeRO-%d", zero);
    }
}

// Checks every figure, and prints them if asked to; returns how many there are.
static int claim_all(bool print) {
    Claims claims = {.print = print};
    if (print) say("\nclaim%74s %10s", "published", "here");
    claim_parameters(&claims);
    claim_states(&claims);
    claim_activations(&claims);
    claim_zero(&claims);
    return claims.count;
}

// ---- the widget ----

static double need_bytes(const MemoryNeed *need) {
    return memory_states_bytes(need) + need->blocks + need->ends;
}

static void print_row(const char *what, double bytes, double total) {
    static const char bar[] = "########################################";
    say("  %-26s %10s %5.1f%%  %.*s", what, bytes_text(bytes), 100 * bytes / total,
        (int)lround(40 * bytes / total), bar);
    report_number("widget", what, bytes, "B");
}

static void print_need(const MemoryPlan *plan) {
    const Config *c = &plan->model;
    MemoryPlan whole = *plan;
    whole.tp = 1;
    say("%s block: L=%ld h=%ld a=%ld kv=%ld f=%ld v=%ld s=%ld, %s, b=%ld, recompute %s",
        plan->gpt ? "GPT" : "Llama", c->layers, c->hidden, c->heads, c->kv_heads, c->ffn, c->vocab, c->seq,
        dtype_name((DType)c->dtype), c->micro_batch,
        (const char *[]){"none", "selective", "full"}[c->recompute]);
    double parameters = memory_rank_parameters(&whole);
    bool billions = parameters >= 1e9;
    say("%.4g %c parameters; on one rank of tp %ld%s, dp %ld, ZeRO-%ld:\n",
        parameters / (billions ? 1e9 : 1e6), billions ? 'B' : 'M', plan->tp,
        plan->sp ? " with sequence parallelism" : "", plan->dp, plan->zero);
    MemoryNeed need = memory_need(plan);
    double total = need_bytes(&need);
    print_row("parameters", need.parameters, total);
    print_row("gradients", need.gradients, total);
    if (need.accumulators > 0) print_row("gradients summed in f32", need.accumulators, total);
    print_row("optimizer", need.optimizer, total);
    print_row("activations: blocks", need.blocks, total);
    print_row("activations: head, inputs", need.ends, total);
    say("  %-26s %10s", "total, as backward begins", bytes_text(total));
    report_number("widget", "total", total, "B");
    double most = total;
    const bool peaked = !plan->gpt && plan->tp == 1;
    if (peaked) {  // backward's own tensors come on top of what is kept
        most = memory_states_bytes(&need) + (double)peak_activation_bytes(c, c->dtype);
        say("  %-26s %10s", "at the peak, in backward", bytes_text(most));
        report_number("widget", "peak", most, "B");
    }
    if (plan->zero >= 2)
        say("  (without the units in use, whose whole gradients%s come on top)",
            plan->zero >= 3 ? " and weights" : "");
    if (plan->zero >= 2 && need.accumulators > 0)
        say("  (the playbook's formula: this book's ranks have 16-bit gradients of such units only, %s "
            "less)",
            bytes_text(need.gradients));
    const Machine *machine = machine_find(c->machine);
    say("One %s has %s: this %s.", machine->device, bytes_text(machine->memory_bytes),
        most > machine->memory_bytes ? "does not fit"
        : peaked && plan->zero >= 2  ? "fits, if the units in use fit in the rest"
        : peaked                     ? "fits"
                                     : "fits as backward begins; what backward itself adds is not counted");
}

// Where activations come to dominate: bars of p(arameters), g(radients), o(ptimizer), a(ctivations).
static void print_sweep(const MemoryPlan *plan) {
    enum { ROWS = 8, WIDTH = 60 };
    MemoryPlan at = *plan;
    at.model.seq = plan->model.seq % (8 * plan->tp) ? plan->model.seq : plan->model.seq / 8;
    say("\n  sequence      states activations  p parameters, g gradients, o optimizer, a activations");
    for (int row = 0; row < ROWS; row++, at.model.seq *= 2) {
        MemoryNeed need = memory_need(&at);
        double total = need_bytes(&need), activations = need.blocks + need.ends;
        double end[] = {need.parameters, need.gradients + need.accumulators, need.optimizer, activations};
        char bar[WIDTH + 1];
        int filled = 0;
        for (int part = 0; part < 4; part++) {
            if (part > 0) end[part] += end[part - 1];
            while (filled < lround(WIDTH * end[part] / total)) bar[filled++] = "pgoa"[part];
        }
        bar[filled] = '\0';
        say("  %8ld  %10s  %10s  %s", at.model.seq, bytes_text(total - activations),
            bytes_text(activations), bar);
    }
}

// ---- the proof: the memory account of a real step, kind by kind ----

static void measure(const MemoryPlan *plan, bool dry_run) {
    device_dry_run(dry_run);
    memory_reset_peak();
    Trainer *trainer = trainer_new(&plan->model, mesh_single(), NULL);
    train_step(trainer, NULL);
    Memory account = memory_account();
    MemoryNeed need = memory_need(plan);
    say("\none step%s, predicted and allocated:", dry_run ? " without memory behind it" : "");
    report_equal("parameters", memory_rank_parameters(plan),
                 (double)params_elements(&trainer->model->params), "");
    report_equal("parameter bytes", need.parameters, (double)account.now[MEMORY_PARAMETER], "B");
    report_equal("gradient bytes", need.gradients + need.accumulators, (double)account.now[MEMORY_GRADIENT],
                 "B");
    report_equal("optimizer bytes", need.optimizer, (double)account.now[MEMORY_OPTIMIZER], "B");
    report_equal("activations kept", need.blocks + need.ends, (double)trainer->kept_bytes, "B");
    report_equal("activations at their peak",
                 (double)peak_activation_bytes(&plan->model, plan->model.dtype),
                 (double)account.peak[MEMORY_ACTIVATION], "B");
    report_equal("activations after the step", 0, (double)account.now[MEMORY_ACTIVATION], "B");
    trainer_free(trainer);
}

static void check_cuts(const MemoryPlan *plan) {
    const Config *c = &plan->model;
    CHECK(!plan->sp || plan->tp > 1, "--sp shards rows over the ranks of --tp, and there is one");
    CHECK(!plan->zero || plan->dp > 1, "--zero %ld shards over the ranks of --dp, and there is one",
          plan->zero);
    CHECK(c->heads % plan->tp == 0, "--heads %ld is not divisible by --tp %ld", c->heads, plan->tp);
    CHECK(c->kv_heads % plan->tp == 0 || plan->tp % c->kv_heads == 0,
          "--kv-heads %ld: neither it nor --tp %ld divides the other", c->kv_heads, plan->tp);
    CHECK(c->ffn % plan->tp == 0, "--ffn %ld is not divisible by --tp %ld", c->ffn, plan->tp);
    CHECK(!plan->sp || c->seq % plan->tp == 0, "--sp: --seq %ld is not divisible by --tp %ld", c->seq,
          plan->tp);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    MemoryPlan plan = {0};
    int block = 0;
    bool bf16_gradients, claims, tensors, measured, dry_run;
    int64_t micro_batch;
    const char *data = NULL;
    Option own[] = {
        {"micro-batch", OPTION_INT, &micro_batch, "1", 1, 1e6, "sequences", "size of a micro-batch, b",
         false},
        {"block", OPTION_CHOICE, &block, NULL, 0, 0, "llama|gpt",
         "this book's block, or GPT's as in the playbook's formulas (LayerNorm, biases, dropout, GELU, "
         "tied); without it: what --model has",
         false},
        {"no-f32-gradients", OPTION_FLAG, &bf16_gradients, NULL, 0, 0, "",
         "16-bit gradients are summed in 16 bits: 16 bytes a parameter in place of 20", false},
        {"k", OPTION_REAL, &plan.optimizer_bytes, "0", 0, 64, "bytes",
         "optimizer state per parameter; 0: AdamW's, 8, or 12 with master weights", false},
        {"zero", OPTION_INT, &plan.zero, "0", 0, 3, "", "ZeRO stage", false},
        {"dp", OPTION_INT, &plan.dp, "1", 1, 1e6, "ranks", "data parallelism", false},
        {"tp", OPTION_INT, &plan.tp, "1", 1, 1e4, "ranks",
         "tensor parallelism, also of embedding and output layer (--vocab-parallel)", false},
        {"sp", OPTION_FLAG, &plan.sp, NULL, 0, 0, "", "sequence parallelism beside --tp", false},
        {"tensors", OPTION_FLAG, &tensors, NULL, 0, 0, "", "show what one block keeps, tensor by tensor",
         false},
        {"claims", OPTION_FLAG, &claims, NULL, 0, 0, "", "show the playbook's figures beside ours", false},
        {"measure", OPTION_FLAG, &measured, NULL, 0, 0, "",
         "run a step and compare what it allocates with the formulas; the default if no flag is given",
         false},
        {"dry-run", OPTION_FLAG, &dry_run, NULL, 0, 0, "",
         "with --measure: no memory behind the tensors, so any size", false},
        {"data", OPTION_TEXT, &data, NULL, 0, 0, "FILE", "with --measure: the text of its step", false},
    };
    bool no_flags = argc == 1;
    plan.model = config_parse(
        argc, argv,
        "What training needs in memory, from the playbook's formulas.\n"
        "  memory --model llama-3-70b --dtype bf16 --tp 8 --sp --dp 64 --zero 1\n"
        "  memory --model gpt-3-175b --dtype bf16 --recompute selective --tp 8 --sp --tensors\n"
        "  memory --model llama-3-8b --dtype bf16 --measure --dry-run",
        CONFIG_MODEL | CONFIG_RECOMPUTE | CONFIG_REPORT | CONFIG_CLOCK, NULL, own,
        sizeof own / sizeof *own);
    plan.model.micro_batch = micro_batch;
    plan.model.data = data;
    bool block_given = option_given(own, sizeof own / sizeof *own, "block");
    plan.gpt = block_given ? block == 1 : !strcmp(plan.model.model, gpt3_175b().model);
    plan.model.tied |= plan.gpt;
    plan.f32_gradients = !bf16_gradients;
    measured |= no_flags;
    CHECK(measured || (!dry_run && !data), "--dry-run and --data say how --measure runs: it is not given");
    CHECK(!measured || (plan.tp == 1 && plan.dp == 1 && !plan.gpt && plan.f32_gradients &&
                        plan.optimizer_bytes == 0),
          "--measure runs this book's model on one device: not with --tp, --dp, --block gpt, --k or "
          "--no-f32-gradients");
    CHECK(
        plan.f32_gradients || dtype_size(plan.model.dtype) == 2,
        "--no-f32-gradients is about gradients of 16 bits, and --dtype %s has none: --dtype bf16 would fit",
        dtype_name((DType)plan.model.dtype));
    check_cuts(&plan);
    report_json(plan.model.json);
    print_need(&plan);
    if (tensors) memory_print_block(&plan);
    print_sweep(&plan);
    if (measured) measure(&plan, dry_run);
    int count = claim_all(claims);
    return report_verdict("%d published figures reproduced%s", count,
                          measured ? "; a step allocates the predicted bytes exactly" : "");
}
#endif
