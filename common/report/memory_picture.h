// memory_picture.h: device memory by kind over a few training steps, as an SVG and as text.
#ifndef MEMORY_PICTURE_H
#define MEMORY_PICTURE_H

#include "tensor/clock.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Moment {  // what was held from this time until the next moment
    double time;         // model clock, seconds since the last clock_reset
    int64_t now[MEMORY_KINDS], total;
} Moment;

typedef struct MemoryHistory {
    Moment *moment;
    int64_t count, room;
    int64_t steps, begun;  // steps planned; steps begun so far
    int64_t *first;        // (steps + 1) the moment at which each step begins, and the last one ends
    double *time;          // (steps + 1) the same as times on the model clock
} MemoryHistory;

// Records the account from now until memory_history_step has been called steps + 1 times: when each step
// begins, the first time right after a clock_reset, and when the last step has ended. The caller ends it
// with memory_history_free.
void memory_history_start(MemoryHistory *history, int64_t steps);
void memory_history_step(MemoryHistory *history);
void memory_history_free(MemoryHistory *history);

// The peak bytes of one kind in a step (counted from 0), or of all kinds together (kind MEMORY_KINDS).
int64_t memory_history_peak(const MemoryHistory *history, int64_t step, int kind);

// Draws stacked areas over the model clock, with each step's phases from the clock's marks (step/forward,
// step/backward, step/optimizer), and the device's capacity if the peak comes near it. Text and lines
// follow the reader's light or dark theme. Fatal, naming --svg, if the file cannot be written.
void memory_history_svg(const MemoryHistory *history, const char *file, const char *title,
                        const Machine *machine);
// Prints the same as text: p parameters, g gradients, O optimizer, a activations, c communication.
void memory_history_print(const MemoryHistory *history);

#ifdef __cplusplus
}
#endif
#endif
