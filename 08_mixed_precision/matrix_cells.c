// matrix_cells.c: every combination of techniques, numbered. Playbook: "5D parallelism in a nutshell".
//
// A cell is a number in a mixed base: dp, pp, cp, tp of 1 to 4 each, experts over ep or none, ZeRO's stage,
// sequence parallelism, recomputation, precision. The schedule, the method of context parallelism,
// vocabulary parallelism and tied embeddings are drawn from the number. This file has no main.
#include <stdlib.h>

#include "matrix.h"
#include "tensor/rng.h"

// ---- what may be chosen; a further recipe, schedule or method is one more word ----

enum { MOST_CHOICES = 12 };
typedef struct Values {
    const char *flag, *value[MOST_CHOICES];  // value[0]: the default
} Values;

static const Values values[FLAGS] = {
    [FLAG_DP] = {"--dp", {"1", "2", "3", "4"}},
    [FLAG_PP] = {"--pp", {"1", "2", "3", "4"}},
    [FLAG_CP] = {"--cp", {"1", "2", "3", "4"}},
    [FLAG_TP] = {"--tp", {"1", "2", "3", "4"}},
    [FLAG_EP] = {"--experts 4 --ep", {"", "1", "2", "4"}},
    [FLAG_ZERO] = {"--zero", {"0", "1", "2", "3", "hybrid"}},
    [FLAG_SP] = {"--sp", {"", ""}},
    [FLAG_RECOMPUTE] = {"--recompute", {"none", "selective", "full"}},
    [FLAG_PRECISION] = {"--dtype",
                        {"f64", "f32", "bf16", "f16 --loss-scale dynamic", "bf16 --master none",
                         "f64 --fp8 te-delayed"}},
    [FLAG_SCHEDULE] = {"--schedule",
                       {"one_f_one_b", "afab", "interleaved", "zb_h1", "zb_h2", "zb_v", "zb_auto",
                        "dualpipe", "dualpipe_v"}},
    [FLAG_CONTEXT] = {"--context", {"ring", "zigzag", "all-gather", "ulysses"}},
    [FLAG_VOCAB] = {"--vocab-parallel", {"", ""}},
    [FLAG_TIED] = {"--tied", {"", ""}},
};
static const ScheduleKind schedules[] = {ONE_F_ONE_B, AFAB,    INTERLEAVED, ZB_H1,     ZB_H2,
                                         ZB_V,        ZB_AUTO, DUALPIPE,    DUALPIPE_V};
static const struct {
    DType dtype;
    bool no_masters;
    int fp8;
} precisions[] = {{F64, false, 0}, {F32, false, 0}, {BF16, false, 0},
                  {F16, false, 0}, {BF16, true, 0}, {F64, false, TE_DELAYED}};

static int choices(Flag flag) {
    int count = 0;
    while (count < MOST_CHOICES && values[flag].value[count]) count++;
    return count;
}

int64_t matrix_cells(void) {
    int64_t cells = 1;
    for (Flag i = 0; i < FLAGS_WALKED; i++) cells *= choices(i);
    return cells;
}

Cell matrix_cell(int64_t number) {
    Cell cell = {.number = number};
    int64_t rest = number;
    for (Flag i = 0; i < FLAGS_WALKED; i++) {
        cell.choice[i] = (int)(rest % choices(i));
        rest /= choices(i);
    }
    for (Flag i = FLAGS_WALKED; i < FLAGS; i++)
        cell.choice[i] =
            (int)(rng_uniform(1, RNG_TEST, (uint64_t)(number * FLAGS + i)) * (double)choices(i));
    if (cell.choice[FLAG_PP] == 0) cell.choice[FLAG_SCHEDULE] = 0;
    if (cell.choice[FLAG_CP] == 0) cell.choice[FLAG_CONTEXT] = 0;
    if (cell.choice[FLAG_TP] == 0) cell.choice[FLAG_VOCAB] = 0;
    return cell;
}

int matrix_ranks(const Cell *cell) {
    const int *choice = cell->choice;
    return (choice[FLAG_DP] + 1) * (choice[FLAG_PP] + 1) * (choice[FLAG_CP] + 1) * (choice[FLAG_TP] + 1);
}

// ---- as a run ----

// Each stage needs a layer, except the last, which has the head.
static int64_t layers_of(const Cell *cell) {
    ScheduleKind kind = schedules[cell->choice[FLAG_SCHEDULE]];
    int64_t pp = cell->choice[FLAG_PP] + 1;
    bool two = kind == INTERLEAVED || kind == ZB_V || kind == DUALPIPE_V;
    return pp == 1 ? 2 : (two ? 2 : 1) * pp - (pp > 2);
}

// Odd sizes, unequal parts, fewer key/value heads than ranks; 6 samples in a step, or 8 where 4 ranks of dp
// share them. SGD: AdamW would hide a wrong scale.
Config matrix_config(const Cell *cell) {
    static Config base;
    if (!base.layers)
        base = config_default(
            "hidden=48 heads=24 ffn=48 vocab=257 micro-batch=1 steps=2 optimizer=sgd lr=0.1 clip=0.5");
    Config c = base;
    const int *choice = cell->choice;
    c.dp = choice[FLAG_DP] + 1, c.pp = choice[FLAG_PP] + 1;
    c.cp = choice[FLAG_CP] + 1, c.tp = choice[FLAG_TP] + 1;
    c.dtype = precisions[choice[FLAG_PRECISION]].dtype;
    c.recompute = choice[FLAG_RECOMPUTE];
    c.tied = choice[FLAG_TIED];
    c.layers = layers_of(cell);
    c.kv_heads = c.tp == 3 ? 3 : 2;
    c.grad_acc = c.dp == 4 ? 2 : 6 / c.dp;
    c.seq = 13;
    if (choice[FLAG_EP]) {
        c.seq = 24;  // what 2 cp divides
        c.experts = 4;
        c.top_k = c.dtype == F64 ? 2 : 4;  // a rounded score must not change which experts are chosen
        c.ep = 1 << (choice[FLAG_EP] - 1);
    }
    config_set(&c, "master", precisions[choice[FLAG_PRECISION]].no_masters);
    config_set(&c, "fp8", precisions[choice[FLAG_PRECISION]].fp8);
    config_set(&c, "loss-scale", 2);  // dynamic
    config_set(&c, "scale", 1024);
    config_set(&c, "scale-interval", 2000);
    config_set(&c, "bucket-mb", 0.05);
    config_set(&c, "documents", -1);
    config_set(&c, "chunks", 2);
    config_set(&c, "shard-ranks", c.dp * c.cp % 2 == 0 ? 2 : 0);
    config_set(&c, "zero", choice[FLAG_ZERO]);
    config_set(&c, "sp", choice[FLAG_SP]);
    config_set(&c, "schedule", schedules[choice[FLAG_SCHEDULE]]);
    config_set(&c, "context", choice[FLAG_CONTEXT]);
    config_set(&c, "vocab-parallel", choice[FLAG_VOCAB]);
    return c;
}

const char *matrix_text(const Cell *cell) {
    static char text[256];
    int used = 0;
    text[0] = '\0';
    for (Flag i = 0; i < FLAGS; i++) {
        const Values *v = &values[i];
        if (cell->choice[i] == 0) continue;
        const char *value = v->value[cell->choice[i]];
        used += snprintf(text + used, sizeof text - (size_t)used, "%s%s%s%s", used ? " " : "", v->flag,
                         *value ? " " : "", value);
    }
    return text;
}

// ---- pairs ----

enum { MOST_VALUES = FLAGS * MOST_CHOICES, CANDIDATES = 64 };
typedef bool Pairs[MOST_VALUES][MOST_VALUES];

// Pairs of this cell that are not yet `met`; meets them if asked to.
static int new_pairs(const Cell *cell, Pairs met, bool meet) {
    int count = 0;
    for (Flag i = 0; i < FLAGS; i++)
        for (Flag j = 0; j < i; j++) {
            bool *pair = &met[i * MOST_CHOICES + (unsigned)cell->choice[i]]
                             [j * MOST_CHOICES + (unsigned)cell->choice[j]];
            count += !*pair;
            if (meet) *pair = true;
        }
    return count;
}

static void *pairs_of(CellList cells) {
    bool(*met)[MOST_VALUES] = calloc(1, sizeof(Pairs));
    CHECK(met, "out of host memory for the pairs of %lld cells", (long long)cells.count);
    for (int64_t i = 0; i < cells.count; i++) new_pairs(&cells.cell[i], met, true);
    return met;
}

int64_t matrix_pairwise(CellList list, CellList elsewhere, uint64_t seed) {
    Cell *cell = list.cell;
    int64_t cells = list.count;
    bool(*met)[MOST_VALUES] = pairs_of(elsewhere);
    int64_t chosen = 0;
    for (uint64_t draws = 0; chosen < cells;) {
        int64_t best = -1, first = chosen;
        int most = 0;
        for (int i = 0; i < CANDIDATES; i++) {
            double drawn = rng_uniform(seed, RNG_TEST, draws++);
            int64_t at = chosen + (int64_t)(drawn * (double)(cells - chosen));
            int count = new_pairs(&cell[at], met, false);
            if (count > most) best = at, most = count;
        }
        while (best < 0 && first < cells && !new_pairs(&cell[first], met, false)) first++;
        if (best < 0 && first == cells) break;
        if (best < 0) best = first;
        Cell next = cell[best];
        new_pairs(&next, met, true);
        cell[best] = cell[chosen];
        cell[chosen++] = next;
    }
    free(met);
    return chosen;
}

int64_t matrix_missing_pairs(CellList cells, int64_t chosen, CellList elsewhere) {
    bool(*met)[MOST_VALUES] = pairs_of(elsewhere);
    int64_t missing = 0;
    for (int64_t i = 0; i < cells.count; i++) {
        int count = new_pairs(&cells.cell[i], met, true);
        if (i >= chosen) missing += count;
    }
    free(met);
    return missing;
}
