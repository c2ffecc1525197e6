// safetensors.h: the file format in which Hugging Face stores weights, read from memory and written by many
// ranks at once.
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct SafeTensor {
    char *name;
    DType dtype;
    int dims;
    int64_t shape[MAX_DIMS];
    const uint8_t *data;  // into the file's bytes
    int64_t bytes;
} SafeTensor;

typedef struct SafeTensors {
    SafeTensor *tensor;
    int count;
    char **key, **value;  // __metadata__
    int keys;
    const uint8_t *file;  // the whole file if safetensors_open mapped it, else NULL
    size_t size;
} SafeTensors;

// Parses a file's bytes, which must outlive the result; the caller ends it with safetensors_close. Returns
// NULL, or the sentence that says what is wrong (static buffer): a header length beyond the file or absurd,
// a header that is no JSON object, an unknown dtype, a negative or overflowing shape, offsets that are out
// of range, overlap or leave holes, a size other than shape times dtype, a name used twice.
const char *safetensors_parse(const uint8_t *bytes, size_t size, SafeTensors *result);
// Maps and parses a file; of its tensors only the pages that are touched are read. Any fault is fatal.
SafeTensors safetensors_open(const char *path);
// Borrowed; NULL if absent.
const SafeTensor *safetensors_find(const SafeTensors *file, const char *name);
const char *safetensors_metadata(const SafeTensors *file, const char *key);
void safetensors_close(SafeTensors *file);

// A file is written by all ranks at once, each writing its own ranges. All describe it in the same way: its
// tensors (name, dtype and shape; `data` and `bytes` are ignored) and metadata. Both functions return NULL,
// or the sentence that says what failed (static buffer), and then the file's content is worthless.
//
// First, one rank creates the file at its full size, so that a disk without enough room is detected here.
const char *safetensors_create(const char *path, const SafeTensors *contents);
// Then, on every rank, `give` is called for each tensor to put this rank's ranges, which are flushed to disk.
typedef struct SafeWriter SafeWriter;
typedef void (*SafeTensorsGive)(void *context, int tensor, SafeWriter *to);
const char *safetensors_fill(const char *path, const SafeTensors *contents, SafeTensorsGive give,
                             void *context);
// To be called in `give`: writes bytes `first` to `first + size - 1` of its tensor.
void safetensors_put(SafeWriter *to, int64_t first, const void *bytes, int64_t size);

#ifdef __cplusplus
}
#endif
#endif
