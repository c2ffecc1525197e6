// sequence_layout.c: which tokens of a sequence a rank of context parallelism has. Playbook: "Zig-Zag Ring
// Attention – A Balanced Compute Implementation"; zig-zag: Megatron-LM 2023, Llama 3; striped:
// Brandon et al. 2023.
//
// Changes from 00_single_gpu: a rank has s / cp tokens of every sequence, and one function takes its
// positions, tokens and labels (labels are shifted first: the next token may be on another rank). Under a
// causal mask a late token sees more than an early one, so the layout of tokens decides which ranks wait for
// which others. Score entries of a head, with m = s / cp tokens on each rank:
//
//                 tokens of rank 0 (s = 16)  in all hops, rank r              most in a hop
//     contiguous  0 1 2 3                    (r + 1/2) m^2 + m / 2            m^2
//     zig-zag     0 1 14 15                  cp m^2 / 2 + m / 2               m^2 / 2 + m / 2
//     striped     0 4 8 12                   cp m^2 / 2 + m (r + 1 - cp / 2)  m^2 / 2 + m / 2
//
// With contiguous tokens the last rank computes almost 2 cp - 1 times as much as the first. Zig-zag gives all
// ranks exactly the same number of entries if 2 cp divides s. Striped comes close, but has a diagonal of
// tiles to mask in every hop, zig-zag only in hop 0.
#include <stdlib.h>

#include "base.h"
#include "context_parallel.h"

// ---- chunks: the first s % n have one token more ----

static int64_t chunk_size(int64_t s, int n, int i) { return s / n + (i < s % n); }
static int64_t chunk_first(int64_t s, int n, int i) { return s / n * i + (i < s % n ? i : s % n); }

static void chunk_tokens(int64_t s, int n, int i, int32_t *tokens) {
    for (int64_t t = 0; t < chunk_size(s, n, i); t++) tokens[t] = (int32_t)(chunk_first(s, n, i) + t);
}

// Queries of chunk q see all keys of earlier chunks, and half of their own.
static double chunk_pairs(int64_t s, int n, int q, int k) {
    double queries = (double)chunk_size(s, n, q), keys = (double)chunk_size(s, n, k);
    return k < q ? queries * keys : k == q ? queries * (queries + 1) / 2 : 0;
}

// ---- contiguous: rank r has chunk r ----

static int64_t contiguous_count(int64_t s, int cp, int rank) { return chunk_size(s, cp, rank); }
static void contiguous_tokens(int64_t s, int cp, int rank, int32_t *tokens) {
    chunk_tokens(s, cp, rank, tokens);
}
static double contiguous_pairs(int64_t s, int cp, int queries, int keys) {
    return chunk_pairs(s, cp, queries, keys);
}
const SequenceLayout sequence_contiguous = {"contiguous", contiguous_count, contiguous_tokens,
                                            contiguous_pairs};

// ---- zig-zag: rank r has an early chunk, r, and a late one, 2 cp - 1 - r ----

static int64_t zigzag_count(int64_t s, int cp, int rank) {
    return chunk_size(s, 2 * cp, rank) + chunk_size(s, 2 * cp, 2 * cp - 1 - rank);
}
static void zigzag_tokens(int64_t s, int cp, int rank, int32_t *tokens) {
    chunk_tokens(s, 2 * cp, rank, tokens);
    chunk_tokens(s, 2 * cp, 2 * cp - 1 - rank, tokens + chunk_size(s, 2 * cp, rank));
}
static double zigzag_pairs(int64_t s, int cp, int queries, int keys) {
    const int q[] = {queries, 2 * cp - 1 - queries}, k[] = {keys, 2 * cp - 1 - keys};
    double pairs = 0;
    for (int i = 0; i < 4; i++) pairs += chunk_pairs(s, 2 * cp, q[i / 2], k[i % 2]);
    return pairs;
}
const SequenceLayout sequence_zigzag = {"zigzag", zigzag_count, zigzag_tokens, zigzag_pairs};

// ---- striped: rank r has every cp-th token from r on ----

static int64_t striped_count(int64_t s, int cp, int rank) { return chunk_size(s, cp, rank); }
static void striped_tokens(int64_t s, int cp, int rank, int32_t *tokens) {
    for (int64_t t = 0; t < striped_count(s, cp, rank); t++) tokens[t] = (int32_t)(rank + t * cp);
}
// The t-th query sees the first t - 1 keys, and the t-th as well unless that is a later token.
static double striped_pairs(int64_t s, int cp, int queries, int keys) {
    double n = (double)striped_count(s, cp, queries);
    return keys <= queries ? n * (n + 1) / 2 : n * (n - 1) / 2;
}
const SequenceLayout sequence_striped = {"striped", striped_count, striped_tokens, striped_pairs};

// ---- for all of them ----

int hop_owner(int cp, int rank, int hop) { return (rank - hop % cp + cp) % cp; }

double sequence_rank_pairs(const SequenceLayout *layout, int64_t s, int cp, int rank) {
    double pairs = 0;
    for (int hop = 0; hop < cp; hop++) pairs += layout->pairs(s, cp, rank, hop_owner(cp, rank, hop));
    return pairs;
}

static int32_t *tokens_of(const SequenceLayout *layout, int cp, int rank, int64_t s) {
    int32_t *tokens = host_alloc((size_t)layout->count(s, cp, rank) * sizeof *tokens);
    layout->tokens(s, cp, rank, tokens);
    return tokens;
}

void sequence_take(const SequenceLayout *layout, int cp, int rank, int64_t b, int64_t s, int32_t *mine,
                   const int32_t *all) {
    const int64_t count = layout->count(s, cp, rank);
    int32_t *tokens = tokens_of(layout, cp, rank, s);
    for (int64_t i = 0; i < b * count; i++) mine[i] = all[i / count * s + tokens[i % count]];
    free(tokens);
}
