// zero.h: what chapter 02 offers to other chapters: the states that data parallelism stores on every rank,
// sharded over these ranks.
#ifndef ZERO_H
#define ZERO_H

#include "01_data_parallel/data_parallel.h"

// ---- zero1.c, zero2.c, zero3.c: optimizer state; and gradients; and weights ----
extern const Technique zero1, zero2, zero3;
// hybrid_zero.c: zero3 among --shard-ranks neighbours, replicas across; chapter 08's --zero hybrid.
extern const Technique hybrid_zero;
// A subgroup of `replicas`: the k neighbours that shard with this rank (inside), else those that hold the
// same shard.
Group hybrid_zero_group(Group replicas, int k, bool inside);
// Its parts, for a ZeRO-3 that gathers at other times, passed as `inside` (zero3_per_step.c).
extern const Option hybrid_zero_option;
bool hybrid_zero_enabled(const Config *config);
void hybrid_zero_check(const Config *config);
void hybrid_zero_shard(Model *model);
void *hybrid_zero_plug(Model *model, const Technique *inside);
void hybrid_zero_unplug(Model *model, void *hybrid);
void hybrid_zero_price(Price *price, const Model *model, const void *hybrid);
// --zero 0|1|2|3, for programs that list several stages; a program that lists a single one has it on.
extern const Option zero_option;

// When the updated weights are gathered (--gather): during the next forward, during the step of later units,
// or after the step.
typedef enum ZeroGather { GATHER_BEHIND_FORWARD, GATHER_BEHIND_STEP, GATHER_AFTER_STEP } ZeroGather;

// What the three stages have in flight.
typedef struct Zero {
    ZeroGather gather;    // zero1, zero2
    bool prefetch;        // zero3: a unit's weights are gathered while the unit before it computes
    Request **reduction;  // (units) of gradients, started and not yet waited for; else NULL
    Request **gathering;  // (units) of weights, likewise; the second half of the same allocation
    // zero2, zero3: the unit whose gradient is being reduced, or -1. `ready` ends a reduction before it
    // starts the next, `finish` ends the last, and nothing else changes this: hybrid_zero.c relies on it.
    int reducing;
    Tensor gradient;      // this gradient, whole
    bool at_head;         // zero3: between acquiring and releasing the head
    bool backward;        // zero3: the last acquired block is in its backward
} Zero;

bool zero_on(const Config *config, int stage);
// The part of `count` elements that member `rank` owns: *first, and returns how many (zero1.c).
int64_t zero_part(int64_t count, int rank, int size, int64_t *first);
// The number of elements in each replica's part of a unit, for collectives. The caller frees it.
int64_t *zero_part_counts(const Unit *unit);
void zero_shard(Model *model, Sharding stage);
Zero *zero1_plug(Model *model);
Zero *zero2_plug(Model *model);
void zero_unplug(Model *model, void *zero);
void zero_wait(Request **request);  // if there is one; sets it to NULL
// zero.c: calls, bytes and memory of a stage.
void zero_price(Price *price, const Model *model, const Zero *zero, int stage);

// ---- zero_twins.c: the proof that the three stages share ----
// DDP that shards nothing but sums in the same order: over micro-batches and then ranks (zero1), or over
// ranks and then micro-batches (zero2, zero3).
extern const Technique *const zero_twin_of_1[], *const zero_twin_of_2_and_3[];

// ---- zero_stages.c: Llama 3 8B on the model clock ----
// Dry steps: 16,384 tokens per rank in one micro-batch, bf16, AdamW.
typedef struct ZeroVariant {
    const char *name;
    const Technique *technique;
    const char *setting;  // to be set to `value`; NULL: none
    double value;
} ZeroVariant;
// Prints a row for each variant and sets its cost; returns the model's config.
Config zero_compare(Mesh mesh, const ZeroVariant *variants, int count, StepCost *cost);
// Whether the flags leave the model clock at a DGX H100 with its full peaks, for which some figures are
// asserted.
bool zero_on_standard_machine(const Config *config);
// All stages beside DDP: their steps, what a rank holds and sends; with --svg as a picture.
void zero_stages(Mesh mesh, const Config *config);
// zero3_overlap.c: at how many tokens, and up to how many ranks, ZeRO-3 hides its communication.
void zero3_overlap(Mesh mesh, const Config *config);

// ---- zero_r.c: what else fills memory ----
// Ranks of tp hold the same block inputs: each keeps only its part of them, and all-gathers them for
// recomputation.
typedef struct ZeroR {
    Group tp;
    bool contiguous;  // all parts are in one tensor, allocated once, instead of one tensor each
    int64_t part;     // elements of the largest part
    Tensor arena;     // (L part) if contiguous, a place for each block, and …
    bool *held;       // … (L) whether a micro-batch holds it; others in flight allocate their own
    Tensor flowing;   // (n h) if contiguous: what flows from block to block
} ZeroR;

// Fills the activations socket. *zero_r outlives the model's use.
void zero_r_plug(Model *model, ZeroR *zero_r);
void zero_r_unplug(Model *model, ZeroR *zero_r);

// Gradients are summed over the replicas after the last micro-batch, through one buffer of at most `bytes`
// bytes.
typedef struct ConstantBuffer {
    int64_t bytes;
    Tensor buffer;  // flat, in the dtype of sums
} ConstantBuffer;

void constant_buffer_plug(Model *model, ConstantBuffer *buffer);  // fills the gradients socket
void constant_buffer_unplug(Model *model, ConstantBuffer *buffer);

#endif
