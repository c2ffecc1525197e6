// pipeline.h: chapter 05's technique: each rank of pp owns some stages of the model, and walks its list of a schedule.
#ifndef PIPELINE_H
#define PIPELINE_H

#include "03_tensor_parallel/tensor_parallel.h"
#include "schedule.h"

// --schedule, --chunks, --stage-layers, --load; micro-batches are --grad-acc.
extern const Technique pipeline;

// What the programs of this chapter list: data parallelism, ZeRO's stages 1 and 2, tensor, sequence and vocabulary
// parallelism, the pipeline, recomputation.
extern const Technique *const pipeline_layouts[];

// The main of a schedule's program: trains with this --schedule and proves it. `more` may be NULL.
int pipeline_program(int argc, char **argv, const char *purpose, const char *schedule,
                     void (*more)(Mesh mesh, const Config *config));

// A message between two stages on different ranks: what `pass` has made, activations (F) or gradients (B, BW).
typedef struct Message {
    double time;  // at which the pass ends if every F, B and W takes as long
    int from, to;
    int order;  // among those of one rank that are sent at once
    StagePass pass;
} Message;
// All of a step, in one order that every rank derives alike: by time, then by rank. The caller frees them.
Message *pipeline_messages(const Schedule *schedule, int *count);

#endif
