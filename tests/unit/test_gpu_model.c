// test_gpu_model.c: occupancy as in the CUDA occupancy calculator, and the roofline of counted work.
#include <math.h>

#include "cuda/gpu_model.h"

// cmocka.h needs these before it
// clang-format off
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
// clang-format on

// Worked out by hand from the table of technical specifications per compute capability in the CUDA C++
// programming guide: 64 warps, 32 blocks, 65536 registers; 164 or 228 kB of shared memory, 1 kB of each
// block reserved.
static void occupancy_follows_the_rules(void **state) {
    (void)state;
    static const struct {
        int threads, registers, shared, blocks_a100, blocks_h100;
        const char *limited_by;  // on an A100
    } rows[] = {
        {256, 32, 0, 8, 8, "warps"},
        {1024, 32, 0, 2, 2, "warps"},
        {1024, 33, 0, 1, 1, "registers"},  // 40 x 32 a warp: 51 warps, of which 48 can be used
        {256, 40, 0, 6, 6, "registers"},   // 48 warps
        {256, 64, 0, 4, 4, "registers"},   // 32 warps
        {256, 65, 0, 3, 3, "registers"},   // 72 x 32 a warp: 28 warps
        {128, 255, 0, 2, 2, "registers"},  // 8 warps
        {32, 16, 0, 32, 32, "blocks"},     // half of the warps
        {33, 16, 0, 32, 32, "warps"},      // the second warp has one thread
        {256, 32, 8 << 10, 8, 8, "warps"},
        {256, 32, 48 << 10, 3, 4, "shared memory"},  // 49 kB each
        {128, 32, 10161, 14, 16, "shared memory"},   // 10240 + 1024: 14.9 of them, and 20 x 4 warps > 64
        {128, 32, 163 << 10, 1, 1, "shared memory"},
        {96, 56, 0, 12, 12, "registers"},   // 1792 a warp: 36 warps
        {128, 33, 0, 12, 12, "registers"},  // 1280 a warp, and not 1056: 51 warps
        {96, 33, 0, 16, 16, "registers"},   // of these 51, 48 can be used
        {256, 0, 0, 8, 8, "warps"},         // a kernel without registers
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Occupancy a = gpu_occupancy(gpu_find("a100"), rows[i].threads, rows[i].registers, rows[i].shared);
        Occupancy h = gpu_occupancy(gpu_find("h100"), rows[i].threads, rows[i].registers, rows[i].shared);
        assert_int_equal(a.blocks, rows[i].blocks_a100);
        assert_int_equal(h.blocks, rows[i].blocks_h100);
        assert_string_equal(a.limited_by, rows[i].limited_by);
        assert_int_equal(a.warps, a.blocks * ((rows[i].threads + 31) / 32));
        assert_true(a.share == a.warps / 64.0);
    }
}

static void what_does_not_fit_has_no_blocks(void **state) {
    (void)state;
    const Gpu *a100 = gpu_find("a100"), *h100 = gpu_find("h100");
    assert_int_equal(gpu_occupancy(a100, 1025, 32, 0).blocks, 0);
    assert_int_equal(gpu_occupancy(a100, 128, 256, 0).blocks, 0);
    assert_int_equal(gpu_occupancy(a100, 1024, 72, 0).blocks, 0);  // 28 warps
    assert_int_equal(gpu_occupancy(a100, 128, 32, (163 << 10) + 1).blocks, 0);
    assert_int_equal(gpu_occupancy(h100, 128, 32, (163 << 10) + 1).blocks, 1);
    assert_int_equal(gpu_occupancy(h100, 128, 32, (227 << 10) + 1).blocks, 0);
}

static void near(double x, double y) { assert_true(fabs(x - y) <= 1e-9 * y); }

// Each part by itself, for work that occupies it for one second.
static void each_part_has_its_roof(void **state) {
    (void)state;
    const Gpu *h100 = gpu_find("h100");
    double clocks = 132 * 1.83e9;
    Work seconds[PARTS] = {
        {.memory_sectors = 3.35e12 / 32},
        {.load_sectors = 80 * 1.83e9, .store_sectors = 80 * 1.83e9},  // 5120 bytes a clock
        {.shared_passes = 0.25 * clocks, .shared_conflicts = 0.75 * clocks},
        {.flop_instructions = 4 * clocks, .flops = 1},  // idle lanes cost as much
        {.special_instructions = clocks / 2},
        {.tensor_flops = 4096 * clocks},
    };
    for (int p = 0; p < PARTS; p++) {
        GpuTime time = gpu_time(h100, &seconds[p]);
        near(time.seconds, 1);
        assert_int_equal(time.busiest, p);
        for (int other = 0; other < PARTS; other++) assert_true(other == p || time.part[other] == 0);
    }
    near(gpu_time(gpu_find("a100"), &(Work){.tensor_flops = 312e12}).seconds,
         312e12 / (2048 * 108 * 1.41e9));
    Work both = {.memory_sectors = 3.35e12 / 32, .tensor_flops = 8192 * clocks};
    near(gpu_time(h100, &both).seconds, 2);
    both.tensor_8_flops = 2 * 8192 * clocks;  // twice as many in a second, of the same tensor cores
    near(gpu_time(h100, &both).seconds, 4);
    assert_string_equal(part_name(gpu_time(h100, &both).busiest), "tensor");
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(occupancy_follows_the_rules),
        cmocka_unit_test(what_does_not_fit_has_no_blocks),
        cmocka_unit_test(each_part_has_its_roof),
    };
    return cmocka_run_group_tests_name("gpu_model", tests, NULL, NULL);
}
