// timeline_picture.c: rows of timeline.c as text, and as an SVG.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "timeline.h"

static const SpanKind kinds[] = {
    {'F', "forward", "#6cc5b0"},        {'B', "backward", "#4269d0"},
    {'S', "optimizer step", "#a463f2"}, {'+', "other operations", "#9498a0"},
    {'A', "all-reduce", "#efb118"},     {'R', "reduce-scatter", "#ff8ab7"},
    {'G', "all-gather", "#97bbf5"},     {'T', "send, receive", "#3ca951"},
    {'X', "all-to-all", "#9c6b4e"},     {'C', "broadcast", "#d7a3ff"},
    {'D', "reduce", "#e3ba22"},         {'H', "gather", "#75b8c8"},
    {'K', "scatter", "#e58429"},        {'|', "barrier", "#6e7781"},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

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

// The letter that takes most of the column's time, in lower case if the stream is busy for less than half.
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
    SpansAxis axis = spans_axis(seconds, NULL, columns / 10 + 1);
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
    CHECK(fclose(out) == 0, "out of host memory for a time line");
    return text;
}

// ---- the picture as SVG ----

enum { COMPUTE = 22, NETWORK = 13 };  // pixels

static const SpanKind exposed = {'-', "exposed: compute waits for a message", "url(#wait)"};
static const char wait_pattern[] =
    "<pattern id='wait' width='5' height='5' patternUnits='userSpaceOnUse' "
    "patternTransform='rotate(45)'><rect width='5' height='5' fill='#ff725c' opacity='.25'/>"
    "<rect width='2' height='5' fill='#ff725c'/></pattern>\n";

// spans_row_free ends it.
static SpanRow spans_row(const Timeline *t) {
    SpanRow row = {.title = t->title, .note = shares_text(t, 1), .lines = 1};
    row.line[0] = (SpanLine){.name = "compute", .height = COMPUTE};
    row.line[0].span = timeline_compute(t, &row.line[0].count);
    for (int i = 0; i < COMM_LINES; i++) {
        if (!t->communication_count[i]) continue;
        SpanLine *line = &row.line[row.lines++];
        *line =
            (SpanLine){.span = t->communication[i], .count = t->communication_count[i], .height = NETWORK};
        snprintf(line->name, sizeof line->name, "%s", line_name((Line)i));
    }
    return row;
}

static void spans_row_free(SpanRow *row) {
    free((char *)row->note);
    free((Span *)row->line[0].span);
}

void timeline_svg(const Timeline *row, int rows, const char *title, const char *note, const char *file) {
    SpanKind used[KINDS + 1];
    SpanRow *drawn = malloc(sizeof *drawn * (size_t)(rows + 1));
    CHECK(drawn, "out of host memory for a time line");
    int count = 0;
    for (int k = 0; k < KINDS; k++)
        if (has_letter(row, rows, kinds[k].letter)) used[count++] = kinds[k];
    used[count++] = exposed;
    for (int r = 0; r < rows; r++) drawn[r] = spans_row(&row[r]);
    SpansPicture picture = {.title = title,
                            .note = note,
                            .length = longest(row, rows),
                            .kind = used,
                            .kinds = count,
                            .row = drawn,
                            .rows = rows,
                            .definitions = wait_pattern};
    spans_svg(&picture, "--timeline-svg", file);
    for (int r = 0; r < rows; r++) spans_row_free(&drawn[r]);
    free(drawn);
}
