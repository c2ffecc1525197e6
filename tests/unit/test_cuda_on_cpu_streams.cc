// CUDA on the CPU with a queue for each stream: what is not ordered goes wrong for some seed, and what is
// ordered goes right for all.
#include "on_device.h"
// behind it
#include "fatal.h"

extern bool cuda_on_cpu_outlives_fork;

enum { SEEDS = 40, N = 64 };

static cudaStream_t first, second;
static cudaEvent_t event;

__global__ void set(int *y, int value) { y[threadIdx.x] = value; }
__global__ void copy(int *y, const int *x) { y[threadIdx.x] = x[threadIdx.x]; }

// For how many seeds the function returns true.
static int seeds_with(bool (*holds)(void)) {
    int count = 0;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        cuda_on_cpu_streams(seed);
        count += holds();
        cuda_on_cpu_streams(0);
    }
    return count;
}

static void some_seeds(bool (*holds)(void)) {
    const int count = seeds_with(holds);
    if (count == 0 || count == SEEDS) fail_msg("%d of %d seeds", count, (int)SEEDS);
}

// Whether y is the value, after all work.
static bool all_are(int *y, int value) {
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int x : to_host(y, N))
        if (x != value) return false;
    return true;
}

static bool is_read_in_time(bool waits) {
    int *x = to_device(std::vector<int>(N, 1)), *y = fresh<int>(N);
    CUDA_CHECK(cudaDeviceSynchronize());
    LAUNCH(set, 1, N, 0, first, x, 2);
    CUDA_CHECK(cudaEventRecord(event, first));
    if (waits) CUDA_CHECK(cudaStreamWaitEvent(second, event));
    LAUNCH(copy, 1, N, 0, second, y, x);
    const bool is = all_are(y, 2);
    CUDA_CHECK(cudaFree(x));
    return is;
}

static void a_kernel_may_pass_another_streams_that_it_does_not_wait_for(void **) {
    some_seeds([] { return is_read_in_time(false); });
    assert_int_equal(seeds_with([] { return is_read_in_time(true); }), SEEDS);
}

// A wait is for the last record before it: neither a later one nor the event's end disturbs it.
static void an_event_may_be_recorded_anew_or_destroyed(void **) {
    const auto is_right = [] {
        cudaEvent_t mark;
        cudaStream_t idle;
        CUDA_CHECK(cudaEventCreate(&mark));
        CUDA_CHECK(cudaStreamCreateWithFlags(&idle, cudaStreamNonBlocking));
        int *x = to_device(std::vector<int>(N, 1)), *y = fresh<int>(N);
        CUDA_CHECK(cudaDeviceSynchronize());
        LAUNCH(set, 1, N, 0, first, x, 2);
        CUDA_CHECK(cudaEventRecord(mark, first));
        CUDA_CHECK(cudaStreamWaitEvent(second, mark));
        CUDA_CHECK(cudaEventRecord(mark, idle));
        CUDA_CHECK(cudaEventDestroy(mark));
        LAUNCH(copy, 1, N, 0, second, y, x);
        CUDA_CHECK(cudaStreamSynchronize(second));
        CUDA_CHECK(cudaStreamDestroy(idle));
        CUDA_CHECK(cudaFree(x));
        return all_are(y, 2);
    };
    assert_int_equal(seeds_with(is_right), SEEDS);
}

static void queries_tell_the_truth(void **) {
    some_seeds([] {
        int *x = fresh<int>(N);
        LAUNCH(set, 1, N, 0, first, x, 2);
        CUDA_CHECK(cudaEventRecord(event, first));
        const bool ready = cudaEventQuery(event) == cudaSuccess;
        if (ready) assert_int_equal(cudaStreamQuery(first), cudaSuccess);
        while (cudaEventQuery(event) == cudaErrorNotReady) {
        }
        assert_int_equal(cudaStreamQuery(first), cudaSuccess);
        assert_true(all_are(x, 2));
        return ready;
    });
}

// Pinned memory is read when the stream comes to the copy, other memory in the call.
static void a_host_buffer_may_be_read_late(void **) {
    static const auto holds_first = [](int *host) {
        int *x = fresh<int>(N);
        std::fill(host, host + N, 1);
        CUDA_CHECK(cudaMemcpyAsync(x, host, N * sizeof *x, cudaMemcpyHostToDevice, first));
        std::fill(host, host + N, 2);
        return all_are(x, 1);
    };
    some_seeds([] {
        int *pinned;
        CUDA_CHECK(cudaMallocHost(&pinned, N * sizeof *pinned));
        const bool is = holds_first(pinned);
        CUDA_CHECK(cudaFreeHost(pinned));
        return is;
    });
    assert_int_equal(seeds_with([] {
                         int host[N];
                         return holds_first(host);
                     }),
                     SEEDS);
}

static void the_host_may_read_a_copy_early(void **) {
    some_seeds([] {
        int *x = to_device(std::vector<int>(N, 1)), *pinned, host[N];
        CUDA_CHECK(cudaMallocHost(&pinned, N * sizeof *pinned));
        pinned[0] = 0;
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaMemcpyAsync(host, x, sizeof host, cudaMemcpyDeviceToHost, first));
        assert_int_equal(host[0], 1);
        CUDA_CHECK(cudaMemcpyAsync(pinned, x, N * sizeof *x, cudaMemcpyDeviceToHost, first));
        for (int i = 0; i < 3; i++) cudaStreamQuery(first);
        const bool there = pinned[0] == 1;
        CUDA_CHECK(cudaFree(x));
        CUDA_CHECK(cudaFreeHost(pinned));
        return there;
    });
}

// The default stream waits for those that block, and they for it.
static void the_default_stream_is_in_order_with_those_that_block(void **) {
    static const auto in_order = [](cudaStream_t other) {
        int *x = to_device(std::vector<int>(N, 1)), *y = fresh<int>(N);
        CUDA_CHECK(cudaDeviceSynchronize());
        LAUNCH(set, 1, N, 0, other, x, 2);
        CUDA_CHECK(cudaMemcpyAsync(y, x, N * sizeof *x, cudaMemcpyDeviceToDevice, 0));
        LAUNCH(set, 1, N, 0, other, x, 3);
        const bool is = all_are(y, 2);
        CUDA_CHECK(cudaFree(x));
        return is;
    };
    const auto blocking = [] {
        cudaStream_t stream;
        CUDA_CHECK(cudaStreamCreate(&stream));
        const bool is = in_order(stream);
        CUDA_CHECK(cudaStreamDestroy(stream));
        return is;
    };
    assert_int_equal(seeds_with(blocking), SEEDS);
    some_seeds([] { return in_order(first); });
}

// x is made on the first stream, and freed on it while the second one may still use it.
static void use_late(void (*uses)(int *x)) {
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        cuda_on_cpu_streams(seed);
        int *x;
        CUDA_CHECK(cudaMallocAsync(&x, N * sizeof *x, first));
        CUDA_CHECK(cudaStreamSynchronize(first));
        uses(x);
        CUDA_CHECK(cudaFreeAsync(x, first));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
}

static void memory_that_is_freed_too_early_is_found(void **) {
    cuda_on_cpu_outlives_fork = true;
    const auto device_memory = [](void *) { use_late([](int *x) { LAUNCH(set, 1, N, 0, second, x, 1); }); };
    const auto pinned_memory = [](void *) {
        use_late([](int *x) {
            int *pinned;
            CUDA_CHECK(cudaMallocHost(&pinned, N * sizeof *x));
            CUDA_CHECK(cudaMemcpyAsync(x, pinned, N * sizeof *x, cudaMemcpyHostToDevice, first));
            CUDA_CHECK(cudaFreeHost(pinned));
        });
    };
    expect_fatal(device_memory, NULL, "after its release");
    expect_fatal(pinned_memory, NULL, "its pinned memory was freed before the stream came to the copy");
    cuda_on_cpu_outlives_fork = false;
}

static int make_streams(void **) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreate(&event));
    return 0;
}

static int destroy_streams(void **) {
    CUDA_CHECK(cudaEventDestroy(event));
    CUDA_CHECK(cudaStreamDestroy(first));
    CUDA_CHECK(cudaStreamDestroy(second));
    return 0;
}

int main(int argc, char **argv) {
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_kernel_may_pass_another_streams_that_it_does_not_wait_for),
        cmocka_unit_test(an_event_may_be_recorded_anew_or_destroyed),
        cmocka_unit_test(queries_tell_the_truth),
        cmocka_unit_test(a_host_buffer_may_be_read_late),
        cmocka_unit_test(the_host_may_read_a_copy_early),
        cmocka_unit_test(the_default_stream_is_in_order_with_those_that_block),
        cmocka_unit_test(memory_that_is_freed_too_early_is_found),
    };
    return cmocka_run_group_tests_name("cuda_on_cpu_streams", tests, make_streams, destroy_streams);
}
