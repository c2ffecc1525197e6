// five_d_picture.c: the playbook's overview as a picture: rows are methods, columns are lengths of
// sequences; in each cell three bars, without recomputation, selective, full. Playbook: "5D parallelism in
// a nutshell".
//
//                 1k      2k      …     128k
//     DP          ===|==  ===|===       ===|========>      | what a device has; > the bar goes on
//     ZeRO-1      ==      ===           ===|=====>
//
// This file has no main: five_d_methods draws it.
#include "five_d_picture.h"

#include <math.h>

#include "report/svg.h"

static const char *const kind_name[PICTURE_KINDS] = {"weights", "gradients", "optimizer state",
                                                     "activations"};
static const char *const color[PICTURE_KINDS] = {"#4269d0", "#efb118", "#ff725c", "#6cc5b0"};
static const char *const level_name[PICTURE_LEVELS] = {"none", "selective", "full"};

enum { LEFT = 184, TOP = 84, CELL = 108, BAR = 12, ROW = 50, BARS = 64, BOTTOM = 34 };
static const double SHOWN = 2;  // a cell's width is twice a device's memory

static void draw_bar(FILE *svg, const Need *need, double x, double y, double room) {
    double at = 0, end = SHOWN * room;
    for (int kind = 0; kind < PICTURE_KINDS; kind++) {
        double next = fmin(at + need->bytes[kind], end);
        if (next > at)
            fprintf(svg, "<rect fill='%s' x='%.1f' y='%.1f' width='%.1f' height='%d'/>\n", color[kind],
                    x + BARS * at / end, y, BARS * (next - at) / end, BAR - 2);
        at = next;
    }
    double sum = need_sum(need);
    fprintf(svg, "<text class='%s' x='%.1f' y='%.1f'>%s</text>\n", sum <= room ? "fits" : "over",
            x + BARS * fmin(sum, end) / end + 3, y + 9, bytes_text(sum));
}

static void draw_heading(FILE *svg, const Machine *machine, int width) {
    fprintf(svg,
            "<text class='title' x='10' y='22'>Llama 3 8B in bf16, 8 sequences on 8 ranks: the most that "
            "a rank holds; bars: recomputation %s, %s, %s</text>\n",
            level_name[0], level_name[1], level_name[2]);
    for (int kind = 0; kind < PICTURE_KINDS; kind++) {
        int x = LEFT + kind * 140;
        fprintf(svg, "<rect fill='%s' x='%d' y='37' width='12' height='12' rx='2'/>\n", color[kind], x);
        fprintf(svg, "<text x='%d' y='47'>%s</text>\n", x + 18, kind_name[kind]);
    }
    fprintf(svg, "<text x='%d' y='47' text-anchor='end'>dashed: what %s has, %s</text>\n", width - 10,
            machine->device, bytes_text(machine->memory_bytes));
    for (int length = 0; length < PICTURE_LENGTHS; length++)
        fprintf(svg, "<text class='name' x='%d' y='%d'>%dk tokens</text>\n", LEFT + length * CELL, TOP - 12,
                1 << length);
}

void five_d_picture(const char *flag, const char *file, const char *const *method,
                    Need (*need)[PICTURE_LENGTHS][PICTURE_LEVELS], int methods, const Machine *machine) {
    int width = LEFT + PICTURE_LENGTHS * CELL, height = TOP + methods * ROW + BOTTOM;
    FILE *svg = svg_open(flag, file, width, height);
    fprintf(svg,
            "<style>\ntext{fill:#3d444d}.title{font-weight:600;font-size:14px}.name{font-weight:600}"
            ".fits{font-size:9px;font-weight:600}.over{font-size:9px;fill:#8b949e}"
            ".level{stroke:#3d444d;stroke-dasharray:4 3}\n"
            "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}.over{fill:#8b949e}"
            ".level{stroke:#d1d7e0}}\n</style>\n");
    draw_heading(svg, machine, width);
    for (int i = 0; i < methods; i++) {
        int y = TOP + i * ROW;
        fprintf(svg, "<text class='name' x='%d' y='%d' text-anchor='end'>%s</text>\n", LEFT - 10, y + 22,
                method[i]);
        for (int length = 0; length < PICTURE_LENGTHS; length++)
            for (int level = 0; level < PICTURE_LEVELS; level++)
                draw_bar(svg, &need[i][length][level], LEFT + length * CELL, y + level * BAR,
                         machine->memory_bytes);
    }
    for (int length = 0; length < PICTURE_LENGTHS; length++)
        fprintf(svg, "<path class='level' d='M%.1f %dV%d'/>\n", LEFT + length * CELL + BARS / SHOWN,
                TOP - 4, TOP + methods * ROW - 8);
    svg_close(svg, flag, file);
}
