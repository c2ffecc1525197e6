// sgemm.h: what the benchmarks compare a step with: OpenBLAS's SGEMM, 2048 x 2048, on all threads of the
// process. It is the library's own and not op_matmul, or improvements of op_matmul would raise the bar for
// themselves.
#ifndef SGEMM_H
#define SGEMM_H

#include <cblas.h>

#include "base.h"
#include "tensor/ops.h"

enum { SGEMM_SIZE = 2048 };
static const double SGEMM_FLOPS = 2.0 * SGEMM_SIZE * SGEMM_SIZE * SGEMM_SIZE;

typedef struct Sgemm {
    Tensor c, a, b;
} Sgemm;

// FLOP/s of `products` products, one after another.
static inline double sgemm_rate(const Sgemm *g, int products) {
    const int size = SGEMM_SIZE;
    const double start = wall_seconds();
    for (int i = 0; i < products; i++)
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, size, size, size, 1, tensor_address(g->a),
                    size, tensor_address(g->b), size, 0, tensor_address(g->c), size);
    return products * SGEMM_FLOPS / (wall_seconds() - start);
}

// Makes the first product, which also allocates.
static inline Sgemm sgemm_new(void) {
    Sgemm g = {.a = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(SGEMM_SIZE, SGEMM_SIZE))};
    g.b = tensor_like(MEMORY_ACTIVATION, g.a);
    g.c = tensor_like(MEMORY_ACTIVATION, g.a);
    op_fill(g.a, 0.5);
    op_fill(g.b, 0.25);
    sgemm_rate(&g, 1);
    return g;
}

static inline void sgemm_free(Sgemm *g) {
    tensor_free(&g->a);
    tensor_free(&g->b);
    tensor_free(&g->c);
}

#endif
