// data.c: tokens from a file, and samples as a pure function of their index.
//
// There is no epoch and no shuffled list: each sample begins at a place drawn for its number. So nothing
// has to be saved, sent or skipped: a resumed run, and a rank that wants only its own samples, draw the
// same ones as the run on one device, and a place in the data is one integer. The price is that of drawing
// with replacement: some places come twice before others come once.
//
// All tokens are held in memory, 4 bytes each.
#include "data.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tensor/ops.h"
#include "tensor/rng.h"

// ---- the parser ----

enum { HEADER_BYTES = 1024 };  // 256 int32: magic, version, tokens, zeros

typedef struct TokenFile {
    uint32_t magic, version;
    size_t width;  // bytes of one token
} TokenFile;

static const TokenFile token_files[] = {{20240520, 1, 2}, {20240801, 7, 4}};  // GPT-2, Llama 3

// llm.c dates the magic of all its files. As bytes such a number ends in 1, which no text has there: its
// models and evaluation sets are thus known, and not read as text.
enum { FIRST_MAGIC = 20240101, LAST_MAGIC = 20241231 };

static const char *wrong(const char *format, ...) PRINTF_LIKE(1, 2);
static const char *wrong(const char *format, ...) {
    static char sentence[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    return sentence;
}

// The files are little-endian; the machine, and the alignment of `bytes`, are whatever they are.
static uint32_t read_word(const uint8_t *bytes, size_t width) {
    uint32_t word = 0;
    for (size_t i = 0; i < width; i++) word |= (uint32_t)bytes[i] << (8 * i);
    return word;
}

static const char *parse_token_file(const TokenFile *kind, const uint8_t *bytes, size_t size,
                                    int32_t **tokens, int64_t *count) {
    if (size < HEADER_BYTES)
        return wrong(
            "the file is truncated: a token file has %d bytes of header, this one %zu bytes in all",
            HEADER_BYTES, size);
    uint32_t version = read_word(bytes + 4, 4), n = read_word(bytes + 8, 4);
    if (version != kind->version)
        return wrong("the token file has version %u, and version %u is what can be read", version,
                     kind->version);
    if (n < 1 || n > INT32_MAX) return wrong("the header counts %d tokens", (int32_t)n);

    // Before anything is allocated: a header may promise 8 GB in a file of 2 KB.
    size_t expected = HEADER_BYTES + n * kind->width;
    if (size != expected)
        return wrong("the file is %s: its header counts %u tokens, which makes %zu bytes, and it has %zu",
                     size < expected ? "truncated" : "too long", n, expected, size);

    int32_t *read = host_alloc(n * sizeof *read);
    for (size_t i = 0; i < n; i++) {
        uint32_t token = read_word(bytes + HEADER_BYTES + i * kind->width, kind->width);
        if (token > INT32_MAX) {
            free(read);
            return wrong("token %u at position %zu is beyond 31 bits", token, i);
        }
        read[i] = (int32_t)token;
    }
    *tokens = read;
    *count = n;
    return NULL;
}

const char *data_parse(const uint8_t *bytes, size_t size, int32_t **tokens, int64_t *count, bool *text) {
    if (size == 0) return wrong("the file is empty");
    uint32_t magic = size < 4 ? 0 : read_word(bytes, 4);
    for (size_t i = 0; i < sizeof token_files / sizeof *token_files; i++)
        if (magic == token_files[i].magic) {
            *text = false;
            return parse_token_file(&token_files[i], bytes, size, tokens, count);
        }
    if (FIRST_MAGIC <= magic && magic <= LAST_MAGIC)
        return wrong("the file has magic %u: it is one of llm.c's, but holds no tokens", magic);

    *tokens = host_alloc(size * sizeof **tokens);
    for (size_t i = 0; i < size; i++) (*tokens)[i] = bytes[i];
    *count = (int64_t)size;
    *text = true;
    return NULL;
}

// ---- files ----

// The caller frees the bytes.
static uint8_t *read_file(const char *path, size_t *size) {
    struct stat status;
    FILE *file = fopen(path, "rb");
    CHECK(file && fstat(fileno(file), &status) == 0, "%s: cannot be read: %s", path, strerror(errno));
    CHECK(!S_ISDIR(status.st_mode), "%s: is a directory, and data is one file", path);
    CHECK(S_ISREG(status.st_mode), "%s: is a pipe or a device, and data is a file on a disk", path);
    *size = (size_t)status.st_size;
    uint8_t *bytes = malloc(*size + 1);  // an empty file too has a buffer
    CHECK(bytes, "%s: out of host memory for its %s", path, bytes_text((double)*size));
    size_t got = fread(bytes, 1, *size, file);
    CHECK(got == *size, "%s: only %zu of its %zu bytes could be read", path, got, *size);
    fclose(file);
    return bytes;
}

// The book's own sources, which make writes into one file. Programs run from any folder, so it is looked
// for from where the program itself lies: <build>/<chapter>/<program> reads <build>/corpus.txt.
static const char *default_corpus(void) {
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
          "the default corpus %s is not there: run make all, or name a text with --data FILE", path);
    return path;
}

Data data_open(const char *path, int64_t vocab, int64_t seq) {
    Data data = {.path = path ? path : default_corpus()};
    size_t size;
    uint8_t *bytes = read_file(data.path, &size);
    const char *fault = data_parse(bytes, size, &data.tokens, &data.count, &data.text);
    free(bytes);
    CHECK(!fault, "%s: %s", data.path, fault);

    for (int64_t i = 0; i < data.count; i++) {
        CHECK(data.tokens[i] < vocab || !data.text,
              "%s: byte %d at offset %lld is beyond --vocab %lld; --vocab 256 holds any text", data.path,
              data.tokens[i], (long long)i, (long long)vocab);
        CHECK(data.tokens[i] < vocab, "%s: token %d at position %lld is beyond --vocab %lld", data.path,
              data.tokens[i], (long long)i, (long long)vocab);
    }
    data.vocab = data.text && vocab > 256 ? 256 : vocab;

    // The end is held out, in one piece: places strewn among the training text would share their
    // neighbourhood with it.
    int64_t held_out = data.count / 10;
    data.train_count = data.count - held_out;
    CHECK(held_out >= seq + 2,
          "%s: %lld tokens are too few for --seq %lld: a tenth is held out and must hold seq + 2, so %lld "
          "are needed",
          data.path, (long long)data.count, (long long)seq, 10 * ((long long)seq + 2));
    return data;
}

void data_close(Data *data) {
    free(data->tokens);
    *data = (Data){0};
}

// FNV-1a over whole tokens, which end alike only if they are alike but for one chance in 2^64 or so.
uint64_t data_print(const Data *data) {
    uint64_t print = 0xcbf29ce484222325;
    for (int64_t i = 0; i < data->count; i++) print = (print ^ (uint32_t)data->tokens[i]) * 0x100000001b3;
    return print ? print : 1;
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
    const int32_t *from = data->tokens + first + (int64_t)start;
    // The shift by one is done here, once, before any cutting: whoever splits a sequence over ranks has the
    // right target at every border.
    memcpy(tokens, from, (size_t)seq * sizeof *tokens);
    memcpy(targets, from + 1, (size_t)seq * sizeof *targets);
}

void data_mask_prompt(int64_t seed, int64_t index, int64_t seq, int32_t *targets) {
    uint64_t lengths = (uint64_t)seq + 1;  // 0 … seq
    int64_t prompt = (int64_t)(rng_bits((uint64_t)seed, RNG_MASK, (uint64_t)index) % lengths);
    for (int64_t i = 0; i < prompt; i++) targets[i] = IGNORED_LABEL;
}
