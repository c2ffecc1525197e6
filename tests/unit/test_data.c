// Token files, valid and invalid, and the samples drawn from them.
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fatal.h"
#include "tensor/ops.h"
#include "train/data.h"
// needs those above
#include <cmocka.h>

enum { GPT2 = 20240520, LLAMA3 = 20240801, HEADER = 1024 };

// ---- files made for the tests, in a folder that is removed at the end ----

static char folder[] = "/tmp/test_data.XXXXXX";

// Rotates over a few static buffers.
static const char *in_folder(const char *name) {
    static char path[4][256];
    static int next;
    char *text = path[next++ % 4];
    snprintf(text, sizeof *path, "%s/%s", folder, name);
    return text;
}

static const char *write_file(const char *name, const void *bytes, size_t size) {
    const char *path = in_folder(name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
    return path;
}

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

static void put_word(uint8_t *to, uint32_t word, size_t width) {
    for (size_t i = 0; i < width; i++) to[i] = (uint8_t)(word >> (8 * i));
}

// A token file of n tokens; token i is first + i. The caller frees it.
static uint8_t *token_file(uint32_t magic, uint32_t version, size_t n, uint32_t first, size_t *size) {
    size_t width = magic == GPT2 ? 2 : 4;
    *size = HEADER + n * width;
    uint8_t *bytes = calloc(1, *size);
    put_word(bytes, magic, 4);
    put_word(bytes + 4, version, 4);
    put_word(bytes + 8, (uint32_t)n, 4);
    for (size_t i = 0; i < n; i++) put_word(bytes + HEADER + i * width, first + (uint32_t)i, width);
    return bytes;
}

// ---- the parser ----

static void expect_fault(const uint8_t *bytes, size_t size, const char *part) {
    const uint8_t mark[1] = {0};
    Tokens tokens = {mark, 9, -7};
    // A copy of exactly this size, so that a sanitizer detects a read past the end.
    uint8_t *copy = malloc(size ? size : 1);
    if (size) memcpy(copy, bytes, size);
    const char *fault = data_parse(copy, size, &tokens);
    free(copy);
    if (!fault) fail_msg("parsed, instead of \"%s\"", part);
    if (!strstr(fault, part)) fail_msg("\"%s\" does not say \"%s\"", fault, part);
    assert_null(strchr(fault, '\n'));
    assert_ptr_equal(tokens.at, mark);
    assert_int_equal(tokens.count, -7);
}

static void text_is_its_bytes(void **state) {
    (void)state;
    uint8_t bytes[256 + 3];
    for (int i = 0; i < 256; i++) bytes[i] = (uint8_t)(255 - i);
    memcpy(bytes + 256, "\0\r\n", 3);
    for (size_t size = 1; size <= sizeof bytes; size += size < 8 ? 1 : 50) {
        Tokens tokens;
        int32_t read[sizeof bytes];
        assert_null(data_parse(bytes, size, &tokens));
        assert_int_equal(tokens.width, 1);
        assert_int_equal(tokens.count, size);
        data_copy(&tokens, 0, tokens.count, read);
        for (size_t i = 0; i < size; i++) assert_int_equal(read[i], bytes[i]);
    }
}

static void token_files_of_both_kinds(void **state) {
    (void)state;
    static const struct {
        uint32_t magic, version, first;
    } kind[] = {{GPT2, 1, 65535 - 99}, {LLAMA3, 7, INT32_MAX - 99u}, {LLAMA3, 7, 128156}};
    for (size_t k = 0; k < sizeof kind / sizeof *kind; k++) {
        size_t size;
        uint8_t *bytes = token_file(kind[k].magic, kind[k].version, 100, kind[k].first, &size);
        // At an odd address: no alignment may be assumed.
        uint8_t *odd = malloc(size + 1);
        memcpy(odd + 1, bytes, size);
        Tokens tokens;
        int32_t read[100];
        assert_null(data_parse(odd + 1, size, &tokens));
        assert_int_equal(tokens.width, kind[k].magic == GPT2 ? 2 : 4);
        assert_int_equal(tokens.count, 100);
        data_copy(&tokens, 0, 100, read);
        for (uint32_t i = 0; i < 100; i++) assert_int_equal(read[i], kind[k].first + i);
        free(odd);
        free(bytes);
    }
}

static void wrong_files_are_told_what_is_wrong(void **state) {
    (void)state;
    expect_fault(NULL, 0, "empty");
    for (int k = 0; k < 2; k++) {
        uint32_t magic = k ? LLAMA3 : GPT2, version = k ? 7 : 1;
        size_t size;
        uint8_t *bytes = token_file(magic, version, 10, 5, &size);
        static const size_t short_of_header[] = {4, 5, 8, 12, HEADER - 1};
        for (size_t i = 0; i < 5; i++) expect_fault(bytes, short_of_header[i], "truncated");
        for (size_t cut = HEADER; cut < size; cut++) expect_fault(bytes, cut, "truncated");

        uint8_t longer[2048] = {0};
        memcpy(longer, bytes, size);
        expect_fault(longer, size + 1, "too long");
        expect_fault(longer, size + 4, "too long");

        put_word(bytes + 4, k ? 1 : 7, 4);
        expect_fault(bytes, size, "version");
        put_word(bytes + 4, version, 4);
        put_word(bytes + 8, 0, 4);
        expect_fault(bytes, size, "counts 0 tokens");
        put_word(bytes + 8, (uint32_t)-10, 4);
        expect_fault(bytes, size, "counts -10 tokens");
        // 4 (2^30 + 10) is 40 in 32 bits: such a count must not wrap round into the right size.
        put_word(bytes + 8, k ? (1u << 30) + 10 : INT32_MAX, 4);
        expect_fault(bytes, size, "truncated");
        free(bytes);
    }
    size_t size;
    uint8_t *bytes = token_file(LLAMA3, 7, 10, 5, &size);
    put_word(bytes + HEADER + 36, 1u << 31, 4);
    expect_fault(bytes, size, "token 2147483648 at position 9");
    put_word(bytes, 20240522, 4);  // llm.c's evaluation sets
    expect_fault(bytes, size, "magic 20240522");
    put_word(bytes, 20240326, 4);  // llm.c's models
    expect_fault(bytes, size, "holds no tokens");
    free(bytes);
}

// ---- what data_open refuses ----

typedef struct Opening {
    const char *path;
    int64_t vocab, seq;
} Opening;

static void open_it(void *context) {
    const Opening *o = context;
    data_open(o->path, o->vocab, o->seq);
}

// Opening it must end with one sentence that has every part (NULL ends them).
static void expect_refusal(Opening opening, ...) {
    va_list parts;
    va_start(parts, opening);
    for (const char *part; (part = va_arg(parts, const char *));) expect_fatal(open_it, &opening, part);
    va_end(parts);
}
#define EXPECT_REFUSAL(path, vocab, seq, ...) expect_refusal((Opening){path, vocab, seq}, __VA_ARGS__, NULL)

static void refusals_name_the_file_and_the_rule(void **state) {
    (void)state;
    uint8_t noise[1000];
    memset(noise, 'a', sizeof noise);
    EXPECT_REFUSAL(in_folder("absent.txt"), 256, 8, "absent.txt", "No such file");
    EXPECT_REFUSAL(folder, 256, 8, folder, "directory");
    EXPECT_REFUSAL("/dev/null", 256, 8, "/dev/null", "a pipe or a device");
    assert_int_equal(mkfifo(in_folder("fifo"), 0600), 0);
    EXPECT_REFUSAL(in_folder("fifo"), 256, 8, "fifo", "a pipe or a device");
    EXPECT_REFUSAL(write_file("empty.txt", noise, 0), 256, 8, "empty.txt", "empty");
    // Of 99 tokens 9 are held out, and a sequence of 8 needs 10.
    EXPECT_REFUSAL(write_file("short.txt", noise, 99), 256, 8, "short.txt is too short",
                   "--seq 8", "100 are needed, and their number is 99");
    Data data = data_open(write_file("long enough.txt", noise, 100), 256, 8);
    assert_int_equal(data.train_count, 90);
    data_close(&data);

    size_t size;
    uint8_t *bytes = token_file(GPT2, 1, 1000, 0, &size);
    EXPECT_REFUSAL(write_file("cut.bin", bytes, size - 1), 50304, 8, "cut.bin", "truncated");
    put_word(bytes + HEADER + 2 * 999, 50256, 2);
    EXPECT_REFUSAL(write_file("big.bin", bytes, size), 1000, 8, "big.bin", "token 50256 at position 999",
                   "--vocab 1000");
    EXPECT_REFUSAL(write_file("big.bin", bytes, size), 50256, 8, "token 50256", "--vocab 50256");
    data = data_open(write_file("big.bin", bytes, size), 50257, 8);
    assert_int_equal(data.vocab, 50257);
    data_close(&data);
    free(bytes);
}

static void text_beyond_a_small_vocabulary(void **state) {
    (void)state;
    uint8_t bytes[1000];
    memset(bytes, 'a', sizeof bytes);
    bytes[17] = 200;
    EXPECT_REFUSAL(write_file("umlaut.txt", bytes, 1000), 128, 8, "umlaut.txt", "byte 200 at offset 17",
                   "--vocab 128", "--vocab 256");
    EXPECT_REFUSAL(write_file("umlaut.txt", bytes, 1000), 200, 8, "byte 200", "--vocab 200");
    bytes[999] = 255;  // one more than the last that --vocab 255 has
    EXPECT_REFUSAL(write_file("last.txt", bytes, 1000), 255, 8, "byte 255 at offset 999", "--vocab 255");
    static const int64_t vocab[] = {201, 256, 32000}, expected[] = {201, 256, 256};
    for (int i = 0; i < 3; i++) {
        Data data = data_open(in_folder("umlaut.txt"), vocab[i], 8);
        assert_true(data.text);
        assert_int_equal(data.vocab, expected[i]);
        assert_int_equal(data.count, 1000);
        data_close(&data);
    }
}

// Held-out tokens, too: a resumed run says whether it has other data.
static void the_hash_is_of_every_token(void **state) {
    (void)state;
    uint8_t bytes[1000];
    uint64_t hash[4];
    for (int i = 0; i < 4; i++) {
        memset(bytes, 'a', sizeof bytes);
        if (i) bytes[i == 1 ? 0 : i == 2 ? 500 : 999] = 'b';
        Data data = data_open(write_file("hashed.txt", bytes, 1000), 256, 8);
        hash[i] = data_hash(&data);
        data_close(&data);
        for (int j = 0; j < i; j++) assert_true(hash[j] != hash[i]);
    }
}

// In bytes. A sanitizer's shadow memory counts too, even if nothing fills it.
static rlim_t private_memory(void) {
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%*d %*d %*d %*d %*d %ld", &pages), 1);
    fclose(file);
    return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

// A sparse file with 8 GB of zeros: what is not sampled is neither read nor held in memory.
static void a_text_larger_than_memory_opens(void **state) {
    (void)state;
    const char *path = write_file("large.txt", "", 0);
    assert_int_equal(truncate(path, (off_t)8 << 30), 0);
    struct rlimit limit = {.rlim_cur = private_memory() + ((rlim_t)1 << 30), .rlim_max = RLIM_INFINITY},
                  before;
    assert_int_equal(getrlimit(RLIMIT_DATA, &before) | setrlimit(RLIMIT_DATA, &limit), 0);
    Data data = data_open(path, 256, 8);
    int32_t tokens[8], targets[8] = {1};
    data_sample(&data, 1, 3, true, 8, tokens, targets);
    assert_int_equal(targets[0], 0);
    data_close(&data);
    assert_int_equal(setrlimit(RLIMIT_DATA, &before), 0);
}

// ---- the default corpus ----

static const char OPEN_DEFAULT[] = "--open-default-corpus";

// Runs a copy of this program as <book>/build/tests/copy; returns its wait status.
static int run_copy(char *output, size_t room) {
    char command[1024];
    snprintf(command, sizeof command, "%s %s 2>&1", in_folder("book/build/tests/copy"), OPEN_DEFAULT);
    fflush(NULL);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    output[fread(output, 1, room - 1, pipe)] = 0;
    return pclose(pipe);
}

static void the_default_corpus_lies_beside_the_program(void **state) {
    (void)state;
    assert_int_equal(mkdir(in_folder("book"), 0700), 0);
    assert_int_equal(mkdir(in_folder("book/build"), 0700), 0);
    assert_int_equal(mkdir(in_folder("book/build/tests"), 0700), 0);
    char command[512], output[4096];
    snprintf(command, sizeof command, "cp /proc/%d/exe %s", (int)getpid(),
             in_folder("book/build/tests/copy"));
    assert_int_equal(system(command), 0);

    unsetenv("ULTRASCALE_DATA");
    int status = run_copy(output, sizeof output);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != STATUS_USAGE) fail_msg("0x%x: %s", status, output);
    if (!strstr(output, "book/build/corpus.txt") || !strstr(output, "run make")) fail_msg("%s", output);

    uint8_t text[321];
    memset(text, '#', sizeof text);
    write_file("book/build/corpus.txt", text, sizeof text);
    status = run_copy(output, sizeof output);
    if (status != 0 || !strstr(output, "321 tokens")) fail_msg("0x%x: %s", status, output);

    write_file("other.txt", text, 213);
    setenv("ULTRASCALE_DATA", in_folder("other.txt"), 1);
    status = run_copy(output, sizeof output);
    if (status != 0 || !strstr(output, "213 tokens")) fail_msg("0x%x: %s", status, output);
    setenv("ULTRASCALE_DATA", in_folder("missing.txt"), 1);
    status = run_copy(output, sizeof output);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != STATUS_USAGE) fail_msg("0x%x: %s", status, output);
    if (!strstr(output, "ULTRASCALE_DATA names") || !strstr(output, "missing.txt")) fail_msg("%s", output);
    unsetenv("ULTRASCALE_DATA");
}

static int open_default_corpus(void) {
    Data data = data_open(NULL, 256, 16);
    printf("%lld tokens of %s\n", (long long)data.count, data.path);
    data_close(&data);
    return 0;
}

// ---- samples ----

enum { SEQ = 13, TOKENS = 617 };

// Token i is i: a sample shows where it was taken.
static Data counting(void) {
    size_t size;
    uint8_t *bytes = token_file(LLAMA3, 7, TOKENS, 0, &size);
    const char *path = write_file("counting.bin", bytes, size);
    free(bytes);
    return data_open(path, TOKENS, SEQ);
}

static void targets_are_the_next_tokens(void **state) {
    (void)state;
    Data data = counting();
    for (int64_t index = 0; index < 200; index++)
        for (int held_out = 0; held_out < 2; held_out++) {
            int32_t tokens[SEQ], targets[SEQ];
            data_sample(&data, 1, index, held_out, SEQ, tokens, targets);
            for (int i = 0; i < SEQ; i++) {
                assert_int_equal(tokens[i], tokens[0] + i);
                assert_int_equal(targets[i], tokens[i] + 1);
            }
        }
    data_close(&data);
}

static void training_never_sees_what_is_held_out(void **state) {
    (void)state;
    Data data = counting();
    assert_int_equal(data.train_count, TOKENS - TOKENS / 10);
    // Enough samples for each start to occur: the ends of both parts are reached, and not exceeded.
    int32_t least[2] = {TOKENS, TOKENS}, most[2] = {-1, -1};
    for (int64_t index = 0; index < 20000; index++)
        for (int held_out = 0; held_out < 2; held_out++) {
            int32_t tokens[SEQ], targets[SEQ];
            data_sample(&data, 3, index, held_out, SEQ, tokens, targets);
            if (tokens[0] < least[held_out]) least[held_out] = tokens[0];
            if (targets[SEQ - 1] > most[held_out]) most[held_out] = targets[SEQ - 1];
        }
    assert_int_equal(least[0], 0);
    assert_int_equal(most[0], data.train_count - 1);
    assert_int_equal(least[1], data.train_count);
    assert_int_equal(most[1], TOKENS - 1);
    data_close(&data);
}

static void samples_do_not_depend_on_how_they_are_grouped(void **state) {
    (void)state;
    enum { SAMPLES = 24 };
    Data data = counting();
    int32_t tokens[SAMPLES][SEQ], targets[SAMPLES][SEQ], other[SEQ], next[SEQ];
    for (int64_t i = 0; i < SAMPLES; i++) data_sample(&data, 5, i, false, SEQ, tokens[i], targets[i]);
    // In pieces, as ranks and micro-batches of several sizes would ask for them, from the last to the first.
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int micro_batch = 1; micro_batch <= 3; micro_batch++)
            for (int rank = ranks - 1; rank >= 0; rank--)
                for (int64_t i = SAMPLES - 1; i >= 0; i--) {
                    if (i / micro_batch % ranks != rank) continue;
                    data_sample(&data, 5, i, true, SEQ, other, next);
                    data_sample(&data, 5, i, false, SEQ, other, next);
                    assert_memory_equal(other, tokens[i], sizeof other);
                    assert_memory_equal(next, targets[i], sizeof next);
                }
    data_close(&data);
}

static void samples_differ_by_index_seed_and_part(void **state) {
    (void)state;
    enum { SAMPLES = 2000 };
    Data data = counting();
    int64_t starts = data.train_count - SEQ;
    int same_seed = 0, same_neighbour = 0, same_place = 0;
    double sum = 0;
    int32_t before = -1;
    for (int64_t i = 0; i < SAMPLES; i++) {
        int32_t a[SEQ], b[SEQ], h[SEQ], targets[SEQ];
        data_sample(&data, 1, i, false, SEQ, a, targets);
        data_sample(&data, 2, i, false, SEQ, b, targets);
        data_sample(&data, 1, i, true, SEQ, h, targets);
        same_seed += a[0] == b[0];
        same_neighbour += a[0] == before;
        same_place += a[0] % 40 == (h[0] - data.train_count) % 40;
        before = a[0];
        sum += a[0];
    }
    // By chance SAMPLES / starts = 3.7, and SAMPLES / 40 = 50.
    if (same_seed > 20 || same_neighbour > 20 || same_place > 90)
        fail_msg("%d equal between seeds, %d between neighbours, %d between parts", same_seed,
                 same_neighbour, same_place);
    double mean = sum / SAMPLES, middle = (double)(starts - 1) / 2, error = (double)starts / 3.464 / 44.7;
    if (!(mean > middle - 5 * error && mean < middle + 5 * error)) fail_msg("the mean start is %.1f", mean);
    data_close(&data);
}

static void prompts_are_masked_from_none_to_all(void **state) {
    (void)state;
    enum { SAMPLES = 5000 };
    int count[2][SEQ + 1] = {{0}};
    for (int64_t index = 0; index < SAMPLES; index++) {
        int32_t targets[SEQ + 1];
        for (int i = 0; i <= SEQ; i++) targets[i] = 1000 + i;
        data_mask_prompt(9, index, SEQ, targets);
        int ignored = 0;
        while (ignored < SEQ && targets[ignored] == IGNORED_LABEL) ignored++;
        for (int i = ignored; i <= SEQ; i++) assert_int_equal(targets[i], 1000 + i);
        count[index % 2][ignored]++;
    }
    // About 185 of each length are expected, give or take 13; of even samples none without a label.
    assert_int_equal(count[0][SEQ], 0);
    for (int odd = 0; odd < 2; odd++)
        for (int i = 0; i < SEQ + odd; i++) {
            const double off = count[odd][i] - SAMPLES / 2.0 / (SEQ + odd);
            if (off < -65 || off > 65) fail_msg("%d prompts of length %d", count[odd][i], i);
        }
}

// A run of more than 2^32 samples does not start over.
static void samples_beyond_2_32_are_others(void **state) {
    (void)state;
    enum { SAMPLES = 200, LONG = 99 };
    const int64_t far = (int64_t)1 << 32;
    Data data = counting();
    int same_start = 0, same_mask = 0;
    for (int64_t i = 0; i < SAMPLES; i++) {
        int32_t a[SEQ], b[SEQ], targets[SEQ], near_mask[LONG] = {0}, far_mask[LONG] = {0};
        data_sample(&data, 1, i, false, SEQ, a, targets);
        data_sample(&data, 1, i + far, false, SEQ, b, targets);
        same_start += a[0] == b[0];
        data_mask_prompt(1, i, LONG, near_mask);
        data_mask_prompt(1, i + far, LONG, far_mask);
        same_mask += memcmp(near_mask, far_mask, sizeof near_mask) == 0;
    }
    // By chance SAMPLES / starts = 0.4, and SAMPLES / LONG = 2.
    if (same_start > 8 || same_mask > 16)
        fail_msg("of %d samples, %d begin where others do, and %d are masked so", SAMPLES, same_start,
                 same_mask);
    data_close(&data);
}

static void masks_differ_by_seed(void **state) {
    (void)state;
    enum { SAMPLES = 1000, LONG = 99 };
    int same = 0;
    for (int64_t index = 0; index < SAMPLES; index++) {
        int32_t a[LONG] = {0}, b[LONG] = {0};
        data_mask_prompt(1, index, LONG, a);
        data_mask_prompt(2, index, LONG, b);
        same += memcmp(a, b, sizeof a) == 0;
    }
    if (same > 40) fail_msg("%d of %d masks are equal for two seeds", same, SAMPLES);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], OPEN_DEFAULT) == 0) return open_default_corpus();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_is_its_bytes),
        cmocka_unit_test(token_files_of_both_kinds),
        cmocka_unit_test(wrong_files_are_told_what_is_wrong),
        cmocka_unit_test(refusals_name_the_file_and_the_rule),
        cmocka_unit_test(text_beyond_a_small_vocabulary),
        cmocka_unit_test(the_hash_is_of_every_token),
        cmocka_unit_test(a_text_larger_than_memory_opens),
        cmocka_unit_test(the_default_corpus_lies_beside_the_program),
        cmocka_unit_test(targets_are_the_next_tokens),
        cmocka_unit_test(training_never_sees_what_is_held_out),
        cmocka_unit_test(samples_do_not_depend_on_how_they_are_grouped),
        cmocka_unit_test(samples_differ_by_index_seed_and_part),
        cmocka_unit_test(prompts_are_masked_from_none_to_all),
        cmocka_unit_test(masks_differ_by_seed),
        cmocka_unit_test(samples_beyond_2_32_are_others),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("data", tests, make_folder, remove_folder);
}
