// formulas.h: memory before it is allocated, and what recomputation saves and costs: the playbook's
// formulas.
#ifndef FORMULAS_H
#define FORMULAS_H

#include "training.h"

// How a model is trained, as the playbook's memory widget asks.
typedef struct MemoryPlan {
    Config model;        // shape, dtype, micro_batch, recompute
    bool gpt;            // the playbook's block (GPT: LayerNorm, biases, dropout, GELU); else this book's
    bool f32_gradients;  // 16-bit gradients are summed over micro-batches in f32
    double optimizer_bytes;  // k, bytes of optimizer for each parameter; 0: AdamW's for the dtype
    int64_t zero, tp, dp;    // stage 0 to 3, degrees
    bool sp;                 // sequence parallelism beside tp
    bool whole_vocabulary;   // with tp embedding and output layer are whole on every rank; else sharded
} MemoryPlan;

typedef struct MemoryNeed {  // bytes on one rank
    double parameters, gradients, accumulators, optimizer;
    double blocks, ends;  // activations held when forward has ended: blocks; inputs and head
} MemoryNeed;

MemoryNeed memory_need(const MemoryPlan *plan);
// The states of so many parameters, by ZeRO's formulas; and the sum of the states in a MemoryNeed.
MemoryNeed memory_states(const MemoryPlan *plan, double parameters);
double memory_states_bytes(const MemoryNeed *need);
// Parameters that a rank of plan->tp computes with.
double memory_rank_parameters(const MemoryPlan *plan);
// Bytes that one block keeps for backward on one rank, for one micro-batch.
double memory_block_activations(const MemoryPlan *plan);
void memory_print_block(const MemoryPlan *plan);  // the same, tensor by tensor
// What one block, and what lies outside the blocks, keeps before anything is sharded or dropped. Returns
// the number of rows.
int memory_block_rows(PriceKept rows[MOST_KEPT], const MemoryPlan *plan);
int memory_end_rows(PriceKept rows[MOST_KEPT], const MemoryPlan *plan);

// This book's model on one device, to the byte: the activations that one micro-batch holds between forward
// and backward, and its peak.
int64_t kept_activation_bytes(const Config *config);
int64_t peak_activation_bytes(const Config *config, DType gradient);  // gradient: of weights, in backward

// L=96 h=12288 a=96 s=2048 v=51200, one sequence in bf16: only for the formulas, with .gpt = true.
Config gpt3_175b(void);
// Recomputation of GPT's block, as fractions of the cost of training without it.
typedef struct RecomputeCost {
    double selective_memory;           // share of the blocks' activation bytes that selective saves
    double selective_flops;            // extra FLOPs of repeating attention's core forward
    double selective_flops_published;  // the same in Korthikanti et al. 2022, who also count backward
    double full_flops;                 // extra FLOPs of repeating every block's forward
} RecomputeCost;
RecomputeCost recompute_cost(const Config *gpt);

#endif
