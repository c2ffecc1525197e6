// bench_experts.c: a mixture of experts with 2 ranks of one thread compared with the dense model that has
// as many active FLOPs, on the same ranks. `make bench` runs it; yardstick.h explains the measurement.
//
// This measures how fast experts compute and tokens are sent, not how well a router has learned to
// distribute them: without balancing, it sends one rank twice the mean within a few steps, and the other
// rank waits. So load_balance's bias balances the load during SETTLE steps before the first measured one,
// and the weights are not changed: in a layer the busier rank then has some 7 % more rows than the mean, at
// first 13 %. Its excess over the mean, over all layers, is printed.
#include "06_expert_parallel/expert_parallel.h"
#include "yardstick.h"

enum { MODELS = 2, SETTLE = 10 };
#define SHAPE_OF_BOTH                                                                              \
    "layers=4 hidden=256 heads=4 kv-heads=4 vocab=256 seq=256 dtype=f32 warmup=1 steps=1000 lr=0 " \
    "micro-batch=4 grad-acc=2 "

static const Technique *const balanced[] = {&moe, &load_balance, &ddp_no_sync, &expert_parallel, NULL};

// Rows of the busier rank relative to the mean, in the steps since `to` was zeroed.
static double busier(const ExpertParallel *x) {
    double rows = 0, most = 0;
    comm_sum_all(x->to, x->ep.size, x->ep);
    for (int i = 0; i < x->ep.size; i++) {
        rows += x->to[i];
        most = x->to[i] > most ? x->to[i] : most;
    }
    return most / (rows / x->ep.size);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    comm_start(argc, argv, 2);
    Mesh mesh = mesh_new((MeshShape){.dp = comm_ranks(), .ep = comm_ranks()});
    Trainer *trainer[MODELS];
    for (int i = 0; i < MODELS; i++) {
        // Top 2 of experts of 512, and an MLP as wide as both.
        Config c = config_default(i ? SHAPE_OF_BOTH "ffn=1024" : SHAPE_OF_BOTH "ffn=512 experts=8 top-k=2");
        c.dp = mesh.dp.size;
        c.ep = i ? 1 : mesh.ep.size;
        config_set(&c, "zero", 0);
        config_set(&c, "balance-bias", i ? 0 : 0.01);
        trainer[i] = trainer_new(&c, mesh, i ? tensor_layouts : balanced);
    }
    for (int step = 0; step < SETTLE; step++) train_step(trainer[0], NULL);
    ExpertParallel *x = trainer_context(trainer[0], &expert_parallel);
    for (int i = 0; i < x->ep.size; i++) x->to[i] = 0;
    train_step(trainer[0], NULL);
    double above = busier(x) - 1;  // in this one step
    double share[MODELS][MOST_PAIRS], ratio[MOST_PAIRS], target = 0.85;
    Missing missing[MODELS];
    const int rounds = shares_of_sgemm(share, missing, trainer, MODELS, mesh.world);
    for (int i = 0; i < rounds; i++) ratio[i] = share[0][i] / share[1][i];
    char *name = format_text("experts-L4-h256-%d-ranks", mesh.ep.size);
    figure(name, ratio, rounds, "of-dense", target);
    free(name);
    say("  the busier rank computes %.1f %% more rows than the mean", 100 * above);
    if (median(ratio, rounds) < target) missing_say(&missing[0]);
    return comm_finish(0);
}
