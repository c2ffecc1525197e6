// cost_block.h: the cost of one block, and of what comes before and after the blocks, for one micro-batch on
// one rank; between cost_block.c and cost.c.
#ifndef COST_BLOCK_H
#define COST_BLOCK_H

#include "cost.h"

// Seconds by kind, of one pass; communication as if nothing hid it.
typedef struct Parts {
    double multiply, attention, memory, tp, cp, ep;
} Parts;
typedef struct Passes {
    Parts forward, backward;  // B and W
} Passes;

// All that prices need: what is priced, and the rates.
typedef struct Pricing {
    const CostModel *model;
    const CostLayout *layout;
    const CostTable *table;
    const CostHabits *habits;
    int per_node;
    double network;  // bytes/s
} Pricing;

double parts_computed(const Parts *parts);
void parts_add(Parts *sum, const Parts *parts, double times);
Passes cost_block(const Pricing *p, bool dense);
Passes cost_embedding(const Pricing *p);
Passes cost_head(const Pricing *p);
// Weights of these that this rank computes with: a block's, and those of its experts alone.
double cost_block_weights(const CostModel *model, const CostLayout *layout, bool dense);
double cost_expert_weights(const CostModel *model, const CostLayout *layout);
// Seconds of a collective on `bytes` in a group of n, whose neighbours are `stride` ranks apart.
double cost_collective(const Pricing *p, const char *name, double bytes, int n, int stride);

#endif
