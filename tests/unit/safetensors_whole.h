// safetensors_whole.h: for tests that write a safetensors file themselves, whole tensors at a time.
#ifndef SAFETENSORS_WHOLE_H
#define SAFETENSORS_WHOLE_H

#include <stdlib.h>

#include "train/safetensors.h"

// Puts the bytes of tensor number `tensor` into host memory.
typedef void (*TensorRead)(void *context, int tensor, uint8_t *bytes);

typedef struct WholeTensors {
    const SafeTensors *contents;
    TensorRead read;
    void *context;
} WholeTensors;

static inline void give_whole(void *context, int tensor, SafeWriter *to) {
    const WholeTensors *w = context;
    const SafeTensor *t = &w->contents->tensor[tensor];
    int64_t size = (int64_t)dtype_size(t->dtype);
    for (int i = 0; i < t->dims; i++) size *= t->shape[i];
    uint8_t *bytes = host_alloc(size);
    w->read(w->context, tensor, bytes);
    safetensors_put(to, 0, bytes, size);
    free(bytes);
}

// Returns NULL, or the sentence that says what failed.
static inline const char *write_whole(const char *path, const SafeTensors *contents, TensorRead read,
                                      void *context) {
    const char *wrong = safetensors_create(path, contents);
    WholeTensors whole = {contents, read, context};
    return wrong ? wrong : safetensors_fill(path, contents, give_whole, &whole);
}

#endif
