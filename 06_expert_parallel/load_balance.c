// load_balance.c: three ways to keep experts evenly busy. Playbook: "Expert parallelism"; GShard, Switch
// (Fedus et al. 2021), ST-MoE (Zoph et al. 2022), DeepSeek-V3 (2024).
//
// Changes from moe.c, whose router learns from the loss alone and may send most tokens to a few experts:
//
//     --aux-loss A      adds A (sum over experts i of f_i P_i) to the loss, for each block and sequence (as
//                       in DeepSeek-V3; Switch takes a batch): f_i is e times the share of the sequence's
//                       choices that fell on expert i (DeepSeek-V3 counts the k best scores instead,
//                       without groups and bias), and P_i the mean of its scores (softmax, or sigmoids
//                       divided by their sum); the gradient flows through P_i alone
//     --z-loss Z        adds Z times the mean of lse(logits)^2: keeps logits small, balances nothing itself
//     --balance-bias U  each expert has a bias, which is added to its logit (deepseek: sigmoid) only when
//                       experts are chosen; after a step it goes up by U if the expert got fewer tokens than
//                       the mean, and down by U if it got more. It adds no loss and has no gradient
//
// Both losses are means over all sequences of the global batch, so accumulation, data and expert
// parallelism do not change them; the loss that is printed is the cross-entropy without them. The bias
// counts the tokens of all ranks, once for each micro-batch, even where recomputation routes twice, and
// moves after a step that float16 skips as well (as in Megatron-LM). It is no weight: this book's
// checkpoints, which have Mixtral's format, do not hold it (DeepSeek-V3's do).
// Bytes sent per step: an all-reduce of L e counts in f64. Memory per rank: L e biases.
// Run: build/06_expert_parallel/load_balance     (--aux-loss 0.1 --z-loss 0, --moe deepseek --z-loss 0 …)
// Last line: PASS load_balance: experts are balanced over ranks as on one device …
#include <stdio.h>
#include <stdlib.h>

#include "expert_parallel.h"
#include "files.h"
#include "tensor/rng.h"

typedef struct LoadBalance {
    Moe *moe;
    Sockets before;
    BalanceRule rule;
    double rate;    // by which a step moves a bias
    Tensor *bias;   // (L) of (e), or {0}
    double *value;  // (L, e) the same on the host
    double *taken;  // (L, e) tokens that each expert has got in this step
    double *load;   // (L, e) the same, summed over steps until a caller sets it to zero
} LoadBalance;

// ---- the technique ----

static Tensor bias_of(void *context, int layer) {
    const LoadBalance *b = context;
    return b->bias[layer];
}

// The factor that makes a sum over sequences a mean over the global batch, times the recipe's loss scale.
static double gradient_scale(const Model *m) {
    const Config *c = &m->config;
    return m->grad_scale / (double)(c->micro_batch * c->grad_acc * m->mesh.dp.size);
}

static void backward(void *context, const MicroBatch *micro, int layer, MoeKept *kept) {
    LoadBalance *b = context;
    const Model *m = b->moe->model;
    int64_t e = m->config.experts;
    for (int64_t i = 0; i < e; i++) b->taken[layer * e + i] += (double)kept->own[i];
    if (b->rule.auxiliary == 0 && b->rule.z == 0) return;
    BalanceRule rule = b->rule;
    rule.scale = gradient_scale(m);
    // What each token adds to the auxiliary loss; the printed loss is the cross-entropy alone.
    Tensor losses = tensor_new(MEMORY_ACTIVATION, kept->logits.dtype, SHAPE(tensor_rows(kept->logits)));
    op_route_balance(losses, kept->dlogits, kept->logits, kept->chosen, micro->s, rule, b->moe->rule);
    tensor_free(&losses);
}

// taken (L, e) of all ranks: each bias moves by the rate towards the mean.
static void move_biases(LoadBalance *b) {
    const Config *c = &b->moe->model->config;
    int64_t e = c->experts;
    for (int64_t layer = 0; layer < c->layers && b->rate > 0; layer++) {
        double *taken = b->taken + layer * e, *value = b->value + layer * e, all = 0;
        for (int64_t i = 0; i < e; i++) all += taken[i];
        double mean = all / (double)e;  // exact if an expert's count can equal it
        for (int64_t i = 0; i < e; i++) value[i] += b->rate * ((taken[i] < mean) - (taken[i] > mean));
        tensor_from_doubles(b->bias[layer], value);
    }
}

static bool accept(void *context, Model *m, double grad_norm) {
    LoadBalance *b = context;
    int count = (int)(m->config.layers * m->config.experts);
    // Over the world: DualPipe's two copies of a layer have counted different micro-batches. Ranks without
    // the layer add zeros.
    comm_sum_all(b->taken, count, m->mesh.world);
    move_biases(b);
    for (int i = 0; i < count; i++) b->load[i] += b->taken[i], b->taken[i] = 0;
    return b->before.step.accept(b->before.step.context, m, grad_norm);
}

// With --moe deepseek (sigmoids) there is no z-loss: a default of the program then counts as 0.
static double z_loss(const Config *c) {
    return c->moe == MOE_MIXTRAL || config_given(c, "z-loss") ? config_number(c, "z-loss") : 0;
}

static void *plug(Model *m) {
    const Config *c = &m->config;
    int64_t count = c->layers * c->experts;
    LoadBalance *b = host_alloc(sizeof *b);
    *b = (LoadBalance){.moe = m->sockets.mlp.context,
                       .before = m->sockets,
                       .rule = {config_number(c, "aux-loss"), z_loss(c), 1},
                       .rate = config_number(c, "balance-bias"),
                       .bias = calloc((size_t)c->layers, sizeof *b->bias),
                       .value = calloc((size_t)count, sizeof *b->value),
                       .taken = calloc((size_t)count, sizeof *b->taken),
                       .load = calloc((size_t)count, sizeof *b->load)};
    CHECK(b->bias && b->value && b->taken && b->load, "out of host memory for the experts' counts");
    for (int64_t layer = 0; layer < c->layers && b->rate > 0; layer++) {
        b->bias[layer] = tensor_new(MEMORY_ACTIVATION, dtype_full(c->dtype), SHAPE(c->experts));
        op_fill(b->bias[layer], 0);
    }
    b->moe->balance = (Balance){b, bias_of, backward};
    m->sockets.step.context = b;
    m->sockets.step.accept = accept;
    return b;
}

static void unplug(Model *m, void *context) {
    LoadBalance *b = context;
    for (int64_t layer = 0; layer < m->config.layers; layer++) tensor_free(&b->bias[layer]);
    free(b->bias);
    free(b->value);
    free(b->taken);
    free(b->load);
    free(b);
}

// ---- the record ----

static void check(const Config *c) {
    CHECK(c->cp == 1, "--cp %ld splits sequences, and balance is asked of whole ones; --cp 1 would fit",
          c->cp);
    CHECK(c->tp == 1,
          "--tp %ld with --sp splits sequences, and balance is asked of whole ones; --tp 1 would fit",
          c->tp);
    CHECK(config_number(c, "balance-bias") == 0 || config_number(c, "capacity") == 0,
          "--balance-bias counts the tokens that experts take, and --capacity drops some: --balance-bias 0 "
          "would fit, or --capacity 0");
    CHECK(z_loss(c) == 0 || c->moe == MOE_MIXTRAL,
          "--z-loss is of a softmax, and --moe deepseek has sigmoids; --z-loss 0 would fit");
    CHECK(config_number(c, "balance-bias") == 0 || !(c->save || c->resume || c->init),
          "--balance-bias is no weight, and a folder has no place for it: --balance-bias 0 would fit, or no "
          "--save, --resume and --init");
}

static void price(Price *p, const Model *m, const void *context) {
    const LoadBalance *b = context;
    const Config *c = &m->config;
    int64_t count = c->layers * c->experts;
    price_all_reduce(p, 1, count, F64, m->mesh.world);
    CHECK(p->end_rows < MOST_KEPT, "more than %d tensors outside blocks are priced", MOST_KEPT);
    double bytes = b->rate > 0 ? (c->dtype == F64 ? 8 : 4) * (double)count : 0;
    p->end[p->end_rows++] = (PriceKept){"biases of experts", bytes, EVERY_RANK, RECOMPUTE_FULL + 1};
}

static const Option options[] = {
    {"aux-loss", OPTION_REAL, NULL, "0", 0, 1e3, "",
     "weight of the auxiliary loss, Switch's sum of f P over each sequence", false},
    {"z-loss", OPTION_REAL, NULL, "0", 0, 1e3, "",
     "weight of the z-loss, which keeps the router's logits small", false},
    {"balance-bias", OPTION_REAL, NULL, "0", 0, 1e3, "",
     "by how much a step moves an expert's bias, as in DeepSeek-V3", false},
};

static bool enabled(const Config *c) { return c->experts > 0; }

const Technique load_balance = {.name = "load_balance",
                                .option = options,
                                .options = sizeof options / sizeof *options,
                                .asked = "--experts 8",
                                .brings = CONFIG_EXPERTS,
                                .wraps = 1u << SOCKET_STEP,
                                .enabled = enabled,
                                .check = check,
                                .plug = plug,
                                .unplug = unplug,
                                .price = price};

#ifndef NO_MAIN
static const Technique *const techniques[] = {
    &moe, &load_balance, &ddp_no_sync, &zero1, &zero2, &zero3, &expert_parallel, &recompute, NULL,
};
static const Technique *const one_device[] = {&moe, &load_balance, &recompute, NULL};

// ---- what it achieves: a corpus in which a few tokens are frequent ----

enum { CORPUS = 300000, SYMBOLS = 64, STEPS = 120, LAST = 40 };

// Text in which symbol i is drawn 1 / (i + 1) as often as the first, but half of the symbols, chosen at
// random, follow from the one before. Returns its path in memory, for the caller to free.
static char *make_corpus(void) {
    char *text = host_alloc(CORPUS);
    double total = 0;
    for (int i = 0; i < SYMBOLS; i++) total += 1.0 / (i + 1);
    for (int i = 0, symbol = 0; i < CORPUS; i++) {
        double drawn = rng_uniform(1, RNG_TEST, 2 * (uint64_t)i) * total;
        bool follows = rng_uniform(1, RNG_TEST, 2 * (uint64_t)i + 1) < 0.5;
        symbol = follows ? (symbol * 5 + 3) % SYMBOLS : 0;
        for (; !follows && symbol < SYMBOLS - 1 && drawn > 1.0 / (symbol + 1); symbol++)
            drawn -= 1.0 / (symbol + 1);
        text[i] = (char)(' ' + symbol);
    }
    char *path = input_in_memory(text, CORPUS);
    free(text);
    return path;
}

enum { SHOWN = 6 };
static const int64_t shown[SHOWN] = {1, 5, 10, 20, 40, STEPS};

// The busiest expert of a block over the mean, averaged over blocks, for the last steps together and for
// single steps; and the mean loss of the last steps.
typedef struct Load {
    double loss, busiest, at[SHOWN];
} Load;

// load (L, e)
static double busiest_of(const double *load, const Config *c) {
    double busiest = 0;
    for (int64_t layer = 0; layer < c->layers; layer++) {
        double sum = 0, most = 0;
        for (int64_t i = 0; i < c->experts; i++) {
            double taken = load[layer * c->experts + i];
            sum += taken;
            most = taken > most ? taken : most;
        }
        busiest += most / (sum / (double)c->experts) / (double)c->layers;
    }
    return busiest;
}

static Load train_with(Config c, double auxiliary, double z, double bias) {
    config_set(&c, "aux-loss", auxiliary);
    config_set(&c, "z-loss", z);
    config_set(&c, "balance-bias", bias);
    Trainer *t = trainer_new(&c, mesh_single(), one_device);
    LoadBalance *b = trainer_context(t, &load_balance);
    Load load = {.loss = 0};
    int64_t count = c.layers * c.experts;
    double *last = calloc((size_t)count, sizeof *last);
    CHECK(last, "out of host memory for the experts' counts");
    for (int64_t step = 0; step < STEPS; step++) {
        for (int64_t i = 0; i < count; i++) b->load[i] = 0;
        train_step(t, NULL);
        for (int i = 0; i < SHOWN; i++)
            if (step + 1 == shown[i]) load.at[i] = busiest_of(b->load, &c);
        if (step < STEPS - LAST) continue;
        load.loss += t->loss / LAST;
        for (int64_t i = 0; i < count; i++) last[i] += b->load[i];
    }
    load.busiest = busiest_of(last, &c);
    free(last);
    trainer_free(t);
    return load;
}

// at NULL: the numbers of the steps.
static void say_steps(const char *name, const double *at) {
    char line[128];
    int used = snprintf(line, sizeof line, "  %-20s", name);
    for (int i = 0; i < SHOWN; i++)
        used += at ? snprintf(line + used, sizeof line - (size_t)used, " %8.2f", at[i])
                   : snprintf(line + used, sizeof line - (size_t)used, " %8ld", (long)shown[i]);
    say("%s", line);
}

static void compare(Mesh mesh, const Config *config) {
    if (config_number(config, "proof-only")) return;
    static const struct {
        const char *name;
        double auxiliary, z, bias;
        bool balances;
    } ways[] = {{"nothing", 0, 0, 0, false},
                {"auxiliary loss 0.1", 0.1, 0, 0, true},
                {"z-loss 0.001", 0, 0.001, 0, false},
                {"bias 0.02", 0, 0, 0.02, true}};
    char *defaults = format_text(
        "layers=1 hidden=48 heads=6 kv-heads=2 ffn=40 seq=64 micro-batch=8 dtype=f32 experts=8 top-k=2 "
        "steps=%d",
        STEPS);
    Config c = config_default(defaults);
    free(defaults);
    char *corpus = make_corpus();
    c.data = corpus;
    say("\nOn a made-up corpus of %d symbols, one device, %d steps; means of the last %d:\n", SYMBOLS,
        STEPS, LAST);
    say("  %-20s %28s %8s", "", "busiest expert / mean", "loss");
    enum { WAYS = sizeof ways / sizeof *ways };
    Load all[WAYS] = {{.loss = 0}};  // the ranks share the runs
    for (int i = mesh.world.rank; i < WAYS; i += mesh.world.size)
        all[i] = train_with(c, ways[i].auxiliary, ways[i].z, ways[i].bias);
    for (int i = 0; i < WAYS; i++)
        comm_sum_all((double *)&all[i], sizeof *all / sizeof(double), mesh.world);
    for (size_t i = 0; i < WAYS; i++) {
        Load load = all[i];
        say("  %-20s %28.2f %8.3f  (%+.3f)", ways[i].name, load.busiest, load.loss,
            load.loss - all[0].loss);
        report_number(ways[i].name, "busiest expert / mean", load.busiest, "");
        report_number(ways[i].name, "loss", load.loss, "nats");
        report_that((load.busiest < 1.3) == ways[i].balances,
                    "%s: the busiest expert has %.2f times the mean, expected %s", ways[i].name,
                    load.busiest, ways[i].balances ? "below 1.3" : "1.3 or more");
    }
    say("\nBusiest expert / mean in single steps:\n");
    say_steps("step", NULL);
    for (size_t i = 0; i < WAYS; i++) say_steps(ways[i].name, all[i].at);
    free(corpus);
}

int main(int argc, char **argv) {
    const Program program = {
        .purpose = "Load balance: auxiliary loss, z-loss, and a bias in the choice of experts.",
        .claim = "experts are balanced over ranks as on one device",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=40 seq=31 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 bucket-mb=0.1 experts=8 top-k=2 ep=2 aux-loss=0.01 "
            "z-loss=0.001 balance-bias=0.001",
        .experts = true,
        .natural = 4,
        .techniques = techniques,
        .option = &zero_option,
        .options = 1,
        .baseline = one_device,
        .more = compare,
        .more_option = &proof_only_option,
        .more_options = 1};
    return program_main(argc, argv, &program);
}
#endif
