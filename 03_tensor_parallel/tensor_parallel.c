// tensor_parallel.c: each block's matrices sharded over ranks. Playbook: "Tensor Parallelism in a Transformer
// Block"; Shoeybi et al. 2019 (Megatron-LM).
//
// Changes from 00_single_gpu: each of N ranks stores and computes an N-th of a block, its heads and its
// part of the feed-forward width, on the same tokens. Wq Wk Wv Wgate Wup are sharded by columns
// (column-parallel; the playbook's column-linear), Wo Wdown by rows (row-parallel); see split_matmul.c. The
// table of weights has them as (out, in), so columns of W are rows there.
//
//     x ─ norm1 ─[f]─ Wq Wk Wv ─ rope ─ attention ─ Wo ─[f*]─(+x)─ x2
//     and the same around the MLP
//
//              forward       backward
//     f        identity      all-reduce    every rank reads the input, so its gradients add up (Megatron-LM
//                                          hides this sum behind dW; here W follows all of B)
//     f*       all-reduce    identity      the output is a sum; the residual is added after it, once
//
// With fewer key/value heads than ranks, N / kv consecutive ranks store the same head. Each copy serves
// different query heads, so its gradient is partial; a sum at the end of the step keeps the copies equal.
// Bytes sent per rank, block and micro-batch: 4 all-reduces of K = b s h e, 8 (N - 1) / N K, for e bytes per
// element. Memory per rank: matrices / N; kept by a block: b s (e (4 h + (2 a d + 2 kv' d + 3 f + a s) / N) +
// 2 statistics), where kv' = max(kv, N) counts copies of heads, in Wk and Wv too.
// Run: build/03_tensor_parallel/tensor_parallel (--ranks 8 --gpus-per-node 4, --tp 2 --zero 1, --dry-run …)
// Last line: PASS tensor_parallel: ranks that shard every matrix reproduce the single-device step …
#include "tensor_parallel.h"

#include <stdlib.h>
#include <string.h>

#include "00_single_gpu/formulas.h"

// ---- the technique: whose rows and columns ----

// The ranks of tp that store the same key/value head as this one, if there are fewer heads than ranks.
static Group ranks_with_same_head(const Model *m) {
    Group tp = m->mesh.tp;
    int copies = tp.size / (int)m->config.kv_heads;
    return comm_group("kv copies", tp.line, tp.member + tp.rank / copies * copies, copies);
}

// Wk or Wv: the rows of whole heads, or of one head, which tp / heads consecutive ranks store.
static void shard_heads(Model *m, Param *param, Group copies) {
    int64_t heads = m->config.kv_heads, d = config_head_size(&m->config), tp = m->mesh.tp.size;
    int64_t each = heads >= tp ? heads / tp : 1, first = m->mesh.tp.rank * heads / tp;
    param_shard(param, 0, first * d, each * d);
    if (heads < tp) param_set_copies(param, copies, true);
}

void tensor_parallel_shard(Model *m) {
    Group tp = m->mesh.tp;
    if (tp.size == 1) return;
    Group copies = {0};
    if (m->config.kv_heads < tp.size) copies = ranks_with_same_head(m);
    for (int i = 0; i < m->params.count; i++) {
        Param *param = &m->params.param[i];
        int64_t rows = param->full[0] / tp.size, columns = param->full[1] / tp.size;
        switch (param->role) {
            case ROLE_Q:
            case ROLE_GATE:
            case ROLE_UP:  // by columns of W: outputs, dimension 0
                param_shard(param, 0, tp.rank * rows, rows);
                break;
            case ROLE_K:
            case ROLE_V:
                shard_heads(m, param, copies);
                break;
            case ROLE_O:
            case ROLE_DOWN:  // by rows of W: inputs
                param_shard(param, 1, tp.rank * columns, columns);
                break;
            default:  // Norms, embedding and output layer: a copy on every rank of tp. Their gradients
                      // are equal, since f has summed dx before norms run backward, and need no sum.
                break;
        }
    }
}

// ---- the technique: f and f* ----

static Tensor identity(void *context, const MicroBatch *micro, Tensor x) {
    (void)context, (void)micro;
    return tensor_share(x);
}

static Tensor all_reduce(void *context, const MicroBatch *micro, Tensor partial) {
    (void)micro;
    TensorParallel *t = context;
    comm_wait(comm_all_reduce(partial, REDUCE_SUM, t->tp));
    return tensor_share(partial);  // summed in place: a copy would be one more (b s, h) for every region
}

static void *plug(Model *model) {
    TensorParallel *t = host_alloc(sizeof *t);
    *t = (TensorParallel){.tp = model->mesh.tp};
    model->sockets.region.context = t;
    model->sockets.region.enter = identity;
    model->sockets.region.leave = all_reduce;
    model->sockets.region.enter_backward = all_reduce;
    model->sockets.region.leave_backward = identity;
    return t;
}

static void unplug(Model *model, void *context) {
    (void)model;
    free(context);
}

// ---- the record ----

static bool fits(const Config *c, int64_t tp) {
    return c->heads % tp == 0 && config_dense_width(c) % tp == 0 &&
           (c->kv_heads % tp == 0 || tp % c->kv_heads == 0);
}

static const char *degrees(const Config *c) { return config_degrees(c, c->heads, c->dp * c->tp, fits); }

void tensor_parallel_check(const Config *c) {
    int64_t tp = c->tp, kv = c->kv_heads, f = config_dense_width(c);
    CHECK(tp == 1 || config_number(c, "sp") || !config_number(c, "async-tp"),
          "--async-tp: rows are in flight only where each rank has its own: add --sp");
    CHECK(c->heads % tp == 0, "--tp %ld does not divide --heads %ld; --tp %s would fit", tp, c->heads,
          degrees(c));
    CHECK(f % tp == 0, "--tp %ld does not divide --%s %ld; --tp %s would fit", tp,
          c->experts ? "shared-experts x --expert-ffn =" : "ffn", f, degrees(c));
    CHECK(kv % tp == 0 || tp % kv == 0,
          "--tp %ld and --kv-heads %ld: one must divide the other; --tp %s would fit", tp, kv, degrees(c));
}

void tensor_parallel_price_kept(Price *price, const Model *m) {
    static const Role sharded[] = {ROLE_Q, ROLE_O, ROLE_GATE, ROLE_UP, ROLE_DOWN};
    double tp = m->mesh.tp.size, kv = (double)m->config.kv_heads, kv_parts = kv < tp ? kv : tp;
    for (size_t i = 0; i < sizeof sharded / sizeof *sharded; i++) price->elements[sharded[i]] /= tp;
    price->elements[ROLE_K] /= kv_parts;
    price->elements[ROLE_V] /= kv_parts;
    for (int i = 0; i < price->block_rows; i++)
        if (!strcmp(price->block[i].what, "k, v")) price->block[i].bytes *= tp / kv_parts;  // copies
    price_scale_kept(price, BY_TENSOR, 1, tp);
}

static void price(Price *price, const Model *m, const void *context) {
    (void)context;
    int64_t n = model_tokens(m);
    price_all_reduce(price, price->leaves + price->enters_backward, n * m->config.hidden,
                     m->params.recipe.weight, m->mesh.tp);
    tensor_parallel_price_kept(price, m);
}

static bool enabled(const Config *config) { return config_number(config, "sp") == 0; }

const Technique tensor_parallel = {.name = "tensor_parallel",
                                   .axes = 1u << AXIS_TP,
                                   .enabled = enabled,
                                   .check = tensor_parallel_check,
                                   .shard = tensor_parallel_shard,
                                   .plug = plug,
                                   .unplug = unplug,
                                   .price = price};

#ifndef NO_MAIN

// ---- what it costs ----

static void count_a_block(Mesh mesh, const Config *config) {
    Config c = *config;
    c.recompute = RECOMPUTE_NONE;
    config_set(&c, "sp", 0);
    config_set(&c, "zero", 0);
    say("\nOne block and micro-batch, tp %d:\n", mesh.tp.size);
    BlockCost block = program_block_cost(&c, mesh, tensor_layouts);
    double K = (double)(c.micro_batch * c.seq * c.hidden) * (double)dtype_size((DType)c.dtype);
    for (int pass = FORWARD; pass <= BACKWARD; pass++) {
        Sends sends = block.pass[pass];
        report_equal(pass == FORWARD ? "all-reduces, forward" : "all-reduces, backward",
                     mesh.tp.size > 1 ? 2 : 0, sends.all_reduce.calls, "");
        report_equal("bytes of them, all ranks", 2 * 2 * (mesh.tp.size - 1) * mesh.dp.size * K,
                     sends.all_reduce.bytes, "B");
        report_that(sends.all_gather.calls + sends.reduce_scatter.calls == 0,
                    "%s: %g all-gathers and %g reduce-scatters, expected none: those are sequence "
                    "parallelism's",
                    pass == FORWARD ? "forward" : "backward", sends.all_gather.calls,
                    sends.reduce_scatter.calls);
    }
}

// Two blocks of Llama 3 8B: their costs compare as those of all 32 do. ranks / tp groups run at once, each
// on its own batch, and only tensor parallelism communicates.
enum { TOKENS = 4096 };
static StepCost cost_of_8b(Mesh mesh, int tp) {
    Config c = config_of_model("llama-3-8b", "layers=2 vocab=1024 seq=4096 micro-batch=1 dtype=bf16");
    c.tp = tp;
    Mesh m = mesh_new((MeshShape){.dp = mesh.world.size / tp, .tp = tp});
    m.dp = m.dp_cp = mesh_single().dp;
    m.world = m.tp;
    clock_push("across nodes");
    StepCost cost = program_cost(&c, m, (const Technique *[]){&tensor_parallel, NULL});
    clock_pop();
    return cost;
}

// Tokens/s of a GPU as tp grows and, in the end, spans nodes. (With few ranks, nodes are made small
// enough for that.)
static void across_nodes(Mesh mesh, const Config *config) {
    int ranks = mesh.world.size, node = machine_find(config->machine)->gpus_per_node;
    if (node > ranks / 2) node = ranks > 1 ? ranks / 2 : 1;
    if (config->gpus_per_node) node = (int)config->gpus_per_node;
    clock_set_nodes(node);
    say("\nTwo blocks of Llama 3 8B, 4,096 tokens, %d GPU%s per node, on the model clock:\n", node,
        plural(node));
    say("  %-6s %12s %16s %10s %14s %12s\n", "tp", "step, ms", "tokens/s/GPU", "of tp 1", "vs row above",
        "exposed, ms");
    double alone = 0, before = 0, most_within = 0, leaving = 0;
    for (int tp = 1, last = 1; tp <= ranks; tp++) {
        if (ranks % tp || 32 % tp) continue;
        StepCost cost = cost_of_8b(mesh, tp);
        double rate = TOKENS / cost.step_seconds / tp, fall = tp > 1 ? 1 - rate / before : 0;
        bool leaves = tp > node && last <= node;
        if (tp == 1) alone = rate;
        if (leaves) leaving = fall;
        if (tp <= node && fall > most_within) most_within = fall;
        say("  %-6d %12.3f %16.0f %9.1f%% %13.1f%% %12.3f%s\n", tp, 1e3 * cost.step_seconds, rate,
            100 * rate / alone, 0 - 100 * fall, 1e3 * cost.comm.exposed_seconds,
            leaves ? "   beyond the node" : "");
        char *name = format_text("tp %d, tokens/s/GPU", tp);
        report_number("across nodes", name, rate, "tokens/s");
        free(name);
        before = rate, last = tp;
    }
    // On a machine whose links are slow even within the node, every row falls by nearly half.
    if (leaving > 0 && config->network_efficiency == 1)
        report_that(leaving > most_within,
                    "throughput falls by %.3f where the node ends, expected more than inside it, %.3f",
                    leaving, most_within);
    clock_set_nodes((int)config->gpus_per_node);
}

static void more(Mesh mesh, const Config *config) {
    device_dry_run(true);
    count_a_block(mesh, config);
    across_nodes(mesh, config);
    if (config_text(config, "svg")) tensor_parallel_picture(mesh, config_text(config, "svg"));
    device_dry_run(false);
}

static const Option picture = {
    "svg", OPTION_OUTPUT, NULL, NULL, 0, 0, "FILE", "which rank has which part of a block, as a picture",
    false};

int main(int argc, char **argv) {
    const Program program = {
        .purpose = "Tensor parallelism: every block's matrices are sharded over ranks.",
        .claim = "ranks that shard every matrix reproduce the single-device step",
        .defaults =
            "layers=3 hidden=48 heads=8 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 tp=0 bucket-mb=0.1",
        .natural = 4,
        .axis = AXIS_TP,
        .techniques = tensor_layouts,
        .option = &zero_option,
        .options = 1,
        .plan = tensor_parallel_check_picture,
        .more = more,
        .more_option = &picture,
        .more_options = 1};
    return program_main(argc, argv, &program);
}
#endif
