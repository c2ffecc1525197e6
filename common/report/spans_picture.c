// spans_picture.c: see spans_picture.h.
#include "spans_picture.h"

#include <math.h>
#include <string.h>

#include "svg.h"

enum { WIDTH = 960, LEFT = 68, RIGHT = 16, TOP = 72, ABOVE = 28, BELOW = 11, LOWEST = 76, BOTTOM = 28 };
enum { GAP = 2, LETTER = 6, NOTE = 18 };  // between lines; a small letter's width, or less; a note's height

// Where times lie: `left` and `width` of the plot, in pixels.
typedef struct Plot {
    FILE *svg;
    int left, width;
    double length;
} Plot;

SpansAxis spans_axis(double length, const char *unit, int most) {
    double power = pow(10, floor(log10(length / most))), part = length / most / power;
    SpansAxis axis = {.tick = power * (part > 5 ? 10 : part > 2 ? 5 : part > 1 ? 2 : 1), 1, unit};
    if (unit) return axis;
    axis.unit = axis.tick >= 0.9999 ? 1 : axis.tick >= 0.9999e-3 ? 1e-3 : 1e-6;
    axis.name = axis.unit == 1 ? "s" : axis.unit == 1e-3 ? "ms" : "us";
    return axis;
}

// All spans of one letter as one path; a white edge parts those that are wide enough for it, and those
// that are not grow together.
static void draw_kind(const Plot *plot, const SpanKind *kind, const SpanLine *line, int y) {
    const double gap = 0.5;
    double from = 0, to = -1;
    bool any = false;
    for (int64_t i = 0; i <= line->count; i++) {
        const Span *span = &line->span[i];
        if (i < line->count && span->letter != kind->letter) continue;
        double x = i < line->count ? plot->left + plot->width * span->begin / plot->length : INFINITY;
        double end = i < line->count ? plot->left + plot->width * span->end / plot->length : INFINITY;
        if (to >= 0 && x - to < 0.05 && end - from < 2) {
            to = end;
            continue;
        }
        if (to >= 0) {
            if (!any) fprintf(plot->svg, "<path fill='%s' d='", kind->color);
            any = true;
            double width = fmax(to - from - (to - from > 2 ? gap : 0), 0.1);
            fprintf(plot->svg, "M%.1f %dh%.1fv%dh-%.1fz", from, y, width, line->height, width);
        }
        from = x, to = end;
    }
    if (any) fprintf(plot->svg, "'/>\n");
}

// How far the next row's top is below this one's.
static int row_height(const SpanRow *row) {
    int height = ABOVE + BELOW - GAP;
    for (int i = 0; i < row->lines; i++) height += row->line[i].height + GAP;
    return height > LOWEST ? height : LOWEST;
}

static void draw_row(const Plot *plot, const SpansPicture *p, const SpanRow *row, int y) {
    fprintf(plot->svg,
            "<text x='%d' y='%d'><tspan class='name'>%s</tspan><tspan dx='8'>%s</tspan></text>\n",
            plot->left, y - 6, row->title, row->note);
    for (const SpanLine *line = row->line; line < row->line + row->lines; line++) {
        for (int k = 0; k < p->kinds; k++) draw_kind(plot, &p->kind[k], line, y);
        fprintf(plot->svg, "<text class='small' x='%d' y='%d' text-anchor='end'>%s</text>\n",
                plot->left - 6, y + line->height / 2 + 4, line->name);
        y += line->height + GAP;
    }
}

static void draw_axis(const Plot *plot, const char *unit, int top, int bottom) {
    SpansAxis axis = spans_axis(plot->length, unit, 10);
    for (int i = 0; i * axis.tick <= plot->length; i++) {
        double x = plot->left + plot->width * (i * axis.tick / plot->length);
        fprintf(plot->svg, "<path class='grid' d='M%.1f %dV%d'/>\n", x, top, bottom);
        fprintf(plot->svg, "<text x='%.1f' y='%d' text-anchor='middle'>%.4g%s%s</text>\n", x, bottom + 16,
                i * axis.tick / axis.unit, i ? "" : " ", i ? "" : axis.name);
    }
}

// Returns by how much its further lines push down what follows. Without a file it draws nothing.
static int draw_legend(const Plot *plot, const SpansPicture *p) {
    int x = plot->left, down = 0;
    for (int k = 0; k < p->kinds; k++) {
        const char *name = p->kind[k].meaning;
        int length = (int)strlen(name);
        if (x + 18 + 13 * length / 2 > WIDTH) x = plot->left, down += 20;  // a letter is 6.5 wide or less
        if (plot->svg) {
            fprintf(plot->svg, "<rect fill='%s' x='%d' y='%d' width='12' height='12' rx='2'/>\n",
                    p->kind[k].color, x, 36 + down);
            fprintf(plot->svg, "<text x='%d' y='%d'>%s</text>\n", x + 18, 46 + down, name);
        }
        x += 42 + 6 * length;
    }
    return down;
}

// The lines' names stand before the plot.
static int widest_name(const SpansPicture *p) {
    size_t letters = 0;
    for (int r = 0; r < p->rows; r++)
        for (int i = 0; i < p->row[r].lines; i++)
            if (strlen(p->row[r].line[i].name) > letters) letters = strlen(p->row[r].line[i].name);
    return (int)letters * LETTER;
}

// The spans' colours suit a light and a dark page; those of text and lines change with it.
static const char style[] =
    "text{fill:#3d444d}.title{font-weight:600}.name{font-weight:600}.small{font-size:10px}\n"
    ".grid{stroke:#8b949e;stroke-opacity:.35}\n"
    "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}}\n";

void spans_svg(const SpansPicture *p, const char *flag, const char *file) {
    Plot plot = {NULL, LEFT, 0, p->length};
    if (widest_name(p) + 12 > LEFT) plot.left = widest_name(p) + 12;
    plot.width = WIDTH - plot.left - RIGHT;
    int top = TOP + draw_legend(&plot, p), bottom = top - (ABOVE + BELOW - 6);
    for (int r = 0; r < p->rows; r++) bottom += row_height(&p->row[r]);
    const int height = bottom + BOTTOM + (p->note ? NOTE : 0);
    FILE *svg = plot.svg = svg_open(flag, file, WIDTH, height);
    fprintf(svg, "<style>\n%s</style>\n%s", style, p->definitions);
    svg_title(svg, plot.left, plot.width, p->title);
    draw_legend(&plot, p);
    if (p->length > 0) draw_axis(&plot, p->unit, top, bottom);
    for (int r = 0, y = top + 4; r < p->rows && p->length > 0; y += row_height(&p->row[r++]))
        draw_row(&plot, p, &p->row[r], y);
    if (p->note)
        fprintf(svg, "<text x='%d' y='%d' text-anchor='end'>%s</text>\n", WIDTH - RIGHT, height - 8,
                p->note);
    svg_close(svg, flag, file);
}
