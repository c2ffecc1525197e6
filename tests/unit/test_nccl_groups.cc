// How comm_nccl.cu makes groups: on a device that has failed, and with cards in the same slots of two
// hosts. TAP.
#include <string.h>

#include "common/comm/transport.h"
#include "on_device.h"
// needs cmocka.h, as C
#include "fatal.h"

// What comm_nccl.cu asks of the device and of the other rank.
static cudaError_t queried;
static cudaError_t query(cudaStream_t) { return queried; }
static void share(const void *mine, void *all, size_t bytes);
#define cudaStreamQuery query
#define control_share   share
#include "common/comm/comm_nccl.cu"

// What the back end and comm_nccl_calls.cu provide: no call is made here.
void *device_stream(void) { return NULL; }
void device_on_wait(void (*)(void)) {}
void device_wait(void) {}
void prepare_call(Operation *) {}
void next_of_call(Operation *) {}

static bool same_machine;

// Rank 1's card is in the same slot of this machine, or of another one.
static void share(const void *mine, void *all, size_t) {
    Card *card = (Card *)all;
    card[0] = card[1] = *(const Card *)mine;
    if (!same_machine) card[1].machine++;
}

static void choose() {
    state.place.ranks = 2;
    state.place.machine = 7;
    unsetenv("NCCL_HOSTID");
    choose_mode();
}

static void cards_are_told_apart_by_their_machine(void **) {
    choose();
    assert_false(state.sharing);
    assert_null(getenv("NCCL_HOSTID"));
    same_machine = true;
    choose();
    assert_true(state.sharing);
    assert_non_null(getenv("NCCL_HOSTID"));
}

static void make_group(void *) {
    Group group = {};
    group.size = 2;
    state.joined = true;
    transport_test(transport_group(group, 0, -1));
}

static void a_device_that_has_failed_ends_the_wait(void **) {
    queried = cudaErrorInvalidValue;
    expect_fatal(make_group, NULL, "CUDA refused");
    queried = cudaErrorNotReady;
    const Ended ended = run_apart(make_group, NULL);
    assert_int_equal(ended.status, 0);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cards_are_told_apart_by_their_machine),
        cmocka_unit_test(a_device_that_has_failed_ends_the_wait),
    };
    return cmocka_run_group_tests_name("nccl_groups", tests, NULL, NULL);
}
