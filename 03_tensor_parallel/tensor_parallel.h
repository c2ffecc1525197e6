// tensor_parallel.h: what chapter 03 offers to others.
#ifndef TENSOR_PARALLEL_H
#define TENSOR_PARALLEL_H

#include "02_zero/zero.h"

// Every rank of mesh.tp computes its heads and its part of the feed-forward width on the same tokens.
// Embedding and output layer stay whole on every rank unless vocab_parallel shards them.
extern const Technique tensor_parallel;    // f, f*: x (n, h) on every rank; without --sp
extern const Technique sequence_parallel;  // g, g*: x (rows of this rank, h); with --sp
extern const Technique vocab_parallel;     // embedding, output layer and loss, with --vocab-parallel
// After sequence_parallel, with --async-tp: some rows are in flight while others are multiplied.
extern const Technique async_tensor_parallel;

// What the programs of this chapter list: data parallelism and ZeRO's stages, the above, recomputation.
extern const Technique *const tensor_layouts[];

typedef struct TensorParallel {
    Group tp;
    Sockets before;                       // sequence_parallel: those it replaced, called on own rows
    const Codec *send_rows, *send_drows;  // sequence_parallel: the recipe's; NULL: rows go as they are
} TensorParallel;

// tensor_parallel.c: which rows or columns of a block's matrices are this rank's, and what is left to store
// and keep.
void tensor_parallel_shard(Model *model);
void tensor_parallel_check(const Config *config);
void tensor_parallel_price_kept(Price *price, const Model *model);
// split_picture.c: which rank has which part of a block, as an SVG. device_dry_run must be on. check_picture:
// fatal if --svg asks for more ranks than it can show.
void tensor_parallel_picture(Mesh mesh, const char *file);
void tensor_parallel_check_picture(Mesh mesh, const Config *config);

// sequence_parallel.c. Of n rows a rank has [*first, *first + result), a contiguous run; the runs of the
// first n % size ranks are one row longer.
int64_t sequence_rows(int64_t n, int rank, int size, int64_t *first);
// sequence_tables.c: what a block sends, its shapes, and what it keeps, beside tensor parallelism alone.
void sequence_tables(Mesh mesh, const Config *config);

// async_overlap.c: what async_tensor_parallel hides, on the model clock.
void async_overlap(Mesh mesh, const Config *config);

// vocab_parallel.c
typedef struct VocabParallel {
    Group tp;
    VocabularyPart part;     // this rank's
    Sockets before;          // those it replaced: a lookup's output leaves through their region
    const Sockets *sockets;  // the current ones: the output layer's input enters through their region
} VocabParallel;

#endif
