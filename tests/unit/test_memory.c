// test_memory.c: the memory formulas against the papers' closed forms and against the account of a step.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "00_single_gpu/formulas.h"
#include "tensor/rng.h"

static char text_file[] = "/tmp/test_memory_XXXXXX";

static int write_text(void **state) {
    (void)state;
    enum { BYTES = 100000 };  // enough for the held-out tenth to hold a sequence of 8192
    int file = mkstemp(text_file);
    char *text = host_alloc(BYTES);
    for (int i = 0; i < BYTES; i++) text[i] = (char)(32 + rng_bits(5, RNG_TEST, (uint64_t)i) % 64);
    assert_int_equal(write(file, text, BYTES), BYTES);
    free(text);
    return close(file);
}

static int remove_text(void **state) {
    (void)state;
    return unlink(text_file);
}

static void assert_near(const char *what, double value, double expected) {
    if (!(fabs(value - expected) <= 1e-12 * fabs(expected)))
        fail_msg("%s: %.17g, expected %.17g", what, value, expected);
}

// A published shape, and words as in config_default.
static Config preset(const char *model, const char *words) {
    char *argv[] = {"test_memory", "--model", (char *)model, NULL};
    return config_parse(3, argv, "", CONFIG_MODEL, words, NULL, 0);
}

// A GPT block whose sizes are all different; f = 4 h, as in the papers.
static MemoryPlan gpt_plan(void) {
    Config c = {.layers = 3,
                .hidden = 48,
                .heads = 8,
                .kv_heads = 8,
                .ffn = 192,
                .vocab = 320,
                .seq = 40,
                .tied = true,
                .dtype = BF16,
                .micro_batch = 5};
    return (MemoryPlan){.model = c, .gpt = true, .tp = 1, .dp = 1};
}

static void gpt_parameters_match_the_playbook(void **state) {
    (void)state;
    MemoryPlan plan = gpt_plan();
    double h = 48, v = 320, L = 3;
    assert_near("small", memory_rank_parameters(&plan), h * v + L * (12 * h * h + 13 * h) + 2 * h);
    // Heads of 10, not 48 / 8: Q, K and V have 80 rows each with a bias, and the output matrix 80 columns.
    plan.model.head_size = 10;
    assert_near("wide heads", memory_rank_parameters(&plan),
                h * v + L * (4 * 80 * h + 3 * 80 + 8 * h * h + 10 * h) + 2 * h);
    plan.model = gpt3_175b();
    Config named = preset("gpt-3-175b", NULL);
    assert_int_equal(named.layers, plan.model.layers);
    assert_int_equal(named.hidden, plan.model.hidden);
    assert_int_equal(named.heads, plan.model.heads);
    assert_int_equal(named.kv_heads, plan.model.kv_heads);
    assert_int_equal(named.ffn, plan.model.ffn);
    assert_int_equal(named.vocab, plan.model.vocab);
    assert_int_equal(named.seq, plan.model.seq);
    double billions = memory_rank_parameters(&plan) / 1e9;
    if (!(billions > 174 && billions < 176)) fail_msg("GPT-3 175B has %g B parameters", billions);
}

static void llama_parameters_match_the_published_counts(void **state) {
    (void)state;
    const struct {
        const char *model;
        int64_t parameters;  // as the model cards count them
    } card[] = {{"llama-3-8b", 8030261248}, {"llama-3-70b", 70553706496}, {"llama-3-405b", 405853388800}};
    for (int i = 0; i < 3; i++) {
        MemoryPlan plan = {.model = preset(card[i].model, NULL), .tp = 1, .dp = 1};
        assert_near(card[i].model, memory_rank_parameters(&plan), (double)card[i].parameters);
        assert_int_equal(config_parameters(&plan.model), card[i].parameters);
    }
}

// In total t ranks hold every matrix once, and every norm t times.
static void tensor_parallel_ranks_hold_the_matrices_once(void **state) {
    (void)state;
    Config c = config_default("layers=3 hidden=48 heads=8 kv-heads=2 ffn=40 vocab=256");
    MemoryPlan plan = {.model = c, .tp = 1, .dp = 1};
    double whole = memory_rank_parameters(&plan), norms = 3 * 2 * 48 + 48;
    plan.tp = 2;
    assert_near("tp 2", 2 * memory_rank_parameters(&plan), whole + norms);
    plan.tp = 8;  // four ranks share one K/V head: each holds a copy, of 2 weights in each of 3 layers
    double copies = 3.0 * 2 * 48 * (8 - 2) * 6;
    assert_near("tp 8", 8 * memory_rank_parameters(&plan), whole + 7 * norms + copies);
}

static void bytes_per_parameter_are_16_and_20(void **state) {
    (void)state;
    const struct {
        DType dtype;
        bool f32_gradients;
        double parameters, gradients, accumulators, optimizer, all;
    } row[] = {{F32, false, 4, 4, 0, 8, 16},   {F32, true, 4, 4, 0, 8, 16},   {F64, true, 8, 8, 0, 16, 32},
               {BF16, false, 2, 2, 0, 12, 16}, {BF16, true, 2, 2, 4, 12, 20}, {F16, true, 2, 2, 4, 12, 20}};
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        MemoryPlan plan = {.model.dtype = row[i].dtype, .f32_gradients = row[i].f32_gradients, .dp = 1};
        MemoryNeed need = memory_states(&plan, 7e9);
        assert_near("parameters", need.parameters, row[i].parameters * 7e9);
        assert_near("gradients", need.gradients, row[i].gradients * 7e9);
        assert_near("accumulators", need.accumulators, row[i].accumulators * 7e9);
        assert_near("optimizer", need.optimizer, row[i].optimizer * 7e9);
        assert_near("all", memory_states_bytes(&need), row[i].all * 7e9);
    }
}

// 2 Psi + 2 Psi + k Psi / n;  2 Psi + (2 + k) Psi / n;  (2 + 2 + k) Psi / n
static void zero_cuts_optimizer_then_gradients_then_parameters(void **state) {
    (void)state;
    double psi = 7.5e9, n = 64;
    for (int f32_gradients = 0; f32_gradients <= 1; f32_gradients++)
        for (int k = 8; k <= 12; k += 4)
            for (int zero = 0; zero <= 3; zero++) {
                MemoryPlan plan = {.model.dtype = BF16,
                                   .f32_gradients = f32_gradients,
                                   .optimizer_bytes = k,
                                   .zero = zero,
                                   .dp = 64,
                                   .tp = 8};  // of which psi is one rank's share already
                MemoryNeed need = memory_states(&plan, psi);
                double g = f32_gradients ? 6 : 2;
                const double expected[] = {(2 + g + k) * psi, (2 + g) * psi + k * psi / n,
                                           2 * psi + (g + k) * psi / n, (2 + g + k) * psi / n};
                char *what = format_text("ZeRO-%d, k = %d, gradients of %g bytes", zero, k, g);
                assert_near(what, memory_states_bytes(&need), expected[zero]);
                free(what);
            }
}

// Korthikanti et al. 2022, table 2
static void gpt_activations_match_the_paper(void **state) {
    (void)state;
    MemoryPlan plan = gpt_plan();
    const Config *c = &plan.model;
    double a = 8, s = 40, h = 48, sbh = (double)(c->seq * c->micro_batch * c->hidden);
    for (plan.tp = 1; plan.tp <= 8; plan.tp *= 2) {
        double t = (double)plan.tp;
        const double expected[2][3] = {
            {10 + 24 / t + 5 * a * s / (h * t), 10 + 24 / t, 2},
            {34 / t + 5 * a * s / (h * t), 34 / t, 2 / t},
        };
        for (int sp = 0; sp <= 1; sp++)
            for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_FULL; recompute++) {
                plan.sp = sp;
                plan.model.recompute = recompute;
                char *what = format_text("tp %ld, sp %d, recompute %d", plan.tp, sp, recompute);
                assert_near(what, memory_block_activations(&plan), sbh * expected[sp][recompute]);
                assert_near(what, memory_need(&plan).blocks, 3 * sbh * expected[sp][recompute]);
                free(what);
            }
    }
}

static void recomputation_of_gpt3_costs_what_its_attention_costs(void **state) {
    (void)state;
    Config gpt3 = gpt3_175b();
    RecomputeCost cost = recompute_cost(&gpt3);
    assert_near("memory", cost.selective_memory, 80.0 / 114.0);
    double model = 1 + 2048 / (6.0 * 12288) + 51200 / (12.0 * 12288 * 96);
    assert_near("published", cost.selective_flops_published, 2048 / (6.0 * 12288) / model);
    assert_near("forward alone", 3 * cost.selective_flops, cost.selective_flops_published);
    // A forward is a third of forward and backward; the head's is not recomputed.
    assert_near("full", cost.full_flops, (1 + 2048 / (6.0 * 12288)) / 3 / model);
}

// ---- against what a step allocates ----

static void assert_bytes(const char *what, const char *shape, double predicted, int64_t measured) {
    if (!(predicted == (double)measured))
        fail_msg("%s, %s: predicted %.0f, measured %ld", shape, what, predicted, measured);
}

static void assert_step_is_predicted(const char *shape, Config c) {
    c.data = text_file;
    MemoryPlan plan = {.model = c, .f32_gradients = true, .tp = 1, .dp = 1};
    MemoryNeed need = memory_need(&plan);
    memory_reset_peak();
    Trainer *trainer = trainer_new(&c, mesh_single(), NULL);
    train_step(trainer, NULL);
    Memory account = memory_account();
    assert_bytes("parameters", shape, memory_rank_parameters(&plan),
                 params_elements(&trainer->model->params));
    assert_bytes("parameter bytes", shape, need.parameters, account.now[MEMORY_PARAMETER]);
    assert_bytes("gradient bytes", shape, need.gradients + need.accumulators, account.now[MEMORY_GRADIENT]);
    assert_bytes("optimizer bytes", shape, need.optimizer, account.now[MEMORY_OPTIMIZER]);
    assert_bytes("kept activations", shape, need.blocks + need.ends, trainer->kept_bytes);
    assert_bytes("kept_activation_bytes", shape, (double)kept_activation_bytes(&c), trainer->kept_bytes);
    assert_bytes("peak activations", shape, (double)peak_activation_bytes(&c, c.dtype),
                 account.peak[MEMORY_ACTIVATION]);
    assert_bytes("activations after the step", shape, 0, account.now[MEMORY_ACTIVATION]);
    trainer_free(trainer);
    assert_bytes("everything after the run", shape, 0, memory_account().now_total);
}

// Shapes in which each of the peak's candidates is the largest.
static const char *const shapes[] = {
    "layers=2 hidden=24 heads=6 kv-heads=2 ffn=20 vocab=256 seq=11 micro-batch=3",  // dq, dk, dv
    "layers=3 hidden=24 heads=3 kv-heads=3 ffn=144 vocab=256 seq=7 micro-batch=2",  // dact
    "layers=1 hidden=16 heads=2 kv-heads=1 ffn=12 vocab=999 seq=5 micro-batch=1",   // head
    "layers=2 hidden=8 heads=4 kv-heads=2 ffn=24 vocab=256 seq=31 micro-batch=2 grad-acc=3 tied=1",
};

static void assert_all_steps_are_predicted(const char *shape) {
    const char *const dtypes[] = {"f64", "f32", "bf16", "f16"};
    const char *const recomputes[] = {"none", "selective", "full"};
    for (int dtype = 0; dtype < 4; dtype++)
        for (int recompute = 0; recompute < 3; recompute++) {
            char *text =
                format_text("%s dtype=%s recompute=%s", shape, dtypes[dtype], recomputes[recompute]);
            assert_step_is_predicted(text, config_default(text));
            free(text);
        }
}

static void a_step_allocates_what_is_predicted(void **state) {
    (void)state;
    assert_all_steps_are_predicted(shapes[0]);
}

static void a_dry_step_allocates_what_is_predicted(void **state) {
    (void)state;
    device_dry_run(true);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) assert_all_steps_are_predicted(shapes[i]);
    device_dry_run(false);
}

static void a_dry_step_of_published_models_allocates_what_is_predicted(void **state) {
    (void)state;
    device_dry_run(true);
    assert_step_is_predicted("llama-3-8b", preset("llama-3-8b", "dtype=bf16 micro-batch=1 recompute=none"));
    assert_step_is_predicted("llama-3-8b",
                             preset("llama-3-8b", "dtype=f32 micro-batch=2 recompute=selective"));
    assert_step_is_predicted("llama-3-405b",
                             preset("llama-3-405b", "dtype=bf16 micro-batch=1 recompute=full"));
    device_dry_run(false);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpt_parameters_match_the_playbook),
        cmocka_unit_test(llama_parameters_match_the_published_counts),
        cmocka_unit_test(tensor_parallel_ranks_hold_the_matrices_once),
        cmocka_unit_test(bytes_per_parameter_are_16_and_20),
        cmocka_unit_test(zero_cuts_optimizer_then_gradients_then_parameters),
        cmocka_unit_test(gpt_activations_match_the_paper),
        cmocka_unit_test(recomputation_of_gpt3_costs_what_its_attention_costs),
        cmocka_unit_test(a_step_allocates_what_is_predicted),
        cmocka_unit_test(a_dry_step_allocates_what_is_predicted),
        cmocka_unit_test(a_dry_step_of_published_models_allocates_what_is_predicted),
    };
    return cmocka_run_group_tests_name("memory", tests, write_text, remove_text);
}
