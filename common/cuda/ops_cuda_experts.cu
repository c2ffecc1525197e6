// ops_cuda_experts.cu: a mixture of experts on a GPU: routing, with a thread for each token; the order of
// rows, with a block for each expert; and combining rows, with a block for each token.
#include "ops_cuda.h"

// ---- routing: the same code as on the CPU ----

#define ROUTE_FUNCTION __device__ inline
#define REAL           float
#define F(name)        name##_of
#define EXP            expf
#define LOG            logf
#include "tensor/route_row.inc"
#undef REAL
#undef EXP
#undef LOG
#define REAL double
#define EXP  exp
#define LOG  log
#include "tensor/route_row.inc"
#undef REAL
#undef EXP
#undef LOG
#undef F
#undef ROUTE_FUNCTION

template <class A>
__global__ void route_forward(int32_t *chosen, A *weights, const A *logits, const A *bias, int64_t n,
                              int64_t e, int64_t k, RouteRule rule) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    route_choose_of(chosen + i * k, logits + i * e, bias, e, k, rule);
    route_weights_of(weights + i * k, chosen + i * k, logits + i * e, k, rule);
}

// Whether the k numbers of a row are all in range; reports those that are not.
__device__ inline bool row_holds(const int32_t *numbers, int64_t row, int64_t k, IndexCheck check) {
    bool holds = true;
    for (int64_t j = row * k; j < (row + 1) * k; j++) {
        if (check.holds(numbers[j])) continue;
        check.tell(numbers[j], j);
        holds = false;
    }
    return holds;
}

template <class A>
__global__ void route_backward(A *dlogits, const A *dweights, const A *weights, const int32_t *chosen,
                               const A *logits, int64_t n, int64_t e, int64_t k, RouteRule rule,
                               IndexCheck check) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || !row_holds(chosen, i, k, check)) return;
    route_backward_row_of(dlogits + i * e, dweights + i * k, weights + i * k, chosen + i * k,
                          logits + i * e, e, k, rule);
}

// Calls f with a value of the type in which routing with this dtype is computed.
template <class F>
static void by_wide(DType dtype, F f) {
    if (dtype == F64) f(double());
    else f(float());
}

void kernel_route_forward(DType dtype, int32_t *chosen, void *weights, const void *logits, const void *bias,
                          int64_t n, int64_t e, int64_t k, RouteRule rule) {
    if (n == 0) return;
    unsigned threads = threads_for(n), blocks = blocks_for("route_forward", ceil_div(n, threads));
    by_wide(dtype, [&](auto type) {
        using A = decltype(type);
        LAUNCH((route_forward<A>), blocks, threads, 0, stream(), chosen, static_cast<A *>(weights),
               static_cast<const A *>(logits), static_cast<const A *>(bias), n, e, k, rule);
    });
}

void kernel_route_backward(DType dtype, void *dlogits, const void *dweights, const void *weights,
                           const int32_t *chosen, const void *logits, int64_t n, int64_t e, int64_t k,
                           RouteRule rule) {
    if (n == 0) return;
    unsigned threads = threads_for(n), blocks = blocks_for("route_backward", ceil_div(n, threads));
    by_wide(dtype, [&](auto type) {
        using A = decltype(type);
        LAUNCH((route_backward<A>), blocks, threads, 0, stream(), static_cast<A *>(dlogits),
               static_cast<const A *>(dweights), static_cast<const A *>(weights), chosen,
               static_cast<const A *>(logits), n, e, k, rule,
               check_index(e, "route_backward: number %lld of the choices is %d, not in [0, %lld)"));
    });
}

// A block takes a sequence; its counts are integers, so atomics cannot change a bit.
template <class A>
__global__ void route_balance(A *losses, A *dlogits, const A *logits, const int32_t *chosen, int64_t s,
                              int64_t e, int64_t k, A share, A z, A scale, RouteRule rule,
                              IndexCheck check) {
    DYNAMIC_SHARED(int32_t, counts);
    for (int64_t i = threadIdx.x; i < e; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    const int64_t first = blockIdx.x * s;
    for (int64_t i = first * k + threadIdx.x; i < (first + s) * k; i += blockDim.x) {
        if (check.holds(chosen[i])) atomicAdd(&counts[chosen[i]], 1);
        else check.tell(chosen[i], i);
    }
    __syncthreads();
    for (int64_t i = first + threadIdx.x; i < first + s; i += blockDim.x)
        losses[i] = route_balance_row_of(dlogits + i * e, logits + i * e, counts, e, share, z, scale, rule);
}

void kernel_route_balance(DType dtype, void *losses, void *dlogits, const void *logits,
                          const int32_t *chosen, int64_t n, int64_t s, int64_t e, int64_t k,
                          BalanceRule balance, RouteRule rule) {
    if (n == 0) return;
    const double share = balance.auxiliary * (double)e / ((double)k * (double)s * (double)s);
    CHECK(e * (int64_t)sizeof(int32_t) <= SHARED_BYTES,
          "route_balance: counts of %lld experts are too many for a block", (long long)e);
    by_wide(dtype, [&](auto type) {
        using A = decltype(type);
        LAUNCH((route_balance<A>), blocks_for("route_balance", n / s), threads_for(s),
               (size_t)e * sizeof(int32_t), stream(), static_cast<A *>(losses), static_cast<A *>(dlogits),
               static_cast<const A *>(logits), chosen, s, e, k, (A)share, (A)(balance.z / (double)s),
               (A)balance.scale, rule,
               check_index(e, "route_balance: number %lld of the choices is %d, not in [0, %lld)"));
    });
}

// ---- the order of rows: a counting sort in which rows of one expert keep the order of their tokens ----

// The sum of x over the threads with lower numbers; *all gets the sum over the block.
__device__ inline int32_t sum_below(int32_t x, int32_t *all) {
    __shared__ int32_t of_warp[MOST_THREADS / WARP];
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int32_t sum = x;  // over the lanes up to this one
    for (unsigned lanes = 1; lanes < WARP; lanes *= 2) {
        const int32_t below = __shfl_up_sync(0xffffffff, sum, lanes);
        sum += lane >= lanes ? below : 0;
    }
    __syncthreads();  // those of the last call have all been read
    if (lane == WARP - 1) of_warp[warp] = sum;
    __syncthreads();
    int32_t before = sum - x, whole = 0;
    for (unsigned i = 0; i < blockDim.x / WARP; i++) {
        before += i < warp ? of_warp[i] : 0;
        whole += of_warp[i];
    }
    *all = whole;
    return before;
}

// Block b counts the pairs of expert b.
__global__ void count_rows(int32_t *counts, const int32_t *chosen, int64_t pairs, IndexCheck check) {
    int32_t count = 0, all;
    for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
        count += chosen[i] == (int32_t)blockIdx.x;
        if (blockIdx.x == 0 && !check.holds(chosen[i])) check.tell(chosen[i], i);
    }
    sum_below(count, &all);
    if (threadIdx.x == 0) counts[blockIdx.x] = all;
}

// Block b finds the places of these pairs, after the rows of all experts before it.
__global__ void place_rows(int32_t *tokens, int32_t *place, const int32_t *counts, const int32_t *chosen,
                           int64_t pairs, int64_t k) {
    int32_t next = 0, all;
    for (unsigned i = 0; i < blockIdx.x; i++) next += counts[i];
    for (int64_t first = 0; first < pairs; first += blockDim.x) {
        const int64_t i = first + threadIdx.x;
        const int32_t mine = i < pairs && chosen[i] == (int32_t)blockIdx.x,
                      row = next + sum_below(mine, &all);
        if (mine) place[i] = row, tokens[row] = (int32_t)(i / k);
        next += all;
    }
}

void kernel_route_order(int32_t *tokens, int32_t *place, int32_t *counts, const int32_t *chosen, int64_t n,
                        int64_t k, int64_t e) {
    if (e == 0) return;
    unsigned threads = threads_for(n * k), blocks = blocks_for("route_order", e);
    LAUNCH(count_rows, blocks, threads, 0, stream(), counts, chosen, n * k,
           check_index(e, "route_order: number %lld of the choices is %d, not in [0, %lld)"));
    LAUNCH(place_rows, blocks, threads, 0, stream(), tokens, place, counts, chosen, n * k, k);
}

// Block b takes the pairs of expert b % e in sequence b / e; of these, the first ones in order keep their
// place.
__global__ void route_capacity(int32_t *left, const int32_t *chosen, int64_t pairs, int64_t e, int64_t room,
                               IndexCheck check) {
    const int32_t expert = (int32_t)(blockIdx.x % e);
    const int64_t first = blockIdx.x / e * pairs;
    int64_t taken = 0;
    int32_t all;
    for (int64_t begin = 0; begin < pairs; begin += blockDim.x) {
        const int64_t i = begin + threadIdx.x;
        const int32_t choice = i < pairs ? chosen[first + i] : -1;
        const int64_t before = taken + sum_below(choice == expert, &all);
        if (choice == expert) left[first + i] = before < room ? expert : (int32_t)e;
        if (i < pairs && expert == 0 && !check.holds(choice)) check.tell(choice, first + i);
        taken += all;
    }
}

void kernel_route_capacity(int32_t *left, const int32_t *chosen, int64_t n, int64_t s, int64_t e, int64_t k,
                           int64_t room) {
    if (n == 0) return;
    LAUNCH(route_capacity, blocks_for("route_capacity", n / s * e), threads_for(s * k), 0, stream(), left,
           chosen, s * k, e, room,
           check_index(e, "route_capacity: number %lld of the choices is %d, not in [0, %lld)"));
}

// ---- nodes: a thread for each token, or for each pair ----

__global__ void route_nodes(int32_t *nodes, const int32_t *chosen, int64_t n, int64_t k, int64_t each,
                            int64_t count, int64_t most, IndexCheck check) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int32_t *own = nodes + i * most;
    int64_t found = 0;
    for (int64_t j = i * k; j < (i + 1) * k; j++) {
        const int32_t node = (int32_t)(chosen[j] / each);
        bool known = false;
        for (int64_t f = 0; f < found; f++) known = known || own[f] == node;
        if (known) continue;
        if (found == most) {
            check.tell((int32_t)most + 1, i);
            return;
        }
        own[found++] = node;
    }
    while (found < most) own[found++] = (int32_t)count;
}

void kernel_route_nodes(int32_t *nodes, const int32_t *chosen, int64_t n, int64_t k, int64_t each,
                        int64_t count, int64_t most) {
    if (n == 0) return;
    unsigned threads = threads_for(n), blocks = blocks_for("route_nodes", ceil_div(n, threads));
    LAUNCH(route_nodes, blocks, threads, 0, stream(), nodes, chosen, n, k, each, count, most,
           check_index(most, "route_nodes: token %lld goes to %d nodes, and %lld would fit"));
}

__global__ void route_within(int32_t *left, const int32_t *chosen, int64_t pairs, int64_t first,
                             int64_t count) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    const int64_t number = chosen[i] - first;
    left[i] = (int32_t)(number >= 0 && number < count ? number : count);
}

void kernel_route_within(int32_t *left, const int32_t *chosen, int64_t pairs, int64_t first,
                         int64_t count) {
    if (pairs == 0) return;
    unsigned threads = threads_for(pairs), blocks = blocks_for("route_within", ceil_div(pairs, threads));
    LAUNCH(route_within, blocks, threads, 0, stream(), left, chosen, pairs, first, count);
}

// ---- combining rows ----

template <class T>
__global__ void combine_forward(T *y, const T *z, const int32_t *place, const Arithmetic<T> *weights,
                                int64_t k, int64_t rows, int64_t h, IndexCheck check) {
    const int64_t row = blockIdx.x;
    if (!row_holds(place, row, k, check)) return;
    for (int64_t c = threadIdx.x; c < h; c += blockDim.x) {
        Arithmetic<T> sum = 0;
        for (int64_t j = row * k; j < (row + 1) * k; j++)
            if (place[j] < rows) sum += (weights ? weights[j] : 1) * wide(z[place[j] * h + c]);
        y[row * h + c] = narrow<T>(sum);
    }
}

template <class T>
__global__ void combine_backward(T *dz, Arithmetic<T> *dweights, const T *dy, const T *z,
                                 const int32_t *place, const Arithmetic<T> *weights, int64_t k,
                                 int64_t rows, int64_t h, IndexCheck check) {
    const int64_t j = blockIdx.x;  // a pair
    if (threadIdx.x == 0) dweights[j] = 0;
    if (!row_holds(place, j, 1, check) || place[j] >= rows) return;
    const T *from = dy + j / k * h, *value = z + place[j] * h;
    Arithmetic<T> sum = 0;
    for (int64_t c = threadIdx.x; c < h; c += blockDim.x) {
        dz[place[j] * h + c] = narrow<T>(weights[j] * wide(from[c]));
        sum += wide(from[c]) * wide(value[c]);
    }
    sum = over_block(sum, Add());
    if (threadIdx.x == 0) dweights[j] = sum;
}

void kernel_combine_forward(DType dtype, void *y, const void *z, const int32_t *place, const void *weights,
                            int64_t n, int64_t k, int64_t rows, int64_t h) {
    if (n == 0 || h == 0) return;
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        LAUNCH((combine_forward<T>), blocks_for("combine_forward", n), threads_for(h), 0, stream(),
               static_cast<T *>(y), static_cast<const T *>(z), place,
               static_cast<const Arithmetic<T> *>(weights), k, rows, h,
               check_index(n * k, "combine_forward: number %lld of the choices is %d, not in [0, %lld)"));
    });
}

void kernel_combine_backward(DType dtype, void *dz, void *dweights, const void *dy, const void *z,
                             const int32_t *place, const void *weights, int64_t n, int64_t k, int64_t rows,
                             int64_t h) {
    if (n * k == 0) return;
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        using A = Arithmetic<T>;
        LAUNCH((combine_backward<T>), blocks_for("combine_backward", n * k), threads_for(h), 0, stream(),
               static_cast<T *>(dz), static_cast<A *>(dweights), static_cast<const T *>(dy),
               static_cast<const T *>(z), place, static_cast<const A *>(weights), k, rows, h,
               check_index(n * k, "combine_backward: number %lld of the choices is %d, not in [0, %lld)"));
    });
}
