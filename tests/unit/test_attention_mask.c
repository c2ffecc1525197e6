// test_attention_mask.c: what a mask calls empty, full and visible, against each pair of tokens.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "chunks.h"

static const int64_t lengths[] = {1, 2, 31, 64, 97, 129};
enum { LENGTHS = 6 };

// The mask's counts, and what it calls empty or full, against each of the pairs.
static void masks_count_what_is_seen(void **state) {
    (void)state;
    for (int i = 0; i < LENGTHS * LENGTHS; i++) {
        int64_t b = 1 + i % 2, s_q = lengths[i / LENGTHS] * 2, s_k = lengths[i % LENGTHS] * 2;
        int32_t document = i % 4 == 0 ? 70 : i % 4 == 1 ? 13 : 0;
        Tokens tq = i % 3 ? tokens_in_order(b, s_q) : shuffled_tokens(b, s_q, 0, document, 1);
        Tokens tk = i % 3 == 1 ? tokens_in_order(b, s_k) : shuffled_tokens(b, s_k, i % 5, document, 2);
        AttentionPositions q = attention_positions_new(b, s_q, tq.position, tq.document);
        AttentionPositions k = attention_positions_new(b, s_k, tk.position, tk.document);
        AttentionMask mask = attention_mask(&q, &k);
        double pairs = 0, entries = 0;
        int64_t computed = 0, whole = 0;
        for (int64_t tile = 0; tile < b * q.tiles * k.tiles; tile++) {
            int64_t sample = tile / (q.tiles * k.tiles),
                    left = tile % (q.tiles * k.tiles) / k.tiles * ATTENTION_TILE;
            int64_t top = tile % k.tiles * ATTENTION_TILE, seen = 0, asked = 0;
            for (int64_t x = left; x < s_q && x < left + ATTENTION_TILE; x++)
                for (int64_t y = top; y < s_k && y < top + ATTENTION_TILE; y++, asked++)
                    seen += sees(&tq, sample * s_q + x, &tk, sample * s_k + y);
            TileState state_now = attention_tile(q.bound[sample * q.tiles + left / ATTENTION_TILE],
                                                 k.bound[sample * k.tiles + top / ATTENTION_TILE]);
            if (state_now == TILE_EMPTY && seen) fail_msg("an empty tile of %lld pairs", (long long)seen);
            if ((state_now == TILE_FULL) != (seen == asked))
                fail_msg("%lld of %lld pairs are seen in a tile of state %d", (long long)seen,
                         (long long)asked, (int)state_now);
            pairs += (double)seen;
            if (state_now != TILE_EMPTY) computed++, entries += (double)asked;
            whole += state_now == TILE_FULL;
        }
        assert_true(mask.pairs == pairs);
        assert_true(mask.entries == entries);
        assert_int_equal(mask.tiles, computed);
        assert_int_equal(mask.full, whole);
        attention_positions_free(&q);
        attention_positions_free(&k);
        tokens_free(&tq);
        tokens_free(&tk);
    }
}

// Keys before all queries are seen by all of them only if both tiles have tokens of one document.
static void full_tiles_have_one_document(void **state) {
    (void)state;
    const struct {
        TileBounds q, k;
        TileState expected;
    } cases[] = {
        {{64, 94, 1, 1}, {50, 63, 1, 1}, TILE_FULL},
        {{64, 94, 1, 1}, {0, 49, 0, 0}, TILE_EMPTY},
        {{64, 94, 1, 1}, {0, 63, 0, 1}, TILE_PARTIAL},   // keys of the document before
        {{40, 103, 0, 2}, {0, 32, 0, 0}, TILE_PARTIAL},  // queries of later documents
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(attention_tile(cases[i].q, cases[i].k), cases[i].expected);
}

// A causal sequence: tiles right of the diagonal are empty, those left of it full, in numbers given by a
// formula.
static void causal_tiles_are_half_of_all(void **state) {
    (void)state;
    for (int64_t tiles = 1; tiles < 6; tiles++)
        for (int64_t s = (tiles - 1) * ATTENTION_TILE + 1; s <= tiles * ATTENTION_TILE; s += 21) {
            AttentionPositions p = attention_positions_whole(2, s);
            AttentionMask mask = attention_mask(&p, &p);
            assert_true(mask.pairs == (double)(s * (s + 1)));
            assert_int_equal(mask.tiles, tiles * (tiles + 1));
            // A last tile of a single token is full, too.
            assert_int_equal(mask.full, tiles * (tiles - 1) + 2 * (s % ATTENTION_TILE == 1));
            attention_positions_free(&p);
        }
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(masks_count_what_is_seen),
        cmocka_unit_test(full_tiles_have_one_document),
        cmocka_unit_test(causal_tiles_are_half_of_all),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
