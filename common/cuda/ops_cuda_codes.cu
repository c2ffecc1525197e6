// ops_cuda_codes.cu: random rounding, and 8-bit codes with scales, on a GPU; ops_cuda_codes_matmul.cu
// multiplies them.
#include <math.h>

#include "ops_cuda.h"

// ---- random rounding ----

// The lowest word of Philox 4x32-10 (Salmon et al. 2011), as in tensor/rng.c; Random123's own header
// throws exceptions, which device code is compiled without.
__device__ inline uint32_t philox(uint64_t seed, uint64_t stream, uint64_t index) {
    uint32_t key[] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t x[] = {(uint32_t)index, (uint32_t)(index >> 32), (uint32_t)stream, (uint32_t)(stream >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t even = (uint64_t)0xd2511f53 * x[0], odd = (uint64_t)0xcd9e8d57 * x[2];
        x[0] = (uint32_t)(odd >> 32) ^ x[1] ^ key[0];
        x[1] = (uint32_t)odd;
        x[2] = (uint32_t)(even >> 32) ^ x[3] ^ key[1];
        x[3] = (uint32_t)even;
        key[0] += 0x9e3779b9, key[1] += 0xbb67ae85;
    }
    return x[0];
}

__global__ void round_randomly(uint16_t *y, const float *x, RandomPlace place, int64_t count) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += all) {
        const int64_t stored = place.first + i;
        const uint64_t whole = (uint64_t)(place.origin + stored / place.columns * place.whole_columns +
                                          stored % place.columns);
        const uint64_t index = (uint64_t)place.step << 40 | whole;
        const uint32_t random = philox(place.seed, place.stream, index) & 0xffff;
        y[i] = isfinite(x[i]) ? (uint16_t)((__float_as_uint(x[i]) + random) >> 16)
                              : __bfloat16_as_ushort(__float2bfloat16_rn(x[i]));
    }
}

void kernel_round_stochastic(uint16_t *y, const float *x, RandomPlace place, int64_t count) {
    if (count > 0) LAUNCH(round_randomly, blocks_of(count), MOST_THREADS, 0, stream(), y, x, place, count);
}

// ---- codes ----

// A matrix as its codes are stored, and its tiles.
struct Tiling {
    int64_t rows, columns, tile_rows, tile_columns, across;
    bool transpose;

    static Tiling of(int64_t x_rows, int64_t x_columns, bool turned, Tile tile) {
        const int64_t rows = turned ? x_columns : x_rows, columns = turned ? x_rows : x_columns;
        const int64_t tile_rows = side(tile.rows, rows), tile_columns = side(tile.columns, columns);
        return {rows, columns, tile_rows, tile_columns, ceil_div(columns, tile_columns), turned};
    }
    static int64_t side(int64_t of_tile, int64_t of_matrix) {
        const int64_t all = of_matrix > 0 ? of_matrix : 1;
        return of_tile > 0 ? least(of_tile, all) : all;
    }
    __device__ int64_t tile(int64_t row, int64_t column) const {
        return row / tile_rows * across + column / tile_columns;
    }
    __device__ int64_t tile(int64_t i) const { return tile(i / columns, i % columns); }
    // Whether N consecutive elements, from a multiple of N on, are always in one tile.
    bool holds_packs(int64_t n) const { return is_one() || (columns % n == 0 && tile_columns % n == 0); }
    bool is_one() const { return tile_rows >= rows && tile_columns >= columns; }
};

// Without their signs, the number with the larger bits is the larger one, and NaN is larger than any.
struct Larger {
    __device__ unsigned operator()(unsigned a, unsigned b) const { return a < b ? b : a; }
};

template <class A>
__device__ inline unsigned size_of(A number) {
    return __float_as_uint((float)number) & 0x7fffffff;
}

// Each share of a tile belongs to a block or, if a warp can load a whole tile at once, to a warp. It takes
// one atomic, as atomics on the same word wait for each other. Each thread increments the row and the
// column of its pack, because divisions would take longer than memory does.
template <int N, class T>
__global__ void find_amax(unsigned *most, const T *x, Tiling t, int64_t shares, int64_t sharing,
                          bool by_warp) {
    constexpr int AHEAD = BYTES_AHEAD / PACK_BYTES;
    const int64_t threads = by_warp ? WARP : blockDim.x, here = blockDim.x / threads;
    const int64_t packs = t.tile_columns / N;
    const int64_t down = sharing * threads / packs, right = sharing * threads % packs * N;
    for (int64_t at = blockIdx.x * here + threadIdx.x / threads; at < shares; at += gridDim.x * here) {
        const int64_t tile = at / sharing;
        const int64_t row0 = tile / t.across * t.tile_rows, column0 = tile % t.across * t.tile_columns;
        const int64_t row_end = least(row0 + t.tile_rows, t.rows), column_end = column0 + packs * N;
        const int64_t first = at % sharing * threads + threadIdx.x % threads;
        int64_t row = row0 + first / packs, column = column0 + first % packs * N;
        unsigned largest = 0;
        while (row < row_end) {
            Pack<T, N> in[AHEAD] = {};
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                if (row < row_end && column < t.columns) in[k] = load<N>(x + row * t.columns + column);
                row += down, column += right;
                if (column >= column_end) column -= packs * N, row++;
            }
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                for (int j = 0; j < N; j++) largest = Larger()(largest, size_of(wide(in[k].x[j])));
        }
        // After the last pack; only in a tile that is a single row.
        for (int64_t i = t.columns / N * N + first; i < t.columns; i += sharing * threads)
            largest = Larger()(largest, size_of(wide(x[i])));
        if (by_warp)
            for (int lanes = 1; lanes < WARP; lanes *= 2)
                largest = Larger()(largest, from_lane(largest, lanes));
        else largest = over_block(largest, Larger());
        if (threadIdx.x % threads == 0) atomicMax(&most[tile], largest);
    }
}

constexpr int PATCH_WARPS = MOST_THREADS / WARP;  // of a block that takes 32 rows of the transpose
constexpr int64_t PART = 128;                     // columns of a tile that share one

// The same for the transpose. A lane has a row, so that a warp reads neighbours in x; a block has one of a
// tile's `parts`.
template <class T>
__global__ void find_amax_turned(unsigned *most, const T *x, Tiling t, int64_t parts) {
    __shared__ unsigned of_warp[PATCH_WARPS][WARP];
    const int64_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = blockIdx.x % parts;
    const int64_t across = blockIdx.x / parts % t.across, row0 = blockIdx.x / parts / t.across * WARP;
    const int64_t column0 = across * t.tile_columns + part * PART, row = row0 + lane;
    const int64_t tile_end = least((across + 1) * t.tile_columns, t.columns);
    const int64_t end = row < t.rows ? least(column0 + PART, tile_end) : 0;
    unsigned largest = 0;
#pragma unroll 8
    for (int64_t column = column0 + warp; column < end; column += PATCH_WARPS)
        largest = Larger()(largest, size_of(wide(x[column * t.rows + row])));
    of_warp[warp][lane] = largest;
    __syncthreads();
    if (warp > 0) return;
    for (int i = 1; i < PATCH_WARPS; i++) largest = Larger()(largest, of_warp[i][lane]);
    unsigned *to = &most[t.tile(row, across * t.tile_columns)];
    if (row0 / t.tile_rows != (row0 + WARP - 1) / t.tile_rows) {
        if (row < t.rows) atomicMax(to, largest);
        return;
    }
    for (int lanes = 1; lanes < WARP; lanes *= 2) largest = Larger()(largest, from_lane(largest, lanes));
    if (lane == 0) atomicMax(to, largest);
}

__global__ void find_scale(float *scale, const float *amax, float largest, bool power_of_two,
                           int64_t count) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += all) {
        float s = amax[i] > 0 && isfinite(amax[i]) ? fmaxf(amax[i] / largest, ldexpf(1, -126)) : 1;
        int power;
        if (power_of_two) s = frexpf(s, &power) == 0.5f ? s : ldexpf(1, power);
        scale[i] = s;
    }
}

// To 8 bits, what is beyond the largest number saturates.
template <class Code, class A>
__device__ inline Code code_of(A x, float scale) {
    return narrow<Code>((float)x / scale);
}

// In packs that do not extend into another tile, so that each looks up its scale once.
template <class T, class Code>
struct Encode {
    Code *codes;
    const T *x;
    const float *scale;
    Tiling t;
    template <int N>
    using In = Pack<T, N>;
    template <int N>
    __device__ In<N> read(int64_t first) const {
        return load<N>(x + first);
    }
    template <int N>
    __device__ void write(int64_t first, const In<N> &in) const {
        const float by = scale[t.tile(first)];
        Pack<Code, N> out;
        for (int j = 0; j < N; j++) out.x[j] = code_of<Code>(wide(in.x[j]), by);
        store<N>(codes + first, out);
    }
};

// Codes of the transpose: a block transposes a patch of 32 x 32, so that a warp reads neighbours in x and
// writes neighbours in the codes.
template <class T, class Code>
__global__ void encode_turned(Code *codes, const T *x, const float *scale, Tiling t) {
    __shared__ Arithmetic<T> patch[WARP][WARP + 1];
    constexpr int WARPS = PATCH_WARPS, EACH = WARP / WARPS;
    const int64_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, across = ceil_div(t.columns, WARP);
    const int64_t row0 = blockIdx.x / across * WARP, column0 = blockIdx.x % across * WARP;
#pragma unroll  // all loads are in flight at once
    for (int i = 0; i < EACH; i++) {
        const int64_t row = row0 + lane, column = column0 + warp + i * WARPS;
        if (row < t.rows && column < t.columns)
            patch[warp + i * WARPS][lane] = wide(x[column * t.rows + row]);
    }
    __syncthreads();  // the patch is complete
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int64_t row = row0 + warp + i * WARPS, column = column0 + lane;
        if (row < t.rows && column < t.columns)
            codes[row * t.columns + column] =
                code_of<Code>(patch[lane][warp + i * WARPS], scale[t.tile(row, column)]);
    }
}

template <class T, class Code>
__global__ void decode(T *y, const Code *codes, const float *scale, Tiling t) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < t.rows * t.columns; i += all)
        y[i] = narrow<T>(wide(codes[i]) * scale[t.tile(i)]);
}

template <int N, class T>
static void launch_amax(unsigned *most, const T *x, const Tiling &t) {
    constexpr int64_t ENOUGH = BYTES_AHEAD / sizeof(T), MOST_SHARING = 1024;  // for a thread; blocks
    const int64_t size = t.tile_rows * t.tile_columns, tiles = ceil_div(t.rows, t.tile_rows) * t.across;
    const bool by_warp = size <= WARP * ENOUGH;
    const unsigned threads = by_warp ? MOST_THREADS : threads_for(ceil_div(size, ENOUGH));
    const int64_t sharing = by_warp ? 1 : least(ceil_div(size, ENOUGH * threads), MOST_SHARING);
    const int64_t blocks = by_warp ? ceil_div(tiles * WARP, threads) : tiles * sharing;
    LAUNCH((find_amax<N, T>), (unsigned)least(blocks, INT_MAX), threads, 0, stream(), most, x, t,
           tiles * sharing, sharing, by_warp);
}

void kernel_tile_amax(DType dtype, float *amax, const void *x, int64_t rows, int64_t columns,
                      bool transpose, Tile tile) {
    Tiling t = Tiling::of(rows, columns, transpose, tile);
    if (rows * columns == 0) return;
    // The maximum over a whole matrix is also that of its transpose, and of all elements as one row.
    if (t.is_one()) t = Tiling::of(1, rows * columns, false, {0, 0});
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        constexpr int N = pack_of<T>;
        unsigned *most = (unsigned *)amax;
        const T *from = (const T *)x;
        const int64_t patches = ceil_div(t.rows, WARP) * t.across, parts = ceil_div(t.tile_columns, PART);
        if (t.transpose)
            LAUNCH(find_amax_turned<T>, blocks_for("tile_amax", patches * parts), MOST_THREADS, 0, stream(),
                   most, from, t, parts);
        else if (is_aligned(x) && t.holds_packs(N) && t.columns >= N) launch_amax<N>(most, from, t);
        else launch_amax<1>(most, from, t);
    });
}

void kernel_tile_scale(float *scale, const float *amax, DType codes, ScaleRule rule, int64_t count) {
    if (count > 0)
        LAUNCH(find_scale, blocks_of(count), MOST_THREADS, 0, stream(), scale, amax,
               codes == E4M3 ? 448.0f : 57344.0f, rule == SCALE_POWER_OF_TWO, count);
}

template <class F>
static void by_encoded(DType dtype, F f) {
    if (dtype == F16) f(__half());
    else if (dtype == E4M3) f(__nv_fp8_e4m3());
    else f(__nv_fp8_e5m2());
}

template <class T, class Code>
static void encode(Code *codes, const T *x, const float *scale, const Tiling &t) {
    constexpr int N = pack_of<Code>;
    if (t.transpose)
        LAUNCH((encode_turned<T, Code>),
               blocks_for("encode", ceil_div(t.rows, WARP) * ceil_div(t.columns, WARP)), MOST_THREADS, 0,
               stream(), codes, x, scale, t);
    else
        for_each<N>(t.rows * t.columns, all_aligned(codes, x) && t.holds_packs(N),
                    Encode<T, Code>{codes, x, scale, t});
}

void kernel_encode(DType codes_dtype, void *codes, DType dtype, const void *x, const float *scale,
                   int64_t rows, int64_t columns, bool transpose, Tile tile) {
    Tiling t = Tiling::of(rows, columns, transpose, tile);
    if (rows * columns == 0) return;
    by_dtype(dtype, [&](auto type) {
        by_encoded(codes_dtype, [&](auto code) {
            encode((decltype(code) *)codes, (const decltype(type) *)x, scale, t);
        });
    });
}

void kernel_decode(DType dtype, void *y, DType codes_dtype, const void *codes, const float *scale,
                   int64_t rows, int64_t columns, Tile tile) {
    Tiling t = Tiling::of(rows, columns, false, tile);
    if (rows * columns == 0) return;
    by_dtype(dtype, [&](auto type) {
        by_encoded(codes_dtype, [&](auto code) {
            using T = decltype(type);
            using Code = decltype(code);
            LAUNCH((decode<T, Code>), blocks_of(rows * columns), MOST_THREADS, 0, stream(), (T *)y,
                   (const Code *)codes, scale, t);
        });
    });
}
