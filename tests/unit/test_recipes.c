// test_recipes.c: what recipes store in fewer bits: sums of float16 gradients, gradients as 8-bit codes,
// and moments, which a checkpoint takes out and puts back to the bit; what of their losses is chance. TAP.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
// cmocka wants the headers above first.
#include <cmocka.h>

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

// 40000 + 40000 is beyond 65504. Without accumulators what backward adds up stays where it is.
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

// Gradients of each weight are of another magnitude: e4m3 alone reaches over 2^18, and here they lie 2^40
// apart. Of two parts that a micro-batch adds, the second finds the first.
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

// Numbers of many magnitudes, a run of zeros longer than what shares a scale, and some that round up to a
// power of two.
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

static void state_stored_again_is_the_same(void **state) {
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
            r->store(r->context, stored, once, part);
            r->load(r->context, once, stored, part);
            op_copy(twice, once);
            r->store(r->context, stored, twice, part);
            r->load(r->context, twice, stored, part);
            float a[2000], b[2000];
            assert_true(gate->count <= 2000);
            tensor_to_host(a, once);
            tensor_to_host(b, twice);
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

// Runs and seeds may differ as they like; what a run does with one seed and not with another is chance.
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

int main(int argc, char **argv) {
    base_start(argc, argv);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(float16_gradients_add_up_in_f32),
        cmocka_unit_test(gradients_as_codes_have_a_scale_for_each_weight),
        cmocka_unit_test(state_stored_again_is_the_same),
        cmocka_unit_test(chance_is_what_rows_and_columns_leave),
    };
    return cmocka_run_group_tests_name("recipes", tests, NULL, NULL);
}
