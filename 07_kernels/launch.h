// launch.h: the part of kernels.h that is CUDA C++: arrays on the device, a launch counted by the emulator or
// timed on a GPU, and the comparison of a kernel's result with the CPU's.
#ifndef LAUNCH_H
#define LAUNCH_H

#include <stdlib.h>

#include <vector>

#include "cuda/gpu.h"
#include "kernels.h"

static inline void need_gpu(void) {
    int count;
    const cudaError_t status = cudaGetDeviceCount(&count);
    CHECK(status == cudaSuccess,
          "no GPU can be used here (%s): see whether nvidia-smi lists one; `make` without OPS=cuda builds "
          "for the CPU",
          cudaGetErrorString(status));
}

// A device array, released with its scope.
template <class T>
struct Array {
    T *at;
    int64_t count;

    explicit Array(int64_t count) : count(count) {
        const size_t bytes = count > 0 ? (size_t)count * sizeof(T) : 1;  // no room for an overrun
        size_t available = 0, all = 0;
        need_gpu();
        CUDA_CHECK(cudaMemGetInfo(&available, &all));
        const cudaError_t error = cudaMalloc(&at, bytes);
        CHECK(error != cudaErrorMemoryAllocation,
              "the table is too large: an array of %s does not fit into this GPU's memory, of which %s are "
              "free; --help names the flags of its size",
              bytes_text((double)bytes), bytes_text((double)available));
        CUDA_CHECK(error);
    }
    Array(const T *host, int64_t count) : Array(count) {
        CUDA_CHECK(cudaMemcpy(at, host, (size_t)count * sizeof(T), cudaMemcpyHostToDevice));
    }
    Array(const Array &) = delete;
    Array &operator=(const Array &) = delete;
    ~Array() { cudaFree(at); }

    std::vector<T> host() const {
        std::vector<T> copy((size_t)count);
        CUDA_CHECK(cudaMemcpy(copy.data(), at, (size_t)count * sizeof(T), cudaMemcpyDeviceToHost));
        return copy;
    }
};

// Random numbers of T, and the same in f32 for the CPU.
template <class T>
struct Numbers {
    std::vector<T> narrow;
    std::vector<float> exact;

    Numbers(int64_t count, int stream, double scale = 1) : narrow((size_t)count), exact((size_t)count) {
        float *x = kernels_numbers(count, scale, stream);
        for (size_t i = 0; i < exact.size(); i++) set(i, x[i]);
        free(x);
    }
    void set(size_t i, float x) {
        narrow[i] = static_cast<T>(x);
        exact[i] = static_cast<float>(narrow[i]);
    }
};

// What a kernel has made, for the CPU.
template <class T>
std::vector<float> in_f32(const Array<T> &x) {
    std::vector<float> all;
    for (T number : x.host()) all.push_back(static_cast<float>(number));
    return all;
}

__device__ static inline float added(float a, float b) { return a + b; }
__device__ static inline float larger(float a, float b) { return fmaxf(a, b); }

// Combines x of all threads of a block of this many warps, in a fixed order, for every thread; parts (WARPS)
// in shared memory, with a barrier before their next use.
template <float JOIN(float, float), int WARPS>
__device__ static inline float over_block(float x, float none, float *parts) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x = JOIN(x, __shfl_xor_sync(~0u, x, lanes));
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();  // every warp has stored its part
    x = none;
    for (int i = 0; i < WARPS; i++) x = JOIN(x, parts[i]);
    return x;
}

// Element of this thread; the last block may reach beyond the end.
__device__ static inline int64_t element() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }

// Lets a block of the kernel have this many bytes of dynamic shared memory; above 48 kB CUDA must be told.
template <class Kernel>
void allow_shared(Kernel kernel, int64_t bytes) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    CHECK(error != cudaErrorInvalidValue,
          "a block needs %s of shared memory, which this GPU does not give it; heads or rows of fewer "
          "numbers need less, and an A100 or an H100 gives more",
          bytes_text((double)bytes));
    CUDA_CHECK(error);
}

#ifdef __CUDACC__

constexpr bool ON_GPU = true;

// Nothing is counted on a GPU.
template <class F>
Work counted(F launch) {
    launch();
    CUDA_CHECK(cudaDeviceSynchronize());
    return Work{};
}

// The mean of eleven launches in a row, after two to warm up: while one runs, the host prepares the next.
template <class F>
double measured(F launch) {
    enum { WARM_UP = 2, TIMES = 11 };
    float milliseconds;
    cudaEvent_t from, to;
    CUDA_CHECK(cudaEventCreate(&from));
    CUDA_CHECK(cudaEventCreate(&to));
    for (int i = 0; i < WARM_UP + TIMES; i++) {
        if (i == WARM_UP) CUDA_CHECK(cudaEventRecord(from));
        launch();
    }
    CUDA_CHECK(cudaEventRecord(to));
    CUDA_CHECK(cudaEventSynchronize(to));
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, from, to));
    CUDA_CHECK(cudaEventDestroy(from));
    CUDA_CHECK(cudaEventDestroy(to));
    return milliseconds / 1e3 / TIMES;
}

#else

constexpr bool ON_GPU = false;

template <class F>
Work counted(F launch) {
    cuda_count_begin();
    launch();
    CudaCounts c = cuda_count_end();
    Work w = {};
    w.load_requests = (double)c.global_loads, w.load_sectors = (double)c.global_load_sectors;
    w.store_requests = (double)c.global_stores, w.store_sectors = (double)c.global_store_sectors;
    w.memory_sectors = (double)(c.distinct_load_sectors + c.distinct_store_sectors);
    w.shared_passes = (double)c.shared_passes, w.shared_conflicts = (double)c.shared_conflicts;
    w.flops = (double)c.flops, w.flop_instructions = (double)c.flop_instructions;
    w.special_instructions = (double)c.special_instructions;
    w.tensor_flops = (double)c.tensor_flops, w.tensor_8_flops = (double)c.tensor_8_flops;
    w.barriers = (double)c.barriers;
    w.lane_steps = (double)c.lane_steps, w.warp_steps = (double)c.warp_steps;
    return w;
}

template <class F>
double measured(F) {
    return 0;
}

#endif

// ---- a version's proof, and its row ----

// The comparison that came closest to its bound, 4 times the error of f32 on the CPU; {0, 1} before any.
// With few elements the CPU's error may by luck be far below a rounding of f32; then that rounding is used.
struct Proof {
    double error = 0, bound = 1;

    void hold(const std::vector<float> &made, const std::vector<float> &cpu,
              const std::vector<double> &right) {
        if (!(error <= bound)) return;  // keeps one beyond its bound, or NaN
        const int64_t count = (int64_t)right.size();
        closer(kernels_error(made.data(), right.data(), count),
               4 * fmax(kernels_error(cpu.data(), right.data(), count), 0x1p-24));
    }
    void closer(double e, double b) {
        if (error <= bound && !(e * bound <= error * b)) error = e, bound = b;
    }
};

// Proves multiply(c, a, b, n), a product of n x n matrices. transposed: it gets b stored transposed.
template <class Multiply>
void prove_matmul(Proof *proof, int64_t n, bool transposed, Multiply multiply) {
    const int64_t count = n * n;
    float *a = kernels_numbers(count, 1, 1), *b = kernels_numbers(count, 100, 2);
    std::vector<float> given(b, b + count), library((size_t)count);
    std::vector<double> right((size_t)count);
    for (int64_t i = 0; i < count && transposed; i++) given[(size_t)(i % n * n + i / n)] = b[i];
    Array<float> d_a(a, count), d_b(given.data(), count), d_c(count);
    multiply(d_c.at, d_a.at, d_b.at, n);
    kernels_matmul_f64(right.data(), a, b, n, n, n);
    kernels_matmul_library(F32, library.data(), a, b, n, n, n);
    proof->hold(d_c.host(), library, right);
    free(a);
    free(b);
}

// run(size) launches the version, and formula(size) is its work: at `small`, where the emulator counts it,
// and at the size of the table, which only a GPU runs. run is called with no other size, for which its
// arrays may be too small.
template <class Size, class Run, class Formula>
void show_version(const KernelVersion &version, const Proof &proof, const Size &small, const Size &size,
                  Run run, Formula formula) {
    const Work work = ON_GPU ? Work{} : counted([&] { run(small); });
    const Work predicted = formula(small), at_size = formula(size);
    const double seconds = measured([&] { run(size); });
    kernels_version(&version, ON_GPU ? NULL : &work, &predicted, &at_size, seconds, proof.error,
                    proof.bound);
}

// Of this GPU; cheap enough to ask at each launch.
static inline int multiprocessors(void) {
    int device, count;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
}

// Whether this GPU runs code for sm_90a, and this build has some: the code for other GPUs traps at TMA and
// wgmma.
__global__ static void find_hopper(int *found) {
#if defined __CUDACC__ && !defined __CUDA_ARCH_FEAT_SM90_ALL
    *found = 0;
#else
    *found = 1;
#endif
}

// The program `name` uses instructions that the H100 introduced.
static inline void need_hopper(const KernelsOptions *options, const char *name) {
    CHECK(options->gpu == 1, "--gpu a100 has neither TMA nor wgmma, of which %s is made: h100 has them",
          name);
    cudaDeviceProp device;
    need_gpu();
    CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
    CHECK(device.major == 9,
          "%s needs TMA and wgmma of compute capability 9.0 (H100, H200), which this %s of %d.%d lacks",
          name, device.name, device.major, device.minor);
    Array<int> found(1);
    LAUNCH(find_hopper, 1, 1, 0, 0, found.at);
    CHECK(found.host()[0], "%s needs code for sm_90a, which this build lacks: CUDA_ARCH=90a would make it",
          name);
}

#endif
