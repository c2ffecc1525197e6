// test_ops_cuda_host.cc: what the CUDA back end's host code decides: when it waits, which kernels of
// cuBLASLt multiply, and how codes are made.
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "both_backends.h"
#include "fatal.h"
#include "tensor/kernel_table.h"

// From cuBLASLt on the CPU: the number of multiplies by each of its algorithms.
extern int64_t cublaslt_on_cpu_used[3] __attribute__((weak));
// The one of its reduction schemes (1 in place, 2 in f32, 4 in c's dtype) that products into 16 bits are
// made to need; those that were allowed at the last choice.
extern uint32_t cublaslt_on_cpu_needs __attribute__((weak)), cublaslt_on_cpu_allowed __attribute__((weak));
// Bytes of shared memory that a block may have on this GPU.
extern size_t cuda_on_cpu_shared_most __attribute__((weak));
// Its compute capability.
extern int cuda_on_cpu_capability __attribute__((weak));
// Its work in queues, in an order drawn from the seed.
void cuda_on_cpu_streams(uint64_t seed) __attribute__((weak));
// Its calls that may wait for the device.
extern "C" int64_t cuda_on_cpu_waits(void) __attribute__((weak));
// Bytes of device memory that are allocated.
size_t memory_in_use(void) __attribute__((weak));

// ---- choices of kernels: each test in a process of its own, before this one starts a GPU ----

static void in_a_child(void (*run)(void), int expected) {
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        run();
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), expected);
}

// ---- GPUs that are refused ----

static void start_on_a_v100(void *) {
    cuda_on_cpu_capability = 70;
    cuda_backend_alloc(1);
}

static void older_gpus_are_refused(void **) {
    if (&cuda_on_cpu_capability)  // a real GPU cannot be changed
        expect_fatal(start_on_a_v100, NULL, "(A100) and later, and the CUDA on the CPU has 7.0");
}

// ---- matrix multiplies ----

// The algorithm that multiplied the second time, after all choices have been made; on a GPU 3.
static int multiply(DType dtype, bool add) {
    const int64_t m = 33, n = 17, k = 65;
    const Doubles a = random_numbers(dtype, m * k, 1), b = random_numbers(dtype, k * n, 2),
                  c = random_numbers(dtype, m * n, 3);
    int64_t before[3] = {};
    for (int turn = 0; turn < 2; turn++) {
        Doubles want = add ? c : Doubles(c.size());
        Device x(dtype, a), y(dtype, b), z(dtype, c);
        const int64_t waits = cuda_backend_waits();
        kernel_matmul(F64, F64, want.data(), a.data(), b.data(), m, n, k, false, false, 1);
        cuda_kernel_matmul(dtype, dtype, z.at, x.at, y.at, m, n, k, false, false, add);
        if (turn == 1) assert_int_equal(cuda_backend_waits(), waits);
        assert_close("matmul", z, want, (double)k + 1);
        for (int i = 0; i < 3 && turn == 0 && cublaslt_on_cpu_used; i++)
            before[i] = cublaslt_on_cpu_used[i];
    }
    int used = 0;
    while (used < 3 && (!cublaslt_on_cpu_used || cublaslt_on_cpu_used[used] == before[used])) used++;
    return used;
}

// Cmocka's longjmp stays in its process.
static void expect_algorithm(int expected) {
    for (DType dtype : all_dtypes)
        for (bool add : {false, true}) {
            const int used = multiply(dtype, add);
            if (used != 3 && used != expected) {
                fprintf(stderr, "# %s: algorithm %d, expected %d\n", dtype_name(dtype), used, expected);
                _exit(1);
            }
        }
}

// On the emulator the second of three is the fastest.
static void first_ones(void) {
    unsetenv("ULTRASCALE_GEMM");
    expect_algorithm(0);
    if (&cublaslt_on_cpu_allowed && cublaslt_on_cpu_allowed != 2) _exit(1);
    if (cublaslt_on_cpu_used && cublaslt_on_cpu_used[1] + cublaslt_on_cpu_used[2]) _exit(1);
}

static void timed_ones(void) {
    setenv("ULTRASCALE_GEMM", "timed", 1);
    expect_algorithm(1);
}

static void quietly(const char *value, const char *ranks) {
    if (!freopen("/dev/null", "w", stderr)) _exit(1);
    setenv("ULTRASCALE_GEMM", value, 1);
    setenv("OMPI_COMM_WORLD_SIZE", ranks, 1);
    multiply(F32, false);
}
static void timed_by_two(void) { quietly("timed", "2"); }
static void another_word(void) { quietly("fast", "1"); }

static void kernels_are_the_first_that_the_library_names(void **) { in_a_child(first_ones, 0); }
static void timed_ones_are_the_fastest(void **) { in_a_child(timed_ones, 0); }
static void several_ranks_time_nothing(void **) {
    in_a_child(timed_by_two, STATUS_USAGE);
    in_a_child(another_word, STATUS_USAGE);
}

// ---- choices for later runs: of two ranks, of which each multiplies other kinds ----

static char *choices, *file[2];

static void way(const char *what) {
    char *text = format_text("%s%s", what, choices);
    setenv("ULTRASCALE_GEMM", text, 1);
    setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
    free(text);
}

static void expect_one(DType dtype, int expected) {
    const int used = multiply(dtype, false);
    if (used != 3 && used != expected) _exit(10 + used);
}

// They multiply by the first ones all the same, or ranks would differ now.
static void time_as(int rank, DType other) {
    base_set_rank(rank, 2, NULL);
    way("timed:");
    expect_one(F32, 0);
    expect_one(other, 0);
}
static void time_as_0(void) { time_as(0, F16); }
static void time_as_1(void) { time_as(1, BF16); }

static void read_both(void) {
    way("read:");
    expect_one(F32, 1);
    expect_one(F16, 1);
    expect_one(BF16, 1);
    expect_one(F64, 0);
}
static void read_in_a_child(void *) { read_both(); }

static std::string text_of(const char *name) {
    std::string text(1 << 16, 0);
    FILE *from = fopen(name, "rb");
    assert_non_null(from);
    text.resize(fread(&text[0], 1, text.size(), from));
    fclose(from);
    return text;
}
static void write_text(const char *name, const std::string &text) {
    FILE *to = fopen(name, "wb");
    assert_non_null(to);
    assert_int_equal(fwrite(text.data(), 1, text.size(), to), text.size());
    fclose(to);
}

static void ranks_choose_alike_from_files(void **) {
    char folder[] = "/tmp/test_ops_cuda_host_XXXXXX";
    assert_non_null(mkdtemp(folder));
    choices = format_text("%s/gemm", folder);
    for (int i = 0; i < 2; i++) file[i] = format_text("%s.%d", choices, i);
    in_a_child(time_as_0, 0);
    expect_fatal(read_in_a_child, NULL, "gemm.1: No such file");
    in_a_child(time_as_1, 0);
    in_a_child(read_both, 0);
    // Of a kind that both have timed, here f32, rank 0's choice is taken: the other's may be one that is not
    // its multiply's.
    const std::string whole = text_of(file[1]);
    std::string other = whole;
    const size_t first_algorithm = other.find('\n') + 1 + 120;
    for (size_t i = 0; i < 64; i++) other[first_algorithm + i] ^= 0x55;
    write_text(file[1], other);
    in_a_child(read_both, 0);
    other = whole;
    for (size_t i = 0; i < 64; i++) other[other.size() - 64 + i] ^= 0x55;  // of a kind that rank 0 has not
    write_text(file[1], other);
    expect_fatal(read_in_a_child, NULL, "cuBLASLt refuses an algorithm of ULTRASCALE_GEMM=read:");
    other = whole;
    other.replace(other.find(" of 2\n"), 6, " of 3\n");
    write_text(file[1], other);
    expect_fatal(read_in_a_child, NULL, "gemm.0 of 2: make all again");
    write_text(file[1], whole.substr(0, whole.size() - 1));
    expect_fatal(read_in_a_child, NULL, "gemm.1 is cut off");
    write_text(file[1], "cuBLASLt 1, NVIDIA A100, rank 1 of 2\n" + whole.substr(whole.find('\n') + 1));
    expect_fatal(read_in_a_child, NULL, "but begins with \"cuBLASLt 1, NVIDIA A100, rank 1 of 2\"");
    for (char *name : file) unlink(name), free(name);
    rmdir(folder);
    free(choices);
}

// If the library has no kernel for 16 bits that adds up parts in f32, another one is used, and a message
// says so once in a run.
static void parts_in_16_bits(void) {
    char file[] = "/tmp/test_ops_cuda_host_XXXXXX", text[4096] = "";
    if (!&cublaslt_on_cpu_needs) return;  // on a GPU nothing is missing
    if (close(mkstemp(file)) || !freopen(file, "w", stdout)) _exit(1);
    unsetenv("ULTRASCALE_GEMM");
    cublaslt_on_cpu_needs = 1;
    for (DType dtype : all_dtypes)
        for (bool add : {false, true}) {
            multiply(dtype, add);
            if (cublaslt_on_cpu_allowed != (dtype_size(dtype) == 2 ? 7 : 2)) _exit(2);
        }
    fflush(stdout);
    FILE *said = fopen(file, "r");
    if (!said || !fread(text, 1, sizeof text - 1, said)) _exit(3);
    const char *const words = "cuBLASLt has no kernel", *once = strstr(text, words);
    if (!once || strstr(once + 1, words)) _exit(4);
    unlink(file);
}

static void nothing_serves(void) {
    if (!&cublaslt_on_cpu_needs) _exit(STATUS_USAGE);
    cublaslt_on_cpu_needs = 8;
    quietly("first", "1");
    multiply(BF16, false);
}

static void a_kernel_that_rounds_parts_is_better_than_none(void **) {
    in_a_child(parts_in_16_bits, 0);
    in_a_child(nothing_serves, STATUS_USAGE);
}

// Chapter 07's kernels load rows in packs of 16 bytes, and a grid has 65535 tiles along y: attention with
// unaligned rows, and products with more tiles, are left to the back end.
static void what_the_book_does_not_serve_is_the_back_ends(void **) {
    constexpr int64_t D = 64, LONG = 65535 * 32 + 1;
    const KernelTable *book = kernel_table_linked();
    AttentionChunk at = {};
    at.b = at.heads = at.kv_heads = at.queries.s = at.keys.s = 1, at.head_size = D, at.shape = MASK_CAUSAL;
    for (DType dtype : {F32, BF16}) {
        Device even(dtype, Doubles(D)), odd(dtype, Doubles(D), 1), o(F32, Doubles(D)), lse(F32, Doubles(1));
        for (int which = 0; which < 4; which++) {
            const auto x = [&](int i) { return i == which ? odd.at : even.at; };
            assert_true(book->attention_chunk_forward(dtype, o.at, lse.at, x(0), x(1), x(2), at) ==
                        (which == 3));
            if (which < 3) continue;
            assert_false(book->attention_chunk_backward(dtype, o.at, o.at, o.at, odd.at, even.at, even.at,
                                                        even.at, lse.at, lse.at, at));
        }
        assert_false(book->matmul(dtype, dtype, o.at, even.at, even.at, 1, 1, LONG, true, false, 0));
        assert_false(book->matmul(dtype, dtype, o.at, even.at, even.at, 1, LONG, 1, false, true, 0));
        assert_false(book->matmul(dtype, dtype, o.at, even.at, even.at, LONG, 1, 1, false, false, 0));
    }
}

// The book's products in 16 bits: what they add to the memory in use must be `expected` numbers.
static void need_room(bool transpose_a, bool transpose_b, double beta, int64_t expected) {
    constexpr int64_t M = 64, N = 72, K = 40;
    Device a(BF16, Doubles(M * K)), b(BF16, Doubles(K * N)), c(BF16, Doubles(M * N));
    const size_t before = memory_in_use();
    const KernelTable *book = kernel_table_linked();
    CHECK(book->matmul(BF16, BF16, c.at, a.at, b.at, M, N, K, transpose_a, transpose_b, beta),
          "not a product of the book");
    const int64_t more = (int64_t)(memory_in_use() - before) / 2;
    CHECK(more == expected, "scratch of %lld numbers, and %lld are needed", (long long)more,
          (long long)expected);
}
static void in_place() { need_room(false, false, 0, 0); }
static void left_transposed() { need_room(true, false, 0, 64 * 40); }
static void right_transposed() { need_room(false, true, 0, 40 * 72); }
static void added() { need_room(false, false, 1, 0); }

// Logits of a long sequence are gigabytes: only what is transposed has a copy.
static void products_take_the_scratch_that_they_need(void **) {
    if (!memory_in_use) return;  // a GPU's pool does not say
    for (auto run : {in_place, left_transposed, right_transposed, added}) in_a_child(run, 0);
}

// The kernels must decline attention, forward with so many keys or backward with so many queries, in heads
// of d. Nothing may be read: neither so many tokens nor their tables exist.
static void expect_refusal(DType dtype, bool forward, int64_t d, MaskShape shape, int64_t tokens) {
    const KernelTable *book = kernel_table_linked();
    AttentionChunk at = {};
    at.b = at.heads = at.kv_heads = at.queries.s = at.keys.s = 1, at.head_size = d, at.shape = shape;
    (forward ? at.keys : at.queries).s = tokens;
    Device x(dtype, Doubles(128)), y(F32, Doubles(128));
    if (forward) assert_false(book->attention_chunk_forward(dtype, y.at, y.at, x.at, x.at, x.at, at));
    else
        assert_false(book->attention_chunk_backward(dtype, y.at, y.at, y.at, x.at, x.at, x.at, x.at, y.at,
                                                    y.at, at));
}

// Rows and tiles for which this GPU's blocks have too little shared memory are left to the back end: an A10
// or an L4, which run the code for an A100, have 99 KiB for a block. A plan of tiles grows with the
// sequence.
static void what_does_not_fit_into_shared_memory_is_the_back_ends(void **) {
    constexpr int64_t WIDE = 20000, LONG = 64 * 60000;
    Device wide(F32, Doubles(WIDE)), rstd(F32, Doubles(1));
    assert_false(
        kernel_table_linked()->rmsnorm_forward(F32, wide.at, rstd.at, wide.at, wide.at, 1, WIDE, 1));
    for (bool forward : {true, false}) expect_refusal(BF16, forward, 64, MASK_ANY, LONG);
    if (!&cuda_on_cpu_shared_most) return;  // a GPU has what it has
    const size_t h100 = cuda_on_cpu_shared_most;
    cuda_on_cpu_shared_most = 99 << 10;
    for (DType dtype : {F32, BF16, F16}) expect_refusal(dtype, false, 128, MASK_CAUSAL, 1);
    cuda_on_cpu_shared_most = 48 << 10;
    for (DType dtype : {F32, BF16, F16}) expect_refusal(dtype, true, 128, MASK_CAUSAL, 1);
    cuda_on_cpu_shared_most = h100;
}

// ---- copies ----

// In pieces, waiting if necessary.
static void upload(size_t bytes) {
    std::vector<char> host(bytes), back(bytes);
    for (size_t i = 0; i < bytes; i++) host[i] = (char)(i * 37 + i / 1021);
    const std::vector<char> sent = host;
    char *device = static_cast<char *>(cuda_backend_alloc(bytes));
    cuda_backend_from_host(device, host.data(), bytes);
    memset(host.data(), 0, bytes);  // the caller may
    cuda_backend_to_host(back.data(), device, bytes);
    assert_memory_equal(back.data(), sent.data(), bytes);
    cuda_backend_free(device);
}

// On the emulator the stream has always read a piece before the next one, unless its work is queued.
static void uploads_wait_for_nobody(void **) {
    if (cuda_on_cpu_streams) cuda_on_cpu_streams(0);
    upload(1);  // the first one starts the device
    for (size_t bytes : {(size_t)1, (size_t)4099, (size_t)(1 << 20), (size_t)(9 << 20) + 5}) {
        const int64_t before = cuda_backend_waits(), others = cuda_on_cpu_waits ? cuda_on_cpu_waits() : 0;
        upload(bytes);
        // The copy back waits before and behind if it is large, as what it writes is not pinned.
        const bool is_large = bytes > (size_t)1 << 20;
        if (cuda_on_cpu_waits) assert_int_equal(cuda_on_cpu_waits(), others + is_large);
        if (cuda_on_cpu_order) assert_int_equal(cuda_backend_waits(), before + 1 + is_large);
    }
}

static void copies_keep_their_order_with_the_rest(void **) {
    for (uint64_t seed = 1; seed <= 8; seed++) {
        if (cuda_on_cpu_streams) cuda_on_cpu_streams(seed);
        upload((size_t)(9 << 20) + 5);
        Device x(F32, Doubles(1000, 1));
        cuda_kernel_fill(F32, x.at, (double)seed, 1000);
        assert_same("what was written before the copy", x, Doubles(1000, (double)seed));
    }
    if (cuda_on_cpu_streams) cuda_on_cpu_streams(0);
}

// The book's products in f32: lanes load neighbours, however the operands are stored.
static void transposed_products_load_whole_sectors(void **) {
    constexpr int64_t SIDE = 128, COUNT = SIDE * SIDE;
    const Device a(F32, random_numbers(F32, COUNT, 1)), b(F32, random_numbers(F32, COUNT, 2));
    int64_t plain[2] = {}, counted[2] = {};
    for (int how = 0; how < 4; how++) {
        Device c(F32, Doubles(COUNT));
        if (cuda_count_begin) cuda_count_begin();
        assert_true(kernel_table_linked()->matmul(F32, F32, c.at, a.at, b.at, SIDE, SIDE, SIDE, how & 1,
                                                  how & 2, 0));
        if (cuda_count_end_global) cuda_count_end_global(&counted[0], &counted[1]);
        if (how == 0) memcpy(plain, counted, sizeof plain);
        assert_memory_equal(counted, plain, sizeof plain);
    }
}

// Codes (ROWS, COLUMNS) from bf16. Not transposed, a thread takes a pack of 16: three requests for a warp's
// 512. Transposed, a warp loads 32 elements of a row of x, and stores 32 of a row of codes. So each sector
// moves once. To find the maximum, a thread takes 8 at a time, and a block or, for a small tile, a warp
// needs one atomic.
static void codes_move_whole_sectors(void **) {
    constexpr int64_t ROWS = 128, COLUMNS = 256, COUNT = ROWS * COLUMNS;
    const struct {
        Tile tile;
        bool turned;
        int64_t scales, requests;  // without those of the scales
        int64_t of_amax;
    } cases[] = {
        {{0, 0}, false, 1, COUNT / 16 / 32 * 3, COUNT / 8 / 32 + COUNT / 32 / 256},
        {{128, 128}, false, 2, COUNT / 16 / 32 * 3, COUNT / 8 / 32 + COUNT / 32 / 256},
        {{1, 128}, false, ROWS * 2, COUNT / 16 / 32 * 3, COUNT / 8 / 16 + ROWS * 2},
        {{1, 8}, false, ROWS * 32, COUNT / 32 * 2, COUNT / 8 * 2},  // no pack of codes is within one tile
        {{0, 0}, true, 1, COUNT / 32 * 2, COUNT / 8 / 32 + COUNT / 32 / 256},
        {{1, 128}, true, ROWS * 2, COUNT / 32 * 2, COUNT / 32 + COUNT / 32 / 128},
        {{128, 128}, true, 2, COUNT / 32 * 2, COUNT / 32 + COUNT / 32 / 128}};
    const Doubles x = random_numbers(BF16, COUNT, 5);
    std::vector<uint16_t> stored((size_t)COUNT);
    dtype_convert(stored.data(), BF16, x.data(), F64, COUNT);
    for (const auto &is : cases) {
        const int64_t rows = is.turned ? COLUMNS : ROWS, columns = is.turned ? ROWS : COLUMNS;
        Doubles scales((size_t)is.scales), want(COUNT);
        for (size_t i = 0; i < scales.size(); i++) scales[i] = ldexp(1, (int)i % 5 - 9) * 1.25;
        std::vector<float> scale(scales.begin(), scales.end());
        std::vector<uint8_t> codes((size_t)COUNT);
        kernel_encode(E4M3, codes.data(), BF16, stored.data(), scale.data(), rows, columns, is.turned,
                      is.tile);
        dtype_convert(want.data(), F64, codes.data(), E4M3, COUNT);
        Device from(BF16, x), by(F32, scales), to(E4M3, COUNT);
        int64_t requests = is.requests, sectors = COUNT * 3 / 32;
        if (cuda_count_begin) cuda_count_begin();
        cuda_kernel_encode(E4M3, (uint8_t *)to.at, BF16, from.at, (const float *)by.at, rows, columns,
                           is.turned, is.tile);
        if (cuda_count_end_global) cuda_count_end_global(&requests, &sectors);
        assert_same("encode", to, want);
        if (requests > is.requests * 3 / 2 || sectors > COUNT * 3 / 32 * 2)
            fail_msg("%d x %d%s: %d requests, %d sectors", (int)is.tile.rows, (int)is.tile.columns,
                     is.turned ? ", turned" : "", (int)requests, (int)sectors);
        requests = is.of_amax, sectors = COUNT * 2 / 32;
        Device most(F32, Doubles(scales.size()));
        scale.assign(scale.size(), 0);
        kernel_tile_amax(BF16, scale.data(), stored.data(), rows, columns, is.turned, is.tile);
        if (cuda_count_begin) cuda_count_begin();
        cuda_kernel_tile_amax(BF16, (float *)most.at, from.at, rows, columns, is.turned, is.tile);
        if (cuda_count_end_global) cuda_count_end_global(&requests, &sectors);
        assert_same("tile_amax", most, Doubles(scale.begin(), scale.end()));
        if (requests != is.of_amax || sectors > COUNT * 2 / 32 * 5 / 4 + 2 * is.scales)
            fail_msg("the largest of %d x %d%s: %d requests, not %d, and %d sectors", (int)is.tile.rows,
                     (int)is.tile.columns, is.turned ? ", turned" : "", (int)requests, (int)is.of_amax,
                     (int)sectors);
    }
}

// A tile's largest element is in one of its corners; rows begin unaligned, or tiles or rows are not whole
// packs, or everything is.
static void amax_has_all_of_its_tile(void **) {
    constexpr int64_t ROWS = 19;
    for (int64_t how = 0; how < 48; how++) {
        const int shift = (int)how % 2;
        const DType dtype = all_dtypes[how / 2 % 4];
        const int64_t columns = how % 16 < 8 ? 136 : 139;
        const Tile tile = how < 16 ? Tile{0, 0} : how < 32 ? Tile{1, 16} : Tile{16, 120};
        const int64_t high = tile.rows ? tile.rows : ROWS, wide = tile.columns ? tile.columns : columns;
        const int64_t across = (columns + wide - 1) / wide, down = (ROWS + high - 1) / high;
        for (int corner = 0; corner < 4; corner++) {
            Doubles x = random_numbers(dtype, ROWS * columns, 9), want((size_t)(down * across));
            for (int64_t t = 0; t < down * across; t++) {
                const int64_t row0 = t / across * high, column0 = t % across * wide;
                const int64_t row = corner & 1 ? std::min(row0 + high, ROWS) - 1 : row0;
                const int64_t column = corner & 2 ? std::min(column0 + wide, columns) - 1 : column0;
                x[(size_t)(row * columns + column)] = -(want[(size_t)t] = (double)(8 + t % 100));
            }
            Device from(dtype, x, shift), most(F32, Doubles(want.size()));
            cuda_kernel_tile_amax(dtype, (float *)most.at, from.at, ROWS, columns, false, tile);
            assert_same("tile_amax", most, want);
        }
    }
}

// The book's kernels take packs only where every array begins at a multiple of 16 bytes: here one of them,
// the `odd`-th, does not. A pack that is not aligned ends the run.
static void one_array_begins_anywhere(void **) {
    constexpr int64_t N = 2, H = 64;
    const KernelTable *book = kernel_table_linked();
    for (DType dtype : {BF16, F16})
        for (int odd = 0; odd < 8; odd++) {
            const auto x = [&](int i, int64_t count) {
                return std::unique_ptr<Device>(new Device(dtype, Doubles((size_t)count, 0.5), i == odd));
            };
            const auto a = x(0, N * H), b = x(1, N * H), c = x(2, N * H), d = x(3, N * H), e = x(4, N * H),
                       w = x(5, H);
            Device rstd(F32, Doubles(N, 2)), dw(F32, Doubles(H)),
                left(dtype, Doubles(64 * 64, 0.5), odd == 0), right(dtype, Doubles(64 * 64, 0.5), odd == 1),
                out(dtype, 64 * 64, odd == 2);
            assert_true(book->swiglu_forward(dtype, a->at, b->at, c->at, N * H));
            assert_same("swiglu", *a, Doubles(N * H, rounded(dtype, {0.25 / (1 + exp(-0.5))})[0]));
            assert_true(book->swiglu_backward(dtype, a->at, b->at, c->at, d->at, e->at, N * H));
            assert_true(book->rmsnorm_forward(dtype, a->at, rstd.at, c->at, w->at, N, H, 1e-5));
            assert_true(book->rmsnorm_backward(dtype, a->at, F32, dw.at, b->at, c->at, d->at, w->at,
                                               rstd.at, N, H));
            assert_true(book->matmul(dtype, dtype, out.at, left.at, right.at, 64, 64, 64, false, false, 0));
            assert_same("matmul", out, Doubles(64 * 64, 16));
        }
}

int main(int argc, char **argv) {
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(older_gpus_are_refused),
        cmocka_unit_test(kernels_are_the_first_that_the_library_names),
        cmocka_unit_test(timed_ones_are_the_fastest),
        cmocka_unit_test(several_ranks_time_nothing),
        cmocka_unit_test(ranks_choose_alike_from_files),
        cmocka_unit_test(a_kernel_that_rounds_parts_is_better_than_none),
        cmocka_unit_test(products_take_the_scratch_that_they_need),
        cmocka_unit_test(what_the_book_does_not_serve_is_the_back_ends),
        cmocka_unit_test(what_does_not_fit_into_shared_memory_is_the_back_ends),
        cmocka_unit_test(uploads_wait_for_nobody),
        cmocka_unit_test(copies_keep_their_order_with_the_rest),
        cmocka_unit_test(one_array_begins_anywhere),
        cmocka_unit_test(transposed_products_load_whole_sectors),
        cmocka_unit_test(codes_move_whole_sectors),
        cmocka_unit_test(amax_has_all_of_its_tile),
    };
    return cmocka_run_group_tests_name("ops_cuda_host", tests, NULL, NULL);
}
