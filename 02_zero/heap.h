// heap.h: how far a heap reaches for what a run allocates, and how much of that is holes.
//
// A heap fragments when blocks that live long stand between blocks that do not:
//
//     [checkpoint][ hole ][checkpoint][ hole ][checkpoint][  next  ]
//
// The holes have room enough together, but none alone, so the next block goes behind them all. How far that
// goes depends on the allocator. This one is simulated, and so reaches as far on every machine: it is told
// of each tensor that a run allocates and frees, and places it by first fit, at the lowest address at which
// it fits (Knuth, "The Art of Computer Programming" 1, section 2.5).
#ifndef HEAP_H
#define HEAP_H

#include "tensor/tensor.h"

enum { HEAP_ALIGNMENT = 64 };  // bytes; a block takes a multiple of that

typedef struct HeapBlock HeapBlock;

typedef struct Heap {
    HeapBlock *block;  // those that live, in the order of their addresses
    int count, room;
    int64_t live, most_live;  // bytes held now, and at most
    int64_t end;              // where the highest block ever ended: with no hole, at most_live
} Heap;

// From now on places this process's activations in *heap, {0} at first; NULL: no longer. Weights, gradients
// and optimizer state are allocated once, and tear no holes. What is older than the heap is not in it.
void heap_follow(Heap *heap);
void heap_free(Heap *heap);

#endif
