// spans_picture.h: concurrent activities in an SVG: rows of lines, on which spans of time have the colours
// of their kinds. It draws a step's timeline (timeline.h) and that of a GPU's warps (cuda/issue_timeline.h).
#ifndef SPANS_PICTURE_H
#define SPANS_PICTURE_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Span {
    double begin, end;  // since the beginning of the picture, in its unit of time
    char letter;        // its kind
} Span;

typedef struct SpanKind {
    char letter;
    const char *meaning, *color;
} SpanKind;

typedef struct SpanLine {
    char name[32];
    const Span *span;  // in order of time, without overlap
    int64_t count;
    int height;  // pixels
} SpanLine;

enum { SPAN_LINES = 20 };
typedef struct SpanRow {
    const char *title, *note;
    SpanLine line[SPAN_LINES];
    int lines;
} SpanRow;

typedef struct SpansPicture {
    const char *title;
    const char *note;      // stands below the axis; NULL: none
    const char *unit;      // of time; NULL: seconds, which the axis shows as ms or us where they fit better
    double length;         // of the axis, which all rows share
    const SpanKind *kind;  // in the order of the legend
    int kinds;
    const SpanRow *row;
    int rows;
    const char *definitions;  // SVG definitions that colours refer to; "" for none
} SpansPicture;

// Writes the picture; fatal, naming the flag that asks for it, if the file cannot be written.
void spans_svg(const SpansPicture *picture, const char *flag, const char *file);

// An axis with at most `most` ticks, at round numbers of a unit.
typedef struct SpansAxis {
    double tick;  // in the picture's unit
    double unit;
    const char *name;
} SpansAxis;
SpansAxis spans_axis(double length, const char *unit, int most);

#ifdef __cplusplus
}
#endif
#endif
