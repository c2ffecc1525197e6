// test_recipes.c: what recipes store in fewer bits or in more: sums of float16 gradients, gradients in f32
// and as 8-bit codes, and moments, which a checkpoint saves and restores to the bit; the scale of float16's
// loss; weights that are rounded at random; what FP8's scales leave of small and of large numbers; and how
// much of their losses is chance. TAP.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "06_expert_parallel/expert_parallel.h"
#include "08_mixed_precision/mixed_precision.h"
#include "tensor/rng.h"

// A model without data; `sum` and `fp8` are the settings of these names.
static Model *model_of(const char *more, const Technique *technique, int sum, int fp8) {
    char *text = format_text("layers=1 hidden=24 heads=2 kv-heads=2 ffn=40 vocab=30 seq=4 %s", more);
    Config c = config_default(text);
    free(text);
    const char *const names[] = {"master", "moments", "loss-scale", "fp8-tile", "fp8-wire"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) config_set(&c, names[i], 0);
    config_set(&c, "sum", sum);
    config_set(&c, "fp8", fp8);
    Model *m = model_new(&c, mesh_single());
    technique->recipe(&m->params.recipe, &c);
    model_allocate(m);
    return m;
}

static double first_of(Tensor t) {
    double x;
    tensor_to_doubles(&x, tensor_view(t, 0, SHAPE(1)));
    return x;
}

// 40000 + 40000 is beyond 65504. Without accumulators, the sums of backward stay where they are.
static void float16_gradients_add_up_in_f32(void **state) {
    (void)state;
    for (int narrow = 0; narrow < 2; narrow++) {
        Model *m = model_of("dtype=f16", &fp16_recipe, narrow, 0);
        const Unit *unit = &m->params.unit[1];
        Tensor micro = tensor_like(MEMORY_GRADIENT, unit->grads);
        op_fill(micro, 40000);
        for (int i = 0; i < 2; i++) {
            op_accumulate(unit->grads, micro);
            params_accumulate(&m->params, 1);
        }
        double sum = first_of(unit_total_grad(unit));
        assert_true(narrow ? isinf(sum) : sum == 80000);
        tensor_free(&micro);
        model_free(m);
    }
}

// ---- gradients that backward writes in f32 ----

// Two matrices over whole batches against f64: the error of rounding each micro-batch to bf16, which f32
// avoids.
static void gradients_in_f32_add_up_as_they_are(void **state) {
    (void)state;
    enum { MICROS = 5, ROWS = 7 };
    for (int wide = 0; wide < 2; wide++) {
        Config c = config_default("layers=1 hidden=24 heads=2 kv-heads=2 ffn=40 vocab=30 seq=4 dtype=bf16");
        config_set(&c, "gradient", wide);
        Model *m = model_new(&c, mesh_single());
        bf16_recipe.recipe(&m->params.recipe, &c);
        model_allocate(m);
        assert_true(recipe_has_accumulators(m->params.recipe) == !wide);
        Param *weight[] = {params_find(&m->params, "model.layers.0.mlp.gate_proj.weight"),
                           params_find(&m->params, "model.layers.0.mlp.up_proj.weight")};
        const int64_t f = weight[0]->shape[0], h = weight[0]->shape[1];
        double error = 0, norm = 0, want[2][2000] = {{0}}, dy[2][ROWS * 40], x[ROWS * 24], got[2000];
        assert_true(f == 40 && h == 24);
        for (int micro = 0; micro < MICROS; micro++) {
            Tensor in = tensor_new(MEMORY_ACTIVATION, BF16, SHAPE(ROWS, h)), out[2];
            for (int64_t i = 0; i < ROWS * h; i++)
                x[i] = rng_normal(1, RNG_TEST, (uint64_t)(micro * 999 + i));
            tensor_from_doubles(in, x);
            tensor_to_doubles(x, in);
            for (int w = 0; w < 2; w++) {
                out[w] = tensor_new(MEMORY_ACTIVATION, BF16, SHAPE(ROWS, f));
                for (int64_t i = 0; i < ROWS * f; i++)
                    dy[w][i] = rng_normal(2 + (uint64_t)w, RNG_TEST, (uint64_t)(micro * 999 + i));
                tensor_from_doubles(out[w], dy[w]);
                tensor_to_doubles(dy[w], out[w]);
                for (int64_t i = 0; i < ROWS * f * h; i++)
                    want[w][i % (f * h)] +=
                        dy[w][i / (f * h) * f + i % (f * h) / h] * x[i / (f * h) * h + i % (f * h) % h];
            }
            m->sockets.linear.backward_weight(m->sockets.linear.context, m, 2, weight, out, in, NULL);
            params_accumulate(&m->params, weight[0]->unit);
            tensor_free(&in), tensor_free(&out[0]), tensor_free(&out[1]);
        }
        for (int w = 0; w < 2; w++) {
            tensor_to_doubles(got, param_total_grad(&m->params, weight[w]));
            for (int64_t i = 0; i < f * h; i++) {
                error += (got[i] - want[w][i]) * (got[i] - want[w][i]);
                norm += want[w][i] * want[w][i];
            }
        }
        error = sqrt(error / norm);
        if (wide ? !(error < 1e-6) : !(error > 1e-4 && error < 0x1p-8))
            fail_msg("gradients in %s are off by %g", wide ? "f32" : "bf16", error);
        model_free(m);
    }
}

static bool is_bf16(double x) {
    uint16_t code;
    double back;
    dtype_convert(&code, BF16, &x, F64, 1);
    dtype_convert(&back, F64, &code, BF16, 1);
    return back == x;
}

// For one micro-batch: embedding, norms, router, experts, head. Only what no token reaches is unchanged.
// (In the first step of te-delayed, small gradients of q and k underflow.)
static void no_gradient_is_rounded_to_bf16(void **state) {
    (void)state;
    static const struct {
        const char *shape;
        const Technique *other;
        int fp8;
    } models[] = {
        {"", NULL, 0}, {"tied=1", NULL, 0}, {"experts=2 top-k=2", &moe, 0}, {"", &fp8_recipe, TE_CURRENT}};
    for (int i = 0; i < 8; i++) {
        const bool wide = i >= 4;
        char *text = format_text(
            "layers=1 hidden=24 heads=2 kv-heads=2 ffn=40 seq=32 micro-batch=4 grad-acc=1 steps=1 "
            "dtype=bf16 %s",
            models[i % 4].shape);
        Config c = config_default(text);
        config_set(&c, "gradient", wide);
        config_set(&c, "fp8", models[i % 4].fp8);
        Trainer *t =
            trainer_new(&c, mesh_single(), (const Technique *[]){&bf16_recipe, models[i % 4].other, NULL});
        Record r = train_record(t, "gradients");
        for (int w = 0; w < r.tensors; w++) {
            bool rounded = true;
            for (int64_t j = 0; j < r.count[w]; j++) rounded = rounded && is_bf16(r.grad[w][j]);
            if (rounded == wide) fail_msg("%s: %s is %srounded", text, r.name[w], wide ? "" : "not ");
        }
        record_free(&r);
        trainer_free(t);
        free(text);
    }
}

// Gradients of different weights have different magnitudes: e4m3 alone has a range of 2^18, and here they
// differ by 2^20. When a micro-batch adds two parts, the second must not overwrite the first.
static void gradients_as_codes_have_a_scale_for_each_weight(void **state) {
    (void)state;
    Model *m = model_of("dtype=bf16", &fp8_recipe, 0, FP8_LM);
    Params *p = &m->params;
    assert_true(p->recipe.gradient == E4M3);
    assert_int_equal(tensor_bytes(p->grads), params_elements(p));
    for (int micro = 0; micro < 2; micro++) {
        for (int i = 0; i < p->count; i++)
            for (int part = 0; part < 2; part++) {
                Tensor grad = param_grad_begin(p, &p->param[i]);
                Tensor more = tensor_like(MEMORY_ACTIVATION, grad);
                assert_true(grad.dtype == BF16);
                op_fill(more, ldexp(1, -4 * (i % 6)));
                op_accumulate(grad, more);
                tensor_free(&more);
                param_grad_end(p, &p->param[i], grad);
            }
        for (int unit = 0; unit < p->units; unit++) params_accumulate(p, unit);
    }
    for (int i = 0; i < p->count; i++)
        assert_true(first_of(param_total_grad(p, &p->param[i])) == 4 * ldexp(1, -4 * (i % 6)));
    model_free(m);
}

// Numbers of many magnitudes, a run of zeros longer than a group that shares a scale, and some that round
// up to a power of two.
static void random_state(Tensor wide, uint64_t key) {
    int64_t count = tensor_count(wide);
    double *x = host_alloc((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++) {
        double size = exp2(24 * rng_uniform(key, RNG_TEST, (uint64_t)i) - 30);
        x[i] = i >= 256 && i < 512 ? 0 : i % 100 == 99 ? ldexp(0.9999999, (int)(i % 7)) : size;
    }
    tensor_from_doubles(wide, x);
    free(x);
}

// Off by at most half a step of the format or, of small elements, of its smallest number times a scale. The
// largest elements are below 64, the smallest 2^-30, where float16 without a scale ends at 2^-24.
static void check_stored(DType dtype, const float *x, const float *stored, int64_t count) {
    static const double step[DTYPES] = {[BF16] = 0x1p-7, [F16] = 0x1p-10, [E4M3] = 0x1p-3, [E5M2] = 0x1p-2};
    static const double smallest[DTYPES] = {
        [F16] = 0x1p-9 * 0x1p-24, [E4M3] = 64. / 448 * 0x1p-9, [E5M2] = 64. / 57344 * 0x1p-16};
    for (int64_t i = 0; i < count; i++)
        if (!(fabs(stored[i] - x[i]) <= 0.50001 * (step[dtype] * fabs(x[i]) + smallest[dtype])))
            fail_msg("%g is stored in %s as %g", x[i], dtype_name(dtype), stored[i]);
}

static void state_is_stored_and_stored_again_the_same(void **state) {
    (void)state;
    enum { ROUNDS = 40 };
    const int recipes[] = {FP8_LM, NANOTRON};
    for (int i = 0; i < 2 * ROUNDS; i++) {
        Model *m = model_of("dtype=bf16", &fp8_recipe, 0, recipes[i % 2]);
        Params *p = &m->params;
        Fp8State *s = fp8_state_plug(m);
        const Rounding *r = p->recipe.rounding;
        const DType dtype[] = {p->recipe.moment, p->recipe.second, p->recipe.master};
        const Param *gate = params_find(p, "model.layers.0.mlp.gate_proj.weight");
        for (StateKind kind = STATE_M; kind <= STATE_MASTER; kind++) {
            Tensor stored = tensor_new(MEMORY_OPTIMIZER, dtype[kind], SHAPE(gate->count));
            Tensor once = tensor_new(MEMORY_OPTIMIZER, F32, SHAPE(gate->count)),
                   twice = tensor_like(MEMORY_OPTIMIZER, once);
            StatePart part = {.param = gate, .kind = kind};
            random_state(once, (uint64_t)(4 * i) + kind);
            float x[2000], a[2000], b[2000];
            assert_true(gate->count <= 2000);
            tensor_to_host(x, once);
            r->store(r->context, stored, once, part);
            r->load(r->context, once, stored, part);
            op_copy(twice, once);
            r->store(r->context, stored, twice, part);
            r->load(r->context, twice, stored, part);
            tensor_to_host(a, once);
            tensor_to_host(b, twice);
            check_stored(dtype[kind], x, a, gate->count);
            if (memcmp(a, b, (size_t)gate->count * sizeof *a))
                fail_msg("%s: %s stored again is another number", fp8_recipes[recipes[i % 2] - 1].name,
                         dtype_name(dtype[kind]));
            assert_true(op_sum_squares(once) > 0);
            tensor_free(&stored), tensor_free(&once), tensor_free(&twice);
        }
        fp8_state_unplug(m, s);
        model_free(m);
    }
}

// What the page says of each recipe: codes of x and W, and of dy; steps of the history; what the optimizer
// stores, and gradients, where they are its own.
static void recipes_are_those_of_the_page(void **state) {
    (void)state;
    static const struct {
        DType forward, backward;
        bool tile, square, own;
        int history, promote;
        DType moment, second, gradient;
    } want[] = {{E4M3, E5M2, false, false, false, 16, 0, F64, F64, F64},
                {E4M3, E5M2, false, false, false, 0, 0, F64, F64, F64},
                {E4M3, E5M2, false, false, true, 0, 0, E4M3, F16, E4M3},
                {E4M3, E4M3, true, true, true, 0, 128, BF16, BF16, BF16},
                {E4M3, E5M2, false, false, true, 0, 0, E4M3, E5M2, E4M3},
                {E4M3, E4M3, true, false, false, 0, 0, F64, F64, F64}};
    for (int i = 0; i < fp8_recipe_count; i++) {
        const Fp8Recipe *r = &fp8_recipes[i];
        if (r->forward != want[i].forward || r->backward != want[i].backward || r->tile != want[i].tile ||
            r->square != want[i].square || r->history != want[i].history ||
            r->sum.promote != want[i].promote || r->moment != want[i].moment ||
            r->second != want[i].second || r->gradient != want[i].gradient)
            fail_msg("%s is not the recipe of the page", r->name);
    }
}

// A power of two leaves a float16 its bits. The moments of a first step are below 1, and their scale is not
// the one from before there were any.
static void float16_state_is_divided_by_a_power_of_two(void **state) {
    (void)state;
    Model *m = model_of("dtype=bf16", &fp8_recipe, 0, FP8_LM);
    Fp8State *s = fp8_state_plug(m);
    const Rounding *r = m->params.recipe.rounding;
    const Param *gate = params_find(&m->params, "model.layers.0.mlp.gate_proj.weight");
    for (int round = 0; round < 2; round++)
        for (StateKind kind = STATE_M; kind <= STATE_V; kind++) {
            Tensor stored = tensor_new(MEMORY_OPTIMIZER, kind == STATE_M ? E4M3 : F16, SHAPE(gate->count));
            Tensor wide = tensor_new(MEMORY_OPTIMIZER, F32, SHAPE(gate->count));
            float x[2000], y[2000];
            for (int64_t i = 0; i < gate->count; i++)
                x[i] =
                    (float)ldexp(1 + (i % 3) / 1024., (round ? -60 : -30) - (int)(i % 4) -
                                                          (kind == STATE_M ? (int)(i / 128 % 2 * 30) : 0));
            tensor_from_host(wide, x);
            StatePart part = {.param = gate, .kind = kind};
            r->store(r->context, stored, wide, part);
            r->load(r->context, wide, stored, part);
            tensor_to_host(y, wide);
            for (int64_t i = 0; i < gate->count; i++)
                if (kind == STATE_V ? y[i] != x[i] : !(fabs(y[i] - x[i]) <= 0.07 * x[i]))
                    fail_msg("round %d: %g is stored in %s as %g", round, x[i],
                             kind == STATE_V ? "f16" : "e4m3", y[i]);
            tensor_free(&stored), tensor_free(&wide);
        }
    fp8_state_unplug(m, s);
    model_free(m);
}

// Two groups of 128 and a part of a third, each a billion times the one before: a scale for each. In e5m2
// what is a millionth of the largest is left, in e4m3 not.
static void what_is_sent_has_a_scale_for_each_128(void **state) {
    (void)state;
    enum { COUNT = 300 };
    const Codec *const codecs[] = {&fp8_codec, &fp8_gradient_codec};
    for (int c = 0; c < 2; c++) {
        const Codec *k = codecs[c];
        assert_int_equal(k->count(k->context, 1, 128), 1);
        assert_int_equal(k->count(k->context, 1, 129), 2);
        Tensor part = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(COUNT)), coded[2];
        for (int i = 0; i < 2; i++) {
            coded[i] = tensor_new(MEMORY_ACTIVATION, k->dtype[i], SHAPE(k->count(k->context, i, COUNT)));
        }
        op_fill(coded[1], 1);
        double x[COUNT], y[COUNT];
        for (int i = 0; i < COUNT; i++) x[i] = ldexp(i % 2 ? 1 : 0x1p-20, 30 * (i / 128) - 30);
        tensor_from_doubles(part, x);
        k->encode(k->context, coded, part, (Group){.size = 1});
        k->decode(k->context, part, coded);
        tensor_to_doubles(y, part);
        for (int i = 0; i < COUNT; i++) {
            double off = fabs(y[i] / x[i] - 1);
            if (i % 2 || c ? !(off < 0.13) : y[i] != 0)
                fail_msg("%s: element %d, %g, arrives as %g", k->name, i, x[i], y[i]);
        }
        tensor_free(&part), tensor_free(&coded[0]), tensor_free(&coded[1]);
    }
}

// ---- the scale of float16's loss ----

typedef struct Other {
    bool says;
    int asked;
} Other;

static bool other_accepts(void *context, Model *m, double grad_norm) {
    (void)m, (void)grad_norm;
    Other *other = context;
    other->asked++;
    return other->says;
}

// One step each, from a scale of 8. `other` is in the socket already, and is asked in any case.
static void an_overflow_halves_the_scale_and_skips_the_step(void **state) {
    (void)state;
    enum { STATIC = 1, DYNAMIC };
    static const struct {
        int kind, interval;
        double norm;
        bool other;
        double scale;
        bool made;
        double good;  // steps so far, of a resumed run perhaps with a longer interval
    } step[] = {{DYNAMIC, 2, 1, true, 8, true, 0},        {DYNAMIC, 1, 1, true, 16, true, 0},
                {DYNAMIC, 2, 1, false, 8, false, 0},      {DYNAMIC, 2, INFINITY, true, 4, false, 0},
                {DYNAMIC, 2, NAN, true, 4, false, 0},     {STATIC, 2, 1, true, 8, true, 0},
                {STATIC, 2, INFINITY, true, 8, false, 0}, {DYNAMIC, 2, 1, true, 16, true, 5}};
    for (size_t i = 0; i < sizeof step / sizeof *step; i++) {
        Other other = {step[i].other, 0};
        Model m = {.config = config_default("dtype=f16"),
                   .sockets.step = {.context = &other, .accept = other_accepts}};
        config_set(&m.config, "loss-scale", step[i].kind);
        config_set(&m.config, "scale", 8);
        config_set(&m.config, "scale-interval", step[i].interval);
        void *context = fp16_recipe.plug(&m);
        m.params.kept[1] = step[i].good;
        bool made = m.sockets.step.accept(m.sockets.step.context, &m, step[i].norm);
        if (made != step[i].made || m.grad_scale != step[i].scale || other.asked != 1)
            fail_msg(
                "--loss-scale %s, --scale-interval %d, %g good steps, norm %g, others say %s, asked %d "
                "times: the step is %s, and the scale goes from 8 to %g",
                step[i].kind == STATIC ? "static" : "dynamic", step[i].interval, step[i].good, step[i].norm,
                step[i].other ? "yes" : "no", other.asked, made ? "made" : "skipped", m.grad_scale);
        fp16_recipe.unplug(&m, context);
    }
}

// ---- weights rounded at random ----

static void store_at_random(Tensor stored, Tensor wide, StatePart part) {
    Config c = config_default("dtype=bf16");
    config_set(&c, "master", 1);
    config_set(&c, "sum", 0);
    config_set(&c, "gradient", 0);
    config_set(&c, "rounding", 1);
    Recipe r = recipe_standard(BF16);
    bf16_recipe.recipe(&r, &c);
    r.rounding->store(r.rounding->context, stored, wide, part);
}

// Elements halfway between two numbers go up or down by the random number alone. It differs between weights,
// seeds and steps, and from the numbers with which the weight was initialized.
static void each_weight_seed_and_step_has_its_random_numbers(void **state) {
    (void)state;
    enum { COLUMNS = 48 };
    const Param weight = {.name = "weight", .full = {1, COLUMNS}, .shape = {1, COLUMNS}};
    const Param another = {.name = "another", .full = {1, COLUMNS}, .shape = {1, COLUMNS}};
    static const char *const what[] = {"of another weight", "of another seed", "of another step",
                                       "that it was drawn with"};
    const StatePart part[] = {{&weight, STATE_VALUE, 0, 7, 1},
                              {&another, STATE_VALUE, 0, 7, 1},
                              {&weight, STATE_VALUE, 0, 7, 2},
                              {&weight, STATE_VALUE, 0, 8, 1}};
    enum { PARTS = sizeof part / sizeof *part };
    Tensor wide = tensor_new(MEMORY_OPTIMIZER, F32, SHAPE(COLUMNS)),
           stored = tensor_new(MEMORY_OPTIMIZER, BF16, SHAPE(COLUMNS));
    double x[PARTS + 1][COLUMNS];
    op_fill(wide, 1 + 0x1p-8);
    for (int i = 0; i < PARTS; i++) {
        store_at_random(stored, wide, part[i]);
        tensor_to_doubles(x[i], stored);
    }
    op_round_stochastic(stored, wide, (RandomPlace){1, rng_stream("weight"), 7, 0, COLUMNS, 0, COLUMNS});
    tensor_to_doubles(x[PARTS], stored);
    for (int i = 1; i <= PARTS; i++)
        if (!memcmp(x[0], x[i], sizeof x[0]))
            fail_msg("a weight is rounded by the random numbers %s", what[i - 1]);
    tensor_free(&wide), tensor_free(&stored);
}

// Rows 2 to 4, columns 3 to 6, of a matrix (6, 8), as tensor parallelism stores them, and of these the
// elements from 1 on, as ZeRO shards them.
static void a_part_is_rounded_as_in_the_whole_weight(void **state) {
    (void)state;
    enum { ROWS = 3, COLUMNS = 4, ROW = 2, COLUMN = 3, FULL_ROWS = 6, FULL = 8, FIRST = 1, STEP = 7 };
    const Param whole = {.name = "weight", .full = {FULL_ROWS, FULL}, .shape = {FULL_ROWS, FULL}},
                part = {.name = "weight",
                        .full = {FULL_ROWS, FULL},
                        .shape = {ROWS, COLUMNS},
                        .first = {ROW, COLUMN}};
    const int64_t count = ROWS * COLUMNS - FIRST;
    Tensor wide = tensor_new(MEMORY_OPTIMIZER, F32, SHAPE(FULL_ROWS * FULL)),
           stored = tensor_new(MEMORY_OPTIMIZER, BF16, SHAPE(FULL_ROWS * FULL)),
           some = tensor_view(wide, 0, SHAPE(count)), rounded = tensor_view(stored, 0, SHAPE(count));
    double want[FULL_ROWS * FULL], got[ROWS * COLUMNS];
    op_fill(wide, 1 + 0x1p-8);
    store_at_random(stored, wide, (StatePart){&whole, STATE_VALUE, 0, STEP, 1});
    tensor_to_doubles(want, stored);
    store_at_random(rounded, some, (StatePart){&part, STATE_VALUE, FIRST, STEP, 1});
    tensor_to_doubles(got, rounded);
    for (int i = 0; i < count; i++) {
        int row = ROW + (FIRST + i) / COLUMNS, column = COLUMN + (FIRST + i) % COLUMNS;
        assert_true(got[i] == want[row * FULL + column]);
    }
    tensor_free(&wide), tensor_free(&stored);
}

// ---- what FP8's scales leave of small and of large numbers ----

// dx = dy W, where three rows of dy have one number each: `most`, 16 times that, and a ten millionth of it,
// which e5m2 can represent beside the others if the scale is that of gradients. A delayed scale knows `most`
// from the step before, and saturates what is larger; a current scale has room for the larger number. The
// other rows are zero: tensor cores take 16.
static void a_delayed_scale_saturates_and_a_current_one_does_not(void **state) {
    (void)state;
    enum { ROWS = 16, HIDDEN = 48, FFN = 96 };
    for (int delayed = 0; delayed < 2; delayed++) {
        Config c = fp8_small(NULL, delayed ? TE_DELAYED : TE_CURRENT, "steps=1 hidden=48 ffn=96");
        c.dtype = F64;
        Trainer *t = trainer_new(&c, mesh_single(), fp8_one_device);
        train_step(t, NULL);
        Model *m = t->model;
        Param *w = m->block[0].down;
        int slot = 3 * (int)(w - m->params.param) + 2;  // of x, W and dy
        double most = delayed ? m->params.kept[slot] : 1;
        double x[ROWS * HIDDEN] = {0}, made[ROWS * FFN], size[3] = {0};
        x[0] = most, x[HIDDEN] = 16 * most, x[2 * HIDDEN] = 1e-7 * most;
        Tensor dy = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(ROWS, HIDDEN)),
               dx = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(ROWS, FFN));
        void *kept = NULL;
        tensor_from_doubles(dy, x);
        m->sockets.linear.backward_input(m->sockets.linear.context, m, 1, &w, dx, &dy, &kept);
        tensor_to_doubles(made, dx);
        for (int i = 0; i < 3 * FFN; i++) size[i / FFN] += fabs(made[i]);
        double large = size[1] / size[0], small = size[2] / size[0];
        if (delayed ? !(large < 2.5) : !(large > 14))
            fail_msg(
                "16 times the largest gradient of the step before comes out as %g times: the scale is "
                "%s",
                large, delayed ? "not the delayed one" : "not of this tensor");
        if (!(small > 0.5e-7))
            fail_msg(
                "a gradient of 1e-7 of the largest comes out as %g of it: the scale is not that of "
                "gradients in e5m2",
                small);
        tensor_free(&dy), tensor_free(&dx);
        trainer_free(t);
    }
}

// ---- moments in 8 and 16 bits ----

static double largest_of(const Params *p, const Param *param, Tensor stored, StateKind kind) {
    const Tensor part = param_own_part(p, param, stored, NULL);
    const int64_t count = tensor_count(part);
    const Rounding *r = p->recipe.rounding;
    Tensor wide = tensor_new(MEMORY_OPTIMIZER, F32, SHAPE(count));
    r->load(r->context, wide, part, (StatePart){.param = param, .kind = kind});
    double *x = host_alloc((size_t)count * sizeof *x), largest = 0;
    tensor_to_doubles(x, wide);
    for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(x[i]));
    free(x);
    tensor_free(&wide);
    return largest;
}

// m and v have scales of their own. After the first step m = 0.1 g and v = 0.05 g^2, so the largest of v is 5
// times the square of that of m, but for their rounding: to 1/16 of it in e4m3, and to less in 16 bits.
static void each_moment_has_its_own_scale(void **state) {
    (void)state;
    Config c = fp8_small(NULL, NANOTRON, "layers=1 steps=1 clip=0 optimizer=adamw lr=0.001");
    Trainer *t = trainer_new(&c, mesh_single(), fp8_one_device);
    train_step(t, NULL);
    const Params *p = &t->model->params;
    for (int i = 0; i < p->count; i++) {
        const Param *param = &p->param[i];
        const UnitState *unit = &t->optimizer.unit[param->unit];
        const double m = largest_of(p, param, unit->m, STATE_M), v = largest_of(p, param, unit->v, STATE_V);
        if (!(fabs(v / (5 * m * m) - 1) < 0.15))
            fail_msg("%s: the largest v is %g, and the largest m %g", param->name, v, m);
    }
    trainer_free(t);
}

// ---- chance ----

// Runs and seeds may differ by any amount; what a run does with only one of the seeds is chance.
static void chance_is_what_rows_and_columns_leave(void **state) {
    (void)state;
    const double sums[] = {1.5, 2, 4, 0.5, 1, 3, -2.5, -2, 0};  // {1, 0, -3} + {0.5, 1, 3}
    assert_true(fp8_chance(sums, 3, 3) < 1e-12);
    double x[9];  // four of 0.2, and (3 - 1) (3 - 1) degrees of freedom
    for (int i = 0; i < 9; i++) {
        int row = i / 3, column = i % 3;
        x[i] = sums[i] + (row == 1 || column == 1 ? 0 : row == column ? 0.2 : -0.2);
    }
    assert_true(fabs(fp8_chance(x, 3, 3) - 0.2) < 1e-12);
}

// Tables of two runs of bf16 and five recipes, with two seeds each. Of recipes that are as good as bf16, few
// tables may refuse one; a recipe that is far off is to be found in most.
static void a_sound_recipe_is_rarely_refused(void **state) {
    (void)state;
    enum { TABLES = 2000, BASE = 2, ROWS = 7, SEEDS = 2 };
    static const double deviation = 0.02, far = 0.15;
    int refused = 0, found = 0;
    for (int table = 0; table < TABLES; table++) {
        double x[ROWS * SEEDS], base = 0;
        bool any = false;
        for (int i = 0; i < ROWS * SEEDS; i++) {
            x[i] = deviation * rng_normal((uint64_t)table, RNG_TEST, (uint64_t)i);
            if (i < BASE * SEEDS) base += x[i] / (BASE * SEEDS);
        }
        double error = fp8_chance(x, ROWS, SEEDS) * sqrt((1 + 1.0 / BASE) / SEEDS);
        for (int row = BASE; row < ROWS; row++) {
            double off = (x[row * SEEDS] + x[row * SEEDS + 1]) / SEEDS - base;
            any = any || fp8_is_off(off, error);
            found += row == BASE && fp8_is_off(off + far, error);
        }
        refused += any;
    }
    if (!(refused < TABLES / 20)) fail_msg("%d of %d tables refuse a sound recipe", refused, TABLES);
    if (!(found > TABLES * 19 / 20)) fail_msg("a recipe 15%% off is found in %d of %d", found, TABLES);
    assert_true(fp8_is_off(NAN, 0.1) && fp8_is_off(0.0101, 0) && !fp8_is_off(-0.0099, 0));
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(float16_gradients_add_up_in_f32),
        cmocka_unit_test(gradients_in_f32_add_up_as_they_are),
        cmocka_unit_test(no_gradient_is_rounded_to_bf16),
        cmocka_unit_test(gradients_as_codes_have_a_scale_for_each_weight),
        cmocka_unit_test(recipes_are_those_of_the_page),
        cmocka_unit_test(float16_state_is_divided_by_a_power_of_two),
        cmocka_unit_test(what_is_sent_has_a_scale_for_each_128),
        cmocka_unit_test(state_is_stored_and_stored_again_the_same),
        cmocka_unit_test(an_overflow_halves_the_scale_and_skips_the_step),
        cmocka_unit_test(each_weight_seed_and_step_has_its_random_numbers),
        cmocka_unit_test(a_part_is_rounded_as_in_the_whole_weight),
        cmocka_unit_test(a_delayed_scale_saturates_and_a_current_one_does_not),
        cmocka_unit_test(each_moment_has_its_own_scale),
        cmocka_unit_test(chance_is_what_rows_and_columns_leave),
        cmocka_unit_test(a_sound_recipe_is_rarely_refused),
    };
    return cmocka_run_group_tests_name("recipes", tests, NULL, NULL);
}
