// test_params_sums.c [--ranks N] [PATTERN]: what a step's gradients need across ranks, in every layout dp x
// tp of them: sums over copies of a weight, the norm, the search for non-finite numbers, and each rank's
// own step. TAP. params.t runs it with 1 to 8 ranks.
#include <math.h>

#include "params_tables.h"
#include "train/optim.h"

// ---- partial gradients ----

// The spread's rank's part of an element's gradient: integers, whose sums are exact.
static double found(int rank, int param, int64_t place) {
    return (double)(rng_bits((uint64_t)(100 * rank + param), RNG_TEST, (uint64_t)place) % 201) - 100;
}

static int rank_in_spread(const Params *p, int world_rank) {
    int rank = 0;
    while (p->spread.member[rank] != world_rank) rank++;
    return rank;
}

static double expected_sum(const Params *p, int param, int64_t at) {
    Group copies = p->param[param].copies;
    if (p->param[param].parts.size == 1 || copies.size == 1) return found(p->spread.rank, param, at);
    double sum = 0;
    for (int i = 0; i < copies.size; i++) sum += found(rank_in_spread(p, copies.member[i]), param, at);
    return sum;
}

// Messages for the rank's partial gradients: one for each group with which it shares some.
static int groups_of_partial(const Params *p, int64_t *elements) {
    int groups = 0;
    *elements = 0;
    for (int i = 0; i < p->count; i++) {
        const Param *param = &p->param[i];
        if (!param->here || param->parts.size == 1 || param->copies.size == 1) continue;
        Tensor own = param_own_grad(p, param, NULL);
        *elements += tensor_exists(own) ? tensor_count(own) : 0;
        bool known = false;
        for (int j = 0; j < i; j++)
            known =
                known || (p->param[j].here && p->param[j].parts.size > 1 && p->param[j].copies.size > 1 &&
                          p->param[j].copies.handle == param->copies.handle);
        groups += !known;
    }
    return groups;
}

typedef double (*Fill)(const Params *params, int param, int64_t place);
static double own_part(const Params *p, int param, int64_t at) { return found(p->spread.rank, param, at); }

// Sets this rank's own gradients to fill's numbers, or compares them with these.
static void each_own_gradient(const Params *p, Fill fill, bool compare) {
    for (int i = 0; i < p->count; i++) {
        const Param *param = &p->param[i];
        int64_t from = 0;
        Tensor own = param_own_grad(p, param, &from);
        if (!tensor_exists(own)) continue;
        int64_t count = tensor_count(own);
        double *x = host_alloc((size_t)count * sizeof *x);
        tensor_to_doubles(x, own);
        for (int64_t j = 0; j < count; j++) {
            int64_t at = place(param, from + j);
            double value = at < 0 ? 0 : fill(p, i, at);
            if (compare && x[j] != value)
                note("%s, dp %d x tp %d, sharding %d: element %lld is %g, not %g", param->name,
                     p->unit[0].replicas.size, p->spread.size, p->sharding, (long long)(from + j), x[j],
                     value);
            x[j] = value;
        }
        if (!compare) tensor_from_doubles(own, x);
        free(x);
    }
}

static void expect_sums(Params *p) {
    int64_t elements, priced = 0;
    int groups = groups_of_partial(p, &elements);
    each_own_gradient(p, own_part, false);
    for (int i = 0; i < p->count; i++) {
        int64_t message = params_partial_elements(p, i);
        if (message > 0) priced += message;
    }
    SAME(priced, elements);
    clock_reset();
    params_sum_copies(p);
    SAME(comm_count("all_reduce").calls, groups);
    each_own_gradient(p, expected_sum, true);
    params_free(p);
}

// Heads that several ranks store, alone and together with what sequence parallelism leaves whole on every
// rank.
static void copies_end_with_the_sum_of_their_parts(void) {
    Layout layout[MAX_LAYOUTS];
    for (int l = layouts(layout) - 1; l >= 0; l--)
        for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++)
            for (int rows = 0; rows < 2; rows++)
                for (DType dtype = F64; dtype <= BF16; dtype++) {
                    Params p = sharded(table(layout[l].mesh, layout[l].shape.tp, layout[l].heads),
                                       layout[l].mesh.tp, layout[l].heads, layout[l].copies);
                    for (int i = 0; i < p.count && rows; i++)
                        if (!p.param[i].sharded) param_set_copies(&p.param[i], p.param[i].copies, true);
                    p = allocated(p, sharding, dtype);
                    expect_sums(&p);
                }
}

// The two ends of a pipeline, which share a weight, and ranks between them that do not have it.
static void ends_of_a_pipeline_share_their_gradient(void) {
    Layout layout[MAX_LAYOUTS];
    for (int l = layouts(layout) - 1; l >= 0; l--)
        for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++) {
            int last = layout[l].shape.tp - 1;
            Params p = allocated(staged(&layout[l], last / 2, last), sharding, F64);
            SAME(p.param[0].parts.size, last > 0 ? 2 : 1);
            expect_sums(&p);
        }
}

// ---- the norm ----

static uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static void expect_bits(const char *what, const Params *p, double norm, double expected) {
    if (bits_of(norm) != bits_of(expected))
        note("%s, dp %d x tp %d, sharding %d: norm %.17g, expected %.17g", what, p->unit[0].replicas.size,
             p->spread.size, p->sharding, norm, expected);
    if (comm_max(norm, world) != norm || comm_max(-norm, world) != -norm)
        note("%s: ranks have different norms", what);
}

static void expect_norm(const Layout *l, DType dtype, uint64_t key) {
    Params whole = whole_with_gradients(l, dtype, key);
    double expected = params_grad_norm(&whole, (Tensor){0}, NULL), in_parts = 0;
    for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++) {
        Params p = params_of(l, sharding, dtype);
        set_gradients(&p, &whole, 1e3);
        double norm = params_grad_norm(&p, (Tensor){0}, NULL);
        if (!(fabs(norm - expected) <= 1e-14 * expected))
            note("dp %d x tp %d, %d heads, sharding %d, %s: norm %.17g, expected %.17g",
                 p.unit[0].replicas.size, p.spread.size, (int)l->heads, sharding, dtype_name(dtype), norm,
                 expected);
        // Every stage adds up the same parts.
        if (sharding == SHARD_STATE) in_parts = norm;
        if (sharding >= SHARD_STATE) expect_bits("a stage of ZeRO", &p, norm, in_parts);
        else expect_bits("nothing sharded", &p, norm, norm);
        params_free(&p);
    }
    // DDP that sums in ZeRO's parts is the twin whose bits ZeRO must have.
    Model twin = {.params =
                      sharded(table(l->mesh, l->shape.tp, l->heads), l->mesh.tp, l->heads, l->copies)};
    zero_twin_of_1[0]->shard(&twin);
    params_allocate(&twin.params, recipe_standard(dtype), 7);
    set_gradients(&twin.params, &whole, 1e3);
    expect_bits("the twin", &twin.params, params_grad_norm(&twin.params, (Tensor){0}, NULL), in_parts);
    params_free(&twin.params);
    params_free(&whole);
}

static void the_norm_counts_each_element_once(void) {
    Layout layout[MAX_LAYOUTS];
    for (int l = layouts(layout) - 1; l >= 0; l--)
        for (DType dtype = F64; dtype <= F16; dtype++)
            // Another order of a sum may give the same bits, but rarely eight times.
            for (uint64_t key = 0; key < 8; key++) expect_norm(&layout[l], dtype, key);
}

// Squares are summed weight by weight, so whole weights may be on any ranks, copied or not.
static void the_norm_of_whole_weights_is_that_of_one_device(void) {
    Layout layout[MAX_LAYOUTS];
    for (int l = layouts(layout) - 1; l >= 0; l--)
        for (uint64_t key = 0; key < 8; key++) {
            int stages = layout[l].shape.tp;
            Params whole = whole_with_gradients(&layout[l], F64, key);
            double expected = params_grad_norm(&whole, (Tensor){0}, NULL);
            Params p =
                allocated(staged(&layout[l], (int)key % stages, (int)key / 2 % stages), SHARD_NOTHING, F64);
            set_gradients(&p, &whole, 0);
            expect_bits("stages", &p, params_grad_norm(&p, (Tensor){0}, NULL), expected);
            params_free(&p);
            p = allocated(table(layout[l].mesh, stages, layout[l].heads), SHARD_NOTHING, F64);
            set_gradients(&p, &whole, 0);
            expect_bits("copies on every rank", &p, params_grad_norm(&p, (Tensor){0}, NULL), expected);
            params_free(&p);
            params_free(&whole);
        }
}

// Nothing is sent if every rank has every gradient.
static void the_norm_of_replicas_takes_no_message(void) {
    MeshShape shape = {.dp = n, .tp = 1};
    Layout l = {.mesh = mesh_new(shape), .shape = shape, .heads = 1};
    for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++) {
        Params p = allocated(table(l.mesh, 1, 1), sharding, F64);
        SAME(params_norm_group(&p).size, sharding == SHARD_NOTHING ? 1 : n);
        clock_reset();
        params_grad_norm(&p, (Tensor){0}, NULL);
        SAME(comm_total().calls, sharding != SHARD_NOTHING && n > 1);
        params_free(&p);
    }
}

// ---- non-finite gradients, and the step ----

static void the_first_bad_gradient_is_the_same_everywhere(void) {
    Layout layout[MAX_LAYOUTS];
    for (int l = layouts(layout) - 1; l >= 0; l--)
        for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++) {
            Params whole = whole_with_gradients(&layout[l], F32, 11),
                   p = params_of(&layout[l], sharding, F32);
            for (int bad = -1; bad < p.count; bad++) {
                // What is earlier in the table went wrong later in backward.
                for (int i = 0; i <= bad; i++) {
                    Tensor grad = param_total_grad(&whole, &whole.param[i]);
                    op_fill(tensor_view(grad, tensor_count(grad) - 1, SHAPE(1)), i % 2 ? NAN : INFINITY);
                }
                set_gradients(&p, &whole, 0);
                const Param *found = params_first_bad_grad(&p);
                SAME(found ? found - p.param : -1, bad);
                if ((bad < 0) != isfinite(params_grad_norm(&p, (Tensor){0}, NULL)))
                    note("the norm hides what is bad");
            }
            params_free(&p);
            params_free(&whole);
        }
}

// Each rank steps only its own part, with the bits that one device gives.
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
                    optimizer_begin(&one, &whole);
                    optimizer_begin(&all, &p);
                    for (int i = 0; i < p.units; i++) {
                        optimizer_step_unit(&one, &whole, i, 0.01, 0.5);
                        optimizer_step_unit(&all, &p, i, 0.01, 0.5);
                    }
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
    TEST(copies_end_with_the_sum_of_their_parts),
    TEST(ends_of_a_pipeline_share_their_gradient),
    TEST(the_norm_counts_each_element_once),
    TEST(the_norm_of_whole_weights_is_that_of_one_device),
    TEST(the_norm_of_replicas_takes_no_message),
    TEST(the_first_bad_gradient_is_the_same_everywhere),
    TEST(parts_step_as_the_whole),
};

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *pattern = ranks_start(argc, argv, 4);
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
