// rng.h: random numbers that depend on (seed, stream, index) alone: no state, no order of calls, no rank.
// A weight's numbers are keyed by its tensor's name and the global index of the element, so on any layout a
// shard is initialized to its slice of the whole. The generator is Philox 4x32-10 of Random123 (Salmon et
// al. 2011).
#ifndef RNG_H
#define RNG_H

#include "base.h"

// Streams keep the uses of one seed apart: a parameter uses its name's hash, other uses have these.
enum { RNG_DATA = 1, RNG_MASK = 2, RNG_SAMPLE = 3, RNG_TEST = 4 };

uint64_t rng_stream(const char *name);  // of a tensor: a hash of its name; never one of the small numbers
uint64_t rng_bits(uint64_t seed, uint64_t stream, uint64_t index);
double rng_uniform(uint64_t seed, uint64_t stream, uint64_t index);  // [0, 1), 53 bits
double rng_normal(uint64_t seed, uint64_t stream, uint64_t index);   // mean 0, variance 1 (Box-Muller)

#endif
