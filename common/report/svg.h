// svg.h: what all pictures begin and end with.
#ifndef SVG_H
#define SVG_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Opens the picture that `flag` asks for, so many pixels large, with its font; fatal, naming the flag, if the
// file cannot be written. The caller ends it with svg_close.
FILE *svg_open(const char *flag, const char *file, int width, int height);
void svg_close(FILE *svg, const char *flag, const char *file);
// A title of the class "title", in 15 pixels, or in fewer where it would be wider than `width`.
void svg_title(FILE *svg, int x, double width, const char *title);

#ifdef __cplusplus
}
#endif
#endif
