// params_tables.h: small parameter tables with every kind of shard, and what their ranks hold, for the
// tests of the parameter table.
#ifndef PARAMS_TABLES_H
#define PARAMS_TABLES_H

#include "02_zero/zero.h"
#include "ranks.h"
#include "tensor/ops.h"
#include "tensor/rng.h"

// ---- a small table with every kind of shard ----

// How a weight is sharded is stored where the model stores its role.
enum { WHOLE, BY_ROWS, BY_COLUMNS, BY_HEADS, PADDED };

// Sizes are divisible by `degree` ranks of tp, except for the vocabulary's 11 rows. One unit has fewer
// elements than most groups have ranks, and no weight begins where a rank's part does.
static inline Params table(Mesh mesh, int64_t degree, int64_t heads) {
    const ParamSpec spec[] = {
        {"embed", PADDED, 11, 5, true, 0.5},         {"norm", WHOLE, 7, 0, false, 0},
        {"q", BY_ROWS, 3 * degree, 5, true, 0.5},    {"k", BY_HEADS, 3 * heads, 5, true, 0.5},
        {"o", BY_COLUMNS, 5, 2 * degree, true, 0.5}, {"scale", WHOLE, 1, 0, false, 0.5},
    };
    static const char *const unit[] = {"embedding", "block", NULL, NULL, NULL, "head"};
    Params params;
    params_begin(&params, &mesh);
    for (size_t i = 0; i < sizeof spec / sizeof *spec; i++) {
        if (unit[i]) params_add_unit(&params, unit[i]);
        params_add(&params, &spec[i]);
    }
    params_measure(&params);
    return params;
}

// Shards as tensor parallelism does, for place tp: `copies` ranks share a head.
static inline Params sharded(Params params, Group tp, int64_t heads, Group copies) {
    for (int i = 0; i < params.count && tp.size > 1; i++) {
        Param *p = &params.param[i];
        int64_t rows = p->full[0] / tp.size, columns = p->full[1] / tp.size;
        int64_t padded = (p->full[0] + tp.size - 1) / tp.size;
        int64_t heads_here = heads < tp.size ? 1 : heads / tp.size,
                first_head = heads < tp.size ? tp.rank / (tp.size / heads) : tp.rank * heads_here;
        if (p->role == PADDED) param_shard(p, 0, tp.rank * padded, padded);
        if (p->role == BY_ROWS) param_shard(p, 0, tp.rank * rows, rows);
        if (p->role == BY_COLUMNS) param_shard(p, 1, tp.rank * columns, columns);
        if (p->role == BY_HEADS) param_shard(p, 0, first_head * 3, heads_here * 3);
        if (p->role == BY_HEADS && heads < tp.size) param_set_copies(p, copies, true);
    }
    params_measure(&params);
    return params;
}

static inline Params allocated(Params params, Sharding sharding, DType dtype) {
    Model model = {.params = params};
    if (sharding != SHARD_NOTHING) zero_shard(&model, sharding);
    params_allocate(&model.params, recipe_standard(dtype), 7);
    return model.params;
}

static inline Params whole_table(int64_t degree, int64_t heads, DType dtype) {
    return allocated(table(mesh_single(), degree, heads), SHARD_NOTHING, dtype);
}

// Ranks of tp that share a head, if there are fewer heads than ranks.
static inline int copies_of(int64_t heads, int degree) { return heads < degree ? degree / (int)heads : 1; }

// The mesh as rank (dp, tp) would see it, without any rank.
static inline Mesh imagined_mesh(int dp, int dp_rank, int tp, int tp_rank) {
    Mesh mesh = mesh_single();
    mesh.world = (Group){.size = dp * tp, .rank = dp_rank * tp + tp_rank};
    mesh.dp = mesh.dp_cp = (Group){.size = dp, .rank = dp_rank};
    mesh.tp = mesh.tp_pp = (Group){.size = tp, .rank = tp_rank};
    return mesh;
}

static inline Params imagined(int dp, int dp_rank, int tp, int tp_rank, int64_t heads) {
    Mesh mesh = imagined_mesh(dp, dp_rank, tp, tp_rank);
    int copies = copies_of(heads, tp);
    return sharded(table(mesh, tp, heads), mesh.tp, heads,
                   (Group){.size = copies, .rank = tp_rank % copies});
}

// Head counts that a degree allows: more heads than ranks, as many, fewer.
static inline int heads_for(int degree, int64_t heads[4]) {
    int count = 0;
    heads[count++] = degree;
    heads[count++] = 2 * degree;
    if (degree > 1) heads[count++] = 1;
    if (degree % 2 == 0 && degree > 2) heads[count++] = degree / 2;
    return count;
}

// The index in the whole weight of the i-th element that a rank stores; -1 in padding.
static inline int64_t place(const Param *p, int64_t i) {
    int64_t row = p->first[0] + i / p->shape[1], column = p->first[1] + i % p->shape[1];
    return row < p->full[0] ? row * p->full[1] + column : -1;
}

static inline int64_t whole_count(const Param *p) { return p->full[0] * p->full[1]; }

static inline void *host_copy(Tensor t) {
    void *host = host_alloc(tensor_exists(t) ? (size_t)tensor_bytes(t) : 0);
    if (tensor_exists(t)) tensor_to_host(host, t);
    return host;
}

// What the rank owns, or stores, of parameter i must be its slice of the whole, and zeros in padding.
static inline void expect_slice(const Params *params, const Params *whole, int i, Tensor part,
                                int64_t from) {
    const Param *param = &params->param[i];
    if (!tensor_exists(part)) return;
    Group dp = params->unit[param->unit].replicas, tp = params->spread;
    size_t size = dtype_size(part.dtype);
    char *mine = host_copy(part), *all = host_copy(param_value(whole, &whole->param[i]));
    static const char zeros[8];
    for (int64_t j = 0; j < tensor_count(part); j++) {
        int64_t at = place(param, from + j);
        if (memcmp(mine + (size_t)j * size, at < 0 ? zeros : all + (size_t)at * size, size))
            note("%s, dp %d of %d, tp %d of %d, sharding %d, %s: element %lld is not the whole's",
                 param->name, dp.rank, dp.size, tp.rank, tp.size, params->sharding, dtype_name(part.dtype),
                 (long long)(from + j));
    }
    free(mine);
    free(all);
}

// ---- on all ranks ----

typedef struct Layout {
    Mesh mesh;
    MeshShape shape;
    int64_t heads;
    Group copies;  // of a head
} Layout;
enum { MAX_LAYOUTS = 16 };

// All layouts dp x tp of these ranks, with each number of heads, in the same order on all ranks.
static inline int layouts(Layout *layout) {
    int count = 0;
    for (int tp = 1; tp <= n; tp++) {
        if (n % tp) continue;
        MeshShape shape = {.dp = n / tp, .tp = tp};
        Mesh mesh = mesh_new(shape);
        int64_t heads[4];
        for (int h = heads_for(tp, heads) - 1; h >= 0; h--) {
            int copies = copies_of(heads[h], tp);
            Group group =
                comm_group("copies", mesh.tp.line, mesh.tp.member + mesh.tp.rank / copies * copies, copies);
            layout[count++] = (Layout){mesh, shape, heads[h], group};
        }
    }
    return count;
}

static inline Params params_of(const Layout *l, Sharding sharding, DType dtype) {
    Params params = table(l->mesh, l->shape.tp, l->heads);
    return allocated(sharded(params, l->mesh.tp, l->heads, l->copies), sharding, dtype);
}

// As in pipeline stages: the ranks of the spread have whole units, those with the two numbers on one of
// them, and the embedding on the first and the last, each of which has a part of its gradient.
static inline Params staged(const Layout *l, int block, int head) {
    Params params = table(l->mesh, l->shape.tp, l->heads);
    int last = l->mesh.tp.size - 1;
    for (int i = 0; i < params.count; i++)
        param_set_copies(&params.param[i], (Group){.size = 1, .name = "one"}, false);
    unit_set_holders(&params, 0, l->mesh.tp, (int[]){0, last}, last > 0 ? 2 : 1);
    unit_set_holders(&params, 1, l->mesh.tp, &block, 1);
    unit_set_holders(&params, 2, l->mesh.tp, &head, 1);
    params_measure(&params);
    return params;
}

// A whole weight in host memory, from which ranges are read.
typedef struct WholeWeight {
    const char *bytes;
    size_t size;  // of an element
} WholeWeight;

static inline void read_whole(void *context, int64_t first, int64_t count, void *bytes) {
    const WholeWeight *w = context;
    memcpy(bytes, w->bytes + (size_t)first * w->size, (size_t)count * w->size);
}

// Copies this rank's elements of it into a flat tensor with one for each of the unit's own part.
static inline void set_own_part(const Params *p, const Param *param, Tensor flat, const void *whole) {
    int64_t from = 0;
    Tensor part = param_own_part(p, param, flat, &from);
    param_read_part(param, part, from, read_whole, &(WholeWeight){whole, dtype_size(flat.dtype)});
}

// What ranks write to a whole weight.
typedef struct Written {
    WholeWeight given;
    int32_t *times;  // each element has been written by this rank
    bool wrong;      // bits other than those given
} Written;

static inline void note_written(void *context, int64_t first, int64_t count, void *bytes) {
    Written *w = context;
    if (memcmp(bytes, w->given.bytes + (size_t)first * w->given.size, (size_t)count * w->given.size))
        w->wrong = true;
    for (int64_t i = 0; i < count; i++) w->times[first + i]++;
}

// Adds up over all ranks how often each element was written. Frees *w.
static inline bool all_once(Written *w, int64_t count, Group world) {
    Tensor sums = tensor_new(MEMORY_COMMUNICATION, I32, SHAPE(count));
    tensor_from_host(sums, w->times);
    comm_wait(comm_all_reduce(sums, REDUCE_SUM, world));
    tensor_to_host(w->times, sums);
    bool once = true;
    for (int64_t i = 0; i < count; i++) once = once && w->times[i] == 1;
    tensor_free(&sums);
    free(w->times);
    return once;
}

static inline Written written_of(const void *given, int64_t count, DType dtype) {
    Written w = {.given = {given, dtype_size(dtype)}, .times = host_alloc(count * sizeof *w.times)};
    memset(w.times, 0, (size_t)count * sizeof *w.times);
    return w;
}

// Gives every rank its part of this whole gradient; the contents of padding must not matter.
static inline void set_gradients(Params *p, const Params *whole, double padding) {
    for (int i = 0; i < p->count; i++) {
        const Param *param = &p->param[i];
        const Unit *unit = &p->unit[param->unit];
        void *given = host_copy(param_total_grad(whole, &whole->param[i]));
        set_own_part(p, param, unit->own_grads, given);
        free(given);
        int64_t from;
        Tensor own = param_own_grad(p, param, &from);
        for (int64_t j = 0; tensor_exists(own) && j < tensor_count(own); j++)
            if (place(param, from + j) < 0) op_fill(tensor_view(own, j, SHAPE(1)), padding);
    }
}

static inline Params whole_with_gradients(const Layout *l, DType dtype, uint64_t key) {
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

#endif
