// test_config.c: where a run's values come from, sizes that are refused, and what sizes cost.
#include <stdlib.h>
#include <string.h>

#include "fatal.h"
#include "train/config.h"

enum {
    EVERY_GROUP = 127 | CONFIG_CLOCK,
    AXES = CONFIG_DP | CONFIG_PP | CONFIG_CP | CONFIG_TP | CONFIG_EP,
};

static Config parse(const char *words, unsigned groups, const char *defaults) {
    static char buffer[512];
    char *argv[32] = {"test"};
    int argc = 1;
    strcpy(buffer, words);
    for (char *word = strtok(buffer, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    return config_parse(argc, argv, "Tests.", groups, defaults, NULL, 0);
}

static void the_default_model_is_the_documented_one(void **state) {
    (void)state;
    Config c = config_default(NULL);
    assert_string_equal(c.model, "default");
    assert_int_equal(c.layers, 4);
    assert_int_equal(c.hidden, 128);
    assert_int_equal(c.heads, 4);
    assert_int_equal(c.kv_heads, 2);
    assert_int_equal(c.ffn, 352);
    assert_int_equal(c.vocab, 256);
    assert_int_equal(c.seq, 128);
    assert_false(c.tied);
    assert_int_equal(c.dtype, F32);
    assert_int_equal(c.micro_batch, 8);
    assert_int_equal(c.grad_acc, 1);
    assert_int_equal(c.optimizer, OPTIMIZER_ADAMW);
    assert_true(c.beta1 == 0.9 && c.beta2 == 0.95 && c.adam_eps == 1e-8);
    assert_true(c.weight_decay == 0.1 && c.clip == 1);
    assert_true(c.rope.theta == 1e4 && c.norm_eps == 1e-5);
    assert_int_equal(c.recompute, RECOMPUTE_NONE);
    assert_int_equal(c.seed, 1);
    assert_null(c.data);
    assert_null(c.init);
    assert_null(c.save);
    assert_null(c.resume);
    assert_false(c.no_check);
}

// Even for fields whose flags the program does not have.
static void program_defaults_reach_every_field(void **state) {
    (void)state;
    Config c = parse("", CONFIG_BATCH, "layers=2 tied=1 dtype=f64 steps=4 lr=0.5 recompute=full");
    assert_int_equal(c.layers, 2);
    assert_int_equal(c.hidden, 128);
    assert_true(c.tied);
    assert_int_equal(c.dtype, F64);
    assert_int_equal(c.steps, 4);
    assert_true(c.lr == 0.5);
    assert_int_equal(c.recompute, RECOMPUTE_FULL);
    c = parse("--steps 5", CONFIG_BATCH, "layers=2 steps=4");
    assert_int_equal(c.steps, 5);
    assert_int_equal(c.layers, 2);
}

static void flags_change_a_preset_in_any_order(void **state) {
    (void)state;
    static const char *lines[] = {"--model llama-3-8b --layers 3 --seq=64",
                                  "--seq 64 --layers 3 --model=llama-3-8b"};
    for (int i = 0; i < 2; i++) {
        Config c = parse(lines[i], CONFIG_MODEL, "layers=2 hidden=64 tied=1 dtype=bf16");
        assert_string_equal(c.model, "llama-3-8b");
        assert_int_equal(c.layers, 3);     // typed
        assert_int_equal(c.seq, 64);       // typed
        assert_int_equal(c.hidden, 4096);  // the preset overrides the program's defaults
        assert_int_equal(c.kv_heads, 8);
        assert_false(c.tied);
        assert_int_equal(c.dtype, BF16);  // no preset sets it
        assert_true(c.rope.theta == 5e5);
    }
    assert_true(parse("--model smollm-135m", CONFIG_MODEL, NULL).tied);
    assert_true(parse("--tied --model llama-3-8b", CONFIG_MODEL, NULL).tied);
}

// A technique asks for the value of an option without a target by its name.
static void options_of_techniques_become_settings(void **state) {
    (void)state;
    Option own[] = {{"bucket-mb", OPTION_REAL, NULL, "25", 0, 100, "MB", "a number", false},
                    {"zero", OPTION_CHOICE, NULL, "0", 0, 0, "0|1|2|3", "a choice", false},
                    {"sp", OPTION_FLAG, NULL, NULL, 0, 0, "", "a flag", false},
                    {"plan", OPTION_TEXT, NULL, NULL, 0, 0, "FILE", "a text", false},
                    {"parts", OPTION_INT, NULL, "7", 1, 8, "", "a whole number", false}};
    char *argv[] = {"test", "--zero", "2", "--plan=x.txt", "--parts", "3", NULL};
    Config c = config_parse(6, argv, "Tests.", CONFIG_BATCH, "bucket-mb=0.5 zero=1 sp=1", own, 5);
    assert_true(config_number(&c, "bucket-mb") == 0.5);  // the program's default
    assert_true(config_number(&c, "zero") == 2);
    assert_true(config_number(&c, "sp") == 1);
    assert_true(config_number(&c, "parts") == 3);
    assert_string_equal(config_text(&c, "plan"), "x.txt");
    assert_true(own[1].given && own[3].given && !own[0].given && !own[2].given);
    assert_true(config_given(&c, "zero") && !config_given(&c, "sp") && !config_given(&c, "gather"));
    assert_true(config_has(&c, "sp"));
    assert_false(config_has(&c, "gather"));
    assert_true(config_number(&c, "gather") == 0);
    assert_null(config_text(&c, "gather"));
    config_set(&c, "gather", 2);
    config_set(&c, "zero", 3);
    assert_true(config_number(&c, "gather") == 2 && config_number(&c, "zero") == 3);
}

static void own_options_are_read_beside_the_shared_ones(void **state) {
    (void)state;
    int64_t parts = 0;
    bool loud = true;
    Option own[] = {{"parts", OPTION_INT, &parts, "4", 1, 8, "", "how many", false},
                    {"loud", OPTION_FLAG, &loud, NULL, 0, 0, "", "say more", false}};
    char *argv[] = {"test", "--parts", "6", "--steps=9", NULL};
    Config c = config_parse(4, argv, "Tests.", CONFIG_BATCH, NULL, own, 2);
    assert_int_equal(parts, 6);
    assert_false(loud);
    assert_true(own[0].given);
    assert_false(own[1].given);
    assert_int_equal(c.steps, 9);
}

// ---- sizes ----

static void a_model_by_name_is_the_flags_model(void **state) {
    (void)state;
    Config flags = parse("--model llama-3-8b --layers 2 --seq 64 --dtype bf16", CONFIG_MODEL, NULL),
           c = config_of_model("llama-3-8b", "layers=2 seq=64 dtype=bf16");
    assert_string_equal(c.model, flags.model);
    const int64_t shape[] = {c.layers, c.hidden, c.heads, c.kv_heads, c.ffn, c.vocab, c.seq, c.dtype},
                  right[] = {flags.layers, flags.hidden, flags.heads, flags.kv_heads,
                             flags.ffn,    flags.vocab,  flags.seq,   flags.dtype};
    assert_memory_equal(shape, right, sizeof shape);
    assert_true(c.rope.theta == 5e5 && flags.rope.theta == 5e5 && c.norm_eps == flags.norm_eps);
    assert_int_equal(c.micro_batch, 8);
}

// What no count of parameters shows.
static void models_have_their_published_settings(void **state) {
    (void)state;
    Config mixtral = config_of_model("mixtral-8x7b", ""), deepseek = config_of_model("deepseek-v3", ""),
           gpt = config_of_model("gpt-3-175b", ""), llama = config_of_model("llama-2-7b", "");
    assert_true(mixtral.rope.theta == 1e6 && mixtral.norm_eps == 1e-5);
    assert_true(deepseek.norm_eps == 1e-6 && deepseek.routed_scale == 2.5);
    assert_true(gpt.tied);
    assert_int_equal(llama.seq, 4096);
}

// The publishers' counts: the sum over the tensors in each model's safetensors files.
static void parameters_of_published_models(void **state) {
    (void)state;
    static const struct {
        const char *model;
        int64_t parameters;
    } published[] = {
        {"smollm-135m", 134515008},   {"smollm-360m", 361821120},     {"tinyllama-1.1b", 1100048384},
        {"llama-3.2-1b", 1235814400}, {"llama-2-7b", 6738415616},     {"llama-3-8b", 8030261248},
        {"llama-3-70b", 70553706496}, {"llama-3-405b", 405853388800},
    };
    for (size_t i = 0; i < sizeof published / sizeof *published; i++) {
        char *line = format_text("--model %s", published[i].model);
        Config c = parse(line, CONFIG_MODEL, NULL);
        free(line);
        if (config_parameters(&c) != published[i].parameters)
            fail_msg("%s: %ld parameters, published are %ld", published[i].model, config_parameters(&c),
                     published[i].parameters);
    }
    Config tied = config_default("tied=1"), untied = config_default(NULL);
    assert_int_equal(config_parameters(&untied) - config_parameters(&tied), 256 * 128);
}

// FLOPs of a matrix multiply (m, k) (k, n).
static double multiply(int64_t m, int64_t k, int64_t n) { return 2.0 * (double)(m * k * n); }

// The same sum, product by product; attention query by query, over the keys that it may see.
static double flops_product_by_product(const Config *c, int64_t sequences) {
    int64_t n = sequences * c->seq, h = c->hidden, d = config_head_size(c), kv = c->kv_heads * d;
    double forward = 0;
    for (int64_t layer = 0; layer < c->layers; layer++) {
        forward += multiply(n, h, h) + 2 * multiply(n, h, kv);
        for (int64_t i = 0; i < sequences * c->heads; i++)
            for (int64_t query = 0; query < c->seq; query++)
                forward += multiply(1, d, query + 1) + multiply(1, query + 1, d);
        forward += multiply(n, h, h) + 2 * multiply(n, h, c->ffn) + multiply(n, c->ffn, h);
    }
    forward += multiply(n, h, c->vocab);
    return 3 * forward;  // backward has two products for each of forward's
}

static void step_flops_are_those_of_the_products(void **state) {
    (void)state;
    static const char *shapes[] = {"", "tied=1",
                                   "layers=3 hidden=20 heads=2 kv-heads=1 ffn=17 vocab=23 seq=13", "seq=1",
                                   "layers=1 hidden=8 heads=4 kv-heads=4 ffn=3 vocab=2 seq=101"};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int64_t sequences = 1; sequences < 12; sequences += 5) {
            Config c = config_default(shapes[i]);
            double got = config_step_flops(&c, sequences),
                   expected = flops_product_by_product(&c, sequences);
            if (!(got == expected))
                fail_msg("\"%s\": %.17g FLOPs, by products %.17g", shapes[i], got, expected);
        }
}

// ---- wrong use ----

typedef struct Wrong {
    const char *line, *defaults;
    unsigned groups;
    int ranks;  // 0: degrees are not checked
} Wrong;

static void parse_and_check(void *context) {
    const Wrong *wrong = context;
    Config c = parse(wrong->line, wrong->groups, wrong->defaults);
    if (wrong->ranks) config_check_degrees(&c, wrong->ranks);
}

// Parses the line and, if ranks is not 0, checks its degrees for that many ranks.
static void expect_refused(const char *line, unsigned groups, const char *defaults, int ranks,
                           const char *sentence) {
    expect_fatal(parse_and_check, &(Wrong){line, defaults, groups, ranks}, sentence);
}

static void sizes_that_do_not_fit_are_refused_by_flag_and_number(void **state) {
    (void)state;
    static const struct {
        const char *line, *sentence;
    } wrong[] = {
        {"--hidden 130", "--hidden 130 is not divisible by --heads 4: --hidden 132 would fit"},
        {"--heads 6 --hidden 96 --kv-heads 4", "--heads 6 is not divisible by --kv-heads 4"},
        {"--kv-heads 8", "--heads 4 is not divisible by --kv-heads 8"},
        {"--hidden 12", "--hidden 12 / --heads 4 is 3"},
        {"--hidden 0", "--hidden 0 is out of bounds"},
        {"--layers -1", "--layers -1 is out of bounds"},
        {"--micro-batch 100000 --seq 100000", "--micro-batch 100000 of --seq 100000 are more than 2^31"},
        {"--micro-batch 20 --seq 100000000 --heads 64",
         "--micro-batch 20 x --heads 64 x --seq 100000000 squared are more than 2^60 scores"},
        {"--micro-batch 1 --seq 100000000 --heads 128 --hidden 256",
         ": --heads 128 x --seq 100000000 squared are more than 2^60 scores"},
        {"--layers 100000 --hidden 1000000 --heads 100000 --head-size 100000",
         "--layers 100000 x --hidden 1000000 and so on are more than 2^60 parameters"},
        {"--steps 1000000000000 --grad-acc 100000", "are more than 2^53 samples"},
        {"--model llama-9", "--model llama-9 is not known; there are default, "},
        {"--model", "--model needs a value: NAME"},
        {"--model=", "--model needs a value: NAME"},
        {"--model llama-3-8b --model default", "--model is given twice"},
        {"--model llama-3-8b --heads 5", "--hidden 4096 is not divisible by --heads 5"},
        {"--vocab 1", "the loss and all gradients are 0; --vocab 256 holds any text"},
        {"--dtype e4m3", "--dtype e4m3 is not one of f64|f32|bf16|f16"},
        {"--init a --resume b", "--init and --resume"},
        {"--save-every 5", "--save-every 5 needs --save"},
        {"--clip -1", "--clip -1 is out of bounds"},
        {"--machine abacus", "--machine abacus is unknown"},
        {"--tp 2", "chapter 03"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        expect_refused(wrong[i].line, EVERY_GROUP, NULL, 0, wrong[i].sentence);
    expect_refused("--experts 9 --moe deepseek --expert-groups 2", CONFIG_MODEL | CONFIG_EXPERTS, NULL, 0,
                   "--expert-groups 2 does not divide --experts 9: --experts 10 would fit");
}

static void check(void *config) { config_check(config); }

// A checkpoint's config.json also names them, and is read without the flags' bounds.
static void experts_of_a_folder_have_the_bounds_of_the_flags(void **state) {
    (void)state;
    Config c = config_default("experts=4096 top-k=64");
    config_check(&c);
    c.experts = 4097;
    expect_fatal(check, &c, "--experts 4097 is not from 1 to 4096");
    c.experts = 4096;
    c.top_k = 65;
    expect_fatal(check, &c, "--top-k 65 is not from 1 to 64");
}

// ---- degrees of the mesh ----

static void degrees_left_out_take_what_is_left(void **state) {
    (void)state;
    static const struct {
        int ranks;
        int64_t pp, cp, dp, tp, dp_is, tp_is;
    } cases[] = {{1, 1, 1, 0, 1, 1, 1}, {8, 1, 1, 0, 1, 8, 1},  {8, 1, 1, 0, 2, 4, 2},
                 {8, 1, 1, 0, 0, 1, 8}, {8, 1, 1, 4, 0, 4, 2},  {8, 1, 1, 8, 0, 8, 1},
                 {8, 1, 1, 2, 4, 2, 4}, {3, 1, 1, 3, 1, 3, 1},  {6, 1, 1, 3, 2, 3, 2},
                 {8, 2, 1, 0, 2, 2, 2}, {12, 2, 3, 0, 0, 1, 2}, {12, 3, 1, 2, 0, 2, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Config c = config_default("heads=8 hidden=64 kv-heads=2 ffn=88");
        c.dp = cases[i].dp;
        c.tp = cases[i].tp;
        c.pp = cases[i].pp;
        c.cp = cases[i].cp;
        config_check_degrees(&c, cases[i].ranks);
        assert_int_equal(c.dp, cases[i].dp_is);
        assert_int_equal(c.tp, cases[i].tp_is);
    }
}

static void degrees_that_do_not_fit_are_refused_with_what_would(void **state) {
    (void)state;
    static const struct {
        int ranks;
        const char *line, *sentence;
    } wrong[] = {
        {5, "--tp 2", "--tp 2 does not divide the 5 ranks; --ranks 6 would fit"},
        {2, "--tp 4", "--tp 4 does not divide the 2 ranks; --ranks 4 would fit"},
        {4, "--dp 3", "--dp 3 needs 3 ranks, and there are 4: --ranks 3 would fit"},
        {8, "--pp 2 --cp 3", "--pp 2 x --cp 3 does not divide the 8 ranks; --ranks 12 would fit"},
        {12, "--dp 2 --pp 2 --tp 2",
         "--dp 2 x --pp 2 x --tp 2 needs 8 ranks, and there are 12: --ranks 8 would fit"},
        {4, "--dp 4 --tp 2", "--dp 4 x --tp 2 needs 8 ranks, and there are 4: --ranks 8 would fit"},
        {4, "--dp 3 --tp 0", "--dp 3 does not divide the 4 ranks; --ranks 6 would fit"},
        {3, "--tp 2 --pp 0", "--tp 2 does not divide the 3 ranks; --ranks 4 would fit"},
        {6, "--dp 2 --cp 2 --tp 0", "--dp 2 x --cp 2 does not divide the 6 ranks; --ranks 8 would fit"},
        {1, "--tp 2", "--tp 2 does not divide the 1 rank; --ranks 2 would fit"},
        {1, "--dp 3", "--dp 3 needs 3 ranks, and there is 1: --ranks 3 would fit"},
        {4, "--tp -1", "--tp -1 is out of bounds"},
        {4, "--dp 5000", "--dp 5000 is out of bounds"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        expect_refused(wrong[i].line, CONFIG_MODEL | AXES, "heads=8 hidden=64 kv-heads=2 ffn=88",
                       wrong[i].ranks, wrong[i].sentence);
}

// What a technique that shares work over an axis of one rank offers, with sizes that there are to share.
static void what_would_share_is_offered(void **state) {
    (void)state;
    Config c = config_default("layers=1 seq=1");
    c.dp = 4, c.pp = c.cp = c.tp = 1;
    assert_string_equal(config_more(&c, "--pp"), "--pp 2 --layers 2");
    assert_string_equal(config_more(&c, "--cp"), "--cp 2 --seq 2");
    c.dp = 1, c.tp = 2;
    assert_string_equal(config_more(&c, "--pp"), "--ranks 4 --pp 2 --layers 2");
    assert_string_equal(config_degrees(&c, 8, 4, NULL), "1, 2, 4");
}

static void flags_of_groups_that_a_program_lacks_are_refused(void **state) {
    (void)state;
    expect_refused("--layers 3", CONFIG_BATCH, NULL, 0, "--layers");
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_default_model_is_the_documented_one),
        cmocka_unit_test(program_defaults_reach_every_field),
        cmocka_unit_test(flags_change_a_preset_in_any_order),
        cmocka_unit_test(a_model_by_name_is_the_flags_model),
        cmocka_unit_test(models_have_their_published_settings),
        cmocka_unit_test(own_options_are_read_beside_the_shared_ones),
        cmocka_unit_test(options_of_techniques_become_settings),
        cmocka_unit_test(parameters_of_published_models),
        cmocka_unit_test(step_flops_are_those_of_the_products),
        cmocka_unit_test(sizes_that_do_not_fit_are_refused_by_flag_and_number),
        cmocka_unit_test(experts_of_a_folder_have_the_bounds_of_the_flags),
        cmocka_unit_test(degrees_left_out_take_what_is_left),
        cmocka_unit_test(degrees_that_do_not_fit_are_refused_with_what_would),
        cmocka_unit_test(what_would_share_is_offered),
        cmocka_unit_test(flags_of_groups_that_a_program_lacks_are_refused),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
