// underflow.c: gradients that float16 rounds to zero. Playbook: "Mixed precision training", loss scaling.
//
// The smallest positive f16 is 2^-24 = 6.0e-8, and values up to half of it round to zero. The loss is a
// mean over all labels, so the gradient at a logit is a probability divided by their number: 1/8192 over
// 4,096 labels is already 2^-25. Training goes on with a norm that looks sound, but rare tokens learn
// nothing. Scaling the loss is the cure (Micikevicius et al. 2018); without it, this file counts and
// reports what is lost at the logits, where backward begins and gradients are smallest.
//
// Bytes sent: two numbers at the end of a run. This file has no main: train.c calls it.
#include "tensor/device.h"
#include "training.h"

static bool counts(const Config *config) {
    bool scaled = config_has(config, "loss-scale") && config_number(config, "loss-scale") != 0;
    return config->dtype == F16 && !scaled && !device_is_dry_run();
}

void underflow_begin(Trainer *t) {
    if (!counts(&t->config)) return;
    t->underflows = op_underflows(&t->rounded);
}

void underflow_warn(const Config *config) {
    if (counts(config))
        say("float16 without loss scaling: gradients up to 3.0e-8 become zero, and the verdict says how "
            "many; --dtype bf16 keeps them");
}

void underflow_tell(const Trainer *t) {
    Group world = t->model->mesh.world;
    if (!counts(&t->config)) return;
    double all, lost = op_underflows(&all);
    lost = comm_sum(lost - t->underflows, world);
    all = comm_sum(all - t->rounded, world);
    double share = all > 0 ? lost / all : 0;
    report_number("float16", "share of the logits' gradients that became zero", share, "");
    report_note("without loss scaling %.3g%% of the logits' gradients became zero", 100 * share);
}
