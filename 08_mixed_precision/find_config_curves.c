// find_config_curves.c: the playbook's heat map of best layouts, and its curves of throughput by degree.
// Playbook: "Benchmarking thousands of configurations"; "Tensor Parallelism", "Pipeline Parallelism" and
// "Data Parallelism", whose curves fall where the node ends, by the bubble, and from 512 GPUs on.
//
//     tp        the batch grows with the degree; beyond 8 its collectives leave the node
//     pp        32 micro-batches at every degree: the bubble grows, messages are hidden
//     ZeRO-3    one sequence on each GPU: gathers take equally long at any degree, but for latency per rank
//     dp        the same with a model that fits whole: the all-reduce, and as much memory at any degree
//
// Bytes sent: none, these are dry runs. This file has no main: find_config.c shows it.
#include <math.h>
#include <stdlib.h>

#include "find_config.h"
#include "report/report.h"
#include "report/svg.h"

// The colour of text on a light and on a dark page.
static const char themes[] = "text{fill:#3d444d}\n@media(prefers-color-scheme:dark){text{fill:#d1d7e0}}\n";

// The playbook's 1.34B model, as it differs from Llama 3 8B.
static const char small_model[] = "layers=16 hidden=2048 heads=16 kv-heads=16 ffn=8192 vocab=131072 tied=1";

// ---- curves ----

enum { POINTS = 8 };
enum { CURVE_TP, CURVE_PP, CURVE_ZERO3, CURVE_DP, CURVES };

typedef struct Curve {
    const char *name, *shape;  // how it differs from Llama 3 8B
    int points;
    int degree[POINTS];
    double tokens[POINTS];  // a second and GPU
    double bytes[POINTS];   // at the peak of a GPU's memory
} Curve;

static Found point_of(int curve, int degree) {
    Found f = {.tp = 1,
               .cp = 1,
               .pp = 1,
               .dp = 1,
               .ep = 1,
               .schedule = ONE_F_ONE_B,
               .chunks = 1,
               .micro_batch = 1,
               .micro_batches = 1};
    if (curve == CURVE_TP) f.tp = degree, f.sp = degree > 1, f.micro_batch = degree, f.micro_batches = 2;
    if (curve == CURVE_PP) f.pp = degree, f.micro_batches = 32;
    if (curve == CURVE_ZERO3) f.dp = degree, f.zero = 3;
    if (curve == CURVE_DP) f.dp = degree;
    return f;
}

static double throughput(const Curve *curve, int which, int degree, double *bytes) {
    char *text = format_text("%s seq=4096 dtype=bf16 optimizer=adamw", curve->shape);
    Goal goal = {.model = config_of_model("llama-3-8b", text)};
    free(text);
    Found f = point_of(which, degree);
    Config c = found_config(&goal, &f);
    LoneParts parts = lone_parts(&c);
    LoneMemory memory;
    LoneTime time = lone_step(&c, &parts, lone_no_limits, &memory);
    *bytes = memory.peak;
    double tokens = (double)(f.dp * f.micro_batch * f.micro_batches * c.seq);
    return tokens / time.step / (f.tp * f.pp * f.dp);
}

static void draw_curves(const char *file, const Curve *curve) {
    static const char *const color[] = {"#c0392b", "#2471a3", "#1e8449", "#b7950b"};
    FILE *out = svg_open("--curves", file, 640, 360);
    fprintf(out,
            "<style>\n%s.grid{stroke:#8b949e;stroke-opacity:.35}</style>\n"
            "<text x='60' y='24'>throughput of a GPU, relative to the curve's first point; dashed: the end "
            "of a node</text>\n"
            "<line x1='228' y1='40' x2='228' y2='310' stroke='#8b949e' stroke-dasharray='4'/>\n",
            themes);
    for (int i = 0; i <= 5; i++)
        fprintf(out,
                "<line class='grid' x1='60' x2='600' y1='%d' y2='%d'/><text x='22' y='%d'>%d%%</text>\n",
                310 - 50 * i, 310 - 50 * i, 314 - 50 * i, 20 * i);
    for (int i = 0; i <= 10; i++)
        fprintf(out, "<text x='%d' y='328' text-anchor='middle'>%d</text>\n", 60 + 54 * i, 1 << i);
    fprintf(out, "<text x='300' y='350'>degree</text>\n");
    for (int k = 0; k < CURVES; k++) {
        fprintf(out, "<polyline fill='none' stroke-width='2' stroke='%s' points='", color[k]);
        for (int i = 0; i < curve[k].points; i++)
            fprintf(out, "%.1f,%.1f ", 60 + 54 * log2(curve[k].degree[i]),
                    310 - 250 * curve[k].tokens[i] / curve[k].tokens[0]);
        fprintf(out, "'/>\n<text x='480' y='%d' style='fill:%s'>%s</text>\n", 220 + 18 * k, color[k],
                curve[k].name);
    }
    svg_close(out, "--curves", file);
}

void curves(const char *file) {
    Curve curve[CURVES] = {{"tp", "layers=16 kv-heads=32 vocab=32000", 6, {1, 2, 4, 8, 16, 32}, {0}, {0}},
                           {"pp", "layers=64 kv-heads=32 vocab=32000", 6, {2, 4, 8, 16, 32, 64}, {0}, {0}},
                           {"ZeRO-3", "", 8, {8, 16, 32, 64, 128, 256, 512, 1024}, {0}, {0}},
                           {"dp", small_model, 8, {8, 16, 32, 64, 128, 256, 512, 1024}, {0}, {0}}};
    bool was_dry = device_is_dry_run();
    device_dry_run(true);
    comm_stand_for_all(true);
    say("\nTokens a second and GPU by degree (8 GPUs a node):");
    for (int k = 0; k < CURVES; k++) {
        for (int i = 0; i < curve[k].points; i++) {
            curve[k].tokens[i] = throughput(&curve[k], k, curve[k].degree[i], &curve[k].bytes[i]);
            double from_before = i > 0 ? curve[k].tokens[i] / curve[k].tokens[i - 1] - 1 : 0;
            say("  %-7s %5d %9.0f  %+6.1f%%", i ? "" : curve[k].name, curve[k].degree[i],
                curve[k].tokens[i], 100 * from_before);
            char *name = format_text("degree %d", curve[k].degree[i]);
            report_number(curve[k].name, name, curve[k].tokens[i], "tokens/s/GPU");
            free(name);
        }
    }
    const Curve *tp_curve = &curve[CURVE_TP], *pp_curve = &curve[CURVE_PP], *zero3 = &curve[CURVE_ZERO3],
                *dp = &curve[CURVE_DP];
    double tp = 1 - tp_curve->tokens[4] / tp_curve->tokens[3],
           inside = 1 - tp_curve->tokens[3] / tp_curve->tokens[2];
    double pp = 1 - pp_curve->tokens[3] / pp_curve->tokens[2];
    say("  from one node to two: tp loses %.0f%% (the playbook's runs: 43%%), pp %.0f%%, mostly its bubble",
        100 * tp, 100 * pp);
    report_that(tp > 1.5 * inside && pp < 0.6 * tp,
                "where the node ends tp loses %.2f (inside it %.2f), and pp %.2f", tp, inside, pp);
    double hidden = 1 - zero3->tokens[5] / zero3->tokens[0], far = 1 - zero3->tokens[7] / zero3->tokens[0];
    say("  ZeRO-3 has lost %.0f%% at 256 GPUs and %.0f%% at 1024 (the playbook: hidden until about 512)",
        100 * hidden, 100 * far);
    report_that(hidden < 0.05 && far > 0.2, "ZeRO-3 loses %.2f at 256 GPUs and %.2f at 1024", hidden, far);
    double near = 1 - dp->tokens[1] / dp->tokens[0], many = 1 - dp->tokens[6] / dp->tokens[0];
    say("  dp has lost %.0f%% at 16 GPUs and %.0f%% at 512, and a GPU holds %s at each degree", 100 * near,
        100 * many, bytes_text(dp->bytes[0]));
    report_that(near < 0.05 && many > 0.2, "dp loses %.2f at 16 GPUs and %.2f at 512", near, many);
    for (int i = 1; i < dp->points; i++)
        report_that(dp->bytes[i] == dp->bytes[0], "a GPU of dp %d holds %.0f B, and of dp %d %.0f",
                    dp->degree[0], dp->bytes[0], dp->degree[i], dp->bytes[i]);
    comm_stand_for_all(false);
    device_dry_run(was_dry);
    if (file) draw_curves(file, curve);
}

// ---- the heat map ----

enum { SIZES = 4, NODES = 7 };

static const struct {
    const char *name, *shape;
} size[SIZES] = {  // those of the playbook's own runs
    {"1.34B", small_model},
    {"3.57B", "layers=28 hidden=3072 heads=32 kv-heads=32 ffn=8192 vocab=131072 tied=1"},
    {"8.86B", "layers=32 hidden=4096 heads=32 kv-heads=32 ffn=14336 vocab=131072"},
    {"80B", "layers=80 hidden=8192 heads=64 kv-heads=64 ffn=28672 vocab=131072"}};

static void draw_cell(FILE *out, int row, int column, const Goal *goal, const Search *s) {
    int x = 70 + 110 * column, y = 50 + 90 * row;
    if (s->count == 0) {
        fprintf(out,
                "<rect x='%d' y='%d' width='106' height='86' fill='#eee'/>"
                "<text class='in' x='%d' y='%d'>does not fit</text>\n",
                x, y, x + 8, y + 46);
        return;
    }
    const Found *f = &s->best[0];
    double mfu = found_mfu(goal, f);
    int shade = (int)fmin(255, 255 * fmax(0, 1 - mfu / 0.6));
    fprintf(out, "<g class='in'><rect x='%d' y='%d' width='106' height='86' fill='rgb(%d,%d,255)'/>\n", x,
            y, shade, 128 + shade / 2);
    fprintf(out, "<text x='%d' y='%d' font-weight='bold'>%.0f%% MFU</text>\n", x + 6, y + 18, 100 * mfu);
    fprintf(out, "<text x='%d' y='%d'>dp %d tp %d pp %d</text>\n", x + 6, y + 36, f->dp, f->tp, f->pp);
    fprintf(out, "<text x='%d' y='%d'>cp %d zero %d</text>\n", x + 6, y + 53, f->cp, f->zero);
    fprintf(out, "<text x='%d' y='%d'>mbs %ld x %ld</text></g>\n", x + 6, y + 70, f->micro_batch,
            f->micro_batches);
}

void heat_map(const char *file, const char *machine) {
    FILE *out = svg_open("--heat-map", file, 860, 430);
    fprintf(
        out,
        "<style>\n%stext{font-size:11px}.in,.in text{fill:#14181d}</style>\n"
        "<text x='70' y='18'>fastest layouts, 1M tokens a step, s = 4096, %s; this book's own steps, in "
        "the median %.0f%% off published ones</text>\n",
        themes, machine, 100 * FITTED_MEDIAN);
    for (int column = 0; column < NODES; column++)
        fprintf(out, "<text x='%d' y='42'>%d node%s</text>\n", 90 + 110 * column, 1 << column,
                column ? "s" : "");
    for (int row = 0; row < SIZES; row++) {
        fprintf(out, "<text x='14' y='%d'>%s</text>\n", 98 + 90 * row, size[row].name);
        for (int column = 0; column < NODES; column++) {
            char *shape = format_text("%s seq=4096 dtype=bf16 optimizer=adamw", size[row].shape);
            Goal goal = {.model = config_default(shape), .gpus = 8 << column, .sequences = 256};
            goal.model.machine = machine;
            goal.memory = 0.95 * machine_find(machine)->memory_bytes;
            device_dry_run(true);
            comm_stand_for_all(true);
            Search s = search(&goal, 1);
            draw_cell(out, row, column, &goal, &s);
            progress_on_terminal(row * NODES + column + 1, SIZES * NODES, "heat map");
            free(s.best);
            free(shape);
        }
    }
    svg_close(out, "--heat-map", file);
}
