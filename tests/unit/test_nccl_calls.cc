// How comm_nccl_calls.cu launches its sums of members' pieces on the device: all of them in one call, in no
// more groups than necessary, read in whole packs, and with the bits of a sum in rank order. On two ranks,
// which are two processes, over NCCL on the CPU. TAP.
#include <string.h>

#include "common/comm/comm_nccl_calls.cu"
#include "on_device.h"
#include "two_ranks.h"

enum { MEMBERS = 3, MOST = 5000 };

// ---- what comm_nccl.cu provides ----

static char *memory;  // the scratch
static int groups;

void check_nccl(ncclResult_t result, const char *call) {
    CHECK(result == ncclSuccess, "%s: %s", call, ncclGetLastError(NULL));
}
cudaStream_t stream_of(const Operation *) { return NULL; }
char *scratch(const Operation *, size_t bytes) {
    CHECK(bytes <= MEMBERS * MOST * 8, "the scratch is too small");
    return memory;
}
void call_begin(void) { groups++; }
void call_end(void) {}
void *device_stream(void) { return NULL; }

// Member j's element i. Sums need more than 16 bits, so that rounding twice, or in another order, shows.
static float value(int j, int64_t i) { return (float)((i * 37 + j * 101) % 257 - 128) * (j ? 0.0625f : 1); }

template <class T>
static void set(T *to, int64_t count, int j, int64_t first) {
    std::vector<T> host;
    for (int64_t i = 0; i < count; i++) host.push_back(T(value(j, first + i)));
    CUDA_CHECK(cudaMemcpy(to, host.data(), (size_t)count * sizeof(T), cudaMemcpyHostToDevice));
}

template <class T>
static T sum_of(int members, int64_t i) {
    float sum = (float)T(value(0, i));
    for (int j = 1; j < members; j++) sum += (float)T(value(j, i));
    return T(sum);
}

// Elements [0, count) must be these sums from `first` on.
template <class T>
static bool are_sums(const T *from, int64_t count, int members, int64_t first) {
    std::vector<T> host((size_t)count);
    CUDA_CHECK(cudaMemcpy(host.data(), from, (size_t)count * sizeof(T), cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < count; i++) {
        const T want = sum_of<T>(members, first + i);
        if (memcmp(&want, &host[i], sizeof want)) return false;
    }
    return true;
}

// ---- one launch ----

// The pieces begin `shift` elements after a multiple of 16 bytes, and the result `other` elements.
template <class T>
static CudaCounts reduction(int64_t count, int64_t shift, int64_t other) {
    Group group = {};
    group.size = MEMBERS, group.rank = 1;
    Operation o = {};
    o.call.group = group;
    o.row = (count + 31) / 16 * 16;
    T *own = fresh<T>(count + 32), *out = fresh<T>(count + 32), *others = (T *)memory;
    set(own + shift, count, 1, 0);
    for (int j = 0; j < MEMBERS; j++)
        if (j != 1) set(others + shift + j * o.row, count, j, 0);
    cuda_count_begin();
    launch_reduction<T>(&o, out + other, (const char *)(own + shift), (const char *)(others + shift),
                        count);
    const CudaCounts counts = cuda_count_end();
    assert_true(are_sums(out + other, count, MEMBERS, 0));
    CUDA_CHECK(cudaFree(own));
    CUDA_CHECK(cudaFree(out));
    return counts;
}

template <class T>
static void check_loads(void) {
    const int64_t n = 16 / sizeof(T);
    for (int64_t count : {(int64_t)1, n - 1, n, 33 * n, 1000 * n + 3})
        for (int64_t shift = 0; shift < n; shift++) {
            const CudaCounts c = reduction<T>(count, shift, shift);
            // By warps of packs, and at the edges less than a pack twice.
            assert_true(c.global_loads <= MEMBERS * ((count / n + 31) / 32 + 2));
            assert_true(c.global_stores <= (count / n + 31) / 32 + 2);
        }
    reduction<T>(1000 * n + 3, 1, 0);  // correct even if nothing is aligned to packs
}

static void reductions_load_whole_packs(void **) {
    check_loads<__nv_bfloat16>();
    check_loads<__half>();
    check_loads<__nv_fp8_e4m3>();
    check_loads<float>();
}

// ---- a whole call, on two ranks ----

static Communicator communicator;

static bool run(CollectiveKind kind, int root, const int64_t *counts, int64_t chunk, int64_t shift) {
    typedef __nv_bfloat16 T;
    const int64_t total = counts[0] + counts[1], first = rank ? counts[0] : 0;
    T *whole = fresh<T>(total + 16), *part = fresh<T>(counts[rank] + 16);
    set(whole + shift, total, rank, 0);
    Operation o = {};
    o.call.kind = kind, o.call.op = REDUCE_SUM, o.call.root = root, o.call.dtype = BF16;
    o.call.group.size = 2, o.call.group.rank = rank;
    o.call.in_counts = counts;
    o.call.in = whole + shift;
    o.call.out = kind == REDUCE_SCATTER ? part : whole + shift;
    o.comm = &communicator;
    prepare_call(&o);
    if (!o.direct || o.over) return false;
    o.chunk = chunk;
    o.chunks = (std::max(counts[0], counts[1]) + chunk - 1) / chunk;
    groups = 0;
    cuda_count_begin();
    next_of_call(&o);  // once
    const int64_t loads = cuda_count_end().global_loads;
    // The copies of the first chunk; results of each with the copies of the next; the last results.
    bool right = o.over && groups == o.chunks + (kind != REDUCE_SCATTER);
    // The copies are aligned like the piece: in packs, wherever it begins.
    if (kind == ALL_REDUCE) right = right && loads <= 2 * o.chunks * ((chunk / 8 + 31) / 32 + 2);
    if (kind == REDUCE_SCATTER) right = right && are_sums(part, counts[rank], 2, first);
    else if (kind == ALL_REDUCE || rank == root) right = right && are_sums(whole + shift, total, 2, 0);
    if (!right)
        fprintf(stderr, "# rank %d: kind %d, chunks of %d: %d groups, %d loads\n", rank, kind, (int)chunk,
                groups, (int)loads);
    return right;
}

static bool all_calls(void) {
    bool right = true;
    const int64_t counts[][2] = {{2400, 2400}, {2401, 1999}, {70, 0}};
    for (auto &c : counts)
        for (int64_t chunk : {2408, 800, 32}) {
            right = run(ALL_REDUCE, 0, c, chunk, 0) && right;
            right = run(ALL_REDUCE, 0, c, chunk, 3) && right;
            right = run(REDUCE_SCATTER, 0, c, chunk, 0) && right;
            right = run(REDUCE, 1, c, chunk, 1) && right;
        }
    return right;
}

static void all_chunks_are_given_at_once(void **) {
    const auto run = [] {
        setenv("NCCL_HOSTID", rank ? "one" : "other", 1);
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        check_nccl(ncclCommInitRankConfig(&communicator.nccl, 2, id, rank, &config), "init");
        return !all_calls();
    };
    on_two_ranks(run, 0, 0);
}

static int make_scratch(void **) {
    memory = fresh<char>(MEMBERS * MOST * 8);
    return 0;
}

int main(int argc, char **argv) {
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reductions_load_whole_packs),
        cmocka_unit_test(all_chunks_are_given_at_once),
    };
    return cmocka_run_group_tests_name("nccl_calls", tests, make_scratch, NULL);
}
