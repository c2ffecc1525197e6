// Checkpoint folders: what is saved comes back bit for bit, a resumed run is the run, a failed save harms
// nothing, and a folder that is not ours to train is refused by the key at fault.
#include <errno.h>
#include <fcntl.h>
#include <omp.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "00_single_gpu/training.h"
#include "tensor/rng.h"
// needs those above
#include <cmocka.h>

// ---- a folder for each test, and what a program says when it gives up ----

static char *folder;

static int make_folder(void **state) {
    (void)state;
    folder = format_text("/tmp/test_checkpoint.XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state) {
    (void)state;
    char *command = format_text("rm -rf %s", folder);
    int status = system(command);
    free(command);
    free(folder);
    return status;
}

static bool exists(const char *name) {
    char *path = format_text("%s/%s", folder, name);
    bool is = access(path, F_OK) == 0;
    free(path);
    return is;
}

static void write_text(const char *name, const char *text, size_t size) {
    char *path = format_text("%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
    free(path);
}

// The whole file; the caller frees it.
static char *read_text(const char *name, size_t *size) {
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

// Runs `act` in a process of its own, which must end with STATUS_USAGE and one sentence that has `part`.
static void expect_fatal(void (*act)(void *), void *context, const char *part) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        act(context);
        _exit(0);
    }
    close(ends[1]);
    char said[2000] = "";
    size_t size = 0;
    for (ssize_t got; (got = read(ends[0], said + size, sizeof said - 1 - size)) > 0;) size += (size_t)got;
    close(ends[0]);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != STATUS_USAGE)
        fail_msg("status %x instead of a sentence with \"%s\"; said \"%s\"", (unsigned)status, part, said);
    if (!strstr(said, part) || strchr(said, '\n') != said + size - 1)
        fail_msg("said \"%s\" instead of one sentence with \"%s\"", said, part);
}

// ---- the calls that make a checkpoint last: watched, and made to fail ----

static char calls[4096];  // "fsync model.safetensors, rename, …" since watching began
static bool watching, no_exchange;
static int fsync_fails = -1;  // so many succeed first; -1: all

static void note(const char *call, const char *path) {
    const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    size_t used = strlen(calls);
    if (watching) snprintf(calls + used, sizeof calls - used, "%s %s, ", call, name);
}

// These take the place of the C library's in this program.
int fsync(int file) {
    char link[64], path[512] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (readlink(link, path, sizeof path - 1) > 0) note("fsync", path);
    if (fsync_fails == 0) {
        errno = EIO;
        return -1;
    }
    if (fsync_fails > 0) fsync_fails--;
    return (int)syscall(SYS_fsync, file);
}

int rename(const char *from, const char *to) {
    note("rename to", to);
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    note("exchange with", to);
    if (no_exchange) {
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
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
static Run run_new(const char *more) {
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

static void run_free(Run *run) {
    optimizer_free(&run->optimizer);
    model_free(run->model);
}

static void run_step(Run *run) {
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
    double scale = clip_scale(params_grad_norm(params), run->config.clip);
    optimizer_step(&run->optimizer, params, learning_rate(&run->config, run->progress.step), scale);
    run->progress.step++;
    run->progress.sample += 6;
}

// In `folder`, or below it.
static void run_save(const Run *run, const char *below) {
    char *dir = format_text("%s/%s", folder, below);
    checkpoint_save(dir, &run->config, &run->model->params, &run->optimizer, run->progress);
    free(dir);
}

static Run run_resume(const char *below, const char *more) {
    Run run = run_new(more);
    char *dir = format_text("%s/%s", folder, below), *newest = checkpoint_newest(dir);
    checkpoint_config(newest, &run.config);
    checkpoint_load_weights(newest, &run.model->params);
    run.progress = checkpoint_load_optimizer(newest, &run.model->params, &run.optimizer);
    free(dir);
    free(newest);
    return run;
}

// Of one flat tensor, as bytes; the caller frees it.
static void *bytes_of(Tensor t) {
    void *bytes = host_alloc(tensor_bytes(t));
    tensor_to_host(bytes, t);
    return bytes;
}

static void assert_same_tensor(const char *what, Tensor a, Tensor b) {
    if (tensor_exists(a) != tensor_exists(b)) fail_msg("%s exists in one run only", what);
    if (!tensor_exists(a)) return;
    void *x = bytes_of(a), *y = bytes_of(b);
    assert_true(a.dtype == b.dtype && tensor_same_shape(a, b));
    if (memcmp(x, y, tensor_bytes(a)) != 0) fail_msg("%s differs", what);
    free(x);
    free(y);
}

static void assert_same_run(const Run *a, const Run *b) {
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

// ---- what is saved comes back ----

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
    assert_same_run(&run, &resumed);  // no state either: it appears with the first step
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

// Weights cross dtypes by one rounding: f32 loaded as bf16, and that loaded as f64, is f32 rounded to bf16.
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

// The f64 run that says how far off a 16-bit run is begins where that one truly is: at its master weights.
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
    char *newest = checkpoint_newest(dir), *itself = checkpoint_newest(newest);
    assert_string_equal(strrchr(newest, '/'), "/step-1000000");
    assert_string_equal(newest, itself);
    free(newest);
    free(itself);
    free(dir);
    run_free(&run);
}

static void find_newest(void *dir) { checkpoint_newest(dir); }

static void no_checkpoint_is_told(void **state) {
    (void)state;
    expect_fatal(find_newest, folder, "holds no checkpoint");
    char *path = format_text("%s/nowhere", folder);
    expect_fatal(find_newest, path, "No such file or directory");
    free(path);
}

// ---- saving, whole or not at all ----

static void save_again(void *run) { run_save(run, "out"); }

// Files, then their folder, then the name, then the folder that holds the name.
static void all_is_on_the_disk_before_it_has_a_name(void **state) {
    (void)state;
    Run run = run_new("");
    run_step(&run);
    run_save(&run, "out");
    run_step(&run);
    calls[0] = '\0';
    watching = true;
    run_save(&run, "out");
    watching = false;
    const char *renamed = strstr(calls, "rename to step-000002");
    static const char *const before[] = {"fsync config.json", "fsync model.safetensors",
                                         "fsync optimizer.safetensors", "fsync .step-000002.tmp"};
    assert_non_null(renamed);
    for (size_t i = 0; i < sizeof before / sizeof *before; i++) {
        const char *call = strstr(calls, before[i]);
        if (!call || call > renamed) fail_msg("no \"%s\" before the rename: %s", before[i], calls);
    }
    const char *folder_flush = strstr(calls, "fsync .step"), *file_flush = strstr(calls, "fsync optimizer");
    assert_true(folder_flush > file_flush);
    if (!strstr(renamed, "fsync out")) fail_msg("the new name is not flushed: %s", calls);
    run_free(&run);
}

static void assert_only_step(const char *step, const Run *run) {
    char *command = format_text("[ \"$(ls -A %s/out)\" = %s ] && [ $(ls %s/out/%s | wc -l) = 3 ]", folder,
                                step, folder, step);
    if (system(command) != 0) fail_msg("the folder holds something else than %s", step);
    free(command);
    Run loaded = run_resume("out", "dtype=bf16");
    assert_same_run(run, &loaded);
    run_free(&loaded);
}

// A limit on file sizes stands in for a full disk, which fails at any byte.
static void limited_save(void *context) {
    struct rlimit limit = {.rlim_cur = *(rlim_t *)context, .rlim_max = RLIM_INFINITY};
    Run run = run_resume("out", "dtype=bf16");
    run_step(&run);
    // The limit would also cut the sentence, were stderr a file; here it is a pipe.
    if (setrlimit(RLIMIT_FSIZE, &limit) == 0) run_save(&run, "out");
}

static void a_full_disk_leaves_older_checkpoints_intact(void **state) {
    (void)state;
    Run run = run_new("dtype=bf16");
    run_step(&run);
    run_save(&run, "out");
    size_t model, optimizer;
    free(read_text("out/step-000001/model.safetensors", &model));
    free(read_text("out/step-000001/optimizer.safetensors", &optimizer));
    assert_true(optimizer > model);
    // none, in a header, in the weights, in the optimizer's state
    rlim_t limits[] = {0, 100, model - 1, model, optimizer - 1};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        expect_fatal(limited_save, &limits[i], "File too large; the checkpoint of step 2 is not saved");
        assert_only_step("step-000001", &run);
    }
    run_free(&run);
}

// At each flush in turn: three files and the folder.
static void a_flush_that_fails_leaves_older_checkpoints_intact(void **state) {
    (void)state;
    Run run = run_new("dtype=bf16");
    run_step(&run);
    run_save(&run, "out");
    Run next = run_resume("out", "dtype=bf16");
    run_step(&next);
    for (int i = 0; i < 4; i++) {
        fsync_fails = i;
        expect_fatal(save_again, &next, "Input/output error; the checkpoint of step 2 is not saved");
        fsync_fails = -1;
        assert_only_step("step-000001", &run);
    }
    fsync_fails = 4;  // the parent: too late to take it back
    expect_fatal(save_again, &next, "is complete, but may not outlast a power cut");
    fsync_fails = -1;
    run_free(&run);
    run_free(&next);
}

// Where there is one of that name, it is replaced: in one exchange, or, on file systems that have none, in
// two steps. One that holds a file that is not ours is left alone.
static void a_checkpoint_of_the_same_step_is_replaced(void **state) {
    (void)state;
    for (int without = 0; without < 2; without++) {
        no_exchange = without;
        Run old = run_new("dtype=bf16"), new = run_new("dtype=bf16");
        old.progress.sample = 600;  // other gradients
        run_step(&old);
        run_step(&new);
        run_save(&old, "out");
        calls[0] = '\0';
        watching = true;
        run_save(&new, "out");
        watching = false;
        assert_non_null(strstr(calls, "exchange with step-000001"));
        if (without) assert_non_null(strstr(calls, "rename to .step-000001.old"));
        assert_only_step("step-000001", &new);

        write_text("out/step-000001/notes.txt", "mine", 4);
        expect_fatal(save_again, &old, "out/step-000001 holds notes.txt, which is no part of a checkpoint");
        assert_true(exists("out/step-000001/notes.txt"));
        char *command = format_text("rm -r %s/out", folder);
        assert_int_equal(system(command), 0);
        free(command);
        run_free(&old);
        run_free(&new);
    }
    no_exchange = false;
}

static void start_in_out(void *run) {
    char *dir = format_text("%s/out", folder);
    checkpoint_check_place_is_ours(dir, &((Run *)run)->config, ((Run *)run)->progress);
    free(dir);
}

static void a_folder_of_another_run_is_left_alone(void **state) {
    (void)state;
    Run run = run_new("dtype=bf16");
    run_step(&run);
    start_in_out(&run);  // nothing there yet
    run_save(&run, "out");
    start_in_out(&run);  // begun again
    static const char *const others[] = {"dtype=bf16 seed=3", "dtype=bf16 steps=21",
                                         "dtype=bf16 optimizer=sgd"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        Run other = run_new(others[i]);
        run_step(&other);
        expect_fatal(start_in_out, &other,
                     "out/step-000001 is a checkpoint of another run: choose another folder");
        expect_fatal(save_again, &other, "out/step-000001 is a checkpoint of another run");
        assert_only_step("step-000001", &run);
        run_free(&other);
    }
    // A run that goes on with other rates is still that run.
    Run resumed = run_resume("out", "dtype=bf16");
    resumed.config.lr *= 2;
    start_in_out(&resumed);
    run_step(&resumed);
    run_save(&resumed, "out");
    run_free(&run);
    run_free(&resumed);
}

static void copy(const char *from, const char *to) {
    char *command = format_text("cp -r %s/%s %s/%s", folder, from, folder, to);
    assert_int_equal(system(command), 0);
    free(command);
}

// What a killed run left behind stands in nobody's way.
static void leftovers_of_a_killed_run_are_replaced(void **state) {
    (void)state;
    Run run = run_new("dtype=bf16");
    run_step(&run);
    char *command = format_text(
        "mkdir -p %s/out/.step-000001.tmp && echo half >%s/out/.step-000001.tmp/model.safetensors", folder,
        folder);
    assert_int_equal(system(command), 0);
    free(command);
    run_save(&run, "out");
    assert_only_step("step-000001", &run);
    run_free(&run);
}

static void a_place_that_cannot_be_written_is_told(void **state) {
    (void)state;
    write_text("out", "a file", 6);
    Run run = run_new("");
    expect_fatal(save_again, &run, "the checkpoint of step 0 is not saved");
    run_free(&run);
}

// ---- folders that are not ours to train ----

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
        found |= this_one;
        const char *line = this_one ? add : LINES[i];
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
        {"model_type", "\"model_type\": \"mistral\"", "\"model_type\" is \"mistral\"", 0},
        {"architectures", "\"architectures\": [\"LlamaForSequenceClassification\"]", "\"architectures\" is",
         0},
        {"architectures", "\"architectures\": []", "\"architectures\"", 0},
        {"hidden_act", "\"hidden_act\": \"gelu\"", "\"hidden_act\" is \"gelu\"", 0},
        {"attention_bias", "\"attention_bias\": true", "\"attention_bias\" is true", 0},
        {"mlp_bias", "\"mlp_bias\": true", "\"mlp_bias\" is true", 0},
        {"use_cache", "\"attention_dropout\": 0.1", "\"attention_dropout\" is 0.1", 0},
        {"use_cache", "\"quantization_config\": {\"bits\": 4}", "\"quantization_config\"", 0},
        {"rope_scaling", "\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0}",
         "a RoPE of type \"llama3\" does not say \"low_freq_factor\"", 0},
        {"rope_scaling", LLAMA3("4.0", "1.0"), "\"low_freq_factor\" 4 is not below \"high_freq_factor\" 1",
         0},
        {"rope_scaling", LLAMA3("1.0", "4.0"), NULL, 500000},
        {"rope_scaling", "\"rope_scaling\": 2", "\"rope_scaling\"", 0},
        {"rope_theta", "\"rope_parameters\": {\"rope_theta\": 7.0, \"rope_type\": \"yarn\"}",
         "\"rope_parameters\"", 0},
        {"rope_theta", "\"rope_parameters\": {\"partial_rotary_factor\": 0.5}", "\"partial_rotary_factor\"",
         0},
        {"rope_theta", "\"rope_theta\": -1", "\"rope_theta\" is no positive number", 0},
        {"rms_norm_eps", "\"rms_norm_eps\": \"1e-5\"", "\"rms_norm_eps\" is no positive number", 0},
        {"head_dim", "\"head_dim\": 8", NULL, 0},
        {"head_dim", "\"head_dim\": 7", "a head of 7 is odd, and RoPE turns pairs", 0},
        {"head_dim", "\"head_dim\": 0", "\"head_dim\" is no whole number", 0},
        {"hidden_size", NULL, "does not say \"hidden_size\"", 0},
        {"hidden_size", "\"hidden_size\": 25", "\"hidden_size\" 25 is not divisible", 0},
        {"num_key_value_heads", "\"num_key_value_heads\": 4", "\"num_key_value_heads\" 4", 0},
        {"num_hidden_layers", "\"num_hidden_layers\": 0", "\"num_hidden_layers\" is no whole number", 0},
        {"num_hidden_layers", "\"num_hidden_layers\": 2.5", "\"num_hidden_layers\" is no whole number", 0},
        {"vocab_size", "\"vocab_size\": 1e12", "\"vocab_size\" is no whole number", 0},
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
        assert_int_equal(c.hidden, 24);
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

static void a_config_that_is_no_json_is_refused(void **state) {
    (void)state;
    Config c = config_default("");
    expect_fatal(read_config, &c, "cannot open");
    static const char *const texts[] = {"", "[]", "{", "{} trailing"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        write_text("config.json", texts[i], strlen(texts[i]));
        expect_fatal(read_config, &c, "no JSON object");
    }
}

// ---- weights that do not fit ----

typedef struct Load {
    Run *run;
    const char *below;
} Load;

static void load_weights(void *context) {
    const Load *load = context;
    char *path = format_text("%s/%s/step-000000", folder, load->below);
    checkpoint_load_weights(path, &load->run->model->params);
    free(path);
}

static void load_optimizer(void *context) {
    const Load *load = context;
    char *path = format_text("%s/%s/step-000001", folder, load->below);
    checkpoint_check_run(path, &load->run->config, load->run->progress);
    checkpoint_load_optimizer(path, &load->run->model->params, &load->run->optimizer);
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
        {"tied", "", "lacks the tensor lm_head.weight"},
        {"", "tied", "lm_head.weight differs from model.embed_tokens.weight"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *below = format_text("%d", (int)i);
        Run saved = run_new(cases[i].saved), loaded = run_new(cases[i].loaded);
        run_save(&saved, below);
        expect_fatal(load_weights, &(Load){&loaded, below}, cases[i].part);
        free(below);
        run_free(&saved);
        run_free(&loaded);
    }
}

// A weight that is transposed in the file has the right number of bytes: its shape alone tells.
static void transposed_weights_are_refused(void **state) {
    (void)state;
    Run run = run_new("");
    run_save(&run, "out");
    size_t size;
    char *text = read_text("out/step-000000/model.safetensors", &size);
    char *shape = memmem(text, size, "[5,12]", 6);
    assert_non_null(shape);
    memcpy(shape, "[12,5]", 6);
    write_text("out/step-000000/model.safetensors", text, size);
    free(text);
    expect_fatal(load_weights, &(Load){&run, "out"}, "has shape (12, 5), the model's is (5, 12)");
    run_free(&run);
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
    assert_null(safetensors_write(path, &file, read_zeros, &file));
    free(path);
    free(file.tensor);
}

// RoPE's frequencies, which old files keep, and a head equal to the embedding it is tied to say nothing
// new.
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
    expect_fatal(load_weights, &(Load){&run, "bias"}, "holds model.layers.0.self_attn.q_proj.bias");
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
        assert_null(safetensors_write(path, &file, read_zeros, &file));
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
    expect_fatal(load_weights, &(Load){&run, "missing"}, "model-70001-of-00002.safetensors: No such file");
    static const struct {
        const char *map, *part;
    } cases[] = {
        {"{}", "has no \"weight_map\""},
        {"{\"weight_map\": {\"a\": \"../model.safetensors\"}}",
         "names ../model.safetensors, which is no file beside it"},
        {"{\"weight_map\": {\"a\": \"model-00001-of-00002.safetensors\"}}", "holds a, and it does not"},
        {"{\"weight_map\": {\"model.norm.weight\": 1}}", "the file of model.norm.weight is no text"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_parts("wrong", &run, cases[i].map);
        expect_fatal(load_weights, &(Load){&run, "wrong"}, cases[i].part);
    }
    free(map);
    run_free(&run);
}

static void weights_in_pythons_format_are_named(void **state) {
    (void)state;
    Run run = run_new("");
    char *command = format_text("mkdir -p %s/bin/step-000000", folder);
    assert_int_equal(system(command), 0);
    free(command);
    expect_fatal(load_weights, &(Load){&run, "bin"}, "model.safetensors: No such file");
    write_text("bin/step-000000/pytorch_model.bin", "", 0);
    expect_fatal(load_weights, &(Load){&run, "bin"},
                 "pytorch_model.bin alone, which is Python's own format; write");
    run_free(&run);
}

// What the folder that was loaded says beyond the shape goes into the folders that are saved.
static void saving_keeps_what_the_loaded_folder_had(void **state) {
    (void)state;
    static const char config[] =
        "{\"model_type\": \"llama\", \"hidden_size\": 12, \"intermediate_size\": 5, \"num_hidden_layers\": "
        "2, "
        "\"num_attention_heads\": 6, \"num_key_value_heads\": 2, \"vocab_size\": 11, \"hidden_act\": "
        "\"swish\", "
        "\"max_position_embeddings\": 4096, \"eos_token_id\": [7, 9], \"dtype\": \"float16\"}";
    static const char generation[] = "{\"temperature\": 0.6}\n";
    write_text("config.json", config, strlen(config));
    write_text("generation_config.json", generation, strlen(generation));
    Run run = run_new("");
    checkpoint_config(folder, &run.config);
    run_save(&run, "out");
    size_t size;
    char *saved = read_text("out/step-000000/config.json", &size);
    static const char *const parts[] = {"\"max_position_embeddings\": 4096", "\"eos_token_id\": [7,9]",
                                        "\"torch_dtype\": \"float32\"", "\"hidden_act\": \"silu\""};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!strstr(saved, parts[i])) fail_msg("%s is not in %s", parts[i], saved);
    assert_null(strstr(saved, "float16"));
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

static void a_damaged_file_is_named(void **state) {
    (void)state;
    Run run = run_new("");
    run_save(&run, "out");
    size_t size;
    char *text = read_text("out/step-000000/model.safetensors", &size);
    write_text("out/step-000000/model.safetensors", text, size - 1);
    free(text);
    expect_fatal(load_weights, &(Load){&run, "out"}, "step-000000/model.safetensors: tensor");
    run_free(&run);
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
    expect_fatal(
        load_optimizer, &(Load){&run, "mixed"},
        "model.safetensors is of step 2 and optimizer.safetensors of step 1: they do not belong together");
    copy("other/step-000001/model.safetensors", "mixed/step-000001/model.safetensors");
    expect_fatal(load_optimizer, &(Load){&run, "mixed"}, "are of two runs, and do not belong together");
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

static void counts_that_would_overflow_are_refused(void **state) {
    (void)state;
    Run run = run_new("dtype=bf16");
    run_step(&run);
    run.progress.sample = INT64_C(1234567890123456789);  // as long as 2^63 - 1
    run_save(&run, "out");
    expect_fatal(load_optimizer, &(Load){&run, "out"},
                 "sample is 1234567890123456789, and no run has more than 2^53");
    edit_state("sample", "9223372036854775807");
    expect_fatal(load_optimizer, &(Load){&run, "out"},
                 "sample is 9223372036854775807, and no run has more");
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
        {"dtype=bf16 steps=1", "step-000001 already has 1 steps"},
        {"dtype=bf16 seed=77", "is of a run with --seed 1, and this one has 77"},
        {"dtype=bf16 seq=8", "is of a run with --seq 7, and this one has 8"},
        {"dtype=f32", "is of a run with --dtype bf16, and this one has f32"},
        {"dtype=bf16 optimizer=sgd", "is of a run with --optimizer adamw, and this one has sgd"},
        {"dtype=bf16 layers=1", "holds "},
        {"dtype=bf16 layers=3", "lacks the tensor model.layers.2.input_layernorm.weight.m"},
        {"dtype=bf16 ffn=6", "gate_proj.weight.m has shape (5, 12)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Run other = run_new(cases[i].loaded);
        expect_fatal(load_optimizer, &(Load){&other, "out"}, cases[i].part);
        run_free(&other);
    }
    // 24 samples in a step may be split in any way.
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
        expect_fatal(load_optimizer, &(Load){&other, "out"}, batches[i].part);
        run_free(&other);
    }
    char *path = format_text("%s/out/step-000001/optimizer.safetensors", folder);
    assert_int_equal(unlink(path), 0);
    free(path);
    expect_fatal(load_optimizer, &(Load){&run, "out"}, "--init takes its weights alone");
    run_free(&run);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    omp_set_num_threads(1);  // the children of expect_fatal do not inherit a team of threads
#define TEST(name) cmocka_unit_test_setup_teardown(name, make_folder, remove_folder)
    const struct CMUnitTest tests[] = {
        TEST(resumed_run_is_the_run),
        TEST(a_run_resumes_before_its_first_step),
        TEST(config_comes_back),
        TEST(weights_convert_to_the_dtype_of_the_run),
        TEST(a_wider_run_goes_on_from_the_masters),
        TEST(newest_is_the_largest_step),
        TEST(no_checkpoint_is_told),
        TEST(all_is_on_the_disk_before_it_has_a_name),
        TEST(a_full_disk_leaves_older_checkpoints_intact),
        TEST(a_flush_that_fails_leaves_older_checkpoints_intact),
        TEST(a_checkpoint_of_the_same_step_is_replaced),
        TEST(leftovers_of_a_killed_run_are_replaced),
        TEST(a_place_that_cannot_be_written_is_told),
        TEST(configs_are_read_or_refused_by_key),
        TEST(a_config_that_is_no_json_is_refused),
        TEST(weights_of_another_model_are_refused),
        TEST(transposed_weights_are_refused),
        TEST(only_harmless_surplus_is_let_pass),
        TEST(weights_in_several_files_load),
        TEST(weights_in_pythons_format_are_named),
        TEST(saving_keeps_what_the_loaded_folder_had),
        TEST(a_folder_of_another_run_is_left_alone),
        TEST(weights_and_state_belong_together),
        TEST(counts_that_would_overflow_are_refused),
        TEST(a_damaged_file_is_named),
        TEST(optimizer_state_of_another_run_is_refused),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
