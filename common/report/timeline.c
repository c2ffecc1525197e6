// timeline.c: see timeline.h. The clock's events of one step become spans on the compute stream and on each
// communication line. Between its spans the compute stream waited: on the model clock only operations and
// waits advance it.
#include "timeline.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// The letters of marks and communications; what is in no such mark is "+".
typedef struct Letter {
    char letter;
    const char *name;
} Letter;
static const Letter of_mark[] = {{'F', "forward"}, {'B', "backward"}, {'S', "optimizer"}};
static const Letter of_communication[] = {{'A', "all_reduce"}, {'R', "reduce_scatter"}, {'G', "all_gather"},
                                          {'T', "transfers"},  {'X', "all_to_all"},     {'C', "broadcast"},
                                          {'D', "reduce"},     {'H', "gather"},         {'K', "scatter"},
                                          {'|', "barrier"}};

static char letter_of(const Letter *table, size_t count, const char *name, char standard) {
    for (size_t i = 0; i < count; i++)
        if (!strcmp(table[i].name, name)) return table[i].letter;
    return standard;
}
#define LETTER_OF(table, name, standard) letter_of(table, sizeof table / sizeof *table, name, standard)

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

// Finds the step to show; returns false if there is none. It is the last one or, in a run of three or more,
// the one before it: a step counts the labels of the next, so the last makes one call less than most do, and
// the first, which also counts its own, one more.
static bool find_step(bool outermost, int64_t *first, int64_t *last) {
    const Event *event;
    int64_t count = clock_events(&event), open[MOST_OPEN_MARKS], before[2] = {-1, -1};
    int depth = 0, number = 0;
    *first = *last = -1;
    for (int64_t i = 0; i < count; i++) {
        if (event[i].kind == EVENT_PUSH) open[depth++] = i;
        if (event[i].kind != EVENT_POP) continue;
        int64_t push = open[--depth];
        if (!clock_is_step(event[push].name) || (outermost && depth > 0)) continue;
        int following = atoi(event[push].name + 4);
        bool show_before = following > 2 && following == number + 1;
        *first = show_before ? before[0] : push, *last = show_before ? before[1] : i;
        before[0] = push, before[1] = i, number = following;
    }
    return *first >= 0;
}

// Requests are recorded in the order in which they were waited for, but ran in the order of their start.
static int by_begin(const void *a, const void *b) {
    const Span *x = a, *y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

// The end of a "recording" that begins with this event; else -1. It is not part of the step: tensors for
// the proof are gathered while nothing else is in flight.
static int64_t recording_end(const Event *event, int64_t i) {
    if (event[i].kind != EVENT_PUSH || strcmp(event[i].name, "recording") != 0) return -1;
    while (event[i].kind != EVENT_POP) i++;
    return i;
}

Timeline timeline_of_step(bool outermost, const char *title) {
    Timeline t = {0};
    const Event *event;
    int64_t count = clock_events(&event), first, last;
    if (!find_step(outermost, &first, &last)) return t;
    double begin = event[first].model;
    t.title = format_text("%s", title);
    t.seconds = event[last].model - begin;
    for (int64_t i = first + 1, end; i < last; i++)
        if ((end = recording_end(event, i)) >= 0) t.seconds -= event[end].model - event[i].model;
    char letter[MOST_OPEN_MARKS] = "+";  // by depth: a mark without a letter has its parent's
    int depth = 0;
    for (int64_t i = first + 1; i < count; i++) {
        const Event *e = &event[i];
        int64_t end = recording_end(event, i);
        if (end >= 0) {  // what follows moves up to what was before
            begin += event[end].model - e->model;
            i = end;
            continue;
        }
        Span span = {e->model - begin, e->model_end - begin, letter[depth]};
        if (e->kind == EVENT_COMMUNICATION) {
            span.letter = LETTER_OF(of_communication, e->name, '?');
            // One that began before the step or ends after it counts for its part in it.
            span.begin = fmax(span.begin, 0), span.end = fmin(span.end, t.seconds);
            add_span(&t.communication[e->line], &t.communication_count[e->line], span, false);
        } else if (i < last && e->kind == EVENT_OPERATION) {
            add_span(&t.compute, &t.compute_count, span, true);
        } else if (i < last && e->kind == EVENT_PUSH) {
            letter[depth + 1] = LETTER_OF(of_mark, e->name, letter[depth]);
            depth++;
        } else if (i < last) {
            depth--;
        }
    }
    for (int line = 0; line < COMM_LINES; line++)
        if (t.communication[line])
            qsort(t.communication[line], (size_t)t.communication_count[line], sizeof(Span), by_begin);
    return t;
}

void timeline_free(Timeline *t) {
    free(t->title);
    free(t->compute);
    for (int line = 0; line < COMM_LINES; line++) free(t->communication[line]);
    *t = (Timeline){0};
}

// ---- where the seconds go ----

// When any line is busy: spans in order of time, none over another.
static Span *busy_of(const Timeline *t, int64_t *count) {
    int64_t all = 0;
    for (int line = 0; line < COMM_LINES; line++) all += t->communication_count[line];
    Span *spans = host_alloc(sizeof *spans * (size_t)all), *busy = NULL;
    for (int64_t line = 0, at = 0; line < COMM_LINES; at += t->communication_count[line++])
        if (t->communication_count[line])
            memcpy(spans + at, t->communication[line],
                   sizeof *spans * (size_t)t->communication_count[line]);
    qsort(spans, (size_t)all, sizeof *spans, by_begin);
    double end = 0;
    *count = 0;
    for (int64_t i = 0; i < all; i++) {
        add_span(&busy, count, (Span){fmax(spans[i].begin, end), spans[i].end, 'x'}, false);
        end = fmax(end, spans[i].end);
    }
    free(spans);
    return busy;
}

// Adds what is left between two operations: "-" where communication runs, nothing where none does. *at is
// the first span of `busy` that may reach so far; calls go forward in time.
static void add_waits(const Span *busy, int64_t busy_count, int64_t *at, double from, double to,
                      Span **spans, int64_t *count) {
    while (*at < busy_count && busy[*at].end <= from) ++*at;
    for (int64_t i = *at; i < busy_count && busy[i].begin < to; i++)
        add_span(spans, count, (Span){fmax(busy[i].begin, from), fmin(busy[i].end, to), '-'}, true);
}

Span *timeline_compute(const Timeline *t, int64_t *count) {
    int64_t at = 0, busy_count;
    Span *spans = NULL, *busy = busy_of(t, &busy_count);
    double before = 0;
    *count = 0;
    for (int64_t i = 0; i <= t->compute_count; i++) {
        bool end = i == t->compute_count;
        add_waits(busy, busy_count, &at, before, end ? t->seconds : t->compute[i].begin, &spans, count);
        if (end) break;
        add_span(&spans, count, t->compute[i], false);
        before = t->compute[i].end;
    }
    free(busy);
    return spans;
}

static double sum_of(const Span *spans, int64_t count, bool waits) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        if ((spans[i].letter == '-') == waits) sum += spans[i].end - spans[i].begin;
    return sum;
}

TimelineShares timeline_shares(const Timeline *t) {
    int64_t count, busy_count;
    Span *spans = timeline_compute(t, &count), *busy = busy_of(t, &busy_count);
    TimelineShares shares = {.compute = sum_of(spans, count, false),
                             .communication = sum_of(busy, busy_count, false),
                             .exposed = sum_of(spans, count, true)};
    shares.idle = fmax(t->seconds - shares.compute - shares.exposed, 0);
    free(spans);
    free(busy);
    return shares;
}
