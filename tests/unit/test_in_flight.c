// What is in flight belongs to its request: every operation that would write what a request reads, or
// access what it writes, is refused. What an operation writes is not taken from its table but observed: its
// arguments are compared before and after. And requests make progress at the end of each operation, and
// between the tiles of a long one.
#include <ctype.h>
#include <omp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "arrays.h"
#include "fatal.h"
#include "tensor/clock.h"
#include "tensor/device.h"
#include "tensor/in_flight.h"
#include "tensor/ops.h"

enum { N = 6, H = 8, V = 5, MOST = 9 };

// The tensors of one call, in the order in which the operation takes them.
static Tensor t[MOST];

static const AttentionShape shape = {1, N, 2, 1, H / 2};
static const VocabularyPart part = {V, 0, V};
static const RouteRule rule = {true, 1, 1, 2};
static const AdamW hyper = {
    .lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .grad_scale = 1, .step = 1};

static void fill(void) { op_fill(t[0], 3); }
static void copy(void) { op_copy(t[0], t[1]); }
static void add(void) { op_add(t[0], t[1], t[2]); }
static void accumulate(void) { op_accumulate(t[0], t[1]); }
static void scale(void) { op_scale(t[0], 3); }
static void sum(void) { op_sum(t[0]); }
static void sum_squares(void) { op_sum_squares(t[0]); }
static void squares_of_ranges(void) {
    op_squares_of_ranges(t[0], t[1], (FlatRange[]){{0, 1}, {1, 5}, {3, 2}, {0, 2}, {7, 1}, {9, 9}});
}
static void matmul(void) { op_matmul(t[0], t[1], t[2], false, true, 0); }
static void matmul_adds(void) { op_matmul(t[0], t[1], t[2], false, true, 1); }
static void embedding_forward(void) { op_embedding_forward(t[0], t[1], t[2]); }
static void embedding_backward(void) { op_embedding_backward(t[0], t[1], t[2]); }
static void rmsnorm_forward(void) { op_rmsnorm_forward(t[0], t[1], t[2], t[3], 1e-5); }
static void rmsnorm_backward(void) { op_rmsnorm_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6]); }
static void rope(void) { op_rope(t[0], t[1], H / 2, (Rope){.theta = 1e4}, 1); }
static void attention_forward(void) { op_attention_forward(t[0], t[1], t[2], t[3], t[4], shape); }
static void attention_probs(void) { op_attention_probs(t[0], t[1], t[2], shape); }
static void attention_backward(void) {
    op_attention_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], shape);
}
static void swiglu_forward(void) { op_swiglu_forward(t[0], t[1], t[2]); }
static void swiglu_backward(void) { op_swiglu_backward(t[0], t[1], t[2], t[3], t[4]); }
static void cross_entropy_forward(void) { op_cross_entropy_forward(t[0], t[1], t[2], t[3]); }
static void cross_entropy_backward(void) { op_cross_entropy_backward(t[0], t[1], t[2], t[3], 1); }
static void embedding_part_forward(void) { op_embedding_part_forward(t[0], t[1], t[2], part); }
static void embedding_part_backward(void) { op_embedding_part_backward(t[0], t[1], t[2], part); }
static void part_maxima(void) { op_cross_entropy_part_maxima(t[0], t[1], part); }
static void part_sums(void) { op_cross_entropy_part_sums(t[0], t[1], t[2], t[3], part); }
static void part_losses(void) { op_cross_entropy_part_losses(t[0], t[1], t[2], t[3], t[4]); }
static void part_backward(void) { op_cross_entropy_part_backward(t[0], t[1], t[2], t[3], 1, part); }
static void sum_parts(void) { op_sum_parts(t[0], t[1], N); }
static void route_forward(void) { op_route_forward(t[0], t[1], t[2], (Tensor){0}, rule); }
static void route_backward(void) { op_route_backward(t[0], t[1], t[2], t[3], t[4], rule); }
static void route_balance(void) {
    op_route_balance(t[0], t[1], t[2], t[3], N, (BalanceRule){0.1, 0, 1}, rule);
}
static void route_capacity(void) { op_route_capacity(t[0], t[1], N, V, 1); }
static void route_order(void) { op_route_order(t[0], t[1], t[2], t[3]); }
static void gather_rows(void) { op_gather_rows(t[0], t[1], t[2]); }
static void combine_forward(void) { op_combine_forward(t[0], t[1], t[2], t[3]); }
static void combine_backward(void) { op_combine_backward(t[0], t[1], t[2], t[3], t[4], t[5]); }
static void adamw(void) { op_adamw(t[0], (Tensor){0}, t[1], t[2], t[3], hyper); }
static void adamw_master(void) { op_adamw(t[0], t[1], t[2], t[3], t[4], hyper); }
static void sgd(void) { op_sgd(t[0], (Tensor){0}, t[1], 0.1, 1); }
static void sgd_master(void) { op_sgd(t[0], t[1], t[2], 0.1, 1); }
static void from_host(void) {
    float values[N * H] = {1};
    tensor_from_host(t[0], values);
}
static void to_host(void) {
    float values[N * H];
    tensor_to_host(values, t[0]);
}

// Shapes of the arguments: x (n, h), k (n, h/2), w (h), W (h, h), r (n), v (v, h), l (n, v), s (2, n),
// p (a, n, n), i (n) of i32, o (n) of i32 that differ, b bf16 (n, h), d f64 (n); q (n, 1), c (v, 1) of i32.
static const struct {
    const char *name;
    void (*call)(void);
    const char *arguments;
} operations[] = {
    {"fill", fill, "x"},
    {"copy", copy, "xx"},
    {"add", add, "xxx"},
    {"accumulate", accumulate, "xx"},
    {"scale", scale, "x"},
    {"sum", sum, "x"},
    {"sum_squares", sum_squares, "x"},
    {"squares_of_ranges", squares_of_ranges, "dx"},
    {"matmul", matmul, "xxW"},
    {"matmul", matmul_adds, "xxW"},
    {"embedding_forward", embedding_forward, "xiv"},
    {"embedding_backward", embedding_backward, "vxi"},
    {"rmsnorm_forward", rmsnorm_forward, "xrxw"},
    {"rmsnorm_backward", rmsnorm_backward, "xwxxxwr"},
    {"rope", rope, "xi"},
    {"attention_forward", attention_forward, "xpxkk"},
    {"attention_probs", attention_probs, "pxk"},
    {"attention_backward", attention_backward, "xkkxxkkp"},
    {"swiglu_forward", swiglu_forward, "xxx"},
    {"swiglu_backward", swiglu_backward, "xxxxx"},
    {"cross_entropy_forward", cross_entropy_forward, "rrli"},
    {"cross_entropy_backward", cross_entropy_backward, "llri"},
    {"embedding_part_forward", embedding_part_forward, "xiv"},
    {"embedding_part_backward", embedding_part_backward, "vxi"},
    {"cross_entropy_part_maxima", part_maxima, "rl"},
    {"cross_entropy_part_sums", part_sums, "slri"},
    {"cross_entropy_part_losses", part_losses, "rrrsi"},
    {"cross_entropy_part_backward", part_backward, "llri"},
    {"sum_parts", sum_parts, "wx"},
    {"route_forward", route_forward, "iql"},
    {"route_backward", route_backward, "lqqil"},
    {"route_balance", route_balance, "qlli"},
    {"route_capacity", route_capacity, "ii"},
    {"route_order", route_order, "iici"},
    {"gather_rows", gather_rows, "xxi"},
    {"combine_forward", combine_forward, "xxiq"},
    {"combine_backward", combine_backward, "xqxxoq"},
    {"adamw", adamw, "xxxx"},
    {"adamw", adamw_master, "bxxxx"},
    {"sgd", sgd, "xx"},
    {"sgd", sgd_master, "bxx"},
    {"tensor_from_host", from_host, "x"},
    {"tensor_to_host", to_host, "x"},
};
enum { OPERATIONS = sizeof operations / sizeof *operations };

static Tensor argument(char kind, int number) {
    const struct {
        char kind;
        int64_t rows, columns;
    } shapes[] = {{'x', N, H}, {'k', N, H / 2}, {'w', 1, H}, {'W', H, H}, {'r', 1, N},
                  {'v', V, H}, {'l', N, V},     {'s', 2, N}, {'i', 1, N}, {'p', 2 * N, N},
                  {'b', N, H}, {'q', N, 1},     {'c', V, 1}, {'d', 1, N},   {'o', 1, N}};
    int i = 0;
    while (shapes[i].kind != kind) i++;
    int64_t count = shapes[i].rows * shapes[i].columns;
    DType dtype = kind == 'b' ? BF16 : kind == 'd' ? F64 : F32;
    Array a = strchr("ico", kind)
                  ? random_tokens(count, V, (uint64_t)number)
                  : random_array(dtype, shapes[i].rows, shapes[i].columns, (uint64_t)(100 + number));
    if (kind == 'o') {
        for (int64_t j = 0; j < count; j++) a.x[j] = (double)(count - 1 - j);
        array_write(&a);
    }
    Tensor tensor = tensor_share(a.t);
    array_free(&a);
    return tensor;
}

static void set_up(const char *arguments) {
    for (int i = 0; arguments[i]; i++) t[i] = argument(arguments[i], i);
}

static void tear_down(void) {
    for (int i = 0; i < MOST; i++) tensor_free(&t[i]);
}

static const char *text(const void *request) { return request ? request : "a request"; }

static void call_dry(void *call) {
    device_dry_run(true);  // a child has no threads to compute with
    call_function(call);
}

// Whether the operation is refused, in a process of its own; its sentence is put into `sentence`.
static bool is_refused(void (*call)(void), char *sentence, size_t size) {
    Ended ended = run_apart(call_dry, &(Call){call});
    strncpy(sentence, ended.said, size - 1);
    sentence[size - 1] = 0;
    if (ended.status && !is_one_sentence(&ended))
        fail_msg("status %x, and \"%s\" instead of one sentence", (unsigned)ended.status, ended.said);
    return ended.status != 0;
}

static void every_operation_leaves_alone_what_is_in_flight(void **context) {
    (void)context;
    char sentence[1024], expected[128];
    for (int o = 0; o < OPERATIONS; o++) {
        const char *arguments = operations[o].arguments;
        bool is_op = o < OPERATIONS - 2;
        for (int i = 0; arguments[i]; i++) {
            // What the operation writes.
            set_up(arguments);
            uint8_t before[1024], after[1024];
            assert_true(tensor_bytes(t[i]) <= 1024);
            tensor_to_host(before, t[i]);
            operations[o].call();
            tensor_to_host(after, t[i]);
            bool writes = memcmp(before, after, (size_t)tensor_bytes(t[i])) != 0;
            in_flight_begin(t[i], false, 0, "all_reduce, call 12 in group dp", text);
            bool refused = is_refused(operations[o].call, sentence, sizeof sentence);
            if (refused != writes)
                fail_msg("%s %s argument %d, which a request reads, and is %s", operations[o].name,
                         writes ? "writes" : "only reads", i, refused ? "refused" : "let through");
            in_flight_end("all_reduce, call 12 in group dp");
            in_flight_begin(t[i], true, 0, "all_reduce, call 12 in group dp", text);
            if (!is_refused(operations[o].call, sentence, sizeof sentence))
                fail_msg("%s touches argument %d, which a request writes, and is let through",
                         operations[o].name, i);
            snprintf(expected, sizeof expected,
                     "%s%s %s 'activations' [bytes 0..%lld), which all_reduce, call 12", is_op ? "op_" : "",
                     operations[o].name, writes ? "writes" : "reads", (long long)tensor_bytes(t[i]));
            if (!strstr(sentence, expected)) fail_msg("%s is not in: %s", expected, sentence);
            in_flight_end("all_reduce, call 12 in group dp");
            tear_down();
        }
    }
}

static void scale_second_row(void) { op_scale(tensor_rows_of(t[0], 1, 1), 2); }

static void ranges_count_and_not_tensors(void **context) {
    (void)context;
    char sentence[1024];
    const char *first = "first", *second = "second";
    set_up("x");
    in_flight_begin(tensor_rows_of(t[0], 0, 1), true, 0, first, text);
    in_flight_begin(tensor_rows_of(t[0], 2, 1), true, 0, second, text);
    assert_false(is_refused(scale_second_row, sentence, sizeof sentence));
    in_flight_begin(tensor_view(t[0], 2 * H - 1, SHAPE(2)), false, 0, second, text);
    assert_true(is_refused(scale_second_row, sentence, sizeof sentence));
    assert_non_null(strstr(sentence, "[bytes 32..64), which second, is still reading"));
    in_flight_end(second);
    assert_false(is_refused(scale_second_row, sentence, sizeof sentence));
    assert_int_equal(in_flight_count, 1);
    in_flight_end(first);
    assert_int_equal(in_flight_count, 0);
    tear_down();
}

static atomic_int pushes, strays;
static void count_push(void) {
    pushes++;
    strays += gettid() != getpid();
}

static void the_end_of_an_operation_pushes_what_is_in_flight(void **context) {
    (void)context;
    void (*before)(void) = in_flight_push;
    const char *request = "request";
    Tensor other = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(N, H));
    in_flight_push = count_push;
    pushes = 0;
    set_up("x");
    op_fill(t[0], 1);
    assert_int_equal(pushes, 0);
    in_flight_begin(other, true, 0, request, text);
    op_fill(t[0], 1);
    assert_int_equal(pushes, 1);
    op_scale(t[0], 2);
    assert_int_equal(pushes, 2);
    in_flight_end(request);
    op_fill(t[0], 1);
    assert_int_equal(pushes, 2);
    in_flight_push = before;
    tear_down();
    tensor_free(&other);
}

// For some microseconds, outside any operation.
static double in_pushes;
static void slow_push(void) {
    double began = wall_seconds(), passed;
    while ((passed = wall_seconds() - began) < 50e-6) continue;
    clock_exclude(passed);
    in_pushes += passed;
}

// ---- long operations ----

enum { LONG = 512, HEADS = 4, D = 32, WIDTH = HEADS * D, SQUARE = 1024 };
static const AttentionShape long_shape = {1, LONG, HEADS, HEADS, D};
static const AttentionHeads heads = {HEADS, HEADS, D};
static AttentionPositions positions;
static AttentionMask mask;

static void long_matmul(void) { op_matmul(t[0], t[1], t[2], false, true, 0); }
static void long_matmuls(void) { op_matmuls(t, &t[2], 1, &t[2], 2, true, false, 1); }
static void long_forward(void) { op_attention_forward(t[0], t[1], t[2], t[3], t[4], long_shape); }
static void long_backward(void) {
    op_attention_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], long_shape);
}
static void long_chunk_forward(void) {
    op_attention_chunk_forward(t[0], t[1], t[2], t[3], t[4], &mask, heads);
}
static void long_chunk_backward(void) {
    op_attention_chunk_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], &mask, heads);
}

// 'm' square, 'x' rows of all heads, 'p' probs, 'r' a number for each row and head; capitals are f32 or f64.
static const struct {
    const char *name;
    void (*call)(void);
    const char *arguments;
    int least;  // pushes if one thread computes
} long_operations[] = {
    {"matmul", long_matmul, "mmm", 32},
    {"matmuls", long_matmuls, "mmmm", 64},
    {"attention_forward", long_forward, "xpxxx", HEADS *LONG / 32},
    {"attention_backward", long_backward, "xxxxxxxp", HEADS *LONG / 32},
    {"attention_chunk_forward", long_chunk_forward, "XRxxx", HEADS *LONG / 64},
    {"attention_chunk_backward", long_chunk_backward, "XXXxxxxRR", HEADS *LONG / 64},
};

// Under the sanitizers long products take twelve seconds, and test_ops tests them.
#ifdef __SANITIZE_ADDRESS__
enum { FIRST_LONG = 2 };
#else
enum { FIRST_LONG = 0 };
#endif

// If the tiles are our own: a multiply in f64, or without AVX-512, is left to BLAS.
static bool has_tiles(DType dtype, char kind) {
#if defined __AVX512F__ && defined __AVX512BW__ && defined __AVX512VL__
    const bool avx512 = true;
#else
    const bool avx512 = false;
#endif
    return kind != 'm' || (avx512 && dtype != F64);
}

static Tensor long_argument(DType dtype, char kind) {
    if (isupper(kind) && dtype != F64) dtype = F32;
    int64_t rows = kind == 'm' ? SQUARE : kind == 'p' ? HEADS * LONG : LONG;
    int64_t columns = kind == 'm' ? SQUARE : kind == 'p' ? LONG : toupper(kind) == 'R' ? HEADS : WIDTH;
    Tensor tensor = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(rows, columns));
    op_fill(tensor, 0.5);
    return tensor;
}

// How often an operation has pushed, on so many threads.
static int pushes_of(int o, DType dtype, int threads) {
    const char *request = "request";
    Tensor other = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(1));
    for (int i = 0; long_operations[o].arguments[i]; i++)
        t[i] = long_argument(dtype, long_operations[o].arguments[i]);
    omp_set_num_threads(threads);
    pushes = 0;
    in_flight_begin(other, true, 0, request, text);
    long_operations[o].call();
    in_flight_end(request);
    tear_down();
    tensor_free(&other);
    return pushes;
}

// Only the first thread may call MPI.
static void tiles_of_long_operations_push_on_the_first_thread(void **context) {
    (void)context;
    if (!backend_is_host()) {
        print_message("# not looked at: a GPU goes on by itself\n");
        return;
    }
    void (*before)(void) = in_flight_push;
    const int threads = omp_get_max_threads();
    in_flight_push = count_push;
    positions = attention_positions_whole(1, LONG);
    mask = attention_mask(&positions, &positions);
    for (size_t o = FIRST_LONG; o < sizeof long_operations / sizeof *long_operations; o++)
        for (int i = 0; i < 3; i++) {
            const DType dtype = (DType[]){F64, F32, BF16}[i];
            const int got = pushes_of((int)o, dtype, 1);
            if (has_tiles(dtype, long_operations[o].arguments[0]) && got < long_operations[o].least)
                fail_msg("%s in %s pushes %d times, and not %d", long_operations[o].name, dtype_name(dtype),
                         got, long_operations[o].least);
            pushes_of((int)o, dtype, 2);
            if (strays) fail_msg("%s pushes on another thread", long_operations[o].name);
        }
    omp_set_num_threads(threads);
    attention_positions_free(&positions);
    in_flight_push = before;
}

static void what_a_push_takes_is_not_the_operation_s(void **context) {
    (void)context;
    void (*before)(void) = in_flight_push;
    in_flight_push = slow_push;
    clock_reset();
    clock_trace_start();
    in_pushes = 0;
    double began = wall_seconds();
    pushes_of(3, F32, 1);
    double passed = wall_seconds() - began, counted = clock_total().wall_seconds;
    if (counted > passed - in_pushes || counted <= 0)
        fail_msg("operations took %g s of %g s, of which pushes took %g s", counted, passed, in_pushes);
    const Event *event;
    double shown = 0;
    for (int64_t i = clock_events(&event); i-- > 0;) shown += event[i].wall_end - event[i].wall;
    if (shown > passed - in_pushes || shown < counted)
        fail_msg("a trace shows %g s of operations, which took %g s of %g s, and pushes %g s", shown,
                 counted, passed, in_pushes);
    in_flight_push = before;
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation_leaves_alone_what_is_in_flight),
        cmocka_unit_test(ranges_count_and_not_tensors),
        cmocka_unit_test(the_end_of_an_operation_pushes_what_is_in_flight),
        cmocka_unit_test(what_a_push_takes_is_not_the_operation_s),
        cmocka_unit_test(tiles_of_long_operations_push_on_the_first_thread),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
