// bench_experts.c: a mixture of experts with 2 ranks of one thread beside the dense model of the same
// active FLOPs on the same ranks. `make bench` runs it; yardstick.h has the measure.
#include "06_expert_parallel/expert_parallel.h"
#include "yardstick.h"

enum { MODELS = 2 };
#define SHAPE_OF_BOTH \
    "layers=4 hidden=256 heads=4 kv-heads=4 vocab=256 seq=256 dtype=f32 warmup=1 steps=1000 " \
    "micro-batch=4 grad-acc=2 "

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
        trainer[i] = trainer_new(&c, mesh, i ? tensor_layouts : expert_layouts);
    }
    double share[MODELS][ROUNDS], ratio[ROUNDS], target = 0.85;
    Missing missing[MODELS];
    shares_of_sgemm(share, missing, trainer, MODELS, mesh.world);
    for (int i = 0; i < ROUNDS; i++) ratio[i] = share[0][i] / share[1][i];
    char *name = format_text("experts-L4-h256-%d-ranks", mesh.ep.size);
    figure(name, ratio, ROUNDS, "of-dense", target);
    free(name);
    if (median(ratio, ROUNDS) < target) missing_say(&missing[0]);
    return comm_finish(0);
}
