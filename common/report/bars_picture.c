// bars_picture.c: see bars_picture.h.
#include "bars_picture.h"

#include <math.h>
#include <string.h>

#include "svg.h"

static const char *const kind_name[BAR_KINDS] = {"parameters", "gradients", "optimizer state",
                                                 "activations"};
static const char *const color[BAR_KINDS] = {"#4269d0", "#efb118", "#ff725c", "#6cc5b0"};

enum { WIDTH = 960, LEFT = 130, RIGHT = 230, TOP = 66, ROW = 34, THICK = 22, BOTTOM = 44 };
static const int plot_width = WIDTH - LEFT - RIGHT;

static double sum_of(const Bar *bar) {
    double sum = 0;
    for (int kind = 0; kind < BAR_KINDS; kind++) sum += bar->bytes[kind];
    return sum;
}

static void draw_legend(FILE *svg, const Bar *bar, int bars) {
    for (int kind = 0, x = LEFT; kind < BAR_KINDS; kind++) {
        bool used = false;
        for (int i = 0; i < bars; i++) used = used || bar[i].bytes[kind] > 0;
        if (!used) continue;
        fprintf(svg, "<rect fill='%s' x='%d' y='37' width='12' height='12' rx='2'/>\n", color[kind], x);
        fprintf(svg, "<text x='%d' y='47'>%s</text>\n", x + 18, kind_name[kind]);
        x += 140;
    }
}

static void draw_bar(FILE *svg, const Bar *bar, int row, double most) {
    double x = LEFT, y = TOP + row * ROW;
    fprintf(svg, "<text class='name' x='%d' y='%.0f' text-anchor='end'>%s</text>\n", LEFT - 10, y + 15,
            bar->name);
    for (int kind = 0; kind < BAR_KINDS; kind++) {
        double width = plot_width * bar->bytes[kind] / most;
        if (width > 0)
            fprintf(svg, "<rect fill='%s' x='%.1f' y='%.0f' width='%.1f' height='%d'/>\n", color[kind], x,
                    y, width, THICK);
        const char *bytes = bytes_text(bar->bytes[kind]);
        if (width > 7.0 * (double)strlen(bytes))  // where it fits
            fprintf(svg, "<text class='in' x='%.1f' y='%.0f' text-anchor='middle'>%s</text>\n",
                    x + width / 2, y + 15, bytes);
        x += width;
    }
    fprintf(svg, "<text x='%d' y='%.0f'><tspan class='name'>%s</tspan> %s</text>\n", WIDTH - RIGHT + 8,
            y + 15, bytes_text(sum_of(bar)), bar->note);
}

static void draw_level(FILE *svg, int bars, double bytes, double most, const char *device) {
    double x = LEFT + plot_width * bytes / most;
    int bottom = TOP + bars * ROW;
    fprintf(svg, "<path class='level' d='M%.1f %dV%d'/>\n", x, TOP - 8, bottom + 2);
    fprintf(svg, "<text x='%.1f' y='%d' text-anchor='middle'>%s has %s</text>\n", x, bottom + 18, device,
            bytes_text(bytes));
}

void bars_svg(const char *flag, const char *file, const char *title, const Bar *bar, int bars,
              const Machine *machine) {
    double most = 0;
    for (int i = 0; i < bars; i++) most = fmax(most, sum_of(&bar[i]));
    int height = TOP + bars * ROW + BOTTOM;
    FILE *svg = svg_open(flag, file, WIDTH, height);
    // Bars suit a light and a dark page; text and lines change with it.
    fprintf(svg,
            "<style>\ntext{fill:#3d444d}.title,.name{font-weight:600}.in{fill:#14181d;font-size:11px}\n"
            ".level{stroke:#3d444d;stroke-width:1.5;stroke-dasharray:6 4}\n"
            "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}.in{fill:#14181d}"
            ".level{stroke:#d1d7e0}}\n</style>\n");
    svg_title(svg, 10, WIDTH - 20, title);
    draw_legend(svg, bar, bars);
    for (int i = 0; i < bars; i++) draw_bar(svg, &bar[i], i, most);
    if (machine->memory_bytes <= most) draw_level(svg, bars, machine->memory_bytes, most, machine->device);
    svg_close(svg, flag, file);
}
