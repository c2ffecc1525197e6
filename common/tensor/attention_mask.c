// attention_mask.c: positions and documents of tokens on host and device, and the work that a mask leaves.
#include "attention_mask.h"

#include <stdlib.h>
#include <string.h>

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- tokens ----

static TileBounds bounds_of(const int32_t *position, const int32_t *document, int64_t count) {
    TileBounds it = {position[0], position[0], document[0], document[0]};
    for (int64_t i = 1; i < count; i++) {
        if (position[i] < it.first_position) it.first_position = position[i];
        if (position[i] > it.last_position) it.last_position = position[i];
        if (document[i] < it.first_document) it.first_document = document[i];
        if (document[i] > it.last_document) it.last_document = document[i];
    }
    return it;
}

// Whether a sample's tokens have the positions and documents of the sample before it.
static bool repeats(const AttentionPositions *p, int64_t sample) {
    if (sample == 0) return false;
    const int64_t at = sample * p->s, before = at - p->s;
    const size_t bytes = (size_t)p->s * sizeof *p->position;
    return !memcmp(p->position + at, p->position + before, bytes) &&
           !memcmp(p->document + at, p->document + before, bytes);
}

static Tensor on_device(const void *host, int64_t rows, int64_t columns) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, I32, SHAPE(rows, columns));
    tensor_from_host(t, host);
    return t;
}

AttentionPositions attention_positions_new(int64_t b, int64_t s, const int32_t *position,
                                           const int32_t *document) {
    AttentionPositions p = {.b = b, .s = s, .tiles = (s + ATTENTION_TILE - 1) / ATTENTION_TILE};
    const size_t bytes = (size_t)(b * s) * sizeof *position;
    p.position = host_alloc(bytes);
    p.document = host_alloc(bytes);
    p.bound = host_alloc((size_t)(b * p.tiles) * sizeof *p.bound);
    if (bytes && position) memcpy(p.position, position, bytes);
    for (int64_t i = 0; i < b * s && !position; i++) p.position[i] = (int32_t)(i % s);
    if (bytes && document) memcpy(p.document, document, bytes);
    else if (bytes) memset(p.document, 0, bytes);
    for (int64_t i = 0; i < b * s && document; i++)
        CHECK(p.document[i] >= 0, "attention_positions: token %lld is of document %d; they count from 0",
              (long long)i, (int)p.document[i]);
    for (int64_t sample = 0; sample < b; sample++) {
        TileBounds *bound = p.bound + sample * p.tiles;
        bool again = repeats(&p, sample);
        for (int64_t tile = 0; tile < p.tiles; tile++) {
            int64_t first = tile * ATTENTION_TILE, at = sample * s + first;
            bound[tile] = again ? bound[tile - p.tiles]
                                : bounds_of(p.position + at, p.document + at,
                                            least(ATTENTION_TILE, s - first));
        }
    }
    p.positions = on_device(p.position, b, s);
    p.documents = on_device(p.document, b, s);
    p.bounds = on_device(p.bound, b * p.tiles, sizeof *p.bound / sizeof(int32_t));
    return p;
}

AttentionPositions attention_positions_whole(int64_t b, int64_t s) {
    return attention_positions_new(b, s, NULL, NULL);
}

void attention_positions_free(AttentionPositions *p) {
    tensor_free(&p->positions);
    tensor_free(&p->documents);
    tensor_free(&p->bounds);
    free(p->position);
    free(p->document);
    free(p->bound);
    *p = (AttentionPositions){0};
}

// ---- pairs ----

// Orders tokens by document, and by position within one.
static int64_t place(int32_t document, int32_t position) {
    return (int64_t)document * (INT64_C(1) << 32) + ((int64_t)position - INT32_MIN);
}

static int by_place(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

// The places of a sample's tokens, in ascending order.
static void sorted_places(int64_t *places, const AttentionPositions *p, int64_t sample) {
    bool sorted = true;
    for (int64_t i = 0; i < p->s; i++) {
        places[i] = place(p->document[sample * p->s + i], p->position[sample * p->s + i]);
        sorted = sorted && (i == 0 || places[i - 1] <= places[i]);
    }
    if (!sorted) qsort(places, (size_t)p->s, sizeof *places, by_place);
}

// Both sides are sorted, so the range of keys that a query sees, from the first of its document to the last
// at its own place, only moves forward.
static double pairs_of_sample(const AttentionPositions *q, const AttentionPositions *k, int64_t sample,
                              int64_t *places) {
    int64_t *queries = places, *keys = places + q->s, first = 0, end = 0;
    double pairs = 0;
    sorted_places(queries, q, sample);
    sorted_places(keys, k, sample);
    for (int64_t i = 0; i < q->s; i++) {
        int64_t document = place((int32_t)(queries[i] >> 32), INT32_MIN);
        while (first < k->s && keys[first] < document) first++;
        while (end < k->s && keys[end] <= queries[i]) end++;
        pairs += end > first ? (double)(end - first) : 0;
    }
    return pairs;
}

// ---- tiles ----

// Whether all are of one document, and no tile goes back to earlier tokens.
static bool ascend(const TileBounds *bound, int64_t tiles) {
    for (int64_t i = 0; i < tiles; i++) {
        const TileBounds before = bound[i > 0 ? i - 1 : 0], now = bound[i];
        if (now.first_document != bound->first_document || now.last_document != bound->first_document ||
            now.first_position < before.first_position || now.last_position < before.last_position)
            return false;
    }
    return true;
}

// If tiles ascend on both sides, each row has the full ones first, then the partial ones, then the empty
// ones, and from row to row neither border moves back: O(tiles), not their square.
static void add_ascending(AttentionMask *mask, const TileBounds *query, const TileBounds *key) {
    const AttentionPositions *q = mask->queries, *k = mask->keys;
    int64_t full = 0, end = 0;
    for (int64_t i = 0; i < q->tiles; i++) {
        while (full < k->tiles && attention_tile(query[i], key[full]) == TILE_FULL) full++;
        while (end < k->tiles && attention_tile(query[i], key[end]) != TILE_EMPTY) end++;
        mask->full += full;
        mask->tiles += end;
        mask->entries +=
            (double)(least(ATTENTION_TILE, q->s - i * ATTENTION_TILE) * least(end * ATTENTION_TILE, k->s));
    }
}

static void add_in_any_order(AttentionMask *mask, const TileBounds *query, const TileBounds *key) {
    const AttentionPositions *q = mask->queries, *k = mask->keys;
    for (int64_t i = 0; i < q->tiles; i++)
        for (int64_t j = 0; j < k->tiles; j++) {
            TileState state = attention_tile(query[i], key[j]);
            if (state == TILE_EMPTY) continue;
            mask->tiles++;
            mask->full += state == TILE_FULL;
            mask->entries += (double)(least(ATTENTION_TILE, q->s - i * ATTENTION_TILE) *
                                      least(ATTENTION_TILE, k->s - j * ATTENTION_TILE));
        }
}

// Counts of one sample's queries and keys are added to mask.
static void add_sample(AttentionMask *mask, int64_t sample, int64_t *places) {
    const AttentionPositions *q = mask->queries, *k = mask->keys;
    const TileBounds *query = q->bound + sample * q->tiles, *key = k->bound + sample * k->tiles;
    mask->pairs += pairs_of_sample(q, k, sample, places);
    if (ascend(query, q->tiles) && ascend(key, k->tiles)) add_ascending(mask, query, key);
    else add_in_any_order(mask, query, key);
}

// ---- the mask ----

// Whether each sample's tokens are neighbours of one document, in order.
static bool in_order(const AttentionPositions *p) {
    for (int64_t sample = 0; sample < p->b; sample++) {
        if (repeats(p, sample)) continue;
        const int32_t *position = p->position + sample * p->s, *document = p->document + sample * p->s;
        for (int64_t i = 1; i < p->s; i++)
            if (position[i] != position[i - 1] + 1 || document[i] != document[i - 1]) return false;
    }
    return true;
}

static MaskShape shape_of(const AttentionMask *mask) {
    const AttentionPositions *q = mask->queries, *k = mask->keys;
    if (q->s != k->s) return MASK_ANY;
    if (mask->full == q->b * q->tiles * k->tiles) return MASK_FULL;
    return q == k && in_order(q) ? MASK_CAUSAL : MASK_ANY;
}

AttentionMask attention_mask(const AttentionPositions *q, const AttentionPositions *k) {
    const AttentionMask none = {.queries = q, .keys = k};
    AttentionMask mask = none, one = none;
    CHECK(q->b == k->b, "attention_mask: queries of %lld samples, keys of %lld", (long long)q->b,
          (long long)k->b);
    int64_t *places = host_alloc((size_t)(q->s + k->s) * sizeof *places);
    for (int64_t sample = 0; sample < q->b; sample++) {
        if (!repeats(q, sample) || !repeats(k, sample)) {  // samples without documents are all alike
            one = none;
            add_sample(&one, sample, places);
        }
        mask.pairs += one.pairs;
        mask.entries += one.entries;
        mask.tiles += one.tiles;
        mask.full += one.full;
    }
    free(places);
    mask.shape = shape_of(&mask);
    return mask;
}
