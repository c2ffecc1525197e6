// checkpoint_inside.h: what the files of checkpoints share: checkpoint.c (saving), checkpoint_load.c
// (reading), checkpoint_folder.c (folders on the disk), checkpoint_run.c (to which run they belong),
// checkpoint_config.c (config.json) and checkpoint_weights.c (the files of the weights).
#ifndef CHECKPOINT_INSIDE_H
#define CHECKPOINT_INSIDE_H

#include "checkpoint.h"
#include "safetensors.h"

// ---- checkpoint.c ----

#define MODEL_FILE     "model.safetensors"
#define OPTIMIZER_FILE "optimizer.safetensors"
#define KEPT_TENSOR    "recipe"  // what the recipe knows from step to step (params.h)
// The names of the optimizers, and the endings of the names of their tensors.
enum { STATES = 3 };
extern const char *const checkpoint_optimizers[], *const checkpoint_states[STATES];
// flat is {0} if this optimizer has no such state, or none yet.
StateTensor checkpoint_state(const Optimizer *optimizer, int unit, int which);

// ---- checkpoint_folder.c ----

bool folder_has(const char *folder, const char *name);  // fatal if that cannot be found out
// Both return NULL, or the sentence that says what failed. A new name survives a crash only once its parent
// folder has been flushed to the disk, on file systems that support this.
const char *folder_flush(const char *path);
const char *folder_make(const char *path);  // with all its parents; the new names are flushed
// Gives a finished checkpoint folder its name. An older one of that name is exchanged with it in one step
// and then removed or, if the file system cannot exchange, renamed to `aside` first. Returns NULL, or the
// sentence that says what failed.
const char *folder_put_in_place(const char *temporary, const char *final, const char *aside);
// Removes a checkpoint folder, but no file in it that does not belong to a checkpoint.
void folder_remove_checkpoint(const char *folder);
// Fatal if this folder, which need not exist, holds a checkpoint of another run, or files that do not belong
// to a checkpoint, or if what has its name cannot be looked into. older_fits: accept one that names no run.
void checkpoint_check_owner(const char *folder, uint64_t run, bool older_fits);

// ---- checkpoint_run.c ----

// What config.json says of the model and no shape of a weight shows: metadata of optimizer.safetensors. The
// caller frees it.
char *checkpoint_model(const Config *config);
// The identity of a run, by which its checkpoints are recognized: a hash of what determines its course
// (checkpoint_run.c). Never 0.
uint64_t checkpoint_identity(const Config *config, Progress progress);
// What determines a run's course, by the names of flags: metadata of optimizer.safetensors. The text is as
// one would type it, with the fewest digits that read back as the same number; the caller frees it.
enum { COURSE = 21 };
const char *course_name(int which);
char *course_text(const Config *config, int which);
// ", other data, --lr 0.1, not 0.3": how this run differs from the one that wrote the file; "" if it does
// not. The caller frees it.
char *course_changes(const SafeTensors *file, const Config *config, uint64_t our_data);

// ---- checkpoint_config.c ----

// The fewest digits that read back as the same number. The caller frees it.
char *number_text(double x);
// Writes DIR/config.json for weights of this dtype, and flushes it to the disk. Returns NULL, or the
// sentence that says what failed (static buffer).
const char *checkpoint_write_config(const char *dir, const Config *config, DType dtype);

// ---- checkpoint_weights.c: a folder's weights, in one file or in several ----

typedef struct WeightFiles {
    char *name;  // path of model.safetensors, or of the index of its parts
    SafeTensors *file;
    char **path;
    int count;
} WeightFiles;

// Fatal if there are none, if an index and its parts disagree, or if a tensor is in two parts. The caller
// ends it with weights_close.
WeightFiles weights_open(const char *dir);
int weights_find(const WeightFiles *weights, const char *name);  // index of the file that has it; -1: none
// Fatal if a tensor is not a weight of this model. Two redundant ones are allowed: RoPE's frequencies, and
// a tied head that is a copy of the embedding.
void weights_check_surplus(const WeightFiles *weights, const Params *params);
void weights_close(WeightFiles *weights);

#endif
