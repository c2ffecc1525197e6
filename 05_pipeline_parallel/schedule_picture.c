// schedule_picture.c: a schedule as the playbook draws it, in letters and as an SVG. Playbook: "Pipeline
// Parallelism".
//
// One row per rank, time from left to right, and on each action its micro-batch. In letters: F, B, W, and D
// (double) for BW; small letters for a rank's stages after its first; dots are the bubble.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "report/svg.h"
#include "schedule.h"

static const char letter[] = {[PASS_F] = 'F', [PASS_B] = 'B', [PASS_W] = 'W', [PASS_BW] = 'D'};
static const char *const meaning[] = {"F forward", "B backward (inputs)", "W backward (weights)",
                                      "BW backward (both)"};
static const char *const color[] = {"#4f81d9", "#2fa39a", "#73b74a", "#1f8f78"};
static const char *const light[] = {"#9dbdf2", "#8ad4cd", "#b5dd99",
                                    "#7fcab8"};  // stages after a rank's first

// Which of its rank's stages a pass belongs to: 0 is the first.
static int chunk_of(const Schedule *s, StagePass pass) {
    int chunk = 0;
    if (s->directions > 1) return pass.direction;
    for (int k = 0; k < pass.stage; k++) chunk += s->place[k] == s->place[pass.stage];
    return chunk;
}

// ---- letters ----

// Writes label into [from, to), which is at least one column wide, and fills the rest with dashes.
static void put_label(char *row, int from, int to, const char *label) {
    int length = (int)strlen(label);
    for (int c = from; c < to; c++) row[c] = c - from < length ? label[c - from] : '-';
    // a number cut short would be another number
    if (length > to - from)
        for (int c = from + 1; c < to; c++) row[c] = '-';
}

static void label_of(const Schedule *s, const Action *action, char *text, size_t size) {
    size_t used = 0;
    for (int i = 0; i < action->passes; i++) {
        StagePass pass = action->pass[i];
        int small = chunk_of(s, pass) ? 'a' - 'A' : 0;
        used += (size_t)snprintf(text + used, size - used, "%s%c%d", i ? "+" : "",
                                 letter[pass.kind] + small, pass.micro_batch);
    }
}

// Whether every action begins and ends at a multiple of the unit.
static bool all_multiples(const Schedule *s, const ScheduleTimes *times, double unit) {
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->list[r].count; i++) {
            double begin = times->begin[r][i] / unit, end = times->end[r][i] / unit;
            if (fabs(begin - round(begin)) + fabs(end - round(end)) > 1e-6) return false;
        }
    return true;
}

static double shortest_action(const Schedule *s, const ScheduleTimes *times) {
    double shortest = times->makespan;
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->list[r].count; i++) {
            double length = times->end[r][i] - times->begin[r][i];
            if (length > 0) shortest = fmin(shortest, length);
        }
    return shortest;
}

// Columns per unit of time, chosen so that equal times are equally wide if there is room for that.
static double columns_per_time(const Schedule *s, const ScheduleTimes *times, int width) {
    if (!(times->makespan > 0)) return 0;
    double shortest = shortest_action(s, times);
    for (int parts = 1; parts <= 6; parts++) {
        double unit = shortest / parts, columns = floor(width / (times->makespan / unit) + 1e-9);
        if (columns >= 1 && all_multiples(s, times, unit)) return columns / unit;
    }
    return width / times->makespan;
}

char *schedule_letters(const Schedule *s, const ScheduleTimes *times, int columns) {
    enum { BEFORE = 9 };
    char *text;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    CHECK(out, "out of host memory for a picture");
    int room = columns > 2 * BEFORE ? columns - BEFORE : BEFORE;
    double scale = columns_per_time(s, times, room);
    int width = (int)lround(times->makespan * scale);
    char *row = host_alloc((size_t)width + 2);
    for (int r = 0; r < s->ranks; r++) {
        memset(row, '.', (size_t)width);
        row[width] = 0;
        for (int i = 0; i < s->list[r].count; i++) {
            char label[64];
            int from = (int)lround(times->begin[r][i] * scale), to = (int)lround(times->end[r][i] * scale);
            label_of(s, &s->list[r].action[i], label, sizeof label);
            if (from < to) put_label(row, from, to, label);
        }
        fprintf(out, "%srank %-3d|%s", r ? "\n" : "", r, row);
    }
    free(row);
    fclose(out);
    return text;
}

// ---- SVG ----

enum { LEFT = 64, RIGHT = 16, TOP = 66, ROW = 30, BAR = 24, BOTTOM = 34, NARROWEST = 480, WIDEST = 1500 };

static bool has_kind(const Schedule *s, PassKind kind) {
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->list[r].count; i++)
            for (int j = 0; j < s->list[r].action[i].passes; j++)
                if (s->list[r].action[i].pass[j].kind == kind) return true;
    return false;
}

// Returns where it ends; without a file it draws nothing.
static int draw_legend(FILE *svg, const Schedule *s) {
    int x = LEFT;
    for (int kind = PASS_F; kind <= PASS_BW; kind++) {
        if (!has_kind(s, (PassKind)kind)) continue;
        if (svg) {
            fprintf(svg, "<rect fill='%s' x='%d' y='38' width='14' height='14' rx='2'/>", color[kind], x);
            fprintf(svg, "<text x='%d' y='50'>%s</text>\n", x + 20, meaning[kind]);
        }
        x += 36 + 7 * (int)strlen(meaning[kind]);
    }
    if (s->stages <= s->ranks && s->directions == 1) return x;
    const char *lighter =
        s->directions > 1 ? "lighter: the other direction" : "lighter: later stages of a rank";
    if (svg) fprintf(svg, "<text x='%d' y='50'>%s</text>\n", x, lighter);
    return x + 7 * (int)strlen(lighter);
}

// One pass in its part of an action's box; the number where it fits.
static void draw_pass(FILE *svg, const Schedule *s, StagePass pass, double x, double width, int y,
                      int height) {
    bool other = chunk_of(s, pass) > 0;
    char number[16];
    int length = snprintf(number, sizeof number, "%d", pass.micro_batch);
    double gap = width > 3 ? 1 : 0.2;
    fprintf(svg, "<rect fill='%s' x='%.2f' y='%d' width='%.2f' height='%d'/>",
            (other ? light : color)[pass.kind], x, y, width - gap, height);
    int size = height < 16 ? 9 : 11;
    if (width > 0.62 * size * length)
        fprintf(svg, "<text class='n%s' font-size='%d' x='%.2f' y='%.1f'>%s</text>", other ? "" : " w",
                size, x + (width - gap) / 2, y + height / 2.0 + size * 0.36, number);
    fprintf(svg, "\n");
}

static void draw_rank(FILE *svg, const Schedule *s, const ScheduleTimes *times, int r, double scale) {
    int y = TOP + ROW * r;
    fprintf(svg, "<text x='%d' y='%d' text-anchor='end'>rank %d</text>\n", LEFT - 8, y + BAR - 8, r);
    fprintf(svg, "<rect class='bubble' x='%d' y='%d' width='%.2f' height='%d'/>\n", LEFT, y,
            times->makespan * scale, BAR);
    for (int i = 0; i < s->list[r].count; i++) {
        const Action *action = &s->list[r].action[i];
        double x = LEFT + times->begin[r][i] * scale,
               width = (times->end[r][i] - times->begin[r][i]) * scale;
        for (int j = 0; j < action->passes; j++)
            draw_pass(svg, s, action->pass[j], x, width, y + j * BAR / 2, BAR / action->passes);
    }
}

// Passes suit a light and a dark page; text and the bubble change with it.
void schedule_svg(const Schedule *s, const ScheduleTimes *times, const char *title, const char *file) {
    // wide enough for two digits on the shortest pass
    double wanted = times->makespan > 0 ? 15 * times->makespan / shortest_action(s, times) : 0;
    double plot = fmin(fmax(wanted, fmax(NARROWEST, draw_legend(NULL, s) - LEFT)), WIDEST);
    double scale = times->makespan > 0 ? plot / times->makespan : 0;
    int width = (int)ceil(LEFT + plot + RIGHT), height = TOP + ROW * s->ranks + BOTTOM;
    FILE *svg = svg_open("--svg", file, width, height);
    fprintf(
        svg,
        "<style>\ntext{fill:#3d444d}.t{font-size:15px;font-weight:600}.n{text-anchor:middle;fill:#14181d}"
        ".w{fill:#fff}\n.bubble{fill:#8b949e;fill-opacity:.2}\n"
        "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}}\n</style>\n"
        "<text class='t' x='%d' y='25'>%s</text>\n",
        LEFT, title);
    draw_legend(svg, s);
    for (int r = 0; r < s->ranks; r++) draw_rank(svg, s, times, r, scale);
    fprintf(svg, "<text x='%d' y='%d'>grey: bubble. Makespan %.6g, of which %.6g is bubble</text>\n", LEFT,
            height - 14, times->makespan, times->bubble);
    svg_close(svg, "--svg", file);
}
