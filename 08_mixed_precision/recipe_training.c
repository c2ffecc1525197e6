// recipe_training.c: the losses of fp8.c's recipes compared with bf16's, also at growing learning rates;
// how often they cast; what ZeRO-3 sends in 8 bits. Playbook: "FP8 pretraining".
//
// This file has no main: fp8.c runs it.
#include <math.h>
#include <stdlib.h>

#include "mixed_precision.h"
#include "report/svg.h"

const Technique *const fp8_one_device[] = {&fp8_recipe, &recompute, NULL};

void fp8_set(Config *c, int recipe) {
    config_set(c, "fp8", recipe);
    config_set(c, "fp8-tile", 0);
    config_set(c, "fp8-wire", 0);
}

Config fp8_small(const char *data, int recipe, const char *more) {
    char *text = format_text("kv-heads=4 ffn=96 dtype=bf16 %s", more);
    Config c = small_model(data, text);
    free(text);
    fp8_set(&c, recipe);
    // Standard tiles are no smaller than hidden: a row of x would be a single tile.
    if (recipe && fp8_recipes[recipe - 1].tile) config_set(&c, "fp8-tile", 16);
    return c;
}

// Weights are cast once per optimizer step, however often forward runs again.
static void show_casts(const char *data) {
    Config c = fp8_small(data, TE_DELAYED, "grad-acc=3 steps=2");
    c.recompute = RECOMPUTE_FULL;
    Trainer *t = trainer_new(&c, mesh_single(), fp8_one_device);
    int64_t weights = 0;
    for (int i = 0; i < t->model->params.count; i++) weights += fp8_is_cast(&t->model->params.param[i]);
    train_step(t, NULL);
    train_step(t, NULL);
    say("\n2 steps of 3 micro-batches, each forward twice:");
    report_equal("casts of weights", 2 * (double)weights, (double)fp8_linear_casts(fp8_linear_of(t)), "");
    trainer_free(t);
}

// To tell what bf16 masters cost nanotron's recipe.
static void masters_in_f32(Recipe *recipe, const Config *c) {
    (void)c;
    recipe->master = F32;
}
static const Technique f32_masters = {.name = "f32 masters", .recipe = masters_in_f32};
static const Technique *const with_f32_masters[] = {&fp8_recipe, &f32_masters, NULL};

enum { MOST = 8 };  // recipes, bf16, and one recipe with other masters

// The losses that each recipe reaches, beside bf16's. The ranks share the runs.
static void show_losses(Group ranks, const char *data) {
    const int wide = fp8_recipe_count + 1;  // the last row: nanotron with f32 masters
    double last[MOST] = {0}, bf16;
    for (int i = ranks.rank; i <= wide; i += ranks.size) {
        Config c = fp8_small(data, i == wide ? NANOTRON : i, "steps=160 lr=0.003");
        last[i] = run_of(&c, i == wide ? with_f32_masters : fp8_one_device).last;
    }
    comm_sum_all(last, MOST, ranks);
    bf16 = last[0];
    say("\n160 steps of a small model, --lr 0.003 that falls to its tenth:\n");
    say("  %-22s %12s %12s", "", "last losses", "of bf16's");
    double highest = bf16;  // of those that train
    for (int i = 1; i <= fp8_recipe_count; i++)
        if (fp8_recipes[i - 1].trains) highest = fmax(highest, last[i]);
    for (int i = 0; i <= wide; i++) {
        const char *name = i == wide ? "nanotron, f32 masters" : i ? fp8_recipes[i - 1].name : "bf16";
        say("  %-22s %12.4f %+11.2f%%", name, last[i], 100 * (last[i] / bf16 - 1));
        report_number("last losses", name, last[i], "nats");
        if (i == 0 || i == wide || fp8_recipes[i - 1].trains)
            report_that(fabs(last[i] / bf16 - 1) < 0.015, "%s: its loss is not within 1.5%% of bf16's",
                        name);
        else  // by how much depends on the text
            report_that(last[i] > highest, "%s: its loss is not above that of every recipe that trains",
                        name);
    }
}

// ---- in flight ----

// ZeRO-3's weights in 16 and in 8 bits: what its all-gathers send, and what loss training reaches.
static void show_wire(Mesh mesh, const char *data) {
    static const Technique *const zero[] = {&fp8_recipe, &zero3, NULL};
    double bytes[2], last[2];
    if (mesh.dp.size < mesh.world.size || mesh.dp.size == 1) return;
    say("\nZeRO-3 of deepseek on %d ranks, 60 steps\n", mesh.dp.size);
    say("  %-12s %22s %12s", "weights in", "all-gathered in a step", "last losses");
    for (int narrow = 0; narrow < 2; narrow++) {
        Config c = fp8_small(data, DEEPSEEK, "steps=60 lr=0.003 micro-batch=4");
        config_set(&c, "fp8-wire", narrow);
        config_set(&c, "no-prefetch", 0);
        c.dp = mesh.dp.size;
        Record record = program_record(&c, mesh, zero, false, true, narrow ? "8 bits" : "16 bits");
        bytes[narrow] = (double)comm_count("all_gather").bytes / (double)c.steps, last[narrow] = 0;
        for (int64_t i = c.steps - 6; i < c.steps; i++) last[narrow] += record.loss[i] / 6;
        say("  %-12s %22s %12.4f", narrow ? "8 bits" : "16 bits", bytes_text(bytes[narrow]), last[narrow]);
        report_number("ZeRO-3's all-gathers", narrow ? "8 bits" : "16 bits", bytes[narrow], "B");
        record_free(&record);
    }
    report_that(bytes[1] < 0.54 * bytes[0], "8 bits send %g of the bytes of 16", bytes[1] / bytes[0]);
    report_that(fabs(last[1] / last[0] - 1) < 0.02, "weights in 8 bits change the loss by %g of it",
                last[1] / last[0] - 1);
}

// ---- learning rates ----

enum { RATES = 5, LEFT = 70, TOP = 50, WIDTH = 560, HEIGHT = 300 };
static const double rates[RATES] = {0.003, 0.03, 0.3, 1, 3};

static void draw_rates(const char *file, double (*last)[RATES], int rows, double highest) {
    static const char *const colour[] = {"#8b949e", "#0969da", "#54aeff", "#bf3989",
                                         "#1a7f37", "#cf222e", "#9a6700"};
    FILE *svg = svg_open("--curves", file, LEFT + WIDTH + 120, TOP + HEIGHT + 50);
    fprintf(svg,
            "<style>\ntext{fill:#3d444d}.grid{stroke:#8b949e;stroke-opacity:.35}\n"
            "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}}\n</style>\n"
            "<text x='%d' y='28' font-size='15' font-weight='600'>Loss after 100 steps, by --lr</text>\n",
            LEFT);
    double low = floor(last[0][0]), across = WIDTH / (RATES - 1.0), scale = HEIGHT / (highest - low);
    for (int i = 0; i < RATES; i++)
        fprintf(svg, "<text x='%g' y='%d' text-anchor='middle'>%g</text>\n", LEFT + i * across,
                TOP + HEIGHT + 24, rates[i]);
    for (double y = low; y <= highest; y++)
        fprintf(svg, "<text x='%d' y='%g' text-anchor='end'>%g</text><path class='grid' d='M%d %gh%d'/>\n",
                LEFT - 10, TOP + HEIGHT - (y - low) * scale + 4, y, LEFT, TOP + HEIGHT - (y - low) * scale,
                WIDTH);
    for (int row = 0; row < rows; row++) {
        fprintf(svg, "<path fill='none' stroke='%s' stroke-width='2' d='", colour[row]);
        for (int i = 0; i < RATES; i++)
            fprintf(svg, "%c%g %g", i ? 'L' : 'M', LEFT + i * across,
                    TOP + HEIGHT - (fmin(last[row][i], highest) - low) * scale);
        fprintf(svg, "'/><text x='%d' y='%d' style='fill:%s'>%s</text>\n", LEFT + WIDTH + 16,
                TOP + 16 + 20 * row, colour[row], row ? fp8_recipes[row - 1].name : "bf16");
    }
    svg_close(svg, "--curves", file);
}

// Where each recipe leaves bf16 as the learning rate grows. Without a warm-up, and not clipped.
static void show_rates(const char *file, const char *data) {
    double last[MOST][RATES], highest = 0;
    say("\nMean of the last 10 of 100 losses as --lr grows, not clipped\n");
    say("  %-12s %10g %10g %10g %10g %10g", "", rates[0], rates[1], rates[2], rates[3], rates[4]);
    for (int i = 0; i <= fp8_recipe_count; i++) {
        for (int j = 0; j < RATES; j++) {
            Config c = fp8_small(data, i, "steps=100 clip=0");
            c.lr = rates[j];
            last[i][j] = run_of(&c, fp8_one_device).last;
            highest = fmax(highest, last[i][j]);
        }
        say("  %-12s %10.3f %10.3f %10.3f %10.3f %10.3f", i ? fp8_recipes[i - 1].name : "bf16", last[i][0],
            last[i][1], last[i][2], last[i][3], last[i][4]);
    }
    if (base_rank() == 0) draw_rates(file, last, fp8_recipe_count + 1, fmin(ceil(highest), 12));
}

void fp8_training(Mesh mesh, const Config *config) {
    const char *curves = config_text(config, "curves");
    show_casts(small_text(config));
    show_losses(mesh.world, small_text(config));
    show_wire(mesh, small_text(config));
    if (curves) show_rates(curves, small_text(config));
    int seeds = (int)config_number(config, "long");
    Config model = config_default("dtype=bf16 steps=500");
    model.data = small_text(config);
    if (seeds) fp8_convergence(mesh.world, &model, 512, seeds);
}
