// in_flight.c: see in_flight.h.
#include "in_flight.h"

#include <stdlib.h>

typedef struct Range {
    Storage *storage;    // its request holds it
    int64_t begin, end;  // bytes
    bool writes;
    int line;
    const void *request;
    const char *(*text)(const void *request);
} Range;

static void push_nothing(void) {}

int in_flight_count;
void (*in_flight_push)(void) = push_nothing;
static Range *ranges;
static int room;

static Range range_of(Tensor t, bool writes, int line) {
    int64_t begin = t.offset * (int64_t)dtype_size(t.dtype);
    return (Range){.storage = t.storage,
                   .begin = begin,
                   .end = begin + tensor_bytes(t),
                   .writes = writes,
                   .line = line};
}

void in_flight_begin(Tensor t, bool writes, int line, const void *request,
                     const char *(*text)(const void *)) {
    if (!tensor_exists(t) || tensor_count(t) == 0) return;
    if (in_flight_count == room) {
        room = 2 * room + 16;
        ranges = realloc(ranges, sizeof *ranges * (size_t)room);
        CHECK(ranges, "out of host memory for requests in flight");
    }
    Range range = range_of(t, writes, line);
    range.request = request;
    range.text = text;
    ranges[in_flight_count++] = range;
    t.storage->in_flight++;
}

void in_flight_end(const void *request) {
    int kept = 0;
    for (int i = 0; i < in_flight_count; i++)
        if (ranges[i].request != request) ranges[kept++] = ranges[i];
        else ranges[i].storage->in_flight--;
    in_flight_count = kept;
}

void in_flight_look(const char *who, Tensor t, bool writes, int line) {
    if (!tensor_exists(t) || !t.storage->in_flight) return;
    Range mine = range_of(t, writes, line);
    for (int i = 0; i < in_flight_count; i++) {
        const Range *r = &ranges[i];
        if (r->storage != mine.storage || r->begin >= mine.end || mine.begin >= r->end) continue;
        if ((!writes && !r->writes) || r->line == line) continue;
        fatal("%s %s '%s' [bytes %lld..%lld), which %s, is still %s: comm_wait comes first", who,
              writes ? "writes" : "reads", memory_kind_name(mine.storage->kind), (long long)mine.begin,
              (long long)mine.end, r->text(r->request), r->writes ? "writing" : "reading");
    }
}
