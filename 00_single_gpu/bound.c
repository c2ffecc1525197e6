// bound.c: how closely a run whose sums are in another order must match the run on one device.
//
// In f64 within 1e-10. In a narrower dtype within k = 4 times the error of the run on one device against f64
// (report_bound): all of step 1 within k times the error of the worst gradient, and what follows within k
// times the largest error of any quantity.
//
// At a large learning rate rounding errors grow from step to step, also in f64. Where a run in f64 is off by
// almost 1e-10, the run on one device is repeated with noise in the weights, far above rounding, and what
// follows step 1 need only come within k times what became of the noise.
//
// AdamW needs more than that measure. SGD's steps are in proportion to gradients, and their errors average
// out over the elements of a weight. AdamW divides by the gradient's own size, m / (sqrt v + eps): where
// rounding has left nothing of a gradient but a sign, that decides a step of full size. In f32 this is one
// element in 1e5 or fewer, in f16 one in 1e3. Whether a run has one follows from its gradients; which way it
// steps there is luck, and the run on one device may come out a hundred times closer to f64 than the next
// one. So AdamW's error is derived, too, from the run in f64:
//
//     e        relative error of a weight's gradient in step 1, measured; at least that of the worst weight
//              whose gradient is more than noise
//     d_i      e times the root mean square of sqrt v over an element's row: the usual error of its gradient
//     error_i  sum over steps of lr min(2, d_i / (sqrt v_i + eps))
//
// and the bound of losses, norms and parameters is at least k ||error|| / ||w|| for every weight. In bf16
// each weight has many such elements: what is measured then is their mean, and no luck.
//
// Bytes sent: none. This file has no main: proof.c calls it.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/rng.h"
#include "training.h"

// e (tensors) of the gradients of step 1.
static void gradient_errors(double *e, const Record *baseline, const Record *reference) {
    double largest = 0, worst = 0;
    for (int i = 0; i < reference->tensors; i++)
        largest = fmax(largest, difference_norm(reference->grad[i], reference->count[i]));
    for (int i = 0; i < reference->tensors; i++) {
        const double *x = baseline->grad[i], *y = reference->grad[i];
        int64_t count = reference->count[i];
        worst = fmax(worst, difference_above("", x, y, count, REPORT_NOISE * largest).relative);
        e[i] = fmin(difference("", x, y, count).relative, 1);
    }
    for (int i = 0; i < reference->tensors; i++) e[i] = fmax(e[i], worst);
}

// error (count) += what AdamW's last step of this weight makes of gradients that are off by e.
static void add_step(double *error, const Trainer *t, const Param *param, double e) {
    const Optimizer *o = &t->optimizer;
    if (o->step == 0) return;  // no step of AdamW's: a plug of the step socket makes its own
    Tensor second = param_own_part(&t->model->params, param, o->unit[param->unit].v, NULL);
    int64_t columns = param->dims == 2 ? param->full[1] : param->full[0];
    double *v = host_alloc((size_t)param->count * sizeof *v), unbiased = 1 - pow(o->beta2, (double)o->step);
    tensor_to_doubles(v, second);
    for (int64_t row = 0; row < param->count; row += columns) {
        double sum = 0;
        for (int64_t i = row; i < row + columns; i++) sum += v[i] / unbiased;
        double usual = e * sqrt(sum / (double)columns);  // d_i
        for (int64_t i = row; i < row + columns; i++)
            error[i] += t->lr * fmin(2, usual / (sqrt(v[i] / unbiased) + o->eps));
    }
    free(v);
}

// The run in f64, and the relative error of weights that AdamW usually makes in the run's own dtype.
static Record adamw_reference(Trainer *t, const Record *baseline, double *usual) {
    const Params *params = &t->model->params;
    Record reference = record_new("f64 reference", baseline->steps, params);
    double **error = host_alloc((size_t)params->count * sizeof *error);
    double *e = host_alloc((size_t)params->count * sizeof *e);
    for (int i = 0; i < params->count; i++) {
        error[i] = host_alloc((size_t)params->param[i].count * sizeof **error);
        memset(error[i], 0, (size_t)params->param[i].count * sizeof **error);
    }
    for (int64_t step = 0; step < reference.steps; step++) {
        train_step(t, &reference);
        reference.loss[step] = t->loss;
        reference.grad_norm[step] = t->grad_norm;
        if (step == 0) gradient_errors(e, baseline, &reference);
        for (int i = 0; i < params->count; i++) add_step(error[i], t, &params->param[i], e[i]);
    }
    record_params(&reference, params);
    *usual = 0;
    for (int i = 0; i < params->count; i++) {
        double weight = difference_norm(reference.param[i], reference.count[i]);
        if (weight > 0) *usual = fmax(*usual, difference_norm(error[i], reference.count[i]) / weight);
        free(error[i]);
    }
    free(error);
    free(e);
    return reference;
}

// Far more than what another order of sums makes of one step, 2^-53 times a few: which way noise goes is
// luck, and of two equal errors one may grow to a thousand times the other.
static const double NOISE = 0x1p-38;

// The step socket of a run with noise; what its record has of step 1 is before any.
typedef struct Noisy {
    Sockets before;
    uint64_t drawn;
} Noisy;

static bool add_noise(void *context, Model *m, double grad_norm) {
    Noisy *noisy = context;
    for (int unit = 0; unit < m->params.units; unit++) {
        Tensor weights = m->params.unit[unit].own_values;
        const int64_t count = tensor_count(weights);
        double *w = host_alloc((size_t)count * sizeof *w);
        tensor_to_doubles(w, weights);
        for (int64_t i = 0; i < count; i++) w[i] *= 1 + NOISE * rng_normal(1, RNG_TEST, noisy->drawn++);
        tensor_from_doubles(weights, w);
        free(w);
    }
    return noisy->before.step.accept(noisy->before.step.context, m, grad_norm);
}

Bound train_bound_with(const Config *config, Techniques techniques, bool masked, const Record *baseline) {
    const bool noise = config->dtype == F64;
    const Bound f64_bound = report_bound(baseline, NULL, 0);
    // k times the error of the run to be judged.
    if (noise && !(config->follows && report_bound(config->follows, baseline, 0).others > f64_bound.others))
        return f64_bound;
    Config f64 = *config;
    f64.dtype = F64;
    f64.save = NULL;
    if (!f64.follows) f64.follows = baseline;
    f64.beside = baseline;
    Trainer *t = trainer_new(&f64, mesh_single(), techniques);
    t->masked = masked;
    trainer_load(t);
    Noisy noisy = {.before = t->model->sockets};
    if (noise) t->model->sockets.step.accept = add_noise, t->model->sockets.step.context = &noisy;
    double usual = 0;
    bool derived = !noise && config->dtype != BF16 && config->optimizer == OPTIMIZER_ADAMW;
    Record reference = derived ? adamw_reference(t, baseline, &usual)
                               : train_record(t, noise ? "with noise" : "f64 reference");
    Bound bound = report_bound(baseline, &reference, usual);
    record_free(&reference);
    trainer_free(t);
    return bound;
}

ProofClass train_proof(const Config *config) {
    return dtype_size(config->dtype) < dtype_size(F32) ? PROOF_ROUNDED : PROOF_REASSOCIATED;
}

Bound train_bound(const Config *config, bool masked, const Record *baseline) {
    return train_bound_with(config, NULL, masked, baseline);
}
