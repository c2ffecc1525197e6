// difference.h: how far one array is from another.
#ifndef DIFFERENCE_H
#define DIFFERENCE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Difference {  // of one quantity against its baseline
    const char *what;        // "loss", or the name of the worst tensor
    double relative;         // ||x - y|| / ||y|| (L2)
    double maximum;          // max |x - y|
    double scale;            // <x, y> / <y, y>: 1 when only noise differs, 2 when a factor of two does
} Difference;

Difference difference(const char *what, const double *x, const double *y, int64_t count);
// The same, with the relative error ||x - y|| / max(||y||, least).
Difference difference_above(const char *what, const double *x, const double *y, int64_t count,
                            double least);
double difference_norm(const double *x, int64_t count);  // L2
// How many elements differ in any bit; NaN differs from everything, even from itself.
int64_t differing_elements(const double *x, const double *y, int64_t count);

#ifdef __cplusplus
}
#endif
#endif
