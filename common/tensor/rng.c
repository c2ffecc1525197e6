// rng.c: counter-based random numbers. It works like a small block cipher: the key is the seed, the plain
// text says which number is wanted, and ten rounds of Philox turn it into 128 random bits. There is no
// state between calls, so threads and ranks may ask for any part, in any order.
#include "rng.h"

#include <Random123/philox.h>
#include <math.h>

#include "hash.h"

typedef struct Block {
    uint64_t low, high;
} Block;

static Block philox(uint64_t seed, uint64_t stream, uint64_t index) {
    philox4x32_key_t key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
    philox4x32_ctr_t counter = {
        {(uint32_t)index, (uint32_t)(index >> 32), (uint32_t)stream, (uint32_t)(stream >> 32)}};
    philox4x32_ctr_t r = philox4x32_R(10, counter, key);
    return (Block){r.v[0] | (uint64_t)r.v[1] << 32, r.v[2] | (uint64_t)r.v[3] << 32};
}

// The top bit keeps names apart from the small numbers of the other streams.
uint64_t rng_stream(const char *name) { return hash_text(name) | 1ull << 63; }

uint64_t rng_bits(uint64_t seed, uint64_t stream, uint64_t index) {
    return philox(seed, stream, index).low;
}

double rng_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    return (double)(rng_bits(seed, stream, index) >> 11) * 0x1p-53;
}

// Box-Muller makes two normals of two uniforms. The second is thrown away: kept for the next caller it
// would be state, and the price is one sine in a function that fills each weight once.
double rng_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    static const double two_pi = 6.283185307179586476925;
    Block block = philox(seed, stream, index);
    double u = (double)((block.low >> 11) + 1) * 0x1p-53;  // (0, 1]: the logarithm is finite
    double v = (double)(block.high >> 11) * 0x1p-53;       // [0, 1)
    return sqrt(-2 * log(u)) * cos(two_pi * v);
}
