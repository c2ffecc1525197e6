// test_guard.c: guarded device memory (common/tensor/guard.c): operations and copies work, and host code
// that accesses it ends the program with its source line. Each scenario runs in a child process, since the
// guard is set up by the first allocation.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
// cmocka wants the headers above first.
#include <cmocka.h>
#include <math.h>

#include "tensor/guard.h"
#include "tensor/ops.h"

// Runs the scenario in a child process, with or without the guard; its stderr goes to `said`. Returns its
// status from waitpid.
static char said[4096];
static int run(void (*scenario)(void), const char *wanted) {
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    if (!child) {
        dup2(ends[1], STDERR_FILENO);
        signal(SIGSEGV, SIG_DFL);  // not cmocka's
        setenv("ULTRASCALE_GUARD", wanted, 1);
        alarm(60);
        scenario();
        _exit(0);
    }
    close(ends[1]);
    size_t used = 0;
    for (ssize_t got; (got = read(ends[0], said + used, sizeof said - 1 - used)) > 0;) used += (size_t)got;
    said[used] = '\0';
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}

static void expect_pass(void (*scenario)(void), const char *wanted) {
    if (run(scenario, wanted)) fail_msg("the scenario ended with %s", said);
}

// It must print one line with these words, and end with the exit status of wrong use.
static void expect_sentence(void (*scenario)(void), const char *function, int line, const char *holds) {
    int status = run(scenario, "1");
    char words[256];
    snprintf(words, sizeof words, "host code in %s (tests/unit/test_guard.c:%d) touched device memory (%s)",
             function, line, holds);
    // A build without -g, as of mutants, can only name the function.
    char fewer[256];
    snprintf(fewer, sizeof fewer, "host code in %s touched device memory (%s)", function, holds);
    const char *newline = strchr(said, '\n');
    if (!WIFEXITED(status) || WEXITSTATUS(status) != STATUS_USAGE || !newline || newline[1] ||
        !(strstr(said, words) || strstr(said, fewer)))
        fail_msg("status %#x, and it said: %s instead of: %s", status, said, words);
}

#define APART __attribute__((noinline)) static
enum { COUNT = 1000 };

// A tensor of COUNT ones.
static Tensor ones(MemoryKind kind) {
    Tensor t = tensor_new(kind, F32, SHAPE(COUNT));
    op_fill(t, 1);
    return t;
}

// ---- allowed accesses ----

static void work(void) {
    Tensor t = ones(MEMORY_PARAMETER), u = tensor_like(MEMORY_PARAMETER, t);
    float host[COUNT];
    op_add(u, t, t);
    tensor_to_host(host, u);
    for (int i = 0; i < COUNT; i++)
        if (host[i] != 2) _exit(3);
    tensor_from_host(t, host);
    if (op_sum(t) != 2 * COUNT || !guard.on || guard.opened) _exit(4);
    tensor_free(&t);
    tensor_free(&u);
}

static void operations_and_copies_reach_device_memory(void **state) {
    (void)state;
    expect_pass(work, "1");
}

static void unwritten(void) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, BF16, SHAPE(33));
    if (!isnan(op_sum(t))) _exit(3);
}

static void what_nobody_has_written_is_nan(void **state) {
    (void)state;
    expect_pass(unwritten, "1");
}

// Blocks are allocated and freed in random order; each keeps the number that was written into it.
static void churn(void) {
    enum { SLOTS = 20, TURNS = 400 };
    Tensor held[SLOTS] = {0};
    uint32_t random = 1;
    for (int turn = 0; turn < TURNS; turn++) {
        random = random * 1664525 + 1013904223;
        int slot = (int)((random >> 16) % SLOTS);
        if (tensor_exists(held[slot])) {
            if (op_sum(held[slot]) != (double)slot * (double)tensor_count(held[slot])) _exit(3);
            tensor_free(&held[slot]);
        } else {
            // Some are wider than the steps in which the range grows.
            int64_t count = (random >> 8) % 32 ? (random >> 4) % 5000 : 1500000;
            held[slot] = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(count));
            op_fill(held[slot], slot);
        }
    }
    for (int slot = 0; slot < SLOTS; slot++)
        if (tensor_exists(held[slot]) &&
            op_sum(held[slot]) != (double)slot * (double)tensor_count(held[slot]))
            _exit(4);
}

static void blocks_do_not_overlap(void **state) {
    (void)state;
    expect_pass(churn, "1");
}

// ---- forbidden accesses ----

enum { READ_LINE = __LINE__ + 1 };
APART float reads_an_element(Tensor t) { return ((volatile float *)tensor_address(t))[7]; }
static void read_element(void) {
    Tensor t = ones(MEMORY_GRADIENT);
    if (reads_an_element(t) == 1) _exit(5);
}

enum { WRITE_LINE = __LINE__ + 1 };
APART void writes_through_storage(Tensor t) { *(volatile float *)t.storage->memory = 2; }
static void write_element(void) { writes_through_storage(ones(MEMORY_OPTIMIZER)); }

enum { COPY_LINE = __LINE__ + 3 };
APART void copies_with_memcpy(Tensor t, void *host) {
    void *(*volatile copy)(void *, const void *, size_t) = memcpy;  // the library's own
    copy(host, tensor_address(t), sizeof(float) * COUNT);
    *(volatile char *)host;
}
static void copy_all(void) {
    float host[COUNT];
    copies_with_memcpy(ones(MEMORY_PARAMETER), host);
}

enum { CONVERT_LINE = __LINE__ + 2 };
APART void converts_on_the_host(Tensor t, double *host) {
    dtype_convert(host, F64, tensor_address(t), F32, COUNT);
    *(volatile double *)host;
}
static void convert_all(void) {
    double host[COUNT];
    converts_on_the_host(ones(MEMORY_ACTIVATION), host);
}

static void host_code_is_named_with_its_line(void **state) {
    (void)state;
    expect_sentence(read_element, "reads_an_element", READ_LINE, "gradients");
    expect_sentence(write_element, "writes_through_storage", WRITE_LINE, "optimizer");
    expect_sentence(copy_all, "copies_with_memcpy", COPY_LINE, "parameters");
}

static void a_helper_of_the_core_is_not_to_blame(void **state) {
    (void)state;
    expect_sentence(convert_all, "converts_on_the_host", CONVERT_LINE, "activations");
}

enum { LATE_LINE = __LINE__ + 1 };
APART float reads_what_was_freed(float *address) { return *(volatile float *)address; }
static void read_freed(void) {
    Tensor keep = ones(MEMORY_GRADIENT), t = ones(MEMORY_GRADIENT);
    float *address = tensor_address(t);
    tensor_free(&t);
    if (reads_what_was_freed(address) == 1) _exit(5);
    tensor_free(&keep);
}

static void freed_memory_is_called_so(void **state) {
    (void)state;
    expect_sentence(read_freed, "reads_what_was_freed", LATE_LINE, "freed");
}

static void fault(void) {
    Tensor t = ones(MEMORY_GRADIENT);
    *(volatile int *)tensor_count(t) = 1;
}

static void other_faults_stay_what_they_are(void **state) {
    (void)state;
    int status = run(fault, "1");
    assert_true(status != 0);
    assert_null(strstr(said, "device memory"));
}

static void off(void) {
    Tensor t = ones(MEMORY_GRADIENT);
    if (guard.on || reads_an_element(t) != 1) _exit(3);
}

static void without_the_variable_it_is_off(void **state) {
    (void)state;
    expect_pass(off, "");
    expect_pass(off, "0");
}

// Last, since from here on the compiler takes this file for one in a clone with such a name.
#line 3 "/a folder/tests/unit/test_guard.c"
APART float reads_in_a_folder(Tensor t) { return ((volatile float *)tensor_address(t))[7]; }
static void read_in_a_folder(void) {
    Tensor t = ones(MEMORY_GRADIENT);
    if (reads_in_a_folder(t) == 1) _exit(5);
}

static void a_folder_may_have_any_name(void **state) {
    (void)state;
    expect_sentence(read_in_a_folder, "reads_in_a_folder", 3, "gradients");
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(operations_and_copies_reach_device_memory),
        cmocka_unit_test(what_nobody_has_written_is_nan),
        cmocka_unit_test(blocks_do_not_overlap),
        cmocka_unit_test(host_code_is_named_with_its_line),
        cmocka_unit_test(a_helper_of_the_core_is_not_to_blame),
        cmocka_unit_test(freed_memory_is_called_so),
        cmocka_unit_test(other_faults_stay_what_they_are),
        cmocka_unit_test(without_the_variable_it_is_off),
        cmocka_unit_test(a_folder_may_have_any_name),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    return cmocka_run_group_tests_name("guard", tests, NULL, NULL);
}
