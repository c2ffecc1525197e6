// find_config.h: the parts of find_config: published runs, the fit, the search, and its pictures.
#ifndef FIND_CONFIG_H
#define FIND_CONFIG_H

#include "cost.h"
#include "cost_lone.h"
#include "fitted.h"

// ---- find_config_runs.c: runs that somebody has published, one row of a table each ----

typedef struct Published {
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
} Published;

typedef struct Runs {
    Published *run;
    int count;
} Runs;

// Fatal, naming --runs, the file and the line, where it is not such a table. The caller frees run.
Runs runs_read(const char *path);
// Seconds that the factors predict; what is open is filled with the fastest that fits into memory.
CostTime run_predict(Published *run, const Factors *factors);

// ---- find_config_own.c ----

// Seconds of a step of this book's own programs, as the search clocks it, with the run's model and layout;
// NAN: they have no such layout. A dry run in which this process stands for all ranks.
double run_own_step(const Published *run, const Factors *factors);

// ---- find_config_fit.c ----

// Fits the factors from where they are, on runs whose series is not `without` (NULL: on all).
void fit(Factors *factors, Runs *runs, const char *without);

// ---- find_config_published.c ----

// Predicted beside published, of each run; errors of the fit, with each series left out, and by kind.
// refit: on these runs; else with the factors fitted on published.csv. fitted: NULL, or the file that takes
// the factors and their errors for the next build (fitted.h).
void runs_report(Runs *runs, bool refit, const char *fitted);
void say_left_out(void);  // what no figure of the model has in it

// ---- find_config_search.c: all legal layouts, the best of them clocked ----

enum { MICRO_BATCH_MOST = 64 };  // sequences
typedef struct Found Found;
typedef struct Goal {
    Config model;  // shape, seq; what is no layout
    int gpus;
    int64_t sequences;  // of a step
    double memory;      // bytes of a GPU
    bool (*family)(const Found *);  // the layouts to search; NULL: all
} Goal;

struct Found {
    int tp, cp, pp, dp, ep, zero, schedule, chunks, recompute, sp;
    int64_t micro_batch, micro_batches;
    double quick;   // seconds of a step, by closed forms
    LoneTime time;  // clocked
    LoneMemory memory;
    LoneParts parts;
};

typedef struct Search {
    Found *best;
    int count;           // of best, the fastest first
    int64_t legal, fit;  // layouts, and those of them that fit into memory
} Search;
Search search(const Goal *goal, int wanted);  // the caller frees best
Config found_config(const Goal *goal, const Found *found);
double found_mfu(const Goal *goal, const Found *found);
void search_print(const Goal *goal, const Search *search);

// ---- find_config_rules.c: the playbook's rules, asked of the search ----
void rules(void);

// ---- find_config_overlap.c: when communication hides, by appendix A3 and by the clock ----
void overlap(void);

// ---- find_config_agree.c: beside dry runs on as many ranks ----
void agree(void);

// ---- find_config_curves.c ----
// The fastest layouts of four sizes of models on 1 to 64 nodes, 1M tokens a step.
void heat_map(const char *file, const char *machine);
// Throughput of a GPU by degree, printed and asserted; drawn where file is not NULL.
void curves(const char *file);

#endif
