// flash_codes.h: operands of attention as 8-bit codes (e4m3), x = scale * code, with a scale for each tile
// of 128 rows of a head: the kernel that makes them, and what its work is.
#ifndef FLASH_CODES_H
#define FLASH_CODES_H

#include "flash_warpgroups.h"

typedef __nv_fp8_e4m3 Code;
enum { D = TILE_ROW };                       // of a head: its row of codes is a row of a tile
enum { ENCODER = 256, LANE_PART = D / 32 };  // threads; numbers of a lane
constexpr float LARGEST = 448;               // of e4m3

__device__ static inline uint32_t codes(float a, float b, float c, float d) {
    return (uint32_t)__nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3) |
           (uint32_t)__nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3) << 16;
}

// Block (tile, head, sample): code (b, s, heads, D) and scale (b, heads, tiles) (=) of x.
template <class T>
__global__ void __launch_bounds__(ENCODER) encode(Code *code, float *scale, const T *x, int s) {
    __shared__ float parts[ENCODER / 32];
    const int heads = (int)gridDim.y, first = (int)blockIdx.x * ROWS + own_warp();
    const int64_t head = ((int64_t)blockIdx.z * s * heads + blockIdx.y) * D + own_lane() * LANE_PART;
    float of_lane[ROWS / (ENCODER / 32)][LANE_PART], most = 0;
#pragma unroll
    for (int i = 0; i < ROWS / (ENCODER / 32); i++) {
        const int row = first + i * (ENCODER / 32);
        uint2 pair = make_uint2(0, 0);
        if (row < s) pair = *reinterpret_cast<const uint2 *>(x + head + (int64_t)row * heads * D);
        const float2 a = unpacked<T>(pair.x), b = unpacked<T>(pair.y);
        of_lane[i][0] = a.x, of_lane[i][1] = a.y, of_lane[i][2] = b.x, of_lane[i][3] = b.y;
#pragma unroll
        for (int c = 0; c < LANE_PART; c++) most = fmaxf(most, fabsf(of_lane[i][c]));
    }
    most = over_block<larger, ENCODER / 32>(most, 0, parts);
    const float by = most > 0 ? LARGEST / most : 1;
#pragma unroll
    for (int i = 0; i < ROWS / (ENCODER / 32); i++) {
        const int row = first + i * (ENCODER / 32);
        const float *y = of_lane[i];
        if (row < s)
            *reinterpret_cast<uint32_t *>(code + head + (int64_t)row * heads * D) =
                codes(y[0] * by, y[1] * by, y[2] * by, y[3] * by);
    }
    if (threadIdx.x == 0)
        scale[(blockIdx.z * heads + blockIdx.y) * gridDim.x + blockIdx.x] = most > 0 ? most / LARGEST : 1;
}

// ---- host code ----

static inline int64_t tiles_of_rows(int64_t s) { return (s + ROWS - 1) / ROWS; }

// One operand's codes (b, s, heads, D), and scales (b, heads, tiles).
struct Coded {
    int64_t heads;
    Array<Code> codes;
    Array<float> scales;

    Coded(const Heads &n, int64_t heads)
        : heads(heads), codes(n.b * n.s * heads * D), scales(n.b * heads * tiles_of_rows(n.s)) {}
};
struct Operands8 {
    Coded q, k, v;

    explicit Operands8(const Heads &n) : q(n, n.a), k(n, n.kv), v(n, n.kv) {}
};

template <class T>
static void encode_one(const Coded &to, const T *x, const Heads &n) {
    const dim3 grid((unsigned)tiles_of_rows(n.s), (unsigned)to.heads, (unsigned)n.b);
    if (n.s) LAUNCH(encode<T>, grid, ENCODER, 0, 0, to.codes.at, to.scales.at, x, (int)n.s);
}

template <class T>
static void encode_all(const Operands8 &to, const T *q, const T *k, const T *v, const Heads &n) {
    encode_one(to.q, q, n), encode_one(to.k, k, n), encode_one(to.v, v, n);
}

// Of Q, K and V.
static inline Work formula_of_codes(const Heads &shape) {
    const double rows = (double)(shape.b * shape.s * (shape.a + 2 * shape.kv)), tiles = rows / ROWS;
    const double a = (double)shape.a * (double)shape.b * (double)shape.s / ROWS;
    const double kv = (double)shape.kv * (double)shape.b * (double)shape.s / ROWS;
    Work w = {};
    w.load_requests = rows, w.load_sectors = 8 * rows;
    w.store_requests = rows + tiles, w.store_sectors = 4 * rows + tiles;
    w.memory_sectors = 12 * rows + ceil(a / 8) + 2 * ceil(kv / 8);
    w.shared_passes = tiles * (8 + 8 * 8);
    // maximum and code of a number; maxima joined. 1 / scale; scale
    w.flops = rows * 2 * D + tiles * ENCODER * 13;
    w.flop_instructions = rows * 2 * LANE_PART + tiles * ENCODER / 32 * 13;
    w.special_instructions = tiles * (ENCODER / 32 + 1);
    w.barriers = tiles;
    return w;
}

#endif
