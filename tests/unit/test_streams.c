// test_streams.c [--ranks N] [--long] [PATTERN]: computation and communication keep the order of the calls,
// even if the device does both concurrently: long work precedes each, and what would be read too early is
// NaN or another number. TAP. On a GPU, with --long, a missing event between the two streams shows here
// (tests/mutants/gpu.txt), and on the emulated one where streams have queues (nccl_on_cpu.t); on a CPU
// nothing runs concurrently with the calls, and only the contract of comm.h is tested. There, messages make
// progress at the end of each operation.
//
// Ranks stay in step, so a failure is recorded, and the test continues; after each test the ranks' failures
// are summed.
#include <fnmatch.h>
#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/comm.h"
#include "comm/mesh.h"
#include "tensor/ops.h"

enum { SIZE = 512 };  // of the matrices
// --long: the products keep a GPU busy for some milliseconds, and the tensors whatever is between two of
// them.
#ifdef __SANITIZE_ADDRESS__
static int products = 1;  // nothing is late there, and each is twenty times slower
#else
static int products = 4;
#endif
static int64_t count = 1 << 20;

static int me, n;
static Group world;
static int failures;

static Tensor filled(int64_t elements, double value) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(elements));
    op_fill(t, value);
    return t;
}

// y = value, after a chain of products with the identity matrix: the device gets to it late.
static void fill_late(Tensor y, double value) {
    Tensor x = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(SIZE, SIZE)),
           unit = tensor_like(MEMORY_ACTIVATION, x);
    Tensor other = tensor_like(MEMORY_ACTIVATION, x);
    float *one = calloc((size_t)SIZE * SIZE, sizeof *one);
    CHECK(one, "out of host memory");
    for (int i = 0; i < SIZE; i++) one[i * SIZE + i] = 1;
    tensor_from_host(unit, one);
    free(one);
    op_fill(x, value);
    for (int i = 0; i < products; i++)
        op_matmul(i % 2 ? x : other, i % 2 ? other : x, unit, false, false, 0);
    for (int64_t at = 0; at < tensor_count(y); at += SIZE * SIZE)
        op_copy(tensor_view(y, at, SHAPE(SIZE, SIZE)), tensor_view(x, 0, SHAPE(SIZE, SIZE)));
    tensor_free(&x);
    tensor_free(&other);
    tensor_free(&unit);
}

static void expect(const char *what, Tensor t, double value) {
    float *got = host_alloc((size_t)tensor_bytes(t));
    tensor_to_host(got, t);
    for (int64_t i = 0; i < tensor_count(t); i++)
        if (!(got[i] == (float)value)) {
            printf("# rank %d of %d: element %lld of %s is %g, expected %g\n", me, n, (long long)i, what,
                   got[i], value);
            failures++;
            break;
        }
    free(got);
}

// ---- the orders ----

static void a_collective_waits_for_what_was_computed_before_it(void) {
    Tensor t = filled(count, NAN);
    fill_late(t, me + 1);
    comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    expect("the sum", t, n * (n + 1) / 2);
    tensor_free(&t);
}

static void a_send_waits_for_what_was_computed_before_it(void) {
    Tensor out = filled(count, NAN), in = filled(count, NAN);
    fill_late(out, me + 1);
    comm_wait(comm_send_receive(out, (me + 1) % n, in, (me + n - 1) % n, world));
    expect("what the left neighbour sent", in, (me + n - 1) % n + 1);
    tensor_free(&out);
    tensor_free(&in);
}

static void what_is_computed_behind_the_wait_sees_the_sum(void) {
    Tensor t = filled(count, me + 1), twice = filled(count, NAN);
    comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    op_add(twice, t, t);
    expect("twice the sum", twice, n * (n + 1));
    tensor_free(&t);
    tensor_free(&twice);
}

static void what_is_sent_may_be_written_over_behind_the_wait(void) {
    Tensor in = filled(count, me + 1), out = filled(count * n, NAN);
    comm_wait(comm_all_gather(out, in, NULL, world));
    op_fill(in, NAN);
    for (int r = 0; r < n; r++) expect("a part", tensor_view(out, (int64_t)r * count, SHAPE(count)), r + 1);
    tensor_free(&in);
    tensor_free(&out);
}

static void what_is_sent_may_be_freed_behind_the_wait(void) {
    Tensor copies = filled(count * n, me + 1), out = filled(count, NAN);
    comm_wait(comm_reduce_scatter(out, copies, NULL, REDUCE_SUM, world));
    tensor_free(&copies);
    Tensor over = filled(count * n, NAN);  // may take the same memory
    expect("my part of the sum", out, n * (n + 1) / 2);
    tensor_free(&over);
    tensor_free(&out);
}

static void work_between_call_and_wait_disturbs_nothing(void) {
    Tensor t = filled(count, me + 1), other = filled(count, NAN);
    Request *request = comm_all_reduce(t, REDUCE_SUM, world);
    fill_late(other, 7);
    comm_wait(request);
    expect("the sum", t, n * (n + 1) / 2);
    expect("what was computed meanwhile", other, 7);
    tensor_free(&t);
    tensor_free(&other);
}

static void a_mark_is_set_at_the_call(void) {
    // The sum is over what t held at the call, although another tensor's late work is queued before the
    // wait; and what is written to t after the wait stays.
    Tensor t = filled(count, NAN), other = filled(count, NAN);
    fill_late(t, me + 1);
    Request *request = comm_all_reduce(t, REDUCE_SUM, world);
    fill_late(other, 3);
    comm_wait(request);
    op_add(other, other, t);
    op_fill(t, 5);
    expect("the sum and three", other, n * (n + 1) / 2 + 3);
    expect("what was written last", t, 5);
    tensor_free(&t);
    tensor_free(&other);
}

// Maxima need memory of their own, and the second call needs more of it, while the first may still use what
// it has.
static void a_call_may_outgrow_the_memory_of_the_last(void) {
    Tensor little = filled(SIZE * SIZE, NAN), t = filled(count, me + 1);
    fill_late(little, me + 1);
    Request *first = comm_all_reduce(little, REDUCE_MAX, world),
            *second = comm_all_reduce(t, REDUCE_MAX, world);
    comm_wait(first);
    comm_wait(second);
    expect("the first maximum", little, n);
    expect("the second maximum", t, n);
    tensor_free(&little);
    tensor_free(&t);
}

// Makes the file, and computes until another rank has removed it; after 20 s that is too late.
static void compute_while_there_is(const char *path) {
    FILE *file = fopen(path, "w");
    CHECK(file, "%s cannot be written", path);
    fclose(file);
    Tensor other = filled(1000, 0);
    const double until = wall_seconds() + 20;
    for (; access(path, F_OK) == 0 && wall_seconds() < until; sched_yield()) op_fill(other, 1);
    if (unlink(path) == 0 && ++failures)
        printf("# rank %d of %d: what is in flight stands still while the rank computes\n", me, n);
    tensor_free(&other);
}

// A message longer than what a host transfers at once. One of its two ranks is first, computes, and does
// not call comm; still the message is completed, for which the other one waits.
static void a_message_goes_on_while_a_rank_computes(void) {
    for (int computes = 0; computes < 2; computes++) {
        char path[64];
        snprintf(path, sizeof path, "/tmp/test_streams-%.0f", comm_sum(me == 0 ? getpid() : 0, world));
        if (n < 2 || me > 1) continue;
        Tensor t = filled(count, me == 0 ? 5 : 0);
        while (me != computes && access(path, F_OK) != 0) sched_yield();
        Request *request = me == 0 ? comm_send(t, 1, world) : comm_receive(t, 0, world);
        if (me == computes) compute_while_there_is(path);
        comm_wait(request);
        if (me != computes) unlink(path);
        expect("the message", t, 5);
        tensor_free(&t);
    }
}

#define TEST(name) \
    { #name, name }
static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
    TEST(a_collective_waits_for_what_was_computed_before_it),
    TEST(a_send_waits_for_what_was_computed_before_it),
    TEST(what_is_computed_behind_the_wait_sees_the_sum),
    TEST(what_is_sent_may_be_written_over_behind_the_wait),
    TEST(what_is_sent_may_be_freed_behind_the_wait),
    TEST(work_between_call_and_wait_disturbs_nothing),
    TEST(a_mark_is_set_at_the_call),
    TEST(a_call_may_outgrow_the_memory_of_the_last),
    TEST(a_message_goes_on_while_a_rank_computes),
};
enum { TESTS = sizeof tests / sizeof *tests };

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *pattern = "*";
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--long")) products = 400, count = 8 << 20;
        else if (!strncmp(argv[i], "--", 2)) i++;
        else pattern = argv[i];
    comm_start(argc, argv, 2);
    me = comm_rank();
    n = comm_ranks();
    world = mesh_new((MeshShape){.dp = n}).world;
    int run = 0, failed = 0;
    for (int i = 0; i < TESTS; i++) run += fnmatch(pattern, tests[i].name, 0) == 0;
    say("1..%d", run);
    for (int i = 0, number = 0; i < TESTS; i++) {
        if (fnmatch(pattern, tests[i].name, 0)) continue;
        failures = 0;
        tests[i].run();
        bool bad = comm_sum(failures, world) > 0;
        failed += bad;
        say("%sok %d - %s on %d ranks", bad ? "not " : "", ++number, tests[i].name, n);
    }
    return comm_finish(failed ? STATUS_FAIL : STATUS_PASS);
}
