// before_after.c: what all ranks hold before and after a call. Playbook: "A0: Parallel Programming Crash
// Course", in whose examples each rank prints its own.
//
// Rank 0 gathers what the ranks hold and prints it in rank order. These messages do not count as bytes of
// the example. This file has no main.
#include <stdlib.h>
#include <string.h>

#include "data_parallel.h"

static Held gather_held(Tensor t, Group group) {
    int64_t count = tensor_exists(t) ? tensor_count(t) : 0;
    Held held = {.ranks = group.size, .width = 1 + (int64_t)comm_max((double)count, group)};
    double *row = calloc((size_t)held.width, sizeof *row);
    CHECK(row, "out of host memory for a row");
    row[0] = (double)count;
    if (tensor_exists(t)) tensor_to_doubles(row + 1, t);
    Tensor mine = tensor_new(MEMORY_COMMUNICATION, F64, SHAPE(held.width)), all = {0};
    tensor_from_doubles(mine, row);
    if (group.rank == 0) all = tensor_new(MEMORY_COMMUNICATION, F64, SHAPE(group.size, held.width));
    comm_wait(comm_gather(all, mine, NULL, 0, group));
    if (group.rank == 0) {
        held.values = host_alloc((size_t)tensor_bytes(all));
        tensor_to_doubles(held.values, all);
    }
    free(row);
    tensor_free(&mine);
    tensor_free(&all);
    return held;
}

// One rank's row, with numbers `cell` columns wide; a long row ends in "...".
static const char *row_text(const Held *held, int rank, int cell) {
    enum { MOST = 15 };
    static char texts[2][MOST * 32];
    static int turn;
    char *text = texts[turn++ % 2];
    const double *row = &held->values[rank * held->width];
    int used = 0;
    strcpy(text, row[0] == 0 ? " -" : "");
    for (int i = 0; i < (int)row[0] && i < MOST; i++)
        used += snprintf(text + used, sizeof *texts - (size_t)used, "%*g", cell, row[1 + i]);
    if (row[0] > MOST) strcat(text, " ...");
    return text;
}

static int longest(const Held *held, int cell) {
    int most = 0;
    for (int r = 0; r < held->ranks; r++) {
        int length = (int)strlen(row_text(held, r, cell));
        if (length > most) most = length;
    }
    return most;
}

static void print_held(const Held *before, const Held *after) {
    int cell = 2;  // width of a number with a space before it
    for (int which = 0; which < 2; which++) {
        const Held *t = which ? after : before;
        for (int64_t i = 0; i < t->ranks * t->width; i++)
            if (i % t->width && snprintf(NULL, 0, "%g", t->values[i]) >= cell)
                cell = 1 + snprintf(NULL, 0, "%g", t->values[i]);
    }
    int width = longest(before, cell) > 6 ? longest(before, cell) : 6;
    say("  rank  %-*s     after\n", width, " before");
    for (int r = 0; r < before->ranks; r++)
        say("  %4d  %-*s  -> %s\n", r, width, row_text(before, r, cell), row_text(after, r, cell));
}

Example example_begin(const char *call, const char *title, Tensor before, Group group) {
    say("\n%s\n", title);
    Example example = {.call = call, .group = group, .before = gather_held(before, group)};
    clock_reset();  // counting starts here
    return example;
}

// The table in one line, as the playbook prints it, with ranks separated by " |". Static buffer.
static const char *in_one_line(const Held *held) {
    static char text[1024];
    text[0] = 0;
    for (int r = 0; r < held->ranks; r++) {
        const double *row = &held->values[r * held->width];
        size_t used = strlen(text);
        if (r) used += (size_t)snprintf(text + used, sizeof text - used, " |");
        for (int i = 0; i < (int)row[0]; i++)
            used += (size_t)snprintf(text + used, sizeof text - used, " %g", row[1 + i]);
    }
    return text + (text[0] == ' ');
}

// How many ranks a text like "6 12 | 14 56 | 36 288" shows.
static int ranks_in(const char *printed) {
    int ranks = 1;
    for (const char *at = printed; *at; at++) ranks += *at == '|';
    return ranks;
}

void example_end(Example *e, Tensor after, Tensor expected, double bytes, const char *printed) {
    const char *call = e->call ? e->call : "any call";
    double sent = (double)(e->call ? comm_count(e->call) : comm_total()).bytes;
    int64_t count = tensor_exists(expected) ? tensor_count(expected) : 0;
    int64_t holds = tensor_exists(after) ? tensor_count(after) : 0, right = 0;
    double *x = host_alloc(2 * (size_t)count * sizeof *x), *y = x + count;
    if (count && holds == count) {
        tensor_to_doubles(x, after);
        tensor_to_doubles(y, expected);
        while (right < count && x[right] == y[right]) right++;
    }
    Held held = gather_held(after, e->group);
    if (e->group.rank == 0) {
        print_held(&e->before, &held);
        if (printed && e->group.size == ranks_in(printed))
            report_that(!strcmp(in_one_line(&held), printed),
                        "%s: ranks hold %s, and the playbook prints %s", call, in_one_line(&held), printed);
    }
    double formula = comm_sum(bytes, e->group), all_sent = comm_sum(sent, e->group);
    char *what = format_text("bytes of %s, all ranks", call);
    if (holds != count)
        report_that(false, "%s: a rank holds %lld elements after it, expected %lld", call, (long long)holds,
                    (long long)count);
    else if (right < count)
        report_that(false, "%s: a rank holds %g as its element %lld after it, expected %g", call, x[right],
                    (long long)right, y[right]);
    report_that(sent == bytes, "%s: a rank sent %.0f B, by its formula %.0f", call, sent, bytes);
    report_equal(what, formula, all_sent, "B");
    free(what);
    free(x);
    free(e->before.values);
    free(held.values);
    tensor_free(&after);
    tensor_free(&expected);
}
