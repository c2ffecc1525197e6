// kernel_choice.c: --kernels book: operations that run on chapter 07's kernels in place of the library's;
// --kernels attention: only attention does, and on a GPU the rest is cuBLASLt's and the back end's.
//
// Changes from 00_single_gpu/train.c: only which code computes. The operations are the same and are counted
// as before, but their sums run in another order. The kernels are CUDA, most of them in f32; the back end's
// own serve the calls that these cannot, and a line at the end says how many calls the book's kernels took.
// The run on one device, with which the proof compares, uses the library. Bytes sent and memory kept: as
// before. This file has no main.
#include <stdlib.h>

#include "tensor/kernel_table.h"
#include "training.h"

enum { LIBRARY, BOOK, ATTENTION };

static int choice_of(const Config *config) { return (int)config_number(config, "kernels"); }

static bool enabled(const Config *config) { return choice_of(config) != LIBRARY; }

// Scores that are stored are the back end's; tiles and chunks of them may be chapter 07's.
static bool attends_in_tiles(const Config *config) {
    return !config_has(config, "attention") || config_number(config, "attention") == 1 || config->cp > 1 ||
           config_document_end(config) >= 0;
}

static void check(const Config *config) {
    const char *name = choice_of(config) == BOOK ? "book" : "attention";
    CHECK(kernel_table_linked(),
          "--kernels %s: this build computes on the CPU and has no CUDA kernels; one with OPS=cuda, or "
          "on a machine without a GPU OPS=cuda-on-cpu, has them",
          name);
    CHECK(config->dtype != F64,
          "--kernels %s: chapter 07's kernels compute in f32, bf16 and f16; --dtype f32 would fit", name);
    CHECK(choice_of(config) != ATTENTION || attends_in_tiles(config),
          "--kernels attention: chapter 07's attention stores no scores; --attention flash would fit");
    CHECK(config_number(config, "attention") != 1 || config_head_size(config) == 64 ||
              config_head_size(config) == 128,
          "--kernels %s --attention flash: heads have %lld elements, and chapter 07's flash attention "
          "takes 64 or 128; --head-size 64 would fit",
          name, (long long)config_head_size(config));
}

static const KernelTable *table_of(int choice) {
    static KernelTable attention;
    const KernelTable *all = kernel_table_linked();
    if (choice == BOOK || !all) return all;
    attention.attention_chunk_forward = all->attention_chunk_forward;
    attention.attention_chunk_backward = all->attention_chunk_backward;
    return &attention;
}

// unplug restores the previous state: a dry run of a layout is plugged and unplugged while another trains.
typedef struct Before {
    const KernelTable *table;
    KernelCalls calls;
} Before;

static void *plug(Model *model) {
    Before *before = host_alloc(sizeof *before);
    *before = (Before){ops_use_kernels(table_of(choice_of(&model->config))), ops_kernel_calls()};
    return before;
}

static void unplug(Model *model, void *context) {
    (void)model;
    const KernelCalls calls = ops_kernel_calls(), before = ((Before *)context)->calls;
    ops_use_kernels(((Before *)context)->table);
    free(context);
    if (calls.all == before.all) return;  // a dry run
    say("the kernels of chapter 07 served %lld of the %lld calls that they can replace",
        (long long)(calls.taken - before.taken), (long long)(calls.all - before.all));
}

static const Option options[] = {
    {"kernels", OPTION_CHOICE, NULL, "library", 0, 0, "library|book|attention",
     "kernels to compute with: the library's and this build's own, those of chapter 07, or of those only "
     "attention's",
     false}};

const Technique kernel_choice = {.name = "kernel_choice",
                                 .option = options,
                                 .options = 1,
                                 .enabled = enabled,
                                 .check = check,
                                 .plug = plug,
                                 .unplug = unplug};
