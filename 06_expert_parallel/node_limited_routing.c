// node_limited_routing.c: each token goes to few nodes, and is sent to each of them once. Playbook: "Expert
// parallelism"; DeepSeek-V3 (2024), sections 2.1.2 and 3.2.2.
//
// Changes from expert_parallel.c, where a token crosses the network once for each of its experts in another
// node: the ep ranks are N nodes of K. The router keeps a token's M best nodes, by the two best experts of
// each, and chooses the k experts from them (--expert-groups N --groups-kept M). Two hops bring it there:
//
//                   node 0          node 1
//                   rank 0  1       rank 2        3           a token of rank 0, experts on ranks 2 and 3
//     across        x ------------> x                         once per node, to the rank of the same place
//     inside                        x ----------> x           once per expert
//                   experts compute
//     inside                        E2(x) <------ E3(x)
//     across        y <------------ w2 E2(x) + w3 E3(x)       summed before it crosses
//
// The first hop treats a node as expert_parallel.c treats an expert, with a weight of 1; the second routes
// the tokens that arrived as if they were this rank's own. So a token's weights travel with it, and their
// gradients come back. Backward takes the same hops in reverse order.
// Bytes sent across: 4 hidden states (there and back, in both passes) for each token and each other node that
// it goes to, at most min(M, k, N - 1), where plain dispatch sends 4 for each expert there: about twice as
// many with DeepSeek-V3's 8 experts in 4 nodes. The exact formula is above price(). Memory per rank: as
// expert_parallel.c, and the row indices of both hops.
// Run: build/06_expert_parallel/node_limited_routing   (--gpus-per-node 4 --expert-groups 2, --zero 2 …)
// Last line: PASS node_limited_routing: tokens sent in two hops reproduce the single-device step …
#include <stdlib.h>

#include "expert_parallel.h"

// What a block keeps of a micro-batch's two hops.
typedef struct Hops {
    RowExchange *plain;  // which counts the rows for the experts here
    PairRows nodes;      // this rank's tokens and their nodes
    int64_t *to, *from;  // (N), in kept->own: tokens that go to each node, and come from it
    PairRows experts;    // the tokens that have come and their experts in this node
    Tensor weights;      // (tokens that have come, k)
    RowExchange inside;
    Request *request;        // in backward: of the weights' gradients …
    Tensor parts, dweights;  // … (tokens x nodes, k), and their sums (n, k)
} Hops;

// ---- the hop across ----

// Starts it: to[i] rows of `in` go to node i; *out is new, and gets from[i] rows from node i.
static Request *cross(const NodeLimited *l, MemoryKind kind, Tensor *out, const int64_t *from, Tensor in,
                      const int64_t *to) {
    int nodes = l->across.size;
    int64_t give[nodes], take[nodes], come = 0, columns = tensor_columns(in);
    for (int i = 0; i < nodes; i++) {
        give[i] = to[i] * columns;
        take[i] = from[i] * columns;
        come += from[i];
    }
    *out = tensor_new(kind, in.dtype, SHAPE(come, columns));
    return comm_all_to_all(*out, take, in, give, l->across);
}

static Tensor crossed(const NodeLimited *l, const int64_t *from, Tensor in, const int64_t *to) {
    Tensor out;
    Request *request = cross(l, MEMORY_COMMUNICATION, &out, from, in, to);
    moe_at(l->plain->moe, WAITS);
    comm_wait(request);
    return out;
}
static Tensor dispatch_across(const NodeLimited *l, const Hops *hops, Tensor own) {
    return crossed(l, hops->from, own, hops->to);
}
static Tensor combine_across(const NodeLimited *l, const Hops *hops, Tensor sums) {
    return crossed(l, hops->to, sums, hops->from);
}

// ---- who goes where ----

int64_t node_limit(const Config *c, int64_t nodes) {
    int64_t most = c->groups_kept < c->top_k ? c->groups_kept : c->top_k;
    return most < nodes ? most : nodes;
}

static PairRows choose_nodes(const NodeLimited *l, const MoeKept *kept, Tensor counts) {
    const Config *c = &l->plain->moe->model->config;
    int64_t n = tensor_rows(kept->chosen), nodes = l->across.size;
    Tensor numbers = tensor_new(MEMORY_ACTIVATION, I32, SHAPE(n, node_limit(c, nodes)));
    op_route_nodes(numbers, kept->chosen, c->experts / nodes, nodes);
    PairRows rows = pair_rows_new(counts, numbers);
    tensor_free(&numbers);
    return rows;
}

// Exchanges the counts of rows among all ranks of ep, and at the same time the counts of tokens across.
// more: theirs of rows (e); tokens to each node, and to none (N + 1); tokens from each (N).
static void count(void *context, MoeKept *kept, Tensor own, Tensor more) {
    const NodeLimited *l = context;
    int64_t e = tensor_count(own), nodes = l->across.size;
    Hops *hops = calloc(1, sizeof *hops);
    CHECK(hops, "out of host memory for a block's experts");
    kept->exchange = hops;
    hops->nodes = choose_nodes(l, kept, tensor_view(more, e, SHAPE(nodes + 1)));
    Request *request = comm_all_to_all(tensor_view(more, e + nodes + 1, SHAPE(nodes)), NULL,
                                       tensor_view(more, e, SHAPE(nodes)), NULL, l->across);
    expert_counts(l->plain, kept, own, tensor_view(more, 0, SHAPE(e)));
    comm_wait(request);
}

// When the host has read them. In a dry run, a token goes to as many nodes as it may.
static void read_hops(NodeLimited *l, MoeKept *kept, Hops *hops) {
    const Moe *moe = l->plain->moe;
    int64_t nodes = l->across.size;
    hops->to = kept->own + 2 * moe->model->config.experts + 1;
    hops->from = hops->to + nodes + 1;
    if (device_is_dry_run() && !moe->ledger.replay) {
        even_counts(hops->to, nodes, tensor_count(hops->nodes.place));
        for (int i = 0; i < nodes; i++) hops->from[i] = hops->to[l->across.rank];  // all send the same
    }
    hops->nodes.real = sum_of_counts(hops->to, nodes);
    expert_exchange(l->plain, kept);
    hops->plain = kept->exchange;
    kept->exchange = hops;
}

// Sends tokens, their experts and weights: all that the receiver needs to forward them and to sum their
// outputs.
static Tensor dispatch_tokens(const NodeLimited *l, MoeKept *kept, Hops *hops, Tensor x, Tensor *chosen) {
    Tensor in[] = {pairs_gather(&hops->nodes, x), pairs_gather(&hops->nodes, kept->chosen),
                   pairs_gather(&hops->nodes, kept->weights)};
    Tensor out[3];
    Request *request[3];
    for (int i = 0; i < 3; i++) {
        MemoryKind kind = i == 0 ? MEMORY_COMMUNICATION : MEMORY_ACTIVATION;
        request[i] = cross(l, kind, &out[i], hops->from, in[i], hops->to);
        tensor_free(&in[i]);
    }
    moe_at(l->plain->moe, WAITS);
    comm_wait_all(request, 3);
    *chosen = out[1];
    hops->weights = out[2];
    return out[0];
}

static void all_route_alike(const NodeLimited *l, MoeKept *kept, Hops *hops) {
    int64_t here = l->plain->moe->here, ranks = l->inside.ep.size;
    const int64_t *own = hops->inside.sent + l->inside.ep.rank * here;
    for (int64_t i = 0; i < ranks * here; i++) hops->inside.received[i] = own[i % here];
    kept->m = 0;
    for (int64_t i = 0; i < here; i++) kept->m += kept->count[i] = ranks * own[i];
}

// Rows for the experts of this node, as chosen by the tokens that have arrived. How many rows the node's
// other ranks send here follows from the counts of all ranks: each forwards the tokens of the ranks
// that have its position in their nodes.
static void choose_experts(const NodeLimited *l, MoeKept *kept, Hops *hops, Tensor chosen) {
    Moe *moe = l->plain->moe;
    int64_t ranks = l->inside.ep.size, nodes = l->across.size, each = ranks * moe->here;
    int64_t evenly = tensor_count(chosen) / tensor_columns(hops->nodes.place);
    Tensor numbers = tensor_like(MEMORY_ACTIVATION, chosen),
           counts = tensor_new(MEMORY_ACTIVATION, I32, SHAPE(each + 1));
    op_route_within(numbers, chosen, l->across.rank * each, each);
    hops->experts = pair_rows_new(counts, numbers);
    tensor_free(&numbers);
    int64_t *sent = host_alloc((each + 1) * sizeof *sent);
    if (!moe_read_counts(moe, kept->training, sent, counts)) even_counts(sent, each, evenly);
    tensor_free(&counts);
    hops->experts.real = sum_of_counts(sent, each);
    hops->inside.sent = sent;
    hops->inside.received = host_alloc(each * sizeof *hops->inside.received);
    for (int64_t i = 0; i < each; i++) {
        hops->inside.received[i] = 0;
        for (int64_t node = 0; node < nodes; node++)
            hops->inside.received[i] += hops->plain->received[node * each + i];
    }
    if (device_is_dry_run() && !moe->ledger.replay) all_route_alike(l, kept, hops);
}

static void add_to_table(NodeLimited *l, const MoeKept *kept, const Hops *hops) {
    if (!kept->training) return;
    int64_t here = l->plain->moe->here;
    for (int i = 0; i < l->across.size; i++) {
        bool at_home = i == l->across.rank;
        l->tokens_sent += at_home ? 0 : (double)hops->to[i];
        l->tokens_served += at_home ? 0 : (double)hops->from[i];
    }
    for (int64_t i = 0; i < l->inside.ep.size * here; i++) {
        bool at_home = i / here == l->inside.ep.rank;
        l->rows_sent += at_home ? 0 : (double)hops->inside.sent[i];
        l->rows_served += at_home ? 0 : (double)hops->inside.received[i];
    }
}

// ---- the technique: two hops there, and two back ----

static Tensor to_experts(void *context, MoeKept *kept, Tensor x) {
    NodeLimited *l = context;
    Hops *hops = kept->exchange;
    read_hops(l, kept, hops);
    Tensor chosen, come = dispatch_tokens(l, kept, hops, x, &chosen);
    choose_experts(l, kept, hops, chosen);
    tensor_free(&chosen);
    add_to_table(l, kept, hops);
    Tensor own = pairs_gather(&hops->experts, come);
    tensor_free(&hops->experts.tokens);
    tensor_free(&come);
    Tensor rows = dispatch_rows(&l->inside, &hops->inside, own);
    tensor_free(&own);
    kept->held_by_dispatch = 8 * tensor_count(hops->nodes.place) + 4 * tensor_count(hops->experts.place) +
                             tensor_bytes(hops->weights);
    return rows;
}

// y = sum over nodes of (sum over experts there of weight_j out_j)
static Tensor combine(void *context, MoeKept *kept, Tensor made) {
    const NodeLimited *l = context;
    const Hops *hops = kept->exchange;
    kept->out = combine_rows(&l->inside, &hops->inside, made, WAITS_TO_SEND);
    Tensor sums = pairs_combine(&hops->experts, kept->out, hops->weights);
    Tensor came = combine_across(l, hops, sums), y = pairs_combine(&hops->nodes, came, (Tensor){0});
    tensor_free(&sums);
    tensor_free(&came);
    return y;
}

// dout_j = weight_j dy and dweight_j = <dy, out_j>, on the rank that made the sum. The gradients of weights
// cross back while the experts compute: an earlier wait would also wait for all that crosses before them.
static Tensor combine_backward(void *context, MoeKept *kept, Tensor dy, Tensor dweights) {
    const NodeLimited *l = context;
    Hops *hops = kept->exchange;
    Tensor own = pairs_gather(&hops->nodes, dy), dsums = dispatch_across(l, hops, own);
    tensor_free(&own);
    Tensor part = tensor_like(MEMORY_ACTIVATION, hops->weights);
    Tensor drows = pairs_combine_backward(&hops->experts, dsums, part, kept->out, hops->weights);
    tensor_free(&kept->out);
    tensor_free(&dsums);
    hops->dweights = tensor_share(dweights);
    hops->request = cross(l, MEMORY_COMMUNICATION, &hops->parts, hops->to, part, hops->from);
    tensor_free(&part);
    Tensor dout = dispatch_rows(&l->inside, &hops->inside, drows);
    tensor_free(&drows);
    return dout;
}

// A weight's gradient is in the row of its node, and zero in the rows of the others.
static Tensor to_experts_backward(void *context, MoeKept *kept, Tensor drows) {
    const NodeLimited *l = context;
    Hops *hops = kept->exchange;
    Tensor own = combine_rows(&l->inside, &hops->inside, drows, WAITS_TO_SEND);
    Tensor sums = pairs_gather_backward(&hops->experts, own);
    tensor_free(&own);
    Tensor came = combine_across(l, hops, sums), dx = pairs_gather_backward(&hops->nodes, came);
    tensor_free(&sums);
    tensor_free(&came);
    comm_wait(hops->request);
    op_combine_forward(hops->dweights, hops->parts, hops->nodes.place, (Tensor){0});
    tensor_free(&hops->parts);
    tensor_free(&hops->dweights);
    return dx;
}

static void drop(void *context, MoeKept *kept) {
    const NodeLimited *l = context;
    Hops *hops = kept->exchange;
    if (!hops) return;
    kept->exchange = hops->plain;
    l->dispatch.drop(l->plain, kept);
    pair_rows_free(&hops->nodes);
    pair_rows_free(&hops->experts);
    tensor_free(&hops->weights);
    free((void *)hops->inside.sent);
    free(hops->inside.received);
    free(hops);
}

// ---- nodes ----

// Ranks of ep in a node: neighbours, as ranks fill the nodes in order.
static int64_t ranks_in_node(const Config *c) {
    int64_t ranks = c->gpus_per_node ? c->gpus_per_node : clock_machine()->gpus_per_node;
    return c->ep < ranks ? c->ep : ranks;
}

static void shard(Model *m) { expert_parallel.shard(m); }

static void *plug(Model *m) {
    NodeLimited *l = host_alloc(sizeof *l);
    Moe *moe = m->sockets.mlp.context;
    int ranks = (int)ranks_in_node(&m->config);
    *l = (NodeLimited){.plain = expert_parallel.plug(m)};
    l->inside = (ExpertParallel){.moe = moe, .ep = mesh_inside(m->mesh.ep, ranks, "ep inside", LINE_EP)};
    l->across = mesh_across(m->mesh.ep, ranks, "ep across", LINE_EP_ACROSS);
    l->dispatch = moe->dispatch;
    moe->dispatch = (Dispatch){.context = l,
                               .more_counts = m->config.experts + 2 * l->across.size + 1,
                               .count = count,
                               .to_experts = to_experts,
                               .combine = combine,
                               .combine_backward = combine_backward,
                               .to_experts_backward = to_experts_backward,
                               .drop = drop};
    return l;
}

static void unplug(Model *m, void *context) {
    NodeLimited *l = context;
    expert_parallel.unplug(m, l->plain);
    free(l);
}

// ---- the record ----

static void check(const Config *c) {
    expert_parallel.check(c);
    int64_t ranks = ranks_in_node(c), nodes = c->ep / ranks;
    int64_t whole = c->gpus_per_node ? c->gpus_per_node : clock_machine()->gpus_per_node;
    CHECK(c->ep % ranks == 0 && whole % ranks == 0,
          "--ep %ld in nodes of --gpus-per-node %ld: some nodes would have fewer of its ranks; one of "
          "the two must divide the other",
          c->ep, whole);
    CHECK(c->expert_groups % nodes == 0,
          "--expert-groups %ld is no multiple of %ld nodes (--ep %ld, --gpus-per-node %ld): --moe deepseek "
          "--expert-groups %ld would fit",
          c->expert_groups, nodes, c->ep, whole, nodes);
    CHECK(config_number(c, "capacity") == 0,
          "--capacity drops rows, and two hops send tokens, each once for all its experts in a node: leave "
          "it out, or take expert_parallel");
}

// Bytes per rank, block and micro-batch, B an element, w a weight. T tokens x nodes go to other nodes and
// T' come from there, R rows go to other ranks of the node and R' come:
//
//     across   forward (h B + 4 k + w k) T + h B T' + 4 (N - 1),  backward h B T + (h B + w k) T'
//     inside   h B (R + R') in each pass
//     counts   as expert_parallel.c
//     kept     8 min(M, k, N) for each token; (4 + w) k for each that comes, from this node or another
static void price(Price *p, const Model *m, const void *context) {
    const NodeLimited *l = context;
    const ExpertParallel *x = l->plain;
    const Config *c = &m->config;
    double forwards = p->forwards * (double)c->layers, backwards = p->backwards * (double)c->layers;
    if (x->ep.size == 1 && c->recompute != RECOMPUTE_FULL) {  // of more ranks, moe.c has it from the ledger
        MicroBatch one = {.b = c->micro_batch, .s = model_tokens(m) / c->micro_batch};
        double tokens = (double)m->sockets.region.rows(m->sockets.region.context, &one);
        double places = tokens * (8 + (double)c->top_k * (c->dtype == F64 ? 12 : 8)) * p->blocks;
        p->end[p->end_rows++] = (PriceKept){"places, weights of hops", places, EVERY_RANK, RECOMPUTE_FULL};
    }
    // As plain dispatch, but only for rows that stay in this node.
    ExpertParallel plain = *x;
    plain.rows_sent = l->rows_sent, plain.rows_served = l->rows_served;
    expert_price(p, m, &plain, l->inside.ep);
    if (forwards == 0) return;  // a stage with the head alone
    double row = (double)(c->hidden * (int64_t)dtype_size(c->dtype)), w = c->dtype == F64 ? 8 : 4;
    double k = (double)c->top_k, steps = x->passes / forwards, again = backwards / forwards;
    double across = (row + (4 + w) * k + again * row) * l->tokens_sent +
                    (row + again * (row + w * k)) * l->tokens_served;
    price_sent(p, "all_to_all", 5 * forwards + 3 * backwards,
               forwards * 4 * (l->across.size - 1) + (steps > 0 ? across / steps : 0), l->across);
}

static bool enabled(const Config *c) { return c->experts > 0 || c->ep > 1; }

const Technique node_limited_routing = {.name = "node_limited_routing",
                                        .axes = 1u << AXIS_EP,
                                        .brings = CONFIG_EXPERTS,
                                        .enabled = enabled,
                                        .check = check,
                                        .shard = shard,
                                        .plug = plug,
                                        .unplug = unplug,
                                        .price = price};

#ifndef NO_MAIN
int main(int argc, char **argv) {
    const Program program = {
        .purpose = "Experts on several nodes: a token crosses to few nodes, and to each of them once.",
        .claim = "tokens sent in two hops reproduce the single-device step",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=40 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 bucket-mb=0.1 experts=16 top-k=4 moe=deepseek "
            "expert-groups=4 groups-kept=2 ep=8 gpus-per-node=2",
        .experts = true,
        .natural = 8,
        .axis = AXIS_EP,
        .techniques = node_limited_layouts(),
        .option = &zero_option,
        .options = 1,
        .baseline = expert_baseline,
        .more = node_tables,
        .more_option = &proof_only_option,
        .more_options = 1};
    return program_main(argc, argv, &program);
}
#endif
