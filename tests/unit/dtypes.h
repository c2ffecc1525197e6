// dtypes.h: the dtypes that operations are tested in, for tests in C and in C++.
#ifndef DTYPES_H
#define DTYPES_H

#include "tensor/tensor.h"

static const DType all_dtypes[] = {F64, F32, BF16, F16};
static inline DType full(DType dtype) { return dtype_full(dtype); }

// A dtype, and one that a weight's gradient may have with it.
enum { GRADIENT_DTYPES = 6 };
static const DType gradient_dtypes[GRADIENT_DTYPES][2] = {{F64, F64}, {F32, F32},  {BF16, BF16},
                                                          {F16, F16}, {BF16, F32}, {F16, F32}};

// Half a unit in the last place of 1: the relative error of rounding to nearest; in f16 also a little below
// its smallest normal number.
static inline double rounding(DType dtype) {
    return dtype == F64 ? 0x1p-53 : dtype == F32 ? 0x1p-24 : dtype == BF16 ? 0x1p-8 : 0x1p-11;
}

#endif
