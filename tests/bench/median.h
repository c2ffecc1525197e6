// median.h: the median of what a benchmark has measured.
#ifndef MEDIAN_H
#define MEDIAN_H

#include <stdlib.h>

static inline int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
// Leaves the values sorted.
static inline double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, by_value);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

#endif
