// ops_cuda_attention.cu: causal attention on a GPU as matrix multiplies over blocks of queries, with the
// softmax between them. Chapter 07 replaces it by one kernel that never stores a score.
//
//     keys ->
//     ##......     a row of the picture is a block of QUERY_ROWS queries, of all heads of one sample
//     ####....     # computed; the mask cuts off the corner of the last square
//     ######..     . skipped, and unchanged in probs
//     ########
//
// Scores are f32 (f64 for f64), in scratch. 16-bit tensor cores need 16-bit operands: probs are rounded
// when they are stored, and o is computed from the rounded ones; likewise the dscores of backward, from
// which dq and dk are computed. All sums are f32.
//
// Scratch in bytes, for one sample of s tokens, with elements of a bytes in arithmetic and e bytes in
// storage: heads * QUERY_ROWS * s * (a + e) for scores and dscores; if query heads share key heads, 2 s h e
// for keys and values with one head for each query head; in backward 2 s h a for their gradients, which are
// summed there even if heads are not shared, because dk and dv may overlap k and v.
#include <math.h>

#include "gemm.h"
#include "ops_cuda.h"

constexpr int64_t QUERY_ROWS = 256;
constexpr int64_t SCORE_COLUMNS = 8;  // rows of scratch begin at multiples of this, so that packs fit

// ---- softmax over the keys that a query sees, and its backward ----

// Block (row, head): probs (=) of query `first` + row, from its scores. Keys after the query, up to `end`,
// get 0.
template <class T>
__global__ void softmax_rows(T *probs, const Arithmetic<T> *scores, int64_t first, int64_t end, int64_t s,
                             int64_t columns, int64_t room, bool packs) {
    typedef Arithmetic<T> A;
    constexpr int N = pack_of<T, A>;
    typedef Pack<A, N> APack;
    DYNAMIC_SHARED(APack, held);
    const int64_t row = blockIdx.x, head = blockIdx.y, rows = gridDim.x;
    T *p = probs + (head * s + first + row) * s;
    const HeldRow<N, A> x = {
        scores + (head * rows + row) * columns, first + row + 1, true, (A)-INFINITY, held, room};
    Exponentials<T> all = Exponentials<T>::none();
    each_pack<N>(x.row, x.count, true, x.beyond, [&](int64_t i, const APack &pack) {
        x.keep(i, pack);
        all.add(pack.x);
    });
    all = over_block(all, JoinExponentials());
    const A inverse = 1 / all.sum;
    for (int64_t i = threadIdx.x; i * N < end; i += blockDim.x) {
        Pack<T, N> out = {};
        if (i * N < x.count) {
            const APack pack = x.again(i);
            for (int j = 0; j < N; j++) out.x[j] = narrow<T>(exp_for<T>(pack.x[j] - all.max) * inverse);
        }
        store_of_row<N>(p, i, end, packs, out);
    }
}

// Block (row, head): dscores (=) of query `first` + row.
//   forward: probs = softmax(scores) along the row, so  dscores = probs (dprobs - sum(probs dprobs))
template <class T>
__global__ void softmax_backward_rows(T *dscores, const Arithmetic<T> *dprobs, const T *probs,
                                      int64_t first, int64_t end, int64_t s, int64_t columns, int64_t room,
                                      bool packs) {
    typedef Arithmetic<T> A;
    constexpr int N = pack_of<T, A>;
    typedef Pack<A, N> APack;
    DYNAMIC_SHARED(APack, held);
    const int64_t row = blockIdx.x, head = blockIdx.y, rows = gridDim.x, valid = first + row + 1;
    const HeldRow<N, A> dp = {dprobs + (head * rows + row) * columns, valid, true, 0, held, room};
    const HeldRow<N, T> p = {probs + (head * s + first + row) * s,        valid, packs, narrow<T>(0.0f),
                             reinterpret_cast<Pack<T, N> *>(held + room), room};
    A sum = 0;
    for (int64_t i = threadIdx.x; i * N < end; i += blockDim.x) {
        const APack dpack = dp.first(i);
        const Pack<T, N> pack = p.first(i);
        for (int j = 0; j < N; j++) sum += wide(pack.x[j]) * dpack.x[j];
    }
    sum = over_block(sum, Add());
    for (int64_t i = threadIdx.x; i * N < end; i += blockDim.x) {
        const APack dpack = dp.again(i);
        Pack<T, N> pack = p.again(i);
        for (int j = 0; j < N; j++) pack.x[j] = narrow<T>(wide(pack.x[j]) * (dpack.x[j] - sum));
        store_of_row<N>(dscores + (head * rows + row) * columns, i, end, true, pack);
    }
}

// ---- heads that share a key head ----

// out (s, heads, d) = the key head of each query head, from in (s, heads / group, d)
template <class T>
struct SpreadHeads {
    T *out;
    const T *in;
    int64_t group, d;
    template <int N>
    using In = Pack<T, N>;
    template <int N>
    __device__ In<N> read(int64_t first) const {
        return load<N>(in + first / d / group * d + first % d);
    }
    template <int N>
    __device__ void write(int64_t first, const In<N> &heads) const {
        store<N>(out + first, heads);
    }
};

// out (s, heads / group, d) = in (s, heads, d) summed over each group, in order, rounded once
template <class T>
struct GatherHeads {
    T *out;
    const Arithmetic<T> *in;
    int64_t group, d;
    template <int N>
    using In = Pack<Arithmetic<T>, N>;
    template <int N>
    __device__ In<N> read(int64_t first) const {
        const Arithmetic<T> *from = in + first / d * group * d + first % d;
        In<N> sum = load<N>(from);
        for (int64_t i = 1; i < group; i++) {
            Pack<Arithmetic<T>, N> more = load<N>(from + i * d);
            for (int j = 0; j < N; j++) sum.x[j] += more.x[j];
        }
        return sum;
    }
    template <int N>
    __device__ void write(int64_t first, const In<N> &sum) const {
        Pack<T, N> rounded;
        for (int j = 0; j < N; j++) rounded.x[j] = narrow<T>(sum.x[j]);
        store<N>(out + first, rounded);
    }
};

// ---- one sample ----

// The sizes of a call, and its scratch.
template <class T>
struct Attention {
    typedef Arithmetic<T> A;
    static constexpr DType A_DTYPE = sizeof(A) == 8 ? F64 : F32;
    DType dtype;
    int64_t s, heads, kv_heads, d, h, group, columns;
    double scale;
    A *scores;   // (heads, QUERY_ROWS, columns); backward: dprobs
    T *dscores;  // the same
    T *k, *v;    // (s, h), if group > 1
    A *dk, *dv;  // (s, h)

    Attention(DType dtype, AttentionShape at, bool backward)
        : dtype(dtype),
          s(at.s),
          heads(at.heads),
          kv_heads(at.kv_heads),
          d(at.head_size),
          h(heads * d),
          group(heads / kv_heads),
          columns(ceil_div(s, SCORE_COLUMNS) * SCORE_COLUMNS),
          scale(1 / sqrt((double)d)) {
        const int64_t pairs = heads * least(QUERY_ROWS, s) * columns, spread = group > 1 ? s * h : 0;
        const int64_t gradients = backward ? s * h : 0;
        size_t bytes = 0;
        auto piece = [&](int64_t elements, size_t size) {
            size_t at = bytes;
            bytes += ((size_t)elements * size + 255) / 256 * 256;
            return at;
        };
        size_t at_scores = piece(pairs, sizeof(A)), at_dscores = piece(backward ? pairs : 0, sizeof(T));
        size_t at_k = piece(spread, sizeof(T)), at_v = piece(spread, sizeof(T));
        size_t at_dk = piece(gradients, sizeof(A)), at_dv = piece(gradients, sizeof(A));
        char *room = static_cast<char *>(device_scratch(bytes));
        scores = reinterpret_cast<A *>(room + at_scores),
        dscores = reinterpret_cast<T *>(room + at_dscores);
        k = reinterpret_cast<T *>(room + at_k), v = reinterpret_cast<T *>(room + at_v);
        dk = reinterpret_cast<A *>(room + at_dk), dv = reinterpret_cast<A *>(room + at_dv);
    }

    // (s, h), with a key head for each query head
    const T *spread(T *to, const T *from) const {
        if (group == 1) return from;
        for_each<pack_of<T>>(s * h, is_aligned(to) && rows_aligned(from, d),
                             SpreadHeads<T>{to, from, group, d});
        return to;
    }

    void gather(T *to, const A *from) const {
        for_each<pack_of<T, A>>(s * kv_heads * d, is_aligned(from) && rows_aligned(to, d),
                                GatherHeads<T>{to, from, group, d});
    }

    // One multiply per head. Matrices of queries or keys are columns of (s, h); those of pairs are separate.
    enum Place { OF_TOKENS, OF_PROBS, OF_SCORES };
    int64_t columns_of(Place place) const {
        return place == OF_TOKENS ? h : place == OF_PROBS ? s : columns;
    }
    int64_t step_of(Place place, int64_t rows) const {
        return place == OF_TOKENS ? d : place == OF_PROBS ? s * s : rows * columns;
    }

    void multiply(void *c, DType c_dtype, Place c_place, const T *a, Place a_place, const T *b,
                  int64_t rows, int64_t m, int64_t n, int64_t k, bool transpose_a, bool transpose_b,
                  double alpha, double beta) const {
        Gemm g = {};
        g.dtype = dtype, g.c_dtype = c_dtype;
        g.m = m, g.n = n, g.k = k;
        g.transpose_a = transpose_a, g.transpose_b = transpose_b;
        g.a = a, g.b = b, g.c = c;
        g.a_columns = columns_of(a_place), g.b_columns = h, g.c_columns = columns_of(c_place);
        g.batch = heads;
        g.a_step = step_of(a_place, rows), g.b_step = d, g.c_step = step_of(c_place, rows);
        g.alpha = alpha, g.beta = beta;
        gemm(&g);
    }

    // probs (heads, s, s), and o (s, h) unless NULL
    void forward(T *o, T *probs, const T *q, const T *own_k, const T *own_v) const {
        const T *all_k = spread(k, own_k), *all_v = o ? spread(v, own_v) : nullptr;
        for (int64_t first = 0; first < s; first += QUERY_ROWS) {
            const int64_t end = least(first + QUERY_ROWS, s), rows = end - first;
            // scores = q k^T / sqrt(d)
            multiply(scores, A_DTYPE, OF_SCORES, q + first * h, OF_TOKENS, all_k, rows, rows, end, d, false,
                     true, scale, 0);
            constexpr int64_t size = sizeof(Pack<A, pack_of<T, A>>);
            const int64_t vectors = ceil_div(end, pack_of<T, A>),
                          room = least(vectors, SHARED_BYTES / size);
            const unsigned threads = threads_for_row<A, pack_of<T, A>>(end);
            LAUNCH((softmax_rows<T>), dim3((unsigned)rows, (unsigned)heads), threads, (size_t)(room * size),
                   stream(), probs, scores, first, end, s, columns, room, rows_aligned(probs, s));
            // o = probs v
            if (o)
                multiply(o + first * h, dtype, OF_TOKENS, probs + first * s, OF_PROBS, all_v, rows, rows, d,
                         end, false, false, 1, 0);
        }
    }

    // Goes from the last block, which reads all keys, to the first: so the last sets dk and dv, and the
    // others add to them. A block's dq is written once its q is no longer needed, as dq may overlap q.
    void backward(T *dq, T *own_dk, T *own_dv, const T *d_o, const T *q, const T *own_k, const T *own_v,
                  const T *probs) const {
        const T *all_k = spread(k, own_k), *all_v = spread(v, own_v);
        for (int64_t first = (s - 1) / QUERY_ROWS * QUERY_ROWS; first >= 0; first -= QUERY_ROWS) {
            const int64_t end = least(first + QUERY_ROWS, s), rows = end - first;
            const double beta = end < s;
            // forward: o = probs v
            multiply(dv, A_DTYPE, OF_TOKENS, probs + first * s, OF_PROBS, d_o + first * h, rows, end, d,
                     rows, true, false, 1, beta);
            multiply(scores, A_DTYPE, OF_SCORES, d_o + first * h, OF_TOKENS, all_v, rows, rows, end, d,
                     false, true, 1, 0);
            constexpr int64_t size = sizeof(Pack<A, pack_of<T, A>>) + sizeof(Pack<T, pack_of<T, A>>);
            const int64_t vectors = ceil_div(end, pack_of<T, A>),
                          room = least(vectors, SHARED_BYTES / size);
            LAUNCH((softmax_backward_rows<T>), dim3((unsigned)rows, (unsigned)heads), threads_for(vectors),
                   (size_t)(room * size), stream(), dscores, scores, probs, first, end, s, columns, room,
                   rows_aligned(probs, s));
            // forward: scores = q k^T / sqrt(d)
            multiply(dk, A_DTYPE, OF_TOKENS, dscores, OF_SCORES, q + first * h, rows, end, d, rows, true,
                     false, scale, beta);
            multiply(dq + first * h, dtype, OF_TOKENS, dscores, OF_SCORES, all_k, rows, rows, d, end, false,
                     false, scale, 0);
        }
        gather(own_dk, dk);
        gather(own_dv, dv);
    }
};

// ---- all samples ----

static bool nothing(AttentionShape at) { return at.b == 0 || at.s == 0 || at.heads == 0; }

void kernel_attention_forward(DType dtype, void *o, void *probs, const void *q, const void *k,
                              const void *v, AttentionShape shape) {
    if (nothing(shape)) return;
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        const Attention<T> one(dtype, shape, false);
        for (int64_t b = 0; b < shape.b; b++) {
            const int64_t queries = b * one.s * one.h, keys = queries / one.group;
            one.forward(o ? (T *)o + queries : nullptr, (T *)probs + b * one.heads * one.s * one.s,
                        (const T *)q + queries, (const T *)k + keys, v ? (const T *)v + keys : nullptr);
        }
    });
}

void kernel_attention_probs(DType dtype, void *probs, const void *q, const void *k, AttentionShape shape) {
    kernel_attention_forward(dtype, NULL, probs, q, k, NULL, shape);
}

void kernel_attention_backward(DType dtype, void *dq, void *dk, void *dv, const void *d_o, const void *q,
                               const void *k, const void *v, const void *probs, AttentionShape shape) {
    if (nothing(shape)) return;
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        const Attention<T> one(dtype, shape, true);
        for (int64_t b = 0; b < shape.b; b++) {
            const int64_t queries = b * one.s * one.h, keys = queries / one.group;
            one.backward((T *)dq + queries, (T *)dk + keys, (T *)dv + keys, (const T *)d_o + queries,
                         (const T *)q + queries, (const T *)k + keys, (const T *)v + keys,
                         (const T *)probs + b * one.heads * one.s * one.s);
        }
    });
}
