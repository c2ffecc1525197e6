// bf16.c: training in bfloat16, and what must stay wider. Playbook: "FP16 and BF16 training"; Micikevicius
// et al. 2018, Gupta et al. 2015.
//
// Changes from 00_single_gpu, whose --dtype bf16 has f32 masters and f32 sums: here each of them is a switch,
// to show what goes wrong without it.
//
//     --master f32            AdamW updates f32 master weights; the model multiplies with a bf16 copy of them
//     --master none           AdamW updates the bf16 weights themselves: an update of less than half the
//                             distance to the next bf16 number vanishes, however often it is repeated
//     --rounding stochastic   without masters: up or down at random, right on average, but with noise
//     --sum f32|bf16          gradients of micro-batches and ranks are summed in f32; a sum in bf16 is
//                             rounded at each addition
//     --gradient f32          the multiplies of backward add directly to the f32 sums, instead of rounding
//                             each micro-batch's gradient to bf16 before it is added (Megatron-LM's
//                             gradient accumulation fusion)
//
// The gain of an RMSNorm begins at 1, where bf16's numbers are 2^-8 apart below and 2^-7 above. With --lr
// 0.001 AdamW's update is about 0.001, a quarter of 2^-8: without a master the gain never moves.
// Memory per parameter: 20 bytes: weight 2, master 4, gradient 2 and its sum 4, AdamW's moments 4 + 4; 18
// with --gradient f32. Bytes sent: gradients in the dtype of sums, so no more with --gradient f32.
// Run: build/08_mixed_precision/bf16        (--master none --rounding stochastic, --sum bf16, --ranks 3 …)
// Last line: PASS bf16: the ranks reproduce the single-device step; updates below half a step vanish …
#include <math.h>

#include "mixed_precision.h"
#include "tensor/rng.h"

// ---- the technique ----

static bool enabled(const Config *c) { return c->dtype == BF16; }
static bool without_masters(const Config *c) { return config_number(c, "master") != 0; }

static void load(void *context, Tensor wide, Tensor stored, StatePart part) {
    (void)context, (void)part;
    op_copy(wide, stored);
}

// Rounds weights at random, all else to nearest. The random number of an element is a function of the seed,
// the weight's name, the element's index in the whole weight and the step: all layouts round alike, and a
// resumed run needs no generator state.
static void store(void *context, Tensor stored, Tensor wide, StatePart part) {
    (void)context;
    const Param *p = part.param;
    if (part.kind != STATE_VALUE) {
        op_copy(stored, wide);
        return;
    }
    RandomPlace place = {.seed = part.seed,
                         .stream = rng_stream(p->name) ^ 1,  // not the numbers of its initialization
                         .step = part.step,
                         .first = part.first,
                         .columns = p->shape[1],
                         .origin = p->first[0] * p->full[1] + p->first[1],
                         .whole_columns = p->full[1]};
    op_round_stochastic(stored, wide, place);
}

static const Rounding by_chance = {.load = load, .store = store};

static void recipe(Recipe *r, const Config *c) {
    if (without_masters(c)) r->master = r->weight;
    if (config_number(c, "gradient")) r->gradient = r->sum;
    if (config_number(c, "sum")) r->sum = r->gradient;
    r->seed = (uint64_t)c->seed;
    if (config_number(c, "rounding")) r->rounding = &by_chance;
}

static void check(const Config *c) {
    CHECK(!config_number(c, "rounding") || without_masters(c),
          "--rounding stochastic rounds the weights that are stepped, and those are f32 masters: add "
          "--master none");
    CHECK(!config_number(c, "gradient") || !config_number(c, "sum"),
          "--gradient f32 writes gradients where they add up, and with --sum bf16 that is in bf16: leave "
          "one of them out");
}

static const Option options[] = {
    {"master", OPTION_CHOICE, NULL, "f32", 0, 0, "f32|none",
     "what the optimizer steps: f32 master weights, or the weights themselves", false},
    {"sum", OPTION_CHOICE, NULL, "f32", 0, 0, "f32|bf16",
     "in which gradients add up over micro-batches and ranks", false},
    {"gradient", OPTION_CHOICE, NULL, "bf16", 0, 0, "bf16|f32",
     "in which backward writes gradients; with f32, micro-batches are also summed in it", false},
    {"rounding", OPTION_CHOICE, NULL, "nearest", 0, 0, "nearest|stochastic",
     "how weights without masters are rounded", false},
};

const Technique bf16_recipe = {.name = "bf16",
                               .option = options,
                               .options = sizeof options / sizeof *options,
                               .asked = "--dtype bf16",
                               .enabled = enabled,
                               .check = check,
                               .recipe = recipe};

#ifndef NO_MAIN

static const Technique *const techniques[] = {&bf16_recipe, &zero1, &recompute, NULL};
static const Technique *const one_device[] = {&bf16_recipe, &recompute, NULL};

// ---- updates that vanish ----

typedef struct Way {
    const char *name;
    int dtype, master, rounding;
    Run run;
} Way;

static Config of_way(const Way *way, const char *data) {
    Config c = small_model(data, "steps=160 lr=0.001");
    c.dtype = way->dtype;
    config_set(&c, "master", way->master);
    config_set(&c, "sum", 0);
    config_set(&c, "rounding", way->rounding);
    return c;
}

static void show_vanishing_updates(const char *data) {
    Way ways[] = {{.name = "f32", .dtype = F32},
                  {.name = "bf16, f32 masters", .dtype = BF16},
                  {.name = "bf16, no masters", .dtype = BF16, .master = 1},
                  {.name = "bf16, stochastic", .dtype = BF16, .master = 1, .rounding = 1}};
    enum { WAYS = sizeof ways / sizeof *ways };
    say("\n160 steps of a small model, --lr 0.001 that falls to its tenth:\n");
    say("  %-20s %12s %12s %26s", "", "last losses", "of f32's", "gains of norms that moved");
    for (int i = 0; i < WAYS; i++) {
        Config c = of_way(&ways[i], data);
        ways[i].run = run_of(&c, one_device);
        say("  %-20s %12.4f %+11.2f%% %17ld of %ld", ways[i].name, ways[i].run.last,
            100 * (ways[i].run.last / ways[0].run.last - 1), (long)ways[i].run.moved,
            (long)ways[i].run.gains);
        report_number(ways[i].name, "last losses", ways[i].run.last, "nats");
    }
    double f32 = ways[0].run.last;
    report_equal("gains that move without masters", 0, (double)ways[2].run.moved, "");
    const Run *random = &ways[3].run;
    report_that(random->moved > random->gains / 2,
                "%ld of %ld gains moved, rounded stochastically: too few", (long)random->moved,
                (long)random->gains);
    report_that(fabs(ways[1].run.last / f32 - 1) < 0.01,
                "with masters the loss is not within 1%% of f32's");
    report_that(ways[2].run.last > ways[3].run.last && ways[3].run.last < 1.02 * f32,
                "stochastic rounding is no better than none, or not within 2%% of f32");
}

// ---- sums that round ----

static void show_sums(const char *data) {
    static const char *const way[] = {"in bf16", "in f32", "where they are written, in f32"};
    double error[3];
    say("\nThe gradient of 256 samples in 64 micro-batches, its relative error against f64:\n");
    for (int i = 0; i < 3; i++) {
        Config c = small_model(data, "steps=1 micro-batch=4 grad-acc=64 seq=16");
        c.dtype = BF16;
        config_set(&c, "sum", i == 0);
        config_set(&c, "gradient", i == 2);
        error[i] = gradient_error(&c, one_device, NULL);
        say("  sums %-30s %8.4f", way[i], error[i]);
        report_number("sums of 64", way[i], error[i], "");
    }
    report_that(error[0] > 1.5 * error[1],
                "sums in bf16 are off by %g, and in f32 by %g: no difference is shown", error[0], error[1]);
    // The error of rounding each micro-batch's gradient is negligible beside that of bf16 activations.
    report_that(fabs(error[2] / error[1] - 1) < 0.1,
                "gradients written in f32 are off by %g, and rounded for each micro-batch by %g", error[2],
                error[1]);
}

static void compare(Mesh mesh, const Config *config) {
    (void)mesh;
    if (config_number(config, "proof-only")) return;
    show_vanishing_updates(small_text(config));
    show_sums(small_text(config));
    report_note("updates below half a step vanish");
}

int main(int argc, char **argv) {
    const Option option = {
        "proof-only", OPTION_FLAG, NULL, NULL, 0, 0, "", "leave out the tables of one device", false};
    // Every rank updates its own part of each weight, and must round as a rank that updates all of it.
    const Technique *const twin[] = {zero_twin_of_1[0], &bf16_recipe, &ddp_no_sync, &recompute, NULL};
    const Program program = {
        .purpose = "bfloat16: f32 master weights, sums in f32, and stochastic rounding in their place.",
        .claim = "the ranks reproduce the single-device step",
        .defaults =
            "layers=1 hidden=48 heads=6 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=2 steps=2 "
            "dtype=bf16 optimizer=adamw lr=0.001 clip=0.5",
        .natural = 2,
        .subject = &bf16_recipe,
        .baseline = one_device,
        .techniques = techniques,
        .twin = "ddp_no_sync",
        .twin_techniques = twin,
        .more = compare,
        .more_option = &option,
        .more_options = 1};
    return program_main(argc, argv, &program);
}
#endif
