// real_training.c: training for real: progress, held-out loss, checkpoints, and a sample at the end.
// Nothing is recorded or compared, so the run goes at full speed; only what ranks sent and stored is
// checked against its price.
//
// Bytes sent: the techniques', and two numbers per evaluation. This file has no main: harness.c calls it.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formulas.h"
#include "harness.h"
#include "tensor/device.h"
#include "tensor/kernel_table.h"
#include "tensor/rng.h"

enum { EVAL_SAMPLES = 32 };  // held-out sequences per evaluation

// ---- the yardstick ----

enum { MEASURES = 6, LEAST_SIZE = 128 };

static double matmul_flops(int64_t size) { return 2.0 * (double)size * (double)size * (double)size; }

// Random numbers, since a GPU needs less power for equal ones, and multiplies them at a higher clock. They
// repeat, but no row of a matrix begins as the one before it.
static Tensor random_matrix(DType dtype, int64_t size) {
    enum { PERIOD = (1 << 16) + 7 };
    static double numbers[PERIOD];
    for (int i = 0; i < PERIOD; i++) numbers[i] = rng_uniform(1, 0, (uint64_t)i) - 0.5;
    Tensor t = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(size, size));
    int64_t all = size * size, made = all < PERIOD ? all : PERIOD;
    tensor_from_doubles(tensor_view(t, 0, SHAPE(made)), numbers);
    for (int64_t piece; made < all; made += piece) {
        piece = all - made < made ? all - made : made;
        op_copy(tensor_view(t, made, SHAPE(piece)), tensor_view(t, 0, SHAPE(piece)));
    }
    return t;
}

// FLOP/s of op_matmul on size x size matrices, best of all runs but the first.
static double matmul_rate(DType dtype, int64_t size) {
    Tensor a = random_matrix(dtype, size), b = random_matrix(dtype, size);
    Tensor c = tensor_like(MEMORY_ACTIVATION, a);
    Tensor row = tensor_rows_of(c, 0, 1);
    double best = INFINITY;
    for (int i = 0; i < MEASURES; i++) {
        double start = wall_seconds();
        op_matmul(c, a, b, false, false, 0);
        op_sum(row);                                           // waits for the device
        if (i > 0) best = fmin(best, wall_seconds() - start);  // the first call warms up
    }
    tensor_free(&a);
    tensor_free(&b);
    tensor_free(&c);
    return matmul_flops(size) / best;
}

// FLOP/s of a matrix multiply in the run's dtype on its device, at a size that fills the device: doubled
// until the rate stops growing, or the next multiply would take too long or more than half of the free
// memory. A short run takes a size below 1024, so that measuring computes no more than the run itself.
// Whatever --kernels says, it is the library's multiply.
static double yardstick(DType dtype, double run_flops) {
    const KernelTable *chosen = ops_use_kernels(NULL);
    const double most_seconds = 0.05, growth = 1.03;
    int64_t size = 1024;
    while (size > LEAST_SIZE && MEASURES * matmul_flops(size) > run_flops) size /= 2;
    double rate = matmul_rate(dtype, size);
    for (bool grows = size == 1024; grows;) {
        double twice = 2.0 * (double)size, bytes = 3 * twice * twice * (double)dtype_size(dtype);
        double room = (double)backend_room(memory_account().now_total);
        if (matmul_flops(2 * size) / rate > most_seconds || bytes > room / 2) break;
        double larger = matmul_rate(dtype, 2 * size);
        grows = larger > growth * rate;
        if (larger > rate) rate = larger, size *= 2;
    }
    say("matrix multiply in %s, %lld x %lld: %s/s", dtype_name(dtype), (long long)size, (long long)size,
        flops_text(rate));
    ops_use_kernels(chosen);
    return rate;
}

// ---- on one device: counts against closed formulas ----

// Of the FLOPs of a step, the share that the model needs: the others are computed a second time.
static double needed_share(const Config *c, const Price *price) {
    double model = config_step_flops(c, c->micro_batch * c->grad_acc);
    return model / (model + price->again);
}

// flops: of a step.
static void say_estimate(const Config *c, const Price *price, double flops) {
    double estimate =
        6.0 * (double)config_active_parameters(c) * (double)(c->micro_batch * c->grad_acc * c->seq);
    say("  the estimate 6 Psi n gives %s, %.2f of the step's%s\n", flops_text(estimate),
        estimate / (needed_share(c, price) * flops), price->again > 0 ? " without recomputation" : "");
}

static void print_model_clock(const Config *c, const Price *price, const OpCount *sum, int64_t steps) {
    const Machine *machine = machine_find(c->machine);
    double peak = machine_peak_flops(machine, (DType)c->dtype), hfu = sum->flops / sum->model_seconds / peak;
    say("model clock, %s: %.3f ms a step, MFU %.1f%%, HFU %.1f%% of %s/s\n", machine->device,
        1e3 * sum->model_seconds / (double)steps, 100 * hfu * needed_share(c, price), 100 * hfu,
        flops_text(peak));
    report_number("model clock", "seconds per step", sum->model_seconds / (double)steps, "s");
}

// Peak activation bytes from a dry run, which allocates and frees in the same order.
static double dry_peak(const Trainer *t) {
    const Technique *same[MOST_TECHNIQUES + 1] = {NULL};
    memcpy(same, t->technique, (size_t)t->techniques * sizeof *same);
    bool dry = device_is_dry_run();
    int64_t held = memory_account().now[MEMORY_ACTIVATION];  // by this trainer: masks
    device_dry_run(true);
    StepCost cost = program_cost(&t->config, mesh_single(), same);
    device_dry_run(dry);
    return (double)(cost.memory.peak[MEMORY_ACTIVATION] - held);
}

// Peak bytes by kind over the steps, checked against the formulas.
static void check_memory(const Trainer *t, const Price *price, const Memory *memory) {
    say("\nmemory at its peak: %s; each kind at its own peak:", bytes_text((double)memory->peak_total));
    const MemoryKind kinds[] = {MEMORY_PARAMETER, MEMORY_GRADIENT, MEMORY_OPTIMIZER};
    static const char *const names[] = {"parameters", "gradients", "optimizer"};
    for (int i = 0; i < 3; i++) {
        double predicted = price_states(price, t->model, kinds[i]);
        if (!isnan(predicted)) report_equal(names[i], predicted, (double)memory->peak[kinds[i]], "B");
    }
    if (price->peak_by_data) return;
    double predicted = price->peak_counted
                           ? dry_peak(t)
                           : (double)peak_activation_bytes(&t->config, t->model->params.recipe.gradient);
    report_equal("activations", predicted, (double)memory->peak[MEMORY_ACTIVATION], "B");
}

// ---- the loop ----

enum { SERIES = 5 };
static const char *const series_names[SERIES] = {"loss", "gradient norm", "learning rate", "step seconds",
                                                 "held-out loss"};

static void print_progress(const Trainer *t, int64_t done, int64_t steps, double seconds, double flops,
                           double rate) {
    const Config *c = &t->config;
    double tokens = (double)(t->progress.batch * c->seq);
    char *line = format_text(
        "step %lld/%lld  loss %.3f  norm %.2f  lr %.1e  %.1fk tok/s  %.0f GFLOP/s%s, %.0f%% of "
        "matmul%s",
        (long long)t->progress.step, (long long)c->steps, t->loss, fabs(t->grad_norm), t->lr,  // no "-nan"
        1e-3 * tokens / seconds, 1e-9 * flops / seconds, t->model->mesh.world.size > 1 ? " a rank" : "",
        100 * flops / seconds / rate,
        isfinite(t->grad_norm) ? "" : "  skipped: the gradients overflow");  // taken, it would be fatal
    progress(done, steps, line);
    free(line);
}

// series[i] gets a value for each step; held-out losses are NaN where none was computed. Returns counted
// FLOPs, model-clock and wall seconds of the steps alone.
static OpCount run_steps(Trainer *t, double *series[SERIES], Counted *counted) {
    const Config *c = &t->config;
    bool dry = device_is_dry_run();
    int64_t first = t->progress.step, every = (int64_t)config_number(c, "eval-every");
    double run_flops = config_step_flops(c, t->progress.batch) * (double)(c->steps - first) /
                       (double)t->model->mesh.world.size;
    double rate = dry ? 0 : yardstick((DType)c->dtype, run_flops);
    memory_reset_peak();
    OpCount sum = {0};
    for (int64_t step = first; step < c->steps; step++) {
        clock_reset();
        double start = wall_seconds();
        train_step(t, NULL);
        double seconds = wall_seconds() - start;
        OpCount count = clock_total();
        counted_add(counted);
        sum.flops += count.flops;
        sum.model_seconds += count.model_seconds;
        sum.wall_seconds += seconds;
        bool evaluate = !dry && every && (step + 1) % every == 0;
        double held_out = evaluate ? held_out_loss(t, EVAL_SAMPLES) : NAN;
        const double values[SERIES] = {t->loss, t->grad_norm, t->lr, seconds, held_out};
        for (int i = 0; i < SERIES; i++) series[i][step - first] = values[i];
        if (!dry) print_progress(t, step - first + 1, c->steps - first, seconds, count.flops, rate);
        if (evaluate) say("step %lld  held-out loss %.3f", (long long)step + 1, held_out);
        trainer_save(t);
    }
    return sum;
}

// Says what the run trains on, and warns of a text that its weights cannot have been trained on.
static void say_data(const Trainer *t) {
    const Config *c = &t->config;
    say("data: %s, %lld tokens for training, %lld held out", t->data.path, (long long)t->data.train_count,
        (long long)(t->data.count - t->data.train_count));
    if ((c->resume || c->init) && t->data.tokens.width == 1 && c->vocab != 256)
        say("WARNING: --data %s is read as bytes, and the weights know %ld tokens of a tokenizer: a "
            "file of tokens in llm.c's format would fit (its header: common/train/data.h)",
            t->data.path, c->vocab);
}

static bool any_is_finite(const double *values, int64_t count) {
    int64_t i = 0;
    while (i < count && !isfinite(values[i])) i++;
    return i < count;
}

int train_for_real(const Config *config, Mesh mesh, Techniques techniques, Techniques baseline) {
    Trainer *t = trainer_new(config, mesh, techniques);
    bool dry = device_is_dry_run(), alone = mesh.world.size == 1;
    trainer_load(t);
    if (!dry) say_data(t);
    double before = dry ? 0 : held_out_loss(t, EVAL_SAMPLES), after = 0;
    int64_t steps = config->steps - t->progress.step;
    double *series[SERIES];
    for (int i = 0; i < SERIES; i++) series[i] = host_alloc(steps * sizeof(double));
    Counted counted = {.steps = (double)steps};
    OpCount sum = run_steps(t, series, &counted);
    CHECK(any_is_finite(series[1], steps) || steps == 0,
          "scaled as the loss is, the gradients of each step overflow %s, and all are skipped: a smaller "
          "scale of the loss would fit, or --dtype bf16",
          dtype_name((DType)config->dtype));
    counted.memory = memory_account();
    counted.kept_bytes = t->kept_bytes;
    if (!dry) after = held_out_loss(t, EVAL_SAMPLES);
    if (!dry) sample_show(t, baseline);
    underflow_tell(t);
    if (alone) {
        Price price = trainer_price(t);
        check_memory(t, &price, &counted.memory);
        program_check_flops(t, &price, sum.flops / (double)steps);
        say_estimate(config, &price, sum.flops / (double)steps);
        print_model_clock(config, &price, &sum, steps);
    } else {
        program_check_counts(t, &counted);
    }
    for (int i = 0; i < SERIES; i++) {
        if (!dry) report_series(series_names[i], series[i], steps);
        free(series[i]);
    }
    trainer_free(t);
    timeline_finish(config, mesh.world);
    if (dry) return report_verdict("%lld step%s counted, none computed", (long long)steps, plural(steps));
    report_number("held-out loss", "before", before, "nats");
    report_number("held-out loss", "after", after, "nats");
    report_number("throughput", "FLOPs per second", sum.flops / sum.wall_seconds, "FLOP/s");
    // Weights that are already trained need not improve, and --lr 0 changes nothing.
    if (isnan(after)) report_that(false, "the held-out loss is NaN, which was %.4f before", before);
    else
        report_that(after < before || config->lr == 0 || config->init || config->resume,
                    "the held-out loss did not fall: %.4f before, %.2g more after", before, after - before);
    return report_verdict("held-out loss %.3f -> %.3f nats in %lld step%s", before, after, (long long)steps,
                          plural(steps));
}
