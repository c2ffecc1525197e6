// hopper.cu: a matrix multiply with the instructions of an H100, in bf16 and fp16 with f32 sums. Playbook:
// "Diving in the GPUs"; the instructions are those of cuda/instructions_hopper.h.
//
// Changes from tensor_cores.cu: threads neither copy nor load fragments. One thread requests a whole tile
// (TMA), which arrives swizzled; a warpgroup multiplies 64 x 16 of A by 16 x 256 of B in one instruction
// (wgmma), which reads both from shared memory. A block has 128 x 256 of C, a warpgroup 64 of its rows, and
// takes steps of 64. For a step, TMA writes 384 rows of 128 bytes; each of the 4 wgmma of each of 2
// warpgroups reads 2 kB of A and 8 kB of B, once for its four warps. That is 1024 passes of shared memory
// beside 2^22 FLOPs, which take an H100 1024 clocks; with mma, whose warps of 64 x 64 read A four times (and
// B twice, as here), it would be 1408 passes.
//
// A tile is complete when its mbarrier has counted its bytes. In a plain ring of stages all warps wait for
// one another at each step. The next version has roles instead: a producer, one thread of a warpgroup that
// gives its registers to the others, and consumers. They wait at mbarriers, not at barriers of the block:
//
//     producer    wait empty[s], parity 1 - turn; expect bytes at full[s]; copy to stage s
//     consumer    wait full[s], parity turn; multiply; when all of it is read, arrive at empty[s]
//
// with step i in stage s = i mod 4 and turn i / 4 mod 2. A consumer issues a step's products while those of
// the step before are in flight; when these have ended, it releases their stage. Before a barrier's first
// phase has ended, parity 1 counts as ended: so in turn 0 the producer, which waits for parity 1, passes at
// once. Persistent: one block per multiprocessor takes one piece of C after another; while its consumers
// store, the producer copies for the next.
//
// All blocks together load (1 / 256 + 1 / rows) n^3 numbers: L2 sets the model's time with 64 rows, and
// still does with 128. Clusters of 2 x 2 blocks with TMA multicast would halve that; they are not in
// this book. Nothing waits in the model, so stages, roles and persistence save no time in it.
//
// Proof: C within 4 times the error of the back end's product of the same dtype (on a GPU cuBLASLt's), each
// against f64, at odd sizes, with rows padded to 16 bytes for TMA; twice the same bits; counts equal the
// formulas.
// Run: build/07_kernels/hopper           (--size 8192, --verbose)
// Last line: PASS hopper: two warpgroups that share B take 0.61 of the modelled time of one …
#include "cuda/instructions_hopper.h"
#include "sixteen_bits.h"

enum { N = 256, K = 64 };                   // columns of a piece of C; terms of a step
enum { GROUP_ROWS = 64, WARPGROUP = 128 };  // of a warpgroup: rows of C, threads
enum { CONSUMERS = 2, STAGES = 4, B_BYTES = N * K * 2, BOX_BYTES = K * TILE_ROW };

// Of a block in which so many warpgroups multiply.
template <int GROUPS>
struct Piece {
    enum { ROWS = GROUPS * GROUP_ROWS, A_BYTES = ROWS * TILE_ROW, STAGE = A_BYTES + B_BYTES };
};

// Places in C, and what is multiplied: n x n matrices, whose rows are `pitch` numbers apart.
struct Problem {
    int n, pitch, steps, row_pieces, pieces;
};

// ---- memory to shared ----

// A's rows of the piece (ROWS, K), and behind it B's columns (K, N), as 4 tiles of 64.
template <int GROUPS>
__device__ static inline void copy_step(char *stage, Mbarrier *full, const TensorMap *a, const TensorMap *b,
                                        const Problem &p, int piece, int step) {
    const int row = piece % p.row_pieces * Piece<GROUPS>::ROWS, column = piece / p.row_pieces * N;
    mbarrier_arrive_expect(full, Piece<GROUPS>::STAGE);
    tma_load(stage, a, row, step * K, full);
    for (int i = 0; i < N / 64; i++)
        tma_load(stage + Piece<GROUPS>::A_BYTES + i * BOX_BYTES, b, step * K, column + i * 64, full);
}

// ---- shared to sums ----

// sum (+)= the warpgroup's rows of A times B: a group of wgmma, in flight.
template <class T, int GROUPS>
__device__ static inline void multiply_step(float (&sum)[N / 2], const char *stage, int group, bool add) {
    const char *a = stage + group * GROUP_ROWS * TILE_ROW, *b = stage + Piece<GROUPS>::A_BYTES;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K / 16; k++)
        wgmma<T, K_MAJOR, MN_MAJOR>(sum, wgmma_operand(a + k * 32, 0),
                                    wgmma_operand(b + k * 16 * TILE_ROW, BOX_BYTES), add || k > 0);
    wgmma_commit();
}

// ---- sums to memory ----

// Beyond the last column is a row's padding: B has zeros there.
template <class T, int GROUPS>
__device__ static inline void store(T *c, const float (&sum)[N / 2], const Problem &p, int piece,
                                    int group) {
    const int thread = (int)threadIdx.x % WARPGROUP, lane = thread % 32;
    const int row0 = piece % p.row_pieces * Piece<GROUPS>::ROWS + group * GROUP_ROWS + thread / 32 * 16;
    const int column0 = piece / p.row_pieces * N;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row0 + half * 8 + lane / 4, column = column0 + j * 8 + lane % 4 * 2;
            if (row < p.n && column < p.n)
                narrow(c + row * p.pitch + column, sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
        }
}

// ---- all warpgroups do both ----

template <class T, int GROUPS, int DEPTH>
__global__ void __launch_bounds__(GROUPS *WARPGROUP, 1)
    matmul(T *c, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, Problem p) {
    DYNAMIC_SHARED(char, memory);
    __shared__ Mbarrier full[DEPTH];
    char *stages = first_tile(memory);
    const int group = (int)threadIdx.x / WARPGROUP, piece = (int)blockIdx.x;
    const auto copy = [&](int step) {
        if (threadIdx.x != 0 || step >= p.steps) return;
        copy_step<GROUPS>(stages + step % DEPTH * Piece<GROUPS>::STAGE, &full[step % DEPTH], &a, &b, p,
                          piece, step);
    };
    if (threadIdx.x == 0) {
        for (int s = 0; s < DEPTH; s++) mbarrier_init(&full[s], 1);
        fence_proxy_async();
    }
    __syncthreads();
    for (int step = 0; step < DEPTH; step++) copy(step);
    float sum[N / 2] = {};
    for (int step = 0; step < p.steps; step++) {
        mbarrier_wait(&full[step % DEPTH], (uint32_t)(step / DEPTH % 2));
        multiply_step<T, GROUPS>(sum, stages + step % DEPTH * Piece<GROUPS>::STAGE, group, step > 0);
        wgmma_wait<0>(sum);
        __syncthreads();  // all have read the stage
        copy(step + DEPTH);
    }
    store<T, GROUPS>(c, sum, p, piece, group);
}

// ---- a producer and consumers ----

__device__ static inline void produce(char *stages, Mbarrier *full, Mbarrier *empty, const TensorMap *a,
                                      const TensorMap *b, const Problem &p) {
    int stage = 0;
    uint32_t turn = 0;
    for (int piece = (int)blockIdx.x; piece < p.pieces; piece += (int)gridDim.x)
        for (int step = 0; step < p.steps; step++) {
            mbarrier_wait(&empty[stage], 1 - turn);
            copy_step<CONSUMERS>(stages + stage * Piece<CONSUMERS>::STAGE, &full[stage], a, b, p, piece,
                                 step);
            if (++stage == STAGES) stage = 0, turn = 1 - turn;
        }
}

template <class T>
__device__ static inline void consume(T *c, const char *stages, Mbarrier *full, Mbarrier *empty,
                                      const Problem &p, int group) {
    const bool first_lane = threadIdx.x % 32 == 0;
    int stage = 0;
    uint32_t turn = 0;
    for (int piece = (int)blockIdx.x; piece < p.pieces; piece += (int)gridDim.x) {
        float sum[N / 2] = {};
        int before = 0;
        for (int step = 0; step < p.steps; step++) {
            mbarrier_wait(&full[stage], turn);
            multiply_step<T, CONSUMERS>(sum, stages + stage * Piece<CONSUMERS>::STAGE, group, step > 0);
            wgmma_wait<1>();  // the step before is done
            if (first_lane && step > 0) mbarrier_arrive(&empty[before]);
            before = stage;
            if (++stage == STAGES) stage = 0, turn = 1 - turn;
        }
        wgmma_wait<0>(sum);
        if (first_lane) mbarrier_arrive(&empty[before]);
        store<T, CONSUMERS>(c, sum, p, piece, group);
    }
}

// The first warpgroup produces. Of 168 registers a thread it keeps 24, and the others have 240 each.
template <class T>
__global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    matmul_by_roles(T *c, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                    Problem p) {
    DYNAMIC_SHARED(char, memory);
    __shared__ Mbarrier full[STAGES];
    __shared__ Mbarrier empty[STAGES];
    char *stages = first_tile(memory);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], CONSUMERS * WARPGROUP / 32);  // a lane of each warp that reads
        }
        fence_proxy_async();
    }
    __syncthreads();
    const int group = (int)threadIdx.x / WARPGROUP - 1;
    if (group < 0) {
        registers_give<24>();
        if (threadIdx.x == 0) produce(stages, full, empty, &a, &b, p);
    } else {
        registers_take<240>();
        consume<T>(c, stages, full, empty, p, group);
    }
}

// ---- host code ----

enum { ALONE, ONE, RING, ROLES, PERSISTENT, PERSISTENT_F16, VERSIONS };
enum { STAGE_OF_1 = Piece<1>::STAGE, STAGE_OF_2 = Piece<2>::STAGE };
static const KernelVersion versions[VERSIONS] = {
    {"one warpgroup", 128, 154, STAGE_OF_1 + TILE_ALIGNMENT},
    {"two", 256, 154, STAGE_OF_2 + TILE_ALIGNMENT},
    {"two, 4 stages", 256, 154, STAGES *STAGE_OF_2 + TILE_ALIGNMENT},
    {"roles", 384, 168, STAGES *STAGE_OF_2 + TILE_ALIGNMENT},
    {"persistent", 384, 168, STAGES *STAGE_OF_2 + TILE_ALIGNMENT},
    {"persistent, fp16", 384, 168, STAGES *STAGE_OF_2 + TILE_ALIGNMENT},
};

static int64_t pitch_of(int64_t n) { return (n + 7) / 8 * 8; }

template <int GROUPS>
static Problem problem_of(int64_t n) {
    const int rows = Piece<GROUPS>::ROWS, row_pieces = (int)((n + rows - 1) / rows);
    return {(int)n, (int)pitch_of(n), (int)((n + K - 1) / K), row_pieces,
            row_pieces * (int)((n + N - 1) / N)};
}

static int blocks_of(int version, int pieces, int most) {
    return version < PERSISTENT || pieces < most ? pieces : most;
}

// A's box has the rows of a piece of C, B's those of a step.
template <int GROUPS, class T>
static void launch_as(void (*kernel)(T *, TensorMap, TensorMap, Problem), int version, T *c, const T *a,
                      const T *b, int64_t n) {
    if (n == 0) return;
    const Problem p = problem_of<GROUPS>(n);
    const TensorMap map_a = tensor_map(a, n, n, p.pitch, Piece<GROUPS>::ROWS);
    const TensorMap map_b = tensor_map(b, n, n, p.pitch, K);
    const int bytes = (int)versions[version].shared_bytes,
              blocks = blocks_of(version, p.pieces, multiprocessors());
    allow_shared(kernel, bytes);
    LAUNCH(kernel, blocks, versions[version].threads, bytes, 0, c, map_a, map_b, p);
}

static void launch(int version, __nv_bfloat16 *c, const __nv_bfloat16 *a, const __nv_bfloat16 *b,
                   int64_t n) {
    typedef __nv_bfloat16 T;
    if (version == ALONE) launch_as<1>(matmul<T, 1, 1>, version, c, a, b, n);
    else if (version == ONE) launch_as<2>(matmul<T, 2, 1>, version, c, a, b, n);
    else if (version == RING) launch_as<2>(matmul<T, 2, STAGES>, version, c, a, b, n);
    else launch_as<2>(matmul_by_roles<T>, version, c, a, b, n);
}
static void launch(int version, __half *c, const __half *a, const __half *b, int64_t n) {
    launch_as<2>(matmul_by_roles<__half>, version, c, a, b, n);
}

// n a multiple of N; on a GPU with `most` multiprocessors.
static Work formula(int version, double n, int most) {
    const double groups = version == ALONE ? 1 : 2, rows = groups * GROUP_ROWS;
    const double pieces = n / rows * n / N, steps = n / K, piece_steps = pieces * steps;
    Work w = {};
    w.load_requests = piece_steps * (1 + N / 64);      // boxes
    w.load_sectors = (n / N + n / rows) * n * n / 16;  // A for each column of pieces, B for each row
    w.store_requests = n * n / 64;                     // 8 rows of 8 columns each
    w.store_sectors = 8 * w.store_requests;
    w.memory_sectors = 3 * n * n / 16;
    w.shared_passes = piece_steps * (rows + N + groups * (K / 16) * (GROUP_ROWS + N) / 4);
    w.tensor_flops = piece_steps * 2 * rows * N * K;
    w.barriers = version < ROLES ? pieces * (1 + steps) : blocks_of(version, (int)pieces, most);
    return w;
}

// ---- proof ----

// Rows of n numbers from one pitch to another.
template <class T>
static std::vector<T> repitched(const std::vector<T> &x, int64_t n, int64_t from, int64_t to) {
    std::vector<T> y((size_t)(n * to));
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++) y[(size_t)(i * to + j)] = x[(size_t)(i * from + j)];
    return y;
}

template <class T>
static Proof check(int version, DType dtype) {
    Proof proof;
    for (int64_t n : {0, 1, 37, 131, 259}) {
        const int64_t pitch = pitch_of(n);
        const Numbers<T> a(n * n, 1), b(n * n, 2);
        Array<T> d_a(repitched(a.narrow, n, n, pitch).data(), n * pitch), d_c(n * pitch), again(n * pitch);
        Array<T> d_b(repitched(b.narrow, n, n, pitch).data(), n * pitch);
        std::vector<float> made, library((size_t)(n * n));
        std::vector<double> right((size_t)(n * n));
        launch(version, d_c.at, d_a.at, d_b.at, n);
        launch(version, again.at, d_a.at, d_b.at, n);
        const std::vector<T> c = repitched(d_c.host(), n, pitch, n),
                             c2 = repitched(again.host(), n, pitch, n);
        for (T x : c) made.push_back(static_cast<float>(x));
        kernels_matmul_f64(right.data(), a.exact.data(), b.exact.data(), n, n, n);
        kernels_matmul_library(dtype, library.data(), a.exact.data(), b.exact.data(), n, n, n);
        proof.hold(made, library, right);
        report_that(n == 0 || memcmp(c.data(), c2.data(), c.size() * sizeof(T)) == 0,
                    "%s: a second launch of n = %lld has made other bits", versions[version].name,
                    (long long)n);
    }
    return proof;
}

template <class T>
static void row(int version, DType dtype, int64_t n) {
    matmul_row<T>(
        versions[version], check<T>(version, dtype), 2 * N, n,
        [&](T *c, const T *a, const T *b, int64_t size) { launch(version, c, a, b, size); },
        [&](int64_t size) {
            const bool here = size == 2 * N;  // where the emulator counts
            return formula(version, (double)size,
                           here ? multiprocessors() : kernels_gpu()->multiprocessors);
        });
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int64_t n;
    Option table[] = {
        {"size", OPTION_INT, &n, "4096", 2 * N, 32768, "", "rows and columns of the table's matrices",
         false},
        KERNELS_OPTIONS(options),
    };
    options_parse(argc, argv,
                  "A matrix multiply by TMA and wgmma, whose warps have roles.\n"
                  "  hopper --size 8192",
                  table, sizeof table / sizeof *table);
    need_hopper(&options, "hopper");
    n -= n % N;
    char *size = format_text("C = A B of %lld x %lld matrices, 16 bits", (long long)n, (long long)n);
    const double square = (double)n * (double)n, flops = 2 * square * (double)n;
    const double limit = kernels_limit(&options, 6 * square, 0, flops);
    kernels_begin(&options, size, limit);
    for (int v = ALONE; v < VERSIONS; v++)
        if (v == PERSISTENT_F16) row<__half>(v, F16, n);
        else row<__nv_bfloat16>(v, BF16, n);
    if (ON_GPU) say("%-20s %10.4g  measured", "cuBLAS, bf16", kernels_matmul_seconds(BF16, n) * 1e3);
    free(size);
    return report_verdict(
        "two warpgroups that share B take %.2f of the modelled time of one, %.0f%% of the limit",
        kernels_seconds(PERSISTENT) / kernels_seconds(ALONE), 100 * limit / kernels_seconds(PERSISTENT));
}
