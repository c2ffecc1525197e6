// five_d_picture.h: what a rank holds with each method, against the length of sequences, as a picture.
#ifndef FIVE_D_PICTURE_H
#define FIVE_D_PICTURE_H

#include "five_d.h"

enum { PICTURE_KINDS = 4, PICTURE_LENGTHS = 8, PICTURE_LEVELS = 3 };  // lengths: 1k, 2k, … 128k

// Bytes of weights, gradients, optimizer state, activations.
typedef struct Need {
    double bytes[PICTURE_KINDS];
} Need;

static inline double need_sum(const Need *need) {
    double sum = 0;
    for (int i = 0; i < PICTURE_KINDS; i++) sum += need->bytes[i];
    return sum;
}

// Writes the picture that `flag` asks for: a row for each of the methods, in it a bar for each level of
// recomputation.
void five_d_picture(const char *flag, const char *file, const char *const *method,
                    Need (*need)[PICTURE_LENGTHS][PICTURE_LEVELS], int methods, const Machine *machine);

#endif
