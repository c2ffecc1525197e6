// overlap_tables.c: what two micro-batches in flight hide, for blocks of DeepSeek-V3 on the model clock.
// Playbook: "Expert parallelism"; DeepSeek-V3 (2024), section 3.2.
//
// Dry runs with expert_parallel.c and with overlapped_experts.c, in a node and over 8 nodes, or in a
// pipeline with DualPipe's pairs. Overlap hides some of the seconds that all-to-alls were exposed, behind
// the other micro-batch's compute and, with two hops, behind its other hop. The check demands
//
//     hidden  >=  share  min(exposed before, compute)
//
// with a share of 0.85, or of 0.75 where sending takes about as long as computing, or longer: single
// stretches of the two then differ in length (0.80 is the least that is reached, where both take equally
// long). With DualPipe it is the share of passes that run in pairs, since nothing runs beside the others.
// This file has no main: overlapped_experts.c runs it.
#include <math.h>

#include "expert_parallel.h"

typedef struct Exposed {
    double sent, exposed, summed, computed, step;  // seconds; summed: in all-reduces
} Exposed;

// Only experts and the pipeline send anything: all-reduces of gradients over dp would use the same links.
// (Those over DualPipe's two copies come after all passes.)
static Exposed exposed_by(Mesh mesh, const Config *c, Techniques techniques, const char *title) {
    mesh.dp = mesh.dp_cp = mesh.expert_dp = mesh_single().dp;
    clock_push(title);
    StepCost cost = program_cost(c, mesh, techniques);
    CommCount all_to_all = comm_count("all_to_all");
    Exposed e = {all_to_all.model_seconds, all_to_all.exposed_seconds,
                 comm_count("all_reduce").exposed_seconds, cost.step_seconds - cost.comm.exposed_seconds,
                 cost.step_seconds};
    clock_pop();
    say("  %-32s %16.3f %12.3f %12.3f", title, 1e3 * e.sent, 1e3 * e.exposed, 1e3 * e.step);
    return e;
}

// The same, and a row of the picture, with few micro-batches: more would be too small to see.
static Exposed drawn(Mesh mesh, const Config *c, Techniques techniques, const char *title,
                     const char *row) {
    Exposed e = exposed_by(mesh, c, techniques, title);
    Config few = *c;
    few.grad_acc = 4;
    mesh.dp = mesh.dp_cp = mesh.expert_dp = mesh_single().dp;
    clock_push(row);
    program_cost(&few, mesh, techniques);
    clock_pop();
    timeline_keep(row);
    return e;
}

static Config deepseek(const Config *config, Mesh mesh) {
    Config c = config_of_model("deepseek-v3",
                               "layers=2 vocab=1024 seq=4096 dtype=bf16 grad-acc=32 micro-batch=1 steps=2");
    c.ep = mesh.ep.size, c.dp = mesh.dp.size, c.pp = mesh.pp.size;
    c.layers *= c.pp;
    config_set(&c, "zero", 0);
    if (c.pp == 1) return c;
    c.grad_acc = config->grad_acc;
    config_set(&c, "schedule", config_number(config, "schedule"));
    config_set_text(&c, "load", config_text(config, "load"));
    return c;
}

static double share_of_two(const Exposed *before) {
    return before->exposed < 0.8 * before->computed ? 0.85 : 0.75;
}

static void check_hidden(const Exposed *before, const Exposed *after, const char *what, double share) {
    double most = fmin(before->exposed, before->computed), hidden = before->exposed - after->exposed;
    say("  of %.3f ms exposed %.1f%% are hidden; compute takes %.3f ms", 1e3 * before->exposed,
        100 * hidden / before->exposed, 1e3 * before->computed);
    report_number(what, "hidden share", hidden / before->exposed, "");
    report_that(hidden >= (share - 1e-9) * most,
                "%s hide %.3f ms of all-to-alls, and should hide %.2f of %.3f", what, 1e3 * hidden, share,
                1e3 * most);
}

// Minus a hundredth: messages between stages delay a pair's passes.
static double share_of_pairs(const Config *c, int rank) {
    Schedule s = pipeline_schedule(c);
    int pairs = 0, forwards = 0;
    for (int i = 0; i < s.list[rank].count; i++) {
        const Action *action = &s.list[rank].action[i];
        pairs += action->passes == 2;
        for (int j = 0; j < action->passes; j++) forwards += action->pass[j].kind == PASS_F;
    }
    schedule_free(&s);
    say("  %d of the %d forwards are in pairs", pairs, forwards);
    return 0.99 * pairs / forwards;
}

static void head(const Config *c, const char *where) {
    say("\n%ld blocks of DeepSeek-V3 (8 K/V heads, no MLA), %ld micro-batches of %ld tokens a rank, ep %ld "
        "%s:\n",
        c->layers, c->grad_acc, c->seq, c->ep, where);
    say("  %-32s %16s %12s %12s", "", "all-to-alls, ms", "exposed, ms", "step, ms");
}

static void in_a_node(Mesh mesh, const Config *config) {
    Config c = deepseek(config, mesh);
    if (mesh.ep.size == 1 || 256 % c.ep || mesh.cp.size * mesh.tp.size > 1) return;
    clock_set_nodes((int)c.ep);
    head(&c, c.pp > 1 ? "in a node, stages in other nodes" : "in a node");
    Exposed before = exposed_by(mesh, &c, expert_layouts(), "one after the other"),
            after =
                exposed_by(mesh, &c, overlapped_layouts(), c.pp > 1 ? "pairs together" : "two in flight");
    if (c.pp == 1) check_hidden(&before, &after, "two in flight", share_of_two(&before));
    else check_hidden(&before, &after, "pairs together", share_of_pairs(&c, mesh.pp.rank));
    if (c.pp > 1 && config_number(&c, "schedule") == DUALPIPE)
        say("  the gradients of each stage's two copies are summed in %.3f ms of the step",
            1e3 * after.summed);
}

// This process stands for a rank of 64.
static void over_nodes(const Config *config) {
    enum { RANKS = 64, NODE = 8 };
    comm_stand_for_all(true);
    Mesh mesh = mesh_standing_for_all((MeshShape){.dp = RANKS, .ep = RANKS}, 0);
    Config c = deepseek(config, mesh);
    c.gpus_per_node = NODE;
    clock_set_nodes(NODE);
    head(&c, "over 8 nodes");
    timeline_title("Two blocks of DeepSeek-V3, ep 64 over 8 nodes, four micro-batches of 4096 tokens");
    drawn(mesh, &c, expert_layouts(), "plain, one after the other", "plain");
    drawn(mesh, &c, overlapped_layouts(), "plain, two in flight", "overlapped");
    Exposed before = drawn(mesh, &c, node_limited_layouts(), "two hops, one after the other", "two hops"),
            after = drawn(mesh, &c, node_limited_overlapped(), "two hops, two in flight", "both");
    check_hidden(&before, &after, "two hops, two in flight", share_of_two(&before));
    mesh_end(&mesh);
    comm_stand_for_all(false);
}

void overlap_tables(Mesh mesh, const Config *config) {
    bool was_dry = device_is_dry_run();
    device_dry_run(true);
    in_a_node(mesh, config);
    if (mesh.pp.size == 1) over_nodes(config);
    clock_set_nodes((int)config->gpus_per_node);
    device_dry_run(was_dry);
}
