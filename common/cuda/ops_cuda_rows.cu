// ops_cuda_rows.cu: operations on a GPU that work row by row: RMSNorm and RoPE.
//
// A block takes a row. If it needs the row twice, shared memory holds it in between, so that each array still
// moves only once to or from device memory.
#include <math.h>

#include "ops_cuda.h"

// ---- RMSNorm ----

template <class T>
__global__ void rmsnorm_rows(T *y, Arithmetic<T> *rstd, const T *x, const T *weight, int64_t h,
                             Arithmetic<T> eps, int64_t room, bool packs) {
    typedef Arithmetic<T> A;
    constexpr int N = pack_of<T>;
    typedef Pack<T, N> TPack;
    DYNAMIC_SHARED(TPack, held);
    const int64_t row = blockIdx.x;
    const HeldRow<N, T> xs = {x + row * h, h, packs, narrow<T>(0.0f), held, room};
    A squares = 0;
    each_pack<N>(xs.row, h, packs, xs.beyond, [&](int64_t i, const TPack &pack) {
        xs.keep(i, pack);
        for (int j = 0; j < N; j++) squares += wide(pack.x[j]) * wide(pack.x[j]);
    });
    squares = over_block(squares, Add());
    const A r = 1 / sqrt(squares / (A)h + eps);
    if (threadIdx.x == 0) rstd[row] = r;
    for (int64_t i = threadIdx.x; i * N < h; i += blockDim.x) {
        TPack pack = xs.again(i), weights = load_of_row<N>(weight, i, h, packs, narrow<T>(0.0f));
        for (int j = 0; j < N; j++) pack.x[j] = narrow<T>(wide(pack.x[j]) * r * wide(weights.x[j]));
        store_of_row<N>(y + row * h, i, h, packs, pack);
    }
}

void kernel_rmsnorm_forward(DType dtype, void *y, void *rstd, const void *x, const void *weight, int64_t n,
                            int64_t h, double eps) {
    if (n == 0 || h == 0) return;
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        using A = Arithmetic<T>;
        const int64_t size = sizeof(Pack<T, pack_of<T>>), vectors = ceil_div(h, pack_of<T>);
        const int64_t room = least(vectors, SHARED_BYTES / size);
        LAUNCH((rmsnorm_rows<T>), blocks_for("rmsnorm_forward", n), threads_for_row<T>(h),
               (size_t)(room * size), stream(), (T *)y, (A *)rstd, (const T *)x, (const T *)weight, h,
               (A)eps, room, all_aligned(y, weight) && rows_aligned((const T *)x, h));
    });
}

// dweight is a sum over all rows: each block sums some rows into its own row of `partials`, and add_partials
// sums these. The number of rows per block depends only on n.
constexpr int64_t NORM_GROUPS = 1024;
constexpr int64_t PARTIAL_SLICES = 8;  // warps that share the groups of 32 columns

//   forward: y[i] = x[i] * r * weight[i],  r = (mean(x^2) + eps)^-1/2,  so  dr/dx[j] = -r^3 x[j] / h
// dx may be dy or dresidual: each element of the inputs is read by the thread that later writes it.
template <class T>
__global__ void rmsnorm_backward_rows(T *dx, Arithmetic<T> *partials, const T *dresidual, const T *dy,
                                      const T *x, const T *weight, const Arithmetic<T> *rstd, int64_t n,
                                      int64_t h, int64_t rows, bool sums_shared, int64_t room, bool packs) {
    typedef Arithmetic<T> A;
    constexpr int N = pack_of<T>;
    typedef Pack<T, N> TPack;
    DYNAMIC_SHARED(TPack, held);
    const T zero = narrow<T>(0.0f);
    const int64_t end = least((blockIdx.x + 1) * rows, n);
    // After the held packs, if there is room: this block's sums, each of which only one thread uses.
    A *sums = partials + blockIdx.x * h;
    if (sums_shared) sums = reinterpret_cast<A *>(held + 2 * room);
    for (int64_t i = threadIdx.x; i * N < h; i += blockDim.x)
        for (int64_t j = i * N; j < least((i + 1) * N, h); j++) sums[j] = 0;
    for (int64_t row = blockIdx.x * rows; row < end; row++) {
        const HeldRow<N, T> xs = {x + row * h, h, packs, zero, held, room};
        const HeldRow<N, T> dys = {dy + row * h, h, packs, zero, held + room, room};
        A dot = 0;
        for (int64_t i = threadIdx.x; i * N < h; i += blockDim.x) {
            TPack xp = xs.first(i), dyp = dys.first(i), w = load_of_row<N>(weight, i, h, packs, zero);
            for (int j = 0; j < N; j++) dot += wide(dyp.x[j]) * wide(w.x[j]) * wide(xp.x[j]);
        }
        dot = over_block(dot, Add());
        const A r = rstd[row], pull = dot * r * r / (A)h;
        for (int64_t i = threadIdx.x; i * N < h; i += blockDim.x) {
            TPack xp = xs.again(i), dyp = dys.again(i), w = load_of_row<N>(weight, i, h, packs, zero), out;
            if (dresidual) out = load_of_row<N>(dresidual + row * h, i, h, packs, zero);
            for (int j = 0; j < N; j++) {
                const A xj = wide(xp.x[j]), dyj = wide(dyp.x[j]),
                        branch = r * (dyj * wide(w.x[j]) - xj * pull);
                if (i * N + j < h) sums[i * N + j] += dyj * (xj * r);
                out.x[j] = narrow<T>(dresidual ? wide(out.x[j]) + branch : branch);
            }
            store_of_row<N>(dx + row * h, i, h, packs, out);
        }
    }
    if (!sums_shared) return;
    for (int64_t i = threadIdx.x; i * N < h; i += blockDim.x)
        for (int64_t j = i * N; j < least((i + 1) * N, h); j++) partials[blockIdx.x * h + j] = sums[j];
}

// A block has 32 columns. Its warps take the groups in turn, and the first warp adds up their sums in order.
template <class T>
__global__ void add_partials(T *dweight, const Arithmetic<T> *partials, int64_t groups, int64_t h) {
    typedef Arithmetic<T> A;
    __shared__ A of_slice[PARTIAL_SLICES][WARP];
    const int64_t lane = threadIdx.x % WARP, slice = threadIdx.x / WARP, slices = blockDim.x / WARP;
    const int64_t column = blockIdx.x * WARP + lane;
    A sum = 0;
#pragma unroll 8
    for (int64_t group = slice; column < h && group < groups; group += slices)
        sum += partials[group * h + column];
    of_slice[slice][lane] = sum;
    __syncthreads();
    if (slice > 0 || column >= h) return;
    for (int64_t other = 1; other < slices; other++) sum += of_slice[other][lane];
    dweight[column] = narrow<T>(wide(dweight[column]) + sum);
}

void kernel_rmsnorm_backward(DType dtype, void *dx, DType dweight_dtype, void *dweight,
                             const void *dresidual, const void *dy, const void *x, const void *weight,
                             const void *rstd, int64_t n, int64_t h) {
    if (n == 0 || h == 0) return;
    const int64_t rows = ceil_div(n, NORM_GROUPS), groups = ceil_div(n, rows);
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        using A = Arithmetic<T>;
        const int64_t size = sizeof(Pack<T, pack_of<T>>), vectors = ceil_div(h, pack_of<T>);
        const int64_t sums_bytes = vectors * pack_of<T> * (int64_t)sizeof(A);
        const bool sums_shared = sums_bytes <= SHARED_BYTES;
        const int64_t room = least(vectors, (SHARED_BYTES - (sums_shared ? sums_bytes : 0)) / (2 * size));
        A *partials = static_cast<A *>(device_scratch((size_t)(groups * h) * sizeof(A)));
        LAUNCH((rmsnorm_backward_rows<T>), (unsigned)groups, threads_for(vectors),
               (size_t)(2 * room * size + (sums_shared ? sums_bytes : 0)), stream(), (T *)dx, partials,
               (const T *)dresidual, (const T *)dy, (const T *)x, (const T *)weight, (const A *)rstd, n, h,
               rows, sums_shared, room,
               all_aligned(dx, dresidual, dy, weight) && rows_aligned((const T *)x, h));
        const unsigned blocks = (unsigned)ceil_div(h, WARP),
                       threads = (unsigned)(least(groups, PARTIAL_SLICES) * WARP);
        if (dweight_dtype == dtype)
            LAUNCH((add_partials<T>), blocks, threads, 0, stream(), (T *)dweight, partials, groups, h);
        else LAUNCH((add_partials<A>), blocks, threads, 0, stream(), (A *)dweight, partials, groups, h);
    });
}

// ---- RoPE ----

// The angle by which each pair of dims turns from one position to the next. It depends only on the model,
// and is kept between calls.
static const double *frequencies(int64_t half, Rope rope) {
    static double *frequency;
    static Rope rope_of;
    static int64_t half_of;
    if (half_of != half || memcmp(&rope_of, &rope, sizeof rope) != 0) {
        const size_t bytes = (size_t)half * sizeof *frequency;
        backend_free(frequency);
        frequency = static_cast<double *>(backend_alloc(bytes));
        CHECK(frequency, "out of device memory for the frequencies of RoPE");
        double *host = static_cast<double *>(host_alloc(bytes));
        for (int64_t i = 0; i < half; i++) host[i] = rope_frequency(rope, i, 2 * half);
        backend_from_host(frequency, host, bytes);
        free(host);
        half_of = half, rope_of = rope;
    }
    return frequency;
}

// Below f64, whole quarter turns are first subtracted in f64, so that large positions stay accurate. For the
// rest, at most half a quarter turn, two polynomials suffice (coefficients: Moshier, Cephes, sinf).
template <class T>
__device__ inline void turn_of(double angle, Arithmetic<T> *cosine, Arithmetic<T> *sine) {
    if constexpr (sizeof(T) == 8) {
        *cosine = cos(angle), *sine = sin(angle);
    } else {
        const double quarters = angle * 0.63661977236758134308, whole = rint(quarters);
        const float x = (float)(quarters - whole) * 1.57079632679489661923f, z = x * x;
        const float s = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * x + x;
        const float c =
            ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z -
            0.5f * z + 1;
        const int quadrant = (int)((long long)whole & 3);
        *cosine = quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s;
        *sine = quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c;
    }
}

constexpr int ROPE_HEADS = 4;  // heads that a thread turns by the same angles

// A thread turns N pairs of dims of up to ROPE_HEADS heads of one row.
template <int N, class T>
__global__ void rope_pairs(T *x, const int32_t *positions, const double *frequency, int64_t n,
                           int64_t heads, int64_t half, int direction, IndexCheck check) {
    typedef Arithmetic<T> A;
    const int64_t parts = half / N, sets = ceil_div(heads, ROPE_HEADS);
    const int64_t item = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int64_t part = item % parts, set = item / parts % sets, row = item / parts / sets;
    if (row >= n) return;
    const int32_t position = positions[row];
    if (!check.holds(position)) {
        if (part == 0 && set == 0) check.tell(position, row);
        return;
    }
    T *at = x + (row * heads + set * ROPE_HEADS) * 2 * half + part * N;
    const int here = (int)least(ROPE_HEADS, heads - set * ROPE_HEADS);
    Pack<T, N> low[ROPE_HEADS], high[ROPE_HEADS];
#pragma unroll
    for (int k = 0; k < ROPE_HEADS; k++)
        if (k < here) {
            low[k] = load<N>(at + k * 2 * half);
            high[k] = load<N>(at + k * 2 * half + half);
        }
    A cosine[N], sine[N];
    for (int j = 0; j < N; j++) {
        turn_of<T>(position * frequency[part * N + j], &cosine[j], &sine[j]);
        sine[j] *= (A)direction;  // the inverse rotation is the one by the negative angle
    }
#pragma unroll
    for (int k = 0; k < ROPE_HEADS; k++)
        if (k < here) {
            for (int j = 0; j < N; j++) {
                const A a = wide(low[k].x[j]), b = wide(high[k].x[j]);
                low[k].x[j] = narrow<T>(fma(a, cosine[j], -(b * sine[j])));
                high[k].x[j] = narrow<T>(fma(b, cosine[j], a * sine[j]));
            }
            store<N>(at + k * 2 * half, low[k]);
            store<N>(at + k * 2 * half + half, high[k]);
        }
}

void kernel_rope(DType dtype, void *x, const int32_t *positions, int64_t n, int64_t heads,
                 int64_t head_size, Rope rope, int direction) {
    constexpr int64_t MOST_POSITIONS = 1 << 20;  // as on the CPU
    if (n == 0 || heads == 0) return;
    const int64_t half = head_size / 2;
    const double *frequency = frequencies(half, rope);
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        constexpr int N = pack_of<T>;
        T *to = (T *)x;
        IndexCheck check =
            check_index(MOST_POSITIONS, "rope: number %lld of the positions is %d, not in [0, %lld)");
        bool packs = rows_aligned(to, half);
        int64_t items = n * ceil_div(heads, ROPE_HEADS) * (packs ? half / N : half);
        unsigned threads = threads_for(items), blocks = blocks_for("rope", ceil_div(items, threads));
        if (packs)
            LAUNCH((rope_pairs<N, T>), blocks, threads, 0, stream(), to, positions, frequency, n, heads,
                   half, direction, check);
        else
            LAUNCH((rope_pairs<1, T>), blocks, threads, 0, stream(), to, positions, frequency, n, heads,
                   half, direction, check);
    });
}
