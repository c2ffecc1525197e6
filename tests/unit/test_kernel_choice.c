// test_kernel_choice.c: which operations run on the kernels of a table that --kernels names, also in a run
// during which another one is plugged and unplugged, like the dry run that prices a layout: the table stays
// in use, and calls are still counted. The table is this file's own, so that no GPU is needed.
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

static Model model_with(double kernels) {
    Model model = {.config = config_default("")};
    config_set(&model.config, "kernels", kernels);
    return model;
}

static void a_table_stays_in_use_beside_a_dry_run(void **state) {
    (void)state;
    Model book = model_with(1);
    const KernelCalls start = ops_kernel_calls();
    assert_true(computed(F32) == 0);
    void *run = kernel_choice.plug(&book);
    assert_true(computed(F32) == 42);
    assert_true(computed(F64) == 0);  // the table does not support it
    expect_calls(start, 2, 1);
    void *dry = kernel_choice.plug(&book);
    kernel_choice.unplug(&book, dry);
    assert_true(computed(F32) == 42);
    expect_calls(start, 3, 2);
    kernel_choice.unplug(&book, run);
    assert_true(computed(F32) == 0);
    expect_calls(start, 3, 2);
}

// What the table has besides attention is not used, and not counted.
static void attention_alone_leaves_the_rest(void **state) {
    (void)state;
    Model attention = model_with(2);
    const KernelCalls start = ops_kernel_calls();
    void *run = kernel_choice.plug(&attention);
    assert_true(computed(F32) == 0);
    expect_calls(start, 0, 0);
    kernel_choice.unplug(&attention, run);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_table_stays_in_use_beside_a_dry_run),
                                       cmocka_unit_test(attention_alone_leaves_the_rest)};
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("kernel_choice", tests, NULL, NULL);
}
