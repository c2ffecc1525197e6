// cuda_on_cpu_api.cc: the CUDA runtime API, with this process as the device; streams and events are in
// cuda_on_cpu_streams.cc. Wrong arguments that a GPU would report late or not at all end the program at the
// call, or where work is queued, when its turn has come.
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include <map>
#include <memory>

#include "cuda_on_cpu_inside.h"
#include "cuda_on_cpu_streams.h"

struct CudaPool {
    uint64_t release_threshold;
};

// Bytes of shared memory that a block may ask for: an H100's. Tests set a smaller GPU's.
size_t cuda_on_cpu_shared_most = 227 << 10;
// Compute capability, an H100's.
int cuda_on_cpu_capability = 90;

static cudaError_t last_error;

cudaError_t cuda_told(cudaError_t error) {
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
    return error;
}

static const struct {
    cudaError_t error;
    const char *text;
} errors[] = {
    {cudaSuccess, "no error"},
    {cudaErrorInvalidValue, "invalid argument"},
    {cudaErrorMemoryAllocation, "out of memory"},
    {cudaErrorInitializationError, "initialization error"},
    {cudaErrorInvalidConfiguration, "invalid configuration argument"},
    {cudaErrorNoDevice, "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "invalid device ordinal"},
    {cudaErrorNotReady, "device not ready"},
};

const char *cudaGetErrorString(cudaError_t error) {
    for (const auto &e : errors)
        if (e.error == error) return e.text;
    return "unrecognized error code";
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

// CUDA does not survive a fork: every call fails in the child of a process that has used it before. Tests
// of the emulator itself set this to allow it.
bool cuda_on_cpu_outlives_fork;
static bool used, lost;

bool cuda_is_lost(void) {
    if (!used) pthread_atfork(NULL, NULL, [] { lost = !cuda_on_cpu_outlives_fork; });
    used = true;
    return lost;
}
#define NEED_DEVICE() \
    if (cuda_is_lost()) return cuda_told(cudaErrorInitializationError)

// ---- the device ----

cudaError_t cudaGetDeviceCount(int *count) {
    NEED_DEVICE();
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *count = visible && !*visible ? 0 : 1;
    return *count ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaSetDevice(int device) {
    NEED_DEVICE();
    return cuda_told(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 13000, cudaSuccess; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    if (device != 0) return cuda_told(cudaErrorInvalidDevice);
    *p = cudaDeviceProp();
    snprintf(p->name, sizeof p->name, "CUDA on the CPU");
    p->major = cuda_on_cpu_capability / 10, p->minor = cuda_on_cpu_capability % 10;
    p->multiProcessorCount =
        3;  // few and odd: in grids sized by it, loops end with a partial iteration
    p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->regsPerBlock = 65536;
    p->l2CacheSize = 1 << 20;
    p->asyncEngineCount = 1, p->concurrentKernels = 1;
    p->totalGlobalMem = memory_capacity();
    p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = cuda_on_cpu_shared_most;
    p->sharedMemPerMultiprocessor = 228 << 10;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, device) != cudaSuccess) return cudaErrorInvalidDevice;
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock:
            *value = p.maxThreadsPerBlock;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlock:
            *value = (int)p.sharedMemPerBlock;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = (int)p.sharedMemPerBlockOptin;
            break;
        case cudaDevAttrMultiProcessorCount:
            *value = p.multiProcessorCount;
            break;
        case cudaDevAttrComputeCapabilityMajor:
            *value = p.major;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = p.minor;
            break;
        case cudaDevAttrMemoryPoolsSupported:
            *value = 1;
            break;
        default:
            return cuda_told(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    if (device != 0) return cuda_told(cudaErrorInvalidDevice);
    snprintf(text, (size_t)size, "0000:00:00.0");
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    NEED_DEVICE();
    *total = memory_capacity();
    *available = *total - memory_in_use();
    return cudaSuccess;
}

// ---- memory ----

static cudaError_t allocate(void **memory, size_t bytes) {
    NEED_DEVICE();
    *memory = NULL;
    if (bytes == 0) return cudaSuccess;
    *memory = memory_allocate(bytes);
    return cuda_told(*memory ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cuda_malloc(void **memory, size_t bytes) {
    cuda_count_wait();
    return allocate(memory, bytes);
}

static void fill(const char *call, void *to, int value, size_t bytes, const void *site) {
    CHECK(memory_is_device(to) || bytes == 0, "%s (%s): the target %p is no device memory", call,
          line_text(site), to);
    memory_check_host(call, to, bytes, site);
    memory_open();
    memset(to, value, bytes);
    memory_close();
}

// The pool may reuse what was freed earlier on the same stream. The memory exists in the order of the stream
// only, so it is filled with NaN once more when that has come to the call: another stream that does not wait
// for it loses what it writes.
cudaError_t cuda_malloc_async(void **memory, size_t bytes, cudaStream_t stream) {
    cudaError_t status = allocate(memory, bytes);
    if (!streams_defer()) return status;
    if (status == cudaErrorMemoryAllocation) {
        cudaStreamSynchronize(stream);
        status = allocate(memory, bytes);
    }
    void *made = *memory, *site = __builtin_return_address(0);
    if (made) in_stream(stream, [=] { fill("cudaMallocAsync", made, 0xff, bytes, site); });
    return status;
}

static void release(const char *call, void *memory, const void *site) {
    CHECK(!memory || memory_release(memory), "%s (%s): %p is not the start of a live allocation", call,
          line_text(site), memory);
}

// Waits for all streams, as CUDA's does.
cudaError_t cudaFree(void *memory) {
    NEED_DEVICE();
    cudaDeviceSynchronize();
    release("cudaFree", memory, __builtin_return_address(0));
    return cudaSuccess;
}

cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream) {
    NEED_DEVICE();
    const void *site = __builtin_return_address(0);
    in_stream(stream, [=] { release("cudaFreeAsync", memory, site); });
    return cudaSuccess;
}

static std::map<uintptr_t, size_t> pinned;  // bytes, by address

static bool is_pinned(const void *memory, size_t bytes) {
    const uintptr_t address = (uintptr_t)memory;
    auto next = pinned.upper_bound(address);
    return next != pinned.begin() && address + bytes <= std::prev(next)->first + std::prev(next)->second;
}

cudaError_t cuda_malloc_host(void **memory, size_t bytes) {
    NEED_DEVICE();
    cuda_count_wait();
    *memory = malloc(bytes ? bytes : 1);
    if (*memory) pinned[(uintptr_t)*memory] = bytes;
    return cuda_told(*memory ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void *memory) {
    NEED_DEVICE();
    cuda_count_wait();
    CHECK(!memory_is_device(memory), "cudaFreeHost (%s): %p is device memory",
          line_text(__builtin_return_address(0)), memory);
    pinned.erase((uintptr_t)memory);
    free(memory);
    return cudaSuccess;
}

static void check_side(const char *call, const char *name, const void *memory, size_t bytes, bool device,
                       const void *site) {
    CHECK(memory_is_device(memory) == device || bytes == 0, "%s (%s): the %s %p is%s device memory", call,
          line_text(site), name, memory, device ? " no" : "");
    if (device) memory_check_host(call, memory, bytes, site);
}

struct Copy {
    const char *call;
    const void *site;
    char *to;
    size_t to_pitch;
    const char *from;
    size_t from_pitch, width, height;
    cudaMemcpyKind kind;
    std::shared_ptr<char[]> staged;  // holds `from`

    size_t span(size_t pitch) const { return height ? (height - 1) * pitch + width : 0; }
    bool to_device() const {
        return kind == cudaMemcpyDefault
                   ? memory_is_device(to)
                   : kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    }
    bool from_device() const {
        return kind == cudaMemcpyDefault
                   ? memory_is_device(from)
                   : kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    }
    bool to_pinned() const { return !to_device() && is_pinned(to, span(to_pitch)); }
    bool from_pinned() const { return !from_device() && is_pinned(from, span(from_pitch)); }
};

static void run_copy(const Copy &c) {
    memory_open();
    for (size_t y = 0; y < c.height; y++) {
        check_side(c.call, "target", c.to + y * c.to_pitch, c.width, c.to_device(), c.site);
        check_side(c.call, "source", c.from + y * c.from_pitch, c.width, c.from_device(), c.site);
        memmove(c.to + y * c.to_pitch, c.from + y * c.from_pitch, c.width);
    }
    memory_close();
}

// As CUDA does: memory that is not pinned is read in the call, and if the copy writes it, the call waits for
// the copy. Pinned memory is accessed when the stream has come to the copy.
static cudaError_t copy_in_stream(Copy c, cudaStream_t stream) {
    NEED_DEVICE();
    const bool reads_pinned = c.from_pinned(), writes_pinned = c.to_pinned();
    if (!c.to_device() && !writes_pinned) cuda_count_wait();
    if (!streams_defer()) return run_copy(c), cudaSuccess;
    if (!c.from_device() && !reads_pinned) {
        check_side(c.call, "target", c.to, c.span(c.to_pitch), c.to_device(), c.site);
        check_side(c.call, "source", c.from, c.span(c.from_pitch), false, c.site);
        c.staged.reset(new char[c.span(c.from_pitch) + 1]);
        c.from = static_cast<char *>(memcpy(c.staged.get(), c.from, c.span(c.from_pitch)));
    }
    stream_add(stream, [=] {
        CHECK((!reads_pinned || c.from_pinned()) && (!writes_pinned || c.to_pinned()),
              "%s (%s): its pinned memory was freed before the stream came to the copy", c.call,
              line_text(c.site));
        return run_copy(c), true;
    });
    return c.to_device() || writes_pinned ? cudaSuccess : cudaStreamSynchronize(stream);
}

// On the default stream. The host waits, unless both sides are on the device; and copies of memory that is
// not pinned may still be on their way from where they are staged.
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    const Copy c = {"cudaMemcpy",
                    __builtin_return_address(0),
                    static_cast<char *>(to),
                    bytes,
                    static_cast<const char *>(from),
                    bytes,
                    bytes,
                    1,
                    kind,
                    nullptr};
    cuda_count_wait();
    const bool waits = !c.to_device() || c.from_pinned();
    const cudaError_t status = copy_in_stream(c, nullptr);
    return status == cudaSuccess && waits ? cudaStreamSynchronize(nullptr) : status;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return copy_in_stream({"cudaMemcpyAsync", __builtin_return_address(0), static_cast<char *>(to), bytes,
                           static_cast<const char *>(from), bytes, bytes, 1, kind, nullptr},
                          stream);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    if (width > to_pitch || width > from_pitch) return cuda_told(cudaErrorInvalidValue);
    return copy_in_stream(
        {"cudaMemcpy2DAsync", __builtin_return_address(0), static_cast<char *>(to), to_pitch,
         static_cast<const char *>(from), from_pitch, width, height, kind, nullptr},
        stream);
}

// Neither waits for the fill.
cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    NEED_DEVICE();
    const void *site = __builtin_return_address(0);
    in_stream(nullptr, [=] { fill("cudaMemset", to, value, bytes, site); });
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    NEED_DEVICE();
    const void *site = __builtin_return_address(0);
    in_stream(stream, [=] { fill("cudaMemsetAsync", to, value, bytes, site); });
    return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    static CudaPool only;
    *pool = &only;
    return cuda_told(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void *value) {
    if (attribute == cudaMemPoolAttrReleaseThreshold)
        pool->release_threshold = *static_cast<uint64_t *>(value);
    return cudaSuccess;
}

// The pool caches nothing: what it has reserved is what is in use.
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void *value) {
    if (attribute == cudaMemPoolAttrReleaseThreshold)
        *static_cast<uint64_t *>(value) = pool->release_threshold;
    else if (attribute == cudaMemPoolAttrReservedMemCurrent || attribute == cudaMemPoolAttrUsedMemCurrent)
        *static_cast<uint64_t *>(value) = memory_in_use();
    else return cuda_told(cudaErrorInvalidValue);
    return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

// ---- launches that a GPU would refuse ----

static void check_sizes(const CudaLaunch *l) {
    const dim3 &g = l->grid, &b = l->block;
    int64_t count = (int64_t)b.x * b.y * b.z;
    CHECK(
        count >= 1 && count <= MAX_THREADS && b.z <= 64,
        "the kernel %s could not start (%s:%d): a block of (%u, %u, %u) threads; 1 to %d are possible, and "
        "z up to 64",
        l->name, l->file, l->line, b.x, b.y, b.z, (int)MAX_THREADS);
    CHECK(g.x >= 1 && g.y >= 1 && g.z >= 1 && g.x <= 0x7fffffff && g.y <= 65535 && g.z <= 65535,
          "the kernel %s could not start (%s:%d): a grid of (%u, %u, %u) blocks; each number is at least "
          "1, x is below 2^31, y and z are below 65536",
          l->name, l->file, l->line, g.x, g.y, g.z);
}

// If static arrays and the dynamic one take more than 48 kB together, the size of the dynamic one must be
// asked for, as on a GPU (CUDA Driver API, cuFuncSetAttribute).
constexpr size_t SHARED_WITHOUT_ASKING = 48 << 10;
struct Allowed {
    const void *kernel;
    size_t bytes;
};
static List<Allowed> allowed;

cudaError_t cuda_allow_shared(const void *kernel, size_t bytes) {
    if (bytes > cuda_on_cpu_shared_most) return cudaErrorInvalidValue;
    for (size_t i = 0; i < allowed.count; i++)
        if (allowed.items[i].kernel == kernel) return allowed.items[i].bytes = bytes, cudaSuccess;
    allowed.add({kernel, bytes});
    return cudaSuccess;
}

// 0 if nothing was asked for.
static size_t asked_for(const CudaLaunch *l) {
    for (size_t i = 0; i < allowed.count; i++)
        if (allowed.items[i].kernel == l->kernel) return allowed.items[i].bytes;
    return 0;
}

static void check_shared(const CudaLaunch *l) {
    const size_t most = std::max(SHARED_WITHOUT_ASKING, asked_for(l));
    CHECK(l->shared_bytes <= most,
          "the kernel %s could not start (%s:%d): %zu bytes of dynamic shared memory; beyond %zu "
          "cudaFuncSetAttribute must ask for them, and there are %d at most",
          l->name, l->file, l->line, l->shared_bytes, most, (int)cuda_on_cpu_shared_most);
}

void check_static_shared(const CudaLaunch *l, size_t bytes) {
    const size_t asked = asked_for(l), dynamic = std::max(asked, l->shared_bytes);
    const size_t most = asked && l->shared_bytes <= asked ? cuda_on_cpu_shared_most : SHARED_WITHOUT_ASKING;
    if (bytes + dynamic > most)
        broken(
            NULL,
            "has at least %zu bytes of static shared arrays beside %zu of dynamic shared memory (%s:%d), "
            "and %zu is the most of both%s",
            bytes, dynamic, l->file, l->line, most,
            asked ? "" : " unless cudaFuncSetAttribute asks for the dynamic ones");
}

void check_launch(const CudaLaunch *l) {
    CHECK(!cuda_is_lost(), "the kernel %s could not start (%s:%d): initialization error", l->name, l->file,
          l->line);
    check_sizes(l);
    check_shared(l);
}
