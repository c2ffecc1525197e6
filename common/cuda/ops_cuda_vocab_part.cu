// ops_cuda_vocab_part.cu: cross-entropy on a GPU if several ranks share the vocabulary, each with some
// columns of the logits: forward takes three kernels, between which the ranks' maxima and sums are reduced.
// And the sum of what several ranks have sent.
//
// A block takes a row, and reads part.count of its stored columns; the rest is padding.
#include <math.h>

#include "ops_cuda.h"

struct Larger {  // skips NaN: the sum that follows does not
    template <class A>
    __device__ A operator()(A a, A b) const {
        return a < b ? b : a;
    }
};

template <class T>
__global__ void part_maxima(Arithmetic<T> *maxima, const T *logits, int64_t columns, int64_t count,
                            bool packs) {
    typedef Arithmetic<T> A;
    constexpr int N = pack_of<T>;
    const int64_t row = blockIdx.x;
    A max = -INFINITY;
    for (int64_t i = threadIdx.x; i * N < count; i += blockDim.x) {
        Pack<T, N> pack = load_of_row<N>(logits + row * columns, i, count, packs, narrow<T>(-INFINITY));
        for (int j = 0; j < N; j++) max = Larger()(max, wide(pack.x[j]));
    }
    max = over_block(max, Larger());
    if (threadIdx.x == 0) maxima[row] = max;
}

void kernel_cross_entropy_part_maxima(DType dtype, void *maxima, const void *logits, int64_t n,
                                      int64_t columns, VocabularyPart part) {
    if (n == 0) return;
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        const T *x = static_cast<const T *>(logits);
        LAUNCH((part_maxima<T>), blocks_for("cross_entropy_part_maxima", n),
               threads_for(ceil_div(part.count, pack_of<T>)), 0, stream(),
               static_cast<Arithmetic<T> *>(maxima), x, columns, part.count, rows_aligned(x, columns));
    });
}

template <class T>
__global__ void part_sums(Arithmetic<T> *sums, const T *logits, const Arithmetic<T> *maxima,
                          const int32_t *targets, int64_t n, int64_t columns, VocabularyPart part,
                          bool packs, IndexCheck check) {
    typedef Arithmetic<T> A;
    constexpr int N = pack_of<T>;
    const int64_t row = blockIdx.x;
    const T *x = logits + row * columns;
    const A max = maxima[row];
    A sum = 0;
    for (int64_t i = threadIdx.x; i * N < part.count; i += blockDim.x) {
        Pack<T, N> pack = load_of_row<N>(x, i, part.count, packs, narrow<T>(-INFINITY));
        for (int j = 0; j < N; j++)
            if (i * N + j < part.count) sum += exp_for<T>(wide(pack.x[j]) - max);
    }
    sum = over_block(sum, Add());
    if (threadIdx.x > 0) return;
    const int64_t target = targets[row] - part.first;
    if (targets[row] != IGNORED_LABEL && !check.holds(targets[row])) check.tell(targets[row], row);
    sums[row] = sum;
    sums[n + row] = target >= 0 && target < part.count ? wide(x[target]) : 0;
}

void kernel_cross_entropy_part_sums(DType dtype, void *sums, const void *logits, const void *maxima,
                                    const int32_t *targets, int64_t n, int64_t columns,
                                    VocabularyPart part) {
    if (n == 0) return;
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        using A = Arithmetic<T>;
        const T *x = static_cast<const T *>(logits);
        LAUNCH((part_sums<T>), blocks_for("cross_entropy_part_sums", n),
               threads_for(ceil_div(part.count, pack_of<T>)), 0, stream(), static_cast<A *>(sums), x,
               static_cast<const A *>(maxima), targets, n, columns, part, rows_aligned(x, columns),
               check_index(part.whole,
                           "cross_entropy_part_sums: number %lld of the tokens is %d, which a vocabulary "
                           "of %lld has not"));
    });
}

template <class A>
__global__ void part_losses(A *losses, A *lse, const A *maxima, const A *sums, const int32_t *targets,
                            int64_t n) {
    const int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n) return;
    const A log_sum = maxima[row] + log(sums[row]);
    lse[row] = log_sum;
    losses[row] = targets[row] == IGNORED_LABEL ? 0 : log_sum - sums[n + row];
}

void kernel_cross_entropy_part_losses(DType dtype, void *losses, void *lse, const void *maxima,
                                      const void *sums, const int32_t *targets, int64_t n) {
    if (n == 0) return;
    unsigned threads = threads_for(n),
             blocks = blocks_for("cross_entropy_part_losses", ceil_div(n, threads));
    if (dtype == F64)
        LAUNCH((part_losses<double>), blocks, threads, 0, stream(), static_cast<double *>(losses),
               static_cast<double *>(lse), static_cast<const double *>(maxima),
               static_cast<const double *>(sums), targets, n);
    else
        LAUNCH((part_losses<float>), blocks, threads, 0, stream(), static_cast<float *>(losses),
               static_cast<float *>(lse), static_cast<const float *>(maxima),
               static_cast<const float *>(sums), targets, n);
}

//   forward: loss = log(sum exp(x)) - x[target]
template <class T>
__global__ void part_backward(T *dlogits, const T *logits, const Arithmetic<T> *lse, const int32_t *targets,
                              Arithmetic<T> factor, int64_t columns, VocabularyPart part, bool packs,
                              IndexCheck check, Mailbox *mailbox) {
    constexpr int N = pack_of<T>;
    const int64_t row = blockIdx.x, target = targets[row] - part.first;
    const T *x = logits + row * columns;
    T *dx = dlogits + row * columns;
    const bool labelled = targets[row] != IGNORED_LABEL;
    if (threadIdx.x == 0 && labelled && !check.holds(targets[row])) check.tell(targets[row], row);
    const int64_t count = labelled ? part.count : 0;
    const Arithmetic<T> shift = lse[row];
    Underflows underflows;
    for (int64_t i = threadIdx.x; i * N < columns; i += blockDim.x) {
        Pack<T, N> pack = load_of_row<N>(x, i, columns, packs, narrow<T>(0.0f));
        for (int j = 0; j < N; j++) {
            const int64_t column = i * N + j;
            Arithmetic<T> d = column < count ? factor * exp_for<T>(wide(pack.x[j]) - shift) : 0;
            pack.x[j] = underflows.narrow<T>(column < count && column == target ? d - factor : d);
        }
        store_of_row<N>(dx, i, columns, packs, pack);
    }
    underflows.tell<T>(mailbox);
}

void kernel_cross_entropy_part_backward(DType dtype, void *dlogits, const void *logits, const void *lse,
                                        const int32_t *targets, double scale, int64_t n, int64_t columns,
                                        VocabularyPart part) {
    if (n == 0 || columns == 0) return;
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        using A = Arithmetic<T>;
        const T *x = static_cast<const T *>(logits);
        T *dx = static_cast<T *>(dlogits);
        LAUNCH((part_backward<T>), blocks_for("cross_entropy_part_backward", n),
               threads_for(ceil_div(columns, pack_of<T>)), 0, stream(), dx, x, static_cast<const A *>(lse),
               targets, (A)scale, columns, part, rows_aligned(x, columns) && rows_aligned(dx, columns),
               check_index(part.whole,
                           "cross_entropy_part_backward: number %lld of the tokens is %d, which a "
                           "vocabulary of %lld has not"),
               device_mailbox());
    });
}

// ---- the sum of what several ranks have sent, in order and rounded once ----

template <class T>
__global__ void add_parts(T *y, const T *x, int64_t parts, int64_t count) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += all) {
        Arithmetic<T> sum = wide(x[i]);
        for (int64_t part = 1; part < parts; part++) sum += wide(x[part * count + i]);
        y[i] = narrow<T>(sum);
    }
}

void kernel_sum_parts(DType dtype, void *y, const void *x, int64_t parts, int64_t count) {
    if (count == 0) return;
    unsigned threads = threads_for(count);
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        LAUNCH((add_parts<T>), blocks_of(count, threads), threads, 0, stream(), static_cast<T *>(y),
               static_cast<const T *>(x), parts, count);
    });
}

// ---- columns split over ranks, and back: whole (n, groups w), parts (groups, copies, n, w) ----

template <class T>
__global__ void split_columns(T *parts, const T *whole, int64_t groups, int64_t copies, int64_t n,
                              int64_t w) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x, count = groups * copies * n * w;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += all) {
        int64_t row = i / w % n, group = i / w / n / copies;
        parts[i] = whole[(row * groups + group) * w + i % w];
    }
}

template <class T>
__global__ void join_columns(T *whole, const T *parts, int64_t groups, int64_t copies, int64_t n,
                             int64_t w) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x, count = n * groups * w;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += all) {
        int64_t row = i / w / groups, group = i / w % groups;
        const T *part = parts + (group * copies * n + row) * w + i % w;
        Arithmetic<T> sum = wide(part[0]);
        for (int64_t copy = 1; copy < copies; copy++) sum += wide(part[copy * n * w]);
        whole[i] = narrow<T>(sum);
    }
}

void kernel_split_columns(DType dtype, void *parts, const void *whole, int64_t groups, int64_t copies,
                          int64_t n, int64_t w) {
    const int64_t count = groups * copies * n * w;
    if (count == 0) return;
    unsigned threads = threads_for(count);
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        LAUNCH((split_columns<T>), blocks_of(count, threads), threads, 0, stream(), static_cast<T *>(parts),
               static_cast<const T *>(whole), groups, copies, n, w);
    });
}

void kernel_join_columns(DType dtype, void *whole, const void *parts, int64_t groups, int64_t copies,
                         int64_t n, int64_t w) {
    const int64_t count = n * groups * w;
    if (count == 0) return;
    unsigned threads = threads_for(count);
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        LAUNCH((join_columns<T>), blocks_of(count, threads), threads, 0, stream(), static_cast<T *>(whole),
               static_cast<const T *>(parts), groups, copies, n, w);
    });
}
