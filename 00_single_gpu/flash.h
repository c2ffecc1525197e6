// flash.h: the parts of attention without stored scores that context parallelism (chapter 04) uses to merge
// one chunk of keys after another.
#ifndef FLASH_H
#define FLASH_H

#include "training.h"

// --documents: the token that ends a document. Tokens attend only to their own document.
#define DOCUMENT_OPTION                                                                             \
    {                                                                                               \
        "documents", OPTION_INT, NULL, "-1", -1, 1e9, "token",                                      \
            "token that ends a document; tokens attend only within their document; -1: none", false \
    }

AttentionHeads flash_heads(AttentionShape shape);

// A sum over chunks, set to 0: t itself, or for 16-bit t an f32 tensor, which flash_round rounds into t.
Tensor flash_sum(Tensor t);
void flash_round(Tensor t, Tensor *sum);  // frees sum

// The log-sum-exp of each query's scores: all that attention keeps besides o.
Tensor flash_new_lse(AttentionKept *kept, DType storage, int64_t rows, int64_t heads);  // -infinity
Tensor flash_lse(const AttentionKept *kept);
void flash_drop(void *context, AttentionKept *kept);  // of the attention socket

// A mask is made once for all layers. mask_key_changes: whether these samples need another mask than the
// last ones.
typedef struct MaskKey {
    int64_t b, s;
    int32_t *documents;  // (b, s) copied; NULL: each sequence is one
} MaskKey;
bool mask_key_changes(MaskKey *key, const MicroBatch *micro, int64_t s);

// For price(). again: backward recomputes the scores, and selective recomputation all of forward. kept:
// in place of probs forward keeps one number per token and head. positions: the positions and documents of
// b samples of so many tokens are stored for masks.
void flash_price_again(Price *price, const Config *config);
void flash_price_kept(Price *price, double tokens, double heads, DType storage);
void flash_price_positions(Price *price, int64_t b, int64_t tokens);

#endif
