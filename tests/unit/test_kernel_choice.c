// test_kernel_choice.c: --kernels book in a run during which another one is plugged and unplugged, like the
// dry run that prices a layout: the table of kernels stays in use, and calls are still counted. The table
// is this file's own, so that no GPU is needed.
#include <setjmp.h>
#include <stdarg.h>

#include "00_single_gpu/training.h"
#include "tensor/kernel_table.h"
#include "tensor/ops.h"
// needs those above
#include <cmocka.h>

// Accepts f32, and writes a number that shows which kernel computed.
static bool own_swiglu(DType dtype, void *act, const void *gate, const void *up, int64_t count) {
    (void)gate, (void)up;
    for (int64_t i = 0; i < count && dtype == F32; i++) ((float *)act)[i] = 42;
    return dtype == F32;
}

const KernelTable *kernel_table_linked(void) {
    static const KernelTable table = {.swiglu_forward = own_swiglu};
    return &table;
}

// Which kernel computes now: 42 the table's, 0 the back end's, for zeros.
static double computed(DType dtype) {
    Tensor x = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(3));
    Tensor y = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(3));
    op_fill(x, 0);
    op_swiglu_forward(y, x, x);
    const double first = op_sum(y) / 3;
    tensor_free(&x);
    tensor_free(&y);
    return first;
}

static void expect_calls(KernelCalls before, int64_t all, int64_t taken) {
    const KernelCalls now = ops_kernel_calls();
    assert_int_equal(now.all - before.all, all);
    assert_int_equal(now.taken - before.taken, taken);
}

static void a_table_stays_in_use_beside_a_dry_run(void **state) {
    (void)state;
    const KernelCalls start = ops_kernel_calls();
    assert_true(computed(F32) == 0);
    void *run = kernel_choice.plug(NULL);
    assert_true(computed(F32) == 42);
    assert_true(computed(F64) == 0);  // the table does not support it
    expect_calls(start, 2, 1);
    void *dry = kernel_choice.plug(NULL);
    kernel_choice.unplug(NULL, dry);
    assert_true(computed(F32) == 42);
    expect_calls(start, 3, 2);
    kernel_choice.unplug(NULL, run);
    assert_true(computed(F32) == 0);
    expect_calls(start, 3, 2);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_table_stays_in_use_beside_a_dry_run)};
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("kernel_choice", tests, NULL, NULL);
}
