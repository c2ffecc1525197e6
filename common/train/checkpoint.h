// checkpoint.h: safetensors files with Hugging Face names, and the folders made of them.
//
// A checkpoint folder has config.json and model.safetensors (transformers loads them as LlamaForCausalLM)
// and, if training wrote it, optimizer.safetensors: m, v and master of each weight under "<name>.m" and so
// on, and in __metadata__ the progress of the run and the options that determine its course. No file
// depends on a layout of ranks: tensors are whole, without padding, so that any ranks can read their parts
// of what any others have written.
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include "config.h"
#include "optim.h"
#include "params.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- one safetensors file, on memory ----
typedef struct SafeTensor {
    char *name;
    DType dtype;
    int dims;
    int64_t shape[MAX_DIMS];
    const uint8_t *data;  // into the file's bytes
    int64_t bytes;
} SafeTensor;

typedef struct SafeTensors {
    SafeTensor *tensor;
    int count;
    char **key, **value;  // __metadata__
    int keys;
    const uint8_t *file;  // the whole file if safetensors_open mapped it, else NULL
    size_t size;
} SafeTensors;

// Parses a file's bytes, which must outlive the result; the caller ends it with safetensors_close. Returns
// NULL, or the sentence that says what is wrong (static buffer): a header length beyond the file or absurd,
// a header that is no JSON object, an unknown dtype, a negative or overflowing shape, offsets that are out
// of range, overlap or leave holes, a size other than shape times dtype, a name used twice.
const char *safetensors_parse(const uint8_t *bytes, size_t size, SafeTensors *result);
// Maps and parses a file; of its tensors only the pages that are touched are read. Any fault is fatal.
SafeTensors safetensors_open(const char *path);
const SafeTensor *safetensors_find(const SafeTensors *file, const char *name);
const char *safetensors_metadata(const SafeTensors *file, const char *key);  // NULL if absent
void safetensors_close(SafeTensors *file);
// The first of `count` names that occurs twice, or NULL.
const char *name_twice(char *const *names, int count);

// A file is written by all ranks at once, each writing its own ranges. All describe it in the same way: its
// tensors (name, dtype and shape; `data` and `bytes` are ignored) and metadata. Both functions return NULL,
// or the sentence that says what failed (static buffer), and then the file's content is worthless.
//
// First, one rank creates the file at its full size, so that a disk without enough room is detected here.
const char *safetensors_create(const char *path, const SafeTensors *contents);
// Then, on every rank, `give` is called for each tensor to put this rank's ranges, which are flushed to disk.
typedef struct SafeWriter SafeWriter;
typedef void (*SafeTensorsGive)(void *context, int tensor, SafeWriter *to);
const char *safetensors_fill(const char *path, const SafeTensors *contents, SafeTensorsGive give,
                             void *context);
// To be called in `give`: writes bytes `first` to `first + size - 1` of its tensor.
void safetensors_put(SafeWriter *to, int64_t first, const void *bytes, int64_t size);

// Flushes a file that was written to the disk and closes it. Returns NULL, or the sentence that says what
// failed now or in an earlier write (static buffer).
const char *file_close_flushed(FILE *file, const char *path);
// "cannot VERB PATH: " and the text of errno. Static buffer.
const char *file_fault(const char *verb, const char *path);
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

// ---- a folder's weights, in one file or in several ----
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
// Called by all ranks: fatal if they find different files. It reads a page of each tensor, not all of them: a
// rank may need only a small part of large files, and those of two trainings differ everywhere.
void weights_check_same(const WeightFiles *weights, Group world);
void weights_close(WeightFiles *weights);

// ---- folders ----
typedef struct Progress {  // of a run
    int64_t step;          // optimizer steps taken
    int64_t sample;        // global index of the next training sample
    int64_t batch;         // samples in a step, over all ranks; 0: not known
    uint64_t data;         // data_print of what it trains on; 0: not known
    uint64_t run;          // identity of the run, from its files if it is resumed; 0: a new one
} Progress;

// Collective over all ranks, each of which writes what it stores; all must see DIR. Makes DIR/step-000123
// whole or not at all: writes a temporary folder beside it, in which each file has its full size from the
// start and is flushed to the disk by all, then renames it; a folder of that name is replaced. A fault on
// any rank (such as a full disk) is fatal, removes the temporary folder, and leaves older checkpoints as
// they were. optimizer may be NULL: only the weights.
void checkpoint_save(const char *dir, const Config *config, const Params *params,
                     const Optimizer *optimizer, Progress progress);
// Called by all ranks at the start of a run that will save: makes DIR, and keeps other runs from saving
// there until this one ends. Fatal, naming --save, if no checkpoint can be made in it, if another run is
// saving there, or if a rank on another host does not see its contents.
void checkpoint_check_place(const char *dir);
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
// Before the first step of a run that saves: fatal if DIR holds a checkpoint of another run, or a step-*
// folder with files that do not belong to a checkpoint.
void checkpoint_check_place_is_ours(const char *dir, const Config *config, Progress progress);
// The same for one folder, which need not exist. older_fits: accept one that names no run.
void checkpoint_check_owner(const char *folder, uint64_t run, bool older_fits);
// The newest step-* folder in dir, or dir itself if that is a checkpoint; else fatal. The caller frees it.
char *checkpoint_newest(const char *dir);
// The same, called by all ranks together; fatal unless all find the same.
char *checkpoint_newest_of_all(const char *dir);
// Reads the model's shape from DIR/config.json into *config (layers, hidden, … tied, rope, norm_eps), and
// leaves the rest of *config, such as seq and dtype, alone. Anything that is not a Llama that this program
// can train is fatal, naming the key. What else the folder contains (max positions, token ids,
// generation_config.json) is remembered, and goes into each folder that is saved from then on.
void checkpoint_config(const char *dir, Config *config);
// The fewest digits that read back as the same number. The caller frees it.
char *number_text(double x);
// Writes DIR/config.json for weights of this dtype, and flushes it to the disk. Returns NULL, or the
// sentence that says what failed (static buffer).
const char *checkpoint_write_config(const char *dir, const Config *config, DType dtype);
// Reads this rank's part of each weight from DIR/model.safetensors or its parts, in F64, F32, BF16 or F16,
// converted to the table's dtype. Fatal on missing, unknown or wrongly shaped tensors. The file of a tied
// model may leave out lm_head.weight; a copy of the embedding under that name is accepted, other values are
// not.
void checkpoint_load_weights(const char *dir, Params *params);
// Checks that the saved run can go on as this one, which has made no step and has ours.batch and ours.data.
// Fatal if its coming steps would mean something else: no optimizer state; another optimizer, seed, seq,
// dtype or number of samples in a step; or all steps already taken. Says in one line what else differs
// (data, rates, the schedule of the rate), and what an older file does not record.
void checkpoint_check_run(const char *dir, const Config *config, Progress ours);
// Allocates and reads the optimizer state, and returns the run's progress. Fatal if the file does not
// belong to this table or optimizer. A state in another dtype is converted; if the file has master weights
// and this run has none, they become the weights.
Progress checkpoint_load_optimizer(const char *dir, Params *params, Optimizer *optimizer);

#ifdef __cplusplus
}
#endif
#endif
