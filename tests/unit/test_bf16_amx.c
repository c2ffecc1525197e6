// test_bf16_amx.c: bf16 products by AMX's tdpbf16ps, if the processor and Linux support it.
#include <sys/syscall.h>
#include <unistd.h>
#define WAY "amx"
#define SAYS "bf16 by tdpbf16ps"
#ifdef __AVX512F__
static void execute_instruction(void) {
    const struct {
        unsigned char palette, start_row, reserved[14];
        unsigned short row_bytes[16];
        unsigned char rows[16];
    } config = {.palette = 1, .row_bytes = {64, 64, 64}, .rows = {16, 16, 16}};
    syscall(SYS_arch_prctl, 0x1023, 18);  // ARCH_REQ_XCOMP_PERM, of XTILEDATA
    __asm__ volatile("ldtilecfg %0\n\ttdpbf16ps %%tmm0, %%tmm1, %%tmm2\n\ttilerelease" : : "m"(config));
}
#endif
#include "bf16_products.h"
