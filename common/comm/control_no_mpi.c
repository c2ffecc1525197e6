// control_no_mpi.c: what stands in for control_mpi.c in a program that was built without MPI.
#include "transport.h"

static bool launched(void) { return false; }

static const char *launch(int argc, char **argv, int ranks) {
    (void)argc, (void)argv, (void)ranks;
    return "this program was built without MPI; torchrun, srun or a shell can start them with --rendezvous FILE";
}

const Control control_mpi = {.launcher = "mpirun", .launched = launched, .launch = launch};
