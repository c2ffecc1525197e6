// find_config_search.c: the layouts of a model on a cluster, and the fastest that fit. Playbook: "Finding the
// Best Training Configuration". tp, cp, ep and the micro-batch are powers of two, pp and dp any numbers;
// schedules are AFAB, 1F1B, ZB-H1, and interleaved ones of a few numbers of chunks.
//
//     gpus = dp x pp x cp x tp      batch = dp x micro_batch x micro_batches
//
// Each layout is priced by closed forms. Then the best are clocked (cost_lone_step.c), one after another,
// until all others would be slower than those found even if their closed forms were somewhat too long. The
// clock of a layout stops when it is certain to be slower than those found, or not to fit.
// This file has no main: find_config.c uses it.
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "find_config.h"
#include "five_d.h"
#include "report/report.h"

enum { CLOCKED = 64 };          // at most so many of the best are clocked
#define CLOSED_FORM_SLACK 1.06  // a closed form is rarely longer than so many times the clocked step …
#define ZERO_BUBBLE_SLACK 1.12  // … but ZB-H1's with few micro-batches, in which W hides reductions as well
// (In steps of one to three micro-batches 1.14 was seen with other schedules, too.)

// ---- a layout as flags ----

Config found_config(const Goal *goal, const Found *f) {
    Config c = goal->model;
    c.tp = f->tp, c.cp = f->cp, c.pp = f->pp, c.dp = f->dp, c.ep = f->ep;
    c.micro_batch = f->micro_batch, c.grad_acc = f->micro_batches, c.recompute = f->recompute;
    config_set(&c, "sp", f->sp);
    config_set(&c, "vocab-parallel", f->tp > 1);
    config_set(&c, "context", CONTEXT_ZIGZAG);
    config_set(&c, "zero", f->zero);
    config_set(&c, "schedule", f->schedule);
    config_set(&c, "chunks", f->chunks);
    config_set(&c, "attention", 1);  // flash
    config_set(&c, "documents", -1);
    config_set(&c, "bucket-mb", 25);
    return c;
}

double found_mfu(const Goal *goal, const Found *f) {
    const Machine *sold = machine_find(goal->model.machine);
    double flops = config_step_flops(&goal->model, goal->sequences) / goal->gpus;
    return flops / f->time.step / machine_peak_flops(sold, BF16);
}

// ---- all of them ----

// Parts of the layouts on tp x cp ranks, by what else they depend on.
typedef struct Kept {
    int tp, cp, ep, recompute, sp;
    int64_t micro_batch;
    LoneParts parts;
} Kept;

typedef struct Space {
    const Goal *goal;
    Search *search;
    Kept *kept;
    int kepts;
    Found best[CLOCKED];
    int count;
} Space;

static const LoneParts *parts_of(Space *s, const Found *f) {
    for (int i = s->kepts - 1; i >= 0; i--) {
        const Kept *k = &s->kept[i];
        if (k->tp == f->tp && k->cp == f->cp && k->ep == f->ep && k->recompute == f->recompute &&
            k->sp == f->sp && k->micro_batch == f->micro_batch)
            return &k->parts;
    }
    s->kept = realloc(s->kept, (size_t)(s->kepts + 1) * sizeof *s->kept);
    CHECK(s->kept, "out of host memory for the parts of layouts");
    Config c = found_config(s->goal, f);
    s->kept[s->kepts] = (Kept){f->tp, f->cp, f->ep, f->recompute, f->sp, f->micro_batch, lone_parts(&c)};
    return &s->kept[s->kepts++].parts;
}

// Keeps the fastest, sorted.
static void keep(Space *s, const Found *f) {
    if (s->count == CLOCKED && f->quick >= s->best[CLOCKED - 1].quick) return;
    int i = s->count < CLOCKED ? s->count++ : CLOCKED - 1;
    for (; i > 0 && s->best[i - 1].quick > f->quick; i--) s->best[i] = s->best[i - 1];
    s->best[i] = *f;
}

static void price_layout(Space *s, const Found *layout) {
    Found f = *layout;
    if (s->goal->family && !s->goal->family(&f)) return;
    const LoneParts *parts = parts_of(s, &f);
    Config c = found_config(s->goal, &f);
    LoneMemory memory = lone_memory(&c, parts);
    s->search->legal++;
    if (!(memory.peak <= s->goal->memory)) return;
    s->search->fit++;
    f.quick = lone_time(&c, parts).step;
    f.parts = *parts;
    keep(s, &f);
}

// Schedules, and stages on a rank, of a pipeline.
static void each_schedule(Space *s, Found f) {
    static const struct {
        ScheduleKind kind;
        int chunks;
    } way[] = {{ONE_F_ONE_B, 1}, {AFAB, 1},        {ZB_H1, 1},       {INTERLEAVED, 2},
               {INTERLEAVED, 3}, {INTERLEAVED, 4}, {INTERLEAVED, 5}, {INTERLEAVED, 8}};
    int ways = f.pp == 1 ? 1 : sizeof way / sizeof *way;
    for (int i = 0; i < ways; i++) {
        f.schedule = way[i].kind, f.chunks = way[i].chunks;
        int stages = f.pp * f.chunks;
        if (stages > s->goal->model.layers || stages > STAGES_MOST) continue;
        if (f.chunks > 1 && (f.micro_batches % f.pp || s->goal->model.layers % stages)) continue;
        if (f.schedule == ZB_H1 && (f.micro_batches < f.pp || s->goal->model.experts)) continue;
        price_layout(s, &f);
    }
}

// The same ranks with each stage of ZeRO, full or no recomputation, with and without sequence parallelism.
// Flash attention stores no scores, so that selective recomputation would take time and save no memory.
static void each_sharding(Space *s, Found f) {
    bool experts = s->goal->model.experts > 0;
    for (f.recompute = RECOMPUTE_NONE; f.recompute <= RECOMPUTE_FULL; f.recompute += RECOMPUTE_FULL)
        for (f.sp = experts && f.tp > 1; f.sp <= (f.tp > 1); f.sp++)
            for (f.zero = 0; f.zero <= (f.dp * f.cp > 1 ? 3 : 0); f.zero++) each_schedule(s, f);
}

static void each_batch(Space *s, Found f) {
    int64_t own = s->goal->sequences / f.dp;
    if (s->goal->sequences % f.dp) return;
    for (f.micro_batch = 1; f.micro_batch <= own && f.micro_batch <= MICRO_BATCH_MOST; f.micro_batch *= 2) {
        if (own % f.micro_batch) break;
        f.micro_batches = own / f.micro_batch;
        if (f.micro_batches > MICRO_BATCHES_MOST) continue;
        // With experts each rank of tp has its own rows.
        if (s->goal->model.experts && f.micro_batch * (s->goal->model.seq / f.cp) % f.tp) continue;
        int64_t fit = s->search->fit, priced = s->search->legal;
        each_sharding(s, f);
        if (s->search->fit == fit && s->search->legal > priced) break;  // nor will larger ones fit
    }
}

static bool legal(const Goal *goal, const Found *f) {
    const Config *c = &goal->model;
    return (c->kv_heads % f->tp == 0 || f->tp % c->kv_heads == 0) && c->heads % f->tp == 0 &&
           config_dense_width(c) % f->tp == 0 && f->pp <= c->layers && f->pp <= RANKS_MOST &&
           (f->cp == 1 || (c->seq % (2 * f->cp) == 0 && c->seq / f->cp >= 128)) &&
           f->dp * f->cp * f->tp % f->ep == 0;
}

static int by_seconds(const void *a, const void *b) {
    double x = ((const Found *)a)->time.step, y = ((const Found *)b)->time.step;
    return (x > y) - (x < y);
}

// False: it takes more seconds than these, or does not fit.
static bool clocked(const Goal *goal, Found *f, double seconds) {
    Config c = found_config(goal, f);
    f->time = lone_step(&c, &f->parts, (LoneLimits){seconds, goal->memory}, &f->memory);
    return f->time.step <= seconds && f->memory.peak <= goal->memory;
}

// Clocks the best until all others, even by the closed form, are slower than those wanted.
static void clock_best(Space *s, int wanted) {
    Search *found = s->search;
    for (int i = 0; i < s->count; i++) {
        Found *f = &s->best[i];
        bool full = found->count == wanted;
        const double slack = f->schedule == ZB_H1 ? ZERO_BUBBLE_SLACK : CLOSED_FORM_SLACK;
        const double slowest = full ? found->best[wanted - 1].time.step : INFINITY;
        if (f->quick > slack * slowest) continue;
        progress_on_terminal(i, s->count, "the best are clocked");
        if (!clocked(s->goal, f, slowest)) continue;
        found->best[found->count++] = *f;
        qsort(found->best, (size_t)found->count, sizeof *found->best, by_seconds);
        if (full) found->count--;
    }
    if (s->count > 0) progress_on_terminal(s->count, s->count, "");
}

Search search(const Goal *goal, int wanted) {
    Search found = {NULL, 0, 0, 0};
    Space s = {.goal = goal, .search = &found};
    int experts = goal->model.experts > 0 ? (int)goal->model.experts : 1;
    int done = 0, all = 1;  // pairs of tp and cp
    for (int tp = 1; tp <= goal->gpus; tp *= 2)
        for (int cp = 1; tp * cp <= goal->gpus; cp *= 2) all++;
    for (int tp = 1; tp <= goal->gpus; tp *= 2)
        for (int cp = 1; tp * cp <= goal->gpus; cp *= 2, s.kepts = 0) {
            progress_on_terminal(++done, all, "layouts are priced");
            for (int pp = 1; tp * cp * pp <= goal->gpus; pp++)
                for (int ep = 1; ep <= experts; ep *= 2) {
                    if (goal->gpus % (tp * cp * pp)) continue;
                    Found f = {.tp = tp, .cp = cp, .pp = pp, .dp = goal->gpus / (tp * cp * pp), .ep = ep};
                    if (legal(goal, &f) && experts % ep == 0) each_batch(&s, f);
                }
        }
    progress_on_terminal(all, all, "");
    free(s.kept);
    found.best = host_alloc((size_t)(wanted + 1) * sizeof *found.best);
    clock_best(&s, wanted);
    return found;
}

// ---- why, and what next ----

// What costs most, as a share of the step's time, and what to try.
static const char *found_limit(const Goal *goal, const Found *f) {
    static char text[160];
    const LoneTime *t = &f->time;
    Config c = found_config(goal, f);
    double rows = (double)(f->micro_batch * goal->model.seq) / f->cp;
    double q = 2 * rows * (double)goal->model.hidden * (double)goal->model.hidden / f->tp;
    struct {
        double seconds;
        const char *what;
    } cost[] = {
        {t->bubble, "bubble: more micro-batches"},
        {t->exposed_tp_cp, f->ep > 1 ? "exposed tp, cp, ep: less of it" : "exposed tp, cp: less of it"},
        {t->exposed_dp, "exposed dp: larger mbs, or pp"},
        {lone_recomputes(&c, &f->parts), "recomputes: tp or pp for memory"},
        {(1 - clock_efficiency(WORK_MATMUL, q)) * (t->computed - t->exposed_tp_cp),
         f->tp > 1 ? "small multiplies: less tp" : "small multiplies: larger mbs"}};
    int most = 0;
    for (int i = 1; i < 5; i++)
        if (cost[i].seconds > cost[most].seconds) most = i;
    snprintf(text, sizeof text, "%2.0f%% %s", 100 * cost[most].seconds / t->step, cost[most].what);
    return text;
}

static const char *schedule_text(const Found *f) {
    static const char *const names[] = {"afab", "1f1b", "1f1b", "zb_h1"};
    static char text[32];
    if (f->pp == 1) return "-";
    snprintf(text, sizeof text, f->chunks > 1 ? "%s/%d" : "%s", names[f->schedule], f->chunks);
    return text;
}

// Words of a command line.
typedef struct Words {
    char text[1024];
    size_t used;
} Words;

static void add(Words *w, const char *format, ...) {
    va_list values;
    va_start(values, format);
    w->used += (size_t)vsnprintf(w->text + w->used, sizeof w->text - w->used, format, values);
    va_end(values);
    CHECK(w->used < sizeof w->text, "the command line is longer than %zu bytes", sizeof w->text);
}

// --model, which overrides a program's own defaults, and whatever differs from it in the shape.
static void add_shape(Words *w, const Config *c) {
    char *arguments[] = {(char *)base_program(), "--model", (char *)c->model, NULL};
    Config named = config_parse(3, arguments, "", CONFIG_MODEL | CONFIG_EXPERTS, NULL, NULL, 0);
    const struct {
        const char *flag;
        int64_t value, standard;
    } size[] = {{"layers", c->layers, named.layers},
                {"hidden", c->hidden, named.hidden},
                {"heads", c->heads, named.heads},
                {"kv-heads", c->kv_heads, named.kv_heads},
                {"head-size", c->head_size, named.head_size},
                {"ffn", c->ffn, named.ffn},
                {"vocab", c->vocab, named.vocab},
                {"experts", c->experts, named.experts},
                {"top-k", c->top_k, named.top_k},
                {"expert-ffn", c->expert_ffn, named.expert_ffn},
                {"shared-experts", c->shared_experts, named.shared_experts},
                {"expert-groups", c->expert_groups, named.expert_groups},
                {"groups-kept", c->groups_kept, named.groups_kept}};
    add(w, "--model %s", c->model);
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        if (size[i].value != size[i].standard) add(w, " --%s %ld", size[i].flag, size[i].value);
    if (c->moe != named.moe) add(w, " --moe %s", c->moe == MOE_DEEPSEEK ? "deepseek" : "mixtral");
    if (c->routed_scale != named.routed_scale) add(w, " --routed-scale %.17g", c->routed_scale);
    if (c->tied && !named.tied) add(w, " --tied");
}

// The flags of train_5d, whose own defaults are --pp 2 --tp 2 --zero 1 --bucket-mb 0.1.
static void print_command(const Goal *goal, const Found *f) {
    static const char *const schedules[] = {"afab", "one_f_one_b", "interleaved", "zb_h1"};
    const Config *c = &goal->model;
    Words w = {.used = 0};
    add_shape(&w, c);
    add(&w, " --dtype bf16 --optimizer adamw --seq %ld --ranks %d --dp %d --pp %d --tp %d --zero %d",
        c->seq, goal->gpus, f->dp, f->pp, f->tp, f->zero);
    if (f->tp > 1) add(&w, " --vocab-parallel");
    if (f->sp) add(&w, " --sp");
    if (f->cp > 1) add(&w, " --cp %d --context zigzag", f->cp);
    if (f->cp == 1) add(&w, " --attention flash");
    if (f->pp > 1) add(&w, " --schedule %s", schedules[f->schedule]);
    if (f->chunks > 1) add(&w, " --chunks %d", f->chunks);
    if (f->ep > 1) add(&w, " --ep %d", f->ep);
    if (f->recompute) add(&w, " --recompute full");
    if (f->zero == 0) add(&w, " --bucket-mb 25");  // ZeRO has none
    if (strcmp(c->machine, "dgx-h100")) add(&w, " --machine %s", c->machine);
    int per_node = machine_find(c->machine)->gpus_per_node;
    if (clock_gpus_per_node() != per_node) add(&w, " --gpus-per-node %d", clock_gpus_per_node());
    say("\nThe best of them:\n  build/08_mixed_precision/train_5d --no-check %s --micro-batch %ld "
        "--grad-acc %ld",
        w.text, f->micro_batch, f->micro_batches);
}

static void report_found(const Goal *goal, const Found *f, int place) {
    char *group = format_text("layout %d", place);
    const struct {
        const char *name;
        double value;
    } figure[] = {{"tp", f->tp},
                  {"cp", f->cp},
                  {"pp", f->pp},
                  {"dp", f->dp},
                  {"ep", f->ep},
                  {"zero", f->zero},
                  {"sp", f->sp},
                  {"chunks", f->chunks},
                  {"schedule", f->schedule},
                  {"recompute", f->recompute},
                  {"micro-batch", (double)f->micro_batch},
                  {"micro-batches", (double)f->micro_batches}};
    for (size_t i = 0; i < sizeof figure / sizeof *figure; i++)
        report_number(group, figure[i].name, figure[i].value, "");
    report_number(group, "step", f->time.step, "s");
    report_number(group, "peak memory", f->memory.peak, "B");
    report_number(group, "mfu", found_mfu(goal, f), "");
    free(group);
}

void search_print(const Goal *goal, const Search *s) {
    say("\n%lld legal layouts, %lld of them fit into %s of a GPU; the best, clocked as this book's own "
        "steps.",
        (long long)s->legal, (long long)s->fit, bytes_text(goal->memory));
    say("Such a step is off by %.0f%% in the median, and at worst by %.0f%%, from %d published runs of "
        "other",
        100 * FITTED_MEDIAN, 100 * FITTED_WORST, FITTED_RUNS);
    say("programs, which the fit had not seen. 2s: tp 2 with sequence parallelism; 1f1b/5: interleaved, 5 "
        "chunks.\n");
    report_number("errors", "median", FITTED_MEDIAN, "");
    report_number("errors", "worst", FITTED_WORST, "");
    say("  %3s %3s %3s %4s %3s %4s %4s %5s %-8s %-5s %8s %9s %5s  %s", "tp", "cp", "pp", "dp", "ep", "zero",
        "mbs", "m", "schedule", "again", "memory", "step", "MFU", "costs most: try");
    for (int i = 0; i < s->count; i++) {
        const Found *f = &s->best[i];
        say("  %2d%s %3d %3d %4d %3d %4d %4ld %5ld %-8s %-5s %8s %7.3f s %4.1f%%  %s", f->tp,
            f->sp ? "s" : " ", f->cp, f->pp, f->dp, f->ep, f->zero, f->micro_batch, f->micro_batches,
            schedule_text(f), f->recompute ? "full" : "none", bytes_text(f->memory.peak), f->time.step,
            100 * found_mfu(goal, f), found_limit(goal, f));
        report_found(goal, f, i + 1);
    }
    if (s->count > 0) print_command(goal, &s->best[0]);
    if (goal->model.experts)
        say("\nExperts are whole on a rank (etp = 1), and with tp beside sequence parallelism alone, as "
            "the programs have\nthem; all take the same number of tokens.");
    say_left_out();
}
