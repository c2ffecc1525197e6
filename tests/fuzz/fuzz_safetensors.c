// libFuzzer's door to safetensors_parse. Whatever the bytes are, it returns tensors that lie within them or
// a sentence, and never reads or writes elsewhere; the sanitizers watch that.
//
// Each input is read three times: as it is; with the length of its header put right (it ends at the last
// '}'), so that the fuzzer need not guess eight bytes before it gets to the JSON; and as choices in a
// header that is almost sound, so that it need not guess the keys either.
#include <stdlib.h>
#include <string.h>

#include "train/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static volatile uint64_t bytes_read;  // volatile: so that every byte is read

static void check_tensor(const SafeTensors *file, const SafeTensor *tensor, const uint8_t *bytes,
                         size_t size) {
    if (tensor->data < bytes + 8 || tensor->bytes < 0 || tensor->bytes > bytes + size - tensor->data)
        abort();
    int64_t expected = (int64_t)dtype_size(tensor->dtype);
    for (int i = 0; i < tensor->dims; i++) expected *= tensor->shape[i];
    if (tensor->dims > MAX_DIMS || expected != tensor->bytes) abort();
    if (safetensors_find(file, tensor->name) != tensor) abort();  // the only one of its name
    for (int64_t i = 0; i < tensor->bytes; i++) bytes_read += tensor->data[i];
}

static void parse(const uint8_t *bytes, size_t size) {
    SafeTensors file;
    const char *wrong = safetensors_parse(bytes, size, &file);
    if (wrong) {
        if (!*wrong || file.tensor || file.key || file.count || file.keys) abort();
        return;
    }
    int64_t total = 0;
    for (int i = 0; i < file.count; i++) {
        check_tensor(&file, &file.tensor[i], bytes, size);
        total += file.tensor[i].bytes;
    }
    uint64_t header;
    memcpy(&header, bytes, 8);
    if ((uint64_t)total + header + 8 != size) abort();
    for (int i = 0; i < file.keys; i++)
        if (safetensors_metadata(&file, file.key[i]) != file.value[i]) abort();
    safetensors_close(&file);
}

// Parses a header and what follows it, in a buffer of exactly their size.
static void parse_behind_length(uint64_t header, const uint8_t *bytes, size_t size) {
    uint8_t *file = malloc(8 + size);
    if (!file) abort();
    memcpy(file, &header, 8);
    if (size) memcpy(file + 8, bytes, size);
    parse(file, 8 + size);
    free(file);
}

// One almost sound tensor of a header, from six bytes of input; small numbers keep a field as it should be.
static void print_tensor(FILE *header, const uint8_t *choice, int64_t *offset) {
    static const char *const dtypes[] = {"F32", "F64", "BF16", "F8_E4M3", "I32", "I64", "F33", "\\u0000"};
    static const char *const sizes[] = {"1",   "2", "3", "0", "-1", "1.5", "4294967296", "9007199254740993",
                                        "null"};
    static const char *const names[] = {"a", "b", "c", "d", "e", "f", "__metadata__", "\\u00e9"};
    static const int elements[] = {1, 2, 3, 0, 1, 1, 1, 1, 1}, widths[] = {4, 8, 2, 1, 4, 8, 4, 4};
    int dims = choice[2] % 6, bytes = widths[choice[1] % 8];
    fprintf(header, "\"%s\":{\"dtype\":\"%s\",\"shape\":[", names[choice[0] % 8], dtypes[choice[1] % 8]);
    for (int i = 0; i < dims; i++) {
        int size = (choice[3] >> (2 * (i % 4))) % (choice[2] > 200 ? 9 : 4);
        fprintf(header, "%s%s", i ? "," : "", sizes[size]);
        bytes *= elements[size];
    }
    int64_t begin = *offset + (choice[4] < 128 ? 0 : (int8_t)choice[4] % 8);
    int64_t end = begin + bytes + (choice[5] < 128 ? 0 : (int8_t)choice[5] % 8);
    fprintf(header, "],\"data_offsets\":[%lld,%lld]}", (long long)begin, (long long)end);
    *offset = end;
}

static void parse_almost_sound(const uint8_t *bytes, size_t size) {
    enum { CHOICES = 6, DATA_MAX = 1024 };
    if (size < 1 || size > 64 * CHOICES) return;
    char *text = NULL;
    size_t length = 0;
    FILE *header = open_memstream(&text, &length);
    int64_t offset = 0;
    fputs(bytes[0] & 1 ? "{\"__metadata__\":{\"format\":\"pt\"}" : "{", header);
    for (size_t i = 1; i + CHOICES <= size; i += CHOICES) {
        if (i > 1 || bytes[0] & 1) fputc(',', header);
        print_tensor(header, bytes + i, &offset);
    }
    fputc('}', header);
    long header_length = ftell(header);
    size_t data = offset > 0 && offset < DATA_MAX ? (size_t)offset : 0;
    for (size_t i = 0; i < data + (bytes[0] > 200); i++) fputc('x', header);
    if (fclose(header) != 0) abort();
    parse_behind_length((uint64_t)header_length, (uint8_t *)text, length);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    parse(bytes, size);
    const uint8_t *end = size ? memrchr(bytes, '}', size) : NULL;
    parse_behind_length(end ? (uint64_t)(end + 1 - bytes) : 0, bytes, size);
    parse_almost_sound(bytes, size);
    return 0;
}
