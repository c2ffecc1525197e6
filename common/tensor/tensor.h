// tensor.h: dtypes, tensors on a device, and the account of device memory by kind.
//
// Device memory is opaque: only ops_*, comm_* and device_* dereference it. All other code goes through the
// operations (ops.h) or through tensor_to_host / tensor_from_host. Breaking a precondition is fatal.
#ifndef TENSOR_H
#define TENSOR_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- dtypes ----
typedef enum DType { F64, F32, BF16, F16, E4M3, E5M2, I32, DTYPES } DType;

size_t dtype_size(DType dtype);       // bytes of one element: 8 4 2 2 1 1 4
DType dtype_wider(DType a, DType b);  // the wider of the two; a, if they have the same size
// Of sums, statistics, losses and optimizer state for storage of this dtype: f64 for f64, f32 for all others.
DType dtype_full(DType storage);
const char *dtype_name(DType dtype);  // "f64" "f32" "bf16" "f16" "e4m3" "e5m2" "i32"

// Conversions of one value, exact if the target can represent it, else rounded to nearest, ties to even.
// bf16, f16 (IEEE 754 binary16): overflow gives infinity; subnormals are kept; every NaN becomes a quiet
// NaN. e4m3, e5m2 (OCP 8-bit floating point, rev. 1.0): narrowing saturates (at 448; at 57344), infinities
// included; NaN stays NaN. e4m3 has no infinity.
uint16_t bf16_from_f32(float x);
float f32_from_bf16(uint16_t code);
uint16_t f16_from_f32(float x);
float f32_from_f16(uint16_t code);
uint8_t e4m3_from_f32(float x);
float f32_from_e4m3(uint8_t code);
uint8_t e5m2_from_f32(float x);
float f32_from_e5m2(uint8_t code);

// The product of two numbers of 8-bit types, as tensor cores have it before they add it: its exponent is the
// sum of the factors', where a subnormal number has that of the smallest normal one.
typedef struct CodeProduct {
    double value;
    int exponent;
} CodeProduct;
CodeProduct code_product(double x, DType of_x, double y, DType of_y);

// sum + products, as a Hopper adds products of 8-bit numbers (DeepSeek-V3, section 3.5.2; Xie et al.,
// MMA-Sim, 2025, whose rule gives a GPU's bits): each is cut off, towards zero, below the last of the `bits`
// bits that a number of the largest exponent keeps; what is left is added exactly; and of the result, too,
// only as many bits are kept.
double sum_in_bits(double sum, const CodeProduct *products, int count, int bits);

// Converts count elements in host memory; f64 to a 16- or 8-bit type is rounded to f32 first.
void dtype_convert(void *to, DType to_dtype, const void *from, DType from_dtype, int64_t count);

// ---- the account: device bytes by what they hold ----
typedef enum MemoryKind {
    MEMORY_PARAMETER,      // weights in the dtype that the model computes with
    MEMORY_GRADIENT,       // gradients, and their f32 accumulators
    MEMORY_OPTIMIZER,      // moments and master weights
    MEMORY_ACTIVATION,     // inputs, what forward keeps for backward, and what flows between them
    MEMORY_COMMUNICATION,  // buffers that exist only to send from or receive into
    MEMORY_KINDS
} MemoryKind;

typedef struct Memory {
    int64_t now[MEMORY_KINDS];   // bytes
    int64_t peak[MEMORY_KINDS];  // each kind's own maximum, not necessarily at the same moment
    int64_t now_total, peak_total;
} Memory;

const char *memory_kind_name(MemoryKind kind);
Memory memory_account(void);
// Replaces it, to go on as another rank (comm_act_as).
void memory_set_account(const Memory *memory);
// Resets the peaks to what is held now.
void memory_reset_peak(void);
// Sets the peaks back to those in `before`: what was allocated since then only inspected the run.
void memory_restore_peak(const Memory *before);
// The account in one line, for out-of-memory messages and tables. Static buffer.
const char *memory_text(void);
// If set, called at every allocation (bytes > 0) and release (bytes < 0); the profiler uses it to draw
// memory over time. `memory` is the address, only to identify the allocation; NULL in a dry run.
typedef void (*MemoryListener)(void *context, MemoryKind kind, int64_t bytes, const void *memory);
void memory_listen(MemoryListener listener, void *context);

// ---- device ----
// Dry run: tensors have shapes and are accounted, but have no memory; operations are counted and clocked,
// but compute nothing. Set it before the first tensor. Reading a tensor gives zeros.
void device_dry_run(bool on);
bool device_is_dry_run(void);
// Bytes on the device, aligned to 64 and accounted under `kind`. Out of memory is fatal, and the sentence
// shows the account. device_free takes the same kind and bytes.
void *device_alloc(MemoryKind kind, size_t bytes);
void device_free(MemoryKind kind, void *memory, size_t bytes);
// How often the host has read a tensor or a sum from the device, and so waited for it, since the start.
int64_t device_reads(void);

// ---- tensors ----
typedef struct Storage {  // one allocation, shared by counted references
    void *memory;
    size_t bytes;
    MemoryKind kind;
    int references, in_flight;  // in_flight: requests that use it (in_flight.h)
    struct Storage *next;       // of those that are freed
} Storage;

enum { MAX_DIMS = 4 };

// Row-major and contiguous. A Tensor is a small value; copying it copies the handle. {0} is "no tensor".
typedef struct Tensor {
    Storage *storage;
    int64_t offset;  // in elements, from the start of the storage
    DType dtype;
    int dims;
    int64_t shape[MAX_DIMS];
} Tensor;

// tensor_new(MEMORY_ACTIVATION, F32, SHAPE(n, h))
#define SHAPE(...) \
    (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]) { __VA_ARGS__ }

// A new tensor, uninitialized. Every dimension is at least 0. The caller ends it with tensor_free.
Tensor tensor_new(MemoryKind kind, DType dtype, int dims, const int64_t *shape);
// A new tensor with the shape and dtype of t.
Tensor tensor_like(MemoryKind kind, Tensor t);
// One more reference to the same memory; needs a tensor_free of its own.
Tensor tensor_share(Tensor t);
// Drops this reference; the last one frees the memory. Sets *t to {0}. Freeing {0} is allowed. To use the
// memory after that, through a view or another copy of the handle, is fatal, at least until 256 other tensors
// have been freed.
void tensor_free(Tensor *t);
// Borrowed: elements [first, first + product of shape) of t in another shape; valid as long as t, and never
// freed.
Tensor tensor_view(Tensor t, int64_t first, int dims, const int64_t *shape);
// Borrowed: elements [first, first + count) of t, flat; of {0}, {0}.
Tensor tensor_part(Tensor t, int64_t first, int64_t count);
// Borrowed: rows [first, first + rows) of t, taken as a matrix (tensor_rows(t), tensor_columns(t)).
Tensor tensor_rows_of(Tensor t, int64_t first, int64_t rows);

static inline bool tensor_exists(Tensor t) { return t.storage != NULL; }
// Whether the two have a byte in common.
bool tensor_overlaps(Tensor a, Tensor b);
// Elements; the product of all dimensions but the last; the last one. (A dry run does little else.)
static inline int64_t tensor_count(Tensor t) {
    int64_t count = 1;
    for (int i = 0; i < t.dims; i++) count *= t.shape[i];
    return count;
}
static inline int64_t tensor_columns(Tensor t) { return t.shape[t.dims - 1]; }
static inline int64_t tensor_rows(Tensor t) {
    int64_t rows = 1;
    for (int i = 0; i < t.dims - 1; i++) rows *= t.shape[i];
    return rows;
}
int64_t tensor_bytes(Tensor t);
const char *tensor_text(Tensor t);  // "(8, 128) f32", rotating static buffers

// The device address of the first element. For ops_*, comm_* and device_* only.
void *tensor_address(Tensor t);

// Copy the whole tensor between host and device; on the host it has the tensor's dtype and tensor_bytes(t)
// bytes.
void tensor_from_host(Tensor t, const void *host);
void tensor_to_host(void *host, Tensor t);
// The same, converted from and to f64 on the host (tensor_count(t) values).
void tensor_from_doubles(Tensor t, const double *host);
void tensor_to_doubles(double *host, Tensor t);

#ifdef __cplusplus
}
#endif
#endif
