// tensor_layouts.c: what the programs of this chapter list, in plug order: data parallelism and ZeRO's
// stages, tensor parallelism in its forms, recomputation. This file has no main.
#include "tensor_parallel.h"

const Option tensor_layout_options[TENSOR_LAYOUT_OPTIONS] = {
    {"zero", OPTION_CHOICE, NULL, "0", 0, 0, "0|1|2|3",
     "sharded over --dp: 1 optimizer state, 2 and gradients, 3 and weights", false}};
const Technique *const tensor_layouts[] = {&ddp_no_sync,    &zero1,           &zero2,
                                           &zero3,          &tensor_parallel, &sequence_parallel,
                                           &vocab_parallel, &recompute,       NULL};
const Technique *const tensor_layouts_async[] = {&ddp_no_sync,     &zero1,
                                                 &zero2,           &zero3,
                                                 &tensor_parallel, &sequence_parallel,
                                                 &vocab_parallel,  &async_tensor_parallel,
                                                 &recompute,       NULL};
