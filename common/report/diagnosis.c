// diagnosis.c: see diagnosis.h. A number that is wrong by a whole factor says where to look: 1 / N on N
// ranks is a mean taken twice, N a sum taken twice, 1 / m the scale of a micro-batch applied twice, and a
// loss that is off by log N is a softmax whose sum counted the vocabulary N times.
#include "diagnosis.h"

#include <math.h>
#include <string.h>

// A factor is visible in a gradient despite the rounding of its dtype, even bf16; a loss has more digits.
static const double FACTOR_NOISE = 0.01, LOSS_NOISE = 1e-3;

enum { MOST_SIZES = 8 };
static struct Size {
    bool ranks;  // or micro-batches
    char what[48];
    double size;
} sizes[MOST_SIZES];
static int count;

void diagnosis_forget(void) { count = 0; }

void diagnosis_ranks(const char *axis, int64_t ranks) {
    if (ranks <= 1 || count == MOST_SIZES) return;
    struct Size *s = &sizes[count++];
    *s = (struct Size){.ranks = true, .size = (double)ranks};
    snprintf(s->what, sizeof s->what, "the %lld ranks of %s", (long long)ranks, axis);
}

void diagnosis_micro_batches(int64_t micro_batches) {
    if (micro_batches <= 1 || count == MOST_SIZES) return;
    struct Size *s = &sizes[count++];
    *s = (struct Size){.size = (double)micro_batches};
    snprintf(s->what, sizeof s->what, "the %lld micro-batches", (long long)micro_batches);
}

static bool near(double x, double y, double noise) { return fabs(x - y) <= noise * fabs(y); }

static char text[320];

// Several sizes may be equal: each is named, "averaged twice over the 4 ranks of dp, or …".
static void say_also(const char *before, const struct Size *size, const char *after) {
    size_t used = strlen(text);
    snprintf(text + used, sizeof text - used, "%s%s%s%s", used ? ", or " : "usually ", before, size->what,
             after);
}

const char *diagnose_gradient(double scale, double relative) {
    text[0] = 0;
    // If it is not just a factor, there is an error that the scale does not explain.
    bool factor = near(relative, fabs(scale - 1), FACTOR_NOISE);
    for (int i = 0; i < count && factor; i++) {
        const struct Size *s = &sizes[i];
        bool ranks = s->ranks;
        if (near(scale, 1 / s->size, FACTOR_NOISE))
            say_also(ranks ? "averaged twice over " : "scaled twice by 1 / ", s,
                     ranks ? "" : ", which each loss has in it already");
        if (near(scale, s->size, FACTOR_NOISE))
            say_also(ranks ? "summed twice over " : "summed, and not averaged, over ", s,
                     ranks ? ", or summed where a mean was due" : "");
    }
    bool twice = near(scale, 2, FACTOR_NOISE) && factor;  // of 2 ranks, or simply twice
    if (*text && twice) snprintf(text + strlen(text), sizeof text - strlen(text), ", or added twice");
    if (*text) return text;
    if (factor && scale == 0) return "usually never written, or cleared before they were summed";
    if (near(scale, -1, FACTOR_NOISE) && factor) return "usually a sign";
    if (twice) return "usually added twice";
    for (int i = 0; i < count && !factor; i++) {
        const struct Size *s = &sizes[i];
        if (s->ranks && scale > 0.5 / s->size && scale < 1.5 / s->size)
            say_also("only one rank's share: the sum over ", s, " is missing or incomplete");
    }
    for (int i = 0; i < count && *text; i++)
        if (!sizes[i].ranks) say_also("some of ", &sizes[i], " are left out");
    return text;
}

const char *diagnose_loss(double loss, double expected) {
    text[0] = 0;
    if (near(loss, -expected, LOSS_NOISE)) return "usually a sign";
    for (int i = 0; i < count; i++) {
        const struct Size *s = &sizes[i];
        bool ranks = s->ranks;
        if (near(loss / expected, 1 / s->size, LOSS_NOISE))
            say_also(ranks ? "averaged twice over " : "scaled twice by 1 / ", s, "");
        if (near(loss / expected, s->size, LOSS_NOISE)) say_also("summed, and not averaged, over ", s, "");
        if (near(loss - expected, log(s->size), LOSS_NOISE) && ranks)
            say_also("gathered logits: the softmax counts the vocabulary once for each of ", s, "");
        if (near(expected - loss, log(s->size), LOSS_NOISE) && ranks)
            say_also("the softmax sums only one part of the vocabulary, of ", s, "");
    }
    return text;
}

const char *diagnose_count(double measured, double expected, const char *unit) {
    text[0] = 0;
    bool bytes = !strcmp(unit, "B");
    bool sent = bytes || !*unit;  // calls have no unit
    if (expected == 0)
        return measured > 0 && sent ? "usually a call that this technique replaces is still made" : "";
    if (measured == 0) return "usually a call that is never made, or a tensor that is never allocated";
    double ratio = measured / expected;
    for (int i = 0; i < count; i++) {
        const struct Size *s = &sizes[i];
        bool ranks = s->ranks;
        if (near(ratio, s->size, 1e-9))
            say_also(ranks ? bytes ? "whole tensors instead of shards over " : "once for each of "
                           : "once for each of ",
                     s, ranks && bytes ? "" : ", where once was due");
        if (near(ratio, 1 / s->size, 1e-9))
            say_also(ranks && bytes ? "sharded once more over " : "once for all of ", s,
                     ranks && bytes ? "" : ", where once for each was due");
        if (near(ratio, s->size / (s->size - 1), 1e-9) && ranks && bytes)
            say_also("a rank's own part is sent, too, on ", s, "");
        if (near(ratio, (s->size - 1) / s->size, 1e-9) && ranks) say_also("one part too few, on ", s, "");
    }
    if (*text) return text;
    if (ratio == 2)
        return bytes ? "usually done or held twice, or in a dtype of twice the width"
                     : "usually done twice";
    if (ratio == 0.5)
        return bytes ? "usually in a dtype of half the width, or half of it left out"
                     : "usually half of it left out";
    return text;
}
