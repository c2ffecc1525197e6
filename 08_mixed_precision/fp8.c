// fp8.c: training in 8 bits, with six recipes. Playbook: "FP8 pretraining"; Micikevicius et al. 2022, Peng
// et al. 2023 (FP8-LM), DeepSeek-V3 2024, OCP Microscaling Formats 2023.
//
// Changes from bf16.c: the linears of all blocks multiply 8-bit codes. Their range is so narrow that each
// tensor, or each tile of it, has a scale, computed from its largest magnitude, amax:
//
//     x = code * scale,    scale = amax / 448 (e4m3)  or  amax / 57344 (e5m2)
//
//     --fp8       codes         a scale for each                 sums of products    AdamW's moments
//     te-delayed  e4m3, d e5m2  tensor, by amax of 16 steps      f32                 f32
//     te-current  e4m3, d e5m2  tensor                           f32                 f32
//     fp8-lm      e4m3, d e5m2  tensor                           f32                 8-bit m, 16-bit v
//     deepseek    e4m3          1 x 128; weights 128 x 128       to f32 every 128    bf16
//     nanotron    e4m3, d e5m2  tensor                           f32                 8-bit
//     mxfp8       e4m3          1 x 32, a power of two           f32                 f32
//     d: codes of gradients
//
// A CPU multiplies codes without error: a recipe changes only the casts and the sums.
// Bytes sent: one all-reduce a step, of 3 numbers for each parameter tensor (te-delayed); one number for each
// tensor that is cast and that ranks share (te-current, fp8-lm, nanotron); nothing (tiles). With --fp8-wire
// ZeRO-3's weights and --sp's rows are sent in 8 bits, with a scale for each 128. In the proof one device
// sends them to itself, so it rounds at the same places; but which 128 share a scale depends on where a
// rank's part begins. So these errors count in the bound (bound.c), whose reference run in f64 sends f64.
// Memory per parameter: two casts of 1 byte; what the optimizer stores, by recipe.
// Run: build/08_mixed_precision/fp8      (--fp8 deepseek --fp8-tile 16, --tp 2 --sp, --zero 3 …)
// Last line: PASS fp8: the ranks reproduce the single-device step …
#include <stdlib.h>

#include "five_d.h"

// ---- the recipes ----

#define STANDARD F64, F64, F64, F64, F64
// name; codes of x and W, of dy; scales of tiles, square ones of W; rule; history; sums of products; masters,
// sums of gradients, two moments; gradients; the playbook's bytes; is it as good as bf16 (Fp8Recipe)
const Fp8Recipe fp8_recipes[] = {
    {"te-delayed", E4M3, E5M2, false, false, SCALE_REAL, 16, {0, 0}, STANDARD, 16, true},
    {"te-current", E4M3, E5M2, false, false, SCALE_REAL, 0, {0, 0}, STANDARD, 16, true},
    {"fp8-lm", E4M3, E5M2, false, false, SCALE_REAL, 0, {0, 0}, F16, F16, E4M3, F16, E4M3, 9, true},
    {"deepseek", E4M3, E4M3, true, true, SCALE_REAL, 0, {0, 128}, F32, F32, BF16, BF16, BF16, 15, true},
    {"nanotron", E4M3, E5M2, false, false, SCALE_REAL, 0, {0, 0}, BF16, F32, E4M3, E5M2, E4M3, 10, false},
    {"mxfp8", E4M3, E4M3, true, false, SCALE_POWER_OF_TWO, 0, {0, 0}, STANDARD, 0, true},
};
const int fp8_recipe_count = sizeof fp8_recipes / sizeof *fp8_recipes;

bool fp8_own_state(const Fp8Recipe *r) { return r->master != F64; }  // not STANDARD

static const Fp8Recipe *recipe_of(const Config *c) {  // NULL: none
    int chosen = (int)config_number(c, "fp8");
    return chosen ? &fp8_recipes[chosen - 1] : NULL;
}

static int64_t tile_of(const Config *c, const Fp8Recipe *r) {
    int64_t asked = (int64_t)config_number(c, "fp8-tile");
    return asked ? asked : r->rule == SCALE_POWER_OF_TWO ? 32 : 128;
}

// ---- the technique ----

// With --dtype f64 nothing is stored in fewer bits: such a run proves that the right ranks share a scale.
static void recipe(Recipe *recipe, const Config *c) {
    const Fp8Recipe *r = recipe_of(c);
    if (r && fp8_own_state(r) && c->dtype != F64) {
        recipe->master = r->master;
        recipe->sum = r->add;
        recipe->moment = r->moment;
        recipe->second = r->second;
        recipe->gradient = r->gradient;
    }
    if (!config_number(c, "fp8-wire") || c->dtype == F64) return;
    recipe->send_weights = recipe->send_rows = &fp8_codec;
    recipe->send_drows = &fp8_gradient_codec;
}

// Scales computed from tokens equal those of one device if the same tokens share them. Otherwise, only a
// 16-bit dtype can be proven, whose own rounding already moves some elements to the next code. And what
// ranks sum differs from one device's in a last bit: in f64 it hardly ever rounds to another code, in f32
// in a few runs of a hundred, with a far larger difference.
static void check_tokens(const Config *c, const Fp8Recipe *r) {
    if (c->no_check || c->dtype == BF16 || c->dtype == F16) return;
    CHECK(!c->experts || r->history || (c->ep == 1 && (!r->tile || c->cp * c->tp == 1)),
          "--fp8 %s with --experts, --ep %ld, --cp %ld and --tp %ld: an expert's scales would be of other "
          "tokens than on one device; --dtype bf16 would fit, whose rounding hides that",
          r->name, c->ep, c->cp, c->tp);
    const SequenceLayout *layout = context_layout(c);
    long chunks = layout == &sequence_contiguous ? c->cp : layout == &sequence_zigzag ? 2 * c->cp : c->seq;
    CHECK(!r->tile || c->cp == 1 || c->seq % (chunks * tile_of(c, r)) == 0,
          "--fp8 %s with --cp %ld: a tile of %ld tokens, in the gradient of a weight, would have more than "
          "the %ld that follow each other on a rank; --dtype bf16 would fit, whose rounding hides that",
          r->name, c->cp, tile_of(c, r), c->seq / chunks);
    CHECK(c->dtype == F64 || c->tp * c->cp == 1,
          "--fp8 %s with --dtype f32 and --%s %ld: a sum over its ranks, one bit off, may round to another "
          "code than on one device; --dtype f64 or bf16 would fit",
          r->name, c->tp > 1 ? "tp" : "cp", c->tp > 1 ? c->tp : c->cp);
}

static void check(const Config *c) {
    const Fp8Recipe *r = recipe_of(c);
    CHECK(!config_number(c, "fp8-wire") || c->dtype == BF16 || c->dtype == F16,
          "--fp8-wire with --dtype %s: what arrives in 8 bits is far from what that dtype has on one "
          "device; --dtype bf16 would fit",
          dtype_name((DType)c->dtype));
    CHECK(!config_number(c, "fp8-wire") || r || c->no_check,
          "--fp8-wire without --fp8: what arrives in 8 bits is far from the %s that one device multiplies; "
          "--fp8 te-delayed would fit, or --no-check",
          dtype_name((DType)c->dtype));
    bool replicas = config_number(c, "zero") > 3 && config_number(c, "shard-ranks") == 1;
    CHECK(!config_given(c, "fp8-wire") ||
              (config_number(c, "zero") >= 3 && c->dp * c->cp > 1 && !replicas) ||
              (config_number(c, "sp") && c->tp > 1),
          "--fp8-wire: neither ZeRO-3's weights nor --sp's rows are sent: leave it out, or give --zero 3 "
          "with several ranks of dp, or --sp with %s",
          config_more(c, "--tp"));
    CHECK((r && r->tile) || !config_number(c, "fp8-tile"),
          "--fp8-tile %.0f: --fp8 %s scales no tiles; --fp8 deepseek or mxfp8 would fit",
          config_number(c, "fp8-tile"), r ? r->name : "none");
    if (!r) return;
    CHECK(r->tile || r->history || !c->experts || (c->tp == 1 && c->cp == 1),
          "--fp8 %s all-reduces amax over --tp and --cp at each cast, and ranks of --ep cast other "
          "experts, so their calls would not match: --fp8 te-delayed would fit",
          r->name);
    CHECK(r->tile || r->history || c->tp == 1 || !config_number(c, "async-tp"),
          "--fp8 %s with --async-tp: rows are multiplied as they come, and the scale of all is not known "
          "until the last have: --fp8 te-delayed would fit",
          r->name);
    check_tokens(c, r);
    // A copy of a key/value head has the gradient of its own queries alone, and the sum of rounded parts is
    // not what one device rounds.
    CHECK(c->tp <= c->kv_heads,
          "--fp8 with --tp %ld and --kv-heads %ld: ranks that copy a head would each round their part of "
          "its gradient; --tp %ld would fit",
          c->tp, c->kv_heads, c->kv_heads);
    CHECK(!fp8_own_state(r) || c->dtype == F64 || !config_number(c, "gradient"),
          "--fp8 %s stores gradients in %s: leave out --gradient f32", r->name, dtype_name(r->gradient));
    CHECK(!fp8_own_state(r) || c->dtype == F64 ||
              !(config_number(c, "master") || config_number(c, "sum") || config_number(c, "rounding")),
          "--fp8 %s has masters and sums of its own: leave out --master, --sum and --rounding", r->name);
    CHECK(!fp8_own_state(r) || c->dtype == F64 || c->dtype == BF16,
          "--fp8 %s stores what the optimizer steps beside weights of bf16: --dtype bf16 would fit",
          r->name);
    CHECK(!r->history || c->dtype != F16 || !config_number(c, "loss-scale") || !(c->save || c->resume),
          "--fp8 %s with --dtype f16: a checkpoint holds either the histories of amax or the scale of the "
          "loss, not both: --fp8 te-current would fit, or --dtype bf16",
          r->name);
    // A tile that crossed into the next rank's columns would have a different amax on each rank.
    long keys = c->kv_heads * config_head_size(c) / c->tp, tile = tile_of(c, r), promote = r->sum.promote;
    long inner = c->experts ? keys : c->ffn / c->tp;  // ranks of tp hold experts whole
    long fits = tile;
    while (fits > 1 && (keys % fits || inner % fits || promote % fits)) fits--;
    CHECK(!r->tile || c->tp == 1 || (keys % tile == 0 && inner % tile == 0),
          "--fp8 %s with --tp %ld: a rank's %ld columns of keys and %ld of the MLP do not divide into "
          "tiles of %ld; --fp8-tile %ld would fit",
          r->name, c->tp, keys, inner, tile, fits);
    for (fits = tile < promote ? tile : promote; promote > 0 && promote % fits;) fits--;
    CHECK(!r->tile || promote <= 0 || fits == tile,
          "--fp8-tile %ld: --fp8 %s promotes sums after %ld products, at the end of a tile; --fp8-tile %ld "
          "would fit",
          tile, r->name, promote, fits);
}

typedef struct Fp8 {
    Fp8Linear *linear;
    Fp8State *state;  // NULL: as the standard recipe has it
} Fp8;

static void *plug(Model *m) {
    const Fp8Recipe *r = recipe_of(&m->config);
    if (!r) return NULL;
    Fp8 *f = host_alloc(sizeof *f);
    bool narrow = fp8_own_state(r) && m->config.dtype != F64 && m->config.optimizer == OPTIMIZER_ADAMW;
    *f = (Fp8){fp8_linear_plug(m, r, tile_of(&m->config, r)), narrow ? fp8_state_plug(m) : NULL};
    return f;
}
static void resumed(Model *m, void *context) {
    (void)m;
    const Fp8 *f = context;
    if (f) fp8_linear_resumed(f->linear);
}

static void unplug(Model *m, void *context) {
    Fp8 *f = context;
    if (!f) return;
    fp8_linear_unplug(m, f->linear);
    if (f->state) fp8_state_unplug(m, f->state);
    free(f);
}

// Bytes of the scales of moments and of gradients, on this rank.
static double state_bytes(const Model *m, const Fp8 *f) {
    Tensor grad_scale = m->params.grad_scale;
    return (f->state ? fp8_state_bytes(f->state) : 0) +
           (tensor_exists(grad_scale) ? (double)tensor_bytes(grad_scale) : 0);
}

static void price(Price *price, const Model *m, const void *context) {
    const Fp8 *f = context;
    if (!f) return;
    fp8_linear_price(price, m, f->linear);
    price->more[MEMORY_PARAMETER] += state_bytes(m, f);
    price->peak_counted = true;  // casts, and 8-bit gradients in the format in which they are added to
    price->peak_by_data |= m->config.experts > 0;  // an expert's codes are as many as its rows
}

double fp8_extra_bytes(const Trainer *t) {
    const Fp8 *f = trainer_context(t, &fp8_recipe);
    return fp8_linear_bytes(t->model, f->linear) + state_bytes(t->model, f);
}

Fp8Linear *fp8_linear_of(const Trainer *t) { return ((Fp8 *)trainer_context(t, &fp8_recipe))->linear; }

static const Option options[] = {
    {"fp8", OPTION_CHOICE, NULL, "none", 0, 0, "none|te-delayed|te-current|fp8-lm|deepseek|nanotron|mxfp8",
     "recipe of 8-bit multiplies", false},
    {"fp8-tile", OPTION_INT, NULL, "0", 0, 1 << 20, "elements",
     "elements that share a scale; 0: 128 in deepseek, 32 in mxfp8", false},
    {"fp8-wire", OPTION_FLAG, NULL, NULL, 0, 0, "", "send ZeRO-3's weights and --sp's rows in 8 bits",
     false},
};

const Technique fp8_recipe = {.name = "fp8",
                              .option = options,
                              .options = sizeof options / sizeof *options,
                              .wraps = 1u << SOCKET_STEP,
                              .check = check,
                              .recipe = recipe,
                              .plug = plug,
                              .resumed = resumed,
                              .unplug = unplug,
                              .price = price};

#ifndef NO_MAIN

// Before the proof, which takes a while.
static void check_typed(Mesh mesh, const Config *config) {
    (void)mesh;
    int64_t seeds = (int64_t)config_number(config, "long");
    CHECK(seeds != 1, "--long 1: only several seeds show what is chance; --long 2 would fit");
    CHECK(!config_number(config, "proof-only") || !(seeds || config_text(config, "curves")),
          "--%s is of one device's training, which --proof-only leaves out: give one of the two",
          seeds ? "long" : "curves");
}

static void more(Mesh mesh, const Config *config) {
    if (config_number(config, "proof-only")) return;
    fp8_tables(small_text(config));
    fp8_training(mesh, config);
    fp8_outliers(mesh.world);
}

// The record is on with --fp8 none, too, and then does nothing.
static bool has_eight_bits(const Config *c) { return recipe_of(c) || config_number(c, "fp8-wire"); }

int main(int argc, char **argv) {
    const Technique eight_bits = {.name = "fp8", .asked = "--fp8 te-delayed", .enabled = has_eight_bits};
    const Option options[] = {
        {"proof-only", OPTION_FLAG, NULL, NULL, 0, 0, "", "leave out the tables of one device", false},
        {"curves", OPTION_OUTPUT, NULL, NULL, 0, 0, "FILE",
         "draw the losses of all recipes as learning rates grow", false},
        {"long", OPTION_INT, NULL, "0", 0, 4, "seeds",
         "also train the default model 500 steps by each recipe, from 2 to 4 seeds", false}};
    const Program program = {
        .purpose = "FP8: six recipes of 8-bit multiplies and what they store.",
        .claim = "the ranks reproduce the single-device step",
        .defaults =
            "layers=2 hidden=48 heads=6 kv-heads=2 ffn=96 seq=32 micro-batch=2 grad-acc=2 steps=3 "
            "dtype=f64 optimizer=sgd lr=0.1 clip=0.5 bucket-mb=0.1 fp8=te-delayed",
        .natural = 2,
        .subject = &eight_bits,
        .baseline = five_d_one_device(),
        .techniques = five_d_layouts(),
        .option = five_d_options,
        .options = FIVE_D_OPTIONS,
        .plan = check_typed,
        .more = more,
        .more_option = options,
        .more_options = sizeof options / sizeof *options};
    return program_main(argc, argv, &program);
}
#endif
