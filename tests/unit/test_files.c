// test_files.c: files are written completely or not at all, devices and FIFOs directly, links followed;
// files are checked before they are read.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fatal.h"
#include "files.h"

static char folder[64];

static int enter_folder(void **state) {
    (void)state;
    strcpy(folder, "/tmp/test_files.XXXXXX");
    return mkdtemp(folder) ? chdir(folder) : -1;
}

static int remove_folder(void **state) {
    (void)state;
    char command[96];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return chdir("/") | system(command);
}

static void put(const char *name, const char *text) {
    FILE *file = fopen(name, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static void assert_holds(const char *name, const char *text) {
    char got[256];
    FILE *file = fopen(name, "r");
    if (!file) fail_msg("%s is not there", name);
    got[fread(got, 1, sizeof got - 1, file)] = '\0';
    fclose(file);
    assert_string_equal(got, text);
}

static int entries(void) {
    FILE *list = popen("ls -A | wc -l", "r");
    int count = -1;
    assert_int_equal(fscanf(list, "%d", &count), 1);
    pclose(list);
    return count;
}

static void output(const char *name, const char *text) {
    output_check("--json", name);
    FILE *file = output_open("--json", name);
    fputs(text, file);
    output_close(file, "--json", name);
}

static void look(void *name) { output_check("--json", name); }
static void write_it(void *name) { output(name, "new"); }

// ---- writing ----

static void a_regular_file_changes_when_the_new_one_is_whole(void **state) {
    (void)state;
    put("a", "old");
    assert_int_equal(chmod("a", 0640), 0);
    output_check("--json", "a");
    FILE *file = output_open("--json", "a");
    fputs("new", file);
    fflush(file);
    assert_holds("a", "old");
    output_close(file, "--json", "a");
    assert_holds("a", "new");
    struct stat status;
    assert_int_equal(stat("a", &status), 0);
    assert_int_equal(status.st_mode & 0777, 0640);
    output("b", "first");
    assert_holds("b", "first");
    assert_int_equal(entries(), 2);
}

static void links_are_followed(void **state) {
    (void)state;
    assert_int_equal(mkdir("deep", 0777), 0);
    put("deep/target", "old");
    assert_int_equal(symlink("deep/target", "link") | symlink("deep/none", "dangling"), 0);
    output("link", "through the link");
    output("dangling", "through the other");
    struct stat status;
    assert_true(lstat("link", &status) == 0 && S_ISLNK(status.st_mode));
    assert_true(lstat("dangling", &status) == 0 && S_ISLNK(status.st_mode));
    assert_holds("deep/target", "through the link");
    assert_holds("deep/none", "through the other");
}

// A FIFO represents devices: an error in this test, run by root, would replace one of the machine's devices.
static void fifos_are_written_through(void **state) {
    (void)state;
    struct stat status;
    assert_int_equal(mkfifo("fifo", 0600), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0 && alarm(10) == 0) execlp("cp", "cp", "fifo", "came", (char *)NULL);
    output("fifo", "through the pipe");
    int ended;
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_holds("came", "through the pipe");
    assert_true(lstat("fifo", &status) == 0 && S_ISFIFO(status.st_mode));
}

static void print_and_write(void *name) {
    put(name, "");
    int log = open(name, O_WRONLY);
    dup2(log, STDOUT_FILENO);
    printf("before\n");
    if (symlink("/proc/self/fd/1", "out") == 0) output("out", "report\n");
    printf("after\n");
    fflush(stdout);
    fatal("done");
}

// Standard output may be a file, which is then neither truncated nor replaced.
static void standard_output_goes_on_where_it_stands(void **state) {
    (void)state;
    expect_fatal(print_and_write, "log", "done");
    assert_holds("log", "before\nreport\nafter\n");
}

static void what_cannot_be_written_is_found_out_at_once(void **state) {
    (void)state;
    assert_int_equal(mkdir("sub", 0777) | mkfifo("fifo", 0600), 0);
    expect_fatal(look, "sub", "--json sub cannot be written: it is a folder");
    expect_fatal(look, "no/such", "--json no/such cannot be written: No such file or directory");
    expect_fatal(look, "/proc/x", "--json /proc/x cannot be written");
    expect_fatal(write_it, "fifo", "nobody reads this FIFO");
    assert_int_equal(entries(), 2);
}

static void write_too_much(void *name) {
    struct rlimit limit = {.rlim_cur = 2, .rlim_max = RLIM_INFINITY};  // stands in for a full disk
    if (setrlimit(RLIMIT_FSIZE, &limit) == 0) output(name, "longer than that");
}

static void a_full_disk_leaves_the_older_file(void **state) {
    (void)state;
    put("a", "old");
    expect_fatal(write_too_much, "a",
                 "--json a could not be written whole: File too large; an older one is as it was");
    assert_holds("a", "old");
    assert_int_equal(entries(), 1);
}

// More than a stream buffers: the disk is full before the end is written.
static void write_far_too_much(void *name) {
    char *text = format_text("%100000d", 1);
    struct rlimit limit = {.rlim_cur = 2, .rlim_max = RLIM_INFINITY};
    if (setrlimit(RLIMIT_FSIZE, &limit) == 0) output(name, text);
}

static void a_disk_that_was_full_early_is_named(void **state) {
    (void)state;
    expect_fatal(write_far_too_much, "a", "--json a could not be written whole: File too large");
    assert_int_equal(entries(), 0);
}

// ---- reading ----

static void a_file_is_mapped(void **state) {
    (void)state;
    put("a", "some text");
    put("empty", "");
    const uint8_t *bytes;
    size_t size;
    assert_null(input_map("a", &bytes, &size));
    assert_int_equal(size, 9);
    assert_memory_equal(bytes, "some text", 9);
    input_unmap(bytes, size);
    assert_null(input_map("empty", &bytes, &size));
    assert_int_equal(size, 0);
    input_unmap(bytes, size);
    char *text;
    assert_null(input_text("a", 10, &text, &size));
    assert_string_equal(text, "some text");
    free(text);
    assert_string_equal(input_text("a", 9, &text, &size), "a is too long");
}

static void bytes_in_memory_are_a_file(void **state) {
    (void)state;
    const uint8_t *bytes;
    size_t size;
    char *first = input_in_memory("first", 5), *second = input_in_memory("second", 6);
    assert_null(input_map(first, &bytes, &size));
    assert_int_equal(size, 5);
    assert_memory_equal(bytes, "first", size);
    input_unmap(bytes, size);
    assert_null(input_map(second, &bytes, &size));
    assert_int_equal(size, 6);
    assert_memory_equal(bytes, "second", size);
    input_unmap(bytes, size);
    free(first), free(second);
}

static void what_is_no_file_is_refused_without_waiting(void **state) {
    (void)state;
    assert_int_equal(mkfifo("fifo", 0600), 0);
    const uint8_t *bytes;
    char *text;
    size_t size;
    alarm(20);  // a hang ends the test
    const char *const names[] = {"fifo", "/dev/zero", ".", "none"};
    const char *const parts[] = {"pipe or a device", "pipe or a device", "directory", "No such file"};
    for (int i = 0; i < 4; i++) {
        const char *wrong = input_map(names[i], &bytes, &size);
        if (!wrong || !strstr(wrong, parts[i])) fail_msg("%s: %s", names[i], wrong ? wrong : "mapped");
        wrong = input_text(names[i], 100, &text, &size);
        if (!wrong || !strstr(wrong, parts[i])) fail_msg("%s: %s", names[i], wrong ? wrong : "read");
    }
    alarm(0);
}

static void read_what_is_gone(void *name) {
    const uint8_t *bytes;
    size_t size;
    if (input_map(name, &bytes, &size) || truncate(name, 0) != 0) return;
    volatile uint8_t byte = bytes[size - 1];
    (void)byte;
}

static void a_file_that_becomes_shorter_is_named(void **state) {
    (void)state;
    put("a", "some text");
    expect_fatal(read_what_is_gone, "a", "a became shorter while it was read");
}

// The kernel's own files claim a page, and hold less.
static void a_text_that_is_shorter_than_it_claims_is_named(void **state) {
    (void)state;
    static const char name[] = "/sys/kernel/mm/transparent_hugepage/enabled";
    char *text;
    size_t size;
    if (access(name, R_OK) != 0) return;
    const char *wrong = input_text(name, 100000, &text, &size);
    if (!wrong || !strstr(wrong, "it became shorter")) fail_msg("%s", wrong ? wrong : "read");
}

static void a_text_with_a_zero_byte_is_refused(void **state) {
    (void)state;
    put("a", "some text");
    assert_int_equal(truncate("a", 12), 0);  // with zeros, which are no text
    char *text;
    size_t size;
    assert_string_equal(input_text("a", 100, &text, &size), "a: it is no text: byte 9 is a zero");
}

static void what_is_no_utf8_is_replaced(void **state) {
    (void)state;
    static const char *const texts[][2] = {
        {"plain, \u00fc, \u20ac and \U0001f600", "plain, \u00fc, \u20ac and \U0001f600"},
        {"t\xe9xt", "t?xt"},                    // Latin-1
        {"\xff\x80\xc3", "???"},              // no first byte, no second
        {"\xc0\xaf \xe0\x9f\xbf", "?? ???"},  // written too long
        {"\xed\xa0\x80", "???"},              // a surrogate
        {"\xf4\x90\x80\x80", "????"},         // beyond the last character
        {"\xf0\x9f\x98", "???"}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char *text = format_text("%s", texts[i][0]);
        make_utf8(text);
        assert_string_equal(text, texts[i][1]);
        free(text);
    }
}

// The handler that names such a file must let a signal that is sent end the program.
static void a_signal_that_is_sent_is_not_swallowed(void **state) {
    (void)state;
    put("a", "some text");
    pid_t child = fork();
    if (child == 0) {
        const uint8_t *bytes;
        size_t size;
        signal(SIGBUS, SIG_DFL);  // cmocka has one of its own
        if (input_map("a", &bytes, &size)) _exit(1);
        kill(getpid(), SIGBUS);
        _exit(0);
    }
    int ended;
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_true(WIFSIGNALED(ended) && WTERMSIG(ended) == SIGBUS);
}

// The cause comes last, so none of it may be missing.
static void a_fault_has_room_for_any_path(void **state) {
    (void)state;
    char path[2000];
    memset(path, 'a', sizeof path - 1);
    path[sizeof path - 1] = '\0';
    const char *fault = fault_text("cannot write %s: %s", path, "No space left on device");
    assert_int_equal(strlen(fault), strlen("cannot write : No space left on device") + sizeof path - 1);
    assert_string_equal(fault + strlen(fault) - strlen("device"), "device");
    fault = fault_text("c: %s", fault_text("b: %s", "a"));
    assert_string_equal(fault, "c: b: a");
}

int main(int argc, char **argv) {
    base_start(argc, argv);
#define TEST(name) cmocka_unit_test_setup_teardown(name, enter_folder, remove_folder)
    const struct CMUnitTest tests[] = {
        TEST(a_regular_file_changes_when_the_new_one_is_whole),
        TEST(links_are_followed),
        TEST(fifos_are_written_through),
        TEST(standard_output_goes_on_where_it_stands),
        TEST(what_cannot_be_written_is_found_out_at_once),
        TEST(a_full_disk_leaves_the_older_file),
        TEST(a_disk_that_was_full_early_is_named),
        TEST(a_file_is_mapped),
        TEST(bytes_in_memory_are_a_file),
        TEST(what_is_no_file_is_refused_without_waiting),
        TEST(a_file_that_becomes_shorter_is_named),
        TEST(a_text_that_is_shorter_than_it_claims_is_named),
        TEST(a_text_with_a_zero_byte_is_refused),
        TEST(what_is_no_utf8_is_replaced),
        TEST(a_signal_that_is_sent_is_not_swallowed),
        TEST(a_fault_has_room_for_any_path),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
