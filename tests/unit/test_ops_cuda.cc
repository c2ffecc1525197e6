// test_ops_cuda.cc: elementwise kernels, sums, the matrix multiply, optimizers and 8-bit codes of the CUDA
// back end against the CPU's; and the message for a wrong index.
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "both_backends.h"
#include "cuda/gemm.h"
#include "tensor/kernel_table.h"

// ---- wrong indices ----

// What `wrong` prints to stderr, in a process of its own, when the host next waits for the device.
static std::string said_by(void (*wrong)(const Device &index)) {
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        Device index(I32, Doubles{3, 0, 5, 7});
        wrong(index);
        index.stored("index");
        _exit(0);
    }
    close(ends[1]);
    std::string said;
    char piece[256];
    for (ssize_t got; (got = read(ends[0], piece, sizeof piece)) > 0;) said.append(piece, (size_t)got);
    close(ends[0]);
    waitpid(child, &status, 0);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == STATUS_USAGE);
    return said;
}

static void wrong_indices_are_told(void **state) {
    (void)state;
    // 7 is the fourth, and one too large for a vocabulary of 7.
    const std::string told = ": number 3 of the tokens is 7, which a vocabulary of 7 has not";
    std::string said = said_by([](const Device &index) {
        Device y(F32, 4 * 5), table(F32, 7 * 5);
        cuda_kernel_embedding_forward(F32, y.at, index.indices(), table.at, 4, 7, 5);
    });
    assert_true(said.find("embedding_forward" + told) != std::string::npos);
    said = said_by([](const Device &index) {
        Device dy(F32, 4 * 5), table(F32, 7 * 5);
        cuda_kernel_embedding_backward(F32, F32, table.at, dy.at, index.indices(), 4, 7, 5);
    });
    assert_true(said.find("embedding_backward" + told) != std::string::npos);
    said = said_by([](const Device &index) {
        Device logits(F32, 4 * 7), losses(F32, 4), lse(F32, 4);
        cuda_kernel_cross_entropy_forward(F32, losses.at, lse.at, logits.at, index.indices(), 4, 7);
    });
    assert_true(said.find("cross_entropy_forward" + told) != std::string::npos);
    said = said_by([](const Device &index) {
        Device x(F32, 4 * 7), losses(F32, 4), lse(F32, 4);
        kernel_table_linked()->cross_entropy_forward(F32, losses.at, lse.at, x.at, index.indices(), 4, 7);
    });
    assert_true(said.find("cross_entropy_forward" + told) != std::string::npos);
    said = said_by([](const Device &index) {
        Device logits(F32, 4 * 7), lse(F32, 4);
        cuda_kernel_cross_entropy_backward(F32, logits.at, logits.at, lse.at, index.indices(), 1, 4, 7);
    });
    assert_true(said.find("cross_entropy_backward" + told) != std::string::npos);
    said = said_by([](const Device &) {
        Device x(F32, 2 * 4), positions(I32, Doubles{0, -1});
        cuda_kernel_rope(F32, x.at, positions.indices(), 2, 1, 4, Rope{1e4, 1, 0, 0, 0}, 1);
    });
    assert_true(said.find("rope: number 1 of the positions is -1") != std::string::npos);
    const std::string choice = ": number 3 of the choices is 7, not in [0, ";
    said = said_by([](const Device &index) {
        Device tokens(I32, Doubles(4)), place(I32, Doubles(4)), counts(I32, Doubles(7));
        cuda_kernel_route_order(tokens.indices(), place.indices(), counts.indices(), index.indices(), 4, 1,
                                7);
    });
    assert_true(said.find("route_order" + choice + "7)") != std::string::npos);
    said = said_by([](const Device &index) {
        Device y(F32, 2 * 5), z(F32, 4 * 5);
        cuda_kernel_combine_forward(F32, y.at, z.at, index.indices(), NULL, 2, 2, 4, 5);
    });
    assert_true(said.find("combine_forward: number 2 of the choices is 5, not in [0, 4)") !=
                std::string::npos);
    said = said_by([](const Device &index) {
        Device dz(F32, 4 * 5), dy(F32, 2 * 5), weights(F32, 4), dweights(F32, 4);
        cuda_kernel_combine_backward(F32, dz.at, dweights.at, dy.at, dz.at, index.indices(), weights.at, 2,
                                     2, 4, 5);
    });
    assert_true(said.find("combine_backward: number ") != std::string::npos);
    said = said_by([](const Device &index) {
        Device nodes(I32, Doubles(2));
        cuda_kernel_route_nodes(nodes.indices(), index.indices(), 1, 4, 1, 8, 2);
    });
    assert_true(said.find("route_nodes: token 0 goes to 3 nodes, and 2 would fit") != std::string::npos);
    said = said_by([](const Device &index) {
        Device logits(F32, 2 * 7), weights(F32, 4);
        cuda_kernel_route_backward(F32, logits.at, weights.at, weights.at, index.indices(), logits.at, 2, 7,
                                   2, {false, 1, 1, 1});
    });
    assert_true(said.find("route_backward" + choice + "7)") != std::string::npos);
    said = said_by([](const Device &index) {
        Device left(I32, Doubles(4));
        cuda_kernel_route_capacity(left.indices(), index.indices(), 4, 2, 7, 1, 1);
    });
    assert_true(said.find("route_capacity" + choice + "7)") != std::string::npos);
    said = said_by([](const Device &index) {
        Device losses(F32, 4), logits(F32, 4 * 7);
        cuda_kernel_route_balance(F32, losses.at, logits.at, logits.at, index.indices(), 4, 2, 7, 1,
                                  {1, 0, 1}, {false, 1, 1, 1});
    });
    assert_true(said.find("route_balance" + choice + "7)") != std::string::npos);
}

// ---- elementwise ----

static const int64_t counts[] = {0, 1, 31, 33, 257, 1025, 20011};

static void fill_writes_all_and_no_more(void **state) {
    (void)state;
    for (int dtype = 0; dtype < DTYPES; dtype++)
        for (int64_t count : counts)
            for (int shift = 0; shift < 2; shift++) {
                Device y((DType)dtype, count, shift);
                cuda_kernel_fill((DType)dtype, y.at, -3, count);
                assert_same("fill", y, Doubles((size_t)count, -3));
            }
}

// Ties, both sides of them, ends of the formats, and what is no number.
static Doubles hard_numbers(int64_t count) {
    static const double few[] = {
        0.0,     -0.0,          1.00390625, 1.01171875, 1.00048828125, 1.00146484375, 65504,     65519.99,
        65520,   3.4e38,        -3.5e38,    448,        464,           57344,         6.1035e-5, 5.96e-8,
        2.98e-8, 9.2e-41,       1e-46,      INFINITY,   -INFINITY,     NAN,           0.5,       1.5,
        2.5,     -2147483648.0, 4e9,        -4e9,       16777217.0,    0.0009765,     17.0 / 16};
    Doubles x((size_t)count);
    for (int64_t i = 0; i < count; i++)
        x[(size_t)i] =
            i % 2 ? few[i / 2 % (int64_t)(sizeof few / sizeof *few)] : rng_normal(1, RNG_TEST, (uint64_t)i);
    return x;
}

static void copy_converts_as_the_host_does(void **state) {
    (void)state;
    for (int from = 0; from < DTYPES; from++)
        for (int to = 0; to < DTYPES; to++)
            for (int64_t count : {31, 257, 1025})
                for (int shift = 0; shift < 2; shift++) {
                    Doubles numbers = rounded((DType)from, hard_numbers(count)), want((size_t)count);
                    std::vector<unsigned char> in((size_t)count * 8), out((size_t)count * 8);
                    dtype_convert(in.data(), (DType)from, numbers.data(), F64, count);
                    dtype_convert(out.data(), (DType)to, in.data(), (DType)from, count);
                    dtype_convert(want.data(), F64, out.data(), (DType)to, count);
                    Device x((DType)from, numbers, shift), y((DType)to, count, 2 * shift);
                    cuda_kernel_copy((DType)to, y.at, (DType)from, x.at, count);
                    assert_same("copy", y, want);
                    assert_same("copy's x", x, numbers);
                }
}

static void sums_and_multiples_match(void **state) {
    (void)state;
    for (DType dtype : all_dtypes)
        for (int64_t count : counts)
            for (int shift = 0; shift < 2; shift++) {
                Doubles a = random_numbers(dtype, count, 1), b = random_numbers(dtype, count, 2), sum = a,
                        twice = a;
                for (size_t i = 0; i < a.size(); i++) sum[i] += b[i], twice[i] *= -1.75;
                Device x(dtype, a, shift), z(dtype, b, 2 * shift), y(dtype, count, shift);
                cuda_kernel_add(dtype, y.at, x.at, z.at, count);
                assert_close("add", y, sum, 1);
                cuda_kernel_add(dtype, z.at, x.at, z.at, count);
                assert_same("add in place", z, y.read("add"));
                cuda_kernel_scale(dtype, x.at, -1.75, count);
                assert_close("scale", x, twice, 1);
                for (DType more : all_dtypes) {
                    Doubles c = random_numbers(more, count, 3), all = a;
                    for (size_t i = 0; i < a.size(); i++) all[i] += c[i];
                    Device to(dtype, a, shift), from(more, c, shift);
                    cuda_kernel_accumulate(dtype, to.at, more, from.at, count);
                    assert_close("accumulate", to, all, 1);
                }
            }
}

static void swiglu_matches(void **state) {
    (void)state;
    for (DType dtype : all_dtypes)
        for (int64_t count : {1, 33, 1025})
            for (int shift = 0; shift < 2; shift++) {
                Doubles gate = random_numbers(dtype, count, 1), up = random_numbers(dtype, count, 2);
                Doubles dact = random_numbers(dtype, count, 3), act((size_t)count), dgate = act, dup = act;
                const double far[] = {0, 30, -30, 88, -88, 1000, -1000, NAN};
                for (size_t i = 0; i < 8 && count > 8; i++) gate[i] = far[i];
                kernel_swiglu_forward(F64, act.data(), gate.data(), up.data(), count);
                kernel_swiglu_backward(F64, dgate.data(), dup.data(), dact.data(), gate.data(), up.data(),
                                       count);
                Device g(dtype, gate, shift), u(dtype, up, shift), d(dtype, dact, shift),
                    y(dtype, count, shift);
                Device dg(dtype, count, shift), du(dtype, count, shift);
                cuda_kernel_swiglu_forward(dtype, y.at, g.at, u.at, count);
                cuda_kernel_swiglu_backward(dtype, dg.at, du.at, d.at, g.at, u.at, count);
                assert_close("swiglu_forward", y, act, 10);
                assert_close("swiglu_backward's dgate", dg, dgate, 10);
                assert_close("swiglu_backward's dup", du, dup, 10);
                cuda_kernel_swiglu_backward(dtype, g.at, u.at, d.at, g.at, u.at, count);
                assert_same("swiglu_backward in place", g, dg.read("dgate"));
                assert_same("swiglu_backward in place", u, du.read("dup"));
            }
}

static void optimizers_match(void **state) {
    (void)state;
    const AdamW hyper = {0.05, 0.9, 0.97, 0.3, 0.7, 0.6, 3};
    for (DType dtype : all_dtypes)
        for (DType grad_dtype : all_dtypes)
            for (int with = 0; with < 2; with++)
                for (int64_t count : {1, 259}) {
                    const DType wide = full(dtype);
                    const Doubles grad = random_numbers(grad_dtype, count, 1),
                                  narrow_grad = rounded(wide, grad);
                    const Doubles master = random_numbers(wide, count, 2), value = rounded(dtype, master);
                    const Doubles m = random_numbers(wide, count, 3);
                    Doubles v = m, w = with ? master : value, sgd = w, want_m = m;
                    for (double &x : v) x = fabs(x);
                    Doubles want_v = v;
                    kernel_adamw(F64, w.data(), NULL, want_m.data(), want_v.data(), F64, narrow_grad.data(),
                                 hyper, count);
                    kernel_sgd(F64, sgd.data(), NULL, F64, narrow_grad.data(), 0.3, 0.7, count);
                    in_every_way("optimizers", [&](int shift) {
                        Device g(grad_dtype, grad, shift), ms(wide, m, shift), vs(wide, v, shift);
                        Device kept(wide, master, shift), stored(dtype, value, shift);
                        Device sgd_kept(wide, master, shift), sgd_stored(dtype, value, shift);
                        cuda_kernel_adamw(dtype, stored.at, with ? kept.at : NULL, ms.at, vs.at, grad_dtype,
                                          g.at, hyper, count);
                        assert_close("adamw's value", stored, w, 12);
                        assert_close("adamw's m", ms, want_m, 4);
                        assert_close("adamw's v", vs, want_v, 5);
                        assert_close("adamw's master", kept, with ? w : master, 12);
                        if (with) assert_same("adamw's value", stored, rounded(dtype, kept.read("master")));
                        cuda_kernel_sgd(dtype, sgd_stored.at, with ? sgd_kept.at : NULL, grad_dtype, g.at,
                                        0.3, 0.7, count);
                        assert_close("sgd's value", sgd_stored, sgd, 4);
                        assert_close("sgd's master", sgd_kept, with ? sgd : master, 4);
                        std::vector<unsigned char> bits = stored.stored("adamw");
                        add_bytes(&bits, "adamw", ms);
                        add_bytes(&bits, "adamw", vs);
                        add_bytes(&bits, "sgd", sgd_stored);
                        return bits;
                    });
                }
}

// ---- sums ----

static void sums_match_in_f64(void **state) {
    (void)state;
    for (DType dtype : all_dtypes)
        for (int64_t count : {1, 31, 1025, 16384, 16385, 70001}) {
            Doubles x = random_numbers(dtype, count, 1);
            long double sum = 0, squares = 0, magnitude = 0;
            for (double v : x) sum += v, squares += (long double)v * v, magnitude += fabsl(v);
            in_every_way("sum", [&](int shift) {
                Device of(dtype, x, shift);
                const double got[] = {cuda_kernel_sum(dtype, of.at, count),
                                      cuda_kernel_sum_squares(dtype, of.at, count)};
                const double bound = (double)(count + 2) * rounding(F64);
                if (!(fabs(got[0] - (double)sum) <= bound * (double)magnitude) ||
                    !(fabs(got[1] - (double)squares) <= bound * (double)squares))
                    fail_msg("sums of %lld %s are %.17g and %.17g, expected %.17g and %.17g",
                             (long long)count, dtype_name(dtype), got[0], got[1], (double)sum,
                             (double)squares);
                Device sum_on(F64, Doubles(1, 3));
                cuda_kernel_add_sum(dtype, static_cast<double *>(sum_on.at), of.at, count, 0.5);
                assert_true(sum_on.read("sum")[0] == 3 + 0.5 * got[0]);
                const unsigned char *bytes = reinterpret_cast<const unsigned char *>(got);
                return std::vector<unsigned char>(bytes, bytes + sizeof got);
            });
        }
}

// Ranges that are empty, shorter and longer than what a block sums, and overlap. The host does not wait.
static void squares_of_ranges_match(void **state) {
    (void)state;
    const FlatRange ranges[] = {{5, 0}, {0, 31}, {31, 16384}, {7, 33000}, {16415, 16385}, {70000, 0}};
    const int n = sizeof ranges / sizeof *ranges;
    for (DType dtype : all_dtypes) {
        const Doubles x = random_numbers(dtype, 70000, 1);
        Doubles want((size_t)n);
        kernel_squares_of_ranges(F64, want.data(), x.data(), ranges, n);
        in_every_way("squares of ranges", [&](int shift) {
            Device of(dtype, x, shift), sums(F64, n);
            const int64_t waits = cuda_backend_waits();
            cuda_kernel_squares_of_ranges(dtype, static_cast<double *>(sums.at), of.at, ranges, n);
            assert_int_equal(cuda_backend_waits(), waits);
            const Doubles got = sums.read("squares");
            for (size_t i = 0; i < got.size(); i++)
                if (!(fabs(got[i] - want[i]) <= 1e-12 * want[i]))
                    fail_msg("squares of range %zu of %s are %.17g, expected %.17g", i, dtype_name(dtype),
                             got[i], want[i]);
            return sums.stored("squares");
        });
    }
}

// ---- matrix multiply ----

static void matmul_matches(void **state) {
    (void)state;
    const int64_t m = 33, n = 17, k = 65;
    for (const DType(&type)[2] : gradient_dtypes)
        for (int how = 0; how < 16; how++) {
            const DType dtype = type[0], to = type[1];
            const bool transpose_a = how & 1, transpose_b = how & 2, add = how & 4;
            const int shift = how >> 3;
            Doubles a = random_numbers(dtype, m * k, 1), b = random_numbers(dtype, k * n, 2);
            Doubles c = add ? random_numbers(to, m * n, 3) : Doubles((size_t)(m * n), NAN), want = c;
            Device x(dtype, a, shift), y(dtype, b, 2 * shift), z(to, c, shift);
            if (!add) std::fill(want.begin(), want.end(), 0);
            kernel_matmul(F64, F64, want.data(), a.data(), b.data(), m, n, k, transpose_a, transpose_b, 1);
            cuda_kernel_matmul(dtype, to, z.at, x.at, y.at, m, n, k, transpose_a, transpose_b, add);
            assert_close("matmul", z, want, (double)k + 1);
        }
}

// ---- random rounding, and 8-bit codes: exactly the codes and scales of the CPU ----

static void random_rounding_matches(void **state) {
    (void)state;
    enum { COUNT = 700 };
    // In a weight of more than 2^32 elements, of which a rank stores more than 2^32, too.
    RandomPlace place = {3, 1ull << 63 | 77, 5, 3ll << 32 | 11, 9, 5ll << 32 | 40, 20};
    Doubles numbers = random_numbers(F32, COUNT, 1);
    numbers[7] = INFINITY, numbers[8] = NAN;
    float x[COUNT];
    for (size_t i = 0; i < COUNT; i++) x[i] = (float)numbers[i];
    uint16_t codes[COUNT];
    Doubles want(COUNT);
    kernel_round_stochastic(codes, x, place, COUNT);
    dtype_convert(want.data(), F64, codes, BF16, COUNT);
    Device from(F32, numbers), to(BF16, COUNT);
    cuda_kernel_round_stochastic((uint16_t *)to.at, (const float *)from.at, place, COUNT);
    assert_same("round_stochastic", to, want);
}

static void codes_match(void **state) {
    (void)state;
    constexpr int64_t ROWS = 21, COLUMNS = 67, OTHER = 13;
    const Tile tiles[] = {{0, 0}, {1, 16}, {8, 16}};
    for (int how = 0; how < 12; how++) {
        const Tile tile = tiles[how % 3];
        const bool turned = how & 1;
        const DType dtype = all_dtypes[how % 4], kind = how % 2 ? E5M2 : E4M3;
        const ScaleRule rule = how < 6 ? SCALE_REAL : SCALE_POWER_OF_TWO;
        const int64_t rows = turned ? COLUMNS : ROWS, columns = turned ? ROWS : COLUMNS;
        Doubles x = random_numbers(dtype, ROWS * COLUMNS, 1);
        for (size_t i = 0; i < 16; i++) x[i] = 0;
        x[40] = INFINITY, x[400] = NAN;
        const Doubles bits = rounded(dtype, x);
        std::vector<unsigned char> stored((size_t)(ROWS * COLUMNS) * dtype_size(dtype));
        dtype_convert(stored.data(), dtype, bits.data(), F64, ROWS * COLUMNS);
        float amax[ROWS * COLUMNS] = {0}, scale[ROWS * COLUMNS];
        uint8_t codes[ROWS * COLUMNS];
        const int64_t across = tile.columns ? ceil((double)COLUMNS / (double)tile.columns) : 1;
        const int64_t scales = across * (tile.rows ? (ROWS + tile.rows - 1) / tile.rows : 1);
        kernel_tile_amax(dtype, amax, stored.data(), rows, columns, turned, tile);
        kernel_tile_scale(scale, amax, kind, rule, scales);
        kernel_encode(kind, codes, dtype, stored.data(), scale, rows, columns, turned, tile);
        Device from(dtype, x), most(F32, Doubles((size_t)scales, 0)), scaling(F32, scales);
        Device to(kind, ROWS * COLUMNS), back(F64, ROWS * COLUMNS);
        cuda_kernel_tile_amax(dtype, (float *)most.at, from.at, rows, columns, turned, tile);
        cuda_kernel_tile_scale((float *)scaling.at, (const float *)most.at, kind, rule, scales);
        cuda_kernel_encode(kind, (uint8_t *)to.at, dtype, from.at, (const float *)scaling.at, rows, columns,
                           turned, tile);
        cuda_kernel_decode(F64, back.at, kind, (const uint8_t *)to.at, (const float *)scaling.at, ROWS,
                           COLUMNS, tile);
        Doubles want(ROWS * COLUMNS), want_scale(scale, scale + scales), decoded(ROWS * COLUMNS);
        dtype_convert(want.data(), F64, codes, kind, ROWS * COLUMNS);
        kernel_decode(F64, decoded.data(), kind, codes, scale, ROWS, COLUMNS, tile);
        assert_same("tile_amax", most, Doubles(amax, amax + scales));
        assert_same("tile_scale", scaling, want_scale);
        assert_same("encode", to, want);
        assert_same("decode", back, decoded);
        // a b^T, of which b are some rows of a; no NaN in it
        const int64_t segment = tile.columns ? tile.columns : how < 6 ? COLUMNS : 32;
        for (uint8_t &code : codes) code = code == 0x7f || code == 0x7e ? 0x30 : code;
        // the last row of a by b: products of large and subnormal numbers cut off those of small ones
        for (int i = 0; how == 10 && i < ROWS * COLUMNS; i++)
            codes[i] = i % COLUMNS % 2 ? 0x09 : i < (ROWS - 1) * COLUMNS ? 0x01 : 0x70;
        Doubles numbers(ROWS * COLUMNS), product((size_t)(ROWS * OTHER), 1);
        dtype_convert(numbers.data(), F64, codes, kind, ROWS * COLUMNS);
        Device a(kind, numbers), c(F32, product);
        KernelCodes on_cpu = {kind, codes, scale, tile.rows ? tile.rows : ROWS,
                              tile.columns ? tile.columns : COLUMNS};
        KernelCodes on_gpu = on_cpu;
        on_gpu.codes = (const uint8_t *)a.at, on_gpu.scale = (const float *)scaling.at;
        const int cut = how >= 10 ? 14 : 0;
        kernel_matmul_codes(F64, product.data(), on_cpu, on_cpu, ROWS, OTHER, COLUMNS, segment, cut, false,
                            1);
        cuda_kernel_matmul_codes(F32, c.at, on_gpu, on_gpu, ROWS, OTHER, COLUMNS, segment, cut, false, 1);
        assert_close("matmul_codes", c, product, COLUMNS + 3);
    }
}

// float16 with scales, as moments and masters are stored: in packs, with a rest, and turned.
static void float16_with_scales_matches(void **state) {
    (void)state;
    constexpr int64_t ROWS = 21, COLUMNS = 64, COUNT = ROWS * COLUMNS;
    const Tile tiles[] = {{1, 0}, {1, 16}, {8, 5}};
    for (int how = 0; how < 12; how++) {
        const Tile tile = tiles[how % 3];
        const bool turned = how & 1;
        const DType dtype = all_dtypes[how % 4];
        const int64_t rows = turned ? COLUMNS : ROWS, columns = turned ? ROWS : COLUMNS;
        const int64_t scales = ROWS * tiles_of(COLUMNS, tile.columns);
        const Doubles x = random_numbers(dtype, COUNT, 2);
        std::vector<unsigned char> stored((size_t)COUNT * dtype_size(dtype));
        dtype_convert(stored.data(), dtype, x.data(), F64, COUNT);
        float amax[COUNT] = {0}, scale[COUNT];
        uint16_t codes[COUNT];
        kernel_tile_amax(dtype, amax, stored.data(), rows, columns, turned, tile);
        kernel_tile_scale(scale, amax, F16, SCALE_POWER_OF_TWO, scales);
        kernel_encode(F16, codes, dtype, stored.data(), scale, rows, columns, turned, tile);
        Device from(dtype, x), by(F32, Doubles(scale, scale + scales)), to(F16, COUNT), back(F64, COUNT);
        cuda_kernel_encode(F16, to.at, dtype, from.at, (const float *)by.at, rows, columns, turned, tile);
        cuda_kernel_decode(F64, back.at, F16, to.at, (const float *)by.at, ROWS, COLUMNS, tile);
        Doubles want(COUNT), decoded(COUNT);
        dtype_convert(want.data(), F64, codes, F16, COUNT);
        kernel_decode(F64, decoded.data(), F16, codes, scale, ROWS, COLUMNS, tile);
        assert_same("encode", to, want);
        assert_same("decode", back, decoded);
    }
}

// Blocks that share a tile find its largest element wherever it is, with one atomic each.
static void amax_takes_few_atomics(void **state) {
    (void)state;
    constexpr int64_t ROWS = 129, COLUMNS = 130;
    const struct {
        Tile tile;
        int64_t tiles, atomics, turned;
    } cases[] = {{{0, 0}, 1, 3, 3}, {{1, 128}, ROWS * 2, ROWS * 2, ROWS * 2}, {{128, 128}, 4, 8, 10}};
    for (int how = 0; how < 6; how++) {
        const bool turned = how & 1;
        const auto &is = cases[how / 2];
        const int64_t rows = turned ? COLUMNS : ROWS, columns = turned ? ROWS : COLUMNS;
        Doubles x = random_numbers(BF16, ROWS * COLUMNS, 7);
        std::vector<uint16_t> stored((size_t)(ROWS * COLUMNS));
        dtype_convert(stored.data(), BF16, x.data(), F64, ROWS * COLUMNS);
        std::vector<float> amax((size_t)is.tiles, 0);
        kernel_tile_amax(BF16, amax.data(), stored.data(), rows, columns, turned, is.tile);
        Device from(BF16, x), most(F32, Doubles((size_t)is.tiles));
        if (cuda_count_begin) cuda_count_begin();
        cuda_kernel_tile_amax(BF16, (float *)most.at, from.at, rows, columns, turned, is.tile);
        if (cuda_count_end_atomics)
            assert_int_equal(cuda_count_end_atomics(), turned ? is.turned : is.atomics);
        assert_same("tile_amax", most, Doubles(amax.begin(), amax.end()));
    }
}

// c (M, N) from matrices with one scale each, by cuBLASLt or, at an address that it does not accept, by the
// plain kernel; a scale that is left out, applied twice, or of the previous call shows as a power of ten.
static void codes_match_by_cublaslt(void **state) {
    (void)state;
    constexpr int64_t M = 48, N = 32, K = 80;
    const float scales[] = {1e-3f, 0.1f, 1e-2f, 10};
    const Device device_scales(F32, Doubles(scales, scales + 4));
    for (int how = 0; how < 36; how++) {
        const DType kind_a = how % 2 ? E5M2 : E4M3, kind_b = how % 4 == 2 ? E5M2 : E4M3;
        const DType dtype = all_dtypes[1 + how % 3];
        const int call = how / 12, shift = call == 2;
        const bool add = how % 12 >= 6, fast = how % 4 == 0;
        const float *scale = static_cast<float *>(device_scales.at) + 2 * (call % 2);
        const Doubles a = rounded(kind_a, random_numbers(F32, M * K, 1));
        const Doubles b = rounded(kind_b, random_numbers(F32, N * K, 2));
        const Doubles before = random_numbers(dtype, M * N, 3);
        const Device from_a(kind_a, a), from_b(kind_b, b), c(dtype, before, shift);
        const KernelCodes left = {kind_a, static_cast<uint8_t *>(from_a.at), scale, M + 1, K + 1};
        const KernelCodes right = {kind_b, static_cast<uint8_t *>(from_b.at), scale + 1, N + 1, K + 1};
        const CodesGemm g = {kind_a,      kind_b, dtype, M,         N,    K,          left.codes,
                             right.codes, c.at,   scale, scale + 1, fast, (double)add};
        if (cuda_on_cpu_order) assert_int_equal(gemm_codes_lacks(&g) == NULL, !shift);
        cuda_kernel_matmul_codes(dtype, c.at, left, right, M, N, K, K, 0, fast, add);
        Doubles want(M * N);
        for (size_t i = 0; i < want.size(); i++) {
            for (size_t k = 0; k < K; k++) want[i] += a[i / N * K + k] * b[i % N * K + k];
            want[i] *= (double)scales[2 * (call % 2)] * scales[2 * (call % 2) + 1];
            if (add) want[i] += before[i];
        }
        // a GPU's tensor cores keep 14 bits of some sums
        assert_close("matmul_codes", c, want, cuda_on_cpu_order ? K + 3 : 1 << 12);
    }
}

// Scales for tiles of (1, 128), for b of (128, 128) or (1, 128), by chapter 07's kernel; k ends within a
// tile.
static void codes_match_by_hopper(void **state) {
    (void)state;
    constexpr int64_t M = 21, K = 144, ACROSS = 2;
    for (int how = 0; how < 4; how++) {
        const DType dtype = how % 2 ? BF16 : F32;
        const int64_t N = how == 1 ? 132 : 131, rows = how < 2 ? 128 : 1, tall = (N + rows - 1) / rows;
        const Doubles a = rounded(E4M3, random_numbers(F32, M * K, 1));
        const Doubles b = rounded(E4M3, random_numbers(F32, N * K, 2));
        const Doubles scale_a = whole_numbers(M * ACROSS, 8, 3),
                      scale_b = whole_numbers(tall * ACROSS, 8, 4);
        const Device from_a(E4M3, a), from_b(E4M3, b), d_a(F32, scale_a), d_b(F32, scale_b);
        Doubles want = random_numbers(dtype, M * N, 5);
        for (double &x : want) x *= 512;  // no smaller than what is added
        const Device c(dtype, want);
        const KernelCodes left = {E4M3, (uint8_t *)from_a.at, (float *)d_a.at, 1, 128};
        const KernelCodes right = {E4M3, (uint8_t *)from_b.at, (float *)d_b.at, rows, 128};
        for (int64_t i = 0; i < M * N; i++)
            for (int64_t k = 0; k < K; k++)
                want[(size_t)i] += a[(size_t)(i / N * K + k)] * b[(size_t)(i % N * K + k)] *
                                   scale_a[(size_t)(i / N * ACROSS + k / 128)] *
                                   scale_b[(size_t)(i % N / rows * ACROSS + k / 128)];
        if (cuda_on_cpu_order)
            assert_true(matmul_codes_linked(dtype, c.at, left, right, M, N, K, 128, 0, 1));
        else cuda_kernel_matmul_codes(dtype, c.at, left, right, M, N, K, 128, 0, false, 1);
        assert_close("matmul_codes", c, want, 5 << 11);  // sums with 14 bits, of 5 products
    }
}

// Scales of amax that the random numbers above do not have, in every kind of codes and by either rule.
static void scales_match(void **state) {
    (void)state;
    const Doubles amax = {0, 1e-45, 0x1p-126, 0x1p-118, 1, 448, 57344, 65504, 3e38, INFINITY, NAN};
    const int64_t count = (int64_t)amax.size();
    for (DType kind : {E4M3, E5M2, F16})
        for (ScaleRule rule : {SCALE_REAL, SCALE_POWER_OF_TWO}) {
            const std::vector<float> from(amax.begin(), amax.end());
            std::vector<float> scale(from.size());
            const Device most(F32, amax), to(F32, count);
            kernel_tile_scale(scale.data(), from.data(), kind, rule, count);
            cuda_kernel_tile_scale((float *)to.at, (const float *)most.at, kind, rule, count);
            assert_same("tile_scale", to, Doubles(scale.begin(), scale.end()));
        }
}

// Rows and codes that begin unaligned, and matrices of less than a pack.
static void codes_match_anywhere(void **state) {
    (void)state;
    for (int how = 0; how < 16; how++) {
        const int64_t rows = how < 8 ? 3 : 1, columns = how < 8 ? 64 : 3, count = rows * columns;
        const DType dtype = all_dtypes[how % 4];
        const Doubles x = random_numbers(dtype, count, 3);
        std::vector<unsigned char> stored((size_t)count * dtype_size(dtype));
        dtype_convert(stored.data(), dtype, x.data(), F64, count);
        for (int shift = 0; shift < 4; shift++) {
            float amax = 0, scale;
            std::vector<uint8_t> codes((size_t)count);
            kernel_tile_amax(dtype, &amax, stored.data(), rows, columns, false, {0, 0});
            kernel_tile_scale(&scale, &amax, E4M3, SCALE_REAL, 1);
            kernel_encode(E4M3, codes.data(), dtype, stored.data(), &scale, rows, columns, false, {0, 0});
            const Device from(dtype, x, shift & 1), to(E4M3, count, shift / 2), most(F32, Doubles(1)),
                by(F32, Doubles(1, scale));
            cuda_kernel_tile_amax(dtype, (float *)most.at, from.at, rows, columns, false, {0, 0});
            cuda_kernel_encode(E4M3, (uint8_t *)to.at, dtype, from.at, (const float *)by.at, rows, columns,
                               false, {0, 0});
            Doubles want((size_t)count);
            dtype_convert(want.data(), F64, codes.data(), E4M3, count);
            assert_same("tile_amax", most, Doubles(1, amax));
            assert_same("encode", to, want);
        }
    }
}

// More elements than the threads of the largest grid.
static void loops_reach_the_end(void **state) {
    (void)state;
    constexpr int64_t COUNT = (1 << 14) * 256 + 300;
    const RandomPlace place = {3ull << 32 | 5, 7, 5, 0, COUNT, 0, COUNT};
    std::vector<float> x((size_t)COUNT, 1.001f);
    std::vector<uint16_t> codes((size_t)COUNT), got((size_t)COUNT);
    float *from = (float *)cuda_backend_alloc((size_t)COUNT * 4);
    uint16_t *to = (uint16_t *)cuda_backend_alloc((size_t)COUNT * 2);
    cuda_backend_from_host(from, x.data(), (size_t)COUNT * 4);
    kernel_round_stochastic(codes.data(), x.data(), place, COUNT);
    cuda_kernel_round_stochastic(to, from, place, COUNT);
    cuda_backend_to_host(got.data(), to, (size_t)COUNT * 2);
    assert_memory_equal(got.data(), codes.data(), (size_t)COUNT * 2);
    float one = 3, *scale = (float *)cuda_backend_alloc(4);
    cuda_backend_from_host(scale, &one, 4);
    uint8_t *c = (uint8_t *)cuda_backend_alloc((size_t)COUNT);
    std::vector<uint8_t> in((size_t)COUNT, 0x38);
    cuda_backend_from_host(c, in.data(), (size_t)COUNT);
    cuda_kernel_decode(F32, from, E4M3, c, scale, 1, COUNT, {0, 0});
    cuda_backend_to_host(x.data(), from, (size_t)COUNT * 4);
    for (float y : x)
        if (y != 3) fail_msg("decode: %g", y);
}

// What chapter 07's kernel cannot multiply it declines.
static void what_hopper_does_not_serve_is_declined(void **) {
    constexpr int64_t N = 16, K = 256;
    const Device a(E4M3, Doubles(N * K)), b(E4M3, Doubles(N * K)), scale(F32, Doubles(N * K)),
        c(F64, Doubles(N * N));
    const KernelCodes x = {E4M3, (uint8_t *)a.at, (float *)scale.at, 1, 128},
                      y = {E4M3, (uint8_t *)b.at, (float *)scale.at, 128, 128};
    const auto taken = [&](DType dtype, KernelCodes left, KernelCodes right, int64_t k, int64_t segment) {
        return matmul_codes_linked(dtype, c.at, left, right, N, N, k, segment, 0, 0);
    };
    const auto with = [](KernelCodes z, DType dtype, int64_t rows, int shift) {
        z.dtype = dtype, z.rows = rows, z.codes += shift;
        return z;
    };
    if (cuda_on_cpu_order) assert_true(taken(F32, x, y, K, 128));
    for (DType dtype : {F16, F64}) assert_false(taken(dtype, x, y, K, 128));
    assert_false(taken(F32, with(x, E5M2, 1, 0), y, K, 128));
    assert_false(taken(F32, x, with(y, E5M2, 128, 0), K, 128));
    assert_false(taken(F32, with(x, E4M3, 128, 0), y, K, 128));
    assert_false(taken(F32, x, with(y, E4M3, 16, 0), K, 128));
    assert_false(taken(F32, with(x, E4M3, 1, 1), y, K - 16, 128));
    assert_false(taken(F32, x, with(y, E4M3, 128, 1), K - 16, 128));
    assert_false(taken(F32, x, y, K - 8, 128));
    assert_false(taken(F32, x, y, K, 64));
    assert_false(taken(F32, x, y, K, K));
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_indices_are_told),  // first: its child processes must not have used a GPU
        cmocka_unit_test(fill_writes_all_and_no_more),
        cmocka_unit_test(copy_converts_as_the_host_does),
        cmocka_unit_test(sums_and_multiples_match),
        cmocka_unit_test(swiglu_matches),
        cmocka_unit_test(optimizers_match),
        cmocka_unit_test(sums_match_in_f64),
        cmocka_unit_test(squares_of_ranges_match),
        cmocka_unit_test(matmul_matches),
        cmocka_unit_test(random_rounding_matches),
        cmocka_unit_test(codes_match),
        cmocka_unit_test(scales_match),
        cmocka_unit_test(codes_match_anywhere),
        cmocka_unit_test(loops_reach_the_end),
        cmocka_unit_test(float16_with_scales_matches),
        cmocka_unit_test(amax_takes_few_atomics),
        cmocka_unit_test(codes_match_by_cublaslt),
        cmocka_unit_test(codes_match_by_hopper),
        cmocka_unit_test(what_hopper_does_not_serve_is_declined),
    };
    return cmocka_run_group_tests_name("ops_cuda", tests, NULL, NULL);
}
