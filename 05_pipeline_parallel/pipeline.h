// pipeline.h: chapter 05's technique: each rank of pp owns some stages of the model, and walks its list in a
// schedule.
#ifndef PIPELINE_H
#define PIPELINE_H

#include "04_context_parallel/context_parallel.h"
#include "schedule.h"

// --schedule, --chunks, --stage-layers, --load; micro-batches are --grad-acc.
extern const Technique pipeline;

// --zero 3 under a pipeline (zero3_per_step.c): a stage's weights are gathered once per step, and its
// gradients reduced once; --zero hybrid likewise, for programs that list it.
extern const Technique zero3_per_step, hybrid_zero_per_step;

// What the programs of this chapter list (pipeline_layouts.c): data parallelism, ZeRO's stages, chapter
// 03's techniques, the four methods of context parallelism, the pipeline, recomputation, --zero-r.
extern const Technique *const pipeline_layouts[];

extern const Technique zero_r_in_pipeline;

// The main of a schedule's program: trains with this --schedule and proves it.
int pipeline_program(int argc, char **argv, const char *purpose, const char *schedule);

// ---- pipeline_stages.c ----
ScheduleWish pipeline_wish(const Config *config);  // --pp, --grad-acc, --chunks, and unit times
// The schedule that the flags ask for, verified; fatal if there is none. The caller frees it.
Schedule pipeline_schedule(const Config *config);
// The layers of each stage, by --stage-layers, or L / stages each and one more for the first L % stages.
// Fatal if they do not add up, or if a stage between the first and the last has none.
void pipeline_split_layers(const Config *config, Chunk *chunk, int stages);
// Whether a stage computes with this unit's weights. If tied, the last one has the embedding's as well.
bool pipeline_in_chunk(const Model *model, const Chunk *chunk, int unit);
void pipeline_shard(Model *model);  // says which ranks of pp store each unit

// A message between stages on different ranks: the output of `pass`, activations (F) or gradients (B, BW).
typedef struct Message {
    double time;  // when the pass ends if every F, B and W takes 1
    int from, to;
    int order;  // among those of one rank that are sent at the same time
    StagePass pass;
} Message;
extern const Durations pipeline_unit_times;  // every F, B and W takes 1, BW and a pair 2
// All messages of a step, in an order that is the same on every rank: by time, then by rank. The caller frees
// them.
Message *pipeline_messages(const Schedule *schedule, const ScheduleTimes *times, int *count);

// ---- pipeline.c: the runtime ----
typedef struct Pipeline Pipeline;
struct Pipeline {
    Schedule schedule;
    ScheduleTimes times;  // of unit times
    Chunk *chunk;         // (stages)
    Message *message;
    int messages;
    int64_t *finals;          // (units) how often a step makes the unit's gradient final here
    bool *idle;               // (units) stored here, but no micro-batch passes it
    Group forward, backward;  // pp twice: activations on one line, gradients on the other
    // Of the step that is running.
    MicroBatch *micro;    // (m)
    int *passes_left;     // (m) this rank's Ws still to run; -1: not begun
    int next;             // in `message`: all of this rank's messages before it have been started
    int finished;         // micro-batches that have left this rank
    int held, most_held;  // passes of micro-batches between F and B, and the most ever
    Tensor *arrived;      // (slots) input of a pass, from another rank
    Request **arriving;   // (slots) its request, until waited for
    Request *sending[2];  // the last one on each line, until waited for
    const StepInput *input;
    // Computes both passes of a pair (pipeline_compute), one beside the other; NULL: one after the other.
    void (*together)(void *context, Pipeline *pipeline, Model *model, const Action *action);
    void *together_context;
    // Runs the passes of a step; NULL: those of the rank's list, in its order.
    void (*instead)(void *context, Model *model);
    void *instead_context;
};
// What a rank does for each action in its list: starts its receives, computes each pass, and ends it: sends
// its output and, after a micro-batch's last pass on this rank, frees what the micro-batch kept.
void pipeline_start_receives(Pipeline *pipeline, Model *model, int position);
void pipeline_compute(Pipeline *pipeline, Model *model, StagePass pass);
void pipeline_end_pass(Pipeline *pipeline, Model *model, StagePass pass);

// Index, from `first` on, of the first message that is not before (end, rank) in the order: what the rank
// itself sends at `end`, if it sends anything.
int pipeline_messages_by(const Pipeline *pipeline, int first, int rank, double end);
// How often a micro-batch's Ws add to the embedding's gradient on this rank: if tied, the head's as well.
int pipeline_embedding_parts(const Pipeline *pipeline, const Model *model, int micro_batch);

// ---- pipeline_clock.c: how long the passes of a step take on the model clock ----
// What a rank does, each with the time that it begins: it starts the receives before an action in its list
// (NULL: that takes no time), computes a pass, and sends its output. Both return when they have ended; *sent
// is when the pass's message, if it has one, has taken its port.
typedef struct PassClock {
    void (*receive)(void *context, int rank, int position, double now);
    double (*compute)(void *context, int rank, StagePass pass, double now);
    double (*end)(void *context, int rank, StagePass pass, double now, double *sent);
    void *context;
} PassClock;
// Walks through a step that each rank begins at end[rank], with messages of so many bytes; sets end (ranks)
// to when each rank has computed all its passes and sent all its messages.
void pipeline_walk(const Pipeline *pipeline, const PassClock *clock, double message_bytes, double *end);
// Whether a message goes to another node.
bool pipeline_goes_across(const Pipeline *pipeline, int from, int to);
// When the last rank ends, given the durations of a stage's F, B and W.
double pipeline_makespan(const Pipeline *pipeline, Durations of_stage, double message_bytes);

// pipeline_nodes.c: a pipeline across nodes, on 16 ranks, compared with tensor parallelism.
void pipeline_across_nodes(Mesh mesh, const Config *config);

// ---- pipeline_memory.c ----
void pipeline_check_held_bytes(Mesh mesh, const Config *config);

#endif
