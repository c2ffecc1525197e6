// fp16.c: training in float16, which takes three tricks. Playbook: "FP16 and BF16 training"; Micikevicius
// et al. 2018.
//
// Changes from bf16.c: the largest float16 is 65504 and the smallest 2^-24, so training that works in
// bfloat16 breaks here. Each trick is a switch, and fixes one thing:
//
//     --master f32       the optimizer updates f32 weights: small updates do not vanish, as in bf16.c
//     --loss-scale       multiplies the loss, and with it every gradient, by a scale; the optimizer divides
//                        by it. Gradients below 2^-25, which would be zero, are kept
//     --sum f32          gradients of micro-batches and ranks are summed in f32: a sum may exceed 65504
//                        (sums within a multiply, of which the paper speaks, are always in f32 here)
//
// With --loss-scale dynamic the scale follows the gradients:
//
//     a gradient is not finite                 scale / 2, and this step is skipped
//     --scale-interval steps without one       scale x 2
//
// An overflow shows in the norm of all gradients, which every rank has, so either all ranks skip the step or
// none does, and their scales stay equal without a message. A skipped step changes no weight and no moment,
// and AdamW's bias correction does not count it; text and learning rate go on as if it had been made (the
// learning rates of Megatron-LM and DeepSpeed wait for a step that is made). Losses and norms are printed
// without the scale; checkpoints hold it. The moments stay in f32 as well (--moments).
// Memory per parameter and bytes sent: as bf16.c.
// Run: build/08_mixed_precision/fp16        (--loss-scale none, --sum f16, --zero 3 …)
// Last line: PASS fp16: the ranks reproduce the single-device step; each trick fixes its own failure …
#include <math.h>
#include <stdlib.h>

#include "mixed_precision.h"

enum { SCALE_NONE, SCALE_STATIC, SCALE_DYNAMIC };  // --loss-scale
enum { KEPT_SCALE, KEPT_GOOD, KEPT };              // in Params.kept

// ---- the technique ----

static bool enabled(const Config *c) { return c->dtype == F16; }

static void check(const Config *c) {
    double kind = config_number(c, "loss-scale");
    CHECK(kind != SCALE_NONE || !config_given(c, "scale"),
          "--scale is where --loss-scale static or dynamic begins, and it is none: leave one of them out");
    CHECK(kind == SCALE_DYNAMIC || !config_given(c, "scale-interval"),
          "--scale-interval has an effect only with --loss-scale dynamic: leave one of them out");
    CHECK(c->optimizer == OPTIMIZER_ADAMW || !config_number(c, "moments"),
          "--moments f16 is of AdamW, and --optimizer sgd has none: leave one of them out");
}

// With --moments f16 v stays 0 where (1 - beta2) g^2 is below 2^-25 (with beta2 = 0.95, for gradients below
// 2^-10.3), AdamW divides by its root, and training diverges.
static void recipe(Recipe *r, const Config *c) {
    if (config_number(c, "master")) r->master = r->weight;
    if (config_number(c, "sum")) r->sum = r->gradient;
    if (config_number(c, "moments")) r->moment = r->second = F16;
}

static bool accept(void *context, Model *m, double grad_norm) {
    LossScaler *s = context;
    double *scale = &s->kept[KEPT_SCALE], *good = &s->kept[KEPT_GOOD];
    bool sound = isfinite(grad_norm);
    bool others = s->before.step.accept(s->before.step.context, m, grad_norm);
    s->skipped += !sound;
    if (s->interval && !sound) {
        *scale /= 2;
        *good = 0;
        CHECK(*scale >= 1,
              "the gradients overflow float16 even where the loss is not scaled: lower --lr, or take "
              "--dtype bf16");
    } else if (s->interval && ++*good >= (double)s->interval) {
        *scale *= 2;
        *good = 0;
    }
    m->grad_scale = *scale;
    return sound && others;
}

static void *plug(Model *m) {
    const Config *c = &m->config;
    int kind = (int)config_number(c, "loss-scale");
    if (kind == SCALE_NONE) return NULL;
    LossScaler *s = host_alloc(sizeof *s);
    *s = (LossScaler){.before = m->sockets,
                      .kept = {config_number(c, "scale"), 0},
                      .interval = kind == SCALE_DYNAMIC ? (int64_t)config_number(c, "scale-interval") : 0};
    m->params.kept = s->kept;
    m->params.kept_count = KEPT;
    m->grad_scale = s->kept[KEPT_SCALE];
    m->sockets.step.context = s;
    m->sockets.step.accept = accept;
    return s;
}

static void resumed(Model *m, void *context) {
    const LossScaler *s = context;
    if (s) m->grad_scale = s->kept[KEPT_SCALE];
}

static void unplug(Model *m, void *context) {
    m->params.kept_count = 0;
    free(context);
}

static const Option options[] = {
    {"master", OPTION_CHOICE, NULL, "f32", 0, 0, "f32|none",
     "what the optimizer steps: f32 master weights, or the weights themselves", false},
    {"sum", OPTION_CHOICE, NULL, "f32", 0, 0, "f32|f16",
     "in which gradients add up over micro-batches and ranks", false},
    {"moments", OPTION_CHOICE, NULL, "f32", 0, 0, "f32|f16", "AdamW's m and v", false},
    {"loss-scale", OPTION_CHOICE, NULL, "dynamic", 0, 0, "none|static|dynamic",
     "whether the loss is scaled, and whether the scale changes", false},
    {"scale", OPTION_REAL, NULL, "65536", 1, 1e30, "", "scale of the loss at the start", false},
    {"scale-interval", OPTION_INT, NULL, "2000", 1, 1e9, "steps",
     "steps without an overflow after which the scale doubles", false},
};

const Technique fp16_recipe = {.name = "fp16",
                               .option = options,
                               .options = sizeof options / sizeof *options,
                               .asked = "--dtype f16",
                               .wraps = 1u << SOCKET_STEP,
                               .enabled = enabled,
                               .check = check,
                               .recipe = recipe,
                               .plug = plug,
                               .resumed = resumed,
                               .unplug = unplug};

#ifndef NO_MAIN

static const Technique *const techniques[] = {&fp16_recipe, &ddp_no_sync, &zero1, &zero2,
                                              &zero3,       &recompute,   NULL};
static const Technique *const one_device[] = {&fp16_recipe, &recompute, NULL};

// ---- each trick alone ----

static Config small(const char *data, int dtype, int master, int sum, int loss_scale, const char *more) {
    Config c = small_model(data, more);
    c.dtype = dtype;
    config_set(&c, "master", master);
    config_set(&c, "sum", sum);
    config_set(&c, "loss-scale", loss_scale);
    config_set(&c, "scale", 65536);
    config_set(&c, "scale-interval", 2000);
    return c;
}

// An update of 0.0002 is below half a step at 1, 2^-12.
static void show_masters(const char *data) {
    static const char *const names[] = {"f32", "f16, f32 masters", "f16, no masters"};
    Run run[3];
    say("\nWithout masters: 60 steps, --lr 0.0002 that falls to its tenth\n");
    say("  %-20s %12s %26s", "", "last losses", "gains of norms that moved");
    for (int i = 0; i < 3; i++) {
        Config c = small(data, i ? F16 : F32, i == 2, 0, SCALE_DYNAMIC, "steps=60 lr=0.0002");
        run[i] = run_of(&c, one_device);
        say("  %-20s %12.4f %17ld of %ld", names[i], run[i].last, (long)run[i].moved, (long)run[i].gains);
        report_number("masters", names[i], run[i].last, "nats");
    }
    report_equal("gains that move without masters", 0, (double)run[2].moved, "");
    report_that(run[1].moved > 0, "no gain moved with masters either: nothing is shown");
    report_that(fabs(run[1].last / run[0].last - 1) < 0.01,
                "with masters the loss is not within 1%% of f32's");
}

// The gradient of a logit is its probability (about 1 / v = 2^-8) divided by the number of labels, 2^15:
// about 2^-23, just twice the smallest float16.
static void show_scaling(const char *data) {
    double error[2], zero[2];
    say("\nWithout loss scaling: the gradient of 32,768 labels\n");
    say("  %-20s %22s %20s", "", "relative error", "lost, of elements");
    for (int scaled = 0; scaled < 2; scaled++) {
        Config c = small(data, F16, 0, 0, scaled ? SCALE_DYNAMIC : SCALE_NONE,
                         "steps=1 grad-acc=16 micro-batch=64 hidden=16 heads=2 kv-heads=1 ffn=32");
        error[scaled] = gradient_error(&c, one_device, &zero[scaled]);
        say("  %-20s %22.4f %19.1f%%", scaled ? "scale 65536" : "none", error[scaled], 100 * zero[scaled]);
        report_number("loss scaling", scaled ? "error, scaled" : "error, unscaled", error[scaled], "");
        report_number("loss scaling", scaled ? "lost, scaled" : "lost, unscaled", zero[scaled], "");
    }
    report_that(error[0] > 20 * error[1] && zero[0] > 10 * zero[1],
                "a scale mends nothing: errors %g and %g, lost %g and %g", error[0], error[1], zero[0],
                zero[1]);
}

static bool overflows(const char *data, int sum, double scale) {
    Config c = small(data, F16, 0, sum, SCALE_STATIC, "steps=1 grad-acc=64 micro-batch=1");
    config_set(&c, "scale", scale);
    Trainer *t = trainer_new(&c, mesh_single(), one_device);
    train_step(t, NULL);
    const LossScaler *s = trainer_context(t, &fp16_recipe);
    bool skipped = s->skipped > 0;
    report_that(t->optimizer.step == !skipped, "a step that overflows at %g was not skipped", scale);
    trainer_free(t);
    return skipped;
}

// The largest power of two without overflow.
static double largest_scale(const char *data, int sum) {
    double scale = 16384;
    while (!overflows(data, sum, 2 * scale)) scale *= 2;
    return scale;
}

static void show_sums(const char *data) {
    double scale[2], error[2];
    say("\nWith sums in f16: the gradient of 64 micro-batches\n");
    say("  %-20s %22s %20s", "", "largest sound scale", "relative error");
    for (int narrow = 0; narrow < 2; narrow++) {
        Config c = small(data, F16, 0, narrow, SCALE_DYNAMIC, "steps=1 grad-acc=64 micro-batch=1");
        scale[narrow] = largest_scale(data, narrow);
        error[narrow] = gradient_error(&c, one_device, NULL);
        say("  %-20s %22.0f %20.5f", narrow ? "f16" : "f32", scale[narrow], error[narrow]);
        report_number("sums", narrow ? "scale, f16" : "scale, f32", scale[narrow], "");
    }
    report_that(scale[0] >= 4 * scale[1], "sums in f16 overflow no earlier than in f32");
    report_that(error[1] > 1.5 * error[0], "sums in f16 are off by %g, and in f32 by %g", error[1],
                error[0]);
}

// ---- an overflow on one rank ----

// On the last rank one element of one gradient overflows, once when it is due.
typedef struct Planted {
    Sockets before;
    bool due;
} Planted;

static void overflow_once(void *context, Model *m, int count, Param *const *weight, const Tensor *dy,
                          Tensor x, void **kept) {
    Planted *p = context;
    Group dp = m->mesh.dp;
    p->before.linear.backward_weight(p->before.linear.context, m, count, weight, dy, x, kept);
    if (dp.rank < dp.size - 1 || !p->due) return;
    op_fill(tensor_view(param_grad(&m->params, weight[0]), 7, SHAPE(1)), INFINITY);
    p->due = false;
}

static void *plug_overflow(Model *m) {
    Planted *p = host_alloc(sizeof *p);
    *p = (Planted){.before = m->sockets};
    m->sockets.linear.context = p;
    m->sockets.linear.backward_weight = overflow_once;
    return p;
}

static void unplug_overflow(Model *m, void *context) {
    (void)m;
    free(context);
}

static void show_overflow(Mesh mesh, const Config *config) {
    static const Technique planted = {
        .name = "planted overflow", .plug = plug_overflow, .unplug = unplug_overflow};
    // An overflow resets the count of good steps, and so does a doubling.
    enum { STEPS = 6, OVERFLOWS = 1, INTERVAL = 2 };
    static const double dynamic[STEPS] = {1, 0.5, 0.5, 1, 1, 2};  // the scale after each step
    Config c = *config;
    c.steps = STEPS;
    config_set(&c, "scale", fmax(2, config_number(config, "scale")));  // which can be halved: accept
    config_set(&c, "scale-interval", INTERVAL);
    Trainer *t = trainer_new(
        &c, mesh,
        (const Technique *[]){&fp16_recipe, &ddp_no_sync, &zero1, &zero2, &zero3, &planted, NULL});
    const LossScaler *s = trainer_context(t, &fp16_recipe);
    double first = s ? s->kept[KEPT_SCALE] : 0;
    for (int step = 0; s && step < STEPS; step++) {
        ((Planted *)trainer_context(t, &planted))->due = step == OVERFLOWS;
        train_step(t, NULL);
        double want = first * (s->interval ? dynamic[step] : 1);
        report_that(s->kept[KEPT_SCALE] == want && t->model->grad_scale == want,
                    "after step %d, of which the second overflows, with --scale-interval %d the scale is "
                    "%g and the model's %g, and not %g",
                    step + 1, INTERVAL, s->kept[KEPT_SCALE], t->model->grad_scale, want);
        report_that(t->optimizer.step == step + (step < OVERFLOWS),
                    "the optimizer has made %lld of %d steps, of which the second overflows",
                    (long long)t->optimizer.step, step + 1);
        report_that(t->lr == learning_rate(&c, step),
                    "step %d, of which the second overflows, has a learning rate of %g, and not %g",
                    step + 1, t->lr, learning_rate(&c, step));
        if (step != OVERFLOWS) continue;
        double ranks = mesh.world.size, skipped = comm_sum((double)s->skipped, mesh.world);
        double most = comm_max(s->kept[KEPT_SCALE], mesh.world),
               least = -comm_max(-s->kept[KEPT_SCALE], mesh.world);
        say("\nAn overflow on rank %d alone: skipped on %g of %g rank%s, scale %g -> %g\n",
            mesh.dp.size - 1, skipped, ranks, plural(mesh.world.size), first, most);
        report_equal("ranks that skip", ranks, skipped, "");
        report_equal("scale on all ranks", least, most, "");
    }
    trainer_free(t);
}

static void compare(Mesh mesh, const Config *config) {
    show_overflow(mesh, config);
    if (config_number(config, "proof-only")) return;
    show_masters(small_text(config));
    show_scaling(small_text(config));
    show_sums(small_text(config));
    report_note("each trick fixes its own failure");
}

int main(int argc, char **argv) {
    const Option option = {
        "proof-only", OPTION_FLAG, NULL, NULL, 0, 0, "", "leave out the tables of one device", false};
    const Program program = {
        .purpose = "float16: f32 master weights, loss scaling, and sums in f32.",
        .claim = "the ranks reproduce the single-device step",
        .defaults =
            "layers=1 hidden=48 heads=6 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f16 optimizer=adamw lr=0.001 clip=0.5 bucket-mb=0.1 zero=2",
        .natural = 2,
        .subject = &fp16_recipe,
        .baseline = one_device,
        .techniques = techniques,
        .option = &zero_option,
        .options = 1,
        .more = compare,
        .more_option = &option,
        .more_options = 1};
    return program_main(argc, argv, &program);
}
#endif
