// test_params.c [--ranks N] [PATTERN]: the parameter table: what each rank of a layout stores and owns, and the way
// back to the whole. TAP. Tables of any degree are looked at from every rank's place without a message; what talks is
// tried on all ranks at once, in every layout dp x tp of them. params.t runs it with 1 to 8 ranks.
#include <math.h>

#include "tensor/ops.h"
#include "train/optim.h"
#include "train/params.h"
#include "ranks.h"
#include "tensor/rng.h"

// ---- a small table with every cut ----

// Sizes fit `degree` ranks of tp, but for the vocabulary's 11 rows. One unit has fewer elements than most groups have
// ranks, and no weight begins where a rank's part does.
static Params table(Mesh mesh, int64_t degree, int64_t heads, Group copies) {
    const ParamSpec spec[] = {
        {"embed", 11, 5, CUT_VOCABULARY, 0, true, 0.5},  {"norm", 7, 0, CUT_NONE, 0, false, 0},
        {"q", 3 * degree, 5, CUT_ROWS, 0, true, 0.5},    {"k", 3 * heads, 5, CUT_HEADS, heads, true, 0.5},
        {"o", 5, 2 * degree, CUT_COLUMNS, 0, true, 0.5}, {"scale", 1, 0, CUT_NONE, 0, false, 0.5},
    };
    static const char *const unit[] = {"embedding", "block", NULL, NULL, NULL, "head"};
    Params params;
    params_begin(&params, &mesh, SHARD_NOTHING);
    for (size_t i = 0; i < sizeof spec / sizeof *spec; i++) {
        if (unit[i]) params_add_unit(&params, unit[i]);
        params_add(&params, &spec[i], copies);
    }
    return params;
}

static Params allocated(Params params, Sharding sharding, DType dtype) {
    params.sharding = sharding;
    params_allocate(&params, dtype, 7);
    return params;
}

static Params whole_table(int64_t degree, int64_t heads, DType dtype) {
    return allocated(table(mesh_single(), degree, heads, (Group){.size = 1}), SHARD_NOTHING, dtype);
}

// Ranks of tp that share a head, where there are fewer heads than ranks.
static int copies_of(int64_t heads, int degree) { return heads < degree ? degree / (int)heads : 1; }

// As rank (dp, tp) would see it, without any rank.
static Params imagined(int dp, int dp_rank, int tp, int tp_rank, int64_t heads) {
    Mesh mesh = mesh_single();
    int copies = copies_of(heads, tp);
    mesh.dp = (Group){.size = dp, .rank = dp_rank};
    mesh.tp = (Group){.size = tp, .rank = tp_rank};
    return table(mesh, tp, heads, (Group){.size = copies, .rank = tp_rank % copies});
}

// Head counts that a degree allows: more heads than ranks, as many, fewer.
static int heads_for(int degree, int64_t heads[4]) {
    int count = 0;
    heads[count++] = degree;
    heads[count++] = 2 * degree;
    if (degree > 1) heads[count++] = 1;
    if (degree % 2 == 0 && degree > 2) heads[count++] = degree / 2;
    return count;
}

// The place in the whole weight of the i-th element that a rank stores; -1 in padding.
static int64_t place(const Param *p, int64_t i) {
    int64_t row = p->first[0] + i / p->shape[1], column = p->first[1] + i % p->shape[1];
    return row < p->full[0] ? row * p->full[1] + column : -1;
}

static int64_t whole_count(const Param *p) { return p->full[0] * p->full[1]; }

static void *host_copy(Tensor t) {
    void *host = host_alloc(tensor_exists(t) ? (size_t)tensor_bytes(t) : 0);
    if (tensor_exists(t)) tensor_to_host(host, t);
    return host;
}

// ---- who stores, who owns ----

static void parts_cover_a_unit_once(void) {
    static const int64_t counts[] = {0, 1, 2, 5, 17, 64, 1009, (int64_t)1 << 40};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (int ranks = 1; ranks <= 9; ranks++) {
            Unit unit = {.count = counts[c]};
            int64_t next = 0, first, count, *listed = unit_part_counts(&unit, ranks);
            for (int rank = 0; rank < ranks; rank++) {
                unit_part(&unit, rank, ranks, &first, &count);
                SAME(first, next);
                SAME(count, listed[rank]);
                if (count < 0 || count > (counts[c] + ranks - 1) / ranks)
                    note("rank %d of %d has %lld of %lld", rank, ranks, (long long)count,
                         (long long)counts[c]);
                next += count;
            }
            SAME(next, counts[c]);
            free(listed);
        }
}

static void cuts_cover_a_weight_once(void) {
    for (int tp = 1; tp <= 9; tp++) {
        int64_t heads[4];
        for (int h = heads_for(tp, heads) - 1; h >= 0; h--) {
            Params first_rank = imagined(1, 0, tp, 0, heads[h]);
            for (int i = 0; i < first_rank.count; i++) {
                int64_t all = whole_count(&first_rank.param[i]);
                int *holders = calloc((size_t)all, sizeof *holders), firsts = 0;
                CHECK(holders, "out of host memory");
                for (int rank = 0; rank < tp; rank++) {
                    Params p = imagined(1, 0, tp, rank, heads[h]);
                    const Param *param = &p.param[i];
                    SAME(param->count, param->shape[0] * param->shape[1]);
                    SAME(param->count, first_rank.param[i].count);
                    firsts += param->copies.rank == 0;
                    for (int64_t j = 0; j < param->count; j++)
                        if (place(param, j) >= 0) holders[place(param, j)]++;
                    params_free(&p);
                }
                const Param *param = &first_rank.param[i];
                int copies = param->cut == CUT_NONE    ? tp
                             : param->cut == CUT_HEADS ? copies_of(heads[h], tp)
                                                       : 1;
                for (int64_t j = 0; j < all; j++)
                    if (holders[j] != copies)
                        note("%s, tp %d, %d heads: element %lld is on %d ranks, not %d", param->name, tp,
                             (int)heads[h], (long long)j, holders[j], copies);
                SAME(param->copies.size, copies);
                SAME(firsts, tp / copies);
                free(holders);
            }
            params_free(&first_rank);
        }
    }
}

static void shapes_are_those_of_the_cuts(void) {
    // Two heads on four ranks: neighbours share one.
    for (int rank = 0; rank < 4; rank++) {
        Params shared = imagined(1, 0, 4, rank, 2);
        SAME(shared.param[3].first[0], rank / 2 * 3);
        params_free(&shared);
    }
    Params p = imagined(1, 0, 4, 3, 2);
    static const int64_t expected[][4] = {{3, 5, 9, 0}, {7, 1, 0, 0}, {3, 5, 9, 0},
                                          {3, 5, 3, 0}, {5, 2, 0, 6}, {1, 1, 0, 0}};
    for (int i = 0; i < p.count; i++) {
        for (int d = 0; d < 2; d++) {
            SAME(p.param[i].shape[d], expected[i][d]);
            SAME(p.param[i].first[d], expected[i][2 + d]);
        }
        SAME(p.param[i].partial, p.param[i].cut == CUT_HEADS);
    }
    // Units begin anew, and hold their weights one after another.
    SAME(p.param[0].offset, 0);
    SAME(p.param[2].offset, 7);
    SAME(p.param[4].offset, 7 + 15 + 15);
    SAME(p.unit[1].count, 7 + 15 + 15 + 10);
    params_free(&p);
}

// What the rank owns, or stores, of parameter i is its slice of the whole, and zeros in padding.
static void expect_slice(const Params *params, const Params *whole, int i, Tensor part, int64_t from) {
    const Param *param = &params->param[i];
    if (!tensor_exists(part)) return;
    size_t size = dtype_size(part.dtype);
    char *mine = host_copy(part), *all = host_copy(param_value(whole, &whole->param[i]));
    static const char zeros[8];
    for (int64_t j = 0; j < tensor_count(part); j++) {
        int64_t at = place(param, from + j);
        if (memcmp(mine + (size_t)j * size, at < 0 ? zeros : all + (size_t)at * size, size))
            note("%s, dp %d of %d, tp %d of %d, sharding %d, %s: element %lld is not the whole's",
                 param->name, params->dp.rank, params->dp.size, params->tp.rank, params->tp.size,
                 params->sharding, dtype_name(part.dtype), (long long)(from + j));
    }
    free(mine);
    free(all);
}

static void shards_are_born_as_slices(void) {
    for (int place_of = 0; place_of < 5 * 4; place_of++) {
        int dp = 1 + place_of / 4, tp = 1 + place_of % 4;
        int64_t heads[4];
        for (int h = heads_for(tp, heads) - 1; h >= 0; h--)
            for (DType dtype = F64; dtype <= F16; dtype++) {
                Params whole = whole_table(tp, heads[h], dtype);
                for (int rank = 0; rank < dp * tp; rank++)
                    for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++) {
                        Params p =
                            allocated(imagined(dp, rank / tp, tp, rank % tp, heads[h]), sharding, dtype);
                        for (int i = 0; i < p.count; i++) {
                            int64_t from = 0;
                            Tensor own = param_own_value(&p, &p.param[i], &from);
                            expect_slice(&p, &whole, i, own, from);
                            if (sharding < SHARD_VALUES)
                                expect_slice(&p, &whole, i, param_value(&p, &p.param[i]), 0);
                        }
                        params_free(&p);
                    }
                params_free(&whole);
            }
    }
}

// Numbers are drawn some millions at a time.
static void a_large_weight_is_born_as_a_small_one(void) {
    const int64_t rows = 3001, columns = 1433, all = rows * columns, piece = 1 << 22;
    const ParamSpec spec = {"large", rows, columns, CUT_NONE, 0, true, 0.5};
    Mesh mesh = mesh_single();
    Params p;
    params_begin(&p, &mesh, SHARD_NOTHING);
    params_add_unit(&p, "all");
    params_add(&p, &spec, (Group){.size = 1});
    p = allocated(p, SHARD_NOTHING, F64);
    double *born = host_copy(p.values);
    const int64_t look[] = {0, 1, columns, piece - columns, piece - 1, piece, piece + 1, all - 1};
    for (size_t i = 0; i < sizeof look / sizeof *look; i++)
        SAME(born[look[i]], 0.5 * rng_normal(7, rng_stream("large"), (uint64_t)look[i]));
    free(born);
    params_free(&p);
}

// Bytes of what stays, by stage: whole tensors above it, own parts from it on.
static void each_stage_stores_its_own(void) {
    for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++)
        for (int rank = 0; rank < 4; rank++) {
            Memory before = memory_account();
            Params p = allocated(imagined(4, rank, 1, 0, 1), sharding, BF16);
            int64_t all = params_elements(&p), own = 0, first, count;
            for (int i = 0; i < p.units; i++) {
                unit_part(&p.unit[i], sharding ? rank : 0, sharding ? 4 : 1, &first, &count);
                own += count;
                SAME(tensor_count(p.unit[i].own_values), count);
                SAME(tensor_count(p.unit[i].own_grads), count);
                SAME(p.unit[i].own_grads.dtype, F32);
            }
            Memory now = memory_account();
            SAME(now.now[MEMORY_PARAMETER] - before.now[MEMORY_PARAMETER],
                 2 * (sharding < SHARD_VALUES ? all : own));
            SAME(now.now[MEMORY_GRADIENT] - before.now[MEMORY_GRADIENT],
                 sharding < SHARD_GRADS ? (2 + 4) * all : 4 * own);
            for (int i = 0; i < p.units && sharding >= SHARD_GRADS; i++) {
                unit_new_grads(&p, &p.unit[i]);
                SAME(p.unit[i].grads.dtype, BF16);
                SAME(tensor_count(p.unit[i].grads), p.unit[i].count);
                SAME(op_sum_squares(p.unit[i].grads), 0);
                unit_free_grads(&p.unit[i]);
            }
            params_free(&p);
            SAME(memory_account().now_total, before.now_total);
        }
}

// ---- on all ranks ----

typedef struct Layout {
    Mesh mesh;
    MeshShape shape;
    int64_t heads;
    Group copies;
} Layout;

// All layouts dp x tp of these ranks, with each number of heads. The same ones in the same order on all ranks.
static int layouts(Layout *layout) {
    int count = 0;
    for (int tp = 1; tp <= n; tp++) {
        if (n % tp) continue;
        MeshShape shape = {.dp = n / tp, .tp = tp};
        Mesh mesh = mesh_new(shape);
        int64_t heads[4];
        for (int h = heads_for(tp, heads) - 1; h >= 0; h--) {
            int copies = copies_of(heads[h], tp);
            Group group = comm_group("copies", mesh.tp.line, mesh.tp.member + mesh.tp.rank / copies * copies, copies);
            layout[count++] = (Layout){mesh, shape, heads[h], group};
        }
    }
    return count;
}
enum { MAX_LAYOUTS = 16 };

static Params params_of(const Layout *l, Sharding sharding, DType dtype) {
    return allocated(table(l->mesh, l->shape.tp, l->heads, l->copies), sharding, dtype);
}

static void *random_bits(int64_t count, DType dtype, uint64_t key) {
    size_t size = dtype_size(dtype), bytes = (size_t)count * size;
    unsigned char *bits = host_alloc(bytes);
    for (size_t i = 0; i < bytes; i++) bits[i] = (unsigned char)rng_bits(key, RNG_TEST, i);
    // A negative zero, and a NaN with every bit set.
    memset(bits, 0, size);
    bits[size - 1] = 0x80;
    if (count > 1) memset(bits + size, 0xff, size);
    return bits;
}

static void note_bits(const char *what, const Params *p, const Param *param, DType dtype) {
    note("%s: %s of %s, dp %d x tp %d, sharding %d, is not what was given", what, dtype_name(dtype),
         param->name, p->dp.size, p->tp.size, p->sharding);
}

static void a_weight_comes_back_bit_for_bit(void) {
    Layout layout[MAX_LAYOUTS];
    for (int l = layouts(layout) - 1; l >= 0; l--)
        for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++)
            for (DType dtype = F64; dtype <= F16; dtype++) {
                Params p = params_of(&layout[l], sharding, dtype);
                for (int i = 0; i < p.count; i++) {
                    const Param *param = &p.param[i];
                    size_t bytes = (size_t)whole_count(param) * dtype_size(dtype);
                    void *given = random_bits(whole_count(param), dtype, (uint64_t)i),
                         *back = host_alloc(bytes);
                    memset(back, 0x5a, bytes);
                    param_set_value(&p, param, given);
                    param_gather(&p, param, PARAM_VALUE, back);
                    if (memcmp(given, back, bytes)) note_bits("weight", &p, param, dtype);
                    free(given);
                    free(back);
                }
                params_free(&p);
            }
}

// A flat tensor beside the weights, as the optimizer's state is: this rank's own parts, or all that it stores.
static void any_flat_tensor_comes_back_bit_for_bit(void) {
    Layout layout[MAX_LAYOUTS];
    for (int l = layouts(layout) - 1; l >= 0; l--)
        for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++) {
            Params p = params_of(&layout[l], sharding, BF16);
            for (int d = 0; d < DTYPES; d++)
                for (int own = 0; own < 2; own++)
                    for (int i = 0; i < p.count; i++) {
                        const Param *param = &p.param[i];
                        const Unit *unit = &p.unit[param->unit];
                        size_t bytes = (size_t)whole_count(param) * dtype_size((DType)d);
                        void *given = random_bits(whole_count(param), (DType)d, (uint64_t)i),
                             *back = host_alloc(bytes);
                        Tensor flat = tensor_new(MEMORY_OPTIMIZER, (DType)d,
                                                 SHAPE(own ? unit->own_count : unit->count));
                        memset(back, 0x5a, bytes);
                        param_scatter_flat(&p, param, flat, own, given);
                        param_gather_flat(&p, param, flat, own, back);
                        if (memcmp(given, back, bytes)) note_bits("flat tensor", &p, param, (DType)d);
                        tensor_free(&flat);
                        free(given);
                        free(back);
                    }
            params_free(&p);
        }
}

// Gives every rank its part of this gradient of the whole; what padding holds must not matter.
static void set_gradients(Params *p, const Params *whole, double padding) {
    for (int i = 0; i < p->count; i++) {
        const Param *param = &p->param[i];
        const Unit *unit = &p->unit[param->unit];
        void *given = host_copy(param_total_grad(whole, &whole->param[i]));
        param_scatter_flat(p, param, unit->own_grads, true, given);
        free(given);
        int64_t from;
        Tensor own = param_own_grad(p, param, &from);
        for (int64_t j = 0; tensor_exists(own) && j < tensor_count(own); j++)
            if (place(param, from + j) < 0) op_fill(tensor_view(own, j, SHAPE(1)), padding);
    }
}

static Params whole_with_gradients(const Layout *l, DType dtype, uint64_t key) {
    Params whole = whole_table(l->shape.tp, l->heads, dtype);
    for (int i = 0; i < whole.count; i++) {
        Tensor grad = param_total_grad(&whole, &whole.param[i]);
        double *x = host_alloc((size_t)tensor_count(grad) * sizeof *x);
        for (int64_t j = 0; j < tensor_count(grad); j++) x[j] = rng_normal(key, (uint64_t)i, (uint64_t)j);
        tensor_from_doubles(grad, x);
        free(x);
    }
    return whole;
}

static void a_gradient_comes_back_bit_for_bit(void) {
    Layout layout[MAX_LAYOUTS];
    for (int l = layouts(layout) - 1; l >= 0; l--)
        for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++) {
            Params whole = whole_with_gradients(&layout[l], BF16, 11),
                   p = params_of(&layout[l], sharding, BF16);
            set_gradients(&p, &whole, 0);
            for (int i = 0; i < p.count; i++) {
                void *given = host_copy(param_total_grad(&whole, &whole.param[i]));
                size_t bytes = 4 * (size_t)whole_count(&p.param[i]);
                void *back = host_alloc(bytes);
                param_gather(&p, &p.param[i], PARAM_GRAD, back);
                if (memcmp(given, back, bytes)) note_bits("gradient", &p, &p.param[i], F32);
                free(given);
                free(back);
            }
            params_free(&p);
            params_free(&whole);
        }
}

// Looking at weights is no part of the run: its memory is not seen in the peaks.
static void a_look_leaves_the_peaks(void) {
    Layout layout[MAX_LAYOUTS];
    for (int l = layouts(layout) - 1; l >= 0; l--) {
        Params p = params_of(&layout[l], SHARD_VALUES, F32);
        double whole[11 * 5];
        param_gather(&p, &p.param[0], PARAM_VALUE, whole);  // a group's first message may set up what stays
        memory_reset_peak();
        Memory before = memory_account();
        param_gather(&p, &p.param[0], PARAM_VALUE, whole);
        SAME(memory_account().peak_total, before.peak_total);
        SAME(memory_account().peak[MEMORY_COMMUNICATION], before.peak[MEMORY_COMMUNICATION]);
        params_free(&p);
    }
}

static void expect_norm(const Layout *l, DType dtype, uint64_t key) {
    Params whole = whole_with_gradients(l, dtype, key);
    double expected = params_grad_norm(&whole), unsharded = 0;
    for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++) {
        Params p = params_of(l, sharding, dtype);
        set_gradients(&p, &whole, 1e3);
        double norm = params_grad_norm(&p);
        if (!(fabs(norm - expected) <= 1e-14 * expected))
            note("dp %d x tp %d, %d heads, sharding %d, %s: norm %.17g, expected %.17g", p.dp.size,
                 p.tp.size, (int)l->heads, sharding, dtype_name(dtype), norm, expected);
        // The very bits of every stage are those of no stage, on every rank.
        if (sharding == SHARD_NOTHING) unsharded = norm;
        SAME(norm, unsharded);
        SAME(comm_max(norm, world), norm);
        params_free(&p);
    }
    params_free(&whole);
}

static void the_norm_counts_each_element_once(void) {
    Layout layout[MAX_LAYOUTS];
    for (int l = layouts(layout) - 1; l >= 0; l--)
        for (DType dtype = F64; dtype <= F16; dtype++)
            // Another order of a sum may end in the same bits: seldom so eight times.
            for (uint64_t key = 0; key < 8; key++) expect_norm(&layout[l], dtype, key);
}

static void the_first_bad_gradient_is_the_same_everywhere(void) {
    Layout layout[MAX_LAYOUTS];
    for (int l = layouts(layout) - 1; l >= 0; l--)
        for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++) {
            Params whole = whole_with_gradients(&layout[l], F32, 11),
                   p = params_of(&layout[l], sharding, F32);
            for (int bad = -1; bad < p.count; bad++) {
                // What came earlier in the table went wrong later in backward.
                for (int i = 0; i <= bad; i++) {
                    Tensor grad = param_total_grad(&whole, &whole.param[i]);
                    op_fill(tensor_view(grad, tensor_count(grad) - 1, SHAPE(1)), i % 2 ? NAN : INFINITY);
                }
                set_gradients(&p, &whole, 0);
                const Param *found = params_first_bad_grad(&p);
                SAME(found ? found - p.param : -1, bad);
                if ((bad < 0) != isfinite(params_grad_norm(&p))) note("the norm hides what is bad");
            }
            params_free(&p);
            params_free(&whole);
        }
}

// Each rank steps its own part alone, with the bits that one device gives to it.
static void parts_step_as_the_whole(void) {
    Layout layout[MAX_LAYOUTS];
    for (int l = layouts(layout) - 1; l >= 0; l--)
        for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++)
            for (DType dtype = F64; dtype <= F16; dtype++) {
                Config config = config_default("optimizer=adamw weight-decay=0.3");
                Params whole = whole_with_gradients(&layout[l], dtype, 11),
                       p = params_of(&layout[l], sharding, dtype);
                Optimizer one = optimizer_new(&config, &whole), all = optimizer_new(&config, &p);
                set_gradients(&p, &whole, 0);
                for (int step = 0; step < 3; step++) {
                    optimizer_step(&one, &whole, 0.01, 0.5);
                    optimizer_step(&all, &p, 0.01, 0.5);
                }
                for (int i = 0; i < p.count; i++) {
                    int64_t from = 0;
                    Tensor own = param_own_value(&p, &p.param[i], &from);
                    expect_slice(&p, &whole, i, own, from);
                }
                for (int i = 0; i < p.units; i++) SAME(tensor_count(all.unit[i].v), p.unit[i].own_count);
                optimizer_free(&one);
                optimizer_free(&all);
                params_free(&p);
                params_free(&whole);
            }
}

static const RankTest tests[] = {
    TEST(parts_cover_a_unit_once),
    TEST(cuts_cover_a_weight_once),
    TEST(shapes_are_those_of_the_cuts),
    TEST(shards_are_born_as_slices),
    TEST(a_large_weight_is_born_as_a_small_one),
    TEST(each_stage_stores_its_own),
    TEST(a_weight_comes_back_bit_for_bit),
    TEST(any_flat_tensor_comes_back_bit_for_bit),
    TEST(a_gradient_comes_back_bit_for_bit),
    TEST(a_look_leaves_the_peaks),
    TEST(the_norm_counts_each_element_once),
    TEST(the_first_bad_gradient_is_the_same_everywhere),
    TEST(parts_step_as_the_whole),
};

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *pattern = ranks_start(argc, argv, 4);
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
