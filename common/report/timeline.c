// timeline.c: see timeline.h. The clock's events of one step become spans on the compute stream and on each
// communication line. Between its spans the compute stream waited: on the model clock it moves by
// operations and by waits alone.
#include "timeline.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"

// A mark's letter, and a communication's; what stands in no such mark is "+".
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
    char letter[64] = "+";  // by depth: a mark without a letter has its parent's
    int depth = 0;
    for (int64_t i = first + 1; i < count; i++) {
        const Event *e = &event[i];
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

// ---- many ranks ----

// Moves bytes from a rank to rank 0, which gets a copy of its own; the two call it, the others need not.
static void *bring(const void *mine, int64_t *bytes, int from, Group world) {
    bool receives = world.rank == 0, sends = world.rank == from;
    double number = (double)*bytes;
    Tensor size = tensor_new(MEMORY_COMMUNICATION, F64, SHAPE(1));
    tensor_from_doubles(size, &number);
    if (from > 0) comm_wait(receives ? comm_receive(size, from, world) : comm_send(size, 0, world));
    tensor_to_doubles(&number, size);
    *bytes = (int64_t)number;
    int64_t words = *bytes / 4 + 1;
    Tensor data = tensor_new(MEMORY_COMMUNICATION, I32, SHAPE(words));
    char *host = calloc((size_t)words, 4);
    CHECK(host, "out of host memory for a time line of %lld bytes", (long long)*bytes);
    if (sends && *bytes) memcpy(host, mine, (size_t)*bytes);
    tensor_from_host(data, host);
    if (from > 0) comm_wait(receives ? comm_receive(data, from, world) : comm_send(data, 0, world));
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
        Timeline t = {.title = format_text("rank %d", rank)};
        seconds = bring(&mine.seconds, &bytes, rank, world);
        t.seconds = *seconds;
        t.compute = bring(mine.compute, &compute, rank, world);
        t.compute_count = compute / (int64_t)sizeof(Span);
        for (int line = 0; line < COMM_LINES; line++) {
            int64_t communication = mine.communication_count[line] * (int64_t)sizeof(Span);
            t.communication[line] = bring(mine.communication[line], &communication, rank, world);
            t.communication_count[line] = communication / (int64_t)sizeof(Span);
        }
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
    comm_wait(comm_barrier(world));
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
