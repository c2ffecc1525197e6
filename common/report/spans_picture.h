// spans_picture.h: what goes on beside each other, in an SVG: rows of lines, on which spans of time lie in
// the colours of their kinds. A step's timeline (timeline.h) and that of a GPU's warps
// (cuda/issue_timeline.h) are drawn by it.
#ifndef SPANS_PICTURE_H
#define SPANS_PICTURE_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Span {
    double begin, end;  // after the picture's begin, in its unit of time
    char letter;        // its kind
} Span;

typedef struct SpanKind {
    char letter;
    const char *meaning, *color;
} SpanKind;

typedef struct SpanLine {
    char name[32];
    const Span *span;  // in order of time, none over another
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
    const char *unit;      // of time; NULL: seconds, of which the axis shows ms or us where they fit
    double length;         // of the axis, which all rows share
    const SpanKind *kind;  // in the order of the legend
    int kinds;
    const SpanRow *row;
    int rows;
    const char *definitions;  // of what colours refer to, in SVG; "" for none
} SpansPicture;

// Fatal, naming the flag that asks for it, when the file cannot be written.
void spans_svg(const SpansPicture *picture, const char *flag, const char *file);

// An axis is marked at round numbers of a unit, at most `most` of them.
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
