// test_ops_cuda_experts.cc: the CUDA back end's kernels for a mixture of experts against the CPU's.
#include "both_backends.h"

// ---- mixture of experts ----

// n tokens, e experts, k for each token, columns; fewer and more tokens than threads in a block
static const struct ExpertSizes {
    int64_t n, e, k, h;
    RouteRule rule;
} expert_sizes[] = {{1, 1, 1, 1, {false, 1, 1, 1}},
                    {33, 8, 2, 300, {false, 1, 1, 1}},
                    {700, 5, 3, 70, {false, 1, 1, 1}},
                    {257, 16, 4, 33, {true, 4, 2, 2.5}}};

static void routing_matches(void **state) {
    (void)state;
    for (const ExpertSizes &s : expert_sizes)
        for (DType dtype : {F64, F32}) {
            const int64_t pairs = s.n * s.k;
            const Doubles logits = random_numbers(dtype, s.n * s.e, 1),
                          bias = random_numbers(dtype, s.e, 2);
            const Doubles dweights = random_numbers(dtype, pairs, 3);
            std::vector<int32_t> chosen((size_t)pairs), tokens((size_t)pairs), place((size_t)pairs),
                counts((size_t)s.e);
            Doubles weights((size_t)pairs), dlogits((size_t)(s.n * s.e));
            const double *biased = s.rule.by_sigmoid ? bias.data() : NULL;
            kernel_route_forward(F64, chosen.data(), weights.data(), logits.data(), biased, s.n, s.e, s.k,
                                 s.rule);
            kernel_route_backward(F64, dlogits.data(), dweights.data(), weights.data(), chosen.data(),
                                  logits.data(), s.n, s.e, s.k, s.rule);
            kernel_route_order(tokens.data(), place.data(), counts.data(), chosen.data(), s.n, s.k, s.e);
            // With one sequence, and with as many as there are tokens.
            const int64_t lengths[] = {s.n, 1}, room = s.n * s.k / (2 * s.e) + 1;
            std::vector<int32_t> left[2] = {chosen, chosen};
            for (int i = 0; i < 2; i++)
                kernel_route_capacity(left[i].data(), chosen.data(), s.n, lengths[i], s.e, s.k, room);
            // Pairs of experts in one node, and those of the second node.
            const int64_t each = s.e % 2 ? 1 : 2;
            std::vector<int32_t> nodes = chosen, within = chosen;
            kernel_route_nodes(nodes.data(), chosen.data(), s.n, s.k, each, s.e / each, s.k);
            kernel_route_within(within.data(), chosen.data(), pairs, each, each);
            in_every_way("route", [&](int shift) {
                Device l(dtype, logits, shift), b(dtype, bias, shift), dw(dtype, dweights, shift);
                Device w(dtype, pairs, shift), dl(dtype, s.n * s.e, shift),
                    c(I32, Doubles((size_t)pairs, -1));
                Device t(I32, Doubles((size_t)pairs, -1)), p(I32, Doubles((size_t)pairs, -1)),
                    r(I32, Doubles((size_t)s.e, -1));
                cuda_kernel_route_forward(dtype, c.indices(), w.at, l.at, biased ? b.at : NULL, s.n, s.e,
                                          s.k, s.rule);
                assert_same("route_forward's chosen", c, numbers(chosen));
                assert_close("route_forward's weights", w, weights, 16 + (double)s.k);
                cuda_kernel_route_backward(dtype, dl.at, dw.at, w.at, c.indices(), l.at, s.n, s.e, s.k,
                                           s.rule);
                assert_close("route_backward", dl, dlogits, 32 + 4 * (double)s.k);
                cuda_kernel_route_order(t.indices(), p.indices(), r.indices(), c.indices(), s.n, s.k, s.e);
                assert_same("route_order's tokens", t, numbers(tokens));
                assert_same("route_order's place", p, numbers(place));
                assert_same("route_order's counts", r, numbers(counts));
                for (int i = 0; i < 2; i++) {
                    Device few(I32, Doubles((size_t)pairs, -1));
                    cuda_kernel_route_capacity(few.indices(), c.indices(), s.n, lengths[i], s.e, s.k, room);
                    assert_same("route_capacity", few, numbers(left[i]));
                }
                Device at(I32, Doubles((size_t)pairs, -1)), in(I32, Doubles((size_t)pairs, -1));
                cuda_kernel_route_nodes(at.indices(), c.indices(), s.n, s.k, each, s.e / each, s.k);
                assert_same("route_nodes", at, numbers(nodes));
                cuda_kernel_route_within(in.indices(), c.indices(), pairs, each, each);
                assert_same("route_within", in, numbers(within));
                std::vector<unsigned char> bits = w.stored("route_forward");
                add_bytes(&bits, "route_backward", dl);
                return bits;
            });
        }
}

static void balance_matches(void **state) {
    (void)state;
    // sequences, tokens of each; experts and how many each token takes, as above
    const int64_t shapes[][2] = {{1, 1}, {3, 11}, {2, 350}, {1, 257}};
    for (int i = 0; i < 4; i++)
        for (DType dtype : {F64, F32}) {
            const ExpertSizes &s = expert_sizes[i];
            const int64_t n = shapes[i][0] * shapes[i][1], count = n * s.e;
            const Doubles logits = random_numbers(dtype, count, 1),
                          before = random_numbers(dtype, count, 2);
            const Doubles choices = whole_numbers(n * s.k, s.e, 3);
            const BalanceRule balance = {0.3, s.rule.by_sigmoid ? 0 : 0.1, 2};
            Doubles losses((size_t)n), dlogits = before;
            kernel_route_balance(F64, losses.data(), dlogits.data(), logits.data(), indices(choices).data(),
                                 n, shapes[i][1], s.e, s.k, balance, s.rule);
            in_every_way("route_balance", [&](int shift) {
                Device l(dtype, logits, shift), d(dtype, before, shift), c(I32, choices),
                    x(dtype, n, shift);
                cuda_kernel_route_balance(dtype, x.at, d.at, l.at, c.indices(), n, shapes[i][1], s.e, s.k,
                                          balance, s.rule);
                assert_close("route_balance's losses", x, losses, 16 + 2 * (double)s.e);
                assert_close("route_balance's dlogits", d, dlogits, 16 + 2 * (double)s.e);
                return d.stored("route_balance");
            });
        }
}

static void combining_matches(void **state) {
    (void)state;
    for (const ExpertSizes &s : expert_sizes)
        for (DType dtype : all_dtypes) {
            // With fewer rows than pairs, those beyond count as zeros.
            const int64_t pairs = s.n * s.k, rows = s.n == 33 ? 40 : pairs, count = rows * s.h;
            const std::vector<int32_t> chosen = indices(whole_numbers(pairs, s.e, 1));
            std::vector<int32_t> tokens((size_t)pairs), place((size_t)pairs), counts((size_t)s.e);
            kernel_route_order(tokens.data(), place.data(), counts.data(), chosen.data(), s.n, s.k, s.e);
            const Doubles z = random_numbers(dtype, count, 2), dy = random_numbers(dtype, s.n * s.h, 3);
            const Doubles weights = random_numbers(full(dtype), pairs, 4);
            Doubles y((size_t)(s.n * s.h)), sum = y, dz((size_t)count), dweights((size_t)pairs);
            kernel_combine_forward(F64, y.data(), z.data(), place.data(), weights.data(), s.n, s.k, rows,
                                   s.h);
            kernel_combine_forward(F64, sum.data(), z.data(), place.data(), NULL, s.n, s.k, rows, s.h);
            kernel_combine_backward(F64, dz.data(), dweights.data(), dy.data(), z.data(), place.data(),
                                    weights.data(), s.n, s.k, rows, s.h);
            in_every_way("combine", [&](int shift) {
                Device zs(dtype, z, shift), dys(dtype, dy, shift), w(full(dtype), weights, shift);
                Device ys(dtype, s.n * s.h, shift), sums(dtype, s.n * s.h, shift), dzs(dtype, count, shift);
                Device dw(full(dtype), pairs, shift), p(I32, numbers(place));
                cuda_kernel_combine_forward(dtype, ys.at, zs.at, p.indices(), w.at, s.n, s.k, rows, s.h);
                assert_close("combine_forward", ys, y, 2 * (double)s.k);
                cuda_kernel_combine_forward(dtype, sums.at, zs.at, p.indices(), NULL, s.n, s.k, rows, s.h);
                assert_close("combine_forward without weights", sums, sum, (double)s.k);
                cuda_kernel_combine_backward(dtype, dzs.at, dw.at, dys.at, zs.at, p.indices(), w.at, s.n,
                                             s.k, rows, s.h);
                assert_close("combine_backward's dz", dzs, dz, 1);
                assert_close("combine_backward's dweights", dw, dweights, 2 * (double)s.h);
                std::vector<unsigned char> bits = ys.stored("combine_forward");
                add_bytes(&bits, "combine_backward", dzs);
                add_bytes(&bits, "combine_backward", dw);
                return bits;
            });
        }
}

// A rank to which no token is sent has no rows: nothing is launched.
static void no_rows_are_no_launch(void **state) {
    (void)state;
    in_every_way("no rows", [&](int shift) {
        Device none(F32, 0, shift), chosen(I32, Doubles()), counts(I32, Doubles(3, -1));
        cuda_kernel_route_forward(F32, chosen.indices(), none.at, none.at, NULL, 0, 3, 2, {false, 1, 1, 1});
        cuda_kernel_route_backward(F32, none.at, none.at, none.at, chosen.indices(), none.at, 0, 3, 2,
                                   {false, 1, 1, 1});
        cuda_kernel_route_order(chosen.indices(), chosen.indices(), counts.indices(), chosen.indices(), 0,
                                2, 3);
        assert_same("route_order's counts", counts, Doubles(3, 0));
        cuda_kernel_route_capacity(chosen.indices(), chosen.indices(), 0, 1, 3, 2, 1);
        cuda_kernel_route_nodes(chosen.indices(), chosen.indices(), 0, 2, 1, 3, 2);
        cuda_kernel_route_within(chosen.indices(), chosen.indices(), 0, 0, 3);
        cuda_kernel_route_balance(F32, none.at, none.at, none.at, chosen.indices(), 0, 1, 3, 2, {1, 0, 1},
                                  {false, 1, 1, 1});
        cuda_kernel_combine_forward(F32, none.at, none.at, chosen.indices(), none.at, 0, 2, 0, 7);
        cuda_kernel_combine_backward(F32, none.at, none.at, none.at, none.at, chosen.indices(), none.at, 0,
                                     2, 0, 7);
        return none.stored("no rows");
    });
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(routing_matches),
        cmocka_unit_test(balance_matches),
        cmocka_unit_test(combining_matches),
        cmocka_unit_test(no_rows_are_no_launch),
    };
    return cmocka_run_group_tests_name("ops_cuda_experts", tests, NULL, NULL);
}
