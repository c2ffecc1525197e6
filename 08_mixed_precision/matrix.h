// matrix.h: the composition matrix: its cells, and which of them meet every pair of choices.
#ifndef MATRIX_H
#define MATRIX_H

#include "five_d.h"

// What a cell is made of. The first nine are walked; the last ones take turns from cell to cell.
typedef enum Flag {
    FLAG_DP,
    FLAG_PP,
    FLAG_CP,
    FLAG_TP,
    FLAG_EP,  // 0: a dense model
    FLAG_ZERO,
    FLAG_SP,
    FLAG_RECOMPUTE,
    FLAG_PRECISION,
    FLAGS_WALKED,
    FLAG_SCHEDULE = FLAGS_WALKED,
    FLAG_CONTEXT,
    FLAG_VOCAB,
    FLAG_TIED,
    FLAGS
} Flag;

typedef struct Cell {
    int64_t number;
    int choice[FLAGS];  // index of a value
} Cell;

// matrix_cells.c
int64_t matrix_cells(void);  // numbers below this
Cell matrix_cell(int64_t number);
int matrix_ranks(const Cell *cell);
Config matrix_config(const Cell *cell);
// "--dp 2 --pp 2 --zero 3 --dtype bf16": the flags of train_5d without those at their default. Static
// buffer.
const char *matrix_text(const Cell *cell);
typedef struct CellList {
    Cell *cell;
    int64_t count;
} CellList;
// Of these cells, some in which every pair of choices meets that meets in any, but in none of `elsewhere`;
// returns how many, first in the list.
int64_t matrix_pairwise(CellList cells, CellList elsewhere, uint64_t seed);
// Pairs of all these cells that meet in none of the first `chosen`, nor elsewhere.
int64_t matrix_missing_pairs(CellList cells, int64_t chosen, CellList elsewhere);

#endif
