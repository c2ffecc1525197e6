// What NCCL on the CPU refuses: comm_nccl.cu must not pass its tests with errors that NCCL would not allow.
// Each case runs on two ranks, which are two processes; both must see the error that NCCL would return, or
// an error where NCCL would hang.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// needs those above, and to be told that it is C
extern "C" {
#include <cmocka.h>
}

#include "two_ranks.h"

enum { COUNT = 1000 };
static float *x, *y;  // device memory, of COUNT

static void say(const char *what, int got, int expected) {
    if (got == expected) return;
    fprintf(stderr, "rank %d: %s is %d (%s), expected %d\n", rank, what, got, ncclGetLastError(NULL),
            expected);
    _exit(1);
}
#define SAME(got, expected) say(#got, (int)(got), (int)(expected))

// The result of a call in progress.
static ncclResult_t outcome(ncclComm_t comm) {
    ncclResult_t result = ncclInProgress;
    while (result == ncclInProgress) {
        SAME(ncclCommGetAsyncError(comm, &result), ncclSuccess);
        usleep(100);
    }
    return result;
}

static ncclComm_t join(void) {
    char host[32];
    snprintf(host, sizeof host, "host-%d", rank);
    setenv("NCCL_HOSTID", host, 1);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm;
    SAME(ncclCommInitRankConfig(&comm, 2, id, rank, &config), ncclInProgress);
    SAME(outcome(comm), ncclSuccess);
    return comm;
}

// One collective or transfer as a group.
#define GROUPED(call) (ncclGroupStart(), SAME(call, ncclSuccess), ncclGroupEnd())

// Both ranks run the case, and both must exit with these statuses.
static void expect_ends(void (*run)(void), int first, int second) {
    const auto with_memory = [run] {
        cudaMalloc(&x, COUNT * sizeof *x);
        cudaMalloc(&y, COUNT * sizeof *y);
        run();
        return 0;
    };
    on_two_ranks(with_memory, first, second);
}

static void set(float *to, float value) {
    float host[COUNT];
    for (int i = 0; i < COUNT; i++) host[i] = value;
    cudaMemcpy(to, host, sizeof host, cudaMemcpyHostToDevice);
}

static float first_of(const float *from) {
    float value;
    cudaMemcpy(&value, from, sizeof value, cudaMemcpyDeviceToHost);
    return value;
}

static void sound(void) {
    ncclComm_t comm = join(), half;
    set(x, rank + 1);
    SAME(GROUPED(ncclAllReduce(x, y, COUNT, ncclFloat32, ncclSum, comm, 0)), ncclInProgress);
    SAME(outcome(comm), ncclSuccess);
    SAME(first_of(y), 3);
    ncclGroupStart();
    SAME(ncclSend(x, COUNT, ncclFloat32, 1 - rank, comm, 0), ncclSuccess);
    SAME(ncclRecv(y, COUNT, ncclFloat32, 1 - rank, comm, 0), ncclSuccess);
    SAME(ncclGroupEnd(), ncclInProgress);
    SAME(outcome(comm), ncclSuccess);
    SAME(first_of(y), 2 - rank);
    // Each separately, the other way round.
    SAME(ncclCommSplit(comm, 7, 1 - rank, &half, NULL), ncclInProgress);
    SAME(outcome(comm), ncclSuccess);
    SAME(GROUPED(ncclBroadcast(x, y, COUNT, ncclFloat32, 0, half, 0)), ncclInProgress);
    SAME(outcome(half), ncclSuccess);
    SAME(first_of(y), 2);
    SAME(ncclCommFinalize(half), ncclSuccess);
    SAME(ncclCommDestroy(half), ncclSuccess);
}

// The same on blocking communicators, without a group if it is one call.
static void sound_and_blocking(void) {
    setenv("NCCL_HOSTID", rank ? "one" : "other", 1);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm, half;
    SAME(ncclCommInitRankConfig(&comm, 2, id, rank, &config), ncclSuccess);
    set(x, rank + 1);
    SAME(ncclAllReduce(x, y, COUNT, ncclFloat32, ncclSum, comm, 0), ncclSuccess);
    SAME(first_of(y), 3);
    ncclGroupStart();
    SAME(ncclSend(x, COUNT, ncclFloat32, 1 - rank, comm, 0), ncclSuccess);
    SAME(ncclRecv(y, COUNT, ncclFloat32, 1 - rank, comm, 0), ncclSuccess);
    SAME(ncclGroupEnd(), ncclSuccess);
    SAME(first_of(y), 2 - rank);
    SAME(ncclCommSplit(comm, 7, 1 - rank, &half, NULL), ncclSuccess);
    SAME(ncclBroadcast(x, y, COUNT, ncclFloat32, 0, half, 0), ncclSuccess);
    SAME(first_of(y), 2);
    SAME(ncclCommFinalize(half), ncclSuccess);
    SAME(ncclCommDestroy(half), ncclSuccess);
}

static void no_configuration(void) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;
    config.blocking = 2;
    SAME(ncclCommInitRankConfig(&comm, 2, id, rank, &config), ncclInvalidArgument);
    config = {0, 1};
    SAME(ncclCommInitRankConfig(&comm, 2, id, rank, &config), ncclInvalidArgument);
}

static void other_counts_and_blocking(void) {
    setenv("NCCL_HOSTID", rank ? "one" : "other", 1);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;
    SAME(ncclCommInitRankConfig(&comm, 2, id, rank, &config), ncclSuccess);
    SAME(ncclAllReduce(x, y, COUNT - rank, ncclFloat32, ncclSum, comm, 0), ncclInvalidUsage);
}

static void other_counts(void) {
    ncclComm_t comm = join();
    SAME(GROUPED(ncclAllReduce(x, y, COUNT - rank, ncclFloat32, ncclSum, comm, 0)), ncclInProgress);
    SAME(outcome(comm), ncclInvalidUsage);
}

static void other_calls(void) {
    ncclComm_t comm = join();
    if (rank == 0) GROUPED(ncclAllReduce(x, y, COUNT, ncclFloat32, ncclSum, comm, 0));
    else GROUPED(ncclBroadcast(x, y, COUNT, ncclFloat32, 0, comm, 0));
    SAME(outcome(comm), ncclInvalidUsage);
}

static void other_sizes(void) {
    ncclComm_t comm = join();
    if (rank == 0) GROUPED(ncclSend(x, COUNT, ncclFloat32, 1, comm, 0));
    else GROUPED(ncclRecv(x, COUNT - 1, ncclFloat32, 0, comm, 0));
    // The sender has finished when the bytes have left.
    SAME(outcome(comm), rank == 0 ? ncclSuccess : ncclInvalidUsage);
}

// One rank wants to send and receive where the other only receives, before they have ever communicated.
static void other_connections(void) {
    ncclComm_t comm = join();
    ncclGroupStart();
    if (rank == 0) SAME(ncclSend(x, COUNT, ncclFloat32, 1, comm, 0), ncclSuccess);
    SAME(ncclRecv(y, COUNT, ncclFloat32, 1 - rank, comm, 0), ncclSuccess);
    ncclGroupEnd();
    SAME(outcome(comm), ncclInvalidUsage);
}

static void too_early(void) {
    ncclComm_t comm = join();
    SAME(ncclAllReduce(x, y, COUNT, ncclFloat32, ncclSum, comm, 0), ncclInProgress);
    SAME(ncclAllReduce(x, y, COUNT, ncclFloat32, ncclSum, comm, 0), ncclInvalidArgument);
    ncclComm_t half;
    SAME(ncclCommSplit(comm, 0, rank, &half, NULL), ncclInvalidArgument);
    SAME(ncclCommDestroy(comm), ncclInvalidArgument);
    SAME(outcome(comm), ncclSuccess);
}

static void too_late(void) {
    ncclComm_t comm = join();
    ncclResult_t result;
    SAME(ncclCommAbort(comm), ncclSuccess);
    ncclGroupStart();
    SAME(ncclSend(x, COUNT, ncclFloat32, 1 - rank, comm, 0), ncclInvalidUsage);
    SAME(ncclCommGetAsyncError(comm, &result), ncclInvalidUsage);
}

static void two_communicators(void) {
    ncclComm_t comm = join(), other;
    SAME(ncclCommSplit(comm, 0, rank, &other, NULL), ncclInProgress);
    SAME(outcome(comm), ncclSuccess);
    ncclGroupStart();
    SAME(ncclSend(x, COUNT, ncclFloat32, 1 - rank, comm, 0), ncclSuccess);
    SAME(ncclRecv(y, COUNT, ncclFloat32, 1 - rank, other, 0), ncclInvalidUsage);
}

// In place is where a rank's part of the whole lies, and nowhere else.
static void overlapping_arrays(void) {
    ncclComm_t comm = join();
    const size_t half = COUNT / 2;
    float *mine = x + rank * half, *theirs = x + (1 - rank) * half;
    SAME(GROUPED(ncclAllGather(mine, x, half, ncclFloat32, comm, 0)), ncclInProgress);
    SAME(outcome(comm), ncclSuccess);
    SAME(GROUPED(ncclReduceScatter(x, mine, half, ncclFloat32, ncclSum, comm, 0)), ncclInProgress);
    SAME(outcome(comm), ncclSuccess);
    SAME(GROUPED(ncclAllGather(theirs, x, half, ncclFloat32, comm, 0)), ncclInvalidUsage);
    SAME(GROUPED(ncclReduceScatter(x, theirs, half, ncclFloat32, ncclSum, comm, 0)), ncclInvalidUsage);
    SAME(GROUPED(ncclAllReduce(x, x + 1, COUNT - 1, ncclFloat32, ncclSum, comm, 0)), ncclInvalidUsage);
    // Of two calls that run at the same time, one receives where the other receives, or sends.
    float *const wrong[] = {y, x + half - 1};
    for (float *to : wrong) {
        ncclGroupStart();
        SAME(ncclSend(x, half, ncclFloat32, 1 - rank, comm, 0), ncclSuccess);
        SAME(ncclRecv(to, half, ncclFloat32, 1 - rank, comm, 0), ncclSuccess);
        SAME(ncclRecv(y + half, half, ncclFloat32, 1 - rank, comm, 0), ncclSuccess);
        SAME(ncclSend(y, half, ncclFloat32, 1 - rank, comm, 0), ncclSuccess);
        SAME(ncclGroupEnd(), ncclInvalidUsage);
    }
    ncclGroupStart();
    SAME(ncclRecv(y, half, ncclFloat32, 1 - rank, comm, 0), ncclSuccess);
    SAME(ncclRecv(y + half - 1, half, ncclFloat32, 1 - rank, comm, 0), ncclSuccess);
    SAME(ncclGroupEnd(), ncclInvalidUsage);
}

static void no_such_rank(void) {
    ncclComm_t comm = join();
    ncclGroupStart();
    SAME(ncclSend(x, COUNT, ncclFloat32, 2, comm, 0), ncclInvalidArgument);
    SAME(ncclBroadcast(x, y, COUNT, ncclFloat32, 2, comm, 0), ncclInvalidArgument);
}

static void one_gpu(void) {
    setenv("NCCL_HOSTID", "the same", 1);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm;
    SAME(ncclCommInitRankConfig(&comm, 2, id, rank, &config), ncclInProgress);
    SAME(outcome(comm), ncclInvalidUsage);
}

static void death(void) {
    ncclComm_t comm = join();
    if (rank == 1) raise(SIGKILL);
    GROUPED(ncclRecv(y, COUNT, ncclFloat32, 1, comm, 0));
    SAME(outcome(comm), ncclRemoteError);
}

static void host_memory(void) {
    static float here[COUNT];
    ncclComm_t comm = join();
    if (!freopen("/dev/null", "w", stderr)) return;  // the sentence comes from CUDA on the CPU
    if (rank == 0) GROUPED(ncclSend(here, COUNT, ncclFloat32, 1, comm, 0));
}

static void what_is_right_goes_through(void **) {
    expect_ends(sound, 0, 0);
    expect_ends(sound_and_blocking, 0, 0);
}

static void calls_that_do_not_match_are_refused(void **) {
    expect_ends(other_counts, 0, 0);
    expect_ends(other_counts_and_blocking, 0, 0);
    expect_ends(other_calls, 0, 0);
    expect_ends(other_sizes, 0, 0);
    expect_ends(other_connections, 0, 0);
}

static void calls_at_the_wrong_time_are_refused(void **) {
    expect_ends(too_early, 0, 0);
    expect_ends(too_late, 0, 0);
}

static void calls_on_the_wrong_thing_are_refused(void **) {
    expect_ends(two_communicators, 0, 0);
    expect_ends(no_such_rank, 0, 0);
    expect_ends(overlapping_arrays, 0, 0);
    expect_ends(no_configuration, 0, 0);
    expect_ends(host_memory, STATUS_USAGE, 0);
}

static void two_ranks_of_a_host_do_not_share_a_gpu(void **) { expect_ends(one_gpu, 0, 0); }

// The process that dies must be reaped before it is gone.
static void a_death_is_an_error_of_the_other(void **) {
    signal(SIGCHLD, SIG_IGN);
    pid_t child[2];
    int status = 1, ends[2];
    assert_int_equal(pipe(ends), 0);
    start_two_ranks(child, [ends] {
        cudaMalloc(&y, COUNT * sizeof *y);
        death();
        return write(ends[1], "", 1) != 1;
    });
    close(ends[1]);
    char byte = 1;
    status = read(ends[0], &byte, 1) == 1 ? byte : 1;
    close(ends[0]);
    signal(SIGCHLD, SIG_DFL);
    assert_int_equal(status, 0);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_right_goes_through),
        cmocka_unit_test(calls_that_do_not_match_are_refused),
        cmocka_unit_test(calls_at_the_wrong_time_are_refused),
        cmocka_unit_test(calls_on_the_wrong_thing_are_refused),
        cmocka_unit_test(two_ranks_of_a_host_do_not_share_a_gpu),
        cmocka_unit_test(a_death_is_an_error_of_the_other),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("nccl_on_cpu", tests, NULL, NULL);
}
