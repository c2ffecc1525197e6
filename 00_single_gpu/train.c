// train.c: trains the model on one device, and is the baseline of every other chapter.
// Playbook: "First Steps: Training on one GPU".
//
//     step:  zero gradients;  grad_acc x (forward, backward);  clip by the global norm;  AdamW
//
// Later chapters change this only through sockets (transformer.h). A sample is a function of its global
// index, and an initial weight of its global element index, so any layout of ranks can repeat this run.
//
// FLOPs per token: 6 for each weight of a matrix multiply (2 forward, 4 backward), plus causal attention.
// Memory per parameter, in bytes: f32 4 + 4 + 8 (moments);
// bf16 2 + 2 + 4 (f32 accumulators) + 12 (master weights, moments).
// Bytes sent: none.
// Run: build/00_single_gpu/train  (--data FILE, --init DIR, --save DIR, --resume DIR, --dry-run …)
// Last line: PASS train: held-out loss … -> … nats in 300 steps …
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

// ---- one step ----

// Runs the step's micro-batches forward and backward; on return the gradients are summed over all ranks.
static void run_micro_batches(Trainer *t, const StepInput *input) {
    const Sockets *sockets = &t->model->sockets;
    Params *params = &t->model->params;
    params_zero_grads(params);
    sockets->schedule.run(sockets->schedule.context, t->model, input);
    // All reductions must finish before the optimizer steps. Replicas come first (ZeRO: by reduce-scatter):
    // only then do all ranks with a copy of a weight hold the same elements of its gradient, to be summed.
    sockets->gradients.finish(sockets->gradients.context, t->model);
    params_sum_copies(params);
}

// grad_scale: the factor that the gradients still carry (loss scaling).
static void optimizer_steps(Trainer *t, double grad_scale) {
    const Config *c = &t->config;
    Params *params = &t->model->params;
    const Sockets *sockets = &t->model->sockets;
    const Param *bad = isfinite(t->grad_norm) ? NULL : params_first_bad_grad(params);
    CHECK(isfinite(t->grad_norm), "the gradient norm is %g; the first bad tensor is the gradient of %s",
          isnan(t->grad_norm) ? NAN : t->grad_norm,
          bad ? bad->name : "no single weight: the sum over all of them overflows");
    double factor = clip_scale(t->grad_norm, c->clip) / grad_scale;
    optimizer_begin(&t->optimizer, params);
    for (int unit = 0; unit < params->units; unit++) {
        optimizer_step_unit(&t->optimizer, params, unit, t->lr, factor);
        sockets->parameters.stepped(sockets->parameters.context, t->model, unit);
    }
}

// A technique that gathers weights after each step (ZeRO) also does so after a skipped one, so the calls
// and bytes of a step do not depend on whether it is skipped.
static void skip_step(Trainer *t) {
    const Sockets *sockets = &t->model->sockets;
    for (int unit = 0; unit < t->model->params.units; unit++)
        sockets->parameters.stepped(sockets->parameters.context, t->model, unit);
}

Batch batch_new(const Trainer *t, int64_t first_sample) {
    const Config *c = &t->config;
    Batch batch = {.first = first_sample, .samples = c->micro_batch * c->grad_acc};
    batch.count = batch.samples * c->seq;
    if (device_is_dry_run()) return batch;
    batch.tokens = host_alloc(2 * batch.count * sizeof *batch.tokens);
    batch.targets = batch.tokens + batch.count;
    for (int64_t i = 0; i < batch.samples; i++) {
        int32_t *targets = batch.targets + i * c->seq;
        data_sample(&t->data, c->seed, first_sample + i, false, c->seq, batch.tokens + i * c->seq, targets);
        if (t->masked) data_mask_prompt(c->seed, first_sample + i, c->seq, targets);
    }
    return batch;
}

void batch_free(Batch *batch) {
    free(batch->tokens);
    *batch = (Batch){0};
}

// Reads what the next step will train on. The previous step calls it before the optimizer, so that weights
// in flight after the optimizer step (ZeRO) do not delay the label count, with which a step begins.
static void read_ahead(Trainer *t) {
    Group dp = t->model->mesh.dp;
    int64_t own_samples = t->config.micro_batch * t->config.grad_acc;
    int64_t first = t->progress.sample + dp.rank * own_samples;
    if (t->ahead.count && t->ahead.first == first) return;
    batch_free(&t->ahead);
    t->ahead = batch_new(t, first);
    // The loss is the mean over the labels of all ranks, so their number must be known first; gradients
    // then simply add up. In a dry run every token has one.
    int64_t labels = t->ahead.targets ? count_labels(t->ahead.targets, t->ahead.count) : t->ahead.count;
    t->labels_ahead = comm_sum((double)labels, dp);
}

static void complete_weights(Trainer *t) {
    t->model->sockets.parameters.complete(t->model->sockets.parameters.context, t->model);
}

// The loss is read after the step's backward, but the weights have not changed yet: running the same
// micro-batches forward again shows where it broke. Of the ranks that find a bad tensor in the first bad
// micro-batch, the lowest reports it.
static void explain_bad_loss(Trainer *t, const StepInput *input) {
    Model *m = t->model;
    Group world = m->mesh.world;
    for (int64_t i = 0; i < input->micro_batches; i++) {
        MicroBatch micro = micro_batch_of(m, input, i, input->loss_scale[i]);
        micro.index = -1;  // not training
        double loss = m->sockets.schedule.evaluate(m->sockets.schedule.context, m, &micro);
        const char *bad = isfinite(loss) ? NULL : micro_batch_first_bad(m, &micro);
        int first = world.size - (int)comm_max(bad ? world.size - world.rank : 0, world);
        CHECK(first != world.rank, "the loss of micro-batch %lld is %g; the first bad tensor is: %s",
              (long long)i, isnan(loss) ? NAN : loss, bad);
        if (first < world.size) comm_wait(comm_barrier(world));  // until that rank has ended the run
        micro_batch_free(m, &micro);
        complete_weights(t);
    }
    fatal("the loss is %g, of micro-batches whose losses are finite", t->loss);
}

// Copies a step's loss and norm to the host together. Up to here the host has waited only for the row
// counts of a mixture of experts, so a GPU never runs out of queued work.
static void read_loss_and_norm(Trainer *t, StepInput *input, double grad_scale) {
    const Params *params = &t->model->params;
    double loss;
    t->grad_norm = params_grad_norm(params, input->loss, &loss) / grad_scale;
    tensor_free(&input->loss);
    t->loss = comm_sum(loss, params->replicas);
    if (!isfinite(t->loss)) explain_bad_loss(t, input);
}

void train_step(Trainer *t, Record *record) {
    const Config *c = &t->config;
    const Sockets *sockets = &t->model->sockets;
    fatal_context("%sstep %lld", device_is_dry_run() ? "dry run, " : "", (long long)t->progress.step + 1);
    report_step();
    char *mark = format_text("step %lld", (long long)t->progress.step + 1);
    clock_push(mark);
    free(mark);
    read_ahead(t);  // reads only in the first step: the step before has read for each later one
    Batch batch = t->ahead;
    t->ahead = (Batch){0};
    double *loss_scale = host_alloc(c->grad_acc * sizeof *loss_scale);
    for (int64_t i = 0; i < c->grad_acc; i++) loss_scale[i] = mean_loss_scale(t->labels_ahead);
    StepInput input = {c->grad_acc, c->micro_batch, batch.tokens,  batch.targets,
                       loss_scale,  loss_new(),     &t->kept_bytes};
    t->model->routing = record_routing_begin(record, c, t->progress.step, t->progress.batch);
    run_micro_batches(t, &input);
    t->model->routing = NULL;
    t->progress.sample += batch.samples * t->model->mesh.dp.size;
    if (t->progress.step + 1 < c->steps) read_ahead(t);

    clock_push("optimizer");
    double grad_scale = t->model->grad_scale;  // this step's; the step socket may change it for the next
    if (record && !record->grad[0] && !device_is_dry_run()) {
        clock_push("recording");  // not part of the step: timelines leave it out
        record_grads(record, &t->model->params, 1 / grad_scale);
        clock_pop();
    }
    read_loss_and_norm(t, &input, grad_scale);
    t->lr = learning_rate(c, t->progress.step);
    bool accepted = sockets->step.accept(sockets->step.context, t->model, t->grad_norm);
    if (accepted) optimizer_steps(t, grad_scale);
    else skip_step(t);
    clock_pop();
    clock_pop();
    free(loss_scale);
    batch_free(&batch);
    t->progress.step++;
    fatal_context(NULL);
}

double held_out_loss(Trainer *t, int64_t samples) {
    const Config *c = &t->config;
    const Sockets *sockets = &t->model->sockets;
    Group dp = t->model->mesh.dp, replicas = t->model->params.replicas;
    double sum = 0, labels = 0;
    int32_t *tokens = host_alloc(c->seq * sizeof *tokens), *targets = host_alloc(c->seq * sizeof *targets);
    // Every rank of dp runs equally many samples, since a forward may gather weights; samples beyond the
    // last have no labels.
    for (int64_t first = 0; first < samples; first += dp.size) {
        int64_t sample = first + dp.rank;
        data_sample(&t->data, c->seed, sample < samples ? sample : first, true, c->seq, tokens, targets);
        if (t->masked) data_mask_prompt(c->seed, sample, c->seq, targets);
        for (int64_t i = 0; i < c->seq && sample >= samples; i++) targets[i] = IGNORED_LABEL;
        MicroBatch micro = micro_batch_new(t->model, -1, 1, tokens, targets, 1);
        // Sums, not means: samples differ in their number of labels.
        sum += sockets->schedule.evaluate(sockets->schedule.context, t->model, &micro);
        labels += (double)count_labels(targets, c->seq);
        micro_batch_free(t->model, &micro);
        complete_weights(t);  // a plug may have kept gathered weights for a backward, but none follows
    }
    free(tokens);
    free(targets);
    return comm_sum(sum, replicas) / comm_sum(labels, dp);
}

// ---- a trainer: the model, sharded and plugged ----

static const Technique *const one_device[] = {&flash_attention, &recompute, NULL};

// A plug that replaced another by mistake would silently drop what the other does.
static void plug(Trainer *t, const Technique *technique, const Technique *taken[SOCKETS]) {
    Sockets before = t->model->sockets;
    if (technique->plug) t->context[t->techniques] = technique->plug(t->model);
    unsigned changed = sockets_difference(&before, &t->model->sockets);
    unsigned incomplete = sockets_incomplete(&t->model->sockets);
    for (Socket i = 0; i < SOCKETS; i++) {
        CHECK(!(incomplete & 1u << i),
              "%s leaves a function of the socket %s empty: a plug sets only those that it replaces",
              technique->name, socket_name(i));
        if (!(changed & 1u << i)) continue;
        CHECK(!taken[i] || (technique->wraps & 1u << i), "%s would take the place of %s in the socket %s",
              technique->name, taken[i]->name, socket_name(i));
        taken[i] = technique;
    }
    t->technique[t->techniques++] = technique;
}

// The techniques closest to the multiply shard first: ZeRO shards what tensor parallelism leaves here.
static void shard(Model *model, const Technique *const *technique, int count) {
    Params *params = &model->params;
    const Technique *owner = NULL;  // has divided what is stored among ranks: ZeRO
    for (int i = count - 1; i >= 0; i--) {
        int64_t before = params_elements(params);
        if (technique[i]->shard) technique[i]->shard(model);
        params_measure(params);
        CHECK(!owner || params_elements(params) == before,
              "%s shards weights that %s has already divided among ranks: list %s first",
              technique[i]->name, owner->name, owner->name);
        if (!owner && params->sharded) owner = technique[i];
    }
}

bool technique_is_on(const Technique *technique, const Config *config) {
    return !technique->enabled || technique->enabled(config);
}

int techniques_on(const Config *config, Techniques list, const Technique *on[MOST_TECHNIQUES]) {
    const Technique *flash = flash_attention.enabled(config) ? &flash_attention : NULL;
    int count = 0;
    for (int i = 0; list[i]; i++)
        if (technique_is_on(list[i], config) && technique_attends(list[i])) flash = NULL;
    for (int i = 0; list[i]; i++) {
        CHECK(count + (flash != NULL) < MOST_TECHNIQUES, "more than %d techniques at once",
              MOST_TECHNIQUES);
        if (flash && !strcmp(list[i]->name, recompute.name)) on[count++] = flash, flash = NULL;
        if (technique_is_on(list[i], config)) on[count++] = list[i];
    }
    if (flash) on[count++] = flash;
    return count;
}

bool technique_has_option(const Technique *technique, const char *name) {
    for (int i = 0; i < technique->options; i++)
        if (!strcmp(technique->option[i].name, name)) return true;
    return false;
}

Trainer *trainer_new(const Config *config, Mesh mesh, Techniques techniques) {
    Trainer *t = host_alloc(sizeof *t);
    *t = (Trainer){.config = *config};
    if (!techniques) techniques = one_device;
    if (!device_is_dry_run()) {
        t->data = data_open(config->data, config->vocab, config->seq);
        if (config->save) t->progress.data = data_hash(&t->data);
        data_check_same(&t->data, t->progress.data, mesh.world);
    }
    t->model = model_new(config, mesh);
    const Technique *enabled[MOST_TECHNIQUES], *taken[SOCKETS] = {NULL};
    int count = techniques_on(config, techniques, enabled);
    for (int i = 0; i < count; i++)
        if (enabled[i]->recipe) enabled[i]->recipe(&t->model->params.recipe, config);
    shard(t->model, enabled, count);
    model_allocate(t->model);
    for (int i = 0; i < count; i++) plug(t, enabled[i], taken);
    CHECK(!config->experts || taken[SOCKET_MLP],
          "--experts %ld: no technique of this program routes tokens to experts", config->experts);
    t->progress.batch = config->micro_batch * config->grad_acc * mesh.dp.size;
    if (config->save && !config->resume) checkpoint_check_place_is_ours(config->save, config, t->progress);
    t->optimizer = optimizer_new(config, &t->model->params);
    underflow_begin(t);
    return t;
}

void trainer_free(Trainer *t) {
    complete_weights(t);
    for (int i = t->techniques - 1; i >= 0; i--)
        if (t->technique[i]->unplug) t->technique[i]->unplug(t->model, t->context[i]);
    batch_free(&t->ahead);
    optimizer_free(&t->optimizer);
    model_free(t->model);
    data_close(&t->data);
    free(t);
}

void *trainer_context(const Trainer *t, const Technique *technique) {
    for (int i = 0; i < t->techniques; i++)
        if (!strcmp(t->technique[i]->name, technique->name)) return t->context[i];  // may be a copy of it
    return NULL;
}

// ---- checkpoints ----

void resume_check(const Config *config, int dp) {
    if (base_rank() > 0) return;  // rank 0 checks for all
    Data data = data_open(config->data, config->vocab, config->seq);
    Progress ours = {.batch = config->micro_batch * config->grad_acc * dp, .data = data_hash(&data)};
    checkpoint_check_run(config->resume, config, ours);
    data_close(&data);
}

void trainer_load(Trainer *t) {
    const Config *c = &t->config;
    if (!c->resume && !c->init) return;
    const char *from = c->resume ? c->resume : c->init;
    checkpoint_load_weights(from, &t->model->params);
    if (c->resume) {
        Progress saved = checkpoint_load_optimizer(from, &t->model->params, &t->optimizer);
        t->progress.step = saved.step;
        t->progress.sample = saved.sample;
        t->progress.run = saved.run;
        for (int i = 0; i < t->techniques; i++)
            if (t->technique[i]->resumed) t->technique[i]->resumed(t->model, t->context[i]);
        if (c->save) checkpoint_check_place_is_ours(c->save, c, t->progress);
    }
}

void trainer_save(Trainer *t) {
    const Config *c = &t->config;
    int64_t step = t->progress.step;
    if (!c->save || !(step == c->steps || (c->save_every && step % c->save_every == 0))) return;
    complete_weights(t);
    checkpoint_save(c->save, c, &t->model->params, &t->optimizer, t->progress);
}

// ---- whole runs: the baseline of other chapters ----

Record train_record(Trainer *t, const char *title) {
    int64_t steps = t->config.steps - t->progress.step;  // fewer than all after a resume
    Record record = record_new(title, steps, &t->model->params);
    memory_reset_peak();
    clock_reset();
    for (int64_t step = 0; step < steps; step++) {
        train_step(t, &record);
        record.loss[step] = t->loss;
        record.grad_norm[step] = t->grad_norm;
        progress_on_terminal(step + 1, steps, title);
        trainer_save(t);
    }
    complete_weights(t);
    record.kept_bytes = t->kept_bytes;
    record.memory = memory_account();
    record.flops = clock_total().flops;
    record.model_seconds = clock_total().model_seconds;
    if (!device_is_dry_run()) record_params(&record, &t->model->params);
    record_routing(&record, t->model->mesh.world);
    return record;
}

#ifndef NO_MAIN
int main(int argc, char **argv) {
    const Program program = {.purpose = "Trains a Llama-style model on one device, on real text.",
                             .natural = 1,
                             .techniques = one_device,
                             .trains = true};
    return program_main(argc, argv, &program);
}
#endif
