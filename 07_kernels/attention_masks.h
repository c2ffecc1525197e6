// attention_masks.h: masks by tokens, what holds the kernels of FlashAttention with them against the CPU,
// and what they save.
//
//     PACKED     documents of random lengths, one after another; queries and keys are the same tokens
//     ZIG_ZAG    of four chunks of such a sequence, queries are the second and third, as rank 1 of zig-zag
//                has them, and keys the first and, but for its end, the last: rank 0's. No query sees the
//                last, and those of documents that begin later do not see the first. In the second sample
//                the ranks change places: the first queries see no key
//     SHUFFLED   queries and keys in two random orders, and more keys than queries
//
// Lengths fill no tile of 64 tokens, nor a larger one of the kernel, `tile`.
#ifndef ATTENTION_MASKS_H
#define ATTENTION_MASKS_H

#include "attention_reference.h"

enum { PACKED, ZIG_ZAG, SHUFFLED, MASKS };

// One side of a mask, on the host and on the device.
struct TokenSide {
    AttentionPositions host;
    Array<int32_t> positions, documents;
    Array<TileBounds> bounds;

    explicit TokenSide(const AttentionPositions &p)
        : host(p),
          positions(p.position, p.b * p.s),
          documents(p.document, p.b * p.s),
          bounds(p.bound, p.b * p.tiles) {}
    ~TokenSide() { attention_positions_free(&host); }
    ChunkTokens tokens() const { return {host.s, host.tiles, positions.at, documents.at, bounds.at}; }
};

// b samples of as many tokens, one after another.
static inline AttentionPositions positions_of(int64_t b, const std::vector<Token> &tokens) {
    std::vector<int32_t> position, document;
    for (Token t : tokens) position.push_back(t.position), document.push_back(t.document);
    return attention_positions_new(b, (int64_t)tokens.size() / b, position.data(), document.data());
}

// A sequence of documents whose lengths are random, about `length` on average.
static inline std::vector<Token> packed_tokens(int64_t count, int64_t length, int stream) {
    std::vector<Token> tokens;
    float *random = kernels_numbers(count, 1.25 * (double)length, stream);
    for (int document = 0; (int64_t)tokens.size() < count; document++)
        for (int64_t left = 1 + (int64_t)fabsf(random[document]); left && (int64_t)tokens.size() < count;
             left--)
            tokens.push_back({(int32_t)tokens.size(), document});
    free(random);
    return tokens;
}

static inline void shuffle(std::vector<Token> *tokens, int stream) {
    float *random = kernels_numbers((int64_t)tokens->size(), 1, stream);
    std::vector<std::pair<float, Token>> order;
    for (size_t i = 0; i < tokens->size(); i++) order.push_back({random[i], (*tokens)[i]});
    std::sort(order.begin(), order.end(), [](const auto &x, const auto &y) { return x.first < y.first; });
    for (size_t i = 0; i < tokens->size(); i++) (*tokens)[i] = order[i].second;
    free(random);
}

static inline std::vector<Token> tokens_of_sample(int mask, bool keys, int64_t tile, int sample) {
    const int64_t chunk = tile + 3;
    std::vector<Token> all = packed_tokens(4 * chunk, tile, 20 + sample);
    if (mask == PACKED && sample == 0) {
        // One document has all keys of the first tile and ends amid a later tile of queries.
        for (Token &t : all) t.document = t.position < tile * 3 / 2 + 5 ? 0 : t.document + 1;
    } else if (mask == ZIG_ZAG) {
        std::vector<Token> own;
        for (int64_t c : {keys == !sample ? 0 : 1, keys == !sample ? 3 : 2})
            own.insert(own.end(), all.begin() + c * chunk, all.begin() + (c + 1) * chunk);
        all.swap(own);
    } else if (mask == SHUFFLED) {
        shuffle(&all, 30 + 2 * sample + keys);
    }
    all.resize((size_t)(mask == PACKED              ? 2 * tile + 3
                        : mask == SHUFFLED && !keys ? chunk
                                                    : 2 * chunk - 5 * keys));
    return all;
}

struct MaskedCase {
    TokenSide queries, keys;
    AttentionMask mask;

    MaskedCase(const AttentionPositions &q, const AttentionPositions &k)
        : queries(q), keys(k), mask(attention_mask(&queries.host, &keys.host)) {}
    TokenHeads shape(int64_t a, int64_t kv, int d) const {
        return {{queries.host.b, queries.host.s, a, kv, 1 / sqrtf((float)d), 0},
                queries.tokens(),
                keys.tokens()};
    }
};

static inline AttentionPositions side_of(int mask, bool keys, int64_t tile) {
    std::vector<Token> tokens = tokens_of_sample(mask, keys, tile, 0);
    const std::vector<Token> more = tokens_of_sample(mask, keys, tile, 1);
    tokens.insert(tokens.end(), more.begin(), more.end());
    return positions_of(2, tokens);
}

// Of count tokens from `first` on, of the sample.
static inline TileBounds bounds_on_host(const AttentionPositions &p, int64_t sample, int64_t first,
                                        int64_t count) {
    const int32_t *position = p.position + sample * p.s, *document = p.document + sample * p.s;
    const int64_t end = std::min(first + count, p.s);
    const auto x = std::minmax_element(position + first, position + end);
    const auto y = std::minmax_element(document + first, document + end);
    return {*x.first, *x.second, *y.first, *y.second};
}

// Pairs of so many queries and keys, of all samples, that a kernel with such tiles has to compute; for 64
// of both they are mask.tiles.
static inline int64_t pairs_seen(const AttentionMask &mask, int64_t queries, int64_t keys) {
    int64_t pairs = 0;
    for (int64_t sample = 0; sample < mask.queries->b; sample++)
        for (int64_t i = 0; i < mask.queries->s; i += queries)
            for (int64_t j = 0; j < mask.keys->s; j += keys)
                pairs += attention_tile(bounds_on_host(*mask.queries, sample, i, queries),
                                        bounds_on_host(*mask.keys, sample, j, keys)) != TILE_EMPTY;
    return pairs;
}

// Sets the keys in tiles that no query sees to NaN. Returns how many there are.
template <class T>
int64_t spoil_unseen(const Array<T> &x, const AttentionMask &mask, int64_t tile) {
    const AttentionPositions &q = *mask.queries, &k = *mask.keys;
    const int64_t width = x.count / (k.b * k.s);
    int64_t unseen = 0;
    for (int64_t sample = 0; sample < k.b; sample++)
        for (int64_t j = 0; j < k.s; j += tile) {
            const TileBounds bounds = bounds_on_host(k, sample, j, tile);
            bool seen = false;
            for (int64_t i = 0; i < q.s; i += tile)
                seen |= attention_tile(bounds_on_host(q, sample, i, tile), bounds) != TILE_EMPTY;
            if (seen) continue;
            const int64_t count = std::min(tile, k.s - j);
            const std::vector<T> none((size_t)(count * width), static_cast<T>(NAN));
            CUDA_CHECK(cudaMemcpy(x.at + (sample * k.s + j) * width, none.data(), none.size() * sizeof(T),
                                  cudaMemcpyHostToDevice));
            unseen += count;
        }
    return unseen;
}

// So that elements that a kernel does not write show.
template <class T>
void fill_with_nan(const Array<T> &x) {
    const std::vector<T> none((size_t)x.count, static_cast<T>(NAN));
    CUDA_CHECK(cudaMemcpy(x.at, none.data(), none.size() * sizeof(T), cudaMemcpyHostToDevice));
}

// -inf, of rows without a key, as 0: so that the others can be compared.
template <class T>
std::vector<T> without_infinity(std::vector<T> x) {
    for (T &y : x)
        if (y == -(T)INFINITY) y = 0;
    return x;
}

// The kernels of fp16 differ from bf16's in conversions alone: under emulation one mask has to do for them.
struct __half;  // programs in f32 do not include it
template <class T>
constexpr int first_mask() {
    return !ON_GPU && std::is_same<T, __half>::value ? SHUFFLED : PACKED;
}

// Forward by launch(o, lse, q, k, v, shape), in T, for each mask; twice, the second time in another order
// of blocks and threads where the emulator runs them, and with NaN in keys that nobody sees.
template <class T = float, class Launch>
Proof prove_masked_forward(int d, int64_t tile, Launch launch) {
    Proof proof, logs;
    for (int m = first_mask<T>(); m < MASKS; m++) {
        const MaskedCase it(side_of(m, false, tile), side_of(m, true, tile));
        const TokenHeads n = it.shape(2, 1, d);
        const int64_t queries = n.b * n.s * n.a * d, keys = n.b * n.keys.s * n.kv * d;
        const Numbers<T> q(queries, 1, 4), k(keys, 2), v(keys, 3);
        Array<T> d_q(q.narrow.data(), queries), d_k(k.narrow.data(), keys), d_v(v.narrow.data(), keys);
        Array<T> o(queries);
        Array<float> lse(n.b * n.a * n.s);
        fill_with_nan(o), fill_with_nan(lse);
        launch(o.at, lse.at, d_q.at, d_k.at, d_v.at, n);
        const float *in[] = {q.exact.data(), k.exact.data(), v.exact.data()};
        const auto cpu = attention_on_cpu<float, T>(n, d, in[0], in[1], in[2], NULL, &it.mask);
        const auto right = attention_on_cpu<double>(n, d, in[0], in[1], in[2], NULL, &it.mask);
        const std::vector<float> once = in_f32(o), once_lse = lse.host();
        proof.hold(once, cpu.o, right.o);
        logs.hold(without_infinity(once_lse), without_infinity(cpu.lse), without_infinity(right.lse));
        const int64_t unseen = spoil_unseen(d_k, it.mask, tile);
        spoil_unseen(d_v, it.mask, tile);
        report_that(m != ZIG_ZAG || unseen, "no key is unseen, so that NaN proves nothing");
        emulator_order(7);
        launch(o.at, lse.at, d_q.at, d_k.at, d_v.at, n);
        emulator_order(0);
        report_that(in_f32(o) == once && lse.host() == once_lse,
                    "mask %d: two runs differ, the second with NaN in %lld keys that nobody sees", m,
                    (long long)unseen);
    }
    report_that(logs.error <= logs.bound, "masked: lse is off by %.1e, where %.1e is allowed", logs.error,
                logs.bound);
    return proof;
}

// Backward by launch(gradients, operands, room, shape), in T, of o and lse that are the CPU's; as forward.
template <class T = float, class Launch>
Proof prove_masked_backward(int d, int64_t tile, Launch launch) {
    Proof proof;
    for (int m = first_mask<T>(); m < MASKS; m++) {
        const MaskedCase it(side_of(m, false, tile), side_of(m, true, tile));
        const TokenHeads n = it.shape(2, 1, d);
        const int64_t queries = n.b * n.s * n.a * d, keys = n.b * n.keys.s * n.kv * d;
        const Numbers<T> q(queries, 1, 4), k(keys, 2), v(keys, 3), grad_o(queries, 5);
        const float *x[] = {q.exact.data(), k.exact.data(), v.exact.data(), grad_o.exact.data()};
        const auto cpu = attention_on_cpu<float, T>(n, d, x[0], x[1], x[2], x[3], &it.mask);
        const auto right = attention_on_cpu<double>(n, d, x[0], x[1], x[2], x[3], &it.mask);
        const std::vector<T> narrow_o(cpu.o.begin(), cpu.o.end());
        Array<T> d_q(q.narrow.data(), queries), d_k(k.narrow.data(), keys), d_v(v.narrow.data(), keys);
        Array<T> d_do(grad_o.narrow.data(), queries), o(narrow_o.data(), queries);
        Array<float> lse(cpu.lse.data(), n.b * n.a * n.s), room(backward_room(n, d));
        Array<T> dq(queries), dk(keys), dv(keys);
        const GradientsIn<T> grad = {dq.at, dk.at, dv.at};
        const OperandsIn<T> in = {d_q.at, d_k.at, d_v.at, o.at, lse.at, d_do.at};
        fill_with_nan(dq), fill_with_nan(dk), fill_with_nan(dv);
        launch(grad, in, room.at, n);
        const std::vector<float> once[] = {in_f32(dq), in_f32(dk), in_f32(dv)};
        proof.hold(once[0], cpu.dq, right.dq);
        proof.hold(once[1], cpu.dk, right.dk);
        proof.hold(once[2], cpu.dv, right.dv);
        spoil_unseen(d_k, it.mask, tile);
        spoil_unseen(d_v, it.mask, tile);
        emulator_order(7);
        launch(grad, in, room.at, n);
        emulator_order(0);
        report_that(in_f32(dq) == once[0] && in_f32(dk) == once[1] && in_f32(dv) == once[2],
                    "mask %d: two runs differ, the second with NaN in keys that nobody sees", m);
    }
    return proof;
}

// The line of such a proof for the version `name`, whose row in the table shows another one.
static inline void masks_hold(const char *name, const Proof &masked) {
    report_that(masked.error <= masked.bound, "%s: with masks by tokens the error is %.1e, and may be %.1e",
                name, masked.error, masked.bound);
}

// What is counted of a launch, and what the tiles that are not empty take.
struct TileCount {
    const char *what;
    double counted, right;
};
static inline void hold_tiles(const char *name, std::initializer_list<TileCount> counts) {
    for (const TileCount &c : counts)
        report_that(ON_GPU || c.counted == c.right, "%s: %.0f %s; the tiles that are not empty take %.0f",
                    name, c.counted, c.what, c.right);
}

enum { UNSEEING = 128 };  // queries before the first key

// Tensor cores multiply tiles that are not empty, and no other: launch(x, out, lse, room, shape) takes its
// operands from x, and has `products` of 64 x 64 x d for each tile. out begins with o, or dq: 0 of queries
// that see no key.
template <class T, class Launch>
void products_of_tiles(const char *name, int d, int products, Launch launch) {
    const std::vector<Token> tokens = packed_tokens(512, 100, 40);
    const std::vector<Token> later(tokens.begin() + UNSEEING, tokens.end());
    const MaskedCase it(positions_of(1, tokens), positions_of(1, later));
    const TokenHeads n = it.shape(1, 1, d);
    const Numbers<T> numbers(n.s * d, 4);
    Array<T> x(numbers.narrow.data(), n.s * d), out(3 * n.s * d);
    Array<float> lse(numbers.exact.data(), n.s), room(backward_room(n, d));
    const Work work = counted([&] { launch(x.at, out.at, lse.at, room.at, n); });
    const double flops = 2.0 * products * ATTENTION_TILE * ATTENTION_TILE * d * (double)it.mask.tiles;
    report_that(ON_GPU || work.tensor_flops == flops,
                "%s: with documents the tensor cores do %.0f FLOPs, and %.0f for the tiles that are seen",
                name, work.tensor_flops, flops);
    const std::vector<float> first = in_f32(out);
    report_that(std::all_of(first.begin(), first.begin() + UNSEEING * d, [](float y) { return y == 0; }),
                "%s: queries that see no key have other than 0", name);
}

// ---- what a mask saves ----

// Eight documents one after another, in one sample of `count` tokens.
static inline AttentionPositions eight_documents(int64_t count) {
    std::vector<Token> tokens;
    for (int64_t i = 0; i < count; i++) tokens.push_back({(int32_t)i, (int32_t)(i * 8 / count)});
    return positions_of(1, tokens);
}

// One line: the modelled time of formula(shape, mask) for eight documents beside that of a causal mask.
// counted: the kernel's work for random documents, `it`, which the same formula must tell but for the loads
// of the mask itself: what is done, and what is copied to shared memory, is of tiles that are not empty.
template <class Formula>
void show_masked(const Heads &at_size, const Proof &proof, const MaskedCase &it, const TokenHeads &small,
                 const Work &counted, int registers, Formula formula) {
    masks_hold("masked", proof);
    const Work tiles = formula(small, it.mask);
    hold_tiles("masked", {{"FLOPs", counted.flops, tiles.flops},
                          {"special instructions", counted.special_instructions,
                           tiles.special_instructions},
                          {"FLOPs of tensor cores", counted.tensor_flops, tiles.tensor_flops},
                          {"passes of shared memory", counted.shared_passes, tiles.shared_passes},
                          {"barriers", counted.barriers, tiles.barriers},
                          {"store requests", counted.store_requests, tiles.store_requests}});
    Heads causal = at_size;
    causal.causal = 1, causal.b = 1;
    const MaskedCase eight(eight_documents(causal.s), eight_documents(causal.s));
    const MaskedCase one(attention_positions_whole(1, causal.s), attention_positions_whole(1, causal.s));
    const Work work = formula(causal, eight.mask), all = formula(causal, one.mask);
    say("8 documents of %lld tokens, masked: %.4g ms in place of %.4g; the mask adds %.0f%% to what is "
        "loaded",
        (long long)causal.s / 8, 1e3 * gpu_time(kernels_gpu(), &work).seconds,
        1e3 * gpu_time(kernels_gpu(), &all).seconds,
        ON_GPU ? 0 : 100 * (counted.load_sectors / tiles.load_sectors - 1));
    report_number("masked", "registers", registers, "");
}

// In T; launch and tile as in prove_masked_forward.
template <class T = float, class Launch, class Formula>
void show_masked_forward(const Heads &at_size, int d, int64_t tile, int registers, Launch launch,
                         Formula formula) {
    const Proof proof = prove_masked_forward<T>(d, tile, launch);
    const std::vector<Token> tokens = packed_tokens(4 * tile, tile, 40);
    const MaskedCase it(positions_of(1, tokens), positions_of(1, tokens));
    const TokenHeads small = it.shape(1, 1, d);
    const Numbers<T> numbers(small.s * d, 4);
    Array<T> x(numbers.narrow.data(), small.s * d), o(small.s * d);
    Array<float> lse(small.s);
    const Work work = counted([&] { launch(o.at, lse.at, x.at, x.at, x.at, small); });
    show_masked(at_size, proof, it, small, work, registers, formula);
}

// In T; launch and tile as in prove_masked_backward.
template <class T = float, class Launch, class Formula>
void show_masked_backward(const Heads &at_size, int d, int64_t tile, int registers, Launch launch,
                          Formula formula) {
    const Proof proof = prove_masked_backward<T>(d, tile, launch);
    const std::vector<Token> tokens = packed_tokens(4 * tile, tile, 40);
    const MaskedCase it(positions_of(1, tokens), positions_of(1, tokens));
    const TokenHeads small = it.shape(1, 1, d);
    const Numbers<T> numbers(small.s * d, 4);
    Array<T> x(numbers.narrow.data(), small.s * d), dq(x.count), dk(x.count), dv(x.count);
    Array<float> lse(numbers.exact.data(), small.s), room(backward_room(small, d));
    const Work work = counted([&] {
        launch({dq.at, dk.at, dv.at}, {x.at, x.at, x.at, x.at, lse.at, x.at}, room.at, small);
    });
    show_masked(at_size, proof, it, small, work, registers, formula);
}

#endif
