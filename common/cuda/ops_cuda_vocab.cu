// ops_cuda_vocab.cu: the two ends of the model on a GPU, embedding and cross-entropy. A block takes a row.
#include <math.h>

#include "ops_cuda.h"

#define WRONG_TOKEN ": number %lld of the tokens is %d, which a vocabulary of %lld has not"

// ---- embedding ----

// The table holds all or part of the vocabulary; a token of another part gets a row of zeros.
template <class T>
__global__ void embedding_rows(T *y, const int32_t *tokens, const T *weight, int64_t h, VocabularyPart part,
                               bool packs, IndexCheck check) {
    constexpr int N = pack_of<T>;
    const int64_t row = blockIdx.x;
    const int32_t token = tokens[row];
    if (!check.holds(token)) {
        if (threadIdx.x == 0) check.tell(token, row);
        return;
    }
    T *to = y + row * h;
    if (token < part.first || token >= part.first + part.count) {
        for (int64_t i = threadIdx.x; i < h; i += blockDim.x) to[i] = narrow<T>(0.0f);
        return;
    }
    const T *from = weight + (token - part.first) * h;
    const int64_t whole = packs ? h / N : 0;
    for (int64_t i = threadIdx.x; i < whole; i += blockDim.x) store<N>(to + i * N, load<N>(from + i * N));
    for (int64_t i = whole * N + threadIdx.x; i < h; i += blockDim.x) to[i] = from[i];
}

static void look_up(DType dtype, void *y, const int32_t *tokens, const void *weight, int64_t n, int64_t h,
                    VocabularyPart part, const char *wrong) {
    if (n == 0 || h == 0) return;
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        LAUNCH((embedding_rows<T>), blocks_for("embedding_forward", n),
               threads_for(ceil_div(h, pack_of<T>)), 0, stream(), (T *)y, tokens, (const T *)weight, h,
               part, rows_aligned((T *)y, h) && rows_aligned((const T *)weight, h),
               check_index(part.whole, wrong));
    });
}

void kernel_embedding_part_forward(DType dtype, void *y, const int32_t *tokens, const void *weight,
                                   int64_t n, int64_t h, VocabularyPart part) {
    look_up(dtype, y, tokens, weight, n, h, part, "embedding_part_forward" WRONG_TOKEN);
}

void kernel_embedding_forward(DType dtype, void *y, const int32_t *tokens, const void *weight, int64_t n,
                              int64_t v, int64_t h) {
    look_up(dtype, y, tokens, weight, n, h, {v, 0, v}, "embedding_forward" WRONG_TOKEN);
}

// Backward adds up the rows of dy that have the same token, in their order. So the rows are first sorted by
// token, stably: row i comes after all rows with smaller tokens, and after earlier rows with the same one.
// Every row is compared with every other: n^2 cheap comparisons, which for n = 8192 cost about as much as
// reading dy, without scans or atomics.
//
// order (n): the rows, sorted. run (n): at the first row of a token, the number of its rows; elsewhere 0.
constexpr int64_t SORT_SLICES = 8;  // warps that share the comparisons of 32 rows

__global__ void sort_tokens(int32_t *order, int32_t *run, const int32_t *tokens, int64_t n, bool packs,
                            IndexCheck check) {
    __shared__ int32_t of_slice[3][SORT_SLICES][WARP];
    const int64_t lane = threadIdx.x % WARP, slice = threadIdx.x / WARP, me = blockIdx.x * WARP + lane;
    const int32_t mine = me < n ? tokens[me] : 0;
    int32_t smaller = 0, same_before = 0, same = 0;
    for (int64_t i = slice; i * 4 < n; i += SORT_SLICES) {
        // No token is INT32_MAX, so nothing beyond the end is smaller or equal.
        Pack<int32_t, 4> others = load_of_row<4>(tokens, i, n, packs, INT32_MAX);
        for (int j = 0; j < 4; j++) {
            smaller += others.x[j] < mine;
            same += others.x[j] == mine;
            same_before += others.x[j] == mine && i * 4 + j < me;
        }
    }
    of_slice[0][slice][lane] = smaller;
    of_slice[1][slice][lane] = same;
    of_slice[2][slice][lane] = same_before;
    __syncthreads();
    if (slice > 0 || me >= n) return;
    for (int other = 1; other < SORT_SLICES; other++) {
        smaller += of_slice[0][other][lane];
        same += of_slice[1][other][lane];
        same_before += of_slice[2][other][lane];
    }
    if (!check.holds(mine)) check.tell(mine, me);
    order[smaller + same_before] = (int32_t)me;
    run[smaller + same_before] = check.holds(mine) && same_before == 0 ? same : 0;
}

template <class To, class T>
__global__ void add_runs(To *dweight, const T *dy, const int32_t *tokens, const int32_t *order,
                         const int32_t *run, int64_t h, VocabularyPart part, bool packs) {
    constexpr int N = pack_of<To, T>;
    constexpr int AHEAD = 8;  // rows in flight at once
    const int32_t *rows = order + blockIdx.x;
    const int32_t count = run[blockIdx.x];
    if (count == 0) return;
    const int64_t token = tokens[rows[0]] - part.first;
    if (token < 0 || token >= part.count) return;
    To *to = dweight + token * h;
    for (int64_t i = threadIdx.x; i * N < h; i += blockDim.x) {
        Pack<To, N> stored = load_of_row<N>(to, i, h, packs, narrow<To>(0.0f));
        Pack<T, N> more[AHEAD];
        Arithmetic<T> sum[N];
        for (int j = 0; j < N; j++) sum[j] = wide(stored.x[j]);
        for (int32_t first = 0; first < count; first += AHEAD) {
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                if (first + k < count)
                    more[k] = load_of_row<N>(dy + rows[first + k] * h, i, h, packs, narrow<T>(0.0f));
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                for (int j = 0; j < N; j++)
                    if (first + k < count) sum[j] += wide(more[k].x[j]);
        }
        for (int j = 0; j < N; j++) stored.x[j] = narrow<To>(sum[j]);
        store_of_row<N>(to, i, h, packs, stored);
    }
}

template <class To, class T>
static void launch_runs(To *to, const T *from, const int32_t *tokens, const int32_t *order,
                        const int32_t *run, int64_t n, int64_t h, VocabularyPart part) {
    LAUNCH((add_runs<To, T>), blocks_for("embedding_backward", n), threads_for(ceil_div(h, pack_of<To, T>)),
           0, stream(), to, from, tokens, order, run, h, part,
           rows_aligned(to, h) && rows_aligned(from, h));
}

static void add_rows(DType dtype, DType dweight_dtype, void *dweight, const void *dy, const int32_t *tokens,
                     int64_t n, int64_t h, VocabularyPart part, const char *wrong) {
    if (n == 0 || h == 0) return;
    int32_t *order = static_cast<int32_t *>(device_scratch((size_t)(2 * n) * sizeof(int32_t))),
            *run = order + n;
    LAUNCH(sort_tokens, (unsigned)ceil_div(n, WARP), SORT_SLICES * WARP, 0, stream(), order, run, tokens, n,
           is_aligned(tokens), check_index(part.whole, wrong));
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        const T *from = (const T *)dy;
        if (dweight_dtype == dtype) launch_runs((T *)dweight, from, tokens, order, run, n, h, part);
        else launch_runs((Arithmetic<T> *)dweight, from, tokens, order, run, n, h, part);
    });
}

void kernel_embedding_backward(DType dtype, DType dweight_dtype, void *dweight, const void *dy,
                               const int32_t *tokens, int64_t n, int64_t v, int64_t h) {
    add_rows(dtype, dweight_dtype, dweight, dy, tokens, n, h, {v, 0, v}, "embedding_backward" WRONG_TOKEN);
}

void kernel_embedding_part_backward(DType dtype, DType dweight_dtype, void *dweight, const void *dy,
                                    const int32_t *tokens, int64_t n, int64_t, int64_t h,
                                    VocabularyPart part) {
    add_rows(dtype, dweight_dtype, dweight, dy, tokens, n, h, part, "embedding_part_backward" WRONG_TOKEN);
}

// ---- cross-entropy ----

template <class T>
__global__ void cross_entropy_rows(Arithmetic<T> *losses, Arithmetic<T> *lse, const T *logits,
                                   const int32_t *targets, int64_t v, bool packs, IndexCheck check) {
    typedef Arithmetic<T> A;
    constexpr int N = pack_of<T>;
    const int64_t row = blockIdx.x;
    const T *x = logits + row * v;
    Exponentials<T> all = Exponentials<T>::none();
    each_pack<N>(x, v, packs, narrow<T>(-INFINITY), [&](int64_t, const Pack<T, N> &pack) {
        A some[N];
        for (int j = 0; j < N; j++) some[j] = wide(pack.x[j]);
        all.add(some);
    });
    all = over_block(all, JoinExponentials());
    if (threadIdx.x > 0) return;
    const A log_sum = all.max + log(all.sum);
    const int32_t target = targets[row];
    if (!check.holds(target) && target != IGNORED_LABEL) check.tell(target, row);
    lse[row] = log_sum;
    losses[row] = check.holds(target) ? log_sum - wide(x[target]) : 0;
}

void kernel_cross_entropy_forward(DType dtype, void *losses, void *lse, const void *logits,
                                  const int32_t *targets, int64_t n, int64_t v) {
    if (n == 0) return;
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        using A = Arithmetic<T>;
        const T *x = (const T *)logits;
        LAUNCH((cross_entropy_rows<T>), blocks_for("cross_entropy_forward", n), threads_for_row<T>(v), 0,
               stream(), (A *)losses, (A *)lse, x, targets, v, rows_aligned(x, v),
               check_index(v, "cross_entropy_forward" WRONG_TOKEN));
    });
}

// Elements [first, first + N) of a row.
//   forward: loss = log(sum exp(x)) - x[target]
template <int N, class T>
__device__ inline void cross_entropy_pack(T *dx, const T *x, int64_t first, int64_t target,
                                          Arithmetic<T> shift, Arithmetic<T> factor,
                                          Underflows *underflows) {
    Pack<T, N> pack = load<N>(x + first);
    for (int j = 0; j < N; j++) {
        Arithmetic<T> d = factor * exp_for<T>(wide(pack.x[j]) - shift);
        pack.x[j] = underflows->narrow<T>(first + j == target ? d - factor : d);
    }
    store<N>(dx + first, pack);
}

template <class T>
__global__ void cross_entropy_backward_rows(T *dlogits, const T *logits, const Arithmetic<T> *lse,
                                            const int32_t *targets, Arithmetic<T> factor, int64_t v,
                                            bool packs, IndexCheck check, Mailbox *mailbox) {
    constexpr int N = pack_of<T>;
    const int64_t row = blockIdx.x, whole = packs ? v / N : 0;
    const T *x = logits + row * v;
    T *dx = dlogits + row * v;
    const int32_t target = targets[row];
    if (!check.holds(target)) {
        if (threadIdx.x == 0 && target != IGNORED_LABEL) check.tell(target, row);
        for (int64_t i = threadIdx.x; i < v; i += blockDim.x) dx[i] = narrow<T>(0.0f);
        return;
    }
    const Arithmetic<T> shift = lse[row];
    Underflows underflows;
    for (int64_t i = threadIdx.x; i < whole; i += blockDim.x)
        cross_entropy_pack<N>(dx, x, i * N, target, shift, factor, &underflows);
    for (int64_t i = whole * N + threadIdx.x; i < v; i += blockDim.x)
        cross_entropy_pack<1>(dx, x, i, target, shift, factor, &underflows);
    underflows.tell<T>(mailbox);
}

void kernel_cross_entropy_backward(DType dtype, void *dlogits, const void *logits, const void *lse,
                                   const int32_t *targets, double scale, int64_t n, int64_t v) {
    if (n == 0) return;
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        using A = Arithmetic<T>;
        const T *x = (const T *)logits;
        T *dx = (T *)dlogits;
        LAUNCH((cross_entropy_backward_rows<T>), blocks_for("cross_entropy_backward", n),
               threads_for(ceil_div(v, pack_of<T>)), 0, stream(), dx, x, (const A *)lse, targets, (A)scale,
               v, rows_aligned(x, v) && rows_aligned(dx, v),
               check_index(v, "cross_entropy_backward" WRONG_TOKEN), device_mailbox());
    });
}

double kernel_underflows(double *all) {
    const Mailbox mail = device_read_mailbox();
    *all = (double)mail.rounded;
    return (double)mail.underflows;
}
