// cost_lone.h: the cost of a layout of this book's own programs: the records' code and closed forms,
// evaluated by one process that stands for all ranks.
#ifndef COST_LONE_H
#define COST_LONE_H

#include <math.h>

#include "00_single_gpu/harness.h"
#include "05_pipeline_parallel/schedule.h"

// A layout is a Config as train_5d has it: degrees, micro_batch, grad_acc, recompute, and the settings sp,
// vocab-parallel, zero, context, schedule and chunks.

// What arrays of three are indexed by.
enum { EMBEDDING, BLOCK, HEAD };

// Bytes at the peaks of activations, in each pass.
typedef struct LonePeaks {
    double f, b, w;
} LonePeaks;

// What a micro-batch takes and keeps of one block and of both ends, on a rank of tp x cp. It is the same
// for all degrees of dp and pp, for all schedules and stages of ZeRO.
typedef struct LoneParts {
    double forward[3], backward[3], input[3];  // seconds of F; of B and W, and B of them
    double count[3], experts;                  // elements of a unit; of a block's experts here
    double tokens, always, block, head;        // bytes kept: tokens, flash's positions, a block, the head
    double expert_rows, message;               // of `block`, at its experts; (n, h) between stages
    LonePeaks most[3];
    double waiting;                            // bytes that a block keeps beyond those while its W waits
    double waits;  // seconds of a block that its communication is exposed, in both passes
} LoneParts;
LoneParts lone_parts(const Config *config);
// Seconds of a step that a rank with the most blocks spends on recomputation, its collectives included.
double lone_recomputes(const Config *config, const LoneParts *parts);

// ---- what a rank holds: cost_lone_memory.c ----

double lone_layers(const Config *config, int rank);  // of this rank of pp
int lone_chunks(const Config *config);               // stages of a rank

// Bytes of the fullest rank.
typedef struct LoneMemory {
    double weights, gradients,
        optimizer;  // clocked: at their peaks; by closed forms: without units at work
    double kept;    // activations at the end of an F, at most
    double peak;    // of all
} LoneMemory;
// Ranks that share a block's weights, and those that have the same experts; their neighbours are so many
// ranks apart.
typedef struct Replicas {
    int ranks, stride;
} Replicas;
Replicas lone_replicas(const Config *config, bool experts);

// Of the stage with the embedding, the head, or both; by the closed forms alone.
LoneMemory lone_stage_memory(const Config *config, const LoneParts *parts, bool first, bool last);
LoneMemory lone_memory(const Config *config, const LoneParts *parts);

typedef struct LoneTime {
    double step, computed;         // seconds; of the slowest stage, without what it waits for
    double bubble, exposed_tp_cp;  // in the step
    double exposed_dp, optimizer;
} LoneTime;
// By the closed forms alone, a microsecond a layout.
LoneTime lone_time(const Config *config, const LoneParts *parts);
// The most that a step may take, and a rank hold, to be worth clocking.
typedef struct LoneLimits {
    double seconds, bytes;
} LoneLimits;
static const LoneLimits lone_no_limits = {INFINITY, INFINITY};
// A dry step, clocked, with the memory of the fullest rank. Clocking ends as soon as it is certain that the
// step of a pipeline is beyond the limits; its time is then INFINITY.
LoneTime lone_step(const Config *config, const LoneParts *parts, LoneLimits most, LoneMemory *memory);
// The value x steps along the first index and y along the second from at[0][0], in a table that is a straight
// line along both.
double lone_continued(const double at[2][2], double x, double y);
// The same as lone_step of a pipeline alone, whose messages have so many bytes, and whose step each further
// micro-batch makes longer by at least so many seconds.
typedef struct LoneStep {
    double seconds, walked;  // of the step, and until the last pass and message have ended
    LoneMemory memory;
} LoneStep;
LoneStep lone_pipeline(const Config *config, double message_bytes, double more, LoneLimits most);

#endif
