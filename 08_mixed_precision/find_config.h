// find_config.h: the parts of find_config: published runs, the fit, the search, and its pictures.
#ifndef FIND_CONFIG_H
#define FIND_CONFIG_H

#include "cost.h"

// ---- find_config_runs.c: runs that somebody has published, one row of a table each ----

typedef struct Run {
    char id[16], kind[24], series[48], framework[48], gpu[16];
    CostModel model;
    CostLayout layout;  // as filled by the search, where the source does not print it
    Cluster cluster;
    CostHabits habits;
    Machine machine;      // as it is sold
    double power;         // share of the GPU's standard
    double peak, memory;  // FLOP/s dense in 16 bits, as datasheets have it; bytes of a GPU
    int64_t sequences;    // of a step
    double seconds;       // of a step, as published
    bool open_micro_batch, open_recompute, open_chunks;
} Run;

typedef struct Runs {
    Run *run;
    int count;
} Runs;

// Fatal, naming --runs, the file and the line, where it is not such a table. The caller frees run.
Runs runs_read(const char *path);
// Seconds that the factors predict; what is open is filled with the fastest that fits into memory.
CostTime run_predict(Run *run, const Factors *factors);

// ---- find_config_fit.c ----

// Fits the factors from where they are, on runs whose series is not `without` (NULL: on all).
void fit(Factors *factors, Runs *runs, const char *without);

// ---- find_config_published.c ----

// Predicted beside published, of each run; errors of the fit, with each series left out, and by kind.
// refit: on these runs; else with the factors fitted on published.csv.
void runs_report(Runs *runs, bool refit);

#endif
