// test_sample.c: the text that a run writes at its end, token by token, against forward passes of whole
// windows; and the FLOPs that it takes.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "00_single_gpu/harness.h"
#include "tensor/rng.h"

enum { PROMPT = 5, TOTAL = 43, VOCAB = 29, NO_TOKEN = -1 };

static Config config_of(const char *more, int64_t end_of_document) {
    char *words = format_text(
        "layers=2 hidden=24 heads=6 kv-heads=2 ffn=20 vocab=29 seq=13 dtype=f64 seed=3 %s", more);
    Config c = config_default(words);
    config_set(&c, "documents", (double)end_of_document);
    free(words);
    return c;
}

// With weights so large that the likely tokens depend on the text.
static Model *model_of(const Config *c) {
    Model *m = model_new(c, mesh_single());
    model_allocate(m);
    for (int i = 0; i < m->params.count; i++) {
        const Param *param = &m->params.param[i];
        double *value = host_alloc(param->count * sizeof *value);
        for (int64_t j = 0; j < param->count; j++)
            value[j] = 0.5 * rng_normal(7, RNG_TEST, (uint64_t)(i * 100000 + j)) + !param->decays;
        tensor_from_doubles(param_value(&m->params, param), value);
        free(value);
    }
    return m;
}

static int32_t *new_text(void) {
    int32_t *text = host_alloc(TOTAL * sizeof *text);
    for (int64_t i = 0; i < PROMPT; i++) text[i] = (int32_t)(rng_bits(9, RNG_TEST, (uint64_t)i) % VOCAB);
    return text;
}

// One forward of the whole window for each token; after the text it is filled with zeros, which no token
// sees.
static int32_t *by_whole_windows(Model *m, double temperature) {
    const int64_t s = m->config.seq;
    int32_t *text = new_text(), window[s], none[s];
    double logits[VOCAB];
    for (int64_t i = 0; i < s; i++) none[i] = IGNORED_LABEL;
    for (int64_t made = PROMPT; made < TOTAL; made++) {
        int64_t first = sample_window(made, s);
        memset(window, 0, sizeof window);
        memcpy(window, text + first, (size_t)(made - first) * sizeof *text);
        MicroBatch micro = micro_batch_new(m, -1, 1, window, none, 0);
        model_forward(m, &micro);
        tensor_to_doubles(logits, tensor_rows_of(micro.head.logits, made - 1 - first, 1));
        micro_batch_free(m, &micro);
        text[made] = sample_draw(logits, VOCAB, temperature,
                                 rng_uniform((uint64_t)m->config.seed, RNG_SAMPLE, (uint64_t)made));
    }
    return text;
}

static void expect_same(Model *m, Model *whole, double temperature, const char *what) {
    int32_t *expected = by_whole_windows(whole, temperature), *text = new_text();
    Sockets sockets = m->sockets;
    int64_t held = memory_account().now_total;
    sample_continue(m, text, PROMPT, TOTAL, temperature);
    assert_int_equal(memory_account().now_total, held);
    assert_int_equal(sockets_difference(&sockets, &m->sockets), 0);
    for (int i = 0; i < TOTAL; i++)
        if (text[i] != expected[i])
            fail_msg("token %d is %d, and by whole windows %d%s%s", i, text[i], expected[i],
                     *what ? ": " : "", what);
    free(expected);
    free(text);
}

static void the_tokens_are_those_of_whole_windows(void **state) {
    (void)state;
    static const char *const shapes[] = {"", "seq=12", "seq=1", "seq=64", "dtype=f32", "kv-heads=6 tied=1"};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        Config c = config_of(shapes[i], NO_TOKEN);
        Model *m = model_of(&c);
        expect_same(m, m, 0.8, shapes[i]);
        expect_same(m, m, 0, shapes[i]);
        model_free(m);
    }
}

// Other techniques in the sockets of a model on one device change no token.
static void plugs_change_no_token(void **state) {
    (void)state;
    for (Recompute again = RECOMPUTE_NONE; again <= RECOMPUTE_FULL; again++) {
        Config c = config_of("", NO_TOKEN);
        c.recompute = again;
        Model *m = model_of(&c), *plain = model_of(&c);
        void *flash = flash_attention.plug(m);
        if (again != RECOMPUTE_NONE) recompute.plug(m);
        expect_same(m, plain, 0.8, "flash attention and recomputation");
        flash_attention.unplug(m, flash);
        model_free(m);
        model_free(plain);
    }
}

// Likewise with the model that one of several ranks puts together, which has no technique for --documents.
static void tokens_see_their_own_document(void **state) {
    (void)state;
    Config c = config_of("", 4), other = config_of("", NO_TOKEN);
    Model *m = model_of(&c), *by_flash = model_of(&c), *blind = model_of(&other);
    void *flash = flash_attention.plug(by_flash);
    expect_same(m, by_flash, 0.8, "--documents");
    int32_t *one = by_whole_windows(by_flash, 0.8), *all = by_whole_windows(blind, 0.8);
    assert_memory_not_equal(one, all, TOTAL * sizeof *one);
    free(one);
    free(all);
    flash_attention.unplug(by_flash, flash);
    model_free(m);
    model_free(by_flash);
    model_free(blind);
}

// FLOPs of n tokens through the model; each sees the tokens before it and `before` others.
static double flops_of(const Config *c, double n, double before) {
    double h = (double)c->hidden, d = (double)config_head_size(c), a = (double)c->heads * d,
           kv = (double)c->kv_heads * d;
    double weights = 2 * h * a + 2 * h * kv + 3 * h * (double)c->ffn, pairs = n * before + n * (n + 1) / 2;
    return (double)c->layers * (2 * weights * n + 4 * a * pairs) + 2 * h * (double)c->vocab * n;
}

// The window is never longer than s nor, once it has been full, shorter than half of that.
static void the_window_moves_by_half(void **state) {
    (void)state;
    for (int64_t s = 1; s < 9; s++)
        for (int64_t token = 1, moves = 0; token < 40; token++) {
            int64_t first = sample_window(token, s), before = sample_window(token - 1, s);
            int64_t length = token - first;
            assert_true(length <= s && length >= (token < s ? token : s / 2 + 1));
            if (first != before) assert_int_equal(token - s, (s + 1) / 2 * moves++ + 1);
        }
}

// Every token goes through the model once, and those that stay when the window moves go through once more.
static void a_token_goes_through_the_model_once(void **state) {
    (void)state;
    Config c = config_of("seq=16", NO_TOKEN);
    Model *m = model_of(&c);
    int32_t *text = new_text();
    double expected = 0, twice = 2 * TOTAL * flops_of(&c, 1, 15);
    for (int64_t made = PROMPT, first = 0; made < TOTAL; made++) {
        bool moved = sample_window(made, 16) != first || made == PROMPT;
        first = sample_window(made, 16);
        double here = (double)(made - first);
        expected += moved ? flops_of(&c, here, 0) : flops_of(&c, 1, here - 1);
    }
    clock_reset();
    sample_continue(m, text, PROMPT, TOTAL, 0.8);
    assert_true(clock_total().flops == expected);
    assert_true(expected < twice);
    free(text);
    model_free(m);
}

// Of 3,000 evenly spread numbers, as many draw a token as its part of the sum of p^(1 / temperature) says.
static void tokens_are_drawn_by_their_probabilities(void **state) {
    (void)state;
    enum { DRAWS = 3000 };
    static const double p[] = {0.1, 0.2, 0, 0.4, 0.3};
    static const struct {
        double temperature;
        int drawn[5];
    } cases[] = {{1, {300, 600, 0, 1200, 900}}, {0.5, {100, 400, 0, 1600, 900}}, {0, {0, 0, 0, DRAWS, 0}}};
    for (int i = 0; i < 3; i++) {
        double logits[5];
        int drawn[5] = {0};
        for (int j = 0; j < 5; j++) logits[j] = 1000 + log(p[j]);  // exp(1000) is no number
        for (int j = 0; j < DRAWS; j++)
            drawn[sample_draw(logits, 5, cases[i].temperature, (j + 0.5) / DRAWS)]++;
        for (int j = 0; j < 5; j++) assert_int_equal(drawn[j], cases[i].drawn[j]);
    }
    assert_int_equal(sample_draw((const double[]){1, 2, 2}, 3, 0, 0.9), 1);  // the first of the likeliest
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_tokens_are_those_of_whole_windows), cmocka_unit_test(plugs_change_no_token),
        cmocka_unit_test(tokens_see_their_own_document),         cmocka_unit_test(the_window_moves_by_half),
        cmocka_unit_test(a_token_goes_through_the_model_once),
        cmocka_unit_test(tokens_are_drawn_by_their_probabilities),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
