// data.c: tokens from a file, and samples as a pure function of their index.
// There is no epoch and no shuffled list: each sample begins at a position drawn for its number. So nothing
// has to be saved, sent or skipped: a resumed run, and a rank that needs only its own samples, draw the
// same ones as the run on one device, and the position in the data is one integer. The price is that of
// drawing with replacement: some positions are drawn twice before others are drawn once.
//
// The file is mapped, and tokens are converted when they are sampled: a text may be larger than the memory,
// and ranks of one machine share what they have read.
#include "data.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "files.h"
#include "hash.h"
#include "tensor/ops.h"
#include "tensor/rng.h"

// ---- the parser ----

enum { HEADER_BYTES = 1024 };  // 256 int32: magic, version, tokens, zeros

typedef struct TokenFile {
    uint32_t magic, version;
    size_t width;  // bytes of one token
} TokenFile;

static const TokenFile token_files[] = {{20240520, 1, 2}, {20240801, 7, 4}};  // GPT-2, Llama 3

// The magic numbers of all llm.c files are dates. The last byte of such a number is 1, which no text has
// there; so llm.c's models and evaluation sets are recognized, and not read as text.
enum { FIRST_MAGIC = 20240101, LAST_MAGIC = 20241231 };

// The files are little-endian; the machine may not be, and `bytes` may be unaligned.
static uint32_t read_word(const uint8_t *bytes, size_t width) {
    uint32_t word = 0;
    for (size_t i = 0; i < width; i++) word |= (uint32_t)bytes[i] << (8 * i);
    return word;
}

static const char *parse_token_file(const TokenFile *kind, const uint8_t *bytes, size_t size,
                                    Tokens *tokens) {
    if (size < HEADER_BYTES)
        return fault_text(
            "the file is truncated: a token file has %d bytes of header, this one %zu bytes in all",
            HEADER_BYTES, size);
    uint32_t version = read_word(bytes + 4, 4), n = read_word(bytes + 8, 4);
    if (version != kind->version)
        return fault_text("the token file has version %u, and version %u is what can be read", version,
                          kind->version);
    if (n < 1 || n > INT32_MAX) return fault_text("the header counts %d tokens", (int32_t)n);

    // A header may promise 8 GB in a file of 2 KB.
    size_t expected = HEADER_BYTES + n * kind->width;
    if (size != expected)
        return fault_text(
            "the file is %s: %zu bytes would fit the number of tokens in its header, %u, and it has %zu",
            size < expected ? "truncated" : "too long", expected, n, size);

    const Tokens read = {bytes + HEADER_BYTES, kind->width, n};
    for (size_t i = 0; i < n && kind->width == 4; i++)
        if (read_word(read.at + 4 * i, 4) > INT32_MAX)
            return fault_text("token %u at position %zu is beyond 31 bits", read_word(read.at + 4 * i, 4),
                              i);
    *tokens = read;
    return NULL;
}

const char *data_parse(const uint8_t *bytes, size_t size, Tokens *tokens) {
    if (size == 0) return fault_text("the file is empty");
    uint32_t magic = size < 4 ? 0 : read_word(bytes, 4);
    for (size_t i = 0; i < sizeof token_files / sizeof *token_files; i++)
        if (magic == token_files[i].magic) return parse_token_file(&token_files[i], bytes, size, tokens);
    if (FIRST_MAGIC <= magic && magic <= LAST_MAGIC)
        return fault_text("the file has magic %u: it is one of llm.c's, but holds no tokens", magic);

    *tokens = (Tokens){bytes, 1, (int64_t)size};
    return NULL;
}

void data_copy(const Tokens *tokens, int64_t first, int64_t count, int32_t *to) {
    const uint8_t *from = tokens->at + (size_t)first * tokens->width;
    for (int64_t i = 0; i < count; i++, from += tokens->width)
        to[i] = (int32_t)read_word(from, tokens->width);
}

static int32_t token_at(const Data *data, int64_t i) {
    int32_t token;
    data_copy(&data->tokens, i, 1, &token);
    return token;
}

// ---- files ----

// This book's own sources, which make concatenates into one file. Programs are run from any folder, so the
// file is found relative to the program itself: <build>/<chapter>/<program> reads <build>/corpus.txt.
// ULTRASCALE_DATA names another one: what a test finds should not depend on a comment in the sources.
static const char *default_corpus(void) {
    const char *wanted = getenv("ULTRASCALE_DATA");
    if (wanted && *wanted) {
        CHECK(access(wanted, F_OK) == 0, "ULTRASCALE_DATA names %s, and no such file is there", wanted);
        return wanted;
    }
    static char path[PATH_MAX];
    static const char name[] = "/corpus.txt";
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - sizeof name);
    CHECK(length > 0, "the default corpus lies beside the program, and /proc/self/exe does not say where");
    path[length] = 0;
    for (int up = 0; up < 2; up++) {
        char *slash = strrchr(path, '/');
        if (slash) *slash = 0;
    }
    strcat(path, name);
    CHECK(access(path, F_OK) == 0,
          "the default corpus %s is not there: run make programs, or name a text with --data FILE", path);
    return path;
}

Data data_open(const char *path, int64_t vocab, int64_t seq) {
    Data data = {.path = path ? path : default_corpus()};
    const char *fault = input_map(data.path, &data.file, &data.size);
    CHECK(!fault, "%s", fault);
    fault = data_parse(data.file, data.size, &data.tokens);
    CHECK(!fault, "%s: %s", data.path, fault);
    data.count = data.tokens.count;
    data.text = data.tokens.width == 1;

    // If the vocabulary includes every token of this width, nothing needs to be read.
    bool holds_any = data.tokens.width < 4 && vocab >= (int64_t)1 << (8 * data.tokens.width);
    for (int64_t i = 0; i < data.count && !holds_any; i++) {
        int32_t token = token_at(&data, i);
        CHECK(token < vocab || !data.text,
              "%s: byte %d at offset %lld is beyond --vocab %lld; --vocab 256 holds any text", data.path,
              token, (long long)i, (long long)vocab);
        CHECK(token < vocab, "%s: token %d at position %lld is beyond --vocab %lld", data.path, token,
              (long long)i, (long long)vocab);
    }
    data.vocab = data.text && vocab > 256 ? 256 : vocab;

    // The end is held out, in one piece: pieces scattered over the training text would have training text
    // around them.
    int64_t held_out = data.count / 10;
    data.train_count = data.count - held_out;
    CHECK(held_out >= seq + 2,
          "%s is too short for --seq %lld: a tenth of its tokens is held out and must hold seq + 2, so %lld "
          "are needed, and their number is %lld",
          data.path, (long long)seq, 10 * ((long long)seq + 2), (long long)data.count);
    return data;
}

void data_close(Data *data) {
    input_unmap(data->file, data->size);
    *data = (Data){0};
}

// As FNV-1a, but over whole tokens: different data has the same hash with a probability of about 1 in 2^64.
uint64_t data_hash(const Data *data) {
    uint64_t hash = HASH_SEED;
    for (int64_t i = 0; i < data->count; i++) hash = (hash ^ (uint32_t)token_at(data, i)) * HASH_PRIME;
    return hash ? hash : 1;
}

// ---- samples ----

void data_sample(const Data *data, int64_t seed, int64_t index, bool held_out, int64_t seq, int32_t *tokens,
                 int32_t *targets) {
    int64_t first = held_out ? data->train_count : 0;
    int64_t count = held_out ? data->count - data->train_count : data->train_count;
    // A sample takes seq tokens and the one after them, all from its own part.
    int64_t starts = count - seq;
    CHECK(starts > 0, "%s: a part of %lld tokens has no sample of --seq %lld", data->path, (long long)count,
          (long long)seq);
    // Held-out samples are numbered in the other half of the counter's range, and share no draw.
    // The remainder favours low starts by less than starts / 2^64.
    uint64_t draw = (uint64_t)index + ((uint64_t)held_out << 63);
    uint64_t start = rng_bits((uint64_t)seed, RNG_DATA, draw) % (uint64_t)starts;
    // The shift by one is done here, once, before any sharding: a technique that splits a sequence over
    // ranks gets the right target at every border.
    data_copy(&data->tokens, first + (int64_t)start, seq, tokens);
    data_copy(&data->tokens, first + (int64_t)start + 1, seq, targets);
}

void data_mask_prompt(int64_t seed, int64_t index, int64_t seq, int32_t *targets) {
    uint64_t lengths = (uint64_t)seq + (uint64_t)index % 2;  // 0 … seq - 1, or 0 … seq
    int64_t prompt = (int64_t)(rng_bits((uint64_t)seed, RNG_MASK, (uint64_t)index) % lengths);
    for (int64_t i = 0; i < prompt; i++) targets[i] = IGNORED_LABEL;
}
