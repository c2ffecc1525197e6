// tensor_layouts.c: the techniques that the programs of this chapter list, in plug order: data parallelism
// and ZeRO's stages, the forms of tensor parallelism, recomputation. This file has no main.
#include "tensor_parallel.h"

const Technique *const tensor_layouts[] = {&ddp_no_sync,     &zero1,
                                           &zero2,           &zero3,
                                           &tensor_parallel, &sequence_parallel,
                                           &vocab_parallel,  &async_tensor_parallel,
                                           &recompute,       NULL};
