// test_tensor_parallel.c [--ranks N] [PATTERN]: where a region's sums are stored, and the loss from logits
// that are sharded over the vocabulary. TAP.
#include <math.h>

#include "03_tensor_parallel/tensor_parallel.h"
#include "ranks.h"
#include "tensor/rng.h"

// With 257 tokens the last of 2 to 4 ranks has fewer than the others, and padding.
static Trainer *tensor_parallel_trainer(void) {
    Config c = config_default("layers=1 hidden=24 heads=12 kv-heads=12 ffn=12 vocab=257 seq=5 dtype=f64");
    c.tp = n;
    config_set(&c, "vocab-parallel", 1);
    return trainer_new(&c, mesh_new((MeshShape){.tp = n}),
                       (const Technique *[]){&tensor_parallel, &vocab_parallel, NULL});
}

// A copy would be one more (b s, h) for every region.
static void regions_sum_in_place(void) {
    Trainer *t = tensor_parallel_trainer();
    const Sockets *sockets = &t->model->sockets;
    MicroBatch micro = {.b = 1, .s = 2};
    Tensor partial = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(2, 3));
    op_fill(partial, 1);
    Tensor sum = sockets->region.leave(sockets->region.context, &micro, partial);
    double x[6];
    tensor_to_doubles(x, sum);
    SAME(x[5], n);
    if (sum.storage != partial.storage) note("the sum is in new memory: a copy of (b s, h) for every region");
    tensor_free(&partial), tensor_free(&sum);
    trainer_free(t);
}

// Logits around 1000, whose exponentials overflow unless the maximum is subtracted: the loss is that of the
// whole rows, and is added to what is there.
static void large_logits_have_the_loss_of_whole_rows(void) {
    enum { ROWS = 3 };
    Trainer *t = tensor_parallel_trainer();
    const int64_t v = t->config.vocab, columns = (v + n - 1) / n;
    const Sockets *sockets = &t->model->sockets;
    Tensor whole = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(ROWS, v)), lse,
           own = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(ROWS, columns)),
           losses = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(ROWS)),
           whole_lse = tensor_like(MEMORY_ACTIVATION, losses), right = loss_new();
    MicroBatch micro = {.b = 1,
                        .s = ROWS,
                        .targets = tensor_new(MEMORY_ACTIVATION, I32, SHAPE(ROWS)),
                        .loss = loss_new(),
                        .loss_scale = 1.0 / ROWS};
    double logit[ROWS * v], part[ROWS * columns];
    for (int64_t i = 0; i < ROWS * v; i++) logit[i] = 1000 + rng_normal(1, RNG_TEST, (uint64_t)i);
    for (int64_t i = 0; i < ROWS * columns; i++) {
        const int64_t j = columns * me + i % columns;
        part[i] = j < v ? logit[i / columns * v + j] : 0;
    }
    tensor_from_doubles(whole, logit);
    tensor_from_doubles(own, part);
    op_fill(micro.targets, (double)(v - 1));  // the last rank's
    op_cross_entropy_forward(losses, whole_lse, whole, micro.targets);
    op_fill(micro.loss, 1), op_fill(right, 1);  // such as experts' auxiliary loss
    op_add_sum(right, losses, micro.loss_scale);
    sockets->vocabulary.loss(sockets->vocabulary.context, &micro, &lse, own);
    const double got = loss_value(micro.loss), want = loss_value(right);
    if (!(fabs(got - want) <= 1e-10 * fabs(want)))
        note("the loss of logits around 1000 is %.12g, and %.12g of whole rows", got, want);
    Tensor *const all[] = {&whole, &own, &losses, &whole_lse, &right, &lse, &micro.targets, &micro.loss};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(all[i]);
    trainer_free(t);
}

static const RankTest tests[] = {TEST(regions_sum_in_place),
                                 TEST(large_logits_have_the_loss_of_whole_rows)};

int main(int argc, char **argv) {
    const char *pattern = ranks_start(argc, argv, 4);
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
