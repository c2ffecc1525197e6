// test_zero_in_flight.c [--ranks N] [PATTERN]: when ZeRO-1, ZeRO-3 and hybrid sharding start and wait for
// what they send, and among whom; how many elements each rank has; of ZeRO-R, whose place in the arena a
// backward gives back. TAP.
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

// What the fullest rank stores is what all must have room for: at most ceil(count / N). Parts follow one
// another, and are all of the unit.
static void parts_are_even(void) {
    for (int size = 1; size <= 9; size++)
        for (int64_t count = 0; count <= 40; count++) {
            int64_t end = 0, first;
            for (int rank = 0; rank < size; rank++) {
                const int64_t part = zero_part(count, rank, size, &first);
                SAME(first, end);
                if (part < 0 || part > (count + size - 1) / size)
                    note("rank %d of %d has %ld of %ld elements", rank, size, (long)part, (long)count);
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

// What all ranks send by a call for each unit, among the ranks that hold replicas of it and no others.
static void expect_bytes(const char *call, double elements, double width, Mesh mesh) {
    const double sent = comm_sum(comm_count(call).bytes, mesh.world),
                 right = (mesh.dp.size - 1) * elements * width * mesh.world.size / mesh.dp.size;
    if (sent != right) note("%d replicas: %s sends %.0f B, and not %.0f", mesh.dp.size, call, sent, right);
}

// ---- ZeRO-1 ----

// Gradients go as soon as they are ready, and wait for none; weights, when --gather says.
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
            note("when %s is ready, the gradients of the units of bits %x are in flight, and not %x",
                 m->params.unit[unit].name, (unsigned)bits, (unsigned)right);
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
            note(
                "--gather %d: when %s has been stepped, the weights of the units of bits %x are in flight, "
                "and not %x",
                (int)gather, m->params.unit[unit].name, (unsigned)bits, (unsigned)right);
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

// ---- ZeRO-3 ----

// The units whose weights are here or in flight, as bits.
static int gathered(const Model *m) {
    int bits = 0;
    for (int i = 0; i < m->params.units; i++) bits |= tensor_exists(m->params.unit[i].values) << i;
    return bits;
}

// With nothing gathered before: which weights are here or in flight while a unit computes. Tied, the head
// reads the embedding, too, whose backward needs none.
static void zero3_gathers_ahead(void) {
    enum { E = 1, B0 = 2, B1 = 4, H = 8, UNITS = 4 };
    static const int want[2][UNITS] = {{E | B0, B0 | B1, B1 | H, H}, {0, B0, B0 | B1, B1 | H}};
    for (int tied = 0; tied < 2; tied++) {
        Config c = config_of(tied ? "tied=1" : "");
        Trainer *t = trainer_new(&c, mesh_new((MeshShape){.dp = n}), (const Technique *[]){&zero3, NULL});
        Model *m = t->model;
        const Zero *zero = trainer_context(t, &zero3);
        SAME(m->params.units, UNITS);
        for (int pass = FORWARD; pass <= BACKWARD; pass++)
            for (int unit = pass == BACKWARD; unit < UNITS; unit++) {
                const int ahead = pass == FORWARD && tied && unit == UNITS - 2 ? E : 0;
                const int right = want[pass][unit] | ahead;
                m->sockets.parameters.acquire(m->sockets.parameters.context, m, unit, (Pass)pass);
                if (gathered(m) != right || in_flight(zero->gathering, UNITS) != (right & ~(1 << unit)))
                    note("%s, while %s computes in %s, the units of bits %x are gathered, and not %x",
                         tied ? "tied" : "untied", m->params.unit[unit].name,
                         pass == FORWARD ? "forward" : "backward", (unsigned)gathered(m), (unsigned)right);
                m->sockets.parameters.release(m->sockets.parameters.context, m, unit, (Pass)pass);
                m->sockets.parameters.complete(m->sockets.parameters.context, m);
                SAME(gathered(m), 0);
            }
        trainer_free(t);
    }
}

// A unit of another stage of a pipeline has no elements here, and is never gathered.
static void zero3_leaves_other_stages_alone(void) {
    Config c = config_of("layers=1");
    config_set(&c, "no-prefetch", 1);
    Trainer *t = trainer_new(&c, mesh_new((MeshShape){.dp = n}), (const Technique *[]){&zero3, NULL});
    Model *m = t->model;
    Unit *u = &m->params.unit[m->first_block_unit], here = *u;
    u->count = u->own_count = 0;
    m->sockets.parameters.acquire(m->sockets.parameters.context, m, m->first_block_unit, FORWARD);
    SAME(gathered(m), 0);
    *u = here;
    trainer_free(t);
}

// A recipe says what goes in place of weights (recipe.h): here bf16, whatever their dtype is.
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

static void zero3_sends_coded(Mesh mesh) {
    static const Technique coded = {.name = "weights in bf16", .recipe = send_bf16};
    Config c = config_of("layers=1");
    config_set(&c, "no-prefetch", 1);
    Trainer *t = trainer_new(&c, mesh, (const Technique *[]){&zero3, &coded, NULL});
    Model *m = t->model;
    const int block = m->first_block_unit;
    clock_reset();
    m->sockets.parameters.acquire(m->sockets.parameters.context, m, block, BACKWARD);
    expect_bytes("all_gather", (double)m->params.unit[block].count, 2, mesh);
    m->sockets.parameters.release(m->sockets.parameters.context, m, block, BACKWARD);
    trainer_free(t);
}

static void zero3_gathers_coded_among_replicas(void) {
    zero3_sends_coded(mesh_new((MeshShape){.dp = n}));
    if (n % 2 == 0) zero3_sends_coded(mesh_new((MeshShape){.dp = n / 2, .tp = 2}));
}

// ---- hybrid sharding ----

// Each unit's sum crosses nodes once its sum inside is there, and is waited for at the end: each adds as
// much to what is in flight. Every rank has its place's sum over all ranks that hold replicas.
static void hybrid_in_nodes_of(int k, Mesh mesh) {
    Config c = config_of("");
    config_set(&c, "shard-ranks", k);
    c.dp = mesh.dp.size;
    Trainer *t = trainer_new(&c, mesh, (const Technique *[]){&hybrid_zero, NULL});
    Model *m = t->model;
    const Sockets *sockets = &m->sockets;
    const int units = m->params.units;
    int inside = 0, across = 0;  // notes of one request
    double sum = 0;
    for (int i = 0; i < mesh.dp.size; i++) sum += 1 + mesh.dp.member[i];
    model_begin_step(m, 1);
    clock_reset();
    for (int unit = units - 1; unit >= 0; unit--) {
        const int sums = units - 1 - unit;
        sockets->gradients.begin(sockets->gradients.context, m, unit);
        op_fill(m->params.unit[unit].grads, 1 + me);
        sockets->gradients.ready(sockets->gradients.context, m, unit, true);
        if (k == mesh.dp.size) continue;
        if (sums == 0) inside = in_flight_count;
        if (sums == 1) across = in_flight_count - inside;
        const int started = (int)comm_count("all_reduce").calls;
        const int flying = across > 0 ? (in_flight_count - inside) / across : 0;
        if (started != sums || flying != sums)
            note("%d sums across nodes are started and %d in flight when %s is ready, and not %d", started,
                 flying, m->params.unit[unit].name, sums);
    }
    sockets->gradients.finish(sockets->gradients.context, m);
    SAME(in_flight_count, 0);
    for (int unit = 0; unit < units; unit++) {
        const Unit *u = &m->params.unit[unit];
        double *got = host_alloc((size_t)(u->own_count + 1) * sizeof *got);
        tensor_to_doubles(got, u->own_grads);
        for (int64_t i = 0; i < u->own_count; i++) SAME(got[i], sum);
        free(got);
    }
    trainer_free(t);
}

// Also with replicas on every other rank.
static void hybrid_overlaps(void) {
    for (int tp = 1; tp <= 2 && n % tp == 0; tp++) {
        const Mesh mesh = mesh_new((MeshShape){.dp = n / tp, .tp = tp});
        for (int k = 1; k <= mesh.dp.size; k++)
            if (mesh.dp.size % k == 0) hybrid_in_nodes_of(k, mesh);
    }
}

// ---- ZeRO-R ----

// Of two micro-batches in flight the first has the arena: the backward of the other gives no place back.
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
    batch_free(&batch);
    zero_r_unplug(t->model, &z);
    trainer_free(t);
}

static const RankTest tests[] = {TEST(parts_are_even),
                                 TEST(zero1_overlaps),
                                 TEST(zero3_gathers_ahead),
                                 TEST(zero3_leaves_other_stages_alone),
                                 TEST(zero3_gathers_coded_among_replicas),
                                 TEST(hybrid_overlaps),
                                 TEST(zero_r_keeps_the_place_of_the_first)};

int main(int argc, char **argv) {
    const char *pattern = ranks_start(argc, argv, 4);
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
