// grad_accumulation.c: one step's batch, split into micro-batches. Playbook: "Gradient accumulation".
//
// Instead of one forward and backward over the whole batch, the same samples run in grad_acc micro-batches
// of micro_batch samples, and their gradients add up before the one optimizer step:
//
//     gbs = mbs x grad_acc          dW = sum over micro-batches of d(loss_i)/dW
//
// where loss_i is the sum of the token losses of micro-batch i, divided by the labels of the whole batch.
//
// The one trap is the mean. The loss is the mean over all labels of the global batch, so each micro-batch
// must divide by that count and not by its own: once micro-batches have unequal label counts, a mean of
// means is a different number.
//
// Memory: activations of one micro-batch instead of the whole batch; gradients live through all
// micro-batches. Time: in 16 bits each further micro-batch's gradients are added to f32 sums (2 + 4 bytes
// read for each parameter, 4 written) and zeroed (2 written). Bytes sent: none.
// Run: build/00_single_gpu/grad_accumulation      (--masked alone, --dtype f32, --micro-batch 12 …)
// Last line: PASS grad_accumulation: every split of the batch makes the same step …
#include <stdlib.h>

#include "formulas.h"
#include "report/diagnosis.h"
#include "report/timeline.h"

// ---- the technique ----

int64_t count_labels(const int32_t *targets, int64_t count) {
    int64_t labels = 0;
    for (int64_t i = 0; i < count; i++) labels += targets[i] != IGNORED_LABEL;
    return labels;
}

double mean_loss_scale(double labels) { return labels > 0 ? 1 / labels : 0; }

void micro_batches_in_turn(void *context, Model *model, const StepInput *input) {
    (void)context;
    model_begin_step(model, input->micro_batches);
    for (int64_t i = 0; i < input->micro_batches; i++) {
        MicroBatch micro = micro_batch_of(model, input, i, input->loss_scale[i]);
        clock_push("forward");
        model_forward(model, &micro);
        clock_pop();
        int64_t kept = memory_account().now[MEMORY_ACTIVATION];
        if (input->kept_bytes && kept > *input->kept_bytes) *input->kept_bytes = kept;
        op_accumulate(input->loss, micro.loss);
        clock_push("backward");
        model_backward(model, &micro);  // adds to the gradients
        model->sockets.gradients.micro_batch_ready(model->sockets.gradients.context, model,
                                                   i + 1 == input->micro_batches);
        clock_pop();
        micro_batch_free(model, &micro);
    }
}

// ---- the proof ----
#ifndef NO_MAIN

static Record run_in_parts(const Config *whole, bool masked, int64_t parts) {
    Config config = *whole;
    config.grad_acc = parts;
    config.micro_batch = whole->micro_batch / parts;
    Trainer *trainer = trainer_new(&config, mesh_single(), NULL);
    trainer->masked = masked;
    char *title = format_text("%lld x %lld sample%s%s", (long long)parts, (long long)config.micro_batch,
                              plural(config.micro_batch), masked ? " with ignored labels" : "");
    Record record = train_record(trainer, title);
    free(title);
    title = format_text("activations kept, %lld x %lld", (long long)parts, (long long)config.micro_batch);
    report_equal(title, (double)kept_activation_bytes(&config), (double)record.kept_bytes, "B");
    free(title);
    trainer_free(trainer);
    return record;
}

// How far the output layer's gradient is off with the classic mistake: each micro-batch divides by its own
// label count, and the means are averaged.
static void show_mean_of_means(const Config *whole) {
    Config config = *whole;
    config.grad_acc = whole->micro_batch;
    config.micro_batch = 1;
    Trainer *trainer = trainer_new(&config, mesh_single(), NULL);
    trainer->masked = true;
    Batch batch = batch_new(trainer, 0);
    int64_t parts = batch.samples, part = batch.count / parts, count = trainer->model->head->count;
    const Model *model = trainer->model;
    double *scale = host_alloc(parts * sizeof *scale), *grad[2];
    for (int wrong = 0; wrong < 2; wrong++) {
        for (int64_t i = 0; i < parts; i++)
            scale[i] = wrong ? mean_loss_scale((double)count_labels(batch.targets + i * part, part)) /
                                   (double)parts
                             : mean_loss_scale((double)count_labels(batch.targets, batch.count));
        StepInput input = {parts, 1, batch.tokens, batch.targets, scale, loss_new(), NULL};
        params_zero_grads(&trainer->model->params);
        micro_batches_in_turn(NULL, trainer->model, &input);
        tensor_free(&input.loss);
        grad[wrong] = host_alloc(count * sizeof(double));
        tensor_to_doubles(grad[wrong], param_total_grad(&model->params, model->head));
    }
    Difference off = difference(model->head->name, grad[1], grad[0], count);
    say("  If each micro-batch divided by its own labels: %s is off by %.1f%% (scale %.3f)", off.what,
        100 * off.relative, off.scale);
    report_number("mean of means", "relative error of the gradient", off.relative, "");
    report_that(
        off.relative > 1e-3,
        "the mean of means is off by %g, expected more than 0.001: loss_scale counts for nothing, or the "
        "case proves nothing",
        off.relative);
    free(grad[0]);
    free(grad[1]);
    free(scale);
    batch_free(&batch);
    trainer_free(trainer);
}

// The error of the gradient that is furthest off, relative to its norm.
static double worst_gradient(const Record *run, const Record *baseline) {
    double worst = 0;
    for (int i = 0; i < run->tensors; i++) {
        double off = difference(run->name[i], run->grad[i], baseline->grad[i], run->count[i]).relative;
        if (!(off <= worst)) worst = off;
    }
    return worst;
}

static void print_row(const Config *whole, int64_t parts, const Record *record, const Record *baseline) {
    say("  %2ld x %2ld sample%-1s %25s %24.1e", parts, whole->micro_batch / parts,
        plural(whole->micro_batch / parts), bytes_text((double)record->kept_bytes),
        worst_gradient(record, baseline));
}

static void compare_parts(const Config *config, bool masked) {
    say("\n%s\n", masked ? "With ignored labels (a part of each sample, as a prompt, is not trained on):"
                         : "Every token is a label:");
    say("  %-16s %25s %24s", "micro-batches", "activations kept", "gradients off by");
    Record baseline = run_in_parts(config, masked, 1);
    print_row(config, 1, &baseline, &baseline);
    for (int64_t parts = 2; parts <= config->micro_batch; parts++) {
        if (config->micro_batch % parts) continue;
        diagnosis_forget();
        diagnosis_micro_batches(parts);  // a wrong factor may be this one
        Record record = run_in_parts(config, masked, parts);
        print_row(config, parts, &record, &baseline);
        Config whole = *config;
        whole.follows = &record;
        if (!config->no_check)
            report_compare(&record, &baseline, train_proof(config), train_bound(&whole, masked, &baseline));
        record_free(&record);
    }
    record_free(&baseline);
    if (masked) show_mean_of_means(config);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    bool masked_only = false;
    Option own[] = {
        {"masked", OPTION_FLAG, &masked_only, NULL, 0, 0, "", "only the case with ignored labels", false}};
    Config config =
        config_parse(argc, argv,
                     "One batch of --micro-batch samples, split into 1, 2, 4, … micro-batches, makes "
                     "the same step.",
                     CONFIG_MODEL | CONFIG_BATCH | CONFIG_OPTIMIZER | CONFIG_RECOMPUTE | CONFIG_REPORT |
                         CONFIG_TRACE | CONFIG_CHECK,
                     "layers=2 hidden=48 heads=6 kv-heads=2 ffn=88 seq=31 micro-batch=8 steps=3 "
                     "dtype=f64 optimizer=sgd lr=0.1",
                     own, 1);
    CHECK(config.grad_acc == 1,
          "--grad-acc: this program chooses the splits itself; give --micro-batch samples");
    CHECK(config.seq >= 8, "--seq %lld leaves too few labels to ignore some of them: give 8 or more",
          (long long)config.seq);
    CHECK(config.micro_batch >= 2, "--micro-batch %lld cannot be split: give 2 or more",
          (long long)config.micro_batch);
    report_json(config.json);
    report_quiet(!config.verbose);
    timeline_start(&config, comm_world());
    config_print(&config);
    if (!masked_only) compare_parts(&config, false);
    compare_parts(&config, true);
    timeline_finish(&config, comm_world());
    return report_verdict(config.no_check ? "every split keeps the activations of one micro-batch"
                                          : "every split of the batch makes the same step");
}
#endif
