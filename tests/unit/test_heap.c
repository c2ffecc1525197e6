// test_heap.c [PATTERN]: where zero_r's heap puts what a run allocates, and how far it reaches.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "02_zero/heap.h"

// So many lines of 64 bytes, minus a few bytes.
static Tensor lines(MemoryKind kind, int64_t count) { return tensor_new(kind, F32, SHAPE(16 * count - 3)); }

static void assert_heap(const Heap *heap, int64_t live, int64_t most_live, int64_t end) {
    assert_int_equal(heap->live, 64 * live);
    assert_int_equal(heap->most_live, 64 * most_live);
    assert_int_equal(heap->end, 64 * end);
}

static void a_block_takes_the_lowest_place_that_fits(void **state) {
    (void)state;
    Heap heap = {0};
    heap_follow(&heap);
    Tensor t[4];
    for (int i = 0; i < 4; i++) t[i] = lines(MEMORY_ACTIVATION, 2);  // 00112233
    assert_heap(&heap, 8, 8, 8);
    tensor_free(&t[0]);
    tensor_free(&t[2]);                          // __11__33
    Tensor small = lines(MEMORY_ACTIVATION, 1);  // s_11__33
    assert_heap(&heap, 5, 8, 8);
    Tensor fits = lines(MEMORY_ACTIVATION, 2);  // s_11ff33
    assert_heap(&heap, 7, 8, 8);
    Tensor large = lines(MEMORY_ACTIVATION, 2);  // s_11ff33LL, though one line is free
    assert_heap(&heap, 9, 9, 10);
    Tensor last = lines(MEMORY_ACTIVATION, 1);  // sl11ff33LL
    assert_heap(&heap, 10, 10, 10);
    tensor_free(&large);
    tensor_free(&t[3]);
    Tensor joined = lines(MEMORY_ACTIVATION, 4);  // two free neighbours are one hole
    assert_heap(&heap, 10, 10, 10);
    heap_follow(NULL);
    Tensor *left[] = {&t[1], &small, &fits, &last, &joined};
    for (int i = 0; i < 5; i++) tensor_free(left[i]);
    heap_free(&heap);
}

static void it_holds_activations_younger_than_itself(void **state) {
    (void)state;
    Heap heap = {0};
    Tensor older = lines(MEMORY_ACTIVATION, 3);
    heap_follow(&heap);
    Tensor weight = lines(MEMORY_PARAMETER, 5), own = lines(MEMORY_ACTIVATION, 1);
    tensor_free(&older);
    tensor_free(&weight);
    assert_heap(&heap, 1, 1, 1);
    heap_follow(NULL);
    Tensor later = lines(MEMORY_ACTIVATION, 2);
    assert_heap(&heap, 1, 1, 1);
    tensor_free(&own);
    tensor_free(&later);
    heap_free(&heap);
}

static void it_grows_with_its_blocks(void **state) {
    (void)state;
    enum { BLOCKS = 1000 };
    Heap heap = {0};
    static Tensor t[BLOCKS];
    heap_follow(&heap);
    for (int i = 0; i < BLOCKS; i++) t[i] = lines(MEMORY_ACTIVATION, 1);
    assert_heap(&heap, BLOCKS, BLOCKS, BLOCKS);
    for (int i = 0; i < BLOCKS; i++) tensor_free(&t[(i * 37 + 5) % BLOCKS]);
    assert_heap(&heap, 0, BLOCKS, BLOCKS);
    heap_follow(NULL);
    heap_free(&heap);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_block_takes_the_lowest_place_that_fits),
        cmocka_unit_test(it_holds_activations_younger_than_itself),
        cmocka_unit_test(it_grows_with_its_blocks),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
