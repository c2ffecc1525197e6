// test_params.c [--ranks N] [PATTERN]: the parameter table: what each rank of a layout stores and owns, and
// how wholes are put together again. TAP. Tables of any degree are checked from every rank's place without
// communication; code that communicates is tested on all ranks at once, in every layout dp x tp of them.
// params.t runs it with 1 to 8 ranks.
#include "03_tensor_parallel/tensor_parallel.h"
#include "params_tables.h"

// ---- what a rank stores, and what it owns ----

static void parts_cover_a_unit_once(void) {
    static const int64_t counts[] = {0, 1, 2, 5, 17, 64, 1009, (int64_t)1 << 40};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (int ranks = 1; ranks <= 9; ranks++) {
            Unit unit = {.count = counts[c], .replicas = {.size = ranks}};
            int64_t next = 0, first, count, *listed = zero_part_counts(&unit);
            for (int rank = 0; rank < ranks; rank++) {
                count = zero_part(unit.count, rank, ranks, &first);
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

static void shards_cover_a_weight_once(void) {
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
                int copies = param->role == WHOLE      ? tp
                             : param->role == BY_HEADS ? copies_of(heads[h], tp)
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

static void shapes_are_those_of_the_shards(void) {
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
        SAME(p.param[i].sharded, p.param[i].role != WHOLE);
        SAME(p.param[i].parts.size > 1, p.param[i].role == BY_HEADS);
    }
    // Units begin anew, and hold their weights one after another.
    SAME(p.param[0].offset, 0);
    SAME(p.param[2].offset, 7);
    SAME(p.param[4].offset, 7 + 15 + 15);
    SAME(p.unit[1].count, 7 + 15 + 15 + 10);
    params_free(&p);
}

// The ranks share the work on places that are only imagined.
static void shards_are_born_as_slices(void) {
    for (int place_of = me; place_of < 5 * 4; place_of += n) {
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

// Each rank draws its own numbers, some millions at a time.
static void a_large_weight_is_born_as_a_small_one(void) {
    if (me) return;
    const int64_t rows = 3001, columns = 1433, all = rows * columns, piece = 1 << 22;
    const ParamSpec spec = {"large", WHOLE, rows, columns, true, 0.5};
    Mesh mesh = mesh_single();
    Params p;
    params_begin(&p, &mesh);
    params_add_unit(&p, "all");
    params_add(&p, &spec);
    p = allocated(p, SHARD_NOTHING, F64);
    double *born = host_copy(p.values);
    const int64_t look[] = {0, 1, columns, piece - columns, piece - 1, piece, piece + 1, all - 1};
    for (size_t i = 0; i < sizeof look / sizeof *look; i++)
        SAME(born[look[i]], 0.5 * rng_normal(7, rng_stream("large"), (uint64_t)look[i]));
    free(born);
    params_free(&p);
}

// A weight of 2^33 elements: the last rank's have numbers of their own, not those of 2^32 elements before.
static void a_huge_weight_does_not_start_over(void) {
    if (me) return;
    enum { RANKS = 1 << 20, ROWS = 2, COLUMNS = 1 << 12 };
    const ParamSpec spec = {"huge", WHOLE, (int64_t)RANKS * ROWS, COLUMNS, true, 0.5};
    const int64_t first_row = (int64_t)(RANKS - 1) * ROWS;
    Mesh mesh = imagined_mesh(1, 0, RANKS, RANKS - 1);
    Params p;
    params_begin(&p, &mesh);
    params_add_unit(&p, "all");
    params_add(&p, &spec);
    param_shard(&p.param[0], 0, first_row, ROWS);
    params_measure(&p);
    p = allocated(p, SHARD_NOTHING, F64);
    double *born = host_copy(p.values);
    for (int64_t i = 0; i < ROWS * COLUMNS; i += 101)
        SAME(born[i], 0.5 * rng_normal(7, rng_stream("huge"), (uint64_t)(first_row * COLUMNS + i)));
    free(born);
    params_free(&p);
}

// Numbers that were drawn once are cached, for this seed and this weight.
static void a_seed_draws_its_own_numbers(void) {
    const ParamSpec specs[] = {{"one", WHOLE, 3, 5, true, 1}, {"other", WHOLE, 3, 5, true, 1}};
    for (uint64_t seed = 7; seed < 12; seed++) {
        Mesh mesh = mesh_single();
        Params p;
        params_begin(&p, &mesh);
        params_add_unit(&p, "all");
        for (int i = 0; i < 2; i++) params_add(&p, &specs[i]);
        params_allocate(&p, recipe_standard(F64), seed % 3);
        for (int i = 0; i < 2; i++) {
            double *born = host_copy(param_value(&p, &p.param[i]));
            for (uint64_t j = 0; j < 15; j++)
                SAME(born[j], rng_normal(seed % 3, rng_stream(specs[i].name), j));
            free(born);
        }
        params_free(&p);
    }
}

// Persistent bytes by stage: whole tensors above it, own parts from it on.
static void each_stage_stores_its_own(void) {
    for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++)
        for (int rank = 0; rank < 4; rank++) {
            Memory before = memory_account();
            Params p = allocated(imagined(4, rank, 1, 0, 1), sharding, BF16);
            int64_t all = params_elements(&p), own = 0, first, count;
            for (int i = 0; i < p.units; i++) {
                count = zero_part(p.unit[i].count, sharding ? rank : 0, sharding ? 4 : 1, &first);
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

// ---- what the techniques say ----

typedef struct Shards {
    const char *name;
    const Technique *first, *second;  // as trainer_new calls them; second may be NULL
} Shards;
static const Shards shards[] = {{"tensor parallel", &tensor_parallel, NULL},
                                {"sequence parallel", &sequence_parallel, NULL},
                                {"vocabulary", &vocab_parallel, &tensor_parallel},
                                {"sequence and vocabulary", &vocab_parallel, &sequence_parallel}};
enum { SHARDS = sizeof shards / sizeof *shards };
static const Technique *const stages[] = {NULL, &zero1, &zero2, &zero3};

// No number of ranks divides the 11 rows of the vocabulary.
static Config config_for(int tp, int64_t kv_heads) {
    char *text = format_text("layers=1 hidden=%d heads=%d kv-heads=%ld ffn=%d vocab=11 dtype=bf16", 4 * tp,
                             2 * tp, kv_heads, 3 * tp);
    Config c = config_default(text);
    free(text);
    return c;
}

static Model *model_of(const Config *c, Mesh mesh, const Shards *s, int stage) {
    Model *m = model_new(c, mesh);
    if (s) s->first->shard(m);
    if (s && s->second) s->second->shard(m);
    params_measure(&m->params);
    if (stage) stages[stage]->shard(m);
    model_allocate(m);
    return m;
}

static bool is_table(const Param *param) {
    return param->role == ROLE_EMBEDDING || param->role == ROLE_HEAD;
}

// The number of tp ranks that store each element.
static int holders_of(const Param *param, int tp, int64_t kv_heads, bool vocabulary) {
    if (param->role == ROLE_K || param->role == ROLE_V) return copies_of(kv_heads, tp);
    return param->dims == 1 || (is_table(param) && !vocabulary) ? tp : 1;
}

static void expect_facts(const Shards *s, const Param *param, int holders) {
    bool vector_or_table = param->dims == 1 || is_table(param),
         copied_heads = !vector_or_table && holders > 1;
    SAME(param->copies.size, holders);
    // With sequence parallelism every rank sees only its own rows, and copied heads serve their own queries.
    bool rows = s->first == &sequence_parallel || s->second == &sequence_parallel;
    if (holders > 1) SAME(param->parts.size > 1, copied_heads || (rows && vector_or_table));
    SAME(param->sharded, !vector_or_table || (is_table(param) && s->first == &vocab_parallel));
}

// From every rank's place, with more heads than ranks: together the ranks own each element once, or once on
// every replica, and whatever a rank stores is its slice of the whole.
static void techniques_cover_each_weight(void) {
    for (int place_of = me; place_of < 3 * 4; place_of += n)
        for (int kind = 0; kind < SHARDS * 4; kind++) {
            static const int degrees[] = {2, 3, 4, 8};
            int dp = 1 + place_of / 4, tp = degrees[place_of % 4], stage = kind % 4;
            const Shards *s = &shards[kind / 4];
            Config c = config_for(tp, tp);
            Model *whole = model_of(&c, mesh_single(), NULL, 0);
            const Params *all = &whole->params;
            int *holders[16];
            CHECK(all->count <= 16, "%d weights", all->count);
            for (int i = 0; i < all->count; i++) {
                holders[i] = calloc((size_t)whole_count(&all->param[i]), sizeof(int));
                CHECK(holders[i], "out of host memory");
            }
            for (int rank = 0; rank < dp * tp; rank++) {
                Model *m = model_of(&c, imagined_mesh(dp, rank / tp, tp, rank % tp), s, stage);
                SAME(m->params.count, all->count);
                SAME(m->params.sharding, stage);
                for (int i = 0; i < all->count; i++) {
                    const Param *param = &m->params.param[i];
                    expect_facts(s, param, holders_of(param, tp, tp, s->first == &vocab_parallel));
                    int64_t from = 0;
                    Tensor own = param_own_value(&m->params, param, &from);
                    for (int64_t j = 0; tensor_exists(own) && j < tensor_count(own); j++)
                        if (place(param, from + j) >= 0) holders[i][place(param, from + j)]++;
                    expect_slice(&m->params, all, i, own, from);
                }
                model_free(m);
            }
            for (int i = 0; i < all->count; i++) {
                const Param *param = &all->param[i];
                int expected = holders_of(param, tp, tp, s->first == &vocab_parallel) * (stage ? 1 : dp);
                for (int64_t j = 0; j < whole_count(param); j++)
                    if (holders[i][j] != expected)
                        note("%s, ZeRO-%d, dp %d, tp %d, %s: element %lld stands on %d ranks, not %d",
                             s->name, stage, dp, tp, param->name, (long long)j, holders[i][j], expected);
                free(holders[i]);
            }
            model_free(whole);
        }
}

// On these ranks, with fewer heads than ranks: ranks that share a head communicate, so this needs real ranks.
static void ranks_beyond_the_heads_store_copies(void) {
    Mesh mesh = mesh_new((MeshShape){.tp = n});
    for (int64_t kv = 1; kv < n; kv++)
        for (int kind = 0; kind < SHARDS && n % kv == 0; kind++) {
            Config c = config_for(n, kv);
            Model *whole = model_of(&c, mesh_single(), NULL, 0), *m = model_of(&c, mesh, &shards[kind], 0);
            for (int i = 0; i < m->params.count; i++) {
                const Param *param = &m->params.param[i];
                expect_facts(&shards[kind], param,
                             holders_of(param, n, kv, shards[kind].first == &vocab_parallel));
                expect_slice(&m->params, &whole->params, i, param_value(&m->params, param), 0);
                if (param->role != ROLE_K && param->role != ROLE_V) continue;
                SAME(param->first[0], me / (n / kv) * config_head_size(&c));
                SAME(param->copies.rank, me % (n / kv));
            }
            model_free(m);
            model_free(whole);
        }
}

// ---- units on some ranks only ----

static void a_unit_left_out_takes_no_room(void) {
    for (int sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++)
        for (int rank = 0; rank < 2; rank++) {
            Mesh mesh = imagined_mesh(2, rank, 3, 1);
            Params whole = whole_table(3, 3, F64), p = table(mesh, 3, 3);
            unit_set_holders(&p, 1, (Group){.size = 2, .rank = 1}, &(int){0}, 1);
            params_measure(&p);
            p = allocated(p, (Sharding)sharding, F64);
            SAME(p.count, whole.count);
            SAME(params_elements(&p), 55 + 1);
            SAME(p.unit[1].count, 0);
            SAME(p.unit[1].own_count, 0);
            SAME(p.unit[2].first, 55);
            for (int i = 0; i < p.count; i++) {
                int64_t from = 0;
                const Param *param = &p.param[i];
                SAME(param->here, param->unit != 1);
                SAME(param->full[0], whole.param[i].full[0]);
                Tensor own = param_own_value(&p, param, &from);
                if (param->unit == 1 && tensor_exists(own)) note("%s is here", param->name);
                expect_slice(&p, &whole, i, own, from);
            }
            params_free(&p);
            params_free(&whole);
        }
}

// ---- putting wholes together again, on all ranks ----

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
         param->name, p->unit[0].replicas.size, p->spread.size, p->sharding);
}

// Few ranks test each dtype with each way of sharding; many, which are slow, each of the two once or twice.
static bool leaves_out(Sharding sharding, DType dtype) { return n > 4 && (int)dtype % 4 != (int)sharding; }

static void a_weight_comes_back_bit_for_bit(void) {
    Layout layout[MAX_LAYOUTS];
    for (int l = layouts(layout) - 1; l >= 0; l--)
        for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++)
            for (DType dtype = F64; dtype <= F16; dtype++) {
                if (leaves_out(sharding, dtype)) continue;
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

// A flat tensor besides the weights, like the optimizer's state: this rank's own parts.
static void ranks_write_each_element_once_as_it_was_read(void) {
    Layout layout[MAX_LAYOUTS];
    for (int l = layouts(layout) - 1; l >= 0; l--)
        for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++) {
            Params p = params_of(&layout[l], sharding, BF16);
            for (int d = 0; d < DTYPES; d++)
                for (int i = 0; i < p.count && !leaves_out(sharding, (DType)d); i++) {
                    const Param *param = &p.param[i];
                    int64_t from = 0, count = whole_count(param);
                    void *given = random_bits(count, (DType)d, (uint64_t)i);
                    Tensor flat =
                        tensor_new(MEMORY_OPTIMIZER, (DType)d, SHAPE(p.unit[param->unit].own_count));
                    set_own_part(&p, param, flat, given);
                    Written w = written_of(given, count, (DType)d);
                    Tensor part = param_own_part(&p, param, flat, &from);
                    param_write_part(&p, param, part, from, note_written, &w);
                    if (!all_once(&w, count, p.world) || w.wrong)
                        note_bits("flat tensor", &p, param, (DType)d);
                    tensor_free(&flat);
                    free(given);
                }
            params_free(&p);
        }
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

static void a_weight_of_another_stage_comes_to_all(void) {
    Layout layout[MAX_LAYOUTS];
    for (int l = layouts(layout) - 1; l >= 0; l--)
        // If there are many pairs of stages, every fifth, with each stage on both sides: 6 and 8 are not
        // multiples of 5.
        for (int at = 0; at < layout[l].shape.tp * layout[l].shape.tp; at += layout[l].shape.tp > 4 ? 5 : 1)
            for (Sharding sharding = SHARD_NOTHING; sharding <= SHARD_VALUES; sharding++) {
                int stages_here = layout[l].shape.tp;
                Params p = allocated(staged(&layout[l], at % stages_here, at / stages_here), sharding, F32);
                Params whole = whole_table(stages_here, layout[l].heads, F32);
                for (int i = 0; i < p.count; i++) {
                    size_t bytes = (size_t)whole_count(&p.param[i]) * sizeof(float);
                    void *back = host_alloc(bytes), *born = host_copy(param_value(&whole, &whole.param[i]));
                    param_gather(&p, &p.param[i], PARAM_VALUE, back);
                    if (memcmp(back, born, bytes))
                        note("%s, stages %d: another weight", p.param[i].name, at);
                    int64_t from = 0;
                    Written w = written_of(born, whole_count(&p.param[i]), F32);
                    Tensor part = param_own_value(&p, &p.param[i], &from);
                    param_write_part(&p, &p.param[i], part, from, note_written, &w);
                    if (!all_once(&w, whole_count(&p.param[i]), p.world) || w.wrong)
                        note("%s, stages %d: written otherwise", p.param[i].name, at);
                    free(born);
                    free(back);
                }
                params_free(&p);
                params_free(&whole);
            }
}

// Inspecting weights is not part of the run: its memory does not show in the peaks.
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

typedef struct Shard {
    Param *param;
    int dim;
    int64_t first, count;
} Shard;

static void shard_a_weight(const void *shard) {
    const Shard *s = shard;
    param_shard(s->param, s->dim, s->first, s->count);
}

static void shards_that_no_weight_has_are_refused(void) {
    Params p = table(mesh_single(), 2, 2);
    Param *norm = &p.param[1], *q = &p.param[2];
    const Shard wrong[] = {{norm, 1, 0, 1}, {q, 2, 0, 1}, {q, -1, 0, 1}, {q, 0, -1, 1}, {q, 1, 0, -1}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const char *why = refusal(shard_a_weight, &wrong[i]);
        if (!why || !strstr(why, "cannot be sharded along dimension"))
            note("shard %d: %s", (int)i, why ? why : "taken");
    }
    params_free(&p);
}

static const RankTest tests[] = {
    TEST(parts_cover_a_unit_once),
    TEST(shards_cover_a_weight_once),
    TEST(shapes_are_those_of_the_shards),
    TEST(shards_are_born_as_slices),
    TEST(a_large_weight_is_born_as_a_small_one),
    TEST(a_huge_weight_does_not_start_over),
    TEST(a_seed_draws_its_own_numbers),
    TEST(each_stage_stores_its_own),
    TEST(techniques_cover_each_weight),
    TEST(ranks_beyond_the_heads_store_copies),
    TEST(a_unit_left_out_takes_no_room),
    TEST(a_weight_comes_back_bit_for_bit),
    TEST(ranks_write_each_element_once_as_it_was_read),
    TEST(a_gradient_comes_back_bit_for_bit),
    TEST(a_weight_of_another_stage_comes_to_all),
    TEST(a_look_leaves_the_peaks),
    TEST(shards_that_no_weight_has_are_refused),
};

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *pattern = ranks_start(argc, argv, 4);
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
