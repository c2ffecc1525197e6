// tensor_parallel.h: what chapter 03 offers to others.
#ifndef TENSOR_PARALLEL_H
#define TENSOR_PARALLEL_H

#include "02_zero/zero.h"

// Every rank of mesh.tp computes its heads and its part of the feed-forward width on the same tokens.
// Embedding and output layer stay whole on every rank unless vocab_parallel shards them.
extern const Technique tensor_parallel;    // f, f*: x (n, h) on every rank; without --sp
extern const Technique sequence_parallel;  // g, g*: x (rows of this rank, h); with --sp
extern const Technique vocab_parallel;     // embedding, output layer and loss, with --vocab-parallel
// After sequence_parallel, with --async-tp: rows are in flight while others are multiplied.
extern const Technique async_tensor_parallel;

// What the programs of this chapter list: data parallelism and ZeRO's stages, these, recomputation.
extern const Technique *const tensor_layouts[];

typedef struct TensorParallel {
    Group tp;
    Sockets before;                       // as they were: what these plugs add to, they call
    const Codec *send_rows, *send_drows;  // the recipe's; NULL: as they are
} TensorParallel;

// tensor_parallel.c: which rows or columns of a block's matrices are this rank's, and what is left to store
// and keep.
void tensor_parallel_shard(Model *model);
// split_picture.c: which rank has which part of a block, as an SVG. device_dry_run must be on.
void tensor_parallel_picture(Mesh mesh, const char *file);
void tensor_parallel_check(const Config *config);
void tensor_parallel_price_kept(Price *price, const Model *model);
// Wo and Wdown, whose inputs are sharded (Megatron's row-parallel; their rows here are columns).
static inline bool is_row_parallel(const Param *param) {
    return param->role == ROLE_O || param->role == ROLE_DOWN;
}

// sequence_parallel.c. The rows of n that a rank has, [*first, *first + returned): contiguous runs, of
// which the first n % size are a row longer.
int64_t sequence_rows(int64_t n, int rank, int size, int64_t *first);

// vocab_parallel.c
typedef struct VocabParallel {
    Group tp;
    VocabularyPart part;     // this rank's
    Sockets before;          // as they were: what a lookup leaves by
    const Sockets *sockets;  // as they are: what the output layer is entered by
} VocabParallel;

#endif
