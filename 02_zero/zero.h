// zero.h: what chapter 02 offers to others: what data parallelism stores on every rank, sharded over these
// ranks.
#ifndef ZERO_H
#define ZERO_H

#include "01_data_parallel/data_parallel.h"

// ---- zero1.c, zero2.c, zero3.c: optimizer state; and gradients; and weights ----
extern const Technique zero1, zero2, zero3;
// hybrid_zero.c: zero3 among --shard-ranks neighbours, replicas across; the fifth choice of --zero.
extern const Technique hybrid_zero;
// Of these replicas the k neighbours among which this rank shards, or those that hold the same shard.
Group hybrid_zero_group(Group replicas, int k, bool inside);
// Its parts, for a record of ZeRO-3 that gathers at other times, which it takes as `inside`.
extern const Option hybrid_zero_option;
bool hybrid_zero_enabled(const Config *config);
void hybrid_zero_check(const Config *config);
void hybrid_zero_shard(Model *model);
void *hybrid_zero_plug(Model *model, const Technique *inside);
void hybrid_zero_unplug(Model *model, void *hybrid);
void hybrid_zero_price(Price *price, const Model *model, const void *hybrid);
// --zero 0|1|2|3, for programs that list several stages; one that lists a single stage has it on.
extern const Option zero_option;

// When the weights that each rank has stepped come to the others (--gather): behind the next forward,
// behind the step of the units that follow, or after the step.
typedef enum ZeroGather { GATHER_BEHIND_FORWARD, GATHER_BEHIND_STEP, GATHER_AFTER_STEP } ZeroGather;

// What the three stages have in flight.
typedef struct Zero {
    ZeroGather gather;    // zero1, zero2
    bool prefetch;        // zero3: a unit's weights are gathered while the unit before it computes
    Request **reduction;  // (units) of gradients, started and not yet waited for; else NULL
    Request **gathering;  // (units) of weights, likewise
    int reducing;         // zero2, zero3: the unit whose gradient is being reduced, or -1 …
    Tensor gradient;      // … and this gradient, whole
    bool at_head;         // zero3: between acquiring and releasing the head
    bool backward;        // zero3: the block that was acquired last is in its backward
} Zero;

bool zero_on(const Config *config, int stage);
// Of `count` elements those of member `rank`: *first and the returned number (zero1.c).
int64_t zero_part(int64_t count, int rank, int size, int64_t *first);
// The number of elements of each replica's part of a unit, for collectives. The caller frees them.
int64_t *zero_part_counts(const Unit *unit);
void zero_shard(Model *model, Sharding stage);
Zero *zero1_plug(Model *model);
Zero *zero2_plug(Model *model);
void zero_unplug(Model *model, void *zero);
void zero_wait(Request **request);  // if there is one; NULL then
// zero.c: calls, bytes and memory of a stage.
void zero_price(Price *price, const Model *model, const Zero *zero, int stage);

// ---- zero_twins.c: the proof that the three share ----
// Nothing is sharded, and sums run in the same order: over micro-batches and then ranks (zero1), or over
// ranks and then micro-batches (zero2, zero3).
extern const Technique *const zero_twin_of_1[], *const zero_twin_of_2_and_3[];

// Steps of Llama 3 8B, dry, on the model clock: 16,384 tokens a rank in one micro-batch, bf16, AdamW.
typedef struct ZeroVariant {
    const char *name;
    const Technique *technique;
    const char *setting;  // and the value of one; NULL: none
    double value;
} ZeroVariant;
// Prints and sets a row for each, and returns the shape.
Config zero_compare(Mesh mesh, const ZeroVariant *variants, int count, StepCost *cost);
// Whether the flags leave the model clock at DGX H100 and all of its peaks, for which some figures are
// asserted.
bool zero_on_standard_machine(const Config *config);
// zero3_overlap.c: from how many tokens on, and up to how many ranks, ZeRO-3 hides what it sends.
void zero3_overlap(Mesh mesh, const Config *config);

// ---- zero_r.c: what else fills memory ----
// Ranks of tp hold the same inputs of blocks: each keeps its part of them, and all-gathers them for
// recomputation.
typedef struct ZeroR {
    Group tp;
    bool contiguous;  // parts stand in one tensor, allocated once, instead of one tensor for each
    int64_t part;     // elements of the largest part
    Tensor arena;     // (L part) then …
    bool *held;       // … (L) in which a micro-batch holds its place; others in flight stand elsewhere
    Tensor flowing;   // (n h) then: what flows from block to block
} ZeroR;

// Fills the activations socket. *zero_r outlives the model's use.
void zero_r_plug(Model *model, ZeroR *zero_r);
void zero_r_unplug(Model *model, ZeroR *zero_r);

// Gradients are summed over the replicas after the last micro-batch, in one buffer of so many bytes at
// most.
typedef struct ConstantBuffer {
    int64_t bytes;
    Tensor buffer;  // flat, in the dtype of sums
} ConstantBuffer;

void constant_buffer_plug(Model *model, ConstantBuffer *buffer);  // fills the gradients socket
void constant_buffer_unplug(Model *model, ConstantBuffer *buffer);

#endif
