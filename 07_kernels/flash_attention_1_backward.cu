// flash_attention_1_backward.cu: the backward pass of attention, from one stored word per row, the logarithm
// of its sum. Playbook: "Flash Attention 1-3"; Dao et al., "FlashAttention", 2022, Algorithm 4.
//
// Backward needs P = softmax(S), which forward has not kept. But P = e^(S - lse), so a tile of P can be
// recomputed by itself with one product, Q K'. That makes five products, where a stored P would need four:
//
//     P = e^(scale Q K' - lse)                    dV += P' dO
//     dP = dO V'                                  dK += dS' Q
//     dS = scale P (dP - rowsum(dO O))            dQ += dS K
//
// Softmax's backward needs the sum of P_ij dP_ij over all keys j. Since O = P V and dP = dO V', it is the dot
// product of dO_i and O_i: one number per query, and no pass over its row of scores.
//
//                    queries ->  of all query heads that share this head of K/V, one head after another
//     keys     K V   ■ ■ ■ ■         K, V, dK, dV    once for each tile of keys: dK and dV add up in
//       |      K V   . ■ ■ ■                         registers, and need no atomics
//       v      K V   . . ■ ■         Q, dO, O, lse   in for each pair of tiles
//              K V   . . . ■         dQ              out for each pair and, after the first, in
//
// Under a mask by position and document, the pairs are those in which some query sees some key
// (flash_mask.h). One block has all tiles of its heads, so the order of every sum is fixed: two runs agree
// in every bit. The price is that there are only b kv blocks. Extra memory: none.
//
// Proof: dQ, dK, dV within 4 times the error of the same steps in f32 on the CPU, each against f64, on odd
// lengths, with and without a mask, for shared K/V heads and for scores of large magnitude; the same under
// masks by position and document (attention_masks.h).
// Run: build/07_kernels/flash_attention_1_backward           (--gpu a100, --head-size 64, --verbose)
// Last line: PASS flash_attention_1_backward: it keeps 4096 times less of forward …
#include "attention_masks.h"

// rowsum(dO O), for each of the thread's rows; dO from its tile.
template <int D>
__device__ static inline void row_products(float (&delta)[EACH], const float *tile_do, const float *o,
                                           int64_t row0, int64_t end, int64_t stride) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int own = thread_y() + i * SIDE;
        float sum = 0;
#pragma unroll 1  // a pack at a time: few registers are free
        for (int column = thread_x() * 4; column < D; column += SIDE * 4) {
            float4 x = make_float4(0, 0, 0, 0);
            if (row0 + own < end) x = *reinterpret_cast<const float4 *>(o + (row0 + own) * stride + column);
            const float4 y = *reinterpret_cast<const float4 *>(tile_do + own * PITCH<D> + column);
            sum = fmaf(x.x, y.x, sum), sum = fmaf(x.y, y.y, sum);
            sum = fmaf(x.z, y.z, sum), sum = fmaf(x.w, y.w, sum);
        }
        delta[i] = row_sum(sum);
    }
}

// dq (= from the first tile of keys, += from the others) dS K, a few columns at a time: a thread's part of
// dK and dV leaves few registers.
template <int D>
__device__ static inline void add_dq(float *dq, const float *tile_ds, const float *tile_k, bool first,
                                     int64_t row0, int64_t end, int64_t stride) {
    constexpr int C = 64 / SIDE;
#pragma unroll 1
    for (int part = 0; part < D; part += 64) {
        float sum[EACH][C] = {};
        scores_by_rows<D>(sum, tile_ds, tile_k + part);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int64_t row = row0 + thread_y() + i * SIDE;
            if (row >= end) continue;
#pragma unroll
            for (int c = 0; c < C; c++) {
                float *out = &dq[row * stride + part + thread_x() + c * SIDE];
                *out = (first ? 0 : *out) + sum[i][c];
            }
        }
    }
}

// Block (K/V head, sample).
template <int D, class Shape>
__global__ void __launch_bounds__(THREADS, 1) attention_backward(Gradients grad, Operands in, Shape shape) {
    DYNAMIC_SHARED(float, tile_q);
    float *tile_k = tile_q + TILE * PITCH<D>, *tile_v = tile_k + TILE * PITCH<D>;
    float *tile_do = tile_v + TILE * PITCH<D>, *tile_p = tile_do + TILE * PITCH<D>;
    float *tile_ds = tile_p + TILE * SCORE_PITCH;
    const int64_t sample = blockIdx.y, keys = keys_of(shape), group = shape.a / shape.kv;
    const int64_t end = shape.s, first = sample * end;
    const int64_t stride = shape.a * D, key_stride = shape.kv * D;
    const int64_t key_head = sample * keys * key_stride + blockIdx.x * D;
    for (int64_t key0 = 0; key0 < keys; key0 += TILE) {
        load_rows<D>(tile_k, in.k + key_head, key0, keys, key_stride);
        load_rows<D>(tile_v, in.v + key_head, key0, keys, key_stride);
        float dk[EACH][D / SIDE] = {}, dv[EACH][D / SIDE] = {};
        for (int64_t head = blockIdx.x * group; head < (blockIdx.x + 1) * group; head++) {
            const int64_t base = first * stride + head * D;
            const float *lse = in.lse + (blockIdx.y * shape.a + head) * end;
            for (int64_t query0 = first_queries<TILE, TILE>(shape, sample, key0); query0 < end;
                 query0 = next_queries<TILE, TILE>(shape, sample, query0, key0)) {
                load_rows<D>(tile_q, in.q + base, query0, end, stride);
                load_rows<D>(tile_do, in.grad_o + base, query0, end, stride);
                __syncthreads();  // the tiles are complete
                float p[EACH][EACH], ds[EACH][EACH] = {}, delta[EACH];
                row_products<D>(delta, tile_do, in.o + base, query0, end, stride);
                scores_of<D>(p, tile_q, tile_k, shape, sample, query0, key0);
                rows_by_rows<D>(ds, tile_do, tile_v);
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    const int64_t row = query0 + thread_y() + i * SIDE;
                    // no weight beyond the end
                    const float sum = row < end ? log_sum_of<Shape>(lse[row]) : INFINITY;
#pragma unroll
                    for (int j = 0; j < EACH; j++) {
                        p[i][j] = expf(p[i][j] - sum);
                        ds[i][j] = shape.scale * (p[i][j] * (ds[i][j] - delta[i]));
                    }
                }
                store_scores(tile_p, p);
                store_scores(tile_ds, ds);
                __syncthreads();  // the columns of P and dS are complete
                scores_by_rows<D, true>(dv, tile_p, tile_do);
                scores_by_rows<D, true>(dk, tile_ds, tile_q);
                add_dq<D>(grad.dq + base, tile_ds, tile_k,
                          first_keys<TILE, TILE>(shape, sample, query0) == key0, query0, end, stride);
                __syncthreads();  // all threads have read the tiles
            }
        }
        store_rows<D>(grad.dk + key_head, dk, key0, keys, key_stride);
        store_rows<D>(grad.dv + key_head, dv, key0, keys, key_stride);
    }
}

// ---- host code ----

template <int D, class Shape>
static void launch(const Gradients &grad, const Operands &in, float *, const Shape &shape) {
    if (shape.s == 0) return;
    const auto kernel = attention_backward<D, Shape>;
    const int64_t bytes = tile_bytes(D, 4, 2);
    if (Shape::EMPTY_ROWS)  // no tile of keys reaches queries that see none
        CUDA_CHECK(cudaMemset(grad.dq, 0, (size_t)(shape.b * shape.s * shape.a * D) * 4));
    allow_shared(kernel, bytes);
    const dim3 grid((unsigned)shape.kv, (unsigned)shape.b);
    LAUNCH(kernel, grid, THREADS, (size_t)bytes, 0, grad, in, shape);
}

template <int D>
static void row(const char *name, const Heads &at_size) {
    const KernelVersion version = {name, THREADS, D == 64 ? 210 : 254, tile_bytes(D, 4, 2)};
    backward_version(version, at_size, D, TILE, launch<D, Heads>,
                     [](const Heads &shape, double d) { return work_of_flash_1_backward(shape, d); });
}

template <int D>
static void show(const KernelsOptions *options, const Heads &shape) {
    flash_tables(options, shape, D, 2,
                 [](const Heads &shape) { row<D>(shape.causal ? "flash, causal" : "flash", shape); });
    show_masked_backward(shape, D, ATTENTION_TILE, D == 64 ? 216 : 255, launch<D, TokenHeads>,
                         [](const Heads &shape, const AttentionMask &mask) {
                             return work_of_flash_1_backward(shape, D, &mask);
                         });
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int head;
    const Heads shape = flash_options(argc, argv,
                                      "FlashAttention, backward: scores computed again, tile by tile.\n"
                                      "  flash_attention_1_backward --head-size 64",
                                      TILE, &options, &head);
    if (head == 128) show<128>(&options, shape);
    else show<64>(&options, shape);
    const double s = (double)shape.s, kept = 4 * (double)shape.a * s;
    say("kept of forward beside q, k, v and o: lse, %s; stored probabilities would be %s", bytes_text(kept),
        bytes_text(kept * s));
    say("a pair of tiles takes 5 products; with stored probabilities it would take 4");
    return report_verdict("it keeps %.0f times less of forward, for 5 products in place of 4", s);
}
