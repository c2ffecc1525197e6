// data_parallel.h: what chapter 01 offers to other chapters.
#ifndef DATA_PARALLEL_H
#define DATA_PARALLEL_H

#include "00_single_gpu/harness.h"

// ---- ring_all_reduce.c: all-reduce built from sends to a neighbour ----
// All are in place and blocking; t has the same shape on all members. Chunks have count / n elements, the
// first count % n of them one more. Chunk i is summed from member i + 1 round to member i, rounded to t's
// dtype at each addition; every member gets the same bits.
Tensor ring_chunk(Tensor t, int i, Group ring);  // chunk i modulo n, borrowed
// Chunk `rank` becomes its sum; other chunks hold partial sums.
void ring_reduce_scatter(Tensor t, Group ring);
void ring_all_gather(Tensor t, Group ring);  // chunk i is taken from member i
void ring_all_reduce(Tensor t, Group ring);  // both

// ---- data parallelism: the gradients socket, four times ----
// Every rank of Unit.replicas holds the unit and takes its own samples; gradients are summed over these
// ranks. The loss is already divided by the number of labels on all ranks, so the sum is the gradient of the
// global batch.
extern const Technique ddp_naive;     // after a micro-batch's last backward, one parameter after another
extern const Technique ddp_overlap;   // each parameter as soon as its unit's gradient is final
extern const Technique ddp_bucketed;  // units are collected in buckets of --bucket-mb
extern const Technique ddp_no_sync;   // the same, but only for the last micro-batch

// ---- overlap_condition.c: from how many tokens on communication hides behind compute ----

// The least count below `most` that hides, by bisection; `most` if there is none.
int64_t fewest_that_hide(int64_t most, bool (*hides)(void *context, int64_t count), void *context);

typedef struct HidesFrom {
    const char *where;
    double formula, tolerance;          // tokens; by how far the clock may differ if memory costs nothing
    double most;                        // tokens, that are tried
    double (*by_clock)(void *context);  // the fewest tokens that hide it, on the current model clock
    void *context;
} HidesFrom;
// Prints three counts: by the formula, by the clock with free memory traffic, and by the clock.
void hides_from_title(void);
void hides_from_row(const HidesFrom *row);

Config llama_8b_layers(int64_t layers, int64_t sequences, int64_t seq);  // with a small vocabulary
double llama_8b_layer_elements(void);
void ddp_overlap_condition(Mesh mesh, const Config *config);

// ---- before_after.c: what all ranks hold before and after a call ----
typedef struct Held {  // a row for each rank; values on rank 0 only
    int ranks;
    int64_t width;   // of a row: a count, then up to width - 1 elements
    double *values;  // (ranks, width)
} Held;

typedef struct Example {
    const char *call;  // its name in comm_count
    Group group;
    Held before;
} Example;

// call: whose bytes are counted, from here on; NULL: those of all calls. before: what this rank holds, or
// {0}.
Example example_begin(const char *call, const char *title, Tensor before, Group group);
// Prints what all ranks hold before and after, compares `after` (or {0}) with `expected` and the bytes that
// this rank sent with `bytes`, and frees both tensors. `printed`: what the playbook prints, or NULL; used
// only if it shows as many ranks.
void example_end(Example *example, Tensor after, Tensor expected, double bytes, const char *printed);

#endif
