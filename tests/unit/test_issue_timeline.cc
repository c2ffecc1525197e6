// The issue timeline: makespans worked out by hand, for the H100 of gpu_model.c, and the tape that the
// emulator records of a kernel.
//
// On one scheduler an exponential takes 8 clocks and a product of 32 Ki FLOPs 32. A product is issued in
// one clock and begins in the next.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <vector>

#include "cuda/instructions_hopper.h"
#include "cuda_on_cpu/cuda_on_cpu_tape.h"
// needs those above, and to be told that it is C
extern "C" {
#include <cmocka.h>
}
#include "found.h"

// ---- steps ----

enum { A = 0, B = 4 };  // warps of two warpgroups, on one scheduler

typedef std::vector<IssueStep> Steps;

static IssueStep &add(Steps *steps, int warp, IssueKind kind) {
    IssueStep s = {};
    s.kind = kind, s.warp = warp;
    steps->push_back(s);
    return steps->back();
}
static void exponentials(Steps *s, int warp, int count) { add(s, warp, ISSUE_WORK).special = count; }
static void products(Steps *s, int warp, int count) {
    for (int i = 0; i < count; i++) add(s, warp, ISSUE_PRODUCT).flops = 32 << 10;
    add(s, warp, ISSUE_COMMIT);
}
static void finish(Steps *s, int warp, int pending) { add(s, warp, ISSUE_FINISH).pending = pending; }
static void arrive(Steps *s, int warp, int phase) { add(s, warp, ISSUE_ARRIVE).phase = phase; }
static void await(Steps *s, int warp, int phase) { add(s, warp, ISSUE_AWAIT).phase = phase; }

static int64_t clocks(Steps steps, TensorOrder order = TENSOR_BY_ISSUE, double *tensor = NULL) {
    IssueTimeline t = issue_timeline(gpu_find("h100"), order, {steps.data(), (int64_t)steps.size()});
    const int64_t made = t.clocks;
    if (tensor) *tensor = t.tensor;
    issue_timeline_free(&t);
    return made;
}

// ---- one warp ----

static void a_warp_waits_for_its_units(void **state) {
    (void)state;
    assert_int_equal(clocks({}), 0);
    Steps one;
    add(&one, A, ISSUE_WORK).fma = 5;
    assert_int_equal(clocks(one), 5);
    exponentials(&one, A, 3);  // at 5, 13, 21
    assert_int_equal(clocks(one), 29);
    Steps two = one;  // the other warp's FMAs come between, at 0 to 9; exponentials at 10, 18, ... 50
    add(&two, B, ISSUE_WORK).fma = 5;
    exponentials(&two, B, 3);
    assert_int_equal(clocks(two), 58);
    two[2].warp = two[3].warp = 1;  // on another scheduler
    assert_int_equal(clocks(two), 29);
    Steps passes;
    add(&passes, A, ISSUE_WORK).passes = 7;
    add(&passes, 1, ISSUE_WORK).passes = 7;  // there is one shared memory
    assert_int_equal(clocks(passes), 14);
}

static void products_are_in_flight_until_waited_for(void **state) {
    (void)state;
    Steps s;
    products(&s, A, 2);  // 1 to 65
    finish(&s, A, 0);
    exponentials(&s, A, 4);
    assert_int_equal(clocks(s), 65 + 32);
    s[3].pending = 1;  // from clock 2 on, beside them
    assert_int_equal(clocks(s), 65);
    s[0].passes = 40;  // its operands take longer than its products: 1 to 41
    assert_int_equal(clocks(s), 73);
    double tensor;
    clocks(s, TENSOR_BY_ISSUE, &tensor);
    assert_true(tensor == 64 / 4.0);  // mean of four schedulers
}

// 5120 / 132 bytes a clock: 3840 arrive in 99, after the latency.
static void copies_come_late_and_in_order(void **state) {
    (void)state;
    Steps s;
    for (int phase = 1; phase <= 2; phase++) {
        IssueStep &copy = add(&s, A, ISSUE_COPY);
        copy.phase = phase, copy.bytes = 3840;
    }
    await(&s, B, 1);
    exponentials(&s, B, 1);
    await(&s, B, 2);
    exponentials(&s, B, 1);
    assert_int_equal(clocks(s), COPY_LATENCY + 2 * 99 + 8);
    s.resize(4);
    assert_int_equal(clocks(s), COPY_LATENCY + 99 + 8);
}

// ---- two warps: for each of two tiles, two products and then 8 exponentials ----

static Steps serial() {
    Steps s;
    for (int tile = 0; tile < 2; tile++)
        for (int warp : {A, B}) {
            products(&s, warp, 2);
            finish(&s, warp, 0);
            exponentials(&s, warp, 8);
        }
    return s;
}

// A's turn 0 is nobody's to give; phases 1 and 3 are B's turns, 2 is A's.
static Steps ping_pong() {
    Steps s;
    for (int tile = 0; tile < 2; tile++)
        for (int warp : {A, B}) {
            const int turn = 2 * tile + (warp == B);
            await(&s, warp, turn);
            products(&s, warp, 2);
            arrive(&s, warp, turn + 1);
            finish(&s, warp, 0);
            exponentials(&s, warp, 8);
        }
    return s;
}

// Both multiply at once, one product of each in turn, A until 97 and B until 129: exponentials from 97 on,
// from 129 on by turns, A's until 193 and B's until 225. A's next products are issued at 194 and 195, since
// it is B's turn at 193, and B's at 225 and 226.
//     by issue: A 195 to 259, B to 323; exponentials of A until 323, of B until 387
//     in turn:  A 195 to 227, B to 259, A to 291, B to 323; exponentials from 291 on, 16 of them
// Ping-pong: A multiplies 1 to 65, 131 to 195; B 65 to 129, 195 to 259, and its last exponentials follow.
static void turns_hide_exponentials(void **state) {
    (void)state;
    assert_int_equal(clocks(serial(), TENSOR_BY_ISSUE), 387);
    assert_int_equal(clocks(serial(), TENSOR_IN_TURN), 419);
    assert_int_equal(clocks(ping_pong(), TENSOR_BY_ISSUE), 323);
}

static void the_picture_has_a_line_for_each(void **state) {
    (void)state;
    Steps s = ping_pong();
    for (IssueStep &step : s) step.letter = '0';
    IssueTimeline t =
        issue_timeline(gpu_find("h100"), TENSOR_BY_ISSUE, {s.data(), (int64_t)s.size()});
    char *text = issue_timeline_text(&t, 0, 320, 20);
    assert_string_equal(text, "group 0, tensor 0000....0000........\n"
                              "group 0, other  ....eeee....eeee....\n"
                              "group 1, tensor ....0000....0000....\n"
                              "group 1, other  ........eeee....eeee\n"
                              "clocks          |0\n");
    free(text);
    issue_timeline_free(&t);
}

static void wait_in_vain() {
    Steps s;
    await(&s, B, 3);
    arrive(&s, B, 3);
    clocks(s);
}

static void who_waits_for_ever_is_named(void **state) {
    (void)state;
    FOUND(wait_in_vain(), "warp 4 waits for ever at step 0 of its 2");
}

// ---- the tape of a kernel ----

// One warpgroup multiplies a tile by itself; the other waits for it.
__global__ void one_product(float *y, const __grid_constant__ TensorMap map) {
    __shared__ __align__(TILE_ALIGNMENT) char tile[64 * TILE_ROW];
    __shared__ Mbarrier full;
    if (threadIdx.x == 0) {
        mbarrier_init(&full, 1);
        fence_proxy_async();
    }
    __syncthreads();
    float d[32] = {};
    if (threadIdx.x < 128) {
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect(&full, sizeof tile);
            tma_load(tile, &map, 0, 0, &full);
        }
        mbarrier_wait(&full, 0);
        wgmma_fence();
        wgmma<__half, K_MAJOR, K_MAJOR>(d, wgmma_operand(tile, 0), wgmma_operand(tile, 0), false);
        wgmma_commit();
        wgmma_wait<0>(d);
    }
    named_barrier(1, 256);
    mbarrier_wait(&full, 0);  // which has ended
    y[blockIdx.x * 256 + threadIdx.x] = d[0] + expf(y[blockIdx.x * 256 + threadIdx.x]);
}

static void expect_kinds(const IssueTape &tape, int warp, std::vector<IssueKind> kinds) {
    size_t at = 0;
    for (int64_t i = 0; i < tape.count; i++)
        if (tape.steps[i].warp == warp) {
            assert_true(at < kinds.size());
            assert_int_equal(tape.steps[i].kind, kinds[at++]);
        }
    assert_int_equal(at, kinds.size());
}

// What a warp waits for: an arrival in exactly that phase.
static void expect_arrivals(const IssueTape &tape) {
    for (int64_t i = 0; i < tape.count; i++) {
        if (tape.steps[i].kind != ISSUE_AWAIT) continue;
        int arrivals = 0;
        for (int64_t j = 0; j < tape.count; j++)
            arrivals += tape.steps[j].phase == tape.steps[i].phase &&
                        (tape.steps[j].kind == ISSUE_ARRIVE || tape.steps[j].kind == ISSUE_COPY);
        assert_true(arrivals >= 1 && arrivals <= 8);
    }
}

static void a_tape_has_what_each_warp_does(void **state) {
    (void)state;
    float *y = floats(512);
    __half *numbers;
    CUDA_CHECK(cudaMalloc(&numbers, 64 * TILE_ROW));
    CUDA_CHECK(cudaMemset(numbers, 0, 64 * TILE_ROW));
    cuda_tape_begin();
    LAUNCH(one_product, 2, 256, 0, 0, y, tensor_map(numbers, 64, 64, 64, 64));
    const IssueTape tape = cuda_tape_end();
    // __syncthreads; the copy; the product; arithmetic, told where its basic block begins; the named
    // barrier, and the mbarrier again. Of the first block alone.
    expect_kinds(tape, 0,
                 {ISSUE_ARRIVE, ISSUE_AWAIT, ISSUE_ARRIVE, ISSUE_COPY, ISSUE_AWAIT, ISSUE_PRODUCT,
                  ISSUE_COMMIT, ISSUE_FINISH, ISSUE_WORK, ISSUE_ARRIVE, ISSUE_AWAIT, ISSUE_AWAIT});
    expect_kinds(tape, 3,
                 {ISSUE_ARRIVE, ISSUE_AWAIT, ISSUE_AWAIT, ISSUE_PRODUCT, ISSUE_COMMIT, ISSUE_FINISH,
                  ISSUE_WORK, ISSUE_ARRIVE, ISSUE_AWAIT, ISSUE_AWAIT});
    expect_kinds(tape, 7,
                 {ISSUE_ARRIVE, ISSUE_AWAIT, ISSUE_WORK, ISSUE_ARRIVE, ISSUE_AWAIT, ISSUE_AWAIT});
    expect_arrivals(tape);
    int special = 0, fma = 0;
    for (int64_t i = 0; i < tape.count; i++) special += tape.steps[i].special, fma += tape.steps[i].fma;
    assert_int_equal(special, 8);
    assert_int_equal(fma, 8);
    // 8192 bytes: 212 clocks. The product, m64n64k16: 32, behind the clock in which it is issued. Then 1
    // and 8 clocks of arithmetic, which the other warpgroup has done meanwhile.
    IssueTimeline t = issue_timeline(gpu_find("h100"), TENSOR_BY_ISSUE, tape);
    assert_int_equal(t.clocks, COPY_LATENCY + 212 + 1 + 32 + 1 + 8);
    assert_true(t.tensor == 32 && t.special == 16 && t.fma == 2);
    issue_timeline_free(&t);
    free(tape.steps);
}

int main(int argc, char **argv) {
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_warp_waits_for_its_units),
        cmocka_unit_test(products_are_in_flight_until_waited_for),
        cmocka_unit_test(copies_come_late_and_in_order),
        cmocka_unit_test(turns_hide_exponentials),
        cmocka_unit_test(the_picture_has_a_line_for_each),
        cmocka_unit_test(who_waits_for_ever_is_named),
        cmocka_unit_test(a_tape_has_what_each_warp_does),
    };
    return cmocka_run_group_tests_name("issue_timeline", tests, NULL, NULL);
}
