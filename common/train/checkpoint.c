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

const char *const checkpoint_optimizers[] = {"adamw", "sgd"};
const char *const checkpoint_states[STATES] = {"m", "v", "master"};

StateTensor checkpoint_state(const Optimizer *optimizer, int unit, int which) {
    const UnitState *state = &optimizer->unit[unit];
    return (StateTensor){(StateKind)which,
                         (const Tensor[STATES]){state->m, state->v, state->master}[which]};
}

// ---- files to be ----

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
    *tensor = (SafeTensor){.name = format_text("%s", KEPT_TENSOR), .dtype = F64, .dims = 1};
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
    Contents c = contents_new(params, STATES * params->count + 1, 11 + COURSE);
    contents_say_run(&c, progress);
    contents_say(&c, "sample", format_text("%lld", (long long)progress.sample));
    contents_say(&c, "optimizer_step", format_text("%lld", (long long)optimizer->step));
    contents_say(&c, "seed", format_text("%lld", (long long)config->seed));
    contents_say(&c, "seq", format_text("%lld", (long long)config->seq));
    contents_say(&c, "dtype", format_text("%s", dtype_name(params->recipe.weight)));
    contents_say(&c, "optimizer", format_text("%s", checkpoint_optimizers[optimizer->kind]));
    contents_say(&c, "batch", format_text("%lld", (long long)progress.batch));
    contents_say(&c, "data", format_text("%016llx", (unsigned long long)progress.data));
    contents_say(&c, "model", checkpoint_model(config));
    for (int i = 0; i < COURSE; i++) contents_say(&c, course_name(i), course_text(config, i));
    for (int i = 0; i < params->count; i++)
        for (int j = 0; j < STATES; j++) {
            const Param *param = &params->param[i];
            StateTensor state = checkpoint_state(optimizer, param->unit, j);
            if (tensor_exists(state.flat))
                contents_add(&c, format_text("%s.%s", param->name, checkpoint_states[j]), param, state);
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
    s.path[0] = format_text("%s/%s", s.temporary, MODEL_FILE);
    s.path[1] = format_text("%s/%s", s.temporary, OPTIMIZER_FILE);
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
