// test_techniques.c: which lists of techniques are refused, and what each technique requires of the flags.
#include <stdlib.h>

#include "03_tensor_parallel/tensor_parallel.h"
#include "fatal.h"

static const char *const SMALL =
    "layers=1 hidden=16 heads=8 kv-heads=2 ffn=88 vocab=256 seq=4 micro-batch=1 steps=1";

// ---- which socket a plug may replace ----

typedef struct Order {
    const Technique *list[4];
    bool sp, recompute;
    const char *sentence;  // NULL: these fit
} Order;

static void plug_all(void *context) {
    const Order *order = context;
    Config c = config_default(SMALL);
    config_set(&c, "sp", order->sp);
    config_set(&c, "async-tp", 1);
    config_set(&c, "vocab-parallel", 1);
    if (order->recompute) c.recompute = RECOMPUTE_FULL;
    Mesh mesh = mesh_single();
    mesh.tp = (Group){.size = 2};  // nothing is sent before a step
    device_dry_run(true);
    trainer_free(trainer_new(&c, mesh, order->list));
}

// Another technique that treats a socket as its own: it does what one device does, in another function.
static bool accept_some(void *context, Model *model, double norm) {
    (void)context, (void)model;
    return norm < 1;
}
static void *plug_step(Model *model) {
    model->sockets.step.accept = accept_some;
    return NULL;
}
static void *plug_step_with_context(Model *model) {
    model->sockets.step.context = model;
    return NULL;
}
static const Technique skips = {.name = "skips", .plug = plug_step};
static const Technique scales = {.name = "scales", .plug = plug_step_with_context};
static const Technique wraps = {
    .name = "wraps", .plug = plug_step_with_context, .wraps = 1u << SOCKET_STEP};
static const Technique wraps_another = {
    .name = "wraps another", .plug = plug_step_with_context, .wraps = 1u << SOCKET_GRADIENTS};
// One that sets a whole socket, and so empties what it does not name.
static void *plug_a_whole_socket(Model *model) {
    memset(&model->sockets.activations, 0, sizeof model->sockets.activations);
    model->sockets.activations.after_forward = sockets_single_device().activations.after_forward;
    return NULL;
}
static const Technique empties = {.name = "empties", .plug = plug_a_whole_socket};

static void a_plug_in_anothers_place_is_fatal_and_names_both(void **state) {
    (void)state;
    static const Order orders[] = {
        {{&ddp_naive, &ddp_overlap},
         false,
         false,
         "ddp_overlap would take the place of ddp_naive in the socket gradients"},
        {{&ddp_bucketed, &zero1},
         false,
         false,
         "zero1 would take the place of ddp_bucketed in the socket gradients"},
        {{&zero2, &ddp_no_sync},
         false,
         false,
         "ddp_no_sync would take the place of zero2 in the socket gradients"},
        {{&zero1, &zero2}, false, false, "zero2 would take the place of zero1 in the socket "},
        {{&async_tensor_parallel, &sequence_parallel},
         true,
         false,
         "sequence_parallel would take the place of async_tensor_parallel in the socket region"},
        {{&vocab_parallel, &sequence_parallel},
         true,
         false,
         "sequence_parallel would take the place of vocab_parallel in the socket vocabulary"},
        {{&skips, &scales}, false, false, "scales would take the place of skips in the socket step"},
        {{&skips, &ddp_naive, &wraps_another},
         false,
         false,
         "wraps another would take the place of skips in the socket step"},
        {{&empties}, false, false, "empties leaves a function of the socket activations empty"},
        {{&tensor_parallel, &zero1},
         false,
         false,
         "tensor_parallel shards weights that zero1 has already divided among ranks: list zero1 first"},
        {{&skips, &wraps}, false, false, NULL},
        {{&ddp_naive, &skips}, false, false, NULL},
        {{&sequence_parallel, &vocab_parallel, &async_tensor_parallel}, true, false, NULL},
        {{&zero3, &tensor_parallel, &recompute}, false, true, NULL},
    };
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++) {
        if (orders[i].sentence) expect_fatal(plug_all, &orders[i], orders[i].sentence);
        else plug_all((void *)&orders[i]);
        device_dry_run(false);
    }
}

// A technique that is off leaves its socket to others.
static void a_technique_that_is_off_takes_no_place(void **state) {
    (void)state;
    Config c = config_default(SMALL);
    for (int zero = 0; zero <= 3; zero++) {
        config_set(&c, "zero", zero);
        device_dry_run(true);
        Trainer *t = trainer_new(&c, mesh_single(), tensor_layouts);
        static const Technique *const stage[] = {&ddp_no_sync, &zero1, &zero2, &zero3};
        for (int i = 0; i < 4; i++) assert_true((trainer_context(t, stage[i]) != NULL) == (i == zero));
        trainer_free(t);
        device_dry_run(false);
    }
}

// ---- what a technique keeps for itself ----

// Its own state, of each kind that a price knows: this many bytes.
enum { OWN_BYTES = 1000 };
static const MemoryKind own_kind[] = {MEMORY_PARAMETER, MEMORY_GRADIENT, MEMORY_OPTIMIZER};
static Tensor own_state[3];
static void *plug_state(Model *model) {
    (void)model;
    for (int i = 0; i < 3; i++) own_state[i] = tensor_new(own_kind[i], E4M3, SHAPE((i + 1) * OWN_BYTES));
    return NULL;
}
static void unplug_state(Model *model, void *context) {
    (void)model, (void)context;
    for (int i = 0; i < 3; i++) tensor_free(&own_state[i]);
}
static void price_state(Price *price, const Model *model, const void *context) {
    (void)model, (void)context;
    for (int i = 0; i < 3; i++) price->more[own_kind[i]] += (i + 1) * OWN_BYTES;
}
static const Technique remembers = {
    .name = "remembers", .plug = plug_state, .unplug = unplug_state, .price = price_state};

// Whichever of them is priced first, and whatever the other shards.
static void a_technique_has_state_of_its_own_beside_any_other(void **state) {
    (void)state;
    static const Technique *const lists[][3] = {{&remembers, NULL},
                                                {&remembers, &zero1, NULL},
                                                {&zero2, &remembers, NULL},
                                                {&zero3, &remembers, NULL}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        Config c = config_default("layers=2 hidden=16 heads=2 kv-heads=1 ffn=20 seq=4 steps=2 dtype=bf16");
        config_set(&c, "zero", (double)i);
        device_dry_run(true);
        Trainer *t = trainer_new(&c, mesh_single(), lists[i]);
        memory_reset_peak();
        for (int step = 0; step < 2; step++) train_step(t, NULL);
        Memory memory = memory_account();
        Price price = trainer_price(t);
        for (int kind = 0; kind < 3; kind++)
            assert_true(price_states(&price, t->model, own_kind[kind]) ==
                        (double)memory.peak[own_kind[kind]]);
        trainer_free(t);
        device_dry_run(false);
    }
}

// ---- what a program must say about itself ----

static int64_t target;
static const Option with_target = {"own", OPTION_INT, &target, "0", 0, 9, "", "", false};
static const Technique nameless = {.axes = 1u << AXIS_DP}, alone = {.name = "alone"},
                       targeted = {.name = "targeted", .option = &with_target, .options = 1};
typedef struct Main {
    Program program;
    const char *sentence;
} Main;
static void run_main(void *context) {
    const Main *m = context;
    program_main(2, (char *[]){"program", "--help", NULL}, &m->program);  // without a refusal, the end
}
static void a_program_that_is_not_whole_is_refused_before_it_starts(void **state) {
    (void)state;
#define LIST(...) .techniques = (const Technique *[]){__VA_ARGS__, NULL}
    const Main mains[] = {
        {{.purpose = "p", .claim = "c", .natural = 1}, "a Program has a purpose, a claim"},
        {{.claim = "c", .natural = 1, LIST(&alone)}, "a Program has a purpose, a claim"},
        {{.purpose = "p", .natural = 1, LIST(&alone)}, "a Program has a purpose, a claim"},
        {{.purpose = "p", .claim = "c", LIST(&alone)}, "and at least 1 natural rank"},
        {{.purpose = "p", .claim = "c", .natural = 2, LIST(&ddp_naive, &nameless)},
         "technique 1 of this program has no name"},
        {{.purpose = "p", .claim = "c", .natural = 2, LIST(&alone)},
         "this program's natural number of ranks is 2, and none of its techniques has an axis over which"},
        {{.purpose = "p", .claim = "c", .natural = 1, LIST(&targeted)},
         "option table: --own of a technique or a Program has a target, and is to have none"},
    };
#undef LIST
    for (size_t i = 0; i < sizeof mains / sizeof *mains; i++)
        expect_fatal(run_main, &mains[i], mains[i].sentence);
}

// ---- what the flags must be ----

typedef struct Demand {
    const Technique *technique;
    int64_t tp;
    bool async;
    const char *more, *sentence;
} Demand;

static void check_demand(void *context) {
    const Demand *demand = context;
    char *text = format_text("%s %s", SMALL, demand->more);
    Config c = config_default(text);
    free(text);
    c.tp = demand->tp;
    config_set(&c, "async-tp", demand->async);
    demand->technique->check(&c);
}

static void demands_name_the_flags_and_what_would_fit(void **state) {
    (void)state;
    static const Demand demands[] = {
        {&tensor_parallel, 3, false, "", "--tp 3 does not divide --heads 8; --tp 1, 2, 4, 8 would fit"},
        {&sequence_parallel, 16, false, "", "--tp 16 does not divide --heads 8; --tp 1, 2, 4, 8 would fit"},
        {&tensor_parallel, 4, false, "ffn=90", "--tp 4 does not divide --ffn 90; --tp 1, 2 would fit"},
        {&tensor_parallel, 4, false, "heads=12 hidden=48 kv-heads=6",
         "--tp 4 and --kv-heads 6: one must divide the other; --tp 1, 2 would fit"},
        {&tensor_parallel, 4, false, "experts=2 shared-experts=3 expert-ffn=10",
         "--tp 4 does not divide --shared-experts x --expert-ffn = 30; --tp 1, 2 would fit"},
        {&tensor_parallel, 2, true, "", "add --sp"},
    };
    for (size_t i = 0; i < sizeof demands / sizeof *demands; i++)
        expect_fatal(check_demand, &demands[i], demands[i].sentence);
    check_demand(&(Demand){&tensor_parallel, 8, false, "", ""});
    check_demand(&(Demand){&tensor_parallel, 8, false, "experts=2 ffn=7", ""});
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plug_in_anothers_place_is_fatal_and_names_both),
        cmocka_unit_test(a_technique_that_is_off_takes_no_place),
        cmocka_unit_test(a_technique_has_state_of_its_own_beside_any_other),
        cmocka_unit_test(a_program_that_is_not_whole_is_refused_before_it_starts),
        cmocka_unit_test(demands_name_the_flags_and_what_would_fit),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
