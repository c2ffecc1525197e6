// safetensors.c: the file format in which Hugging Face stores weights, read with suspicion.
//
//     8 bytes   length n of the header, little-endian
//     n bytes   JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …,
//                      "__metadata__": {"key": "value", …}}
//     the rest  the tensors' bytes, one after another, with no hole and no overlap
//
// A file may come from anywhere. Until every tensor is known to be within the file and to have as many
// bytes as its shape requires, nothing is trusted: no length, no offset, no product of dimensions.
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "files.h"
#include "safetensors.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors files are little-endian");

enum {
    LENGTH_BYTES = 8,
    HEADER_MAX = 100000000,  // bytes, the limit of the reference implementation
    ALIGNMENT = 8            // of the first tensor; the header is padded with spaces up to it
};

#define METADATA "__metadata__"

static const char *const dtype_names[DTYPES] = {"F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "I32"};
// Valid in a safetensors file, but not a DType here.
static const char *const foreign_dtypes[] = {"I64",  "U64", "U32", "I16",     "U16",     "I8",     "U8",
                                             "BOOL", "C64", "F4",  "F8_E8M0", "F6_E2M3", "F6_E3M2"};

// ---- the header ----

// JSON numbers arrive as doubles, which tell whole numbers apart only below 2^53.
static bool whole_number(const cJSON *item, int64_t *value) {
    double x = cJSON_IsNumber(item) ? item->valuedouble : -1;
    if (!(x >= 0 && x < 0x1p53 && x == floor(x))) return false;
    *value = (int64_t)x;
    return true;
}

// cJSON ends a string at an escaped zero, so that two different names could come out equal.
static bool has_escaped_zero(const char *json) {
    for (; (json = strchr(json, '\\')); json += 2)
        if (!strncmp(json, "\\u0000", 6)) return true;
        else if (!json[1]) return false;
    return false;
}

static const char *parse_metadata(const cJSON *object, SafeTensors *result) {
    if (!cJSON_IsObject(object)) return fault_text(METADATA " is no JSON object");
    int count = cJSON_GetArraySize(object);
    result->key = host_alloc(count * sizeof *result->key);
    result->value = host_alloc(count * sizeof *result->value);
    for (const cJSON *item = object->child; item; item = item->next) {
        if (!cJSON_IsString(item))
            return fault_text("the value of \"%s\" in " METADATA " is no string", printable(item->string));
        result->key[result->keys] = format_text("%s", item->string);
        result->value[result->keys++] = format_text("%s", item->valuestring);
    }
    const char *twice = name_twice(result->key, result->keys);
    return twice ? fault_text("\"%s\" stands in " METADATA " twice", printable(twice)) : NULL;
}

static const char *parse_dtype(const char *name, const cJSON *item, DType *dtype) {
    const char *text = cJSON_IsString(item) ? item->valuestring : "";
    for (int i = 0; i < DTYPES; i++)
        if (!strcmp(text, dtype_names[i])) return *dtype = i, NULL;
    for (size_t i = 0; i < sizeof foreign_dtypes / sizeof *foreign_dtypes; i++)
        if (!strcmp(text, foreign_dtypes[i]))
            return fault_text("tensor \"%s\" has dtype %s, which this program has no use for", name, text);
    return fault_text("tensor \"%s\" has the unknown dtype \"%s\"", name, printable(text));
}

// Multiplies *elements by the shape's.
static const char *parse_shape(const char *name, const cJSON *item, SafeTensor *tensor, int64_t *elements) {
    if (!cJSON_IsArray(item)) return fault_text("the shape of tensor \"%s\" is no list", name);
    for (const cJSON *size = item->child; size; size = size->next) {
        if (tensor->dims == MAX_DIMS)
            return fault_text("tensor \"%s\" has more than %d dimensions", name, MAX_DIMS);
        int64_t *dim = &tensor->shape[tensor->dims++];
        if (!whole_number(size, dim))
            return fault_text("a dimension of tensor \"%s\" is no whole number from 0 to 2^53", name);
        if (__builtin_mul_overflow(*elements, *dim, elements))
            return fault_text("the shape of tensor \"%s\" has more elements than 64 bits count", name);
    }
    return NULL;
}

// data: the bytes after the header, size of them.
static const char *parse_tensor(const cJSON *object, const uint8_t *data, int64_t size,
                                SafeTensor *tensor) {
    const char *name = printable(object->string);
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(object, "dtype");
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(object, "shape");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(object, "data_offsets");
    // Exactly these three: a key that occurs twice might be read one way here and another way elsewhere.
    if (!cJSON_IsObject(object) || !dtype || !shape || !offsets || cJSON_GetArraySize(object) != 3)
        return fault_text("tensor \"%s\" is not described by dtype, shape and data_offsets, once each",
                          name);

    const char *wrong = parse_dtype(name, dtype, &tensor->dtype);
    if (wrong) return wrong;
    int64_t elements = 1, bytes, begin, end;
    wrong = parse_shape(name, shape, tensor, &elements);
    if (wrong) return wrong;
    if (__builtin_mul_overflow(elements, (int64_t)dtype_size(tensor->dtype), &bytes))
        return fault_text("tensor \"%s\" has more bytes than 64 bits count", name);
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        !whole_number(offsets->child, &begin) || !whole_number(offsets->child->next, &end))
        return fault_text("the data_offsets of tensor \"%s\" are not two whole numbers from 0 to 2^53",
                          name);
    if (begin > end || end > size)
        return fault_text("tensor \"%s\" claims bytes %lld to %lld of %lld", name, (long long)begin,
                          (long long)end, (long long)size);
    if (end - begin != bytes)
        return fault_text("tensor \"%s\" has %lld B, its shape and dtype make %lld", name,
                          (long long)(end - begin), (long long)bytes);
    tensor->name = format_text("%s", object->string);
    tensor->data = data + begin;
    tensor->bytes = bytes;
    return NULL;
}

// ---- all tensors together ----

static int compare_places(const void *a, const void *b) {
    const SafeTensor *x = *(const SafeTensor *const *)a, *y = *(const SafeTensor *const *)b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);  // empty ones first
}

// The tensors, in the order of their places, must follow each other from `data` to `end`.
static const char *check_places(const SafeTensors *file, const uint8_t *data, const uint8_t *end) {
    const SafeTensor **sorted = host_alloc(file->count * sizeof *sorted);
    for (int i = 0; i < file->count; i++) sorted[i] = &file->tensor[i];
    qsort(sorted, file->count, sizeof *sorted, compare_places);
    const char *wrong = NULL;
    for (int i = 0; i < file->count && !wrong; i++) {
        if (sorted[i]->data < data)
            wrong = fault_text("tensors \"%s\" and \"%s\" overlap", printable(sorted[i - 1]->name),
                               printable(sorted[i]->name));
        else if (sorted[i]->data > data)
            wrong = fault_text("a hole of %lld B lies before tensor \"%s\"",
                               (long long)(sorted[i]->data - data), printable(sorted[i]->name));
        else data += sorted[i]->bytes;
    }
    free(sorted);
    if (!wrong && data != end)
        wrong = fault_text("%lld B at the end: no tensor has them", (long long)(end - data));
    return wrong;
}

static const char *check_names(const SafeTensors *file) {
    char **names = host_alloc(file->count * sizeof *names);
    for (int i = 0; i < file->count; i++) names[i] = file->tensor[i].name;
    const char *twice = name_twice(names, file->count);
    free(names);
    return twice ? fault_text("tensor \"%s\" stands there twice", printable(twice)) : NULL;
}

static const char *parse_header(const cJSON *header, const uint8_t *data, int64_t size,
                                SafeTensors *result) {
    result->tensor = host_alloc(cJSON_GetArraySize(header) * sizeof *result->tensor);
    for (const cJSON *item = header->child; item; item = item->next) {
        const char *wrong;
        if (!strcmp(item->string, METADATA)) {
            wrong = result->key ? fault_text(METADATA " stands there twice") : parse_metadata(item, result);
        } else {
            SafeTensor tensor = {0};
            wrong = parse_tensor(item, data, size, &tensor);
            if (!wrong) result->tensor[result->count++] = tensor;
        }
        if (wrong) return wrong;
    }
    const char *wrong = check_names(result);
    return wrong ? wrong : check_places(result, data, data + size);
}

const char *safetensors_parse(const uint8_t *bytes, size_t size, SafeTensors *result) {
    *result = (SafeTensors){0};
    if (size < LENGTH_BYTES) return fault_text("too short for a safetensors file: %zu B", size);
    uint64_t length;
    memcpy(&length, bytes, LENGTH_BYTES);
    if (length > size - LENGTH_BYTES)
        return fault_text("its header claims %llu B, and the rest of the file has %zu",
                          (unsigned long long)length, size - LENGTH_BYTES);
    if (length > HEADER_MAX)
        return fault_text("its header of %llu bytes is longer than the %d that are allowed",
                          (unsigned long long)length, HEADER_MAX);
    if (memchr(bytes + LENGTH_BYTES, 0, length)) return fault_text("its header contains a zero byte");

    // A copy that ends in a zero: cJSON before 1.7.18 may look one byte past the text it is given. It
    // refuses nesting beyond 1,000 levels by itself, and text after the object because of its last
    // argument.
    char *json = host_alloc(length + 1);
    memcpy(json, bytes + LENGTH_BYTES, length);
    json[length] = '\0';
    cJSON *header = cJSON_ParseWithLengthOpts(json, length + 1, NULL, true);
    const uint8_t *data = bytes + LENGTH_BYTES + length;
    const char *wrong = !cJSON_IsObject(header)  ? fault_text("its header is no JSON object")
                        : has_escaped_zero(json) ? fault_text("its header contains an escaped zero byte")
                                                 : parse_header(header, data, bytes + size - data, result);
    cJSON_Delete(header);
    free(json);
    if (wrong) safetensors_close(result);
    return wrong;
}

// ---- files ----

SafeTensors safetensors_open(const char *path) {
    const uint8_t *bytes;
    size_t size;
    const char *unreadable = input_map(path, &bytes, &size);
    CHECK(!unreadable, "%s", unreadable);
    SafeTensors file;
    const char *wrong = safetensors_parse(bytes, size, &file);
    CHECK(!wrong, "%s: %s", path, wrong);
    file.file = bytes;
    file.size = size;
    return file;
}

const SafeTensor *safetensors_find(const SafeTensors *file, const char *name) {
    for (int i = 0; i < file->count; i++)
        if (!strcmp(file->tensor[i].name, name)) return &file->tensor[i];
    return NULL;
}

const char *safetensors_metadata(const SafeTensors *file, const char *key) {
    for (int i = 0; i < file->keys; i++)
        if (!strcmp(file->key[i], key)) return file->value[i];
    return NULL;
}

void safetensors_close(SafeTensors *file) {
    for (int i = 0; i < file->count; i++) free(file->tensor[i].name);
    for (int i = 0; i < file->keys; i++) {
        free(file->key[i]);
        free(file->value[i]);
    }
    free(file->tensor);
    free(file->key);
    free(file->value);
    input_unmap(file->file, file->size);
    *file = (SafeTensors){0};
}

// ---- writing ----

static int64_t tensor_size(const SafeTensor *tensor) {
    int64_t bytes = (int64_t)dtype_size(tensor->dtype);
    for (int i = 0; i < tensor->dims; i++) bytes *= tensor->shape[i];
    return bytes;
}

// The JSON text, padded to ALIGNMENT. The caller frees it.
static char *header_text(const SafeTensors *contents) {
    cJSON *header = cJSON_CreateObject(), *metadata = cJSON_AddObjectToObject(header, METADATA);
    for (int i = 0; i < contents->keys; i++)
        cJSON_AddStringToObject(metadata, contents->key[i], contents->value[i]);
    int64_t offset = 0;
    for (int i = 0; i < contents->count; i++) {
        const SafeTensor *tensor = &contents->tensor[i];
        cJSON *item = cJSON_AddObjectToObject(header, tensor->name);
        cJSON_AddStringToObject(item, "dtype", dtype_names[tensor->dtype]);
        cJSON *shape = cJSON_AddArrayToObject(item, "shape");
        for (int j = 0; j < tensor->dims; j++)
            cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)tensor->shape[j]));
        cJSON *offsets = cJSON_AddArrayToObject(item, "data_offsets");
        cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)offset));
        offset += tensor_size(tensor);
        cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)offset));
    }
    char *json = cJSON_PrintUnformatted(header);
    CHECK(json, "out of host memory for the header of a safetensors file");
    int length = (int)strlen(json), padded = (length + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    char *text = format_text("%-*s", padded, json);
    cJSON_free(json);
    cJSON_Delete(header);
    return text;
}

// Where the first tensor's bytes begin.
static int64_t data_begins(const char *header) { return LENGTH_BYTES + (int64_t)strlen(header); }

// Writes all of these bytes, even if the system takes fewer at a time. False with errno set if it fails.
static bool put_all(int file, const void *bytes, int64_t size, int64_t at) {
    const char *next = bytes;
    for (ssize_t put; size > 0; next += put, at += put, size -= put) {
        put = pwrite(file, next, (size_t)size, at);
        if (put < 0 && errno != EINTR) return false;
        if (put < 0) put = 0;
    }
    return true;
}

const char *safetensors_create(const char *path, const SafeTensors *contents) {
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file < 0) return file_fault("create", path);
    char *header = header_text(contents);
    uint64_t length = strlen(header);
    int64_t size = data_begins(header);
    for (int i = 0; i < contents->count; i++) size += tensor_size(&contents->tensor[i]);
    do errno = posix_fallocate(file, 0, size);
    while (errno == EINTR);
    bool whole = errno == 0 && put_all(file, &length, LENGTH_BYTES, 0) &&
                 put_all(file, header, (int64_t)length, LENGTH_BYTES);
    int error = errno;
    free(header);
    if (close(file) != 0 && whole) whole = false, error = errno;
    errno = error;
    return whole ? NULL : file_fault("write", path);
}

struct SafeWriter {
    int file;
    int64_t at;  // where the current tensor begins
    int error;   // errno of the first write that failed; 0: none has
};

void safetensors_put(SafeWriter *to, int64_t first, const void *bytes, int64_t size) {
    if (!to->error && !put_all(to->file, bytes, size, to->at + first)) to->error = errno;
}

const char *safetensors_fill(const char *path, const SafeTensors *contents, SafeTensorsGive give,
                             void *context) {
    char *header = header_text(contents);
    SafeWriter to = {.file = open(path, O_WRONLY | O_CLOEXEC), .at = data_begins(header)};
    free(header);
    if (to.file < 0) return file_fault("open", path);
    for (int i = 0; i < contents->count; to.at += tensor_size(&contents->tensor[i++]))
        give(context, i, &to);
    if (!to.error && fsync(to.file) != 0) to.error = errno;
    if (close(to.file) != 0 && !to.error) to.error = errno;  // some file systems report a full disk here
    errno = to.error;
    return to.error ? file_fault("write", path) : NULL;
}
