// heap.h: how far a heap grows for what a run allocates, and how much of it is holes.
//
// A heap fragments when long-lived blocks lie between short-lived ones:
//
//     [checkpoint][ hole ][checkpoint][ hole ][checkpoint][  next  ]
//
// Together the holes would be large enough, but no single one is, so the next block goes after them all.
// How far the heap grows depends on the allocator. This one is simulated, so the result is the same on
// every machine: it is told of each tensor that a run allocates and frees, and places it by first fit, at
// the lowest address at which it fits (Knuth, "The Art of Computer Programming" 1, section 2.5).
#ifndef HEAP_H
#define HEAP_H

#include "tensor/tensor.h"

enum { HEAP_ALIGNMENT = 64 };  // bytes; a block takes a multiple of that

typedef struct HeapBlock HeapBlock;

typedef struct Heap {
    HeapBlock *block;  // the live blocks, in address order
    int count, room;
    int64_t live, most_live;  // bytes held now, and at most
    int64_t end;              // the highest end of any block so far: without holes, most_live
} Heap;

// From now on places this process's activations in *heap, initially {0}; NULL: stops. Weights, gradients
// and optimizer state are allocated once and leave no holes. What was allocated before is not in the heap.
void heap_follow(Heap *heap);
void heap_free(Heap *heap);

#endif
