// ops_cuda_chunk.cu: attention over a part of the keys on a GPU. No score leaves the block that computes it.
// Simple on purpose: chapter 07 makes it fast, with tensor cores and copies that run ahead.
//
// A block owns some rows (queries for o and dq, keys for dk and dv) and loops over the rows of the other
// side, one piece at a time in shared memory. A warp takes one of the block's rows, and each lane one row
// of the piece, so the lanes hold a row of scores. Then each lane takes columns of the values that the
// scores weight. Each output belongs to one block, which adds to it in the order of the other side's rows:
// no atomics, and the same bits every time.
#include <math.h>

#include "ops_cuda.h"

constexpr int WARPS = 8;
constexpr int MOST_ROWS = 32;  // of a block, and of a piece, where each has a lane
constexpr int ROWS_OF_WARP = MOST_ROWS / WARPS;

// Like attention_tile (attention_mask.h).
__device__ static inline TileState tile_state(TileBounds q, TileBounds k) {
    if (q.last_position < k.first_position || q.last_document < k.first_document ||
        k.last_document < q.first_document)
        return TILE_EMPTY;
    const bool one_document = q.first_document == q.last_document && k.first_document == k.last_document;
    return one_document && q.first_position >= k.last_position ? TILE_FULL : TILE_PARTIAL;
}

__device__ static inline bool sees(const ChunkTokens &q, int64_t query, const ChunkTokens &k, int64_t key) {
    return k.positions[key] <= q.positions[query] && k.documents[key] == q.documents[query];
}

// Over a warp; each lane gets the same bits.
template <class A>
__device__ static inline A warp_max(A x) {
    for (int lanes = 1; lanes < WARP; lanes *= 2) {
        const A other = __shfl_xor_sync(0xffffffff, x, lanes);
        x = x < other ? other : x;  // skips NaN; the sum does not
    }
    return x;
}
template <class A>
__device__ static inline A warp_sum(A x) {
    for (int lanes = 1; lanes < WARP; lanes *= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
    return x;
}

template <class A>
__device__ static inline A shift(A max) {
    return max == -INFINITY ? 0 : max;
}

// Rows of one head in shared memory. Their stride is odd, so lanes that read the same column of 32 rows
// have no bank conflict.
template <class A>
struct Rows {
    A *at;
    int64_t d;

    __device__ int64_t stride() const { return d | 1; }
    __device__ A *row(int64_t i) const { return at + i * stride(); }
    // From (…, stride_of) in global memory, by the whole block.
    template <class T>
    __device__ void fetch(const T *from, int64_t from_stride, int64_t rows) const {
        for (int64_t i = threadIdx.x; i < rows * d; i += blockDim.x)
            row(i / d)[i % d] = wide(from[i / d * from_stride + i % d]);
    }
    __device__ void clear(int64_t rows) const {
        for (int64_t i = threadIdx.x; i < rows * d; i += blockDim.x) row(i / d)[i % d] = 0;
    }
    __device__ A dot(int64_t i, const A *other) const {
        A sum = 0;
        for (int64_t x = 0; x < d; x++) sum = fma(row(i)[x], other[x], sum);
        return sum;
    }
};

// The rows that a block computes: [first, first + count) of tile `tile` of a side's head.
struct Own {
    int64_t sample, head, tile, first, count;
};
__device__ static inline Own own_rows(int64_t block, const ChunkTokens &side, int64_t heads, int64_t rows) {
    const int64_t per_tile = ATTENTION_TILE / rows, pieces = side.tiles * per_tile;
    const int64_t piece = block % pieces, unit = block / pieces;
    const int64_t end = least((piece + 1) * rows, side.s);
    return {unit / heads, unit % heads, piece / per_tile, piece * rows, end - piece * rows};
}

// Calls f(state, first, columns) for each piece of a head's other side, [first, first + columns) of its
// sample, with the piece's rows of x and y, which are `stride` apart, in shared memory. Skips tiles that
// are empty according to state_of(their bounds).
template <class T, class A, class StateOf, class F>
__device__ static inline void each_piece(const ChunkTokens &side, int64_t sample, int64_t rows,
                                         const Rows<A> &of_x, const T *x, const Rows<A> &of_y, const T *y,
                                         int64_t stride, StateOf state_of, F f) {
    for (int64_t tile = 0; tile < side.tiles; tile++) {
        const TileState state = state_of(side.bounds[sample * side.tiles + tile]);
        if (state == TILE_EMPTY) continue;
        const int64_t tile_end = least((tile + 1) * ATTENTION_TILE, side.s);
        for (int64_t first = tile * ATTENTION_TILE; first < tile_end; first += rows) {
            const int64_t columns = least(rows, tile_end - first);
            __syncthreads();  // all have read the previous piece
            of_x.fetch(x + first * stride, stride, columns);
            of_y.fetch(y + first * stride, stride, columns);
            __syncthreads();
            f(state, first, columns);
        }
    }
}

// ---- forward ----

template <class T>
__global__ void chunk_forward(Arithmetic<T> *o, Arithmetic<T> *lse, const T *q, const T *k, const T *v,
                              AttentionChunk at, Arithmetic<T> scale, int64_t rows) {
    typedef Arithmetic<T> A;
    DYNAMIC_SHARED(A, room);
    __shared__ A weights[WARPS][WARP];
    const int64_t d = at.head_size, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Own own = own_rows(blockIdx.x, at.queries, at.heads, rows);
    if (own.count <= 0) return;
    const Rows<A> of_q = {room, d}, acc = {of_q.row(rows), d}, of_k = {acc.row(rows), d},
                  of_v = {of_k.row(rows), d};
    const int64_t query = own.sample * at.queries.s + own.first;  // the block's first
    const int64_t q_stride = at.heads * d, k_stride = at.kv_heads * d;
    const int64_t q_at = query * q_stride + own.head * d;
    const int64_t k_at = own.sample * at.keys.s * k_stride + own.head / (at.heads / at.kv_heads) * d;
    of_q.fetch(q + q_at, q_stride, own.count);
    acc.fetch(o + q_at, q_stride, own.count);
    // As if one key had been seen so far, with the log-sum-exp as its score and o as its value.
    A max[ROWS_OF_WARP], sum[ROWS_OF_WARP];
    for (int i = 0; i < ROWS_OF_WARP; i++) {
        const int64_t row = warp + i * WARPS;
        max[i] = row < own.count ? lse[(query + row) * at.heads + own.head] : (A)-INFINITY;
        sum[i] = 1;
    }
    const TileBounds bounds = at.queries.bounds[own.sample * at.queries.tiles + own.tile];
    each_piece(
        at.keys, own.sample, rows, of_k, k + k_at, of_v, v + k_at, k_stride,
        [&](TileBounds keys) { return tile_state(bounds, keys); },
        [&](TileState state, int64_t first, int64_t columns) {
            for (int i = 0; i < ROWS_OF_WARP; i++) {
                const int64_t row = warp + i * WARPS;
                if (row >= own.count) break;
                const bool seen =
                    lane < columns && (state == TILE_FULL || sees(at.queries, query + row, at.keys,
                                                                  own.sample * at.keys.s + first + lane));
                const A score = seen ? of_k.dot(lane, of_q.row(row)) * scale : (A)-INFINITY;
                const A top = warp_max(score), larger = max[i] < top ? top : max[i], by = shift(larger);
                const A weight = exp(score - by), keep = exp(max[i] - by);
                sum[i] = sum[i] * keep + warp_sum(weight);
                max[i] = larger;
                weights[warp][lane] = weight;
                __syncwarp();
                for (int64_t x = lane; x < d; x += WARP) {
                    A more = acc.row(row)[x] * keep;
                    for (int64_t j = 0; j < columns; j++) more = fma(weights[warp][j], of_v.row(j)[x], more);
                    acc.row(row)[x] = more;
                }
                __syncwarp();
            }
        });
    __syncthreads();
    for (int i = 0; i < ROWS_OF_WARP; i++) {
        const int64_t row = warp + i * WARPS;
        if (row >= own.count) break;
        const A inverse = sum[i] == 0 ? 0 : 1 / sum[i];
        for (int64_t x = lane; x < d; x += WARP) o[q_at + row * q_stride + x] = acc.row(row)[x] * inverse;
        if (lane == 0) lse[(query + row) * at.heads + own.head] = max[i] + log(sum[i]);
    }
}

// ---- backward ----

// Thread (row, head)
template <class T, class O>
__global__ void chunk_dots(Arithmetic<T> *dots, const O *o, const T *d_o, int64_t count, int64_t d) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    Arithmetic<T> sum = 0;
    for (int64_t x = 0; x < d; x++) sum += wide(o[i * d + x]) * wide(d_o[i * d + x]);
    dots[i] = sum;
}

// The contribution of a pair of a query and a key:
//   forward: probs = softmax(scores) along each row;  dscores = probs (dprobs - sum(probs dprobs))
// The sum is over all chunks: it equals sum(o d_o).
template <class A>
struct Pair {
    A prob, dscore;
};
template <class A>
__device__ static inline Pair<A> pair_of(A score, A dprob, A lse, A dots) {
    const A prob = exp(score - shift(lse));
    return {prob, prob * (dprob - dots)};
}

// dq += dscores k scale
template <class T>
__global__ void chunk_backward_queries(Arithmetic<T> *dq, const T *d_o, const T *q, const T *k, const T *v,
                                       const Arithmetic<T> *lse, const Arithmetic<T> *dots,
                                       AttentionChunk at, Arithmetic<T> scale, int64_t rows) {
    typedef Arithmetic<T> A;
    DYNAMIC_SHARED(A, room);
    __shared__ A weights[WARPS][WARP];
    const int64_t d = at.head_size, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Own own = own_rows(blockIdx.x, at.queries, at.heads, rows);
    if (own.count <= 0) return;
    const Rows<A> of_q = {room, d}, of_do = {of_q.row(rows), d}, sum = {of_do.row(rows), d},
                  of_k = {sum.row(rows), d}, of_v = {of_k.row(rows), d};
    const int64_t query = own.sample * at.queries.s + own.first;
    const int64_t q_stride = at.heads * d, k_stride = at.kv_heads * d;
    const int64_t q_at = query * q_stride + own.head * d;
    const int64_t k_at = own.sample * at.keys.s * k_stride + own.head / (at.heads / at.kv_heads) * d;
    of_q.fetch(q + q_at, q_stride, own.count);
    of_do.fetch(d_o + q_at, q_stride, own.count);
    sum.clear(own.count);
    const TileBounds bounds = at.queries.bounds[own.sample * at.queries.tiles + own.tile];
    each_piece(
        at.keys, own.sample, rows, of_k, k + k_at, of_v, v + k_at, k_stride,
        [&](TileBounds keys) { return tile_state(bounds, keys); },
        [&](TileState state, int64_t first, int64_t columns) {
            for (int64_t row = warp; row < own.count; row += WARPS) {
                const int64_t statistic = (query + row) * at.heads + own.head;
                const bool seen =
                    lane < columns && (state == TILE_FULL || sees(at.queries, query + row, at.keys,
                                                                  own.sample * at.keys.s + first + lane));
                A dscore = 0;
                if (seen)
                    dscore = pair_of(of_k.dot(lane, of_q.row(row)) * scale, of_v.dot(lane, of_do.row(row)),
                                     lse[statistic], dots[statistic])
                                 .dscore;
                weights[warp][lane] = dscore * scale;
                __syncwarp();
                for (int64_t x = lane; x < d; x += WARP) {
                    A more = sum.row(row)[x];
                    for (int64_t j = 0; j < columns; j++) more = fma(weights[warp][j], of_k.row(j)[x], more);
                    sum.row(row)[x] = more;
                }
                __syncwarp();
            }
        });
    __syncthreads();
    for (int64_t i = threadIdx.x; i < own.count * d; i += blockDim.x)
        dq[q_at + i / d * q_stride + i % d] += sum.row(i / d)[i % d];
}

// dk += dscores^T q scale, dv += probs^T d_o, over all query heads that read this key head
template <class T>
__global__ void chunk_backward_keys(Arithmetic<T> *dk, Arithmetic<T> *dv, const T *d_o, const T *q,
                                    const T *k, const T *v, const Arithmetic<T> *lse,
                                    const Arithmetic<T> *dots, AttentionChunk at, Arithmetic<T> scale,
                                    int64_t rows) {
    typedef Arithmetic<T> A;
    DYNAMIC_SHARED(A, room);
    __shared__ A probs[WARPS][WARP];
    __shared__ A dscores[WARPS][WARP];
    const int64_t d = at.head_size, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t group = at.heads / at.kv_heads;
    const Own own = own_rows(blockIdx.x, at.keys, at.kv_heads, rows);
    if (own.count <= 0) return;
    const Rows<A> of_k = {room, d}, of_v = {of_k.row(rows), d}, sum_k = {of_v.row(rows), d},
                  sum_v = {sum_k.row(rows), d}, of_q = {sum_v.row(rows), d}, of_do = {of_q.row(rows), d};
    const int64_t key = own.sample * at.keys.s + own.first;
    const int64_t q_stride = at.heads * d, k_stride = at.kv_heads * d;
    const int64_t k_at = key * k_stride + own.head * d;
    of_k.fetch(k + k_at, k_stride, own.count);
    of_v.fetch(v + k_at, k_stride, own.count);
    sum_k.clear(own.count);
    sum_v.clear(own.count);
    const TileBounds bounds = at.keys.bounds[own.sample * at.keys.tiles + own.tile];
    for (int64_t head = own.head * group; head < (own.head + 1) * group; head++) {
        const int64_t q_at = own.sample * at.queries.s * q_stride + head * d;
        each_piece(
            at.queries, own.sample, rows, of_q, q + q_at, of_do, d_o + q_at, q_stride,
            [&](TileBounds queries) { return tile_state(queries, bounds); },
            [&](TileState state, int64_t first, int64_t columns) {
                const int64_t query = own.sample * at.queries.s + first;
                for (int64_t row = warp; row < own.count; row += WARPS) {
                    const int64_t statistic = (query + lane) * at.heads + head;
                    const bool seen =
                        lane < columns &&
                        (state == TILE_FULL || sees(at.queries, query + lane, at.keys, key + row));
                    Pair<A> pair = {0, 0};
                    if (seen)
                        pair = pair_of(of_q.dot(lane, of_k.row(row)) * scale,
                                       of_do.dot(lane, of_v.row(row)), lse[statistic], dots[statistic]);
                    probs[warp][lane] = pair.prob;
                    dscores[warp][lane] = pair.dscore * scale;
                    __syncwarp();
                    for (int64_t x = lane; x < d; x += WARP) {
                        A more_k = sum_k.row(row)[x], more_v = sum_v.row(row)[x];
                        for (int64_t j = 0; j < columns; j++) {
                            more_k = fma(dscores[warp][j], of_q.row(j)[x], more_k);
                            more_v = fma(probs[warp][j], of_do.row(j)[x], more_v);
                        }
                        sum_k.row(row)[x] = more_k;
                        sum_v.row(row)[x] = more_v;
                    }
                    __syncwarp();
                }
            });
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < own.count * d; i += blockDim.x) {
        dk[k_at + i / d * k_stride + i % d] += sum_k.row(i / d)[i % d];
        dv[k_at + i / d * k_stride + i % d] += sum_v.row(i / d)[i % d];
    }
}

// ---- launches ----

// The most rows of a block for which `arrays` arrays fit into shared memory, and their bytes.
template <class A>
struct Fit {
    int64_t rows = MOST_ROWS;
    size_t bytes;

    Fit(int64_t arrays, int64_t d) {
        // The warps' scores also take some.
        const int64_t most = SHARED_BYTES - 2 * WARPS * WARP * (int64_t)sizeof(A);
        const int64_t row = arrays * (d | 1) * (int64_t)sizeof(A);
        while (rows > 1 && rows * row > most) rows /= 2;
        CHECK(row <= most,
              "attention_chunk: heads of %lld elements are more than the %lld that fit into a "
              "block's shared memory",
              (long long)d, (long long)(most / (arrays * (int64_t)sizeof(A)) - 1));
        bytes = (size_t)(rows * row);
    }
    unsigned blocks(const ChunkTokens &side, int64_t units) const {
        return blocks_for("attention_chunk", units * side.tiles * (ATTENTION_TILE / rows));
    }
};

static bool nothing(AttentionChunk at) { return at.b == 0 || at.queries.s == 0 || at.keys.s == 0; }

void kernel_attention_chunk_forward(DType dtype, void *o, void *lse, const void *q, const void *k,
                                    const void *v, AttentionChunk at) {
    if (nothing(at)) return;
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        using A = Arithmetic<T>;
        const Fit<A> fit(4, at.head_size);
        LAUNCH(chunk_forward<T>, fit.blocks(at.queries, at.b * at.heads), WARPS * WARP, fit.bytes, stream(),
               (A *)o, (A *)lse, (const T *)q, (const T *)k, (const T *)v, at,
               (A)(1 / sqrt((double)at.head_size)), fit.rows);
    });
}

void kernel_attention_chunk_dots(DType dtype, void *dots, DType o_dtype, const void *o, const void *d_o,
                                 int64_t n, AttentionHeads heads) {
    const int64_t count = n * heads.heads, d = heads.head_size;
    if (count == 0) return;
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        using A = Arithmetic<T>;
        const unsigned threads = threads_for(count),
                       blocks = blocks_for("attention_chunk_dots", ceil_div(count, threads));
        if (o_dtype == dtype)
            LAUNCH((chunk_dots<T, T>), blocks, threads, 0, stream(), (A *)dots, (const T *)o,
                   (const T *)d_o, count, d);
        else
            LAUNCH((chunk_dots<T, A>), blocks, threads, 0, stream(), (A *)dots, (const A *)o,
                   (const T *)d_o, count, d);
    });
}

void kernel_attention_chunk_backward(DType dtype, void *dq, void *dk, void *dv, const void *d_o,
                                     const void *q, const void *k, const void *v, const void *lse,
                                     const void *dots, AttentionChunk at) {
    if (nothing(at)) return;
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        using A = Arithmetic<T>;
        const A scale = (A)(1 / sqrt((double)at.head_size));
        const Fit<A> queries(5, at.head_size), keys(6, at.head_size);
        LAUNCH(chunk_backward_queries<T>, queries.blocks(at.queries, at.b * at.heads), WARPS * WARP,
               queries.bytes, stream(), (A *)dq, (const T *)d_o, (const T *)q, (const T *)k, (const T *)v,
               (const A *)lse, (const A *)dots, at, scale, queries.rows);
        LAUNCH(chunk_backward_keys<T>, keys.blocks(at.keys, at.b * at.kv_heads), WARPS * WARP, keys.bytes,
               stream(), (A *)dk, (A *)dv, (const T *)d_o, (const T *)q, (const T *)k, (const T *)v,
               (const A *)lse, (const A *)dots, at, scale, keys.rows);
    });
}
