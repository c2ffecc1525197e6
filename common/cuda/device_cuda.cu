// device_cuda.cu: a GPU as the device: memory from a pool, one compute stream, and waits that cannot hang.
//
// Allocations and frees are queued on the stream, like kernels: cudaMallocAsync allocates from a pool that
// keeps memory it once got from the driver, so after the first one, a training step asks the driver for none.
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "device_cuda.h"
#include "gpu.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

// Uploads are first copied to pinned memory, in pieces, so that the host need not wait: in a ring of
// STAGES, one fills while the stream still reads the others. Only when all are full does the host wait, for
// the oldest.
enum { STAGES = 4 };
constexpr size_t STAGE_BYTES = 1 << 20;

static struct {
    int local_rank = 0, ranks_here = 1;
    bool started = false;
    int count = 0;
    cudaStream_t stream;
    cudaMemPool_t pool;
    void (*look)(void) = nullptr;
    void *scratch = nullptr;
    size_t scratch_bytes = 0;
    Mailbox *mailbox, *copy;  // on the device; on the host, pinned
    bool fault_expected = false;
    char *stage[STAGES];
    cudaEvent_t read[STAGES];  // the stream has read the whole stage
    int filling = 0;
    size_t filled = 0;  // of that stage
    int64_t waits = 0;
    char text[320];
} state;

// ---- start ----

__global__ void no_work() {}

static const char *version_text(int version) {
    static char texts[2][16];
    static int turn;
    char *text = texts[turn++ % 2];
    snprintf(text, sizeof texts[0], "%d.%d", version / 1000, version % 1000 / 10);
    return text;
}

// Reports every way in which a machine can lack a GPU for this program, each with its remedy.
static void count_devices() {
    int driver = 0, runtime = 0;
    cudaError_t status = cudaGetDeviceCount(&state.count);
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (status == cudaSuccess && state.count > 0) return;
    if (status == cudaSuccess || status == cudaErrorNoDevice)
        fatal(
            "no GPU is visible: see whether nvidia-smi lists one and CUDA_VISIBLE_DEVICES does not hide "
            "it; `make` without OPS=cuda builds for the CPU");
    if (status == cudaErrorInsufficientDriver && driver == 0)
        fatal(
            "no NVIDIA driver is loaded: install one for CUDA %s or later; `make` without OPS=cuda builds "
            "for the CPU",
            version_text(runtime));
    if (status == cudaErrorInsufficientDriver)
        fatal(
            "the NVIDIA driver is for CUDA %s and this program for %s: install a newer driver, or build "
            "with an older toolkit, CUDA_HOME=...",
            version_text(driver), version_text(runtime));
    fatal(
        "CUDA does not start (%s): see whether nvidia-smi works and, where NVSwitches join the GPUs, "
        "whether nvidia-fabricmanager runs",
        cudaGetErrorString(status));
}

static void start() {
    if (state.started) return;
    count_devices();
    int device = state.local_rank % state.count, blocks, runtime;
    cudaDeviceProp is;
    CUDA_CHECK(cudaSetDevice(device));
    CUDA_CHECK(cudaGetDeviceProperties(&is, device));
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
    CHECK(is.major >= 8,
          "kernels are for compute capability 8.0 (A100) and later, and the %s has %d.%d: `make` without "
          "OPS=cuda builds for the CPU",
          is.name, is.major, is.minor);
    // The first query about a kernel loads the program's code, if it has any for this GPU.
    cudaError_t status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, no_work, 32, 0);
    CHECK(status != cudaErrorNoKernelImageForDevice && status != cudaErrorInvalidDeviceFunction &&
              status != cudaErrorUnsupportedPtxVersion,
          "this program has no code for the %s: build it with CUDA_ARCH=%d%d", is.name, is.major, is.minor);
    CUDA_CHECK(status);
    snprintf(state.text, sizeof state.text, "%s (sm_%d%d), CUDA %s", is.name, is.major, is.minor,
             version_text(runtime));
    CUDA_CHECK(cudaStreamCreateWithFlags(&state.stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaDeviceGetDefaultMemPool(&state.pool, device));
    uint64_t keep = UINT64_MAX;
    CUDA_CHECK(cudaMemPoolSetAttribute(state.pool, cudaMemPoolAttrReleaseThreshold, &keep));
    CUDA_CHECK(cudaMalloc(&state.mailbox, sizeof *state.mailbox));
    CUDA_CHECK(cudaMallocHost(&state.copy, sizeof *state.copy));
    CUDA_CHECK(cudaMemsetAsync(state.mailbox, 0, sizeof *state.mailbox, state.stream));
    for (int i = 0; i < STAGES; i++) {
        CUDA_CHECK(cudaMallocHost(&state.stage[i], STAGE_BYTES));
        CUDA_CHECK(cudaEventCreateWithFlags(&state.read[i], cudaEventDisableTiming));
    }
    state.started = true;
}

void backend_start(int local_rank, int ranks_here) {
    CHECK(!state.started, "backend_start comes after the first use of the GPU");
    state.local_rank = local_rank;
    state.ranks_here = ranks_here;
    // A kernel of NCCL runs until the other ranks' kernels have started too, so anything that delays those
    // can deadlock all ranks: loading a kernel at its first call may wait for running ones (CUDA
    // Programming Guide, "Lazy Loading", hazards), and streams that share one of the 8 default queues wait
    // for each other.
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

const char *backend_text(void) {
    start();
    return state.text;
}

void backend_wait(void) { device_wait(); }

void *device_stream(void) {
    start();
    return state.stream;
}

// ---- waiting ----

void device_on_wait(void (*look)(void)) { state.look = look; }

// Waits until the stream has reached the event; nullptr: its end. Returns whether it had to wait.
static bool poll(cudaEvent_t event) {
    cudaError_t status;
    unsigned turn = 1;
    for (; (status = event ? cudaEventQuery(event) : cudaStreamQuery(state.stream)) == cudaErrorNotReady;
         turn++) {
        cudaGetLastError();  // or the check of the next launch would take "not ready" for an error
        if (state.look) state.look();
        if (turn % 64 == 0) sched_yield();
    }
    CHECK(status == cudaSuccess,
          "the GPU stopped with \"%s\"; compute-sanitizer in front of the command names the kernel",
          cudaGetErrorString(status));
    return turn > 1;
}

Mailbox device_read_mailbox(void) {
    start();
    CUDA_CHECK(cudaMemcpyAsync(state.copy, state.mailbox, sizeof *state.copy, cudaMemcpyDeviceToHost,
                               state.stream));
    state.waits++;
    poll(nullptr);
    state.fault_expected = false;
    const IndexFault *fault = &state.copy->fault;
    if (fault->taken)
        fatal(fault->sentence, (long long)fault->index, fault->value, (long long)fault->bound);
    return *state.copy;
}

void device_wait(void) {
    start();
    if (state.fault_expected) {
        device_read_mailbox();
        return;
    }
    state.waits++;
    poll(nullptr);
}

int64_t backend_waits(void) { return state.waits; }

Mailbox *device_mailbox(void) {
    start();
    return state.mailbox;
}

void device_expect_fault(void) { state.fault_expected = true; }

// ---- memory ----

void *backend_alloc(size_t bytes) {
    start();
    void *memory;
    if (bytes == 0) bytes = 1;
    cudaError_t status = cudaMallocAsync(&memory, bytes, state.stream);
    if (status == cudaErrorMemoryAllocation) {
        // Once more, after everything that was freed has gone back to the driver, so that nothing is
        // fragmented.
        cudaGetLastError();
        device_wait();
        CUDA_CHECK(cudaMemPoolTrimTo(state.pool, 0));
        status = cudaMallocAsync(&memory, bytes, state.stream);
    }
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return NULL;
    }
    CUDA_CHECK(status);
    return memory;
}

void backend_free(void *memory) {
    if (memory) CUDA_CHECK(cudaFreeAsync(memory, state.stream));
}

// From the memory that was free at the start: what is freed later stays in this process's pool.
int64_t backend_room(int64_t held) {
    static size_t available, total;
    start();
    if (!total) CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return (int64_t)available - held;
}

int backend_sharers(void) { return 1; }

void *device_scratch(size_t bytes) {
    start();
    if (state.scratch_bytes < bytes) {
        backend_free(state.scratch);
        state.scratch_bytes = 0;
        state.scratch = backend_alloc(bytes);
        CHECK(state.scratch, "out of device memory: %s of scratch for a kernel do not fit; held now: %s",
              bytes_text((double)bytes), memory_text());
        state.scratch_bytes = bytes;
    }
    return state.scratch;
}

// Pinned memory that the stream no longer reads.
static void *stage(size_t bytes) {
    bytes = (bytes + 255) / 256 * 256;
    if (state.filled + bytes > STAGE_BYTES) {
        CUDA_CHECK(cudaEventRecord(state.read[state.filling], state.stream));
        state.filling = (state.filling + 1) % STAGES;
        state.filled = 0;
        state.waits += poll(state.read[state.filling]);  // returns at once if the event was never recorded
    }
    state.filled += bytes;
    return state.stage[state.filling] + state.filled - bytes;
}

void backend_from_host(void *to, const void *from, size_t bytes) {
    start();
    for (size_t at = 0, piece; at < bytes; at += piece) {
        piece = bytes - at < STAGE_BYTES ? bytes - at : STAGE_BYTES;
        void *pinned = stage(piece);
        memcpy(pinned, (const char *)from + at, piece);
        CUDA_CHECK(cudaMemcpyAsync((char *)to + at, pinned, piece, cudaMemcpyHostToDevice, state.stream));
    }
}

void backend_to_host(void *to, const void *from, size_t bytes) {
    start();
    if (bytes == 0) return;
    if (bytes > STAGE_BYTES) {
        // A copy to memory that is not pinned blocks inside the driver until the stream has reached it, where
        // no check could end it. So wait first.
        device_wait();
        CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, state.stream));
        device_wait();
        return;
    }
    void *pinned = stage(bytes);
    CUDA_CHECK(cudaMemcpyAsync(pinned, from, bytes, cudaMemcpyDeviceToHost, state.stream));
    device_wait();
    memcpy(to, pinned, bytes);
}

bool backend_is_host(void) { return false; }

void *backend_alloc_pinned(size_t bytes) {
    start();
    void *memory;
    cudaError_t status = cudaMallocHost(&memory, bytes ? bytes : 1);
    if (status == cudaErrorMemoryAllocation) return cudaGetLastError(), nullptr;
    CUDA_CHECK(status);
    return memory;
}

void backend_free_pinned(void *memory) {
    if (memory) CUDA_CHECK(cudaFreeHost(memory));
}
