// ops_cuda.cu: the operations on a GPU that work element by element, sums, and the matrix multiply. Rows are in
// ops_cuda_rows.cu, attention in ops_cuda_attention.cu; ops_cuda.h has what they share.
//
// Everything here but the matrix multiply is bound by memory: each array is read and written once.
#include <math.h>

#include "gemm.h"
#include "ops_cuda.h"

// ---- any dtype to any ----

// The same bits, for what only moves.
template <class F> static void by_any_dtype(DType dtype, F f) {
    switch (dtype) {
        case E4M3: return f(__nv_fp8_e4m3());
        case E5M2: return f(__nv_fp8_e5m2());
        case I32: return f(int32_t());
        default: by_dtype(dtype, f);
    }
}

__device__ inline float wide(__nv_fp8_e4m3 x) { return static_cast<float>(x); }
__device__ inline float wide(__nv_fp8_e5m2 x) { return static_cast<float>(x); }
__device__ inline double wide(int32_t x) { return x; }

// A plain cast would be undefined outside the range, and for NaN.
template <> __device__ inline int32_t narrow<int32_t>(double x) {
    double bounded = x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : x;
    return isnan(x) ? 0 : static_cast<int32_t>(rint(bounded));
}
template <> __device__ inline int32_t narrow<int32_t>(float x) { return narrow<int32_t>(static_cast<double>(x)); }

template <class To, class From> struct Convert {
    To *y;
    const From *x;
    template <int N> __device__ void run(int64_t first) const {
        Pack<From, N> in = load<N>(x + first);
        Pack<To, N> out;
        for (int j = 0; j < N; j++) out.x[j] = narrow<To>(wide(in.x[j]));
        store<N>(y + first, out);
    }
};

template <class Bits> struct Fill {
    Bits *y, code;
    template <int N> __device__ void run(int64_t first) const {
        Pack<Bits, N> out;
        for (int j = 0; j < N; j++) out.x[j] = code;
        store<N>(y + first, out);
    }
};

template <class Bits> struct Move {
    Bits *y;
    const Bits *x;
    template <int N> __device__ void run(int64_t first) const { store<N>(y + first, load<N>(x + first)); }
};

// Calls f with a value of an integer type of this many bytes.
template <class F> static void by_size(size_t bytes, F f) {
    switch (bytes) {
        case 1: return f(uint8_t());
        case 2: return f(uint16_t());
        case 4: return f(uint32_t());
        default: f(uint64_t());
    }
}

void kernel_fill(DType dtype, void *y, double value, int64_t count) {
    by_size(dtype_size(dtype), [&](auto code) {
        using Bits = decltype(code);
        dtype_convert(&code, dtype, &value, F64, 1);
        for_each<pack_of<Bits>>(count, all_aligned(y), Fill<Bits>{static_cast<Bits *>(y), code});
    });
}

void kernel_copy(DType y_dtype, void *y, DType x_dtype, const void *x, int64_t count) {
    if (y_dtype == x_dtype) {
        by_size(dtype_size(x_dtype), [&](auto any) {
            using Bits = decltype(any);
            for_each<pack_of<Bits>>(count, all_aligned(y, x),
                                      Move<Bits>{static_cast<Bits *>(y), static_cast<const Bits *>(x)});
        });
        return;
    }
    by_any_dtype(y_dtype, [&](auto to) {
        by_any_dtype(x_dtype, [&](auto from) {
            using To = decltype(to);
            using From = decltype(from);
            for_each<pack_of<To, From>>(
                count, all_aligned(y, x),
                Convert<To, From>{static_cast<To *>(y), static_cast<const From *>(x)});
        });
    });
}

// ---- sums of two, and multiples ----

template <class T> struct AddTwo {
    T *y;
    const T *a, *b;
    template <int N> __device__ void run(int64_t first) const {
        Pack<T, N> p = load<N>(a + first), q = load<N>(b + first), sum;
        for (int j = 0; j < N; j++) sum.x[j] = narrow<T>(wide(p.x[j]) + wide(q.x[j]));
        store<N>(y + first, sum);
    }
};

template <class T> struct Scale {
    T *y;
    Arithmetic<T> factor;
    template <int N> __device__ void run(int64_t first) const {
        Pack<T, N> p = load<N>(y + first);
        for (int j = 0; j < N; j++) p.x[j] = narrow<T>(wide(p.x[j]) * factor);
        store<N>(y + first, p);
    }
};

// In f64 if one of the two is.
template <class T, class X> struct Accumulate {
    T *y;
    const X *x;
    template <int N> __device__ void run(int64_t first) const {
        Pack<T, N> sum = load<N>(y + first);
        Pack<X, N> more = load<N>(x + first);
        for (int j = 0; j < N; j++) sum.x[j] = narrow<T>(wide(sum.x[j]) + wide(more.x[j]));
        store<N>(y + first, sum);
    }
};

void kernel_add(DType dtype, void *y, const void *a, const void *b, int64_t count) {
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for_each<pack_of<T>>(
            count, all_aligned(y, a, b),
            AddTwo<T>{static_cast<T *>(y), static_cast<const T *>(a), static_cast<const T *>(b)});
    });
}

void kernel_scale(DType dtype, void *y, double factor, int64_t count) {
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for_each<pack_of<T>>(count, all_aligned(y),
                               Scale<T>{static_cast<T *>(y), static_cast<Arithmetic<T>>(factor)});
    });
}

void kernel_accumulate(DType y_dtype, void *y, DType x_dtype, const void *x, int64_t count) {
    by_dtype(y_dtype, [&](auto to) {
        by_dtype(x_dtype, [&](auto from) {
            using T = decltype(to);
            using X = decltype(from);
            for_each<pack_of<T, X>>(count, all_aligned(y, x),
                                      Accumulate<T, X>{static_cast<T *>(y), static_cast<const X *>(x)});
        });
    });
}

// ---- SwiGLU ----

// 1 / (1 + e^-x), by an exponential that cannot overflow.
template <class T> __device__ inline Arithmetic<T> sigmoid(Arithmetic<T> x) {
    Arithmetic<T> e = exp_for<T>(x < 0 ? x : -x);
    return quotient_for<T>(x < 0 ? e : 1, 1 + e);
}

template <class T> struct SwigluForward {
    T *act;
    const T *gate, *up;
    template <int N> __device__ void run(int64_t first) const {
        Pack<T, N> gates = load<N>(gate + first), ups = load<N>(up + first);
        for (int j = 0; j < N; j++) {
            Arithmetic<T> g = wide(gates.x[j]);
            gates.x[j] = narrow<T>(g * sigmoid<T>(g) * wide(ups.x[j]));
        }
        store<N>(act + first, gates);
    }
};

//   forward: act = silu(gate) * up,  silu(x) = x s,  s = sigmoid(x),  so  silu' = s + x s (1 - s)
template <class T> struct SwigluBackward {
    T *dgate, *dup;
    const T *dact, *gate, *up;
    template <int N> __device__ void run(int64_t first) const {
        Pack<T, N> gates = load<N>(gate + first), ups = load<N>(up + first), dacts = load<N>(dact + first);
        for (int j = 0; j < N; j++) {
            Arithmetic<T> g = wide(gates.x[j]), u = wide(ups.x[j]), da = wide(dacts.x[j]);
            Arithmetic<T> s = sigmoid<T>(g), silu = g * s;
            ups.x[j] = narrow<T>(da * silu);
            gates.x[j] = narrow<T>(da * u * (s + silu * (1 - s)));
        }
        store<N>(dup + first, ups);
        store<N>(dgate + first, gates);
    }
};

void kernel_swiglu_forward(DType dtype, void *act, const void *gate, const void *up, int64_t count) {
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for_each<pack_of<T>>(count, all_aligned(act, gate, up),
                               SwigluForward<T>{static_cast<T *>(act), static_cast<const T *>(gate),
                                                static_cast<const T *>(up)});
    });
}

void kernel_swiglu_backward(DType dtype, void *dgate, void *dup, const void *dact, const void *gate,
                            const void *up, int64_t count) {
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        for_each<pack_of<T>>(
            count, all_aligned(dgate, dup, dact, gate, up),
            SwigluBackward<T>{static_cast<T *>(dgate), static_cast<T *>(dup), static_cast<const T *>(dact),
                              static_cast<const T *>(gate), static_cast<const T *>(up)});
    });
}

// ---- optimizers: one pass over value, master, moments and gradient ----

// What the steps of all elements have in common.
template <class A> struct AdamWConstants {
    A beta1, beta2, fresh1, fresh2, eps, scale, rate, widen, keep;

    explicit AdamWConstants(AdamW h) {
        // Moments start at zero, and these corrections make up for it.
        double correction1 = 1 - pow(h.beta1, (double)h.step), correction2 = 1 - pow(h.beta2, (double)h.step);
        beta1 = (A)h.beta1, beta2 = (A)h.beta2, eps = (A)h.eps, scale = (A)h.grad_scale;
        fresh1 = (A)(1 - h.beta1), fresh2 = (A)(1 - h.beta2);
        rate = (A)(h.lr / correction1), widen = (A)(1 / sqrt(correction2));
        keep = (A)(1 - h.lr * h.weight_decay);
    }
    AdamWConstants() = default;
};

// The weights that are stepped: the master's where there is one.
template <int N, class T, class A> __device__ inline Pack<A, N> load_weights(const T *value, const A *master,
                                                                             int64_t first) {
    if (master) return load<N>(master + first);
    Pack<T, N> stored = load<N>(value + first);
    Pack<A, N> weights;
    for (int j = 0; j < N; j++) weights.x[j] = wide(stored.x[j]);
    return weights;
}

template <int N, class T, class A> __device__ inline void store_weights(T *value, A *master, int64_t first,
                                                                        const Pack<A, N> &weights) {
    if (master) store<N>(master + first, weights);
    Pack<T, N> stored;
    for (int j = 0; j < N; j++) stored.x[j] = narrow<T>(weights.x[j]);
    store<N>(value + first, stored);
}

template <class T, class G> struct AdamWStep {
    typedef Arithmetic<T> A;
    T *value;
    A *master, *m, *v;
    const G *grad;
    AdamWConstants<A> c;
    template <int N> __device__ void run(int64_t first) const {
        Pack<A, N> w = load_weights<N>(value, master, first), ms = load<N>(m + first), vs = load<N>(v + first);
        Pack<G, N> gs = load<N>(grad + first);
        for (int j = 0; j < N; j++) {
            A g = c.scale * narrow<A>(wide(gs.x[j]));
            ms.x[j] = c.beta1 * ms.x[j] + c.fresh1 * g;
            vs.x[j] = c.beta2 * vs.x[j] + c.fresh2 * (g * g);
            w.x[j] = c.keep * w.x[j] - c.rate * ms.x[j] / (sqrt_of(vs.x[j]) * c.widen + c.eps);
        }
        store<N>(m + first, ms);
        store<N>(v + first, vs);
        store_weights<N>(value, master, first, w);
    }
};

template <class T, class G> struct SgdStep {
    typedef Arithmetic<T> A;
    T *value;
    A *master;
    const G *grad;
    A rate;
    template <int N> __device__ void run(int64_t first) const {
        Pack<A, N> w = load_weights<N>(value, master, first);
        Pack<G, N> gs = load<N>(grad + first);
        for (int j = 0; j < N; j++) w.x[j] -= rate * narrow<A>(wide(gs.x[j]));
        store_weights<N>(value, master, first, w);
    }
};

void kernel_adamw(DType dtype, void *value, void *master, void *m, void *v, DType grad_dtype,
                  const void *grad, AdamW hyper, int64_t count) {
    by_dtype(dtype, [&](auto type) {
        by_dtype(grad_dtype, [&](auto grad_type) {
            using T = decltype(type);
            using G = decltype(grad_type);
            using A = Arithmetic<T>;
            for_each<pack_of<T, A, G>>(
                count, all_aligned(value, master, m, v, grad),
                AdamWStep<T, G>{static_cast<T *>(value), static_cast<A *>(master), static_cast<A *>(m),
                                static_cast<A *>(v), static_cast<const G *>(grad), AdamWConstants<A>(hyper)});
        });
    });
}

void kernel_sgd(DType dtype, void *value, void *master, DType grad_dtype, const void *grad, double lr,
                double grad_scale, int64_t count) {
    by_dtype(dtype, [&](auto type) {
        by_dtype(grad_dtype, [&](auto grad_type) {
            using T = decltype(type);
            using G = decltype(grad_type);
            using A = Arithmetic<T>;
            for_each<pack_of<T, A, G>>(count, all_aligned(value, master, grad),
                                         SgdStep<T, G>{static_cast<T *>(value), static_cast<A *>(master),
                                                       static_cast<const G *>(grad), (A)(lr * grad_scale)});
        });
    });
}

// ---- reductions: a block sums a chunk in f64, then blocks sum those sums, until one is left ----

constexpr int64_t SUM_CHUNK = 16384;  // elements, whatever the GPU: it decides the order of the sum

template <class T, bool SQUARES> __global__ void sum_chunks(double *sums, const T *x, int64_t count, bool packs) {
    constexpr int N = pack_of<T>;
    const int64_t first = (int64_t)blockIdx.x * SUM_CHUNK;
    const int64_t here = count - first < SUM_CHUNK ? count - first : SUM_CHUNK;
    double sum = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i * N < here; i += blockDim.x) {
        Pack<T, N> pack = load_of_row<N>(x + first, i, here, packs, narrow<T>(0.0f));
        for (int j = 0; j < N; j++) {
            double value = wide(pack.x[j]);
            sum += SQUARES ? value * value : value;
        }
    }
    sum = over_block(sum, Add());
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

template <class T, bool SQUARES> static void launch_sum(double *sums, const T *x, int64_t count) {
    LAUNCH((sum_chunks<T, SQUARES>), blocks_for("sum", ceil_div(count, SUM_CHUNK)),
           threads_for(ceil_div(least(count, SUM_CHUNK), pack_of<T>)), 0, stream(), sums, x,
           count, is_aligned(x));
}

static double sum_of(DType dtype, const void *x, int64_t count, bool squares) {
    if (count == 0) return 0;
    int64_t chunks = ceil_div(count, SUM_CHUNK);
    // each round's sums behind the last one's, and those of the last in the mailbox
    double *room = static_cast<double *>(device_scratch((size_t)(2 * chunks) * sizeof(double)));
    double *mail = &device_mailbox()->sum, *sums = chunks > 1 ? room : mail;
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        if (squares) launch_sum<T, true>(sums, static_cast<const T *>(x), count);
        else launch_sum<T, false>(sums, static_cast<const T *>(x), count);
    });
    while (chunks > 1) {
        int64_t terms = chunks;
        chunks = ceil_div(terms, SUM_CHUNK);
        room += terms;
        launch_sum<double, false>(chunks > 1 ? room : mail, sums, terms);
        sums = room;
    }
    return device_read_mailbox().sum;
}

double kernel_sum(DType dtype, const void *x, int64_t count) { return sum_of(dtype, x, count, false); }

double kernel_sum_squares(DType dtype, const void *x, int64_t count) { return sum_of(dtype, x, count, true); }

// ---- matrix multiply ----

void kernel_matmul(DType dtype, void *c, const void *a, const void *b, int64_t m, int64_t n, int64_t k,
                   bool transpose_a, bool transpose_b, double beta) {
    if (k == 0 && beta == 0) kernel_fill(dtype, c, 0, m * n);
    if (m == 0 || n == 0 || k == 0) return;
    Gemm g = {};
    g.dtype = g.c_dtype = dtype;
    g.m = m, g.n = n, g.k = k;
    g.transpose_a = transpose_a, g.transpose_b = transpose_b;
    g.a = a, g.b = b, g.c = c;
    g.a_columns = transpose_a ? m : k, g.b_columns = transpose_b ? k : n, g.c_columns = n;
    g.batch = 1;
    g.alpha = 1, g.beta = beta;
    gemm(&g);
}
