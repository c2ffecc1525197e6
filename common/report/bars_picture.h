// bars_picture.h: bytes by kind as stacked bars, one bar for each way to do the same thing, in an SVG.
#ifndef BARS_PICTURE_H
#define BARS_PICTURE_H

#include "tensor/clock.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { BAR_KINDS = 4 };
typedef struct Bar {
    const char *name;         // "ZeRO-1"
    const char *note;         // shown at the right, after the sum; "" for none
    double bytes[BAR_KINDS];  // parameters, gradients, optimizer state, activations; 0 draws nothing
} Bar;

// Writes the picture that `flag` asks for; fatal, naming the flag, if the file cannot be written. A line
// marks the memory of the machine's device, if a bar reaches it.
void bars_svg(const char *flag, const char *file, const char *title, const Bar *bar, int bars,
              const Machine *machine);

#ifdef __cplusplus
}
#endif
#endif
