// test_bf16_pairs.c: products of bf16 by vdpbf16ps, on the instruction itself, whether or not the processor
// says that it has it and whether or not it is the faster way.
#define WAY "pairs"
#define SAYS "bf16 by vdpbf16ps"
#ifdef __AVX512F__
static void execute_instruction(void) {
    __asm__ volatile("vdpbf16ps %%zmm0, %%zmm0, %%zmm0" ::: "xmm0");
}
#endif
#include "bf16_products.h"
