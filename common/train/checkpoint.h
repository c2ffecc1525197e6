// checkpoint.h: checkpoints: folders of safetensors files with Hugging Face names.
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

typedef struct Progress {  // of a run
    int64_t step;          // optimizer steps taken
    int64_t sample;        // global index of the next training sample
    int64_t batch;         // samples in a step, over all ranks; 0: not known
    uint64_t data;         // data_hash of what it trains on; 0: not known
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
// Before the first step of a run that saves: fatal if DIR holds a checkpoint of another run or, under the
// name of one, what no checkpoint can replace: a folder with other files, or no folder at all.
void checkpoint_check_place_is_ours(const char *dir, const Config *config, Progress progress);
// The newest step-* folder in dir, or dir itself if that is a checkpoint; else fatal. Called by all ranks
// together; fatal unless all find the same, with the same content (comm_same_files). The caller frees it.
char *checkpoint_newest(const char *dir);
// Reads the model's shape from DIR/config.json into *config (layers, hidden, … tied, rope, norm_eps), and
// leaves the rest of *config, such as seq and dtype, alone. Anything that is not a Llama that this program
// can train is fatal, naming the key. What else the folder contains (max positions, token ids,
// generation_config.json) is remembered, and goes into each folder that is saved from then on.
void checkpoint_config(const char *dir, Config *config);
// Reads this rank's part of each weight from DIR/model.safetensors or its parts, in F64, F32, BF16 or F16,
// converted to the table's dtype. Fatal on missing, unknown or wrongly shaped tensors, and on a value that is
// not finite there. The file of a tied model may leave out lm_head.weight; a copy of the embedding under that
// name is accepted, other values are not.
void checkpoint_load_weights(const char *dir, Params *params);
// Checks that the saved run can go on as this one, which has made no step and has ours.batch and ours.data.
// Fatal if its coming steps would mean something else: no optimizer state; another optimizer, seed, seq,
// dtype or number of samples in a step; or all steps already taken. Says in one line what else differs
// (data, rates, the schedule of the rate), and what an older file does not record.
void checkpoint_check_run(const char *dir, const Config *config, Progress ours);
// Allocates and reads the optimizer state, and returns the run's progress. Fatal if the file does not
// belong to this table or optimizer, or holds a value that is not finite. A state in another dtype is
// converted; if the file has master weights and this run has none, they become the weights.
Progress checkpoint_load_optimizer(const char *dir, Params *params, Optimizer *optimizer);

#ifdef __cplusplus
}
#endif
#endif
