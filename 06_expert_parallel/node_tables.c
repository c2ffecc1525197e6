// node_tables.c: what two hops send across and inside nodes, compared with plain dispatch. Playbook:
// "Expert parallelism"; DeepSeek-V3 (2024), section 3.2.2.
//
// The same step is run with expert_parallel.c and with node_limited_routing.c, and comm counts the bytes of
// their all-to-alls that leave a node. By the routing tables, summed over all ranks, these are:
//
//     plain      across   4 h B (rows whose expert is in another node)
//     two hops   across   (4 h B + 4 k + 2 w k) (tokens x other nodes of their experts)
//
// with B bytes per element, 4 for both ways in both passes, and w bytes per routing weight. Inside, it is
// 4 h B for each row that goes to another rank of the node. The counts of every forward are added. Two more
// runs send all tokens to one node, and keep two micro-batches in flight. This file has no main:
// node_limited_routing.c runs it.
#include "expert_parallel.h"

// Of all ranks in a step.
typedef struct Hidden {
    double crossings, rows;           // forward: to other nodes, and to other ranks of the node
    double across, inside;            // bytes by the routing tables
    double sent_across, sent_inside;  // and as counted
    double passes;                    // forwards of a block, on all ranks
} Hidden;

static double in_other_nodes(const ExpertParallel *x, int ranks) {
    double rows = 0;
    for (int i = 0; i < x->ep.size; i++) rows += i / ranks == x->ep.rank / ranks ? 0 : x->to[i];
    return rows;
}

static Hidden step_with(Mesh mesh, const Config *c, Techniques techniques, int ranks) {
    Trainer *t = trainer_new(c, mesh, techniques);
    Record record = train_record(t, "bytes across nodes");
    CommCount sent = comm_count("all_to_all");
    const ExpertParallel *plain = trainer_context(t, &expert_parallel);
    const NodeLimited *l = trainer_context(t, &node_limited_routing);
    if (l) plain = l->plain;
    double crossings = in_other_nodes(plain, ranks), rows = plain->rows_sent - crossings;
    Hidden sums = {.crossings = comm_sum(l ? l->tokens_sent : crossings, mesh.world),
                   .rows = comm_sum(l ? l->rows_sent : rows, mesh.world),
                   .sent_across = comm_sum((double)sent.across, mesh.world),
                   .sent_inside = comm_sum((double)(sent.bytes - sent.across), mesh.world),
                   .passes = comm_sum(plain->passes, mesh.world)};
    double row = (double)(c->hidden * (int64_t)dtype_size(c->dtype)), w = c->dtype == F64 ? 8 : 4;
    double counts = 4.0 * (double)c->experts / (double)c->ep * sums.passes, n = (double)(c->ep / ranks);
    sums.across = (4 * row + (l ? (4 + 2 * w) * (double)c->top_k : 0)) * sums.crossings +
                  counts * (double)(c->ep - ranks) + (l ? 4 * (n - 1) * sums.passes : 0);
    sums.inside = 4 * row * sums.rows + counts * (ranks - 1);
    record_free(&record);
    trainer_free(t);
    return sums;
}

static void print_step(const char *name, const Hidden *sums, double tokens, bool verbose) {
    say("  %-16s %20.2f %16s %16s", name, sums->crossings / tokens, bytes_text(sums->sent_across),
        bytes_text(sums->sent_inside));
    report_number(name, "hidden states of a token across nodes, one way", sums->crossings / tokens, "");
    report_number(name, "bytes across nodes", sums->sent_across, "B");
    bool quiet = report_quiet(!verbose);
    report_equal("across nodes, by the routing tables", sums->across, sums->sent_across, "B");
    report_equal("inside nodes, by the routing tables", sums->inside, sums->sent_inside, "B");
    report_quiet(quiet);
}

static void beside_plain(Mesh mesh, Config c, int ranks, bool verbose) {
    c.steps = 1;
    c.recompute = RECOMPUTE_NONE;
    int nodes = (int)c.ep / ranks, most = (int)node_limit(&c, nodes);
    Hidden plain = step_with(mesh, &c, expert_layouts(), ranks),
           hops = step_with(mesh, &c, node_limited_layouts(), ranks);
    double tokens = hops.passes * (double)(c.micro_batch * c.seq / c.tp);
    int all = mesh.world.size / ranks;  // of which ep may be a part
    say("\nA step of all ranks, %d node%s of %d; a token takes %ld expert%s in at most %d node%s:\n", all,
        plural(all), ranks, c.top_k, plural(c.top_k), most, plural(most));
    say("  %-16s %20s %16s %16s", "", "sent across, a token", "bytes across", "bytes inside");
    print_step("plain dispatch", &plain, tokens, verbose);
    print_step("two hops", &hops, tokens, verbose);
    int bound = most < nodes - 1 ? most : nodes - 1;
    report_that(hops.crossings <= bound * tokens && hops.crossings <= plain.crossings,
                "a token crosses %.2f times in two hops, at most %d, and %.2f times in plain dispatch",
                hops.crossings / tokens, bound, plain.crossings / tokens);
}

void node_tables(Mesh mesh, const Config *config) {
    int ranks = (int)(config->gpus_per_node ? config->gpus_per_node : clock_machine()->gpus_per_node);
    if (config_number(config, "proof-only")) return;
    // All to the first node: the others get no row.
    if (config->dtype == F64) experts_all_alike(mesh, config, node_limited_layouts());
    Config once = *config;
    once.steps = 1;
    // The hops of both micro-batches share the same links.
    if (config_number(config, "zero") < 3)
        experts_two_in_flight(mesh, &once, node_limited_overlapped(), node_limited_layouts());
    if (mesh.ep.size > ranks && mesh.cp.size == 1 && mesh.pp.size == 1)
        beside_plain(mesh, *config, ranks, config->verbose);
}
