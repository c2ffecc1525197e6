// cost_memory.h: bytes that a rank holds.
#ifndef COST_MEMORY_H
#define COST_MEMORY_H

#include "cost.h"

// The fullest rank of a program that is not this book's: states, and what blocks keep.
double cost_memory(const CostModel *model, const CostLayout *layout, const CostHabits *habits);

#endif
