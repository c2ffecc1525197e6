// overlapped_experts.c: two micro-batches in flight: one computes while the other's tokens are sent.
// Playbook: "Expert parallelism", "Zero Bubble and DualPipe"; DeepSeek-V3 (2024), section 3.2.1.
//
// Changes from expert_parallel.c, where a rank is idle during every all-to-all: the passes of two
// micro-batches are two coroutines. When one has started an all-to-all and would wait for it, the other runs
// until it has started one as well:
//
//     compute   |attn a|attn b|experts a|experts b|attn a|attn b|          a, b: micro-batches
//     network          |disp a|disp b   |comb a   |comb b|disp a|
//
// The BW of one micro-batch runs beside the F of the next but one (F&B in the paper), since across nodes
// two forwards have too little compute to hide each other's all-to-alls; only the first two F, and the last
// two BW, run together. In a pipeline the two are DualPipe's pairs. Each weight's gradient is summed in the
// same order as without overlap: no bit changes. Passes yield before they wait, and before, amid or after
// computing. Neither a clock nor a count of rows decides which one runs next, so all ranks switch at the
// same calls.
//
// Bytes sent: as in expert_parallel.c. Memory per rank: activations of two micro-batches.
// Run: build/06_expert_parallel/overlapped_experts   (--ranks 8 --pp 2 --schedule dualpipe --grad-acc 4 …)
// Last line: PASS overlapped_experts: two micro-batches in flight change no bit …
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "expert_parallel.h"

enum { STACK = 8 << 20, GUARD = 1 << 16 };  // bytes; the system maps only the pages that are touched

typedef struct Work {
    void (*run)(void *context, int which);
    void *context;
} Work;

typedef struct Overlap {
    ucontext_t caller, pass[2];
    char *stack[2];
    Work work;
    bool running, done[2];
    Moment left[2];  // where each pass has given way
    int now;         // the pass that runs
    Sockets before;
} Overlap;

// ---- two coroutines ----

static void go_on_with(Overlap *o, int pass) {
    int me = o->now;
    o->now = pass;
    CHECK(swapcontext(&o->pass[me], &o->pass[pass]) == 0, "a micro-batch cannot give way to another");
}

// A pass that must wait gives way. A pass that computes gives way only if the other one waits to send again:
// that soon waits for what it has sent, and this one continues. This depends on no clock, so all ranks switch
// at the same calls.
static void at(void *context, Moment moment) {
    Overlap *o = context;
    int me = o->now, other = 1 - me;
    if (!o->running || o->done[other]) return;
    if (moment_computes(moment) && o->left[other] != WAITS_TO_SEND) return;
    o->left[me] = moment;
    go_on_with(o, other);
}

// makecontext can pass only ints, so the pointer is passed in two halves.
static void begin_pass(unsigned low, unsigned high) {
    Overlap *o = (Overlap *)((uintptr_t)high << 32 | low);
    int me = o->now;
    o->work.run(o->work.context, me);
    o->done[me] = true;
    o->now = 1 - me;
    setcontext(o->done[1 - me] ? &o->caller : &o->pass[1 - me]);
}

// Its lowest part is closed: a stack that grows into it ends the process, and overwrites nothing.
static char *stack_new(void) {
    char *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(stack != MAP_FAILED && mprotect(stack, GUARD, PROT_NONE) == 0, "no memory for a coroutine's stack");
    return stack;
}

static void prepare(Overlap *o, int pass) {
    uintptr_t self = (uintptr_t)o;
    ucontext_t *context = &o->pass[pass];
    CHECK(getcontext(context) == 0, "a micro-batch has no place to run");
    context->uc_stack.ss_sp = o->stack[pass];
    context->uc_stack.ss_size = STACK;
    context->uc_link = NULL;
    o->done[pass] = false;
    o->left[pass] = BEGINS;  // with nothing to send yet, so the other one computes on until it waits
    makecontext(context, (void (*)(void))begin_pass, 2, (unsigned)self, (unsigned)(self >> 32));
}

// Runs passes 0 and 1 of the work; the first one begins.
static void run_both(Overlap *o, Work work) {
    o->work = work;
    for (int i = 0; i < 2; i++) prepare(o, i);
    o->now = 0;
    o->running = true;
    CHECK(swapcontext(&o->caller, &o->pass[0]) == 0, "a micro-batch has no place to run");
    o->running = false;
}

// ---- a step's passes, two by two ----

typedef struct Two {
    Model *model;
    MicroBatch *micro[2];
    bool backward[2];
} Two;

static void pass_of(void *context, int which) {
    const Two *two = context;
    if (two->backward[which]) model_backward(two->model, two->micro[which]);
    else model_forward(two->model, two->micro[which]);
}

// A step may have a single micro-batch. Activations count as kept when a forward has ended.
static void run_two(Overlap *o, Two two, const char *mark) {
    Moe *routed = two.model->sockets.mlp.context;
    int64_t most = routed->most_held;
    clock_push(mark);
    if (two.micro[1]) run_both(o, (Work){pass_of, &two});
    else pass_of(&two, 0);
    clock_pop();
    routed->most_held = routed->held > most ? routed->held : most;
}

enum { ALIVE = 3 };  // micro-batch i stands at i % ALIVE

static MicroBatch *begin_micro_batch(MicroBatch *micro, const Model *m, const StepInput *input, int64_t i) {
    if (i >= input->micro_batches) return NULL;
    micro[i % ALIVE] = micro_batch_of(m, input, i, input->loss_scale[i]);
    return &micro[i % ALIVE];
}

static void after_forward(const StepInput *input) {
    int64_t kept = memory_account().now[MEMORY_ACTIVATION];
    if (input->kept_bytes && kept > *input->kept_bytes) *input->kept_bytes = kept;
}

static void end_micro_batch(Model *m, MicroBatch *micro, const StepInput *input) {
    bool last = micro->index + 1 == input->micro_batches;
    op_accumulate(input->loss, micro->loss);
    m->sockets.gradients.micro_batch_ready(m->sockets.gradients.context, m, last);
    micro_batch_free(m, micro);
}

//     F0 F1 | B0 F2 | B1 F3 | … | B(m - 2) B(m - 1)       B: with W
static void run(void *context, Model *m, const StepInput *input) {
    MicroBatch alive[ALIVE], *first = begin_micro_batch(alive, m, input, 0),
                             *second = begin_micro_batch(alive, m, input, 1);
    model_begin_step(m, input->micro_batches);
    run_two(context, (Two){m, {first, second}, {false, false}}, "forward");
    after_forward(input);
    while (first) {
        MicroBatch *next = begin_micro_batch(alive, m, input, first->index + 2);
        Two two = {m, {first, next ? next : second}, {true, !next}};
        run_two(context, two, next ? "backward and forward" : "backward");
        end_micro_batch(m, first, input);
        if (next) after_forward(input);
        else if (second) end_micro_batch(m, second, input);
        first = next ? second : NULL;
        second = next;
    }
}

// ---- DualPipe's pairs ----

typedef struct PairOfPasses {
    Pipeline *pipeline;
    Model *model;
    const Action *action;
} PairOfPasses;

// The backward, pass[1], goes first: it computes longest, and begins by sending.
static void compute_of(void *context, int which) {
    const PairOfPasses *pair = context;
    pipeline_compute(pair->pipeline, pair->model, pair->action->pass[1 - which]);
}

static void together(void *context, Pipeline *pipeline, Model *m, const Action *action) {
    PairOfPasses pair = {pipeline, m, action};
    run_both(context, (Work){compute_of, &pair});
}

// ---- in the middle of a block: before attention's own multiplies ----

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
    const Overlap *o = context;
    o->before.attention.drop(o->before.attention.context, kept);
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
    for (int i = 0; i < 2; i++) o->stack[i] = stack_new();
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
    for (int i = 0; i < 2; i++) munmap(o->stack[i], STACK);
    free(o);
}

static bool has_pairs(const Config *c) {
    double kind = config_number(c, "schedule");
    if (!config_text(c, "load")) return kind == DUALPIPE || kind == DUALPIPE_V;
    Schedule s = pipeline_schedule(c);
    bool pairs = false;
    for (int r = 0; r < s.ranks; r++)
        for (int i = 0; i < s.list[r].count; i++) pairs = pairs || s.list[r].action[i].passes == 2;
    schedule_free(&s);
    return pairs;
}

static void check(const Config *c) {
    CHECK(
        c->pp > 1 || config_number(c, "zero") < 3,
        "--zero 3 frees a unit's weights after one micro-batch's pass, while the other one may still need "
        "them; --zero 2 would fit, or --pp, with which weights are gathered once a step");
    CHECK(c->pp == 1 || has_pairs(c),
          "--pp %ld: two micro-batches are in flight where a forward and a backward run as a pair; "
          "--schedule dualpipe or dualpipe_v would fit, or --pp 1",
          c->pp);
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

// Why the bits of both are not compared; NULL: they are. If tied, both heads' parts of the embedding's
// gradient are summed before both lookups'.
static const char *other_order(const Config *config) {
    if (config->tied) return "the tied weight's gradient is summed in another order";
    return comm_sums_in_rank_order() ? NULL : "NCCL sums in an order of its own";
}

void experts_two_in_flight(Mesh mesh, const Config *config, Techniques in_flight, Techniques in_turn) {
    if (other_order(config)) return;
    Record both = program_record(config, mesh, in_flight, false, false, "two in flight"),
           single = program_record(config, mesh, in_turn, false, false, "one after the other");
    bool quiet = report_quiet(!config->verbose);
    report_compare(&both, &single, PROOF_EXACT, bound_of(0));
    report_quiet(quiet);
    record_free(&both);
    record_free(&single);
}

#ifndef NO_MAIN
static void more(Mesh mesh, const Config *config) {
    experts_two_in_flight(mesh, config, overlapped_layouts(), expert_layouts());
    if (other_order(config)) report_note("here some may differ, as %s", other_order(config));
    if (!config_number(config, "proof-only")) overlap_tables(mesh, config);
}

int main(int argc, char **argv) {
    const Program program = {
        .purpose =
            "Experts with two micro-batches in flight: one computes while the other's tokens are sent.",
        .claim = "two micro-batches in flight change no bit",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=40 seq=31 micro-batch=2 grad-acc=3 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 bucket-mb=0.1 experts=8 top-k=2 ep=4",
        .experts = true,
        .natural = 4,
        .axis = AXIS_EP,
        .techniques = overlapped_layouts(),
        .option = &zero_option,
        .options = 1,
        .baseline = expert_baseline,
        .more = more,
        .more_option = &proof_only_option,
        .more_options = 1};
    return program_main(argc, argv, &program);
}
#endif
