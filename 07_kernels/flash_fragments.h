// flash_fragments.h: what the files of FlashAttention on tensor cores share: tiles of 16-bit rows in shared
// memory, and their products in fragments of a warp (cuda/instructions.h).
//
// A tile has rows of D numbers, in chunks of 16 bytes that are swizzled by their row, chunk c at c ^ (row
// mod 8): the eight rows that ldmatrix reads together lie in all banks. Since a row has a power of two of
// chunks, 16 columns further is the place XOR 16. In a fragment of 16 rows lane l has numbers of rows l / 4
// and l / 4 + 8, so that four lanes share a row.
#ifndef FLASH_FRAGMENTS_H
#define FLASH_FRAGMENTS_H

#include "cuda/instructions.h"
#include "flash_tiles.h"

enum { CHUNK = 8 };  // numbers in 16 bytes

template <int D>
__device__ static inline int place(int row, int chunk) {
    return row * D + (chunk ^ row % 8) * CHUNK;
}

__device__ static inline int own_lane() { return (int)threadIdx.x % 32; }
__device__ static inline int own_warp() { return (int)threadIdx.x / 32; }

// Begins to copy rows first ... of one head to a tile, by T threads; rows are `stride` numbers apart, and
// those from `end` on are zero. A thread's rows are multiples of 8 apart, and so swizzled alike.
template <int ROWS, int D, int T, class Number>
__device__ static inline void copy_rows(Number *tile, const Number *head, int first, int end,
                                        int64_t stride) {
    constexpr int CHUNKS = D / CHUNK, STEP = T / CHUNKS;
    static_assert(STEP % 8 == 0, "rows of one thread");
    const int own = (int)threadIdx.x / CHUNKS, chunk = (int)threadIdx.x % CHUNKS;
    Number *to = tile + place<D>(own, chunk);
    const Number *from = head + (first + own) * stride + chunk * CHUNK;
    const int rows = end - first - own;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP) cp_async(to + i * D, from + i * stride, i < rows);
}

// ---- fragments ----

// Rows row0 to row0 + 15 and columns column0 to column0 + 15 of a tile, as an A.
template <int D, class T>
__device__ static inline void load_left(uint32_t (&a)[4], const T *tile, int row0, int column0) {
    const int lane = own_lane();
    ldmatrix_x4(a, tile + row0 * D + (place<D>(lane % 16, lane / 16) ^ column0));
}

// Two B of 16 x 8, side by side, in b[0], b[1] and b[2], b[3]: of the transposed tile, whose columns are
// rows row0 to row0 + 15 of what is stored; and of the tile itself.
template <int D, class T>
__device__ static inline void load_right_transposed(uint32_t (&b)[4], const T *tile, int row0,
                                                    int column0) {
    const int lane = own_lane();
    ldmatrix_x4(b, tile + row0 * D + (place<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2) ^ column0));
}
template <int D, class T>
__device__ static inline void load_right(uint32_t (&b)[4], const T *tile, int row0, int column0) {
    const int lane = own_lane();
    ldmatrix_x4_trans(b, tile + row0 * D + (place<D>(lane % 16, lane / 16) ^ column0));
}

// As an A, rows row0 to row0 + 15 and columns column0 to column0 + 15 of the transposed tile: its columns
// are rows of what is stored.
template <int D, class T>
__device__ static inline void load_left_transposed(uint32_t (&a)[4], const T *tile, int row0, int column0) {
    const int lane = own_lane();
    ldmatrix_x4_trans(a, tile + column0 * D + (place<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2) ^ row0));
}

// left += a right, over two B side by side.
template <class T>
__device__ static inline void multiply_pair(float (&left)[4], float (&right)[4], const uint32_t (&a)[4],
                                            const uint32_t (&b)[4]) {
    const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
    mma_m16n8k16<T>(left, a, first);
    mma_m16n8k16<T>(right, a, second);
}

// Two numbers of T in a register, x in its lower half.
template <class T>
__device__ uint32_t packed(float x, float y);
template <>
__device__ inline uint32_t packed<__nv_bfloat16>(float x, float y) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
    return (uint32_t)__bfloat16_as_ushort(both.x) | (uint32_t)__bfloat16_as_ushort(both.y) << 16;
}
template <>
__device__ inline uint32_t packed<__half>(float x, float y) {
    const __half2 both = __floats2half2_rn(x, y);
    return (uint32_t)__half_as_ushort(both.x) | (uint32_t)__half_as_ushort(both.y) << 16;
}

template <class T>
__device__ float2 unpacked(uint32_t both);
template <>
__device__ inline float2 unpacked<__nv_bfloat16>(uint32_t both) {
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
}
template <>
__device__ inline float2 unpacked<__half>(uint32_t both) {
    return make_float2(__half2float(__ushort_as_half((unsigned short)both)),
                       __half2float(__ushort_as_half((unsigned short)(both >> 16))));
}

// Two fragments side by side of a product's result, 16 x 8 each, as the A of the next product: lane l
// already has its elements of the left operand.
template <class T>
__device__ static inline void to_left(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = packed<T>(left[0], left[1]), a[1] = packed<T>(left[2], left[3]);
    a[2] = packed<T>(right[0], right[1]), a[3] = packed<T>(right[2], right[3]);
}

// 16 rows of a tile (=) fragments side by side: those of rows l / 4 times `upper`, and l / 4 + 8 `lower`.
template <int D, class T>
__device__ static __forceinline__ void put_rows(T *tile, const float (&sum)[D / 8][4], float upper,
                                               float lower) {
    const int row = own_lane() / 4, column = own_lane() % 4 * 2;
#pragma unroll
    for (int c = 0; c < D / 8; c++) {
        *reinterpret_cast<uint32_t *>(tile + place<D>(row, c) + column) =
            packed<T>(sum[c][0] * upper, sum[c][1] * upper);
        *reinterpret_cast<uint32_t *>(tile + place<D>(row + 8, c) + column) =
            packed<T>(sum[c][2] * lower, sum[c][3] * lower);
    }
}

// Rows first ... of one head (=) the first ROWS rows of a tile, by a warp, in chunks; none from `end` on.
template <int ROWS, int D, class T>
__device__ static inline void store_tile(T *head, const T *tile, int first, int end, int64_t stride) {
    constexpr int CHUNKS = D / CHUNK;
#pragma unroll
    for (int at = 0; at < ROWS * CHUNKS; at += 32) {
        const int row = (at + own_lane()) / CHUNKS, chunk = (at + own_lane()) % CHUNKS;
        if (first + row < end)
            *reinterpret_cast<uint4 *>(head + (first + row) * stride + chunk * CHUNK) =
                *reinterpret_cast<const uint4 *>(tile + place<D>(row, chunk));
    }
}

// ---- masks by tokens ----

enum { OWN_TOKENS = 128, OWN_HALF = ATTENTION_TILE };

// Which entries a block's 128 queries, or keys, share with each tile of 64 on the other side of their
// sample. Bounds are evaluated once, before the loop, and the results kept in shared memory: products leave
// no registers for more. A word of 4 bytes is little beside a tile of scores of 64 x 128.
template <bool OWN_ARE_QUERIES>
struct TokenPlan {
    const TokenHeads &shape;
    Token *own;       // the block's tokens
    uint32_t *tiles;  // of each tile: 2 bits, its state to the first half of them; 2 bits, to the other

    // By the whole block; before a barrier. room: plan_bytes.
    __device__ TokenPlan(const TokenHeads &shape, void *room, int own0)
        : shape(shape),
          own(static_cast<Token *>(room)),
          tiles(reinterpret_cast<uint32_t *>(own + OWN_TOKENS)) {
        for (int i = (int)threadIdx.x; i < OWN_TOKENS; i += (int)blockDim.x)
            own[i] = OWN_ARE_QUERIES ? query_at(shape, blockIdx.z, own0 + i)
                                     : key_at(shape, blockIdx.z, own0 + i);
        for (int i = (int)threadIdx.x; i < count(); i += (int)blockDim.x)
            tiles[i] = (uint32_t)state_of(own0, i) | (uint32_t)state_of(own0 + OWN_HALF, i) << 2;
    }
    __device__ TileState state_of(int own0, int tile) const {
        const int other0 = tile * ATTENTION_TILE;
        return tile_state<OWN_HALF, ATTENTION_TILE>(shape, blockIdx.z, OWN_ARE_QUERIES ? own0 : other0,
                                                    OWN_ARE_QUERIES ? other0 : own0);
    }
    __device__ int count() const { return (int)(OWN_ARE_QUERIES ? shape.keys : shape.queries).tiles; }
    __device__ TileState state(int tile, int half) const {
        return static_cast<TileState>(tiles[tile] >> 2 * half & 3);
    }
    // The first tile from `tile` on that is not empty; count(): none. By a whole warp.
    __device__ int next(int tile) const {
        while (tile < count() && !(tiles[tile] & 15)) tile++;
        return tile;
    }
    // In a product of 16 own tokens, from `row0` on, and 8 N of the others, from column0 on, entries whose
    // tokens do not see one another are set to -inf.
    template <int N>
    __device__ void mask(float (&s)[N][4], int row0, int column0) const {
        const Token row[2] = {own[row0 + own_lane() / 4], own[row0 + own_lane() / 4 + 8]};
        uint32_t seen = 0;  // a bit for each entry: a loop has no registers by number
#pragma unroll 2
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int column = column0 + own_lane() % 4 * 2 + 8 * j + e % 2;
                seen |= (uint32_t)(OWN_ARE_QUERIES
                                       ? sees(shape, row[e / 2], key_at(shape, blockIdx.z, column))
                                       : sees(shape, query_at(shape, blockIdx.z, column), row[e / 2]))
                        << (4 * j + e);
            }
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (!(seen >> (4 * j + e) & 1)) s[j][e] = -INFINITY;
    }
};
// Nothing by order.
static inline int64_t plan_bytes(const Heads &, int64_t) { return 0; }
static inline int64_t plan_bytes(const TokenHeads &, int64_t tiles) {
    return OWN_TOKENS * (int64_t)sizeof(Token) + tiles * (int64_t)sizeof(uint32_t);
}

// Of a row of o and its gradient, by eight lanes: their product, of which delta is made; 0 of a row that
// does not exist.
template <class T, int D>
__device__ static inline float row_product(const T *o, const T *grad_o, bool exists) {
    float sum = 0;
    for (int column = thread_x() * 2; column < D && exists; column += SIDE * 2) {
        const float2 x = unpacked<T>(*reinterpret_cast<const uint32_t *>(o + column));
        const float2 y = unpacked<T>(*reinterpret_cast<const uint32_t *>(grad_o + column));
        sum = fmaf(x.x, y.x, sum), sum = fmaf(x.y, y.y, sum);
    }
    return row_sum(sum);
}

// Over the four lanes that share a row.
__device__ static inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ static inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

#endif
