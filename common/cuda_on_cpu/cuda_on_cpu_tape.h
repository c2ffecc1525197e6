// cuda_on_cpu_tape.h: the steps of one block's warps, for an issue timeline.
#ifndef CUDA_ON_CPU_TAPE_H
#define CUDA_ON_CPU_TAPE_H

#include "cuda/issue_timeline.h"

// Between begin and end a launch runs only its first block, and the steps of its warps are recorded; no
// counts are taken. A warp is represented by lane 0: what other lanes do without it is not on the tape.
// Arithmetic is recorded per basic block, as a warp enters it. In the picture, products have the letters 0,
// 1, … in the order in which the lines that call them first ran.
void cuda_tape_begin(void);
IssueTape cuda_tape_end(void);  // the caller frees its steps

#endif
