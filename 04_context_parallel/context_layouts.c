// context_layouts.c: the techniques that the programs of this chapter list, in plug order: those of earlier
// chapters, and the four methods of context parallelism, of which --context chooses one. This file has no
// main.
#include "context_parallel.h"

const Technique *const context_layouts[] = {&ddp_no_sync,
                                            &zero1,
                                            &zero2,
                                            &zero3,
                                            &tensor_parallel,
                                            &sequence_parallel,
                                            &vocab_parallel,
                                            &ring_attention,
                                            &zigzag_ring_attention,
                                            &all_gather_attention,
                                            &ulysses,
                                            &recompute,
                                            NULL};
