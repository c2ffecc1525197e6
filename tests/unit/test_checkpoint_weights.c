// Weights of a checkpoint folder: those of another model, in several files, damaged, or in an unsupported
// format.
#include "checkpoints.h"
#include "safetensors_whole.h"

// ---- weights that do not fit ----

static void load_weights(void *context) {
    const Load *load = context;
    char *path = format_text("%s/%s/step-000000", folder, load->below);
    checkpoint_load_weights(path, &load->run->model->params);
    free(path);
}

static void weights_of_another_model_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *saved, *loaded, *part;
    } cases[] = {
        {"", "layers=3", "lacks the tensor model.layers.2.input_layernorm.weight"},
        {"layers=3", "", "holds model.layers.2."},
        {"", "ffn=6", "model.layers.0.mlp.gate_proj.weight has shape (5, 12), the model's is (6, 12)"},
        {"", "kv-heads=3",
         "model.layers.0.self_attn.k_proj.weight has shape (4, 12), the model's is (6, 12)"},
        {"vocab=12", "", "model.embed_tokens.weight has shape (12, 12), the model's is (11, 12)"},
        {"hidden=24", "", "model.embed_tokens.weight has shape (11, 24), the model's is (11, 12)"},
        {"tied", "", "lacks the tensor lm_head.weight"},
        {"", "tied", "lm_head.weight differs from model.embed_tokens.weight"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *below = format_text("%d", (int)i);
        Run saved = run_new(cases[i].saved), loaded = run_new(cases[i].loaded);
        run_save(&saved, below);
        expect_refusal(load_weights, &(Load){&loaded, below}, cases[i].part);
        free(below);
        run_free(&saved);
        run_free(&loaded);
    }
}

// A weight that is transposed in the file has the right number of bytes: only its shape shows it.
static void transposed_weights_are_refused(void **state) {
    (void)state;
    Run run = run_new("");
    run_save(&run, "out");
    replace_text("out/step-000000/model.safetensors", "[5,12]", "[12,5]");
    expect_refusal(load_weights, &(Load){&run, "out"}, "has shape (12, 5), the model's is (5, 12)");
    run_free(&run);
}

// Integers of as many bytes.
static void weights_of_a_dtype_that_is_none_of_weights_are_refused(void **state) {
    (void)state;
    Run run = run_new("");
    run_save(&run, "out");
    size_t size;
    char *text = read_text("out/step-000000/model.safetensors", &size), *dtype;
    while ((dtype = memmem(text, size, "\"F32\"", 5))) memcpy(dtype, "\"I32\"", 5);
    write_text("out/step-000000/model.safetensors", text, size);
    free(text);
    expect_refusal(load_weights, &(Load){&run, "out"}, "is stored as i32; weights are read from f64");
    run_free(&run);
}

// In each dtype that is stored, and of a number that the run's dtype does not have: the last element of the
// first weight, so that more than one piece is read.
static void weights_that_are_not_finite_are_named(void **state) {
    (void)state;
    static const struct {
        const char *saved, *loaded, *bits, *part;
    } cases[] = {
        {"vocab=400 dtype=f64", "dtype=f64", "\0\0\0\0\0\0\xf0\x7f", "is inf in f64"},
        {"vocab=400 dtype=f32", "dtype=bf16", "\0\0\x80\xff", "is -inf in bf16"},
        {"vocab=400 dtype=bf16", "dtype=f32", "\xc0\x7f", "is nan in f32"},
        {"vocab=400 dtype=f16", "dtype=f16", "\x01\x7c", "is nan in f16"},
        {"vocab=400 dtype=f32", "dtype=f16", "\0\0\x80\x47", "is inf in f16"},  // 65536
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *below = format_text("%d", (int)i), *more = format_text("vocab=400 %s", cases[i].loaded);
        char *name = format_text("%s/step-000000/model.safetensors", below);
        Run saved = run_new(cases[i].saved), loaded = run_new(more);
        run_save(&saved, below);
        size_t size, width = dtype_size((DType)saved.config.dtype);
        char *text = read_text(name, &size);
        uint64_t header;
        memcpy(&header, text, sizeof header);
        memcpy(text + 8 + header + 4799 * width, cases[i].bits, width);
        write_text(name, text, size);
        char *told = format_text("/%s: element 4799 of model.embed_tokens.weight %s", name, cases[i].part);
        expect_refusal(load_weights, &(Load){&loaded, below}, told);
        free(told), free(text), free(name), free(more), free(below);
        run_free(&saved);
        run_free(&loaded);
    }
}

// Where a rank has a part of a weight, its elements are numbered as in the whole one.
static void an_element_of_a_part_has_its_number_in_the_whole(void **state) {
    (void)state;
    Run saved = run_new("dtype=f32"), loaded = {.config = saved.config};
    run_save(&saved, "out");
    size_t size;
    char *text = read_text("out/step-000000/model.safetensors", &size);
    uint64_t header;
    memcpy(&header, text, sizeof header);
    memcpy(text + 8 + header + (6 * 12 + 5) * sizeof(float), "\0\0\x80\x7f", sizeof(float));
    write_text("out/step-000000/model.safetensors", text, size);
    loaded.model = model_new(&loaded.config, mesh_single());
    param_shard(loaded.model->embedding, 0, 4, 3);  // rows 4, 5 and 6
    params_measure(&loaded.model->params);
    model_allocate(loaded.model);
    loaded.optimizer = optimizer_new(&loaded.config, &loaded.model->params);
    expect_refusal(load_weights, &(Load){&loaded, "out"}, "element 77 of model.embed_tokens.weight is inf");
    free(text);
    run_free(&saved);
    run_free(&loaded);
}

static void read_zeros(void *context, int tensor, uint8_t *bytes) {
    const SafeTensors *file = context;
    memset(bytes, 0, file->tensor[tensor].bytes);
}

// All tensors of the run as zeros, and one more.
static void write_weights(const Run *run, const SafeTensor *more, const char *below) {
    const Params *params = &run->model->params;
    SafeTensors file = {.count = params->count + 1};
    file.tensor = host_alloc(file.count * sizeof *file.tensor);
    for (int i = 0; i < params->count; i++) {
        const Param *p = &params->param[i];
        file.tensor[i] =
            (SafeTensor){.name = (char *)p->name, .dtype = F32, .dims = p->dims, .bytes = 4 * p->count};
        memcpy(file.tensor[i].shape, p->shape, sizeof p->shape);
    }
    file.tensor[params->count] = *more;
    char *path = format_text("mkdir -p %s/%s/step-000000", folder, below);
    assert_int_equal(system(path), 0);
    free(path);
    path = format_text("%s/%s/step-000000/model.safetensors", folder, below);
    assert_null(write_whole(path, &file, read_zeros, &file));
    free(path);
    free(file.tensor);
}

// RoPE's frequencies, which old files contain, and a head equal to the embedding to which it is tied add
// nothing.
static void only_harmless_surplus_is_let_pass(void **state) {
    (void)state;
    Run run = run_new("tied");
    const SafeTensor frequencies = {.name = "model.layers.0.self_attn.rotary_emb.inv_freq",
                                    .dtype = F32,
                                    .dims = 1,
                                    .shape = {1},
                                    .bytes = 4};
    const SafeTensor head = {
        .name = "lm_head.weight", .dtype = F32, .dims = 2, .shape = {11, 12}, .bytes = 528};
    const SafeTensor bias = {.name = "model.layers.0.self_attn.q_proj.bias",
                             .dtype = F32,
                             .dims = 1,
                             .shape = {12},
                             .bytes = 48};
    write_weights(&run, &frequencies, "frequencies");
    write_weights(&run, &head, "head");
    write_weights(&run, &bias, "bias");
    load_weights(&(Load){&run, "frequencies"});
    load_weights(&(Load){&run, "head"});
    SafeTensor whole = head;  // the same bytes, but of other numbers
    whole.dtype = I32;
    write_weights(&run, &whole, "integers");
    expect_refusal(load_weights, &(Load){&run, "integers"}, "lm_head.weight differs from");
    // One file counts, as in transformers, though an index beside it lists parts.
    write_text("head/step-000000/model.safetensors.index.json", "{}", 2);
    load_weights(&(Load){&run, "head"});
    expect_refusal(load_weights, &(Load){&run, "bias"}, "holds model.layers.0.self_attn.q_proj.bias");
    run_free(&run);
}

// The tensors of the folder's one file in two, as transformers does for large models; "" instead of 1: a
// mistake.
static void write_parts(const char *below, const Run *run, const char *map) {
    char *command = format_text("mkdir -p %s/%s/step-000000", folder, below);
    assert_int_equal(system(command), 0);
    free(command);
    const Params *params = &run->model->params;
    for (int part = 0; part < 2; part++) {
        SafeTensors file = {.tensor = host_alloc(params->count * sizeof *file.tensor)};
        for (int i = part; i < params->count; i += 2) {
            const Param *p = &params->param[i];
            file.tensor[file.count] =
                (SafeTensor){.name = (char *)p->name, .dtype = F32, .dims = p->dims, .bytes = 4 * p->count};
            memcpy(file.tensor[file.count++].shape, p->shape, sizeof p->shape);
        }
        char *path =
            format_text("%s/%s/step-000000/model-0000%d-of-00002.safetensors", folder, below, part + 1);
        assert_null(write_whole(path, &file, read_zeros, &file));
        free(path);
        free(file.tensor);
    }
    char *name = format_text("%s/step-000000/model.safetensors.index.json", below);
    write_text(name, map, strlen(map));
    free(name);
}

static char *map_of(const Run *run) {
    char *map = format_text("{\"metadata\": {}, \"weight_map\": {");
    for (int i = 0; i < run->model->params.count; i++) {
        char *longer = format_text("%s%s\"%s\": \"model-0000%d-of-00002.safetensors\"", map, i ? ", " : "",
                                   run->model->params.param[i].name, i % 2 + 1);
        free(map);
        map = longer;
    }
    char *whole = format_text("%s}}", map);
    free(map);
    return whole;
}

static void weights_in_several_files_load(void **state) {
    (void)state;
    Run run = run_new("");
    char *map = map_of(&run);
    write_parts("parts", &run, map);
    load_weights(&(Load){&run, "parts"});
    for (int i = 0; i < run.model->params.count; i++) {
        double first = 1;
        tensor_to_doubles(
            &first, tensor_view(param_value(&run.model->params, &run.model->params.param[i]), 0, SHAPE(1)));
        assert_true(first == 0);
    }
    *strstr(map, "00001-of") = '7';
    write_parts("missing", &run, map);
    expect_refusal(load_weights, &(Load){&run, "missing"},
                   "model-70001-of-00002.safetensors: No such file");
    static const struct {
        const char *map, *part;
    } cases[] = {
        {"{\"weight_map\": {\"a\": \"mod", "index.json is no JSON object"},  // cut
        {"{}", "has no \"weight_map\""},
        {"{\"weight_map\": {\"a\": \"../model.safetensors\"}}",
         "names ../model.safetensors, which is no file beside it"},
        {"{\"weight_map\": {\"a\": \"/etc/passwd\"}}", "names /etc/passwd, which is no file beside it"},
        {"{\"weight_map\": {\"a\": \"model-00001-of-00002.safetensors\"}}", "holds a, and it does not"},
        {"{\"weight_map\": {\"model.norm.weight\": 1}}", "the file of model.norm.weight is no text"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_parts("wrong", &run, cases[i].map);
        expect_refusal(load_weights, &(Load){&run, "wrong"}, cases[i].part);
    }
    const char *first = run.model->params.param[0].name;
    char *two = format_text("{\"weight_map\": {\"%s\": \"model-00001-of-00002.safetensors\", "
                            "\"%s\": \"model-00002-of-00002.safetensors\"}}",
                            first, run.model->params.param[2].name);
    write_parts("twice", &run, two);
    char *command = format_text("cd %s/twice/step-000000 && cp model-00001* model-00002*", folder);
    assert_int_equal(system(command), 0);
    char *both = format_text("both hold %s", first);
    expect_refusal(load_weights, &(Load){&run, "twice"}, both);
    free(two), free(command), free(both);
    free(map);
    run_free(&run);
}

static void weights_in_pythons_format_are_named(void **state) {
    (void)state;
    Run run = run_new("");
    char *command = format_text("mkdir -p %s/bin/step-000000", folder);
    assert_int_equal(system(command), 0);
    free(command);
    expect_refusal(load_weights, &(Load){&run, "bin"}, "model.safetensors: No such file");
    write_text("bin/step-000000/pytorch_model.bin", "", 0);
    expect_refusal(load_weights, &(Load){&run, "bin"},
                   "only as pytorch_model.bin, which is Python's own format; write");
    char *path = format_text("%s/bin/step-000000/pytorch_model.bin", folder);
    assert_int_equal(unlink(path), 0);
    free(path);
    write_text("bin/step-000000/pytorch_model.bin.index.json", "{}", 2);  // of parts
    expect_refusal(load_weights, &(Load){&run, "bin"},
                   "only as pytorch_model.bin, which is Python's own format; write");
    run_free(&run);
}

static void a_damaged_file_is_named(void **state) {
    (void)state;
    Run run = run_new("");
    run_save(&run, "out");
    size_t size;
    char *text = read_text("out/step-000000/model.safetensors", &size);
    write_text("out/step-000000/model.safetensors", text, size - 1);
    free(text);
    expect_refusal(load_weights, &(Load){&run, "out"}, "step-000000/model.safetensors: tensor");
    run_free(&run);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    omp_set_num_threads(1);  // the children of expect_fatal do not inherit a team of threads
    const struct CMUnitTest tests[] = {
        IN_A_FOLDER(weights_of_another_model_are_refused), IN_A_FOLDER(transposed_weights_are_refused),
        IN_A_FOLDER(weights_of_a_dtype_that_is_none_of_weights_are_refused),
        IN_A_FOLDER(weights_that_are_not_finite_are_named),
        IN_A_FOLDER(an_element_of_a_part_has_its_number_in_the_whole),
        IN_A_FOLDER(only_harmless_surplus_is_let_pass),    IN_A_FOLDER(weights_in_several_files_load),
        IN_A_FOLDER(weights_in_pythons_format_are_named),  IN_A_FOLDER(a_damaged_file_is_named),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
