// test_sequence_layout.c: which rank has which tokens, and how much each computes in each hop, against
// every pair of tokens counted one by one, for lengths that divide and that do not.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "04_context_parallel/context_parallel.h"
#include "base.h"
#include "tensor/attention_mask.h"

static const SequenceLayout *const layouts[] = {&sequence_contiguous, &sequence_zigzag, &sequence_striped};
static const int64_t lengths[] = {1, 2, 5, 31, 64, 97, 192};
enum { LAYOUTS = 3, LENGTHS = 7, MOST_RANKS = 8 };

typedef void (*Each)(const SequenceLayout *layout, int64_t s, int cp);
static void each_case(Each each) {
    for (int layout = 0; layout < LAYOUTS; layout++)
        for (int length = 0; length < LENGTHS; length++)
            for (int cp = 1; cp <= MOST_RANKS; cp++) each(layouts[layout], lengths[length], cp);
}

static int32_t *tokens_of(const SequenceLayout *layout, int64_t s, int cp, int rank) {
    int32_t *tokens = host_alloc((size_t)layout->count(s, cp, rank) * sizeof *tokens);
    layout->tokens(s, cp, rank, tokens);
    return tokens;
}

// Each token has one owner, a rank's tokens ascend, and numbers of tokens differ by at most one.
static void one_owner(const SequenceLayout *layout, int64_t s, int cp) {
    int *owners = calloc((size_t)s, sizeof *owners);
    int64_t fewest = s, most = 0;
    for (int rank = 0; rank < cp; rank++) {
        int32_t *tokens = tokens_of(layout, s, cp, rank);
        int64_t count = layout->count(s, cp, rank);
        for (int64_t i = 0; i < count; i++) {
            assert_true(tokens[i] >= 0 && tokens[i] < s);
            assert_true(i == 0 || tokens[i] > tokens[i - 1]);
            owners[tokens[i]]++;
        }
        fewest = count < fewest ? count : fewest;
        most = count > most ? count : most;
        free(tokens);
    }
    for (int64_t i = 0; i < s; i++) assert_int_equal(owners[i], 1);
    assert_true(most - fewest <= 1);
    free(owners);
}

// Closed forms against pairs, counted one by one and by the mask that attention itself gets.
static void pairs_of_each_hop(const SequenceLayout *layout, int64_t s, int cp) {
    double all = 0;
    for (int rank = 0; rank < cp; rank++) {
        int32_t *queries = tokens_of(layout, s, cp, rank);
        int64_t n = layout->count(s, cp, rank);
        AttentionPositions q = attention_positions_new(1, n, queries, NULL);
        for (int hop = 0; hop < cp; hop++) {
            int owner = hop_owner(cp, rank, hop);
            int32_t *keys = tokens_of(layout, s, cp, owner);
            int64_t m = layout->count(s, cp, owner);
            AttentionPositions k = attention_positions_new(1, m, keys, NULL);
            double pairs = 0;
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = 0; j < m; j++) pairs += keys[j] <= queries[i];
            if (layout->pairs(s, cp, rank, owner) != pairs)
                fail_msg("%s, s %lld, rank %d of %d, hop %d: %g pairs, not %g", layout->name, (long long)s,
                         rank, cp, hop, layout->pairs(s, cp, rank, owner), pairs);
            assert_true(attention_mask(&q, &k).pairs == pairs);
            attention_positions_free(&k);
            free(keys);
        }
        all += sequence_rank_pairs(layout, s, cp, rank);
        attention_positions_free(&q);
        free(queries);
    }
    assert_true(all == (double)(s * (s + 1) / 2));
}

// What the mask of queries and keys counts, tile by tile.
static void expect_tiles(const AttentionPositions *q, const AttentionPositions *k, const char *what) {
    const AttentionMask mask = attention_mask(q, k);
    int64_t computed = 0, full = 0, entries = 0;
    for (int64_t i = 0; i < q->tiles; i++)
        for (int64_t j = 0; j < k->tiles; j++) {
            const TileState state = attention_tile(q->bound[i], k->bound[j]);
            const int64_t rows = q->s - i * ATTENTION_TILE, columns = k->s - j * ATTENTION_TILE;
            computed += state != TILE_EMPTY;
            full += state == TILE_FULL;
            entries += (state != TILE_EMPTY) * (rows < ATTENTION_TILE ? rows : ATTENTION_TILE) *
                       (columns < ATTENTION_TILE ? columns : ATTENTION_TILE);
        }
    if (mask.tiles != computed || mask.full != full || mask.entries != (double)entries)
        fail_msg("%s: %lld tiles, %lld full, %.0f entries; one by one %lld, %lld, %lld", what,
                 (long long)mask.tiles, (long long)mask.full, mask.entries, (long long)computed,
                 (long long)full, (long long)entries);
}

// Queries and keys of any two ranks, over many tiles.
static void tiles_are_counted_as_one_by_one(void **state) {
    (void)state;
    static const int64_t long_ones[] = {64, 65, 127, 640, 1111};
    for (int at = 0; at < LAYOUTS * 5 * 4; at++) {
        const SequenceLayout *layout = layouts[at % LAYOUTS];
        const int64_t s = long_ones[at / LAYOUTS % 5];
        const int cp = at / LAYOUTS / 5 + 1;
        AttentionPositions tokens[MOST_RANKS];
        for (int rank = 0; rank < cp; rank++) {
            int32_t *own = tokens_of(layout, s, cp, rank);
            tokens[rank] = attention_positions_new(1, layout->count(s, cp, rank), own, NULL);
            free(own);
        }
        for (int pair = 0; pair < cp * cp; pair++)
            expect_tiles(&tokens[pair / cp], &tokens[pair % cp], layout->name);
        for (int rank = 0; rank < cp; rank++) attention_positions_free(&tokens[rank]);
    }
}

// Positions that run on from document to document; and a tile whose last token is a late one.
static void tiles_that_do_not_ascend_are_counted_too(void **state) {
    (void)state;
    enum { LENGTH = 5 * ATTENTION_TILE };
    int32_t position[LENGTH], document[LENGTH];
    for (int i = 0; i < LENGTH; i++) position[i] = i, document[i] = i / (2 * ATTENTION_TILE);
    AttentionPositions documents = attention_positions_new(1, LENGTH, position, document);
    position[ATTENTION_TILE - 1] = LENGTH;
    AttentionPositions late = attention_positions_new(1, LENGTH, position, NULL);
    expect_tiles(&documents, &documents, "documents");
    expect_tiles(&late, &late, "a late token in the first tile");
    attention_positions_free(&documents);
    attention_positions_free(&late);
}

// A rank takes the entries of its tokens.
static void taken(const SequenceLayout *layout, int64_t s, int cp) {
    enum { SAMPLES = 3 };
    int32_t *all = host_alloc((size_t)(SAMPLES * s) * sizeof *all);
    for (int64_t i = 0; i < SAMPLES * s; i++) all[i] = (int32_t)(1000 + i);
    for (int rank = 0; rank < cp; rank++) {
        int64_t n = layout->count(s, cp, rank);
        int32_t *mine = host_alloc((size_t)(SAMPLES * n) * sizeof *mine),
                *tokens = tokens_of(layout, s, cp, rank);
        sequence_take(layout, cp, rank, SAMPLES, s, mine, all);
        for (int64_t i = 0; i < SAMPLES * n; i++)
            assert_int_equal(mine[i], 1000 + i / n * s + tokens[i % n]);
        free(mine);
        free(tokens);
    }
    free(all);
}

static void every_token_has_one_owner(void **state) { (void)state, each_case(one_owner); }
static void closed_forms_count_every_pair(void **state) { (void)state, each_case(pairs_of_each_hop); }
static void rows_are_taken(void **state) { (void)state, each_case(taken); }

// Each rank passes on what it had to the next one: first its own keys, last those of the rank after it.
static void keys_go_round_the_ring(void **state) {
    (void)state;
    for (int cp = 1; cp <= MOST_RANKS; cp++)
        for (int rank = 0; rank < cp; rank++) {
            assert_int_equal(hop_owner(cp, rank, 0), rank);
            assert_int_equal(hop_owner(cp, rank, cp - 1), (rank + 1) % cp);
            for (int hop = 1; hop < cp; hop++)
                assert_int_equal(hop_owner(cp, rank, hop), hop_owner(cp, (rank + cp - 1) % cp, hop - 1));
        }
}

// The playbook's pictures, for 4 ranks of 16 tokens.
static void layouts_are_the_playbooks(void **state) {
    (void)state;
    static const int32_t wanted[LAYOUTS][4] = {{4, 5, 6, 7}, {2, 3, 12, 13}, {1, 5, 9, 13}};
    for (int i = 0; i < LAYOUTS; i++) {
        int32_t *tokens = tokens_of(layouts[i], 16, 4, 1);
        assert_int_equal(layouts[i]->count(16, 4, 1), 4);
        assert_memory_equal(tokens, wanted[i], sizeof wanted[i]);
        free(tokens);
    }
}

// If 2 cp divides s, all ranks of the zig-zag layout compute the same amount, half a square in each hop;
// the last rank of the contiguous layout computes almost 2 cp - 1 times as much as the first.
static void zigzag_is_balanced(void **state) {
    (void)state;
    const int64_t s = 1536;
    for (int cp = 1; cp <= MOST_RANKS; cp *= 2) {
        double m = (double)(s / cp);
        for (int rank = 0; rank < cp; rank++) {
            assert_true(sequence_rank_pairs(&sequence_zigzag, s, cp, rank) == (cp * m * m + m) / 2);
            for (int hop = 0; hop < cp; hop++)
                assert_true(sequence_zigzag.pairs(s, cp, rank, hop_owner(cp, rank, hop)) ==
                            (hop ? m * m / 2 : m * (m + 1) / 2));
            assert_true(sequence_rank_pairs(&sequence_contiguous, s, cp, rank) ==
                        (rank + 0.5) * m * m + m / 2);
            assert_true(sequence_rank_pairs(&sequence_striped, s, cp, rank) ==
                        cp * m * m / 2 + m * (rank + 1 - cp / 2.0));
        }
    }
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_token_has_one_owner),
        cmocka_unit_test(closed_forms_count_every_pair),
        cmocka_unit_test(tiles_are_counted_as_one_by_one),
        cmocka_unit_test(tiles_that_do_not_ascend_are_counted_too),
        cmocka_unit_test(rows_are_taken),
        cmocka_unit_test(layouts_are_the_playbooks),
        cmocka_unit_test(keys_go_round_the_ring),
        cmocka_unit_test(zigzag_is_balanced),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
