// bars_picture.h: bytes by kind as stacked bars, one for each way to do the same, in an SVG.
#ifndef BARS_PICTURE_H
#define BARS_PICTURE_H

#include "tensor/clock.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { BAR_KINDS = 4 };
typedef struct Bar {
    const char *name;         // "ZeRO-1"
    const char *note;         // at the right, after the sum; "" for none
    double bytes[BAR_KINDS];  // parameters, gradients, optimizer state, activations; 0 draws nothing
} Bar;

// Writes the picture that `flag` asks for. A line shows what the machine's device has, if a bar reaches it.
void bars_svg(const char *flag, const char *file, const char *title, const Bar *bar, int bars,
              const Machine *machine);

#ifdef __cplusplus
}
#endif
#endif
