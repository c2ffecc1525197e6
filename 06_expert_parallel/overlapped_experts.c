// overlapped_experts.c: two micro-batches in flight, one computes while the other's tokens are sent.
// Playbook: "Expert parallelism", "Zero Bubble and DualPipe"; DeepSeek-V3 (2024), section 3.2.1.
//
// Against expert_parallel.c, where a rank is idle during every all-to-all: the passes of two micro-batches
// are two coroutines. Where one has started an all-to-all and would wait for it, the other goes on until it
// has started one, too:
//
//     compute   |attn a|attn b|experts a|experts b|attn a|attn b|          a, b: micro-batches
//     network          |disp a|disp b   |comb a   |comb b|disp a|
//
// Without a pipeline the step's micro-batches are taken two by two: F of both, then B and W of both. With
// one, the two are DualPipe's pairs, the F of one micro-batch beside the BW of another (F&B in the paper).
// Each weight's gradient adds up in the same order as without overlap: no bit changes. Passes give way at
// calls of all-to-all and nowhere else, so all ranks switch at the same calls.
//
// Bytes sent: as in expert_parallel.c. Memory per rank: activations of two micro-batches.
// Run: build/06_expert_parallel/overlapped_experts   (--ranks 8 --pp 2 --schedule dualpipe --grad-acc 4 …)
// Last line: PASS overlapped_experts: two micro-batches in flight change no bit …
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <ucontext.h>

#include "expert_parallel.h"

enum { STACK = 8 << 20 };  // bytes; the system maps only the pages that are touched

typedef struct Work {
    void (*run)(void *context, int which);
    void *context;
} Work;

typedef struct Overlap {
    ucontext_t caller, pass[2];
    char *stack[2];
    Work work;
    bool running, begun[2], done[2];
    Moment waits[2];  // for what, a pass that has given way
    int now;          // the pass that runs
    Sockets before;
} Overlap;

// ---- two coroutines ----

static void go_on_with(Overlap *o, int pass) {
    int me = o->now;
    o->now = pass;
    CHECK(swapcontext(&o->pass[me], &o->pass[pass]) == 0, "a micro-batch cannot give way to another");
}

// Where a pass would wait, the other one goes on, if it is not done. Where a pass computes, it lets the
// other one send again, as soon as what that waits for may have come: counts at once, rows inside a node
// after half a stretch of computing, rows across nodes at its end. The other then waits, and this one goes
// on. No clock is asked, so that all ranks switch at the same calls.
static void at(void *context, Moment moment) {
    Overlap *o = context;
    int other = 1 - o->now;
    if (!o->running || o->done[other]) return;
    if (moment <= WAITS_TO_COMPUTE) o->waits[o->now] = moment;
    else if (!o->begun[other] || o->waits[other] > moment - BEGINS + WAITS_FOR_COUNTS) return;
    go_on_with(o, other);
    o->waits[o->now] = WAITS_TO_COMPUTE;
}

// makecontext can pass only ints: the pointer comes in two halves.
static void begin_pass(unsigned low, unsigned high) {
    Overlap *o = (Overlap *)((uintptr_t)high << 32 | low);
    int me = o->now;
    o->begun[me] = true;
    o->work.run(o->work.context, me);
    o->done[me] = true;
    o->now = 1 - me;
    setcontext(o->done[1 - me] ? &o->caller : &o->pass[1 - me]);
}

// Runs passes 0 and 1 of the work; the first one begins.
static void run_both(Overlap *o, Work work) {
    uintptr_t self = (uintptr_t)o;
    o->work = work;
    for (int i = 0; i < 2; i++) {
        CHECK(getcontext(&o->pass[i]) == 0, "a micro-batch has no place to run");
        o->pass[i].uc_stack.ss_sp = o->stack[i];
        o->pass[i].uc_stack.ss_size = STACK;
        o->pass[i].uc_link = NULL;
        o->begun[i] = o->done[i] = false;
        makecontext(&o->pass[i], (void (*)(void))begin_pass, 2, (unsigned)self, (unsigned)(self >> 32));
    }
    o->now = 0;
    o->running = true;
    CHECK(swapcontext(&o->caller, &o->pass[0]) == 0, "a micro-batch has no place to run");
    o->running = false;
}

// ---- a step's micro-batches, two by two ----

typedef struct Two {
    Model *model;
    MicroBatch micro[2];
} Two;

static void forward_of(void *context, int which) {
    Two *two = context;
    model_forward(two->model, &two->micro[which]);
}
static void backward_of(void *context, int which) {
    Two *two = context;
    model_backward(two->model, &two->micro[which]);
}

// One alone, the last of an odd number, has nobody beside it.
static void run_of(Overlap *o, Two *two, int count, void (*run)(void *context, int which)) {
    if (count == 2) run_both(o, (Work){run, two});
    else run(two, 0);
}

static void run(void *context, Model *m, const StepInput *input) {
    int64_t tokens = input->b * m->config.seq;
    model_begin_step(m, input->micro_batches);
    for (int64_t first = 0; first < input->micro_batches; first += 2) {
        Two two = {.model = m};
        int count = first + 1 < input->micro_batches ? 2 : 1;
        for (int64_t i = first; i < first + count; i++)
            two.micro[i - first] = micro_batch_new(m, i, input->b, input->tokens + i * tokens,
                                                   input->targets + i * tokens, input->loss_scale[i]);
        clock_push("forward");
        run_of(context, &two, count, forward_of);
        clock_pop();
        int64_t kept = memory_account().now[MEMORY_ACTIVATION];
        if (input->kept_bytes && kept > *input->kept_bytes) *input->kept_bytes = kept;
        for (int i = 0; i < count; i++) op_accumulate(input->loss, two.micro[i].loss);
        clock_push("backward");
        run_of(context, &two, count, backward_of);
        clock_pop();
        for (int i = 0; i < count; i++) {
            m->sockets.gradients.micro_batch_ready(m->sockets.gradients.context, m,
                                                   first + i + 1 == input->micro_batches);
            micro_batch_free(m, &two.micro[i]);
        }
    }
}

// ---- DualPipe's pairs ----

typedef struct PairOfPasses {
    Pipeline *pipeline;
    Model *model;
    const Action *action;
} PairOfPasses;

static void compute_of(void *context, int which) {
    const PairOfPasses *pair = context;
    pipeline_compute(pair->pipeline, pair->model, pair->action->pass[which]);
}

static void together(void *context, Pipeline *pipeline, Model *m, const Action *action) {
    PairOfPasses pair = {pipeline, m, action};
    run_both(context, (Work){compute_of, &pair});
}

// ---- amid a block: before attention's own multiplies ----

static void attention_forward(void *context, const MicroBatch *micro, Tensor o, AttentionKept *kept,
                              Tensor q, Tensor k, Tensor v, AttentionShape shape) {
    const Sockets *before = &((Overlap *)context)->before;
    at(context, AMID);
    before->attention.forward(before->attention.context, micro, o, kept, q, k, v, shape);
}
static void attention_backward(void *context, const MicroBatch *micro, Tensor dq, Tensor dk, Tensor dv,
                               Tensor d_o, AttentionKept *kept, Tensor q, Tensor k, Tensor v, Tensor o,
                               AttentionShape shape) {
    const Sockets *before = &((Overlap *)context)->before;
    at(context, AMID);
    before->attention.backward(before->attention.context, micro, dq, dk, dv, d_o, kept, q, k, v, o, shape);
}
static void attention_drop(void *context, AttentionKept *kept) {
    const Sockets *before = &((Overlap *)context)->before;
    before->attention.drop(before->attention.context, kept);
}
static void attention_again(void *context, const MicroBatch *micro, AttentionKept *kept, Tensor q, Tensor k,
                            Tensor v, AttentionShape shape) {
    const Sockets *before = &((Overlap *)context)->before;
    before->attention.again(before->attention.context, micro, kept, q, k, v, shape);
}

// ---- the technique ----

static void *plug(Model *m) {
    Overlap *o = host_alloc(sizeof *o);
    *o = (Overlap){.running = false};
    for (int i = 0; i < 2; i++) o->stack[i] = host_alloc(STACK);
    Moe *routed = m->sockets.mlp.context;
    routed->at = at;
    routed->at_context = o;
    o->before = m->sockets;
    m->sockets.attention.context = o;
    m->sockets.attention.forward = attention_forward;
    m->sockets.attention.backward = attention_backward;
    m->sockets.attention.drop = attention_drop;
    m->sockets.attention.again = attention_again;
    if (m->config.pp > 1) {
        Pipeline *pipeline = m->sockets.schedule.context;
        pipeline->together = together;
        pipeline->together_context = o;
        return o;
    }
    m->sockets.schedule.context = o;
    m->sockets.schedule.run = run;
    return o;
}

static void unplug(Model *m, void *context) {
    (void)m;
    Overlap *o = context;
    for (int i = 0; i < 2; i++) free(o->stack[i]);
    free(o);
}

static void check(const Config *c) {
    CHECK(c->pp > 1 || config_number(c, "zero") < 3,
          "--zero 3 frees a unit's weights behind a micro-batch, and another one is still in it; --zero 2 "
          "would fit, or --pp, with which weights are gathered once a step");
}

static void price(Price *p, const Model *m, const void *context) {
    (void)context;
    if (m->config.pp > 1 || m->config.grad_acc == 1) return;
    p->blocks *= 2;
    for (int i = 0; i < p->end_rows; i++) p->end[i].bytes *= 2;
}

static bool enabled(const Config *c) { return c->experts > 0; }

const Technique overlapped_experts = {.name = "overlapped_experts",
                                      .axes = 1u << AXIS_EP,
                                      .brings = CONFIG_EXPERTS,
                                      .wraps = 1u << SOCKET_SCHEDULE | 1u << SOCKET_ATTENTION,
                                      .enabled = enabled,
                                      .check = check,
                                      .plug = plug,
                                      .unplug = unplug,
                                      .price = price};

#ifndef NO_MAIN

// ---- what it hides: two blocks of DeepSeek-V3 on the model clock ----

typedef struct Exposed {
    double sent, exposed, computed, step;  // seconds
} Exposed;

// Nothing is sent but what experts send: sums of gradients would take their turns on the same links.
static Exposed exposed_by(Mesh mesh, const Config *c, Techniques techniques, const char *title) {
    mesh.dp = mesh.dp_cp = mesh.expert_dp = mesh_single().dp;
    clock_push(title);
    StepCost cost = program_cost(c, mesh, techniques);
    CommCount all_to_all = comm_count("all_to_all");
    clock_pop();
    return (Exposed){all_to_all.model_seconds, all_to_all.exposed_seconds,
                     cost.step_seconds - cost.comm.exposed_seconds, cost.step_seconds};
}

// What can be hidden: all that is sent, but no more than there is to compute meanwhile.
static void compare(Mesh mesh, const Config *config) {
    if (config_number(config, "proof-only") || mesh.pp.size > 1 || mesh.ep.size == 1) return;
    enum { LAYERS = 2, MICRO_BATCHES = 2 };
    Config c = config_default(
        "hidden=7168 heads=128 kv-heads=8 head-size=128 ffn=18432 vocab=1024 seq=4096 dtype=bf16 "
        "micro-batch=1 experts=256 top-k=8 expert-ffn=2048 shared-experts=1 moe=deepseek expert-groups=8 "
        "groups-kept=4 routed-scale=2.5 steps=2");
    c.layers = LAYERS, c.grad_acc = MICRO_BATCHES;
    c.ep = mesh.ep.size, c.dp = mesh.dp.size, c.cp = mesh.cp.size, c.tp = mesh.tp.size;
    if (256 % c.ep || c.cp * c.tp > 1) return;
    config_set(&c, "zero", 0);
    bool was_dry = device_is_dry_run();
    device_dry_run(true);
    say("\n%d blocks of DeepSeek-V3, %d micro-batches of %ld tokens a rank, ep %ld in a node:\n", LAYERS,
        MICRO_BATCHES, c.seq, c.ep);
    clock_set_cluster((int)c.ep, config->compute_efficiency, config->network_efficiency);
    Exposed before = exposed_by(mesh, &c, expert_layouts, "one after the other"),
            after = exposed_by(mesh, &c, overlapped_layouts, "two in flight");
    clock_set_cluster((int)config->gpus_per_node, config->compute_efficiency, config->network_efficiency);
    device_dry_run(was_dry);
    double most = fmin(before.exposed, before.computed), hidden = before.exposed - after.exposed;
    say("  %-22s %16s %12s %12s", "", "all-to-alls, ms", "exposed, ms", "step, ms");
    say("  %-22s %16.3f %12.3f %12.3f", "one after the other", 1e3 * before.sent, 1e3 * before.exposed,
        1e3 * before.step);
    say("  %-22s %16.3f %12.3f %12.3f", "two in flight", 1e3 * after.sent, 1e3 * after.exposed,
        1e3 * after.step);
    say("  compute at hand can hide %.3f ms of it, and %.1f%% of that are hidden", 1e3 * most,
        100 * hidden / most);
    report_number("two in flight", "hidden share of what can be", hidden / most, "");
    report_that(hidden >= 0.85 * most, "%.1f%% of the all-to-alls that compute can hide are hidden",
                100 * hidden / most);
}

// Tied, the embedding's gradient adds up in another order: both heads' parts come before both lookups'.
static void check_bits(Mesh mesh, const Config *config) {
    Record both = program_record(config, mesh, overlapped_layouts, false, false, "two in flight"),
           single = program_record(config, mesh, expert_layouts, false, false, "one after the other");
    bool quiet = report_quiet(!config->verbose);
    report_compare(&both, &single, PROOF_EXACT, 0);
    report_quiet(quiet);
    record_free(&both);
    record_free(&single);
}

static void more(Mesh mesh, const Config *config) {
    if (!config->tied && comm_sums_in_rank_order()) check_bits(mesh, config);
    compare(mesh, config);
}

int main(int argc, char **argv) {
    const Program program = {
        .purpose = "Experts with two micro-batches in flight: one computes while the other's are sent.",
        .claim = "two micro-batches in flight change no bit",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=40 seq=31 micro-batch=2 grad-acc=3 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 bucket-mb=0.1 experts=8 top-k=2 ep=4",
        .natural = 4,
        .techniques = overlapped_layouts,
        .option = expert_layout_options,
        .options = EXPERT_LAYOUT_OPTIONS,
        .baseline = expert_baseline,
        .more = more};
    return program_main(argc, argv, &program);
}
#endif
