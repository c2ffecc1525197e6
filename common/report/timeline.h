// timeline.h: what the compute stream and each communication line of each rank did in one step, on the
// model clock: in letters, as an SVG, and all ranks in one trace.
//
//     compute  FFFFFFFFFBBBBBBBBBBBBBBBBBB---SSS      exposed: compute waits (---) for the network
//     tp       .A..A..A...A..A..A................      what lies under B is hidden
//     dp       .............AAA.AAA.AAA.AAAAAA...
//
// When a call begins, and how lines share a rank's ports, is comm.h's to say.
//
// The same flags give the same bytes, whatever machine runs them and under whatever load.
#ifndef TIMELINE_H
#define TIMELINE_H

#include "comm/mesh.h"
#include "report/spans_picture.h"
#include "tensor/clock.h"
#include "train/config.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- what programs call, for --trace, --timeline and --timeline-svg ----

// If one of the three is given: all clocks meet, and the trace starts.
void timeline_start(const Config *config, Group world);
// Keeps the last step so far under this title: a row of the picture. Only rank 0's is shown.
void timeline_keep(const char *title);
void timeline_title(const char *title);  // of the picture; else the model's name and the number of ranks
// Writes and prints what was asked for. The picture shows the rows that were kept; if there are none, all
// ranks in their last step that stands in no other mark. Every rank of the trace calls it.
void timeline_finish(const Config *config, Group world);

// ---- what they are made of ----

// Of spans, in seconds after the step began, the letters are: of compute, F forward, B backward, S
// optimizer, + other; of communication, A, R, G …
typedef struct Timeline {  // one rank in one step
    char *title;
    double seconds;  // from begin to end of the step
    // Each stream's in order of time, none over another of the same stream.
    Span *compute, *communication[COMM_LINES];
    int64_t compute_count, communication_count[COMM_LINES];
} Timeline;

// The last step ("step", "step 3") among the clock's events; `outermost`: that stands in no other mark.
// {0} if there is none. Spans without length are left out, operations of one kind in a row are one span.
Timeline timeline_of_step(bool outermost, const char *title);
void timeline_free(Timeline *timeline);

// The compute stream with its exposed waits, letter '-', between the operations. The caller frees it.
Span *timeline_compute(const Timeline *timeline, int64_t *count);

// Where the step's seconds go: compute + exposed + idle = timeline->seconds.
typedef struct TimelineShares {
    double compute;
    double communication;  // a line is busy, beside compute or not
    double exposed;        // nothing is computed while this rank's communication runs
    double idle;           // nor does it run: waiting for other ranks to come
} TimelineShares;
TimelineShares timeline_shares(const Timeline *timeline);

// ---- timeline_picture.c ----

// A row has a line for compute and one for each communication line that was used; then the time's axis, the
// letters' meanings, the shares; `width` columns. A column has the
// letter of most of its time, a small one if the stream is busy for less than half of it. The caller frees
// the text.
char *timeline_text(const Timeline *row, int rows, int width);
// Fatal, naming --timeline-svg, when the file cannot be written.
void timeline_svg(const Timeline *row, int rows, const char *title, const char *file);

#ifdef __cplusplus
}
#endif
#endif
