// timeline.h: what the compute stream and each communication line of each rank did in one step, on the
// model clock: as text, as an SVG, and as one trace of all ranks.
//
//     compute  FFFFFFFFFBBBBBBBBBBBBBBBBBB---SSS      exposed: compute waits (---) for the network
//     tp       .A..A..A...A..A..A................      hidden: communication below F or B
//     dp       .............AAA.AAA.AAA.AAAAAA...
//
// comm.h says when a call begins, and how lines share a rank's ports.
//
// The same flags give the same bytes of output on any machine and under any load.
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

// If one of the three is given: synchronizes the clocks of all ranks and starts the trace. A run that ends
// by fatal() writes the trace so far, of the rank that prints the sentence. The caller keeps ownership of
// the strings, which must live until timeline_finish.
void timeline_start(const Config *config, Group world);
// Keeps the step that timeline_of_step finds, inside any mark, under this title, as a row of the picture.
// Only rank 0's is shown.
void timeline_keep(const char *title);
// Sets the picture's title; by default it is the model's name and the number of ranks.
void timeline_title(const char *title);
// Writes and prints what the flags ask for. The picture shows the rows that were kept; if there are none,
// all ranks in a step that is not inside another mark. Every rank of the trace calls it.
void timeline_finish(const Config *config, Group world);

// ---- what they are made of ----

// Spans are in seconds since the step began. The letters of compute are F forward, B backward, S optimizer,
// + other; those of communication are A, R, G …
typedef struct Timeline {  // one rank in one step
    char *title;
    double seconds;  // from beginning to end of the step
    // The spans of each stream, in order of time, without overlap.
    Span *compute, *communication[COMM_LINES];
    int64_t compute_count, communication_count[COMM_LINES];
} Timeline;

// The last step ("step", "step 3") among the clock's events, or of a run of three or more the last but one;
// with `outermost`, of those that are not inside another mark. {0} if there is none. Spans without length are
// left out; consecutive operations of one kind are one span. The caller ends it with timeline_free.
Timeline timeline_of_step(bool outermost, const char *title);
void timeline_free(Timeline *timeline);

// The spans of compute with the exposed waits, letter '-', between them. The caller frees the array.
Span *timeline_compute(const Timeline *timeline, int64_t *count);

// How the seconds of the step are spent: compute + exposed + idle = timeline->seconds.
typedef struct TimelineShares {
    double compute;
    double communication;  // some line is busy, whether this rank computes or not
    double exposed;        // this rank's communication runs, and it computes nothing
    double idle;           // neither: it waits for other ranks
} TimelineShares;
TimelineShares timeline_shares(const Timeline *timeline);

// ---- timeline_picture.c ----

// A row has a line for compute and one for each communication line that was used; below are the time axis,
// the meaning of the letters, and the shares; all in `width` columns. A column has the letter that takes
// most of its time, in lower case if the stream is busy for less than half of it. The caller frees the
// text.
char *timeline_text(const Timeline *row, int rows, int width);
// Writes the same as an SVG, with the note (NULL: none) below its axis. Fatal, naming --timeline-svg, if the
// file cannot be written.
void timeline_svg(const Timeline *row, int rows, const char *title, const char *note, const char *file);

#ifdef __cplusplus
}
#endif
#endif
