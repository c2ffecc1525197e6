// timeline_picture.c: rows of timeline.c in letters, and as an SVG.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "files.h"
#include "timeline.h"

typedef struct Kind {
    char letter;
    const char *meaning, *color;
} Kind;

// The first four are compute.
static const Kind kinds[] = {
    {'F', "forward", "#6cc5b0"},        {'B', "backward", "#4269d0"},
    {'S', "optimizer step", "#a463f2"}, {'+', "other operations", "#9498a0"},
    {'A', "all-reduce", "#efb118"},     {'R', "reduce-scatter", "#ff8ab7"},
    {'G', "all-gather", "#97bbf5"},     {'T', "send, receive", "#3ca951"},
    {'X', "all-to-all", "#9c6b4e"},     {'C', "broadcast", "#d7a3ff"},
    {'D', "reduce", "#e3ba22"},         {'H', "gather", "#75b8c8"},
    {'K', "scatter", "#e58429"},        {'|', "barrier", "#6e7781"},
};
enum { KINDS = sizeof kinds / sizeof *kinds, COMPUTE_KINDS = 4 };
static const char exposed_color[] = "#ff725c";

// "compute 83.0%, communication 33.3% in 9 calls, exposed 16.7%, idle 0.3% of 12.345 ms": mean over rows.
static char *shares_text(const Timeline *row, int rows) {
    TimelineShares sum = {0};
    double seconds = 0, calls = 0;
    for (int r = 0; r < rows; r++) {
        TimelineShares shares = timeline_shares(&row[r]);
        sum.compute += shares.compute;
        sum.communication += shares.communication;
        sum.exposed += shares.exposed;
        sum.idle += shares.idle;
        seconds += row[r].seconds;
        for (int line = 0; line < COMM_LINES; line++)
            calls += (double)row[r].communication_count[line] / rows;
    }
    double percent = seconds > 0 ? 100 / seconds : 0;
    return format_text(
        "compute %.1f%%, communication %.1f%% in %.4g calls, exposed %.1f%%, idle %.1f%% of %.3f ms",
        percent * sum.compute, percent * sum.communication, calls, percent * sum.exposed,
        percent * sum.idle, 1e3 * seconds / rows);
}

// ---- what both pictures share ----

static double longest(const Timeline *row, int rows) {
    double seconds = 0;
    for (int r = 0; r < rows; r++) seconds = fmax(seconds, row[r].seconds);
    return seconds;
}

// The axis is marked at round numbers of a unit, at most `most` of them.
typedef struct Axis {
    double tick;  // seconds
    double unit;
    const char *name;
} Axis;

static Axis axis_of(double seconds, int most) {
    double power = pow(10, floor(log10(seconds / most))), part = seconds / most / power;
    Axis axis = {.tick = power * (part > 5 ? 10 : part > 2 ? 5 : part > 1 ? 2 : 1)};
    axis.unit = axis.tick >= 0.9999 ? 1 : axis.tick >= 0.9999e-3 ? 1e-3 : 1e-6;
    axis.name = axis.unit == 1 ? "s" : axis.unit == 1e-3 ? "ms" : "us";
    return axis;
}

static bool has_letter(const Timeline *row, int rows, char letter) {
    for (int r = 0; r < rows; r++) {
        for (int64_t i = 0; i < row[r].compute_count; i++)
            if (row[r].compute[i].letter == letter) return true;
        for (int line = 0; line < COMM_LINES; line++)
            for (int64_t i = 0; i < row[r].communication_count[line]; i++)
                if (row[r].communication[line][i].letter == letter) return true;
    }
    return false;
}

// ---- the picture in letters ----

// The letter of most of the column's time; a small one if the stream is busy for less than half of it.
static char column_letter(const Span *span, int64_t count, int64_t *at, double from, double to) {
    double seconds[128] = {0}, busy = 0;
    int best = 0;
    while (*at < count && span[*at].end <= from) ++*at;
    for (int64_t i = *at; i < count && span[i].begin < to; i++) {
        double part = fmin(span[i].end, to) - fmax(span[i].begin, from);
        int letter = span[i].letter & 127;
        seconds[letter] += part;
        busy += part;
        if (seconds[letter] > seconds[best]) best = letter;
    }
    if (!(busy > 1e-6 * (to - from))) return '.';
    bool small = busy < 0.5 * (to - from) && best >= 'A' && best <= 'Z';
    return (char)(small ? best - 'A' + 'a' : best);
}

static void print_stream(FILE *out, const char *title, const char *name, const Span *span, int64_t count,
                         double step, double column) {
    int64_t at = 0;
    fprintf(out, "%-10.10s %-8s", title, name);
    for (int c = 0; c * column < step * (1 - 1e-12); c++)
        putc(column_letter(span, count, &at, c * column, (c + 1) * column), out);
    putc('\n', out);
}

static void print_axis(FILE *out, double seconds, int columns) {
    Axis axis = axis_of(seconds, columns / 10 + 1);
    fprintf(out, "%-10s %-8s", "", axis.name);
    int at = 0;
    for (int i = 0; i * axis.tick < seconds; i++) {
        int column = (int)lround(i * axis.tick / seconds * columns);
        at += fprintf(out, "%*s|%.4g", column - at, "", i * axis.tick / axis.unit);
    }
    putc('\n', out);
}

char *timeline_text(const Timeline *row, int rows, int width) {
    enum { BEFORE = 19, NARROWEST = 20 };
    char *text;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    CHECK(out, "out of host memory for a time line");
    int columns = width > BEFORE + NARROWEST ? width - BEFORE : NARROWEST;
    double seconds = longest(row, rows);
    for (int r = 0; r < rows && seconds > 0; r++) {
        int64_t count;
        Span *compute = timeline_compute(&row[r], &count);
        print_stream(out, row[r].title, "compute", compute, count, row[r].seconds, seconds / columns);
        for (int line = 0; line < COMM_LINES; line++)
            if (row[r].communication_count[line])
                print_stream(out, "", line_name((Line)line), row[r].communication[line],
                             row[r].communication_count[line], row[r].seconds, seconds / columns);
        free(compute);
    }
    if (seconds > 0) print_axis(out, seconds, columns);
    for (int k = 0; k < KINDS; k++)
        if (has_letter(row, rows, kinds[k].letter))
            fprintf(out, "%c %s, ", kinds[k].letter, kinds[k].meaning);
    fprintf(out, "- exposed wait, . idle; small letters: in part\n");
    bool ranks = rows > 1 && !strcmp(row[0].title, "rank 0");  // of which the mean says enough
    for (int r = 0; r < (ranks ? 1 : rows); r++) {
        char *shares = shares_text(&row[r], ranks ? rows : 1);
        fprintf(out, "%-10.10s %s\n", ranks ? "all ranks" : row[r].title, shares);
        free(shares);
    }
    fclose(out);
    return text;
}

// ---- the picture as SVG ----

enum { WIDTH = 960, LEFT = 68, RIGHT = 16, TOP = 72, ROW = 76, COMPUTE = 22, NETWORK = 13, BOTTOM = 28 };
static const int plot_width = WIDTH - LEFT - RIGHT;

// All spans of one letter as one path; a white edge parts those that are wide enough for it, and those
// that are not grow together.
static void draw_letter(FILE *svg, char letter, const char *fill, const Span *span, int64_t count,
                        double seconds, int y, int height) {
    const double gap = 0.5;
    double from = 0, to = -1;
    bool any = false;
    for (int64_t i = 0; i <= count; i++) {
        if (i < count && span[i].letter != letter) continue;
        double x = i < count ? LEFT + plot_width * span[i].begin / seconds : INFINITY;
        double end = i < count ? LEFT + plot_width * span[i].end / seconds : INFINITY;
        if (to >= 0 && x - to < 0.05 && end - from < 2) {
            to = end;
            continue;
        }
        if (to >= 0) {
            if (!any) fprintf(svg, "<path fill='%s' d='", fill);
            any = true;
            double width = to - from - (to - from > 2 ? gap : 0);
            fprintf(svg, "M%.1f %dh%.1fv%dh-%.1fz", from, y, fmax(width, 0.1), height, fmax(width, 0.1));
        }
        from = x, to = end;
    }
    if (any) fprintf(svg, "'/>\n");
}

// How far the next row's top is below this one's.
static int row_height(const Timeline *t) {
    int lines = 0;
    for (int line = 0; line < COMM_LINES; line++) lines += t->communication_count[line] > 0;
    return ROW + (lines > 1 ? lines - 1 : 0) * (NETWORK + 2);
}

static void draw_row(FILE *svg, const Timeline *t, double seconds, int y) {
    int64_t count;
    Span *compute = timeline_compute(t, &count);
    char *shares = shares_text(t, 1);
    fprintf(svg, "<text x='%d' y='%d'><tspan class='name'>%s</tspan><tspan dx='8'>%s</tspan></text>\n",
            LEFT, y - 6, t->title, shares);
    for (int k = 0; k < COMPUTE_KINDS; k++)
        draw_letter(svg, kinds[k].letter, kinds[k].color, compute, count, seconds, y, COMPUTE);
    draw_letter(svg, '-', "url(#wait)", compute, count, seconds, y, COMPUTE);
    fprintf(svg, "<text class='small' x='%d' y='%d' text-anchor='end'>compute</text>\n", LEFT - 6, y + 15);
    int top = y + COMPUTE + 2;
    for (int line = 0; line < COMM_LINES; line++) {
        if (!t->communication_count[line]) continue;
        for (int k = COMPUTE_KINDS; k < KINDS; k++)
            draw_letter(svg, kinds[k].letter, kinds[k].color, t->communication[line],
                        t->communication_count[line], seconds, top, NETWORK);
        fprintf(svg, "<text class='small' x='%d' y='%d' text-anchor='end'>%s</text>\n", LEFT - 6, top + 10,
                line_name((Line)line));
        top += NETWORK + 2;
    }
    free(shares);
    free(compute);
}

static void draw_axis(FILE *svg, double seconds, int top, int bottom) {
    Axis axis = axis_of(seconds, 10);
    for (int i = 0; i * axis.tick <= seconds; i++) {
        double x = LEFT + plot_width * (i * axis.tick / seconds);
        fprintf(svg, "<path class='grid' d='M%.1f %dV%d'/>\n", x, top, bottom);
        fprintf(svg, "<text x='%.1f' y='%d' text-anchor='middle'>%.4g%s%s</text>\n", x, bottom + 16,
                i * axis.tick / axis.unit, i ? "" : " ", i ? "" : axis.name);
    }
}

// In 15 pixels, or in fewer where the title would leave the frame: a bold letter is 0.7 of them wide or
// less.
static void draw_title(FILE *svg, const char *title) {
    fprintf(svg, "<text class='title' x='%d' y='22' style='font-size:%.1fpx'>%s</text>\n", LEFT,
            fmin(15, plot_width / (0.7 * (double)strlen(title))), title);
}

// Returns by how much its further lines push down what follows. Without a file it draws nothing.
static int draw_legend(FILE *svg, const Timeline *row, int rows, const char *title) {
    if (svg) draw_title(svg, title);
    int x = LEFT, down = 0;
    for (int k = 0; k <= KINDS; k++) {
        if (k < KINDS && !has_letter(row, rows, kinds[k].letter)) continue;
        const char *name = k < KINDS ? kinds[k].meaning : "exposed: compute waits for the network";
        int length = (int)strlen(name);
        if (x + 18 + 13 * length / 2 > WIDTH) x = LEFT, down += 20;  // a letter is 6.5 wide or less
        if (svg) {
            fprintf(svg, "<rect fill='%s' x='%d' y='%d' width='12' height='12' rx='2'/>\n",
                    k < KINDS ? kinds[k].color : "url(#wait)", x, 36 + down);
            fprintf(svg, "<text x='%d' y='%d'>%s</text>\n", x + 18, 46 + down, name);
        }
        x += 42 + 6 * length;
    }
    return down;
}

// The spans' colours suit a light and a dark page; those of text and lines change with it.
static const char style[] =
    "text{fill:#3d444d}.title{font-weight:600}.name{font-weight:600}.small{font-size:10px}\n"
    ".grid{stroke:#8b949e;stroke-opacity:.35}\n"
    "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}}\n";

void timeline_svg(const Timeline *row, int rows, const char *title, const char *file) {
    double seconds = longest(row, rows);
    int top = TOP + draw_legend(NULL, row, rows, title);
    int height = top - (ROW - COMPUTE - NETWORK - 8) + BOTTOM;
    for (int r = 0; r < rows; r++) height += row_height(&row[r]);
    FILE *svg = output_open("--timeline-svg", file);
    fprintf(svg, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %d %d' width='%d' height='%d' ",
            WIDTH, height, WIDTH, height);
    fprintf(svg,
            "font-family='system-ui,Helvetica,Arial,sans-serif' font-size='12'>\n<style>\n%s</style>\n"
            "<pattern id='wait' width='5' height='5' patternUnits='userSpaceOnUse' "
            "patternTransform='rotate(45)'><rect width='5' height='5' fill='%s' opacity='.25'/>"
            "<rect width='2' height='5' fill='%s'/></pattern>\n",
            style, exposed_color, exposed_color);
    draw_legend(svg, row, rows, title);
    if (seconds > 0) draw_axis(svg, seconds, top, height - BOTTOM);
    for (int r = 0, y = top + 4; r < rows && seconds > 0; y += row_height(&row[r++]))
        draw_row(svg, &row[r], seconds, y);
    fprintf(svg, "</svg>\n");
    output_close(svg, "--timeline-svg", file);
}
