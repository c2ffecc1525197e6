// checkpoint.c: checkpoint folders, written whole or not at all.
//
//     DIR/step-000123/config.json               the model's shape, as transformers reads it
//                     model.safetensors         the weights under Hugging Face's names
//                     optimizer.safetensors     NAME.m, NAME.v, NAME.master; metadata: the run's progress
// A run may die at any moment, and the disk may be full. So a checkpoint is written to
// DIR/.step-000123.tmp; all its files are on the disk before one rename makes it real: flush the files,
// flush the folder, rename, flush the parent. A reader of DIR sees the old state or the new one. No rank
// ever holds more of a weight than it trains with: each writes, and reads, its own ranges of the files.
#include "checkpoint_inside.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "comm/comm.h"
#include "files.h"

static const char *const model_name = "model.safetensors";
static const char *const optimizer_name = "optimizer.safetensors";

static const char *const optimizer_names[] = {"adamw", "sgd"};

// ---- files to be ----

// Tensors of the optimizer, by the ending of their names.
enum { STATES = 3 };
static const char *const state_names[STATES] = {"m", "v", "master"};
static const char *const kept_name = "recipe";  // what the recipe knows from step to step (params.h)

// flat is {0} if this optimizer has no such state, or none yet.
static StateTensor state_of(const Optimizer *optimizer, int unit, int which) {
    const UnitState *state = &optimizer->unit[unit];
    return (StateTensor){(StateKind)which,
                         (const Tensor[STATES]){state->m, state->v, state->master}[which]};
}

// A safetensors file of whole tensors, about to be written: the same on all ranks.
typedef struct Contents {
    SafeTensors file;
    const Params *params;
    const Param **param;  // of each tensor; NULL: what the recipe remembers
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

typedef struct Place {  // of a tensor that is written
    SafeWriter *to;
    int64_t size;  // of an element
} Place;

static void put_elements(void *context, int64_t first, int64_t count, void *bytes) {
    const Place *p = context;
    safetensors_put(p->to, first * p->size, bytes, count * p->size);
}

// What this rank writes of a tensor.
static void give(void *context, int tensor, SafeWriter *to) {
    const Contents *c = context;
    const Params *params = c->params;
    const Param *param = c->param[tensor];
    Place place = {to, (int64_t)dtype_size(c->file.tensor[tensor].dtype)};
    int64_t from;
    if (param && tensor_exists(c->state[tensor].flat)) {
        optimizer_write(params, param, c->state[tensor], put_elements, &place);
    } else if (param) {
        Tensor part = param_own_value(params, param, &from);
        param_write_part(params, param, part, from, put_elements, &place);
    } else if (params->world.rank == 0) {
        safetensors_put(to, 0, params->kept, params->kept_count * place.size);
    }
}

static void contents_free(Contents *c) {
    safetensors_close(&c->file);
    free(c->param);
    free(c->state);
}

// Notes the run that a file belongs to, so that it is not taken for another's.
static void contents_say_run(Contents *c, Progress progress) {
    contents_say(c, "run", format_text("%016llx", (unsigned long long)progress.run));
    contents_say(c, "step", format_text("%lld", (long long)progress.step));
}

static Contents model_contents(const Params *params, Progress progress) {
    Contents c = contents_new(params, params->count, 3);
    contents_say(&c, "format", format_text("pt"));  // transformers refuses a file that does not say so
    contents_say_run(&c, progress);
    for (int i = 0; i < params->count; i++)
        contents_add(&c, format_text("%s", params->param[i].name), &params->param[i], (StateTensor){0});
    return c;
}

static Contents optimizer_contents(const Config *config, const Params *params, const Optimizer *optimizer,
                                   Progress progress) {
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
    for (int i = 0; i < COURSE; i++) contents_say(&c, course_name(i), course_text(config, i));
    for (int i = 0; i < params->count; i++)
        for (int j = 0; j < STATES; j++) {
            const Param *param = &params->param[i];
            StateTensor state = state_of(optimizer, param->unit, j);
            if (tensor_exists(state.flat))
                contents_add(&c, format_text("%s.%s", param->name, state_names[j]), param, state);
        }
    contents_add_kept(&c);
    return c;
}

// ---- folders to be ----

typedef struct Saving {
    const Params *params;
    Contents contents[2];
    char *path[2];  // of these files
    int files;
    char *final, *temporary, *aside;
    int64_t step;
} Saving;

static Saving saving_begin(const char *dir, const Config *config, const Params *params,
                           const Optimizer *optimizer, Progress progress) {
    Saving s = {.params = params, .step = progress.step, .files = optimizer ? 2 : 1};
    s.final = format_text("%s/step-%06lld", dir, (long long)s.step);
    // The leading dot keeps them from being taken for checkpoints. The names do not vary, so that what a
    // killed run left behind does not pile up.
    s.temporary = format_text("%s/.step-%06lld.tmp", dir, (long long)s.step);
    s.aside = format_text("%s/.step-%06lld.old", dir, (long long)s.step);
    s.contents[0] = model_contents(params, progress);
    if (optimizer) s.contents[1] = optimizer_contents(config, params, optimizer, progress);
    s.path[0] = format_text("%s/%s", s.temporary, model_name);
    s.path[1] = format_text("%s/%s", s.temporary, optimizer_name);
    return s;
}

static void saving_end(Saving *s) {
    for (int i = 0; i < s->files; i++) contents_free(&s->contents[i]);
    for (int i = 0; i < 2; i++) free(s->path[i]);
    free(s->final);
    free(s->temporary);
    free(s->aside);
}

// The first rank that has failed, or the number of all. By two calls that training does not use.
static int first_to_fail(Group world, bool failed) {
    double first = failed ? -world.rank : -world.size;
    Memory before = memory_account();
    Tensor t = tensor_new(MEMORY_COMMUNICATION, F64, SHAPE(1));
    tensor_from_doubles(t, &first);
    comm_wait(comm_reduce(t, REDUCE_MAX, 0, world));
    comm_wait(comm_broadcast(t, 0, world));
    tensor_to_doubles(&first, t);
    tensor_free(&t);
    memory_restore_peak(&before);
    return (int)-first;
}

// All ranks meet here: fatal if one of them has failed, with the sentence of the first that has.
static void all_are_well(const Saving *s, const char *wrong) {
    Group world = s->params->world;
    int first = first_to_fail(world, wrong != NULL);
    if (first == world.size) return;
    if (world.rank == 0) folder_remove_checkpoint(s->temporary);
    comm_wait(comm_barrier(world));
    if (first != world.rank) comm_wait(comm_barrier(world));  // which the fault ends
    fatal("%s; the checkpoint of step %lld is not saved, older ones are as they were", wrong,
          (long long)s->step);
}

// Makes the files, with room for their tensors but without the contents.
static const char *make_files(const char *dir, const Config *config, const Saving *s) {
    const char *wrong = folder_make(dir);
    if (wrong) return wrong;
    folder_remove_checkpoint(s->temporary);
    if (mkdir(s->temporary, 0777) != 0 && errno != EEXIST) return file_fault("create", s->temporary);
    for (int i = 0; i < s->files && !wrong; i++)
        wrong = safetensors_create(s->path[i], &s->contents[i].file);
    return wrong ? wrong : checkpoint_write_config(s->temporary, config, s->params->recipe.weight);
}

// This rank's part of all files.
static const char *fill_files(Saving *s) {
    const char *wrong = NULL;
    for (int i = 0; i < s->files && !wrong; i++)
        wrong = safetensors_fill(s->path[i], &s->contents[i].file, give, &s->contents[i]);
    return wrong;
}

void checkpoint_save(const char *dir, const Config *config, const Params *params,
                     const Optimizer *optimizer, Progress progress) {
    CHECK(!device_is_dry_run(), "a dry run computes no weights that --save could write");
    if (!progress.run) progress.run = checkpoint_identity(config, progress);
    Saving s = saving_begin(dir, config, params, optimizer, progress);
    bool first = params->world.rank == 0;
    if (first) checkpoint_check_owner(s.final, progress.run, config->resume != NULL);
    all_are_well(&s, first ? make_files(dir, config, &s) : NULL);
    all_are_well(&s, fill_files(&s));
    const char *wrong = NULL;
    if (first) wrong = folder_flush(s.temporary);
    if (first && !wrong) wrong = folder_put_in_place(s.temporary, s.final, s.aside);
    all_are_well(&s, wrong);  // and whoever reads it next finds it whole
    wrong = first ? folder_flush(dir) : NULL;
    CHECK(!wrong, "%s; %s is complete, but may not outlast a power cut", wrong, s.final);
    saving_end(&s);
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

typedef struct Source {  // of a parameter's elements
    const SafeTensor *from;
    DType to;
} Source;

static Source source_of(const char *path, const SafeTensors *file, const char *name, const Param *param,
                        DType to) {
    const SafeTensor *from = safetensors_find(file, name);
    CHECK(from, "%s lacks the tensor %s", path, name);
    if (from->dims != param->dims ||
        memcmp(from->shape, param->full, from->dims * sizeof *from->shape) != 0)
        fatal("%s: %s has shape %s, the model's is %s", path, name, shape_text(from->dims, from->shape),
              shape_text(param->dims, param->full));
    CHECK(from->dtype == F64 || from->dtype == F32 || from->dtype == BF16 || from->dtype == F16,
          "%s: %s is stored as %s; weights are read from f64, f32, bf16 and f16", path, name,
          dtype_name(from->dtype));
    return (Source){from, to};
}

// A file's tensors begin at any byte; what is converted needs its dtype's alignment.
static void take_elements(void *context, int64_t first, int64_t count, void *bytes) {
    enum { PIECE = 4096 };
    double aligned[PIECE];
    const Source *s = context;
    int64_t size = (int64_t)dtype_size(s->from->dtype), wide = (int64_t)dtype_size(s->to);
    for (int64_t done = 0, piece; done < count; done += piece) {
        piece = count - done < PIECE ? count - done : PIECE;
        memcpy(aligned, s->from->data + (first + done) * size, (size_t)(piece * size));
        dtype_convert((char *)bytes + done * wide, s->to, aligned, s->from->dtype, piece);
    }
}

void checkpoint_load_weights(const char *dir, Params *params) {
    WeightFiles files = weights_open(dir);
    for (int i = 0; i < params->count; i++) {
        const Param *param = &params->param[i];
        int which = weights_find(&files, param->name);
        CHECK(which >= 0, "%s lacks the tensor %s", files.name, param->name);
        Source source =
            source_of(files.path[which], &files.file[which], param->name, param, params->recipe.weight);
        param_read_value(params, param, take_elements, &source);
    }
    weights_check_surplus(&files, params);
    weights_close(&files);
}

// Weights and state must be of the same run and step. Older files do not name their run.
static void check_same_run(const char *dir, const SafeTensors *optimizer) {
    WeightFiles weights = weights_open(dir);
    const char *run = safetensors_metadata(optimizer, "run"),
               *step = safetensors_metadata(optimizer, "step");
    const char *their_run = safetensors_metadata(&weights.file[0], "run"),
               *their_step = safetensors_metadata(&weights.file[0], "step");
    CHECK(!run == !their_run && (!run || !strcmp(run, their_run)),
          "%s: %s and %s are of two runs, and do not belong together", dir, model_name, optimizer_name);
    CHECK(!run || step, "%s: %s says its run, and does not say its step", dir, optimizer_name);
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
    CHECK(theirs == ours, "%s is of a run with --%s %lld, and this one has %lld: --%s %lld would fit", path,
          key, (long long)theirs, (long long)ours, key, (long long)theirs);
}

static void check_same_text(const char *path, const SafeTensors *file, const char *key, const char *ours) {
    const char *theirs = safetensors_metadata(file, key);
    CHECK(theirs, "%s does not say its %s: it is no optimizer state of this program", path, key);
    const char *shown = printable(theirs);
    CHECK(!strcmp(theirs, ours), "%s is of a run with --%s %s, and this one has %s: --%s %s would fit",
          path, key, shown, ours, key, shown);
}

// The caller closes the file and frees *path.
static SafeTensors open_optimizer(const char *dir, char **path) {
    *path = format_text("%s/%s", dir, optimizer_name);
    CHECK(folder_has(dir, optimizer_name), "%s has no %s to resume from; --init takes only its weights",
          dir, optimizer_name);
    return safetensors_open(*path);
}

// A sample's number is its place in the run, and a step takes the next `batch` of them.
static void check_same_batch(const char *path, const SafeTensors *file, const Config *c, int64_t ours) {
    int64_t theirs = metadata_number(path, file, "batch"), at_once = ours / c->grad_acc;
    if (theirs == ours || theirs == 0 || ours == 0) return;
    char *fits = theirs % at_once
                     ? format_text("--micro-batch x --grad-acc x --dp must make %lld", (long long)theirs)
                     : format_text("--grad-acc %lld would fit", (long long)(theirs / at_once));
    fatal("%s is of a run with %lld sample%s in a step, and this one has %lld: %s", path, (long long)theirs,
          plural(theirs), (long long)ours, fits);
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
    CHECK(step < config->steps, "%s already has %lld step%s: give --steps a larger number than that", dir,
          (long long)step, plural(step));
    if (safetensors_metadata(&file, "data")) {
        check_same_batch(path, &file, config, ours.batch);
        char *changes = course_changes(&file, config, ours.data);
        if (*changes) say("continues differently from the run that was saved: %s", changes + 2);
        free(changes);
    } else {
        say("%s is older than this program: it does not say its data, its batch or its rates, which are\n"
            "taken for this run's",
            dir);
    }
    safetensors_close(&file);
    free(path);
}

// Reads this rank's own part of the tensor NAME.ENDING, converted, into a flat tensor, or with {0} into the
// weight.
static void load_state(const char *path, const SafeTensors *file, Params *params, const Param *param,
                       const char *ending, StateTensor state) {
    char *name = format_text("%s.%s", param->name, ending);
    Source source = source_of(path, file, name, param, optimizer_saved_dtype(params, state));
    if (tensor_exists(state.flat)) optimizer_read(params, param, state, take_elements, &source);
    else param_read_value(params, param, take_elements, &source);
    free(name);
}

// Continued with another recipe, or with none, it would be another run. Returns the number of tensors read.
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
