// checkpoint.h: safetensors files with Hugging Face names, and the folders made of them.
//
// A checkpoint folder has config.json and model.safetensors (transformers loads them as LlamaForCausalLM),
// and, when training wrote it, optimizer.safetensors: m, v and master of each weight under "<name>.m" …,
// and in __metadata__ where the run stands and what made it what it was. No file knows a layout: tensors
// are whole, without padding, so that any ranks take their parts of what any others have written.
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
    const uint8_t *file;  // the whole file where safetensors_open mapped it, else NULL
    size_t size;
} SafeTensors;

// Parses a file's bytes, which must outlive the result. Returns NULL, or the sentence that says what is
// wrong (static buffer): header length beyond the file or absurd, header no JSON object, unknown dtype,
// negative or overflowing shape, offsets out of range, overlapping or leaving holes, sizes that differ
// from shape times dtype, a name twice.
const char *safetensors_parse(const uint8_t *bytes, size_t size, SafeTensors *result);
// Maps and parses a file, of whose tensors only what is touched is read; fatal with its name on any fault.
SafeTensors safetensors_open(const char *path);
const SafeTensor *safetensors_find(const SafeTensors *file, const char *name);
const char *safetensors_metadata(const SafeTensors *file, const char *key);  // NULL if absent
void safetensors_close(SafeTensors *file);
// The first of `count` names that stands there twice, or NULL.
const char *name_twice(char *const *names, int count);

// A file is written by all ranks at once, each its own ranges. They describe it alike: tensors (name, dtype
// and shape; `data` and `bytes` are not looked at) and metadata. Both functions return NULL, or the
// sentence that says what failed (static buffer); what is in the file then is worth nothing.
//
// First one of them makes it, at its full size, so that a disk without room for it is found out here.
const char *safetensors_create(const char *path, const SafeTensors *contents);
// Then each is asked in turn for what it gives of each tensor, and flushes that to the disk.
typedef struct SafeWriter SafeWriter;
typedef void (*SafeTensorsGive)(void *context, int tensor, SafeWriter *to);
const char *safetensors_fill(const char *path, const SafeTensors *contents, SafeTensorsGive give,
                             void *context);
// Gives bytes `first` to `first + size - 1` of the tensor that is asked for.
void safetensors_put(SafeWriter *to, int64_t first, const void *bytes, int64_t size);

// Closes a file that was written, after flushing it to the disk. Returns NULL, or the sentence that says
// what failed now or in a write before (static buffer).
const char *file_close_flushed(FILE *file, const char *path);
// "cannot VERB PATH: " and what errno says. Static buffer.
const char *file_fault(const char *verb, const char *path);
// Both return NULL, or the sentence that says what failed. A new name lasts when the folder that holds it
// is on the disk, where the file system has such a thing.
const char *folder_flush(const char *path);
const char *folder_make(const char *path);  // and every folder on the way to it; the new names last
// Gives a finished checkpoint folder its name. One that has it already changes places with it in one step,
// or, where the file system cannot do that, steps aside first.
const char *folder_put_in_place(const char *temporary, const char *final, const char *aside);
// Removes a checkpoint folder, but nothing in it that is not a checkpoint's.
void folder_remove_checkpoint(const char *folder);

// ---- a folder's weights, in one file or in several ----
typedef struct WeightFiles {
    char *name;  // model.safetensors, or the index of its parts
    SafeTensors *file;
    char **path;
    int count;
} WeightFiles;

// Fatal where there are none, an index and its parts disagree, or a tensor stands in two parts.
WeightFiles weights_open(const char *dir);
int weights_find(const WeightFiles *weights, const char *name);  // the file that has it; -1: none
// Fatal where a tensor is no weight of this model, but for two that say nothing new: RoPE's frequencies,
// and a tied head that is a copy of the embedding.
void weights_check_surplus(const WeightFiles *weights, const Params *params);
void weights_close(WeightFiles *weights);

// ---- folders ----
typedef struct Progress {  // where a run stands
    int64_t step;          // optimizer steps taken
    int64_t sample;        // global index of the next training sample
    int64_t batch;         // samples of a step, of all ranks; 0: not known
    uint64_t data;         // data_print of what it trains on; 0: not known
    uint64_t run;          // whose it is: of a run that goes on, what its files say; 0: a new one
} Progress;

// Collective over all ranks, each of which writes what it stores: DIR lies where all of them see it. Makes
// DIR/step-000123 whole or not at all: in a temporary folder beside it, each file at its full size from the
// start and flushed to the disk by all, then renamed; a folder of that name is replaced. On any fault (a
// full disk) of any rank it is fatal, removes the temporary folder, and leaves older checkpoints alone.
// optimizer may be NULL: weights alone.
void checkpoint_save(const char *dir, const Config *config, const Params *params,
                     const Optimizer *optimizer, Progress progress);
// At the start of a run that will save, on all ranks: makes DIR, and keeps other runs from saving there
// until this one ends. Fatal, naming --save, where no checkpoint can be made in it, another run is saving
// there, or a rank on another host does not see what is.
void checkpoint_check_place(const char *dir);
// Whose a run's checkpoints are, from what makes its course (checkpoint_run.c). Never 0.
uint64_t checkpoint_identity(const Config *config, Progress progress);
// What makes its course, by the names of flags: metadata of optimizer.safetensors. The text is as one would
// type it, in the fewest digits that read back as the same number; the caller frees it.
enum { COURSE = 21 };
const char *course_name(int which);
char *course_text(const Config *config, int which);
// ", other data, --lr 0.1, not 0.3": how this run goes on otherwise than the one that wrote the file; "" if
// nothing changed. The caller frees it.
char *course_changes(const SafeTensors *file, const Config *config, uint64_t our_data);
// Before the first step of a run that saves: fatal where DIR holds a checkpoint of another run, or a
// step-* folder with files that are no checkpoint's.
void checkpoint_check_place_is_ours(const char *dir, const Config *config, Progress progress);
// The same of one folder, which need not be there. older_fits: one that names no run passes.
void checkpoint_check_owner(const char *folder, uint64_t run, bool older_fits);
// The newest step-* folder in dir, or dir itself if it is a checkpoint; fatal if
// neither. The caller frees it.
char *checkpoint_newest(const char *dir);
// The same, by all ranks at once; fatal unless they find the same.
char *checkpoint_newest_of_all(const char *dir);
// Reads the model's shape from DIR/config.json into *config (layers, hidden, … tied, rope, norm_eps),
// and leaves the rest of *config, seq and dtype among it, alone; fatal, naming the key, on anything that
// is not a Llama this program can train. What else the folder says (max positions, token ids,
// generation_config.json) is kept, and goes into each folder that is saved from then on.
void checkpoint_config(const char *dir, Config *config);
// The fewest digits that read back as the same number. The caller frees it.
char *number_text(double x);
// Writes DIR/config.json for weights of this dtype, flushed to the disk. Returns NULL, or the sentence
// that says what failed (static buffer).
const char *checkpoint_write_config(const char *dir, const Config *config, DType dtype);
// Weights from DIR/model.safetensors, or its parts, F64, F32, BF16 or F16 in the table's dtype; of
// each, what this rank stores is read. Fatal on missing, unknown or wrongly shaped tensors. A tied file
// may leave lm_head.weight out; a copy of the embedding under that name is let pass, other values are not.
void checkpoint_load_weights(const char *dir, Params *params);
// Whether the run that was saved can go on as this one, which has made no step and has ours.batch and
// ours.data. Fatal where the steps to come would mean something else: no optimizer state, another
// optimizer, seed, seq, dtype or number of samples in a step, or all steps taken. Says in one line what
// else differs (data, rates, the course of the rate), and what an older file does not tell.
void checkpoint_check_run(const char *dir, const Config *config, Progress ours);
// Optimizer state; allocates it. Fatal if the file does not belong to this table or optimizer. A state in
// another dtype is converted; where this run has no master weights and the file has, they become the
// weights.
Progress checkpoint_load_optimizer(const char *dir, Params *params, Optimizer *optimizer);

#ifdef __cplusplus
}
#endif
#endif
