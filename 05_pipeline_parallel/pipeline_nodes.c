// pipeline_nodes.c: the throughput that a pipeline loses across nodes, compared with tensor parallelism.
// Playbook: "Pipeline Parallelism", where the one drops by 14% from 8 to 16 GPUs, and the other by 43%.
//
//                                                  pipeline                 tensor parallelism
//     8 GPUs    one node (here two of them, dp 2)  n h to a neighbour       4 all-reduces a layer, NVLink
//     16 GPUs   one group over two nodes           one hop by network       all of them by network as well
//
// The model is the same, so each of twice as many GPUs has half of the work. A pipeline's messages are few
// and hidden; it loses by its longer bubble: with m micro-batches 1 - (m + 7) / (m + 15), 17% for m = 32.
// (The playbook's 14% is for m <= p - 1, where on 8 GPUs the bubble is already as long as the work.) Tensor
// parallelism has no bubble, but waits for each of its all-reduces. So it loses more, at full speed more than
// twice as much, unless a message across nodes takes longer than F: then messages queue, and the pipeline
// waits for them as well.
//
// Bytes sent: a dry run's, none. This file has no main: one_f_one_b shows it on 16 ranks.
#include "pipeline.h"

enum { GPUS = 16, NODE = 8 };

typedef struct Way {
    const char *name;
    int64_t micro_batches;
    Techniques techniques;
    double seconds[2], lost;  // of a step on 8 and on 16; the share of one GPU's throughput
    double computes;          // seconds of a rank of 16, for each micro-batch
} Way;

// A step of 16 layers of Llama 3 8B.
static double step_of(Way *way, bool tensor, int degree) {
    Config c = config_of_model("llama-3-8b", "layers=16 vocab=256 seq=4096 micro-batch=1 dtype=bf16");
    MeshShape shape = {.dp = GPUS / degree, .pp = tensor ? 1 : degree, .tp = tensor ? degree : 1};
    c.grad_acc = way->micro_batches;
    c.dp = shape.dp, c.pp = shape.pp, c.tp = shape.tp;
    config_set(&c, "schedule", ONE_F_ONE_B);
    Mesh mesh = mesh_new(shape);
    clock_set_nodes(degree == NODE ? GPUS : NODE);  // 8 GPUs share a node
    clock_push(way->name);
    StepCost cost = program_cost(&c, mesh, way->techniques);
    clock_pop();
    way->computes =
        comm_max(cost.step_seconds - cost.comm.exposed_seconds, mesh.world) / (double)c.grad_acc;
    return comm_max(cost.step_seconds, mesh.world);
}

void pipeline_across_nodes(Mesh mesh, const Config *config) {
    static const Technique *const stages[] = {&pipeline, NULL}, *const heads[] = {&tensor_parallel, NULL};
    Way way[] = {{.name = "pp", .micro_batches = 32, .techniques = stages},
                 {.name = "tp", .micro_batches = 4, .techniques = heads}};
    if (mesh.pp.size != GPUS || config_number(config, "schedule") != ONE_F_ONE_B) return;
    device_dry_run(true);
    say("\nFrom one node of 8 GPUs to two: a step of 16 layers of Llama 3 8B, on the model clock of %s:\n",
        config->machine);
    say("  %-12s %14s %14s %16s", "", "8 GPUs, ms", "16 GPUs, ms", "lost on a GPU");
    for (int i = 0; i < 2; i++) {
        for (int twice = 0; twice < 2; twice++)
            way[i].seconds[twice] = step_of(&way[i], i == 1, NODE << twice);
        way[i].lost = 1 - way[i].seconds[0] / way[i].seconds[1] / 2;
        say("  %s, m = %-5ld %14.3f %14.3f %15.0f%%", way[i].name, way[i].micro_batches,
            1e3 * way[i].seconds[0], 1e3 * way[i].seconds[1], 100 * way[i].lost);
        report_number(way[i].name, "throughput of a GPU lost across nodes", way[i].lost, "");
    }
    double m = (double)way[0].micro_batches, bubble = 1 - (m + NODE - 1) / (m + GPUS - 1);
    say("  the bubble alone takes %.0f%% of a pipeline", 100 * bubble);
    Traffic message = {1, 2.0 * 4096 * 4096, 0}, none = {0};  // n h of bf16
    double hop = clock_transfers_seconds(none, message);
    bool queues = hop > way[0].computes / 3;
    if (queues)
        say("  (a message across nodes takes %.3f ms, longer than F: the pipeline waits for each of them)",
            1e3 * hop);
    bool full_speed = config->compute_efficiency == 1 && config->network_efficiency == 1,
         less = full_speed ? way[0].lost < way[1].lost / 2 : queues || way[0].lost < way[1].lost;
    report_that(way[0].lost > bubble && less,
                "across nodes a GPU loses %.2f of its throughput by a pipeline, whose bubble takes %.2f, "
                "and %.2f by tensor parallelism",
                way[0].lost, bubble, way[1].lost);
    clock_set_nodes((int)config->gpus_per_node);
    device_dry_run(false);
}
