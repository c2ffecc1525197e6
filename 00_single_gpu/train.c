// train.c: trains the model on one device, and is the baseline of every other chapter.
// Playbook: "First Steps: Training on one GPU".
//
//     step:  zero gradients;  grad_acc x (forward, backward);  clip by the global norm;  AdamW
//
// What a later chapter changes, it changes in a socket (transformer.c) or around these few lines. Batches
// are a function of the sample's global index, weights of their global element index, so that any layout of
// ranks can repeat this run.
//
// FLOPs: 6 per weight of a matrix multiply and token (2 forward, 4 backward), plus causal attention.
// Memory per parameter: f32 4 + 4 + 8 bytes; bf16 2 + 2 + 4 (f32 accumulators) + 12 (master weights, moments).
// Bytes sent: none.
// Run: build/00_single_gpu/train            (--data FILE, --init DIR, --save DIR, --resume DIR, --dry-run …)
// Last line: PASS train: held-out loss 5.571 -> 1.990 nats in 300 steps …
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "playbook.h"

// ---- one step ----

Trainer *trainer_new(const Config *config, Mesh mesh) {
    Trainer *t = host_alloc(sizeof *t);
    *t = (Trainer){.config = *config};
    if (!device_is_dry_run()) t->data = data_open(config->data, config->vocab, config->seq);
    t->progress.batch = config->micro_batch * config->grad_acc * mesh.dp.size;
    if (config->save) t->progress.data = data_print(&t->data);
    if (config->save && !config->resume) checkpoint_check_place_is_ours(config->save, config, t->progress);
    t->model = model_new(config, mesh);
    t->optimizer = optimizer_new(config, &t->model->params);
    recompute_plug(t->model, config->recompute);
    return t;
}

void trainer_free(Trainer *t) {
    batch_free(&t->ahead);
    optimizer_free(&t->optimizer);
    model_free(t->model);
    data_close(&t->data);
    free(t);
}

void resume_check(const Config *config, int dp) {
    if (base_rank() > 0) return;  // one looks for all
    char *from = checkpoint_newest(config->resume);
    Data data = data_open(config->data, config->vocab, config->seq);
    Progress ours = {.batch = config->micro_batch * config->grad_acc * dp, .data = data_print(&data)};
    checkpoint_check_run(from, config, ours);
    data_close(&data);
    free(from);
}

void trainer_resume(Trainer *t) {
    char *from = checkpoint_newest(t->config.resume);
    checkpoint_load_weights(from, &t->model->params);
    Progress saved = checkpoint_load_optimizer(from, &t->model->params, &t->optimizer);
    t->progress.step = saved.step;
    t->progress.sample = saved.sample;
    t->progress.run = saved.run;
    if (t->config.save) checkpoint_check_place_is_ours(t->config.save, &t->config, t->progress);
    free(from);
}

void trainer_save(Trainer *t) {
    const Config *c = &t->config;
    int64_t step = t->progress.step;
    if (!c->save || !(step == c->steps || (c->save_every && step % c->save_every == 0))) return;
    t->model->sockets.parameters.settle(t->model->sockets.parameters.context, t->model);
    checkpoint_save(c->save, c, &t->model->params, &t->optimizer, t->progress);
}

Batch batch_new(const Trainer *t, int64_t first_sample) {
    const Config *c = &t->config;
    Batch batch = {.first = first_sample, .samples = c->micro_batch * c->grad_acc};
    batch.count = batch.samples * c->seq;
    batch.tokens = host_alloc(batch.count * sizeof *batch.tokens);
    batch.targets = host_alloc(batch.count * sizeof *batch.targets);
    memset(batch.tokens, 0, batch.count * sizeof *batch.tokens);  // a dry run has no text
    memset(batch.targets, 0, batch.count * sizeof *batch.targets);
    for (int64_t i = 0; i < batch.samples && t->data.file; i++) {
        int32_t *targets = batch.targets + i * c->seq;
        data_sample(&t->data, c->seed, first_sample + i, false, c->seq, batch.tokens + i * c->seq, targets);
        if (t->masked) data_mask_prompt(c->seed, first_sample + i, c->seq, targets);
    }
    return batch;
}

void batch_free(Batch *batch) {
    free(batch->tokens);
    free(batch->targets);
    *batch = (Batch){0};
}

// Reads what the step to come will train on, which the step before does for it, ahead of the optimizer: what
// then begins to travel (weights, with ZeRO) is not in the way of the one number that a step begins with.
static void read_ahead(Trainer *t) {
    Group dp = t->model->mesh.dp;
    int64_t own_samples = t->config.micro_batch * t->config.grad_acc;
    int64_t first = t->progress.sample + dp.rank * own_samples;
    if (t->ahead.tokens && t->ahead.first == first) return;
    batch_free(&t->ahead);
    t->ahead = batch_new(t, first);
    // The loss is the mean over the labels of all ranks, so their number comes first; gradients then simply add up.
    t->labels_ahead = comm_sum((double)count_labels(t->ahead.targets, t->ahead.count), dp);
}

void train_step(Trainer *t, Record *record) {
    const Config *c = &t->config;
    Params *params = &t->model->params;
    fatal_context("step %lld", (long long)t->progress.step + 1);
    char *mark = format_text("step %lld", (long long)t->progress.step + 1);
    clock_push(mark);
    free(mark);

    Group dp = t->model->mesh.dp;
    read_ahead(t);  // the first step does it for itself
    Batch batch = t->ahead;
    t->ahead = (Batch){0};
    double *loss_scale = host_alloc(c->grad_acc * sizeof *loss_scale);
    for (int64_t i = 0; i < c->grad_acc; i++) loss_scale[i] = mean_loss_scale(t->labels_ahead);
    t->loss = comm_sum(accumulate_gradients(t->model, &batch, c->grad_acc, loss_scale, &t->kept_bytes), dp);
    free(loss_scale);
    t->progress.sample += batch.samples * dp.size;
    batch_free(&batch);
    if (t->progress.step + 1 < c->steps) read_ahead(t);

    clock_push("optimizer");
    bool recorded = record && !record->grad[0] && !device_is_dry_run();
    if (recorded) record_grads(record, params);
    t->grad_norm = params_grad_norm(params);
    const Param *bad = isfinite(t->grad_norm) ? NULL : params_first_bad_grad(params);
    CHECK(isfinite(t->grad_norm), "the gradient norm is %g; the first bad tensor is the gradient of %s",
          t->grad_norm, bad ? bad->name : "no single weight: the sum over all overflows");
    t->lr = learning_rate(c, t->progress.step);
    optimizer_begin(&t->optimizer, params);
    for (int unit = 0; unit < params->units; unit++) {
        optimizer_step_unit(&t->optimizer, params, unit, t->lr, clip_scale(t->grad_norm, c->clip));
        t->model->sockets.parameters.stepped(t->model->sockets.parameters.context, t->model, unit);
    }
    clock_pop();
    clock_pop();
    t->progress.step++;
    fatal_context(NULL);
}

double held_out_loss(Trainer *t, int64_t samples) {
    const Config *c = &t->config;
    double sum = 0, labels = 0;
    int32_t *tokens = host_alloc(c->seq * sizeof *tokens), *targets = host_alloc(c->seq * sizeof *targets);
    for (int64_t i = 0; i < samples; i++) {
        data_sample(&t->data, c->seed, i, true, c->seq, tokens, targets);
        if (t->masked) data_mask_prompt(c->seed, i, c->seq, targets);
        MicroBatch micro = micro_batch_new(t->model, i, 1, tokens, targets, 1);
        model_forward(t->model, &micro);
        // Sums, not means: samples differ in their number of labels.
        sum += micro.loss;
        for (int64_t j = 0; j < c->seq; j++) labels += targets[j] != IGNORED_LABEL;
        micro_batch_free(t->model, &micro);
    }
    free(tokens);
    free(targets);
    return sum / labels;
}

// ---- whole runs: what other chapters compare with ----

Record train_record(Trainer *t, const char *title) {
    int64_t steps = t->config.steps - t->progress.step;  // fewer than all after a resume
    Record record = record_new(title, steps, &t->model->params);
    memory_reset_peak();
    clock_reset();
    double start = wall_seconds();
    for (int64_t step = 0; step < steps; step++) {
        train_step(t, &record);
        record.loss[step] = t->loss;
        record.grad_norm[step] = t->grad_norm;
        trainer_save(t);
    }
    t->model->sockets.parameters.settle(t->model->sockets.parameters.context, t->model);
    record.kept_bytes = t->kept_bytes;
    record.memory = memory_account();
    record.flops = clock_total().flops;
    record.model_seconds = clock_total().model_seconds;
    record.wall_seconds = wall_seconds() - start;
    if (!device_is_dry_run()) record_params(&record, &t->model->params);
    return record;
}

double train_bound(const Config *config, bool masked, const Record *baseline) {
    if (config->dtype == F64) return 1e-10;
    Config f64 = *config;
    f64.dtype = F64;
    f64.save = NULL;
    Trainer *t = trainer_new(&f64, mesh_single());
    t->masked = masked;
    if (config->resume) trainer_resume(t);
    Record reference = train_record(t, "f64 reference");
    double bound = report_bound(baseline, &reference);
    record_free(&reference);
    trainer_free(t);
    return bound;
}

double matmul_rate(DType dtype, int64_t size) {
    Tensor a = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(size, size)),
           b = tensor_like(MEMORY_ACTIVATION, a);
    Tensor c = tensor_like(MEMORY_ACTIVATION, a);
    op_fill(a, 0.5);
    op_fill(b, 0.25);
    Tensor row = tensor_rows_of(c, 0, 1);
    double best = INFINITY;
    for (int i = 0; i < 6; i++) {
        double start = wall_seconds();
        op_matmul(c, a, b, false, false, 0);
        op_sum(row);  // waits for the device
        if (i > 0) best = fmin(best, wall_seconds() - start);  // the first call warms up
    }
    tensor_free(&a);
    tensor_free(&b);
    tensor_free(&c);
    return 2.0 * (double)size * (double)size * (double)size / best;
}

#ifndef NO_MAIN

// ---- the program ----

enum { EVAL_SAMPLES = 32 };  // held-out sequences of an evaluation

typedef struct Options {
    int64_t eval_every, sample;
    double temperature;
    bool dry_run;
} Options;

// Draws the next token from softmax(logits / temperature); 0 takes the largest.
static int32_t draw_token(const double *logits, int64_t vocab, double temperature, double uniform) {
    int64_t best = 0;
    for (int64_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    if (temperature <= 0) return (int32_t)best;
    double sum = 0, passed = 0;
    for (int64_t i = 0; i < vocab; i++) sum += exp((logits[i] - logits[best]) / temperature);
    for (int64_t i = 0; i < vocab; i++) {
        passed += exp((logits[i] - logits[best]) / temperature);
        if (passed > uniform * sum) return (int32_t)i;
    }
    return (int32_t)best;
}

// Continues the first held-out tokens. The window slides; each token costs one forward of seq positions.
static void generate(Trainer *t, const Options *options) {
    const Config *c = &t->config;
    int64_t s = c->seq, v = c->vocab, prompt = s / 4 > 0 ? s / 4 : 1;
    int64_t total = prompt + options->sample;
    int32_t *text = host_alloc((total + s) * sizeof *text), *none = host_alloc(s * sizeof *none);
    double *logits = host_alloc(v * sizeof *logits);
    memset(text, 0, (total + s) * sizeof *text);
    for (int64_t i = 0; i < s; i++) none[i] = IGNORED_LABEL;
    data_copy(&t->data.tokens, t->data.train_count, prompt, text);
    for (int64_t length = prompt; length < total; length++) {
        int64_t first = length > s ? length - s : 0;
        MicroBatch micro = micro_batch_new(t->model, 0, 1, text + first, none, 0);
        model_forward(t->model, &micro);
        tensor_to_doubles(logits, tensor_rows_of(micro.head.logits, length - 1 - first, 1));
        micro_batch_free(t->model, &micro);
        text[length] = draw_token(logits, v, options->temperature,
                                  rng_uniform((uint64_t)c->seed, RNG_SAMPLE, (uint64_t)length));
    }
    say("\nsample (temperature %g; the prompt ends at |):\n", options->temperature);
    char *shown = host_alloc(total * 12 + 2), *end = shown;
    for (int64_t i = 0; i < total; i++) {
        if (i == prompt) *end++ = '|';
        bool printable = text[i] == '\n' || text[i] == '\t' || (text[i] >= 32 && text[i] < 127);
        if (!t->data.text) end += sprintf(end, "%d ", text[i]);
        else *end++ = printable ? (char)text[i] : '?';
    }
    *end = 0;
    say("%s\n", shown);
    free(shown);
    free(text);
    free(none);
    free(logits);
}

// FLOPs of a step by the closed formula, beside those that the operations counted.
static void check_flops(const Config *c, double counted, int64_t steps) {
    int64_t sequences = c->micro_batch * c->grad_acc;
    double model = config_step_flops(c, sequences), again = recompute_extra_flops(c, sequences);
    report_equal("FLOPs per step", model + again, counted / (double)steps, "FLOP");
    double estimate = 6.0 * (double)config_parameters(c) * (double)(sequences * c->seq);
    say("  the estimate 6 N tokens gives %s, %.2f of it\n", flops_text(estimate), estimate / model);
}

static void print_model_clock(const Config *c, double model_seconds, int64_t steps) {
    const Machine *machine = machine_find(c->machine);
    double peak = machine_peak_flops(machine, (DType)c->dtype);
    double model_flops = config_step_flops(c, c->micro_batch * c->grad_acc) * (double)steps;
    double extra = recompute_extra_flops(c, c->micro_batch * c->grad_acc) * (double)steps;
    say("model clock, %s: %.3f ms a step, MFU %.1f%%, HFU %.1f%% of %s/s\n", machine->device,
        1e3 * model_seconds / (double)steps, 100 * model_flops / model_seconds / peak,
        100 * (model_flops + extra) / model_seconds / peak, flops_text(peak));
    report_number("model clock", "seconds per step", model_seconds / (double)steps, "s");
}

// Peak bytes by kind over the steps, held to the formulas.
static void check_memory(const Config *c, const Memory *memory) {
    MemoryPlan plan = {.model = *c, .f32_gradients = true, .tp = 1, .dp = 1};
    MemoryNeed need = memory_need(&plan);
    double sgd = dtype_size(c->dtype) < 4 ? 4 * (double)config_parameters(c) : 0;  // master weights alone
    say("\nmemory at its peak: %s, of these", bytes_text((double)memory->peak_total));
    report_equal("parameters", need.parameters, (double)memory->peak[MEMORY_PARAMETER], "B");
    report_equal("gradients", need.gradients + need.accumulators, (double)memory->peak[MEMORY_GRADIENT],
                 "B");
    report_equal("optimizer", c->optimizer == OPTIMIZER_SGD ? sgd : need.optimizer,
                 (double)memory->peak[MEMORY_OPTIMIZER], "B");
    report_equal("activations", (double)peak_activation_bytes(c), (double)memory->peak[MEMORY_ACTIVATION],
                 "B");
}

enum { SERIES = 5 };
static const char *const series_names[SERIES] = {"loss", "gradient norm", "learning rate", "step seconds",
                                                 "held-out loss"};

// The loop. series[i] has a value for each step; held-out losses are NaN where none was taken. Returns counted FLOPs,
// model-clock and wall seconds of the steps alone.
static OpCount run_steps(Trainer *t, const Options *options, double *series[SERIES]) {
    const Config *c = &t->config;
    double rate = options->dry_run ? 0 : matmul_rate(c->dtype == F64 ? F64 : F32, 1024);
    if (rate > 0) say("matrix multiply, 1024 x 1024: %s/s", flops_text(rate));
    memory_reset_peak();
    int64_t tokens = c->micro_batch * c->grad_acc * c->seq, first = t->progress.step;
    OpCount sum = {0};
    for (int64_t step = first; step < c->steps; step++) {
        clock_reset();
        double start = wall_seconds();
        train_step(t, NULL);
        double seconds = wall_seconds() - start;
        OpCount count = clock_total();
        sum.flops += count.flops;
        sum.model_seconds += count.model_seconds;
        sum.wall_seconds += seconds;
        bool evaluate = !options->dry_run && options->eval_every && (step + 1) % options->eval_every == 0;
        double held_out = evaluate ? held_out_loss(t, EVAL_SAMPLES) : NAN;
        const double values[SERIES] = {t->loss, t->grad_norm, t->lr, seconds, held_out};
        for (int i = 0; i < SERIES; i++) series[i][step - first] = values[i];
        if (!options->dry_run) {
            char *line = format_text(
                "step %lld/%lld  loss %.3f  norm %.2f  lr %.1e  %.1fk tok/s  %.0f GFLOP/s, %.0f%% of "
                "matmul",
                (long long)step + 1, (long long)c->steps, t->loss, t->grad_norm, t->lr,
                1e-3 * (double)tokens / seconds, 1e-9 * count.flops / seconds,
                100 * count.flops / seconds / rate);
            progress(step - first + 1, c->steps - first, line);
            free(line);
        }
        if (evaluate) say("step %lld  held-out loss %.3f", (long long)step + 1, held_out);
        trainer_save(t);
    }
    return sum;
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    Options options;
    Option own[] = {
        {"eval-every", OPTION_INT, &options.eval_every, "100", 0, 1e9, "steps",
         "held-out loss in between; 0: only before and after", false},
        {"sample", OPTION_INT, &options.sample, "240", 0, 1e6, "tokens",
         "length of the text written at the end", false},
        {"temperature", OPTION_REAL, &options.temperature, "0.8", 0, 100, "",
         "of the sample; 0: the likeliest token", false},
        {"dry-run", OPTION_FLAG, &options.dry_run, NULL, 0, 0, "",
         "count and clock every operation, compute none: any size on any machine", false},
    };
    Config config = config_parse(
        argc, argv, "Trains a Llama-style model on one device, on real text.",
        CONFIG_MODEL | CONFIG_BATCH | CONFIG_OPTIMIZER | CONFIG_RECOMPUTE | CONFIG_FILES | CONFIG_REPORT,
        NULL, own, sizeof own / sizeof *own);
    CHECK(!((config.init || config.resume) && config.shape_given),
          "--init and --resume take the model's shape from the folder's config.json: leave out --model, "
          "--layers, --hidden, --heads, --kv-heads, --ffn, --vocab and --tied");
    CHECK(!(options.dry_run && config.save), "--dry-run computes no weights that --save could write");
    if (config.save) checkpoint_check_place(config.save);
    report_json(config.json);
    clock_set_machine(machine_find(config.machine));
    if (config.trace) clock_trace_start();
    device_dry_run(options.dry_run);

    const char *folder = config.resume ? config.resume : config.init;
    char *from = folder ? checkpoint_newest(folder) : NULL;
    if (from) checkpoint_config(from, &config);
    config_check(&config);
    config_print(&config);
    if (config.resume) resume_check(&config, 1);
    Trainer *t = trainer_new(&config, mesh_single());
    if (config.init) checkpoint_load_weights(from, &t->model->params);
    if (config.resume) trainer_resume(t);
    if (!options.dry_run)
        say("data: %s, %lld tokens for training, %lld held out", t->data.path,
            (long long)t->data.train_count, (long long)(t->data.count - t->data.train_count));

    double before = options.dry_run ? 0 : held_out_loss(t, EVAL_SAMPLES);
    int64_t steps = config.steps - t->progress.step;
    double *series[SERIES];
    for (int i = 0; i < SERIES; i++) series[i] = host_alloc(steps * sizeof(double));
    OpCount sum = run_steps(t, &options, series);
    Memory memory = memory_account();
    double after = options.dry_run ? 0 : held_out_loss(t, EVAL_SAMPLES);
    if (options.sample && !options.dry_run) generate(t, &options);

    check_memory(&config, &memory);
    check_flops(&config, sum.flops, steps);
    print_model_clock(&config, sum.model_seconds, steps);
    if (config.trace) clock_trace_write(config.trace);
    for (int i = 0; i < SERIES; i++) {
        if (!options.dry_run) report_series(series_names[i], series[i], steps);
        free(series[i]);
    }
    trainer_free(t);
    free(from);
    if (options.dry_run) return report_verdict("%lld steps counted, none computed", (long long)steps);
    report_number("held-out loss", "before", before, "nats");
    report_number("held-out loss", "after", after, "nats");
    report_number("throughput", "FLOPs per second", sum.flops / sum.wall_seconds, "FLOP/s");
    report_that(after < before, "the held-out loss did not fall: %.4f before, %.4f after", before, after);
    return report_verdict("held-out loss %.3f -> %.3f nats in %lld steps", before, after, (long long)steps);
}
#endif
