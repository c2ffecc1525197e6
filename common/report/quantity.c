// quantity.c: see quantity.h.
#include "quantity.h"

#include <math.h>
#include <string.h>

Quantity quantity_of(const Record *r, int which) {
    static char *const loss[] = {"losses"}, *const grad_norm[] = {"gradient norms"};
    switch (which) {
        case LOSSES:
            return (Quantity){"losses", 1, loss, &r->steps, &r->loss};
        case GRADIENT_NORMS:
            return (Quantity){"gradient norms", 1, grad_norm, &r->steps, &r->grad_norm};
        case GRADIENTS:
            return (Quantity){"gradients", r->tensors, r->name, r->count, r->grad};
        default:
            return (Quantity){"parameters", r->tensors, r->name, r->count, r->param};
    }
}

double quantity_largest(const Quantity *q) {
    double largest = 0;
    for (int i = 0; i < q->tensors; i++)
        if (q->values[i]) largest = fmax(largest, difference_norm(q->values[i], q->count[i]));
    return largest;
}

bool quantity_is_zero(const Quantity *q) {
    for (int i = 0; i < q->tensors; i++)
        for (int64_t j = 0; j < q->count[i]; j++)
            if (q->values[i][j] != 0) return false;  // a NaN is not zero
    return true;
}

int quantity_find(const Quantity *q, const char *name) {
    for (int i = 0; i < q->tensors; i++)
        if (!strcmp(q->tensor[i], name)) return i;
    return -1;
}

int quantity_partner(const Quantity *x, const Quantity *y, int i, char fault[200]) {
    const char *name = y->tensor[i];
    int j = quantity_find(x, name);
    if (j < 0) snprintf(fault, 200, "%s is missing", name);
    else if (x->count[j] != y->count[i])
        snprintf(fault, 200, "%s has %lld elements, not %lld", name, (long long)x->count[j],
                 (long long)y->count[i]);
    else if (!x->values[j] || !y->values[i]) snprintf(fault, 200, "%s was never recorded", name);
    else return j;
    return -1;
}

bool quantities_pair(const Quantity *x, const Quantity *y, char fault[200]) {
    for (int i = 0; i < y->tensors; i++)
        if (quantity_partner(x, y, i, fault) < 0) return false;
    for (int j = 0; j < x->tensors; j++)
        if (quantity_find(y, x->tensor[j]) < 0) {
            snprintf(fault, 200, "%s is not in the baseline", x->tensor[j]);
            return false;
        }
    return true;
}
