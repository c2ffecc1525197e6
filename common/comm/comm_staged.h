// comm_staged.h: calls on device memory that MPI cannot reach, carried out on copies in host memory.
#ifndef COMM_STAGED_H
#define COMM_STAGED_H

#include "transport.h"

typedef struct Stage Stage;
// Copies what this rank gives to host memory, once the device has computed it, and points the call there.
// NULL, and nothing else, where device memory is host memory. One of a line at a time.
Stage *stage_begin(Collective *call);
// Copies what this rank has got to where the call wanted it, and ends the stage.
void stage_end(Stage *stage);
// Gives the host buffers back.
void stage_finish(void);

#endif
