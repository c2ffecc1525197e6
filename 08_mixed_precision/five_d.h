// five_d.h: everything at once: the records of all chapters in one list.
#ifndef FIVE_D_H
#define FIVE_D_H

#include "05_pipeline_parallel/pipeline.h"
#include "06_expert_parallel/expert_parallel.h"
#include "mixed_precision.h"

// five_d_layouts.c: all of them in plug order, and those that one device has, too.
Techniques five_d_layouts(void);
Techniques five_d_one_device(void);

// In place of single records' own: --zero also takes hybrid, and --sum goes with bf16 and f16.
extern const Option five_d_options[];
enum { FIVE_D_OPTIONS = 2 };

// five_d_plan.c: what each rank has, holds and sends in a step. All numbers are doubles, so that one
// gather on the host collects the plan; a double holds 52 bits, one for each layer.
enum { PLAN_BITS = 52, PLAN_WORDS = 3, PLAN_LAYERS = PLAN_WORDS * PLAN_BITS };
typedef struct RankPlan {
    double pp, dp, cp, tp, ep;             // its coordinates
    double layers[PLAN_WORDS];             // bits of the layers that it stores, up to PLAN_LAYERS
    double embedding, head;                // 0 or 1
    double weights, gradients, optimizer;  // bytes, each kind at its peak
    double activations;                    // likewise
    double sent[MOST_CALLS];               // bytes in a step, by kind of call (comm_counts' order)
    double step_seconds, exposed;          // on the model clock
} RankPlan;
enum { PLAN_NUMBERS = sizeof(RankPlan) / sizeof(double) };

// Of all ranks, the same on each: (world.size), the caller frees it. dry: nothing is computed.
RankPlan *five_d_plan(Mesh mesh, const Config *config, bool dry);
void five_d_plan_print(const RankPlan *plan, Mesh mesh, const Config *config);
// Holds the step that was run against the plan, rank by rank: bytes held and sent, by kind, and the time on
// the model clock; but not what the routing of tokens decides.
void five_d_plan_compare(const RankPlan *plan, const RankPlan *run, Mesh mesh, const Config *config);

#endif
