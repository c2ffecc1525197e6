// checkpoint_load.c: checkpoint folders, read: the weights, into any model of their shape, and the
// optimizer's state, into a run that goes on. Each rank reads its own ranges of the files.
#include "checkpoint_inside.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "files.h"

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
    const char *path;
    bool squares;  // AdamW's v, whose root is taken
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
    return (Source){from, to, path, false};
}

// Whoever trains on a NaN or an infinity learns of it only from the loss, which does not say where it began.
static void check_finite(const char *path, const SafeTensor *from, DType as, bool squares,
                         const double *values, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        CHECK(isfinite(values[i]), "%s: element %lld of %s is %g in %s, and must be finite", path,
              (long long)(first + i), from->name, values[i], dtype_name(as));
        CHECK(!squares || values[i] >= 0,
              "%s: element %lld of %s is %g, and a mean of squares is not negative", path,
              (long long)(first + i), from->name, values[i]);
    }
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
        // As it was stored, or as it is used: f16 ends at 65504.
        dtype_convert(aligned, F64, (char *)bytes + done * wide, s->to, piece);
        check_finite(s->path, s->from, s->to, s->squares, aligned, first + done, piece);
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
          "%s: %s and %s are of two runs, and do not belong together", dir, MODEL_FILE, OPTIMIZER_FILE);
    CHECK(!run || step, "%s: %s says its run, and does not say its step", dir, OPTIMIZER_FILE);
    CHECK(!run || !their_step || !strcmp(step, their_step),
          "%s: %s is of step %s and %s of step %s: they do not belong together", dir, MODEL_FILE,
          printable(their_step), OPTIMIZER_FILE, printable(step));
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
    *path = format_text("%s/%s", dir, OPTIMIZER_FILE);
    CHECK(folder_has(dir, OPTIMIZER_FILE), "%s has no %s to resume from; --init takes only its weights",
          dir, OPTIMIZER_FILE);
    return safetensors_open(*path);
}

// A sample's number is its place in the run, and a step takes the next `batch` of them.
static void check_same_batch(const char *path, const SafeTensors *file, const Config *c, int64_t ours) {
    int64_t theirs = metadata_number(path, file, "batch"), at_once = ours / c->grad_acc;
    CHECK(theirs >= 0, "%s says that its batch was %lld samples", path, (long long)theirs);
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
    check_same_text(path, &file, "optimizer", checkpoint_optimizers[config->optimizer]);
    check_same_run(dir, &file);
    const char *model = safetensors_metadata(&file, "model");
    char *ours_is = checkpoint_model(config);
    CHECK(!model || !strcmp(model, ours_is),
          "%s/config.json is not that of the run that was saved: it says \"%s\", and %s \"%s\"", dir,
          ours_is, OPTIMIZER_FILE, printable(model));
    free(ours_is);
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
    source.squares = state.kind == STATE_V;
    if (tensor_exists(state.flat)) optimizer_read(params, param, state, take_elements, &source);
    else param_read_value(params, param, take_elements, &source);
    free(name);
}

// Continued with another recipe, or with none, it would be another run. Returns the number of tensors read.
static int load_kept(const char *path, const SafeTensors *file, Params *params) {
    const SafeTensor *kept = safetensors_find(file, KEPT_TENSOR);
    int64_t theirs = kept ? kept->bytes / (int64_t)sizeof *params->kept : 0;
    CHECK(theirs == params->kept_count && (!kept || kept->dtype == F64),
          "%s is of a run whose recipe keeps %lld numbers from step to step, and this one keeps %d: resume "
          "it with the recipe's flags that it had",
          path, (long long)theirs, params->kept_count);
    if (kept) memcpy(params->kept, kept->data, (size_t)kept->bytes);
    if (kept) check_finite(path, kept, F64, false, params->kept, 0, theirs);
    return kept != NULL;
}

Progress checkpoint_load_optimizer(const char *dir, Params *params, Optimizer *optimizer) {
    char *path;
    SafeTensors file = open_optimizer(dir, &path);
    check_same_text(path, &file, "optimizer", checkpoint_optimizers[optimizer->kind]);
    check_same_run(dir, &file);
    const char *run = safetensors_metadata(&file, "run");
    char *first = format_text("%s.%s", params->param[0].name, checkpoint_states[STATE_MASTER]);
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
    bool untouched = optimizer->step == 0 && file.count == (safetensors_find(&file, KEPT_TENSOR) != NULL);
    if (!untouched) optimizer_allocate(optimizer, params);
    for (int i = 0; i < params->count && !untouched; i++)
        for (int j = 0; j < STATES; j++) {
            const Param *param = &params->param[i];
            StateTensor state = checkpoint_state(optimizer, param->unit, j);
            bool to_weight = j == STATE_MASTER && masters && !tensor_exists(state.flat);
            if (!tensor_exists(state.flat) && !to_weight) continue;
            CHECK(j != STATE_MASTER || masters,
                  "%s has no master weights, and this run steps them: resume it with the recipe's flags that "
                  "it had",
                  path);
            load_state(path, &file, params, param, checkpoint_states[j], state);
            expected++;
        }
    expected += load_kept(path, &file, params);
    CHECK(file.count == expected, "%s: the number of tensors is %d, and of this model's optimizer %d", path,
          file.count, expected);
    safetensors_close(&file);
    free(path);
    return progress;
}
