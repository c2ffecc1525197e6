// data.h: tokens from a file, and batches as a pure function of the sample's global index, so that every
// layout of ranks and micro-batches sees the same samples.
#ifndef DATA_H
#define DATA_H

#include "comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Tokens {  // as stored in a file
    const uint8_t *at;   // unaligned, little-endian
    size_t width;        // bytes of a token: 1 (text), 2 or 4
    int64_t count;
} Tokens;

typedef struct Data {
    Tokens tokens;        // in the file, which is mapped: only what is sampled is read
    const uint8_t *file;  // NULL: none is open
    size_t size;          // bytes
    int64_t count;        // tokens
    int64_t train_count;  // the first train_count are for training, the rest (a tenth) are held out
    int64_t vocab;        // all tokens are below this: 256 for text
    const char *path;
    bool text;  // a text file, whose tokens are bytes and can be printed; else a token file
} Data;

// Maps a text file (any bytes, one token each) or a token file in llm.c's format: a header of 256 int32
// (magic 20240520 version 1: GPT-2, uint16 tokens; magic 20240801 version 7: Llama 3, uint32 tokens), then
// header[2] tokens. path NULL: the file that ULTRASCALE_DATA names or, without it, this book's own sources.
// The caller ends it with data_close. Fatal, naming the file and the rule, if the file is missing, empty,
// shorter than seq + 2 tokens in either part, truncated, longer than its header says, of the wrong kind, or
// has a token beyond vocab.
Data data_open(const char *path, int64_t vocab, int64_t seq);
void data_close(Data *data);
// A 64-bit hash of the data's tokens, which identifies it whatever its name. Never 0.
uint64_t data_hash(const Data *data);
// Called by all ranks of a run: fatal if they find different data (comm_same_files). hash: data_hash, or 0
// if nothing else needs it.
void data_check_same(const Data *data, uint64_t hash, Group world);
// data_open's parser, on memory (the fuzzer calls it too): returns NULL, or the sentence that says what is
// wrong (static buffer). On success *tokens points into the bytes.
const char *data_parse(const uint8_t *bytes, size_t size, Tokens *tokens);
// Copies `count` tokens from number `first` on.
void data_copy(const Tokens *tokens, int64_t first, int64_t count, int32_t *to);

// Sample number `index` of the run (step * samples per step + place in the step): sets tokens (seq) and
// targets (seq), each token's successor, from a start drawn by (seed, index). With held_out it is from the
// held-out part.
void data_sample(const Data *data, int64_t seed, int64_t index, bool held_out, int64_t seq, int32_t *tokens,
                 int32_t *targets);
// Sets the targets of a prefix of the sample to IGNORED_LABEL, as when a prompt is not trained on. The
// length of the prefix is drawn from 0 … seq by (seed, index), so label counts differ from sample to
// sample, and some samples have none. Samples of even index keep at least one, so that no step of two or
// more samples is left without a gradient.
void data_mask_prompt(int64_t seed, int64_t index, int64_t seq, int32_t *targets);

#ifdef __cplusplus
}
#endif
#endif
