// context_layouts.c: what the programs of this chapter list, in plug order: techniques of chapters 02 and
// 03, and the four ways of context parallelism, of which --context chooses one. This file has no main.
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

int context_main(int argc, char **argv, Program program) {
    Option option[2] = {{"zero", OPTION_CHOICE, NULL, "0", 0, 0, "0|1|2|3",
                         "sharded over --dp x --cp: 1 optimizer state, 2 and gradients, 3 and weights",
                         false}};
    CHECK(program.options < 2, "a program of this chapter has %d options of its own", program.options);
    if (program.options) option[1] = *program.option;
    program.option = option;
    program.options++;
    program.techniques = context_layouts;
    return program_main(argc, argv, &program);
}
