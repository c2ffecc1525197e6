// memory_picture.c: see memory_picture.h. A history is the account after each allocation and release, some
// thousand moments; a picture has some hundred columns. Time is that of the model clock, so that the same
// run gives the same picture on every machine, to the last byte.
#include "memory_picture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "svg.h"

// ---- history ----

static void note(void *context, MemoryKind kind, int64_t bytes, const void *memory) {
    (void)memory;
    MemoryHistory *history = context;
    if (history->count == history->room) {
        history->room = history->room ? 2 * history->room : 1024;
        history->moment = realloc(history->moment, sizeof(Moment) * (size_t)history->room);
        CHECK(history->moment, "out of host memory for the memory's history");
    }
    // The listener is told of changes: the account is what was held before and this one.
    Moment *moment = &history->moment[history->count];
    *moment = history->count ? moment[-1] : (Moment){0};
    moment->time = clock_total().model_seconds;
    moment->now[kind] += bytes;
    moment->total += bytes;
    history->count++;
}

void memory_history_start(MemoryHistory *history, int64_t steps) {
    *history = (MemoryHistory){.steps = steps};
    history->first = host_alloc(sizeof *history->first * (size_t)(steps + 1));
    history->time = host_alloc(sizeof *history->time * (size_t)(steps + 1));
    // What is held already is the first moment.
    Memory account = memory_account();
    for (int kind = 0; kind < MEMORY_KINDS; kind++)
        note(history, (MemoryKind)kind, account.now[kind], NULL);
    memory_listen(note, history);
}

void memory_history_step(MemoryHistory *history) {
    CHECK(history->begun <= history->steps, "more steps than the %lld of the memory's history",
          (long long)history->steps);
    // The last moment so far is what is held as the step begins, and as the one before it ends.
    history->first[history->begun] = history->count - 1;
    history->time[history->begun] = clock_total().model_seconds;
    if (history->begun++ == history->steps) memory_listen(NULL, NULL);
}

void memory_history_free(MemoryHistory *history) {
    free(history->moment);
    free(history->first);
    free(history->time);
    *history = (MemoryHistory){0};
}

static int64_t bytes_of(const Moment *moment, int kind) {
    return kind < MEMORY_KINDS ? moment->now[kind] : moment->total;
}

int64_t memory_history_peak(const MemoryHistory *history, int64_t step, int kind) {
    int64_t peak = 0;
    for (int64_t i = history->first[step]; i <= history->first[step + 1]; i++)
        if (bytes_of(&history->moment[i], kind) > peak) peak = bytes_of(&history->moment[i], kind);
    return peak;
}

static int64_t peak_of_all(const MemoryHistory *history, int kind) {
    int64_t peak = 0;
    for (int64_t step = 0; step < history->steps; step++) {
        int64_t bytes = memory_history_peak(history, step, kind);
        if (bytes > peak) peak = bytes;
    }
    return peak;
}

// Divides the history into `columns` equal parts of time, and returns the moment of the most bytes in each.
static Moment *in_columns(const MemoryHistory *history, int columns) {
    Moment *column = host_alloc(sizeof(Moment) * (size_t)columns);
    int64_t i = history->first[0], last = history->first[history->steps];
    double width = history->time[history->steps] / columns;
    for (int c = 0; c < columns; c++) {
        column[c] = history->moment[i];
        while (i < last && (history->moment[i + 1].time <= (c + 1) * width || c == columns - 1))
            if (history->moment[++i].total > column[c].total) column[c] = history->moment[i];
    }
    return column;
}

// ---- the picture as SVG ----

static const char *const color[MEMORY_KINDS] = {"#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#a463f2"};

enum { WIDTH = 960, HEIGHT = 440, LEFT = 76, RIGHT = 16, TOP = 76, BOTTOM = 64 };
static const int plot_width = WIDTH - LEFT - RIGHT, plot_height = HEIGHT - TOP - BOTTOM;

typedef struct Scale {
    double bytes, seconds;  // at the top and at the right
} Scale;

static double x_of(Scale scale, double seconds) { return LEFT + plot_width * seconds / scale.seconds; }
static double y_of(Scale scale, double bytes) { return TOP + plot_height * (1 - bytes / scale.bytes); }

// A round number of bytes that divides the axis into three to seven parts.
static double tick_of(double bytes) {
    double power = pow(10, floor(log10(bytes / 3)));
    double part = bytes / 3 / power;
    return power * (part >= 5 ? 5 : part >= 2 ? 2 : 1);
}

static void draw_axes(FILE *svg, const MemoryHistory *history, Scale scale) {
    double tick = tick_of(scale.bytes);
    for (double bytes = 0; bytes <= scale.bytes; bytes += tick) {
        double y = y_of(scale, bytes);
        fprintf(svg, "<path class='grid' d='M%d %.1fH%d'/>\n", LEFT, y, WIDTH - RIGHT);
        fprintf(svg, "<text x='%d' y='%.1f' text-anchor='end'>%s</text>\n", LEFT - 8, y + 4,
                bytes > 0 ? bytes_text(bytes) : "0");
    }
    for (int64_t step = 0; step <= history->steps; step++)
        fprintf(svg, "<path class='step' d='M%.1f %dV%d'/>\n", x_of(scale, history->time[step]), TOP - 6,
                HEIGHT - BOTTOM + 38);
}

// Stacked areas: each is drawn from its upper edge down to the axis, the highest first, so that the next
// covers what lies below it. A column that does not change costs nothing, which keeps the file small.
static void draw_areas(FILE *svg, const MemoryHistory *history, Scale scale) {
    Moment *column = in_columns(history, plot_width);
    for (int kind = MEMORY_KINDS - 1; kind >= 0; kind--) {
        double before = y_of(scale, 0);
        fprintf(svg, "<path fill='%s' d='M%d %.1f", color[kind], LEFT, before);
        for (int c = 0; c < plot_width; c++) {
            int64_t bytes = 0;
            for (int k = 0; k <= kind; k++) bytes += column[c].now[k];
            double y = y_of(scale, (double)bytes);
            if (fabs(y - before) >= 0.05) fprintf(svg, "H%dV%.1f", LEFT + c, y), before = y;
        }
        fprintf(svg, "H%dV%dZ'/>\n", WIDTH - RIGHT, HEIGHT - BOTTOM);
    }
    free(column);
}

// Returns where the next phase begins. A name is written where it fits.
static double draw_phase(FILE *svg, Scale scale, double from, double seconds, const char *name,
                         const char *shade) {
    double x = x_of(scale, from), width = plot_width * seconds / scale.seconds;
    int y = HEIGHT - BOTTOM + 5;
    fprintf(svg, "<rect class='phase' opacity='%s' x='%.1f' y='%d' width='%.1f' height='15'/>\n", shade, x,
            y, width);
    if (width > 5.6 * (double)strlen(name))
        fprintf(svg, "<text class='small' x='%.1f' y='%d' text-anchor='middle'>%s</text>\n", x + width / 2,
                y + 11, name);
    return from + seconds;
}

// On the model clock all micro-batches are alike, and all steps but for the first, whose optimizer also
// fills its new state. What comes before the first forward sets the gradients to zero.
static void draw_phases(FILE *svg, const MemoryHistory *history, Scale scale) {
    OpCount forward = clock_mark("step/forward"), backward = clock_mark("step/backward");
    double steps = (double)history->steps;
    double before = (clock_mark("step").model_seconds - clock_mark("step/optimizer").model_seconds -
                     forward.model_seconds - backward.model_seconds) /
                    steps;
    for (int64_t step = 0; step < history->steps; step++) {
        double begin = history->time[step], end = history->time[step + 1], at = begin + before;
        for (int64_t i = 0; i < forward.calls / history->steps; i++) {
            at =
                draw_phase(svg, scale, at, forward.model_seconds / (double)forward.calls, "forward", ".18");
            at = draw_phase(svg, scale, at, backward.model_seconds / (double)forward.calls, "backward",
                            ".32");
        }
        draw_phase(svg, scale, at, end - at, "optimizer", ".5");
        fprintf(svg, "<text x='%.1f' y='%d' text-anchor='middle'>step %lld</text>\n",
                (x_of(scale, begin) + x_of(scale, end)) / 2, HEIGHT - BOTTOM + 36, (long long)step + 1);
    }
}

// A line across the plot with its name at the right, on a plate that keeps it legible over any area.
static void draw_level(FILE *svg, Scale scale, double bytes, const char *dashes, const char *name) {
    const double y = y_of(scale, bytes), right = WIDTH - RIGHT;
    char *text = format_text("%s %s", name, bytes_text(bytes));
    double width = 6.6 * (double)strlen(text) + 10;
    fprintf(svg, "<path class='level' stroke-dasharray='%s' d='M%d %.1fH%.0f'/>\n", dashes, LEFT, y, right);
    fprintf(svg, "<rect class='plate' x='%.1f' y='%.1f' width='%.1f' height='16' rx='3'/>\n", right - width,
            y - 8, width);
    fprintf(svg, "<text class='name' x='%.1f' y='%.1f' text-anchor='middle'>%s</text>\n", right - width / 2,
            y + 4, text);
    free(text);
}

static void draw_legend(FILE *svg, const MemoryHistory *history, const char *title) {
    svg_title(svg, LEFT, plot_width, title);
    for (int kind = 0, x = LEFT; kind < MEMORY_KINDS; kind++) {
        int64_t peak = peak_of_all(history, kind);
        if (!peak) continue;
        fprintf(svg, "<rect fill='%s' x='%d' y='37' width='12' height='12' rx='2'/>\n", color[kind], x);
        char *text = format_text("%s %s", memory_kind_name((MemoryKind)kind), bytes_text((double)peak));
        fprintf(svg, "<text x='%d' y='47'>%s</text>\n", x + 18, text);
        x += 42 + 7 * (int)strlen(text);  // a letter is 6.5 wide or less
        free(text);
    }
}

// The areas' colours suit a light and a dark page; those of text and lines change with it.
static const char *const style =
    "text{fill:#3d444d}.title{font-weight:600}.small{font-size:10px}\n"
    ".grid,.step{stroke:#8b949e;stroke-opacity:.35}.step{stroke-dasharray:2 3;stroke-opacity:.9}\n"
    ".phase{fill:#8b949e}.level{stroke:#3d444d;stroke-width:1.5}.plate{fill:#3d444d}.name{fill:#fff}\n"
    "@media(prefers-color-scheme:dark){text,.plate{fill:#d1d7e0}.level{stroke:#d1d7e0}.name{fill:#0d1117}}"
    "\n";

void memory_history_svg(const MemoryHistory *history, const char *file, const char *title,
                        const Machine *machine) {
    double peak = (double)peak_of_all(history, MEMORY_KINDS);
    bool near = peak > machine->memory_bytes / 2;
    Scale scale = {.bytes = 1.1 * fmax(peak, near ? machine->memory_bytes : 0),
                   .seconds = history->time[history->steps]};
    FILE *svg = svg_open("--svg", file, WIDTH, HEIGHT);
    fprintf(svg, "<style>\n%s</style>\n", style);
    draw_legend(svg, history, title);
    draw_axes(svg, history, scale);
    draw_areas(svg, history, scale);
    draw_phases(svg, history, scale);
    draw_level(svg, scale, peak, "6 4", "peak");
    if (near) draw_level(svg, scale, machine->memory_bytes, "none", "the device has");
    fprintf(svg, "<text x='%d' y='%d' text-anchor='end'>model clock of one %s, %.4g ms a step</text>\n",
            WIDTH - RIGHT, HEIGHT - 8, machine->device, 1e3 * scale.seconds / (double)history->steps);
    svg_close(svg, "--svg", file);
}

// ---- the same as text ----

// Each column is the fullest moment of its time, each row a part of the bytes.
void memory_history_print(const MemoryHistory *history) {
    enum { COLUMNS = 92, ROWS = 14 };
    static const char letter[MEMORY_KINDS] = {'p', 'g', 'O', 'a', 'c'};
    double peak = (double)peak_of_all(history, MEMORY_KINDS);
    Moment *column = in_columns(history, COLUMNS);
    for (int row = ROWS; row > 0; row--) {
        char line[COLUMNS + 1] = "";
        for (int c = 0; c < COLUMNS; c++) {
            double level = (row - 0.5) / ROWS * peak, below = 0;
            int kind = 0;
            while (kind < MEMORY_KINDS && (below += (double)column[c].now[kind]) < level) kind++;
            line[c] = kind < MEMORY_KINDS ? letter[kind] : ' ';
        }
        say("%9s |%s", row == ROWS ? bytes_text(peak) : row == 1 ? "0" : "", line);
    }
    free(column);
}
