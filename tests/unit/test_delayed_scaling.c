// test_delayed_scaling.c: what FP8's delayed scaling remembers, and what scales follow from it. The text is
// one letter over and over and the learning rate next to nothing, so that steps differ by their scales
// alone.
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "08_mixed_precision/mixed_precision.h"

// cmocka.h needs these before it
// clang-format off
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
// clang-format on

enum { LETTERS = 20000 };
static char text[] = "/tmp/test_delayed_scaling.XXXXXX";

static int write_text(void **state) {
    (void)state;
    FILE *file = fdopen(mkstemp(text), "w");
    for (int i = 0; i < LETTERS; i++) fputc('a', file);
    return fclose(file);
}

static int remove_text(void **state) {
    (void)state;
    return unlink(text);
}

static Trainer *trainer(void) {
    static Config c;
    c = fp8_small(TE_DELAYED, "steps=3 micro-batch=2");
    c.dtype = F64;
    c.optimizer = OPTIMIZER_SGD;
    c.lr = 1e-30;
    c.data = text;
    return trainer_new(&c, mesh_single(), fp8_one_device);
}

static double largest_of(const Params *p, const Param *param) {
    double *x = host_alloc((size_t)param->count * sizeof *x), most = 0;
    tensor_to_doubles(x, param_own_value(p, param, NULL));
    for (int64_t i = 0; i < param->count; i++) most = fmax(most, fabs(x[i]));
    free(x);
    return most;
}

// Params.kept is (history, slots), newest first, with slots for x, W and dy of each weight.
static void the_history_has_the_largest_of_each_step(void **state) {
    (void)state;
    Trainer *t = trainer();
    const Params *p = &t->model->params;
    int slots = 3 * p->count, history = fp8_recipes[TE_DELAYED - 1].history;
    assert_int_equal(p->kept_count, history * slots);
    for (int step = 0; step < 2; step++) train_step(t, NULL);
    for (int i = 0; i < p->count; i++) {
        double most = fp8_is_cast(&p->param[i]) ? largest_of(p, &p->param[i]) : 0;
        for (int step = 0; step < history; step++) {
            double noted = p->kept[step * slots + 3 * i + 1], right = step < 2 ? (float)most : 0;
            if (noted != right)
                fail_msg("%s: its largest element %d steps ago was %g, and noted is %g", p->param[i].name,
                         step, right, noted);
        }
    }
    trainer_free(t);
}

static void scales_follow_the_history(void **state) {
    (void)state;
    Trainer *t = trainer();
    train_step(t, NULL);
    double first = t->loss;
    train_step(t, NULL);
    if (first == t->loss) fail_msg("the second step has the loss of the first, whose scales are 1");
    trainer_free(t);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_history_has_the_largest_of_each_step),
        cmocka_unit_test(scales_follow_the_history),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, write_text, remove_text);
}
