// test_zero_in_flight.c [--ranks N] [PATTERN]: when ZeRO-1 starts and waits for what it sends, among whom,
// and how many elements each rank has; of ZeRO-R, whose place in the arena a backward gives back. TAP.
#include "02_zero/zero.h"
#include "ranks.h"

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

static const RankTest tests[] = {TEST(parts_are_even), TEST(zero1_overlaps),
                                 TEST(zero_r_keeps_the_place_of_the_first)};

int main(int argc, char **argv) {
    const char *pattern = ranks_start(argc, argv, 4);
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
