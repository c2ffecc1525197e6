// checkpoints.h: for tests of checkpoint folders: a folder for each test, and a run without a model, whose
// checkpoints are saved to it and loaded from it.
#ifndef CHECKPOINTS_H
#define CHECKPOINTS_H

#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "00_single_gpu/training.h"
#include "fatal.h"
#include "tensor/device.h"
#include "tensor/rng.h"

// ---- a folder for each test ----

static char *folder;

static inline int make_folder(void **state) {
    (void)state;
    folder = format_text("/tmp/test_checkpoint.XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static inline int remove_folder(void **state) {
    (void)state;
    char *command = format_text("rm -rf %s", folder);
    int status = system(command);
    free(command);
    free(folder);
    return status;
}

static inline void write_text(const char *name, const char *text, size_t size) {
    char *path = format_text("%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
    free(path);
}

// The whole file; the caller frees it.
static inline char *read_text(const char *name, size_t *size) {
    char *path = format_text("%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file) fail_msg("cannot open %s", path);
    char *text = host_alloc(1 << 20);
    *size = fread(text, 1, (1 << 20) - 1, file);
    text[*size] = '\0';
    fclose(file);
    free(path);
    return text;
}

// In this file the first `from` becomes `to`, which is as long.
static inline void replace_text(const char *name, const char *from, const char *to) {
    size_t size;
    char *text = read_text(name, &size), *place = memmem(text, size, from, strlen(from));
    assert_non_null(place);
    memcpy(place, to, strlen(to));
    write_text(name, text, size);
    free(text);
}

// As expect_fatal, for actions on a run in device memory. A process's children cannot use a GPU that it has
// used (CUDA C++ Programming Guide, "Initialization"): so these are only tested without a GPU.
static inline void expect_refusal(void (*act)(void *context), const void *context, const char *part) {
    if (backend_is_host()) expect_fatal(act, context, part);
}

// ---- a run without a model: gradients that depend on weights and sample ----

static const char *const TINY = "layers=2 hidden=12 heads=6 kv-heads=2 ffn=5 vocab=11 seq=7 steps=20";

typedef struct Run {
    Config config;
    Model *model;
    Optimizer optimizer;
    Progress progress;
} Run;

// more: "dtype=bf16 seed=3", or "tied dtype=bf16".
static inline Run run_new(const char *more) {
    bool tied = !strncmp(more, "tied", 4);
    char *text = format_text("%s %s", TINY, more + (tied ? 4 : 0));
    Run run = {.config = config_default(text)};
    run.config.tied = tied;
    free(text);
    run.model = model_new(&run.config, mesh_single());
    model_allocate(run.model);
    run.optimizer = optimizer_new(&run.config, &run.model->params);
    return run;
}

static inline void run_free(Run *run) {
    optimizer_free(&run->optimizer);
    model_free(run->model);
}

static inline void run_step(Run *run) {
    Params *params = &run->model->params;
    for (int i = 0; i < params->units; i++) {
        Tensor grad = unit_total_grad(&params->unit[i]);
        int64_t count = tensor_count(grad);
        double *host = host_alloc(count * sizeof *host);
        tensor_to_doubles(host, params->unit[i].values);
        for (int64_t j = 0; j < count; j++)
            host[j] = 0.1 * host[j] +
                      rng_normal(9, (uint64_t)(100 + i), (uint64_t)(run->progress.sample * count + j));
        tensor_from_doubles(grad, host);
        free(host);
    }
    double scale = clip_scale(params_grad_norm(params, (Tensor){0}, NULL), run->config.clip);
    double lr = learning_rate(&run->config, run->progress.step);
    optimizer_begin(&run->optimizer, params);
    for (int i = 0; i < params->units; i++) optimizer_step_unit(&run->optimizer, params, i, lr, scale);
    run->progress.step++;
    run->progress.sample += 6;
}

// In `folder`, or below it.
static inline void run_save(const Run *run, const char *below) {
    char *dir = format_text("%s/%s", folder, below);
    checkpoint_save(dir, &run->config, &run->model->params, &run->optimizer, run->progress);
    free(dir);
}

static inline Run run_resume(const char *below, const char *more) {
    Run run = run_new(more);
    char *dir = format_text("%s/%s", folder, below), *newest = checkpoint_newest(dir);
    checkpoint_config(newest, &run.config);
    checkpoint_load_weights(newest, &run.model->params);
    run.progress = checkpoint_load_optimizer(newest, &run.model->params, &run.optimizer);
    free(dir);
    free(newest);
    return run;
}

// One flat tensor, as bytes; the caller frees it.
static inline void *bytes_of(Tensor t) {
    void *bytes = host_alloc(tensor_bytes(t));
    tensor_to_host(bytes, t);
    return bytes;
}

static inline void assert_same_tensor(const char *what, Tensor a, Tensor b) {
    if (tensor_exists(a) != tensor_exists(b)) fail_msg("%s exists in one run only", what);
    if (!tensor_exists(a)) return;
    void *x = bytes_of(a), *y = bytes_of(b);
    assert_string_equal(tensor_text(a), tensor_text(b));
    if (memcmp(x, y, tensor_bytes(a)) != 0) fail_msg("%s differs", what);
    free(x);
    free(y);
}

static inline void assert_same_run(const Run *a, const Run *b) {
    assert_int_equal(a->progress.step, b->progress.step);
    assert_int_equal(a->progress.sample, b->progress.sample);
    assert_int_equal(a->optimizer.step, b->optimizer.step);
    for (int i = 0; i < a->model->params.units; i++) {
        const UnitState *x = &a->optimizer.unit[i], *y = &b->optimizer.unit[i];
        assert_same_tensor("a weight", a->model->params.unit[i].values, b->model->params.unit[i].values);
        assert_same_tensor("m", x->m, y->m);
        assert_same_tensor("v", x->v, y->v);
        assert_same_tensor("master", x->master, y->master);
    }
}

// Loads in a child process, where it may be refused.
typedef struct Load {
    Run *run;
    const char *below;
} Load;

// A test with a folder of its own.
#define IN_A_FOLDER(name) cmocka_unit_test_setup_teardown(name, make_folder, remove_folder)

#endif
