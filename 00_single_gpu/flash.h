// flash.h: what attention without stored scores offers to context parallelism (chapter 04), which merges
// one chunk of keys after another by the same operations.
#ifndef FLASH_H
#define FLASH_H

#include "training.h"

// --documents: the token that ends a document. Tokens see their own document alone.
#define DOCUMENT_OPTION                                                                      \
    {                                                                                        \
        "documents", OPTION_INT, NULL, "-1", -1, 1e9, "token",                               \
            "which token ends a document; tokens attend to their own alone; -1: none", false \
    }

DType flash_sum_dtype(DType storage);  // of what gathers over chunks: f32, or f64
AttentionHeads flash_heads(AttentionShape shape);

// A sum over chunks, 0: t itself, or in 16-bit storage an f32 tensor that flash_round rounds into t once.
Tensor flash_sum(Tensor t);
void flash_round(Tensor t, Tensor *sum);  // frees sum

// The log-sum-exp of each query's scores, all that attention keeps besides o.
Tensor flash_new_lse(AttentionKept *kept, DType storage, int64_t rows, int64_t heads);  // -infinity
Tensor flash_lse(const AttentionKept *kept);
void flash_drop(void *context, AttentionKept *kept);  // of the attention socket

// Masks are made once for all layers: whether these samples need others than the last ones.
typedef struct MaskKey {
    int64_t b, s;
    int32_t *documents;  // (b, s) copied; NULL: each sequence is one
} MaskKey;
bool mask_key_changes(MaskKey *key, const MicroBatch *micro, int64_t s);

// For price(): backward computes scores again, and selective recomputation all of forward; in place of
// probs forward keeps a number for each of so many tokens and heads; and the positions and documents of b
// samples of so many tokens are stored for masks.
void flash_price_again(Price *price, const Config *config);
void flash_price_kept(Price *price, double tokens, double heads, DType storage);
void flash_price_positions(Price *price, int64_t b, int64_t tokens);

#endif
