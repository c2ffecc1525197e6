// data.h: tokens from a file, and batches as a pure function of the sample's global index, so that every
// layout of ranks and micro-batches sees the same samples.
#ifndef DATA_H
#define DATA_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Tokens {  // as they stand in a file
    const uint8_t *at;   // at any address, little-endian
    size_t width;        // bytes of one: 1 (text), 2 or 4
    int64_t count;
} Tokens;

typedef struct Data {
    Tokens tokens;        // in the file, which is mapped: only what is sampled is read
    const uint8_t *file;  // NULL: none is open
    size_t size;          // bytes
    int64_t count;        // tokens
    int64_t train_count;  // the first train_count are for training, the rest (a tenth) is held out
    int64_t vocab;        // tokens are below this: 256 for text
    const char *path;
    bool text;  // bytes of a text file (printable back), or a token file
} Data;

// Maps a text file (any bytes, one token each) or a token file in llm.c's format: 256 int32 of header
// (magic 20240520 version 1: GPT-2, uint16 tokens; magic 20240801 version 7: Llama 3, uint32 tokens;
// header[2] tokens follow). path NULL: the default corpus, this book's own sources. Fatal, naming the file
// and the rule: missing, empty, shorter than seq + 2 tokens in either part, truncated, longer than its
// header says, of the wrong kind, a token beyond vocab.
Data data_open(const char *path, int64_t vocab, int64_t seq);
void data_close(Data *data);
// 64 bits that tell this data from others: of its tokens, not of its name. Never 0.
uint64_t data_print(const Data *data);
// The parser behind it, on memory (also the fuzzer's door): returns NULL, or the sentence that says what is
// wrong (static buffer). On success *tokens points into the bytes.
const char *data_parse(const uint8_t *bytes, size_t size, Tokens *tokens);
// `count` tokens from number `first` on.
void data_copy(const Tokens *tokens, int64_t first, int64_t count, int32_t *to);

// Sample number `index` of the run (step * samples per step + place in the step): seq tokens and their next
// tokens, from a start drawn by (seed, index). held_out takes it from the other part.
void data_sample(const Data *data, int64_t seed, int64_t index, bool held_out, int64_t seq, int32_t *tokens,
                 int32_t *targets);
// Ignores the labels of a prefix of the sample whose length is drawn from 0 … seq by (seed, index), as when
// a prompt is not trained on: label counts differ from sample to sample, and some samples have none. Those
// of even index keep one, so that no step of two or more samples is left without a gradient.
void data_mask_prompt(int64_t seed, int64_t index, int64_t seq, int32_t *targets);

#ifdef __cplusplus
}
#endif
#endif
