// quantity.h: what one row of a comparison compares: arrays of a record, found by name.
#ifndef QUANTITY_H
#define QUANTITY_H

#include "report.h"

// One array (losses, norms), or one array for each parameter. Borrows from the record.
typedef struct Quantity {
    const char *name;
    int tensors;
    char *const *tensor;
    const int64_t *count;
    double *const *values;
} Quantity;

enum { LOSSES, GRADIENT_NORMS, GRADIENTS, PARAMETERS, QUANTITIES };
Quantity quantity_of(const Record *record, int which);
double quantity_largest(const Quantity *q);  // the largest norm of its arrays; "noise" is relative to it
bool quantity_is_zero(const Quantity *q);
int quantity_find(const Quantity *q, const char *name);  // index of a tensor; -1: there is none
// Index in x of y's tensor i, or -1 with the reason written to `fault`.
int quantity_partner(const Quantity *x, const Quantity *y, int i, char fault[200]);
// Whether every tensor of both sides has a partner; if not, the reason is written to `fault`.
bool quantities_pair(const Quantity *x, const Quantity *y, char fault[200]);

#endif
