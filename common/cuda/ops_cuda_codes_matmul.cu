// ops_cuda_codes_matmul.cu: the product of 8-bit codes on a GPU. If each matrix has a single scale, cuBLASLt
// multiplies the codes; if there is a scale for each 128 of k, chapter 07's kernel for Hopper does.
// Everything that these two do not support goes to the plain kernel, with a thread for each element of the
// product and the partial sums that ops.h promises: it is the reference, and is not fast.
#include <math.h>

#include "gemm.h"
#include "ops_cuda.h"
#include "tensor/kernel_table.h"

// x truncated to so many significant bits, towards zero.
template <class A>
__device__ inline A cut_to_bits(A x, int bits) {
    int power;
    const A fraction = frexp(x, &power);
    return ldexp(trunc(ldexp(fraction, bits)), power - bits);
}

template <class Code>
__device__ inline int exponent_of(Code code) {
    const int smallest = std::is_same<Code, __nv_fp8_e4m3>::value ? -6 : -14;
    const float x = wide(code);
    return isfinite(x) && ilogb(x) > smallest ? ilogb(x) : smallest;
}

// sum + the products of `count` codes, as sum_in_bits (tensor/tensor.h): sums of 14 bits are exact in f32.
template <class A, class CodeA, class CodeB>
__device__ inline A sum_in_bits(A sum, const CodeA *a, const CodeB *b, int64_t count, int bits) {
    const auto product = [&](int64_t i) { return (A)wide(a[i]) * (A)wide(b[i]); };
    A all = sum;
    int largest = sum == 0 ? INT_MIN : ilogb(sum);
    for (int64_t i = 0; i < count; i++) {
        const int exponent = exponent_of(a[i]) + exponent_of(b[i]);
        all += product(i);
        if (product(i) != 0 && exponent > largest) largest = exponent;
    }
    if (largest == INT_MIN || !isfinite(all)) return all;
    const int last = largest + 1 - bits;  // 2^last is the last bit
    const A units = ldexp((A)1, -last);
    all = trunc(sum * units);
    for (int64_t i = 0; i < count; i++) all += trunc(product(i) * units);
    return ldexp(cut_to_bits(all, bits), last);
}

template <class T, class CodeA, class CodeB>
__global__ void multiply_codes(T *c, KernelCodes a, KernelCodes b, int64_t m, int64_t n, int64_t k,
                               int64_t segment, int bits, bool add) {
    typedef Arithmetic<T> A;
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    const int64_t tiles_a = (k + a.tile_columns - 1) / a.tile_columns,
                  tiles_b = (k + b.tile_columns - 1) / b.tile_columns;
    for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < m * n; at += all) {
        const int64_t i = at / n, j = at % n;
        const CodeA *x = (const CodeA *)a.codes + i * k;
        const CodeB *y = (const CodeB *)b.codes + j * k;
        A sum = add ? (A)wide(c[at]) : (A)0;
        for (int64_t first = 0; first < k; first += segment) {
            const int64_t end = least(first + segment, k);
            A partial = 0;
            for (int64_t l = first; !bits && l < end; l++) partial += (A)wide(x[l]) * (A)wide(y[l]);
            for (int64_t l = first; bits && l < end; l += WARP)
                partial = sum_in_bits(partial, x + l, y + l, least(WARP, end - l), bits);
            sum += partial * ((A)a.scale[i / a.rows * tiles_a + first / a.tile_columns] *
                              (A)b.scale[j / b.rows * tiles_b + first / b.tile_columns]);
        }
        c[at] = narrow<T>(sum);
    }
}

static bool has_one_scale(const KernelCodes &x, int64_t rows, int64_t k) {
    return x.rows >= rows && x.tile_columns >= k;
}

// Said once in a run: training continues, slowly.
static void say_why_plain(const char *lacks, int64_t m, int64_t n, int64_t k) {
    static bool said = false;
    if (!said)
        say("8-bit codes (%lld, %lld) by (%lld, %lld), and maybe others, go to a plain kernel, which is "
            "slow: %s",
            (long long)m, (long long)k, (long long)n, (long long)k, lacks);
    said = true;
}

// Multiplies if cuBLASLt can; each matrix has one scale.
static bool multiplied_by_cublaslt(const CodesGemm &g) {
    const char *lacks = gemm_codes_lacks(&g);
    if (lacks) say_why_plain(lacks, g.m, g.n, g.k);
    else gemm_codes(&g);
    return !lacks;
}

// f64, which proofs use, and sums of a given number of bits have only the plain kernel: no message for these.
static bool multiplied_fast(DType dtype, void *c, const KernelCodes &a, const KernelCodes &b, int64_t m,
                            int64_t n, int64_t k, int64_t segment, int bits, bool fast, double beta) {
    if (dtype == F64 || bits) return false;
    if (segment >= k && has_one_scale(a, m, k) && has_one_scale(b, n, k))
        return multiplied_by_cublaslt(
            {a.dtype, b.dtype, dtype, m, n, k, a.codes, b.codes, c, a.scale, b.scale, fast, beta});
    if (matmul_codes_linked(dtype, c, a, b, m, n, k, segment, bits, beta)) return true;
    say_why_plain(
        "with scales of tiles, the fast one is for Hopper: of e4m3, tiles of 128, and sizes along "
        "them that are multiples of 16",
        m, n, k);
    return false;
}

template <class F>
static void by_code(DType dtype, F f) {
    if (dtype == E4M3) f(__nv_fp8_e4m3());
    else f(__nv_fp8_e5m2());
}

void kernel_matmul_codes(DType dtype, void *c, KernelCodes a, KernelCodes b, int64_t m, int64_t n,
                         int64_t k, int64_t segment, int bits, bool fast, double beta) {
    if (m * n == 0 || multiplied_fast(dtype, c, a, b, m, n, k, segment, bits, fast, beta)) return;
    by_dtype(dtype, [&](auto type) {
        by_code(a.dtype, [&](auto code_a) {
            by_code(b.dtype, [&](auto code_b) {
                using T = decltype(type);
                LAUNCH((multiply_codes<T, decltype(code_a), decltype(code_b)>), blocks_of(m * n),
                       MOST_THREADS, 0, stream(), (T *)c, a, b, m, n, k, segment, bits, beta != 0);
            });
        });
    });
}
