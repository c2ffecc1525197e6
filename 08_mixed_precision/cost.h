// cost.h: what a step of training costs on a cluster that nobody has yet: its time and its memory, as
// functions of the model's shape, the machine and the layout.
//
// Times are those of the model clock (tensor/clock.h): work is charged to the same peaks, links and
// efficiencies. How the parts of a step overlap is not the clock's: it differs between training programs,
// and is part of their habits.
#ifndef COST_H
#define COST_H

#include "tensor/clock.h"
#include "train/config.h"

// ---- the efficiencies: cost_table.c ----

// The factors that are fitted to published runs (find_config_runs.c): shares of a datasheet's figure, 0 to
// 1, unless stated otherwise.
typedef enum Factor {
    FACTOR_MATMUL_A100,  // of its 16-bit peak, by large multiplies
    FACTOR_MATMUL_H100,  // likewise
    FACTOR_MATMUL_FP8,   // of the 8-bit peak, on top of the 16-bit share
    FACTOR_SMALL,        // TFLOP of a multiply that reaches half of what a large one does
    FACTOR_ATTENTION,    // of what multiplies reach
    FACTOR_MEMORY,       // of memory bandwidth
    FACTOR_LINKS,        // of NVLink's and the network's bandwidth
    FACTOR_HIDDEN,       // of communication that a program overlaps
    FACTORS
} Factor;
typedef struct Factors {
    double value[FACTORS];
} Factors;
extern const struct FactorRange {
    const char *name, *what;
    double low, high, guess;  // guess: what one would say without any run
} factor_range[FACTORS];
Factors factors_fitted(void);  // on published.csv: fitted.h, which find_config --fitted writes
Factors factors_guessed(void);

// A machine at the rates that are reached, and its efficiencies by size: the clock takes both. `power` is
// the share of the standard power that its GPUs may draw.
enum { EFFICIENCY_STEPS = 41, EFFICIENCY_FIRST = 24 };  // from 2^24 on, in half powers
typedef struct CostTable {
    Machine machine;
    double reached[WORK_COLLECTIVE + 1][EFFICIENCY_STEPS];  // by kind and half powers of two of the size
} CostTable;
CostTable cost_table(const Machine *machine, const Factors *factors, double power);
double cost_reached(const CostTable *table, WorkKind kind, double size);
void cost_table_clock(const CostTable *table);  // from here on the model clock runs at these rates

// ---- what is trained, on what, and how ----

typedef struct CostModel {
    double layers, hidden, heads, kv_heads, head_size, ffn, vocab, seq;
    int matrices;  // of the feed-forward part: 3 with a gate, else 2
    bool tied;
    double experts, top_k, shared, expert_ffn, dense_layers;  // 0 experts: dense
    double q_rank, kv_rank, rope_size;                        // multi-head latent attention, 0: none
} CostModel;

typedef struct CostLayout {
    int tp, cp, pp, dp, ep, etp;
    bool sp, fp8, gather_fp8;
    int zero, chunks;  // stages of a rank
    int64_t micro_batch, micro_batches;
    Recompute recompute;
    double again;  // of the multiplies of a block that recomputation repeats, if neither all nor none
} CostLayout;

// What a program does about its communication and its kernels.
typedef struct CostHabits {
    bool hides_tp, hides_dp, hides_pp, hides_ep;
    bool flash;              // attention without stored scores, and without those that the mask hides
    double gradient_bytes;   // of an element that is reduced
    double attention_again;  // time of attention's backward / its forward
    double attention_slow;   // time of attention / a kernel written for this GPU
    double bubble;           // bubble of the schedule / 1F1B's
    double cast_bytes;  // of an element that is cast to 8 bits: read for its scale, read again, written
    bool one_ring;  // a collective over nodes passes one port of a node, whatever its members there: run A04
} CostHabits;

typedef struct Cluster {
    int gpus, per_node;
    double network;  // bytes/s of a GPU's share; 0: the machine's
} Cluster;

// Seconds of one step of the slowest rank.
typedef struct CostTime {
    double step;
    double multiply, attention, memory;  // computed, of the slowest stage
    double bubble;
    double tp, cp, ep, dp, pp;  // exposed
    double optimizer;
} CostTime;
CostTime cost_time(const CostModel *model, const CostLayout *layout, const Cluster *cluster,
                   const CostTable *table, const CostHabits *habits, double hidden);
// Bytes of the fullest rank of a program that is not this book's: states, and what blocks keep.
double cost_memory(const CostModel *model, const CostLayout *layout, const CostHabits *habits);
double cost_parameters(const CostModel *model);         // all
double cost_active_parameters(const CostModel *model);  // that a token meets in a multiply
// FLOPs of a token, 6 for each weight that it meets; attention in full or as the mask leaves it.
double cost_token_flops(const CostModel *model, bool causal);

#endif
