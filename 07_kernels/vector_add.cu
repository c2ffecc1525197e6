// vector_add.cu: the first kernel, c = a + b, with its host code. Playbook: "A primer on GPU".
//
// The host allocates device memory, copies a and b there, launches a grid of blocks, and copies c back. Each
// thread adds one element, and computes which one from its place in the grid:
//
//     block 0                 block 1                       block ceil(n / 256) - 1
//     [thread 0 … 255]        [thread 0 … 255]        …     [thread 0 … |  beyond n: idle]
//     element 0 … 255         element 256 … 511
//
// There are four ways to distribute the elements. A warp, 32 threads called lanes, loads with one request,
// which moves every sector of 32 bytes that they touch. All four move the same 12 n bytes between memory and
// L2, each byte once; they differ in requests, and the last also in what goes from L2 to the warps, which
// sets its time where nothing hits L1, as in the model:
//
//     one a thread            c[i] = a[i] + b[i]                   3 n / 32 requests of 4 sectors
//     grid-stride loop        the same, with at most 1024 blocks
//     pack of 4               one request for 16 bytes a lane      3 n / 128 requests of 16 sectors
//     four neighbours         a loop over 4 elements that lie together: lanes are 16 bytes apart, so each
//                             request takes 16 sectors, and each sector is asked for four times
//
// Proof: every bit of c is that of the CPU's f32 sum; counts equal the formulas.
// Run: build/07_kernels/vector_add           (--gpu a100, --verbose)
// Last line: PASS vector_add: four ways to add, and every bit is the CPU's …
#include "launch.h"

// FEW_BLOCKS: about as many as an H100 runs at once; fewer in the emulator, so that threads loop there as
// well.
enum { BLOCK = 256, FEW_BLOCKS = ON_GPU ? 1024 : 4 };

// ---- device code ----
// LAUNCH(kernel, grid, block, shared, stream, …) is kernel<<<grid, block, shared, stream>>>(…).

__global__ void __launch_bounds__(BLOCK) one_a_thread(float *c, const float *a, const float *b, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];  // the last block may reach beyond n
}

__global__ void __launch_bounds__(BLOCK) grid_stride(float *c, const float *a, const float *b, int64_t n) {
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) c[i] = a[i] + b[i];
}

__device__ static float4 operator+(float4 x, float4 y) {
    return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

// Addresses of float4 are multiples of 16: those of cudaMalloc are. The end goes one by one.
__global__ void __launch_bounds__(BLOCK) pack_of_4(float *c, const float *a, const float *b, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, packs = n / 4;
    if (i < packs)
        reinterpret_cast<float4 *>(c)[i] =
            reinterpret_cast<const float4 *>(a)[i] + reinterpret_cast<const float4 *>(b)[i];
    else if (packs * 4 + i - packs < n)
        c[packs * 4 + i - packs] = a[packs * 4 + i - packs] + b[packs * 4 + i - packs];
}

__global__ void __launch_bounds__(BLOCK)
    four_neighbours(float *c, const float *a, const float *b, int64_t n) {
    int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    for (int64_t i = first; i < first + 4; i++)
        if (i < n) c[i] = a[i] + b[i];
}

// ---- host code ----

enum { ONE, STRIDE, PACK, NEIGHBOURS, VERSIONS };
static const KernelVersion versions[VERSIONS] = {
    {"one a thread", BLOCK, 12, 0},
    {"grid-stride loop", BLOCK, 26, 0},
    {"pack of 4", BLOCK, 18, 0},
    {"four neighbours", BLOCK, 16, 0},
};

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static void launch(int version, float *c, const float *a, const float *b, int64_t n) {
    if (n == 0) return;  // a grid has at least one block
    int64_t threads = version == ONE || version == STRIDE ? n
                      : version == PACK                   ? n / 4 + n % 4
                                                          : ceil_div(n, 4);
    unsigned blocks = (unsigned)ceil_div(threads, BLOCK);
    if (version == STRIDE && blocks > FEW_BLOCKS) blocks = FEW_BLOCKS;
    if (version == ONE) LAUNCH(one_a_thread, blocks, BLOCK, 0, 0, c, a, b, n);
    if (version == STRIDE) LAUNCH(grid_stride, blocks, BLOCK, 0, 0, c, a, b, n);
    if (version == PACK) LAUNCH(pack_of_4, blocks, BLOCK, 0, 0, c, a, b, n);
    if (version == NEIGHBOURS) LAUNCH(four_neighbours, blocks, BLOCK, 0, 0, c, a, b, n);
}

// The whole way of the playbook's host code: allocate, copy there, launch, copy back, free.
static std::vector<float> add(int version, const float *a, const float *b, int64_t n, Work *work) {
    Array<float> d_a(a, n), d_b(b, n), d_c(n);  // cudaMalloc, and cudaMemcpy of a and b
    *work = counted([&] { launch(version, d_c.at, d_a.at, d_b.at, n); });
    return d_c.host();  // cudaMemcpy; at the end of their scope, cudaFree
}

// n a multiple of 128.
static Work formula(int version, double n) {
    Work w = {};
    double requests = n / (version == PACK ? 128 : 32);
    w.load_requests = 2 * requests, w.store_requests = requests;
    w.load_sectors = 2 * requests * (version == ONE || version == STRIDE ? 4 : 16);
    w.store_sectors = w.load_sectors / 2;
    w.memory_sectors = 3 * n / 8;
    w.flops = n;
    w.flop_instructions = n / 32;  // four of a pack are four instructions
    return w;
}

// With no element, with less than a block, and with a last block that is full in part: the elements that
// differ from the CPU's sum.
static double wrong_elements(int version) {
    double wrong = 0;
    for (int64_t n : {(int64_t)0, (int64_t)1, (int64_t)7, (int64_t)257, (int64_t)4099}) {
        float *a = kernels_numbers(n, 1, 1), *b = kernels_numbers(n, 1e30, 2);
        Work ignored;
        std::vector<float> c = add(version, a, b, n, &ignored);
        for (int64_t i = 0; i < n; i++) wrong += !(c[(size_t)i] == a[i] + b[i]);
        free(a);
        free(b);
    }
    return wrong;
}

static double time_on_gpu(int version, int64_t n) {
    if (!ON_GPU) return 0;
    float *numbers = kernels_numbers(n, 1, 3);
    Array<float> a(numbers, n), b(numbers, n), c(n);
    free(numbers);
    return measured([&] { launch(version, c.at, a.at, b.at, n); });
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    KernelsOptions options = {};
    int64_t n;
    Option table[] = {
        {"size", OPTION_INT, &n, "67108864", 128, 1e10, "", "elements of the table's vectors", false},
        KERNELS_OPTIONS(options),
    };
    options_parse(argc, argv,
                  "The first kernel: one vector added to another, in four ways.\n"
                  "  vector_add --gpu a100",
                  table, sizeof table / sizeof *table);
    const int64_t small = 4096;
    n = n / 128 * 128;
    char *size = format_text("c = a + b of %lld elements", (long long)n);
    kernels_begin(&options, size, kernels_limit(&options, 12.0 * (double)n, 0, 0));
    float *a = kernels_numbers(small, 1, 3), *b = kernels_numbers(small, 1, 4);
    for (int v = 0; v < VERSIONS; v++) {
        Work work, predicted = formula(v, (double)small), at_size = formula(v, (double)n);
        add(v, a, b, small, &work);
        kernels_version(&versions[v], ON_GPU ? NULL : &work, &predicted, &at_size, time_on_gpu(v, n),
                        wrong_elements(v), 0);
    }
    free(a);
    free(b);
    free(size);
    return report_verdict("four ways to add, and every bit is the CPU's");
}
