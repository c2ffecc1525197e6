// rope.c: the frequencies of rotary position embeddings, the same for all back ends (ops.h).
#include <math.h>

#include "ops.h"

double rope_frequency(Rope rope, int64_t i, int64_t head_size) {
    double frequency = pow(rope.theta, -2.0 * (double)i / (double)head_size);
    if (rope.factor == 0 || rope.factor == 1) return frequency;
    double turns = rope.original * frequency / (2 * acos(-1.0)), slower = frequency / rope.factor;
    if (turns < rope.low) return slower;
    if (turns > rope.high) return frequency;
    double kept = (turns - rope.low) / (rope.high - rope.low);
    return (1 - kept) * slower + kept * frequency;
}
