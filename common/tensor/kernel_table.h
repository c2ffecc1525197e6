// kernel_table.h: kernels that replace the back end's while a table of them is in use. ops.c has checked and
// counted a call before either runs, so a replaced kernel is priced like any other.
#ifndef KERNEL_TABLE_H
#define KERNEL_TABLE_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// Each takes the arguments of the function of the same name in kernels.h. If it does not support the dtype
// or size it does nothing and returns false, and the back end's own kernel runs, as it does where an entry is
// NULL.
typedef struct KernelTable {
    bool (*matmul)(DType dtype, DType c_dtype, void *c, const void *a, const void *b, int64_t m, int64_t n,
                   int64_t k, bool transpose_a, bool transpose_b, double beta);
    bool (*rmsnorm_forward)(DType dtype, void *y, void *rstd, const void *x, const void *weight, int64_t n,
                            int64_t h, double eps);
    bool (*rmsnorm_backward)(DType dtype, void *dx, DType dweight_dtype, void *dweight,
                             const void *dresidual, const void *dy, const void *x, const void *weight,
                             const void *rstd, int64_t n, int64_t h);
    bool (*swiglu_forward)(DType dtype, void *act, const void *gate, const void *up, int64_t count);
    bool (*swiglu_backward)(DType dtype, void *dgate, void *dup, const void *dact, const void *gate,
                            const void *up, int64_t count);
    bool (*cross_entropy_forward)(DType dtype, void *losses, void *lse, const void *logits,
                                  const int32_t *targets, int64_t n, int64_t v);
    bool (*cross_entropy_backward)(DType dtype, void *dlogits, const void *logits, const void *lse,
                                   const int32_t *targets, double scale, int64_t n, int64_t v);
    bool (*attention_chunk_forward)(DType dtype, void *o, void *lse, const void *q, const void *k,
                                    const void *v, AttentionChunk chunk);
    bool (*attention_chunk_backward)(DType dtype, void *dq, void *dk, void *dv, const void *d_o,
                                     const void *q, const void *k, const void *v, const void *lse,
                                     const void *dots, AttentionChunk chunk);
    bool (*adamw)(DType dtype, void *value, void *master, void *m, void *v, DType grad_dtype,
                  const void *grad, AdamW hyper, int64_t count);
} KernelTable;

// From now on these kernels are tried first; NULL: only the back end's. Returns the table in use before.
const KernelTable *ops_use_kernels(const KernelTable *table);
// Calls so far of operations for which the table in use has an entry, and how many its kernels took.
typedef struct KernelCalls {
    int64_t all, taken;
} KernelCalls;
KernelCalls ops_kernel_calls(void);

// The table that is linked into this build: chapter 07's kernels where the back end is CUDA, else NULL.
const KernelTable *kernel_table_linked(void);

// Not in the table, and only in a CUDA back end, which tries it first: the product of 8-bit codes with a
// scale per 128 terms of k, by chapter 07's kernel for Hopper. If it does not support the call it does
// nothing and returns false.
bool matmul_codes_linked(DType dtype, void *c, KernelCodes a, KernelCodes b, int64_t m, int64_t n,
                         int64_t k, int64_t segment, int bits, double beta);

#ifdef __cplusplus
}
#endif
#endif
