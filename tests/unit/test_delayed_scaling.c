// test_delayed_scaling.c: the history of FP8's delayed scaling, and the scales that follow from it, on
// ranks that have copies of weights (dp) or parts of them (tp). The text is one letter repeated and the
// learning rate is tiny, so that steps differ only by their scales.
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "03_tensor_parallel/tensor_parallel.h"
#include "06_expert_parallel/expert_parallel.h"
#include "08_mixed_precision/mixed_precision.h"
#include "ranks.h"

enum { LETTERS = 20000 };
static char text[] = "/tmp/test_delayed_scaling.XXXXXX";
static int slots, history;

static void write_text(void) {
    FILE *file = fdopen(mkstemp(text), "w");
    for (int i = 0; i < LETTERS; i++) fputc('a', file);
    fclose(file);
}

static void scale_weights(const Trainer *t, double factor) {
    const Params *p = &t->model->params;
    for (int i = 0; i < p->count; i++)
        if (fp8_is_cast(&p->param[i])) op_scale(param_value(p, &p->param[i]), factor);
}

// Weights of rank 1 are twice as large as they should be, so that ranks do not agree by chance.
static Trainer *trainer(bool tp) {
    static const Technique *const techniques[] = {&fp8_recipe, &ddp_no_sync, &tensor_parallel, NULL};
    static Config c;
    c = fp8_small(NULL, TE_DELAYED, "steps=4 micro-batch=2");
    c.dtype = F64;
    c.optimizer = OPTIMIZER_SGD;
    c.lr = 1e-30;
    c.data = text;
    *(tp ? &c.tp : &c.dp) = n;
    Trainer *t = trainer_new(&c, mesh_new(tp ? (MeshShape){.tp = n} : (MeshShape){.dp = n}), techniques);
    scale_weights(t, 1 + me);
    slots = 3 * t->model->params.count;
    history = fp8_recipes[TE_DELAYED - 1].history;
    SAME(t->model->params.kept_count, history * slots);
    return t;
}

// Over all ranks, as f32.
static double largest_of(const Params *p, const Param *param) {
    double *x = host_alloc((size_t)param->count * sizeof *x), most = 0;
    tensor_to_doubles(x, param_value(p, param));
    for (int64_t i = 0; i < param->count; i++) most = fmax(most, fabs(x[i]));
    free(x);
    return (float)comm_max(most, world);
}

// Params.kept is (history, slots), newest first, with slots for x, W and dy of each weight.
static void check_row(const Trainer *t, int row, double factor) {
    const Params *p = &t->model->params;
    for (int i = 0; i < p->count; i++) {
        double right = fp8_is_cast(&p->param[i]) ? factor * largest_of(p, &p->param[i]) : 0;
        double noted = p->kept[row * slots + 3 * i + 1];
        if (noted != right)
            note("%s: its largest element of all ranks %d steps ago was %g, and noted is %g",
                 p->param[i].name, row, right, noted);
    }
}

static void the_history_has_the_largest_of_each_step(void) {
    for (int tp = 0; tp < 2; tp++) {
        Trainer *t = trainer(tp);
        train_step(t, NULL);
        check_row(t, 0, 1);
        check_row(t, 1, 0);
        const Params *p = &t->model->params;
        for (int i = 0; i < p->count; i++)
            if (fp8_is_cast(&p->param[i]) && !(p->kept[3 * i + 2] > 0))
                note("%s: the largest element of its output's gradient is noted as %g", p->param[i].name,
                     p->kept[3 * i + 2]);
        scale_weights(t, 0.5);
        train_step(t, NULL);
        check_row(t, 0, 1);
        check_row(t, 1, 2);
        check_row(t, 2, 0);
        trainer_free(t);
    }
}

static void the_oldest_step_falls_out(void) {
    Trainer *t = trainer(false);
    double *kept = t->model->params.kept;
    const Param *param = t->model->params.param;
    for (int i = 0; i < history * slots; i++)
        kept[i] = fp8_is_cast(&param[i % slots / 3]) ? 100 + i / slots : 0;
    train_step(t, NULL);
    check_row(t, 0, 1);
    for (int i = slots; i < history * slots; i++)
        if (fp8_is_cast(&param[i % slots / 3]) && kept[i] != 99 + i / slots) {
            note("%d steps ago the largest was %d, and noted is %g", i / slots, 99 + i / slots, kept[i]);
            break;
        }
    trainer_free(t);
}

// Gradients beyond the range of f32, the dtype of an amax. Only those that no codes have saturated yet.
static void what_is_not_finite_repeats_the_last(void) {
    Trainer *t = trainer(false);
    train_step(t, NULL);
    t->model->grad_scale = 1e60;
    train_step(t, NULL);
    const Model *m = t->model;
    const Param *first[] = {m->block[0].down, m->block[0].o};
    for (int i = 0; i < 2; i++) {
        const double *noted = m->params.kept + 3 * (first[i] - m->params.param) + 2;
        if (!(noted[0] == noted[slots] && noted[0] > 0))
            note("%s: the amax of dy was %g, and %g is noted of one that is not finite", first[i]->name,
                 noted[slots], noted[0]);
    }
    trainer_free(t);
}

// All tokens are the same letter and go to few experts. With a scale of 1 the first gradients of the others
// would become 0, however many steps without a token there were before.
static void an_expert_without_tokens_repeats_its_last(void) {
    enum { LAST = 7 };
    static const Technique *const techniques[] = {&moe, &fp8_recipe, &ddp_no_sync, NULL};
    Config c = fp8_small(NULL, TE_DELAYED, "steps=1 micro-batch=2 experts=8 top-k=1");
    c.data = text;
    c.dp = n;
    Trainer *t = trainer_new(&c, mesh_new((MeshShape){.dp = n}), techniques);
    const Params *p = &t->model->params;
    int idle = 0;
    for (int i = 0; i < 3 * p->count; i++) p->kept[i] = LAST;
    train_step(t, NULL);
    for (int i = 0; i < 3 * p->count; i++) {
        const Param *param = &p->param[i / 3];
        if (param->role != ROLE_EXPERT_UP) continue;
        if (p->kept[i] == 0) note("the amax %d of %s is 0: its next scale may be 1", i % 3, param->name);
        idle += i % 3 == 2 && p->kept[i] == LAST;
    }
    if (idle == 0) note("each expert has a token: nothing is shown");
    trainer_free(t);
}

static void scales_follow_the_history(void) {
    Trainer *t = trainer(false);
    train_step(t, NULL);
    double first = t->loss;
    train_step(t, NULL);
    if (first == t->loss) note("the second step has the loss of the first, whose scales are 1");
    trainer_free(t);
}

// load_balance.c uses the same socket. If it left out the previous user, ranks and one device would do so
// alike.
static void experts_that_are_balanced_have_a_history(void) {
    static const Technique *const techniques[] = {&moe, &fp8_recipe, &load_balance, &ddp_no_sync, NULL};
    Config c = fp8_small(NULL, TE_DELAYED, "steps=4 micro-batch=2 experts=4 top-k=2");
    config_set(&c, "aux-loss", 0.1);
    c.dp = n;
    Trainer *t = trainer_new(&c, mesh_new((MeshShape){.dp = n}), techniques);
    train_step(t, NULL);
    const Model *m = t->model;
    SAME(m->params.kept[3 * (m->block[0].expert_up - m->params.param) + 1] > 0, true);
    trainer_free(t);
}

static const RankTest tests[] = {
    TEST(the_history_has_the_largest_of_each_step),
    TEST(the_oldest_step_falls_out),
    TEST(what_is_not_finite_repeats_the_last),
    TEST(an_expert_without_tokens_repeats_its_last),
    TEST(scales_follow_the_history),
    TEST(experts_that_are_balanced_have_a_history),
};

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *pattern = ranks_start(argc, argv, 2);
    write_text();
    int status = ranks_run(tests, sizeof tests / sizeof *tests, pattern);
    unlink(text);
    return status;
}
