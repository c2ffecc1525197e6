// clock_trace.c: the clock's events in Chrome's trace format:
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "files.h"

static void write_string(FILE *out, const char *text) {
    putc('"', out);
    for (; *text; text++) {
        if ((unsigned char)*text < 0x20) {
            fprintf(out, "\\u%04x", *text);
            continue;
        }
        if (*text == '"' || *text == '\\') putc('\\', out);
        putc(*text, out);
    }
    putc('"', out);
}

// A number that is not finite becomes null: JSON cannot represent it. Rotates over 4 static buffers.
static const char *number_text(double value, bool microseconds) {
    static char texts[4][340];  // 1e308 with 6 decimals
    static unsigned turn;
    char *text = texts[turn++ % 4];
    if (!isfinite(value)) return "null";
    snprintf(text, sizeof *texts, microseconds ? "%.6f" : "%.17g", value);
    return text;
}

static const char *time_text(double microseconds) { return number_text(microseconds, true); }
static const char *figure_text(double figure) { return number_text(figure, false); }

static void name_thread(FILE *out, int pid, int tid, const char *name) {
    fprintf(out,
            ",\n{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}}",
            pid, tid, name);
}

// Each communication line has its own row, below the operations. On the model clock the calls of a line
// follow one another; on the wall clock several are in flight at once, for which the format has
// asynchronous pairs.
static void write_communication(FILE *out, int pid, const Event *event, bool model, double ts, double end,
                                int64_t id) {
    int tid = 1 + event->line;
    if (model)
        fprintf(out, ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%s,\"dur\":%s,\"name\":", pid, tid,
                time_text(ts), time_text(end - ts));
    else
        fprintf(out,
                ",\n{\"ph\":\"b\",\"cat\":\"communication\",\"id2\":{\"local\":\"%lld\"},"
                "\"pid\":%d,\"tid\":%d,\"ts\":%s,\"name\":",
                (long long)id, pid, tid, time_text(ts));
    write_string(out, event->name);
    fprintf(out, ",\"args\":{\"bytes\":%s}}", figure_text(event->bytes));
    if (model) return;
    fprintf(out,
            ",\n{\"ph\":\"e\",\"cat\":\"communication\",\"id2\":{\"local\":\"%lld\"},"
            "\"pid\":%d,\"tid\":%d,\"ts\":%s,\"name\":",
            (long long)id, pid, tid, time_text(end));
    write_string(out, event->name);
    putc('}', out);
}

// One time line; times are in microseconds since the trace's start, as the format wants them.
static void write_process(FILE *out, int pid, int place, const char *title, bool model) {
    double origin = clock_trace_origin(model);
    const Event *events;
    int64_t count = clock_events(&events);
    double last = 0;
    int64_t memory[MEMORY_KINDS] = {-1}, communications = 0;
    uint64_t named = 0;  // a bit for each line
    int depth = 0;
    fprintf(out, "{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"process_name\",\"args\":{\"name\":", pid);
    write_string(out, title);
    fprintf(out, "}},\n{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"process_sort_index\",\"args\":", pid);
    fprintf(out, "{\"sort_index\":%d}}", place);
    name_thread(out, pid, 0, "compute");
    for (int64_t i = 0; i < count; i++) {
        const Event *event = &events[i];
        double ts = 1e6 * ((model ? event->model : event->wall) - origin);
        double end = 1e6 * ((model ? event->model_end : event->wall_end) - origin);
        if (event->kind == EVENT_COMMUNICATION) {
            if (!(named >> event->line & 1)) {
                char *name = format_text("communication, %s", event->line_name);
                name_thread(out, pid, 1 + event->line, name);
                free(name);
            }
            named |= (uint64_t)1 << event->line;
            write_communication(out, pid, event, model, ts, end, ++communications);
            continue;
        }
        last = event->kind == EVENT_OPERATION ? end : ts;
        if (memcmp(memory, event->memory, sizeof memory)) {
            memcpy(memory, event->memory, sizeof memory);
            fprintf(out, ",\n{\"ph\":\"C\",\"pid\":%d,\"tid\":0,\"ts\":%s,\"name\":\"memory\",\"args\":{",
                    pid, time_text(ts));
            for (int k = 0; k < MEMORY_KINDS; k++)
                fprintf(out, "%s\"%s\":%lld", k ? "," : "", memory_kind_name((MemoryKind)k),
                        (long long)memory[k]);
            fprintf(out, "}}");
        }
        fprintf(out, ",\n{\"ph\":\"%c\",\"pid\":%d,\"tid\":0,\"ts\":%s", "XBE"[event->kind], pid,
                time_text(ts));
        if (event->kind != EVENT_POP) {
            fprintf(out, ",\"name\":");
            write_string(out, event->name);
        }
        if (event->kind == EVENT_OPERATION)
            fprintf(out, ",\"dur\":%s,\"args\":{\"flops\":%s,\"bytes\":%s}", time_text(end - ts),
                    figure_text(event->flops), figure_text(event->bytes));
        fprintf(out, "}");
        depth += event->kind == EVENT_PUSH ? 1 : event->kind == EVENT_POP ? -1 : 0;
    }
    for (; depth > 0; depth--)  // marks still open end with the trace
        fprintf(out, ",\n{\"ph\":\"E\",\"pid\":%d,\"tid\":0,\"ts\":%s}", pid, time_text(last));
}

FILE *clock_trace_open(const char *file) {
    FILE *out = output_open("--trace", file);
    fprintf(out, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
    return out;
}

// First come the wall clocks of all ranks, then all model clocks.
void clock_trace_part(FILE *out, int rank, int ranks) {
    char *whose = ranks > 1 ? format_text("rank %d, ", rank) : format_text("%s", "");
    char *wall = format_text("%swall clock", whose);
    char *model = format_text("%smodel clock: %s", whose, clock_machine()->device);
    write_process(out, 2 * rank, rank, wall, false);
    fprintf(out, ",\n");
    write_process(out, 2 * rank + 1, ranks + rank, model, true);
    free(whose);
    free(wall);
    free(model);
}

void clock_trace_close(FILE *out, const char *file) {
    fprintf(out, "\n]}\n");
    output_close(out, "--trace", file);
}
