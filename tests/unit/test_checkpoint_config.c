// config.json of a checkpoint folder: its keys are read, kept, or refused by name.
#include "checkpoints.h"

// ---- folders that cannot be trained here ----

typedef struct ConfigCase {
    const char *remove;  // a line of a sound config.json
    const char *add;     // what stands there instead; NULL: nothing
    const char *part;    // of the sentence; NULL: sound
    double rope_theta;   // if sound and not 0
} ConfigCase;

static const char *const LINES[] = {
    "\"architectures\": [\"LlamaForCausalLM\"]",
    "\"model_type\": \"llama\"",
    "\"hidden_size\": 24",
    "\"intermediate_size\": 40",
    "\"num_hidden_layers\": 2",
    "\"num_attention_heads\": 6",
    "\"num_key_value_heads\": 2",
    "\"vocab_size\": 61",
    "\"rms_norm_eps\": 1e-05",
    "\"rope_theta\": 500000.0",
    "\"rope_scaling\": null",
    "\"tie_word_embeddings\": true",
    "\"hidden_act\": \"silu\"",
    "\"attention_bias\": false",
    "\"mlp_bias\": false",
    "\"head_dim\": 4",
    "\"use_cache\": true",
};

static void write_config(const char *remove, const char *add) {
    char text[4096] = "{";
    bool found = !*remove;
    for (size_t i = 0; i < sizeof LINES / sizeof *LINES; i++) {
        bool this_one = *remove && strstr(LINES[i], remove);
        const char *line = !this_one ? LINES[i]
                           : found   ? NULL
                                     : add;  // several lines: in place of the first
        found |= this_one;
        if (line) snprintf(text + strlen(text), sizeof text - strlen(text), "%s\n  %s", i ? "," : "", line);
    }
    if (!found) fail_msg("no line has %s", remove);
    strcat(text, "\n}\n");
    write_text("config.json", text, strlen(text));
}

static void read_config(void *config) { checkpoint_config(folder, config); }

#define LLAMA3(low, high)                                                                      \
    "\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": " low \
    ", \"high_freq_factor\": " high ", \"original_max_position_embeddings\": 8192}"

static void configs_are_read_or_refused_by_key(void **state) {
    (void)state;
    static const ConfigCase cases[] = {
        {"", "", NULL, 500000},
        {"num_key_value_heads", NULL, NULL, 0},
        {"hidden_act", NULL, NULL, 0},
        {"tie_word", NULL, NULL, 0},
        {"rope_theta", NULL, NULL, 10000},
        {"rope_theta", "\"rope_parameters\": {\"rope_theta\": 700.0, \"rope_type\": \"default\"}", NULL,
         700},
        {"rope_scaling", "\"rope_scaling\": {\"type\": \"default\"}", NULL, 500000},
        {"head_dim", "\"head_dim\": null", NULL, 0},
        {"head_dim", "\"attention_dropout\": 0.0", NULL, 0},
        {"model_type", NULL, "does not say \"model_type\"", 0},
        {"model_type", "\"model_type\": \"mistral\"",
         "\"model_type\" is \"mistral\"; this program trains \"llama\" and \"mixtral\"", 0},
        {"architectures", "\"architectures\": [\"LlamaForSequenceClassification\"]", "\"architectures\" is",
         0},
        {"architectures", "\"architectures\": []", "\"architectures\" is []", 0},
        {"architectures", "\"architectures\": \"LlamaModel\"", "\"architectures\" is \"LlamaModel\"", 0},
        {"hidden_act", "\"hidden_act\": \"gelu\"", "\"hidden_act\" is \"gelu\"", 0},
        {"attention_bias", "\"attention_bias\": true", "\"attention_bias\" is true", 0},
        {"mlp_bias", "\"mlp_bias\": true", "\"mlp_bias\" is true", 0},
        {"use_cache", "\"attention_dropout\": 0.1", "\"attention_dropout\" is 0.1", 0},
        {"use_cache", "\"quantization_config\": {\"bits\": 4}", "\"quantization_config\"", 0},
        {"use_cache", "\"per_layer_config\": {\"0\": {\"rms_norm_eps\": 0.1}}", "\"per_layer_config\"", 0},
        {"use_cache", "\"transformers_weights\": \"b.safetensors\"", "no weights but model.safetensors", 0},
        {"use_cache", "\"is_causal\": true", NULL, 0},
        {"use_cache", "\"is_causal\": false", "\"is_causal\" is not true", 0},
        {"use_cache", "\"is_causal\": null", "\"is_causal\" is not true", 0},
        {"rope_scaling", "\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0}",
         "a RoPE of type \"llama3\" does not say \"low_freq_factor\"", 0},
        {"rope_scaling", LLAMA3("4.0", "1.0"), "\"low_freq_factor\" 4 is not below \"high_freq_factor\" 1",
         0},
        {"rope_scaling", LLAMA3("4.0", "4.0"), "\"low_freq_factor\" 4 is not below \"high_freq_factor\" 4",
         0},
        {"rope_scaling",
         "\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 1, "
         "\"high_freq_factor\": 4, \"original_max_position_embeddings\": 0.5}",
         "\"original_max_position_embeddings\" is no whole number from 1", 0},
        {"rope_scaling", LLAMA3("1.0", "4.0"), NULL, 500000},
        {"rope_scaling", LLAMA3("1.0", "4.0") ", \"original_max_position_embeddings\": 8192", NULL, 500000},
        {"rope_scaling", LLAMA3("1.0", "4.0") ", \"original_max_position_embeddings\": 512",
         "\"original_max_position_embeddings\" is 512, and 8192 among the settings of RoPE", 0},
        {"rope_scaling",
         "\"rope_scaling\": {\"type\": \"default\"}, \"rope_parameters\": {\"rope_theta\": 7.0}",
         "config.json has both \"rope_scaling\" and \"rope_parameters\"", 0},
        {"rope_scaling", "\"rope_scaling\": 2", "\"rope_scaling\"", 0},
        {"rope_scaling", "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.0}", "\"rope_scaling\" is",
         0},
        {"rope_theta", "\"rope_parameters\": {\"rope_theta\": 7.0, \"rope_type\": \"yarn\"}",
         "\"rope_parameters\"", 0},
        {"use_cache", "\"partial_rotary_factor\": 0.25", "\"partial_rotary_factor\"", 0},
        {"rope_scaling", "\"rope_scaling\": {\"type\": \"linear\", \"rope_type\": \"default\"}",
         "has a \"type\" and another \"rope_type\"", 0},
        {"rope_theta", "\"rope_parameters\": {\"partial_rotary_factor\": 0.5}", "\"partial_rotary_factor\"",
         0},
        {"rope_theta", "\"rope_theta\": -1", "\"rope_theta\" is no positive number", 0},
        {"rms_norm_eps", "\"rms_norm_eps\": \"1e-5\"", "\"rms_norm_eps\" is no positive number", 0},
        {"rms_norm_eps", "\"rms_norm_eps\": 1e999", "\"rms_norm_eps\" is no positive number", 0},
        {"head_dim", "\"head_dim\": 8", NULL, 0},
        {"head_dim", "\"head_dim\": 7", "a head of 7 is odd, and RoPE turns pairs", 0},
        {"head_dim", "\"head_dim\": 0", "\"head_dim\" is no whole number", 0},
        {"hidden_size", NULL, "does not say \"hidden_size\"", 0},
        {"\"h", "\"hidden_size\": 25", "\"hidden_size\" 25 is not divisible", 0},
        {"hidden_size", "\"hidden_size\": 25", NULL, 0},  // 6 heads of 4
        {"num_key_value_heads", "\"num_key_value_heads\": 4", "\"num_key_value_heads\" 4", 0},
        {"num_hidden_layers", "\"num_hidden_layers\": 0", "\"num_hidden_layers\" is no whole number", 0},
        {"num_hidden_layers", "\"num_hidden_layers\": 2.5", "\"num_hidden_layers\" is no whole number", 0},
        {"vocab_size", "\"vocab_size\": 1e12", "\"vocab_size\" is no whole number from 1 to 10000000", 0},
        {"num_hidden_layers", "\"num_hidden_layers\": 100001", "is no whole number from 1 to 100000", 0},
        {"\"h", "\"hidden_size\": 1000002", "\"hidden_size\" is no whole number from 1 to 1000000", 0},
        {"num_attention_heads", "\"num_attention_heads\": 100002",
         "\"num_attention_heads\" is no whole number from 1 to 100000", 0},
        {"num_key_value_heads", "\"num_key_value_heads\": 100002",
         "\"num_key_value_heads\" is no whole number from 1 to 100000", 0},
        {"intermediate_size", "\"intermediate_size\": 10000001",
         "\"intermediate_size\" is no whole number from 1 to 10000000", 0},
        {"head_dim", "\"head_dim\": 100002", "\"head_dim\" is no whole number from 1 to 100000", 0},
        {"vocab_size", "\"vocab_size\": \"61\"", "\"vocab_size\" is no whole number", 0},
        {"hidden_act", "\"hidden_act\": \"swish\"", NULL, 0},
        {"use_cache", "\"hidden_size\": 24", "\"hidden_size\" stands there twice", 0},
        {"rope_scaling", "\"rope_scaling\": {\"type\": \"default\", \"type\": \"yarn\"}",
         "\"type\" stands there twice", 0},
        {"tie_word", "\"tie_word_embeddings\": 1", "\"tie_word_embeddings\" is neither", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ConfigCase *one = &cases[i];
        write_config(one->remove, one->add);
        Config c = config_default("");
        if (one->part) {
            expect_fatal(read_config, &c, one->part);
            continue;
        }
        checkpoint_config(folder, &c);
        assert_int_equal(c.hidden, !strcmp(one->remove, "hidden_size") ? 25 : 24);
        assert_int_equal(c.kv_heads, !strcmp(one->remove, "num_key_value_heads") ? 6 : 2);
        bool wide = one->add && strstr(one->add, "head_dim\": 8"),
             stretched = one->add && strstr(one->add, "llama3");
        assert_int_equal(config_head_size(&c), wide ? 8 : 4);
        assert_true(stretched ? c.rope.factor == 8 && c.rope.low == 1 && c.rope.high == 4 &&
                                    c.rope.original == 8192
                              : c.rope.factor == 0);
        assert_true(c.tied == (strcmp(one->remove, "tie_word") != 0));
        if (one->rope_theta != 0 && c.rope.theta != one->rope_theta)
            fail_msg("case %zu: rope_theta is %g, not %g", i, c.rope.theta, one->rope_theta);
    }
}

// What transformers assumes of a Mixtral that does not say it.
static void a_mixtral_has_defaults_of_its_own(void **state) {
    (void)state;
    static const char text[] =
        "{\"model_type\": \"mixtral\", \"hidden_size\": 64, \"intermediate_size\": 5, "
        "\"num_hidden_layers\": 2, \"num_attention_heads\": 16, \"vocab_size\": 11}";
    write_text("config.json", text, strlen(text));
    Config c = config_default("");
    checkpoint_config(folder, &c);
    assert_int_equal(c.kv_heads, 8);
    assert_int_equal(c.experts, 8);
    assert_int_equal(c.top_k, 2);
    assert_true(c.norm_eps == 1e-5 && c.rope.theta == 1e6 && !c.tied);
}

static void what_only_mixtral_has_is_refused_by_key(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"\"sliding_window\": 4096", "\"sliding_window\" is 4096; this program has no sliding windows"},
        {"\"router_jitter_noise\": 0.1", "\"router_jitter_noise\" is 0.1; this program has no noise"},
        {"\"output_router_logits\": true", "\"output_router_logits\" is true; this program has no loss"},
        {"\"num_experts_per_tok\": 65", "\"num_experts_per_tok\" is no whole number from 1 to 64"},
        {"\"num_local_experts\": 4097", "\"num_local_experts\" is no whole number from 1 to 4096"},
        {"\"num_experts_per_tok\": 9", "\"num_experts_per_tok\" 9 is more than \"num_local_experts\" 8"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = format_text(
            "{\"model_type\": \"mixtral\", \"hidden_size\": 64, \"intermediate_size\": 5, "
            "\"num_hidden_layers\": 2, \"num_attention_heads\": 16, \"vocab_size\": 11, %s}",
            cases[i][0]);
        write_text("config.json", text, strlen(text));
        Config c = config_default("");
        expect_fatal(read_config, &c, cases[i][1]);
        free(text);
    }
}

static void a_config_that_is_no_json_is_refused(void **state) {
    (void)state;
    Config c = config_default("");
    expect_fatal(read_config, &c, "cannot open");
    static const char *const texts[] = {"", "[]", "{", "{} trailing"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        write_text("config.json", texts[i], strlen(texts[i]));
        expect_fatal(read_config, &c, "no JSON object");
    }
    write_text("config.json", "{}\0\0", 4);  // the end of a file after a crash
    expect_fatal(read_config, &c, "config.json: it is no text: byte 2 is a zero");
}

// A folder with this length, saved again, has --seq for it, which is 7.
static void expect_seq_for(const char *length) {
    write_config("use_cache", length);
    Run run = run_new("");
    checkpoint_config(folder, &run.config);
    run_save(&run, "out");
    size_t size;
    char *saved = read_text("out/step-000000/config.json", &size);
    assert_non_null(strstr(saved, "\"max_position_embeddings\": 7,"));
    free(saved);
    run_free(&run);
}

// A number that no int64 holds is no length of a sequence.
static void a_length_beyond_all_numbers_is_left_out(void **state) {
    (void)state;
    expect_seq_for("\"max_position_embeddings\": 1e300");
}

// A run on longer sequences than the folder's has seen them.
static void a_length_that_is_shorter_than_seq_becomes_seq(void **state) {
    (void)state;
    expect_seq_for("\"max_position_embeddings\": 5");
}

// What a loaded folder says beyond the shape is copied to the folders that are saved.
static void saving_keeps_what_the_loaded_folder_had(void **state) {
    (void)state;
    static const char config[] =
        "{\"model_type\": \"llama\", \"hidden_size\": 12, \"intermediate_size\": 5, "
        "\"num_hidden_layers\": 2, \"num_attention_heads\": 6, \"num_key_value_heads\": 2, "
        "\"vocab_size\": 11, \"hidden_act\": \"swish\", \"max_position_embeddings\": 4096, "
        "\"eos_token_id\": [7, 9], \"dtype\": \"float16\", "
        "\"rope_parameters\": {\"rope_theta\": 700.0, \"rope_type\": \"default\"}}";
    static const char generation[] = "{\"temperature\": 0.6}\n";
    write_text("config.json", config, strlen(config));
    write_text("generation_config.json", generation, strlen(generation));
    Run run = run_new("");
    checkpoint_config(folder, &run.config);
    run_save(&run, "out");
    size_t size;
    char *saved = read_text("out/step-000000/config.json", &size);
    static const char *const parts[] = {"\"max_position_embeddings\": 4096", "\"eos_token_id\": [7,9]",
                                        "\"torch_dtype\": \"float32\"", "\"hidden_act\": \"silu\"",
                                        "\"rope_theta\": 700.0"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!strstr(saved, parts[i])) fail_msg("%s is not in %s", parts[i], saved);
    assert_null(strstr(saved, "float16"));
    assert_null(strstr(saved, "rope_parameters"));
    free(saved);
    saved = read_text("out/step-000000/generation_config.json", &size);
    assert_string_equal(saved, generation);
    free(saved);
    run_save(&run, "out");  // which replaces that, too
    char *path = format_text("%s/generation_config.json", folder);
    assert_int_equal(unlink(path), 0);
    free(path);
    checkpoint_config(folder, &run.config);  // and forgets it with the folder that had it
    run_free(&run);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    omp_set_num_threads(1);  // the children of expect_fatal do not inherit a team of threads
    const struct CMUnitTest tests[] = {
        IN_A_FOLDER(configs_are_read_or_refused_by_key),
        IN_A_FOLDER(a_mixtral_has_defaults_of_its_own),
        IN_A_FOLDER(what_only_mixtral_has_is_refused_by_key),
        IN_A_FOLDER(a_config_that_is_no_json_is_refused),
        IN_A_FOLDER(a_length_beyond_all_numbers_is_left_out),
        IN_A_FOLDER(a_length_that_is_shorter_than_seq_becomes_seq),
        IN_A_FOLDER(saving_keeps_what_the_loaded_folder_had),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
