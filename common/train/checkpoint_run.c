// checkpoint_run.c: what makes two runs the same run.
// A run has an identity, a 64-bit hash of everything that determines its course. Every file of weights or
// state contains it and the step, so that files of different runs or steps are never combined, and no run
// writes among the checkpoints of another.
#include <stdlib.h>
#include <string.h>

#include "checkpoint_inside.h"
#include "hash.h"

// ---- the settings that determine a run's course ----

typedef enum Matters { ALWAYS, TO_ADAMW, TO_F16 } Matters;  // SGD's rate is constant
typedef struct CourseSetting {
    const char *name;
    double standard;  // where a program has no such option
    bool choice;      // shown without its number, which would mean nothing to a reader
    Matters matters;
} CourseSetting;

// First come RATES fields of Config; then the options of techniques that change more of what a run computes
// than the order of sums. Layouts do not.
enum { RATES = 5 };
static const CourseSetting course[] = {
    {"lr", 0, false, ALWAYS},
    {"weight-decay", 0, false, ALWAYS},
    {"clip", 0, false, ALWAYS},
    {"warmup", 0, false, TO_ADAMW},
    {"steps", 0, false, TO_ADAMW},
    {"documents", -1, false, ALWAYS},
    {"capacity", 0, false, ALWAYS},
    {"fp8", 0, true, ALWAYS},
    {"fp8-tile", 0, false, ALWAYS},
    {"fp8-wire", 0, true, ALWAYS},
    {"master", 0, true, ALWAYS},
    {"sum", 0, true, ALWAYS},
    {"moments", 0, true, ALWAYS},
    {"rounding", 0, true, ALWAYS},
    {"gradient", 0, true, ALWAYS},
    {"aux-loss", 0, false, ALWAYS},
    {"z-loss", 0, false, ALWAYS},
    {"balance-bias", 0, false, ALWAYS},
    {"loss-scale", 0, true, TO_F16},
    {"scale", 0, false, TO_F16},
    {"scale-interval", 0, false, TO_F16},
};
_Static_assert(sizeof course / sizeof *course == COURSE, "checkpoint_inside.h counts them");

static double course_value(const Config *c, int which) {
    const double rates[RATES] = {c->lr, c->weight_decay, c->clip, (double)c->warmup, (double)c->steps};
    if (which < RATES) return rates[which];
    return config_has(c, course[which].name) ? config_number(c, course[which].name)
                                             : course[which].standard;
}

static bool course_matters(const Config *c, int which) {
    if (course[which].matters == TO_ADAMW) return c->optimizer == OPTIMIZER_ADAMW;
    return course[which].matters != TO_F16 || c->dtype == F16;
}

const char *course_name(int which) { return course[which].name; }

char *course_text(const Config *c, int which) { return number_text(course_value(c, which)); }

char *course_changes(const SafeTensors *file, const Config *config, uint64_t our_data) {
    uint64_t data = strtoull(safetensors_metadata(file, "data"), NULL, 16);
    bool other_data = data && our_data && data != our_data;
    char *changes = format_text("%s", other_data ? ", other data" : "");
    for (int i = 0; i < COURSE; i++) {
        const char *before = safetensors_metadata(file, course_name(i));  // NULL: an older file
        char *now = course_text(config, i);
        if (before && strcmp(before, now) && course_matters(config, i)) {
            char *longer = course[i].choice ? format_text("%s, another --%s", changes, course_name(i))
                                            : format_text("%s, --%s %s, not %s", changes, course_name(i),
                                                          now, printable(before));
            free(changes);
            changes = longer;
        }
        free(now);
    }
    return changes;
}

// ---- the identity ----

char *checkpoint_model(const Config *c) {
    const Rope *r = &c->rope;
    const double numbers[] = {r->theta,   r->factor ? r->factor : 1, r->low, r->high, r->original,
                              c->norm_eps};
    enum { NUMBERS = sizeof numbers / sizeof *numbers, STRETCHED = 5 };
    char *text = format_text("heads %lld of %lld, kv %lld, RoPE", (long long)c->heads,
                             (long long)config_head_size(c), (long long)c->kv_heads);
    for (int i = 0; i < NUMBERS; i++) {
        if (i > 0 && i < STRETCHED && numbers[1] == 1) continue;  // as Llama 3 stretches it, or not at all
        char *number = number_text(numbers[i]);
        char *longer = format_text("%s%s %s", text, i < STRETCHED ? "" : ", eps", number);
        free(number), free(text);
        text = longer;
    }
    return text;
}

// Experts and the settings of techniques; "" for a dense model by the standard recipe. The caller frees it.
static char *specials_text(const Config *c) {
    char *text = c->experts
                     ? format_text(" e %lld %lld %lld %lld moe %d %lld %lld %.17g", (long long)c->experts,
                                   (long long)c->top_k, (long long)config_expert_width(c),
                                   (long long)c->shared_experts, c->moe, (long long)c->expert_groups,
                                   (long long)c->groups_kept, c->routed_scale)
                     : format_text("%s", "");
    for (int i = RATES; i < COURSE; i++) {
        double value = course_value(c, i);
        if (!course_matters(c, i) || value == course[i].standard) continue;
        char *longer = format_text("%s %s %.17g", text, course[i].name, value);
        free(text);
        text = longer;
    }
    return text;
}

// Equal for every layout, and for a run begun again with the same flags and data.
uint64_t checkpoint_identity(const Config *c, Progress p) {
    const Rope *r = &c->rope;
    // "" for what every run had before there were others
    char *heads = c->head_size ? format_text(" d %lld", (long long)c->head_size) : format_text("%s", "");
    char *stretch = r->factor != 0 ? format_text(" rope %.17g %.17g %.17g %.17g", r->factor, r->low,
                                                 r->high, r->original)
                                   : format_text("%s", "");
    char *specials = specials_text(c);
    char *eps = c->norm_eps != 1e-5 ? format_text(" eps %.17g", c->norm_eps) : format_text("%s", "");
    char *text = format_text(
        "%lld %lld %lld %lld %lld %lld %lld %d %d %d %lld %lld %lld %.17g %.17g %.17g %.17g %lld %016llx "
        "%s%s%s%s%s",
        (long long)c->layers, (long long)c->hidden, (long long)c->heads, (long long)c->kv_heads,
        (long long)c->ffn, (long long)c->vocab, (long long)c->seq, c->tied, c->dtype, c->optimizer,
        (long long)c->seed, (long long)c->steps, (long long)c->warmup, c->lr, c->weight_decay, c->clip,
        r->theta, (long long)p.batch, (unsigned long long)p.data, c->init ? c->init : "", heads, stretch,
        specials, eps);
    free(heads), free(eps);
    free(stretch);
    free(specials);
    uint64_t hash = hash_text(text);
    free(text);
    return hash ? hash : 1;
}
