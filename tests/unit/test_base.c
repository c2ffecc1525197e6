// test_base.c: options, errors, progress, and the start on the right BLAS kernel.
#include <pty.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base.h"

// cmocka.h needs these before it
// clang-format off
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
// clang-format on

// ---- a child process whose exit status and output can be checked ----

typedef struct Child {
    int status;  // exit status, or -1 after a signal
    char out[16384], err[4096];
} Child;

static void read_all(int file, char *text, size_t size) {
    size_t length = 0;
    ssize_t got;
    while (length + 1 < size && (got = read(file, text + length, size - 1 - length)) > 0)
        length += (size_t)got;
    text[length] = '\0';
    close(file);
}

// LeakSanitizer calls this. A forked child cannot look for leaks: it has none of its parent's threads.
int __lsan_is_turned_off(void);
static bool is_child;
int __lsan_is_turned_off(void) { return is_child; }

static Child run_child(void (*body)(void *), void *context) {
    static Child child;
    FILE *out = tmpfile(), *err = tmpfile();
    assert_true(out && err);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        is_child = true;
        dup2(fileno(out), STDOUT_FILENO);
        dup2(fileno(err), STDERR_FILENO);
        body(context);
        fflush(NULL);
        _exit(99);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    child.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    lseek(fileno(out), 0, SEEK_SET);
    lseek(fileno(err), 0, SEEK_SET);
    read_all(dup(fileno(out)), child.out, sizeof child.out);
    read_all(dup(fileno(err)), child.err, sizeof child.err);
    fclose(out);
    fclose(err);
    return child;
}

// ---- a table with one option of each type ----

static struct {
    int64_t count;
    double rate;
    const char *file;
    int kind;
    bool fast;
} got;

static Option table[] = {
    {"count", OPTION_INT, &got.count, "4", 1, 64, "things", "how many", false},
    {"rate", OPTION_REAL, &got.rate, "0.5", 0, 1, "", "how quick", false},
    {"file", OPTION_TEXT, &got.file, NULL, 0, 0, "FILE", "where from", false},
    {"kind", OPTION_CHOICE, &got.kind, "blue", 0, 0, "red|blue|light-blue", "which", false},
    {"fast", OPTION_FLAG, &got.fast, NULL, 0, 0, "", "sooner", false},
};
enum { OPTIONS = sizeof table / sizeof *table };

typedef struct Line {
    int argc;
    char *argv[8];
} Line;

static void parse(void *context) {
    Line *line = context;
    options_parse(line->argc, line->argv, "Tests the parser.\n  test_base --count 3", table, OPTIONS);
}

// Splits at blanks: "--count 3" -> {"test", "--count", "3"}.
static Line line_of(const char *words, char *buffer) {
    Line line = {1, {"test"}};
    strcpy(buffer, words);
    for (char *word = strtok(buffer, " "); word; word = strtok(NULL, " ")) line.argv[line.argc++] = word;
    return line;
}

static void parse_words(const char *words) {
    static char buffer[256];
    Line line = line_of(words, buffer);
    parse(&line);
}

static Child parse_in_child(const char *words) {
    char buffer[256];
    Line line = line_of(words, buffer);
    return run_child(parse, &line);
}

static void defaults_fill_every_target(void **state) {
    (void)state;
    memset(&got, 0xff, sizeof got);
    got.file = "kept";
    parse_words("");
    assert_int_equal(got.count, 4);
    assert_true(got.rate == 0.5);
    assert_string_equal(got.file, "kept");  // it has no default
    assert_int_equal(got.kind, 1);
    assert_false(got.fast);
    assert_null(option_given(table, OPTIONS, "count"));
}

static void values_are_read_in_both_forms(void **state) {
    (void)state;
    parse_words("--count 7 --rate=1e-2 --file a=b --kind=light-blue --fast");
    assert_int_equal(got.count, 7);
    assert_true(got.rate == 0.01);
    assert_string_equal(got.file, "a=b");
    assert_int_equal(got.kind, 2);
    assert_true(got.fast);
    assert_string_equal(option_given(table, OPTIONS, "count"), "count");
    parse_words("--kind red");
    assert_int_equal(got.kind, 0);
    assert_false(got.fast);
    assert_null(option_given(table, OPTIONS, "count"));
}

// Whole names, wherever they are among the others.
static void flags_that_were_typed_are_found_by_name(void **state) {
    (void)state;
    parse_words("--kind red --rate=0");
    assert_string_equal(option_given(table, OPTIONS, "kind count"), "kind");
    assert_string_equal(option_given(table, OPTIONS, "count file rate fast"), "rate");
    assert_string_equal(option_given(table, OPTIONS, "rates rate"), "rate");
    assert_null(option_given(table, OPTIONS, "kinds light-kind rate-of count"));
    assert_null(option_given(table, OPTIONS, ""));
}

static void bounds_are_inclusive(void **state) {
    (void)state;
    parse_words("--count 1 --rate 0");
    assert_int_equal(got.count, 1);
    parse_words("--count 64 --rate 1");
    assert_int_equal(got.count, 64);
    assert_true(got.rate == 1);
}

// Every wrong line must end with status 2 and one line on stderr that contains these words.
static void wrong_use_is_one_sentence_that_names_the_flag(void **state) {
    (void)state;
    static const struct {
        const char *line, *sentence;
    } wrong[] = {
        {"--count 0", "--count 0 is out of bounds: it is from 1 to 64"},
        {"--count 65", "--count 65 is out of bounds"},
        {"--rate -0.1", "--rate -0.1 is out of bounds"},
        {"--rate 1.0000001", "--rate 1.0000001 is out of bounds"},
        {"--count 4x", "--count 4x is not a whole number"},
        {"--count 4.0", "--count 4.0 is not a whole number"},
        {"--count=", "--count  is not a whole number"},
        {"--count 18446744073709551617", "--count 18446744073709551617 is too large"},
        {"--rate nan", "--rate nan is not a finite number"},
        {"--rate inf", "--rate inf is not a finite number"},
        {"--rate 1e999", "--rate 1e999 is not a finite number"},
        {"--rate 0.5,", "--rate 0.5, is not a finite number"},
        {"--kind gree", "--kind gree is not one of red|blue|light-blue"},
        {"--kind light", "--kind light is not one of"},
        {"--kind red|blue", "--kind red|blue is not one of"},
        {"--file=", "--file needs a value: FILE"},
        {"--file", "--file needs a value: FILE"},
        {"--count", "--count needs a value: a whole number"},
        {"--count --fast", "--count needs a value: a whole number"},
        {"--fast=1", "--fast takes no value"},
        {"--fast 1", "\"1\" is not a flag"},
        {"--fast --fast", "--fast is given twice"},
        {"--count 3 --count=3", "--count is given twice"},
        {"count", "\"count\" is not a flag"},
        {"-c 3", "\"-c\" is not a flag"},
        {"--", "-- is not one of"},
        {"--=3", "-- is not one of"},
        {"--coun 3", "--coun is not one of test_base's flags (is --count meant?)"},
        {"--Count 3", "is --count meant?"},
        {"--helq", "is --help meant?"},
        {"--zero 1",
         "--zero is not one of test_base's flags (zero1, zero2 and zero3 are one stage each; "
         "programs from chapter 03 on have --zero)"},
        {"--stages 4", "chapter 05's schedule has it; programs that train have --pp and --grad-acc"},
        {"--cp 2", "it belongs to chapter 04, context parallelism"},
        {"--experts 8", "it belongs to chapter 06, expert parallelism"},
        {"--fp8 mxfp8", "it belongs to chapter 08, mixed precision"},
        {"--recompute full", "other programs of this book have it"},
        {"--wholly-unlike-anything-that-stands-in-the-table-of-options 1", "--help lists them"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        Child child = parse_in_child(wrong[i].line);
        const char *newline = strchr(child.err, '\n');
        if (child.status != STATUS_USAGE || !strstr(child.err, wrong[i].sentence) || *child.out ||
            strncmp(child.err, "test_base: ", 11) != 0 || !newline || newline[1])
            fail_msg("\"%s\": status %d, stderr \"%s\", stdout \"%s\"; expected \"%s\"", wrong[i].line,
                     child.status, child.err, child.out, wrong[i].sentence);
    }
}

static void help_is_made_from_the_table(void **state) {
    (void)state;
    Child child = parse_in_child("--count 3 --help");
    assert_int_equal(child.status, STATUS_PASS);
    assert_string_equal(child.err, "");
    static const char *expected[] = {
        "test_base: Tests the parser.\n",
        "  --count N                   how many (things, from 1 to 64, default 4)\n",
        "  --rate X                    how quick (from 0 to 1, default 0.5)\n",
        "  --file FILE                 where from\n",
        "  --kind red|blue|light-blue  which (default blue)\n",
        "  --fast                      sooner\n",
        "  --help  ",
        "  test_base --count 3\n",
    };
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++)
        if (!strstr(child.out, expected[i])) fail_msg("--help lacks \"%s\":\n%s", expected[i], child.out);
}

static void broken_tables_are_refused(void **state) {
    (void)state;
    double min = table[0].min;
    table[0].min = table[0].max;
    Child child = parse_in_child("");
    table[0].min = min;
    assert_int_equal(child.status, STATUS_USAGE);
    assert_non_null(strstr(child.err, "--count has no bounds"));
    const char *name = table[1].name;
    table[1].name = "count";
    child = parse_in_child("");
    table[1].name = name;
    assert_int_equal(child.status, STATUS_USAGE);
    assert_non_null(strstr(child.err, "--count stands twice"));
}

// ---- printing ----

static void amounts_have_three_digits_and_a_prefix(void **state) {
    (void)state;
    static const struct {
        double value;
        const char *text;
    } cases[] = {
        {0, "0 B"},         {1, "1 B"},          {999, "999 B"},     {1000, "1.00 kB"},
        {1536, "1.54 kB"},  {9994, "9.99 kB"},   {9996, "10.0 kB"},  {99960, "100 kB"},
        {999400, "999 kB"}, {999600, "1.00 MB"}, {2.1e9, "2.10 GB"}, {-2.1e9, "-2.10 GB"},
        {8e10, "80.0 GB"},  {1e24, "1.00 YB"},   {1e28, "10000 YB"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_string_equal(bytes_text(cases[i].value), cases[i].text);
    assert_string_equal(flops_text(21.2e9), "21.2 GFLOP");
    const char *first = bytes_text(1);  // and seven more calls leave it alone
    for (int i = 2; i < 9; i++) bytes_text(i);
    assert_string_equal(first, "1 B");
}

static void report_steps(void *context) {
    int64_t total = *(int64_t *)context;
    for (int64_t i = 1; i <= total; i++) {
        char *text = format_text("step %ld", i);
        progress(i, total, text);
        free(text);
    }
}

static void progress_in_a_log_is_a_line_for_each_tenth(void **state) {
    (void)state;
    static const int64_t totals[] = {1, 7, 10, 25, 300};
    for (int t = 0; t < 5; t++) {
        int64_t total = totals[t], lines = 0;
        Child child = run_child(report_steps, (void *)&totals[t]);
        for (char *c = child.out; *c; c++) lines += *c == '\n';
        assert_int_equal(lines, total < 10 ? total : 10);
        assert_null(strchr(child.out, '\r'));
        char *last = format_text("step %ld\n", total);
        assert_string_equal(child.out + strlen(child.out) - strlen(last), last);
        free(last);
    }
}

static void progress_on_a_terminal_rewrites_one_line(void **state) {
    (void)state;
    struct winsize window = {.ws_row = 24, .ws_col = 30};
    int terminal;
    fflush(NULL);
    pid_t pid = forkpty(&terminal, NULL, NULL, &window);
    assert_true(pid >= 0);
    if (pid == 0) {
        progress(1, 4, "first");
        usleep(20000);
        progress(2, 4, "second of a width that the terminal has not");
        say("between");
        progress(4, 4, "last");
        fflush(NULL);
        _exit(0);
    }
    char text[4096];
    size_t length = 0;
    ssize_t n;
    while ((n = read(terminal, text + length, sizeof text - 1 - length)) > 0) length += (size_t)n;
    text[length] = '\0';
    close(terminal);
    waitpid(pid, NULL, 0);
    // The long line is cut to 29 columns, after the time left, and what is said in between has a line of
    // its own.
    assert_string_equal(
        text, "\rfirst\033[K\r0 s left: second of a width t\033[K\r\nbetween\r\n\rlast\033[K\r\n");
}

static void progress_tells_the_time_left(void **state) {
    (void)state;
    int terminal;
    fflush(NULL);
    pid_t pid = forkpty(&terminal, NULL, NULL, NULL);
    assert_true(pid >= 0);
    if (pid == 0) {
        progress(1, 100000, "one");
        usleep(50000);
        progress(2, 100000, "two");  // 99998 steps of at least 50 ms: 1 h 23 min or more
        fflush(NULL);
        _exit(0);
    }
    char text[4096];
    size_t length = 0;
    ssize_t n;
    while ((n = read(terminal, text + length, sizeof text - 1 - length)) > 0) length += (size_t)n;
    text[length] = '\0';
    close(terminal);
    waitpid(pid, NULL, 0);
    const char *two = strrchr(text, '\r');
    int hours = -1, minutes = -1;
    if (!two || sscanf(two, "\r[--------------------]   0%%, %d h %d min left: two", &hours, &minutes) != 2)
        fail_msg("the terminal shows \"%s\"", text);
    assert_true(hours * 60 + minutes >= 83);
}

// ---- start ----

static char *self_arguments[] = {"test_base", "--print-blas-name", NULL};

static void start_self(void *context) {
    const char *pin = context;
    unsetenv("ULTRASCALE_RESTARTED");
    if (pin) setenv("OPENBLAS_CORETYPE", pin, 1);
    else unsetenv("OPENBLAS_CORETYPE");
    execv("/proc/self/exe", self_arguments);
}

static bool has_avx512(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
#else
    return false;
#endif
}

static bool has_avx2(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

static void blas_runs_the_best_kernel_unless_pinned(void **state) {
    (void)state;
    if (!has_avx2()) return;
    Child child = run_child(start_self, NULL);
    assert_int_equal(child.status, 0);
    assert_non_null(strstr(child.out, "OpenBLAS 0."));
    bool best = strstr(child.out, "SkylakeX") || strstr(child.out, "Cooperlake") ||
                strstr(child.out, "SapphireRapids");
    if (!has_avx512()) best = strstr(child.out, "Haswell") || strstr(child.out, "Zen");
    if (!best || *child.err) fail_msg("without a pin: \"%s\" and \"%s\"", child.out, child.err);
}

static void a_pin_below_the_processor_is_obeyed_and_warned_of_once(void **state) {
    (void)state;
    if (!has_avx2()) return;
    Child child = run_child(start_self, "Nehalem");
    assert_int_equal(child.status, 0);
    assert_non_null(strstr(child.out, "Nehalem"));
    assert_non_null(strstr(child.err, "env -u OPENBLAS_CORETYPE"));
    assert_ptr_equal(strchr(child.err, '\n'), child.err + strlen(child.err) - 1);  // one line
}

static void start_self_with_two_threads(void *context) {
    static const char *const variable[] = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"};
    const char *const *value = context;
    for (int i = 0; i < 2; i++) {
        unsetenv(variable[i]);
        if (value[i]) setenv(variable[i], value[i], 1);
    }
    setenv("OMP_NUM_THREADS", value[2], 1);
    setenv("OMP_DISPLAY_ENV", "verbose", 1);
    start_self(NULL);
}

// libgomp prints its settings each time that it is loaded.
static void threads_that_wait_soon_sleep_unless_told_otherwise(void **state) {
    (void)state;
    static const struct {
        const char *value[3], *last;  // OMP_WAIT_POLICY, GOMP_SPINCOUNT, OMP_NUM_THREADS
    } starts[] = {{{NULL, NULL, "2"}, "'1000'"},
                  {{NULL, "77", "2"}, "'77'"},
                  {{"passive", NULL, "2"}, "'0'"},
                  {{NULL, NULL, "1"}, "'300000'"}};
    for (int i = 0; i < 4; i++) {
        Child child = run_child(start_self_with_two_threads, (void *)starts[i].value);
        assert_int_equal(child.status, 0);
        const char *spin = child.err, *last = NULL;
        while ((spin = strstr(spin, "GOMP_SPINCOUNT = "))) last = spin += strlen("GOMP_SPINCOUNT = ");
        if (!last) return;  // another OpenMP
        if (strncmp(last, starts[i].last, strlen(starts[i].last)) != 0)
            fail_msg("start %d spins for %.8s turns, not %s", i, last, starts[i].last);
    }
}

// The sanitizers bring an allocator of their own, which these two tests are not about.
#if !defined(__SANITIZE_ADDRESS__)

// A buffer that comes and goes every step must not be mapped, zeroed and unmapped each time.
static void large_buffers_are_touched_once(void **state) {
    (void)state;
    enum { BYTES = 64 << 20 };
    long faults[3];
    for (int i = 0; i < 3; i++) {
        struct rusage before, after;
        getrusage(RUSAGE_SELF, &before);
        volatile char *memory = host_alloc(BYTES);
        for (int64_t j = 0; j < BYTES; j += 4096) memory[j] = 1;
        free((void *)memory);
        getrusage(RUSAGE_SELF, &after);
        faults[i] = after.ru_minflt - before.ru_minflt;
    }
    if (!(faults[1] < 100 && faults[2] < 100))
        fail_msg("page faults: %ld, %ld, %ld", faults[0], faults[1], faults[2]);
}

static void out_of_host_memory_is_said(void *context) {
    (void)context;
    free(host_alloc((size_t)1 << 62));
}

static void host_memory_is_never_null(void **state) {
    (void)state;
    void *nothing = host_alloc(0);
    assert_non_null(nothing);
    free(nothing);
    Child child = run_child(out_of_host_memory_is_said, NULL);
    assert_int_equal(child.status, STATUS_USAGE);
    assert_true(strstr(child.err, "test_base: out of host memory: 4.61 EB more were asked for") ==
                child.err);
}

#endif

int main(int argc, char **argv) {
    base_start(argc, argv);
    if (argc > 1 && strcmp(argv[1], self_arguments[1]) == 0) {
        printf("%s\n", base_blas_name());
        base_blas_name();
        return 0;
    }
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_fill_every_target),
        cmocka_unit_test(values_are_read_in_both_forms),
        cmocka_unit_test(flags_that_were_typed_are_found_by_name),
        cmocka_unit_test(bounds_are_inclusive),
        cmocka_unit_test(wrong_use_is_one_sentence_that_names_the_flag),
        cmocka_unit_test(help_is_made_from_the_table),
        cmocka_unit_test(broken_tables_are_refused),
        cmocka_unit_test(amounts_have_three_digits_and_a_prefix),
        cmocka_unit_test(progress_in_a_log_is_a_line_for_each_tenth),
        cmocka_unit_test(progress_on_a_terminal_rewrites_one_line),
        cmocka_unit_test(progress_tells_the_time_left),
        cmocka_unit_test(blas_runs_the_best_kernel_unless_pinned),
        cmocka_unit_test(a_pin_below_the_processor_is_obeyed_and_warned_of_once),
        cmocka_unit_test(threads_that_wait_soon_sleep_unless_told_otherwise),
#if !defined(__SANITIZE_ADDRESS__)
        cmocka_unit_test(large_buffers_are_touched_once),
        cmocka_unit_test(host_memory_is_never_null),
#endif
    };
    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
