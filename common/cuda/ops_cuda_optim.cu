// ops_cuda_optim.cu: the optimizers on a GPU, in one pass over value, master, moments and gradient. They move
// 28 bytes for a 16-bit parameter with a master, and compute next to nothing.
//
// A range gets the same bits whether it is stepped whole or in shards that begin anywhere, in packs or not:
// fma is spelled out, so that a compiler cannot fuse different products and sums in these cases.
#include <math.h>

#include "ops_cuda.h"

// What is the same for all elements of a step.
template <class A>
struct AdamWConstants {
    A beta1, beta2, fresh1, fresh2, eps, scale, rate, widen, keep;

    explicit AdamWConstants(AdamW h) {
        // Bias correction: the moments start at zero.
        double correction1 = 1 - pow(h.beta1, (double)h.step),
               correction2 = 1 - pow(h.beta2, (double)h.step);
        beta1 = (A)h.beta1, beta2 = (A)h.beta2, eps = (A)h.eps, scale = (A)h.grad_scale;
        fresh1 = (A)(1 - h.beta1), fresh2 = (A)(1 - h.beta2);
        rate = (A)(h.lr / correction1), widen = (A)(1 / sqrt(correction2));
        keep = (A)(1 - h.lr * h.weight_decay);
    }
    AdamWConstants() = default;
};

// The weights to step: the master weights if there are any.
template <int N, class T, class A>
__device__ inline Pack<A, N> load_weights(const T *value, const A *master, int64_t first) {
    if (master) return load<N>(master + first);
    Pack<T, N> stored = load<N>(value + first);
    Pack<A, N> weights;
    for (int j = 0; j < N; j++) weights.x[j] = wide(stored.x[j]);
    return weights;
}

template <int N, class T, class A>
__device__ inline void store_weights(T *value, A *master, int64_t first, const Pack<A, N> &weights) {
    if (master) store<N>(master + first, weights);
    Pack<T, N> stored;
    for (int j = 0; j < N; j++) stored.x[j] = narrow<T>(weights.x[j]);
    store<N>(value + first, stored);
}

template <class T, class G>
struct AdamWStep {
    typedef Arithmetic<T> A;
    T *value;
    A *master, *m, *v;
    const G *grad;
    AdamWConstants<A> c;
    template <int N>
    struct In {
        Pack<A, N> w, m, v;
        Pack<G, N> grad;
    };
    template <int N>
    __device__ In<N> read(int64_t first) const {
        return {load_weights<N>(value, master, first), load<N>(m + first), load<N>(v + first),
                load<N>(grad + first)};
    }
    template <int N>
    __device__ void write(int64_t first, In<N> in) const {
        for (int j = 0; j < N; j++) {
            A g = c.scale * narrow<A>(wide(in.grad.x[j]));
            in.m.x[j] = fma(c.beta1, in.m.x[j], c.fresh1 * g);
            in.v.x[j] = fma(c.beta2, in.v.x[j], c.fresh2 * (g * g));
            A step = c.rate * in.m.x[j] / fma(sqrt(in.v.x[j]), c.widen, c.eps);
            in.w.x[j] = fma(c.keep, in.w.x[j], -step);
        }
        store<N>(m + first, in.m);
        store<N>(v + first, in.v);
        store_weights<N>(value, master, first, in.w);
    }
};

template <class T, class G>
struct SgdStep {
    typedef Arithmetic<T> A;
    T *value;
    A *master;
    const G *grad;
    A rate;
    template <int N>
    struct In {
        Pack<A, N> w;
        Pack<G, N> grad;
    };
    template <int N>
    __device__ In<N> read(int64_t first) const {
        return {load_weights<N>(value, master, first), load<N>(grad + first)};
    }
    template <int N>
    __device__ void write(int64_t first, In<N> in) const {
        for (int j = 0; j < N; j++) in.w.x[j] = fma(-rate, narrow<A>(wide(in.grad.x[j])), in.w.x[j]);
        store_weights<N>(value, master, first, in.w);
    }
};

void kernel_adamw(DType dtype, void *value, void *master, void *m, void *v, DType grad_dtype,
                  const void *grad, AdamW hyper, int64_t count) {
    by_dtype(dtype, [&](auto type) {
        by_dtype(grad_dtype, [&](auto grad_type) {
            using T = decltype(type);
            using G = decltype(grad_type);
            using A = Arithmetic<T>;
            for_each<pack_of<T, A, G>>(count, all_aligned(value, master, m, v, grad),
                                       AdamWStep<T, G>{(T *)value, (A *)master, (A *)m, (A *)v,
                                                       (const G *)grad, AdamWConstants<A>(hyper)});
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
            for_each<pack_of<T, A, G>>(
                count, all_aligned(value, master, grad),
                SgdStep<T, G>{(T *)value, (A *)master, (const G *)grad, (A)(lr * grad_scale)});
        });
    });
}
