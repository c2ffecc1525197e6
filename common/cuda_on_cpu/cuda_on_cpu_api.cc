// cuda_on_cpu_api.cc: the CUDA runtime API, with this process as the device. Every call finishes before it
// returns, so streams and events only have to exist. Wrong arguments that a GPU would report late or not at
// all end the program at the call.
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "cuda_on_cpu_inside.h"

struct CudaStream {
    int priority;
};
struct CudaEvent {
    double seconds;
};
struct CudaPool {
    uint64_t release_threshold;
};

// Bytes of shared memory that a block may ask for: an H100's. Tests set a smaller GPU's.
size_t cuda_on_cpu_shared_most = 227 << 10;
// Compute capability, an H100's.
int cuda_on_cpu_capability = 90;

static cudaError_t last_error;

static cudaError_t told(cudaError_t error) {
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

static bool is_lost(void) {
    if (!used) pthread_atfork(NULL, NULL, [] { lost = !cuda_on_cpu_outlives_fork; });
    used = true;
    return lost;
}
#define NEED_DEVICE() \
    if (is_lost()) return told(cudaErrorInitializationError)

// ---- the device ----

static size_t capacity(void) { return (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE); }

cudaError_t cudaGetDeviceCount(int *count) {
    NEED_DEVICE();
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *count = visible && !*visible ? 0 : 1;
    return *count ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaSetDevice(int device) {
    NEED_DEVICE();
    return told(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
static cudaError_t device_is_here(void) {
    NEED_DEVICE();
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) { return device_is_here(); }
cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 13000, cudaSuccess; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    if (device != 0) return told(cudaErrorInvalidDevice);
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
    p->totalGlobalMem = capacity();
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
            return told(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    if (device != 0) return told(cudaErrorInvalidDevice);
    snprintf(text, (size_t)size, "0000:00:00.0");
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    NEED_DEVICE();
    *total = capacity();
    *available = *total - memory_in_use();
    return cudaSuccess;
}

// ---- memory ----

cudaError_t cuda_malloc(void **memory, size_t bytes) {
    NEED_DEVICE();
    *memory = NULL;
    if (bytes == 0) return cudaSuccess;
    *memory = memory_allocate(bytes);
    return told(*memory ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *memory) {
    NEED_DEVICE();
    CHECK(!memory || memory_release(memory), "cudaFree (%s): %p is not the start of a live allocation",
          line_text(__builtin_return_address(0)), memory);
    return cudaSuccess;
}

cudaError_t cudaFreeAsync(void *memory, cudaStream_t) {
    NEED_DEVICE();
    CHECK(!memory || memory_release(memory), "cudaFreeAsync (%s): %p is not the start of a live allocation",
          line_text(__builtin_return_address(0)), memory);
    return cudaSuccess;
}

cudaError_t cuda_malloc_host(void **memory, size_t bytes) {
    NEED_DEVICE();
    *memory = malloc(bytes ? bytes : 1);
    return told(*memory ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void *memory) {
    NEED_DEVICE();
    CHECK(!memory_is_device(memory), "cudaFreeHost (%s): %p is device memory",
          line_text(__builtin_return_address(0)), memory);
    free(memory);
    return cudaSuccess;
}

static void check_side(const char *call, const char *name, const void *memory, size_t bytes, bool device,
                       const void *site) {
    CHECK(memory_is_device(memory) == device || bytes == 0, "%s (%s): the %s %p is%s device memory", call,
          line_text(site), name, memory, device ? " no" : "");
    if (device) memory_check_host(call, memory, bytes, site);
}

static cudaError_t copy(const char *call, void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                        const void *site) {
    NEED_DEVICE();
    bool to_device = kind == cudaMemcpyDefault
                         ? memory_is_device(to)
                         : kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDefault
                           ? memory_is_device(from)
                           : kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    check_side(call, "target", to, bytes, to_device, site);
    check_side(call, "source", from, bytes, from_device, site);
    memory_open();
    memmove(to, from, bytes);
    memory_close();
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    return copy("cudaMemcpy", to, from, bytes, kind, __builtin_return_address(0));
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    return copy("cudaMemcpyAsync", to, from, bytes, kind, __builtin_return_address(0));
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t) {
    if (width > to_pitch || width > from_pitch) return told(cudaErrorInvalidValue);
    for (size_t y = 0; y < height; y++)
        copy("cudaMemcpy2DAsync", static_cast<char *>(to) + y * to_pitch,
             static_cast<const char *>(from) + y * from_pitch, width, kind, __builtin_return_address(0));
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    NEED_DEVICE();
    check_side("cudaMemset", "target", to, bytes, true, __builtin_return_address(0));
    memory_open();
    memset(to, value, bytes);
    memory_close();
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t) {
    NEED_DEVICE();
    check_side("cudaMemsetAsync", "target", to, bytes, true, __builtin_return_address(0));
    memory_open();
    memset(to, value, bytes);
    memory_close();
    return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    static CudaPool only;
    *pool = &only;
    return told(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
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
    else return told(cudaErrorInvalidValue);
    return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

// ---- streams and events ----

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return *stream = new CudaStream(), cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int priority) {
    return *stream = new CudaStream{priority}, cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return device_is_here(); }
cudaError_t cudaStreamQuery(cudaStream_t) { return device_is_here(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t event, unsigned) {
    return told(event ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return *event = new CudaEvent(), cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
static double seconds_of_work;
void cuda_pass(double seconds) { seconds_of_work += seconds; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    if (!event) return told(cudaErrorInvalidValue);
    return event->seconds = wall_seconds() + seconds_of_work, cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    *milliseconds = (float)((to->seconds - from->seconds) * 1e3);
    return cudaSuccess;
}

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
    CHECK(!is_lost(), "the kernel %s could not start (%s:%d): initialization error", l->name, l->file,
          l->line);
    check_sizes(l);
    check_shared(l);
}
