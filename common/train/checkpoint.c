// checkpoint.c: checkpoint folders, written whole or not at all.
//
//     DIR/step-000123/config.json               the model's shape, as transformers reads it
//                     model.safetensors         the weights under Hugging Face's names
//                     optimizer.safetensors     NAME.m, NAME.v, NAME.master; metadata: where the run stands
//
// A run may die at any moment, and the disk may be full. So a checkpoint grows in DIR/.step-000123.tmp,
// every file of it is on the disk before its name counts, and one rename makes it real: flush files, flush
// folder, rename, flush the parent. Whoever looks at DIR sees the old state or the new one.
#include "checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "comm/comm.h"

static const char *const config_name = "config.json";
static const char *const model_name = "model.safetensors";
static const char *const optimizer_name = "optimizer.safetensors";
static const char *const generation_name = "generation_config.json";

static const char *const optimizer_names[] = {"adamw", "sgd"};

// "DIR/name". The caller frees it.
static char *path_in(const char *dir, const char *name) { return format_text("%s/%s", dir, name); }

// What a run may change when it goes on, and what it would then not repeat; by the names of the flags.
enum { COURSE = 5, COURSE_OF_ADAMW = 2 };  // the last so many say nothing to SGD, whose rate is constant
static const char *const course_names[COURSE] = {"lr", "weight-decay", "clip", "warmup", "steps"};

// As one would type it: the fewest digits that read back as the same number. The caller frees it.
static char *course_text(const Config *c, int which) {
    const double values[COURSE] = {c->lr, c->weight_decay, c->clip, (double)c->warmup, (double)c->steps};
    double x = values[which];
    for (int digits = 6;; digits++) {
        char *text = format_text("%.*g", digits, x);
        if (digits >= 17 || strtod(text, NULL) == x) return text;
        free(text);
    }
}

// ---- files to be ----

// Tensors of the optimizer, by the ending of their names.
enum { STATES = 3 };
static const char *const state_names[STATES] = {"m", "v", "master"};
static const char *const kept_name = "recipe";  // what the recipe knows from step to step (params.h)

// Without a tensor where this optimizer keeps no such state, or none yet.
static StateTensor state_of(const Optimizer *optimizer, int unit, int which) {
    const UnitState *state = &optimizer->unit[unit];
    return (StateTensor){(StateKind)which,
                         (const Tensor[STATES]){state->m, state->v, state->master}[which]};
}

// A safetensors file about to be written, and the whole tensors that fill it. All ranks make the same one,
// and ask for its tensors in the same order, each giving what it stores of them; the first writes.
typedef struct Contents {
    SafeTensors file;
    const Params *params;
    const Param **param;  // of each tensor; NULL: what the recipe keeps
    StateTensor *state;   // of that parameter's unit; without a tensor: the weight
} Contents;

static Contents contents_new(const Params *params, int tensors, int keys) {
    Contents c = {.params = params};
    c.file.tensor = host_alloc(tensors * sizeof *c.file.tensor);
    c.param = host_alloc(tensors * sizeof *c.param);
    c.state = host_alloc(tensors * sizeof *c.state);
    c.file.key = host_alloc(keys * sizeof *c.file.key);
    c.file.value = host_alloc(keys * sizeof *c.file.value);
    return c;
}

// Takes over name.
static void contents_add(Contents *c, char *name, const Param *param, StateTensor state) {
    SafeTensor *tensor = &c->file.tensor[c->file.count];
    *tensor =
        (SafeTensor){.name = name, .dtype = optimizer_saved_dtype(c->params, state), .dims = param->dims};
    memcpy(tensor->shape, param->full, sizeof param->full);
    c->param[c->file.count] = param;
    c->state[c->file.count++] = state;
}

static void contents_add_kept(Contents *c) {
    if (!c->params->kept_count) return;
    SafeTensor *tensor = &c->file.tensor[c->file.count];
    *tensor = (SafeTensor){.name = format_text("%s", kept_name), .dtype = F64, .dims = 1};
    tensor->shape[0] = c->params->kept_count;
    c->param[c->file.count] = NULL;
    c->state[c->file.count++] = (StateTensor){0};
}

static void contents_say(Contents *c, const char *key, char *value) {
    c->file.key[c->file.keys] = format_text("%s", key);
    c->file.value[c->file.keys++] = value;
}

static void read_source(void *context, int tensor, uint8_t *bytes) {
    const Contents *c = context;
    if (!c->param[tensor])
        memcpy(bytes, c->params->kept, (size_t)c->params->kept_count * sizeof *c->params->kept);
    else if (tensor_exists(c->state[tensor].flat))
        optimizer_gather(c->params, c->param[tensor], c->state[tensor], bytes);
    else param_gather(c->params, c->param[tensor], PARAM_VALUE, bytes);
}

static int64_t whole_bytes(const SafeTensor *t) {
    int64_t count = 1;
    for (int i = 0; i < t->dims; i++) count *= t->shape[i];
    return count * (int64_t)dtype_size(t->dtype);
}

static const char *contents_write(Contents *c, const char *dir, const char *name) {
    const char *wrong = NULL;
    if (dir) {
        char *path = path_in(dir, name);
        wrong = safetensors_write(path, &c->file, read_source, c);
        free(path);
    } else {
        for (int i = 0; i < c->file.count; i++) {
            uint8_t *bytes = host_alloc(whole_bytes(&c->file.tensor[i]));
            read_source(c, i, bytes);
            free(bytes);
        }
    }
    safetensors_close(&c->file);
    free(c->param);
    free(c->state);
    return wrong;
}

// Whose a file is, so that it is not taken for another's.
static void contents_say_run(Contents *c, Progress progress) {
    contents_say(c, "run", format_text("%016llx", (unsigned long long)progress.run));
    contents_say(c, "step", format_text("%lld", (long long)progress.step));
}

// dir is NULL on ranks that give and do not write.
static const char *write_model(const char *dir, const Params *params, Progress progress) {
    Contents c = contents_new(params, params->count, 3);
    contents_say(&c, "format", format_text("pt"));  // transformers refuses a file that does not say so
    contents_say_run(&c, progress);
    for (int i = 0; i < params->count; i++)
        contents_add(&c, format_text("%s", params->param[i].name), &params->param[i], (StateTensor){0});
    return contents_write(&c, dir, model_name);
}

static const char *write_optimizer(const char *dir, const Config *config, const Params *params,
                                   const Optimizer *optimizer, Progress progress) {
    Contents c = contents_new(params, STATES * params->count + 1, 10 + COURSE);
    contents_say_run(&c, progress);
    contents_say(&c, "sample", format_text("%lld", (long long)progress.sample));
    contents_say(&c, "optimizer_step", format_text("%lld", (long long)optimizer->step));
    contents_say(&c, "seed", format_text("%lld", (long long)config->seed));
    contents_say(&c, "seq", format_text("%lld", (long long)config->seq));
    contents_say(&c, "dtype", format_text("%s", dtype_name(params->recipe.weight)));
    contents_say(&c, "optimizer", format_text("%s", optimizer_names[optimizer->kind]));
    contents_say(&c, "batch", format_text("%lld", (long long)progress.batch));
    contents_say(&c, "data", format_text("%016llx", (unsigned long long)progress.data));
    for (int i = 0; i < COURSE; i++) contents_say(&c, course_names[i], course_text(config, i));
    for (int i = 0; i < params->count; i++)
        for (int j = 0; j < STATES; j++) {
            const Param *param = &params->param[i];
            StateTensor state = state_of(optimizer, param->unit, j);
            if (tensor_exists(state.flat))
                contents_add(&c, format_text("%s.%s", param->name, state_names[j]), param, state);
        }
    contents_add_kept(&c);
    return contents_write(&c, dir, optimizer_name);
}

// ---- folders to be ----

// Removes a checkpoint folder, but nothing in it that is not a checkpoint's.
static void remove_checkpoint(const char *folder) {
    const char *const names[] = {config_name, model_name, optimizer_name, generation_name};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *path = path_in(folder, names[i]);
        unlink(path);
        free(path);
    }
    rmdir(folder);
}

// Gives the finished folder its name. One that has it already changes places with it in one step, or, where
// the file system cannot do that, steps aside first.
static const char *put_in_place(const char *temporary, const char *final, const char *aside) {
    if (rename(temporary, final) == 0) return NULL;
    if (errno != ENOTEMPTY && errno != EEXIST) return file_fault("create", final);
    if (renameat2(AT_FDCWD, temporary, AT_FDCWD, final, RENAME_EXCHANGE) == 0) {
        remove_checkpoint(temporary);
        return NULL;
    }
    if (rename(final, aside) != 0) return file_fault("replace", final);
    if (rename(temporary, final) != 0) {
        const char *wrong = file_fault("replace", final);
        rename(aside, final);
        return wrong;
    }
    remove_checkpoint(aside);
    return NULL;
}

void checkpoint_check_place(const char *dir) {
    if (base_rank() > 0) return;
    const char *wrong = folder_make(dir);
    CHECK(!wrong, "--save %s: %s", dir, wrong);
    char *trial = path_in(dir, ".trial");
    CHECK(mkdir(trial, 0777) == 0 || errno == EEXIST, "--save %s: %s", dir, file_fault("create", trial));
    rmdir(trial);
    free(trial);
}

void checkpoint_save(const char *dir, const Config *config, const Params *params,
                     const Optimizer *optimizer, Progress progress) {
    CHECK(!device_is_dry_run(), "a dry run computes no weights that --save could write");
    if (!progress.run) progress.run = checkpoint_identity(config, progress);
    if (params->world.rank > 0) {
        write_model(NULL, params, progress);
        if (optimizer) write_optimizer(NULL, config, params, optimizer, progress);
        comm_wait(comm_barrier(params->world));
        return;
    }
    char *final = format_text("%s/step-%06lld", dir, (long long)progress.step);
    // The leading dot keeps them from being taken for checkpoints. The names do not vary, so that what a
    // killed run left behind does not pile up.
    char *temporary = format_text("%s/.step-%06lld.tmp", dir, (long long)progress.step);
    char *aside = format_text("%s/.step-%06lld.old", dir, (long long)progress.step);
    checkpoint_check_owner(final, progress.run, config->resume != NULL);
    const char *wrong = folder_make(dir);
    if (!wrong) remove_checkpoint(temporary);
    if (!wrong && mkdir(temporary, 0777) != 0 && errno != EEXIST) wrong = file_fault("create", temporary);
    if (!wrong) wrong = write_model(temporary, params, progress);
    if (!wrong && optimizer) wrong = write_optimizer(temporary, config, params, optimizer, progress);
    if (!wrong) wrong = checkpoint_write_config(temporary, config, params->recipe.weight);
    if (!wrong) wrong = folder_flush(temporary);
    if (!wrong) wrong = put_in_place(temporary, final, aside);
    if (wrong) {
        remove_checkpoint(temporary);
        fatal("%s; the checkpoint of step %lld is not saved, older ones are as they were", wrong,
              (long long)progress.step);
    }
    wrong = folder_flush(dir);
    CHECK(!wrong, "%s; %s is complete, but may not outlast a power cut", wrong, final);

    free(final);
    free(temporary);
    free(aside);
    // Whoever reads it next finds it whole.
    if (params->world.size > 1) comm_wait(comm_barrier(params->world));
}

// ---- reading ----

// "(8, 128)". The caller frees it.
static char *shape_text(int dims, const int64_t *shape) {
    char *text = format_text("(");
    for (int i = 0; i < dims; i++) {
        char *longer = format_text("%s%s%lld", text, i ? ", " : "", (long long)shape[i]);
        free(text);
        text = longer;
    }
    char *whole = format_text("%s)", text);
    free(text);
    return whole;
}

// The whole tensor of this name, of a parameter's shape and converted. The caller frees it.
static void *load_tensor(const char *path, const SafeTensors *file, const char *name, const Param *param,
                         DType dtype) {
    const SafeTensor *from = safetensors_find(file, name);
    CHECK(from, "%s lacks the tensor %s", path, name);
    if (from->dims != param->dims ||
        memcmp(from->shape, param->full, from->dims * sizeof *from->shape) != 0)
        fatal("%s: %s has shape %s, the model's is %s", path, name, shape_text(from->dims, from->shape),
              shape_text(param->dims, param->full));
    CHECK(from->dtype == F64 || from->dtype == F32 || from->dtype == BF16 || from->dtype == F16,
          "%s: %s is stored as %s; weights are read from f64, f32, bf16 and f16", path, name,
          dtype_name(from->dtype));
    // A file's tensors begin at any byte; ours need their dtype's alignment.
    int64_t count = param->full[0] * param->full[1];
    void *aligned = host_alloc(from->bytes), *converted = host_alloc(count * dtype_size(dtype));
    memcpy(aligned, from->data, from->bytes);
    dtype_convert(converted, dtype, aligned, from->dtype, count);
    free(aligned);
    return converted;
}

static bool ends_with(const char *text, const char *end) {
    size_t length = strlen(text), tail = strlen(end);
    return length >= tail && !strcmp(text + length - tail, end);
}

// A tensor that is no weight of the model is a sign of another model, but for two that say nothing new.
static void check_surplus(const char *path, const WeightFiles *files, const SafeTensor *surplus) {
    // older files keep RoPE's frequencies, which rope_theta determines
    if (ends_with(surplus->name, ".rotary_emb.inv_freq")) return;
    CHECK(!strcmp(surplus->name, "lm_head.weight"), "%s holds %s, which this model has not", path,
          printable(surplus->name));
    // tied: the head is the embedding
    const char *name = "model.embed_tokens.weight";
    const SafeTensor *embedding = safetensors_find(&files->file[weights_find(files, name)], name);
    CHECK(surplus->dtype == embedding->dtype && surplus->bytes == embedding->bytes &&
              !memcmp(surplus->data, embedding->data, embedding->bytes),
          "%s: lm_head.weight differs from model.embed_tokens.weight, though config.json ties them", path);
}

void checkpoint_load_weights(const char *dir, Params *params) {
    WeightFiles files = weights_open(dir);
    for (int i = 0; i < params->count; i++) {
        const Param *param = &params->param[i];
        int which = weights_find(&files, param->name);
        CHECK(which >= 0, "%s lacks the tensor %s", files.name, param->name);
        void *whole =
            load_tensor(files.path[which], &files.file[which], param->name, param, params->recipe.weight);
        param_set_value(params, param, whole);
        free(whole);
    }
    for (int f = 0; f < files.count; f++)
        for (int i = 0; i < files.file[f].count; i++) {
            const SafeTensor *tensor = &files.file[f].tensor[i];
            if (!params_find(params, tensor->name)) check_surplus(files.path[f], &files, tensor);
        }
    weights_close(&files);
}

// Weights and state of two runs, or of two steps, are no checkpoint. Older files do not say whose they are.
static void check_same_run(const char *dir, const SafeTensors *optimizer) {
    WeightFiles weights = weights_open(dir);
    const char *run = safetensors_metadata(optimizer, "run"),
               *step = safetensors_metadata(optimizer, "step");
    const char *their_run = safetensors_metadata(&weights.file[0], "run"),
               *their_step = safetensors_metadata(&weights.file[0], "step");
    CHECK(!run == !their_run && (!run || !strcmp(run, their_run)),
          "%s: %s and %s are of two runs, and do not belong together", dir, model_name, optimizer_name);
    CHECK(!run || !their_step || !strcmp(step, their_step),
          "%s: %s is of step %s and %s of step %s: they do not belong together", dir, model_name,
          printable(their_step), optimizer_name, printable(step));
    weights_close(&weights);
}

static const int64_t MOST_COUNTED = (int64_t)1 << 53;

// The whole number that the metadata has for key.
static int64_t metadata_number(const char *path, const SafeTensors *file, const char *key) {
    const char *text = safetensors_metadata(file, key);
    CHECK(text, "%s does not say its %s: it is no optimizer state of this program", path, key);
    char *end;
    errno = 0;
    int64_t value = strtoll(text, &end, 10);
    CHECK(*text && !*end && !errno, "%s: %s is no whole number", path, key);
    // So much room above them that nothing which is counted on from here overflows.
    CHECK(value >= -MOST_COUNTED && value <= MOST_COUNTED, "%s: %s is %lld, and no run has more than 2^53",
          path, key, (long long)value);
    return value;
}

static void check_same_number(const char *path, const SafeTensors *file, const char *key, int64_t ours) {
    int64_t theirs = metadata_number(path, file, key);
    CHECK(theirs == ours, "%s is of a run with --%s %lld, and this one has %lld", path, key,
          (long long)theirs, (long long)ours);
}

static void check_same_text(const char *path, const SafeTensors *file, const char *key, const char *ours) {
    const char *theirs = safetensors_metadata(file, key);
    CHECK(theirs, "%s does not say its %s: it is no optimizer state of this program", path, key);
    CHECK(!strcmp(theirs, ours), "%s is of a run with --%s %s, and this one has %s", path, key,
          printable(theirs), ours);
}

// The caller closes the file and frees *path.
static SafeTensors open_optimizer(const char *dir, char **path) {
    *path = path_in(dir, optimizer_name);
    CHECK(access(*path, F_OK) == 0, "%s has no %s to resume from; --init takes its weights alone", dir,
          optimizer_name);
    return safetensors_open(*path);
}

// A sample's number is its place in the run, and a step takes the next `batch` of them.
static void check_same_batch(const char *path, const SafeTensors *file, const Config *c, int64_t ours) {
    int64_t theirs = metadata_number(path, file, "batch"), at_once = ours / c->grad_acc;
    if (theirs == ours || theirs == 0 || ours == 0) return;
    char *fits = theirs % at_once
                     ? format_text("--micro-batch x --grad-acc x --dp must make %lld", (long long)theirs)
                     : format_text("--grad-acc %lld would fit", (long long)(theirs / at_once));
    fatal("%s is of a run with %lld samples in a step, and this one has %lld: %s", path, (long long)theirs,
          (long long)ours, fits);
}

// ", other data, --lr 0.1, not 0.3"; "" if nothing changed. The caller frees it.
static char *changes_text(const SafeTensors *file, const Config *config, uint64_t our_data) {
    uint64_t data = strtoull(safetensors_metadata(file, "data"), NULL, 16);
    bool other_data = data && our_data && data != our_data;
    char *changes = format_text("%s", other_data ? ", other data" : "");
    int said = config->optimizer == OPTIMIZER_SGD ? COURSE - COURSE_OF_ADAMW : COURSE;
    for (int i = 0; i < said; i++) {
        const char *before = safetensors_metadata(file, course_names[i]);
        char *now = course_text(config, i);
        if (before && strcmp(before, now)) {
            char *longer =
                format_text("%s, --%s %s, not %s", changes, course_names[i], now, printable(before));
            free(changes);
            changes = longer;
        }
        free(now);
    }
    return changes;
}

void checkpoint_check_run(const char *dir, const Config *config, Progress ours) {
    char *path;
    SafeTensors file = open_optimizer(dir, &path);
    check_same_number(path, &file, "seed", config->seed);
    check_same_number(path, &file, "seq", config->seq);
    check_same_text(path, &file, "dtype", dtype_name((DType)config->dtype));
    check_same_text(path, &file, "optimizer", optimizer_names[config->optimizer]);
    check_same_run(dir, &file);
    int64_t step = metadata_number(path, &file, "step");
    CHECK(step < config->steps, "%s already has %lld steps: give --steps a larger number than that", dir,
          (long long)step);
    if (safetensors_metadata(&file, "data")) {
        check_same_batch(path, &file, config, ours.batch);
        char *changes = changes_text(&file, config, ours.data);
        if (*changes) say("goes on otherwise than the run that was saved would have: %s", changes + 2);
        free(changes);
    } else {
        say("%s is older than this program: it does not say its data, its batch or its rates, which are\n"
            "taken for this run's",
            dir);
    }
    safetensors_close(&file);
    free(path);
}

// Puts the whole tensor NAME.ENDING, converted, into the rank's own part of a flat tensor, or with {0} into
// the weight.
static void load_state(const char *path, const SafeTensors *file, Params *params, const Param *param,
                       const char *ending, StateTensor state) {
    char *name = format_text("%s.%s", param->name, ending);
    bool weight = !tensor_exists(state.flat);
    void *whole = load_tensor(path, file, name, param, optimizer_saved_dtype(params, state));
    if (weight) param_set_value(params, param, whole);
    else optimizer_scatter(params, param, state, whole);
    free(whole);
    free(name);
}

// A run that goes on by another recipe, or by none, would be another run. Returns the tensors read.
static int load_kept(const char *path, const SafeTensors *file, Params *params) {
    const SafeTensor *kept = safetensors_find(file, kept_name);
    int64_t theirs = kept ? kept->bytes / (int64_t)sizeof *params->kept : 0;
    CHECK(theirs == params->kept_count && (!kept || kept->dtype == F64),
          "%s is of a run whose recipe keeps %lld numbers from step to step, and this one keeps %d: resume "
          "it with the recipe's flags that it had",
          path, (long long)theirs, params->kept_count);
    if (kept) memcpy(params->kept, kept->data, (size_t)kept->bytes);
    return kept != NULL;
}

Progress checkpoint_load_optimizer(const char *dir, Params *params, Optimizer *optimizer) {
    char *path;
    SafeTensors file = open_optimizer(dir, &path);
    check_same_text(path, &file, "optimizer", optimizer_names[optimizer->kind]);
    check_same_run(dir, &file);
    const char *run = safetensors_metadata(&file, "run");
    char *first = format_text("%s.%s", params->param[0].name, state_names[STATE_MASTER]);
    bool masters = safetensors_find(&file, first) != NULL;
    free(first);
    Progress progress = {.step = metadata_number(path, &file, "step"),
                         .sample = metadata_number(path, &file, "sample"),
                         .run = run ? strtoull(run, NULL, 16) : 0};
    optimizer->step = metadata_number(path, &file, "optimizer_step");
    CHECK(progress.step >= 0 && progress.sample >= 0 && optimizer->step >= 0,
          "%s: step, sample and optimizer_step must not be negative", path);

    int expected = 0;
    // saved before there was any state
    bool untouched = optimizer->step == 0 && file.count == (safetensors_find(&file, kept_name) != NULL);
    if (!untouched) optimizer_allocate(optimizer, params);
    for (int i = 0; i < params->count && !untouched; i++)
        for (int j = 0; j < STATES; j++) {
            const Param *param = &params->param[i];
            StateTensor state = state_of(optimizer, param->unit, j);
            bool to_weight = j == STATE_MASTER && masters && !tensor_exists(state.flat);
            if (!tensor_exists(state.flat) && !to_weight) continue;
            load_state(path, &file, params, param, state_names[j], state);
            expected++;
        }
    expected += load_kept(path, &file, params);
    CHECK(file.count == expected, "%s holds %d tensors, and this model's optimizer has %d", path,
          file.count, expected);
    safetensors_close(&file);
    free(path);
    return progress;
}
