// The timeline of one step: spans, shares, both pictures to the last character, and the options on one rank.
#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/mesh.h"
#include "report/timeline.h"

// cmocka.h needs these before it
// clang-format off
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
// clang-format on

// In a failure message, the numbers on the left are what the test got.
#define ASSERT_SAME(got, expected)                                                             \
    do {                                                                                       \
        double got_ = (got), expected_ = (expected);                                           \
        if (got_ != expected_) fail_msg("%s is %.17g, expected %.17g", #got, got_, expected_); \
    } while (0)

static int start_again(void **context) {
    (void)context;
    clock_set_machine(machine_find("dgx-h100"));
    clock_reset();
    clock_trace_start();
    return 0;
}

static void compute(const char *mark, double seconds) {
    if (mark) clock_push(mark);
    clock_begin("matmul", BF16, 989e12 * seconds, 0);
    clock_end();
    if (mark) clock_pop();
}

static void communicate_on(Line line, const char *name, double begin, double end) {
    clock_communication(name, (int)line, line_name(line), 0, 0, begin, end, 1);
}

static void communicate(const char *name, double begin, double end) {
    communicate_on(LINE_DP, name, begin, end);
}

// A step of 16 s. The all-reduce is hidden for 4 s and exposed for 1; then for 2 s nothing moves, as
// another rank is late. The reduce-scatter is recorded first, although it runs last.
static void a_step(const char *name) {
    clock_push(name);
    double t = clock_model_now();
    compute(NULL, 1);
    compute("forward", 2);
    compute("forward", 1);
    compute("backward", 4);
    communicate("reduce_scatter", t + 11, t + 12);
    communicate("all_reduce", t + 4, t + 9);
    clock_model_wait(t + 12);
    compute("optimizer", 4);
    clock_pop();
}

static void check_spans(const Span *span, int64_t count, const Span *expected, int64_t expected_count) {
    assert_int_equal(count, expected_count);
    for (int64_t i = 0; i < count; i++)
        if (span[i].begin != expected[i].begin || span[i].end != expected[i].end ||
            span[i].letter != expected[i].letter)
            fail_msg("span %lld is %c from %.17g to %.17g, expected %c from %.17g to %.17g", (long long)i,
                     span[i].letter, span[i].begin, span[i].end, expected[i].letter, expected[i].begin,
                     expected[i].end);
}

static void spans_stand_where_the_clock_had_them(void **context) {
    (void)context;
    compute("before the step", 8);
    a_step("step 3");
    compute(NULL, 8);
    Timeline t = timeline_of_step(true, "rank 0");
    const Span compute[] = {{0, 1, '+'}, {1, 4, 'F'}, {4, 8, 'B'}, {12, 16, 'S'}};
    const Span communication[] = {{4, 9, 'A'}, {11, 12, 'R'}};
    ASSERT_SAME(t.seconds, 16);
    check_spans(t.compute, t.compute_count, compute, 4);
    check_spans(t.communication[LINE_DP], t.communication_count[LINE_DP], communication, 2);
    assert_int_equal(t.communication_count[LINE_TP], 0);
    assert_string_equal(t.title, "rank 0");
    timeline_free(&t);
}

static void compute_exposed_and_idle_fill_the_step(void **context) {
    (void)context;
    a_step("step");
    Timeline t = timeline_of_step(true, "");
    TimelineShares shares = timeline_shares(&t);
    ASSERT_SAME(shares.compute, 12);
    ASSERT_SAME(shares.communication, 6);
    ASSERT_SAME(shares.exposed, 2);
    ASSERT_SAME(shares.idle, 2);
    timeline_free(&t);
}

static void the_last_step_is_taken_and_if_asked_the_last_outermost(void **context) {
    (void)context;
    assert_null(timeline_of_step(true, "").title);
    a_step("step 1");
    clock_push("a variant");
    clock_push("step 1");
    compute("forward", 3);
    clock_pop();
    clock_pop();
    clock_push("stepping stones");
    clock_pop();
    Timeline outer = timeline_of_step(true, ""), last = timeline_of_step(false, "");
    ASSERT_SAME(outer.seconds, 16);
    ASSERT_SAME(last.seconds, 3);
    timeline_free(&outer);
    timeline_free(&last);
}

static void marks_nest_as_deep_as_the_clock_lets_them(void **context) {
    (void)context;
    clock_push("step 1");
    for (int i = 1; i < MOST_OPEN_MARKS; i++) clock_push(i == 80 ? "forward" : "within");
    compute(NULL, 2);
    for (int i = 1; i < MOST_OPEN_MARKS; i++) clock_pop();
    compute("backward", 1);
    clock_pop();
    Timeline t = timeline_of_step(true, "");
    ASSERT_SAME(t.seconds, 3);
    check_spans(t.compute, t.compute_count, (Span[]){{0, 2, 'F'}, {2, 3, 'B'}}, 2);
    timeline_free(&t);
}

// The last step of a run counts no labels of a next one; but of two steps, the first counts its own, too.
static void of_three_steps_the_second_is_taken(void **context) {
    (void)context;
    for (int run = 0; run < 2; run++) {
        for (int step = 1; step <= 3; step++) {
            char *name = format_text("step %d", step);
            clock_push(name);
            compute("forward", 8 * run + step);
            clock_pop();
            free(name);
            Timeline t = timeline_of_step(true, "");
            ASSERT_SAME(t.seconds, 8 * run + (step == 3 ? 2 : step));
            timeline_free(&t);
        }
    }
}

// A run of thousands of steps shows one, and must not keep the events of all.
static void events_of_earlier_steps_are_not_kept(void **context) {
    (void)context;
    const Event *event;
    int64_t kept[2];
    for (int last = 0; last < 2; last++) {
        clock_trace_start();
        if (last) clock_trace_last_steps();
        for (int variant = 0; variant < 2; variant++) {
            clock_push("variant");
            for (int step = 1; step <= 50; step++) {
                char *name = format_text("step %d", step);
                clock_push(name);
                compute("forward", 8 * variant + step);
                communicate("all_gather", clock_model_now() - 1, clock_model_now());
                clock_pop();
                compute("between", 1);
                Timeline t = timeline_of_step(false, "");
                ASSERT_SAME(t.seconds, 8 * variant + (step > 2 ? step - 1 : step));
                assert_int_equal(t.communication_count[LINE_DP], 1);
                timeline_free(&t);
                free(name);
            }
            clock_pop();
        }
        kept[last] = clock_events(&event);
    }
    assert_int_equal(kept[0], 2 * (2 + 50 * 9));
    assert_int_equal(kept[1], 2 * (2 + 2 * 9));
}

static void letters_show_the_step_to_the_column(void **context) {
    (void)context;
    a_step("step");
    Timeline t[2] = {timeline_of_step(true, "early"), {0}};
    clock_trace_start();
    clock_push("step");
    compute("forward", 8);
    communicate("all_gather", clock_model_now() - 8, clock_model_now() - 7.75);
    clock_pop();
    t[1] = timeline_of_step(true, "late");
    char *text = timeline_text(t, 2, 19 + 32);
    assert_string_equal(
        text,
        "early      compute ++FFFFFFBBBBBBBB--....--SSSSSSSS\n"
        "           dp      ........AAAAAAAAAA....RR........\n"
        "late       compute FFFFFFFFFFFFFFFF\n"
        "           dp      G...............\n"
        "           s       |0        |5        |10       |15\n"
        "F forward, B backward, S optimizer step, + other operations, A all-reduce, R reduce-scatter, "
        "G all-gather, - exposed wait, . idle; small letters: in part\n"
        "early      compute 75.0%, communication 37.5% in 2 calls, exposed 12.5%, idle 12.5% of 16000.000 "
        "ms\n"
        "late       compute 100.0%, communication 3.1% in 1 calls, exposed 0.0%, idle 0.0% of 8000.000 "
        "ms\n");
    free(text);
    text = timeline_text(t, 2, 19 + 20);  // 0.8 s a column, of which the all-gather is less than half
    assert_non_null(strstr(text, "dp      g.........\n"));
    free(text);
    for (int i = 0; i < 2; i++) timeline_free(&t[i]);
}

// Two lines at once: 3 s in which either is busy count as exposed only once.
static void each_line_has_its_own_row(void **context) {
    (void)context;
    clock_push("step");
    double t = clock_model_now();
    communicate_on(LINE_TP, "all_gather", t + 4, t + 6);
    communicate_on(LINE_DP, "all_reduce", t + 1, t + 5);
    communicate_on(LINE_PP_BACKWARD, "transfers", t + 6, t + 7);
    compute("forward", 4);
    clock_model_wait(t + 7);
    compute("optimizer", 1);
    clock_pop();
    Timeline row = timeline_of_step(true, "lines");
    TimelineShares shares = timeline_shares(&row);
    ASSERT_SAME(shares.communication, 6);
    ASSERT_SAME(shares.exposed, 3);
    ASSERT_SAME(shares.idle, 0);
    char *text = timeline_text(&row, 1, 19 + 32), *trace = NULL;
    const char *expected =
        "lines      compute FFFFFFFFFFFFFFFF------------SSSS\n"
        "           tp      ................GGGGGGGG........\n"
        "           pp back ........................TTTT....\n"
        "           dp      ....AAAAAAAAAAAAAAAA............\n";
    if (strncmp(text, expected, strlen(expected))) fail_msg("%s", text);
    assert_non_null(strstr(text, "communication 75.0% in 3 calls, exposed 37.5%"));
    size_t size;
    FILE *out = open_memstream(&trace, &size);
    clock_trace_part(out, 0, 1);
    fclose(out);
    assert_non_null(
        strstr(trace, "\"tid\":2,\"name\":\"thread_name\",\"args\":{\"name\":\"communication, tp\"}"));
    assert_non_null(
        strstr(trace, "\"tid\":6,\"name\":\"thread_name\",\"args\":{\"name\":\"communication, dp\"}"));
    free(text);
    free(trace);
    timeline_free(&row);
}

static char *text_of_file(const char *file) {
    FILE *in = fopen(file, "r");
    assert_non_null(in);
    char *text = calloc(1, 1 << 20);
    assert_true(fread(text, 1, (1 << 20) - 1, in) > 0);
    fclose(in);
    return text;
}

static const char *temporary(char *file) {
    strcpy(file, "/tmp/timeline-XXXXXX");
    int descriptor = mkstemp(file);
    assert_true(descriptor >= 0);
    close(descriptor);
    return file;
}

static void the_picture_has_every_span_in_its_place(void **context) {
    (void)context;
    char file[32];
    a_step("step");
    Timeline t = timeline_of_step(true, "a row");
    timeline_svg(&t, 1, "R&D/<t\xe9xt>]]>\xef\xbf\xbf", "note", temporary(file));
    char *svg = text_of_file(file);
    // 876 pixels for 16 s: a second is 54.75 of them, from 68 on. The legend has two lines.
    const char *const expected[] = {
        ">R&amp;D/&lt;t?xt>]]&gt;?</text>",
        ">a row</tspan>",
        "<path fill='#6cc5b0' d='M122.8 96h163.8v22h-163.8z'/>",  // F, 1 to 4 s
        "<path fill='#4269d0' d='M287.0 96h218.5v22h-218.5z'/>",  // B, 4 to 8
        "<path fill='url(#wait)' d='M506.0 96h54.2v22h-54.2zM670.2 96h54.2v22h-54.2z'/>",
        "<path fill='#efb118' d='M287.0 120h273.2v13h-273.2z'/>",  // A, 4 to 9
        "<path fill='#ff8ab7' d='M670.2 120h54.2v13h-54.2z'/>",    // R, 11 to 12
        "<text x='287.0' y='151' text-anchor='middle'>4</text>",
        "<text x='944' y='173' text-anchor='end'>note</text>",
    };
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++)
        if (!strstr(svg, expected[i])) fail_msg("%s is not in\n%s", expected[i], svg);
    free(svg);
    remove(file);
    timeline_free(&t);
}

// Some thousand spans of a hundredth of a pixel each.
static void spans_too_small_to_see_grow_together(void **context) {
    (void)context;
    char file[32];
    clock_push("step");
    double t = clock_model_now();
    for (int i = 0; i < 4000; i++) communicate("all_reduce", t + i * 0.0025, t + (i + 1) * 0.0025);
    compute(NULL, 20);
    clock_pop();
    Timeline line = timeline_of_step(true, "row");
    timeline_svg(&line, 1, "title", NULL, temporary(file));
    char *svg = text_of_file(file), *path = strstr(svg, "<path fill='#efb118' d='");
    assert_non_null(path);
    int pieces = 0;
    for (char *c = path; *c != '/'; c++) pieces += *c == 'z';
    if (pieces < 100 || pieces > 300) fail_msg("%d pieces on 438 pixels", pieces);
    free(svg);
    remove(file);
    timeline_free(&line);
}

static void a_trace_has_all_steps_and_a_picture_the_last(void **context) {
    (void)context;
    for (int traced = 0; traced < 2; traced++) {
        char trace[32], svg[32];
        Config config = {.model = "none", .machine = "dgx-h100", .timeline_svg = temporary(svg)};
        if (traced) config.trace = temporary(trace);
        Mesh mesh = mesh_single();
        const Event *event;
        timeline_start(&config, mesh.world);
        for (int step = 0; step < 9; step++) a_step("step");
        int64_t all = clock_events(&event);
        timeline_finish(&config, mesh.world);
        if (traced) remove(trace);
        remove(svg);
        assert_int_equal(all, (traced ? 9 : 2) * 17);
    }
}

static void the_options_write_their_files_on_one_rank(void **context) {
    (void)context;
    char trace[32], svg[2][32];
    Config config = {.model = "none", .machine = "dgx-h100", .trace = temporary(trace)};
    Mesh mesh = mesh_single();
    for (int run = 0; run < 2; run++) {
        config.timeline_svg = temporary(svg[run]);
        timeline_start(&config, mesh.world);
        a_step("step 1");
        if (run == 0) timeline_keep("rank 0");  // the same row that is shown when none is kept
        timeline_finish(&config, mesh.world);
    }
    char *first = text_of_file(svg[0]), *second = text_of_file(svg[1]), *text = text_of_file(trace);
    assert_string_equal(first, second);
    cJSON *parsed = cJSON_Parse(text);
    if (!parsed) fail_msg("the trace is no JSON: %.200s", text);
    assert_true(cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(parsed, "traceEvents")) > 20);
    cJSON_Delete(parsed);
    free(first);
    free(second);
    free(text);
    remove(trace);
    for (int run = 0; run < 2; run++) remove(svg[run]);
}

// Each line has a row of its own, named once, on which its calls are, with their bytes.
static void the_trace_has_a_row_for_each_line(void **context) {
    (void)context;
    static const Line lines[] = {LINE_DP, LINE_TP, LINE_DP, LINE_TP};
    char file[32];
    clock_trace_start();
    for (int i = 0; i < 4; i++) communicate_on(lines[i], "all_reduce", 2 * i, 2 * i + 1);
    FILE *out = clock_trace_open(temporary(file));
    clock_trace_part(out, 0, 1);
    clock_trace_close(out, file);
    char *text = text_of_file(file);
    cJSON *trace = cJSON_Parse(text);
    if (!trace) fail_msg("the trace is no JSON: %.200s", text);
    int named[2] = {0}, calls[2] = {0};  // by line, on the model clock
    const cJSON *event;
    cJSON_ArrayForEach(event, cJSON_GetObjectItem(trace, "traceEvents")) {
        if (cJSON_GetObjectItem(event, "pid")->valueint != 1) continue;
        const int line = cJSON_GetObjectItem(event, "tid")->valueint - 1;
        const cJSON *args = cJSON_GetObjectItem(event, "args");
        const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(event, "name"));
        const char *row = cJSON_GetStringValue(cJSON_GetObjectItem(args, "name"));
        for (int i = 0; i < 2; i++) {
            char *title = format_text("communication, %s", line_name(lines[i]));
            if (!strcmp(name, "thread_name") && !strcmp(row, title)) {
                assert_int_equal(line, lines[i]);
                named[i]++;
            }
            free(title);
            if (strcmp(name, "all_reduce") || line != (int)lines[i]) continue;
            assert_true(cJSON_GetObjectItem(args, "bytes")->valuedouble == 1);
            calls[i]++;
        }
    }
    for (int i = 0; i < 2; i++) assert_true(named[i] == 1 && calls[i] == 2);
    cJSON_Delete(trace);
    free(text);
    remove(file);
}

static void a_trace_of_two_ranks_is_one_json_with_four_processes(void **context) {
    (void)context;
    char file[32];
    a_step("step");
    FILE *out = clock_trace_open(temporary(file));
    clock_trace_part(out, 0, 2);
    fputs(",\n", out);
    clock_trace_part(out, 1, 2);
    clock_trace_close(out, file);
    char *text = text_of_file(file);
    cJSON *trace = cJSON_Parse(text);
    if (!trace) fail_msg("the trace is no JSON: %.200s", text);
    const char *const names[] = {"rank 0, wall clock", "rank 0, model clock: NVIDIA H100 SXM5 80 GB",
                                 "rank 1, wall clock", "rank 1, model clock: NVIDIA H100 SXM5 80 GB"};
    int named = 0, communications[4] = {0}, open[2][100] = {{0}};
    const cJSON *event;
    cJSON_ArrayForEach(event, cJSON_GetObjectItemCaseSensitive(trace, "traceEvents")) {
        int pid = cJSON_GetObjectItemCaseSensitive(event, "pid")->valueint;
        const char *name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(event, "name"));
        const char *phase = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(event, "ph"));
        assert_true(pid >= 0 && pid <= 3);
        if (name && !strcmp(name, "process_name")) {
            const cJSON *args = cJSON_GetObjectItemCaseSensitive(event, "args");
            assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(args, "name")),
                                names[pid]);
            named++;
        }
        if (cJSON_GetObjectItemCaseSensitive(event, "tid")->valueint == 1 + LINE_DP && strcmp(phase, "M"))
            communications[pid] += !strcmp(phase, "X") || !strcmp(phase, "b");
        // All wall clocks come first, then all model clocks.
        if (name && !strcmp(name, "process_sort_index"))
            assert_int_equal(
                cJSON_GetObjectItem(cJSON_GetObjectItem(event, "args"), "sort_index")->valueint,
                pid % 2 * 2 + pid / 2);
        if (strcmp(phase, "b") && strcmp(phase, "e")) continue;  // an "id" would be that of all processes
        const cJSON *id = cJSON_GetObjectItemCaseSensitive(event, "id2");
        const char *local = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(id, "local"));
        assert_non_null(local);
        assert_null(cJSON_GetObjectItemCaseSensitive(event, "id"));
        // Each call is opened once, and then closed, by its own number.
        assert_true(atoi(local) > 0 && atoi(local) < 100 && pid % 2 == 0);
        assert_int_equal(open[pid / 2][atoi(local)]++, *phase == 'e');
    }
    assert_int_equal(named, 4);
    for (int pid = 0; pid < 4; pid++) assert_int_equal(communications[pid], 2);
    cJSON_Delete(trace);
    free(text);
    remove(file);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(spans_stand_where_the_clock_had_them, start_again),
        cmocka_unit_test_setup(compute_exposed_and_idle_fill_the_step, start_again),
        cmocka_unit_test_setup(the_last_step_is_taken_and_if_asked_the_last_outermost, start_again),
        cmocka_unit_test_setup(marks_nest_as_deep_as_the_clock_lets_them, start_again),
        cmocka_unit_test_setup(of_three_steps_the_second_is_taken, start_again),
        cmocka_unit_test_setup(events_of_earlier_steps_are_not_kept, start_again),
        cmocka_unit_test_setup(letters_show_the_step_to_the_column, start_again),
        cmocka_unit_test_setup(each_line_has_its_own_row, start_again),
        cmocka_unit_test_setup(the_picture_has_every_span_in_its_place, start_again),
        cmocka_unit_test_setup(spans_too_small_to_see_grow_together, start_again),
        cmocka_unit_test_setup(a_trace_has_all_steps_and_a_picture_the_last, start_again),
        cmocka_unit_test_setup(the_options_write_their_files_on_one_rank, start_again),
        cmocka_unit_test_setup(the_trace_has_a_row_for_each_line, start_again),
        cmocka_unit_test_setup(a_trace_of_two_ranks_is_one_json_with_four_processes, start_again),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
