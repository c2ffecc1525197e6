// five_d_layouts.c: the records of all chapters, in plug order. Playbook: "5D parallelism in a nutshell".
//
// Each record has one line here. The second column says when a record is on, where its own chapter has it
// always on, or where two records do the same in different ways:
//
//     ZeRO-3      gathers weights for each pass, or, under a pipeline, once a step; likewise hybrid
//     attention   the four ways of --cp; flash attention where a rank has all tokens of a sequence
//     pipeline    from two stages on
//     recipes     by --dtype
//
// Order: a later record may wrap what an earlier one has put into a socket (Technique.wraps). Weights are
// sharded from the last record to the first, so ZeRO shards what stages, experts and tensor parallelism
// leave on a rank. This file has no main.
#include "five_d.h"

// ---- which of two ways ----

static bool balanced(const Config *c) {
    return c->experts && (config_number(c, "aux-loss") > 0 || config_number(c, "z-loss") > 0 ||
                          config_number(c, "balance-bias") > 0);
}
static bool gathered_for_passes(const Config *c) { return c->pp == 1 && zero3.enabled(c); }
static bool gathered_for_steps(const Config *c) { return c->pp > 1 && zero3.enabled(c); }
static bool hybrid_for_passes(const Config *c) { return c->pp == 1 && hybrid_zero_enabled(c); }
static bool hybrid_for_steps(const Config *c) { return c->pp > 1 && hybrid_zero_enabled(c); }
static bool columns(const Config *c) { return c->tp > 1 && tensor_parallel.enabled(c); }
static bool staged(const Config *c) { return c->pp > 1; }
static bool ring(const Config *c) { return c->cp > 1 && ring_attention.enabled(c); }
static bool zigzag(const Config *c) { return c->cp > 1 && zigzag_ring_attention.enabled(c); }
static bool gathered_keys(const Config *c) { return c->cp > 1 && all_gather_attention.enabled(c); }
static bool heads_by_tokens(const Config *c) { return c->cp > 1 && ulysses.enabled(c); }
static bool flash(const Config *c) { return c->cp == 1 && flash_attention.enabled(c); }

// ---- --fp8-wire on one device ----

// One device rounds what ranks round to send it: as a group of one it sends it to itself. (Not when rank 0
// alone writes the sample: it has all weights, but its flags are still those of many ranks.)
static bool on_one(const Config *c) { return c->dp * c->pp * c->cp * c->tp * c->ep == 1; }
static bool weights_to_itself(const Config *c) {
    return on_one(c) && config_number(c, "fp8-wire") && config_number(c, "zero") >= 3;
}
static bool rows_to_itself(const Config *c) {
    return on_one(c) && config_number(c, "fp8-wire") && config_number(c, "sp");
}

// ---- what does not go together, and no record knows by itself ----

static void rows_check(const Config *c) {
    CHECK(c->tp > 1, "--sp shards rows over the ranks of --tp, and there is one: leave it out, or give %s",
          config_more(c, "--tp"));
    sequence_parallel.check(c);
}
static void vocabulary_check(const Config *c) {
    CHECK(c->tp > 1,
          "--vocab-parallel shards the vocabulary over the ranks of --tp, and there is one: leave "
          "it out, or give %s",
          config_more(c, "--tp"));
}

// ---- the list ----

typedef struct Entry {
    const Technique *record;
    bool (*enabled)(const Config *config);    // NULL: as the record has it
    void (*check)(const Config *config);      // likewise
    bool one_device;                          // which one device has, too
    bool (*to_itself)(const Config *config);  // when one device has it, as a group of one; NULL: never
} Entry;

static const Entry entries[] = {
    {.record = &moe, .one_device = true},
    {.record = &bf16_recipe, .one_device = true},
    {.record = &fp16_recipe, .one_device = true},
    {.record = &fp8_recipe, .one_device = true},
    {.record = &load_balance, .enabled = balanced, .one_device = true},
    {.record = &ddp_no_sync},
    {.record = &zero1},
    {.record = &zero2},
    {.record = &zero3, .enabled = gathered_for_passes, .to_itself = weights_to_itself},
    {.record = &zero3_per_step, .enabled = gathered_for_steps},
    {.record = &hybrid_zero, .enabled = hybrid_for_passes},
    {.record = &hybrid_zero_per_step, .enabled = hybrid_for_steps},
    {.record = &tensor_parallel, .enabled = columns},
    {.record = &sequence_parallel, .check = rows_check, .to_itself = rows_to_itself},
    {.record = &vocab_parallel, .check = vocabulary_check},
    {.record = &async_tensor_parallel},
    {.record = &expert_parallel},
    {.record = &ring_attention, .enabled = ring},
    {.record = &zigzag_ring_attention, .enabled = zigzag},
    {.record = &all_gather_attention, .enabled = gathered_keys},
    {.record = &ulysses, .enabled = heads_by_tokens},
    {.record = &flash_attention, .enabled = flash, .one_device = true},
    {.record = &pipeline, .enabled = staged},
    {.record = &recompute, .one_device = true},
    {.record = &zero_r_in_pipeline},
};
enum { ENTRIES = sizeof entries / sizeof *entries };

static Technique record[ENTRIES];
static Technique to_itself[ENTRIES];
static const Technique *layouts[ENTRIES + 1], *one_device[ENTRIES + 1];

static void make_lists(void) {
    if (layouts[0]) return;
    for (int i = 0, alone = 0; i < ENTRIES; i++) {
        record[i] = *entries[i].record;
        if (entries[i].enabled) record[i].enabled = entries[i].enabled;
        if (entries[i].check) record[i].check = entries[i].check;
        layouts[i] = &record[i];
        if (entries[i].one_device) one_device[alone++] = &record[i];
        if (!entries[i].to_itself) continue;
        to_itself[i] = record[i];
        to_itself[i].enabled = entries[i].to_itself;
        one_device[alone++] = &to_itself[i];
    }
}

Techniques five_d_layouts(void) {
    make_lists();
    return layouts;
}

Techniques five_d_one_device(void) {
    make_lists();
    return one_device;
}

const Option five_d_options[FIVE_D_OPTIONS] = {
    {"zero", OPTION_CHOICE, NULL, "0", 0, 0, "0|1|2|3|hybrid",
     "sharded over data-parallel ranks: 1 optimizer state, 2 and gradients, 3 and weights; hybrid: 3 "
     "inside nodes",
     false},
    {"sum", OPTION_CHOICE, NULL, "f32", 0, 0, "f32|16-bit",
     "in which gradients add up over micro-batches and ranks, with --dtype bf16 or f16", false},
};
