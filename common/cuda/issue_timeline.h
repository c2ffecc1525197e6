// issue_timeline.h: when the warps of one block issue their instructions on a named GPU, and which units of
// the multiprocessor are busy then. Counts cannot show that: they say nothing about order or waiting. A
// tape has each warp's steps in their order (cuda_on_cpu_tape.h records it from a launch); this replays it,
// clock by clock.
//
// The model, for one block that has a multiprocessor to itself; rates are those of the GPU's row in
// gpu_model.c:
//   - Four schedulers; warp w belongs to scheduler w mod 4. Each has a quarter of the FMA lanes, of the
//     special-function lanes and of the tensor cores, and issues one instruction a clock, warps in turn.
//   - An instruction waits until its unit is free: on an H100 an FMA occupies it for 1 clock, an exponential
//     for 8. It never waits for another one's result: the compiler has enough of them to interleave.
//   - Products are issued and left to the tensor cores, which a warp's part of an m64n128k16 occupies for 64
//     clocks. The order in which they serve warps is not published: TensorOrder has two possibilities.
//   - Shared memory makes one pass a clock; a product ends no sooner than the passes for its operands do.
//   - A TMA copy begins COPY_LATENCY clocks after it is asked for, and moves this multiprocessor's share of
//     L2's bytes a clock, one copy after another.
//   - Arriving and waiting take no time; a warp that arrives, commits or multiplies has done its arithmetic.
// Not modelled: shuffles, conversions, address arithmetic, control flow, bank conflicts, plain loads and
// stores of global memory.
#ifndef ISSUE_TIMELINE_H
#define ISSUE_TIMELINE_H

#include "cuda/gpu_model.h"
#include "report/spans_picture.h"

#ifdef __cplusplus
extern "C" {
#endif

// Assumed: 480 clocks for a load from memory (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU
// Architecture", 2024), and some more for the unit that writes tiles.
enum { COPY_LATENCY = 600 };

typedef enum IssueKind {
    ISSUE_WORK,     // fma and special: instructions of the warp, in this order; passes
    ISSUE_PRODUCT,  // a warp's part of a wgmma: its 16-bit flops; passes for its operands; letter
    ISSUE_COMMIT,   // the products so far become a group
    ISSUE_FINISH,   // waits for all groups except the last `pending`
    ISSUE_ARRIVE,   // at `phase`
    ISSUE_COPY,     // of `bytes`, which arrive at `phase` together
    ISSUE_AWAIT     // waits until everything that ever arrives at `phase` has arrived
} IssueKind;

typedef struct IssueStep {
    IssueKind kind;
    int warp;
    int fma, special;
    int passes;  // through shared memory
    int flops;
    int pending;
    int phase;  // of one barrier, numbered from 0
    int bytes;
    char letter;  // for a product in the picture
} IssueStep;

// The steps of one warp are in their order; steps of different warps may interleave in any way.
typedef struct IssueTape {
    IssueStep *steps;  // from malloc
    int64_t count;
} IssueTape;

// Lines of the picture: for each warpgroup its first warp's products and other arithmetic; then copies.
enum { ISSUE_GROUPS = 8, ISSUE_LINES = 2 * ISSUE_GROUPS + 1 };

// BY_ISSUE: products run in the order of issue, so one warp's end before those that another issued later.
// IN_TURN: each warp that has products gets one in turn, so warps that multiply at the same time end
// together.
typedef enum TensorOrder { TENSOR_BY_ISSUE, TENSOR_IN_TURN } TensorOrder;

typedef struct IssueTimeline {
    int64_t clocks;
    double tensor, special, fma, shared, copies;  // clocks in which the unit is busy; of four: the mean
    // Each line at each clock: a product's letter, e special functions, + other arithmetic, c a copy; or 0.
    char (*lines)[ISSUE_LINES];
} IssueTimeline;

// Fatal if a warp waits for ever.
IssueTimeline issue_timeline(const Gpu *gpu, TensorOrder order, IssueTape tape);
void issue_timeline_free(IssueTimeline *timeline);

// Clocks [from, to) in so many columns: the lines that are not empty, and an axis. A column shows the letter
// that takes most of its busy time, or a dot if that is less than a quarter. The caller frees the text.
char *issue_timeline_text(const IssueTimeline *timeline, int64_t from, int64_t to, int columns);

// The same for several timelines in one picture, with `clocks` clocks of each.
typedef struct IssueRow {
    const char *title, *note;
    const IssueTimeline *timeline;
    int64_t from;
} IssueRow;
// kind: the meaning and the colour of each letter. Fatal, naming the flag, if the file cannot be written.
void issue_timeline_svg(const IssueRow *row, int rows, int64_t clocks, const SpanKind *kind, int kinds,
                        const char *title, const char *flag, const char *file);

#ifdef __cplusplus
}
#endif
#endif
