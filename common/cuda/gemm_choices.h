// gemm_choices.h: which algorithm of cuBLASLt was the fastest for each kind of multiply, in files that later
// runs read.
//
// Each rank writes a file of its own, PATH.0, PATH.1 ..., as others may multiply other shapes. A later run,
// of any number of ranks, reads all of them in each rank. So its ranks choose alike, and what two of them
// must both compute has the same bits. If several files have a kind, the lowest rank's choice is taken.
//
// A file is a line of text, with the library's version, the GPU, the rank and the number of files, and a
// record for each kind. NVIDIA allows an algorithm to be stored and restored, for the same version of the
// library (cublasLtMatmulAlgo_t in its documentation).
#ifndef GEMM_CHOICES_H
#define GEMM_CHOICES_H

#include "base.h"

enum { KIND_BYTES = 120, ALGORITHM_BYTES = 64 };

// Begins this rank's file. machine: the library's version and the GPU.
void choices_write(const char *path, const char *machine);
void choices_add(const void *kind, const void *algorithm);

// Reads the files of all ranks; fatal if one is missing, or was made on another machine.
void choices_read(const char *path, const char *machine);
// The algorithm for this kind, or NULL.
const void *choices_find(const void *kind);

#endif
