// timeline_ranks.c: the timelines of all ranks, gathered on rank 0 and shown as --timeline, --timeline-svg
// and --trace ask.
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "timeline.h"

static struct {
    bool tracing;
    const char *trace;  // --trace, as long as it is not written
    Group world;
    Timeline *row;
    int rows;
    char *title;
} state;

// ---- many ranks ----

// Copies bytes from rank `from` to rank 0, which gets a buffer of its own. Only these two need to call it.
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
        CHECK(fclose(out) == 0, "out of host memory for the trace");
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

// Of a run that breaks: the other ranks are stopped, or gone, so that the one that says why writes its own.
static void write_ended(const char *sentence) {
    (void)sentence;
    if (!state.trace) return;
    FILE *out = clock_trace_open(state.trace);
    clock_trace_part(out, state.world.rank, state.world.size);
    clock_trace_close(out, state.trace);
}

void timeline_start(const Config *config, Group world) {
    state.tracing = wanted(config);
    if (!state.tracing) return;
    state.trace = config->trace;
    state.world = world;
    base_at_fatal(write_ended);
    // From here on the clocks of all ranks agree.
    comm_wait(comm_barrier(world));
    clock_trace_start();
    if (!config->trace) clock_trace_last_steps();
}

void timeline_keep(const char *title) {
    if (!state.tracing) return;
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
    char *name = format_text("model %s, %d rank%s", config->model, world.size, plural(world.size));
    const char *title = state.title ? state.title : name;
    char *note = format_text("one step on the model clock, %s", machine_find(config->machine)->device);
    if (config->timeline) {
        char *text = timeline_text(state.row, state.rows, terminal_columns());
        say("\n%s: %s", title, note);
        say("%s", text);
        free(text);
    }
    if (config->timeline_svg) {
        timeline_svg(state.row, state.rows, title, note, config->timeline_svg);
        say("wrote %s", config->timeline_svg);
    }
    free(name);
    free(note);
}

void timeline_finish(const Config *config, Group world) {
    if (!state.tracing) return;
    state.tracing = false;
    bool dry = device_is_dry_run();
    device_dry_run(false);
    state.trace = NULL;
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
