// expert_parallel.c: experts are on different ranks; tokens are sent to them and back. Playbook: "Expert
// parallelism"; GShard (Lepikhin et al. 2020).
//
// Changes from moe.c: each of the ep ranks holds e / ep of the experts. These ranks are neighbours in
// dp x cp x tp (--tp with --sp): each has its own tokens, and routes them itself. Its rows are sorted by
// expert, and therefore by the rank that holds the expert. Ranks first exchange the counts of rows; then one
// all-to-all sends the rows, and a second one brings the experts' outputs back:
//
//     rank 0   rows of experts 0 1 | 2 3        0 1 0 1   rank 0's, then rank 1's  ->  0 0 1 1   grouped
//     rank 1   rows of experts 0 1 | 2 3        2 3 2 3                            ->  2 2 3 3
//              to rank 0 ^       ^ to rank 1
//
// Backward sends the gradients of outputs to the experts, and those of inputs back. An expert's gradient
// already covers the tokens of all ep ranks, so it is summed only over the expert's dp cp tp / ep copies;
// every other gradient is summed over all of dp x cp (with --sp, over tp as well where its ranks store the
// weight whole). None is divided: the loss already is, by the number of labels on all ranks.
// Bytes sent per rank, block and micro-batch: forward 4 e (ep - 1) / ep of counts, and h elements for each
// row that goes to another rank or came from one; backward the same, without counts.
// Memory per rank: 1 / ep of the experts; input, gate, up and act of the rows that arrive, and the experts'
// outputs for this rank's own rows.
// Run: build/06_expert_parallel/expert_parallel     (--ranks 8 --ep 4, --zero 2, --experts 4 --top-k 1 …)
// Last line: PASS expert_parallel: ranks that shard the experts reproduce the single-device step …
#include "expert_parallel.h"

#include <stdlib.h>

// ---- the technique: counts first ----

// Another micro-batch may run before the wait (overlapped_experts.c).
static void wait_meanwhile(const Moe *moe, Request *request, Moment moment) {
    moe_at(moe, moment);
    comm_wait(request);
}

void expert_counts(void *context, MoeKept *kept, Tensor own, Tensor theirs) {
    (void)kept;
    const ExpertParallel *x = context;
    wait_meanwhile(x->moe, comm_all_to_all(theirs, NULL, own, NULL, x->ep), WAITS_TO_SEND);
}

static void add_to_table(ExpertParallel *x, const RowExchange *exchange, int64_t e) {
    x->passes++;
    for (int64_t i = 0, here = x->moe->here; i < e; i++) {
        bool at_home = i / here == x->ep.rank;
        x->to[i / here] += (double)exchange->sent[i];
        x->rows_sent += at_home ? 0 : (double)exchange->sent[i];
        x->rows_served += at_home ? 0 : (double)exchange->received[i];
    }
}

// Sets count and m from the rows that all ranks of ep have for this rank's experts.
void expert_exchange(ExpertParallel *x, MoeKept *kept) {
    int64_t e = x->moe->model->config.experts, here = x->moe->here;
    RowExchange *exchange = host_alloc(sizeof *exchange);
    *exchange = (RowExchange){kept->own, kept->own + e + 1};
    for (int64_t i = 0; i < e && device_is_dry_run() && !x->moe->ledger.replay; i++)  // all send the same
        exchange->received[i] = exchange->sent[x->moe->first + i % here];
    kept->exchange = exchange;
    kept->count = host_alloc(here * sizeof *kept->count);
    for (int64_t i = 0; i < here; i++) kept->count[i] = 0;
    for (int64_t i = 0; i < e; i++) kept->count[i % here] += exchange->received[i];
    kept->m = sum_of_counts(kept->count, here);
    if (kept->training) add_to_table(x, exchange, e);
}

static void drop(void *context, MoeKept *kept) {
    (void)context;
    RowExchange *exchange = kept->exchange;
    if (!exchange) return;
    free(kept->count);
    free(exchange);
}

// Elements of the rows (ep, e / ep) that go to, or come from, each rank. The caller frees them.
static int64_t *elements(const ExpertParallel *x, const int64_t *rows, int64_t columns) {
    int64_t *count = host_alloc(x->ep.size * sizeof *count);
    for (int rank = 0; rank < x->ep.size; rank++) {
        count[rank] = 0;
        for (int64_t i = 0; i < x->moe->here; i++) count[rank] += rows[rank * x->moe->here + i] * columns;
    }
    return count;
}

// ---- then one all-to-all each way ----

// Copies between two orders of the rows (m, h) that have arrived: by_rank is sorted by sender and then by
// expert, by_expert by expert and then by sender.
static void regroup(const ExpertParallel *x, const int64_t *received, Tensor by_expert, Tensor by_rank,
                    bool to_experts) {
    int64_t here = x->moe->here, grouped = 0;
    for (int64_t expert = 0; expert < here; expert++) {
        int64_t arrived = 0;
        for (int64_t i = 0; i < x->ep.size * here; i++) {
            int64_t first = arrived;
            arrived += received[i];
            if (i % here != expert || received[i] == 0) continue;
            Tensor from = tensor_rows_of(by_rank, first, received[i]);
            Tensor to = tensor_rows_of(by_expert, grouped, received[i]);
            grouped += received[i];
            op_copy(to_experts ? to : from, to_experts ? from : to);
        }
    }
}

static Tensor exchanged(const ExpertParallel *x, MemoryKind kind, Tensor in, const int64_t *to,
                        const int64_t *from, Moment wait) {
    int64_t h = tensor_columns(in), *sent = elements(x, to, h), *received = elements(x, from, h), rows = 0;
    for (int64_t i = 0; i < x->ep.size * x->moe->here; i++) rows += from[i];
    Tensor out = tensor_new(kind, in.dtype, SHAPE(rows, h));
    wait_meanwhile(x->moe, comm_all_to_all(out, received, in, sent, x->ep), wait);
    free(sent);
    free(received);
    return out;
}

Tensor dispatch_rows(const ExpertParallel *x, const RowExchange *exchange, Tensor own) {
    Tensor arrived = exchanged(x, MEMORY_COMMUNICATION, own, exchange->sent, exchange->received, WAITS);
    Tensor rows = tensor_new(MEMORY_ACTIVATION, own.dtype, arrived.dims, arrived.shape);
    regroup(x, exchange->received, rows, arrived, true);
    tensor_free(&arrived);
    return rows;
}

Tensor combine_rows(const ExpertParallel *x, const RowExchange *exchange, Tensor made, Moment wait) {
    Tensor leaving = tensor_like(MEMORY_COMMUNICATION, made);
    regroup(x, exchange->received, made, leaving, false);
    Tensor own = exchanged(x, MEMORY_ACTIVATION, leaving, exchange->received, exchange->sent, wait);
    tensor_free(&leaving);
    return own;
}

static Tensor to_experts(void *context, MoeKept *kept, Tensor x) {
    expert_exchange(context, kept);
    Tensor own = pairs_gather(&kept->pairs, x), rows = dispatch_rows(context, kept->exchange, own);
    tensor_free(&own);
    return rows;
}

static Tensor combine(void *context, MoeKept *kept, Tensor made) {
    kept->out = combine_rows(context, kept->exchange, made, WAITS);
    return pairs_combine(&kept->pairs, kept->out, kept->weights);
}

static Tensor combine_backward(void *context, MoeKept *kept, Tensor dy, Tensor dweights) {
    Tensor own = pairs_combine_backward(&kept->pairs, dy, dweights, kept->out, kept->weights);
    tensor_free(&kept->out);
    Tensor dout = dispatch_rows(context, kept->exchange, own);
    tensor_free(&own);
    return dout;
}

static Tensor to_experts_backward(void *context, MoeKept *kept, Tensor drows) {
    Tensor own = combine_rows(context, kept->exchange, drows, WAITS),
           dx = pairs_gather_backward(&kept->pairs, own);
    tensor_free(&own);
    return dx;
}

// ---- whose experts ----

// A rank's experts are consecutive; it stores nothing of the others.
static void shard(Model *m) {
    int64_t e = m->config.experts, here = e / m->mesh.ep.size;
    for (int unit = m->first_expert_unit; unit < m->params.units; unit++) {
        const Unit *u = &m->params.unit[unit];
        for (int i = 0; i < u->params; i++) {
            Param *param = &m->params.param[u->first_param + i];
            param->here = param->here && i % e / here == m->mesh.ep.rank;  // of this rank's stage
            if (!param->here) param->shape[0] = 0;
        }
    }
}

static void *plug(Model *model) {
    ExpertParallel *x = host_alloc(sizeof *x);
    Moe *moe = model->sockets.mlp.context;
    *x = (ExpertParallel){.moe = moe, .ep = model->mesh.ep};
    x->to = host_alloc(x->ep.size * sizeof *x->to);
    for (int i = 0; i < x->ep.size; i++) x->to[i] = 0;
    moe->here = model->config.experts / x->ep.size;
    moe->first = x->ep.rank * moe->here;
    moe->dispatch = (Dispatch){.context = x,
                               .more_counts = model->config.experts,
                               .count = expert_counts,
                               .to_experts = to_experts,
                               .combine = combine,
                               .combine_backward = combine_backward,
                               .to_experts_backward = to_experts_backward,
                               .drop = drop};
    return x;
}

static void unplug(Model *model, void *context) {
    (void)model;
    ExpertParallel *x = context;
    free(x->to);
    free(x);
}

// ---- the record ----

static bool fits(const Config *c, int64_t ep) { return c->experts % ep == 0; }

static void check(const Config *c) {
    const int64_t ranks = c->dp * c->cp * c->tp;
    CHECK(c->experts, "--ep %ld shards experts: give --experts", c->ep);
    CHECK(c->seq % c->cp == 0,
          "--cp %ld with experts: --seq %ld must be a multiple of it, so that all ranks route as many tokens",
          c->cp, c->seq);
    CHECK(fits(c, c->ep), "--ep %ld does not divide --experts %ld: --experts %ld would fit", c->ep,
          c->experts, (c->experts / c->ep + 1) * c->ep);
    CHECK(ranks % c->ep == 0,
          "--ep %ld does not divide the %ld rank%s of --dp x --cp x --tp: --ep %s would fit", c->ep, ranks,
          plural(ranks), config_degrees(c, c->experts, ranks, fits));
}

void expert_price(Price *p, const Model *m, const ExpertParallel *x, Group exchanges) {
    const Config *c = &m->config;
    double each = (double)dtype_size(c->dtype), h = (double)c->hidden, ep = x->ep.size;
    double forwards = p->forwards * (double)c->layers, backwards = p->backwards * (double)c->layers;
    if (forwards == 0) return;  // a stage with the head alone
    // The average over all steps of what their routing tables say.
    double steps = x->passes / forwards, rows = steps > 0 ? (x->rows_sent + x->rows_served) / steps : 0;
    price_sent(p, "all_to_all", forwards, forwards * 4 * (double)c->experts * (ep - 1) / ep, x->ep);
    price_sent(p, "all_to_all", 2 * (forwards + backwards), rows * h * each * (1 + backwards / forwards),
               exchanges);
    for (int role = ROLE_EXPERT_GATE; role <= ROLE_EXPERT_DOWN; role++) p->elements[role] /= ep;
    // Of a block's two regions experts enter none: they take the tokens outside the regions.
    double regions = c->shared_experts ? 1 : 0.5;
    p->enters *= regions, p->leaves *= regions;
    p->enters_backward *= regions, p->leaves_backward *= regions;
}

static void price(Price *p, const Model *m, const void *context) {
    const ExpertParallel *x = context;
    expert_price(p, m, x, x->ep);
}

static bool enabled(const Config *c) { return c->experts > 0 || c->ep > 1; }

const Technique expert_parallel = {.name = "expert_parallel",
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
        .purpose =
            "Expert parallelism: each rank has some experts, and ranks send their tokens to each other's.",
        .claim = "ranks that shard the experts reproduce the single-device step",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=40 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 bucket-mb=0.1 experts=8 top-k=2 ep=2",
        .experts = true,
        .natural = 4,
        .axis = AXIS_EP,
        .techniques = expert_layouts(),
        .option = &zero_option,
        .options = 1,
        .baseline = expert_baseline,
        .more = expert_tables,
        .more_option = &proof_only_option,
        .more_options = 1};
    return program_main(argc, argv, &program);
}
#endif
