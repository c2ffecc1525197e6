// What a run counts, the model clock to the last digit, and the trace file.
#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tensor/clock.h"

// cmocka.h needs these before it
// clang-format off
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
// clang-format on

// In a failure message, the numbers on the left are what the test got.
#define ASSERT_SAME(got, expected)                                                             \
    do {                                                                                       \
        double got_ = (got), expected_ = (expected);                                           \
        if (got_ != expected_) fail_msg("%s is %.17g, expected %.17g", #got, got_, expected_); \
    } while (0)

static void operate(const char *name, DType dtype, double flops, double bytes) {
    clock_begin(name, dtype, flops, bytes);
    clock_end();
}

static int start_again(void **context) {
    (void)context;
    clock_set_machine(machine_find("dgx-h100"));
    clock_reset();
    return 0;
}

static const OpCount *find(int count, const OpCount *list, const char *name) {
    for (int i = 0; i < count; i++)
        if (!strcmp(list[i].name, name)) return &list[i];
    fail_msg("%s was not counted", name);
    return NULL;
}

static const OpCount *operation(const char *name) {
    const OpCount *list;
    int count = clock_operations(&list);
    return find(count, list, name);
}

static void every_operation_counts_calls_flops_and_bytes(void **context) {
    (void)context;
    operate("matmul", F32, 100, 10);
    operate("add", F32, 0, 30);
    operate("matmul", F32, 20, 5);
    const OpCount *list;
    assert_int_equal(clock_operations(&list), 2);
    assert_string_equal(list[0].name, "matmul");  // in order of first use
    assert_int_equal(list[0].calls, 2);
    ASSERT_SAME(list[0].flops, 120);
    ASSERT_SAME(list[0].bytes, 15);
    OpCount total = clock_total();
    assert_int_equal(total.calls, 3);
    ASSERT_SAME(total.flops, 120);
    ASSERT_SAME(total.bytes, 45);
    assert_true(total.wall_seconds >= 0 && total.wall_seconds < 10);
}

static void the_same_name_at_another_address_is_one_operation(void **context) {
    (void)context;
    char copy[] = "matmul";
    operate("matmul", F32, 1, 1);
    operate(copy, F32, 2, 2);
    assert_int_equal(operation("matmul")->calls, 2);
    const OpCount *list;
    assert_int_equal(clock_operations(&list), 1);
    clock_reset();
}

static void reset_starts_from_nothing(void **context) {
    (void)context;
    operate("matmul", F32, 1, 1);
    clock_push("step 1");
    clock_pop();
    clock_reset();
    const OpCount *list;
    assert_int_equal(clock_operations(&list), 0);
    assert_int_equal(clock_marks(&list), 0);
    ASSERT_SAME(clock_total().flops, 0);
    ASSERT_SAME(clock_total().model_seconds, 0);
    assert_int_equal(clock_total().calls, 0);
}

// max(FLOPs / peak, bytes / bandwidth): one operation on each side of the ridge point, and one without FLOPs.
static void the_model_clock_takes_the_larger_of_compute_and_memory(void **context) {
    (void)context;
    operate("compute bound", BF16, 989e9, 3.35e6);
    ASSERT_SAME(operation("compute bound")->model_seconds, 989e9 / 989e12);
    operate("memory bound", BF16, 989e6, 3.35e9);
    ASSERT_SAME(operation("memory bound")->model_seconds, 3.35e9 / 3.35e12);
    operate("copy", E4M3, 0, 3.35e6);
    ASSERT_SAME(operation("copy")->model_seconds, 3.35e6 / 3.35e12);
    ASSERT_SAME(clock_total().model_seconds, 989e9 / 989e12 + 3.35e9 / 3.35e12 + 3.35e6 / 3.35e12);
}

// The denominator of MFU is the peak of the dtype in which a step computes.
static void each_dtype_has_its_own_peak(void **context) {
    (void)context;
    const struct {
        const char *machine;
        DType dtype;
        double peak;
    } rows[] = {{"dgx-a100", BF16, 312e12}, {"dgx-a100", F16, 312e12},  {"dgx-a100", F32, 19.5e12},
                {"dgx-a100", F64, 19.5e12}, {"dgx-h100", BF16, 989e12}, {"dgx-h100", F32, 67e12},
                {"dgx-h100", F64, 67e12},   {"h200", F16, 989e12},      {"h200", F32, 67e12},
                {"dgx-a100", E4M3, 312e12}, {"dgx-h100", E4M3, 1978e12}, {"h200", E5M2, 1978e12}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        clock_reset();
        clock_set_machine(machine_find(rows[i].machine));
        ASSERT_SAME(machine_peak_flops(machine_find(rows[i].machine), rows[i].dtype), rows[i].peak);
        operate("matmul", rows[i].dtype, 1e15, 1);
        ASSERT_SAME(clock_total().model_seconds, 1e15 / rows[i].peak);
    }
}

// Each side of the roofline reaches a share of its own, which depends on the size; without a row, all of it.
static void efficiency_comes_from_one_table(void **context) {
    (void)context;
    static const Efficiency table[] = {{WORK_MATMUL, 1e12, 0.5},  {WORK_MATMUL, 0, 0.25},
                                       {WORK_ATTENTION, 0, 0.125}, {WORK_MEMORY, 1e6, 0.8},
                                       {WORK_COLLECTIVE, 1e6, 0.5}};
    double small = clock_collective_seconds("all_reduce", 1e5, 8, 1, 8),
           large = clock_collective_seconds("all_reduce", 1e9, 8, 1, 8);
    double latency = 14 * machine_find("dgx-h100")->node_latency;
    clock_set_efficiency(table, sizeof table / sizeof *table);
    ASSERT_SAME(clock_efficiency(WORK_MATMUL, 1e12), 0.5);
    ASSERT_SAME(clock_efficiency(WORK_MATMUL, 9e11), 0.25);
    ASSERT_SAME(clock_efficiency(WORK_MEMORY, 10), 1);
    operate("matmul", BF16, 989e9, 1);
    ASSERT_SAME(operation("matmul")->model_seconds, 989e9 / 989e12 / 0.25);
    operate("attention_forward", BF16, 989e12, 1);
    ASSERT_SAME(operation("attention_forward")->model_seconds, 8);
    operate("add", BF16, 0, 3.35e12);
    ASSERT_SAME(operation("add")->model_seconds, 1 / 0.8);
    ASSERT_SAME(clock_collective_seconds("all_reduce", 1e5, 8, 1, 8), small);
    double twice = clock_collective_seconds("all_reduce", 1e9, 8, 1, 8) - latency, bound = 1e-12;
    assert_true(twice - 2 * (large - latency) < bound && 2 * (large - latency) - twice < bound);
    Traffic near = {1, 1e9, 0}, far = {0};
    double message = clock_transfers_seconds(near, far);
    clock_set_efficiency(NULL, 0);
    double plain = clock_transfers_seconds(near, far), step = machine_find("dgx-h100")->node_latency;
    double error = message - step - 2 * (plain - step);
    assert_true(error < bound && -error < bound);
    ASSERT_SAME(clock_efficiency(WORK_MATMUL, 1e12), 1);
}

static void the_h200_differs_from_the_h100_in_memory(void **context) {
    (void)context;
    const Machine *h100 = machine_find("dgx-h100"), *h200 = machine_find("h200");
    ASSERT_SAME(h100->memory_bytes_per_second, 3.35e12);
    ASSERT_SAME(h200->memory_bytes_per_second, 4.8e12);
    ASSERT_SAME(h100->memory_bytes, 80e9);
    ASSERT_SAME(h200->memory_bytes, 141e9);
    ASSERT_SAME(machine_find("dgx-a100")->memory_bytes_per_second, 2.039e12);
    assert_string_equal(machine_names(), "dgx-a100|dgx-h100|h200");
}

// Datasheets give NVLink's bytes of both ways, and a network's bits.
static void each_machine_has_its_own_links(void **context) {
    (void)context;
    static const struct {
        const char *name;
        double node, network;
    } rows[] = {{"dgx-a100", 600e9 / 2, 200e9 / 8}, {"dgx-h100", 900e9 / 2, 400e9 / 8},
                {"h200", 900e9 / 2, 400e9 / 8}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const Machine *machine = machine_find(rows[i].name);
        ASSERT_SAME(machine->node_bytes_per_second, rows[i].node);
        ASSERT_SAME(machine->network_bytes_per_second, rows[i].network);
        ASSERT_SAME(machine->node_latency, 3.4e-6);
        ASSERT_SAME(machine->network_latency, 9.6e-6);
        assert_int_equal(machine->gpus_per_node, 8);
    }
}

// Of a node's link and the network's, which work at once, each reaches what its own bytes let it.
static void each_link_reaches_what_its_bytes_let_it(void **context) {
    (void)context;
    static const Efficiency table[] = {{WORK_COLLECTIVE, 1e6, 0.5}};
    clock_set_efficiency(table, 1);
    const double far = clock_transfers_seconds((Traffic){1, 1e3, 0}, (Traffic){1, 0, 1e9}),
                 near = clock_transfers_seconds((Traffic){1, 0, 1e9}, (Traffic){1, 1e3, 0});
    clock_set_efficiency(NULL, 0);
    assert_true(fabs(far / (9.6e-6 + 1e9 / 50e9 / 0.5) - 1) < 1e-12);
    assert_true(fabs(near / (9.6e-6 + 1e9 / 450e9 / 0.5) - 1) < 1e-12);
}

static void a_wait_lasts_until_its_time_and_no_longer(void **context) {
    (void)context;
    clock_model_set(5);
    ASSERT_SAME(clock_model_wait(4), 0);
    ASSERT_SAME(clock_model_now(), 5);
    ASSERT_SAME(clock_model_wait(7), 2);
    ASSERT_SAME(clock_model_now(), 7);
}

// A number belongs to a mark's name unless a blank stands before it.
static void only_a_number_after_a_blank_is_left_out(void **context) {
    (void)context;
    static const char *const names[] = {"zero3", "zero1", "12", "a b2"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        clock_push(names[i]);
        clock_pop();
        assert_int_equal(clock_mark(names[i]).calls, 1);
    }
}

static void marks_add_up_by_path_without_their_numbers(void **context) {
    (void)context;
    for (int step = 1; step <= 12; step++) {
        char name[32];
        snprintf(name, sizeof name, "step %d", step);
        clock_push(name);
        clock_push("forward");
        operate("matmul", F32, 10, 1);
        clock_pop();
        clock_push("backward");
        operate("matmul", F32, 20, 2);
        clock_pop();
        operate("adamw", F32, 0, 7);
        clock_pop();
    }
    const OpCount *list;
    assert_int_equal(clock_marks(&list), 3);
    assert_int_equal(clock_mark("step").calls, 12);
    assert_int_equal(clock_mark("step 3").calls, 0);
    ASSERT_SAME(clock_mark("step").flops, 360);
    ASSERT_SAME(clock_mark("step").bytes, 120);
    ASSERT_SAME(clock_mark("step/forward").flops, 120);
    ASSERT_SAME(clock_mark("step/backward").flops, 240);
    assert_true(clock_mark("step").wall_seconds >= clock_mark("step/forward").wall_seconds);
    assert_true(clock_mark("step").model_seconds > clock_mark("step/backward").model_seconds);
}

static void a_reset_inside_a_mark_counts_from_there(void **context) {
    (void)context;
    clock_push("step 1");
    operate("matmul", F32, 10, 1);
    clock_reset();
    operate("matmul", F32, 5, 1);
    clock_pop();
    ASSERT_SAME(clock_mark("step").flops, 5);
    assert_int_equal(clock_mark("step").calls, 1);
}

// ---- the trace ----

static char *trace_text(void) {
    char file[] = "/tmp/trace-XXXXXX";
    int descriptor = mkstemp(file);
    assert_true(descriptor >= 0);
    close(descriptor);
    FILE *out = clock_trace_open(file);
    clock_trace_part(out, 0, 1);
    clock_trace_close(out, file);
    FILE *in = fopen(file, "r");
    assert_non_null(in);
    char *text = calloc(1, 1 << 20);
    assert_true(fread(text, 1, (1 << 20) - 1, in) > 0);
    fclose(in);
    remove(file);
    return text;
}

static cJSON *traced(void) {
    char *text = trace_text();
    cJSON *trace = cJSON_Parse(text);
    if (!trace) fail_msg("the trace is no JSON: %.200s", text);
    free(text);
    return trace;
}

static const char *text_of(const cJSON *event, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(event, key);
    return cJSON_IsString(item) ? item->valuestring : "";
}

static double number_of(const cJSON *event, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(event, key);
    if (!cJSON_IsNumber(item)) fail_msg("event without %s", key);
    return item ? item->valuedouble : 0;
}

// Walks one process: depth never negative, 0 at the end; operations lie within the mark that is open.
static void check_nesting(const cJSON *trace, int pid, int expected_marks, int expected_operations) {
    const cJSON *event;
    double opened[8], last = 0;
    int depth = 0, marks = 0, operations = 0;
    cJSON_ArrayForEach(event, cJSON_GetObjectItemCaseSensitive(trace, "traceEvents")) {
        const char *phase = text_of(event, "ph");
        if ((int)number_of(event, "pid") != pid || !strcmp(phase, "M")) continue;
        double ts = number_of(event, "ts");
        if (!(ts >= last - 1e-3)) fail_msg("time runs backwards: %.6f after %.6f", ts, last);
        last = ts;
        if (!strcmp(phase, "B")) opened[depth++] = ts, marks++;
        if (!strcmp(phase, "E") && (--depth < 0 || ts < opened[depth]))
            fail_msg("an end without its begin");
        if (!strcmp(phase, "X")) {
            operations++;
            last = ts + number_of(event, "dur");
            assert_true(number_of(event, "dur") >= 0);
        }
    }
    assert_int_equal(depth, 0);
    assert_int_equal(marks, expected_marks);
    assert_int_equal(operations, expected_operations);
}

static void the_trace_nests_marks_and_operations_on_both_clocks(void **context) {
    (void)context;
    clock_push("before \"the\" trace\n");  // open when it starts: belongs to it
    clock_trace_start();
    for (int step = 0; step < 3; step++) {
        clock_push("step 1");
        operate("matmul", BF16, 989e9, 1);
        clock_push("block 0");
        operate("add", BF16, 0, 3.35e9);
        clock_pop();
        clock_pop();
    }
    clock_push("still open");
    clock_begin("matmul", BF16, 989e9, 1);  // likewise: a run may break in an operation
    cJSON *trace = traced();
    clock_end();
    check_nesting(trace, 0, 8, 7);
    check_nesting(trace, 1, 8, 7);
    cJSON_Delete(trace);
    clock_pop();
    clock_pop();
}

// JSON strings have no raw control characters, and a backslash before quotes and backslashes.
static void the_trace_has_any_name_as_it_is(void **context) {
    (void)context;
    const char *name = "a \"b\" \\ \x1f\x01\n";
    clock_trace_start();
    clock_push(name);
    clock_pop();
    char *text = trace_text();
    for (const char *c = text; *c; c++) assert_true((unsigned char)*c >= 0x20 || *c == '\n');
    cJSON *trace = cJSON_Parse(text);
    if (!trace) fail_msg("the trace is no JSON: %.400s", text);
    int seen = 0;
    const cJSON *event;
    cJSON_ArrayForEach(event, cJSON_GetObjectItemCaseSensitive(trace, "traceEvents")) {
        seen += !strcmp(text_of(event, "name"), name);
    }
    assert_int_equal(seen, 2);  // on both clocks
    cJSON_Delete(trace);
    free(text);
}

// Of a dry run, too, a trace says how long each operation took to be counted.
static void the_trace_of_a_dry_run_has_the_wall_clock(void **context) {
    (void)context;
    device_dry_run(true);
    clock_trace_start();
    operate("counted", F32, 1, 1);
    device_dry_run(false);
    const Event *events;
    const int64_t count = clock_events(&events);
    assert_int_equal(count, 1);
    assert_true(events[0].wall_end >= events[0].wall && events[0].wall >= clock_trace_origin(false));
}

static void the_trace_has_exact_model_times_and_memory_by_kind(void **context) {
    (void)context;
    clock_trace_start();
    operate("first", BF16, 989e9, 1);
    void *memory = device_alloc(MEMORY_OPTIMIZER, 4096);
    operate("second", BF16, 0, 3.35e9);
    device_free(MEMORY_OPTIMIZER, memory, 4096);
    operate("third", BF16, 0, 0);
    cJSON *trace = traced();
    const cJSON *event;
    int seen = 0, memories = 0;
    const double held[] = {0, 4096, 0};
    cJSON_ArrayForEach(event, cJSON_GetObjectItemCaseSensitive(trace, "traceEvents")) {
        if (number_of(event, "pid") != 1) continue;
        if (!strcmp(text_of(event, "ph"), "C")) {
            const cJSON *kinds = cJSON_GetObjectItemCaseSensitive(event, "args");
            assert_int_equal(cJSON_GetArraySize(kinds), MEMORY_KINDS);
            assert_true(memories < 3);
            ASSERT_SAME(number_of(kinds, memory_kind_name(MEMORY_OPTIMIZER)), held[memories]);
            memories++;
        }
        if (strcmp(text_of(event, "ph"), "X")) continue;
        // microseconds: each of the first two operations takes 1 ms on this machine
        assert_string_equal(text_of(event, "name"), ((const char *[]){"first", "second", "third"})[seen]);
        double ts = number_of(event, "ts"), expected = 1000.0 * seen;
        if (!(ts - expected < 1e-6 && expected - ts < 1e-6)) fail_msg("%d begins at %.9f us", seen, ts);
        ASSERT_SAME(number_of(event, "dur"), seen < 2 ? 1000 : 0);
        seen++;
    }
    assert_int_equal(seen, 3);
    assert_int_equal(memories, 3);
    cJSON_Delete(trace);
}

// The last test: the model clock never comes back from there.
static void the_trace_says_null_of_what_is_not_finite(void **context) {
    (void)context;
    clock_trace_start();
    operate("endless", F32, INFINITY, NAN);
    cJSON *trace = traced();
    const cJSON *event;
    int seen = 0;
    cJSON_ArrayForEach(event, cJSON_GetObjectItemCaseSensitive(trace, "traceEvents")) {
        if (strcmp(text_of(event, "name"), "endless") != 0) continue;
        const cJSON *figures = cJSON_GetObjectItemCaseSensitive(event, "args");
        assert_true(cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(figures, "flops")));
        assert_true(cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(figures, "bytes")));
        if (number_of(event, "pid") == 1)
            assert_true(cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(event, "dur")));
        seen++;
    }
    assert_int_equal(seen, 2);
    cJSON_Delete(trace);
}

// With 16 GPUs in a node their ports together are wider than NVLink, which then bounds a ring.
static void a_ring_is_as_wide_as_the_narrower_of_nvlink_and_all_ports(void **state) {
    (void)state;
    double of_ports = clock_collective_seconds("all_gather", 64e9, 16, 2, 8),
           of_nvlink = clock_collective_seconds("all_gather", 64e9, 32, 2, 16);
    assert_true(fabs(of_ports / (14 * 3.4e-6 + 9.6e-6 + 15 * 4e9 / (8 * 50e9)) - 1) < 1e-9);
    assert_true(fabs(of_nvlink / (30 * 3.4e-6 + 9.6e-6 + 31 * 2e9 / 450e9) - 1) < 1e-9);
}

static void what_is_reached_follows_both_efficiencies(void **state) {
    (void)state;
    clock_set_cluster(0, 0.5, 0.25);
    Machine reached = clock_reached();
    clock_set_cluster(0, 1, 1);
    assert_true(reached.flops[BF16] == 989e12 / 2 && reached.memory_bytes_per_second == 3.35e12 / 2);
    assert_true(reached.node_bytes_per_second == 450e9 / 4 && reached.network_bytes_per_second == 50e9 / 4);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(every_operation_counts_calls_flops_and_bytes, start_again),
        cmocka_unit_test_setup(the_same_name_at_another_address_is_one_operation, start_again),
        cmocka_unit_test_setup(reset_starts_from_nothing, start_again),
        cmocka_unit_test_setup(the_model_clock_takes_the_larger_of_compute_and_memory, start_again),
        cmocka_unit_test_setup(each_dtype_has_its_own_peak, start_again),
        cmocka_unit_test_setup(efficiency_comes_from_one_table, start_again),
        cmocka_unit_test_setup(the_h200_differs_from_the_h100_in_memory, start_again),
        cmocka_unit_test_setup(a_ring_is_as_wide_as_the_narrower_of_nvlink_and_all_ports, start_again),
        cmocka_unit_test_setup(what_is_reached_follows_both_efficiencies, start_again),
        cmocka_unit_test_setup(each_machine_has_its_own_links, start_again),
        cmocka_unit_test_setup(each_link_reaches_what_its_bytes_let_it, start_again),
        cmocka_unit_test_setup(a_wait_lasts_until_its_time_and_no_longer, start_again),
        cmocka_unit_test_setup(only_a_number_after_a_blank_is_left_out, start_again),
        cmocka_unit_test_setup(marks_add_up_by_path_without_their_numbers, start_again),
        cmocka_unit_test_setup(a_reset_inside_a_mark_counts_from_there, start_again),
        cmocka_unit_test_setup(the_trace_nests_marks_and_operations_on_both_clocks, start_again),
        cmocka_unit_test_setup(the_trace_has_any_name_as_it_is, start_again),
        cmocka_unit_test_setup(the_trace_of_a_dry_run_has_the_wall_clock, start_again),
        cmocka_unit_test_setup(the_trace_has_exact_model_times_and_memory_by_kind, start_again),
        cmocka_unit_test_setup(the_trace_says_null_of_what_is_not_finite, start_again),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
