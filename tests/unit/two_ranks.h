// two_ranks.h: the two ranks of a test over NCCL on the CPU, each a process of its own.
#ifndef TWO_RANKS_H
#define TWO_RANKS_H

#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/emulation/nccl_on_cpu.h"

extern bool cuda_on_cpu_outlives_fork;
static ncclUniqueId id;
static int rank;

// Each ends with the status that `run` returns, or by a signal if it hangs.
template <class Run>
static void start_two_ranks(pid_t *child, Run run) {
    cuda_on_cpu_outlives_fork = true;  // both use the arrays of this process
    ncclGetUniqueId(&id);
    fflush(NULL);
    for (int r = 0; r < 2; r++)
        if ((child[r] = fork()) == 0) {
            rank = r;
            alarm(60);
            _exit(run());
        }
}

// Both must end with these statuses.
template <class Run>
static void on_two_ranks(Run run, int first, int second) {
    const int expected[] = {first, second};
    pid_t child[2];
    start_two_ranks(child, run);
    for (int r = 0; r < 2; r++) {
        int status;
        waitpid(child[r], &status, 0);
        int got = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        if (got != expected[r]) fail_msg("rank %d ended with %d, expected %d", r, got, expected[r]);
    }
}

#endif
