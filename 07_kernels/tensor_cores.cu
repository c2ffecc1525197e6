// tensor_cores.cu: a matrix multiply on tensor cores, in bf16 and fp16 with f32 sums. Playbook: "Diving in
// the GPUs"; the instructions are those of cuda/instructions.h.
//
// Changes from coarsening.cu: a warp has 64 x 64 elements of C in fragments, and multiplies 16 x 16 of A by
// 16 x 8 of B in one instruction, mma. A block of 8 warps has 128 x 256 of C, and takes steps of 32:
//
//     memory -> shared        cp.async: 16 bytes a thread, not through registers
//     shared -> fragments     ldmatrix: four 8 x 8 matrices for a warp, a row of 16 bytes from each lane
//     fragments -> C          mma: 4096 FLOPs
//
// For a warp and a step: 6 cp.async of 16 sectors and 4 shared passes; 16 ldmatrix of 4 passes; 64 mma. That
// is 88 passes beside 2^18 FLOPs, which take an A100 128 clocks, but an H100, whose tensor cores are twice
// as fast and whose shared memory is not, only 64: there shared memory sets the time.
//
// Rows of A's tile are 64 bytes, and of B's 512: the 8 rows that ldmatrix reads together fall on only 2
// groups of banks for A, and on one for B. With chunks of 16 bytes swizzled by their row they fall on 8:
//
//     chunk of A  c ^ (row / 2 mod 4)     without it, 3 more passes for each of 4 matrices
//     chunk of B  c ^ (row mod 8)         7
//
// With one stage, copies and products alternate. With 4 in a ring, 3 steps are in flight while one is
// multiplied, and one barrier per step is enough: after it, all warps have read the stage to be filled next.
//
//     copy     0 1 2     3     4     5         before a product, wait_group 2: of the groups committed, one
//     mma            0     1     2     3       for each step, all but the last two have arrived
//
// Nothing waits in the model, so stages save no time in it; on a GPU they hide the latency of memory. The
// model also grants mma the full rate of the tensor cores, which on an H100 only wgmma reaches.
//
// Proof: C within 4 times the error of the back end's product of the same dtype (on a GPU cuBLASLt's), each
// against f64, at sizes that fill no tile, and at odd sizes and unaligned arrays, whose rows cp.async cannot
// copy; counts equal the formulas.
// Run: build/07_kernels/tensor_cores           (--gpu a100, --size 8192, --verbose)
// Last line: PASS tensor_cores: 4 stages in bf16 take 0.09 of the least that f32 without tensor …
#include "cuda/instructions.h"
#include "sixteen_bits.h"

enum { M = 128, N = 256, K = 32, STAGES = 4 };  // of a block: its piece of C, a step, steps in the ring
enum { SIDE = 64, WARPS = M / SIDE * (N / SIDE), THREADS = 32 * WARPS };
enum { CHUNK = 8, A_CHUNKS = M * K / CHUNK, B_CHUNKS = K * N / CHUNK };  // of 16 bytes; in a tile
enum { ROWS = SIDE / 16, COLUMNS = SIDE / 8 };                           // fragments of a warp

// A (m, k), B (k, n), C (m, n). Places in a matrix are ints: it has less than 2^31 elements.
struct Sizes {
    int m, n, k;
};

// Where a chunk is in a tile of A (M, K), and of B (K, N).
template <bool SWIZZLED>
__device__ static inline int place_a(int row, int chunk) {
    return row * K + (SWIZZLED ? chunk ^ row / 2 % 4 : chunk) * CHUNK;
}
template <bool SWIZZLED>
__device__ static inline int place_b(int row, int chunk) {
    return row * N + (SWIZZLED ? chunk ^ row % 8 : chunk) * CHUNK;
}

// ---- memory to shared ----

// Beyond the edges of the matrix x (rows, columns) all is zero. WIDE: rows begin at multiples of 16 bytes;
// others are copied by numbers, and have arrived when this returns. Places of rows beyond the last may pass
// 2^31: they wrap, and nothing is read there.
template <bool WIDE, class T>
__device__ static inline void copy_chunk(T *to, const T *x, int row, int column, int rows, int columns) {
    if (WIDE) {
        cp_async(to, x + (uint32_t)row * columns + column, row < rows && column < columns);
        return;
    }
    const uint16_t *from = reinterpret_cast<const uint16_t *>(x + (uint32_t)row * columns + column);
    const int end = row < rows ? columns - column : 0;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool first = 2 * i < end, second = 2 * i + 1 < end;
        words[i] = (first ? from[2 * i] : 0) | (uint32_t)(second ? from[2 * i + 1] : 0) << 16;
    }
    *reinterpret_cast<uint4 *>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// The tile of A from row0 on, and behind it that of B from column0 on, of step k0.
template <bool SWIZZLED, bool WIDE, class T>
__device__ static inline void copy_stage(T *stage, const T *a, const T *b, int row0, int column0, int k0,
                                         const Sizes &size) {
#pragma unroll
    for (int i = 0; i < A_CHUNKS / THREADS; i++) {
        const int at = (int)threadIdx.x + i * THREADS, row = at / (K / CHUNK), chunk = at % (K / CHUNK);
        copy_chunk<WIDE>(stage + place_a<SWIZZLED>(row, chunk), a, row0 + row, k0 + chunk * CHUNK, size.m,
                         size.k);
    }
#pragma unroll
    for (int i = 0; i < B_CHUNKS / THREADS; i++) {
        const int at = (int)threadIdx.x + i * THREADS, row = at / (N / CHUNK), chunk = at % (N / CHUNK);
        copy_chunk<WIDE>(stage + M * K + place_b<SWIZZLED>(row, chunk), b, k0 + row,
                         column0 + chunk * CHUNK, size.k, size.n);
    }
}

// ---- shared to fragments, and to sums ----

// sum += the warp's rows of A times its columns of B.
template <bool SWIZZLED, class T>
__device__ static inline void multiply_stage(float (&sum)[ROWS][COLUMNS][4], const T *stage, int row,
                                             int column) {
    // lanes 0 to 15 point to 16 rows of the left chunk, and the others to those of the right one
    const int lane = (int)threadIdx.x % 32, lane_row = lane % 16, lane_chunk = lane / 16;
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        uint32_t left[ROWS][4];
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            ldmatrix_x4(left[i],
                        stage + place_a<SWIZZLED>(row + i * 16 + lane_row, k / CHUNK + lane_chunk));
#pragma unroll
        for (int j = 0; j < COLUMNS; j += 2) {
            uint32_t right[4];  // two fragments: 16 x 8 each
            ldmatrix_x4_trans(
                right, stage + M * K + place_b<SWIZZLED>(k + lane_row, column / CHUNK + j + lane_chunk));
            const uint32_t first[2] = {right[0], right[1]}, second[2] = {right[2], right[3]};
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                mma_m16n8k16<T>(sum[i][j], left[i], first);
                mma_m16n8k16<T>(sum[i][j + 1], left[i], second);
            }
        }
    }
}

// ---- sums to memory ----

// ADD: all of C is loaded before any is stored, since a load behind a store would wait for it. Number by
// number (not WIDE) that takes too many registers, so C is loaded and stored row by row.
template <bool WIDE, bool ADD, class T>
__device__ static inline void store(T *c, float (&sum)[ROWS][COLUMNS][4], int row0, int column0, int m,
                                    int n) {
    constexpr int TOGETHER = WIDE ? ROWS * 2 : 1;
    const int lane = (int)threadIdx.x % 32;
    const auto each = [&](int first, auto act) {
#pragma unroll
        for (int i = first; i < first + TOGETHER; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const int row = row0 + i * 8 + lane / 4, column = column0 + j * 8 + lane % 4 * 2;
                float *x = &sum[i / 2][j][i % 2 * 2];
                act(x[0], x[1], c + (uint32_t)row * n + column, row < m ? n - column : 0);
            }
    };
#pragma unroll
    for (int i = 0; i < ROWS * 2; i += TOGETHER) {
        if (ADD)
            each(i, [](float &x, float &y, T *of_c, int left) { add_neighbours(x, y, of_c, WIDE, left); });
        each(i, [](float x, float y, T *of_c, int left) { put_neighbours(of_c, x, y, WIDE, left); });
    }
}

// ---- the kernel ----

// ADD: C += A B.
template <class T, int DEPTH, bool SWIZZLED, bool WIDE, bool ADD>
__global__ void __launch_bounds__(THREADS) matmul(T *c, const T *a, const T *b, Sizes size) {
    DYNAMIC_SHARED(T, stages);
    constexpr int STAGE = (M + N) * K, AHEAD = DEPTH - 1, PENDING = AHEAD > 1 ? AHEAD - 1 : 0;
    const int warp = (int)threadIdx.x / 32, row = warp / (N / SIDE) * SIDE,
              column = warp % (N / SIDE) * SIDE;
    const int row0 = (int)blockIdx.y * M, column0 = (int)blockIdx.x * N;
    const int steps = (size.k + K - 1) / K;
    const auto copy = [&](int step) {  // a group for each step, empty beyond the last
        if (step < steps)
            copy_stage<SWIZZLED, WIDE>(stages + step % DEPTH * STAGE, a, b, row0, column0, step * K, size);
        cp_async_commit();
    };
    float sum[ROWS][COLUMNS][4] = {};
    for (int step = 0; step < AHEAD; step++) copy(step);
    for (int step = 0; step < steps; step++) {
        if (AHEAD == 0) {
            __syncthreads();  // all threads have read the stage
            copy(step);
        }
        cp_async_wait<PENDING>();
        __syncthreads();  // the stage is complete, and all threads have read the one before
        if (AHEAD > 0) copy(step + AHEAD);
        multiply_stage<SWIZZLED>(sum, stages + step % DEPTH * STAGE, row, column);
    }
    store<WIDE, ADD>(c, sum, row0 + row, column0 + column, size.m, size.n);
}

// ---- host code ----

enum { STAGE_BYTES = (M + N) * K * 2 };

template <class T, int DEPTH, bool SWIZZLED, bool ADD = false>
static void launch_on(cudaStream_t stream, T *c, const T *a, const T *b, Sizes size) {
    const dim3 grid((unsigned)((size.n + N - 1) / N), (unsigned)((size.m + M - 1) / M));
    const size_t bytes = DEPTH * STAGE_BYTES;
    void (*kernel)(T *, const T *, const T *, Sizes) = matmul<T, DEPTH, SWIZZLED, false, ADD>;
    if (in_packs<T>(size.k, a) && in_packs<T>(size.n, b, c)) kernel = matmul<T, DEPTH, SWIZZLED, true, ADD>;
    if (size.m == 0 || size.n == 0) return;
    allow_shared(kernel, bytes);
    LAUNCH(kernel, grid, THREADS, bytes, stream, c, a, b, size);
}

#ifndef NO_MAIN

enum { ONE, SWIZZLE, RING, RING_F16, VERSIONS };
static const KernelVersion versions[VERSIONS] = {
    {"one stage", THREADS, 215, STAGE_BYTES},
    {"one, swizzled", THREADS, 229, STAGE_BYTES},
    {"4 stages", THREADS, 238, STAGES *STAGE_BYTES},
    {"4 stages, fp16", THREADS, 238, STAGES *STAGE_BYTES},
};

static void launch(int version, __nv_bfloat16 *c, const __nv_bfloat16 *a, const __nv_bfloat16 *b,
                   Sizes size) {
    if (version == ONE) launch_on<__nv_bfloat16, 1, false>(0, c, a, b, size);
    if (version == SWIZZLE) launch_on<__nv_bfloat16, 1, true>(0, c, a, b, size);
    if (version == RING) launch_on<__nv_bfloat16, STAGES, true>(0, c, a, b, size);
}
static void launch(int, __half *c, const __half *a, const __half *b, Sizes size) {
    launch_on<__half, STAGES, true>(0, c, a, b, size);
}

// n a multiple of N.
static Work formula(int version, double n) {
    const double warps = n * n / (SIDE * SIDE), steps = n / K, warp_steps = warps * steps;
    const double copies = (A_CHUNKS + B_CHUNKS) / THREADS;  // of a lane
    Work w = {};
    w.load_requests = copies * warp_steps, w.load_sectors = 16 * w.load_requests;
    w.store_requests = warps * ROWS * COLUMNS * 2;
    w.store_sectors = 8 * w.store_requests;  // half of each: 16 bytes of 8 rows
    w.memory_sectors = 3 * n * n / 16;
    const double matrices = 4.0 * (ROWS + COLUMNS / 2) * (K / 16);  // of ldmatrix, 4 each time
    w.shared_passes = warp_steps * (4 * copies + matrices);
    w.shared_conflicts = version == ONE ? warp_steps * matrices * (3 + 7) / 2 : 0;  // half are A's
    w.tensor_flops = 2 * n * n * n;
    w.barriers = warps / WARPS * steps * (version < RING ? 2 : 1);
    return w;
}

// ---- proof ----

// A and B begin at element `first` of their arrays.
template <class T>
static void prove(Proof *proof, int version, DType dtype, const Sizes &s, int first) {
    const Numbers<T> a(first + s.m * s.k, 1), b(first + s.k * s.n, 2);
    const Array<T> d_a(a.narrow.data(), first + s.m * s.k), d_b(b.narrow.data(), first + s.k * s.n);
    const Array<T> d_c(s.m * s.n);
    const float *exact_a = a.exact.data() + first, *exact_b = b.exact.data() + first;
    std::vector<float> library((size_t)(s.m * s.n));
    std::vector<double> right((size_t)(s.m * s.n));
    launch(version, d_c.at, d_a.at + first, d_b.at + first, s);
    kernels_matmul_f64(right.data(), exact_a, exact_b, s.m, s.n, s.k);
    kernels_matmul_library(dtype, library.data(), exact_a, exact_b, s.m, s.n, s.k);
    proof->hold(in_f32(d_c), library, right);
}

template <class T>
static Proof check(int version, DType dtype) {
    Proof proof;
    for (const Sizes &s : {Sizes{0, 0, 0}, {1, 1, 1}, {37, 64, 37}, {131, 131, 131}, {200, 264, 40}})
        prove<T>(&proof, version, dtype, s, 0);
    prove<T>(&proof, version, dtype, {16, 264, 40}, 1);  // whole chunks in a row, and none is aligned
    return proof;
}

template <class T>
static void row(int version, DType dtype, int64_t n) {
    matmul_row<T>(
        versions[version], check<T>(version, dtype), N, n,
        [&](T *c, const T *a, const T *b, int size) { launch(version, c, a, b, {size, size, size}); },
        [&](int64_t size) { return formula(version, (double)size); });
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int64_t n;
    Option table[] = {
        {"size", OPTION_INT, &n, "4096", N, 32768, "", "rows and columns of the table's matrices", false},
        KERNELS_OPTIONS(options),
    };
    options_parse(argc, argv,
                  "A matrix multiply on tensor cores, whose tiles are swizzled and in flight ahead of it.\n"
                  "  tensor_cores --gpu a100",
                  table, sizeof table / sizeof *table);
    n -= n % N;
    char *size = format_text("C = A B of %lld x %lld matrices, 16 bits", (long long)n, (long long)n);
    const double square = (double)n * (double)n, flops = 2 * square * (double)n;
    const double f32 = kernels_limit(&options, 12 * square, flops, 0);
    kernels_begin(&options, size, kernels_limit(&options, 6 * square, 0, flops));
    for (int v = ONE; v <= RING; v++) row<__nv_bfloat16>(v, BF16, n);
    row<__half>(RING_F16, F16, n);
    if (ON_GPU) say("%-20s %10.4g  measured", "cuBLAS, bf16", kernels_matmul_seconds(BF16, n) * 1e3);
    free(size);
    say("in f32, without tensor cores, the model's limit is %.4g ms", f32 * 1e3);
    return report_verdict("4 stages in bf16 take %.2f of the least that f32 without tensor cores can",
                          kernels_seconds(RING) / f32);
}
#endif
