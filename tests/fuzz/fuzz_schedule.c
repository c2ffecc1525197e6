// libFuzzer's door to schedule_parse. Whatever the bytes are, it returns a schedule or a sentence; the
// verifier says of any schedule whether it is sound; and a sound one can be timed, costed, drawn, and
// written and read again.
//
// Each input is read twice: as it is, and behind a sound header, so that the fuzzer need not find one by
// chance.
#include <stdlib.h>
#include <string.h>

#include "05_pipeline_parallel/schedule.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

// What is written of a schedule must be read as the same.
static void read_again(const Schedule *s) {
    char *text, *again;
    size_t size, again_size;
    FILE *out = open_memstream(&text, &size);
    schedule_write(s, out);
    fclose(out);
    Schedule copy;
    if (schedule_parse(&copy, text, size)) abort();
    out = open_memstream(&again, &again_size);
    schedule_write(&copy, out);
    fclose(out);
    if (size != again_size || memcmp(text, again, size)) abort();
    free(text);
    free(again);
    schedule_free(&copy);
}

static void use(const Schedule *s) {
    ScheduleFault fault;
    const Durations durations = {10, 12, 8, 30, 1};
    schedule_message_order(s, QUEUE_PAIR, &fault);
    schedule_message_order(s, QUEUE_PAIR_AND_KIND, &fault);
    ScheduleTimes times = schedule_times(s, durations);
    if (!(times.makespan > 0) || !(schedule_period(s, durations, NULL) <= times.makespan)) abort();
    free(schedule_letters(s, &times, 100));
    schedule_times_free(&times, s);
}

static void parse(const char *text, size_t size) {
    Schedule s;
    ScheduleFault fault;
    char *sentence = schedule_parse(&s, text, size);
    if (sentence) {
        if (strncmp(sentence, "line ", 5)) abort();
        free(sentence);
        return;
    }
    bool sound = schedule_verify(&s, &fault);
    if (sound != (fault.rule == RULE_SOUND) || sound != !*fault.sentence) abort();
    // A large one takes long, and shows no more.
    if (sound && s.ranks <= 8 && s.micro_batches * s.stages <= 256) use(&s);
    if (s.micro_batches * s.stages <= 4096) read_again(&s);
    schedule_free(&s);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static const char header[] =
        "# pp-schedule name=x p=2 m=2 stages=2 dirs=1\nplace 0: 0 1\nmbs 0: 0 1\nrank 0: F0.0.0 F0.1.0 "
        "B0.0.0 ";
    parse((const char *)bytes, size);
    // A buffer of exactly this size: one byte too far is seen.
    char *text = malloc(sizeof header - 1 + size);
    if (!text) abort();
    memcpy(text, header, sizeof header - 1);
    if (size) memcpy(text + sizeof header - 1, bytes, size);
    parse(text, sizeof header - 1 + size);
    free(text);
    return 0;
}
