// config_sizes.c: what the sizes of a run cost, which of them fit together, and which fit the ranks.
#include <string.h>

#include "config.h"

// ---- parameters and FLOPs ----

// Weights of a block's linears: q and o (a d, h), k and v (kv d, h), gate, up and down (f, h); the router
// (e, h), and of so many experts.
static int64_t block_matrices(const Config *c, int64_t experts) {
    int64_t h = c->hidden, d = config_head_size(c), dense = config_dense_width(c);
    int64_t routed = c->experts * h + 3 * h * experts * config_expert_width(c);
    return 2 * h * c->heads * d + 2 * h * c->kv_heads * d + 3 * h * dense + (c->experts ? routed : 0);
}

static int64_t parameters_with(const Config *c, int64_t experts) {
    int64_t h = c->hidden, embeddings = (c->tied ? 1 : 2) * c->vocab * h;
    return embeddings + c->layers * (block_matrices(c, experts) + 2 * h) + h;
}
int64_t config_parameters(const Config *c) { return parameters_with(c, c->experts); }
int64_t config_active_parameters(const Config *c) { return parameters_with(c, c->top_k); }

double config_step_flops(const Config *c, int64_t sequences) {
    double s = (double)c->seq, tokens = (double)sequences * s;
    // Each weight takes three multiply-adds per token: forward, the gradient of the input, and that of the
    // weight. The embedding is looked up and takes none; the output layer multiplies, tied or not.
    double weights =
        (double)c->layers * (double)block_matrices(c, c->top_k) + (double)c->vocab * (double)c->hidden;
    // Two products of size d for each (query, key) in forward, four in backward, and of the s^2 pairs the
    // causal mask leaves s (s + 1) / 2.
    double pairs = (double)sequences * s * (s + 1) / 2;
    double head = 12.0 * (double)config_head_size(c) * pairs;
    return 6.0 * tokens * weights + (double)c->layers * (double)c->heads * head;
}

// ---- what fits together ----

static void check_experts(const Config *c) {
    if (!c->experts) return;
    int64_t reachable = c->experts / c->expert_groups * c->groups_kept;
    CHECK(c->top_k <= c->experts, "--top-k %ld is more than --experts %ld", c->top_k, c->experts);
    CHECK(c->moe == MOE_DEEPSEEK || (c->expert_groups == 1 && c->routed_scale == 1),
          "--expert-groups %ld and --routed-scale %g are those of --moe deepseek: with --moe mixtral both "
          "are 1",
          c->expert_groups, c->routed_scale);
    CHECK(c->experts % c->expert_groups == 0,
          "--expert-groups %ld does not divide --experts %ld: --experts %ld would fit", c->expert_groups,
          c->experts, (c->experts / c->expert_groups + 1) * c->expert_groups);
    CHECK(c->groups_kept <= c->expert_groups, "--groups-kept %ld is more than --expert-groups %ld",
          c->groups_kept, c->expert_groups);
    CHECK(c->top_k <= reachable,
          "--top-k %ld is more than %ld, the number of experts of --groups-kept %ld of --expert-groups %ld",
          c->top_k, reachable, c->groups_kept, c->expert_groups);
}

void config_check(const Config *c) {
    const int64_t experts = c->experts ? c->experts : 1;  // 0: the MLP
    // A program may have set sizes itself.
    const struct {
        const char *flag;
        int64_t value, most;
    } bounds[] = {{"layers", c->layers, LAYERS_MOST}, {"hidden", c->hidden, HIDDEN_MOST},
                  {"heads", c->heads, HEADS_MOST},    {"kv-heads", c->kv_heads, HEADS_MOST},
                  {"ffn", c->ffn, FFN_MOST},          {"vocab", c->vocab, VOCAB_MOST},
                  {"seq", c->seq, SEQ_MOST},          {"top-k", c->top_k, TOP_K_MOST},
                  {"experts", experts, EXPERTS_MOST}};
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++)
        CHECK(bounds[i].value >= 1 && bounds[i].value <= bounds[i].most, "--%s %ld is not from 1 to %ld",
              bounds[i].flag, bounds[i].value, bounds[i].most);
    CHECK(c->vocab >= 2,
          "--vocab 1: a single token is predicted with certainty, so the loss and all gradients are 0; "
          "--vocab 256 holds any text");
    CHECK(c->head_size || c->hidden % c->heads == 0,
          "--hidden %ld is not divisible by --heads %ld: --hidden %ld would fit, or any with --head-size",
          c->hidden, c->heads, (c->hidden / c->heads + 1) * c->heads);
    CHECK(c->heads % c->kv_heads == 0, "--heads %ld is not divisible by --kv-heads %ld", c->heads,
          c->kv_heads);
    check_experts(c);
    CHECK(c->head_size >= 0 && c->head_size <= HEAD_SIZE_MOST, "--head-size %ld is not from 0 to %d",
          c->head_size, HEAD_SIZE_MOST);
    CHECK(c->head_size % 2 == 0, "--head-size %ld is odd, and RoPE turns pairs: %ld would fit",
          c->head_size, c->head_size + 1);
    CHECK(config_head_size(c) % 2 == 0,
          "--hidden %ld / --heads %ld is %ld, and RoPE turns pairs: a head's size must be even", c->hidden,
          c->heads, config_head_size(c));
    // Tokens of a micro-batch are counted in the 32-bit integers of the BLAS, elements in 64 bits.
    CHECK(c->micro_batch <= INT32_MAX / c->seq,
          "--micro-batch %ld of --seq %ld are more than 2^31 - 1 tokens", c->micro_batch, c->seq);
    CHECK((double)c->layers * (double)block_matrices(c, c->experts) < 0x1p60,
          "--layers %ld x --hidden %ld and so on are more than 2^60 parameters", c->layers, c->hidden);
    double scores = (double)c->micro_batch * (double)c->heads * (double)c->seq * (double)c->seq;
    char batch[40] = "";  // a batch of one sequence is not the cause
    if (c->micro_batch > 1) snprintf(batch, sizeof batch, "--micro-batch %ld x ", c->micro_batch);
    CHECK(scores < 0x1p60, "%s--heads %ld x --seq %ld squared are more than 2^60 scores", batch, c->heads,
          c->seq);
    CHECK((double)c->micro_batch * (double)c->grad_acc * (double)c->steps < 0x1p53,
          "--micro-batch %ld x --grad-acc %ld x --steps %ld are more than 2^53 samples", c->micro_batch,
          c->grad_acc, c->steps);
    CHECK(!(c->init && c->resume), "--init and --resume both say where the weights come from");
    CHECK(c->save || c->save_every == 0, "--save-every %ld needs --save", c->save_every);
}

// ---- degrees of the mesh ----

// The degrees as flags, without those that are 1, or still open: "--pp 2 x --tp 3". Static buffer.
static const char *degrees_text(const Config *c, int64_t dp) {
    static char text[128];
    const struct {
        const char *name;
        int64_t degree;
    } axis[] = {{"dp", dp}, {"pp", c->pp}, {"cp", c->cp}, {"tp", c->tp}};
    int used = 0;
    for (int i = 0; i < 4; i++)
        if (axis[i].degree > 1)
            used += snprintf(text + used, sizeof text - (size_t)used, "%s--%s %ld", used ? " x " : "",
                             axis[i].name, axis[i].degree);
    return text;
}

void config_check_degrees(Config *c, int ranks) {
    // The first degree of 0 is all that the others leave; a further one is 1.
    int64_t *degree[] = {&c->tp, &c->cp, &c->pp}, *open = NULL, others = c->dp ? c->dp : 1;
    for (int i = 0; i < 3; i++) {
        if (*degree[i] == 0 && !open) open = degree[i];
        else if (*degree[i] == 0) *degree[i] = 1;
        if (degree[i] != open) others *= *degree[i];
    }
    if (open) {
        CHECK(ranks % others == 0, "%s does not divide the %d rank%s; --ranks %ld would fit",
              degrees_text(c, c->dp), ranks, plural(ranks), (ranks / others + 1) * others);
        *open = ranks / others;
    }
    int64_t rest = c->pp * c->cp * c->tp;
    CHECK(ranks % rest == 0, "%s does not divide the %d rank%s; --ranks %ld would fit", degrees_text(c, 1),
          ranks, plural(ranks), (ranks / rest + 1) * rest);
    if (c->dp == 0) c->dp = ranks / rest;
    CHECK(c->dp * rest == ranks, "--dp %ld%s%s needs %ld rank%s, and there %s %d: --ranks %ld would fit",
          c->dp, rest > 1 ? " x " : "", degrees_text(c, 1), c->dp * rest, plural(c->dp * rest),
          ranks == 1 ? "is" : "are", ranks, c->dp * rest);
}

const char *config_degrees(const Config *c, int64_t most, int64_t ranks,
                           bool (*fits)(const Config *c, int64_t degree)) {
    static char text[256];
    int used = 0;
    if (ranks && most > ranks) most = ranks;
    for (int64_t degree = 1; degree <= most && used < 240; degree++)
        if (ranks % degree == 0 && (!fits || fits(c, degree)))
            used += snprintf(text + used, sizeof text - (size_t)used, "%s%ld", used ? ", " : "", degree);
    return text;
}

// What an axis shards must be there: heads and the MLP's width, tokens, layers.
static bool can_shard(const Config *c, const char *flag, int64_t degree) {
    if (!strcmp(flag, "--cp")) return degree <= c->seq;
    if (strcmp(flag, "--tp")) return degree <= c->layers;
    return c->heads % degree == 0 && config_dense_width(c) % degree == 0 &&
           (c->kv_heads % degree == 0 || degree % c->kv_heads == 0);
}

const char *config_more(const Config *c, const char *flag) {
    static char text[64];
    Config sized = *c;
    const char *size = "";
    if (!strcmp(flag, "--pp") && c->layers == 1) {
        sized.layers = 2;
        size = " --layers 2";
    } else if (!strcmp(flag, "--cp") && c->seq == 1) {
        sized.seq = 2;
        size = " --seq 2";
    }
    int64_t ranks = c->dp * c->pp * c->cp * c->tp, degree = 2, most = 64;
    while (degree <= c->dp && (c->dp % degree || !can_shard(&sized, flag, degree))) degree++;
    if (degree <= c->dp) {
        snprintf(text, sizeof text, "%s %ld%s", flag, degree, size);
        return text;
    }
    for (degree = 2; degree < most && !can_shard(&sized, flag, degree);) degree++;
    if (degree == most) snprintf(text, sizeof text, "%s and sizes that it divides", flag);
    else snprintf(text, sizeof text, "--ranks %ld %s %ld%s", degree * ranks, flag, degree, size);
    return text;
}
