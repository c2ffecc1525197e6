// The model against another implementation: folders that transformers wrote, and the loss and gradients
// that its code computed for them in f64 (fixtures/make_llama_fixture.py, make_mixtral_fixture.py), without
// any of our code.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "06_expert_parallel/expert_parallel.h"
#include "safetensors_whole.h"
// needs those above
#include <cmocka.h>

// Both sides sum in f64, in different orders.
static const double BOUND = 1e-12;

typedef struct Case {
    Model *model;
    void *experts;  // the plug of a model that has them
    SafeTensors expected;
    MicroBatch micro;
} Case;

static const int32_t *integers(const SafeTensors *file, const char *name, int64_t *rows, int64_t *columns) {
    const SafeTensor *t = safetensors_find(file, name);
    if (!t || t->dtype != I32 || t->dims != 2) fail_msg("%s is not there, or no table of i32", name);
    *rows = t->shape[0];
    *columns = t->shape[1];
    return (const int32_t *)t->data;
}

// A model with the folder's shape and weights, in f64, after forward and backward of the fixture's batch.
static Case run_case(const char *folder) {
    Case c;
    char *path = format_text("%s/expected.safetensors", folder);
    c.expected = safetensors_open(path);
    free(path);

    int64_t b, longer;
    const int32_t *tokens = integers(&c.expected, "tokens", &b, &longer);
    const int32_t *labels = integers(&c.expected, "labels", &b, &longer);
    // Hugging Face's labels are at their own tokens, ours at the tokens before them.
    int64_t s = longer - 1, valid = 0;
    int32_t *inputs = host_alloc(b * s * sizeof *inputs), *targets = host_alloc(b * s * sizeof *targets);
    for (int64_t row = 0; row < b; row++)
        for (int64_t i = 0; i < s; i++) {
            int32_t label = labels[row * longer + i + 1];
            inputs[row * s + i] = tokens[row * longer + i];
            targets[row * s + i] = label == -100 ? IGNORED_LABEL : label;
            valid += label != -100;
        }
    assert_true(valid > 0 && valid < b * s);

    Config config = config_default("dtype=f64");
    checkpoint_config(folder, &config);
    config.seq = s;
    config_check(&config);
    c.model = model_new(&config, mesh_single());
    model_allocate(c.model);
    checkpoint_load_weights(folder, &c.model->params);
    c.experts = config.experts ? moe.plug(c.model) : NULL;
    model_begin_step(c.model, 1);
    c.micro = micro_batch_new(c.model, 0, b, inputs, targets, 1.0 / (double)valid);
    model_forward(c.model, &c.micro);
    model_backward(c.model, &c.micro);
    free(inputs);
    free(targets);
    return c;
}

static void end_case(Case *c) {
    micro_batch_free(c->model, &c->micro);
    if (c->experts) moe.unplug(c->model, c->experts);
    model_free(c->model);
    safetensors_close(&c->expected);
}

// Returns how many weights have no gradient.
static int assert_matches(const Case *c) {
    int without = 0;
    const SafeTensor *stored = safetensors_find(&c->expected, "loss");
    assert_non_null(stored);
    double loss, ours = loss_value(c->micro.loss);
    memcpy(&loss, stored->data, sizeof loss);
    if (!(fabs(ours - loss) <= BOUND * loss)) fail_msg("loss %.15g, Hugging Face has %.15g", ours, loss);

    const Params *params = &c->model->params;
    for (int i = 0; i < params->count; i++) {
        const Param *param = &params->param[i];
        char *name = format_text("grad.%s", param->name);
        stored = safetensors_find(&c->expected, name);
        free(name);
        if (!stored || stored->bytes != param->count * 8) fail_msg("no gradient of %s", param->name);
        double *reference = host_alloc(stored->bytes), *ours = host_alloc(stored->bytes);
        memcpy(reference, stored->data, stored->bytes);
        tensor_to_doubles(ours, param_grad(params, param));
        // An expert without tokens has no gradient, so a relative error is not defined.
        bool none = true;
        for (int64_t j = 0; j < param->count; j++) none = none && reference[j] == 0;
        for (int64_t j = 0; j < param->count && none; j++) assert_true(ours[j] == 0);
        Difference d = difference(param->name, ours, reference, param->count);
        if (!none && !(d.relative <= BOUND))
            fail_msg("gradient of %s: relative error %.2e, scale %.9f", param->name, d.relative, d.scale);
        without += none;
        free(reference);
        free(ours);
    }
    // All of their gradients were used: loss, tokens and labels are the rest.
    assert_int_equal(c->expected.count, params->count + 3);
    return without;
}

// Six heads on two key/value heads, f32 weights, rope_theta and eps far from the usual; transformers 5.
static void untied_model_has_their_loss_and_gradients(void **state) {
    (void)state;
    Case c = run_case("tests/fixtures/llama_untied_f32");
    assert_int_equal(c.model->config.kv_heads, 2);
    assert_true(c.model->config.rope.theta == 100 && c.model->config.norm_eps == 1e-3);
    assert_int_equal(assert_matches(&c), 0);
    end_case(&c);
}

// bf16 weights; config.json as transformers 4 wrote it.
static void tied_model_has_their_loss_and_gradients(void **state) {
    (void)state;
    Case c = run_case("tests/fixtures/llama_tied_bf16");
    assert_true(c.model->config.tied);
    assert_int_equal(assert_matches(&c), 0);
    end_case(&c);
}

// Twelve experts, two for each token; some have none.
static void mixtral_has_their_loss_and_gradients(void **state) {
    (void)state;
    Case c = run_case("tests/fixtures/mixtral_untied_f32");
    assert_true(c.model->config.experts == 12 && c.model->config.top_k == 2);
    assert_true(assert_matches(&c) > 0);
    end_case(&c);
}

// bf16 weights, three experts for each token.
static void tied_mixtral_has_their_loss_and_gradients(void **state) {
    (void)state;
    Case c = run_case("tests/fixtures/mixtral_tied_bf16");
    assert_true(c.model->config.tied && c.model->config.experts == 14 && c.model->config.top_k == 3);
    assert_true(assert_matches(&c) > 0);
    end_case(&c);
}

// Llama 3.1's RoPE, and heads wider than hidden / heads.
static void stretched_model_has_their_loss_and_gradients(void **state) {
    (void)state;
    Case c = run_case("tests/fixtures/llama_scaled_f32");
    assert_int_equal(config_head_size(&c.model->config), 10);
    assert_true(c.model->config.rope.factor == 8);
    assert_int_equal(assert_matches(&c), 0);
    end_case(&c);
}

// ---- the other direction ----

static const char *python(void) { return getenv("PYTHON") ? getenv("PYTHON") : "python3"; }

static int shell(const char *format, ...) PRINTF_LIKE(1, 2);
static int shell(const char *format, ...) {
    char command[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command, format, arguments);
    va_end(arguments);
    return system(command);
}

// The file that make_llama_fixture.py --check expects: gradients, then loss, tokens and labels.
static void read_result(void *context, int tensor, uint8_t *bytes) {
    const Case *c = context;
    const Params *params = &c->model->params;
    if (tensor < params->count) {
        tensor_to_host(bytes, param_grad(params, &params->param[tensor]));
    } else if (tensor == params->count) {
        tensor_to_host(bytes, c->micro.loss);
    } else {
        const SafeTensor *t =
            safetensors_find(&c->expected, tensor == params->count + 1 ? "tokens" : "labels");
        memcpy(bytes, t->data, t->bytes);
    }
}

static void write_result(const Case *c, const char *path) {
    const Params *params = &c->model->params;
    SafeTensors file = {.count = params->count + 3};
    file.tensor = host_alloc(file.count * sizeof *file.tensor);
    for (int i = 0; i < params->count; i++) {
        const Param *p = &params->param[i];
        file.tensor[i] =
            (SafeTensor){.name = format_text("grad.%s", p->name), .dtype = F64, .dims = p->dims};
        memcpy(file.tensor[i].shape, p->shape, sizeof p->shape);
    }
    SafeTensor *last = &file.tensor[params->count];
    last[0] = (SafeTensor){.name = "loss", .dtype = F64, .dims = 1, .shape = {1}};
    last[1] = *safetensors_find(&c->expected, "tokens");
    last[2] = *safetensors_find(&c->expected, "labels");
    const char *wrong = write_whole(path, &file, read_result, (void *)c);
    if (wrong) fail_msg("%s", wrong);
    for (int i = 0; i < params->count; i++) free(file.tensor[i].name);
    free(file.tensor);
}

// Our saved folder loads in transformers without warnings, and its code gives our loss and gradients.
// Skipped if transformers is not installed; PYTHON names an interpreter that has it.
static void transformers_loads_what_we_save(void **state) {
    (void)state;
    if (shell("%s -c 'import torch, transformers, safetensors' >/dev/null 2>&1", python()) != 0) {
        printf("# not checked: %s has no torch, transformers and safetensors\n", python());
        return;
    }
    static const char *const folders[] = {
        "tests/fixtures/llama_untied_f32", "tests/fixtures/llama_tied_bf16",
        "tests/fixtures/llama_scaled_f32", "tests/fixtures/mixtral_untied_f32",
        "tests/fixtures/mixtral_tied_bf16"};
    char work[] = "/tmp/test_hugging_face.XXXXXX";
    assert_non_null(mkdtemp(work));
    for (int i = 0; i < 5; i++) {
        Case c = run_case(folders[i]);
        char *dir = format_text("%s/%d", work, i), *saved = format_text("%s/step-000000", dir);
        char *result = format_text("%s/expected.safetensors", saved);
        checkpoint_save(dir, &c.model->config, &c.model->params, NULL, (Progress){0});
        write_result(&c, result);
        int status = shell(
            "%s tests/fixtures/make_%s_fixture.py --check %s >%s/said 2>&1; status=$?; "
            "sed 's/^/# /' %s/said; exit $status",
            python(), c.experts ? "mixtral" : "llama", saved, work, work);
        assert_int_equal(status, 0);
        free(dir);
        free(saved);
        free(result);
        end_case(&c);
    }
    shell("rm -rf %s", work);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(untied_model_has_their_loss_and_gradients),
        cmocka_unit_test(tied_model_has_their_loss_and_gradients),
        cmocka_unit_test(stretched_model_has_their_loss_and_gradients),
        cmocka_unit_test(mixtral_has_their_loss_and_gradients),
        cmocka_unit_test(tied_mixtral_has_their_loss_and_gradients),
        cmocka_unit_test(transformers_loads_what_we_save),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
