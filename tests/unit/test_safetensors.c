// Safetensors files, valid and invalid: the parser checks everything, and reads back what the writer writes.
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "safetensors_whole.h"
#include "tensor/rng.h"
// needs those above
#include <cmocka.h>

// ---- files in memory ----

typedef struct Bytes {
    uint8_t *at;
    size_t size;
} Bytes;

// A file with this header, followed by `data` bytes 0, 1, 2, …. Exactly as long as it must be, so that a
// sanitizer detects a read past its end.
static Bytes file_of(const char *header, size_t data) {
    uint64_t length = strlen(header);
    Bytes file = {.size = 8 + length + data};
    file.at = host_alloc(file.size);
    memcpy(file.at, &length, 8);
    memcpy(file.at + 8, header, length);
    for (size_t i = 0; i < data; i++) file.at[8 + length + i] = (uint8_t)i;
    return file;
}

static void expect_fault_of(Bytes file, const char *part) {
    SafeTensors parsed;
    const char *fault = safetensors_parse(file.at, file.size, &parsed);
    if (!fault) fail_msg("parsed, instead of \"%s\"", part);
    if (!strstr(fault, part)) fail_msg("said \"%s\", instead of \"%s\"", fault, part);
    assert_true(!parsed.tensor && !parsed.key && !parsed.count && !parsed.keys);
}

static void expect_fault(const char *header, size_t data, const char *part) {
    Bytes file = file_of(header, data);
    expect_fault_of(file, part);
    free(file.at);
}

static void expect_sound(const char *header, size_t data, int tensors) {
    Bytes file = file_of(header, data);
    SafeTensors parsed;
    const char *fault = safetensors_parse(file.at, file.size, &parsed);
    if (fault) fail_msg("%s: %s", header, fault);
    assert_int_equal(parsed.count, tensors);
    safetensors_close(&parsed);
    free(file.at);
}

// ---- valid files ----

static void a_sound_file_is_read(void **state) {
    (void)state;
    // offsets neither in the order of the header nor aligned, spaces around, a scalar, an empty tensor
    Bytes file = file_of(
        "{\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[1,13]},"
        "\"__metadata__\":{\"format\":\"pt\",\"step\":\"7\"},"
        "\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[],\"data_offsets\":[0,1]},"
        "\"none\":{\"shape\":[4,0],\"data_offsets\":[13,13],\"dtype\":\"F32\"}}  ",
        13);
    SafeTensors parsed;
    assert_null(safetensors_parse(file.at, file.size, &parsed));
    assert_int_equal(parsed.count, 3);
    const SafeTensor *b = safetensors_find(&parsed, "b"), *a = safetensors_find(&parsed, "a");
    assert_non_null(a);
    assert_non_null(b);
    assert_int_equal(b->dtype, BF16);
    assert_int_equal(b->dims, 2);
    assert_int_equal(b->shape[0], 2);
    assert_int_equal(b->shape[1], 3);
    assert_int_equal(b->bytes, 12);
    assert_int_equal(b->data[0], 1);
    assert_int_equal(b->data[11], 12);
    assert_int_equal(a->dims, 0);
    assert_int_equal(a->bytes, 1);
    assert_int_equal(a->data[0], 0);
    assert_int_equal(safetensors_find(&parsed, "none")->bytes, 0);
    assert_null(safetensors_find(&parsed, "c"));
    assert_string_equal(safetensors_metadata(&parsed, "step"), "7");
    assert_null(safetensors_metadata(&parsed, "Step"));
    safetensors_close(&parsed);
    free(file.at);
}

static void every_dtype_has_its_size(void **state) {
    (void)state;
    static const char *const names[DTYPES] = {"F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "I32"};
    for (int i = 0; i < DTYPES; i++) {
        int bytes = 3 * (int)dtype_size(i);
        char *header = format_text("{\"x\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[0,%d]}}",
                                   names[i], bytes);
        expect_sound(header, bytes, 1);
        free(header);
    }
}

static void empty_files_are_sound(void **state) {
    (void)state;
    expect_sound("{}", 0, 0);
    expect_sound("{\"__metadata__\":{}}", 0, 0);
    // an empty tensor where another begins
    expect_sound(
        "{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
        "\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}",
        4, 2);
}

// ---- invalid files ----

static void header_length_is_checked(void **state) {
    (void)state;
    Bytes file = file_of("{}", 0);
    static const uint64_t lengths[] = {3, 1u << 20, UINT64_C(1) << 63, UINT64_MAX, UINT64_MAX - 7};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        memcpy(file.at, &lengths[i], 8);
        char *claim = format_text("claims %llu B, and the rest of the file has 2",
                                  (unsigned long long)lengths[i]);
        expect_fault_of(file, claim);
        free(claim);
    }
    uint64_t zero = 0;
    memcpy(file.at, &zero, 8);
    expect_fault_of(file, "no JSON object");
    free(file.at);
    // longer than any sensible header, even if the file is as long
    Bytes long_file = {.size = 8 + 100000001};
    long_file.at = calloc(long_file.size, 1);
    uint64_t absurd = 100000001;
    memcpy(long_file.at, &absurd, 8);
    expect_fault_of(long_file, "longer than");
    free(long_file.at);
}

// A file that is truncated at any byte is refused.
static void truncated_files_are_refused(void **state) {
    (void)state;
    Bytes file = file_of("{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8);
    for (size_t size = 0; size < file.size; size++) {
        Bytes cut = {.at = host_alloc(size), .size = size};
        memcpy(cut.at, file.at, size);
        SafeTensors parsed;
        if (!safetensors_parse(cut.at, size, &parsed)) fail_msg("parsed %zu of %zu bytes", size, file.size);
        free(cut.at);
    }
    free(file.at);
}

static void header_must_be_one_json_object(void **state) {
    (void)state;
    expect_fault("", 0, "no JSON object");
    expect_fault("[]", 0, "no JSON object");
    expect_fault("null", 0, "no JSON object");
    expect_fault("{", 0, "no JSON object");
    expect_fault("{\"1\":1,", 0, "no JSON object");
    expect_fault("{} {}", 0, "no JSON object");
    expect_fault("{}x", 0, "no JSON object");
    expect_fault("{\"x\":1}", 0, "dtype, shape and data_offsets");
    expect_fault("{\"a\\u0000b\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0,
                 "escaped zero");
    // An escaped backslash, and not a zero.
    Bytes sound = file_of("{\"__metadata__\":{\"a\":\"\\\\u0000\"}}", 0);
    SafeTensors parsed;
    assert_null(safetensors_parse(sound.at, sound.size, &parsed));
    assert_string_equal(safetensors_metadata(&parsed, "a"), "\\u0000");
    safetensors_close(&parsed);
    free(sound.at);
    Bytes file = file_of("{} ", 0);
    file.at[10] = 0;
    expect_fault_of(file, "zero byte");
    free(file.at);
}

static void deep_nesting_is_refused(void **state) {
    (void)state;
    enum { DEPTH = 1000000 };
    char *header = host_alloc(2 * DEPTH + 8);
    char *end = stpcpy(header, "{\"x\":");
    memset(end, '[', DEPTH);
    memset(end + DEPTH, ']', DEPTH);
    strcpy(end + 2 * DEPTH, "}");
    expect_fault(header, 0, "no JSON object");
    free(header);
}

static void keys_of_a_tensor_are_checked(void **state) {
    (void)state;
    expect_fault("{\"x\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "\"x\" is not described");
    expect_fault("{\"x\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "not described");
    expect_fault("{\"x\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "not described");
    expect_fault("{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"shape\":[2],\"data_offsets\":[0,4]}}", 4,
                 "once each");
    expect_fault("{\"x\":{\"dtype\":\"F33\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
                 "unknown dtype \"F33\"");
    expect_fault("{\"x\":{\"dtype\":32,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "unknown dtype");
    expect_fault("{\"x\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[0,8]}}", 8,
                 "dtype I64, which this program has no use for");
    expect_fault("{\"__metadata__\":[]}", 0, "no JSON object");
    expect_fault("{\"__metadata__\":{\"step\":7}}", 0, "no string");
}

static void shapes_are_checked(void **state) {
    (void)state;
    static const struct {
        const char *shape, *part;
    } wrong[] = {
        {"3", "no list"},
        {"[-1]", "whole number"},
        {"[1.5]", "whole number"},
        {"[\"1\"]", "whole number"},
        {"[null]", "whole number"},
        {"[1e400]", "whole number"},
        {"[9007199254740992]", "whole number"},        // 2^53
        {"[9223372036854775808]", "whole number"},     // 2^63
        {"[18446744073709551617]", "whole number"},    // 2^64 + 1
        {"[4294967296,4294967296]", "more elements"},  // their product is 2^64
        {"[4294967297,4294967297,0]", "more elements"},
        {"[9007199254740991,1024]", "more bytes"},
        {"[1,1,1,1,1]", "more than 4 dimensions"},
        {"[2]", "has 4 B, its shape and dtype make 8"},
        {"[0]", "has 4 B, its shape and dtype make 0"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char *header =
            format_text("{\"x\":{\"dtype\":\"F32\",\"shape\":%s,\"data_offsets\":[0,4]}}", wrong[i].shape);
        expect_fault(header, 4, wrong[i].part);
        free(header);
    }
}

static void offsets_are_checked(void **state) {
    (void)state;
    static const struct {
        const char *offsets, *part;
    } wrong[] = {
        {"[0,8]", "claims bytes 0 to 8 of 4"},
        {"[4,8]", "claims bytes 4 to 8 of 4"},
        {"[4,0]", "claims bytes 4 to 0 of 4"},
        {"[9007199254740990,9007199254740991]", "claims bytes"},
        {"[-4,0]", "two whole numbers"},
        {"[0.5,4.5]", "two whole numbers"},
        {"[0,9007199254740993]", "two whole numbers"},
        {"[0,18446744073709551620]", "two whole numbers"},  // 2^64 + 4
        {"[0]", "two whole numbers"},
        {"[0,4,4]", "two whole numbers"},
        {"{\"0\":0,\"1\":4}", "two whole numbers"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char *header =
            format_text("{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":%s}}", wrong[i].offsets);
        expect_fault(header, 4, wrong[i].part);
        free(header);
    }
}

// Two tensors of 8 bytes that should tile 16.
static void expect_places(int a, int b, size_t data, const char *part) {
    char *header = format_text(
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[%d,%d]},"
        "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[%d,%d]}}",
        a, a + 8, b, b + 8);
    if (part) expect_fault(header, data, part);
    else expect_sound(header, data, 2);
    free(header);
}

static void tensors_must_tile_the_file(void **state) {
    (void)state;
    expect_places(0, 8, 16, NULL);
    expect_places(8, 0, 16, NULL);
    expect_places(0, 4, 12, "\"a\" and \"b\" overlap");
    expect_places(4, 0, 12, "\"b\" and \"a\" overlap");
    expect_places(0, 0, 16, "overlap");
    expect_places(0, 9, 17, "a hole of 1 B lies before tensor \"b\"");
    expect_places(1, 9, 17, "a hole of 1 B lies before tensor \"a\"");
    expect_places(0, 8, 17, "1 B at the end: no tensor has them");
    expect_fault("{}", 1, "1 B at the end");
    // an empty tensor in the middle of another one
    expect_fault(
        "{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
        "\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[2,2]}}",
        4, "overlap");
}

static void names_stand_once(void **state) {
    (void)state;
    expect_fault(
        "{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
        "\"y\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]},"
        "\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]}}",
        12, "\"x\" stands there twice");
    expect_fault("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "twice");
    expect_fault("{\"__metadata__\":{\"a\":\"1\",\"b\":\"2\",\"a\":\"3\"}}", 0, "\"a\" stands");
    // A letter's case counts.
    expect_sound(
        "{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
        "\"X\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
        8, 2);
}

// A name may be long or full of control codes; the sentence is neither.
static void sentences_stay_clean(void **state) {
    (void)state;
    char name[2000];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    memcpy(name, "\\u001b[31m", 10);
    char *header = format_text("{\"%s\":1}", name);
    Bytes file = file_of(header, 0);
    SafeTensors parsed;
    const char *fault = safetensors_parse(file.at, file.size, &parsed);
    assert_non_null(fault);
    assert_true(strlen(fault) < 400);
    for (const char *c = fault; *c; c++) assert_true((unsigned char)*c >= ' ');
    free(file.at);
    free(header);
}

// ---- writing ----

static char folder[] = "/tmp/test_safetensors.XXXXXX";

static int make_folder(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state) {
    (void)state;
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

static void read_random(void *context, int tensor, uint8_t *bytes) {
    const SafeTensors *file = context;
    for (int64_t i = 0; i < file->tensor[tensor].bytes; i++)
        bytes[i] = (uint8_t)rng_bits(3, (uint64_t)tensor + 100, (uint64_t)i);
}

static void what_is_written_reads_back(void **state) {
    (void)state;
    SafeTensor tensor[] = {
        {.name = "f64", .dtype = F64, .dims = 2, .shape = {3, 5}, .bytes = 120},
        {.name = "with \"quotes\" and \\ and ü", .dtype = BF16, .dims = 1, .shape = {7}, .bytes = 14},
        {.name = "odd", .dtype = E5M2, .dims = 1, .shape = {3}, .bytes = 3},
        {.name = "scalar", .dtype = I32, .dims = 0, .bytes = 4},
        {.name = "empty", .dtype = F32, .dims = 2, .shape = {0, 9}, .bytes = 0},
    };
    char *key[] = {"format", "line"}, *value[] = {"pt", "one\ntwo \"three\""};
    SafeTensors contents = {.tensor = tensor, .count = 5, .key = key, .value = value, .keys = 2};
    char *path = format_text("%s/all.safetensors", folder);
    const char *wrong = write_whole(path, &contents, read_random, &contents);
    if (wrong) fail_msg("%s", wrong);

    SafeTensors read = safetensors_open(path);
    assert_int_equal(read.count, 5);
    for (int i = 0; i < 5; i++) {
        const SafeTensor *t = safetensors_find(&read, tensor[i].name);
        assert_non_null(t);
        assert_int_equal(t->dtype, tensor[i].dtype);
        assert_int_equal(t->dims, tensor[i].dims);
        assert_memory_equal(t->shape, tensor[i].shape, sizeof t->shape);
        assert_int_equal(t->bytes, tensor[i].bytes);
        uint8_t expected[120];
        read_random(&contents, i, expected);
        assert_memory_equal(t->data, expected, t->bytes);
    }
    assert_string_equal(safetensors_metadata(&read, "format"), "pt");
    assert_string_equal(safetensors_metadata(&read, "line"), value[1]);
    safetensors_close(&read);
    // Readers that map the file want the first tensor aligned, however long the header is.
    for (int i = 0; i < 8; i++, value[1]++) {
        assert_null(write_whole(path, &contents, read_random, &contents));
        read = safetensors_open(path);
        uint64_t header;
        memcpy(&header, read.file, 8);
        assert_int_equal(header % 8, 0);
        safetensors_close(&read);
    }
    free(path);
}

// A limit on the file's size, in place of a full disk: the write fails in the middle.
static void a_write_that_fails_is_told(void **state) {
    (void)state;
    SafeTensor tensor = {.name = "x", .dtype = F32, .dims = 1, .shape = {100000}, .bytes = 400000};
    SafeTensors contents = {.tensor = &tensor, .count = 1};
    char *path = format_text("%s/big.safetensors", folder), *nowhere = format_text("%s/no/file", folder);
    struct rlimit old, low;
    getrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, SIG_IGN);
    const rlim_t limits[] = {0, 4, 100, 4096, 399999, 400000};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        low = (struct rlimit){.rlim_cur = limits[i], .rlim_max = old.rlim_max};
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
        const char *wrong = write_whole(path, &contents, read_random, &contents);
        setrlimit(RLIMIT_FSIZE, &old);
        if (!wrong) fail_msg("no fault at %lu bytes", (unsigned long)limits[i]);
        if (!strstr(wrong, "File too large")) fail_msg("said \"%s\"", wrong);
    }
    assert_null(write_whole(path, &contents, read_random, &contents));
    const char *wrong = write_whole(nowhere, &contents, read_random, &contents);
    assert_non_null(wrong);
    assert_non_null(strstr(wrong, "No such file or directory"));
    free(path);
    free(nowhere);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_sound_file_is_read),        cmocka_unit_test(every_dtype_has_its_size),
        cmocka_unit_test(empty_files_are_sound),       cmocka_unit_test(header_length_is_checked),
        cmocka_unit_test(truncated_files_are_refused), cmocka_unit_test(header_must_be_one_json_object),
        cmocka_unit_test(deep_nesting_is_refused),     cmocka_unit_test(keys_of_a_tensor_are_checked),
        cmocka_unit_test(shapes_are_checked),          cmocka_unit_test(offsets_are_checked),
        cmocka_unit_test(tensors_must_tile_the_file),  cmocka_unit_test(names_stand_once),
        cmocka_unit_test(sentences_stay_clean),        cmocka_unit_test(what_is_written_reads_back),
        cmocka_unit_test(a_write_that_fails_is_told),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
