// kernels.h: what the programs of this chapter share: one table of versions of a kernel, and its proof.
//
// A version is launched at a small size, where the emulator counts what it asks of a GPU, and each count
// must be what the program's formula() says of that size. The same formula at the size of the
// table then gives the time that a named GPU would take (cuda/gpu_model.h). On a GPU there is nothing to
// count; the versions run at the table's size and are measured beside what is modelled.
#ifndef KERNELS_H
#define KERNELS_H

#include "cuda/gpu_model.h"
#include "report/report.h"
#include "tensor/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- options ----

typedef struct KernelsOptions {
    int gpu;
    bool verbose;
    const char *json;
} KernelsOptions;

// Rows of every program's option table.
#define KERNELS_OPTIONS(options)                                                                           \
    {                                                                                                      \
        "gpu", OPTION_CHOICE, &(options).gpu, "h100", 0, 0, "a100|h100",                                   \
            "the GPU whose times the table shows", false},                                                 \
        {"verbose", OPTION_FLAG, &(options).verbose, NULL, 0, 0, "", "show each count beside its formula", \
         false},                                                                                           \
    {                                                                                                      \
        "json", OPTION_OUTPUT, &(options).json, NULL, 0, 0, "FILE",                                        \
            "write every figure at full precision", false                                                  \
    }

// ---- a program, in the order of its calls ----

// Begins the table. size: what the table is about, "C = A B of 4096 x 4096 matrices". limit: the least
// seconds that any version can take in the model (kernels_limit).
void kernels_begin(const KernelsOptions *options, const char *size, double limit);
const Gpu *kernels_gpu(void);
// The least time, in seconds, of work that moves so many bytes to or from memory and computes so much.
double kernels_limit(const KernelsOptions *options, double bytes, double flops, double tensor_flops);

typedef struct KernelVersion {
    const char *name;
    int threads;           // of a block
    int registers;         // of a thread, on an A100 or an H100, whichever needs more: as ptxas counts them
                           // (tests/programs/kernels.t)
    int64_t shared_bytes;  // of a block
} KernelVersion;

// One version's row. counted: at the small size, where `predicted` is the formula of it (NULL on a GPU);
// at_size: the formula at the size of the table. seconds: measured on a GPU, else 0. error: the worst
// against the CPU in f64, which must not be above `bound` (0: every bit is the same).
void kernels_version(const KernelVersion *version, const Work *counted, const Work *predicted,
                     const Work *at_size, double seconds, double error, double bound);
// The modelled time of a version, by its row: 0 for the first, over all tables of the program.
double kernels_seconds(int version);

// ---- data and references, in host memory ----

// count numbers, normally distributed times `scale`; each call with the same `stream` gives the same ones.
// They repeat after KERNELS_DRAWN, since a billion would take minutes to draw. No proof uses that many; and
// the period is a prime, so that tiles and rows begin at different places in it. The caller frees them.
enum { KERNELS_DRAWN = (1 << 20) + 7 };
float *kernels_numbers(int64_t count, double scale, int stream);
// Relative error (L2) of what a kernel made; where all of `right` is zero, the largest difference.
double kernels_error(const float *made, const double *right, int64_t count);
// C (m, n) = A (m, k) B (k, n), all row-major, in f64 and by the library in the dtype, to which a and b are
// rounded.
void kernels_matmul_f64(double *c, const float *a, const float *b, int64_t m, int64_t n, int64_t k);
void kernels_matmul_library(DType dtype, float *c, const float *a, const float *b, int64_t m, int64_t n,
                            int64_t k);
// C (m, n) = A (m, k) B^T of e4m3 codes, by the library (op_matmul_codes).
typedef struct KernelsCodes {
    const uint8_t *codes;
    const float *scale;
    Tile tile;
} KernelsCodes;
void kernels_matmul_codes(float *c, const KernelsCodes *a, const KernelsCodes *b, CodesSum sum, int64_t m,
                          int64_t n, int64_t k);
// How long the library takes for n x n matrices, on average.
double kernels_matmul_seconds(DType dtype, int64_t n);

#ifdef __cplusplus
}
#endif
#endif
