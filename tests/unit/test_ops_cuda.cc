// test_ops_cuda.cc: every kernel of the CUDA back end against the same kernel of the CPU's, computed in
// f64: in all dtypes, at sizes around those of warps, packs, blocks and of shared memory, from
// addresses that packs fit and that they do not. Outputs lie in red zones that must stay as they were.
// On the CPU the threads run in several orders, and the bits must not depend on it.
//
// The kernels of the CUDA back end have "cuda_" before their names here.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tensor/device.h"
#include "tensor/kernels.h"
// need those above, and to be told that they are C
extern "C" {
#include <cmocka.h>

#include "tensor/rng.h"
}

extern "C" {
#define CUDA(name) extern decltype(name) cuda_##name;
CUDA(backend_alloc)
CUDA(backend_free)
CUDA(backend_from_host)
CUDA(backend_to_host)
CUDA(kernel_fill)
CUDA(kernel_copy)
CUDA(kernel_add)
CUDA(kernel_accumulate)
CUDA(kernel_scale)
CUDA(kernel_sum)
CUDA(kernel_sum_squares)
CUDA(kernel_add_sum)
CUDA(kernel_add_sum_squares)
CUDA(kernel_matmul)
CUDA(kernel_embedding_forward)
CUDA(kernel_embedding_backward)
CUDA(kernel_rmsnorm_forward)
CUDA(kernel_rmsnorm_backward)
CUDA(kernel_rope)
CUDA(kernel_attention_forward)
CUDA(kernel_attention_probs)
CUDA(kernel_attention_backward)
CUDA(kernel_attention_chunk_forward)
CUDA(kernel_attention_chunk_dots)
CUDA(kernel_attention_chunk_backward)
CUDA(kernel_swiglu_forward)
CUDA(kernel_swiglu_backward)
CUDA(kernel_cross_entropy_forward)
CUDA(kernel_cross_entropy_backward)
CUDA(kernel_route_forward)
CUDA(kernel_route_backward)
CUDA(kernel_route_balance)
CUDA(kernel_route_capacity)
CUDA(kernel_route_order)
CUDA(kernel_route_nodes)
CUDA(kernel_route_within)
CUDA(kernel_combine_forward)
CUDA(kernel_combine_backward)
CUDA(kernel_adamw)
CUDA(kernel_sgd)
CUDA(kernel_round_stochastic)
CUDA(kernel_tile_amax)
CUDA(kernel_tile_scale)
CUDA(kernel_encode)
CUDA(kernel_decode)
CUDA(kernel_matmul_codes)
}

// Of CUDA on the CPU; a GPU has no such thing.
void cuda_on_cpu_order(uint64_t seed) __attribute__((weak));

// ---- arrays on both sides ----

typedef std::vector<double> Doubles;

static const DType dtypes[] = {F64, F32, BF16, F16};
static DType full(DType dtype) { return dtype == F64 ? F64 : F32; }
static bool is_narrow(DType dtype) { return dtype == BF16 || dtype == F16; }

// What rounding to nearest may change, relative; in f16 also a little below its smallest normal number.
static double rounding(DType dtype) {
    return dtype == F64 ? 0x1p-53 : dtype == F32 ? 0x1p-24 : dtype == BF16 ? 0x1p-8 : 0x1p-11;
}

static Doubles rounded(DType dtype, const Doubles &x) {
    std::vector<unsigned char> stored(x.size() * dtype_size(dtype) + 1);
    Doubles back(x.size());
    dtype_convert(stored.data(), dtype, x.data(), F64, (int64_t)x.size());
    dtype_convert(back.data(), F64, stored.data(), dtype, (int64_t)x.size());
    return back;
}

static Doubles random_numbers(DType dtype, int64_t count, uint64_t key) {
    Doubles x((size_t)count);
    for (int64_t i = 0; i < count; i++) x[(size_t)i] = rng_normal(key, RNG_TEST, (uint64_t)i);
    return rounded(dtype, x);
}

static Doubles whole_numbers(int64_t count, int64_t limit, uint64_t key) {
    Doubles x((size_t)count);
    for (int64_t i = 0; i < count; i++)
        x[(size_t)i] = (double)(rng_bits(key, RNG_TEST, (uint64_t)i) % (uint64_t)limit);
    return x;
}

// An array in device memory, `shift` elements behind an address that packs fit, with red zones on both
// sides.
struct Device {
    enum { ZONE = 64, RED = 0xa5 };
    DType dtype;
    int64_t count, bytes;
    char *memory;
    void *at;

    Device(DType dtype, const Doubles &x, int shift = 0) : dtype(dtype), count((int64_t)x.size()) {
        int64_t size = (int64_t)dtype_size(dtype), before = ZONE + shift * size;
        bytes = before + count * size + ZONE;
        memory = static_cast<char *>(cuda_backend_alloc((size_t)bytes));
        at = memory + before;
        std::vector<unsigned char> host((size_t)bytes, RED);
        dtype_convert(&host[(size_t)before], dtype, x.data(), F64, count);
        cuda_backend_from_host(memory, host.data(), (size_t)bytes);
    }
    // poisoned
    Device(DType dtype, int64_t count, int shift = 0) : Device(dtype, Doubles((size_t)count, NAN), shift) {}
    Device(const Device &) = delete;
    ~Device() { cuda_backend_free(memory); }

    std::vector<unsigned char> stored(const char *what) const {
        std::vector<unsigned char> host((size_t)bytes);
        cuda_backend_to_host(host.data(), memory, (size_t)bytes);
        int64_t first = static_cast<char *>(at) - memory, end = first + count * (int64_t)dtype_size(dtype);
        for (int64_t i = 0; i < bytes; i++)
            if ((i < first || i >= end) && host[(size_t)i] != RED)
                fail_msg("%s: byte %lld %s the %lld %s was written", what,
                         (long long)(i < first ? first - i : i - end), i < first ? "before" : "behind",
                         (long long)count, dtype_name(dtype));
        return std::vector<unsigned char>(host.begin() + first, host.begin() + end);
    }
    Doubles read(const char *what) const {
        Doubles x((size_t)count);
        dtype_convert(x.data(), F64, stored(what).data(), dtype, count);
        return x;
    }
    int32_t *indices() const { return static_cast<int32_t *>(at); }
};

static std::vector<int32_t> indices(const Doubles &x) { return std::vector<int32_t>(x.begin(), x.end()); }

// ---- how close ----

// The result is rounded once to its dtype and was reached in `roundings` steps of the arithmetic. Both
// the largest error, against the largest value, and the whole, in L2, stay within that. NaN and
// infinity must be where they are expected.
static void assert_close(const char *what, const Device &got, const Doubles &want, double roundings) {
    const Doubles x = got.read(what);
    const double bound = rounding(got.dtype) + roundings * (rounding(full(got.dtype)) + rounding(F64));
    const double tiny = got.dtype == F16 ? 0x1p-25 : 0;
    double largest = 0, error = 0, norm = 0, error_norm = 0;
    size_t worst = 0;
    for (size_t i = 0; i < x.size(); i++) {
        if (isnan(want[i]) && isnan(x[i])) continue;
        if (isinf(want[i]) && x[i] == want[i]) continue;
        double e = fabs(x[i] - want[i]);
        if (!(e <= error)) error = e, worst = i;
        largest = std::max(largest, fabs(want[i]));
        norm += want[i] * want[i];
        error_norm += e * e;
    }
    if (!(error <= bound * largest + tiny) ||
        !(sqrt(error_norm) <= bound * sqrt(norm) + tiny * sqrt((double)x.size())))
        fail_msg("%s: element %zu of %zu %s is %.9g, expected %.9g; error %.3g in L2, bound %.3g", what,
                 worst, x.size(), dtype_name(got.dtype), x[worst], want[worst], sqrt(error_norm / norm),
                 bound);
}

static void assert_same(const char *what, const Device &got, const Doubles &want) {
    const Doubles x = got.read(what);
    for (size_t i = 0; i < x.size(); i++)
        if (!(x[i] == want[i] || (isnan(x[i]) && isnan(want[i]))))
            fail_msg("%s: element %zu of %zu %s is %.17g, expected %.17g", what, i, x.size(),
                     dtype_name(got.dtype), x[i], want[i]);
}

// Runs f(shift) for addresses that packs fit and that they do not, and in several orders of threads. It
// returns bytes; all runs must return the same. `multiplies`: but on a GPU not from other addresses, since
// cuBLASLt has other kernels for those.
template <class F>
static void in_every_way(const char *what, F f, bool multiplies = false) {
    std::vector<unsigned char> first;
    static const char *const ways[] = {"", "from an odd address", "in another order of threads"};
    for (int way = 0; way < 3; way++) {
        if (cuda_on_cpu_order) cuda_on_cpu_order(way == 2 ? 1234567 : 0);
        std::vector<unsigned char> bytes = f(way == 1);
        if (way == 0) first = bytes;
        else if (bytes != first && !(multiplies && way == 1 && !cuda_on_cpu_order))
            fail_msg("%s: other bits %s", what, ways[way]);
    }
    if (cuda_on_cpu_order) cuda_on_cpu_order(0);
}

static void add_bytes(std::vector<unsigned char> *all, const char *what, const Device &of) {
    std::vector<unsigned char> more = of.stored(what);
    all->insert(all->end(), more.begin(), more.end());
}

// ---- wrong indices ----

// What `wrong` says on stderr, in a process of its own, when the host next waits for the device.
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
        cuda_kernel_embedding_backward(F32, table.at, dy.at, index.indices(), 4, 7, 5);
    });
    assert_true(said.find("embedding_backward" + told) != std::string::npos);
    said = said_by([](const Device &index) {
        Device logits(F32, 4 * 7), losses(F32, 4), lse(F32, 4);
        cuda_kernel_cross_entropy_forward(F32, losses.at, lse.at, logits.at, index.indices(), 4, 7);
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
    for (DType dtype : dtypes)
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
                for (DType more : dtypes) {
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
    for (DType dtype : dtypes)
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
    for (DType dtype : dtypes)
        for (DType grad_dtype : dtypes)
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
    for (DType dtype : dtypes)
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
                Device sum_on(F64, Doubles(1, 3)), squares_on(F64, Doubles(1, 0.25));
                cuda_kernel_add_sum(dtype, static_cast<double *>(sum_on.at), of.at, count, 0.5);
                cuda_kernel_add_sum_squares(dtype, static_cast<double *>(squares_on.at), of.at, count);
                assert_true(sum_on.read("sum")[0] == 3 + 0.5 * got[0]);
                assert_true(squares_on.read("squares")[0] == 0.25 + got[1]);
                const unsigned char *bytes = reinterpret_cast<const unsigned char *>(got);
                return std::vector<unsigned char>(bytes, bytes + sizeof got);
            });
        }
}

// ---- matrix multiply ----

static void matmul_matches(void **state) {
    (void)state;
    const int64_t m = 33, n = 17, k = 65;
    for (DType dtype : dtypes)
        for (int how = 0; how < 16; how++) {
            const bool transpose_a = how & 1, transpose_b = how & 2, add = how & 4;
            const int shift = how >> 3;
            Doubles a = random_numbers(dtype, m * k, 1), b = random_numbers(dtype, k * n, 2);
            Doubles c = add ? random_numbers(dtype, m * n, 3) : Doubles((size_t)(m * n), NAN), want = c;
            Device x(dtype, a, shift), y(dtype, b, 2 * shift), z(dtype, c, shift);
            if (!add) std::fill(want.begin(), want.end(), 0);
            kernel_matmul(F64, want.data(), a.data(), b.data(), m, n, k, transpose_a, transpose_b, 1);
            cuda_kernel_matmul(dtype, z.at, x.at, y.at, m, n, k, transpose_a, transpose_b, add);
            assert_close("matmul", z, want, (double)k + 1);
        }
}

// ---- random rounding, and 8-bit codes: the very codes and scales of the CPU ----

static void random_rounding_matches(void **state) {
    (void)state;
    enum { COUNT = 700 };
    RandomPlace place = {3, 1ull << 63 | 77, 5, 11, 9, 40, 20};
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
        const DType dtype = dtypes[how % 4], kind = how % 2 ? E5M2 : E4M3;
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
        Doubles numbers(ROWS * COLUMNS), product((size_t)(ROWS * OTHER), 1);
        dtype_convert(numbers.data(), F64, codes, kind, ROWS * COLUMNS);
        Device a(kind, numbers), c(F32, product);
        KernelCodes on_cpu = {kind, codes, scale, tile.rows ? tile.rows : ROWS,
                              tile.columns ? tile.columns : COLUMNS};
        KernelCodes on_gpu = on_cpu;
        on_gpu.codes = (const uint8_t *)a.at, on_gpu.scale = (const float *)scaling.at;
        const int cut = how == 11 ? 14 : 0;
        kernel_matmul_codes(F64, product.data(), on_cpu, on_cpu, ROWS, OTHER, COLUMNS, segment, cut, 1);
        cuda_kernel_matmul_codes(F32, c.at, on_gpu, on_gpu, ROWS, OTHER, COLUMNS, segment, cut, 1);
        assert_close("matmul_codes", c, product, cut ? 1 << 11 : COLUMNS + 3);
    }
}

// ---- embedding ----

static void embedding_matches(void **state) {
    (void)state;
    // rows, vocabulary, columns: tokens that repeat, one token alone, tokens that hardly do
    const int64_t sizes[][3] = {{1, 1, 1},        {33, 5, 31},   {1027, 3, 33},
                                {129, 1031, 257}, {65, 1, 1025}, {70, 9, 4099}};
    for (const int64_t *size : sizes)
        for (DType dtype : dtypes) {
            const int64_t n = size[0], v = size[1], h = size[2];
            const Doubles tokens = whole_numbers(n, v, 1), weight = random_numbers(dtype, v * h, 2);
            const Doubles dy = random_numbers(dtype, n * h, 3);
            const std::vector<int32_t> ids = indices(tokens);
            Doubles y((size_t)(n * h));
            // In order of the rows, in f32 or f64, rounded once: the very bits of the CPU.
            std::vector<unsigned char> host((size_t)(v * h) * 8), from((size_t)(n * h) * 8);
            Doubles dweight((size_t)(v * h));
            dtype_convert(host.data(), dtype, weight.data(), F64, v * h);
            dtype_convert(from.data(), dtype, dy.data(), F64, n * h);
            kernel_embedding_forward(F64, y.data(), ids.data(), weight.data(), n, v, h);
            kernel_embedding_backward(dtype, host.data(), from.data(), ids.data(), n, v, h);
            dtype_convert(dweight.data(), F64, host.data(), dtype, v * h);
            in_every_way("embedding", [&](int shift) {
                Device table(dtype, weight, shift), id(I32, tokens, shift), out(dtype, n * h, shift);
                Device grad(dtype, dy, shift);
                cuda_kernel_embedding_forward(dtype, out.at, id.indices(), table.at, n, v, h);
                assert_same("embedding_forward", out, y);
                cuda_kernel_embedding_backward(dtype, table.at, grad.at, id.indices(), n, v, h);
                assert_same("embedding_backward", table, dweight);
                return table.stored("embedding_backward");
            });
        }
}

// ---- RMSNorm ----

static void rmsnorm_matches(void **state) {
    (void)state;
    // Columns around warps and packs, and more than shared memory holds: of a row; of a row's sums in
    // f32. Rows that share a block.
    const int64_t sizes[][2] = {{1, 1}, {3, 31}, {33, 33}, {5, 1025}, {1027, 67}, {2, 13001}, {1, 26000}};
    for (const int64_t *size : sizes)
        for (DType dtype : dtypes) {
            const int64_t n = size[0], h = size[1];
            if (n > 1000 && is_narrow(dtype)) continue;
            if (h > 2000 && dtype != F32 && dtype != BF16) continue;
            const DType wide = full(dtype);
            const double eps = 0.75;
            Doubles x = random_numbers(dtype, n * h, 1), weight = random_numbers(dtype, h, 2);
            Doubles dy = random_numbers(dtype, n * h, 3), dresidual = random_numbers(dtype, n * h, 4);
            Doubles sum = random_numbers(dtype, h, 5), y((size_t)(n * h)), rstd((size_t)n), dx = y,
                    dx_alone = y;
            Doubles dweight = sum, dweight_alone = sum;
            kernel_rmsnorm_forward(F64, y.data(), rstd.data(), x.data(), weight.data(), n, h, eps);
            Doubles r = rounded(wide, rstd);
            kernel_rmsnorm_backward(F64, dx.data(), dweight.data(), dresidual.data(), dy.data(), x.data(),
                                    weight.data(), r.data(), n, h);
            kernel_rmsnorm_backward(F64, dx_alone.data(), dweight_alone.data(), NULL, dy.data(), x.data(),
                                    weight.data(), r.data(), n, h);
            in_every_way("rmsnorm", [&](int shift) {
                Device xs(dtype, x, shift), ws(dtype, weight, shift), out(dtype, n * h, shift),
                    rs(wide, n, shift);
                cuda_kernel_rmsnorm_forward(dtype, out.at, rs.at, xs.at, ws.at, n, h, eps);
                assert_close("rmsnorm_forward's y", out, y, (double)h + 6);
                assert_close("rmsnorm_forward's rstd", rs, rstd, (double)h + 4);
                Device given(wide, r, shift), dys(dtype, dy, shift), residual(dtype, dresidual, shift);
                Device dw(dtype, sum, shift), dw_alone(dtype, sum, shift), d(dtype, n * h, shift);
                cuda_kernel_rmsnorm_backward(dtype, d.at, dw.at, residual.at, dys.at, xs.at, ws.at,
                                             given.at, n, h);
                // For h = 1 the two terms of dx are nearly equal: 1 - r^2 x^2 loses what they share.
                assert_close("rmsnorm_backward's dx", d, dx, 8 * ((double)h + 8));
                assert_close("rmsnorm_backward's dweight", dw, dweight, (double)n + 4);
                std::vector<unsigned char> bits = out.stored("rmsnorm_forward");
                add_bytes(&bits, "rmsnorm_backward", d);
                add_bytes(&bits, "rmsnorm_backward", dw);
                // dx over dresidual, and without one over dy
                cuda_kernel_rmsnorm_backward(dtype, residual.at, dw_alone.at, residual.at, dys.at, xs.at,
                                             ws.at, given.at, n, h);
                assert_same("rmsnorm_backward over dresidual", residual, d.read("dx"));
                assert_same("rmsnorm_backward's dweight", dw_alone, dw.read("dweight"));
                cuda_kernel_rmsnorm_backward(dtype, dys.at, dw_alone.at, NULL, dys.at, xs.at, ws.at,
                                             given.at, n, h);
                assert_close("rmsnorm_backward over dy", dys, dx_alone, 8 * ((double)h + 8));
                return bits;
            });
        }
}

// ---- RoPE ----

static void rope_matches(void **state) {
    (void)state;
    const int64_t sizes[][3] = {{1, 1, 2}, {3, 5, 6}, {17, 3, 34}, {65, 9, 64}, {33, 2, 128}};
    for (const int64_t *size : sizes)
        for (DType dtype : dtypes)
            for (int shift = 0; shift < 2; shift++) {
                const int64_t n = size[0], heads = size[1], d = size[2];
                Doubles x = random_numbers(dtype, n * heads * d, 1), positions = whole_numbers(n, 5003, 2),
                        want = x;
                Device at(I32, positions, shift), to(dtype, x, shift);
                const int direction = shift ? -1 : 1;
                const Rope rope = {500000, n == 3 ? 8.0 : 1.0, 1, 4, 40};
                kernel_rope(F64, want.data(), indices(positions).data(), n, heads, d, rope, direction);
                cuda_kernel_rope(dtype, to.at, at.indices(), n, heads, d, rope, direction);
                assert_close("rope", to, want, dtype == F64 ? 8 : 4);
            }
}

// ---- attention ----

static void attention_matches(void **state) {
    (void)state;
    const AttentionShape shapes[] = {
        {1, 1, 1, 1, 1}, {2, 31, 6, 2, 17}, {1, 65, 3, 3, 64}, {1, 271, 2, 1, 8}};
    for (const AttentionShape &s : shapes)
        for (DType dtype : dtypes) {
            if (s.s > 100 && dtype != BF16 && dtype != F64) continue;
            const int64_t n = s.b * s.s, a = s.heads * s.head_size, kv = s.kv_heads * s.head_size;
            const int64_t pairs = s.b * s.heads * s.s * s.s;
            Doubles q = random_numbers(dtype, n * a, 1), k = random_numbers(dtype, n * kv, 2);
            Doubles v = random_numbers(dtype, n * kv, 3), d_o = random_numbers(dtype, n * a, 4);
            Doubles o((size_t)(n * a)), p((size_t)pairs), dq = o, dk((size_t)(n * kv)), dv = dk;
            kernel_attention_forward(F64, o.data(), p.data(), q.data(), k.data(), v.data(), s);
            // Above the diagonal a back end may leave what it likes.
            auto clear = [&](Doubles &probs) {
                for (int64_t i = 0; i < pairs; i++)
                    if (i % s.s > i / s.s % s.s) probs[(size_t)i] = 0;
            };
            clear(p);
            Doubles stored_p = rounded(dtype, p);
            kernel_attention_backward(F64, dq.data(), dk.data(), dv.data(), d_o.data(), q.data(), k.data(),
                                      v.data(), stored_p.data(), s);
            // A score errs by d of its own roundings; 16-bit operands are rounded once more.
            const double operand = is_narrow(dtype) ? rounding(dtype) / rounding(F32) : 0;
            const double roundings = 8 * ((double)s.head_size + 2) + (double)s.s;
            const double backward = 4 * ((double)(s.s + s.head_size) + 2) + operand;
            in_every_way(
                "attention",
                [&](int shift) {
                    Device qs(dtype, q, shift), ks(dtype, k, shift), vs(dtype, v, shift),
                        dos(dtype, d_o, shift);
                    Device os(dtype, n * a, shift), ps(dtype, pairs, shift), again(dtype, pairs, shift);
                    cuda_kernel_attention_forward(dtype, os.at, ps.at, qs.at, ks.at, vs.at, s);
                    assert_close("attention_forward's o", os, o, roundings + operand);
                    Doubles got = ps.read("probs");
                    clear(got);
                    assert_close("attention_forward's probs", Device(dtype, got), p, roundings);
                    cuda_kernel_attention_probs(dtype, again.at, qs.at, ks.at, s);
                    Doubles twice = again.read("probs");
                    clear(twice);
                    if (twice != got) fail_msg("attention_probs and attention_forward have other bits");
                    Device given(dtype, stored_p, shift), dqs(dtype, n * a, shift);
                    Device dks(dtype, n * kv, shift), dvs(dtype, n * kv, shift);
                    cuda_kernel_attention_backward(dtype, dqs.at, dks.at, dvs.at, dos.at, qs.at, ks.at,
                                                   vs.at, given.at, s);
                    assert_close("attention_backward's dv", dvs, dv, backward);
                    if (s.s > 1) {  // a single token has no gradient but that of v
                        assert_close("attention_backward's dq", dqs, dq, backward);
                        assert_close("attention_backward's dk", dks, dk, backward);
                    }
                    cuda_kernel_attention_backward(dtype, qs.at, ks.at, vs.at, dos.at, qs.at, ks.at, vs.at,
                                                   given.at, s);
                    assert_same("attention_backward over q", qs, dqs.read("dq"));
                    assert_same("attention_backward over k", ks, dks.read("dk"));
                    assert_same("attention_backward over v", vs, dvs.read("dv"));
                    std::vector<unsigned char> bits = os.stored("attention_forward");
                    add_bytes(&bits, "attention_backward", dqs);
                    add_bytes(&bits, "attention_backward", dks);
                    return bits;
                },
                true);
        }
}

// ---- attention over a part of the keys ----

// Positions of one sample, in order from `first` on; documents of 50 tokens.
struct Side {
    std::vector<int32_t> positions, documents, bounds;
    int64_t s, tiles;

    Side(int64_t s, int32_t first) : s(s), tiles((s + ATTENTION_TILE - 1) / ATTENTION_TILE) {
        for (int64_t i = 0; i < s; i++) {
            positions.push_back(first + (int32_t)i);
            documents.push_back(positions.back() / 50);
        }
        for (int64_t i = 0; i < s; i += ATTENTION_TILE) {
            const size_t last = (size_t)std::min(i + ATTENTION_TILE, s) - 1;
            const int32_t tile[] = {positions[(size_t)i], positions[last], documents[(size_t)i],
                                    documents[last]};
            bounds.insert(bounds.end(), tile, tile + 4);
        }
    }
    ChunkTokens tokens(const void *positions, const void *documents, const void *bounds) const {
        return {s, tiles, (const int32_t *)positions, (const int32_t *)documents,
                (const TileBounds *)bounds};
    }
    ChunkTokens on_host() const { return tokens(positions.data(), documents.data(), bounds.data()); }
};

static Doubles numbers(const std::vector<int32_t> &x) { return Doubles(x.begin(), x.end()); }

static void attention_chunk_matches(void **state) {
    (void)state;
    const struct {
        int64_t s_q, s_k, heads, kv_heads, d;
    } shapes[] = {{1, 1, 1, 1, 1}, {65, 33, 2, 1, 5}, {31, 129, 3, 3, 64}};
    for (const auto &shape : shapes)
        for (DType dtype : dtypes) {
            // Queries come in the middle of the keys: some see none of a tile, some all.
            const Side sq(shape.s_q, (int32_t)(shape.s_k / 2)), sk(shape.s_k, 0);
            const AttentionChunk at = {1, shape.heads, shape.kv_heads, shape.d, sq.on_host(), sk.on_host()};
            const AttentionHeads heads = {shape.heads, shape.kv_heads, shape.d};
            const int64_t rows = shape.s_q * shape.heads, queries = rows * shape.d;
            const int64_t keys = shape.s_k * shape.kv_heads * shape.d;
            Doubles q = random_numbers(dtype, queries, 1), k = random_numbers(dtype, keys, 2);
            Doubles v = random_numbers(dtype, keys, 3), d_o = random_numbers(dtype, queries, 4);
            // What an earlier chunk left
            Doubles o = random_numbers(full(dtype), queries, 5), lse = random_numbers(full(dtype), rows, 6);
            Doubles dq = random_numbers(full(dtype), queries, 7), dk = random_numbers(full(dtype), keys, 8);
            Doubles dv = random_numbers(full(dtype), keys, 9), dots((size_t)rows);
            const Doubles before[] = {o, lse, dq, dk, dv};
            kernel_attention_chunk_forward(F64, o.data(), lse.data(), q.data(), k.data(), v.data(), at);
            kernel_attention_chunk_dots(F64, dots.data(), F64, o.data(), d_o.data(), shape.s_q, heads);
            kernel_attention_chunk_backward(F64, dq.data(), dk.data(), dv.data(), d_o.data(), q.data(),
                                            k.data(), v.data(), lse.data(), dots.data(), at);
            const double roundings = 8 * ((double)shape.d + 2) + (double)(shape.s_k + shape.s_q);
            in_every_way(
                "attention_chunk",
                [&](int shift) {
                    Device qp(I32, numbers(sq.positions)), qd(I32, numbers(sq.documents));
                    Device kp(I32, numbers(sk.positions)), kd(I32, numbers(sk.documents));
                    Device qb(I32, numbers(sq.bounds)), kb(I32, numbers(sk.bounds));
                    AttentionChunk there = at;
                    there.queries = sq.tokens(qp.at, qd.at, qb.at);
                    there.keys = sk.tokens(kp.at, kd.at, kb.at);
                    Device qs(dtype, q, shift), ks(dtype, k, shift), vs(dtype, v, shift),
                        dos(dtype, d_o, shift);
                    Device os(full(dtype), before[0], shift), ls(full(dtype), before[1], shift);
                    cuda_kernel_attention_chunk_forward(dtype, os.at, ls.at, qs.at, ks.at, vs.at, there);
                    assert_close("attention_chunk_forward's o", os, o, roundings);
                    assert_close("attention_chunk_forward's lse", ls, lse, roundings);
                    Device ds(full(dtype), rows, shift), dqs(full(dtype), before[2], shift);
                    Device dks(full(dtype), before[3], shift), dvs(full(dtype), before[4], shift);
                    cuda_kernel_attention_chunk_dots(dtype, ds.at, full(dtype), os.at, dos.at, shape.s_q,
                                                     heads);
                    assert_close("attention_chunk_dots", ds, dots, 4 * roundings);
                    cuda_kernel_attention_chunk_backward(dtype, dqs.at, dks.at, dvs.at, dos.at, qs.at,
                                                         ks.at, vs.at, ls.at, ds.at, there);
                    assert_close("attention_chunk_backward's dq", dqs, dq, 4 * roundings);
                    assert_close("attention_chunk_backward's dk", dks, dk, 4 * roundings);
                    assert_close("attention_chunk_backward's dv", dvs, dv, 4 * roundings);
                    std::vector<unsigned char> bits = os.stored("attention_chunk_forward");
                    add_bytes(&bits, "attention_chunk_backward", dqs);
                    add_bytes(&bits, "attention_chunk_backward", dks);
                    return bits;
                },
                true);
        }
}

// ---- mixture of experts ----

// n tokens, e experts, k for each, columns; tokens fewer and more than threads of a block
static const struct ExpertSizes {
    int64_t n, e, k, h;
    RouteRule rule;
} expert_sizes[] = {{1, 1, 1, 1, {false, 1, 1, 1}},
                    {33, 8, 2, 300, {false, 1, 1, 1}},
                    {700, 5, 3, 70, {false, 1, 1, 1}},
                    {257, 16, 4, 33, {true, 4, 2, 2.5}}};

static void routing_matches(void **state) {
    (void)state;
    for (const ExpertSizes &s : expert_sizes)
        for (DType dtype : {F64, F32}) {
            const int64_t pairs = s.n * s.k;
            const Doubles logits = random_numbers(dtype, s.n * s.e, 1),
                          bias = random_numbers(dtype, s.e, 2);
            const Doubles dweights = random_numbers(dtype, pairs, 3);
            std::vector<int32_t> chosen((size_t)pairs), tokens((size_t)pairs), place((size_t)pairs),
                counts((size_t)s.e);
            Doubles weights((size_t)pairs), dlogits((size_t)(s.n * s.e));
            const double *biased = s.rule.by_sigmoid ? bias.data() : NULL;
            kernel_route_forward(F64, chosen.data(), weights.data(), logits.data(), biased, s.n, s.e, s.k,
                                 s.rule);
            kernel_route_backward(F64, dlogits.data(), dweights.data(), weights.data(), chosen.data(),
                                  logits.data(), s.n, s.e, s.k, s.rule);
            kernel_route_order(tokens.data(), place.data(), counts.data(), chosen.data(), s.n, s.k, s.e);
            // Of one sequence, and of as many as there are tokens.
            const int64_t lengths[] = {s.n, 1}, room = s.n * s.k / (2 * s.e) + 1;
            std::vector<int32_t> left[2] = {chosen, chosen};
            for (int i = 0; i < 2; i++)
                kernel_route_capacity(left[i].data(), chosen.data(), s.n, lengths[i], s.e, s.k, room);
            // Pairs of experts in a node, and those of the second node.
            const int64_t each = s.e % 2 ? 1 : 2;
            std::vector<int32_t> nodes = chosen, within = chosen;
            kernel_route_nodes(nodes.data(), chosen.data(), s.n, s.k, each, s.e / each, s.k);
            kernel_route_within(within.data(), chosen.data(), pairs, each, each);
            in_every_way("route", [&](int shift) {
                Device l(dtype, logits, shift), b(dtype, bias, shift), dw(dtype, dweights, shift);
                Device w(dtype, pairs, shift), dl(dtype, s.n * s.e, shift),
                    c(I32, Doubles((size_t)pairs, -1));
                Device t(I32, Doubles((size_t)pairs, -1)), p(I32, Doubles((size_t)pairs, -1)),
                    r(I32, Doubles((size_t)s.e, -1));
                cuda_kernel_route_forward(dtype, c.indices(), w.at, l.at, biased ? b.at : NULL, s.n, s.e,
                                          s.k, s.rule);
                assert_same("route_forward's chosen", c, numbers(chosen));
                assert_close("route_forward's weights", w, weights, 16 + (double)s.k);
                cuda_kernel_route_backward(dtype, dl.at, dw.at, w.at, c.indices(), l.at, s.n, s.e, s.k,
                                           s.rule);
                assert_close("route_backward", dl, dlogits, 32 + 4 * (double)s.k);
                cuda_kernel_route_order(t.indices(), p.indices(), r.indices(), c.indices(), s.n, s.k, s.e);
                assert_same("route_order's tokens", t, numbers(tokens));
                assert_same("route_order's place", p, numbers(place));
                assert_same("route_order's counts", r, numbers(counts));
                for (int i = 0; i < 2; i++) {
                    Device few(I32, Doubles((size_t)pairs, -1));
                    cuda_kernel_route_capacity(few.indices(), c.indices(), s.n, lengths[i], s.e, s.k, room);
                    assert_same("route_capacity", few, numbers(left[i]));
                }
                Device at(I32, Doubles((size_t)pairs, -1)), in(I32, Doubles((size_t)pairs, -1));
                cuda_kernel_route_nodes(at.indices(), c.indices(), s.n, s.k, each, s.e / each, s.k);
                assert_same("route_nodes", at, numbers(nodes));
                cuda_kernel_route_within(in.indices(), c.indices(), pairs, each, each);
                assert_same("route_within", in, numbers(within));
                std::vector<unsigned char> bits = w.stored("route_forward");
                add_bytes(&bits, "route_backward", dl);
                return bits;
            });
        }
}

static void balance_matches(void **state) {
    (void)state;
    // sequences, tokens of each; experts and how many each token takes, as above
    const int64_t shapes[][2] = {{1, 1}, {3, 11}, {2, 350}, {1, 257}};
    for (int i = 0; i < 4; i++)
        for (DType dtype : {F64, F32}) {
            const ExpertSizes &s = expert_sizes[i];
            const int64_t n = shapes[i][0] * shapes[i][1], count = n * s.e;
            const Doubles logits = random_numbers(dtype, count, 1),
                          before = random_numbers(dtype, count, 2);
            const Doubles choices = whole_numbers(n * s.k, s.e, 3);
            const BalanceRule balance = {0.3, s.rule.by_sigmoid ? 0 : 0.1, 2};
            Doubles losses((size_t)n), dlogits = before;
            kernel_route_balance(F64, losses.data(), dlogits.data(), logits.data(), indices(choices).data(),
                                 n, shapes[i][1], s.e, s.k, balance, s.rule);
            in_every_way("route_balance", [&](int shift) {
                Device l(dtype, logits, shift), d(dtype, before, shift), c(I32, choices),
                    x(dtype, n, shift);
                cuda_kernel_route_balance(dtype, x.at, d.at, l.at, c.indices(), n, shapes[i][1], s.e, s.k,
                                          balance, s.rule);
                assert_close("route_balance's losses", x, losses, 16 + 2 * (double)s.e);
                assert_close("route_balance's dlogits", d, dlogits, 16 + 2 * (double)s.e);
                return d.stored("route_balance");
            });
        }
}

static void combining_matches(void **state) {
    (void)state;
    for (const ExpertSizes &s : expert_sizes)
        for (DType dtype : dtypes) {
            // With fewer rows than pairs, those beyond count as zeros.
            const int64_t pairs = s.n * s.k, rows = s.n == 33 ? 40 : pairs, count = rows * s.h;
            const std::vector<int32_t> chosen = indices(whole_numbers(pairs, s.e, 1));
            std::vector<int32_t> tokens((size_t)pairs), place((size_t)pairs), counts((size_t)s.e);
            kernel_route_order(tokens.data(), place.data(), counts.data(), chosen.data(), s.n, s.k, s.e);
            const Doubles z = random_numbers(dtype, count, 2), dy = random_numbers(dtype, s.n * s.h, 3);
            const Doubles weights = random_numbers(full(dtype), pairs, 4);
            Doubles y((size_t)(s.n * s.h)), sum = y, dz((size_t)count), dweights((size_t)pairs);
            kernel_combine_forward(F64, y.data(), z.data(), place.data(), weights.data(), s.n, s.k, rows,
                                   s.h);
            kernel_combine_forward(F64, sum.data(), z.data(), place.data(), NULL, s.n, s.k, rows, s.h);
            kernel_combine_backward(F64, dz.data(), dweights.data(), dy.data(), z.data(), place.data(),
                                    weights.data(), s.n, s.k, rows, s.h);
            in_every_way("combine", [&](int shift) {
                Device zs(dtype, z, shift), dys(dtype, dy, shift), w(full(dtype), weights, shift);
                Device ys(dtype, s.n * s.h, shift), sums(dtype, s.n * s.h, shift), dzs(dtype, count, shift);
                Device dw(full(dtype), pairs, shift), p(I32, numbers(place));
                cuda_kernel_combine_forward(dtype, ys.at, zs.at, p.indices(), w.at, s.n, s.k, rows,
                                            s.h);
                assert_close("combine_forward", ys, y, 2 * (double)s.k);
                cuda_kernel_combine_forward(dtype, sums.at, zs.at, p.indices(), NULL, s.n, s.k, rows,
                                            s.h);
                assert_close("combine_forward without weights", sums, sum, (double)s.k);
                cuda_kernel_combine_backward(dtype, dzs.at, dw.at, dys.at, zs.at, p.indices(), w.at, s.n,
                                             s.k, rows, s.h);
                assert_close("combine_backward's dz", dzs, dz, 1);
                assert_close("combine_backward's dweights", dw, dweights, 2 * (double)s.h);
                std::vector<unsigned char> bits = ys.stored("combine_forward");
                add_bytes(&bits, "combine_backward", dzs);
                add_bytes(&bits, "combine_backward", dw);
                return bits;
            });
        }
}

// ---- cross-entropy ----

static void cross_entropy_matches(void **state) {
    (void)state;
    const int64_t sizes[][2] = {{1, 1}, {33, 5}, {5, 1025}, {9, 10007}};
    for (const int64_t *size : sizes)
        for (DType dtype : dtypes) {
            const int64_t n = size[0], v = size[1];
            const double scale = 1.0 / 41;
            Doubles logits = random_numbers(dtype, n * v, 1), targets = whole_numbers(n, v, 2);
            // rows that are huge with both signs, all the same, masked but for one column, and ignored
            for (int64_t j = 0; j < v && n > 4; j++) {
                logits[(size_t)j] = j % 2 ? 1e4 : -1e4;
                logits[(size_t)(v + j)] = 2.5;
                logits[(size_t)(2 * v + j)] = j == (int64_t)targets[2] ? 1.5 : -INFINITY;
            }
            if (n > 4) targets[3] = IGNORED_LABEL;
            logits = rounded(dtype, logits);
            const std::vector<int32_t> ids = indices(targets);
            Doubles losses((size_t)n), lse = losses, dlogits((size_t)(n * v));
            kernel_cross_entropy_forward(F64, losses.data(), lse.data(), logits.data(), ids.data(), n, v);
            Doubles given = rounded(full(dtype), lse);
            kernel_cross_entropy_backward(F64, dlogits.data(), logits.data(), given.data(), ids.data(),
                                          scale, n, v);
            in_every_way("cross_entropy", [&](int shift) {
                Device x(dtype, logits, shift), id(I32, targets, shift), sums(full(dtype), n, shift);
                Device loss(full(dtype), n, shift), d(dtype, n * v, shift), kept(full(dtype), given, shift);
                cuda_kernel_cross_entropy_forward(dtype, loss.at, sums.at, x.at, id.indices(), n, v);
                const Doubles got = loss.read("losses"), got_lse = sums.read("lse");
                // Row by row: the huge one would hide the errors of the others.
                for (size_t i = 0; i < (size_t)n; i++) {
                    double bound = ((double)v + 8) * rounding(full(dtype)) * std::max(1.0, fabs(lse[i]));
                    if (!(fabs(got[i] - losses[i]) <= bound) || !(fabs(got_lse[i] - lse[i]) <= bound))
                        fail_msg(
                            "row %zu of (%lld, %lld) %s has loss %.9g and lse %.9g, expected %.9g and %.9g",
                            i, (long long)n, (long long)v, dtype_name(dtype), got[i], got_lse[i], losses[i],
                            lse[i]);
                }
                cuda_kernel_cross_entropy_backward(dtype, d.at, x.at, kept.at, id.indices(), scale, n, v);
                assert_close("cross_entropy_backward", d, dlogits, 32);
                cuda_kernel_cross_entropy_backward(dtype, x.at, x.at, kept.at, id.indices(), scale, n, v);
                assert_same("cross_entropy_backward in place", x, d.read("dlogits"));
                std::vector<unsigned char> bits = loss.stored("losses");
                add_bytes(&bits, "lse", sums);
                add_bytes(&bits, "dlogits", d);
                return bits;
            });
        }
}

// ---- NaN ----

static void nan_and_infinity_come_through(void **state) {
    (void)state;
    for (DType dtype : dtypes)
        for (double bad : {(double)NAN, (double)INFINITY})
            for (int64_t at : {0, 33, 66}) {
                const int64_t h = 67;
                Doubles x = random_numbers(dtype, h, 1), one((size_t)h, 1);
                x[(size_t)at] = bad;
                Device in(dtype, x), ones(dtype, one), id(I32, Doubles(1, 3)), y(dtype, h),
                    row(full(dtype), 1);
                Device loss(full(dtype), 1), dw(dtype, h);
                assert_false(isfinite(cuda_kernel_sum(dtype, in.at, h)));
                assert_false(isfinite(cuda_kernel_sum_squares(dtype, in.at, h)));
                cuda_kernel_cross_entropy_forward(dtype, loss.at, row.at, in.at, id.indices(), 1, h);
                assert_false(isfinite(loss.read("loss")[0]));
                cuda_kernel_cross_entropy_backward(dtype, y.at, in.at, row.at, id.indices(), 1, 1, h);
                assert_true(isnan(y.read("dlogits")[(size_t)at]));
                cuda_kernel_rmsnorm_forward(dtype, y.at, row.at, in.at, ones.at, 1, h, 1e-5);
                assert_true(isnan(y.read("y")[(size_t)at]));
                cuda_kernel_rmsnorm_backward(dtype, y.at, dw.at, NULL, in.at, ones.at, ones.at, row.at, 1,
                                             h);
                assert_true(isnan(y.read("dx")[(size_t)at]));
                // a key that every query sees but the first
                Device p(dtype, h * h), o(dtype, h), q(dtype, one);
                Doubles k = one;
                k[1] = bad;
                Device keys(dtype, k);
                cuda_kernel_attention_forward(dtype, o.at, p.at, q.at, keys.at, q.at,
                                              AttentionShape{1, h, 1, 1, 1});
                Doubles out = o.read("o");
                assert_true(out[0] == 1);
                for (size_t i = 1; i < (size_t)h; i++) assert_true(isnan(out[i]));
            }
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_indices_are_told),  // first: what it forks off must not have started a GPU
        cmocka_unit_test(fill_writes_all_and_no_more),
        cmocka_unit_test(copy_converts_as_the_host_does),
        cmocka_unit_test(sums_and_multiples_match),
        cmocka_unit_test(swiglu_matches),
        cmocka_unit_test(optimizers_match),
        cmocka_unit_test(sums_match_in_f64),
        cmocka_unit_test(matmul_matches),
        cmocka_unit_test(random_rounding_matches),
        cmocka_unit_test(codes_match),
        cmocka_unit_test(embedding_matches),
        cmocka_unit_test(rmsnorm_matches),
        cmocka_unit_test(rope_matches),
        cmocka_unit_test(attention_matches),
        cmocka_unit_test(attention_chunk_matches),
        cmocka_unit_test(routing_matches),
        cmocka_unit_test(balance_matches),
        cmocka_unit_test(combining_matches),
        cmocka_unit_test(cross_entropy_matches),
        cmocka_unit_test(nan_and_infinity_come_through),
    };
    return cmocka_run_group_tests_name("ops_cuda", tests, NULL, NULL);
}
