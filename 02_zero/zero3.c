// zero3.c: weights are also sharded: each rank keeps only its own part (FSDP). Playbook: "ZeRO-3: Adding
// Parameter Partitioning".
//
// Changes from zero2.c: nothing is gathered after the step. A unit's weights are gathered before their use
// and freed after it, in forward and again in backward, while those of the next unit are already in flight
// (prefetch):
//
//     compute       E   B0  B1  H    |  H    B1      B0          E, H: embedding and head
//     network    E  B0  B1  H        |  B1   rsH B0  rsB1  rsB0 rsE      rs: reduce-scatter, as in zero2
//
// Each unit is gathered twice, except the head: forward ends and backward begins with it, so it is kept. The
// embedding's backward reads no weights, so it is gathered once as well: 2 U - 2 gathers for U = L + 2 units.
// (The playbook's 2 L - 1: blocks alone, the last kept.) Tied, the head needs the embedding again: 2 U - 1.
//
// Letters as in zero1.c, and E and H for the parameters of embedding and head. Bytes sent per rank and
// micro-batch: (N - 1) / N (g Psi + 2 e Psi - e (E + H)), with tied weights - e H.
// Memory per rank: e Psi / N and two units, g Psi / N and two units, k Psi / N.
// Run: build/02_zero/zero3           (--ranks 3, --tied, --dtype bf16, --recompute full, --grad-acc 4 …)
// Last line: PASS zero3: weights are sharded over the ranks, and no bit changes …
#include <stdlib.h>

#include "zero.h"

static void shard(Model *model) { zero_shard(model, SHARD_VALUES); }

// ---- the technique: weights; gradients as in zero2 ----

static void start_gather(Model *model, Zero *zero, int unit) {
    Unit *u = &model->params.unit[unit];
    if (tensor_exists(u->values) || u->count == 0) return;  // here, in flight, or another stage's
    u->values = tensor_new(MEMORY_PARAMETER, model->params.recipe.weight, SHAPE(u->count));
    int64_t *counts = zero_part_counts(u);
    zero->gathering[unit] = comm_all_gather_coded(u->values, u->own_values, counts,
                                                  model->params.recipe.send_weights, u->replicas);
    free(counts);
}

// A block's experts are a unit of their own, after the head in the table, but used inside the block.
static bool is_experts(const Model *model, int unit) { return unit > model->head_unit; }

// Starts gathering what the pass will use after this unit.
static void prefetch(Model *model, Zero *zero, int unit, Pass pass) {
    bool block = unit >= model->first_block_unit && unit < model->head_unit;
    if (is_experts(model, unit)) return;  // their block has already prefetched what follows
    if (block && model->first_expert_unit)
        start_gather(model, zero, model->first_expert_unit + unit - model->first_block_unit);
    // Before the first block comes the embedding, whose backward reads no weights.
    if (pass == BACKWARD && unit > model->first_block_unit) start_gather(model, zero, unit - 1);
    if (pass == BACKWARD || zero->at_head) return;
    start_gather(model, zero, unit + 1);
    if (unit + 1 == model->head_unit && model->config.tied)
        start_gather(model, zero, model->embedding_unit);
}

static void acquire(void *context, Model *model, int unit, Pass pass) {
    Zero *zero = context;
    if (unit == model->head_unit) zero->at_head = true;
    if (!is_experts(model, unit)) zero->backward = pass == BACKWARD;
    start_gather(model, zero, unit);
    if (zero->prefetch) prefetch(model, zero, unit, pass);
    zero_wait(&zero->gathering[unit]);
}

static void release(void *context, Model *model, int unit, Pass pass) {
    Zero *zero = context;
    bool of_head = zero->at_head;  // the head itself, or the embedding that it is tied to
    if (unit == model->head_unit) zero->at_head = false;
    if (pass == FORWARD && of_head) return;
    // Recomputation runs forward within the block's backward, which uses them next.
    if (pass == FORWARD && is_experts(model, unit) && zero->backward) return;
    tensor_free(&model->params.unit[unit].values);
}

// Forward keeps the head's weights for backward, and after an evaluation no backward runs.
static void free_gathered(void *context, Model *model) {
    Zero *zero = context;
    for (int i = 0; i < model->params.units; i++) {
        zero_wait(&zero->gathering[i]);
        tensor_free(&model->params.unit[i].values);
    }
}

static void nothing_to_gather(void *context, Model *model, int unit) {
    (void)context, (void)model, (void)unit;
}

static void *plug(Model *model) {
    Zero *zero = zero2_plug(model);
    zero->prefetch = !config_number(&model->config, "no-prefetch");
    model->sockets.parameters.acquire = acquire;
    model->sockets.parameters.release = release;
    model->sockets.parameters.complete = free_gathered;
    model->sockets.parameters.stepped = nothing_to_gather;  // the next pass gathers
    return zero;
}

static bool enabled(const Config *config) { return zero_on(config, 3); }
static void price(Price *price, const Model *model, const void *zero) { zero_price(price, model, zero, 3); }

static const Option prefetch_option = {"no-prefetch",
                                       OPTION_FLAG,
                                       NULL,
                                       NULL,
                                       0,
                                       0,
                                       "",
                                       "gather a unit's weights only when they are used, without prefetch",
                                       false};

const Technique zero3 = {.name = "zero3",
                         .option = &prefetch_option,
                         .options = 1,
                         .asked = "--zero 3",
                         .axes = 1u << AXIS_DP,
                         .enabled = enabled,
                         .shard = shard,
                         .plug = plug,
                         .unplug = zero_unplug,
                         .price = price};

#ifndef NO_MAIN

// ---- further runs ----

static const Technique *const techniques[] = {&zero3, &recompute, NULL};

// Proves several micro-batches, with each unit gathered only when it is used, and with SGD, whose step
// shows the scale of a gradient; AdamW's hides it.
static void accumulate(Mesh mesh, const Config *config) {
    Config c = *config;
    c.grad_acc = config->grad_acc + 1;
    c.optimizer = OPTIMIZER_SGD, c.lr = 0.1;
    config_set(&c, "no-prefetch", 1);
    say("\nWith %ld micro-batches, SGD and no prefetch:", c.grad_acc);
    program_prove(&c, mesh, techniques, "DDP in the same order of sums", zero_twin_of_2_and_3, false,
                  false);
}

static void check_picture(Mesh mesh, const Config *config) {
    CHECK(mesh.dp.size > 1 || !config_text(config, "svg"),
          "--svg shows what the ranks of --dp hold, and there is one: --ranks 2 would fit");
}

static void show(Mesh mesh, const Config *config) {
    accumulate(mesh, config);
    if (mesh.dp.size == 1) return;
    zero_stages(mesh, config);
    zero3_overlap(mesh, config);
}

static const Option picture_option = {
    "svg", OPTION_OUTPUT, NULL, NULL, 0, 0, "FILE", "what each stage holds, as a picture", false};

int main(int argc, char **argv) {
    const Program program = {
        .purpose =
            "ZeRO-3: optimizer state, gradients and weights are sharded over the ranks of data "
            "parallelism.",
        .claim = "weights are sharded over the ranks, and no bit changes",
        .defaults =
            "layers=3 hidden=48 heads=6 kv-heads=2 ffn=88 seq=31 micro-batch=2 grad-acc=1 steps=3 "
            "dtype=f64 optimizer=adamw lr=0.001 clip=0.5",
        .natural = 4,
        .before = {"zero2", (const Technique *[]){&zero2, &recompute, NULL}, NULL, 0},
        .techniques = techniques,
        .twin = "DDP in the same order of sums",
        .twin_techniques = zero_twin_of_2_and_3,
        .plan = check_picture,
        .more = show,
        .more_option = &picture_option,
        .more_options = 1};
    return program_main(argc, argv, &program);
}
#endif
