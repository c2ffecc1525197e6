// difference.c: see difference.h.
#include "difference.h"

#include <math.h>
#include <string.h>

// Sums run over elements in order, in double: a record's own numbers are exact images of 64 bits or fewer.
double difference_norm(const double *x, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += x[i] * x[i];
    return sqrt(sum);
}

Difference difference_above(const char *what, const double *x, const double *y, int64_t count,
                            double least) {
    double xy = 0, yy = 0, squares = 0, maximum = 0;
    for (int64_t i = 0; i < count; i++) {
        double delta = fabs(x[i] - y[i]);
        xy += x[i] * y[i];
        yy += y[i] * y[i];
        squares += delta * delta;
        if (!(delta <= maximum)) maximum = delta;  // a NaN stays: no later comparison with it holds …
        if (isnan(maximum)) break;                 // … so stop at it
    }
    if (isnan(maximum)) return (Difference){what, NAN, NAN, NAN};
    double against = sqrt(yy) > least ? sqrt(yy) : least;
    double relative = maximum == 0 ? 0 : sqrt(squares) / against;
    return (Difference){what, relative, maximum, maximum == 0 ? 1 : yy > 0 ? xy / yy : INFINITY};
}

Difference difference(const char *what, const double *x, const double *y, int64_t count) {
    return difference_above(what, x, y, count, 0);
}

int64_t differing_elements(const double *x, const double *y, int64_t count) {
    int64_t differing = 0;
    for (int64_t i = 0; i < count; i++)
        differing += isnan(x[i]) || isnan(y[i]) || memcmp(&x[i], &y[i], sizeof *x) != 0;
    return differing;
}
