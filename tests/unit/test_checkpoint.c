// Checkpoint folders: what is saved is loaded bit for bit, a resumed run equals the uninterrupted one, and
// state of another run is refused.
#include <math.h>

#include "checkpoints.h"

// ---- what is saved is loaded again ----

static void resumed_run_is_the_run(void **state) {
    (void)state;
    static const char *const kinds[] = {
        "dtype=f64",      "tied dtype=f32",           "dtype=bf16",
        "tied dtype=f16", "dtype=bf16 optimizer=sgd", "dtype=f32 optimizer=sgd"};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        Run straight = run_new(kinds[i]), first = run_new(kinds[i]);
        for (int step = 0; step < 20; step++) run_step(&straight);
        for (int step = 0; step < 10; step++) run_step(&first);
        char *below = format_text("%d", (int)i);
        run_save(&first, below);
        Run second = run_resume(below, kinds[i]);
        assert_same_run(&first, &second);
        for (int step = 0; step < 10; step++) run_step(&second);
        assert_same_run(&straight, &second);
        free(below);
        run_free(&straight);
        run_free(&first);
        run_free(&second);
    }
}

static void a_run_resumes_before_its_first_step(void **state) {
    (void)state;
    Run run = run_new("dtype=bf16");
    run_save(&run, "start");
    Run resumed = run_resume("start", "dtype=bf16");
    assert_same_run(&run, &resumed);  // no state either: the first step creates it
    run_step(&run);
    run_step(&resumed);
    assert_same_run(&run, &resumed);
    run_free(&run);
    run_free(&resumed);
}

static void config_comes_back(void **state) {
    (void)state;
    Run run = run_new("tied");
    run.config.rope = (Rope){1234567.0 / 3, 8, 1.0 / 3, 4, 40};
    run.config.norm_eps = 1.0 / 3e5;
    run_save(&run, "shape");
    Config c = config_default("layers=1 hidden=2 heads=1 kv-heads=1 ffn=1 vocab=2 seq=99");
    char *path = format_text("%s/shape/step-000000", folder);
    checkpoint_config(path, &c);
    free(path);
    assert_int_equal(c.layers, 2);
    assert_int_equal(c.hidden, 12);
    assert_int_equal(c.heads, 6);
    assert_int_equal(c.kv_heads, 2);
    assert_int_equal(c.ffn, 5);
    assert_int_equal(c.vocab, 11);
    assert_true(c.tied);
    assert_memory_equal(&c.rope, &run.config.rope, sizeof c.rope);  // to the last bit
    assert_true(c.norm_eps == run.config.norm_eps);
    assert_int_equal(c.seq, 99);
    run_free(&run);
}

// Weights change dtypes with a single rounding: f32 loaded as bf16, then loaded as f64, is f32 rounded to
// bf16.
static void weights_convert_to_the_dtype_of_the_run(void **state) {
    (void)state;
    Run wide = run_new("dtype=f32"), narrow = run_new("dtype=bf16 seed=5"),
        back = run_new("dtype=f64 seed=6");
    run_save(&wide, "wide");
    char *path = format_text("%s/wide/step-000000", folder);
    checkpoint_load_weights(path, &narrow.model->params);
    free(path);
    run_save(&narrow, "narrow");
    path = format_text("%s/narrow/step-000000", folder);
    checkpoint_load_weights(path, &back.model->params);
    free(path);
    for (int i = 0; i < wide.model->params.count; i++) {
        const Param *param = &wide.model->params.param[i];
        double *x = host_alloc(param->count * 8), *y = host_alloc(param->count * 8);
        tensor_to_doubles(x, param_value(&wide.model->params, param));
        tensor_to_doubles(y, param_value(&back.model->params, param));
        for (int64_t j = 0; j < param->count; j++) {
            double rounded = f32_from_bf16(bf16_from_f32((float)x[j]));
            if (y[j] != rounded) fail_msg("%s[%ld]: %.9g, not %.9g", param->name, (long)j, y[j], rounded);
        }
        free(x);
        free(y);
    }
    run_free(&wide);
    run_free(&narrow);
    run_free(&back);
}

// The f64 run that measures a 16-bit run's error starts from that run's exact state: its master weights.
static void a_wider_run_goes_on_from_the_masters(void **state) {
    (void)state;
    static const char *const kinds[][2] = {
        {"dtype=bf16", "dtype=f64"}, {"tied dtype=f16 optimizer=sgd", "tied dtype=f64 optimizer=sgd"}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        Run narrow = run_new(kinds[i][0]);
        for (int step = 0; step < 3; step++) run_step(&narrow);
        run_save(&narrow, kinds[i][0]);
        Run wide = run_resume(kinds[i][0], kinds[i][1]);
        for (int u = 0; u < wide.model->params.units; u++) {
            const Unit *unit = &wide.model->params.unit[u];
            const UnitState *n = &narrow.optimizer.unit[u], *w = &wide.optimizer.unit[u];
            const Tensor pairs[][2] = {{n->master, unit->values}, {n->m, w->m}, {n->v, w->v}};
            for (size_t p = 0; p < sizeof pairs / sizeof *pairs; p++) {
                assert_true(tensor_exists(pairs[p][0]) == tensor_exists(pairs[p][1]));
                for (int64_t j = 0; tensor_exists(pairs[p][0]) && j < unit->count; j++) {
                    double a, b;
                    tensor_to_doubles(&a, tensor_view(pairs[p][0], j, SHAPE(1)));
                    tensor_to_doubles(&b, tensor_view(pairs[p][1], j, SHAPE(1)));
                    assert_true(a == b);
                }
            }
        }
        run_free(&narrow);
        run_free(&wide);
    }
}

static void newest_is_the_largest_step(void **state) {
    (void)state;
    Run run = run_new("");
    static const int64_t steps[] = {9, 10, 1000000, 100, 999999};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        run.progress.step = steps[i];
        run_save(&run, "many");
    }
    char *dir = format_text("%s/many", folder);
    // Neither unfinished ones, nor names that only begin like a checkpoint's, nor empty folders count.
    static const char *const others[] = {".step-2000000.tmp", "step-3000000.old", "step-", "step-4000000",
                                         "step-99999999999999999999"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        char *path = format_text("%s/%s", dir, others[i]);
        assert_int_equal(mkdir(path, 0777), 0);
        free(path);
    }
    // Nor does a number that no integer holds, nor the folder itself, from which a run may have begun.
    char *command = format_text(
        "cd %s && cp step-000009/* step-3000000.old && cp step-000009/* "
        "step-99999999999999999999 && cp step-000009/* .",
        dir);
    assert_int_equal(system(command), 0);
    free(command);
    char *newest = checkpoint_newest(dir), *itself = checkpoint_newest(newest);
    assert_string_equal(strrchr(newest, '/'), "/step-1000000");
    assert_string_equal(newest, itself);
    free(newest);
    free(itself);
    free(dir);
    run_free(&run);
}

// As when --init DIR has no step-* folder and --save is the same DIR: the run that is compared with the first
// starts after that one has saved.
static void a_run_begins_with_the_folder_given_whatever_is_saved_in_it(void **state) {
    (void)state;
    Run given = run_new("vocab=256"), later = run_new("vocab=256 seed=2");
    run_save(&given, "");
    later.progress.step = 1;
    run_save(&later, "step-000000");
    given.config.seed = 3;
    char *init = format_text("%s/step-000000", folder);
    given.config.init = init;
    Trainer *t = trainer_new(&given.config, mesh_single(), NULL);
    trainer_load(t);
    assert_same_tensor("a weight", given.model->params.values, t->model->params.values);
    free(init);
    trainer_free(t);
    run_free(&given);
    run_free(&later);
}

static void find_newest(void *dir) { checkpoint_newest(dir); }

static void no_checkpoint_is_told(void **state) {
    (void)state;
    expect_fatal(find_newest, folder, "holds no checkpoint");
    char *path = format_text("%s/nowhere", folder);
    expect_fatal(find_newest, path, "No such file or directory");
    free(path);
}

// As if nobody but root could look into it.
static void a_newest_one_that_cannot_be_looked_at_is_not_passed_over(void **state) {
    (void)state;
    Run run = run_new("vocab=256");
    run_save(&run, "step-000001");
    char *hidden = format_text("%s/step-000002", folder);
    char *config = format_text("%s/config.json", hidden);
    assert_int_equal(mkdir(hidden, 0777), 0);
    assert_int_equal(symlink("config.json", config), 0);  // to itself
    expect_fatal(find_newest, folder, "cannot look for");
    unlink(config);
    assert_int_equal(symlink("gone", config), 0);
    expect_fatal(find_newest, folder, "step-000002/config.json is a link to nothing");
    unlink(config), rmdir(hidden);
    assert_int_equal(symlink("gone", hidden), 0);
    expect_fatal(find_newest, folder, "step-000002 is a link to nothing");
    unlink(hidden);
    free(config), free(hidden);
    run_free(&run);
}

// ---- the optimizer's state ----

static void load_optimizer(void *context) {
    const Load *load = context;
    char *path = format_text("%s/%s/step-000001", folder, load->below);
    checkpoint_check_run(path, &load->run->config, load->run->progress);
    checkpoint_load_optimizer(path, &load->run->model->params, &load->run->optimizer);
    free(path);
}

static void copy(const char *from, const char *to) {
    char *command = format_text("cp -r %s/%s %s/%s", folder, from, folder, to);
    assert_int_equal(system(command), 0);
    free(command);
}

static void weights_and_state_belong_together(void **state) {
    (void)state;
    Run run = run_new("dtype=bf16"), other = run_new("dtype=bf16 seed=3");
    run_step(&run);
    run_step(&other);
    run_save(&run, "out");
    run_save(&other, "other");
    run_step(&run);
    run_save(&run, "out");
    copy("out", "mixed");
    copy("out/step-000002/model.safetensors", "mixed/step-000001/model.safetensors");
    expect_refusal(
        load_optimizer, &(Load){&run, "mixed"},
        "model.safetensors is of step 2 and optimizer.safetensors of step 1: they do not belong together");
    copy("other/step-000001/model.safetensors", "mixed/step-000001/model.safetensors");
    expect_refusal(load_optimizer, &(Load){&run, "mixed"}, "are of two runs, and do not belong together");
    // Weights from elsewhere, which name no run.
    copy("out/step-000001/model.safetensors", "mixed/step-000001/model.safetensors");
    replace_text("mixed/step-000001/model.safetensors", "\"run\"", "\"ran\"");
    expect_refusal(load_optimizer, &(Load){&run, "mixed"}, "are of two runs, and do not belong together");
    run_free(&run);
    run_free(&other);
}

// The place of `key`'s value in the file of run "out", step 1, becomes `value`, which is as long.
static void edit_state(const char *key, const char *value) {
    size_t size;
    char *text = read_text("out/step-000001/optimizer.safetensors", &size);
    char *quoted = format_text("\"%s\":\"", key), *place = memmem(text, size, quoted, strlen(quoted));
    assert_non_null(place);
    memcpy(place + strlen(quoted), value, strlen(value));
    write_text("out/step-000001/optimizer.safetensors", text, size);
    free(text);
    free(quoted);
}

// Another's file may say whose it is and not of which step, or be no state of a run of this program.
static void a_state_that_lacks_what_it_must_say_is_refused(void **state) {
    (void)state;
    static const char *const keys[] = {"step", "sample", "dtype"};
    Run run = run_new("dtype=bf16");
    run_step(&run);
    for (int i = 0; i < 3; i++) {
        run_save(&run, "out");
        size_t size;
        char *text = read_text("out/step-000001/optimizer.safetensors", &size);
        char *quoted = format_text("\"%s\":", keys[i]), *key = memmem(text, size, quoted, strlen(quoted));
        assert_non_null(key);
        key[1] = '-';
        write_text("out/step-000001/optimizer.safetensors", text, size);
        char *part = format_text("does not say its %s", keys[i]);
        expect_refusal(load_optimizer, &(Load){&run, "out"}, part);
        free(text), free(quoted), free(part);
    }
    run_free(&run);
}

static void counts_that_would_overflow_are_refused(void **state) {
    (void)state;
    Run run = run_new("dtype=bf16");
    run_step(&run);
    run.progress.sample = INT64_C(1234567890123456789);  // as long as 2^63 - 1
    run_save(&run, "out");
    expect_refusal(load_optimizer, &(Load){&run, "out"},
                   "sample is 1234567890123456789, and no run has more than 2^53");
    edit_state("sample", "9223372036854775807");
    expect_refusal(load_optimizer, &(Load){&run, "out"},
                   "sample is 9223372036854775807, and no run has more");
    edit_state("sample", "9999999999999999999");
    expect_refusal(load_optimizer, &(Load){&run, "out"}, "sample is no whole number");
    for (int negative = 0; negative < 2; negative++) {
        run.progress.sample = negative ? -1 : 8;
        run.optimizer.step = negative ? 1 : -1;
        run_save(&run, "out");
        expect_refusal(load_optimizer, &(Load){&run, "out"},
                       "step, sample and optimizer_step must not be negative");
    }
    run.progress.sample = 8;
    run_save(&run, "out");
    edit_state("sample", "x");
    expect_refusal(load_optimizer, &(Load){&run, "out"}, "sample is no whole number");
    edit_state("sample", "\" ");
    expect_refusal(load_optimizer, &(Load){&run, "out"}, "sample is no whole number");
    run_free(&run);
}

static void what_a_recipe_keeps_must_be_finite(void **state) {
    (void)state;
    double kept[] = {1024, -HUGE_VAL};
    Run run = run_new("dtype=bf16");
    run_step(&run);
    run.model->params.kept = kept;
    run.model->params.kept_count = 2;
    run_save(&run, "out");
    expect_refusal(load_optimizer, &(Load){&run, "out"},
                   "optimizer.safetensors: element 1 of recipe is -inf in f64, and must be finite");
    // One that keeps fewer is another recipe.
    run.model->params.kept_count = 1;
    run_save(&run, "out");
    run.model->params.kept_count = 2;
    expect_refusal(load_optimizer, &(Load){&run, "out"},
                   "keeps 1 numbers from step to step, and this one keeps 2: resume it with the recipe's");
    run.model->params.kept_count = 0;
    run_free(&run);
}

static void optimizer_state_of_another_run_is_refused(void **state) {
    (void)state;
    Run run = run_new("dtype=bf16");
    run.progress.batch = 24;
    run_step(&run);
    run_save(&run, "out");
    static const struct {
        const char *loaded, *part;
    } cases[] = {
        {"dtype=bf16 steps=1", "step-000001 already has 1 step: give"},
        {"dtype=bf16 seed=77", "is of a run with --seed 1, and this one has 77"},
        {"dtype=bf16 seq=8", "is of a run with --seq 7, and this one has 8: --seq 7 would fit"},
        {"dtype=f32", "is of a run with --dtype bf16, and this one has f32: --dtype bf16 would fit"},
        {"dtype=bf16 optimizer=sgd", "is of a run with --optimizer adamw, and this one has sgd"},
        {"dtype=bf16 layers=1", "the number of tensors is "},
        {"dtype=bf16 layers=3", "lacks the tensor model.layers.2.input_layernorm.weight.m"},
        {"dtype=bf16 ffn=6", "gate_proj.weight.m has shape (5, 12)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Run other = run_new(cases[i].loaded);
        expect_refusal(load_optimizer, &(Load){&other, "out"}, cases[i].part);
        run_free(&other);
    }
    // A step's 24 samples may be split in any way.
    static const struct {
        int64_t grad_acc, batch;
        const char *part;
    } batches[] = {{1, 8, "of a run with 24 samples in a step, and this one has 8: --grad-acc 3 would fit"},
                   {2, 96, "and this one has 96: --micro-batch x --grad-acc x --dp must make 24"},
                   {2, 40, "and this one has 40: --micro-batch x --grad-acc x --dp must make 24"}};
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        Run other = run_new("dtype=bf16");
        other.config.grad_acc = batches[i].grad_acc;
        other.progress.batch = batches[i].batch;
        expect_refusal(load_optimizer, &(Load){&other, "out"}, batches[i].part);
        run_free(&other);
    }
    edit_state("batch", "-2");
    expect_refusal(load_optimizer, &(Load){&run, "out"}, "says that its batch was -2 samples");
    char *path = format_text("%s/out/step-000001/optimizer.safetensors", folder);
    assert_int_equal(unlink(path), 0);
    free(path);
    expect_refusal(load_optimizer, &(Load){&run, "out"}, "--init takes only its weights");
    run_free(&run);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    omp_set_num_threads(1);  // the children of expect_fatal do not inherit a team of threads
    const struct CMUnitTest tests[] = {
        IN_A_FOLDER(resumed_run_is_the_run),
        IN_A_FOLDER(a_run_resumes_before_its_first_step),
        IN_A_FOLDER(config_comes_back),
        IN_A_FOLDER(weights_convert_to_the_dtype_of_the_run),
        IN_A_FOLDER(a_wider_run_goes_on_from_the_masters),
        IN_A_FOLDER(newest_is_the_largest_step),
        IN_A_FOLDER(a_run_begins_with_the_folder_given_whatever_is_saved_in_it),
        IN_A_FOLDER(no_checkpoint_is_told),
        IN_A_FOLDER(a_newest_one_that_cannot_be_looked_at_is_not_passed_over),
        IN_A_FOLDER(weights_and_state_belong_together),
        IN_A_FOLDER(a_state_that_lacks_what_it_must_say_is_refused),
        IN_A_FOLDER(counts_that_would_overflow_are_refused),
        IN_A_FOLDER(what_a_recipe_keeps_must_be_finite),
        IN_A_FOLDER(optimizer_state_of_another_run_is_refused),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
