// flash_codes.h: operands of attention as 8-bit codes (e4m3), x = scale * code, with a scale for each tile
// of 128 rows of a head: the kernel that makes them, and what its work is.
//
// A tile is lines of 128 bytes, as many as its head has elements. With heads of 128 a line is a row, and
// codes are (b, s, heads, 128). With heads of 64, rows i and i + 64 of a tile share its line i: either half
// is an operand of wgmma by itself, and a copy moves nothing that is not wanted. There codes are (b, lines,
// heads, 128) of whole tiles, with zeros behind the last row.
#ifndef FLASH_CODES_H
#define FLASH_CODES_H

#include "flash_warpgroups.h"

typedef __nv_fp8_e4m3 Code;
enum { ENCODER = 256, LANE_PART = TILE_ROW / 32 };  // threads; numbers of a lane
constexpr float LARGEST = 448;                      // of e4m3
// A tile's largest number is taken to be at least this, so that 1 / scale, the ratio of two scales, and sums
// in units of a scale stay finite. Smaller numbers lose bits, and become 0 below 2^-74.
constexpr float LEAST = LARGEST * 0x1p-64f;
template <int D>
constexpr int TILE_OF_CODES = D *TILE_ROW;  // bytes

__device__ static inline uint32_t codes(float a, float b, float c, float d) {
    return (uint32_t)__nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3) |
           (uint32_t)__nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3) << 16;
}

// Block (tile, head, sample): code and scale (b, heads, tiles) (=) of x (b, s, heads, D). A warp takes a
// line at a time.
template <class T, int D>
__global__ void __launch_bounds__(ENCODER) encode(Code *code, float *scale, const T *x, int s) {
    constexpr int WARPS = ENCODER / 32, EACH_WARP = D / WARPS;
    __shared__ float parts[WARPS];
    const int heads = (int)gridDim.y, tile = (int)blockIdx.x, column = own_lane() * LANE_PART;
    const int64_t lines = D == TILE_ROW ? s : (int64_t)gridDim.x * D;
    const int first = tile * ROWS + own_warp() + column / D * (ROWS / 2);
    const T *from = x + ((int64_t)blockIdx.z * s * heads + blockIdx.y) * D + column % D;
    const int64_t line = blockIdx.z * lines + tile * D + own_warp();
    Code *to = code + (line * heads + blockIdx.y) * TILE_ROW + column;
    float of_lane[EACH_WARP][LANE_PART], most = LEAST;
#pragma unroll
    for (int i = 0; i < EACH_WARP; i++) {
        const int row = first + i * WARPS;
        uint2 pair = make_uint2(0, 0);
        if (row < s) pair = *reinterpret_cast<const uint2 *>(from + (int64_t)row * heads * D);
        const float2 a = unpacked<T>(pair.x), b = unpacked<T>(pair.y);
        of_lane[i][0] = a.x, of_lane[i][1] = a.y, of_lane[i][2] = b.x, of_lane[i][3] = b.y;
#pragma unroll
        for (int c = 0; c < LANE_PART; c++) most = fmaxf(most, fabsf(of_lane[i][c]));
    }
    most = over_block<larger, WARPS>(most, 0, parts);
    const float by = LARGEST / most;
#pragma unroll
    for (int i = 0; i < EACH_WARP; i++) {
        const float *y = of_lane[i];
        if (D < TILE_ROW || first + i * WARPS < s)
            *reinterpret_cast<uint32_t *>(to + (int64_t)i * WARPS * heads * TILE_ROW) =
                codes(y[0] * by, y[1] * by, y[2] * by, y[3] * by);
    }
    if (threadIdx.x == 0) scale[(blockIdx.z * heads + blockIdx.y) * gridDim.x + tile] = most / LARGEST;
}

// ---- host code ----

static inline int64_t tiles_of_rows(int64_t s) { return (s + ROWS - 1) / ROWS; }

template <int D>
int64_t lines_of_rows(int64_t s) {
    return D == TILE_ROW ? s : tiles_of_rows(s) * D;
}

// One operand's codes, and scales (b, heads, tiles).
template <int D>
struct Coded {
    int64_t heads;
    Array<Code> codes;
    Array<float> scales;

    Coded(int64_t b, int64_t s, int64_t heads)
        : heads(heads),
          codes(b * lines_of_rows<D>(s) * heads * TILE_ROW),
          scales(b * heads * tiles_of_rows(s)) {}
};
template <int D>
struct Operands8 {
    Coded<D> q, k, v;

    template <class Shape>
    explicit Operands8(const Shape &n)
        : q(n.b, n.s, n.a), k(n.b, keys_of(n), n.kv), v(n.b, keys_of(n), n.kv) {}
};

// x: b samples of s rows.
template <class T, int D>
static void encode_one(const Coded<D> &to, const T *x, int64_t b, int64_t s) {
    const dim3 grid((unsigned)tiles_of_rows(s), (unsigned)to.heads, (unsigned)b);
    if (s) LAUNCH((encode<T, D>), grid, ENCODER, 0, 0, to.codes.at, to.scales.at, x, (int)s);
}

template <class T, int D, class Shape>
static void encode_all(const Operands8<D> &to, const T *q, const T *k, const T *v, const Shape &n) {
    encode_one(to.q, q, n.b, n.s);
    encode_one(to.k, k, n.b, keys_of(n)), encode_one(to.v, v, n.b, keys_of(n));
}

// Of Q, K and V; s a multiple of 128.
static inline Work formula_of_codes(const Heads &shape, double d) {
    const double rows = (double)(shape.b * shape.s * (shape.a + 2 * shape.kv)), tiles = rows / ROWS;
    const double a = (double)shape.a * (double)shape.b * (double)shape.s / ROWS;
    const double kv = (double)shape.kv * (double)shape.b * (double)shape.s / ROWS;
    const double lines = rows * d / TILE_ROW;
    Work w = {};
    w.load_requests = lines, w.load_sectors = 8 * lines;
    w.store_requests = lines + tiles, w.store_sectors = 4 * lines + tiles;
    w.memory_sectors = 12 * lines + ceil(a / 8) + 2 * ceil(kv / 8);
    w.shared_passes = tiles * (8 + 8 * 8);
    // maximum and code of a number; maxima joined. 1 / scale; scale
    w.flops = rows * 2 * d + tiles * ENCODER * 13;
    w.flop_instructions = lines * 2 * LANE_PART + tiles * ENCODER / 32 * 13;
    w.special_instructions = tiles * (ENCODER / 32 + 1);
    w.barriers = tiles;
    return w;
}

#endif
