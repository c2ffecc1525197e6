// test_zero_in_flight.c [--ranks N] [PATTERN]: when ZeRO-1 starts and waits for its calls, among which
// ranks, as DDP and its buckets too, and how many elements each rank has; which weights ZeRO-3 has gathered
// while a unit computes, from which ranks, and in how many bytes; whose bad weight a rank names, and whose
// part its formula counts; when hybrid sharding sends across nodes; and in ZeRO-R, whose place in the arena a
// backward gives back. TAP.
#include <math.h>

#include "01_data_parallel/ddp_bucketed.h"
#include "02_zero/zero.h"
#include "ranks.h"
#include "tensor/in_flight.h"

static Config config_of(const char *more) {
    char *text = format_text(
        "layers=2 hidden=12 heads=3 kv-heads=1 ffn=10 vocab=256 seq=5 micro-batch=2 dtype=f64 %s", more);
    Config c = config_default(text);
    free(text);
    return c;
}

// All must have room for as much as the fullest rank stores: at most ceil(count / N). Parts are
// consecutive, and together are the whole unit.
static void parts_are_even(void) {
    for (int size = 1; size <= 9; size++)
        for (int64_t count = 0; count <= 40; count++) {
            int64_t end = 0, first;
            for (int rank = 0; rank < size; rank++) {
                const int64_t part = zero_part(count, rank, size, &first);
                SAME(first, end);
                if (part < 0 || part > (count + size - 1) / size)
                    note("rank %d of %d has %ld of %ld elements, expected ceil(%ld / %d) or less", rank, size,
                         (long)part, (long)count, (long)count, size);
                end += part;
            }
            SAME(end, count);
        }
}

// The units that have a request in flight, as bits.
static int in_flight(Request *const *request, int units) {
    int bits = 0;
    for (int i = 0; i < units; i++) bits |= (request[i] != NULL) << i;
    return bits;
}

// The names of such units; the result is one of 2 static buffers in turn.
static const char *named(const Model *m, int bits) {
    static char text[2][200];
    static int turn;
    char *to = text[turn++ % 2];
    *to = 0;
    for (int unit = 0; unit < m->params.units; unit++)
        if (bits >> unit & 1)
            snprintf(to + strlen(to), sizeof text[0] - strlen(to), "%s%s", *to ? " and " : "",
                     m->params.unit[unit].name);
    return *to ? to : "no unit";
}

// What all ranks send in one call for each unit, among the ranks that hold replicas of it and no others.
static void expect_bytes(const char *call, double elements, double width, Mesh mesh) {
    const double sent = comm_sum(comm_count(call).bytes, mesh.world),
                 right = (mesh.dp.size - 1) * elements * width * mesh.world.size / mesh.dp.size;
    if (sent != right) note("%d replicas: %s sends %.0f B, and not %.0f", mesh.dp.size, call, sent, right);
}

// Without ZeRO, whole gradients are summed among the same ranks.
static void ddp_sums_among_replicas(void) {
    static const Technique *const all[] = {&ddp_naive, &ddp_overlap, &ddp_bucketed, &ddp_no_sync};
    for (int i = 0; i < 8; i++) {
        const int tp = 1 + i / 4;
        if (n % tp) continue;
        Mesh mesh = mesh_new((MeshShape){.dp = n / tp, .tp = tp});
        Config c = config_of("");
        Trainer *t = trainer_new(&c, mesh, (const Technique *[]){all[i % 4], NULL});
        Model *m = t->model;
        const Sockets *sockets = &m->sockets;
        model_begin_step(m, 1);
        clock_reset();
        for (int unit = m->params.units - 1; unit >= 0; unit--)
            sockets->gradients.ready(sockets->gradients.context, m, unit, true);
        sockets->gradients.micro_batch_ready(sockets->gradients.context, m, true);
        sockets->gradients.finish(sockets->gradients.context, m);
        expect_bytes("all_reduce", (double)params_elements(&m->params), 2 * 8, mesh);
        trainer_free(t);
    }
}

// Six units that no bucket is full of: two in the middle have other replicas than the rest, and so has the
// last one, which stores nothing. Buckets end where the replicas change, and none is empty.
static void replicas_divide_buckets(void) {
    enum { UNITS = 6, BUCKETS = 3 };
    static const int64_t count[UNITS] = {4, 0, 2, 2, 4, 0};
    static const bool other[UNITS] = {false, false, true, true, false, true};
    static const int first[BUCKETS] = {4, 2, 0};
    Unit unit[UNITS];
    for (int i = 0; i < UNITS; i++)
        unit[i] = (Unit){.count = count[i],
                         .replicas = {.size = 2 + other[i], .handle = other[i]},
                         .grads = tensor_new(MEMORY_GRADIENT, F32, SHAPE(count[i]))};
    Model m = {.config = config_of(""), .params = {.unit = unit, .units = UNITS, .recipe.sum = F32}};
    Buckets *b = ddp_bucketed_plug(&m);
    SAME(b->count, BUCKETS);
    for (int i = 0; i < BUCKETS && b->count == BUCKETS; i++) SAME(b->first_unit[i], first[i]);
    ddp_bucketed_unplug(&m, b);
    for (int i = 0; i < UNITS; i++) tensor_free(&unit[i].grads);
}

// Gradients are sent as soon as they are ready, without waiting; weights when --gather says so.
static void zero1_sends_in_time(Mesh mesh, ZeroGather gather) {
    Config c = config_of("");
    config_set(&c, "gather", gather);
    Trainer *t = trainer_new(&c, mesh, (const Technique *[]){&zero1, NULL});
    Model *m = t->model;
    const Zero *zero = trainer_context(t, &zero1);
    const Sockets *sockets = &m->sockets;
    const int units = m->params.units;
    const double elements = (double)params_elements(&m->params);
    model_begin_step(m, 1);
    clock_reset();
    for (int unit = units - 1; unit >= 0; unit--) {
        sockets->gradients.ready(sockets->gradients.context, m, unit, true);
        const int bits = in_flight(zero->reduction, units), right = (1 << units) - (1 << unit);
        if (bits != right)
            note("in flight when %s is ready: gradients of %s, expected %s", m->params.unit[unit].name,
                 named(m, bits), named(m, right));
    }
    sockets->gradients.finish(sockets->gradients.context, m);
    SAME(in_flight(zero->reduction, units), 0);
    expect_bytes("reduce_scatter", elements, 8, mesh);
    clock_reset();
    for (int unit = 0; unit < units; unit++) {
        sockets->parameters.stepped(sockets->parameters.context, m, unit);
        const bool flies = zero->gather == GATHER_BEHIND_FORWARD ||
                           (zero->gather == GATHER_BEHIND_STEP && unit + 1 < units);
        const int bits = in_flight(zero->gathering, units), right = flies ? (2 << unit) - 1 : 0;
        if (bits != right)
            note("--gather %d: in flight when %s has been stepped: weights of %s, expected %s", (int)gather,
                 m->params.unit[unit].name, named(m, bits), named(m, right));
    }
    sockets->parameters.complete(sockets->parameters.context, m);
    SAME(in_flight(zero->gathering, units), 0);
    expect_bytes("all_gather", elements, 8, mesh);
    trainer_free(t);
}

static void zero1_overlaps(void) {
    for (ZeroGather gather = GATHER_BEHIND_FORWARD; gather <= GATHER_AFTER_STEP; gather++) {
        zero1_sends_in_time(mesh_new((MeshShape){.dp = n}), gather);
        // Replicas on every other rank, as where two ranks of tensor parallelism share each.
        if (n % 2 == 0) zero1_sends_in_time(mesh_new((MeshShape){.dp = n / 2, .tp = 2}), gather);
    }
}

static Trainer *zero3_trainer(const char *more, Mesh mesh, bool prefetch, const Technique *second) {
    Config c = config_of(more);
    config_set(&c, "no-prefetch", !prefetch);
    return trainer_new(&c, mesh, (const Technique *[]){&zero3, second, NULL});
}

// What is here or in flight while a unit computes, with nothing gathered before, as bits of units.
static int gathered_for(Model *m, int unit, Pass pass) {
    const Sockets *sockets = &m->sockets;
    int bits = 0;
    sockets->parameters.acquire(sockets->parameters.context, m, unit, pass);
    for (int i = 0; i < m->params.units; i++) bits |= tensor_exists(m->params.unit[i].values) << i;
    sockets->parameters.release(sockets->parameters.context, m, unit, pass);
    sockets->parameters.complete(sockets->parameters.context, m);
    return bits;
}

// The unit itself and the next one that the pass uses. If tied, the head also reads the embedding. The
// embedding's backward reads no weights, so nothing is gathered for it.
static void zero3_gathers_one_unit_ahead(void) {
    enum { E = 1, B0 = 2, B1 = 4, H = 8, UNITS = 4 };
    static const int right[2][UNITS] = {{E | B0, B0 | B1, B1 | H, H}, {0, B0, B0 | B1, B1 | H}};
    for (int tied = 0; tied < 2; tied++) {
        Trainer *t = zero3_trainer(tied ? "tied=1" : "", mesh_new((MeshShape){.dp = n}), true, NULL);
        for (Pass pass = FORWARD; pass <= BACKWARD; pass++)
            for (int unit = pass == BACKWARD; unit < UNITS; unit++) {
                const int bits = gathered_for(t->model, unit, pass),
                          read_by_head = tied && pass == FORWARD && unit == UNITS - 2 ? E : 0;
                if (bits != (right[pass][unit] | read_by_head))
                    note("%s, %s of %s: weights of %s are gathered, expected %s", tied ? "tied" : "untied",
                         pass == FORWARD ? "forward" : "backward", t->model->params.unit[unit].name,
                         named(t->model, bits), named(t->model, right[pass][unit] | read_by_head));
            }
        trainer_free(t);
    }
}

// A unit of another stage of a pipeline has no elements here.
static void zero3_leaves_other_stages_alone(void) {
    Trainer *t = zero3_trainer("", mesh_new((MeshShape){.dp = n}), false, NULL);
    Model *m = t->model;
    Unit *u = &m->params.unit[m->first_block_unit], here = *u;
    u->count = u->own_count = 0;
    SAME(gathered_for(m, m->first_block_unit, FORWARD), 0);
    *u = here;
    trainer_free(t);
}

// A recipe says what is sent in place of weights (recipe.h): here bf16, whatever their dtype.
static int64_t as_many(const void *context, int tensor, int64_t count) {
    (void)context, (void)tensor;
    return count;
}
static void narrow(void *context, const Tensor *coded, Tensor part, Group group) {
    (void)context, (void)group;
    op_copy(coded[0], part);
}
static void widen(void *context, Tensor part, const Tensor *coded) {
    (void)context;
    op_copy(part, coded[0]);
}
static void send_bf16(Recipe *recipe, const Config *config) {
    static const Codec bf16 = {"bf16", NULL, 1, {BF16}, as_many, narrow, widen};
    (void)config;
    recipe->send_weights = &bf16;
}

static void zero3_sends_coded_weights(void) {
    static const Technique coded = {.name = "weights in bf16", .recipe = send_bf16};
    // Replicas on every rank; and on every other, as where two ranks of tensor parallelism share each.
    for (int tp = 1; tp <= 2 && n % tp == 0; tp++) {
        Mesh mesh = mesh_new((MeshShape){.dp = n / tp, .tp = tp});
        Trainer *t = zero3_trainer("", mesh, false, &coded);
        Model *m = t->model;
        clock_reset();
        gathered_for(m, m->first_block_unit, BACKWARD);
        expect_bytes("all_gather", (double)m->params.unit[m->first_block_unit].count, 2, mesh);
        trainer_free(t);
    }
}

// Forward keeps the head for a backward, and no backward follows an evaluation.
static void zero3_frees_what_an_evaluation_gathers(void) {
    Trainer *t = zero3_trainer("", mesh_new((MeshShape){.dp = n}), true, NULL);
    held_out_loss(t, 2);
    for (int i = 0; i < t->model->params.units; i++)
        SAME(tensor_exists(t->model->params.unit[i].values), false);
    trainer_free(t);
}

// Between steps nothing is gathered, so each rank looks at its own part of a weight: what is bad there is
// named by that rank, and by no other.
static void zero3_names_the_bad_weight_of_its_part(void) {
    Trainer *t = zero3_trainer("", mesh_new((MeshShape){.dp = n}), true, NULL);
    const Params *p = &t->model->params;
    Batch batch = batch_new(t, 0);
    MicroBatch micro = micro_batch_new(t->model, 0, t->config.micro_batch, batch.tokens, batch.targets, 1);
    int named_here = 0;
    for (int i = 0; i < p->count; i++)
        for (int rank = 0; rank < n; rank++) {
            const Tensor part = param_own_value(p, &p->param[i], NULL);
            const bool bad = rank == me && tensor_exists(part);
            if (bad) op_fill(tensor_view(part, tensor_count(part) - 1, SHAPE(1)), NAN);
            const char *said = micro_batch_first_bad(t->model, &micro);
            char *right = bad ? format_text("weight %s", p->param[i].name) : NULL;
            if (!said != !right || (said && strcmp(said, right)))
                note("rank %d's part of %s is bad: %s is named", rank, p->param[i].name,
                     said ? said : "nothing");
            if (bad) op_fill(part, 0);
            named_here += bad;
            free(right);
        }
    if (!named_here) note("no weight has a part here");
    micro_batch_free(t->model, &micro);
    batch_free(&batch);
    trainer_free(t);
}

// Ranks' parts differ in size. A run compares the sum over all ranks with its formula; here it is each
// rank's own.
static void each_rank_is_priced_by_its_own_part(void) {
    static const Technique *const stages[] = {&zero1, &zero2, &zero3};
    for (int stage = 1; stage <= 3; stage++) {
        Config c = config_of("hidden=9 head-size=4 ffn=7 steps=1 optimizer=adamw");
        const Technique *const list[] = {stages[stage - 1], NULL};
        Trainer *t = trainer_new(&c, mesh_new((MeshShape){.dp = n}), list);
        train_step(t, NULL);
        const Price price = trainer_price(t);
        const double held = (double)memory_account().now[MEMORY_OPTIMIZER], most = comm_max(held, world);
        SAME(price_states(&price, t->model, MEMORY_OPTIMIZER), held);
        if (n == 4 && most == -comm_max(-held, world)) note("ZeRO-%d: all ranks hold %.0f B", stage, most);
        trainer_free(t);
    }
}

// k neighbouring replicas of a group shard the model, and every k-th has the same shard; ranks of a group
// need not be neighbours in the world. Calls inside and across nodes, which run at the same time, use
// different lines.
static void hybrid_groups_are_neighbours_or_apart(void) {
    for (int tp = 1; tp <= 2 && n % tp == 0; tp++) {
        Group dp = mesh_new((MeshShape){.dp = n / tp, .tp = tp}).dp;
        for (int k = 1; k <= dp.size; k++) {
            if (dp.size % k) continue;
            Group inside = hybrid_zero_group(dp, k, true), across = hybrid_zero_group(dp, k, false);
            SAME(inside.size, k);
            SAME(across.size, dp.size / k);
            for (int i = 0; i < k; i++) SAME(inside.member[i], dp.member[dp.rank / k * k + i]);
            for (int i = 0; i < dp.size / k; i++) SAME(across.member[i], dp.member[dp.rank % k + i * k]);
            SAME(inside.line, LINE_DP);
            SAME(across.line, LINE_DP_ACROSS);
        }
    }
}

// Each unit's all-reduce across nodes starts once its sum inside is there, and is waited for at the end.
static void hybrid_overlaps(void) {
    if (n % 2) return;
    Config c = config_of("");
    c.dp = n;
    config_set(&c, "shard-ranks", n / 2);
    Trainer *t = trainer_new(&c, mesh_new((MeshShape){.dp = n}), (const Technique *[]){&hybrid_zero, NULL});
    Model *m = t->model;
    const Sockets *sockets = &m->sockets;
    model_begin_step(m, 1);
    clock_reset();
    for (int before = 0, inside = 0; before < m->params.units; before++) {
        const int unit = m->params.units - 1 - before;
        sockets->gradients.begin(sockets->gradients.context, m, unit);
        sockets->gradients.ready(sockets->gradients.context, m, unit, true);
        if (before == 0) inside = in_flight_count;  // for one reduce-scatter
        SAME(comm_count("all_reduce").calls, before);
        SAME(in_flight_count - inside, before);
    }
    sockets->gradients.finish(sockets->gradients.context, m);
    SAME(comm_count("all_reduce").calls, m->params.units);
    SAME(in_flight_count, 0);
    trainer_free(t);
}

// With two micro-batches in flight the first has the arena: the backward of the other does not give back a
// place.
static void zero_r_keeps_the_place_of_the_first(void) {
    Config c = config_of("recompute=none");
    Trainer *t = trainer_new(&c, mesh_single(), NULL);
    ZeroR z = {.tp = world, .contiguous = true};
    zero_r_plug(t->model, &z);
    Batch batch = batch_new(t, 0);
    MicroBatch micro[2];
    model_begin_step(t->model, 2);
    for (int i = 0; i < 2; i++) {
        micro[i] = micro_batch_new(t->model, i, c.micro_batch, batch.tokens, batch.targets, 1);
        model_forward(t->model, &micro[i]);
    }
    for (int i = 1; i >= 0; i--) {
        model_backward(t->model, &micro[i]);
        for (int64_t layer = 0; layer < c.layers; layer++) SAME(z.held[layer], i == 1);
        micro_batch_free(t->model, &micro[i]);
    }
    held_out_loss(t, 1);  // no backward follows an evaluation
    for (int64_t layer = 0; layer < c.layers; layer++) SAME(z.held[layer], false);
    batch_free(&batch);
    zero_r_unplug(t->model, &z);
    trainer_free(t);
}

static const RankTest tests[] = {TEST(parts_are_even),
                                 TEST(ddp_sums_among_replicas),
                                 TEST(replicas_divide_buckets),
                                 TEST(zero1_overlaps),
                                 TEST(zero3_gathers_one_unit_ahead),
                                 TEST(zero3_leaves_other_stages_alone),
                                 TEST(zero3_sends_coded_weights),
                                 TEST(zero3_frees_what_an_evaluation_gathers),
                                 TEST(zero3_names_the_bad_weight_of_its_part),
                                 TEST(each_rank_is_priced_by_its_own_part),
                                 TEST(hybrid_groups_are_neighbours_or_apart),
                                 TEST(hybrid_overlaps),
                                 TEST(zero_r_keeps_the_place_of_the_first)};

int main(int argc, char **argv) {
    const char *pattern = ranks_start(argc, argv, 4);
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
