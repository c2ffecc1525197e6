// attention_tiles.h: what kernels with masks by tokens read and multiply, held against the tiles that the
// mask leaves: by counts, and by arrays that are not there.
#ifndef ATTENTION_TILES_H
#define ATTENTION_TILES_H

#include "attention_masks.h"

// The counts of run(shape) equal formula(shape, pairs of tiles, of all heads): empty tiles are neither
// copied nor multiplied. Loads are not compared, since they include those of tokens and bounds. A tile has
// `tile` queries and as many keys.
template <class Run, class Formula>
void prove_empty_tiles(const char *name, int64_t tile, int d, Run run, Formula formula) {
    const std::vector<Token> tokens = packed_tokens(4 * tile, tile, 25);
    const MaskedCase it(positions_of(1, tokens), positions_of(1, tokens));
    const TokenHeads n = it.shape(2, 1, d);
    const int64_t pairs = pairs_seen(it.mask, tile, tile), causal = 4 * 5 / 2;
    const Work right = formula(n, (double)(n.a * pairs)), work = counted([&] { run(n); });
    report_that(pairs < causal, "%s: with documents %lld tiles are not empty, and with a causal mask %lld",
                name, (long long)pairs, (long long)causal);
    hold_tiles(name, {{"passes of shared memory", work.shared_passes, right.shared_passes},
                      {"FLOPs of tensor cores", work.tensor_flops + work.tensor_8_flops,
                       right.tensor_flops + right.tensor_8_flops},
                      {"special instructions", work.special_instructions, right.special_instructions}});
}

// If every query sees every key, run(shape) gives what it gives without a mask, bit for bit, and looks at no
// token.
template <class Run>
void prove_full_tiles(const char *name, int64_t tile, int d, Run run) {
    std::vector<Token> keys, queries;
    for (int i = 0; i < 2 * tile; i++) keys.push_back({i, 0}), queries.push_back({i + 2 * (int)tile, 0});
    const MaskedCase it(positions_of(1, queries), positions_of(1, keys));
    TokenHeads n = it.shape(2, 1, d);
    n.queries.positions = n.queries.documents = n.keys.positions = n.keys.documents = NULL;
    report_that(run(n) == run(static_cast<const Heads &>(n)),
                "%s: a mask by tokens that leaves nothing out makes other bits than none", name);
}

#endif
