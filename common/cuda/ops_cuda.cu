// ops_cuda.cu: elementwise operations on a GPU, sums, and the matrix multiply. Operations on rows are in
// ops_cuda_rows.cu, attention in ops_cuda_attention.cu; ops_cuda.h has what they share.
//
// Everything here except the matrix multiply is memory-bound: each array is read and written once.
#include <math.h>

#include <vector>

#include "gemm.h"
#include "ops_cuda.h"

// ---- any dtype to any ----

// Like by_dtype, and also for 8-bit codes and i32.
template <class F>
static void by_any_dtype(DType dtype, F f) {
    switch (dtype) {
        case E4M3:
            return f(__nv_fp8_e4m3());
        case E5M2:
            return f(__nv_fp8_e5m2());
        case I32:
            return f(int32_t());
        default:
            by_dtype(dtype, f);
    }
}

__device__ inline double wide(int32_t x) { return x; }

// A plain cast would be undefined outside the range, and for NaN.
template <>
__device__ inline int32_t narrow<int32_t>(double x) {
    double bounded = x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : x;
    return isnan(x) ? 0 : static_cast<int32_t>(rint(bounded));
}
template <>
__device__ inline int32_t narrow<int32_t>(float x) {
    return narrow<int32_t>((double)x);
}

template <class To, class From>
struct Convert {
    To *y;
    const From *x;
    template <int N>
    using In = Pack<From, N>;
    template <int N>
    __device__ In<N> read(int64_t first) const {
        return load<N>(x + first);
    }
    template <int N>
    __device__ void write(int64_t first, const In<N> &in) const {
        Pack<To, N> out;
        for (int j = 0; j < N; j++) out.x[j] = narrow<To>(wide(in.x[j]));
        store<N>(y + first, out);
    }
};

template <class Bits>
struct Fill {
    Bits *y, code;
    template <int N>
    using In = Pack<Bits, N>;
    template <int N>
    __device__ In<N> read(int64_t) const {
        In<N> codes;
        for (int j = 0; j < N; j++) codes.x[j] = code;
        return codes;
    }
    template <int N>
    __device__ void write(int64_t first, const In<N> &codes) const {
        store<N>(y + first, codes);
    }
};

template <class Bits>
struct Move {
    Bits *y;
    const Bits *x;
    template <int N>
    using In = Pack<Bits, N>;
    template <int N>
    __device__ In<N> read(int64_t first) const {
        return load<N>(x + first);
    }
    template <int N>
    __device__ void write(int64_t first, const In<N> &in) const {
        store<N>(y + first, in);
    }
};

// Calls f with a value of an integer type with this many bytes.
template <class F>
static void by_size(size_t bytes, F f) {
    switch (bytes) {
        case 1:
            return f(uint8_t());
        case 2:
            return f(uint16_t());
        case 4:
            return f(uint32_t());
        default:
            f(uint64_t());
    }
}

void kernel_fill(DType dtype, void *y, double value, int64_t count) {
    by_size(dtype_size(dtype), [&](auto code) {
        using Bits = decltype(code);
        dtype_convert(&code, dtype, &value, F64, 1);
        for_each<pack_of<Bits>>(count, all_aligned(y), Fill<Bits>{(Bits *)y, code});
    });
}

void kernel_copy(DType y_dtype, void *y, DType x_dtype, const void *x, int64_t count) {
    if (y_dtype == x_dtype) {
        by_size(dtype_size(x_dtype), [&](auto any) {
            using Bits = decltype(any);
            for_each<pack_of<Bits>>(count, all_aligned(y, x), Move<Bits>{(Bits *)y, (const Bits *)x});
        });
        return;
    }
    by_any_dtype(y_dtype, [&](auto to) {
        by_any_dtype(x_dtype, [&](auto from) {
            using To = decltype(to);
            using From = decltype(from);
            for_each<pack_of<To, From>>(count, all_aligned(y, x),
                                        Convert<To, From>{(To *)y, (const From *)x});
        });
    });
}

// ---- sums of two, and multiples ----

template <class T>
struct Sum {
    __device__ static Arithmetic<T> of(Arithmetic<T> a, Arithmetic<T> b) { return a + b; }
};

// y = Of<T>::of(a, b)
template <class T, template <class> class Of>
struct OfTwo {
    T *y;
    const T *a, *b;
    template <int N>
    struct In {
        Pack<T, N> a, b;
    };
    template <int N>
    __device__ In<N> read(int64_t first) const {
        return {load<N>(a + first), load<N>(b + first)};
    }
    template <int N>
    __device__ void write(int64_t first, In<N> in) const {
        for (int j = 0; j < N; j++) in.a.x[j] = narrow<T>(Of<T>::of(wide(in.a.x[j]), wide(in.b.x[j])));
        store<N>(y + first, in.a);
    }
};

template <class T>
struct Scale {
    T *y;
    Arithmetic<T> factor;
    template <int N>
    using In = Pack<T, N>;
    template <int N>
    __device__ In<N> read(int64_t first) const {
        return load<N>(y + first);
    }
    template <int N>
    __device__ void write(int64_t first, In<N> in) const {
        for (int j = 0; j < N; j++) in.x[j] = narrow<T>(wide(in.x[j]) * factor);
        store<N>(y + first, in);
    }
};

// In f64 if either of the two is.
template <class T, class X>
struct Accumulate {
    T *y;
    const X *x;
    template <int N>
    struct In {
        Pack<T, N> y;
        Pack<X, N> x;
    };
    template <int N>
    __device__ In<N> read(int64_t first) const {
        return {load<N>(y + first), load<N>(x + first)};
    }
    template <int N>
    __device__ void write(int64_t first, In<N> in) const {
        for (int j = 0; j < N; j++) in.y.x[j] = narrow<T>(wide(in.y.x[j]) + wide(in.x.x[j]));
        store<N>(y + first, in.y);
    }
};

void kernel_add(DType dtype, void *y, const void *a, const void *b, int64_t count) {
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for_each<pack_of<T>>(count, all_aligned(y, a, b),
                             OfTwo<T, Sum>{(T *)y, (const T *)a, (const T *)b});
    });
}

void kernel_scale(DType dtype, void *y, double factor, int64_t count) {
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for_each<pack_of<T>>(count, all_aligned(y), Scale<T>{(T *)y, (Arithmetic<T>)factor});
    });
}

void kernel_accumulate(DType y_dtype, void *y, DType x_dtype, const void *x, int64_t count) {
    by_dtype(y_dtype, [&](auto to) {
        by_dtype(x_dtype, [&](auto from) {
            using T = decltype(to);
            using X = decltype(from);
            for_each<pack_of<T, X>>(count, all_aligned(y, x), Accumulate<T, X>{(T *)y, (const X *)x});
        });
    });
}

// ---- SwiGLU ----

// 1 / (1 + e^-x), with an exponential that cannot overflow.
template <class T>
__device__ inline Arithmetic<T> sigmoid(Arithmetic<T> x) {
    Arithmetic<T> e = exp_for<T>(x < 0 ? x : -x);
    return quotient_for<T>(x < 0 ? e : 1, 1 + e);
}

template <class T>
struct Swiglu {
    __device__ static Arithmetic<T> of(Arithmetic<T> gate, Arithmetic<T> up) {
        return gate * sigmoid<T>(gate) * up;
    }
};

//   forward: act = silu(gate) * up,  silu(x) = x s,  s = sigmoid(x),  so  silu' = s + x s (1 - s)
template <class T>
struct SwigluBackward {
    T *dgate, *dup;
    const T *dact, *gate, *up;
    template <int N>
    struct In {
        Pack<T, N> dact, gate, up;
    };
    template <int N>
    __device__ In<N> read(int64_t first) const {
        return {load<N>(dact + first), load<N>(gate + first), load<N>(up + first)};
    }
    template <int N>
    __device__ void write(int64_t first, In<N> in) const {
        for (int j = 0; j < N; j++) {
            Arithmetic<T> g = wide(in.gate.x[j]), u = wide(in.up.x[j]), da = wide(in.dact.x[j]);
            Arithmetic<T> s = sigmoid<T>(g), silu = g * s;
            in.up.x[j] = narrow<T>(da * silu);
            in.gate.x[j] = narrow<T>(da * u * (s + silu * (1 - s)));
        }
        store<N>(dup + first, in.up);
        store<N>(dgate + first, in.gate);
    }
};

void kernel_swiglu_forward(DType dtype, void *act, const void *gate, const void *up, int64_t count) {
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for_each<pack_of<T>>(count, all_aligned(act, gate, up),
                             OfTwo<T, Swiglu>{(T *)act, (const T *)gate, (const T *)up});
    });
}

void kernel_swiglu_backward(DType dtype, void *dgate, void *dup, const void *dact, const void *gate,
                            const void *up, int64_t count) {
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for_each<pack_of<T>>(
            count, all_aligned(dgate, dup, dact, gate, up),
            SwigluBackward<T>{(T *)dgate, (T *)dup, (const T *)dact, (const T *)gate, (const T *)up});
    });
}

// ---- reductions: a block sums a chunk in f64, then blocks sum those sums, until one is left ----

constexpr int64_t SUM_CHUNK = 16384;  // elements, the same on every GPU: it determines the order of the sum

template <class T, bool SQUARES>
__device__ double sum_of_chunk(const T *x, int64_t count, bool packs) {
    constexpr int N = pack_of<T>;
    double sum = 0;
    each_pack<N>(x, count, packs, narrow<T>(0.0f), [&](int64_t, const Pack<T, N> &pack) {
        for (int j = 0; j < N; j++) {
            double value = wide(pack.x[j]);
            sum += SQUARES ? value * value : value;
        }
    });
    return over_block(sum, Add());
}

// sums[chunk] = the chunk's sum; or, with a single chunk, y += factor * its sum
template <class T, bool SQUARES, bool LAST>
__global__ void sum_chunks(double *sums, const T *x, int64_t count, double factor, bool packs) {
    const int64_t first = (int64_t)blockIdx.x * SUM_CHUNK;
    const double sum = sum_of_chunk<T, SQUARES>(x + first, least(SUM_CHUNK, count - first), packs);
    if (threadIdx.x > 0) return;
    if (LAST) *sums += factor * sum;
    else sums[blockIdx.x] = sum;
}

// One round: the sums of all chunks; the last round has a single one.
template <class T, bool SQUARES>
static void launch_sum(double *y, double *sums, const T *x, int64_t count, double factor) {
    const int64_t chunks = ceil_div(count, SUM_CHUNK);
    const int threads = threads_for_row<T>(least(count, SUM_CHUNK));
    if (chunks == 1)
        LAUNCH((sum_chunks<T, SQUARES, true>), 1, threads, 0, stream(), y, x, count, factor, is_aligned(x));
    else
        LAUNCH((sum_chunks<T, SQUARES, false>), blocks_for("sum", chunks), threads, 0, stream(), sums, x,
               count, 1.0, is_aligned(x));
}

static void add_sum(DType dtype, double *y, const void *x, int64_t count, bool squares, double factor) {
    if (count == 0) return;
    int64_t chunks = ceil_div(count, SUM_CHUNK);
    // each round's sums follow those of the round before
    double *sums = static_cast<double *>(device_scratch((size_t)(2 * chunks) * sizeof(double)));
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        if (squares) launch_sum<T, true>(y, sums, (const T *)x, count, factor);
        else launch_sum<T, false>(y, sums, (const T *)x, count, factor);
    });
    while (chunks > 1) {
        launch_sum<double, false>(y, sums + chunks, sums, chunks, factor);
        sums += chunks;
        chunks = ceil_div(chunks, SUM_CHUNK);
    }
}

static double sum_of(DType dtype, const void *x, int64_t count, bool squares) {
    double *mail = &device_mailbox()->sum;
    kernel_fill(F64, mail, 0, 1);
    add_sum(dtype, mail, x, count, squares, 1);
    return device_read_mailbox().sum;
}

double kernel_sum(DType dtype, const void *x, int64_t count) { return sum_of(dtype, x, count, false); }

double kernel_sum_squares(DType dtype, const void *x, int64_t count) {
    return sum_of(dtype, x, count, true);
}

void kernel_add_sum(DType dtype, double *y, const void *x, int64_t count, double factor) {
    add_sum(dtype, y, x, count, false, factor);
}

// ---- squares of ranges: one block for each chunk of every range, then one for each range ----

struct ChunkedRange {
    int64_t first, count, chunk;  // the range's first chunk, in the chunks of all ranges
};

// Blocks have the same number of threads for every range, so that its bits depend only on its own elements.
template <class T>
__global__ void square_chunks(double *sums, const T *x, const ChunkedRange *ranges, int64_t n) {
    int64_t low = 0, high = n;  // the last range whose first chunk is this one or lies before it
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (ranges[middle].chunk <= blockIdx.x) low = middle;
        else high = middle;
    }
    const ChunkedRange range = ranges[low];
    const int64_t done = (blockIdx.x - range.chunk) * SUM_CHUNK;
    const T *from = x + range.first + done;
    const double sum = sum_of_chunk<T, true>(from, least(SUM_CHUNK, range.count - done), is_aligned(from));
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void sum_of_chunks(double *y, const double *sums, const ChunkedRange *ranges) {
    const ChunkedRange range = ranges[blockIdx.x];
    const double *from = sums + range.chunk;
    const double sum =
        sum_of_chunk<double, false>(from, ceil_div(range.count, SUM_CHUNK), is_aligned(from));
    if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

void kernel_squares_of_ranges(DType dtype, double *y, const void *x, const FlatRange *ranges, int64_t n) {
    if (n == 0) return;
    std::vector<ChunkedRange> host((size_t)n);
    int64_t chunks = 0;
    for (int64_t i = 0; i < n; i++) {
        host[(size_t)i] = {ranges[i].first, ranges[i].count, chunks};
        chunks += ceil_div(ranges[i].count, SUM_CHUNK);
    }
    const size_t bytes = host.size() * sizeof(ChunkedRange);
    ChunkedRange *table =
        static_cast<ChunkedRange *>(device_scratch(bytes + (size_t)chunks * sizeof(double)));
    double *sums = reinterpret_cast<double *>(table + n);
    backend_from_host(table, host.data(), bytes);
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        if (chunks > 0)
            LAUNCH((square_chunks<T>), blocks_for("squares_of_ranges", chunks), MOST_THREADS, 0, stream(),
                   sums, (const T *)x, table, n);
    });
    LAUNCH(sum_of_chunks, blocks_for("squares_of_ranges", n), MOST_THREADS, 0, stream(), y, sums, table);
}

// ---- matrix multiply ----

void kernel_matmul(DType dtype, DType c_dtype, void *c, const void *a, const void *b, int64_t m, int64_t n,
                   int64_t k, bool transpose_a, bool transpose_b, double beta) {
    if (k == 0 && beta == 0) kernel_fill(c_dtype, c, 0, m * n);
    if (m == 0 || n == 0 || k == 0) return;
    Gemm g = {};
    g.dtype = dtype, g.c_dtype = c_dtype;
    g.m = m, g.n = n, g.k = k;
    g.transpose_a = transpose_a, g.transpose_b = transpose_b;
    g.a = a, g.b = b, g.c = c;
    g.a_columns = transpose_a ? m : k, g.b_columns = transpose_b ? k : n, g.c_columns = n;
    g.batch = 1;
    g.alpha = 1, g.beta = beta;
    gemm(&g);
}

void kernel_matmul_sum(DType dtype, DType c_dtype, int count, const KernelProduct *products,
                       bool transpose_a, bool transpose_b, double beta) {
    for (const KernelProduct *p = products; p < products + count; p++)
        kernel_matmul(dtype, c_dtype, p->c, p->a, p->b, p->m, p->n, p->k, transpose_a, transpose_b,
                      p == products ? beta : 1);
}

void kernel_matmuls(DType dtype, DType c_dtype, int count, const KernelProduct *products, bool transpose_a,
                    bool transpose_b, double beta) {
    for (const KernelProduct *p = products; p < products + count; p++)
        kernel_matmul(dtype, c_dtype, p->c, p->a, p->b, p->m, p->n, p->k, transpose_a, transpose_b, beta);
}
