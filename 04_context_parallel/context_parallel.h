// context_parallel.h: chapter 04 as signatures. s tokens of a sequence, cp ranks of context parallelism.
#ifndef CONTEXT_PARALLEL_H
#define CONTEXT_PARALLEL_H

#include <stdint.h>

// ======================================================================================================
// 04_context_parallel/sequence_layout.c: who has which tokens of a sequence
// ======================================================================================================

// Any s, also below cp: chunks are of s / n tokens, the first s % n of them of one more.
typedef struct SequenceLayout {
    const char *name;
    // Tokens that rank `rank` of cp has.
    int64_t (*count)(int64_t s, int cp, int rank);
    // Which ones, count of them, in the order in which they are stored: ascending.
    void (*tokens)(int64_t s, int cp, int rank, int32_t *tokens);
    // Score entries that a head computes in one hop: pairs of a query of rank `queries` and a key of rank
    // `keys` that it sees, in one document. Closed forms, exact for any s.
    double (*pairs)(int64_t s, int cp, int queries, int keys);
} SequenceLayout;

extern const SequenceLayout sequence_contiguous;  // rank r: chunk r of cp
extern const SequenceLayout sequence_zigzag;      // rank r: chunks r and 2 cp - 1 - r of 2 cp
extern const SequenceLayout sequence_striped;     // rank r: tokens r, r + cp, r + 2 cp, …

// In hop `hop` of a ring, rank r computes with the keys that rank hop_owner(r) stores: they move from each
// rank to the next one.
int hop_owner(int cp, int rank, int hop);
// All that a head of rank `rank` computes in the cp hops of a sequence.
double sequence_rank_pairs(const SequenceLayout *layout, int64_t s, int cp, int rank);

// Rows of the rank's tokens, from those of the whole sequences and back: positions, tokens, labels (shifted
// before). all (b, s), mine (b, count).
void sequence_take(const SequenceLayout *layout, int cp, int rank, int64_t b, int64_t s, int32_t *mine,
                   const int32_t *all);
void sequence_put(const SequenceLayout *layout, int cp, int rank, int64_t b, int64_t s, int32_t *all,
                  const int32_t *mine);

#endif
