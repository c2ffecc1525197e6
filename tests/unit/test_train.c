// test_train.c: whole steps: accumulation, recomputation, determinism, the optimizer's rules, and what a step
// counts. test_step.c tests what a step asks of the device.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "00_single_gpu/training.h"
#include "tensor/rng.h"

static char text_file[] = "/tmp/test_train_XXXXXX";

static int write_text(void **state) {
    (void)state;
    int file = mkstemp(text_file);
    assert_true(file >= 0);
    for (int i = 0; i < 4000; i++) {
        char byte = (char)(32 + rng_bits(5, RNG_TEST, i) % 64);
        assert_int_equal(write(file, &byte, 1), 1);
    }
    return close(file);
}

static int remove_text(void **state) {
    (void)state;
    return unlink(text_file);
}

static Config small_config(const char *more) {
    char *text = format_text(
        "layers=2 hidden=24 heads=6 kv-heads=2 ffn=20 vocab=256 seq=11 micro-batch=4 steps=4 %s", more);
    Config c = config_default(text);
    free(text);
    c.data = text_file;
    return c;
}

static Record run(const Config *c, bool masked) {
    Trainer *t = trainer_new(c, mesh_single(), NULL);
    t->masked = masked;
    Record r = train_record(t, "run");
    trainer_free(t);
    return r;
}

static bool same_bits(const Record *a, const Record *b) {
    bool same = !memcmp(a->loss, b->loss, a->steps * sizeof *a->loss);
    for (int i = 0; i < a->tensors; i++)
        same = same && !memcmp(a->grad[i], b->grad[i], a->count[i] * sizeof(double)) &&
               !memcmp(a->param[i], b->param[i], a->count[i] * sizeof(double));
    return same;
}

// The worst relative error and scale over losses, raw gradients and parameters.
static Difference worst(const Record *a, const Record *b) {
    Difference w = difference("loss", a->loss, b->loss, a->steps);
    for (int i = 0; i < a->tensors; i++) {
        Difference g = difference(a->name[i], a->grad[i], b->grad[i], a->count[i]);
        Difference p = difference(a->name[i], a->param[i], b->param[i], a->count[i]);
        if (!(g.relative <= w.relative)) w = g;
        if (!(p.relative <= w.relative)) w = p;
    }
    return w;
}

static void expect_near(const Record *a, const Record *b, double bound) {
    Difference w = worst(a, b);
    if (!(w.relative <= bound))
        fail_msg("%s is off by %.3g relative (bound %.3g), scale %.9g", w.what, w.relative, bound, w.scale);
}

static void same_seed_same_bits(void **state) {
    (void)state;
    const char *const dtypes[] = {"dtype=f64", "dtype=f32", "dtype=bf16"};
    for (int i = 0; i < 3; i++) {
        Config c = small_config(dtypes[i]);
        Record a = run(&c, false), b = run(&c, false);
        if (!same_bits(&a, &b)) fail_msg("%s: the same seed gives other bits", dtypes[i]);
        c.seed = 2;
        Record other = run(&c, false);
        assert_false(same_bits(&a, &other));
        record_free(&a);
        record_free(&b);
        record_free(&other);
    }
}

static void micro_batches_make_the_step_of_the_batch(void **state) {
    (void)state;
    const char *const optimizers[] = {"dtype=f64 optimizer=sgd lr=0.1 clip=0",
                                      "dtype=f64 optimizer=adamw lr=1e-3"};
    for (int i = 0; i < 2; i++)
        for (int masked = 0; masked < 2; masked++) {
            Config c = small_config(optimizers[i]);
            Record whole = run(&c, masked);
            c.micro_batch = 1;
            c.grad_acc = 4;
            Record parts = run(&c, masked);
            expect_near(&parts, &whole, 1e-10);
            record_free(&whole);
            record_free(&parts);
        }
}

static void recomputation_changes_no_bit(void **state) {
    (void)state;
    const char *const dtypes[] = {"dtype=f64", "dtype=f32", "dtype=bf16"};
    for (int i = 0; i < 3; i++) {
        Config c = small_config(dtypes[i]);
        c.grad_acc = 2;
        Record none = run(&c, true);
        for (c.recompute = RECOMPUTE_SELECTIVE; c.recompute <= RECOMPUTE_FULL; c.recompute++) {
            Record again = run(&c, true);
            if (!same_bits(&again, &none))
                fail_msg("%s: recomputation %d changes bits", dtypes[i], c.recompute);
            assert_true(again.kept_bytes < none.kept_bytes);
            assert_true(again.flops > none.flops);
            record_free(&again);
        }
        record_free(&none);
    }
}

static void counted_flops_are_the_formula(void **state) {
    (void)state;
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_FULL; recompute++) {
        Config c = small_config("dtype=f32 grad-acc=3");
        c.recompute = recompute;
        Record r = run(&c, false);
        double formula = config_step_flops(&c, 12) + recompute_extra_flops(&c, 12);
        assert_true(r.flops == formula * (double)c.steps);
        record_free(&r);
    }
}

// A dry run has the counts, clocks and account of a real one.
static void a_dry_run_counts_the_same(void **state) {
    (void)state;
    Config c = small_config("dtype=bf16 grad-acc=2");
    Record real = run(&c, false);
    device_dry_run(true);
    Record dry = run(&c, false);
    device_dry_run(false);
    assert_true(dry.flops == real.flops);
    assert_true(dry.model_seconds == real.model_seconds);
    assert_int_equal(dry.kept_bytes, real.kept_bytes);
    assert_memory_equal(&dry.memory, &real.memory, sizeof real.memory);
    record_free(&real);
    record_free(&dry);
}

// SGD is linear in the gradient, so it shows any wrong factor: W1 = W0 - lr clip dW.
static void sgd_moves_by_rate_clip_and_gradient(void **state) {
    (void)state;
    for (int clipped = 0; clipped < 2; clipped++) {
        Config c = small_config("dtype=f64 optimizer=sgd lr=0.5 steps=1");
        c.clip = clipped ? 1e-2 : 0;
        Trainer *t = trainer_new(&c, mesh_single(), NULL);
        Record before = record_new("before", 1, &t->model->params);
        record_params(&before, &t->model->params);
        Record r = train_record(t, "step");
        double norm = 0;
        for (int i = 0; i < r.tensors; i++)
            for (int64_t j = 0; j < r.count[i]; j++) norm += r.grad[i][j] * r.grad[i][j];
        norm = sqrt(norm);
        assert_true(fabs(r.grad_norm[0] - norm) <= 1e-12 * norm);
        assert_true(norm > 1e-2);
        double factor = clipped ? 1e-2 / norm : 1;
        for (int i = 0; i < r.tensors; i++)
            for (int64_t j = 0; j < r.count[i]; j++) {
                double expected = before.param[i][j] - 0.5 * factor * r.grad[i][j];
                if (!(fabs(r.param[i][j] - expected) <= 1e-12))
                    fail_msg("%s[%d] became %.15g, not %.15g", r.name[i], (int)j, r.param[i][j], expected);
            }
        record_free(&before);
        record_free(&r);
        trainer_free(t);
    }
}

// AdamW's first step has a closed form: m^ = g, v^ = g^2, so W1 = W0 - lr (g / (|g| + eps) + decay W0);
// decay on matrices alone. The gradient is the clipped one, which only eps can see.
static void adamw_first_step_is_the_closed_form(void **state) {
    (void)state;
    Config c = small_config("dtype=f64 optimizer=adamw lr=1e-2 steps=1 warmup=0 clip=1e-3");
    c.adam_eps = 1e-5;
    c.weight_decay = 0.1;
    Trainer *t = trainer_new(&c, mesh_single(), NULL);
    Record before = record_new("before", 1, &t->model->params);
    record_params(&before, &t->model->params);
    Record r = train_record(t, "step");
    double lr = t->lr, scale = clip_scale(r.grad_norm[0], c.clip);
    assert_true(lr > 0 && scale < 1);
    for (int i = 0; i < r.tensors; i++) {
        bool matrix = t->model->params.param[i].dims == 2;
        for (int64_t j = 0; j < r.count[i]; j++) {
            double g = scale * r.grad[i][j], w = before.param[i][j];
            double expected = w - lr * (g / (fabs(g) + c.adam_eps) + (matrix ? 0.1 * w : 0));
            if (!(fabs(r.param[i][j] - expected) <= 1e-10 * lr))
                fail_msg("%s[%d] became %.15g, not %.15g", r.name[i], (int)j, r.param[i][j], expected);
        }
    }
    record_free(&before);
    record_free(&r);
    trainer_free(t);
}

static void learning_rate_warms_up_and_decays(void **state) {
    (void)state;
    Config c = small_config("lr=1e-2 warmup=10 steps=110");
    assert_true(fabs(learning_rate(&c, 0) - 1e-3) < 1e-15);
    assert_true(fabs(learning_rate(&c, 9) - 1e-2) < 1e-15);
    assert_true(learning_rate(&c, 10) < 1e-2 && learning_rate(&c, 10) > 0.999e-2);
    assert_true(fabs(learning_rate(&c, 59) - 0.55e-2) < 1e-12);
    assert_true(fabs(learning_rate(&c, 109) - 1e-3) < 1e-12);
}

// Steps are optimizer steps, samples are samples: accumulation does not confuse them, and no sample is used
// twice.
static void progress_counts_steps_and_samples(void **state) {
    (void)state;
    Config c = small_config("dtype=f32 grad-acc=3");
    Trainer *t = trainer_new(&c, mesh_single(), NULL);
    train_step(t, NULL);
    train_step(t, NULL);
    assert_int_equal(t->progress.step, 2);
    assert_int_equal(t->optimizer.step, 2);
    assert_int_equal(t->progress.sample, 2 * 3 * 4);
    trainer_free(t);
}

// At a rate of 0 the weights do not change, so a step repeats exactly if its samples do, and differs if
// they differ.
static void each_step_starts_from_zero_and_sees_new_samples(void **state) {
    (void)state;
    Config c = small_config("dtype=f64 grad-acc=2 optimizer=sgd lr=0");
    Trainer *t = trainer_new(&c, mesh_single(), NULL);
    train_step(t, NULL);
    double first = t->grad_norm;
    train_step(t, NULL);
    assert_true(t->grad_norm != first);
    t->progress.sample = 0;
    train_step(t, NULL);
    if (t->grad_norm != first) fail_msg("the gradient norm was %.17g and is %.17g", first, t->grad_norm);
    trainer_free(t);
}

// A scale of the gradients (a precision recipe's, in the step socket) changes nothing else: neither losses
// nor norms nor the optimizer's step. A power of two does not round.
static bool raise_scale(void *context, Model *m, double norm) {
    (void)context;
    assert_true(norm < 100);
    m->grad_scale *= 4;
    return true;
}
static void *plug_scale(Model *m) {
    m->grad_scale = 1024;
    m->sockets.step.accept = raise_scale;
    return NULL;
}
static const Technique loss_scaling = {.name = "loss scaling", .plug = plug_scale};

static void the_scale_of_gradients_changes_no_bit(void **state) {
    (void)state;
    const char *const more[] = {"dtype=f64 optimizer=sgd lr=0.1 clip=0.01 grad-acc=2",
                                "dtype=bf16 optimizer=adamw lr=1e-2 clip=0.5 grad-acc=2"};
    for (int i = 0; i < 2; i++) {
        Config c = small_config(more[i]);
        Record without = run(&c, true);
        Trainer *t = trainer_new(&c, mesh_single(), (const Technique *[]){&loss_scaling, NULL});
        t->masked = true;
        Record with = train_record(t, "scaled");
        assert_true(t->model->grad_scale == 1024 * pow(4, (double)c.steps));
        assert_true(same_bits(&with, &without));
        assert_memory_equal(with.grad_norm, without.grad_norm, (size_t)with.steps * sizeof(double));
        trainer_free(t);
        record_free(&with);
        record_free(&without);
    }
}

// Refused gradients leave weights and moments unchanged, and the run continues with the next samples.
static int refusals;
static bool refuse_second(void *context, Model *m, double norm) {
    (void)context, (void)m, (void)norm;
    return ++refusals != 2;
}
static void *plug_refusal(Model *m) {
    m->sockets.step.accept = refuse_second;
    return NULL;
}
static const Technique refusing = {.name = "refusing", .plug = plug_refusal};

static void a_refused_step_leaves_the_weights_alone(void **state) {
    (void)state;
    Config c = small_config("dtype=f32");
    refusals = 0;
    Trainer *t = trainer_new(&c, mesh_single(), (const Technique *[]){&refusing, NULL});
    Record after[3];
    for (int step = 0; step < 3; step++) {
        train_step(t, NULL);
        after[step] = record_new("after", 1, &t->model->params);
        record_params(&after[step], &t->model->params);
        assert_int_equal(t->progress.step, step + 1);
        assert_int_equal(t->optimizer.step, step == 0 ? 1 : step);
    }
    for (int i = 0; i < after[0].tensors; i++) {
        size_t bytes = (size_t)after[0].count[i] * sizeof(double);
        assert_memory_equal(after[0].param[i], after[1].param[i], bytes);
        assert_true(memcmp(after[1].param[i], after[2].param[i], bytes) != 0);
    }
    for (int step = 0; step < 3; step++) record_free(&after[step]);
    trainer_free(t);
}

// (2, 1) and (90, 9) labels and losses: the mean is over labels, not over the samples' means.
static void held_out_loss_is_the_mean_over_labels(void **state) {
    (void)state;
    Config c = small_config("dtype=f64");
    Trainer *t = trainer_new(&c, mesh_single(), NULL);
    train_step(t, NULL);
    t->masked = true;
    double sum = 0, labels = 0, means = 0;
    for (int i = 0; i < 5; i++) {
        int32_t tokens[11], targets[11];
        data_sample(&t->data, c.seed, i, true, c.seq, tokens, targets);
        data_mask_prompt(c.seed, i, c.seq, targets);
        double scale = mean_loss_scale((double)count_labels(targets, c.seq));
        MicroBatch micro = micro_batch_new(t->model, 0, 1, tokens, targets, 1);
        model_forward(t->model, &micro);
        double loss = loss_value(micro.loss);
        sum += loss;
        labels += scale > 0 ? 1 / scale : 0;
        means += loss * scale / 5;
        micro_batch_free(t->model, &micro);
    }
    assert_true(fabs(means - sum / labels) > 1e-6);
    assert_true(fabs(held_out_loss(t, 5) - sum / labels) < 1e-12);
    trainer_free(t);
}

// 16-bit weights: gradients of micro-batches are summed in f32, and steps below half an ulp are not lost.
static void bf16_keeps_masters_and_f32_sums(void **state) {
    (void)state;
    Config c = small_config("dtype=bf16 grad-acc=8 micro-batch=1 optimizer=sgd lr=1e-5 clip=0 steps=40");
    Trainer *t = trainer_new(&c, mesh_single(), NULL);
    Record r = train_record(t, "bf16");
    int64_t n = config_parameters(&c);
    assert_int_equal(r.memory.now[MEMORY_PARAMETER], 2 * n);
    assert_int_equal(r.memory.now[MEMORY_GRADIENT], (2 + 4) * n);
    assert_int_equal(r.memory.now[MEMORY_OPTIMIZER], 4 * n);  // SGD: master weights alone
    // norm weights start at 1, where bf16 has steps of 2^-8; the masters must have moved
    const Param *norm = params_find(&t->model->params, "model.norm.weight");
    Tensor master = tensor_view(t->optimizer.unit[norm->unit].master, norm->offset, SHAPE(norm->count));
    double moved = 0, *host = host_alloc(norm->count * sizeof *host);
    tensor_to_doubles(host, master);
    for (int64_t i = 0; i < norm->count; i++) moved = fmax(moved, fabs(host[i] - 1));
    assert_true(moved > 0 && moved < 1e-3);
    free(host);
    record_free(&r);
    trainer_free(t);
}

// f32 and bf16 stay close to f64, each within its own rounding error.
static void narrower_dtypes_stay_near_f64(void **state) {
    (void)state;
    Config c = small_config("dtype=f64 optimizer=sgd lr=0.1 steps=2 micro-batch=2 grad-acc=2");
    Record f64 = run(&c, false);
    c.dtype = F32;
    Record f32 = run(&c, false);
    c.dtype = BF16;
    Record bf16 = run(&c, false);
    expect_near(&f32, &f64, 1e-5);
    expect_near(&bf16, &f64, 0.1);
    assert_true(worst(&bf16, &f64).relative > 1e-3);
    record_free(&f64);
    record_free(&f32);
    record_free(&bf16);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_seed_same_bits),
        cmocka_unit_test(micro_batches_make_the_step_of_the_batch),
        cmocka_unit_test(recomputation_changes_no_bit),
        cmocka_unit_test(counted_flops_are_the_formula),
        cmocka_unit_test(a_dry_run_counts_the_same),
        cmocka_unit_test(sgd_moves_by_rate_clip_and_gradient),
        cmocka_unit_test(adamw_first_step_is_the_closed_form),
        cmocka_unit_test(learning_rate_warms_up_and_decays),
        cmocka_unit_test(progress_counts_steps_and_samples),
        cmocka_unit_test(each_step_starts_from_zero_and_sees_new_samples),
        cmocka_unit_test(the_scale_of_gradients_changes_no_bit),
        cmocka_unit_test(a_refused_step_leaves_the_weights_alone),
        cmocka_unit_test(held_out_loss_is_the_mean_over_labels),
        cmocka_unit_test(bf16_keeps_masters_and_f32_sums),
        cmocka_unit_test(narrower_dtypes_stay_near_f64),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, write_text, remove_text);
}
