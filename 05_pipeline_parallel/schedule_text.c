// schedule_text.c: a schedule as lines of text, for tools, and back. Playbook: "Pipeline Parallelism".
//
//     # pp-schedule name=dualpipe p=4 m=8 stages=4 dirs=2
//     place 0: 0 1 2 3              the rank of each stage, a line for each direction
//     mbs 0: 0 1 2 3                the micro-batches of each direction
//     rank 0: F0.0.0 F0.1.0 B3.4.1 W3.4.1 F0.3.0+BW3.5.1 …
//
// An action is written as kind, stage . micro-batch . direction, and + joins an overlapped pair. Lines come
// in this order, with blanks between words. The reader trusts nothing: whatever the bytes are, it returns a
// schedule, or a sentence that names the line at fault. Whether the schedule is sound is for the verifier to
// say.
#include <ctype.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "files.h"
#include "schedule.h"

void schedule_write(const Schedule *s, FILE *file) {
    fprintf(file, "# pp-schedule name=%s p=%d m=%d stages=%d dirs=%d\n", s->name, s->ranks,
            s->micro_batches, s->stages, s->directions);
    for (int d = 0; d < s->directions; d++) {
        fprintf(file, "place %d:", d);
        for (int k = 0; k < s->stages; k++) fprintf(file, " %d", s->place[d * s->stages + k]);
        fprintf(file, "\n");
    }
    for (int d = 0; d < s->directions; d++) {
        fprintf(file, "mbs %d:", d);
        for (int i = 0; i < s->micro_batches; i++)
            if (s->direction[i] == d) fprintf(file, " %d", i);
        fprintf(file, "\n");
    }
    for (int r = 0; r < s->ranks; r++) {
        fprintf(file, "rank %d:", r);
        for (int i = 0; i < s->list[r].count; i++)
            fprintf(file, " %s", schedule_action_text(s->list[r].action[i]));
        fprintf(file, "\n");
    }
}

// ---- reading ----

typedef struct Reader {
    const char *at, *end;
    int line;
    char *fault;  // the first
} Reader;

static bool fails(Reader *r, const char *format, ...) PRINTF_LIKE(2, 3);
static bool fails(Reader *r, const char *format, ...) {
    char sentence[160];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    if (!r->fault) r->fault = format_text("line %d: %s", r->line, sentence);
    return false;
}

static bool blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }

static void skip_blanks(Reader *r) {
    while (r->at < r->end && blank(*r->at)) r->at++;
}

static bool at_line_end(Reader *r) {
    skip_blanks(r);
    return r->at == r->end || *r->at == '\n';
}

// Skips the rest of a line, and empty lines after it.
static bool end_line(Reader *r) {
    if (!at_line_end(r)) return fails(r, "there is more on it than belongs there");
    while (r->at < r->end && at_line_end(r))
        if (r->at < r->end) r->at++, r->line++;
    return true;
}

static bool take(Reader *r, const char *word) {
    size_t length = strlen(word);
    if ((size_t)(r->end - r->at) < length || memcmp(r->at, word, length)) return false;
    r->at += length;
    return true;
}

static bool expect(Reader *r, const char *word) {
    return take(r, word) || fails(r, "\"%s\" is missing", word);
}

static bool number(Reader *r, const char *what, int least, int most, int *value) {
    int64_t x = 0;
    const char *first = r->at;
    while (r->at < r->end && isdigit((unsigned char)*r->at) && x <= most) x = 10 * x + *r->at++ - '0';
    if (r->at == first) return fails(r, "%s is missing: a number from %d to %d", what, least, most);
    if (x < least || x > most) return fails(r, "%s is not a number from %d to %d", what, least, most);
    *value = (int)x;
    return true;
}

static bool field(Reader *r, const char *name, int most, int *value) {
    skip_blanks(r);
    return expect(r, name) && number(r, name, 1, most, value);
}

static bool name_field(Reader *r, char *name, size_t size) {
    size_t length = 0;
    skip_blanks(r);
    if (!expect(r, "name=")) return false;
    for (; r->at < r->end && (isalnum((unsigned char)*r->at) || strchr("_-", *r->at)) && *r->at; r->at++)
        if (length + 1 < size) name[length++] = *r->at;
    name[length] = 0;
    if (r->at < r->end && !isspace((unsigned char)*r->at))
        return fails(r, "the name may have letters, digits, _ and -, and nothing else");
    return length > 0 || fails(r, "the name is missing: letters, digits, _ and -");
}

// "place 0:", the beginning of a line.
static bool label(Reader *r, const char *word, int index) {
    char text[32];
    snprintf(text, sizeof text, "%s %d:", word, index);
    skip_blanks(r);
    return expect(r, text);
}

static bool read_places(Reader *r, Schedule *s, int d) {
    if (!label(r, "place", d)) return false;
    for (int k = 0; k < s->stages; k++) {
        skip_blanks(r);
        if (!number(r, "the rank of a stage", 0, s->ranks - 1, &s->place[d * s->stages + k])) return false;
    }
    return end_line(r);
}

static bool read_micro_batches(Reader *r, Schedule *s, int d, int *seen) {
    if (!label(r, "mbs", d)) return false;
    while (!at_line_end(r)) {
        int i;
        if (!number(r, "a micro-batch", 0, s->micro_batches - 1, &i)) return false;
        if (s->direction[i] >= 0) return fails(r, "micro-batch %d has a direction already", i);
        s->direction[i] = d;
        ++*seen;
    }
    return end_line(r);
}

static bool read_pass(Reader *r, StagePass *pass) {
    if (take(r, "F")) pass->kind = PASS_F;
    else if (take(r, "BW")) pass->kind = PASS_BW;
    else if (take(r, "B")) pass->kind = PASS_B;
    else if (take(r, "W")) pass->kind = PASS_W;
    else return fails(r, "an action begins with F, B, W or BW");
    return number(r, "a stage", 0, STAGES_MOST, &pass->stage) && expect(r, ".") &&
           number(r, "a micro-batch", 0, MICRO_BATCHES_MOST, &pass->micro_batch) && expect(r, ".") &&
           number(r, "a direction", 0, DIRECTIONS_MOST, &pass->direction);
}

static bool read_list(Reader *r, Schedule *s, int rank) {
    if (!label(r, "rank", rank)) return false;
    while (!at_line_end(r)) {
        Action action = {.passes = 1};
        if (!read_pass(r, &action.pass[0])) return false;
        if (take(r, "+")) {
            action.passes = 2;
            if (!read_pass(r, &action.pass[1])) return false;
        }
        if (r->at < r->end && !blank(*r->at) && *r->at != '\n')
            return fails(r, "an action ends with its direction, a pair with its second pass");
        schedule_append(s, rank, action);
    }
    return end_line(r);
}

static bool read_body(Reader *r, Schedule *s) {
    int seen = 0;
    for (int d = 0; d < s->directions; d++)
        if (!read_places(r, s, d)) return false;
    for (int i = 0; i < s->micro_batches; i++) s->direction[i] = -1;
    for (int d = 0; d < s->directions; d++)
        if (!read_micro_batches(r, s, d, &seen)) return false;
    if (seen < s->micro_batches)
        return fails(r, "before it, a direction is missing for %d of %d micro-batches",
                     s->micro_batches - seen, s->micro_batches);
    for (int rank = 0; rank < s->ranks; rank++)
        if (!read_list(r, s, rank)) return false;
    return r->at == r->end || fails(r, "nothing comes after the last rank's list");
}

char *schedule_parse(Schedule *s, const char *bytes, size_t size) {
    Reader r = {bytes, bytes + size, 1, NULL};
    char name[sizeof s->name];
    int p, m, stages, directions;
    if (!expect(&r, "# pp-schedule") || !name_field(&r, name, sizeof name) ||
        !field(&r, "p=", RANKS_MOST, &p) || !field(&r, "m=", MICRO_BATCHES_MOST, &m) ||
        !field(&r, "stages=", STAGES_MOST, &stages) || !field(&r, "dirs=", DIRECTIONS_MOST, &directions) ||
        !end_line(&r))
        return r.fault;
    *s = schedule_new(name, p, m, stages, directions);
    if (!read_body(&r, s)) schedule_free(s);
    return r.fault;
}

Schedule schedule_load(const char *path) {
    Schedule s;
    enum { MOST = 1 << 26 };
    char *text;
    size_t size;
    const char *unread = input_text(path, MOST, &text, &size);
    CHECK(!unread, "--load: %s", unread);
    char *fault = schedule_parse(&s, text, size);
    CHECK(!fault, "--load %s: %s", path, fault);
    free(text);
    return s;
}
