// comm_staged.h: calls on device memory that MPI cannot reach, carried out on copies in host memory.
#ifndef COMM_STAGED_H
#define COMM_STAGED_H

#include "transport.h"

typedef struct Stage Stage;
// Copies what this rank sends to host memory, once the device has computed it, and makes the call use the
// copies. Where device memory is host memory it only returns NULL. At most one stage per line at a time.
Stage *stage_begin(Collective *call);
// Copies what this rank has received to the device memory of the call, and ends the stage.
void stage_end(Stage *stage);
// Frees the host buffers.
void stage_finish(void);

#endif
