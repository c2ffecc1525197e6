// test_bf16_pairs.c: bf16 products by vdpbf16ps, with the instruction itself, whether or not the processor
// reports it and whether or not it is the faster way.
#define WAY "pairs"
#define SAYS "bf16 by vdpbf16ps"
#ifdef __AVX512F__
static void execute_instruction(void) {
    __asm__ volatile("vdpbf16ps %%zmm0, %%zmm0, %%zmm0" ::: "xmm0");
}
#endif
#include "bf16_products.h"
