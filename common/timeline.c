// timeline.c: see timeline.h. The clock's events of one step become spans on two streams. Whatever the compute
// stream does not fill, it stood still for: on the model clock it moves by operations and by waits alone.
#include "timeline.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"

typedef struct Kind {
    char letter;
    const char *event;  // name of a mark, or of a communication
    const char *meaning, *color;
} Kind;

// The first four are compute. Small letters are free: in a picture of letters they stand for "in part".
static const Kind kinds[] = {
    {'F', "forward", "forward", "#6cc5b0"},
    {'B', "backward", "backward", "#4269d0"},
    {'S', "optimizer", "optimizer step", "#a463f2"},
    {'+', "", "other operations", "#9498a0"},
    {'A', "all_reduce", "all-reduce", "#efb118"},
    {'R', "reduce_scatter", "reduce-scatter", "#ff8ab7"},
    {'G', "all_gather", "all-gather", "#97bbf5"},
    {'T', "transfers", "send, receive", "#3ca951"},
    {'X', "all_to_all", "all-to-all", "#9c6b4e"},
    {'C', "broadcast", "broadcast", "#d7a3ff"},
    {'D', "reduce", "reduce", "#e3ba22"},
    {'H', "gather", "gather", "#75b8c8"},
    {'K', "scatter", "scatter", "#e58429"},
    {'|', "barrier", "barrier", "#6e7781"},
};
enum { KINDS = sizeof kinds / sizeof *kinds, COMPUTE_KINDS = 4, OTHER = 3 };
static const char exposed_color[] = "#ff725c";

static struct {
    bool on;
    Timeline *row;
    int rows;
    char *title;
} state;

// ---- from events to spans ----

static void add_span(Span **spans, int64_t *count, Span span, bool merge) {
    if (!(span.end > span.begin)) return;
    Span *last = *count ? &(*spans)[*count - 1] : NULL;
    if (merge && last && last->letter == span.letter && last->end == span.begin) {
        last->end = span.end;
        return;
    }
    if ((*count & (*count - 1)) == 0) {  // room grows at the powers of two
        *spans = realloc(*spans, sizeof span * (size_t)(*count ? 2 * *count : 1));
        CHECK(*spans, "out of host memory for a time line");
    }
    (*spans)[(*count)++] = span;
}

static bool is_step(const char *name) { return !strncmp(name, "step", 4) && (!name[4] || name[4] == ' '); }

// Finds the step that closed last; returns false if there is none.
static bool find_step(bool outermost, int64_t *first, int64_t *last) {
    const Event *event;
    int64_t count = clock_events(&event), open[64];
    int depth = 0;
    bool found = false;
    for (int64_t i = 0; i < count; i++) {
        if (event[i].kind == EVENT_PUSH && depth < 64) open[depth++] = i;
        if (event[i].kind != EVENT_POP || depth == 0) continue;
        int64_t push = open[--depth];
        if (!is_step(event[push].name) || (outermost && depth > 0)) continue;
        *first = push, *last = i;
        found = true;
    }
    return found;
}

// Requests are told in the order in which they were waited for, and ran in the order of their start.
static int by_begin(const void *a, const void *b) {
    const Span *x = a, *y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

Timeline timeline_of_step(bool outermost, const char *title) {
    Timeline t = {0};
    const Event *event;
    int64_t count = clock_events(&event), first, last;
    if (!find_step(outermost, &first, &last)) return t;
    double begin = event[first].model;
    t.title = format_text("%s", title);
    t.seconds = event[last].model - begin;
    char letter[64] = {kinds[OTHER].letter};  // by depth: a mark without a letter has its parent's
    int depth = 0;
    for (int64_t i = first + 1; i < count; i++) {
        const Event *e = &event[i];
        Span span = {e->model - begin, e->model_end - begin, letter[depth]};
        if (e->kind == EVENT_COMMUNICATION) {
            for (int k = COMPUTE_KINDS; k < KINDS; k++)
                if (!strcmp(kinds[k].event, e->name)) span.letter = kinds[k].letter;
            // One that began before the step or ends after it counts for its part in it.
            span.begin = fmax(span.begin, 0), span.end = fmin(span.end, t.seconds);
            add_span(&t.communication, &t.communication_count, span, false);
        } else if (i < last && e->kind == EVENT_OPERATION) {
            add_span(&t.compute, &t.compute_count, span, true);
        } else if (i < last && e->kind == EVENT_PUSH) {
            letter[depth + 1] = letter[depth];
            depth++;
            for (int k = 0; k < OTHER; k++)
                if (!strcmp(kinds[k].event, e->name)) letter[depth] = kinds[k].letter;
        } else if (i < last) {
            depth--;
        }
    }
    qsort(t.communication, (size_t)t.communication_count, sizeof(Span), by_begin);
    return t;
}

void timeline_free(Timeline *t) {
    free(t->title);
    free(t->compute);
    free(t->communication);
    *t = (Timeline){0};
}

// ---- where the seconds go ----

// Adds what is left between two operations: "-" where communication runs, nothing where none does. *at is
// the first communication that may reach so far; calls go forward in time.
static void add_waits(const Timeline *t, int64_t *at, double from, double to, Span **spans,
                      int64_t *count) {
    while (*at < t->communication_count && t->communication[*at].end <= from) ++*at;
    for (int64_t i = *at; i < t->communication_count && t->communication[i].begin < to; i++)
        add_span(spans, count,
                 (Span){fmax(t->communication[i].begin, from), fmin(t->communication[i].end, to), '-'},
                 true);
}

// The compute stream with its exposed waits between the operations. The caller frees it.
static Span *with_waits(const Timeline *t, int64_t *count) {
    Span *spans = NULL;
    int64_t at = 0;
    double before = 0;
    *count = 0;
    for (int64_t i = 0; i <= t->compute_count; i++) {
        bool end = i == t->compute_count;
        add_waits(t, &at, before, end ? t->seconds : t->compute[i].begin, &spans, count);
        if (end) break;
        add_span(&spans, count, t->compute[i], false);
        before = t->compute[i].end;
    }
    return spans;
}

static double sum_of(const Span *spans, int64_t count, bool waits) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        if ((spans[i].letter == '-') == waits) sum += spans[i].end - spans[i].begin;
    return sum;
}

TimelineShares timeline_shares(const Timeline *t) {
    int64_t count;
    Span *spans = with_waits(t, &count);
    TimelineShares shares = {.compute = sum_of(spans, count, false),
                             .communication = sum_of(t->communication, t->communication_count, false),
                             .exposed = sum_of(spans, count, true)};
    shares.idle = fmax(t->seconds - shares.compute - shares.exposed, 0);
    free(spans);
    return shares;
}

// "compute 83.0%, communication 33.3% in 9 calls, exposed 16.7%, idle 0.3% of 12.345 ms": the mean over rows.
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
        calls += (double)row[r].communication_count / rows;
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
        for (int64_t i = 0; i < row[r].communication_count; i++)
            if (row[r].communication[i].letter == letter) return true;
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
        Span *compute = with_waits(&row[r], &count);
        print_stream(out, row[r].title, "compute", compute, count, row[r].seconds, seconds / columns);
        print_stream(out, "", "network", row[r].communication, row[r].communication_count, row[r].seconds,
                     seconds / columns);
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

static void draw_row(FILE *svg, const Timeline *t, double seconds, int y) {
    int64_t count;
    Span *compute = with_waits(t, &count);
    char *shares = shares_text(t, 1);
    fprintf(svg, "<text x='%d' y='%d'><tspan class='name'>%s</tspan><tspan dx='8'>%s</tspan></text>\n",
            LEFT, y - 6, t->title, shares);
    for (int k = 0; k < COMPUTE_KINDS; k++)
        draw_letter(svg, kinds[k].letter, kinds[k].color, compute, count, seconds, y, COMPUTE);
    draw_letter(svg, '-', "url(#wait)", compute, count, seconds, y, COMPUTE);
    for (int k = COMPUTE_KINDS; k < KINDS; k++)
        draw_letter(svg, kinds[k].letter, kinds[k].color, t->communication, t->communication_count, seconds,
                    y + COMPUTE + 2, NETWORK);
    fprintf(svg, "<text class='small' x='%d' y='%d' text-anchor='end'>compute</text>\n", LEFT - 6, y + 15);
    fprintf(svg, "<text class='small' x='%d' y='%d' text-anchor='end'>network</text>\n", LEFT - 6,
            y + COMPUTE + 12);
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

static void draw_legend(FILE *svg, const Timeline *row, int rows, const char *title) {
    fprintf(svg, "<text class='title' x='%d' y='22'>%s</text>\n", LEFT, title);
    int x = LEFT;
    for (int k = 0; k <= KINDS; k++) {
        if (k < KINDS && !has_letter(row, rows, kinds[k].letter)) continue;
        const char *name = k < KINDS ? kinds[k].meaning : "exposed: compute waits for the network";
        fprintf(svg, "<rect fill='%s' x='%d' y='36' width='12' height='12' rx='2'/>\n",
                k < KINDS ? kinds[k].color : "url(#wait)", x);
        fprintf(svg, "<text x='%d' y='46'>%s</text>\n", x + 18, name);
        x += 42 + 6 * (int)strlen(name);
    }
}

// The spans' colours suit a light and a dark page; those of text and lines change with it.
static const char style[] =
    "text{fill:#3d444d}.title{font-size:15px;font-weight:600}.name{font-weight:600}.small{font-size:10px}\n"
    ".grid{stroke:#8b949e;stroke-opacity:.35}\n"
    "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}}\n";

void timeline_svg(const Timeline *row, int rows, const char *title, const char *file) {
    double seconds = longest(row, rows);
    int height = TOP + ROW * rows - (ROW - COMPUTE - NETWORK - 8) + BOTTOM;
    FILE *svg = fopen(file, "w");
    CHECK(svg, "--timeline-svg %s cannot be written: %s", file, strerror(errno));
    fprintf(svg, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %d %d' width='%d' height='%d' ",
            WIDTH, height, WIDTH, height);
    fprintf(svg,
            "font-family='system-ui,Helvetica,Arial,sans-serif' font-size='12'>\n<style>\n%s</style>\n"
            "<pattern id='wait' width='5' height='5' patternUnits='userSpaceOnUse' "
            "patternTransform='rotate(45)'><rect width='5' height='5' fill='%s' opacity='.25'/>"
            "<rect width='2' height='5' fill='%s'/></pattern>\n",
            style, exposed_color, exposed_color);
    draw_legend(svg, row, rows, title);
    if (seconds > 0) draw_axis(svg, seconds, TOP, height - BOTTOM);
    for (int r = 0; r < rows && seconds > 0; r++) draw_row(svg, &row[r], seconds, TOP + 4 + ROW * r);
    fprintf(svg, "</svg>\n");
    bool failed = ferror(svg) != 0;
    CHECK(fclose(svg) == 0 && !failed, "--timeline-svg %s could not be written whole", file);
}

// ---- many ranks ----

// Moves bytes from a rank to rank 0, which gets a copy of its own; the two call it, the others need not.
static void *bring(const void *mine, int64_t *bytes, int from, Group world) {
    if (from == 0) {
        char *copy = host_alloc((size_t)*bytes);
        memcpy(copy, mine, (size_t)*bytes);
        return copy;
    }
    bool receives = world.rank == 0;
    Tensor size = tensor_new(MEMORY_COMMUNICATION, F64, SHAPE(1));
    double number = (double)*bytes;
    if (!receives) tensor_from_doubles(size, &number);
    comm_now(receives ? comm_receive(size, from, world) : comm_send(size, 0, world));
    tensor_to_doubles(&number, size);
    *bytes = (int64_t)number;
    int64_t words = (*bytes + 3) / 4;
    Tensor data = tensor_new(MEMORY_COMMUNICATION, I32, SHAPE(words));
    char *host = host_alloc(4 * (size_t)words);
    if (!receives) {
        memcpy(host, mine, (size_t)*bytes);
        memset(host + *bytes, 0, (size_t)(4 * words - *bytes));
        tensor_from_host(data, host);
    }
    comm_now(receives ? comm_receive(data, from, world) : comm_send(data, 0, world));
    tensor_to_host(host, data);
    tensor_free(&size);
    tensor_free(&data);
    return host;
}

static void write_trace(const char *file, Group world) {
    if (world.rank > 0) {
        char *text;
        size_t size;
        FILE *out = open_memstream(&text, &size);
        CHECK(out, "out of host memory for the trace");
        clock_trace_part(out, world.rank, world.size);
        fclose(out);
        int64_t bytes = (int64_t)size;
        free(bring(text, &bytes, world.rank, world));
        free(text);
        return;
    }
    FILE *out = clock_trace_open(file);
    clock_trace_part(out, 0, world.size);
    for (int rank = 1; rank < world.size; rank++) {
        int64_t bytes = 0;
        char *text = bring(NULL, &bytes, rank, world);
        fputs(",\n", out);
        fwrite(text, 1, (size_t)bytes, out);
        free(text);
    }
    clock_trace_close(out, file);
}

// Rank 0 gets the last step of every rank as its rows.
static void gather_rows(Group world) {
    Timeline mine = timeline_of_step(true, "");
    if (!mine.title) mine = timeline_of_step(false, "");
    state.row = host_alloc(sizeof *state.row * (size_t)world.size);
    for (int rank = 0; rank < world.size; rank++) {
        if (world.rank != 0 && world.rank != rank) continue;
        double *seconds;
        int64_t compute = mine.compute_count * (int64_t)sizeof(Span), bytes = sizeof mine.seconds;
        int64_t communication = mine.communication_count * (int64_t)sizeof(Span);
        Timeline t = {.title = format_text("rank %d", rank)};
        seconds = bring(&mine.seconds, &bytes, rank, world);
        t.seconds = *seconds;
        t.compute = bring(mine.compute, &compute, rank, world);
        t.communication = bring(mine.communication, &communication, rank, world);
        t.compute_count = compute / (int64_t)sizeof(Span);
        t.communication_count = communication / (int64_t)sizeof(Span);
        free(seconds);
        if (world.rank == 0) state.row[state.rows++] = t;
        else timeline_free(&t);
    }
    timeline_free(&mine);
}

// ---- the options ----

static bool wanted(const Config *config) {
    return config->trace || config->timeline || config->timeline_svg;
}

void timeline_start(const Config *config, Group world) {
    state.on = wanted(config);
    if (!state.on) return;
    // From here on a second of one rank is the same second of every other.
    comm_now(comm_barrier(world));
    clock_trace_start();
}

void timeline_keep(const char *title) {
    if (!state.on) return;
    Timeline t = timeline_of_step(false, title);
    CHECK(t.title, "a time line begins with a step's mark, and there is none");
    state.row = realloc(state.row, sizeof *state.row * (size_t)(state.rows + 1));
    CHECK(state.row, "out of host memory for a time line");
    state.row[state.rows++] = t;
}

void timeline_title(const char *title) {
    free(state.title);
    state.title = format_text("%s", title);
}

static void show(const Config *config, Group world) {
    char *name = format_text("model %s, %d rank%s", config->model, world.size, world.size > 1 ? "s" : "");
    char *title = format_text("%s: one step on the model clock, %s", state.title ? state.title : name,
                              machine_find(config->machine)->device);
    if (config->timeline) {
        char *text = timeline_text(state.row, state.rows, terminal_columns());
        say("\n%s", title);
        say("%s", text);
        free(text);
    }
    if (config->timeline_svg) {
        timeline_svg(state.row, state.rows, title, config->timeline_svg);
        say("wrote %s", config->timeline_svg);
    }
    free(name);
    free(title);
}

void timeline_finish(const Config *config, Group world) {
    if (!state.on) return;
    state.on = false;
    bool dry = device_is_dry_run();
    device_dry_run(false);
    if (config->trace) write_trace(config->trace, world);
    if (config->timeline || config->timeline_svg) {
        if (!state.rows) gather_rows(world);
        if (world.rank == 0) show(config, world);
    }
    while (state.rows) timeline_free(&state.row[--state.rows]);
    free(state.row);
    free(state.title);
    state.row = NULL;
    state.title = NULL;
    device_dry_run(dry);
}
