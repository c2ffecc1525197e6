// libFuzzer's door to data_parse. Whatever the bytes are, it returns tokens or a sentence, and never reads
// or writes elsewhere; the sanitizers watch that.
//
// Each input is read three times: as it is, and behind a sound header of each kind of token file, so that
// the fuzzer need not find 1,024 bytes by chance before it gets to the tokens.
#include <stdlib.h>
#include <string.h>

#include "train/data.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static void parse(const uint8_t *bytes, size_t size) {
    Tokens tokens = {.count = -1};
    const char *fault = data_parse(bytes, size, &tokens);
    if (fault) {
        if (tokens.at || tokens.count != -1 || !*fault) abort();
        return;
    }
    if (tokens.count < 1 || (tokens.width == 1 && tokens.count != (int64_t)size)) abort();
    int32_t *read = malloc((size_t)tokens.count * sizeof *read);
    if (!read) abort();
    data_copy(&tokens, 0, tokens.count, read);
    for (int64_t i = 0; i < tokens.count; i++)
        if (read[i] < 0) abort();
    free(read);
}

// The last three bytes of the input bend the header: how far the count is off, and the version.
static void parse_behind_header(uint32_t magic, uint32_t version, size_t width, const uint8_t *bytes,
                                size_t size) {
    uint32_t header[256] = {magic, version};
    if (size >= 3) {
        size -= 3;
        header[1] += bytes[size] > 250;
        header[2] =
            (uint32_t)(int8_t)bytes[size + 1] * (bytes[size + 2] > 250 ? 1u << 24 : bytes[size + 2] > 128);
    }
    header[2] += (uint32_t)(size / width);
    // A buffer of exactly this size: one byte too far is seen.
    uint8_t *file = malloc(sizeof header + size);
    if (!file) abort();
    memcpy(file, header, sizeof header);
    if (size) memcpy(file + sizeof header, bytes, size);
    parse(file, sizeof header + size);
    free(file);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    parse(bytes, size);
    parse_behind_header(20240520, 1, 2, bytes, size);
    parse_behind_header(20240801, 7, 4, bytes, size);
    return 0;
}
