// pipeline_nodes.c: the throughput that a pipeline loses across nodes, compared with tensor parallelism.
// Playbook: "Pipeline Parallelism", where the one drops by 14% from 8 to 16 GPUs, and the other by 43%.
//
//                                                  pipeline                 tensor parallelism
//     8 GPUs    one node (here two of them, dp 2)  n h to a neighbour       4 all-reduces a layer, NVLink
//     16 GPUs   one group over two nodes           one hop by network       all of them by network as well
//
// The model is the same, so each of twice as many GPUs has half as much of it: half of the layers, or half
// of its part of each matrix. A pipeline's messages are few and hidden; it loses by its bubble: with a
// fixed m 1 - (m + 7) / (m + 15), 17% for m = 32. If m grows with p, as m = p - 1 does in the playbook's
// benchmark, the bubble stays as long as the work, and only time for communication is lost. Tensor
// parallelism has no bubble, but waits for each of its all-reduces. So it loses more (with efficiencies of
// 1 more than twice as much), unless a message across nodes takes longer than F: then messages queue, and
// the pipeline waits for them as well.
//
// Bytes sent: a dry run's, none. This file has no main: one_f_one_b shows it on 16 ranks.
#include "pipeline.h"

enum { GPUS = 16, NODE = 8 };

typedef struct Way {
    const char *name;
    int64_t micro_batches[2];  // on 8 GPUs and on 16
    Techniques techniques;
    double seconds[2];    // of a step on 8 and on 16
    double lost, bubble;  // shares of one GPU's throughput: all that is lost, and by the bubble alone
    double computes;      // seconds of a rank of 16, for each micro-batch
} Way;

// A step of 16 layers of Llama 3 8B.
static double step_of(Way *way, int degree) {
    const bool tensor = way->techniques[0] == &tensor_parallel;
    Config c = config_of_model("llama-3-8b", "layers=16 vocab=256 seq=4096 micro-batch=1 dtype=bf16");
    MeshShape shape = {.dp = GPUS / degree, .pp = tensor ? 1 : degree, .tp = tensor ? degree : 1};
    c.grad_acc = way->micro_batches[degree == GPUS];
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
    enum { WAYS = 3 };
    Way way[WAYS] = {{.name = "pp, m = 32", .micro_batches = {32, 32}, .techniques = stages},
                     {.name = "pp, m = 7, 15", .micro_batches = {7, 15}, .techniques = stages},
                     {.name = "tp, m = 4", .micro_batches = {4, 4}, .techniques = heads}};
    const Way *tp = &way[WAYS - 1];
    if (mesh.pp.size != GPUS || config_number(config, "schedule") != ONE_F_ONE_B) return;
    device_dry_run(true);
    say("\nFrom one node of 8 GPUs to two: a step of 16 layers of Llama 3 8B, on the model clock of %s:\n",
        config->machine);
    say("  %-16s %14s %14s %16s %18s", "", "8 GPUs, ms", "16 GPUs, ms", "lost on a GPU", "by the bubble");
    for (Way *w = way; w < way + WAYS; w++) {
        for (int twice = 0; twice < 2; twice++) w->seconds[twice] = step_of(w, NODE << twice);
        const double m[2] = {(double)w->micro_batches[0], (double)w->micro_batches[1]}, more = m[1] / m[0];
        w->lost = 1 - more * w->seconds[0] / w->seconds[1] / 2;
        if (w < tp) w->bubble = 1 - more * (m[0] + NODE - 1) / (m[1] + GPUS - 1);
        say("  %-16s %14.3f %14.3f %15.0f%% %17.0f%%", w->name, 1e3 * w->seconds[0], 1e3 * w->seconds[1],
            100 * w->lost, 100 * w->bubble);
        report_number(w->name, "throughput of a GPU lost across nodes", w->lost, "");
    }
    Traffic message = {1, 2.0 * 4096 * 4096, 0}, none = {0};  // n h of bf16
    double hop = clock_transfers_seconds(none, message);
    bool queues = hop > way[0].computes / 3;
    bool full_speed = config->compute_efficiency == 1 && config->network_efficiency == 1;
    for (const Way *w = way; w < tp; w++) {
        bool less = full_speed ? w->lost < tp->lost / 2 : queues || w->lost < tp->lost;
        report_that(w->lost > w->bubble && less,
                    "across nodes a GPU loses %.2f of its throughput by a pipeline (%s), whose bubble takes "
                    "%.2f, and %.2f by tensor parallelism",
                    w->lost, w->name, w->bubble, tp->lost);
    }
    if (queues)
        say("  (a message across nodes takes %.3f ms, longer than F: the pipeline waits for each of them)",
            1e3 * hop);
    clock_set_nodes((int)config->gpus_per_node);
    device_dry_run(false);
}
