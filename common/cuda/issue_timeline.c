// issue_timeline.c: see issue_timeline.h.
#include "issue_timeline.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WARPS = 32, LANES = 32, SCHEDULERS = 4, PASS = 128 };  // bytes of a pass

typedef struct Warp {
    const IssueStep **step;  // its own steps, in order
    int64_t count, at;
    IssueStep work;   // what is left of the current step
    int64_t done_at;  // when what it has issued is done
    // Products, in order: how many were issued, and when; how many have begun, and when they end. For each
    // group: the number of products up to its end.
    const IssueStep **product;
    int64_t issued, *issued_at, begun, *end_of;
    int64_t groups, *group_end;
} Warp;

// A copy that was asked for, in order.
typedef struct Copy {
    int64_t begins;
    int phase;
    double bytes;  // that have not arrived
} Copy;

typedef struct Machine {
    int64_t now;
    TensorOrder order;
    int fma_clocks, special_clocks;              // for one instruction of a warp
    double flops_a_clock, bytes_a_clock;         // of a scheduler's tensor cores; of copies
    Warp warp[WARPS];                            // scheduler: its number mod 4
    int issued_last[SCHEDULERS], product_last[SCHEDULERS];
    int64_t fma_free[SCHEDULERS], special_free[SCHEDULERS], tensor_free[SCHEDULERS];
    double shared_free;
    int *missing;  // arrivals, by phase
    Copy *copy;
    int64_t copies, copies_done;
    double fma_busy, special_busy, tensor_busy, shared_busy, copies_busy;  // clocks, of all schedulers
    bool moves;  // something has happened in this clock, or will happen without any warp
    IssueTimeline *out;
    int64_t room;
} Machine;

// ---- the picture's lines ----

enum { TENSOR_LINE, OTHER_LINE, COPY_LINE = 2 * ISSUE_GROUPS };

static void draw(Machine *m, int line, int64_t begin, int64_t end, char letter) {
    if (end > m->room) {
        const int64_t room = 2 * end + 1024;
        m->out->lines = realloc(m->out->lines, (size_t)room * sizeof *m->out->lines);
        CHECK(m->out->lines, "out of host memory for an issue timeline");
        memset(m->out->lines + m->room, 0, (size_t)(room - m->room) * sizeof *m->out->lines);
        m->room = room;
    }
    for (int64_t t = begin; t < end; t++) m->out->lines[t][line] = letter;
}

// A warpgroup is shown by its first warp.
static void draw_warp(Machine *m, int warp, int line, int64_t begin, int64_t end, char letter) {
    if (warp % SCHEDULERS == 0) draw(m, 2 * (warp / SCHEDULERS) + line, begin, end, letter);
}

// ---- units ----

static int64_t occupy(int64_t *free_at, int64_t now, int64_t clocks, double *busy) {
    *free_at = now + clocks;
    *busy += (double)clocks;
    return *free_at;
}

static int64_t pass_shared(Machine *m, double passes) {
    m->shared_free = fmax(m->shared_free, (double)m->now) + passes;
    m->shared_busy += passes;
    return (int64_t)ceil(m->shared_free);
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

// The scheduler's next warp, after `last`, for which `can` is true.
static Warp *in_turn(Machine *m, int scheduler, int *last, bool can(const Machine *, int)) {
    for (int i = 1; i <= WARPS / SCHEDULERS; i++) {
        const int warp = (*last + i * SCHEDULERS) % WARPS;
        if (warp % SCHEDULERS != scheduler || !can(m, warp)) continue;
        *last = warp;
        return &m->warp[warp];
    }
    return NULL;
}

static bool has_product(const Machine *m, int warp) { return m->warp[warp].begun < m->warp[warp].issued; }

static Warp *first_issued(Machine *m, int scheduler) {
    Warp *first = NULL;
    for (int warp = scheduler; warp < WARPS; warp += SCHEDULERS) {
        Warp *w = &m->warp[warp];
        if (has_product(m, warp) && (!first || w->issued_at[w->begun] < first->issued_at[first->begun]))
            first = w;
    }
    return first;
}

static void multiply(Machine *m, int scheduler) {
    if (m->tensor_free[scheduler] > m->now) return;
    Warp *w = m->order == TENSOR_BY_ISSUE
                  ? first_issued(m, scheduler)
                  : in_turn(m, scheduler, &m->product_last[scheduler], has_product);
    if (!w) return;
    const IssueStep *p = w->product[w->begun];
    const int64_t clocks = (int64_t)ceil(p->flops / m->flops_a_clock);
    int64_t end = occupy(&m->tensor_free[scheduler], m->now, clocks, &m->tensor_busy);
    if (p->passes) end = later(end, pass_shared(m, p->passes));
    m->tensor_free[scheduler] = w->end_of[w->begun++] = end;
    draw_warp(m, p->warp, TENSOR_LINE, m->now, end, p->letter);
}

static bool works(const Warp *w) { return w->work.fma || w->work.special; }

// In a step of work, FMAs come first.
static bool can_issue(const Machine *m, int warp) {
    const Warp *w = &m->warp[warp];
    if (w->work.fma) return m->fma_free[warp % SCHEDULERS] <= m->now;
    if (w->work.special) return m->special_free[warp % SCHEDULERS] <= m->now;
    return w->at < w->count && w->step[w->at]->kind == ISSUE_PRODUCT && w->done_at <= m->now;
}

static void issue(Machine *m, int scheduler) {
    Warp *w = in_turn(m, scheduler, &m->issued_last[scheduler], can_issue);
    if (!w) return;
    if (!works(w)) {
        w->issued_at[w->issued] = m->now, w->product[w->issued++] = w->step[w->at++];
        m->moves = true;
        return;
    }
    const bool fma = w->work.fma > 0;
    --*(fma ? &w->work.fma : &w->work.special);
    const int64_t end =
        fma ? occupy(&m->fma_free[scheduler], m->now, m->fma_clocks, &m->fma_busy)
            : occupy(&m->special_free[scheduler], m->now, m->special_clocks, &m->special_busy);
    w->done_at = later(w->done_at, end);
    draw_warp(m, m->issued_last[scheduler], OTHER_LINE, m->now, end, fma ? '+' : 'e');
}

// One clock of the oldest copy.
static void copy(Machine *m) {
    if (m->copies_done == m->copies) return;
    m->moves = true;
    Copy *c = &m->copy[m->copies_done];
    if (c->begins > m->now) return;
    const double bytes = fmin(m->bytes_a_clock, c->bytes);
    pass_shared(m, bytes / PASS);
    m->copies_busy += bytes / m->bytes_a_clock;
    draw(m, COPY_LINE, m->now, m->now + 1, 'c');
    c->bytes -= bytes;
    if (c->bytes > 0) return;
    m->missing[c->phase]--;
    m->copies_done++;
}

// ---- warps ----

static bool finished(const Machine *m, const Warp *w, int pending) {
    if (w->groups <= pending) return true;
    const int64_t product = w->group_end[w->groups - pending - 1];
    return product == 0 || (product <= w->begun && w->end_of[product - 1] <= m->now);
}

// Whether the step was done: except for products, which must be issued, these steps take no time themselves.
static bool step(Machine *m, Warp *w, const IssueStep *s) {
    if (s->kind == ISSUE_AWAIT) return m->missing[s->phase] == 0;
    if (s->kind == ISSUE_FINISH) return finished(m, w, s->pending);
    if (s->kind == ISSUE_WORK) {
        w->work = *s;
        if (s->passes) w->done_at = later(w->done_at, pass_shared(m, s->passes));
        return true;
    }
    if (s->kind == ISSUE_PRODUCT || w->done_at > m->now) return false;
    if (s->kind == ISSUE_COMMIT) w->group_end[w->groups++] = w->issued;
    if (s->kind == ISSUE_ARRIVE) m->missing[s->phase]--;
    if (s->kind == ISSUE_COPY)
        m->copy[m->copies++] = (Copy){m->now + COPY_LATENCY, s->phase, fmax(s->bytes, 1)};
    return true;
}

// Advances all warps to the next step that must be issued, or to a wait; what one warp does may end another's
// wait.
static void go_on(Machine *m) {
    for (bool again = true; again; m->moves |= again) {
        again = false;
        for (Warp *w = m->warp; w < m->warp + WARPS; w++)
            while (w->at < w->count && !works(w) && step(m, w, w->step[w->at]))
                w->at++, again = true;
    }
}

static bool done(const Machine *m, const Warp *w) {
    return w->at == w->count && !works(w) && w->done_at <= m->now &&
           w->begun == w->issued && (w->begun == 0 || w->end_of[w->begun - 1] <= m->now);
}

static bool busy(const Machine *m) {
    for (int s = 0; s < SCHEDULERS; s++)
        if (m->fma_free[s] > m->now || m->special_free[s] > m->now || m->tensor_free[s] > m->now)
            return true;
    return m->moves || m->shared_free > (double)m->now;
}

// One clock; false: all warps were done before it.
static bool tick(Machine *m) {
    int left = 0, waits = 0;
    m->moves = false;
    go_on(m);
    for (int w = 0; w < WARPS; w++)
        if (!done(m, &m->warp[w])) left++, waits = w;
    if (!left) return false;
    for (int s = 0; s < SCHEDULERS; s++) multiply(m, s), issue(m, s);
    copy(m);
    CHECK(busy(m), "an issue timeline cannot go on: warp %d waits for ever at step %lld of its %lld", waits,
          (long long)m->warp[waits].at, (long long)m->warp[waits].count);
    m->now++;
    return true;
}

// ---- a tape ----

static void *zeros(int64_t count, size_t size) {
    void *x = calloc((size_t)count + 1, size);
    CHECK(x, "out of host memory for an issue timeline");
    return x;
}

static void load(Machine *m, IssueTape tape) {
    int phases = 0;
    for (int w = 0; w < WARPS; w++) {
        int64_t count = 0;
        for (int64_t i = 0; i < tape.count; i++) count += tape.steps[i].warp == w;
        m->warp[w] = (Warp){.step = zeros(count, sizeof(IssueStep *)),
                            .product = zeros(count, sizeof(IssueStep *)),
                            .issued_at = zeros(count, sizeof(int64_t)),
                            .end_of = zeros(count, sizeof(int64_t)),
                            .group_end = zeros(count, sizeof(int64_t))};
    }
    for (int64_t i = 0; i < tape.count; i++)
        if (tape.steps[i].phase >= phases) phases = tape.steps[i].phase + 1;
    m->missing = zeros(phases, sizeof *m->missing);
    m->copy = zeros(tape.count, sizeof *m->copy);
    for (int64_t i = 0; i < tape.count; i++) {
        const IssueStep *s = &tape.steps[i];
        Warp *w = &m->warp[s->warp];
        w->step[w->count++] = s;
        m->missing[s->phase] += s->kind == ISSUE_ARRIVE || s->kind == ISSUE_COPY;
    }
}

static void unload(Machine *m) {
    for (int w = 0; w < WARPS; w++) {
        free(m->warp[w].step);
        free(m->warp[w].product);
        free(m->warp[w].issued_at);
        free(m->warp[w].end_of);
        free(m->warp[w].group_end);
    }
    free(m->missing);
    free(m->copy);
}

IssueTimeline issue_timeline(const Gpu *gpu, TensorOrder order, IssueTape tape) {
    IssueTimeline t = {0};
    Machine m = {.order = order,
                 .out = &t,
                 .fma_clocks = (int)ceil(LANES * SCHEDULERS / gpu->flop_lanes),
                 .special_clocks = (int)ceil(LANES * SCHEDULERS / gpu->special_lanes),
                 .flops_a_clock = gpu->tensor_flops / SCHEDULERS,
                 .bytes_a_clock = gpu->l2_bytes / gpu->clock / gpu->multiprocessors};
    for (int s = 0; s < SCHEDULERS; s++)  // makes the first warp come first
        m.issued_last[s] = m.product_last[s] = WARPS - SCHEDULERS + s;
    load(&m, tape);
    while (tick(&m)) {}
    t.clocks = m.now;
    draw(&m, 0, t.clocks, t.clocks + 1, 0);  // makes room for one clock after the last
    t.tensor = m.tensor_busy / SCHEDULERS, t.special = m.special_busy / SCHEDULERS;
    t.fma = m.fma_busy / SCHEDULERS, t.shared = m.shared_busy, t.copies = m.copies_busy;
    unload(&m);
    return t;
}

void issue_timeline_free(IssueTimeline *timeline) {
    free(timeline->lines);
    *timeline = (IssueTimeline){0};
}

// ---- the picture ----

static char column_letter(const IssueTimeline *t, int line, int64_t from, int64_t to) {
    int64_t clocks[128] = {0};
    int best = '.';
    for (int64_t c = from; c < to && c < t->clocks; c++) {
        const int letter = t->lines[c][line] & 127;
        if (letter && ++clocks[letter] > clocks[best]) best = letter;
    }
    return 4 * clocks[best] < to - from ? '.' : (char)best;
}

static bool shows(const IssueTimeline *t, int line) {
    for (int64_t c = 0; c < t->clocks; c++)
        if (t->lines[c][line]) return true;
    return false;
}

static const char *line_title(int line) {
    static char text[32];
    if (line == COPY_LINE) return "copies";
    snprintf(text, sizeof text, "group %d, %s", line / 2, line % 2 ? "other" : "tensor");
    return text;
}

char *issue_timeline_text(const IssueTimeline *t, int64_t from, int64_t to, int columns) {
    enum { TICK = 20 };  // columns
    char *text;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    CHECK(out, "out of host memory for an issue timeline");
    const double step = (double)(to - from) / columns;
    for (int line = 0; line < ISSUE_LINES; line++) {
        if (!shows(t, line)) continue;
        fprintf(out, "%-16s", line_title(line));
        for (int c = 0; c < columns; c++)
            putc(column_letter(t, line, from + (int64_t)(c * step), from + (int64_t)((c + 1) * step)), out);
        putc('\n', out);
    }
    fprintf(out, "%-16s", "clocks");
    for (int c = 0, at = 0; c < columns; c += TICK)
        at += fprintf(out, "%*s|%lld", c - at, "", (long long)(from + (int64_t)(c * step)));
    putc('\n', out);
    fclose(out);
    return text;
}

enum { SVG_COLUMNS = 420, SVG_LINE = 13 };  // columns per row; pixels per line

// Returns how many spans there are: neighbours with the same letter make one.
static int64_t spans_of_line(Span *span, const IssueRow *row, int line, int64_t clocks) {
    const double step = (double)clocks / SVG_COLUMNS;
    int64_t count = 0;
    for (int c = 0; c < SVG_COLUMNS; c++) {
        const double begin = c * step, end = (c + 1) * step;
        const char letter =
            column_letter(row->timeline, line, row->from + (int64_t)begin, row->from + (int64_t)end);
        if (letter == '.') continue;
        if (count && span[count - 1].letter == letter && span[count - 1].end > begin - step / 2)
            span[count - 1].end = end;
        else span[count++] = (Span){begin, end, letter};
    }
    return count;
}

void issue_timeline_svg(const IssueRow *row, int rows, int64_t clocks, const SpanKind *kind, int kinds,
                        const char *title, const char *flag, const char *file) {
    SpanRow *drawn = zeros(rows, sizeof *drawn);
    Span *span = zeros(rows * ISSUE_LINES * SVG_COLUMNS, sizeof *span), *next = span;
    for (int r = 0; r < rows; r++) {
        SpanRow *to = &drawn[r];
        to->title = row[r].title, to->note = row[r].note;
        for (int line = 0; line < ISSUE_LINES; line++) {
            if (!shows(row[r].timeline, line)) continue;
            SpanLine *made = &to->line[to->lines++];
            snprintf(made->name, sizeof made->name, "%s", line_title(line));
            made->span = next, made->height = SVG_LINE;
            made->count = spans_of_line(next, &row[r], line, clocks);
            next += made->count;
        }
    }
    const SpansPicture picture = {title, NULL, "clocks", (double)clocks, kind, kinds, drawn, rows, ""};
    spans_svg(&picture, flag, file);
    free(drawn);
    free(span);
}
