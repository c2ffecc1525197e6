// heap.c: a simulated heap that shows its holes (heap.h): first fit, with a list of the live blocks.
#include "heap.h"

#include <stdlib.h>
#include <string.h>

struct HeapBlock {
    const void *memory;  // its address in the run
    int64_t first, bytes;
};

// Places a block in the first gap that is large enough.
static void add(Heap *heap, const void *memory, int64_t bytes) {
    if (heap->count == heap->room) {
        heap->room = heap->room ? 2 * heap->room : 256;
        heap->block = realloc(heap->block, heap->room * sizeof *heap->block);
        CHECK(heap->block, "out of host memory for the heap");
    }
    int place = 0;
    int64_t first = 0;
    for (; place < heap->count && heap->block[place].first - first < bytes; place++)
        first = heap->block[place].first + heap->block[place].bytes;
    memmove(heap->block + place + 1, heap->block + place, (heap->count++ - place) * sizeof *heap->block);
    heap->block[place] = (HeapBlock){memory, first, bytes};
    heap->live += bytes;
    if (heap->live > heap->most_live) heap->most_live = heap->live;
    if (first + bytes > heap->end) heap->end = first + bytes;
}

static void take_out(Heap *heap, const void *memory) {
    int place = 0;
    while (place < heap->count && heap->block[place].memory != memory) place++;
    if (place == heap->count) return;  // allocated before the heap began to follow
    heap->live -= heap->block[place].bytes;
    memmove(heap->block + place, heap->block + place + 1, (--heap->count - place) * sizeof *heap->block);
}

static void hear(void *context, MemoryKind kind, int64_t bytes, const void *memory) {
    if (kind != MEMORY_ACTIVATION) return;
    if (bytes > 0) add(context, memory, (bytes + HEAP_ALIGNMENT - 1) / HEAP_ALIGNMENT * HEAP_ALIGNMENT);
    else take_out(context, memory);
}

void heap_follow(Heap *heap) { memory_listen(heap ? hear : NULL, heap); }

void heap_free(Heap *heap) {
    free(heap->block);
    *heap = (Heap){0};
}
