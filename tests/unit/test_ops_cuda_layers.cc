// test_ops_cuda_layers.cc: the CUDA back end's kernels for the model's layers against the CPU's.
#include "both_backends.h"

// ---- embedding ----

static void embedding_matches(void **state) {
    (void)state;
    // rows, vocabulary, columns: tokens that repeat, only one token, tokens that hardly repeat
    const int64_t sizes[][3] = {{1, 1, 1},        {33, 5, 31},   {1027, 3, 33},
                                {129, 1031, 257}, {65, 1, 1025}, {70, 9, 4099}};
    for (const int64_t *size : sizes)
        for (const DType(&type)[2] : gradient_dtypes) {
            const DType dtype = type[0], to = type[1];
            const int64_t n = size[0], v = size[1], h = size[2];
            const Doubles tokens = whole_numbers(n, v, 1), weight = random_numbers(dtype, v * h, 2);
            const Doubles dy = random_numbers(dtype, n * h, 3), sum = random_numbers(to, v * h, 4);
            const std::vector<int32_t> ids = indices(tokens);
            Doubles y((size_t)(n * h));
            // In order of the rows, in f32 or f64, rounded once: exactly the bits of the CPU.
            std::vector<unsigned char> host((size_t)(v * h) * 8), from((size_t)(n * h) * 8);
            Doubles dweight((size_t)(v * h));
            dtype_convert(host.data(), to, sum.data(), F64, v * h);
            dtype_convert(from.data(), dtype, dy.data(), F64, n * h);
            kernel_embedding_forward(F64, y.data(), ids.data(), weight.data(), n, v, h);
            kernel_embedding_backward(dtype, to, host.data(), from.data(), ids.data(), n, v, h);
            dtype_convert(dweight.data(), F64, host.data(), to, v * h);
            in_every_way("embedding", [&](int shift) {
                Device table(dtype, weight, shift), id(I32, tokens, shift), out(dtype, n * h, shift);
                Device grad(dtype, dy, shift), dw(to, sum, shift);
                cuda_kernel_embedding_forward(dtype, out.at, id.indices(), table.at, n, v, h);
                assert_same("embedding_forward", out, y);
                cuda_kernel_embedding_backward(dtype, to, dw.at, grad.at, id.indices(), n, v, h);
                assert_same("embedding_backward", dw, dweight);
                return dw.stored("embedding_backward");
            });
        }
}

// ---- RMSNorm ----

static void rmsnorm_matches(void **state) {
    (void)state;
    // Columns around warps and packs, and more than shared memory holds: of a row; of a row's sums in
    // f32. Rows that share a block.
    const int64_t sizes[][2] = {{1, 1}, {3, 31}, {33, 33}, {5, 1025}, {1027, 67}, {2, 13001}, {1, 26000}};
    for (const int64_t *size : sizes)
        for (const DType(&type)[2] : gradient_dtypes) {
            const DType dtype = type[0], to = type[1];
            const int64_t n = size[0], h = size[1];
            if (n > 1000 && is_narrow(dtype)) continue;
            if (h > 2000 && dtype != F32 && to != BF16) continue;
            const DType wide = full(dtype);
            const double eps = 0.75;
            Doubles x = random_numbers(dtype, n * h, 1), weight = random_numbers(dtype, h, 2);
            Doubles dy = random_numbers(dtype, n * h, 3), dresidual = random_numbers(dtype, n * h, 4);
            Doubles sum = random_numbers(to, h, 5), y((size_t)(n * h)), rstd((size_t)n), dx = y,
                    dx_alone = y;
            Doubles dweight = sum, dweight_alone = sum;
            kernel_rmsnorm_forward(F64, y.data(), rstd.data(), x.data(), weight.data(), n, h, eps);
            Doubles r = rounded(wide, rstd);
            kernel_rmsnorm_backward(F64, dx.data(), F64, dweight.data(), dresidual.data(), dy.data(),
                                    x.data(), weight.data(), r.data(), n, h);
            kernel_rmsnorm_backward(F64, dx_alone.data(), F64, dweight_alone.data(), NULL, dy.data(),
                                    x.data(), weight.data(), r.data(), n, h);
            in_every_way("rmsnorm", [&](int shift) {
                Device xs(dtype, x, shift), ws(dtype, weight, shift), out(dtype, n * h, shift),
                    rs(wide, n, shift);
                cuda_kernel_rmsnorm_forward(dtype, out.at, rs.at, xs.at, ws.at, n, h, eps);
                assert_close("rmsnorm_forward's y", out, y, (double)h + 6);
                assert_close("rmsnorm_forward's rstd", rs, rstd, (double)h + 4);
                Device given(wide, r, shift), dys(dtype, dy, shift), residual(dtype, dresidual, shift);
                Device dw(to, sum, shift), dw_alone(to, sum, shift), d(dtype, n * h, shift);
                cuda_kernel_rmsnorm_backward(dtype, d.at, to, dw.at, residual.at, dys.at, xs.at, ws.at,
                                             given.at, n, h);
                // For h = 1 the two terms of dx are nearly equal: 1 - r^2 x^2 loses what they share.
                assert_close("rmsnorm_backward's dx", d, dx, 8 * ((double)h + 8));
                assert_close("rmsnorm_backward's dweight", dw, dweight, (double)n + 4);
                std::vector<unsigned char> bits = out.stored("rmsnorm_forward");
                add_bytes(&bits, "rmsnorm_backward", d);
                add_bytes(&bits, "rmsnorm_backward", dw);
                // dx over dresidual, and without one over dy
                cuda_kernel_rmsnorm_backward(dtype, residual.at, to, dw_alone.at, residual.at, dys.at,
                                             xs.at, ws.at, given.at, n, h);
                assert_same("rmsnorm_backward over dresidual", residual, d.read("dx"));
                assert_same("rmsnorm_backward's dweight", dw_alone, dw.read("dweight"));
                cuda_kernel_rmsnorm_backward(dtype, dys.at, to, dw_alone.at, NULL, dys.at, xs.at, ws.at,
                                             given.at, n, h);
                assert_close("rmsnorm_backward over dy", dys, dx_alone, 8 * ((double)h + 8));
                return bits;
            });
        }
}

// ---- RoPE ----

static void rope_matches(void **state) {
    (void)state;
    const int64_t sizes[][3] = {{1, 1, 2}, {3, 5, 6}, {17, 3, 34}, {65, 9, 64}, {33, 2, 128}};
    for (const int64_t *size : sizes)
        for (DType dtype : all_dtypes)
            for (int shift = 0; shift < 2; shift++) {
                const int64_t n = size[0], heads = size[1], d = size[2];
                Doubles x = random_numbers(dtype, n * heads * d, 1), positions = whole_numbers(n, 5003, 2),
                        want = x;
                Device at(I32, positions, shift), to(dtype, x, shift);
                const int direction = shift ? -1 : 1;
                const Rope rope = {shift ? 500000.0 : 10000.0, n == 3 ? 8.0 : 1.0, 1, 4, 40};
                kernel_rope(F64, want.data(), indices(positions).data(), n, heads, d, rope, direction);
                cuda_kernel_rope(dtype, to.at, at.indices(), n, heads, d, rope, direction);
                assert_close("rope", to, want, dtype == F64 ? 8 : 4);
            }
}

// ---- attention ----

static void attention_matches(void **state) {
    (void)state;
    const AttentionShape shapes[] = {
        {1, 1, 1, 1, 1}, {2, 31, 6, 2, 17}, {1, 65, 3, 3, 64}, {1, 271, 2, 1, 8}};
    for (const AttentionShape &s : shapes)
        for (DType dtype : all_dtypes) {
            if (s.s > 100 && dtype != BF16 && dtype != F64) continue;
            const int64_t n = s.b * s.s, a = s.heads * s.head_size, kv = s.kv_heads * s.head_size;
            const int64_t pairs = s.b * s.heads * s.s * s.s;
            Doubles q = random_numbers(dtype, n * a, 1), k = random_numbers(dtype, n * kv, 2);
            Doubles v = random_numbers(dtype, n * kv, 3), d_o = random_numbers(dtype, n * a, 4);
            Doubles o((size_t)(n * a)), p((size_t)pairs), dq = o, dk((size_t)(n * kv)), dv = dk;
            kernel_attention_forward(F64, o.data(), p.data(), q.data(), k.data(), v.data(), s);
            // Above the diagonal a back end may leave anything.
            auto clear = [&](Doubles &probs) {
                for (int64_t i = 0; i < pairs; i++)
                    if (i % s.s > i / s.s % s.s) probs[(size_t)i] = 0;
            };
            clear(p);
            Doubles stored_p = rounded(dtype, p);
            kernel_attention_backward(F64, dq.data(), dk.data(), dv.data(), d_o.data(), q.data(), k.data(),
                                      v.data(), stored_p.data(), s);
            // A score has d rounding errors; 16-bit operands are rounded once more.
            const double operand = is_narrow(dtype) ? rounding(dtype) / rounding(F32) : 0;
            const double roundings = 8 * ((double)s.head_size + 2) + (double)s.s;
            const double backward = 4 * ((double)(s.s + s.head_size) + 2) + operand;
            in_every_way(
                "attention",
                [&](int shift) {
                    Device qs(dtype, q, shift), ks(dtype, k, shift), vs(dtype, v, shift),
                        dos(dtype, d_o, shift);
                    Device os(dtype, n * a, shift), ps(dtype, pairs, shift), again(dtype, pairs, shift);
                    cuda_kernel_attention_forward(dtype, os.at, ps.at, qs.at, ks.at, vs.at, s);
                    assert_close("attention_forward's o", os, o, roundings + operand);
                    Doubles got = ps.read("probs");
                    clear(got);
                    assert_close("attention_forward's probs", Device(dtype, got), p, roundings);
                    cuda_kernel_attention_probs(dtype, again.at, qs.at, ks.at, s);
                    Doubles twice = again.read("probs");
                    clear(twice);
                    if (twice != got) fail_msg("attention_probs and attention_forward have other bits");
                    Device given(dtype, stored_p, shift), dqs(dtype, n * a, shift);
                    Device dks(dtype, n * kv, shift), dvs(dtype, n * kv, shift);
                    cuda_kernel_attention_backward(dtype, dqs.at, dks.at, dvs.at, dos.at, qs.at, ks.at,
                                                   vs.at, given.at, s);
                    assert_close("attention_backward's dv", dvs, dv, backward);
                    if (s.s > 1) {  // a single token has only the gradient of v
                        assert_close("attention_backward's dq", dqs, dq, backward);
                        assert_close("attention_backward's dk", dks, dk, backward);
                    }
                    cuda_kernel_attention_backward(dtype, qs.at, ks.at, vs.at, dos.at, qs.at, ks.at, vs.at,
                                                   given.at, s);
                    assert_same("attention_backward over q", qs, dqs.read("dq"));
                    assert_same("attention_backward over k", ks, dks.read("dk"));
                    assert_same("attention_backward over v", vs, dvs.read("dv"));
                    std::vector<unsigned char> bits = os.stored("attention_forward");
                    add_bytes(&bits, "attention_backward", dqs);
                    add_bytes(&bits, "attention_backward", dks);
                    return bits;
                },
                true);
        }
}

// ---- attention over a part of the keys ----

// Positions of one sample, in order from `first` on; documents of 50 tokens.
struct Side {
    std::vector<int32_t> positions, documents, bounds;
    int64_t s, tiles;

    Side(int64_t s, int32_t first) : s(s), tiles((s + ATTENTION_TILE - 1) / ATTENTION_TILE) {
        for (int64_t i = 0; i < s; i++) {
            positions.push_back(first + (int32_t)i);
            documents.push_back(positions.back() / 50);
        }
        for (int64_t i = 0; i < s; i += ATTENTION_TILE) {
            const size_t last = (size_t)std::min(i + ATTENTION_TILE, s) - 1;
            const int32_t tile[] = {positions[(size_t)i], positions[last], documents[(size_t)i],
                                    documents[last]};
            bounds.insert(bounds.end(), tile, tile + 4);
        }
    }
    ChunkTokens tokens(const void *positions, const void *documents, const void *bounds) const {
        return {s, tiles, (const int32_t *)positions, (const int32_t *)documents,
                (const TileBounds *)bounds};
    }
    ChunkTokens on_host() const { return tokens(positions.data(), documents.data(), bounds.data()); }
};

static void attention_chunk_matches(void **state) {
    (void)state;
    // Queries in the middle of the keys: some see none of a tile, some all of it. In the last two, all keys
    // come before the queries; queries are of two documents and keys of the first of them, or the other way
    // round.
    const struct {
        int64_t s_q, s_k, heads, kv_heads, d;
        int32_t first;  // position of the first query
    } shapes[] = {{1, 1, 1, 1, 1, 0},
                  {65, 33, 2, 1, 5, 16},
                  {31, 129, 3, 3, 64, 64},
                  {40, 33, 1, 1, 2, 40},
                  {31, 64, 1, 1, 2, 64}};
    for (const auto &shape : shapes)
        for (DType dtype : all_dtypes) {
            const Side sq(shape.s_q, shape.first), sk(shape.s_k, 0);
            const AttentionChunk at = {1, shape.heads, shape.kv_heads, shape.d, sq.on_host(), sk.on_host(),
                                       {}};
            const AttentionHeads heads = {shape.heads, shape.kv_heads, shape.d};
            const int64_t rows = shape.s_q * shape.heads, queries = rows * shape.d;
            const int64_t keys = shape.s_k * shape.kv_heads * shape.d;
            Doubles q = random_numbers(dtype, queries, 1), k = random_numbers(dtype, keys, 2);
            Doubles v = random_numbers(dtype, keys, 3), d_o = random_numbers(dtype, queries, 4);
            // What an earlier chunk left
            Doubles o = random_numbers(full(dtype), queries, 5), lse = random_numbers(full(dtype), rows, 6);
            Doubles dq = random_numbers(full(dtype), queries, 7), dk = random_numbers(full(dtype), keys, 8);
            Doubles dv = random_numbers(full(dtype), keys, 9), dots((size_t)rows);
            const Doubles before[] = {o, lse, dq, dk, dv};
            kernel_attention_chunk_forward(F64, o.data(), lse.data(), q.data(), k.data(), v.data(), at);
            kernel_attention_chunk_dots(F64, dots.data(), F64, o.data(), d_o.data(), shape.s_q, heads);
            kernel_attention_chunk_backward(F64, dq.data(), dk.data(), dv.data(), d_o.data(), q.data(),
                                            k.data(), v.data(), lse.data(), dots.data(), at);
            const double roundings = 8 * ((double)shape.d + 2) + (double)(shape.s_k + shape.s_q);
            in_every_way(
                "attention_chunk",
                [&](int shift) {
                    Device qp(I32, numbers(sq.positions)), qd(I32, numbers(sq.documents));
                    Device kp(I32, numbers(sk.positions)), kd(I32, numbers(sk.documents));
                    Device qb(I32, numbers(sq.bounds)), kb(I32, numbers(sk.bounds));
                    AttentionChunk there = at;
                    there.queries = sq.tokens(qp.at, qd.at, qb.at);
                    there.keys = sk.tokens(kp.at, kd.at, kb.at);
                    Device qs(dtype, q, shift), ks(dtype, k, shift), vs(dtype, v, shift),
                        dos(dtype, d_o, shift);
                    Device os(full(dtype), before[0], shift), ls(full(dtype), before[1], shift);
                    cuda_kernel_attention_chunk_forward(dtype, os.at, ls.at, qs.at, ks.at, vs.at, there);
                    assert_close("attention_chunk_forward's o", os, o, roundings);
                    assert_close("attention_chunk_forward's lse", ls, lse, roundings);
                    Device ds(full(dtype), rows, shift), dqs(full(dtype), before[2], shift);
                    Device dks(full(dtype), before[3], shift), dvs(full(dtype), before[4], shift);
                    cuda_kernel_attention_chunk_dots(dtype, ds.at, full(dtype), os.at, dos.at, shape.s_q,
                                                     heads);
                    assert_close("attention_chunk_dots", ds, dots, 4 * roundings);
                    cuda_kernel_attention_chunk_backward(dtype, dqs.at, dks.at, dvs.at, dos.at, qs.at,
                                                         ks.at, vs.at, ls.at, ds.at, there);
                    assert_close("attention_chunk_backward's dq", dqs, dq, 4 * roundings);
                    assert_close("attention_chunk_backward's dk", dks, dk, 4 * roundings);
                    assert_close("attention_chunk_backward's dv", dvs, dv, 4 * roundings);
                    std::vector<unsigned char> bits = os.stored("attention_chunk_forward");
                    add_bytes(&bits, "attention_chunk_backward", dqs);
                    add_bytes(&bits, "attention_chunk_backward", dks);
                    return bits;
                },
                true);
        }
}

// ---- cross-entropy ----

static void cross_entropy_matches(void **state) {
    (void)state;
    // Rows of 4104 are whole packs, more of them than a block has threads.
    const int64_t sizes[][2] = {{1, 1}, {33, 5}, {5, 1025}, {9, 10007}, {6, 4104}};
    for (const int64_t *size : sizes)
        for (DType dtype : all_dtypes) {
            const int64_t n = size[0], v = size[1];
            const double scale = 1.0 / 41;
            Doubles logits = random_numbers(dtype, n * v, 1), targets = whole_numbers(n, v, 2);
            // rows that are huge with both signs, all the same, masked but for one column, and ignored
            for (int64_t j = 0; j < v && n > 4; j++) {
                logits[(size_t)j] = j % 2 ? 1e4 : -1e4;
                logits[(size_t)(v + j)] = 2.5;
                logits[(size_t)(2 * v + j)] = j == (int64_t)targets[2] ? 1.5 : -INFINITY;
            }
            if (n > 4) targets[3] = IGNORED_LABEL;
            logits = rounded(dtype, logits);
            const std::vector<int32_t> ids = indices(targets);
            Doubles losses((size_t)n), lse = losses, dlogits((size_t)(n * v));
            kernel_cross_entropy_forward(F64, losses.data(), lse.data(), logits.data(), ids.data(), n, v);
            Doubles given = rounded(full(dtype), lse);
            kernel_cross_entropy_backward(F64, dlogits.data(), logits.data(), given.data(), ids.data(),
                                          scale, n, v);
            in_every_way("cross_entropy", [&](int shift) {
                Device x(dtype, logits, shift), id(I32, targets, shift), sums(full(dtype), n, shift);
                Device loss(full(dtype), n, shift), d(dtype, n * v, shift), kept(full(dtype), given, shift);
                cuda_kernel_cross_entropy_forward(dtype, loss.at, sums.at, x.at, id.indices(), n, v);
                const Doubles got = loss.read("losses"), got_lse = sums.read("lse");
                // Row by row: the huge one would hide the errors of the others.
                for (size_t i = 0; i < (size_t)n; i++) {
                    double bound = ((double)v + 8) * rounding(full(dtype)) * std::max(1.0, fabs(lse[i]));
                    if (!(fabs(got[i] - losses[i]) <= bound) || !(fabs(got_lse[i] - lse[i]) <= bound))
                        fail_msg(
                            "row %zu of (%lld, %lld) %s has loss %.9g and lse %.9g, expected %.9g and %.9g",
                            i, (long long)n, (long long)v, dtype_name(dtype), got[i], got_lse[i], losses[i],
                            lse[i]);
                }
                cuda_kernel_cross_entropy_backward(dtype, d.at, x.at, kept.at, id.indices(), scale, n, v);
                assert_close("cross_entropy_backward", d, dlogits, 32);
                cuda_kernel_cross_entropy_backward(dtype, x.at, x.at, kept.at, id.indices(), scale, n, v);
                assert_same("cross_entropy_backward in place", x, d.read("dlogits"));
                std::vector<unsigned char> bits = loss.stored("losses");
                add_bytes(&bits, "lse", sums);
                add_bytes(&bits, "dlogits", d);
                return bits;
            });
        }
}

// ---- NaN ----

static void nan_and_infinity_come_through(void **state) {
    (void)state;
    for (DType dtype : all_dtypes)
        for (double bad : {(double)NAN, (double)INFINITY})
            for (int64_t at : {0, 33, 66}) {
                const int64_t h = 67;
                Doubles x = random_numbers(dtype, h, 1), one((size_t)h, 1);
                x[(size_t)at] = bad;
                Device in(dtype, x), ones(dtype, one), id(I32, Doubles(1, 3)), y(dtype, h),
                    row(full(dtype), 1);
                Device loss(full(dtype), 1), dw(dtype, h);
                assert_false(isfinite(cuda_kernel_sum(dtype, in.at, h)));
                assert_false(isfinite(cuda_kernel_sum_squares(dtype, in.at, h)));
                cuda_kernel_cross_entropy_forward(dtype, loss.at, row.at, in.at, id.indices(), 1, h);
                assert_false(isfinite(loss.read("loss")[0]));
                cuda_kernel_cross_entropy_backward(dtype, y.at, in.at, row.at, id.indices(), 1, 1, h);
                assert_true(isnan(y.read("dlogits")[(size_t)at]));
                cuda_kernel_rmsnorm_forward(dtype, y.at, row.at, in.at, ones.at, 1, h, 1e-5);
                assert_true(isnan(y.read("y")[(size_t)at]));
                cuda_kernel_rmsnorm_backward(dtype, y.at, dtype, dw.at, NULL, in.at, ones.at, ones.at,
                                             row.at, 1, h);
                assert_true(isnan(y.read("dx")[(size_t)at]));
                // a key that every query except the first sees
                Device p(dtype, h * h), o(dtype, h), q(dtype, one);
                Doubles k = one;
                k[1] = bad;
                Device keys(dtype, k);
                cuda_kernel_attention_forward(dtype, o.at, p.at, q.at, keys.at, q.at,
                                              AttentionShape{1, h, 1, 1, 1});
                Doubles out = o.read("o");
                assert_true(out[0] == 1);
                for (size_t i = 1; i < (size_t)h; i++) assert_true(isnan(out[i]));
            }
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(embedding_matches),
        cmocka_unit_test(rmsnorm_matches),
        cmocka_unit_test(rope_matches),
        cmocka_unit_test(attention_matches),
        cmocka_unit_test(attention_chunk_matches),
        cmocka_unit_test(cross_entropy_matches),
        cmocka_unit_test(nan_and_infinity_come_through),
    };
    return cmocka_run_group_tests_name("ops_cuda_layers", tests, NULL, NULL);
}
