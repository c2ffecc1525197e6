// test_cost.c: what the cost model counts in models, against their published sizes.
#include <math.h>

#include "08_mixed_precision/cost_block.h"
#include "08_mixed_precision/cost_lone.h"
#include "train/config.h"

// cmocka.h needs these before it
// clang-format off
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
// clang-format on

static const CostLayout alone = {.tp = 1, .cp = 1, .pp = 1, .dp = 1, .ep = 1, .etp = 1};

static void near(double counted, double right, double within) {
    if (!(fabs(counted - right) <= within)) fail_msg("%.0f weights, and should be %.0f", counted, right);
}

static Config config_of(const char *name) {
    char *argv[] = {"test_cost", "--model", (char *)name, NULL};
    return config_parse(3, argv, "Tests.", CONFIG_MODEL | CONFIG_EXPERTS, NULL, NULL, 0);
}

static CostModel counted_model(const Config *c) {
    return (CostModel){.layers = (double)c->layers,
                       .hidden = (double)c->hidden,
                       .heads = (double)c->heads,
                       .kv_heads = (double)c->kv_heads,
                       .head_size = (double)config_head_size(c),
                       .ffn = (double)c->ffn,
                       .vocab = (double)c->vocab,
                       .seq = (double)c->seq,
                       .matrices = 3,
                       .tied = c->tied,
                       .experts = (double)c->experts,
                       .top_k = (double)c->top_k,
                       .shared = (double)c->shared_experts,
                       .expert_ffn = (double)config_expert_width(c)};
}

static CostModel model_of(const char *name) {
    Config c = config_of(name);
    return counted_model(&c);
}

static void models_have_their_parameters(void **state) {
    (void)state;
    static const char *const name[] = {"llama-3.2-1b", "llama-3-8b", "llama-3-405b", "mixtral-8x7b",
                                       "deepseek-v3"};
    for (size_t i = 0; i < sizeof name / sizeof *name; i++) {
        Config c = config_of(name[i]);
        CostModel m = counted_model(&c);
        near(cost_parameters(&m), (double)config_parameters(&c), 0.5);
        // of the embedding, no multiply reads anything; nor of the last norm
        double ends = (m.tied ? 0 : m.vocab * m.hidden) + m.hidden;
        near(cost_active_parameters(&m), (double)config_active_parameters(&c) - ends, 0.5);
    }
}

// DeepSeek-V3 with its own attention and its three dense blocks: 671 billion, of which a token uses 37.
static void deepseek_v3_has_the_published_sizes(void **state) {
    (void)state;
    CostModel m = model_of("deepseek-v3");
    m.layers = 61, m.dense_layers = 3, m.q_rank = 1536, m.kv_rank = 512, m.rope_size = 64;
    near(cost_parameters(&m), 671e9, 1e9);
    near(cost_active_parameters(&m), 37e9, 1e9);
}

// A block of DeepSeek-V3, from the shapes in its files: every rank of tp has the narrow products of latent
// attention, the norms and the router; the wide products and the shared expert are split.
static void latent_attention_is_split_behind_its_narrow_products(void **state) {
    (void)state;
    CostModel m = model_of("deepseek-v3");
    m.q_rank = 1536, m.kv_rank = 512, m.rope_size = 64;
    double narrow = 7168.0 * 1536 + 7168.0 * (512 + 64),
           wide = 1536.0 * 128 * (128 + 64) + 512.0 * 128 * (128 + 128) + 128.0 * 128 * 7168,
           norms = 2 * 7168.0, mlp = 3 * 7168.0 * 18432, router = 256 * 7168.0, expert = 3 * 7168.0 * 2048;
    CostLayout tp = alone;
    tp.tp = 4;
    near(cost_block_weights(&m, &alone, true), narrow + wide + norms + mlp, 0.5);
    near(cost_block_weights(&m, &tp, true), narrow + norms + (wide + mlp) / 4, 0.5);
    near(cost_block_weights(&m, &tp, false), narrow + norms + router + (wide + expert) / 4 + 256 * expert,
         0.5);
}

// What the ranks of tp store in total: the matrices once, the norms and the router on each.
static void shards_add_up(void **state) {
    (void)state;
    CostModel m = model_of("llama-3-8b"), experts = model_of("mixtral-8x7b");
    CostLayout tp = alone, ep = alone;
    tp.tp = tp.etp = 4, ep.ep = 8;
    double norms = 2 * m.hidden, router = experts.experts * experts.hidden;
    near(4 * cost_block_weights(&m, &tp, true), cost_block_weights(&m, &alone, true) + 3 * norms, 0.5);
    near(4 * cost_block_weights(&experts, &tp, false),
         cost_block_weights(&experts, &alone, false) + 3 * (norms + router), 0.5);
    near(cost_block_weights(&experts, &alone, false) - cost_block_weights(&experts, &ep, false),
         cost_expert_weights(&experts, &alone) * 7 / 8, 0.5);
}

// More ranks than heads of K and V: each stores one head, a copy.
static void heads_of_k_and_v_are_copied(void **state) {
    (void)state;
    CostModel m = model_of("llama-3-8b");
    CostLayout eight = alone, sixteen = alone;
    eight.tp = 8, sixteen.tp = 16;
    double norms = 2 * m.hidden, head = 2 * m.hidden * m.head_size;
    double rest8 = cost_block_weights(&m, &eight, true) - norms - head;
    near(cost_block_weights(&m, &sixteen, true) - norms - head, rest8 / 2, 0.5);
}

// With sequence parallelism a block's forward has two all-gathers and two reduce-scatters. Backward has the
// same and, if nothing is recomputed, the two all-gathers of W; recomputation needs all of forward's but the
// last reduce-scatter, since it adds attention's output to x before the second norm.
static void recomputation_sends_all_but_the_last(void **state) {
    (void)state;
    CostModel m = model_of("llama-3-8b");
    Factors factors = factors_guessed();
    CostTable table = cost_table(machine_find("dgx-h100"), &factors, 1);
    Cluster cluster = {8, 8, 0};
    CostHabits habits = {.flash = true, .gradient_bytes = 4, .attention_again = 2.5, .attention_slow = 1};
    CostLayout l = alone;
    l.tp = 8, l.sp = true, l.micro_batch = l.micro_batches = 1;
    double sent[2], layers = m.layers;
    for (int full = 0; full < 2; full++) {
        l.recompute = full ? RECOMPUTE_FULL : RECOMPUTE_NONE;
        m.layers = layers;
        sent[full] = cost_time(&m, &l, &cluster, &table, &habits, 0).tp;
        m.layers = layers - 1;
        sent[full] -= cost_time(&m, &l, &cluster, &table, &habits, 0).tp;
    }
    if (!(fabs(sent[1] / sent[0] - 11.0 / 10) < 1e-6))
        fail_msg("recomputed: %g s for %g s, and should be 11 / 10", sent[1], sent[0]);
}

// The first stage has the embedding and most micro-batches, the last one the head: the fuller one counts.
static void the_fullest_stage_counts(void **state) {
    (void)state;
    Config c = config_of("llama-3-8b");
    c.dp = c.cp = c.tp = c.ep = 1, c.pp = 2, c.grad_acc = 4;
    LoneParts parts = {.count = {1e6, 1e6, 1e6}, .block = 1e6, .head = 1e12};
    assert_true(lone_memory(&c, &parts).peak >= 1e12);
    parts.count[0] = 1e12, parts.head = 0;
    assert_true(lone_memory(&c, &parts).peak >= 1e12);
    c.tied = true;  // the last stage has a copy of the embedding, and the head
    parts.head = 1e12;
    assert_true(lone_stage_memory(&c, &parts, false, true).peak >= 21e12);
}

// A layout of so many layers, with no more than these settings.
static Config layout_of(int pp, int zero, int64_t layers, int64_t micro_batches) {
    Config c = config_of("llama-3-8b");
    c.dp = c.cp = c.tp = c.ep = 1, c.pp = pp, c.layers = layers, c.grad_acc = micro_batches;
    config_set(&c, "zero", zero);
    config_set(&c, "schedule", ONE_F_ONE_B);
    return c;
}

// The logits are not there while a stage without a head computes a block again.
static void a_block_peaks_where_no_head_is(void **state) {
    (void)state;
    Config c = layout_of(2, 0, 2, 1);
    const LoneParts parts = {.block = 5, .head = 95, .most = {{0}, {50, 50, 50}, {101, 101, 101}}};
    near(lone_stage_memory(&c, &parts, true, false).peak, 50, 0);
    near(lone_stage_memory(&c, &parts, false, true).peak, 101, 0);
    const LoneParts small = {.block = 5, .head = 20, .most = {{0}, {50, 50, 50}, {26, 26, 26}}};
    near(lone_stage_memory(&c, &small, false, true).peak, 50, 0);
}

// Three blocks of 100 elements, an embedding of 1000 and a head of 700; a rank owns all shards, of which it
// holds 18 bytes an element.
static void whole_units_are_there_for_a_while(void **state) {
    (void)state;
    const LoneParts none = {.count = {1000, 100, 700}};
    const double own = 18 * 2000;
    Config c = layout_of(1, 3, 3, 2), one = layout_of(1, 3, 3, 1), zero2 = layout_of(1, 2, 3, 2);
    // Without activations the embedding is the fullest, in both precisions.
    near(lone_memory(&c, &none).peak, own + 6 * 1000, 0);
    // While all blocks are kept: in the head's B its weights, those of a block, and the sum of the embedding
    // of the micro-batch before.
    LoneParts kept = none;
    kept.block = 5000;
    for (int i = 0; i < 3; i++) kept.most[i] = (LonePeaks){5000, 5000, 5000};
    near(lone_memory(&c, &kept).peak, own + 3 * 5000 + 2 * 800 + 4 * 1000, 0);
    // With one micro-batch there is no such sum: the head is widened beside a block's weights.
    near(lone_memory(&one, &kept).peak, own + 3 * 5000 + 2 * 100 + 6 * 700, 0);
    // ZeRO-2 has all weights, and in the head's W its 16-bit gradient beside that sum.
    near(lone_memory(&zero2, &kept).peak, own + 3 * 5000 + 4 * 1000 + 2 * 700, 0);
    // A block whose B takes 9000 bytes has its weights and those of the block before it, and the head's sum.
    kept.most[1].b = 5000 + 9000;
    near(lone_memory(&c, &kept).peak, own + 3 * 5000 + 9000 + 2 * 200 + 4 * 700, 0);
}

// Two stages of two blocks of 100 elements, with ZeRO-3: all weights of a stage besides the shards, but sums
// only behind the first W. With one message and no more micro-batches than stages, all have had their F
// before.
static void a_stage_has_sums_behind_its_first_w(void **state) {
    (void)state;
    LoneParts p = {.count = {0, 100, 0}, .block = 5000};
    for (int i = 0; i < 3; i++) p.most[i] = (LonePeaks){5000, 5000, 5000};
    const double own = (18 + 2) * 200;
    Config few = layout_of(2, 3, 4, 2), many = layout_of(2, 3, 4, 3);
    // Both micro-batches of two blocks, and while the last block has its W a gradient of 16 bits.
    near(lone_stage_memory(&few, &p, true, false).peak, own + 4 * 5000 + 2 * 100, 0);
    // A third F comes behind the first W.
    near(lone_stage_memory(&many, &p, true, false).peak, own + 4 * 5000 + 4 * 200 + 2 * 100, 0);
}

// Ranks of tp have copies of the experts, whose gradients are summed in a buffer.
static void copies_of_experts_are_summed_in_a_buffer(void **state) {
    (void)state;
    const LoneParts p = {.count = {0, 10, 0}, .experts = 1000};
    Config c = layout_of(1, 0, 4, 1);
    near(lone_memory(&c, &p).peak, 20 * 4040, 0);
    c.tp = 2;
    near(lone_memory(&c, &p).peak, 20 * 4040 + 4 * 4000, 0);
    c.ep = 2;
    near(lone_memory(&c, &p).peak, 20 * 4040, 0);
}

// Without expert parallelism the ranks of tp have copies of the experts, over which ZeRO does not shard.
static void copies_of_experts_are_not_sharded(void **state) {
    (void)state;
    Config c = config_of("llama-3-8b");
    c.dp = 4, c.cp = 1, c.tp = 2, c.ep = 1;
    assert_int_equal(lone_replicas(&c, true).ranks, 4);
    c.ep = 4;
    assert_int_equal(lone_replicas(&c, true).ranks, 2);
}

static void set_of_a_pipeline(Config *c, int zero, int schedule, int chunks) {
    const struct {
        const char *name;
        double value;
    } setting[] = {{"sp", 0},        {"vocab-parallel", 0},  {"context", 0},
                   {"zero", zero},   {"schedule", schedule}, {"chunks", chunks},
                   {"attention", 1}, {"documents", -1},      {"bucket-mb", 25}};
    for (size_t i = 0; i < sizeof setting / sizeof *setting; i++)
        config_set(c, setting[i].name, setting[i].value);
}

// The last stage has a copy of the embedding that its head is tied to: its sum beside those of the stage, and
// a buffer in which both stages sum them. Closed forms against clocked steps.
static void tied_stages_hold_what_their_steps_do(void **state) {
    (void)state;
    static const struct {
        int zero, schedule, chunks;
        int64_t micro_batches;
    } row[] = {{0, ONE_F_ONE_B, 1, 8}, {1, ONE_F_ONE_B, 1, 8}, {2, ONE_F_ONE_B, 1, 8},
               {3, ONE_F_ONE_B, 1, 8}, {3, INTERLEAVED, 2, 8}, {3, AFAB, 1, 4}};
    device_dry_run(true);
    comm_stand_for_all(true);
    clock_set_machine(machine_find("dgx-h100"));
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        Config c = config_of("llama-3.2-1b");
        c.seq = 1024, c.dtype = BF16, c.optimizer = OPTIMIZER_ADAMW, c.recompute = RECOMPUTE_FULL;
        c.dp = 4, c.pp = 2, c.cp = c.tp = c.ep = 1, c.micro_batch = 1, c.grad_acc = row[i].micro_batches;
        set_of_a_pipeline(&c, row[i].zero, row[i].schedule, row[i].chunks);
        LoneParts parts = lone_parts(&c);
        LoneMemory clocked, closed = lone_memory(&c, &parts);
        lone_step(&c, &parts, lone_no_limits, &clocked);
        double off = closed.peak / clocked.peak - 1;
        if (!(fabs(off) <= 0.02)) fail_msg("row %zu: the peak is %+.1f%% off its step's", i, 100 * off);
    }
    comm_stand_for_all(false);
    device_dry_run(false);
}

// Seconds of a step on two stages of so many layers each, with ZeRO-1 over four ranks, and bytes of a rank.
enum { SECONDS, WEIGHTS, GRADIENTS, OPTIMIZER, KEPT, FIGURES };
static void two_stages(double *figure, int64_t layers) {
    Config c = config_default(
        "hidden=64 heads=2 kv-heads=2 ffn=128 vocab=256 seq=128 dtype=bf16 "
        "optimizer=adamw micro-batch=1 grad-acc=8");
    c.layers = 2 * layers, c.pp = 2, c.dp = 4;
    set_of_a_pipeline(&c, 1, ONE_F_ONE_B, 1);
    LoneParts parts = lone_parts(&c);
    LoneMemory memory;
    figure[SECONDS] = lone_step(&c, &parts, lone_no_limits, &memory).step;
    figure[WEIGHTS] = memory.weights, figure[GRADIENTS] = memory.gradients;
    figure[OPTIMIZER] = memory.optimizer, figure[KEPT] = memory.kept;
}

// Each layer of a stage takes and holds as much as the one before: those that are counted, and those that are
// not. To count 50,000 of them would take minutes.
static void many_layers_continue_what_few_cost(void **state) {
    (void)state;
#ifdef __SANITIZE_ADDRESS__
    const int64_t many = 2000;
#else
    const int64_t many = 50000;
#endif
    const int64_t stage[] = {128, 129, 256, 257, 600, many};
    device_dry_run(true);
    comm_stand_for_all(true);
    clock_set_machine(machine_find("dgx-h100"));
    double few[FIGURES], more[FIGURES], figure[FIGURES];
    two_stages(few, 100);
    two_stages(more, 120);
    for (size_t i = 0; i < sizeof stage / sizeof *stage; i++) {
        two_stages(figure, stage[i]);
        for (int j = 0; j < FIGURES; j++) {
            double line = few[j] + (double)(stage[i] - 100) * (more[j] - few[j]) / 20;
            if (!(fabs(figure[j] - line) <= (j == SECONDS ? 1e-9 : 0) * line))
                fail_msg("figure %d of %ld layers is %.12g, and should be %.12g", j, stage[i], figure[j],
                         line);
        }
    }
    comm_stand_for_all(false);
    device_dry_run(false);
}

// At its own time and bytes a step is within the limits, whatever its schedule. Far below them it is not, and
// a step of few micro-batches is enough to know.
static void the_clock_stops_at_limits(void **state) {
    (void)state;
    static const struct {
        int zero, schedule, chunks;
    } row[] = {{0, ONE_F_ONE_B, 1}, {1, ONE_F_ONE_B, 1}, {2, ONE_F_ONE_B, 1}, {3, ONE_F_ONE_B, 1},
               {1, ZB_H1, 1},       {2, ZB_H1, 1},       {3, ZB_H1, 1},       {1, AFAB, 1},
               {1, INTERLEAVED, 2}, {2, INTERLEAVED, 2}, {3, INTERLEAVED, 2}};
    device_dry_run(true);
    comm_stand_for_all(true);
    clock_set_machine(machine_find("dgx-h100"));
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        Config c = config_of("llama-3-8b");
        c.layers = 16, c.vocab = 1024, c.seq = 2048, c.dtype = BF16, c.optimizer = OPTIMIZER_ADAMW;
        c.dp = 8, c.pp = 2, c.cp = c.tp = c.ep = 1, c.micro_batch = 2, c.grad_acc = 256;
        set_of_a_pipeline(&c, row[i].zero, row[i].schedule, row[i].chunks);
        LoneParts parts = lone_parts(&c);
        LoneMemory memory, again;
        double step = lone_step(&c, &parts, lone_no_limits, &memory).step;
        double own = lone_step(&c, &parts, (LoneLimits){step, memory.peak}, &again).step;
        if (own != step || again.peak != memory.peak) fail_msg("row %zu: %g s become %g s", i, step, own);
        LoneLimits few = {0.5 * step, INFINITY}, small = {INFINITY, 1};
        bool ends = row[i].zero != 2 && lone_step(&c, &parts, few, &again).step < INFINITY;
        if (ends) fail_msg("row %zu: it is clocked to its end", i);
        if (lone_step(&c, &parts, small, &again).step < INFINITY) fail_msg("row %zu: it does not fit", i);
    }
    comm_stand_for_all(false);
    device_dry_run(false);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(models_have_their_parameters),
        cmocka_unit_test(deepseek_v3_has_the_published_sizes),
        cmocka_unit_test(latent_attention_is_split_behind_its_narrow_products),
        cmocka_unit_test(shards_add_up),
        cmocka_unit_test(heads_of_k_and_v_are_copied),
        cmocka_unit_test(recomputation_sends_all_but_the_last),
        cmocka_unit_test(the_fullest_stage_counts),
        cmocka_unit_test(a_block_peaks_where_no_head_is),
        cmocka_unit_test(whole_units_are_there_for_a_while),
        cmocka_unit_test(a_stage_has_sums_behind_its_first_w),
        cmocka_unit_test(copies_of_experts_are_summed_in_a_buffer),
        cmocka_unit_test(copies_of_experts_are_not_sharded),
        cmocka_unit_test(tied_stages_hold_what_their_steps_do),
        cmocka_unit_test(many_layers_continue_what_few_cost),
        cmocka_unit_test(the_clock_stops_at_limits),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
