// book_codes.cu: hopper_fp8 as the CUDA back end's multiply of 8-bit codes with block scales, used wherever
// codes have such scales (tensor/kernel_table.h). The program is included here without its main.
#include "cuda/device_cuda.h"
#include "cuda/instructions_hopper.h"
#include "sixteen_bits.h"
#include "tensor/device.h"
#include "tensor/kernel_table.h"

#define NO_MAIN
namespace hopper_fp8 {
#include "hopper_fp8.cu"
}

static cudaStream_t stream() { return static_cast<cudaStream_t>(device_stream()); }

static bool has_hopper() {
    static int has = -1;
    if (has >= 0) return has;
    int *found = static_cast<int *>(device_scratch(sizeof *found));
    LAUNCH(find_hopper, 1, 1, 0, stream(), found);
    backend_to_host(&has, found, sizeof has);  // detects ranks that are gone while it waits
    return has;
}

template <hopper_fp8::Version VERSION>
static void multiply_codes(DType dtype, void *c, const hopper_fp8::Operands &in, int64_t m, int64_t n,
                           int64_t k) {
    if (dtype == F32) hopper_fp8::launch_on<VERSION>(stream(), static_cast<float *>(c), in, m, n, k);
    else hopper_fp8::launch_on<VERSION>(stream(), static_cast<__nv_bfloat16 *>(c), in, m, n, k);
}

bool matmul_codes_linked(DType dtype, void *c, KernelCodes a, KernelCodes b, int64_t m, int64_t n,
                         int64_t k, int64_t segment, int bits, double beta) {
    constexpr int64_t TILE = hopper_fp8::K, MOST = INT32_MAX - TILE;
    const bool tiles = a.rows == 1 && (b.rows == 1 || b.rows == TILE) && a.tile_columns == TILE &&
                       b.tile_columns == TILE && segment == TILE && !bits;
    if (!tiles || a.dtype != E4M3 || b.dtype != E4M3 || (dtype != F32 && dtype != BF16) || k == 0 ||
        k % 16 || ((uintptr_t)a.codes | (uintptr_t)b.codes) % 16 || m > MOST || n > MOST || k > MOST ||
        !has_hopper())
        return false;
    const hopper_fp8::Operands in = {a.codes, b.codes, a.scale, b.scale, beta != 0};
    if (b.rows == 1) multiply_codes<hopper_fp8::ROWS>(dtype, c, in, m, n, k);
    else multiply_codes<hopper_fp8::BLOCKS>(dtype, c, in, m, n, k);
    return true;
}
