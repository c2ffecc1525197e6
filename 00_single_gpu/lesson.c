// lesson.c: what a program shows first: one step of rank 0, on one device, with the preceding technique,
// with this one, and by the formulas; and the losses of the run beside those of one device.
//
// Memory is the peak of each kind; calls and bytes are those that rank 0 makes and sends in a step; times
// are model-clock times of a dry run. This file has no main: harness.c calls it.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

// ---- columns ----

// Inspecting whole weights takes reduces and broadcasts, and saving them a barrier; no step makes any of
// these, which a dry run checks (proof.c).
bool counted_in_steps(const char *call) {
    return strcmp(call, "reduce") && strcmp(call, "broadcast") && strcmp(call, "barrier");
}

Column column_of_run(const char *title, const Counted *counted, const StepCost *cost) {
    Column column = {.title = title,
                     .weights = (double)counted->memory.peak[MEMORY_PARAMETER],
                     .gradients = (double)counted->memory.peak[MEMORY_GRADIENT],
                     .optimizer = (double)counted->memory.peak[MEMORY_OPTIMIZER],
                     .kept = (double)counted->kept_bytes,
                     .seconds = cost->step_seconds,
                     .exposed = cost->comm.exposed_seconds};
    for (int i = 0; i < counted->kinds; i++) {
        const CommCount *sent = &counted->sent[i];
        if (!counted_in_steps(sent->name) || !sent->calls) continue;
        column.sent[column.kinds].call = sent->name;
        column.sent[column.kinds].calls = (double)sent->calls / counted->steps;
        column.sent[column.kinds++].bytes = (double)sent->bytes / counted->steps;
    }
    return column;
}

Column column_of_cost(const char *title, const StepCost *cost) {
    return column_of_run(title, &cost->counted, cost);
}

Column column_of_price(const char *title, const Trainer *t, const Price *price) {
    Column column = {.title = title,
                     .weights = price_states(price, t->model, MEMORY_PARAMETER),
                     .gradients = price_states(price, t->model, MEMORY_GRADIENT),
                     .optimizer = price_states(price, t->model, MEMORY_OPTIMIZER),
                     .kept = price_kept(price),
                     .kinds = price->kinds,
                     .seconds = NAN,
                     .exposed = NAN};
    for (int i = 0; i < price->kinds; i++) {
        column.sent[i].call = price->sent[i].call;
        column.sent[i].calls = price->sent[i].calls;
        column.sent[i].bytes = price->sent[i].bytes;
    }
    return column;
}

// ---- the table ----

enum { LABEL = 20, WIDTH = 22, LINE = 160, MOST_COLUMNS = 4 };

static void put(char line[static LINE], const char *cell) {
    size_t used = strlen(line);
    snprintf(line + used, LINE - used, "%*s", WIDTH, cell);
}

static void say_line(char line[static LINE]) {
    size_t length = strlen(line);
    while (length > 0 && line[length - 1] == ' ') length--;
    say("%.*s", (int)length, line);
}

static void print_bytes(const char *label, const double *bytes, int columns) {
    char line[LINE];
    snprintf(line, LINE, "  %-*s", LABEL - 2, label);
    for (int i = 0; i < columns; i++) put(line, isnan(bytes[i]) ? "" : bytes_text(bytes[i]));
    say_line(line);
}

static void print_milliseconds(const char *label, const double *seconds, int columns) {
    char line[LINE], cell[32];
    snprintf(line, LINE, "  %-*s", LABEL - 2, label);
    for (int i = 0; i < columns; i++) {
        snprintf(cell, sizeof cell, "%.3f ms", 1e3 * seconds[i]);
        put(line, isnan(seconds[i]) ? "" : cell);
    }
    say_line(line);
}

static void print_sent(const char *call, const Column *column, int columns) {
    char line[LINE], cell[64];
    snprintf(line, LINE, "  %-*s", LABEL - 2, call);
    for (int i = 0; i < columns; i++) {
        int j = 0;
        while (j < column[i].kinds && strcmp(column[i].sent[j].call, call) != 0) j++;
        bool sends = j < column[i].kinds && column[i].sent[j].bytes > 0;
        if (sends)
            snprintf(cell, sizeof cell, "%.6g calls, %s", column[i].sent[j].calls,
                     bytes_text(column[i].sent[j].bytes));
        put(line, sends ? cell : "-");
    }
    say_line(line);
}

// A row for each kind of call, in the order in which the columns list them, last column first.
static void print_calls(const Column *column, int columns) {
    const char *shown[MOST_COLUMNS * MOST_CALLS];
    int count = 0;
    for (int i = columns - 1; i >= 0; i--)
        for (int j = 0; j < column[i].kinds; j++) {
            int known = 0;
            while (known < count && strcmp(shown[known], column[i].sent[j].call) != 0) known++;
            if (known < count || column[i].sent[j].bytes == 0) continue;
            shown[count++] = column[i].sent[j].call;
            print_sent(shown[known], column, columns);
        }
}

void lesson_print(const Config *config, const Column *column, int columns) {
    char line[LINE];
    double value[6][MOST_COLUMNS] = {{0}};
    snprintf(line, LINE, "%-*s", LABEL, "");
    for (int i = 0; i < columns; i++) {
        const Column *c = &column[i];
        const double figures[6] = {c->weights, c->gradients, c->optimizer, c->kept, c->seconds, c->exposed};
        for (int j = 0; j < 6; j++) value[j][i] = figures[j];
        put(line, c->title);
    }
    say("\nRank 0: memory at its peak; what it sends in a step, and how long that takes");
    say_line(line);
    print_bytes("weights", value[0], columns);
    print_bytes("gradients", value[1], columns);
    print_bytes("optimizer state", value[2], columns);
    print_bytes("activations kept", value[3], columns);
    print_calls(column, columns);
    char *step = format_text("step on %s", config->machine);
    print_milliseconds(step, value[4], columns);
    free(step);
    print_milliseconds("  of it exposed", value[5], columns);
    const Column *own = &column[columns - 2];
    if (own->exposed > 0.5 * own->seconds && !device_is_dry_run())
        say("  (a model this small mostly waits for latency; --dry-run --model %s --dtype bf16 shows a "
            "large one)",
            config->experts ? "mixtral-8x7b" : "llama-3-8b");
}

// ---- losses ----

static void print_series(const char *label, const double *values, int64_t count) {
    enum { SHOWN = 6 };
    char line[LINE], cell[32];
    snprintf(line, LINE, "%s%-*s", values ? "  " : "\n", values ? LABEL - 2 : LABEL, label);
    for (int64_t i = 0; i < count; i++) {
        bool gap = count > SHOWN && i == SHOWN - 2;
        if (count > SHOWN && i > SHOWN - 2 && i < count - 1) continue;
        snprintf(cell, sizeof cell, values ? "%.6f" : "%.0f", values ? values[i] : (double)(i + 1));
        size_t used = strlen(line);
        snprintf(line + used, LINE - used, "%12s", gap ? "..." : cell);
    }
    say_line(line);
}

void lesson_print_losses(const Record *run, const Record *one_device) {
    print_series("loss of step", NULL, run->steps);
    print_series("one device", one_device->loss, one_device->steps);
    print_series(run->title, run->loss, run->steps);
}
